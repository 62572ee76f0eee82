"""What the readers answer to what Spark asks, and read of the emulator: without Spark around them."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows
from pyspark.sql.types import BinaryType, StructField, StructType, TimestampNTZType

from eventpump import ReceivedEvent
from eventpump.emulator.faults import Delay, Hold, LinkRole, Reject
from eventpump.errors import ConfigurationError, DataLossError, RequestRefusedError
from eventpump.spark.source import watch
from eventpump.spark.source.offsets import KEEP_LINKS, LEAST_KEEP_LINKS
from eventpump.spark.source.options import SourceOptions
from eventpump.spark.source.readers import BatchReader, StreamReader, columns_of
from tests.spark.reading import Key
from tests.spark.service import SparkService

COLUMNS = ("partition", "sequenceNumber", "body")


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    """A reader that serves a query answers SIGTERM in its own way; here it shares the process with others."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def rows_of(reader: BatchReader | StreamReader, tasks: Any) -> list[Key]:
    """Read tasks one after the other."""
    found = [row for task in tasks for batch in reader.read(task) for row in batch.to_pylist()]
    keys = [(row["partition"], row["sequenceNumber"], row["body"]) for row in found]
    return sorted(keys, key=lambda key: int(key[0]))


class Hub:
    """A hub of a test."""

    def __init__(self, service: SparkService, partitions: int = 1) -> None:
        self.service = service
        self.name = service.new_hub(partitions)

    def hubs(self, **options: Any) -> tuple[SourceOptions, ...]:
        given = {name: str(value) for name, value in options.items()}
        return SourceOptions.each_hub(
            {"connectionString": self.service.connection_string, "hub": self.name, "snapshotInterval": "0.001", **given}
        )

    def batch_reader(self, **options: Any) -> BatchReader:
        return BatchReader([each.for_batch() for each in self.hubs(**options)], COLUMNS)

    def batch(self, **options: Any) -> list[Key]:
        reader = self.batch_reader(**options)
        return rows_of(reader, reader.partitions())

    def publish(self, *bodies: bytes, to: str = "0") -> None:
        self.service.publish(self.name, bodies, to)

    def events(self) -> dict[str, list[ReceivedEvent]]:
        return self.service.read(self.name)

    def published(self) -> list[Key]:
        return [(each, event.sequence_number, event.body) for each, events in self.events().items() for event in events]

    def drop_before(self, number: int) -> None:
        self.service.call(lambda: self.service.emulator.drop_events(self.name, "0", number))

    def recreate(self, partitions: int | None = None) -> None:
        self.service.call(lambda: self.service.emulator.recreate_hub(self.name, partitions))


class Engine:
    """Asks a stream reader what Spark would, and keeps what Spark would keep: offsets as text."""

    def __init__(self, hub: Hub, **options: Any) -> None:
        self.hub = hub
        self.given = options
        self.log: list[str] = []
        self.reader = self.new_reader()

    def new_reader(self) -> StreamReader:
        return StreamReader([each.for_stream() for each in self.hub.hubs(**self.given)], COLUMNS)

    def restart(self, **options: Any) -> None:
        """Go on from the log, as another run of the query."""
        self.given |= options
        self.reader = self.new_reader()

    @property
    def last(self) -> dict[str, Any]:
        """The last offset, without the times at which the hubs were created."""
        offset: dict[str, Any] = json.loads(self.log[-1])
        assert offset.pop("(created)").keys() == offset.keys() - {"(start)"}
        return offset

    def start(self) -> dict[str, Any]:
        return json.loads(self.log[-1]) if self.log else self.reader.initialOffset()

    def batch(self, limit: ReadLimit | None = None) -> list[Key] | None:
        """Plan and read a batch.

        Returns:
            None where there is none.
        """
        start = json.dumps(self.start())
        end = json.dumps(self.reader.latestOffset(json.loads(start), limit or self.reader.getDefaultReadLimit()))
        if end == start:
            return None
        self.log.append(end)
        return self.read(start, end)

    def read(self, start: str, end: str) -> list[Key]:
        return rows_of(self.reader, self.reader.partitions(json.loads(start), json.loads(end)))


@pytest.fixture
def hub(service: SparkService) -> Hub:
    """A hub of one partition, without events."""
    return Hub(service)


@pytest.fixture
def pair(service: SparkService) -> Hub:
    """A hub of two partitions, without events."""
    return Hub(service, 2)


# -------------------------------------------------------------------------------------------------------- positions


@pytest.fixture(scope="module")
def filled(service: SparkService) -> Hub:
    """A hub with six events in one partition, stored at three moments, and two in another."""
    hub = Hub(service, 2)
    for bodies in ([b"a", b"b"], [b"c", b"d"], [b"e", b"f"]):
        hub.publish(*bodies)
    hub.publish(b"x", b"y", to="1")
    return hub


def index_at(events: list[ReceivedEvent], kind: str, place: ReceivedEvent, *, inclusive: bool) -> int:
    """Say at which index of a partition's events reading begins."""
    if kind == "enqueuedTime":
        moment = place.enqueued_time
        return sum(each.enqueued_time < moment or (each.enqueued_time == moment and not inclusive) for each in events)
    return events.index(place) + (0 if inclusive else 1)


def position(kind: str, place: ReceivedEvent, *, inclusive: bool) -> dict[str, Any]:
    value = {"seqNo": place.sequence_number, "offset": place.offset, "enqueuedTime": place.enqueued_time.isoformat()}
    return {kind: value[kind], "isInclusive": inclusive}


@pytest.mark.parametrize("inclusive", [True, False])
@pytest.mark.parametrize("kind", ["seqNo", "offset", "enqueuedTime"])
def test_batch_between_positions_of_every_kind(filled: Hub, kind: str, inclusive: bool) -> None:
    """From a number, an offset or a time, up to one, with and without the event there: exactly what lies between."""
    events = filled.events()["0"]
    for first, last in ((0, 0), (0, 5), (1, 4), (2, 3), (5, 5)):
        start = index_at(events, kind, events[first], inclusive=inclusive)
        end = index_at(events, kind, events[last], inclusive=not inclusive)
        found = filled.batch(
            startingPosition="latest",
            startingPositions=json.dumps({"0": position(kind, events[first], inclusive=inclusive)}),
            endingPositions=json.dumps({"0": position(kind, events[last], inclusive=inclusive)}),
        )
        assert found == [("0", event.sequence_number, event.body) for event in events[start:end]]


def test_batch_between_positions_of_both_ends(filled: Hub) -> None:
    """Words stand for the ends; a partition's own position wins; the connector's forms are taken."""
    everything = filled.published()
    assert len(everything) == 8
    assert filled.batch() == filled.batch(startingPosition="-1", endingPosition="@latest") == everything
    assert filled.batch(startingPosition="latest") == []
    assert filled.batch(endingPosition="earliest") == []
    key = json.dumps({"ehName": filled.name, "partitionId": 1})
    place = {"offset": "@latest", "seqNo": -1, "enqueuedTime": None, "isInclusive": True}
    assert filled.batch(**{"eventhubs.startingPositions": json.dumps({key: place})}) == everything[:6]


@pytest.mark.parametrize("kind", ["seqNo", "enqueuedTime"])
def test_batches_from_end_to_start_read_every_event_once(filled: Hub, kind: str) -> None:
    """Ends are exclusive: a range that begins where another ends has no event in common with it, on uneven partitions
    too."""
    events = filled.events()["0"]
    found: list[Key] = []
    given = {
        "seqNo": ["0", "2", "4", "6", "99"],
        "enqueuedTime": [each.enqueued_time.isoformat() for each in events[::2]] + ["2999-01-01T00:00:00Z"],
    }[kind]
    for start, end in itertools.pairwise(given):
        found += filled.batch(startingPosition=start, endingPosition=end)
    assert sorted(found) == filled.published()


def test_batch_at_a_time_that_nothing_follows(filled: Hub) -> None:
    """A time behind the newest event is the end, or an error where the user wants one."""
    later = "2999-01-01T00:00:00Z"
    assert filled.batch(startingPosition=later) == []
    with pytest.raises(ConfigurationError, match="startingPosition: partition 0 has no event at or after"):
        filled.batch(startingPosition=later, noMatchingPosition="error")
    assert filled.batch(startingPosition="latest", noMatchingPosition="error") == []


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"startingPositions": '{"0": 99}'}, "startingPositions: partition 0 ends at sequence number 5, before 99"),
        ({"endingPositions": '{"0": 99}'}, "endingPositions: partition 0 ends at sequence number 5, before 99"),
        (
            {"startingPosition": "4", "noMatchingPosition": "error"},
            "startingPosition: partition 1 ends at sequence number 1, before 4",
        ),
        (
            {"endingPosition": "4", "noMatchingPosition": "error"},
            "endingPosition: partition 1 ends at sequence number 1, before 4",
        ),
        ({"startingPositions": '{"7": 0}'}, "startingPositions: hub .* has no partition 7"),
    ],
)
def test_batch_at_a_position_that_does_not_exist_is_refused(filled: Hub, options: dict[str, Any], says: str) -> None:
    """A number not reached, and a partition that there is not, are errors."""
    with pytest.raises(ConfigurationError, match=says):
        filled.batch(**options)


def test_batch_at_an_offset_unknown_to_the_service_is_refused(filled: Hub) -> None:
    """The service's refusal ends the planning; nothing waits for an event that never comes."""
    with pytest.raises(RequestRefusedError, match="offset"):
        filled.batch(startingPosition='{"offset": "99999"}')


def test_batch_of_events_that_retention_removed_fails(hub: Hub) -> None:
    """A starting number below the oldest event fails, unless the batch has the option to go on."""
    hub.publish(b"a", b"b", b"c")
    hub.drop_before(2)
    with pytest.raises(DataLossError, match="partition 0: the next event to read has sequence number 1"):
        hub.batch(startingPosition="1")
    assert hub.batch(startingPosition="1", failOnDataLoss="false") == [("0", 2, b"c")]
    assert hub.batch(startingPosition="earliest") == [("0", 2, b"c")]


# ------------------------------------------------------------------------------------------------------------ tasks


@pytest.mark.parametrize(
    ("tasks", "options"),
    [
        (1, {}),
        (1, {"partitionsPerTask": "auto"}),
        (3, {"partitionsPerTask": 1}),
        (2, {"partitionsPerTask": 2}),
        (1, {"partitionsPerTask": 8}),
        (6, {"minPartitions": 6}),
        (7, {"minPartitions": 20}),
    ],
)
def test_batch_tasks_share_the_events(service: SparkService, tasks: int, options: dict[str, Any]) -> None:
    """One task for few events, one per partition, or large ones split: every event comes once."""
    hub = Hub(service, 4)
    service.publish_all(hub.name, {"0": [b"%d" % n for n in range(50)], "1": [b"a"], "2": [b"b"]})
    reader = hub.batch_reader(**options)
    planned = reader.partitions()
    assert len(planned) == tasks
    assert rows_of(reader, planned) == hub.published()


def test_tasks_of_several_hubs_share_the_slots(service: SparkService) -> None:
    """Two for each slot, in proportion to the events; each hub has one at least."""
    names = [service.new_hub(2), service.new_hub(1)]
    many = [b"x"] * 20_000
    service.publish_all(names[0], {"0": many, "1": many})
    service.publish(names[1], [b"x"])
    given = {"connectionString": service.connection_string, "hub": ",".join(names)}

    def tasks(default: int | None, **options: str) -> list[int]:
        hubs = SourceOptions.each_hub({**given, **options})
        return [
            each.value.hub for each in BatchReader([each.for_batch(default) for each in hubs], COLUMNS).partitions()
        ]

    assert tasks(None) == tasks(2) == tasks(1, Slots="2") == [0, 0, 1]
    assert tasks(1) == [0, 1]


def test_batch_with_fewer_tasks_than_wanted_says_so_once(hub: Hub, caplog: pytest.LogCaptureFixture) -> None:
    """`minPartitions` is bounded by the service's five readers and by the events; that is logged, once per reader."""
    hub.publish(*[b"x"] * 20)
    reader = hub.batch_reader(minPartitions=6)
    assert [len(reader.partitions()), len(reader.partitions())] == [5, 5]
    assert caplog.text.count("minPartitions is 6, but there are only 5 tasks") == 1
    assert len(hub.batch_reader(minPartitions=5).partitions()) == 5
    assert caplog.text.count("minPartitions is") == 1


def test_task_shows_no_secret(filled: Hub) -> None:
    """What Spark may log of a task says which numbers, and nothing of the connection."""
    reader = filled.batch_reader()
    assert "SharedAccessKey" not in repr(reader.partitions()) + repr(vars(reader))


# ---------------------------------------------------------------------------------------------------------- columns


def test_schema_of_wrong_columns_is_refused() -> None:
    """A column is one of ours, of our type and nullable, or refused with what would be right."""
    body = StructField("body", BinaryType())
    there_is = (
        "The source has: body, partition, offset, sequenceNumber, enqueuedTime, publisher, partitionKey, properties, "
        "systemProperties, propertyTypes, systemPropertyTypes, hub"
    )
    assert columns_of(StructType([body])) == ("body",)
    for field, says in (
        (StructField("Body", body.dataType), f"unknown column Body; did you mean body? {there_is}"),
        (StructField("payload", body.dataType), f"unknown column payload. {there_is}"),
        (StructField("partition", body.dataType), "column partition must be STRING"),
        (StructField("enqueuedTime", TimestampNTZType()), "column enqueuedTime must be TIMESTAMP"),
        (StructField("properties", body.dataType), "column properties must be MAP<STRING, STRING>"),
        (StructField("systemProperties", body.dataType), "column systemProperties must be MAP<STRING, STRING>"),
        (StructField("body", body.dataType, nullable=False), "column body must be nullable"),
    ):
        with pytest.raises(ConfigurationError) as caught:
            columns_of(StructType([field]))
        assert str(caught.value) == f"schema: {says}"


# ---------------------------------------------------------------------------------------------------------- queries


def test_query_begins_at_the_newest_event(hub: Hub) -> None:
    """A new query begins at the newest event, by default, and goes on batch by batch; where nothing is new, there is
    no batch."""
    hub.publish(b"before")
    engine = Engine(hub)
    assert engine.batch() == []
    hub.publish(b"a", b"b")
    assert engine.batch() == [("0", 1, b"a"), ("0", 2, b"b")]
    assert engine.batch() is None
    hub.publish(b"c")
    assert engine.batch() == [("0", 3, b"c")]
    assert engine.reader.reportLatestOffset() == json.loads(engine.log[-1])


def test_query_start_survives_before_anything_is_read(hub: Hub) -> None:
    """What comes between the start of a query and its first event is not lost by a restart."""
    engine = Engine(hub)
    assert engine.batch() == []
    hub.publish(b"a")
    engine.restart()
    assert engine.batch() == [("0", 0, b"a")]


def test_query_first_batch_is_repeated_as_it_was(hub: Hub) -> None:
    """Spark asks a restarted query for the start of its first batch again, which by then would be another."""
    hub.publish(b"before")
    engine = Engine(hub)
    engine.start()
    hub.publish(b"a")
    first = engine.batch()
    hub.publish(b"b")
    engine.restart()
    asked_again = json.dumps(engine.reader.initialOffset())
    assert engine.read(asked_again, engine.log[0]) == first == [("0", 1, b"a")]
    assert engine.batch() == [("0", 2, b"b")]


def test_query_before_spark_4_2_remembers_its_last_batch(pair: Hub) -> None:
    """There the reader remembers where the last batch ended; after a restart Spark passes it with an empty batch."""
    pair.publish(b"a", b"b", b"c")
    engine = Engine(pair, startingPosition="earliest", maxEventsPerTrigger=2)
    first = engine.reader.latestOffset()
    start = engine.reader.initialOffset()
    assert rows_of(engine.reader, engine.reader.partitions(start, first)) == [("0", 0, b"a"), ("0", 1, b"b")]
    engine.restart()
    assert engine.reader.partitions(first, first) == []
    second = engine.reader.latestOffset()
    assert rows_of(engine.reader, engine.reader.partitions(first, second)) == [("0", 2, b"c")]
    assert engine.reader.latestOffset() == second


def test_query_of_chosen_partitions_reads_no_other(pair: Hub) -> None:
    """One of two partitions is read; the other can be added later, and none that was read can be left out."""
    pair.publish(b"a", b"b")
    pair.publish(b"x", to="1")
    assert pair.batch(partitions="[0]", startingPositions='{"1": 99}') == [("0", 0, b"a"), ("0", 1, b"b")]
    with pytest.raises(ConfigurationError, match=r"partitions: hub .* has no partition 5, only 2"):
        pair.batch(partitions="5")
    engine = Engine(pair, startingPosition="earliest", partitions="1")
    assert engine.batch() == [("1", 0, b"x")]
    pair.publish(b"c")
    assert engine.batch() is None
    engine.restart(partitions="0,1")
    assert engine.batch() == [("0", 0, b"a"), ("0", 1, b"b"), ("0", 2, b"c")]
    engine.restart(partitions="0")
    with pytest.raises(ConfigurationError, match="partitions: the checkpoint has partition 1, which is not chosen"):
        engine.batch()


def test_query_reads_a_partition_chosen_later_from_the_first_event_that_there_is(pair: Hub) -> None:
    """What retention removed before the partition was chosen is not lost; what it removes after that is."""
    pair.publish(b"a", b"b", b"c")
    pair.publish(b"x", to="1")
    engine = Engine(pair, startingPosition="earliest", partitions="1")
    assert engine.batch() == [("1", 0, b"x")]
    pair.drop_before(2)
    engine.restart(partitions="0,1")
    assert engine.batch() == [("0", 2, b"c")]
    assert engine.last == {pair.name: {"0": 3, "1": 1}, "(start)": {"0": 2, "1": 1}}
    engine.restart()
    assert engine.read(engine.log[-2], engine.log[-1]) == [("0", 2, b"c")]
    assert engine.batch() is None
    pair.publish(b"d", b"e")
    pair.drop_before(4)
    with pytest.raises(DataLossError, match="sequence number 3, but the partition now begins at 4"):
        engine.batch()


def test_query_keeps_links_as_long_as_its_triggers_need(hub: Hub) -> None:
    """The first batch's tasks keep their links for ten seconds; those of a quick query for less."""
    hub.publish(b"a", b"b")
    engine = Engine(hub, startingPosition="earliest", maxEventsPerTrigger=1)
    offsets = [engine.start()]
    kept = []
    for _ in range(2):
        offsets.append(engine.reader.latestOffset(offsets[-1], ReadMaxRows(1)))
        (task,) = engine.reader.partitions(offsets[-2], offsets[-1])
        kept.append(task.value.keep_links)
    assert kept[0] == KEEP_LINKS
    assert LEAST_KEEP_LINKS <= kept[1] < KEEP_LINKS


def test_query_limit_is_split_by_backlog(pair: Hub) -> None:
    """Batches hold the limit, in proportion to what waits, until nothing does."""
    pair.publish(*[b"%d" % n for n in range(30)])
    pair.publish(*[b"%d" % n for n in range(10)], to="1")
    published = pair.published()
    engine = Engine(pair, startingPosition="earliest", maxEventsPerTrigger=8)
    batches: list[list[Key]] = []
    while (batch := engine.batch()) is not None:
        batches.append(batch)
    assert [len(batch) for batch in batches] == [8] * 5
    assert [sum(key[0] == "0" for key in batch) for batch in batches] == [6] * 5
    assert sorted(key for batch in batches for key in batch) == sorted(published)
    assert isinstance(engine.reader.getDefaultReadLimit(), ReadMaxRows)


def test_query_with_read_all_available_has_no_limit(hub: Hub) -> None:
    """`ReadAllAvailable`, as of a trigger that runs once, passes the limit over."""
    hub.publish(*[b"%d" % n for n in range(9)])
    engine = Engine(hub, startingPosition="earliest", maxEventsPerTrigger=2)
    assert len(engine.batch(ReadAllAvailable()) or []) == 9
    assert isinstance(Engine(hub).reader.getDefaultReadLimit(), ReadAllAvailable)


def test_query_waits_for_min_events_per_trigger(hub: Hub) -> None:
    """Below `minEventsPerTrigger` there is no batch before the delay has passed."""
    engine = Engine(hub, minEventsPerTrigger=3, maxTriggerDelay=3600)
    assert engine.batch() == []
    hub.publish(b"a", b"b")
    assert engine.batch() is None
    hub.publish(b"c")
    assert len(engine.batch() or []) == 3
    hub.publish(b"d")
    assert engine.batch() is None
    engine.restart(maxTriggerDelay="0.000001")
    assert engine.batch() is None
    assert engine.batch() == [("0", 3, b"d")]


def test_query_with_available_now_ends(pair: Hub) -> None:
    """A query that is to end does, at what was there when it was asked to, limit by limit."""
    pair.publish(b"a", b"b", b"c")
    engine = Engine(pair, startingPosition="earliest", maxEventsPerTrigger=2)
    engine.reader.prepareForTriggerAvailableNow()
    pair.publish(b"later")
    pair.publish(b"later", to="1")
    assert [engine.batch(), engine.batch(), engine.batch()] == [
        [("0", 0, b"a"), ("0", 1, b"b")],
        [("0", 2, b"c")],
        None,
    ]
    engine.restart()
    assert engine.batch() == [("0", 3, b"later"), ("1", 0, b"later")]


def test_query_reads_partitions_that_are_added(hub: Hub) -> None:
    """A partition added while a query runs, or while it does not, is read from its first event."""
    engine = Engine(hub)
    engine.batch()
    hub.service.add_partitions(hub.name, 1)
    hub.publish(b"a", to="1")
    assert engine.batch() == [("1", 0, b"a")]
    hub.service.add_partitions(hub.name, 1)
    hub.publish(b"b", to="2")
    engine.restart()
    assert engine.batch() == [("2", 0, b"b")]


# ----------------------------------------------------------------------------------------------------------- losses


def lossy(hub: Hub) -> tuple[Engine, Engine]:
    """Two queries that have read three events, of which one has the option to go on whatever is lost."""
    hub.publish(b"a", b"b", b"c")
    engines = Engine(hub, startingPosition="earliest"), Engine(hub, startingPosition="earliest", failOnDataLoss="false")
    for engine in engines:
        assert len(engine.batch() or []) == 3
    return engines


def test_query_past_retention_fails_or_goes_on(hub: Hub, caplog: pytest.LogCaptureFixture) -> None:
    """A query that retention has overtaken fails, or says what is gone and goes on with what there is."""
    strict, lenient = lossy(hub)
    hub.publish(b"d", b"e", b"f")
    hub.drop_before(5)
    for _ in range(2):
        with pytest.raises(DataLossError, match="sequence number 3, but the partition now begins at 5"):
            strict.batch()
        strict.restart()
    assert lenient.batch() == [("0", 5, b"f")]
    assert "has sequence number 3" in caplog.text
    assert lenient.batch() is None


def test_query_with_a_logged_batch_past_retention_fails_or_goes_on(hub: Hub) -> None:
    """A batch that was logged and not read fails when it is repeated too late, or gives what is left."""
    strict, lenient = lossy(hub)
    hub.publish(b"d", b"e")
    starts = [engine.log[-1] for engine in (strict, lenient)]
    for engine in (strict, lenient):
        engine.batch()
    hub.drop_before(4)
    with pytest.raises(DataLossError, match="begins at 4"):
        strict.new_reader().partitions(json.loads(starts[0]), json.loads(strict.log[-1]))
    lenient.restart()
    assert lenient.read(starts[1], lenient.log[-1]) == [("0", 4, b"e")]


@pytest.mark.parametrize("count", [0, 2, 3, 7])
@pytest.mark.parametrize("was_stopped", [False, True])
def test_query_of_a_recreated_hub_fails_or_goes_on(hub: Hub, count: int, was_stopped: bool) -> None:
    """A query fails when its hub is another one, with fewer events, as many or more; or reads all of the new one's,
    again if the batch is repeated after a restart, and none of the former hub's that a worker still has. So too if the
    hub was recreated while the query was stopped, and a query that fails does so at each start."""
    strict, lenient = lossy(hub)
    hub.recreate()
    hub.publish(*[b"new %d" % n for n in range(count)])
    for _ in range(2):
        with pytest.raises(DataLossError, match="the hub was recreated: its creation time is now"):
            strict.batch()
        strict.restart()
    if was_stopped:
        lenient.restart()
    before = len(lenient.log) - 1
    read = [key for _ in range(3) for key in lenient.batch() or []]
    assert read == [("0", n, b"new %d" % n) for n in range(count)]
    lenient.restart()
    logged = lenient.log[before:]
    assert [key for start, end in itertools.pairwise(logged) for key in lenient.read(start, end)] == read
    assert lenient.batch() is None


@pytest.mark.parametrize("count", [0, 4, 7])
def test_query_with_a_logged_batch_of_a_hub_that_was_recreated(hub: Hub, count: int) -> None:
    """A batch that was logged and not read is lost, whatever numbers the new hub has; the next one reads that hub from
    its first event. The query's first batch is like any other."""
    hub.publish(b"a", b"b", b"c")
    for batches in (1, 2):
        engine = Engine(hub, startingPosition="earliest", maxEventsPerTrigger=2)
        begin = json.dumps(engine.start())
        for _ in range(batches):
            engine.batch()
        start, end = [begin, *engine.log][-2:]
        hub.recreate()
        hub.publish(*[b"new %d" % n for n in range(count)])
        for _ in range(2):
            engine.restart()
            with pytest.raises(DataLossError, match="the hub was recreated: its creation time is now"):
                engine.read(start, end)
        engine.restart(failOnDataLoss="false")
        assert engine.read(start, end) == []
        read = [key for _ in range(5) for key in engine.batch() or []]
        assert read == [("0", n, b"new %d" % n) for n in range(count)]
        hub.recreate()
        hub.publish(b"a", b"b", b"c")


def test_query_whose_hub_is_recreated_before_its_first_batch(hub: Hub) -> None:
    """The events at which the query would begin are gone: the new hub is read from its first event."""
    hub.publish(b"a", b"b")
    engine = Engine(hub, failOnDataLoss="false")
    start = json.dumps(engine.start())
    hub.recreate()
    hub.publish(b"c", b"d", b"e")
    engine.log.append(start)  # Spark asks for it once, and keeps it
    engine.restart()  # within a run, what is read before the change is noticed would be read again
    assert engine.batch() == [("0", 0, b"c"), ("0", 1, b"d"), ("0", 2, b"e")]
    assert engine.batch() is None


def test_query_of_a_recreated_hub_with_fewer_partitions(pair: Hub) -> None:
    """A partition that a checkpoint knows and the hub does not is a loss, or forgotten."""
    pair.publish(b"a", to="1")
    strict, lenient = Engine(pair, startingPosition="earliest"), Engine(pair, startingPosition="earliest")
    for engine in (strict, lenient):
        engine.batch()
    pair.recreate(1)
    pair.publish(b"new")
    strict.restart()
    with pytest.raises(DataLossError, match="the hub was recreated: its creation time is now"):
        strict.batch()
    lenient.restart(failOnDataLoss="false")
    assert lenient.batch() == [("0", 0, b"new")]


def test_batch_of_a_recreated_hub_reads_the_new_events(hub: Hub) -> None:
    """The same numbers in another hub are other events, whatever a worker has kept of the former one."""
    for name in (b"a", b"b"):
        hub.publish(name, name)
        assert hub.batch() == [("0", 0, name), ("0", 1, name)]
        hub.recreate()


# ---------------------------------------------------------------------------------------------------------- service


def test_query_at_a_busy_service_is_retried(hub: Hub) -> None:
    """A refusal that passes does not end a query."""
    engine = Engine(hub)
    fault = hub.service.add_fault(Reject(), role=LinkRole.MANAGEMENT, count=2)
    assert engine.batch() == []
    assert fault.fired == 2


def test_query_over_a_lost_connection_is_retried(hub: Hub) -> None:
    """A query goes on over another connection."""
    engine = Engine(hub)
    engine.batch()
    hub.service.drop_connections()
    hub.publish(b"a")
    assert engine.batch() == [("0", 0, b"a")]


def test_query_does_not_ask_again_for_what_is_known(pair: Hub) -> None:
    """Batches are planned by what was seen last; that nothing is new is said only after another look."""
    pair.publish(b"a", b"b", b"c")
    engine = Engine(pair, startingPosition="earliest", maxEventsPerTrigger=1, snapshotInterval=3600)
    assert engine.batch() == [("0", 0, b"a")]
    requests = pair.service.add_fault(Delay(0), role=LinkRole.MANAGEMENT, count=None)
    assert engine.batch() == [("0", 1, b"b")]
    assert engine.reader.reportLatestOffset()[pair.name] == {"0": 3, "1": 0}
    assert requests.fired == 0
    engine.restart(snapshotInterval=1)
    assert engine.batch() == [("0", 2, b"c")]
    asked = requests.fired
    pair.publish(b"d")
    assert engine.batch() == [("0", 3, b"d")]
    assert requests.fired >= asked + 3


def test_full_batch_does_not_wait_for_answers(pair: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch that what is known fills is planned at once, and read, while nothing answers; the one after it waits."""
    monkeypatch.setattr(watch, "AWAY_SECONDS", 3600.0)
    pair.publish(b"a", b"b", b"c", b"d")
    engine = Engine(pair, startingPosition="earliest", maxEventsPerTrigger=1)
    assert engine.batch() == [("0", 0, b"a")]
    hold = pair.service.add_fault(Hold(), role=LinkRole.MANAGEMENT, count=None)
    assert engine.batch() == [("0", 1, b"b")]
    assert engine.batch() == [("0", 2, b"c")]
    pair.publish(b"e", to="1")
    pair.service.call(hold.remove)
    assert engine.batch(ReadMaxRows(2)) == [("0", 3, b"d"), ("1", 0, b"e")]
    assert engine.batch() is None


@pytest.mark.parametrize("fails", [True, False])
def test_query_finds_a_recreated_hub_before_a_full_batch(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """Before a batch that is planned without an answer, the hub is asked whether it is still the same."""
    monkeypatch.setattr(watch, "AWAY_SECONDS", 0.0)
    hub.publish(b"a", b"b", b"c", b"d")
    engine = Engine(hub, startingPosition="earliest", maxEventsPerTrigger=1, failOnDataLoss=str(fails).lower())
    assert [engine.batch() for _ in range(2)] == [[("0", 0, b"a")], [("0", 1, b"b")]]
    hub.recreate()
    hub.publish(b"A", b"B", b"C", b"D")
    if fails:
        with pytest.raises(DataLossError, match="the hub was recreated"):
            engine.batch()
        return
    assert [engine.batch() for _ in range(5)] == [
        *([("0", n, b)] for n, b in enumerate((b"A", b"B", b"C", b"D"))),
        None,
    ]


def test_query_does_not_ask_where_it_is_to_read_a_batch(pair: Hub) -> None:
    """The ranges of a batch follow from its start and end, without a request, however late they are wanted."""
    pair.publish(b"a", b"b")
    engine = Engine(pair, startingPosition="earliest", maxEventsPerTrigger=1, snapshotInterval=1e-6)
    assert engine.batch() == [("0", 0, b"a")]
    requests = pair.service.add_fault(Delay(0), role=LinkRole.MANAGEMENT, count=None)
    assert len(engine.reader.partitions(engine.start(), {pair.name: {"0": 2, "1": 0}})) == 1
    assert requests.fired == 0


# ----------------------------------------------------------------------------------------------------- several hubs


class Hubs:
    """Two hubs, of which one has two partitions."""

    def __init__(self, service: SparkService) -> None:
        self.one, self.two = Hub(service), Hub(service, 2)
        self.names = f"{self.one.name}, {self.two.name}"

    def published(self) -> list[Key]:
        return [(f"{hub.name}/{each[0]}", *each[1:]) for hub in (self.one, self.two) for each in hub.published()]


@pytest.fixture
def hubs(service: SparkService) -> Hubs:
    """Two hubs without events."""
    return Hubs(service)


class SeveralHubs(Engine):
    """An engine of a query that reads several hubs; its keys have the hub's name before the partition."""

    columns = (*COLUMNS, "hub")

    def __init__(self, hubs: Hubs, **options: Any) -> None:
        super().__init__(hubs.one)
        self.restart(**({"hub": hubs.names} | options))

    def new_reader(self) -> StreamReader:
        return StreamReader([each.for_stream() for each in self.hub.hubs(**self.given)], self.columns)

    def read(self, start: str, end: str) -> list[Key]:
        tasks = self.reader.partitions(json.loads(start), json.loads(end))
        return by_hub(self.reader, tasks)

    def all(self) -> list[Key]:
        """Read batches until there is none."""
        found: list[Key] = []
        while (batch := self.batch()) is not None:
            found += batch
        return found


def by_hub(reader: BatchReader | StreamReader, tasks: Any) -> list[Key]:
    rows = [row for task in tasks for batch in reader.read(task) for row in batch.to_pylist()]
    return sorted((f"{row['hub']}/{row['partition']}", row["sequenceNumber"], row["body"]) for row in rows)


def test_batch_of_several_hubs_has_all_their_events(hubs: Hubs) -> None:
    """Each row with its hub; positions and partitions by hub, in JSON; positions of other hubs are ignored."""
    hubs.one.publish(b"a", b"b")
    hubs.two.publish(b"c")
    hubs.two.publish(b"d", b"e", to="1")
    one, two = hubs.one.name, hubs.two.name

    def batch(**options: Any) -> list[Key]:
        readers = BatchReader(
            [each.for_batch() for each in hubs.one.hubs(**({"hub": hubs.names} | options))], SeveralHubs.columns
        )
        return by_hub(readers, readers.partitions())

    everything = hubs.published()
    assert batch() == batch(hub=json.dumps([two, one])) == sorted(everything)
    assert batch(startingPosition=json.dumps({two.upper(): "latest"})) == [(f"{one}/0", 0, b"a"), (f"{one}/0", 1, b"b")]
    assert batch(partitions=json.dumps({two: [1]}), startingPosition=json.dumps({one: {"seqNo": 1}, two: 1})) == [
        (f"{one}/0", 1, b"b"),
        (f"{two}/1", 1, b"e"),
    ]
    positions = {two: {"0": "latest"}, "elsewhere": {"0": "latest"}}
    assert (f"{two}/0", 0, b"c") not in batch(startingPositions=json.dumps(positions))


def test_query_of_several_hubs_shares_its_limit(hubs: Hubs) -> None:
    """A batch's limit is split by backlog over the partitions of all hubs; checkpoints name each hub."""
    hubs.one.publish(*[b"%d" % n for n in range(20)])
    hubs.two.publish(*[b"%d" % n for n in range(10)])
    hubs.two.publish(*[b"%d" % n for n in range(10)], to="1")
    everything = sorted(hubs.published())
    engine = SeveralHubs(hubs, startingPosition="earliest", maxEventsPerTrigger=8)
    first = engine.batch() or []
    assert sorted(key[0] for key in first) == sorted(
        [f"{hubs.one.name}/0"] * 4 + [f"{hubs.two.name}/0"] * 2 + [f"{hubs.two.name}/1"] * 2
    )
    assert sorted(first + engine.all()) == everything
    assert engine.last == {hubs.one.name: {"0": 20}, hubs.two.name: {"0": 10, "1": 10}}
    assert engine.reader.reportLatestOffset() == json.loads(engine.log[-1])


def test_query_is_given_a_further_hub(hubs: Hubs) -> None:
    """A checkpoint of one hub is continued with two; the new one begins at its starting position, and what comes before
    its first event is read is not lost by a restart."""
    one, two = hubs.one, hubs.two
    one.publish(b"a")
    two.publish(b"before")
    engine = SeveralHubs(hubs, hub=one.name, startingPosition="earliest")
    assert engine.batch() == [(f"{one.name}/0", 0, b"a")]
    assert engine.last == {one.name: {"0": 1}, "(start)": {"0": 0}}
    engine.restart(hub=hubs.names, startingPosition="latest")
    assert engine.batch() == []
    assert json.loads(engine.log[-1])["(start)"] == {two.name: {"0": 1, "1": 0}}
    two.publish(b"b")
    engine.restart()
    assert engine.batch() == [(f"{two.name}/0", 1, b"b")]
    one.publish(b"c")
    two.publish(b"d", to="1")
    engine.restart(hub=json.dumps([two.name, one.name]))
    assert engine.batch() == sorted([(f"{one.name}/0", 1, b"c"), (f"{two.name}/1", 0, b"d")])
    repeated = engine.new_reader()
    assert by_hub(repeated, repeated.partitions(json.loads(engine.log[-2]), json.loads(engine.log[-1]))) == sorted(
        [(f"{one.name}/0", 1, b"c"), (f"{two.name}/1", 0, b"d")]
    )


def test_query_that_leaves_out_a_hub_fails_or_goes_on(hubs: Hubs, caplog: pytest.LogCaptureFixture) -> None:
    """A hub that the checkpoint has and the options do not is a data loss, as for Kafka; if set to go on, the query
    forgets the hub, and starts over in it later."""
    one, two = hubs.one, hubs.two
    one.publish(b"a")
    two.publish(b"b")
    engine = SeveralHubs(hubs, startingPosition="earliest")
    assert len(engine.all()) == 2
    engine.restart(hub=one.name)
    one.publish(b"c")
    with pytest.raises(
        DataLossError, match=f"hub {two.name}, partition 0: the checkpoint has this hub, and the option"
    ):
        engine.batch()
    engine.restart(failOnDataLoss="false")
    assert engine.batch() == [(f"{one.name}/0", 1, b"c")]
    assert caplog.text.count("the checkpoint has this hub") == 1
    assert engine.batch() is None
    assert caplog.text.count("the checkpoint has this hub") == 1
    two.publish(b"d")
    engine.restart(hub=hubs.names, failOnDataLoss="true")
    assert engine.batch() == [(f"{two.name}/0", 0, b"b"), (f"{two.name}/0", 1, b"d")]


def test_query_of_several_hubs_checks_the_group_in_each(hubs: Hubs) -> None:
    """A group that one of the hubs lacks, the one to watch in too, is named with its hub before anything is read."""
    for option in ("consumerGroup", "watchConsumerGroup"):
        with pytest.raises(ConfigurationError, match=f"{option}: hub .* has no consumer group elsewhere"):
            SeveralHubs(hubs, **{option: "elsewhere"}).start()
    with pytest.raises(ConfigurationError, match="consumerGroup: hub bare has no consumer group watch"):
        SeveralHubs(hubs, hub=f"{hubs.one.name},bare", consumerGroup="watch").start()


# ------------------------------------------------------------------------------------------------------------ watch


def test_query_that_watches_sees_an_event_at_once(hubs: Hubs) -> None:
    """Links show new events of both hubs to a query that would look again in an hour; they are closed at its end."""
    engine = SeveralHubs(hubs, watchConsumerGroup="watch", snapshotInterval=3600)
    assert engine.batch() == []
    for number in range(3):
        for hub, to in ((hubs.one, "0"), (hubs.two, "1")):
            publishing = threading.Timer(0.1, hub.publish, [b"x"], {"to": to})
            publishing.start()
            assert engine.batch() == [(f"{hub.name}/{to}", number, b"x")]
            publishing.join()
    engine.reader.stop()


PROGRAM = """
import json, sys
from eventpump.spark import worker
from eventpump.spark.source.options import SourceOptions
from eventpump.spark.source.readers import StreamReader
reader = StreamReader([each.for_stream() for each in SourceOptions.each_hub(json.load(sys.stdin))], ("body",))
try:
    reader.initialOffset()
    print("running", flush=True)
    worker.run(__import__("asyncio").Event().wait())
finally:
    reader.stop()
    print("stopped", flush=True)
"""


def test_query_ended_by_spark_closes_its_connection(hub: Hub) -> None:
    """Spark ends a query's process by SIGTERM; whatever it is doing, it closes its connections first."""
    options = {"connectionString": hub.service.connection_string, "hub": hub.name}
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(options).encode())
        process.stdin.close()
        assert process.stdout.readline() == b"running\n"
        process.terminate()
        assert process.stdout.read() == b"stopped\n"
    assert process.returncode == 0


def test_query_with_a_checkpoint_of_another_hub_is_refused(hub: Hub, pair: Hub) -> None:
    """A query pointed at another hub is not continued at numbers that mean nothing there."""
    engine = Engine(hub)
    engine.batch()
    engine.hub = pair
    engine.restart()
    with pytest.raises(ConfigurationError, match="checkpoint: it belongs to hub"):
        engine.batch()


def test_query_with_a_checkpoint_of_the_connector_goes_on(pair: Hub) -> None:
    """Offsets in the connector's shape are read, and given back as they were written where nothing is new."""
    pair.publish(b"a", b"b")
    engine = Engine(pair)
    written = {pair.name: {"1": 0, "0": 1}}
    engine.log.append(json.dumps(written))
    assert engine.batch() == [("0", 1, b"b")]
    idle = {pair.name: {"1": 0, "0": 2}}
    assert json.dumps(engine.reader.latestOffset(idle)) == json.dumps(idle)
