"""A SQLite connection in a thread: order, transactions, and its end."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import pytest

from eventpump.aio.sqlite_thread import ForeignFileError, SqliteThread, connect, connect_to_read, transaction


def create(connection: sqlite3.Connection) -> None:
    connection.execute("CREATE TABLE IF NOT EXISTS number (value INTEGER)")


def create_nothing(connection: sqlite3.Connection) -> None:
    values(connection)


def values(connection: sqlite3.Connection) -> list[int]:
    return [value for (value,) in connection.execute("SELECT value FROM number")]


def threads() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name.startswith("test of sqlite")]


def new_thread(path: Path, busy_timeout: float = 5.0) -> SqliteThread:
    def make() -> sqlite3.Connection:
        return connect(path, synchronous="NORMAL", busy_timeout=busy_timeout, prepare=create)

    return SqliteThread("test of sqlite", make, owner="Store", warns=False)


@asynccontextmanager
async def opened(path: Path, busy_timeout: float = 5.0) -> AsyncIterator[SqliteThread]:
    thread = new_thread(path, busy_timeout)
    try:
        await thread.open()
        yield thread
    finally:
        await thread.aclose()


def _modes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()}


async def test_file_that_is_created_is_its_owners_alone(tmp_path: Path) -> None:
    """So are those that SQLite puts beside it; a file that exists keeps its permissions."""
    (tmp_path / "shared.db").touch(0o660)
    (tmp_path / "shared.db").chmod(0o660)
    async with opened(tmp_path / "own.db") as own, opened(tmp_path / "shared.db") as shared:
        for thread in (own, shared):
            await thread.run(lambda connection: connection.execute("INSERT INTO number VALUES (1)"))
        modes = _modes(tmp_path)
    assert {name: mode for name, mode in modes.items() if name.startswith("own")} == {
        "own.db": 0o600, "own.db-wal": 0o600, "own.db-shm": 0o600
    }  # fmt: skip
    assert modes["shared.db"] == 0o660


async def test_work_is_done_in_order_in_one_thread(tmp_path: Path) -> None:
    """Work is done in the order in which it was submitted, in a thread that is not the caller's."""
    async with opened(tmp_path / "file.db") as thread:
        names: list[str] = []

        def add(value: int) -> asyncio.Future[int]:
            def work(connection: sqlite3.Connection) -> int:
                names.append(threading.current_thread().name)
                return connection.execute("INSERT INTO number VALUES (?)", (value,)).rowcount

            return thread.run(work)

        assert await asyncio.gather(*map(add, range(20))) == [1] * 20
        assert await thread.run(values) == [*range(20)]
        assert set(names) == set(threads())
        assert len(threads()) == 1


async def test_run_before_open_is_an_error_of_sqlite(tmp_path: Path) -> None:
    """Work before the connection is open fails; opened twice, also at once, there is one connection."""
    thread = new_thread(tmp_path / "file.db")
    try:
        with pytest.raises(sqlite3.ProgrammingError, match="not open"):
            await thread.run(values)
        await asyncio.gather(thread.open(), thread.open())
        connections = [await thread.run(lambda connection: connection) for _ in range(2)]
        assert connections[0] is connections[1]
    finally:
        await thread.aclose()


async def test_open_that_failed_may_be_called_again(tmp_path: Path) -> None:
    """A file that cannot be opened is an error of `open`, and the next call finds what was put right."""
    thread = new_thread(tmp_path / "directory" / "file.db")
    try:
        with pytest.raises(sqlite3.OperationalError, match="unable to open"):
            await thread.open()
        (tmp_path / "directory").mkdir()
        await thread.open()
        assert await thread.run(values) == []
    finally:
        await thread.aclose()


async def test_cancelled_work_holds_nothing_up(tmp_path: Path) -> None:
    """Work whose waiter was cancelled before it began is not done, and what comes after it is."""
    async with opened(tmp_path / "file.db") as thread:
        entered, go_on = threading.Event(), threading.Event()

        def hold(_: sqlite3.Connection) -> None:
            entered.set()
            go_on.wait(10)

        held = thread.run(hold)
        await asyncio.to_thread(entered.wait, 10)
        dropped = thread.run(lambda connection: connection.execute("INSERT INTO number VALUES (1)").rowcount)
        held.cancel()
        dropped.cancel()
        await asyncio.sleep(0)  # the executor hears of it in the next turn
        go_on.set()
        assert await thread.run(values) == []


async def test_aclose_finishes_what_was_submitted(tmp_path: Path) -> None:
    """Work submitted before is done, then the thread ends; nothing is taken after. Cancelled, it still ends."""
    path = tmp_path / "file.db"
    thread = new_thread(path)
    await thread.open()
    added = thread.run(lambda connection: connection.execute("INSERT INTO number VALUES (7)").rowcount)
    ending = asyncio.create_task(thread.aclose())
    await asyncio.sleep(0)
    ending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await ending
    await thread.aclose()
    await thread.aclose()
    assert await added == 1
    assert threads() == []
    with pytest.raises(RuntimeError):
        thread.run(values)
    async with opened(path) as again:
        assert await again.run(values) == [7]


async def test_connect_prepares_a_file_in_wal_mode(tmp_path: Path) -> None:
    """The file is in WAL mode, as synchronous as was asked for, and the given pragmas are set."""
    connection = connect(
        tmp_path / "file.db", synchronous="FULL", busy_timeout=1, prepare=create, pragmas=("page_size = 32768",)
    )
    with closing(connection):
        found = [
            connection.execute(f"PRAGMA {each}").fetchone()[0] for each in ("journal_mode", "synchronous", "page_size")
        ]
    assert found == ["wal", 2, 32768]


async def test_connect_to_another_file_is_a_foreign_file_error(tmp_path: Path) -> None:
    """A file of another kind cannot be helped by waiting, and is left as it is."""
    path = tmp_path / "file.db"
    content = b"this is no database, and long enough to be taken for one" * 20
    path.write_bytes(content)
    with pytest.raises(ForeignFileError, match="not a database"):
        connect(path, synchronous="NORMAL", busy_timeout=1, prepare=create)
    assert path.read_bytes() == content


def refuse(connection: sqlite3.Connection) -> None:
    with transaction(connection):
        connection.execute("INSERT INTO number VALUES (1)")
        raise ValueError("refused")


async def test_transaction_is_whole_or_not_at_all(tmp_path: Path) -> None:
    """A block that raises leaves nothing, and no lock; the error is its own."""
    with closing(connect(tmp_path / "file.db", synchronous="NORMAL", busy_timeout=0, prepare=create)) as connection:
        with pytest.raises(ValueError, match="refused"):
            refuse(connection)
        assert not connection.in_transaction
        with transaction(connection):
            connection.execute("INSERT INTO number VALUES (2)")
        assert values(connection) == [2]


async def test_file_locked_by_another_is_an_error_after_the_busy_timeout(tmp_path: Path) -> None:
    """A transaction beside another's fails with SQLite's own error."""
    path = tmp_path / "file.db"
    async with opened(path, busy_timeout=0) as thread:
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")

            def add(connection: sqlite3.Connection) -> None:
                with transaction(connection):
                    connection.execute("INSERT INTO number VALUES (1)")

            with pytest.raises(sqlite3.OperationalError, match="locked"):
                await thread.run(add)
            other.execute("ROLLBACK")
        assert await thread.run(values) == []


def test_connect_to_read_opens_what_exists_and_writes_nothing(tmp_path: Path) -> None:
    """A missing file is not made, another file is named as one, and what is read cannot be written."""
    path = tmp_path / "numbers.db"
    with pytest.raises(ForeignFileError, match="no such file"):
        connect_to_read(path, busy_timeout=1.0, check=create_nothing)
    assert not path.exists()
    with closing(connect(path, synchronous="NORMAL", busy_timeout=1.0, prepare=create)) as connection:
        connection.execute("INSERT INTO number VALUES (7)")
    with closing(connect_to_read(path, busy_timeout=1.0, check=create_nothing)) as connection:
        assert values(connection) == [7]
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            connection.execute("INSERT INTO number VALUES (8)")
    other = tmp_path / "text.txt"
    other.write_bytes(b"no database " * 100)
    with pytest.raises(ForeignFileError):
        connect_to_read(other, busy_timeout=1.0, check=create_nothing)
