"""A subscription that is behind reads over a link of its own, in its catch-up group, without a gap or a repeat."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from eventpump.consumer.processor import PartitionContext
from eventpump.core.sharing import LinkState
from eventpump.errors import ConfigurationError, ConnectionLostError, EventPumpError, QuotaExceededError
from eventpump.eventhubs.conditions import error_for
from eventpump.eventhubs.events import ReceivedEvent
from eventpump.reports import LinkFailed, LinkRewound, LinkStateChanged, SubscriptionSlow
from eventpump.testing.transport import FakeHub
from tests.support.fleet import NO_PROCESSOR, Fleet, Record, RecordingProcessor
from tests.support.inside import own_links, owned
from tests.support.seeds import seeds

Events = Sequence[ReceivedEvent]
GROUP = "catch-up"


def _fleet(partitions: int = 1, **options: Any) -> Fleet:
    return Fleet(FakeHub(partitions=partitions, consumer_groups=("$Default", GROUP), **options))


def _recording(record: Record, on_events: Callable[[PartitionContext, Events], Awaitable[None]] | None = None) -> Any:
    return RecordingProcessor(record, on_events=on_events)


def _delivered(record: Record, partition_id: str = "0") -> list[int]:
    """Every number in the order of delivery, repeats included."""
    return [number for each in record.deliveries if each.partition_id == partition_id for number in each.numbers]


def _groups(fleet: Fleet) -> list[tuple[str, int | None]]:
    """The links that are attached now, by consumer group and owner level."""
    return sorted(
        (link.spec.consumer_group, link.spec.owner_level)
        for partition_id in fleet.hub.partition_ids
        for link in fleet.hub.partition(partition_id).links
    )


async def test_catch_up_group_at_a_start_in_the_past_leaves_the_others_their_pace() -> None:
    """The past comes over a second link, without an owner level; then one link serves both, each event once."""
    archive = Record()

    async def slowly(context: PartitionContext, events: Events) -> None:
        await asyncio.sleep(1)

    async with _fleet() as fleet:
        fleet.hub.publish("0", count=1000)
        host = await fleet.start("a", prefetch_events=100, max_batch_size=50, initial_position="@latest")
        await asyncio.sleep(2)
        await host.subscribe("archive", _recording(archive, slowly), start="earliest", catch_up_group=GROUP)
        for turn in range(10):
            fleet.hub.publish("0", count=10)
            await asyncio.sleep(1)
            assert len(_delivered(fleet.record)) == 10 * (turn + 1)
            if turn == 5:
                assert _groups(fleet) == [("$Default", 1), (GROUP, None)]
                assert [each.link_state for each in host.partitions] == [LinkState.SHARED, LinkState.OWN]
        await asyncio.sleep(60)
        fleet.hub.publish("0", count=10)
        await asyncio.sleep(30)
        assert _groups(fleet) == [("$Default", 1)]
        assert {each.link_state for each in host.partitions} == {LinkState.SHARED}
        assert _delivered(fleet.record) == list(range(1000, 1110))
        assert _delivered(archive) == list(range(1110))
        assert fleet.reported("a", LinkRewound) == []
        assert [each.state for each in fleet.reported("a", LinkStateChanged)] == [LinkState.OWN, LinkState.SHARED]


async def test_catch_up_group_of_one_that_becomes_slow_frees_the_others() -> None:
    """After `slow_after` it has a link of its own, and the fast one loses nothing of its pace any more."""
    slow = Record()
    pause = [10.0]

    async def slowly(context: PartitionContext, events: Events) -> None:
        await asyncio.sleep(pause[0])

    async with _fleet() as fleet:
        host = await fleet.start("a", prefetch_events=100, max_batch_size=10)
        await host.subscribe("archive", _recording(slow, slowly), slow_after=30, catch_up_group=GROUP)
        await asyncio.sleep(1)
        fleet.hub.publish("0", count=1000)
        await asyncio.sleep(20)
        assert len(_delivered(fleet.record)) < 200
        await asyncio.sleep(30)
        assert _delivered(fleet.record) == list(range(1000))
        (report,) = fleet.reported("a", SubscriptionSlow)
        assert not report.is_suspended
        assert report.slow_for >= 30
        pause[0] = 0.01
        await asyncio.sleep(60)
        fleet.hub.publish("0", count=50)
        await asyncio.sleep(10)
        assert _delivered(fleet.record) == _delivered(slow) == list(range(1050))
        assert _groups(fleet) == [("$Default", 1)]


async def test_catch_up_group_that_two_start_with_needs_no_second_link_for_the_foremost() -> None:
    """A subscription alone on a host reads over the partition's link, wherever it starts; of two the hindmost parts."""
    first, second = Record(), Record()
    async with _fleet() as fleet:
        fleet.hub.publish("0", count=2000)
        host = fleet.host("a", NO_PROCESSOR)
        await host.subscribe("first", _recording(first), start="earliest", catch_up_group=GROUP)
        fleet.runs["a"] = asyncio.create_task(host.run())
        await asyncio.sleep(20)
        assert _delivered(first) == list(range(2000))
        await host.subscribe("second", _recording(second), start="earliest", catch_up_group=GROUP)
        await asyncio.sleep(30)
        fleet.hub.publish("0", count=5)
        await asyncio.sleep(30)
        assert _delivered(first) == _delivered(second) == list(range(2005))
        assert _groups(fleet) == [("$Default", 1)]


@pytest.mark.parametrize(
    "error",
    [
        QuotaExceededError("5 receivers", condition="amqp:resource-limit-exceeded"),
        error_for("amqp:not-found", "The messaging entity could not be found.", entity=GROUP),
        error_for("amqp:link:stolen", "another reader has an epoch"),
    ],
)
async def test_catch_up_group_that_refuses_falls_back_to_the_shared_link(error: EventPumpError) -> None:
    """It is reported, the link of the partition is opened further back, and both get everything; the lease stays."""
    archive = Record()
    async with _fleet() as fleet:
        fleet.hub.publish("0", count=1000)
        host = await fleet.start("a", prefetch_events=100, initial_position="@latest")
        await asyncio.sleep(2)
        fleet.hub.refuse(error, operation="receive", times=1)
        await host.subscribe("archive", _recording(archive), start="earliest", catch_up_group=GROUP)
        await asyncio.sleep(5)
        fleet.hub.publish("0", count=100)
        await asyncio.sleep(30)
        assert _delivered(archive) == list(range(1100))
        assert _delivered(fleet.record) == list(range(1000, 1100))
        assert any(GROUP in str(each.error) for each in fleet.reported("a", LinkFailed))
        assert [each.epoch for each in host.partitions] == [1, 1]
        assert _groups(fleet) == [("$Default", 1)]


async def test_catch_up_group_that_is_the_hosts_is_refused() -> None:
    """Beside a link with an owner level the service allows no other in the same group."""
    async with _fleet() as fleet:
        host = await fleet.start("a")
        with pytest.raises(ConfigurationError, match="catch_up_group"):
            await host.subscribe("archive", _recording(Record()), start="earliest", catch_up_group="$Default")


async def test_unsubscribing_while_catching_up_closes_the_link() -> None:
    """No link of its own stays behind, nor one without a reader."""
    archive = Record()

    async def slowly(context: PartitionContext, events: Events) -> None:
        await asyncio.sleep(1)

    async with _fleet() as fleet:
        fleet.hub.publish("0", count=5000)
        host = await fleet.start("a", initial_position="@latest", prefetch_events=100)
        await asyncio.sleep(2)
        await host.subscribe("archive", _recording(archive, slowly), start="earliest", catch_up_group=GROUP)
        await asyncio.sleep(5)
        assert len(_groups(fleet)) == 2
        await host.unsubscribe("archive")
        await asyncio.sleep(5)
        assert _groups(fleet) == [("$Default", 1)]


@pytest.mark.parametrize("latency", [0.0, 0.35])
async def test_catch_up_under_a_steady_stream_neither_misses_nor_repeats(latency: float) -> None:
    """What both links bring while the subscription changes from one to the other is delivered once."""
    archive = Record()

    async with _fleet(latency=latency) as fleet:
        fleet.hub.publish("0", count=1000)
        host = await fleet.start("a", prefetch_events=200, max_batch_size=20, initial_position="@latest")
        await asyncio.sleep(2)
        for _ in range(6):
            await host.subscribe("archive", _recording(archive), start="earliest", catch_up_group=GROUP)
            for _ in range(200):
                fleet.hub.publish("0", count=3)
                await asyncio.sleep(0.1)
            last = len(fleet.hub.events("0"))
            await fleet.until(lambda: _delivered(archive)[-1:] == [last - 1], 60, step=1)  # noqa: B023 - of this turn
            await asyncio.sleep(1)
            assert _delivered(fleet.record) == list(range(1000, last))
            assert _delivered(archive) == list(range(last))
            assert _groups(fleet) == [("$Default", 1)]
            await host.unsubscribe("archive")
            archive.deliveries.clear()


@pytest.mark.parametrize("goes_on", [True, False])
async def test_catch_up_beside_one_that_leaves_closes_the_link_that_is_not_read(goes_on: bool) -> None:
    """A link of which only a part is kept for one that catches up ends with its last reader."""
    records = Record(), Record()
    pauses = [0.0, 0.0]

    def processor(index: int) -> Any:
        async def handle(context: PartitionContext, events: Events) -> None:
            await asyncio.sleep(pauses[index])

        return _recording(records[index], handle)

    async with _fleet(latency=0.5) as fleet:
        host = fleet.host("a", NO_PROCESSOR, prefetch_events=400, max_batch_size=20)
        await host.subscribe("alerts", processor(0))
        fleet.runs["a"] = asyncio.create_task(host.run())
        await asyncio.sleep(5)
        fleet.hub.publish("0", count=500)
        await asyncio.sleep(5)
        await host.subscribe("archive", processor(1), start="earliest", catch_up_group=GROUP)
        pauses[1] = 0.5
        for _ in range(400):
            fleet.hub.publish("0", count=2)
            await asyncio.sleep(0.25)
            slot = owned(host, "0")
            assert slot is not None
            assert slot.shared is not None
            if any(each.is_pinned for each in own_links(slot.shared).values()):
                break
        else:
            pytest.fail("nothing was kept for it")
        await host.unsubscribe("alerts")
        if not goes_on:
            await host.unsubscribe("archive")
            await asyncio.sleep(20)
            assert _groups(fleet) == []
            return
        pauses[1] = 0.0
        await asyncio.sleep(20)
        fleet.hub.publish("0", count=5)
        await asyncio.sleep(20)
        assert len(_groups(fleet)) == 1
        assert _delivered(records[1]) == list(range(len(fleet.hub.events("0"))))


@seeds(2, of=60)
async def test_catch_up_whatever_happens_to_the_links_neither_misses_nor_repeats(seed: int) -> None:
    """Handlers change their pace, links are cut, more is published: each event once, in order, to each subscription."""
    rng = random.Random(seed)
    records = {"default": Record(), "archive": Record(), "audit": Record()}
    paces, firsts = dict.fromkeys(records, 0.0), dict.fromkeys(records, 0)

    def processor(name: str) -> Any:
        async def handle(context: PartitionContext, events: Events) -> None:
            await asyncio.sleep(paces[name])

        return _recording(records[name], handle)

    async with _fleet(latency=rng.choice([0.0, 0.05, 0.5])) as fleet:
        fleet.hub.publish("0", count=rng.randrange(200, 800))
        host = await fleet.start(
            "a",
            processor("default"),
            prefetch_events=rng.choice([20, 100, 300]),
            max_batch_size=rng.choice([1, 7, 50]),
        )
        await asyncio.sleep(rng.choice([0, 1, 20]))
        for name in ("archive", "audit"):
            options: dict[str, Any] = {"start": rng.choice(["earliest", 100])}
            options |= {"catch_up_group": GROUP} if name == "archive" or rng.random() < 0.5 else {"catch_up": "shared"}
            await host.subscribe(name, processor(name), slow_after=rng.choice([1, 10]), **options)
            firsts[name] = 101 if options["start"] == 100 else 0
            await asyncio.sleep(rng.choice([0, 0.3, 10]))
        for _ in range(40):
            match rng.randrange(6):
                case 0:
                    paces[rng.choice(list(paces))] = rng.choice([0.0, 0.01, 0.5, 3.0])
                case 1:
                    fleet.hub.detach("0", ConnectionLostError("cut"))
                case 2:
                    links = list(fleet.hub.partition("0").links)
                    if links:
                        rng.choice(links).end(error_for("amqp:link:detach-forced", "detached"))
                case _:
                    fleet.hub.publish("0", count=rng.randrange(100))
            await asyncio.sleep(rng.choice([0.01, 0.2, 5]))
        paces |= dict.fromkeys(paces, 0.0)
        last = len(fleet.hub.events("0"))
        await fleet.until(lambda: all(_delivered(each)[-1:] == [last - 1] for each in records.values()), 3600, step=1)
        fleet.hub.publish("0", count=3)
        await asyncio.sleep(30)
        for name, record in records.items():
            assert _delivered(record) == list(range(firsts[name], last + 3)), name
        assert len(_groups(fleet)) <= 3
