"""The states of idempotent publishers in blobs: a small JSON object each, written under the ETag that was read."""

from __future__ import annotations

import asyncio
import re
from collections import defaultdict
from collections.abc import Awaitable
from typing import Any, Final, TypeVar

from azure.core import MatchConditions
from azure.storage.blob import ContentSettings
from azure.storage.blob.aio import BlobClient, ContainerClient

from eventpump.errors import ClosedError, ConfigurationError, StoreError
from eventpump.ports import PublisherState
from eventpump.storage.blob_door import Answer, RefusedError, call, ensure_container, make_client, request_options
from eventpump.storage.publisher_state import (
    CONFLICT,
    Expectations,
    Key,
    check_key,
    check_writable,
    decode_state,
    encode_state,
)

T = TypeVar("T")

_MAX_BODY: Final = 1 << 16
_WRITE_TRIES: Final = 4
_JSON: Final = ContentSettings(content_type="application/json")
# What a blob's name may not hold, or would be read as a folder; and "." at the end, which a URL loses.
_UNSAFE: Final = re.compile(r"[%/\\?#]|\.$")


class BlobPublisherStateStore:
    """A `PublisherStateStore` on a storage account: one blob per name and partition, `{prefix}{name}/{partition}.json`.

    :param container: the container's name, with `connection_string` or with `account_url` and `credential`; or a ready
        `ContainerClient`, which stays the caller's to close. Created where it does not exist.
    :param prefix: goes before the name in blob names, with nothing between.
    :param call_timeout: how long one request may take, in seconds.
    :raises ConfigurationError: the values cannot work.
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
    ) -> None:
        if call_timeout <= 0:
            raise ConfigurationError("call_timeout", "must be above 0")
        self._prefix = prefix.strip()
        self._call_timeout = float(call_timeout)
        self._owns_client = isinstance(container, str)
        self._container = (
            make_client(container, connection_string, account_url, credential)
            if isinstance(container, str)
            else container
        )
        self._options = request_options(self._call_timeout)
        self._expectations = Expectations()
        self._etags: dict[Key, str] = {}
        self._locks: defaultdict[Key, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._is_open = False
        self._is_closed = False

    async def open(self) -> None:
        """Make the container if there is none. Opening twice is fine.

        :raises StoreError: the container can neither be made nor looked at.
        """
        if self._is_closed:
            raise ClosedError("publisher state store")
        if self._is_open:
            return
        await ensure_container(self._container, self._prefix, self._call_timeout)
        self._is_open = True

    async def read_state(self, name: str, partition_id: str) -> PublisherState | None:
        """Read a state; None where there is none. :raises StoreError: the store failed, or holds something else."""
        key = check_key(name, partition_id)
        self._check_open("read state", partition_id)
        async with self._locks[key]:
            found = await self._read("read state", key)
            self._expectations.saw(key, found)
            return found

    async def write_state(self, name: str, partition_id: str, state: PublisherState) -> None:
        """Store a state in place of the one this store read or wrote last.

        :raises StoreError: the store failed, or another publisher of that name changed the state.
        """
        operation = "write state"
        key = check_key(name, partition_id)
        self._check_open(operation, partition_id)
        body = encode_state(check_writable(state))
        async with self._locks[key]:
            for _ in range(_WRITE_TRIES):
                try:
                    self._expectations.trying(key, state)
                    self._etags[key] = await self._put(operation, key, body)
                except RefusedError:
                    found = await self._read(operation, key)
                    if found == state:  # an earlier write of ours, whose answer was lost
                        self._expectations.stored(key, state)
                        return
                    if not self._expectations.allows(key, found):
                        self._etags.pop(key, None)  # not ours to overwrite at the next try either
                        raise StoreError(operation, CONFLICT, partition_id=partition_id) from None
                else:
                    self._expectations.stored(key, state)
                    return
        raise StoreError(operation, "the state kept changing", partition_id=partition_id)

    async def aclose(self) -> None:
        """Close the client if it is ours. States stay. Closing twice is fine."""
        self._is_closed = True
        if self._owns_client:
            await self._container.close()

    # ---- requests

    async def _put(self, operation: str, key: Key, body: bytes) -> str:
        """Write over what was read, or where nothing was. :raises RefusedError: it changed since."""
        etag = self._etags.get(key)
        condition: dict[str, Any] = {}
        if etag is not None:
            condition = {"overwrite": True, "etag": etag, "match_condition": MatchConditions.IfNotModified}
        request = self._blob(key).upload_blob(body, content_settings=_JSON, **condition, **self._options)
        return str((await self._call(operation, key[1], request))["etag"])

    async def _read(self, operation: str, key: Key) -> PublisherState | None:
        async def download() -> tuple[bytes, str]:
            stream = await self._blob(key).download_blob(0, _MAX_BODY, **self._options)
            raw: bytes = await stream.readall()
            return raw, str(stream.properties.etag)

        try:
            raw, etag = await self._call(operation, key[1], download())
            found = decode_state(raw)
        except RefusedError as refused:
            if refused.answer is not Answer.MISSING:
                raise StoreError(operation, refused.answer.value, partition_id=key[1]) from None
            self._etags.pop(key, None)
            return None
        except ValueError as error:
            raise StoreError(operation, str(error), partition_id=key[1]) from None
        self._etags[key] = etag
        return found

    async def _call(self, operation: str, partition_id: str | None, request: Awaitable[T]) -> T:
        return await call(operation, partition_id, request, self._call_timeout)

    def _check_open(self, operation: str, partition_id: str) -> None:
        if self._is_closed:
            raise ClosedError("publisher state store")
        if not self._is_open:
            raise StoreError(operation, "the store is not open", partition_id=partition_id)

    def _blob(self, key: Key) -> BlobClient:
        name, partition_id = (_UNSAFE.sub(lambda found: f"%{ord(found.group()):02X}", each) for each in key)
        return self._container.get_blob_client(f"{self._prefix}{name}/{partition_id}.json")

    def __repr__(self) -> str:
        # Never the URL, which may hold a signature.
        return f"BlobPublisherStateStore({self._container.container_name!r}, prefix={self._prefix!r})"
