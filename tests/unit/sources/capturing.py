"""Capture files for tests: of events as a source or a hub has them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from eventpump.eventhubs.capture import NamePattern, write_file
from eventpump.sources.memory import MemorySource

HUB = "telemetry"
NAMESPACE = "ns"
BEGAN = datetime(2024, 1, 1, tzinfo=UTC)


def write_capture(
    directory: Path,
    files: Iterable[Sequence[bytes]],
    partition_id: str = "0",
    *,
    first: int = 0,
    namespace: str = NAMESPACE,
) -> None:
    """Write files of consecutive windows.

    Args:
        directory: Where to.
        files: The encoded events of each file; none for one without events.
        partition_id: Their partition.
        first: The number of the first window.
        namespace: The namespace in their names.
    """
    for number, payloads in enumerate(files, first):
        name = NamePattern().name(namespace, HUB, partition_id, BEGAN + timedelta(minutes=5 * number))
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            write_file(file, payloads)


def memory_hub(count: int, partitions: int = 1) -> tuple[MemorySource, list[bytes]]:
    """Return a source that stands for the live hub, and the events of its partition 0."""
    live = MemorySource(partitions, hub=HUB)
    return live, stock(live, count)


def stock(live: MemorySource, count: int) -> list[bytes]:
    """Append numbered events to partition 0 of a source. Return all that it has then."""
    live.append("0", *(b"event %d" % number for number in range(count)), partition_key="key")
    return list(live._partitions["0"].events)
