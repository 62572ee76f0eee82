"""A listener that reports the lag of streaming queries behind their hubs, and figures in their progress."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING

from pyspark.sql.streaming.listener import StreamingQueryListener

from eventpump.spark.source.lag import LagLedger, QueryLag

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.listener import (
        QueryIdleEvent,
        QueryProgressEvent,
        QueryStartedEvent,
        QueryTerminatedEvent,
    )

_log = logging.getLogger("eventpump.spark")


class LagListener(StreamingQueryListener):
    """Reports the lag of every query after each batch, and the rates at which events arrive and are read, as a line in
    the log and to a function.

    ::

        spark.streams.addListener(LagListener(lambda lag: gauge.set(lag.events.max)))

    For classic sessions and Spark Connect alike; under Connect it runs in the client. It makes no requests: the source
    reports the latest offsets in the query's progress. Queries without an eventpump source are ignored.

    Args:
        on_lag: Called with each `QueryLag`, on Spark's listener thread; what it raises goes to the log. None to log
            only.
        level: The level of the line in the log; the logger is `eventpump.spark`. Default: 20 (`logging.INFO`).
    """

    def __init__(self, on_lag: Callable[[QueryLag], None] | None = None, *, level: int = logging.INFO) -> None:
        self._on_lag = on_lag
        self._level = level
        self._ledger = LagLedger()

    def onQueryStarted(self, event: QueryStartedEvent) -> None:  # noqa: N802 - Spark's name
        """Do nothing: there is no lag yet."""

    def onQueryProgress(self, event: QueryProgressEvent) -> None:  # noqa: N802 - Spark's name
        """Report the lag."""
        progress = event.progress
        time = _seconds(progress.timestamp) + progress.batchDuration / 1000
        sources = [(each.endOffset, each.latestOffset) for each in progress.sources if _may_be_ours(each.description)]
        run_id = str(progress.runId)
        partitions = self._ledger.progressed(run_id, time, sources)
        if not partitions:
            return
        lag = QueryLag(str(progress.id), run_id, progress.name, progress.batchId, time, partitions)
        _log.log(self._level, "%s", lag.describe())
        if self._on_lag is not None:
            try:
                self._on_lag(lag)
            except Exception:
                _log.exception("the lag could not be reported")

    def onQueryIdle(self, event: QueryIdleEvent) -> None:  # noqa: N802 - Spark's name
        """Record that there was nothing new."""
        self._ledger.idled(str(event.runId), _seconds(event.timestamp))

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:  # noqa: N802 - Spark's name
        """Forget the query."""
        self._ledger.ended(str(event.runId))


def with_lag(frame: DataFrame, name: str = "eventpump") -> DataFrame:
    """Return the DataFrame with figures of its events in the progress of the query, under `observedMetrics[name]`.

    ::

        rows = with_lag(spark.readStream.format("eventpump").options(**options).load())

    Sources in Python have no metrics of their own there (`sources[].metrics`). Spark passes these to every listener,
    also under Connect, and to what exports a query's progress. An event that a batch evaluates twice counts twice. The
    figures, all but the first null in a batch without events:

    * `events`: The number of events.
    * `maxLagSeconds`, `avgLagSeconds`: Seconds from when an event was enqueued until the batch began.
    * `newestEnqueuedTime`: When the newest of them was enqueued.

    Args:
        frame: The rows of the source, with the column `enqueuedTime`; of a query or a batch, classic or Connect.
        name: The name of the figures, different for each of several in one query. Default: "eventpump".
    """
    if ".connect." in type(frame).__module__:
        from pyspark.sql.connect import functions
    else:
        from pyspark.sql import functions  # type: ignore[no-redef] # the same functions for the other kind of session

    moment = functions.unix_micros(functions.col("enqueuedTime"))
    lag = (functions.unix_micros(functions.current_timestamp()) - moment) / functions.lit(1e6)
    lag = functions.greatest(lag, functions.lit(0.0))
    return frame.observe(
        name,
        functions.count(functions.lit(1)).alias("events"),
        functions.max(lag).alias("maxLagSeconds"),
        functions.avg(lag).alias("avgLagSeconds"),
        functions.max("enqueuedTime").alias("newestEnqueuedTime"),
    )


def _seconds(timestamp: str) -> float:
    return datetime.fromisoformat(timestamp).timestamp()


def _may_be_ours(description: str) -> bool:
    # Spark describes every Python source by its own class; ours are recognized by the form of their offsets.
    return ".PythonMicroBatchStream" in description
