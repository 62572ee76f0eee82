"""`max_buffered_bytes`: what all links of a host hold together stays within the stated bound, and all come on."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from eventpump.consumer.host.host import HubHost
from eventpump.consumer.link.feed import LARGE, PartitionFeed, as_received
from eventpump.consumer.link.kept_link import FeedFullError
from eventpump.consumer.processor import PartitionContext
from eventpump.core.budget import Account, BufferBudget
from eventpump.errors import ConnectionLostError
from eventpump.eventhubs.events import EventPosition, ReceivedEvent
from eventpump.interfaces import ReceiveLinkSpec
from eventpump.options.base import RetryOptions
from eventpump.options.consumer import FeedSettings
from eventpump.reports import LinkFailed, PartitionFailed
from eventpump.testing.transport import FakeHub, FakeTransport
from tests.support.fleet import Fleet, Record, RecordingProcessor
from tests.support.inside import budget_of, feed_of, owned
from tests.support.seeds import seeds

Events = Sequence[ReceivedEvent]
KIB = 1024
OVERHEAD = 200
"""More than the sections of an event take beside its body."""


Watch = Callable[[HubHost, int], None]


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    """Called with a host and its largest event: check the bound that the documentation states after each batch."""
    watched: list[tuple[HubHost, int]] = []
    accounts: list[Account] = []
    receive, open_account = PartitionFeed.messages, BufferBudget.open

    def opened(budget: BufferBudget, adjust: Callable[[], None]) -> Account:
        accounts.append(open_account(budget, adjust))
        return accounts[-1]

    def messages(feed: PartitionFeed[Any], batch: list[bytes]) -> None:
        receive(feed, batch)
        # Those of closed links, too, as long as what they brought is in hand.
        accounts[:] = [each for each in accounts if each.held or not each.is_closed]
        for host, largest in watched:
            budget = budget_of(host)
            holding = [each for each in accounts if each.held and each._budget is budget]
            assert host.buffered_bytes == sum(each.held for each in holding)
            assert host.buffered_bytes <= budget.max_bytes + len(holding) * (largest + OVERHEAD)

    monkeypatch.setattr(PartitionFeed, "messages", messages)
    monkeypatch.setattr(BufferBudget, "open", opened)
    return lambda host, largest: watched.append((host, largest))


def _refused(fleet: Fleet, name: str = "a") -> list[LinkFailed]:
    return [each for each in fleet.reported(name, LinkFailed) if isinstance(each.error, FeedFullError)]


@pytest.mark.parametrize("latency", [0.0, 0.05])
async def test_sizes_that_jump_while_handlers_stand_still_stay_within_the_budget(watch: Watch, latency: float) -> None:
    """Credit was granted for small events, and large ones come: the bound holds, and nothing is lost or repeated."""
    partitions, largest = 40, 100 * KIB
    go_on = asyncio.Event()

    async def handle(context: PartitionContext, events: Events) -> None:
        if any(len(event.raw) > KIB for event in events):
            await go_on.wait()

    async with Fleet(FakeHub(partitions=partitions, latency=latency)) as fleet:
        retry = RetryOptions(max_retries=0)
        processor = RecordingProcessor(fleet.record, on_events=handle)
        host = await fleet.start("a", processor, max_buffered_bytes=1024 * KIB, link_retry=retry)
        watch(host, largest)
        await fleet.until(lambda: sum(each.is_attached for each in host.partitions) == partitions, 60)
        for partition_id in fleet.hub.partition_ids:
            fleet.hub.publish(partition_id, *[b"x" * 100] * 300)
        await asyncio.sleep(10)
        for partition_id in fleet.hub.partition_ids:
            fleet.hub.publish(partition_id, *[b"x" * largest] * 20)
        await asyncio.sleep(60)
        assert host.buffered_bytes > 1000 * KIB
        assert sum({each.partition_id: each.buffered_bytes for each in host.partitions}.values()) == host.buffered_bytes
        assert _refused(fleet)
        # Every partition has come to its first large event, whatever the others hold.
        assert all(len(fleet.record.numbers(each)) > 300 for each in fleet.hub.partition_ids)
        go_on.set()
        await fleet.until(lambda: all(len(fleet.record.numbers(each)) == 320 for each in fleet.hub.partition_ids), 600)
        assert all(fleet.record.numbers(each) == list(range(320)) for each in fleet.hub.partition_ids)
        await asyncio.sleep(1)
        assert host.buffered_bytes == 0
        # It is no failure, so that no retries are used up.
        assert fleet.reported("a", PartitionFailed) == []


async def test_event_larger_than_the_budget_comes(watch: Watch) -> None:
    """Each partition gets one event at a time where even one is more than the budget."""
    async with Fleet(FakeHub(partitions=4)) as fleet:
        for partition_id in fleet.hub.partition_ids:
            fleet.hub.publish(partition_id, *[b"x" * 50 * KIB] * 30)
        host = await fleet.start("a", max_buffered_bytes=10 * KIB)
        watch(host, 50 * KIB)
        await fleet.until(lambda: all(len(fleet.record.numbers(each)) == 30 for each in fleet.hub.partition_ids), 600)
        assert {len(each.numbers) for each in fleet.record.deliveries} == {1}


async def test_idle_partitions_lend_and_get_back_within_a_round(watch: Watch) -> None:
    """One busy partition uses what the others leave free; once all are busy, each soon has its share."""
    partitions, size = 20, KIB
    paces = dict.fromkeys(map(str, range(partitions)), 1.0)

    async def handle(context: PartitionContext, events: Events) -> None:
        await asyncio.sleep(paces[context.partition_id])

    async with Fleet(FakeHub(partitions=partitions, latency=0.01)) as fleet:
        processor = RecordingProcessor(fleet.record, on_events=handle)
        host = await fleet.start("a", processor, max_buffered_bytes=2000 * KIB, max_batch_size=10)
        watch(host, size)
        held = Counter[str]()

        def look() -> None:
            held.clear()
            held.update({each.partition_id: each.buffered_bytes for each in host.partitions})

        fleet.hub.publish("0", *[b"x" * size] * 5000)
        await asyncio.sleep(60)
        look()
        share = budget_of(host).share
        assert held["0"] > 8 * share
        for partition_id in fleet.hub.partition_ids[1:]:
            fleet.hub.publish(partition_id, *[b"x" * size] * 3000)
        # A round of reading: the time in which the busy one reads what it holds.
        await asyncio.sleep(held["0"] / size / 10)
        look()
        assert held["0"] < 1.5 * share
        assert min(held.values()) > share / 3
        # And so for good: under constant pressure each gets the same.
        before = {each: len(fleet.record.numbers(each)) for each in fleet.hub.partition_ids}
        await asyncio.sleep(30)
        progress = {len(fleet.record.numbers(each)) - before[each] for each in fleet.hub.partition_ids}
        assert min(progress) > 0.8 * max(progress)
        assert _refused(fleet) == []
        paces |= dict.fromkeys(paces, 0.0)


@seeds(1, of=100)
async def test_buffered_bytes_under_random_faults_keep_the_bound(watch: Watch, seed: int) -> None:
    """Sizes jump, links are cut, partitions move, subscriptions are slow, or take a part, and code raises."""
    rng = random.Random(seed)
    largest = 20 * KIB
    records = {"default": Record(), "archive": Record()}
    paces = dict.fromkeys(records, 0.0)
    is_calm = False

    def processor(name: str) -> Any:
        async def handle(context: PartitionContext, events: Events) -> None:
            await asyncio.sleep(paces[name] * rng.random())
            if not is_calm and rng.random() < 0.03:
                raise rng.choice([ValueError("sometimes"), GeneratorExit("odd"), asyncio.CancelledError("odd")])
            if rng.random() < 0.5:
                await context.checkpoint()

        return RecordingProcessor(records[name], on_events=handle)

    def third(event: ReceivedEvent) -> int:
        if not is_calm and rng.random() < 0.005:
            raise rng.choice([ValueError("sometimes"), GeneratorExit("odd"), asyncio.CancelledError("odd")])
        return event.sequence_number % 3

    hub = FakeHub(partitions=5, consumer_groups=("$Default", "second"), latency=rng.choice([0.0, 0.05, 0.5]))
    async with Fleet(hub, seed=seed) as fleet:
        options: dict[str, Any] = {
            "max_buffered_bytes": rng.choice([1, 30, 300, 3000]) * KIB,
            "prefetch_events": rng.choice([20, 3000]),
            "max_batch_size": rng.choice([1, 7, 300]),
            "strict_prefetch_bytes": rng.random() < 0.1,
        }
        archive: dict[str, Any] = {"start": "earliest", "slow_after": 5.0}
        archive |= rng.choice([{"catch_up_group": "second"}, {"catch_up": "shared"}])
        part: dict[str, Any] = rng.choice([{}, {"keys": {0}, "key": third}, {"filter": lambda event: not third(event)}])
        archive |= part
        for name in ("a", "b"):
            host = await fleet.start(name, processor("default"), **options)
            watch(host, largest)
            await host.subscribe("archive", processor("archive"), **archive)
        for _ in range(40):
            match rng.randrange(8):
                case 0:
                    paces[rng.choice(list(paces))] = rng.choice([0.0, 0.1, 20.0])
                case 1:
                    hub.detach(rng.choice(hub.partition_ids), ConnectionLostError("cut"))
                case 2 if "b" in fleet.hosts and rng.random() < 0.2:
                    await fleet.hosts["b"].aclose(deadline=rng.choice([0, 1, 10]))
                case _:
                    size = rng.choice([10, 100, KIB, largest])
                    for partition_id in hub.partition_ids:
                        bodies = [b"x" * int(size * rng.random()) for _ in range(rng.randrange(60))]
                        hub.publish(partition_id, *bodies)
            await asyncio.sleep(rng.choice([0.01, 1, 10]))
        is_calm = True
        paces |= dict.fromkeys(paces, 0.0)
        counts = {each: len(hub.events(each)) for each in hub.partition_ids}
        steps = {"default": 1, "archive": 3 if part else 1}
        wanted = {(name, each): set(range(0, counts[each], steps[name])) for name in records for each in counts}
        await fleet.until(
            lambda: all(set(records[name].numbers(each)) == numbers for (name, each), numbers in wanted.items()),
            3600,
            step=5,
        )


async def test_after_an_event_that_is_not_kept_nothing_of_its_link_is() -> None:
    """A small event that there is room for, behind a large one that there is none for, would leave a gap."""
    hub = FakeHub(partitions=1)
    hub.publish("0", b"x" * 2000, b"x" * 2000, b"x")
    spec = ReceiveLinkSpec(hub.name, "$Default", "0", EventPosition.earliest())
    budget = BufferBudget(4000, 4000)
    settings = FeedSettings(hub=hub.name)
    feed = PartitionFeed(FakeTransport(hub), spec, settings, wrap=as_received, rng=random.Random(1), budget=budget)
    cursor = feed.cursor()
    for event in hub.events("0"):
        feed.messages([event.raw])
    # The link that is opened for it brings the rest.
    feed.start()
    found: list[int] = []
    for _ in range(10):
        await cursor.wait(60)
        found += [ReceivedEvent(each).sequence_number for each in cursor.take(1)]
    assert found == [0, 1, 2]
    cursor.processed()
    await feed.aclose()
    assert (budget.held, budget.links) == (0, 0)


async def test_what_is_kept_for_its_place_has_no_body() -> None:
    """Of a large event that was processed nothing but its place is kept for the link's sake."""
    async with Fleet(FakeHub(partitions=1)) as fleet:
        fleet.hub.publish("0", b"x" * 100_000, b"y" * 100_000)
        host = await fleet.start("a", track_last_enqueued=True)
        await fleet.until(lambda: len(fleet.record.numbers("0")) == 2, 60)
        partition = owned(host, "0")
        assert partition is not None
        feed = feed_of(partition.shared)
        assert feed is not None
        assert feed.facts.newest is not None
        assert feed.facts.first is not None
        assert max(len(feed.facts.newest), len(feed.facts.first)) < LARGE
        assert [ReceivedEvent(each).sequence_number for each in (feed.facts.first, feed.facts.newest)] == [0, 1]
        last = ReceivedEvent(feed.facts.newest).last_enqueued
        assert last is not None
        assert last.sequence_number == 1
