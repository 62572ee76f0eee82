"""Streams: parts of a partition's events, chosen by their keys or by a filter, and looked up once per event."""

from __future__ import annotations

import heapq
import inspect
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from types import MethodType, NoneType
from typing import Any, Generic, Protocol, TypeVar

_T = TypeVar("_T")

_PLAIN_KEYS = frozenset({str, int, NoneType, bytes, bool, float, tuple})
"""Types of keys that are not awaitable, for which that need not be looked into."""


class Selection(Generic[_T]):
    """Which items belong to a stream: those with certain keys, or those that a filter passes.

    Args:
        function: Returns an item's key, or, where there are no keys, whether it belongs to the stream.
        keys: The keys of the stream; None for a filter.
    """

    __slots__ = ("function", "identity", "keys")

    def __init__(self, function: Callable[[_T], object], keys: Iterable[Hashable] | None = None) -> None:
        self.function = function
        self.keys = None if keys is None else frozenset(keys)
        self.identity = _identity(function)
        """Equal for selections by key whose keys are computed once for all of them."""

    def matches(self, item: _T) -> bool:
        """Call the function, and return whether an item belongs to the stream."""
        result = self.function(item)
        if self.keys is None:
            return _as_bool(result)
        hash(result)  # a set would be looked up although it is not a key
        return result in self.keys or _is_unknown_key(result)


def _identity(function: Callable[..., object]) -> Hashable:
    """Return what two references to the same function have in common: each access to a method makes a new object."""
    if isinstance(function, MethodType):
        return id(function.__self__), id(function.__func__)
    return id(function)


def is_plain_function(function: object) -> bool:
    """Return whether something can be called, and returns its result and neither a coroutine nor a generator."""
    if not callable(function):
        return False
    # An object with a `__call__` is as that method is, and a partial as what it calls.
    called = (function, type(function).__call__, getattr(function, "func", None))
    checks = (inspect.iscoroutinefunction, inspect.isasyncgenfunction, inspect.isgeneratorfunction)
    return not any(check(each) for check in checks for each in called)


def takes_one_argument(function: Callable[..., object]) -> bool:
    """Return whether a function can be called with one argument; also if only calling it would show that."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some built-in functions have none
        return True
    try:
        signature.bind(None)
    except TypeError:
        return False
    return True


def _as_bool(result: object) -> bool:
    _refuse_awaitable(result)
    return bool(result)


def _is_unknown_key(key: object) -> bool:
    """Return False for a key that no stream has. Raises `TypeError` if it is none."""
    if type(key) not in _PLAIN_KEYS:
        _refuse_awaitable(key)
    return False


def _refuse_awaitable(result: object) -> None:
    if inspect.isawaitable(result):
        if inspect.iscoroutine(result):
            result.close()
        raise TypeError("the function returned a coroutine: it must be a plain function, and return its result")


class Piece:
    """Messages that the same cursors have in hand.

    Attributes:
        hands: How many cursors have them in hand.
        readers: The streams that have not read them yet, for which they are still held.
    """

    __slots__ = ("hands", "position", "size")
    readers: Sequence[object] = ()

    def __init__(self, size: int, position: int) -> None:
        self.size = size
        self.position = position
        self.hands = 0


class Match(Piece, Generic[_T]):
    """An item that belongs to streams, and the cursors that have not read it yet."""

    __slots__ = ("item", "readers")

    def __init__(self, item: _T, size: int, position: int) -> None:
        self.size = size
        self.position = position
        self.hands = 0
        self.item = item
        self.readers: list[StreamCursor[_T]] = []


class _Group(Generic[_T]):
    """The cursors with one key function, or the one with a filter."""

    __slots__ = ("by_key", "cursors", "function")

    def __init__(self, selection: Selection[_T]) -> None:
        self.function = selection.function
        self.cursors: list[StreamCursor[_T]] = []
        self.by_key: dict[object, list[StreamCursor[_T]]] | None = None if selection.keys is None else {}


class StreamIndex(Generic[_T]):
    """Finds the cursors that an item is for: one call per key function and item, and one look-up.

    The functions are the user's. Whatever they raise or return, nothing is raised here: an item for which a function
    fails is given to all cursors that have it, marked as one for which that is in doubt.
    """

    __slots__ = (
        "_alarms",
        "_groups",
        "_has_begun",
        "_last",
        "_made",
        "_newest_number",
        "_next",
        "_number",
        "_skips_below",
        "cursors",
        "newest",
    )

    def __init__(self, number: Callable[[_T], int | None]) -> None:
        self._number = number
        self._groups: dict[Hashable, _Group[_T]] = {}
        self._alarms: list[tuple[int, int, StreamCursor[_T]]] = []
        self._made = 0
        self._has_begun = False
        self._next: int | None = None
        self._newest_number = -1
        self._last: int | None = None  # what the newest item seen counts as
        self._skips_below = 0
        self.cursors: list[StreamCursor[_T]] = []
        """All cursors, in the order in which they were added."""
        self.newest: _T | None = None
        """The last item seen whose number can be read."""

    def add(self, cursor: StreamCursor[_T]) -> None:
        """Look for a cursor's items from now on."""
        self.cursors.append(cursor)
        selection = cursor.selection
        # A filter is asked for its own cursor only, even where two have the same.
        identity = id(cursor) if selection.keys is None else ("keys", selection.identity)
        group = self._groups.setdefault(identity, _Group(selection))
        group.cursors.append(cursor)
        if group.by_key is not None and selection.keys is not None:
            for key in selection.keys:
                group.by_key.setdefault(key, []).append(cursor)
        self.skip_below(cursor.since or 0)

    def skip_below(self, number: int) -> None:
        """Called when a cursor is to be given no items below a sequence number, which it has as its `since`."""
        self._skips_below = max(self._skips_below, number)

    def remove(self, cursor: StreamCursor[_T]) -> None:
        """Look for a cursor's items no more."""
        self.cursors.remove(cursor)
        for identity, group in list(self._groups.items()):
            if cursor in group.cursors:
                group.cursors.remove(cursor)
                for key in cursor.selection.keys or ():
                    assert group.by_key is not None
                    group.by_key[key].remove(cursor)
                    if not group.by_key[key]:
                        del group.by_key[key]
                if not group.cursors:
                    del self._groups[identity]

    def wake_at(self, cursor: StreamCursor[_T], position: int) -> None:
        """Wake a cursor when the cache has come to a position, whether the items are for it or not."""
        self._made += 1
        heapq.heappush(self._alarms, (position, self._made, cursor))

    def number_of(self, item: _T) -> int | None:
        """Return an item's sequence number; None if it cannot be read."""
        return self._number(item)

    def has_passed(self, number: int) -> bool:
        """Return whether the items below a sequence number were seen."""
        return self._newest_number + 1 >= number

    def route(
        self, items: Sequence[_T], raw: Sequence[bytes], position: int
    ) -> tuple[list[Match[_T]], Iterable[StreamCursor[_T]]]:
        """Give items to the cursors they are for; return those that are for any, in order, and the cursors to wake."""
        # First all calls of the user's functions, which may close cursors: what is below is in one piece.
        hits: list[tuple[int, list[StreamCursor[_T]], BaseException | None]] = []
        groups = list(self._groups.values())
        for group in groups:
            if group.by_key is None:
                _ask_filter(group, items, hits)
            else:
                _look_up(group, group.by_key, items, hits)
        numbers = self._numbers_to_skip(items)
        woken = dict.fromkeys(self._follow(items, position))
        found: dict[int, Match[_T]] = {}
        for place, cursors, error in hits:
            match = found.get(place)
            if match is None:
                match = found[place] = Match(items[place], len(raw[place]), position + place)
            readers = match.readers
            for cursor in cursors:
                if numbers is not None and _is_before(numbers[place], cursor.since):
                    continue
                if not cursor.unread:
                    woken[cursor] = None
                cursor.unread.append(match)
                readers.append(cursor)
                if error is not None:
                    cursor.doubts[match.position] = error
        self._wake_due(position + len(items), woken)
        places = sorted(found) if len(groups) > 1 else found
        return [match for place in places if (match := found[place]).readers], woken

    def rescan(
        self, cursor: StreamCursor[_T], items: Iterable[tuple[int, _T, int]], known: dict[int, Match[_T]]
    ) -> None:
        """Add the items in the cache that match a new cursor's selection to those that it has not read."""
        expected = cursor.since
        held = list(items)
        counted = self._counted([item for _, item, _ in held], None)
        if held and counted[0] is None and self._last is not None:  # none of them can be read
            counted = [self._last - place for place in reversed(range(len(held)))]
        for (position, item, size), counts_as in zip(held, counted, strict=True):
            if _is_before(counts_as, cursor.since):
                continue
            number = self._number(item)
            if number is not None and expected is not None and number > expected:
                cursor.gaps.append((position, expected, number - 1))
            expected = None if number is None else number + 1  # after one that cannot be read, a gap is not seen
            error: BaseException | None = None
            try:
                is_match = cursor.selection.matches(item)
            except BaseException as failure:
                is_match, error = True, _kept(failure)
            if is_match:
                match = known.get(position)
                if match is None:
                    match = known[position] = Match(item, size, position)
                cursor.unread.append(match)
                match.readers.append(cursor)
                if error is not None:
                    cursor.doubts[position] = error

    def begin_after(self, items: Iterable[_T]) -> None:
        """Record items, in order, that had been received before there was any cursor."""
        received = list(items)
        for item, counts_as in zip(received, self._counted(received, None), strict=True):
            number = self._number(item)
            self._next = None if number is None else number + 1
            self._last = counts_as
            self._has_begun = True
            if number is not None:
                self.newest, self._newest_number = item, number

    def _follow(self, items: Sequence[_T], position: int) -> Iterable[StreamCursor[_T]]:
        """Find sequence numbers that are missing before or in a batch. Return the cursors that have to know."""
        count = len(items)
        first, last = self._number(items[0]), self._number(items[-1])
        gaps: list[tuple[int, int, int]] = []
        affected: list[StreamCursor[_T]] = []
        if first is not None:
            if not self._has_begun:
                for cursor in self.cursors:
                    if cursor.since is not None and cursor.since < first:
                        cursor.gaps.append((position, cursor.since, first - 1))
                        affected.append(cursor)
            elif self._next is not None and first > self._next:
                gaps.append((position, self._next, first - 1))
        self._has_begun = True
        self._last = last if last is not None else self._counted(items, self._last)[-1]
        if first is None or last is None or last - first + 1 != count:
            before = first
            for place, item in enumerate(items):
                number = self._number(item)
                if number is not None and before is not None and number > before + 1:
                    gaps.append((position + place, before + 1, number - 1))
                before = number
                if number is not None:
                    self.newest, self._newest_number = item, number
        else:
            self.newest, self._newest_number = items[-1], last
        self._next = None if last is None else last + 1
        for place, begin, end in gaps:
            for cursor in self.cursors:
                begins = begin if cursor.since is None else max(begin, cursor.since)
                if begins <= end:
                    cursor.gaps.append((place, begins, end))
                    affected.append(cursor)
        return affected

    def _numbers_to_skip(self, items: Sequence[_T]) -> list[int | None] | None:
        """Return the numbers of a batch, see `_counted`, if some of it may lie before what a cursor begins with.

        Called before `_follow`.
        """
        if not self._skips_below:
            return None
        numbers = self._counted(items, self._last)
        last = numbers[-1]
        if last is not None and last >= self._skips_below:
            self._skips_below = 0
        return numbers

    def _counted(self, items: Sequence[_T], before: int | None) -> list[int | None]:
        """Return the numbers of items; one that cannot be read counts as the number after the one before it.

        Those without one before count backwards from the first that can be read. If none can, their numbers are None:
        such an item may be one that a cursor begins with, and is not skipped.

        Args:
            before: What the item before them counts as; None if that is not known.
        """
        numbers: list[int | None] = []
        for item in items:
            number = self._number(item)
            if number is None:
                number = None if before is None else before + 1
            elif before is None:
                numbers = [number - distance for distance in range(len(numbers), 0, -1)]
            numbers.append(number)
            before = number
        return numbers

    def _wake_due(self, end: int, woken: dict[StreamCursor[_T], None]) -> None:
        alarms = self._alarms
        while alarms and alarms[0][0] <= end:
            position, _, cursor = heapq.heappop(alarms)
            if cursor.alarm == position:
                cursor.alarm = None
                woken[cursor] = None


def _look_up(
    group: _Group[_T],
    by_key: dict[object, list[StreamCursor[_T]]],
    items: Sequence[_T],
    hits: list[tuple[int, list[StreamCursor[_T]], BaseException | None]],
) -> None:
    function, find = group.function, by_key.get
    for place, item in enumerate(items):
        try:
            key = function(item)
            cursors = find(key)
            if cursors is not None:
                hits.append((place, cursors, None))
            elif type(key) not in _PLAIN_KEYS:
                _refuse_awaitable(key)
        except BaseException as error:
            hits.append((place, group.cursors, _kept(error)))


def _ask_filter(
    group: _Group[_T], items: Sequence[_T], hits: list[tuple[int, list[StreamCursor[_T]], BaseException | None]]
) -> None:
    function = group.function
    for place, item in enumerate(items):
        try:
            result = function(item)
            if result is True or (result is not False and _as_bool(result)):
                hits.append((place, group.cursors, None))
        except BaseException as error:
            hits.append((place, group.cursors, _kept(error)))


def _is_before(number: int | None, since: int | None) -> bool:
    """Return whether an item lies before what a cursor begins with."""
    return number is not None and since is not None and number < since


def _kept(error: BaseException) -> BaseException:
    """Return an error without its traceback, which would keep a batch alive, and with a note of where it was raised."""
    trace: Any = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is not None:
        code = trace.tb_frame.f_code
        error.add_note(f"raised in {code.co_qualname}, {code.co_filename}, line {trace.tb_lineno}")
    return error.with_traceback(None)


class StreamCache(Protocol[_T]):
    """What a stream's cursor calls of the cache that it reads; see `EventCache`."""

    @property
    def end(self) -> int:
        """The position after the newest message."""

    def taken(self, cursor: StreamCursor[_T], matches: list[Match[_T]]) -> tuple[int, list[Match[_T]]]:
        """Record that a stream has read items, which it has in hand now."""

    def processed(self, size: int, pieces: Iterable[Piece]) -> None:
        """Record that a cursor has something in hand no more."""

    def left(self, cursor: StreamCursor[_T], match: Match[_T]) -> None:
        """Record that a stream has read, or dropped, one of its items."""

    def remove_stream(self, cursor: StreamCursor[_T]) -> None:
        """Look for a stream's items no more."""


class StreamCursor(Generic[_T]):
    """One subscriber's place in the part of a cache that belongs to its stream.

    Args:
        since: The sequence number below which nothing is for it; None for whatever comes.
        position: The position in the cache with which it begins.
    """

    __slots__ = (
        "_cache",
        "_counted",
        "_in_hand",
        "_index",
        "_is_closed",
        "_read_to",
        "alarm",
        "alone",
        "alone_size",
        "doubt",
        "doubts",
        "gaps",
        "selection",
        "since",
        "unread",
    )

    def __init__(
        self,
        cache: StreamCache[_T],
        index: StreamIndex[_T],
        selection: Selection[_T],
        since: int | None,
        position: int,
    ) -> None:
        self._cache = cache
        self._index = index
        self._is_closed = False
        self._in_hand: tuple[int, list[Match[_T]]] | None = None
        self._counted = position
        self._read_to = position
        self.selection = selection
        """Which items are for it."""
        self.since = since
        """The sequence number below which nothing is for it."""
        self.unread: deque[Match[_T]] = deque()
        """What it has not read yet."""
        self.doubts: dict[int, BaseException] = {}
        """By position in the cache: what its function failed with."""
        self.gaps: deque[tuple[int, int, int]] = deque()
        """Where sequence numbers are missing: a position in the cache, and the first and last of them."""
        self.alone = 0
        """Items that only this cursor still needs."""
        self.alone_size = 0
        """Their bytes."""
        self.alarm: int | None = None
        """The position at which it is to be woken, whether anything is for it or not."""
        self.doubt: BaseException | None = None
        """What the function failed with for the one item read last; None if it is known to be for this cursor."""

    @property
    def available(self) -> int:
        """How many items there are to read."""
        return len(self.unread)

    @property
    def held(self) -> tuple[int, int]:
        """Items, and their bytes, that the cache would free if this cursor were closed."""
        return self.alone, self.alone_size

    @property
    def first_unread(self) -> _T | None:
        """The item that is read next; None if there is none, or if numbers are missing before it."""
        unread, gaps = self.unread, self.gaps
        return None if not unread or (gaps and gaps[0][0] <= unread[0].position) else unread[0].item

    @property
    def passed(self) -> _T | None:
        """The newest item up to which it has read all that is for it; None if some is unread, or none came yet."""
        if self._is_closed or self.unread or self.gaps or not self._index.has_passed(self.since or 0):
            return None
        return self._index.newest

    def count_passed(self, *, is_to_end: bool) -> int:
        """Return how many items of the partition it has come past, its own and others, since the last call.

        Args:
            is_to_end: Whether what came after the last item read, and is not for it, counts now, or by a later call.
        """
        before = self._counted
        if not is_to_end:
            self._counted = max(before, self._read_to)
        elif not self.unread:
            self._counted = max(before, self._cache.end)
        return self._counted - before

    def wake_after(self, count: int) -> None:
        """Be woken when so many items have come, whether they are for it or not; or earlier, as asked before."""
        position = self._cache.end + count
        if not self._is_closed and (self.alarm is None or self.alarm > position):
            self.alarm = position
            self._index.wake_at(self, position)

    def read(self, limit: int) -> Sequence[_T]:
        """Read the next items, at most `limit`; none beyond a gap that was not taken.

        What was read before counts as processed then. One that is in doubt is read alone, and `doubt` is why. If the
        function has failed for it, that it is not lost is up to the caller.
        """
        self.doubt = None
        if self._is_closed:
            return []
        self.processed()
        unread = self.unread
        if not unread:
            return []
        if not self.doubts and not self.gaps:
            count = min(limit, len(unread))
        else:
            end = self.gaps[0][0] if self.gaps else None
            count = 0
            for match in unread:
                if count == limit or (end is not None and match.position >= end):
                    break
                if match.position in self.doubts:
                    if not count:
                        self.doubt = self.doubts.pop(match.position)
                        count = 1
                    break
                count += 1
        matches = [unread.popleft() for _ in range(count)]
        if matches:
            self._in_hand = self._cache.taken(self, matches)
            self._read_to = matches[-1].position + 1
        return [match.item for match in matches]

    @property
    def has_in_hand(self) -> bool:
        """Whether something was read that was not processed yet."""
        return self._in_hand is not None

    def processed(self) -> bool:
        """Record that what was read is processed, as the next `read` does. Possible after `close`, too."""
        if self._in_hand is None:
            return False
        (size, shared), self._in_hand = self._in_hand, None
        self._cache.processed(size, shared)
        return True

    def settle(self) -> bool:
        """Record that what was read is processed, if there is nothing to read. Return whether that is so."""
        if self.unread and not self._is_closed:
            return False
        self.processed()
        return True

    def take_missing(self) -> list[tuple[int, int]]:
        """Take the gaps that are next: the first and last number that is missing, each."""
        missing: list[tuple[int, int]] = []
        gaps, unread = self.gaps, self.unread
        while gaps and (not unread or gaps[0][0] <= unread[0].position):
            _, first, last = gaps.popleft()
            missing.append((first, last))
        return missing

    def skip(self, number: int) -> None:
        """Drop what lies below a sequence number, read already or not."""
        self.since = number
        self._index.skip_below(number)
        while self.unread and (found := self._index.number_of(self.unread[0].item)) is not None and found < number:
            match = self.unread.popleft()
            self.doubts.pop(match.position, None)
            self._cache.left(self, match)
        gaps = [(place, max(first, number), last) for place, first, last in self.gaps if last >= number]
        self.gaps = deque(gaps)

    def forget(self) -> None:
        """Forget all that was to be read. What is in hand stays there."""
        while self.unread:
            self._cache.left(self, self.unread.popleft())
        self.doubts.clear()
        self.gaps.clear()

    def close(self) -> None:
        """Leave: the other cursors alone decide what is kept. Closing twice is fine."""
        if not self._is_closed:
            self._is_closed = True
            self.forget()
            self._cache.remove_stream(self)
