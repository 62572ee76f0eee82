"""Hubs on disk: SQLite in a directory, written by one thread that commits in groups.

A numbered batch is handed to the thread; once it is committed, the loop publishes it and answers the sender. So
nothing that anybody has seen is ever lost by a killed process, and no number is given twice.
"""

from __future__ import annotations

import asyncio
import enum
import queue
import sqlite3
import threading
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

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
class Append:
    """A numbered batch on its way to disk.

    Args:
        ticket: Whatever its owner needs to answer for it.
    """

    batch: NumberedBatch
    ticket: object


@dataclass(slots=True)
class LedgerEntry:
    """What is to be kept of an idempotent producer beside events, or (None) only an answer that waits its turn.

    Args:
        ticket: Whatever its owner needs to answer for it.
    """

    partition: PartitionLog
    producer: ProducerState | None
    ticket: object


Entry = Append | LedgerEntry


class _Signal(enum.Enum):
    RESUME = enum.auto()
    """Everything handed over before this was taken back after a failure; what follows counts again."""
    STOP = enum.auto()


@dataclass(slots=True)
class _Drop:
    partition: PartitionLog
    beginning: int


@dataclass(slots=True)
class _Forget:
    partition: PartitionLog
    producer_ids: list[int]


@dataclass(slots=True)
class _AddPartitions:
    hub: Hub
    partitions: list[PartitionLog]
    done: asyncio.Future[None]


class DurableStore:
    """The hubs of one directory. Everything but the thread's own function is called from the event loop.

    Args:
        directory: Made where it is missing.
        fsync: Survive power loss too, at the price of a disk flush per commit.
        on_committed: Called in the loop with every group that is on disk, in order.
        on_failed: Called in the loop with every group that was not written, and why.
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
        self._inbox: queue.SimpleQueue[Entry | _Drop | _Forget | _AddPartitions | _Signal] = queue.SimpleQueue()
        self._rows: dict[int, int] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._stopped: asyncio.Future[None] | None = None

    async def open(self, specs: Sequence[HubSpec], now_ms: int) -> list[Hub]:
        """Load every stored hub, after making or growing the declared ones. Once.

        Raises:
            ConfigurationError: The directory or its file cannot be used, or another process uses it.
        """
        loop = self._loop = asyncio.get_running_loop()
        loaded: asyncio.Future[list[Hub]] = loop.create_future()
        self._stopped = loop.create_future()
        self._thread = threading.Thread(
            target=self._run, args=(list(specs), now_ms, loaded), name="eventpump-emulator-writer", daemon=True
        )
        self._thread.start()
        try:
            return await asyncio.shield(loaded)
        except BaseException:
            await self.aclose()
            raise

    def append(self, entry: Entry) -> None:
        """Hand a batch or a ledger's entry over; `on_committed` or `on_failed` answers for it, in their order."""
        self._inbox.put(entry)

    def drop(self, partition: PartitionLog) -> None:
        """Forget what lies before the partition's beginning."""
        self._inbox.put(_Drop(partition, partition.beginning))

    def forget(self, partition: PartitionLog, producer_ids: list[int]) -> None:
        """Forget idempotent producers of a partition."""
        self._inbox.put(_Forget(partition, producer_ids))

    async def add_partitions(self, hub: Hub, partitions: list[PartitionLog]) -> None:
        """Keep new partitions of a hub.

        Raises:
            StoreError: They could not be written.
        """
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._inbox.put(_AddPartitions(hub, partitions, done))
        await done

    async def aclose(self) -> None:
        """Write what was handed over, and end the thread. Closing twice is fine."""
        thread, stopped = self._thread, self._stopped
        if thread is None or stopped is None:
            return
        self._inbox.put(_Signal.STOP)
        await asyncio.shield(stopped)
        thread.join()
        self._thread = None

    # ------------------------------------------------------------------------------------------ the thread

    def _run(self, specs: list[HubSpec], now_ms: int, loaded: asyncio.Future[list[Hub]]) -> None:
        assert self._loop is not None
        database: sqlite3.Connection | None = None
        try:
            try:
                database = self._connect()
                hubs = self._load(database, specs, now_ms)
            except Exception as error:
                problem = error if isinstance(error, ConfigurationError) else _unusable(self._directory, error)
                self._call(_set_exception, loaded, problem)
                return
            self._call(_set_result, loaded, hubs)
            self._serve(database)
        finally:
            if database is not None:
                database.close()
            self._call(_set_result, self._stopped, None)

    def _connect(self) -> sqlite3.Connection:
        self._directory.mkdir(parents=True, exist_ok=True)
        database = sqlite3.connect(self._directory / "hubs.sqlite", isolation_level=None, timeout=1.0)
        try:
            database.execute("PRAGMA page_size=32768")
            database.execute("PRAGMA locking_mode=EXCLUSIVE")
            database.execute("PRAGMA journal_mode=WAL")
            database.execute(f"PRAGMA synchronous={'FULL' if self._fsync else 'NORMAL'}")
            database.execute("PRAGMA wal_autocheckpoint=2000")
            database.execute("BEGIN IMMEDIATE")
            version = database.execute("PRAGMA user_version").fetchone()[0]
            if version == 0:
                for statement in _SCHEMA.split(";"):
                    database.execute(statement)
            if version in (0, 1):
                database.execute(_PRODUCERS)
                database.execute(f"PRAGMA user_version={_SCHEMA_VERSION}")
            elif version != _SCHEMA_VERSION:
                raise ConfigurationError("data", f"{self._directory} was written by another version of the emulator")
            database.execute("COMMIT")
        except BaseException:
            database.close()
            raise
        return database

    def _load(self, database: sqlite3.Connection, specs: list[HubSpec], now_ms: int) -> list[Hub]:
        database.execute("BEGIN IMMEDIATE")
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
        database.execute("COMMIT")
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
        self._rows[id(log)] = row
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

    def _serve(self, database: sqlite3.Connection) -> None:
        failing = False
        while True:
            group = [self._inbox.get()]
            size = 0
            while size < _GROUP_BYTES and group[-1] not in (_Signal.STOP, _Signal.RESUME):
                try:
                    item = self._inbox.get_nowait()
                except queue.Empty:
                    break
                group.append(item)
                if isinstance(item, Append):
                    size += item.batch.size
            last = group[-1]
            work = [item for item in group if not isinstance(item, _Signal)]
            entries = [item for item in work if isinstance(item, Append | LedgerEntry)]
            growths = [item.done for item in work if isinstance(item, _AddPartitions)]
            reason: str | None = "an earlier write failed" if failing else None
            if work and not failing:
                try:
                    self._commit(database, work)
                except sqlite3.Error as error:
                    reason = str(error)
            if work and reason is not None:
                for done in growths:
                    self._call(_set_exception, done, StoreError("add partitions", reason))
                self._call(self._on_failed if failing else self._failed, entries, reason)
                failing = True
            else:
                for done in growths:
                    self._call(_set_result, done, None)
                if entries:
                    self._call(self._on_committed, entries)
            if last is _Signal.RESUME:
                failing = False
            elif last is _Signal.STOP:
                return

    def _failed(self, entries: list[Entry], reason: str) -> None:
        self._take_back()
        self._on_failed(entries, reason)
        # What was handed over before this fails too, with nothing taken back a second time.
        self._inbox.put(_Signal.RESUME)

    def _commit(self, database: sqlite3.Connection, work: list[Entry | _Drop | _Forget | _AddPartitions]) -> None:
        database.execute("BEGIN IMMEDIATE")
        try:
            ends: dict[int, NumberedBatch] = {}
            producers: dict[tuple[int, int], ProducerState] = {}
            for item in work:
                if isinstance(item, Append):
                    batch = item.batch
                    row = self._rows[id(batch.partition)]
                    ends[row] = batch
                    if batch.producer is not None:
                        producers[row, batch.producer.producer_id] = batch.producer
                    database.execute(
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
                elif isinstance(item, LedgerEntry):
                    if item.producer is not None:
                        producers[self._rows[id(item.partition)], item.producer.producer_id] = item.producer
                elif isinstance(item, _Forget):
                    row = self._rows[id(item.partition)]
                    for producer_id in item.producer_ids:
                        producers.pop((row, producer_id), None)
                        database.execute(
                            "DELETE FROM producers WHERE partition = ? AND producer_id = ?", (row, producer_id)
                        )
                elif isinstance(item, _Drop):
                    row = self._rows[id(item.partition)]
                    # The row the beginning lies in stays; the load cuts it.
                    database.execute(
                        "DELETE FROM batches WHERE partition = ?1 AND sequence_number < COALESCE((SELECT MAX("
                        "sequence_number) FROM batches WHERE partition = ?1 AND sequence_number <= ?2), 0)",
                        (row, item.beginning),
                    )
                    database.execute("UPDATE partitions SET beginning = ? WHERE id = ?", (item.beginning, row))
                else:
                    for log in item.partitions:
                        cursor = database.execute(
                            "INSERT INTO partitions (hub, number) VALUES (?, ?)", (item.hub.name, int(log.partition_id))
                        )
                        assert cursor.lastrowid is not None
                        self._rows[id(log)] = cursor.lastrowid
            database.executemany(
                "UPDATE partitions SET next_sequence_number = ?, next_offset = ?, last_offset = ?,"
                " last_enqueued_ms = ? WHERE id = ?",
                [
                    (batch.next_sequence_number, batch.next_offset, batch.offsets[-1], batch.time_ms, row)
                    for row, batch in ends.items()
                ],
            )
            database.executemany(
                "INSERT OR REPLACE INTO producers VALUES (?, ?, ?, ?, ?, ?)",
                [
                    (row, producer_id, state.epoch, state.last, state.is_fresh, _pack_recent(state.recent))
                    for (row, producer_id), state in producers.items()
                ],
            )
            database.execute("COMMIT")
        except BaseException:
            if database.in_transaction:
                database.execute("ROLLBACK")
            raise

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            # The loop is closed: nobody is left to tell.
            assert self._loop.is_closed()


def _set_result(future: asyncio.Future[object], value: object) -> None:
    if not future.done():
        future.set_result(value)


def _set_exception(future: asyncio.Future[object], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)


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
