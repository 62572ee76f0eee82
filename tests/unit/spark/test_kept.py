"""What is kept of a batch: segments, and the object that names them; and the links of small batches."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
from collections.abc import Awaitable, Callable, Iterable, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventpump.aio.tasks import gather
from eventpump.core.sequencer import PartitionSequencer
from eventpump.errors import ServiceTimeoutError, StoreError
from eventpump.spark import worker
from eventpump.spark.sink import executor, kept
from eventpump.spark.sink.attempt import PartitionWork, WorkStep, may_continue
from eventpump.spark.sink.columns import EventColumns
from eventpump.spark.sink.executor import EncodeTask, KeepTask, OrderTask, SharedRows, ordered_rows
from eventpump.spark.sink.kept import (
    KeptBatch,
    ReadAhead,
    RowReader,
    Segment,
    encode_segments,
    read_batch,
    rows_of,
    segmented,
)
from eventpump.spark.sink.records import KeptRows
from tests.support.memory_rows import MemoryRowStore
from tests.unit.spark.plans import entry, plan

Rows = list[tuple[int, bytes]]
rows = st.lists(st.tuples(st.integers(0, 5), st.binary(max_size=5)), max_size=30)


def returned(task: Rows) -> tuple[str, bytes]:
    """Return what a task returns that has few rows."""
    parts, segments = segmented([partition for partition, _ in task], [event for _, event in task])
    return encode_segments(segments), b"".join(parts)


def read(batch: KeptBatch, store: MemoryRowStore) -> dict[int, list[bytes]]:
    """Read all rows of a batch, by partition."""
    reader = RowReader(store, "sink", batch, timeout=0.1)

    async def all_of(partition: int) -> list[bytes]:
        return [event for each in reader.segments(partition) for event in await reader.read(plan(), each, 0)]

    return {each: worker.run(all_of(each)) for each in batch.counts}


# ------------------------------------------------------------------------------------------------- segments


@given(st.lists(rows, max_size=4))
def test_rows_come_back_in_the_order_of_the_frame(tasks: list[Rows]) -> None:
    """*No loss and no reorder*: each partition has its rows in the order of tasks, and of rows in a task."""
    batch = KeptBatch.collected([returned(each) for each in tasks if each])
    raw = batch.encode()
    named = KeptRows(name="kept", size=len(raw), digest=hashlib.sha256(raw).hexdigest())
    decoded = KeptBatch.decode(raw, named)
    assert decoded == batch
    assert decoded.is_small
    expected: dict[int, list[bytes]] = {}
    for partition, event in [row for task in tasks for row in task]:
        expected.setdefault(partition, []).append(event)
    assert read(decoded, MemoryRowStore()) == expected
    assert decoded.counts == {each: len(events) for each, events in expected.items()}


@given(rows.filter(bool), st.data())
def test_damaged_bytes_are_not_rows(task: Rows, data: st.DataObject) -> None:
    """*No loss*: bytes that were changed, cut off or added to are found out before any row of them is used."""
    batch = KeptBatch.collected([returned(task)])
    raw = batch.encode()
    named = KeptRows(name="kept", size=len(raw), digest=hashlib.sha256(raw).hexdigest())
    segment = batch.segments[-1]
    own = batch.payload[segment.offset : segment.offset + segment.size]
    assert rows_of(own, segment) is not None
    for body in (own, raw):
        place = data.draw(st.integers(0, len(body) - 1))
        other = body[:place] + bytes([body[place] ^ 1]) + body[place + 1 :]
        for damaged in (other, body[:place], body + b"x"):
            if body is own:
                assert rows_of(damaged, segment) is None
            else:
                with pytest.raises(ValueError, match="which are not the"):
                    KeptBatch.decode(damaged, named)


@pytest.mark.parametrize("change", [lambda each: each[:-1], lambda each: [*each, 0]])
def test_rows_of_another_version_are_an_error_that_says_so(
    store: MemoryRowStore, monkeypatch: pytest.MonkeyPatch, change: Callable[[list[object]], list[object]]
) -> None:
    """A batch whose plan another version has stored, and which describes segments otherwise, fails as such."""

    def encode(segments: Iterable[Segment]) -> str:
        return json.dumps([change(each) for each in json.loads(encode_segments(segments))])

    batch = KeptBatch.collected([returned([(0, b"a"), (1, b"b")])])
    monkeypatch.setattr(kept, "encode_segments", encode)
    raw = batch.encode()
    name = worker.run(store.write("sink/000000000001", [raw])).rpartition("/")[2]
    named = KeptRows(name=name, size=len(raw), digest=hashlib.sha256(raw).hexdigest())
    planned = plan().model_copy(update={"rows": named})
    with pytest.raises(StoreError, match=r"the rows of batch 1.*another version of eventpump has written them"):
        worker.run(read_batch(store, "sink", planned, 0.1))


@given(rows.filter(bool), st.integers(0, 300), st.data())
def test_segments_are_the_same_rows_compressed_and_not(task: Rows, size: int, data: st.DataObject) -> None:
    """*No loss*: what does not become smaller is stored as it is, and damaged bytes are found out before they are
    decompressed."""
    partitions, events = [partition for partition, _ in task], [event + b"x" * size for _, event in task]
    plain, packed = segmented(partitions, events), segmented(partitions, events, is_compressed=True)
    for before, after in zip(plain[1], packed[1], strict=True):
        assert after.size <= before.size == after.plain
        stored = b"".join(packed[0])[after.offset : after.offset + after.size]
        assert rows_of(stored, after) == rows_of(
            b"".join(plain[0])[before.offset : before.offset + before.size], before
        )
        place = data.draw(st.integers(0, after.size - 1))
        assert rows_of(stored[:place] + bytes([stored[place] ^ 1]) + stored[place + 1 :], after) is None
    assert size < 100 or sum(map(len, packed[0])) < sum(map(len, plain[0])) / 2


# ------------------------------------------------------------------------------------------------- tasks that keep


def kept_by(
    count: int,
    store: MemoryRowStore,
    *,
    tasks: int = 1,
    most_returned: int = 10**6,
    token: str = "run.1",
    is_first: bool = False,
) -> tuple[KeptBatch, list[bytes | None]]:
    """Run a task, and return what the driver makes of it, and the rows that it returned."""

    def batches() -> Iterable[pa.RecordBatch]:
        for start in range(0, count, 10):
            yield pa.RecordBatch.from_arrays([pa.array([b"%d" % each for each in range(start, start + 10)])], ["body"])

    encoding = EncodeTask(EventColumns("body"), 4, 10**6, 0)
    shared = SharedRows(copy(store), "sink", token, 0.1)  # each task has its own
    task = KeepTask(encoding.rows, shared, 7, most_returned, tasks, is_first)
    found = [row for batch in task(batches()) for row in batch.to_pylist()]
    return KeptBatch.collected([(row["segments"], row["rows"]) for row in found]), [row["rows"] for row in found]


@pytest.fixture
def store() -> MemoryRowStore:
    """A store with the token of a run of its own."""
    made = MemoryRowStore()
    worker.run(made.open())
    worker.run(made.begin("sink/run.1"))
    worker.close()  # a worker's stores end with it
    return made


def test_tasks_that_order_rows_of_two_evaluations_return_summaries_that_differ(store: MemoryRowStore) -> None:
    """By rows that are others, fewer, or of another partition; not by their order. A summary is no row."""

    def kept(bodies: Sequence[bytes], partitions: Sequence[int]) -> tuple[int, str]:
        columns = EventColumns("body", partition="partition", order_by=("body",))
        frame = [pa.array(bodies), pa.array(partitions, pa.int32()), pa.array(bodies)]
        batch = pa.RecordBatch.from_arrays(frame, ["body", "partition", "order"])
        encoded = OrderTask(EncodeTask(columns, 4, 10**6, 0), has_summary=True)([batch])
        ordered = (each.select(["partition", "event"]) for each in encoded)
        task = KeepTask(ordered_rows, SharedRows(copy(store), "sink", "run.1", 0.1), 7, 10**6, 2, has_summaries=True)
        (found,) = [row for each in task(ordered) for row in each.to_pylist()]
        return sum(KeptBatch.collected([(found["segments"], found["rows"])]).counts.values()), found["summaries"]

    count, summary = kept([b"a", b"b"], [0, 1])
    assert count == 2
    assert kept([b"b", b"a"], [1, 0]) == (2, summary)
    others = [([b"a", b"c"], [0, 1]), ([b"a"], [0]), ([b"a", b"b"], [1, 1]), ([b"a", b"b"], [1, 0])]
    assert len({summary, *(kept(*each)[1] for each in others)}) == 5


def test_task_with_few_rows_returns_them(store: MemoryRowStore) -> None:
    """The driver has the rows of a small batch, and no object is written; a task without rows is counted too,
    so that the next batch's tasks are as many as they are taken for."""
    batch, (payload,) = kept_by(50, store)
    assert payload is not None
    assert (batch.is_small, sum(batch.counts.values())) == (True, 50)
    assert kept_by(0, store) == (KeptBatch(()), [None])
    assert list(worker.run(store.list("sink"))) == ["run.1"]


@pytest.mark.parametrize(("tasks", "most_returned"), [(1, 500), (1000, 10**5), (1, 0)])
def test_task_with_many_rows_writes_them(store: MemoryRowStore, tasks: int, most_returned: int) -> None:
    """What is more than the task's share of bytes is one object, in which each partition's rows lie together."""
    batch, found = kept_by(50, store, tasks=tasks, most_returned=most_returned)
    assert found == [None]
    objects = worker.run(store.list("sink"))
    assert batch.objects == {each: size for each, size in objects.items() if each != "run.1"}
    assert len(batch.objects) == 1
    assert len(batch.segments) == len(batch.counts)
    assert sum(map(len, read(batch, store).values())) == 50


@pytest.mark.parametrize("is_remote", [True, False])
def test_rows_are_compressed_where_they_go_over_a_network(store: MemoryRowStore, is_remote: bool) -> None:
    """A directory has them as they are; the driver reads the same of both."""
    returned, _ = kept_by(1000, store)
    store.is_remote = is_remote
    batch, _ = kept_by(1000, store, most_returned=0)
    assert {each.size < each.plain for each in batch.segments} == {is_remote}
    assert read(batch, store) == read(returned, store)


def test_task_with_more_rows_than_it_holds_writes_several_objects(
    store: MemoryRowStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """*Memory*: rows are written portion by portion, and stay in order."""
    monkeypatch.setattr(executor, "PORTION_BYTES", 300)
    batch, found = kept_by(200, store)
    assert len(batch.objects) > 3
    assert set(found) == {None}
    for events in read(batch, store).values():
        numbers = [int(event.rpartition(b"\xa0")[2][1:]) for event in events]
        assert numbers == sorted(numbers)


def test_task_that_does_not_see_the_drivers_store_writes_nothing(store: MemoryRowStore) -> None:
    """*No loss*: an executor that sees another directory says so, and creates none; in a run's
    first batch also without rows to write, so that this is not found out by a large batch much later."""
    with pytest.raises(Exception, match="rows: this executor does not see in"):
        kept_by(50, store, most_returned=0, token="run.2")
    for count in (0, 1):
        with pytest.raises(Exception, match="rows: this executor does not see in"):
            kept_by(count, store, token="run.2", is_first=True)
    kept_by(1, store, token="run.2")
    assert list(worker.run(store.list("sink"))) == ["run.1"]


class CountingStore(MemoryRowStore):
    """A store that counts its reads.

    Attributes:
        reads: Name, offset and size of each.
    """

    def __init__(self, objects: dict[str, dict[str, bytes]]) -> None:
        super().__init__(objects)
        self.reads: list[tuple[str, int, int]] = []

    async def read(self, name: str, offset: int, size: int) -> bytes | None:
        self.reads.append((name, offset, size))
        return await super().read(name, offset, size)


def kept_batch(store: MemoryRowStore, tasks: int = 3) -> KeptBatch:
    """Keep the rows of tasks, each in an object of its own."""
    found = [kept_by(50, store, most_returned=0)[0] for _ in range(tasks)]
    return KeptBatch(tuple(each for one in found for each in one.segments))


async def read_ahead(
    reader: RowReader, partitions: list[int], most: int, before: Callable[[], Awaitable[None]] | None = None
) -> dict[int, list[bytes]]:
    """Read the rows of a group, as its publishers do."""

    async def publish(number: int, reading: ReadAhead) -> list[bytes]:
        events: list[bytes] = []
        for each in reader.segments(number):
            if before is not None:
                await before()
            events += await reading.read(plan(), each, len(events), 0)
        return events

    async with reader.ahead(partitions, most) as reading:
        found = await gather(publish(each, reading) for each in partitions)
    return dict(zip(partitions, found, strict=True))


@pytest.fixture
def counting() -> CountingStore:
    """An open store, which counts its reads."""
    store = CountingStore({"sink": {"run.1": b""}})
    worker.run(store.open())
    worker.close()
    return store


def test_rows_of_neighbours_are_read_by_one_range_of_each_object(counting: CountingStore) -> None:
    """A task reads once of each object, and only what its partitions have."""
    batch = kept_batch(counting)
    own = [each for each in batch.segments if each.partition in (1, 2)]
    reader = RowReader(counting, "sink", batch, timeout=0.1)
    found = worker.run(read_ahead(reader, [1, 2], 10**6))
    assert len(counting.reads) == 3
    assert sum(size for _, _, size in counting.reads) == sum(each.size for each in own)
    assert {each: len(events) for each, events in found.items()} == {each: batch.counts[each] for each in (1, 2)}


def test_partitions_are_read_together_up_to_the_bytes_of_a_request(
    counting: CountingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neighbours are a group while their rows in each object are few, and not more of them than may be published."""
    reader = RowReader(counting, "sink", kept_batch(counting), timeout=0.1)
    assert reader.groups([0, 1, 2, 3], 4) == [[0, 1, 2, 3]]
    assert reader.groups([0, 1, 2, 3], 3) == [[0, 1, 2], [3]]
    monkeypatch.setattr(
        kept, "_READ_BYTES", sum(each.size for number in (1, 2) for each in reader.segments(number)[:1])
    )
    assert reader.groups([1, 2, 3], 4) == [[1, 2], [3]]
    monkeypatch.setattr(kept, "_READ_BYTES", 1)
    assert reader.groups([0, 1, 2, 3], 4) == [[0], [1], [2], [3]]
    assert reader.groups([], 4) == []


def test_rows_are_read_while_those_before_are_published(counting: CountingStore) -> None:
    """*Memory*: as many bytes are read ahead as there is room for, and the next when the first are used."""
    batch = kept_batch(counting, tasks=4)
    reader = RowReader(counting, "sink", batch, timeout=0.1)
    size = reader.segments(1)[0].size
    reads: list[int] = []

    async def publishing() -> None:
        for _ in range(20):
            await asyncio.sleep(0)  # what is begun is read
        reads.append(len(counting.reads))

    worker.run(read_ahead(reader, [1], 2 * size, publishing))
    assert reads == [2, 3, 4, 4]


def test_rows_that_are_skipped_by_all_are_not_read(counting: CountingStore) -> None:
    """Rows that are stored already are not read, beyond those that were read ahead."""
    batch = kept_batch(counting, tasks=4)
    reader = RowReader(counting, "sink", batch, timeout=0.1)

    async def skip() -> None:
        async with reader.ahead([1, 2], 1) as reading:
            for number in (1, 2):
                for each in reader.segments(number):
                    reading.skip(each)

    worker.run(skip())
    assert len(counting.reads) <= 1


@pytest.mark.parametrize("seed", range(200))
def test_partitions_that_read_at_any_pace_read_all_rows(seed: int, counting: CountingStore) -> None:
    """*No loss, and no partition waits for ever*: whatever is in which object, and however little may be held."""
    rng = random.Random(seed)
    segments: list[Segment] = []
    expected: dict[int, list[bytes]] = {number: [] for number in range(4)}
    for task in range(rng.randint(1, 8)):
        used = sorted(rng.choices(range(4), k=rng.randint(1, 20)))
        events = [f"{task} {row}".encode() for row in range(len(used))]
        parts, found = segmented(used, events, is_compressed=rng.random() < 0.5)
        name = worker.run(counting.write("sink/a", parts)).rpartition("/")[2]
        segments += [replace(each, name=name) for each in found]
        for number, event in zip(used, events, strict=True):
            expected[number].append(event)
    reader = RowReader(counting, "sink", KeptBatch(tuple(segments)), timeout=0.1)

    async def paced() -> None:
        for _ in range(rng.choice([0, 0, 1, 30])):
            await asyncio.sleep(0)

    assert worker.run(read_ahead(reader, list(range(4)), rng.choice([1, 50, 200, 10**6]), paced), 5.0) == expected


def test_rows_that_are_gone_are_named(store: MemoryRowStore) -> None:
    """*No loss*: an object that is not there is never taken for one without rows."""
    batch, _ = kept_by(50, store, most_returned=0)
    (name,) = batch.objects
    worker.run(store.delete([f"sink/{name}"]))
    with pytest.raises(StoreError, match=rf"read rows 0 to \d+ of batch 1 for partition \d: {name} is gone"):
        read(batch, store)
    reader = RowReader(store, "sink", batch, timeout=0.1)

    async def needed() -> None:
        async with reader.ahead([batch.segments[0].partition], 10**6) as reading:
            await reading.read(plan(), batch.segments[0], 20, 23)

    with pytest.raises(
        StoreError, match=rf"read rows 23 to \d+ of .* {name} is gone; 23 rows of this partition are stored"
    ):
        worker.run(needed())


# ------------------------------------------------------------------------------------------------- kept links


def test_link_is_kept_only_where_the_plan_goes_on() -> None:
    """A link of another producer, number or state is not continued; nor is one that may have been forgotten."""
    sequencer = PartitionSequencer[object]("0", producer_id=7, owner_level=3)
    assert not may_continue(sequencer, entry())
    sequencer.attached(7, 3, 20)
    assert may_continue(sequencer, entry())
    others: list[dict[str, Any]] = [
        {"producer_id": 8},
        {"owner_level": 4},
        {"next_number": 22},
        {"next_number": 20},
        {"is_fresh": True},
        {"nothing": 20},
    ]
    for values in others:
        assert not may_continue(sequencer, entry(**values)), values
    sequencer.offer(object(), 1)
    assert not may_continue(sequencer, entry())
    sequencer.sending()
    sequencer.outcome_unknown()
    assert not may_continue(sequencer, entry())


def test_attempt_that_continues_looks_after_trouble() -> None:
    """A kept link saves the first look, and no other."""
    work = PartitionWork(entry(count=3))
    work.continued()
    work.received(3)
    assert (work.step, work.position, work.found) == (WorkStep.SEND, 0, 0)
    work.troubled(ServiceTimeoutError("lost"), counts=False)
    assert work.step is WorkStep.LOOK


def test_attempt_gives_up_when_its_time_is_over() -> None:
    """Outages do not count as tries: time ends them, with the last error."""
    work = PartitionWork(entry(count=3), max_tries=0)
    work.received(3)
    for _ in range(50):
        assert work.troubled(ServiceTimeoutError("away"), counts=False)
    last = ServiceTimeoutError("still away")
    assert not work.troubled(last, counts=False, is_late=True)
    assert work.error() is last
