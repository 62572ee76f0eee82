"""Records in blobs: one blob each, written under the ETag that was read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from eventpump.errors import StoreError
from eventpump.interfaces import ListedRecord, StoredRecord
from eventpump.storage.blob_access import Answer, Blob, BlobContainer, RefusedError
from eventpump.storage.records.names import MAX_BODY, check_body, check_name, check_prefix
from eventpump.storage.records.opened import OpenedRecords
from eventpump.storage.records.texts import encode_texts


class BlobRecordStore(OpenedRecords):
    """A `RecordStore` in a blob container: a record is the blob `{prefix}{name}`.

    Records of one directory may be kept in the metadata of empty blobs. An account with soft delete keeps no copy of
    metadata that is replaced, and one listing returns the bodies. Those are JSON objects of ASCII texts, as
    `encode_texts` returns them.

    Args:
        prefix: Goes before the names of records, with nothing between.
        create: Whether `open` creates a container that is missing. Default: False; a missing one is an error.
        content_type: The content type of the blobs; None for that of bytes.
        in_metadata: The directory, with "/" at its end, whose records are kept in metadata; None for none.
        kind: What the store is, for errors. Default: "record store".
    """

    def __init__(
        self,
        blobs: BlobContainer,
        prefix: str,
        *,
        create: bool = False,
        content_type: str | None = None,
        in_metadata: str | None = None,
        kind: str = "record store",
    ) -> None:
        super().__init__(kind)
        self._blobs = blobs
        self._prefix = prefix
        self._create = create
        self._content_type = content_type
        self._in_metadata = in_metadata

    async def open(self) -> None:
        """Check that the container is there, or create it with `create`: else a `ConfigurationError`."""
        self._check_not_closed()
        if not self._is_open:
            await self._blobs.open(self._prefix, create=self._create)
            self._is_open = True

    async def read(self, name: str) -> StoredRecord | None:
        """Return a record, or None if there is none. One request."""
        operation = f"read {name}"
        return await self._read(operation, name, self._blob(operation, name))

    async def swap(self, name: str, body: bytes, replaces: str | None) -> str | None:
        """Store a record by compare-and-swap. One request, and one more where it is refused.

        Raises:
            StoreError: It failed, and whether the record is stored is not known; or a client that is not ours holds a
                blob lease on it.
        """
        operation = f"swap {name}"
        blob = self._blob(operation, name)
        check_body(body)
        try:
            if self._is_in_metadata(name):
                return await self._blobs.swap_metadata(operation, None, blob, json.loads(body), replaces)
            # One request without "overwrite" carries the condition.
            content_type = self._content_type
            return await self._blobs.swap(
                operation, None, blob, body, replaces, content_type=content_type, max_concurrency=1
            )
        except RefusedError as refused:
            # Another record is there; or this one, from an earlier call whose answer was lost.
            found = await self._read(operation, name, blob)
            if found is not None and found.body == body:
                return found.version
            if replaces is not None and (refused.answer is Answer.TAKEN or (found and found.version == replaces)):
                raise self._leased(operation, blob) from None
            return None

    async def list(self, prefix: str) -> dict[str, ListedRecord]:
        """Return the records of a directory; with their bodies where they are in metadata. One request for 5000."""
        operation = f"list {check_prefix(prefix)}"
        self._check_open(operation)
        directory = self._in_metadata
        has_bodies = directory is not None and (prefix.startswith(directory) or directory.startswith(prefix))
        options: dict[str, Any] = {**self._blobs.options, **({"include": ["metadata"]} if has_bodies else {})}

        async def listed() -> dict[str, ListedRecord]:
            found = {}
            async for blob in self._blobs.client.list_blobs(self._prefix + prefix, **options):
                name = blob.name.removeprefix(self._prefix)
                body = _body(blob.metadata) if self._is_in_metadata(name) else None
                found[name] = ListedRecord(_version(blob.etag), body)
            return found

        return await self._blobs.call(operation, None, listed())

    async def delete(self, name: str, version: str | None = None) -> bool:
        """Delete a record. Return False, and delete nothing, if there is one of another version."""
        operation = f"delete {name}"
        blob = self._blob(operation, name)
        try:
            await self._blobs.delete(operation, None, blob, version)
        except RefusedError as refused:
            if refused.answer is Answer.CHANGED:  # also of a blob that is not there
                return await self._read(operation, name, blob) is None
            raise self._leased(operation, blob) from None
        return True

    async def aclose(self) -> None:
        """Close the container. Closing twice is fine."""
        self._blobs.home.enter()
        self._is_closed = True
        await self._blobs.aclose()

    async def _read(self, operation: str, name: str, blob: Blob) -> StoredRecord | None:
        if self._is_in_metadata(name):
            properties = await self._blobs.properties(operation, None, blob)
            return None if properties is None else StoredRecord(_body(properties.metadata), _version(properties.etag))
        found = await self._blobs.download(operation, None, blob, bytes, limit=MAX_BODY)
        return None if found is None else StoredRecord(found[0], _version(found[1].etag))

    def _leased(self, operation: str, blob: Blob) -> StoreError:
        return StoreError(operation, f"{blob.blob_name} has a blob lease held elsewhere: break that blob lease")

    def _is_in_metadata(self, name: str) -> bool:
        return self._in_metadata is not None and name.startswith(self._in_metadata)

    def _blob(self, operation: str, name: str) -> Blob:
        check_name(name)
        self._check_open(operation)
        return self._blobs.blob(self._prefix + name)

    def __repr__(self) -> str:
        # Never the URL, which may hold a signature.
        return f"BlobRecordStore({self._blobs.name!r}, prefix={self._prefix!r})"


def _body(metadata: Mapping[str, str] | None) -> bytes:
    # Some services change the case of the keys.
    return encode_texts({key.lower(): text for key, text in (metadata or {}).items()})


def _version(etag: object) -> str:
    # Listings have it without the quotation marks.
    return f'"{str(etag).strip(chr(34))}"'
