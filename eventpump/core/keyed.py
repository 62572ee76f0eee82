"""Which events of a partition may be processed now, where those of one key keep their order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

from eventpump.core.checkpoint import Positioned
from eventpump.core.watermark import Entry, Watermark

_E = TypeVar("_E", bound=Positioned)


@dataclass(frozen=True, slots=True)
class KeyedBounds:
    """How much of a partition may be in hand.

    Args:
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

    Events are `fresh` first. While nothing else is in hand, they may be processed one after the other as they are: the
    first of them is finished by `done += 1`. A handler that does not wait is called so, and no line has to be kept. As
    soon as one of them is not finished at once, `enter` gives it a line, and `sort` all that follow it.

    An event whose key is not known may be of any key: those after it stay fresh until its key is known, or it is
    finished.
    """

    __slots__ = (
        "_accepted",
        "_bounds",
        "_entered",
        "_finished",
        "_is_sorting",
        "_last",
        "_size",
        "_sizes",
        "done",
        "doubtful",
        "fresh",
        "key_error",
        "ready",
        "takes_one",
        "unkeyed",
        "unready",
        "watermark",
    )

    def __init__(self, bounds: KeyedBounds) -> None:
        self._bounds = bounds
        self._last: dict[object, KeyedEntry[_E]] = {}
        self.fresh: list[_E] = []
        """The events that are not sorted yet, behind `done` that are finished. Only to be looked at."""
        self._sizes: list[int] = []
        self.done = 0
        """How many of `fresh` are finished. Others than the first one never are. 0 once anything has an entry."""
        self.ready: deque[KeyedEntry[_E]] = deque()
        """The next event of each key that has one to be taken. Where batches have one event, its first one may be
        removed in place of a call of `take`; otherwise only to be looked at."""
        self.takes_one = bounds.batch == 1
        """Whether batches have one event."""
        self.doubtful: set[_E] = set()
        """Events that are to be `unready` when they are sorted. Add them when they are accepted; few have to be."""
        self.unready: set[KeyedEntry[_E]] = set()
        """Entries that are not to be given to the handler as they are. Each is taken alone."""
        self.unkeyed: KeyedEntry[_E] | None = None
        """The entry of the event whose key is not known, while it is not finished."""
        self.key_error: BaseException | None = None
        """Why its key is not known, until that is handled."""
        self.watermark: Watermark[_E] = Watermark()
        self._accepted = self.watermark.entries
        self._finished = self.watermark.finished.append
        self._entered = 0
        self._size = 0
        self._is_sorting = False

    @property
    def events(self) -> int:
        """Events that are accepted and not finished."""
        return self._entered + len(self.fresh) - self.done

    @property
    def size(self) -> int:
        """The bytes of them."""
        return self._size - sum(self._sizes[: self.done])

    @property
    def unfinished(self) -> list[_E]:
        """Them, in order."""
        return [entry.event for entry in self._accepted if not entry.is_finished] + self.fresh[self.done :]

    @property
    def room(self) -> int:
        """How many events may be added now, as far as their sizes allow (`fitting`)."""
        bounds = self._bounds
        self.advance()
        fresh = len(self.fresh)
        return max(not self.events, min(bounds.events - self.events, bounds.ahead - len(self._accepted) - fresh))

    @property
    def has_room(self) -> bool:
        """Whether anything may be added now."""
        return not self.events or (self.room > 0 and self.size < self._bounds.size)

    @property
    def is_in_order(self) -> bool:
        """Whether the first of `fresh` may be processed as it is, and then the next one."""
        if not self.takes_one or self.doubtful or self.done >= len(self.fresh):
            return False
        self.advance()
        return not self._accepted

    @property
    def can_sort(self) -> bool:
        """Whether `sort` may find something that is ready."""
        return self.unkeyed is None and self.done < len(self.fresh) and not self._is_sorting

    def fitting(self, sizes: list[int]) -> list[int]:
        """Return the sizes of the first events that there is room for: of any one, if nothing is in hand."""
        left = self._bounds.size - self.size
        if sum(sizes) <= left:
            return sizes
        for count, size in enumerate(sizes):
            left -= size
            if left < 0 and (count or self.events):
                return sizes[:count]
        return sizes

    def accept(self, events: Iterable[_E], sizes: Iterable[int]) -> None:
        """Accept the events that follow the last one, with their sizes in bytes. There must be room."""
        sizes = list(sizes)
        self.fresh += events
        self._sizes += sizes
        self._size += sum(sizes)

    def advance(self) -> None:
        """Move the watermark as far as events are finished."""
        count = self.done
        if count:
            self.done = 0
            self.watermark.passed(self.fresh[:count])
            self._size -= sum(self._sizes[:count])
            del self.fresh[:count], self._sizes[:count]
        else:
            self.watermark.advance()

    def enter(self, key: object) -> KeyedEntry[_E]:
        """Return the entry of the first fresh event, while nothing else is in hand (`is_in_order`): it is taken."""
        entry = self._enter(key)
        if key is not None:
            # As in `_forget_key`: one that cannot be hashed any more is of no use to those that follow.
            with suppress(Exception):
                self._last[key] = entry
        return entry

    def enter_unkeyed(self, error: BaseException) -> None:
        """Make `unkeyed` of the first fresh event, for this reason: it is ready, and those after it are not sorted."""
        self.key_error = error
        self.doubtful.discard(self.fresh[self.done])
        self.unkeyed = entry = self._enter(None)
        self.unready.add(entry)
        self.ready.append(entry)

    def resolve(self, key: object) -> None:
        """Give `unkeyed` its place in the line of its key: the next one that is taken, if its key has no other."""
        entry, last = self.unkeyed, None
        assert entry is not None
        if key is not None:
            last = self._last.get(key)
            self._last[key] = entry
        entry.key = key
        self.unkeyed = None
        self.unready.remove(entry)
        if last is None or last.is_finished:
            self.ready.appendleft(entry)
        else:
            last.behind = entry

    def _enter(self, key: object) -> KeyedEntry[_E]:
        self.advance()
        entry: KeyedEntry[_E] = KeyedEntry()
        entry.position, entry.is_finished, entry.key, entry.behind = self.fresh[0], False, key, None
        entry.size = self._sizes[0]
        self._accepted.append(entry)
        self._entered += 1
        del self.fresh[0], self._sizes[0]
        return entry

    def sort(self, key_of: Callable[[_E], object]) -> None:
        """Give each fresh event its place in the line of its key, up to the first one whose key is not known.

        The key of an event is not known if `key_of` raises, or the key when it is hashed or compared.
        """
        if not self.can_sort:
            return
        self.advance()
        # One loop for everything, without a call but for the key: this is what each event costs before its handler.
        ready, lasts, accepted = self.ready.append, self._last, self._accepted.append
        last_of, doubtful = lasts.get, self.doubtful
        make: type[KeyedEntry[_E]] = KeyedEntry
        count = 0
        failure: BaseException | None = None
        self._is_sorting = True  # the function may cause another call
        try:
            for event, size in zip(self.fresh, self._sizes, strict=True):
                try:
                    key = key_of(event)
                    entry = make()
                    entry.position, entry.is_finished, entry.key, entry.size, entry.behind = (
                        event,
                        False,
                        key,
                        size,
                        None,
                    )
                    if key is None:
                        last = None
                    else:
                        last = last_of(key)
                        lasts[key] = entry
                except (KeyboardInterrupt, SystemExit):
                    raise
                except BaseException as error:
                    failure = error
                    break
                # The last one may be finished: a key that is not equal to itself any more cannot be removed.
                if last is None or last.is_finished:
                    ready(entry)
                else:
                    last.behind = entry
                accepted(entry)
                count += 1
                if doubtful and event in doubtful:
                    doubtful.remove(event)
                    self.unready.add(entry)
        finally:
            self._is_sorting = False
            self._entered += count
            del self.fresh[:count], self._sizes[:count]
        if failure is not None:
            self.enter_unkeyed(failure)

    def take(self) -> list[KeyedEntry[_E]]:
        """Take the next events of the key whose turn it is; there must be one. No other is taken of it until they are
        finished."""
        entry = self.ready.popleft()
        batch = [entry]
        limit, unready = self._bounds.batch, self.unready
        while len(batch) < limit and entry.behind is not None:
            if unready and (entry in unready or entry.behind in unready):
                break
            entry = entry.behind
            batch.append(entry)
        return batch

    def finish(self, entry: KeyedEntry[_E]) -> None:
        """Record that an event that was taken is processed, skipped or parked. Those of a batch in their order."""
        assert not entry.is_finished
        entry.is_finished = True
        self._entered -= 1
        self._size -= entry.size
        self._finished(entry)
        if self.unready:
            self.unready.discard(entry)
            if entry is self.unkeyed:
                self.unkeyed = None

    def finish_alone(self, entry: KeyedEntry[_E]) -> None:
        """Record that an event that was taken alone is processed, and let its key take its next turn."""
        entry.is_finished = True
        self._entered -= 1
        self._size -= entry.size
        self._finished(entry)
        if entry.behind is not None:
            self.ready.append(entry.behind)
        elif entry.key is not None:
            self._forget_key(entry)

    def release(self, last: KeyedEntry[_E]) -> None:
        """Let the key of a batch take its next turn, by the batch's last event; all of them are finished."""
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
