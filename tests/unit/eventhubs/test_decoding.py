"""Decoders: every type that a handler may want, and errors that name the event and do not show it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from pydantic import BaseModel, Field
from typing_extensions import TypedDict  # pydantic needs it before Python 3.12

from eventpump.errors import ConfigurationError, DecodeError, EventError
from eventpump.eventhubs.cloudevents import CloudEvent
from eventpump.eventhubs.decoding import PAYLOADS, Decoder, encoded, guarded
from eventpump.eventhubs.events import EventData, ReceivedEvent


class Reading(BaseModel):
    """A model of pydantic."""

    device: str
    celsius: float = Field(alias="c")


class Struct(msgspec.Struct):
    """A model of msgspec."""

    device: str
    celsius: float


@dataclass
class Plain:
    """A dataclass."""

    device: str
    at: datetime


class Typed(TypedDict):
    """A typed dictionary."""

    device: str


def _event(body: bytes | str | None = None, **more: Any) -> ReceivedEvent:
    origin = more.pop("origin", None)
    made = ReceivedEvent.build(
        body, offset="7", sequence_number=7, enqueued_time=datetime(2026, 1, 1, tzinfo=UTC), **more
    )
    return ReceivedEvent(made.raw, origin)


def _received(sent: EventData) -> ReceivedEvent:
    return _event(sent.body, properties=sent.properties or None, **(sent.standard or {}))


NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (bytes, b"\0\1"),
        (str, "text"),
        (dict, {"a": [1, None]}),
        (list, [1, "a"]),
        (list[int], [1, 2]),
        (int | None, None),
        (Any, {"a": 1.5}),
        (Reading, Reading(device="a", c=21.5)),
        (list[Reading], [Reading(device="a", c=1)]),
        (Struct, Struct("a", 21.5)),
        (Plain, Plain("a", NOON)),
        (Typed, {"device": "a"}),
        (CloudEvent, CloudEvent(id="1", source="/", type="t", data={"a": 1}, datacontenttype="application/json")),
    ],
)
def test_every_type_comes_back_as_it_was_published(kind: Any, value: Any) -> None:
    """`encoded` and the decoder of the type are the inverse of each other."""
    assert PAYLOADS.decoder_for(kind)(_received(encoded(value))) == value


def test_event_itself_needs_no_decoding() -> None:
    """Also one whose payload cannot be read."""
    event = _event(value=5)
    assert PAYLOADS.decoder_for(ReceivedEvent)(event) is event
    assert encoded(_event(b"x")).body == b"x"
    sent = EventData(b"y")
    assert encoded(sent) is sent


def test_structs_in_other_types_are_decoded_by_msgspec() -> None:
    """Pydantic does not know them."""
    assert PAYLOADS.decoder_for(list[Struct])(_event(b'[{"device":"a","celsius":1}]')) == [Struct("a", 1.0)]
    assert PAYLOADS.decoder_for(Struct)(_event(value={"device": "a", "celsius": 1.0})) == Struct("a", 1.0)


def test_amqp_values_are_validated_as_objects() -> None:
    """A body that is no bytes is what it is."""
    assert PAYLOADS.decoder_for(int)(_event(value=5)) == 5
    assert PAYLOADS.decoder_for(list[int])(_event(sequence=[1, 2])) == [1, 2]
    assert PAYLOADS.decoder_for(str)(_event(value="a")) == "a"


@pytest.mark.parametrize("kind", [bytes, str, dict, int, Reading, Struct, Plain, CloudEvent])
def test_what_cannot_be_decoded_names_the_event_and_does_not_show_it(kind: Any) -> None:
    """Partition, number and type; nothing of the payload, in the text or in what is chained to it."""
    event = _event(value=[]) if kind is bytes else _event(b"\xffsecret-payload" * 1000, origin=("scope", "3", None, 1))
    with pytest.raises(DecodeError) as raised:
        PAYLOADS.decoder_for(kind)(event)
    error = raised.value
    assert error.sequence_number == 7
    assert "event 7" in str(error)
    assert error.partition_id == (None if kind is bytes else "3")
    assert "secret" not in str(error)
    assert len(str(error)) < 400
    assert error.__cause__ is None
    assert error.__suppress_context__
    assert not error.is_retryable


def test_what_a_model_refuses_is_said_without_its_input() -> None:
    """The place and the reason are in the text."""
    with pytest.raises(DecodeError, match=r"as Reading: c: Input should be a valid number") as raised:
        PAYLOADS.decoder_for(Reading)(_event(b'{"device": "a", "c": "my secret"}'))
    assert "secret" not in str(raised.value)


def test_types_without_a_decoder_are_refused_at_once() -> None:
    """Before any event comes."""
    with pytest.raises(ConfigurationError, match="no event can be decoded as object"):
        PAYLOADS.decoder_for(type("object", (), {}))
    with pytest.raises(ConfigurationError, match="msgspec cannot decode"):
        PAYLOADS.decoder_for(dict[tuple[Struct, int], set[Struct] | list[Struct]])


def test_decoder_of_the_program_fails_as_ours_do() -> None:
    """Whatever it raises; its own error is chained, because it says where in its code."""

    def fails(event: ReceivedEvent) -> object:
        raise KeyError("schema")

    with pytest.raises(DecodeError, match="as Reading: KeyError: 'schema'") as raised:
        guarded(fails, Reading)(_event(b""))
    assert isinstance(raised.value.__cause__, KeyError)
    assert isinstance(PAYLOADS, Decoder)


def test_what_has_no_form_as_an_event_is_refused() -> None:
    """With its type."""
    with pytest.raises(EventError, match="a object cannot be published"):
        encoded(object())


def test_msgspec_is_not_imported_unless_it_is_used() -> None:
    """It is optional."""
    program = (
        "import sys\n"
        "from eventpump.eventhubs.decoding import PAYLOADS, encoded\n"
        "PAYLOADS.decoder_for(dict), encoded({'a': 1})\n"
        "assert 'msgspec' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_error_of_a_decoder_of_its_own_is_not_wrapped() -> None:
    """It names the event already."""
    error = DecodeError("3", 7, "odd")

    def decode(event: ReceivedEvent) -> Any:
        raise error

    event = ReceivedEvent.build(b"x", sequence_number=7, offset="1", enqueued_time=datetime(2030, 1, 1, tzinfo=UTC))
    with pytest.raises(DecodeError) as caught:
        guarded(decode, int)(event)
    assert caught.value is error
    assert repr(PAYLOADS) == "PayloadDecoder()"
