"""The bare and annotated message (AMQP 1.0, part 3.2), as an object.

It is for requests, replies and what is read of an event beyond the common fields. The event path works on encoded
sections (`sections`), and builds no dictionary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Final
from uuid import UUID

from eventpump.amqp.codec import AmqpDecodeError, EncodeError, decode_described, items_at
from eventpump.amqp.sections import (
    AMQP_SEQUENCE,
    AMQP_VALUE,
    APPLICATION_PROPERTIES,
    BODIES,
    DATA,
    DELIVERY_ANNOTATIONS,
    FOOTER,
    HEADER,
    MESSAGE_ANNOTATIONS,
    NULL_DATA,
    PROPERTIES,
    check_sections,
    encode_data,
    section,
    section_value,
    values_at,
)
from eventpump.amqp.types import Symbol, Timestamp, UByte, UInt, ULong


@dataclass(frozen=True, slots=True)
class Data:
    """A body of one or more data sections (3.2.6). It has no parts where the section holds null, not binary."""

    parts: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class AmqpSequence:
    """A body of one or more amqp-sequence sections (3.2.7)."""

    parts: tuple[list[Any], ...]


@dataclass(frozen=True, slots=True)
class AmqpValue:
    """A body of one amqp-value section (3.2.8)."""

    value: Any


Body = Data | AmqpSequence | AmqpValue


@dataclass(slots=True)
class Header:
    """3.2.1. `ttl` in milliseconds."""

    durable: bool | None = None
    priority: int | None = None
    ttl: int | None = None
    first_acquirer: bool | None = None
    delivery_count: int | None = None

    _prepare: ClassVar[tuple[Callable[[Any], Any] | None, ...]]


def is_message_id(value: object) -> bool:
    """Return whether a value is of a type that ids have (3.2.11 to 3.2.14): text, a number, a UUID or binary."""
    return isinstance(value, str | int | bytes | bytearray | memoryview | UUID) and not isinstance(value, bool)


def _message_id(value: Any) -> Any:
    # 3.2.11 to 3.2.14: not a long. A peer's id of another type is sent on as it came.
    return ULong(value) if type(value) is int else value


def _user_id(value: Any) -> bytes:
    return bytes(memoryview(value))  # not bytes(5), which are five zeros


def _boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError("not a boolean")
    return value


def _number(kind: Callable[[int], Any]) -> Callable[[Any], Any]:
    def of_kind(value: Any) -> Any:
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError("not a number")
        return kind(value)

    return of_kind


def _text(kind: Callable[[str], Any]) -> Callable[[Any], Any]:
    def of_kind(value: Any) -> Any:
        if not isinstance(value, str):
            raise TypeError("not text")
        return kind(value)

    return of_kind


Header._prepare = (_boolean, _number(UByte), _number(UInt), _boolean, _number(UInt))  # noqa: SLF001 - of this module


@dataclass(slots=True)
class Properties:
    """3.2.4. Message and correlation ids are a string, ulong, uuid or binary; the times are timestamps."""

    message_id: Any = None
    user_id: bytes | None = None
    to: Any = None
    subject: str | None = None
    reply_to: Any = None
    correlation_id: Any = None
    content_type: str | None = None
    content_encoding: str | None = None
    absolute_expiry_time: Timestamp | None = None
    creation_time: Timestamp | None = None
    group_id: str | None = None
    group_sequence: int | None = None
    reply_to_group_id: str | None = None

    _prepare: ClassVar[tuple[Callable[[Any], Any] | None, ...]] = (
        _message_id,
        _user_id,
        None,
        _text(str),
        None,
        _message_id,
        _text(Symbol),
        _text(Symbol),
        _number(Timestamp),
        _number(Timestamp),
        _text(str),
        _number(UInt),
        _text(str),
    )


_NAMES = {kind: tuple(each.name for each in fields(kind)) for kind in (Header, Properties)}


def listed(value: Header | Properties, *, is_padded: bool = False) -> list[Any]:
    """Return the fields as the items of their section; those that are not set are left out at the end.

    Args:
        is_padded: Keep those, as nulls.
    """
    prepared: list[Any] = []
    for name, prepare in zip(_NAMES[type(value)], value._prepare, strict=True):  # noqa: SLF001 - of this module
        item = getattr(value, name)
        try:
            prepared.append(item if item is None or prepare is None else prepare(item))
        except (TypeError, ValueError) as error:
            # Fields of a decoded message have the types that its sender gave them.
            raise EncodeError(f"the field {name} cannot be encoded: {error}") from None
    while prepared and prepared[-1] is None and not is_padded:
        prepared.pop()
    return prepared


PROPERTY_NAMES: Final = _NAMES[Properties]
"""The fields of the properties section, in order."""


def _too_many() -> AmqpDecodeError:
    return AmqpDecodeError("a header or properties section has too many fields")


def _fill(made: Any, items: list[Any]) -> Any:
    names = _NAMES[type(made)]
    if len(items) > len(names):
        raise _too_many()
    for name, item in zip(names, items, strict=False):
        setattr(made, name, item)
    return made


@dataclass(slots=True)
class Message:
    """A whole message. A `body` of None means that there is no body section, as in management requests."""

    body: Body | None = None
    properties: Properties | None = None
    application_properties: dict[Any, Any] | None = None
    message_annotations: dict[Any, Any] | None = None
    delivery_annotations: dict[Any, Any] | None = None
    header: Header | None = None
    footer: dict[Any, Any] | None = None

    def encode(self, *, is_padded: bool = False) -> bytes:
        """Encode in the order of the specification.

        Args:
            is_padded: Write all fields of the properties section, as the service does in its answers.
        """
        out: list[bytes] = []
        if self.header is not None:
            out.append(section(HEADER, listed(self.header)))
        if self.delivery_annotations is not None:
            out.append(section(DELIVERY_ANNOTATIONS, self.delivery_annotations))
        if self.message_annotations is not None:
            out.append(section(MESSAGE_ANNOTATIONS, self.message_annotations))
        if self.properties is not None:
            out.append(section(PROPERTIES, listed(self.properties, is_padded=is_padded)))
        if self.application_properties is not None:
            out.append(section(APPLICATION_PROPERTIES, self.application_properties))
        match self.body:
            case Data(parts):
                out.extend(map(encode_data, parts) if parts else (NULL_DATA,))
            case AmqpSequence(lists):
                out.extend(section(AMQP_SEQUENCE, list(each)) for each in lists)
            case AmqpValue(value):
                out.append(section(AMQP_VALUE, value))
            case None:
                pass
        if self.footer is not None:
            out.append(section(FOOTER, self.footer))
        return b"".join(out)

    @classmethod
    def decode(cls, raw: bytes) -> Message:
        """Decode a message, its sections in any order. Raises `AmqpDecodeError` if it is none."""
        made = cls()
        bodies: list[tuple[int, Any]] = []
        for code, _, start, end in check_sections(raw):
            value = decode_described(raw, start, end)
            if code in BODIES:
                bodies.append((code, value))
            elif code == HEADER:
                made.header = _fill(Header(), value)
            elif code == PROPERTIES:
                made.properties = _fill(Properties(), value)
            else:
                setattr(made, _MAPS[code], value)
        made.body = _body(bodies)
        return made


_MAPS = {
    DELIVERY_ANNOTATIONS: "delivery_annotations",
    MESSAGE_ANNOTATIONS: "message_annotations",
    APPLICATION_PROPERTIES: "application_properties",
    FOOTER: "footer",
}


def _body(sections: list[tuple[int, Any]]) -> Body | None:
    """Return the body whose sections have these codes and values: all of one kind."""
    if not sections:
        return None
    values = tuple(value for _, value in sections)
    if sections[0][0] == DATA:
        return Data(tuple(part for part in values if part is not None))
    return AmqpSequence(values) if sections[0][0] == AMQP_SEQUENCE else AmqpValue(values[0])


# Parts of a message. Each checks the message as a whole, and decodes nothing but its part.


def decode_body(raw: bytes) -> Body | None:
    """Decode the body of a message; None if it has none. Raises `AmqpDecodeError` if it cannot be decoded."""
    return _body([(code, decode_described(raw, start, end)) for code, start, end in values_at(raw, DATA, AMQP_VALUE)])


def decode_properties(raw: bytes) -> dict[str, Any]:
    """Decode the standard properties of a message that are set, by their names in `Properties`."""
    items = section_value(raw, PROPERTIES)
    if not items:
        return {}
    if len(items) > len(PROPERTY_NAMES):
        raise _too_many()
    return {name: item for name, item in zip(PROPERTY_NAMES, items, strict=False) if item is not None}


def decode_property(raw: bytes, place: int) -> Any:
    """Decode the property of an index in `PROPERTY_NAMES`; None if it is not set. Raises `AmqpDecodeError`."""
    for _, start, end in values_at(raw, PROPERTIES, PROPERTIES):
        items = items_at(raw, start, end)
        if len(items) - 1 > len(PROPERTY_NAMES):
            raise _too_many()
        if place < len(items) - 1:
            return decode_described(raw, items[place], items[place + 1], 2)
    return None
