"""What is reported, and seen in `host.partitions`, of the links of a partition's subscriptions."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from eventpump.consumer.host.host import HubHost
from eventpump.consumer.processor import PartitionContext
from eventpump.core.checkpoint import CheckpointPolicy
from eventpump.core.pump_state import PumpState
from eventpump.core.sharing import LinkState, PressureState
from eventpump.eventhubs.events import ReceivedEvent
from eventpump.reports import LinkStateChanged
from eventpump.testing.transport import FakeHub
from tests.support.fleet import Fleet, Record, RecordingProcessor

OPENING, SHARED, OWN, WAITING = LinkState.OPENING, LinkState.SHARED, LinkState.OWN, LinkState.WAITING
PAUSED, SUSPENDED, ENDED = LinkState.PAUSED, LinkState.SUSPENDED, LinkState.ENDED


def _changes(fleet: Fleet, name: str) -> list[tuple[LinkState, LinkState]]:
    reports = [each for each in fleet.reported("a", LinkStateChanged) if each.subscription == name]
    assert {each.partition_id for each in reports} <= {"0"}
    return [(each.before, each.state) for each in reports]


def _states(host: HubHost) -> dict[str, LinkState]:
    return {each.subscription: each.link_state for each in host.partitions}


def _slow(record: Record, pause: list[float]) -> Any:
    async def handle(context: PartitionContext, events: Sequence[ReceivedEvent]) -> None:
        await asyncio.sleep(pause[0])

    return RecordingProcessor(record, on_events=handle)


async def test_host_with_one_processor_reports_no_link_state() -> None:
    """The begin and the end of a pump have reports of their own."""
    async with Fleet(FakeHub(partitions=1)) as fleet:
        host = await fleet.start("a")
        fleet.hub.publish("0", count=10)
        await asyncio.sleep(30)
        assert _states(host) == {"default": SHARED}
        await host.aclose()
        assert fleet.reported("a", LinkStateChanged) == []


async def test_each_change_of_a_link_is_reported_once() -> None:
    """Opened again for another one, paused, resumed, and ended."""
    async with Fleet(FakeHub(partitions=1)) as fleet:
        fleet.hub.publish("0", count=1000)
        host = await fleet.start("a", prefetch_events=100, max_batch_size=10, initial_position="@latest")
        await asyncio.sleep(5)
        fleet.hub.publish("0", count=10)
        await asyncio.sleep(5)
        pause = [1.0]
        await host.subscribe("archive", _slow(Record(), pause), start="earliest", catch_up="shared")
        await asyncio.sleep(10)
        assert _states(host) == {"default": WAITING, "archive": SHARED}
        assert _changes(fleet, "default") == [(SHARED, WAITING)]
        pause[0] = 0
        await asyncio.sleep(30)
        # Though nothing was published that it has not had: the link has come as far as it has.
        assert _states(host) == {"default": SHARED, "archive": SHARED}
        host.pause("archive")
        host.pause("archive")
        await asyncio.sleep(5)
        assert _states(host) == {"default": SHARED, "archive": PAUSED}
        host.resume("archive")
        await asyncio.sleep(5)
        await host.unsubscribe("archive")
        await asyncio.sleep(5)
        assert _changes(fleet, "default") == [(SHARED, WAITING), (WAITING, SHARED)]
        assert _changes(fleet, "archive") == [(SHARED, PAUSED), (PAUSED, SHARED), (SHARED, ENDED)]
        assert _states(host) == {"default": SHARED}


async def test_while_the_link_is_closed_for_a_search_the_others_wait() -> None:
    """A seek to a time closes the shared link until it has found its place."""
    async with Fleet(FakeHub(partitions=1)) as fleet:
        host = await fleet.start("a")
        await host.subscribe("archive", RecordingProcessor(Record()))
        fleet.hub.publish("0", count=10)
        await asyncio.sleep(5)
        begin = fleet.hub.now()
        await asyncio.sleep(5)
        fleet.hub.publish("0", count=10)
        await asyncio.sleep(5)
        fleet.hub.hang("receive")
        seek = asyncio.create_task(host.seek("archive", begin))
        await asyncio.sleep(2)
        assert _states(host)["default"] is WAITING
        fleet.hub.answer("receive")
        assert await seek == ("0",)
        await asyncio.sleep(30)
        assert _states(host) == {"default": SHARED, "archive": SHARED}
        assert _changes(fleet, "default")[0] == (SHARED, WAITING)
        assert _changes(fleet, "default")[-1] == (WAITING, SHARED)


async def test_link_of_its_own_and_its_end_are_reported() -> None:
    """From the begin, when it has caught up, and when it ends while it has one."""
    pause = [0.0]
    async with Fleet(FakeHub(partitions=1, consumer_groups=("$Default", "second"))) as fleet:
        fleet.hub.publish("0", count=1000)
        host = await fleet.start("a", prefetch_events=100, max_batch_size=10, initial_position="@latest")
        await asyncio.sleep(5)
        archive = _slow(Record(), pause)
        await host.subscribe("archive", archive, start="earliest", catch_up_group="second", slow_after=10)
        await asyncio.sleep(30)
        assert _changes(fleet, "archive") == [(OPENING, OWN), (OWN, SHARED)]
        pause[0] = 20
        fleet.hub.publish("0", count=500)
        await asyncio.sleep(60)
        assert _states(host) == {"default": SHARED, "archive": OWN}
        await host.unsubscribe("archive")
        await asyncio.sleep(60)
        assert _changes(fleet, "archive") == [(OPENING, OWN), (OWN, SHARED), (SHARED, OWN), (OWN, ENDED)]


@pytest.mark.parametrize("ends", [False, True])
async def test_suspended_subscription_is_seen_until_it_is_resumed_or_ended(ends: bool) -> None:
    """Its row says so, with its checkpoint; what it holds back before is its pressure."""
    pause = [20.0]
    policy = CheckpointPolicy(every_events=10)
    async with Fleet(FakeHub(partitions=1)) as fleet:
        host = await fleet.start("a", prefetch_events=100, max_batch_size=10, checkpoint_policy=policy)
        await host.subscribe("archive", _slow(Record(), pause), slow_after=50, on_slow="suspend")
        await asyncio.sleep(1)
        fleet.hub.publish("0", count=1000)
        await asyncio.sleep(45)
        default, archive = host.partitions
        assert default.pressure is PressureState.FREE
        assert archive.pressure in {PressureState.SLOWED, PressureState.STOPPED}
        assert archive.checkpoint is not None
        assert archive.checkpoint.sequence_number == 19
        await asyncio.sleep(60)
        default, archive = host.partitions
        assert (archive.subscription, archive.state, archive.link_state) == ("archive", PumpState.CLOSED, SUSPENDED)
        assert (archive.lag, archive.is_attached, archive.held_events) == (None, False, 0)
        assert archive.checkpoint is not None
        assert archive.checkpoint.sequence_number in {29, 39}
        assert _changes(fleet, "archive") == [(SHARED, SUSPENDED)]
        pause[0] = 0
        if ends:
            await host.unsubscribe("archive")
            await asyncio.sleep(5)
            assert _changes(fleet, "archive")[1:] == [(SUSPENDED, ENDED)]
            assert _states(host) == {"default": SHARED}
        else:
            assert host.resume("archive") == ("0",)
            await asyncio.sleep(30)
            assert _changes(fleet, "archive")[1:] == [(SUSPENDED, SHARED)]
            assert _states(host) == {"default": SHARED, "archive": SHARED}
