"""A SQLite file as the stores use it: in a thread, with the writes of one turn of the event loop in one transaction."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
from collections.abc import Callable, Sequence
from typing import Any, Literal

from eventpump.aio.sqlite_thread import SqliteThread, connect, connect_to_read, transaction
from eventpump.aio.tasks import reject, resolve
from eventpump.errors import ClosedError, StoreError


class Write:
    """A statement, which decides by its own conditions whether it changes anything. Its result is the rows changed."""

    __slots__ = ("error", "operation", "outcome", "parameters", "partition_id", "path", "result", "statement")

    def __init__(
        self,
        operation: str,
        partition_id: str | None,
        outcome: asyncio.Future[Any] | None,
        statement: str,
        parameters: tuple[object, ...],
    ) -> None:
        self.operation = operation
        self.partition_id = partition_id
        self.outcome = outcome
        self.path = ""
        self.statement = statement
        self.parameters = parameters
        self.result: int | bool = False
        self.error: StoreError | None = None

    def execute(self, connection: sqlite3.Connection) -> None:
        """Run the statement, within a transaction or as one."""
        self.result = connection.execute(self.statement, self.parameters).rowcount

    def conclude(self, connection: sqlite3.Connection) -> None:
        """Called after the transaction."""

    def fail(self, error: BaseException) -> None:
        """End it with a failure of the store."""
        self.error = StoreError(self.operation, f"{self.path}: {error}", partition_id=self.partition_id)
        self.error.__cause__ = error

    def deliver(self) -> None:
        """In the event loop: set the outcome, unless its waiter was cancelled."""
        if self.outcome is not None:
            if self.error is not None:
                reject(self.outcome, self.error)
            else:
                resolve(self.outcome, self.result)


class SqliteFile:
    """The file, in a thread. Reads are submitted at once, and the writes of one turn of the loop as one transaction.

    Args:
        busy_timeout: How long to wait for another process's transaction, in seconds.
        prepare: Called with the connection in the thread: creates the tables, or checks them.
        synchronous: NORMAL can lose the last commits with the power, but not the file's consistency.
        owner: The class that it is a part of, and
        kind: what that is, for errors.
        thread_name: What the thread's name begins with.
        read_only: Whether to open a file that exists, and to write nothing. Default: False.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        busy_timeout: float,
        prepare: Callable[[sqlite3.Connection], None],
        *,
        synchronous: Literal["NORMAL", "FULL"],
        owner: str,
        kind: str,
        thread_name: str = "eventpump sqlite",
        read_only: bool = False,
    ) -> None:
        self.path = os.fspath(path)
        self._kind = kind

        def open_file() -> sqlite3.Connection:
            if read_only:
                return connect_to_read(self.path, busy_timeout=busy_timeout, check=prepare)
            return connect(self.path, synchronous=synchronous, busy_timeout=busy_timeout, prepare=prepare)

        self.thread = SqliteThread(thread_name, open_file, owner=owner)
        """Has the connection."""
        self.home = self.thread.home
        """The event loop that it belongs to."""
        self._pending: list[Write] = []

    async def open(self) -> None:
        """Open the file, and create or complete its tables. Opening twice is fine."""
        try:
            await self.thread.open()
        except sqlite3.Error as error:
            raise StoreError("open", f"{self.path}: {error}") from error

    async def read(
        self, operation: str, partition_id: str | None, query: str, parameters: tuple[object, ...]
    ) -> list[Any]:
        """Run a query and return its rows. It waits neither for the file's write lock nor for writes of its turn."""
        if self.thread.is_closed:
            raise ClosedError(self._kind)
        try:
            return await self.thread.run(lambda connection: connection.execute(query, parameters).fetchall())
        except Exception as error:  # also a number beyond 64 bits
            raise StoreError(operation, f"{self.path}: {error}", partition_id=partition_id) from error

    async def write(
        self, operation: str, partition_id: str | None, statement: str, parameters: tuple[object, ...]
    ) -> int:
        """Run a statement and return how many rows it changed. Cancelled, it is not run, or run and forgotten."""
        outcome: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.submit(Write(operation, partition_id, outcome, statement, parameters))
        return await outcome

    def write_forgotten(self, statement: str, parameters: tuple[object, ...]) -> None:
        """Run a statement after every write submitted before, unless the file is closing; its outcome is dropped."""
        if not self.thread.is_closed:
            self.submit(Write("", None, None, statement, parameters))

    def submit(self, write: Write) -> None:
        """Do a write with all others of this turn of the loop, which set their outcomes."""
        if self.thread.is_closed:
            raise ClosedError(self._kind)
        if not self._pending:
            asyncio.get_running_loop().call_soon(self._flush)
        write.path = self.path
        self._pending.append(write)

    def close(self) -> None:
        """Accept nothing more; the thread ends after what was submitted. Closing twice is fine."""
        if not self.thread.is_closed:
            self._flush()
            self.thread.close()

    async def aclose(self) -> None:
        """Finish what was submitted and end the thread. Cancelled, the thread still ends."""
        self.close()
        await self.thread.aclose()

    def _flush(self) -> None:
        pending = [write for write in self._pending if write.outcome is None or not write.outcome.cancelled()]
        self._pending = []
        if writes := self.ordered(pending):
            done = self.thread.run(lambda connection: _commit(connection, writes))
            done.add_done_callback(lambda _: _deliver(writes, done.exception()))

    def ordered(self, writes: list[Write]) -> list[Write]:
        """Return the writes of one turn as they are made; a subclass may combine some."""
        return writes


def _commit(connection: sqlite3.Connection, writes: Sequence[Write]) -> None:
    """Run statements in one transaction; what it raises is a failure of every one of them.

    While it runs the file is locked: nothing is read or decided here, and a single statement is its own transaction.
    """
    with contextlib.nullcontext() if len(writes) == 1 else transaction(connection):
        for write in writes:
            try:
                write.execute(connection)
            except sqlite3.Error:
                raise
            except Exception as error:  # a number beyond 64 bits, for example: that call's own fault
                write.fail(error)
    for write in writes:
        try:
            write.conclude(connection)
        except sqlite3.Error as error:
            write.fail(error)


def _deliver(writes: Sequence[Write], error: BaseException | None) -> None:
    for write in writes:
        if error is not None:
            write.fail(error)
        write.deliver()
