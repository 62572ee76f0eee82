"""The foreachBatch producer on real Spark against the service: every row once, in order, whatever is repeated."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import random
import shutil
import threading
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.trace import SpanKind
from pyspark import InheritableThread
from pyspark.errors import PythonException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.connect.session import SparkSession as ConnectSession

from eventpump.emulator.faults import Action, DetachLink, DropConnection, Hold, LinkRole, Reject
from eventpump.errors import AuthenticationError, ConfigurationError, EventPumpError, ProducerStateLostError
from eventpump.options.base import RetryOptions
from eventpump.spark import BatchReceipt, PublishedRows, foreach_batch_producer
from eventpump.spark.sink.at_least_once import RECEIPTS_DDL, SendTask
from eventpump.spark.sink.columns import EventColumns
from eventpump.storage.rows.directory import DirectoryRowStore
from tests.spark.service import SparkService
from tests.spark.sinks import (
    COLUMNS,
    FailingLedger,
    SinkHub,
    StumbleError,
    StumblingLedger,
    connected_workers,
    numbered,
    numbered_stream,
    run_query,
)
from tests.support.telemetry import Recording


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make the cases of which the short form takes the first."""
    cases: dict[str, list[Any]] = {
        "record, moment, stored": [("plan", "after", 0), ("done", "before", 100), ("plan", "before", 0)],
        "path": ["auto", "never"],
    }
    for names, values in cases.items():
        if names.split(", ")[0] in metafunc.fixturenames:
            metafunc.parametrize(names, values if metafunc.config.getoption("--long") else values[:1])


@pytest.fixture
def sink(spark: SparkSession, service: SparkService, tmp_path: Path, path: str) -> SinkHub:
    """A hub of four partitions, and its sink."""
    return SinkHub(service, tmp_path, small_batches=path)


# ------------------------------------------------------------------------------------------------------ rows


def test_sink_makes_events_of_rows_with_every_column(spark: SparkSession, sink: SinkHub) -> None:
    """Body, partition and properties of a row are the event's; a null partition leaves the choice to the row."""
    rows = spark.sql(
        "SELECT * FROM VALUES "
        "(0, '2', X'00ff', map('kind', 'a', 'none', NULL)), (1, '2', X'', NULL), (2, NULL, X'01', map()) "
        "AS (n, PartitionId, Body, properties)"
    )
    sink.writer()(rows, 0)
    found = sink.service.read(sink.name)
    assert [(event.body, event.properties) for event in found["2"] if event.body != b"\x01"] == [
        (b"\x00\xff", {"kind": "a", "none": None}),
        (b"", {}),
    ]
    assert sum(map(len, found.values())) == 3


@pytest.mark.long
def test_sink_routes_keys_as_the_service_does(spark: SparkSession, sink: SinkHub) -> None:
    """A row with a key goes to the partition that the service gives the key, and carries the key."""
    other = SinkHub(sink.service, sink.ledger.parent)
    for key in range(7):
        sink.service.publish(other.name, [str(key)], partition_key=str(key))
    sink.writer()(numbered(spark, 0, 7), 0)
    assert sink.stored() == other.stored()
    assert all(
        event.partition_key == event.body_as_str() for each in sink.service.read(sink.name).values() for event in each
    )


def test_batch_is_recorded_on_the_driver(spark: SparkSession, sink: SinkHub) -> None:
    """A span per micro-batch, with its rows, and the counter by partition; of a batch that fails the error."""
    recording = Recording()
    writer = sink.writer(telemetry=recording.telemetry)
    everything = ("id AS n", "CAST(id AS STRING) AS body", "CAST(id % 2 AS INT) AS partition")
    writer(numbered(spark, 0, 100, *everything), 0)
    with pytest.raises(ConfigurationError):
        writer(numbered(spark, 0, 101, *everything), 0)
    done, failed = recording.spans("send")
    assert (done.name, done.kind) == (f"send {sink.name}", SpanKind.CLIENT)
    attributes = dict(done.attributes or {})
    assert attributes["messaging.batch.message_count"] == 100
    assert f":{attributes['server.port']}" in sink.service.connection_string
    assert attributes["az.namespace"] == "Microsoft.EventHub"
    assert (failed.attributes or {})["error.type"] == "ConfigurationError"
    sent = recording.points("messaging.client.sent.messages")
    assert {each["messaging.destination.partition.id"]: count for each, count in sent} == {"0": 50, "1": 50}
    assert recording.value("messaging.client.operation.duration") == 2
    assert isinstance(pickle.loads(pickle.dumps(writer)), type(writer))


def test_sink_numbers_follow_from_batch_to_batch(spark: SparkSession, sink: SinkHub) -> None:
    """Numbers go on from batch to batch and from run to run, in the requested order; receipts have them."""
    everything = ("id AS n", "CAST(id AS STRING) AS body", "CAST(id % 2 AS INT) AS partition")
    writer = sink.writer()
    writer(numbered(spark, 0, 100, *everything), 0)
    writer(numbered(spark, 100, 120, *everything), 1)
    sink.writer()(numbered(spark, 120, 121, *everything), 2)
    assert sink.stored() == {
        "0": list(range(0, 121, 2)),
        "1": list(range(1, 120, 2)),
        "2": [],
        "3": [],
    }
    assert [each.partitions for each in sink.receipts] == [
        (PublishedRows("0", 1, 50, 50), PublishedRows("1", 1, 50, 50)),
        (PublishedRows("0", 51, 60, 10), PublishedRows("1", 51, 60, 10)),
        (PublishedRows("0", 61, 61, 1),),
    ]
    assert [(each.sink_id, each.batch_id, each.count) for each in sink.receipts] == [
        ("sink", 0, 100),
        ("sink", 1, 20),
        ("sink", 2, 1),
    ]


def test_sink_does_not_publish_a_batch_that_is_done_again(spark: SparkSession, sink: SinkHub) -> None:
    """A repeated batch, as after a crash before Spark's commit, sends nothing and returns its receipt."""
    sink.writer()(numbered(spark, 0, 50), 0)
    sink.writer()(numbered(spark, 0, 50), 0)
    sink.require_exactly(range(50))
    assert sink.receipts[0] == sink.receipts[1]


@pytest.mark.long
def test_sink_of_an_empty_batch_is_done(spark: SparkSession, sink: SinkHub) -> None:
    """A batch without rows is done, and the next one goes on."""
    writer = sink.writer()
    writer(numbered(spark, 0, 0), 0)
    writer(numbered(spark, 0, 20), 1)
    assert [each.count for each in sink.receipts] == [0, 20]
    sink.require_exactly(range(20))


@pytest.mark.long
def test_sink_with_fewer_tasks_publishes_several_partitions_each(spark: SparkSession, sink: SinkHub) -> None:
    """With fewer tasks than hub partitions each partition is still one task's."""
    sink.writer(max_tasks=1, max_batch_events=3)(numbered(spark, 0, 100), 0)
    sink.require_exactly(range(100))
    assert len(sink.receipts[0].partitions) == 3


def test_sink_keeps_the_order_of_the_frame(spark: SparkSession, sink: SinkHub) -> None:
    """*No reorder*: without an order of the user's, rows of a hub partition are in that of the frame, in both ways."""
    frame = numbered(spark, 0, 400).selectExpr("399 - n AS n", "CAST(399 - n AS STRING) AS body", "partitionKey")
    other = SinkHub(sink.service, sink.ledger.parent)
    sink.writer()(frame, 0)
    other.writer(small_batches="never", max_batch_events=7)(frame, 0)
    for found in (sink.stored(), other.stored()):
        assert all(each == sorted(each, reverse=True) for each in found.values())
    assert sink.stored() == other.stored()
    assert sum(map(len, sink.stored().values())) == 400


@pytest.mark.parametrize("small_batches", ["auto", pytest.param("never", marks=pytest.mark.long)])
def test_sink_orders_rows_by_columns_and_then_as_the_frame(
    spark: SparkSession, sink: SinkHub, small_batches: str
) -> None:
    """Rows that are equal in the ordering columns stay in the order of the frame."""
    frame = numbered(spark, 0, 200, *COLUMNS, "id DIV 50 AS tens")
    sink.writer(order_by="TENS", small_batches=small_batches)(frame.selectExpr("*", "-tens AS back"), 0)
    sink.writer(order_by="back", small_batches=small_batches)(
        frame.selectExpr("n + 200 AS n", "CAST(n + 200 AS STRING) AS body", "partitionKey", "-tens AS back"), 1
    )
    for found in sink.stored().values():
        first, second = [each for each in found if each < 200], [each for each in found if each >= 200]
        assert [*first, *second] == found
        assert first == sorted(first)
        assert second == sorted(second, key=lambda each: (-((each - 200) // 50), each))


@pytest.mark.long
@pytest.mark.parametrize("large", ["false", "true"])
def test_sink_orders_rows_by_columns_of_any_type(spark: SparkSession, sink: SinkHub, large: str) -> None:
    """What orders rows comes through the shuffle as it is, in any time zone and form of Arrow."""
    names = ("moment", "day", "amount", "part", "local", "words", "span", "body")
    rows = spark.range(20).selectExpr(
        "CAST(100 + id AS STRING) AS body",
        "0 AS partition",
        "timestamp_seconds(id DIV 8 * 100000) AS moment",
        "date_add(date'2020-01-01', CAST(id DIV 4 AS INT)) AS day",
        "CAST(id AS DECIMAL(20, 3)) AS amount",
        "named_struct('a', CAST(id AS DOUBLE), 'b', CAST(id AS STRING)) AS part",
        "CAST(timestamp_seconds(id) AS TIMESTAMP_NTZ) AS local",
        "array(id) AS words",
        "make_dt_interval(0, 0, 0, id) AS span",
    )
    settings = {"spark.sql.session.timeZone": "America/New_York", "spark.sql.execution.arrow.useLargeVarTypes": large}
    before = {name: spark.conf.get(name) for name in settings}
    for name, value in settings.items():
        spark.conf.set(name, value)
    try:
        sink.writer(order_by=names)(rows, 0)
    finally:
        for name, known in before.items():
            assert known is not None
            spark.conf.set(name, known)
    assert sink.stored()["0"] == list(range(100, 120))


def test_sink_with_stamp_names_the_origin_of_events(spark: SparkSession, sink: SinkHub) -> None:
    """With `stamp` every event names its sink, batch, partition and place."""
    sink.writer(stamp=True, first_batch=7)(numbered(spark, 0, 50), 7)
    stored = sink.service.read(sink.name)
    assert sum(map(len, stored.values())) == 50
    for partition_id, events in stored.items():
        stamps = [event.properties["eventpump:stamp"] for event in events]
        assert stamps == [f"sink:7:{partition_id}:{row}" for row in range(len(events))]


# ------------------------------------------------------------------------------------------------------ sizes


ORDERS = [(), pytest.param(("n",), marks=pytest.mark.long)]
"""As the frame, and by a column."""


@pytest.mark.parametrize("order_by", ORDERS)
def test_sink_publishes_small_and_large_batches_alike(
    spark: SparkSession, sink: SinkHub, order_by: tuple[str, ...]
) -> None:
    """*No loss and no duplicate* when the size jumps: what is too large for the driver is published by tasks."""
    writer, other = sink.writer(order_by=order_by), SinkHub(sink.service, sink.ledger.parent)
    sizes = [20, 4500, 25, 0, 60]
    start = 0
    for batch_id, size in enumerate(sizes):
        writer(numbered(spark, start, start + size), batch_id)
        tasks = other.writer(small_batches="never", order_by=order_by)
        tasks(numbered(spark, start, start + size), batch_id)
        start += size
    assert sorted(number for each in sink.stored().values() for number in each) == list(range(start))
    assert sink.stored() == other.stored(), "the order is the same in both ways"
    assert [each.partitions for each in sink.receipts] == [each.partitions for each in other.receipts]


def kept_links(writer: Any) -> int:
    """Return how many links the sink keeps for its next small batch."""
    return len(writer._running("sink").kept)  # its directory's name


def test_sink_of_a_batch_that_is_not_small_gives_the_driver_no_rows(spark: SparkSession, sink: SinkHub) -> None:
    """Tasks write rows that are many, and publish them; the driver keeps no link, and the rows go with the batch."""
    rows = numbered(spark, 0, 3000, "id AS n", "repeat(CAST(id AS STRING), 900) AS body", "0 AS partition")
    writer = sink.writer(ledger=(ledger := WatchingLedger(sink)))
    for batch_id in range(2):
        writer(rows, batch_id)
    assert [each.count for each in sink.receipts] == [3000] * 2
    assert kept_links(writer) == 0
    assert [len(each) for each in ledger.kept] == [3, 3], "an object for each task, and the one of the plan"
    assert sink.kept() == []


class WatchingLedger(StumblingLedger):
    """A ledger that looks at the rows that are kept where a plan is created.

    Attributes:
        kept: Their objects, by plan.
    """

    def __init__(self, sink: SinkHub) -> None:
        super().__init__(sink.ledger, "none", "before")
        self._sink = sink
        self.kept: list[list[str]] = []

    async def create(self, name: str, body: bytes) -> bool:
        if ".plan." in name:
            self.kept.append(self._sink.kept())
        return await super().create(name, body)


def test_sink_keeps_links_from_batch_to_batch(spark: SparkSession, sink: SinkHub) -> None:
    """A small batch is published over the links of the one before; a batch of tasks closes them."""
    writer = sink.writer()
    for batch_id in range(3):
        writer(numbered(spark, batch_id * 10, batch_id * 10 + 10), batch_id)
    assert kept_links(writer) == 3
    sink.writer(small_batches="never")(numbered(spark, 30, 40), 3)
    sink.require_exactly(range(40))


@pytest.mark.long
@pytest.mark.parametrize("seed", range(5))
def test_sink_switching_its_way_at_random_stores_rows_once(spark: SparkSession, sink: SinkHub, seed: int) -> None:
    """*No duplicate and no reorder*: each attempt at a batch goes another way, and messages are lost."""
    rng = random.Random(seed)
    other = SinkHub(sink.service, sink.ledger.parent)
    order_by = ("n",) if seed % 2 else ()
    actions: list[Action] = [DropConnection(), DropConnection(stored=True), DetachLink()]
    for after in range(0, 60, 5):
        sink.service.add_fault(rng.choice(actions), role=LinkRole.PRODUCER, hub=sink.name, after=after)
    batch_id = 0
    while batch_id < 6:
        rows = numbered(spark, batch_id * 60, batch_id * 60 + 60)
        options: dict[str, Any] = {"max_batch_events": 5, "order_by": order_by}
        if rng.random() < 0.5:
            record, moment = rng.choice(["plan", "done"]), rng.choice(["before", "after"])
            options["small_batches"] = rng.choice(["auto", "never"])
            with contextlib.suppress(StumbleError):
                sink.writer(ledger=StumblingLedger(sink.ledger, record, moment), **options)(rows, batch_id)
        options["small_batches"] = rng.choice(["auto", "never"])
        sink.writer(**options)(rows, batch_id)
        other.writer(order_by=order_by)(rows, batch_id)
        batch_id += 1
    assert sorted(number for each in sink.stored().values() for number in each) == list(range(360))
    assert sink.stored() == other.stored()


# ------------------------------------------------------------------------------------------------------ streams


def test_sink_without_a_sink_id_uses_the_querys(spark: SparkSession, sink: SinkHub, checkpoint: str) -> None:
    """In a classic session the ledger's name is the query's id, which its checkpoint keeps over restarts."""
    writer = foreach_batch_producer(sink.service.connection_string, sink.name, ledger=sink.ledger)
    run_query(numbered_stream(spark), writer, checkpoint)
    run_query(numbered_stream(spark), writer, checkpoint)
    sink.require_exactly(range(80))
    identity = json.loads(Path(checkpoint, "metadata").read_text())["id"]
    assert {each.name for each in sink.ledger.iterdir()} == {identity, "rows~"}


def test_sinks_of_queries_that_share_a_writer_are_separate(spark: SparkSession, sink: SinkHub, tmp_path: Path) -> None:
    """Without a sink id, a writer may serve several queries, each with its own ledger, claim and links."""
    make = partial(foreach_batch_producer, sink.service.connection_string, sink.name, ledger=sink.ledger)
    shared = make()
    for each, name in ((make(), "two"), (make(), "two"), (shared, "one"), (shared, "two")):
        run_query(numbered_stream(spark), each, str(tmp_path / name))
    counts = Counter(number for each in sink.stored().values() for number in each)
    assert counts == dict.fromkeys(range(40), 2) | dict.fromkeys(range(40, 120), 1)
    with pytest.raises(ConfigurationError, match="sink_id: several queries use this producer"):
        shared.bad_rows(0)


@pytest.mark.long
def test_sinks_of_one_query_are_separate(spark: SparkSession, sink: SinkHub, checkpoint: str) -> None:
    """Several sinks share a ledger's directory and a batch, each under its name."""
    other = SinkHub(sink.service, sink.ledger.parent)
    first, second = sink.writer(sink_id="a"), other.writer(sink_id="b", ledger=sink.ledger)

    def both(frame: DataFrame, batch_id: int) -> None:
        first(frame, batch_id)
        second(frame.where("n % 2 = 0"), batch_id)

    run_query(numbered_stream(spark), both, checkpoint)
    sink.require_exactly(range(40))
    other.require_exactly(range(0, 40, 2))


@pytest.mark.long
def test_sink_id_of_another_query_is_refused(spark: SparkSession, sink: SinkHub, tmp_path: Path) -> None:
    """Another query with the same sink id fails before it sends anything."""
    run_query(numbered_stream(spark), sink.writer(), str(tmp_path / "one"))
    with pytest.raises(Exception, match="belongs to the query"):
        run_query(numbered_stream(spark), sink.writer(), str(tmp_path / "two"))
    sink.require_exactly(range(40))


def test_sink_under_spark_connect_publishes(
    connect: ConnectSession, sink: SinkHub, checkpoint: str, request: pytest.FixtureRequest
) -> None:
    """Under Spark Connect the sink runs on the server, and its name must be given."""
    receipts = sink.ledger.with_name("receipts")

    def note(receipt: BatchReceipt) -> None:
        with receipts.open("a") as file:
            file.write(f"{receipt.count}\n")

    with pytest.raises(ConfigurationError, match="sink_id: is required"):
        sink.writer(sink_id=None)(connect.createDataFrame([("a",)], "body string"), 0)
    runs = 2 if request.config.getoption("--long") else 1
    for _ in range(runs):
        run_query(numbered_stream(connect), sink.writer(on_receipt=note), checkpoint)
    sink.require_exactly(range(40 * runs))
    assert receipts.read_text().split() == ["40"] * runs


def test_sink_id_of_another_query_is_refused_under_spark_connect(
    connect: ConnectSession, sink: SinkHub, tmp_path: Path
) -> None:
    """*No loss*: another query's batch of the same number is not taken for a repetition; the query itself goes on."""
    run_query(numbered_stream(connect), sink.writer(on_receipt=None), str(tmp_path / "one"))
    with pytest.raises(Exception, match="'sink' belongs to the query"):
        run_query(numbered_stream(connect), sink.writer(on_receipt=None), str(tmp_path / "two"))
    run_query(numbered_stream(connect), sink.writer(on_receipt=None), str(tmp_path / "one"))
    sink.require_exactly(range(80))


def test_sink_called_twice_for_a_batch_under_spark_connect_is_refused(
    connect: ConnectSession, sink: SinkHub, checkpoint: str
) -> None:
    """*No loss*: two writers of one sink are one call too many there too."""
    first, second = sink.writer(on_receipt=None), sink.writer(on_receipt=None)

    def both(frame: DataFrame, batch_id: int) -> None:
        first(frame.where("n % 2 = 0"), batch_id)
        second(frame.where("n % 2 = 1"), batch_id)

    with pytest.raises(Exception, match="'sink' is called for batch 0 a second time in this run"):
        run_query(numbered_stream(connect), both, checkpoint)
    sink.require_exactly(range(0, 40, 2))


def test_sink_of_an_unknown_query_warns_of_a_batch_that_is_done(
    spark: SparkSession, sink: SinkHub, caplog: pytest.LogCaptureFixture
) -> None:
    """Where Spark does not name the query, it is not known whether a batch that is done is this query's."""
    sink.writer()(numbered(spark, 0, 40), 0)
    assert "is done already" not in caplog.text
    sink.writer()(numbered(spark, 0, 50), 0)
    assert "batch 0 of the sink 'sink' is done already" in caplog.text
    sink.require_exactly(range(40))


def test_sink_publishes_frames_of_spark_connect_in_every_way(connect: ConnectSession, sink: SinkHub) -> None:
    """Without a JVM at hand: by the driver, by tasks, and ordered."""
    ways: list[dict[str, Any]] = [{}, {"small_batches": "never"}, {"order_by": "n"}]
    for batch_id, options in enumerate(ways):
        rows: Any = connect.range(batch_id * 40, batch_id * 40 + 40).selectExpr(*COLUMNS)
        sink.writer(**options)(rows, batch_id)
    sink.require_exactly(range(120))
    assert sink.kept() == []


def test_sink_called_twice_for_a_batch_is_refused(spark: SparkSession, sink: SinkHub, checkpoint: str) -> None:
    """*No loss*: the second call of a batch fails the query, in each of its runs, and says what to do."""
    writer = sink.writer()

    def both(frame: DataFrame, batch_id: int) -> None:
        writer(frame.where("n % 2 = 0"), batch_id)
        writer(frame.where("n % 2 = 1"), batch_id)

    for _ in range(2):
        with pytest.raises(Exception, match=r"'sink' is called for batch 0 a second time in this run.*unionByName"):
            run_query(numbered_stream(spark), both, checkpoint)
        sink.require_exactly(range(0, 40, 2))
    # Also by hand, without a query.
    by_hand = sink.writer()
    by_hand(numbered(spark, 0, 40), 7)
    with pytest.raises(ConfigurationError, match=r"'sink' is called for batch 7 a second time"):
        by_hand(numbered(spark, 1, 40), 7)


def test_sink_of_a_query_that_is_changed_within_a_batch_publishes_the_rows_that_it_had(
    spark: SparkSession, sink: SinkHub, checkpoint: str
) -> None:
    """*No loss, no duplicate*: an interrupted batch goes on with the rows that were kept; the next one is as now."""
    rows = numbered_stream(spark)
    with pytest.raises(Exception, match="StumbleError"):
        run_query(rows, sink.writer(ledger=StumblingLedger(sink.ledger, "plan", "after")), checkpoint)
    assert len(sink.kept()) == 1
    changed = rows.selectExpr("n", "CAST(n + 1000 AS STRING) AS body", "partitionKey")
    run_query(changed, sink.writer(order_by="n"), checkpoint)
    assert len(sink.receipts) == 2
    sink.require_exactly([*range(40), *range(1040, 1080)])
    assert sink.kept() == []


def files_stream(spark: SparkSession, place: Path, batches: int) -> DataFrame:
    """Make a stream with a batch of 20 rows for each of some files."""
    for number in range(batches):
        file = place / f"{number}.json"
        file.write_text("".join(f'{{"id": {row}}}\n' for row in range(number * 20, number * 20 + 20)))
        os.utime(file, (1_700_000_000 + number,) * 2)
    return spark.readStream.schema("id long").option("maxFilesPerTrigger", 1).json(str(place)).selectExpr(*COLUMNS)


def test_sink_that_is_not_called_for_empty_batches_goes_on(
    spark: SparkSession, sink: SinkHub, checkpoint: str, tmp_path: Path
) -> None:
    """The first call may be for a later batch than 0, also into a hub with events; later ones keep the producers."""
    sink.service.publish(sink.name, ["-1"], partition_id="0")
    (place := tmp_path / "files").mkdir()
    rows = files_stream(spark, place, 5).where("n BETWEEN 20 AND 39 OR n >= 80")
    writer = sink.writer()

    def with_rows(frame: DataFrame, batch_id: int) -> None:
        if not frame.isEmpty():
            writer(frame, batch_id)

    run_query(rows, with_rows, checkpoint)
    sink.require_exactly([*range(-1, 0), *range(20, 40), *range(80, 100)])
    assert [each.batch_id for each in sink.receipts] == [1, 4]
    ends = {each.partition_id: each.last or 0 for each in sink.receipts[0].partitions}
    assert all(each.first == ends[each.partition_id] + 1 for each in sink.receipts[1].partitions)


MOMENTS = [("done", "after"), ("plan", "after"), ("plan", "before")]


@pytest.mark.parametrize("at", [MOMENTS[0], *(pytest.param(each, marks=pytest.mark.long) for each in MOMENTS[1:])])
@pytest.mark.parametrize("operator", ["aggregate", pytest.param("distinct", marks=pytest.mark.long)])
def test_sink_evaluates_a_repeated_batch_of_a_stateful_query(
    spark: SparkSession, sink: SinkHub, checkpoint: str, tmp_path: Path, operator: str, at: tuple[str, str]
) -> None:
    """A repeated batch runs its rows to their end, because Spark demands that every batch stores its state."""
    (place := tmp_path / "files").mkdir()
    rows = files_stream(spark, place, 2)
    if operator == "aggregate":
        rows = rows.groupBy("n").agg({"body": "max", "partitionKey": "max"})
        rows = rows.selectExpr("n", "`max(body)` AS body", "`max(partitionKey)` AS partitionKey")
    else:
        rows = rows.dropDuplicates(["n"])

    def run(writer: Any) -> None:
        writing = rows.writeStream.foreachBatch(writer).option("checkpointLocation", checkpoint).outputMode("update")
        writing.trigger(availableNow=True).start().awaitTermination()

    with pytest.raises(Exception, match="StumbleError"):
        run(sink.writer(ledger=StumblingLedger(sink.ledger, *at)))
    run(sink.writer())
    sink.require_exactly(range(40), is_ordered=False)
    assert sink.kept() == []


@pytest.mark.long
def test_sink_with_an_older_ledger_is_refused(spark: SparkSession, sink: SinkHub, checkpoint: str) -> None:
    """*No duplicate*: a restored copy that lacks batches, or the one that is repeated, is behind the hub."""
    rows, copy = numbered_stream(spark), sink.ledger.with_name("copy")
    run_query(rows, sink.writer(), checkpoint)
    shutil.copytree(sink.ledger, copy)
    with pytest.raises(Exception, match="StumbleError"):
        run_query(rows, sink.writer(ledger=StumblingLedger(sink.ledger, "done", "before")), checkpoint)
    newest = sink.ledger.rename(sink.ledger.with_name("newest"))
    shutil.copytree(copy, sink.ledger)
    with pytest.raises(Exception, match=r"ledger: is behind the hub: the newest batch of the sink 'sink' in it is 0"):
        run_query(rows, sink.writer(), checkpoint)
    sink.require_exactly(range(80))
    shutil.rmtree(sink.ledger)
    newest.rename(sink.ledger)
    run_query(rows, sink.writer(), checkpoint)
    sink.require_exactly(range(120))


def test_sink_with_a_lost_ledger_is_refused(spark: SparkSession, sink: SinkHub, checkpoint: str) -> None:
    """*No duplicate*: a query that continues without its ledger fails; a sink that was added later names its batch."""
    run_query(numbered_stream(spark), sink.writer(), checkpoint)
    shutil.rmtree(sink.ledger)
    for options in ({}, {"first_batch": 2}):
        with pytest.raises(Exception, match=r"ledger: holds nothing of the sink 'sink'.*set first_batch=1"):
            run_query(numbered_stream(spark), sink.writer(**options), checkpoint)
    sink.require_exactly(range(40))
    run_query(numbered_stream(spark), sink.writer(first_batch=1), checkpoint)
    assert len(sink.receipts) > 1
    sink.require_exactly(range(40 * len(sink.receipts)))


# ------------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        (("id AS n",), "body: the DataFrame has no such column; it has: n"),
        (("id AS n", "id AS body"), "body: the column must be string or binary, not bigint"),
        (("id AS m", "'' AS body"), "order_by: the DataFrame has no column n"),
    ],
)
def test_sink_refuses_a_frame_without_its_columns(
    spark: SparkSession, sink: SinkHub, columns: tuple[str, ...], problem: str
) -> None:
    """A column that is missing or of a wrong type is named before anything happens."""
    with pytest.raises(ConfigurationError, match=problem):
        sink.writer(order_by="n")(numbered(spark, 0, 5, *columns), 0)
    assert not sink.ledger.exists()


def test_sink_refuses_a_row_that_cannot_be_sent_before_sending(spark: SparkSession, sink: SinkHub) -> None:
    """One bad row fails the batch and nothing of it is sent; mended, the same batch is published."""
    writer = sink.writer()
    for bad, problem in (
        ("IF(id = 77, repeat('x', 1100000), CAST(id AS STRING)) AS body", "the event takes 11001.. bytes"),
        ("IF(id = 77, NULL, CAST(id AS STRING)) AS body", "body is null"),
    ):
        with pytest.raises(PythonException, match=f"row 27 of the DataFrame's partition 1.*: {problem}"):
            writer(numbered(spark, 0, 100, "id AS n", bad, "id % 4 AS partition"), 0)
    assert not any(sink.stored().values())
    writer(numbered(spark, 0, 100), 0)
    sink.require_exactly(range(100))


@pytest.mark.parametrize("order_by", [(), pytest.param("n", marks=pytest.mark.long)])
def test_sink_keeps_rows_that_cannot_be_sent(spark: SparkSession, sink: SinkHub, order_by: str | tuple[()]) -> None:
    """One bad row does not stop the others; bad ones are counted and handed out, the same when a batch is repeated."""
    columns = ("id AS n", "IF(id % 40 = 7, NULL, CAST(id AS STRING)) AS body")
    options: dict[str, Any] = {"on_bad_row": "keep", "order_by": order_by}
    with pytest.raises(StumbleError):
        sink.writer(ledger=StumblingLedger(sink.ledger, "done", "after"), **options)(
            numbered(spark, 0, 100, *columns), 0
        )
    writer = sink.writer(**options)
    writer(numbered(spark, 0, 20, *columns), 0)
    found = writer.bad_rows(0)
    assert [each.values["body"] for each in found] == [None] * 3
    assert all("body is null" in each.error for each in found)
    assert (sink.receipts[0].count, sink.receipts[0].bad_rows) == (97, 3)
    writer(numbered(spark, 100, 120), 1)
    assert writer.bad_rows(1) == []
    with pytest.raises(ConfigurationError, match="batch_id: the newest batch"):
        writer.bad_rows(0)
    assert sink.kept() == []
    sink.writer(on_bad_row="skip")(numbered(spark, 120, 128, "id AS n", "CAST(NULL AS STRING) AS body"), 2)
    assert (sink.receipts[2].count, sink.receipts[2].bad_rows) == (0, 8)
    sink.require_exactly([each for each in range(120) if each % 40 != 7 or each > 100])


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"on_bad_row": "drop"}, "on_bad_row"),
        ({"idempotent": False, "on_bad_row": "skip"}, "on_bad_row"),
        ({"ledger": None}, "ledger"),
        ({"ledger": 7}, "ledger"),
        ({"ledger": "s3://bucket/ledgers"}, "ledger"),
        ({"sink_id": "\n"}, "sink_id"),
        ({"idempotent": False, "rows": "rows"}, "rows"),
        ({"rows": "s3://bucket/rows"}, "rows"),
        ({"idempotent": False, "order_by": "n"}, "order_by"),
        ({"on_producer_state_lost": "scan"}, "on_producer_state_lost"),
        ({"small_batches": "always"}, "small_batches"),
        ({"on_producer_state_lost": "shrug"}, "on_producer_state_lost"),
        ({"staging": True}, "staging"),
        ({"max_tasks": 0}, "max_tasks"),
        ({"order_bye": "n"}, "order_bye"),
    ],
)
def test_sink_options_that_cannot_work_are_named(sink: SinkHub, options: dict[str, Any], field: str) -> None:
    """What cannot work is refused where the sink is made, by the name of the option."""
    with pytest.raises(ConfigurationError) as caught:
        sink.writer(**options)
    assert caught.value.field == field


def test_sink_shows_no_secret(spark: SparkSession, sink: SinkHub, capsys: pytest.CaptureFixture[str]) -> None:
    """The key is in no repr, in no plan that Spark explains, and in no error; a sink that was pickled still has it."""
    key = sink.service.connection_string.split("SharedAccessKey=")[1].split(";")[0]
    writer = pickle.loads(pickle.dumps(sink.writer(on_receipt=None)))
    url = "https://account.blob.core.windows.net/ledgers?sig=hush"
    assert "hush" not in repr(sink.writer(ledger=url))
    writer(numbered(spark, 0, 5), 0)
    columns = EventColumns("body", order_by=("n",))
    sending = SendTask(writer.settings.connection, columns, 4, idempotent=False)
    frame = numbered(spark, 0, 5, "CAST(id AS STRING) AS body", "id AS n").mapInArrow(sending, RECEIPTS_DDL)
    frame.explain(extended=True)
    shown = [capsys.readouterr().out, repr(writer), repr(writer.settings), repr(sending)]
    broken = foreach_batch_producer(
        sink.service.connection_string.replace(key, "x" + key[1:]), sink.name, ledger=sink.ledger, sink_id="other"
    )
    with pytest.raises(AuthenticationError) as caught:
        broken(numbered(spark, 0, 5), 0)
    shown += [str(caught.value), repr(broken)]
    assert "MapInArrow" in shown[0]
    assert not [each for each in shown if key in each or key[1:] in each]


# ------------------------------------------------------------------------------------------------------ faults


def test_sink_waits_for_a_service_that_is_away_when_a_batch_begins(spark: SparkSession, sink: SinkHub) -> None:
    """*No loss*: the driver's own requests are repeated until `retry_timeout` is over; the error has the last cause."""
    sink.writer()(numbered(spark, 0, 20), 0)
    away = sink.service.add_fault(DropConnection(), role=LinkRole.MANAGEMENT, count=None)
    # A driver that continues has links to make, and asks for the hub first.
    with pytest.raises(EventPumpError, match="the peer closed the byte stream"):
        sink.writer(retry_timeout=1.0)(numbered(spark, 20, 40), 1)
    sink.service.call(away.remove)
    sink.service.add_fault(DropConnection(), role=LinkRole.MANAGEMENT, count=4)
    sink.writer()(numbered(spark, 20, 40), 1)
    sink.require_exactly(range(40))


def test_sink_over_lost_connections_stores_rows_once(spark: SparkSession, sink: SinkHub) -> None:
    """*No duplicate and no reorder*: transfers whose answer, or which themselves, are lost."""
    faults = [
        sink.service.add_fault(DropConnection(stored=stored), role=LinkRole.PRODUCER, hub=sink.name, after=after)
        for stored, after in ((True, 1), (False, 4), (True, 6))
    ]
    sink.writer(max_batch_events=5)(numbered(spark, 0, 100), 0)
    assert all(fault.fired for fault in faults)
    sink.require_exactly(range(100))


def test_sink_with_a_failing_task_stores_rows_once(spark: SparkSession, sink: SinkHub) -> None:
    """A publishing task that fails midway is tried again by Spark, and goes on where it was."""
    # More refusals in a row than an attempt bears.
    fault = sink.service.add_fault(
        Reject("amqp:not-implemented"), role=LinkRole.PRODUCER, hub=sink.name, partition="1", after=2, count=5
    )
    sink.writer(max_batch_events=5, small_batches="never")(numbered(spark, 0, 100), 0)
    assert fault.fired == 5
    sink.require_exactly(range(100))


def test_sink_with_a_killed_worker_stores_rows_once(spark: SparkSession, sink: SinkHub) -> None:
    """A Python worker killed between two sends costs no row and stores none twice."""
    hold = sink.service.add_fault(Hold(), role=LinkRole.PRODUCER, hub=sink.name, partition="1", after=2)
    killed: list[int] = []

    def kill() -> None:
        sink.await_events("1", 10)
        for process in connected_workers(sink.service):
            killed.append(process.pid)
            process.kill()
        sink.service.call(hold.remove)

    killing = threading.Thread(target=kill)
    killing.start()
    sink.writer(max_batch_events=5, small_batches="never")(numbered(spark, 0, 100), 0)
    killing.join()
    assert killed
    sink.require_exactly(range(100))


def test_sink_whose_driver_ends_amid_a_batch_finishes_it_once(
    spark: SparkSession, sink: SinkHub, record: str, moment: str, stored: int
) -> None:
    """A driver that ends before or after a write of the ledger is followed by one that goes on with the same batch."""
    stumbling = sink.writer(ledger=StumblingLedger(sink.ledger, record, moment))
    with pytest.raises(StumbleError):
        stumbling(numbered(spark, 0, 100), 0)
    assert sum(map(len, sink.stored().values())) == stored
    sink.writer()(numbered(spark, 0, 100), 0)
    sink.writer()(numbered(spark, 100, 120), 1)
    sink.require_exactly(range(120))
    assert sink.kept() == []


@pytest.mark.long
def test_sink_replay_keeps_the_partitions_of_its_plan(spark: SparkSession, sink: SinkHub) -> None:
    """A batch that was planned is routed by the partitions of then, the next one by those of now."""
    rows = numbered(spark, 0, 100, "id AS n", "CAST(id AS STRING) AS body", "CAST(id AS STRING) AS partitionKey")
    with pytest.raises(StumbleError):
        sink.writer(ledger=StumblingLedger(sink.ledger, "done", "before"))(rows, 0)
    sink.service.add_partitions(sink.name, 4)
    sink.writer()(rows, 0)
    assert [each for each, found in sink.stored().items() if found] == ["0", "1", "2", "3"]
    sink.writer()(rows.selectExpr("n + 100 AS n", "CAST(n + 100 AS STRING) AS body", "partitionKey"), 1)
    sink.require_exactly(range(200))
    assert all(sink.stored().values())


def test_sink_replay_with_forgotten_producers_fails_by_default(spark: SparkSession, sink: SinkHub) -> None:
    """A replay whose producers are gone fails; if so set, it counts stamps and is exact."""
    sink.writer(stamp=True)(numbered(spark, 0, 50), 0)
    with pytest.raises(StumbleError):
        sink.writer(stamp=True, ledger=StumblingLedger(sink.ledger, "done", "before"))(numbered(spark, 50, 100), 1)
    sink.service.call(lambda: sink.service.emulator.forget_producers(sink.name))
    with pytest.raises(ProducerStateLostError):
        sink.writer(stamp=True)(numbered(spark, 50, 100), 1)
    sink.require_exactly(range(100))
    writer = sink.writer(stamp=True, on_producer_state_lost="scan")
    writer(numbered(spark, 50, 100), 1)
    writer(numbered(spark, 100, 150), 2)
    sink.require_exactly(range(150))


# ------------------------------------------------------------------------------------------------------ kept rows


def varying(spark: SparkSession) -> DataFrame:
    """Make rows that differ whenever they are looked at: their keys, and how many there are."""
    return (
        spark.range(0, 400, 1, 2)
        .selectExpr("id AS n", "CAST(id AS STRING) AS body", "CAST(CAST(rand() * 50 AS INT) AS STRING) AS partitionKey")
        .where("rand() < 0.5")
    )


@pytest.mark.parametrize("small_batches", ["auto", "never"])
@pytest.mark.parametrize("at", [MOMENTS[1], pytest.param(("done", "before"), marks=pytest.mark.long)])
def test_sink_publishes_the_rows_that_were_kept_first(
    spark: SparkSession, sink: SinkHub, at: tuple[str, str], small_batches: str
) -> None:
    """*No loss and no duplicate*: once each, whatever the query gives when the batch is repeated."""
    options: dict[str, Any] = {"small_batches": small_batches, "max_batch_events": 5}
    with pytest.raises(StumbleError):
        sink.writer(ledger=StumblingLedger(sink.ledger, *at), **options)(varying(spark), 0)
    first, kept = sink.stored(), sink.kept()
    assert len(kept) == (1 if small_batches == "auto" else 3)
    sink.service.add_fault(DropConnection(stored=True), role=LinkRole.PRODUCER, hub=sink.name, after=1)
    sink.writer(**options)(varying(spark), 0)
    found = sink.stored()
    assert found == first or at[0] == "plan"
    numbers = sorted(number for each in found.values() for number in each)
    assert len(numbers) == len(set(numbers)) == sink.receipts[0].count
    sink.require_exactly(numbers)
    assert sink.kept() == []


@pytest.mark.parametrize("damage", ["is gone", pytest.param("is damaged", marks=pytest.mark.long)])
def test_sink_whose_kept_rows_are_damaged_stops(spark: SparkSession, sink: SinkHub, damage: str) -> None:
    """*No loss*: a missing or damaged object stops the query, which names the rows and sends none of them."""
    writer = sink.writer(small_batches="never", ledger=StumblingLedger(sink.ledger, "plan", "after"))
    with pytest.raises(StumbleError):
        writer(numbered(spark, 0, 400), 0)
    largest = max((sink.ledger / "rows~").glob("sink.*/0*"), key=lambda each: each.stat().st_size)
    if damage == "is gone":
        largest.unlink()
    else:
        largest.write_bytes(largest.read_bytes()[:-1] + b"?")
    with pytest.raises(Exception, match=rf"rows \d+ to \d+ of batch 0 for partition \d.*{damage}"):
        sink.writer()(numbered(spark, 0, 400), 0)


def test_sink_on_a_directory_of_the_driver_alone_is_refused(spark: SparkSession, sink: SinkHub, tmp_path: Path) -> None:
    """Executors that do not see what the driver has written say so in the first batch, also in a small one, whose rows
    the driver has: not when the first large one comes. They create nothing."""
    rows = HiddenRows(tmp_path / "rows")
    for small_batches in ("never", "auto"):
        with pytest.raises(PythonException, match="rows: this executor does not see in"):
            sink.writer(rows=rows, small_batches=small_batches)(numbered(spark, 0, 40), 0)
    assert not any(sink.stored().values())
    assert not (tmp_path / "elsewhere").exists()


def test_sink_publishes_parts_of_a_batch(spark: SparkSession, sink: SinkHub, checkpoint: str) -> None:
    """*No loss*: each part is published once, by threads at the same time too, and goes on where a crash left it."""
    stumbling = sink.writer(ledger=StumblingLedger(sink.ledger, "done", "before"))

    def split(publish: Any, frame: DataFrame, batch_id: int) -> None:
        errors: list[BaseException] = []

        def call(part: str, rest: int) -> None:
            try:
                publish(frame.where(f"n % 2 = {rest}"), batch_id, part=part)
            except BaseException as error:
                errors.append(error)

        threads = [InheritableThread(target=call, args=each) for each in (("even", 0), ("odd", 1))]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        if errors:
            raise errors[0]

    with pytest.raises(Exception, match="StumbleError"):
        run_query(numbered_stream(spark), partial(split, stumbling), checkpoint)
    publish = sink.writer()
    run_query(numbered_stream(spark), partial(split, publish), checkpoint)
    sink.require_exactly(range(80), is_ordered=False)
    assert {(each.batch_id, each.part, each.count) for each in sink.receipts} >= {
        (batch_id, part, 20) for batch_id in range(2) for part in ("even", "odd")
    }
    publish(numbered(spark, 80, 90), 9, part="even")
    with pytest.raises(ConfigurationError, match="'sink~even' is called for batch 9 a second time"):
        publish(numbered(spark, 80, 90), 9, part="even")


class HiddenRows(DirectoryRowStore):
    """A directory which other processes see as another one."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._process_id = os.getpid()

    async def open(self) -> None:
        if os.getpid() != self._process_id:
            self._path = self._path.with_name("elsewhere")
        await super().open()


@pytest.mark.long
def test_sink_waits_for_a_ledger_that_fails(spark: SparkSession, sink: SinkHub) -> None:
    """An outage of the ledger at any of its calls is waited for."""
    ledger = FailingLedger(sink.ledger)
    retry = RetryOptions(base_delay=0.01, max_delay=0.05)
    for batch_id in range(2):
        sink.writer(ledger=ledger, retry=retry)(numbered(spark, batch_id * 50, batch_id * 50 + 50), batch_id)
    sink.require_exactly(range(100))
    assert ledger.failed >= {"open", "read", "create"}


# ------------------------------------------------------------------------------------------------------ at least once


def test_sink_without_idempotence_sends_at_least_once(spark: SparkSession, sink: SinkHub) -> None:
    """Any target, without a ledger or a shuffle: keys, partitions, or none; receipts count."""
    writer = sink.writer(idempotent=False)
    writer(numbered(spark, 0, 50), 0)
    writer(numbered(spark, 50, 60, "CAST(id AS STRING) AS body", "2 AS partition"), 1)
    writer(numbered(spark, 60, 70, "CAST(id AS STRING) AS body"), 2)
    assert sorted(number for each in sink.stored().values() for number in each) == list(range(70))
    assert [each.count for each in sink.receipts] == [50, 10, 10]
    assert sink.receipts[1].partitions == (PublishedRows("2", None, None, 10),)
    assert {each.partition_id for each in sink.receipts[2].partitions} == {None}


@pytest.mark.long
def test_sink_without_idempotence_repeats_rows_after_a_lost_answer(spark: SparkSession, sink: SinkHub) -> None:
    """*At least once*: what was stored and not acknowledged comes again; nothing is missing."""
    sink.service.add_fault(DropConnection(stored=True), role=LinkRole.PRODUCER, hub=sink.name)
    sink.writer(idempotent=False)(numbered(spark, 0, 50), 0)
    found = sorted(number for each in sink.stored().values() for number in each)
    assert sorted(set(found)) == list(range(50))
    assert len(found) > 50
