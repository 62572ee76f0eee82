"""Records of the Spark sink in a directory that all drivers reach."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

from eventpump.errors import ClosedError, StoreError
from eventpump.storage.ledgers.interface import split_name

_T = TypeVar("_T")

_log: Final = logging.getLogger("eventpump.storage")

_ABANDONED: Final = 3600.0
"""Seconds after which the writer of a temporary file is taken for dead."""
_TEMPORARY: Final = ".tmp-"


class DirectoryLedger:
    """A `LedgerStore` in a directory: one file per record, on a file system with hard links.

    A record is written to a temporary file, which is synchronised with the disk and then linked to its name, so that
    no process ever sees a part of one, whenever the writer dies; what it leaves is deleted by a later `open`.

    Args:
        path: Created where it does not exist. For a driver that may restart elsewhere, a path all its machines share.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._is_open = False
        self._is_closed = False

    async def open(self) -> None:
        """Create the directory, and write to the disk what it holds, so that this outlives a loss of power."""
        if self._is_closed:
            raise ClosedError("ledger")
        await self._in_thread("open", "", self._prepare)
        self._is_open = True

    async def create(self, name: str, body: bytes) -> bool:
        """Create a record where there is none."""
        path = self._find("create", name)
        return await self._in_thread("create", name, lambda: _create(path, body))

    async def read(self, name: str) -> bytes | None:
        """Read a record."""
        path = self._find("read", name)
        return await self._in_thread("read", name, lambda: _read(path))

    async def list(self, directory: str) -> list[str]:
        """List the records of a directory."""
        path = self._find("list", f"{directory}/any").parent
        return await self._in_thread("list", directory, lambda: _list(path))

    async def delete(self, name: str) -> None:
        """Delete a record."""
        path = self._find("delete", name)
        await self._in_thread("delete", name, lambda: path.unlink(missing_ok=True))

    async def aclose(self) -> None:
        """Close it."""
        self._is_closed = True

    def _find(self, operation: str, name: str) -> Path:
        if self._is_closed:
            raise ClosedError("ledger")
        if not self._is_open:
            raise StoreError(f"{operation} {name}", "the ledger is not open: call open() first")
        return self._path.joinpath(*split_name(name))

    async def _in_thread(self, operation: str, name: str, work: Callable[[], _T]) -> _T:
        try:
            return await asyncio.to_thread(work)
        except OSError as error:
            reason = error.strerror or type(error).__name__
            if operation == "create" and error.errno in (errno.EPERM, errno.ENOTSUP, errno.EXDEV, errno.ENOSYS):
                reason = f"{reason}: a ledger takes a file system with hard links, or a blob container"
            of = f"{name} in " if name else ""
            raise StoreError(f"{operation} {of}ledger {self._path}", reason) from error

    def _prepare(self) -> None:
        is_new = not self._path.exists()
        _make(self._path)
        if is_new:
            # A misspelled path would begin a second ledger, which has none of the batches that are published.
            _log.warning("ledger %s: there was no such directory, and it was created, empty", self._path)
        abandoned = time.time() - _ABANDONED
        for directory in [each for each in self._path.iterdir() if each.is_dir()]:
            for file in directory.glob(f"{_TEMPORARY}*"):
                try:
                    if file.stat().st_mtime < abandoned:
                        file.unlink()
                except FileNotFoundError:  # deleted by another store
                    continue
            # Linked by a process that died before it could do this.
            _synchronise(directory)

    def __repr__(self) -> str:
        return f"DirectoryLedger({str(self._path)!r})"


def _make(path: Path) -> None:
    if path.is_dir():
        return
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, f"{path} is not a directory; a ledger is one, created if necessary")
    _make(path.parent)
    path.mkdir(exist_ok=True)
    _synchronise(path.parent)


def _create(path: Path, body: bytes) -> bool:
    if path.exists():
        return _read(path) == body
    _make(path.parent)
    temporary = path.with_name(f"{_TEMPORARY}{uuid.uuid4().hex}")
    try:
        with temporary.open("xb") as file:
            file.write(body)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(temporary, path)
        except FileExistsError:
            return _read(path) == body
        _synchronise(path.parent)
        return True
    finally:
        temporary.unlink(missing_ok=True)


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _list(path: Path) -> list[str]:
    try:
        return sorted(each.name for each in path.iterdir() if not each.name.startswith("."))
    except FileNotFoundError:
        return []


def _synchronise(directory: Path) -> None:
    if not hasattr(os, "O_DIRECTORY"):
        return  # Windows opens no directories
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
