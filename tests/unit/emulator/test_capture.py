"""Windows by time and size: each event is in one file, whatever retention and restarts do."""

from __future__ import annotations

import asyncio
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from eventpump.emulator.capture import CaptureSettings, CaptureWriter
from eventpump.emulator.log import PartitionLog
from eventpump.errors import ConfigurationError
from eventpump.eventhubs.capture import NamePattern, read_blocks
from eventpump.eventhubs.events import EventData
from tests.support.seeds import seeds


def _publish(log: PartitionLog, count: int, size: int = 10) -> None:
    now = round(asyncio.get_running_loop().time() * 1000)
    log.publish(log.number([EventData(b"x" * size).encode()] * count, now))


def _writer(directory: Path, **options: Any) -> CaptureWriter:
    return CaptureWriter(CaptureSettings(directory, **options), lambda: 1e9 + asyncio.get_running_loop().time())


def _files(directory: Path, partition_id: str = "0") -> list[tuple[float, list[int]]]:
    """Return the windows' beginnings, since the test's, and numbers, in the order of the names."""
    found = []
    for path in directory.rglob("*.avro"):
        name = NamePattern().match(path.relative_to(directory).as_posix())
        assert name is not None
        if name.partition_id == partition_id:
            with path.open("rb") as file:
                numbers = [number for block in read_blocks(file, name.name) for number, _ in block]
            found.append((name.began.timestamp() - 1e9, numbers))
    assert not list(directory.rglob("*.part"))
    return sorted(found)


async def test_windows_end_by_time(tmp_path: Path) -> None:
    """Each has what was published in it; without events there is an empty file, or none with `skip_empty`."""
    for skip in (False, True):
        log, other = PartitionLog("telemetry", "0"), PartitionLog("telemetry", "1")
        directory = tmp_path / str(skip)
        writer = _writer(directory, seconds=60.0, skip_empty=skip)
        began = asyncio.get_running_loop().time()
        await writer.start([log, other])
        _publish(log, 3)
        await asyncio.sleep(61)
        await asyncio.sleep(61)
        _publish(log, 4)
        await asyncio.sleep(61)
        _publish(log, 2)
        await writer.aclose()
        windows = [(round(at - began), numbers) for at, numbers in _files(directory)]
        expected: list[tuple[int, list[int]]] = [(0, [0, 1, 2]), (60, []), (120, [3, 4, 5, 6]), (180, [7, 8])]
        assert [(at, numbers) for at, numbers in windows] == [each for each in expected if each[1] or not skip]
        assert len(_files(directory, "1")) == (0 if skip else 3)


async def test_windows_end_by_size(tmp_path: Path) -> None:
    """A file is written as soon as its events have the size, and names differ within one second."""
    log = PartitionLog("telemetry", "0")
    writer = _writer(tmp_path, size=1000)
    await writer.start([log])
    for _ in range(40):
        _publish(log, 1, 200)
    await writer.aclose()
    files = _files(tmp_path)
    assert [number for _, numbers in files for number in numbers] == list(range(40))
    assert len({at for at, _ in files}) == len(files) >= 8
    assert max(len(numbers) for _, numbers in files) <= 5


@seeds(2, of=5)
async def test_each_event_is_in_one_file_over_retention_and_restarts(tmp_path: Path, seed: int) -> None:
    """Retention drops events before their window ends, and writers come and go: all numbers are there, once."""
    rng, log = random.Random(seed), PartitionLog("telemetry", "0")
    for _ in range(3):
        writer = _writer(tmp_path, seconds=20.0, size=2000, skip_empty=rng.random() < 0.5)
        await writer.start([log])
        for _ in range(30):
            _publish(log, rng.randrange(1, 10), rng.randrange(200))
            if rng.random() < 0.3:
                log.drop_oldest(rng.randrange(len(log.payloads) + 1))
            await asyncio.sleep(rng.choice([0, 0, 1, 15]))
        await writer.aclose()
        await writer.aclose()
        assert not log.listeners
    assert [number for _, numbers in _files(tmp_path) for number in numbers] == list(range(log.end))


async def test_files_of_other_events_are_refused(tmp_path: Path) -> None:
    """A hub in memory that starts over would write the same numbers again."""
    log = PartitionLog("telemetry", "0")
    writer = _writer(tmp_path)
    await writer.start([log])
    _publish(log, 5)
    await writer.aclose()
    with pytest.raises(ConfigurationError, match="up to event 4, and the partition ends before event 0"):
        await _writer(tmp_path).start([PartitionLog("telemetry", "0")])
    await _writer(tmp_path).add(PartitionLog("other", "0"))


async def test_file_that_cannot_be_written_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Others are written: Capture of one window does not end with another's failure."""
    log = PartitionLog("telemetry", "0")
    writer = _writer(tmp_path, seconds=60.0)
    await writer.start([log])
    (tmp_path / "emulator").write_text("in the way")
    _publish(log, 5)
    await asyncio.sleep(61)
    await asyncio.to_thread((tmp_path / "emulator").unlink)
    _publish(log, 5)
    await writer.aclose()
    assert "with 5 events could not be written" in caplog.text
    assert [numbers for _, numbers in _files(tmp_path)] == [[5, 6, 7, 8, 9]]


@pytest.mark.parametrize(
    "options", [{"seconds": 0}, {"seconds": 1e9}, {"size": 0}, {"namespace": "a/b"}, {"pattern": "{Year}"}]
)
def test_values_that_cannot_work_are_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    """At construction."""
    with pytest.raises(ConfigurationError):
        CaptureSettings(tmp_path, **options)


async def test_directory_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    """At the start, and not when the first window ends."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="capture"):
        await _writer(tmp_path / "file").start([])
    shutil.rmtree(tmp_path)
