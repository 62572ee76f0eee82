"""A batch as it will be sent: encoded once, with room for the numbers of idempotent publishing (protocol.md 8).

The three annotations stand on every event, at their full width (8.7), and filling them in moves no byte. An event
without annotations gets a section of its own; one with (a partition key, say) has them added to its map.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import chain
from typing import Final, Self

from eventpump.amqp import codec
from eventpump.amqp.sections import MESSAGE_ANNOTATIONS, data_head, prefix_end, section, section_spans
from eventpump.amqp.types import Described, Int, Short, Symbol
from eventpump.compiled import core
from eventpump.errors import EventError
from eventpump.eventhubs.envelope import DATA_HEADS, EVENT_HEADS, REMEMBERED, envelope_head
from eventpump.eventhubs.events import EventData
from eventpump.eventhubs.names import PRODUCER_EPOCH, PRODUCER_ID, PRODUCER_SEQUENCE_NUMBER
from eventpump.eventhubs.numbering import MAX_OWNER_LEVEL, MAX_PRODUCER_ID, NUMBERS
from eventpump.eventhubs.stamps import filled, spell_stamp, with_room

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

_FIRST_KEY: Final = codec.encode(PRODUCER_ID)
_BEFORE_EPOCH: Final = _PAIRS[_ID_AT + 8 : _EPOCH_AT]
_BEFORE_NUMBER: Final = _PAIRS[_EPOCH_AT + 2 : _NUMBER_AT]
_pack_id = struct.Struct(">q").pack
_pack_epoch = struct.Struct(">h").pack
_pack_number = struct.Struct(">i").pack


def pieces_of(
    event: EventData, *, idempotent: bool = False, stamped: bool = False, before: bytes = b""
) -> tuple[bytes, bytes]:
    """Encode an event for a batch, in the two pieces in which it stands there.

    The bytes of a body are a piece as they are, and first copied when the batch is sealed; but in an event with
    properties that has room for numbers.

    Args:
        stamped: Whether to leave room for a stamp too (`eventhubs/stamps.py`).
        before: What precedes the event's own sections: header and annotations that state its key (`envelope_head`).
            Default: nothing.

    Returns:
        The bytes before the body, and the rest; the sum of their lengths is what the event adds to a batch, in bytes.

    Raises:
        EventError: A property or the body has no AMQP form, or the event carries numbers already.
    """
    if stamped:
        return pieces(before + with_room(event.encode()), idempotent=idempotent)
    if type(event) is EventData:  # another kind may encode itself otherwise
        data = event.data
        if data is not None and not before:
            return (_NUMBERED_DATA_HEADS if idempotent else DATA_HEADS)[len(data)], data
        if not idempotent and event.body_type == "data":
            body = event.body
            head = before + event.encode_head()
            return EVENT_HEADS[len(head) + len(body)] + head, body
    return pieces(before + event.encode(), idempotent=idempotent)


def pieces(encoded: bytes, *, idempotent: bool = False) -> tuple[bytes, bytes]:
    """Divide an encoded event likewise. Raises `EventError` if it carries numbers already."""
    if not idempotent:
        return EVENT_HEADS[len(encoded)], encoded
    if encoded[2] > MESSAGE_ANNOTATIONS:
        return _NUMBERED_HEADS[len(encoded)], encoded
    end = prefix_end(encoded)
    annotated = _with_room(encoded[:end])
    return EVENT_HEADS[len(annotated) + len(encoded) - end] + annotated, encoded[end:]


class _NumberedHeads(dict[int, bytes]):
    """As `EVENT_HEADS`, with room for numbers, for events without annotations."""

    def __missing__(self, size: int) -> bytes:
        head = EVENT_HEADS[ROOM + size] + _SECTION
        if size < REMEMBERED:
            self[size] = head
        return head


_NUMBERED_HEADS: Final = _NumberedHeads()


class _NumberedDataHeads(dict[int, bytes]):
    """As `DATA_HEADS`, with room for numbers."""

    def __missing__(self, size: int) -> bytes:
        inner = _SECTION + data_head(size)
        head = EVENT_HEADS[len(inner) + size] + inner
        if size < REMEMBERED:
            self[size] = head
        return head


_NUMBERED_DATA_HEADS: Final = _NumberedDataHeads()


class SealedBatch:
    """The encoded message of a batch: its events, their order and their bytes do not change any more.

    Args:
        pieces: Those of its events, two of each (`pieces_of`), with room for numbers where it is idempotent.
        stamped: Whether each has room for a stamp too.
        partition_key: The key the whole message is routed by. A batch for a partition has none, whatever keys its
            events have.
        size: Of an idempotent batch, the size of its pieces together, where it is known.

    Attributes:
        count: How many events it has.
        size: Its size on the wire, in bytes.

    Raises:
        ValueError: No event, or an idempotent batch with a key.
    """

    __slots__ = ("_is_stamped", "_message", "_numbers", "_pieces", "count", "size")

    def __init__(
        self,
        pieces: Sequence[bytes],
        *,
        partition_key: str | None = None,
        idempotent: bool = False,
        stamped: bool = False,
        size: int | None = None,
    ) -> None:
        if not pieces:
            raise ValueError("a batch has at least one event")
        if idempotent and partition_key is not None:
            raise ValueError("an idempotent batch goes to a partition, not by a key")
        head = envelope_head(partition_key)
        # Joined as late as can be: a message without numbers now, one with numbers when they are known.
        self._pieces = pieces if idempotent else None
        self._message = b"" if idempotent else b"".join((head, *pieces) if head else pieces)
        self._numbers: tuple[int, int, int] | None = None
        self._is_stamped = stamped
        self.count = len(pieces) // 2
        self.size = len(self._message) if not idempotent else sum(map(len, pieces)) if size is None else size

    @classmethod
    def seal(cls, events: Iterable[bytes], *, partition_key: str | None = None, idempotent: bool = False) -> Self:
        """Seal encoded events. Raises `EventError` if one carries numbers already."""
        found = [piece for event in events for piece in pieces(event, idempotent=idempotent)]
        return cls(found, partition_key=partition_key, idempotent=idempotent)

    @property
    def is_idempotent(self) -> bool:
        """Whether it has room for numbers."""
        return self._pieces is not None

    @property
    def message(self) -> bytes:
        """The message of a batch without numbers. Raises `ValueError` if it is idempotent, and to be numbered first."""
        if self._pieces is not None:
            raise ValueError("an idempotent batch is not sent without numbers")
        return self._message

    def numbered(self, producer_id: int, epoch: int, first: int) -> bytes:
        """Make the message with its numbers: consecutive, and 0 after the largest."""
        if self._pieces is None:
            raise ValueError("the batch was sealed without room for numbers")
        if not (0 <= producer_id <= MAX_PRODUCER_ID and 0 <= epoch <= MAX_OWNER_LEVEL and 0 <= first < NUMBERS):
            raise ValueError(f"({producer_id}, {epoch}, {first}) lies outside the service's range")
        if self._numbers == (producer_id, epoch, first):
            return self._message
        stamp = _pack_id(producer_id) + _BEFORE_EPOCH + _pack_epoch(epoch) + _BEFORE_NUMBER
        parts = self._pieces
        if self._is_stamped:
            parts = list(parts)
            for place in range(self.count):
                text = spell_stamp(producer_id, epoch, (first + place) % NUMBERS)
                parts[2 * place + 1] = filled(parts[2 * place + 1], text.encode())
        self._message = number_events(parts, stamp, first)
        self._numbers = (producer_id, epoch, first)
        return self._message

    def __repr__(self) -> str:
        kind = ", idempotent" if self.is_idempotent else ""
        return f"SealedBatch({self.count} events, {self.size} bytes{kind})"


def number_events(pieces: Sequence[bytes], stamp: bytes, first: int) -> bytes:
    """Join the pieces of events, and fill in the room for numbers.

    Args:
        stamp: What the room holds before the number: producer id, epoch, and the names between.
        first: The number of the first event; after the largest number comes 0.
    """
    stamped: dict[bytes, tuple[bytes, bytes]] = {}  # events of one size have one head
    count = len(pieces) // 2
    numbers = chain(range(first, min(first + count, NUMBERS)), range(count))
    parts = list(pieces)
    for place, number in zip(range(0, len(parts), 2), numbers, strict=False):
        head = parts[place]
        around = stamped.get(head)
        if around is None:
            # Behind the room stands nothing but what precedes a payload.
            at = head.rindex(_FIRST_KEY) + _ID_AT
            around = stamped[head] = (head[:at] + stamp, head[at + len(stamp) + 4 :])
        before, after = around
        parts[place] = before + _pack_number(number) + after
    return b"".join(parts)


@lru_cache(maxsize=4096)
def _with_room(head: bytes) -> bytes:
    """Rewrite the bytes before an event's properties and body so that they end with the room for its numbers.

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


number_events_in_python, pieces_of_in_python = number_events, pieces_of
"""The references, in both builds."""
if core is not None:
    core.seal_events(pieces_of, number_events, _FIRST_KEY, _ID_AT, NUMBERS)
    core.begin_events(DATA_HEADS, _NUMBERED_DATA_HEADS, EVENT_HEADS, _NUMBERED_HEADS, envelope_head, _with_room)
    number_events, pieces_of = core.number_events, core.pieces_of
