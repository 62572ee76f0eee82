"""The rows of a batch as they are kept until they are published: segments, and the object that names them.

A task that encodes returns its rows if they are few. Otherwise it writes them into objects of the row store, one for
each portion, in which the rows of a hub partition lie together: a segment. The driver writes one object more, with the
rows that were returned to it, and with the index of all segments, in the order of the rows. The plan names this one.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import struct
import zlib
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from eventpump.errors import StoreError
from eventpump.spark.sink.encode import NOWHERE
from eventpump.spark.sink.patience import patiently
from eventpump.spark.sink.records import KeptRows, Plan
from eventpump.storage.rows.interface import RowStore

Buffer = bytes | memoryview

_SIZE: Final = struct.Struct(">Q")
_CODEC: Final = "zstd"
"""At its first level, 1 KiB of telemetry: 4 us to compress to 0.4 of it, and 1 us to read; LZ4 3 and 0.5 us, to 0.8."""
_READ_BYTES: Final = 4 * 1024 * 1024
"""Bytes of an object that the partitions of a group have together, unless there is one only."""
_READS: Final = 8
"""Objects that are read at a time for a group."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows of one hub partition that lie together, in their order.

    Args:
        name: The object; "" for the one that the plan names.
        partition: The hub partition's number; `NOWHERE` for rows that cannot be events.
        offset: The first byte; of the object that the plan names, after its index.
        size: Its bytes, as they are stored.
        plain: Its bytes before they were compressed; the same as `size` where they are not.
    """

    name: str
    partition: int
    offset: int
    size: int
    count: int
    crc: int
    plain: int


def segmented(
    partitions: Sequence[int], events: Sequence[bytes], *, is_compressed: bool = False
) -> tuple[list[Buffer], list[Segment]]:
    """Put rows together by their partitions.

    Args:
        is_compressed: Whether to compress each segment that becomes smaller by it.

    Returns:
        Their bytes, in parts, and the segments, without the name of an object.
    """
    # Arrow's buffers are divided as they are: nothing is done per row.
    placed = pa.array(partitions, pa.int32())
    order = pc.array_sort_indices(placed)
    buffers = pa.array(events, pa.binary()).take(order).buffers()
    offsets, content = memoryview(buffers[1]), memoryview(buffers[2])
    ends = offsets.cast("i")
    parts: list[Buffer] = []
    segments: list[Segment] = []
    first = size = 0
    counts = sorted((each["values"], each["counts"]) for each in placed.value_counts().to_pylist())
    for partition, count in counts:
        last = first + count
        own: list[Buffer] = [offsets[4 * first : 4 * (last + 1)], content[ends[first] : ends[last]]]
        stored = plain = sum(map(len, own))
        if is_compressed:
            packed = pa.compress(b"".join(own), codec=_CODEC, asbytes=True)
            if len(packed) < plain:
                own, stored = [packed], len(packed)
        crc = 0
        for each in own:
            crc = zlib.crc32(each, crc)
        parts += own
        segments.append(Segment("", partition, size, stored, count, crc, plain))
        first, size = last, size + stored
    return parts, segments


def rows_of(raw: bytes, segment: Segment) -> list[bytes] | None:
    """Return the events of a segment; None if these are not its bytes."""
    if len(raw) != segment.size or zlib.crc32(raw) != segment.crc:
        return None
    if segment.plain != segment.size:
        raw = pa.decompress(raw, segment.plain, codec=_CODEC, asbytes=True)
    # All numbers are as Arrow has them: the machines of a cluster are alike in that.
    numbers = struct.unpack_from(f"={segment.count + 1}i", raw)
    base = 4 * len(numbers) - numbers[0]
    return [raw[base + start : base + end] for start, end in pairwise(numbers)]


def encode_segments(segments: Iterable[Segment]) -> str:
    """Encode segments as JSON."""
    return json.dumps([[s.name, s.partition, s.offset, s.size, s.count, s.crc, s.plain] for s in segments])


def decode_segments(text: str | bytes) -> list[Segment]:
    """Decode segments. Raises `ValueError` for those of a version of eventpump that describes them otherwise."""
    try:
        return [Segment(*each) for each in json.loads(text)]
    except TypeError:
        raise ValueError(
            "another version of eventpump has written them, in another form: let that version finish the batch"
        ) from None


@dataclass(frozen=True, slots=True)
class KeptBatch:
    """The rows of a batch; segments of a partition follow one another, and `payload` has those without a name."""

    segments: tuple[Segment, ...]
    payload: bytes = b""

    @classmethod
    def collected(cls, found: Iterable[tuple[str, bytes | None]]) -> KeptBatch:
        """Put together what tasks have returned (`executor.KeepTask`): segments as JSON, and their bytes if these were
        returned."""
        segments: list[Segment] = []
        payloads: list[bytes] = []
        base = 0
        for text, payload in found:
            own = decode_segments(text)
            segments += own if payload is None else [replace(each, offset=each.offset + base) for each in own]
            if payload is not None:
                payloads.append(payload)
                base += len(payload)
        return cls(tuple(segments), b"".join(payloads))

    @property
    def is_small(self) -> bool:
        """Whether the driver has all rows."""
        return not any(each.name for each in self.segments)

    @property
    def objects(self) -> dict[str, int]:
        """The objects of tasks, by name, with their sizes."""
        sizes: dict[str, int] = {}
        for each in self.segments:
            if each.name:
                sizes[each.name] = max(sizes.get(each.name, 0), each.offset + each.size)
        return sizes

    @property
    def counts(self) -> dict[int, int]:
        """How many events there are, by the partition's number."""
        counts: dict[int, int] = {}
        for each in self.segments:
            if each.partition != NOWHERE:
                counts[each.partition] = counts.get(each.partition, 0) + each.count
        return counts

    @property
    def bad_rows(self) -> int:
        """How many rows could not be events."""
        return sum(each.count for each in self.segments if each.partition == NOWHERE)

    def encode(self) -> bytes:
        """Encode it as the object that the plan names."""
        index = encode_segments(self.segments).encode()
        content = b"".join((_SIZE.pack(len(index)), index, self.payload))
        return _SIZE.pack(len(content)) + bytes(pa.compress(content, codec=_CODEC, asbytes=True))

    @classmethod
    def decode(cls, raw: bytes, rows: KeptRows) -> KeptBatch:
        """Decode the object that a plan names. Raises `ValueError` if these are not the bytes that were written, or
        another version's."""
        if hashlib.sha256(raw).hexdigest() != rows.digest:
            raise ValueError(f"{rows.name} has {len(raw)} bytes, which are not the {rows.size} that were written")
        (size,) = _SIZE.unpack_from(raw)
        content = pa.decompress(raw[_SIZE.size :], size, codec=_CODEC, asbytes=True)
        (index,) = _SIZE.unpack_from(content)
        end = _SIZE.size + index
        return cls(tuple(decode_segments(content[_SIZE.size : end])), content[end:])


async def read_batch(store: RowStore, directory: str, plan: Plan, timeout: float) -> KeptBatch:
    """Read the object that a plan with rows names.

    Raises:
        StoreError: The store failed, or does not have what was written.
    """
    rows = plan.rows
    assert rows is not None
    raw = await patiently(lambda: store.read(f"{directory}/{rows.name}", 0, rows.size), timeout)
    try:
        if raw is None:
            raise ValueError(f"{rows.name} is gone: rows must name the place that the batch was begun with")
        return KeptBatch.decode(raw, rows)
    except ValueError as error:
        raise StoreError(f"read the rows of batch {plan.batch_id}", str(error)) from None


class RowReader:
    """Reads the rows of a plan from an open store. An outage of that is waited for, so many seconds."""

    def __init__(self, store: RowStore, directory: str, batch: KeptBatch, timeout: float) -> None:
        self._store = store
        self._directory = directory
        self._timeout = timeout
        self._payload = batch.payload
        self._segments: dict[int, list[Segment]] = {}
        self._places: dict[str, int] = {}
        for place, each in enumerate(batch.segments):
            self._segments.setdefault(each.partition, []).append(each)
            self._places.setdefault(each.name, place)

    def segments(self, partition: int) -> Sequence[Segment]:
        """Return the segments of a partition, in the order of its rows."""
        return self._segments.get(partition, ())

    @property
    def largest(self) -> int:
        """The bytes of the largest segment, as it is read."""
        return max((each.plain for segments in self._segments.values() for each in segments), default=0)

    def groups(self, partitions: Sequence[int], most: int) -> list[list[int]]:
        """Divide partitions into groups of neighbours whose rows are read together: of an object by about one request.

        Args:
            most: Partitions in a group.
        """
        groups: list[list[int]] = []
        sizes: Counter[str] = Counter()
        for number in partitions:
            own = Counter({each.name: each.size for each in self.segments(number)})
            if not groups or len(groups[-1]) == most or max((sizes + own).values(), default=0) > _READ_BYTES:
                groups.append([])
                sizes.clear()
            groups[-1].append(number)
            sizes += own
        return groups

    @asynccontextmanager
    async def ahead(self, partitions: Sequence[int], most: int) -> AsyncIterator[ReadAhead]:
        """Begin to read the rows of a group.

        Args:
            most: Bytes that are read and not used yet, unless one object has more.
        """
        ranges: dict[str, _Range] = {}
        for each in chain.from_iterable(map(self.segments, partitions)):
            if each.name:
                ranges.setdefault(each.name, _Range(each.name, each.offset)).add(each)
        reading = ReadAhead(self, sorted(ranges.values(), key=lambda each: self._places[each.name]), most)
        try:
            yield reading
        finally:
            await reading.aclose()

    async def find(self, name: str, offset: int, size: int) -> bytes | None:
        """Return a range of an object of the batch, or None.

        Args:
            name: The object; "" for the one that the plan names.

        Raises:
            StoreError: The store failed.
        """
        if not name:
            return self._payload[offset : offset + size]
        path = f"{self._directory}/{name}"
        return await patiently(lambda: self._store.read(path, offset, size), self._timeout)

    async def read(self, plan: Plan, segment: Segment, first: int) -> list[bytes]:
        """Return the events of a segment, which begins with the row `first`.

        Raises:
            StoreError: The store failed, or does not have what was written.
        """
        return _events(plan, segment, first, 0, await self.find(segment.name, segment.offset, segment.size))


class _Range:
    """What is read of an object at once.

    Attributes:
        users: How many segments of it are neither read nor skipped.
        found: Its bytes, when they are there; None until the read begins.
    """

    __slots__ = ("end", "found", "name", "start", "users")

    def __init__(self, name: str, start: int) -> None:
        self.name = name
        self.start = self.end = start
        self.users = 0
        self.found: asyncio.Future[bytes | None] = asyncio.get_running_loop().create_future()

    def add(self, segment: Segment) -> None:
        self.start, self.end = min(self.start, segment.offset), max(self.end, segment.offset + segment.size)
        self.users += 1

    @property
    def size(self) -> int:
        return self.end - self.start


class ReadAhead:
    """The rows of a group of partitions, which are read before they are needed, in their order.

    Its partitions wait for each other: all of them must be read, or skipped, at the same time.

    Args:
        ranges: In the order of the rows.
        most: As of `RowReader.ahead`.
    """

    def __init__(self, rows: RowReader, ranges: Iterable[_Range], most: int) -> None:
        self._rows = rows
        self._ranges = {each.name: each for each in ranges}
        self._waiting = deque(self._ranges.values())
        self._most = most
        self._held = 0
        self._reading = asyncio.Semaphore(_READS)
        self._tasks: set[asyncio.Task[None]] = set()
        self._go_on()

    def _go_on(self) -> None:
        """Begin the next reads, as far as there is room. What comes first has room, so that it is always read."""
        while self._waiting and (not self._held or self._held + self._waiting[0].size <= self._most):
            each = self._waiting.popleft()
            if each.users:
                self._held += each.size
                task = asyncio.create_task(self._load(each), name=f"read {each.name}")
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _load(self, each: _Range) -> None:
        try:
            async with self._reading:
                found = await self._rows.find(each.name, each.start, each.size)
        except Exception as error:
            each.found.set_exception(error)
            each.found.exception()  # raised to those who read it, if anybody does
        else:
            each.found.set_result(found)

    async def read(self, plan: Plan, segment: Segment, first: int, needed: int) -> list[bytes]:
        """Return the events of a segment. It is not read again.

        Args:
            first: The row that it begins with.
            needed: How many rows of the partition are stored, as far as is known.

        Raises:
            StoreError: The store failed, or does not have what was written.
        """
        if not segment.name:
            return _events(plan, segment, first, needed, await self._rows.find("", segment.offset, segment.size))
        each = self._ranges[segment.name]
        found = await asyncio.shield(each.found)  # others wait for it too
        start = segment.offset - each.start
        events = _events(plan, segment, first, needed, None if found is None else found[start : start + segment.size])
        self.skip(segment)
        return events

    def skip(self, segment: Segment) -> None:
        """Do without a segment."""
        if not segment.name:
            return
        each = self._ranges[segment.name]
        each.users -= 1
        if not each.users:
            del self._ranges[segment.name]
            if each not in self._waiting:
                self._held -= each.size
                self._go_on()

    async def aclose(self) -> None:
        """End the reads."""
        self._waiting.clear()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)


def _events(plan: Plan, segment: Segment, first: int, needed: int, raw: bytes | None) -> list[bytes]:
    events = None if raw is None else rows_of(raw, segment)
    if events is None:
        last, name = first + segment.count - 1, segment.name or "the object of the plan"
        raise StoreError(
            f"read rows {max(first, needed)} to {last} of batch {plan.batch_id} for partition {segment.partition}",
            f"{name} {'is gone' if raw is None else 'is damaged'}; {needed} rows of this partition are stored",
        )
    return events
