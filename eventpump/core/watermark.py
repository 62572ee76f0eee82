"""How far a partition is processed whose events are finished in any order."""

from __future__ import annotations

from collections import deque
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
    """An event from its acceptance until the watermark has passed it.

    Args:
        event: The event.
    """

    __slots__ = ("is_finished", "position")

    def __init__(self, event: _E) -> None:
        self.position: _E | Place | None = event
        """The event; once it is finished, at most its position."""
        self.is_finished = False

    @property
    def event(self) -> _E:
        """The event, which is not finished."""
        assert not self.is_finished
        return cast("_E", self.position)


class Watermark(Generic[_E]):
    """The end of the part of a partition in which every event is finished.

    Events are accepted in the order of the partition and finished in any order. The watermark never passes an event
    that is not finished. Of a finished event above it only the position is held.
    """

    __slots__ = ("count", "entries", "position")

    def __init__(self) -> None:
        self.entries: deque[Entry[_E]] = deque()
        """The events above it, finished or not. Append the one that follows the last one accepted."""
        self.count = 0
        """How many events it has passed."""
        self.position: Positioned | None = None
        """The position of the last of them whose position can be read."""

    def finish(self, entry: Entry[_E]) -> None:
        """Record, once per event, that it is processed, skipped or parked. The watermark passes what it can."""
        assert not entry.is_finished
        entry.is_finished = True
        position = entry.position
        assert position is not None
        entries = self.entries
        if entries[0] is not entry:
            try:
                entry.position = Place(position.offset, position.sequence_number)
            except EventError:
                entry.position = None
            return
        entries.popleft()
        try:
            position.sequence_number  # noqa: B018 - whether it can be read is the question
            self.position = position
        except EventError:
            pass  # the position of a later event covers it
        self.count += 1
        while entries and entries[0].is_finished:
            passed = entries.popleft()
            self.count += 1
            if passed.position is not None:
                self.position = passed.position
