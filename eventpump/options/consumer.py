"""Options of hosts and readers."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeAlias, TypedDict

from pydantic import BeforeValidator, Field, PlainValidator

from eventpump.core.balancers import FairBalancer, check_balancer
from eventpump.core.checkpoint import DEFAULT_SUBSCRIPTION, CheckpointPolicy
from eventpump.core.failures import FailureStep
from eventpump.core.fleet import PartitionBalancer
from eventpump.core.starts import OnDataLoss
from eventpump.core.streams import Selection, is_plain_function, takes_one_argument
from eventpump.errors import ConfigurationError
from eventpump.eventhubs.codecs import EventDecoding, PayloadCodec, codecs_of
from eventpump.eventhubs.envelope import partition_key_of
from eventpump.eventhubs.events import LATEST_OFFSET, START_OFFSET, EventPosition, ReceivedEvent
from eventpump.interfaces import EventSender
from eventpump.options.base import HubName, Name, RetryOptions, Seconds, SettingsModel, check_hub, completed_by
from eventpump.options.connection import ClientOptions
from eventpump.telemetry.interface import ClientTelemetry, checked

if TYPE_CHECKING:
    from eventpump.telemetry.telemetry import Telemetry
else:  # its module imports OpenTelemetry
    Telemetry = ClientTelemetry

StartPosition: TypeAlias = str | int | datetime | timedelta | EventPosition
"""Where to begin: "earliest" or "latest", a sequence number, a time, a timedelta back from now, an offset ("-1" is the
start, "@latest" the end), or a position."""

_EXPECTED: Final = (
    'must be "earliest", "latest", a sequence number, a datetime with a time zone, a timedelta, an offset, or an '
    "EventPosition"
)


@dataclass(frozen=True, slots=True)
class RelativePosition(EventPosition):
    """A time that was given by how long ago it is: another one at each start of a program."""


def start_position(value: object) -> EventPosition:
    """Return the position that a value given by the user stands for. Raises `ValueError` if it is none."""
    match value:
        case EventPosition():
            return value
        case "earliest":
            return EventPosition.earliest()
        case "latest":
            return EventPosition.latest()
        case str():
            # An offset is opaque, but never without a digit: this is a word that was meant to be another.
            if value != LATEST_OFFSET and not any(map(str.isdigit, value)):
                raise ValueError(f"{_EXPECTED}, not {value[:40]!r}")
            return EventPosition.at_offset(value)
        case bool():
            pass
        case int():
            return EventPosition.at_sequence_number(value)
        case datetime():
            return EventPosition.at_enqueued_time(value)
        case timedelta():
            return RelativePosition(enqueued_time=datetime.now(UTC) - abs(value), inclusive=True)
    raise ValueError(_EXPECTED)


def _host_start(value: object) -> EventPosition:
    position = start_position(value)
    if position.offset == LATEST_OFFSET and position.inclusive:
        # A host stores its start as a checkpoint, which cannot express this.
        raise ValueError('"@latest" cannot be inclusive here')
    return position


def _check_initial_position(value: object) -> Mapping[str, EventPosition] | EventPosition:
    if not isinstance(value, Mapping):
        return _host_start(value)
    positions: dict[str, EventPosition] = {}
    for partition_id, position in value.items():
        if not isinstance(partition_id, str):
            raise ValueError("its keys must be partition ids, which are text")
        positions[partition_id] = _host_start(position)
    return positions


def _check_end(value: object) -> EventPosition | None:
    if value is None:
        return None
    position = start_position(value)
    if position.offset not in {None, "@latest"}:
        raise ValueError('an offset has no order: only "@latest" can be an end')
    return position if isinstance(value, EventPosition) else replace(position, inclusive=True)


LINK_RETRY: Final = RetryOptions(max_retries=None, base_delay=0.2, max_delay=30.0)
HANDLER_RETRY: Final = RetryOptions(max_retries=None, base_delay=0.5, max_delay=30.0)


def _check_codecs(value: object) -> tuple[PayloadCodec, ...] | None:
    return codecs_of("decode", value) or None


class FeedOptions(ClientOptions, total=False):
    """Keyword arguments of the clients that receive: how events are read ahead."""

    consumer_group: str
    """The consumer group to read with. Default: "$Default"."""
    prefetch_events: int
    """The most events that are received ahead of their delivery, per partition. Default: 3,000."""
    prefetch_bytes: int
    """The most bytes that are received ahead, per partition. Credit is granted by estimated sizes: larger messages than
    before that are already under way come on top, and so does the batch that is being processed. Default: 8,388,608."""
    strict_prefetch_bytes: bool
    """Whether credit is granted by `max_message_size`, so that `prefetch_bytes` is never exceeded. Fewer events are
    then received at a time. Default: False."""
    delivery_interval: float
    """Seconds for which events may be left in the socket after others were read, to be read and delivered together: at
    a thousand events per second and more, one by one, that saves most of the CPU time. No event is delivered later by
    more than that, and the first after a silence at once. At most a quarter of `idle_timeout`; a lost connection may be
    noticed by so much later. Of clients on one transport the smallest counts. The native transport on TCP and TLS does
    so; others deliver at once. 0 to deliver what has arrived. Default: 0.0."""
    track_last_enqueued: bool
    """Whether the service adds to every event the number, offset and time of the partition's newest event. Without it,
    lag is known only for silent partitions. Default: False."""
    decode: EventDecoding | None
    """Decompresses or decrypts events: a `PayloadCodec`, or several. An event is decoded by those that its
    `content_encoding` names, from the last name on; every other event is delivered as it is. It is decoded when its
    body is first accessed, once for all subscriptions. If that fails, accessing the body raises `DecodeError`, which a
    host does not retry: `on_retries_exhausted` decides what follows. None to deliver events as they are. Default:
    None."""
    max_message_size: int
    """The largest message that a receive link accepts, in bytes. Default: 20,971,520."""
    link_retry: RetryOptions
    """The delays, in seconds, before a failed link is opened again. After a lost connection the delay does not grow and
    no retry is counted: only attempts to connect are delayed then, by 5 s at most. With a `max_retries`, reading ends
    with the error of the last link; a host then leaves the partition and takes it again later. Default:
    `RetryOptions(max_retries=None, base_delay=0.2, max_delay=30.0)`."""
    startup_timeout: float
    """Seconds to keep trying to reach the service, and a host's store, at the start. After the first success there is
    no limit. Default: 60.0."""
    telemetry: Telemetry | None
    """Records spans and metrics with OpenTelemetry: an `eventpump.telemetry.Telemetry`. None to record nothing.
    Default: None."""


class FeedSettings(SettingsModel):
    """How a partition's events are read ahead; see `FeedOptions`."""

    hub: HubName
    consumer_group: Name = "$Default"
    prefetch_events: int = Field(default=3000, ge=1, le=1_000_000)
    prefetch_bytes: int = Field(default=8 * 1024 * 1024, ge=1024)
    strict_prefetch_bytes: bool = False
    delivery_interval: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    track_last_enqueued: bool = False
    decode: Annotated[tuple[PayloadCodec, ...] | None, PlainValidator(_check_codecs)] = None
    max_message_size: int = Field(default=20 * 1024 * 1024, ge=1024)
    link_retry: Annotated[RetryOptions, completed_by(LINK_RETRY)] = LINK_RETRY
    startup_timeout: Seconds = 60.0
    telemetry: Annotated[Any, PlainValidator(checked)] = None


class Park:
    """A failure policy: store events that cannot be processed elsewhere, and go on after them.

    An event is stored before the position passes it: at least once, across a crash too. If that fails, it is reported
    and tried again, and no later event of the partition is delivered meanwhile.

    An event in a hub is the one received, with its key, and with these application properties beside its own:
    `eventpump.parked.hub`, `.partition`, `.sequence_number`, `.offset` and `.consumer_group` (where it came from),
    `.error` and `.message` (what it failed with), `.attempts`, `.first_failed` and `.host`. `eventpump parked` shows
    such events, and sends them again.

    Args:
        to: The name of another hub in the same namespace; or an `EventProducer` or `BufferedProducer` of the program's
            own, which the host does not close; or a coroutine function that is called with the `PartitionContext`, the
            event and the error, and returns when the event is stored.

    Raises:
        ConfigurationError: Events cannot be parked there.
    """

    __slots__ = ("to",)
    __match_args__ = ("to",)

    def __init__(self, to: str | EventSender | Callable[[Any, ReceivedEvent, Exception], Awaitable[object]]) -> None:
        if isinstance(to, str):
            try:
                check_hub(to)
            except ValueError as error:
                raise ConfigurationError("to", str(error)) from None
        elif getattr(to, "is_idempotent", False):
            problem = "an idempotent EventProducer cannot send with a key; give one that is not, or a BufferedProducer"
            raise ConfigurationError("to", problem)
        elif isinstance(to, type) or not (callable(to) or callable(getattr(to, "send", None))):
            raise ConfigurationError("to", "must be the name of a hub, a producer, or a coroutine function")
        self.to = to

    def __repr__(self) -> str:
        return f"Park({self.to!r})"


FailurePolicy: TypeAlias = Literal["retry", "skip", "stop", "stop_partition"] | Park
ExhaustedPolicy: TypeAlias = Literal["skip", "stop", "stop_partition"] | Park


def failure_step(policy: FailurePolicy) -> FailureStep:
    """Return what a failure policy does."""
    return FailureStep.PARK if isinstance(policy, Park) else FailureStep(policy)


def _check_policy(value: object) -> object:
    if not isinstance(value, Park) and value not in ("retry", "skip", "stop", "stop_partition"):
        raise ValueError('must be "retry", "skip", "stop", "stop_partition" or Park(to)')
    return value


def _check_exhausted(value: object) -> object:
    if not isinstance(value, Park) and value not in ("skip", "stop", "stop_partition"):
        raise ValueError('must be "skip", "stop", "stop_partition" or Park(to)')
    return value


def _checked_balancer(value: object) -> object:
    check_balancer(value)
    return value


def _unless_none(check: Callable[[object], object]) -> Callable[[object], object]:
    return lambda value: None if value is None else check(value)


class KeyedSettings(SettingsModel):
    """How the events of a partition are processed at the same time, but in order per key.

    Args:
        concurrency: The most calls of the handler at a time, per partition.
        max_batch_per_key: The most events of a key that the handler is called with at once.
        max_events_in_flight: The most events that are taken from the cache and not processed yet, per partition; at
            least `concurrency`.
        max_bytes_in_flight: The most bytes of them. A single larger event is processed alone.
        max_ahead: The most events that are taken above the first one that is not processed, per partition; at least
            `concurrency`. A key that is retried or parked holds up no other one until there are so many.
    """

    concurrency: int = Field(default=32, ge=1, le=100_000)
    max_batch_per_key: int = Field(default=1, ge=1, le=100_000)
    max_events_in_flight: int = Field(default=1000, ge=1, le=1_000_000)
    max_bytes_in_flight: int = Field(default=8 * 1024 * 1024, ge=1)
    max_ahead: int = Field(default=10_000, ge=1, le=10_000_000)

    def model_post_init(self, context: object, /) -> None:
        """Refuse bounds with which the concurrency cannot be reached."""
        for name in ("max_events_in_flight", "max_ahead"):
            if getattr(self, name) < self.concurrency:
                problem = f"must be at least concurrency, {self.concurrency}: fewer calls could run than that"
                raise ConfigurationError(name, problem)


def _check_partition_id(value: object) -> object:
    if not isinstance(value, str):
        raise ValueError(f'must be text such as "0", not {type(value).__name__}')
    return value


class ReaderOptions(FeedOptions, total=False):
    """Keyword arguments of `PartitionReader`."""

    position: StartPosition
    """Where to begin: "earliest", "latest", a sequence number, a datetime with a time zone, a timedelta back from now,
    an offset ("-1" and "@latest" are the start and the end too), or an `EventPosition`. Reading begins after the event
    at the position, or, if it is inclusive, with it. Default: `EventPosition.earliest()`."""
    end: StartPosition | None
    """Where to end: a sequence number, a datetime with a time zone, or "@latest" for the newest event at the start,
    each of them included; or an `EventPosition`, included if it is inclusive. None to read forever. Default: None."""
    owner_level: int | None
    """The owner level (epoch) of an exclusive reader, 0 or more: the service disconnects readers with a lower one or
    none. None to share the partition. Default: None."""
    receiver_name: str | None
    """A name that the service shows in the error texts of other readers; None for no name. Default: None."""
    on_data_loss: Literal["earliest", "latest", "fail"] | None
    """What to do if events that were to be read are gone: "earliest" and "latest" log a warning and continue at the
    oldest retained event or at the partition's end; "fail" raises `DataLossError`. None means "earliest" if retention
    has removed them, and "fail" if the hub was deleted and recreated while it was read. Default: None."""


class ReaderSettings(FeedSettings):
    """What a reader reads; see `ReaderOptions`."""

    partition_id: Annotated[Name, BeforeValidator(_check_partition_id)]
    position: Annotated[EventPosition, PlainValidator(start_position)] = EventPosition.earliest()
    end: Annotated[EventPosition | None, PlainValidator(_check_end)] = None
    owner_level: int | None = Field(default=None, ge=0, lt=2**63)
    receiver_name: Name | None = None
    on_data_loss: OnDataLoss | None = None


SubscriptionPosition: TypeAlias = StartPosition
"""Where a subscription begins: as a host."""


def sought_position(option: str, value: object, *, inclusive: bool = False) -> EventPosition:
    """Return the position that a value given by the user stands for, as `start` of a subscription does.

    Args:
        inclusive: Whether a plain number, time or offset includes the event there.

    Raises:
        ConfigurationError: The value is not a position.
    """
    try:
        position = _host_start(value)
    except ValueError as error:
        raise ConfigurationError(option, str(error)) from None
    if inclusive and not isinstance(value, EventPosition) and position.offset not in {START_OFFSET, LATEST_OFFSET}:
        position = replace(position, inclusive=True)
    return position


def _check_subscription_start(value: object) -> Mapping[str, EventPosition] | EventPosition:
    if not isinstance(value, Mapping):
        return _host_start(value)
    if not all(isinstance(each, str) for each in value):
        raise ValueError("its keys must be partition ids, which are text")
    return {each: _host_start(position) for each, position in value.items()}


def _partition_key(event: ReceivedEvent) -> str | None:
    """Return the partition key that an event was sent with: what `keys` are compared with without a `key`."""
    # Not its `partition_key`, which keeps the decoded message for as long as the event is held.
    return partition_key_of(event.raw)


def _check_function(value: object) -> object:
    if not is_plain_function(value):
        raise ValueError("must be a plain function that is called with an event, not an async or generator function")
    assert callable(value)
    if not takes_one_argument(value):
        raise ValueError(f"must take one argument, the event; its parameters are {inspect.signature(value)}")
    return value


def _check_keys(value: object) -> frozenset[Hashable]:
    if isinstance(value, str | bytes | bytearray) or not isinstance(value, Collection):
        raise ValueError("must be a collection of keys, such as a set, and not a single key")
    try:
        keys = frozenset(value)
    except TypeError as error:
        raise ValueError(f"must have keys that can be hashed: {error}") from None
    if not keys:
        raise ValueError("must have at least one key: without any, no event would ever be delivered")
    return keys


class SubscriptionSettings(SettingsModel):
    """A subscription, and which of its host's options it has in its own way; see `SubscriptionOptions`.

    Args:
        name: The name: 1 to 64 letters, digits, "_" and "-".
    """

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    start: Annotated[Any, PlainValidator(_check_subscription_start)] = EventPosition.latest()
    catch_up: Literal["shared"] | None = None
    catch_up_group: Name | None = None
    slow_after: Seconds = 60.0
    on_slow: Literal["hold", "suspend"] = "hold"
    key: Annotated[Any, PlainValidator(_unless_none(_check_function))] = None
    keys: Annotated[Any, PlainValidator(_unless_none(_check_keys))] = None
    filter: Annotated[Any, PlainValidator(_unless_none(_check_function))] = None
    checkpoint_policy: CheckpointPolicy | None = None
    max_batch_size: int | None = Field(default=None, ge=1, le=100_000)
    call_when_idle: bool | None = None
    failure_policy: Annotated[FailurePolicy | None, PlainValidator(_unless_none(_check_policy))] = None
    handler_retry: Annotated[RetryOptions, completed_by(HANDLER_RETRY, limits_tries=False)] | None = None
    on_retries_exhausted: Annotated[ExhaustedPolicy | None, PlainValidator(_unless_none(_check_exhausted))] = None
    handler_timeout: Seconds | None = None
    on_handler_timeout: Literal["report", "cancel"] | None = None
    on_data_loss: OnDataLoss | None = None

    def model_post_init(self, context: object, /) -> None:
        """Refuse what cannot work."""
        if self.name == DEFAULT_SUBSCRIPTION:
            raise ConfigurationError("name", "default is the subscription of the processor given to the host")
        positions = [self.start] if isinstance(self.start, EventPosition) else self.start.values()
        if self.catch_up is None and self.catch_up_group is None and not all(_is_end(each) for each in positions):
            problem = 'only "latest" is possible without catch_up="shared" or a catch_up_group to read earlier events'
            raise ConfigurationError("start", problem)
        if self.filter is not None and (self.key is not None or self.keys is not None):
            raise ConfigurationError("filter", "cannot be combined with key and keys: a stream is chosen by one way")
        if self.key is not None and self.keys is None:
            raise ConfigurationError("key", "needs keys: those of the events that are to be delivered")

    @property
    def selection(self) -> Selection[ReceivedEvent] | None:
        """Which events are delivered; None for all."""
        if self.filter is not None:
            return Selection(self.filter)
        return None if self.keys is None else Selection(self.key or _partition_key, self.keys)

    def applied_to(self, host: HostSettings) -> HostSettings:
        """Return the options of a host, with those of this subscription in their place.

        Raises:
            ConfigurationError: `catch_up_group` is the host's consumer group, or events would be parked in the hub that
                they come from.
        """
        if self.catch_up_group is not None and self.catch_up_group.lower() == host.consumer_group.lower():
            raise ConfigurationError("catch_up_group", "must be another consumer group than the host's")
        own = {name: getattr(self, name) for name in type(self).model_fields if name in HostSettings.model_fields}
        made = host.model_copy(update={name: value for name, value in own.items() if value is not None})
        made.check_parking()
        return made

    def check_partitions(self, partition_ids: Collection[str]) -> None:
        """Raise `ConfigurationError` if `start` names a partition that the hub does not have."""
        if not isinstance(self.start, EventPosition) and (unknown := sorted(set(self.start) - set(partition_ids))):
            raise ConfigurationError("start", f"the hub has no partition {unknown[0]}")


class SubscriptionOptions(TypedDict, total=False):
    """Keyword arguments of `EventProcessorHost.subscribe`. What is None is as the host has it."""

    start: SubscriptionPosition | Mapping[str, SubscriptionPosition]
    """Where its partitions begin: "latest" is the end of each when the subscription is made, "earliest" their start; or
    a sequence number, an offset, a datetime with a time zone, a timedelta before now, or an `EventPosition`; or a
    mapping of partition ids to these, and partitions that it does not name begin at their start. It is recorded when
    the subscription is made, and the record is valid for all hosts. Default: "latest"."""
    catch_up: Literal["shared"] | None
    """How it comes by events before the end: with "shared", the receive link that it shares with the others is opened
    again further back, and they wait meanwhile. None allows only `start="latest"`. Default: None."""
    catch_up_group: str | None
    """A second consumer group, in which it has a link of its own while it is far behind, or after it has held the
    others back for `slow_after`: they neither wait for it nor are slowed down. It shares their link again when it has
    caught up. At most five may read a partition in a group: otherwise the others wait. Default: None."""
    slow_after: float
    """Seconds after which it is reported if it holds the other subscriptions back. Default: 60.0."""
    on_slow: Literal["hold", "suspend"]
    """What to do then: "hold" the others back; or "suspend" it at its checkpoint until `host.resume`. Default:
    "hold"."""
    key: Callable[[ReceivedEvent], Hashable] | None
    """A function that returns an event's key, for `keys`. It is called once per event for all subscriptions that have
    the same function. None for the event's partition key. Default: None."""
    keys: Collection[Hashable] | None
    """The keys of the events that are delivered. None for all events. Default: None."""
    filter: Callable[[ReceivedEvent], bool] | None
    """A function that returns whether an event is delivered, in place of `key` and `keys`. None for all events. It is
    called for each event and subscription. Default: None."""
    checkpoint_policy: CheckpointPolicy | None
    """When checkpoints are written without a call of `context.checkpoint()`. Default: None, as the host."""
    max_batch_size: int | None
    """The most events that `process_events` receives in one call. Default: None, as the host."""
    call_when_idle: bool | None
    """Whether `process_events` is called with an empty sequence after `max_wait_time`. Default: None, as the host."""
    failure_policy: Literal["retry", "skip", "stop", "stop_partition"] | Park | None
    """What to do if the processor raises: "retry", "skip" the event, `Park(to)` it, "stop" the host, or leave the
    partition ("stop_partition"). Default: None, as the host."""
    handler_retry: RetryOptions | None
    """The delays before a failed batch is given to the processor again. Default: None, as the host."""
    on_retries_exhausted: Literal["skip", "stop", "stop_partition"] | Park | None
    """What to do after the last of these retries, if there is one. Default: None, as the host."""
    handler_timeout: float | None
    """Seconds after which a method that has not returned is reported. Default: None, as the host."""
    on_handler_timeout: Literal["report", "cancel"] | None
    """What to do beyond that: nothing, or "cancel" the method. Default: None, as the host."""
    on_data_loss: OnDataLoss | None
    """What to do if events that were to be read are gone. Default: None, as the host."""


def _is_end(position: EventPosition) -> bool:
    if position.enqueued_time is not None:
        return position.enqueued_time >= datetime.now(UTC)
    return position.offset == LATEST_OFFSET


class HostOptions(FeedOptions, total=False):
    """Keyword arguments of `EventProcessorHost`."""

    checkpoint_policy: CheckpointPolicy
    """When checkpoints are written without a call of `context.checkpoint()`, of events whose `process_events` returned.
    `CheckpointPolicy.manual()` for a processor that keeps events beyond that. Default:
    `CheckpointPolicy.automatic()`."""
    initial_position: StartPosition | Mapping[str, StartPosition]
    """Where a partition without a checkpoint begins: "earliest", "latest", a sequence number, a datetime with a time
    zone, a timedelta back from now, an offset ("-1" and "@latest" are the start and the end too), or an
    `EventPosition`; or a mapping of partition ids to these, and partitions that it does not name begin at the start.
    The first host of a consumer group records it in the lease store, and the record is valid for all later hosts.
    "latest" is the end of the partition when it is first opened. A partition that is added to the hub later always
    begins at its start. Default: `EventPosition.earliest()`."""
    owner_id: str | None
    """The host's name in the leases, unique among the hosts. None for a name made of the machine's name, the process id
    and random digits. Default: None."""
    max_buffered_bytes: int
    """The most bytes of events that were received and are not processed yet, over all partitions, and one event more
    for each receive link. Each partition has its share, and may use what others leave free. Default: 536,870,912."""
    balancer: PartitionBalancer
    """Decides which partitions the host takes, steals and releases: `FairBalancer`, `GreedyBalancer`, `RingBalancer`,
    `StaticAssignment`, or an object of your own with their method `plan` (`PartitionBalancer`). Use one kind for all
    hosts; see `docs/balancing.md`. Default: `FairBalancer()`."""
    weight: float
    """The host's share of the partitions, in proportion to the other hosts, whose weight is 1 by default; from 0.001 to
    1,000, to three decimal places. Other than 1 it is part of the host's name in the leases, as in
    "worker-1;weight=2.5": that is how other hosts know it. `FairBalancer` and `RingBalancer` use it. Default: 1.0."""
    max_batch_size: int
    """The most events that `process_events` receives in one call. Default: 300."""
    max_wait_time: float
    """Seconds without an event after which the host checks that the partition's link is alive and that the hub is not
    ahead of it, and after which it checks again (at least 1). The lag of a partition that was silent for so long is
    unknown until then. Default: 30.0."""
    call_when_idle: bool
    """Whether `process_events` is called with an empty sequence after `max_wait_time` without an event. Default:
    False."""
    renew_interval: float | None
    """Seconds between renewals of a lease; less than the store's lease duration. None for a third of that. Default:
    None."""
    close_timeout: float
    """Seconds that closing a partition, or the host, may take: then running handlers are cancelled, and a handler that
    still does not return is reported. Default: 20.0."""
    ownership_lost_grace: float
    """Seconds that a handler may continue after ownership of its partition was lost, at most three quarters of
    `close_timeout`. Then it is cancelled. Default: 5.0."""
    failure_policy: Literal["retry", "skip", "stop", "stop_partition"] | Park
    """What to do if the processor raises: "retry" the same events as `handler_retry` says; "skip" the event that
    failed, which is reported; `Park(to)`, store it elsewhere before going on; "stop" the host; or "stop_partition":
    leave the partition and try again later, while others continue. Of a batch, the events are delivered once more one
    by one, and only those that fail by themselves are skipped or parked. If `open` raises, "skip" and `Park` are as
    "retry". Default: "retry"."""
    on_retries_exhausted: Literal["skip", "stop", "stop_partition"] | Park
    """What to do after the last retry, if `handler_retry` has a `max_retries`: "skip", `Park(to)`, "stop" or
    "stop_partition", as of `failure_policy`. Events that are delivered one by one are retried as often each. If `open`
    raises, "skip" and `Park` are as "stop_partition". Default: "stop"."""
    handler_retry: RetryOptions
    """The delays, in seconds, before a failed batch is given to the processor again. Default:
    `RetryOptions(max_retries=None, base_delay=0.5, max_delay=30.0)`."""
    on_data_loss: Literal["earliest", "latest", "fail"] | None
    """What to do if events after a checkpoint are gone: continue at the oldest retained event ("earliest") or at the
    partition's end ("latest"); or "fail": leave the partition with a `DataLossError` and try again later, while other
    partitions continue. None means "earliest" if retention has removed them, and "fail" if the hub was deleted and
    recreated, or the checkpoint lies beyond the partition's end. It is reported in each case. Default: None."""
    handler_timeout: float
    """Seconds after which a method of the processor that has not returned is reported, and again whenever that time has
    doubled. Default: 60.0."""
    on_handler_timeout: Literal["report", "cancel"]
    """What to do beyond that: nothing ("report"), or "cancel" the method, which counts as if it had raised
    `TimeoutError`. A method that blocks the event loop can be neither reported nor cancelled before it returns.
    Default: "report"."""


class SubscriberOptions(HostOptions, total=False):
    """Keyword arguments of `EventHubsApp.subscriber`: those of a host; with `name`, those of a subscription."""

    concurrency: int
    """The most calls of the function at a time, per partition, each for another key. Default: 32, with `key`."""
    max_events_in_flight: int
    """With `key`, the most events that are taken and not processed yet, per partition. Default: 1,000."""
    max_bytes_in_flight: int
    """With `key`, the most bytes of them. Default: 8,388,608."""
    max_ahead: int
    """With `key`, the most events taken above the first one that is not processed. Default: 10,000."""
    start: SubscriptionPosition | Mapping[str, SubscriptionPosition]
    """With `name`, where the subscription begins. Default: "latest"."""
    catch_up: Literal["shared"] | None
    """With `name`, how it reads events before the end. Default: None."""
    catch_up_group: str | None
    """With `name`, a second consumer group to catch up in. Default: None."""
    slow_after: float
    """With `name`, seconds after which it is reported if it holds others back. Default: 60.0."""
    on_slow: Literal["hold", "suspend"]
    """With `name`, what to do then. Default: "hold"."""
    keys: Collection[Hashable] | None
    """With `name`, the keys of the events that are delivered. Default: None, all events."""
    filter: Callable[[ReceivedEvent], bool] | None
    """With `name`, returns whether an event is delivered. Default: None, all events."""


class HostSettings(FeedSettings):
    """How a host processes a hub; see `HostOptions`."""

    checkpoint_policy: CheckpointPolicy = CheckpointPolicy.automatic()
    initial_position: Annotated[Any, PlainValidator(_check_initial_position)] = EventPosition.earliest()
    owner_id: Name | None = None
    max_buffered_bytes: int = Field(default=512 * 1024 * 1024, ge=1024)
    balancer: Annotated[PartitionBalancer, PlainValidator(_checked_balancer)] = FairBalancer()
    weight: float = Field(default=1.0, ge=0.001, le=1000)
    max_batch_size: int = Field(default=300, ge=1, le=100_000)
    max_wait_time: Seconds = 30.0
    call_when_idle: bool = False
    renew_interval: Seconds | None = None
    close_timeout: Seconds = 20.0
    ownership_lost_grace: float = Field(default=5.0, ge=0, le=86_400)
    failure_policy: Annotated[FailurePolicy, PlainValidator(_check_policy)] = "retry"
    handler_retry: Annotated[RetryOptions, completed_by(HANDLER_RETRY, limits_tries=False)] = HANDLER_RETRY
    on_retries_exhausted: Annotated[ExhaustedPolicy, PlainValidator(_check_exhausted)] = "stop"
    on_data_loss: OnDataLoss | None = None
    handler_timeout: Seconds = 60.0
    on_handler_timeout: Literal["report", "cancel"] = "report"

    def model_post_init(self, context: object, /) -> None:
        """Refuse what cannot work."""
        self.check_parking()

    def check_parking(self) -> None:
        """Raise `ConfigurationError` if events would be parked in the hub that they come from."""
        for name in ("failure_policy", "on_retries_exhausted"):
            match getattr(self, name):
                case Park(str() as hub) if hub.lower() == self.hub.lower():
                    raise ConfigurationError(
                        name, f"events of hub {self.hub} cannot be parked there: they would return"
                    )

    @property
    def has_relative_start(self) -> bool:
        """Whether `initial_position` is another one at each start of the program."""
        configured = self.initial_position
        positions = [configured] if isinstance(configured, EventPosition) else configured.values()
        return any(isinstance(each, RelativePosition) for each in positions)

    @property
    def has_start(self) -> bool:
        """Whether `initial_position` was given."""
        return "initial_position" in self.model_fields_set

    def positions_without_partition(self, partition_ids: Collection[str]) -> list[str]:
        """Return the partitions that `initial_position` names and the hub does not have."""
        configured = self.initial_position
        return [] if isinstance(configured, EventPosition) else sorted(set(configured) - set(partition_ids))
