"""`encode` of producers: what is sent, counted and refused is the encoded event."""

from __future__ import annotations

import asyncio
import gzip
import random
import zlib
from collections.abc import Callable
from typing import Any

import pytest

from eventpump.errors import EventError, EventTooLargeError
from eventpump.eventhubs.codecs import PayloadCodec, event_maker
from eventpump.eventhubs.events import EventData
from eventpump.options.producer import BufferSettings
from eventpump.producer.buffered import HubBufferedProducer
from eventpump.producer.producer import HubProducer
from eventpump.testing.transport import FakeHub, FakeTransport
from tests.support.seeds import seeds

DEFLATE = PayloadCodec("deflate", zlib.compress, zlib.decompress)


def picky(body: bytes) -> bytes:
    """Compress what is not poison."""
    match body:
        case b"raises":
            raise ValueError("no such key")
        case b"text":
            return "text"  # type: ignore[return-value]  # a codec that returns nonsense
        case b"nothing":
            return None  # type: ignore[return-value]  # likewise
    return zlib.compress(body)


PICKY = PayloadCodec("deflate", picky, zlib.decompress)
POISON = (b"raises", b"text", b"nothing")


def _producer(hub: FakeHub, **options: Any) -> HubProducer:
    return HubProducer(FakeTransport(hub), hub.name, rng=random.Random(1), **options)


def _bodies(hub: FakeHub, partition_id: str = "0") -> list[bytes]:
    make = event_maker([DEFLATE], partition_id)
    return [make(event.raw, None).body for event in hub.events(partition_id)]


@pytest.mark.parametrize("idempotent", [False, True])
@pytest.mark.parametrize("given", ["event", "list", "batch", "split"])
async def test_every_way_to_send_encodes_each_event_once(given: str, *, idempotent: bool) -> None:
    """An event, a list, a batch, a list that takes several messages: also where an event does not fit one of them."""
    calls: list[bytes] = []

    def encode(body: bytes) -> bytes:
        calls.append(body)
        return zlib.compress(body)

    hub = FakeHub(partitions=1)
    hub.max_message_size = 700
    events = [EventData(bytes([65 + number]) * 3000) for number in range(20)]
    async with _producer(hub, idempotent=idempotent, encode=PayloadCodec("deflate", encode, zlib.decompress)) as made:
        match given:
            case "event":
                events = events[:1]
                await made.send(events[0], partition_id="0")
            case "list":
                events = events[:3]
                await made.send(events, partition_id="0")
            case "split":
                await made.send(events, partition_id="0", split=True)
            case "batch":
                batch = await made.create_batch(partition_id="0")
                events = [event for event in events if batch.try_add(event)]
                assert 1 < len(events) < 20
                assert batch.size <= 700
                calls = calls[: len(events)]  # the one that did not fit was encoded, too
                await made.send(batch)
    assert _bodies(hub) == calls == [event.body for event in events]
    if idempotent and given != "batch":
        assert [event.published_sequence_number for event in events] == list(range(1, len(events) + 1))


@pytest.mark.parametrize("idempotent", [False, True])
@pytest.mark.parametrize("poison", POISON)
async def test_event_that_cannot_be_encoded_leaves_batch_and_list_usable(poison: bytes, *, idempotent: bool) -> None:
    """Nothing of a refused list is sent, a batch is as it was, and the producer goes on."""
    hub = FakeHub(partitions=1)
    async with _producer(hub, idempotent=idempotent, encode=PICKY) as producer:
        batch = await producer.create_batch(partition_id="0")
        assert batch.try_add(EventData("1"))
        size = batch.size
        with pytest.raises(EventError, match="`encode` of the codec deflate"):
            batch.try_add(EventData(poison))
        assert (batch.count, batch.size) == (1, size)
        assert batch.try_add(EventData("2"))
        events = [EventData("3"), EventData(poison), EventData("4")]
        for split in (False, True):
            with pytest.raises(EventError, match="the event was not sent"):
                await producer.send(events, partition_id="0", split=split)
        assert _bodies(hub) == []
        await producer.send(batch)
        await producer.send([events[0], events[2]], partition_id="0")
    assert _bodies(hub) == [b"1", b"2", b"3", b"4"]


async def test_sizes_are_those_of_the_encoded_event() -> None:
    """What is too large as it is may be sent, and what grows beyond the limit is refused with the size that counts."""
    hub = FakeHub(partitions=1)
    hub.max_message_size = 1000
    async with _producer(hub, encode=DEFLATE) as producer:
        await producer.send(EventData(b"x" * 100_000), partition_id="0")
    async with _producer(hub, encode=PayloadCodec("twice", lambda body: body * 2, bytes)) as producer:
        with pytest.raises(EventTooLargeError) as caught:
            await producer.send(EventData(b"x" * 600), partition_id="0", split=True)
        assert caught.value.size > 1200
    assert _bodies(hub) == [b"x" * 100_000]


@pytest.mark.parametrize("idempotent", [False, True])
@seeds(2, of=5)
async def test_buffered_events_are_encoded_and_refusals_lose_nothing(seed: int, *, idempotent: bool) -> None:
    """A random stream with poison in it: what is accepted arrives, in order, and poison takes no room."""
    rng = random.Random(seed)
    hub = FakeHub(partitions=2)
    expected: dict[str, list[bytes]] = {"0": [], "1": []}
    sent: list[EventData] = []
    settings = BufferSettings(max_events=50, max_batch_events=7)
    producer = HubBufferedProducer(
        _producer(hub, idempotent=idempotent, encode=PICKY),
        settings,
        on_success=lambda events, _: sent.extend(events),
    )
    given: list[EventData] = []
    async with producer:
        for number in range(200):
            partition_id = rng.choice("01")
            body = rng.choice(POISON) if rng.random() < 0.2 else b"%d" % number
            event = EventData(body)
            send: Callable[..., Any] = producer.send
            if body in POISON:
                before = producer.buffered_bytes
                with pytest.raises(EventError, match="`encode`"):
                    producer.send_nowait(event, partition_id=partition_id)
                assert producer.buffered_bytes == before
                with pytest.raises(EventError, match="`encode`"):
                    await send(event, partition_key="k")
            else:
                await send(event, partition_id=partition_id)
                expected[partition_id].append(body)
                given.append(event)
            if rng.random() < 0.05:
                await asyncio.sleep(1)
    assert {each: _bodies(hub, each) for each in "01"} == expected
    assert sorted(map(id, sent)) == sorted(map(id, given))  # callbacks have the events that were given


async def test_routers_see_the_event_as_it_was_given() -> None:
    """What a router decides by is not encrypted for it."""

    class ByBody:
        def route(self, event: EventData, partition_key: str | None, partition_ids: Any) -> str:
            return event.body_as_str()

    hub = FakeHub(partitions=2)
    async with _producer(hub, encode=PayloadCodec("gzip", gzip.compress, gzip.decompress), router=ByBody()) as producer:
        await producer.send(EventData("1"))
    assert [len(hub.events(each)) for each in "01"] == [0, 1]
