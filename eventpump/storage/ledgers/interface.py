"""What keeps the records of the Spark sink: each is created once, whole, and never changed."""

from __future__ import annotations

from typing import Protocol


class LedgerStore(Protocol):
    """Keeps records under names of the form "directory/file". Used by one event loop; several stores may share a truth.

    It may be pickled as long as it is not open.
    """

    async def open(self) -> None:
        """Make what keeps the records, where there is none. Opening twice is fine.

        Raises:
            StoreError: The store failed.
            ConfigurationError: A value it was made with cannot work.
        """

    async def create(self, name: str, body: bytes) -> bool:
        """Create a record, durably and whole, where there is none.

        Cancelled or failed, it is created or not; it may be called again.

        Returns:
            True where the record is there with this body, whoever wrote it; False where there is another.

        Raises:
            StoreError: The store failed, and whether it is created is not known.
        """

    async def read(self, name: str) -> bytes | None:
        """Read a record; None where there is none.

        Raises:
            StoreError: The store failed.
        """

    async def list(self, directory: str) -> list[str]:
        """List the files of a directory, sorted; none where there is no such directory.

        Raises:
            StoreError: The store failed.
        """

    async def delete(self, name: str) -> None:
        """Delete a record; one that is not there is no failure.

        Raises:
            StoreError: The store failed.
        """

    async def aclose(self) -> None:
        """Free what the store holds. Records stay. Closing twice is fine."""


def split_name(name: str) -> tuple[str, str]:
    """Take a record's name apart: its directory and its file.

    Raises:
        ValueError: It has another form.
    """
    directory, slash, file = name.partition("/")
    parts = (directory, file)
    if not slash or "/" in file or any(not part or part.startswith(".") or "\\" in part for part in parts):
        raise ValueError(f"{name!r} is no record's name")
    return directory, file
