"""Writes what partitions hold as the files of Event Hubs Capture, by windows of time and size."""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from eventpump.aio.tasks import TaskSet
from eventpump.emulator.log import PartitionLog
from eventpump.errors import ConfigurationError, EventPumpError
from eventpump.eventhubs.capture import DEFAULT_PATTERN, CaptureName, NamePattern, read_blocks, write_file

_log = logging.getLogger("eventpump.emulator")

_NAMESPACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]*")


@dataclass(frozen=True, slots=True)
class CaptureSettings:
    """How the emulator writes Capture files.

    A window of a partition ends after `seconds`, or when its events have `size` bytes, and its file is written then; at
    the stop, the open windows are. A file appears under its name when it is complete.

    Args:
        directory: Where the files are written; created if it does not exist.
        seconds: The length of a window in seconds; the service allows 60 to 900. Default: 300.0.
        size: The size of a window in bytes, of encoded events; the service allows 10 to 500 MB. Default: 300 MiB.
        skip_empty: Whether no file is written for a window without events. The service writes one unless configured
            otherwise. Default: False.
        namespace: The namespace in the files' names. Default: "emulator".
        pattern: How the files are named. Default: the service's own pattern.

    Raises:
        ConfigurationError: A value cannot work.
    """

    directory: str | Path
    seconds: float = 300.0
    size: int = 300 * 1024 * 1024
    skip_empty: bool = False
    namespace: str = "emulator"
    pattern: str = DEFAULT_PATTERN

    def __post_init__(self) -> None:
        if not 0 < self.seconds <= 86_400:
            raise ConfigurationError("capture.seconds", f"must be above 0 and at most 86,400, not {self.seconds!r}")
        if self.size < 1:
            raise ConfigurationError("capture.size", f"must be at least 1 byte, not {self.size!r}")
        if _NAMESPACE.fullmatch(self.namespace) is None:
            raise ConfigurationError("capture.namespace", "must be letters, digits, dots and hyphens")
        NamePattern(self.pattern)


@dataclass(slots=True, eq=False)
class _Window:
    """The events of a partition that are in no file yet."""

    partition: PartitionLog
    following: int
    began: float
    listener: Callable[[], None]
    payloads: list[bytes] = field(default_factory=list)
    size: int = 0
    last_name: int = -1


class CaptureWriter:
    """Writes the files of all partitions, one after the other, in a thread."""

    def __init__(self, settings: CaptureSettings, now: Callable[[], float]) -> None:
        self._settings = settings
        self._directory = Path(settings.directory)
        self._pattern = NamePattern(settings.pattern)
        self._now = now
        self._windows: list[_Window] = []
        self._full: asyncio.Queue[tuple[str, list[bytes]] | None] = asyncio.Queue()
        self._timer: asyncio.TimerHandle | None = None
        self._tasks = TaskSet(self._failed)
        self._task: asyncio.Task[None] | None = None

    async def start(self, partitions: Iterable[PartitionLog]) -> None:
        """Begin, with the events of the partitions that are in no file yet. Raises as `add`."""
        await asyncio.to_thread(self._prepare)
        for partition in partitions:
            await self.add(partition)
        self._task = self._tasks.spawn(self._write_all(), "eventpump emulator: Capture")
        self._timer = asyncio.get_running_loop().call_later(self._settings.seconds, self._tick)

    async def add(self, partition: PartitionLog) -> None:
        """Begin with a partition. Raises `ConfigurationError` if files have events that it does not have yet."""
        name, last = await asyncio.to_thread(self._newest, partition)
        if last >= partition.end:
            raise ConfigurationError(
                "capture",
                f"{self._directory} has files of hub {partition.hub}, partition {partition.partition_id} up to event "
                f"{last}, and the partition ends before event {partition.end}: use a directory of its own for each hub",
            )
        window = _Window(partition, max(last + 1, partition.beginning), self._now(), lambda: self._grown(window))
        window.last_name = -1 if name is None else int(name.began.timestamp())
        self._windows.append(window)
        partition.listeners.add(window.listener)
        self._grown(window)

    def remove(self, partitions: Iterable[PartitionLog]) -> None:
        """End the windows of partitions, and write them."""
        gone = set(map(id, partitions))
        for window in [each for each in self._windows if id(each.partition) in gone]:
            window.partition.listeners.discard(window.listener)
            self._windows.remove(window)
            self._close(window, is_last=True)

    async def aclose(self) -> None:
        """Write the open windows, and end."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.remove([window.partition for window in self._windows])
        if self._task is not None:
            self._full.put_nowait(None)
            await asyncio.wait({self._task})
            self._task = None

    # ------------------------------------------------------------------------------------------------------ windows

    def _grown(self, window: _Window) -> None:
        """Take the new events of a partition, and hold them also if retention drops them before they are written."""
        partition = window.partition
        if window.following < partition.end:
            added = partition.payloads[max(0, window.following - partition.beginning) :]
            window.payloads += added
            window.size += sum(map(len, added))
            window.following = partition.end
        if window.size >= self._settings.size:
            self._close(window)

    def _tick(self) -> None:
        for window in self._windows:
            self._close(window)
        self._timer = asyncio.get_running_loop().call_later(self._settings.seconds, self._tick)

    def _close(self, window: _Window, *, is_last: bool = False) -> None:
        """Have the file of a window written, and begin the next window."""
        payloads, began = window.payloads, max(int(window.began), window.last_name + 1)
        window.payloads, window.size, window.began = [], 0, self._now()
        if payloads or not (is_last or self._settings.skip_empty):
            window.last_name = began
            partition = window.partition
            moment = datetime.fromtimestamp(began, UTC)
            name = self._pattern.name(self._settings.namespace, partition.hub, partition.partition_id, moment)
            self._full.put_nowait((name, payloads))

    # ------------------------------------------------------------------------------------------------------- files

    async def _write_all(self) -> None:
        while (item := await self._full.get()) is not None:
            name, payloads = item
            try:
                await asyncio.to_thread(self._write, name, payloads)
            except Exception as error:
                _log.error("Capture file %s with %d events could not be written: %s", name, len(payloads), error)

    def _write(self, name: str, payloads: list[bytes]) -> None:
        path = self._directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(path.name + ".part")
        try:
            with part.open("wb") as file:
                write_file(file, payloads)
            os.replace(part, path)
        except BaseException:
            with suppress(OSError):
                part.unlink()
            raise

    def _prepare(self) -> None:
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            # Before the first window ends: otherwise a missing package would be noticed minutes later.
            part = self._directory / ".capture.part"
            with part.open("wb") as file:
                write_file(file, [])
            part.unlink()
        except OSError as error:
            raise ConfigurationError("capture", f"{self._directory}: {error.strerror or error}") from None

    def _newest(self, partition: PartitionLog) -> tuple[CaptureName | None, int]:
        """Return the newest file of a partition and the last event that is in a file; -1 if there is none."""
        found = sorted(
            name
            for path in self._directory.rglob("*.avro")
            if (name := self._pattern.match(path.relative_to(self._directory).as_posix())) is not None
            and (name.hub.lower(), name.partition_id) == (partition.hub.lower(), partition.partition_id)
            and name.namespace == self._settings.namespace
        )
        for name in reversed(found):
            last = -1
            try:
                with (self._directory / name.name).open("rb") as file:
                    for block in read_blocks(file, name.name):
                        last = block[-1][0]
            except (OSError, EventPumpError) as error:
                raise ConfigurationError("capture", str(error)) from None
            if last >= 0:
                return found[-1], last
        return (found[-1] if found else None), -1

    def _failed(self, name: str, error: BaseException) -> None:
        _log.error("%s failed unexpectedly", name, exc_info=error)
