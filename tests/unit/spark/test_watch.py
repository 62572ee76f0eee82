"""New events are seen at once by links, and by requests in their turn where there is no link."""

from __future__ import annotations

import asyncio
import logging
import math
import random
from contextlib import suppress
from itertools import pairwise

import pytest

from eventpump.errors import (
    ConfigurationError,
    ConnectionLostError,
    EntityNotFoundError,
    LinkDetachedError,
    ServiceBusyError,
    ServiceTimeoutError,
)
from eventpump.eventhubs.events import EventPosition
from eventpump.interfaces import ReceiveLinkSpec
from eventpump.spark.source.known_hubs import REQUESTS_PER_SECOND, ROUND
from eventpump.spark.source.options import SourceOptions
from eventpump.spark.source.watch import (
    AWAY_SECONDS,
    CHECK_SECONDS,
    FOLLOWED,
    GATHER,
    REFUSED_SECONDS,
    SETTLE_SECONDS,
    HubsWatch,
)
from eventpump.testing.transport import FakeHub, FakeTransport
from tests.support.connecting import connection_string_to
from tests.support.seeds import seeds

STRING = connection_string_to("ns.servicebus.windows.net", hub="telemetry")
GROUPS = ("$Default", "watch")


def watch_of(hub: FakeHub, **given: str) -> HubsWatch:
    options = SourceOptions.from_options({"connectionString": STRING, "watchConsumerGroup": "watch", **given})
    transport = FakeTransport(hub)
    return HubsWatch(lambda: transport, [options.for_stream()])


def latest(watch: HubsWatch) -> dict[str, int]:
    """Return the number after the last event that is known, per partition."""
    return {each: bounds.latest for each, bounds in watch.snapshots["telemetry"].bounds.items()}


def now() -> float:
    return asyncio.get_running_loop().time()


class Reader:
    """A reader of a query."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    def messages(self, batch: list[bytes]) -> None:
        """Events come."""

    def detached(self, error: Exception) -> None:
        """The link ended."""
        self.error = error


async def read(hub: FakeHub, group: str, owner_level: int | None) -> Reader:
    reader = Reader()
    spec = ReceiveLinkSpec(hub.name, group, "0", EventPosition.earliest(), owner_level=owner_level)
    await FakeTransport(hub).open_receive_link(spec, reader)
    return reader


@pytest.fixture
def hub() -> FakeHub:
    """A hub of 128 partitions, with a group for the watch."""
    return FakeHub(partitions=128, consumer_groups=GROUPS)


async def test_watched_event_ends_the_wait_at_once(hub: FakeHub) -> None:
    """Of 128 partitions, far from its turn to be asked for: its end is known, and that of those published with it."""
    watch = watch_of(hub)
    await watch.refresh()
    for _ in range(8):
        await watch.until_news({0: latest(watch)})
    waiting = asyncio.create_task(watch.until_news({0: latest(watch)}))
    await asyncio.sleep(0.2)
    assert not waiting.done()
    began, looks = now(), len(hub.looks)
    hub.publish("90", b"a", b"b", b"c")
    hub.publish("17", b"d")
    await waiting
    assert now() - began == pytest.approx(GATHER, abs=0.001)
    assert len(hub.looks) == looks
    assert {each: end for each, end in latest(watch).items() if end} == {"17": 1, "90": 3}
    await watch.aclose()
    assert not any(map(hub.credit, hub.partition_ids))


async def test_refresh_behind_waits_for_no_partition(hub: FakeHub) -> None:
    """It returns at once, while a round of requests goes on, of which there is one at a time; the next call that makes
    requests waits for it, and then all is known."""
    watch = watch_of(hub)
    await watch.refresh()
    await asyncio.sleep(1.0)
    hub.latency = 0.7
    hub.publish("60", b"x")
    watch.planned()
    began, looked = now(), len(hub.looks)
    for _ in range(3):
        await watch.refresh_behind()
    assert (now(), latest(watch)["60"]) == (began, 0)
    await watch.refresh()
    assert (latest(watch)["60"], now()) == (1, began + 0.7)
    asked = [each for each, _ in hub.looks[looked:]]
    assert len(asked) == len(set(asked)) == REQUESTS_PER_SECOND
    await watch.aclose()


async def test_refresh_behind_waits_for_the_hub_now_and_then() -> None:
    """If that was not done for five seconds: a hub that was recreated meanwhile is known before the next batch."""
    hub = FakeHub(partitions=2, consumer_groups=GROUPS, latency=0.1)
    watch = watch_of(hub)
    await watch.refresh()
    await asyncio.sleep(1.0)
    hub.publish("0", count=7)
    watch.planned()
    await watch.refresh()
    assert latest(watch)["0"] == 7
    created_at = watch.snapshots["telemetry"].created_at
    await asyncio.sleep(1.0)
    await watch.refresh_behind()
    await asyncio.sleep(1.0)  # its round is over, and without news the next call begins none
    hub.recreate()
    await watch.refresh_behind()
    assert (watch.snapshots["telemetry"].created_at, latest(watch)["0"]) == (created_at, 7)
    await asyncio.sleep(AWAY_SECONDS)
    await watch.refresh_behind()
    assert watch.snapshots["telemetry"].created_at != created_at
    assert latest(watch) == {"0": 0, "1": 0}
    await watch.aclose()


async def test_error_behind_a_batch_is_raised_by_the_next_call() -> None:
    """And by none after it; the query that has ended meanwhile gets none."""
    hub = FakeHub(partitions=2, consumer_groups=GROUPS)
    watch = watch_of(hub, retryTimeout="1")
    for ends_meanwhile in (False, True):
        await watch.refresh()
        await asyncio.sleep(1.0)
        watch.planned()
        hub.refuse(ServiceBusyError("busy"), operation="partition", times=math.inf)
        await watch.refresh_behind()
        await asyncio.sleep(60.0)
        hub.accept()
        if not ends_meanwhile:
            with pytest.raises(ServiceTimeoutError, match="the last failure: busy"):
                await watch.refresh()
    await watch.aclose()


async def test_watched_partitions_are_only_those_that_are_drained(hub: FakeHub) -> None:
    """One link each with credit for one event, without an owner level, in the group of the watch; none elsewhere."""
    hub.publish("1", count=3)
    watch = watch_of(hub)
    await watch.refresh()
    await watch.until_news({0: {"0": 0, "1": 3}})
    assert [spec.partition_id for spec in hub.attached] == ["0", "1"]
    assert {(spec.consumer_group, spec.owner_level) for spec in hub.attached} == {("watch", None)}
    assert (hub.credit("0"), hub.credit("1"), hub.credit("2")) == ([1], [1], [])
    await watch.aclose()


async def test_watched_link_is_used_for_the_next_event_as_well(hub: FakeHub) -> None:
    """It goes on with another credit after an event that is the newest; after more of them, a new link is opened."""
    watch = watch_of(hub)
    await watch.refresh()
    for count, links in ((1, 1), (1, 1), (3, 1), (1, 2), (1, 2)):
        before = latest(watch)["7"]
        watch.watch({0: {"7": before}})
        await asyncio.sleep(0.01)
        hub.publish("7", count=count)
        await asyncio.sleep(0.01)
        assert latest(watch)["7"] == before + count
        assert len(hub.attached) == links
        assert hub.credit("7") == [1 if count == 1 else 0]
    await watch.aclose()


async def test_watched_events_that_come_one_by_one_are_seen_between_calls(hub: FakeHub) -> None:
    """While Spark works on a batch, a link shows each event that is the newest, without a request; but not a stream."""
    watch = watch_of(hub)
    await watch.refresh()
    watch.watch({0: latest(watch)})
    await asyncio.sleep(1.0)
    looked = len(hub.looks)
    for number in range(FOLLOWED + 5):
        assert latest(watch)["7"] == min(number, FOLLOWED + 1)
        hub.publish("7", b"x")
        await asyncio.sleep(0.05)
    assert (len(hub.looks), hub.credit("7"), len(hub.attached)) == (looked, [0], 128)
    hub.publish("90", count=3)
    await asyncio.sleep(0.05)
    hub.publish("90", b"x")
    await asyncio.sleep(0.05)
    assert (latest(watch)["90"], hub.credit("90")) == (3, [0])
    hub.publish("17", count=FOLLOWED + 2)
    await asyncio.sleep(0.05)
    watch.watch({0: latest(watch)}, skips_busy=True)
    await asyncio.sleep(0.05)
    assert (hub.credit("7"), hub.credit("90"), hub.credit("17"), len(hub.attached)) == ([0], [1], [0], 129)
    await watch.aclose()


async def test_watched_partitions_are_not_asked_for() -> None:
    """A partition whose next event a link waits for needs no request, for a time; any other is asked for at once."""
    hub = FakeHub(partitions=4, consumer_groups=GROUPS)
    watch = watch_of(hub)
    await watch.refresh()
    watch.watch({0: latest(watch)})
    await asyncio.sleep(1.0)
    looked = len(hub.looks)
    hub.publish("1", b"x")
    hub.publish("2", count=2)
    await asyncio.sleep(0.5)
    hub.publish("2", b"x")
    await watch.refresh()
    assert [each for each, _ in hub.looks[looked:]] == ["2"]
    assert latest(watch) == {"0": 0, "1": 1, "2": 3, "3": 0}
    hub.refuse(LinkDetachedError("away"), partition_id="3", times=float("inf"))
    hub.detach("3", LinkDetachedError("moved"))
    await asyncio.sleep(0.5)
    looked = len(hub.looks)
    for _ in range(2):
        await watch.until_news({0: latest(watch)})
    assert "3" in [each for each, _ in hub.looks[looked:]]
    await watch.aclose()


async def idle_looks(watch: HubsWatch, hub: FakeHub, seconds: float) -> float:
    """Return the requests a second for partitions, of a query that has nothing to read for a time."""
    looked, began = len(hub.looks), now()
    while now() < began + seconds:
        asked_at = now()
        await watch.refresh()
        while not watch.is_known_since(asked_at):
            await watch.until_news({0: latest(watch)})
    return (len(hub.looks) - looked) / (now() - began)


@pytest.mark.parametrize("partitions", [4, 32, 128])
async def test_idle_query_with_links_makes_a_request_in_five_seconds(partitions: int) -> None:
    """However many partitions. That nothing is new is said within four seconds; each partition and hub has its turn
    all the same; and a new event is seen at once."""
    hub = FakeHub(partitions=partitions, consumer_groups=GROUPS)
    hub.latency = 0.01
    watch = watch_of(hub)
    await watch.refresh()
    await idle_looks(watch, hub, 10.0)
    assert await idle_looks(watch, hub, 1000.0) <= 1 / CHECK_SECONDS
    asked_at = now()
    await watch.refresh()
    while not watch.is_known_since(asked_at):
        await watch.until_news({0: latest(watch)})
    assert now() - asked_at <= 2 * SETTLE_SECONDS
    looked = len(hub.looks)
    await idle_looks(watch, hub, 2 * CHECK_SECONDS * (partitions + 1) + 1.0)
    assert {each for each, _ in hub.looks[looked:]} == set(hub.partition_ids)
    waiting = asyncio.create_task(watch.until_news({0: latest(watch)}))
    await asyncio.sleep(0.05)
    began = now()
    hub.publish("3", b"x")
    await waiting
    assert (now() - began <= GATHER + 0.011, latest(watch)["3"]) == (True, 1)
    await watch.aclose()


async def test_new_partition_is_found_while_links_watch_the_others() -> None:
    """The hub's own properties are asked for in every second turn."""
    hub = FakeHub(partitions=32, consumer_groups=GROUPS, latency=0.01)
    watch = watch_of(hub)
    await watch.refresh()
    await idle_looks(watch, hub, 60.0)
    hub.add_partitions(1)
    hub.publish("32", b"x")
    began = now()
    while latest(watch).get("32") != 1:
        await watch.until_news({0: latest(watch)})
    assert now() - began <= 3 * CHECK_SECONDS
    await watch.aclose()


async def test_event_that_a_link_does_not_show_is_found_by_requests() -> None:
    """A link that is there and shows nothing, as one whose peer is gone without a word."""
    hub = FakeHub(partitions=3, consumer_groups=GROUPS, latency=0.01)
    watch = watch_of(hub)
    await watch.refresh()
    await idle_looks(watch, hub, 60.0)
    hub.stall("1")
    hub.publish("1", b"x")
    began = now()
    while latest(watch)["1"] != 1:
        await watch.until_news({0: latest(watch)})
    assert now() - began <= 2 * CHECK_SECONDS * 4
    await watch.aclose()


@pytest.mark.parametrize(("partitions", "recent", "idle"), [(4, 0.3, 3.0), (32, 2.0, 18.0)])
async def test_idle_query_without_links_makes_a_request_a_second(partitions: int, recent: float, idle: float) -> None:
    """Ten a second within ten seconds of an event; and half of the events are seen within these times."""
    rng = random.Random(partitions)
    hub = FakeHub(partitions=partitions)
    hub.latency = 0.01
    options = SourceOptions.from_options({"connectionString": STRING}).for_stream()
    transport = FakeTransport(hub)
    watch = HubsWatch(lambda: transport, [options])
    await watch.refresh()
    assert await idle_looks(watch, hub, 5.0) <= 12.0
    await idle_looks(watch, hub, 10.0)
    assert await idle_looks(watch, hub, 500.0) <= 1.0
    for pause, most, count in ((4.0, recent, 100), (40.0, idle, 80)):
        delays = []
        for _ in range(count):
            read = latest(watch)
            partition_id = rng.choice(hub.partition_ids)
            asyncio.get_running_loop().call_later(at := rng.uniform(0.5, 1.0) * pause, hub.publish, partition_id, b"x")
            began = now()
            while latest(watch) == read:
                await watch.refresh()
                await watch.until_news({0: latest(watch)})
            delays.append(now() - began - at)
        assert sorted(delays)[len(delays) // 2] <= most
    await watch.aclose()


async def test_query_that_reads_a_backlog_looks_at_everything_in_each_batch() -> None:
    """What it read was known at its start: that nothing is new is found out with each batch, and at its end at once."""
    hub = FakeHub(partitions=32, latency=0.01)
    options = SourceOptions.from_options({"connectionString": STRING}).for_stream()
    transport = FakeTransport(hub)
    watch = HubsWatch(lambda: transport, [options])
    await watch.refresh()
    for _ in range(20):
        watch.planned()
        await asyncio.sleep(2.0)
        began = now()
        await watch.refresh()
        assert watch.is_known_since(began)
        assert now() - began <= 0.1
    await watch.aclose()


async def test_query_with_a_trigger_interval_looks_at_everything_in_each_trigger() -> None:
    """It waits for no turn of an idle query: the trigger is the turn."""
    hub = FakeHub(partitions=32)
    options = SourceOptions.from_options({"connectionString": STRING}).for_stream()
    transport = FakeTransport(hub)
    watch = HubsWatch(lambda: transport, [options])
    await watch.refresh()
    for turn in range(5):
        await asyncio.sleep(AWAY_SECONDS + 10.0 * turn)
        began = now()
        await watch.refresh()
        assert watch.is_known_since(began)
        assert now() - began <= 0.1
    await watch.aclose()


async def test_everything_is_known_after_a_long_trigger_interval() -> None:
    """More partitions than a second has requests for: none is left for the next trigger."""
    hub = FakeHub(partitions=100, consumer_groups=GROUPS)
    transport = FakeTransport(hub)
    watch = HubsWatch(lambda: transport, [SourceOptions.from_options({"connectionString": STRING}).for_stream()])
    await watch.refresh()
    await asyncio.sleep(60)
    for each in hub.partition_ids:
        hub.publish(each, count=20)
    await watch.refresh()
    assert set(latest(watch).values()) == {20}
    await watch.aclose()


@pytest.mark.parametrize("events", [3, 5, 9])
@seeds(4, of=24)
async def test_what_is_known_of_a_hub_that_was_recreated_is_of_one_hub(events: int, seed: int) -> None:
    """More partitions than a round has requests for, with fewer events than before, as many or more: with the new
    creation time, or with numbers that went back, all partitions are known anew."""
    rng = random.Random(seed)
    hub = FakeHub(partitions=60, consumer_groups=GROUPS)
    hub.latency = 0.01
    transport = FakeTransport(hub)
    watch = HubsWatch(lambda: transport, [SourceOptions.from_options({"connectionString": STRING}).for_stream()])
    for each in hub.partition_ids:
        hub.publish(each, count=5)
    await watch.refresh()
    created_at, before = hub.created_at, latest(watch)

    def recreate() -> None:
        hub.recreate()
        for each in hub.partition_ids:
            hub.publish(each, count=events)

    asyncio.get_running_loop().call_later(rng.uniform(1.0, 5.0), recreate)
    until = now() + 15.0
    while now() < until:
        await watch.until_news({0: latest(watch)})
        if watch.snapshots["telemetry"].created_at == created_at:
            assert all(end >= before[each] for each, end in latest(watch).items())
        else:
            assert latest(watch) == dict.fromkeys(hub.partition_ids, events)
    assert watch.snapshots["telemetry"].created_at == hub.created_at
    await watch.aclose()


@pytest.mark.parametrize("partitions", [60, 20])
@seeds(4, of=24)
async def test_request_while_there_is_no_hub_does_not_end_the_query(partitions: int, seed: int) -> None:
    """Partitions are asked for while the hub is deleted, and the hub itself when it was made again, with the same
    partitions or fewer."""
    rng = random.Random(seed)
    hub = FakeHub(partitions=60, consumer_groups=GROUPS)
    hub.latency = 0.01
    transport = FakeTransport(hub)
    watch = HubsWatch(
        lambda: transport,
        [SourceOptions.from_options({"connectionString": STRING, "snapshotInterval": "0.1"}).for_stream()],
    )
    await watch.refresh()
    for _ in range(3):
        await asyncio.sleep(rng.uniform(0.0, 1.5))
        hub.refuse(EntityNotFoundError("no such hub"), operation="partition", times=rng.randint(1, 8))
        hub.recreate(partitions)
        for each in hub.partition_ids:
            hub.publish(each, count=3)
        until = now() + 10.0
        while now() < until:
            await watch.until_news({0: latest(watch)})
        assert watch.snapshots["telemetry"].created_at == hub.created_at
        assert latest(watch) == dict.fromkeys(hub.partition_ids, 3)
    await watch.aclose()


async def test_request_from_before_the_hub_was_made_again_does_not_end_the_query() -> None:
    """It is refused after another request has shown the new hub: it waited in the budget."""
    hub = FakeHub(partitions=60, consumer_groups=GROUPS)
    watch = watch_of(hub)
    await watch.refresh()
    await asyncio.sleep(60.0)
    hub.recreate()
    hub.refuse(EntityNotFoundError("no such hub"), operation="partition", partition_id="59")
    await watch.refresh()
    assert watch.snapshots["telemetry"].created_at == hub.created_at
    assert latest(watch) == dict.fromkeys(hub.partition_ids, 0)
    await watch.aclose()


async def test_partition_that_a_hub_does_not_find_ends_the_query() -> None:
    """The hub is the same, and has the partition."""
    hub = FakeHub(partitions=2, consumer_groups=GROUPS)
    watch = watch_of(hub)
    await watch.refresh()
    await asyncio.sleep(1.0)
    hub.refuse(EntityNotFoundError("no such partition"), operation="partition", partition_id="1")
    with pytest.raises(EntityNotFoundError):
        await watch.look_at_all()
    await watch.aclose()


async def test_busy_partition_is_asked_for_in_place_of_what_links_show() -> None:
    """Requests that are free go to the partitions without a link that waits."""
    hub = FakeHub(partitions=64, consumer_groups=GROUPS)
    watch = watch_of(hub)
    await watch.refresh()
    watch.watch({0: latest(watch)}, skips_busy=True)
    behind = []
    for turn in range(100):
        hub.publish("63", count=20)
        for other in range(4):
            hub.publish(str((4 * turn + other) % 63), b"x")
            await asyncio.sleep(0.05)
        await watch.refresh()
        watch.watch({0: latest(watch)}, skips_busy=True)
        behind.append((turn + 1) * 20 - latest(watch)["63"])
    assert max(behind[10:]) <= 100  # a second
    await watch.aclose()


async def test_partition_that_had_a_burst_is_watched_again_while_others_have_events() -> None:
    """Its link comes back with the first batch that finds it quiet, not when the query has nothing else to do."""
    hub = FakeHub(partitions=4, consumer_groups=GROUPS)
    watch = watch_of(hub, snapshotInterval="3600")
    await watch.refresh()
    watch.watch({0: latest(watch)}, skips_busy=True)
    hub.publish("3", count=20)
    for turn in range(20):
        if turn == 5:
            await watch.look_at_all()
        if turn == 10:
            hub.publish("3", b"x")
        hub.publish("0", b"x")
        await asyncio.sleep(0.2)
        await watch.refresh()
        watch.watch({0: latest(watch)}, skips_busy=True)
    assert latest(watch)["3"] == 21
    await watch.aclose()


async def test_watched_events_are_seen_after_an_outage(hub: FakeHub) -> None:
    """A link that was lost is opened again, however often that fails, and shows what came meanwhile."""
    watch = watch_of(hub)
    await watch.refresh()
    drained = {0: {"3": 0}}
    waiting = asyncio.create_task(watch.until_news(drained))
    await asyncio.sleep(0.1)
    hub.refuse(ConnectionLostError("cannot connect: refused"), times=5)
    hub.lose_connections()
    hub.publish("3", b"a")
    with suppress(ConnectionLostError):
        await waiting
    began = now()
    while latest(watch)["3"] == 0 and now() < began + 60:
        await watch.until_news(drained)
    assert latest(watch)["3"] == 1
    hub.detach("3", LinkDetachedError("idle"))
    waiting = asyncio.create_task(watch.until_news({0: {"3": 1}}))
    await asyncio.sleep(0.01)
    hub.publish("3", b"b")
    await waiting
    while latest(watch)["3"] == 1 and now() < began + 120:  # it may have been a round of requests that was done
        await watch.until_news({0: {"3": 1}})
    assert latest(watch)["3"] == 2
    await watch.aclose()


async def test_watch_does_not_disturb_the_query(hub: FakeHub) -> None:
    """An exclusive reader of the query's group stays; the watch closes its links, and does not come back after."""
    reader = await read(hub, "$Default", 0)
    watch = watch_of(hub)
    await watch.refresh()
    await watch.until_news({0: {"0": 0}})
    assert sorted(hub.owner_levels("0"), key=str) == [0, None]
    await watch.aclose()
    await watch.aclose()
    await watch.until_news({0: {"0": 0}})
    assert (hub.owner_levels("0"), reader.error) == ([0], None)


async def test_watch_that_is_refused_leaves_it_to_requests(caplog: pytest.LogCaptureFixture) -> None:
    """An exclusive reader in the group of the watch is a warning; requests see the event; it is tried again later."""
    hub = FakeHub(partitions=2, consumer_groups=GROUPS)
    await read(hub, "watch", 0)
    watch = watch_of(hub)
    await watch.refresh()
    with caplog.at_level(logging.WARNING, "eventpump.spark"):
        await watch.until_news({0: {"0": 0}})
        hub.publish("0", b"a")
        began = now()
        while latest(watch)["0"] == 0:
            await watch.until_news({0: {"0": 0}})
        assert now() - began < 0.4
        for _ in range(20):
            await watch.until_news({0: {"0": 1}})
    assert caplog.text.count("partition 0 of hub telemetry cannot be watched in consumer group watch") == 1
    tried = len(hub.attached)
    await asyncio.sleep(REFUSED_SECONDS)
    for _ in range(3):
        await watch.until_news({0: {"0": 1}})
    assert len(hub.attached) == tried
    assert caplog.text.count("cannot be watched") >= 1
    await watch.aclose()


def test_watch_in_the_querys_own_group_is_refused() -> None:
    """Its links would be refused there, or disturb other readers."""
    with pytest.raises(ConfigurationError, match="watchConsumerGroup: must not be the query's own consumerGroup"):
        SourceOptions.from_options({"connectionString": STRING, "watchConsumerGroup": "$default"})


@pytest.mark.parametrize(
    ("partitions", "interval"), [(4, 5 / REQUESTS_PER_SECOND), (32, ROUND / REQUESTS_PER_SECOND), (128, 0.25)]
)
async def test_looks_are_as_quick_as_the_rate_allows(partitions: int, interval: float) -> None:
    """With a short `snapshotInterval`, a partition that had events is looked at every eighth of a second of 4, four
    times a second of 128; and there are never more requests than the rate."""
    hub = FakeHub(partitions=partitions)
    options = SourceOptions.from_options({"connectionString": STRING, "snapshotInterval": "0.1"}).for_stream()
    transport = FakeTransport(hub)
    watch = HubsWatch(lambda: transport, [options])
    await watch.refresh()
    delays = []
    for _ in range(20):
        hub.publish("1", b"x")
        began, end = now(), latest(watch)["1"] + 1
        while latest(watch)["1"] < end:
            await watch.until_news({})
        delays.append(now() - began)
    assert max(delays[-10:]) <= interval + 0.001
    moments = [moment for _, moment in hub.looks]
    for index, moment in enumerate(moments):
        assert sum(other < moment + 0.999 for other in moments[index:]) <= REQUESTS_PER_SECOND
    began, unread = now(), set(hub.partition_ids)
    looked = len(hub.looks)
    while unread:
        await watch.until_news({})
        unread -= {each for each, _ in hub.looks[looked:]}
    assert now() - began <= 1.5 * (partitions + 1) / REQUESTS_PER_SECOND + 1.0


@pytest.mark.parametrize(
    ("partitions", "interval", "within"),
    [(16, 1.0, 1.0), (32, 0.5, 1.5), (32, 1.0, 1.0), (128, 1.0, 5.0), (128, 4.0, 4.0), (128, 60.0, 60.0)],
)
async def test_looks_at_all_partitions_within_the_interval_if_the_rate_allows_it(
    partitions: int, interval: float, within: float
) -> None:
    """A longer interval is that of every partition, while others have events; and it saves requests."""
    hub = FakeHub(partitions=partitions)
    options = SourceOptions.from_options({"connectionString": STRING, "snapshotInterval": str(interval)})
    transport = FakeTransport(hub)
    watch = HubsWatch(lambda: transport, [options.for_stream()])
    await watch.refresh()
    began, looked = now(), len(hub.looks)
    while now() < began + 10 * within:
        for each in range(0, partitions, 2):
            hub.publish(str(each), b"x")
        await watch.until_news({})
    moments: dict[str, list[float]] = {}
    for partition_id, moment in hub.looks[looked:]:
        moments.setdefault(partition_id, [began]).append(moment)
    assert moments.keys() == set(hub.partition_ids)
    assert max(after - before for each in moments.values() for before, after in pairwise(each)) <= within + 0.1
    most = 1.1 * min(REQUESTS_PER_SECOND, (partitions + 1) / interval)
    assert len(hub.looks) - looked <= (now() - began) * most


async def test_looks_are_fewer_while_the_service_is_busy() -> None:
    """A refusal is repeated after the service's wait, and the rate is halved."""
    hub = FakeHub(partitions=4)
    transport = FakeTransport(hub)
    watch = HubsWatch(lambda: transport, [SourceOptions.from_options({"connectionString": STRING}).for_stream()])
    await watch.refresh()
    hub.refuse(ServiceBusyError("busy"), operation="partition")
    began = now()
    await watch.until_news({})
    assert now() - began >= 4.0
    looked, began = len(hub.looks), now()
    while now() < began + 10:
        await watch.until_news({})
    assert len(hub.looks) - looked <= 10 * REQUESTS_PER_SECOND / 2


@seeds(4, of=12)
async def test_watch_sees_every_event_in_random_histories(seed: int) -> None:
    """Events, lost connections and links, refusals, retention and added partitions in any order: what is known never
    goes back, never runs ahead, and reaches the end; a partition has at most one link, with credit for one event."""
    rng = random.Random(seed)
    hub = FakeHub(partitions=3, consumer_groups=GROUPS, latency=rng.choice([0.0, 0.005, 0.2]))
    watch = watch_of(hub)
    await watch.refresh()
    read_to = dict(latest(watch))
    for _ in range(150):
        step = rng.random()
        partition_id = rng.choice(hub.partition_ids)
        if step < 0.35:
            hub.publish(partition_id, count=rng.choice([1, 1, 1, 2, 30]))
        elif step < 0.4:
            hub.lose_connections()
        elif step < 0.45:
            hub.detach(partition_id, LinkDetachedError("moved"))
        elif step < 0.5:
            hub.refuse(rng.choice([LinkDetachedError("away"), ServiceBusyError("busy")]), times=rng.randrange(1, 4))
        elif step < 0.55:
            hub.truncate(partition_id, len(hub.events(partition_id)) + 5)
        elif step < 0.57:
            hub.add_partitions(1)
        elif step < 0.63:
            await watch.refresh_behind()
        elif step < 0.8:
            before = latest(watch)
            drained = {each: end for each, end in before.items() if read_to.get(each, 0) == end}
            await watch.until_news({0: drained})
            after = latest(watch)
            for each, end in before.items():
                assert after[each] >= end
            for each, end in after.items():
                found = await FakeTransport(hub).get_partition_properties(hub.name, each)
                assert end <= found.last_enqueued_sequence_number + 1
        else:
            read_to = dict(latest(watch))  # a batch
        if step > 0.97:
            await asyncio.sleep(rng.choice([0.01, 5.0, 40.0]))
        for each in hub.partition_ids:
            assert len(hub.credit(each)) <= 1
            assert sum(hub.credit(each)) <= 1
    hub.accept()
    for _ in range(40):
        await watch.until_news({0: latest(watch)})
    ends = [await FakeTransport(hub).get_partition_properties(hub.name, each) for each in hub.partition_ids]
    assert latest(watch) == {each.partition_id: each.last_enqueued_sequence_number + 1 for each in ends}
    await watch.aclose()
    assert not any(map(hub.credit, hub.partition_ids))
