"""Leases and checkpoints in memory: for tests, and for a single process that may forget."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from eventpump.clock import LoopClock
from eventpump.core.lease import LeaseSnapshot, PartitionLease
from eventpump.errors import ClosedError, ConfigurationError, StoreError
from eventpump.eventhubs.partitions import partition_order
from eventpump.interfaces import CheckpointClaim, StoredScopeRecord, StoredSubscription
from eventpump.storage.leases.layout import DEFAULT_SUBSCRIPTION

if TYPE_CHECKING:
    from eventpump.eventhubs.events import Checkpoint
    from eventpump.interfaces import Clock, ConsumerScope, ScopeRecord, SubscriptionRecord


@dataclass(slots=True)
class _Row:
    owner: str | None = None
    token: str | None = None
    epoch: int = 0
    expires_at: float = 0.0


class MemoryLeases:
    """The leases that several stores share, on one event loop. There are no locks, as no method of a store suspends."""

    def __init__(self) -> None:
        self._leases: dict[ConsumerScope, dict[str, _Row]] = {}
        self._checkpoints: dict[ConsumerScope, dict[tuple[str, str], Checkpoint]] = {}
        self._scopes: dict[ConsumerScope, StoredScopeRecord] = {}
        self._subscriptions: dict[ConsumerScope, dict[str, StoredSubscription]] = {}
        self._tokens = itertools.count(1)

    def leases(self, scope: ConsumerScope) -> dict[str, _Row]:
        """The lease rows of a consumer group, by partition id."""
        return self._leases.setdefault(scope, {})

    def checkpoints(self, scope: ConsumerScope) -> dict[tuple[str, str], Checkpoint]:
        """The checkpoints of a consumer group, by partition id and subscription."""
        return self._checkpoints.setdefault(scope, {})

    @property
    def scopes(self) -> dict[ConsumerScope, StoredScopeRecord]:
        """The scope records, by consumer group."""
        return self._scopes

    def subscriptions(self, scope: ConsumerScope) -> dict[str, StoredSubscription]:
        """The subscriptions of a consumer group, by name."""
        return self._subscriptions.setdefault(scope, {})

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
        self._is_closed = False

    @property
    def lease_duration(self) -> float:
        """How long a lease lives without renewal, in seconds."""
        return self._lease_duration

    async def open(self, scope: ConsumerScope) -> None:
        """Bind to a consumer group. Once."""
        if self._is_closed:
            raise ClosedError("lease store")
        if self._scope is not None:
            raise ConfigurationError("lease_store", "the store is open already: create one store per host")
        self._scope = replace(
            scope, fully_qualified_namespace=scope.fully_qualified_namespace.lower(), hub=scope.hub.lower(),
            consumer_group=scope.consumer_group.lower(),
        )  # fmt: skip

    async def ensure_leases(self, partition_ids: Sequence[str]) -> None:
        """Create the leases that do not exist yet, without an owner."""
        rows = self._rows("ensure leases")
        for partition_id in partition_ids:
            rows.setdefault(partition_id, _Row())

    async def list_leases(self) -> list[LeaseSnapshot]:
        """List every lease as it is now, in the order of partition ids."""
        rows = self._rows("list")
        now = self._clock.monotonic()
        return [
            LeaseSnapshot(partition_id, row.owner, _is_held(row, now), row.token, row.epoch)
            for partition_id, row in sorted(rows.items(), key=lambda item: partition_order(item[0]))
        ]

    async def acquire_lease(self, partition_id: str, owner: str) -> PartitionLease | None:
        """Acquire a lease that is not held, with the next epoch. Return None if it is held."""
        row = self._row("acquire", partition_id)
        if _is_held(row, self._clock.monotonic()):
            return None
        return self._take(partition_id, row, owner)

    async def steal_lease(self, snapshot: LeaseSnapshot, owner: str) -> PartitionLease | None:
        """Take a lease from the owner in the snapshot, with the next epoch. Return None if it has another owner now."""
        row = self._row("steal", snapshot.partition_id)
        if snapshot.token is None or row.token != snapshot.token:
            return None
        return self._take(snapshot.partition_id, row, owner)

    async def renew_lease(self, lease: PartitionLease) -> PartitionLease | None:
        """Renew a lease. Return it with a later `expires_at`, or None if it is lost."""
        row = self._row("renew", lease.partition_id)
        if row.token != lease.token:
            return None
        row.expires_at = self._clock.monotonic() + self._lease_duration
        return replace(lease, expires_at=row.expires_at)

    async def release_lease(self, lease: PartitionLease) -> bool:
        """Release a lease, so that another host may acquire it at once. Return False if it was lost before."""
        row = self._row("release", lease.partition_id)
        if row.token != lease.token:
            return False
        row.owner = row.token = None
        return True

    async def read_checkpoint(self, partition_id: str, subscription: str = DEFAULT_SUBSCRIPTION) -> Checkpoint | None:
        """Return a checkpoint, or None if there is none.

        Args:
            subscription: The subscription. Default: "default".
        """
        return self._shared.checkpoints(self._bound("read checkpoint")).get((partition_id, subscription))

    async def claim_checkpoint(
        self, lease: PartitionLease, subscription: str = DEFAULT_SUBSCRIPTION
    ) -> CheckpointClaim | None:
        """Read a checkpoint under the lease. None where that is lost.

        Args:
            subscription: The subscription. Default: "default".
        """
        if self._row("claim checkpoint", lease.partition_id).token != lease.token:
            return None
        stored = self._shared.checkpoints(self._bound("claim checkpoint"))
        return CheckpointClaim(stored.get((lease.partition_id, subscription)))

    async def write_checkpoint(
        self, lease: PartitionLease, checkpoint: Checkpoint, subscription: str = DEFAULT_SUBSCRIPTION
    ) -> bool:
        """Store a checkpoint under the lease. Return False, and store nothing, if the lease is lost.

        Args:
            subscription: The subscription. Default: "default".
        """
        row = self._row("write checkpoint", lease.partition_id)
        if row.token != lease.token:
            return False
        stored = self._shared.checkpoints(self._bound("write checkpoint"))
        before = stored.get((lease.partition_id, subscription))
        if before is None or before.sequence_number <= checkpoint.sequence_number:
            stored[lease.partition_id, subscription] = checkpoint
        return True

    async def reset_checkpoint(
        self, lease: PartitionLease, checkpoint: Checkpoint, subscription: str = DEFAULT_SUBSCRIPTION
    ) -> bool:
        """Store a checkpoint under the lease, also an earlier one. Return False, and store nothing, if it is lost.

        Args:
            subscription: The subscription. Default: "default".
        """
        if self._row("reset checkpoint", lease.partition_id).token != lease.token:
            return False
        self._shared.checkpoints(self._bound("reset checkpoint"))[lease.partition_id, subscription] = checkpoint
        return True

    async def read_scope_record(self) -> StoredScopeRecord | None:
        """Return the consumer group's record, or None if there is none."""
        return self._shared.scopes.get(self._bound("read scope record"))

    async def write_scope_record(
        self, record: ScopeRecord, replaces: StoredScopeRecord | None
    ) -> StoredScopeRecord | None:
        """Store the consumer group's record by compare-and-swap. Return None, storing nothing, if another is there."""
        scope, records = self._bound("write scope record"), self._shared.scopes
        if records.get(scope) != replaces:
            return None
        records[scope] = StoredScopeRecord(record, self._shared.next_token())
        return records[scope]

    async def list_subscriptions(self) -> list[StoredSubscription]:
        """List the records of the consumer group's subscriptions, by name."""
        return [stored for _, stored in sorted(self._subscriptions("list subscriptions").items())]

    async def read_subscription(self, name: str) -> StoredSubscription | None:
        """Read the record of a subscription; None where there is none."""
        return self._subscriptions("read subscription").get(name)

    async def write_subscription(
        self, record: SubscriptionRecord, replaces: StoredSubscription | None
    ) -> StoredSubscription | None:
        """Store a subscription's record by compare-and-swap. None, and nothing stored, where another is there."""
        records = self._subscriptions("write subscription")
        if records.get(record.name) != replaces:
            return None
        stored = records[record.name] = StoredSubscription(record, self._shared.next_token())
        return stored

    async def delete_subscription(self, stored: StoredSubscription) -> bool:
        """Delete a subscription's record and checkpoints. False, and nothing deleted, where another is there."""
        operation, record = "delete subscription", stored.record
        records = self._subscriptions(operation)
        if records.get(record.name) != stored:
            return False
        del records[record.name]
        checkpoints = self._shared.checkpoints(self._bound(operation))
        for key in [key for key in checkpoints if key[1] == record.key]:
            del checkpoints[key]
        return True

    async def aclose(self) -> None:
        """Close. Leases stay as they are."""
        self._is_closed = True

    def _take(self, partition_id: str, row: _Row, owner: str) -> PartitionLease:
        row.owner, row.token = owner, self._shared.next_token()
        row.epoch += 1
        row.expires_at = self._clock.monotonic() + self._lease_duration
        return PartitionLease(partition_id, owner, row.epoch, row.token, row.expires_at)

    def _bound(self, operation: str) -> ConsumerScope:
        if self._is_closed:
            raise ClosedError("lease store")
        if self._scope is None:
            raise StoreError(operation, "the store is not open: call open() first")
        return self._scope

    def _subscriptions(self, operation: str) -> dict[str, StoredSubscription]:
        return self._shared.subscriptions(self._bound(operation))

    def _rows(self, operation: str) -> dict[str, _Row]:
        return self._shared.leases(self._bound(operation))

    def _row(self, operation: str, partition_id: str) -> _Row:
        row = self._rows(operation).get(partition_id)
        if row is None:
            raise StoreError(operation, "there is no such lease: call ensure_leases() first", partition_id=partition_id)
        return row

    def __repr__(self) -> str:
        return f"MemoryLeaseStore({self._shared!r})"


def _is_held(row: _Row, now: float) -> bool:
    return row.token is not None and now < row.expires_at
