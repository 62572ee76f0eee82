"""What is particular to leases in SQLite; the rest is the contract suite's. Its thread needs a real loop."""

from __future__ import annotations

import asyncio
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from datetime import UTC, datetime
from pathlib import Path

import pytest

from eventpump.core.lease import PartitionLease
from eventpump.errors import ConfigurationError, StoreError
from eventpump.events import Checkpoint
from eventpump.ports import ConsumerScope, ScopeRecord
from eventpump.storage.sqlite import SqliteLeaseStore

pytestmark = pytest.mark.real_time

SCOPE = ConsumerScope("example.servicebus.windows.net", "telemetry", "$Default")


class ShiftedClock:
    """The wall clock of a machine that is ahead."""

    def __init__(self, ahead: float) -> None:
        self.ahead = ahead

    def monotonic(self) -> float:
        return 0.0

    def time(self) -> float:
        return 1_700_000_000.0 + self.ahead


@asynccontextmanager
async def opened(path: Path, *partition_ids: str, busy_timeout: float | None = None) -> AsyncIterator[SqliteLeaseStore]:
    store = SqliteLeaseStore(path, busy_timeout=busy_timeout)
    try:
        await store.open(SCOPE)
        await store.ensure_leases(partition_ids)
        yield store
    finally:
        await store.aclose()


async def acquire(store: SqliteLeaseStore, partition_id: str, owner: str) -> PartitionLease:
    lease = await store.acquire_lease(partition_id, owner)
    assert lease is not None
    return lease


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "eventpump sqlite"]


async def test_calls_made_together_share_one_commit(tmp_path: Path) -> None:
    """Renewing every partition of a host at once is one transaction, so that idling costs next to nothing."""
    partitions = [str(number) for number in range(64)]
    async with opened(tmp_path / "leases.db", *partitions) as store:
        leases = await asyncio.gather(*(acquire(store, partition_id, "a") for partition_id in partitions))
        statements: list[str] = []
        assert store._worker is not None
        await store._worker.run("trace", None, lambda connection: connection.set_trace_callback(statements.append))
        statements.clear()
        renewed = await asyncio.gather(*(store.renew_lease(lease) for lease in leases))
        assert all(renewed)
        assert statements.count("COMMIT") == 1
        assert len([statement for statement in statements if statement.startswith("UPDATE")]) == 64


async def test_one_calls_fault_is_its_own(tmp_path: Path) -> None:
    """A call that cannot be stored fails alone: those in the same transaction are stored, and the store lives on."""
    async with opened(tmp_path / "leases.db", "0", "1") as store:
        first, second = await acquire(store, "0", "a"), await acquire(store, "1", "a")
        failed, stored = await asyncio.gather(
            store.write_checkpoint(first, Checkpoint("0", "1", 2**63)),
            store.write_checkpoint(second, Checkpoint("1", "1", 1)),
            return_exceptions=True,
        )
        assert isinstance(failed, StoreError)
        assert stored is True
        assert await store.read_checkpoint("1") == Checkpoint("1", "1", 1)
        assert await store.read_checkpoint("0") is None


async def test_closing_ends_the_thread(tmp_path: Path) -> None:
    """After aclose no thread is left, and what was submitted before is stored."""
    before = threads()
    store = SqliteLeaseStore(tmp_path / "leases.db")
    await store.open(SCOPE)
    assert len(threads()) == len(before) + 1
    creation = asyncio.create_task(store.ensure_leases(["0"]))
    await asyncio.sleep(0)
    await store.aclose()
    await creation
    assert threads() == before
    async with opened(tmp_path / "leases.db") as again:
        assert [snapshot.partition_id for snapshot in await again.list_leases()] == ["0"]


async def test_a_cancelled_close_still_closes(tmp_path: Path) -> None:
    """Cancelling aclose does not keep the thread alive."""
    before = threads()
    store = SqliteLeaseStore(tmp_path / "leases.db")
    await store.open(SCOPE)
    closing_task = asyncio.create_task(store.aclose())
    await asyncio.sleep(0)
    closing_task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing_task
    await store.aclose()
    assert threads() == before


async def test_a_steal_that_was_cancelled_is_given_back(tmp_path: Path) -> None:
    """A steal cancelled while the thread works on it leaves the lease with its owner, or with nobody."""
    async with opened(tmp_path / "leases.db", "0") as store, opened(tmp_path / "leases.db") as thief:
        await acquire(store, "0", "a")
        (seen,) = await store.list_leases()
        assert thief._worker is not None
        entered, go_on = threading.Event(), threading.Event()

        def hold(connection: sqlite3.Connection) -> None:
            entered.set()
            go_on.wait(10)

        held = asyncio.create_task(thief._worker.run("hold", None, hold))
        steal = asyncio.create_task(thief.steal_lease(seen, "b"))
        await asyncio.to_thread(entered.wait, 10)
        steal.cancel()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await steal
        await held
        (after,) = await thief.list_leases()
        assert (after.owner, after.is_held) == (None, False)


async def test_a_file_that_stays_locked_is_an_error(tmp_path: Path) -> None:
    """A transaction of another process that does not end is a StoreError; when it has ended, the store goes on."""
    async with opened(tmp_path / "leases.db", "0", busy_timeout=0.05) as store:
        with closing(sqlite3.connect(tmp_path / "leases.db", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(StoreError, match="acquire of partition 0: database is locked"):
                await store.acquire_lease("0", "a")
            other.execute("ROLLBACK")
        assert await store.acquire_lease("0", "a") is not None


async def test_another_machine_time_takes_expired_leases_only(tmp_path: Path) -> None:
    """Expiry is in wall clock time: what is not yet expired by it stays held, to the second."""
    path = tmp_path / "leases.db"
    early, late = ShiftedClock(0), ShiftedClock(29.9)
    store, other = SqliteLeaseStore(path, clock=early), SqliteLeaseStore(path, clock=late)
    try:
        await store.open(SCOPE)
        await other.open(SCOPE)
        await store.ensure_leases(["0"])
        await acquire(store, "0", "a")
        assert await other.acquire_lease("0", "b") is None
        late.ahead = 30.0
        assert (await acquire(other, "0", "b")).epoch == 2
    finally:
        await store.aclose()
        await other.aclose()


async def test_hosts_may_open_a_new_file_at_once(tmp_path: Path) -> None:
    """Stores that make the same file at the same time all open it."""
    stores = [SqliteLeaseStore(tmp_path / "leases.db") for _ in range(8)]
    try:
        await asyncio.gather(*(store.open(SCOPE) for store in stores))
        await asyncio.gather(*(store.ensure_leases(["0", "1"]) for store in stores))
        assert len(await stores[0].list_leases()) == 2
    finally:
        await asyncio.gather(*(store.aclose() for store in stores))


@pytest.mark.parametrize("content", [b"this is no database, and long enough to be taken for one" * 20, None])
async def test_a_file_that_cannot_be_used_is_an_error(tmp_path: Path, content: bytes | None) -> None:
    """A file of another kind and a missing directory are wrong input, not to be tried again; no thread stays."""
    before = threads()
    path = tmp_path / "missing" / "leases.db" if content is None else tmp_path / "leases.db"
    if content is not None:
        path.write_bytes(content)
    store = SqliteLeaseStore(path)
    with pytest.raises(ConfigurationError, match=r"path: .*leases\.db: "):
        await store.open(SCOPE)
    await store.aclose()
    assert threads() == before


async def test_a_newer_schema_is_refused(tmp_path: Path) -> None:
    """A file of a later version is not touched."""
    path = tmp_path / "leases.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA user_version = 99")
        connection.commit()
    store = SqliteLeaseStore(path)
    with pytest.raises(ConfigurationError, match="schema version 99"):
        await store.open(SCOPE)
    await store.aclose()
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT count(*) FROM sqlite_master").fetchone() == (0,)


_FIRST_SCHEMA = """
CREATE TABLE scope (
    id INTEGER PRIMARY KEY,
    namespace TEXT NOT NULL COLLATE NOCASE,
    hub TEXT NOT NULL COLLATE NOCASE,
    consumer_group TEXT NOT NULL COLLATE NOCASE,
    UNIQUE (namespace, hub, consumer_group)
);
CREATE TABLE lease (
    scope INTEGER NOT NULL REFERENCES scope (id),
    partition_id TEXT NOT NULL,
    owner TEXT,
    token TEXT,
    epoch INTEGER NOT NULL DEFAULT 0,
    expires_at REAL NOT NULL DEFAULT 0,
    PRIMARY KEY (scope, partition_id)
) WITHOUT ROWID;
CREATE TABLE checkpoint (
    scope INTEGER NOT NULL REFERENCES scope (id),
    partition_id TEXT NOT NULL,
    subscription TEXT NOT NULL,
    "offset" TEXT NOT NULL,
    sequence_number INTEGER NOT NULL,
    PRIMARY KEY (scope, partition_id, subscription)
) WITHOUT ROWID;
INSERT INTO scope VALUES (1, 'example.servicebus.windows.net', 'telemetry', '$Default');
INSERT INTO lease VALUES (1, '0', 'old', 'a-token', 7, 1000.0), (1, '1', 'older', 'a-token-too', 3, 4e9);
INSERT INTO checkpoint VALUES (1, '0', 'default', '100', 10);
PRAGMA user_version = 1;
"""
"""A file as the first version made it, with one lease expired and one held, by the wall clock."""


def old_file(path: Path) -> Path:
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(_FIRST_SCHEMA)
    return path


async def test_a_file_of_the_first_version_is_used_on(tmp_path: Path) -> None:
    """Leases, epochs and checkpoints of an older file are kept, and what it lacks is added; opening again is fine."""
    path = old_file(tmp_path / "leases.db")
    for number in range(2):
        async with opened(path, "0", "1", "2") as store:
            seen = [(lease.partition_id, lease.owner, lease.is_held) for lease in await store.list_leases()]
            assert seen == [
                ("0", "old" if not number else "new", bool(number)),
                ("1", "older", True),
                ("2", None, False),
            ]
            assert await store.read_checkpoint("0") == Checkpoint("0", "100", 10)
            if not number:
                assert (await acquire(store, "0", "new")).epoch == 8
                assert await store.read_scope_record() is None
                assert await store.write_scope_record(ScopeRecord(datetime(2026, 3, 1, tzinfo=UTC), 3), None)
            found = await store.read_scope_record()
            assert found is not None
            assert found.record.partition_count == 3


async def test_hosts_may_open_a_file_of_the_first_version_at_once(tmp_path: Path) -> None:
    """Stores that complete the same older file at the same time all open it."""
    path = old_file(tmp_path / "leases.db")
    stores = [SqliteLeaseStore(path) for _ in range(8)]
    try:
        await asyncio.gather(*(store.open(SCOPE) for store in stores))
        assert [len(await store.list_leases()) for store in stores] == [2] * 8
    finally:
        await asyncio.gather(*(store.aclose() for store in stores))


async def test_a_damaged_scope_record_is_an_error(tmp_path: Path) -> None:
    """What cannot be read is not taken for no record, and is not replaced by a first one."""
    path = tmp_path / "leases.db"
    async with opened(path) as store:
        record = ScopeRecord(datetime(2026, 3, 1, tzinfo=UTC), 3)
        assert await store.write_scope_record(record, None)
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("UPDATE scope_record SET record = '{}'")
            connection.commit()
        with pytest.raises(StoreError, match="read scope record: the scope record has version None"):
            await store.read_scope_record()
        assert await store.write_scope_record(record, None) is None


def test_a_duration_must_be_positive() -> None:
    """A lease duration that cannot work is refused by name."""
    with pytest.raises(ConfigurationError, match="lease_duration"):
        SqliteLeaseStore("leases.db", lease_duration=0)


_ACQUIRE_ALL = """
import asyncio, sys
from eventpump.events import Checkpoint
from eventpump.ports import ConsumerScope
from eventpump.storage.sqlite import SqliteLeaseStore

async def main(path, name):
    store = SqliteLeaseStore(path)
    await store.open(ConsumerScope("example.servicebus.windows.net", "telemetry", "$Default"))
    partitions = [str(number) for number in range(16)]
    await store.ensure_leases(partitions)
    print("ready", flush=True)
    sys.stdin.readline()
    leases = [lease for lease in [await store.acquire_lease(each, name) for each in partitions] if lease]
    for lease in leases:
        assert await store.write_checkpoint(lease, Checkpoint(lease.partition_id, name, 1))
    print(*(lease.partition_id for lease in leases), flush=True)
    sys.stdin.readline()

asyncio.run(main(*sys.argv[1:]))
"""


def test_processes_share_one_file(tmp_path: Path) -> None:
    """Processes racing for the same leases get each exactly once; what they stored outlives a kill -9."""
    path = str(tmp_path / "leases.db")
    hosts = [
        subprocess.Popen(
            [sys.executable, "-c", _ACQUIRE_ALL, path, f"host-{number}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[3],
        )
        for number in range(3)
    ]
    try:
        won: dict[str, str] = {}
        pipes = [(host.stdin, host.stdout) for host in hosts]
        for _, answers in pipes:
            assert answers is not None
            assert answers.readline() == "ready\n"
        for orders, _ in pipes:
            assert orders is not None
            orders.write("go\n")
            orders.flush()
        for number, (_, answers) in enumerate(pipes):
            assert answers is not None
            for partition_id in answers.readline().split():
                assert partition_id not in won
                won[partition_id] = f"host-{number}"
        assert sorted(won, key=int) == [str(number) for number in range(16)]
    finally:
        for host in hosts:
            host.send_signal(signal.SIGKILL)
            host.communicate()

    async def look() -> None:
        async with opened(Path(path)) as store:
            assert {snapshot.partition_id: snapshot.owner for snapshot in await store.list_leases()} == won
            for partition_id, owner in won.items():
                assert await store.read_checkpoint(partition_id) == Checkpoint(partition_id, owner, 1)

    asyncio.run(look())
