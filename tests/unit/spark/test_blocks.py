"""Blocks of encoded rows: the order of the rows, and how many of them are held."""

from __future__ import annotations

import random
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventpump.errors import EventError
from eventpump.spark.sink.blocks import BLOCKS, blocks_of, merged_rows
from eventpump.spark.sink.columns import EventColumns
from eventpump.spark.sink.executor import BlockTask, EncodeTask
from eventpump.spark.sink.small import shares_of

Row = tuple[int, int, bytes]


def sorted_by_spark(blocks: Iterable[pa.RecordBatch], rng: random.Random, at_once: int) -> Iterator[pa.RecordBatch]:
    """Bring the blocks of all tasks together as Spark does: in any order, sorted by their places, in batches."""
    rows = [row for batch in blocks for row in batch.to_pylist()]
    rng.shuffle(rows)
    rows.sort(key=itemgetter("place"))
    for start in range(0, len(rows), at_once):
        some = rows[start : start + at_once]
        columns = [pa.array([each["place"] for each in some]), pa.array([each["block"] for each in some], pa.binary())]
        yield pa.RecordBatch.from_arrays(columns, ["place", "block"])


def portions(rows: Sequence[Row], size: int) -> Iterator[tuple[list[int], list[int], list[bytes]]]:
    """Divide rows as Spark does, in record batches."""
    for start in range(0, len(rows), size):
        some = rows[start : start + size]
        yield [each[0] for each in some], [each[1] for each in some], [each[2] for each in some]


def gathered(shares: Iterable[tuple[int, list[bytes]]]) -> dict[int, list[bytes]]:
    """Join the portions of each partition, which must not come again."""
    found: dict[int, list[bytes]] = {}
    for partition, group in groupby(shares, key=itemgetter(0)):
        assert partition not in found
        found[partition] = [event for _, events in group for event in events]
    return found


hashes = st.sampled_from([0, 1, 2, 2**31 - 1, 2**31, 2**32 - 1]) | st.integers(0, 2**32 - 1)
"""With the same for several rows, and those that are negative where 32 bits are signed."""


@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 3), hashes, st.binary(min_size=1, max_size=9)), max_size=25), max_size=4
    ),
    st.randoms(),
    st.integers(1, 8),
    st.integers(1, 40),
    st.integers(1, 20),
    st.integers(1, 60),
)
def test_blocks_give_each_partition_its_rows_in_order(
    tasks: list[list[Row]], rng: random.Random, size: int, sorted_bytes: int, block_bytes: int, merged_bytes: int
) -> None:
    """*No loss, no duplicate, no reorder*: the order is by hash and content, however rows are divided."""
    blocks = [
        batch
        for rows in tasks
        for batch in blocks_of(
            portions(rows, size), partition_count=4, sorted_bytes=sorted_bytes, block_bytes=block_bytes
        )
    ]
    found = gathered(merged_rows(sorted_by_spark(blocks, rng, size), merged_bytes=merged_bytes))
    rows = [row for each in tasks for row in each]
    assert found == {
        partition: [event for _, _, event in share] for partition, share in groupby(sorted(rows), key=itemgetter(0))
    }


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_blocks_of_one_place_are_merged(order: tuple[int, ...]) -> None:
    """*No reorder*: rows of one hash are ordered by content, although each block is sorted as soon as it is there."""
    blocks = [batch for event in (b"a", b"b") for batch in blocks_of([([0], [5], [event])], partition_count=1)]
    batches = [blocks[each].select(["place", "block"]) for each in order]
    assert gathered(merged_rows(batches, merged_bytes=1)) == {0: [b"a", b"b"]}


@given(st.lists(st.binary(max_size=9), max_size=40), st.randoms(), st.integers(1, 3))
def test_blocks_have_the_order_of_small_batches(bodies: list[bytes], rng: random.Random, tasks: int) -> None:
    """*No reorder*: a batch that the driver began to publish is continued by tasks, and the other way round."""
    encoding = EncodeTask(EventColumns("body"), 4, 10**6, 0)
    divided = [
        [pa.RecordBatch.from_arrays([pa.array(bodies[each::tasks], pa.binary())], ["body"])] for each in range(3)
    ]
    blocks = [batch for each in divided[:tasks] for batch in BlockTask(encoding)(each)]
    assert all(batch.schema.names == list(BLOCKS.names) for batch in blocks)
    found = gathered(merged_rows(sorted_by_spark(blocks, rng, 5)))
    assert found == shares_of(batch for each in divided[:tasks] for batch in encoding(each))


@pytest.mark.parametrize("has_properties", [False, True])
def test_blocks_of_many_rows_have_all_of_them(has_properties: bool) -> None:
    """*No loss and no duplicate*: a batch is encoded in portions, and each event gets its own key and properties."""
    numbers = [str(each) for each in range(2_500)]
    names, arrays = ["body", "partitionKey"], [pa.array(numbers), pa.array([f"key {each}" for each in numbers])]
    if has_properties:
        kind = pa.map_(pa.string(), pa.string())
        names, arrays = [*names, "properties"], [*arrays, pa.array([[("number", each)] for each in numbers], kind)]
    columns = EventColumns("body", None, "partitionKey", "properties" if has_properties else None)
    encoding = EncodeTask(columns, 4, 10**6, 0)
    rows = pa.RecordBatch.from_arrays(arrays, names).slice(100)
    found = gathered(merged_rows(sorted_by_spark(BlockTask(encoding)([rows]), random.Random(1), 50)))
    assert found == shares_of(encoding([rows]))
    assert sum(map(len, found.values())) == 2_400


def test_merging_holds_few_rows() -> None:
    """Of a large partition, only what overlaps is held: the first rows are passed on long before the last block."""
    rng = random.Random(4)
    events = [rng.randbytes(100) for _ in range(40_000)]
    rows = [(0, zlib.crc32(each), each) for each in events]
    blocks = list(blocks_of(portions(rows, 1000), partition_count=1, sorted_bytes=400_000, block_bytes=2_000))
    taken = given_back = most = 0

    def counted() -> Iterator[pa.RecordBatch]:
        nonlocal taken
        for batch in sorted_by_spark(blocks, rng, 1):
            taken += sum(len(each.as_py()) for each in batch.column(1))
            yield batch

    for _, portion in merged_rows(counted(), merged_bytes=50_000):
        most = max(most, taken - given_back)
        given_back += sum(map(len, portion))
    assert given_back == 4_000_000
    # Ten sorted portions overlap in a block each; with what is added, and the numbers of the rows.
    assert most < 4 * 50_000 + taken - given_back


@pytest.mark.parametrize("partition_count", [4, 32, 128])
def test_merging_holds_few_rows_of_a_hub_with_many_partitions(partition_count: int) -> None:
    """*Memory*: of a partition at most a fifth is held, however many share the portions that are sorted."""
    rng = random.Random(partition_count)
    event = bytes(200)
    rows = [(rng.randrange(partition_count), rng.getrandbits(32), event) for _ in range(100_000)]
    blocks = blocks_of(portions(rows, 1000), partition_count=partition_count)
    first = [each.filter(pc.equal(each.column(0), 0)) for each in blocks]
    taken = given_back = most = 0

    def counted() -> Iterator[pa.RecordBatch]:
        nonlocal taken
        for batch in sorted_by_spark(first, rng, 1):
            (block,) = batch.column(1).to_pylist()
            taken += struct.unpack_from("=I", block)[0]
            yield batch

    for _, portion in merged_rows(counted(), merged_bytes=1):
        most = max(most, taken - given_back)
        given_back += len(portion)
    assert given_back == sum(1 for partition, _, _ in rows if partition == 0)
    assert most < 0.2 * given_back


def test_block_of_a_row_that_cannot_be_sent_is_not_made() -> None:
    """A row that cannot be an event ends the task, before any block of it leaves."""
    rows = [pa.RecordBatch.from_arrays([pa.array([b"a", None], pa.binary())], ["body"])]
    with pytest.raises(EventError, match="body is null"):
        list(BlockTask(EncodeTask(EventColumns("body"), 4, 10**6, 0))(rows))
