"""The sides of `spark-small`: a query from hub to hub on a Spark of two slots, and a service of limited requests."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from pathlib import Path

import psutil  # type: ignore[import-untyped]  # it comes without types

from benchmarks.processes import READY
from eventpump import Emulator
from eventpump.amqp.message import Message
from eventpump.emulator import nodes
from eventpump.emulator.config import HubSpec
from eventpump.spark import BatchReceipt, foreach_batch_producer
from eventpump.spark.data_source import register
from eventpump.spark.local import local_session

REQUESTS_PER_SECOND = 50.0
"""Management requests that a connection of the service answers."""
WATCH = "watch"
"""The consumer group in which the query watches its source."""


def _limit_requests() -> None:
    """Have every connection of the emulators in this process answer no more requests than the service's would."""
    answer = nodes.RequestEnd._answer  # noqa: SLF001 - nothing else needs an emulator that is so slow
    due: dict[int, float] = {}

    def later(end: nodes.RequestEnd, request: Message, response: Message) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        at = max(now, due.get(id(end.connection), now))
        due[id(end.connection)] = at + 1 / REQUESTS_PER_SECOND
        loop.call_at(at, say, end, request, response)

    def say(end: nodes.RequestEnd, request: Message, response: Message) -> None:
        answer(end, request, response)
        end.connection.flush()

    setattr(nodes.RequestEnd, "_answer", later)  # noqa: B010 - a checker would refuse the assignment


async def service(source: int, target: int) -> dict[str, float]:
    """Run an emulator until a line comes.

    Args:
        source: How many partitions the hub `source` has.
        target: And the hub `target`.
    """
    _limit_requests()
    async with Emulator([HubSpec("source", source, (WATCH,)), HubSpec("target", target)]) as emulator:
        print(emulator.connection_string, flush=True)
        await asyncio.to_thread(sys.stdin.readline)
    return {}


def _cpu() -> float:
    """Return the seconds of CPU of Spark and all its workers."""
    total = 0.0
    for each in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        try:
            times = each.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return float(total)


def query(connection_string: str, small_batches: str, warm_up: int) -> dict[str, float]:
    """Count the source's events by their body, and publish each change, until a line comes.

    Prints a line with the number of rows after each batch.

    Args:
        warm_up: The rows after which CPU and batches are counted.

    Returns:
        `cpu` in seconds, and `batches`.
    """
    os.environ["PYTHONPATH"] = os.getcwd()
    rows_seen = batches = 0
    cpu: float | None = None

    def told(receipt: BatchReceipt) -> None:
        nonlocal rows_seen, batches, cpu
        if not receipt.count:
            return
        rows_seen += receipt.count
        if cpu is not None:
            batches += 1
        elif rows_seen >= warm_up:
            cpu = _cpu()
        print(receipt.count, flush=True)

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        settings = {
            "spark.python.authenticate.socketTimeout": "120s",
            # As the guide on tuning advises for a checkpoint on a local disk.
            "spark.sql.streaming.checkpointFileManagerClass": (
                "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
            ),
        }
        spark = local_session(Path(directory), master="local[2]", is_short=False, settings=settings)
        register(spark)
        events = spark.readStream.format("eventpump").option("connectionString", connection_string)
        options = {"hub": "source", "startingPosition": "earliest", "watchConsumerGroup": WATCH}
        counts = events.options(**options).load().groupBy("body").count()
        rows = counts.selectExpr(
            "concat(CAST(body AS STRING), ' ', CAST(count AS STRING)) AS body", "CAST(body AS STRING) AS partitionKey"
        )
        sink = foreach_batch_producer(
            connection_string,
            "target",
            sink_id="bench",
            ledger=Path(directory) / "ledger",
            on_receipt=told,
            small_batches=small_batches,  # type: ignore[arg-type]  # the argument came as JSON
        )
        writing = rows.writeStream.outputMode("update").foreachBatch(sink)
        running = writing.option("checkpointLocation", f"{directory}/checkpoint").start()
        print(READY, flush=True)
        sys.stdin.readline()
        assert cpu is not None
        spent = _cpu() - cpu
        running.stop()
        spark.stop()
    return {"cpu": spent, "batches": batches}
