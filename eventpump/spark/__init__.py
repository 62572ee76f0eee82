"""The Spark pipeline: a streaming source and a foreachBatch producer. Needs the extra `eventpump[spark]`."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eventpump.spark.data_source import register
    from eventpump.spark.foreach_batch import BatchReceipt, ForeachBatchWriter, PublishedRows, foreach_batch_producer
    from eventpump.spark.lag import PartitionLag, QueryLag
    from eventpump.spark.progress import LagListener

__all__ = [
    "BatchReceipt",
    "ForeachBatchWriter",
    "LagListener",
    "PartitionLag",
    "PublishedRows",
    "QueryLag",
    "foreach_batch_producer",
    "register",
]

# Every Python worker imports this package; what only the driver needs is not loaded there.
_HOMES = {
    "BatchReceipt": "foreach_batch",
    "ForeachBatchWriter": "foreach_batch",
    "LagListener": "progress",
    "PartitionLag": "lag",
    "PublishedRows": "foreach_batch",
    "QueryLag": "lag",
    "foreach_batch_producer": "foreach_batch",
    "register": "data_source",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
