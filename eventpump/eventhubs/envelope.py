"""The batch envelope: many encoded events in one message (protocol.md 7.2, 7.3).

Its body is one data section per event, each holding that event's whole encoded message.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from typing import Final

from eventpump.amqp.codec import MAX_ITEMS, AmqpDecodeError, count_items, decode
from eventpump.amqp.message import Header, Message
from eventpump.amqp.sections import (
    DATA,
    FOOTER,
    HEADER,
    MESSAGE_ANNOTATIONS,
    NARROW_DATA,
    WIDE_DATA,
    data_head,
    section_at,
)
from eventpump.eventhubs.names import PARTITION_KEY

_unpack_size = struct.Struct(">I").unpack_from

REMEMBERED: Final = 8192
"""Sizes from this on are not remembered, in bytes."""


class _EventHeads(dict[int, bytes]):
    """The bytes before an encoded event, by its size in bytes. The usual sizes are cached."""

    def __missing__(self, size: int) -> bytes:
        head = data_head(size)
        if size < REMEMBERED:
            self[size] = head
        return head


class _DataHeads(dict[int, bytes]):
    """The bytes before the payload of an event that is a single data section, by its size in bytes."""

    def __missing__(self, size: int) -> bytes:
        inner = data_head(size)
        head = data_head(len(inner) + size) + inner
        if size < REMEMBERED:
            self[size] = head
        return head


EVENT_HEADS: Final = _EventHeads()
DATA_HEADS: Final = _DataHeads()


@lru_cache(maxsize=1024)
def envelope_head(partition_key: str | None) -> bytes:
    """Encode the sections before the events; with a key a durable header: beside an empty one the key is ignored."""
    if partition_key is None:
        return b""
    return Message(header=Header(durable=True), message_annotations={PARTITION_KEY: partition_key}).encode()


def encode_batch(events: Sequence[bytes], partition_key: str | None = None) -> bytes:
    """Put encoded events, at least one, into one envelope; to be sent with `names.BATCH_MESSAGE_FORMAT`."""
    heads = map(EVENT_HEADS.__getitem__, map(len, events))
    return b"".join(chain((envelope_head(partition_key),), chain.from_iterable(zip(heads, events, strict=True))))


def decode_batch(payload: bytes) -> list[bytes]:
    """Take an envelope apart into its encoded events, which are not looked into, nor are its own other sections."""
    events: list[bytes] = []
    append = events.append
    starts_with, unpack = payload.startswith, _unpack_size
    pos, end = 0, len(payload)
    while pos < end:
        if starts_with(NARROW_DATA, pos) and pos + 5 <= end:
            start = pos + 5
            pos = start + payload[start - 1]
        elif starts_with(WIDE_DATA, pos) and pos + 8 <= end:
            start = pos + 8
            pos = start + unpack(payload, pos + 4)[0]
        else:
            code, start, pos = section_at(payload, pos, end)
            if code == DATA and payload[start] in (0xA0, 0xB0):
                # A data section in a longer encoding than needed; no known sender uses it.
                append(decode(payload, start, pos)[0])
            elif not (HEADER <= code < DATA and not events) and code != FOOTER:
                raise AmqpDecodeError("a batch has a body of another kind than data sections")
            continue
        if pos > end:
            raise AmqpDecodeError("an event of a batch runs past its end")
        append(payload[start:pos])
    if not events:
        raise AmqpDecodeError("a batch holds no event")
    return events


def partition_key_of(payload: bytes, max_items: int = MAX_ITEMS) -> str | None:
    """Read the partition key a message or envelope is routed by; a key that is not a string is ignored.

    Raises:
        AmqpDecodeError: The bytes before the body are no sections, or the annotations hold more values.
    """
    pos, end = 0, len(payload)
    while pos < end:
        code, value, after = section_at(payload, pos, end)
        if code == DATA:
            break
        if code == MESSAGE_ANNOTATIONS:
            count_items(payload, pos, after, max_items)
            annotations, _ = decode(payload, value, after)
            if not isinstance(annotations, dict):
                raise AmqpDecodeError("the message annotations are no map")
            key = annotations.get(PARTITION_KEY)
            return key if isinstance(key, str) else None
        pos = after
    return None
