"""Changes the checkpoints that consumers keep in a blob container."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, Literal

from eventpump.errors import ConfigurationError, StoreError
from eventpump.eventhubs.events import Checkpoint
from eventpump.interfaces import Clock, ConsumerScope
from eventpump.storage import ownership_form as v5
from eventpump.storage.blob_access import Answer, ForbiddenError, RefusedError
from eventpump.storage.checkpoints.blobs import BlobCheckpointReader, listed_blob
from eventpump.storage.checkpoints.stored import GroupCheckpoints, StoredCheckpoint
from eventpump.storage.checkpoints.writing import CHANGED, OWNER, LeasedCheckpoints, of_earlier_hub, owned_by
from eventpump.storage.groups import CHECKPOINTS, ScopeRecords
from eventpump.storage.leases.blob import BlobLeaseStore
from eventpump.storage.records.blob import BlobRecordStore

if TYPE_CHECKING:
    from azure.storage.blob.aio import ContainerClient

_OPERATION: Final = "write checkpoint"
_LEASE_DURATION: Final = 15


class BlobCheckpointWriter(BlobCheckpointReader):
    """A `CheckpointTarget` of a blob container.

    "v5" is written if the checkpoint is as it was read (its ETag), which no SDK's owner minds: it would overwrite it.
    "event-processor-host" is written under the lease of each partition.

    Args:
        container: As of `BlobCheckpointReader`. It has to exist.
        connection_string: As of `BlobCheckpointReader`.
        account_url: As of `BlobCheckpointReader`.
        credential: As of `BlobCheckpointReader`.
        format: "v5" or "event-processor-host". Default: "v5".
        prefix: What goes before the consumer group in the names of leases, with nothing between. Default: "".
        preserve_case: Whether the names of "v5" are as the user wrote them, or in lower case. None for lower case
            where the group has no blobs in the other spelling; where it has, nothing is written. Default: None.
        namespace: The namespace in the names of "v5", where it is not the host name of the hub. None for the host
            name. Default: None.
        owner_timeout: Seconds after which an ownership of "v5" expires if it was not renewed. Default: 180.0.
        call_timeout: How long a request may take, in seconds. Default: 10.0.
        clock: None for the machine's time.

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
        format: Literal["v5", "event-processor-host"] = "v5",  # noqa: A002 - the word of the field
        prefix: str = "",
        preserve_case: bool | None = None,
        namespace: str | None = None,
        owner_timeout: float = 180.0,
        call_timeout: float = 10.0,
        clock: Clock | None = None,
    ) -> None:
        if format not in ("v5", "event-processor-host"):
            raise ConfigurationError("format", f"v5 and event-processor-host can be written, and {format} only read")
        super().__init__(
            container,
            connection_string=connection_string,
            account_url=account_url,
            credential=credential,
            format=format,
            prefix=prefix,
            preserve_case=bool(preserve_case),
            namespace=namespace,
            owner_timeout=owner_timeout,
            call_timeout=call_timeout,
            clock=clock,
        )
        self._spelling = preserve_case
        self._directory = ""
        self._leased = None if format == "v5" else LeasedCheckpoints(self._lease_store)

    def _lease_store(self) -> BlobLeaseStore:
        return BlobLeaseStore(self._blobs.client, prefix=self._prefix, lease_duration=_LEASE_DURATION)

    @property
    def format(self) -> str:
        """See `CheckpointTarget.format`."""
        return "v5" if self._leased is None else "EventProcessorHost"

    async def _read_v5(self, scope: ConsumerScope, partition_ids: Sequence[str]) -> GroupCheckpoints:
        directory, _ = self._directories(scope)
        found = await self._v5_of(directory, partition_ids)
        if self._spelling is not None:
            return GroupCheckpoints(found, () if found else (await self._describe_empty(directory),))
        if not found:
            return await self._read_other_spelling(scope, partition_ids)
        if (problem := await self._find_two_spellings(scope, partition_ids)) is not None:
            which = "set it to the one that the consumers use, False for the first and True for the second"
            raise ConfigurationError("preserve_case", f"{problem}: {which}")
        return GroupCheckpoints(found)

    async def check(
        self, scope: ConsumerScope, partition_ids: Sequence[str], hub_created_at: datetime
    ) -> Mapping[str, str]:
        """See `CheckpointTarget.check`."""
        if self._leased is not None:
            return await self._leased.check(scope, partition_ids, hub_created_at)
        found = await self._read(scope, partition_ids)
        if self._spelling is None and found.partitions and found.notes:
            problem = f"{found.notes[0]}: set it to True to write there, or to False for names in lower case"
            raise ConfigurationError("preserve_case", problem)
        # Of hosts of this library among the group's.
        prefix = v5.record_prefix(self._directories(self._named(scope))[0])
        records = BlobRecordStore(self._blobs, prefix, create=False, in_metadata=CHECKPOINTS, kind="lease store")
        await records.open()
        group = await ScopeRecords(lambda: records, scope).read(_OPERATION)
        return of_earlier_hub(group, partition_ids, hub_created_at)

    async def begin(self, scope: ConsumerScope, partition_ids: Sequence[str]) -> None:
        """See `CheckpointTarget.begin`."""
        if self._leased is not None:
            with self._naming_rights(f"the leases of {scope.consumer_group}"):
                await self._leased.begin(scope, partition_ids)
        self._directory, _ = self._directories(self._named(scope))

    async def write(
        self, partition_id: str, before: StoredCheckpoint | None, after: Checkpoint | None, *, from_owner: bool
    ) -> str | None:
        """See `CheckpointTarget.write`."""
        assert self._directory
        name = f"{self._directory}{v5.CHECKPOINT}{partition_id}"
        if self._leased is not None:
            with self._naming_rights(f"the lease of partition {partition_id}"):
                return await self._leased.write(partition_id, before, after, from_owner=from_owner)
        blob, version = self._blobs.blob(name), None if before is None else before.version
        with self._naming_rights(name):
            if not from_owner and (owner := await self._find_owner(partition_id)) is not None:
                return owned_by(owner)
            try:
                if after is not None:
                    metadata = v5.encode_checkpoint(after, OWNER)
                    await self._blobs.swap_metadata(_OPERATION, partition_id, blob, metadata, version)
                elif version is not None:
                    await self._blobs.delete(_OPERATION, partition_id, blob, version)
            except RefusedError as refused:
                return CHANGED if refused.answer is not Answer.LOST else refused.answer.value
        return None

    async def _find_owner(self, partition_id: str) -> str | None:
        """Return who owns a partition in the form of "v5", None for none: it may have come since the listing."""
        blob = self._blobs.blob(f"{self._directory}{v5.OWNERSHIP}{partition_id}")
        found = await self._blobs.properties(_OPERATION, partition_id, blob)
        if found is None:
            return None
        owner, is_owned = self._owner_of(listed_blob(found))
        return owner if is_owned else None

    @contextlib.contextmanager
    def _naming_rights(self, what: str) -> Iterator[None]:
        """Have an error of the credential say which rights it needs."""
        try:
            yield
        except ForbiddenError as error:
            problem = (
                f"the storage account refuses to write {what} in container {self._blobs.name} ({error.reason}): the "
                "credential needs the rights to read, list, create, write and delete blobs (r, l, c, w and d of a "
                "signature; the role Storage Blob Data Contributor)"
            )
            raise StoreError(_OPERATION, problem) from None

    async def aclose(self) -> None:
        """Close the client of the container, unless it is the caller's. Closing twice is fine."""
        try:
            if self._leased is not None:
                await self._leased.aclose()
        finally:
            await super().aclose()
