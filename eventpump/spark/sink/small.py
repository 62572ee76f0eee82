"""Small batches: their encoded rows are collected, ordered and published by the driver, without another job.

Everything that makes a batch exactly once is the same as in tasks: the plan, the ledger, the order of the rows, how
they are packed, and the attempt itself (`PartitionPublishing`). What differs is where it runs, and that the links to
partitions are kept for the next batch.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, Final, Literal, TypeAlias

import pyarrow as pa
from pyspark.sql.types import (
    BinaryType,
    BooleanType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegralType,
    StringType,
    TimestampNTZType,
    TimestampType,
)

from eventpump.interfaces import Transport
from eventpump.producer.publisher import PartitionPublisher
from eventpump.spark.sink.attempt import may_continue
from eventpump.spark.sink.exactly_once import PartitionPublishing, PublishOptions, each_partition
from eventpump.spark.sink.records import PartitionOutcome, PartitionPlan, Plan, StateLost

SmallBatches: TypeAlias = Literal["auto", "always", "never"]
"""Which batches the driver publishes itself: those that are expected to be small, all that turn out to be, or none."""

COLLECTED_BYTES: Final = 4 * 1024 * 1024
"""The most bytes that are collected of a batch, as Arrow holds them: of all tasks together."""
SMALL_ROWS: Final = 4000
"""A batch with more rows than this is not expected to be small."""
IDLE_LINKS: Final = 60.0
"""Seconds after which links that no batch uses are closed."""


class BatchSizes:
    """Decides by what is known of earlier batches whether the next one is expected to be small.

    Args:
        mode: See `SmallBatches`.

    Attributes:
        last_rows: How many rows the last batch had; None if that is not known.
        tasks: How many tasks share `COLLECTED_BYTES`; None before the first batch that was collected.
    """

    def __init__(self, mode: SmallBatches) -> None:
        self._mode = mode
        self._most_rows = SMALL_ROWS
        self._has_overflowed = False
        self._is_rule = False
        self.last_rows: int | None = None
        self.tasks: int | None = None

    @property
    def is_small(self) -> bool:
        """Whether to collect the next batch."""
        if self._mode == "auto":
            return self.last_rows is None or self.last_rows <= self._most_rows
        return self._mode == "always"

    @property
    def expected_rows(self) -> int | None:
        """How many rows the batch may have that is not collected; None if that is not known."""
        return None if self._has_overflowed else self.last_rows

    def collected(self, tasks: int, rows: int, size: int) -> None:
        """Record that a batch was collected.

        Args:
            tasks: How many tasks it took.
            rows: How many rows it has.
            size: Its bytes.
        """
        self.tasks = max(tasks, 1)
        self._has_overflowed = False
        if rows:
            # Of rows like these so many fit. What a batch had is no reason to expect less.
            self._most_rows = min(SMALL_ROWS, max(rows, rows * COLLECTED_BYTES // (2 * size)))

    def overflowed(self, tasks: int) -> None:
        """Record that a batch was too large to be collected.

        Args:
            tasks: How many tasks it took.
        """
        self._has_overflowed = True
        self._is_rule = tasks == self.tasks  # otherwise the tasks had another share than they will have
        self.tasks = max(tasks, 1)

    def published(self, rows: int) -> None:
        """Record that a batch is done, by either path.

        Args:
            rows: How many rows it has.
        """
        if self._has_overflowed and self._is_rule:
            self._most_rows = min(self._most_rows, rows // 2)
        self._has_overflowed = False
        self.last_rows = rows


# ------------------------------------------------------------------------------------------------- the order of rows


def is_orderable(kind: DataType) -> bool:
    """Return whether rows can be ordered here as Spark orders them, by a column of this type.

    Other types (structs, arrays, intervals, text with a collation) are ordered by Spark alone.
    """
    if type(kind) is StringType:
        return kind == StringType()
    plain = (BinaryType, BooleanType, DateType, DecimalType, DoubleType, FloatType, TimestampNTZType, TimestampType)
    return isinstance(kind, IntegralType) or type(kind) in plain


def order_keys(column: pa.Array) -> list[Any]:
    """Return what orders the values of a column as Spark does: nulls first, then by value, NaN last.

    Text is ordered by its UTF-8 bytes, and bytes as unsigned numbers.
    """
    kind = column.type
    if pa.types.is_string(kind):
        column = column.cast(pa.binary())
    elif pa.types.is_large_string(kind):
        column = column.cast(pa.large_binary())
    elif pa.types.is_timestamp(kind):
        column = column.cast(pa.int64())
    elif pa.types.is_date32(kind):
        column = column.cast(pa.int32())
    if pa.types.is_floating(kind):
        return [(0, 0.0) if each is None else (2, 0.0) if each != each else (1, each) for each in column.to_pylist()]
    return [(0,) if each is None else (1, each) for each in column.to_pylist()]


def shares_of(batches: Iterable[pa.RecordBatch]) -> dict[int, list[bytes]]:
    """Divide encoded rows among the hub's partitions, in the order in which every attempt publishes them.

    Args:
        batches: Partition, ordering columns and event, as `EncodeTask` returns them, in any order.
    """
    rows: list[tuple[Any, ...]] = []
    for batch in batches:
        partitions, *ordering, events = batch.columns
        found = events.to_pylist()
        keys = map(order_keys, ordering)
        rows += zip(partitions.to_pylist(), *keys, map(zlib.crc32, found), found, strict=True)
    rows.sort()
    return {partition: [row[-1] for row in share] for partition, share in groupby(rows, key=itemgetter(0))}


def unpacked(payloads: Iterable[bytes | bytearray]) -> Iterator[pa.RecordBatch]:
    """Read the record batches that tasks have returned, see `executor.CollectTask`."""
    for payload in payloads:
        if payload:
            with pa.ipc.open_stream(bytes(payload)) as reader:
                yield from reader


# ------------------------------------------------------------------------------------------------- publishing


class KeptPublishers:
    """The publishers of a sink's partitions between two batches, with their links. Used on one loop."""

    def __init__(self, *, idle: float = IDLE_LINKS) -> None:
        self._idle = idle
        self._publishers: dict[str, PartitionPublisher] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._closing: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._publishers)

    async def take(self, entry: PartitionPlan) -> PartitionPublisher | None:
        """Return the publisher of a partition, if an attempt at this plan may begin with it, or close it."""
        publisher = self._publishers.pop(entry.partition_id, None)
        if publisher is not None and not may_continue(publisher.sequencer, entry):
            await publisher.aclose()
            return None
        return publisher

    async def keep(self, partition_id: str, publisher: PartitionPublisher) -> None:
        """Keep a publisher for the next batch."""
        before = self._publishers.get(partition_id)
        self._publishers[partition_id] = publisher
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(self._idle, self._close_idle)
        if before is not None:
            await before.aclose()

    def _close_idle(self) -> None:
        self._timer = None
        task = asyncio.get_running_loop().create_task(self.aclose(), name="eventpump: close idle links")
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def aclose(self) -> None:
        """Close all of them. Others can be kept afterwards."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        publishers, self._publishers = self._publishers, {}
        await each_partition(publishers, lambda _, publisher: publisher.aclose())


async def publish_shares(
    transport: Transport,
    plan: Plan,
    shares: Mapping[str, Sequence[bytes]],
    kept: KeptPublishers,
    options: PublishOptions,
    *,
    is_first: bool,
    compares: bool = False,
) -> list[PartitionOutcome]:
    """Publish a batch's rows, the partitions at the same time.

    Args:
        shares: The encoded rows by partition, in the order of the plan's numbers.
        kept: The links of the batch before, if the driver published that too; afterwards, those of this one.
        is_first: Whether the plan was just created by this run, so that no earlier attempt may have sent anything.
        compares: Whether rows that are stored are compared with these, before any is sent.

    Returns:
        An outcome for each partition with rows.

    Raises:
        ConfigurationError: Other rows are stored.
        EventPumpError: As :class:`PartitionPublishing`. The other partitions' attempts were ended too.
    """
    if not is_first:
        await kept.aclose()

    async def publish(partition_id: str, events: Sequence[bytes]) -> PartitionOutcome:
        publisher = await kept.take(plan.partition(partition_id))
        async with PartitionPublishing(
            transport, plan, partition_id, options=options, publisher=publisher, compares=compares
        ) as each:
            await each.put(events)
            outcome = await each.finish()
            publisher = each.release()
            if publisher is not None:  # at once: a cancellation while the attempt ends must not lose it
                await kept.keep(partition_id, publisher)
            return outcome

    if compares:
        every = {each: shares.get(each, ()) for each in plan.partition_ids}
        losses = await compare_shares(transport, plan, every, options)
        if any(each.partition_id in shares for each in losses):
            return [each for each in losses if each.partition_id in shares]
    return list((await each_partition(shares, publish)).values())


async def compare_shares(
    transport: Transport, plan: Plan, shares: Mapping[str, Sequence[bytes]], options: PublishOptions
) -> list[StateLost]:
    """Compare what is stored of a batch with rows that may be another query's. Nothing is sent.

    Args:
        shares: As for `publish_shares`; empty for partitions of which this query has no rows.

    Returns:
        The producers whose state is lost, so that nothing could be compared.

    Raises:
        ConfigurationError: Other rows are stored.
        InvalidClientStateError: More rows are stored than there are.
        EventPumpError: As :class:`PartitionPublishing`.
    """

    async def compare(partition_id: str, events: Sequence[bytes]) -> StateLost | None:
        async with PartitionPublishing(
            transport, plan, partition_id, options=options, compares=True, sends=False
        ) as each:
            await each.put(events)
            return await each.compare()

    losses = await each_partition(shares, compare)
    return [loss for loss in losses.values() if loss is not None]
