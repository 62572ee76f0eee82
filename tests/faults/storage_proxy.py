"""An HTTP proxy before a blob service that answers 503, or not at all, for the blobs of some partitions."""

from __future__ import annotations

import asyncio
import enum
from collections import Counter
from collections.abc import Callable
from types import TracebackType
from typing import Self

import aiohttp
from aiohttp import web
from yarl import URL

_HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length", "host"}


class Answer(enum.Enum):
    """What a partition's blob answers in place of the service."""

    UNAVAILABLE = "503"
    """At once: the server is busy."""
    NONE = "none"
    """Nothing, until the proxy is restored."""


class StorageProxy:
    """Passes requests on to a blob service, but for partitions that are set to fail.

    Args:
        endpoint: The account's URL at the service.
        on_answered: Is called after every answer.
    """

    def __init__(self, endpoint: str, on_answered: Callable[[], None]) -> None:
        self._target = URL(endpoint)
        self._on_answered = on_answered
        self._failing: dict[str, Answer] = {}
        self._restored = asyncio.Event()
        self._session: aiohttp.ClientSession | None = None
        self._runner: web.AppRunner | None = None
        self.endpoint = ""
        """The account's URL here."""
        self.answered: Counter[tuple[str, str]] = Counter()
        """By partition, and "ok", "503" or "none": how often."""
        self.leased: Counter[str] = Counter()
        """By partition: how many requests about its lease were answered by the service."""

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=2**26)
        app.router.add_route("*", "/{path:.*}", self._serve)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        _, port = self._runner.addresses[0]
        self.endpoint = f"http://127.0.0.1:{port}{self._target.path}"
        self._session = aiohttp.ClientSession(auto_decompress=False)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.restore()
        assert self._runner is not None
        assert self._session is not None
        await self._runner.cleanup()
        await self._session.close()

    def fail(self, partition_id: str, answer: Answer) -> None:
        """Fail every request about a partition's blob from now on."""
        self._failing[partition_id] = answer

    def restore(self) -> None:
        """Serve everything again; requests without an answer so far get a 503."""
        self._failing.clear()
        self._restored.set()
        self._restored = asyncio.Event()

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        partition_id = request.path.rpartition("/")[2]
        failing = self._failing.get(partition_id)
        if failing is Answer.NONE:
            self._note(partition_id, failing.value)
            await self._restored.wait()
        if failing is not None:
            if failing is Answer.UNAVAILABLE:
                self._note(partition_id, failing.value)
            return web.Response(status=503, headers={"x-ms-error-code": "ServerBusy"})
        assert self._session is not None
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _HOP_BY_HOP}
        body = await request.read()
        # Signed as it came: neither path nor query may be encoded again.
        url = URL(f"{self._target.origin()}{request.raw_path}", encoded=True)
        async with self._session.request(
            request.method,
            url,
            headers=headers,
            data=body or None,
            skip_auto_headers=("User-Agent", "Accept", "Content-Type"),
        ) as answer:
            content = await answer.read()
            kept = [(name, value) for name, value in answer.headers.items() if name.lower() not in _HOP_BY_HOP]
            response = web.Response(status=answer.status, body=content, headers=kept)
            if request.method == "HEAD" and (length := answer.headers.get("Content-Length")) is not None:
                response.content_length = int(length)
        self.leased[partition_id] += request.query.get("comp") == "lease"
        self._note(partition_id, "ok")
        return response

    def _note(self, partition_id: str, outcome: str) -> None:
        self.answered[partition_id, outcome] += 1
        self._on_answered()
