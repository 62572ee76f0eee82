"""Ownership and checkpoints as azure-eventhub 5 and the current SDKs of all languages keep them in blobs.

An ownership is changed only under the ETag that was read: of two members one succeeds. A checkpoint has no such fence
in this form, as the other SDKs write it without a condition. So a write is made under the checkpoint's own ETag, and
only after the owner was read: whatever another member has written since is read and compared.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from azure.storage.blob import BlobProperties
from azure.storage.blob.aio import ContainerClient

from eventpump.aio.tasks import gather
from eventpump.clock import LoopClock
from eventpump.core.lease import LeaseSnapshot, PartitionLease
from eventpump.errors import ClosedError, ConfigurationError, StoreError
from eventpump.eventhubs.events import START_OFFSET
from eventpump.eventhubs.partitions import partition_order
from eventpump.storage import ownership_form as v5
from eventpump.storage.blob_access import AccountClock, Answer, Blob, BlobContainer, ForbiddenError, RefusedError
from eventpump.storage.groups import CHECKPOINTS
from eventpump.storage.leases.layout import check_owner
from eventpump.storage.leases.terms import find_conflicts
from eventpump.storage.records.blob import BlobRecordStore

if TYPE_CHECKING:
    from eventpump.eventhubs.events import Checkpoint
    from eventpump.interfaces import Clock, ConsumerScope, RecordStore

_WRITE_TRIES: Final = 4
_CREATE_AT_ONCE: Final = 32
_OWNER_LEVEL: Final = 0
"""That of every processor of the other SDKs: a higher one would refuse them."""

Notify = Callable[[str | None, str], None]


@dataclass(frozen=True, slots=True)
class _Claim:
    """A claim of this store, as it is stored; its ETag is None where the answer to the last write is not known."""

    ownership: v5.StoredOwnership
    etag: str | None


@dataclass(frozen=True, slots=True)
class _KnownCheckpoint:
    """A checkpoint as it was read or written under the lease of a token; None where there is none."""

    checkpoint: Checkpoint | None
    etag: str | None
    token: str


@dataclass(frozen=True, slots=True)
class _GroupBlobs:
    """The consumer group that a store is open for: where its blobs are, and its records."""

    directory: str
    records: BlobRecordStore


class BlobOwnershipStore:
    """A `LeaseStore` in the form of the other SDKs' processors, which share partitions and checkpoints with its hosts.

    Its hosts and processors of azure-eventhub 5, .NET, Java, JavaScript and Go may be members of one consumer group.
    See docs/guarantees.md for what is weaker than with leases: no member can be shut out, as all read at owner level 0.

    The machine's clock does not matter: expiry goes by the clock of the storage account.

    Args:
        container: The container's name, with `connection_string` or with `account_url` and `credential`; or a ready
            `ContainerClient`, which stays the caller's to close.
        connection_string: Of the storage account, with the name of a container; None with `account_url` and
            `credential`, or a client.
        account_url: The storage account's URL, with `credential`; None with a connection string, or a client.
        credential: Any that azure.storage.blob takes; None for none, as where `account_url` has a SAS token.
        preserve_case: Whether namespace, hub and consumer group are in the names of blobs as they are written, as Java
            and Go have them, and with Go Dapr and the OpenTelemetry collector. Python, .NET and JavaScript have them in
            lower case. Default: False.
        namespace: The namespace in the names of blobs, where it is not the host name of the hub: clients of
            azure-eventhub that were given a port have it there. None for the host name. Default: None.
        lease_duration: How long an ownership of this host is valid without a renewal, in seconds. JavaScript and Go
            take a partition after 60. Default: 60.0.
        owner_timeout: Seconds after which an ownership of another SDK's member expires if it was not renewed.
            That of a host of ours expires after its own duration. Default: 120.0.
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
        preserve_case: bool = False,
        namespace: str | None = None,
        lease_duration: float = 60.0,
        owner_timeout: float = 120.0,
        call_timeout: float | None = None,
        clock: Clock | None = None,
        create: bool = False,
    ) -> None:
        if lease_duration <= 0:
            raise ConfigurationError("lease_duration", "must be above 0")
        if owner_timeout <= 0:
            raise ConfigurationError("owner_timeout", "must be above 0")
        timeout = min(10.0, lease_duration / 3) if call_timeout is None else call_timeout
        if not 0 < timeout < lease_duration:
            raise ConfigurationError("call_timeout", "must be above 0 and below the lease duration")
        self._lease_duration = float(lease_duration)
        self._owner_timeout = float(owner_timeout)
        self._preserve_case = preserve_case
        self._namespace = namespace
        self._create = create
        self._clock = LoopClock() if clock is None else clock
        self._account_clock = AccountClock(self._clock)
        self._blobs = BlobContainer(
            container,
            connection_string,
            account_url,
            credential,
            timeout,
            owner=type(self).__name__,
            on_date=self._account_clock.set,
        )
        self._open_group: _GroupBlobs | None = None
        self._is_closed = False
        self._ensured: set[str] = set()
        # The partitions of checkpoints that were there first, until it is known which partitions the hub has.
        self._found: set[str] = set()
        self._claims: dict[str, _Claim] = {}
        self._checkpoints: dict[str, _KnownCheckpoint] = {}
        # The tokens of the leases under which a checkpoint was reset.
        self._resets: dict[str, str] = {}
        self._claim_locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._checkpoint_locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._cleanups: set[asyncio.Task[None]] = set()
        self._notices = _Notices()

    @property
    def lease_duration(self) -> float:
        """How long an ownership of this host is valid without a renewal, in seconds."""
        return self._lease_duration

    @property
    def records(self) -> RecordStore:
        """The records of the consumer group, in blobs that no other SDK lists."""
        return self._group("records").records

    def attend(self, renew_interval: float, notify: Notify) -> None:
        """Pass to a host what it reports of the group; see `SharedLeaseStore`."""
        self._notices.pass_to(notify)
        for problem in find_conflicts(self._lease_duration, self._owner_timeout, renew_interval):
            self._notices.add(None, problem)

    async def open(self, scope: ConsumerScope, *, read_only: bool = False) -> None:
        """Bind to a consumer group. Once.

        Args:
            scope: The consumer group.
            read_only: Whether to create no container, also with `create`. Default: False.

        Raises:
            ConfigurationError: There is no such container, and `create` is not given; or it has nothing of the group in
                this spelling, and the ownership and checkpoints of other members in the other one.
            StoreError: The container can neither be created nor read.
        """
        if self._is_closed:
            raise ClosedError("lease store")
        if self._open_group is not None:
            raise ConfigurationError("lease_store", "the store is open already: create one store per host")
        if self._namespace is not None:
            scope = replace(scope, fully_qualified_namespace=self._namespace)
        directory = v5.group_directory(scope, preserve_case=self._preserve_case)
        records = BlobRecordStore(
            self._blobs,
            v5.record_prefix(directory),
            create=self._create and not read_only,
            in_metadata=CHECKPOINTS,
            kind="lease store",
        )
        try:
            await records.open()
            await self._look_around(directory, v5.group_directory(scope, preserve_case=not self._preserve_case))
        except ConfigurationError:
            # The caller does not close a store that is refused.
            await self.aclose()
            raise
        self._open_group = _GroupBlobs(directory, records)

    async def ensure(self, partition_ids: Sequence[str]) -> None:
        """Create the ownerships that do not exist yet, as released ones. Several hosts may do so at once."""
        operation = "ensure leases"
        listed = await self._listed(operation)
        self._ensured.update(partition_ids)
        self._found.clear()

        failures: list[StoreError] = []

        async def create(partition_id: str) -> None:
            try:
                await self._swap(operation, partition_id, v5.StoredOwnership(None), None)
            except RefusedError:
                pass  # another member has
            except StoreError as error:
                failures.append(error)  # the others are tried

        await gather(map(create, (each for each in partition_ids if each not in listed)), at_once=_CREATE_AT_ONCE)
        if failures:
            raise failures[0]

    async def list(self) -> list[LeaseSnapshot]:
        """List every ownership as it is now, in the order of partition ids; one request for up to 5,000 of them."""
        listed = await self._listed("list")
        found = {partition_id: self._snapshot(partition_id, blob) for partition_id, blob in listed.items()}
        # One of which there is a checkpoint alone, or whose blob another program has deleted.
        for partition_id in (self._ensured | self._found) - found.keys():
            found[partition_id] = LeaseSnapshot(partition_id, None, False)
        if (error := self._account_clock.describe_error()) is not None:
            problem = (
                f"{error}. Hosts of eventpump go by the account's, but processors of other SDKs on a machine like this "
                "take partitions too early or too late: set the clock"
            )
            self._notices.add(None, problem, key="clock")
        return sorted(found.values(), key=lambda snapshot: partition_order(snapshot.partition_id))

    async def acquire(self, snapshot: LeaseSnapshot, owner: str, *, held: bool = False) -> PartitionLease | None:
        """See `LeaseStore`. Cancelled, the ownership is released, or expires."""
        check_owner(owner)
        operation, partition_id = "steal" if held else "acquire", snapshot.partition_id
        self._group(operation)
        token = str(uuid.uuid4())
        async with self._claim_locks[partition_id], self._given_back_on_failure(partition_id, token):
            found = await self._read_ownership(operation, partition_id)
            if found is None and partition_id not in self._ensured:
                raise RefusedError(operation, Answer.MISSING, partition_id=partition_id)
            former = v5.StoredOwnership(None) if found is None else v5.parse_ownership(found.metadata)
            if held:
                if former.owner is None or former.owner != snapshot.owner:
                    return None
            elif found is not None and self._is_held(former, found):
                return None
            known = self._claims.pop(partition_id, None)
            epoch = max(former.epoch, 0 if known is None else known.ownership.epoch) + 1
            ownership = v5.StoredOwnership(owner, epoch, token, self._lease_duration)
            sent = self._clock.monotonic()
            try:
                etag = await self._swap(operation, partition_id, ownership, None if found is None else str(found.etag))
            except RefusedError:
                return None
            self._claims[partition_id] = _Claim(ownership, etag)
        return PartitionLease(partition_id, owner, epoch, _OWNER_LEVEL, token, sent + self._lease_duration)

    async def renew(self, lease: PartitionLease) -> PartitionLease | None:
        """Renew an ownership. Return it with a later `expires_at`, or None if it is lost. One request.

        It succeeds only if ETag and owner are still its own, and is so the answer to whether the partition is.
        """
        self._group("renew")
        async with self._claim_locks[lease.partition_id]:
            sent = self._clock.monotonic()
            is_renewed = await self._replace("renew", lease, lambda ownership: ownership)
        return replace(lease, expires_at=sent + self._lease_duration) if is_renewed else None

    async def release(self, lease: PartitionLease) -> bool:
        """Release an ownership, so that another member may claim it at once. Return False if it was lost before.

        Failed or cancelled, it may be called again.
        """
        self._group("release")
        async with self._claim_locks[lease.partition_id]:
            return await self._replace("release", lease, lambda ownership: v5.StoredOwnership(None, ownership.epoch))

    async def read_checkpoint(self, partition_id: str) -> Checkpoint | None:
        """Return a checkpoint, or None if there is none.

        One that has a number and no offset has the offset "", and one without a number has `NO_NUMBER`. While this host
        owns the partition and has moved the checkpoint back, a later one of another member counts as not written.

        Raises:
            StoreError: It failed, or what is stored is no position.
        """
        self._group("read checkpoint")
        operation, blob = "read checkpoint", self._checkpoint_blob(partition_id)
        found = await self._blobs.properties(operation, partition_id, blob)
        if found is None:
            return None
        parsed = v5.parse_checkpoint(found.metadata)
        if parsed.problem is not None:
            raise StoreError(operation, _unusable(str(blob.blob_name), parsed.problem), partition_id=partition_id)
        checkpoint, own = parsed.checkpoint(partition_id), self._written_since_reset(partition_id)
        if checkpoint is None or own is None or not _is_before(own, checkpoint):
            return checkpoint
        self._note_late(own, checkpoint)
        return own

    async def write_checkpoint(self, lease: PartitionLease, checkpoint: Checkpoint, *, backwards: bool = False) -> bool:
        """See `LeaseStore`.

        Cancelled, it is stored or not; it will not be stored later, over a newer one. Two requests; two more where
        another member wrote it since.
        """
        assert checkpoint.partition_id == lease.partition_id
        operation, partition_id = "reset checkpoint" if backwards else "write checkpoint", lease.partition_id
        self._group(operation)
        async with self._checkpoint_locks[partition_id]:
            for _ in range(_WRITE_TRIES):
                # Kept only after a success: the outcome of a failed write is not known, and the next one reads it.
                stored = self._checkpoints.pop(partition_id, None)
                is_own = stored is not None and stored.token == lease.token
                if stored is None or not is_own:
                    stored = await self._read_to_replace(operation, lease)
                # After the reading: what a later owner stores has another ETag than the one that was read.
                if not await self._owns(operation, lease):
                    return False
                if not backwards and self._stays(stored, checkpoint, lease, is_own=is_own):
                    self._checkpoints[partition_id] = stored
                    return True
                metadata = v5.encode_checkpoint(checkpoint, lease.owner)
                blob = self._checkpoint_blob(partition_id)
                try:
                    etag = await self._write(operation, partition_id, blob, metadata, stored.etag)
                except RefusedError:
                    continue  # another member has written it
                self._checkpoints[partition_id] = _KnownCheckpoint(checkpoint, etag, lease.token)
                if backwards:
                    self._resets[partition_id] = lease.token
                return True
        raise StoreError(
            operation,
            f"{self._checkpoint_blob(partition_id).blob_name} changed at every attempt to write it",
            partition_id=partition_id,
        )

    async def aclose(self) -> None:
        """Finish releasing what cancelled calls claimed, and close a client of its own. Ownership stays as it is."""
        self._is_closed = True
        try:
            if self._cleanups:
                await asyncio.wait(self._cleanups)
        finally:
            await self._blobs.aclose()

    # ---- ownership

    def _snapshot(self, partition_id: str, blob: BlobProperties) -> LeaseSnapshot:
        found = v5.parse_ownership(blob.metadata)
        is_held, token = self._is_held(found, blob), found.claim or None
        # The other SDKs drop what is not theirs from the metadata.
        is_foreign = found.owner is not None and token is None
        return LeaseSnapshot(partition_id, found.owner, is_held, token, found.epoch, is_foreign)

    def _is_held(self, ownership: v5.StoredOwnership, blob: BlobProperties) -> bool:
        """Return whether an ownership has an owner and has not expired, by the account's clock."""
        return ownership.is_held(self._account_clock.time() - blob.last_modified.timestamp(), self._owner_timeout)

    async def _replace(
        self, operation: str, lease: PartitionLease, change: Callable[[v5.StoredOwnership], v5.StoredOwnership]
    ) -> bool:
        """Write the ownership of a lease under its ETag, with the partition's lock held. False if it is lost."""
        partition_id = lease.partition_id
        for _ in range(_WRITE_TRIES):
            claim = self._claims.get(partition_id)
            if claim is None or claim.etag is None or claim.ownership.claim != lease.token:
                found = await self._read_ownership(operation, partition_id)
                if found is None or (ownership := v5.parse_ownership(found.metadata)).claim != lease.token:
                    return False
                claim = _Claim(ownership, str(found.etag))
            ownership = change(claim.ownership)
            self._claims[partition_id] = _Claim(claim.ownership, None)
            try:
                etag = await self._swap(operation, partition_id, ownership, claim.etag)
            except RefusedError:
                continue  # another member has claimed it; or a write of ours was late, or its answer lost
            self._claims[partition_id] = _Claim(ownership, etag)
            return True
        raise StoreError(operation, "the ownership changed at every attempt to write it", partition_id=partition_id)

    async def _owns(self, operation: str, lease: PartitionLease) -> bool:
        """Return whether the ownership is still that of a lease. One request."""
        found = await self._read_ownership(operation, lease.partition_id)
        return found is not None and v5.parse_ownership(found.metadata).claim == lease.token

    @contextlib.asynccontextmanager
    async def _given_back_on_failure(self, partition_id: str, token: str) -> AsyncIterator[None]:
        """Release a claim if the block fails or is cancelled: other members need not wait for its expiry."""
        try:
            yield
        except BaseException as error:
            is_unsent = isinstance(error, RefusedError | ClosedError)
            if not self._is_closed and self._open_group is not None and not is_unsent:
                cleanup = asyncio.get_running_loop().create_task(self._give_back(partition_id, token))
                self._cleanups.add(cleanup)
                cleanup.add_done_callback(self._cleanups.discard)
            raise

    async def _give_back(self, partition_id: str, token: str) -> None:
        lease = PartitionLease(partition_id, "", 0, _OWNER_LEVEL, token, 0.0)
        # It was not claimed after all, or the store does not answer: then it expires.
        with contextlib.suppress(StoreError):
            async with self._claim_locks[partition_id]:
                await self._replace("give back", lease, lambda ownership: v5.StoredOwnership(None, ownership.epoch))

    # ---- checkpoints

    async def _read_to_replace(self, operation: str, lease: PartitionLease) -> _KnownCheckpoint:
        """Read a checkpoint that is to be replaced; what is no position counts as none, and is reported."""
        blob = self._checkpoint_blob(lease.partition_id)
        found = await self._blobs.properties(operation, lease.partition_id, blob)
        if found is None:
            return _KnownCheckpoint(None, None, lease.token)
        parsed = v5.parse_checkpoint(found.metadata)
        if parsed.problem is not None:
            problem = (
                f"{blob.blob_name} is not a checkpoint ({parsed.problem}): the next one of the partition's owner "
                "replaces it"
            )
            self._notices.add(lease.partition_id, problem)
        return _KnownCheckpoint(parsed.checkpoint(lease.partition_id), str(found.etag), lease.token)

    def _stays(self, stored: _KnownCheckpoint, checkpoint: Checkpoint, lease: PartitionLease, *, is_own: bool) -> bool:
        """Return whether a stored checkpoint is not replaced, as it is later than the one to write.

        Args:
            is_own: Whether this store has written it under the lease, and no other member since.
        """
        before = stored.checkpoint
        if before is None or not _is_before(checkpoint, before):
            return False
        if is_own or self._resets.get(lease.partition_id) != lease.token:
            return True
        self._note_late(checkpoint, before)
        return False

    def _written_since_reset(self, partition_id: str) -> Checkpoint | None:
        """Return what was written last, if this host owns the partition and has moved its checkpoint back."""
        own, claim = self._checkpoints.get(partition_id), self._claims.get(partition_id)
        token = self._resets.get(partition_id)
        if own is None or claim is None or not own.token == claim.ownership.claim == token:
            return None
        return own.checkpoint

    def _note_late(self, checkpoint: Checkpoint, late: Checkpoint) -> None:
        """Report a checkpoint of a former owner, which has not heard of a reset: no generation shows that."""
        problem = (
            f"another member wrote sequence number {late.sequence_number} into "
            f"{self._checkpoint_blob(late.partition_id).blob_name} after this host, which owns the partition, had "
            f"moved the checkpoint back: it goes on after {checkpoint.sequence_number}, and writes over the other"
        )
        key = f"{late.partition_id} {late.sequence_number}"
        self._notices.add(late.partition_id, problem, key=key)

    # ---- the group

    async def _look_around(self, directory: str, other: str) -> None:
        """Report what members should know of, as the group is opened; refuse to begin beside another spelling."""
        found = await self._blobs.list("open", directory)
        # Checkpoints that were copied here have no ownership yet.
        self._found.update(name.rpartition("/")[2] for name in found if v5.is_of_group(name))
        for name, blob in found.items():
            if v5.is_checkpoint(name) and (problem := v5.parse_checkpoint(blob.metadata).problem) is not None:
                self._notices.add(name.rpartition("/")[2], _unusable(name, problem))
        if other == directory or not any(map(v5.is_of_group, await self._blobs.list("open", other))):
            return
        wanted = not self._preserve_case
        if not any(map(v5.is_of_group, found)):
            problem = (
                f"container {self._blobs.name} has nothing under {directory}, and has ownership or checkpoints under "
                f"{other}: to Event Hubs they are one consumer group. Give preserve_case={wanted} to join those "
                f"members, or delete the blobs below {other} if no process uses them"
            )
            raise ConfigurationError("preserve_case", problem)
        problem = (
            f"container {self._blobs.name} has blobs of this consumer group in two spellings, {directory}, which this "
            f"host uses, and {other}: members that use the other one do not see this host, and each takes the links of "
            f"the other. If any is running, give preserve_case={wanted}; if not, delete the blobs below {other}"
        )
        self._notices.add(None, problem)

    async def _listed(self, operation: str) -> dict[str, BlobProperties]:
        """List the ownerships, by partition. What is named otherwise is not one."""
        directory = self._group(operation).directory + v5.OWNERSHIP
        blobs = await self._blobs.list(operation, directory)
        named = {name.removeprefix(directory): blob for name, blob in blobs.items()}
        return {partition_id: blob for partition_id, blob in named.items() if v5.is_partition(partition_id)}

    async def _read_ownership(self, operation: str, partition_id: str) -> BlobProperties | None:
        return await self._blobs.properties(operation, partition_id, self._ownership_blob(partition_id))

    async def _swap(
        self, operation: str, partition_id: str, ownership: v5.StoredOwnership, replaces: str | None
    ) -> str:
        return await self._write(
            operation, partition_id, self._ownership_blob(partition_id), ownership.encode(), replaces
        )

    async def _write(
        self, operation: str, partition_id: str, blob: Blob, metadata: dict[str, str], replaces: str | None
    ) -> str:
        """Write a blob under its ETag, or, with None, create it. Return the new ETag."""
        try:
            return await self._blobs.swap_metadata(operation, partition_id, blob, metadata, replaces)
        except ForbiddenError as error:
            problem = (
                f"the storage account refuses to {'create' if replaces is None else 'write'} {blob.blob_name} "
                f"({error.reason}): the credential needs the rights to read, list, create and write blobs (r, l, c and "
                "w of a signature; the role Storage Blob Data Contributor)"
            )
            raise StoreError(operation, problem, partition_id=partition_id) from None
        except RefusedError as refused:
            if replaces is None or refused.answer is not Answer.TAKEN:
                raise
            problem = f"{blob.blob_name} has a blob lease held elsewhere: break that blob lease"
            raise StoreError(operation, problem, partition_id=partition_id) from None

    def _ownership_blob(self, partition_id: str) -> Blob:
        return self._blob(v5.OWNERSHIP, partition_id)

    def _checkpoint_blob(self, partition_id: str) -> Blob:
        return self._blob(v5.CHECKPOINT, partition_id)

    def _blob(self, kind: str, partition_id: str) -> Blob:
        # Also while the store closes, for what is released then.
        group = self._open_group or self._group("use")
        return self._blobs.blob(f"{group.directory}{kind}{partition_id}")

    def _group(self, operation: str) -> _GroupBlobs:
        if self._is_closed:
            raise ClosedError("lease store")
        if self._open_group is None:
            raise StoreError(operation, "the store is not open: call open() first")
        return self._open_group

    def __repr__(self) -> str:
        # Never the URL, which may hold a signature.
        return f"BlobOwnershipStore({self._blobs.name!r}, preserve_case={self._preserve_case!r})"


class _Notices:
    """What members of the group should know of, each once; kept until there is a host that reports it."""

    def __init__(self) -> None:
        self._notify: Notify | None = None
        self._kept: list[tuple[str | None, str]] = []
        self._known: set[str] = set()

    def pass_to(self, notify: Notify) -> None:
        """Pass everything on, from now on."""
        self._notify = notify
        kept, self._kept = self._kept, []
        for each in kept:
            notify(*each)

    def add(self, partition_id: str | None, problem: str, *, key: str | None = None) -> None:
        """Report something, unless it was reported.

        Args:
            key: What it is known by; None for its text. Default: None.
        """
        known = key or problem
        if known in self._known:
            return
        self._known.add(known)
        if self._notify is None:
            self._kept.append((partition_id, problem))
        else:
            self._notify(partition_id, problem)


def _is_before(checkpoint: Checkpoint, other: Checkpoint) -> bool:
    """Return whether a checkpoint is before another.

    In a geo-replicated namespace numbers may begin anew after a failover. So those of two offsets have no order if one
    of them is of that kind and the other is not.
    """
    kinds = {each.offset.isdecimal() for each in (checkpoint, other) if each.offset not in ("", START_OFFSET)}
    return len(kinds) < 2 and checkpoint.sequence_number < other.sequence_number


def _unusable(name: str, problem: str) -> str:
    return (
        f"{name} is not a checkpoint: {problem}. The partition is not read until that is settled: write an offset and "
        "a sequencenumber into its metadata, or delete the blob to begin at the initial position"
    )
