"""Records in a SQLite file, which may have those of several stores, and leases too."""

from __future__ import annotations

import sqlite3
from typing import Final

from eventpump.aio.sqlite_thread import ForeignFileError, transaction
from eventpump.errors import ConfigurationError, StoreError
from eventpump.interfaces import ListedRecord, StoredRecord
from eventpump.storage.records.memory import new_version
from eventpump.storage.records.names import check_body, check_name, check_prefix
from eventpump.storage.records.opened import OpenedRecords
from eventpump.storage.sqlite_file import SqliteFile

_TABLE: Final = """
CREATE TABLE IF NOT EXISTS record (
    name TEXT PRIMARY KEY,
    version TEXT NOT NULL,
    body BLOB NOT NULL
) WITHOUT ROWID
"""
_FORMER: Final = "SELECT name FROM sqlite_master WHERE type = 'table' AND name IN ('publisher', 'publisher_state')"
_READ: Final = "SELECT body, version FROM record WHERE name = ?"
_CREATE: Final = "INSERT OR IGNORE INTO record (version, body, name) VALUES (?, ?, ?)"
_REPLACE: Final = "UPDATE record SET version = ?, body = ? WHERE name = ? AND version = ?"
_LIST: Final = "SELECT name, version, body FROM record WHERE name >= ? AND name < ?"
_DELETE: Final = "DELETE FROM record WHERE name = ?"
_LAST: Final = "\U0010ffff"
"""Above every printable character."""


class SqliteRecordStore(OpenedRecords):
    """A `RecordStore` in a SQLite file. The writes of one turn of the event loop share one transaction."""

    def __init__(self, file: SqliteFile, prefix: str = "", *, kind: str = "record store") -> None:
        super().__init__(kind)
        self._file = file
        self._prefix = prefix

    async def open(self) -> None:
        """Open the file and create the table. Raises `ConfigurationError` for a file of another kind or version."""
        self._check_not_closed()
        try:
            await self._file.open()
        except StoreError as error:
            if isinstance(error.__cause__, ForeignFileError):
                raise ConfigurationError("path", error.reason) from None
            raise
        self._is_open = True

    async def read(self, name: str) -> StoredRecord | None:
        """Return a record, or None if there is none."""
        operation = f"read {name}"
        rows = await self._file.read(operation, None, _READ, (self._key(operation, name),))
        return StoredRecord(_bytes(rows[0][0]), rows[0][1]) if rows else None

    async def swap(self, name: str, body: bytes, replaces: str | None) -> str | None:
        """Store a record by compare-and-swap: one statement, and a query where it is refused."""
        operation = f"swap {name}"
        key, version = self._key(operation, name), new_version()
        parameters: tuple[object, ...] = (version, check_body(body), key)
        if replaces is None:
            is_stored = await self._file.write(operation, None, _CREATE, parameters)
        else:
            is_stored = await self._file.write(operation, None, _REPLACE, (*parameters, replaces))
        if is_stored:
            return version
        # Another record is there; or this one, from an earlier call that was cancelled.
        rows = await self._file.read(operation, None, _READ, (key,))
        return str(rows[0][1]) if rows and _bytes(rows[0][0]) == body else None

    async def list(self, prefix: str) -> dict[str, ListedRecord]:
        """Return the records of a directory, with their bodies. One query."""
        operation = f"list {check_prefix(prefix)}"
        self._check_open(operation)
        start = self._prefix + prefix
        rows = await self._file.read(operation, None, _LIST, (start, start + _LAST))
        return {name.removeprefix(self._prefix): ListedRecord(version, _bytes(body)) for name, version, body in rows}

    async def delete(self, name: str, version: str | None = None) -> bool:
        """Delete a record. Return False, and delete nothing, if there is one of another version."""
        operation = f"delete {name}"
        key = self._key(operation, name)
        if version is None:
            await self._file.write(operation, None, _DELETE, (key,))
            return True
        if await self._file.write(operation, None, f"{_DELETE} AND version = ?", (key, version)):
            return True
        return not await self._file.read(operation, None, _READ, (key,))

    async def aclose(self) -> None:
        """Finish the calls under way, close the file and end the thread. Closing twice is fine."""
        if not self._is_closed:
            self._file.home.enter()
        self._is_closed = True
        await self._file.aclose()

    def _key(self, operation: str, name: str) -> str:
        check_name(name)
        self._check_open(operation)
        return self._prefix + name

    def __repr__(self) -> str:
        return f"SqliteRecordStore({self._file.path!r}, prefix={self._prefix!r})"


def _bytes(body: bytes | str) -> bytes:
    # Other programs may have stored text.
    return body.encode() if isinstance(body, str) else body


def create_record_table(connection: sqlite3.Connection) -> None:
    """Create the table of a file that has none. Raises `ForeignFileError` for one with tables of an earlier version."""
    if former := connection.execute(_FORMER).fetchone():
        raise ForeignFileError(
            f"has the table {former[0]} of an earlier version of eventpump, whose leases, checkpoints and publishers' "
            "states this version does not read; use another file"
        )
    with transaction(connection):
        connection.execute(_TABLE)
