"""Leases and checkpoints in memory: for tests, and for a single process that may forget."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from eventpump.clock import LoopClock
from eventpump.core.lease import LeaseSnapshot, PartitionLease
from eventpump.errors import ClosedError, ConfigurationError, StoreError
from eventpump.eventhubs.partitions import partition_order
from eventpump.storage.records.memory import MemoryRecordStore

if TYPE_CHECKING:
    from eventpump.eventhubs.events import Checkpoint
    from eventpump.interfaces import Clock, ConsumerScope, RecordStore, StoredRecord


@dataclass(slots=True)
class _Row:
    owner: str | None = None
    token: str | None = None
    epoch: int = 0
    expires_at: float = 0.0
    checkpoint: Checkpoint | None = None


class MemoryLeases:
    """The leases that several stores share, on one event loop. There are no locks, as no method of a store suspends."""

    def __init__(self) -> None:
        self._leases: dict[ConsumerScope, dict[str, _Row]] = {}
        self._tokens = itertools.count(1)
        self.records: dict[str, StoredRecord] = {}
        """The records of all consumer groups."""

    def leases(self, scope: ConsumerScope) -> dict[str, _Row]:
        """The lease rows of a consumer group, by partition id."""
        return self._leases.setdefault(scope, defaultdict(_Row))

    def next_token(self) -> str:
        """Return a token that was not returned before."""
        return f"memory-{next(self._tokens)}"

    def __repr__(self) -> str:
        return f"MemoryLeases({len(self._leases)} consumer groups)"


class MemoryLeaseStore:
    """A `LeaseStore` in memory. Stores with the same `shared` see one truth, as hosts on one storage account do.

    Args:
        shared: The common state; None for one of its own.
        lease_duration: How long a lease lives without renewal, in seconds. Default: 30.0.
        clock: None for the running loop's time.
    """

    def __init__(
        self, shared: MemoryLeases | None = None, *, lease_duration: float = 30.0, clock: Clock | None = None
    ) -> None:
        if lease_duration <= 0:
            raise ConfigurationError("lease_duration", "must be above 0")
        self._shared = MemoryLeases() if shared is None else shared
        self._lease_duration = float(lease_duration)
        self._clock = LoopClock() if clock is None else clock
        self._scope: ConsumerScope | None = None
        self._leases: dict[str, _Row] = {}
        self._records: MemoryRecordStore | None = None
        self._is_closed = False

    @property
    def lease_duration(self) -> float:
        """How long a lease lives without renewal, in seconds."""
        return self._lease_duration

    @property
    def records(self) -> RecordStore:
        """The records of the consumer group."""
        self._bound("records")
        assert self._records is not None
        return self._records

    async def open(self, scope: ConsumerScope, *, read_only: bool = False) -> None:
        """See `LeaseStore`. With `read_only` nothing differs: nothing has to be created."""
        if self._is_closed:
            raise ClosedError("lease store")
        if self._scope is not None:
            raise ConfigurationError("lease_store", "the store is open already: create one store per host")
        self._scope = replace(
            scope, fully_qualified_namespace=scope.fully_qualified_namespace.lower(), hub=scope.hub.lower(),
            consumer_group=scope.consumer_group.lower(),
        )  # fmt: skip
        self._leases = self._shared.leases(self._scope)
        place = "/".join((self._scope.fully_qualified_namespace, self._scope.hub, self._scope.consumer_group))
        self._records = MemoryRecordStore(self._shared.records, f"{place}/", kind="lease store")
        await self._records.open()

    async def ensure(self, partition_ids: Sequence[str]) -> None:
        """Create the leases that do not exist yet, without an owner."""
        rows = self._rows("ensure leases")
        for partition_id in partition_ids:
            rows.setdefault(partition_id, _Row())

    async def list(self) -> list[LeaseSnapshot]:
        """List every lease as it is now, in the order of partition ids."""
        rows = self._rows("list")
        now = self._clock.monotonic()
        return [
            LeaseSnapshot(partition_id, row.owner, _is_held(row, now), row.token, row.epoch)
            for partition_id, row in sorted(rows.items(), key=lambda item: partition_order(item[0]))
        ]

    async def acquire(self, snapshot: LeaseSnapshot, owner: str, *, held: bool = False) -> PartitionLease | None:
        """See `LeaseStore`."""
        row = self._row("acquire", snapshot.partition_id)
        if held:
            if snapshot.token is None or row.token != snapshot.token:
                return None
        elif _is_held(row, self._clock.monotonic()):
            return None
        return self._take(snapshot.partition_id, row, owner)

    async def renew(self, lease: PartitionLease) -> PartitionLease | None:
        """Renew a lease. Return it with a later `expires_at`, or None if it is lost."""
        row = self._row("renew", lease.partition_id)
        if row.token != lease.token:
            return None
        row.expires_at = self._clock.monotonic() + self._lease_duration
        return replace(lease, expires_at=row.expires_at)

    async def release(self, lease: PartitionLease) -> bool:
        """Release a lease, so that another host may acquire it at once. Return False if it was lost before."""
        row = self._row("release", lease.partition_id)
        if row.token != lease.token:
            return False
        row.owner = row.token = None
        return True

    async def read_checkpoint(self, partition_id: str) -> Checkpoint | None:
        """Return a checkpoint, or None if there is none."""
        row = self._rows("read checkpoint").get(partition_id)
        return None if row is None else row.checkpoint

    async def write_checkpoint(self, lease: PartitionLease, checkpoint: Checkpoint, *, backwards: bool = False) -> bool:
        """See `LeaseStore`."""
        row = self._row("write checkpoint", lease.partition_id)
        if row.token != lease.token:
            return False
        if backwards or row.checkpoint is None or row.checkpoint.sequence_number <= checkpoint.sequence_number:
            row.checkpoint = checkpoint
        return True

    async def aclose(self) -> None:
        """Close. Leases stay as they are."""
        self._is_closed = True
        if self._records is not None:
            await self._records.aclose()

    def _take(self, partition_id: str, row: _Row, owner: str) -> PartitionLease:
        row.owner, row.token = owner, self._shared.next_token()
        row.epoch += 1
        row.expires_at = self._clock.monotonic() + self._lease_duration
        return PartitionLease(partition_id, owner, row.epoch, row.epoch, row.token, row.expires_at)

    def _bound(self, operation: str) -> None:
        if self._is_closed:
            raise ClosedError("lease store")
        if self._scope is None:
            raise StoreError(operation, "the store is not open: call open() first")

    def _rows(self, operation: str) -> dict[str, _Row]:
        self._bound(operation)
        return self._leases

    def _row(self, operation: str, partition_id: str) -> _Row:
        row = self._rows(operation).get(partition_id)
        if row is None:
            raise StoreError(operation, "there is no such lease: call ensure() first", partition_id=partition_id)
        return row

    def __repr__(self) -> str:
        return f"MemoryLeaseStore({self._shared!r})"


def _is_held(row: _Row, now: float) -> bool:
    return row.token is not None and now < row.expires_at
