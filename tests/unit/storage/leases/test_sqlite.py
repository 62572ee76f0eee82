"""What is particular to leases in SQLite; the rest is the contract suite's. Its thread needs a real loop."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from eventpump.core.lease import PartitionLease
from eventpump.errors import ConfigurationError, StoreError
from eventpump.eventhubs.events import Checkpoint
from eventpump.interfaces import Clock, ConsumerScope
from eventpump.storage.leases.sqlite import SqliteLeaseStore
from eventpump.storage.scope_form import ScopeRecord
from tests.support.leases import group, unheld

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
async def opened(
    path: Path,
    *partition_ids: str,
    busy_timeout: float | None = None,
    clock: Clock | None = None,
    lease_duration: float = 30.0,
) -> AsyncIterator[SqliteLeaseStore]:
    store = SqliteLeaseStore(path, busy_timeout=busy_timeout, clock=clock, lease_duration=lease_duration)
    try:
        await store.open(SCOPE)
        await store.ensure(partition_ids)
        yield store
    finally:
        await store.aclose()


async def acquire(store: SqliteLeaseStore, partition_id: str, owner: str) -> PartitionLease:
    lease = await store.acquire(unheld(partition_id), owner)
    assert lease is not None
    return lease


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("eventpump sqlite")]


async def trace(store: SqliteLeaseStore, call: Callable[[str], object]) -> None:
    """Have each statement that a store runs from now on passed to a function, in the store's thread."""
    worker = store._worker
    assert worker is not None
    await worker.thread.run(lambda connection: connection.set_trace_callback(call))


async def traced(store: SqliteLeaseStore) -> list[str]:
    """The statements that a store runs from now on; with the parameters put in."""
    statements: list[str] = []
    await trace(store, statements.append)
    return statements


async def held_at_the_next_update(store: SqliteLeaseStore) -> tuple[threading.Event, threading.Event]:
    """Hold a store's thread where it begins its next UPDATE, before its lock; one event says so, one ends it."""
    entered, go_on = threading.Event(), threading.Event()

    def hold(statement: str) -> None:
        if statement.startswith("UPDATE"):
            entered.set()
            go_on.wait(10)

    await trace(store, hold)
    return entered, go_on


async def test_renewals_made_together_are_one_statement(tmp_path: Path) -> None:
    """Renewing every partition of a host at once is one statement, which locks the file for no longer than itself."""
    partitions = [str(number) for number in range(64)]
    async with opened(tmp_path / "leases.db", *partitions) as store, opened(tmp_path / "leases.db") as thief:
        leases = await asyncio.gather(*(acquire(store, partition_id, "a") for partition_id in partitions))
        statements = await traced(store)
        assert all(await asyncio.gather(*(store.renew(lease) for lease in leases)))
        assert [statement.split()[0] for statement in statements] == ["UPDATE"]
        (seen,) = [snapshot for snapshot in await thief.list() if snapshot.partition_id == "7"]
        assert await thief.acquire(seen, "thief", held=True) is not None
        assert await store.release(leases[8])
        statements.clear()
        renewed = await asyncio.gather(*(store.renew(lease) for lease in leases))
        assert [lease.partition_id for lease, kept in zip(leases, renewed, strict=True) if kept is None] == ["7", "8"]
        assert [statement.split()[0] for statement in statements] == ["UPDATE", "SELECT"]


async def test_renewals_of_a_thousand_leases_at_once_are_each_made(tmp_path: Path) -> None:
    """More leases than one statement takes parameters for are renewed all the same, and each for itself."""
    partitions = [str(number) for number in range(1000)]
    async with opened(tmp_path / "leases.db", *partitions) as store:
        leases = await asyncio.gather(*(acquire(store, partition_id, "a") for partition_id in partitions))
        assert await store.release(leases[700])
        statements = await traced(store)
        renewed = await asyncio.gather(*(store.renew(lease) for lease in leases))
        assert [index for index, kept in enumerate(renewed) if kept is None] == [700]
        assert statements.count("COMMIT") == 1
        assert len([statement for statement in statements if statement.startswith("UPDATE")]) == 3


async def test_checkpoints_made_together_share_one_commit(tmp_path: Path) -> None:
    """Checkpoints of every partition of a host at once are one transaction."""
    partitions = [str(number) for number in range(64)]
    async with opened(tmp_path / "leases.db", *partitions) as store:
        leases = await asyncio.gather(*(acquire(store, partition_id, "a") for partition_id in partitions))
        statements = await traced(store)
        writes = (group(store).write_checkpoint(lease, Checkpoint(lease.partition_id, "1", 1)) for lease in leases)
        assert all(await asyncio.gather(*writes))
        assert [statement.split()[0] for statement in statements] == ["BEGIN", *["UPDATE"] * 64, "COMMIT"]


async def test_file_is_locked_for_bare_statements_only(tmp_path: Path) -> None:
    """Nothing is read or decided while the file is locked: a process frozen there is as unlikely as can be."""
    record = ScopeRecord(datetime(2026, 3, 1, tzinfo=UTC), 3)
    async with opened(tmp_path / "leases.db", "0", "1") as store:
        statements = await traced(store)
        await store.ensure(["0", "1"])
        await store.list()
        lease = await acquire(store, "0", "a")
        assert await store.acquire(unheld("0"), "b") is None
        await group(store).read_checkpoint("0")
        assert await group(store).read_scope_record() is None
        reads = [statement for statement in statements if not statement.startswith("SELECT")]
        assert [statement.split()[0] for statement in reads] == ["UPDATE"]  # the one acquisition

        statements.clear()
        for number in (5, 3):
            assert await group(store).write_checkpoint(lease, Checkpoint("0", str(number), number))
        assert await group(store).write_checkpoint(lease, Checkpoint("0", "1", 1), backwards=True)
        assert await group(store).write_scope_record(record, None)
        assert await store.renew(lease)
        (seen,) = [snapshot for snapshot in await store.list() if snapshot.partition_id == "0"]
        stolen = await store.acquire(seen, "b", held=True)
        assert stolen is not None
        assert not await store.release(lease)
        assert await store.release(stolen)
        assert not any(statement.split()[0] in ("BEGIN", "COMMIT") for statement in statements)

        statements.clear()
        await asyncio.gather(
            store.ensure([str(number) for number in range(8)]),
            store.acquire(unheld("1"), "a"),
            group(store).read_checkpoint("0"),
            store.list(),
        )
        kinds = " ".join(statement.split()[0] for statement in statements)
        assert "SELECT" not in kinds[kinds.find("BEGIN") : kinds.rfind("COMMIT")]


async def test_readers_do_not_wait_for_a_frozen_writer(tmp_path: Path) -> None:
    """While another process holds the write lock, hosts open the file, list, and see that a held lease is held."""
    path = tmp_path / "leases.db"
    async with opened(path, "0", busy_timeout=0) as store:
        lease = await acquire(store, "0", "a")
        with closing(sqlite3.connect(path, isolation_level=None)) as frozen:
            frozen.execute("BEGIN IMMEDIATE")
            async with opened(path, "0", busy_timeout=0) as other:
                assert [snapshot.owner for snapshot in await other.list()] == ["a"]
                assert await other.acquire(unheld("0"), "b") is None
                assert await group(other).read_checkpoint("0") is None
                assert await group(other).read_scope_record() is None
                with pytest.raises(StoreError, match=r"renew of partition 0: .*leases\.db: database is locked"):
                    await store.renew(lease)
            frozen.execute("ROLLBACK")
        assert await store.renew(lease) is not None


async def test_listing_does_not_wait_for_writes(tmp_path: Path) -> None:
    """Made in the same turn as a write that waits for the lock, a listing has its answer before."""
    path = tmp_path / "leases.db"
    async with opened(path, "0", busy_timeout=10) as store:
        lease = await acquire(store, "0", "a")
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            renewal = asyncio.create_task(store.renew(lease))
            assert len(await asyncio.create_task(store.list())) == 1
            assert not renewal.done()
            other.execute("ROLLBACK")
        assert await renewal is not None


async def test_close_waits_for_calls_of_several_steps(tmp_path: Path) -> None:
    """A call that reads first, and writes then, is finished by a close that comes in between."""
    async with opened(tmp_path / "leases.db", "0") as store:
        acquisition = asyncio.create_task(store.acquire(unheld("0"), "a"))
        await asyncio.sleep(0)
        await store.aclose()
        assert await acquisition is not None


async def test_call_that_fails_fails_alone_in_its_transaction(tmp_path: Path) -> None:
    """A call that cannot be stored fails alone: those in the same transaction are stored, and the store lives on."""
    async with opened(tmp_path / "leases.db", "0", "1") as store:
        first, second = await acquire(store, "0", "a"), await acquire(store, "1", "a")
        failed, stored = await asyncio.gather(
            group(store).write_checkpoint(first, Checkpoint("0", "1", 2**63)),
            group(store).write_checkpoint(second, Checkpoint("1", "1", 1)),
            return_exceptions=True,
        )
        assert isinstance(failed, StoreError)
        assert stored is True
        assert await group(store).read_checkpoint("1") == Checkpoint("1", "1", 1)
        assert await group(store).read_checkpoint("0") is None


async def test_close_ends_the_thread(tmp_path: Path) -> None:
    """After aclose no thread is left, and what was submitted before is stored."""
    before = threads()
    store = SqliteLeaseStore(tmp_path / "leases.db")
    await store.open(SCOPE)
    assert len(threads()) == len(before) + 1
    creation = asyncio.create_task(store.ensure(["0"]))
    await asyncio.sleep(0)
    await store.aclose()
    await creation
    assert threads() == before
    async with opened(tmp_path / "leases.db") as again:
        assert [snapshot.partition_id for snapshot in await again.list()] == ["0"]


async def test_close_that_is_cancelled_still_closes(tmp_path: Path) -> None:
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


async def test_steal_that_is_cancelled_is_undone(tmp_path: Path) -> None:
    """A steal cancelled while the thread works on it leaves the lease with its owner, or free."""
    async with opened(tmp_path / "leases.db", "0") as store, opened(tmp_path / "leases.db") as thief:
        await acquire(store, "0", "a")
        (seen,) = await store.list()
        entered, go_on = await held_at_the_next_update(thief)
        steal = asyncio.create_task(thief.acquire(seen, "b", held=True))
        await asyncio.to_thread(entered.wait, 10)
        steal.cancel()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await steal
        (after,) = await thief.list()
        assert (after.owner, after.is_held) == (None, False)


async def test_file_that_stays_locked_raises_store_error(tmp_path: Path) -> None:
    """A transaction of another process that does not end is a StoreError; when it has ended, the store goes on."""
    async with opened(tmp_path / "leases.db", "0", busy_timeout=0.05) as store:
        with closing(sqlite3.connect(tmp_path / "leases.db", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(StoreError, match=r"acquire of partition 0: .*leases\.db: database is locked"):
                await store.acquire(unheld("0"), "a")
            other.execute("ROLLBACK")
        assert await store.acquire(unheld("0"), "a") is not None


async def test_clock_without_a_boot_takes_expired_leases_only(tmp_path: Path) -> None:
    """With plain clocks expiry is in wall clock time: what is not yet expired by it stays held, to the second."""
    path = tmp_path / "leases.db"
    early, late = ShiftedClock(0), ShiftedClock(29.9)
    async with opened(path, "0", clock=early) as store, opened(path, clock=late) as other:
        await acquire(store, "0", "a")
        assert await other.acquire(unheld("0"), "b") is None
        late.ahead = 30.0
        assert (await acquire(other, "0", "b")).epoch == 2


class BootedClock:
    """The clocks of a machine: the wall's can be set, the boot's cannot."""

    def __init__(self, boot_id: str = "boot-1", now: float = 1_000.0, wall: float = 1_700_000_000.0) -> None:
        self.boot_id = boot_id
        self.now = now
        self.wall = wall

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.wall

    def boot_time(self) -> float:
        return self.now

    def run(self, seconds: float) -> None:
        self.now += seconds
        self.wall += seconds


@pytest.mark.parametrize("step", [-3600.0, 3600.0])
async def test_lease_expiry_ignores_changes_of_the_wall_clock(tmp_path: Path, step: float) -> None:
    """A dead owner's lease is free after its duration though the clock was set back, and a live one's stays its own."""
    path = tmp_path / "leases.db"
    clock = BootedClock()
    async with opened(path, "0", "1", clock=clock) as store, opened(path, clock=clock) as other:
        dead, live = await acquire(store, "0", "a"), await acquire(store, "1", "a")
        clock.wall += step
        for _ in range(2):
            clock.run(14.9)
            renewed = await store.renew(live)
            assert renewed is not None
            assert [snapshot.is_held for snapshot in await other.list()] == [True, True]
            assert await other.acquire(unheld("0"), "b") is None
        clock.run(0.2)
        assert [snapshot.is_held for snapshot in await other.list()] == [False, True]
        assert (await acquire(other, "0", "b")).epoch == 2
        assert await other.acquire(unheld("1"), "b") is None
        assert await store.renew(dead) is None


async def test_lease_of_a_former_boot_is_free_after_its_own_duration(tmp_path: Path) -> None:
    """After a reboot with the clock set back, a lease waits once for the duration its owner gave it, not for hours."""
    path = tmp_path / "leases.db"
    before, after = BootedClock(), BootedClock("boot-2", now=3.0, wall=1_700_000_000.0 - 7200)
    async with opened(path, "0", clock=before, lease_duration=60) as store:
        await acquire(store, "0", "a")
    async with opened(path, clock=after, lease_duration=15) as other:
        assert await other.acquire(unheld("0"), "b") is None
        after.run(59.9)
        assert [snapshot.is_held for snapshot in await other.list()] == [True]
        after.run(0.2)
        assert [snapshot.is_held for snapshot in await other.list()] == [False]
        assert (await acquire(other, "0", "b")).epoch == 2


async def test_lease_renewed_under_another_boot_is_kept(tmp_path: Path) -> None:
    """Containers with boot ids of their own, and clocks an hour apart, share a file without taking each other's."""
    path = tmp_path / "leases.db"
    mine, theirs = BootedClock(), BootedClock("boot-2", wall=1_700_000_000.0 - 3600)
    async with opened(path, "0", clock=mine) as store, opened(path, clock=theirs) as other:
        lease = await acquire(store, "0", "a")
        for _ in range(20):
            mine.run(10)
            theirs.run(10)
            assert await other.acquire(unheld("0"), "b") is None
            assert await store.renew(lease) is not None


async def test_lease_renewed_between_read_and_acquire_is_kept(tmp_path: Path) -> None:
    """An acquisition takes the lease as it was read: an owner that came back in between keeps it."""
    path = tmp_path / "leases.db"
    clock = BootedClock()
    async with opened(path, "0", clock=clock) as store, opened(path, clock=clock) as other:
        lease = await acquire(store, "0", "a")
        clock.run(31)
        entered, go_on = await held_at_the_next_update(other)
        acquisition = asyncio.create_task(other.acquire(unheld("0"), "b"))
        await asyncio.to_thread(entered.wait, 10)
        assert await store.renew(lease) is not None
        go_on.set()
        assert await acquisition is None
        assert await store.renew(lease) is not None


async def test_file_opened_by_several_hosts_at_once_is_made_once(tmp_path: Path) -> None:
    """Stores that make the same file at the same time all open it."""
    stores = [SqliteLeaseStore(tmp_path / "leases.db") for _ in range(8)]
    try:
        await asyncio.gather(*(store.open(SCOPE) for store in stores))
        await asyncio.gather(*(store.ensure(["0", "1"]) for store in stores))
        assert len(await stores[0].list()) == 2
    finally:
        await asyncio.gather(*(store.aclose() for store in stores))


@pytest.mark.parametrize("content", [b"this is no database, and long enough to be taken for one" * 20, None])
async def test_file_that_cannot_be_used_raises(tmp_path: Path, content: bytes | None) -> None:
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


async def test_file_of_a_newer_schema_is_refused(tmp_path: Path) -> None:
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


def content(path: Path) -> list[str]:
    with closing(sqlite3.connect(path)) as connection:
        return list(connection.iterdump())


async def test_file_of_an_earlier_version_is_refused(tmp_path: Path) -> None:
    """An older file is named, with what to do, to hosts and to readers, and stays as it is."""
    path = old_file(tmp_path / "leases.db")
    before = content(path)
    for read_only in (False, True):
        store = SqliteLeaseStore(path)
        with pytest.raises(ConfigurationError, match=r"leases\.db: has leases .* earlier version .*use another file"):
            await store.open(SCOPE, read_only=read_only)
    assert content(path) == before


async def test_file_that_is_opened_to_read_does_not_change(tmp_path: Path) -> None:
    """A reader sees what hosts stored, makes no file, table or group, and cannot write."""
    path = tmp_path / "leases.db"
    missing = SqliteLeaseStore(tmp_path / "other.db")
    with pytest.raises(ConfigurationError, match=r"other\.db: there is no such file"):
        await missing.open(SCOPE, read_only=True)
    assert os.listdir(tmp_path) == []
    async with opened(path, "0") as store:
        lease = await acquire(store, "0", "a")
        assert await store.write_checkpoint(lease, Checkpoint("0", "9", 9))
        assert await group(store).write_checkpoint(lease, Checkpoint("0", "5", 5), "audit.1")
        reader = SqliteLeaseStore(path)
        await reader.open(SCOPE, read_only=True)
        try:
            assert [snapshot.owner for snapshot in await reader.list()] == ["a"]
            assert await reader.read_checkpoint("0") == Checkpoint("0", "9", 9)
            assert await group(reader).read_checkpoint("0", "audit.1") == Checkpoint("0", "5", 5)
            with pytest.raises(StoreError, match="readonly"):
                await reader.ensure(["1"])
        finally:
            await reader.aclose()
        other = SqliteLeaseStore(path)
        with pytest.raises(ConfigurationError, match="has nothing of the consumer group audit"):
            await other.open(replace(SCOPE, consumer_group="audit"), read_only=True)
        with closing(sqlite3.connect(path)) as file:
            assert file.execute("SELECT consumer_group FROM scope").fetchall() == [(SCOPE.consumer_group,)]


async def test_scope_record_that_is_damaged_raises(tmp_path: Path) -> None:
    """What cannot be read is not taken for no record, and is not replaced by a first one."""
    path = tmp_path / "leases.db"
    async with opened(path) as store:
        record = ScopeRecord(datetime(2026, 3, 1, tzinfo=UTC), 3)
        assert await group(store).write_scope_record(record, None)
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("UPDATE record SET body = '{}'")
            connection.commit()
        for call in (group(store).read_scope_record(), group(store).write_scope_record(record, None)):
            with pytest.raises(StoreError, match=r"scope record: scope\.json in .*: the scope record has version None"):
                await call


def test_lease_duration_that_is_not_positive_is_refused() -> None:
    """A lease duration that cannot work is refused by name."""
    with pytest.raises(ConfigurationError, match="lease_duration"):
        SqliteLeaseStore("leases.db", lease_duration=0)


_ACQUIRE_ALL = """
import asyncio, sys
from eventpump.core.lease import LeaseSnapshot
from eventpump.eventhubs.events import Checkpoint
from eventpump.interfaces import ConsumerScope
from eventpump.storage.leases.sqlite import SqliteLeaseStore

async def main(path, name):
    store = SqliteLeaseStore(path)
    await store.open(ConsumerScope("example.servicebus.windows.net", "telemetry", "$Default"))
    partitions = [str(number) for number in range(16)]
    await store.ensure(partitions)
    print("ready", flush=True)
    sys.stdin.readline()
    taken = [await store.acquire(LeaseSnapshot(each, None, False), name) for each in partitions]
    leases = [lease for lease in taken if lease]
    for lease in leases:
        assert await store.write_checkpoint(lease, Checkpoint(lease.partition_id, name, 1))
    print(*(lease.partition_id for lease in leases), flush=True)
    sys.stdin.readline()

asyncio.run(main(*sys.argv[1:]))
"""


def test_file_shared_by_processes_gives_each_lease_once(tmp_path: Path) -> None:
    """Processes racing for the same leases get each exactly once; what they stored outlives a kill -9."""
    path = str(tmp_path / "leases.db")
    hosts = [
        subprocess.Popen(
            [sys.executable, "-c", _ACQUIRE_ALL, path, f"host-{number}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[4],
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
            assert {snapshot.partition_id: snapshot.owner for snapshot in await store.list()} == won
            for partition_id, owner in won.items():
                assert await group(store).read_checkpoint(partition_id) == Checkpoint(partition_id, owner, 1)

    asyncio.run(look())
