"""Rows become the events that the producers would send, routed as the service would, and what cannot is named."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructType,
    TimestampType,
)

from eventpump import EventData
from eventpump.amqp.message import Message
from eventpump.core.router import RingRouter
from eventpump.errors import ConfigurationError, EventError
from eventpump.eventhubs.codecs import PayloadCodec
from eventpump.eventhubs.codecs import encoder as payload_encoder
from eventpump.eventhubs.hashing import partition_for_key
from eventpump.eventhubs.sealing import SealedBatch, pieces
from eventpump.spark.connection import SparkConnection
from eventpump.spark.sink.encode import ANYWHERE, EventColumns, EventEncoder, SinkRouter, hashed
from eventpump.spark.sink.exactly_once import stamped
from eventpump.spark.sink.foreach_batch import SinkSettings, stamp_room
from eventpump.spark.sink.records import PackingLimits, PartitionPlan, Plan, Sink
from tests.support.codecs import DEFLATE, GZIP

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
        ({"body": LongType()}, (), "body"),
        ({"body": TEXT, "Body": TEXT}, (), "Body"),
        ({"body": TEXT, "partition": MAP}, (), "partition"),
        ({"body": TEXT, "partition": TEXT, "partitionId": TEXT}, (), "partitionId"),
        ({"body": TEXT, "partition": TEXT, "partitionKey": TEXT}, (), "partitionKey"),
        ({"body": TEXT, "partitionKey": LongType()}, (), "partitionKey"),
        ({"body": TEXT, "properties": ArrayType(TEXT)}, (), "properties"),
        ({"body": TEXT, "properties": MapType(TEXT, LongType())}, (), "properties"),
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
    assert len(str(caught.value)) < 120


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
    assert sealed[1] - sealed[0] <= stamp_room(sink, 7, 31)


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


def test_sink_refuses_a_router_that_would_route_a_row_anew() -> None:
    """A repeated batch must route each row as before; publishing at least once may do as it likes."""
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


def test_plan_keeps_the_router_that_it_was_made_with() -> None:
    """A record of an earlier version has the service's hash."""
    entry = PartitionPlan(
        partition_id="0", producer_id=1, owner_level=1, next_number=0, nothing=-1, is_fresh=True, tail=-1
    )
    facts: dict[str, Any] = {
        "sink": Sink(namespace="n", hub="h", sink_id="s"),
        "query_id": None,
        "run_id": "r",
        "batch_id": 0,
        "partitions": (entry,),
        "limits": PackingLimits(),
        "is_stamped": False,
    }
    assert Plan(**facts).router == "hash"
    assert Plan.model_validate_json(Plan(**facts, router="ring").model_dump_json()).router == "ring"


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


def test_a_row_that_cannot_be_encoded_is_named() -> None:
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
