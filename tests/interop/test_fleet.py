"""One consumer group of several SDKs, in processes of their own: what joins, leaves, dies and stands still."""

from __future__ import annotations

import random
import uuid
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol

import pytest
import pytest_asyncio

from eventpump import Emulator
from tests.interop.members.fleet import DEFAULTS, FAST, HUB, STEADY, Kind, Member, MixedFleet, Pace
from tests.support.azurite import Azurite
from tests.support.seeds import seeds

pytestmark = pytest.mark.asyncio(loop_scope="session")

PARTITIONS = 16
MEMBERS: tuple[Kind, ...] = ("ours", "azure", "javascript", "azure", "ours")


class Open(Protocol):
    """Opens a fleet on a hub of its own."""

    def __call__(self, pace: Pace, partitions: int = PARTITIONS) -> AbstractAsyncContextManager[MixedFleet]: ...


@pytest_asyncio.fixture(loop_scope="session")
async def fleet_of(azurite: Azurite, request: pytest.FixtureRequest) -> AsyncIterator[Open]:
    """Open fleets, and report what they did: `pytest -rA` shows it."""

    @asynccontextmanager
    async def open_fleet(pace: Pace, partitions: int = PARTITIONS) -> AsyncIterator[MixedFleet]:
        store = (azurite.connection_string, f"fleet-{uuid.uuid4().hex}")
        async with Emulator({HUB: partitions}) as emulator, MixedFleet(emulator, store, partitions, pace) as fleet:
            try:
                yield fleet
            finally:
                request.node.add_report_section("call", "fleet", fleet.describe())

    yield open_fleet


async def live_through(fleet: MixedFleet, rng: random.Random) -> None:
    """Have members join, one be killed and one stand still for longer than the expiry, and come back, and two leave.

    Of the one that is killed and the one that stands still one is ours. The members have to share the partitions out,
    and every partition is read again.
    """

    def one_of_each_side() -> list[Member]:
        ours = [member for member in fleet.running if member.kind == "ours"]
        others = [member for member in fleet.running if member.kind != "ours"]
        return rng.sample([rng.choice(ours), rng.choice(others)], 2)

    async def settled() -> None:
        # The short form waits for ten cycles once, at the end.
        await (fleet.until_settled() if fleet.pace.is_bounded else fleet.until(lambda: fleet.is_shared))

    for kind in rng.sample(MEMBERS, len(MEMBERS)):
        await fleet.start(kind)
    await settled()
    killed, frozen = one_of_each_side()
    await fleet.kill(killed)
    fleet.freeze(frozen)
    await settled()
    await fleet.until_read()
    fleet.wake(frozen)
    await fleet.start(killed.kind)
    await fleet.until_settled()
    for member in one_of_each_side():
        await fleet.stop(member)
    await fleet.until_read()
    await fleet.finish()


@seeds(1, of=20)
async def test_mixed_fleet_shares_the_partitions_whatever_happens(fleet_of: Open, seed: int) -> None:
    """At most one apart, and no partition moves for ten cycles of the slowest member; nothing is lost.

    What dies or stands still is replaced once its ownership has expired, by the store's own clock.
    """
    async with fleet_of(FAST) as fleet:
        await live_through(fleet, random.Random(seed))
        assert FAST.expiry is not None
        assert max(fleet.gaps) <= FAST.expiry + 10


@pytest.mark.long  # ten cycles of azure-eventhub are five minutes
@pytest.mark.timeout(7200)
async def test_mixed_fleet_shares_the_partitions_at_the_intervals_of_each_sdk(fleet_of: Open) -> None:
    """The same without options about intervals, cycles of 10 to 36 seconds: shared out within ten of the slowest."""
    async with fleet_of(DEFAULTS) as fleet:
        await live_through(fleet, random.Random(0))


async def test_fleet_is_taken_over_and_back_without_a_duplicate(fleet_of: Open) -> None:
    """Under load the members of azure-eventhub stop one after another, in order, and ours go on; then the other way."""
    async with fleet_of(STEADY, 4) as fleet:
        sides: tuple[Kind, ...] = ("azure", "ours")
        for kind in sides:
            first = await fleet.start(kind)
            # Otherwise the second could take a partition while an event is processed.
            await fleet.finish()
            members = [first, await fleet.start(kind)]
            await fleet.until(lambda: fleet.is_shared)
            fleet.start_load()
            await fleet.until_read()
            for member in members:
                await fleet.stop(member)
        await fleet.start("azure")
        await fleet.finish()
        assert not +fleet.repeats, fleet.describe()


async def test_running_fleet_is_taken_over_member_by_member_and_back(fleet_of: Open) -> None:
    """Under load a member of the other side joins for each that leaves, in order: every event is processed.

    Some twice: a member that joins takes partitions from one that is processing.
    """
    async with fleet_of(STEADY, 8) as fleet:
        members = [await fleet.start("azure"), await fleet.start("azure")]
        await fleet.until_read()
        sides: tuple[Kind, ...] = ("ours", "azure")
        for kind in sides:
            for member in members:
                await fleet.start(kind)
                await fleet.until_read()
                await fleet.stop(member)
            await fleet.until_read()
            members = fleet.running
            assert {member.kind for member in members} == {kind}
        await fleet.finish()
