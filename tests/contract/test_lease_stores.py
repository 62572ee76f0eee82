"""The contract of lease stores, over every implementation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from eventpump.interfaces import LeaseStore, RecordStore
from eventpump.testing.conformance.leases import LeaseHarness, LeaseStoreContract

if TYPE_CHECKING:
    from eventpump.storage.leases.blob import BlobLeaseStore
    from eventpump.storage.leases.memory import MemoryLeaseStore
    from eventpump.storage.leases.ownership import BlobOwnershipStore
    from eventpump.storage.leases.sqlite import SqliteLeaseStore
    from tests.contract.own_store import OwnLeaseStore

    def _are_ports(
        blob: BlobLeaseStore,
        ownership: BlobOwnershipStore,
        sqlite: SqliteLeaseStore,
        memory: MemoryLeaseStore,
        own: OwnLeaseStore,
    ) -> list[LeaseStore]:
        return [blob, ownership, sqlite, memory, own]


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


class TestBlobOwnershipStore(LeaseStoreContract):
    """In the form of the other SDKs, on real Azurite."""

    @pytest.fixture
    def harness(self, ownership_harness: LeaseHarness) -> LeaseHarness:
        return ownership_harness


class TestOwnLeaseStore(LeaseStoreContract):
    """A store of one's own, written from the documentation, on a clock moved by hand."""

    @pytest.fixture
    def harness(self, own_harness: LeaseHarness) -> LeaseHarness:
        return own_harness


def test_interface_of_lease_stores_has_few_members() -> None:
    """A store of one's own implements eleven members, and four of a record store besides opening and closing it."""
    assert sorted(each for each in vars(LeaseStore) if not each.startswith("_")) == [
        "aclose", "acquire", "ensure", "lease_duration", "list", "open", "read_checkpoint", "records", "release",
        "renew", "write_checkpoint",
    ]  # fmt: skip
    records = {"aclose", "delete", "list", "open", "read", "swap"}
    assert {each for each in vars(RecordStore) if not each.startswith("_")} == records
