from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventpump.amqp.codec import AmqpDecodeError, encode
from eventpump.amqp.message import AmqpValue, Data, Header, Message
from eventpump.amqp.types import Described, Symbol, ULong
from eventpump.eventhubs.envelope import DATA_HEADS, EVENT_HEADS, decode_batch, encode_batch, partition_key_of
from eventpump.eventhubs.events import EventData
from eventpump.eventhubs.names import BATCH_MESSAGE_FORMAT, PARTITION_KEY

# Sizes around 255, where a section's length takes one byte or four.
payloads = st.binary(max_size=40) | st.integers(250, 260).map(bytes) | st.just(bytes(70_000))
keys = st.none() | st.text(st.characters(exclude_categories=["Cs"]), max_size=300)


def test_envelope_has_the_services_message_format() -> None:
    """The envelope's format is the service's."""
    assert BATCH_MESSAGE_FORMAT == 2147563264


def test_envelope_has_a_data_section_per_event() -> None:
    """Each event stands in a data section of its own, with nothing around it."""
    assert encode_batch([b"ab", b""]) == b"\x00\x53\x75\xa0\x02ab\x00\x53\x75\xa0\x00"
    assert encode_batch([bytes(256)]) == b"\x00\x53\x75\xb0\x00\x00\x01\x00" + bytes(256)


@given(st.lists(payloads, min_size=1, max_size=20), keys)
def test_envelope_is_read_as_it_was_written(events: list[bytes], key: str | None) -> None:
    """What is put in comes out, and a general decoder sees the same message."""
    payload = encode_batch(events, key)
    assert decode_batch(payload) == events
    assert partition_key_of(payload) == key
    message = Message.decode(payload)
    assert message.body == Data(tuple(events))
    assert message.header == (None if key is None else Header(durable=True))
    assert message.message_annotations == (None if key is None else {PARTITION_KEY: key})


@pytest.mark.parametrize(("event_size", "added"), [(0, 5), (1, 6), (255, 260), (256, 264), (1000, 1008), (8192, 8200)])
def test_envelope_overhead_is_5_or_8_bytes_per_event(event_size: int, added: int) -> None:
    """An event costs 5 bytes more than itself up to 255 bytes, and 8 above; so does its payload in a section."""
    assert len(encode_batch([bytes(event_size)])) == added
    assert len(EVENT_HEADS[event_size]) + event_size == added
    assert len(DATA_HEADS[event_size]) + event_size == len(encode_batch([EventData(bytes(event_size)).encode()]))


def test_envelope_with_long_forms_is_read() -> None:
    """Sections in longer encodings than needed are read all the same."""
    eight_byte_descriptor = b"\x00\x80" + (0x75).to_bytes(8, "big") + b"\xa0\x01x"
    wide_length = b"\x00\x53\x75\xb0\x00\x00\x00\x01y"
    assert decode_batch(eight_byte_descriptor + wide_length) == [b"x", b"y"]


def test_envelope_with_other_sections_is_read() -> None:
    """Whatever stands before the events or in the footer is no event."""
    message = Message(
        body=Data((b"a", b"b")),
        header=Header(priority=1),
        delivery_annotations={Symbol("d"): 1},
        message_annotations={Symbol("x"): "y"},
        application_properties={"p": 1},
        footer={Symbol("f"): 1},
    )
    assert decode_batch(message.encode()) == [b"a", b"b"]


JUNK = [
    b"",
    b"junk",
    b"\x00",
    b"\x00\x53",
    b"\x00\x53\x75",
    b"\x00\x53\x75\xa0",
    b"\x00\x53\x75\xa0\x02a",
    b"\x00\x53\x75\xb0\x00\x00\x00",
    b"\x00\x53\x75\xb0\xff\xff\xff\xffa",
    b"\x00\x53\x75\x40",
    b"\x00\x53\x75\xa1\x01a",
    b"\x40",
    Message(header=Header(durable=True)).encode(),
    Message(body=AmqpValue("a")).encode(),
    encode_batch([b"a"]) + Message(body=AmqpValue("a")).encode(),
    encode_batch([b"a"]) + Message(header=Header()).encode(),
    encode_batch([b"a"]) + encode(Described(ULong(0x99), b"")),
    encode_batch([b"a"]) + encode(Described(Symbol("acme:odd"), b"")),
    encode_batch([b"a"]) + b"\x00",
]


@pytest.mark.parametrize("payload", JUNK)
def test_envelope_of_junk_raises_decode_error(payload: bytes) -> None:
    """What is no envelope with events is a `AmqpDecodeError`."""
    with pytest.raises(AmqpDecodeError):
        decode_batch(payload)


@given(st.lists(payloads, min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_envelope_with_mutated_bytes_raises_only_decode_error(events: list[bytes], rng: random.Random) -> None:
    """A damaged envelope gives events within its bytes or a `AmqpDecodeError`, and nothing else."""
    raw = bytearray(encode_batch(events, "key"))
    for _ in range(3):
        raw[rng.randrange(len(raw))] = rng.randrange(256)
    payload = bytes(raw[: rng.randrange(len(raw) + 1)])
    for read in (decode_batch, partition_key_of):
        try:
            found = read(payload)
        except AmqpDecodeError:
            continue
        assert sum(len(each) for each in found or ()) <= len(payload)


def test_partition_key_of_a_single_event_is_its_annotation() -> None:
    """A lone message is routed by its own annotation; a key that is no text counts as none."""
    assert partition_key_of(Message(body=Data((b"a",))).encode()) is None
    assert partition_key_of(Message(body=AmqpValue(1), message_annotations={PARTITION_KEY: "k"}).encode()) == "k"
    assert partition_key_of(Message(body=Data((b"a",)), message_annotations={PARTITION_KEY: 5}).encode()) is None
    late = Message(body=Data((b"a",)), application_properties={PARTITION_KEY: "k"})
    assert partition_key_of(late.encode()) is None
