"""Rows become the events that the producers would send, routed as the service would, and what cannot is named."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    ByteType,
    DataType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructType,
    TimestampType,
)

from eventpump import EventData
from eventpump.amqp.message import Data, Message, Properties
from eventpump.amqp.types import (
    Byte,
    Float,
    Int,
    Short,
    Symbol,
    Timestamp,
    ULong,
)
from eventpump.core.router import RingRouter
from eventpump.errors import ConfigurationError, EventError
from eventpump.eventhubs.codecs import PayloadCodec
from eventpump.eventhubs.codecs import encoder as payload_encoder
from eventpump.eventhubs.envelope import envelope_head
from eventpump.eventhubs.hashing import partition_for_key
from eventpump.eventhubs.names import ENQUEUED_TIME, OFFSET, PARTITION_KEY, SEQUENCE_NUMBER
from eventpump.eventhubs.sealing import SealedBatch, pieces
from eventpump.eventhubs.stamps import stamped
from eventpump.spark.connection import SparkConnection
from eventpump.spark.sink.columns import EventColumns
from eventpump.spark.sink.encode import ANYWHERE, NOWHERE, EventEncoder, SinkRouter, bad_row, hashed
from eventpump.spark.sink.foreach_batch import SinkSettings, stamp_room
from eventpump.spark.sink.records import PackingLimits, PartitionPlan, Plan, Sink
from eventpump.spark.source.rows import PartitionMessages, RowEncoder, text_of, type_of
from eventpump.spark.source.schema import COLUMN_TYPES, TYPE_COLUMNS
from tests.support.codecs import DEFLATE, GZIP
from tests.support.values import SCALARS

TEXT = StringType()
MAP = MapType(TEXT, TEXT)


def schema(**columns: DataType) -> StructType:
    made = StructType()
    for name, kind in columns.items():
        made.add(name, kind)
    return made


def encoder(columns: EventColumns, *, partition_count: int = 4, limit: int = 1024 * 1024) -> EventEncoder:
    return EventEncoder(columns, partition_count=partition_count, max_message_size=limit)


def batch(**columns: pa.Array) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict(columns)


# ----------------------------------------------------------------------------------------------------- columns


def test_columns_are_found_in_any_case() -> None:
    """The connector's columns, under both names of the partition, in any case; what else there is does not matter."""
    found = EventColumns.of(schema(Other=LongType(), BODY=BinaryType(), partitionid=IntegerType(), Properties=MAP))
    assert found == EventColumns("BODY", partition="partitionid", properties="Properties")
    assert found.names == ["BODY", "partitionid", "Properties"]
    found = EventColumns.of(schema(body=TEXT, partitionKey=TEXT, at=TimestampType()), ["AT"])
    assert found.names == ["body", "partitionKey", "at"]


@pytest.mark.parametrize(
    ("columns", "order_by", "field"),
    [
        ({"value": TEXT}, (), "body"),
        ({"body": TEXT, "Topic": TEXT}, (), "Topic"),
        ({"body": TEXT, "hub": TEXT}, (), "hub"),
        ({"body": LongType()}, (), "body"),
        ({"body": TEXT, "Body": TEXT}, (), "Body"),
        ({"body": TEXT, "partition": MAP}, (), "partition"),
        ({"body": TEXT, "partition": TEXT, "partitionId": TEXT}, (), "partitionId"),
        ({"body": TEXT, "partition": TEXT, "partitionKey": TEXT}, (), "partitionKey"),
        ({"body": TEXT, "partitionKey": LongType()}, (), "partitionKey"),
        ({"body": TEXT, "properties": ArrayType(TEXT)}, (), "properties"),
        ({"body": TEXT, "properties": MapType(TEXT, ArrayType(TEXT))}, (), "properties"),
        ({"body": TEXT, "properties": MapType(LongType(), TEXT)}, (), "properties"),
        ({"body": TEXT, "properties": StructType().add("a", MAP)}, (), "properties"),
        ({"body": TEXT, "properties": StructType().add("a", DecimalType(5, 2))}, (), "properties"),
        ({"body": TEXT, "properties": StructType().add("a", TEXT).add("a", TEXT)}, (), "properties"),
        ({"body": TEXT, "properties": TEXT}, (), "properties"),
        ({"body": TEXT, "propertyTypes": MAP}, (), "propertyTypes"),
        ({"body": TEXT, "properties": MapType(TEXT, LongType()), "propertyTypes": MAP}, (), "propertyTypes"),
        ({"body": TEXT, "systemPropertyTypes": MAP}, (), "systemPropertyTypes"),
        ({"body": TEXT, "systemProperties": MapType(TEXT, LongType())}, (), "systemProperties"),
        ({"body": TEXT, "contentType": LongType()}, (), "contentType"),
        ({"body": TEXT, "correlationId": MAP}, (), "correlationId"),
        ({"body": TEXT, "messageId": TimestampType()}, (), "messageId"),
        ({"body": TEXT}, ("at",), "order_by"),
        ({"body": TEXT, "at": MAP}, ("at",), "order_by"),
    ],
)
def test_columns_that_cannot_be_published_are_named(
    columns: dict[str, DataType], order_by: tuple[str, ...], field: str
) -> None:
    """A missing column, a wrong type, or two that exclude each other is an error that names the column."""
    with pytest.raises(ConfigurationError) as caught:
        EventColumns.of(schema(**columns), order_by)
    assert caught.value.field == field


_RENAMED = '.withColumnRenamed("value", "body")'
_AS_KEY = '.selectExpr("*", "string(key) AS partitionKey")'


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        ({"key": BinaryType(), "value": BinaryType(), "n": TEXT}, f"it has: key, value, n. Write {_RENAMED}{_AS_KEY}"),
        ({"key": TEXT, "value": MAP}, 'it has: key, value. Write .withColumnRenamed("key", "body")'),
        ({"Value": TEXT}, 'it has: Value. Write .withColumnRenamed("Value", "body")'),
        ({"line": TEXT, "n": LongType()}, 'it has: line, n. Write .withColumnRenamed("line", "body")'),
        ({"a": TEXT, "b": TEXT}, 'it has: a, b. Add it, such as .selectExpr("*", "to_json(struct(*)) AS body")'),
        ({}, "it has: no columns. Add it"),
        ({f"c{n}": LongType() for n in range(30)}, "c18, c19 and 10 more. Add it"),
    ],
)
def test_of_without_a_body_names_the_existing_columns(columns: dict[str, DataType], problem: str) -> None:
    """The error has the columns of the DataFrame, and what to write: for Kafka's columns too."""
    with pytest.raises(ConfigurationError) as caught:
        EventColumns.of(schema(**columns))
    assert str(caught.value).startswith("body: the DataFrame has no such column; it has: ")
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        ({"body": LongType()}, 'must be string or binary, not bigint: select "string(body) AS body"'),
        ({"body": ArrayType(TEXT)}, 'not array<string>: select "to_json(body) AS body"'),
        ({"body": TEXT, "partitionKey": BinaryType()}, 'not binary: select "string(partitionKey) AS partitionKey"'),
        (
            {"body": TEXT, "partition": TEXT, "partitionKey": TEXT},
            (
                '.drop("partition") sends each row by its key, and a row without key to any partition; '
                '.drop("partitionKey") sends each row to the partition of its number, without a key'
            ),
        ),
    ],
)
def test_of_unpublishable_columns_suggests_a_select(columns: dict[str, DataType], problem: str) -> None:
    """The error of a wrong type has the cast, and that of the source's unselected rows which column to drop."""
    with pytest.raises(ConfigurationError) as caught:
        EventColumns.of(schema(**columns))
    assert problem in str(caught.value)


def test_of_without_the_ordering_column_names_the_existing_columns() -> None:
    """As the body."""
    with pytest.raises(ConfigurationError, match="no column at; it has: body, time"):
        EventColumns.of(schema(body=TEXT, time=TimestampType()), ["at"])


# ------------------------------------------------------------------------------------------------------ events

ROWS = st.lists(
    st.tuples(
        st.binary(max_size=400),
        st.none() | st.text(max_size=20),
        st.none()
        | st.dictionaries(st.text("abc", max_size=300), st.none() | st.text("xyzß", max_size=300), max_size=3),
    ),
    min_size=1,
)


@given(ROWS, st.integers(0, 3))
def test_encode_gives_the_bytes_of_event_data(
    rows: list[tuple[bytes, str | None, dict[str, str | None] | None]], cut: int
) -> None:
    """Body, properties and key of a row give the bytes that `EventData` gives, also in a slice of a batch."""
    bodies, keys, properties = zip(*rows, strict=True)
    whole = batch(
        body=pa.array(bodies, pa.binary()),
        partitionKey=pa.array(keys, pa.string()),
        properties=pa.array(
            [None if each is None else list(each.items()) for each in properties], pa.map_(pa.string(), pa.string())
        ),
    )
    columns = EventColumns("body", partition_key="partitionKey", properties="properties")
    partitions, events = encoder(columns).encode(whole.slice(cut))
    for (body, key, named), partition, event in zip(rows[cut:], partitions, events, strict=True):
        assert event == EventData(body, properties=dict(sorted((named or {}).items()))).encode(key)
        assert partition == (ANYWHERE if key is None else partition_for_key(key, 4))


_ASCII = st.text(st.characters(max_codepoint=127), max_size=12)
_NAMES = st.text(max_size=10)
_MOMENTS = st.integers(-62_135_596_800_000, 253_402_300_799_999).map(Timestamp)
_VALUES: st.SearchStrategy[Any] = st.one_of(
    *(each for name, each in SCALARS.items() if name not in {"float", "double", "timestamp"}),
    st.sampled_from(["5", "true", '"quoted"', "null", "", "1.0"]),
    st.floats(allow_nan=False),
    st.floats(width=32, allow_nan=False).map(Float),
    st.just(float("nan")),
    _MOMENTS,
)
_IDS = st.none() | st.one_of(st.text(max_size=8), st.uuids(), st.binary(max_size=5), SCALARS["ulong"])
_ADDRESSES = st.none() | st.text(max_size=8) | SCALARS["symbol"]
_STANDARD = st.builds(
    Properties,
    message_id=_IDS,
    user_id=st.none() | st.binary(max_size=5),
    to=_ADDRESSES,
    subject=st.none() | st.text(max_size=8),
    reply_to=_ADDRESSES,
    correlation_id=_IDS,
    content_type=st.none() | _ASCII,
    content_encoding=st.none() | _ASCII,
    absolute_expiry_time=st.none() | _MOMENTS,
    creation_time=st.none() | _MOMENTS,
    group_id=st.none() | st.text(max_size=8),
    group_sequence=st.none() | st.integers(0, 2**32 - 1),
    reply_to_group_id=st.none() | st.text(max_size=8),
)
_SOURCE_COLUMNS = [
    "body",
    "partitionKey",
    "publisher",
    "properties",
    "systemProperties",
    "sequenceNumber",
    *TYPE_COLUMNS,
]
_STORED: dict[Any, Any] = {SEQUENCE_NUMBER: 5, OFFSET: "500", ENQUEUED_TIME: Timestamp(0), Symbol("x-opt-other"): 1}


def source_schema(names: Sequence[str] = _SOURCE_COLUMNS) -> StructType:
    """Return the schema of the source's rows, as Spark has it."""
    kinds = {"binary": BinaryType(), "string": TEXT, "bigint": LongType(), "map<string,string>": MAP}
    types = {**COLUMN_TYPES, **TYPE_COLUMNS}
    return schema(**{name: kinds[types[name].lower().replace(" ", "")] for name in names})


def published_again(raws: Sequence[bytes], names: Sequence[str] = _SOURCE_COLUMNS) -> list[bytes]:
    """Read messages as the source does, and encode the rows as the sink does."""
    rows = RowEncoder(names).encode([PartitionMessages("0", raws)])
    columns = EventColumns.of(source_schema(names))
    return encoder(columns).encode(rows.select(columns.names))[1]


@given(st.lists(st.tuples(st.binary(max_size=9), _STANDARD, st.dictionaries(_NAMES, _VALUES, max_size=5)), max_size=4))
def test_event_of_another_hub_is_published_as_it_was(events: list[tuple[bytes, Properties, dict[str, Any]]]) -> None:
    """*Copy*: what the source returns of any event, types included, gives the same event again: an int stays an int,
    text of digits stays text, and ids stay what they were."""
    raws = [
        Message(Data((body,)), standard, values, _STORED | ({PARTITION_KEY: "k"} if number % 2 else {})).encode()
        for number, (body, standard, values) in enumerate(events)
    ]
    for number, ((body, standard, values), event) in enumerate(zip(events, published_again(raws), strict=True)):
        expected = Message(Data((body,)))
        if any(getattr(standard, field.name) is not None for field in fields(standard)):
            expected.properties = standard
        if values:
            expected.application_properties = dict(sorted(values.items()))
        assert event == (envelope_head("k") if number % 2 else b"") + expected.encode()


def test_event_of_another_hub_without_types_is_published_as_text() -> None:
    """Without `includePropertyTypes`, properties are text; standard properties are kept where text is enough."""
    sent = Message(
        Data((b"x",)),
        Properties(message_id=ULong(5), content_type="text/plain", user_id=b"u", creation_time=Timestamp(7)),
        {"n": Int(5), "t": "5"},
        _STORED,
    )
    names = [name for name in _SOURCE_COLUMNS if name not in TYPE_COLUMNS]
    (event,) = published_again([sent.encode()], names)
    assert (
        event
        == Message(
            Data((b"x",)),
            Properties(message_id="5", content_type="text/plain", user_id=b"u", creation_time=Timestamp(7)),
            {"n": "5", "t": "5"},
        ).encode()
    )


_UTC = pa.timestamp("us", tz="UTC")
_TYPED: dict[str, tuple[DataType, pa.DataType, st.SearchStrategy[Any], Callable[[Any], Any]]] = {
    "boolean": (BooleanType(), pa.bool_(), st.booleans(), bool),
    "byte": (ByteType(), pa.int8(), st.integers(-128, 127), Byte),
    "short": (ShortType(), pa.int16(), st.integers(-(2**15), 2**15 - 1), Short),
    "int": (IntegerType(), pa.int32(), st.integers(-(2**31), 2**31 - 1), Int),
    "long": (LongType(), pa.int64(), st.integers(-(2**63), 2**63 - 1), int),
    "float": (FloatType(), pa.float32(), st.floats(width=32, allow_nan=False) | st.sampled_from([0.0, -0.0]), Float),
    "double": (DoubleType(), pa.float64(), st.floats(allow_nan=False) | st.sampled_from([0.0, -0.0]), float),
    "string": (TEXT, pa.string(), st.text(max_size=9), str),
    "large string": (TEXT, pa.large_string(), st.text(max_size=9), str),
    "binary": (BinaryType(), pa.binary(), st.binary(max_size=9), bytes),
    "timestamp": (TimestampType(), _UTC, st.integers(-(2**53), 2**53), lambda micros: Timestamp(micros // 1000)),
}
"""Spark's type, Arrow's, values as Arrow takes them, and what makes their AMQP values."""


def _as_read(event: bytes) -> tuple[dict[str, str], dict[str, str]]:
    """Return the columns of properties and of their types, as the source returns them of a published event."""
    message = Message.decode(event)
    message.message_annotations = _STORED
    (row,) = (
        RowEncoder(["properties", "propertyTypes"]).encode([PartitionMessages("0", [message.encode()])]).to_pylist()
    )
    return dict(row["properties"]), dict(row["propertyTypes"])


@given(st.data())
@pytest.mark.parametrize("kind", _TYPED)
def test_typed_properties_of_rows_are_read_with_their_types(kind: str, data: st.DataObject) -> None:
    """Row, event, row: a map of each simple type, and a struct, are published with these types; a null in a struct is
    left out, and one in a map is null. Equal values of different types are not confused, nor 0.0 with -0.0."""
    _, arrow, values, amqp = _TYPED[kind]
    rows = data.draw(
        st.lists(st.none() | st.dictionaries(_NAMES, st.none() | values, max_size=3), min_size=1, max_size=4)
    )
    maps = pa.array([None if row is None else list(row.items()) for row in rows], pa.map_(pa.string(), arrow))
    bodies = pa.array([b"x"] * len(rows))
    columns = EventColumns.of(schema(body=BinaryType(), properties=MapType(TEXT, _TYPED[kind][0])))
    _, events = encoder(columns).encode(batch(body=bodies, properties=maps).slice(1))
    for row, event in zip(rows[1:], events, strict=True):
        typed = {name: None if value is None else amqp(value) for name, value in sorted((row or {}).items())}
        assert event == EventData(b"x", properties=typed).encode()
        texts = {name: text_of(value) for name, value in typed.items()}
        types = {name: type_of(value) for name, value in typed.items()}
        assert _as_read(event) == (texts, {name: each for name, each in types.items() if each is not None})


def test_equal_values_of_different_types_are_not_confused() -> None:
    """For Python, 1, 1.0 and True are equal, and 0.0 and -0.0 too; what is remembered of one is not the other's."""
    typed: list[tuple[DataType, pa.DataType, Any, Any]] = [
        (LongType(), pa.int64(), 1, 1), (IntegerType(), pa.int32(), 1, Int(1)), (BooleanType(), pa.bool_(), True, True),
        (DoubleType(), pa.float64(), 1.0, 1.0), (FloatType(), pa.float32(), 1.0, Float(1.0)),
        (DoubleType(), pa.float64(), 0.0, 0.0), (DoubleType(), pa.float64(), -0.0, -0.0),
    ]  # fmt: skip
    for spark, arrow, value, amqp in typed:
        columns = EventColumns.of(schema(body=BinaryType(), properties=MapType(TEXT, spark)))
        rows = batch(body=pa.array([b"x"]), properties=pa.array([[("p", value)]], pa.map_(pa.string(), arrow)))
        assert encoder(columns).encode(rows)[1] == [EventData(b"x", properties={"p": amqp}).encode()]


@given(st.data(), st.lists(st.sampled_from(list(_TYPED)), min_size=1, max_size=5))
def test_structs_of_rows_are_read_with_their_types(data: st.DataObject, kinds: list[str]) -> None:
    """A struct mixes types; in slices too."""
    names = [f"{kind} {number}" for number, kind in enumerate(kinds)]
    row = st.fixed_dictionaries({name: st.none() | _TYPED[kind][2] for name, kind in zip(names, kinds, strict=True)})
    rows = data.draw(st.lists(st.none() | row, min_size=1, max_size=4))
    structs = pa.array(rows, pa.struct([(name, _TYPED[kind][1]) for name, kind in zip(names, kinds, strict=True)]))
    spark = StructType()
    for name, kind in zip(names, kinds, strict=True):
        spark.add(name, _TYPED[kind][0])
    columns = EventColumns.of(schema(body=BinaryType(), properties=spark))
    whole = batch(body=pa.array([b"x"] * len(rows)), properties=structs)
    _, events = encoder(columns).encode(whole.slice(1))
    amqp = {name: _TYPED[kind][3] for name, kind in zip(names, kinds, strict=True)}
    for found, event in zip(rows[1:], events, strict=True):
        typed = {name: amqp[name](value) for name, value in sorted((found or {}).items()) if value is not None}
        assert event == EventData(b"x", properties=typed).encode()


@pytest.mark.parametrize("codecs", [(), (GZIP, DEFLATE)])
def test_ids_and_content_type_of_rows_are_published(codecs: tuple[PayloadCodec, ...]) -> None:
    """Ids are text, unsigned numbers or binary; a column that is not null comes before the system properties, and
    codecs add to the content encoding."""
    system = [
        [("message-id", "old"), ("subject", "s"), ("content-encoding", "br"), ("x-opt-other", "1")],
        [("message-id", "old")],
        None,
        [("correlation-id", "old"), ("content-type", "old")],
    ]
    rows = batch(
        body=pa.array([b"a", b"b", b"c", b"d"]),
        contentType=pa.array(["text/plain", None, None, "new"]),
        correlationId=pa.array([5, None, 2**40, 6]),
        messageId=pa.array([None, b"m", None, None], pa.binary()),
        systemProperties=pa.array(system, pa.map_(pa.string(), pa.string())),
    )
    kinds = {"contentType": TEXT, "correlationId": LongType(), "messageId": BinaryType(), "systemProperties": MAP}
    columns = EventColumns.of(schema(body=BinaryType(), **kinds))
    made = EventEncoder(columns, partition_count=4, max_message_size=10**6, codecs=codecs)
    _, events = made.encode(rows.select(columns.names))
    standard: list[dict[str, Any]] = [
        {"message_id": "old", "subject": "s", "content_encoding": "br", "content_type": "text/plain"},
        {"message_id": b"m"},
        {"correlation_id": ULong(2**40)},
        {"correlation_id": ULong(6), "content_type": "new"},
    ]
    standard[0]["correlation_id"] = ULong(5)
    encode = payload_encoder(list(codecs)) or (lambda event: event)
    assert events == [
        encode(EventData(body, **given)).encode()
        for body, given in zip([b"a", b"b", b"c", b"d"], standard, strict=True)
    ]


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("five", "int"), ("5.0", "int"), (str(2**31), "int"), ("-1", "ulong"), (str(2**63), "long"), ("256", "ubyte"),
        ("1", "boolean"), ("yes", "boolean"), ("ab", "char"), ("ü", "symbol"), ("x", "double"), ('"', "double"),
        ("tomorrow", "timestamp"), ("5", "timestamp"), ("not one", "uuid"), ("ä", "binary"), ("YQ==", "decimal32"),
        ("1e400", "float"), ("1e39", "float"),
    ],
)  # fmt: skip
def test_text_that_is_not_of_its_type_is_named(text: str, kind: str) -> None:
    """The error has the row, the property and the type, and does not show the value."""
    columns = EventColumns.of(schema(body=TEXT, properties=MAP, propertyTypes=MAP))
    kinds = pa.map_(pa.string(), pa.string())
    rows = batch(
        body=pa.array(["a", "b"]),
        properties=pa.array([None, [("p", text)]], kinds),
        propertyTypes=pa.array([None, [("p", kind)]], kinds),
    )
    if (text, kind) == ("1e400", "float"):  # infinity is a float
        assert encoder(columns).encode(rows)[1][1] == EventData("b", properties={"p": Float("inf")}).encode()
        return
    with pytest.raises(
        EventError, match=rf"row 1 .*: properties: the value of 'p' is not the text of AMQP's type {kind}"
    ):
        encoder(columns).encode(rows)


def test_types_without_a_text_form_are_named() -> None:
    """A list is not made of its JSON text, because the types of its items are not known. Types of names that are not
    there do not matter."""
    columns = EventColumns.of(schema(body=TEXT, properties=MAP, propertyTypes=MAP))
    kinds = pa.map_(pa.string(), pa.string())
    body, types = pa.array(["a"]), pa.array([[("p", "list"), ("q", "no type")]], kinds)
    with pytest.raises(EventError, match="'p' is of the type list; it must be one of string, symbol, "):
        encoder(columns).encode(batch(body=body, properties=pa.array([[("p", "[1]")]], kinds), propertyTypes=types))
    _, events = encoder(columns).encode(
        batch(body=body, properties=pa.array([[("r", "1"), ("p", None)]], kinds), propertyTypes=types)
    )
    assert events == [EventData("a", properties={"p": None, "r": "1"}).encode()]


@pytest.mark.parametrize("properties", [None, []])
def test_types_without_properties_make_no_section(properties: list[Any] | None) -> None:
    """A row without properties is the same event whether its types are empty, null, or of other names."""
    columns = EventColumns.of(schema(body=TEXT, properties=MAP, propertyTypes=MAP))
    kinds = pa.map_(pa.string(), pa.string())
    _, events = encoder(columns).encode(
        batch(
            body=pa.array(["a"] * 3),
            properties=pa.array([properties] * 3, kinds),
            propertyTypes=pa.array([[("p", "long")], [], None], kinds),
        )
    )
    assert events == [EventData("a").encode()] * 3


@pytest.mark.parametrize(
    ("form", "rows", "size"),
    [*((form, 50, 100_000) for form in ("texts", "values", "typed", "no text")), ("texts", 9_000, 100)],
)
def test_memory_of_the_encoder_does_not_grow_with_properties(form: str, rows: int, size: int) -> None:
    """*Memory*: a worker lives for days, and encodes properties of any size that never come again."""
    texts, types = pa.map_(pa.string(), pa.string()), {"typed": "symbol", "no text": "double"}
    kind = pa.map_(pa.string(), pa.binary()) if form == "values" else texts
    arrays = {"body": pa.array([b""] * 10), "propertyTypes": pa.array([[("p", types.get(form))]] * 10, texts)}
    is_typed = form in types
    columns = EventColumns("body", properties="properties", property_types="propertyTypes" if is_typed else None)

    def publish(start: int, end: int) -> None:
        encode = encoder(columns)
        for first in range(start, end, 10):
            properties = [[("p", f"{each:0{size}}")] for each in range(first, first + 10)]
            encode.encode(batch(**arrays, properties=pa.array(properties, kind)).select(columns.names))

    publish(0, 10)
    tracemalloc.start()
    try:
        publish(10, rows + 10)
        grown = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert grown < 4_000_000


@pytest.mark.parametrize(
    ("column", "value", "problem"),
    [
        ("messageId", -1, "the id -1 is negative"),
        ("correlationId", -(2**40), "the id -1099511627776 is negative"),
        ("contentType", "größe", "contentType is not ASCII"),
    ],
)
def test_standard_properties_that_cannot_be_published_are_named(column: str, value: Any, problem: str) -> None:
    """With their row."""
    columns = EventColumns.of(schema(body=TEXT, **{column: TEXT if isinstance(value, str) else LongType()}))
    with pytest.raises(EventError, match="row 1 ") as caught:
        encoder(columns).encode(batch(body=pa.array(["a", "b"]), **{column: pa.array([None, value])}))
    assert problem in str(caught.value)
    assert "größe" not in str(caught.value), "a value of the user's data is shown"


def test_encode_of_a_text_body_is_utf8() -> None:
    """A string column is published as UTF-8."""
    _, events = encoder(EventColumns("body")).encode(batch(body=pa.array(["straße"])))
    assert events == [EventData("straße").encode()]


@pytest.mark.parametrize("kind", [pa.string(), pa.int64(), pa.int8()])
def test_partition_column_is_kept(kind: pa.DataType) -> None:
    """A partition is given as text or number; null leaves it open."""
    given_ids: list[Any] = ["3", None, "0"] if kind == pa.string() else [3, None, 0]
    rows = batch(body=pa.array([b"a", b"b", b"c"]), partition=pa.array(given_ids, kind))
    partitions, _ = encoder(EventColumns("body", partition="partition")).encode(rows)
    assert partitions == [3, ANYWHERE, 0]


def test_hash_of_an_event_spreads_and_depends_on_it_alone() -> None:
    """Equal events go to one partition, different ones to all of them, and a partition that is given stays."""
    events = [b"%d" % (number // 2) for number in range(1000)]
    found = hashed([ANYWHERE] * 1000, events, 4)
    assert found[0::2] == found[1::2]
    assert all(200 < found.count(partition) < 300 for partition in range(4))
    assert hashed([2, ANYWHERE], [b"x", b"x"], 4)[0] == 2


# ------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("column", "value", "problem"),
    [
        ("body", None, "body is null"),
        ("partition", "4", "partition is '4'; it must be 0 to 3"),
        ("partition", "01", "partition is '01'; it must be 0 to 3"),
        ("partition", "x" * 100, "partition is 'xxx"),
    ],
)
def test_encode_of_a_row_that_cannot_be_an_event_names_it(column: str, value: str | None, problem: str) -> None:
    """The error gives the number of the row, counted over the batches of its task, and what is wrong with it."""
    columns: dict[str, list[str | None]] = {"body": ["a", "b", "c"], "partition": ["0", "1", None]}
    good = batch(**{name: pa.array(values) for name, values in columns.items()})
    columns[column][1] = value
    bad = batch(**{name: pa.array(values) for name, values in columns.items()})
    encode = encoder(EventColumns("body", partition="partition"))
    encode.encode(good)
    with pytest.raises(EventError, match="row 4") as caught:
        encode.encode(bad)
    assert problem in str(caught.value)
    assert len(str(caught.value)) < 160


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"partitionKey": "a key", "body": "secret"}, " (key 'a key')"),
        ({"partitionKey": "k" * 200, "body": "secret"}, " (key '" + "k" * 39 + ")"),
        ({"partition": "3", "sequenceNumber": 17, "body": "secret"}, " (partition 3, sequence number 17)"),
        ({"sequenceNumber": 17, "partitionKey": "k", "body": "secret"}, " (key 'k', sequence number 17)"),
        ({"partition": "3", "body": "secret"}, " (body of 6 bytes, crc32(body) = 1554180325)"),
        ({"partitionKey": None, "sequenceNumber": None, "body": "secret"}, " (body of 6 bytes, crc32(body) = "),
        ({"body": None}, ""),
        ({"body": None, "sequenceNumber": 4}, " (sequence number 4)"),
    ],
)
def test_row_that_cannot_be_an_event_is_named_by_what_it_has(given: dict[str, Any], name: str) -> None:
    """By its key and its position in the source; otherwise by length and hash of its body, never by its content."""
    kinds = {"body": TEXT, "partition": TEXT, "partitionKey": TEXT, "sequenceNumber": LongType()}
    columns = EventColumns.of(schema(**{column: kinds[column] for column in given}))
    arrays = {
        column: pa.array(
            [None if column != "body" else "x", value], pa.int64() if column == "sequenceNumber" else pa.string()
        )
        for column, value in given.items()
    }
    large = PayloadCodec("large", lambda body: body * 1000, bytes)
    codecs = [large] if given["body"] is not None else []
    made = EventEncoder(columns, partition_count=4, max_message_size=1500, codecs=codecs)
    with pytest.raises(EventError) as caught:
        made.encode(batch(**arrays).select(columns.names))
    assert str(caught.value).startswith(f"row 1 of the DataFrame's partition 0{name}")
    assert "secret" not in str(caught.value)


_NOT_UTF8 = pa.array([b"a", b"\xff\xed\xa0\x80"])


def _as_text(array: pa.Array) -> pa.Array:
    """Take bytes for text without a look at them, as Spark does."""
    return pa.Array.from_buffers(pa.string(), len(array), array.buffers())


@pytest.mark.parametrize(
    ("column", "value", "name"),
    [
        ("partitionKey", _as_text(_NOT_UTF8), " (body of 4 bytes, crc32(body) = "),
        ("contentType", _as_text(_NOT_UTF8), " (body of 4 bytes, crc32(body) = "),
        (
            "properties",
            pa.MapArray.from_arrays([0, 1, 2], pa.array(["a", "a"]), _as_text(_NOT_UTF8)),
            " (body of 4 bytes, crc32(body) = ",
        ),
    ],
)
def test_text_that_is_not_utf8_is_named(column: str, value: pa.Array, name: str) -> None:
    """Spark casts any bytes to text; the error names row and column, and the body may be such a text itself."""
    kinds = {"body": TEXT, "partitionKey": TEXT, "contentType": TEXT, "properties": MapType(TEXT, TEXT)}
    columns = EventColumns.of(schema(body=TEXT, **{column: kinds[column]}))
    rows = batch(**{"body": _as_text(_NOT_UTF8), column: value})
    with pytest.raises(EventError) as caught:
        encoder(columns).encode(rows.select(columns.names))
    assert str(caught.value).startswith(f"row 1 of the DataFrame's partition 0{name}")
    assert f"{column} has text that is not UTF-8" in str(caught.value)


def test_sequence_number_of_another_type_is_not_used() -> None:
    """It is only for errors, and so no type is wrong."""
    assert EventColumns.of(schema(body=TEXT, sequenceNumber=TEXT)) == EventColumns("body")


@pytest.mark.parametrize("other", ["sequenceNumber", "SEQUENCENUMBER"])
@pytest.mark.parametrize("kind", [LongType(), TEXT])
def test_sequence_numbers_of_two_sources_are_not_used(other: str, kind: DataType) -> None:
    """Neither can be selected by its name, and a join that can be published is published."""
    joined = StructType().add("body", TEXT).add("sequenceNumber", LongType()).add(other, kind)
    assert EventColumns.of(joined) == EventColumns("body")


@pytest.mark.parametrize("key", [None, "k" * 100])
def test_encode_takes_the_largest_event_that_fits_a_message(key: str | None) -> None:
    """An event passes exactly as long as a message of it alone, with its numbers, is within the limit."""
    columns = EventColumns("body", partition_key="key")
    limit = 5000

    def rows(size: int) -> pa.RecordBatch:
        return batch(body=pa.array([b"x" * size]), key=pa.array([key], pa.string()))

    room = sum(map(len, pieces(EventData(b"x" * 4000).encode(key), idempotent=True))) - 4000
    _, (event,) = encoder(columns, limit=limit).encode(rows(limit - room))
    assert SealedBatch.seal([event], idempotent=True).size == limit
    with pytest.raises(EventError, match=f"row 0 .*: the event takes {limit + 1} bytes; the limit of a message"):
        encoder(columns, limit=limit).encode(rows(limit - room + 1))


@given(
    st.integers(0, 300) | st.integers(65_400, 65_600),
    st.dictionaries(st.text("abc", min_size=1, max_size=120), st.text("x", max_size=120), max_size=3),
    st.text("sß", min_size=1, max_size=100),
    st.integers(0, 10**9),
)
def test_stamp_takes_no_more_than_is_reserved(size: int, properties: dict[str, str], sink_id: str, row: int) -> None:
    """Whatever an event is, with its stamp it is as large at most as the encoder took it to be."""
    entry = PartitionPlan(
        partition_id="31", producer_id=1, owner_level=0, next_number=0, is_fresh=True, tail=-1, nothing=0
    )
    sink = Sink(sink_id=sink_id, namespace="n", hub="h")
    plan = Plan(
        sink=sink, query_id=None, run_id="r", batch_id=7, partitions=(entry,), limits=PackingLimits(), is_stamped=True
    )
    event = EventData(b"x" * size, properties=properties).encode()
    sealed = [SealedBatch.seal([each], idempotent=True).size for each in (event, stamped(event, plan.stamp("31", row)))]
    assert sealed[1] - sealed[0] <= stamp_room(sink, 31)


def test_encode_of_too_long_a_key_is_refused() -> None:
    """A key of more than 128 characters is refused with its row and length."""
    columns = EventColumns("body", partition_key="key")
    encoder(columns).encode(batch(body=pa.array([b"x"]), key=pa.array(["k" * 128])))
    with pytest.raises(EventError, match=r"row 1 .*: key has 129 characters; the limit is 128"):
        encoder(columns).encode(batch(body=pa.array([b"x", b"y"]), key=pa.array([None, "k" * 129])))


# ----------------------------------------------------------------------------------------------------- routers


_NAMESPACE = "Endpoint=sb://e.servicebus.windows.net/;SharedAccessKeyName=n;SharedAccessKey=c2VjcmV0"


def _routed(router: SinkRouter, keys: Sequence[str | None], count: int = 5, first: int = 0) -> list[int]:
    columns = EventColumns("body", partition_key="partitionKey")
    made = EventEncoder(columns, partition_count=count, max_message_size=1024 * 1024, router=router, first=first)
    rows = batch(body=pa.array([b"x"] * len(keys)), partitionKey=pa.array(keys, pa.string()))
    return [*made.encode(rows)[0], *made.encode(rows)[0]]


def test_encode_by_the_ring_routes_keys_as_the_ring_router() -> None:
    """Spark and the other producers agree; rows without key are left to the sink."""
    keys = [f"key-{number}" for number in range(50)]
    ring, ids = RingRouter(), [str(number) for number in range(5)]
    expected = [int(ring.route(EventData(b""), key, ids)) for key in keys]
    assert _routed("ring", [*keys, None]) == [*expected, ANYWHERE] * 2
    assert expected != [partition_for_key(key, 5) for key in keys]
    assert _routed("hash", keys) == _routed("sticky", keys) == [partition_for_key(key, 5) for key in keys] * 2


def test_encode_round_robin_gives_every_row_the_next_partition() -> None:
    """With a key or without, from one batch to the next; an explicit partition goes past it."""
    assert _routed("round-robin", ["a", None, "a"], first=4) == [4, 0, 1, 2, 3, 4]
    columns = EventColumns("body", partition="partition")
    made = EventEncoder(columns, partition_count=3, max_message_size=1024 * 1024, router="round-robin")
    rows = batch(body=pa.array([b"x"] * 4), partition=pa.array(["2", None, None, "2"]))
    assert made.encode(rows)[0] == [2, 1, 2, 2]


def test_sink_refuses_a_router_that_would_reroute_a_row() -> None:
    """Exactly once, rows are routed by key or by content; publishing at least once may do as it likes."""
    options: dict[str, Any] = {
        "connection": SparkConnection(hub="h", connection_string=SecretStr(_NAMESPACE)),
        "ledger": "/tmp",
    }
    for name in ("round-robin", "sticky"):
        with pytest.raises(ConfigurationError, match="router"):
            SinkSettings(router=name, **options)
        assert SinkSettings(router=name, idempotent=False, connection=options["connection"]).router == name
    with pytest.raises(ConfigurationError, match="router"):
        SinkSettings(**{**options, "router": "random"})


# ------------------------------------------------------------------------------------------------------- codecs


@given(st.lists(st.binary(max_size=200), min_size=1, max_size=5), st.booleans(), st.booleans())
def test_rows_are_encoded_as_a_producer_encodes_events(bodies: list[bytes], keyed: bool, with_properties: bool) -> None:
    """The same bytes: body, mark and properties, with a key and without."""
    pairs = {"a": "1"} if with_properties else None
    columns = EventColumns("body", partition_key="key" if keyed else None, properties="p" if with_properties else None)
    arrays = {"body": pa.array(bodies, pa.binary())}
    if keyed:
        arrays["key"] = pa.array(["k"] * len(bodies))
    if with_properties:
        arrays["p"] = pa.array([list({"a": "1"}.items())] * len(bodies), pa.map_(pa.string(), pa.string()))
    made = EventEncoder(columns, partition_count=4, max_message_size=1024 * 1024, codecs=[GZIP, DEFLATE])
    encode = payload_encoder([GZIP, DEFLATE])
    assert encode is not None
    expected = [Message.decode(encode(EventData(body, properties=pairs)).encode()) for body in bodies]
    found = [Message.decode(raw) for raw in made.encode(batch(**arrays))[1]]
    assert [(each.body, each.properties, each.application_properties) for each in found] == [
        (each.body, each.properties, each.application_properties) for each in expected
    ]


def test_row_that_cannot_be_encoded_is_named() -> None:
    """With its number and the codec; so is one whose encoded body is too large."""
    columns = EventColumns("body")
    wrong = PayloadCodec("odd", lambda body: body * 100 if body == b"b" else bytes(1 // (body != b"c")), bytes)
    made = EventEncoder(columns, partition_count=4, max_message_size=300, codecs=[wrong])
    with pytest.raises(EventError, match=r"row 1 .*codec odd raised ZeroDivisionError"):
        made.encode(batch(body=pa.array([b"a", b"c"])))
    large = PayloadCodec("large", lambda body: body * 1000, bytes)
    made = EventEncoder(columns, partition_count=4, max_message_size=300, codecs=[large])
    with pytest.raises(EventError, match=r"row 0 .*the limit of a message is 300"):
        made.encode(batch(body=pa.array([b"a"])))


@given(st.lists(st.none() | st.binary(max_size=5) | st.just(b"x" * 400), max_size=20), st.booleans())
def test_rows_that_cannot_be_events_are_left_out_or_kept(bodies: list[bytes | None], keeps: bool) -> None:
    """*No loss*: every other row is encoded in its place, and what is kept of a bad one is its error and its values."""
    columns = EventColumns("Body", partition_key="key")
    made = EventEncoder(columns, partition_count=4, max_message_size=300)
    rows = batch(Body=pa.array(bodies, pa.binary()), key=pa.array([str(each) for each in range(len(bodies))]))
    partitions, events = made.encode_good(rows, keeps=keeps)
    is_bad = [each is None or len(each) > 300 for each in bodies]
    assert [each == NOWHERE for each in partitions] == is_bad
    good = rows.filter(pa.array([not each for each in is_bad], pa.bool_()))
    expected = EventEncoder(columns, partition_count=4, max_message_size=300).encode(good)
    assert [each for each, bad in zip(events, is_bad, strict=True) if not bad] == expected[1]
    for row, (body, event) in enumerate(zip(bodies, events, strict=True)):
        if is_bad[row] and keeps:
            error, values = bad_row(event)
            assert error.startswith(f"row {row} of the DataFrame's partition 0")
            assert values == {"Body": body, "key": str(row)}
        elif is_bad[row]:
            assert event == b""


def test_row_with_text_that_is_not_utf_8_is_kept_as_bytes() -> None:
    """A row is handed out that Arrow cannot decode."""
    columns = EventColumns("body", partition_key="key")
    made = EventEncoder(columns, partition_count=4, max_message_size=300)
    key = pa.Array.from_buffers(pa.string(), 1, pa.array([b"\xff"], pa.binary()).buffers())
    _, (event,) = made.encode_good(batch(body=pa.array([b"a"]), key=key), keeps=True)
    error, values = bad_row(event)
    assert "key has text that is not UTF-8" in error
    assert values == {"body": b"a", "key": b"\xff"}
