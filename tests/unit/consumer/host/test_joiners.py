"""What it costs when many hosts join at once."""

from __future__ import annotations

import asyncio

import pytest

from eventpump.reports import LeaseTaken
from eventpump.testing.transport import FakeHub
from tests.support.fleet import Fleet


@pytest.mark.parametrize(("partitions", "owners", "joiners"), [(300, 1, 19), (120, 3, 17), (64, 2, 30)])
async def test_hosts_joining_at_once_take_few_leases_beyond_their_share(
    partitions: int, owners: int, joiners: int, request: pytest.FixtureRequest
) -> None:
    """All leases taken by a start and a join of many at once are at most a tenth above the fewest possible."""
    for seed in range(20 if request.config.getoption("--long") else 1):
        async with Fleet(FakeHub(partitions=partitions), seed=seed) as fleet:
            for number in range(owners):
                await fleet.start(f"owner-{number}")
                await asyncio.sleep(25)
            before = _taken(fleet)
            for number in range(joiners):
                await fleet.start(f"joiner-{number * 7 % joiners}")
            await asyncio.sleep(40)
            counts = [len(fleet.owned(name)) for name in fleet.hosts]
            assert sum(counts) == partitions
            assert max(counts) - min(counts) <= 1
            share, extra = divmod(partitions, owners + joiners)
            fewest = partitions - owners * share - min(owners, extra)
            assert _taken(fleet) - before <= 1.1 * fewest
            assert _taken(fleet) - before >= fewest


async def test_host_that_joins_has_its_share_within_half_an_interval() -> None:
    """Being seen first costs a single joiner a quarter of an interval."""
    async with Fleet(FakeHub(partitions=40)) as fleet:
        await fleet.start("a")
        await asyncio.sleep(25)
        await fleet.start("b")
        assert await fleet.until(lambda: len(fleet.owned("b")) == 20, 5) <= 3
        assert len(fleet.owned("a")) == 20


def _taken(fleet: Fleet) -> int:
    return sum(len(fleet.reported(name, LeaseTaken)) for name in fleet.hosts)
