"""The interface of the stores for records of the Spark sink. A record is created once, whole, and never changed."""

from __future__ import annotations

from typing import Protocol


class LedgerStore(Protocol):
    """Keeps records under names of the form "directory/file". Used by one event loop; stores may share their records.

    It can be pickled as long as it is not open. Each call raises `StoreError` if the store failed, and whether it took
    effect is not known then; `open` raises `ConfigurationError` for a value that cannot work.
    """

    async def open(self) -> None:
        """Create what the records are kept in, if it does not exist. Opening twice is fine."""

    async def create(self, name: str, body: bytes) -> bool:
        """Create a record, durably and whole, if there is none of that name.

        Cancelled or failed, the record is created or not; the call may be repeated.

        Returns:
            True if the record exists with this body, also if another store created it; False if it has another body.
        """

    async def read(self, name: str) -> bytes | None:
        """Return a record, or None if there is none."""

    async def list(self, directory: str) -> list[str]:
        """Return the files of a directory, sorted. A directory that does not exist has none."""

    async def delete(self, name: str) -> None:
        """Delete a record. It is not an error if there is none."""

    async def aclose(self) -> None:
        """Release the store's resources. Records stay. Closing twice is fine."""


def split_name(name: str) -> tuple[str, str]:
    """Return the two parts of a record's name: directory and file. Raises `ValueError` if it has another form."""
    directory, slash, file = name.partition("/")
    parts = (directory, file)
    if not slash or "/" in file or any(not part or part.startswith(".") or "\\" in part for part in parts):
        raise ValueError(f"{name!r} is not a record name: expected directory/file, neither starting with a dot")
    return directory, file
