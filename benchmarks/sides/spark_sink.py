"""Sinks on a Spark of two slots: ours, and a loop over azure-eventhub in `foreachPartition`."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import psutil  # type: ignore[import-untyped]  # it comes without types
from pyspark.sql import Column, DataFrame, Row, SparkSession, functions

from benchmarks.events import samples
from eventpump import EventProducer
from eventpump.spark import foreach_batch_producer
from eventpump.spark.local import local_session
from eventpump.storage.ledgers.blob import BlobLedger

Sink = Callable[[DataFrame, int], object]


@contextmanager
def _session() -> Iterator[SparkSession]:
    os.environ["PYTHONPATH"] = os.getcwd()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        spark = local_session(Path(directory), master="local[2]", is_short=False)
        try:
            yield spark
        finally:
            spark.stop()


def _send(connection_string: str, hub: str, rows: Iterable[Row]) -> None:
    """Send a partition of a DataFrame with azure-eventhub, as its documentation shows."""
    from azure.eventhub import EventData, EventHubProducerClient

    with EventHubProducerClient.from_connection_string(connection_string, eventhub_name=hub) as client:
        batch = client.create_batch()
        for row in rows:
            event = EventData(bytes(row["body"]))
            try:
                batch.add(event)
            except ValueError:
                client.send_batch(batch)
                batch = client.create_batch()
                batch.add(event)
        if len(batch):
            client.send_batch(batch)


def ledger_of(blob: str, directory: str) -> str | BlobLedger:
    """Return the ledger of a side's sink: a directory, or a new place in a blob store.

    Args:
        blob: The connection string of a storage account; "" for the directory.
    """
    if not blob:
        return directory
    return BlobLedger("bench", connection_string=blob, prefix=f"{uuid.uuid4().hex}/", create=True)


def _sink(kind: str, connection_string: str, hub: str, ledger: str | BlobLedger) -> Sink:
    if kind == "theirs":
        send = partial(_send, connection_string, hub)
        return lambda frame, _: frame.foreachPartition(send)
    if kind == "plain":
        return foreach_batch_producer(connection_string, hub, idempotent=False)
    return foreach_batch_producer(connection_string, hub, sink_id="bench", ledger=ledger)


def _body(size: int) -> Column:
    """Return a column of bodies: the row's id, and a piece of the text of telemetry, another one for each row."""
    text = b"".join(each.body for each in samples("telemetry"))
    piece = functions.substring(
        functions.lit(text), (functions.col("id") * 7919 % (len(text) - size)).cast("int"), size - 16
    )
    return functions.concat(functions.lpad(functions.col("id").cast("string"), 16, "0").cast("binary"), piece).alias(
        "body"
    )


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


async def _stored(connection_string: str, hub: str) -> int:
    async with EventProducer(connection_string, hub) as producer:
        found = [await producer.get_partition_properties(each) for each in await producer.get_partition_ids()]
        return sum(each.last_enqueued_sequence_number + 1 for each in found)


def rate(
    kind: str,
    connection_string: str,
    hub: str,
    rows: int,
    batches: int,
    body_size: int,
    warm_up: int = 2,
    blob: str = "",
) -> dict[str, float]:
    """Publish so many batches of so many rows.

    Args:
        kind: "ours", exactly once; "plain", ours at least once; or "theirs".
        blob: As of `ledger_of`.

    Returns:
        `wall` in µs per row, `cost` in µs of CPU of all of Spark per row, `rate` in rows per second, `busy` of both
        cores.
    """
    with _session() as spark, tempfile.TemporaryDirectory() as ledger:
        before = asyncio.run(_stored(connection_string, hub))
        sink = _sink(kind, connection_string, hub, ledger_of(blob, ledger))
        frame = spark.range(0, rows, 1, 2).select(_body(body_size))
        for batch_id in range(warm_up):
            sink(frame, batch_id)
        cpu, began = _cpu(), time.perf_counter()
        for batch_id in range(warm_up, warm_up + batches):
            sink(frame, batch_id)
        wall, cpu = time.perf_counter() - began, _cpu() - cpu
        stored = asyncio.run(_stored(connection_string, hub)) - before
        if stored != rows * (batches + warm_up):
            raise AssertionError(f"{stored} rows are stored of {rows * (batches + warm_up)}")
        counted = rows * batches
        return {
            "wall": wall / counted * 1e6,
            "cost": cpu / counted * 1e6,
            "rate": counted / wall,
            "busy": cpu / wall / (os.cpu_count() or 1),
        }


def trigger(
    kind: str, connection_string: str, hub: str, batches: int, warm_up: int, blob: str = ""
) -> dict[str, float]:
    """Publish batches of eight rows.

    Args:
        kind: As of `rate`.
        blob: As of `ledger_of`.

    Returns:
        The milliseconds of one, in the median.
    """
    with _session() as spark, tempfile.TemporaryDirectory() as ledger:
        sink = _sink(kind, connection_string, hub, ledger_of(blob, ledger))
        frame = spark.range(0, 8, 1, 2).selectExpr("CAST(CAST(id AS STRING) AS BINARY) AS body")
        times = []
        for batch_id in range(warm_up + batches):
            began = time.perf_counter()
            sink(frame, batch_id)
            times.append((time.perf_counter() - began) * 1e3)
        return {"median": sorted(times[warm_up:])[batches // 2]}
