"""Leases and checkpoints in one SQLite file: several processes on one machine.

Who owns what is decided by a random token per acquisition: it fences renewals and checkpoints, whatever the clocks say.
Expiry only lets others acquire. It is kept on the clock of the machine's boot, which cannot be set and which goes on
while the machine is suspended; and in wall clock time beside it, for those that cannot read that clock: other systems
than Linux, a container with a boot id of its own, an earlier version, and after a reboot. There a clock set forward
makes leases expire early (they are lost, and noticed as lost), and one set back makes a dead owner's lease wait once
for as long as it lives without renewal.

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
import secrets
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from eventpump.aio.sqlite_thread import ForeignFileError, transaction
from eventpump.clock import LoopClock
from eventpump.core.lease import LeaseSnapshot, PartitionLease
from eventpump.errors import ClosedError, ConfigurationError, StoreError
from eventpump.eventhubs.events import Checkpoint
from eventpump.eventhubs.partitions import partition_order
from eventpump.interfaces import ConsumerScope
from eventpump.storage.leases.expiry import Expiry, ExpiryJudge
from eventpump.storage.records.sqlite import SqliteRecordStore, create_record_table
from eventpump.storage.sqlite_file import SqliteFile, Write

if TYPE_CHECKING:
    from eventpump.interfaces import Clock, RecordStore

_SCHEMA_VERSION: Final = 2
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
    expiry_boot_id TEXT,
    expires_at_boot REAL,
    duration REAL,
    "offset" TEXT,
    sequence_number INTEGER,
    PRIMARY KEY (scope, partition_id)
) WITHOUT ROWID;
"""
_STORED_EXPIRY: Final = "expires_at, expiry_boot_id, expires_at_boot, duration"
_NEW_EXPIRY: Final = "expires_at = ?, expiry_boot_id = ?, expires_at_boot = ?, duration = ?"
_KIND: Final = "lease store"
_AT_ONCE: Final = 480
"""Rows in one statement, at two parameters each: every SQLite takes 999."""
_OF_LEASE: Final = " WHERE scope = ? AND partition_id = ?"
_FORWARD: Final = " AND (sequence_number IS NULL OR sequence_number <= ?)"


class NoGroupError(ConfigurationError):
    """The file has nothing of the consumer group."""

    def __init__(self, path: str, consumer_group: str) -> None:
        super().__init__("path", f"{path}: has nothing of the consumer group {consumer_group}")


class SqliteLeaseStore:
    """A `LeaseStore` in a SQLite file.

    Calls run in one worker thread of the store's own; the writes of one turn of the event loop share one transaction,
    and its renewals one statement. A call that is cancelled is not made, or made and forgotten; a lease acquired or
    stolen by such a call is given back.

    Args:
        path: The file; created where it does not exist, in a directory that does.
        lease_duration: How long a lease lives without renewal, in seconds. Default: 30.0.
        busy_timeout: How long to wait for another process's transaction, in seconds; None for the smaller of 5 s and a
            third of the lease duration.
        clock: None for the running loop's time and the machine's. With another that is not a `MachineClock`, expiry is
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
        self._worker: _LeaseFile | None = None
        self._scope_id = 0
        self._records: SqliteRecordStore | None = None
        self._under_way = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._is_closed = False

    @property
    def lease_duration(self) -> float:
        """How long a lease lives without renewal, in seconds."""
        return self._lease_duration

    @property
    def records(self) -> RecordStore:
        """The records of the consumer group, in the same file."""
        self._bound("records")
        assert self._records is not None
        return self._records

    async def open(self, scope: ConsumerScope, *, read_only: bool = False) -> None:
        """Open the file, create the tables and bind to a consumer group. Once.

        Args:
            scope: The consumer group.
            read_only: Whether to open a file that exists, and to write nothing; SQLite's files beside it, which a host
                creates as well, may appear. Default: False.

        Raises:
            ConfigurationError: There cannot be such a file at the path, so that trying again cannot help; or it is one
                of an earlier version, or, with `read_only`, has nothing of the group.
            StoreError: The file cannot be opened now.
        """
        if self._is_closed:
            raise ClosedError("lease store")
        if self._worker is not None:
            raise ConfigurationError("lease_store", "the store is open already: create one store per host")
        check_place(self._path)
        worker = self._worker = _LeaseFile(
            self._path,
            self._busy_timeout,
            _check if read_only else _prepare,
            # NORMAL loses the last commits with the power. Every owner runs on this machine and is gone with it, so
            # what an owner may lose so is a checkpoint, and events are delivered again.
            synchronous="NORMAL",
            owner=type(self).__name__,
            kind=_KIND,
            read_only=read_only,
        )
        names = (scope.fully_qualified_namespace, scope.hub, scope.consumer_group)

        query = "SELECT id FROM scope WHERE namespace = ? AND hub = ? AND consumer_group = ?"
        statement = "INSERT OR IGNORE INTO scope (namespace, hub, consumer_group) VALUES (?, ?, ?)"

        try:
            await worker.open()
            rows = await worker.read("open", None, query, names)
            if not rows:
                if read_only:
                    raise NoGroupError(self._path, scope.consumer_group)
                await worker.write("open", None, statement, names)
                rows = await worker.read("open", None, query, names)
            scope_id = int(rows[0][0])
            records = SqliteRecordStore(worker, f"groups/{scope_id}/", kind=_KIND)
            await records.open()
        except BaseException as error:
            self._worker = None
            await worker.aclose()
            if isinstance(error.__cause__, ForeignFileError):
                raise ConfigurationError("path", f"{self._path}: {error.__cause__}") from None
            raise
        self._scope_id, self._records = scope_id, records

    async def ensure(self, partition_ids: Sequence[str]) -> None:
        """Create the leases that do not exist yet, without an owner. Several hosts may do so at once."""
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

    async def list(self) -> list[LeaseSnapshot]:
        """List every lease as it is now, in the order of partition ids."""
        query = f"SELECT partition_id, owner, token, epoch, {_STORED_EXPIRY} FROM lease WHERE scope = ?"  # noqa: S608 - constants
        worker, read_at = self._bound("list"), self._clock.monotonic()
        rows = await worker.read("list", None, query, (self._scope_id,))
        return [
            LeaseSnapshot(
                partition_id, owner, self._judge.is_held(partition_id, token, _expiry(*expiry), read_at), token, epoch
            )
            for partition_id, owner, token, epoch, *expiry in sorted(rows, key=lambda row: partition_order(row[0]))
        ]

    async def acquire(self, snapshot: LeaseSnapshot, owner: str, *, held: bool = False) -> PartitionLease | None:
        """See `LeaseStore`. Cancelled, the lease is not held, or held by its former owner."""
        operation, partition_id = "steal" if held else "acquire", snapshot.partition_id
        if held and snapshot.token is None:
            return None
        with self._calling(operation, partition_id) as worker:
            read_at = self._clock.monotonic()
            row = await self._read_lease(worker, operation, partition_id)
            if held:
                if row.token != snapshot.token:
                    return None
            elif self._judge.is_held(partition_id, row.token, row.expiry, read_at):
                return None
            return await self._take(worker, operation, row, owner, is_stolen=held)

    async def renew(self, lease: PartitionLease) -> PartitionLease | None:
        """Renew a lease. Return it with a later `expires_at`, or None if it is lost."""
        worker = self._bound("renew", lease.partition_id)
        sent = self._clock.monotonic()
        expiry = self._judge.expiry_in(self._lease_duration)
        if not await worker.renew(self._scope_id, lease, expiry):
            return None
        return replace(lease, expires_at=sent + self._lease_duration)

    async def release(self, lease: PartitionLease) -> bool:
        """Release a lease, so that another host may acquire it at once. Return False if it was lost before."""
        worker = self._bound("release", lease.partition_id)
        statement, parameters = self._release(lease.partition_id, lease.token)
        return bool(await worker.write("release", lease.partition_id, statement, parameters))

    async def read_checkpoint(self, partition_id: str) -> Checkpoint | None:
        """Return a checkpoint, or None if there is none."""
        worker = self._bound("read checkpoint", partition_id)
        query = f'SELECT "offset", sequence_number FROM lease{_OF_LEASE}'  # noqa: S608 - constants only
        rows = await worker.read("read checkpoint", partition_id, query, self._key(partition_id))
        return Checkpoint(partition_id, *rows[0]) if rows and rows[0][0] is not None else None

    async def write_checkpoint(self, lease: PartitionLease, checkpoint: Checkpoint, *, backwards: bool = False) -> bool:
        """See `LeaseStore`."""
        operation, partition_id = "reset checkpoint" if backwards else "write checkpoint", lease.partition_id
        assert checkpoint.partition_id == partition_id
        statement = f'UPDATE lease SET "offset" = ?, sequence_number = ?{_OF_LEASE} AND token = ?'  # noqa: S608 - constants only
        number = checkpoint.sequence_number
        parameters: tuple[object, ...] = (checkpoint.offset, number, *self._key(partition_id), lease.token)
        if not backwards:
            statement, parameters = statement + _FORWARD, (*parameters, number)
        with self._calling(operation, partition_id) as worker:
            if await worker.write(operation, partition_id, statement, parameters):
                return True
            # Nothing stored: the lease is lost, or a higher number is there.
            return (await self._read_lease(worker, operation, partition_id)).token == lease.token

    async def clear_checkpoint(self, lease: PartitionLease) -> bool:
        """Remove the checkpoint under the lease. Return False, and remove nothing, if the lease is lost.

        A host that owns the partition next begins where the group begins. No host calls it.

        Args:
            lease: The lease of the partition.
        """
        worker = self._bound("clear checkpoint", lease.partition_id)
        statement = f'UPDATE lease SET "offset" = NULL, sequence_number = NULL{_OF_LEASE} AND token = ?'  # noqa: S608 - constants only
        parameters = (*self._key(lease.partition_id), lease.token)
        return bool(await worker.write("clear checkpoint", lease.partition_id, statement, parameters))

    async def aclose(self) -> None:
        """Finish the calls under way, close the file and end the thread. Leases stay as they are."""
        if self._worker is not None:
            self._worker.home.enter()
        self._is_closed = True
        if self._worker is None:
            return
        try:
            await self._idle.wait()
        finally:
            self._worker.close()
        await self._worker.aclose()

    def _bound(self, operation: str, partition_id: str | None = None) -> _LeaseFile:
        if self._is_closed:
            raise ClosedError("lease store")
        if self._worker is None or not self._scope_id:
            raise StoreError(operation, "the store is not open: call open() first", partition_id=partition_id)
        self._worker.home.enter()
        return self._worker

    @contextlib.contextmanager
    def _calling(self, operation: str, partition_id: str | None = None) -> Iterator[_LeaseFile]:
        """Return the worker for a call of several steps, for which closing waits."""
        worker = self._bound(operation, partition_id)
        self._under_way += 1
        self._idle.clear()
        try:
            yield worker
        finally:
            self._under_way -= 1
            if not self._under_way:
                self._idle.set()

    async def _read_lease(self, worker: _LeaseFile, operation: str, partition_id: str) -> _LeaseRow:
        query = f"SELECT token, epoch, {_STORED_EXPIRY} FROM lease{_OF_LEASE}"  # noqa: S608 - constants only
        rows = await worker.read(operation, partition_id, query, self._key(partition_id))
        if not rows:
            raise StoreError(operation, "there is no such lease: call ensure() first", partition_id=partition_id)
        token, epoch, *expiry = rows[0]
        return _LeaseRow(partition_id, token, epoch, _expiry(*expiry))

    async def _take(
        self, worker: _LeaseFile, operation: str, row: _LeaseRow, owner: str, *, is_stolen: bool = False
    ) -> PartitionLease | None:
        """Take a lease that is as it was read; if it is stolen, its owner may have renewed it since."""
        partition_id, token, epoch = row.partition_id, secrets.token_hex(16), row.epoch + 1
        sent = self._clock.monotonic()
        expiry = self._judge.expiry_in(self._lease_duration)
        statement = (
            "UPDATE lease SET owner = ?, token = ?, epoch = ?, expires_at = ?,"  # noqa: S608 - constants only
            f" expiry_boot_id = ?, expires_at_boot = ?, duration = ?{_OF_LEASE} AND token IS ?"
        )
        parameters: tuple[object, ...] = (
            *(owner, token, epoch, expiry.wall, expiry.boot_id, expiry.boot, expiry.duration),
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
        return (
            PartitionLease(partition_id, owner, epoch, epoch, token, sent + self._lease_duration) if is_taken else None
        )

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


def _expiry(wall: float, boot_id: str | None, boot: float | None, duration: float | None) -> Expiry:
    """Return the expiry in what `_STORED_EXPIRY` selects."""
    return Expiry(wall) if boot is None else Expiry(wall, boot_id, boot, duration)


class _Renewal(Write):
    """A renewal, which is made with all others of its turn. Its result is whether the owner still has the lease."""

    __slots__ = ("expiry", "scope_id", "token")

    def __init__(self, scope_id: int, lease: PartitionLease, outcome: asyncio.Future[Any], expiry: Expiry) -> None:
        super().__init__("renew", lease.partition_id, outcome, "", ())
        self.scope_id = scope_id
        self.token = lease.token
        self.expiry = expiry


class _Renewals(Write):
    """Renewals as one statement. A token belongs to one acquisition of one partition: no other row matches it."""

    __slots__ = ("renewals",)

    def __init__(self, renewals: Sequence[_Renewal]) -> None:
        self.renewals = renewals
        # All are of one turn of the loop. The latest expiry is safe for all: no owner believes in a later one.
        latest = renewals[-1].expiry
        statement = f"UPDATE lease SET {_NEW_EXPIRY}{self._condition}"  # noqa: S608 - constants only
        values = (latest.wall, latest.boot_id, latest.boot, latest.duration, *self._values)
        super().__init__("renew", None, None, statement, values)

    @property
    def _condition(self) -> str:
        marks = ", ".join("?" * len(self.renewals))
        return f" WHERE scope = ? AND partition_id IN ({marks}) AND token IN ({marks})"

    @property
    def _values(self) -> tuple[object, ...]:
        partition_ids = (renewal.partition_id for renewal in self.renewals)
        return (self.renewals[0].scope_id, *partition_ids, *(renewal.token for renewal in self.renewals))

    def conclude(self, connection: sqlite3.Connection) -> None:
        """Find which renewals found their lease: all if as many rows were changed, else those whose token is there."""
        kept = {renewal.token for renewal in self.renewals}
        if self.result != len(self.renewals):
            query = f"SELECT token FROM lease{self._condition}"  # noqa: S608 - constants only
            kept = {token for (token,) in connection.execute(query, self._values)}
        for renewal in self.renewals:
            renewal.result = renewal.token in kept

    def fail(self, error: BaseException) -> None:
        """End all of them with a failure of the store."""
        for renewal in self.renewals:
            renewal.fail(error)

    def deliver(self) -> None:
        """In the event loop: set the outcomes."""
        for renewal in self.renewals:
            renewal.deliver()


class _LeaseFile(SqliteFile):
    """The file, whose renewals of one turn of the event loop are one statement."""

    async def renew(self, scope_id: int, lease: PartitionLease, expiry: Expiry) -> bool:
        """Renew a lease; False where it is lost. Cancelled, it is not renewed, or renewed and forgotten."""
        outcome: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.submit(_Renewal(scope_id, lease, outcome, expiry))
        return await outcome

    def ordered(self, writes: list[Write]) -> list[Write]:
        """Return the renewals as statements, and then the other writes."""
        renewals = [write for write in writes if isinstance(write, _Renewal)]
        parts = [renewals[first : first + _AT_ONCE] for first in range(0, len(renewals), _AT_ONCE)]
        others = (write for write in writes if not isinstance(write, _Renewal))
        return [*map(_Renewals, parts), *others]


def _prepare(connection: sqlite3.Connection) -> None:
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if version == _SCHEMA_VERSION:
        return
    if version:
        _check(connection)
    create_record_table(connection)
    with transaction(connection):
        for statement in _SCHEMA.split(";"):
            connection.execute(statement)
        connection.execute(f"PRAGMA user_version = {_SCHEMA_VERSION}")


def _check(connection: sqlite3.Connection) -> None:
    """Check that the file is one of leases, of this version. Raises `ForeignFileError` if it is not."""
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if version == 0:
        raise ForeignFileError("has no leases")
    if version < _SCHEMA_VERSION:
        raise ForeignFileError(
            f"has leases and checkpoints in the form of an earlier version of eventpump (schema {version}), which this "
            "version does not read; use another file"
        )
    if version > _SCHEMA_VERSION:
        raise ForeignFileError(
            f"schema version {version} is not known to this version of eventpump; upgrade it, or use another file"
        )


def check_place(path: str) -> None:
    """Check what cannot be helped by waiting. Raises `ConfigurationError` if there cannot be a file at this path."""
    if os.path.isdir(path) or not os.path.isdir(os.path.dirname(path) or os.curdir):
        raise ConfigurationError("path", f"{path}: must be a file, existing or not, in a directory that exists")
