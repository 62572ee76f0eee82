"""Events as users meet them, positions in a partition, and checkpoints."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache, total_ordering
from itertools import repeat
from typing import Any, Final, Self, TypedDict

from eventpump.amqp.codec import AmqpDecodeError
from eventpump.amqp.message import (
    PROPERTY_NAMES,
    AmqpSequence,
    AmqpValue,
    Body,
    Data,
    Header,
    Message,
    Properties,
    decode_body,
    decode_properties,
    decode_property,
    is_message_id,
    listed,
)
from eventpump.amqp.sections import (
    APPLICATION_PROPERTIES,
    DELIVERY_ANNOTATIONS,
    FOOTER,
    MESSAGE_ANNOTATIONS,
    PROPERTIES,
    EventFields,
    data_head,
    encode_data,
    find_key,
    prefix_end,
    salvage_annotations,
    scan_event,
    scan_key,
    section,
    section_value,
)
from eventpump.amqp.types import Symbol, Timestamp
from eventpump.compiled import based_on_core, core
from eventpump.errors import EventError
from eventpump.eventhubs.names import (
    ENQUEUED_TIME,
    LAST_ENQUEUED_OFFSET,
    LAST_ENQUEUED_SEQUENCE_NUMBER,
    LAST_ENQUEUED_TIME,
    OFFSET,
    PARTITION_KEY,
    RUNTIME_INFO_RETRIEVAL_TIME,
    SEQUENCE_NUMBER,
)

_FIELDS = EventFields(SEQUENCE_NUMBER.encode(), OFFSET.encode(), ENQUEUED_TIME.encode(), PARTITION_KEY.encode())
_UNREAD: Final[str | None] = "\0 not read"
"""Stands, by its identity, for a partition key that was not read."""


@lru_cache(maxsize=1024)
def _moment(milliseconds: int) -> datetime:
    """Make a datetime. Remembered, because many events are stored in the same millisecond."""
    if 0 <= milliseconds < 4_000_000_000_000:  # beyond it a float would be off by a microsecond
        return datetime.fromtimestamp(milliseconds / 1000, UTC)
    return Timestamp(milliseconds).to_datetime()


START_OFFSET = "-1"
LATEST_OFFSET = "@latest"

_NUMBER = re.compile(r"-?[0-9]{1,19}")


@total_ordering
@dataclass(frozen=True, slots=True)
class EventPosition:
    """A position in a partition to read from. Created by its class methods; exactly one of the first three is set.

    `str` of it is a text to store, such as ``number>=5``, which `parse` reads. Two positions of the same kind have an
    order where one is known: sequence numbers and times do, offsets only where they are equal. Comparing others raises
    `TypeError`.

    Args:
        offset: The offset of an event, an opaque text; "-1" is the start of the stream, "@latest" the end of the
            partition when the link is attached. Default: None.
        sequence_number: The sequence number of an event. Default: None.
        enqueued_time: A time at which events were enqueued, with a time zone. Default: None.
        inclusive: Whether the event at the position itself is read too. Default: False.

    Raises:
        ValueError: Not exactly one of the first three is given, or it cannot be a position.
    """

    offset: str | None = None
    sequence_number: int | None = None
    enqueued_time: datetime | None = None
    inclusive: bool = False

    def __post_init__(self) -> None:
        if sum(each is not None for each in (self.offset, self.sequence_number, self.enqueued_time)) != 1:
            raise ValueError("a position is an offset, a sequence number or an enqueued time: one of them")
        if self.offset is not None and (not self.offset or "'" in self.offset):
            raise ValueError("an offset is text, not empty and without quotes")
        if self.enqueued_time is not None and self.enqueued_time.tzinfo is None:
            raise ValueError("an enqueued time needs a time zone")

    @classmethod
    def earliest(cls) -> EventPosition:
        """Return the position of the oldest retained event."""
        return cls(offset=START_OFFSET)

    @classmethod
    def latest(cls) -> EventPosition:
        """Return the end of the partition when the link is attached: only later events are read."""
        return cls(offset=LATEST_OFFSET)

    @classmethod
    def at_offset(cls, offset: str, *, inclusive: bool = False) -> EventPosition:
        """Return the position after an event.

        Args:
            offset: The event's offset.
            inclusive: Whether the event itself is read too. Default: False.
        """
        return cls(offset=offset, inclusive=inclusive)

    @classmethod
    def at_sequence_number(cls, sequence_number: int, *, inclusive: bool = False) -> EventPosition:
        """Return the position after an event.

        Args:
            sequence_number: The event's sequence number.
            inclusive: Whether the event itself is read too. Default: False.
        """
        return cls(sequence_number=sequence_number, inclusive=inclusive)

    @classmethod
    def at_enqueued_time(cls, moment: datetime, *, inclusive: bool = False) -> EventPosition:
        """Return the position of the first event that was enqueued after a time.

        Args:
            moment: The time, with a time zone.
            inclusive: Whether events that were enqueued at that time are read too. Default: False.
        """
        return cls(enqueued_time=moment, inclusive=inclusive)

    @classmethod
    def parse(cls, text: str) -> EventPosition:
        """Return the position that `str` wrote.

        Raises:
            ValueError: `str` wrote no such text.
        """
        kind, operator, value = text.partition(">")
        inclusive = value.startswith("=")
        if inclusive:
            value = value[1:]
        position: EventPosition | None = None
        with suppress(ValueError):
            match kind if operator else "":
                case "offset":
                    position = cls.at_offset(value, inclusive=inclusive)
                case "number" if _NUMBER.fullmatch(value):
                    position = cls.at_sequence_number(int(value), inclusive=inclusive)
                case "time":
                    position = cls.at_enqueued_time(datetime.fromisoformat(value), inclusive=inclusive)
        if position is None or str(position) != text:
            raise ValueError(f"{text[:80]!r} is not a position: expected the text that str(position) returns")
        return position

    def __str__(self) -> str:
        operator = ">=" if self.inclusive else ">"
        if self.offset is not None:
            return f"offset{operator}{self.offset}"
        if self.sequence_number is not None:
            return f"number{operator}{int(self.sequence_number)}"
        assert self.enqueued_time is not None
        # In UTC, so that every position has one text.
        return f"time{operator}{self.enqueued_time.astimezone(UTC).isoformat()}"

    def __lt__(self, other: object) -> bool:
        if not isinstance(other, EventPosition):
            return NotImplemented
        # An inclusive position is the one before the event, and so the lower one.
        if self.sequence_number is not None and other.sequence_number is not None:
            return (self.sequence_number, not self.inclusive) < (other.sequence_number, not other.inclusive)
        if self.enqueued_time is not None and other.enqueued_time is not None:
            return (self.enqueued_time, not self.inclusive) < (other.enqueued_time, not other.inclusive)
        if self.offset is not None and self.offset == other.offset:
            return self.inclusive and not other.inclusive
        return NotImplemented


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """How far a partition is processed: the position of the last processed event.

    Args:
        partition_id: The partition.
        offset: The event's offset, an opaque text.
        sequence_number: The event's sequence number.
    """

    partition_id: str
    offset: str
    sequence_number: int


@dataclass(frozen=True, slots=True)
class LastEnqueued:
    """The newest event of a partition, as the service stated with a received event.

    Args:
        sequence_number: Its sequence number; None if the service did not state it.
        offset: Its offset; None if the service did not state it.
        enqueued_time: When it was enqueued; None if the service did not state it.
        retrieval_time: When the service looked it up; None if the service did not state it.
    """

    sequence_number: int | None
    offset: str | None
    enqueued_time: datetime | None
    retrieval_time: datetime | None


STANDARD_PROPERTIES = PROPERTY_NAMES
"""The fields of the properties section of a message (AMQP 1.0, 3.2.4)."""


class MessageContent(TypedDict):
    """A body and its content type: what the encoders of azure-schemaregistry read of an event.

    Args:
        content: The body as bytes.
        content_type: The content type; an empty text if there is none.
    """

    content: bytes
    content_type: str


def _datetime(value: Any) -> datetime | None:
    return value.to_datetime() if isinstance(value, Timestamp) else None


@based_on_core("PlainEventData")
class EventData:
    """An event to send.

    Args:
        body: Bytes, or text, which is encoded as UTF-8; None if `value` or `sequence` is the body. Default: None.
        properties: Application properties; keys are text, values simple AMQP types. Default: none.
        value: A body that is one AMQP value. Default: None.
        sequence: A body that is one AMQP list. Default: None.
        standard: AMQP standard properties by name: message_id, correlation_id, content_type, subject and so on.

    Raises:
        EventError: The body, a property or its name cannot be part of an event.
    """

    # For an event that is bytes only, body and properties are made when they are accessed: most events are.
    __slots__ = ("_body", "_payload", "_properties", "_published_number", "_sent_context", "standard")
    _sent_context: object  # not set by `__init__`: only telemetry does

    def __init__(
        self,
        body: bytes | bytearray | memoryview | str | None = None,
        *,
        properties: Mapping[str, Any] | None = None,
        value: Any = None,
        sequence: Sequence[Any] | None = None,
        **standard: Any,
    ) -> None:
        self._payload: bytes | None = None
        self._body: AmqpSequence | AmqpValue | None = None
        self._properties: dict[str, Any] | None = None
        self.standard: dict[str, Any] | None = None
        self._published_number: int | None = None
        if type(body) is bytes and properties is None and value is None and sequence is None and not standard:
            self._payload = body
            return
        if (body is not None) + (value is not None) + (sequence is not None) > 1:
            raise EventError("an event has one body: give `body`, `value` or `sequence`, and not several of them")
        if properties is not None and not all(isinstance(key, str) for key in properties):
            raise EventError("the names of application properties must be text")
        if standard and (unknown := standard.keys() - set(STANDARD_PROPERTIES)):
            raise EventError(
                f"{sorted(unknown)[0]} is not a standard property of AMQP, which are {', '.join(STANDARD_PROPERTIES)}; "
                "give application properties as `properties`"
            )
        for name in ("message_id", "correlation_id"):
            if (given := standard.get(name)) is not None and not is_message_id(given):
                raise EventError(f"{name} must be text, a whole number, a UUID or bytes, not {type(given).__name__}")
        if value is not None:
            self._body = AmqpValue(value)
        elif sequence is not None:
            self._body = AmqpSequence((list(sequence),))
        elif body is None:
            self._payload = b""
        elif isinstance(body, str):
            try:
                self._payload = body.encode()
            except UnicodeEncodeError:
                raise EventError("the body contains a lone surrogate, which UTF-8 cannot encode") from None
        elif isinstance(body, (bytes, bytearray, memoryview)):
            self._payload = bytes(body)
        else:
            raise EventError(
                f"the body must be bytes or text, not {type(body).__name__}; give an object as "
                "EventData.json(...), or as `value`, which is in AMQP's own types"
            )
        if properties:
            self._properties = dict(properties)
        self.standard = standard or None

    @property
    def published_sequence_number(self) -> int | None:
        """The event's number at an idempotent producer, after it was published in a list; else None."""
        return self._published_number

    @property
    def data(self) -> bytes | None:
        """The body, if the event consists of bytes only; None if it has properties or another body."""
        return self._payload if not self._properties and self.standard is None else None

    @classmethod
    def json(cls, body: Any, *, properties: Mapping[str, Any] | None = None, **standard: Any) -> EventData:
        """Return an event with a body in JSON, encoded as UTF-8, whose content type is "application/json".

        Args:
            body: What `json.dumps` takes.
            properties: As of the class. Default: none.
            standard: As of the class.

        Raises:
            EventError: It has no form in JSON; NaN and infinity have none.
        """
        try:
            text = json.dumps(body, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise EventError(f"the body has no form in JSON: {error}") from error
        return cls(text, properties=properties, **{"content_type": "application/json", **standard})

    @classmethod
    def from_message_content(cls, content: bytes, content_type: str, **options: Any) -> Self:
        """Return an event with an encoded body. The encoders of azure-schemaregistry call it.

        Args:
            content: The body.
            content_type: Its content type, which names the schema.
            options: As of the class, such as `properties`: those that were given to the encoder.

        Raises:
            EventError: As for the class.
        """
        return cls(content, content_type=content_type, **options)

    def __message_content__(self) -> MessageContent:
        """Return body and content type. The encoders of azure-schemaregistry call it.

        Raises:
            EventError: The body is not data.
        """
        return {"content": self.body, "content_type": str((self.standard or {}).get("content_type") or "")}

    @property
    def body(self) -> bytes:
        """The body as bytes: those given, or the given text in UTF-8.

        Raises:
            EventError: It was given as `value` or `sequence`; see `value`.
        """
        if self._payload is None:
            raise EventError(f"the body is not data (it is: {self.body_type}); use `value`")
        return self._payload

    @property
    def body_type(self) -> str:
        """The kind of body: "data", "sequence" or "value"."""
        if self._payload is not None:
            return "data"
        return "sequence" if isinstance(self._body, AmqpSequence) else "value"

    @property
    def value(self) -> Any:
        """The body of any kind: bytes, a list, or an AMQP value."""
        match self._body:
            case AmqpSequence(lists):
                return [item for each in lists for item in each]
            case AmqpValue(value):
                return value
        return self._payload

    def body_as_str(self, encoding: str = "utf-8") -> str:
        """Return the body as text: bytes decoded, or a value that is text.

        Args:
            encoding: The encoding of bytes. Default: "utf-8".

        Raises:
            EventError: The body is not text in that encoding.
        """
        if self._payload is None and isinstance(self.value, str):
            return str(self.value)
        try:
            return self.body.decode(encoding)
        except UnicodeDecodeError as error:
            raise EventError(f"the body is not valid {encoding}; use `body`") from error

    def body_as_json(self, encoding: str = "utf-8") -> Any:
        """Return the body parsed as JSON.

        Args:
            encoding: The encoding of bytes. Default: "utf-8".

        Raises:
            EventError: The body is not JSON in that encoding.
        """
        return _parsed_json(self.body_as_str(encoding))

    @property
    def section(self) -> Data | AmqpSequence | AmqpValue:
        """The body as an AMQP section."""
        if self._payload is not None:
            return Data((self._payload,))
        assert self._body is not None
        return self._body

    @property
    def properties(self) -> dict[str, Any]:
        """The application properties. They may be changed until the event is sent."""
        if self._properties is None:
            self._properties = {}
        return self._properties

    @properties.setter
    def properties(self, properties: Mapping[str, Any]) -> None:
        self._properties = dict(properties)

    def encode(self, partition_key: str | None = None) -> bytes:
        """Encode the event as one AMQP message.

        Args:
            partition_key: The partition key to annotate it with; None for no key. Default: None.

        Raises:
            EventError: A property or the body has a type or value that AMQP cannot encode.
        """
        if partition_key is None and self._payload is not None:
            return self.encode_head() + self._payload
        message = Message(body=self.section)
        if self._properties:
            message.application_properties = self._properties
        if self.standard is not None:
            message.properties = _properties(self.standard)
        if partition_key is not None:
            # protocol.md 7.2: a key is ignored if the header is present but empty, so the header has `durable`.
            message.header = Header(durable=True)
            message.message_annotations = {PARTITION_KEY: partition_key}
        return _encode(message)

    def encode_head(self) -> bytes:
        """Encode the bytes before the body: the properties, and the beginning of a data section.

        Raises:
            EventError: A property has a type or value that AMQP cannot encode, or the body is not bytes.
        """
        head = data_head(len(self.body))
        if self._properties is None and self.standard is None:
            return head
        standard = None if self.standard is None else _properties(self.standard)
        try:
            before = b"" if standard is None else section(PROPERTIES, listed(standard))
            if self._properties:
                before += section(APPLICATION_PROPERTIES, self._properties)
        except (ValueError, TypeError) as error:
            raise _unencodable(error) from error
        return before + head

    def __repr__(self) -> str:
        return f"EventData({self.section!r:.80}, properties={len(self._properties or ())})"


def _parsed_json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise EventError(f"the body is not valid JSON: {error}") from error


def no_event(given: object) -> EventError:
    """Return the error for what is not an event to send."""
    hint = "; send `event.to_event_data()`" if isinstance(given, ReceivedEvent) else ""
    return EventError(f"an event to send is an EventData, not {type(given).__name__}{hint}")


def with_properties(event: EventData, more: Mapping[str, Any]) -> EventData:
    """Return an event that is another one with further application properties. Those that it has are kept."""
    properties = {**more, **(event._properties or {})}  # noqa: SLF001 - it is of this module
    if type(event) is not EventData:
        made = copy.copy(event)
        made._properties = properties  # noqa: SLF001 - likewise
        return made
    made = EventData(b"")  # a tenth of the time of a copy
    made._payload, made._body, made.standard = event._payload, event._body, event.standard  # noqa: SLF001 - likewise
    made._properties = properties  # noqa: SLF001 - likewise
    return made


def set_sent_context(event: EventData, context: object) -> None:
    """Record the trace context that an event was encoded with last; None for none. Called where that is recorded."""
    event._sent_context = context  # noqa: SLF001 - it is of this module


def sent_context(event: object) -> Any:
    """Return what `set_sent_context` has recorded; None without."""
    return getattr(event, "_sent_context", None)


def number_of(event: ReceivedEvent) -> int | None:
    """Return an event's sequence number; None if it cannot be read."""
    try:
        return event.sequence_number
    except EventError:
        return None


def copy_of(event: ReceivedEvent) -> EventData:
    """Return an event to send with body, application properties and standard properties of a received one."""
    return event._copied()  # noqa: SLF001 - it is of this module


def _encode(message: Message) -> bytes:
    try:
        return message.encode()
    except (ValueError, TypeError) as error:
        raise _unencodable(error) from error


def _unencodable(error: Exception) -> EventError:
    return EventError(f"a property or the body cannot be encoded in AMQP: {error}")


def _properties(standard: Mapping[str, Any]) -> Properties:
    values = dict(standard)
    for name in ("absolute_expiry_time", "creation_time"):
        if isinstance(values.get(name), datetime):
            try:
                values[name] = Timestamp.from_datetime(values[name])
            except ValueError as error:
                raise EventError(f"{name}: {error}") from None
    return Properties(**values)


def _is_long(number: int) -> bool:
    """Return whether a number is in the range of an AMQP long; a ulong may exceed it."""
    return number >> 63 in (0, -1)


_SLOTS = ("_body", "_enqueued", "_key", "_offset", "_origin", "_properties", "_raw", "_sequence_number", "_values")
if core is not None:
    core.encode_properties(datetime, STANDARD_PROPERTIES)
    core.read_events(
        _moment, _FIELDS.sequence_number, _FIELDS.offset, _FIELDS.enqueued_time, _FIELDS.partition_key, _UNREAD
    )


@based_on_core("EncodedEvent")
class ReceivedEvent:
    """A received event: the encoded message, of which each attribute is decoded when it is first accessed.

    The attributes have the names of azure-eventhub, if that has them. Accessing one raises `EventError` if the message
    does not have it or it cannot be decoded; what else the message holds does not matter, if it consists of sections.
    `offset`, `sequence_number` and `enqueued_time` can be read even if it does not, so that a checkpoint after such a
    message is possible.

    Args:
        raw: The encoded message.
        origin: An object that identifies the partition it was received from; None if unknown.
    """

    __slots__ = _SLOTS

    def __init__(self, raw: bytes, origin: object = None) -> None:
        self._raw = raw
        self._offset: str | None = None
        self._properties: dict[Any, Any] | None = None
        self._values: dict[str | int, Any] | None = None
        self._origin = origin

    @classmethod
    def build(
        cls,
        body: bytes | str | None = None,
        *,
        offset: str,
        sequence_number: int,
        enqueued_time: datetime,
        partition_key: str | None = None,
        properties: Mapping[str, Any] | None = None,
        value: Any = None,
        sequence: Sequence[Any] | None = None,
        last_enqueued: LastEnqueued | None = None,
        **standard: Any,
    ) -> ReceivedEvent:
        """Return an event with these contents: for tests, generators, and transports that decode messages themselves.

        Args:
            body: As for `EventData`.
            offset: The event's offset.
            sequence_number: The event's sequence number.
            enqueued_time: When the event was enqueued, with a time zone.
            partition_key: The partition key it was sent with. Default: None.
            properties: As for `EventData`.
            value: As for `EventData`.
            sequence: As for `EventData`.
            last_enqueued: What the service states about the partition's newest event. Default: None.
            standard: As for `EventData`.

        Raises:
            EventError: As for `EventData`.
        """
        event = EventData(body, properties=properties, value=value, sequence=sequence, **standard)
        annotations: dict[Symbol, Any] = {
            SEQUENCE_NUMBER: sequence_number,
            OFFSET: offset,
            ENQUEUED_TIME: Timestamp.from_datetime(enqueued_time),
        }
        if partition_key is not None:
            annotations[PARTITION_KEY] = partition_key
        message = Message(body=event.section, message_annotations=annotations)
        if event.properties:
            message.application_properties = event.properties
        if event.standard is not None:
            message.properties = _properties(event.standard)
        if last_enqueued is not None:
            message.delivery_annotations = {
                LAST_ENQUEUED_SEQUENCE_NUMBER: last_enqueued.sequence_number,
                LAST_ENQUEUED_OFFSET: last_enqueued.offset,
                LAST_ENQUEUED_TIME: last_enqueued.enqueued_time,
                RUNTIME_INFO_RETRIEVAL_TIME: last_enqueued.retrieval_time,
            }
        return cls(_encode(message))

    @classmethod
    def from_message_content(cls, content: bytes, content_type: str, **options: Any) -> ReceivedEvent:
        """Return an event with an encoded body, for tests. The encoders of azure-schemaregistry call it.

        Args:
            content: The body.
            content_type: Its content type, which names the schema.
            options: As of `build`, such as `offset`, `sequence_number` and `enqueued_time`, which it requires: those
                that were given to the encoder.

        Raises:
            EventError: As for `EventData`.
        """
        return cls.build(content, content_type=content_type, **options)

    def __message_content__(self) -> MessageContent:
        """Return body and content type. The encoders of azure-schemaregistry call it.

        Raises:
            EventError: The body is not data, or it cannot be decoded.
        """
        return {"content": self.body, "content_type": self.content_type or ""}

    def _scan(self) -> None:
        try:
            sequence, offset, enqueued, body = scan_event(self._raw, _FIELDS)
        except AmqpDecodeError as error:
            # Its position in the partition is read nevertheless, so that a reader can continue after it.
            sequence, offset, enqueued = salvage_annotations(self._raw, _FIELDS)
            body = None
            if sequence is None or offset is None or enqueued is None or not _is_long(sequence):
                raise EventError(f"the event cannot be decoded: {error}") from error
        if sequence is None or offset is None or enqueued is None:
            sequence, offset, enqueued = self._annotations()
        self._sequence_number = sequence
        self._enqueued = enqueued
        self._body = body
        self._key = _UNREAD
        self._offset = offset

    def _annotations(self) -> tuple[int, str, int]:
        """Read the annotations with the general decoder: the scan does not know their encoding, or they are missing."""
        annotations = self._read(section_value, MESSAGE_ANNOTATIONS) or {}
        sequence, offset, enqueued = (annotations.get(name) for name in (SEQUENCE_NUMBER, OFFSET, ENQUEUED_TIME))
        if type(sequence) is bool or not (
            isinstance(sequence, int) and isinstance(offset, str) and isinstance(enqueued, Timestamp)
        ):
            raise EventError("the message lacks the annotations of an event: sequence number, offset or enqueued time")
        if not _is_long(sequence):
            raise EventError("the sequence number of the message is not in the range of an AMQP long")
        return int(sequence), str(offset), int(enqueued)

    def _read(self, decode: Callable[..., Any], *place: Any) -> Any:
        """Decode a part of the message."""
        try:
            return decode(self._raw, *place)
        except AmqpDecodeError as error:
            raise EventError(f"the event cannot be decoded: {error}") from error

    def _once(self, name: str | int, decode: Callable[..., Any], *place: int) -> Any:
        """Decode a part of the message when it is first asked for, and keep it under a name."""
        values = self._values
        if values is None:
            values = self._values = {}
        elif name in values:
            return values[name]
        found = values[name] = self._read(decode, *place)
        return found

    @property
    def raw(self) -> bytes:
        """The encoded message, as received."""
        return self._raw

    @property
    def origin(self) -> object:
        """Identifies the partition from which a host delivered the event; None for other events."""
        return self._origin

    @property
    def sequence_number(self) -> int:
        """The event's sequence number in the partition."""
        if self._offset is None:
            self._scan()
        return self._sequence_number

    @property
    def offset(self) -> str:
        """The event's offset in the partition, an opaque text."""
        if self._offset is None:
            self._scan()
        assert self._offset is not None
        return self._offset

    @property
    def enqueued_time(self) -> datetime:
        """When the service stored the event: a UTC time, to the millisecond."""
        if self._offset is None:
            self._scan()
        return _moment(self._enqueued)

    @property
    def body(self) -> bytes:
        """The body as bytes; several data sections are joined.

        Raises:
            EventError: The body is not data; see `value`.
        """
        if self._offset is None:
            self._scan()
        if self._body is None:
            self._body = self._bytes()
            if self._body is None:
                raise EventError(f"the body is not data (it is: {_type_of(self._content())}); use `value`")
        return self._body

    def _data(self) -> bytes | None:
        """Return the body that the scan finds, or that was read before; None where the general decoder has to."""
        if self._offset is None:
            with suppress(EventError):  # the body can be read without a place
                self._scan()
        return None if self._offset is None else self._body

    def _bytes(self) -> bytes | None:
        """Return the body of the message, its sections joined; None if it is not data."""
        data = self._data()
        if data is None and isinstance(body := self._content(), Data):
            data = b"".join(body.parts)
        return data

    def _content(self) -> Body | None:
        """Decode the body; None if there is none."""
        body: Body | None = self._once("body", decode_body)
        return body

    @property
    def body_type(self) -> str:
        """The kind of body: "data", "sequence", "value", or "none" if there is no body."""
        return "data" if self._data() is not None else _type_of(self._content())

    @property
    def value(self) -> Any:
        """The body of any kind: bytes, a list (several sequences are joined), an AMQP value, or None.

        None too for data that is null, as JavaScript's clients send for an event without a body; `body` is empty then.
        """
        return self._data() or self._once("value", _value_of)

    def body_as_str(self, encoding: str = "utf-8") -> str:
        """Return the body as text: data decoded, or a value that is text.

        Args:
            encoding: The encoding of data. Default: "utf-8".

        Raises:
            EventError: The body is not text in that encoding.
        """
        try:
            if self._offset is None:
                self._scan()
            if self._body is None and isinstance(self.value, str):
                return str(self.value)
            return self.body.decode(encoding)
        except UnicodeDecodeError as error:
            raise EventError(f"the body is not valid {encoding}; use `body`") from error

    def body_as_json(self, encoding: str = "utf-8") -> Any:
        """Return the body parsed as JSON.

        Args:
            encoding: The encoding of data. Default: "utf-8".

        Raises:
            EventError: The body is not JSON in that encoding.
        """
        return _parsed_json(self.body_as_str(encoding))

    def to_event_data(self) -> EventData:
        """Return an event to send with the body, the application properties and the standard properties of this one.

        Its partition key is not part of it: give `partition_key=event.partition_key` to `send`. Annotations and footer
        are not part of it either.

        Raises:
            EventError: This one cannot be decoded.
        """
        return self._copied()

    @property
    def properties(self) -> dict[str, Any]:
        """The application properties; empty if there are none."""
        found = self._properties
        if found is None:
            found = self._properties = self._read(section_value, APPLICATION_PROPERTIES) or {}
        return found

    @property
    def system_properties(self) -> dict[str, Any]:
        """The message annotations, and the standard properties that are set, by their AMQP names."""
        found: dict[str, Any] = self._once("system_properties", _system_properties)
        return found

    @property
    def partition_key(self) -> str | None:
        """The partition key that the event was sent with; None if there was none."""
        if self._offset is not None and self._key is not _UNREAD:
            return self._key
        if (found := scan_key(self._raw, _FIELDS)) is not None:
            (sequence, offset, enqueued, body), key = found
            if self._offset is None and sequence is not None and offset is not None and enqueued is not None:
                self._sequence_number, self._enqueued, self._body, self._offset = sequence, enqueued, body, offset
        else:
            if self._offset is None:
                with suppress(EventError):  # the key can be read without a place
                    self._scan()  # the next message of that layout is read faster
            named = self._read(find_key, _FIELDS)
            key = None if named is None else str(named)
        if self._offset is not None:
            self._key = key
        return key

    @property
    def message_id(self) -> Any:
        """Text, a number, a UUID or bytes, as the sender chose; None if the sender set none."""
        return self._once(_MESSAGE_ID, decode_property, _MESSAGE_ID)

    @property
    def correlation_id(self) -> Any:
        """Text, a number, a UUID or bytes, as the sender chose; None if the sender set none."""
        return self._once(_CORRELATION_ID, decode_property, _CORRELATION_ID)

    @property
    def content_type(self) -> str | None:
        """The MIME type of the body; None if the sender set none."""
        return self._text(_CONTENT_TYPE)

    @property
    def _content_encoding(self) -> str | None:
        """What the body is encoded with; None if the sender set nothing."""
        return self._text(_CONTENT_ENCODING)

    def _text(self, place: int) -> str | None:
        """Return a standard property as text; None if it is not set."""
        found: str | None = self._once(place, _text_property, place)
        return found

    @property
    def raw_message(self) -> Message:
        """The whole message, decoded.

        Raises:
            EventError: Some part of it cannot be decoded.
        """
        found: Message = self._once("raw_message", Message.decode)
        return found

    @property
    def delivery_annotations(self) -> dict[str, Any]:
        """The delivery annotations: those of the sender, which the service passes on, and what `last_enqueued` reads.

        Empty if there are none.
        """
        found: dict[str, Any] = self._once("delivery_annotations", _annotations_at, DELIVERY_ANNOTATIONS)
        return found

    @property
    def footer(self) -> dict[str, Any]:
        """The footer that the sender gave the message; empty if there is none."""
        found: dict[str, Any] = self._once("footer", _annotations_at, FOOTER)
        return found

    @property
    def last_enqueued(self) -> LastEnqueued | None:
        """The newest event of the partition when this one was sent; None without `track_last_enqueued`."""
        found: LastEnqueued | None = self._once("last_enqueued", _last_enqueued)
        return found

    def _copied(self) -> EventData:
        """Return an event to send with what the message holds: whatever a subclass returns as body or properties."""
        copy = EventData()
        data = self._bytes()
        if data is not None:
            copy._payload = data  # noqa: SLF001 - it is of this module
        elif (body := self._content()) is not None:
            assert not isinstance(body, Data)
            copy._payload, copy._body = None, body  # noqa: SLF001 - likewise
        properties = self._properties
        if properties is None:
            properties = self._read(section_value, APPLICATION_PROPERTIES)
        if properties:
            copy.properties = properties
        copy.standard = self._read(decode_properties) or None
        return copy

    def __getstate__(self) -> object:
        # What was read of the message is left out: it may be read again.
        found = object.__getstate__(self)
        attributes, others = found if isinstance(found, tuple) else (found, {})
        own = {"_raw": self._raw, "_origin": self._origin, "_offset": None, "_properties": None, "_values": None}
        return attributes, {name: value for name, value in others.items() if name not in _SLOTS} | own

    def __repr__(self) -> str:
        return f"ReceivedEvent({len(self._raw)} bytes)"


_MESSAGE_ID, _CORRELATION_ID, _CONTENT_TYPE, _CONTENT_ENCODING = (
    STANDARD_PROPERTIES.index(name) for name in ("message_id", "correlation_id", "content_type", "content_encoding")
)


def _type_of(body: Body | None) -> str:
    match body:
        case Data():
            return "data"
        case AmqpSequence():
            return "sequence"
        case AmqpValue():
            return "value"
        case None:
            return "none"


def _value_of(raw: bytes) -> Any:
    match decode_body(raw):
        case Data(parts):
            return b"".join(parts) if parts else None
        case AmqpSequence(lists):
            return [item for each in lists for item in each]
        case AmqpValue(value):
            return value
        case None:
            return None


def _text_property(raw: bytes, place: int) -> str | None:
    found = decode_property(raw, place)
    return None if found is None else str(found)


def _system_properties(raw: bytes) -> dict[str, Any]:
    annotations = section_value(raw, MESSAGE_ANNOTATIONS) or {}
    found: dict[str, Any] = {str(key): value for key, value in annotations.items()}
    return found | {name.replace("_", "-"): value for name, value in decode_properties(raw).items()}


def _annotations_at(raw: bytes, code: int) -> dict[str, Any]:
    found = section_value(raw, code) or {}
    return {str(key): value for key, value in found.items()}


def _last_enqueued(raw: bytes) -> LastEnqueued | None:
    annotations = section_value(raw, DELIVERY_ANNOTATIONS)
    if not annotations or LAST_ENQUEUED_SEQUENCE_NUMBER not in annotations:
        return None
    return LastEnqueued(
        annotations.get(LAST_ENQUEUED_SEQUENCE_NUMBER),
        annotations.get(LAST_ENQUEUED_OFFSET),
        _datetime(annotations.get(LAST_ENQUEUED_TIME)),
        _datetime(annotations.get(RUNTIME_INFO_RETRIEVAL_TIME)),
    )


def without_body(raw: bytes) -> bytes:
    """Return a message with the header and annotations of a received one: its place, without what else it holds.

    Args:
        raw: The received message, which is returned itself if its place cannot be read then.
    """
    try:
        short = raw[: prefix_end(raw)] + encode_data(b"")
        if ReceivedEvent(short).offset:
            return short
    except (AmqpDecodeError, EventError):
        pass
    return raw


def received_events_in_python(origin: object, messages: list[bytes]) -> list[ReceivedEvent]:
    """Return the events of received messages, all of one origin."""
    return list(map(ReceivedEvent, messages, repeat(origin)))


received_events = received_events_in_python if core is None else core.received_events
