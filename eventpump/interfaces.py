"""Interfaces: what the consumer and the producer need from outside, and what every implementation must hold.

Each has one contract suite over all its implementations (`eventpump.testing.conformance`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Final, Protocol, runtime_checkable

if TYPE_CHECKING:
    from eventpump.core.claim import PublisherState, StoredPublisherState
    from eventpump.core.lease import LeaseSnapshot, PartitionLease
    from eventpump.errors import EventPumpError
    from eventpump.eventhubs.events import Checkpoint, EventPosition


class Clock(Protocol):
    """The time. `monotonic` for durations and deadlines, `time` for what other machines read."""

    def monotonic(self) -> float:
        """Seconds from a fixed, unknown moment; never goes back. Time in which the machine is suspended counts."""

    def time(self) -> float:
        """Seconds since the Unix epoch."""


@runtime_checkable
class MachineClock(Clock, Protocol):
    """A clock that the processes of one machine share, and that nobody can set; for `SqliteLeaseStore`."""

    @property
    def boot_id(self) -> str | None:
        """Names what `boot_time` counts from: readings may be compared where this is equal. None where nothing does."""

    def boot_time(self) -> float:
        """Seconds since then, those in which the machine was suspended included; never goes back."""


# ---------------------------------------------------------------------------------------------- transport

CLOSE_TIMEOUT: Final = 5.0
"""Seconds that the library waits for a link, a transport or a store to close, before it leaves that to go on alone."""


@dataclass(frozen=True, slots=True)
class ReceiveLinkSpec:
    """What a receive link reads, and how.

    Args:
        owner_level: The epoch of an exclusive reader; None shares the partition.
        receiver_name: Shown by the service in the texts of other readers' errors.
        track_last_enqueued: Have the service annotate every event with its partition's newest event.
        max_message_size: The largest message accepted, in bytes.
    """

    hub: str
    consumer_group: str
    partition_id: str
    position: EventPosition
    owner_level: int | None = None
    receiver_name: str | None = None
    track_last_enqueued: bool = False
    max_message_size: int = 20 * 1024 * 1024


class ReceiveSink(Protocol):
    """Where a receive link puts what arrives. Both calls come from the event loop, never block, never raise."""

    def messages(self, batch: list[bytes]) -> None:
        """Take over a batch of encoded messages, in order. The list is the sink's from now on."""

    def detached(self, error: EventPumpError) -> None:
        """Called at most once, when the link ends for any other reason than `aclose`. No further calls follow."""


class ReceiveLink(Protocol):
    """An attached receive link. Starts with no credit."""

    @property
    def max_message_size(self) -> int:
        """The largest message the link carries, in bytes."""

    def set_credit(self, credit: int) -> None:
        """Let the service send `credit` more messages from now on; 0 stops it. What is on its way still comes."""

    async def probe(self, timeout: float) -> bool | None:
        """Ask the service for a sign of life of this link (AMQP 2.7.4, a flow with echo), and wait for it.

        What the service sent before its answer has arrived when this returns. Credit stays as it is. Cancelled, an
        answer is ignored. A service need not answer, though the standard asks for it: see `core.silence`.

        Args:
            timeout: Seconds to wait for the answer.

        Returns:
            True where it came, False where it did not within the time; None where that says nothing of the service: the
            transport has no way to ask (uamqp), or the link has ended.
        """

    def drop_connection(self, reason: str) -> None:
        """Drop the connection that carries the link, or carried it, with everything on it.

        All its links end with `ConnectionLostError`, to reconnect. Does nothing where that connection is over.
        """

    async def aclose(self) -> None:
        """Detach; the sink gets nothing from now on. Closing twice is fine; cancelled, the link still ends."""


@dataclass(frozen=True, slots=True)
class SendLinkSpec:
    """Where a send link leads: to one partition, or (None) to the gateway, which picks one per message.

    Args:
        properties: Link properties to attach with, values in AMQP types.
        desired_capabilities: Capabilities to ask for at attach.
    """

    hub: str
    partition_id: str | None = None
    properties: Mapping[str, object] = field(default_factory=dict)
    desired_capabilities: Sequence[str] = ()


class SendLink(Protocol):
    """An attached send link."""

    @property
    def max_message_size(self) -> int:
        """The largest message the service takes on this link, in bytes."""

    @property
    def properties(self) -> Mapping[str, object]:
        """The link properties the service answered at attach."""

    @property
    def is_attached(self) -> bool:
        """Whether messages can flow. A send that fails while this holds was refused, or had no answer in time."""

    async def send(self, message: bytes, *, message_format: int = 0, on_sent: Callable[[], None] | None = None) -> None:
        """Send one encoded message and wait until the service has accepted it.

        Calls may overlap; transfers go out in the order of the calls.
        Cancelled before its first byte was handed to the connection, it is not sent; later, its outcome is not known.

        Args:
            on_sent: Is called when the first byte is handed to the connection; never, where the send ends before.

        Raises:
            EventTooLargeError: Before anything is sent.
            ServiceError: Refused, or the link or connection ended; `ServiceTimeoutError` and the lost-link errors leave
                the outcome unknown.
        """

    async def aclose(self) -> None:
        """Detach. Sends still waiting fail with `LinkDetachedError`. Closing twice is fine."""


@dataclass(frozen=True, slots=True)
class HubProperties:
    """What the service says of a hub."""

    name: str
    created_at: datetime
    partition_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PartitionProperties:
    """What the service says of a partition. An empty partition has `last_enqueued_sequence_number` -1."""

    hub: str
    partition_id: str
    beginning_sequence_number: int
    last_enqueued_sequence_number: int
    last_enqueued_offset: str
    last_enqueued_time: datetime
    is_empty: bool


class HubDirectory(Protocol):
    """Reads about hubs and partitions."""

    async def get_hub_properties(self, hub: str) -> HubProperties:
        """Read a hub's properties.

        Raises:
            ServiceError: Unknown hub, no right, or no answer.
        """

    async def get_partition_properties(self, hub: str, partition_id: str) -> PartitionProperties:
        """Read a partition's properties.

        Raises:
            ServiceError: As above, and for an unknown partition.
        """


class SendLinkOpener(Protocol):
    """Attaches send links."""

    async def open_send_link(self, spec: SendLinkSpec) -> SendLink:
        """Attach a send link, and wait until it is attached. Cancelled, no link is left behind.

        Raises:
            ServiceError: Refused, or no answer.
        """


class Transport(HubDirectory, SendLinkOpener, Protocol):
    """The way to one namespace. Connects when first used, and again after a connection was lost.

    Links do not survive a lost connection: each sink or sender learns of it and opens anew.
    Attempts to connect are shared, and spaced by a back-off of the transport's own.
    """

    @property
    def fully_qualified_namespace(self) -> str:
        """The namespace's host name, as the stores spell it."""

    async def open_receive_link(self, spec: ReceiveLinkSpec, sink: ReceiveSink) -> ReceiveLink:
        """Attach a receive link. Cancelled, no link is left.

        Raises:
            ServiceError: Refused, or no connection.
        """

    async def open_send_link(self, spec: SendLinkSpec) -> SendLink:
        """Attach a send link. Cancelled, no link is left.

        Raises:
            ServiceError: Refused, or no connection.
        """

    async def aclose(self) -> None:
        """Close every link and the connection. Closing twice is fine."""


# ------------------------------------------------------------------------------------------------- stores


DEFAULT_SUBSCRIPTION = "default"
"""The subscription whose checkpoints lie where other programs read and write them."""


@dataclass(frozen=True, slots=True)
class ConsumerScope:
    """Whose leases and checkpoints: one consumer group of one hub."""

    fully_qualified_namespace: str
    hub: str
    consumer_group: str


@dataclass(frozen=True, slots=True)
class ScopeRecord:
    """What the hosts of one consumer group have agreed on. Written once, by the first host of the group.

    Args:
        hub_created_at: When the hub that the checkpoints belong to was created.
        partition_count: How many partitions the hub had when the record was written. A partition whose number is not
            below it was added later, and begins at its beginning.
        starts: Where partitions without a checkpoint begin, as text (see `eventpump.core.starts`): by partition id, and
            under "" for those not named.
        reset_for: When a newer hub of the same name was created, for which checkpoints are being reset; None where no
            reset is under way.
        reset_partitions: The partitions whose reset for that newer hub is stored.
    """

    hub_created_at: datetime
    partition_count: int
    starts: Mapping[str, str] = field(default_factory=dict)
    reset_for: datetime | None = None
    reset_partitions: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class StoredScopeRecord:
    """A scope record as it was read or written.

    Args:
        version: Identifies this state of the record to its store; opaque.
    """

    record: ScopeRecord
    version: str


@dataclass(frozen=True, slots=True)
class SubscriptionRecord:
    """What the hosts of one consumer group have agreed on about one subscription.

    Args:
        name: The name of the subscription.
        incarnation: Random text, new for each subscription made. Its checkpoints lie under `key`, so that those of an
            earlier subscription of that name are not taken for its own.
        hub_created_at: When the hub that its starts and checkpoints belong to was created.
        partition_count: How many partitions the hub had then. A partition whose number is not below it was added later,
            and begins at its beginning.
        starts: Where partitions without a checkpoint begin, as text (see `eventpump.core.starts`): by partition id, and
            under "" for those not named.
        is_active: False where it was ended with its checkpoints kept: no host delivers to it until it is made active
            again.
    """

    name: str
    incarnation: str
    hub_created_at: datetime
    partition_count: int
    starts: Mapping[str, str] = field(default_factory=dict)
    is_active: bool = True

    @property
    def key(self) -> str:
        """The name of its checkpoints in a `CheckpointStore`."""
        return f"{self.name}.{self.incarnation}"


@dataclass(frozen=True, slots=True)
class StoredSubscription:
    """A subscription's record as it was read or written.

    Args:
        version: Identifies this state of the record to its store; opaque.
    """

    record: SubscriptionRecord
    version: str


@dataclass(frozen=True, slots=True)
class CheckpointClaim:
    """A subscription's checkpoint, claimed by a new owner of the partition; None where there is none yet."""

    checkpoint: Checkpoint | None


class CheckpointStore(Protocol):
    """Keeps, per partition and subscription, the position up to which events are processed."""

    async def read_checkpoint(self, partition_id: str, subscription: str = "default") -> Checkpoint | None:
        """Read a checkpoint; None where there is none.

        Raises:
            StoreError: The store failed.
        """

    async def claim_checkpoint(self, lease: PartitionLease, subscription: str = "default") -> CheckpointClaim | None:
        """Read a checkpoint under the lease, before the first event is delivered. None where the lease is lost.

        From then on no earlier owner of the partition can store one. Failed or cancelled, it may be called again.

        Raises:
            StoreError: The store failed.
        """

    async def write_checkpoint(
        self, lease: PartitionLease, checkpoint: Checkpoint, subscription: str = "default"
    ) -> bool:
        """Store a checkpoint under the lease. False, and nothing stored, where the lease is lost.

        Not claimed before, it is claimed by the first call. Of another subscription than "default" a store may notice
        the loss only once the next owner has claimed the checkpoint; what is stored until then is what that owner
        reads. A checkpoint with a lower sequence number than the stored one is not stored, and True is returned.
        A write that failed or was cancelled is stored or not, but never later, over a newer one.

        Raises:
            StoreError: The store failed; whether it stored is not known.
        """

    async def reset_checkpoint(
        self, lease: PartitionLease, checkpoint: Checkpoint, subscription: str = "default"
    ) -> bool:
        """Store a checkpoint under the lease, whatever is stored: the only call that writes backwards.

        False, and nothing stored, where the lease is lost. Failed or cancelled as `write_checkpoint`.

        Raises:
            StoreError: The store failed; whether it stored is not known.
        """


class LeaseStore(CheckpointStore, Protocol):
    """Keeps one lease per partition of a consumer group, and the checkpoints with them.

    A lost race is a return value (None or False); a failure of the store is `StoreError`, as is a lease never created.
    A lease's `expires_at` is on the clock's `monotonic`, counted from before the request went out.
    An expired lease is anybody's to acquire; until somebody has, its owner may still renew, write under and release it.
    Partitions do not wait for each other. A store belongs to one host and one event loop.
    """

    @property
    def lease_duration(self) -> float:
        """How long a lease lives without renewal, in seconds."""

    async def open(self, scope: ConsumerScope) -> None:
        """Bind to a consumer group and make the container or tables. Once.

        Raises:
            StoreError: The store failed.
            ConfigurationError: The store is open already.
        """

    async def ensure_leases(self, partition_ids: Sequence[str]) -> None:
        """Create the leases that do not exist yet, owned by nobody. Several hosts may do so at once.

        What exists keeps its owner, epoch and checkpoint.
        """

    async def list_leases(self) -> list[LeaseSnapshot]:
        """List every lease as it is now, by partition number. One held without an owner is just being acquired."""

    async def acquire_lease(self, partition_id: str, owner: str) -> PartitionLease | None:
        """Acquire a lease that nobody holds, with the next epoch, which is stored before it is returned.

        None where somebody holds it, be it this host. Cancelled, what was acquired is given back, or expires.
        """

    async def steal_lease(self, snapshot: LeaseSnapshot, owner: str) -> PartitionLease | None:
        """Take a lease over from the owner in the snapshot, expired or not, with the next epoch.

        None where it changed hands since. Checkpoints the victim wrote until then are kept.
        Cancelled, what was stolen is given back, or expires.
        """

    async def renew_lease(self, lease: PartitionLease) -> PartitionLease | None:
        """Renew. The same lease with a later `expires_at`, or None where it is lost."""

    async def release_lease(self, lease: PartitionLease) -> bool:
        """Give the lease up, so that another may acquire it at once. False where it was lost already.

        Failed or cancelled, it may be called again.
        """

    async def read_scope_record(self) -> StoredScopeRecord | None:
        """Read the consumer group's record; None where there is none.

        Raises:
            StoreError: The store failed.
        """

    async def write_scope_record(
        self, record: ScopeRecord, replaces: StoredScopeRecord | None
    ) -> StoredScopeRecord | None:
        """Store the consumer group's record by compare-and-swap. None, and nothing stored, where another is there.

        Cancelled or failed, it is stored or not; read it again.

        Args:
            replaces: The record to replace; None to store the first one.

        Raises:
            StoreError: The store failed; whether it stored is not known.
        """

    async def list_subscriptions(self) -> list[StoredSubscription]:
        """List the records of the consumer group's subscriptions, active or not, by name.

        Raises:
            StoreError: The store failed, or holds a record that this version does not know.
        """

    async def read_subscription(self, name: str) -> StoredSubscription | None:
        """Read the record of a subscription; None where there is none.

        Raises:
            StoreError: The store failed, or what it holds is no such record.
        """

    async def write_subscription(
        self, record: SubscriptionRecord, replaces: StoredSubscription | None
    ) -> StoredSubscription | None:
        """Store a subscription's record by compare-and-swap. None, and nothing stored, where another is there.

        Cancelled or failed, it is stored or not; read it again.

        Args:
            record: The record; its name says which subscription.
            replaces: The record to replace; None to store the first one.

        Raises:
            StoreError: The store failed; whether it stored is not known.
        """

    async def delete_subscription(self, stored: StoredSubscription) -> bool:
        """Delete a subscription's record as it was read or written. False, and nothing deleted, where another is there.

        Its checkpoints are deleted after it; of a call that failed or was cancelled in between some may stay, which
        no later subscription of that name finds.

        Raises:
            StoreError: The store failed; whether the record is deleted is not known.
        """

    async def aclose(self) -> None:
        """Free what the store holds. Leases stay as they are. Closing twice is fine."""


class PublisherStateStore(Protocol):
    """Keeps the state of idempotent publishers, per name and partition.

    A name belongs to one publisher of one hub. Its state is written before the first send, when the publisher starts or
    closes, and now and then in between; not per send. Partitions do not wait for each other. A store belongs to one
    event loop.
    """

    async def open(self) -> None:
        """Make the container or tables where there are none. Opening twice is fine.

        Raises:
            StoreError: The store failed.
        """

    async def read_state(self, name: str, partition_id: str) -> StoredPublisherState | None:
        """Read a state; None where there is none.

        Raises:
            StoreError: The store failed, or what it holds is no such state.
            ConfigurationError: The name cannot be one.
        """

    async def write_state(
        self, name: str, partition_id: str, state: PublisherState, replaces: StoredPublisherState | None
    ) -> StoredPublisherState | None:
        """Store a state, durably, by compare-and-swap. None, and nothing stored, where another is there.

        Where the very state is there already, it counts as stored by this call: an earlier one may have failed after it
        was. States of different starts differ by their `claim`.

        Cancelled or failed, it is stored or not, and never later over another one; it may be called again.

        Args:
            replaces: The state to replace, as it was read or written; None to store the first one.

        Raises:
            StoreError: The store failed; whether it stored is not known.
            ConfigurationError: The name or the state cannot be one.
        """

    async def reset_state(self, name: str, partition_id: str) -> None:
        """Delete a state, so that the next start is the first. Nothing happens where there is none.

        A process that still publishes under the state is not shut out, but cannot write it any more.

        Raises:
            StoreError: The store failed; whether the state is deleted is not known.
        """

    async def aclose(self) -> None:
        """Free what the store holds. States stay. Closing twice is fine."""
