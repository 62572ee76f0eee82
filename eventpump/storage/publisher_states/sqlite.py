"""The states of idempotent publishers in a SQLite file, which may be one that keeps leases too."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from eventpump.aio.sqlite_thread import SqliteThread, connect, transaction
from eventpump.core.claim import PublisherState, StoredPublisherState
from eventpump.errors import ClosedError, ConfigurationError, StoreError
from eventpump.storage.publisher_states.form import (
    Key,
    check_key,
    check_writable,
    decode_state,
    encode_state,
    new_version,
)

T = TypeVar("T")

_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS publisher (
    name TEXT NOT NULL,
    partition_id TEXT NOT NULL,
    version TEXT NOT NULL,
    state TEXT NOT NULL,
    PRIMARY KEY (name, partition_id)
) WITHOUT ROWID
"""
_FORMER: Final = "SELECT name, partition_id, producer_id, owner_level, start FROM publisher_state"
_HAS_FORMER: Final = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'publisher_state'"
_SELECT: Final = "SELECT state, version FROM publisher WHERE name = ? AND partition_id = ?"
_REPLACE: Final = "INSERT OR REPLACE INTO publisher (name, partition_id, version, state) VALUES (?, ?, ?, ?)"
_DELETE: Final = "DELETE FROM publisher WHERE name = ? AND partition_id = ?"


class SqlitePublisherStateStore:
    """A `PublisherStateStore` in a SQLite file, for the processes of one machine.

    Calls run one after the other in a thread of the store's own. One that is cancelled is not made, or made and
    forgotten.

    Args:
        path: The file; created where it does not exist, in a directory that does. It may be a file of leases.
        busy_timeout: How long to wait for another process's transaction, in seconds. Default: 5.0.
    """

    def __init__(self, path: str | os.PathLike[str], *, busy_timeout: float = 5.0) -> None:
        if busy_timeout < 0:
            raise ConfigurationError("busy_timeout", "must not be below 0")
        self._path = os.fspath(path)
        self._busy_timeout = busy_timeout
        # One thread: a write that was given up on is over before the next one begins.
        self._thread = SqliteThread("eventpump publisher state", self._connect, owner=type(self).__name__)
        self._is_closed = False

    async def open(self) -> None:
        """Open the file and create the table. Opening twice is fine.

        Raises:
            StoreError: The file cannot be opened, or is of another kind.
        """
        self._check_open()
        await self._outcome("open", None, self._thread.open())

    async def read_state(self, name: str, partition_id: str) -> StoredPublisherState | None:
        """Return a state, or None if there is none.

        Raises:
            StoreError: The store failed.
        """
        key = check_key(name, partition_id)
        return await self._run("read state", partition_id, lambda connection: _select(connection, key))

    async def write_state(
        self, name: str, partition_id: str, state: PublisherState, replaces: StoredPublisherState | None
    ) -> StoredPublisherState | None:
        """Store a state by compare-and-swap. Return None, and store nothing, if another is there.

        Raises:
            StoreError: The store failed.
        """
        key = check_key(name, partition_id)
        body = encode_state(check_writable(state)).decode()

        def write(connection: sqlite3.Connection) -> StoredPublisherState | None:
            with transaction(connection):
                found = _select(connection, key)
                if found is not None and found.state == state:
                    return found
                if (found and found.version) != (replaces and replaces.version):
                    return None
                stored = StoredPublisherState(state, new_version())
                connection.execute(_REPLACE, (*key, stored.version, body))
            return stored

        return await self._run("write state", partition_id, write)

    async def reset_state(self, name: str, partition_id: str) -> None:
        """Delete a state. It is not an error if there is none.

        Raises:
            StoreError: The store failed.
        """
        key = check_key(name, partition_id)

        def delete(connection: sqlite3.Connection) -> None:
            connection.execute(_DELETE, key)

        await self._run("reset state", partition_id, delete)

    async def aclose(self) -> None:
        """Finish the calls under way, close the file and end the thread. Closing twice is fine."""
        if not self._is_closed:
            self._thread.home.enter()
        self._is_closed = True
        await self._thread.aclose()

    async def _run(self, operation: str, partition_id: str | None, work: Callable[[sqlite3.Connection], T]) -> T:
        self._check_open()
        return await self._outcome(operation, partition_id, self._thread.run(work))

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("publisher state store")

    async def _outcome(self, operation: str, partition_id: str | None, work: Awaitable[T]) -> T:
        try:
            return await work
        except (sqlite3.Error, ValueError, OverflowError) as error:
            raise StoreError(operation, f"{self._path}: {error}", partition_id=partition_id) from error

    def _connect(self) -> sqlite3.Connection:
        # A state lost with the power would let its application publish everything again, under a new id.
        return connect(self._path, synchronous="FULL", busy_timeout=self._busy_timeout, prepare=_prepare)

    def __repr__(self) -> str:
        return f"SqlitePublisherStateStore({self._path!r})"


def _prepare(connection: sqlite3.Connection) -> None:
    with transaction(connection):
        connection.execute(_SCHEMA)
        if connection.execute(_HAS_FORMER).fetchone() is not None:
            _convert(connection)


def _convert(connection: sqlite3.Connection) -> None:
    """Convert the states of a file of the former form."""
    for name, partition_id, producer_id, owner_level, start in connection.execute(_FORMER).fetchall():
        body = encode_state(check_writable(PublisherState(producer_id, owner_level, start))).decode()
        connection.execute(_REPLACE, (name, partition_id, new_version(), body))
    connection.execute("DROP TABLE publisher_state")


def _select(connection: sqlite3.Connection, key: Key) -> StoredPublisherState | None:
    row = connection.execute(_SELECT, key).fetchone()
    return None if row is None else StoredPublisherState(decode_state(str(row[0]).encode()), str(row[1]))
