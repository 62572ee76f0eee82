"""`format("eventpump")` as a writer, of batches and of queries: at least once."""

from __future__ import annotations

import json
import uuid
from datetime import UTC, datetime
from operator import itemgetter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import DataFrame, SparkSession

from eventpump import EventData, ReceivedEvent
from eventpump.amqp.types import Int
from eventpump.emulator.faults import DropConnection, LinkRole, Reject
from eventpump.errors import ConfigurationError, ServiceError
from eventpump.spark import register
from eventpump.spark.connection import SparkConnection
from eventpump.spark.sink.at_least_once import SendTask
from eventpump.spark.sink.columns import EventColumns
from eventpump.spark.sink.data_source_writer import writer_options
from tests.spark.service import SparkService
from tests.spark.sinks import SinkHub, numbered, numbered_stream


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make the cases of which the short form takes the first."""
    if "idempotent" in metafunc.fixturenames:
        metafunc.parametrize("idempotent", [True, False] if metafunc.config.getoption("--long") else [True])


@pytest.fixture
def sink(spark: SparkSession, service: SparkService, tmp_path: Path) -> SinkHub:
    """A hub of four partitions."""
    register(spark)
    return SinkHub(service, tmp_path)


def test_writer_options_are_known_in_any_case() -> None:
    """Names are not case-sensitive and may have the connector's prefix; durations are seconds or the connector's."""
    found = writer_options({"eventhubs.RetryTimeout": "PT30S", "IDEMPOTENT": "false", "consumerGroup": "x"})
    assert (found.retry_timeout, found.idempotent) == (30.0, False)
    with pytest.raises(ConfigurationError, match="retryTimeou: there is no such option; did you mean retryTimeout"):
        writer_options({"retryTimeou": "1"})


def append(frame: DataFrame, sink: SinkHub, mode: str = "append", **options: Any) -> None:
    """Write a batch."""
    place = {"connectionString": sink.service.connection_string, "hub": sink.name}
    frame.write.format("eventpump").mode(mode).options(**{**place, **options}).save()


def counts(sink: SinkHub) -> list[int]:
    """Return how often each number is in the hub."""
    found = sorted(number for each in sink.stored().values() for number in each)
    return [found.count(number) for number in range(found[-1] + 1)]


def test_save_appends_a_batch(spark: SparkSession, sink: SinkHub, idempotent: bool) -> None:
    """Rows go by their partition, their key, or anywhere; options are the source's too, as the connector's users do."""
    options: dict[str, Any] = {
        "idempotent": idempotent,
        "eventhubs.consumerGroup": "$Default",
        "maxEventsPerTrigger": "5",
    }
    append(numbered(spark, 0, 50), sink, **options)
    append(numbered(spark, 50, 60, "CAST(id AS STRING) AS body", "0 AS partitionId", "id AS other"), sink, **options)
    append(numbered(spark, 60, 90, "CAST(id AS STRING) AS body"), sink, **options)
    assert counts(sink) == [1] * 90
    other = SinkHub(sink.service, sink.ledger.parent)
    for key in range(7):
        sink.service.publish(other.name, [str(key)], partition_key=str(key))
    homes = {body: each for each, bodies in other.service.bodies(other.name).items() for body in bodies}
    keyed = [event for each in sink.service.read(sink.name).values() for event in each if event.partition_key]
    assert len(keyed) == 50
    found = sink.service.bodies(sink.name)
    assert all(event.body in found[homes[str(event.partition_key).encode()]] for event in keyed)
    assert set(range(50, 60)) <= set(map(int, found["0"]))


def test_save_after_a_lost_answer_repeats_rows_unless_idempotent(
    spark: SparkSession, sink: SinkHub, idempotent: bool
) -> None:
    """Within one attempt of a task the service recognizes repeats; without that they come twice. Nothing is missing."""
    fault = sink.service.add_fault(DropConnection(stored=True), role=LinkRole.PRODUCER, hub=sink.name)
    append(numbered(spark, 0, 50), sink, idempotent=idempotent)
    assert fault.fired
    assert set(counts(sink)) == ({1} if idempotent else {1, 2})


@pytest.mark.long
def test_save_by_a_repeated_task_repeats_rows(spark: SparkSession, sink: SinkHub) -> None:
    """*At least once*: a task that fails is tried again by Spark, and what it had sent comes again."""
    rows = numbered(spark, 0, 2, "CAST(id AS STRING) AS body", "id AS partition").coalesce(1)
    fault = sink.service.add_fault(Reject("amqp:not-implemented"), role=LinkRole.PRODUCER, hub=sink.name, partition="1")
    append(rows, sink)
    assert fault.fired
    assert counts(sink) in ([1, 1], [2, 1])


def test_query_appends_each_micro_batch(spark: SparkSession, sink: SinkHub, checkpoint: str) -> None:
    """Each micro-batch of a query is appended."""
    writing = numbered_stream(spark).writeStream.format("eventpump").option("checkpointLocation", checkpoint)
    writing = writing.options(connectionString=sink.service.connection_string, hub=sink.name)
    assert writing.trigger(availableNow=True).start().awaitTermination(100)
    assert counts(sink) == [1] * 40


@pytest.mark.parametrize(
    ("columns", "mode", "options", "problem"),
    [
        (("id AS n",), "append", {}, "body: the DataFrame has no such column; it has: n"),
        (("id AS body",), "append", {}, "body: the column must be string or binary, not bigint"),
        (("'' AS body",), "overwrite", {}, "mode: must be append: a hub keeps the events that it has"),
        (("'' AS body",), "append", {"idempotnet": "true"}, "idempotnet: there is no such option; did you mean idem"),
        (("'' AS body",), "append", {"idempotent": "often"}, "idempotent: Input should be a valid boolean"),
        (("'' AS body",), "append", {"hub": "nowhere"}, "nowhere"),
    ],
)
def test_save_with_wrong_columns_or_options_is_refused(
    spark: SparkSession, sink: SinkHub, columns: tuple[str, ...], mode: str, options: dict[str, str], problem: str
) -> None:
    """A column, an option or a hub that is not there is named at planning."""
    with pytest.raises(AnalysisException, match=problem) as caught:
        append(numbered(spark, 0, 5, *columns), sink, mode, **options)
    key = sink.service.connection_string.split("SharedAccessKey=")[1].split(";")[0]
    assert key not in str(caught.value)
    assert not any(sink.stored().values())


@pytest.mark.parametrize(
    ("retry", "retry_timeout", "condition", "is_idempotent", "sends"),
    [
        ({"maxRetries": 0}, 120.0, "com.microsoft:server-busy", True, 1),
        ({"maxRetries": 0}, 120.0, "com.microsoft:timeout", False, 1),
        ({"baseDelay": 0.01, "maxDelay": 0.01}, 0.05, "com.microsoft:timeout", False, 11),
    ],
)
def test_sends_are_repeated_as_the_connection_says(
    service: SparkService,
    retry: dict[str, Any],
    retry_timeout: float,
    condition: str,
    is_idempotent: bool,
    sends: int,
) -> None:
    """The option `retry` applies to sends; without a number of retries in it, they end with `retryTimeout`."""
    hub = service.new_hub(1)
    fault = service.add_fault(Reject(condition, ""), role=LinkRole.PRODUCER, hub=hub, count=sends)
    options = {"connectionString": service.connection_string, "hub": hub, "retry": json.dumps(retry)}
    connection, _ = SparkConnection.split_options(options)
    task = SendTask(connection, EventColumns("body"), 1, is_idempotent, retry_timeout=retry_timeout)
    with pytest.raises(ServiceError):
        task.send([pa.RecordBatch.from_pydict({"body": ["a"]})])
    assert fault.fired == sends


def test_bodies_are_encoded_and_decoded_by_import_name(spark: SparkSession, sink: SinkHub) -> None:
    """A writer, and the sink that publishes exactly once, encode; the source decodes, plain events beside them too."""
    append(numbered(spark, 0, 10), sink, encode="tests.support.codecs:SPARKS")
    sink.writer(encode="tests.support.codecs:STABLE")(numbered(spark, 10, 20), 0)
    append(numbered(spark, 20, 25), sink)
    marks = {
        str(event.system_properties.get("content-encoding"))
        for each in sink.service.read(sink.name).values()
        for event in each
    }
    assert marks == {"gzip, toy-2030", "gzip", "None"}
    place = {"connectionString": sink.service.connection_string, "hub": sink.name}
    source = spark.read.format("eventpump").options(**place, decode="tests.support.codecs:SPARKS")
    assert sorted(int(row["body"]) for row in source.load().collect()) == list(range(25))


def test_codecs_that_cannot_be_imported_are_named(spark: SparkSession, sink: SinkHub) -> None:
    """By the executors, which import them."""
    with pytest.raises(PySparkException, match=r"encode: no_such:CODEC cannot be imported"):
        append(numbered(spark, 0, 1), sink, encode="no_such:CODEC")


def _content(event: ReceivedEvent) -> tuple[Any, ...]:
    """Return everything of an event that its sender determined, values with their types."""
    standard = dict(event.to_event_data().standard or {})
    typed = {name: (type(value), value) for name, value in {**event.properties, **standard}.items()}
    return event.body, event.partition_key, typed


@pytest.mark.parametrize("by", ["exactly once", "at least once", "format"])
def test_hub_is_copied_with_everything(spark: SparkSession, sink: SinkHub, by: str) -> None:
    """The source's rows, with types and without the partition, are published as the events that they were."""
    source = sink.service.new_hub(2)
    moment = datetime(2030, 1, 31, 12, 0, 0, 250_000, tzinfo=UTC)
    typed = {"n": 5, "t": "5", "ok": True, "x": 0.5, "at": moment, "id": uuid.UUID(int=7), "raw": b"a", "none": None}
    events = [
        EventData(b"1", properties=typed, message_id="m", correlation_id=uuid.UUID(int=7), content_type="text/plain"),
        EventData(b"2", properties={"n": Int(5)}, message_id=5, user_id=b"u", creation_time=moment, group_sequence=3),
        EventData(b"3"),
    ]
    sink.service.publish(source, events)
    sink.service.publish(source, [EventData(b"4", properties={"n": 5})], partition_key="k")
    reader = spark.read.format("eventpump").option("connectionString", sink.service.connection_string)
    rows = reader.option("hub", source).option("includePropertyTypes", True).load().drop("partition")
    if by == "format":
        append(rows, sink)
    else:
        sink.writer(**({"order_by": "sequenceNumber"} if by == "exactly once" else {"idempotent": False}))(rows, 0)
    expected, found = (
        sorted((_content(event) for each in sink.service.read(hub).values() for event in each), key=itemgetter(0))
        for hub in (source, sink.name)
    )
    assert found == expected
    assert len(found) == 4


def test_save_of_rows_of_the_source_says_which_column_to_drop(spark: SparkSession, sink: SinkHub) -> None:
    """They have a partition and a key: which of the two decides is for the user to say."""
    reader = spark.read.format("eventpump").option("connectionString", sink.service.connection_string)
    with pytest.raises(AnalysisException, match=r'partitionKey: .*\.drop\("partition"\) sends each row by its key'):
        append(reader.option("hub", sink.name).load(), sink)
