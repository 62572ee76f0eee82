"""A blob container in memory, on any clock, and a transport with which azure-storage-blob's own client talks to it.

`Container` is the service as far as the stores need it: blobs with metadata, ETags and times of change, conditional
writes, listings in pages. `ContainerTransport` answers the requests of the real client, so that stores run unchanged,
on virtual time; what the service then does with them can be decided by a test.
"""

from __future__ import annotations

import asyncio
import email.utils
import itertools
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from azure.core.pipeline import AsyncPipeline
from azure.core.pipeline.transport import AsyncHttpResponse, AsyncHttpTransport
from azure.storage.blob.aio import ContainerClient

PAGE = 5000
"""The most blobs in one page of a listing."""
_METADATA = "x-ms-meta-"


class BlobRefusedError(Exception):
    """The service refused a request.

    Args:
        status: The HTTP status.
        code: The service's name of the error.
    """

    def __init__(self, status: int, code: str) -> None:
        super().__init__(f"{status} {code}")
        self.status = status
        self.code = code


@dataclass(frozen=True, slots=True)
class Blob:
    """A blob, as it was at one moment.

    Args:
        changed_at: When it was written last, in seconds since the Unix epoch by the service's clock.
    """

    name: str
    etag: str
    changed_at: float
    metadata: Mapping[str, str] = field(default_factory=dict)
    content: bytes = b""
    content_type: str = "application/octet-stream"


class Container:
    """A container, as the service has it. Every call takes effect at once.

    Args:
        now: The service's clock.
        name: The container's name.
        page: The most blobs in one page of a listing.
        keeps_history: Whether the account has versions of blobs and soft delete.
    """

    def __init__(
        self, now: Callable[[], float], name: str = "positions", *, page: int = PAGE, keeps_history: bool = False
    ) -> None:
        self.name = name
        self.now = now
        self.page = page
        self.history: list[Blob] | None = [] if keeps_history else None
        """What was replaced or deleted, which only listings that ask for it have."""
        self.blobs: dict[str, Blob] = {}
        self.on_write: Callable[[Blob], None] | None = None
        """Called with every blob that was written."""
        self.requests = 0
        """How many requests came."""
        self._versions = itertools.count(0x8DC0000000000)

    def get(self, name: str) -> Blob:
        """Return a blob.

        Raises:
            BlobRefusedError: There is none.
        """
        if name not in self.blobs:
            raise BlobRefusedError(404, "BlobNotFound")
        return self.blobs[name]

    def put(
        self,
        name: str,
        content: bytes = b"",
        metadata: Mapping[str, str] | None = None,
        *,
        if_match: str | None = None,
        if_none_match: str | None = None,
        content_type: str = "application/octet-stream",
    ) -> Blob:
        """Write a whole blob.

        Raises:
            BlobRefusedError: A condition does not hold.
        """
        found = self.blobs.get(name)
        if if_none_match == "*" and found is not None:
            raise BlobRefusedError(409, "BlobAlreadyExists")
        if if_match is not None and (found is None or not _matches(if_match, found)):
            raise BlobRefusedError(412, "ConditionNotMet")
        return self._write(name, content, metadata or {}, content_type)

    def set_metadata(
        self,
        name: str,
        metadata: Mapping[str, str],
        *,
        if_match: str | None = None,
        if_none_match: str | None = None,
    ) -> Blob:
        """Replace the metadata of a blob.

        Raises:
            BlobRefusedError: There is none, or a condition does not hold.
        """
        found = self.get(name)
        if if_none_match == "*" or (if_match is not None and not _matches(if_match, found)):
            raise BlobRefusedError(412, "ConditionNotMet")
        return self._write(name, found.content, metadata, found.content_type)

    def delete(self, name: str, *, if_match: str | None = None) -> None:
        """Delete a blob.

        Raises:
            BlobRefusedError: There is none, or it is another one.
        """
        if if_match is not None and not _matches(if_match, self.get(name)):
            raise BlobRefusedError(412, "ConditionNotMet")
        self._keep(self.get(name))
        del self.blobs[name]

    def list(self, prefix: str = "") -> list[Blob]:
        """Return the blobs whose names begin with a text, by name."""
        return [self.blobs[name] for name in sorted(self.blobs) if name.startswith(prefix)]

    def _write(self, name: str, content: bytes, metadata: Mapping[str, str], content_type: str) -> Blob:
        if name in self.blobs:
            self._keep(self.blobs[name])
        etag = f'"0x{next(self._versions):X}"'
        # HTTP dates have whole seconds.
        blob = self.blobs[name] = Blob(name, etag, float(int(self.now())), dict(metadata), content, content_type)
        if self.on_write is not None:
            self.on_write(blob)
        return blob

    def _keep(self, blob: Blob) -> None:
        if self.history is not None:
            self.history.append(blob)


def _matches(etag: str, blob: Blob) -> bool:
    return etag == "*" or etag.strip('"') == blob.etag.strip('"')


Door = Callable[[str, Callable[[], "_Answer"]], Awaitable["_Answer"]]
"""Lets a request through to the service: with its operation and blob's name, and what it does there."""


class ContainerTransport(AsyncHttpTransport[Any, Any]):
    """Answers azure-storage-blob's client from a container.

    Args:
        door: Called with each request, to delay it, to lose its answer, or to raise an error of azure-core in its
            place; None to have every request answered at once.
    """

    def __init__(self, container: Container, door: Door | None = None) -> None:
        self._container = container
        self._door = door

    async def send(self, request: Any, **kwargs: Any) -> Any:
        """Answer a request."""
        url = urlsplit(request.url)
        query = {key: values[0] for key, values in parse_qs(url.query, keep_blank_values=True).items()}
        headers = {key.lower(): str(value) for key, value in request.headers.items()}
        _, _, name = unquote(url.path).lstrip("/").partition("/")
        content = await _content_of(request)
        # Their names are stored, and listed, in the case in which they were given.
        metadata = {
            key[len(_METADATA) :]: str(value)
            for key, value in request.headers.items()
            if key.lower().startswith(_METADATA)
        }

        def work() -> _Answer:
            self._container.requests += 1
            try:
                return self._answer(request.method, name, query, headers, metadata, content)
            except BlobRefusedError as refused:
                body = f"<?xml version='1.0'?><Error><Code>{refused.code}</Code><Message>no</Message></Error>".encode()
                return _Answer(
                    refused.status, {"x-ms-error-code": refused.code}, b"" if request.method == "HEAD" else body
                )

        if self._door is None:
            answer = work()
        else:
            answer = await self._door(f"{request.method} {query.get('comp', '')} {name}", work)
        date = email.utils.formatdate(self._container.now(), usegmt=True)
        return _Response(request, answer, {"date": date, "x-ms-version": "2025-05-05"})

    def _answer(
        self,
        method: str,
        name: str,
        query: dict[str, str],
        headers: dict[str, str],
        metadata: dict[str, str],
        content: bytes,
    ) -> _Answer:
        container = self._container
        conditions: Any = {"if_match": headers.get("if-match"), "if_none_match": headers.get("if-none-match")}
        match method, query.get("comp"), bool(name):
            case "GET", "list", False:
                return self._listing(query)
            case "PUT", None, False:
                raise BlobRefusedError(409, "ContainerAlreadyExists")
            case (("GET" | "HEAD"), None, False):
                return _Answer(200, {})
            case "PUT", "metadata", True:
                return _Answer(200, _headers(container.set_metadata(name, metadata, **conditions)))
            case "PUT", None, True:
                kind = headers.get("x-ms-blob-content-type", "application/octet-stream")
                blob = container.put(name, content, metadata, content_type=kind, **conditions)
                return _Answer(201, _headers(blob))
            case "HEAD", None, True:
                blob = container.get(name)
                return _Answer(200, {**_full_headers(blob), "content-length": str(len(blob.content))})
            case "GET", None, True:
                return _download(container.get(name), headers)
            case "DELETE", None, True:
                container.delete(name, if_match=headers.get("if-match"))
                return _Answer(202, {})
        raise NotImplementedError(f"{method} {name} {query}")

    def _listing(self, query: dict[str, str]) -> _Answer:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        marker, most = query.get("marker", ""), int(query.get("maxresults", self._container.page))
        items: dict[str, Blob | None] = {}
        for blob in self._container.list(prefix):
            rest = blob.name[len(prefix) :]
            if delimiter and delimiter in rest:
                items.setdefault(prefix + rest.partition(delimiter)[0] + delimiter, None)
            else:
                items[blob.name] = blob
        names = [name for name in sorted(items) if name >= marker]
        page, following = names[:most], names[most : most + 1]
        include = query.get("include", "")
        has_metadata = "metadata" in include
        shown = "".join(_listed(name, items[name], has_metadata=has_metadata) for name in page)
        if "versions" in include or "deleted" in include:
            kept = [blob for blob in self._container.history or () if blob.name in page or blob.name not in items]
            shown += "".join(_listed(blob.name, blob, has_metadata=has_metadata) for blob in kept)
        body = (
            f'<?xml version="1.0" encoding="utf-8"?><EnumerationResults ServiceEndpoint="https://fake/" '
            f'ContainerName="{self._container.name}"><Prefix>{escape(prefix)}</Prefix><Blobs>{shown}</Blobs>'
            f"<NextMarker>{escape(following[0]) if following else ''}</NextMarker></EnumerationResults>"
        )
        return _Answer(200, {"content-type": "application/xml"}, body.encode())

    async def open(self) -> None:
        """Nothing has to be opened."""

    async def close(self) -> None:
        """Nothing has to be closed."""

    async def sleep(self, duration: float) -> None:
        """Wait."""
        await asyncio.sleep(duration)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None = None,
        exc_value: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        pass


def container_client(container: Container, door: Door | None = None) -> ContainerClient:
    """Return azure-storage-blob's client of a container in memory."""
    transport = ContainerTransport(container, door)
    return ContainerClient("https://fake.blob.core.windows.net", container.name, transport=transport, retry_total=0)


@dataclass(frozen=True, slots=True)
class _Answer:
    status: int
    headers: dict[str, str]
    body: bytes = b""


class _Response(AsyncHttpResponse):
    """An answer, as azure-core passes it on."""

    def __init__(self, request: Any, answer: _Answer, headers: dict[str, str]) -> None:
        super().__init__(request, None)
        self.status_code = answer.status
        self.reason = ""
        self.headers = _Headers({"content-length": str(len(answer.body)), **headers, **answer.headers})
        self.content_type = self.headers.get("content-type", "application/xml")
        self._body = answer.body

    def body(self) -> bytes:
        """Return the content."""
        return self._body

    async def load_body(self) -> None:
        """It is there."""

    async def read(self) -> bytes:
        """Return the content."""
        return self._body

    def stream_download(self, pipeline: AsyncPipeline[Any, Any] | None = None, **_: Any) -> Any:
        """Return the content in one part."""
        return _Stream(self)


class _Headers(dict[str, str]):
    """HTTP headers, whose names have no case."""

    def __getitem__(self, name: str) -> str:
        return super().__getitem__(name.lower())

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and super().__contains__(name.lower())

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of a header."""
        return super().get(name.lower(), default)


class _Stream:
    """The content of an answer, as a stream of azure-core."""

    def __init__(self, response: _Response) -> None:
        self.response = response
        self.content_length = len(response.body())
        self._left = [response.body()] if response.body() else []

    def __len__(self) -> int:
        return len(self.response.body())

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        if not self._left:
            raise StopAsyncIteration
        return self._left.pop()


async def _content_of(request: Any) -> bytes:
    content: Any = getattr(request, "content", None)
    if content is None:
        content = getattr(request, "data", None)
    if content is None:
        return b""
    if isinstance(content, bytes):
        return content
    if hasattr(content, "read"):
        read = content.read()
        return bytes(await read if asyncio.iscoroutine(read) else read)
    return str(content).encode()


def _date(seconds: float) -> str:
    return email.utils.formatdate(seconds, usegmt=True)


def _headers(blob: Blob) -> dict[str, str]:
    return {"etag": blob.etag, "last-modified": _date(blob.changed_at)}


def _full_headers(blob: Blob) -> dict[str, str]:
    metadata = {f"{_METADATA}{name}": value for name, value in blob.metadata.items()}
    fixed = {
        "content-type": blob.content_type,
        "x-ms-blob-type": "BlockBlob",
        "x-ms-creation-time": _date(blob.changed_at),
        "x-ms-lease-state": "available",
        "x-ms-lease-status": "unlocked",
    }
    return {**_headers(blob), **fixed, **metadata}


def _download(blob: Blob, headers: dict[str, str]) -> _Answer:
    asked = headers.get("x-ms-range", headers.get("range"))
    whole = len(blob.content)
    if asked is None:
        return _Answer(200, _full_headers(blob), blob.content)
    if not whole:
        raise BlobRefusedError(416, "InvalidRange")
    first, _, last = asked.removeprefix("bytes=").partition("-")
    begin, end = int(first), min(int(last) if last else whole - 1, whole - 1)
    content_range = {"content-range": f"bytes {begin}-{end}/{whole}"}
    return _Answer(206, {**_full_headers(blob), **content_range}, blob.content[begin : end + 1])


def _listed(name: str, blob: Blob | None, *, has_metadata: bool) -> str:
    if blob is None:
        return f"<BlobPrefix><Name>{escape(name)}</Name></BlobPrefix>"
    metadata = "".join(f"<{key}>{escape(value)}</{key}>" for key, value in blob.metadata.items())
    return (
        f"<Blob><Name>{escape(name)}</Name><Properties><Last-Modified>{_date(blob.changed_at)}</Last-Modified>"
        f"<Etag>{blob.etag.strip(chr(34))}</Etag><Content-Length>{len(blob.content)}</Content-Length>"
        f"<Content-Type>{blob.content_type}</Content-Type><BlobType>BlockBlob</BlobType>"
        f"<LeaseStatus>unlocked</LeaseStatus><LeaseState>available</LeaseState></Properties>"
        f"{f'<Metadata>{metadata}</Metadata>' if has_metadata else ''}</Blob>"
    )
