"""Hubs on disk: SQLite in a directory, written by one thread that commits in groups.

A numbered batch is handed to the thread; once it is committed, the loop publishes it and answers the sender. So a
killed process never loses an event that a reader or a sender has seen, and no number is assigned twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import sqlite3
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from eventpump.aio.sqlite_thread import SqliteThread, connect, transaction
from eventpump.aio.tasks import reject, resolve
from eventpump.emulator.config import HubSpec
from eventpump.emulator.ledger import ProducerState
from eventpump.emulator.log import Hub, LogEnd, NumberedBatch, PartitionLog, group_names
from eventpump.errors import ConfigurationError, StoreError

_SCHEMA_VERSION = 2
_SCHEMA = """
CREATE TABLE hubs (name TEXT PRIMARY KEY COLLATE NOCASE, created_ms INTEGER NOT NULL);
CREATE TABLE consumer_groups (hub TEXT NOT NULL COLLATE NOCASE, name TEXT NOT NULL COLLATE NOCASE,
    PRIMARY KEY (hub, name));
CREATE TABLE partitions (id INTEGER PRIMARY KEY, hub TEXT NOT NULL COLLATE NOCASE, number INTEGER NOT NULL,
    beginning INTEGER NOT NULL DEFAULT 0, next_sequence_number INTEGER NOT NULL DEFAULT 0,
    next_offset INTEGER NOT NULL DEFAULT 0, last_offset INTEGER NOT NULL DEFAULT -1, last_enqueued_ms INTEGER,
    UNIQUE (hub, number));
CREATE TABLE batches (partition INTEGER NOT NULL, sequence_number INTEGER NOT NULL, first_offset INTEGER NOT NULL,
    enqueued_ms INTEGER NOT NULL, sizes BLOB NOT NULL, payload BLOB NOT NULL,
    PRIMARY KEY (partition, sequence_number));
"""
# Since version 2.
_PRODUCERS = """
CREATE TABLE producers (partition INTEGER NOT NULL, producer_id INTEGER NOT NULL, epoch INTEGER NOT NULL,
    last INTEGER NOT NULL, is_fresh INTEGER NOT NULL, recent BLOB NOT NULL, PRIMARY KEY (partition, producer_id))
    WITHOUT ROWID
"""
_GROUP_BYTES = 16 << 20


@dataclass(slots=True)
class _Group:
    """What is written in one transaction; of each partition and producer only the last state, at the end."""

    database: sqlite3.Connection
    rows: dict[PartitionLog, int]
    ends: dict[int, NumberedBatch] = field(default_factory=dict)
    producers: dict[tuple[int, int], ProducerState] = field(default_factory=dict)

    def finish(self) -> None:
        """Write the last states."""
        self.database.executemany(
            "UPDATE partitions SET next_sequence_number = ?, next_offset = ?, last_offset = ?,"
            " last_enqueued_ms = ? WHERE id = ?",
            [
                (batch.next_sequence_number, batch.next_offset, batch.offsets[-1], batch.time_ms, row)
                for row, batch in self.ends.items()
            ],
        )
        self.database.executemany(
            "INSERT OR REPLACE INTO producers VALUES (?, ?, ?, ?, ?, ?)",
            [
                (row, producer_id, state.epoch, state.last, state.is_fresh, _pack_recent(state.recent))
                for (row, producer_id), state in self.producers.items()
            ],
        )


@dataclass(slots=True)
class Append:
    """A numbered batch on its way to disk; its owner answers for it by the `ticket`."""

    batch: NumberedBatch
    ticket: object

    def write(self, group: _Group) -> None:
        batch = self.batch
        row = group.rows[batch.partition]
        group.ends[row] = batch
        if batch.producer is not None:
            group.producers[row, batch.producer.producer_id] = batch.producer
        group.database.execute(
            "INSERT INTO batches VALUES (?, ?, ?, ?, ?, ?)",
            (
                row,
                batch.sequence_number,
                batch.offsets[0],
                batch.time_ms,
                array("I", map(len, batch.payloads)).tobytes(),
                b"".join(batch.payloads),
            ),
        )


@dataclass(slots=True)
class LedgerEntry:
    """What is kept of an idempotent producer beside events, or (None) only an answer that waits its turn."""

    partition: PartitionLog
    producer: ProducerState | None
    ticket: object

    def write(self, group: _Group) -> None:
        if self.producer is not None:
            group.producers[group.rows[self.partition], self.producer.producer_id] = self.producer


@dataclass(slots=True)
class _Drop:
    partition: PartitionLog
    beginning: int

    def write(self, group: _Group) -> None:
        row = group.rows[self.partition]
        # The row that the beginning lies in stays; it is cut when it is loaded.
        group.database.execute(
            "DELETE FROM batches WHERE partition = ?1 AND sequence_number < COALESCE((SELECT MAX("
            "sequence_number) FROM batches WHERE partition = ?1 AND sequence_number <= ?2), 0)",
            (row, self.beginning),
        )
        group.database.execute("UPDATE partitions SET beginning = ? WHERE id = ?", (self.beginning, row))


@dataclass(slots=True)
class _Forget:
    partition: PartitionLog
    producer_ids: list[int]

    def write(self, group: _Group) -> None:
        row = group.rows[self.partition]
        for producer_id in self.producer_ids:
            group.producers.pop((row, producer_id), None)
            group.database.execute("DELETE FROM producers WHERE partition = ? AND producer_id = ?", (row, producer_id))


@dataclass(slots=True)
class _AddPartitions:
    hub: Hub
    partitions: list[PartitionLog]
    done: asyncio.Future[None]

    def write(self, group: _Group) -> None:
        for log in self.partitions:
            cursor = group.database.execute(
                "INSERT INTO partitions (hub, number) VALUES (?, ?)", (self.hub.name, int(log.partition_id))
            )
            assert cursor.lastrowid is not None
            group.rows[log] = cursor.lastrowid


Entry = Append | LedgerEntry
_Work: TypeAlias = "Entry | _Drop | _Forget | _AddPartitions"


class DurableStore:
    """The hubs of one directory. Everything but the work of its thread is called from the event loop.

    Args:
        directory: Created where it is missing.
        fsync: Survive power loss too, at the price of a disk flush per commit.
        on_committed: Called in the loop with every group that is on disk, in order.
        on_failed: Called in the loop with every group that was not written, and the reason.
        take_back: Called in the loop once per failure, before anything else is numbered: forget the numbers of all that
            is not on disk.
    """

    def __init__(
        self,
        directory: Path,
        *,
        fsync: bool,
        on_committed: Callable[[list[Entry]], None],
        on_failed: Callable[[list[Entry], str], None],
        take_back: Callable[[], None],
    ) -> None:
        self._directory = directory
        self._fsync = fsync
        self._on_committed = on_committed
        self._on_failed = on_failed
        self._take_back = take_back
        self._inbox: queue.SimpleQueue[_Work] = queue.SimpleQueue()
        self._rows: dict[PartitionLog, int] = {}
        self._loop = asyncio.get_running_loop()
        self._thread = SqliteThread("eventpump-emulator-writer", self._connect, owner="Emulator", warns=False)
        self._writing: asyncio.Future[tuple[list[_Work], str] | None] | None = None
        self._is_closed = False

    async def open(self, specs: Sequence[HubSpec], now_ms: int) -> list[Hub]:
        """Load every stored hub, after creating or growing the declared ones. Once. Raises as `Emulator.start`."""
        try:
            await self._thread.open()
            return await self._thread.run(lambda database: self._load(database, specs, now_ms))
        except BaseException as error:
            await self.aclose()
            if isinstance(error, ConfigurationError) or not isinstance(error, Exception):
                raise
            raise _unusable(self._directory, error) from error

    def append(self, entry: Entry) -> None:
        """Hand a batch or a ledger's entry over; `on_committed` or `on_failed` answers for it, in their order."""
        self._submit(entry)

    def drop(self, partition: PartitionLog) -> None:
        """Forget what lies before the partition's beginning."""
        self._submit(_Drop(partition, partition.beginning))

    def forget(self, partition: PartitionLog, producer_ids: list[int]) -> None:
        """Forget idempotent producers of a partition."""
        self._submit(_Forget(partition, producer_ids))

    async def add_partitions(self, hub: Hub, partitions: list[PartitionLog]) -> None:
        """Keep new partitions of a hub. Raises `StoreError` if they could not be written."""
        done: asyncio.Future[None] = self._loop.create_future()
        self._submit(_AddPartitions(hub, partitions, done))
        await done

    async def aclose(self) -> None:
        """Write what was handed over, and end the thread. What comes later is dropped. Closing twice is fine."""
        self._is_closed = True
        try:
            while self._writing is not None:
                await asyncio.wait({self._writing})
        finally:
            self._thread.close()
        await self._thread.aclose()

    def _submit(self, work: _Work) -> None:
        if not self._is_closed:
            self._inbox.put(work)
            self._write()

    def _write(self) -> None:
        if self._writing is None and not self._inbox.empty() and not self._thread.is_closed:
            self._writing = self._thread.run(self._drain)
            self._writing.add_done_callback(self._drained)

    def _drained(self, writing: asyncio.Future[tuple[list[_Work], str] | None]) -> None:
        self._writing = None
        if (failure := writing.result()) is not None:
            # What was numbered after the batch that failed fails with it.
            later = self._next_group(limit=None)
            self._take_back()
            self._failed(*failure)
            if later:
                self._failed(later, "an earlier write failed")
        self._write()

    def _committed(self, group: list[_Work]) -> None:
        for work in group:
            if isinstance(work, _AddPartitions):
                resolve(work.done, None)
        if entries := _entries(group):
            self._on_committed(entries)

    def _failed(self, group: list[_Work], reason: str) -> None:
        for work in group:
            if isinstance(work, _AddPartitions):
                reject(work.done, StoreError("add partitions", reason))
        self._on_failed(_entries(group), reason)

    def _next_group(self, limit: int | None = _GROUP_BYTES) -> list[_Work]:
        """Take work off the inbox: until it is empty, or has so many bytes of events."""
        group: list[_Work] = []
        size = 0
        with contextlib.suppress(queue.Empty):
            while limit is None or size < limit:
                work = self._inbox.get_nowait()
                group.append(work)
                if isinstance(work, Append):
                    size += work.batch.size
        return group

    # ------------------------------------------------------------------------------------------ in the thread

    def _drain(self, database: sqlite3.Connection) -> tuple[list[_Work], str] | None:
        """Write group after group until the inbox is empty. Return the group that failed, and the reason."""
        while group := self._next_group():
            try:
                self._commit(database, group)
            except sqlite3.Error as error:
                return group, str(error)
            with contextlib.suppress(RuntimeError):  # the loop was closed, and its callbacks with it
                self._loop.call_soon_threadsafe(self._committed, group)
        return None

    def _commit(self, database: sqlite3.Connection, works: list[_Work]) -> None:
        with transaction(database):
            group = _Group(database, self._rows)
            for work in works:
                work.write(group)
            group.finish()

    def _connect(self) -> sqlite3.Connection:
        self._directory.mkdir(0o700, parents=True, exist_ok=True)
        return connect(
            self._directory / "hubs.sqlite",
            synchronous="FULL" if self._fsync else "NORMAL",
            busy_timeout=1.0,
            prepare=self._prepare,
            pragmas=("page_size = 32768", "locking_mode = EXCLUSIVE", "wal_autocheckpoint = 2000"),
        )

    def _prepare(self, database: sqlite3.Connection) -> None:
        with transaction(database):
            version = database.execute("PRAGMA user_version").fetchone()[0]
            if version == 0:
                for statement in _SCHEMA.split(";"):
                    database.execute(statement)
            if version in (0, 1):
                database.execute(_PRODUCERS)
                database.execute(f"PRAGMA user_version = {_SCHEMA_VERSION}")
            elif version != _SCHEMA_VERSION:
                raise ConfigurationError("data", f"{self._directory} was written by another version of the emulator")

    def _load(self, database: sqlite3.Connection, specs: Sequence[HubSpec], now_ms: int) -> list[Hub]:
        with transaction(database):
            for spec in specs:
                database.execute("INSERT OR IGNORE INTO hubs VALUES (?, ?)", (spec.name, now_ms))
                database.executemany(
                    "INSERT OR IGNORE INTO consumer_groups VALUES (?, ?)",
                    [(spec.name, group) for group in group_names(spec.consumer_groups).values()],
                )
                database.executemany(
                    "INSERT OR IGNORE INTO partitions (hub, number) VALUES (?, ?)",
                    [(spec.name, number) for number in range(spec.partitions)],
                )
        hubs = []
        for name, created_ms in database.execute("SELECT name, created_ms FROM hubs ORDER BY name").fetchall():
            groups = database.execute("SELECT name FROM consumer_groups WHERE hub = ?", (name,)).fetchall()
            rows = database.execute(
                "SELECT id, number, beginning, next_sequence_number, next_offset, last_offset, last_enqueued_ms"
                " FROM partitions WHERE hub = ? ORDER BY number",
                (name,),
            ).fetchall()
            partitions = [self._load_partition(database, now_ms, name, *row) for row in rows]
            hubs.append(Hub(name, created_ms, group_names(group for (group,) in groups), partitions))
        return hubs

    def _load_partition(
        self,
        database: sqlite3.Connection,
        now_ms: int,
        hub: str,
        row: int,
        number: int,
        beginning: int,
        next_sequence_number: int,
        next_offset: int,
        last_offset: int,
        last_enqueued_ms: int | None,
    ) -> PartitionLog:
        end = LogEnd(next_sequence_number, next_offset, last_offset, last_enqueued_ms)
        log = PartitionLog(hub, str(number), resume=end)
        self._rows[log] = row
        batches = database.execute(
            "SELECT sequence_number, first_offset, enqueued_ms, sizes, payload FROM batches"
            " WHERE partition = ? ORDER BY sequence_number",
            (row,),
        )
        for sequence_number, first_offset, enqueued_ms, sizes, payload in batches:
            batch = _unpack(log, sequence_number, first_offset, enqueued_ms, sizes, payload)
            if batch.next_sequence_number > beginning:
                log.restore(batch)
        producers = database.execute(
            "SELECT producer_id, epoch, last, is_fresh, recent FROM producers WHERE partition = ?", (row,)
        )
        for producer in producers:
            log.publishing.restore(_unpack_producer(*producer), now=now_ms / 1000)
        if log.payloads and log.beginning < beginning:
            log.drop_oldest(beginning - log.beginning)
        if log.end != next_sequence_number:
            raise ConfigurationError("data", f"{self._directory} lacks events of partition {number} of {hub}")
        return log


def _entries(group: list[_Work]) -> list[Entry]:
    return [work for work in group if isinstance(work, Append | LedgerEntry)]


def _unusable(directory: Path, error: Exception) -> ConfigurationError:
    if "locked" in str(error):
        return ConfigurationError("data", f"{directory} is in use by another emulator")
    return ConfigurationError("data", f"{directory} cannot be used: {error}")


def _unpack(
    log: PartitionLog, sequence_number: int, first_offset: int, enqueued_ms: int, sizes: bytes, payload: bytes
) -> NumberedBatch:
    payloads: list[bytes] = []
    offsets = array("q")
    position = 0
    lengths: array[int] = array("I")
    lengths.frombytes(sizes)
    for length in lengths:
        offsets.append(first_offset + position)
        payloads.append(payload[position : position + length])
        position += length
    return NumberedBatch(log, sequence_number, enqueued_ms, payloads, offsets, first_offset + position, position)


def _pack_recent(recent: tuple[tuple[int, int], ...]) -> bytes:
    return array("I", [value for batch in recent for value in batch]).tobytes()


def _unpack_producer(producer_id: int, epoch: int, last: int, is_fresh: int, recent: bytes) -> ProducerState:
    values: array[int] = array("I")
    values.frombytes(recent)
    return ProducerState(producer_id, epoch, last, bool(is_fresh), tuple(zip(values[::2], values[1::2], strict=True)))
