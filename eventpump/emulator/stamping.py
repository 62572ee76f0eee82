"""Convert what a producer sent into the form that a partition stores and readers receive.

The message annotations are rewritten once: the sender's first, then the service's own. The sender's header is dropped.
Every other byte is unchanged, delivery annotations and footer too, wherever they are (protocol.md 6).
One function processes a whole batch, because this runs for every event.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eventpump.amqp import codec
from eventpump.amqp.codec import AmqpDecodeError, decode_described
from eventpump.amqp.message import Message
from eventpump.amqp.sections import (
    DELIVERY_ANNOTATIONS,
    HEADER,
    MARKER,
    MESSAGE_ANNOTATIONS,
    NARROW_DATA,
    PROPERTIES,
    WIDE_DATA,
    check_rest,
    check_sections,
    prefix_end,
    section,
    section_at,
)
from eventpump.amqp.types import Int
from eventpump.emulator import bounds
from eventpump.eventhubs.names import (
    ENQUEUED_TIME,
    OFFSET,
    PARTITION_KEY,
    PUBLISHER,
    SEQUENCE_NUMBER,
    SEQUENCE_NUMBER_EPOCH,
)

_LONG = struct.Struct(">q")
_SEQUENCE = codec.encode(SEQUENCE_NUMBER_EPOCH) + codec.encode(Int(-1)) + codec.encode(SEQUENCE_NUMBER)
_SMALL_SEQUENCES = tuple(_SEQUENCE + b"\x55" + bytes((number,)) for number in range(128))
_LARGE_SEQUENCE = _SEQUENCE + b"\x81"
_OFFSET = codec.encode(OFFSET) + b"\xa1"
_TIME = codec.encode(ENQUEUED_TIME) + b"\x83"
_PARTITION_KEY = codec.encode(PARTITION_KEY)
_FIXED = len(_SEQUENCE) + len(_OFFSET) + 1 + len(_TIME) + 8

_OWN: frozenset[str] = frozenset({SEQUENCE_NUMBER, SEQUENCE_NUMBER_EPOCH, OFFSET, ENQUEUED_TIME, PUBLISHER})
_PRODUCER_PREFIX = "com.microsoft:producer-"
_SIZED = frozenset({0xC0, 0xC1, 0xD0, 0xD1})
_STRINGS = frozenset({0xA1, 0xB1})
_DELIVERY = MARKER + bytes((DELIVERY_ANNOTATIONS,))
_SMALL_ANNOTATIONS = MARKER + bytes((MESSAGE_ANNOTATIONS, 0xC1))
_LARGE_ANNOTATIONS = MARKER + bytes((MESSAGE_ANNOTATIONS, 0xD1))


_SECTION_WORK = 4
"""What a section that is decoded costs whatever is in it, in plain transfers of about 5 µs each."""
_BYTES_PER_TRANSFER = 4
"""How many bytes take as long to decode as a plain transfer to handle: the shortest annotation has as many."""


@dataclass(slots=True)
class StampedEvents:
    """Events of one batch as a partition keeps them.

    Args:
        offsets: Their offsets, aligned.
        next_offset: The first offset free after them.
    """

    payloads: list[bytes]
    offsets: array[int]
    next_offset: int
    size: int


def stamp(events: list[bytes], sequence_number: int, offset: int, time_ms: int, batch_key: str | None) -> StampedEvents:
    """Assign a batch its numbers.

    Args:
        sequence_number: Of the first; the others follow.
        offset: Of the first; every event advances it by its stored size.
        batch_key: The envelope's partition key, for events that carry none themselves.

    Raises:
        AmqpDecodeError: One of them is no AMQP message, or their annotations are too many; nothing was numbered then.
    """
    left = bounds.ANNOTATION_ITEMS
    out: list[bytes] = []
    offsets = array("q")
    start_offset = offset
    tail = _TIME + _LONG.pack(time_ms)
    plain_extra = b"" if batch_key is None else _PARTITION_KEY + codec.encode(batch_key)
    prefixes: dict[bytes, tuple[bytes, bytes, int]] = {}
    pack = _LONG.pack
    head_for: tuple[int, bytes, int, bool] | None = None
    head = offset_key = b""
    number = sequence_number
    for raw in events:
        size = len(raw)
        before, extra, count = b"", plain_extra, 5 if plain_extra else 4
        rest = raw
        pos = 0
        if size < 5 or raw[2] < PROPERTIES or raw[1] != 0x53:
            pos = prefix_end(raw)
            prefix = raw[:pos]
            known = prefixes.get(prefix)
            if known is None:
                left -= codec.count_items(prefix, 0, len(prefix), left)
                known = prefixes[prefix] = _split_prefix(prefix, plain_extra)
            before, extra, count = known
            rest = raw[pos:]
        # What stays is walked by its lengths, so that nothing that is not a message is ever kept.
        if not check_rest(raw, pos):
            before, extra, count, rest, used = _split_unordered(raw, plain_extra, left)
            left -= used
        text = b"%d" % offset
        is_small = 0 <= number < 128  # a long in its smallest form, as the service writes it
        wanted = (len(text), extra, count, is_small)
        if wanted != head_for:
            head_for = wanted
            length = _FIXED + (2 if is_small else 9) + len(text) + len(extra)
            if length < 255:
                head = _SMALL_ANNOTATIONS + bytes((length + 1, count * 2)) + extra
            else:
                head = _LARGE_ANNOTATIONS + struct.pack(">II", length + 4, count * 2) + extra
            if not is_small:
                head += _LARGE_SEQUENCE
            offset_key = _OFFSET + bytes((len(text),))
        value = _SMALL_SEQUENCES[number] if is_small else pack(number)
        stored = b"".join((before, head, value, offset_key, text, tail, rest))
        out.append(stored)
        offsets.append(offset)
        offset += len(stored)
        number += 1
    return StampedEvents(out, offsets, offset, offset - start_offset)


def work_of(payload: bytes) -> int:
    """Return what it costs to take a message, in plain transfers: an event, an envelope of events, or a request.

    An event costs one, and what is to be decoded, which is not data, by its size. Nothing of it is decoded here.
    """
    work, pos, end = 1, 0, len(payload)
    try:
        while pos < end:
            start = pos
            if payload.startswith(NARROW_DATA, pos):
                pos += 5 + payload[pos + 4]
            elif payload.startswith(WIDE_DATA, pos):
                pos += 8 + int.from_bytes(payload[pos + 4 : pos + 8], "big")
            else:
                pos = section_at(payload, pos, end)[2]
                work += _SECTION_WORK + (pos - start) // _BYTES_PER_TRANSFER
                continue
            work += 1 + _prefix_work(payload, start + (8 if payload[start + 3] == 0xB0 else 5), min(pos, end))
    except (AmqpDecodeError, IndexError):
        pass  # it is refused where it ends
    return work


def _prefix_work(payload: bytes, start: int, end: int) -> int:
    """Return what the header and annotations of an event in an envelope cost; all of it where their form is unusual."""
    pos = start
    while pos + 4 <= end and payload[pos] == 0:
        if payload[pos + 1] == 0x53 and payload[pos + 2] > MESSAGE_ANNOTATIONS:
            break
        if payload[pos + 1] != 0x53 or payload[pos + 3] not in _SIZED:
            pos = end
        elif payload[pos + 3] & 0x10:
            pos += 8 + int.from_bytes(payload[pos + 4 : pos + 8], "big")
        else:
            pos += 5 + int.from_bytes(payload[pos + 4 : pos + 5])  # which may be cut off
    return (min(pos, end) - start) // _BYTES_PER_TRANSFER


def add_delivery_annotations(payloads: Sequence[bytes], annotations: Mapping[Any, Any]) -> list[bytes]:
    """Put delivery annotations into stored events: where they belong (AMQP 1.0, 3.2)."""
    own = section(DELIVERY_ANNOTATIONS, annotations)
    return [
        own + raw if raw[2] == MESSAGE_ANNOTATIONS and _DELIVERY not in raw else _with_own(raw, annotations)
        for raw in payloads
    ]


def _with_own(raw: bytes, annotations: Mapping[Any, Any]) -> bytes:
    """Put delivery annotations into an event that may have some, of its sender, and (an old one) a header."""
    start = section_at(raw, 0, len(raw))[2] if raw[2] == HEADER else 0
    if _DELIVERY in raw:  # perhaps in its body
        for code, begin, value, end in check_sections(raw):
            if code == DELIVERY_ANNOTATIONS:
                annotations = {**annotations, **decode_described(raw, value, end)}
                raw = raw[:begin] + raw[end:]
                break
    return raw[:start] + section(DELIVERY_ANNOTATIONS, annotations) + raw[start:]


def _split_prefix(prefix: bytes, plain_extra: bytes) -> tuple[bytes, bytes, int]:
    """Read the header and annotations of a message, which it begins with.

    Returns:
        What comes before the message annotations: delivery annotations; the message annotations to keep, encoded; and
        the count of the map.
    """
    before, extra, count, _ = _split(prefix, plain_extra, len(prefix))
    return before, extra, count


def _split_unordered(raw: bytes, plain_extra: bytes, left: int) -> tuple[bytes, bytes, int, bytes, int]:
    """Do the same with a message whose header or annotations stand behind other sections too.

    Returns:
        As `_split_prefix`; then what follows the message annotations, and how many values there were.
    """
    used = 0
    for code, begin, _, end in check_sections(raw):
        if code <= MESSAGE_ANNOTATIONS:
            used += codec.count_items(raw, begin, end, left - used)
    before, extra, count, rest = _split(raw, plain_extra, prefix_end(raw))
    return before, extra, count, rest, used


def _split(raw: bytes, plain_extra: bytes, prefix: int) -> tuple[bytes, bytes, int, bytes]:
    """Split a message: delivery annotations in its prefix, message annotations and their count, and the rest."""
    before: list[bytes] = []
    extra: list[bytes] = []
    rest: list[bytes] = []
    count = 4
    has_key = False
    for code, begin, value, end in check_sections(raw):
        if code <= MESSAGE_ANNOTATIONS:
            # Readers decode them, so they are: one broken value there would leave an event without offset.
            Message.decode(raw[begin:end])
        if code == DELIVERY_ANNOTATIONS:
            # Readers index by the one-byte descriptor (Python's official client), however the sender spelt it.
            (before if begin < prefix else rest).append(_DELIVERY + raw[value:end])
        elif code > MESSAGE_ANNOTATIONS:
            rest.append(raw[begin:end])
        elif code == MESSAGE_ANNOTATIONS:
            for name, entry in _entries(raw, value, end):
                if isinstance(name, str) and (name in _OWN or name.startswith(_PRODUCER_PREFIX)):
                    continue
                if name == PARTITION_KEY:
                    if entry[codec.skip(entry, 0, len(entry))] not in _STRINGS:
                        continue
                    has_key = True
                extra.append(entry)
                count += 1
    if plain_extra and not has_key:
        extra.append(plain_extra)
        count += 1
    return b"".join(before), b"".join(extra), count, b"".join(rest)


def _entries(raw: bytes, start: int, end: int) -> list[tuple[object, bytes]]:
    """Split an encoded map, which is sound, into its keys and the bytes of each entry."""
    pos = start + (9 if raw[start] == 0xD1 else 3)
    entries: list[tuple[object, bytes]] = []
    while pos < end:
        name, value = codec.decode(raw, pos, end)
        after = codec.skip(raw, value, end)
        entries.append((name, raw[pos:after]))
        pos = after
    return entries
