"""The states of idempotent publishers in blobs: a small JSON object each, written under the ETag that was read."""

from __future__ import annotations

import asyncio
import re
from typing import Any, Final
from weakref import WeakValueDictionary

from azure.storage.blob import ContentSettings
from azure.storage.blob.aio import BlobClient, ContainerClient

from eventpump.core.claim import PublisherState, StoredPublisherState
from eventpump.errors import ClosedError, StoreError
from eventpump.storage.blob_access import BlobContainer, RefusedError
from eventpump.storage.publisher_states.form import Key, check_key, check_writable, decode_state, encode_state

_MAX_BODY: Final = 1 << 16
_JSON: Final = ContentSettings(content_type="application/json")
# What may not be in a blob's name, or would make a folder of it; and "." at the end, which a URL loses.
_UNSAFE: Final = re.compile(r"[%/\\?#]|\.$")


class BlobPublisherStateStore:
    """A `PublisherStateStore` on a storage account: one blob per name and partition, `{prefix}{name}/{partition}.json`.

    Args:
        container: The container's name, with `connection_string` or with `account_url` and `credential`; or a ready
            `ContainerClient`, which stays the caller's to close.
        connection_string: Of the storage account, with the name of a container; None with `account_url` and
            `credential`, or a client.
        account_url: The storage account's URL, with `credential`; None with a connection string, or a client.
        credential: Any that azure.storage.blob takes; None for none, as where `account_url` has a SAS token.
        prefix: Goes before the name in blob names, with nothing between. Default: "publishers/".
        call_timeout: How long one request may take, in seconds. Default: 10.0.
        create: Whether `open` creates a container that is missing; it needs the right to. A missing one is an
            error otherwise. Default: False.

    Raises:
        ConfigurationError: The values cannot work.
    """

    def __init__(
        self,
        container: ContainerClient | str,
        *,
        connection_string: str | None = None,
        account_url: str | None = None,
        credential: Any = None,
        prefix: str = "publishers/",
        call_timeout: float = 10.0,
        create: bool = False,
    ) -> None:
        self._create = create
        self._blobs = BlobContainer(
            container, connection_string, account_url, credential, call_timeout, owner=type(self).__name__
        )
        self._prefix = prefix.strip()
        # A lock exists as long as it is held or waited for: partition ids may be any text.
        self._locks: WeakValueDictionary[Key, asyncio.Lock] = WeakValueDictionary()
        self._is_open = False
        self._is_closed = False

    async def open(self) -> None:
        """Check that the container is there, or create it with `create`. Opening twice is fine.

        Raises:
            ConfigurationError: There is no such container.
            StoreError: The container can neither be created nor read.
        """
        if self._is_closed:
            raise ClosedError("publisher state store")
        if self._is_open:
            return
        await self._blobs.open(self._prefix, create=self._create)
        self._is_open = True

    async def read_state(self, name: str, partition_id: str) -> StoredPublisherState | None:
        """Return a state, or None if there is none.

        Raises:
            StoreError: The store failed, or holds something else.
        """
        key = check_key(name, partition_id)
        self._check_open("read state", partition_id)
        async with self._locks.setdefault(key, asyncio.Lock()):
            return await self._read("read state", key)

    async def write_state(
        self, name: str, partition_id: str, state: PublisherState, replaces: StoredPublisherState | None
    ) -> StoredPublisherState | None:
        """Store a state by compare-and-swap. Return None, and store nothing, if another is there.

        Raises:
            StoreError: The store failed.
        """
        operation = "write state"
        key = check_key(name, partition_id)
        self._check_open(operation, partition_id)
        body = encode_state(check_writable(state))
        async with self._locks.setdefault(key, asyncio.Lock()):
            try:
                etag = await self._blobs.swap(
                    operation,
                    partition_id,
                    self._blob(key),
                    body,
                    None if replaces is None else replaces.version,
                    content_settings=_JSON,
                )
            except RefusedError:
                # Another state is there; or an earlier write of this store, whose answer was lost.
                found = await self._read(operation, key)
                return found if found is not None and found.state == state else None
            return StoredPublisherState(state, etag)

    async def reset_state(self, name: str, partition_id: str) -> None:
        """Delete a state. It is not an error if there is none.

        Raises:
            StoreError: The store failed.
        """
        key = check_key(name, partition_id)
        self._check_open("reset state", partition_id)
        async with self._locks.setdefault(key, asyncio.Lock()):
            await self._blobs.delete("reset state", partition_id, self._blob(key))

    async def aclose(self) -> None:
        """Close a client of its own. States stay. Closing twice is fine."""
        self._is_closed = True
        await self._blobs.aclose()

    async def _read(self, operation: str, key: Key) -> StoredPublisherState | None:
        found = await self._blobs.download(operation, key[1], self._blob(key), decode_state, limit=_MAX_BODY)
        return None if found is None else StoredPublisherState(found[0], str(found[1].etag))

    def _check_open(self, operation: str, partition_id: str) -> None:
        if self._is_closed:
            raise ClosedError("publisher state store")
        if not self._is_open:
            raise StoreError(operation, "the store is not open: call open() first", partition_id=partition_id)

    def _blob(self, key: Key) -> BlobClient:
        name, partition_id = (_UNSAFE.sub(lambda found: f"%{ord(found.group()):02X}", each) for each in key)
        return self._blobs.blob(f"{self._prefix}{name}/{partition_id}.json")

    def __repr__(self) -> str:
        # Never the URL, which may hold a signature.
        return f"BlobPublisherStateStore({self._blobs.name!r}, prefix={self._prefix!r})"
