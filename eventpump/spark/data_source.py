"""The data source `format("eventpump")` that Spark loads. Its parts are imported when they are used."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from eventpump.errors import ConfigurationError

try:
    from pyspark.errors import AnalysisException
    from pyspark.sql import datasource
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
        f'format("eventpump") needs PySpark 4.0 or later, and this is {_version}: upgrade Spark. '
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
    Registered, it also knows how many tasks a classic session runs at a time, if its executors are fixed: the default
    of the option `slots`, by which a batch has no more tasks than are of use. Spark then logs once for the session that
    a data source was replaced.

    Raises:
        ConfigurationError: The package comes from a wheel in `--py-files`, which Spark gives to the driver alone.
    """
    if spark in _registered:
        return
    _check_shipping(spark)
    java = getattr(spark, "_jsparkSession", None)  # Connect has none
    source: type[EventPumpDataSource] = EventPumpDataSource
    if (found := None if java is None else slots_of(spark)) is not None:

        class Registered(EventPumpDataSource):
            """The format in a session of so many slots; being local, it is pickled by value."""

            slots = found

        source = Registered
    if found or java is None or not java.sessionState().dataSourceManager().dataSourceExists(source.name()):
        try:
            spark.dataSource.register(source)
        except AnalysisException as error:
            # A server of Spark 4.0 that has found the format by itself refuses another one of its name.
            if error.getCondition() != "DATA_SOURCE_ALREADY_EXISTS":
                raise
    _registered.add(spark)


def slots_of(spark: SparkSession) -> int | None:
    """Return how many tasks a session runs at a time; None where its executors come and go, or are not stated."""
    context = spark.sparkContext
    if (context.master or "").startswith("local["):
        return context.defaultParallelism
    conf = context.getConf()
    cores, executors = conf.get("spark.executor.cores"), conf.get("spark.executor.instances")
    most = conf.get("spark.cores.max")
    if conf.get("spark.dynamicAllocation.enabled", "false") == "true" or not (most or (cores and executors)):
        return None
    return max(1, int(most or int(cores or 1) * int(executors or 1)) // int(conf.get("spark.task.cpus", "1") or 1))


def _check_shipping(spark: SparkSession) -> None:
    """Check that Spark's own processes can import what the driver has imported: else a `ConfigurationError`."""
    root = _root()
    jvm = getattr(spark, "_jvm", None)  # Connect has none
    if jvm is None or root.suffix != ".whl":
        return
    shipped = (Path(each).name for each in spark.sparkContext.getConf().get("spark.submit.pyFiles", "").split(","))
    inherited = (jvm.System.getenv("PYTHONPATH") or "").split(os.pathsep)
    if root.name in shipped and str(root) not in inherited:
        problem = (
            f"Spark puts zip files on the path of its Python processes, and no wheels: rename {root.name} to *.zip"
        )
        raise ConfigurationError("--py-files", problem)


def _root() -> Path:
    """Return the entry of the path from which the package was imported: a directory, or a zip file."""
    return Path(__file__).absolute().parents[2]


class EventPumpDataSource(DataSource):
    """Reads and writes hubs. Spark creates it often and in many processes: it holds only the user's options."""

    slots: int | None = None
    """The default of the option `slots`."""

    def __reduce__(self) -> tuple[Callable[[str, Any, int | None], DataSource], tuple[str, Any, int | None]]:
        """Pickle it so that it can be loaded where the package is not on the path yet.

        Spark starts a query's reader process on the driver's machine without the files of `--py-files`: it looks for
        them in a directory that it does not create. So the pickle names the path from which they were imported.
        """

        # Being local, it is pickled by value: it has to run without this module, and without its names.
        def restore(root: str, options: Any, slots: int | None) -> DataSource:
            import importlib.util
            import os.path
            import sys

            if importlib.util.find_spec("eventpump") is None:
                if not os.path.exists(root):
                    raise ImportError(
                        f"eventpump is not installed for {sys.executable}, in which Spark runs the source, and {root} "
                        "is not on this machine: install eventpump[spark] there, or set PYTHONPATH"
                    )
                sys.path.append(root)
            from eventpump.spark.data_source import EventPumpDataSource

            source = EventPumpDataSource(options)
            source.slots = slots
            return source

        return restore, (str(_root()), self.options, self.slots)

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
        from eventpump.spark.source.readers import check_consumer_groups
        from eventpump.spark.source.schema import COLUMN_TYPES, HUB_COLUMN, PROPERTY_COLUMNS, TYPE_COLUMNS, ddl

        hubs = SourceOptions.each_hub(self.options)
        check_consumer_groups(hubs)
        columns = [each for each in COLUMN_TYPES if hubs[0].include_properties or each not in PROPERTY_COLUMNS]
        columns += TYPE_COLUMNS if hubs[0].include_property_types else ()
        return ddl(columns if len(hubs) == 1 else [*columns, HUB_COLUMN])

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the reader of a batch. Raises `ConfigurationError` if an option or a column is invalid."""
        from eventpump.spark.source.options import SourceOptions
        from eventpump.spark.source.readers import BatchReader, columns_of

        hubs = SourceOptions.each_hub(self.options)
        return BatchReader([each.for_batch(self.slots) for each in hubs], columns_of(schema))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        """Return the reader of a query. Raises as `reader`."""
        from eventpump.spark.source.options import SourceOptions, without_effect
        from eventpump.spark.source.readers import StreamReader, columns_of

        hubs = SourceOptions.each_hub(self.options)
        own = [each.for_stream(self.slots) for each in hubs]
        return StreamReader(own, columns_of(schema), without_effect(self.options))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Return the writer of a batch. Raises like :class:`eventpump.spark.sink.data_source_writer.BatchWriter`."""
        from eventpump.spark.sink.data_source_writer import BatchWriter

        return BatchWriter(self.options, schema, overwrite=overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802 - Spark's name
        """Return the writer of a query. Raises like :class:`eventpump.spark.sink.data_source_writer.StreamWriter`.

        Raises:
            ConfigurationError: This is Spark 4.0, whose queries have no writers of Arrow batches.
        """
        if not hasattr(datasource, "DataSourceStreamArrowWriter"):
            problem = (
                "a query writes with format(...) from Spark 4.1 on; foreach_batch_producer(...) writes with this one"
            )
            raise ConfigurationError('format("eventpump")', problem)
        from eventpump.spark.sink.data_source_writer import StreamWriter

        return StreamWriter(self.options, schema, overwrite=overwrite)
