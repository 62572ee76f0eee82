"""Reading lag again and again while a fleet works, over hubs and stores that fail."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

import pytest

from eventpump.errors import ServiceBusyError, StoreError
from eventpump.interfaces import ConsumerScope
from eventpump.lag import GroupCheckpoints, GroupLag, LagReader, LagState, StoredCheckpoint
from eventpump.testing.clock import VirtualClock
from eventpump.testing.transport import FakeHub, FakeTransport
from tests.support.seeds import seeds

PARTITIONS = 12


@dataclass
class Fleet:
    """A hub, and the checkpoints of a group that works on it, as they were over time.

    Attributes:
        numbers: By partition, the checkpoint, and None before the first.
        past: Times, and for each partition how many retained events followed its checkpoint then.
        fails: What the store raises at the next reading.
    """

    clock: VirtualClock
    hub: FakeHub = field(default_factory=lambda: FakeHub(partitions=PARTITIONS, latency=0.02))
    numbers: dict[str, int | None] = field(default_factory=lambda: dict.fromkeys(map(str, range(PARTITIONS))))
    past: list[tuple[float, dict[str, int]]] = field(default_factory=list)
    fails: BaseException | None = None

    async def read(self, scope: ConsumerScope, partition_ids: Sequence[str]) -> GroupCheckpoints:
        """As a user's reader may be: slow, raising anything, and with partitions that no hub has."""
        found = {
            each: StoredCheckpoint(each, "own", "table", number)
            for each, number in self.numbers.items()
            if number is not None
        }
        await asyncio.sleep(0.3)
        if self.fails is not None:
            error, self.fails = self.fails, None
            raise error
        return GroupCheckpoints({**found, "99": StoredCheckpoint("99", "own", "table", 1)})

    async def aclose(self) -> None:
        pass

    def reader(self, **options: object) -> LagReader:
        transport = FakeTransport(self.hub)
        return LagReader(hub="telemetry", transport=transport, checkpoints=self, clock=self.clock, **options)  # type: ignore[arg-type] # values of any option

    def truth(self) -> dict[str, int]:
        """Return the lag of each partition now."""
        lags = {}
        for partition_id, number in self.numbers.items():
            facts = self.hub.partition_properties(partition_id)
            last = facts.last_enqueued_sequence_number
            first = last + 1 if facts.is_empty else facts.beginning_sequence_number
            lags[partition_id] = last + 1 - (first if number is None else max(first, number + 1))
        return lags

    def work(self, rng: random.Random) -> None:
        """Let something happen to a partition: events, a checkpoint, retention, or an error of hub or store."""
        partition_id = str(rng.randrange(PARTITIONS))
        facts = self.hub.partition_properties(partition_id)
        last = facts.last_enqueued_sequence_number
        match rng.randrange(8):
            case 0 | 1 | 2:
                self.hub.publish(partition_id, count=rng.randrange(1, 20))
            case 3 | 4 if last >= 0:
                before = self.numbers[partition_id]
                self.numbers[partition_id] = rng.randint(-1 if before is None else before, last)
            case 5 if last >= 0:
                self.hub.truncate(partition_id, rng.randint(0, last + 1))
            case 6:
                self.hub.refuse(ServiceBusyError("busy"), operation="partition", partition_id=partition_id)
            case 7:
                self.fails = rng.choice([KeyError("a bug"), StoreError("read", "away"), TimeoutError()])
        self.past.append((self.clock.time(), self.truth()))

    def at(self, moment: datetime) -> dict[str, int]:
        """Return the lag of each partition at a time."""
        return [lags for time, lags in self.past if time <= moment.timestamp()][-1]


def check(fleet: Fleet, found: GroupLag) -> None:
    """No lag is too small for the time at which it was read, and no checkpoint seems to be of a former hub."""
    for each in found.partitions:
        assert each.state is not LagState.BEYOND_END
        if each.read_at is not None:
            assert each.lag is not None
            assert each.lag >= fleet.at(each.read_at)[each.partition_id]


@seeds(30, of=1000, always=(0, 6))
async def test_history_of_a_fleet_is_never_reported_better_than_it_was(seed: int, clock: VirtualClock) -> None:
    """Whatever fails in between, and however long a reading takes; in the end it is exact."""
    rng, fleet = random.Random(seed), Fleet(clock)
    fleet.past.append((clock.time(), fleet.truth()))
    reader = fleet.reader(rate=rng.choice((3.0, 8.0, 200.0)))
    watching = reader.watch(rng.choice((0.5, 2.0, 7.0)))

    async def watch() -> None:
        async for found in watching:
            check(fleet, found)

    async with reader:
        await reader.read()
        task = asyncio.create_task(watch())
        for _ in range(200):
            await asyncio.sleep(rng.uniform(0.001, 0.4))
            fleet.work(rng)
            assert not task.done(), task.exception()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await watching.aclose()
        fleet.hub.accept()
        fleet.fails = None
        last = await reader.read()
    assert {each.partition_id: each.lag for each in last.partitions} == fleet.truth()


async def test_requests_to_the_hub_are_bounded(clock: VirtualClock) -> None:
    """In no second are there more than the rate and what may begin at once."""
    fleet = Fleet(clock)
    async with fleet.reader(rate=4.0) as reader:
        for _ in range(3):
            await reader.read()
    times = [time for _, time in fleet.hub.looks]
    assert len(times) == 3 * PARTITIONS
    assert max(sum(1 for other in times if 0 <= other - time < 1.0) for time in times) <= 8


async def test_calls_at_the_same_time_follow_each_other(clock: VirtualClock) -> None:
    """Each returns what it read itself; a canceled one leaves nothing behind that disturbs the next."""
    fleet = Fleet(clock)
    fleet.hub.publish("3", count=5)
    async with fleet.reader(rate=50.0) as reader:
        tasks = [asyncio.create_task(reader.read()) for _ in range(3)]
        await asyncio.sleep(0.35)
        tasks[0].cancel()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(done[0], asyncio.CancelledError)
        assert [each.total for each in done[1:] if isinstance(each, GroupLag)] == [5, 5]


@pytest.mark.parametrize("error", [KeyError("a bug"), TypeError("another")])
async def test_first_reading_raises_what_a_reader_of_checkpoints_raises_as_a_failure_of_the_store(
    error: Exception, clock: VirtualClock
) -> None:
    """By `read` and by `watch`, with the error in it."""
    fleet = Fleet(clock)
    async with fleet.reader() as reader:
        fleet.fails = error
        with pytest.raises(StoreError, match=type(error).__name__):
            await reader.read()
        fleet.fails = error
        with pytest.raises(StoreError, match=type(error).__name__):
            await anext(reader.watch())


async def test_lag_is_read_at_the_time_of_utc(clock: VirtualClock) -> None:
    """With a time zone."""
    async with Fleet(clock).reader() as reader:
        assert (await reader.read()).read_at.tzinfo is UTC
