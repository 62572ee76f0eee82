"""What the hosts of one consumer group share beside its leases: records, and checkpoints of subscriptions in them.

The records lie in the lease store's record store: `scope.json`, `subscriptions/{name}.json`, and
`checkpoints/{subscription}/{partition}`. The checkpoint of the default subscription lies in the lease itself.

A subscription's checkpoint is fenced by a claim. A new owner of the partition writes a claim of its own into the
record, and renews its lease between reading the record and that write: a host that takes the lease from then on either
claims the record after that write, or replaces it before, so that the write is refused. From its claim on, no earlier
owner can write, as it does not know the version.
"""

from __future__ import annotations

import asyncio
import functools
import secrets
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any, Final, Generic, TypeAlias, TypeVar
from urllib.parse import quote

from eventpump.aio.tasks import gather
from eventpump.core.checkpoint import DEFAULT_SUBSCRIPTION
from eventpump.core.lease import PartitionLease
from eventpump.errors import ConfigurationError, StoreError
from eventpump.eventhubs.events import Checkpoint
from eventpump.interfaces import ConsumerScope, LeaseStore, RecordStore, StoredRecord
from eventpump.storage.checkpoint_form import CheckpointRecord
from eventpump.storage.scope_form import (
    HubNames,
    NamedRecord,
    ScopeRecord,
    SubscriptionRecord,
    encode_named_record,
    encode_subscription,
    parse_named_record,
    parse_subscription,
)
from eventpump.telemetry.interface import ConsumerTelemetry

_T = TypeVar("_T")
_R = TypeVar("_R", covariant=True)

SCOPE_RECORD: Final = "scope.json"
SUBSCRIPTIONS: Final = "subscriptions/"
CHECKPOINTS: Final = "checkpoints/"

_WRITE_TRIES: Final = 4
_AT_ONCE: Final = 32


@dataclass(frozen=True, slots=True)
class Stored(Generic[_R]):
    """A record of the group as it was read or written, with its version in the store."""

    record: _R
    version: str


StoredScopeRecord: TypeAlias = Stored[ScopeRecord]
StoredSubscription: TypeAlias = Stored[SubscriptionRecord]


@dataclass(frozen=True, slots=True)
class CheckpointClaim:
    """A subscription's checkpoint, claimed by a new owner of the partition; None where there is none yet."""

    checkpoint: Checkpoint | None


class OtherHubError(ConfigurationError):
    """The records of the consumer group are those of another hub."""

    def __init__(self, names: HubNames, scope: ConsumerScope) -> None:
        problem = (
            f"the leases of consumer group {scope.consumer_group} are those of {names}, and this host reads "
            f"{HubNames.of(scope)}"
        )
        super().__init__("lease_store", problem)
        self.names = names


class ScopeRecords:
    """The record of one consumer group, which names the hub that the group is of."""

    def __init__(self, records: Callable[[], RecordStore], scope: ConsumerScope) -> None:
        self._records = records
        self._scope = scope
        self._names = HubNames.of(scope)
        self._is_named = False
        self._unanswered: str | None = None
        """The id of a first record whose write had no answer yet."""

    async def read(self, operation: str = "read scope record") -> StoredScopeRecord | None:
        """Return the record; None if there is none. One request.

        Raises:
            OtherHubError: It is that of another hub.
            StoreError: The store failed, or its content is not a record that this version knows.
        """
        named, version = await self._read(operation)
        return None if named.record is None or version is None else Stored(named.record, version)

    async def write(self, record: ScopeRecord, replaces: StoredScopeRecord | None) -> StoredScopeRecord | None:
        """Store the record by compare-and-swap. None, and nothing stored, where another is there.

        Cancelled or failed, it is stored or not. Read it again; or write a first record again, which returns the one
        that an earlier call of this host has stored. One request, and before the first record one more, as the hub may
        be named already.

        Raises:
            OtherHubError: The group is that of another hub.
            StoreError: The store failed, and whether it is stored is not known.
        """
        operation = "write scope record"
        if replaces is not None:
            version = await self._swap(operation, record, replaces.version)
            return None if version is None else Stored(record, version)
        for _ in range(_WRITE_TRIES):
            found, version = await self._read(operation)
            if found.record is not None:
                is_own, self._unanswered = found.id is not None and found.id == self._unanswered, None
                return Stored(found.record, version) if is_own and version is not None else None
            self._unanswered = self._unanswered or _random_id()
            version = await self._swap(operation, record, version, self._unanswered)
            self._unanswered = None
            if version is not None:
                return Stored(record, version)
        return None

    async def ensure_named(self, operation: str) -> None:
        """Have the record name the hub, before anything of the group is written."""
        for _ in range(_WRITE_TRIES):
            if self._is_named:
                return
            named, version = await self._read(operation)
            if not self._is_named:
                await self._swap(operation, named.record, version)
        if not self._is_named:
            raise StoreError(operation, "the consumer group's record changed at every attempt to name its hub")

    async def _read(self, operation: str) -> tuple[NamedRecord, str | None]:
        records = self._records()
        found = await _call(operation, records.read(SCOPE_RECORD))
        if found is None:
            return NamedRecord(None, None), None
        named = _parsed(operation, records, SCOPE_RECORD, found, parse_named_record)
        if named.names is not None:
            if not named.names.is_same(self._names):
                raise OtherHubError(named.names, self._scope)
            self._is_named = True
        return named, found.version

    async def _swap(
        self, operation: str, record: ScopeRecord | None, replaces: str | None, body_id: str | None = None
    ) -> str | None:
        body = encode_named_record(self._names, record, body_id or _random_id())
        version = await _call(operation, self._records().swap(SCOPE_RECORD, body, replaces))
        if version is not None:
            self._is_named = True
        return version


@dataclass(frozen=True, slots=True)
class _Claimed:
    """A checkpoint's record as it was written under the lease of a token."""

    record: CheckpointRecord
    version: str
    token: str


class GroupRecords:
    """The scope record, subscriptions and checkpoints of one consumer group, in any lease store.

    Each call raises `StoreError` if the store failed, and whether it took effect is not known then; or if a record is
    not one that this version knows.

    Args:
        leases: The lease store; opened, and closed, by its owner.
        telemetry: Records the writes of checkpoints; None if they are not recorded.
    """

    def __init__(self, leases: LeaseStore, scope: ConsumerScope, telemetry: ConsumerTelemetry | None = None) -> None:
        self._leases = leases
        self._telemetry = telemetry
        self._scope = ScopeRecords(lambda: leases.records, scope)
        self._subscriptions: dict[str, StoredSubscription] = {}
        self._claims: dict[str, _Claimed] = {}
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    # ---- the scope record

    async def read_scope_record(self) -> StoredScopeRecord | None:
        """Return the consumer group's record; None if there is none; see `ScopeRecords.read`."""
        return await self._scope.read()

    async def write_scope_record(
        self, record: ScopeRecord, replaces: StoredScopeRecord | None
    ) -> StoredScopeRecord | None:
        """Store the consumer group's record by compare-and-swap; see `ScopeRecords.write`."""
        return await self._scope.write(record, replaces)

    # ---- subscriptions

    async def list_subscriptions(self) -> list[StoredSubscription]:
        """List the records of the subscriptions, active or not, by name. Only those that changed are read."""
        operation, records = "list subscriptions", self._leases.records
        listed = await _call(operation, records.list(SUBSCRIPTIONS))
        known = self._subscriptions

        async def current(name: str) -> StoredSubscription | None:
            before, entry = known.get(name), listed[name]
            if before is not None and before.version == entry.version:
                return before
            if entry.body is not None:
                return _subscription(operation, records, name, StoredRecord(entry.body, entry.version))
            found = await _call(operation, records.read(name))
            return None if found is None else _subscription(operation, records, name, found)

        found = await gather(map(current, listed), at_once=_AT_ONCE)
        self._subscriptions = {name: each for name, each in zip(listed, found, strict=True) if each is not None}
        return sorted(self._subscriptions.values(), key=lambda stored: stored.record.name)

    async def read_subscription(self, name: str) -> StoredSubscription | None:
        """Read the record of a subscription; None where there is none."""
        operation, records, record = "read subscription", self._leases.records, subscription_name(name)
        found = await _call(operation, records.read(record))
        return None if found is None else _subscription(operation, records, record, found)

    async def write_subscription(
        self, record: SubscriptionRecord, replaces: StoredSubscription | None
    ) -> StoredSubscription | None:
        """Store a subscription's record by compare-and-swap. None, and nothing stored, where another is there.

        Cancelled or failed, it is stored or not; read it again.
        """
        operation = "write subscription"
        await self._scope.ensure_named(operation)
        former = None if replaces is None else replaces.version
        body = encode_subscription(record, _random_id())
        version = await _call(operation, self._leases.records.swap(subscription_name(record.name), body, former))
        return None if version is None else Stored(record, version)

    async def delete_subscription(self, stored: StoredSubscription) -> bool:
        """Delete a subscription's record as it was read or written. False, and nothing deleted, where another is there.

        Its checkpoints are deleted after it; of a call that failed or was cancelled in between some may stay, which
        no later subscription of that name finds.
        """
        operation, records = "delete subscription", self._leases.records
        if not await _call(operation, records.delete(subscription_name(stored.record.name), stored.version)):
            return False
        names = await _call(operation, records.list(f"{CHECKPOINTS}{_quoted(stored.record.key)}/"))
        await gather((_call(operation, records.delete(name)) for name in names), at_once=_AT_ONCE)
        return True

    # ---- checkpoints

    async def read_checkpoint(self, partition_id: str, subscription: str = DEFAULT_SUBSCRIPTION) -> Checkpoint | None:
        """Return a checkpoint; None if there is none."""
        if subscription == DEFAULT_SUBSCRIPTION:
            return await self._leases.read_checkpoint(partition_id)
        operation, name = "read checkpoint", checkpoint_name(subscription, partition_id)
        found = await _call(operation, self._leases.records.read(name), partition_id)
        return None if found is None else _checkpoint(operation, partition_id, found).checkpoint

    async def claim_checkpoint(self, lease: PartitionLease, subscription: str) -> CheckpointClaim | None:
        """Read a checkpoint under the lease, before the first event is delivered. None where the lease is lost.

        From then on no earlier owner of the partition can store one. Failed or cancelled, it may be called again.

        Args:
            subscription: The name of the subscription's checkpoints; that of "default" is fenced by the lease itself.
        """
        name = checkpoint_name(subscription, lease.partition_id)
        async with self._locks[name]:
            claimed = await self._claim("claim checkpoint", lease, name)
        return None if claimed is None else CheckpointClaim(claimed.record.checkpoint)

    async def write_checkpoint(
        self,
        lease: PartitionLease,
        checkpoint: Checkpoint,
        subscription: str = DEFAULT_SUBSCRIPTION,
        *,
        backwards: bool = False,
    ) -> bool:
        """Store a checkpoint, if the lease is still held; see `LeaseStore.write_checkpoint`.

        If it was not claimed before, the first call claims it. Of another subscription than "default" the loss of the
        lease may be noticed only once the next owner has claimed the checkpoint; what is stored until then is what
        that owner reads.

        Args:
            backwards: Whether it replaces one with a higher sequence number. Default: False.
        """
        assert checkpoint.partition_id == lease.partition_id
        write = self._write_checkpoint(lease, checkpoint, subscription, backwards=backwards)
        if self._telemetry is not None:
            write = self._telemetry.checkpointing(lease.partition_id, write)
        return await write

    def _write_checkpoint(
        self, lease: PartitionLease, checkpoint: Checkpoint, subscription: str, *, backwards: bool
    ) -> Coroutine[Any, Any, bool]:
        if subscription == DEFAULT_SUBSCRIPTION:
            return self._leases.write_checkpoint(lease, checkpoint, backwards=backwards)
        operation = "reset checkpoint" if backwards else "write checkpoint"
        return self._replace_checkpoint(operation, lease, checkpoint, subscription, backwards=backwards)

    async def clear_checkpoint(self, lease: PartitionLease, subscription: str) -> bool:
        """Remove a checkpoint; return False if the lease is lost. That of "default" is removed by the lease store."""
        assert subscription != DEFAULT_SUBSCRIPTION
        return await self._replace_checkpoint("clear checkpoint", lease, None, subscription, backwards=True)

    async def _replace_checkpoint(
        self,
        operation: str,
        lease: PartitionLease,
        checkpoint: Checkpoint | None,
        subscription: str,
        *,
        backwards: bool,
    ) -> bool:
        name = checkpoint_name(subscription, lease.partition_id)
        async with self._locks[name]:
            for _ in range(_WRITE_TRIES):
                claimed = self._claims.get(name)
                if claimed is None or claimed.token != lease.token:
                    claimed = await self._claim(operation, lease, name)
                    if claimed is None:
                        return False
                before = claimed.record
                if not backwards and _is_lower(checkpoint, before.checkpoint):
                    return await self._leases.renew(lease) is not None
                record = replace(before, checkpoint=checkpoint, generation=before.generation + backwards)
                # Kept only after a success: the outcome of a failed write is not known, and the next one claims again.
                self._claims.pop(name, None)
                swap = self._leases.records.swap(name, record.encode(), claimed.version)
                version = await _call(operation, swap, lease.partition_id)
                if version is not None:
                    self._claims[name] = _Claimed(record, version, lease.token)
                    return True
        problem = "the checkpoint changed at every attempt to write it"
        raise StoreError(operation, problem, partition_id=lease.partition_id)

    def forget_claims(self, partition_id: str) -> None:
        """Called when a lease is released or lost: a checkpoint is written only after another claim."""
        for name in [name for name in self._claims if name.endswith(f"/{partition_id}")]:
            del self._claims[name]

    async def _claim(self, operation: str, lease: PartitionLease, name: str) -> _Claimed | None:
        """Write a claim into a checkpoint's record; its lock is held. None where the lease is lost."""
        records, claim, partition_id = self._leases.records, _random_id(), lease.partition_id
        for _ in range(_WRITE_TRIES):
            stored = await _call(operation, records.read(name), partition_id)
            before = None if stored is None else _checkpoint(operation, partition_id, stored)
            if await self._leases.renew(lease) is None:
                return None
            record = CheckpointRecord(None, 1, lease.owner, claim=claim)
            if before is not None:
                record = replace(before, epoch=before.epoch + 1, owner=lease.owner, claim=claim)
            former = None if stored is None else stored.version
            version = await _call(operation, records.swap(name, record.encode(), former), partition_id)
            if version is not None:
                claimed = self._claims[name] = _Claimed(record, version, lease.token)
                return claimed
        raise StoreError(operation, "the checkpoint kept changing", partition_id=partition_id)


async def _call(operation: str, call: Awaitable[_T], partition_id: str | None = None) -> _T:
    """Await a call of the record store, whose failure is one of the operation."""
    try:
        return await call
    except StoreError as error:
        raise StoreError(operation, error.reason, partition_id=partition_id) from error


def _is_lower(checkpoint: Checkpoint | None, stored: Checkpoint | None) -> bool:
    return checkpoint is not None and stored is not None and checkpoint.sequence_number < stored.sequence_number


def _random_id() -> str:
    return secrets.token_hex(8)


def _quoted(name: str) -> str:
    return quote(name, safe="")


def subscription_name(name: str) -> str:
    """Return the name of a subscription's record."""
    return f"{SUBSCRIPTIONS}{_quoted(name)}.json"


@functools.lru_cache(4096)
def checkpoint_name(subscription: str, partition_id: str) -> str:
    """Return the name of a checkpoint's record."""
    return f"{CHECKPOINTS}{_quoted(subscription)}/{partition_id}"


def _parsed(operation: str, records: RecordStore, name: str, found: StoredRecord, parse: Callable[[bytes], _T]) -> _T:
    try:
        return parse(found.body)
    except ValueError as error:
        raise StoreError(operation, f"{name} in {records!r}: {error}") from None


def _subscription(operation: str, records: RecordStore, name: str, found: StoredRecord) -> StoredSubscription:
    return Stored(_parsed(operation, records, name, found, parse_subscription), found.version)


def _checkpoint(operation: str, partition_id: str, found: StoredRecord) -> CheckpointRecord:
    try:
        return CheckpointRecord.decode(found.body, partition_id)
    except ValueError as error:
        raise StoreError(operation, str(error), partition_id=partition_id) from None
