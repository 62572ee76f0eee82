"""Records in memory: for tests, and for a single process that may forget."""

from __future__ import annotations

import secrets

from eventpump.interfaces import ListedRecord, StoredRecord
from eventpump.storage.records.names import check_body, check_name, check_prefix
from eventpump.storage.records.opened import OpenedRecords


class MemoryRecordStore(OpenedRecords):
    """A `RecordStore` that lives as long as its process.

    Args:
        records: The records, shared by the stores that are given the same dictionary; None for a new one.
    """

    def __init__(
        self, records: dict[str, StoredRecord] | None = None, prefix: str = "", *, kind: str = "record store"
    ) -> None:
        super().__init__(kind)
        self._records = {} if records is None else records
        self._prefix = prefix

    async def open(self) -> None:
        """Open it. Opening twice is fine."""
        self._check_not_closed()
        self._is_open = True

    async def read(self, name: str) -> StoredRecord | None:
        """Return a record, or None if there is none."""
        return self._records.get(self._key("read", name))

    async def swap(self, name: str, body: bytes, replaces: str | None) -> str | None:
        """Store a record by compare-and-swap. Return None, and store nothing, if another is there."""
        key = self._key("swap", name)
        check_body(body)
        found = self._records.get(key)
        if (None if found is None else found.version) != replaces:
            return found.version if found is not None and found.body == body else None
        stored = self._records[key] = StoredRecord(body, new_version())
        return stored.version

    async def list(self, prefix: str) -> dict[str, ListedRecord]:
        """Return the records of a directory, with their bodies."""
        check_prefix(prefix)
        self._check_open(f"list {prefix}")
        start = self._prefix + prefix
        return {
            key.removeprefix(self._prefix): ListedRecord(stored.version, stored.body)
            for key, stored in self._records.items()
            if key.startswith(start)
        }

    async def delete(self, name: str, version: str | None = None) -> bool:
        """Delete a record. Return False, and delete nothing, if there is one of another version."""
        key = self._key("delete", name)
        found = self._records.get(key)
        if found is not None and version not in (None, found.version):
            return False
        self._records.pop(key, None)
        return True

    async def aclose(self) -> None:
        """Close it. Closing twice is fine."""
        self._is_closed = True

    def _key(self, operation: str, name: str) -> str:
        check_name(name)
        self._check_open(f"{operation} {name}")
        return self._prefix + name

    def __repr__(self) -> str:
        return f"MemoryRecordStore({len(self._records)} records)"


def new_version() -> str:
    """Return a version that no record had before, including deleted ones."""
    return secrets.token_hex(16)
