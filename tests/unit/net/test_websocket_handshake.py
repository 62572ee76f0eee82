"""How long a connection may take to become a WebSocket, on virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Self

import pytest

from eventpump.net import websocket


class _Dripping(asyncio.Transport):
    """A stream that a client sends on a little at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.is_cut = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        raise AssertionError("there is nothing to answer yet")

    def is_closing(self) -> bool:
        return self.is_cut

    def close(self) -> None:
        self.is_cut = True

    def abort(self) -> None:
        self.is_cut = True


class _Listening(asyncio.Server):
    """A server whose connections a test makes."""

    def __init__(self) -> None:
        self.make: Callable[[], asyncio.Protocol]

    async def create(self, make: Callable[[], asyncio.Protocol], *_: Any, **__: Any) -> Self:
        """Do what `create_server` of a loop does."""
        self.make = make
        return self

    @property
    def sockets(self) -> Any:
        return (SimpleNamespace(getsockname=lambda: ("host", 1)),)

    def close(self) -> None:
        """Nothing listens."""

    async def wait_closed(self) -> None:
        """Nothing listens."""


@pytest.mark.parametrize("drips", [False, True])
async def test_handshake_that_is_slow_is_cut(drips: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that is no WebSocket after the time for it is cut, also one that sends a header each second."""
    listening, stream = _Listening(), _Dripping()
    monkeypatch.setattr(asyncio.get_running_loop(), "create_server", listening.create)
    server = await websocket.WebSocketServer.start(asyncio.Protocol, "host", 0, tls=None, handshake_timeout=20.0)
    served = listening.make()
    served.connection_made(stream)
    for second in range(20):
        if drips:
            served.data_received(b"X-Header: x\r\n" if second else b"GET /$servicebus/websocket HTTP/1.1\r\n")
        assert not stream.is_cut
        await asyncio.sleep(1)
    await asyncio.sleep(0.001)
    assert stream.is_cut
    served.connection_lost(None)
    await server.aclose()
