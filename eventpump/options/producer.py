"""Options of producers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, TypedDict

from pydantic import Field, PlainValidator

from eventpump.core.claim import OnDoubt, OnStateLost, PublisherMode, StartPolicy
from eventpump.errors import ConfigurationError
from eventpump.eventhubs.codecs import EventEncoding, encoder
from eventpump.eventhubs.events import EventData
from eventpump.eventhubs.numbering import MAX_OWNER_LEVEL, MAX_PRODUCER_ID, NUMBERS
from eventpump.interfaces import PublisherStateStore
from eventpump.options.base import SettingsModel
from eventpump.options.connection import ClientOptions
from eventpump.telemetry.interface import ClientTelemetry, checked
from eventpump.texts import not_the_class

if TYPE_CHECKING:
    from eventpump.telemetry.telemetry import Telemetry
else:  # its module imports OpenTelemetry
    Telemetry = ClientTelemetry


@dataclass(frozen=True, slots=True)
class PartitionPublishingOptions:
    """How to publish to a partition, as far as it is not left to the service. None leaves it.

    Args:
        producer_group_id: 0 to 2**63 - 1; must be one the service gave out. Default: None.
        owner_level: 0 to 32767. Of two producers with one `producer_group_id` the service refuses the one with the
            lower level, from its next attach or send on. It does not affect producers with other ids, such as one
            without this option. Default: None.
        starting_sequence_number: 0 to 2**31 - 1: the number before the first to use; sent with the first attach.
            Default: None.

    Raises:
        ConfigurationError: A value outside its range.
    """

    producer_group_id: int | None = None
    owner_level: int | None = None
    starting_sequence_number: int | None = None

    def __post_init__(self) -> None:
        for name, highest in (
            ("producer_group_id", MAX_PRODUCER_ID),
            ("owner_level", MAX_OWNER_LEVEL),
            ("starting_sequence_number", NUMBERS - 1),
        ):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or not 0 <= value <= highest):
                raise ConfigurationError(f"partition_options.{name}", f"must be a number from 0 to {highest}")


PartitionOptions: TypeAlias = Mapping[str, PartitionPublishingOptions] | Mapping[int, PartitionPublishingOptions]
"""Publishing options by partition id."""


@dataclass(frozen=True, slots=True)
class PartitionPublishingProperties:
    """How a partition is published to now. A plain producer has False and Nones.

    Args:
        last_published_sequence_number: -1 or 0 where nothing is published.
        events_published: With a state store: how many events the application has published under this name; None
            without one.
    """

    partition_id: str
    is_idempotent_publishing_enabled: bool
    producer_group_id: int | None
    owner_level: int | None
    last_published_sequence_number: int | None
    events_published: int | None = None


OnSuccess = Callable[[Sequence[EventData], str], None]

OnError = Callable[[Sequence[EventData], str, Exception], None]


class PublishingOptions(TypedDict, total=False):
    """Keyword arguments of all producers: how events are published."""

    idempotent: bool
    """Whether each event is published exactly once. Without a `state_store` this holds for the life of the producer, if
    no other producer uses its `producer_group_id` and `owner_level`: the service cannot distinguish two producers with
    the same id and level, and of two batches with the same numbers it accepts the second without storing it. Without
    `partition_options` the service gives each producer an id of its own. Default: False."""
    partition_options: PartitionOptions | None
    """How to publish to single partitions: a mapping of partition ids, text or numbers, to
    `PartitionPublishingOptions`; the service decides the rest. One that the hub lacks is an error at the first send.
    For a partition that `state_store` knows, the stored state is used instead. Default: None."""
    name: str | None
    """The publisher's name, unique per hub: the key under which `state_store` keeps its state. Required with
    `state_store`. Default: None."""
    state_store: PublisherStateStore | None
    """Keeps the publisher's state, so that publishing is exactly once also across restarts. The producer opens and
    closes it. None to keep no state. Default: None."""
    mode: Literal["exclusive", "replayable"] | None
    """What the processes with one `name` may do; the same in all of them, and only with a `state_store`, where None
    means "exclusive". "exclusive": one process at a time. Each start takes a higher level, and from then on the service
    refuses the process before it, which gets `ProducerDisconnectedError`. Nothing that process was sending is stored
    after the start; `on_doubt` is about what was stored during the start. "replayable": processes share a level and may
    overlap, on the condition that the numbers determine the events: each process continues with the event that
    `events_published` names, and all send the same events in batches divided alike, as a loop over
    `orders[known.events_published :]` does. Otherwise events are lost, because the service takes a second event with
    the same number for a repetition. A process that another one has overtaken by more than the service remembers, or
    while one of its batches is in doubt, gets `InvalidClientStateError`; it may be restarted and then counts from the
    stored state. Default: None."""
    on_doubt: Literal["fail", "scan", "accept"]
    """What to do at a start if the process before did not close with every outcome known and the partition grew while
    its level was taken over: events of that process may be stored that `events_published` does not count. On a
    partition with other writers this is so after nearly every crash, since their events make it grow too. "fail": raise
    `PublishOutcomeUnknownError` with the number of the first such event and how many there may be, at this start and
    each later one until one has another `on_doubt` or the state is reset. "scan": count the stored ones by their
    stamps, which are read from the end of the partition; this needs `scan_consumer_group` and the right to listen.
    Every event is then sent with a stamp, the application property `eventpump:stamp`; if the process before did not
    stamp, the start fails as with "fail". "accept": do not count them; they may be published again. Default: "fail"."""
    scan_consumer_group: str | None
    """The consumer group to read the end of a partition with. Required with `on_doubt="scan"`. Default: None."""
    on_state_lost: Literal["fail", "new"]
    """What to do at a start if the service has forgotten the publisher: it refuses the id, or states a last number
    lower than one it had accepted. "fail": raise `ProducerStateLostError`, at this start and each later one until one
    has "new" or the state is reset. "new": take a new id, and continue `events_published` from the newest mark in the
    store. A mark is stored after the first batch of a start, every 30 seconds while publishing, and when the producer
    closes; what was published since may be published again. A running producer raises `ProducerStateLostError` in
    either case. Default: "fail"."""
    encode: EventEncoding | None
    """Compresses or encrypts every event: a `PayloadCodec`, several that are applied in this order, or a function that
    is called with the event and returns the event to send in its place, which must not be the same one changed. The
    size of the encoded event is what counts. An event that cannot be encoded is refused with an `EventError`. Routers
    see the event as it was given. None to send events as they are. Default: None."""
    telemetry: Telemetry | None
    """Records spans and metrics with OpenTelemetry, and has events carry the current trace context: an
    `eventpump.telemetry.Telemetry`. None to record nothing. Default: None."""


class ProducerOptions(PublishingOptions, ClientOptions, total=False):
    """Keyword arguments of `EventProducer`."""

    max_in_flight: int | None
    """The most plain sends to one target at a time; None for no limit. Default: None."""


class BufferedOptions(PublishingOptions, ClientOptions, total=False):
    """Keyword arguments of `BufferedProducer`."""

    max_in_flight: int
    """The most batches that are being sent to one partition at a time. With more than 1, a retry may reorder events,
    also those with the same key; an idempotent producer allows only 1. Default: 1."""
    max_batch_events: int
    """The number of events at which a batch is sent without waiting for more. Default: 5,000."""
    max_batch_bytes: int
    """The size in bytes at which a batch is sent without waiting for more. A larger event is sent alone. If the
    service's limit for a message is lower, a batch is sent in several messages. Default: 262,144."""
    max_wait_time: float
    """Seconds that the first event of a batch waits for others to join it. Default: 0.005."""
    max_events: int
    """The most events in the buffer, over all partitions: accepted, and their outcome not known yet. When it is full,
    `send` waits. Default: 100,000."""
    max_bytes: int
    """The most bytes in the buffer, over all partitions. A partition of which the buffer holds no event may have one of
    any size: what that event exceeds the partition's share by (`max_bytes` divided by twice the number of partitions,
    or `max_partition_bytes` if that is less) may come on top. Default: 8,388,608."""
    max_partition_events: int | None
    """The most events in the buffer per partition; None for no limit but `max_events`. Default: None."""
    max_partition_bytes: int | None
    """The most bytes in the buffer per partition, or one larger event; None for no limit but `max_bytes`. Default:
    None."""


def _check_partition_options(given: Any) -> dict[str, PartitionPublishingOptions]:
    """Return publishing options by partition id. Raises `ConfigurationError` for a key or a value that is not valid."""
    found: dict[str, PartitionPublishingOptions] = {}
    if given is None:
        return found
    if not isinstance(given, Mapping):
        raise ConfigurationError("partition_options", "must map partition ids to PartitionPublishingOptions")
    for key, options in given.items():
        partition_id = str(key) if type(key) is int else key
        if not isinstance(partition_id, str) or not partition_id.isascii() or not partition_id.isdigit():
            raise ConfigurationError("partition_options", f"its keys must be partition ids such as 0, not {key!r:.80}")
        if partition_id in found:
            raise ConfigurationError("partition_options", f"partition {partition_id} is there twice")
        if not isinstance(options, PartitionPublishingOptions):
            problem = f"partition {partition_id} must have a PartitionPublishingOptions, not {type(options).__name__}"
            raise ConfigurationError("partition_options", problem)
        found[partition_id] = options
    return found


def _check_store(value: object) -> object:
    if value is not None and (isinstance(value, type) or not callable(getattr(value, "write_state", None))):
        problem = "must be a store of publishers' states, such as SqlitePublisherStateStore(path)"
        raise ConfigurationError("state_store", problem + not_the_class(value))
    return value


class ProducerSettings(SettingsModel):
    """How a producer publishes; see `PublishingOptions` and `ProducerOptions`."""

    idempotent: bool = False
    partition_options: Annotated[Any, PlainValidator(_check_partition_options)] = None
    name: str | None = None
    state_store: Annotated[Any, PlainValidator(_check_store)] = None
    mode: Literal["exclusive", "replayable"] | None = None
    on_doubt: Literal["fail", "scan", "accept"] = "fail"
    scan_consumer_group: str | None = None
    on_state_lost: Literal["fail", "new"] = "fail"
    encode: Annotated[Any, PlainValidator(encoder)] = None
    telemetry: Annotated[Any, PlainValidator(checked)] = None
    max_in_flight: int | None = Field(default=None, ge=1)

    def model_post_init(self, context: object, /) -> None:
        """Refuse what cannot work."""
        for name in ("partition_options", "state_store", "mode"):
            if getattr(self, name) and not self.idempotent:
                raise ConfigurationError(name, "needs idempotent=True")
        if self.max_in_flight is not None and self.idempotent:
            raise ConfigurationError("max_in_flight", "is of plain producers only")
        if (self.name is None) is not (self.state_store is None):
            raise ConfigurationError("name", "goes together with state_store")
        for name, default in (("mode", None), ("on_doubt", "fail"), ("on_state_lost", "fail")):
            if getattr(self, name) != default and self.state_store is None:
                raise ConfigurationError(name, "needs a state_store")
        if (self.on_doubt == "scan") is not bool(self.scan_consumer_group):
            raise ConfigurationError("scan_consumer_group", "goes together with on_doubt='scan'")

    @property
    def start_policy(self) -> StartPolicy:
        """How a publisher with a stored state starts."""
        return StartPolicy(
            PublisherMode(self.mode or "exclusive"), OnDoubt(self.on_doubt), OnStateLost(self.on_state_lost)
        )


class BufferSettings(SettingsModel):
    """How a buffered producer fills its batches, and how much it holds; see `BufferedOptions`."""

    max_batch_events: int = Field(default=5000, ge=1, le=1_000_000)
    max_batch_bytes: int = Field(default=256 * 1024, ge=1)
    max_wait_time: float = Field(default=0.005, ge=0, le=86_400)
    max_events: int = Field(default=100_000, ge=1)
    max_bytes: int = Field(default=8 * 1024 * 1024, ge=1)
    max_partition_events: int | None = Field(default=None, ge=1)
    max_partition_bytes: int | None = Field(default=None, ge=1)
    max_in_flight: int = Field(default=1, ge=1, le=1000)
