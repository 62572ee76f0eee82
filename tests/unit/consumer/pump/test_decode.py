"""`decode` of hosts and readers: events are decoded once, and one that cannot be goes by the failure policy."""

from __future__ import annotations

import asyncio
import random
import zlib
from collections.abc import Sequence
from typing import Any

import pytest

from eventpump.consumer.processor import PartitionContext
from eventpump.consumer.reader.reader import HubReader
from eventpump.core.checkpoint import CheckpointPolicy
from eventpump.errors import DecodeError, ProcessorFailedError
from eventpump.eventhubs.codecs import PayloadCodec
from eventpump.eventhubs.events import EventData, ReceivedEvent
from eventpump.eventhubs.parked import parked_facts
from eventpump.options.consumer import Park, ReaderSettings
from eventpump.producer.producer import HubProducer
from eventpump.reports import EventParked, EventSkipped, ProcessorFailed
from eventpump.testing.transport import FakeHub, FakeTransport
from tests.support.fleet import Fleet, Record, RecordingProcessor
from tests.support.seeds import seeds

Events = Sequence[ReceivedEvent]
EACH = CheckpointPolicy(every_events=1)
PLAIN, PACKED, BROKEN = "plain", "packed", "broken"


class Counting:
    """A codec that counts what it decodes."""

    def __init__(self) -> None:
        self.decoded: list[bytes] = []
        self.codec = PayloadCodec("deflate", zlib.compress, self._decode)

    def _decode(self, body: bytes) -> bytes:
        self.decoded.append(body)
        return zlib.decompress(body)


async def _publish(hub: FakeHub, *kinds: str) -> None:
    """Publish events of these kinds, whose body is their number."""
    async with HubProducer(FakeTransport(hub), hub.name) as producer:
        for number, kind in enumerate(kinds):
            body = str(number).encode()
            match kind:
                case "packed":
                    event = EventData(zlib.compress(body), content_encoding="deflate")
                case "broken":
                    event = EventData(body, content_encoding="deflate")
                case _:
                    event = EventData(body)
            await producer.send(event, partition_id="0")


def _reading(read: list[str]) -> Any:
    async def handle(context: PartitionContext, events: Events) -> None:
        read.extend([event.body_as_str() for event in events])

    return handle


@seeds(4, of=10)
async def test_reader_decodes_old_and_new_events(seed: int) -> None:
    """A random mixture; what cannot be decoded raises where it is read, and the rest is read nevertheless."""
    rng = random.Random(seed)
    kinds = rng.choices([PLAIN, PACKED, BROKEN], k=40)
    hub = FakeHub(partitions=1)
    await _publish(hub, *kinds)
    options: dict[str, Any] = {"end": "@latest", "decode": Counting().codec}
    settings = ReaderSettings(hub=hub.name, partition_id="0", **options)
    found: list[str] = []
    async with HubReader(lambda: FakeTransport(hub), settings) as reader:
        async for event in reader:
            kind = kinds[event.sequence_number]
            assert ("content-encoding" in event.system_properties) is (kind != PLAIN)
            if kind == BROKEN:
                with pytest.raises(DecodeError) as caught:
                    _ = event.body
                assert (caught.value.partition_id, caught.value.sequence_number) == ("0", event.sequence_number)
            else:
                assert event.body == str(event.sequence_number).encode()
            found.append(kind)
    assert found == kinds


async def test_subscriptions_share_what_is_decoded() -> None:
    """Three of them and a second look: each event is decoded once."""
    hub, counting = FakeHub(partitions=1), Counting()
    async with Fleet(hub) as fleet:
        read: dict[str, list[str]] = {"default": [], "alerts": [], "archive": []}
        host = fleet.host(
            "a", RecordingProcessor(fleet.record, on_events=_reading(read["default"])), decode=counting.codec
        )
        for name in ("alerts", "archive"):
            await host.subscribe(name, RecordingProcessor(Record(), on_events=_reading(read[name])))
        fleet.runs["a"] = asyncio.create_task(host.run())
        await asyncio.sleep(5)
        await _publish(hub, *[PACKED] * 50)
        await asyncio.sleep(5)
        assert set(map(tuple, read.values())) == {tuple(map(str, range(50)))}
        assert len(counting.decoded) == 50


@seeds(2, of=5)
async def test_undecodable_events_are_skipped_without_a_retry(seed: int) -> None:
    """By `on_retries_exhausted`, though retries are unlimited; all others are processed and the checkpoint passes."""
    kinds = random.Random(seed).choices([PACKED, BROKEN, PLAIN], [6, 1, 2], k=40)
    hub = FakeHub(partitions=1)
    await _publish(hub, *kinds)
    read: list[str] = []
    processor = RecordingProcessor(Record(), on_events=_reading(read))
    async with Fleet(hub) as fleet:
        options: dict[str, Any] = {"on_retries_exhausted": "skip", "checkpoint_policy": EACH, "max_batch_size": 10}
        await fleet.start("a", processor, decode=Counting().codec, **options)
        await asyncio.sleep(5)
        broken = [number for number, kind in enumerate(kinds) if kind == BROKEN]
        skipped = fleet.reported("a", EventSkipped)
        assert [each.sequence_number for each in skipped] == broken
        assert all(type(each.error) is DecodeError for each in skipped)
        assert all(each.delay is None for each in fleet.reported("a", ProcessorFailed))
        assert sorted(set(map(int, read))) == [number for number in range(40) if number not in broken]
        assert fleet.checkpoint("0") == 39


async def test_undecodable_event_is_parked_as_it_was_received() -> None:
    """Encoded, and marked so: it can be decoded once the codec is mended."""
    hub, elsewhere = FakeHub(partitions=1), FakeHub("parked", 1)
    await _publish(hub, PACKED, BROKEN, PACKED)
    async with HubProducer(FakeTransport(elsewhere), "parked") as sender, Fleet(hub) as fleet:
        options: dict[str, Any] = {"on_retries_exhausted": Park(sender), "decode": Counting().codec}
        await fleet.start("a", RecordingProcessor(Record(), on_events=_reading([])), **options)
        await asyncio.sleep(5)
        assert [each.sequence_number for each in fleet.reported("a", EventParked)] == [1]
    (parked,) = elsewhere.events("0")
    assert (parked.body, parked.system_properties["content-encoding"]) == (b"1", "deflate")
    facts = parked_facts(parked)
    assert facts is not None
    assert facts.error == "eventpump.DecodeError" or facts.error.endswith(".DecodeError")


async def test_undecodable_event_stops_a_host_that_does_not_pass_over_it() -> None:
    """With the defaults: loudly, at once, and nothing is lost."""
    hub = FakeHub(partitions=1)
    await _publish(hub, PACKED, BROKEN, PACKED)
    async with Fleet(hub) as fleet:
        read: list[str] = []
        processor = RecordingProcessor(Record(), on_events=_reading(read))
        await fleet.start("a", processor, decode=Counting().codec, checkpoint_policy=EACH, max_batch_size=1)
        with pytest.raises(ProcessorFailedError) as caught:
            async with asyncio.timeout(60):
                await fleet.runs["a"]
        assert isinstance(caught.value.__cause__, DecodeError)
        assert read == ["0"]
        assert fleet.checkpoint("0") == 0


@pytest.mark.parametrize(("partition_id", "number"), [("0", 99), ("1", 0), (None, 99), (None, None)])
async def test_what_cannot_be_decoded_elsewhere_is_retried(partition_id: str | None, number: int | None) -> None:
    """A handler that reads another event, of a hub that mends itself, does not make its own event undecodable."""
    hub, read, left = FakeHub(partitions=1), list[str](), [2]
    await _publish(hub, PLAIN)

    async def handle(context: PartitionContext, events: Events) -> None:
        if left[0]:
            left[0] -= 1
            raise DecodeError(partition_id, number, "it is of another hub")
        read.extend([event.body_as_str() for event in events])

    async with Fleet(hub) as fleet:
        processor = RecordingProcessor(Record(), on_events=handle)
        await fleet.start("a", processor, on_retries_exhausted="skip", checkpoint_policy=EACH)
        await asyncio.sleep(60)
        assert fleet.reported("a", EventSkipped) == []
        assert all(each.delay is not None for each in fleet.reported("a", ProcessorFailed))
        assert read == ["0"]
        assert fleet.checkpoint("0") == 0
