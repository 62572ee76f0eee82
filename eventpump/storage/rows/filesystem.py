"""Objects of rows in a file system that pyarrow reaches: of Hadoop, or the object stores of the large clouds."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, TypeVar

from pyarrow import ArrowException, fs

from eventpump.aio.retry import retrying
from eventpump.errors import ConfigurationError, StoreError
from eventpump.options.base import RetryOptions
from eventpump.storage.rows.interface import KIND, new_name, unseen
from eventpump.storage.rows.opened import OpenedRows
from eventpump.texts import excerpt, without_secrets

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

_T = TypeVar("_T")

_RETRY: Final = RetryOptions(base_delay=0.2)
"""After what pyarrow's client has retried itself, for HDFS nothing."""
_FINAL: Final = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError)
"""What another try does not help."""


class FileSystemRowStore(OpenedRows):
    """A `RowStore` in a file system of pyarrow: one file for each object, as durable as a file there that was closed.

    Executors need what the file system needs, such as credentials in their environment or Hadoop's libraries. An
    operation that fails is tried again three times, within about a second, unless its error is final.

    Args:
        filesystem: The file system.
        path: The directory in it, created by `begin` where it does not exist.
    """

    def __init__(self, filesystem: FileSystem, path: str) -> None:
        super().__init__()
        self._filesystem = filesystem
        self._path = path.rstrip("/")

    @classmethod
    def of_uri(cls, uri: str) -> FileSystemRowStore:
        """Create one from a URI, such as hdfs://host/path, s3://bucket/path or abfss://container@host/path."""
        try:
            return cls(*fs.FileSystem.from_uri(uri))
        except (OSError, ArrowException, ImportError) as error:
            raise ConfigurationError("rows", f"pyarrow does not reach the place: {_text(error)}") from None

    async def begin(self, name: str) -> None:
        """Create the directory of a token, and the token."""
        directory, file = self._find("begin", name)

        def begin() -> None:
            self._filesystem.create_dir(f"{self._path}/{directory}", recursive=True)
            with self._filesystem.open_output_stream(f"{self._path}/{directory}/{file}"):
                pass

        await self._in_thread("begin", name, begin)

    async def check(self, name: str) -> None:
        """Check that a token is there."""
        path = self._file("check", name)
        info = await self._in_thread("check", name, lambda: self._filesystem.get_file_info(path))
        if info.type != fs.FileType.File:
            raise unseen(repr(self))

    async def write(self, stem: str, parts: Sequence[bytes | memoryview]) -> str:
        """Write a file under a new name, which is returned."""
        self._file("write", stem)

        def write() -> str:
            name = new_name(stem)  # another one for each try: what is left of a failed write may still arrive
            with self._filesystem.open_output_stream(self._file("write", name)) as file:
                for part in parts:
                    file.write(part)
            return name

        return await self._in_thread("write", stem, write)

    async def read(self, name: str, offset: int, size: int) -> bytes | None:
        """Return a range of a file, or None."""
        path = self._file("read", name)

        def read() -> bytes | None:
            try:
                with self._filesystem.open_input_file(path) as file:
                    end = min(offset + size, file.size())
                    return bytes(file.read_at(end - offset, offset)) if end > offset else b""
            except FileNotFoundError:
                return None

        return await self._in_thread("read", name, read)

    async def list(self, directory: str) -> dict[str, int]:
        """Return the files of a directory with their sizes."""
        path = f"{self._path}/{self._find_directory('list', directory)}"
        selector = fs.FileSelector(path, allow_not_found=True)
        found = await self._in_thread("list", directory, lambda: self._filesystem.get_file_info(selector))
        return {each.base_name: each.size for each in found if each.type == fs.FileType.File}

    async def delete(self, names: Sequence[str]) -> None:
        paths = [self._file("delete", name) for name in names]

        def delete() -> None:
            for path in paths:
                try:
                    self._filesystem.delete_file(path)
                except FileNotFoundError:
                    continue

        await self._in_thread("delete", f"{len(paths)} objects", delete)

    def _file(self, operation: str, name: str) -> str:
        directory, file = self._find(operation, name)
        return f"{self._path}/{directory}/{file}"

    async def _in_thread(self, operation: str, name: str, work: Callable[[], _T]) -> _T:
        def is_final(error: Exception) -> bool:
            return isinstance(error, _FINAL) or not isinstance(error, OSError)

        try:
            return await retrying(lambda: asyncio.to_thread(work), _RETRY, random.Random(), is_final=is_final)
        except (OSError, ArrowException) as error:
            raise StoreError(f"{operation} {name} in {KIND} {self!r}", _text(error)) from None

    def __repr__(self) -> str:
        return f"FileSystemRowStore({self._filesystem.type_name!r}, {self._path!r})"


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {excerpt(without_secrets(str(error)))}"
