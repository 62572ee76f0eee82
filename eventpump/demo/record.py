"""What a host of the demo writes down of every event it processed, before it checkpoints."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path


def digest(body: bytes) -> str:
    """Return what stands for a body in records."""
    return hashlib.blake2b(body, digest_size=12).hexdigest()


@dataclass(frozen=True, slots=True)
class ProcessedEvent:
    """One event, processed once, at a time in seconds since the Unix epoch."""

    partition_id: str
    sequence_number: int
    digest: str
    epoch: int
    time: float

    @property
    def event(self) -> tuple[str, int, str]:
        """The identity of the event."""
        return self.partition_id, self.sequence_number, self.digest


class RecordFile:
    """A file of records: what is written is with the operating system when `write` returns, so a kill loses none."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, records: Iterable[ProcessedEvent]) -> None:
        """Append records in one write."""
        lines = (f"{r.partition_id} {r.sequence_number} {r.digest} {r.epoch} {r.time:.6f}\n" for r in records)
        data = memoryview("".join(lines).encode())
        while data:
            data = data[os.write(self._fd, data) :]

    def close(self) -> None:
        os.close(self._fd)


def read_records(path: Path) -> Iterator[ProcessedEvent]:
    """Read a file of records. A last line without its end was cut off by a kill, and counts as not written.

    A host that joined so late that it has not opened its file has no records.
    """
    try:
        file = path.open()
    except FileNotFoundError:
        return
    with file:
        for line in file:
            if line.endswith("\n"):
                partition_id, sequence_number, body, epoch, time = line.split()
                yield ProcessedEvent(partition_id, int(sequence_number), body, int(epoch), float(time))
