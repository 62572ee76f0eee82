"""How a stored event differs from what was sent."""

from __future__ import annotations

import uuid
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from eventpump.amqp import codec
from eventpump.amqp.codec import AmqpDecodeError, encode
from eventpump.amqp.message import AmqpSequence, AmqpValue, Data, Header, Message, Properties
from eventpump.amqp.sections import DATA, EventFields, check_sections, scan_event
from eventpump.amqp.types import Described, Int, Short, Symbol, Timestamp
from eventpump.emulator.stamping import add_delivery_annotations, stamp, work_of
from eventpump.eventhubs.events import ReceivedEvent

_X = Data((b"x",))
_NAMES = EventFields(b"x-opt-sequence-number", b"x-opt-offset", b"x-opt-enqueued-time")

bodies = st.one_of(
    st.lists(st.binary(max_size=300), max_size=3).map(lambda parts: Data(tuple(parts))),
    st.lists(st.lists(st.integers(-5, 5), max_size=3), min_size=1, max_size=2).map(
        lambda lists: AmqpSequence(tuple(lists))
    ),
    st.one_of(st.none(), st.text(), st.booleans(), st.integers(-9, 9), st.binary(max_size=9)).map(AmqpValue),
)
maps: st.SearchStrategy[dict[Any, Any]] = st.dictionaries(
    st.text("abc-", min_size=1, max_size=20).map(lambda text: Symbol("x-" + text)),
    st.one_of(st.text(max_size=80), st.integers(-9, 9), st.none()),
    max_size=6,
)
messages = st.builds(
    Message,
    body=bodies,
    properties=st.none() | st.builds(Properties, message_id=st.text(max_size=9) | st.uuids()),
    application_properties=st.none() | st.dictionaries(st.text(max_size=5), st.text(max_size=300), max_size=3),
    message_annotations=st.none() | maps,
    delivery_annotations=st.none() | maps,
    header=st.none() | st.builds(Header, durable=st.booleans()),
    footer=st.none() | maps,
)


@given(st.binary(max_size=200) | messages.map(Message.encode), st.integers(0, 200))
@example(b"\x00\x53\x70\xc0", 0)  # an event that ends before its section's size
def test_work_of_any_bytes_counts_what_is_decoded(raw: bytes, cut: int) -> None:
    """Whatever the bytes are, there is an estimate; that of a message counts the bytes that are decoded."""
    assert work_of(raw) >= 1
    assert work_of(raw[:cut]) >= 1
    assert work_of(b"\x00\x53\x75\xb0" + len(raw).to_bytes(4, "big") + raw) >= 2
    with suppress(AmqpDecodeError):
        decoded = sum(end - start for code, start, _, end in check_sections(raw) if code != DATA)
        assert work_of(raw) >= decoded // 4 - 9  # each section is rounded down


@given(
    st.lists(messages, min_size=1, max_size=4), st.integers(0, 2**62), st.integers(0, 2**62), st.text("k", max_size=9)
)
def test_stamp_changes_only_annotations(events: list[Message], number: int, offset: int, key: str) -> None:
    """All but the header is kept, delivery annotations and footer too; the service's annotations are added."""
    stamped = stamp([event.encode() for event in events], number, offset, 1234, key or None)
    for index, (event, raw) in enumerate(zip(events, stamped.payloads, strict=True)):
        stored = Message.decode(raw)
        found = stored.message_annotations or {}
        assert found.pop("x-opt-sequence-number-epoch") == -1
        assert found.pop("x-opt-sequence-number") == number + index
        assert found.pop("x-opt-offset") == str(stamped.offsets[index])
        assert found.pop("x-opt-enqueued-time") == Timestamp(1234)
        wanted = dict(event.message_annotations or {})
        if key:
            wanted.setdefault("x-opt-partition-key", key)
        assert found == wanted
        stored.message_annotations = event.message_annotations
        event.header = None
        assert stored == event
    assert stamped.size == sum(map(len, stamped.payloads)) == stamped.next_offset - offset


def test_stamp_replaces_forged_annotations() -> None:
    """A sender cannot choose the service's annotations, and its own producer numbers reach no reader."""
    sent = Message(
        body=Data((b"x",)),
        message_annotations={
            Symbol("x-opt-sequence-number-epoch"): Int(7),
            Symbol("x-opt-sequence-number"): 7,
            Symbol("x-opt-offset"): "7",
            Symbol("x-opt-enqueued-time"): Timestamp(7),
            Symbol("com.microsoft:producer-id"): 1,
            Symbol("com.microsoft:producer-epoch"): Short(1),
            Symbol("com.microsoft:producer-sequence-number"): Int(1),
            Symbol("x-opt-partition-key"): 5,
            Symbol("mine"): "kept",
        },
    )
    (stored,) = stamp([sent.encode()], 0, 0, 1, None).payloads
    found = Message.decode(stored).message_annotations
    assert found is not None
    assert [stored.count(codec.encode(Symbol(name))) for name in found] == [1] * len(found)  # of two, decoders take one
    assert found == {
        "x-opt-sequence-number-epoch": -1,
        "x-opt-sequence-number": 0,
        "x-opt-offset": "0",
        "x-opt-enqueued-time": Timestamp(1),
        "mine": "kept",
    }


def test_stamp_prefers_the_events_own_key() -> None:
    """The envelope's key stands in only for events without one."""
    own = Message(body=Data((b"x",)), message_annotations={Symbol("x-opt-partition-key"): "own"}).encode()
    none = Message(body=Data((b"x",))).encode()
    first, second = stamp([own, none], 0, 0, 1, "envelope").payloads
    assert (Message.decode(first).message_annotations or {})["x-opt-partition-key"] == "own"
    assert (Message.decode(second).message_annotations or {})["x-opt-partition-key"] == "envelope"


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"hello",
        b"\x00\x53\x75\xa0\x05abc",
        b"\x00\x53\x75\xb0\xff\xff\xff\xffabc",
        b"\x00\x53\x72\xc1\x03\x02\xa3",
        b"\x00\x53\x99\xa0\x01a",
        Message(body=Data((b"x",))).encode() + b"\x00",
        Message(body=Data((b"x",)), message_annotations={}).encode() + Message(message_annotations={}).encode(),
        Message(delivery_annotations={}).encode() + Message(body=_X, delivery_annotations={}).encode()[5:] * 2,
        Message(message_annotations={Symbol("a"): 1}).encode()[:-1],
        bytes.fromhex("005372c100"),
        bytes.fromhex("005372c100") + Message(body=Data((b"x",))).encode(),
        bytes.fromhex("005372d100000000"),
        bytes.fromhex("00537240") + Message(body=Data((b"x",))).encode(),
        bytes.fromhex("00537245") + Message(body=Data((b"x",))).encode(),
        bytes.fromhex("005375a10178"),
        bytes.fromhex("005375b100000001") + b"x",
        Message(properties=Properties(message_id="m")).encode() + bytes.fromhex("005375a10178"),
        bytes.fromhex("005374a10178") + Message(body=Data((b"x",))).encode(),
        bytes.fromhex("005374c00101") + Message(body=Data((b"x",))).encode(),
        bytes.fromhex("005373a10178") + Message(body=Data((b"x",))).encode(),
        bytes.fromhex("005370a10178") + Message(body=Data((b"x",))).encode(),
        bytes.fromhex("005378a00178"),
        bytes.fromhex("008000000000000000755401"),
        Message(body=Data((b"x",))).encode() + Message(body=AmqpValue("x")).encode(),
        Message(body=Data((b"x",))).encode() + bytes.fromhex("005371c10602a3016155")[:-1] + b"\x99",
        Message(properties=Properties(message_id="m")).encode() * 2,
    ],
)
def test_stamp_of_what_is_no_message_is_refused(raw: bytes) -> None:
    """Nothing that a reader could not take apart is ever numbered."""
    with pytest.raises(AmqpDecodeError):
        stamp([raw], 0, 0, 1, None)


@given(st.binary(max_size=60) | messages.map(lambda message: message.encode()[:-1]))
def test_stamp_of_any_bytes_raises_only_decode_error(raw: bytes) -> None:
    """Hostile bytes raise the one error, and what is taken has the annotations a reader looks for."""
    try:
        stored = stamp([raw], 3, 9, 1, None).payloads[0]
    except AmqpDecodeError:
        return
    event = ReceivedEvent(stored)
    assert (event.sequence_number, event.offset) == (3, "9")
    assert scan_event(stored, _NAMES)[:3] == (3, "9", 1)
    check_sections(stored)


_VALUES = [encode(value) for value in (None, [], {}, "x", b"x", 7, [1], {"a": 1}, Described(Symbol("d"), b"x"))]


@given(st.lists(st.tuples(st.integers(0x70, 0x78), st.sampled_from(_VALUES)), min_size=1, max_size=4))
def test_stamp_accepts_exactly_what_readers_can_decode(sections: list[tuple[int, bytes]]) -> None:
    """Of any sections with any kinds of values, stored is what the decoder takes, and nothing else is refused."""
    raw = b"".join(bytes((0x00, 0x53, code)) + value for code, value in sections)
    try:
        stored = stamp([raw], 3, 9, 1, None).payloads[0]
    except AmqpDecodeError:
        with pytest.raises(AmqpDecodeError):
            Message.decode(raw)
        return
    Message.decode(stored)
    scan_event(stored, _NAMES)


@given(messages)
def test_delivery_annotations_are_the_metrics_and_then_the_senders(event: Message) -> None:
    """Runtime metrics go where the specification puts them, in one section with those of the sender."""
    metrics = {Symbol("last_enqueued_offset"): "12"}
    old = Message(header=Header(durable=True)).encode()  # as older versions stored it
    for stored in (before := stamp([event.encode()], 0, 0, 1, None).payloads[0], old + before):
        (delivered,) = add_delivery_annotations([stored], metrics)
        check_metrics(stored, delivered, metrics)


def check_metrics(stored: bytes, delivered: bytes, metrics: dict[Any, Any]) -> None:
    """Check a delivered event against the stored one."""
    wanted = Message.decode(stored)
    wanted.delivery_annotations = metrics | (wanted.delivery_annotations or {})
    assert Message.decode(delivered) == wanted
    assert Message.decode(delivered).encode() == wanted.encode()


def test_message_id_that_is_a_uuid_keeps_its_type() -> None:
    """Identifiers keep their AMQP type."""
    name = uuid.uuid4()
    sent = Message(body=AmqpValue("v"), properties=Properties(message_id=name))
    stored = Message.decode(stamp([sent.encode()], 0, 0, 1, None).payloads[0])
    assert stored.properties is not None
    assert stored.properties.message_id == name


_DELIVERY = Message(delivery_annotations={Symbol("a"): "b"}).encode()
_BODY = Message(body=_X).encode()


@pytest.mark.parametrize("number", [0, 127, 128, 2**40])
def test_stamp_writes_long_in_its_smallest_form(number: int) -> None:
    """The sequence number is written as recorded (delivery-plain): in one byte as far as that goes, then in eight."""
    stored = stamp([_BODY], number, 0, 1, None).payloads[0]
    form = b"\x55" + bytes((number,)) if number < 128 else b"\x81" + number.to_bytes(8, "big")
    assert b"\xa3\x1bx-opt-sequence-number-epoch\x54\xff\xa3\x15x-opt-sequence-number" + form in stored
    assert ReceivedEvent(stored).sequence_number == number


def test_stamp_of_the_recorded_message() -> None:
    """The stored bytes are those that the service delivered (delivery-value-with-annotation): the header is dropped,
    and the sender's annotation comes first."""
    rest = bytes.fromhex("005374c11302a109") + b"body_type" + bytes.fromhex("a105") + b"value"
    rest += bytes.fromhex("005377c11302a0036b6579c00b035485a004") + b"dataV\x00"
    sent = (
        bytes.fromhex("005370c0070540500a40404000")
        + bytes.fromhex("5372c11502a307")
        + b"ann_key\xa1\x09ann_value"
        + rest
    )
    stored = stamp([sent], 1, 144, 0, None).payloads[0]
    own = b"\xa3\x1bx-opt-sequence-number-epoch\x54\xff\xa3\x15x-opt-sequence-number\x55\x01"
    own += b"\xa3\x0cx-opt-offset\xa1\x03144\xa3\x13x-opt-enqueued-time\x83" + bytes(8)
    assert stored == bytes.fromhex("005372c17e0aa307") + b"ann_key\xa1\x09ann_value" + own + rest


@pytest.mark.parametrize(
    ("sent", "kept"),
    [
        (_BODY + _DELIVERY, "behind"),
        (_DELIVERY + _BODY, "before"),
        (Message(header=Header(durable=True)).encode() + _BODY + _DELIVERY, "behind"),
        (_BODY + Message(message_annotations={Symbol("x"): 1}).encode() + _DELIVERY, "behind"),
        (_BODY + Message(header=Header(durable=True)).encode() + _DELIVERY, "behind"),
    ],
)
def test_stamp_takes_sections_in_any_order(sent: bytes, kept: str) -> None:
    """Delivery annotations stay where they stood, behind the body too (delivery-delivery-annotations-behind-body)."""
    stored = stamp([sent], 5, 9, 1, None).payloads[0]
    found = Message.decode(stored)
    assert (found.header, found.delivery_annotations, found.body) == (None, {"a": "b"}, _X)
    assert stored.endswith(_DELIVERY) is (kept == "behind")
    assert stored.startswith(_DELIVERY) is (kept == "before")
    assert (found.message_annotations or {}).get("x") == (Message.decode(sent).message_annotations or {}).get("x")
    event = ReceivedEvent(stored)
    assert (event.sequence_number, event.offset, event.body) == (5, "9", b"x")


def test_received_event_reads_delivery_annotations_and_footer() -> None:
    """Both are attributes, wherever they stand; what is copied to be sent has neither; an event without has none."""
    sent = Message(body=_X, footer={Symbol("f"): 1}).encode() + _DELIVERY
    event = ReceivedEvent(stamp([sent], 0, 0, 1, None).payloads[0])
    assert (event.delivery_annotations, event.footer) == ({"a": "b"}, {"f": 1})
    assert event.last_enqueued is None
    assert event.to_event_data().encode() == _BODY
    plain = ReceivedEvent(stamp([_BODY], 0, 0, 1, None).payloads[0])
    assert (plain.delivery_annotations, plain.footer) == ({}, {})


def test_event_of_an_older_version_is_read_as_before() -> None:
    """What older versions stored, with the header, numbers of eight bytes and no epoch, is read, with metrics too."""
    annotations = bytes.fromhex("005372c14f06") + b"\xa3\x15x-opt-sequence-number\x81" + (7).to_bytes(8, "big")
    annotations += b"\xa3\x0cx-opt-offset\xa1\x0212\xa3\x13x-opt-enqueued-time\x83" + (1).to_bytes(8, "big")
    annotations = annotations[:4] + bytes((len(annotations) - 5,)) + annotations[5:]
    old = Message(header=Header(durable=True)).encode() + annotations + _BODY
    (measured,) = add_delivery_annotations([old], {Symbol("last_enqueued_sequence_number"): 9})
    for raw in (old, measured):
        event = ReceivedEvent(raw)
        assert (event.sequence_number, event.offset, event.body) == (7, "12", b"x")
    newest = ReceivedEvent(measured).last_enqueued
    assert newest is not None
    assert newest.sequence_number == 9
