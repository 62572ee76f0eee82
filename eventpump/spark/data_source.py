"""The data source `format("eventpump")` that Spark loads. Its parts are imported when they are used."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Final

from eventpump.errors import ConfigurationError

try:
    from pyspark.sql.datasource import (
        DataSource,
        DataSourceReader,
        DataSourceStreamReader,
        DataSourceStreamWriter,
        DataSourceWriter,
    )
except ModuleNotFoundError as error:
    try:
        from pyspark import __version__ as _version
    except ModuleNotFoundError:
        raise ConfigurationError("pyspark", "is not installed: pip install 'eventpump[spark]'") from error
    raise ConfigurationError(
        "pyspark",
        f'format("eventpump") needs PySpark 4.1 or later, and this is {_version}: upgrade Spark. '
        "foreach_batch_producer works from Spark 3.5 on",
    ) from error

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.types import StructType


_registered: Final[weakref.WeakSet[Any]] = weakref.WeakSet()
"""The sessions with which this process registered the format."""


def register(spark: SparkSession) -> None:
    """Register `format("eventpump")` with a Spark session, classic or Connect. May be called any number of times.

    If the package is installed in Spark's environment, sessions find the format by themselves (`pyspark_eventpump`).
    Where a classic session has found it, or the format was registered already, this does nothing: Spark would log a
    warning that it replaces a data source.
    """
    if spark in _registered:
        return
    java = getattr(spark, "_jsparkSession", None)  # Connect has none
    if java is None or not java.sessionState().dataSourceManager().dataSourceExists(EventPumpDataSource.name()):
        spark.dataSource.register(EventPumpDataSource)
    _registered.add(spark)


class EventPumpDataSource(DataSource):
    """Reads and writes hubs. Spark creates it often and in many processes: it holds only the user's options."""

    @classmethod
    def name(cls) -> str:
        """Return the format's name."""
        return "eventpump"

    def schema(self) -> str:
        """Return the columns that are read unless the user specifies a schema. Spark calls it in `load`.

        Raises:
            ConfigurationError: An option is invalid, or the consumer group does not exist.
        """
        from eventpump.spark.source.options import SourceOptions
        from eventpump.spark.source.readers import check_consumer_group
        from eventpump.spark.source.schema import COLUMN_TYPES, PROPERTY_COLUMNS, ddl

        options = SourceOptions.from_options(self.options)
        check_consumer_group(options)
        return ddl(name for name in COLUMN_TYPES if options.include_properties or name not in PROPERTY_COLUMNS)

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the reader of a batch.

        Raises:
            ConfigurationError: An option or a column is invalid.
        """
        from eventpump.spark.source.options import SourceOptions
        from eventpump.spark.source.readers import BatchReader, columns_of

        return BatchReader(SourceOptions.from_options(self.options).for_batch(), columns_of(schema))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        """Return the reader of a query.

        Raises:
            ConfigurationError: An option or a column is invalid.
        """
        from eventpump.spark.source.options import SourceOptions, without_effect
        from eventpump.spark.source.readers import StreamReader, columns_of

        options = SourceOptions.from_options(self.options).for_stream()
        return StreamReader(options, columns_of(schema), without_effect(self.options))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Return the writer of a batch. Raises like :class:`eventpump.spark.sink.data_source_writer.BatchWriter`."""
        from eventpump.spark.sink.data_source_writer import BatchWriter

        return BatchWriter(self.options, schema, overwrite=overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802 - Spark's name
        """Return the writer of a query. Raises like :class:`eventpump.spark.sink.data_source_writer.StreamWriter`."""
        from eventpump.spark.sink.data_source_writer import StreamWriter

        return StreamWriter(self.options, schema, overwrite=overwrite)
