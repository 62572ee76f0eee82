"""Open the store of rows from what a user names, or beside the ledger."""

from __future__ import annotations

import os
from urllib.parse import urlsplit
from urllib.request import url2pathname

from eventpump.errors import ConfigurationError
from eventpump.storage.ledgers.blob import BlobLedger
from eventpump.storage.ledgers.directory import DirectoryLedger
from eventpump.storage.ledgers.interface import LedgerStore
from eventpump.storage.rows.blob import BlobRowStore
from eventpump.storage.rows.directory import DirectoryRowStore
from eventpump.storage.rows.filesystem import FileSystemRowStore
from eventpump.storage.rows.interface import RowStore

_BESIDE = "rows~"
"""The directory in a ledger's: none of its own is of such a name."""


def open_rows(rows: str | os.PathLike[str] | RowStore | None, ledger: LedgerStore) -> RowStore:
    """Create a store, not open yet, from what the user gave.

    Args:
        rows: A directory that the driver and all executors see, or its file: URI; the https: URL of a blob container,
            with a signature, and with a prefix as its path, if any; a URI that pyarrow reaches, such as abfss:, hdfs:,
            s3: and gs:; or a store. None for a place beside the ledger's records.
        ledger: The ledger.

    Raises:
        ConfigurationError: It is something else, or None with a ledger that has no such place.
    """
    if rows is None:
        return _beside(ledger)
    return named_rows(rows) if isinstance(rows, str | os.PathLike) else rows


def named_rows(rows: str | os.PathLike[str]) -> RowStore:
    """Create the store of a directory or container. Parameters and errors are those of `open_rows`."""
    text = os.fspath(rows)
    parts = urlsplit(text)
    match parts.scheme:
        case "https" | "http":
            return BlobRowStore.of_url(text)
        case "file":
            return DirectoryRowStore(url2pathname(parts.path))
        case scheme if len(scheme) > 1:  # one letter is a drive
            return FileSystemRowStore.of_uri(text)
    if not text:
        raise ConfigurationError("rows", "must be a directory, or the URL of a blob container")
    return DirectoryRowStore(text)


def _beside(ledger: LedgerStore) -> RowStore:
    if isinstance(ledger, DirectoryLedger):
        return DirectoryRowStore(os.path.join(ledger.path, _BESIDE))
    if isinstance(ledger, BlobLedger):
        return BlobRowStore(ledger.address, prefix=f"{ledger.prefix}{_BESIDE}/")
    raise ConfigurationError(
        "rows", "is required with a ledger store of one's own: where the rows of a batch are kept until it is done"
    )
