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
from eventpump.amqp.types import Symbol

_HEADER, _DELIVERY_ANNOTATIONS, _MESSAGE_ANNOTATIONS, _FOOTER = 0x70, 0x71, 0x72, 0x78

_LONG = struct.Struct(">q")
_SEQUENCE = codec.encode(Symbol("x-opt-sequence-number")) + b"\x81"
_OFFSET = codec.encode(Symbol("x-opt-offset")) + b"\xa1"
_TIME = codec.encode(Symbol("x-opt-enqueued-time")) + b"\x83"
_PARTITION_KEY_NAME = "x-opt-partition-key"
_PARTITION_KEY = codec.encode(Symbol(_PARTITION_KEY_NAME))
_FIXED = len(_SEQUENCE) + 8 + len(_OFFSET) + 1 + len(_TIME) + 8

_OWN = frozenset({"x-opt-sequence-number", "x-opt-offset", "x-opt-enqueued-time", "x-opt-publisher"})
_PRODUCER_PREFIX = "com.microsoft:producer-"


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


def partition_key(raw: bytes) -> str | None:
    """Read the partition key annotation of a message or envelope; None where there is none or it is no string.

    :raises DecodeError: the sections before the body are broken.
    """
    pos = 0
    size = len(raw)
    while pos < size:
        code, value_start = _descriptor(raw, pos)
        if code > _MESSAGE_ANNOTATIONS:
            return None
        if code == _MESSAGE_ANNOTATIONS:
            annotations = codec.decode(raw, value_start)[0]
            key = annotations.get(_PARTITION_KEY_NAME) if isinstance(annotations, dict) else None
            return key if type(key) is str else None
        pos = codec.skip(raw, value_start, size)
    return None


def stamp(events: list[bytes], sequence_number: int, offset: int, time_ms: int, batch_key: str | None) -> StampedEvents:
    """Give a batch its numbers.

    :param events: encoded messages.
    :param sequence_number: of the first; the others follow.
    :param offset: of the first; every event advances it by its stored size.
    :param time_ms: the enqueued time of all, milliseconds since the Unix epoch.
    :param batch_key: the envelope's partition key, for events that carry none themselves.
    :raises DecodeError: one of them is no AMQP message; nothing was numbered then.
    """
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
        if raw[:2] == b"\x00\x53" and size > 4 and raw[2] >= 0x73:
            pass
        else:
            pos = _prefix_end(raw)
            prefix = raw[:pos]
            known = prefixes.get(prefix)
            if known is None:
                known = prefixes[prefix] = _split_prefix(prefix, plain_extra)
            header, extra, count = known
            rest = raw[pos:]
        # The sections that stay are walked by their lengths, so that nothing that is no message is ever kept.
        while pos < size:
            if raw[pos : pos + 2] != b"\x00\x53" or pos + 4 >= size:
                pos = _skip_section(raw, pos)
                continue
            constructor = raw[pos + 3]
            if constructor in _WIDE and raw[pos + 2] in _SIZED_SECTIONS:
                pos += 8 + int.from_bytes(raw[pos + 4 : pos + 8], "big")
            elif constructor in _NARROW and raw[pos + 2] in _SIZED_SECTIONS:
                pos += 5 + raw[pos + 4]
            else:
                pos = _skip_section(raw, pos)
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
    if raw[2] != _HEADER:
        return section + raw
    end = codec.skip(raw, 3, len(raw))
    return raw[:end] + section + raw[end:]


_WIDE = frozenset({0xD0, 0xD1, 0xB0})
_NARROW = frozenset({0xC0, 0xC1, 0xA0})
# amqp-value and amqp-sequence bodies may hold any constructor inside; only their frame is walked.
_SIZED_SECTIONS = frozenset({0x73, 0x74, 0x75, 0x76, 0x77, 0x78, 0x71})


def _descriptor(raw: bytes, pos: int) -> tuple[int, int]:
    """Read a section's descriptor; its code and where its value begins."""
    if raw[pos : pos + 2] == b"\x00\x53" and pos + 3 < len(raw):
        return raw[pos + 2], pos + 3
    if raw[pos : pos + 1] != b"\x00":
        raise DecodeError("a message section has no descriptor")
    code, start = codec.decode(raw, pos + 1)
    if not isinstance(code, int):
        code = _SYMBOLIC.get(code) if isinstance(code, str) else None
    if code is None:
        raise DecodeError("a message section has an unknown descriptor")
    return int(code), start


_SYMBOLIC = {
    "amqp:header:list": 0x70,
    "amqp:delivery-annotations:map": 0x71,
    "amqp:message-annotations:map": 0x72,
    "amqp:properties:list": 0x73,
    "amqp:application-properties:map": 0x74,
    "amqp:data:binary": 0x75,
    "amqp:amqp-sequence:list": 0x76,
    "amqp:amqp-value:*": 0x77,
    "amqp:footer:map": 0x78,
}


def _skip_section(raw: bytes, pos: int) -> int:
    code, start = _descriptor(raw, pos)
    if not _HEADER <= code <= _FOOTER:
        raise DecodeError("a message section has an unknown descriptor")
    if code in (_HEADER, _MESSAGE_ANNOTATIONS):
        raise DecodeError("a header or annotations section stands behind the body's properties")
    return codec.skip(raw, start, len(raw))


def _prefix_end(raw: bytes) -> int:
    """Find the end of the header and annotations a message begins with."""
    pos = 0
    size = len(raw)
    while pos < size:
        code, start = _descriptor(raw, pos)
        if code > _MESSAGE_ANNOTATIONS:
            break
        pos = codec.skip(raw, start, size)
    return pos


def _split_prefix(prefix: bytes, plain_extra: bytes) -> tuple[bytes, bytes, int]:
    """Read the header and annotations once: the header section, the annotations to keep, encoded, and the map's count.

    Delivery annotations are for this hop only and go no further.
    """
    header = b""
    extra = b""
    count = 3
    has_key = False
    pos = 0
    size = len(prefix)
    while pos < size:
        code, start = _descriptor(prefix, pos)
        end = codec.skip(prefix, start, size)
        if code == _HEADER:
            # Readers index by the one-byte descriptor (Python's official client), however the sender spelt it.
            header = b"\x00\x53\x70" + prefix[start:end]
        elif code == _MESSAGE_ANNOTATIONS:
            for name, entry in _entries(prefix, start, end):
                if isinstance(name, str) and (name in _OWN or name.startswith(_PRODUCER_PREFIX)):
                    continue
                if name == _PARTITION_KEY_NAME:
                    if not isinstance(codec.decode(entry, codec.skip(entry, 0, len(entry)))[0], str):
                        continue
                    has_key = True
                extra += entry
                count += 1
        pos = end
    if plain_extra and not has_key:
        extra += plain_extra
        count += 1
    return header, extra, count


def _entries(raw: bytes, start: int, end: int) -> list[tuple[object, bytes]]:
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
    entries: list[tuple[object, bytes]] = []
    for _ in range(count // 2):
        name, value = codec.decode(raw, pos, end)
        after = codec.skip(raw, value, end)
        entries.append((name, raw[pos:after]))
        pos = after
    if pos != end or count % 2:
        raise DecodeError("the message annotations are broken")
    return entries
