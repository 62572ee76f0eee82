"""The data source `format("eventpump")`, as Spark finds it. Its parts are imported when they are used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.types import StructType


def register(spark: SparkSession) -> None:
    """Make `format("eventpump")` known to a Spark session, classic or Connect.

    Where the package is installed beside Spark, sessions find it by themselves (`pyspark_eventpump`).
    """
    spark.dataSource.register(EventPumpDataSource)


class EventPumpDataSource(DataSource):
    """Reads and writes hubs. Made by Spark, often and in many processes: it holds the user's options and no more."""

    @classmethod
    def name(cls) -> str:
        """Return the format's name."""
        return "eventpump"

    def schema(self) -> str:
        """Return the columns that are read unless the user names some.

        Raises:
            ConfigurationError: An option cannot work.
        """
        from eventpump.spark.source.options import SourceOptions
        from eventpump.spark.source.schema import COLUMN_TYPES, PROPERTY_COLUMNS, ddl

        options = SourceOptions.from_options(self.options)
        return ddl(name for name in COLUMN_TYPES if options.include_properties or name not in PROPERTY_COLUMNS)

    def reader(self, schema: StructType) -> DataSourceReader:
        """Make what reads a batch.

        Raises:
            ConfigurationError: An option or a column cannot work.
        """
        from eventpump.spark.source.options import SourceOptions
        from eventpump.spark.source.readers import BatchReader, columns_of

        return BatchReader(SourceOptions.from_options(self.options).for_batch(), columns_of(schema))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        """Make what reads for a query.

        Raises:
            ConfigurationError: An option or a column cannot work.
        """
        from eventpump.spark.source.options import SourceOptions, without_effect
        from eventpump.spark.source.readers import StreamReader, columns_of

        options = SourceOptions.from_options(self.options).for_stream()
        return StreamReader(options, columns_of(schema), without_effect(self.options))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Make what writes a batch. Raises as :class:`eventpump.spark.sink.data_source_writer.BatchWriter`."""
        from eventpump.spark.sink.data_source_writer import BatchWriter

        return BatchWriter(self.options, schema, overwrite=overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802 - Spark's name
        """Return the writer of a query. Raises as :class:`eventpump.spark.sink.data_source_writer.StreamWriter`."""
        from eventpump.spark.sink.data_source_writer import StreamWriter

        return StreamWriter(self.options, schema, overwrite=overwrite)
