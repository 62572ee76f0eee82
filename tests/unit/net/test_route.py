"""Connections to a service on real sockets: TCP, TLS and WebSockets, by a proxy or not; and what it fails with."""

from __future__ import annotations

import asyncio
import contextlib
import random
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import cast

import pytest

from eventpump.amqp.connection import Closed, Connection, Messages, Role
from eventpump.errors import ConnectionLostError, Recovery
from eventpump.net.dialing import dial
from eventpump.net.route import Route, client_tls, open_stream
from eventpump.net.stream import ConnectionProtocol
from eventpump.net.tls import TlsTransport
from eventpump.net.websocket import WebSocketServer
from eventpump.options.connection import ProxySettings
from tests.authority import Authority
from tests.unit.amqp.pair import config, only
from tests.unit.net.ends import Client, Recorder

pytestmark = pytest.mark.real_time

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
OPEN = b"HTTP/1.1 200 OK\r\n\r\n"


@contextlib.asynccontextmanager
async def _closing(server: asyncio.Server) -> AsyncIterator[None]:
    """Close a server, also when a test fails.

    uvloop 0.23 warns of a server that is left open, from within `loop.close`. Where warnings are errors, as in these
    tests, the server stays open then, and `loop.close` never returns. All it takes, under `python -W error`:

        loop = uvloop.new_event_loop()
        server = loop.run_until_complete(loop.create_server(asyncio.Protocol, "127.0.0.1", 0))
        loop.close()
    """
    try:
        yield
    finally:
        server.close()
        await server.wait_closed()


@contextlib.asynccontextmanager
async def served(
    make: Callable[[], ConnectionProtocol], *, tls: ssl.SSLContext | None, is_websocket: bool
) -> AsyncIterator[int]:
    """Serve on loopback.

    Returns:
        The port.
    """
    if is_websocket:
        websockets = await WebSocketServer.start(make, "127.0.0.1", 0, tls=tls)
        yield websockets.port
        await websockets.aclose()
    else:
        server = await asyncio.get_running_loop().create_server(make, "127.0.0.1", 0, ssl=tls)
        async with _closing(server):
            yield server.sockets[0].getsockname()[1]


@contextlib.asynccontextmanager
async def answering(answer: Answer) -> AsyncIterator[int]:
    """Serve bytes on loopback.

    Returns:
        The port.
    """

    async def answer_and_close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            await answer(reader, writer)
        writer.close()

    server = await asyncio.start_server(answer_and_close, "127.0.0.1", 0)
    async with _closing(server):
        yield server.sockets[0].getsockname()[1]


def saying(data: bytes) -> Answer:
    """Make a server that answers any request with the same bytes."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(data)
        await writer.drain()

    return answer


async def lost(route: Route) -> ConnectionLostError:
    """Dial.

    Returns:
        The error it ends with, before or after the stream is there.
    """
    client = Client()
    async with asyncio.timeout(20):
        try:
            protocol = await dial(client.engine, client, route)
        except ConnectionLostError as refused:
            return refused
        await protocol.wait_closed()
    error = only(client.events, Closed).error
    assert error is not None
    return ConnectionLostError(str(error.description))


@pytest.mark.parametrize("is_websocket", [False, True], ids=["tcp", "websocket"])
@pytest.mark.parametrize("is_tls", [False, True], ids=["plain", "tls"])
async def test_connect_over_loopback_sends_and_closes(authority: Authority, is_tls: bool, is_websocket: bool) -> None:
    """Over real sockets a message of many frames arrives, and both ends close in order."""
    service = Recorder(Connection(config(container_id="you"), Role.SERVER))
    client = Client(bytes(range(256)) * 20_000)
    tls = authority.server("localhost") if is_tls else None
    async with (
        asyncio.timeout(20),
        served(lambda: ConnectionProtocol(service.engine, service), tls=tls, is_websocket=is_websocket) as port,
    ):
        route = Route("localhost", port, client_tls(str(authority.file)) if is_tls else None, is_websocket)
        protocol = await dial(client.engine, client, route)
        await protocol.wait_closed()
        await service.gone.wait()
    assert only(service.events, Messages).payloads == [client.payload]
    assert only(client.events, Closed).error is None
    assert only(service.events, Closed).error is None
    assert client.closed == service.closed == [None]


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@pytest.mark.parametrize("is_tls", [False, True], ids=["plain", "tls"])
def test_reads_use_a_kept_buffer_over_tls_alone(
    authority: Authority, monkeypatch: pytest.MonkeyPatch, is_tls: bool, loop: str
) -> None:
    """Either event loop takes the buffer where it pays, and nowhere else; the message is the same."""
    made = pytest.importorskip("uvloop").new_event_loop if loop == "uvloop" else asyncio.new_event_loop
    reads: list[int] = []
    updated = TlsTransport.buffer_updated

    def counted(self: TlsTransport, nbytes: int) -> None:
        reads.append(nbytes)
        updated(self, nbytes)

    async def main() -> None:
        service = Recorder(Connection(config(container_id="you"), Role.SERVER))
        client = Client(bytes(range(256)) * 4000)
        tls = authority.server("localhost") if is_tls else None
        make = lambda: ConnectionProtocol(service.engine, service)  # noqa: E731 - it is one expression
        async with asyncio.timeout(20), served(make, tls=tls, is_websocket=False) as port:
            route = Route("localhost", port, client_tls(str(authority.file)) if is_tls else None)
            protocol = await dial(client.engine, client, route)
            await protocol.wait_closed()
            await service.gone.wait()
        assert only(service.events, Messages).payloads == [client.payload]

    monkeypatch.setattr(TlsTransport, "buffer_updated", counted)
    with asyncio.Runner(loop_factory=made) as runner:
        runner.run(main())
    assert bool(reads) is is_tls


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_tls_stream_that_ends_gives_all_that_came_before(authority: Authority, loop: str) -> None:
    """A peer that sends much and closes at once, and a reader that pauses now and then: no byte is lost or changed."""
    made = pytest.importorskip("uvloop").new_event_loop if loop == "uvloop" else asyncio.new_event_loop
    data = random.Random(4).randbytes(3_000_000)

    class Reading(asyncio.Protocol):
        def __init__(self) -> None:
            self.parts: list[bytes] = []
            self.over = asyncio.get_running_loop().create_future()

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            self.stream = cast("asyncio.Transport", transport)  # not checked: uvloop's TLS streams are none

        def data_received(self, data: bytes) -> None:
            self.parts.append(data)
            self.stream.pause_reading()
            asyncio.get_running_loop().call_soon(self.stream.resume_reading)

        def connection_lost(self, exc: Exception | None) -> None:
            self.over.set_result(exc)

    class Giving(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            stream = cast("asyncio.Transport", transport)
            stream.write(data)
            stream.close()

    async def main() -> None:
        server = await asyncio.get_running_loop().create_server(
            Giving, "127.0.0.1", 0, ssl=authority.server("localhost")
        )
        async with _closing(server), asyncio.timeout(20):
            route = Route("localhost", server.sockets[0].getsockname()[1], client_tls(str(authority.file)))
            reading = await open_stream(Reading, route)
            assert await reading.over is None
        assert b"".join(reading.parts) == data

    with asyncio.Runner(loop_factory=made) as runner:
        runner.run(main())


@pytest.mark.parametrize("is_websocket", [False, True], ids=["tcp", "websocket"])
async def test_connection_cut_by_the_server_is_reported_once(is_websocket: bool) -> None:
    """A stream cut by the server is reported as a lost connection, once."""
    service = Recorder(Connection(config(), Role.SERVER))

    class Cutting(ConnectionProtocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            self.abort()

    client = Client()
    make = lambda: Cutting(service.engine, service)  # noqa: E731 - it is one expression
    async with asyncio.timeout(20), served(make, tls=None, is_websocket=is_websocket) as port:
        protocol = await dial(client.engine, client, Route("127.0.0.1", port, is_websocket=is_websocket))
        await protocol.wait_closed()
    error = only(client.events, Closed).error
    assert error is not None
    assert error.condition == "amqp:connection:forced"
    assert len(client.closed) == 1


async def test_connect_with_an_untrusted_certificate_gives_up(authority: Authority) -> None:
    """A certificate of an authority that is not trusted is an error to give up on."""
    service = Recorder(Connection(config(), Role.SERVER))
    make = lambda: ConnectionProtocol(service.engine, service)  # noqa: E731 - it is one expression
    async with served(make, tls=authority.server("localhost"), is_websocket=False) as port:
        error = await lost(Route("localhost", port, client_tls()))
    assert str(error).startswith(f"the certificate of localhost:{port} was refused: ")
    assert error.recovery is Recovery.GIVE_UP


async def test_connect_to_a_closed_port_may_be_retried() -> None:
    """A port without a listener is a retryable error; of the two ends it names the one that is missing."""
    async with answering(saying(OPEN)) as port:
        pass
    error = await lost(Route("127.0.0.1", port))
    assert str(error) == f"cannot connect to 127.0.0.1:{port}: Connection refused"
    assert error.recovery is Recovery.RECONNECT
    error = await lost(Route("127.0.0.1", 1, proxy=ProxySettings.parse(f"127.0.0.1:{port}")))
    assert str(error) == f"cannot connect to the proxy 127.0.0.1:{port}: Connection refused"


def test_connect_always_verifies_tls(authority: Authority) -> None:
    """TLS is 1.2 at least, host names and certificates are verified; of the system's authorities or of one's own."""
    for context in (client_tls(), client_tls(str(authority.file))):
        assert context.minimum_version is ssl.TLSVersion.TLSv1_2
        assert context.check_hostname
        assert context.verify_mode is ssl.CERT_REQUIRED
    assert len(client_tls(str(authority.file)).get_ca_certs()) == 1


async def test_tls_alert_after_the_handshake_is_reported(authority: Authority) -> None:
    """What TLS refuses after the handshake is reported in its words, not as a stream that ended."""
    tls = authority.server("127.0.0.1")
    tls.verify_mode = ssl.CERT_REQUIRED
    authority.ca.configure_trust(tls)

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # By hand, because a server of asyncio does not send its alert.
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        handshake = tls.wrap_bio(incoming, outgoing, server_side=True)
        while True:
            try:
                handshake.do_handshake()
            except ssl.SSLWantReadError:
                writer.write(outgoing.read())
                incoming.write(await reader.read(65_536))
            except ssl.SSLError:
                break
        writer.write(outgoing.read())
        writer.write_eof()
        await reader.read()

    async with answering(refuse) as port:
        for is_websocket in (False, True):
            error = await lost(Route("127.0.0.1", port, client_tls(str(authority.file)), is_websocket))
            assert "TLS: tlsv13 alert certificate required" in str(error)


async def test_connect_to_a_peer_that_ends_the_handshake(authority: Authority) -> None:
    """A peer that hangs up where TLS begins is reported as such, by a proxy or not."""

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(10)

    async def open_and_hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await saying(OPEN)(reader, writer)
        await reader.read(10)

    tls = client_tls(str(authority.file))
    async with answering(hang_up) as port, answering(open_and_hang_up) as proxy:
        error = await lost(Route("127.0.0.1", port, tls))
        assert str(error) == f"cannot connect to 127.0.0.1:{port}: it was closed in the TLS handshake"
        error = await lost(Route("ns.test", 443, tls, proxy=ProxySettings.parse(f"127.0.0.1:{proxy}")))
        where = f"ns.test:443 through the proxy 127.0.0.1:{proxy}"
        assert str(error) == f"cannot connect to {where}: it was closed in the TLS handshake"


@pytest.mark.parametrize("is_tls", [False, True], ids=["plain", "tls"])
async def test_connect_through_a_proxy_that_closes_at_once(authority: Authority, is_tls: bool) -> None:
    """A proxy that opens a tunnel and closes it in the same breath leaves no stream that is not reported."""
    async with answering(saying(OPEN)) as port:
        tls = client_tls(str(authority.file)) if is_tls else None
        error = await lost(Route("ns.test", 443, tls, proxy=ProxySettings.parse(f"127.0.0.1:{port}")))
    assert error.recovery is Recovery.RECONNECT


@pytest.mark.parametrize(
    ("stage", "is_websocket"),
    [("tunnel", False), ("tls", False), ("tunnel", True), ("tls", True), ("handshake", True)],
)
async def test_connect_that_is_cancelled_leaves_no_stream(authority: Authority, stage: str, is_websocket: bool) -> None:
    """Cancelled while it waits for the proxy, for TLS or for a WebSocket, it leaves no stream behind."""
    reached = asyncio.Event()
    ended = asyncio.Event()

    async def wait(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if stage != "tunnel":
            writer.write(OPEN)
            await reader.readexactly(1)
        reached.set()
        with contextlib.suppress(ConnectionError):
            await reader.read()
        ended.set()

    tls = client_tls(str(authority.file)) if stage == "tls" else None
    async with asyncio.timeout(20), answering(wait) as port:
        client = Client()
        route = Route("ns.test", 443, tls, is_websocket, ProxySettings.parse(f"127.0.0.1:{port}"))
        dialling = asyncio.create_task(dial(client.engine, client, route))
        await reached.wait()
        dialling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await dialling
        await ended.wait()
    assert client.closed in ([], [None])


def test_route_text_names_service_and_proxy_without_credentials() -> None:
    """In errors a route is its service, and its proxy without credentials."""
    assert str(Route("ns.test", 5671)) == "ns.test:5671"
    route = Route("ns.test", 443, proxy=ProxySettings.parse("http://me:S3CRET@proxy.test:3128"))
    assert str(route) == "ns.test:443 through the proxy proxy.test:3128"
    assert "S3CRET" not in repr(route)
