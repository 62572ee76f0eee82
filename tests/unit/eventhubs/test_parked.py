"""Parked events: what they keep, and what they say."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime
from typing import Any

import pytest

from eventpump.amqp.message import AmqpSequence, Data, Message, Properties
from eventpump.amqp.types import Int, Timestamp, UInt
from eventpump.errors import EventError, ServiceError
from eventpump.eventhubs.events import EventData, ReceivedEvent, copy_of
from eventpump.eventhubs.parked import Parked, parked_facts

WHEN = datetime(2026, 1, 2, 3, 4, 5, 678000, tzinfo=UTC)
FACTS: dict[str, Any] = {
    "hub": "telemetry",
    "partition": "3",
    "consumer_group": "$Default",
    "attempts": 4,
    "first_failed": WHEN,
    "host": "a",
}


def _event(**options: Any) -> ReceivedEvent:
    options.setdefault("body", b"body")
    return ReceivedEvent.build(offset="at:9", sequence_number=9, enqueued_time=WHEN, **options)


def _resent(event: EventData, key: str | None = None) -> ReceivedEvent:
    return ReceivedEvent(event.encode(key))


def test_parked_event_has_these_properties_and_no_others() -> None:
    """Names and values are part of what other programs read."""
    sent = Parked.of(_event(properties={"unit": "W"}), ServiceError("refused"), **FACTS).added_to(
        _event(properties={"unit": "W"})
    )
    assert sent.properties == {
        "unit": "W",
        "eventpump.parked.error": "eventpump.ServiceError",
        "eventpump.parked.message": "refused",
        "eventpump.parked.hub": "telemetry",
        "eventpump.parked.partition": "3",
        "eventpump.parked.offset": "at:9",
        "eventpump.parked.sequence_number": 9,
        "eventpump.parked.consumer_group": "$Default",
        "eventpump.parked.attempts": 4,
        "eventpump.parked.first_failed": WHEN,
        "eventpump.parked.host": "a",
    }


def test_event_keeps_body_properties_and_message_id() -> None:
    """With their AMQP types, of which a number of Python has only one."""
    number = uuid.UUID(int=5)
    properties = {"int": Int(5), "uint": UInt(6), "when": Timestamp(7), "text": "x", "none": None, "list": True}
    event = _event(properties=properties, message_id=number, content_type="text/plain", creation_time=WHEN)
    got = _resent(Parked.of(event, ValueError("x"), **FACTS).added_to(event), "key")
    assert (got.raw_message.body, got.message_id, got.content_type) == (Data((b"body",)), number, "text/plain")
    assert got.raw_message.properties == event.raw_message.properties
    kept = {name: value for name, value in got.properties.items() if not name.startswith("eventpump.parked.")}
    assert kept == event.properties
    assert list(map(type, kept.values())) == list(map(type, event.properties.values()))


@pytest.mark.parametrize("options", [{"body": None, "value": {"a": 1}}, {"body": None, "sequence": [1, "b"]}])
def test_event_keeps_a_body_that_is_not_data(options: dict[str, Any]) -> None:
    """A value stays a value, and a list a list."""
    event = _event(**options)
    got = _resent(copy_of(event))
    assert (got.body_type, got.value) == (event.body_type, event.value)


def test_event_of_several_sections_keeps_their_content() -> None:
    """Data is joined; several lists stay several; and no body is an empty one."""
    assert _resent(copy_of(ReceivedEvent(Message(body=Data((b"a", b"b"))).encode()))).raw_message.body == Data((b"ab",))
    lists = AmqpSequence(([1], [2]))
    assert _resent(copy_of(ReceivedEvent(Message(body=lists).encode()))).raw_message.body == lists
    bare = Message(body=Data((b"",)), properties=Properties())
    assert _resent(copy_of(ReceivedEvent(bare.encode()))).raw_message.body == Data((b"",))


def test_message_that_cannot_be_decoded_is_the_body() -> None:
    """Nothing of it is lost."""
    event = ReceivedEvent(_event().raw + b"\xff")
    with pytest.raises(EventError):
        copy_of(event)
    facts = Parked.of(event, EventError("x"), **FACTS)
    assert (facts.sequence_number, facts.offset) == (9, "at:9")
    got = _resent(facts.added_to(event))
    assert got.raw_message.body == Data((event.raw,))
    assert parked_facts(got) == facts
    nothing = ReceivedEvent(b"\xff")
    facts = Parked.of(nothing, EventError("x"), **FACTS)
    assert (facts.sequence_number, facts.offset) == (None, None)
    assert parked_facts(_resent(facts.added_to(nothing))) == facts


def test_what_an_event_says_can_be_read_again() -> None:
    """By another program, from the hub."""
    facts = Parked.of(_event(), KeyError("k"), **FACTS)
    assert parked_facts(_resent(facts.added_to(_event()))) == facts
    assert (facts.error, facts.message) == ("KeyError", "'k'")


def test_long_or_strange_message_is_kept_as_far_as_it_fits() -> None:
    """The text of an error may be anything."""
    assert len(Parked.of(_event(), ValueError("x" * 100_000), **FACTS).message) == 1024
    facts = Parked.of(_event(), ValueError("\ud800"), **FACTS)
    assert parked_facts(_resent(facts.added_to(_event()))) == facts


@pytest.mark.parametrize("change", [{"attempts": "4"}, {"hub": None}, {"first_failed": 5}, {"offset": 3}])
def test_other_properties_are_not_those_of_a_parked_event(change: dict[str, Any]) -> None:
    """Other applications may use the same names."""
    sent = Parked.of(_event(), ValueError("x"), **FACTS).added_to(_event())
    sent.properties.update({f"eventpump.parked.{name}": value for name, value in change.items()})
    assert parked_facts(_resent(sent)) is None
    assert parked_facts(_event()) is None
