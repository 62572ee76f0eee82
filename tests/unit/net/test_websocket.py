"""AMQP's byte stream in a WebSocket, on real sockets: every byte in order, pace, and every way it ends."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, cast

import aiohttp
import pytest
from aiohttp import web

from eventpump.amqp.connection import Closed, Connection, Role
from eventpump.errors import ConnectionLostError, Recovery
from eventpump.net import stream
from eventpump.net.dialing import dial
from eventpump.net.route import Route
from eventpump.net.stream import ConnectionProtocol
from eventpump.net.websocket import PATH, SUBPROTOCOL, WebSocketServer, connect
from tests.support.seeds import seeds
from tests.support.waiting import Changes
from tests.unit.amqp.pair import config, only
from tests.unit.net.ends import Client, Recorder

pytestmark = pytest.mark.real_time

PATIENCE = 20.0
Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
Upgraded = Callable[[web.BaseRequest, web.WebSocketResponse], Awaitable[None]]


@pytest.fixture(autouse=True)
async def nothing_unclosed() -> AsyncIterator[None]:
    """Nothing of aiohttp's is left to the garbage collector, which would complain of it."""
    yield
    gc.collect()


class End(asyncio.Protocol):
    """One end of a byte stream, which keeps what it is called with."""

    def __init__(self) -> None:
        self.received = bytearray()
        self.paces: list[str] = []
        self.lost: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
        self._changes = Changes()
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self.received += data
        self._changes.happened()

    def pause_writing(self) -> None:
        self.paces.append("pause")
        self._changes.happened()

    def resume_writing(self) -> None:
        self.paces.append("resume")
        self._changes.happened()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set_result(exc)

    async def until(self, is_so: Callable[[], bool]) -> None:
        await self._changes.until(is_so, PATIENCE)


@contextlib.asynccontextmanager
async def pair() -> AsyncIterator[tuple[End, End]]:
    """Connect a client's and a server's end."""
    made: asyncio.Queue[End] = asyncio.Queue()

    def serve() -> End:
        end = End()
        made.put_nowait(end)
        return end

    server = await WebSocketServer.start(serve, "127.0.0.1", 0, tls=None)
    client = await connect(End, Route("127.0.0.1", server.port, is_websocket=True))
    try:
        yield client, await made.get()
    finally:
        client.transport.abort()
        async with asyncio.timeout(PATIENCE):
            await asyncio.wait([client.lost])
            await server.aclose()


@contextlib.asynccontextmanager
async def http(handler: Handler) -> AsyncIterator[Route]:
    """Serve HTTP by hand.

    Returns:
        The way there.
    """
    server = web.Server(handler, access_log=None)
    listening = await asyncio.get_running_loop().create_server(server, "127.0.0.1", 0)
    yield Route("127.0.0.1", listening.sockets[0].getsockname()[1], is_websocket=True)
    listening.close()
    await server.shutdown(1.0)
    await listening.wait_closed()


def upgrading(then: Upgraded) -> Handler:
    """Make a handler that accepts the WebSocket, and then does something to it."""

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        socket = web.WebSocketResponse(protocols=(SUBPROTOCOL,))
        await socket.prepare(request)
        await then(request, socket)
        return socket

    return handle


# ---------------------------------------------------------------------------------------------------- bytes


@seeds(2, of=3)
async def test_websocket_delivers_every_byte_in_order(seed: int) -> None:
    """Whatever the pieces, and however often either end stops reading, the same bytes arrive in the same order."""
    rng = random.Random(seed)
    async with pair() as ends:
        sent = []
        for end, other in (ends, ends[::-1]):
            data = rng.randbytes(3_000_000)
            sent.append(data)
            at = 0
            while at < len(data):
                step = rng.choice([1, 100, 70_000, 1_000_000])
                end.transport.write(data[at : at + step])
                at += step
                if rng.random() < 0.3:
                    rng.choice([other.transport.pause_reading, other.transport.resume_reading])()
                    await asyncio.sleep(0)
            other.transport.resume_reading()
        for (_, other), data in zip((ends, ends[::-1]), sent, strict=True):
            await other.until(lambda other=other, data=data: len(other.received) >= len(data))  # type: ignore[misc]  # the defaults are the types
            assert other.received == data


async def test_websocket_write_to_a_peer_that_does_not_read_pauses() -> None:
    """A peer that does not read makes the writer pause and hold what it wrote; once it reads, all of it comes."""
    async with pair() as (client, server):
        client.transport.set_write_buffer_limits(high=100_000)
        server.transport.pause_reading()
        written = 200_000
        client.transport.write(bytes(written))
        assert client.paces == ["pause"], "notified at once, not once some of it was sent"
        while client.paces[-1:] != ["pause"] or written < 24 << 20:
            client.transport.write(bytes(1 << 20))
            written += 1 << 20
            await asyncio.sleep(0)
        held = client.transport.get_write_buffer_size()
        assert held > 1 << 20
        server.transport.resume_reading()
        await server.until(lambda: len(server.received) == written)
        assert client.paces == ["pause", "resume"] * (len(client.paces) // 2)
        assert client.transport.get_write_buffer_size() < 100_000


async def test_close_sends_what_was_written_first() -> None:
    """Closing sends what is still held, then closes the WebSocket; the other end gets all of it, and a plain end."""
    async with pair() as (client, server):
        client.transport.write(bytes(3_000_000))
        client.transport.close()
        assert client.transport.is_closing()
        client.transport.write(b"too late")
        async with asyncio.timeout(PATIENCE):
            assert await client.lost is None
            error = await server.lost
        assert server.received == bytes(3_000_000)
        assert "code 1000" in str(error)


# ----------------------------------------------------------------------------------------------------- ends


async def _close_with_controls(_: web.BaseRequest, socket: web.WebSocketResponse) -> None:
    await socket.close(code=1011, message=b"a\r\n\x1b[2J")


async def _close_with_a_reason(_: web.BaseRequest, socket: web.WebSocketResponse) -> None:
    await socket.close(code=1011, message=b"out of order")


async def _send_text(_: web.BaseRequest, socket: web.WebSocketResponse) -> None:
    await socket.send_str("hello")
    await socket.receive()


async def _stop_in_a_frame(request: web.BaseRequest, _: web.WebSocketResponse) -> None:
    assert request.transport is not None
    request.transport.write(b"\x82\x7e\x10\x00only the beginning of 4096 bytes")
    request.transport.close()


async def _stop_between_frames(request: web.BaseRequest, _: web.WebSocketResponse) -> None:
    assert request.transport is not None
    request.transport.close()


async def _break_the_rules(request: web.BaseRequest, socket: web.WebSocketResponse) -> None:
    assert request.transport is not None
    request.transport.write(b"\xf3\x00")
    await socket.receive()


@pytest.mark.parametrize(
    ("then", "says"),
    [
        (_close_with_a_reason, "the WebSocket was closed with code 1011: out of order"),
        (_close_with_controls, "the WebSocket was closed with code 1011: a\\r\\n\\x1b[2J"),
        (_send_text, "a text message arrived on the WebSocket, where AMQP uses binary ones"),
        (_stop_in_a_frame, "the WebSocket ended without a close"),
        (_stop_between_frames, "the WebSocket ended without a close"),
        (_break_the_rules, "the WebSocket failed: "),
    ],
)
async def test_websocket_that_ends_raises_a_lost_connection(then: Upgraded, says: str) -> None:
    """A WebSocket closed, cut in a frame or misused is a lost connection that says so, once; no stream is left."""
    client = Client()
    async with asyncio.timeout(PATIENCE), http(upgrading(then)) as route:
        protocol = await dial(client.engine, client, route)
        await protocol.wait_closed()
    error = only(client.events, Closed).error
    assert error is not None
    assert str(error.description).startswith(says)
    assert len(client.closed) == 1


async def test_close_with_a_peer_that_ignores_it_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that answers no close is not waited for beyond the time any connection has for its last bytes."""
    monkeypatch.setattr(stream, "CLOSE_TIMEOUT", 0.1)

    async def ignore(request: web.BaseRequest, _: web.WebSocketResponse) -> None:
        assert request.transport is not None
        request.transport.pause_reading()
        await gone.wait()

    gone = asyncio.Event()
    client = Client()
    async with asyncio.timeout(stream.CLOSE_TIMEOUT + 5.0), http(upgrading(ignore)) as route:
        protocol = await dial(client.engine, client, route)
        client.engine.close()
        protocol.finish()
        await protocol.wait_closed()
        gone.set()
    assert len(client.closed) == 1


async def test_abort_while_writing_ends_at_once() -> None:
    """Aborted while it writes to a peer that does not read, and is not read itself, it is gone at once."""
    async with pair() as (client, server):
        server.transport.pause_reading()
        client.transport.pause_reading()
        for _ in range(24):
            client.transport.write(bytes(1 << 20))
            await asyncio.sleep(0)
        client.transport.abort()
        async with asyncio.timeout(PATIENCE):
            assert await client.lost is None
            server.transport.resume_reading()
            assert isinstance(await server.lost, ConnectionError)


# ------------------------------------------------------------------------------------------------ handshakes


async def lost(route: Route) -> ConnectionLostError:
    client = Client()
    with pytest.raises(ConnectionLostError) as caught:
        async with asyncio.timeout(PATIENCE):
            await dial(client.engine, client, route)
    assert client.closed == []
    return caught.value


@pytest.mark.parametrize(
    ("status", "recovery"),
    [
        (200, Recovery.GIVE_UP),
        (302, Recovery.GIVE_UP),
        (401, Recovery.GIVE_UP),
        (404, Recovery.GIVE_UP),
        (429, Recovery.RECONNECT),
        (503, Recovery.RECONNECT),
    ],
)
async def test_handshake_refused_raises_with_its_status(status: int, recovery: Recovery) -> None:
    """An answer other than a WebSocket is an error with its status, final where trying again would get the same."""
    count = 0

    async def answer(_: web.BaseRequest) -> web.StreamResponse:
        nonlocal count
        count += 1
        return web.Response(status=status, headers={"Location": "/elsewhere"} if status == 302 else {})

    async with http(answer) as route:
        error = await lost(route)
    assert f"{route} answered {status}" in str(error)
    assert error.recovery is recovery
    assert count == 1


async def test_handshake_with_another_subprotocol_is_final() -> None:
    """A server that takes WebSockets, and not this subprotocol, is another service: final."""

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        await socket.receive()
        return socket

    async with http(answer) as route:
        error = await lost(route)
    assert str(error) == f"{route} accepts WebSockets, but not the subprotocol AMQPWSB10 of AMQP"
    assert error.recovery is Recovery.GIVE_UP


@pytest.mark.parametrize("answer", [b"", b"AMQP\x00\x01\x00\x00", b"\x15\x03\x01\r\n\r\n", b"HTTP/1.1 101 Switch"])
async def test_handshake_without_an_http_answer_may_be_retried(answer: bytes) -> None:
    """A server that hangs up or speaks something else is asked once, and worth another try."""
    count = 0

    async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal count
        count += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(babble, "127.0.0.1", 0)
    route = Route("127.0.0.1", server.sockets[0].getsockname()[1], is_websocket=True)
    error = await lost(route)
    server.close()
    await server.wait_closed()
    assert str(route) in str(error)
    assert error.recovery is Recovery.RECONNECT
    assert count == 1


# --------------------------------------------------------------------------------------------------- server


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[tuple[WebSocketServer, Recorder]]:
    service = Recorder(Connection(config(), Role.SERVER))
    server = await WebSocketServer.start(lambda: ConnectionProtocol(service.engine, service), "127.0.0.1", 0, tls=None)
    yield server, service
    await server.aclose()


@pytest.mark.parametrize(
    ("path", "options", "status"),
    [
        ("/", {"protocols": [SUBPROTOCOL]}, 404),
        ("/$servicebus", {"protocols": [SUBPROTOCOL]}, 404),
        (PATH, {}, 400),
        (PATH, {"protocols": ["mqtt"]}, 400),
    ],
)
async def test_server_refuses_another_path_or_subprotocol(path: str, options: dict[str, Any], status: int) -> None:
    """Another path or subprotocol, or a plain request, is refused, and reaches no engine."""
    async with serving() as (server, service), aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
            await session.ws_connect(f"http://127.0.0.1:{server.port}{path}", **options)
        assert caught.value.status == status
        async with session.get(f"http://127.0.0.1:{server.port}{PATH}") as answer:
            assert answer.status == 400
    assert service.events == []
    assert service.closed == []


@pytest.mark.parametrize("path", [PATH, PATH + "/"])
async def test_server_takes_both_paths(path: str) -> None:
    """The path may end in a slash, as that of .NET does; of the subprotocols offered the server takes its own."""
    async with serving() as (server, service), aiohttp.ClientSession() as session:
        url = f"http://127.0.0.1:{server.port}{path}"
        async with session.ws_connect(url, protocols=["other", SUBPROTOCOL]) as socket:
            assert socket.protocol == SUBPROTOCOL
            # Frames and messages need not match.
            for byte in b"AMQP\x03\x01\x00\x00":
                await socket.send_bytes(bytes([byte]))
            assert (await socket.receive_bytes()).startswith(b"AMQP\x03\x01\x00\x00")
        async with asyncio.timeout(PATIENCE):
            await service.gone.wait()


async def test_server_close_frees_its_port_and_cuts_clients() -> None:
    """Closed, the server frees its port, and open connections are cut."""
    async with serving() as (server, service):
        end = await connect(End, Route("127.0.0.1", server.port, is_websocket=True))
        end.transport.write(b"AMQP\x03\x01\x00\x00")
        await end.until(lambda: bool(end.received))
        await server.aclose()
        async with asyncio.timeout(PATIENCE):
            assert await end.lost is not None
            await service.gone.wait()
        with pytest.raises(ConnectionLostError, match="refused"):
            await connect(End, Route("127.0.0.1", server.port, is_websocket=True))


# --------------------------------------------------------------------------------------------------- bounds

LIMIT = 300_000


async def to_the_server(pieces: list[bytes], *, is_last: bool) -> tuple[bytes, End]:
    """Send one message in fragments.

    Returns:
        The server's close frame, empty where there is none, and its end.
    """
    ends: list[End] = []

    def serve() -> End:
        ends.append(End())
        return ends[0]

    server = await WebSocketServer.start(serve, "127.0.0.1", 0, tls=None, max_message=LIMIT)
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(
        f"GET {PATH} HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
        f"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Protocol: {SUBPROTOCOL}\r\n\r\n".encode()
    )
    await reader.readuntil(b"\r\n\r\n")
    for index, piece in enumerate(pieces):
        start = (0 if index else 2) | (0x80 if is_last and index == len(pieces) - 1 else 0)
        writer.write(bytes((start, 0xFF)) + len(piece).to_bytes(8, "big") + bytes(4) + piece)
    try:
        async with asyncio.timeout(PATIENCE):
            if is_last and sum(map(len, pieces)) < LIMIT:
                await ends[0].until(lambda: len(ends[0].received) == sum(map(len, pieces)))
                return b"", ends[0]
            return await reader.readexactly(4), ends[0]
    finally:
        writer.close()
        async with asyncio.timeout(PATIENCE):
            await asyncio.wait([ends[0].lost])
            await server.aclose()


@pytest.mark.parametrize("pieces", [[bytes(LIMIT + 1)], [bytes(100_000)] * 4], ids=["one frame", "fragments"])
@pytest.mark.parametrize("is_last", [True, False])
async def test_server_refuses_a_message_above_the_bound(pieces: list[bytes], is_last: bool) -> None:
    """A larger message closes the socket with code 1009, whole or not, and no byte of it reaches the engine."""
    answer, end = await to_the_server(pieces, is_last=is_last)
    assert answer[0] == 0x88
    assert int.from_bytes(answer[2:4], "big") == 1009
    assert not end.received


async def test_server_takes_a_message_within_the_bound() -> None:
    """In several fragments, too."""
    answer, end = await to_the_server([bytes(90_000)] * 3, is_last=True)
    assert (answer, len(end.received)) == (b"", 270_000)


async def test_client_ends_at_a_message_above_the_bound() -> None:
    """A larger message ends the connection, and says why; one of four of the largest frames is taken."""
    engine = config(max_frame_size=50_000)

    async def send(_: web.BaseRequest, socket: web.WebSocketResponse) -> None:
        await socket.send_bytes(bytes(8) + bytes(4 * engine.max_frame_size))
        await socket.receive()

    async with http(upgrading(send)) as route:
        client = Recorder(Connection(engine, Role.CLIENT))
        client.engine.start()
        await dial(client.engine, client, route)
        async with asyncio.timeout(PATIENCE):
            await client.gone.wait()
    error = only(client.events, Closed).error
    assert error is not None
    assert "size" in (error.description or "")
