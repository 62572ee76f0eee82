"""The executors' part of the foreachBatch producer. A separate module, because each Python worker loads it."""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import tee
from typing import Final

import pyarrow as pa

from eventpump.options.callables import loaded_codecs
from eventpump.spark import worker
from eventpump.spark.connection import SparkConnection
from eventpump.spark.sink.columns import EventColumns
from eventpump.spark.sink.encode import NOWHERE, EventEncoder, OnBadRow, StableRouter, hashed, task_number
from eventpump.spark.sink.exactly_once import PublishOptions
from eventpump.spark.sink.kept import Buffer, KeptBatch, RowReader, Segment, encode_segments, segmented
from eventpump.spark.sink.patience import patiently
from eventpump.spark.sink.publishing import publish_rows
from eventpump.spark.sink.records import Plan, encode_outcome, rows_stem
from eventpump.storage.rows.interface import RowStore

PORTION_BYTES: Final = 32 * 1024 * 1024
"""Bytes of rows that a task holds before it writes them."""
_KEPT_STORES: Final = 8
"""Runs whose store a worker keeps open."""
_PLACE_BITS: Final = 40
"""Bits of a row's number in its task, below the task's number."""
_SUMMARY: Final = b"\xff"
"""What the summary of an encoding task begins with, and no event does."""
OUTCOME_DDL: Final = "outcome string"
_OUTCOME: Final = pa.schema([("outcome", pa.string())])


@dataclass(frozen=True, slots=True)
class EncodeTask:
    """Encodes the rows of one task of a DataFrame: for `mapInArrow`. Pickled for executors.

    Args:
        reserved: Bytes that will be added to each event besides its numbers.
        encode: The codecs to encode bodies with, or their import name.
    """

    columns: EventColumns
    partition_count: int
    max_message_size: int
    reserved: int
    router: StableRouter = "hash"
    encode: object = ()
    on_bad_row: OnBadRow = "fail"

    def rows(self, batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[list[int], list[bytes]]]:
        """Encode rows: for each batch the partition of each row, and its event.
        Raises `EventError` if a row cannot be one."""
        encoder = self.encoder()
        for batch in batches:
            if self.on_bad_row == "fail":
                partitions, events = encoder.encode(batch)
            else:
                partitions, events = encoder.encode_good(batch, keeps=self.on_bad_row == "keep")
            yield hashed(partitions, events, self.partition_count), events

    def encoder(self) -> EventEncoder:
        """Return the encoder of one task's rows."""
        worker.spare_collections()
        return EventEncoder(
            self.columns,
            partition_count=self.partition_count,
            max_message_size=self.max_message_size,
            reserved=self.reserved,
            router=self.router,
            codecs=loaded_codecs("encode", self.encode),
        )


@dataclass(frozen=True, slots=True)
class OrderTask:
    """Encodes the rows of one task for Spark to order them: for `mapInArrow`. Pickled for executors.

    Args:
        has_summary: Whether several tasks get the rows. If Spark evaluates them again for some of these, because an
            executor has died, and they are others, rows are lost or doubled. So all get a summary too.
    """

    encoding: EncodeTask
    has_summary: bool = False

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Return partition, ordering columns, the place of the row in the frame, and the event. Raises `EventError`."""
        columns = len(self.encoding.columns.order_by)
        names = ["partition", *(f"order_{number}" for number in range(columns)), "place", "event"]
        first = task_number() << _PLACE_BITS
        count = digest = 0
        ordering: Sequence[pa.Array] = ()

        def ordered(partitions: Sequence[int], places: Iterable[int], events: Sequence[bytes]) -> pa.RecordBatch:
            arrays = [pa.array(partitions, pa.int32()), *ordering]
            arrays += [pa.array(places, pa.int64()), pa.array(events, pa.binary())]
            return pa.RecordBatch.from_arrays(arrays, names)

        read, batches = tee(batches)  # each is encoded when it is read
        for batch, (partitions, events) in zip(read, self.encoding.rows(batches), strict=True):
            ordering = batch.columns[len(batch.columns) - columns :]
            yield ordered(partitions, range(first + count, first + count + len(events)), events)
            count += len(events)
            if self.has_summary:
                digest += sum(map(zlib.crc32, events, partitions))  # of rows in any order
        if self.has_summary and count:
            summary = _SUMMARY + json.dumps([task_number(), count, digest]).encode()
            everywhere = range(self.encoding.partition_count)
            ordering = [pa.nulls(len(everywhere), each.type) for each in ordering]
            yield ordered(everywhere, [-1] * len(everywhere), [summary] * len(everywhere))


def ordered_rows(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[list[int], list[bytes]]]:
    """Return the rows that Spark has ordered: partition and event. Among them are the summaries of tasks."""
    for batch in batches:
        yield batch.column(0).to_pylist(), batch.column(1).to_pylist()


def _take_summaries(partitions: list[int], events: list[bytes]) -> set[str]:
    """Take the summaries of encoding tasks out of rows.

    Returns:
        What they say.
    """
    rows = [row for row, event in enumerate(events) if event[:1] == _SUMMARY and partitions[row] != NOWHERE]
    found = {events[row][1:].decode() for row in rows}
    for row in reversed(rows):
        del partitions[row], events[row]
    return found


@dataclass(frozen=True, slots=True)
class SharedRows:
    """The row store of a run, for its tasks.

    Args:
        token: What the driver has written, so that tasks see whether they share the store with it.
        timeout: Seconds for which an outage of the store is waited for.
    """

    store: RowStore = field(repr=False)
    directory: str
    token: str
    timeout: float

    async def opened(self) -> RowStore:
        """Return the open store of this process. On the loop's thread.
        Raises `StoreError` if it failed, or is not the driver's."""
        return await worker.once(_OpenStores).of(self)

    async def write(self, batch_id: int, parts: Sequence[Buffer]) -> str:
        """Write an object with rows of a batch; return its name in the directory. Raises `StoreError`."""
        store = await self.opened()
        stem = f"{self.directory}/{rows_stem(batch_id)}"
        name = await patiently(lambda: store.write(stem, parts), self.timeout)
        return name.rpartition("/")[2]


class _OpenStores:
    """The stores of this process, by the token of their run. On the loop's thread."""

    def __init__(self) -> None:
        self._opened: dict[str, RowStore] = {}
        self._lock = asyncio.Lock()

    async def of(self, rows: SharedRows) -> RowStore:
        async with self._lock:
            found = self._opened.get(rows.token)
            if found is None:
                await rows.store.open()
                try:
                    await patiently(lambda: rows.store.check(f"{rows.directory}/{rows.token}"), rows.timeout)
                except BaseException:
                    await rows.store.aclose()
                    raise
                found = self._opened[rows.token] = rows.store
                if len(self._opened) > _KEPT_STORES:
                    await self._opened.pop(next(iter(self._opened))).aclose()
            return found


KEPT_DDL: Final = "segments string, rows binary, summaries string"
_KEPT: Final = pa.schema([("segments", pa.string()), ("rows", pa.binary()), ("summaries", pa.string())])


@dataclass(frozen=True, slots=True)
class KeepTask:
    """Keeps the rows of one task, in their order: for `mapInArrow`. Pickled for executors.

    Rows that are few are returned, for the driver to write; others are written.

    Args:
        rows_of: Reads the batches: `EncodeTask.rows`, or `ordered_rows`.
        most_returned: The most bytes of rows that all tasks return together.
        tasks: How many tasks share them. Further tasks return none.
        is_first: Whether it is the first batch of a run: then each task looks whether it shares the store with the
            driver, also if it writes nothing.
        has_summaries: Whether there are summaries of `OrderTask` among the rows.
    """

    rows_of: Callable[[Iterable[pa.RecordBatch]], Iterator[tuple[list[int], list[bytes]]]]
    shared: SharedRows
    batch_id: int
    most_returned: int
    tasks: int
    is_first: bool = False
    has_summaries: bool = False

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Return the segments of each portion, as JSON, and their bytes if they are not written; none without rows.

        The last one has the summaries that were among the rows, as JSON; null if there can be none.

        Raises:
            EventError: A row cannot be an event.
            ConfigurationError: The row store is not the driver's.
            StoreError: The row store failed.
        """
        worker.spare_collections()
        if self.is_first:
            worker.run(self.shared.opened())
        partitions: list[int] = []
        events: list[bytes] = []
        size = 0
        is_written = False
        summaries: set[str] | None = set() if self.has_summaries else None
        for routed, encoded in self.rows_of(batches):
            if summaries is not None:
                summaries |= _take_summaries(routed, encoded)
            partitions += routed
            events += encoded
            size += sum(map(len, encoded))
            if size >= PORTION_BYTES:
                yield self._written(partitions, events)
                partitions, events, size, is_written = [], [], 0, True
        if events:
            room = self.most_returned // self.tasks if task_number() < self.tasks and not is_written else 0
            if size + 4 * (len(events) + len(set(partitions))) <= room:  # with where each row of a segment ends
                parts, segments = segmented(partitions, events)
                yield _returned(segments, b"".join(parts), summaries)
            else:
                yield self._written(partitions, events, summaries)
        elif summaries or not is_written:
            yield _returned((), None, summaries)  # the driver counts the tasks

    def _written(
        self, partitions: Sequence[int], events: Sequence[bytes], summaries: set[str] | None = None
    ) -> pa.RecordBatch:
        parts, segments = segmented(partitions, events, is_compressed=self.shared.store.is_remote)
        name = worker.run(self.shared.write(self.batch_id, parts))
        return _returned([replace(each, name=name) for each in segments], None, summaries)


def _returned(segments: Iterable[Segment], rows: bytes | None, summaries: set[str] | None) -> pa.RecordBatch:
    said = None if summaries is None else json.dumps(sorted(summaries))
    values = [pa.array([encode_segments(segments)]), pa.array([rows], pa.binary()), pa.array([said], pa.string())]
    return pa.RecordBatch.from_arrays(values, schema=_KEPT)


@dataclass(frozen=True, slots=True)
class PublishTask:
    """Publishes the rows of whole hub partitions, several at a time: for `mapInArrow`. Pickled for executors."""

    connection: SparkConnection
    plan: Plan
    options: PublishOptions
    shared: SharedRows
    batch: KeptBatch = field(repr=False)
    tasks: int

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Publish partitions of the tasks with these numbers, and yield one outcome for each with rows.
        Raises as `publish_rows`."""
        worker.spare_collections()
        for batch in batches:
            for number in batch.column(0).to_pylist():
                outcomes = worker.run(self._publish(number))
                yield pa.RecordBatch.from_arrays([pa.array(outcomes, pa.string())], schema=_OUTCOME)

    async def _publish(self, number: int) -> list[str]:
        shared = self.shared
        reader = RowReader(await shared.opened(), shared.directory, self.batch, shared.timeout)
        used = [each.partition_id for each in self.plan.partitions if each.count]
        own = used[len(used) * number // self.tasks : len(used) * (number + 1) // self.tasks]
        outcomes = await publish_rows(worker.transport(self.connection), self.plan, reader, self.options, only=own)
        return [encode_outcome(each) for each in outcomes]
