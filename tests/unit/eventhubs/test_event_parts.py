"""Each attribute of a received event is decoded by itself: of a whole message as the general decoder does, and of one
that is damaged elsewhere too.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from eventpump.amqp.codec import AmqpDecodeError, encode
from eventpump.amqp.message import AmqpSequence, AmqpValue, Data, Message, Properties
from eventpump.amqp.sections import PROPERTIES, section, section_spans
from eventpump.amqp.types import Symbol, Timestamp
from eventpump.errors import EventError
from eventpump.eventhubs.events import STANDARD_PROPERTIES, EventData, ReceivedEvent
from eventpump.eventhubs.names import ENQUEUED_TIME, OFFSET, PARTITION_KEY, SEQUENCE_NUMBER
from tests.fuzz.entry import seed_of_today
from tests.support.damage import damage, outcome
from tests.support.messages import DEEPEST, message

READS: dict[str, Callable[[ReceivedEvent], Any]] = {
    **{
        name: lambda event, name=name: getattr(event, name)  # type: ignore[misc]  # mypy knows no default of a lambda
        for name in (
            *("offset", "sequence_number", "enqueued_time", "body", "body_type", "value", "partition_key"),
            *("properties", "system_properties", "message_id", "correlation_id", "content_type"),
            *("last_enqueued", "raw_message"),
        )
    },
    "body_as_str": lambda event: event.body_as_str(),
    "to_event_data": lambda event: shown(event.to_event_data()),
}


def shown(event: EventData) -> Any:
    """Return what an event to send has."""
    return event.section, event.properties, event.standard


def read(name: str, event: ReceivedEvent) -> str:
    """Read an attribute; return its value with all types, or its error."""
    kind, found = outcome(READS[name], event)
    return f"{kind.__name__}: {found!r}"


def expected(raw: bytes) -> dict[str, Any]:
    """Return attributes of an event by the general decoder.

    Raises:
        AmqpDecodeError: The message is not whole.
    """
    found = Message.decode(raw)
    standard = {name: getattr(found.properties or Properties(), name) for name in STANDARD_PROPERTIES}
    standard = {name: each for name, each in standard.items() if each is not None}
    annotations = {str(name): each for name, each in (found.message_annotations or {}).items()}
    key, media = annotations.get(PARTITION_KEY), standard.get("content_type")
    kind: str = "none"
    body: Any = None
    match found.body:
        case Data(parts):
            kind, body = "data", b"".join(parts) if parts else None
        case AmqpSequence(lists):
            kind, body = "sequence", [item for each in lists for item in each]
        case AmqpValue(value):
            kind, body = "value", value
    of_copy = Data((body or b"",)) if kind in ("data", "none") else found.body
    return {
        "body_type": kind,
        "value": body,
        "properties": found.application_properties or {},
        "system_properties": annotations | {name.replace("_", "-"): each for name, each in standard.items()},
        "partition_key": None if key is None else str(key),
        "message_id": standard.get("message_id"),
        "correlation_id": standard.get("correlation_id"),
        "content_type": None if media is None else str(media),
        "raw_message": found,
        "to_event_data": (of_copy, found.application_properties or {}, standard or None),
    }


def test_attribute_of_a_whole_message_is_that_of_the_general_decoder(request: pytest.FixtureRequest) -> None:
    """The same value of the same type, for values of every AMQP type; and the same object when it is read again."""
    whole = 0
    first = seed_of_today()
    for seed in range(first, first + (1_000_000 if request.config.getoption("--long") else 500)):
        random = Random(seed)
        raw = message(random)
        if random.random() < 0.3:
            raw = damage(random, raw, len(raw))
        try:
            wanted = expected(raw)
        except AmqpDecodeError:
            continue
        whole += 1
        event = ReceivedEvent(raw)
        for name in random.sample(list(wanted), len(wanted)):
            value = wanted[name]
            assert read(name, event) == f"{type(value).__name__}: {value!r}", (seed, name)
            if name not in ("to_event_data", "partition_key"):  # a text of the message, which is not kept
                assert READS[name](event) is READS[name](event), (seed, name)
    assert whole > 300


def test_attribute_does_not_depend_on_what_was_read_before(request: pytest.FixtureRequest) -> None:
    """Neither of that event, in any order, nor of others: a value or an error is the same each time."""
    values = errors = 0
    first = seed_of_today()
    for seed in range(first, first + (250_000 if request.config.getoption("--long") else 250)):
        random = Random(seed)
        sound = message(random)
        raw = damage(random, sound, random.choice((200, len(sound))))
        event = ReceivedEvent(raw)
        for name in random.sample(list(READS), len(READS)):
            found = read(name, event)
            read("offset", ReceivedEvent(sound))  # its layout may be remembered
            assert read(name, event) == read(name, ReceivedEvent(raw)) == found, (seed, name)
            values += not found.startswith("EventError")
            errors += found.startswith("EventError")
    assert min(values, errors) > 300


WHOLE = Message(
    message_annotations={
        SEQUENCE_NUMBER: 5,
        OFFSET: "7",
        ENQUEUED_TIME: Timestamp(0),
        PARTITION_KEY: "key",
        Symbol("x-opt-other"): "#annotation",
    },
    properties=Properties(message_id="#id", content_type="text/plain"),
    application_properties={"a": 1, "b": "#property"},
    body=AmqpValue("#value"),
).encode()

DAMAGES = {
    "an annotation": (b"#annotation", {"system_properties", "raw_message"}),
    "a standard property": (b"#id", {"message_id", "system_properties", "to_event_data", "raw_message"}),
    "a property": (b"#property", {"properties", "to_event_data", "raw_message"}),
    "the body": (b"#value", {"value", "body", "body_type", "body_as_str", "to_event_data", "raw_message"}),
}
"""What is damaged in an event, by the bytes there; and what cannot be read then."""


@pytest.mark.parametrize("what", DAMAGES)
@pytest.mark.parametrize("name", READS)
def test_attribute_of_an_event_that_is_damaged_elsewhere_is_read(what: str, name: str) -> None:
    """Text that is not UTF-8 is an error of the attributes that it belongs to, and of no other."""
    place, lost = DAMAGES[what]
    event = ReceivedEvent(WHOLE.replace(place, b"\xff" + place[1:]))
    if name in lost:
        assert read(name, event).startswith("EventError: ")
    else:
        assert read(name, event) == read(name, ReceivedEvent(WHOLE))


@pytest.mark.parametrize(
    "raw",
    [
        WHOLE[:-1],
        WHOLE + b"x",
        WHOLE + section(0x74, {}),
        WHOLE.replace(b"\x00\x53\x74", section(0x74, {}) + b"\x00\x53\x74"),
        WHOLE.replace(b"\x00\x53\x74\xc1", b"\x00\x53\x74\xc0"),
        WHOLE + section(0x75, "text"),
        WHOLE + section(0x76, []),
    ],
)
def test_nothing_is_read_of_what_is_no_message(raw: bytes) -> None:
    """Where sections are cut off, hold what they may not or occur too often, it is not known which of them count."""
    for name in ("properties", "message_id", "content_type", "system_properties", "value", "to_event_data"):
        assert read(name, ReceivedEvent(raw)).startswith("EventError: "), name
    assert ReceivedEvent(raw).offset == "7"


def test_standard_property_of_a_list_that_is_not_filled_is_an_error() -> None:
    """A list that counts other items than it has, or more than there are fields, gives none of them."""
    (_, start, end) = next(span for span in section_spans(WHOLE) if span[0] == PROPERTIES)
    for items in ([None] * 14, [None] * 12 + ["#", "#"]):
        event = ReceivedEvent(WHOLE[:start] + section(PROPERTIES, items) + WHOLE[end:])
        for name in ("message_id", "content_type"):
            with pytest.raises(EventError, match="too many"):
                getattr(event, name)
    for count in (0, 6, 8, 255):
        raw = bytearray(WHOLE)
        raw[start + 5] = count
        for name in ("message_id", "content_type"):
            with pytest.raises(EventError):
                getattr(ReceivedEvent(bytes(raw)), name)


@pytest.mark.parametrize(
    ("value", "count"),
    [
        *(({"a": 1, "b": 2}, count) for count in (0, 2, 3, 5, 6, 255)),
        *(({"a": [1, 2]}, count) for count in (0, 1, 3, 255)),
        *(({"a": {"b": 1, "c": 2}}, count) for count in (0, 2, 3, 6, 255)),
    ],
)
def test_properties_that_count_other_items_than_they_have_are_an_error(value: dict[str, Any], count: int) -> None:
    """Maps and lists are filled by their items, the innermost too."""
    raw = bytearray(Message(application_properties=value, body=Data((b"body",))).encode())
    inner = value["a"]
    at = raw.rindex(b"\xc0" if isinstance(inner, list) else b"\xc1") + 2
    raw[at] = count
    for name in ("properties", "to_event_data", "raw_message"):
        assert read(name, ReceivedEvent(bytes(raw))).startswith("EventError: "), name


@pytest.mark.parametrize("again", [section(0x74, {}), section(0x74, {"b": 2}), section(0x73, [])])
def test_properties_after_a_section_that_is_there_twice_are_an_error(again: bytes) -> None:
    """Before a body of data, where the sections' lengths alone are read in most messages."""
    raw = _PLAIN.replace(b"\x00\x53\x74", section(0x73, ["id"]) + again + b"\x00\x53\x74")
    for name in ("properties", "message_id", "to_event_data"):
        assert read(name, ReceivedEvent(raw)).startswith("EventError: "), name


@pytest.mark.parametrize("depth", [DEEPEST, DEEPEST + 1])
def test_properties_that_nest_too_deeply_are_an_error(depth: int) -> None:
    """A text in so many lists is a value, and in one more it is none."""
    value = encode("x")
    for _ in range(depth):
        value = bytes((0xC0, len(value) + 1, 1)) + value
    content = encode("a") + value
    raw = _PLAIN + b"\x00\x53\x74\xc1" + bytes((len(content) + 1, 2)) + content
    raw = raw.replace(section(0x74, {"a": 1}), b"")
    if depth > DEEPEST:
        with pytest.raises(EventError, match="nest"):
            _ = ReceivedEvent(raw).properties
    else:
        assert str(ReceivedEvent(raw).properties["a"]) == "[" * depth + "'x'" + "]" * depth


def test_properties_of_many_names_are_those_of_the_message() -> None:
    """Names that are remembered are compared as a whole: their first, middle and last characters are not enough."""
    names = [f"a{first}{second}m{first}z" for first in "bcdefgh" for second in range(10)] * 2 + ["é", "x" * 65, ""]
    for name in names:
        message = Message(message_annotations={}, application_properties={name: 1}, body=Data((b"x",)))
        assert ReceivedEvent(message.encode()).properties == {name: 1}


def test_properties_that_were_changed_are_those_of_the_copy() -> None:
    """`to_event_data` copies what `properties` has returned, and later changes are not the event's."""
    event = ReceivedEvent(WHOLE)
    event.properties["a"] = 2
    copy = event.to_event_data()
    copy.properties["b"] = 3
    assert (copy.properties, event.properties) == ({"a": 2, "b": 3}, {"a": 2, "b": "#property"})


def test_copy_in_a_program_that_does_not_send_is_one_of_the_event() -> None:
    """What encodes batches need not have been imported."""
    program = (
        "import sys; from eventpump.eventhubs.events import ReceivedEvent;"
        f"assert ReceivedEvent({_PLAIN!r}).to_event_data().properties == {{'a': 1}};"
        "assert 'eventpump.eventhubs.sealing' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


_PLAIN = Message(
    message_annotations={SEQUENCE_NUMBER: 5, OFFSET: "7", ENQUEUED_TIME: Timestamp(0)},
    application_properties={"a": 1},
    body=Data((b"body",)),
).encode()
