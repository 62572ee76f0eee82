"""Where a seek goes on: every position against a partition with gaps, and the text that states where a range ends."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventpump.core.rewind import PositionSearch, UnknownPositionError, end_of_range
from eventpump.eventhubs.events import Checkpoint, EventPosition
from eventpump.interfaces import PartitionProperties

_BEGAN = datetime(2024, 1, 1, tzinfo=UTC)


class _Log:
    """A partition: which numbers it still has, each enqueued at a minute of its own.

    Args:
        kept: The numbers.
        count: How many events there ever were.
    """

    def __init__(self, kept: set[int], count: int) -> None:
        self.kept = sorted(kept)
        self.count = count

    @property
    def facts(self) -> PartitionProperties:
        first = self.kept[0] if self.kept else self.count
        newest = _BEGAN + timedelta(minutes=max(self.count - 1, 0))
        offset = f"o{self.count - 1}" if self.count else "-1"
        return PartitionProperties("hub", "0", first, self.count - 1, offset, newest, not self.kept)

    def read(self, position: EventPosition) -> list[int]:
        """Return the numbers that reading from a position gives."""
        if position.offset == "-1":
            return self.kept
        if position.offset == "@latest":
            return []
        if position.offset is not None:
            place = int(position.offset[1:])
        elif position.sequence_number is not None:
            place = position.sequence_number
        else:
            assert position.enqueued_time is not None
            seconds = (position.enqueued_time - _BEGAN).total_seconds()
            place = int(seconds // 60)
            if seconds % 60:
                return [each for each in self.kept if each > place]
        return [each for each in self.kept if each > place or (position.inclusive and each == place)]


def _found(log: _Log, position: EventPosition) -> Checkpoint:
    search = PositionSearch("0", position, log.facts)
    for _ in range(100):
        if search.found is not None:
            return search.found
        probe = search.probe
        for number in log.read(probe.position)[: probe.limit]:
            if search.received(number, f"o{number}"):
                break
        else:
            search.silent(log.facts)
    raise AssertionError("it does not end")


@st.composite
def _cases(draw: st.DrawFn) -> tuple[_Log, EventPosition]:
    count = draw(st.integers(0, 60))
    kept = draw(st.sets(st.integers(0, count - 1))) if count else set()
    if count and draw(st.booleans()):
        # Compaction never drops the newest event; retention does, with all others.
        kept |= {count - 1}
    elif count:
        kept = set()
    number, inclusive = draw(st.integers(0, max(count - 1, 0))), draw(st.booleans())
    minutes = timedelta(minutes=number, seconds=draw(st.sampled_from([0, 30])))
    positions = [
        EventPosition.earliest(),
        EventPosition.latest(),
        EventPosition.at_sequence_number(number - (not count), inclusive=inclusive),
        EventPosition.at_enqueued_time(_BEGAN + minutes, inclusive=inclusive),
    ]
    if kept:
        positions.append(EventPosition.at_offset(f"o{draw(st.sampled_from(sorted(kept)))}", inclusive=inclusive))
    return _Log(kept, count), draw(st.sampled_from(positions))


@given(_cases())
def test_reader_goes_on_after_the_checkpoint_as_from_the_position(case: tuple[_Log, EventPosition]) -> None:
    """The same events, by the checkpoint's offset and by its number; and the offset is one that the partition has."""
    log, position = case
    found = _found(log, position)
    wanted = log.read(position)
    assert [each for each in log.kept if each > found.sequence_number] == wanted
    assert log.read(EventPosition.at_offset(found.offset)) == wanted
    assert found.offset == "-1" or found.offset == f"o{found.sequence_number}"
    assert found.sequence_number >= log.facts.beginning_sequence_number - 1


@pytest.mark.parametrize(
    "position",
    [EventPosition.at_sequence_number(10), EventPosition.at_sequence_number(11, inclusive=True)],
    ids=str,
)
def test_number_beyond_the_end_is_refused(position: EventPosition) -> None:
    """The next event to come is the last place there is."""
    log = _Log(set(range(10)), 10)
    with pytest.raises(UnknownPositionError, match="sequence number 9"):
        PositionSearch("0", position, log.facts)
    assert _found(log, EventPosition.at_sequence_number(10, inclusive=True)) == Checkpoint("0", "o9", 9)


def test_silence_is_waited_for_once() -> None:
    """A position from which nothing comes, although the partition has newer events, is refused the second time."""
    log = _Log(set(range(10)), 10)
    search = PositionSearch("0", EventPosition.at_offset("other"), log.facts)
    search.silent(log.facts)
    with pytest.raises(UnknownPositionError, match="other"):
        search.silent(log.facts)


def test_what_is_dropped_during_a_search_is_not_waited_for() -> None:
    """The partition is looked at again: the oldest event kept is the next one then."""
    log = _Log(set(range(10)), 10)
    search = PositionSearch("0", EventPosition.at_sequence_number(5), log.facts)
    search.silent(_Log({8, 9}, 10).facts)
    assert search.found == Checkpoint("0", "-1", 7)


def test_where_a_range_ends() -> None:
    """An event at an inclusive end belongs to the range, so that reading goes on after it; the end of all stays."""
    assert end_of_range(EventPosition.at_sequence_number(5, inclusive=True)) == EventPosition.at_sequence_number(5)
    assert end_of_range(EventPosition.at_sequence_number(5)) == EventPosition.at_sequence_number(5, inclusive=True)
    assert end_of_range(EventPosition.latest()) == EventPosition.latest()
