"""Queries of the source on real Spark: exactly the published events, whatever happens to query, hub or task."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.listener import StreamingQueryListener

from eventpump.emulator.faults import Action, DetachLink, DropConnection, LinkRole
from eventpump.spark import register, with_lag
from tests.spark.reading import BODIES, HubReading, Key, keys_of, listening
from tests.spark.service import SparkService


@pytest.fixture(autouse=True)
def _registered(spark: SparkSession) -> None:
    register(spark)


@pytest.fixture
def reading(spark: SparkSession, service: SparkService, checkpoint: str) -> HubReading:
    """A hub of two partitions, without events."""
    return HubReading(spark, service, service.new_hub(2), checkpoint)


def bodies(first: int, count: int) -> list[bytes]:
    return [b"%d" % number for number in range(first, first + count)]


def test_query_goes_on_from_its_checkpoint(reading: HubReading) -> None:
    """From the newest event on, across restarts, with what came in between: every event once, in order."""
    service, hub = reading.service, reading.hub
    service.publish_all(hub, {"0": [b"before"], "1": [b"before"]})
    with reading.query():
        pass
    with reading.query() as query:
        query.processAllAvailable()
    service.publish_all(hub, {"0": bodies(0, 5), "1": bodies(5, 2)})
    with reading.query() as query:
        query.processAllAvailable()
        service.publish_all(hub, {"0": bodies(7, 3), "1": bodies(10, 1)})
        query.processAllAvailable()
        progress = query.lastProgress
    assert progress is not None
    assert progress.sources[0].endOffset == progress.sources[0].latestOffset
    assert json.loads(progress.sources[0].endOffset)[hub] == {"0": 9, "1": 4}
    expected = [("0", 1 + n, body) for n, body in enumerate(bodies(0, 5) + bodies(7, 3))]
    expected += [("1", 1 + n, body) for n, body in enumerate(bodies(5, 2) + bodies(10, 1))]
    assert sorted(reading.rows, key=lambda key: int(key[0])) == expected


def test_query_prefers_its_checkpoint_to_the_starting_position(reading: HubReading) -> None:
    """Even the first batch, failed and repeated, is what it was, whatever the position says by then."""
    service, hub = reading.service, reading.hub
    service.publish_all(hub, {"0": bodies(0, 3), "1": bodies(3, 2)})
    everything = reading.published()

    def fail(_frame: DataFrame, _batch_id: int) -> None:
        raise RuntimeError("the sink failed")

    with reading.query(fail, startingPosition="earliest") as query, pytest.raises(StreamingQueryException):
        query.awaitTermination(60)
    reading.run_now(startingPosition="latest")
    assert reading.batches[0] == everything
    assert reading.rows == everything


def test_query_with_available_now_reads_in_limited_batches(reading: HubReading) -> None:
    """Every batch keeps to the limit, the query ends, and another run reads what came since, added partitions too."""
    service, hub = reading.service, reading.hub
    service.publish_all(hub, {"0": bodies(0, 9), "1": bodies(9, 3)})
    everything = reading.published()
    reading.run_now(startingPosition="earliest", maxEventsPerTrigger=5)
    assert [len(reading.batches[each]) for each in sorted(reading.batches)] == [5, 5, 2]
    assert sorted(reading.rows) == sorted(everything)
    service.add_partitions(hub, 1)
    service.publish_all(hub, {"0": bodies(12, 1), "2": bodies(13, 2)})
    reading.run_now(maxEventsPerTrigger=5)
    assert sorted(reading.rows) == sorted([*everything, ("0", 9, b"12"), ("2", 0, b"13"), ("2", 1, b"14")])


def test_query_with_a_limit_in_bytes(reading: HubReading) -> None:
    """Batches have about as many bytes as wanted, by the sizes that the hub's events have had, until all are read."""
    service, hub = reading.service, reading.hub
    service.publish_all(hub, {"0": [bytes(1000)] * 60, "1": [bytes(1000)] * 20})
    everything = sorted(reading.published())
    reading.run_now(startingPosition="earliest", maxBytesPerTrigger="22000")
    sizes = [len(reading.batches[each]) for each in sorted(reading.batches)]
    assert sorted(reading.rows) == everything
    assert len(sizes) in {4, 5}
    assert all(15 <= size <= 22 for size in sizes[:-1])


def test_query_reads_partitions_added_while_it_runs(reading: HubReading) -> None:
    """A partition that the hub gains meanwhile is read from its first event on, several partitions in one task."""
    service, hub = reading.service, reading.hub
    with reading.query(startingPosition="earliest", partitionsPerTask=3) as query:
        service.publish(hub, bodies(0, 2), "1")
        query.processAllAvailable()
        service.add_partitions(hub, 2)
        service.publish_all(hub, {"1": bodies(2, 1), "2": bodies(3, 2), "3": bodies(5, 1)})
        query.processAllAvailable()
    assert sorted(reading.rows) == [
        *[("1", n, b"%d" % n) for n in range(3)],
        ("2", 0, b"3"),
        ("2", 1, b"4"),
        ("3", 0, b"5"),
    ]


def _retention_passes(service: SparkService, hub: str) -> None:
    service.publish(hub, bodies(3, 4), "0")
    service.call(lambda: service.emulator.drop_events(hub, "0", 5))


def _hub_is_recreated(service: SparkService, hub: str) -> None:
    service.call(lambda: service.emulator.recreate_hub(hub))
    service.publish(hub, bodies(5, 2), "0")


@pytest.mark.parametrize(
    ("happens", "says", "left"),
    [
        (_retention_passes, "sequence number 3, but the partition now begins at 5", [5, 6]),
        (_hub_is_recreated, "the hub was recreated: its creation time is now", [0, 1]),
    ],
)
def test_query_fails_for_lost_events(
    reading: HubReading, happens: Callable[[SparkService, str], None], says: str, left: list[int]
) -> None:
    """A query fails for what is gone, and again when it is restarted; if it may go on, it reads what there is."""
    service, hub = reading.service, reading.hub
    service.publish(hub, bodies(0, 3), "0")
    reading.run_now(startingPosition="earliest")
    happens(service, hub)
    with pytest.raises(StreamingQueryException, match=f"DataLossError: .*{says}"):
        reading.run_now()
    reading.batches.clear()
    reading.run_now(failOnDataLoss="false")
    assert reading.rows == [("0", number, body) for number, body in zip(left, bodies(5, 2), strict=True)]


def test_queries_and_actions_at_once_get_everything(spark: SparkSession, service: SparkService, tmp_path: Path) -> None:
    """Two queries share a hub, one of them reads another hub too and looks at each batch twice: all get everything."""
    one, two = service.new_hub(2), service.new_hub(1)
    shared: dict[str, Any] = {"useExclusiveReceiver": "false", "startingPosition": "earliest"}
    first = HubReading(spark, service, one, str(tmp_path / "first"))
    second = HubReading(spark, service, two)
    both: list[Key] = []

    def twice(frame: DataFrame, _batch_id: int) -> None:
        count = frame.count()
        found = keys_of(frame)
        assert count == len(found)
        both.extend(found)

    union = first.stream(**shared).union(second.stream(startingPosition="earliest"))
    writer = union.writeStream.foreachBatch(twice).option("checkpointLocation", str(tmp_path / "both"))
    with first.query(**shared) as query:
        other = writer.start()
        for start in (0, 4):
            service.publish_all(one, {"0": bodies(start, 3), "1": bodies(start + 3, 1)})
            service.publish(two, [b"two"])
            query.processAllAvailable()
            other.processAllAvailable()
        other.stop()
    everything = sorted(first.published())
    assert len(everything) == 8
    assert sorted(first.rows) == everything
    assert sorted(both) == sorted([*everything, ("0", 0, b"two"), ("0", 1, b"two")])


@pytest.mark.parametrize("session", ["spark", "connect"])
def test_query_that_watches_several_hubs(
    session: str, request: pytest.FixtureRequest, service: SparkService, checkpoint: str, tmp_path: Path
) -> None:
    """Events of two hubs are seen at once by a query that would look again in an hour; the progress has what was read,
    and how late."""
    spark = request.getfixturevalue(session)
    register(spark)
    hubs = [service.new_hub(2), service.new_hub(1)]
    options = {
        "connectionString": service.connection_string, "hub": json.dumps(hubs), "startingPosition": "earliest",
        "watchConsumerGroup": "watch", "snapshotInterval": "3600",
    }  # fmt: skip
    arrivals = Arrivals()
    rows = with_lag(spark.readStream.format("eventpump").options(**options).load()).select("hub", "partition", "body")
    table = str(tmp_path / "table")
    writer = rows.writeStream.format("parquet").option("path", table).option("checkpointLocation", checkpoint)
    expected: list[tuple[str, str, bytes]] = []
    with listening(spark, arrivals):
        query = writer.start()
        try:
            places = ((hubs[0], "1"), (hubs[1], "0"), (hubs[0], "0"), (hubs[0], "1"))
            for number, (hub, partition_id) in enumerate(places):
                service.publish(hub, bodies(number, 1), partition_id)
                expected.append((hub, partition_id, b"%d" % number))
                arrivals.until_read(len(expected))
        finally:
            query.stop()
    found = spark.read.parquet(table).collect()
    assert sorted((row["hub"], row["partition"], bytes(row["body"])) for row in found) == sorted(expected)
    assert all(0 <= lag < 60 for lag in arrivals.lags)


class Arrivals(StreamingQueryListener):
    """Notes what the progress of one query says was read."""

    def __init__(self) -> None:
        self.events = 0
        self.lags: list[float] = []
        self._changed = threading.Condition()

    def onQueryStarted(self, event: Any) -> None:  # noqa: N802 - Spark's name
        """The query has begun."""

    def onQueryIdle(self, event: Any) -> None:  # noqa: N802 - Spark's name
        """Nothing is new."""

    def onQueryTerminated(self, event: Any) -> None:  # noqa: N802 - Spark's name
        """The query has ended."""
        with self._changed:
            self.events = -1
            self._changed.notify_all()

    def onQueryProgress(self, event: Any) -> None:  # noqa: N802 - Spark's name
        """A batch is done."""
        figures = event.progress.observedMetrics["eventpump"]
        with self._changed:
            self.events += figures["events"]
            if figures["events"]:
                self.lags.append(figures["maxLagSeconds"])
            self._changed.notify_all()

    def until_read(self, count: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self.events in {count, -1})
            assert self.events == count


def test_query_with_killed_workers_reads_everything_once(reading: HubReading, tmp_path: Path) -> None:
    """A worker killed amid its rows, and a task that fails, are followed by an attempt that reads the same again."""
    service, hub = reading.service, reading.hub
    service.publish_all(hub, {"0": bodies(0, 300), "1": bodies(300, 300)})
    everything = reading.published()
    marks = str(tmp_path)

    def trip(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            partition = batch.column("partition")[0].as_py()
            mark = os.path.join(marks, partition)
            if not os.path.exists(mark):
                with open(mark, "x"):
                    pass
                if partition == "0":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise RuntimeError("the task failed")
            yield batch

    def note(frame: DataFrame, batch_id: int) -> None:
        reading.note(frame.mapInArrow(trip, BODIES), batch_id)

    # A task per partition, so that each partition's rows come in batches of their own.
    with reading.query(note, available_now=True, startingPosition="earliest", partitionsPerTask=1) as query:
        assert query.awaitTermination(60)
    assert sorted(os.listdir(marks)) == ["0", "1", "checkpoint"]
    assert reading.rows == everything


def test_query_over_lost_links_reads_everything_once(reading: HubReading) -> None:
    """Links that the service cuts while a query reads are opened again at their last position."""
    service, hub = reading.service, reading.hub
    service.publish_all(hub, {"0": bodies(0, 200), "1": bodies(200, 200)})
    everything = reading.published()
    fault: Any = service.add_fault(DetachLink(), role=LinkRole.CONSUMER, hub=hub, after=50, count=2)
    reading.run_now(startingPosition="earliest")
    assert fault.fired == 2
    assert reading.rows == everything


@pytest.mark.long
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.timeout(600)
def test_query_under_random_faults_reads_everything_once(reading: HubReading, tmp_path: Path, seed: int) -> None:
    """Runs with limits, lost links and connections, killed workers, failed sinks and added partitions, by chance."""
    service, hub, rng = reading.service, reading.hub, random.Random(seed)
    expected: dict[str, list[bytes]] = {"0": [], "1": []}
    marks = str(tmp_path)

    for turn in range(6):
        for partition_id, found in expected.items():
            made = bodies(1000 * turn, rng.randrange(60))
            service.publish(hub, made, partition_id)
            found += made
        kills, fails = rng.random() < 0.5, rng.random() < 0.3

        def trip(batches: Iterator[pa.RecordBatch], mark: str = os.path.join(marks, f"turn-{turn}")) -> Any:
            for batch in batches:
                if not os.path.exists(mark):
                    with open(mark, "w"):
                        pass
                    os.kill(os.getpid(), signal.SIGKILL)
                yield batch

        def note(frame: DataFrame, batch_id: int, kills: bool = kills, fails: bool = fails) -> None:
            reading.note(frame.mapInArrow(trip, BODIES) if kills else frame, batch_id)
            if fails:
                raise RuntimeError("the sink failed")

        action: Action = DetachLink() if rng.random() < 0.5 else DropConnection()
        fault = service.add_fault(action, role=LinkRole.CONSUMER, hub=hub, after=rng.randrange(40))
        options = {"maxEventsPerTrigger": rng.choice([7, 40, 1000]), "partitionsPerTask": rng.choice([1, 3])}
        with reading.query(note, available_now=True, startingPosition="earliest", **options) as query:
            try:
                assert query.awaitTermination(120)
            except StreamingQueryException:
                assert fails
        service.call(fault.remove)
        if rng.random() < 0.4:
            service.add_partitions(hub, 1)
            expected[str(len(expected))] = []
        if rng.random() < 0.3:
            service.drop_connections()
    reading.run_now()
    assert any(expected.values())
    for partition_id, found in expected.items():
        assert [key for key in reading.rows if key[0] == partition_id] == [
            (partition_id, number, body) for number, body in enumerate(found)
        ]
