"""Turn what a producer sent into the form a partition keeps and readers get.

The message annotations are written anew, once: the service's own first, then the sender's. Every other byte stays.
One function walks a whole batch, because this runs for every event.
"""

from __future__ import annotations

import struct
from array import array
from dataclasses import dataclass

from eventpump.amqp import codec
from eventpump.amqp.codec import DecodeError
from eventpump.amqp.message import FOOTER, HEADER, MESSAGE_ANNOTATIONS, PROPERTIES, section_spans
from eventpump.dialect.names import ENQUEUED_TIME, OFFSET, PARTITION_KEY, PUBLISHER, SEQUENCE_NUMBER
from eventpump.emulator import bounds

_LONG = struct.Struct(">q")
_SEQUENCE = codec.encode(SEQUENCE_NUMBER) + b"\x81"
_OFFSET = codec.encode(OFFSET) + b"\xa1"
_TIME = codec.encode(ENQUEUED_TIME) + b"\x83"
_PARTITION_KEY = codec.encode(PARTITION_KEY)
_FIXED = len(_SEQUENCE) + 8 + len(_OFFSET) + 1 + len(_TIME) + 8

_OWN: frozenset[str] = frozenset({SEQUENCE_NUMBER, OFFSET, ENQUEUED_TIME, PUBLISHER})
_PRODUCER_PREFIX = "com.microsoft:producer-"
_WIDE = frozenset({0xD0, 0xD1, 0xB0})
_NARROW = frozenset({0xC0, 0xC1, 0xA0})
_TEXTS = frozenset({0xA1, 0xA3, 0xB1, 0xB3})
_COMPOUND = 0xC0
"""Lists, maps and arrays have codes from here on, but for the empty list."""
_EMPTY_LIST = 0x45
_PREFIX_SECTIONS = 3
"""Header, delivery annotations and message annotations."""
_PLAIN_SECTIONS = frozenset(range(PROPERTIES, FOOTER + 1))


@dataclass(slots=True)
class StampedEvents:
    """Events of one batch as a partition keeps them.

    :param payloads: the encoded events.
    :param offsets: their offsets, aligned.
    :param next_offset: the first offset free after them.
    :param size: bytes of all payloads.
    """

    payloads: list[bytes]
    offsets: array[int]
    next_offset: int
    size: int


def stamp(events: list[bytes], sequence_number: int, offset: int, time_ms: int, batch_key: str | None) -> StampedEvents:
    """Give a batch its numbers.

    :param events: encoded messages.
    :param sequence_number: of the first; the others follow.
    :param offset: of the first; every event advances it by its stored size.
    :param time_ms: the enqueued time of all, milliseconds since the Unix epoch.
    :param batch_key: the envelope's partition key, for events that carry none themselves.
    :raises DecodeError: one of them is no AMQP message, or their annotations are too many; nothing was numbered then.
    """
    left = bounds.ANNOTATION_ITEMS // 2
    out: list[bytes] = []
    offsets = array("q")
    start_offset = offset
    tail = _TIME + _LONG.pack(time_ms)
    plain_extra = b"" if batch_key is None else _PARTITION_KEY + codec.encode(batch_key)
    prefixes: dict[bytes, tuple[bytes, bytes, int]] = {}
    pack = _LONG.pack
    head_for: tuple[int, bytes, int] | None = None
    head = offset_key = b""
    number = sequence_number
    for raw in events:
        size = len(raw)
        header, extra, count = b"", plain_extra, 4 if plain_extra else 3
        rest = raw
        pos = 0
        if size < 5 or raw[2] < PROPERTIES or raw[1] != 0x53:
            pos = _prefix_end(raw)
            prefix = raw[:pos]
            known = prefixes.get(prefix)
            if known is None:
                known = prefixes[prefix] = _split_prefix(prefix, plain_extra, left)
                left -= known[2]
            header, extra, count = known
            rest = raw[pos:]
        # The sections that stay are walked by their lengths, so that nothing that is no message is ever kept.
        while pos < size:
            if size - pos > 4 and raw[pos] == 0 and raw[pos + 1] == 0x53 and raw[pos + 2] in _PLAIN_SECTIONS:
                constructor = raw[pos + 3]
                if constructor in _WIDE:
                    pos += 8 + int.from_bytes(raw[pos + 4 : pos + 8], "big")
                    continue
                if constructor in _NARROW:
                    pos += 5 + raw[pos + 4]
                    continue
            _check_sections(raw, pos)
            pos = size
        if pos != size or not size:
            raise DecodeError("the message ends inside a section")
        text = b"%d" % offset
        wanted = (len(text), extra, count)
        if wanted != head_for:
            head_for = wanted
            length = _FIXED + len(text) + len(extra)
            if length < 255:
                head = b"\x00\x53\x72\xc1" + bytes((length + 1, count * 2)) + _SEQUENCE
            else:
                head = b"\x00\x53\x72\xd1" + struct.pack(">II", length + 4, count * 2) + _SEQUENCE
            offset_key = _OFFSET + bytes((len(text),))
        stored = b"".join((header, head, pack(number), offset_key, text, tail, extra, rest))
        out.append(stored)
        offsets.append(offset)
        offset += len(stored)
        number += 1
    return StampedEvents(out, offsets, offset, offset - start_offset)


def add_delivery_annotations(raw: bytes, section: bytes) -> bytes:
    """Put a delivery-annotations section where it belongs in a stored event: after the header (AMQP 1.0, 3.2)."""
    if raw[2] != HEADER:
        return section + raw
    end = codec.skip(raw, 3, len(raw))
    return raw[:end] + section + raw[end:]


def _check_sections(raw: bytes, pos: int) -> None:
    """Walk the rest of a message the general way."""
    for code, _, _ in section_spans(raw[pos:]):
        if code in (HEADER, MESSAGE_ANNOTATIONS):
            raise DecodeError("a header or message-annotations section is out of place")


def _prefix_end(raw: bytes) -> int:
    """Find the end of the header and annotations a message begins with."""
    pos = 0
    end = len(raw) - 4
    while pos < end and raw[pos] == 0:
        code = raw[pos + 2]
        if raw[pos + 1] != 0x53:
            return _general_prefix_end(raw)
        if code > MESSAGE_ANNOTATIONS:
            return pos
        constructor = raw[pos + 3]
        if constructor in _NARROW:
            pos += 5 + raw[pos + 4]
        else:
            pos = codec.skip(raw, pos, len(raw))
    return pos


def _general_prefix_end(raw: bytes) -> int:
    end = 0
    for code, _, after in section_spans(raw):
        if code > MESSAGE_ANNOTATIONS:
            break
        end = after
    return end


def _split_prefix(prefix: bytes, plain_extra: bytes, most: int) -> tuple[bytes, bytes, int]:
    """Read the header and annotations once: the header section, the annotations to keep, encoded, and the map's count.

    Delivery annotations are for this hop only and go no further.

    :param most: how many annotations there may be.
    :raises DecodeError: the sections are broken, or there are more annotations.
    """
    header = b""
    extra: list[bytes] = []
    count = 3
    has_key = False
    spans = section_spans(prefix)
    if len(spans) > _PREFIX_SECTIONS:
        raise DecodeError("a message has a section twice")
    for code, start, end in spans:
        value = codec.skip(prefix, start + 1, end)
        if code == HEADER:
            # Readers index by the one-byte descriptor (Python's official client), however the sender spelt it.
            header = b"\x00\x53\x70" + prefix[value:end]
        elif code == MESSAGE_ANNOTATIONS:
            for name, entry in _entries(prefix, value, end, most):
                if isinstance(name, str) and (name in _OWN or name.startswith(_PRODUCER_PREFIX)):
                    continue
                if name == PARTITION_KEY:
                    text = codec.skip(entry, 0, len(entry))
                    if entry[text] not in (0xA1, 0xB1):
                        continue
                    codec.decode(entry, text)  # or no reader could
                    has_key = True
                extra.append(entry)
                count += 1
    if plain_extra and not has_key:
        extra.append(plain_extra)
        count += 1
    return header, b"".join(extra), count


def _entries(raw: bytes, start: int, end: int, most: int) -> list[tuple[object, bytes]]:
    """Split an encoded map into its keys and the bytes of each entry."""
    code = raw[start]
    if code == 0x40:
        return []
    if code == 0xC1:
        pos, count = start + 3, raw[start + 2]
    elif code == 0xD1:
        pos, count = start + 9, int.from_bytes(raw[start + 5 : start + 9], "big")
    else:
        raise DecodeError("the message annotations are no map")
    if count > 2 * most:
        raise DecodeError("a message has more annotations than are taken here")
    entries: list[tuple[object, bytes]] = []
    for _ in range(count // 2):
        code = raw[pos] if pos < end else _COMPOUND
        if code >= _COMPOUND or code == _EMPTY_LIST:
            raise DecodeError("the message annotations have a key that is none")
        # Only texts are looked at: a key of another type may hold anything.
        name, value = codec.decode(raw, pos, end) if code in _TEXTS else (None, codec.skip(raw, pos, end))
        after = codec.skip(raw, value, end)
        entries.append((name, raw[pos:after]))
        pos = after
    if pos != end or count % 2:
        raise DecodeError("the message annotations are broken")
    return entries
