"""How long a connection may take to become a WebSocket, on virtual time."""

from __future__ import annotations

import asyncio

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


@pytest.mark.parametrize("drips", [False, True])
async def test_handshake_that_is_slow_is_cut(drips: bool) -> None:
    """A connection that is no WebSocket after the time for it is cut, also one that sends a header each second."""
    server = websocket.WebSocketServer(asyncio.Protocol, handshake_timeout=20.0)
    stream = _Dripping()
    served = websocket._Served(server._http(), server._accepted, server._lost)
    served.connection_made(stream)
    for second in range(20):
        if drips:
            served.data_received(b"X-Header: x\r\n" if second else b"GET /$servicebus/websocket HTTP/1.1\r\n")
        assert not stream.is_cut
        await asyncio.sleep(1)
    await asyncio.sleep(0.001)
    assert stream.is_cut
    served.connection_lost(None)
    assert server._opening == {}
    await server._http.shutdown()
