"""The options of the source, as Spark's users write them: typed, and checked once, before anything is connected.

The names of Microsoft's Scala connector are accepted too. An unknown name is an error that suggests the nearest.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, BeforeValidator, ByteSize, Field, ValidationInfo, field_validator, model_validator

from eventpump.errors import ConfigurationError
from eventpump.eventhubs.events import EventPosition
from eventpump.eventhubs.partitions import partition_order
from eventpump.options.base import Name, SettingsModel, unknown_option
from eventpump.options.callables import check_import_name
from eventpump.spark.connection import (
    CONNECTION_OPTIONS,
    CONNECTOR_PREFIX,
    RETRY_TIMEOUT,
    Duration,
    SparkConnection,
    in_camel_case,
    option_names,
    split_fields,
)
from eventpump.spark.source.offsets import RESERVED, ReceiveOptions, TriggerLimits

WITHOUT_EFFECT: Final[Mapping[str, str]] = MappingProxyType(
    {
        "DynamicPartitionDiscovery": "new partitions are always discovered",
        "maxAcceptableBatchReceiveTime": "shares follow backlog; a slow partition delays only its own task",
        "maxRatePerPartition": "it is for DStreams; maxEventsPerTrigger limits a batch",
        "maxRatesPerPartition": "it is for DStreams; maxEventsPerTrigger limits a batch",
        "maxSilentTime": "after receiverTimeout the service is asked for the end of a silent partition",
        "partitionPreferredLocationStrategy": "sources in Python cannot state preferred locations",
        "slowPartitionAdjustment": "shares follow backlog; a slow partition delays only its own task",
        "threadPoolSize": "there is no thread pool",
    }
)
"""Options of the connector that are accepted without effect, and why."""

NOT_TAKEN: Final[Mapping[str, str]] = MappingProxyType(
    {
        "aadAuthCallback": "it names a class of the JVM; use fullyQualifiedNamespace and credential",
        "aadAuthCallbackParams": "it is for a class of the JVM; use fullyQualifiedNamespace and credential",
        "metricPlugin": "it names a class of the JVM; use eventpump.spark.LagListener, which reports lag",
        "throttlingStatusPlugin": "it names a class of the JVM",
    }
)
"""Options of the connector that are not supported, and what to use instead."""

START: Final = EventPosition.earliest()
END: Final = EventPosition.latest()
_WORDS: Final = MappingProxyType({"earliest": START, "-1": START, "latest": END, "@latest": END})
_CONNECTOR_KEYS: Final = frozenset({"offset", "seqno", "enqueuedtime", "isinclusive"})
_POSITION: Final = (
    'must be "earliest", "latest", a sequence number, a time such as "2030-01-31T12:00:00Z", or a JSON object with '
    "offset, seqNo or enqueuedTime, and isInclusive"
)
_POSITIONS: Final = (
    'must be a JSON object of positions by partition id, such as {"0": "earliest", "1": 42}, or by hub and partition id'
)

_PARTITIONS: Final = 'must be partition ids, such as "0,3,7", or a JSON list of them'
_HUBS: Final = 'must be the name of a hub, several such as "telemetry,alerts", or a JSON list of names'
_BY_HUB: Final = MappingProxyType(
    {
        option.lower(): option
        for option in ("partitions", "startingPosition", "startingPositions", "endingPosition", "endingPositions")
    }
)
"""Options that may be given by hub, by their names in lower case."""


# -------------------------------------------------------------------------------------------------------- positions


def parse_position(value: object, *, inclusive: bool = True) -> EventPosition:
    """Parse a position: a word, a sequence number, a time, or the connector's JSON object.

    Args:
        inclusive: Whether a sequence number, a time or an offset is inclusive if no `isInclusive` states it. True for a
            start, and False for an end: so a range that begins where another ends has no event in common with it.
    """
    if isinstance(value, EventPosition):
        return value
    if isinstance(value, str):
        text = value.strip()
        if text.lower() in _WORDS:
            return _WORDS[text.lower()]
        if text.startswith("{"):
            return parse_position(_json(text, _POSITION), inclusive=inclusive)
        if text.isascii() and text.isdigit():
            return EventPosition.at_sequence_number(int(text), inclusive=inclusive)
        return EventPosition.at_enqueued_time(_moment(text), inclusive=inclusive)
    if type(value) is int and value >= 0:
        return EventPosition.at_sequence_number(value, inclusive=inclusive)
    if isinstance(value, dict):
        return _connector_position({str(key).lower(): each for key, each in value.items()}, inclusive)
    raise ValueError(_POSITION)


def _parse_end(value: object) -> EventPosition:
    return parse_position(value, inclusive=False)


def _connector_position(fields: Mapping[str, object], inclusive_by_default: bool) -> EventPosition:
    """Parse `{"offset": ..., "seqNo": ..., "enqueuedTime": ..., "isInclusive": ...}`; null and -1 are unset."""
    if not fields.keys() <= _CONNECTOR_KEYS:
        raise ValueError(_POSITION)
    inclusive = fields.get("isinclusive", inclusive_by_default)
    offset, number, moment = fields.get("offset"), fields.get("seqno"), fields.get("enqueuedtime")
    number = None if number == -1 else number
    if not isinstance(inclusive, bool) or sum(each is not None for each in (offset, number, moment)) != 1:
        raise ValueError(_POSITION)
    if number is not None:
        if type(number) is not int or number < 0:
            raise ValueError(_POSITION)
        return EventPosition.at_sequence_number(number, inclusive=inclusive)
    if moment is not None:
        return EventPosition.at_enqueued_time(_moment(moment), inclusive=inclusive)
    if not isinstance(offset, str):
        raise ValueError(_POSITION)
    return _WORDS.get(offset) or EventPosition.at_offset(offset, inclusive=inclusive)


def _moment(value: object) -> datetime:
    """Parse ISO 8601 text, in UTC if it has no zone, or milliseconds since the Unix epoch."""
    try:
        if type(value) is int:
            return datetime.fromtimestamp(value / 1000, UTC)
        if isinstance(value, str):
            moment = datetime.fromisoformat(value)
            return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
    except (ValueError, OverflowError, OSError):
        pass
    raise ValueError(_POSITION)


def _json(text: str, problem: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(problem) from None


def parse_positions(value: object, hub: str, *, inclusive: bool = True) -> dict[str, EventPosition]:
    """Parse positions per partition; those of other hubs are ignored.

    Keys are partition ids, or hubs with partition ids below them, or the connector's: JSON texts such as
    `{"ehName": "telemetry", "partitionId": 0}`. The members of a query's offset that are not hubs are ignored.

    Args:
        inclusive: As for :func:`parse_position`.

    Raises:
        ValueError: The value does not have this form.
    """
    document = _json(value, _POSITIONS) if isinstance(value, str) else value
    if not isinstance(document, dict):
        raise ValueError(_POSITIONS)
    positions: dict[str, EventPosition] = {}
    for key, each in document.items():
        if key in RESERVED:
            continue
        if _is_partition(key):
            positions[key] = parse_position(each, inclusive=inclusive)
        elif isinstance(key, str) and key.startswith("{"):
            name = _json(key, _POSITIONS)
            if not isinstance(name, dict) or name.keys() != {"ehName", "partitionId"}:
                raise ValueError(_POSITIONS)
            partition_id = str(name["partitionId"])
            if not _is_partition(partition_id):
                raise ValueError(_POSITIONS)
            if str(name["ehName"]).lower() == hub.lower():
                positions[partition_id] = parse_position(each, inclusive=inclusive)
        elif isinstance(key, str) and isinstance(each, dict) and all(map(_is_partition, each)):
            if key.lower() == hub.lower():
                positions |= {
                    partition_id: parse_position(place, inclusive=inclusive) for partition_id, place in each.items()
                }
        else:
            raise ValueError(_POSITIONS)
    return positions


def _hub_of(key: str) -> str | None:
    """Return the hub that a key of positions names, in lower case; None for a partition, or if it has another form."""
    if not key.startswith("{"):
        return None if _is_partition(key) else key.lower()
    try:
        return str(json.loads(key)["ehName"]).lower()
    except (ValueError, RecursionError, KeyError, TypeError):
        return None


def _is_partition(key: object) -> bool:
    return isinstance(key, str) and key.isascii() and key.isdigit()


# ---------------------------------------------------------------------------------------------------------- options


def _per_task(value: object) -> object:
    if value is None or (isinstance(value, str) and value.strip().lower() == "auto"):
        return None
    try:
        number = int(str(value))
    except ValueError:
        number = 0
    if number < 1:
        raise ValueError('must be "auto", or a number of partitions from 1 on')
    return number


Start = Annotated[EventPosition | None, BeforeValidator(parse_position)]
End = Annotated[EventPosition | None, BeforeValidator(_parse_end)]


def _partition_ids(value: object) -> object:
    """Parse `0,3,7`, or a JSON list of numbers or texts."""
    if value is None:
        return None
    found: object = value
    if isinstance(value, str):
        text = value.strip()
        found = _json(text, _PARTITIONS) if text.startswith("[") else [each.strip() for each in text.split(",")]
    if not isinstance(found, list | tuple) or not found:
        raise ValueError(_PARTITIONS)
    ids = [str(each) for each in found]
    if not all(map(_is_partition, ids)) or any(isinstance(each, bool) for each in found):
        raise ValueError(_PARTITIONS)
    return tuple(sorted({str(int(each)) for each in ids}, key=int))


PerTask = Annotated[int | None, BeforeValidator(_per_task)]
Partitions = Annotated[tuple[str, ...] | None, BeforeValidator(_partition_ids)]


def _hub_names(text: str) -> tuple[str, ...]:
    """Parse `telemetry,alerts`, or a JSON list of names. Raises `ConfigurationError`, also if a hub is named twice."""
    text = text.strip()
    try:
        found = _json(text, _HUBS) if text.startswith("[") else [each.strip() for each in text.split(",")]
    except ValueError as error:
        raise ConfigurationError("hub", str(error)) from None
    if not isinstance(found, list) or not found or not all(isinstance(each, str) and each for each in found):
        raise ConfigurationError("hub", _HUBS)
    if len({each.lower() for each in found}) < len(found):
        raise ConfigurationError("hub", "names a hub twice")
    return tuple(found)


def _of_hub(options: Mapping[str, str], keys: Mapping[str, str], hubs: Sequence[str], index: int) -> dict[str, str]:
    """Return the options of one of several hubs.
    Raises `ConfigurationError` if an option by hub names one that is not read."""
    chosen = dict(options)
    for name, value in options.items():
        if keys[name] not in _BY_HUB or not value.strip().startswith("{"):
            continue
        option = _BY_HUB[keys[name]]
        try:
            document = json.loads(value)
        except (ValueError, RecursionError):
            continue  # its own parser says what it should be
        if not isinstance(document, dict):
            continue
        if option in {"startingPositions", "endingPositions"}:
            if len(hubs) > 1 and any(map(_is_partition, document)):
                raise ConfigurationError(
                    option, f'must be by hub and partition id, such as {{"{hubs[0]}": {{"0": "earliest"}}}}'
                )
            # One document for several queries may name hubs of others, too; only those of others is a slip.
            named = set(map(_hub_of, document))
            if named and not named & {None, *(each.lower() for each in hubs)}:
                raise ConfigurationError(option, f"names no hub that is read: that is {', '.join(hubs)}")
            continue
        by_hub = {key.lower(): each for key, each in document.items()}
        known = by_hub.keys() & {each.lower() for each in hubs}
        if not known:
            continue
        if unknown := sorted(by_hub.keys() - known):
            raise ConfigurationError(option, f"names {unknown[0]}, which is not one of the hubs that are read")
        own = by_hub.get(hubs[index].lower())
        if own is None:
            del chosen[name]
        else:
            chosen[name] = own if isinstance(own, str) else json.dumps(own)
    return chosen


class SourceOptions(SettingsModel):
    """The options of the source. Frozen and picklable; its repr shows no secret.

    Option names are in camel case, not case-sensitive; values are text. Durations are seconds or ISO 8601 ("PT60S"),
    sizes are bytes or "64MiB".

    Args:
        connection: The hub and how to connect to it.
        consumer_group: The consumer group to read with, which has to exist; each query needs its own.
        watch_consumer_group: Another consumer group, in which the driver of a query keeps a link to each partition that
            is read to its end, so that a new event is seen at once; None to look for new events by requests only. Its
            links have no owner level; of several queries, five can use the same group.
        partitions: The ids of the partitions to read; None for all. A query can be given further ones later, which it
            reads from their first event, but none can be left out that its checkpoint has.
        starting_position: Where a new query, or a batch, begins: see :func:`parse_position`. None for "latest" in a
            query and "earliest" in a batch. A checkpoint takes precedence.
        starting_positions: The same per partition; takes precedence. See :func:`parse_positions`.
        ending_position: Where a batch ends; None for "latest". The event at an end is not read, unless the position
            states `"isInclusive": true`. Not for a query.
        ending_positions: The same per partition; takes precedence.
        no_matching_position: The meaning of a time or offset after the newest event, and of a sequence number for all
            partitions that one of them has not reached: "latest" or "error". A number that is given for one partition
            must exist.
        max_events_per_trigger: The most events in one batch of a query, split in proportion to backlog; None for no
            limit.
        max_bytes_per_trigger: About how many bytes one batch of a query has; None for no limit. A target, not a bound:
            it is converted to a number of events by the mean size that the events of each partition had lately, as the
            service stores them. At least one event of each partition that has any is read. If `max_events_per_trigger`
            is given too, both apply.
        min_events_per_trigger: The number of new events before which there is no batch, unless `max_trigger_delay`
            seconds have passed.
        max_trigger_delay: See `min_events_per_trigger`.
        min_partitions: Split large ranges until a batch has this many tasks; needs a shared receiver.
        partitions_per_task: How many hub partitions one task reads at the same time; None ("auto") to let the number of
            events decide: a task has at least 20,000, and a batch at most two tasks for each of the `slots`.
        slots: How many tasks Spark runs at a time. None for what `register` found in the session; under Connect, and
            with executors that come and go, it is not known, and only events count.
        fail_on_data_loss: Fail if unread events are gone, or the hub was recreated; False continues, with a warning:
            with the events that still exist, in a recreated hub with its first ones.
        use_exclusive_receiver: Let a query read with owner level 0, which excludes other readers; None for True. A
            batch never does: it would disconnect the query that is looked into.
        receiver_timeout: Seconds without an event before the service is asked whether events are gone.
        retry_timeout: Seconds for which the service is tried again if it cannot be reached: by the driver, which then
            ends the query, and by each attempt of a task.
        prefetch_count: Events received ahead, per partition.
        include_properties: Include the two columns of properties in the schema.
        include_property_types: Also include `propertyTypes` and `systemPropertyTypes`: the AMQP types of the properties
            that are not text, by their names. With them, the sink publishes properties with the types that they had.
        snapshot_interval: Seconds between two looks at a partition. A look is a request, and a query makes at most 40
            requests a second: with more partitions than that allows, all are looked at as often as possible, and those
            that lately had events more often. None for few requests: after a batch all partitions are looked at; while
            nothing is new, 10 a second for 10 s after the last event, then one. Partitions that a link watches
            (`watch_consumer_group`) need none, but one in five seconds.
        decode: "module:name", the import name of a `PayloadCodec` or a list of them, in every process: the column
            `body` is decoded by those that an event's `content_encoding` names. None to return bodies as they are.
    """

    connection: SparkConnection
    consumer_group: Name = "$Default"
    watch_consumer_group: Name | None = None
    partitions: Partitions = None
    starting_position: Start = None
    starting_positions: Mapping[str, EventPosition] = Field(default_factory=dict)
    ending_position: End = None
    ending_positions: Mapping[str, EventPosition] = Field(default_factory=dict)
    no_matching_position: Literal["latest", "error"] = "latest"
    max_events_per_trigger: int | None = Field(default=None, ge=1)
    max_bytes_per_trigger: Annotated[ByteSize, Field(ge=1)] | None = None
    min_events_per_trigger: int | None = Field(default=None, ge=1)
    max_trigger_delay: Duration = 900.0
    min_partitions: int | None = Field(default=None, ge=1)
    partitions_per_task: PerTask = None
    slots: int | None = Field(default=None, ge=1)
    fail_on_data_loss: bool = True
    use_exclusive_receiver: bool | None = None
    receiver_timeout: Duration = 60.0
    retry_timeout: Duration = RETRY_TIMEOUT
    prefetch_count: int = Field(default=4000, ge=1, le=1_000_000)
    include_properties: bool = True
    include_property_types: bool = False
    snapshot_interval: Duration | None = None
    decode: Annotated[str, AfterValidator(check_import_name)] | None = None

    @field_validator("starting_positions", "ending_positions", mode="before")
    @classmethod
    def _by_partition(cls, value: object, info: ValidationInfo) -> object:
        connection = info.data.get("connection")
        if not isinstance(value, str) or connection is None:
            return value
        return parse_positions(value, connection.hub, inclusive=info.field_name == "starting_positions")

    @model_validator(mode="after")
    def _agree(self) -> SourceOptions:
        low, high = self.min_events_per_trigger, self.max_events_per_trigger
        if low is not None and high is not None and low > high:
            raise ConfigurationError("minEventsPerTrigger", "must not be greater than maxEventsPerTrigger")
        if self.include_property_types and not self.include_properties:
            raise ConfigurationError("includePropertyTypes", "cannot be combined with includeProperties=false")
        watch = self.watch_consumer_group
        if watch is not None and watch.lower() == self.consumer_group.lower():
            raise ConfigurationError(
                "watchConsumerGroup",
                "must not be the query's own consumerGroup, whose readers its links would disturb; create one for it",
            )
        if self.min_partitions is not None and (self.partitions_per_task or 1) > 1:
            raise ConfigurationError("minPartitions", "cannot be combined with partitionsPerTask")
        return self

    @classmethod
    def each_hub(cls, options: Mapping[str, str]) -> tuple[SourceOptions, ...]:
        """Create the options of each hub from Spark's options.

        The option `hub` is a name, several separated by commas, or a JSON list of them. `partitions`,
        `startingPosition` and `endingPosition` may be JSON objects by hub; a hub that is not in one has the default.

        Raises:
            ConfigurationError: An option is unknown, or its value is invalid; the error shows no secret.
        """
        keys = {name: name.lower().removeprefix(CONNECTOR_PREFIX) for name in options}
        given = {name: value for name, value in options.items() if keys[name] != "hub"}
        hubs = {value for name, value in options.items() if keys[name] == "hub"}
        if len(hubs) > 1:
            raise ConfigurationError("hub", "is given twice, with different values")
        if not hubs:
            return (cls.from_options(_of_hub(given, keys, (SparkConnection.split_options(given)[0].hub,), 0)),)
        names = _hub_names(hubs.pop())
        return tuple(
            cls.from_options({**_of_hub(given, keys, names, index), "hub": name}) for index, name in enumerate(names)
        )

    @classmethod
    def from_options(cls, options: Mapping[str, str]) -> SourceOptions:
        """Create it from Spark's options for one hub.

        Options of the connector without effect are ignored: see `without_effect`.

        Raises:
            ConfigurationError: An option is unknown, or its value is invalid; the error shows no secret.
        """
        connection, rest = SparkConnection.split_options(options)
        values, rest = split_fields(rest, SOURCE_OPTIONS)
        for name, value in rest.items():
            key = name.lower().removeprefix(CONNECTOR_PREFIX)
            if key in _WITHOUT_EFFECT:
                continue
            if key in _NOT_TAKEN:
                raise ConfigurationError(*_NOT_TAKEN[key])
            if key != "useaadauth":
                raise unknown_option(name, (*SOURCE_OPTIONS, *CONNECTION_OPTIONS), spelled=key)
            if value.strip().lower() != "false":
                raise ConfigurationError("useAadAuth", "use fullyQualifiedNamespace and credential instead")
        try:
            return cls(connection=connection, **values)
        except ConfigurationError as error:
            raise in_camel_case(error, SOURCE_OPTIONS) from None

    def for_stream(self, slots: int | None = None) -> SourceOptions:
        """Return the options with the defaults of a query.

        Args:
            slots: The default of that option.

        Raises:
            ConfigurationError: An option is only for batches.
        """
        if self.ending_position is not None or self.ending_positions:
            raise ConfigurationError("endingPosition", "is only for batches: a query has no end")
        return self._completed(END, slots, is_exclusive=self.use_exclusive_receiver is not False)

    def for_batch(self, slots: int | None = None) -> SourceOptions:
        """Return the options with the defaults of a batch.

        Args:
            slots: The default of that option.

        Raises:
            ConfigurationError: An option is only for queries.
        """
        for option in ("maxEventsPerTrigger", "maxBytesPerTrigger", "minEventsPerTrigger", "watchConsumerGroup"):
            if getattr(self, SOURCE_OPTIONS[option]) is not None:
                raise ConfigurationError(option, "is only for queries: a batch is read completely")
        return self._completed(START, slots, is_exclusive=False)

    def _completed(self, start: EventPosition, slots: int | None, *, is_exclusive: bool) -> SourceOptions:
        if self.min_partitions is not None and is_exclusive:
            raise ConfigurationError(
                "minPartitions", "has several tasks read one partition, which requires useExclusiveReceiver=false"
            )
        return self.model_copy(
            update={
                "starting_position": self.starting_position or start,
                "use_exclusive_receiver": is_exclusive,
                "slots": self.slots or slots,
            }
        )

    @property
    def receive(self) -> ReceiveOptions:
        """The options that executors need."""
        return ReceiveOptions(
            consumer_group=self.consumer_group,
            owner_level=0 if self.use_exclusive_receiver else None,
            prefetch_count=self.prefetch_count,
            receiver_timeout=self.receiver_timeout,
            retry_timeout=self.retry_timeout,
            retry=self.connection.patience,
            fail_on_data_loss=self.fail_on_data_loss,
            decode=self.decode,
        )

    @property
    def limits(self) -> TriggerLimits:
        """The bounds of a query's batches."""
        return TriggerLimits(
            self.max_events_per_trigger,
            self.min_events_per_trigger,
            self.max_trigger_delay,
            self.max_bytes_per_trigger,
        )

    def start_of(self, partition_id: str) -> EventPosition:
        """Return the position at which a partition without a checkpoint begins."""
        return self.starting_positions.get(partition_id) or self.starting_position or START

    def end_of(self, partition_id: str) -> EventPosition:
        """Return the position at which a batch ends."""
        return self.ending_positions.get(partition_id) or self.ending_position or END

    def chosen(self, partition_ids: Collection[str]) -> list[str]:
        """Return the partitions to read, in numeric order.

        Args:
            partition_ids: Those that the hub has.

        Raises:
            ConfigurationError: The hub does not have one that was chosen.
        """
        for partition_id in self.partitions or ():
            if partition_id not in partition_ids:
                hub, count = self.connection.hub, len(partition_ids)
                raise ConfigurationError("partitions", f"hub {hub} has no partition {partition_id}, only {count}")
        return sorted(self.partitions or partition_ids, key=partition_order)

    def require_partitions(self, partition_ids: Collection[str]) -> None:
        """Check that all positions name partitions that the hub has.

        Raises:
            ConfigurationError: One does not.
        """
        for option in ("startingPositions", "endingPositions"):
            for partition_id in getattr(self, SOURCE_OPTIONS[option]):
                if partition_id not in partition_ids:
                    raise ConfigurationError(
                        option, f"hub {self.connection.hub} has no partition {partition_id}, only {len(partition_ids)}"
                    )


SOURCE_OPTIONS: Final = option_names(SourceOptions)
"""The source's options, not case-sensitive, and the fields they set."""
_WITHOUT_EFFECT: Final = {option.lower() for option in WITHOUT_EFFECT}
_NOT_TAKEN: Final = {option.lower(): (option, problem) for option, problem in NOT_TAKEN.items()}


def without_effect(options: Iterable[str]) -> list[str]:
    """Return a line for each option of the connector that is accepted without effect."""
    given = {name.lower().removeprefix(CONNECTOR_PREFIX) for name in options}
    return [
        f"option {option} has no effect: {reason}"
        for option, reason in WITHOUT_EFFECT.items()
        if option.lower() in given
    ]
