"""What the sink's tests publish, how they stumble, and what they find in a hub."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]  # it comes without types
from pyspark.sql import DataFrame, SparkSession

from eventpump import PartitionReader
from eventpump.errors import StoreError
from eventpump.spark import BatchReceipt, ForeachBatchWriter, foreach_batch_producer
from eventpump.storage.ledgers.directory import DirectoryLedger
from tests.spark.service import SparkService

COLUMNS = ("id AS n", "CAST(id AS STRING) AS body", "CAST(id % 7 AS STRING) AS partitionKey")
"""Rows identified by a number, spread by seven keys."""


class StumbleError(Exception):
    """The driver stopped where a test wants it to."""


def stop_here() -> None:
    """Stop the driver as an exception does."""
    raise StumbleError


def die_here() -> None:
    """Stop the driver as a power cut does."""
    os.kill(os.getpid(), signal.SIGKILL)


class StumblingLedger(DirectoryLedger):
    """A ledger in a directory, which stumbles once, at a record that is created.

    Args:
        record: What it is of: "plan", "done" or "claim".
        moment: "before" it, "after" it, or "within": when it is written and not yet under its name.
        stumble: What happens there.
    """

    def __init__(self, path: Path, record: str, moment: str, stumble: Callable[[], None] = stop_here) -> None:
        super().__init__(path)
        self._record = f"{record}."
        self._moment = moment
        self._stumble = stumble
        self._is_due = True

    async def create(self, name: str, body: bytes) -> bool:
        if not self._is_due or self._record not in name:
            return await super().create(name, body)
        self._is_due = False
        if self._moment == "before":
            self._stumble()
        if self._moment == "within":
            os.link = lambda *_: self._stumble()
        created = await super().create(name, body)
        self._stumble()
        return created


class FailingLedger(DirectoryLedger):
    """A ledger in a directory whose calls fail: the first two of each kind, and all that delete.

    Attributes:
        failed: The kinds of calls that have failed.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._left = {"open": 2, "read": 2, "create": 2}
        self.failed: set[str] = set()

    def _call(self, kind: str) -> None:
        if self._left[kind]:
            self._left[kind] -= 1
            self.failed.add(kind)
            raise StoreError(kind, "an outage")

    async def open(self) -> None:
        self._call("open")
        await super().open()

    async def read(self, name: str) -> bytes | None:
        self._call("read")
        return await super().read(name)

    async def create(self, name: str, body: bytes) -> bool:
        self._call("create")
        return await super().create(name, body)

    async def delete(self, name: str) -> None:
        self.failed.add("delete")
        raise StoreError("delete", "an outage")


class SinkHub:
    """A hub, and the sink that publishes to it.

    Args:
        small_batches: The option of that name.

    Attributes:
        receipts: What the sink has reported.
    """

    def __init__(
        self, service: SparkService, directory: Path, partitions: int = 4, small_batches: str = "auto"
    ) -> None:
        self.small_batches = small_batches
        self.service = service
        self.name = service.new_hub(partitions)
        self.ledger = directory / f"ledger of {self.name}"
        self.receipts: list[BatchReceipt] = []

    def writer(self, **options: Any) -> ForeachBatchWriter:
        """Make the sink, as each run of a driver does."""
        if options.get("idempotent", True):
            given = {"ledger": self.ledger, "sink_id": "sink", "small_batches": self.small_batches}
            options = {**given, **options}
        options.setdefault("on_receipt", self.receipts.append)
        return foreach_batch_producer(self.service.connection_string, self.name, **options)

    def stored(self) -> dict[str, list[int]]:
        """Read the numbers that the hub holds, by partition."""
        return {each: list(map(int, bodies)) for each, bodies in self.service.bodies(self.name).items()}

    def require_exactly(self, numbers: Sequence[int], *, is_ordered: bool = True) -> None:
        """Check that the hub holds each of the numbers once.

        Args:
            is_ordered: Also check that those of a partition are in order.
        """
        found = self.stored()
        assert sorted(number for each in found.values() for number in each) == sorted(numbers)
        assert not is_ordered or all(each == sorted(each) for each in found.values())

    def kept(self) -> list[str]:
        """Return the names of the objects with rows that are kept."""
        return sorted(each.name for each in (self.ledger / "rows~").glob("sink.*/0*"))

    def await_events(self, partition_id: str, count: int) -> None:
        """Wait until a partition holds so many events."""

        async def read() -> None:
            async with PartitionReader(self.service.connection_string, self.name, partition_id=partition_id) as reader:
                seen = 0
                async for _ in reader:
                    seen += 1
                    if seen == count:
                        return

        self.service.run(read())


def numbered(spark: SparkSession, start: int, end: int, *columns: str) -> DataFrame:
    """Make rows of numbers, in two tasks."""
    return spark.range(start, end, 1, 2).selectExpr(*(columns or COLUMNS))


def numbered_stream(spark: Any, rows_per_batch: int = 40, *, tasks: int = 1) -> DataFrame:
    """Make a stream that gives so many of the same rows with each start of its query.

    Args:
        spark: Of either kind.
        tasks: How many tasks have them, dealt out in turn: with one, they are in order.
    """
    source = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", rows_per_batch)
    made: DataFrame = source.option("numPartitions", tasks).load().withColumnRenamed("value", "id").selectExpr(*COLUMNS)
    return made


def run_query(frame: DataFrame, writer: Any, checkpoint: str) -> None:
    """Run a query on what there is."""
    writing = frame.writeStream.foreachBatch(writer).option("checkpointLocation", checkpoint)
    writing.trigger(availableNow=True).start().awaitTermination()


def connected_workers(service: SparkService, root: int | None = None) -> list[psutil.Process]:
    """Find the processes below one, or this one, that are connected to the service."""
    port = service.call(lambda: service.emulator.port)
    return [
        each
        for each in psutil.Process(root).children(recursive=True)
        if any(link.raddr and link.raddr.port == port for link in _connections(each))
    ]


def _connections(process: psutil.Process) -> list[Any]:
    try:
        return list(process.net_connections("tcp"))
    except psutil.NoSuchProcess:
        return []
