"""Blocks of encoded rows: Spark exchanges and sorts some hundreds of them instead of as many thousand rows.

The rows of a hub partition are ordered by the CRC-32 of the event, and by the event where these are equal. A task that
encodes sorts a few MiB of rows at a time and divides them into blocks: each has rows of one partition, and is placed by
the partition and by its lowest CRC-32. Spark sorts the blocks by their places, and the task that publishes a partition
merges them: a row whose CRC-32 is below that of a block is not in a later block. So the order of the rows is the same
however tasks and blocks divide them, and few rows are held at a time: those of the blocks that overlap, one of each
portion that was sorted. A block has at most a 16th of an average partition's part of its portion, so that these are at
most a 16th of an average partition, whatever the number of partitions; of a task with little for each partition, 1 KiB
each (and of every block, the event that fills it). While they are merged, as much again is added, or `MERGED_BYTES`.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import BinaryType, IntegerType, LongType, StructField, StructType

SORTED_BYTES: Final = 2 * 1024 * 1024
"""Bytes of rows that an encoding task sorts at a time, more for more than 128 partitions: a block must not be larger
than its part. With four times as many, fresh memory costs 1 to 2 µs a row."""
BLOCK_BYTES: Final = 16 * 1024
"""A block is ended by the row with which it has as many bytes of rows, or fewer where there are many partitions."""
LEAST_BLOCK_BYTES: Final = 1024
"""The same for the smallest blocks: Spark's cost of a block is shared by its rows."""
PARTITION_BLOCKS: Final = 16
"""The blocks of an average partition in what is sorted at a time, at least."""
MERGED_BYTES: Final = 1024 * 1024
"""Bytes of blocks that are added before the rows are sorted and passed on."""

BLOCKS: Final = pa.schema([("partition", pa.int32()), ("place", pa.int64()), ("block", pa.binary())])
BLOCKS_TYPE: Final = StructType(
    [StructField("partition", IntegerType()), StructField("place", LongType()), StructField("block", BinaryType())]
)

_COUNT: Final = struct.Struct("=I")  # all numbers are as Arrow has them: the machines of a cluster are alike in that
_HASH_BITS: Final = 32
_HASH_MASK: Final = 2**_HASH_BITS - 1


def blocks_of(
    rows: Iterable[tuple[Sequence[int], Sequence[int], Sequence[bytes]]],
    *,
    partition_count: int,
    sorted_bytes: int | None = None,
    block_bytes: int = BLOCK_BYTES,
) -> Iterator[pa.RecordBatch]:
    """Divide rows into blocks.

    Args:
        rows: Portions: for each row the partition, the CRC-32 of the event, and the event.
        partition_count: How many partitions the hub has.
        sorted_bytes: Bytes that are sorted at a time; None for `SORTED_BYTES`, or more for many partitions.
        block_bytes: The most bytes of a block, without its last row.

    Returns:
        Batches of partition, place and block.
    """
    parts = PARTITION_BLOCKS * partition_count
    if sorted_bytes is None:
        sorted_bytes = max(SORTED_BYTES, parts * LEAST_BLOCK_BYTES)
    places: list[int] = []
    hashes: list[int] = []
    events: list[bytes] = []
    size = 0

    def made() -> pa.RecordBatch:
        return _sorted_blocks(places, hashes, events, min(block_bytes, max(LEAST_BLOCK_BYTES, size // parts)))

    for partitions, found, portion in rows:
        places += [partition << _HASH_BITS | each for partition, each in zip(partitions, found, strict=True)]
        hashes += found
        events += portion
        size += sum(map(len, portion))
        if size >= sorted_bytes:
            yield made()
            places, hashes, events, size = [], [], [], 0
    if events:
        yield made()


def _sorted_blocks(places: list[int], hashes: list[int], events: list[bytes], block_bytes: int) -> pa.RecordBatch:
    # Arrow's buffers are divided as they are: nothing is done per row.
    placed = pa.array(places, pa.int64())
    order = pc.array_sort_indices(placed)
    place_of = placed.take(order).to_pylist()
    crcs = memoryview(pa.array(hashes, pa.uint32()).take(order).buffers()[1])
    ordered = pa.array(events, pa.binary()).take(order).buffers()
    offsets, content = memoryview(ordered[1]), memoryview(ordered[2])
    ends = offsets.cast("i")
    starts = [0]
    while starts[-1] < len(events):
        start = starts[-1]
        next_partition = bisect_left(place_of, (place_of[start] >> _HASH_BITS) + 1 << _HASH_BITS, start)
        starts.append(bisect_left(ends, ends[start] + block_bytes, start + 1, next_partition))
    blocks = [
        b"".join(
            (
                _COUNT.pack(end - start),
                crcs[4 * start : 4 * end],
                offsets[4 * start : 4 * (end + 1)],
                content[ends[start] : ends[end]],
            )
        )
        for start, end in pairwise(starts)
    ]
    first = [place_of[start] for start in starts[:-1]]
    columns = [
        pa.array([place >> _HASH_BITS for place in first], pa.int32()),
        pa.array(first, pa.int64()),
        pa.array(blocks, pa.binary()),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=BLOCKS)


def _rows_of(block: bytes) -> Iterator[tuple[int, bytes]]:
    """Return the rows of a block: how many there are, the CRC-32 of each, where each starts and ends, the events."""
    (count,) = _COUNT.unpack_from(block)
    numbers = struct.unpack_from(f"={2 * count + 1}I", block, _COUNT.size)
    base = _COUNT.size + 4 * (2 * count + 1) - numbers[count]
    ends = [base + each for each in numbers[count:]]
    return zip(numbers[:count], [block[start:end] for start, end in pairwise(ends)], strict=True)


def merged_rows(
    batches: Iterable[pa.RecordBatch], *, merged_bytes: int = MERGED_BYTES
) -> Iterator[tuple[int, list[bytes]]]:
    """Return the rows of whole partitions in their order: partition and events, portion by portion.

    Args:
        batches: Place and block, sorted by place.
        merged_bytes: Bytes that are sorted at a time, where blocks do not overlap in more.
    """
    partition = -1
    rows: list[tuple[int, bytes]] = []
    held = added = 0
    for batch in batches:
        for place, block in zip(batch.column(0).to_pylist(), batch.column(1), strict=True):
            if place >> _HASH_BITS != partition:
                if rows:
                    rows.sort()
                    yield partition, [event for _, event in rows]
                partition, rows, held, added = place >> _HASH_BITS, [], 0, 0
            raw = block.as_py()
            rows += _rows_of(raw)
            added += len(raw)
            # As much is added as is held, so that no row is sorted often.
            if added >= max(merged_bytes, held):
                rows.sort()
                end = bisect_left(rows, (place & _HASH_MASK,))
                if end:
                    yield partition, [event for _, event in rows[:end]]
                    del rows[:end]
                held, added = sum(len(event) for _, event in rows), 0
    if rows:
        rows.sort()
        yield partition, [event for _, event in rows]
