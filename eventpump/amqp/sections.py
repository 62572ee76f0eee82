"""The sections that a message consists of (AMQP 1.0, part 3.2): their grammar, and every walk over them.

`section_at` is the general step. The walks that run once per event are written out (`scan_event`, `check_rest`,
`prefix_end`); they must read what the general step reads.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from eventpump.amqp.codec import MAX_DEPTH, AmqpDecodeError, decode, decode_described, encode, skip
from eventpump.amqp.types import Symbol, Timestamp

HEADER: Final = 0x70
DELIVERY_ANNOTATIONS: Final = 0x71
MESSAGE_ANNOTATIONS: Final = 0x72
PROPERTIES: Final = 0x73
APPLICATION_PROPERTIES: Final = 0x74
DATA: Final = 0x75
AMQP_SEQUENCE: Final = 0x76
AMQP_VALUE: Final = 0x77
FOOTER: Final = 0x78

MARKER: Final = b"\x00\x53"
"""How a section begins, before its code: a descriptor, which is a small ulong. Other forms are rare."""
BODIES: Final = frozenset((DATA, AMQP_SEQUENCE, AMQP_VALUE))

_NULL: Final = 0x40
_BINARY: Final = frozenset((0xA0, 0xB0, _NULL))
"""Null too, against the specification: JavaScript's clients send it for an event without a body."""
_LIST: Final = frozenset((0x45, 0xC0, 0xD0))
_MAP: Final = frozenset((0xC1, 0xD1))


class _Rule(NamedTuple):
    """The rule of the specification for one section.

    Attributes:
        rank: Its place in the order of the sections; the three bodies share one.
        constructors: Those that its value may have; empty for any.
        repeats: Whether a message may have several of them.
    """

    symbol: str
    rank: int
    constructors: frozenset[int]
    repeats: bool = False


_GRAMMAR: Final = {
    HEADER: _Rule("amqp:header:list", 1, _LIST),
    DELIVERY_ANNOTATIONS: _Rule("amqp:delivery-annotations:map", 2, _MAP),
    MESSAGE_ANNOTATIONS: _Rule("amqp:message-annotations:map", 3, _MAP),
    PROPERTIES: _Rule("amqp:properties:list", 4, _LIST),
    APPLICATION_PROPERTIES: _Rule("amqp:application-properties:map", 5, _MAP),
    DATA: _Rule("amqp:data:binary", 6, _BINARY, repeats=True),
    AMQP_SEQUENCE: _Rule("amqp:amqp-sequence:list", 6, _LIST, repeats=True),
    AMQP_VALUE: _Rule("amqp:amqp-value:*", 6, frozenset()),
    FOOTER: _Rule("amqp:footer:map", 7, _MAP),
}
_CODES: Final = {rule.symbol: code for code, rule in _GRAMMAR.items()}
_LONGEST_DESCRIPTOR: Final = 6 + max(map(len, _CODES))
"""Bytes of the longest descriptor of a section. Longer ones are not decoded: they could hold any number of values."""

_NARROW: Final = frozenset((0xA0, 0xC0, 0xC1))
_WIDE: Final = frozenset((0xB0, 0xD0, 0xD1))
"""Constructors of binaries, lists and maps whose size takes one byte, and four."""


_IS_WIDE: Final = 0x10
"""The bit of a constructor in which they differ."""
_rank_of: Final = {
    MARKER + bytes((code, constructor)): rule.rank
    for code, rule in _GRAMMAR.items()
    for constructor in (_NARROW | _WIDE) & (rule.constructors or _NARROW | _WIDE)
}.get
"""Ranks of sections by how they begin, for all that hold what they may in one of these forms."""

_from_bytes = int.from_bytes


# --------------------------------------------------------------------------------------------------- encoding


def section(code: int, value: Any) -> bytes:
    """Encode one section other than data. Raises `EncodeError` if the value has no AMQP form."""
    return MARKER + bytes((code,)) + encode(value, MAX_DEPTH - 1)  # a described value nests


NARROW_DATA: Final = MARKER + bytes((DATA, 0xA0))
WIDE_DATA: Final = MARKER + bytes((DATA, 0xB0))
"""How data sections begin, before their size of one byte, and of four."""
_DATA_HEADS = tuple(NARROW_DATA + bytes((size,)) for size in range(256))
_pack_large_data = struct.Struct(">4sI").pack


def data_head(size: int) -> bytes:
    """Encode what comes before the payload of a data section (3.2.6), given the size of the payload in bytes."""
    return _DATA_HEADS[size] if size < 256 else _pack_large_data(WIDE_DATA, size)


NULL_DATA: Final = MARKER + bytes((DATA, _NULL))
"""A data section that holds null."""


def encode_data(payload: bytes) -> bytes:
    """Encode one data section (3.2.6)."""
    return data_head(len(payload)) + payload


# ---------------------------------------------------------------------------------------------- the general walk


def code_at(raw: bytes, pos: int, end: int) -> tuple[int, int]:
    """Read the descriptor of a section, in any form.

    Returns:
        The section's code, 0 for one that the specification does not have; and where its value begins.
    """
    if raw[pos] != 0:
        raise AmqpDecodeError("a message does not consist of sections")
    value = skip(raw, pos + 1, end)
    descriptor = decode(raw, pos + 1, value)[0] if value - pos <= _LONGEST_DESCRIPTOR else None
    code = _CODES.get(descriptor, 0) if isinstance(descriptor, Symbol) else descriptor
    return (int(code) if isinstance(code, int) and code in _GRAMMAR else 0), value


def section_at(raw: bytes, pos: int, end: int) -> tuple[int, int, int]:
    """Find the section at `pos`: its code, where its value begins, and where it ends. Raises `AmqpDecodeError`."""
    if raw[pos : pos + 2] == MARKER and pos + 2 < end:
        code, value = raw[pos + 2], pos + 3
    else:
        code, value = code_at(raw, pos, end)
    if not HEADER <= code <= FOOTER:
        raise AmqpDecodeError("a message has an unknown section")
    return code, value, skip(raw, value, end)


def section_spans(raw: bytes) -> list[tuple[int, int, int]]:
    """Find the sections of a message: code, where the descriptor starts, where it ends. Raises `AmqpDecodeError`."""
    spans: list[tuple[int, int, int]] = []
    pos, end = 0, len(raw)
    while pos < end:
        code, _, after = section_at(raw, pos, end)
        spans.append((code, pos, after))
        pos = after
    return spans


def check_sections(raw: bytes) -> list[tuple[int, int, int, int]]:
    """Find the sections of a message, and check that each holds what it may (3.2), and stands there as often as it may.

    Their values are not decoded: inside of a map or list there may still be something that is no AMQP value. Their
    order is not looked at.

    Returns:
        For each its code, where its descriptor starts, where its value begins, and where it ends.
    """
    found: list[tuple[int, int, int, int]] = []
    seen: set[int] = set()
    pos, end = 0, len(raw)
    while pos < end:
        code, value, after = section_at(raw, pos, end)
        rule = _GRAMMAR[code]
        if rule.constructors and raw[value] not in rule.constructors:
            raise AmqpDecodeError("a section holds a value of a type that is not allowed there")
        if code in seen and not rule.repeats:
            raise AmqpDecodeError("a message has a section twice")
        seen.add(code)
        found.append((code, pos, value, after))
        pos = after
    if len(seen & BODIES) > 1:
        raise AmqpDecodeError("a message has bodies of several kinds")
    return found


def values_at(raw: bytes, first: int, last: int) -> list[tuple[int, int, int]]:
    """Find sections by their codes, as `check_sections` does: code, where the value begins and ends."""
    found: list[tuple[int, int, int]] = []
    pos, rank, size = 0, 0, len(raw)
    while pos + 4 < size:
        head = raw[pos : pos + 4]
        before, rank = rank, _rank_of(head, 0)
        if rank <= before:
            break  # unusual: a form or order, or several of a kind
        start = pos + 3
        pos = pos + 8 + _from_bytes(raw[pos + 4 : pos + 8], "big") if head[3] & _IS_WIDE else pos + 5 + raw[pos + 4]
        if first <= head[2] <= last:
            found.append((head[2], start, pos))
    if pos == size:
        return found
    return [(code, value, end) for code, _, value, end in check_sections(raw) if first <= code <= last]


def section_value(raw: bytes, code: int) -> Any:
    """Decode one section of a message, None if it has none: header, properties, footer or annotations."""
    for _, start, end in values_at(raw, code, code):
        return decode_described(raw, start, end)
    return None


# ------------------------------------------------------------------------------------- the parts of a message

_SMALL_HEADER: Final = MARKER + bytes((HEADER, 0xC0))
_SMALL_ANNOTATIONS: Final = MARKER + bytes((MESSAGE_ANNOTATIONS, 0xC1))


def prefix_end(raw: bytes) -> int:
    """Find where the header and annotations end that a message begins with.

    What follows them is not checked. Where the last of them is cut off, the position is after the message's end.
    """
    pos = 0
    end = len(raw) - 4
    if raw[:4] == _SMALL_HEADER and end > 0:
        # As we write events with a key: header and annotations in their short forms.
        pos = 5 + raw[4]
        if raw[pos : pos + 4] == _SMALL_ANNOTATIONS and pos < end:
            pos += 5 + raw[pos + 4]
    while pos <= end and raw[pos] == 0:
        if raw[pos + 1] != 0x53:
            return _general_prefix_end(raw)
        if raw[pos + 2] > MESSAGE_ANNOTATIONS:
            break
        if raw[pos + 3] in _NARROW and pos < end:
            pos += 5 + raw[pos + 4]
        else:
            pos = skip(raw, pos, len(raw))
    return pos


def _general_prefix_end(raw: bytes) -> int:
    end = 0
    for code, _, after in section_spans(raw):
        if code > MESSAGE_ANNOTATIONS:
            break
        end = after
    return end


def check_rest(raw: bytes, pos: int) -> bool:
    """Check what follows the header and annotations of a message, as `check_sections` does.

    Sections in their usual forms and order are walked by their lengths.

    Returns:
        Whether that is all of them. False where a header or annotations section is there too, as Python writes delivery
        annotations behind the body; nothing is checked across the position then.
    """
    start, size = pos, len(raw)
    last = _LAST_OF_PREFIX
    while pos + 4 < size:
        head = raw[pos : pos + 4]
        rank = _rank_of(head, 0)
        if rank <= last:
            break
        last = rank
        if head[3] & _IS_WIDE:
            pos += 8 + _from_bytes(raw[pos + 4 : pos + 8], "big")
        else:
            pos += 5 + raw[pos + 4]
    if pos < size:
        return all(found[0] > MESSAGE_ANNOTATIONS for found in check_sections(raw[start:]))
    if pos > size or not size:
        raise AmqpDecodeError("the message ends inside a section")
    return True


_LAST_OF_PREFIX: Final = _GRAMMAR[MESSAGE_ANNOTATIONS].rank


# ------------------------------------------------------------------------------------------ the scan of events


@dataclass(frozen=True, slots=True)
class EventFields:
    """The names of the annotations that `scan_event` and `scan_key` read, and nothing else of Event Hubs."""

    sequence_number: bytes
    offset: bytes
    enqueued_time: bytes
    partition_key: bytes = b""
    layouts: dict[bytes, tuple[_Layout, ...]] = field(default_factory=dict, repr=False, compare=False)


Scan = tuple[int | None, str | None, int | None, bytes | None]
"""Sequence number, offset, enqueued time (ms since the epoch), and the body where it is one data section."""


class _Layout(NamedTuple):
    """Where the values of a message's annotations lie, and every byte between them.

    The next message of that layout is taken apart by one `struct` call; equal constants prove that it is of it. A
    service writes few layouts: they differ by the lengths of offsets and partition keys.

    Args:
        unpack: Gives constants and values in turn, the last value being the body's size where `is_plain`.
        sequence: The index of the value among what `unpack` gives; likewise the other two.
        is_plain: Whether a large data section follows the annotations.
        key: The index of the partition key; 0 where there is none, -1 where only the general decoder can read it.
    """

    unpack: Callable[[bytes], tuple[Any, ...]]
    constants: tuple[bytes, ...]
    end: int
    sequence: int
    offset: int
    enqueued: int
    is_plain: bool
    key: int


_NO_LAYOUT = _Layout(lambda _: (), (b"",), 0, 0, 0, 0, False, -1)
"""Fits nothing: stands for a message that could not be described."""
_MAX_LAYOUTS = 256
_MAX_ALIKE = 4
"""The most layouts that are kept for one beginning."""
_WIDTHS = {0x4: 0, 0x5: 1, 0x6: 2, 0x7: 4, 0x8: 8, 0x9: 16}
"""The fixed-width categories of values (1.2)."""


def scan_event(raw: bytes, names: EventFields) -> Scan:
    """Read the three known annotations and a single data section, without a dictionary.

    What is missing, of another type, or (the body) of another kind is None: the general decoder has the details.
    """
    try:
        # The annotations' size and count belong to the key; a header may stand before them (3.2).
        key = raw[:6] if raw[2] == 0x72 else raw[: raw[4] + 11]
        for unpack, constants, end, sequence_at, offset_at, time_at, is_plain, _ in names.layouts.get(key, ()):
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


def scan_key(raw: bytes, names: EventFields) -> tuple[Scan, str | None] | None:
    """Read what `scan_event` reads, and the partition key, of a message whose layout `scan_event` has found before."""
    try:
        key = raw[:6] if raw[2] == 0x72 else raw[: raw[4] + 11]
        for unpack, constants, end, sequence_at, offset_at, time_at, is_plain, key_at in names.layouts.get(key, ()):
            found = unpack(raw)
            if found[::2] == constants:
                if key_at < 0:
                    return None
                if is_plain and end + found[-1] == len(raw):
                    scan: Scan = found[sequence_at], found[offset_at].decode(), found[time_at], raw[end:]
                else:
                    rest = end - 8 if is_plain else end
                    scan = _walk_event(raw, names, rest, found[sequence_at], found[offset_at].decode(), found[time_at])
                return scan, found[key_at].decode() if key_at else None
    except (IndexError, UnicodeDecodeError, struct.error, AmqpDecodeError):
        pass
    return None


def find_key(raw: bytes, names: EventFields) -> Any:
    """Read the partition key as `scan_key` does, of a message of any layout.

    Nothing else of the message is decoded; of several keys the last one counts, as in a map.

    Returns:
        The key, which may be of any type; None of a message that has none.
    """
    _walk_event(raw, names)
    key = None
    pos, end = 0, len(raw)
    while pos < end:
        code, value = code_at(raw, pos, end)
        pos = skip(raw, value, end)
        if code == MESSAGE_ANNOTATIONS:
            if raw[value] not in _MAP:
                raise AmqpDecodeError("the message annotations are not a map")
            item, after = value + (9 if raw[value] & _IS_WIDE else 3), pos
            while item < after:
                name = _text_at(raw, item)
                start = skip(raw, item, after)
                item = skip(raw, start, after)
                if name == names.partition_key:
                    key = decode(raw, start, item)[0]
            break
    return key


def _text_at(raw: bytes, pos: int) -> bytes | None:
    """Return the bytes of the text or symbol at `pos`; None for another value."""
    if raw[pos] in (0xA1, 0xA3):
        return raw[pos + 2 : pos + 2 + raw[pos + 1]]
    if raw[pos] in (0xB1, 0xB3):
        return raw[pos + 5 : pos + 5 + _from_bytes(raw[pos + 1 : pos + 5], "big")]
    return None


def _learn_layout(raw: bytes, key: bytes, names: EventFields) -> None:
    """Keep the layout of a message that `_walk_event` found sound, where there is room. Tried a few times per key."""
    alike = names.layouts.get(key, ())
    if len(names.layouts) >= _MAX_LAYOUTS or len(alike) >= _MAX_ALIKE:
        return
    if key[-6:-2] == b"\x00\x53\x72\xc1" and (len(key) == 6 or key[:4] == b"\x00\x53\x70\xc0"):
        names.layouts[key] = (*alike, _layout(raw, len(key), names) or _NO_LAYOUT)


def _layout(raw: bytes, pos: int, names: EventFields) -> _Layout | None:
    """Describe a sound message whose annotations, a small map, begin at `pos`. None where one of the three is missing,
    where the offset is written twice, or where a value has a size that no struct format has.
    """
    item, end = pos, pos - 1 + raw[pos - 2]
    kinds = {names.sequence_number: {0x81: "q", 0x55: "b"}, names.offset: {0xA1: "s"}, names.enqueued_time: {0x83: "q"}}
    places: dict[bytes, int] = {}
    key = 0
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
        if code is None or (name == names.offset and name in places):
            return None  # or written twice: both offsets have to be UTF-8
        places[name] = 2 * len(constants) + 1
        if name == names.partition_key:
            key = places[name] if kind == 0xA1 and not key else -1
        constants.append(raw[since:value])
        form += f"{value - since}s{width if code == 's' else ''}{code}"
        item = since = value + width
    if not places.keys() >= kinds.keys():
        return None
    is_plain = raw[end : end + 4] == WIDE_DATA
    if is_plain:
        constants.append(WIDE_DATA)
        form += "4sI"
        end += 8
    sequence, offset, enqueued = (places[name] for name in kinds)
    unpack = struct.Struct(form).unpack_from
    return _Layout(unpack, tuple(constants), end, sequence, offset, enqueued, is_plain, key)


def _walk_event(
    raw: bytes,
    names: EventFields,
    pos: int = 0,
    sequence: int | None = None,
    offset: str | None = None,
    enqueued: int | None = None,
) -> Scan:
    """Do what `scan_event` does, for any message, in one walk from `pos` on."""
    sequence_name, offset_name, time_name = names.sequence_number, names.offset, names.enqueued_time
    body: bytes | None = None
    bodies = 0
    has_annotations = pos > 0
    end = len(raw)
    try:
        while pos < end:
            constructor = raw[pos + 3]
            if raw[pos] or raw[pos + 1] != 0x53 or constructor < 0xA0:
                code = _code_of_rare(raw, pos)
                if code == DATA:
                    body, bodies, pos = b"", bodies + 1, pos + 4
                    continue
                pos = skip(raw, pos, end)
                bodies += 2 if code in (0, AMQP_SEQUENCE, AMQP_VALUE) else 0
                continue
            if constructor & 0x10:
                start = pos + 8
                after = start + _from_bytes(raw[pos + 4 : start], "big")
            else:
                start = pos + 5
                after = start + raw[pos + 4]
            if after > end:
                raise AmqpDecodeError("a section runs past the end of its message")
            code = raw[pos + 2]
            if code == 0x75:
                if constructor & 0xEF != 0xA0:
                    raise AmqpDecodeError("a data section does not hold binary")
                body = raw[start:after]
                bodies += 1
            elif code == 0x72:
                if has_annotations or constructor & 0xEF != 0xC1:
                    raise AmqpDecodeError("the message annotations occur twice, or are not a map")
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
                    raise AmqpDecodeError("the message annotations are larger than their items")
            elif code > 0x75:
                bodies += 2
            pos = after
    except (IndexError, UnicodeDecodeError):
        raise AmqpDecodeError("a section runs past the end of its message, or its text is not UTF-8") from None
    return sequence, offset, enqueued, body if bodies == 1 else None


def _code_of_rare(raw: bytes, pos: int) -> int:
    """Return the code of a section with a value without a size, or 0 for a descriptor in a longer form.

    Of data and message annotations only data that is null is a section.
    """
    if raw[pos]:
        raise AmqpDecodeError("a message does not consist of sections")
    code = raw[pos + 2] if raw[pos + 1] == 0x53 else 0
    if code == MESSAGE_ANNOTATIONS or (code == DATA and raw[pos + 3] != _NULL):
        raise AmqpDecodeError("a data section does not hold binary, or the message annotations are not a map")
    return code


def salvage_annotations(raw: bytes, names: EventFields) -> tuple[int | None, str | None, int | None]:
    """Read the three known annotations of a message that cannot be decoded as a whole.

    The service writes them, even where the rest of a message is malformed. What comes before them must be sections;
    what comes after them does not matter.
    """
    found: dict[bytes, Any] = {}
    pos, end = 0, len(raw)
    try:
        while pos < end:
            code, value = code_at(raw, pos, end)
            if code == MESSAGE_ANNOTATIONS:
                width = 4 if raw[value] & 0x10 else 1
                pos = value + 1 + 2 * width if raw[value] in _MAP else end
                while pos < end and len(found) < 3:
                    name, value = decode(raw, pos, end)
                    pos = skip(raw, value, end)
                    key = name.encode() if isinstance(name, str) else b""
                    if key in (names.sequence_number, names.offset, names.enqueued_time):
                        found[key] = decode(raw, value, pos)[0]
                break
            pos = skip(raw, value, end)
    except (AmqpDecodeError, IndexError):
        pass  # what was found before it counts
    sequence, offset, enqueued = map(found.get, (names.sequence_number, names.offset, names.enqueued_time))
    return (
        int(sequence) if isinstance(sequence, int) and not isinstance(sequence, bool) else None,
        str(offset) if isinstance(offset, str) else None,
        int(enqueued) if isinstance(enqueued, Timestamp) else None,
    )
