"""Hosts in processes of their own are killed, frozen and blocked, and join and leave."""

from __future__ import annotations

import random
import time

import pytest

from tests.faults.programs import LEASE_DURATION, RENEW_INTERVAL, TAKE_OVER, Publisher, Stage
from tests.ways import over_both

pytestmark = over_both(is_long=True)

BALANCE = 4 * RENEW_INTERVAL + 2.0
"""Seconds within which a host that joins owns its share."""
START = 15.0
"""Seconds that starting several interpreters may take on a busy machine."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", range(8 if metafunc.config.getoption("--long") else 1))


def _owned(stage: Stage, host: str) -> list[str]:
    return sorted(partition for partition, (owner, _) in stage.progress.owner.items() if owner == host)


async def _share(stage: Stage, hosts: list[str], each: int, within: float) -> None:
    """Wait until every host has processed `each` partitions last."""
    await stage.progress.until(lambda: all(len(_owned(stage, host)) == each for host in hosts), within)


async def test_killed_host_is_replaced(stage: Stage, seed: int, request: pytest.FixtureRequest) -> None:
    """*No loss*, *one reader*, *monotonic checkpoints*, *recovery*: others take a killed host's partitions over.

    The hosts are real interpreters: no two have the same hash seed, so none may own by the order of a set.
    """
    rng = random.Random(seed)
    stage.is_forked = False
    async with Publisher(stage, 4) as publisher:
        publisher.start()
        names = ["a", "b"]
        for name in names:
            await stage.start_child(name)
        await _share(stage, names, 2, START + BALANCE)
        for number in range(4 if request.config.getoption("--long") else 1):
            if number:
                names.append(f"late-{number}")
                await stage.start_child(names[-1])
                await _share(stage, names, 2, START + BALANCE)
            victim = rng.choice(names)
            orphans = _owned(stage, victim)
            # Anywhere in its work: after so many more batches of any host.
            count = sum(stage.progress.batches.values()) + rng.randrange(1, 100)
            await stage.progress.until(lambda count=count: sum(stage.progress.batches.values()) >= count)  # type: ignore[misc]  # the default is the type
            await stage.children[victim].kill()
            await stage.progress.until_flowing(orphans, TAKE_OVER)
            names.remove(victim)
        await publisher.stop()
        await stage.verify(publisher)
        for name in names:
            await stage.stop_child(name)
    assert await stage.held_leases() == {}


async def test_closed_host_leaves_no_duplicate_behind(stage: Stage) -> None:
    """*Tidy close*, *no duplicate*: a host that closes hands over at once, at the last event it processed."""
    async with Publisher(stage, 4) as publisher:
        publisher.start()
        await stage.start_child("first", checkpoint_every=0, checkpoint_on_close=True)
        await stage.progress.until_flowing(publisher.partitions, START)
        await stage.stop_child("first")
        assert await stage.held_leases() == {}
        await stage.start_child("second", checkpoint_every=0, checkpoint_on_close=True)
        await stage.progress.until_flowing(publisher.partitions, START)
        await publisher.stop()
        (await stage.verify(publisher)).check_no_duplicate()


async def test_frozen_host_delivers_nothing_when_it_wakes(stage: Stage) -> None:
    """*One reader*: a host that stood still for longer than its leases hands nothing over any more under them."""
    async with Publisher(stage, 4) as publisher:
        publisher.start()
        await stage.start_child("frozen")
        await stage.progress.until_flowing(publisher.partitions, START)
        epochs = dict(stage.progress.owner)
        child = stage.children["frozen"]
        await stage.freeze("frozen")
        await stage.start_child("heir")
        await stage.progress.until_flowing(publisher.partitions, START + TAKE_OVER)
        woken = time.monotonic()
        child.wake()
        # It lost its leases, and detects it by its own clock; it takes part again under new ones.
        for partition in publisher.partitions:
            await child.line(f"report LeaseLost {partition} ")
        await _share(stage, ["frozen", "heir"], 2, BALANCE)
        await publisher.stop()
        evidence = await stage.verify(publisher)
    assert set(epochs) == set(publisher.partitions)
    for partition, (owner, epoch) in epochs.items():
        assert owner == "frozen"
        evidence.check_silent("frozen", partition, epoch, woken)


async def test_blocked_host_delivers_nothing_after_its_lease(stage: Stage) -> None:
    """*One reader*: our own clock is looked at before every delivery, before the store or the service have a say."""
    async with Publisher(stage, 4) as publisher:
        publisher.start()
        child = await stage.start_child("blocked", block_at=9)
        blocked = await child.line(r"blocked (\d+) (\d+)")
        heir = await stage.start_child("heir")
        await stage.progress.until_flowing(publisher.partitions, START + TAKE_OVER)
        for partition in publisher.partitions:
            await heir.line(f"report LeaseTaken {partition} ")
        woken = time.monotonic()
        await child.tell("go on")
        await child.line(f"report LoopBlocked {blocked[1]} ")
        for partition in publisher.partitions:
            await child.line(f"report LeaseLost {partition} ")
        await publisher.stop()
        evidence = await stage.verify(publisher)
    for partition in publisher.partitions:
        evidence.check_silent("blocked", partition, 1, woken)


async def test_fleet_with_hosts_that_start_and_die_at_random_loses_nothing(
    stage: Stage, seed: int, request: pytest.FixtureRequest
) -> None:
    """*No loss*, *one reader*, *monotonic checkpoints*: whatever joins, freezes, wakes, leaves or dies."""
    rng = random.Random(seed)
    alive: list[str] = []
    frozen: list[str] = []
    async with Publisher(stage, 4) as publisher:
        publisher.start()
        for number in range(25 if request.config.getoption("--long") else 5):
            count = sum(stage.progress.batches.values()) + rng.randrange(1, 200)
            if alive:
                await stage.progress.until(  # what happens next happens anywhere in the work
                    lambda count=count: sum(stage.progress.batches.values()) >= count,  # type: ignore[misc]  # the default is the type
                    START + 2 * TAKE_OVER + LEASE_DURATION,
                )
            actions = ["kill", "stop", "freeze"] if len(alive) > 1 else []
            actions += ["join"] if len(alive) < 4 else []
            actions += ["wake"] if frozen else []
            action = rng.choice(actions)
            if action == "join":
                alive.append(f"host-{number}")
                await stage.start_child(alive[-1])
            elif action == "wake":
                alive.append(frozen.pop())
                stage.children[alive[-1]].wake()
            else:
                name = alive.pop(rng.randrange(len(alive)))
                if action == "kill":
                    await stage.children[name].kill()
                elif action == "stop":
                    await stage.stop_child(name)
                else:
                    frozen.append(name)
                    await stage.freeze(name)
        for name in frozen:
            stage.children[name].wake()
        await publisher.stop()
        await stage.verify(publisher, START + 2 * TAKE_OVER)
