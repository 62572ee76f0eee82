"""Rows, as the general decoder has them: for every kind of body, property and annotation, and for damaged messages."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventpump.amqp.codec import encode
from eventpump.amqp.message import AmqpSequence, AmqpValue, Data, Header, Message, Properties
from eventpump.amqp.sections import NULL_DATA, encode_data
from eventpump.amqp.types import (
    Array,
    Byte,
    Char,
    Decimal32,
    Decimal64,
    Decimal128,
    Described,
    Float,
    Int,
    Short,
    Symbol,
    Timestamp,
    UByte,
    UInt,
    ULong,
    UShort,
)
from eventpump.errors import DecodeError, EventError
from eventpump.eventhubs.codecs import PayloadCodec, encoder
from eventpump.eventhubs.events import EventData, ReceivedEvent
from eventpump.eventhubs.names import ENQUEUED_TIME, OFFSET, PARTITION_KEY, PUBLISHER, SEQUENCE_NUMBER
from eventpump.spark.source.rows import COLUMNS, PartitionMessages, RowEncoder, text_of
from tests.support.codecs import DEFLATE, GZIP, OLD_KEY
from tests.support.spark_rows import EPOCH, expected_row, row_encoder, rows_of
from tests.support.values import SCALARS, scalars

_text = st.text(max_size=12)
_ascii = SCALARS["symbol"]
_longs = SCALARS["long"]
_values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(_longs, min_size=1, max_size=4).map(Array),
        st.dictionaries(st.one_of(_text, _longs, _ascii), inner, max_size=3),
        st.tuples(_ascii, inner).map(lambda pair: Described(*pair)),
    ),
    max_leaves=6,
)
_bodies = st.one_of(
    st.none(),
    st.binary(max_size=600).map(lambda data: Data((data,))),
    st.lists(st.binary(max_size=9), min_size=2, max_size=3).map(lambda parts: Data(tuple(parts))),
    st.just(Data(())),
    _values.map(AmqpValue),
    st.lists(st.lists(_values, max_size=3), min_size=1, max_size=2).map(lambda lists: AmqpSequence(tuple(lists))),
)
_ids = st.one_of(_text, st.uuids(), st.binary(max_size=5), SCALARS["ulong"])
_standard = st.builds(
    Properties,
    message_id=st.none() | _ids,
    user_id=st.none() | st.binary(max_size=5),
    to=st.none() | _text,
    subject=st.none() | _text,
    correlation_id=st.none() | _ids,
    content_type=st.none() | _ascii,
    creation_time=st.none() | SCALARS["timestamp"],
    group_sequence=st.none() | st.integers(0, 2**32 - 1),
    reply_to_group_id=st.none() | _text,
)
_names = st.sampled_from(["a", "b", "kind", "größe", "", "message-id", "x" * 255, "y" * 300]) | _text


@st.composite
def _messages(draw: st.DrawFn) -> bytes:
    annotations: dict[Any, Any] = {
        SEQUENCE_NUMBER: draw(st.one_of(_longs, st.integers(0, 9).map(UInt), st.integers(-128, 127))),
        OFFSET: draw(st.one_of(st.integers(0, 2**63).map(str), _ascii, st.text(min_size=256, max_size=260))),
        ENQUEUED_TIME: Timestamp(draw(st.one_of(st.integers(0, 2**42), _longs))),
    }
    for name in (PARTITION_KEY, PUBLISHER):
        if draw(st.booleans()):
            annotations[name] = draw(_text | _ascii | scalars)
    annotations |= draw(st.dictionaries(st.one_of(_ascii, _names.map(str), _longs), _values, max_size=3))
    annotations = dict(draw(st.permutations(list(annotations.items()))))
    message = Message(
        body=draw(_bodies),
        header=draw(st.none() | st.builds(Header, durable=st.none() | st.booleans())),
        delivery_annotations=draw(st.none() | st.just({Symbol("d"): 1})),
        message_annotations=annotations,
        properties=draw(st.none() | _standard),
        application_properties=draw(st.none() | st.dictionaries(_names, scalars, max_size=5)),
        footer=draw(st.none() | st.just({Symbol("f"): 1})),
    )
    return message.encode()


def _rows(messages: Sequence[bytes], columns: Sequence[str]) -> list[dict[str, Any]]:
    return rows_of(row_encoder(columns), messages)


_columns = st.lists(st.sampled_from(list(COLUMNS)), min_size=1, unique=True)


@given(messages=st.lists(_messages(), max_size=5), columns=_columns)
def test_rows_equal_those_of_the_general_decoder(messages: list[bytes], columns: list[str]) -> None:
    """For any messages, side by side in one batch, and any columns in any order: the same values, in Spark's types."""
    expected = [expected_row(raw) for raw in messages]
    assert _rows(messages, columns) == [{name: row[name] for name in columns} for row in expected]


def test_rows_with_more_names_than_one_pass_takes_equal_the_general_decoders() -> None:
    """As where each event has names of properties of its own."""
    messages = [_event(each, properties={"shared": "a", f"own {each}": str(each)}) for each in range(400)]
    columns = ["sequenceNumber", "properties", "systemProperties"]
    assert _rows(messages, columns) == [{name: expected_row(raw)[name] for name in columns} for raw in messages]


@given(message=_messages(), other=_messages(), data=st.data(), columns=_columns)
def test_rows_of_a_damaged_message_equal_the_general_decoder(
    message: bytes, other: bytes, data: st.DataObject, columns: list[str]
) -> None:
    """A message cut off or with a byte changed gives the general decoder's row, or `EventError` where that has none.

    Where only what is not read is damaged, a row may be given that the general decoder refuses.
    """
    if data.draw(st.booleans()):
        damaged = message[: data.draw(st.integers(0, len(message) - 1))]
    else:
        at = data.draw(st.integers(0, len(message) - 1))
        damaged = message[:at] + bytes([data.draw(st.integers(0, 255))]) + message[at + 1 :]
    try:
        expected = expected_row(damaged)
    except EventError:
        expected = None
    try:
        rows = _rows([other, damaged, other], columns)
    except EventError:
        assert expected is None
        return
    whole = expected_row(other)
    assert rows[0] == rows[2] == {name: whole[name] for name in columns}
    if expected is not None:
        assert rows[1] == {name: expected[name] for name in columns}


def _event(number: int, **more: Any) -> bytes:
    body = more.pop("body", b"x")
    return ReceivedEvent.build(
        body, offset=str(number * 100), sequence_number=number, enqueued_time=EPOCH + timedelta(days=20_000), **more
    ).raw


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("plain", "plain"), (Symbol("s"), "s"), (Char("c"), "c"), (UInt(7), "7"), (ULong(2**64 - 1), str(2**64 - 1)),
        (5, "5"), (-5, "-5"), (True, "true"), (None, None), (1.5, "1.5"), (float("nan"), '"nan"'),
        (b"\x00\x01", '"AAE="'), (uuid.UUID(int=1), '"00000000-0000-0000-0000-000000000001"'),
        (Timestamp(0), '"1970-01-01T00:00:00.000Z"'), ([1, "a"], '[1,"a"]'), ({"k": [True]}, '{"k":[true]}'),
        (Described(Symbol("d"), 1), '{"descriptor":"d","value":1}'),
    ],
)  # fmt: skip
def test_rows_keep_text_and_write_other_values_as_json(value: Any, text: str | None) -> None:
    """Text and unsigned integers are kept as they are; everything else is JSON that a reader can parse."""
    assert text_of(value) == text
    assert _rows([_event(1, properties={"p": value})], ["properties"]) == [{"properties": {"p": text}}] or isinstance(
        value, (list, dict, Described)
    )
    if text is not None and not isinstance(value, (str, UInt, ULong)):
        json.loads(text)


def test_types_of_properties_are_those_of_amqp() -> None:
    """By name, in every form that the codec writes; text and null are no entries."""
    values: dict[str, list[Any]] = {
        "boolean": [True, False], "ubyte": [UByte(0), UByte(255)], "ushort": [UShort(1)],
        "uint": [UInt(0), UInt(5), UInt(2**32 - 1)], "ulong": [ULong(0), ULong(5), ULong(2**64 - 1)],
        "byte": [Byte(-1)], "short": [Short(-1)], "int": [Int(1), Int(2**31 - 1)], "long": [1, 2**40],
        "float": [Float(0.5)], "double": [0.5], "char": [Char("c")], "timestamp": [Timestamp(0)],
        "uuid": [uuid.UUID(int=1)], "binary": [b"", b"x" * 300], "symbol": [Symbol("s"), Symbol("s" * 300)],
        "decimal32": [Decimal32(bytes(4))], "decimal64": [Decimal64(bytes(8))], "decimal128": [Decimal128(bytes(16))],
    }  # fmt: skip
    given = {f"{kind} {number}": each for kind, several in values.items() for number, each in enumerate(several)}
    for name, value in given.items():
        (row,) = _rows([_event(1, properties={name: value, "text": "5", "none": None})], ["propertyTypes"])
        assert row["propertyTypes"] == {name: name.split()[0]}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"body": b"data"}, b"data"), ({"body": b""}, b""), ({"body": None, "value": "text"}, b"text"),
        ({"body": None, "value": b"raw"}, b"raw"), ({"body": None, "value": {"k": 1}}, b'{"k":1}'),
        ({"body": None, "sequence": [1, "a"]}, b'[1,"a"]'),
    ],
)  # fmt: skip
def test_rows_have_bodies_of_every_kind(body: dict[str, Any], expected: bytes) -> None:
    """Data is given as it is; a value or a sequence as its text."""
    assert _rows([_event(1, **body)], ["body"]) == [{"body": expected}]


def test_rows_of_null_data_have_an_empty_body() -> None:
    """Null in place of data is an empty body, not a missing one, also among events that have one."""
    sound = _event(1, body=b"data")
    null = ReceivedEvent(sound).raw.removesuffix(encode_data(b"data")) + NULL_DATA
    assert [row["body"] for row in _rows([sound, null, sound], ["body", "offset"])] == [b"data", b"", b"data"]


@pytest.mark.parametrize("moment", [0, -1, 253_402_300_799_999, 253_402_300_800_000, 2**63 - 1, -(2**63)])
def test_rows_clamp_times_beyond_the_calendar(moment: int) -> None:
    """An enqueued time that no `datetime` holds is the nearest that one does, as the general decoder says."""
    raw = _event(1)
    at = raw.index(ENQUEUED_TIME.encode()) + len(ENQUEUED_TIME) + 1
    far = raw[:at] + moment.to_bytes(8, "big", signed=True) + raw[at + 8 :]
    row = expected_row(far)
    assert _rows([raw, far], ["enqueuedTime"])[1] == {"enqueuedTime": row["enqueuedTime"]}


def test_rows_of_usual_messages_need_no_general_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages of the usual forms, mixed and with any of the columns, never meet the general decoder."""
    messages = [
        _event(1),
        _event(2, partition_key="sensor-7"),
        _event(300, body=b"x" * 1000, properties={"kind": "trade", "n": 5, "ok": True, "none": None}),
        _event(4, properties={f"p{number}": str(number) for number in range(20)}, message_id="m", subject="s"),
        _event(2**40, content_type="application/json", correlation_id=uuid.uuid4(), group_sequence=3),
    ]
    expected = [expected_row(raw) for raw in messages]

    def refuse(event: ReceivedEvent, raw: bytes) -> None:
        raise AssertionError("a message was decoded by itself")

    with monkeypatch.context() as patched:
        patched.setattr(ReceivedEvent, "__init__", refuse)
        assert _rows(messages, list(COLUMNS)) == expected


def test_rows_decode_only_the_columns_that_are_read() -> None:
    """A message whose properties are damaged gives the columns that are asked for."""
    raw = _event(1, properties={"name": "value"})
    damaged = raw.replace(encode("value"), b"\xa1\x05\xff\xff\xff\xff\xff")
    assert damaged != raw
    assert _rows([damaged], ["body", "sequenceNumber", "offset"]) == [
        {"body": b"x", "sequenceNumber": 1, "offset": "100"}
    ]
    with pytest.raises(EventError, match="partition 7, event 1: "):
        _rows([_event(0), damaged], ["properties"])


def _with_section(code: int, kind: int, count: int, content: bytes) -> bytes:
    """Make a usual event with a section written by hand, its size being that of its content."""
    raw = _event(1)
    at = raw.index(b"\x00\x53\x75")
    return raw[:at] + bytes((0, 0x53, code, kind, len(content) + 1, count)) + content + raw[at:]


_A, _ONE, _TWO = encode("a"), encode("1"), encode("2")


def test_rows_take_the_later_value_of_a_repeated_name() -> None:
    """Of two values under one name the later is given, as a dictionary has it: Spark's maps have a key once."""
    raw = _with_section(0x74, 0xC1, 4, _A + _ONE + _A + _TWO)
    assert _rows([_event(0), raw, _event(2)], ["properties"])[1] == {"properties": {"a": "2"}}


@pytest.mark.parametrize(
    ("code", "kind", "count", "content"),
    [
        (0x74, 0xC1, 2, _A + _ONE + b"\x40\x40"), (0x74, 0xC1, 3, _A + _ONE + _A), (0x74, 0xC1, 4, _A + _ONE),
        (0x74, 0xC1, 2, _A + b"\xa1\x03zz"), (0x74, 0xC1, 2, _A + b"\xb1\x00\x00\x00\x09zz"), (0x74, 0xC1, 2, _A),
        (0x73, 0xC0, 1, _ONE + b"\x40"), (0x73, 0xC0, 2, _ONE), (0x73, 0xC0, 1, b"\xa1\x03zz"),
        (0x73, 0xC0, 14, b"\x40" * 14),
    ],
)  # fmt: skip
def test_rows_of_a_map_that_does_not_fit_its_items_raise(code: int, kind: int, count: int, content: bytes) -> None:
    """Items beyond their section, and sections beyond their items, are refused as the general decoder refuses them."""
    raw = _with_section(code, kind, count, content)
    with pytest.raises(EventError):
        getattr(ReceivedEvent(raw), "properties" if code == 0x74 else "system_properties")
    with pytest.raises(EventError):
        _rows([_event(0), raw, _event(2)], ["properties" if code == 0x74 else "systemProperties"])


def test_rows_of_no_events_are_an_empty_batch() -> None:
    """No events make an empty batch with the right schema."""
    assert _rows([], list(COLUMNS)) == []


@given(messages=st.lists(_messages(), max_size=4), applied=st.lists(st.sampled_from([GZIP, OLD_KEY]), unique=True))
def test_bodies_are_decoded_where_codecs_are_named(messages: list[bytes], applied: list[PayloadCodec]) -> None:
    """Beside events of any other kind, whose rows are as without codecs."""
    encode = encoder([*applied, DEFLATE])
    assert encode is not None
    sent = encode(EventData(b"body"))
    place: dict[str, Any] = {"offset": "1", "sequence_number": 1, "enqueued_time": EPOCH}
    raw = ReceivedEvent.build(sent.body, content_encoding=(sent.standard or {})["content_encoding"], **place).raw
    mixed = [*messages, raw, *messages]
    plain = RowEncoder(["body", "offset"]).encode([PartitionMessages("7", mixed)]).to_pydict()
    made = RowEncoder(["body", "offset"], [GZIP, OLD_KEY, DEFLATE]).encode([PartitionMessages("7", mixed)]).to_pydict()
    assert made["offset"] == plain["offset"]
    assert made["body"] == [*plain["body"][: len(messages)], b"body", *plain["body"][len(messages) + 1 :]]


@pytest.mark.parametrize(
    ("codecs", "left"), [([GZIP, DEFLATE], {}), ([DEFLATE], {"content-encoding": "gzip"}), ([GZIP], None)]
)
def test_system_properties_name_no_encoding_that_is_decoded(
    codecs: list[PayloadCodec], left: dict[str, str] | None
) -> None:
    """A row that is published again would be taken for encoded otherwise. None: nothing could be decoded."""
    encode = encoder([GZIP, DEFLATE])
    assert encode is not None
    sent = encode(EventData(b"body", content_type="text/plain"))
    place: dict[str, Any] = {"offset": "1", "sequence_number": 1, "enqueued_time": EPOCH}
    raws = [ReceivedEvent.build(sent.body, **(sent.standard or {}), **place).raw, _event(2, message_id="m")]
    names = ["body", "systemProperties", "systemPropertyTypes"]
    made = RowEncoder(names, codecs).encode([PartitionMessages("7", raws)]).to_pylist()
    whole = {"content-encoding": (sent.standard or {})["content_encoding"]}
    left = whole if left is None else left
    assert dict(made[0]["systemProperties"]) == {"content-type": "text/plain", **left}
    assert dict(made[0]["systemPropertyTypes"]) == dict.fromkeys(["content-type", *left], "symbol")
    assert (made[0]["body"] == b"body") == (not left)
    assert dict(made[1]["systemProperties"]) == {"message-id": "m"}


def test_body_that_cannot_be_decoded_is_an_error_that_names_the_event() -> None:
    """And only if the column is asked for."""
    place: dict[str, Any] = {"offset": "1", "sequence_number": 5, "enqueued_time": EPOCH}
    sound = [ReceivedEvent.build(b"body", **place).raw]
    damaged = [*sound, ReceivedEvent.build(b"no gzip", content_encoding="gzip", **place).raw]
    events = [PartitionMessages("3", sound), PartitionMessages("7", damaged), PartitionMessages("9", sound)]
    with pytest.raises(DecodeError, match=r"^partition 7, event 5: "):
        RowEncoder(["body"], [GZIP]).encode(events)
    made = RowEncoder(["partition", "offset"], [GZIP]).encode(events).to_pydict()
    assert made == {"partition": ["3", "7", "7", "9"], "offset": ["1"] * 4}
