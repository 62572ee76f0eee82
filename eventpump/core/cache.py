"""Cache of a partition's received events that its subscribers have not read yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

_T = TypeVar("_T")

_COALESCE = 64
"""Chunks with fewer messages are joined, so that single messages do not form a long chain of chunks."""

_SHARED_CHUNK = 256
"""The most messages in a chunk that several cursors read: one that is read is freed in such steps."""


class _Chunk(Generic[_T]):
    """Messages that came together, their size, and the items made of them where several cursors read them."""

    __slots__ = ("items", "raw", "size")

    def __init__(self, raw: list[bytes], size: int) -> None:
        self.raw = raw
        self.size = size
        self.items: list[_T] | None = None


class EventCache(Generic[_T]):
    """Encoded messages in order, kept until every cursor has passed them.

    It stores every message: the bounds are kept by link credit (`CreditWindow`), and nothing is dropped.
    Positions count messages from the cache's first one on. Cursors read items that `wrap` makes of the messages; of
    each message one item is made, which all cursors get, unless a sole cursor reads it.

    Args:
        wrap: Called with a list of messages; returns an item for each, in order, and may return the very list.
    """

    __slots__ = ("_chunks", "_cursors", "_freed", "_hands", "_start", "_wrap", "count", "in_hand", "size")

    def __init__(self, wrap: Callable[[list[bytes]], list[_T]]) -> None:
        self._wrap = wrap
        self._chunks: deque[_Chunk[_T]] = deque()
        self._cursors: list[Cursor[_T]] = []
        self._start = 0
        self._hands: dict[Cursor[_T], int] = {}
        self._freed: deque[tuple[int, int]] = deque()
        self.count = 0
        """Messages held."""
        self.size = 0
        """Bytes held."""
        self.in_hand = 0
        """Bytes that are not held any more, and that a reader has in hand: it has read them, and nothing since."""

    @property
    def start(self) -> int:
        """The position of the oldest message held, or `end` where there is none."""
        return self._start

    @property
    def end(self) -> int:
        """The position after the newest message."""
        return self._start + self.count

    @property
    def oldest(self) -> bytes | None:
        """The oldest message held; None where there is none."""
        return self._chunks[0].raw[0] if self._chunks else None

    def append(self, batch: list[bytes], size: int) -> None:
        """Add a batch. The cache owns the list from now on.

        Args:
            size: The total size of its messages, in bytes.
        """
        count = len(batch)
        if not count:
            return
        self.count += count
        self.size += size
        last = self._chunks[-1] if self._chunks else None
        if last is not None and last.items is None and len(last.raw) + count <= _COALESCE:
            last.raw.extend(batch)
            last.size += size
        elif len(self._cursors) > 1 and count > _SHARED_CHUNK:
            for first in range(0, count, _SHARED_CHUNK):
                part = batch[first : first + _SHARED_CHUNK]
                self._chunks.append(_Chunk(part, sum(map(len, part))))
        else:
            self._chunks.append(_Chunk(batch, size))

    def cursor(self, *, at_end: bool = False) -> Cursor[_T]:
        """Make a cursor.

        Args:
            at_end: Place it after the newest message, instead of before the oldest one held.
        """
        cursor = Cursor(self, self.end if at_end else self._start)
        self._cursors.append(cursor)
        self._purge()  # where it is the only one, what lies before it will not be read
        self._forget_processed()
        return cursor

    def clear(self) -> None:
        """Drop everything and move every cursor to the end. What is in hand stays there."""
        end, first = self.end, self._start
        read = max((cursor.position for cursor in self._hands), default=first)
        for chunk in self._chunks:
            if first >= read:
                break
            first += len(chunk.raw)
            self._freed.append((first, chunk.size))
            self.in_hand += chunk.size
        self._chunks.clear()
        self._start = end
        self.count = self.size = 0
        for cursor in self._cursors:
            cursor.position = end

    def _read(self, cursor: Cursor[_T], limit: int) -> list[_T]:
        hands, first = self._hands, cursor.position
        if first < self._start + self.count:
            hands[cursor] = first
        else:
            hands.pop(cursor, None)
        if self._freed:
            self._forget_processed()
        if len(self._cursors) == 1:
            # No other cursor needs them: return the chunk itself if it fits.
            taken = self._take(limit)
            cursor.position += len(taken)
            return taken
        found: list[_T] = []
        skip = cursor.position - self._start
        is_last = not skip
        for chunk in self._chunks:
            if skip >= len(chunk.raw):
                skip -= len(chunk.raw)
                continue
            items = chunk.items
            if items is None:
                items = chunk.items = self._wrap(list(chunk.raw))
            part = items[skip : skip + limit - len(found)]
            found = found + part if found else part
            skip = 0
            if len(found) == limit:
                break
        cursor.position += len(found)
        if is_last:
            self._purge()
        return found

    def _take(self, limit: int) -> list[_T]:
        """Remove up to `limit` messages from the front, and return their items."""
        chunks = self._chunks
        taken: list[_T] = []
        while chunks and len(taken) < limit:
            head = chunks[0]
            room = limit - len(taken)
            items = head.items
            if len(head.raw) <= room:
                chunks.popleft()
                raw = head.raw
                self._passed(len(raw), head.size)
            else:
                raw = self._cut(head, room)
                if items is not None:
                    head.items, items = items[room:], items[:room]
            if items is None:
                items = self._wrap(raw)
            taken = taken + items if taken else items
        return taken

    def _purge(self) -> None:
        """Free what every cursor has passed."""
        start, cursors, chunks = self._start, self._cursors, self._chunks
        if any(cursor.position == start for cursor in reversed(cursors)):
            # Of cursors that take turns in their order the last one is behind for longest.
            return
        passed = min((cursor.position for cursor in cursors), default=start) - start
        while passed > 0:
            head = chunks[0]
            count = len(head.raw)
            if count <= passed:
                chunks.popleft()
                self._passed(count, head.size)
            else:
                count = passed
                self._cut(head, count)
                if head.items is not None:
                    del head.items[:count]
            passed -= count

    def _cut(self, head: _Chunk[_T], count: int) -> list[bytes]:
        """Remove that many messages from the front of the first chunk, but not their items, and return them."""
        raw = head.raw[:count]
        del head.raw[:count]
        size = sum(map(len, raw))
        head.size -= size
        self._passed(count, size)
        return raw

    def _passed(self, count: int, size: int) -> None:
        self._start += count
        self.count -= count
        self.size -= size
        self._freed.append((self._start, size))
        self.in_hand += size

    def _forget_processed(self) -> None:
        """Count what lies before all hands no more."""
        freed = self._freed
        if not self._hands:
            freed.clear()
            self.in_hand = 0
            return
        kept_from = min(self._hands.values())
        while freed and freed[0][0] <= kept_from:
            self.in_hand -= freed.popleft()[1]

    def _processed(self, cursor: Cursor[_T]) -> bool:
        if self._hands.pop(cursor, None) is None:
            return False
        self._forget_processed()
        return True

    def _remove(self, cursor: Cursor[_T]) -> None:
        self._cursors.remove(cursor)
        self._purge()
        self._forget_processed()

    def _held_by(self, cursor: Cursor[_T]) -> tuple[int, int]:
        if cursor.position > self._start:
            return 0, 0
        # It is the last of them all, so what it holds is at the front.
        others = min((each.position for each in self._cursors if each is not cursor), default=self.end)
        size, left = 0, (count := others - cursor.position)
        for chunk in self._chunks:
            if left < len(chunk.raw):
                return count, size + sum(map(len, chunk.raw[:left]))
            size += chunk.size
            left -= len(chunk.raw)
            if not left:
                break
        return count, size


class Cursor(Generic[_T]):
    """One subscriber's position in a cache."""

    __slots__ = ("_cache", "_is_closed", "position")

    def __init__(self, cache: EventCache[_T], position: int) -> None:
        self._cache = cache
        self._is_closed = False
        self.position = position
        """The position of the message read next."""

    @property
    def available(self) -> int:
        """How many messages there are to read."""
        return 0 if self._is_closed else self._cache.end - self.position

    @property
    def held(self) -> tuple[int, int]:
        """Messages, and their bytes, that the cache would free if this cursor were closed."""
        return (0, 0) if self._is_closed else self._cache._held_by(self)  # noqa: SLF001 - the two are one object

    def read(self, limit: int) -> list[_T]:
        """Read the next items, at most `limit`; empty where there is none."""
        if self._is_closed:
            return []
        return self._cache._read(self, limit)  # noqa: SLF001 - as above

    @property
    def has_in_hand(self) -> bool:
        """Whether something was read that was not processed yet."""
        return self in self._cache._hands  # noqa: SLF001 - as above

    def processed(self) -> bool:
        """Record that what was read is processed, as the next `read` does. Possible after `close`, too.

        Returns:
            Whether something was in hand.
        """
        return self._cache._processed(self)  # noqa: SLF001 - as above

    def close(self) -> None:
        """Leave: the other cursors alone decide what is kept. Closing twice is fine."""
        if not self._is_closed:
            self._is_closed = True
            self._cache._remove(self)  # noqa: SLF001 - as above
