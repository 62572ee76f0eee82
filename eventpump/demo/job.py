"""The Spark job of the demo, in its own process: trades into bars. `python -m eventpump.demo.job`.

The connection string is in the environment variable EVENTPUMP_CONNECTION_STRING. Each event is reported as a line of
JSON on stdout. A line of JSON on stdin, the offsets to read up to, ends the job when the bars of all trades before them
are published.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its usual name
from pyspark.sql.streaming.listener import StreamingQueryListener

from eventpump.errors import EventPumpError
from eventpump.spark import LagListener, QueryLag, foreach_batch_producer
from eventpump.spark.data_source import EventPumpDataSource
from eventpump.spark.local import local_session

if TYPE_CHECKING:
    from pyspark.sql.streaming.listener import (
        QueryIdleEvent,
        QueryProgressEvent,
        QueryStartedEvent,
        QueryTerminatedEvent,
    )

TRADE = "id bigint, symbol string, price double, size bigint, time timestamp"


def bars(trades: DataFrame, window: int, delay: int) -> DataFrame:
    """Aggregate trades into bars, each an event: `body`, `partitionKey`, and `start` and `symbol` to order them by.

    Args:
        window: Milliseconds.
        delay: Milliseconds of the market's time that a trade may be late.
    """
    cents = F.round(F.col("price") * 100).cast("bigint")
    return (
        trades.select(F.from_json(F.col("body").cast("string"), TRADE).alias("trade"))
        .select("trade.*")
        .withWatermark("time", f"{delay} milliseconds")
        .groupBy(F.window("time", f"{window} milliseconds"), "symbol")
        .agg(
            F.min_by("price", "id").alias("open"),
            F.max("price").alias("high"),
            F.min("price").alias("low"),
            F.max_by("price", "id").alias("close"),
            F.sum("size").alias("volume"),
            F.count("*").alias("trades"),
            F.sum(cents * F.col("size")).alias("turnover"),
        )
        .withColumn("start", F.unix_millis("window.start"))
        .select(
            F.to_json(
                F.struct("symbol", "start", "open", "high", "low", "close", "volume", "trades", "turnover")
            ).alias("body"),
            F.col("symbol").alias("partitionKey"),
            "start",
            "symbol",
        )
    )


class ProgressReporter(StreamingQueryListener):
    """Reports the query's progress."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._positions: dict[str, int] = {}
        self._is_over = False

    def onQueryStarted(self, event: QueryStartedEvent) -> None:  # noqa: N802 - Spark's name
        say(started=str(event.id))

    def onQueryProgress(self, event: QueryProgressEvent) -> None:  # noqa: N802 - Spark's name
        progress = event.progress
        say(
            ended=progress.batchId,
            rows=progress.numInputRows,
            rate=progress.processedRowsPerSecond,
            watermark=progress.eventTime.get("watermark"),
        )

    def onQueryIdle(self, event: QueryIdleEvent) -> None:  # noqa: N802 - Spark's name
        pass

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:  # noqa: N802 - Spark's name
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        if event.exception is not None:
            say(failed=event.exception)

    def lag(self, lag: QueryLag) -> None:
        """Record the lag."""
        with self._changed:
            self._positions = {each.partition_id: each.position for each in lag.partitions}
            self._changed.notify_all()
        say(lag={each.partition_id: (each.position, each.events, each.seconds) for each in lag.partitions})

    def until_read(self, ends: dict[str, int]) -> None:
        """Wait until everything before these offsets is read, or the query has ended."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_over or all(self._positions.get(key, 0) >= end for key, end in ends.items())
            )


_saying = threading.Lock()


def say(**facts: Any) -> None:
    """Print facts as one line."""
    with _saying:
        print(json.dumps(facts), flush=True)


def run(spark: SparkSession, args: argparse.Namespace) -> None:
    """Run the query until it is requested to end."""
    connection_string = os.environ["EVENTPUMP_CONNECTION_STRING"]
    # `eventpump.spark.register` does nothing if Spark has found the format by itself. But the Python workers of what
    # it has found are not those of the sink: two more would have to start, which costs 4 s of CPU time.
    spark.dataSource.register(EventPumpDataSource)
    reporter = ProgressReporter()
    spark.streams.addListener(reporter)
    spark.streams.addListener(LagListener(reporter.lag))
    trades = (
        spark.readStream.format("eventpump")
        .option("connectionString", connection_string)
        .option("hub", args.source)
        .option("startingPosition", "earliest")
        .schema("body binary")
        .load()
    )
    publish = foreach_batch_producer(
        connection_string,
        hub=args.target,
        sink_id=args.target,
        ledger=args.state / "ledger",
        order_by=("start", "symbol"),
        # Small messages: a partition's bars are several, and only one of them is on its way at a time.
        max_batch_events=2,
        custom_endpoint_address=args.endpoint,
    )

    def publish_and_say(frame: DataFrame, batch_id: int) -> None:
        say(began=batch_id)
        publish(frame, batch_id)

    query = (
        bars(trades, args.window, args.delay)
        .writeStream.queryName(args.target)
        .option("checkpointLocation", str(args.state / "checkpoint"))
        .foreachBatch(publish_and_say)
        .start()
    )
    if ends := sys.stdin.readline():
        reporter.until_read(json.loads(ends))
        # The windows closed by the last trades form a batch without new trades.
        query.processAllAvailable()
        query.stop()
        say(done=True)


def main() -> int:
    """Run the job; return the exit code."""
    parser = argparse.ArgumentParser(prog="eventpump.demo.job", description="The Spark job of the demo.")
    parser.add_argument("--source", required=True, help="the hub of trades")
    parser.add_argument("--target", required=True, help="the hub of bars")
    parser.add_argument("--endpoint", required=True, help="where to connect to publish bars: host and port")
    parser.add_argument("--state", type=Path, required=True, help="the directory of checkpoint and ledger")
    parser.add_argument("--directory", type=Path, required=True, help="the directory of this run's Spark")
    parser.add_argument("--window", type=int, required=True, help="milliseconds")
    parser.add_argument("--delay", type=int, required=True, help="milliseconds that a trade may be late")
    args = parser.parse_args()
    try:
        spark = local_session(args.directory)
        run(spark, args)
        spark.stop()
    except EventPumpError as error:
        say(failed=str(error))
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
