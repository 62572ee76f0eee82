"""Open a ledger from what a user names: a directory, a blob container, or a store of their own."""

from __future__ import annotations

import os
from urllib.parse import urlsplit

from eventpump.errors import ConfigurationError
from eventpump.storage.ledgers.blob import BlobLedger
from eventpump.storage.ledgers.directory import DirectoryLedger
from eventpump.storage.ledgers.interface import LedgerStore


def open_ledger(ledger: str | os.PathLike[str] | LedgerStore) -> LedgerStore:
    """Create a store, not open yet, from what the user gave.

    Args:
        ledger: A directory that every driver of the query sees; the URL of a blob container, with a signature, and with
            a prefix as its path, if any; or a store.

    Raises:
        ConfigurationError: It is something else.
    """
    if not isinstance(ledger, str | os.PathLike):
        return ledger
    text = os.fspath(ledger)
    scheme = urlsplit(text).scheme
    if scheme in ("https", "http"):
        return BlobLedger.of_url(text)
    if len(scheme) > 1:  # one letter is a drive
        raise ConfigurationError("ledger", f"must be a directory or the https: URL of a blob container, not {scheme}:")
    if not text:
        raise ConfigurationError("ledger", "is required: a directory, or the URL of a blob container")
    return DirectoryLedger(text)
