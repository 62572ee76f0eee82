"""Seek, replay and drain, on all partitions of a subscription that a host owns."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence

from eventpump.aio.tasks import gather
from eventpump.consumer.pump.pump import PartitionPump
from eventpump.core.rewind import end_of_range
from eventpump.errors import OwnershipLostError
from eventpump.eventhubs.events import Checkpoint, EventPosition
from eventpump.eventhubs.partitions import partition_order
from eventpump.interfaces import HubDirectory, PartitionProperties

_ASKED_AT_ONCE = 16


async def seek_all(pumps: Collection[PartitionPump], position: EventPosition) -> tuple[str, ...]:
    """Let pumps go on at a position. Return the partitions where that is stored, in order."""
    places = await _find(pumps, position)
    return await _those_done([(pump, pump.seek(place)) for pump, place in places])


async def replay_all(pumps: Collection[PartitionPump], begin: EventPosition, end: EventPosition) -> tuple[str, ...]:
    """Let pumps deliver a range again. Return the partitions where all of it was processed, in order."""
    begins = await _find(pumps, begin)
    ends = dict(await _find([pump for pump, _ in begins], end_of_range(end)))
    ranges = [(pump, after, ends[pump].sequence_number) for pump, after in begins if pump in ends]
    replays = [(pump, after, last) for pump, after, last in ranges if last > after.sequence_number]
    return await _those_done([(pump, pump.replay(after, last)) for pump, after, last in replays])


async def drain_all(pumps: Collection[PartitionPump], directory: HubDirectory, hub: str) -> tuple[str, ...]:
    """Wait until pumps have processed what there is now. Return the partitions where they have, in order."""

    async def facts(pump: PartitionPump) -> tuple[PartitionPump, PartitionProperties]:
        return pump, await directory.get_partition_properties(hub, pump.partition_id)

    found = await gather((facts(pump) for pump in pumps), at_once=_ASKED_AT_ONCE)
    return await _those_done([(pump, pump.drain(properties)) for pump, properties in found])


async def _find(pumps: Collection[PartitionPump], position: EventPosition) -> list[tuple[PartitionPump, Checkpoint]]:
    """Find a position in the partitions of some pumps. Those whose partition is given up meanwhile are left out."""

    async def place_of(pump: PartitionPump) -> tuple[PartitionPump, Checkpoint] | None:
        try:
            return pump, await pump.place_of(position)
        except OwnershipLostError:
            return None

    found = await gather((place_of(pump) for pump in pumps), at_once=_ASKED_AT_ONCE)
    return [each for each in found if each is not None]


async def _those_done(asked: Sequence[tuple[PartitionPump, asyncio.Future[bool]]]) -> tuple[str, ...]:
    """Wait for what was asked of pumps. Return the partitions where it was done, in order."""
    for _, done in asked:
        await done
    return in_order([pump.partition_id for pump, done in asked if done.result()])


def in_order(partition_ids: Collection[str]) -> tuple[str, ...]:
    """Return partition ids in the order of their numbers."""
    return tuple(sorted(partition_ids, key=partition_order))
