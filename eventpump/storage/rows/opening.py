"""Open the store of rows from what a user names, or beside the ledger."""

from __future__ import annotations

import os
from urllib.parse import urlsplit

from eventpump.errors import ConfigurationError
from eventpump.storage.ledgers.blob import BlobLedger
from eventpump.storage.ledgers.directory import DirectoryLedger
from eventpump.storage.ledgers.interface import LedgerStore
from eventpump.storage.rows.blob import BlobRowStore
from eventpump.storage.rows.directory import DirectoryRowStore
from eventpump.storage.rows.interface import RowStore

_BESIDE = "rows~"
"""The directory in a ledger's: none of its own is of such a name."""


def open_rows(rows: str | os.PathLike[str] | RowStore | None, ledger: LedgerStore) -> RowStore:
    """Create a store, not open yet, from what the user gave.

    Args:
        rows: A directory that the driver and all executors see; the URL of a blob container, with a signature, and
            with a prefix as its path, if any; or a store. None for a place beside the ledger's records.
        ledger: The ledger.

    Raises:
        ConfigurationError: It is something else, or None with a ledger that has no such place.
    """
    if rows is None:
        return _beside(ledger)
    if not isinstance(rows, str | os.PathLike):
        return rows
    text = os.fspath(rows)
    scheme = urlsplit(text).scheme
    if scheme in ("https", "http"):
        return BlobRowStore.of_url(text)
    if len(scheme) > 1:  # one letter is a drive
        raise ConfigurationError("rows", f"must be a directory or the https: URL of a blob container, not {scheme}:")
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
