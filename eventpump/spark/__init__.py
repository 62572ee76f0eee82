"""The Spark pipeline: a streaming source and a foreachBatch producer. Needs the extra `eventpump[spark]`."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eventpump.spark.data_source import register as register
    from eventpump.spark.sink.foreach_batch import BadRow as BadRow
    from eventpump.spark.sink.foreach_batch import BatchReceipt as BatchReceipt
    from eventpump.spark.sink.foreach_batch import ForeachBatchWriter as ForeachBatchWriter
    from eventpump.spark.sink.foreach_batch import PublishedRows as PublishedRows
    from eventpump.spark.sink.foreach_batch import foreach_batch_producer as foreach_batch_producer
    from eventpump.spark.source.lag import PartitionLag as PartitionLag
    from eventpump.spark.source.lag import QueryLag as QueryLag
    from eventpump.spark.source.progress import LagListener as LagListener
    from eventpump.spark.source.progress import with_lag as with_lag

# Every Python worker imports this package; what only the driver needs is not loaded there.
_HOMES = {
    "BadRow": "sink.foreach_batch",
    "BatchReceipt": "sink.foreach_batch",
    "ForeachBatchWriter": "sink.foreach_batch",
    "LagListener": "source.progress",
    "PartitionLag": "source.lag",
    "PublishedRows": "sink.foreach_batch",
    "QueryLag": "source.lag",
    "foreach_batch_producer": "sink.foreach_batch",
    "register": "data_source",
    "with_lag": "source.progress",
}

if not TYPE_CHECKING:  # to checkers it would mean that every name exists
    __all__ = sorted(_HOMES)

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
