"""Links that are open and silent: found, opened again, and never suspected without reason."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest

from eventpump.consumer.processor import PartitionContext
from eventpump.consumer.reader.reader import HubReader
from eventpump.errors import Recovery, ServiceTimeoutError
from eventpump.eventhubs.events import EventPosition, ReceivedEvent
from eventpump.options.consumer import ReaderSettings
from eventpump.reports import LinkFailed, LinkStalled
from eventpump.testing.transport import FakeHub, FakeTransport
from tests.support.fleet import Fleet, RecordingProcessor
from tests.support.seeds import seeds

WAIT = 30.0
"""The default of `max_wait_time`."""
FOUND = WAIT * 2 + 10
"""By when a stall is found: a silence that may have begun just before a check, and the time for an answer."""


def _fleet(partitions: int = 1, **options: Any) -> Fleet:
    return Fleet(FakeHub(partitions=partitions, **options))


async def _delivered(fleet: Fleet, number: int, partition_id: str = "0", within: float = FOUND) -> None:
    await fleet.until(lambda: number in fleet.record.numbers(partition_id), within)


# --------------------------------------------------------------------------------------------------- judged


async def test_unanswered_probe_opens_the_link_again() -> None:
    """A link that answers no probe, at a service that has answered one, is opened again; nothing is lost."""
    async with _fleet() as fleet:
        fleet.hub.publish("0", "a")
        await fleet.start("a")
        await asyncio.sleep(WAIT + 5)
        assert fleet.hub.probes == ["0"]
        fleet.hub.stall("0", until="reopened")
        fleet.hub.publish("0", "b")
        await _delivered(fleet, 1)
        (stalled,) = fleet.reported("a", LinkStalled)
        assert (stalled.partition_id, stalled.drops_connection) == ("0", False)
        assert "probe" in stalled.evidence
        assert stalled.silent_for > WAIT
        assert len(fleet.reported("a", LinkFailed)) == 1
        assert fleet.record.numbers("0") == [0, 1]
        assert fleet.hub.owner_levels("0") == [1]


async def test_two_silent_links_drop_the_connection() -> None:
    """Where the link opened instead is silent too, the connection is dropped, and all partitions go on with another."""
    async with _fleet(3) as fleet:
        await fleet.start("a")
        await asyncio.sleep(WAIT + 5)
        fleet.hub.stall(until="reconnected")
        for partition_id in "012":
            fleet.hub.publish(partition_id, "x")
        for partition_id in "012":
            await _delivered(fleet, 0, partition_id, FOUND + 10)
        assert [each.drops_connection for each in fleet.reported("a", LinkStalled)].count(True) == 1
        assert all(fleet.record.numbers(partition_id) == [0] for partition_id in "012")


async def test_attach_without_an_answer_drops_the_connection() -> None:
    """Where the link opened instead gets no answer in time, the connection is dropped."""
    async with _fleet() as fleet:
        await fleet.start("a")
        await asyncio.sleep(WAIT + 5)
        fleet.hub.stall("0", until="reconnected")
        no_answer = ServiceTimeoutError("no answer to the attach", recovery=Recovery.RELINK)
        fleet.hub.refuse(no_answer, operation="receive")
        before = fleet.transports["a"].connection
        fleet.hub.publish("0", "x")
        await _delivered(fleet, 0)
        assert fleet.transports["a"].connection is not before
        assert [each.drops_connection for each in fleet.reported("a", LinkStalled)] == [False, True]


@pytest.mark.parametrize("answers_echo", [True, False])
async def test_link_behind_the_hub_is_opened_again(answers_echo: bool) -> None:
    """A silent link that answers probes, or whose service never does, is found by management: the hub is ahead."""
    async with _fleet() as fleet:
        fleet.hub.answers_echo = answers_echo
        fleet.hub.publish("0", "a")
        await fleet.start("a")
        await asyncio.sleep(5)
        fleet.hub.stall("0", answers_echo=answers_echo, until="reopened")
        fleet.hub.publish("0", count=10)
        await _delivered(fleet, 10)
        (stalled,) = fleet.reported("a", LinkStalled)
        assert stalled.evidence == "the hub holds events up to sequence number 10"
        assert fleet.record.numbers("0") == list(range(11))


async def test_link_silent_since_latest_is_opened_again() -> None:
    """A link that began at `@latest` and never brought an event is found once the hub has grown under it."""
    async with _fleet() as fleet:
        fleet.hub.publish("0", count=5)
        await fleet.start("a", initial_position=EventPosition.latest())
        await asyncio.sleep(WAIT + 5)
        assert fleet.reported("a", LinkStalled) == []
        fleet.hub.stall("0", answers_echo=True, until="reopened")
        fleet.hub.publish("0", "x")
        await fleet.until(lambda: bool(fleet.reported("a", LinkStalled)), FOUND)


@pytest.mark.parametrize("answers_echo", [True, False])
@pytest.mark.parametrize("is_echo_known", [True, False])
async def test_connection_that_delivers_nothing_is_dropped(answers_echo: bool, is_echo_known: bool) -> None:
    """A connection that attaches links and delivers on none is dropped: each of its events flows within minutes."""
    async with _fleet(3) as fleet:
        fleet.hub.answers_echo = is_echo_known
        await fleet.start("a")
        for round_ in range(3):
            await asyncio.sleep(WAIT + 5)
            fleet.hub.stall(answers_echo=answers_echo, until="reconnected")
            for partition_id in "012":
                fleet.hub.publish(partition_id, count=2)
            for partition_id in "012":
                await _delivered(fleet, 2 * round_ + 1, partition_id, 4 * WAIT)
        assert [each.drops_connection for each in fleet.reported("a", LinkStalled)].count(True) == 3
        assert all(fleet.record.numbers(partition_id) == list(range(6)) for partition_id in "012")


async def test_connection_drops_that_helped_do_not_delay_the_next() -> None:
    """However often a connection is silent, it is dropped as soon as the first time, where that brought events."""
    async with _fleet() as fleet:
        await fleet.start("a")
        for number in range(10):
            await asyncio.sleep(WAIT + 5)
            fleet.hub.stall(answers_echo=True, until="reconnected")
            fleet.hub.publish("0", "x")
            await _delivered(fleet, number, within=4 * WAIT)


async def test_silent_service_is_reconnected_to_ever_more_rarely() -> None:
    """Where no connection brings anything, links and connections are given up ever more rarely, and then it flows."""
    async with _fleet(3) as fleet:
        await fleet.start("a")
        await asyncio.sleep(WAIT + 5)
        fleet.hub.stall()
        fleet.hub.publish("0", "x")
        await asyncio.sleep(3600)
        assert 5 <= [each.drops_connection for each in fleet.reported("a", LinkStalled)].count(True) <= 7
        assert len(fleet.hub.attached) < 60
        fleet.hub.resume()
        await _delivered(fleet, 0, within=1)


# ----------------------------------------------------------------------------------------------- not judged


@pytest.mark.parametrize("answers_echo", [True, False])
async def test_idle_service_is_not_reconnected_to(answers_echo: bool) -> None:
    """An hour without an event reopens no link and drops no connection, whether the service answers probes or not."""
    async with _fleet(2) as fleet:
        fleet.hub.answers_echo = answers_echo
        fleet.hub.publish("0", count=5)
        await fleet.start("a")
        await asyncio.sleep(3600)
        assert len(fleet.hub.attached) == 2
        assert fleet.reported("a", LinkStalled) == []
        assert fleet.hub.probes.count("0") > 60
        fleet.hub.publish("1", "x")
        await _delivered(fleet, 0, "1", 1)


async def test_management_is_asked_about_silent_partitions_once_a_second() -> None:
    """All silent partitions of a host together cost one question a second at most, and take turns."""
    async with _fleet(8) as fleet:
        await fleet.start("a", max_wait_time=2.0)
        await asyncio.sleep(5)
        fleet.hub.looks.clear()
        await asyncio.sleep(80)
        asked = fleet.hub.looks
        assert 70 <= len(asked) <= 81
        assert min(later[1] - earlier[1] for earlier, later in pairwise(asked)) >= 0.999
        for partition_id in fleet.hub.partition_ids:
            moments = [at for partition, at in asked if partition == partition_id]
            assert all(6 <= later - earlier <= 12 for earlier, later in pairwise(moments))


@pytest.mark.parametrize("answers_echo", [True, False])
async def test_management_is_asked_while_a_link_waits_for_its_attach(answers_echo: bool) -> None:
    """While a link that was found dead waits for its attach, management is asked about the other partitions."""
    async with _fleet(2) as fleet:
        await fleet.start("a", max_wait_time=5.0)
        await asyncio.sleep(10)
        fleet.hub.stall("0", answers_echo=answers_echo)
        fleet.hub.publish("0", "x")
        fleet.hub.hang("receive")
        await fleet.until(lambda: bool(fleet.reported("a", LinkStalled)), FOUND)
        fleet.hub.looks.clear()
        await asyncio.sleep(30)
        assert [partition for partition, _ in fleet.hub.looks].count("1") >= 4
        fleet.hub.resume()
        fleet.hub.answer("receive")
        await _delivered(fleet, 0)


@seeds(2, of=5)
@pytest.mark.parametrize("answers_echo", [True, False])
async def test_link_with_traffic_is_never_taken_for_silent(seed: int, answers_echo: bool) -> None:
    """With events at any moment, a slow service and checks at every turn, a link that works is never given up."""
    rng = random.Random(seed)
    async with _fleet(2, latency=rng.uniform(0.0, 0.4)) as fleet:
        fleet.hub.answers_echo = answers_echo
        await fleet.start("a", max_wait_time=1.0, prefetch_events=rng.choice([1, 3000]))
        for _ in range(200):
            await asyncio.sleep(rng.choice([0.0, 0.3, 1.0, 2.5]) * rng.random())
            fleet.hub.publish(rng.choice("01"), count=rng.randint(1, 5))
        for partition_id in "01":
            last = len(fleet.hub.events(partition_id)) - 1
            await _delivered(fleet, last, partition_id, 600)
            assert fleet.record.numbers(partition_id) == list(range(last + 1))
        assert fleet.reported("a", LinkStalled) == []


async def test_link_held_back_by_a_slow_handler_is_not_checked() -> None:
    """While events wait for a handler, or there is no credit because of it, nothing is checked, and lag is known."""

    async def slow(context: PartitionContext, events: Sequence[ReceivedEvent]) -> None:
        await asyncio.sleep(100)

    async with _fleet() as fleet:
        fleet.hub.publish("0", count=10)
        processor = RecordingProcessor(fleet.record, on_events=slow)
        host = await fleet.start(
            "a", processor, max_batch_size=1, prefetch_events=2, close_timeout=200.0, track_last_enqueued=True
        )
        await asyncio.sleep(50)
        for number in range(9):
            (status,) = host.partitions
            assert status.lag == 9 - number
            await asyncio.sleep(100)
        assert fleet.hub.probes == []
        await fleet.until(lambda: len(fleet.record.numbers("0")) == 10, 200)


async def test_hub_that_stays_ahead_is_asked_ever_more_rarely() -> None:
    """Where the newest events cannot be had (a compacted hub), links and connections are given up ever more rarely."""
    async with _fleet() as fleet:
        fleet.hub.publish("0", count=3)
        fleet.hub.compact("0", [2])
        await fleet.start("a")
        await asyncio.sleep(3600)
        moments = [each.silent_for for each in fleet.reported("a", LinkStalled)]
        assert 4 <= len(moments) <= 7
        assert all(later > 1.5 * earlier for earlier, later in pairwise(moments))
        fleet.hub.publish("0", "x")
        await _delivered(fleet, 3, within=1)


async def test_compacted_partitions_drop_their_connection_rarely() -> None:
    """Many partitions whose newest events are gone have their healthy connection dropped as rarely as one has, and
    new events are not taken for the help of a drop."""
    async with _fleet(16) as fleet:
        for partition_id in fleet.hub.partition_ids:
            fleet.hub.publish(partition_id, count=3)
            fleet.hub.compact(partition_id, [2])
        await fleet.start("a", max_wait_time=5.0)
        drops: set[str] = set()
        for _ in range(360):
            await asyncio.sleep(10)
            for each in fleet.reported("a", LinkStalled):
                assert each.partition_id is not None
                if each.drops_connection and each.partition_id not in drops:
                    drops.add(each.partition_id)
                    fleet.hub.publish(each.partition_id, "x")
        assert 3 <= len(drops) <= 7


async def test_partition_emptied_by_retention_is_not_ahead() -> None:
    """What retention took is nothing to wait for."""
    async with _fleet() as fleet:
        fleet.hub.stall("0", answers_echo=True)
        await fleet.start("a")
        await asyncio.sleep(5)
        fleet.hub.publish("0", count=3)
        fleet.hub.truncate("0", 3)
        await asyncio.sleep(300)
        assert fleet.reported("a", LinkStalled) == []


@pytest.mark.parametrize("is_answered", [True, False], ids=["refuses", "hangs"])
async def test_management_that_fails_is_no_evidence_of_silence(is_answered: bool) -> None:
    """Where management does not answer, or refuses, no link is given up for it."""
    async with _fleet() as fleet:
        await fleet.start("a")
        await asyncio.sleep(5)
        fleet.hub.looks.clear()  # the start has looked whether there are events
        if is_answered:
            fleet.hub.refuse(ServiceTimeoutError("no answer"), operation="partition", times=float("inf"))
        else:
            fleet.hub.hang("partition")
        fleet.hub.stall("0", answers_echo=True, until="reopened")
        fleet.hub.publish("0", "x")
        await asyncio.sleep(200)
        assert fleet.hub.looks
        assert fleet.reported("a", LinkStalled) == []
        if is_answered:
            fleet.hub.accept()
        else:
            fleet.hub.answer("partition")
        await _delivered(fleet, 0)


@pytest.mark.parametrize("step", ["probe", "management", "link"])
async def test_close_of_a_host_during_a_silence_check_leaves_no_task(step: str) -> None:
    """Closed while a probe is out, while management is asked or while a link is opened again, no task is left."""
    async with _fleet(3) as fleet:
        hub = fleet.hub
        await fleet.start("a")
        await asyncio.sleep(2)
        hub.looks.clear()  # the start has looked whether there are events
        if step == "management":
            hub.hang("partition")
            hub.stall(answers_echo=True)
            await fleet.until(lambda: bool(hub.looks), FOUND)
        else:
            # A link is opened again for want of an answer only where another was answered before.
            await asyncio.sleep(WAIT + 5)
            before = len(hub.probes)
            hub.hang("receive")
            hub.stall()
            await fleet.until(lambda: len(hub.probes) > before, FOUND)
            if step == "link":
                await fleet.until(lambda: bool(fleet.reported("a", LinkStalled)), 11)
        checks = [task for task in asyncio.all_tasks() if task.get_name().startswith("eventpump check of partition ")]
        assert checks
        await asyncio.wait_for(fleet.hosts["a"].aclose(), 25)
        assert all(check.done() for check in checks)


# ------------------------------------------------------------------------------------------------------ lag


async def test_lag_of_a_stalled_link_is_unknown_until_confirmed() -> None:
    """On a stalled link lag is what was reported last, then unknown, then what management says."""
    async with _fleet() as fleet:
        fleet.hub.publish("0", "a")
        host = await fleet.start("a", track_last_enqueued=True)
        await asyncio.sleep(5)
        fleet.hub.stall("0", answers_echo=True)
        fleet.hub.publish("0", count=10)
        fleet.hub.hang("partition")

        def lag() -> int | None:
            (status,) = host.partitions
            return status.lag

        assert lag() == 0
        await asyncio.sleep(WAIT)
        assert lag() is None
        fleet.hub.answer("partition")
        await asyncio.sleep(0.1)
        assert lag() == 10
        assert await fleet.until(lambda: lag() is None, FOUND) > 0
        fleet.hub.resume("0")
        await fleet.until(lambda: lag() == 0, FOUND)


async def test_lag_of_an_idle_partition_stays_known() -> None:
    """Of few silent partitions each is confirmed in time: lag is 0 throughout, also where no event ever came."""
    async with _fleet(2) as fleet:
        fleet.hub.publish("0", count=3)
        host = await fleet.start("a", track_last_enqueued=True)
        await asyncio.sleep(WAIT * 2 + 5)
        for _ in range(100):
            await asyncio.sleep(7.3)
            assert [(status.lag, status.is_attached) for status in host.partitions] == [(0, True)] * 2


async def test_status_and_lag_show_a_detached_link() -> None:
    """While a link is not attached, its partition's status says so, and lag is unknown."""
    async with _fleet() as fleet:
        fleet.hub.publish("0", "a")
        host = await fleet.start("a", track_last_enqueued=True)
        await asyncio.sleep(5)
        fleet.hub.hang("receive")
        fleet.hub.detach("0")
        await asyncio.sleep(5)
        (status,) = host.partitions
        assert (status.lag, status.is_attached) == (None, False)
        fleet.hub.answer("receive")
        await asyncio.sleep(5)
        (status,) = host.partitions
        assert (status.lag, status.is_attached) == (0, True)


# --------------------------------------------------------------------------------------------------- reader


@pytest.mark.parametrize("until", ["reopened", "reconnected"])
@pytest.mark.parametrize("patience", [None, 1.0])
async def test_reader_opens_its_silent_link_again(
    until: Any, patience: float | None, caplog: pytest.LogCaptureFixture
) -> None:
    """A reader that waits for events checks its link as a host does, however long its single waits are."""
    hub = FakeHub(partitions=1)
    hub.publish("0", "a")
    settings = ReaderSettings(hub=hub.name, partition_id="0")
    async with HubReader(lambda: FakeTransport(hub), settings, rng=random.Random(1)) as reader:

        async def read() -> list[int]:
            while not (events := await reader.read(max_wait_time=patience)):
                assert patience is not None
            return [event.sequence_number for event in events]

        assert await read() == [0]
        reading = asyncio.ensure_future(read())
        await asyncio.sleep(WAIT + 5)
        assert hub.probes == ["0"]
        hub.stall("0", until=until)
        hub.publish("0", "b")
        async with asyncio.timeout(FOUND + 10):
            assert await reading == [1]
    assert [record.levelname for record in caplog.records] == ["WARNING"] * (1 if until == "reopened" else 2)


async def test_close_of_a_reader_during_a_silence_check_leaves_no_task() -> None:
    """Closed while a probe is out, a reader leaves no task."""
    hub = FakeHub(partitions=1)
    settings = ReaderSettings(hub=hub.name, partition_id="0")
    before = asyncio.all_tasks()
    async with HubReader(lambda: FakeTransport(hub), settings, rng=random.Random(1)) as reader:
        hub.stall("0")
        assert await reader.read(max_wait_time=WAIT + 5) == []
        assert hub.probes == ["0"]
        assert "eventpump check of partition 0" in {task.get_name() for task in asyncio.all_tasks()}
    assert asyncio.all_tasks() == before
