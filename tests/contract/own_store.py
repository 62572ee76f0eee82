"""A lease store of one's own, with its records, written from the documentation alone: on a table of keys and values.

The table stands for a database with a conditional write. The store does not import anything of eventpump's stores.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from eventpump.errors import ClosedError, ConfigurationError, StoreError
from eventpump.interfaces import (
    Checkpoint,
    Clock,
    ConsumerScope,
    LeaseSnapshot,
    ListedRecord,
    PartitionLease,
    StoredRecord,
)


@dataclass(frozen=True)
class Row:
    """A lease as the table has it."""

    owner: str | None = None
    token: str | None = None
    epoch: int = 0
    expires_at: float = 0.0
    checkpoint: Checkpoint | None = None


@dataclass
class Table:
    """A database: each call is answered in another turn of the event loop, and done in one step."""

    leases: dict[tuple[str, ...], Row] = field(default_factory=dict)
    documents: dict[tuple[str, ...], StoredRecord] = field(default_factory=dict)

    async def row(self, key: tuple[str, ...]) -> Row:
        await asyncio.sleep(0)
        if key not in self.leases:
            raise StoreError("read", "there is no such lease", partition_id=key[-1])
        return self.leases[key]

    async def replace(self, key: tuple[str, ...], before: Row, after: Row) -> bool:
        await asyncio.sleep(0)
        if self.leases[key] != before:
            return False
        self.leases[key] = after
        return True


class OwnRecordStore:
    """A `RecordStore`: the documents of one consumer group."""

    def __init__(self, table: Table, group: tuple[str, ...] = ()) -> None:
        self._documents, self._group = table.documents, group
        self._state = "new"

    async def open(self) -> None:
        if self._state == "closed":
            raise ClosedError("record store")
        self._state = "open"

    async def read(self, name: str) -> StoredRecord | None:
        await asyncio.sleep(0)
        return self._documents.get(self._key(name))

    async def swap(self, name: str, body: bytes, replaces: str | None) -> str | None:
        await asyncio.sleep(0)
        key = self._key(name)
        if not 0 < len(body) <= 4 << 20:
            raise ValueError("a body has 1 byte to 4 MiB")
        found = self._documents.get(key)
        if (found.version if found else None) == replaces:
            found = self._documents[key] = StoredRecord(body, secrets.token_hex(8))
        return found.version if found and found.body == body else None

    async def list(self, prefix: str) -> dict[str, ListedRecord]:
        if prefix and not prefix.endswith("/"):
            raise ValueError("a prefix must end with /")
        self._key(f"{prefix}any")
        await asyncio.sleep(0)
        found = {key[-1]: each for key, each in self._documents.items() if key[:-1] == self._group}
        return {name: ListedRecord(each.version) for name, each in found.items() if name.startswith(prefix)}

    async def delete(self, name: str, version: str | None = None) -> bool:
        await asyncio.sleep(0)
        key = self._key(name)
        found = self._documents.get(key)
        if found is not None and version not in (None, found.version):
            return False
        self._documents.pop(key, None)
        return True

    async def aclose(self) -> None:
        self._state = "closed"

    def _key(self, name: str) -> tuple[str, ...]:
        if any(not part or part.endswith(".") or set(part) & set("\\?#") for part in name.split("/")):
            raise ValueError(f"{name!r} is not a record name")
        if self._state == "closed":
            raise ClosedError("record store")
        if self._state == "new":
            raise StoreError(name, "the store is not open")
        return (*self._group, name)


class OwnLeaseStore:
    """A `LeaseStore` of 11 members."""

    def __init__(self, table: Table, clock: Clock, lease_duration: float = 30.0) -> None:
        self._table, self._clock = table, clock
        self._records: OwnRecordStore | None = None
        self._group: tuple[str, ...] = ()
        self._is_closed = False
        self.lease_duration = lease_duration

    @property
    def records(self) -> OwnRecordStore:
        assert self._records is not None
        return self._records

    async def open(self, scope: ConsumerScope, *, read_only: bool = False) -> None:
        if self._is_closed:
            raise ClosedError("lease store")
        if self._records is not None:
            raise ConfigurationError("lease_store", "the store is open already")
        self._group = (scope.fully_qualified_namespace.lower(), scope.hub.lower(), scope.consumer_group.lower())
        self._records = OwnRecordStore(self._table, self._group)
        await self._records.open()

    async def ensure(self, partition_ids: Sequence[str]) -> None:
        for partition_id in partition_ids:
            self._table.leases.setdefault(self._key(partition_id), Row())

    async def list(self) -> list[LeaseSnapshot]:
        self._key("")
        await asyncio.sleep(0)
        now = self._clock.monotonic()
        rows = {key[-1]: row for key, row in self._table.leases.items() if key[:-1] == self._group}
        return [
            LeaseSnapshot(each, rows[each].owner, self._is_held(rows[each], now), rows[each].token, rows[each].epoch)
            for each in sorted(rows, key=lambda each: (len(each), each))
        ]

    async def acquire(self, snapshot: LeaseSnapshot, owner: str, *, held: bool = False) -> PartitionLease | None:
        key, token = self._key(snapshot.partition_id), secrets.token_hex(8)
        try:
            while True:
                row, sent = await self._table.row(key), self._clock.monotonic()
                if held and (snapshot.token is None or row.token != snapshot.token):
                    return None
                if not held and self._is_held(row, sent):
                    return None
                expires_at = sent + self.lease_duration
                mine = replace(row, owner=owner, token=token, epoch=row.epoch + 1, expires_at=expires_at)
                if await self._table.replace(key, row, mine):
                    return PartitionLease(snapshot.partition_id, owner, mine.epoch, mine.epoch, token, expires_at)
        except asyncio.CancelledError:
            if (row := self._table.leases[key]).token == token:
                self._table.leases[key] = replace(row, owner=None, token=None)
            raise

    async def renew(self, lease: PartitionLease) -> PartitionLease | None:
        expires_at = self._clock.monotonic() + self.lease_duration
        is_renewed = await self._change(lease, lambda row: replace(row, expires_at=expires_at))
        return replace(lease, expires_at=expires_at) if is_renewed else None

    async def release(self, lease: PartitionLease) -> bool:
        return await self._change(lease, lambda row: replace(row, owner=None, token=None))

    async def read_checkpoint(self, partition_id: str) -> Checkpoint | None:
        row = self._table.leases.get(self._key(partition_id))
        return None if row is None else row.checkpoint

    async def write_checkpoint(self, lease: PartitionLease, checkpoint: Checkpoint, *, backwards: bool = False) -> bool:
        def forward(row: Row) -> Row:
            stored = row.checkpoint
            is_lower = stored is not None and checkpoint.sequence_number < stored.sequence_number
            return row if is_lower and not backwards else replace(row, checkpoint=checkpoint)

        return await self._change(lease, forward)

    async def aclose(self) -> None:
        self._is_closed = True

    async def _change(self, lease: PartitionLease, change: Callable[[Row], Row]) -> bool:
        """Change a lease in one step for as long as it is held under the token."""
        key = self._key(lease.partition_id)
        while (row := await self._table.row(key)).token == lease.token:
            if await self._table.replace(key, row, change(row)):
                return True
        return False

    def _key(self, partition_id: str) -> tuple[str, ...]:
        if self._is_closed:
            raise ClosedError("lease store")
        if self._records is None:
            raise StoreError("use", "the store is not open")
        return (*self._group, partition_id)

    def _is_held(self, row: Row, now: float) -> bool:
        return row.token is not None and now < row.expires_at
