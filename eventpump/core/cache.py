"""Cache of a partition's received events that its subscribers have not read yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Generic, TypeVar

from eventpump.compiled import based_on_core, core
from eventpump.core.streams import Match, Piece, Selection, StreamCursor, StreamIndex

_T = TypeVar("_T")

_COALESCE = 64
"""Chunks with fewer messages are joined, so that single messages do not form a long chain of chunks."""

_SHARED_CHUNK = 256
"""The most messages in a chunk that several cursors read: one that is read is freed in such steps."""


@based_on_core("PlainChunk")
class _Chunk(Generic[_T]):
    """Messages that came together, their size, and the items made of them where several cursors read them."""

    __slots__ = ("items", "raw", "size")

    def __init__(self, raw: list[bytes], size: int) -> None:
        self.raw = raw
        self.size = size
        self.items: tuple[_T, ...] | None = None


@based_on_core("PlainHand")
class _Hand:
    """What a cursor that reads all messages has in hand: from one position to before another.

    Attributes:
        first: The first position.
        until: The one after the last.
        size: Bytes of it that the cache does not hold any more, and that no other cursor has in hand.
        pieces: What else the cache does not hold any more, and matches that streams have, too.
    """

    __slots__ = ("first", "pieces", "size", "until")

    def __init__(self) -> None:
        self.first = self.until = self.size = 0
        self.pieces: list[Piece] = []


@based_on_core("PlainCache")
class EventCache(Generic[_T]):
    """Encoded messages in order, kept until every cursor has passed them.

    It stores every message: the bounds are kept by link credit (`CreditWindow`), and nothing is dropped.
    Positions count messages from the cache's first one on. Cursors read items that `wrap` makes of the messages; of
    each message one item is made, which all cursors get, unless a sole cursor reads it.

    Cursors of streams read a part of the messages only. From `start` on lies what a cursor that reads all of them has
    not read; before it, of the messages only those are held that a stream has and has not read.

    What a cursor has read is in hand until it reads again, or calls `processed`, also after it was closed. `size` and
    `in_hand` together are the bytes of the messages that are held or in hand, each counted once.

    Args:
        wrap: Called with a list of messages; returns an item for each, in order, and may return the very list.
        number: Returns an item's sequence number, None if it cannot be read; needed for streams.
    """

    __slots__ = (
        "_ahead",
        "_chunks",
        "_cursors",
        "_found",
        "_found_from",
        "_found_until",
        "_hands",
        "_index",
        "_number",
        "_start",
        "_unread_by",
        "_wrap",
        "count",
        "end",
        "in_hand",
        "size",
    )

    def __init__(
        self, wrap: Callable[[list[bytes]], list[_T]], number: Callable[[_T], int | None] = lambda _: None
    ) -> None:
        self._wrap = wrap
        self._number = number
        self._index: StreamIndex[_T] | None = None
        self._ahead: deque[Match[_T]] = deque()
        self._chunks: deque[_Chunk[_T]] = deque()
        self._cursors: list[Cursor[_T]] = []
        self._start = 0
        # How many cursors have not read the message at `start`. The last of them to do so makes room.
        self._unread_by = 0
        # What was read last, and from where to before where: cursors that keep pace read the same.
        self._found: tuple[_T, ...] = ()
        self._found_from = self._found_until = -1
        self._hands: dict[_Hand, None] = {}
        self.end = 0
        """The position after the newest message."""
        self.count = 0
        """Messages held."""
        self.size = 0
        """Bytes held."""
        self.in_hand = 0
        """Bytes that are not held any more, and that cursors have in hand: read, and not processed yet."""

    @property
    def start(self) -> int:
        """The position from which on all messages are held, or `end` where there is none."""
        return self._start

    @property
    def oldest(self) -> bytes | None:
        """The message at `start`; None where there is none."""
        return self._chunks[0].raw[0] if self._chunks else None

    def append(self, batch: list[bytes], size: int) -> Iterable[StreamCursor[_T]]:
        """Add a batch of so many bytes; return the streams to wake. The cache owns the list from now on."""
        count = len(batch)
        if self._index is not None or self._chunks or not 0 < count <= _SHARED_CHUNK:
            return self._append(batch, size)
        self._chunks.append(_Chunk(batch, size))
        self.end += count
        self.count += count
        self.size += size
        return ()

    def _append(self, batch: list[bytes], size: int) -> Iterable[StreamCursor[_T]]:
        """Add a batch to others, for streams, or in several chunks."""
        count = len(batch)
        if not count:
            return ()
        if self._index is not None:
            return self._append_routed(self._index, batch, size)
        self.end += count
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
        return ()

    def _append_routed(self, index: StreamIndex[_T], batch: list[bytes], size: int) -> Iterable[StreamCursor[_T]]:
        """Add a batch, and give its items to the streams."""
        count = len(batch)
        items = tuple(self._wrap(list(batch)))
        # It calls the user's functions, which may close cursors: nothing is changed before.
        matches, woken = index.route(items, batch, self.end)
        self.end += count
        self.count += count
        self.size += size
        self._ahead.extend(matches)
        if not self._cursors:
            self._passed(batch, size)
            return woken
        chunks = self._chunks
        last = chunks[-1] if chunks else None
        if last is not None and last.items is not None and len(last.raw) + count <= _COALESCE:
            last.raw.extend(batch)
            last.items += items
            last.size += size
            return woken
        for first in range(0, count, _SHARED_CHUNK):
            part = batch[first : first + _SHARED_CHUNK]
            chunk: _Chunk[_T] = _Chunk(part, sum(map(len, part)))
            chunk.items = items[first : first + _SHARED_CHUNK]
            chunks.append(chunk)
        return woken

    def cursor(self, *, at_end: bool = False) -> Cursor[_T]:
        """Make a cursor before the oldest message held, or after the newest one."""
        cursor = Cursor(self, self.end if at_end else self._start)
        self._cursors.append(cursor)
        self._purge()  # where it is the only one, what lies before it will not be read
        return cursor

    def stream(self, selection: Selection[_T], *, since: int | None = None, at_end: bool = False) -> StreamCursor[_T]:
        """Make a cursor that reads a part of the messages.

        Args:
            since: The sequence number below which it reads none; None to read whatever comes.
            at_end: Place it after the newest message, instead of at `start`.
        """
        index = self._index
        if index is None:
            index = self._index = StreamIndex(self._number)
            index.begin_after(item for _, item, _ in self._held_items())
        cursor = StreamCursor(self, index, selection, since, self.end if at_end else self._start)
        index.add(cursor)
        if not at_end and self._chunks:
            known = {match.position: match for match in self._ahead}
            index.rescan(cursor, self._held_items(), known)
            self._ahead = deque(known[position] for position in sorted(known))
        self._purge()  # where no cursor reads all of them, only those of streams are kept
        return cursor

    def left(self, cursor: StreamCursor[_T], match: Match[_T]) -> None:
        """Record that a stream has read, or dropped, one of its items."""
        readers = match.readers
        is_behind = match.position < self._start
        if len(readers) == 1:
            readers.clear()
            if is_behind:
                cursor.alone -= 1
                cursor.alone_size -= match.size
                self.count -= 1
                self.size -= match.size
                if match.hands:
                    self.in_hand += match.size
            return
        readers.remove(cursor)
        if is_behind and len(readers) == 1:
            readers[0].alone += 1
            readers[0].alone_size += match.size

    def taken(self, cursor: StreamCursor[_T], matches: list[Match[_T]]) -> tuple[int, list[Match[_T]]]:
        """Record that a stream has read items, which it has in hand now."""
        start, size, shared = self._start, 0, list[Match[_T]]()
        for match in matches:
            readers = match.readers
            if match.position < start and len(readers) == 1 and not match.hands:
                readers.clear()
                size += match.size
            else:
                match.hands += 1
                self.left(cursor, match)
                shared.append(match)
        if count := len(matches) - len(shared):
            cursor.alone -= count
            cursor.alone_size -= size
            self.count -= count
            self.size -= size
            self.in_hand += size
        return size, shared

    def processed(self, size: int, pieces: Iterable[Piece]) -> None:
        """Record that a cursor has something in hand no more: bytes only it had, and pieces that others may have."""
        self.in_hand -= size
        start = self._start
        for piece in pieces:
            piece.hands -= 1
            if not piece.hands and not piece.readers and piece.position < start:
                self.in_hand -= piece.size

    def remove_stream(self, cursor: StreamCursor[_T]) -> None:
        """Look for a stream's items no more. It has left all of them."""
        if self._index is not None:
            self._index.remove(cursor)
            if not self._index.cursors:
                self._index = None
                self._ahead = deque(match for match in self._ahead if match.hands)

    def _held_items(self) -> Iterator[tuple[int, _T, int]]:
        """Yield positions, items and sizes of all messages from `start` on."""
        position = self._start
        for chunk in self._chunks:
            if chunk.items is None:
                chunk.items = tuple(self._wrap(list(chunk.raw)))
            for item, raw in zip(chunk.items, chunk.raw, strict=True):
                yield position, item, len(raw)
                position += 1

    def clear(self) -> None:
        """Drop everything and move every cursor to the end. What is in hand stays there."""
        for stream in () if self._index is None else self._index.cursors:
            stream.forget()
        chunks = self._chunks
        while chunks:
            head = chunks.popleft()
            self._passed(head.raw, head.size)
        for cursor in self._cursors:
            cursor.position = self._start
        self._unread_by = len(self._cursors)

    def _read(self, cursor: Cursor[_T], limit: int) -> Sequence[_T]:
        hand, first = cursor.hand, cursor.position
        if hand in self._hands:
            self._release(hand)
        until = self.end
        if until - first > limit:
            until = first + limit
        if until <= first:
            return ()
        hand.first, hand.until = first, until
        self._hands[hand] = None
        if len(self._cursors) == 1:
            # No other cursor needs them: return the chunk itself if it fits.
            cursor.position = until
            head = self._chunks[0]
            if len(head.raw) != until - first or head.items is not None:
                return self._take(limit)
            self._chunks.popleft()
            size = head.size
            if self._ahead or self._found or len(self._hands) > 1:
                self._passed(head.raw, size)
            else:
                # The same where no other cursor reads or has read, without a call for each batch.
                self._start = until
                self.count -= until - first
                self.size -= size
                self.in_hand += size
                hand.size += size
            return self._wrap(head.raw)
        if first == self._found_from and until == self._found_until:
            found = self._found
        else:
            found = self._found = self._find(first, limit)
            self._found_from, self._found_until = first, until
        cursor.position = until
        if first == self._start:
            self._unread_by -= 1
            if not self._unread_by:
                self._purge()
        return found

    def _find(self, first: int, limit: int) -> tuple[_T, ...]:
        """Return up to `limit` items from a position on, at which there is one."""
        found: tuple[_T, ...] = ()
        skip = first - self._start
        for chunk in self._chunks:
            if skip >= len(chunk.raw):
                skip -= len(chunk.raw)
                continue
            items = chunk.items
            if items is None:
                items = chunk.items = tuple(self._wrap(list(chunk.raw)))
            # The chunk's own tuple if all of it is read: cursors that keep pace get the very same one.
            part = items[skip : skip + limit - len(found)]
            found = found + part if found else part
            skip = 0
            if len(found) == limit:
                break
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
                self._passed(raw, head.size)
            else:
                raw = self._cut(head, room)
                if items is not None:
                    head.items, items = items[room:], items[:room]
            part = self._wrap(raw) if items is None else list(items)
            taken = taken + part if taken else part
        return taken

    def _purge(self) -> None:
        """Free what every cursor has passed."""
        start, cursors, chunks = self._start, self._cursors, self._chunks
        unread = start if self._index is None else self.end
        passed = min((cursor.position for cursor in cursors), default=unread) - start
        while passed > 0:
            head = chunks[0]
            count = len(head.raw)
            if count <= passed:
                chunks.popleft()
                self._passed(head.raw, head.size)
            else:
                count = passed
                self._cut(head, count)
                if head.items is not None:
                    head.items = head.items[count:]
            passed -= count
        start = self._start
        self._unread_by = sum([cursor.position == start for cursor in cursors])

    def _cut(self, head: _Chunk[_T], count: int) -> list[bytes]:
        """Remove that many messages from the front of the first chunk, but not their items, and return them."""
        raw = head.raw[:count]
        del head.raw[:count]
        size = sum(map(len, raw))
        head.size -= size
        self._passed(raw, size)
        return raw

    def _passed(self, raw: list[bytes], size: int) -> None:
        """Hold messages of so many bytes from `start` on no more, except those that a stream has not read."""
        first = self._start
        self._start += len(raw)
        self.count -= len(raw)
        self.size -= size
        if self._start >= self._found_until:
            self._found = ()  # it is kept by those that have it, and not here
        ahead = self._ahead
        if not ahead:
            hands = self._hands
            if len(hands) == 1:
                # As usual: what one cursor has taken alone.
                (hand,) = hands
                if hand.first <= first and hand.until >= self._start:
                    hand.size += size
                    self.in_hand += size
                    return
            if hands:
                self._put_in_hand(first, raw, size, ())
            return
        apart: list[Match[_T]] = []
        while ahead and ahead[0].position < self._start:
            match = ahead.popleft()
            if readers := match.readers:
                self.count += 1
                self.size += match.size
                if len(readers) == 1:
                    readers[0].alone += 1
                    readers[0].alone_size += match.size
            elif match.hands:
                self.in_hand += match.size
            else:
                continue
            apart.append(match)
        if self._hands:
            self._put_in_hand(first, raw, size, apart)

    def _put_in_hand(self, first: int, raw: list[bytes], size: int, apart: Sequence[Match[_T]]) -> None:
        """Count what is not held any more, and cursors that read all messages have in hand.

        Args:
            apart: Those of them that are counted one by one, for streams.
        """
        until = self._start
        hands: list[_Hand] = []
        edges: set[int] = set()
        for hand in self._hands:
            if hand.first < until and hand.until > first:
                hands.append(hand)
                if hand.first > first:
                    edges.add(hand.first)
                if hand.until < until:
                    edges.add(hand.until)
        if not (edges or apart):
            # All that have a part of it have all.
            if len(hands) == 1:
                hands[0].size += size
                self.in_hand += size
            elif hands:
                self.in_hand += size
                self._hold(Piece(size, first), hands)
            return
        for begin, end in pairwise(sorted({first, until, *edges})):
            holding = [hand for hand in hands if hand.first <= begin < hand.until]
            if not holding:
                continue
            piece = Piece(sum(map(len, raw[begin - first : end - first])) if edges else size, begin)
            for match in apart:
                if begin <= match.position < end:
                    piece.size -= match.size
                    self._hold(match, holding)
            self.in_hand += piece.size
            self._hold(piece, holding)

    def _hold(self, piece: Piece, hands: list[_Hand]) -> None:
        piece.hands += len(hands)
        for hand in hands:
            hand.pieces.append(piece)

    def _release(self, hand: _Hand) -> None:
        del self._hands[hand]
        self.in_hand -= hand.size
        hand.size = 0
        if hand.pieces:
            self.processed(0, hand.pieces)
            hand.pieces.clear()

    def _remove(self, cursor: Cursor[_T]) -> None:
        self._cursors.remove(cursor)
        self._purge()

    def _held_by(self, cursor: Cursor[_T]) -> tuple[int, int]:
        if cursor.position > self._start:
            return 0, 0
        # It is the last of them all, so what it holds is at the front.
        others = min((each.position for each in self._cursors if each is not cursor), default=self.end)
        size, left = 0, (count := others - cursor.position)
        for chunk in self._chunks:
            if left < len(chunk.raw):
                size += sum(map(len, chunk.raw[:left]))
                break
            size += chunk.size
            left -= len(chunk.raw)
            if not left:
                break
        for match in self._ahead:
            if match.position >= others:
                break
            if match.readers:
                count -= 1
                size -= match.size
        return count, size


@based_on_core("PlainCursor")
class Cursor(Generic[_T]):
    """One subscriber's position in a cache."""

    __slots__ = ("_cache", "_is_closed", "hand", "position")

    def __init__(self, cache: EventCache[_T], position: int) -> None:
        self._cache = cache
        self._is_closed = False
        self.position = position
        """The position of the message read next."""
        self.hand = _Hand()
        """What was read and is not processed yet."""

    @property
    def available(self) -> int:
        """How many messages there are to read."""
        return 0 if self._is_closed else self._cache.end - self.position

    @property
    def held(self) -> tuple[int, int]:
        """Messages, and their bytes, that the cache would free if this cursor were closed."""
        return (0, 0) if self._is_closed else self._cache._held_by(self)  # noqa: SLF001 - the two are one object

    def read(self, limit: int) -> Sequence[_T]:
        """Read the next items, at most `limit`; empty where there is none. What was read before is processed."""
        if self._is_closed:
            return ()
        return self._cache._read(self, limit)  # noqa: SLF001 - as above

    @property
    def has_in_hand(self) -> bool:
        """Whether something was read that was not processed yet."""
        return self.hand in self._cache._hands  # noqa: SLF001 - as above

    def processed(self) -> bool:
        """Record that what was read is processed, as the next `read` does. Possible after `close`, too."""
        if self.hand not in self._cache._hands:  # noqa: SLF001 - as above
            return False
        self._cache._release(self.hand)  # noqa: SLF001 - as above
        return True

    def settle(self) -> bool:
        """Record that what was read is processed, if there is nothing to read. Return whether that is so."""
        cache = self._cache
        if self.position < cache.end and not self._is_closed:
            return False
        if self.hand in cache._hands:  # noqa: SLF001 - as above
            cache._release(self.hand)  # noqa: SLF001 - as above
        return True

    def close(self) -> None:
        """Leave: the other cursors alone decide what is kept. Closing twice is fine."""
        if not self._is_closed:
            self._is_closed = True
            self._cache._remove(self)  # noqa: SLF001 - as above


if core is not None:
    core.hold_events(_Chunk, _SHARED_CHUNK)
