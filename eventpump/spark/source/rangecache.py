"""Cache of the last ranges that a worker process received, for a second evaluation of the same batch."""

from __future__ import annotations

import mmap
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

import numpy as np

from eventpump.spark.connection import SparkConnection
from eventpump.spark.source.offsets import SequenceRange
from eventpump.spark.source.rows import PackedEvents


@dataclass(frozen=True, slots=True)
class RangeKey:
    """The identity of a range: its events are the same for every consumer group.

    Args:
        created_at: When the hub was created: the same numbers in a recreated hub are other events.
    """

    connection: SparkConnection
    range: SequenceRange
    created_at: datetime | None = None

    def is_behind(self, other: RangeKey) -> bool:
        """Return whether a stream that reads the other range has read this one before."""
        return (
            self.connection == other.connection
            and self.range.partition_id == other.range.partition_id
            and self.range.end <= other.range.start
        )


class _Spilled:
    """A piece in an unnamed file, which is deleted with its last piece."""

    __slots__ = ("_at", "_count", "_file", "_size")

    def __init__(self, file: mmap.mmap, at: int, size: int, count: int) -> None:
        self._file = file
        self._at = at
        self._size = size
        self._count = count

    def read(self) -> PackedEvents:
        after = self._at + 8 * self._count
        return PackedEvents(
            self._file[after : after + self._size], np.frombuffer(self._file[self._at : after], np.int64)
        )


class _Entry:
    """One range's pieces, in order: in memory or on disk."""

    def __init__(self) -> None:
        self.pieces: list[PackedEvents | _Spilled] = []
        self.in_memory = 0
        self.on_disk = 0

    def add(self, piece: PackedEvents) -> None:
        self.pieces.append(piece)
        self.in_memory += piece.size

    def spill(self) -> None:
        """Move the pieces in memory to disk.

        Raises:
            OSError: The disk is full; nothing was moved.
        """
        with tempfile.TemporaryFile(prefix="eventpump-range-") as file:
            for piece in self.pieces:
                if isinstance(piece, PackedEvents):
                    file.write(piece.lengths.data)
                    file.write(piece.data)
            file.flush()
            mapped = mmap.mmap(file.fileno(), self.in_memory, access=mmap.ACCESS_READ)
        moved: list[PackedEvents | _Spilled] = []
        at = 0
        for piece in self.pieces:
            if isinstance(piece, PackedEvents):
                moved.append(_Spilled(mapped, at, len(piece.data), len(piece)))
                at += piece.size
            else:
                moved.append(piece)
        self.pieces = moved
        self.on_disk += self.in_memory
        self.in_memory = 0


class RangeCache:
    """The last ranges, bounded in memory and on disk. Any thread.

    Ranges that a stream has passed are evicted first, then the least recently used. Ranges in memory move to disk
    before they are dropped. Recordings in progress count too, so a range that is too large for both is not kept.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._entries: OrderedDict[RangeKey, _Entry] = OrderedDict()
        self._recordings: dict[_Entry, None] = {}
        self.in_memory = 0
        """Bytes held in memory."""
        self.on_disk = 0
        """Bytes in the spill files."""

    def find(self, key: RangeKey) -> Iterator[PackedEvents] | None:
        """Return a range's events; None if it is not cached. The iterator outlives an eviction."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            self._entries.move_to_end(key)
            pieces = list(entry.pieces)
        return (piece.read() if isinstance(piece, _Spilled) else piece for piece in pieces)

    def record(self, key: RangeKey, *, memory: int, disk: int) -> Recording:
        """Start to record a range.

        Args:
            memory: The most bytes of all ranges in memory.
            disk: The most bytes of all ranges on disk.
        """
        with self._lock:
            for passed in [each for each in self._entries if each.is_behind(key)]:
                self._drop(self._entries.pop(passed))
            entry = _Entry()
            self._recordings[entry] = None
        return Recording(self, key, entry, memory, disk)

    def add(self, entry: _Entry, piece: PackedEvents, memory: int, disk: int) -> bool:
        """Add a piece to a recording. Return False if there is no space, and the recording is dropped."""
        with self._lock:
            entry.add(piece)
            self.in_memory += piece.size
            while self.in_memory > memory:
                # The oldest first, and the recording in progress last.
                victim = next((each for each in self._entries.values() if each.in_memory), entry)
                if not self._spill(victim, disk):
                    if victim is entry:
                        self._drop(entry)
                        return False
                    self._drop(self._entries.pop(next(key for key, each in self._entries.items() if each is victim)))
            return True

    def _spill(self, entry: _Entry, disk: int) -> bool:
        size = entry.in_memory
        if not size or entry.on_disk + size > disk:
            return False
        while self.on_disk + size > disk:
            oldest = next((key for key, each in self._entries.items() if each.on_disk and each is not entry), None)
            if oldest is None:
                return False
            self._drop(self._entries.pop(oldest))
        try:
            entry.spill()
        except OSError:
            return False
        self.in_memory -= size
        self.on_disk += size
        return True

    def complete(self, key: RangeKey, entry: _Entry) -> None:
        """Make a recording available to `find`."""
        with self._lock:
            self._recordings.pop(entry, None)
            before = self._entries.pop(key, None)
            if before is not None:
                self._drop(before)
            self._entries[key] = entry

    def drop(self, entry: _Entry) -> None:
        """Discard a recording. May be called twice."""
        with self._lock:
            if entry in self._recordings:
                self._drop(entry)

    def _drop(self, entry: _Entry) -> None:
        self._recordings.pop(entry, None)
        self.in_memory -= entry.in_memory
        self.on_disk -= entry.on_disk
        entry.in_memory = entry.on_disk = 0
        entry.pieces = []


class Recording:
    """A range that is being received, piece by piece. For one thread. It can be found only once it is complete."""

    def __init__(self, cache: RangeCache, key: RangeKey, entry: _Entry, memory: int, disk: int) -> None:
        self._cache = cache
        self._key = key
        self._entry: _Entry | None = entry
        self._memory = memory
        self._disk = disk

    def add(self, piece: PackedEvents) -> None:
        """Add a piece, if there is space for it."""
        if self._entry is not None and not self._cache.add(self._entry, piece, self._memory, self._disk):
            self._entry = None

    def complete(self) -> None:
        """Complete the range: all of it was added."""
        if self._entry is not None:
            self._cache.complete(self._key, self._entry)
            self._entry = None

    def abandon(self) -> None:
        """Discard it, unless it is complete. May be called twice."""
        if self._entry is not None:
            self._cache.drop(self._entry)
            self._entry = None
