"""A task's receiving, over real sockets and the process's own loop; without Spark."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pytest
from pydantic import SecretStr

from eventpump import EntityNotFoundError, EventData, EventProducer
from eventpump.emulator.faults import CloseConnection, DetachLink, DropConnection, LinkRole, Performative, Refuse
from eventpump.errors import ConsumerDisconnectedError
from eventpump.spark import worker
from eventpump.spark.connection import SparkConnection
from eventpump.spark.source.offsets import ReceiveOptions, SequenceRange
from eventpump.spark.source.receive import ReceiveCounters, counters, read_ranges
from eventpump.spark.source.schema import COLUMN_TYPES
from eventpump.testing.threaded import EmulatorThread

_ROOT = Path(__file__).parents[2]
_PARTITIONS = 3


@pytest.fixture(scope="module")
def service() -> Iterator[EmulatorThread]:
    """A service with a hub of 1000 events in each partition."""
    with EmulatorThread({"telemetry": _PARTITIONS, "other": 1}) as started:

        async def fill() -> None:
            async with EventProducer(started.connection_string, "telemetry") as producer:
                for partition in range(_PARTITIONS):
                    events = [EventData(f"{partition}-{number}".encode()) for number in range(1000)]
                    await producer.send(events, partition_id=str(partition))

        started.run(fill())
        yield started


@pytest.fixture
def connection(service: EmulatorThread) -> Iterator[SparkConnection]:
    """A connection to the hub, with a new loop for each test."""
    yield SparkConnection(hub="telemetry", connection_string=SecretStr(service.connection_string))
    service.clear_faults()
    worker.close()


def _rows(
    connection: SparkConnection,
    *ranges: SequenceRange,
    options: ReceiveOptions | None = None,
    columns: Sequence[str] = ("partition", "sequenceNumber", "body"),
) -> list[dict[str, object]]:
    batches = read_ranges(connection, options or ReceiveOptions(), ranges, columns)
    return [row for batch in batches for row in batch.to_pylist()]


def _expected(partition: str, start: int, end: int) -> list[dict[str, object]]:
    return [
        {"partition": partition, "sequenceNumber": number, "body": f"{partition}-{number}".encode()}
        for number in range(start, end)
    ]


def _since(before: ReceiveCounters) -> tuple[int, int]:
    now = counters()
    return (
        now.from_kept_link - before.from_kept_link,
        now.from_new_link - before.from_new_link,
    )


def test_receive_gives_several_ranges_whole_and_once(connection: SparkConnection) -> None:
    """Several ranges in one task: each comes whole, once and in order."""
    ranges = [SequenceRange("0", 0, 1000), SequenceRange("1", 10, 20), SequenceRange("2", 500, 900)]
    found = _rows(connection, *ranges)
    for each in ranges:
        mine = [row for row in found if row["partition"] == each.partition_id]
        assert mine == _expected(each.partition_id, each.start, each.end)
    assert len(found) == 1000 + 10 + 400


def test_receive_fills_every_column(service: EmulatorThread) -> None:
    """All columns of an event that was sent with everything an event can have."""

    async def send() -> None:
        async with EventProducer(service.connection_string, "other") as producer:
            event = EventData(b"body", properties={"kind": "trade", "size": 5}, message_id="m1", subject="s")
            await producer.send([event], partition_key="sensor-7")

    before = datetime.now(UTC).replace(microsecond=0)
    service.run(send())
    connection = SparkConnection(hub="other", connection_string=SecretStr(service.connection_string))
    try:
        (row,) = _rows(connection, SequenceRange("0", 0, 1), columns=tuple(COLUMN_TYPES))
    finally:
        worker.close()
    moment = row.pop("enqueuedTime")
    assert isinstance(moment, datetime)
    assert before <= moment <= datetime.now(UTC)
    assert row == {
        "body": b"body",
        "partition": "0",
        "offset": "0",
        "sequenceNumber": 0,
        "publisher": None,
        "partitionKey": "sensor-7",
        "properties": [("kind", "trade"), ("size", "5")],
        "systemProperties": [
            ("x-opt-partition-key", "sensor-7"),
            ("x-opt-sequence-number-epoch", "-1"),
            ("message-id", "m1"),
            ("subject", "s"),
        ],
    }


def test_receive_by_tasks_in_a_row_shares_a_link(connection: SparkConnection) -> None:
    """One link serves a stream of tasks; each gets exactly its range."""
    before = counters()
    for start in range(0, 1000, 250):
        found = _rows(connection, SequenceRange("0", start, start + 250))
        assert found == _expected("0", start, start + 250)
    assert _since(before) == (3, 1)


def test_receive_of_the_same_range_reads_the_hub_again(connection: SparkConnection) -> None:
    """The same range again, with other columns, is received again: nothing of it is held."""
    wanted = [SequenceRange("0", 100, 400), SequenceRange("1", 100, 200)]
    before = counters()
    first = _rows(connection, *wanted)
    assert _rows(connection, *wanted, columns=["sequenceNumber"]) != first
    assert sorted(map(str, _rows(connection, *wanted))) == sorted(map(str, first))
    assert (_since(before), counters().events - before.events) == ((0, 6), 1200)


@pytest.mark.parametrize("action", [DropConnection(), CloseConnection(), DetachLink()])
def test_receive_over_a_cut_link_loses_nothing(
    service: EmulatorThread, connection: SparkConnection, action: DropConnection | CloseConnection | DetachLink
) -> None:
    """A cut in mid-range is mended: nothing is lost and nothing comes twice."""
    fault = service.add_fault(action, role=LinkRole.CONSUMER, partition="0", after=500)
    assert _rows(connection, SequenceRange("0", 0, 1000)) == _expected("0", 0, 1000)
    assert fault.fired == 1


def test_receive_on_a_stolen_link_fails_the_task(service: EmulatorThread, connection: SparkConnection) -> None:
    """A stolen link ends the task with an error, and the next attempt reads the range whole."""
    stolen = DetachLink(condition="amqp:link:stolen", description="New receiver with higher epoch")
    service.add_fault(stolen, role=LinkRole.CONSUMER, partition="0", after=500)
    with pytest.raises(ConsumerDisconnectedError):
        _rows(connection, SequenceRange("0", 0, 1000))
    assert _rows(connection, SequenceRange("0", 0, 1000)) == _expected("0", 0, 1000)


def test_receive_after_a_failure_uses_another_connection(service: EmulatorThread, connection: SparkConnection) -> None:
    """After a task that failed for the service the next attempt begins on another connection."""
    before = worker.transport(connection)
    service.add_fault(
        Refuse("amqp:not-found", "The messaging entity 'x' could not be found."),
        on=Performative.ATTACH,
        role=LinkRole.CONSUMER,
    )
    with pytest.raises(EntityNotFoundError):
        _rows(connection, SequenceRange("0", 0, 10))
    assert worker.transport(connection) is not before
    assert _rows(connection, SequenceRange("0", 0, 10)) == _expected("0", 0, 10)


def test_receive_that_stops_early_leaves_nothing_open(connection: SparkConnection) -> None:
    """Closing the iterator, as Spark does for LIMIT, ends the receiving; the link is not kept."""
    before = counters()
    batches = read_ranges(
        connection,
        ReceiveOptions(prefetch_count=10),
        [SequenceRange("0", 0, 1000), SequenceRange("1", 0, 2000)],
        ["body"],
    )
    first = next(batches)
    assert isinstance(first, pa.RecordBatch)
    batches.close()
    assert _rows(connection, SequenceRange("1", 0, 1000)) == _expected("1", 0, 1000)
    assert _since(before) == (0, 1)


_FORKING = """
import os, sys
from pydantic import SecretStr
from eventpump.spark import worker
from eventpump.spark.connection import SparkConnection
from eventpump.spark.source.offsets import ReceiveOptions, SequenceRange
from eventpump.spark.source.receive import counters, read_ranges

connection = SparkConnection(hub="telemetry", connection_string=SecretStr(sys.argv[1]))

def read(partition, start, end):
    batches = read_ranges(connection, ReceiveOptions(), [SequenceRange(partition, start, end)], ["sequenceNumber"])
    assert [n for batch in batches for n in batch.column(0).to_pylist()] == list(range(start, end))

read("0", 0, 100)
child = os.fork()
if not child:
    assert counters().ranges == 0
    read("1", 0, 100)
    read("0", 0, 100)
    assert (counters().from_kept_link, counters().from_new_link) == (0, 2)
    worker.close()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
read("1", 0, 100)
read("0", 100, 200)
print(counters().from_kept_link, counters().from_new_link)
"""


def test_receive_in_a_forked_child_has_connections_of_its_own(service: EmulatorThread) -> None:
    """A child neither uses nor disturbs what its parent opened, and begins with nothing of it."""
    result = subprocess.run(
        [sys.executable, "-c", _FORKING, service.connection_string],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    # The child took partition 0 with an equal owner level, so the parent opened another link.
    assert (result.returncode, result.stdout.split()) == (0, ["0", "3"]), result.stderr
