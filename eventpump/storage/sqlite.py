"""Leases and checkpoints in one SQLite file: several processes on one machine.

Who owns what is decided by a random token per acquisition: it fences renewals and checkpoints, whatever the clocks say.
Expiry only lets others acquire. It is kept in wall clock time, which the processes of a machine share: a clock set
forward makes leases expire early (they are lost, and noticed as lost), one set back makes them outlive their owner.
Not for network file systems: WAL needs shared memory. A process that is frozen (SIGSTOP) within a transaction keeps
the others from renewing for as long as it stands still; a killed one does not.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, TypeVar

from eventpump.clock import LoopClock
from eventpump.core.lease import LeaseSnapshot, PartitionLease
from eventpump.errors import ClosedError, ConfigurationError, StoreError
from eventpump.events import Checkpoint
from eventpump.ports import StoredScopeRecord
from eventpump.storage.layout import DEFAULT_SUBSCRIPTION, partition_order
from eventpump.storage.scope_form import encode_scope_record, parse_scope_record

if TYPE_CHECKING:
    from eventpump.ports import Clock, ConsumerScope, ScopeRecord

T = TypeVar("T")

_SCHEMA_VERSION: Final = 1
_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS scope (
    id INTEGER PRIMARY KEY,
    namespace TEXT NOT NULL COLLATE NOCASE,
    hub TEXT NOT NULL COLLATE NOCASE,
    consumer_group TEXT NOT NULL COLLATE NOCASE,
    UNIQUE (namespace, hub, consumer_group)
);
CREATE TABLE IF NOT EXISTS lease (
    scope INTEGER NOT NULL REFERENCES scope (id),
    partition_id TEXT NOT NULL,
    owner TEXT,
    token TEXT,
    epoch INTEGER NOT NULL DEFAULT 0,
    expires_at REAL NOT NULL DEFAULT 0,
    PRIMARY KEY (scope, partition_id)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS checkpoint (
    scope INTEGER NOT NULL REFERENCES scope (id),
    partition_id TEXT NOT NULL,
    subscription TEXT NOT NULL,
    "offset" TEXT NOT NULL,
    sequence_number INTEGER NOT NULL,
    PRIMARY KEY (scope, partition_id, subscription)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS scope_record (
    scope INTEGER PRIMARY KEY REFERENCES scope (id),
    version TEXT NOT NULL,
    record TEXT NOT NULL
);
"""
# A file of an earlier version lacks what came later. That version does not look at it, so both may use the file.
_IS_COMPLETE: Final = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'scope_record'"
_OF_LEASE: Final = " WHERE scope = ? AND partition_id = ?"
_FORWARD: Final = " WHERE excluded.sequence_number >= sequence_number"


class ForeignFileError(sqlite3.DatabaseError):
    """The file is none of ours, and trying again cannot change that."""


class SqliteLeaseStore:
    """A `LeaseStore` in a SQLite file.

    Calls run in one worker thread of the store's own; those made at the same time share one transaction, so that
    renewing every partition of a host costs one commit. A call that is cancelled is not made, or made and forgotten;
    a lease acquired or stolen by such a call is given back.

    :param path: the file; made where it does not exist, in a directory that does.
    :param lease_duration: how long a lease lives without renewal, in seconds.
    :param busy_timeout: how long to wait for another process's transaction, in seconds; None for the smaller of 5 s
        and a third of the lease duration.
    :param clock: None for the running loop's time, and the machine's.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        lease_duration: float = 30.0,
        busy_timeout: float | None = None,
        clock: Clock | None = None,
    ) -> None:
        if lease_duration <= 0:
            raise ConfigurationError("lease_duration", "must be above 0")
        self._path = os.fspath(path)
        self._lease_duration = float(lease_duration)
        self._busy_timeout = min(5.0, self._lease_duration / 3) if busy_timeout is None else busy_timeout
        self._clock = LoopClock() if clock is None else clock
        self._worker: _Worker | None = None
        self._scope_id = 0
        self._is_closed = False

    @property
    def lease_duration(self) -> float:
        """How long a lease lives without renewal, in seconds."""
        return self._lease_duration

    async def open(self, scope: ConsumerScope) -> None:
        """Open the file, make the tables and bind to a consumer group. Once.

        :raises ConfigurationError: the path cannot be that of our file, however long one waits.
        :raises StoreError: the file cannot be opened now.
        """
        if self._is_closed:
            raise ClosedError("lease store")
        if self._worker is not None:
            raise ConfigurationError("leases", "the store is open already; every host needs one of its own")
        _check_place(self._path)
        worker = self._worker = _Worker(self._path, self._busy_timeout)
        names = (scope.fully_qualified_namespace, scope.hub, scope.consumer_group)

        def bind(connection: sqlite3.Connection) -> int:
            connection.execute("INSERT OR IGNORE INTO scope (namespace, hub, consumer_group) VALUES (?, ?, ?)", names)
            query = "SELECT id FROM scope WHERE namespace = ? AND hub = ? AND consumer_group = ?"
            return int(connection.execute(query, names).fetchone()[0])

        try:
            self._scope_id = await worker.run("open", None, bind)
        except BaseException as error:
            self._worker = None
            await worker.aclose()
            if isinstance(error.__cause__, ForeignFileError):
                raise ConfigurationError("path", f"{self._path}: {error.__cause__}") from None
            raise

    async def ensure_leases(self, partition_ids: Sequence[str]) -> None:
        """Create the leases that do not exist yet, owned by nobody. Several hosts may do so at once."""
        rows = [(self._scope_id, partition_id) for partition_id in partition_ids]

        def ensure(connection: sqlite3.Connection) -> None:
            connection.executemany("INSERT OR IGNORE INTO lease (scope, partition_id) VALUES (?, ?)", rows)

        await self._run("ensure leases", None, ensure)

    async def list_leases(self) -> list[LeaseSnapshot]:
        """List every lease as it is now, in the order of partition ids."""
        query = "SELECT partition_id, owner, token, expires_at FROM lease WHERE scope = ?"
        parameters = (self._scope_id,)
        rows: list[tuple[str, str | None, str | None, float]] = await self._run(
            "list", None, lambda connection: connection.execute(query, parameters).fetchall()
        )
        now = self._clock.time()
        return [
            LeaseSnapshot(partition_id, owner, token is not None and now < expires_at, token)
            for partition_id, owner, token, expires_at in sorted(rows, key=lambda row: partition_order(row[0]))
        ]

    async def acquire_lease(self, partition_id: str, owner: str) -> PartitionLease | None:
        """Acquire a lease that nobody holds, with the next epoch. None where somebody does.

        Cancelled, the lease is not held by anybody.
        """
        now = self._clock.time()
        return await self._take(
            "acquire", partition_id, owner, lambda token, expires_at: token is None or expires_at <= now
        )

    async def steal_lease(self, snapshot: LeaseSnapshot, owner: str) -> PartitionLease | None:
        """Take a lease over from the owner in the snapshot, with the next epoch. None where it changed hands.

        Cancelled, the lease is held by the one it was taken from, or by nobody.
        """
        if snapshot.token is None:
            return None
        return await self._take(
            "steal", snapshot.partition_id, owner, lambda token, expires_at: token == snapshot.token
        )

    async def renew_lease(self, lease: PartitionLease) -> PartitionLease | None:
        """Renew. The same lease with a later `expires_at`, or None where it is lost."""
        sent = self._clock.monotonic()
        statement = f"UPDATE lease SET expires_at = ?{_OF_LEASE} AND token = ?"  # noqa: S608 - constants only
        parameters = (self._clock.time() + self._lease_duration, *self._key(lease.partition_id), lease.token)
        if not await self._run(
            "renew", lease.partition_id, lambda connection: connection.execute(statement, parameters).rowcount == 1
        ):
            return None
        return replace(lease, expires_at=sent + self._lease_duration)

    async def release_lease(self, lease: PartitionLease) -> bool:
        """Give the lease up, so that another may acquire it at once. False where it was lost already."""
        return await self._run("release", lease.partition_id, self._release(lease.partition_id, lease.token))

    async def read_checkpoint(self, partition_id: str, subscription: str = DEFAULT_SUBSCRIPTION) -> Checkpoint | None:
        """Read a checkpoint; None where there is none."""

        def select(connection: sqlite3.Connection) -> Checkpoint | None:
            found = self._select_checkpoint(connection, partition_id, subscription)
            return None if found is None else Checkpoint(partition_id, *found)

        return await self._run("read checkpoint", partition_id, select)

    async def write_checkpoint(
        self, lease: PartitionLease, checkpoint: Checkpoint, subscription: str = DEFAULT_SUBSCRIPTION
    ) -> bool:
        """Store a checkpoint under the lease. False, and nothing stored, where the lease is lost."""
        return await self._store_checkpoint("write checkpoint", lease, checkpoint, subscription, _FORWARD)

    async def reset_checkpoint(
        self, lease: PartitionLease, checkpoint: Checkpoint, subscription: str = DEFAULT_SUBSCRIPTION
    ) -> bool:
        """Store a checkpoint under the lease, whatever is stored. False, and nothing stored, where that is lost."""
        return await self._store_checkpoint("reset checkpoint", lease, checkpoint, subscription, "")

    async def read_scope_record(self) -> StoredScopeRecord | None:
        """Read the consumer group's record; None where there is none.

        :raises StoreError: the store failed, or what it holds is no record that this version knows.
        """
        operation, parameters = "read scope record", (self._scope_id,)
        query = "SELECT record, version FROM scope_record WHERE scope = ?"
        row: tuple[object, str] | None = await self._run(
            operation, None, lambda connection: connection.execute(query, parameters).fetchone()
        )
        if row is None:
            return None
        try:
            return StoredScopeRecord(parse_scope_record(str(row[0])), row[1])
        except ValueError as error:
            raise StoreError(operation, str(error)) from None

    async def write_scope_record(
        self, record: ScopeRecord, replaces: StoredScopeRecord | None
    ) -> StoredScopeRecord | None:
        """Store the consumer group's record by compare-and-swap. None, and nothing stored, where another is there.

        Cancelled or failed, it is stored or not; read it again.
        """
        text, version = encode_scope_record(record), secrets.token_hex(16)
        parameters: tuple[object, ...] = (text, version, self._scope_id)
        if replaces is None:
            statement = "INSERT OR IGNORE INTO scope_record (record, version, scope) VALUES (?, ?, ?)"
        else:
            statement = "UPDATE scope_record SET record = ?, version = ? WHERE scope = ? AND version = ?"
            parameters = (*parameters, replaces.version)
        is_stored = await self._run(
            "write scope record", None, lambda connection: connection.execute(statement, parameters).rowcount == 1
        )
        return StoredScopeRecord(record, version) if is_stored else None

    async def aclose(self) -> None:
        """Finish the calls under way, close the file and end the thread. Leases stay as they are."""
        self._is_closed = True
        if self._worker is not None:
            await self._worker.aclose()

    async def _run(self, operation: str, partition_id: str | None, work: Callable[[sqlite3.Connection], T]) -> T:
        if self._is_closed:
            raise ClosedError("lease store")
        if self._worker is None or not self._scope_id:
            raise StoreError(operation, "the store is not open", partition_id=partition_id)
        return await self._worker.run(operation, partition_id, work)

    async def _store_checkpoint(
        self, operation: str, lease: PartitionLease, checkpoint: Checkpoint, subscription: str, condition: str
    ) -> bool:
        """Store a checkpoint where the lease is ours.

        :param condition: says, as a clause, which stored checkpoints it replaces.
        """
        assert checkpoint.partition_id == lease.partition_id
        key = self._key(lease.partition_id)
        statement = (
            'INSERT INTO checkpoint (scope, partition_id, subscription, "offset", sequence_number)'  # noqa: S608 - constants only
            " VALUES (?, ?, ?, ?, ?) ON CONFLICT DO UPDATE"
            f' SET "offset" = excluded."offset", sequence_number = excluded.sequence_number{condition}'
        )
        parameters = (*key, subscription, checkpoint.offset, checkpoint.sequence_number)

        def write(connection: sqlite3.Connection) -> bool:
            if self._select_lease(connection, lease.partition_id)[0] != lease.token:
                return False
            connection.execute(statement, parameters)
            return True

        return await self._run(operation, lease.partition_id, write)

    async def _take(
        self, operation: str, partition_id: str, owner: str, may_take: Callable[[str | None, float], bool]
    ) -> PartitionLease | None:
        token = secrets.token_hex(16)
        sent = self._clock.monotonic()
        expiry = self._clock.time() + self._lease_duration

        def take(connection: sqlite3.Connection) -> int | None:
            found, epoch, expires_at = self._select_lease(connection, partition_id)
            if not may_take(found, expires_at):
                return None
            values = (owner, token, epoch + 1, expiry, *self._key(partition_id))
            statement = f"UPDATE lease SET owner = ?, token = ?, epoch = ?, expires_at = ?{_OF_LEASE}"  # noqa: S608
            connection.execute(statement, values)
            return epoch + 1

        try:
            epoch = await self._run(operation, partition_id, take)
        except asyncio.CancelledError:
            # The worker takes calls in their order: if the lease was taken, or still will be, this gives it back.
            if self._worker is not None:
                self._worker.run_forgotten(self._release(partition_id, token))
            raise
        if epoch is None:
            return None
        return PartitionLease(partition_id, owner, epoch, token, sent + self._lease_duration)

    def _release(self, partition_id: str, token: str) -> Callable[[sqlite3.Connection], bool]:
        statement = f"UPDATE lease SET owner = NULL, token = NULL{_OF_LEASE} AND token = ?"  # noqa: S608
        parameters = (*self._key(partition_id), token)
        return lambda connection: connection.execute(statement, parameters).rowcount == 1

    def _key(self, partition_id: str) -> tuple[int, str]:
        return (self._scope_id, partition_id)

    def _select_lease(self, connection: sqlite3.Connection, partition_id: str) -> tuple[str | None, int, float]:
        query = f"SELECT token, epoch, expires_at FROM lease{_OF_LEASE}"  # noqa: S608 - constants only
        row = connection.execute(query, self._key(partition_id)).fetchone()
        if row is None:
            raise StoreError("read", "there is no such lease", partition_id=partition_id)
        token, epoch, expires_at = row
        return token, epoch, expires_at

    def _select_checkpoint(
        self, connection: sqlite3.Connection, partition_id: str, subscription: str
    ) -> tuple[str, int] | None:
        query = f'SELECT "offset", sequence_number FROM checkpoint{_OF_LEASE} AND subscription = ?'  # noqa: S608
        row = connection.execute(query, (*self._key(partition_id), subscription)).fetchone()
        return None if row is None else (row[0], row[1])

    def __repr__(self) -> str:
        return f"SqliteLeaseStore({self._path!r})"


class _Call:
    """One unit of work for the worker thread, and who waits for it."""

    __slots__ = ("error", "future", "operation", "partition_id", "result", "work")

    def __init__(
        self,
        operation: str,
        partition_id: str | None,
        work: Callable[[sqlite3.Connection], Any],
        future: asyncio.Future[Any] | None,
    ) -> None:
        self.operation = operation
        self.partition_id = partition_id
        self.work = work
        self.future = future
        self.result: Any = None
        self.error: StoreError | None = None


class _Worker:
    """A thread with a SQLite connection. The calls of one turn of the event loop become one transaction."""

    def __init__(self, path: str, busy_timeout: float) -> None:
        self._path = path
        self._busy_timeout = busy_timeout
        self._loop = asyncio.get_running_loop()
        self._pending: list[_Call] = []
        self._batches: queue.SimpleQueue[list[_Call] | None] = queue.SimpleQueue()
        self._ended = asyncio.Event()
        self._is_closing = False
        # A daemon: a store that was not closed does not keep the process; a transaction is whole or not at all.
        self._thread = threading.Thread(target=self._serve, name="eventpump sqlite", daemon=True)
        self._thread.start()

    async def run(self, operation: str, partition_id: str | None, work: Callable[[sqlite3.Connection], T]) -> T:
        """Do work in a transaction and return its result. Cancelled, it is not done, or done and forgotten."""
        future: asyncio.Future[T] = self._loop.create_future()
        self._submit(_Call(operation, partition_id, work, future))
        return await future

    def run_forgotten(self, work: Callable[[sqlite3.Connection], Any]) -> None:
        """Do work after everything submitted before, unless the worker is closing; nobody waits for it."""
        if not self._is_closing:
            self._submit(_Call("", None, work, None))

    async def aclose(self) -> None:
        """Finish what was submitted and end the thread. Cancelled, the thread still ends."""
        if not self._is_closing:
            self._is_closing = True
            self._flush()
            self._batches.put(None)
        await self._ended.wait()
        self._thread.join()

    def _submit(self, call: _Call) -> None:
        if self._is_closing:
            raise ClosedError("lease store")
        if not self._pending:
            self._loop.call_soon(self._flush)
        self._pending.append(call)

    def _flush(self) -> None:
        batch = [call for call in self._pending if call.future is None or not call.future.cancelled()]
        self._pending = []
        if batch:
            self._batches.put(batch)

    # ---- in the worker thread

    def _serve(self) -> None:
        connection: sqlite3.Connection | None = None
        broken: sqlite3.Error | None = None
        try:
            try:
                connection = self._connect()
            except sqlite3.Error as error:
                broken = error
            while (batch := self._batches.get()) is not None:
                if connection is None:
                    assert broken is not None
                    _fail(batch, broken)
                else:
                    _commit(connection, batch)
                self._report(_deliver, batch)
        finally:
            if connection is not None:
                connection.close()
            self._report(self._ended.set)

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self._path, timeout=self._busy_timeout, isolation_level=None)
        try:
            self._prepare(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _prepare(self, connection: sqlite3.Connection) -> None:
        use_wal(connection, self._busy_timeout)
        # NORMAL loses the last commits with the power, never the file's consistency. Every owner runs on this machine
        # and is gone with it, so what an owner may lose so is a checkpoint, and events are delivered again.
        connection.execute("PRAGMA synchronous = NORMAL")
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if version not in (0, _SCHEMA_VERSION):
            raise ForeignFileError(f"schema version {version} is not known to this version of eventpump")
        if version and connection.execute(_IS_COMPLETE).fetchone() is not None:
            return
        connection.execute("BEGIN IMMEDIATE")
        for statement in _SCHEMA.split(";"):
            connection.execute(statement)
        connection.execute(f"PRAGMA user_version = {_SCHEMA_VERSION}")
        connection.execute("COMMIT")

    def _report(self, callback: Callable[..., object], *args: object) -> None:
        # The loop may be gone, when a store was not closed: then nobody waits any more.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback, *args)


def use_wal(connection: sqlite3.Connection, busy_timeout: float) -> None:
    """Switch a file to WAL. :param busy_timeout: how long to wait for another process that does so, in seconds."""
    # Two processes that open a new file at once: switching to WAL is the one thing SQLite does not wait for.
    deadline = time.monotonic() + busy_timeout
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL").fetchone()
        except sqlite3.DatabaseError as error:
            if error.sqlite_errorcode == sqlite3.SQLITE_NOTADB:
                raise ForeignFileError(str(error)) from error
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() >= deadline:
                raise
            time.sleep(0.005)
        else:
            return


def _check_place(path: str) -> None:
    """Check what no waiting mends. :raises ConfigurationError: there can be no file at this path."""
    if os.path.isdir(path) or not os.path.isdir(os.path.dirname(path) or os.curdir):
        raise ConfigurationError("path", f"{path}: a file in a directory that exists is needed")


def _commit(connection: sqlite3.Connection, batch: list[_Call]) -> None:
    """Do a batch in one transaction; what cannot be committed is an error of every call in it."""
    try:
        connection.execute("BEGIN IMMEDIATE")
        for call in batch:
            try:
                call.result = call.work(connection)
            except sqlite3.Error:
                raise
            except StoreError as error:
                call.error = StoreError(call.operation, error.reason, partition_id=call.partition_id)
            except Exception as error:  # a number beyond 64 bits, say: that call's own fault, and the thread lives on
                call.error = StoreError(call.operation, str(error), partition_id=call.partition_id)
                call.error.__cause__ = error
        connection.execute("COMMIT")
    except sqlite3.Error as error:
        if connection.in_transaction:
            with contextlib.suppress(sqlite3.Error):  # the first error is the one to tell
                connection.execute("ROLLBACK")
        _fail(batch, error)


def _fail(batch: list[_Call], error: sqlite3.Error) -> None:
    for call in batch:
        call.error = StoreError(call.operation, str(error), partition_id=call.partition_id)
        call.error.__cause__ = error


def _deliver(batch: list[_Call]) -> None:
    """In the event loop: hand out results to those still waiting."""
    for call in batch:
        if call.future is None or call.future.done():
            continue
        if call.error is not None:
            call.future.set_exception(call.error)
        else:
            call.future.set_result(call.result)
