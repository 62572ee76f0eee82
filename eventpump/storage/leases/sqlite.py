"""Leases and checkpoints in one SQLite file: several processes on one machine.

Who owns what is decided by a random token per acquisition: it fences renewals and checkpoints, whatever the clocks say.
Expiry only lets others acquire. It is kept on the clock of the machine's boot, which nobody can set and which goes on
while the machine is suspended; and in wall clock time beside it, for who cannot read that clock: another system than
Linux, a container with a boot id of its own, an earlier version, and after a reboot. There a clock set forward makes
leases expire early (they are lost, and noticed as lost), and one set back makes a dead owner's lease wait once for as
long as it lives without renewal.

Not for network file systems: WAL needs shared memory. The file's one write lock is held for bare statements only:
everything is read and decided before, a single statement is its own transaction, and all renewals of a turn are a
single statement. What remains: a process that is frozen (SIGSTOP, a paused container) while it holds the lock keeps the
others from writing for as long as it stands still, and they lose their leases; a killed one does not. That is
microseconds for a single statement; between the statements of a longer transaction, such as the checkpoints of many
partitions made in one turn, the thread may wait for the GIL, 5 ms for each where a handler computes. What only reads
needs no lock, and waits at most `busy_timeout` behind a write of its own host.
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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, TypeVar

from eventpump.clock import LoopClock
from eventpump.core.lease import LeaseSnapshot, PartitionLease
from eventpump.errors import ClosedError, ConfigurationError, StoreError
from eventpump.eventhubs.events import Checkpoint
from eventpump.interfaces import CheckpointClaim, StoredScopeRecord, StoredSubscription
from eventpump.storage.leases.expiry import Expiry, ExpiryJudge
from eventpump.storage.leases.layout import DEFAULT_SUBSCRIPTION, partition_order
from eventpump.storage.leases.scope_form import (
    encode_scope_record,
    encode_subscription,
    parse_scope_record,
    parse_subscription,
)

if TYPE_CHECKING:
    from eventpump.interfaces import Clock, ConsumerScope, ScopeRecord, SubscriptionRecord

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
CREATE TABLE IF NOT EXISTS subscription (
    scope INTEGER NOT NULL REFERENCES scope (id),
    name TEXT NOT NULL,
    version TEXT NOT NULL,
    record TEXT NOT NULL,
    PRIMARY KEY (scope, name)
) WITHOUT ROWID;
"""
# What came after the first version, which does not look at it: so both may use one file. These columns hold for the
# token beside them only, as the first version changes the token and leaves them as they are.
_LATER_COLUMNS: Final = {
    "expiry_token": "TEXT",
    "expiry_boot_id": "TEXT",
    "expires_at_boot": "REAL",
    "duration": "REAL",
}
_IS_COMPLETE: Final = (
    "SELECT (SELECT count(*) FROM sqlite_master WHERE type = 'table' AND name IN ('scope_record', 'subscription'))"
    " + (SELECT count(*) FROM pragma_table_info('lease') WHERE name = 'duration')"
)
_TOLD_EXPIRY: Final = "expires_at, expiry_token IS token, expiry_boot_id, expires_at_boot, duration"
_NEW_EXPIRY: Final = "expires_at = ?, expiry_token = token, expiry_boot_id = ?, expires_at_boot = ?, duration = ?"
_AT_ONCE: Final = 480
"""Rows in one statement, at two parameters each: every SQLite takes 999."""
_OF_LEASE: Final = " WHERE scope = ? AND partition_id = ?"
_FORWARD: Final = " WHERE excluded.sequence_number >= sequence_number"


class ForeignFileError(sqlite3.DatabaseError):
    """The file is none of ours, and trying again cannot change that."""


class SqliteLeaseStore:
    """A `LeaseStore` in a SQLite file.

    Calls run in one worker thread of the store's own; the writes of one turn of the event loop share one transaction,
    and its renewals one statement. A call that is cancelled is not made, or made and forgotten; a lease acquired or
    stolen by such a call is given back.

    Args:
        path: The file; made where it does not exist, in a directory that does.
        lease_duration: How long a lease lives without renewal, in seconds.
        busy_timeout: How long to wait for another process's transaction, in seconds; None for the smaller of 5 s and a
            third of the lease duration.
        clock: None for the running loop's time, and the machine's. One of your own that is no `MachineClock` has expiry
            kept in wall clock time.
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
        self._judge = ExpiryJudge(self._clock)
        self._worker: _Worker | None = None
        self._scope_id = 0
        self._under_way = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._is_closed = False

    @property
    def lease_duration(self) -> float:
        """How long a lease lives without renewal, in seconds."""
        return self._lease_duration

    async def open(self, scope: ConsumerScope) -> None:
        """Open the file, make the tables and bind to a consumer group. Once.

        Raises:
            ConfigurationError: The path cannot be that of our file, however long one waits.
            StoreError: The file cannot be opened now.
        """
        if self._is_closed:
            raise ClosedError("lease store")
        if self._worker is not None:
            raise ConfigurationError("leases", "the store is open already; every host needs one of its own")
        _check_place(self._path)
        worker = self._worker = _Worker(self._path, self._busy_timeout)
        names = (scope.fully_qualified_namespace, scope.hub, scope.consumer_group)

        query = "SELECT id FROM scope WHERE namespace = ? AND hub = ? AND consumer_group = ?"
        statement = "INSERT OR IGNORE INTO scope (namespace, hub, consumer_group) VALUES (?, ?, ?)"

        try:
            rows = await worker.read("open", None, query, names)
            if not rows:
                await worker.write("open", None, statement, names)
                rows = await worker.read("open", None, query, names)
            self._scope_id = int(rows[0][0])
        except BaseException as error:
            self._worker = None
            await worker.aclose()
            if isinstance(error.__cause__, ForeignFileError):
                raise ConfigurationError("path", f"{self._path}: {error.__cause__}") from None
            raise

    async def ensure_leases(self, partition_ids: Sequence[str]) -> None:
        """Create the leases that do not exist yet, owned by nobody. Several hosts may do so at once."""
        operation = "ensure leases"
        with self._calling(operation) as worker:
            query = "SELECT partition_id FROM lease WHERE scope = ?"
            found = await worker.read(operation, None, query, (self._scope_id,))
            missing = sorted(set(partition_ids) - {partition_id for (partition_id,) in found}, key=partition_order)
            parts = [missing[first : first + _AT_ONCE] for first in range(0, len(missing), _AT_ONCE)]
            statement = "INSERT OR IGNORE INTO lease (scope, partition_id) VALUES (?, ?)"
            await asyncio.gather(
                *(
                    worker.write(
                        operation,
                        None,
                        statement + ", (?, ?)" * (len(part) - 1),
                        tuple(value for partition_id in part for value in self._key(partition_id)),
                    )
                    for part in parts
                )
            )

    async def list_leases(self) -> list[LeaseSnapshot]:
        """List every lease as it is now, in the order of partition ids."""
        query = f"SELECT partition_id, owner, token, {_TOLD_EXPIRY} FROM lease WHERE scope = ?"  # noqa: S608 - constants
        worker, read_at = self._bound("list"), self._clock.monotonic()
        rows = await worker.read("list", None, query, (self._scope_id,))
        return [
            LeaseSnapshot(
                partition_id, owner, self._judge.is_held(partition_id, token, _expiry(*expiry), read_at), token
            )
            for partition_id, owner, token, *expiry in sorted(rows, key=lambda row: partition_order(row[0]))
        ]

    async def acquire_lease(self, partition_id: str, owner: str) -> PartitionLease | None:
        """Acquire a lease that nobody holds, with the next epoch. None where somebody does.

        Cancelled, the lease is not held by anybody.
        """
        with self._calling("acquire", partition_id) as worker:
            read_at = self._clock.monotonic()
            row = await self._read_lease(worker, "acquire", partition_id)
            if self._judge.is_held(partition_id, row.token, row.expiry, read_at):
                return None
            return await self._take(worker, "acquire", row, owner)

    async def steal_lease(self, snapshot: LeaseSnapshot, owner: str) -> PartitionLease | None:
        """Take a lease over from the owner in the snapshot, with the next epoch. None where it changed hands.

        Cancelled, the lease is held by the one it was taken from, or by nobody.
        """
        if snapshot.token is None:
            return None
        with self._calling("steal", snapshot.partition_id) as worker:
            row = await self._read_lease(worker, "steal", snapshot.partition_id)
            if row.token != snapshot.token:
                return None
            return await self._take(worker, "steal", row, owner, is_stolen=True)

    async def renew_lease(self, lease: PartitionLease) -> PartitionLease | None:
        """Renew. The same lease with a later `expires_at`, or None where it is lost."""
        worker = self._bound("renew", lease.partition_id)
        sent = self._clock.monotonic()
        expiry = self._judge.expiry_in(self._lease_duration)
        if not await worker.renew(self._scope_id, lease, expiry):
            return None
        return replace(lease, expires_at=sent + self._lease_duration)

    async def release_lease(self, lease: PartitionLease) -> bool:
        """Give the lease up, so that another may acquire it at once. False where it was lost already."""
        worker = self._bound("release", lease.partition_id)
        statement, parameters = self._release(lease.partition_id, lease.token)
        return bool(await worker.write("release", lease.partition_id, statement, parameters))

    async def read_checkpoint(self, partition_id: str, subscription: str = DEFAULT_SUBSCRIPTION) -> Checkpoint | None:
        """Read a checkpoint; None where there is none."""

        worker = self._bound("read checkpoint", partition_id)
        query = f'SELECT "offset", sequence_number FROM checkpoint{_OF_LEASE} AND subscription = ?'  # noqa: S608
        rows = await worker.read("read checkpoint", partition_id, query, (*self._key(partition_id), subscription))
        return Checkpoint(partition_id, rows[0][0], rows[0][1]) if rows else None

    async def claim_checkpoint(
        self, lease: PartitionLease, subscription: str = DEFAULT_SUBSCRIPTION
    ) -> CheckpointClaim | None:
        """Read a checkpoint under the lease. None where that is lost.

        Every write is fenced by the lease's token, so nothing is written.
        """
        operation, partition_id = "claim checkpoint", lease.partition_id
        query = (
            'SELECT lease.token, "offset", sequence_number FROM lease LEFT JOIN checkpoint'
            " ON checkpoint.scope = lease.scope AND checkpoint.partition_id = lease.partition_id AND subscription = ?"
            " WHERE lease.scope = ? AND lease.partition_id = ?"
        )
        worker = self._bound(operation, partition_id)
        rows = await worker.read(operation, partition_id, query, (subscription, *self._key(partition_id)))
        if not rows:
            raise StoreError(operation, "there is no such lease", partition_id=partition_id)
        token, offset, number = rows[0]
        if token != lease.token:
            return None
        return CheckpointClaim(None if offset is None else Checkpoint(partition_id, offset, number))

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

        Raises:
            StoreError: The store failed, or what it holds is no record that this version knows.
        """
        operation = "read scope record"
        query = "SELECT record, version FROM scope_record WHERE scope = ?"
        rows = await self._bound(operation).read(operation, None, query, (self._scope_id,))
        if not rows:
            return None
        try:
            return StoredScopeRecord(parse_scope_record(str(rows[0][0])), rows[0][1])
        except ValueError as error:
            raise StoreError(operation, str(error)) from None

    async def write_scope_record(
        self, record: ScopeRecord, replaces: StoredScopeRecord | None
    ) -> StoredScopeRecord | None:
        """Store the consumer group's record by compare-and-swap. None, and nothing stored, where another is there.

        Cancelled or failed, it is stored or not; read it again.
        """
        operation = "write scope record"
        worker = self._bound(operation)
        version = secrets.token_hex(16)
        parameters: tuple[object, ...] = (encode_scope_record(record), version, self._scope_id)
        if replaces is None:
            statement = "INSERT OR IGNORE INTO scope_record (record, version, scope) VALUES (?, ?, ?)"
        else:
            statement = "UPDATE scope_record SET record = ?, version = ? WHERE scope = ? AND version = ?"
            parameters = (*parameters, replaces.version)
        is_stored = await worker.write(operation, None, statement, parameters)
        return StoredScopeRecord(record, version) if is_stored else None

    async def list_subscriptions(self) -> list[StoredSubscription]:
        """List the records of the consumer group's subscriptions, by name.

        Raises:
            StoreError: The store failed, or holds a record that this version does not know.
        """
        query = "SELECT record, version FROM subscription WHERE scope = ? ORDER BY name"
        return await self._read_subscriptions("list subscriptions", query, (self._scope_id,))

    async def read_subscription(self, name: str) -> StoredSubscription | None:
        """Read the record of a subscription; None where there is none.

        Raises:
            StoreError: The store failed, or what it holds is no record that this version knows.
        """
        query = "SELECT record, version FROM subscription WHERE scope = ? AND name = ?"
        found = await self._read_subscriptions("read subscription", query, (self._scope_id, name))
        return found[0] if found else None

    async def write_subscription(
        self, record: SubscriptionRecord, replaces: StoredSubscription | None
    ) -> StoredSubscription | None:
        """Store a subscription's record by compare-and-swap. None, and nothing stored, where another is there.

        Cancelled or failed, it is stored or not; read it again.
        """
        operation = "write subscription"
        version = secrets.token_hex(16)
        parameters: tuple[object, ...] = (encode_subscription(record), version, self._scope_id, record.name)
        if replaces is None:
            statement = "INSERT OR IGNORE INTO subscription (record, version, scope, name) VALUES (?, ?, ?, ?)"
        else:
            statement = "UPDATE subscription SET record = ?, version = ? WHERE scope = ? AND name = ? AND version = ?"
            parameters = (*parameters, replaces.version)
        is_stored = await self._bound(operation).write(operation, None, statement, parameters)
        return StoredSubscription(record, version) if is_stored else None

    async def delete_subscription(self, stored: StoredSubscription) -> bool:
        """Delete a subscription's record and checkpoints. False, and nothing deleted, where another is there."""
        operation, record = "delete subscription", stored.record
        with self._calling(operation) as worker:
            statement = "DELETE FROM subscription WHERE scope = ? AND name = ? AND version = ?"
            parameters = (self._scope_id, record.name, stored.version)
            if not await worker.write(operation, None, statement, parameters):
                return False
            statement = "DELETE FROM checkpoint WHERE scope = ? AND subscription = ?"
            await worker.write(operation, None, statement, (self._scope_id, record.key))
            return True

    async def aclose(self) -> None:
        """Finish the calls under way, close the file and end the thread. Leases stay as they are."""
        self._is_closed = True
        if self._worker is None:
            return
        try:
            await self._idle.wait()
        finally:
            self._worker.close()
        await self._worker.aclose()

    async def _read_subscriptions(
        self, operation: str, query: str, parameters: tuple[object, ...]
    ) -> list[StoredSubscription]:
        rows = await self._bound(operation).read(operation, None, query, parameters)
        try:
            return [StoredSubscription(parse_subscription(str(record)), version) for record, version in rows]
        except ValueError as error:
            raise StoreError(operation, str(error)) from None

    def _bound(self, operation: str, partition_id: str | None = None) -> _Worker:
        if self._is_closed:
            raise ClosedError("lease store")
        if self._worker is None or not self._scope_id:
            raise StoreError(operation, "the store is not open", partition_id=partition_id)
        return self._worker

    @contextlib.contextmanager
    def _calling(self, operation: str, partition_id: str | None = None) -> Iterator[_Worker]:
        """Lend the worker to a call of several steps, which closing waits for."""
        worker = self._bound(operation, partition_id)
        self._under_way += 1
        self._idle.clear()
        try:
            yield worker
        finally:
            self._under_way -= 1
            if not self._under_way:
                self._idle.set()

    async def _store_checkpoint(
        self, operation: str, lease: PartitionLease, checkpoint: Checkpoint, subscription: str, condition: str
    ) -> bool:
        """Store a checkpoint where the lease is ours.

        Args:
            condition: Says, as a clause, which stored checkpoints it replaces.
        """
        assert checkpoint.partition_id == lease.partition_id
        key = self._key(lease.partition_id)
        statement = (
            'INSERT INTO checkpoint (scope, partition_id, subscription, "offset", sequence_number)'  # noqa: S608 - constants only
            f" SELECT scope, partition_id, ?, ?, ? FROM lease{_OF_LEASE} AND token = ? ON CONFLICT DO UPDATE"
            f' SET "offset" = excluded."offset", sequence_number = excluded.sequence_number{condition}'
        )
        parameters = (subscription, checkpoint.offset, checkpoint.sequence_number, *key, lease.token)
        with self._calling(operation, lease.partition_id) as worker:
            if await worker.write(operation, lease.partition_id, statement, parameters):
                return True
            # Nothing stored: the lease is lost, or a higher number is there.
            return (await self._read_lease(worker, operation, lease.partition_id)).token == lease.token

    async def _read_lease(self, worker: _Worker, operation: str, partition_id: str) -> _LeaseRow:
        query = f"SELECT token, epoch, {_TOLD_EXPIRY} FROM lease{_OF_LEASE}"  # noqa: S608 - constants only
        rows = await worker.read(operation, partition_id, query, self._key(partition_id))
        if not rows:
            raise StoreError(operation, "there is no such lease", partition_id=partition_id)
        token, epoch, *expiry = rows[0]
        return _LeaseRow(partition_id, token, epoch, _expiry(*expiry))

    async def _take(
        self, worker: _Worker, operation: str, row: _LeaseRow, owner: str, *, is_stolen: bool = False
    ) -> PartitionLease | None:
        """Take a lease that is as it was read; where it is stolen, its owner may have renewed it since."""
        partition_id, token, epoch = row.partition_id, secrets.token_hex(16), row.epoch + 1
        sent = self._clock.monotonic()
        expiry = self._judge.expiry_in(self._lease_duration)
        statement = (
            "UPDATE lease SET owner = ?, token = ?, epoch = ?, expires_at = ?,"  # noqa: S608 - constants only
            f" expiry_token = ?, expiry_boot_id = ?, expires_at_boot = ?, duration = ?{_OF_LEASE} AND token IS ?"
        )
        parameters: tuple[object, ...] = (
            *(owner, token, epoch, expiry.wall, token, expiry.boot_id, expiry.boot, expiry.duration),
            *(*self._key(partition_id), row.token),
        )
        if not is_stolen:
            statement += " AND epoch = ? AND expires_at = ?"
            parameters = (*parameters, row.epoch, row.expiry.wall)
        try:
            is_taken = await worker.write(operation, partition_id, statement, parameters)
        except asyncio.CancelledError:
            # The worker takes writes in their order: if the lease was taken, or still will be, this gives it back.
            worker.write_forgotten(*self._release(partition_id, token))
            raise
        return PartitionLease(partition_id, owner, epoch, token, sent + self._lease_duration) if is_taken else None

    def _release(self, partition_id: str, token: str) -> tuple[str, tuple[object, ...]]:
        statement = f"UPDATE lease SET owner = NULL, token = NULL{_OF_LEASE} AND token = ?"  # noqa: S608 - constants only
        return statement, (*self._key(partition_id), token)

    def _key(self, partition_id: str) -> tuple[int, str]:
        return (self._scope_id, partition_id)

    def __repr__(self) -> str:
        return f"SqliteLeaseStore({self._path!r})"


@dataclass(frozen=True, slots=True)
class _LeaseRow:
    partition_id: str
    token: str | None
    epoch: int
    expiry: Expiry


def _expiry(wall: float, is_told: object, boot_id: str | None, boot: float | None, duration: float | None) -> Expiry:
    """Make an expiry of what `_TOLD_EXPIRY` selects."""
    if not is_told or boot is None:
        return Expiry(wall)
    return Expiry(wall, boot_id, boot, duration)


class _Call:
    """What somebody waits for."""

    __slots__ = ("error", "future", "operation", "partition_id", "result")

    def __init__(self, operation: str, partition_id: str | None, future: asyncio.Future[Any] | None) -> None:
        self.operation = operation
        self.partition_id = partition_id
        self.future = future
        self.result: Any = None
        self.error: StoreError | None = None

    def fail(self, error: Exception) -> None:
        """End it with a failure of the store."""
        self.error = StoreError(self.operation, str(error), partition_id=self.partition_id)
        self.error.__cause__ = error


class _Look(_Call):
    """Work that only reads: done before any transaction, and its result is handed out then."""

    __slots__ = ("work",)

    def __init__(
        self,
        operation: str,
        partition_id: str | None,
        future: asyncio.Future[Any],
        work: Callable[[sqlite3.Connection], Any],
    ) -> None:
        super().__init__(operation, partition_id, future)
        self.work = work


class _Write(_Call):
    """A statement, fenced in itself; its result is how many rows it changed."""

    __slots__ = ("parameters", "statement")

    def __init__(
        self,
        operation: str,
        partition_id: str | None,
        future: asyncio.Future[Any] | None,
        statement: str,
        parameters: tuple[object, ...],
    ) -> None:
        super().__init__(operation, partition_id, future)
        self.statement = statement
        self.parameters = parameters


class _Renewal(_Call):
    """A renewal, done with all others of its turn. Its result is whether the lease is its owner's still."""

    __slots__ = ("expiry", "scope_id", "token")

    def __init__(self, scope_id: int, lease: PartitionLease, future: asyncio.Future[Any], expiry: Expiry) -> None:
        super().__init__("renew", lease.partition_id, future)
        self.scope_id = scope_id
        self.token = lease.token
        self.expiry = expiry


class _Worker:
    """A thread with a SQLite connection. The writes of one turn of the event loop become one transaction."""

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
        """Do work that only reads, and return its result. Cancelled, it is not done, or done and forgotten."""
        future: asyncio.Future[T] = self._loop.create_future()
        self._submit(_Look(operation, partition_id, future, work))
        return await future

    async def read(
        self, operation: str, partition_id: str | None, query: str, parameters: tuple[object, ...]
    ) -> list[Any]:
        """Run a query and return its rows."""
        return await self.run(
            operation, partition_id, lambda connection: connection.execute(query, parameters).fetchall()
        )

    async def write(
        self, operation: str, partition_id: str | None, statement: str, parameters: tuple[object, ...]
    ) -> int:
        """Run a statement and return how many rows it changed. Cancelled, it is not run, or run and forgotten."""
        future: asyncio.Future[int] = self._loop.create_future()
        self._submit(_Write(operation, partition_id, future, statement, parameters))
        return await future

    def write_forgotten(self, statement: str, parameters: tuple[object, ...]) -> None:
        """Run a statement after every write submitted before, unless the worker is closing; nobody waits for it."""
        if not self._is_closing:
            self._submit(_Write("", None, None, statement, parameters))

    async def renew(self, scope_id: int, lease: PartitionLease, expiry: Expiry) -> bool:
        """Renew a lease; False where it is lost. Cancelled, it is not renewed, or renewed and forgotten."""
        future: asyncio.Future[bool] = self._loop.create_future()
        self._submit(_Renewal(scope_id, lease, future, expiry))
        return await future

    def close(self) -> None:
        """Take nothing more, and have the thread end after what was submitted. Closing twice is fine."""
        if not self._is_closing:
            self._is_closing = True
            self._flush()
            self._batches.put(None)

    async def aclose(self) -> None:
        """Finish what was submitted and end the thread. Cancelled, the thread still ends."""
        self.close()
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
                    for call in batch:
                        call.fail(broken)
                    self._report(_deliver, batch)
                else:
                    self._do(connection, batch)
        finally:
            if connection is not None:
                connection.close()
            self._report(self._ended.set)

    def _do(self, connection: sqlite3.Connection, batch: list[_Call]) -> None:
        looks = [call for call in batch if isinstance(call, _Look)]
        writes = [call for call in batch if isinstance(call, _Write)]
        renewals = [call for call in batch if isinstance(call, _Renewal)]
        if looks:
            # Nothing that only reads waits for the file's write lock, nor for what does.
            for look in looks:
                _look(connection, look)
            self._report(_deliver, looks)
        if renewals or writes:
            _commit(connection, renewals, writes)
            self._report(_deliver, [*renewals, *writes])

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
        if version and connection.execute(_IS_COMPLETE).fetchone()[0] == 3:
            return
        connection.execute("BEGIN IMMEDIATE")
        for statement in _SCHEMA.split(";"):
            connection.execute(statement)
        present = {column[1] for column in connection.execute("PRAGMA table_info(lease)")}
        for name, kind in _LATER_COLUMNS.items():
            if name not in present:
                connection.execute(f"ALTER TABLE lease ADD COLUMN {name} {kind}")
        connection.execute(f"PRAGMA user_version = {_SCHEMA_VERSION}")
        connection.execute("COMMIT")

    def _report(self, callback: Callable[..., object], *args: object) -> None:
        # The loop may be gone, when a store was not closed: then nobody waits any more.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback, *args)


def use_wal(connection: sqlite3.Connection, busy_timeout: float) -> None:
    """Switch a file to WAL.

    Args:
        busy_timeout: How long to wait for another process that does so, in seconds.
    """
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
    """Check what no waiting mends.

    Raises:
        ConfigurationError: There can be no file at this path.
    """
    if os.path.isdir(path) or not os.path.isdir(os.path.dirname(path) or os.curdir):
        raise ConfigurationError("path", f"{path}: a file in a directory that exists is needed")


def _look(connection: sqlite3.Connection, look: _Look) -> None:
    try:
        look.result = look.work(connection)
    except Exception as error:  # a number beyond 64 bits, say: the thread lives on
        look.fail(error)


def _commit(connection: sqlite3.Connection, renewals: list[_Renewal], writes: list[_Write]) -> None:
    """Do renewals and writes in one transaction; what cannot be committed is an error of every one of them.

    While it runs the file is locked: nothing is read or decided here, and a single statement needs no more than itself.
    """
    parts = [renewals[first : first + _AT_ONCE] for first in range(0, len(renewals), _AT_ONCE)]
    merged = [_merged(part) for part in parts]
    is_single = len(merged) + len(writes) == 1
    try:
        if not is_single:
            connection.execute("BEGIN IMMEDIATE")
        found = [connection.execute(statement, parameters).rowcount for statement, parameters in merged]
        for write in writes:
            try:
                write.result = connection.execute(write.statement, write.parameters).rowcount
            except sqlite3.Error:
                raise
            except Exception as error:  # a number beyond 64 bits, say: that call's own fault
                write.fail(error)
        if not is_single:
            connection.execute("COMMIT")
    except sqlite3.Error as error:
        if connection.in_transaction:
            with contextlib.suppress(sqlite3.Error):  # the first error is the one to tell
                connection.execute("ROLLBACK")
        for call in (*renewals, *writes):
            call.fail(error)
        return
    try:
        for part, rows in zip(parts, found, strict=True):
            _conclude(connection, part, rows)
    except sqlite3.Error as error:
        for renewal in renewals:
            renewal.fail(error)


_OF_RENEWED: Final = " WHERE scope = ? AND partition_id IN ({0}) AND token IN ({0})"


def _merged(renewals: list[_Renewal]) -> tuple[str, tuple[object, ...]]:
    """Make one statement of renewals. A token belongs to one acquisition of one partition: nothing else fits them."""
    # They are of one turn of the loop. The latest of their expiries is safe for all: no owner believes in a later one.
    latest = renewals[-1].expiry
    statement = f"UPDATE lease SET {_NEW_EXPIRY}{_OF_RENEWED}".format(", ".join("?" * len(renewals)))  # noqa: S608
    return statement, (latest.wall, latest.boot_id, latest.boot, latest.duration, *_renewed(renewals))


def _conclude(connection: sqlite3.Connection, renewals: list[_Renewal], rows: int) -> None:
    """Find which renewals found their lease: all where so many rows were changed, else those whose token is there."""
    if rows == len(renewals):
        for renewal in renewals:
            renewal.result = True
        return
    query = f"SELECT token FROM lease{_OF_RENEWED}".format(", ".join("?" * len(renewals)))  # noqa: S608 - constants only
    tokens = {token for (token,) in connection.execute(query, _renewed(renewals))}
    for renewal in renewals:
        renewal.result = renewal.token in tokens


def _renewed(renewals: list[_Renewal]) -> tuple[object, ...]:
    """The parameters of `_OF_RENEWED`."""
    partition_ids = (renewal.partition_id for renewal in renewals)
    return (renewals[0].scope_id, *partition_ids, *(renewal.token for renewal in renewals))


def _deliver(batch: Sequence[_Call]) -> None:
    """In the event loop: hand out results to those still waiting."""
    for call in batch:
        if call.future is None or call.future.done():
            continue
        if call.error is not None:
            call.future.set_exception(call.error)
        else:
            call.future.set_result(call.result)
