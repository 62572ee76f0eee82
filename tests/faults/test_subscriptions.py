"""Subscriptions outlive their hosts: what was published after `subscribe` returned arrives, whichever is killed."""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from eventpump import CheckpointPolicy, EventProcessor, PartitionContext
from eventpump.consumer.host.host import HubHost
from eventpump.options.consumer import HostSettings
from eventpump.storage.leases.memory import MemoryLeases, MemoryLeaseStore
from eventpump.testing.transport import FakeHub
from tests.faults.evidence import Evidence
from tests.faults.histories.world import Life, LifeTransport, World, live
from tests.faults.programs import LEASE_DURATION, TAKE_OVER, Publisher, Stage
from tests.support.azurite import Azurite
from tests.ways import over_both

pytestmark = over_both(is_long=True)

START = 15.0
"""Seconds that starting several interpreters may take on a busy machine."""
BLOB_LEASE = 15
"""Seconds: the least that a blob's lease lasts."""


def _count(request: pytest.FixtureRequest) -> int:
    return 10_000 if request.config.getoption("--long") else 2_000


def _alerts(checkpoint_every: int) -> dict[str, Any]:
    return {"has_default": False, "subscriptions": {"alerts": {"checkpoint_every": checkpoint_every}}}


@pytest.fixture(scope="module")
def azurite() -> Iterator[Azurite]:
    """A real Azurite."""
    with Azurite() as server:
        yield server


@pytest.fixture(params=["sqlite", "blob"])
def leases(request: pytest.FixtureRequest, azurite: Azurite) -> dict[str, Any]:
    """Settings of hosts that keep their leases in a file, or in blobs."""
    if request.param == "sqlite":
        return {}
    container = f"leases-{uuid.uuid4().hex}"
    return {"azurite": azurite.connection_string, "leases": container, "lease_duration": BLOB_LEASE}


async def test_what_was_published_after_subscribe_outlives_every_host(
    stage: Stage, leases: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    """*No loss*: `subscribe` returned, events were published, every host was killed before any checkpoint."""
    rng = random.Random(1)
    progress = stage.progress_of["alerts"]
    duration = leases.get("lease_duration", LEASE_DURATION)
    async with Publisher(stage, 4) as publisher:
        await publisher.publish_everywhere(20)
        before = await publisher.ends()
        rounds = 3 if request.config.getoption("--long") and not leases else 1
        for number in range(rounds):
            names = [f"killed-{number}-{each}" for each in range(2)]
            children = [await stage.start_child(name, **_alerts(0), **leases) for name in names]
            for child in children:
                await child.line("subscribed alerts")
            if not number:
                for partition_id in publisher.partitions:
                    await publisher.publish(partition_id, _count(request) // 4, batch=100)
            count = sum(progress.batches.values()) + rng.randrange(1, 50)
            await progress.until(lambda count=count: sum(progress.batches.values()) >= count, START + duration)  # type: ignore[misc]  # the default is the type
            for name in names:
                await stage.children[name].kill()
        assert not stage.witnessed("alerts")
        await stage.start_child("last", **_alerts(2), **leases)
        last = stage.directory / "last.alerts.journal"
        await _until_processed(stage, await publisher.ends(), START + duration + TAKE_OVER)
        log = await stage.read_log(publisher)
        await stage.stop_child("last")
    owed = {fact for fact in log if fact.sequence_number >= before[fact.partition_id]}
    assert len(owed) == _count(request)
    Evidence.of([last]).check_no_loss(owed)
    stage.evidence("alerts").check(owed, stage.witnessed("alerts"))


async def _until_processed(stage: Stage, ends: dict[str, int], within: float) -> None:
    """Wait until the host called "last" has processed every partition to its end."""
    progress = stage.progress_of["alerts"]
    await progress.until(lambda: all(progress.reached_by["last", each] >= end for each, end in ends.items()), within)


async def test_hosts_that_are_killed_lose_nothing_of_any_subscription(
    stage: Stage, request: pytest.FixtureRequest
) -> None:
    """Each promise for each subscription: one reader, no loss, order, no checkpoint beyond what was processed."""
    rng = random.Random(2)
    settings = {
        "subscriptions": {
            "alerts": {"checkpoint_every": 3},
            "archive": {
                "checkpoint_every": 1,
                "pause": 0.05,
                "options": {"start": "earliest", "catch_up": "shared", "max_batch_size": 100},
            },
        }
    }
    async with Publisher(stage, 4) as publisher:
        await publisher.publish_everywhere(40)
        names = ["a", "b"]
        children = [await stage.start_child(name, **settings) for name in names]
        for child in children:
            await child.line("subscribed alerts")
        before = await publisher.ends()
        publisher.start()
        for number in range(8 if request.config.getoption("--long") else 1):
            progress = stage.progress_of[rng.choice(["alerts", "archive"])]
            await progress.until_flowing(publisher.partitions, START + TAKE_OVER)
            count = sum(progress.batches.values()) + rng.randrange(1, 50)
            await progress.until(lambda count=count, of=progress: sum(of.batches.values()) >= count, START)  # type: ignore[misc]  # the default is the type
            victim = names.pop(rng.randrange(2))
            await stage.children[victim].kill()
            names.append(f"late-{number}")
            await stage.start_child(names[-1], **settings)
        await publisher.stop()
        ends = await publisher.ends()
        for progress in (stage.progress, *stage.progress_of.values()):
            await progress.until_reached(ends, START + 2 * TAKE_OVER)
        log = await stage.read_log(publisher)
        for name in names:
            await stage.stop_child(name)
    assert not await stage.held_leases()
    owed = {"default": log, "archive": log, "alerts": {each for each in log if each[1] >= before[each.partition_id]}}
    for name, facts in owed.items():
        stage.evidence("" if name == "default" else name).check(facts, stage.witnessed(name))


# ------------------------------------------------------------------------------------------------- leases in memory


class _Noting(EventProcessor):
    """Notes what it is handed, and takes its time over it."""

    def __init__(self) -> None:
        self.got: set[tuple[str, int]] = set()

    async def process_events(self, context: PartitionContext, events: Any) -> None:
        self.got.update((context.partition_id, event.sequence_number) for event in events)
        await asyncio.sleep(0.01)


async def _killed_in_memory(world: World, size: int) -> None:
    """Kill every host of one process, which share leases in memory; then start another."""
    hub, leases = FakeHub(partitions=4), MemoryLeases()
    for partition_id in hub.partition_ids:
        hub.publish(partition_id, count=20)

    def host(life: Life) -> HubHost:
        settings = HostSettings(
            hub=hub.name, owner_id=life.name, max_batch_size=50, checkpoint_policy=CheckpointPolicy.manual()
        )
        transport, store = LifeTransport(hub, life), MemoryLeaseStore(leases)
        return HubHost(lambda: transport, store, settings, rng=world.stream(life.name))

    async def run(life: Life, processor: _Noting, subscribed: asyncio.Event) -> None:
        member = host(life)
        await member.subscribe("alerts", processor)
        subscribed.set()
        await member.run()

    async def began() -> tuple[_Noting, list[Life]]:
        """Begin two hosts, and return once both have subscribed."""
        processor = _Noting()
        lives = [world.life(f"h{len(world.lives) + each}") for each in range(2)]
        for life in lives:
            subscribed = asyncio.Event()
            world.spawn(life, run(life, processor, subscribed), life.name)
            await subscribed.wait()
        return processor, lives

    for turn in range(3):
        processor, lives = await began()
        for partition_id in hub.partition_ids if turn == 0 else ():
            hub.publish(partition_id, count=size // 4)
        await world.until(lambda of=processor, least=size // (turn + 2): len(of.got) >= least, 200.0)  # type: ignore[misc]  # the defaults are the types
        world.note("killed", len(processor.got))
        for life in lives:
            life.kill()
    owed = {(each, number) for each in hub.partition_ids for number in range(20, 20 + size // 4)}
    last, _ = await began()
    await world.until(lambda: last.got >= owed, 200.0)
    if last.got != owed:
        world.violate(f"{len(owed - last.got)} never came, {len(last.got - owed)} were before the start")


def test_hosts_of_one_process_that_end_without_a_word(request: pytest.FixtureRequest) -> None:
    """The same with leases in memory, whose hosts' tasks never run again."""
    live("kill", 1, _count(request), _killed_in_memory).require()
