"""Batches of the source: what was published comes as it was, from anywhere to anywhere."""

from __future__ import annotations

import json
import uuid
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import SparkSession

from eventpump import EventData
from eventpump.spark.data_source import register, slots_of
from eventpump.spark.source.offsets import ROWS_PER_TASK
from eventpump.spark.source.rows import COLUMNS
from eventpump.spark.source.schema import COLUMN_TYPES, TYPE_COLUMNS
from tests.spark.reading import HubReading
from tests.spark.service import SparkService

SLOTS = 2


@pytest.fixture(autouse=True)
def _registered(spark: SparkSession) -> None:
    register(spark)


@pytest.fixture(scope="module")
def filled(spark: SparkSession, service: SparkService) -> HubReading:
    """A hub with six events in one partition, stored at three moments, and two in another."""
    hub = service.new_hub(2)
    for bodies in ([b"a", b"b"], [b"c", b"d"], [b"e", b"f"]):
        service.publish(hub, bodies, "0")
    service.publish(hub, [b"x", b"y"], "1")
    return HubReading(spark, service, hub)


MOMENT = datetime(2030, 1, 31, 12, 0, 0, 250_000, tzinfo=UTC)
NAME = uuid.UUID(int=7)
KINDS = (
    EventData(b"\x00\xff plain"),
    EventData(""),
    EventData("tëxt \N{GREEK SMALL LETTER PI}", properties={"text": "ü", "number": 7, "half": 0.5, "flag": True}),
    EventData(b"x", properties={"bytes": b"\x01\x02", "moment": MOMENT, "name": NAME, "none": None}),
    EventData(value={"a": [1, "two"], "b": None}),
    EventData(value="a text"),
    EventData(sequence=[1, "two", b"three"]),
    EventData(
        b"x", message_id="m-1", correlation_id=NAME, content_type="text/plain", subject="s", creation_time=MOMENT
    ),
)


def test_load_gives_every_event_as_it_was_published(spark: SparkSession, service: SparkService) -> None:
    """Bodies, keys and properties of every kind, positions and times: each row is its event, each event one row."""
    hub = service.new_hub(1)
    service.publish(hub, KINDS)
    service.publish(hub, [EventData(b"k1"), EventData(b"k2")], partition_key="a key")
    rows = HubReading(spark, service, hub).batch(None).orderBy("sequenceNumber").collect()
    events = service.read(hub)["0"]
    assert len(rows) == len(events) == len(KINDS) + 2
    assert [row["partition"] for row in rows] == ["0"] * len(rows)
    assert [row["sequenceNumber"] for row in rows] == [event.sequence_number for event in events]
    assert [row["offset"] for row in rows] == [event.offset for event in events]
    assert [row["enqueuedTime"].replace(tzinfo=UTC) for row in rows] == [event.enqueued_time for event in events]
    assert [row["partitionKey"] for row in rows] == [None] * len(KINDS) + ["a key"] * 2
    assert [row["publisher"] for row in rows] == [None] * len(rows)
    bodies = [bytes(row["body"]) for row in rows]
    assert bodies[:4] == [b"\x00\xff plain", b"", "tëxt π".encode(), b"x"]
    assert [json.loads(bodies[4]), bodies[5], json.loads(bodies[6])] == [
        {"a": [1, "two"], "b": None},
        b"a text",
        [1, "two", "dGhyZWU="],
    ]
    assert rows[2]["properties"] == {"text": "ü", "number": "7", "half": "0.5", "flag": "true"}
    properties = rows[3]["properties"]
    assert json.loads(properties["bytes"]) == "AQI="
    assert (properties["name"], properties["none"]) == (json.dumps(str(NAME)), None)
    assert "2030-01-31" in properties["moment"]
    system = rows[7]["systemProperties"]
    assert (system["message-id"], system["correlation-id"]) == ("m-1", json.dumps(str(NAME)))
    assert system["content-type"] == "text/plain"
    assert not {"x-opt-offset", "x-opt-sequence-number", "x-opt-enqueued-time"} & system.keys()


def test_load_has_the_connectors_schema(filled: HubReading) -> None:
    """All columns in the connector's order, nullable; without properties where they are not wanted."""
    schema = filled.batch(None).schema
    assert schema.fieldNames() == list(COLUMN_TYPES)
    assert [field.dataType.simpleString() for field in schema] == [
        "binary", "string", "string", "bigint", "timestamp", "string", "string", "map<string,string>",
        "map<string,string>",
    ]  # fmt: skip
    assert all(field.nullable for field in schema)
    assert filled.batch(None, includeProperties="false").schema.fieldNames() == list(COLUMN_TYPES)[:-2]
    typed = filled.batch(None, includePropertyTypes="true").schema.fieldNames()
    assert typed == [*COLUMN_TYPES, *TYPE_COLUMNS]
    assert set(typed) <= set(COLUMNS)
    with pytest.raises(
        AnalysisException, match="includePropertyTypes: cannot be combined with includeProperties=false"
    ):
        filled.batch(None, includePropertyTypes="true", includeProperties="false")


def test_load_with_a_schema_reads_its_columns(filled: HubReading) -> None:
    """A schema given by the user is the projection."""
    rows = filled.batch("sequenceNumber BIGINT, partition STRING").collect()
    assert sorted((row[1], row[0]) for row in rows) == [("0", n) for n in range(6)] + [("1", 0), ("1", 1)]


def test_load_with_wrong_options_is_refused_without_secrets(filled: HubReading) -> None:
    """A wrong option fails `load`, a wrong column the planning; both are named, and no secret is shown."""
    with pytest.raises(AnalysisException, match="did you mean maxEventsPerTrigger") as option:
        filled.batch(None, maxEventPerTrigger=4)
    with pytest.raises(PySparkException, match="schema: unknown column Body; did you mean body") as column:
        filled.batch("Body BINARY").collect()
    for caught in (option, column):
        assert "SharedAccessKey" not in str(caught.value)


def test_load_shows_no_secret_in_its_plan(filled: HubReading) -> None:
    """The connection string is in no plan."""
    plan = filled.batch(None)._jdf.queryExecution().toString()
    assert "SharedAccessKey" not in plan


def test_load_of_an_empty_hub_is_an_empty_frame(spark: SparkSession, service: SparkService) -> None:
    """A hub without events is read without waiting."""
    assert HubReading(spark, service, service.new_hub(2)).keys() == []


def test_load_finds_the_format_without_registration(spark: SparkSession, service: SparkService) -> None:
    """Installed beside Spark, the package needs no registration."""
    hub = service.new_hub(1)
    service.publish(hub, [b"a"])
    assert HubReading(spark.newSession(), service, hub).keys() == [("0", 0, b"a")]


def test_load_right_after_a_query_waits_for_its_links(
    spark: SparkSession, service: SparkService, checkpoint: str
) -> None:
    """A notebook's habit: run a query to its end, then look at the hub, in the same consumer group."""
    reading = HubReading(spark, service, service.new_hub(2), checkpoint)
    service.publish_all(reading.hub, {"0": [b"a", b"b"], "1": [b"c"]})
    published = reading.published()
    reading.run_now(startingPosition="earliest")
    assert reading.keys(useExclusiveReceiver="true") == reading.rows == published


def test_load_with_an_unknown_consumer_group_is_refused(
    spark: SparkSession, service: SparkService, checkpoint: str
) -> None:
    """`load` names the group; with a schema, which Spark does not ask for, the query fails before it has offsets."""
    reading = HubReading(spark, service, service.new_hub(2), checkpoint)
    says = "consumerGroup: hub .* has no consumer group elsewhere"
    for load in (reading.batch, reading.stream):
        with pytest.raises(AnalysisException, match=says):
            load(None, consumerGroup="elsewhere")
    with pytest.raises(PySparkException, match=says), reading.query(consumerGroup="elsewhere") as query:
        assert query.awaitTermination(60)
    assert not list(Path(checkpoint, "offsets").glob("[0-9]*"))


def warnings_of_registration(spark: SparkSession) -> int:
    """Count the lines in which Spark says that a data source was replaced."""
    log = Path(spark.sparkContext.getConf().get("spark.local.dir", "")).parent / "spark.log"
    return log.read_text(encoding="utf-8").count("DataSourceManager")


def test_register_again_does_nothing(spark: SparkSession) -> None:
    """Registered before: `register` may be every program's first line. Spark logs each session's first one."""
    before = warnings_of_registration(spark)
    for session in (spark, spark.newSession(), spark.newSession()):
        register(session)
        register(session)
    assert warnings_of_registration(spark) == before + 2


def test_register_has_batches_take_two_tasks_for_each_slot_at_most(spark: SparkSession, service: SparkService) -> None:
    """In a session that was registered; the option prevails, up to the tasks that the events are of use for."""
    most = 4 * SLOTS
    hub = service.new_hub(most)
    service.publish_all(hub, {str(each): [b"x"] * ROWS_PER_TASK for each in range(most)})

    def tasks(session: SparkSession, **options: int) -> int:
        return HubReading(session, service, hub).batch("body binary", **options).rdd.getNumPartitions()

    assert (tasks(spark), tasks(spark, slots=1), tasks(spark, slots=9)) == (2 * SLOTS, 2, most)


@pytest.mark.parametrize(
    ("master", "conf", "slots"),
    [
        ("local[7]", {}, 7),
        ("local", {}, None),
        ("yarn", {}, None),
        ("yarn", {"spark.executor.cores": "4", "spark.executor.instances": "3"}, 12),
        ("yarn", {"spark.executor.cores": "4", "spark.executor.instances": "3", "spark.task.cpus": "2"}, 6),
        ("spark://host:7077", {"spark.cores.max": "8"}, 8),
        ("spark://host:7077", {"spark.cores.max": "8", "spark.dynamicAllocation.enabled": "true"}, None),
        ("spark://host:7077", {"spark.executor.cores": "4"}, None),
    ],
)
def test_slots_are_known_where_executors_are_fixed(master: str, conf: dict[str, str], slots: int | None) -> None:
    """By the configuration, not by the executors that are there when a program begins; otherwise None."""
    context = SimpleNamespace(master=master, getConf=lambda: conf, defaultParallelism=7)
    assert slots_of(cast("SparkSession", SimpleNamespace(sparkContext=context))) == slots
