"""The states of idempotent publishers in a SQLite file, which may be one that keeps leases too."""

from __future__ import annotations

import os

from eventpump.errors import ConfigurationError
from eventpump.storage.publisher_states.form import KIND
from eventpump.storage.publisher_states.store import RecordPublisherStateStore
from eventpump.storage.records.sqlite import SqliteRecordStore, create_record_table
from eventpump.storage.sqlite_file import SqliteFile


class SqlitePublisherStateStore(RecordPublisherStateStore):
    """A `PublisherStateStore` in a SQLite file, for the processes of one machine.

    Calls run in a thread of the store's own. One that is cancelled is not made, or made and forgotten.

    Args:
        path: The file; created where it does not exist, in a directory that does. It may be a file of leases.
        busy_timeout: How long to wait for another process's transaction, in seconds. Default: 5.0.
    """

    def __init__(self, path: str | os.PathLike[str], *, busy_timeout: float = 5.0) -> None:
        if busy_timeout < 0:
            raise ConfigurationError("busy_timeout", "must not be below 0")
        file = SqliteFile(
            path,
            busy_timeout,
            create_record_table,
            # A state lost with the power would let its application publish everything again, under a new id.
            synchronous="FULL",
            owner=type(self).__name__,
            kind=KIND,
            thread_name="eventpump publisher state",
        )
        super().__init__(SqliteRecordStore(file, "publishers/", kind=KIND))
