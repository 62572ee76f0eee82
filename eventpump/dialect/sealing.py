"""A batch as it will be sent: encoded once, with room for the numbers of idempotent publishing (wire reference 8).

The three annotations stand on every event, at their full width (8.7), and filling them in changes bytes in place. An
event without annotations gets a section of its own; one with (a partition key, say) has them added to its map.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from typing import Final, Self

from eventpump.amqp import codec
from eventpump.amqp.message import MESSAGE_ANNOTATIONS, section, section_spans
from eventpump.amqp.types import Described, Int, Short, Symbol
from eventpump.core.sequencer import MAX_OWNER_LEVEL, MAX_PRODUCER_ID, NUMBERS
from eventpump.dialect.envelope import encode_batch
from eventpump.dialect.names import PRODUCER_EPOCH, PRODUCER_ID, PRODUCER_SEQUENCE_NUMBER
from eventpump.errors import EventError

_KEYS = (PRODUCER_ID, PRODUCER_EPOCH, PRODUCER_SEQUENCE_NUMBER)


def _annotations(producer_id: int, epoch: int, number: int) -> dict[Symbol, object]:
    return {PRODUCER_ID: producer_id, PRODUCER_EPOCH: Short(epoch), PRODUCER_SEQUENCE_NUMBER: Int(number)}


# The largest values take the full width: long 0x81, short 0x61, int 0x71.
_SECTION: Final = section(MESSAGE_ANNOTATIONS, _annotations(MAX_PRODUCER_ID, MAX_OWNER_LEVEL, NUMBERS - 1))
_PAIRS: Final = b"".join(
    codec.encode(item) for pair in _annotations(MAX_PRODUCER_ID, MAX_OWNER_LEVEL, NUMBERS - 1).items() for item in pair
)
_ID_AT: Final = _PAIRS.index(codec.encode(MAX_PRODUCER_ID)) + 1
_EPOCH_AT: Final = _PAIRS.index(codec.encode(Short(MAX_OWNER_LEVEL)), _ID_AT + 8) + 1
_NUMBER_AT: Final = len(_PAIRS) - 4

ROOM: Final = len(_SECTION)
"""What numbering adds to an event that has no annotations, in bytes."""

_STAMP: Final = struct.Struct(f">q{_EPOCH_AT - _ID_AT - 8}sh{_NUMBER_AT - _EPOCH_AT - 2}si")
_BETWEEN: Final = (_PAIRS[_ID_AT + 8 : _EPOCH_AT], _PAIRS[_EPOCH_AT + 2 : _NUMBER_AT])
_SMALL: Final = tuple(b"\x00\x53\x75\xa0" + bytes((size,)) + _SECTION for size in range(256))
_LARGE: Final = b"\x00\x53\x75\xb0"
_pack_large = struct.Struct(">4sI").pack


def numbered_size(event: bytes) -> int:
    """Give the size of an encoded event with room for its numbers, in bytes; `added_size` of it is what it adds."""
    return len(event) + (ROOM if event[2] > MESSAGE_ANNOTATIONS else _growth(event))


class SealedBatch:
    """The encoded message of a batch: its events, their order and their bytes do not change any more.

    :ivar count: how many events it has.
    :ivar size: its size on the wire, in bytes.
    """

    __slots__ = ("_message", "_room", "_stamps", "count", "size")

    def __init__(self, message: bytes, room: bytearray | None, stamps: Sequence[int], count: int) -> None:
        self._message = message
        # With room for numbers, which are written over each time: numbering costs one copy, not two.
        self._room = room
        self._stamps = stamps
        self.count = count
        self.size = len(message if room is None else room)

    @classmethod
    def seal(cls, events: Sequence[bytes], *, partition_key: str | None = None, idempotent: bool = False) -> Self:
        """Encode the batch.

        :param events: encoded events, one at least.
        :param partition_key: the key the whole message is routed by. A batch for a partition has none, whatever keys
            its events have.
        :param idempotent: whether to leave room for numbers.
        :raises EventError: an event carries numbers already.
        :raises ValueError: no event, or an idempotent batch with a key.
        """
        if not events:
            raise ValueError("a batch has at least one event")
        if not idempotent:
            return cls(encode_batch(events, partition_key), None, (), len(events))
        if partition_key is not None:
            raise ValueError("an idempotent batch goes to a partition, not by a key")
        parts: list[bytes | memoryview] = []
        append = parts.append
        stamps: list[int] = []
        stamp = stamps.append
        small, large, annotations = _SMALL, _pack_large, _SECTION
        # Where the stamp of an event without annotations begins, from where its data section begins.
        small_stamp = 5 + ROOM - len(_PAIRS) + _ID_AT
        large_stamp = small_stamp + 3
        at = 0
        for event in events:
            if event[2] > MESSAGE_ANNOTATIONS:
                size = len(event) + ROOM
                if size < 256:
                    append(small[size])
                    stamp(at + small_stamp)
                    at += 5 + size
                else:
                    append(large(_LARGE, size))
                    append(annotations)
                    stamp(at + large_stamp)
                    at += 8 + size
                append(event)
                continue
            end = _annotated_length(event)
            head = _with_room(event[:end])
            size = len(head) + len(event) - end
            lead = small[size][:5] if size < 256 else large(_LARGE, size)
            append(lead)
            append(head)
            # Copying a large slice costs more than a view does.
            append(event[end:] if size < 512 else memoryview(event)[end:])
            stamp(at + len(lead) + len(head) - len(_PAIRS) + _ID_AT)
            at += len(lead) + size
        return cls(b"", bytearray().join(parts), stamps, len(events))

    @property
    def is_idempotent(self) -> bool:
        """Whether it has room for numbers."""
        return self._room is not None

    @property
    def message(self) -> bytes:
        """The message of a batch without numbers. :raises ValueError: it is idempotent, and to be numbered first."""
        if self._room is not None:
            raise ValueError("an idempotent batch is not sent without numbers")
        return self._message

    def numbered(self, producer_id: int, epoch: int, first: int) -> bytes:
        """Make the message with its numbers: consecutive, and 0 after the largest.

        :param first: the number of its first event.
        :raises ValueError: it has no room, or a value lies outside the service's range.
        """
        room = self._room
        if room is None:
            raise ValueError("the batch was sealed without room for numbers")
        if not (0 <= producer_id <= MAX_PRODUCER_ID and 0 <= epoch <= MAX_OWNER_LEVEL and 0 <= first < NUMBERS):
            raise ValueError(f"({producer_id}, {epoch}, {first}) lies outside the service's range")
        pack = _STAMP.pack_into
        to_epoch, to_number = _BETWEEN
        numbers = chain(range(first, min(first + self.count, NUMBERS)), range(self.count))
        for at, number in zip(self._stamps, numbers, strict=False):
            pack(room, at, producer_id, to_epoch, epoch, to_number, number)
        return bytes(room)

    def __repr__(self) -> str:
        kind = ", idempotent" if self.is_idempotent else ""
        return f"SealedBatch({self.count} events, {self.size} bytes{kind})"


def _annotated_length(event: bytes) -> int:
    """Find where the header and annotations of an event end."""
    if event[2:4] == b"\x70\xc0":
        # As we write events with a key: header and annotations in their short forms.
        pos = 5 + event[4]
        if event[pos + 2 : pos + 4] == b"\x72\xc1":
            return pos + 5 + event[pos + 4]
    pos = 0
    while event[pos + 2] <= MESSAGE_ANNOTATIONS:
        if event[pos + 3] in (0xC0, 0xC1):  # list8, map8
            pos += 5 + event[pos + 4]
        elif event[pos + 3] == 0x45:  # list0
            pos += 4
        else:
            pos = codec.skip(event, pos, len(event))
        if pos + 3 > len(event):
            break
    return pos


def _growth(event: bytes) -> int:
    end = _annotated_length(event)
    return len(_with_room(event[:end])) - end


@lru_cache(maxsize=4096)
def _with_room(head: bytes) -> bytes:
    """Rewrite what stands before an event's properties and body so that it ends with the room for its numbers.

    Remembered, because events of one key begin alike.
    """
    kept = b"".join(head[start:end] for code, start, end in section_spans(head) if code != MESSAGE_ANNOTATIONS)
    for code, start, end in section_spans(head):
        if code == MESSAGE_ANNOTATIONS:
            value, _ = codec.decode(head, start, end)
            assert isinstance(value, Described)
            if any(key in value.value for key in _KEYS):
                raise EventError("the event carries numbers of idempotent publishing already")
            value.value.update(_annotations(MAX_PRODUCER_ID, MAX_OWNER_LEVEL, NUMBERS - 1))
            return kept + section(MESSAGE_ANNOTATIONS, value.value)
    return kept + _SECTION
