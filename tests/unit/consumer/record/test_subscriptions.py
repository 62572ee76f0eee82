"""Several subscriptions on one link: each gets its own events, once and in order, at its own pace, and loses none."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest

from eventpump.consumer.host.host import HubHost
from eventpump.consumer.processor import CloseReason, PartitionContext
from eventpump.core.checkpoint import CheckpointPolicy
from eventpump.core.sharing import LinkState
from eventpump.errors import ClosedError, ConfigurationError, ConnectionLostError
from eventpump.eventhubs.events import EventPosition, ReceivedEvent
from eventpump.reports import (
    CheckpointWritten,
    DataLost,
    LinkRewound,
    LinkStateChanged,
    PartitionFailed,
    PumpClosed,
    PumpStarted,
    StartIgnored,
    SubscriptionSlow,
    SubscriptionWithoutProcessor,
)
from eventpump.storage.leases.memory import MemoryLeaseStore
from eventpump.testing.transport import FakeHub
from tests.support.fleet import NO_PROCESSOR, Fleet, Record, RecordingProcessor, stocked
from tests.support.leases import group
from tests.support.seeds import seeds

Events = Sequence[ReceivedEvent]


async def _nothing(context: PartitionContext, events: Events) -> None:
    pass


def _recording(record: Record, on_events: Callable[[PartitionContext, Events], Awaitable[None]] | None = None) -> Any:
    return RecordingProcessor(record, on_events=on_events)


def _kill(fleet: Fleet, name: str, dead: set[str]) -> None:
    """Make a host's store and transport deaf, as for one whose process was killed; `dead` names it to processors."""
    dead.add(name)
    for operation in (
        "ensure", "list", "acquire", "steal", "renew", "release", "read", "write", "reset", "scope", "record",
        "subscriptions", "subscribe", "unsubscribe",
    ):  # fmt: skip
        fleet.stores[name].hang(operation)
    transport = fleet.transports[name]
    transport.is_closed = True
    transport.lose(ConnectionLostError("killed"))


# ------------------------------------------------------------------------------------------------------- the promise


async def test_each_subscription_gets_every_event_over_one_link() -> None:
    """Subscribed before the host runs and while it runs: all get what was published since, over one link."""
    alerts, archive = Record(), Record()
    async with stocked(partitions=2) as fleet:
        host = fleet.host("a")
        await host.subscribe("alerts", _recording(alerts))
        for partition_id in "01":
            fleet.hub.publish(partition_id, count=10)
        fleet.runs["a"] = asyncio.create_task(host.run())
        await asyncio.sleep(5)
        await host.subscribe("archive", _recording(archive))
        await asyncio.sleep(1)
        for partition_id in "01":
            fleet.hub.publish(partition_id, count=10)
        await asyncio.sleep(5)
        for partition_id in "01":
            assert fleet.record.numbers(partition_id) == alerts.numbers(partition_id) == list(range(20))
            assert archive.numbers(partition_id) == list(range(10, 20))
        assert len(fleet.hub.attached) == 2
        assert [(each.partition_id, each.subscription) for each in host.partitions] == [
            (partition_id, name) for partition_id in "01" for name in ("default", "alerts", "archive")
        ]
        assert {each.subscription for each in fleet.reported("a", PumpStarted)} == {"default", "alerts", "archive"}
        assert {each.subscription for each in fleet.reported("a", CheckpointWritten)} == {
            "default",
            "alerts",
            "archive",
        }


async def test_what_was_published_after_subscribe_survives_kills_before_any_checkpoint() -> None:
    """Every host that had it is killed before the first checkpoint: the next one delivers everything."""
    dead: set[str] = set()
    got = Record()

    async def until_killed(context: PartitionContext, events: Events) -> None:
        if context.owner_id in dead:
            await asyncio.sleep(1e6)

    async with stocked(partitions=2) as fleet:
        fleet.hub.publish("0", count=7)
        for name in "abc":
            host = fleet.host(name, NO_PROCESSOR)
            await host.subscribe("alerts", _recording(got, until_killed))
            if name == "a":
                fleet.hub.publish("0", count=500)
                fleet.hub.publish("1", count=500)
            else:
                got.deliveries.clear()
            fleet.runs[name] = asyncio.create_task(host.run())
            await asyncio.sleep(60)
            assert got.numbers("0") == list(range(7, 507))
            assert got.numbers("1") == list(range(500))
            _kill(fleet, name, dead)


async def test_checkpoint_of_a_subscription_is_gone_on_from() -> None:
    """Another host goes on after the checkpoint of each subscription, whatever the others have."""
    first, second = Record(), Record()
    async with stocked() as fleet:
        host = fleet.host("a")
        await host.subscribe("alerts", _recording(first))
        fleet.hub.publish("0", count=10)
        fleet.runs["a"] = asyncio.create_task(host.run())
        await asyncio.sleep(5)
        await host.aclose()
        fleet.hub.publish("0", count=10)
        other = fleet.host("b", NO_PROCESSOR)
        await other.subscribe("alerts", _recording(second))
        fleet.runs["b"] = asyncio.create_task(other.run())
        await asyncio.sleep(15)
        assert first.numbers("0") == list(range(10))
        assert second.numbers("0") == list(range(10, 20))
        assert fleet.checkpoint("0") == 9


# ---------------------------------------------------------------------------------------------------------- the past


async def test_one_that_needs_the_past_has_the_link_opened_again() -> None:
    """With catch_up="shared": it gets the past, and the other neither misses nor repeats an event."""
    archive = Record()
    async with stocked() as fleet:
        fleet.hub.publish("0", count=5000)
        host = await fleet.start("a")
        await asyncio.sleep(5)
        await host.subscribe("archive", _recording(archive), start="earliest", catch_up="shared")
        fleet.hub.publish("0", count=100)
        await asyncio.sleep(5)
        assert fleet.record.numbers("0") == archive.numbers("0") == list(range(5100))
        assert len(fleet.hub.attached) == 2
        (rewound,) = fleet.reported("a", LinkRewound)
        assert (rewound.subscription, rewound.sequence_number) == ("archive", 0)


@pytest.mark.parametrize("catch_up", [None, "shared"])
async def test_one_that_begins_in_the_cache_needs_no_other_link(catch_up: Any) -> None:
    """A subscription that begins at the end, while others read, reads on from the cache of the link that there is."""
    got = Record()
    async with stocked() as fleet:
        fleet.hub.publish("0", count=50)
        host = await fleet.start("a")
        await asyncio.sleep(5)
        await host.subscribe("alerts", _recording(got), catch_up=catch_up)
        await asyncio.sleep(1)
        fleet.hub.publish("0", count=50)
        await asyncio.sleep(1)
        assert got.numbers("0") == list(range(50, 100))
        assert len(fleet.hub.attached) == 1


async def test_starts_of_every_kind_are_found(clock: Any) -> None:
    """Times, offsets, numbers and their mixture over one link: each begins at its own event."""
    records = {name: Record() for name in ("time", "offset", "number", "mapped", "future")}
    async with stocked(partitions=2) as fleet:
        for partition_id in "01":
            fleet.hub.publish(partition_id, count=100)
        await asyncio.sleep(1000)
        for partition_id in "01":
            fleet.hub.publish(partition_id, count=100)
        events = fleet.hub.events("0")
        host = fleet.host("a", NO_PROCESSOR)
        starts: dict[str, Any] = {
            "time": events[100].enqueued_time - timedelta(seconds=10),
            "offset": events[150].offset,
            "number": 120,
            "mapped": {"0": EventPosition.at_sequence_number(190, inclusive=True)},
            "future": events[199].enqueued_time + timedelta(days=10_000),
        }
        for name, start in starts.items():
            await host.subscribe(name, _recording(records[name]), start=start, catch_up="shared")
        fleet.runs["a"] = asyncio.create_task(host.run())
        await asyncio.sleep(30)
        for partition_id in "01":
            fleet.hub.publish(partition_id, count=10)
        await asyncio.sleep(10)
        firsts = {name: (record.numbers("0")[0], record.numbers("1")[0]) for name, record in records.items()}
        assert firsts == {"time": (100, 100), "offset": (151, 151), "number": (121, 121), "mapped": (190, 0),
                          "future": (200, 200)}  # fmt: skip
        for name, record in records.items():
            for partition_id, first in zip("01", firsts[name], strict=True):
                assert record.numbers(partition_id) == list(range(first, 210)), (name, partition_id)


async def test_time_beside_a_partition_that_is_being_read() -> None:
    """A start whose number is not known is found out while the shared link is closed; no event is missed."""
    got = Record()
    async with stocked() as fleet:
        fleet.hub.publish("0", count=100)
        await asyncio.sleep(100)
        moment = fleet.hub.now() - timedelta(seconds=1)
        fleet.hub.publish("0", count=100)
        host = await fleet.start("a")
        await asyncio.sleep(5)
        await host.subscribe("alerts", _recording(got), start=moment, catch_up="shared")
        fleet.hub.publish("0", count=100)
        await asyncio.sleep(15)
        assert fleet.record.numbers("0") == list(range(300))
        assert got.numbers("0") == list(range(100, 300))


@pytest.mark.parametrize("ahead", [-50.0, 50.0])
async def test_beside_a_host_that_begins_at_a_time(ahead: float) -> None:
    """The host's own start is a time, and nothing has come yet: who joins then misses nothing, nor does the host."""
    got = Record()
    async with stocked() as fleet:
        fleet.hub.publish("0", count=10)
        await asyncio.sleep(100)
        host = await fleet.start("a", initial_position=fleet.hub.now() + timedelta(seconds=ahead))
        await asyncio.sleep(5)
        await host.subscribe("alerts", _recording(got), start=4, catch_up="shared")
        await asyncio.sleep(100)
        fleet.hub.publish("0", count=10)
        await asyncio.sleep(15)
        assert got.numbers("0") == list(range(5, 20))
        assert fleet.record.numbers("0") == list(range(10, 20))


async def test_closing_does_not_wait_for_a_number_that_is_being_found_out() -> None:
    """A link that brings no first event keeps neither a leaving subscription nor the host."""
    async with stocked() as fleet:
        fleet.hub.publish("0", count=100)
        await asyncio.sleep(10)
        host = await fleet.start("a")
        await asyncio.sleep(5)
        fleet.hub.stall("0")
        start = fleet.hub.events("0")[50].enqueued_time - timedelta(seconds=1)
        await host.subscribe("alerts", _recording(Record()), start=start, catch_up="shared")
        await asyncio.sleep(1)
        began = asyncio.get_running_loop().time()
        await host.unsubscribe("alerts")
        await host.aclose()
        assert asyncio.get_running_loop().time() - began < 1


async def test_partition_added_later_is_read_from_its_beginning() -> None:
    """Partitions that the hub gets after the subscription was made begin at their beginning."""
    got = Record()
    async with stocked() as fleet:
        host = fleet.host("a", NO_PROCESSOR)
        fleet.hub.publish("0", count=5)
        await host.subscribe("alerts", _recording(got))
        fleet.hub.add_partitions(1)
        fleet.hub.publish("1", count=5)
        fleet.runs["a"] = asyncio.create_task(host.run())
        await asyncio.sleep(15)
        assert got.numbers("0") == []
        assert got.numbers("1") == list(range(5))


@pytest.mark.parametrize("start", ["earliest", "-1", 5, timedelta(hours=-1), {"0": "earliest"}], ids=str)
async def test_past_must_be_asked_for(start: Any) -> None:
    """A start before the end raises by the arguments alone, unless they say how to come by the past."""
    async with stocked() as fleet:
        host = fleet.host("a")
        with pytest.raises(ConfigurationError, match="catch_up"):
            await host.subscribe("alerts", _recording(Record()), start=start)
        await host.subscribe("alerts", _recording(Record()), start=start, catch_up="shared")


@pytest.mark.parametrize("name", ["default", "", "a b", "a/b", "x" * 65, "ä"])
async def test_names_are_checked(name: str) -> None:
    """A name that cannot be one is refused."""
    async with stocked() as fleet:
        with pytest.raises(ConfigurationError, match="name"):
            await fleet.host("a").subscribe(name, _recording(Record()))


async def test_subscribing_twice_on_one_host_is_refused() -> None:
    """A name has one processor on a host; a closed host takes none."""
    async with stocked() as fleet:
        host = fleet.host("a")
        await host.subscribe("alerts", _recording(Record()))
        with pytest.raises(ConfigurationError, match="alerts"):
            await host.subscribe("alerts", _recording(Record()))
        with pytest.raises(ConfigurationError, match="partition 7"):
            await host.subscribe("other", _recording(Record()), start={"7": "latest"})
        await host.aclose()
        assert fleet.transports["a"].is_closed
        with pytest.raises(ClosedError):
            await host.subscribe("more", _recording(Record()))


# ------------------------------------------------------------------------------------------------------------- names


async def test_subscribe_is_adopted_by_other_hosts() -> None:
    """The first record counts for all; a host without a processor for a name reports it, once."""
    first, second = Record(), Record()
    async with stocked(partitions=2) as fleet:
        for partition_id in "01":
            fleet.hub.publish(partition_id, count=10)
        a = await fleet.start("a")
        await asyncio.sleep(5)
        await a.subscribe("alerts", _recording(first))
        b = await fleet.start("b", _recording(Record()))
        await asyncio.sleep(40)
        assert [each.subscription for each in fleet.reported("b", SubscriptionWithoutProcessor)] == ["alerts"]
        await b.subscribe("alerts", _recording(second), start="earliest", catch_up="shared")
        assert [each.subscription for each in fleet.reported("b", StartIgnored)] == ["alerts"]
        for partition_id in "01":
            fleet.hub.publish(partition_id, count=10)
        await asyncio.sleep(10)
        for partition_id in "01":
            assert sorted(first.numbers(partition_id) + second.numbers(partition_id)) == list(range(10, 20))
        assert fleet.reported("a", SubscriptionWithoutProcessor) == []


async def test_host_without_processors_takes_no_lease() -> None:
    """A host takes leases only while it has a processor for an active subscription, and gives them up after."""
    async with stocked() as fleet:
        host = await fleet.start("a", NO_PROCESSOR)
        await asyncio.sleep(60)
        assert fleet.owner("0") is None
        await host.subscribe("alerts", _recording(Record()))
        await asyncio.sleep(1)
        assert fleet.owner("0") == "a"
        await host.unsubscribe("alerts")
        await asyncio.sleep(1)
        assert fleet.owner("0") is None
        await asyncio.sleep(60)
        assert fleet.owner("0") is None


@pytest.mark.parametrize("keeps", [False, True])
async def test_unsubscribing_ends_it_everywhere(keeps: bool) -> None:
    """Its processors are closed on all hosts; subscribed again it starts over, or after its checkpoint if kept."""
    got: dict[str, Record] = {name: Record() for name in "ab"}
    async with stocked(partitions=2) as fleet:
        for name in "ab":
            host = await fleet.start(name, _recording(Record()))
            await host.subscribe("alerts", _recording(got[name]))
        await asyncio.sleep(40)
        for partition_id in "01":
            fleet.hub.publish(partition_id, count=10)
        await asyncio.sleep(5)
        await fleet.hosts["a"].unsubscribe("alerts", keep_checkpoint=keeps)
        await asyncio.sleep(11)
        for name in "ab":
            assert [reason for *_, reason in got[name].closed][-1] is CloseReason.SHUTDOWN
            assert {each.subscription for each in fleet.hosts[name].partitions} == {"default"}
            got[name].deliveries.clear()
        for partition_id in "01":
            fleet.hub.publish(partition_id, count=10)
        await asyncio.sleep(5)
        await fleet.hosts["a"].subscribe("alerts", _recording(got["a"]))
        await asyncio.sleep(11)
        for partition_id in "01":
            fleet.hub.publish(partition_id, count=10)
        await asyncio.sleep(11)
        for partition_id in "01":
            numbers = sorted(got["a"].numbers(partition_id) + got["b"].numbers(partition_id))
            assert numbers == list(range(10 if keeps else 20, 30))


async def test_subscribe_after_unsubscribe_has_other_checkpoints() -> None:
    """Ended and recreated between two listings: the pumps of other hosts go on under the new record, too."""
    got = Record()
    async with stocked(partitions=2) as fleet:
        for name in "ab":
            await (await fleet.start(name, NO_PROCESSOR)).subscribe("alerts", _recording(got))
        await asyncio.sleep(40)
        for partition_id in "01":
            fleet.hub.publish(partition_id, count=10)
        await asyncio.sleep(1)
        await fleet.hosts["a"].unsubscribe("alerts")
        await fleet.hosts["a"].subscribe("alerts", _recording(got))
        got.deliveries.clear()
        await asyncio.sleep(15)
        for partition_id in "01":
            fleet.hub.publish(partition_id, count=10)
        await asyncio.sleep(1)
        assert sorted(got.numbers("0")) == sorted(got.numbers("1")) == list(range(10, 20))
        (stored,) = await group(fleet.stores["a"]).list_subscriptions()
        checkpoints = fleet.leases.checkpoints(fleet.scope)
        assert {checkpoints[partition_id, stored.record.key].sequence_number for partition_id in "01"} == {19}


# -------------------------------------------------------------------------------------------------------------- pace


async def test_slow_one_holds_the_others_back_only_by_the_cache() -> None:
    """While the cache has room the fast one goes on; then it waits. Bounds are kept, and both get everything."""
    slow = Record()
    held: list[int] = []

    async def slowly(context: PartitionContext, events: Events) -> None:
        await asyncio.sleep(10)

    async with stocked() as fleet:
        host = await fleet.start("a", prefetch_events=200, max_batch_size=20, max_wait_time=5)
        await host.subscribe("archive", _recording(slow, slowly), slow_after=30)
        await asyncio.sleep(1)
        fleet.hub.publish("0", count=1000)
        await asyncio.sleep(5)
        assert 100 <= len(fleet.record.numbers("0")) <= 240
        for _ in range(600):
            held.append(next(each.held_events for each in host.partitions if each.subscription == "archive"))
            await asyncio.sleep(1)
        assert max(held) <= 200
        assert fleet.record.numbers("0") == slow.numbers("0") == list(range(1000))
        reports = fleet.reported("a", SubscriptionSlow)
        assert {each.subscription for each in reports} == {"archive"}
        assert reports[0].slow_for >= 30
        assert not any(each.is_suspended for each in reports)
        assert len(fleet.hub.attached) == 1


async def test_catch_up_group_keeps_other_subscriptions_from_waiting(clock: Any) -> None:
    """One that needs the past, or is slow, has a link of its own until it has caught up; the others keep their pace."""
    archive = Record()
    pause = [0.0]

    async def slowly(context: PartitionContext, events: Events) -> None:
        await asyncio.sleep(pause[0])

    async with Fleet(FakeHub(partitions=1, consumer_groups=("$Default", "second"))) as fleet:
        fleet.hub.publish("0", count=5000)
        host = await fleet.start("a", prefetch_events=200, max_batch_size=20)
        await asyncio.sleep(5)
        with pytest.raises(ConfigurationError, match="catch_up_group"):
            await host.subscribe("archive", _recording(archive), catch_up_group="$default")
        await host.subscribe(
            "archive", _recording(archive, slowly), start="earliest", catch_up_group="second", slow_after=10
        )
        await asyncio.sleep(5)
        assert archive.numbers("0") == fleet.record.numbers("0") == list(range(5000))
        assert [each.state for each in fleet.reported("a", LinkStateChanged)] == [LinkState.OWN, LinkState.SHARED]
        assert fleet.reported("a", LinkRewound) == []
        pause[0] = 5
        fleet.hub.publish("0", count=2000)
        await asyncio.sleep(30)
        assert fleet.record.numbers("0") == list(range(7000))
        assert [each.link_state for each in host.partitions] == [LinkState.SHARED, LinkState.OWN]
        await asyncio.sleep(600)
        assert archive.numbers("0") == list(range(7000))
        fleet.hub.publish("0", count=10)
        await asyncio.sleep(30)
        assert archive.numbers("0") == fleet.record.numbers("0") == list(range(7010))
        assert {each.link_state for each in host.partitions} == {LinkState.SHARED}


async def test_slow_one_is_suspended_and_resumed() -> None:
    """With on_slow="suspend" the others go on without it, and it continues at its checkpoint when asked to."""
    slow = Record()
    sleep = [1e6]

    async def slowly(context: PartitionContext, events: Events) -> None:
        await asyncio.sleep(sleep[0])
        await context.checkpoint()

    async with stocked() as fleet:
        host = await fleet.start("a", prefetch_events=200, max_batch_size=20, close_timeout=10)
        await host.subscribe("archive", _recording(slow, slowly), slow_after=30, on_slow="suspend")
        await asyncio.sleep(1)
        fleet.hub.publish("0", count=1000)
        await asyncio.sleep(60)
        assert fleet.record.numbers("0") == list(range(1000))
        (report,) = fleet.reported("a", SubscriptionSlow)
        assert report.is_suspended
        assert _link_states(host) == {"default": LinkState.SHARED, "archive": LinkState.SUSPENDED}
        sleep[0] = 0
        slow.deliveries.clear()
        host.resume("archive")
        await asyncio.sleep(20)
        assert slow.numbers("0") == list(range(1000))
        assert fleet.record.numbers("0") == list(range(1000))


@pytest.mark.parametrize("after", [0, 0.3, 5, 9, 12])
async def test_resume_soon_after_a_suspension_delivers_at_once(after: float) -> None:
    """Also while the handler that was too slow still ends."""
    slow = Record()
    sleep = [1e6]

    async def slowly(context: PartitionContext, events: Events) -> None:
        await asyncio.sleep(sleep[0])
        await context.checkpoint()

    async with stocked() as fleet:
        host = await fleet.start("a", prefetch_events=200, max_batch_size=20, close_timeout=2)
        await host.subscribe("archive", _recording(slow, slowly), slow_after=30, on_slow="suspend")
        await asyncio.sleep(1)
        fleet.hub.publish("0", count=1000)
        await fleet.until(lambda: bool(fleet.reported("a", SubscriptionSlow)), within=60)
        await asyncio.sleep(after)
        sleep[0] = 0
        slow.deliveries.clear()
        assert host.resume("archive") == ("0",)
        took = await fleet.until(lambda: bool(slow.deliveries), within=60)
        assert took < 1 + max(0, 3 - after)


async def test_subscription_that_fails_ends_alone(clock: Any) -> None:
    """One whose events are lost, and that is to fail over it, is left and tried again; the others go on."""
    got = Record()
    async with stocked() as fleet:
        fleet.hub.publish("0", count=100)
        host = fleet.host("a")
        await host.subscribe(
            "alerts",
            _recording(got),
            start=EventPosition.at_sequence_number(10),
            catch_up="shared",
            on_data_loss="fail",
        )
        fleet.hub.truncate("0", 50)
        fleet.runs["a"] = asyncio.create_task(host.run())
        await asyncio.sleep(20)
        fleet.hub.publish("0", count=100)
        await asyncio.sleep(5)
        assert fleet.record.numbers("0") == list(range(50, 200))
        (failed,) = fleet.reported("a", PartitionFailed)
        assert (failed.partition_id, failed.subscription, failed.avoided_for) == ("0", "alerts", 30)
        assert fleet.owned("a") == {"0"}
        await asyncio.sleep(40)
        assert len(fleet.reported("a", PartitionFailed)) == 2
        assert [each.epoch for each in host.partitions] == [1]
        assert got.numbers("0") == []


async def test_options_are_of_the_subscription() -> None:
    """Batch size and checkpoint policy of a subscription are its own."""
    got = Record()
    async with stocked() as fleet:
        host = await fleet.start("a", _recording(fleet.record, _nothing), max_batch_size=100)
        policy = CheckpointPolicy(every_events=5)
        await host.subscribe("alerts", _recording(got, _nothing), max_batch_size=5, checkpoint_policy=policy)
        await asyncio.sleep(1)
        fleet.hub.publish("0", count=100)
        await asyncio.sleep(1)
        assert {len(each.numbers) for each in got.deliveries} == {5}
        assert max(len(each.numbers) for each in fleet.record.deliveries) > 5
        assert {each.subscription for each in fleet.reported("a", CheckpointWritten)} == {"alerts"}
        assert fleet.checkpoint("0") is None


# ------------------------------------------------------------------------------------------------- hub made again


@pytest.mark.parametrize("action", ["earliest", "latest", None])
async def test_hub_that_is_recreated(action: Any) -> None:
    """The record is replaced as a whole, as `on_data_loss` says; by default the subscription fails, and only it."""
    got = Record()
    async with stocked(partitions=2) as fleet:
        host = await fleet.start("a", on_data_loss="earliest")
        await host.subscribe("alerts", _recording(got), on_data_loss=action or "fail")
        await asyncio.sleep(5)
        for partition_id in "01":
            fleet.hub.publish(partition_id, count=10)
        await asyncio.sleep(5)
        assert got.numbers("0") == list(range(10))
        got.deliveries.clear()
        fleet.record.deliveries.clear()
        fleet.hub.recreate()
        for partition_id in "01":
            fleet.hub.publish(partition_id, count=5)
        await asyncio.sleep(60)
        for partition_id in "01":
            fleet.hub.publish(partition_id, count=5)
        await asyncio.sleep(60)
        for partition_id in "01":
            assert fleet.record.numbers(partition_id) == list(range(10))
            numbers = got.numbers(partition_id)
            assert numbers == ([] if action is None else list(range(0 if action == "earliest" else 5, 10)))
        assert any(each.subscription == "alerts" for each in fleet.reported("a", DataLost))


@pytest.mark.parametrize("is_after", [True, False], ids=["answer lost", "not stored"])
async def test_hub_that_is_recreated_while_the_store_fails_is_reported_once(is_after: bool) -> None:
    """A record that replaces the one of an earlier hub is this host's own, though the answer to its write is lost."""
    async with stocked(partitions=2) as fleet:
        host = await fleet.start("a", on_data_loss="earliest")
        await host.subscribe("alerts", _recording(Record()), on_data_loss="earliest")
        await asyncio.sleep(5)
        fleet.stores["a"].fail("subscribe", times=2, is_after=is_after)
        fleet.hub.recreate()
        await asyncio.sleep(60)
        assert len([each for each in fleet.reported("a", DataLost) if each.subscription == "alerts"]) == 1


# --------------------------------------------------------------------------------------------------- random histories


@seeds(4, of=12)
async def test_subscribe_under_random_faults_delivers_everything(seed: int) -> None:
    """Hosts are killed and join, links are cut, handlers are slow and raise, subscriptions come and go.

    Each subscription gets every event published after its `subscribe` returned, at least once, and in order per
    partition and epoch, with nothing skipped; and the cache keeps its bounds.
    """
    rng = random.Random(seed)
    dead: set[str] = set()
    records: dict[str, Record] = {"default": Record(), "alerts": Record(), "archive": Record(), "audit": Record()}
    owed: dict[str, dict[str, int]] = {"default": {}}
    past = {"catch_up": "shared"} if seed % 2 else {"catch_up_group": "second", "slow_after": 5}
    starts: dict[str, Any] = {"alerts": {}, "archive": {"start": "earliest", **past}, "audit": {}}

    def processor(name: str, record: Record) -> RecordingProcessor:
        async def handle(context: PartitionContext, events: Events) -> None:
            assert context.subscription == name
            if context.owner_id in dead:
                await asyncio.sleep(1e6)
            await asyncio.sleep(rng.choice([0, 0, 0, 0.1, 5 if name == "archive" else 0.5]))
            if rng.random() < 0.05:
                raise rng.choice([ValueError("sometimes"), GeneratorExit("odd"), asyncio.CancelledError("odd")])
            if rng.random() < 0.5:
                await context.checkpoint()

        class Mortal(RecordingProcessor):
            async def process_events(self, context: PartitionContext, events: Events) -> None:
                if context.owner_id in dead:
                    await asyncio.sleep(1e6)
                await super().process_events(context, events)

        return Mortal(record, on_events=handle)

    groups = ("$Default", "second")
    hub = FakeHub(partitions=3, consumer_groups=groups, latency=rng.choice([0.0, 0.05]))
    async with Fleet(hub, seed=seed) as fleet:
        running: list[str] = []
        bounds: dict[str, int] = {}

        async def start(name: str) -> None:
            max_batch_size, bounds[name] = rng.choice([1, 7, 300]), rng.choice([20, 100, 3000])
            await fleet.start(
                name,
                processor("default", records["default"]),
                checkpoint_policy=CheckpointPolicy(every_events=50),
                max_batch_size=max_batch_size,
                prefetch_events=bounds[name],
            )
            running.append(name)
            for each in list(owed):
                if each != "default":
                    await fleet.hosts[name].subscribe(each, processor(each, records[each]), **starts[each])

        await start("first")
        owed["default"] = dict.fromkeys(fleet.hub.partition_ids, 0)
        for turn in range(60):
            match rng.randrange(10):
                case 0 if len(running) < 4:
                    await start(f"host-{turn}")
                case 1 if len(running) > 1:
                    _kill(fleet, running.pop(rng.randrange(len(running))), dead)
                case 2 if len(running) > 1:
                    await fleet.hosts[running.pop(rng.randrange(len(running)))].aclose(deadline=rng.choice([0, 1, 10]))
                case 3:
                    fleet.hub.detach(rng.choice(fleet.hub.partition_ids), ConnectionLostError("cut"))
                case 4 | 5 if missing := [each for each in starts if each not in owed]:
                    name = rng.choice(missing)
                    for each in running:
                        await fleet.hosts[each].subscribe(name, processor(name, records[name]), **starts[name])
                        if name not in owed:
                            is_past = "start" in starts[name]
                            owed[name] = {
                                each: 0 if is_past else len(fleet.hub.events(each)) for each in fleet.hub.partition_ids
                            }
                case 6 if "audit" in owed and rng.random() < 0.5:
                    await fleet.hosts[rng.choice(running)].unsubscribe("audit")
                    del owed["audit"]
                    for each in running:
                        await fleet.hosts[each].unsubscribe("audit")
                    await asyncio.sleep(30)
                    records["audit"].deliveries.clear()
                case _:
                    for partition_id in fleet.hub.partition_ids:
                        fleet.hub.publish(partition_id, count=rng.randrange(60))
            for name in running:
                # No subscription holds more than the cache of a link may.
                assert all(each.held_events <= bounds[name] for each in fleet.hosts[name].partitions)
                _check_link_states(fleet, name)
            await asyncio.sleep(rng.uniform(0, 12))
        await start("last")
        wanted = {
            (name, partition_id): set(range(first, len(fleet.hub.events(partition_id))))
            for name, of in owed.items()
            for partition_id, first in of.items()
        }
        await fleet.until(
            lambda: all(set(records[name].numbers(each)) >= numbers for (name, each), numbers in wanted.items()),
            7200,
            step=10,
        )
        for name in owed:
            _check_order(name, records[name], owed[name])


def _check_link_states(fleet: Fleet, name: str) -> None:
    """No change of what a subscription reads over was missed: the state reported last is the present one."""
    reported: dict[tuple[str | None, str | None], LinkState] = {}
    for report in fleet.reports[name]:
        if isinstance(report, LinkStateChanged):
            reported[report.partition_id, report.subscription] = report.state
        elif isinstance(report, PumpStarted):
            reported.setdefault((report.partition_id, report.subscription), LinkState.SHARED)
        elif isinstance(report, PumpClosed):
            ended = report.partition_id, report.subscription
            if reported.get(ended) not in {LinkState.PAUSED, LinkState.SUSPENDED}:  # which outlast the pump
                reported.pop(ended, None)
    for each in fleet.hosts[name].partitions:
        if each.epoch is not None and each.link_state is not LinkState.OPENING:
            assert reported[each.partition_id, each.subscription] is each.link_state


def _link_states(host: HubHost) -> dict[str, LinkState]:
    return {each.subscription: each.link_state for each in host.partitions}


def _check_order(name: str, record: Record, first: dict[str, int]) -> None:
    """Within an epoch each delivery follows on the one before, or repeats it; and no number is skipped."""
    after: dict[tuple[str, int], int] = {}
    for delivery in record.deliveries:
        numbers = delivery.numbers
        assert list(numbers) == list(range(numbers[0], numbers[-1] + 1))
        key = (delivery.partition_id, delivery.owner_level)
        expected = after.get(key)
        assert expected is None or numbers[0] <= expected, f"{name} skipped {expected} to {numbers[0]} in {key}"
        assert numbers[0] >= first[delivery.partition_id]
        after[key] = numbers[-1] + 1


async def test_record_replaced_while_a_checkpoint_is_read_is_not_mixed_with_it() -> None:
    """A partition whose checkpoint was read under the former record begins as the new record says, in order."""
    got = Record()
    async with stocked(partitions=2) as fleet:
        host = await fleet.start("a", on_data_loss="earliest")
        await host.subscribe("alerts", _recording(got), on_data_loss="earliest")
        await asyncio.sleep(5)
        for partition_id in "01":
            fleet.hub.publish(partition_id, count=10)
        await asyncio.sleep(5)
        got.deliveries.clear()
        fleet.stores["a"].delay(2.0, "read", "0")
        fleet.hub.recreate()
        for partition_id in "01":
            fleet.hub.publish(partition_id, count=30)
        await asyncio.sleep(60)
        for partition_id in "01":
            delivered = [each for d in got.deliveries if d.partition_id == partition_id for each in d.numbers]
            assert delivered == list(range(30))


@pytest.mark.parametrize("how", ["recreated", "moved"])
async def test_suspension_ends_with_the_subscription_and_with_the_lease(how: str) -> None:
    """One that is recreated is not suspended, nor one whose partition was given up and taken again."""
    slow = Record()
    free = asyncio.Event()

    async def handle(context: PartitionContext, events: Events) -> None:
        await free.wait()

    async with stocked() as fleet:
        host = await fleet.start("a", prefetch_events=100, max_batch_size=10)
        await host.subscribe("slow", _recording(slow, handle), on_slow="suspend", slow_after=10)
        await asyncio.sleep(5)
        for _ in range(60):
            fleet.hub.publish("0", count=20)
            await asyncio.sleep(1)
        await asyncio.sleep(60)
        assert _link_states(host) == {"default": LinkState.SHARED, "slow": LinkState.SUSPENDED}
        free.set()
        if how == "recreated":
            await host.unsubscribe("slow")
            await asyncio.sleep(30)
            await host.subscribe("slow", _recording(slow, handle))
        else:
            thief = MemoryLeaseStore(fleet.leases)
            await thief.open(fleet.scope)
            lease = await thief.acquire((await thief.list())[0], "thief", held=True)
            assert lease is not None
            await asyncio.sleep(30)
            assert host.partitions == []
            await thief.release(lease)
        await asyncio.sleep(60)
        last = len(fleet.hub.events("0"))
        fleet.hub.publish("0", count=20)
        await asyncio.sleep(60)
        assert slow.numbers("0")[-20:] == list(range(last, last + 20))
        assert [each.subscription for each in host.partitions] == ["default", "slow"]
