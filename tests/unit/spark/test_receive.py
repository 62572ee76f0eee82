"""Receiving ranges: everything once and in order, over kept links and new ones; what is gone, and what is slow."""

from __future__ import annotations

import asyncio
import logging
import pickle
import random
from typing import Any

import pytest

from eventpump.errors import (
    ConnectionLostError,
    ConsumerDisconnectedError,
    DataLossError,
    EntityNotFoundError,
    LinkDetachedError,
)
from eventpump.eventhubs.events import EventPosition
from eventpump.interfaces import ReceiveLinkSpec
from eventpump.spark.source import receive
from eventpump.spark.source.offsets import KEEP_LINKS, REFUSED_PATIENCE, ReceiveOptions, SequenceRange
from eventpump.spark.source.options import SourceOptions
from eventpump.spark.source.ranges import number_of
from eventpump.spark.source.receive import MAX_ROWS, KeptLinks, RangesReceiver
from eventpump.testing.transport import FakeHub, FakeTransport
from tests.support.connecting import connection_string_to
from tests.support.seeds import seeds

_SHARED = ReceiveOptions(owner_level=None)
_EXCLUSIVE = ReceiveOptions(owner_level=0)


def _receiver(
    hub: FakeHub,
    *ranges: SequenceRange,
    options: ReceiveOptions = _EXCLUSIVE,
    links: KeptLinks | None = None,
    keep_links: float = KEEP_LINKS,
) -> RangesReceiver:
    return RangesReceiver(
        FakeTransport(hub),
        hub.name,
        ranges,
        options,
        links=KeptLinks() if links is None else links,
        scope=hub.name,
        keep_links=keep_links,
    )


async def _read(receiver: RangesReceiver, count: int) -> list[list[int]]:
    """Read everything, by range."""
    found: list[list[int]] = [[] for _ in range(count)]
    try:
        await receiver.start()
        while (received := await receiver.next()) is not None:
            for partition_id, messages in received:
                found[int(partition_id)] += map(number_of, messages)
    finally:
        await receiver.aclose()
    return found


async def _read_one(hub: FakeHub, start: int, end: int, partition: str = "0", **more: Any) -> list[int]:
    return (await _read(_receiver(hub, SequenceRange(partition, start, end), **more), 1))[0]


class _Sink:
    """A reader of another worker."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    def messages(self, batch: list[bytes]) -> None:
        """Events come."""

    def detached(self, error: Exception) -> None:
        """The link ended."""
        self.error = error


async def _attach_elsewhere(hub: FakeHub, owner_level: int | None) -> _Sink:
    sink = _Sink()
    spec = ReceiveLinkSpec(hub.name, "$Default", "0", EventPosition.earliest(), owner_level=owner_level)
    await FakeTransport(hub).open_receive_link(spec, sink)
    return sink


@pytest.mark.parametrize("options", [_SHARED, _EXCLUSIVE])
async def test_receive_reads_a_range_to_before_its_end(options: ReceiveOptions) -> None:
    """Of a longer stream exactly the range comes, however large it is beside batches and prefetch."""
    hub = FakeHub(latency=0.01)
    hub.publish("0", count=20_000)
    assert await _read_one(hub, 100, 19_000, options=options) == list(range(100, 19_000))


async def test_receive_waits_for_events_that_are_not_there_yet() -> None:
    """A range whose last events come later is read when they are there."""
    hub = FakeHub()
    hub.publish("0", count=5)
    reading = asyncio.create_task(_read_one(hub, 0, 7))
    await asyncio.sleep(30)
    assert not reading.done()
    hub.publish("0", count=4)
    assert await reading == list(range(7))


async def test_receive_reads_several_ranges_at_once() -> None:
    """A slow partition keeps no other of the same task from being read."""
    hub = FakeHub()
    for partition in "012":
        hub.publish(partition, count=9_000)
    hub.stall("1")
    receiver = _receiver(hub, *(SequenceRange(partition, 0, 9_000) for partition in "012"))
    found: dict[int, int] = {}
    await receiver.start()
    while found.get(0, 0) + found.get(2, 0) < 18_000:
        received = await receiver.next()
        assert received is not None
        for partition_id, messages in received:
            found[int(partition_id)] = found.get(int(partition_id), 0) + len(messages)
    assert found == {0: 9_000, 2: 9_000}
    hub.resume("1")
    while (received := await receiver.next()) is not None:
        for partition_id, messages in received:
            found[int(partition_id)] = found.get(int(partition_id), 0) + len(messages)
    await receiver.aclose()
    assert found == {0: 9_000, 1: 9_000, 2: 9_000}


async def test_receive_returns_what_is_ready_of_all_ranges_up_to_a_batch() -> None:
    """Small ranges are one batch together, and no batch grows by more than one range's part beyond `MAX_ROWS`."""
    hub = FakeHub(partitions=40)
    for partition in range(40):
        hub.publish(str(partition), count=500)
    receiver = _receiver(hub, *(SequenceRange(str(partition), 0, 500) for partition in range(40)))
    await receiver.start()
    await asyncio.sleep(10)
    sizes = []
    while (received := await receiver.next()) is not None:
        sizes.append(sum(len(each.messages) for each in received))
    await receiver.aclose()
    assert sizes == [8_500, 8_500, 3_000]


@seeds(40, of=2000)
async def test_ranges_come_whole_and_in_order_in_random_histories(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever links and connections do, events that come late, and a reader that is slow or gives up its waits."""
    rng = random.Random(seed)
    most = rng.choice((1, 7, 50, 400))
    monkeypatch.setattr(receive, "MAX_ROWS", most)
    monkeypatch.setattr(receive, "MAX_BYTES", rng.choice((200, 5_000, 10**6)))
    hub = FakeHub(partitions=6, latency=rng.choice((0.0, 0.01, 0.3)))
    ranges = [SequenceRange(str(each), rng.randrange(49), rng.randint(50, 600)) for each in range(rng.randint(1, 6))]
    for each in ranges:
        hub.publish(each.partition_id, count=rng.randint(each.start + 1, each.end))
    receiver = _receiver(hub, *ranges, options=rng.choice((_SHARED, _EXCLUSIVE)))

    async def trouble() -> None:
        for _ in range(rng.randrange(20)):
            await asyncio.sleep(rng.choice((0.0, 0.02, 0.5, 3.0)))
            rng.choice((hub.detach, hub.lose_connections))()
        for each in ranges:
            hub.publish(each.partition_id, count=600)

    found: dict[str, list[int]] = {each.partition_id: [] for each in ranges}
    await receiver.start()
    troubling = asyncio.create_task(trouble())
    while True:
        try:
            async with asyncio.timeout(rng.choice((0.0, 0.001, 1.0, None))):
                received = await receiver.next()
        except TimeoutError:
            continue
        if received is None:
            break
        assert sum(len(each.messages) for each in received[:-1]) < most
        for partition_id, messages in received:
            found[partition_id] += map(number_of, messages)
        await asyncio.sleep(rng.choice((0.0, 0.0, 0.1, 2.0)))
    await receiver.aclose()
    await troubling
    assert found == {each.partition_id: list(range(each.start, each.end)) for each in ranges}


async def test_receive_is_bounded_by_what_the_reader_takes() -> None:
    """A reader that takes nothing has two batches made for it, and the prefetch received; the rest waits."""
    hub = FakeHub()
    hub.publish("0", count=20_000)
    receiver = _receiver(hub, SequenceRange("0", 0, 20_000), options=ReceiveOptions(prefetch_count=500))
    await receiver.start()
    await asyncio.sleep(100)
    assert 2 * MAX_ROWS < hub.partition("0").links[0].next <= 2 * MAX_ROWS + 500
    await receiver.aclose()


# ---------------------------------------------------------------------------------------------------------- links


async def test_exclusive_link_serves_the_range_that_follows() -> None:
    """A task that goes on exactly where the last one ended uses its link; nothing is attached again."""
    hub = FakeHub(latency=0.01)
    hub.publish("0", count=300)
    links = KeptLinks()
    assert await _read_one(hub, 0, 100, links=links) == list(range(100))
    assert (len(hub.attached), hub.owner_levels("0"), hub.credit("0")) == (1, [0], [0])
    for start in (100, 200):
        assert await _read_one(hub, start, start + 100, links=links) == list(range(start, start + 100))
    assert len(hub.attached) == 1


@pytest.mark.parametrize("start", [0, 99, 101, 150])
async def test_exclusive_link_serves_no_other_range(start: int) -> None:
    """A task that asks for any other number gets a link of its own, and the kept one is closed."""
    hub = FakeHub(latency=0.01)
    hub.publish("0", count=300)
    links = KeptLinks()
    await _read_one(hub, 0, 100, links=links)
    assert await _read_one(hub, start, 200, links=links) == list(range(start, 200))
    assert (len(hub.attached), hub.owner_levels("0"), len(links)) == (2, [0], 1)


async def test_kept_link_that_was_stolen_is_not_used() -> None:
    """A link that another worker's attach cut while it was idle is forgotten, takes nothing back, and is replaced."""
    hub = FakeHub()
    hub.publish("0", count=300)
    links = KeptLinks()
    await _read_one(hub, 0, 100, links=links)
    other = await _attach_elsewhere(hub, 0)
    await asyncio.sleep(100)
    assert (len(links), other.error) == (0, None)
    assert await _read_one(hub, 100, 200, links=links) == list(range(100, 200))
    assert isinstance(other.error, ConsumerDisconnectedError)


async def test_kept_link_that_ended_is_not_reopened_by_itself() -> None:
    """An idle link that the service closes is not opened again by itself."""
    hub = FakeHub()
    hub.publish("0", count=300)
    links = KeptLinks()
    await _read_one(hub, 0, 100, links=links)
    hub.detach("0", LinkDetachedError("idle for too long"))
    await asyncio.sleep(100)
    assert (hub.owner_levels("0"), len(links)) == ([], 0)
    assert await _read_one(hub, 100, 200, links=links) == list(range(100, 200))


async def test_shared_link_is_closed_at_the_end_of_its_task() -> None:
    """Without an owner level no link stays: idle ones in many workers would pass the limit of five readers."""
    hub = FakeHub(latency=0.01)
    hub.publish("0", count=300)
    links = KeptLinks()
    for start in range(0, 300, 50):
        assert await _read_one(hub, start, start + 50, options=_SHARED, links=links) == list(range(start, start + 50))
        assert (hub.owner_levels("0"), len(links)) == ([], 0)


async def test_kept_link_serves_its_own_options_only() -> None:
    """A kept link serves its own consumer group and owner level only."""
    hub = FakeHub(consumer_groups=("$Default", "other"))
    hub.publish("0", count=200)
    links = KeptLinks()
    await _read_one(hub, 0, 100, links=links)
    other = ReceiveOptions(consumer_group="other", owner_level=0)
    assert await _read_one(hub, 100, 200, options=other, links=links) == list(range(100, 200))
    assert [spec.consumer_group for spec in hub.attached] == ["$Default", "other"]


async def test_kept_link_is_closed_after_a_time() -> None:
    """A link that no task takes is closed after its time, and no earlier; one that was taken is not."""
    hub = FakeHub()
    hub.publish("0", count=300)
    links = KeptLinks()
    await _read_one(hub, 0, 100, links=links)
    await asyncio.sleep(KEEP_LINKS - 0.1)
    assert await _read_one(hub, 100, 200, links=links, keep_links=3.0) == list(range(100, 200))
    assert len(hub.attached) == 1
    await asyncio.sleep(2.9)
    assert (hub.owner_levels("0"), len(links)) == ([0], 1)
    await asyncio.sleep(0.2)
    assert (hub.owner_levels("0"), len(links)) == ([], 0)
    assert await _read_one(hub, 200, 300, links=links) == list(range(200, 300))


async def test_shared_reader_waits_for_the_link_that_a_query_left_behind() -> None:
    """What is read right after a query, and while an idle one runs, waits until the query's kept link is closed."""
    hub = FakeHub(latency=0.01)
    hub.publish("0", count=300)
    links = KeptLinks()
    await _read_one(hub, 0, 100, links=links)
    assert await _read_one(hub, 0, 300, options=_SHARED, links=links) == list(range(300))
    assert hub.owner_levels("0") == []


async def test_shared_reader_that_is_disconnected_goes_on_after_the_last_event() -> None:
    """A query's task that takes the partition between two reads of a batch costs the batch nothing but time."""
    hub = FakeHub(latency=0.01)
    hub.publish("0", count=300)
    links = KeptLinks()
    receiver = _receiver(hub, SequenceRange("0", 0, 600), options=_SHARED, links=links)
    reading = asyncio.create_task(_read(receiver, 1))
    for start in (0, 100, 200):
        await asyncio.sleep(REFUSED_PATIENCE)
        assert await _read_one(hub, start, start + 100, links=links, keep_links=1.0) == list(range(start, start + 100))
    hub.publish("0", count=300)
    assert await reading == [list(range(600))]


async def test_shared_reader_of_a_partition_that_stays_exclusive_says_what_to_do() -> None:
    """It fails only after the time in which a kept link would have been closed, and names the way out."""
    hub = FakeHub()
    hub.publish("0", count=10)
    await _attach_elsewhere(hub, 0)
    loop = asyncio.get_running_loop()
    began = loop.time()
    with pytest.raises(ConsumerDisconnectedError, match=r"query of your own.*consumerGroup.*useExclusiveReceiver"):
        await _read_one(hub, 0, 10, options=_SHARED)
    assert loop.time() - began == pytest.approx(REFUSED_PATIENCE, abs=0.5)
    assert hub.owner_levels("0") == [0]


async def test_receive_fails_when_its_link_is_stolen(caplog: pytest.LogCaptureFixture) -> None:
    """A reader that takes the partition during a task ends it with an error that says so, and nothing is kept. The
    first time is also a warning, as Spark repeats the task, and a query may go on like that for long."""
    hub = FakeHub()
    hub.publish("0", count=10)
    links = KeptLinks()
    for _ in range(2):
        reading = asyncio.create_task(_read_one(hub, 0, 20, links=links))
        await asyncio.sleep(1)
        await _attach_elsewhere(hub, 0)
        with pytest.raises(ConsumerDisconnectedError, match=r"another query of your own.*consumerGroup"):
            await reading
        assert len(links) == 0
    (warning,) = (each for each in caplog.records if each.levelname == "WARNING")
    assert "Each query needs its own consumerGroup" in warning.getMessage()


async def test_receive_reopens_a_lost_link_after_the_last_event() -> None:
    """A link or connection that is lost in mid-range costs nothing and repeats nothing."""
    hub = FakeHub(latency=0.01)
    hub.publish("0", count=3000)
    receiver = _receiver(hub, SequenceRange("0", 0, 6000))
    reading = asyncio.create_task(_read(receiver, 1))
    for _ in range(3):
        await asyncio.sleep(5)
        hub.detach("0")
        await asyncio.sleep(5)
        hub.lose_connections()
        hub.publish("0", count=1000)
    assert await reading == [list(range(6000))]


async def test_receive_that_is_cancelled_leaves_no_link() -> None:
    """Receiving that is broken off detaches its links and keeps none: they stand at no known number."""
    hub = FakeHub(latency=0.01)
    hub.publish("0", count=100)
    before = asyncio.all_tasks()
    links = KeptLinks()
    receiver = _receiver(hub, SequenceRange("0", 0, 200), SequenceRange("1", 0, 200), links=links)
    await receiver.start()
    waiting = asyncio.create_task(receiver.next())
    await asyncio.sleep(1)
    waiting.cancel()
    await receiver.aclose()
    await receiver.aclose()
    assert (hub.owner_levels("0"), hub.owner_levels("1"), len(links)) == ([], [], 0)
    assert asyncio.all_tasks() == before


async def test_receive_fails_with_the_first_range_that_fails() -> None:
    """The first failure is the task's, and no link of any range is left behind."""
    hub = FakeHub(partitions=2)
    hub.publish("0", count=100)
    hub.refuse(EntityNotFoundError("no such partition"), partition_id="1", times=float("inf"))
    receiver = _receiver(hub, SequenceRange("0", 0, 200), SequenceRange("1", 0, 10))
    with pytest.raises(EntityNotFoundError, match="no such partition"):
        await _read(receiver, 2)
    assert hub.owner_levels("0") == []


async def test_receive_fails_where_the_service_cannot_be_reached() -> None:
    """A task that never gets a link gives up after the time to start; Spark tries it again elsewhere."""
    hub = FakeHub()
    hub.publish("0", count=10)
    hub.refuse(ConnectionLostError("no way"), times=float("inf"))
    loop = asyncio.get_running_loop()
    for options in (_EXCLUSIVE, ReceiveOptions(retry_timeout=9)):
        began = loop.time()
        with pytest.raises(ConnectionLostError, match="no way"):
            await _read_one(hub, 0, 10, options=options)
        assert options.retry_timeout - 5 <= loop.time() - began <= options.retry_timeout


async def test_receive_opens_links_again_as_often_as_the_connections_retry_allows() -> None:
    """The option `retry` holds for links too; without it only the time to start ends the attempts."""
    text = connection_string_to("ns.servicebus.windows.net", hub="telemetry")
    given = {"connectionString": text, "retry": '{"maxRetries": 2, "baseDelay": 3, "mode": "fixed"}'}
    patient, limited = (SourceOptions.from_options(each).receive for each in ({"connectionString": text}, given))
    loop = asyncio.get_running_loop()
    for options, least, most in ((patient, 60.0, 120.0), (limited, 6.0, 6.1)):
        hub = FakeHub()
        hub.publish("0", count=10)
        hub.refuse(LinkDetachedError("moved"), times=float("inf"))
        began = loop.time()
        with pytest.raises(LinkDetachedError, match="moved"):
            await _read_one(hub, 0, 10, options=pickle.loads(pickle.dumps(options)))
        assert least <= loop.time() - began <= most


async def test_receive_waits_for_a_service_that_is_away() -> None:
    """An outage in mid-range, of links and requests, is waited for; only one that lasts longer fails the task."""
    hub = FakeHub()
    hub.publish("0", count=5)
    reading = asyncio.create_task(_read_one(hub, 0, 10, options=ReceiveOptions(receiver_timeout=10)))
    await asyncio.sleep(5)
    hub.refuse(ConnectionLostError("away"), times=float("inf"))
    hub.refuse(ConnectionLostError("away"), operation="partition", times=float("inf"))
    hub.lose_connections()
    await asyncio.sleep(100)
    assert not reading.done()
    hub.accept()
    hub.publish("0", count=5)
    assert await reading == list(range(10))


# --------------------------------------------------------------------------------------------------- gaps and loss


def _lossy(**more: Any) -> ReceiveOptions:
    return ReceiveOptions(fail_on_data_loss=False, **more)


@pytest.mark.parametrize("options", [_SHARED, _EXCLUSIVE, _lossy()])
async def test_receive_of_a_compacted_range_is_no_loss(options: ReceiveOptions) -> None:
    """Numbers that a compacted hub left out fail nothing, and a range ends at the first event at or past its end."""
    hub = FakeHub()
    hub.publish("0", count=100)
    dropped = {0, 3, 4, 5, 49, 50, 51, 98}
    hub.compact("0", dropped)
    links = KeptLinks()
    found: list[int] = []
    for start, end in ((0, 10), (10, 50), (50, 51), (51, 100)):
        part = await _read_one(hub, start, end, options=options, links=links)
        assert all(start <= number < end for number in part)
        found += part
    assert found == [number for number in range(100) if number not in dropped]


@pytest.mark.parametrize(("first", "problem"), [(30, "numbers 10 to 29 are gone"), (100, "numbers 10 to 99 are gone")])
async def test_receive_of_events_removed_by_retention_fails(first: int, problem: str) -> None:
    """Events that are gone are an error that names them, whether others of the range are left or not."""
    hub = FakeHub()
    hub.publish("0", count=100)
    hub.truncate("0", first)
    with pytest.raises(DataLossError, match=problem):
        await _read_one(hub, 10, 100)


async def test_receive_without_fail_on_data_loss_warns_of_removed_events(caplog: pytest.LogCaptureFixture) -> None:
    """Without `fail_on_data_loss` what is left is read, and a warning names what is not."""
    hub = FakeHub()
    hub.publish("0", count=100)
    hub.truncate("0", 30)
    with caplog.at_level(logging.WARNING, "eventpump.spark"):
        assert await _read_one(hub, 10, 100, options=_lossy()) == list(range(30, 100))
        hub.truncate("0", 100)
        assert await _read_one(hub, 10, 50, options=_lossy()) == []
    assert ["numbers 10 to 29 are gone" in caplog.messages[0], "numbers 10 to 49 are gone" in caplog.messages[1]] == [
        True,
        True,
    ]


async def test_receive_beyond_the_end_of_a_recreated_hub_fails() -> None:
    """If a hub was recreated, events that were due never come: the task fails instead of waiting indefinitely."""
    hub = FakeHub()
    hub.publish("0", count=20)
    with pytest.raises(DataLossError, match="20 to 99 are not there; the hub was probably deleted and recreated"):
        await _read_one(hub, 10, 100)
    assert await _read_one(hub, 10, 100, options=_lossy()) == list(range(10, 20))
    with pytest.raises(DataLossError, match="20 to 99 are not there; the hub was probably deleted and recreated"):
        await _read_one(hub, 50, 100)  # the attach is refused
    assert await _read_one(hub, 50, 100, options=_lossy()) == []


async def test_receive_waits_for_a_slow_partition() -> None:
    """Silence alone is no loss: a partition that holds the events is given the time it takes."""
    hub = FakeHub()
    hub.publish("0", count=20)
    hub.stall("0")
    reading = asyncio.create_task(_read_one(hub, 0, 20, options=ReceiveOptions(receiver_timeout=10)))
    await asyncio.sleep(1000)
    assert not reading.done()
    hub.resume("0")
    assert await reading == list(range(20))
