"""Objects of rows in memory."""

from __future__ import annotations

from collections.abc import Sequence

from eventpump.errors import StoreError
from eventpump.storage.rows.interface import new_name, unseen
from eventpump.storage.rows.opened import OpenedRows


class MemoryRowStore(OpenedRows):
    """A `RowStore` that lives as long as its process, or as the objects that it is given and shares with other
    stores."""

    def __init__(self, objects: dict[str, dict[str, bytes]] | None = None) -> None:
        super().__init__()
        self._objects = {} if objects is None else objects

    async def begin(self, name: str) -> None:
        """Create the directory of a token, and the token."""
        directory, file = self._find("begin", name)
        self._objects.setdefault(directory, {})[file] = b""

    async def check(self, name: str) -> None:
        """Check that a token is there."""
        directory, file = self._find("check", name)
        if file not in self._objects.get(directory, {}):
            raise unseen(repr(self))

    async def write(self, stem: str, parts: Sequence[bytes | memoryview]) -> str:
        """Write an object under a new name, which is returned."""
        directory, file = self._find("write", name := new_name(stem))
        if directory not in self._objects:
            raise StoreError(f"write {name}", "there is no such directory")
        self._objects[directory][file] = b"".join(parts)
        return name

    async def read(self, name: str, offset: int, size: int) -> bytes | None:
        """Return a range of an object, or None."""
        directory, file = self._find("read", name)
        found = self._objects.get(directory, {}).get(file)
        return None if found is None else found[offset : offset + size]

    async def list(self, directory: str) -> dict[str, int]:
        """Return the files of a directory with their sizes."""
        found = self._objects.get(self._find_directory("list", directory), {})
        return {file: len(body) for file, body in found.items()}

    async def delete(self, names: Sequence[str]) -> None:
        """Delete objects."""
        for directory, file in [self._find("delete", name) for name in names]:
            self._objects.get(directory, {}).pop(file, None)

    def __repr__(self) -> str:
        return f"MemoryRowStore({sum(map(len, self._objects.values()))} objects)"
