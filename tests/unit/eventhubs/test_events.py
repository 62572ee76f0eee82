"""Events: encoded and decoded, however they are written, and what a bad one may do."""

from __future__ import annotations

import copy
import datetime
import itertools
import json
import pickle
import uuid
from datetime import UTC, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventpump.amqp.codec import encode
from eventpump.amqp.message import AmqpSequence, AmqpValue, Data, Header, Message, Properties
from eventpump.amqp.sections import NULL_DATA, section, section_spans
from eventpump.amqp.types import Array, Described, Int, Symbol, Timestamp, UInt, ULong
from eventpump.errors import EventError
from eventpump.eventhubs.codecs import PayloadCodec, event_maker
from eventpump.eventhubs.events import (
    Checkpoint,
    EventData,
    EventPosition,
    LastEnqueued,
    ReceivedEvent,
    no_event,
    number_of,
    sent_context,
    set_sent_context,
    with_properties,
    without_body,
)
from eventpump.eventhubs.names import ENQUEUED_TIME, OFFSET, PARTITION_KEY, SEQUENCE_NUMBER
from tests.support.inside import published

NOW = datetime.datetime(2024, 5, 6, 7, 8, 9, 123_000, tzinfo=UTC)
texts = st.text(max_size=20)
longs = st.integers(-(2**63), 2**63 - 1)
simple = st.one_of(texts, longs, st.booleans(), st.binary(max_size=20), st.uuids(), st.none())
moments = st.datetimes(timezones=st.just(UTC)).map(
    lambda moment: moment.replace(microsecond=moment.microsecond // 1000 * 1000)
)
standards = st.fixed_dictionaries(
    {},
    optional={
        "message_id": texts | st.uuids() | st.integers(0, 2**64 - 1),
        "user_id": st.binary(max_size=9),
        "to": texts,
        "subject": texts,
        "reply_to": texts,
        "correlation_id": texts | st.uuids(),
        "content_type": st.sampled_from(["application/json", ""]),
        "content_encoding": st.just("utf-8"),
        "absolute_expiry_time": moments,
        "creation_time": moments,
        "group_id": texts,
        "group_sequence": st.integers(0, 2**32 - 1),
        "reply_to_group_id": texts,
    },
)
bodies = st.one_of(
    st.fixed_dictionaries({"body": st.binary(max_size=300) | texts}),
    st.fixed_dictionaries({"value": texts | st.integers(0, 5) | st.dictionaries(texts, simple, max_size=2)}),
    st.fixed_dictionaries({"sequence": st.lists(simple, max_size=3)}),
    st.just({}),
)


def expected_body(body: dict[str, Any]) -> Any:
    """Return what `value` must be."""
    if "body" in body:
        return body["body"].encode() if isinstance(body["body"], str) else body["body"]
    return body.get("value", body.get("sequence", b""))


def build(**changes: Any) -> ReceivedEvent:
    """Make an event with some fields set."""
    return ReceivedEvent.build(**{"offset": "100", "sequence_number": 5, "enqueued_time": NOW, **changes})


@given(bodies, st.dictionaries(texts, simple, max_size=3), standards, st.none() | texts)
def test_event_data_encodes_every_body_property_and_key(
    body: dict[str, Any], properties: dict[str, Any], standard: dict[str, Any], key: str | None
) -> None:
    """What is sent decodes to every body kind, property and key that was given, by azure-eventhub's names."""
    event = EventData(**body, properties=properties, **standard)
    message = Message.decode(event.encode(key))
    assert (message.message_annotations or {}).get(PARTITION_KEY) == key
    assert (message.header is not None and message.header.durable is True) is (key is not None)
    found = ReceivedEvent(event.encode(key))
    assert found.value == expected_body(body)
    assert found.properties == properties
    for name, value in standard.items():
        given_back = getattr(message.properties, name)
        assert (given_back.to_datetime() if isinstance(given_back, Timestamp) else given_back) == value
        assert found.system_properties[name.replace("_", "-")] == given_back


@given(
    bodies,
    st.dictionaries(texts, simple, max_size=3),
    standards,
    st.none() | texts,
    texts,
    st.integers(-(2**63), 2**63 - 1),
    moments,
)
def test_received_event_reads_as_it_was_built(
    body: dict[str, Any],
    properties: dict[str, Any],
    standard: dict[str, Any],
    key: str | None,
    offset: str,
    sequence_number: int,
    enqueued_time: datetime.datetime,
) -> None:
    """A built event reads as what it was built of, to the millisecond."""
    event = ReceivedEvent.build(
        **body,
        offset=offset,
        sequence_number=sequence_number,
        enqueued_time=enqueued_time,
        partition_key=key,
        properties=properties,
        **standard,
    )
    assert (event.offset, event.sequence_number, event.enqueued_time) == (offset, sequence_number, enqueued_time)
    assert event.partition_key == key
    assert event.properties == properties
    assert event.value == expected_body(body)
    assert event.message_id == standard.get("message_id")
    assert event.correlation_id == standard.get("correlation_id")
    assert event.content_type == standard.get("content_type")
    if "value" in body or "sequence" in body:
        with pytest.raises(EventError, match="value"):
            _ = event.body
    else:
        assert event.body == expected_body(body)


@st.composite
def written(draw: st.DrawFn) -> bytes:
    """Write events as other engines may: annotations in any order and form, sections in any order, parts missing."""
    entries: list[tuple[Any, Any]] = [
        (SEQUENCE_NUMBER, draw(st.sampled_from([0, 127, 128, -1, 2**40, Int(7), ULong(8), "no number", None]))),
        (OFFSET, draw(st.sampled_from(["0", "-1", "é" * 200, "x" * 300, Symbol("sym"), 5]))),
        (ENQUEUED_TIME, draw(st.sampled_from([Timestamp(0), Timestamp(1_700_000_000_123), Timestamp(-(2**63)), 5]))),
        (draw(st.sampled_from([PARTITION_KEY, Symbol("x" * 300), ULong(3), "plain"])), draw(simple)),
        (Symbol("nested"), draw(st.sampled_from([[1, [2]], {}, Described(ULong(1), 2), Array([UInt(1)])]))),
    ]
    annotations = dict(draw(st.permutations(entries))[: draw(st.sampled_from([5, 5, 5, 4, 3]))])
    raw = Message(
        draw(
            st.sampled_from(
                [None, Data((b"",)), Data((b"x" * 300,)), Data((b"a", b"b")), AmqpValue(5), AmqpSequence(([1], [2]))]
            )
        ),
        draw(st.sampled_from([None, Properties(message_id="m")])),
        draw(st.sampled_from([None, {"k": 1}])),
        annotations,
        draw(st.sampled_from([None, {Symbol("d"): 1}])),
        draw(st.sampled_from([None, Header(durable=True)])),
        draw(st.sampled_from([None, {Symbol("f"): 1}])),
    ).encode()
    spans = section_spans(raw)
    head = [span for span in spans if span[0] < 0x75]
    tail = [span for span in spans if span[0] >= 0x75]
    ordered = draw(st.permutations(head)) + tail if draw(st.booleans()) else tail + draw(st.permutations(head))
    return b"".join(raw[start:end] for _, start, end in ordered)


@given(st.lists(written(), min_size=1, max_size=4))
def test_received_event_equals_the_general_decoder(events: list[bytes]) -> None:
    """The fields read by the scan, whatever it has seen before, are those that the general decoder finds."""
    for raw in events * 2:
        message = Message.decode(raw)
        annotations = message.message_annotations or {}
        sequence, offset, enqueued = (annotations.get(name) for name in (SEQUENCE_NUMBER, OFFSET, ENQUEUED_TIME))
        event = ReceivedEvent(raw)
        if isinstance(sequence, int) and isinstance(offset, str) and isinstance(enqueued, Timestamp):
            assert event.sequence_number == sequence
            assert event.offset == offset
            assert event.enqueued_time == enqueued.to_datetime()
            if isinstance(message.body, Data):
                assert event.body == b"".join(message.body.parts)
            else:
                with pytest.raises(EventError, match="not data"):
                    _ = event.body
        else:
            for name in ("sequence_number", "offset", "enqueued_time", "body"):
                with pytest.raises(EventError, match="lacks"):
                    getattr(event, name)
        assert event.raw_message == message


_READS = [
    *("sequence_number", "offset", "enqueued_time", "body", "value", "body_type", "properties", "system_properties"),
    *("partition_key", "message_id", "correlation_id", "content_type", "raw_message", "last_enqueued"),
]


@given(
    written() | st.binary(max_size=60),
    st.lists(st.tuples(st.integers(0, 1 << 30), st.integers(0, 255)), max_size=3),
    st.integers(0, 50),
)
def test_received_event_of_hostile_bytes_raises_only_event_error(
    raw: bytes, changes: list[tuple[int, int]], cut: int
) -> None:
    """Whatever the bytes, reading an event gives a value or raises `EventError`, and again the same."""
    damaged = bytearray(raw[: len(raw) - cut] if cut < 25 else raw)
    for at, value in changes if damaged else ():
        damaged[at % len(damaged)] = value
    event = ReceivedEvent(bytes(damaged))
    repr(event)

    def outcome(read: Any) -> str:
        try:
            return repr(read())
        except EventError as error:
            return str(error)

    reads: list[Any] = [lambda name=name: getattr(event, name) for name in _READS]
    reads += [event.body_as_str, event.body_as_json]
    assert [outcome(read) for read in reads] == [outcome(read) for read in reads]


_SOUND = section(0x72, {SEQUENCE_NUMBER: 1, OFFSET: "1", ENQUEUED_TIME: Timestamp(0)})


@pytest.mark.parametrize(
    "raw",
    [
        _SOUND + section(0x75, b"x") + _SOUND,
        _SOUND + section(0x72, []) + section(0x75, b"x"),
        _SOUND + section(0x75, "text"),
        _SOUND + section(0x75, [1]),
        _SOUND + b"x",
    ],
)
def test_undecodable_event_has_its_place_and_no_body(raw: bytes) -> None:
    """Of what is no message the service's annotations are read and nothing else, first or after a sound one."""
    for event in (ReceivedEvent(raw), ReceivedEvent(_SOUND + section(0x75, b"y" * 300)), ReceivedEvent(raw)):
        assert (event.sequence_number, event.offset) == (1, "1")
        assert event.enqueued_time.timestamp() == 0
        if event.raw is raw:
            for name in ("body", "properties", "value", "partition_key"):
                with pytest.raises(EventError, match="cannot be decoded"):
                    getattr(event, name)
        else:
            assert event.body == b"y" * 300


_LONG_NULL = encode(Described(Symbol("amqp:data:binary"), None))


@pytest.mark.parametrize(
    ("sections", "body", "value"),
    [
        (NULL_DATA, b"", None),
        (_LONG_NULL, b"", None),
        (NULL_DATA + section(0x78, {}), b"", None),
        (NULL_DATA * 2, b"", None),
        (NULL_DATA + section(0x75, b"x"), b"x", b"x"),
        (section(0x75, b"x" * 300) + NULL_DATA, b"x" * 300, b"x" * 300),
    ],
)
@pytest.mark.parametrize("first", ["body", "value", "body_type", "properties"])
def test_body_that_is_null_is_empty(sections: bytes, body: bytes, value: bytes | None, first: str) -> None:
    """Null in place of data is an empty body whose `value` is None, whatever is read first, and after sound events."""
    for made in (ReceivedEvent, event_maker([PayloadCodec("odd", bytes, bytes)], "0")):
        for raw in (_SOUND + sections, _SOUND + section(0x75, b"y" * 300), _SOUND + sections):
            event = made(raw, None)
            getattr(event, first)
            assert (event.offset, event.body_type, event.properties) == ("1", "data", {})
            if sections in raw:
                assert (event.body, event.body_as_str(), event.value) == (body, body.decode(), value)
                assert event.to_event_data().body == body
                assert pickle.loads(pickle.dumps(event)).body == body


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"text",
        section(0x72, []) + section(0x75, b"x"),
        section(0x72, {SEQUENCE_NUMBER: 1, OFFSET: "1"}) + section(0x75, "text"),
        section(0x72, {SEQUENCE_NUMBER: True, OFFSET: "1", ENQUEUED_TIME: Timestamp(0)}) + b"x",
        _SOUND[:-1],
    ],
)
def test_undecodable_event_with_broken_annotations_has_no_place(raw: bytes) -> None:
    """Where the annotations themselves are broken, reading the place raises too."""
    with pytest.raises(EventError):
        _ = ReceivedEvent(raw).sequence_number


def test_undecodable_event_with_a_broken_value_has_its_place() -> None:
    """A value that is none, and a descriptor in its long form, do not hide the annotations before them."""
    named = {SEQUENCE_NUMBER: 1, OFFSET: "1", ENQUEUED_TIME: Timestamp(0), Symbol("x"): "\u00e9"}
    raw = section(0x72, named).replace("\u00e9".encode(), b"\xff\xff") + section(0x75, "text")
    long = Described(Symbol("amqp:message-annotations:map"), {**named, Symbol("more"): "m" * 300})
    for event in (ReceivedEvent(raw), ReceivedEvent(encode(long) + section(0x75, "text"))):
        assert (event.sequence_number, event.offset) == (1, "1")
        with pytest.raises(EventError):
            _ = event.body


def test_body_reads_as_text_and_json() -> None:
    """The body reads as text and JSON; what it is not is said."""
    assert build(body='{"a": [1]}').body_as_json() == {"a": [1]}
    assert build(value="text").body_as_str() == "text"
    assert build(body="é").body_as_str() == "é"
    assert build(body="é".encode("latin-1")).body_as_str("latin-1") == "é"
    for event, read in (
        (build(body=b"\xff"), "body_as_str"),
        (build(body="{"), "body_as_json"),
        (build(body="[" * 200_000), "body_as_json"),
        (build(body="1" * 5000), "body_as_json"),
        (build(value=5), "body_as_str"),
    ):
        with pytest.raises(EventError):
            getattr(event, read)()


def test_body_type_is_named() -> None:
    """Each kind of body is named, and joined where it has parts."""
    assert build(body=b"x").body_type == "data"
    assert build(value=1).body_type == "value"
    assert build(sequence=[1]).body_type == "sequence"
    annotations = section(0x72, {SEQUENCE_NUMBER: 1, OFFSET: "1", ENQUEUED_TIME: Timestamp(0)})
    bare = ReceivedEvent(annotations)
    assert (bare.body_type, bare.value) == ("none", None)
    with pytest.raises(EventError, match="none"):
        _ = bare.body
    joined = ReceivedEvent(annotations + section(0x76, [1]) + section(0x76, [2]))
    assert joined.value == [1, 2]


@pytest.mark.parametrize("year", [1970, 2024, 2096, 2097, 2300, 9999])
def test_enqueued_time_is_exact_to_the_millisecond(year: int) -> None:
    """Times are right to the millisecond, with no microsecond lost to floats, as far as a datetime goes."""
    start = datetime.datetime(year, 12, 31, 23, 59, 59, tzinfo=UTC)
    for milliseconds in range(0, 1000, 7):
        moment = start + timedelta(milliseconds=milliseconds)
        assert build(enqueued_time=moment).enqueued_time == moment


def test_enqueued_time_beyond_datetime_is_the_nearest() -> None:
    """A time that no datetime holds is the nearest one."""
    for value, year in ((2**63 - 1, 9999), (-(2**63), 1), (-1, 1969)):
        raw = section(0x72, {SEQUENCE_NUMBER: 1, OFFSET: "1", ENQUEUED_TIME: Timestamp(value)})
        assert ReceivedEvent(raw).enqueued_time.year == year


def test_last_enqueued_is_none_without_runtime_metrics() -> None:
    """The newest event is known where the link has runtime metrics, and None where not."""
    last = LastEnqueued(9, "900", NOW, NOW + timedelta(seconds=1))
    assert build(last_enqueued=last).last_enqueued == last
    assert build().last_enqueued is None


def test_message_ids_keep_their_type() -> None:
    """Ids keep their kind."""
    for value in ("text", 5, uuid.UUID(int=5), b"bytes"):
        assert build(message_id=value).message_id == value


@pytest.mark.parametrize(
    "arguments",
    [
        {"body": "\ud800"},
        {"body": 5},
        {"body": b"x", "value": 1},
        {"value": 1, "sequence": [1]},
        {"unknown": 1},
        {"properties": {5: 1}},
        {"properties": {"k": object()}},
        {"properties": {"k": 2**64}},
        {"properties": {"k": datetime.datetime(2024, 1, 1)}},
        {"value": object()},
        {"group_sequence": -1},
        {"group_sequence": "x"},
        {"user_id": 10**12},
        {"message_id": -1},
        {"creation_time": datetime.datetime(2024, 1, 1)},
        {"content_type": "ä"},
    ],
)
def test_event_without_an_amqp_form_raises_event_error(arguments: dict[str, Any]) -> None:
    """An event that has no AMQP form raises `EventError`, when made or when encoded."""
    with pytest.raises(EventError):
        EventData(**arguments).encode()
    if "unknown" not in arguments:
        with pytest.raises(EventError):
            build(**arguments)


def test_event_is_encoded_as_data_section_and_key_annotation() -> None:
    """A bare event is one data section; one with a key has a durable header and the key as annotation (7.2)."""
    assert EventData(b"x").encode() == b"\x00\x53\x75\xa0\x01x"
    assert EventData(b"x").encode("k").startswith(b"\x00\x53\x70\xc0\x02\x01\x41\x00\x53\x72\xc1")
    assert EventData(bytearray(b"x")).encode() == EventData(memoryview(b"x")).encode() == EventData("x").encode()
    assert EventData().encode() == encode(Described(ULong(0x75), b""))
    assert "b'x'" in repr(EventData(b"x"))


def test_position_is_one_of_offset_number_and_time() -> None:
    """A position is exactly one of offset, sequence number and time."""
    assert EventPosition.earliest() == EventPosition(offset="-1")
    assert EventPosition.latest() == EventPosition(offset="@latest")
    assert EventPosition.at_offset("5", inclusive=True) == EventPosition(offset="5", inclusive=True)
    assert EventPosition.at_sequence_number(0) == EventPosition(sequence_number=0)
    assert EventPosition.at_enqueued_time(NOW) == EventPosition(enqueued_time=NOW)
    assert Checkpoint("0", "100", 5) == Checkpoint("0", "100", 5)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"offset": "1", "sequence_number": 1},
        {"offset": ""},
        {"offset": "1' or '1"},
        {"enqueued_time": datetime.datetime(2024, 1, 1)},
    ],
)
def test_position_of_another_form_is_refused(arguments: dict[str, Any]) -> None:
    """What is no position is refused; a quote could not be written in the filter."""
    with pytest.raises(ValueError, match=r"position|offset|time zone"):
        EventPosition(**arguments)


def test_positions_of_a_kind_have_an_order() -> None:
    """Numbers and times by where reading begins; an offset only against itself; anything else is a `TypeError`."""
    later = NOW + datetime.timedelta(seconds=1)
    for rising in (
        [EventPosition.at_sequence_number(4, inclusive=True), EventPosition.at_sequence_number(4),
         EventPosition.at_sequence_number(5, inclusive=True), EventPosition.at_sequence_number(10)],
        [EventPosition.at_enqueued_time(NOW, inclusive=True), EventPosition.at_enqueued_time(NOW),
         EventPosition.at_enqueued_time(later, inclusive=True)],
        [EventPosition.at_offset("x", inclusive=True), EventPosition.at_offset("x")],
    ):  # fmt: skip
        assert sorted([rising[-1], *rising[:-1]]) == rising
        for low, high in itertools.pairwise(rising):
            assert low < high
            assert low <= high
            assert high > low
            assert high >= low
            assert low <= low
            assert not high < low
    kinds: list[Any] = [EventPosition.at_sequence_number(4), EventPosition.at_enqueued_time(NOW),
                        EventPosition.at_offset("4"), EventPosition.at_offset("5"), 4]  # fmt: skip
    for one, other in itertools.permutations(kinds, 2):
        with pytest.raises(TypeError):
            assert one < other
        with pytest.raises(TypeError):
            assert one >= other


@pytest.mark.parametrize(
    ("position", "text"),
    [
        (EventPosition.earliest(), "offset>-1"),
        (EventPosition.latest(), "offset>@latest"),
        (EventPosition.at_sequence_number(5, inclusive=True), "number>=5"),
        (EventPosition.at_enqueued_time(NOW.astimezone(datetime.timezone(datetime.timedelta(hours=3)))), "time>"),
    ],
)
def test_position_is_a_text_to_store(position: EventPosition, text: str) -> None:
    """As records of consumer groups have them; equal positions have one text."""
    assert str(position).startswith(text)
    assert EventPosition.parse(str(position)) == position
    assert str(EventPosition.parse(str(position))) == str(position)
    for other in (f"x{position}", text[:6], "time>now"):
        with pytest.raises(ValueError, match="not a position"):
            EventPosition.parse(other)


def test_properties_changed_after_the_event_was_made_are_sent() -> None:
    """Changed in place or as a whole, and whatever the event was made of."""
    changed = EventData(b"body")
    changed.properties["unit"] = "C"
    replaced = EventData(b"body")
    given = {"unit": "C"}
    replaced.properties = given
    given["unit"] = "F"
    for event in (changed, replaced):
        assert event.encode() == EventData(b"body", properties={"unit": "C"}).encode()
        assert event.properties == {"unit": "C"}


def test_reading_body_and_properties_changes_no_sent_byte() -> None:
    """Reading an event leaves its bytes as they are."""
    event = EventData(b"body")
    before = event.encode()
    assert (event.body, event.section, event.properties) == (b"body", Data((b"body",)), {})
    assert event.encode() == before == EventData(bytearray(b"body")).encode() == EventData("body").encode()


@pytest.mark.parametrize("number", [ULong(2**63), ULong(2**64 - 1)])
@pytest.mark.parametrize("damage", [b"", b"\0\x53\x78"])
def test_sequence_number_beyond_a_long_raises(number: ULong, damage: bytes) -> None:
    """A number that no sequence number can be, and no column or store could hold, is none."""
    annotations = {SEQUENCE_NUMBER: number, OFFSET: "1", ENQUEUED_TIME: Timestamp(0)}
    event = ReceivedEvent(Message(AmqpValue(1), message_annotations=annotations).encode() + damage)
    with pytest.raises(EventError):
        _ = event.sequence_number


@pytest.mark.parametrize(
    ("event", "kind", "value"),
    [
        (EventData(b"\x00\xff"), "data", b"\x00\xff"),
        (EventData("grüße"), "data", "grüße".encode()),
        (EventData(bytearray(b"x"), properties={"a": 1}), "data", b"x"),
        (EventData(), "data", b""),
        (EventData(value={"a": [1, 2]}), "value", {"a": [1, 2]}),
        (EventData(value="text"), "value", "text"),
        (EventData(sequence=[1, "two"]), "sequence", [1, "two"]),
    ],
    ids=repr,
)
def test_event_gives_back_what_it_was_given(event: EventData, kind: str, value: Any) -> None:
    """Before it is sent as after it is received."""
    received = ReceivedEvent(event.encode())
    for each in (event, received.to_event_data()):
        assert (each.body_type, each.value) == (kind, value)
        if kind == "data":
            assert each.body == value
        else:
            with pytest.raises(EventError, match="use `value`"):
                _ = each.body
    assert received.value == value
    assert EventData("grüße").body_as_str() == "grüße" == EventData(value="grüße").body_as_str()
    assert EventData("grüße".encode("latin-1")).body_as_str("latin-1") == "grüße"
    with pytest.raises(EventError, match="utf-8"):
        EventData(b"\xff").body_as_str()


def test_event_in_json_is_text_with_its_content_type() -> None:
    """What json.loads makes of it is what was given; what has no form in JSON is refused."""
    event = EventData.json({"unit": "°C", "value": [1, 2.5, None]}, properties={"a": 1}, message_id="m")
    assert event.body == '{"unit":"°C","value":[1,2.5,null]}'.encode()
    received = ReceivedEvent(event.encode())
    assert event.body_as_json() == json.loads(received.value) == {"unit": "°C", "value": [1, 2.5, None]}
    assert (received.content_type, received.message_id, received.properties) == ("application/json", "m", {"a": 1})
    assert EventData.json(None, content_type="text/json").standard == {"content_type": "text/json"}
    loop: list[Any] = []
    loop.append(loop)
    for wrong in (float("nan"), object(), b"x", loop):
        with pytest.raises(EventError, match="no form in JSON"):
            EventData.json(wrong)
    with pytest.raises(EventError, match=r"EventData\.json"):
        EventData({"a": 1})  # type: ignore[arg-type]  # what it refuses
    with pytest.raises(EventError, match="not valid JSON"):
        EventData(b"{").body_as_json()


def test_encoders_of_a_schema_registry_make_and_read_events() -> None:
    """Body and content type come and go by the two methods of their protocol, beside the options given."""
    sent = EventData.from_message_content(b"\x02", "avro/binary+7", properties={"unit": "C"}, message_id="m")
    place: dict[str, Any] = {"offset": "3", "sequence_number": 3, "enqueued_time": NOW}
    received = ReceivedEvent.from_message_content(b"\x02", "avro/binary+7", properties={"unit": "C"}, **place)
    for event in (sent, received, received.to_event_data()):
        assert event.__message_content__() == {"content": b"\x02", "content_type": "avro/binary+7"}
        assert event.properties == {"unit": "C"}
    assert (sent.standard, received.offset) == ({"content_type": "avro/binary+7", "message_id": "m"}, "3")
    assert EventData(b"x").__message_content__() == {"content": b"x", "content_type": ""}
    assert ReceivedEvent.build(b"x", **place).__message_content__() == {"content": b"x", "content_type": ""}


def test_received_event_is_sent_on_by_its_copy() -> None:
    """Body, application properties and standard properties are those received."""
    event = EventData(b"body", properties={"a": 1}, correlation_id="c", subject="s")
    received = ReceivedEvent(event.encode("key"))
    assert received.to_event_data().encode() == event.encode()
    assert received.partition_key == "key"


class _Reversed(ReceivedEvent):
    """A subclass with another body."""

    @property
    def body(self) -> bytes:
        return super().body[::-1]


def test_text_and_json_of_a_subclass_are_of_its_own_body() -> None:
    """In the compiled build too, where both are read from the message directly."""
    event = _Reversed(build(body=b"]2 ,1[").raw)
    assert event.body_as_str() == "[1, 2]"
    assert event.body_as_json() == [1, 2]


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_events_survive_pickling_and_copying(protocol: int) -> None:
    """Process pools and Spark send them between processes; what was read already makes no difference."""
    event = EventData("text", properties={"a": 1}, subject="s")
    published(event, 7)
    for made in (pickle.loads(pickle.dumps(event, protocol)), copy.deepcopy(event)):
        assert made.encode() == event.encode()
        assert made.published_sequence_number == 7
        assert repr(made) == repr(event) == "EventData(Data(parts=(b'text',)), properties=1)"
    received = build(body=b"x", partition_key="k")
    for is_read in (False, True):
        assert not is_read or (received.offset, received.partition_key) == ("100", "k")
        for found in (pickle.loads(pickle.dumps(received, protocol)), copy.copy(received)):
            assert (found.raw, found.sequence_number, found.partition_key) == (received.raw, 5, "k")
    assert repr(received) == f"ReceivedEvent({len(received.raw)} bytes)"


def test_partition_key_is_the_same_before_and_after_the_event_is_read() -> None:
    """It is kept with what was read of the event, whichever is read first."""
    for key in ("k", None):
        raw = build(body=b"x", partition_key=key).raw
        first, second = ReceivedEvent(raw), ReceivedEvent(raw)
        assert (first.partition_key, first.sequence_number, first.partition_key) == (key, 5, key)
        assert (second.sequence_number, second.partition_key, second.partition_key) == (5, key, key)


def test_what_is_no_event_or_no_json_is_a_clear_error() -> None:
    """A received event is not one to send: the error says what to do."""
    assert "send `event.to_event_data()`" in str(no_event(build()))
    assert str(no_event(3)) == "an event to send is an EventData, not int"
    with pytest.raises(EventError, match="the body is not valid JSON"):
        EventData("{").body_as_json()


def test_message_without_body_keeps_its_place() -> None:
    """Bytes that have no place are returned as they are."""
    raw = build(body=b"x" * 100).raw
    short = without_body(raw)
    assert len(short) < len(raw) - 90
    assert (ReceivedEvent(short).offset, ReceivedEvent(short).body) == ("100", b"")
    assert without_body(b"junk") == b"junk"


@pytest.mark.parametrize("name", ["message_id", "correlation_id"])
@pytest.mark.parametrize("value", [1.5, True, [1], {"a": 1}, -1, NOW])
def test_id_of_a_type_that_amqp_does_not_have_is_refused(name: str, value: Any) -> None:
    """An id is text, a number that is not negative, a UUID or bytes; receivers of another could not read the event."""
    with pytest.raises(EventError, match=name):
        EventData("x", **{name: value}).encode()


@pytest.mark.parametrize("value", [1.5, True, [1], {"a": 1}])
def test_id_of_such_a_type_that_a_peer_sent_is_sent_on(value: Any) -> None:
    """So that an event that a peer made can be forwarded and parked, whatever it has for an id."""
    place = {"x-opt-sequence-number": 7, "x-opt-offset": "7", "x-opt-enqueued-time": Timestamp(5)}
    message = Message(
        message_annotations={Symbol(name): each for name, each in place.items()},
        properties=Properties(message_id=value),
        body=Data((b"x",)),
    )
    event = ReceivedEvent(message.encode()).to_event_data()
    assert Message.decode(event.encode()).properties == Properties(message_id=value)


@given(
    st.binary(max_size=50),
    st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=30),
    st.dictionaries(st.text(min_size=1, max_size=5), longs, max_size=2),
)
def test_event_of_a_message_content_gives_it_back(
    content: bytes, content_type: str, properties: dict[str, Any]
) -> None:
    """Sent and received, an event that an encoder of a schema registry made has its body, type and properties."""
    made = EventData.from_message_content(content, content_type, properties=properties)
    received = ReceivedEvent.from_message_content(
        content, content_type, properties=properties, offset="1", sequence_number=2, enqueued_time=NOW
    )
    for event in (made, received):
        assert event.__message_content__() == {"content": content, "content_type": content_type}
        assert dict(event.properties) == properties


def test_sender_s_delivery_annotations_and_footer_are_read() -> None:
    """Under texts, and empty where there are none."""
    message = Message(Data((b"x",)), delivery_annotations={Symbol("a"): 1}, footer={Symbol("b"): "2"})
    event = ReceivedEvent(message.encode())
    assert (event.delivery_annotations, event.footer) == ({"a": 1}, {"b": "2"})
    plain = ReceivedEvent(Message(Data((b"x",))).encode())
    assert (plain.delivery_annotations, plain.footer) == ({}, {})


class Marked(EventData):
    """An event of a program's own kind."""

    mark = "kept"


@pytest.mark.parametrize("kind", [EventData, Marked])
def test_further_properties_do_not_replace_those_of_the_event(kind: type[EventData]) -> None:
    """The event itself stays as it is, and so do the kind, the body and the other properties of the new one."""
    event = kind(b"body", properties={"a": 1}, content_type="text/plain")
    made = with_properties(event, {"a": 2, "b": 3})
    assert (made.properties, event.properties) == ({"a": 1, "b": 3}, {"a": 1})
    assert (type(made), made.body, made.standard) == (kind, b"body", {"content_type": "text/plain"})


def test_event_keeps_the_context_that_it_was_sent_with() -> None:
    """None before, and for what is no event."""
    event = EventData(b"")
    assert (sent_context(event), sent_context(object())) == (None, None)
    set_sent_context(event, "00-1")
    assert sent_context(event) == "00-1"


def test_number_of_an_event_without_one_is_none() -> None:
    """And not an error, as the attribute is."""
    assert number_of(ReceivedEvent(Message(Data((b"x",))).encode())) is None
    assert number_of(ReceivedEvent.build(b"x", sequence_number=7, offset="9", enqueued_time=NOW)) == 7
