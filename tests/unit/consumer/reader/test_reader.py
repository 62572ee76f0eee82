"""Reading one partition without leases."""

from __future__ import annotations

import asyncio
import random
from datetime import timedelta
from typing import Any

import pytest

from eventpump.consumer.reader.ending import QUIET
from eventpump.consumer.reader.reader import HubReader
from eventpump.errors import (
    ClosedError,
    ConfigurationError,
    ConnectionLostError,
    ConsumerDisconnectedError,
    EntityNotFoundError,
    RequestRefusedError,
)
from eventpump.eventhubs.events import EventPosition, ReceivedEvent
from eventpump.options.consumer import ReaderSettings
from eventpump.testing.clock import VirtualClock
from eventpump.testing.transport import FakeHub, FakeTransport


def _reader(service: FakeHub, /, **options: Any) -> HubReader:
    settings = ReaderSettings(**{"hub": service.name, "partition_id": "0", **options})
    return HubReader(lambda: FakeTransport(service), settings, rng=random.Random(1))


async def _all(hub: FakeHub, **options: Any) -> list[int]:
    async with asyncio.timeout(60), _reader(hub, **options) as reader:
        return [event.sequence_number async for event in reader]


@pytest.mark.parametrize(
    ("position", "end", "expected"),
    [
        ("-1", "@latest", range(100)),
        ("-1", 9, range(10)),
        ("-1", EventPosition.at_sequence_number(9), range(9)),
        (9, 19, range(10, 20)),
        (EventPosition.at_sequence_number(9, inclusive=True), 19, range(9, 20)),
        (EventPosition.at_offset("fake:97"), "@latest", range(98, 100)),
        (EventPosition.at_offset("fake:97", inclusive=True), "@latest", range(97, 100)),
        (99, "@latest", range(0)),
        (50, 50, range(0)),
        (60, 50, range(0)),
        (EventPosition.at_offset("fake:99"), "@latest", range(0)),
        ("@latest", "@latest", range(0)),
        ("@latest", 50, range(0)),
    ],
)
async def test_iterate_over_a_range_gives_its_events_and_ends(position: Any, end: Any, expected: range) -> None:
    """Iterating gives exactly the events of the range and then ends by itself, also where the range is empty."""
    hub = FakeHub()
    hub.publish("0", count=100)
    assert await _all(hub, position=position, end=end) == list(expected)


async def test_iterate_over_an_empty_partition_ends_at_once(clock: VirtualClock) -> None:
    """To the newest of no events is no event."""
    began = clock.monotonic()
    assert await _all(FakeHub(), end="@latest") == []
    assert clock.monotonic() == began


@pytest.mark.parametrize("kept_from", [50, 100])
async def test_iterate_over_a_range_below_what_is_kept_ends_at_once(kept_from: int, clock: VirtualClock) -> None:
    """A range that retention took away ends at once, whether or not anything is kept above it."""
    hub = FakeHub()
    hub.publish("0", count=100)
    hub.truncate("0", kept_from)
    began = clock.monotonic()
    assert await _all(hub, end=20) == []
    assert clock.monotonic() == began


async def test_iterate_to_a_time_stops_before_the_first_event_after_it() -> None:
    """An end in time stops before the first event after it."""
    hub = FakeHub()
    moments = []
    for _ in range(5):
        hub.publish("0", "a", "b")
        moments.append(hub.now())
        await asyncio.sleep(10)
    assert await _all(hub, end=moments[2]) == [0, 1, 2, 3, 4, 5]
    assert await _all(hub, end=EventPosition.at_enqueued_time(moments[2])) == [0, 1, 2, 3]
    assert await _all(hub, position=moments[1], end=moments[2] + timedelta(seconds=1)) == [4, 5]


async def test_iterate_without_an_end_gives_events_as_they_come(clock: Any) -> None:
    """Without an end, events come as they are enqueued."""
    hub = FakeHub()
    hub.publish("0", "old")
    async with _reader(hub, position="@latest") as reader:
        await asyncio.sleep(1)
        for number in (1, 2):
            hub.publish("0", "new")
            began = clock.monotonic()
            assert [event.sequence_number for event in await reader.read()] == [number]
            assert clock.monotonic() == began
        assert not reader.is_at_end


async def test_read_of_raw_batches_has_position_and_newest_event() -> None:
    """Raw batches are bounded by what is asked for; the reader knows its place and the partition's newest event."""
    hub = FakeHub()
    hub.publish("0", count=10)
    async with _reader(hub, track_last_enqueued=True) as reader:
        assert reader.position == EventPosition.earliest()
        got: list[bytes] = []
        while len(got) < 6:
            batch = await reader.read_raw(3)
            assert 0 < len(batch) <= 3
            got += batch
        assert [ReceivedEvent(raw).body for raw in got] == [str(number).encode() for number in range(6)]
        assert reader.position == EventPosition.at_offset("fake:5")
        assert reader.last_enqueued is not None
        assert reader.last_enqueued.sequence_number == 9


async def test_read_of_a_reader_that_was_not_opened_says_how_to_open_it() -> None:
    """It is not called closed, can be opened afterwards, and can be used on another loop: it belongs to none yet."""
    hub = FakeHub()
    hub.publish("0", "a")
    reader = _reader(hub)
    for call in (reader.read, reader.read_raw, lambda: anext(aiter(reader))):
        with pytest.raises(ClosedError, match="the HubReader is not open: use it with `async with`"):
            await call()

    def read_elsewhere() -> None:
        async def read() -> None:
            async with reader:
                assert len(await reader.read()) == 1

        asyncio.run(read())

    await asyncio.to_thread(read_elsewhere)
    with pytest.raises(ClosedError, match="the HubReader is closed"):
        await reader.read()


async def test_read_without_events_ends_in_time(clock: Any) -> None:
    """A read with a time to wait comes back empty after it, and nothing is lost."""
    hub = FakeHub()
    async with _reader(hub) as reader:
        began = clock.monotonic()
        assert await reader.read(max_wait_time=5) == []
        assert clock.monotonic() - began == pytest.approx(5)
        assert await reader.read(max_wait_time=0) == []
        hub.publish("0", "a")
        assert len(await reader.read(max_wait_time=5)) == 1


async def test_read_that_is_cancelled_loses_nothing() -> None:
    """Events that come after a cancelled read are given by the next."""
    hub = FakeHub()
    async with _reader(hub) as reader:
        reading = asyncio.create_task(reader.read())
        await asyncio.sleep(1)
        hub.publish("0", "a", "b")
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert [event.sequence_number for event in await reader.read()] == [0, 1]


async def test_read_continues_over_lost_links() -> None:
    """A link lost midway changes nothing in what is read."""
    hub = FakeHub(latency=0.1)
    hub.publish("0", count=1000)
    got: list[int] = []
    async with _reader(hub, end="@latest", prefetch_events=50) as reader:
        async for event in reader:
            got.append(event.sequence_number)
            if event.sequence_number % 150 == 0:
                hub.detach("0", ConnectionLostError("cut"))
    assert got == list(range(1000))


async def test_reader_with_an_owner_level_excludes_others() -> None:
    """A reader with an owner level takes the partition from a shared one, which is notified."""
    hub = FakeHub()
    async with _reader(hub) as shared:
        await asyncio.sleep(1)
        async with _reader(hub, owner_level=3):
            with pytest.raises(ConsumerDisconnectedError):
                await shared.read()
            assert hub.owner_levels("0") == [3]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"partition_id": "77"}, RequestRefusedError),
        ({"consumer_group": "nobody"}, EntityNotFoundError),
        ({"hub": "another"}, EntityNotFoundError),
        ({"position": EventPosition.at_offset("no offset")}, RequestRefusedError),
    ],
)
async def test_read_of_a_wrong_hub_group_partition_or_position_raises(
    options: dict[str, Any], error: type[Exception]
) -> None:
    """A wrong partition, group, hub or position is an error of the first read."""
    async with _reader(FakeHub(), **options) as reader:
        with pytest.raises(error):
            await reader.read()


@pytest.mark.parametrize(
    "options",
    [
        {"end": "12345"},
        {"end": EventPosition.at_offset("12345")},
        {"position": ""},
        {"position": "no offset"},
        {"owner_level": -1},
        {"end": 2.5},
        {"on_data_loss": ""},
    ],
)
def test_reader_settings_that_cannot_work_are_refused(options: dict[str, Any]) -> None:
    """What cannot work is refused before anything is opened, by the option's name."""
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        _reader(FakeHub(), **options)


async def test_read_after_close_raises() -> None:
    """A closed reader has neither link nor task, its transport is closed, and reading says so."""
    before = asyncio.all_tasks()
    hub, transports = FakeHub(), []

    def make() -> FakeTransport:
        transports.append(FakeTransport(hub))
        return transports[-1]

    reader = HubReader(make, ReaderSettings(hub=hub.name, partition_id="0"))
    with pytest.raises(ClosedError):
        await reader.read()
    async with reader:
        await asyncio.sleep(1)
    await reader.aclose()
    with pytest.raises(ClosedError):
        await reader.read()
    assert transports[0].is_closed
    assert hub.owner_levels("0") == []
    assert asyncio.all_tasks() == before


@pytest.mark.parametrize("end", ["@latest", 99, EventPosition.at_sequence_number(100)])
@pytest.mark.parametrize("is_read", [0, 40])
async def test_iterate_over_a_range_whose_rest_was_removed_ends(clock: Any, end: Any, is_read: int) -> None:
    """With the rest of a range gone and nothing new to say so, a reader finds out by management, and ends."""
    hub = FakeHub()
    hub.publish("0", count=100)
    async with _reader(hub, position="-1", end=end, prefetch_events=10) as reader:
        numbers: list[int] = []
        hub.stall("0")
        if is_read:
            hub.resume("0")
        while len(numbers) < is_read:
            numbers += [event.sequence_number for event in await reader.read(10)]
        hub.truncate("0", 100)
        hub.resume("0")
        before = clock.monotonic()
        async with asyncio.timeout(60):
            numbers += [event.sequence_number async for event in reader]
        assert reader.is_at_end
        assert clock.monotonic() - before == pytest.approx(2 * QUIET, abs=1)
        assert numbers == list(range(len(numbers)))
        assert await reader.read() == []


async def test_short_reads_of_a_range_whose_rest_was_removed_end(clock: Any) -> None:
    """Reads that wait for less than it takes to find out come to the end of a range that is gone all the same."""
    hub = FakeHub()
    hub.publish("0", count=10)
    async with _reader(hub, position="-1", end="@latest") as reader:
        hub.truncate("0", 10)
        reads = 0
        while not reader.is_at_end:
            assert await reader.read(max_wait_time=1.0) == []
            reads += 1
            assert reads < 100
        assert reads == pytest.approx(2 * QUIET, abs=2)


async def test_read_of_a_quiet_partition_waits_while_events_may_come(clock: Any) -> None:
    """While something of the range may come, a reader waits however long that takes; refused questions end nothing."""
    hub = FakeHub()
    hub.publish("0", count=10)
    async with _reader(hub, position="-1", end=14) as reader:
        hub.truncate("0", 10)
        hub.refuse(RequestRefusedError("no"), operation="partition", times=20)
        reading = asyncio.ensure_future(reader.read())
        await asyncio.sleep(3600)
        assert not reading.done()
        hub.publish("0", count=5)
        assert [event.sequence_number for event in await reading] == [10, 11, 12, 13, 14]
        assert reader.is_at_end


async def test_read_gives_what_was_sent_before_it_was_removed(clock: Any) -> None:
    """Events that are on their way as the service says that they are gone are given."""
    hub = FakeHub()
    hub.publish("0", count=10)
    hub.stall("0")
    async with _reader(hub, position="-1", end="@latest") as reader:
        reading = asyncio.ensure_future(reader.read())
        await asyncio.sleep(0.1)
        hub.latency = QUIET + 5
        hub.resume("0")
        await asyncio.sleep(0.1)
        hub.latency = 0
        hub.truncate("0", 10)
        assert [event.sequence_number for event in await reading] == list(range(10))
        assert reader.is_at_end


async def test_iterate_to_a_time_whose_rest_was_removed_ends(clock: Any) -> None:
    """A range to a moment ends too, where the partition is empty and its newest event was later than that."""
    hub = FakeHub()
    hub.publish("0", count=5)
    await asyncio.sleep(100)
    moment = hub.now() - timedelta(seconds=50)
    hub.publish("0", count=5)
    async with _reader(hub, position="-1", end=EventPosition.at_enqueued_time(moment)) as reader:
        hub.truncate("0", 10)
        async with asyncio.timeout(60):
            assert [event.sequence_number async for event in reader] == []
        assert reader.is_at_end


async def test_reader_is_watched_as_a_host_is() -> None:
    """Ready once its link was attached, also without events; its lag is known from the first event on."""
    hub = FakeHub()
    hub.publish("0", count=10)
    hub.hang("receive")
    reader = _reader(hub, track_last_enqueued=True)
    assert list(reader.metrics()) == []
    async with reader:
        reading = asyncio.create_task(reader.read(4))
        await asyncio.sleep(1)
        assert reader.health().reasons == ("the reader of partition 0 waits for its link",)
        hub.answer("receive")
        assert [event.sequence_number for event in await reading] == [0, 1, 2, 3]
        assert reader.health().ready
        found = {metric.name: [each.value for each in metric.samples] for metric in reader.metrics()}
        assert found == {
            "eventpump_ready": [1],
            "eventpump_partition_sequence_number": [3],
            "eventpump_partition_lag": [6],
        }
        assert reader.behind() == {"hub": hub.name, "partition_id": "0", "lag": 6}
    assert not reader.health().ready
    async with _reader(FakeHub()) as idle:
        await idle.read(max_wait_time=1)
        assert idle.health().ready
        assert idle.behind() is None
