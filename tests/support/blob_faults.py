"""Faults between a blob store and its account: hooks around the storage SDK's requests, and a service in its place."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from azure.core.pipeline.transport import AioHttpTransport

Send = Callable[[], Awaitable[Any]]
Hook = Callable[[Any, Send], Awaitable[Any]]


class FaultTransport(AioHttpTransport):  # type: ignore[misc]  # azure.core has no types for it
    """The SDK's own transport, with a hook around every request. Not a mock: what the hook lets through is sent."""

    def __init__(self) -> None:
        super().__init__()
        self.hook: Hook | None = None
        self.requests: list[str] = []

    async def send(self, request: Any, **config: Any) -> Any:
        self.requests.append(kind_of(request))

        async def go_on() -> Any:
            return await super(FaultTransport, self).send(request, **config)

        return await go_on() if self.hook is None else await self.hook(request, go_on)


def kind_of(request: Any) -> str:
    """Name a request as the REST reference does."""
    action = request.headers.get("x-ms-lease-action")
    if action:
        return f"{str(action).capitalize()} Lease"
    if "comp=list" in request.url:
        return "List Blobs"
    if "comp=metadata" in request.url:
        return "Set Blob Metadata"
    if "restype=container" in request.url:
        return "Create Container"
    names = {"PUT": "Put Blob", "GET": "Get Blob", "HEAD": "Get Blob Properties"}
    return names[request.method]


def on(kind: str, act: Hook) -> Hook:
    """Hook the first request of a kind; the others go through."""
    done = False

    async def hook(request: Any, go_on: Send) -> Any:
        nonlocal done
        if done or kind_of(request) != kind:
            return await go_on()
        done = True
        return await act(request, go_on)

    return hook


@asynccontextmanager
async def service(answer: Callable[[web.Request], web.Response]) -> AsyncIterator[tuple[str, list[str]]]:
    """An HTTP server in place of a storage account: its URL, and the requests it got."""
    requests: list[str] = []

    async def handle(request: web.Request) -> web.Response:
        requests.append(request.headers.get("x-ms-lease-action", request.method))
        return answer(request)

    app = web.Application()
    app.router.add_route("*", "/{tail:.*}", handle)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        yield f"http://{host}:{port}/account", requests
    finally:
        await runner.cleanup()
