"""The contract of `EventSource`, as a pytest class.

Subclass it under a name that starts with `Test`, in a module with a fixture `source` that gives a source whose
partition "0" holds at least 20 events, and with pytest-asyncio in auto mode. For assertions that explain themselves
call, before the import, `pytest.register_assert_rewrite("eventpump.testing.conformance.source")`.
"""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

from eventpump.errors import EventPumpError, ServiceError, SourceEndedError
from eventpump.eventhubs.events import EventPosition, ReceivedEvent
from eventpump.testing.sink import PATIENCE, RecordingSink

if TYPE_CHECKING:
    from eventpump.interfaces import EventSource, SourceLink

PARTITION = "0"
EARLIEST = EventPosition.earliest()


class SourceContract:
    """The guarantees of `EventSource` and `SourceLink`."""

    async def test_properties_are_those_of_the_events(self, source: EventSource) -> None:
        """The first and the last event are the ones that the properties name."""
        hub = await source.partitions()
        assert PARTITION in hub.partition_ids
        assert hub.created_at.tzinfo is not None
        facts = await source.partition_properties(PARTITION)
        events = await _all(source)
        assert len(events) >= 20
        assert (facts.partition_id, facts.is_empty) == (PARTITION, False)
        assert facts.beginning_sequence_number <= events[0].sequence_number
        assert facts.last_enqueued_sequence_number == events[-1].sequence_number
        assert facts.last_enqueued_offset == events[-1].offset
        assert facts.last_enqueued_time == events[-1].enqueued_time

    async def test_every_partition_has_properties(self, source: EventSource) -> None:
        """What `partitions` lists can be asked about and opened."""
        for partition_id in (await source.partitions()).partition_ids:
            assert (await source.partition_properties(partition_id)).partition_id == partition_id
            await (await source.open(partition_id, EARLIEST, RecordingSink())).aclose()

    async def test_link_starts_without_credit(self, source: EventSource) -> None:
        """Nothing arrives before credit is set."""
        silent = RecordingSink()
        link = await source.open(PARTITION, EARLIEST, silent)
        await _all(source)
        assert silent.batches == []
        link.set_credit(3)
        assert len(await silent.received(3)) == 3

    async def test_credit_is_never_exceeded(self, source: EventSource) -> None:
        """Credit is what the source may deliver from now on, and new credit replaces the old."""
        sink = RecordingSink()
        link = await source.open(PARTITION, EARLIEST, sink)
        link.set_credit(2)
        await sink.received(2)
        await _all(source)
        assert len(sink.events) == 2
        link.set_credit(9)
        link.set_credit(4)
        await sink.received(6)
        await _all(source)
        assert len(sink.events) == 6

    async def test_credit_of_zero_stops(self, source: EventSource) -> None:
        """Set back to 0 before anything was delivered, nothing is; later credit continues where it stopped."""
        sink = RecordingSink()
        link = await source.open(PARTITION, EARLIEST, sink)
        link.set_credit(1)
        await sink.received(1)
        link.set_credit(0)
        await _all(source)
        assert len(sink.events) == 1
        link.set_credit(2)
        await sink.received(3)
        assert _numbers(sink) == _numbers_of(await _all(source))[:3]

    async def test_events_come_once_in_order_in_steps_of_any_size(self, source: EventSource) -> None:
        """Whatever the credit is, each event comes once, in order."""
        expected = _numbers_of(await _all(source))
        assert expected == sorted(set(expected))
        sink, step = RecordingSink(), 1
        link = await source.open(PARTITION, EARLIEST, sink)
        while len(sink.events) < len(expected):
            wanted = min(len(sink.events) + step, len(expected))
            link.set_credit(wanted - len(sink.events))
            await sink.received(wanted)
            step = step % 7 + 1
        assert _numbers(sink) == expected
        assert all(sink.batches)

    async def test_the_sink_is_not_called_within_set_credit(self, source: EventSource) -> None:
        """A sink that sets credit from within its own call is not called again before that call has returned."""
        depth, most = 0, 0
        sink = RecordingSink()
        links: list[SourceLink] = []

        class Granting:
            def messages(self, batch: list[bytes]) -> None:
                nonlocal depth, most
                depth += 1
                most = max(most, depth)
                sink.messages(batch)
                links[0].set_credit(1)
                depth -= 1

            def detached(self, error: EventPumpError) -> None:
                sink.detached(error)

        links.append(await source.open(PARTITION, EARLIEST, Granting()))
        links[0].set_credit(1)
        await sink.received(20)
        assert most == 1
        await links[0].aclose()

    async def test_the_list_is_the_sinks_own(self, source: EventSource) -> None:
        """Emptied by the sink, nothing is missing for another reader."""
        expected = _numbers_of(await _all(source))

        class Emptying(RecordingSink):
            def messages(self, batch: list[bytes]) -> None:
                super().messages(list(batch))
                batch.clear()

        sink = Emptying()
        link = await source.open(PARTITION, EARLIEST, sink)
        link.set_credit(len(expected))
        await sink.received(len(expected))
        assert _numbers_of(await _all(source)) == expected == _numbers(sink)

    async def test_positions_of_every_kind(self, source: EventSource) -> None:
        """A sequence number, an offset or a time is continued after, or with it if it is inclusive."""
        events = await _all(source)
        for index in (0, 7, len(events) - 2):
            event, after = events[index], _numbers_of(events[index + 1 :])
            at = [event.sequence_number, *after]
            number, offset, moment = event.sequence_number, event.offset, event.enqueued_time
            assert await _first(source, EventPosition.at_sequence_number(number)) == after[0]
            assert await _first(source, EventPosition.at_sequence_number(number, inclusive=True)) == at[0]
            assert await _first(source, EventPosition.at_offset(offset)) == after[0]
            assert await _first(source, EventPosition.at_offset(offset, inclusive=True)) == at[0]
            first_then = next(each for each in events if each.enqueued_time >= moment).sequence_number
            assert await _first(source, EventPosition.at_enqueued_time(moment, inclusive=True)) == first_then
            if events[-1].enqueued_time > moment:
                first_later = next(each for each in events if each.enqueued_time > moment).sequence_number
                assert await _first(source, EventPosition.at_enqueued_time(moment)) == first_later

    async def test_an_offset_that_is_none_is_refused(self, source: EventSource) -> None:
        """An offset that the source never returned is an error, at once or at the end of the link, never a guess."""
        sink = RecordingSink()
        try:
            link = await source.open(PARTITION, EventPosition.at_offset("no such offset"), sink)
        except EventPumpError:
            return
        link.set_credit(100)
        await sink.ended()
        assert sink.events == []

    async def test_an_unknown_partition_is_refused(self, source: EventSource) -> None:
        """Reading its properties and opening a link both fail."""
        for call in (
            source.partition_properties("no such partition"),
            source.open("no such partition", EARLIEST, RecordingSink()),
        ):
            try:
                await call
            except ServiceError:
                continue
            raise AssertionError("there is no such partition")

    async def test_close_ends_delivery_without_an_error(self, source: EventSource) -> None:
        """After `aclose` the sink is not called, whatever credit there was. Closing twice is fine."""
        sink = RecordingSink()
        link = await source.open(PARTITION, EARLIEST, sink)
        link.set_credit(1)
        await sink.received(1)
        link.set_credit(1000)
        await link.aclose()
        seen = len(sink.events)
        await link.aclose()
        await _all(source)
        assert (len(sink.events), sink.errors) == (seen, [])

    async def test_links_are_independent(self, source: EventSource) -> None:
        """Two links read the same partition at paces of their own."""
        one, other = RecordingSink(), RecordingSink()
        first = await source.open(PARTITION, EARLIEST, one)
        second = await source.open(PARTITION, EARLIEST, other)
        first.set_credit(3)
        second.set_credit(8)
        await one.received(3)
        await other.received(8)
        await first.aclose()
        second.set_credit(5)
        await other.received(13)
        assert len(one.events) == 3
        await second.aclose()

    async def test_whatever_a_reader_does_each_event_comes_once_in_order(self, source: EventSource) -> None:
        """With random credit, closed at random, and opened again after the last event by its offset or number."""
        expected = _numbers_of(await _all(source))
        for seed in range(4):
            rng, seen, position = random.Random(seed), list[int](), EARLIEST
            while len(seen) < len(expected):
                sink = RecordingSink()
                link = await source.open(PARTITION, position, sink)
                while rng.random() < 0.8 and len(seen) + len(sink.events) < len(expected):
                    before, credit = len(sink.events), rng.choice([1, 2, 17, 200])
                    link.set_credit(credit)
                    left = len(expected) - len(seen) - before
                    await sink.received(before + rng.randint(1, min(credit, left)))
                    assert len(sink.events) <= before + credit
                    if rng.random() < 0.3:
                        break
                    await sink.received(before + min(credit, left))
                await link.aclose()
                seen += _numbers(sink)
                if sink.events:
                    last = sink.events[-1]
                    by_number = EventPosition.at_sequence_number(last.sequence_number)
                    position = rng.choice([EventPosition.at_offset(last.offset), by_number])
            assert seen == expected

    async def test_an_open_that_is_cancelled_leaves_nothing(self, source: EventSource) -> None:
        """After a cancelled `open` the sink is not called, and the source still works."""
        sink = RecordingSink()
        opening = asyncio.ensure_future(source.open(PARTITION, EARLIEST, sink))
        await asyncio.sleep(0)
        opening.cancel()
        await asyncio.wait({opening})
        if not opening.cancelled():
            await opening.result().aclose()
        assert len(await _all(source)) >= 20
        assert sink.batches == []
        assert sink.errors == []

    async def test_closing_the_source_ends_its_links_without_an_error(self, source: EventSource) -> None:
        """It may be closed more than once; no event follows."""
        sink = RecordingSink()
        link = await source.open(PARTITION, EARLIEST, sink)
        link.set_credit(1)
        await sink.received(1)
        await source.aclose()
        await source.aclose()
        seen = len(sink.events)
        link.set_credit(100)
        for _ in range(10):
            await asyncio.sleep(0)
        assert len(sink.events) == seen
        await link.aclose()


def _numbers(sink: RecordingSink) -> list[int]:
    return _numbers_of(sink.events)


def _numbers_of(events: list[ReceivedEvent]) -> list[int]:
    return [event.sequence_number for event in events]


async def _all(source: EventSource) -> list[ReceivedEvent]:
    """Read everything that the partition holds now."""
    facts = await source.partition_properties(PARTITION)
    sink = RecordingSink()
    link = await source.open(PARTITION, EARLIEST, sink)
    count = facts.last_enqueued_sequence_number - facts.beginning_sequence_number + 1
    link.set_credit(count)
    await sink.until(
        lambda: (
            bool(sink.errors)
            or (bool(sink.events) and sink.events[-1].sequence_number >= facts.last_enqueued_sequence_number)
        )
    )
    assert all(isinstance(error, SourceEndedError) for error in sink.errors)
    await link.aclose()
    return sink.events


async def _first(source: EventSource, position: EventPosition) -> int:
    """Return the number of the first event from a position."""
    sink = RecordingSink()
    async with asyncio.timeout(PATIENCE):
        link = await source.open(PARTITION, position, sink)
        link.set_credit(1)
        await sink.received(1)
        await link.aclose()
    return sink.events[0].sequence_number
