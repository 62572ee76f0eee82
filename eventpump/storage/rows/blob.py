"""Objects of rows in a blob container."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pydantic import SecretStr

from eventpump.aio.tasks import gather
from eventpump.errors import StoreError
from eventpump.storage.blob_access import Answer, BlobContainer, RefusedError
from eventpump.storage.blob_address import BlobAddress, split_container_url
from eventpump.storage.rows.interface import new_name, unseen
from eventpump.storage.rows.opened import OpenedRows

_PIECE: Final = 4 * 1024 * 1024
"""Bytes of one request: a larger object is written and read in pieces, so that the time-out is that of a piece."""
_AT_ONCE: Final = 8
"""Requests of one call at a time."""


class BlobRowStore(OpenedRows):
    """A `RowStore` in a blob container: an object is the block blob `{prefix}{name}`, whole or not there.

    Args:
        connection_string: Of the storage account; or
        account_url: Its URL, with a signature or with the next.
        credential: "module:callable", called without arguments where the store is opened, on the driver and in each
            Python process of the executors; what it returns is a credential of azure.identity.aio, or whatever else
            azure.storage.blob takes.
        prefix: Goes before the names of objects, with nothing between.
        call_timeout: How long one request may take, in seconds. An object has one for each 4 MiB.
        create: Whether `begin` creates a container that is missing. Default: False; a missing one is an error.

    Raises:
        ConfigurationError: The values cannot work.
    """

    def __init__(
        self,
        container: str | BlobAddress,
        *,
        connection_string: str | SecretStr | None = None,
        account_url: str | SecretStr | None = None,
        credential: str | None = None,
        prefix: str = "rows/",
        call_timeout: float = 10.0,
        create: bool = False,
    ) -> None:
        super().__init__()
        self._address = (
            container
            if isinstance(container, BlobAddress)
            else BlobAddress.of(
                container,
                connection_string=connection_string,
                account_url=account_url,
                credential=credential,
                call_timeout=call_timeout,
            )
        )
        self._prefix = prefix.strip()
        self._create = create
        self._blobs: BlobContainer | None = None

    @classmethod
    def of_url(cls, url: str) -> BlobRowStore:
        """Create one from a container's URL: its path is the container and the prefix, its query a signature."""
        account, container, prefix = split_container_url("rows", url)
        return cls(container, account_url=account, prefix=prefix)

    async def open(self) -> None:
        """Create the client."""
        await super().open()
        if self._blobs is None:
            self._blobs = self._address.connect(type(self).__name__)

    async def begin(self, name: str) -> None:
        """Check that the container is there, or create it with `create`, and write a token."""
        blobs, path = self._blob("begin", name)
        await blobs.open(path, create=self._create)
        await blobs.call(f"begin {name}", None, blobs.blob(path).upload_blob(b"", overwrite=True, **blobs.options))

    async def check(self, name: str) -> None:
        """Check that a token is there."""
        blobs, path = self._blob("check", name)
        try:
            found = await blobs.properties(f"check {name}", None, blobs.blob(path))
        except StoreError:
            if await blobs.is_there(path):
                raise
            found = None
        if found is None:
            raise unseen(f"the container {blobs.name}, under {self._prefix!r},")

    async def write(self, stem: str, parts: Sequence[bytes | memoryview]) -> str:
        """Write a blob under a new name, which is returned. One request; above 1 MiB one for each 4 MiB, and one."""
        blobs, path = self._blob("write", name := new_name(stem))
        await blobs.upload(f"write {name}", blobs.blob(path), b"".join(parts), _PIECE, at_once=_AT_ONCE)
        return name

    async def read(self, name: str, offset: int, size: int) -> bytes | None:
        """Return a range of a blob, or None. One request for each 4 MiB."""
        blobs, path = self._blob("read", name)
        blob = blobs.blob(path)

        async def read(start: int) -> bytes | None:
            try:
                found = await blobs.download(
                    f"read {name}", None, blob, bytes, offset=start, limit=min(_PIECE, offset + size - start)
                )
            except RefusedError as refused:
                if refused.answer is not Answer.ENDED:
                    raise
                return b""
            return None if found is None else found[0]

        pieces = await gather(map(read, range(offset, offset + size, _PIECE)), at_once=_AT_ONCE)
        there = [piece for piece in pieces if piece is not None]
        return b"".join(there) if len(there) == len(pieces) else None

    async def list(self, directory: str) -> dict[str, int]:
        """Return the blobs of a directory with their sizes. One request for 5,000 of them."""
        blobs, path = self._blob("list", f"{self._find_directory('list', directory)}/any")
        start = path.removesuffix("any")
        found = await blobs.list(f"list {directory}", start)
        return {name.removeprefix(start): int(blob.size) for name, blob in found.items()}

    async def delete(self, names: Sequence[str]) -> None:
        """Delete blobs. A request for each, several at a time."""

        async def delete(name: str) -> None:
            blobs, path = self._blob("delete", name)
            await blobs.delete(f"delete {name}", None, blobs.blob(path))

        await gather(map(delete, names), at_once=_AT_ONCE)

    async def aclose(self) -> None:
        """Close the client. Closing twice is fine."""
        await super().aclose()
        blobs, self._blobs = self._blobs, None
        if blobs is not None:
            await blobs.aclose()

    def _blob(self, operation: str, name: str) -> tuple[BlobContainer, str]:
        directory, file = self._find(operation, name)
        assert self._blobs is not None
        return self._blobs, f"{self._prefix}{directory}/{file}"

    def __repr__(self) -> str:
        # Never the URL, which may hold a signature.
        return f"BlobRowStore({self._address.container!r}, prefix={self._prefix!r})"
