"""Small batches: when a batch is expected to be one, and the order of rows. Publishing them: `faults/test_sink.py`."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterable
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.types import (
    ArrayType,
    DateType,
    DayTimeIntervalType,
    LongType,
    StringType,
    StructType,
    TimestampType,
)

from eventpump.core.sequencer import PartitionSequencer
from eventpump.errors import ServiceTimeoutError
from eventpump.spark.sink.attempt import PartitionWork, WorkStep, may_continue
from eventpump.spark.sink.columns import EventColumns
from eventpump.spark.sink.executor import CollectTask, EncodeTask, encoded_names
from eventpump.spark.sink.records import PartitionPlan
from eventpump.spark.sink.small import (
    COLLECTED_BYTES,
    SMALL_ROWS,
    BatchSizes,
    SmallBatches,
    is_orderable,
    shares_of,
    unpacked,
)

# ------------------------------------------------------------------------------------------------- expected sizes


@pytest.mark.parametrize(
    ("mode", "unknown", "few", "many"),
    [("auto", True, True, False), ("always", True, True, True), ("never", False, False, False)],
)
def test_size_of_the_last_batch_decides(mode: SmallBatches, unknown: bool, few: bool, many: bool) -> None:
    """A batch is expected to be as the last one; the option forces either way."""
    sizes = BatchSizes(mode)
    found = [sizes.is_small]
    for rows in (SMALL_ROWS, SMALL_ROWS + 1):
        sizes.published(rows)
        found.append(sizes.is_small)
    assert found == [unknown, few, many]
    assert sizes.expected_rows == SMALL_ROWS + 1


def test_size_that_did_not_fit_is_not_tried_again_at_once() -> None:
    """Few large rows are no small batch: they would be read twice each time. Fewer of them are tried."""
    sizes = BatchSizes("auto")
    sizes.collected(4, 10, 10_000)
    sizes.published(10)
    sizes.overflowed(4)
    expected = [sizes.expected_rows]
    sizes.published(500)
    tried = [sizes.is_small]
    assert [*expected, sizes.expected_rows] == [None, 500]
    sizes.published(250)
    tried.append(sizes.is_small)
    sizes.collected(4, 250, COLLECTED_BYTES // 4)
    sizes.published(251)
    assert [*tried, sizes.is_small] == [False, True, True]


def test_size_in_more_tasks_than_expected_is_tried_again() -> None:
    """Where a batch did not fit because of how its tasks shared the bytes, the next one has other shares."""
    sizes = BatchSizes("auto")
    sizes.overflowed(2)
    sizes.published(500)
    assert sizes.is_small
    assert sizes.tasks == 2


# ------------------------------------------------------------------------------------------------- rows


def batches_of(rows: Iterable[tuple[int, str | None, bytes]], size: int) -> list[pa.RecordBatch]:
    every = list(rows)
    names = encoded_names(1)
    kinds = [pa.int32(), pa.string(), pa.binary()]
    found = []
    for start in range(0, len(every), size):
        columns = zip(*every[start : start + size], strict=True)
        arrays = [pa.array(each, kind) for each, kind in zip(columns, kinds, strict=True)]
        found.append(pa.RecordBatch.from_arrays(arrays, names))
    return found


@given(
    st.lists(st.tuples(st.integers(0, 3), st.none() | st.text(max_size=3), st.binary(max_size=3)), max_size=30),
    st.randoms(),
    st.integers(1, 7),
    st.integers(1, 7),
)
def test_shares_depend_on_the_rows_alone(
    rows: list[tuple[int, str | None, bytes]], rng: random.Random, size: int, other: int
) -> None:
    """However tasks divide the rows, each partition's are in one order: that asked for, then by hash and content."""
    expected = shares_of(batches_of(rows, size))
    shuffled = rng.sample(rows, len(rows))
    assert shares_of(batches_of(shuffled, other)) == expected
    for partition, events in expected.items():
        ours = [row for row in rows if row[0] == partition]
        ours.sort(key=lambda row: (row[1] is not None, (row[1] or "").encode(), zlib.crc32(row[2]), row[2]))
        assert events == [row[2] for row in ours]


def test_order_of_types_that_only_spark_orders_is_left_to_it() -> None:
    """A type whose order here may differ from Spark's is not ordered here."""
    others = [ArrayType(LongType()), StructType(), DayTimeIntervalType(), StringType("UNICODE_CI")]
    assert not any(map(is_orderable, others))
    assert all(map(is_orderable, [StringType(), LongType(), DateType(), TimestampType()]))


def collected(rows: int, *, tasks: int, most_bytes: int) -> tuple[list[bytes | None], int]:
    """Run a task of this number 0, and count the batches that it took."""
    taken = 0

    def batches() -> Iterable[pa.RecordBatch]:
        nonlocal taken
        for start in range(0, rows, 10):
            taken += 1
            yield pa.RecordBatch.from_arrays([pa.array([b"%d" % each for each in range(start, start + 10)])], ["body"])

    task = CollectTask(EncodeTask(EventColumns("body"), 4, 10**6, 0), tasks, most_bytes)
    return [payload for batch in task(batches()) for payload in batch.column(0).to_pylist()], taken


def test_collected_rows_come_back_as_they_were_encoded() -> None:
    """A task's rows are one row of bytes, none is null; nothing encoded is nothing collected."""
    (payload,), _ = collected(50, tasks=1, most_bytes=10**6)
    assert payload is not None
    assert sum(map(len, shares_of(unpacked([payload])).values())) == 50
    assert collected(0, tasks=1, most_bytes=10**6)[0] == [b""]


@pytest.mark.parametrize(("tasks", "most_bytes"), [(1, 1000), (100, 10**5), (0, 10**6)])
def test_collected_rows_have_a_bound(tasks: int, most_bytes: int) -> None:
    """A task that has more than its share returns null, and reads no further."""
    found, taken = collected(1000, tasks=max(tasks, 1), most_bytes=most_bytes if tasks else 0)
    assert found == [None]
    assert taken < 10


# ------------------------------------------------------------------------------------------------- kept links


def entry(**values: Any) -> PartitionPlan:
    every: dict[str, Any] = {
        "partition_id": "0",
        "producer_id": 7,
        "owner_level": 3,
        "next_number": 21,
        "nothing": 0,
        "is_fresh": False,
        "tail": 9,
    }
    return PartitionPlan(**{**every, **values})


def test_link_is_kept_only_where_the_plan_goes_on() -> None:
    """A link of another producer, number or state is not continued; nor is one that may have been forgotten."""
    sequencer = PartitionSequencer[object]("0", producer_id=7, owner_level=3)
    assert not may_continue(sequencer, entry())
    sequencer.attached(7, 3, 20)
    assert may_continue(sequencer, entry())
    for values in (
        {"producer_id": 8},
        {"owner_level": 4},
        {"next_number": 22},
        {"next_number": 20},
        {"is_fresh": True},
        {"nothing": 20},
    ):
        assert not may_continue(sequencer, entry(**values)), values
    sequencer.offer(object(), 1)
    assert not may_continue(sequencer, entry())
    sequencer.sending()
    sequencer.outcome_unknown()
    assert not may_continue(sequencer, entry())


def test_attempt_that_continues_looks_after_trouble() -> None:
    """A kept link saves the first look, and no other."""
    work = PartitionWork(entry())
    work.continued()
    work.received(3)
    assert (work.step, work.position, work.found) == (WorkStep.SEND, 0, 0)
    work.troubled(ServiceTimeoutError("lost"), counts=False)
    assert work.step is WorkStep.LOOK


def test_attempt_gives_up_when_its_time_is_over() -> None:
    """Outages do not count as tries: time ends them, with the last error."""
    work = PartitionWork(entry(), max_tries=0)
    work.received(3)
    for _ in range(50):
        assert work.troubled(ServiceTimeoutError("away"), counts=False)
    last = ServiceTimeoutError("still away")
    assert not work.troubled(last, counts=False, is_late=True)
    assert work.error() is last
