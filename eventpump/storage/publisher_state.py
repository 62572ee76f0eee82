"""The states of idempotent publishers in a SQLite file or in memory, and what all their stores have in common.

The file may be one that keeps leases too.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from eventpump.errors import ClosedError, ConfigurationError, StoreError
from eventpump.ports import PublisherState
from eventpump.storage.sqlite import use_wal

T = TypeVar("T")
Key = tuple[str, str]
"""A publisher's name and a partition id."""

MAX_NAME: Final = 256
CONFLICT: Final = "another publisher of this name changed it"

_LIMITS: Final = {"producer_id": (0, 2**63 - 1), "owner_level": (0, 2**15 - 1), "start": (-1, 2**31 - 1)}
"""Wire reference 8.1; a publisher that published nothing yet may count from -1 (8.2)."""

_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS publisher_state (
    name TEXT NOT NULL,
    partition_id TEXT NOT NULL,
    producer_id INTEGER NOT NULL,
    owner_level INTEGER NOT NULL,
    start INTEGER NOT NULL,
    PRIMARY KEY (name, partition_id)
) WITHOUT ROWID
"""
_SELECT: Final = "SELECT producer_id, owner_level, start FROM publisher_state WHERE name = ? AND partition_id = ?"
_REPLACE: Final = (
    "INSERT OR REPLACE INTO publisher_state (name, partition_id, producer_id, owner_level, start)"
    " VALUES (?, ?, ?, ?, ?)"
)


def check_key(name: str, partition_id: str) -> Key:
    """Check a publisher's name and a partition id. :raises ConfigurationError: they cannot be that."""
    for field, text in (("name", name), ("partition_id", partition_id)):
        if not 0 < len(text) <= MAX_NAME or not text.isprintable():
            raise ConfigurationError(field, f"must be printable text of 1 to {MAX_NAME} characters")
    return name, partition_id


def check_state(producer_id: object, owner_level: object, start: object) -> PublisherState:
    """Make a state of values read. :raises ValueError: they are none."""
    values = {"producer_id": producer_id, "owner_level": owner_level, "start": start}
    checked: dict[str, int] = {}
    for field, value in values.items():
        low, high = _LIMITS[field]
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise ValueError(f"{field} is no number from {low} to {high}")
        checked[field] = value
    return PublisherState(**checked)


def check_writable(state: PublisherState) -> PublisherState:
    """Check a state that is to be stored. :raises ConfigurationError: it would not be read again."""
    try:
        return check_state(state.producer_id, state.owner_level, state.start)
    except ValueError as error:
        raise ConfigurationError("state", str(error)) from None


def encode_state(state: PublisherState) -> bytes:
    """Encode a state as a JSON object."""
    body = {
        "version": 1,
        "producer_id": state.producer_id,
        "owner_level": state.owner_level,
        "start": state.start,
    }
    return json.dumps(body).encode()


def decode_state(raw: bytes) -> PublisherState:
    """Decode a state. Members it does not know are skipped. :raises ValueError: it is none."""
    try:
        decoded = json.loads(raw.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        raise ValueError("the state is not JSON") from None
    if not isinstance(decoded, dict):
        raise ValueError("the state is not a JSON object")
    if decoded.get("version") != 1:
        raise ValueError("the state's version is not known to this version of eventpump")
    return check_state(decoded.get("producer_id"), decoded.get("owner_level"), decoded.get("start"))


class Expectations:
    """What a store may overwrite: the state it saw last, or one of its own writes whose outcome it never learned."""

    def __init__(self) -> None:
        self._seen: dict[Key, PublisherState] = {}
        self._tried: dict[Key, set[PublisherState]] = {}

    def saw(self, key: Key, state: PublisherState | None) -> None:
        """Learn what is stored."""
        if state is None:
            self._seen.pop(key, None)
        else:
            self._seen[key] = state

    def trying(self, key: Key, state: PublisherState) -> None:
        """Learn that a write goes out."""
        self._tried.setdefault(key, set()).add(state)

    def stored(self, key: Key, state: PublisherState) -> None:
        """Learn that it is stored. An earlier write that was given up on is stored before it, or never."""
        self._seen[key] = state
        self._tried.pop(key, None)

    def allows(self, key: Key, found: PublisherState | None) -> bool:
        """Tell whether what is stored now may be overwritten."""
        return found == self._seen.get(key) or found in self._tried.get(key, ())


class MemoryPublisherStateStore:
    """A `PublisherStateStore` that lives as long as its process: for tests.

    :param states: the truth, shared by the stores that are given the same.
    """

    def __init__(self, states: dict[Key, PublisherState] | None = None) -> None:
        self._states = {} if states is None else states
        self._expectations = Expectations()
        self._is_open = False
        self._is_closed = False

    async def open(self) -> None:
        """Open it. Opening twice is fine."""
        if self._is_closed:
            raise ClosedError("publisher state store")
        self._is_open = True

    async def read_state(self, name: str, partition_id: str) -> PublisherState | None:
        """Read a state; None where there is none."""
        key = self._key("read state", name, partition_id)
        found = self._states.get(key)
        self._expectations.saw(key, found)
        return found

    async def write_state(self, name: str, partition_id: str, state: PublisherState) -> None:
        """Store a state in place of the one this store read or wrote last.

        :raises StoreError: another publisher of that name changed the state.
        """
        key = self._key("write state", name, partition_id)
        found = self._states.get(key)
        if found != state and not self._expectations.allows(key, found):
            raise StoreError("write state", CONFLICT, partition_id=partition_id)
        self._states[key] = check_writable(state)
        self._expectations.stored(key, state)

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
        self._expectations = Expectations()
        self._is_closed = False

    async def open(self) -> None:
        """Open the file and make the table. Opening twice is fine.

        :raises StoreError: the file cannot be opened, or is none of ours.
        """
        await self._run("open", None, lambda connection: None, may_open=True)

    async def read_state(self, name: str, partition_id: str) -> PublisherState | None:
        """Read a state; None where there is none. :raises StoreError: the store failed."""
        key = check_key(name, partition_id)

        def read(connection: sqlite3.Connection) -> PublisherState | None:
            found = _select(connection, key)
            self._expectations.saw(key, found)
            return found

        return await self._run("read state", partition_id, read)

    async def write_state(self, name: str, partition_id: str, state: PublisherState) -> None:
        """Store a state in place of the one this store read or wrote last.

        :raises StoreError: the store failed, or another publisher of that name changed the state.
        """
        key = check_key(name, partition_id)
        check_writable(state)

        def write(connection: sqlite3.Connection) -> None:
            with _transaction(connection):
                found = _select(connection, key)
                if found != state and not self._expectations.allows(key, found):
                    raise StoreError("write state", CONFLICT, partition_id=partition_id)
                self._expectations.trying(key, state)
                connection.execute(_REPLACE, (*key, state.producer_id, state.owner_level, state.start))
            self._expectations.stored(key, state)

        await self._run("write state", partition_id, write)

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
            connection.execute(_SCHEMA)
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


def _select(connection: sqlite3.Connection, key: Key) -> PublisherState | None:
    row = connection.execute(_SELECT, key).fetchone()
    return None if row is None else check_state(*row)
