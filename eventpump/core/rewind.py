"""Where a subscription goes on after a seek, and what a replay covers: found from positions and a partition's state.

A seek is stored as a checkpoint: the offset and the sequence number of the event *before* the one that is read next.
A position says only where reading begins, so that event may have to be looked for in the partition.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from eventpump.core.starts import TimedPartitionFacts, at_end, first_number, retained_from
from eventpump.eventhubs.events import LATEST_OFFSET, START_OFFSET, Checkpoint, EventPosition


class UnknownPositionError(ValueError):
    """The partition has no such position."""


@dataclass(frozen=True, slots=True)
class Probe:
    """What to receive in order to find a place: from a position on, until so many events are enough."""

    position: EventPosition
    limit: int


class PositionSearch:
    """Finds the checkpoint after which reading begins as it does from a position.

    While `found` is None, receive from `probe` on and call `received` with each event until it returns true.

    Args:
        partition_id: The partition.
        position: The position.
        facts: The properties of the partition now.

    Raises:
        UnknownPositionError: The position lies beyond the partition's end.
    """

    __slots__ = ("_back", "_before", "_facts", "_first", "_partition_id", "_position", "_was_silent", "found", "probe")

    def __init__(self, partition_id: str, position: EventPosition, facts: TimedPartitionFacts) -> None:
        self._partition_id = partition_id
        self._position = position
        self._facts = facts
        self._first: int | None = None
        self._back = 1
        self._before: Checkpoint | None = None
        self._was_silent = False
        self.found: Checkpoint | None = None
        """The checkpoint; None while it is not found."""
        # The event at an offset is asked for itself, because a checkpoint needs its number.
        inclusive = position.inclusive or position.offset is not None
        self.probe = Probe(replace(position, inclusive=inclusive), 1)
        """What to receive next."""
        self._begins_with(first_number(position, facts))

    def received(self, number: int, offset: str) -> bool:
        """Record an event, in order; return whether the probe has ended: look at `found` and `probe` again."""
        if self._first is None:
            position = self._position
            if position.offset == offset and not position.inclusive:
                self.found = Checkpoint(self._partition_id, offset, number)
            else:
                self._begins_with(number)
            return True
        if number < self._first:
            self._before = Checkpoint(self._partition_id, offset, number)
            if number < self._first - 1:
                return False
        self.found = self._before
        if self.found is None:
            # The numbers just before are missing, as in a compacted hub: begin further back.
            self._back *= 2
            self._look_back()
        return True

    def silent(self, facts: TimedPartitionFacts) -> None:
        """Record that no event came before these facts were read. Raises `UnknownPositionError` for the second time."""
        self._facts = facts
        if self._first is None:
            self._begins_with(first_number(self._position, facts))
        else:
            # What it was to begin with may have been dropped meanwhile.
            self._begins_with(self._first)
        if self.found is None and self._was_silent:
            raise UnknownPositionError(f"no event was received from {self._position} on: is it a position of this hub?")
        self._was_silent = True

    def _begins_with(self, first: int | None) -> None:
        """Go on with the number of the first event to read, if that is known."""
        if first is None:
            return
        facts, end = self._facts, self._facts.last_enqueued_sequence_number + 1
        if first > end:
            raise UnknownPositionError(
                f"{self._position} lies beyond the end: the partition's newest event has sequence number {end - 1}"
            )
        self._first = first
        if first == end or facts.is_empty:
            self.found = at_end(self._partition_id, facts)
        else:
            self._look_back()

    def _look_back(self) -> None:
        assert self._first is not None
        begin = self._first - self._back
        if begin < (kept := retained_from(self._facts)):
            if self._back == 1 or begin + self._back // 2 <= kept:
                # Nothing is kept before it, so that the start of the stream is the same place.
                self.found = Checkpoint(self._partition_id, START_OFFSET, max(self._first, kept) - 1)
                return
            begin = kept
        self.probe = Probe(EventPosition.at_sequence_number(begin, inclusive=True), self._back + 1)


def end_of_range(to: EventPosition) -> EventPosition:
    """Return the position from which reading begins after a range; its end is included if it is inclusive."""
    return to if to.offset == LATEST_OFFSET else replace(to, inclusive=not to.inclusive)


@dataclass(slots=True, eq=False)
class ReplayedRanges:
    """Which events of a partition were received for a replay: no checkpoint is stored for them.

    A replay, and a seek to an earlier place, have a link of their own, and an event's origin ends with the number of
    its link.

    Attributes:
        since: The first link that was opened after the last seek to an earlier place.
        below: Events of links before that, with a sequence number below this one, were delivered before a seek.
    """

    since: int = 0
    below: int = 0
    is_running: bool = field(default=False, init=False)
    _running: int | None = None
    _ended: list[tuple[int, int]] = field(default_factory=list)

    def is_before_seek(self, link: int, number: int) -> bool:
        """Return whether the event with a sequence number, received over a link, was delivered before a seek back."""
        return link < self.since and number < self.below

    def begin(self, link: int) -> None:
        """Record that a replay begins, whose first link has a number."""
        self._running, self.is_running = link, True

    def end(self, next_number: int) -> None:
        """Record that the replay has ended, and that delivery goes on with a sequence number."""
        assert self._running is not None
        self._ended.append((self._running, next_number))
        self._running, self.is_running = None, False

    def has(self, link: int, number: int) -> bool:
        """Return whether the event with a sequence number, received over a link, was received for a replay."""
        if self._running is not None and link >= self._running:
            return True
        return bool(self._ended) and any(link >= first and number < end for first, end in self._ended)
