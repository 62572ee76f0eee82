"""The producer against the emulator: exact batches, keys and targets, and what a lost connection leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

import pytest

from eventpump import BufferedProducer, EventData, EventProducer, PartitionReader, RetryOptions
from eventpump.emulator.faults import DetachLink, DropConnection, Hold, LinkRole, Performative, Refuse
from eventpump.emulator.server import Emulator
from eventpump.errors import ClosedError, EntityNotFoundError, EventTooLargeError, RequestRefusedError, ServiceError
from eventpump.eventhubs.hashing import partition_for_key
from eventpump.testing.sink import PATIENCE
from tests.ways import Served, Way, over_both

pytestmark = over_both()

HUB = "telemetry"
QUICK = RetryOptions(base_delay=0.01, max_delay=0.05)


@pytest.fixture
async def emulator(way: Way) -> AsyncIterator[Served]:
    """A service of four partitions. When the test is over no task is left."""
    async with Emulator({HUB: 4}, tls=way.tls) as started:
        yield Served(started, way.options)
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.fixture
async def producer(emulator: Served) -> AsyncIterator[EventProducer]:
    """A producer that retries quickly."""
    async with EventProducer(emulator.connection_string, HUB, retry=QUICK, **emulator.options) as made:
        yield made


async def everything(emulator: Served) -> dict[str, list[bytes]]:
    return {str(number): [event.body for event in await emulator.read(HUB, str(number))] for number in range(4)}


async def test_send_of_an_event_a_list_and_a_batch_is_one_message_each(
    emulator: Served, producer: EventProducer
) -> None:
    """One event, several, and a batch each go as one message, in order; nothing at all sends nothing."""
    await producer.send(EventData(b"0"), partition_id="2")
    await producer.send([EventData(b"1"), EventData(b"2")], partition_id="2")
    await producer.send([], partition_id="2")
    batch = await producer.create_batch(partition_id="2")
    await producer.send(batch)
    assert batch.try_add(EventData(b"3"))
    assert batch.try_add(EventData("4"))
    await producer.send(batch)
    assert await everything(emulator) == {"0": [], "1": [], "2": [b"0", b"1", b"2", b"3", b"4"], "3": []}
    assert (await producer.get_partition_properties("2")).last_enqueued_sequence_number == 4
    assert await producer.get_partition_ids() == ("0", "1", "2", "3")


async def test_send_with_a_key_goes_where_the_hash_says(emulator: Served, producer: EventProducer) -> None:
    """Events of a key, alone, listed or in a batch, all end in the partition of the service's hash, with their key."""
    keys = ["key0", "key1", "alphabet", "131", "é", "日本", ""]
    for key in keys:
        await producer.send(EventData(key + "-a"), partition_key=key)
        await producer.send([EventData(key + "-b"), EventData(key + "-c")], partition_key=key)
        batch = await producer.create_batch(partition_key=key)
        assert batch.try_add(EventData(key + "-d"))
        await producer.send(batch)
    expected: dict[str, list[bytes]] = {str(number): [] for number in range(4)}
    for key in keys:
        expected[str(partition_for_key(key, 4))] += [f"{key}-{letter}".encode() for letter in "abcd"]
    assert await everything(emulator) == expected
    partition_id = str(partition_for_key("key0", 4))
    async with PartitionReader(
        emulator.connection_string, HUB, partition_id=partition_id, end="@latest", **emulator.options
    ) as reader:
        async for event in reader:
            assert event.partition_key == event.body_as_str().rpartition("-")[0]


async def test_send_without_a_target_spreads_events(emulator: Served, producer: EventProducer) -> None:
    """The gateway takes events without partition or key, a message at a time to each partition."""
    for number in range(8):
        await producer.send([EventData(b"%d" % number), EventData(b"%d" % number)])
    assert [len(bodies) for bodies in (await everything(emulator)).values()] == [4, 4, 4, 4]


@pytest.mark.parametrize("key", [None, "a-key"])
async def test_send_of_a_full_batch_succeeds_and_a_byte_more_does_not(
    emulator: Served, producer: EventProducer, key: str | None
) -> None:
    """A batch filled to its last byte is stored; it reports its size exactly; one byte more does not go in, or out."""
    batch = await producer.create_batch(partition_key=key)
    assert batch.max_size_in_bytes == 1024 * 1024
    while batch.try_add(EventData(bytes(1000))):
        pass
    room = batch.max_size_in_bytes - batch.size
    overhead = _overhead(key, 300)
    filler = room - overhead if room > 300 + overhead else None
    if filler is None:
        # Too little is left for an exact filler: leave some events out.
        smaller = await producer.create_batch(partition_key=key)
        for _ in range(batch.count - 1):
            assert smaller.try_add(EventData(bytes(1000)))
        batch = smaller
        filler = batch.max_size_in_bytes - batch.size - overhead
    assert not batch.try_add(EventData(bytes(filler + 1)))
    assert batch.try_add(EventData(bytes(filler)))
    assert batch.size == batch.max_size_in_bytes == len(batch.seal().message)
    assert not batch.try_add(EventData(b""))
    await producer.send(batch)
    counts = [len(bodies) for bodies in (await everything(emulator)).values()]
    assert sum(counts) == batch.count
    events = [EventData(bytes(1000)) for _ in range(batch.count - 1)]
    with pytest.raises(EventTooLargeError) as caught:
        await producer.send([*events, EventData(bytes(filler + 1))], partition_key=key)
    assert (caught.value.size, caught.value.limit) == (batch.max_size_in_bytes + 1, batch.max_size_in_bytes)
    assert [len(bodies) for bodies in (await everything(emulator)).values()] == counts


def _overhead(key: str | None, size: int) -> int:
    """Return what an event of more than so many bytes takes beside them in a batch."""
    return len(EventData(bytes(size)).encode(key)) - size + 8


async def test_send_of_an_event_above_the_limit_is_refused(producer: EventProducer) -> None:
    """An event larger than the limit is refused with its size, before anything is sent."""
    batch = await producer.create_batch(max_size_in_bytes=1000)
    with pytest.raises(EventTooLargeError):
        batch.try_add(EventData(bytes(1000)))
    assert (len(batch), batch.size) == (0, 0)
    assert batch.try_add(EventData(bytes(900)))


async def test_send_to_an_unknown_partition_or_hub_raises_at_once(emulator: Served, producer: EventProducer) -> None:
    """An unknown partition or hub is an error at once, without retries."""
    with pytest.raises(RequestRefusedError):
        await producer.send(EventData(b"x"), partition_id="77")
    async with EventProducer(emulator.connection_string, "nothere", **emulator.options) as other:
        with pytest.raises(EntityNotFoundError):
            await other.send(EventData(b"x"))


@pytest.mark.parametrize("was_stored", [False, True])
async def test_send_over_a_dropped_connection_loses_nothing(
    emulator: Served, producer: EventProducer, was_stored: bool
) -> None:
    """Cut before or after storing, a message is sent again: stored once, or twice, never not at all."""
    await producer.send(EventData(b"0"), partition_id="0")
    emulator.faults.add(DropConnection(stored=was_stored), role=LinkRole.PRODUCER)
    await producer.send(EventData(b"1"), partition_id="0")
    await producer.send(EventData(b"2"), partition_id="0")
    found = [event.body for event in await emulator.read(HUB, "0")]
    assert found == [b"0", *[b"1"] * (2 if was_stored else 1), b"2"]


async def test_sends_that_overlap_lose_nothing_under_faults(emulator: Served, producer: EventProducer) -> None:
    """Of many sends at once, over all partitions, with links and connections lost meanwhile, none is lost."""
    for after in (20, 60):
        emulator.faults.add(DetachLink(), role=LinkRole.PRODUCER, after=after)
    emulator.faults.add(DropConnection(stored=True), role=LinkRole.PRODUCER, after=150)
    bodies = [b"%d" % number for number in range(400)]
    slots = asyncio.Semaphore(50)

    async def send(number: int) -> None:
        async with slots:
            await producer.send(EventData(bodies[number]), partition_id=str(number % 4))

    await asyncio.gather(*map(send, range(400)))
    found = [body for partition in (await everything(emulator)).values() for body in partition]
    assert set(found) == set(bodies)
    assert len(found) < 550


async def test_close_fails_sends_that_wait(emulator: Served) -> None:
    """`aclose` ends sends at once: in flight, being attached, or waiting for a retry; later ones are refused."""
    slow = RetryOptions(base_delay=60.0, max_delay=60.0)
    producer = EventProducer(emulator.connection_string, HUB, retry=slow, **emulator.options)
    await producer.send(EventData(b"x"), partition_id="0")
    hold = emulator.faults.add(Hold(), role=LinkRole.PRODUCER, partition="0")
    attach = emulator.faults.add(Hold(), on=Performative.ATTACH, role=LinkRole.PRODUCER, partition="1")
    drop = emulator.faults.add(DetachLink(), role=LinkRole.PRODUCER, partition="2")
    sends = [
        asyncio.ensure_future(producer.send(EventData(b"x"), partition_id=partition)) for partition in ("0", "1", "2")
    ]
    await _until(producer, lambda: hold.fired + attach.fired + drop.fired == 3)
    await producer.get_properties()
    async with asyncio.timeout(PATIENCE):
        await producer.aclose()
        outcomes = await asyncio.gather(*sends, return_exceptions=True)
    assert all(isinstance(outcome, ServiceError) for outcome in outcomes)
    with pytest.raises(ClosedError):
        await producer.send(EventData(b"x"), partition_id="0")
    await producer.aclose()


async def _until(producer: EventProducer, found: Callable[[], bool]) -> None:
    """Wait for something at the service; each question to it is a round trip."""
    async with asyncio.timeout(PATIENCE):
        while not found():
            await producer.get_properties()


@pytest.mark.parametrize("is_buffered", [False, True], ids=["plain", "buffered"])
@pytest.mark.parametrize("ended_by", ["disabled", "recreated"])
async def test_send_to_a_hub_that_was_away_opens_a_new_link(emulator: Served, is_buffered: bool, ended_by: str) -> None:
    """A hub that is disabled and enabled, or recreated, ends the link for good; later sends use a new one."""
    sender = BufferedProducer if is_buffered else EventProducer
    async with sender(emulator.connection_string, HUB, retry=QUICK, **emulator.options) as producer:

        async def send(body: bytes) -> None:
            if isinstance(producer, EventProducer):
                await producer.send(EventData(body), partition_id="0")
            else:
                await producer.send_and_wait(EventData(body), partition_id="0")

        await send(b"before")
        if ended_by == "disabled":
            emulator.faults.add(DetachLink("com.microsoft:entity-disabled", "disabled"), role=LinkRole.PRODUCER)
            away = emulator.faults.add(
                Refuse("com.microsoft:entity-disabled"), on=Performative.ATTACH, role=LinkRole.PRODUCER, count=None
            )
            for _ in range(3):
                with pytest.raises(ServiceError, match=r"disabled|refused by a fault"):
                    await send(b"lost")
            away.remove()
        else:
            emulator.emulator.recreate_hub(HUB)
            with suppress(ServiceError):  # the link's end may still be on its way
                await send(b"first")
        await send(b"after")
        await send(b"again")
        assert [event.body for event in await emulator.read(HUB, "0")][-2:] == [b"after", b"again"]
