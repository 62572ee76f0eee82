"""The rows that the foreachBatch producer keeps: elsewhere than beside the ledger, by workers that die, and of queries
with a state."""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from azure.storage.blob import ContainerClient
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import window
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle
from pyspark.sql.types import IntegerType, StructField, StructType

from eventpump.storage.ledgers.directory import DirectoryLedger
from eventpump.storage.rows.blob import BlobRowStore
from eventpump.storage.rows.directory import DirectoryRowStore
from tests.spark.service import SparkService
from tests.spark.sinks import SinkHub, StumbleError, StumblingLedger, numbered
from tests.support.azurite import Azurite


@pytest.fixture(scope="module")
def azurite() -> Iterator[Azurite]:
    """A real Azurite."""
    with Azurite() as server:
        yield server


@pytest.fixture
def sink(spark: SparkSession, service: SparkService, tmp_path: Path) -> SinkHub:
    """A hub of four partitions, and its sink, whose rows are kept and published by tasks."""
    return SinkHub(service, tmp_path, small_batches="never")


# ------------------------------------------------------------------------------------------------------ elsewhere


@pytest.mark.parametrize("small_batches", ["never", pytest.param("auto", marks=pytest.mark.long)])
def test_sink_keeps_rows_in_a_blob_container(
    spark: SparkSession, sink: SinkHub, azurite: Azurite, small_batches: str
) -> None:
    """Executors write them there and read them, also those of a batch that another driver began; then they are gone."""
    container = f"rows-{uuid.uuid4().hex}"

    rows = BlobRowStore(container, connection_string=azurite.connection_string, create=True)
    options: dict[str, Any] = {"rows": rows, "small_batches": small_batches}

    def kept() -> list[str]:
        with ContainerClient.from_connection_string(azurite.connection_string, container) as blobs:
            return [name for name in blobs.list_blob_names() if "/run." not in name]

    with pytest.raises(StumbleError):
        sink.writer(ledger=StumblingLedger(sink.ledger, "plan", "after"), **options)(numbered(spark, 0, 400), 0)
    assert not any(sink.stored().values())
    assert len(kept()) == (3 if small_batches == "never" else 1)
    writer = sink.writer(**options)
    writer(numbered(spark, 500, 900), 0)
    writer(numbered(spark, 400, 500), 1)
    sink.require_exactly(range(500))
    assert kept() == sink.kept() == []


# ------------------------------------------------------------------------------------------------------ requests


class Rounds:
    """The requests to stores, those together that were under way at a time."""

    def __init__(self) -> None:
        self.found: list[list[str]] = []
        self._under_way = 0

    @contextmanager
    def request(self, text: str) -> Iterator[None]:
        if not self._under_way:
            self.found.append([])
        self.found[-1].append(text)
        self._under_way += 1
        try:
            yield
        finally:
            self._under_way -= 1


ROUNDS = Rounds()
"""Of the driver's process: row stores are copied."""


class TracedLedger(DirectoryLedger):
    async def create(self, name: str, body: bytes) -> bool:
        with ROUNDS.request(f"create {name.partition('/')[2]}"):
            return await super().create(name, body)

    async def read(self, name: str) -> bytes | None:
        with ROUNDS.request(f"read {name.partition('/')[2]}"):
            return await super().read(name)

    async def list(self, directory: str) -> list[str]:
        with ROUNDS.request("list records"):
            return await super().list(directory)


class TracedRows(DirectoryRowStore):
    async def write(self, stem: str, parts: Sequence[bytes | memoryview]) -> str:
        with ROUNDS.request("write rows"):
            return await super().write(stem, parts)

    async def read(self, name: str, offset: int, size: int) -> bytes | None:
        with ROUNDS.request("read rows"):
            return await super().read(name, offset, size)

    async def list(self, directory: str) -> dict[str, int]:
        with ROUNDS.request("list rows"):
            return await super().list(directory)

    async def delete(self, names: Sequence[str]) -> None:
        with ROUNDS.request(f"delete rows: {len(names)}"):
            await super().delete(names)


@pytest.mark.parametrize("partitions", [1, 8])
def test_small_batch_makes_six_requests_in_sequence(
    spark: SparkSession, service: SparkService, tmp_path: Path, partitions: int
) -> None:
    """What is read before is read at once, while rows are encoded; five follow, however many partitions there are."""
    sink = SinkHub(service, tmp_path, partitions)
    writer = sink.writer(ledger=TracedLedger(sink.ledger), rows=TracedRows(tmp_path / "rows"))
    for batch_id in range(3):
        writer(numbered(spark, 8 * batch_id, 8 * batch_id + 8), batch_id)
    ROUNDS.found.clear()
    writer(numbered(spark, 24, 32), 3)
    sink.require_exactly(range(32))
    name, later = "000000000003.0", "read claim.000000000002.json"
    assert [sorted(each) for each in ROUNDS.found] == [
        ["read 000000000002.0.done.json", f"read {name}.done.json", f"read {name}.plan.json", later],
        ["write rows"],
        [f"create {name}.plan.json"],
        [later],
        [f"create {name}.done.json", "list rows", later],
        ["delete rows: 1"],
    ]


# ------------------------------------------------------------------------------------------------------ workers die


class DyingRows(DirectoryRowStore):
    """A directory to which two workers die when they write an object, each once: before it, or after it.

    Args:
        half: Leave a part of the object instead of the whole.
    """

    def __init__(self, path: Path, marks: Path, *, half: bool) -> None:
        super().__init__(path)
        self._driver = os.getpid()
        self._marks = marks
        self._half = half

    async def write(self, stem: str, parts: Sequence[bytes | memoryview]) -> str:
        if os.getpid() == self._driver or len(os.listdir(self._marks)) >= 2:
            return await super().write(stem, parts)
        (self._marks / uuid.uuid4().hex).touch()
        await super().write(stem, parts[:1] if self._half else parts)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("killed")


@pytest.mark.parametrize("half", [True, pytest.param(False, marks=pytest.mark.long)])
def test_worker_that_dies_when_it_has_written_rows_leaves_what_nobody_reads(
    spark: SparkSession, sink: SinkHub, tmp_path: Path, half: bool
) -> None:
    """*Worker killed within the encode job*: its attempt's object, in part or whole, is not named, and is deleted."""
    (marks := tmp_path / "marks").mkdir()
    rows = DyingRows(sink.ledger / "rows~", marks, half=half)
    with pytest.raises(StumbleError):
        sink.writer(rows=rows, ledger=StumblingLedger(sink.ledger, "done", "before"))(numbered(spark, 0, 400), 0)
    assert len(os.listdir(marks)) == 2
    assert len(sink.kept()) == 2 + 2 + 1, "two attempts that died, two tasks, and what the plan names"
    sink.writer()(numbered(spark, 0, 400), 0)
    sink.require_exactly(range(400))
    assert sink.kept() == []


# ------------------------------------------------------------------------------------------------------ state

ROWS = 20
"""Of a file, and so of a batch."""
MOMENTS = [("plan", "before"), ("plan", "after"), ("done", "after")]
"""Of the ledger's writes for batches 1, 2 and 3, at which a driver ends each."""
ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
HDFS = "org.apache.spark.sql.execution.streaming.state.HDFSBackedStateStoreProvider"


def files(spark: SparkSession, place: Path) -> DataFrame:
    """Make a stream with a batch for each of five files: of its rows half are those of the file before."""
    for number in range(5):
        file = place / f"{number}.json"
        first = number * ROWS // 2
        file.write_text("".join(f'{{"n": {row}}}\n' for row in range(first, first + ROWS)))
        os.utime(file, (1_700_000_000 + number,) * 2)
    return spark.readStream.schema("n long").option("maxFilesPerTrigger", 1).json(str(place))


def distinct(rows: DataFrame) -> tuple[DataFrame, list[int]]:
    """Each number once, of which the state knows those of earlier batches."""
    return rows.dropDuplicates(["n"]), list(range(60))


def windows(rows: DataFrame) -> tuple[DataFrame, list[int]]:
    """A row for each window of ten that the watermark has passed, with its first number and the count of its rows."""
    timed = rows.selectExpr("timestamp_seconds(n) AS time").withWatermark("time", "0 seconds")
    counted = timed.groupBy(window("time", "10 seconds")).count()
    return counted.selectExpr("unix_timestamp(window.start) * 100 + count AS n"), [10, 1020, 2020, 3020, 4020]


class Counting(StatefulProcessor):
    """Counts the rows of a key, and gives a row for each, with key and count."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._count = handle.getValueState("count", StructType([StructField("count", IntegerType())]))

    def handleInputRows(  # noqa: N802 - Spark's name
        self,
        key: Any,
        rows: Iterator[pd.DataFrame],
        timerValues: Any,  # noqa: N803 - likewise
    ) -> Iterator[pd.DataFrame]:
        found = self._count.get()
        before = 0 if found is None else found[0]
        count = sum(len(each) for each in rows)
        self._count.update((before + count,))
        yield pd.DataFrame({"n": [key[0] * 1000 + each for each in range(before, before + count)]})

    def close(self) -> None:
        """There is nothing to close."""


def counted(rows: DataFrame) -> tuple[DataFrame, list[int]]:
    """A row for each row, numbered by key."""
    keyed = rows.selectExpr("CAST(n % 4 AS INT) AS key", "n").groupBy("key")
    numbers = keyed.transformWithStateInPandas(Counting(), "n long", "append", "None")
    return numbers, [key * 1000 + each for key in range(4) for each in range(5 * ROWS // 4)]


STATEFUL = [
    pytest.param(distinct, HDFS, id="distinct-hdfs"),
    pytest.param(counted, ROCKSDB, id="counted-rocksdb"),
    pytest.param(windows, HDFS, id="windows-hdfs", marks=pytest.mark.long),
    pytest.param(windows, ROCKSDB, id="windows-rocksdb", marks=pytest.mark.long),
    pytest.param(distinct, ROCKSDB, id="distinct-rocksdb", marks=pytest.mark.long),
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("operator", "provider"), STATEFUL)
def test_query_with_a_state_whose_driver_ends_amid_its_batches_publishes_each_row_once(
    spark: SparkSession, service: SparkService, tmp_path: Path, checkpoint: str, operator: Any, provider: str
) -> None:
    """*Crash before the plan, after it, and after done*: rows are exact, and the state goes on from batch to batch."""
    sink = SinkHub(service, tmp_path)
    (place := tmp_path / "files").mkdir()
    name = "spark.sql.streaming.stateStore.providerClass"
    before = spark.conf.get(name)
    spark.conf.set(name, provider)
    try:
        found, expected = operator(files(spark, place))
        rows = found.selectExpr("n", "CAST(n AS STRING) AS body", "CAST(n % 7 AS STRING) AS partitionKey")

        def run(writer: Any) -> None:
            writing = rows.writeStream.foreachBatch(writer).option("checkpointLocation", checkpoint)
            writing.outputMode("append").trigger(availableNow=True).start().awaitTermination()

        for batch_id, (record, moment) in enumerate(MOMENTS, 1):
            with pytest.raises(Exception, match="StumbleError"):
                run(sink.writer(ledger=StumblingLedger(sink.ledger, f"{batch_id:012d}.0.{record}", moment)))
        run(sink.writer())
    finally:
        spark.conf.set(name, before or HDFS)
    sink.require_exactly(expected, is_ordered=False)
    assert sink.kept() == []
