"""The contract of lease stores, over every implementation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from eventpump.testing.conformance.leases import LeaseHarness, LeaseStoreContract

if TYPE_CHECKING:
    from eventpump.interfaces import LeaseStore
    from eventpump.storage.leases.blob import BlobLeaseStore
    from eventpump.storage.leases.memory import MemoryLeaseStore
    from eventpump.storage.leases.sqlite import SqliteLeaseStore

    def _are_ports(blob: BlobLeaseStore, sqlite: SqliteLeaseStore, memory: MemoryLeaseStore) -> list[LeaseStore]:
        return [blob, sqlite, memory]


class TestMemoryLeaseStore(LeaseStoreContract):
    """In memory, on a clock moved by hand."""

    @pytest.fixture
    def harness(self, memory_harness: LeaseHarness) -> LeaseHarness:
        return memory_harness


class TestSqliteLeaseStore(LeaseStoreContract):
    """On one file, on a clock moved by hand."""

    @pytest.fixture
    def harness(self, sqlite_harness: LeaseHarness) -> LeaseHarness:
        return sqlite_harness


class TestSqliteLeaseStoreOnBootTime(LeaseStoreContract):
    """On one file, on a boot's clock moved by hand; the wall clock is nonsense."""

    @pytest.fixture
    def harness(self, sqlite_boot_harness: LeaseHarness) -> LeaseHarness:
        return sqlite_boot_harness


class TestBlobLeaseStore(LeaseStoreContract):
    """On real Azurite."""

    @pytest.fixture
    def harness(self, blob_harness: LeaseHarness) -> LeaseHarness:
        return blob_harness
