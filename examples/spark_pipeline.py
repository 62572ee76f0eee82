"""Aggregate a hub of trades on Spark into bars, and publish them to another hub, each exactly once.

    pip install '.[spark,java]'
    python examples/spark_pipeline.py
    python examples/spark_pipeline.py --connection-string "Endpoint=..." --make-trades 5000

A trade is JSON: {"symbol": "ACME", "price": 12.5, "size": 100, "time": "2030-01-31T12:00:00.25Z"}. The query can be
killed at any moment and restarted: it continues from checkpoint and ledger, both below --state. Each is useless without
the other. Without a connection string both hubs are in a local service, which ends with the program: simulated trades
are processed, and the state is not kept.

On a cluster, omit `local_session`: the session exists, `eventpump[spark]` is installed on every machine, and --state is
a directory that all drivers can access.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import random
import tempfile
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path

try:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql import functions as F  # noqa: N812 - its usual name
except ModuleNotFoundError as error:
    raise SystemExit(f"{error}: pip install 'eventpump[spark,java]'") from None

from eventpump import EventData, EventProducer
from eventpump.spark import BatchReceipt, LagListener, foreach_batch_producer, register
from eventpump.spark.local import local_session
from eventpump.testing.threaded import EmulatorThread

TRADE = "symbol string, price double, size bigint, time timestamp"


def read_trades(spark: SparkSession, connection_string: str, hub: str) -> DataFrame:
    """Read trades: from the checkpoint, if there is one, else from the beginning."""
    return (
        spark.readStream.format("eventpump")
        .option("connectionString", connection_string)
        .option("hub", hub)
        .option("startingPosition", "earliest")
        .option("maxEventsPerTrigger", 100_000)
        .schema("body binary, sequenceNumber bigint")  # other columns are not decoded
        .load()
        .select(
            F.from_json(F.col("body").cast("string"), TRADE).alias("trade"),
            "sequenceNumber",
        )
        .select("trade.*", "sequenceNumber")
    )


def make_bars(trades: DataFrame, window: str, late: str) -> DataFrame:
    """Return one bar per symbol and window, as the columns of an event, and columns to order events by."""
    return (
        trades.withWatermark("time", late)
        .groupBy(F.window("time", window), "symbol")
        .agg(
            F.min_by("price", F.struct("time", "sequenceNumber")).alias("open"),
            F.max("price").alias("high"),
            F.min("price").alias("low"),
            F.max_by("price", F.struct("time", "sequenceNumber")).alias("close"),
            F.sum("size").alias("volume"),
        )
        .select(
            F.to_json(
                F.struct("symbol", "window", "open", "high", "low", "close", "volume")
            ).alias("body"),
            F.col("symbol").alias("partitionKey"),
            F.col("window.start").alias("start"),
        )
    )


def report(receipt: BatchReceipt) -> None:
    print(f"batch {receipt.batch_id}: {receipt.count} bars published", flush=True)


def run(spark: SparkSession, args: argparse.Namespace) -> None:
    """Run the query until it is stopped, or with --once until all available trades are processed."""
    register(spark)
    listener = LagListener()
    publish = foreach_batch_producer(
        args.connection_string,
        args.target,
        sink_id="bars",
        ledger=args.state / "ledger",
        order_by="start",
        on_receipt=report,
    )
    bars = make_bars(
        read_trades(spark, args.connection_string, args.source), args.window, args.late
    )
    writer = (
        bars.writeStream.queryName("bars")
        .option("checkpointLocation", str(args.state / "checkpoint"))
        .foreachBatch(publish)
    )
    spark.streams.addListener(listener)
    try:
        query = (writer.trigger(availableNow=True) if args.once else writer).start()
        try:
            query.awaitTermination()
        except KeyboardInterrupt:
            query.stop()
    finally:
        spark.streams.removeListener(listener)


async def make_trades(connection_string: str, hub: str, count: int) -> None:
    """Publish simulated trades of a minute, and one a minute later, which closes all windows before it."""
    rng = random.Random()
    start = datetime.now(UTC)
    trades = [
        {
            "symbol": rng.choice(("ACME", "INITECH", "UMBRELLA")),
            "price": round(rng.uniform(10, 20), 2),
            "size": rng.randrange(1, 100),
            "time": (start + timedelta(seconds=60 * number / count)).isoformat(),
        }
        for number in range(count)
    ]
    trades.append(
        {
            "symbol": "ACME",
            "price": 15.0,
            "size": 1,
            "time": (start + timedelta(minutes=2)).isoformat(),
        }
    )
    async with EventProducer(connection_string, hub) as producer:
        await producer.send(
            [EventData(json.dumps(trade)) for trade in trades], split=True
        )
    print(f"published {len(trades)} trades", flush=True)


def use_local_service(
    stack: ExitStack, args: argparse.Namespace, directory: Path
) -> None:
    """Start a service of this program's own, until the stack is closed, and set the arguments that go with it."""
    service = stack.enter_context(EmulatorThread({args.source: 4, args.target: 4}))
    args.connection_string, args.once = service.connection_string, True
    args.make_trades = args.make_trades or 5000
    args.state = (
        directory / "state"
    )  # a checkpoint is of no use for the hubs of another service


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--connection-string", default=os.environ.get("EVENTPUMP_CONNECTION_STRING")
    )
    parser.add_argument("--source", default="trades", help="the hub of trades")
    parser.add_argument(
        "--target", default="bars", help="the hub that bars are published to"
    )
    parser.add_argument(
        "--state",
        type=Path,
        default=Path("spark-bars"),
        help="the directory of checkpoint and ledger",
    )
    parser.add_argument(
        "--window", default="5 seconds", help="the length of a bar's window"
    )
    parser.add_argument("--late", default="10 seconds", help="how late a trade may be")
    parser.add_argument(
        "--once",
        action="store_true",
        help="stop when all available trades are processed",
    )
    parser.add_argument(
        "--make-trades",
        type=int,
        metavar="N",
        help="publish this many simulated trades first",
    )
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    logging.getLogger("eventpump.spark").setLevel(logging.INFO)
    with ExitStack() as stack:
        temporary = tempfile.TemporaryDirectory(
            prefix="spark-", ignore_cleanup_errors=True
        )
        directory = Path(stack.enter_context(temporary))
        if args.connection_string is None:
            use_local_service(stack, args, directory)
        if args.make_trades:
            asyncio.run(
                make_trades(args.connection_string, args.source, args.make_trades)
            )
        spark = local_session(directory, is_short=args.once)
        run(spark, args)
        spark.stop()


if __name__ == "__main__":
    main()
