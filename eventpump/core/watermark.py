"""How far a partition is processed whose events are finished in any order."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Generic, TypeVar, cast

from eventpump.core.checkpoint import Positioned
from eventpump.errors import EventError


class Place:
    """The position of an event, without the event."""

    __slots__ = ("offset", "sequence_number")

    def __init__(self, offset: str, sequence_number: int) -> None:
        self.offset = offset
        self.sequence_number = sequence_number


_E = TypeVar("_E", bound=Positioned)


class Entry(Generic[_E]):
    """An event from its acceptance until the watermark has passed it. What accepts it sets its attributes.

    Attributes:
        position: The event; once it is finished, at most its position.
        is_finished: Whether it is processed, skipped or parked.
    """

    __slots__ = ("is_finished", "position")

    position: _E | Place | None
    is_finished: bool

    @property
    def event(self) -> _E:
        """The event, which is not finished."""
        assert not self.is_finished
        return cast("_E", self.position)


class Watermark(Generic[_E]):
    """The end of the part of a partition in which every event is finished.

    Events are accepted in the order of the partition and finished in any order. The watermark never passes an event
    that is not finished. It moves when `advance` is called, for many events at a time; of a finished event above it
    only the position is held then.
    """

    __slots__ = ("count", "entries", "finished", "position")

    def __init__(self) -> None:
        self.entries: deque[Entry[_E]] = deque()
        """The events above it, finished or not. Append the one that follows the last one accepted."""
        self.finished: list[Entry[_E]] = []
        """Those finished since the last `advance`. Append one, once, when its `is_finished` is set."""
        self.count = 0
        """How many events it has passed."""
        self.position: Positioned | None = None
        """The position of the last of them whose position can be read."""

    def passed(self, events: Sequence[_E]) -> None:
        """Pass events that follow the last one passed, and were finished in order. There must be no entries."""
        assert not self.entries
        self.count += len(events)
        self._reached(events)

    def advance(self) -> None:
        """Pass what is finished."""
        finished, entries = self.finished, self.entries
        if not finished:
            return
        passed: list[_E | Place] = []
        count = len(entries)
        while entries and entries[0].is_finished:
            entry = entries.popleft()
            if entry.position is not None:
                passed.append(entry.position)
                entry.position = None
        self.count += count - len(entries)
        self._reached(passed)
        for entry in finished:
            if (event := entry.position) is not None:
                entry.position = Place(event.offset, event.sequence_number) if _is_readable(event) else None
        finished.clear()

    def _reached(self, passed: Sequence[_E | Place]) -> None:
        for position in reversed(passed):
            if _is_readable(position):
                self.position = position
                break  # otherwise the position of a later event covers it


def _is_readable(position: Positioned) -> bool:
    try:
        position.sequence_number  # noqa: B018 - whether it can be read is the question
    except EventError:
        return False
    return True
