"""Publishing what a plan names, by the driver for a small batch, by tasks for others; and the links that are kept."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from itertools import chain
from typing import Final

from eventpump.aio.tasks import gather
from eventpump.interfaces import Transport
from eventpump.producer.publisher import PartitionPublisher
from eventpump.spark.sink.attempt import may_continue
from eventpump.spark.sink.exactly_once import AT_ONCE, PartitionPublishing, PublishOptions, each_partition
from eventpump.spark.sink.kept import ReadAhead, RowReader
from eventpump.spark.sink.records import PartitionOutcome, PartitionPlan, Plan

IDLE_LINKS: Final = 60.0
"""Seconds after which links that no batch uses are closed."""
_HELD_BYTES: Final = 64 * 1024 * 1024
"""Bytes of segments that are held at a time, unless one is larger."""


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


async def publish_rows(
    transport: Transport,
    plan: Plan,
    rows: RowReader,
    options: PublishOptions,
    *,
    only: Collection[str] | None = None,
    kept: KeptPublishers | None = None,
    is_first: bool = False,
) -> list[PartitionOutcome]:
    """Publish a batch's rows, several partitions at the same time.

    Args:
        kept: The links of the batch before, if the same process published that too; afterwards, those of this one.
        is_first: Whether the plan was just created by this run, so that no earlier attempt may have sent anything.

    Returns:
        An outcome for each partition with rows.

    Raises:
        StoreError: Rows could not be read, or are not those that were written.
        EventPumpError: As :class:`PartitionPublishing`. The other partitions' attempts were ended too.
    """
    if kept is not None and not is_first:
        await kept.aclose()

    async def publish(reading: ReadAhead, partition_id: str, number: int) -> PartitionOutcome:
        publisher = None if kept is None else await kept.take(plan.partition(partition_id))
        async with PartitionPublishing(transport, plan, partition_id, options=options, publisher=publisher) as each:
            first = 0
            for segment in rows.segments(number):
                needed = await each.needed()
                if needed is None or needed >= first + segment.count:
                    reading.skip(segment)
                else:
                    await each.put(first, await reading.read(plan, segment, first, needed))
                first += segment.count
            outcome = await each.finish()
            publisher = each.release()
            if publisher is not None and kept is not None:
                # At once: a cancellation while the attempt ends must not lose it.
                await kept.keep(partition_id, publisher)
            elif publisher is not None:
                await publisher.aclose()
            return outcome

    used = {
        number: each.partition_id
        for number, each in enumerate(plan.partitions)
        if each.count and (only is None or each.partition_id in only)
    }
    partitions = max(1, min(AT_ONCE, _HELD_BYTES // (1 + rows.largest)))
    groups = rows.groups(list(used), partitions)
    at_once = max(1, min(len(groups), partitions // max(map(len, groups), default=1)))

    async def publish_group(group: Sequence[int]) -> list[PartitionOutcome]:
        async with rows.ahead(group, _HELD_BYTES // at_once) as reading:
            return await gather(publish(reading, used[each], each) for each in group)

    return list(chain.from_iterable(await gather(map(publish_group, groups), at_once=at_once)))
