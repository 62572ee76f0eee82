"""The watermark: it never passes an unfinished event, and holds no more than positions of finished ones."""

from __future__ import annotations

import gc
import weakref

from hypothesis import given
from hypothesis import strategies as st

from eventpump.core.watermark import Entry, Watermark
from eventpump.errors import EventError


class _Event:
    def __init__(self, number: int, *, is_readable: bool = True) -> None:
        self._number = number
        self._is_readable = is_readable

    @property
    def sequence_number(self) -> int:
        if not self._is_readable:
            raise EventError("the message lacks the annotations of an event")
        return self._number

    @property
    def offset(self) -> str:
        return f"at-{self.sequence_number}"


def _entry(event: _Event) -> Entry[_Event]:
    entry: Entry[_Event] = Entry()
    entry.position, entry.is_finished = event, False
    return entry


def _finish(watermark: Watermark[_Event], entry: Entry[_Event]) -> None:
    entry.is_finished = True
    watermark.finished.append(entry)


@given(order=st.permutations(range(12)), unreadable=st.sets(st.integers(0, 11)))
def test_watermark_is_the_end_of_what_is_finished(order: list[int], unreadable: set[int]) -> None:
    """In whatever order events are finished; its position is that of the last one whose position can be read."""
    watermark: Watermark[_Event] = Watermark()
    entries = [_entry(_Event(number, is_readable=number not in unreadable)) for number in range(12)]
    for entry in entries:
        watermark.entries.append(entry)
    finished: set[int] = set()
    for number in order:
        _finish(watermark, entries[number])
        watermark.advance()
        finished.add(number)
        end = next(each for each in range(13) if each not in finished)
        assert watermark.count == end
        assert len(watermark.entries) == 12 - end
        readable = [each for each in range(end) if each not in unreadable]
        position = watermark.position
        assert (position is None) == (not readable)
        if position is not None:
            assert (position.sequence_number, position.offset) == (readable[-1], f"at-{readable[-1]}")


def test_finished_events_above_the_watermark_are_not_held() -> None:
    """One slow event does not keep the bodies of all that follow it in memory."""
    watermark: Watermark[_Event] = Watermark()
    entries = [_entry(_Event(number)) for number in range(50)]
    held = [weakref.ref(entry.position) for entry in entries if entry.position is not None]
    for entry in entries:
        watermark.entries.append(entry)
    for entry in entries[1:]:
        _finish(watermark, entry)
    watermark.advance()
    gc.collect()
    assert [number for number, each in enumerate(held) if each() is not None] == [0]
    assert watermark.count == 0


def test_events_finished_in_order_are_passed_without_entries() -> None:
    """The position is that of the last one that can be read; entries follow them."""
    watermark: Watermark[_Event] = Watermark()
    watermark.passed([_Event(0), _Event(1), _Event(2, is_readable=False)])
    watermark.passed([_Event(3, is_readable=False)])
    assert watermark.count == 4
    assert watermark.position is not None
    assert watermark.position.sequence_number == 1
    entry = _entry(_Event(4))
    watermark.entries.append(entry)
    _finish(watermark, entry)
    watermark.advance()
    assert watermark.count == 5
    assert watermark.position.sequence_number == 4
