"""Reads how far a query has come from the directory that is its `checkpointLocation`."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from eventpump.errors import ConfigurationError, StoreError
from eventpump.interfaces import ConsumerScope
from eventpump.spark.source.offsets import HubOffset, SourceOffset
from eventpump.storage.checkpoints.stored import GroupCheckpoints, StoredCheckpoint

_FORMAT: Final = "Spark"
_OPERATION: Final = "read checkpoints"


class SparkCheckpointReader:
    """A `CheckpointReader` of the `checkpointLocation` of a query that reads by eventpump's source.

    A batch counts when Spark has committed it. Of several sources of one hub in a query the one that is furthest behind
    counts. The namespace and the consumer group are not in the directory, and are not compared.

    Args:
        directory: The directory, in a file system of this machine.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._directory = Path(directory)

    async def read(self, scope: ConsumerScope, partition_ids: Sequence[str]) -> GroupCheckpoints:
        """Read the position of the query in a hub.

        Args:
            scope: Of which the hub counts.
            partition_ids: The partitions of the hub.

        Raises:
            StoreError: A file cannot be read, or has another form.
            ConfigurationError: It is not the directory of a query.
        """
        return await asyncio.to_thread(self._read, scope.hub, partition_ids)

    def _read(self, hub: str, partition_ids: Sequence[str]) -> GroupCheckpoints:
        offsets, commits = self._directory / "offsets", self._directory / "commits"
        if not offsets.is_dir():
            problem = f"{self._directory}: is not the checkpointLocation of a query: it has no directory offsets"
            raise ConfigurationError("directory", problem)
        try:
            planned, committed = _batches(offsets), _batches(commits) if commits.is_dir() else []
            last = max(committed, default=None)
            if last is None:
                return self._started(hub, offsets / str(min(planned)), partition_ids) if planned else GroupCheckpoints()
            path = offsets / str(last)
            found = list(_offsets_of(path, hub))
            written_at = datetime.fromtimestamp((commits / str(last)).stat().st_mtime, UTC)
        except OSError as error:
            raise StoreError(_OPERATION, f"{error.filename}: {error.strerror}") from None
        return self._positions(found, path, written_at, partition_ids, hub)

    def _started(self, hub: str, path: Path, partition_ids: Sequence[str]) -> GroupCheckpoints:
        """Return where a query begins of which no batch is committed yet."""
        starts = [
            HubOffset(each.hub, each.first_start) for each in _offsets_of(path, hub) if each.first_start is not None
        ]
        return self._positions(starts, path, None, partition_ids, hub)

    def _positions(
        self,
        found: Sequence[HubOffset],
        path: Path,
        written_at: datetime | None,
        partition_ids: Sequence[str],
        hub: str,
    ) -> GroupCheckpoints:
        if not found:
            return GroupCheckpoints(notes=(f"{path}: the query does not read hub {hub}",))
        stored = {}
        for partition_id in partition_ids:
            following = [each.following[partition_id] for each in found if partition_id in each.following]
            if following:
                number = min(following) - 1
                stored[partition_id] = StoredCheckpoint(
                    partition_id, _FORMAT, str(path), sequence_number=number, written_at=written_at
                )
        return GroupCheckpoints(stored)

    async def aclose(self) -> None:
        """Do nothing: no file stays open."""


def _batches(directory: Path) -> list[int]:
    return [int(name) for name in os.listdir(directory) if name.isdecimal()]


def _offsets_of(path: Path, hub: str) -> Iterator[HubOffset]:
    """Return the offsets of a hub in a file of Spark's log, which has a line of JSON for each source."""
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            found = SourceOffset.from_json(json.loads(line)).hubs.get(hub.lower())
        except (ValueError, ConfigurationError):
            continue  # the version, Spark's own line, or the offset of another source
        if found is not None:
            yield found
