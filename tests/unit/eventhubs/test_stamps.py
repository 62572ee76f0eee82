"""Stamps change nothing else of an event: those that numbering fills in, and those of rows."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventpump.amqp.message import AmqpSequence, AmqpValue, Data, Header, Message, Properties
from eventpump.amqp.types import Int, Symbol, ULong
from eventpump.eventhubs.envelope import decode_batch
from eventpump.eventhubs.events import EventData
from eventpump.eventhubs.names import PRODUCER_SEQUENCE_NUMBER
from eventpump.eventhubs.numbering import MAX_OWNER_LEVEL, MAX_PRODUCER_ID, NUMBERS
from eventpump.eventhubs.sealing import SealedBatch, pieces, pieces_of
from eventpump.eventhubs.stamps import (
    STAMP,
    Stamp,
    read_row_stamp,
    read_stamp,
    row_stamp_prefix,
    spell_stamp,
    stamped,
    with_room,
)

EVENTS = [
    EventData(b"bytes and no more"),
    EventData("text", properties={"unit": "C", "n": 7}, message_id=STAMP),
    EventData(value={"a": [1, 2]}, properties={STAMP: "of another publisher", "x": 1}),
    EventData(b"x" * 1000, properties={f"key {number}": number for number in range(60)}),
    EventData(b"", message_id="eventpump:stamp" + "0" * 16 + ":0000:00000000"),
]


@pytest.mark.parametrize("event", EVENTS, ids=["bytes", "properties", "stamped before", "many", "looks like one"])
@pytest.mark.parametrize("key", [None, "sensor-7"])
def test_stamp_adds_one_property_of_known_size(event: EventData, key: str | None) -> None:
    """Everything else stays, its size is known before its number is, and every numbering fills the stamp in."""
    encoded = event.encode(key)
    before = Message.decode(encoded)
    found = (
        pieces_of(event, idempotent=True, stamped=True) if key is None else pieces(with_room(encoded), idempotent=True)
    )
    batch = SealedBatch([*found, *found], idempotent=True, stamped=True)
    for producer_id, level, first in ((5, 2, 41), (MAX_PRODUCER_ID, MAX_OWNER_LEVEL, NUMBERS - 1), (0, 0, 0)):
        message = batch.numbered(producer_id, level, first)
        assert len(message) == batch.size == 2 * sum(map(len, found))
        for index, raw in enumerate(decode_batch(message)):
            after = Message.decode(raw)
            number = (first + index) % NUMBERS
            properties = dict(after.application_properties or {})
            assert read_stamp(properties.pop(STAMP)) == (producer_id, level, number)
            assert properties == {
                name: each for name, each in (before.application_properties or {}).items() if name != STAMP
            }
            assert (after.body, after.properties) == (before.body, before.properties)
            annotations = after.message_annotations or {}
            assert annotations[PRODUCER_SEQUENCE_NUMBER] == number
            assert (before.message_annotations or {}).items() <= annotations.items()


@pytest.mark.parametrize(
    "value", [None, 7, "", "1:2:3", "g" * 16 + ":0000:00000000", "0" * 16 + ":0000", "é" * 16 + ":0000:00000000"]
)
def test_stamp_of_another_form_is_not_read(value: object) -> None:
    """Properties of that name may come from any program."""
    assert read_stamp(value) is None


def test_stamp_has_one_width() -> None:
    """Whatever the numbers."""
    for stamp in (Stamp(0, 0, 0), Stamp(MAX_PRODUCER_ID, MAX_OWNER_LEVEL, NUMBERS - 1)):
        assert len(spell_stamp(*stamp)) == 30
        assert read_stamp(spell_stamp(*stamp)) == stamp


def test_row_stamp_is_read_by_its_prefix() -> None:
    """The rows of a batch in a partition are found by their index, and no other event is taken for one of them."""
    prefix = row_stamp_prefix("sink", 7, "0")
    assert read_row_stamp(f"{prefix}12", prefix) == 12
    for other in (None, 7, "", prefix, f"{prefix}-1", f"{prefix}²", f"{prefix}1x", "sink:7:1:12", spell_stamp(1, 2, 3)):
        assert read_row_stamp(other, prefix) is None


texts = st.text(max_size=300)
values: st.SearchStrategy[Any] = st.one_of(
    texts,
    st.binary(max_size=5),
    st.booleans(),
    st.none(),
    st.integers(-(2**63), 2**63 - 1),
    st.integers(0, 9).map(Int),
    st.integers(0, 9).map(ULong),
    st.just(Symbol("s")),
)
maps = st.dictionaries(texts, values, max_size=4)
messages = st.builds(
    Message,
    header=st.none() | st.builds(Header, durable=st.booleans()),
    message_annotations=st.none() | st.dictionaries(st.sampled_from([Symbol("x-a"), Symbol("x-b" * 90)]), values),
    properties=st.none() | st.builds(Properties, message_id=texts, subject=texts),
    application_properties=st.none() | maps | maps.map(lambda found: {**found, STAMP: "old"}),
    body=st.one_of(
        st.none(),
        st.lists(st.binary(max_size=300), min_size=1, max_size=2).map(lambda found: Data(tuple(found))),
        st.lists(st.lists(values, max_size=2), min_size=1, max_size=2).map(lambda found: AmqpSequence(tuple(found))),
        values.map(AmqpValue),
    ),
    footer=st.none() | st.just({Symbol("f"): 1}),
)


@given(messages, texts)
def test_stamp_adds_or_replaces_one_property(message: Message, stamp: str) -> None:
    """A stamped event is the event with one property more, or another value of it; types and sections stay."""
    properties = {**(message.application_properties or {}), STAMP: stamp}
    found = Message.decode(stamped(message.encode(), stamp))
    message.application_properties = properties
    expected = Message.decode(message.encode())
    assert found == expected
    assert found.application_properties is not None
    assert {key: type(value) for key, value in found.application_properties.items()} == {
        key: type(value) for key, value in (expected.application_properties or {}).items()
    }
    assert found.encode() == expected.encode()
