"""Real blob leases in the legacy EventProcessorHost format.

Two conditions fence every body write: the blob's lease, so that only its holder writes, and the ETag, so that a write
of the holder's own that was given up on, and arrives late after all, cannot undo a newer one.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from azure.storage.blob.aio import BlobClient, BlobLeaseClient, BlobPrefix, ContainerClient

from eventpump.clock import LoopClock
from eventpump.core.lease import LeaseSnapshot, PartitionLease
from eventpump.errors import ClosedError, ConfigurationError, StoreError
from eventpump.eventhubs.partitions import partition_order
from eventpump.storage.blob_access import Answer, BlobContainer, RefusedError
from eventpump.storage.groups import CHECKPOINTS, SCOPE_RECORD, OtherHubError, ScopeRecords
from eventpump.storage.leases.layout import (
    NO_NUMBER,
    LeaseBody,
    check_owner,
    lease_blob,
    lease_directory,
    lease_metadata,
    owner_of,
    partition_of,
    record_prefix,
)
from eventpump.storage.records.blob import BlobRecordStore
from eventpump.storage.scope_form import HubNames

if TYPE_CHECKING:
    from eventpump.eventhubs.events import Checkpoint
    from eventpump.interfaces import Clock, ConsumerScope, RecordStore

T = TypeVar("T")

_MAX_BODY: Final = 1 << 20
_WRITE_TRIES: Final = 4
_CREATE_AT_ONCE: Final = 32
_LEASED: Final = "leased"


@dataclass(frozen=True, slots=True)
class _StoredLease:
    body: LeaseBody
    etag: str
    is_leased: bool = True


@dataclass(frozen=True, slots=True)
class _Group:
    """The consumer group that a store is open for, with its records and that one of them which names the hub."""

    scope: ConsumerScope
    records: BlobRecordStore
    scope_record: ScopeRecords


class BlobLeaseStore:
    """A `LeaseStore` over blob leases, shared with every EventProcessorHost of the legacy format.

    A lease is stolen with the token in its body, so every client that may read the container may steal.

    The names of the blobs have the consumer group, and not the hub. So the group's scope record names the hub that the
    group is of, and a store that is opened for another one is refused: each hub needs a container or a prefix of its
    own. A group without such a record, or with one of an earlier version, becomes that of the first host's hub.

    Args:
        container: The container's name, with `connection_string` or with `account_url` and `credential`; or a ready
            `ContainerClient`, which stays the caller's to close.
        connection_string: Of the storage account, with the name of a container; None with `account_url` and
            `credential`, or a client.
        account_url: The storage account's URL, with `credential`; None with a connection string, or a client.
        credential: Any that azure.storage.blob takes; None for none, as where `account_url` has a SAS token.
        prefix: Goes before the consumer group in blob names, with nothing between, such as "telemetry/". Default: "".
        lease_duration: How long a lease lives without renewal, in whole seconds, 15 to 60. Default: 30.
        call_timeout: How long one request may take, in seconds; keep it below the lease duration minus the renew
            interval. None for the smaller of 10 s and a third of the lease duration.
        clock: None for the running loop's time.
        create: Whether `open` creates a container that is missing; it needs the right to. A missing one is an
            error otherwise. Default: False.

    Raises:
        ConfigurationError: The values cannot work.
    """

    def __init__(
        self,
        container: ContainerClient | str,
        *,
        connection_string: str | None = None,
        account_url: str | None = None,
        credential: Any = None,
        prefix: str = "",
        lease_duration: int = 30,
        call_timeout: float | None = None,
        clock: Clock | None = None,
        create: bool = False,
    ) -> None:
        if not 15 <= lease_duration <= 60 or lease_duration != int(lease_duration):
            raise ConfigurationError("lease_duration", "blob leases last 15 to 60 whole seconds")
        self._lease_duration = int(lease_duration)
        timeout = min(10.0, lease_duration / 3) if call_timeout is None else call_timeout
        if not 0 < timeout < lease_duration:
            raise ConfigurationError("call_timeout", "must be above 0 and below the lease duration")
        self._prefix = prefix.strip()
        self._create = create
        self._clock = LoopClock() if clock is None else clock
        self._blobs = BlobContainer(
            container, connection_string, account_url, credential, timeout, owner=type(self).__name__
        )
        self._container, self._options = self._blobs.client, self._blobs.options
        self._open_group: _Group | None = None
        self._is_closed = False
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._held: dict[str, _StoredLease] = {}
        self._cleanups: set[asyncio.Task[None]] = set()

    @property
    def lease_duration(self) -> float:
        """How long a lease lives without renewal, in seconds."""
        return float(self._lease_duration)

    def location(self, consumer_group: str) -> str:
        """Return where the leases of a consumer group are: the URL of their directory, without a signature.

        Stores for which this is the same text share leases and checkpoints.
        """
        # Event Hubs does not distinguish upper and lower case in a group's name, and blob names do.
        directory = lease_directory(self._prefix, consumer_group.lower())
        return f"{self._container.url.partition('?')[0].rstrip('/')}/{directory}"

    @property
    def records(self) -> RecordStore:
        """The records of the consumer group, in blobs beside its leases."""
        return self._group("records").records

    async def open(self, scope: ConsumerScope, *, read_only: bool = False) -> None:
        """Bind to a consumer group. Once.

        Args:
            read_only: Whether to create no container, also with `create`. Default: False.

        Raises:
            ConfigurationError: There is no such container, and `create` is not given; the leases of the group are those
                of another hub; or the container has leases of the group in another case, such as "$default".
            StoreError: The container can neither be created nor read.
        """
        if self._is_closed:
            raise ClosedError("lease store")
        if self._open_group is not None:
            raise ConfigurationError("lease_store", "the store is open already: create one store per host")
        records = BlobRecordStore(
            self._blobs,
            record_prefix(self._prefix, scope.consumer_group),
            create=self._create and not read_only,
            in_metadata=CHECKPOINTS,
            kind="lease store",
        )
        names = ScopeRecords(lambda: records, scope)
        try:
            await records.open()
            await self._check_spelling(scope.consumer_group)
            with self._advising(scope):
                await names.read("open")
        except ConfigurationError:
            # The caller does not close a store that is refused.
            await self.aclose()
            raise
        self._open_group = _Group(scope, records, names)

    async def ensure(self, partition_ids: Sequence[str]) -> None:
        """Create the leases that do not exist yet, without an owner. Several hosts may do so at once.

        Raises:
            ConfigurationError: The group's leases are those of another hub since the store was opened.
        """
        group = self._group("ensure leases")
        with self._advising(group.scope):
            await group.scope_record.ensure_named("ensure leases")
        known = {snapshot.partition_id for snapshot in await self.list()}
        room = asyncio.Semaphore(_CREATE_AT_ONCE)

        async def create(partition_id: str) -> None:
            body = LeaseBody(partition_id, sequence_number=NO_NUMBER).encode()
            async with room:
                try:
                    request = self._blob(partition_id).upload_blob(body, **self._options)
                    await self._call("ensure leases", partition_id, request)
                except RefusedError as refused:
                    if refused.answer not in (Answer.TAKEN, Answer.CHANGED):
                        raise

        # All are tried, also after one failed.
        missing = [create(partition_id) for partition_id in partition_ids if partition_id not in known]
        for outcome in await asyncio.gather(*missing, return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome

    async def list(self) -> list[LeaseSnapshot]:
        """List every lease as it is now, in the order of partition ids; one request for up to 5000 of them.

        A lease held with no owner is between being taken and being written.
        """
        directory = lease_directory(self._prefix, self._group("list").scope.consumer_group)

        async def listed() -> list[LeaseSnapshot]:
            found = []
            async for blob in self._container.list_blobs(directory, include=["metadata"], **self._options):
                partition_id = partition_of(blob.name, directory)
                if partition_id is not None:
                    found.append(LeaseSnapshot(partition_id, owner_of(blob.metadata), blob.lease.state == _LEASED))
            return sorted(found, key=lambda snapshot: partition_order(snapshot.partition_id))

        return await self._call("list", None, listed())

    async def acquire(self, snapshot: LeaseSnapshot, owner: str, *, held: bool = False) -> PartitionLease | None:
        """See `LeaseStore`.

        Return None, too, if it is held without a token in its body: its new owner has not written that yet.
        Cancelled, the lease is released, or expires.
        """
        check_owner(owner)
        operation, partition_id = "steal" if held else "acquire", snapshot.partition_id
        token = str(uuid.uuid4())
        async with self._locks[partition_id], self._given_back_on_failure(partition_id, token):
            stored = await self._read(operation, partition_id) if held else None
            if stored is not None and (not stored.body.owner or stored.body.owner != snapshot.owner):
                return None
            if stored is None or not stored.is_leased:
                expires_at = await self._acquire(operation, partition_id, token)
            elif not stored.body.token:
                return None
            else:
                victim = BlobLeaseClient(self._blob(partition_id), lease_id=stored.body.token)
                try:
                    await self._call(operation, partition_id, victim.change(token, **self._options))
                except RefusedError:
                    return None
                # A change leaves the lease its old end.
                expires_at = await self._renew(operation, partition_id, token)
            if expires_at is None:
                return None
            return await self._name_owner(operation, partition_id, owner, token, expires_at, stored)

    async def renew(self, lease: PartitionLease) -> PartitionLease | None:
        """Renew a lease. Return it with a later `expires_at`, or None if it is lost. Writes no body."""
        expires_at = await self._renew("renew", lease.partition_id, lease.token)
        return None if expires_at is None else replace(lease, expires_at=expires_at)

    async def release(self, lease: PartitionLease) -> bool:
        """Release a lease, so that another host may acquire it at once. Return False if it was lost before.

        Failed or cancelled, it may be called again.
        """
        async with self._locks[lease.partition_id]:
            written = await self._write("release", lease, lambda body: replace(body, owner="", token=""))
            if written is False:
                return False
            self._held.pop(lease.partition_id, None)
            client = BlobLeaseClient(self._blob(lease.partition_id), lease_id=lease.token)
            try:
                await self._call("release", lease.partition_id, client.release(**self._options))
            except RefusedError:
                return bool(written)
            return True

    async def read_checkpoint(self, partition_id: str) -> Checkpoint | None:
        """Return a checkpoint, or None if there is none."""
        try:
            return (await self._read("read checkpoint", partition_id)).body.checkpoint
        except RefusedError as refused:
            if refused.answer is not Answer.MISSING:
                raise
            return None

    async def write_checkpoint(self, lease: PartitionLease, checkpoint: Checkpoint, *, backwards: bool = False) -> bool:
        """See `LeaseStore`. Cancelled, it is stored or not; it will not be stored later, over a newer one."""
        assert checkpoint.partition_id == lease.partition_id
        operation = "reset checkpoint" if backwards else "write checkpoint"

        def change(body: LeaseBody) -> LeaseBody | None:
            stored = body.checkpoint
            if not backwards and stored is not None and checkpoint.sequence_number < stored.sequence_number:
                return None
            return replace(body, offset=checkpoint.offset, sequence_number=checkpoint.sequence_number)

        async with self._locks[lease.partition_id]:
            return bool(await self._write(operation, lease, change))

    async def clear_checkpoint(self, lease: PartitionLease) -> bool:
        """Remove the checkpoint under the lease. Return False, and remove nothing, if the lease is lost.

        A host that owns the partition next begins where the group begins. No host calls it.
        """

        def change(body: LeaseBody) -> LeaseBody:
            return replace(body, offset=None, sequence_number=NO_NUMBER)

        async with self._locks[lease.partition_id]:
            return bool(await self._write("clear checkpoint", lease, change))

    async def aclose(self) -> None:
        """Finish releasing what cancelled calls acquired, and close a client of its own. Leases stay as they are."""
        self._is_closed = True
        try:
            if self._cleanups:
                await asyncio.wait(self._cleanups)
        finally:
            await self._blobs.aclose()

    # ---- leases

    async def _acquire(self, operation: str, partition_id: str, token: str) -> float | None:
        """Acquire the blob's lease under a new token. Return when it expires, or None if it is held."""
        client = BlobLeaseClient(self._blob(partition_id), lease_id=token)
        sent = self._clock.monotonic()
        try:
            await self._call(operation, partition_id, client.acquire(self._lease_duration, **self._options))
        except RefusedError as refused:
            if refused.answer is Answer.MISSING:
                raise
            return None
        return sent + self._lease_duration

    async def _renew(self, operation: str, partition_id: str, token: str) -> float | None:
        """Renew the blob's lease. Return when it expires, or None if it is lost."""
        client = BlobLeaseClient(self._blob(partition_id), lease_id=token)
        sent = self._clock.monotonic()
        try:
            await self._call(operation, partition_id, client.renew(**self._options))
        except RefusedError:
            return None
        # Azurite renews an expired lease under any id; the id in its answer is still the true one.
        if str(client.id).lower() != token:
            return None
        return sent + self._lease_duration

    async def _name_owner(
        self,
        operation: str,
        partition_id: str,
        owner: str,
        token: str,
        expires_at: float,
        stored: _StoredLease | None,
    ) -> PartitionLease | None:
        """Write owner, token and next epoch under a lease just acquired. Return None if it is lost again.

        Args:
            stored: What was read before the lease was acquired; a checkpoint written since then makes the ETag fail.
        """
        for _ in range(_WRITE_TRIES):
            if stored is None:
                stored = await self._read(operation, partition_id)
            body = replace(stored.body, owner=owner, token=token, epoch=stored.body.epoch + 1)
            try:
                etag = await self._put(operation, body, token, stored.etag)
            except RefusedError as refused:
                if refused.answer is not Answer.CHANGED:
                    return None
                stored = None
            else:
                self._held[partition_id] = _StoredLease(body, etag)
                return PartitionLease(partition_id, owner, body.epoch, body.epoch, token, expires_at)
        raise StoreError(
            operation,
            "the lease changed at every attempt to write its new owner",
            partition_id=partition_id,
        )

    @contextlib.asynccontextmanager
    async def _given_back_on_failure(self, partition_id: str, token: str) -> AsyncIterator[None]:
        """Release the blob's lease if the block fails or is cancelled: other hosts need not wait for its expiry."""
        client = BlobLeaseClient(self._blob(partition_id), lease_id=token)
        try:
            yield
        except BaseException:
            if not self._is_closed:
                cleanup = asyncio.get_running_loop().create_task(self._give_back(partition_id, client))
                self._cleanups.add(cleanup)
                cleanup.add_done_callback(self._cleanups.discard)
            raise

    async def _give_back(self, partition_id: str, client: BlobLeaseClient) -> None:
        # It was not acquired after all, or the store does not answer: then it expires.
        with contextlib.suppress(StoreError):
            await self._call("give back", partition_id, client.release(**self._options))

    # ---- bodies

    async def _write(
        self, operation: str, lease: PartitionLease, change: Callable[[LeaseBody], LeaseBody | None]
    ) -> bool | None:
        """Write a changed body under the lease, with the partition's lock held.

        Args:
            change: Returns the new body, or None if nothing has to be written.
        """
        partition_id = lease.partition_id
        may_renew = True
        for _ in range(_WRITE_TRIES):
            stored = self._held.pop(partition_id, None)
            if stored is None or stored.body.token != lease.token:
                stored = await self._read(operation, partition_id)
            if stored.body.token != lease.token:
                return False if stored.body.token else None
            body = change(stored.body)
            try:
                if body is None:
                    body, etag = stored.body, stored.etag
                    await self._check_lease(operation, lease)
                else:
                    etag = await self._put(operation, body, lease.token, stored.etag)
            except RefusedError as refused:
                if refused.answer is Answer.CHANGED:
                    continue
                # Perhaps it has only expired: a lease that no other host acquired since can still be renewed.
                if not may_renew or await self._renew(operation, partition_id, lease.token) is None:
                    return False
                may_renew = False
            else:
                # Kept only now: after a failed write it is not known what is stored, and the next write reads it.
                self._held[partition_id] = _StoredLease(body, etag)
                return True
        raise StoreError(
            operation,
            "the lease changed at every attempt to write it",
            partition_id=partition_id,
        )

    async def _check_lease(self, operation: str, lease: PartitionLease) -> None:
        """Check that this store still holds the blob's lease. Raises `RefusedError` if it does not."""
        blob = self._blob(lease.partition_id)
        await self._call(operation, lease.partition_id, blob.get_blob_properties(lease=lease.token, **self._options))

    async def _put(self, operation: str, body: LeaseBody, token: str, etag: str) -> str:
        blob = self._blob(body.partition_id)
        lease = BlobLeaseClient(blob, lease_id=token)
        content, metadata = body.encode(), lease_metadata(body.owner)
        return await self._blobs.swap(operation, body.partition_id, blob, content, etag, metadata=metadata, lease=lease)

    async def _read(self, operation: str, partition_id: str) -> _StoredLease:
        """Read a lease. Raises `RefusedError` if there is none."""
        parse, blob = partial(LeaseBody.parse, partition_id=partition_id), self._blob(partition_id)
        found = await self._blobs.download(operation, partition_id, blob, parse, limit=_MAX_BODY)
        if found is None:
            raise RefusedError(operation, Answer.MISSING, partition_id=partition_id)
        body, properties = found
        return _StoredLease(body, str(properties.etag), properties.lease.state == _LEASED)

    # ---- the hub of the consumer group

    async def _check_spelling(self, consumer_group: str) -> None:
        """Check that the container has no leases of the group in another case: else a `ConfigurationError`."""
        directory = lease_directory(self._prefix, consumer_group)

        async def other_directory() -> str | None:
            async for found in self._container.walk_blobs(self._prefix, **self._options):
                if not isinstance(found, BlobPrefix) or found.name == directory:
                    continue
                if found.name.lower() == directory.lower():
                    # A v5 store may keep `{group}/checkpoint/{partition}` there, in lower case.
                    async for each in self._container.walk_blobs(found.name, **self._options):
                        if partition_of(each.name, found.name) is not None:
                            return str(found.name)
            return None

        found = await self._call("open", None, other_directory())
        if found is not None:
            problem = (
                f"container {self._blobs.name} has the leases of the group {found[len(self._prefix) : -1]}, and this "
                f"host's is spelled {consumer_group}: to Event Hubs they are one group; spell it in one way, or delete "
                f"the blobs below {found} if no host uses them"
            )
            raise ConfigurationError("consumer_group", problem)

    @contextlib.contextmanager
    def _advising(self, scope: ConsumerScope) -> Iterator[None]:
        """Have the error that the group is another hub's say what to do about it."""
        try:
            yield
        except OtherHubError as error:
            group, hub = scope.consumer_group, scope.hub
            prefix, blob = f"{self._prefix}{hub}/", record_prefix(self._prefix, group) + SCOPE_RECORD
            problem = (
                f"the leases of consumer group {group} in container {self._blobs.name} are those of "
                f"{error.names}, and this host reads {HubNames.of(scope)}: give each hub a container of its own, or a "
                f'prefix, as BlobLeaseStore(..., prefix="{prefix}"), whose checkpoints KEDA reads with '
                f'consumerGroup: "{prefix}{group}"; if both are names of one hub, delete the blob {blob}'
            )
            raise ConfigurationError("lease_store", problem) from None

    # ---- requests

    async def _call(self, operation: str, partition_id: str | None, request: Awaitable[T]) -> T:
        return await self._blobs.call(operation, partition_id, request)

    def _group(self, operation: str) -> _Group:
        if self._is_closed:
            raise ClosedError("lease store")
        if self._open_group is None:
            raise StoreError(operation, "the store is not open: call open() first")
        return self._open_group

    def _blob(self, partition_id: str) -> BlobClient:
        return self._blobs.blob(lease_blob(self._prefix, self._group("use").scope.consumer_group, partition_id))

    def __repr__(self) -> str:
        # Never the URL, which may hold a signature.
        return f"BlobLeaseStore({self._blobs.name!r}, prefix={self._prefix!r})"
