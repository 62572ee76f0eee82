"""Messages: every section there and back, in any order, and bad ones."""

from __future__ import annotations

import itertools
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventpump.amqp.codec import AmqpDecodeError, EncodeError, encode
from eventpump.amqp.message import AmqpSequence, AmqpValue, Data, Header, Message, Properties
from eventpump.amqp.sections import check_sections, encode_data, section, section_spans
from eventpump.amqp.types import Described, Symbol, ULong
from tests.support.values import SCALARS, symbol_maps, symbols, texts, values

ids = st.one_of(texts, SCALARS["ulong"], st.uuids(), SCALARS["binary"], st.none())
headers = st.builds(
    Header,
    durable=st.booleans() | st.none(),
    priority=SCALARS["ubyte"] | st.none(),
    ttl=SCALARS["uint"] | st.none(),
    first_acquirer=st.booleans() | st.none(),
    delivery_count=SCALARS["uint"] | st.none(),
)
properties = st.builds(
    Properties,
    message_id=ids,
    user_id=SCALARS["binary"] | st.none(),
    to=texts | st.none(),
    subject=texts | st.none(),
    reply_to=texts | st.none(),
    correlation_id=ids,
    content_type=symbols | st.none(),
    content_encoding=symbols | st.none(),
    absolute_expiry_time=SCALARS["timestamp"] | st.none(),
    creation_time=SCALARS["timestamp"] | st.none(),
    group_id=texts | st.none(),
    group_sequence=SCALARS["uint"] | st.none(),
    reply_to_group_id=texts | st.none(),
)
bodies = st.one_of(
    st.none(),
    st.lists(SCALARS["binary"], max_size=3).map(lambda parts: Data(tuple(parts))),
    st.lists(st.lists(values, max_size=3), min_size=1, max_size=3).map(lambda parts: AmqpSequence(tuple(parts))),
    values.map(AmqpValue),
)
messages = st.builds(
    Message,
    body=bodies,
    properties=st.none() | properties,
    application_properties=st.none() | st.dictionaries(texts, values, max_size=3),
    message_annotations=st.none() | symbol_maps,
    delivery_annotations=st.none() | symbol_maps,
    header=st.none() | headers,
    footer=st.none() | symbol_maps,
)


@given(messages)
def test_message_decodes_to_what_was_encoded(message: Message) -> None:
    """A message decodes to what was encoded, every section and type."""
    assert repr(Message.decode(message.encode())) == repr(message)


@given(messages, st.data())
def test_decode_takes_sections_in_any_order(message: Message, data: st.DataObject) -> None:
    """Sections are found wherever they stand; those of the body keep their own order."""
    raw = message.encode()
    spans = section_spans(raw)
    assert [start for _, start, _ in spans[1:]] == [end for _, _, end in spans[:-1]]
    shuffled = data.draw(st.permutations(spans))
    body = iter([span for span in spans if 0x75 <= span[0] <= 0x77])
    ordered = [next(body) if 0x75 <= span[0] <= 0x77 else span for span in shuffled]
    assert repr(Message.decode(b"".join(raw[start:end] for _, start, end in ordered))) == repr(message)


@pytest.mark.parametrize("size", [0, 255, 256, 70_000])
def test_data_section_overhead_is_5_or_8_bytes(size: int) -> None:
    """A data section takes 5 bytes beside its payload up to 255 bytes, 8 above (protocol.md 7.3)."""
    payload = b"x" * size
    assert len(encode_data(payload)) == size + (5 if size < 256 else 8)
    assert encode_data(payload) == section(0x75, payload)


def test_encode_without_a_body_writes_no_body_section() -> None:
    """A message without a body has no body section, and an empty one no section at all."""
    assert Message().encode() == b""
    assert Message.decode(b"") == Message()


def test_decode_takes_symbolic_and_wide_descriptors() -> None:
    """Descriptors may be symbols or eight bytes wide."""
    symbolic = encode(Described(Symbol("amqp:data:binary"), b"a"))
    wide = b"\x00\x80" + (0x75).to_bytes(8, "big") + encode(b"b")
    assert Message.decode(symbolic + wide) == Message(Data((b"a", b"b")))


def test_encode_gives_ids_their_amqp_types() -> None:
    """A plain number as an id goes as a ulong; a user id must be bytes."""
    found = Message.decode(Message(properties=Properties(message_id=5, correlation_id=300)).encode()).properties
    assert found is not None
    assert (type(found.message_id), type(found.correlation_id)) == (ULong, ULong)
    for bad in (5, "text", [300]):
        with pytest.raises(EncodeError):
            Message(properties=Properties(user_id=bad)).encode()  # type: ignore[arg-type]  # the case


@pytest.mark.parametrize(
    "raw",
    [
        b"text",
        b"\x00",
        b"\x00\x53",
        b"\x00\x53\x75",
        b"\x00\x53\x75\xa0\x05x",
        b"\x00\x53\x10\x45",
        b"\x00\x53\x79\x45",
        section(0x75, "text"),
        section(0x76, {}),
        section(0x72, []),
        section(0x70, {}),
        section(0x73, [None] * 14),
        encode(Described(Symbol("amqp:other:list"), [])),
        encode(Described([1], b"")),
        encode_data(b"a") + section(0x77, 1),
        section(0x77, 1) * 2,
        section(0x76, []) + section(0x77, 1),
        section(0x72, {}) * 2,
        section(0x70, []) * 2,
    ],
)
def test_decode_of_what_is_no_message_raises_decode_error(raw: bytes) -> None:
    """What is no message is refused by `AmqpDecodeError`."""
    with pytest.raises(AmqpDecodeError):
        Message.decode(raw)


@given(st.binary(max_size=60), st.lists(st.tuples(st.integers(0, 1 << 30), st.integers(0, 255)), max_size=3), messages)
def test_decode_of_hostile_bytes_raises_only_decode_error(
    noise: bytes, changes: list[tuple[int, int]], message: Message
) -> None:
    """Random and damaged bytes decode, or raise `AmqpDecodeError`."""
    raw = bytearray(message.encode() + noise)
    for at, value in changes if raw else ():
        raw[at % len(raw)] = value
    for call in (Message.decode, section_spans):
        try:
            call(bytes(raw))
        except AmqpDecodeError as error:
            assert error.condition == "amqp:decode-error"  # noqa: PT017 - either way is fine


def test_decode_of_a_message_cut_within_a_section_is_refused() -> None:
    """A message cut within a section is refused; between sections it is a shorter message."""
    message: Any = Message(Data((b"body",)), Properties(message_id="m"), {"k": 1}, {Symbol("a"): 1}, None, Header(True))
    raw = message.encode()
    ends = {0, *itertools.chain.from_iterable((start, end) for _, start, end in section_spans(raw))}
    for cut in range(len(raw)):
        if cut in ends:
            Message.decode(raw[:cut])
        else:
            with pytest.raises(AmqpDecodeError):
                Message.decode(raw[:cut])


@given(st.lists(values, max_size=5), st.lists(values, max_size=13), values, symbol_maps)
def test_encode_of_a_decoded_message_raises_only_encode_error(
    header: list[Any], fields: list[Any], body: Any, annotations: dict[Any, Any]
) -> None:
    """Whatever types a sender gave the fields, encoding what was decoded raises nothing but EncodeError."""
    raw = section(0x70, header) + section(0x72, annotations) + section(0x73, fields) + section(0x77, body)
    message = Message.decode(raw)
    with suppress(EncodeError):
        encoded = message.encode()
        assert Message.decode(encoded).encode() == encoded  # not the values: a NaN is unequal to itself


@pytest.mark.parametrize(
    "fields",
    [
        ["m", 5],
        ["m", b"u", None, 7],
        ["m", b"u", None, "s", None, None, [1]],
        [*[None] * 8, "never"],
        [*[None] * 11, -1],
    ],
    ids=["user id", "subject", "content type", "expiry", "group sequence"],
)
def test_decode_names_a_field_of_a_wrong_type(fields: list[Any]) -> None:
    """A field of a type it may not have is named by the error."""
    with pytest.raises(EncodeError, match=r"the field [a-z_]+ cannot be encoded"):
        Message.decode(section(0x73, fields) + section(0x75, b"x")).encode()


@pytest.mark.parametrize(
    ("raw", "is_sound"),
    [
        (section(0x73, []) + section(0x75, b"x"), True),
        (section(0x75, b"x") + section(0x75, b"y") + section(0x78, {}), True),
        (section(0x77, "text"), True),
        (section(0x75, None), True),
        (section(0x75, b"x") + section(0x75, None), True),
        (encode(Described(Symbol("amqp:data:binary"), None)), True),
        (section(0x76, None), False),
        (section(0x75, []), False),
        (encode(Described(Symbol("amqp:data:binary"), b"x")), True),
        (section(0x75, "x"), False),
        (encode(Described(Symbol("amqp:data:binary"), "x")), False),
        (section(0x75, b"x") + section(0x77, 1), False),
        (section(0x74, []), False),
        (section(0x73, {}), False),
        (section(0x73, []) + section(0x73, []), False),
        (section(0x76, {}), False),
        (section(0x78, None), False),
        (b"x", False),
    ],
)
def test_check_of_sections_refuses_only_what_decode_refuses(raw: bytes, is_sound: bool) -> None:
    """What the check of sections refuses, the decoder refuses too, by the kinds and numbers of sections alone."""
    for check in (check_sections, Message.decode):
        if is_sound:
            check(raw)
        else:
            with pytest.raises(AmqpDecodeError):
                check(raw)
