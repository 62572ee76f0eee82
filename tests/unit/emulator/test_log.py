"""What a partition's log promises."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventpump.amqp.message import Data, Message
from eventpump.emulator.log import (
    BeyondEndError,
    Hub,
    InvalidPositionError,
    PartitionLog,
    Retention,
    enforce_retention,
    group_names,
)
from eventpump.eventhubs.events import EventPosition, ReceivedEvent


def event(body: bytes = b"x") -> bytes:
    return Message(body=Data((body,))).encode()


def filled(*times: int, per_batch: int = 1) -> PartitionLog:
    log = PartitionLog("hub", "0")
    for time_ms in times:
        log.publish(log.number([event()] * per_batch, time_ms))
    return log


def stored(log: PartitionLog) -> list[ReceivedEvent]:
    return [ReceivedEvent(raw) for raw in log.payloads]


@given(st.lists(st.tuples(st.integers(1, 5), st.booleans(), st.integers(0, 5)), max_size=20))
def test_number_gives_gapless_numbers_and_growing_offsets(steps: list[tuple[int, bool, int]]) -> None:
    """Whatever is taken back or dropped, visible numbers are gapless, offsets strictly grow, times never go back."""
    log = PartitionLog("hub", "0")
    seen: list[tuple[int, int, datetime]] = []
    clock = 1000
    for count, commits, dropped in steps:
        clock = clock - 3 if count == 1 else clock + 1
        batch = log.number([event(b"y" * count)] * count, clock)
        if commits:
            log.publish(batch)
            seen += [(e.sequence_number, int(e.offset), e.enqueued_time) for e in stored(log)[-count:]]
        else:
            log.take_back()
        log.drop_oldest(dropped)
        assert log.beginning + len(log.payloads) == log.end
        assert log.size == sum(map(len, log.payloads))
    assert [number for number, _, _ in seen] == list(range(len(seen)))
    assert all(a[1] < b[1] and a[2] <= b[2] for a, b in pairwise(seen))


def test_number_without_publish_is_not_visible() -> None:
    """What is not published cannot be read, nor does it show in the partition's facts."""
    log = filled(1)
    log.number([event()], 2)
    assert log.end == 1
    assert log.facts().last_enqueued_sequence_number == 0
    assert log.locate(EventPosition.latest()) == 1


def test_publish_wakes_the_readers() -> None:
    """Listeners hear of every published batch, once."""
    log = PartitionLog("hub", "0")
    heard: list[int] = []
    log.listeners.add(lambda: heard.append(log.end))
    batch = log.number([event(), event()], 1)
    assert heard == []
    log.publish(batch)
    assert heard == [2]


@pytest.mark.parametrize(
    ("position", "start"),
    [
        (None, 2),
        (EventPosition.earliest(), 2),
        (EventPosition.at_offset("-1", inclusive=True), 2),
        (EventPosition.latest(), 6),
        (EventPosition.at_offset("@latest", inclusive=True), 5),
        (EventPosition.at_offset("0"), 2),
        (EventPosition.at_sequence_number(-1), 2),
        (EventPosition.at_sequence_number(3), 4),
        (EventPosition.at_sequence_number(3, inclusive=True), 3),
        (EventPosition.at_sequence_number(5), 6),
        (EventPosition.at_sequence_number(5, inclusive=True), 5),
        (EventPosition.at_enqueued_time(datetime.fromtimestamp(4, UTC)), 5),
        (EventPosition.at_enqueued_time(datetime.fromtimestamp(4, UTC), inclusive=True), 4),
        (EventPosition.at_enqueued_time(datetime.fromtimestamp(0, UTC)), 2),
        (EventPosition.at_enqueued_time(datetime.fromtimestamp(99, UTC)), 6),
    ],
)
def test_locate_by_each_kind_of_position(position: EventPosition | None, start: int) -> None:
    """Each kind of position finds its event; dropped ones fall to the beginning."""
    log = filled(0, 1000, 2000, 3000, 4000, 5000)
    log.drop_oldest(2)
    assert log.locate(position) == start


def test_locate_an_offset_between_two_events() -> None:
    """An offset is exclusive or inclusive, also when it lies between two events."""
    log = filled(0, 0, 0)
    offsets = [int(e.offset) for e in stored(log)]
    assert log.locate(EventPosition.at_offset(str(offsets[1]))) == 2
    assert log.locate(EventPosition.at_offset(str(offsets[1]), inclusive=True)) == 1
    assert log.locate(EventPosition.at_offset(str(offsets[1] + 1))) == 2
    assert log.locate(EventPosition.at_offset(str(offsets[2]))) == 3


@pytest.mark.parametrize("dropped", [0, 2])
def test_locate_an_offset_beyond_the_end_is_refused(dropped: int) -> None:
    """The refusal names the last offset, also of a partition that dropped everything."""
    log = filled(0, 0)
    last = log.last_offset
    log.drop_oldest(dropped)
    assert log.locate(EventPosition.at_offset(str(last))) == 2
    with pytest.raises(BeyondEndError, match=f"last offset in the system is '{last}'"):
        log.locate(EventPosition.at_offset(str(last + 1)))


def test_locate_a_text_that_is_no_offset_is_refused() -> None:
    """Text that is no offset raises, and does not read from somewhere."""
    with pytest.raises(InvalidPositionError):
        filled(0).locate(EventPosition.at_offset("seven"))


def test_enforce_retention_by_age_drops_whole_events() -> None:
    """What is older than the retention goes, and the beginning moves."""
    log = filled(0, 1000, 2000)
    assert enforce_retention([log], Retention(seconds=1.5), 3000) == [log]
    assert (log.beginning, log.end) == (2, 3)
    assert enforce_retention([log], Retention(seconds=1.5), 3000) == []


def test_enforce_retention_by_size_drops_from_the_largest() -> None:
    """Bytes over the limit go from the largest partition, oldest first."""
    large, small = filled(*[0] * 64), filled(0)
    limit = large.size // 2
    assert enforce_retention([large, small], Retention(size=limit), 0) == [large]
    assert large.size + small.size <= limit
    assert large.end == 64
    assert small.beginning == 0


def test_facts_of_an_empty_partition() -> None:
    """An unused partition says -1 everywhere, and year 1."""
    facts = PartitionLog("hub", "0").facts()
    assert (facts.last_enqueued_sequence_number, facts.last_enqueued_offset, facts.is_empty) == (-1, "-1", True)
    assert facts.last_enqueued_time.year == 1


def test_partition_is_found_by_its_exact_id() -> None:
    """Only the decimal text of an existing partition finds one."""
    hub = Hub("hub", 0, group_names(["g"]), [PartitionLog("hub", str(n)) for n in range(3)])
    assert hub.partition("2") is hub.partitions[2]
    assert [hub.partition(text) for text in ("3", "-1", "02", "x", "", "²")] == [None] * 6
    assert hub.has_group("$DEFAULT")
    assert hub.has_group("G")
    assert not hub.has_group("h")


@pytest.mark.parametrize("partition_id", ["9" * 5000, "0" * 5000, "1_0", "\u0661", " 1", "+1", "1\n"])
def test_partition_of_an_id_that_is_no_number_is_not_found(partition_id: str) -> None:
    """An id beyond Python's limit of digits, or with digits that are not ASCII's, is the id of no partition."""
    hub = Hub("h", 0, group_names(()), [PartitionLog("h", str(number)) for number in range(12)])
    assert hub.partition(partition_id) is None


@pytest.mark.parametrize("offset", ["1_0", " 5", "5 ", "\u0665", "+5", "-", "9" * 5000])
def test_locate_an_offset_with_digits_not_ascii_is_refused(offset: str) -> None:
    """What `int` would take and no service writes is no offset."""
    with pytest.raises(InvalidPositionError):
        filled(1, 2).locate(EventPosition(offset=offset))


@pytest.mark.parametrize("inclusive", [False, True])
@pytest.mark.parametrize(("events", "number"), [(0, 0), (0, 7), (3, 3), (3, 9)])
def test_locate_refuses_a_sequence_number_beyond_the_end(events: int, number: int, inclusive: bool) -> None:
    """A number after the last is refused, also in an empty partition (attach-receiver-sequence-beyond-end)."""
    log = PartitionLog("telemetry", "0")
    for _ in range(events):
        log.publish(log.number([event()], 0))
    text = (
        f"The supplied sequence number '{number}' is invalid. The last sequence number in the system is '{events - 1}'"
    )
    with pytest.raises(BeyondEndError, match=re.escape(text)):
        log.locate(EventPosition.at_sequence_number(number, inclusive=inclusive))


def test_facts_of_a_partition_never_used() -> None:
    """Its first number is -1 (read-partition-never-used), and later that of its first retained event."""
    log = PartitionLog("telemetry", "0")
    assert log.facts().beginning_sequence_number == -1
    log.publish(log.number([event()], 0))
    assert log.facts().beginning_sequence_number == 0
    log.drop_oldest(1)
    assert log.facts().beginning_sequence_number == 1
