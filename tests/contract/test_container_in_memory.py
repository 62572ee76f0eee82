"""The container in memory answers azure-storage-blob as Azurite does, as far as the stores go.

Not compared: metadata set with `If-None-Match: *` where there is a blob. Azurite does it, and azure-eventhub's store
relies on its being refused.
"""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable
from typing import Any

from azure.core import MatchConditions
from azure.core.exceptions import HttpResponseError
from azure.storage.blob.aio import BlobClient, ContainerClient

from eventpump.clock import LoopClock
from tests.support.azurite import Azurite
from tests.support.blobs import Container, container_client

_SAME: dict[str, Any] = {"match_condition": MatchConditions.IfNotModified}


async def _answers(container: ContainerClient) -> list[object]:
    """Make requests of every kind, and return what came."""
    etags: list[str] = []

    async def answer(request: Callable[[BlobClient], Awaitable[Any]]) -> object:
        try:
            found = await request(container.get_blob_client("ns/hub/g/ownership/0"))
        except HttpResponseError as error:
            code: Any = getattr(error, "error_code", None)
            return error.status_code, str(getattr(code, "value", code))
        if isinstance(found, dict):
            etags.append(str(found["etag"]))
            return "written"
        return found

    async def read(blob: BlobClient) -> object:
        stream = await blob.download_blob(0, 100)
        return await stream.readall(), dict(stream.properties.metadata)

    async def properties(blob: BlobClient) -> object:
        found = await blob.get_blob_properties()
        return dict(found.metadata), found.size, str(found.etag) == etags[-1]

    requests: list[Callable[[BlobClient], Awaitable[Any]]] = [
        lambda blob: blob.get_blob_properties(),
        read,
        lambda blob: blob.set_blob_metadata({"ownerid": "a"}),
        lambda blob: blob.set_blob_metadata({"ownerid": "a"}, if_none_match="*"),
        lambda blob: blob.upload_blob(b"", metadata={"OwnerId": "a"}),
        lambda blob: blob.upload_blob(b"", metadata={"ownerid": "b"}),
        properties,
        lambda blob: blob.set_blob_metadata({"ownerid": "b"}, etag=etags[0], **_SAME),
        lambda blob: blob.set_blob_metadata({"ownerid": "c"}, etag=etags[0], **_SAME),
        properties,
        lambda blob: blob.upload_blob(b"text", overwrite=True, etag=etags[0], **_SAME),
        lambda blob: blob.upload_blob(b"text", overwrite=True, etag=etags[-1], metadata={"x": "y"}, **_SAME),
        read,
        lambda blob: blob.delete_blob(etag=etags[0], **_SAME),
    ]
    answers = [await answer(request) for request in requests]
    for name in ("ns/hub/g/checkpoint/1", "ns/hub/g/checkpoint/0", "ns/hub/other"):
        await container.get_blob_client(name).upload_blob(b"", metadata={"offset": name[-1]})
    listed = container.list_blobs("ns/hub/g/", include=["metadata"], results_per_page=2)
    answers.append([(blob.name, dict(blob.metadata or {}), blob.size) async for blob in listed])
    answers.append([item.name async for item in container.walk_blobs("ns/hub/", delimiter="/")])
    answers += [await answer(lambda blob: blob.delete_blob()), await answer(lambda blob: blob.delete_blob())]
    return answers


async def test_container_in_memory_answers_as_azurite_does(azurite: Azurite) -> None:
    """The same results, errors, listings and metadata."""
    name = f"c{uuid.uuid4().hex}"
    async with ContainerClient.from_connection_string(azurite.connection_string, name, retry_total=0) as real:
        await real.create_container()
        expected = await _answers(real)
    memory = container_client(Container(LoopClock().time))
    assert await _answers(memory) == expected
