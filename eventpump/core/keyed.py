"""Which events of a partition may be processed now, where those of one key keep their order."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, TypeVar, cast

from eventpump.core.checkpoint import Positioned
from eventpump.core.watermark import Entry, Watermark

_E = TypeVar("_E", bound=Positioned)


@dataclass(frozen=True, slots=True)
class KeyedBounds:
    """How much of a partition may be in hand.

    Args:
        events: The most events that are accepted and not finished.
        size: The most bytes of them. One event is accepted whatever its size, if it is the only one.
        ahead: The most events above the watermark, finished or not.
        batch: The most events of a key that are processed in one call.
    """

    events: int
    size: int
    ahead: int
    batch: int


class KeyedEntry(Entry[_E]):
    """An event in a `KeyedQueue`.

    Args:
        event: The event.
        key: Its key; None if it is independent of all others.
        size: Its size, in bytes.
    """

    __slots__ = ("behind", "key", "size")

    def __init__(self, event: _E, key: object, size: int) -> None:
        # Not by a call of the base: there is one of these per event.
        self.position = event
        self.is_finished = False
        self.key = key
        self.size = size
        self.behind: KeyedEntry[_E] | None = None


class KeyedQueue(Generic[_E]):
    """The accepted events of one partition: a line per key, and the watermark over all of them.

    The first event of a line is ready; the next one is when it is finished. So events of one key are taken in order,
    one batch at a time, and those of different keys in any order. Keys take turns.

    Args:
        bounds: How much may be in hand.
    """

    __slots__ = ("_accepted", "_bounds", "_last", "alone", "events", "ready", "size", "watermark")

    def __init__(self, bounds: KeyedBounds) -> None:
        self._bounds = bounds
        self._last: dict[object, KeyedEntry[_E]] = {}
        self.ready: deque[KeyedEntry[_E]] = deque()
        """The next event of each key that has one to be taken. Only to be looked at."""
        self.alone: set[KeyedEntry[_E]] = set()
        """Entries that are taken without others of their key. Add and remove them; few have to be."""
        self.watermark: Watermark[_E] = Watermark()
        self._accepted = self.watermark.entries
        self.events = 0
        """Events that are accepted and not finished."""
        self.size = 0
        """The bytes of them."""

    @property
    def newest(self) -> KeyedEntry[_E]:
        """The entry added last, which the watermark has not passed."""
        return cast("KeyedEntry[_E]", self._accepted[-1])

    @property
    def room(self) -> int:
        """How many events may be added now, as far as their sizes allow (`room_in_bytes`)."""
        bounds = self._bounds
        return max(not self.events, min(bounds.events - self.events, bounds.ahead - len(self._accepted)))

    @property
    def room_in_bytes(self) -> int:
        """How large they may be together. A single event may be larger if nothing is in hand."""
        return self._bounds.size - self.size

    def add(self, event: _E, key: object, size: int) -> KeyedEntry[_E]:
        """Accept the event that follows the last one. There must be room.

        Args:
            event: The event.
            key: Its key; None if it is independent of all others.
            size: Its size, in bytes.

        Returns:
            Its entry.

        Raises:
            Exception: What the key raised when it was hashed or compared. Nothing is added.
        """
        entry = KeyedEntry(event, key, size)
        if key is None:
            self.ready.append(entry)
        else:
            last = self._last.get(key)
            self._last[key] = entry
            # The last one may be finished: a key that is not equal to itself any more cannot be removed.
            if last is None or last.is_finished:
                self.ready.append(entry)
            else:
                last.behind = entry
        self.events += 1
        self.size += size
        self._accepted.append(entry)
        return entry

    def take(self) -> list[KeyedEntry[_E]]:
        """Take the next events of the key whose turn it is; there must be one. No other is taken of it until they are
        finished."""
        entry = self.ready.popleft()
        batch = [entry]
        limit, alone = self._bounds.batch, self.alone
        while len(batch) < limit and entry.behind is not None:
            if alone and (entry in alone or entry.behind in alone):
                break
            entry = entry.behind
            batch.append(entry)
        return batch

    def finish(self, entry: KeyedEntry[_E]) -> None:
        """Record that an event that was taken is processed, skipped or parked. Those of a batch in their order."""
        self.events -= 1
        self.size -= entry.size
        self.watermark.finish(entry)

    def release(self, last: KeyedEntry[_E]) -> None:
        """Let the key of a batch take its next turn.

        Args:
            last: The last event of the batch; all of them are finished.
        """
        if last.behind is not None:
            self.ready.append(last.behind)
        elif last.key is not None:
            with suppress(Exception):
                if self._last[last.key] is last:
                    del self._last[last.key]
