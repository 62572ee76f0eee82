"""Capture files that the emulator writes, and a reader that continues them in its hub."""

from __future__ import annotations

import asyncio
import random
import signal
from pathlib import Path

import fastavro
import pytest

from eventpump.clients.consumers import EventHubSource, PartitionReader
from eventpump.clients.producers import EventProducer
from eventpump.emulator.capture import CaptureSettings
from eventpump.emulator.server import Emulator
from eventpump.errors import CaptureGapError, ConfigurationError
from eventpump.eventhubs.events import EventData, ReceivedEvent
from eventpump.sources.capture import CaptureSource
from tests.integration.test_emulator_command import launch

HUB = "telemetry"


async def _send(emulator: Emulator | str, bodies: list[str], partition_id: str = "0") -> None:
    text = emulator if isinstance(emulator, str) else emulator.connection_string
    async with EventProducer(text, HUB) as producer:
        events = [EventData(body, properties={"n": len(body)}, message_id=body) for body in bodies]
        await producer.send(events, partition_id=partition_id)


async def _read(source: CaptureSource, count: int, partition_id: str = "0") -> list[ReceivedEvent]:
    events: list[ReceivedEvent] = []
    async with asyncio.timeout(60), PartitionReader(source=source, partition_id=partition_id) as reader:
        while len(events) < count:
            events += await reader.read()
    return events


def _records(directory: Path) -> list[dict[str, object]]:
    records: list[dict[str, object]] = []
    for path in sorted(directory.rglob("*.avro")):
        with path.open("rb") as file:
            records += [dict(record) for record in fastavro.reader(file) if isinstance(record, dict)]
    return records


async def test_capture_and_hub_are_one_stream(tmp_path: Path) -> None:
    """Events that the hub has dropped are read from files, the others from the hub: all of them, once and in order."""
    # A batch of 20 events takes 3,011 to 3,240 bytes in the hub: each file has two, and the last batch is in none.
    settings = CaptureSettings(tmp_path, size=4500, skip_empty=True)
    async with Emulator({HUB: 2}, capture=settings) as emulator:
        bodies = [f"event {number}" for number in range(300)]
        for first in range(0, 300, 20):
            await _send(emulator, bodies[first : first + 20])
        source = CaptureSource(tmp_path, live=EventHubSource(emulator.connection_string, HUB))
        async with source:
            facts = await source.partition_properties("0")
            assert facts.last_enqueued_sequence_number == 299
            written = await asyncio.to_thread(_records, tmp_path)
            assert 100 < len(written) < 300
            emulator.drop_events(HUB, "0", len(written) - random.Random(3).randrange(10))
            events = await _read(source, 300)
            assert [event.body_as_str() for event in events] == bodies
            assert [event.sequence_number for event in events] == list(range(300))
            assert [event.message_id for event in events] == bodies
            assert all(event.properties == {"n": len(event.body)} for event in events)
            emulator.drop_events(HUB, "0", 299)
            with pytest.raises(CaptureGapError) as caught:
                await _read(source, 300)
            assert caught.value.last_missing == 298


async def test_last_window_is_written_at_the_stop(tmp_path: Path) -> None:
    """Everything stored is in files then, of hubs on disk also over a restart; a reader of Avro finds it."""
    emulator = Emulator({HUB: 1}, data=tmp_path / "data", capture=tmp_path / "files")
    for run in range(2):
        async with emulator:
            await _send(emulator, [f"run {run}"])
            await emulator.restart()
            await _send(emulator, ["again"])
    records = await asyncio.to_thread(_records, tmp_path / "files")
    assert [record["Body"] for record in records] == [b"run 0", b"again", b"run 1", b"again"]
    assert [record["SequenceNumber"] for record in records] == [0, 1, 2, 3]
    assert records[0]["Properties"] == {"n": 5}


async def test_partitions_added_later_are_captured(tmp_path: Path) -> None:
    """And a captured hub cannot be recreated, because its files would be those of two hubs."""
    async with Emulator({HUB: 1}, capture=CaptureSettings(tmp_path, skip_empty=True)) as emulator:
        await emulator.add_partitions(HUB, 1)
        await _send(emulator, ["later"], "1")
        with pytest.raises(ConfigurationError, match="is captured"):
            emulator.recreate_hub(HUB)
    async with CaptureSource(tmp_path, hub=HUB, namespace="emulator") as source:
        assert (await source.partitions()).partition_ids == ("1",)
        assert [event.body for event in await _read(source, 1, "1")] == [b"later"]


async def test_command_captures(tmp_path: Path) -> None:
    """`--capture DIR`, with a window of one second; and values that cannot work are refused in one line."""
    directory = tmp_path / "files"
    process = await launch("--hub", f"{HUB}:1", "--port", "0", "--capture", str(directory), "--capture-bytes", "1")
    assert process.stdout is not None
    async with asyncio.timeout(60):
        line = (await process.stdout.readline()).decode().strip()
        await _send(line, ["one", "two"])
        process.send_signal(signal.SIGTERM)
        _, err = await process.communicate()
    assert (process.returncode, err) == (0, b"")
    records = await asyncio.to_thread(_records, directory)
    assert [record["Body"] for record in records] == [b"one", b"two"]
    process = await launch("--hub", f"{HUB}:1", "--capture", str(directory), "--port", "0")
    _, err = await process.communicate()
    assert process.returncode == 2
    assert b"eventpump emulator: capture:" in err
    assert err.count(b"\n") == 1
