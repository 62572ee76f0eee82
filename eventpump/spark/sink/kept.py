"""The rows of a batch as they are kept until they are published: segments, and the object that names them.

A task that encodes returns its rows if they are few. Otherwise it writes them into objects of the row store, one for
each portion, in which the rows of a hub partition lie together: a segment. The driver writes one object more, with the
rows that were returned to it, and with the index of all segments, in the order of the rows. The plan names this one.
"""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from eventpump.aio.tasks import gather
from eventpump.errors import StoreError
from eventpump.spark.sink.encode import NOWHERE
from eventpump.spark.sink.patience import patiently
from eventpump.spark.sink.records import KeptRows, Plan
from eventpump.storage.rows.interface import RowStore

Buffer = bytes | memoryview

_SIZE: Final = struct.Struct(">Q")
_CODEC: Final = "zstd"
_LOADED_BYTES: Final = 64 * 1024 * 1024
"""The most bytes of segments that are read before the first of them is needed."""
_READS: Final = 4
"""Objects that are read at a time then."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows of one hub partition that lie together, in their order.

    Args:
        name: The object; "" for the one that the plan names.
        partition: The hub partition's number; `NOWHERE` for rows that cannot be events.
        offset: The first byte; of the object that the plan names, after its index.
        crc: The CRC-32 of its bytes.
    """

    name: str
    partition: int
    offset: int
    size: int
    count: int
    crc: int


def segmented(partitions: Sequence[int], events: Sequence[bytes]) -> tuple[list[Buffer], list[Segment]]:
    """Put rows together by their hub partitions.

    Args:
        partitions: Of each row.
        events: Encoded, in the order of the rows.

    Returns:
        The bytes, in parts, and the segments that they have, without the name of an object.
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
        head, rows = offsets[4 * first : 4 * (last + 1)], content[ends[first] : ends[last]]
        segment = Segment("", partition, size, len(head) + len(rows), count, zlib.crc32(rows, zlib.crc32(head)))
        parts += [head, rows]
        segments.append(segment)
        first, size = last, size + segment.size
    return parts, segments


def rows_of(raw: bytes, segment: Segment) -> list[bytes] | None:
    """Return the events of a segment; None if these are not its bytes."""
    if len(raw) != segment.size or zlib.crc32(raw) != segment.crc:
        return None
    # All numbers are as Arrow has them: the machines of a cluster are alike in that.
    numbers = struct.unpack_from(f"={segment.count + 1}i", raw)
    base = 4 * len(numbers) - numbers[0]
    return [raw[base + start : base + end] for start, end in pairwise(numbers)]


def encode_segments(segments: Iterable[Segment]) -> str:
    """Encode segments as JSON."""
    return json.dumps([[s.name, s.partition, s.offset, s.size, s.count, s.crc] for s in segments])


def decode_segments(text: str | bytes) -> list[Segment]:
    """Decode segments."""
    return [Segment(*each) for each in json.loads(text)]


@dataclass(frozen=True, slots=True)
class KeptBatch:
    """The rows of a batch.

    Args:
        segments: In the order of the rows: those of a partition follow one another.
        payload: The bytes of the segments without a name.
    """

    segments: tuple[Segment, ...]
    payload: bytes = b""

    @classmethod
    def collected(cls, found: Iterable[tuple[str, bytes | None]]) -> KeptBatch:
        """Put together what tasks have returned, see `executor.KeepTask`.

        Args:
            found: Segments as JSON, and their bytes, if these were returned.
        """
        segments: list[Segment] = []
        payloads: list[bytes] = []
        base = 0
        for text, payload in found:
            for each in decode_segments(text):
                offset = each.offset if payload is None else each.offset + base
                segments.append(Segment(each.name, each.partition, offset, each.size, each.count, each.crc))
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
        """Decode the object that a plan names.

        Raises:
            ValueError: These are not the bytes that were written.
        """
        if hashlib.sha256(raw).hexdigest() != rows.digest:
            raise ValueError(f"{rows.name} has {len(raw)} bytes, which are not the {rows.size} that were written")
        (size,) = _SIZE.unpack_from(raw)
        content = pa.decompress(raw[_SIZE.size :], size, codec=_CODEC, asbytes=True)
        (index,) = _SIZE.unpack_from(content)
        end = _SIZE.size + index
        return cls(tuple(decode_segments(content[_SIZE.size : end])), content[end:])


async def read_batch(store: RowStore, directory: str, plan: Plan, timeout: float) -> KeptBatch:
    """Read the object that a plan with rows names.

    Args:
        store: An open one.
        directory: The sink's in it.
        timeout: Seconds for which an outage of the store is waited for.

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
    """Reads the rows of a plan.

    Args:
        store: An open one.
        directory: The sink's in it.
        timeout: Seconds for which an outage of the store is waited for.
    """

    def __init__(self, store: RowStore, directory: str, batch: KeptBatch, timeout: float) -> None:
        self._store = store
        self._directory = directory
        self._timeout = timeout
        self._payload = batch.payload
        self._segments: dict[int, list[Segment]] = {}
        for each in batch.segments:
            self._segments.setdefault(each.partition, []).append(each)
        self._loaded: dict[str, tuple[int, bytes]] = {}

    def segments(self, partition: int) -> Sequence[Segment]:
        """Return the segments of a partition, in the order of its rows."""
        return self._segments.get(partition, ())

    @property
    def largest(self) -> int:
        """The bytes of the largest segment."""
        return max((each.size for segments in self._segments.values() for each in segments), default=0)

    async def load(self, partitions: Collection[int]) -> None:
        """Read the rows of neighbouring partitions at once, unless they are many: of each object they are one range.

        Raises:
            StoreError: The store failed.
        """
        segments = [each for number in partitions for each in self.segments(number) if each.name]
        if sum(each.size for each in segments) > _LOADED_BYTES:
            return
        ranges: dict[str, tuple[int, int]] = {}
        for each in segments:
            start, end = ranges.get(each.name, (each.offset, 0))
            ranges[each.name] = min(start, each.offset), max(end, each.offset + each.size)

        async def load(name: str, start: int, end: int) -> None:
            found = await self._read(name, start, end - start)
            if found is not None:  # otherwise it is an error only if a row of it is needed
                self._loaded[name] = start, found

        await gather((load(name, *each) for name, each in ranges.items()), at_once=_READS)

    async def _read(self, name: str, offset: int, size: int) -> bytes | None:
        path = f"{self._directory}/{name}"
        return await patiently(lambda: self._store.read(path, offset, size), self._timeout)

    async def read(self, plan: Plan, segment: Segment, first: int, needed: int = 0) -> list[bytes]:
        """Return the events of a segment.

        Args:
            first: The row that it begins with.
            needed: How many rows of the partition are stored, as far as is known.

        Raises:
            StoreError: The store failed, or does not have what was written.
        """
        start, held = self._loaded.get(segment.name, (0, None if segment.name else self._payload))
        if held is None:
            raw = await self._read(segment.name, segment.offset, segment.size)
        else:
            raw = held[segment.offset - start : segment.offset - start + segment.size]
        events = None if raw is None else rows_of(raw, segment)
        if events is None:
            last, name = first + segment.count - 1, segment.name or "the object of the plan"
            raise StoreError(
                f"read rows {max(first, needed)} to {last} of batch {plan.batch_id} for partition {segment.partition}",
                f"{name} {'is gone' if raw is None else 'is damaged'}; {needed} rows of this partition are stored",
            )
        return events
