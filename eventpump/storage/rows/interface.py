"""The interface of the stores that keep a batch's rows until they are published. Rows are not records.

A record (:class:`eventpump.interfaces.RecordStore`) is small, has a name that its readers know, and is replaced by
compare-and-swap. An object of rows is large, is written once by one attempt of one task under a name of its own, is
read in ranges by the tasks that publish, and is deleted with its batch.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Protocol

from eventpump.errors import ConfigurationError
from eventpump.storage.ledgers.interface import split_name

KIND = "row store"
"""What such a store is, in errors."""


class RowStore(Protocol):
    """Keeps objects under names of the form "directory/file". Used by one event loop; stores may share their objects.

    The driver calls `begin` once per run. Executors never create what the objects are kept in: they call `check` before
    they write, which fails where they do not see what the driver wrote, such as a directory of one machine.

    It can be pickled as long as it is not open. Each call raises `StoreError` if the store failed; `open` and `begin`
    raise `ConfigurationError` if it cannot work as it was created. One that was closed cannot be opened again.
    """

    @property
    def is_remote(self) -> bool:
        """Whether objects go over a network: then rows are compressed before they are written."""

    async def open(self) -> None:
        """Prepare for the calls below, without a request and without creating anything. Opening twice is fine."""

    async def begin(self, name: str) -> None:
        """Create what the objects are kept in, where it does not exist, and durably write a run's token.

        Args:
            name: The token's name, which no other run has.
        """

    async def check(self, name: str) -> None:
        """Check that this store sees a run's token, and so what its driver sees: else a `ConfigurationError`."""

    async def write(self, stem: str, parts: Sequence[bytes | memoryview]) -> str:
        """Write an object under a name that no object had before. It is durable and whole when the call returns.

        Failed or cancelled, the call may have written the object, or a part of it, which a listing shows and nobody
        reads. A repeated call writes another object.

        Args:
            stem: What its name begins with: "directory/first part of the file's name".
            parts: What it holds, one after the other.

        Returns:
            Its name: the stem, a dot, and random hexadecimal digits.
        """

    async def read(self, name: str, offset: int, size: int) -> bytes | None:
        """Return a range of an object, or what there is of it; None if there is no object."""

    async def list(self, directory: str) -> dict[str, int]:
        """Return the files of a directory with their sizes. A directory that does not exist has none."""

    async def delete(self, names: Sequence[str]) -> None:
        """Delete objects. It is not an error if there are none of these names. A call that failed may be repeated."""

    async def aclose(self) -> None:
        """Release the store's resources. Objects stay. Closing twice is fine."""


def new_name(stem: str) -> str:
    """Return a name that no object has. Raises `ValueError` if the stem is not of the form "directory/file"."""
    return "/".join(split_name(f"{stem}.{uuid.uuid4().hex}"))


def unseen(place: str) -> ConfigurationError:
    """Return the error for a token that is not there, in a place without secrets."""
    return ConfigurationError(
        "rows",
        f"this executor does not see in {place} what the driver has written there: give a place that the driver and "
        "all executors share, such as a mounted directory, or the URL of a blob container",
    )
