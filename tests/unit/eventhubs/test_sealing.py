"""Sealed batches, and the numbers filled into them."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from eventpump.amqp.message import Data, Header, Message
from eventpump.amqp.types import Int, Short, Symbol
from eventpump.errors import EventError
from eventpump.eventhubs.envelope import decode_batch, encode_batch, envelope_head
from eventpump.eventhubs.events import EventData
from eventpump.eventhubs.names import PARTITION_KEY, PRODUCER_EPOCH, PRODUCER_ID, PRODUCER_SEQUENCE_NUMBER
from eventpump.eventhubs.numbering import MAX_OWNER_LEVEL, MAX_PRODUCER_ID, NUMBERS
from eventpump.eventhubs.sealing import ROOM, SealedBatch, pieces, pieces_of

KEYS = (PRODUCER_ID, PRODUCER_EPOCH, PRODUCER_SEQUENCE_NUMBER)

# Sizes around where a length takes one byte or four, of the event, of its section, and of its annotations.
bodies = st.binary(max_size=20) | st.sampled_from([120, 126, 127, 130, 131, 250, 260, 70_000]).map(bytes)
keys = st.none() | st.text(st.characters(exclude_categories=["Cs"]), max_size=4) | st.integers(90, 250).map("k".__mul__)
events = st.builds(
    lambda body, properties, key: EventData(body, properties=properties).encode(key),
    bodies,
    st.none() | st.dictionaries(st.text("ab", max_size=2), st.integers(-5, 5), max_size=2),
    keys,
)
numbers = st.integers(0, NUMBERS - 1) | st.sampled_from([0, NUMBERS - 1, NUMBERS - 2])


def size_of(event: bytes) -> int:
    """Return what an encoded event adds to an idempotent batch, in bytes."""
    return sum(map(len, pieces(event, idempotent=True)))


def annotations_of(raw: bytes) -> dict[Symbol, object]:
    """Read an event's annotations."""
    found = Message.decode(raw).message_annotations
    assert found is not None
    return found


def without_numbers(raw: bytes) -> Message:
    """Decode an event and take its numbers out."""
    message = Message.decode(raw)
    kept = {key: value for key, value in (message.message_annotations or {}).items() if key not in KEYS}
    message.message_annotations = kept or None
    return message


@given(
    st.lists(events, min_size=1, max_size=8),
    st.integers(0, MAX_PRODUCER_ID),
    st.integers(0, MAX_OWNER_LEVEL),
    numbers,
)
def test_numbered_gives_every_event_its_numbers(batch: list[bytes], producer_id: int, epoch: int, first: int) -> None:
    """Id, epoch and consecutive numbers on each, in the service's types; everything else is as it was."""
    sealed = SealedBatch.seal(batch, idempotent=True)
    assert sealed.count == len(batch)
    numbered = sealed.numbered(producer_id, epoch, first)
    assert len(numbered) == sealed.size
    for place, (raw, before) in enumerate(zip(decode_batch(numbered), batch, strict=True)):
        found = annotations_of(raw)
        values = [found[key] for key in KEYS]
        assert values == [producer_id, epoch, (first + place) % NUMBERS]
        assert [type(value) for value in values] == [int, Short, Int]
        assert without_numbers(raw) == Message.decode(before)


@given(st.lists(events, min_size=1, max_size=8), keys, st.booleans())
def test_size_while_filling_is_the_size_sent(batch: list[bytes], key: str | None, idempotent: bool) -> None:
    """The size kept while a batch is filled is the size sent."""
    key = None if idempotent else key
    size = len(envelope_head(key)) + sum(
        len(piece) for event in batch for piece in pieces(event, idempotent=idempotent)
    )
    sealed = SealedBatch.seal(batch, partition_key=key, idempotent=idempotent)
    assert sealed.size == size == len(sealed.numbered(1, 2, 3) if idempotent else sealed.message)


@given(bodies, st.booleans())
@example(bytes(8192), False)
@example(bytes(8192), True)
def test_pieces_of_an_event_that_is_bytes_copies_nothing(body: bytes, idempotent: bool) -> None:
    """Its payload is a piece as it is, and the message is that of the event encoded by itself."""
    event = EventData(body)
    head, rest = pieces_of(event, idempotent=idempotent)
    assert rest is body
    sealed = SealedBatch((head, rest), idempotent=idempotent)
    encoded = SealedBatch.seal([event.encode()], idempotent=idempotent)
    assert sealed.size == encoded.size
    if idempotent:
        assert sealed.numbered(1, 2, 3) == encoded.numbered(1, 2, 3)
    else:
        assert sealed.message == encoded.message


class Shouted(EventData):
    """An event that is encoded in its own way."""

    def encode(self, partition_key: str | None = None) -> bytes:
        return EventData(b"X").encode(partition_key)


@pytest.mark.parametrize("idempotent", [False, True])
def test_pieces_of_an_event_that_encodes_itself_asks_it(idempotent: bool) -> None:
    """A subclass is sent as it encodes itself, though its body is bytes and no more."""
    assert pieces_of(Shouted(b"x"), idempotent=idempotent) == pieces(Shouted(b"x").encode(), idempotent=idempotent)
    assert pieces_of(Shouted(b"x"))[1].endswith(b"X")


@given(st.lists(events, min_size=1, max_size=4), keys)
def test_seal_of_a_plain_batch_is_the_envelope(batch: list[bytes], key: str | None) -> None:
    """Without room for numbers nothing is added."""
    sealed = SealedBatch.seal(batch, partition_key=key)
    assert sealed.message == encode_batch(batch, key)
    assert not sealed.is_idempotent
    with pytest.raises(ValueError, match="without room"):
        sealed.numbered(1, 1, 1)


def test_numbered_wraps_inside_a_batch() -> None:
    """After 2147483647 comes 0."""
    sealed = SealedBatch.seal([EventData(b"x").encode()] * 4, idempotent=True)
    found = [annotations_of(raw)[PRODUCER_SEQUENCE_NUMBER] for raw in decode_batch(sealed.numbered(1, 2, NUMBERS - 2))]
    assert found == [NUMBERS - 2, NUMBERS - 1, 0, 1]


def test_numbered_twice_gives_the_same_bytes() -> None:
    """The same numbers give the same bytes, whatever was filled in between."""
    sealed = SealedBatch.seal([EventData(b"x").encode("key"), EventData(b"y").encode()], idempotent=True)
    first = sealed.numbered(1, 2, 3)
    assert sealed.numbered(9, 8, 7) != first
    assert sealed.numbered(1, 2, 3) == first
    assert sealed.size == len(first)


def test_room_for_numbers_has_the_full_width() -> None:
    """114 bytes of keys and values, and 6 around them (protocol.md 8.7), whatever the numbers are."""
    assert ROOM == 114 + 6
    event = EventData(b"x").encode()
    assert size_of(event) == 5 + len(event) + ROOM
    sealed = SealedBatch.seal([event], idempotent=True)
    raw = decode_batch(sealed.numbered(0, 0, 0))[0]
    assert raw == bytes.fromhex("005372c17306") + b"".join(
        [
            b"\xa3\x19com.microsoft:producer-id\x81" + bytes(8),
            b"\xa3\x1ccom.microsoft:producer-epoch\x61" + bytes(2),
            b"\xa3\x26com.microsoft:producer-sequence-number\x71" + bytes(4),
            event,
        ]
    )


def test_message_of_a_batch_without_its_numbers_is_refused() -> None:
    """The room holds whatever was there before."""
    with pytest.raises(ValueError, match="without numbers"):
        _ = SealedBatch.seal([EventData(b"x").encode()], idempotent=True).message


def test_partition_key_stays_beside_the_numbers() -> None:
    """Events keep their key for readers, next to the numbers."""
    event = EventData(b"x").encode("blue")
    raw = decode_batch(SealedBatch.seal([event], idempotent=True).numbered(1, 2, 3))[0]
    assert annotations_of(raw) == {
        PARTITION_KEY: "blue",
        PRODUCER_ID: 1,
        PRODUCER_EPOCH: 2,
        PRODUCER_SEQUENCE_NUMBER: 3,
    }
    assert Message.decode(raw).header == Header(durable=True)
    assert size_of(event) == 5 + len(event) + 114


@pytest.mark.parametrize("key", [None, "k"])
@pytest.mark.parametrize("size", range(100, 140))
def test_size_is_exact_where_a_length_grows(size: int, key: str | None) -> None:
    """A section of 255 bytes has its length in one byte, one of 256 in four."""
    event = EventData(bytes(size)).encode(key)
    assert SealedBatch.seal([event], idempotent=True).size == size_of(event)


def test_numbered_keeps_other_sections_before_the_body() -> None:
    """A header of any form, delivery annotations, and a body of none."""
    message = Message(
        header=Header(),
        delivery_annotations={Symbol("d"): "x" * 300},
        message_annotations={Symbol("m"): [1, "x" * 300]},
    )
    for annotated, body in ((True, None), (True, Data((b"x",))), (False, Data((b"x",)))):
        message.body = body
        if not annotated:
            message.message_annotations = None
        raw = decode_batch(SealedBatch.seal([message.encode()], idempotent=True).numbered(1, 2, 3))[0]
        assert without_numbers(raw) == message


@pytest.mark.parametrize("key", KEYS)
def test_seal_of_an_event_with_numbers_is_refused(key: Symbol) -> None:
    """It is not known what they were for."""
    event = Message(body=Data((b"x",)), message_annotations={key: Int(5)}).encode()
    with pytest.raises(EventError, match="already"):
        SealedBatch.seal([EventData(b"x").encode(), event], idempotent=True)


@pytest.mark.parametrize("values", [(-1, 0, 0), (2**63, 0, 0), (0, -1, 0), (0, 2**15, 0), (0, 0, -1), (0, 0, NUMBERS)])
def test_numbered_with_values_outside_the_range_is_refused(values: tuple[int, int, int]) -> None:
    """protocol.md 8.1."""
    with pytest.raises(ValueError, match="range"):
        SealedBatch.seal([EventData(b"x").encode()], idempotent=True).numbered(*values)


def test_idempotent_batch_with_a_key_is_refused() -> None:
    """Idempotent publishing is by partition; a key on the envelope would ask the gateway."""
    with pytest.raises(ValueError, match="not by a key"):
        SealedBatch.seal([EventData(b"x").encode()], partition_key="key", idempotent=True)


@pytest.mark.parametrize("idempotent", [True, False])
def test_seal_of_an_empty_batch_is_refused(idempotent: bool) -> None:
    """An envelope without events is no message."""
    with pytest.raises(ValueError, match="at least one"):
        SealedBatch.seal([], idempotent=idempotent)
