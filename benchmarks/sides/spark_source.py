"""Sources on a Spark of two slots: ours, rows that are in memory already, and one written the obvious way."""

from __future__ import annotations

import os
import queue
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, cast

import psutil  # type: ignore[import-untyped]  # it comes without types
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.listener import StreamingQueryListener
from pyspark.sql.streaming.query import StreamingQuery

from benchmarks.processes import READY
from benchmarks.sides.common import BODY_SIZE
from benchmarks.sides.stages import make_messages
from eventpump.spark.data_source import EventPumpDataSource, register
from eventpump.spark.local import local_session
from eventpump.spark.source.receive import ReceiveCounters, counters
from eventpump.spark.source.rows import PartitionMessages, RowEncoder
from eventpump.spark.source.schema import COLUMN_TYPES, ddl

SLOTS = 2
_BATCH = 8192
TOLD_TIMEOUT = 120.0
"""Seconds that rows may take to be read and reported."""


@contextmanager
def _session() -> Iterator[SparkSession]:
    os.environ["PYTHONPATH"] = os.getcwd()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        # A busy machine may take longer to start a worker than Spark waits for it.
        patience = {"spark.python.authenticate.socketTimeout": "120s"}
        spark = local_session(Path(directory), master=f"local[{SLOTS}]", is_short=False, settings=patience)
        try:
            register(spark)
            spark.dataSource.register(InMemory)
            spark.dataSource.register(Obvious)
            yield spark
        finally:
            spark.stop()


# -------------------------------------------------------------------------------------------------------- the peers


class _Numbers(InputPartition):
    """A range of one hub partition."""

    def __init__(self, partition: int, start: int, end: int) -> None:
        super().__init__((partition, start, end))


class _CountedReader(DataSourceStreamReader):
    """Plans so many rows of every partition per batch, up to a number."""

    def __init__(self, options: dict[str, str]) -> None:
        self.options = options
        self.partition_count = int(options["partitions"])
        self.per_batch = int(options["perbatch"]) // self.partition_count
        self.total = int(options["events"]) // self.partition_count

    def initialOffset(self) -> dict[str, int]:  # noqa: N802 - Spark's name
        """Begin at the first row."""
        return {"next": 0}

    def latestOffset(self, start: Any = None, limit: Any = None) -> dict[str, int]:  # noqa: N802 - Spark's name
        """End a batch's rows further on."""
        return {"next": min((start or {"next": 0})["next"] + self.per_batch, self.total)}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> Sequence[InputPartition]:
        """Return a task per partition."""
        return [_Numbers(number, start["next"], end["next"]) for number in range(self.partition_count)]


@cache
def _rows_in_memory(columns: tuple[str, ...], body_size: int) -> pa.RecordBatch:
    return RowEncoder(columns).encode([PartitionMessages("0", make_messages(_BATCH, body_size))])


class _InMemoryReader(_CountedReader):
    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Return the same rows over and over."""
        _, start, end = partition.value
        rows = _rows_in_memory(tuple(self.options["columns"].split(",")), int(self.options["bodysize"]))
        while start < end:
            yield rows.slice(0, min(_BATCH, end - start))
            start += _BATCH


class InMemory(DataSource):
    """Arrow batches that the worker has in memory: what Spark can take at most."""

    @classmethod
    def name(cls) -> str:
        """Its name as a format."""
        return "in_memory"

    def schema(self) -> str:
        """The same columns as our source."""
        return ddl()

    def streamReader(self, schema: Any) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        """Return the reader."""
        options = {name.lower(): value for name, value in self.options.items()}
        return _InMemoryReader({**options, "columns": ",".join(schema.fieldNames())})


class _ObviousReader(_CountedReader):
    def read(self, partition: InputPartition) -> Iterator[tuple[Any, ...]]:
        """Receive with azure-eventhub, as its documentation shows, and give a tuple per event."""
        from azure.eventhub import EventData, EventHubConsumerClient

        number, start, end = partition.value
        events: queue.Queue[EventData] = queue.Queue(maxsize=10_000)
        client = EventHubConsumerClient.from_connection_string(
            self.options["connectionstring"], "$Default", eventhub_name=self.options["hub"]
        )

        def on_event_batch(_context: Any, batch: list[EventData]) -> None:
            for event in batch:
                events.put(event)

        receiving = threading.Thread(
            target=client.receive_batch,
            args=(on_event_batch,),
            kwargs={
                "partition_id": str(number),
                "starting_position": start - 1,
                "max_batch_size": 300,
                "prefetch": 3000,
            },
            daemon=True,
        )
        receiving.start()
        while start < end:
            event = events.get()
            assert event.sequence_number == start
            yield (
                b"".join(cast("Iterator[bytes]", event.body)),
                str(number),
                event.offset,
                event.sequence_number,
                event.enqueued_time,
                None,
                None if event.partition_key is None else event.partition_key.decode(),
                {str(name): str(value) for name, value in (event.properties or {}).items()},
                {str(name): str(value) for name, value in event.system_properties.items()},
            )
            start += 1
        # What it received ahead of that is discarded: left full, its thread would never see that it is to end.
        threading.Thread(target=_drain, args=(events, receiving), daemon=True).start()
        client.close()


def _drain(events: queue.Queue[Any], receiving: threading.Thread) -> None:
    while receiving.is_alive():
        try:
            events.get(timeout=0.1)
        except queue.Empty:
            continue


class Obvious(DataSource):
    """What one writes first."""

    @classmethod
    def name(cls) -> str:
        """Its name as a format."""
        return "obvious"

    def schema(self) -> str:
        """The same columns as our source."""
        return ddl()

    def streamReader(self, schema: Any) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        """Return the reader."""
        return _ObviousReader({name.lower(): value for name, value in self.options.items()})


# ------------------------------------------------------------------------------------------------------ measuring


def _python_processes() -> list[psutil.Process]:
    """Return the Python processes that Spark started, and not this one."""
    return [each for each in psutil.Process().children(recursive=True) if "python" in _name(each)]


def _name(process: psutil.Process) -> str:
    """Return a process's name; nothing where it has ended, as those that Spark starts for a file soon do."""
    try:
        return str(process.name())
    except psutil.NoSuchProcess:
        return ""


def _tree() -> list[psutil.Process]:
    return [psutil.Process(), *psutil.Process().children(recursive=True)]


def _cpu(processes: Sequence[psutil.Process]) -> float:
    total = 0.0
    for each in processes:
        try:
            times = each.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return float(total)


def _resident(process: psutil.Process) -> float:
    """Return a process's resident memory in MiB; 0 where it has ended."""
    try:
        return float(process.memory_info().rss) / 2**20
    except psutil.NoSuchProcess:
        return 0.0


class _Watch(StreamingQueryListener):
    """Takes down each batch with rows as it ends: rows, seconds, CPU seconds of Spark and of the service."""

    def __init__(self, service: int | None) -> None:
        self._service = None if service is None else psutil.Process(service)
        self._told = threading.Condition()
        self.batches: list[tuple[int, float, float, float]] = []
        self.resident: list[float] = []

    def onQueryStarted(self, event: Any) -> None:  # noqa: N802 - Spark's name
        """A query began."""

    def onQueryProgress(self, event: Any) -> None:  # noqa: N802 - Spark's name
        """A batch ended."""
        progress = event.progress
        if progress.numInputRows:
            service = 0.0 if self._service is None else _cpu([self._service])
            took = progress.durationMs["triggerExecution"]
            workers = _python_processes()
            with self._told:
                self.resident.append(max(map(_resident, workers), default=0.0))
                self.batches.append((progress.numInputRows, took, _cpu(_tree()), service))
                self._told.notify_all()

    def onQueryIdle(self, event: Any) -> None:  # noqa: N802 - Spark's name
        """Nothing to do."""

    def onQueryTerminated(self, event: Any) -> None:  # noqa: N802 - Spark's name
        """A query ended."""

    def wait_for(self, rows: int) -> None:
        """Wait until so many rows were reported, which Spark does late.

        Raises:
            AssertionError: There are fewer, or more.
        """
        with self._told:
            self._told.wait_for(lambda: sum(each[0] for each in self.batches) >= rows, TOLD_TIMEOUT)
            found = sum(each[0] for each in self.batches)
        if found != rows:
            raise AssertionError(f"{found} rows came of {rows}")


def _format(kind: str) -> str:
    return {"ours": "eventpump", "memory": "in_memory", "obvious": "obvious"}[kind]


def _stream(
    spark: SparkSession, kind: str, connection_string: str, hub: str, partitions: int, events: int, per_batch: int,
    columns: Sequence[str] = tuple(COLUMN_TYPES), body_size: int = BODY_SIZE, **more: object,
) -> DataFrame:  # fmt: skip
    reader = spark.readStream.format(_format(kind))
    if kind == "ours":
        options: dict[str, object] = {
            "connectionString": connection_string,
            "hub": hub,
            "startingPosition": "earliest",
            "maxEventsPerTrigger": per_batch,
            **more,
        }
    else:
        options = {
            "connectionString": connection_string,
            "hub": hub,
            "partitions": partitions,
            "events": events,
            "perbatch": per_batch,
            "bodysize": body_size,
        }
    return reader.options(**{name: str(value) for name, value in options.items()}).schema(ddl(columns)).load()


def _to_nowhere(frame: DataFrame) -> StreamingQuery:
    return frame.writeStream.format("noop").start()


def rate(
    kind: str,
    connection_string: str,
    hub: str,
    partitions: int,
    events: int,
    per_batch: int,
    service: int,
    columns: Sequence[str] = tuple(COLUMN_TYPES),
    body_size: int = BODY_SIZE,
    warm_up: int = 2,
) -> dict[str, float]:
    """Read so many events in batches, to nowhere.

    Args:
        body_size: Of rows in memory.
        warm_up: Batches that are not counted.

    Returns:
        `wall` in µs per row, `cost` in µs of CPU of all of Spark per row, `service` likewise of the emulator, `rate` in
        rows per second, `busy` of both cores.
    """
    with _session() as spark:
        watch = _Watch(service)
        spark.streams.addListener(watch)
        query = _to_nowhere(
            _stream(spark, kind, connection_string, hub, partitions, events, per_batch, columns, body_size)
        )
        query.processAllAvailable()
        watch.wait_for(events)
        query.stop()
        query.awaitTermination()
        batches = watch.batches
        rows = sum(each[0] for each in batches[warm_up:])
        wall = sum(each[1] for each in batches[warm_up:]) / 1000
        cpu, service_cpu = (batches[-1][part] - batches[warm_up - 1][part] for part in (2, 3))
        return {
            "wall": wall / rows * 1e6,
            "cost": cpu / rows * 1e6,
            "service": service_cpu / rows * 1e6,
            "rate": rows / wall,
            "busy": (cpu + service_cpu) / wall / (os.cpu_count() or 1),
        }


def trigger(
    kind: str, connection_string: str, hub: str, partitions: int, batches: int, warm_up: int
) -> dict[str, float]:
    """Run batches of one row per partition.

    Returns:
        The milliseconds of one, in the median.
    """
    with _session() as spark:
        watch = _Watch(None)
        spark.streams.addListener(watch)
        events = partitions * (batches + warm_up)
        frame = _stream(spark, kind, connection_string, hub, partitions, events, partitions)
        query = _to_nowhere(frame)
        query.processAllAvailable()
        watch.wait_for(events)
        query.stop()
        query.awaitTermination()
        times = sorted(each[1] for each in watch.batches[warm_up : warm_up + batches])
        return {"median": times[len(times) // 2]}


def idle(connection_string: str, hub: str, seconds: int, settle: int) -> dict[str, float]:
    """Measure a query that has nothing to read, at the default trigger and at one of a second.

    Returns:
        For each, in per cent of a core: our process on the driver, and all of Spark.
    """
    found: dict[str, float] = {}
    with _session() as spark:
        for name, interval in (("default", "0 seconds"), ("second", "1 second")):
            frame = _stream(spark, "ours", connection_string, hub, 0, 0, 1000, startingPosition="latest")
            query = frame.writeStream.format("noop").trigger(processingTime=interval).start()
            query.processAllAvailable()
            query.awaitTermination(settle)
            ours = set(_python_processes())
            before = {each: _cpu([each]) for each in _tree()}
            query.awaitTermination(seconds)
            # Spark ends workers that have been idle for a minute; they did nothing.
            spent = {each: _cpu([each]) - cpu for each, cpu in before.items() if each.is_running()}
            query.stop()
            query.awaitTermination()
            found[f"{name}_ours"] = sum(cpu for each, cpu in spent.items() if each in ours) / seconds * 100
            found[f"{name}_all"] = sum(spent.values()) / seconds * 100
    return found


def memory(connection_string: str, hub: str, fills: int, fill: int, per_batch: int) -> dict[str, float]:
    """Read what is filled in step by step.

    Returns:
        The highest resident memory of a worker in MiB, `early` and `late`.
    """
    with _session() as spark:
        watch = _Watch(None)
        spark.streams.addListener(watch)
        query = _to_nowhere(_stream(spark, "ours", connection_string, hub, 0, 0, per_batch))
        for number in range(fills):
            print(READY, flush=True)
            sys.stdin.readline()
            watch.wait_for((number + 1) * fill)
        query.stop()
        query.awaitTermination()
        third = len(watch.resident) // 3
        return {"early": max(watch.resident[:third]), "late": max(watch.resident[-third:])}


def hits(connection_string: str, hub: str, events: int, per_batch: int) -> dict[str, float]:
    """Read a stream.

    Returns:
        How many ranges it had, and the share of them that a kept link went on with.
    """
    with _session() as spark:
        # Otherwise the source has workers apart from those that are asked for their counters.
        spark.dataSource.register(EventPumpDataSource)
        query = _to_nowhere(_stream(spark, "ours", connection_string, hub, 0, 0, per_batch))
        query.processAllAvailable()
        query.stop()
        query.awaitTermination()
        found = _sum_of_counters(spark)
    return {"links": found.from_kept_link / max(1, found.ranges), "ranges": float(found.ranges)}


def _sum_of_counters(spark: SparkSession) -> ReceiveCounters:
    """Query every worker, with as many jobs as are needed to reach them all."""
    found: dict[int, ReceiveCounters] = {}

    def ask(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in batches:
            pass
        now = counters()
        yield pa.RecordBatch.from_pylist(
            [{"pid": os.getpid(), "text": ",".join(str(getattr(now, name)) for name in _COUNTED)}]
        )

    for _ in range(8):
        for row in spark.range(0, SLOTS, 1, SLOTS).mapInArrow(ask, "pid long, text string").collect():
            found[row.pid] = ReceiveCounters(*map(int, row.text.split(",")))
    return ReceiveCounters(*(sum(getattr(each, name) for each in found.values()) for name in _COUNTED))


_COUNTED = ("ranges", "from_kept_link", "from_new_link", "events")
