"""A message that cannot be decoded, or has no body: its handler sees that, and its partition goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from eventpump.amqp.sections import NULL_DATA, encode_data, section
from eventpump.amqp.types import Timestamp
from eventpump.consumer.keyed import KeyedProcessor
from eventpump.consumer.processor import PartitionContext
from eventpump.core.checkpoint import CheckpointPolicy
from eventpump.errors import EventError
from eventpump.eventhubs.events import ReceivedEvent
from eventpump.eventhubs.names import ENQUEUED_TIME, OFFSET, SEQUENCE_NUMBER
from eventpump.options.base import RetryOptions
from eventpump.testing.transport import FakeHub
from tests.support.fleet import Fleet, RecordingProcessor

Events = Sequence[ReceivedEvent]


def _broken(number: int, offset: str) -> bytes:
    """Make a message as a service annotates it, whose data section holds text."""
    named = {SEQUENCE_NUMBER: number, OFFSET: offset, ENQUEUED_TIME: Timestamp(number)}
    return section(0x72, named) + section(0x75, "x")


def _fleet(*, sound: int, broken: int, has_place: bool = True) -> Fleet:
    hub = FakeHub(partitions=1)
    hub.publish("0", count=sound + broken)
    partition = hub.partition("0")
    for number in range(sound, sound + broken):
        offset = ReceivedEvent(partition.raw[number]).offset
        partition.raw[number] = _broken(number, offset) if has_place else b"\x00\x53\x75\xa1\x01x"
    return Fleet(hub)


async def _checkpoint(context: PartitionContext, events: Events) -> None:
    await context.checkpoint()


@pytest.mark.parametrize(
    "policy", [CheckpointPolicy.manual(), CheckpointPolicy(every_events=1)], ids=["asked", "policy"]
)
async def test_checkpoint_past_an_undecodable_event_is_stored(policy: CheckpointPolicy) -> None:
    """A handler that does not read such an event stores a checkpoint past it, and is called once."""
    async with _fleet(sound=3, broken=1) as fleet:
        processor = RecordingProcessor(fleet.record, on_events=_checkpoint if policy.every_events is None else None)
        await fleet.start("a", processor, checkpoint_policy=policy)
        await asyncio.sleep(60)
        assert fleet.record.errors == []
        assert [each.numbers for each in fleet.record.deliveries] == [(0, 1, 2, 3)]
        assert fleet.checkpoint("0") == 3


async def test_reading_an_undecodable_event_raises_event_error() -> None:
    """What cannot be decoded raises EventError where it is read; caught there, the event is passed as others are."""
    refused: list[int] = []

    async def read(context: PartitionContext, events: Events) -> None:
        for event in events:
            try:
                _ = event.body
            except EventError:
                refused.append(event.sequence_number)
        await context.checkpoint()

    async with _fleet(sound=2, broken=2) as fleet:
        await fleet.start("a", RecordingProcessor(fleet.record, on_events=read), max_batch_size=1)
        await asyncio.sleep(60)
        assert refused == [2, 3]
        assert fleet.checkpoint("0") == 3


async def test_link_lost_behind_an_undecodable_event_reopens_after_it() -> None:
    """A link that is lost behind such an event is opened again after it."""
    async with _fleet(sound=1, broken=1) as fleet:
        await fleet.start("a", RecordingProcessor(fleet.record, on_events=_checkpoint))
        await asyncio.sleep(10)
        fleet.hub.detach("0")
        fleet.hub.publish("0", count=1)
        await asyncio.sleep(60)
        assert [number for each in fleet.record.deliveries for number in each.numbers] == [0, 1, 2]
        assert fleet.checkpoint("0") == 2


async def test_checkpoint_of_an_event_without_a_place_stores_the_one_before() -> None:
    """Where not even its annotations can be read, the last event before it is stored, and the next one after it."""
    seen: list[int] = []

    async def count(context: PartitionContext, events: Events) -> None:
        seen.append(len(events))

    async with _fleet(sound=2, broken=1, has_place=False) as fleet:

        class Counting(RecordingProcessor):
            async def process_events(self, context: PartitionContext, events: Events) -> None:
                await count(context, events)

        policy = CheckpointPolicy(every_events=1)
        await fleet.start("a", Counting(fleet.record), checkpoint_policy=policy)
        await asyncio.sleep(30)
        assert (seen, fleet.checkpoint("0")) == ([3], 1)
        fleet.hub.publish("0", count=1)
        partition = fleet.hub.partition("0")
        assert len(partition.raw) == 4
        await asyncio.sleep(30)
        assert (sum(seen), fleet.checkpoint("0")) == (4, 3)


@pytest.mark.parametrize("is_keyed", [False, True], ids=["serial", "keyed"])
async def test_event_whose_body_is_null_is_handled_once(*, is_keyed: bool) -> None:
    """It is read as an empty body, and neither it nor the events around it are repeated."""
    hub = FakeHub(partitions=1)
    hub.publish("0", *"xxxxx")
    raw = hub.partition("0").raw
    raw[2] = raw[2].removesuffix(encode_data(b"x")) + NULL_DATA
    read: list[tuple[bytes, object]] = []

    async def note(context: PartitionContext, events: Events) -> None:
        read.extend((event.body, event.value) for event in events)

    async with Fleet(hub) as fleet:
        if is_keyed:
            processor = KeyedProcessor(note, key=lambda event: event.body)
            await fleet.start("a", processor, handler_retry=RetryOptions(max_retries=0), on_retries_exhausted="skip")
        else:
            await fleet.start("a", RecordingProcessor(fleet.record, on_events=note))
        await asyncio.sleep(60)
        assert sorted(read, key=repr) == [(b"", None), *[(b"x", b"x")] * 4]
        assert fleet.record.errors == []
