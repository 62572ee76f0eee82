"""Interfaces: what the consumer and the producer require of clocks, transports, sources and stores.

Transports, sources and stores have one contract suite each, which every implementation must pass, also a user's own
(`eventpump.testing.conformance`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol, runtime_checkable

from eventpump import homes

if TYPE_CHECKING:
    from eventpump.core.balancer import LeasePlan as LeasePlan
    from eventpump.core.claim import PublisherIntent as PublisherIntent
    from eventpump.core.claim import PublisherState as PublisherState
    from eventpump.core.claim import StoredPublisherState as StoredPublisherState
    from eventpump.core.fleet import FleetView as FleetView
    from eventpump.core.fleet import PartitionBalancer as PartitionBalancer
    from eventpump.core.lease import LeaseSnapshot as LeaseSnapshot
    from eventpump.core.lease import PartitionLease as PartitionLease
    from eventpump.core.router import PartitionRouter as PartitionRouter
    from eventpump.errors import EventPumpError
    from eventpump.eventhubs.decoding import Decoder as Decoder
    from eventpump.eventhubs.events import Checkpoint as Checkpoint
    from eventpump.eventhubs.events import EventData, EventPosition
    from eventpump.eventhubs.events import LastEnqueued as LastEnqueued
    from eventpump.eventhubs.events import MessageContent as MessageContent
    from eventpump.eventhubs.properties import HubProperties as HubProperties
    from eventpump.eventhubs.properties import PartitionProperties as PartitionProperties


class Clock(Protocol):
    """The time: `monotonic` for durations and deadlines, `time` for times that other machines read."""

    def monotonic(self) -> float:
        """Seconds since an arbitrary fixed moment; never decreases. Includes time during which the machine sleeps."""

    def time(self) -> float:
        """Seconds since the Unix epoch."""


@runtime_checkable
class MachineClock(Clock, Protocol):
    """A clock that the processes of one machine share and that cannot be set; for `SqliteLeaseStore`."""

    @property
    def boot_id(self) -> str | None:
        """The boot that `boot_time` counts from; readings of different boots cannot be compared. None if unknown."""

    def boot_time(self) -> float:
        """Seconds since that boot, including time during which the machine sleeps; never decreases."""


# ---------------------------------------------------------------------------------------------- transport

CLOSE_TIMEOUT: Final = 5.0
"""Seconds that the library waits for a link, a transport or a store to close, before it leaves that to go on alone."""


@dataclass(frozen=True, slots=True)
class ReceiveLinkSpec:
    """What a receive link reads, and how.

    Args:
        hub: The event hub's name.
        consumer_group: The consumer group to read with.
        partition_id: The partition to read.
        position: Where to begin.
        owner_level: The owner level (epoch) of an exclusive reader; None to share the partition. Default: None.
        receiver_name: A name that the service shows in the error texts of other readers; None for no name. Default:
            None.
        track_last_enqueued: Whether the service annotates every event with its partition's newest event. Default:
            False.
        max_message_size: The largest message that the link accepts, in bytes. Default: 20 MiB.
        delivery_interval: Seconds for which what arrives may be left unread, to be read at once with what follows. A
            transport may ignore it. Default: 0.0.
    """

    hub: str
    consumer_group: str
    partition_id: str
    position: EventPosition
    owner_level: int | None = None
    receiver_name: str | None = None
    track_last_enqueued: bool = False
    max_message_size: int = 20 * 1024 * 1024
    delivery_interval: float = 0.0


class ReceiveSink(Protocol):
    """Receives what arrives on a receive link. Called on the event loop; the methods must not block and not raise."""

    def messages(self, batch: list[bytes]) -> None:
        """Accept a batch of messages.

        Args:
            batch: The encoded messages, in order. The list belongs to the sink from now on.
        """

    def detached(self, error: EventPumpError) -> None:
        """Called at most once, when the link ends for any reason other than `aclose`. No further calls follow.

        Args:
            error: Why it ended.
        """


class ReceiveLink(Protocol):
    """An attached receive link. It starts without credit, so nothing arrives before `set_credit`."""

    @property
    def max_message_size(self) -> int:
        """The largest message the link carries, in bytes."""

    def set_credit(self, credit: int) -> None:
        """Set how many more messages the service may send from now on.

        Args:
            credit: The number of messages; 0 to stop. Messages that are already under way still arrive.
        """

    async def probe(self, timeout: float) -> bool | None:
        """Ask the service whether this link is alive (AMQP 2.7.4, a flow with echo), and wait for the answer.

        Messages that the service sent before its answer have arrived when this returns. The credit does not change. If
        the call is cancelled, an answer is ignored. Not every service answers, although the standard requires it: see
        `core.silence`.

        Args:
            timeout: Seconds to wait for the answer.

        Returns:
            True if the service answered in time, False if it did not. None if the question could not be asked: the
            transport does not support it (uamqp), or the link has ended.
        """

    def drop_connection(self, reason: str) -> None:
        """Drop the connection that carries the link, or carried it, without closing it in order.

        All links on it end with `ConnectionLostError`. Does nothing if that connection has ended.

        Args:
            reason: The text of the error.
        """

    async def aclose(self) -> None:
        """Detach. The sink is not called from now on.

        May be called more than once. If the call is cancelled, the link still ends.
        """


@dataclass(frozen=True, slots=True)
class SendLinkSpec:
    """What a send link sends to.

    Args:
        hub: The event hub's name.
        partition_id: The partition; None for the gateway, which chooses a partition per message. Default: None.
        properties: Link properties to attach with; their values are AMQP types. Default: none.
        desired_capabilities: Capabilities to request at attach. Default: none.
    """

    hub: str
    partition_id: str | None = None
    properties: Mapping[str, object] = field(default_factory=dict)
    desired_capabilities: Sequence[str] = ()


class PostedMessage(Protocol):
    """A message that was given to `SendLink.post`."""

    def withdraw(self) -> None:
        """End the wait for its outcome, which is not reported any more. Does nothing once it was.

        If the first byte was not passed to the connection yet, the message is not sent.
        """


class SendLink(Protocol):
    """An attached send link."""

    @property
    def max_message_size(self) -> int:
        """The largest message that the service accepts on this link, in bytes."""

    @property
    def properties(self) -> Mapping[str, object]:
        """The link properties with which the service answered the attach."""

    @property
    def is_attached(self) -> bool:
        """Whether the link is attached. A send that fails meanwhile was refused, or not answered in time."""

    async def send(self, message: bytes, *, message_format: int = 0, on_sent: Callable[[], None] | None = None) -> None:
        """Send one encoded message and wait until the service has accepted it.

        Calls may overlap; messages are sent in the order of the calls. If a call is cancelled before the first byte was
        passed to the connection, the message is not sent; later, its outcome is unknown.

        Args:
            message: The encoded message.
            message_format: The AMQP message format. Default: 0.
            on_sent: Called when the first byte is passed to the connection; not if the send ends before. Default: None.

        Raises:
            EventTooLargeError: The message is larger than `max_message_size`, and nothing was sent; or, with `limit`
                None, the service refused it as too large.
            ServiceError: The service refused the message, or the link or the connection ended. After
                `ServiceTimeoutError`, `LinkDetachedError` and `ConnectionLostError` the outcome is unknown.
        """

    def post(
        self,
        message: bytes,
        on_outcome: Callable[[BaseException | None], None],
        *,
        message_format: int = 0,
        on_sent: Callable[[], None] | None = None,
    ) -> PostedMessage:
        """Send one encoded message as `send` does, without waiting for its outcome.

        Args:
            message: The encoded message.
            on_outcome: Called once, after this call has returned, unless the message is withdrawn before: with None if
                the service has accepted the message, else with what `send` would have raised. It must not raise.
            message_format: As of `send`.
            on_sent: As of `send`; it may be called within this call.

        Raises:
            EventTooLargeError: As of `send`.
            ServiceError: The link has ended.
        """

    async def aclose(self) -> None:
        """Detach. Sends that are waiting fail with `LinkDetachedError`. May be called more than once."""


class HubDirectory(Protocol):
    """Reads the properties of hubs and partitions."""

    async def get_hub_properties(self, hub: str) -> HubProperties:
        """Read a hub's properties.

        Args:
            hub: The hub's name.

        Raises:
            ServiceError: The hub does not exist, the credential gives no right to it, or there was no answer.
        """

    async def get_partition_properties(self, hub: str, partition_id: str) -> PartitionProperties:
        """Read a partition's properties.

        Args:
            hub: The hub's name.
            partition_id: The partition.

        Raises:
            ServiceError: As for `get_hub_properties`, or the partition does not exist.
        """


class SendLinkOpener(Protocol):
    """Attaches send links."""

    async def open_send_link(self, spec: SendLinkSpec) -> SendLink:
        """Attach a send link, and wait until it is attached. If the call is cancelled, no link remains.

        Args:
            spec: What the link sends to.

        Raises:
            ServiceError: The service refused the link, or there was no answer.
        """


class EventSender(Protocol):
    """Sends events to a hub: an `EventProducer` or a `BufferedProducer`."""

    async def send(self, event: EventData, /, *, partition_key: str | None = None) -> Awaitable[object] | None:
        """Send an event.

        Args:
            event: The event.
            partition_key: Its partition key; None for no key.

        Returns:
            None once the event is stored; or what to await until it is.

        Raises:
            EventPumpError: It is not known to be stored.
        """

    async def aclose(self, *, deadline: float | None = None) -> None:
        """Close it.

        Args:
            deadline: Seconds that closing may take; None for a time of its own.
        """


class Transport(HubDirectory, SendLinkOpener, Protocol):
    """A client for one namespace. Connects on first use, and again after a connection was lost.

    Links end with their connection: their sinks and senders are notified, and open new ones. Attempts to connect are
    shared by all callers, with the transport's own back-off between them.
    """

    @property
    def fully_qualified_namespace(self) -> str:
        """The namespace's host name, in lower case."""

    async def open_receive_link(self, spec: ReceiveLinkSpec, sink: ReceiveSink) -> ReceiveLink:
        """Attach a receive link. If the call is cancelled, no link remains.

        Args:
            spec: What the link reads.
            sink: Receives the messages.

        Raises:
            ServiceError: The service refused the link, or could not be reached.
        """

    async def open_send_link(self, spec: SendLinkSpec) -> SendLink:
        """Attach a send link. If the call is cancelled, no link remains.

        Args:
            spec: What the link sends to.

        Raises:
            ServiceError: The service refused the link, or could not be reached.
        """

    async def aclose(self) -> None:
        """Close all links and the connection. May be called more than once."""


# ------------------------------------------------------------------------------------------------ sources


class SourceLink(Protocol):
    """An open partition of an `EventSource`. It starts without credit, so nothing arrives before `set_credit`."""

    def set_credit(self, credit: int) -> None:
        """Set how many more events the source may deliver from now on. It replaces the credit set before.

        Args:
            credit: The number of events; 0 to stop.
        """

    async def aclose(self) -> None:
        """Close it. The sink is not called from now on.

        May be called more than once. If the call is cancelled, the link still ends.
        """


@runtime_checkable
class ProbedSourceLink(SourceLink, Protocol):
    """A `SourceLink` over a connection that can be dead: a host checks it when it is silent, as it does a hub's."""

    async def probe(self, timeout: float) -> bool | None:
        """Ask the other side whether this link is alive; see `ReceiveLink.probe`."""

    def drop_connection(self, reason: str) -> None:
        """Drop the connection that carries the link; see `ReceiveLink.drop_connection`."""


class EventSource(Protocol):
    """Where a host or a reader gets events from, instead of from a hub: `EventProcessorHost(source=...)`.

    Partitions hold events under consecutive sequence numbers, as those of a hub; numbers may be missing. Every event
    has an offset, from which reading can continue: an opaque text, neither empty nor "-1" nor "@latest". Events are
    passed on as encoded messages; `ReceivedEvent.build(...).raw` makes one. A source belongs to one event loop, and to
    its user: hosts and readers may share it, and do not close it.
    """

    @property
    def fully_qualified_namespace(self) -> str:
        """The first part of the name under which stores keep leases and checkpoints."""

    @property
    def hub(self) -> str:
        """The second part of that name. It must be valid as the name of a hub."""

    async def partitions(self) -> HubProperties:
        """Return the partitions, and when the source was created.

        The checkpoints of a source with another creation time are not used: its numbers mean other events.

        Raises:
            ServiceError: The source cannot be reached.
        """

    async def partition_properties(self, partition_id: str) -> PartitionProperties:
        """Return which events a partition holds now.

        Args:
            partition_id: The partition.

        Raises:
            ServiceError: The source cannot be reached, or there is no such partition.
        """

    async def open(
        self,
        partition_id: str,
        position: EventPosition,
        sink: ReceiveSink,
        *,
        consumer_group: str = "$Default",
        owner_level: int | None = None,
    ) -> SourceLink:
        """Open a partition for reading. If the call is cancelled, nothing stays open.

        The sink gets runs of events in order, none of them empty, and never more events than the credit. It is not
        called from within `set_credit`. When the link ends other than by `aclose`, the sink gets the error, once:

        * A `ServiceError` says by its `recovery` whether the link is opened again after the last event delivered.
        * `SourceEndedError` says that no event follows in this partition.
        * Every other error ends reading: a reader raises it, a host leaves the partition and tries again later.

        Args:
            partition_id: The partition.
            position: Where to begin. Beyond the end: with the first event at or after it, once there is one.
            sink: Receives the events.
            consumer_group: The consumer group of a live hub; other sources have none and ignore it. Default:
                "$Default".
            owner_level: The owner level of an exclusive reader of a live hub; other sources ignore it. Default: None.

        Raises:
            EventPumpError: As above.
        """

    async def aclose(self) -> None:
        """Close all links, without an error, and release what the source holds. May be called more than once."""


# ------------------------------------------------------------------------------------------------- stores


@dataclass(frozen=True, slots=True)
class ConsumerScope:
    """What a store's leases and checkpoints belong to: one consumer group of one hub.

    Args:
        fully_qualified_namespace: The namespace's host name.
        hub: The hub's name.
        consumer_group: The consumer group.
    """

    fully_qualified_namespace: str
    hub: str
    consumer_group: str


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """A record as it was read.

    Args:
        body: What it holds.
        version: Identifies this state of the record to its store; opaque.
    """

    body: bytes
    version: str


@dataclass(frozen=True, slots=True)
class ListedRecord:
    """A record in a listing.

    Args:
        version: As of `StoredRecord`.
        body: What it holds; None where a listing of this store has no bodies. Default: None.
    """

    version: str
    body: bytes | None = None


class RecordStore(Protocol):
    """Stores records: small documents under names, each replaced as a whole by compare-and-swap.

    A name is printable text of at most 1,024 characters in parts separated by "/": no part is empty, ends with ".", or
    has a "\\", "?" or "#", and no name is the directory of another. A body has 1 byte to 4 MiB. Others are refused with
    `ValueError`. Calls for different records do not wait for each other. A store belongs to one event loop; several
    stores may have the same records.
    """

    async def open(self) -> None:
        """Create what the records are kept in, if it does not exist. May be called more than once.

        Raises:
            StoreError: The store failed.
            ConfigurationError: What the records are kept in does not exist, or cannot be used.
        """

    async def read(self, name: str) -> StoredRecord | None:
        """Return a record; None if there is none.

        Args:
            name: The record's name.

        Raises:
            StoreError: The store failed.
        """

    async def swap(self, name: str, body: bytes, replaces: str | None) -> str | None:
        """Store a record, durably and whole, in place of the one with a version.

        If the record has this body already, the call succeeds: an earlier call may have stored it, whose answer was
        lost. So bodies of two writers that must not be confused hold random text. A call that failed or was cancelled
        may have stored the record; it is never stored later, over another one. The call may be repeated.

        Args:
            name: The record's name.
            body: What it holds from now on.
            replaces: The version of the record to replace; None to store one where there is none.

        Returns:
            The new version, which no record had before; None, and nothing is stored, if the record has another version
            and another body.

        Raises:
            StoreError: The store failed; the record may be stored.
        """

    async def list(self, prefix: str) -> dict[str, ListedRecord]:
        """Return the records whose names begin with a prefix, by name.

        Args:
            prefix: It ends with "/", or is "" for all.

        Raises:
            StoreError: The store failed.
        """

    async def delete(self, name: str, version: str | None = None) -> bool:
        """Delete a record, as it was read.

        Args:
            name: The record's name.
            version: Its version; None for any, of a record that is not replaced by others at the same time. Default:
                None.

        Returns:
            Whether there is no such record now; False, and nothing is deleted, if there is one of another version.

        Raises:
            StoreError: The store failed; the record may be deleted.
        """

    async def aclose(self) -> None:
        """Release the store's resources. Records do not change. May be called more than once."""


class LeaseStore(Protocol):
    """Stores one lease per partition of a consumer group, with the position up to which its events are processed.

    A lost race is a return value (None or False). A failure of the store is a `StoreError`, and so is a lease that was
    never created. A lease's `expires_at` is a time of the clock's `monotonic`, counted from before the request was
    sent. Every host may acquire an expired lease; until one has, its owner may still renew it, write checkpoints under
    it and release it. Calls for different partitions do not wait for each other. A store belongs to one host and one
    event loop.
    """

    @property
    def lease_duration(self) -> float:
        """Seconds for which a lease is valid without renewal."""

    @property
    def records(self) -> RecordStore:
        """The records of the consumer group, once the store is open; opened and closed with it.

        They are no leases, and belong to the consumer group alone. Hosts keep what they agree on in them, and the
        checkpoints of subscriptions.
        """

    async def open(self, scope: ConsumerScope, *, read_only: bool = False) -> None:
        """Bind the store to a consumer group of a hub, and create its tables. Called once.

        A store never shares what it has with those of another hub, nor with those of the hub of that name in another
        namespace: it keeps them apart, or refuses the later one.

        Args:
            scope: The consumer group.
            read_only: Whether it is opened to read: nothing is created, and only `list`, `read_checkpoint`, and `read`
                and `list` of its records are called. Default: False.

        Raises:
            StoreError: The store failed; it may be called again, or closed.
            ConfigurationError: The store is open already, or cannot be opened, as what it is kept in does not exist or
                belongs to another hub; nothing of it is left open. The caller does not close it then. From `ensure`, if
                that has changed since.
        """

    async def ensure(self, partition_ids: Sequence[str]) -> None:
        """Create the leases that do not exist yet, without an owner. Several hosts may do so at the same time.

        Existing leases keep their owner, epoch and checkpoint.

        Args:
            partition_ids: The partitions.

        Raises:
            StoreError: The store failed.
        """

    async def list(self) -> list[LeaseSnapshot]:
        """Return the leases as they are now, ordered by partition number: of every partition given to `ensure`.

        A lease that is held and has no owner is being acquired.

        Raises:
            StoreError: The store failed.
        """

    async def acquire(self, snapshot: LeaseSnapshot, owner: str, *, held: bool = False) -> PartitionLease | None:
        """Acquire a lease with the next epoch, which is stored before the lease is returned.

        Checkpoints that a former owner wrote until then are kept. If the call is cancelled, an acquired lease is
        released, or expires.

        Args:
            snapshot: The lease as `list` returned it.
            owner: The name of the host that acquires it.
            held: Whether to take it from the owner that the snapshot names, expired or not; without, it is acquired
                only if no host holds it. Default: False.

        Returns:
            The lease; None if a host holds it, including this one, and with `held` if its owner has changed since the
            snapshot.

        Raises:
            StoreError: The store failed.
        """

    async def renew(self, lease: PartitionLease) -> PartitionLease | None:
        """Renew a lease. Calls for one lease may overlap.

        Args:
            lease: The lease, as it was acquired or renewed.

        Returns:
            The same lease with a later `expires_at`; None if it is lost.

        Raises:
            StoreError: The store failed; the lease may be renewed.
        """

    async def release(self, lease: PartitionLease) -> bool:
        """Release a lease, so that another host can acquire it at once. May be called again after it failed.

        Args:
            lease: The lease.

        Returns:
            False if it was lost before.

        Raises:
            StoreError: The store failed; the lease may be released.
        """

    async def read_checkpoint(self, partition_id: str) -> Checkpoint | None:
        """Return the partition's checkpoint; None if there is none.

        Args:
            partition_id: The partition.

        Raises:
            StoreError: The store failed.
        """

    async def write_checkpoint(self, lease: PartitionLease, checkpoint: Checkpoint, *, backwards: bool = False) -> bool:
        """Store a checkpoint, if the lease is still held.

        A write that failed or was cancelled may have been stored; it is never stored later, over a newer one.

        Args:
            lease: The lease of the partition.
            checkpoint: The checkpoint.
            backwards: Whether it replaces one with a higher sequence number; otherwise it is not stored then, and True
                is returned. Default: False.

        Returns:
            False if the lease is lost; then nothing is stored.

        Raises:
            StoreError: The store failed; the checkpoint may be stored.
        """

    async def aclose(self) -> None:
        """Release the store's resources. Leases do not change. May be called more than once."""


@runtime_checkable
class SharedLeaseStore(Protocol):
    """What a `LeaseStore` also has whose leases hosts share with other programs: what a host should report of those."""

    def attend(self, renew_interval: float, notify: Callable[[str | None, str], None]) -> None:
        """Called once by the host that uses the store, before it is opened.

        Args:
            renew_interval: Seconds between the host's renewals.
            notify: Called with a partition, or None, and with what is wrong there and what to do about it. The host
                reports it. Must not be called twice with the same.
        """


class PublisherStateStore(Protocol):
    """Stores the state of idempotent publishers, per name and partition.

    A name belongs to one publisher of one hub. Its state is written before the first send, when the publisher starts
    and closes, and every 30 seconds in between while it publishes; not per send. Calls for different partitions do not
    wait for each other. A store belongs to one event loop.
    """

    async def open(self) -> None:
        """Create the tables if they do not exist. May be called more than once.

        Raises:
            StoreError: The store failed.
            ConfigurationError: What the states are kept in does not exist.
        """

    async def read_state(self, name: str, partition_id: str) -> StoredPublisherState | None:
        """Return a state; None if there is none.

        Args:
            name: The publisher's name.
            partition_id: The partition.

        Raises:
            StoreError: The store failed, or what it holds is not a publisher's state.
            ConfigurationError: The store does not allow this name.
        """

    async def write_state(
        self, name: str, partition_id: str, state: PublisherState, replaces: StoredPublisherState | None
    ) -> StoredPublisherState | None:
        """Store a state durably, by compare-and-swap.

        If the same state is stored already, the call succeeds: an earlier call may have failed after storing it. States
        of different starts differ in their `claim`. A call that failed or was cancelled may have stored the state; it
        is never stored later, over another one. The call may be repeated.

        Args:
            name: The publisher's name.
            partition_id: The partition.
            state: The state.
            replaces: The state to replace, as it was read or written; None to store the first one.

        Returns:
            The stored state; None if another one is stored than `replaces`.

        Raises:
            StoreError: The store failed; the state may be stored.
            ConfigurationError: The store does not allow this name or state.
        """

    async def reset_state(self, name: str, partition_id: str) -> None:
        """Delete a state, so that the next start is a first one. Does nothing if there is none.

        A process that still publishes with this state is not stopped, but cannot write it any more.

        Args:
            name: The publisher's name.
            partition_id: The partition.

        Raises:
            StoreError: The store failed; the state may be deleted.
        """

    async def aclose(self) -> None:
        """Release the store's resources. States do not change. May be called more than once."""


if not TYPE_CHECKING:  # to checkers it would mean that every name exists
    __all__, __getattr__, __dir__ = homes.public(
        __name__,
        {
            "core.balancer": "LeasePlan",
            "core.claim": "PublisherIntent PublisherState StoredPublisherState",
            "core.fleet": "FleetView PartitionBalancer",
            "core.lease": "LeaseSnapshot PartitionLease",
            "core.router": "PartitionRouter",
            "eventhubs.decoding": "Decoder",
            "eventhubs.events": "Checkpoint LastEnqueued MessageContent",
            "eventhubs.properties": "HubProperties PartitionProperties",
        },
        own=[name for name, made in globals().items() if getattr(made, "__module__", None) == __name__],
    )
