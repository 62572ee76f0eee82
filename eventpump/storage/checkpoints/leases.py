"""Reads the checkpoints that hosts of this library keep in a lease store of any kind."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Final

from eventpump.aio.tasks import gather
from eventpump.core.checkpoint import DEFAULT_SUBSCRIPTION
from eventpump.core.starts import NO_NUMBER
from eventpump.errors import ConfigurationError
from eventpump.interfaces import ConsumerScope, LeaseStore
from eventpump.storage.checkpoints.stored import GroupCheckpoints, StoredCheckpoint
from eventpump.storage.groups import GroupRecords
from eventpump.storage.leases.sqlite import SqliteLeaseStore

_FORMAT: Final = "eventpump"
_READS_AT_ONCE: Final = 32


async def subscription_key(records: GroupRecords, subscription: str) -> str:
    """Return the name of a subscription's checkpoints. Raises `ConfigurationError` if there is no such subscription."""
    if subscription == DEFAULT_SUBSCRIPTION:
        return DEFAULT_SUBSCRIPTION
    stored = await records.read_subscription(subscription)
    if stored is None:
        raise ConfigurationError("subscription", f"the store has no subscription {subscription!r}")
    return stored.record.key


class LeaseStoreCheckpointReader:
    """A `CheckpointReader` of a lease store.

    Args:
        make: Returns a store that is not open; called for each reading.
        place: Where the checkpoints are, for what is shown.
        subscription: The name of a subscription of the hosts. Default: "default".
    """

    def __init__(self, make: Callable[[], LeaseStore], place: str, subscription: str = DEFAULT_SUBSCRIPTION) -> None:
        self._make = make
        self._place = place
        self._subscription = subscription

    async def read(self, scope: ConsumerScope, partition_ids: Sequence[str]) -> GroupCheckpoints:
        """See `CheckpointReader`.

        Raises:
            ConfigurationError: There is no such store, it has nothing of the group, or no such subscription.
        """
        store = self._make()
        try:
            await store.open(scope, read_only=True)
            leases = {lease.partition_id: lease for lease in await store.list()}
            records = GroupRecords(store, scope)
            key = await subscription_key(records, self._subscription)
            known = [each for each in partition_ids if each in leases]
            checkpoints = await gather((records.read_checkpoint(each, key) for each in known), at_once=_READS_AT_ONCE)
        finally:
            await store.aclose()
        found = {}
        for partition_id, checkpoint in zip(known, checkpoints, strict=True):
            lease = leases[partition_id]
            number = None if checkpoint is None else checkpoint.sequence_number
            found[partition_id] = StoredCheckpoint(
                partition_id,
                _FORMAT,
                self._place,
                sequence_number=None if number == NO_NUMBER else number,
                offset=None if checkpoint is None else checkpoint.offset or None,
                owner=lease.owner,
                is_owned=lease.is_held,
            )
        return GroupCheckpoints(found)

    async def aclose(self) -> None:
        """Do nothing: each reading closes its store."""


class SqliteCheckpointReader(LeaseStoreCheckpointReader):
    """A `CheckpointReader` of the file of a `SqliteLeaseStore`.

    Args:
        path: The file. Nothing is written to it.
        subscription: The name of a subscription of the hosts. Default: "default".
    """

    def __init__(self, path: str | os.PathLike[str], subscription: str = DEFAULT_SUBSCRIPTION) -> None:
        super().__init__(lambda: SqliteLeaseStore(path), os.fspath(path), subscription)
