"""A shared link: each member gets its events once and in order, while others join, leave, lag or rewind."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

import pytest

from eventpump.consumer.link.feeds import FeedMaker
from eventpump.consumer.link.member import MemberCalls, MemberFeed
from eventpump.consumer.link.sharing import SharedPartition
from eventpump.consumer.record.starts import Beginning, HubRecreatedError
from eventpump.core.sharing import Held
from eventpump.errors import ConnectionLostError, ConsumerDisconnectedError, LinkDetachedError, RequestRefusedError
from eventpump.eventhubs.conditions import ARGUMENT_ERROR, error_for
from eventpump.eventhubs.events import EventPosition, ReceivedEvent
from eventpump.interfaces import ConsumerScope, PartitionProperties, ReceiveLinkSpec
from eventpump.options.consumer import FeedSettings
from eventpump.testing.transport import FakeHub, FakeTransport
from tests.support.inside import feed_of, members_of, own_links
from tests.support.seeds import seeds


class _World:
    """A hub of one partition, a shared link to it, and what was called of its members."""

    def __init__(self, seed: int = 1, **options: Any) -> None:
        self.hub = FakeHub(partitions=1, consumer_groups=("$Default", "second"))
        self.transport = FakeTransport(self.hub)
        self.rewound: list[tuple[str, int | None]] = []
        self.slow: list[str] = []
        self.own: list[tuple[str, bool]] = []
        self.troubles: list[tuple[str, Exception, float | None, bool]] = []
        self.unexpected: list[BaseException] = []
        feeds = FeedMaker(
            self.transport,
            ReceiveLinkSpec(self.hub.name, "$Default", "0", EventPosition.earliest(), owner_level=1),
            FeedSettings(hub=self.hub.name, **options),
            scope=ConsumerScope(self.hub.fully_qualified_namespace, self.hub.name, "$Default"),
            rng=random.Random(seed),
            hub=lambda: self.transport.get_hub_properties(self.hub.name),
        )
        self.shared = SharedPartition(
            feeds,
            on_closed=lambda feed: None,
            on_unexpected=lambda name, error: self.unexpected.append(error),
        )

    async def facts(self) -> PartitionProperties:
        """Read the partition's properties."""
        return await self.transport.get_partition_properties(self.hub.name, "0")

    def link_changed(self, name: str) -> None:
        """Record that one has a link of its own now, or has none any more."""
        member = own_links(self.shared).get(name)
        is_own = member is not None and member.has_own_link
        if is_own != dict(self.own).get(name, False):
            self.own.append((name, is_own))

    def join(
        self,
        name: str,
        position: EventPosition,
        expected: int | None = None,
        *,
        created_at: datetime | None = None,
        group: str | None = None,
    ) -> MemberFeed:
        """Let one read along."""
        beginning = Beginning(position, None, expected, created_at or self.hub.created_at)
        facts: Callable[[], Awaitable[PartitionProperties]] = self.facts

        def slow(_: Held) -> None:
            self.slow.append(name)

        calls = MemberCalls(
            facts,
            lambda: None,
            lambda error, delay, reports: self.troubles.append((name, error, delay, reports)),
            lambda number: self.rewound.append((name, number)),
            slow,
            lambda: self.link_changed(name),
        )
        return self.shared.join(name, beginning, calls, slow_after=10, catch_up_group=group)


@asynccontextmanager
async def _world(**options: Any) -> AsyncIterator[_World]:
    world = _World(**options)
    yield world
    for member in members_of(world.shared):
        await member.aclose()
    await world.shared.aclose()
    assert world.unexpected == []
    assert world.hub.owner_levels("0") == []


def _at(number: int) -> EventPosition:
    return EventPosition.at_sequence_number(number, inclusive=True)


async def _read(member: MemberFeed, count: int, limit: int = 300) -> list[int]:
    """Read so many events."""
    got: list[int] = []
    while len(got) < count:
        events = member.take(min(limit, count - len(got)))
        got += [event.sequence_number for event in events]
        if not events:
            if member.error is not None:
                raise member.error
            async with asyncio.timeout(1000):
                await member.wait(None)
    return got


async def test_link_begins_at_the_lowest_position() -> None:
    """Two that are expected: the link waits for both, begins at the lower one, and the other skips a part."""
    async with _world() as world:
        world.hub.publish("0", count=100)
        world.shared.expect("a")
        world.shared.expect("b")
        high = world.join("b", _at(60), 60)
        await asyncio.sleep(0.5)
        assert world.hub.attached == []
        low = world.join("a", _at(20), 20)
        assert await _read(low, 80) == list(range(20, 100))
        assert await _read(high, 40) == list(range(60, 100))
        assert len(world.hub.attached) == 1


async def test_place_of_what_was_taken_is_that_of_the_last_event_that_can_be_read() -> None:
    """A message that is damaged does not hide where to go on after those before it."""
    async with _world() as world:
        world.hub.publish("0", count=3)
        member = world.join("a", _at(0), 0)
        assert await _read(member, 3) == [0, 1, 2]
        feed = feed_of(world.shared)
        assert feed is not None
        feed.messages(
            [ReceivedEvent.build(b"x", offset="3", sequence_number=3, enqueued_time=datetime.now(UTC)).raw, b"damaged"]
        )
        assert len(member.take(5)) == 2
        assert member.number == 4


async def test_one_that_does_not_come_is_waited_for_a_second(clock: Any) -> None:
    """One that is expected and does not join holds the others up for a second at most, or until it has left."""
    for leaves in (False, True):
        async with _world() as world:
            world.hub.publish("0", count=10)
            world.shared.expect("a")
            world.shared.expect("b")
            member = world.join("b", _at(0), 0)
            began = clock.monotonic()
            if leaves:
                world.shared.left("a")
            assert await _read(member, 10) == list(range(10))
            assert clock.monotonic() - began == pytest.approx(0.0 if leaves else 1.0, abs=0.01)


async def test_slow_member_bounds_the_cache_and_is_named() -> None:
    """What one alone has not read fills the cache up to its bound, which the others feel; that one is named."""
    async with _world(prefetch_events=100) as world:
        fast, slow = world.join("fast", _at(0), 0), world.join("slow", _at(0), 0)
        world.hub.publish("0", count=500)
        got = await _read(fast, 60, 10)
        for _ in range(40):
            got += [event.sequence_number for event in fast.take(300)]
            await asyncio.sleep(1)
        assert got == list(range(len(got)))
        assert 90 <= len(got) <= 100
        assert slow.held[0] == len(got)
        assert set(world.slow) == {"slow"}
        slow.stop()
        assert await _read(fast, 500 - len(got)) == list(range(len(got), 500))


async def test_one_that_is_alone_holds_none_back() -> None:
    """When the others have left, a slow member holds up no other, and is not named."""
    async with _world(prefetch_events=100) as world:
        fast, slow = world.join("fast", _at(0), 0), world.join("slow", _at(0), 0)
        world.hub.publish("0", count=500)
        await _read(fast, 90, 10)
        fast.stop()
        await asyncio.sleep(100)
        assert world.slow == []
        assert await _read(slow, 500) == list(range(500))


async def test_one_that_joins_as_the_last_one_leaves_has_a_link() -> None:
    """A link that is about to be closed is not joined; another one follows."""
    async with _world() as world:
        world.hub.publish("0", count=10)
        first = world.join("a", _at(0), 0)
        assert await _read(first, 10) == list(range(10))
        first.stop()
        second = world.join("b", _at(10), 10)
        closing = asyncio.create_task(first.aclose())
        world.hub.publish("0", count=10)
        assert await _read(second, 10) == list(range(10, 20))
        await closing


async def test_refused_position_is_the_fault_of_its_member_alone() -> None:
    """Where the service refuses the lowest position, its member fails, and the others read on without it."""
    async with _world() as world:
        world.hub.publish("0", count=10)
        world.hub.refuse(error_for(ARGUMENT_ERROR, "no such offset"), times=1)
        world.shared.expect("a")
        world.shared.expect("b")
        bad, good = world.join("a", _at(0), 0), world.join("b", _at(5), 5)
        assert await _read(good, 5) == list(range(5, 10))
        assert isinstance(bad.error, RequestRefusedError)
        assert good.error is None


async def test_hub_that_is_recreated_ends_all_of_them() -> None:
    """Members of the hub before end; the link is opened for the present one when the first of them is back."""
    async with _world() as world:
        before = world.hub.created_at
        world.hub.publish("0", count=10)
        old = [world.join(name, _at(0), 0) for name in "ab"]
        assert [await _read(each, 10) for each in old] == [list(range(10))] * 2
        world.hub.recreate()
        world.hub.publish("0", count=5)
        new = world.join("c", _at(0), 0)
        await asyncio.sleep(0)
        assert all(isinstance(each.error, HubRecreatedError) for each in old)
        for each in old:
            await each.aclose()
            world.shared.left(each.name)
        assert await _read(new, 5) == list(range(5))
        late = world.join("d", _at(10), 10, created_at=before)
        assert isinstance(late.error, HubRecreatedError)


async def test_one_that_is_far_behind_catches_up_on_a_link_of_its_own() -> None:
    """With a second group: the others neither wait nor are slowed down; then it shares their link, without a repeat."""
    async with _world(prefetch_events=100) as world:
        world.hub.publish("0", count=2000)
        fast = world.join("fast", _at(0), 0)
        assert await _read(fast, 2000) == list(range(2000))
        late = world.join("late", _at(0), 0, group="second")
        got: list[int] = []
        numbers = iter(range(2000, 10_000))
        for _ in range(1000):
            got += [event.sequence_number for event in late.take(7)]
            world.hub.publish("0", count=1)
            assert await _read(fast, 1) == [next(numbers)]
            await asyncio.sleep(0.01)
        got += await _read(late, 3000 - len(got))
        assert got == list(range(3000))
        assert [spec.consumer_group for spec in world.hub.attached] == ["$Default", "second"]
        assert [spec.owner_level for spec in world.hub.attached] == [1, None]
        assert world.own == [("late", True), ("late", False)]
        assert len(world.hub.owner_levels("0")) == 1


async def test_one_that_stops_short_of_the_others_holds_none_back() -> None:
    """What is kept for one that has almost caught up is a quarter of the cache at most: then it is to try again."""
    async with _world(prefetch_events=100) as world:
        world.hub.publish("0", count=1000)
        fast = world.join("fast", _at(0), 0)
        assert await _read(fast, 1000) == list(range(1000))
        late = world.join("late", _at(0), 0, group="second")
        assert await _read(late, 990, 10) == list(range(990))
        for first in range(1000, 3000, 10):
            world.hub.publish("0", count=10)
            assert await _read(fast, 10) == list(range(first, first + 10))
            feed = feed_of(world.shared)
            assert feed is not None
            assert feed.events_held <= 35
        fast.stop()
        assert await _read(late, 2010) == list(range(990, 3000))
        world.hub.publish("0", count=10)
        assert await _read(late, 10) == list(range(3000, 3010))
        assert world.own == [("late", True), ("late", False)]
        await fast.aclose()


async def test_slow_one_gets_a_link_of_its_own() -> None:
    """With a second group: after `slow_after` the others go on at their pace, and it goes on at its own."""
    async with _world(prefetch_events=100) as world:
        fast, slow = world.join("fast", _at(0), 0), world.join("slow", _at(0), 0, group="second")
        world.hub.publish("0", count=1000)
        assert await _read(slow, 10, 10) == list(range(10))
        assert await _read(fast, 1000) == list(range(1000))
        assert world.own == [("slow", True)]
        assert await _read(slow, 990) == list(range(10, 1000))
        world.hub.publish("0", count=10)
        assert await _read(fast, 10) == await _read(slow, 10) == list(range(1000, 1010))
        assert world.own == [("slow", True), ("slow", False)]


async def test_without_a_place_in_the_second_group_the_others_wait() -> None:
    """A link of its own that is refused for good: it reads over the shared one, opened again at its position."""
    async with _world(prefetch_events=100) as world:
        world.hub.publish("0", count=1000)
        fast = world.join("fast", _at(0), 0)
        assert await _read(fast, 1000) == list(range(1000))
        world.hub.refuse(error_for(ARGUMENT_ERROR, "too many readers"), times=1)
        late = world.join("late", _at(0), 0, group="second")
        reading = asyncio.create_task(_read(fast, 20))
        world.hub.publish("0", count=10)
        assert await _read(late, 1010) == list(range(1010))
        world.hub.publish("0", count=10)
        assert await reading == list(range(1000, 1020))
        assert world.own == [("late", True), ("late", False)]


@seeds(12, of=40)
async def test_join_under_random_faults_delivers_each_range(seed: int) -> None:
    """Members join at numbers, times and offsets, in the past or at the end, are slow, and leave; links are lost.

    Each gets exactly the events from its beginning on, each once and in order, and the cache keeps its bound.
    """
    rng = random.Random(seed)
    bound = rng.choice([20, 100, 3000])
    got: dict[str, list[int]] = {}
    firsts: dict[str, int] = {}
    members: dict[str, tuple[MemberFeed, asyncio.Task[None]]] = {}

    async def read(name: str, member: MemberFeed) -> None:
        while True:
            events = member.take(rng.choice([1, 7, 300]))
            got[name] += [event.sequence_number for event in events]
            if events:
                await asyncio.sleep(rng.choice([0, 0, 0, 0.01, 3]))
            else:
                assert member.error is None, (name, member.error)
                await member.wait(rng.choice([None, 5]))

    async with _world(prefetch_events=bound, seed=seed) as world:
        hub = world.hub
        hub.latency = rng.choice([0.0, 0.02])
        hub.publish("0", count=rng.randrange(1, 200))
        for turn in range(60):
            events = hub.events("0")
            match rng.randrange(8):
                case 0 | 1 if len(members) < 5:
                    first = rng.choice([len(events), rng.randrange(len(events)), rng.randrange(len(events))])
                    position = _at(first)
                    expected: int | None = first
                    if first < len(events) and first and rng.random() < 0.6:
                        expected = None
                        if rng.random() < 0.5:
                            position = EventPosition.at_offset(events[first - 1].offset)
                        else:
                            moment = events[first].enqueued_time
                            first = next(n for n, each in enumerate(events) if each.enqueued_time >= moment)
                            position = EventPosition.at_enqueued_time(moment, inclusive=True)
                    name = f"member-{turn}"
                    firsts[name], got[name] = first, []
                    if rng.random() < 0.3:
                        world.shared.expect(name)
                        await asyncio.sleep(rng.choice([0, 0.5, 2]))
                    member = world.join(name, position, expected, group=rng.choice([None, "second"]))
                    members[name] = member, asyncio.create_task(read(name, member))
                case 2 if members:
                    name = rng.choice(list(members))
                    member, task = members.pop(name)
                    task.cancel()
                    await asyncio.wait({task})
                    if rng.random() < 0.5 and not member.has_own_link:
                        member.stop()
                    else:
                        await member.aclose()
                    _check(name, got[name], firsts[name])
                    if not members:
                        await member.aclose()
                case 3:
                    hub.detach("0", rng.choice([LinkDetachedError("cut"), ConnectionLostError("cut")]))
                case 4:
                    await asyncio.sleep(rng.uniform(0, 30))
                case _:
                    hub.publish("0", count=rng.randrange(60))
            await asyncio.sleep(rng.choice([0, 0, 0.001, 0.5]))
            feed = feed_of(world.shared)
            assert feed is None or feed.events_held <= bound
        total = len(hub.events("0"))
        for _ in range(3000):
            if all(len(got[name]) >= total - firsts[name] for name in members):
                break
            await asyncio.sleep(1)
        for name, (member, task) in members.items():
            task.cancel()
            await asyncio.wait({task})
            if not task.cancelled():
                task.result()
            assert got[name] == list(range(firsts[name], total)), name
            await member.aclose()


def _check(name: str, numbers: list[int], first: int) -> None:
    assert numbers == list(range(first, first + len(numbers))), name


async def test_own_link_that_ends_before_it_has_caught_up_leaves_no_gap() -> None:
    """What is kept for one that catches up is given up with its own link: it goes on where it was."""
    async with _world(prefetch_events=100) as world:
        world.hub.publish("0", count=1000)
        fast = world.join("fast", _at(0), 0)
        assert await _read(fast, 1000) == list(range(1000))
        late = world.join("late", _at(0), 0, group="second")
        assert await _read(late, 985, 5) == list(range(985))
        late.take(0)
        assert late.is_pinned
        assert late.has_own_link
        assert late.feed is not None
        late.feed.fail(ConsumerDisconnectedError("another reader has the group"))
        world.hub.publish("0", count=10)
        seen: list[int] = []
        for _ in range(50):
            seen += [event.sequence_number for event in late.take(300)]
            fast.take(300)
            await asyncio.sleep(0.2)
        assert seen == list(range(985, 1010))


async def test_own_link_of_a_former_hub_does_not_share_the_link_of_the_present_one() -> None:
    """It ends with the error that makes its subscription start over, and skips no event of the present hub."""
    async with _world(prefetch_events=100) as world:
        world.hub.publish("0", count=1000)
        fast = world.join("fast", _at(0), 0)
        assert await _read(fast, 1000) == list(range(1000))
        late = world.join("late", _at(0), 0, group="second")
        await _read(late, 500, 5)
        await asyncio.sleep(1)
        world.hub.recreate()
        world.hub.publish("0", count=5)
        await fast.aclose()
        again = world.join("fast", _at(0), 0)
        assert await _read(again, 5) == list(range(5))
        late.take(5)
        world.hub.publish("0", count=600)
        for _ in range(50):
            late.take(300)
            again.take(300)
            await asyncio.sleep(0.2)
        assert isinstance(late.error, HubRecreatedError)


async def test_what_is_kept_for_one_that_catches_up_is_bounded_in_bytes_too() -> None:
    """One that stops reading while it catches up stops no other, however large the events are."""
    async with _world(prefetch_events=1000, prefetch_bytes=64 * 1024) as world:
        world.hub.publish("0", count=3000)
        fast = world.join("fast", _at(0), 0)
        assert await _read(fast, 3000) == list(range(3000))
        late = world.join("late", _at(0), 0, group="second")
        await _read(late, 2900, 50)
        late.take(0)
        assert late.is_pinned
        got = 0
        for _ in range(200):
            world.hub.publish("0", b"x" * 4000)
            got += len(fast.take(300))
            await asyncio.sleep(1)
        got += len(fast.take(300))
        assert got == 200


async def test_one_that_loses_its_own_link_as_the_shared_one_ends_has_another() -> None:
    """Both links end for good in the same moment: those that shared end, and the other one reads on."""
    async with _world(prefetch_events=20) as world:
        world.hub.publish("0", count=500)
        near = world.join("near", _at(400), 400)
        assert await _read(near, 50) == list(range(400, 450))
        far = world.join("far", _at(0), 0, group="second")
        assert await _read(far, 30) == list(range(30))
        assert far.has_own_link
        # Its own link first.
        for link in sorted(world.hub.partition("0").links, key=lambda each: each.spec.consumer_group == "$Default"):
            link.end(error_for("com.microsoft:entity-disabled", "both"))
        got = await _read(far, 470)
        assert got == list(range(30, 500))
        assert near.error is not None
