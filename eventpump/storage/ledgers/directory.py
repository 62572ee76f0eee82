"""Records of the Spark sink in a directory that all drivers reach."""

from __future__ import annotations

import os

from eventpump.storage.ledgers.store import KIND, RecordLedger
from eventpump.storage.records.directory import DirectoryRecordStore


class DirectoryLedger(RecordLedger):
    """A `LedgerStore` in a directory: one file per record, on a file system with hard links.

    A record is written to a temporary file, which is synchronized with the disk and then linked to its name, so that
    no process ever sees a part of one, whenever the writer dies; what it leaves is deleted by a later `open`.

    Args:
        path: Created where it does not exist. For a driver that may restart elsewhere, a path all its machines share.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(DirectoryRecordStore(path, kind=KIND))
        self.path = os.fspath(path)
        """The directory."""

    def __repr__(self) -> str:
        return f"DirectoryLedger({self.path!r})"
