"""Reads the checkpoints that other programs keep in a blob container."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Final, Literal, TypeAlias, get_args

from azure.storage.blob import BlobProperties
from azure.storage.blob.aio import ContainerClient

from eventpump.aio.tasks import gather
from eventpump.clock import LoopClock
from eventpump.errors import ConfigurationError
from eventpump.interfaces import Clock, ConsumerScope
from eventpump.storage import ownership_form as v5
from eventpump.storage.blob_access import AccountClock, BlobContainer
from eventpump.storage.checkpoints.stored import GroupCheckpoints, StoredCheckpoint
from eventpump.storage.leases.layout import LeaseBody, lease_directory, owner_of, partition_of

CheckpointFormat: TypeAlias = Literal["v5", "event-processor-host", "event-processor-host-python", "functions"]
"""How a program keeps its checkpoints in blobs."""

FUNCTIONS_CONTAINER: Final = "azure-webjobs-eventhub"
"""Where Azure Functions keep theirs."""

_V5: Final = "v5"
_LEASES: Final = "EventProcessorHost"
_LEASED: Final = "leased"
_READS_AT_ONCE: Final = 32
_MAX_BODY: Final = 1 << 20
_SHOWN_GROUPS: Final = 3
_OPERATION: Final = "read checkpoints"


@dataclass(frozen=True, slots=True)
class Listed:
    """What is known of a blob without its body."""

    metadata: Mapping[str, str] | None
    modified: datetime
    is_leased: bool
    etag: str


class BlobCheckpointReader:
    """A `CheckpointReader` of a blob container.

    `format` is one of

    * "v5": `BlobOwnershipStore`, azure-eventhub 5 and the current SDKs of all languages, Dapr, the OpenTelemetry
      collector;
    * "event-processor-host": `BlobLeaseStore`, the EventProcessorHosts of .NET and Java, Logstash;
    * "event-processor-host-python": azure-eventhub 1, one group of one hub in a container;
    * "functions": Azure Functions, "v5" and the leases of an earlier extension.

    "v5" is read by one listing; the others by one, and a request per partition. Names are in lower case by default, as
    Python, .NET and JavaScript write them. If nothing lies under those, the names as the user wrote them are looked at,
    which are Java's and Go's, and a note says so. The first reading also looks there otherwise, and a note says so if
    the group has blobs in both.

    Args:
        container: The container's name, with `connection_string` or with `account_url` and `credential`; or a ready
            `ContainerClient`, which stays the caller's to close.
        connection_string: Of the storage account, with the name of a container; None with `account_url` and
            `credential`, or a client.
        account_url: The storage account's URL, with `credential`; None with a connection string, or a client.
        credential: Any that azure.storage.blob takes; None for none, as where `account_url` has a SAS token.
        format: See above. Default: "v5".
        prefix: What goes before the consumer group in the names of leases, with nothing between. Default: "".
        preserve_case: Whether the names of "v5" are as the user wrote them. Default: False.
        namespace: The namespace in the names of "v5", where it is not the host name of the hub: clients of
            azure-eventhub that were given a port have it there. None for the host name. Default: None.
        owner_timeout: Seconds after which an ownership of "v5" expires if it was not renewed. Each SDK has its own: 60
            (JavaScript, Go), 120 (.NET, Java), 180 (Python). A host of eventpump has stored its own. Default: 180.0.
        call_timeout: How long a request may take, in seconds. Default: 30.0.
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
        format: CheckpointFormat = "v5",  # noqa: A002 - the word of the field
        prefix: str = "",
        preserve_case: bool = False,
        namespace: str | None = None,
        owner_timeout: float = 180.0,
        call_timeout: float = 30.0,
        clock: Clock | None = None,
    ) -> None:
        known = get_args(CheckpointFormat)
        if format not in known:
            raise ConfigurationError("format", f"must be one of {', '.join(known)}, not {format!r}")
        if owner_timeout <= 0:
            raise ConfigurationError("owner_timeout", "must be above 0")
        self._clock = AccountClock(LoopClock() if clock is None else clock)
        self._blobs = BlobContainer(
            container,
            connection_string,
            account_url,
            credential,
            call_timeout,
            owner=type(self).__name__,
            on_date=self._clock.set,
        )
        self._format = format
        self._prefix = prefix.strip()
        self._preserve_case = preserve_case
        self._namespace = namespace
        self._owner_timeout = owner_timeout
        self._is_checked = False
        self._spelling_notes: tuple[str, ...] | None = None

    async def read(self, scope: ConsumerScope, partition_ids: Sequence[str]) -> GroupCheckpoints:
        """See `CheckpointReader`. Blobs that are named after other partitions are skipped.

        Raises:
            ConfigurationError: There is no such container, or the account refuses the credential.
        """
        found = await self._read(scope, partition_ids)
        if (error := self._clock.describe_error()) is None:
            return found
        note = f"{error}: owners are judged by the account's, and ages are wrong by that; set the clock"
        return replace(found, notes=(*found.notes, note))

    async def _read(self, scope: ConsumerScope, partition_ids: Sequence[str]) -> GroupCheckpoints:
        if not self._is_checked:
            await self._blobs.open("", create=False)
            self._is_checked = True
        match self._format:
            case "v5":
                return await self._read_v5(self._named(scope), partition_ids)
            case "functions":
                return await self._read_functions(self._named(scope), partition_ids)
            case "event-processor-host":
                directory = lease_directory(self._prefix, scope.consumer_group)
                return GroupCheckpoints(await self._read_leases(directory, partition_ids))
            case "event-processor-host-python":
                return GroupCheckpoints(await self._read_leases("", partition_ids))

    async def _read_v5(self, scope: ConsumerScope, partition_ids: Sequence[str]) -> GroupCheckpoints:
        found = await self._v5_of(self._directories(scope)[0], partition_ids)
        if not found:
            return await self._read_other_spelling(scope, partition_ids)
        if self._spelling_notes is None:
            # Once: it takes another listing.
            problem = await self._find_two_spellings(scope, partition_ids)
            self._spelling_notes = () if problem is None else (f"{problem}: this was read from the first",)
        return GroupCheckpoints(found, self._spelling_notes)

    async def _read_other_spelling(self, scope: ConsumerScope, partition_ids: Sequence[str]) -> GroupCheckpoints:
        """Read a group that has nothing in the spelling that was asked for; a note says where it was read."""
        own, other = self._directories(scope)
        found = {} if other == own else await self._v5_of(other, partition_ids)
        if not found:
            return GroupCheckpoints(notes=(await self._describe_empty(own),))
        who = "Python, .NET and JavaScript" if self._preserve_case else "Java and Go"
        note = f"nothing lies under {own}; this was read from {other}, which is how {who} spell it"
        return GroupCheckpoints(found, (note,))

    async def _find_two_spellings(self, scope: ConsumerScope, partition_ids: Sequence[str]) -> str | None:
        """Return a text if a group that has blobs in the spelling that was asked for has some in the other one too."""
        own, other = self._directories(scope)
        if own == other or not await self._v5_of(other, partition_ids):
            return None
        return (
            f"container {self._blobs.name} has checkpoints or owners of the group in two spellings, {own} and {other}"
        )

    def _directories(self, scope: ConsumerScope) -> tuple[str, str]:
        """Return the group's directory in the spelling that was asked for, and in the other one."""
        own = self._preserve_case
        return v5.group_directory(scope, preserve_case=own), v5.group_directory(scope, preserve_case=not own)

    def _named(self, scope: ConsumerScope) -> ConsumerScope:
        """Return a consumer group as the names of blobs have it."""
        return scope if self._namespace is None else replace(scope, fully_qualified_namespace=self._namespace)

    async def _describe_empty(self, directory: str) -> str:
        """Return a note that a directory is empty, with the groups of the container's first page that have any."""
        names = await self._list("", pages=1)
        groups = sorted({name.partition(f"/{v5.CHECKPOINT}")[0] for name in names if v5.is_checkpoint(name)})
        rest = len(groups) - _SHOWN_GROUPS
        shown = ", ".join(groups[:_SHOWN_GROUPS]) + (f" and {rest} more" if rest > 0 else "")
        found = f"it has checkpoints of {shown}" if groups else "none was found of any group"
        return f"container {self._blobs.name} has no checkpoint under {directory}: {found}"

    async def _v5_of(self, directory: str, partition_ids: Sequence[str]) -> dict[str, StoredCheckpoint]:
        listed = await self._list(directory)
        found: dict[str, StoredCheckpoint] = {}
        for partition_id in partition_ids:
            checkpoint = listed.get(f"{directory}{v5.CHECKPOINT}{partition_id}")
            ownership = listed.get(f"{directory}{v5.OWNERSHIP}{partition_id}")
            if checkpoint is None and ownership is None:
                continue
            place = f"{directory}{v5.CHECKPOINT}{partition_id}"
            stored = StoredCheckpoint(partition_id, _V5, place, is_owned=False)
            if ownership is not None:
                owner, is_owned = self._owner_of(ownership)
                stored = replace(stored, owner=owner, is_owned=is_owned)
            if checkpoint is not None:
                place_of = v5.parse_checkpoint(checkpoint.metadata)
                stored = replace(
                    stored,
                    offset=place_of.offset,
                    sequence_number=place_of.sequence_number,
                    problem=place_of.problem,
                    written_at=checkpoint.modified,
                    version=checkpoint.etag,
                )
            found[partition_id] = stored
        return found

    def _owner_of(self, ownership: Listed) -> tuple[str | None, bool]:
        """Return the owner in an ownership of "v5", None for none, and whether it is one now."""
        stored = v5.parse_ownership(ownership.metadata)
        age = self._clock.time() - ownership.modified.timestamp()
        return stored.owner, stored.is_held(age, self._owner_timeout)

    async def _read_functions(self, scope: ConsumerScope, partition_ids: Sequence[str]) -> GroupCheckpoints:
        found = await self._v5_of(v5.group_directory(scope), partition_ids)
        missing = [each for each in partition_ids if each not in found or not found[each].is_usable]
        for directory in _functions_directories(scope):
            if not missing:
                break
            leases = await self._read_leases(directory, missing)
            for partition_id, stored in leases.items():
                if stored.is_usable or partition_id not in found:
                    found[partition_id] = stored
            missing = [each for each in missing if each not in leases]
        return GroupCheckpoints(found)

    async def _read_leases(self, directory: str, partition_ids: Iterable[str]) -> dict[str, StoredCheckpoint]:
        listed = {partition_of(name, directory): (name, blob) for name, blob in (await self._list(directory)).items()}
        mine = [(each, *listed[each]) for each in partition_ids if each in listed]
        reads = (self._read_lease(*each) for each in mine)
        stored = await gather(reads, at_once=_READS_AT_ONCE)
        return {each.partition_id: each for each in stored if each is not None}

    async def _read_lease(self, partition_id: str, name: str, listed: Listed) -> StoredCheckpoint | None:
        def parse(raw: bytes) -> LeaseBody | str:
            try:
                return LeaseBody.parse(raw, partition_id)
            except ValueError as error:
                return str(error)  # the other partitions can be read

        found = await self._blobs.download(_OPERATION, None, self._blobs.blob(name), parse, limit=_MAX_BODY)
        if found is None:
            return None
        body = found[0]
        owner = owner_of(listed.metadata)
        if isinstance(body, str):
            return StoredCheckpoint(partition_id, _LEASES, name, owner=owner, is_owned=listed.is_leased, problem=body)
        checkpoint = body.checkpoint
        return StoredCheckpoint(
            partition_id,
            _LEASES,
            name,
            sequence_number=None if checkpoint is None else checkpoint.sequence_number,
            offset=None if checkpoint is None else checkpoint.offset,
            # A lease is written at a takeover too: the checkpoint may be older.
            written_at=None if checkpoint is None else found[1].last_modified,
            owner=body.owner or owner,
            is_owned=listed.is_leased,
        )

    async def _list(self, directory: str, *, pages: int | None = None) -> dict[str, Listed]:
        """Return the blobs of a directory, or those of its first pages, of up to 5,000 blobs each."""
        found = await self._blobs.list(_OPERATION, directory, pages=pages)
        return {name: listed_blob(blob) for name, blob in found.items()}

    async def aclose(self) -> None:
        """Close the client of the container, unless it is the caller's. Closing twice is fine."""
        await self._blobs.aclose()

    def __repr__(self) -> str:
        # Never the URL, which may hold a signature.
        return f"BlobCheckpointReader({self._blobs.name!r}, format={self._format!r}, prefix={self._prefix!r})"


def listed_blob(blob: BlobProperties) -> Listed:
    """Return what is known of a blob."""
    modified = blob.last_modified.astimezone(UTC)
    return Listed(blob.metadata, modified, blob.lease.state == _LEASED, str(blob.etag))


def _functions_directories(scope: ConsumerScope) -> tuple[str, str]:
    """Name the directories of the leases that earlier extensions wrote: as they escape names, and as configured."""
    escaped = f"{_escaped(scope.fully_qualified_namespace)}/{_escaped(scope.hub)}/{scope.consumer_group}/"
    return escaped, f"{scope.fully_qualified_namespace}/{scope.hub}/{scope.consumer_group}/"


def _escaped(name: str) -> str:
    def escape(character: str) -> str:
        if character in "-_." or (character.isascii() and (character.islower() or character.isdecimal())):
            return character
        if character.isascii() and character.isupper():
            return character.lower()
        # As .NET does, by units of UTF-16.
        units = character.encode("utf-16-be")
        codes = [int.from_bytes(units[at : at + 2]) for at in range(0, len(units), 2)]
        return "".join(f":{code:02X}" if code < 0x100 else f"::{code:04X}" for code in codes)

    return "".join(map(escape, name))
