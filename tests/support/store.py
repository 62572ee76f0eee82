"""A lease store that fails when a test says so."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar
from urllib.parse import unquote

from eventpump.core.lease import LeaseSnapshot, PartitionLease
from eventpump.errors import StoreError
from eventpump.eventhubs.events import Checkpoint
from eventpump.interfaces import ConsumerScope, LeaseStore, ListedRecord, RecordStore, StoredRecord
from eventpump.storage.checkpoint_form import CheckpointRecord
from eventpump.storage.groups import CHECKPOINTS

_T = TypeVar("_T")


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
        self.level_above_epoch = 0
        """What is added to a lease's epoch for its owner level."""
        self.has_levels = True
        """Whether a lease has an owner level of its own; else all have 0."""
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

    async def before(self, operation: str, partition_id: str | None) -> BaseException | None:
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

    async def open(self, scope: ConsumerScope, *, read_only: bool = False) -> None:
        """See `LeaseStore`."""
        after = await self.before("open", None)
        await self._store.open(scope, read_only=read_only)
        _raise(after)

    @property
    def records(self) -> RecordStore:
        """The records of the real store, whose calls fail as well."""
        return FlakyRecords(self, self._store.records)

    async def ensure(self, partition_ids: Sequence[str]) -> None:
        """See `LeaseStore`."""
        after = await self.before("ensure", None)
        await self._store.ensure(partition_ids)
        _raise(after)

    async def list(self) -> list[LeaseSnapshot]:
        """See `LeaseStore`."""
        after = await self.before("list", None)
        found = await self._store.list()
        _raise(after)
        return found

    async def acquire(self, snapshot: LeaseSnapshot, owner: str, *, held: bool = False) -> PartitionLease | None:
        """See `LeaseStore`."""
        after = await self.before("steal" if held else "acquire", snapshot.partition_id)
        lease = await self._store.acquire(snapshot, owner, held=held)
        _raise(after)
        return lease and replace(lease, owner_level=self.has_levels and lease.epoch + self.level_above_epoch)

    async def renew(self, lease: PartitionLease) -> PartitionLease | None:
        """See `LeaseStore`."""
        after = await self.before("renew", lease.partition_id)
        renewed = await self._store.renew(lease)
        _raise(after)
        return renewed

    async def release(self, lease: PartitionLease) -> bool:
        """See `LeaseStore`."""
        after = await self.before("release", lease.partition_id)
        is_released = await self._store.release(lease)
        _raise(after)
        return is_released

    async def read_checkpoint(self, partition_id: str) -> Checkpoint | None:
        """See `LeaseStore`."""
        after = await self.before("read", partition_id)
        checkpoint = await self._store.read_checkpoint(partition_id)
        _raise(after)
        return checkpoint

    async def write_checkpoint(self, lease: PartitionLease, checkpoint: Checkpoint, *, backwards: bool = False) -> bool:
        """See `LeaseStore`."""

        async def write() -> bool:
            is_stored = await self._store.write_checkpoint(lease, checkpoint, backwards=backwards)
            if is_stored and not backwards:
                self.written.append(checkpoint)
            return is_stored

        return await self.counted("reset" if backwards else "write", lease.partition_id, write)

    async def counted(self, operation: str, partition_id: str | None, work: Callable[[], Awaitable[_T]]) -> _T:
        """Do a call, with its faults."""
        key = (operation, partition_id)
        self.in_flight[key] = self.in_flight.get(key, 0) + 1
        self.peak_in_flight[key] = max(self.peak_in_flight.get(key, 0), self.in_flight[key])
        try:
            after = await self.before(operation, partition_id)
            done = await work()
            _raise(after)
        finally:
            self.in_flight[key] -= 1
        return done

    async def aclose(self) -> None:
        """See `LeaseStore`."""
        after = await self.before("close", None)
        await self._store.aclose()
        _raise(after)


class FlakyRecords:
    """The records of a `FlakyLeaseStore`: each call is one of the operations there."""

    def __init__(self, leases: FlakyLeaseStore, records: RecordStore) -> None:
        self._leases = leases
        self._records = records

    async def open(self) -> None:
        """See `RecordStore`."""

    async def read(self, name: str) -> StoredRecord | None:
        """See `RecordStore`."""
        operation = {"scope.json": "scope"}.get(name, "read" if name.startswith(CHECKPOINTS) else "subscriptions")
        return await self._leases.counted(operation, partition_of(name), lambda: self._records.read(name))

    async def swap(self, name: str, body: bytes, replaces: str | None) -> str | None:
        """See `RecordStore`."""
        change = await checkpoint_change(self._records, name, body)
        operation = change.operation if change else "record" if name == "scope.json" else "subscribe"

        async def swap() -> str | None:
            version = await self._records.swap(name, body, replaces)
            if version is not None and operation == "write" and change and change.checkpoint:
                self._leases.written.append(change.checkpoint)
            return version

        return await self._leases.counted(operation, partition_of(name), swap)

    async def list(self, prefix: str) -> dict[str, ListedRecord]:
        """See `RecordStore`."""
        return await self._leases.counted("subscriptions", None, lambda: self._records.list(prefix))

    async def delete(self, name: str, version: str | None = None) -> bool:
        """See `RecordStore`."""
        return await self._leases.counted("unsubscribe", None, lambda: self._records.delete(name, version))

    async def aclose(self) -> None:
        """See `RecordStore`."""


@dataclass(frozen=True, slots=True)
class CheckpointChange:
    """What a swap does to the checkpoint of a subscription: "read" for a claim, "write" or "reset"."""

    operation: str
    subscription: str
    partition_id: str
    checkpoint: Checkpoint | None


async def checkpoint_change(records: RecordStore, name: str, body: bytes) -> CheckpointChange | None:
    """Return what a swap does to a checkpoint; None where the record is another."""
    partition_id = partition_of(name)
    if partition_id is None:
        return None
    stored = await records.read(name)
    before = None if stored is None else CheckpointRecord.decode(stored.body, partition_id)
    after = CheckpointRecord.decode(body, partition_id)
    if before is None or before.claim != after.claim:
        operation = "read"
    else:
        operation = "reset" if after.generation > before.generation else "write"
    return CheckpointChange(operation, unquote(name.split("/")[1]), partition_id, after.checkpoint)


def partition_of(name: str) -> str | None:
    """Return the partition of a checkpoint's record; None of another record."""
    return name.rsplit("/", 1)[1] if name.startswith(CHECKPOINTS) else None


def _raise(error: BaseException | None) -> None:
    if error is not None:
        raise error
