"""Messages through uamqp's own encoder and decoder: whatever is carried is the same, and the rest is an error."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventpump.amqp.message import AmqpValue, Data, Header, Message, Properties
from eventpump.amqp.performatives import Accepted, AmqpError, Modified, Rejected, Released
from eventpump.amqp.sections import APPLICATION_PROPERTIES, DELIVERY_ANNOTATIONS, FOOTER, MESSAGE_ANNOTATIONS
from eventpump.amqp.types import Array, Char, Decimal64, Int, Short, Symbol, Timestamp, UByte
from eventpump.errors import EventError
from eventpump.eventhubs.envelope import encode_batch
from eventpump.eventhubs.names import BATCH_MESSAGE_FORMAT
from tests.support.values import SCALARS, plain
from tests.unit.amqp.test_message import messages
from tests.ways import need_uamqp

need_uamqp()

from eventpump.transport.uamqp.codec import from_message, from_value, mended, to_message, to_value  # noqa: E402
from eventpump.transport.uamqp.door import c_uamqp  # noqa: E402
from eventpump.transport.uamqp.worker import _outcome  # noqa: E402

_NOT_KNOWN = {"char", "decimal32", "decimal64", "decimal128"}
_texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
_symbols = st.text(st.characters(min_codepoint=1, max_codepoint=127), max_size=20).map(Symbol)
_carried = st.one_of(
    *(each for name, each in SCALARS.items() if name not in {*_NOT_KNOWN, "string", "symbol"}), _texts, _symbols
)
_values: st.SearchStrategy[Any] = st.recursive(
    _carried,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_texts, inner, max_size=4),
    max_leaves=8,
)
_maps = st.dictionaries(_symbols, _values, max_size=4) | st.none()
_events = st.builds(
    Message,
    body=st.lists(SCALARS["binary"], min_size=1, max_size=3).map(lambda parts: Data(tuple(parts)))
    | _values.map(AmqpValue),
    properties=st.builds(Properties, message_id=_texts | st.uuids(), subject=_texts, content_type=_symbols) | st.none(),
    application_properties=st.dictionaries(_texts, _carried, max_size=4) | st.none(),
    message_annotations=_maps,
    delivery_annotations=_maps,
    footer=_maps,
    header=st.builds(Header, durable=st.booleans(), ttl=SCALARS["uint"]) | st.none(),
)


def sent(raw: bytes) -> bytes:
    """Return what uamqp makes of a message that it sends."""
    pieces: list[bytes] = []
    c_uamqp.get_encoded_message_size(to_message(raw, 0), pieces)
    return b"".join(pieces)


@given(_values)
def test_values_keep_their_types(value: Any) -> None:
    """A value that uamqp knows comes back as it was, of the same type."""
    assert plain(from_value(to_value(value))) == plain(value)


@given(_events)
def test_send_passes_every_section_as_it_is(message: Message) -> None:
    """Every section of a message goes out as it came, each once."""
    raw = message.encode()
    assert repr(Message.decode(sent(raw))) == repr(Message.decode(raw))


@given(_events)
def test_receive_passes_every_section_as_it_is(message: Message) -> None:
    """Every section of a received message is there, with its descriptor, and is what it was."""
    raw = message.encode()
    received = c_uamqp.decode_message(len(raw), raw)
    assert repr(Message.decode(from_message(received))) == repr(Message.decode(raw))


@given(messages)
def test_send_refuses_what_uamqp_would_change(message: Message) -> None:
    """Of any message, uamqp sends what it is, or it is refused: nothing goes out changed."""
    raw = message.encode()
    try:
        found = sent(raw)
    except EventError:
        return
    ours, theirs = Message.decode(raw), Message.decode(found)
    if ours.body is None:
        ours.body = Data((b"",))
    assert repr(theirs) == repr(ours)


@pytest.mark.parametrize("value", [Char("x"), Decimal64(b"12345678"), "a\0b", Array([UByte(7), UByte(9)])])
def test_send_refuses_values_that_uamqp_does_not_carry(value: Any) -> None:
    """A character, a decimal, a NUL in text and an array of bytes are errors to the sender; as data they go through."""
    event = Message(body=Data((b"x",)), application_properties={"key": value}).encode()
    with pytest.raises(EventError, match="uamqp cannot carry"):
        to_message(event, 0)
    envelope = encode_batch([event])
    message = to_message(envelope, BATCH_MESSAGE_FORMAT)
    assert (message.get_body_data(0), message.message_format) == (event, BATCH_MESSAGE_FORMAT)


def test_numbers_keep_their_widths() -> None:
    """What the service distinguishes types by, such as an idempotent producer's numbers, is neither widened nor cut."""
    annotations = {
        Symbol("id"): 1 << 40,
        Symbol("epoch"): Short(3),
        Symbol("number"): Int(7),
        Symbol("at"): Timestamp(5),
    }
    raw = Message(body=Data((b"x",)), message_annotations=dict(annotations)).encode()
    found = Message.decode(sent(raw)).message_annotations
    assert found is not None
    assert plain(found) == plain(annotations)


def test_descriptors_are_restored() -> None:
    """Maps without a descriptor get theirs by their order, one that is double loses one, and the body stays."""
    map_, body = b"\xc1\x01\x00", b"\x00\x53\x75\xa0\x01x"
    encoded = map_ + b"\x00\x53\x74\x00\x53\x74" + map_ + map_ + map_ + body
    found = mended(encoded, [MESSAGE_ANNOTATIONS, FOOTER, DELIVERY_ANNOTATIONS])
    parts = [
        bytes((0, 0x53, code)) + map_
        for code in (MESSAGE_ANNOTATIONS, APPLICATION_PROPERTIES, FOOTER, DELIVERY_ANNOTATIONS)
    ]
    assert found == b"".join(parts) + body


@pytest.mark.parametrize(
    ("result", "state", "outcome"),
    [
        (1, [], Accepted()),
        (2, None, None),
        (4, None, None),
        (2, [], Released()),
        (2, [[b"amqp:not-allowed", b"no", None]], Rejected(AmqpError("amqp:not-allowed", "no"))),
        (2, [[b"amqp:not-allowed"]], Rejected(AmqpError("amqp:not-allowed"))),
        (2, [None], Rejected()),
        (2, [True, None, None], Modified()),
        (2, [None, None], Modified()),
    ],
)
def test_outcomes_are_known_by_their_fields(result: int, state: Any, outcome: Any) -> None:
    """uamqp leaves an outcome's fields without its name; each is known all the same."""
    assert _outcome(result, state) == outcome
