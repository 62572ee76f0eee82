"""Stores for the contract suites: memory, SQLite and blob leases on real Azurite."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

pytest.register_assert_rewrite("eventpump.testing.conformance.leases")

from eventpump.clock import LoopClock  # noqa: E402
from eventpump.interfaces import Clock, LeaseStore  # noqa: E402
from eventpump.storage.leases.blob import BlobLeaseStore  # noqa: E402
from eventpump.storage.leases.memory import MemoryLeases, MemoryLeaseStore  # noqa: E402
from eventpump.storage.leases.ownership import BlobOwnershipStore  # noqa: E402
from eventpump.storage.leases.sqlite import SqliteLeaseStore  # noqa: E402
from tests.contract.own_store import OwnLeaseStore, Table  # noqa: E402
from tests.support.azurite import Azurite  # noqa: E402


class ManualClock:
    """A clock that moves when a test says so."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return 1_700_000_000.0 + self.now


class ManualMachineClock(ManualClock):
    """A clock with a boot, whose wall clock is set back by an hour whenever it is read."""

    boot_id = "boot"

    def __init__(self) -> None:
        super().__init__()
        self._steps = 0

    def time(self) -> float:
        self._steps += 1
        return super().time() - 3600.0 * self._steps

    def boot_time(self) -> float:
        return self.now


class Harness:
    """A `LeaseHarness` over a function that makes stores."""

    def __init__(self, make: Callable[[], LeaseStore], clock: Clock) -> None:
        self._make = make
        self._stores: list[LeaseStore] = []
        self.clock = clock

    def new_store(self) -> LeaseStore:
        store = self._make()
        self._stores.append(store)
        return store

    async def let_expire(self, store: LeaseStore) -> None:
        if isinstance(self.clock, ManualClock):
            self.clock.now += store.lease_duration + 1
            return
        # Nothing reports when a lease of Azurite's expires: its listing has to be polled.
        deadline = time.monotonic() + store.lease_duration + 10
        while any(snapshot.is_held for snapshot in await store.list()):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.25)

    async def aclose(self) -> None:
        for store in self._stores:
            await store.aclose()


@pytest.fixture(scope="session")
def azurite() -> Iterator[Azurite]:
    """A real Azurite, one for the whole run."""
    with Azurite() as server:
        yield server


@pytest.fixture
def container_name() -> str:
    """A container of its own."""
    return f"leases-{uuid.uuid4().hex}"


@pytest.fixture
async def memory_harness() -> AsyncIterator[Harness]:
    """Hosts in one process."""
    shared, clock = MemoryLeases(), ManualClock()
    harness = Harness(lambda: MemoryLeaseStore(shared, clock=clock), clock)
    yield harness
    await harness.aclose()


@pytest.fixture
async def own_harness() -> AsyncIterator[Harness]:
    """Hosts on a store of one's own."""
    table, clock = Table(), ManualClock()
    harness = Harness(lambda: OwnLeaseStore(table, clock), clock)
    yield harness
    await harness.aclose()


@pytest.fixture
async def sqlite_harness(tmp_path: Path) -> AsyncIterator[Harness]:
    """Hosts on one machine, each with a connection and a thread of its own."""
    clock = ManualClock()
    harness = Harness(lambda: SqliteLeaseStore(tmp_path / "leases.db", clock=clock), clock)
    yield harness
    await harness.aclose()


@pytest.fixture
async def sqlite_boot_harness(tmp_path: Path) -> AsyncIterator[Harness]:
    """Hosts on one machine whose wall clock is set again and again."""
    clock = ManualMachineClock()
    harness = Harness(lambda: SqliteLeaseStore(tmp_path / "leases.db", clock=clock), clock)
    yield harness
    await harness.aclose()


@pytest.fixture
async def blob_harness(azurite: Azurite, container_name: str) -> AsyncIterator[Harness]:
    """Hosts on one storage account, each with a client of its own."""

    def make() -> LeaseStore:
        return BlobLeaseStore(
            container_name,
            connection_string=azurite.connection_string,
            prefix="app/",
            lease_duration=15,
            create=True,
        )

    harness = Harness(make, LoopClock())
    yield harness
    await harness.aclose()


@pytest.fixture
async def ownership_harness(azurite: Azurite, container_name: str) -> AsyncIterator[Harness]:
    """Hosts on one storage account, in the form of the other SDKs."""

    def make() -> LeaseStore:
        return BlobOwnershipStore(
            container_name, connection_string=azurite.connection_string, lease_duration=15, create=True
        )

    harness = Harness(make, LoopClock())
    yield harness
    await harness.aclose()
