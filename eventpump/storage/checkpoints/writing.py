"""What changes stored checkpoints, in whatever form: the interface, and the writes under a lease."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Final, Protocol, runtime_checkable

from eventpump.core.checkpoint import DEFAULT_SUBSCRIPTION
from eventpump.core.lease import LeaseSnapshot, PartitionLease
from eventpump.core.starts import hub_of
from eventpump.errors import StoreError
from eventpump.eventhubs.events import Checkpoint
from eventpump.interfaces import ConsumerScope, LeaseStore
from eventpump.storage.checkpoints.leases import SqliteCheckpointReader, subscription_key
from eventpump.storage.checkpoints.stored import CheckpointReader, GroupCheckpoints, StoredCheckpoint
from eventpump.storage.groups import GroupRecords, StoredScopeRecord
from eventpump.storage.leases.sqlite import NoGroupError, SqliteLeaseStore, check_place

OWNER: Final = "eventpump-checkpoints"
"""The name under which leases are held, and checkpoints written."""
CHANGED: Final = "its checkpoint has changed since it was read"
_EARLIER: Final = "the store's record is of an earlier hub of this name, for which hosts reset it: start them once"


@runtime_checkable
class CheckpointTarget(CheckpointReader, Protocol):
    """Reads the stored checkpoints of consumer groups, and changes them. It belongs to one event loop."""

    @property
    def format(self) -> str:
        """The form that it writes; what is exported in one form is not restored in another."""

    async def check(
        self, scope: ConsumerScope, partition_ids: Sequence[str], hub_created_at: datetime
    ) -> Mapping[str, str]:
        """Find which partitions cannot be written, and why, by partition id. Nothing is written.

        Args:
            partition_ids: The partitions of the hub.

        Raises:
            StoreError: The store failed.
            ConfigurationError: None can be written.
        """

    async def begin(self, scope: ConsumerScope, partition_ids: Sequence[str]) -> None:
        """Create what checkpoints are kept in, if it does not exist, and find who owns the partitions.

        Called before the first `write`, and again before those of another plan.

        Args:
            partition_ids: The partitions that will be written.

        Raises:
            StoreError: The store failed.
            ConfigurationError: The store cannot be written.
        """

    async def write(
        self, partition_id: str, before: StoredCheckpoint | None, after: Checkpoint | None, *, from_owner: bool
    ) -> str | None:
        """Replace a checkpoint, if it is as it was read. Calls for different partitions may overlap.

        Args:
            partition_id: The partition.
            before: What was read of it; None if that was nothing.
            after: The new checkpoint; None to remove the stored one.
            from_owner: Whether to write even if a consumer owns the partition.

        Returns:
            None once it is stored; otherwise why it is not.

        Raises:
            StoreError: The store failed; the checkpoint may be stored.
        """


class CheckpointLeaseStore(LeaseStore, Protocol):
    """A lease store from which a checkpoint can be removed."""

    async def clear_checkpoint(self, lease: PartitionLease) -> bool:
        """Remove the checkpoint under the lease; False if the lease is lost."""


class LeasedCheckpoints:
    """A `CheckpointTarget` for a consumer group in a lease store: each is written under its partition's lease."""

    def __init__(self, make: Callable[[], CheckpointLeaseStore], subscription: str = DEFAULT_SUBSCRIPTION) -> None:
        self._make = make
        self._subscription = subscription
        self._store: CheckpointLeaseStore | None = None
        self._records: GroupRecords | None = None
        self._key = DEFAULT_SUBSCRIPTION
        self._leases: dict[str, LeaseSnapshot] = {}

    async def check(
        self, scope: ConsumerScope, partition_ids: Sequence[str], hub_created_at: datetime
    ) -> Mapping[str, str]:
        store = self._make()
        try:
            await store.open(scope, read_only=True)
            records = GroupRecords(store, scope)
            if self._subscription == DEFAULT_SUBSCRIPTION:
                return of_earlier_hub(await records.read_scope_record(), partition_ids, hub_created_at)
            await subscription_key(records, self._subscription)
            stored = await records.read_subscription(self._subscription)
            assert stored is not None
            return {} if stored.record.hub_created_at == hub_created_at else dict.fromkeys(partition_ids, _EARLIER)
        except NoGroupError:
            return {}
        finally:
            await store.aclose()

    async def begin(self, scope: ConsumerScope, partition_ids: Sequence[str]) -> None:
        store = self._store
        if store is None:
            store = self._make()
            await store.open(scope)
            self._store, self._records = store, GroupRecords(store, scope)
            self._key = await subscription_key(self._records, self._subscription)
        await store.ensure(partition_ids)
        self._leases = {lease.partition_id: lease for lease in await store.list()}

    async def write(
        self, partition_id: str, before: StoredCheckpoint | None, after: Checkpoint | None, *, from_owner: bool
    ) -> str | None:
        store, records, snapshot = self._store, self._records, self._leases[partition_id]
        assert store is not None
        assert records is not None
        if snapshot.is_held and not from_owner:
            return owned_by(snapshot.owner)
        lease = await store.acquire(snapshot, OWNER, held=snapshot.is_held)
        if lease is None:
            return owned_by(None)
        try:
            stored = await records.read_checkpoint(partition_id, self._key)
            known = None if before is None or not before.is_usable else (before.sequence_number, before.offset)
            if known != (None if stored is None else (stored.sequence_number, stored.offset)):
                return CHANGED
            if after is not None:
                is_stored = await records.write_checkpoint(lease, after, self._key, backwards=True)
            elif self._key == DEFAULT_SUBSCRIPTION:
                is_stored = await store.clear_checkpoint(lease)
            else:
                is_stored = await records.clear_checkpoint(lease, self._key)
            return None if is_stored else owned_by(None)
        finally:
            with contextlib.suppress(StoreError):  # then it expires
                await store.release(lease)

    async def aclose(self) -> None:
        """Close the store, if it is open."""
        if self._store is not None:
            await self._store.aclose()


class SqliteCheckpointWriter(SqliteCheckpointReader):
    """A `CheckpointTarget` of the file of a `SqliteLeaseStore`. Each partition is written under its lease.

    Args:
        path: The file. It is created by the first write if it does not exist.
        subscription: The name of a subscription of the hosts. Default: "default".
    """

    def __init__(self, path: str | os.PathLike[str], subscription: str = DEFAULT_SUBSCRIPTION) -> None:
        super().__init__(path, subscription)
        self._path = os.fspath(path)
        self._leased = LeasedCheckpoints(lambda: SqliteLeaseStore(path), subscription)

    @property
    def format(self) -> str:
        """See `CheckpointTarget.format`."""
        is_default = self._subscription == DEFAULT_SUBSCRIPTION
        return "eventpump" if is_default else f"eventpump, subscription {self._subscription}"

    async def read(self, scope: ConsumerScope, partition_ids: Sequence[str]) -> GroupCheckpoints:
        """See `CheckpointReader`. Of a file that does not exist yet there are none.

        Raises:
            ConfigurationError: The file is not one of leases, or has no such subscription.
        """
        if not await self._exists():
            return GroupCheckpoints(notes=(f"{self._path}: there is no such file yet",))
        try:
            return await super().read(scope, partition_ids)
        except NoGroupError as error:
            return GroupCheckpoints(notes=(error.problem,))

    async def check(
        self, scope: ConsumerScope, partition_ids: Sequence[str], hub_created_at: datetime
    ) -> Mapping[str, str]:
        if not await self._exists():
            check_place(self._path)
            return {}
        return await self._leased.check(scope, partition_ids, hub_created_at)

    async def _exists(self) -> bool:
        return await asyncio.to_thread(os.path.exists, self._path)

    async def begin(self, scope: ConsumerScope, partition_ids: Sequence[str]) -> None:
        await self._leased.begin(scope, partition_ids)

    async def write(
        self, partition_id: str, before: StoredCheckpoint | None, after: Checkpoint | None, *, from_owner: bool
    ) -> str | None:
        return await self._leased.write(partition_id, before, after, from_owner=from_owner)

    async def aclose(self) -> None:
        """Close the file, if it is open. May be called more than once."""
        await self._leased.aclose()


def of_earlier_hub(
    stored: StoredScopeRecord | None, partition_ids: Sequence[str], hub_created_at: datetime
) -> Mapping[str, str]:
    """Return the partitions whose checkpoints hosts would reset, by a group's record, and why they are not written."""
    if stored is None:
        return {}
    return {each: _EARLIER for each in partition_ids if hub_of(stored.record, each) != hub_created_at}


def owned_by(owner: str | None) -> str:
    """Return why a partition is not written that has an owner."""
    return f"{owner or 'a consumer'} owns it"
