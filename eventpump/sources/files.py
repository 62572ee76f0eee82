"""Where Capture's files lie: a directory, or a container of Azure Blob Storage."""

from __future__ import annotations

import asyncio
import os
import tempfile
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

from eventpump.errors import CaptureFileError, ConfigurationError, StoreError

SPOOL = 8 * 1024 * 1024
"""Bytes of a downloaded file that are held in memory; a larger one lies in a temporary file."""


class CaptureFiles(Protocol):
    """The files of Capture, by their names, which have "/" between the parts."""

    async def names(self, prefix: str) -> list[str]:
        """Return the names that begin with a text, in any order.

        Raises:
            StoreError: They cannot be listed.
        """

    async def fetch(self, name: str, limit: int | None = None) -> BinaryIO:
        """Open a file for reading. The caller closes it.

        Args:
            name: The file.
            limit: How many bytes are needed, from its beginning; None for all. Default: None.

        Raises:
            CaptureFileError: There is no such file.
            StoreError: It cannot be read.
        """

    async def aclose(self) -> None:
        """Release what this holds. May be called more than once."""


class CaptureDirectory:
    """`CaptureFiles` in a directory and those below it. Raises `ConfigurationError` if it does not exist."""

    def __init__(self, directory: str | Path) -> None:
        self._directory = Path(directory)
        if not self._directory.is_dir():
            raise ConfigurationError("directory", f"{directory} is not a directory")

    async def names(self, prefix: str) -> list[str]:
        return await asyncio.to_thread(self._names, prefix)

    def _names(self, prefix: str) -> list[str]:
        found: list[str] = []

        def fail(error: OSError) -> None:
            raise StoreError("list Capture files", f"{error.filename}: {error.strerror}")

        below = self._directory / prefix.rpartition("/")[0]
        if not below.is_dir():
            return []
        for folder, _, files in os.walk(below, onerror=fail):
            here = Path(folder).relative_to(self._directory).as_posix()
            found += [file if here == "." else f"{here}/{file}" for file in files]
        return [name for name in found if name.startswith(prefix)]

    async def fetch(self, name: str, limit: int | None = None) -> BinaryIO:
        try:
            return await _unless_cancelled(self._directory / name)
        except FileNotFoundError:
            raise CaptureFileError(name, "it was there, and is gone") from None
        except OSError as error:
            raise StoreError("read Capture file", f"{name}: {error.strerror}") from error

    async def aclose(self) -> None:
        """Do nothing."""


async def _unless_cancelled(path: Path) -> BinaryIO:
    """Open a file in a thread, and close it if the caller is cancelled meanwhile."""

    def opened() -> BinaryIO:
        return path.open("rb")

    opening = asyncio.get_running_loop().run_in_executor(None, opened)
    try:
        return await asyncio.shield(opening)
    except asyncio.CancelledError:
        opening.add_done_callback(_close)
        raise


def _close(opened: asyncio.Future[BinaryIO]) -> None:
    if not opened.cancelled() and opened.exception() is None:
        opened.result().close()


class CaptureContainer:
    """Files in a container of Azure Blob Storage, as Capture writes them.

    Args:
        container: The container's name, with `connection_string` or with `account_url` and `credential`; or a
            `ContainerClient` of `azure.storage.blob.aio`, which stays the caller's to close.
        connection_string: Of the storage account. Default: None.
        account_url: Its URL. Default: None.
        credential: Any that azure.storage.blob takes. Default: None.
        call_timeout: Seconds that one request may take; a download, as many for each of its parts. Default: 30.0.

    Raises:
        ConfigurationError: The values cannot work.
    """

    def __init__(
        self,
        container: Any,
        *,
        connection_string: str | None = None,
        account_url: str | None = None,
        credential: Any = None,
        call_timeout: float = 30.0,
    ) -> None:
        # The storage SDK takes long to import; only those who use blobs pay for it.
        from eventpump.storage.blob_access import BlobContainer

        self._container = BlobContainer(
            container, connection_string, account_url, credential, call_timeout, owner=type(self).__name__
        )

    async def names(self, prefix: str) -> list[str]:
        """See `CaptureFiles`."""
        container = self._container

        async def listed() -> list[str]:
            blobs = container.client.list_blobs(prefix, **container.options)
            return [str(blob.name) async for blob in blobs]

        return await container.call("list Capture files", None, listed())

    async def fetch(self, name: str, limit: int | None = None) -> BinaryIO:
        """See `CaptureFiles`."""
        from eventpump.storage.blob_access import Answer, RefusedError

        container, file = self._container, tempfile.SpooledTemporaryFile(max_size=SPOOL)  # noqa: SIM115 - for the caller
        try:
            blob = container.blob(name)
            offset = None if limit is None else 0
            stream = await container.call(
                "read Capture file", None, blob.download_blob(offset, limit, **container.options)
            )
            chunks = aiter(stream.chunks())
            while chunk := await container.call("read Capture file", None, anext(chunks, b"")):
                file.write(chunk)  # at most 4 MiB
            file.seek(0)
        except RefusedError as refused:
            file.close()
            if refused.answer is Answer.MISSING:
                raise CaptureFileError(name, "it was there, and is gone") from None
            raise
        except BaseException:
            file.close()
            raise
        return cast("BinaryIO", file)

    async def aclose(self) -> None:
        """See `CaptureFiles`."""
        await self._container.aclose()
