"""Cache of a partition's received events that its subscribers have not read yet."""

from __future__ import annotations

from collections import deque

_COALESCE = 64
"""Chunks with fewer messages are joined, so that single messages do not form a long chain of chunks."""


class EventCache:
    """Encoded messages in order, kept until every cursor has passed them.

    It stores every message: the bounds are kept by link credit (`CreditWindow`), and nothing is dropped.
    Positions count messages from the cache's first one on.
    """

    __slots__ = ("_chunks", "_cursors", "_start", "count", "size")

    def __init__(self) -> None:
        self._chunks: deque[list[bytes]] = deque()
        self._cursors: list[Cursor] = []
        self._start = 0
        self.count = 0
        """Messages held."""
        self.size = 0
        """Bytes held."""

    @property
    def end(self) -> int:
        """The position after the newest message."""
        return self._start + self.count

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
        if self._chunks and len(self._chunks[-1]) + count <= _COALESCE:
            self._chunks[-1].extend(batch)
        else:
            self._chunks.append(batch)

    def cursor(self) -> Cursor:
        """Return a new cursor at the oldest message held."""
        cursor = Cursor(self, self._start)
        self._cursors.append(cursor)
        return cursor

    def clear(self) -> None:
        """Drop everything and move every cursor to the end."""
        end = self.end
        self._chunks.clear()
        self._start = end
        self.count = self.size = 0
        for cursor in self._cursors:
            cursor.position = end

    def _read(self, cursor: Cursor, limit: int) -> list[bytes]:
        chunks = self._chunks
        if len(self._cursors) == 1:
            # No other cursor needs them: return the chunk itself if it fits.
            taken = self._take(limit)
            cursor.position += len(taken)
            return taken
        found: list[bytes] = []
        skip = cursor.position - self._start
        for chunk in chunks:
            if skip >= len(chunk):
                skip -= len(chunk)
                continue
            found += chunk[skip : skip + limit - len(found)]
            skip = 0
            if len(found) == limit:
                break
        cursor.position += len(found)
        self._purge()
        return found

    def _take(self, limit: int) -> list[bytes]:
        chunks = self._chunks
        taken: list[bytes] = []
        while chunks and len(taken) < limit:
            head = chunks[0]
            room = limit - len(taken)
            if len(head) <= room:
                chunks.popleft()
                taken = taken + head if taken else head
            else:
                taken = taken + head[:room] if taken else head[:room]
                del head[:room]
        self._passed(taken)
        return taken

    def _purge(self) -> None:
        passed = min((cursor.position for cursor in self._cursors), default=self._start) - self._start
        if passed > 0:
            self._take(passed)

    def _passed(self, messages: list[bytes]) -> None:
        self._start += len(messages)
        self.count -= len(messages)
        self.size -= sum(map(len, messages))

    def _remove(self, cursor: Cursor) -> None:
        self._cursors.remove(cursor)
        self._purge()


class Cursor:
    """One subscriber's position in a cache."""

    __slots__ = ("_cache", "_is_closed", "position")

    def __init__(self, cache: EventCache, position: int) -> None:
        self._cache = cache
        self._is_closed = False
        self.position = position
        """The position of the message read next."""

    @property
    def available(self) -> int:
        """How many messages there are to read."""
        return 0 if self._is_closed else self._cache.end - self.position

    def read(self, limit: int) -> list[bytes]:
        """Return the next messages, at most `limit`, without waiting; empty if there is none."""
        if self._is_closed:
            return []
        return self._cache._read(self, limit)  # noqa: SLF001 - a cursor is part of its cache

    def close(self) -> None:
        """Remove the cursor: only the others decide what is kept. May be called twice."""
        if not self._is_closed:
            self._is_closed = True
            self._cache._remove(self)  # noqa: SLF001 - as above
