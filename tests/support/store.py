"""A lease store that fails when a test says so."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from eventpump.core.lease import LeaseSnapshot, PartitionLease
from eventpump.errors import StoreError
from eventpump.eventhubs.events import Checkpoint
from eventpump.interfaces import (
    CheckpointClaim,
    ConsumerScope,
    LeaseStore,
    ScopeRecord,
    StoredScopeRecord,
    StoredSubscription,
    SubscriptionRecord,
)


@dataclass(slots=True)
class _Fault:
    operation: str
    partition_id: str | None
    left: float
    error: BaseException | None
    delay: float
    is_after: bool


class FlakyLeaseStore:
    """Passes every call on to a real store, and fails, delays or hangs the ones a test names.

    Args:
        store: The real one.
    """

    def __init__(self, store: LeaseStore) -> None:
        self._store = store
        self._faults: list[_Fault] = []
        self.calls: list[tuple[str, str | None]] = []
        """Every call, by operation and partition, in order."""
        self.in_flight: dict[tuple[str, str | None], int] = {}
        self.peak_in_flight: dict[tuple[str, str | None], int] = {}
        """The most calls of a kind, for one partition, at one time."""
        self.written: list[Checkpoint] = []
        """Every checkpoint the real store took, in order."""
        self.turns = 0
        """The turns of the event loop that each call takes at the least, as those of a real store do."""
        self._healed = asyncio.Event()

    # The operations: open, ensure, list, acquire, steal, renew, release, read, write, reset, scope, record,
    # subscriptions, subscribe, unsubscribe, close; "scope" reads the scope record, "record" writes it, "read" is also a
    # claim.

    def fail(
        self,
        operation: str,
        partition_id: str | None = None,
        *,
        times: float = 1,
        error: BaseException | None = None,
        is_after: bool = False,
    ) -> None:
        """Fail calls.

        Args:
            partition_id: None for any.
            times: How often; infinity until `heal`.
            error: What to raise, a `CancelledError` for one; None for a `StoreError` that speaks of a 503.
            is_after: Whether the real store does its work first, so that only the answer is lost.
        """
        error = error or StoreError(operation, "503 server busy", partition_id=partition_id)
        self._faults.append(_Fault(operation, partition_id, times, error, 0.0, is_after))

    def hang(self, operation: str, partition_id: str | None = None) -> None:
        """Answer no call until `heal`."""
        self._faults.append(_Fault(operation, partition_id, float("inf"), None, float("inf"), False))

    def delay(self, seconds: float, operation: str, partition_id: str | None = None) -> None:
        """Answer late, until `heal`."""
        self._faults.append(_Fault(operation, partition_id, float("inf"), None, seconds, False))

    def heal(self) -> None:
        """Work again. Calls that hang go on."""
        self._faults.clear()
        self._healed.set()
        self._healed = asyncio.Event()

    async def _before(self, operation: str, partition_id: str | None) -> BaseException | None:
        """Do what faults say, and give the error to raise after the work."""
        self.calls.append((operation, partition_id))
        for _ in range(self.turns):
            await asyncio.sleep(0)
        for fault in list(self._faults):
            if fault.operation != operation or fault.partition_id not in {None, partition_id}:
                continue
            fault.left -= 1
            if fault.left <= 0:
                self._faults.remove(fault)
            if fault.delay == float("inf"):
                await self._healed.wait()
            elif fault.delay:
                await asyncio.sleep(fault.delay)
            if fault.error is not None:
                if fault.is_after:
                    return fault.error
                raise fault.error
        return None

    # ------------------------------------------------------------------------------------------------ LeaseStore

    @property
    def lease_duration(self) -> float:
        """How long a lease lives without renewal, in seconds."""
        return self._store.lease_duration

    async def open(self, scope: ConsumerScope) -> None:
        """See `LeaseStore`."""
        after = await self._before("open", None)
        await self._store.open(scope)
        _raise(after)

    async def ensure_leases(self, partition_ids: Sequence[str]) -> None:
        """See `LeaseStore`."""
        after = await self._before("ensure", None)
        await self._store.ensure_leases(partition_ids)
        _raise(after)

    async def list_leases(self) -> list[LeaseSnapshot]:
        """See `LeaseStore`."""
        after = await self._before("list", None)
        found = await self._store.list_leases()
        _raise(after)
        return found

    async def acquire_lease(self, partition_id: str, owner: str) -> PartitionLease | None:
        """See `LeaseStore`."""
        after = await self._before("acquire", partition_id)
        lease = await self._store.acquire_lease(partition_id, owner)
        _raise(after)
        return lease

    async def steal_lease(self, snapshot: LeaseSnapshot, owner: str) -> PartitionLease | None:
        """See `LeaseStore`."""
        after = await self._before("steal", snapshot.partition_id)
        lease = await self._store.steal_lease(snapshot, owner)
        _raise(after)
        return lease

    async def renew_lease(self, lease: PartitionLease) -> PartitionLease | None:
        """See `LeaseStore`."""
        after = await self._before("renew", lease.partition_id)
        renewed = await self._store.renew_lease(lease)
        _raise(after)
        return renewed

    async def release_lease(self, lease: PartitionLease) -> bool:
        """See `LeaseStore`."""
        after = await self._before("release", lease.partition_id)
        is_released = await self._store.release_lease(lease)
        _raise(after)
        return is_released

    async def read_checkpoint(self, partition_id: str, subscription: str = "default") -> Checkpoint | None:
        """See `LeaseStore`."""
        after = await self._before("read", partition_id)
        checkpoint = await self._store.read_checkpoint(partition_id, subscription)
        _raise(after)
        return checkpoint

    async def write_checkpoint(
        self, lease: PartitionLease, checkpoint: Checkpoint, subscription: str = "default"
    ) -> bool:
        """See `LeaseStore`."""
        key = ("write", lease.partition_id)
        self.in_flight[key] = self.in_flight.get(key, 0) + 1
        self.peak_in_flight[key] = max(self.peak_in_flight.get(key, 0), self.in_flight[key])
        try:
            after = await self._before("write", lease.partition_id)
            is_stored = await self._store.write_checkpoint(lease, checkpoint, subscription)
            if is_stored:
                self.written.append(checkpoint)
            _raise(after)
        finally:
            self.in_flight[key] -= 1
        return is_stored

    async def reset_checkpoint(
        self, lease: PartitionLease, checkpoint: Checkpoint, subscription: str = "default"
    ) -> bool:
        """See `LeaseStore`."""
        after = await self._before("reset", lease.partition_id)
        is_stored = await self._store.reset_checkpoint(lease, checkpoint, subscription)
        _raise(after)
        return is_stored

    async def read_scope_record(self) -> StoredScopeRecord | None:
        """See `LeaseStore`."""
        after = await self._before("scope", None)
        found = await self._store.read_scope_record()
        _raise(after)
        return found

    async def write_scope_record(
        self, record: ScopeRecord, replaces: StoredScopeRecord | None
    ) -> StoredScopeRecord | None:
        """See `LeaseStore`."""
        after = await self._before("record", None)
        stored = await self._store.write_scope_record(record, replaces)
        _raise(after)
        return stored

    async def claim_checkpoint(self, lease: PartitionLease, subscription: str = "default") -> CheckpointClaim | None:
        """See `LeaseStore`."""
        after = await self._before("read", lease.partition_id)
        claim = await self._store.claim_checkpoint(lease, subscription)
        _raise(after)
        return claim

    async def list_subscriptions(self) -> list[StoredSubscription]:
        """See `LeaseStore`."""
        after = await self._before("subscriptions", None)
        found = await self._store.list_subscriptions()
        _raise(after)
        return found

    async def read_subscription(self, name: str) -> StoredSubscription | None:
        """See `LeaseStore`."""
        after = await self._before("subscriptions", None)
        found = await self._store.read_subscription(name)
        _raise(after)
        return found

    async def write_subscription(
        self, record: SubscriptionRecord, replaces: StoredSubscription | None
    ) -> StoredSubscription | None:
        """See `LeaseStore`."""
        after = await self._before("subscribe", None)
        stored = await self._store.write_subscription(record, replaces)
        _raise(after)
        return stored

    async def delete_subscription(self, stored: StoredSubscription) -> bool:
        """See `LeaseStore`."""
        after = await self._before("unsubscribe", None)
        is_deleted = await self._store.delete_subscription(stored)
        _raise(after)
        return is_deleted

    async def aclose(self) -> None:
        """See `LeaseStore`."""
        after = await self._before("close", None)
        await self._store.aclose()
        _raise(after)


def _raise(error: BaseException | None) -> None:
    if error is not None:
        raise error
