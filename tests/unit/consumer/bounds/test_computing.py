"""Handlers that compute on the event loop, beside a store that needs the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from eventpump.consumer.processor import PartitionContext
from eventpump.core.checkpoint import CheckpointPolicy
from eventpump.eventhubs.events import ReceivedEvent
from eventpump.reports import LeaseLost, LoopBlocked, StoreFailed
from eventpump.testing.clock import VirtualClock
from tests.support.fleet import Fleet, RecordingProcessor, stocked

Events = Sequence[ReceivedEvent]

BATCHES = 60
"""The backlog of each partition, in batches of one event."""


def _all_delivered_once(fleet: Fleet) -> None:
    for partition_id in fleet.hub.partition_ids:
        assert fleet.record.numbers(partition_id) == list(range(BATCHES))
        assert fleet.checkpoint(partition_id) == BATCHES - 1
    assert fleet.reported("a", LeaseLost) == []
    assert fleet.reported("a", StoreFailed) == []


@pytest.mark.parametrize("turns", [1, 3, 12], ids="{} turns".format)
@pytest.mark.parametrize(
    ("seconds", "partitions"), [(6, 1), (1, 4), (1, 16), (3, 4), (1, 1)], ids=lambda value: str(value)
)
async def test_handlers_that_compute_lose_no_lease_and_little_time(
    seconds: float, partitions: int, turns: int, clock: VirtualClock
) -> None:
    """A backlog whose handlers compute for a part of the lease each is delivered once, in the time of the work."""

    async def compute(context: PartitionContext, events: Events) -> None:
        clock.block(seconds)

    async with stocked(BATCHES, partitions) as fleet:
        host = fleet.host(
            "a",
            RecordingProcessor(fleet.record, on_events=compute),
            checkpoint_policy=CheckpointPolicy(every_events=1),
            max_batch_size=1,
        )
        fleet.stores["a"].turns = turns
        running = asyncio.create_task(host.run())
        await asyncio.sleep(seconds * partitions * BATCHES * 1.1)
        _all_delivered_once(fleet)
        await host.aclose()
        await running


@pytest.mark.parametrize("turns", [3, 12], ids="{} turns".format)
@pytest.mark.parametrize(
    ("seconds", "steps", "partitions"),
    [(1, 14, 1), (1, 3, 4), (0.1, 9, 16), (0.3, 90, 1)],
    ids=lambda value: str(value),
)
async def test_handlers_that_compute_in_steps_lose_no_lease(
    seconds: float, steps: int, partitions: int, turns: int, clock: VirtualClock
) -> None:
    """Batches in hand may take half a lease, in steps that the calls of the store wait for; short steps any time."""

    async def compute(context: PartitionContext, events: Events) -> None:
        for _ in range(steps):
            clock.block(seconds)
            await asyncio.sleep(0)

    async with stocked(20, partitions) as fleet:
        processor = RecordingProcessor(fleet.record, on_events=compute)
        policy = CheckpointPolicy(every_events=1)
        host = fleet.host("a", processor, checkpoint_policy=policy, max_batch_size=1)
        fleet.stores["a"].turns = turns
        running = asyncio.create_task(host.run())
        await asyncio.sleep(seconds * steps * partitions * 20 * 1.2)
        assert fleet.reported("a", LeaseLost) == []
        for partition_id in fleet.hub.partition_ids:
            assert fleet.record.numbers(partition_id) == list(range(20))
        await host.aclose()
        await running


async def test_handlers_that_compute_beside_a_slow_store_lose_no_lease(clock: VirtualClock) -> None:
    """With renewals and writes of a second each, nothing is lost and no call runs out of its time."""

    async def compute(context: PartitionContext, events: Events) -> None:
        clock.block(1)

    async with stocked(BATCHES, 4) as fleet:
        host = fleet.host(
            "a",
            RecordingProcessor(fleet.record, on_events=compute),
            checkpoint_policy=CheckpointPolicy(every_events=10),
            max_batch_size=1,
        )
        fleet.stores["a"].turns = 8
        fleet.stores["a"].delay(1, "renew")
        fleet.stores["a"].delay(1, "write")
        running = asyncio.create_task(host.run())
        # A renewal each 10 s and a write each 10 batches of 4 s.
        await asyncio.sleep(4 * BATCHES * 1.25)
        _all_delivered_once(fleet)
        await host.aclose()
        await running


async def _delivered_within(seconds: float, store_takes: float, computes: float) -> int:
    clock = VirtualClock()

    async def handle(context: PartitionContext, events: Events) -> None:
        clock.block(computes)
        await asyncio.sleep(0.05)

    async with stocked(1500, 4) as fleet:
        processor = RecordingProcessor(fleet.record, on_events=handle)
        await fleet.start("a", processor, checkpoint_policy=CheckpointPolicy(every_events=1), max_batch_size=1)
        await asyncio.sleep(5)
        if store_takes:
            for operation in ("renew", "write", "list"):
                fleet.stores["a"].delay(store_takes, operation)
        await asyncio.sleep(seconds)
        assert fleet.reported("a", LeaseLost) == []
        return len(fleet.record.deliveries)


@pytest.mark.parametrize("computes", [0.0, 0.001, 0.01], ids="{} s".format)
async def test_handlers_with_quick_turns_are_not_delayed_by_a_slow_store(computes: float) -> None:
    """Handlers that keep the loop turning are never held back, though each call of the store takes 5 seconds."""
    assert await _delivered_within(60, 5, computes) >= 0.99 * await _delivered_within(60, 0, computes)


async def test_close_of_a_host_whose_deliveries_are_held_back_is_immediate(clock: VirtualClock) -> None:
    """A host whose deliveries are held back by a store that does not answer closes at once."""

    async def compute(context: PartitionContext, events: Events) -> None:
        clock.block(2)

    async with stocked(BATCHES, 4) as fleet:
        processor = RecordingProcessor(fleet.record, on_events=compute)
        host = await fleet.start("a", processor, max_batch_size=1)
        fleet.stores["a"].hang("renew")
        await asyncio.sleep(16)
        delivered = len(fleet.record.deliveries)
        await asyncio.sleep(3)
        assert len(fleet.record.deliveries) == delivered < 4 * BATCHES
        began = clock.monotonic()
        await host.aclose()
        assert clock.monotonic() - began < 3
        assert len(fleet.record.deliveries) == delivered


async def test_blocking_handler_is_reported_before_a_lease_is_at_risk(clock: VirtualClock) -> None:
    """A handler that computes for a tenth of the lease is named, once per renew interval and not per batch."""

    async def compute(context: PartitionContext, events: Events) -> None:
        clock.block(3.5)

    async with stocked(BATCHES, 1) as fleet:
        processor = RecordingProcessor(fleet.record, on_events=compute)
        await fleet.start("a", processor, max_batch_size=1)
        await asyncio.sleep(100)
        reported = fleet.reported("a", LoopBlocked)
        assert reported[0].partition_id == "0"
        assert reported[0].duration == pytest.approx(3.5)
        assert 5 <= len(reported) <= 11
        assert fleet.reported("a", LeaseLost) == []
