"""The stamps of events that are encoded already."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from eventpump.amqp.message import AmqpSequence, AmqpValue, Data, Header, Message, Properties
from eventpump.amqp.types import Int, Symbol, ULong
from eventpump.spark.sink.exactly_once import stamped
from eventpump.spark.sink.protocol import STAMP

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
