"""The Spark pipeline: a streaming source and a foreachBatch producer. Needs the extra `eventpump[spark]`."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eventpump.spark.data_source import register
    from eventpump.spark.sink.foreach_batch import (
        BatchReceipt,
        ForeachBatchWriter,
        PublishedRows,
        foreach_batch_producer,
    )
    from eventpump.spark.source.lag import PartitionLag, QueryLag
    from eventpump.spark.source.progress import LagListener, with_lag

__all__ = [
    "BatchReceipt",
    "ForeachBatchWriter",
    "LagListener",
    "PartitionLag",
    "PublishedRows",
    "QueryLag",
    "foreach_batch_producer",
    "register",
    "with_lag",
]

# Every Python worker imports this package; what only the driver needs is not loaded there.
_HOMES = {
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


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
