"""A SQLite connection in a thread of its own, for code on an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, TypeVar, TypeVarTuple, Unpack

from eventpump.aio.home import HomeLoop

_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")


class ForeignFileError(sqlite3.DatabaseError):
    """The file is not a database, or not one that this version can use. Trying again cannot help."""


class SqliteThread:
    """A thread with a SQLite connection, which does work in the order in which it is submitted.

    Used by one event loop. Work goes through the loop's `run_in_executor`, so that a loop on virtual time waits for it.

    Args:
        connect: Opens the connection. Called in the thread, when the connection is opened.
        warns: Whether to warn at the end of a loop that leaves it open.
    """

    def __init__(self, name: str, connect: Callable[[], sqlite3.Connection], *, owner: str, warns: bool = True) -> None:
        self.home = HomeLoop(owner, warns=warns)
        self._connect = connect
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._connection: sqlite3.Connection | None = None
        self._disconnected: asyncio.Future[None] | None = None

    @property
    def is_closed(self) -> bool:
        """Whether it was closed, and takes no more work."""
        return self._disconnected is not None

    async def open(self) -> None:
        """Open the connection. Opening twice is fine, also at the same time."""
        await self._submit(self._open)

    def run(self, work: Callable[[sqlite3.Connection], _T]) -> asyncio.Future[_T]:
        """Submit work, and return its outcome. Cancelled, the work is not done, or done and forgotten.

        The outcome is a `sqlite3.ProgrammingError` where the connection is not open.

        Raises:
            RuntimeError: The thread was closed before.
        """
        return self._submit(self._do, work)

    def close(self) -> None:
        """Close the connection and end the thread, after all work that was submitted. Closing twice is fine."""
        if self._disconnected is None:
            self._disconnected = self._submit(self._disconnect)
            self._executor.shutdown(wait=False)
            self.home.close()

    async def aclose(self) -> None:
        """Close, and wait until the thread has ended. Cancelled, it still ends."""
        self.close()
        assert self._disconnected is not None
        await asyncio.shield(self._disconnected)
        self._executor.shutdown()  # to disconnect was the last work: nothing is waited for but the end of the thread

    def _submit(self, work: Callable[[Unpack[_Ts]], _T], *arguments: *_Ts) -> asyncio.Future[_T]:
        self.home.enter()
        return asyncio.get_running_loop().run_in_executor(self._executor, work, *arguments)

    # ---- in the thread

    def _open(self) -> None:
        if self._connection is None:
            self._connection = self._connect()

    def _do(self, work: Callable[[sqlite3.Connection], _T]) -> _T:
        if self._connection is None:
            raise sqlite3.ProgrammingError("the store is not open: call open() first")
        return work(self._connection)

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()


def connect(
    path: str | os.PathLike[str],
    *,
    synchronous: Literal["NORMAL", "FULL"],
    busy_timeout: float,
    prepare: Callable[[sqlite3.Connection], None],
    pragmas: tuple[str, ...] = (),
) -> sqlite3.Connection:
    """Open a database in WAL mode, with one transaction per statement except within `transaction`.

    Args:
        synchronous: NORMAL can lose the last commits with the power, but not the file's consistency.
        prepare: Called with the connection: creates or upgrades the tables.
        pragmas: Set before the mode, such as "page_size = 32768".

    Raises:
        ForeignFileError: The file is not a database.
        Error: The file cannot be opened now; see `sqlite3`.
    """
    is_new = not os.path.exists(path)
    connection = sqlite3.connect(path, timeout=busy_timeout, isolation_level=None)
    try:
        if is_new:
            # Nothing is in it yet, and the files beside it get its permissions.
            with contextlib.suppress(OSError):
                os.chmod(path, 0o600)
        for pragma in pragmas:
            connection.execute(f"PRAGMA {pragma}")
        _use_wal(connection, busy_timeout)
        connection.execute(f"PRAGMA synchronous = {synchronous}")
        prepare(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def connect_to_read(
    path: str | os.PathLike[str], *, busy_timeout: float, check: Callable[[sqlite3.Connection], None]
) -> sqlite3.Connection:
    """Open a database that exists, to read it. Raises `ForeignFileError` if there is none; and see `sqlite3`."""
    if not os.path.isfile(path):
        raise ForeignFileError("there is no such file")
    address = f"{Path(path).absolute().as_uri()}?mode=ro"
    connection = sqlite3.connect(address, timeout=busy_timeout, isolation_level=None, uri=True)
    try:
        check(connection)
    except BaseException as error:
        connection.close()
        if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_NOTADB:
            raise ForeignFileError(str(error)) from error
        raise
    return connection


def _use_wal(connection: sqlite3.Connection, busy_timeout: float) -> None:
    # Two processes that open a new file at once: the switch to WAL is the one lock that SQLite does not wait for.
    deadline = time.monotonic() + busy_timeout
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL").fetchone()
        except sqlite3.DatabaseError as error:
            if error.sqlite_errorcode == sqlite3.SQLITE_NOTADB:
                raise ForeignFileError(str(error)) from error
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() >= deadline:
                raise
            time.sleep(0.005)
        else:
            return


@contextlib.contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """Run the block as one transaction that holds the file's write lock; rolled back where the block raises."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            with contextlib.suppress(sqlite3.Error):  # the first error is the one to raise
                connection.execute("ROLLBACK")
        raise
