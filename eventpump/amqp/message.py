"""The bare and annotated message (AMQP 1.0, part 3.2): its sections, encoded and decoded.

`Message` is the general form, for requests, replies and whatever is read of an event beyond the common fields.
The event path has functions of its own here, which build no dictionary: `scan_event`, `encode_data`, `section_spans`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, NamedTuple

from eventpump.amqp.codec import DecodeError, EncodeError, decode, encode, skip
from eventpump.amqp.types import Described, Symbol, Timestamp, UByte, UInt, ULong

HEADER = 0x70
DELIVERY_ANNOTATIONS = 0x71
MESSAGE_ANNOTATIONS = 0x72
PROPERTIES = 0x73
APPLICATION_PROPERTIES = 0x74
DATA = 0x75
AMQP_SEQUENCE = 0x76
AMQP_VALUE = 0x77
FOOTER = 0x78

_SYMBOLIC = {
    "amqp:header:list": HEADER,
    "amqp:delivery-annotations:map": DELIVERY_ANNOTATIONS,
    "amqp:message-annotations:map": MESSAGE_ANNOTATIONS,
    "amqp:properties:list": PROPERTIES,
    "amqp:application-properties:map": APPLICATION_PROPERTIES,
    "amqp:data:binary": DATA,
    "amqp:amqp-sequence:list": AMQP_SEQUENCE,
    "amqp:amqp-value:*": AMQP_VALUE,
    "amqp:footer:map": FOOTER,
}

_from_bytes = int.from_bytes


@dataclass(frozen=True, slots=True)
class Data:
    """A body of one or more data sections (3.2.6)."""

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


def _message_id(value: Any) -> Any:
    return ULong(value) if type(value) is int else value  # 3.2.11 to 3.2.14: not a long


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


def _composite(value: Header | Properties) -> list[Any]:
    prepared: list[Any] = []
    for each, prepare in zip(fields(value), value._prepare, strict=True):  # noqa: SLF001 - of this module
        item = getattr(value, each.name)
        try:
            prepared.append(item if item is None or prepare is None else prepare(item))
        except (TypeError, ValueError) as error:
            # Fields of a decoded message have the types that its sender gave them.
            raise EncodeError(f"the field {each.name} cannot be encoded: {error}") from None
    while prepared and prepared[-1] is None:
        prepared.pop()
    return prepared


def _fill(made: Any, items: Any) -> Any:
    names = [each.name for each in fields(made)]
    if type(items) is not list or len(items) > len(names):
        raise DecodeError("a header or properties section is no list, or has too many fields")
    for name, item in zip(names, items, strict=False):
        setattr(made, name, item)
    return made


@dataclass(slots=True)
class Message:
    """A message, whole. A `body` of None is no body section at all, as in management requests."""

    body: Body | None = None
    properties: Properties | None = None
    application_properties: dict[Any, Any] | None = None
    message_annotations: dict[Any, Any] | None = None
    delivery_annotations: dict[Any, Any] | None = None
    header: Header | None = None
    footer: dict[Any, Any] | None = None

    def encode(self) -> bytes:
        """Encode in the order of the specification. :raises EncodeError: a value has no AMQP form."""
        out: list[bytes] = []
        if self.header is not None:
            out.append(section(HEADER, _composite(self.header)))
        if self.delivery_annotations is not None:
            out.append(section(DELIVERY_ANNOTATIONS, self.delivery_annotations))
        if self.message_annotations is not None:
            out.append(section(MESSAGE_ANNOTATIONS, self.message_annotations))
        if self.properties is not None:
            out.append(section(PROPERTIES, _composite(self.properties)))
        if self.application_properties is not None:
            out.append(section(APPLICATION_PROPERTIES, self.application_properties))
        match self.body:
            case Data(parts):
                out.extend(encode_data(part) for part in parts)
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
        """Decode a message, its sections in any order. :raises DecodeError: it is none."""
        made = cls()
        data: list[bytes] = []
        sequences: list[list[Any]] = []
        values: list[Any] = []
        seen: set[int] = set()
        for code, start, end in section_spans(raw):
            value = decode(raw, start, end)[0].value
            if code in seen and code not in (DATA, AMQP_SEQUENCE):
                raise DecodeError("a message has a section twice")
            seen.add(code)
            if code == DATA:
                data.append(_expect(value, bytes))
            elif code == AMQP_SEQUENCE:
                sequences.append(_expect(value, list))
            elif code == AMQP_VALUE:
                values.append(value)
            elif code == HEADER:
                made.header = _fill(Header(), value)
            elif code == PROPERTIES:
                made.properties = _fill(Properties(), value)
            else:
                setattr(made, _MAPS[code], _expect(value, dict))
        if len(seen & {DATA, AMQP_SEQUENCE, AMQP_VALUE}) > 1:
            raise DecodeError("a message has bodies of several kinds")
        if data:
            made.body = Data(tuple(data))
        elif sequences:
            made.body = AmqpSequence(tuple(sequences))
        elif values:
            made.body = AmqpValue(values[0])
        return made


_MAPS = {
    DELIVERY_ANNOTATIONS: "delivery_annotations",
    MESSAGE_ANNOTATIONS: "message_annotations",
    APPLICATION_PROPERTIES: "application_properties",
    FOOTER: "footer",
}


def _expect(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise DecodeError(f"a section holds no {kind.__name__}")
    return value


def section(code: int, value: Any) -> bytes:
    """Encode one section other than data. :raises EncodeError: the value has no AMQP form."""
    return encode(Described(ULong(code), value))


_SMALL_DATA = tuple(b"\x00\x53\x75\xa0" + bytes((size,)) for size in range(256))
_pack_large_data = struct.Struct(">4sI").pack


def data_head(size: int) -> bytes:
    """Encode what stands before the payload of a data section (3.2.6), by its size in bytes."""
    return _SMALL_DATA[size] if size < 256 else _pack_large_data(b"\x00\x53\x75\xb0", size)


def encode_data(payload: bytes) -> bytes:
    """Encode one data section (3.2.6)."""
    return data_head(len(payload)) + payload


def section_spans(raw: bytes) -> list[tuple[int, int, int]]:
    """Find the sections of a message.

    :returns: for each its code, where its descriptor starts, and where it ends.
    :raises DecodeError: the bytes are not a run of sections.
    """
    spans: list[tuple[int, int, int]] = []
    code: Any
    pos, end = 0, len(raw)
    while pos < end:
        start = pos
        if raw[pos : pos + 2] == b"\x00\x53" and pos + 2 < end:
            code = raw[pos + 2]
            pos = skip(raw, pos + 3, end)
        elif raw[pos] == 0:
            descriptor, pos = decode(raw, pos + 1, end)
            code = _SYMBOLIC.get(descriptor, 0) if isinstance(descriptor, Symbol) else descriptor
            pos = skip(raw, pos, end)
        else:
            raise DecodeError("a message is not a run of sections")
        if not isinstance(code, int) or not HEADER <= code <= FOOTER:
            raise DecodeError("a message has an unknown section")
        spans.append((int(code), start, pos))
    return spans


_LISTS = frozenset((0x45, 0xC0, 0xD0))
_MAPS_CODES = frozenset((0xC1, 0xD1))
_CONSTRUCTORS = {
    HEADER: _LISTS,
    DELIVERY_ANNOTATIONS: _MAPS_CODES,
    MESSAGE_ANNOTATIONS: _MAPS_CODES,
    PROPERTIES: _LISTS,
    APPLICATION_PROPERTIES: _MAPS_CODES,
    DATA: frozenset((0xA0, 0xB0)),
    AMQP_SEQUENCE: _LISTS,
    FOOTER: _MAPS_CODES,
}


def check_sections(raw: bytes) -> list[tuple[int, int, int]]:
    """Find the sections of a message, and check that each holds what it may (3.2), and stands there as often as it may.

    Their values are not decoded: inside of a map or list there may still be something that is no AMQP value.

    :returns: as `section_spans`.
    :raises DecodeError: the bytes are no message.
    """
    spans = section_spans(raw)
    seen: set[int] = set()
    for code, start, end in spans:
        value = skip(raw, start + 1, end)
        allowed = _CONSTRUCTORS.get(code)
        if allowed is not None and raw[value] not in allowed:
            raise DecodeError("a section holds a value of another type than it may")
        if code in seen and code not in (DATA, AMQP_SEQUENCE):
            raise DecodeError("a message has a section twice")
        seen.add(code)
    if len(seen & {DATA, AMQP_SEQUENCE, AMQP_VALUE}) > 1:
        raise DecodeError("a message has bodies of several kinds")
    return spans


@dataclass(frozen=True, slots=True)
class EventFields:
    """The names of the annotations that `scan_event` reads, and nothing else of Event Hubs.

    :ivar layouts: how the events scanned before were laid out, by how they begin; kept by `scan_event`.
    """

    sequence_number: bytes
    offset: bytes
    enqueued_time: bytes
    layouts: dict[bytes, tuple[_Layout, ...]] = field(default_factory=dict, repr=False, compare=False)


Scan = tuple[int | None, str | None, int | None, bytes | None]
"""Sequence number, offset, enqueued time (ms since the epoch), and the body where it is one data section."""


class _Layout(NamedTuple):
    """Where the values of a message's annotations lie, and every byte between them.

    The next message of that layout is taken apart by one `struct` call; equal constants prove that it is of it. A
    service writes few layouts: they differ by the lengths of offsets and partition keys.

    :param unpack: gives constants and values in turn, the last value being the body's size where `is_plain`.
    :param constants: what the constants must be.
    :param end: where the annotations end; where `is_plain`, where the body begins.
    :param sequence: the index of the value among what `unpack` gives; likewise the other two.
    :param is_plain: whether a large data section follows the annotations.
    """

    unpack: Callable[[bytes], tuple[Any, ...]]
    constants: tuple[bytes, ...]
    end: int
    sequence: int
    offset: int
    enqueued: int
    is_plain: bool


_NO_LAYOUT = _Layout(lambda _: (), (b"",), 0, 0, 0, 0, False)
"""Fits nothing: stands for a message that could not be described."""
_LARGE_DATA = b"\x00\x53\x75\xb0"
_MAX_LAYOUTS = 256
_MAX_ALIKE = 4
"""How many layouts that begin alike are told apart."""
_WIDTHS = {0x4: 0, 0x5: 1, 0x6: 2, 0x7: 4, 0x8: 8, 0x9: 16}
"""The fixed-width categories of values (1.2)."""


def scan_event(raw: bytes, names: EventFields) -> Scan:
    """Read the three known annotations and a single data section, without a dictionary.

    What is missing, of another type, or (the body) of another kind is None: the general decoder then tells more.

    :raises DecodeError: the bytes are not a run of sections.
    """
    try:
        # The annotations' size and count belong to the key; a header may stand before them (3.2).
        key = raw[:6] if raw[2] == 0x72 else raw[: raw[4] + 11]
        for unpack, constants, end, sequence_at, offset_at, time_at, is_plain in names.layouts.get(key, ()):
            found = unpack(raw)
            if found[::2] == constants:
                if is_plain and end + found[-1] == len(raw):
                    return found[sequence_at], found[offset_at].decode(), found[time_at], raw[end:]
                rest = end - 8 if is_plain else end
                return _walk_event(raw, names, rest, found[sequence_at], found[offset_at].decode(), found[time_at])
    except (IndexError, UnicodeDecodeError, struct.error):
        return _walk_event(raw, names)
    scan = _walk_event(raw, names)
    _learn_layout(raw, key, names)
    return scan


def _learn_layout(raw: bytes, key: bytes, names: EventFields) -> None:
    """Keep the layout of a message that `_walk_event` found sound, where there is room. Tried a few times per key."""
    alike = names.layouts.get(key, ())
    if len(names.layouts) >= _MAX_LAYOUTS or len(alike) >= _MAX_ALIKE:
        return
    if key[-6:-2] == b"\x00\x53\x72\xc1" and (len(key) == 6 or key[:4] == b"\x00\x53\x70\xc0"):
        names.layouts[key] = (*alike, _layout(raw, len(key), names) or _NO_LAYOUT)


def _layout(raw: bytes, pos: int, names: EventFields) -> _Layout | None:
    """Describe a sound message whose annotations, a small map, begin at `pos`. None where one of the three is missing,
    or where a value has a size that a struct cannot tell.
    """
    item, end = pos, pos - 1 + raw[pos - 2]
    kinds = {names.sequence_number: {0x81: "q", 0x55: "b"}, names.offset: {0xA1: "s"}, names.enqueued_time: {0x83: "q"}}
    places: dict[bytes, int] = {}
    constants: list[bytes] = []
    form, since = ">", 0
    while item < end:
        if raw[item] != 0xA3:
            return None
        value = item + 2 + raw[item + 1]
        name, kind = raw[item + 2 : value], raw[value]
        value += 1
        if kind >> 4 == 0xA:
            width = raw[value]
            value += 1
        elif kind >> 4 in _WIDTHS:
            width = _WIDTHS[kind >> 4]
        else:
            return None
        code = kinds[name].get(kind) if name in kinds else "s"
        if code is None:
            return None
        places[name] = 2 * len(constants) + 1
        constants.append(raw[since:value])
        form += f"{value - since}s{width if code == 's' else ''}{code}"
        item = since = value + width
    if not places.keys() >= kinds.keys():
        return None
    is_plain = raw[end : end + 4] == _LARGE_DATA
    if is_plain:
        constants.append(_LARGE_DATA)
        form += "4sI"
        end += 8
    sequence, offset, enqueued = (places[name] for name in kinds)
    return _Layout(struct.Struct(form).unpack_from, tuple(constants), end, sequence, offset, enqueued, is_plain)


def _walk_event(
    raw: bytes,
    names: EventFields,
    pos: int = 0,
    sequence: int | None = None,
    offset: str | None = None,
    enqueued: int | None = None,
) -> Scan:
    """Do what `scan_event` does, for any message, in one walk.

    :param pos: where to begin: after the annotations, where their values are known.
    """
    sequence_name, offset_name, time_name = names.sequence_number, names.offset, names.enqueued_time
    body: bytes | None = None
    bodies = 0
    has_annotations = pos > 0
    end = len(raw)
    try:
        while pos < end:
            constructor = raw[pos + 3]
            if raw[pos] or raw[pos + 1] != 0x53 or constructor < 0xA0:
                if raw[pos]:
                    raise DecodeError("a message is not a run of sections")
                code = raw[pos + 2] if raw[pos + 1] == 0x53 else 0
                if code in (DATA, MESSAGE_ANNOTATIONS):
                    raise DecodeError("a data section holds no binary, or the message annotations are no map")
                # A descriptor in a longer form, or a value without a size: rare, and left to the general decoder.
                pos = skip(raw, pos, end)
                bodies += 2 if code in (0, DATA, AMQP_SEQUENCE, AMQP_VALUE) else 0
                continue
            if constructor & 0x10:
                start = pos + 8
                after = start + _from_bytes(raw[pos + 4 : start], "big")
            else:
                start = pos + 5
                after = start + raw[pos + 4]
            if after > end:
                raise DecodeError("a section runs past the end of its message")
            code = raw[pos + 2]
            if code == 0x75:
                if constructor & 0xEF != 0xA0:
                    raise DecodeError("a data section holds no binary")
                body = raw[start:after]
                bodies += 1
            elif code == 0x72:
                if has_annotations or constructor & 0xEF != 0xC1:
                    raise DecodeError("the message annotations are there twice, or are no map")
                has_annotations = True
                item = start + (4 if constructor & 0x10 else 1)
                while item < after:
                    if raw[item] != 0xA3:
                        item = skip(raw, skip(raw, item, after), after)
                        continue
                    value = item + 2 + raw[item + 1]
                    name = raw[item + 2 : value]
                    kind = raw[value]
                    if name == sequence_name and kind == 0x81:
                        item = value + 9
                        sequence = _from_bytes(raw[value + 1 : item], "big", signed=True)
                    elif name == offset_name and kind == 0xA1:
                        item = value + 2 + raw[value + 1]
                        offset = raw[value + 2 : item].decode()
                    elif name == time_name and kind == 0x83:
                        item = value + 9
                        enqueued = _from_bytes(raw[value + 1 : item], "big", signed=True)
                    elif name == sequence_name and kind == 0x55:
                        item = value + 2
                        sequence = _from_bytes(raw[value + 1 : item], "big", signed=True)
                    else:
                        item = skip(raw, value, after)
                if item != after:
                    raise DecodeError("the message annotations are larger than their items")
            elif code > 0x75:
                bodies += 2
            pos = after
    except (IndexError, UnicodeDecodeError):
        raise DecodeError("a section runs past the end of its message, or its text is not UTF-8") from None
    return sequence, offset, enqueued, body if bodies == 1 else None


def salvage_annotations(raw: bytes, names: EventFields) -> tuple[int | None, str | None, int | None]:
    """Read the three known annotations of a message that cannot be decoded as a whole.

    The service writes them, whatever it takes the rest of a message to be. What stands before them must be sections;
    what stands behind them does not matter.

    :returns: sequence number, offset and enqueued time (ms since the epoch); None for what cannot be read.
    """
    found: dict[bytes, Any] = {}
    pos, end = 0, len(raw)
    try:
        while pos < end and raw[pos] == 0:
            descriptor, value = decode(raw, pos + 1, end)
            if isinstance(descriptor, Symbol):
                descriptor = _SYMBOLIC.get(descriptor)
            if descriptor == MESSAGE_ANNOTATIONS:
                width = 4 if raw[value] & 0x10 else 1
                pos = value + 1 + 2 * width if raw[value] in _MAPS_CODES else end
                while pos < end and len(found) < 3:
                    name, value = decode(raw, pos, end)
                    pos = skip(raw, value, end)
                    key = name.encode() if isinstance(name, str) else b""
                    if key in (names.sequence_number, names.offset, names.enqueued_time):
                        found[key] = decode(raw, value, pos)[0]
                break
            pos = skip(raw, value, end)
    except (DecodeError, IndexError):
        pass  # what was found before it counts
    sequence, offset, enqueued = map(found.get, (names.sequence_number, names.offset, names.enqueued_time))
    return (
        int(sequence) if isinstance(sequence, int) and not isinstance(sequence, bool) else None,
        str(offset) if isinstance(offset, str) else None,
        int(enqueued) if isinstance(enqueued, Timestamp) else None,
    )
