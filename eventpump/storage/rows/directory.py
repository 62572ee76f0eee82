"""Objects of rows in a directory that the driver and all executors reach."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from eventpump.storage.directories import in_thread, make_directory, synchronize_directory
from eventpump.storage.rows.interface import KIND, new_name, unseen
from eventpump.storage.rows.opened import OpenedRows

_T = TypeVar("_T")


class DirectoryRowStore(OpenedRows):
    """A `RowStore` in a directory: one file for each object, synchronized with the disk before its name is returned.

    A file is written under its own name, which nobody knows before it is complete. So the file system needs neither
    hard links nor an atomic rename, which mounted object stores lack.

    Args:
        path: Created by `begin` where it does not exist.
    """

    is_remote = False

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__()
        self._path = Path(path)

    async def begin(self, name: str) -> None:
        """Create the directories, and a token."""
        directory, file = self._find("begin", name)
        await self._in_thread("begin", name, lambda: _begin(self._path / directory, file))

    async def check(self, name: str) -> None:
        """Check that a token is there."""
        path = self._path.joinpath(*self._find("check", name))
        if not await self._in_thread("check", name, path.exists):
            raise unseen(str(self._path))

    async def write(self, stem: str, parts: Sequence[bytes | memoryview]) -> str:
        """Write a file under a new name, which is returned."""
        path = self._path.joinpath(*self._find("write", name := new_name(stem)))
        await self._in_thread("write", name, lambda: _write(path, parts))
        return name

    async def read(self, name: str, offset: int, size: int) -> bytes | None:
        """Return a range of a file, or None."""
        path = self._path.joinpath(*self._find("read", name))
        return await self._in_thread("read", name, lambda: _read(path, offset, size))

    async def list(self, directory: str) -> dict[str, int]:
        """Return the files of a directory with their sizes."""
        path = self._path / self._find_directory("list", directory)
        return await self._in_thread("list", directory, lambda: _list(path))

    async def delete(self, names: Sequence[str]) -> None:
        """Delete files."""
        paths = [self._path.joinpath(*self._find("delete", name)) for name in names]

        def unlink() -> None:
            for path in paths:
                path.unlink(missing_ok=True)

        if paths:
            await self._in_thread("delete", f"{len(paths)} objects", unlink)

    async def _in_thread(self, operation: str, name: str, work: Callable[[], _T]) -> _T:
        return await in_thread(f"{operation} {name} in {KIND} {self._path}", work)

    def __repr__(self) -> str:
        return f"DirectoryRowStore({str(self._path)!r})"


def _begin(directory: Path, token: str) -> None:
    make_directory(directory, KIND)
    (directory / token).touch()
    synchronize_directory(directory)


def _write(path: Path, parts: Sequence[bytes | memoryview]) -> None:
    file = path.open("xb")
    try:
        with file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        synchronize_directory(path.parent)
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def _read(path: Path, offset: int, size: int) -> bytes | None:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(size)
    except FileNotFoundError:
        return None


def _list(directory: Path) -> dict[str, int]:
    found = {}
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                try:
                    found[entry.name] = entry.stat().st_size
                except FileNotFoundError:  # deleted meanwhile
                    continue
    except FileNotFoundError:
        pass
    return found
