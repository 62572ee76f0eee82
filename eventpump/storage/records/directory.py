"""Records in a directory that all their stores reach, on a file system with hard links."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

from eventpump.errors import StoreError
from eventpump.interfaces import ListedRecord, StoredRecord
from eventpump.storage.directories import in_thread, make_directory, synchronize_directory
from eventpump.storage.records.names import check_body, check_name, check_prefix
from eventpump.storage.records.opened import OpenedRecords

_T = TypeVar("_T")

_log: Final = logging.getLogger("eventpump.storage")

_ABANDONED: Final = 3600.0
"""Seconds after which the writer of a temporary file is taken for dead."""
_MARK: Final = "#"
"""Separates the number of a state in a file's name; in no record's name."""
_TEMPORARY: Final = "#tmp-"
_KEPT: Final = 8
"""How many states of a record are kept: a listing of files that others replace meanwhile misses none of them all."""


class _State(NamedTuple):
    """One state of a record, which a file has whole; an empty file where the record is deleted."""

    number: int
    version: str
    body: bytes


class DirectoryRecordStore(OpenedRecords):
    """A `RecordStore` in a directory: a file for each state of a record, whose number counts from 1.

    A state is written to a temporary file, which is synchronized with the disk and then linked to its name, so that of
    several writers one succeeds, and no process ever sees a part of a state, whenever the writer dies. What it leaves
    is deleted by a later `open`. The first state has the record's own name.

    Args:
        path: Created where it does not exist. For processes that may restart elsewhere, a path all machines share.
    """

    def __init__(self, path: str | os.PathLike[str], *, kind: str = "record store") -> None:
        super().__init__(kind)
        self._path = Path(path)

    async def open(self) -> None:
        """Create the directory, and write to the disk what it holds, so that this outlives a loss of power."""
        self._check_not_closed()
        await self._in_thread("open", "", self._prepare)
        self._is_open = True

    async def read(self, name: str) -> StoredRecord | None:
        """Return a record, or None if there is none."""
        path = self._find("read", name)
        state = await self._in_thread("read", name, lambda: _newest(path))
        return StoredRecord(state.body, state.version) if state is not None and state.body else None

    async def swap(self, name: str, body: bytes, replaces: str | None) -> str | None:
        """Store a record by compare-and-swap. Return None, and store nothing, if another is there."""
        path = self._find("swap", name)
        check_body(body)
        return await self._in_thread("swap", name, lambda: _swap(path, body, replaces))

    async def list(self, prefix: str) -> dict[str, ListedRecord]:
        """Return the records of a directory, without their bodies."""
        check_prefix(prefix)
        self._check_open(f"list {prefix}")
        return await self._in_thread("list", prefix, lambda: dict(self._list(self._path / prefix)))

    async def delete(self, name: str, version: str | None = None) -> bool:
        """Delete a record. Return False, and delete nothing, if there is one of another version.

        With a version its deletion is a state of its own, whose empty file stays.
        """
        path = self._find("delete", name)
        return await self._in_thread("delete", name, lambda: _delete(path, version))

    async def aclose(self) -> None:
        """Close it. Closing twice is fine."""
        self._is_closed = True

    def _list(self, path: Path) -> Iterator[tuple[str, ListedRecord]]:
        for directory in path.glob("**/"):
            newest: dict[str, int] = {}
            for name in _names(directory):
                record, _, number = name.partition(_MARK)
                if record:
                    newest[record] = max(newest.get(record, 0), int(number or 1))
            for record, last in sorted(newest.items()):
                # What is deleted meanwhile is in the listing or not.
                with contextlib.suppress(FileNotFoundError):
                    found = _file(directory / record, last).stat()
                    if found.st_size and stat.S_ISREG(found.st_mode):
                        name = (directory / record).relative_to(self._path).as_posix()
                        yield name, ListedRecord(_version(last, found))

    def _find(self, operation: str, name: str) -> Path:
        check_name(name)
        self._check_open(f"{operation} {name}")
        return self._path / name

    async def _in_thread(self, operation: str, name: str, work: Callable[[], _T]) -> _T:
        of = f"{name} in " if name else ""
        try:
            return await in_thread(f"{operation} {of}{self._kind} {self._path}", work)
        except StoreError as error:
            number = getattr(error.__cause__, "errno", None)
            if operation == "swap" and number in (errno.EPERM, errno.ENOTSUP, errno.EXDEV, errno.ENOSYS):
                reason = f"{error.reason}: a {self._kind} takes a file system with hard links, or a blob container"
                raise StoreError(error.operation, reason) from error.__cause__
            raise

    def _prepare(self) -> None:
        is_new = not self._path.exists()
        make_directory(self._path, self._kind)
        if is_new:
            # A misspelled path would begin a second store, which has none of the records that exist.
            _log.warning("%s %s: there was no such directory, and it was created, empty", self._kind, self._path)
        for directory in self._path.glob("**/"):
            _clean(directory)
            # Linked by a process that died before it could do this.
            synchronize_directory(directory)

    def __repr__(self) -> str:
        return f"DirectoryRecordStore({str(self._path)!r})"


def _swap(path: Path, body: bytes, replaces: str | None) -> str | None:
    """Store a state after the one with a version; after none, or a deletion, with None."""
    newest = _newest(path)
    if (newest.version if newest is not None and newest.body else None) == replaces:
        number = 1 if newest is None else newest.number + 1
        with _Temporary(path, body) as temporary:
            version = _version(number, temporary.stat())
            if _link(temporary, path, number):
                return version
        newest = _newest(path)
    return newest.version if newest is not None and newest.body == body else None


def _delete(path: Path, version: str | None) -> bool:
    if version is None:
        for number in sorted(_numbers(path)):
            _file(path, number).unlink(missing_ok=True)
        return True
    newest = _newest(path)
    if newest is None or not newest.body:
        return True
    if newest.version != version:
        return False
    with _Temporary(path, b"") as temporary:
        return _link(temporary, path, newest.number + 1)


class _Temporary:
    """A file with a body, beside a record, that is on the disk and is deleted at the end of the block."""

    def __init__(self, path: Path, body: bytes) -> None:
        self._body = body
        self._file = path.with_name(f"{_TEMPORARY}{uuid.uuid4().hex}")

    def __enter__(self) -> Path:
        make_directory(self._file.parent, "directory")
        with self._file.open("xb") as file:
            file.write(self._body)
            file.flush()
            os.fsync(file.fileno())
        return self._file

    def __exit__(self, *_: object) -> None:
        self._file.unlink(missing_ok=True)


def _link(temporary: Path, path: Path, number: int) -> bool:
    """Give a file the name of a record's state. False if there is that state already."""
    try:
        os.link(temporary, _file(path, number))
    except FileExistsError:
        return False
    synchronize_directory(path.parent)
    for each in _numbers(path):
        if each <= number - _KEPT:
            _file(path, each).unlink(missing_ok=True)
    return True


def _newest(path: Path) -> _State | None:
    """Return the newest state of a record; None if there never was one."""
    while True:
        number = max(_numbers(path), default=0)
        if number == 0:
            return None
        # Deleted meanwhile, there is a newer one, or none.
        with contextlib.suppress(FileNotFoundError), _file(path, number).open("rb") as file:
            return _State(number, _version(number, os.fstat(file.fileno())), file.read())


def _version(number: int, found: os.stat_result) -> str:
    return f"{number}.{found.st_size}.{found.st_mtime_ns}"


def _numbers(path: Path) -> Iterable[int]:
    """Return the numbers of a record's states. What else the directory has costs next to nothing."""
    record, mark = path.name, path.name + _MARK
    size = len(mark)
    for name in _names(path.parent):
        if name == record:
            yield 1
        elif name[:size] == mark:
            yield int(name[size:])


def _names(directory: Path) -> list[str]:
    try:
        return os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _file(path: Path, number: int) -> Path:
    return path if number == 1 else path.with_name(f"{path.name}{_MARK}{number}")


def _clean(directory: Path) -> None:
    """Delete what dead writers left."""
    abandoned = time.time() - _ABANDONED
    for name in _names(directory):
        if name.startswith(_TEMPORARY):
            file = directory / name
            with contextlib.suppress(FileNotFoundError):  # deleted by another store
                if file.stat().st_mtime < abandoned:
                    file.unlink()
