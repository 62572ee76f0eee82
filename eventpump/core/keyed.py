"""Which events of a partition may be processed now, where those of one key keep their order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
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
    """An event in a `KeyedQueue`, which sets its attributes: a call of `__init__` for each would cost more.

    Attributes:
        key: Its key; None if it is independent of all others.
        size: Its size, in bytes.
        behind: The next event of its key, if there is one by now.
    """

    __slots__ = ("behind", "key", "size")

    key: object
    size: int
    behind: KeyedEntry[_E] | None


class KeyedQueue(Generic[_E]):
    """The accepted events of one partition: a line per key, and the watermark over all of them.

    The first event of a line is ready; the next one is when it is finished. So events of one key are taken in order,
    one batch at a time, and those of different keys in any order. Keys take turns.

    Args:
        bounds: How much may be in hand.
    """

    __slots__ = (
        "_accepted",
        "_bounds",
        "_finished",
        "_last",
        "alone",
        "events",
        "ready",
        "size",
        "takes_one",
        "watermark",
    )

    def __init__(self, bounds: KeyedBounds) -> None:
        self._bounds = bounds
        self._last: dict[object, KeyedEntry[_E]] = {}
        self.ready: deque[KeyedEntry[_E]] = deque()
        """The next event of each key that has one to be taken. Where batches have one event, its first one may be
        removed in place of a call of `take`; otherwise only to be looked at."""
        self.takes_one = bounds.batch == 1
        """Whether batches have one event."""
        self.alone: set[KeyedEntry[_E]] = set()
        """Entries that are taken without others of their key. Add and remove them; few have to be."""
        self.watermark: Watermark[_E] = Watermark()
        self._accepted = self.watermark.entries
        self._finished = self.watermark.finished.append
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
        """How many events may be added now, as far as their sizes allow (`fitting`)."""
        bounds = self._bounds
        self.watermark.advance()
        return max(not self.events, min(bounds.events - self.events, bounds.ahead - len(self._accepted)))

    @property
    def has_room(self) -> bool:
        """Whether anything may be added now."""
        return not self.events or (self.room > 0 and self.size < self._bounds.size)

    def fitting(self, sizes: list[int]) -> list[int]:
        """Return the sizes of the first events that there is room for: of one, whatever it is, if nothing is in hand.

        Args:
            sizes: The sizes of events, in bytes, of which there is `room` for all.
        """
        left = self._bounds.size - self.size
        if sum(sizes) <= left:
            return sizes
        for count, size in enumerate(sizes):
            left -= size
            if left < 0 and (count or self.events):
                return sizes[:count]
        return sizes

    def accept(
        self, events: Iterable[_E], sizes: Iterable[int], key_of: Callable[[_E], object]
    ) -> list[tuple[KeyedEntry[_E], BaseException]]:
        """Accept the events that follow the last one. There must be room.

        Args:
            events: The events.
            sizes: Their sizes, in bytes.
            key_of: Returns the key of an event; None if it is independent of all others.

        Returns:
            The entries of events whose keys are not known, and what `key_of` raised, or the key when it was hashed or
            compared. They are independent of all others.

        Raises:
            KeyboardInterrupt, SystemExit: As raised; the events before are accepted.
        """
        unkeyed: list[tuple[KeyedEntry[_E], BaseException]] = []
        # One loop for everything, without a call but for the key: this is what each event costs before its handler.
        ready, lasts, accepted = self.ready.append, self._last, self._accepted.append
        last_of = lasts.get
        make: type[KeyedEntry[_E]] = KeyedEntry
        count = total = 0
        for event, size in zip(events, sizes, strict=True):
            try:
                key = key_of(event)
                entry = make()
                entry.position, entry.is_finished, entry.key, entry.size, entry.behind = event, False, key, size, None
                if key is None:
                    ready(entry)
                else:
                    last = last_of(key)
                    lasts[key] = entry
                    # The last one may be finished: a key that is not equal to itself any more cannot be removed.
                    if last is None or last.is_finished:
                        ready(entry)
                    else:
                        last.behind = entry
            except (KeyboardInterrupt, SystemExit):
                self.events += count
                self.size += total
                raise
            except BaseException as error:
                entry = make()
                entry.position, entry.is_finished, entry.key, entry.size, entry.behind = event, False, None, size, None
                ready(entry)
                unkeyed.append((entry, error))
            accepted(entry)
            count += 1
            total += size
        self.events += count
        self.size += total
        return unkeyed

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
        assert not entry.is_finished
        entry.is_finished = True
        self.events -= 1
        self.size -= entry.size
        self._finished(entry)

    def finish_alone(self, entry: KeyedEntry[_E]) -> None:
        """Record that an event that was taken alone is processed, and let its key take its next turn.

        As `finish` and `release`, in one call.
        """
        entry.is_finished = True
        self.events -= 1
        self.size -= entry.size
        self._finished(entry)
        if entry.behind is not None:
            self.ready.append(entry.behind)
        elif entry.key is not None:
            self._forget_key(entry)

    def release(self, last: KeyedEntry[_E]) -> None:
        """Let the key of a batch take its next turn.

        Args:
            last: The last event of the batch; all of them are finished.
        """
        if last.behind is not None:
            self.ready.append(last.behind)
        elif last.key is not None:
            self._forget_key(last)

    def _forget_key(self, last: KeyedEntry[_E]) -> None:
        try:  # not `suppress`, which costs more than this
            if self._last[last.key] is last:
                del self._last[last.key]
        except Exception:  # noqa: S110 - a key that cannot be found again keeps its last entry, which is finished
            pass
