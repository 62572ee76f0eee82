"""The states of idempotent publishers in a SQLite file or in memory, and what all their stores have in common.

The file may be one that keeps leases too.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import secrets
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from eventpump.core.claim import PublisherIntent, PublisherState, StoredPublisherState
from eventpump.errors import ClosedError, ConfigurationError, StoreError
from eventpump.storage.sqlite import use_wal

T = TypeVar("T")
Key = tuple[str, str]
"""A publisher's name and a partition id."""

MAX_NAME: Final = 256

_MAX_CLAIM: Final = 64
_LIMITS: Final = {
    "producer_id": (0, 2**63 - 1),
    "owner_level": (0, 2**15 - 1),
    "start": (-1, 2**31 - 1),
    "published": (0, 2**63 - 1),
    "tail": (-1, 2**63 - 1),
    "number": (-1, 2**31 - 1),
}
"""Wire reference 8.1; a publisher that published nothing yet may count from -1 (8.2)."""
_FLAGS: Final = ("has_published", "is_clean", "is_stamped")

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


def check_key(name: str, partition_id: str) -> Key:
    """Check a publisher's name and a partition id. :raises ConfigurationError: they cannot be that."""
    for field, text in (("name", name), ("partition_id", partition_id)):
        if not 0 < len(text) <= MAX_NAME or not text.isprintable():
            raise ConfigurationError(field, f"must be printable text of 1 to {MAX_NAME} characters")
    return name, partition_id


def check_writable(state: PublisherState) -> PublisherState:
    """Check a state that is to be stored. :raises ConfigurationError: it would not be read again."""
    try:
        return decode_state(encode_state(state))
    except (ValueError, TypeError) as error:
        raise ConfigurationError("state", str(error)) from None


def encode_state(state: PublisherState) -> bytes:
    """Encode a state as a JSON object."""
    return json.dumps({"version": 2, **dataclasses.asdict(state)}).encode()


def decode_state(raw: bytes) -> PublisherState:
    """Decode a state. Members it does not know are skipped. :raises ValueError: it is none."""
    try:
        decoded = json.loads(raw.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        raise ValueError("the state is not JSON") from None
    if not isinstance(decoded, dict):
        raise ValueError("the state is not a JSON object")
    version = decoded.get("version")
    if version not in (1, 2) or isinstance(version, bool):
        raise ValueError("the state's version is not known to this version of eventpump")
    first = (_number(decoded, "producer_id"), _number(decoded, "owner_level"), _number(decoded, "start"))
    if version == 1:
        return PublisherState(*first)
    has_published, is_clean, is_stamped = (decoded.get(each) for each in _FLAGS)
    claim, intent = decoded.get("claim"), decoded.get("intent")
    if not (isinstance(has_published, bool) and isinstance(is_clean, bool) and isinstance(is_stamped, bool)):
        raise ValueError(f"one of {', '.join(_FLAGS)} is neither true nor false")
    if not isinstance(claim, str) or len(claim) > _MAX_CLAIM or not (claim.isascii() and claim.isprintable()):
        raise ValueError(f"claim is no printable text of at most {_MAX_CLAIM} characters")
    if not isinstance(intent, dict | None):
        raise ValueError("the intent is not a JSON object")
    return PublisherState(
        *first,
        published=_number(decoded, "published"),
        has_published=has_published,
        is_clean=is_clean,
        is_stamped=is_stamped,
        claim=claim,
        intent=None if intent is None else _intent(intent),
    )


def _intent(decoded: dict[str, object]) -> PublisherIntent:
    return PublisherIntent(
        _number(decoded, "owner_level"),
        tail=None if decoded.get("tail") is None else _number(decoded, "tail"),
        number=None if decoded.get("number") is None else _number(decoded, "number"),
    )


def _number(decoded: dict[str, object], field: str) -> int:
    value = decoded.get(field)
    low, high = _LIMITS[field]
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ValueError(f"{field} is no number from {low} to {high}")
    return value


class MemoryPublisherStateStore:
    """A `PublisherStateStore` that lives as long as its process: for tests.

    :param states: the truth, shared by the stores that are given the same.
    """

    def __init__(self, states: dict[Key, StoredPublisherState] | None = None) -> None:
        self._states = {} if states is None else states
        self._is_open = False
        self._is_closed = False

    async def open(self) -> None:
        """Open it. Opening twice is fine."""
        if self._is_closed:
            raise ClosedError("publisher state store")
        self._is_open = True

    async def read_state(self, name: str, partition_id: str) -> StoredPublisherState | None:
        """Read a state; None where there is none."""
        return self._states.get(self._key("read state", name, partition_id))

    async def write_state(
        self, name: str, partition_id: str, state: PublisherState, replaces: StoredPublisherState | None
    ) -> StoredPublisherState | None:
        """Store a state by compare-and-swap. None, and nothing stored, where another is there."""
        key = self._key("write state", name, partition_id)
        check_writable(state)
        found = self._states.get(key)
        if found is not None and found.state == state:
            return found
        if (found and found.version) != (replaces and replaces.version):
            return None
        stored = self._states[key] = StoredPublisherState(state, new_version())
        return stored

    async def reset_state(self, name: str, partition_id: str) -> None:
        """Delete a state. Nothing happens where there is none."""
        self._states.pop(self._key("reset state", name, partition_id), None)

    async def aclose(self) -> None:
        """Close it. Closing twice is fine."""
        self._is_closed = True

    def _key(self, operation: str, name: str, partition_id: str) -> Key:
        if self._is_closed:
            raise ClosedError("publisher state store")
        if not self._is_open:
            raise StoreError(operation, "the store is not open", partition_id=partition_id)
        return check_key(name, partition_id)

    def __repr__(self) -> str:
        return f"MemoryPublisherStateStore({len(self._states)} states)"


class SqlitePublisherStateStore:
    """A `PublisherStateStore` in a SQLite file, for the processes of one machine.

    Calls run one after the other in a thread of the store's own. One that is cancelled is not made, or made and
    forgotten.

    :param path: the file; made where it does not exist, in a directory that does. It may be a file of leases.
    :param busy_timeout: how long to wait for another process's transaction, in seconds.
    """

    def __init__(self, path: str | os.PathLike[str], *, busy_timeout: float = 5.0) -> None:
        if busy_timeout < 0:
            raise ConfigurationError("busy_timeout", "must not be below 0")
        self._path = os.fspath(path)
        self._busy_timeout = busy_timeout
        # One thread: a write that was given up on is over before the next one begins.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="eventpump publisher state")
        self._connection: sqlite3.Connection | None = None
        self._is_closed = False

    async def open(self) -> None:
        """Open the file and make the table. Opening twice is fine.

        :raises StoreError: the file cannot be opened, or is none of ours.
        """
        await self._run("open", None, lambda connection: None, may_open=True)

    async def read_state(self, name: str, partition_id: str) -> StoredPublisherState | None:
        """Read a state; None where there is none. :raises StoreError: the store failed."""
        key = check_key(name, partition_id)
        return await self._run("read state", partition_id, lambda connection: _select(connection, key))

    async def write_state(
        self, name: str, partition_id: str, state: PublisherState, replaces: StoredPublisherState | None
    ) -> StoredPublisherState | None:
        """Store a state by compare-and-swap. None, and nothing stored, where another is there.

        :raises StoreError: the store failed.
        """
        key = check_key(name, partition_id)
        body = encode_state(check_writable(state)).decode()

        def write(connection: sqlite3.Connection) -> StoredPublisherState | None:
            with _transaction(connection):
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
        """Delete a state. Nothing happens where there is none. :raises StoreError: the store failed."""
        key = check_key(name, partition_id)

        def delete(connection: sqlite3.Connection) -> None:
            connection.execute(_DELETE, key)

        await self._run("reset state", partition_id, delete)

    async def aclose(self) -> None:
        """Finish the call under way, close the file and end the thread. Closing twice is fine."""
        if not self._is_closed:
            self._is_closed = True
            self._thread.submit(self._disconnect)
            self._thread.shutdown(wait=False)
        # Waited for in a thread, because the call under way may be waiting; cancelled, it ends all the same.
        await asyncio.to_thread(self._thread.shutdown)

    async def _run(
        self,
        operation: str,
        partition_id: str | None,
        work: Callable[[sqlite3.Connection], T],
        *,
        may_open: bool = False,
    ) -> T:
        if self._is_closed:
            raise ClosedError("publisher state store")

        def call() -> T:
            try:
                if self._connection is None and may_open:
                    self._connection = self._connect()
                if self._connection is None:
                    raise StoreError(operation, "the store is not open", partition_id=partition_id)
                return work(self._connection)
            except (sqlite3.Error, ValueError, OverflowError) as error:
                raise StoreError(operation, str(error), partition_id=partition_id) from error

        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    # ---- in the thread

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            self._path, timeout=self._busy_timeout, isolation_level=None, check_same_thread=False
        )
        try:
            use_wal(connection, self._busy_timeout)
            # A state lost with the power would let its application publish everything again, under a new id.
            connection.execute("PRAGMA synchronous = FULL")
            with _transaction(connection):
                connection.execute(_SCHEMA)
                if connection.execute(_HAS_FORMER).fetchone() is not None:
                    _take_in(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()

    def __repr__(self) -> str:
        return f"SqlitePublisherStateStore({self._path!r})"


@contextlib.contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            with contextlib.suppress(sqlite3.Error):  # the first error is the one to tell
                connection.execute("ROLLBACK")
        raise


def _take_in(connection: sqlite3.Connection) -> None:
    """Take in the states of a file of the former form."""
    for name, partition_id, producer_id, owner_level, start in connection.execute(_FORMER).fetchall():
        body = encode_state(check_writable(PublisherState(producer_id, owner_level, start))).decode()
        connection.execute(_REPLACE, (name, partition_id, new_version(), body))
    connection.execute("DROP TABLE publisher_state")


def _select(connection: sqlite3.Connection, key: Key) -> StoredPublisherState | None:
    row = connection.execute(_SELECT, key).fetchone()
    return None if row is None else StoredPublisherState(decode_state(str(row[0]).encode()), str(row[1]))


def new_version() -> str:
    """Make a version that no state had before, one that was deleted included."""
    return secrets.token_hex(16)
