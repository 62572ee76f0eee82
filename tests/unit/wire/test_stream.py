"""The shell of a connection: deadlines on virtual time, slow and silent peers; and real sockets with TLS."""

from __future__ import annotations

import asyncio
import ssl
from typing import Any, cast

import pytest
import trustme

from eventpump.amqp.connection import (
    AMQP_HEADER,
    EMPTY_FRAME,
    SASL_HEADER,
    Closed,
    Connection,
    ConnectionConfig,
    Event,
    LinkAttached,
    Messages,
    Opened,
    Role,
    SaslRequested,
    SessionBegun,
)
from eventpump.amqp.performatives import Begin, Close, Flow, Open, SaslInit, Source, Target
from eventpump.errors import ConnectionLostError, Recovery
from eventpump.testing.clock import VirtualClock
from eventpump.wire import stream
from eventpump.wire.route import Route, client_tls, dial
from eventpump.wire.stream import CLOSE_TIMEOUT, ConnectionProtocol
from tests.unit.amqp.pair import config, frame, only


class MemoryTransport(asyncio.Transport):
    """A byte stream to a peer that takes bytes, or not.

    :ivar written: what the peer has taken.
    :ivar ended: when the stream was gone, and whether it was cut; None before.
    """

    def __init__(self, protocol: ConnectionProtocol) -> None:
        super().__init__()
        self.written = b""
        self.is_peer_reading = True
        self.ended: tuple[float, bool] | None = None
        self.is_reading_here = True
        self._protocol = protocol
        self._loop = asyncio.get_running_loop()
        self._held = bytearray()
        self._high = 1 << 16
        self._is_paused = False
        self._is_closing = False
        protocol.connection_made(self)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        assert high is not None
        assert low is None
        self._high = high

    def get_write_buffer_size(self) -> int:
        return len(self._held)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert not self._is_closing, "written after close"
        self._held += data
        self._move()

    def read(self, *, on: bool = True) -> None:
        """Let the peer read, or stop."""
        self.is_peer_reading = on
        self._move()

    def _move(self) -> None:
        if self.is_peer_reading:
            self.written += self._held
            self._held.clear()
            if self._is_closing:
                self._end(cut=False)
        if (len(self._held) > self._high) is not self._is_paused:
            self._is_paused = not self._is_paused
            if self._is_paused:
                self._protocol.pause_writing()
            else:
                self._protocol.resume_writing()

    def pause_reading(self) -> None:
        self.is_reading_here = False

    def resume_reading(self) -> None:
        self.is_reading_here = True

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            self._move()

    def abort(self) -> None:
        self._is_closing = True
        self._end(cut=True)

    def _end(self, *, cut: bool) -> None:
        if self.ended is None:
            self.ended = self._loop.time(), cut
            self._loop.call_soon(self._protocol.connection_lost, ConnectionAbortedError() if cut else None)


class Recorder:
    """A handler that keeps what it is told."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.writable = 0
        self.closed: list[Exception | None] = []
        self.gone = asyncio.Event()
        self.engine: Connection | None = None

    def on_events(self, events: list[Event]) -> None:
        assert not self.closed
        self.events += events
        for event in events:
            if isinstance(event, SaslRequested):
                assert self.engine is not None
                self.engine.sasl_outcome(ok=True)
            elif isinstance(event, LinkAttached) and event.link.is_remote_initiated:
                event.link.accept()
                event.link.set_credit(100)

    def on_writable(self) -> None:
        self.writable += 1

    def on_closed(self, error: Exception | None) -> None:
        self.closed.append(error)
        self.gone.set()


OPENING = SASL_HEADER + frame(0, SaslInit("ANONYMOUS"), kind=1) + AMQP_HEADER


def serve(
    *, idle_timeout: float | None = None, peer_idle_ms: int | None = None, opened: bool = True
) -> tuple[ConnectionProtocol, MemoryTransport, Recorder]:
    """Give a server's end whose peer is written by hand."""
    handler = Recorder()
    handler.engine = Connection(config(idle_timeout=idle_timeout), Role.SERVER)
    protocol = ConnectionProtocol(handler.engine, handler)
    transport = MemoryTransport(protocol)
    if opened:
        # Everything at once, as a client that does not wait for the SASL outcome.
        protocol.data_received(OPENING + frame(0, Open("peer", idle_time_out=peer_idle_ms)))
        assert handler.engine.is_open
    return protocol, transport, handler


async def test_pipelining_client_is_answered() -> None:
    """A client that sends everything at once is opened in one go."""
    protocol, transport, _ = serve()
    assert protocol.connection.is_open
    assert transport.written.startswith(SASL_HEADER)
    assert AMQP_HEADER in transport.written


async def test_heartbeats() -> None:
    """Heartbeats come at half of the peer's idle time-out after the last byte sent, and not before."""
    protocol, transport, _ = serve(peer_idle_ms=20_000)
    transport.written = b""
    await asyncio.sleep(9.9)
    assert transport.written == b""
    await asyncio.sleep(0.2)
    assert transport.written == EMPTY_FRAME
    await asyncio.sleep(5)
    protocol.connection.output.append(b"traffic")
    protocol.flush()
    transport.written = b""
    # The timer is not moved by traffic: it finds itself early, and then waits for the rest.
    await asyncio.sleep(9.9)
    assert transport.written == b""
    await asyncio.sleep(0.2)
    assert transport.written == EMPTY_FRAME
    protocol.abort()
    await protocol.wait_closed()


async def test_an_hour_of_heartbeats() -> None:
    """Heartbeats go on, evenly, and keep an otherwise silent connection alive."""
    protocol, transport, _ = serve(peer_idle_ms=60_000)
    transport.written = b""
    await asyncio.sleep(3601)
    assert transport.written == EMPTY_FRAME * 120
    assert protocol.connection.is_open
    protocol.abort()
    await protocol.wait_closed()


@pytest.mark.parametrize("is_open", [True, False])
async def test_idle_time_out(clock: VirtualClock, is_open: bool) -> None:
    """A peer that is silent for the idle time-out is closed, whether it opened or not; a byte defers it."""
    protocol, transport, handler = serve(idle_timeout=30.0, opened=is_open)
    began = clock.monotonic()
    await asyncio.sleep(20)
    protocol.data_received(EMPTY_FRAME if is_open else SASL_HEADER)
    await asyncio.sleep(20)
    assert not handler.closed
    await protocol.wait_closed()
    assert clock.monotonic() - began == pytest.approx(50, abs=0.1)
    error = only(handler.events, Closed).error
    assert error is not None
    assert error.condition == "amqp:resource-limit-exceeded"
    assert handler.closed == [None]
    assert (b"resource-limit-exceeded" in transport.written) is is_open


async def test_no_idle_time_out() -> None:
    """Without an idle time-out, silence is fine for ever."""
    protocol, _, handler = serve()
    await asyncio.sleep(100_000)
    assert handler.closed == []
    protocol.abort()
    await protocol.wait_closed()
    assert only(handler.events, Closed).is_local


async def test_orderly_close() -> None:
    """A close by the peer is answered, told, and ends the stream, once."""
    protocol, transport, handler = serve(idle_timeout=30.0, peer_idle_ms=10_000)
    protocol.data_received(frame(0, Close()))
    await protocol.wait_closed()
    assert transport.written.endswith(frame(0, Close()))
    assert only(handler.events, Closed) == Closed(None)
    assert handler.closed == [None]
    protocol.finish()
    protocol.abort()
    protocol.flush()
    await asyncio.sleep(100)
    assert handler.closed == [None]


async def test_broken_rules_are_told() -> None:
    """A peer that breaks a rule learns which, and the stream ends."""
    protocol, transport, _ = serve()
    protocol.data_received(b"\xff" * 8)
    await protocol.wait_closed()
    assert b"amqp:connection:framing-error" in transport.written


@pytest.mark.parametrize("way", ["finish", "close", "eof", "idle"])
async def test_peer_that_does_not_read(clock: VirtualClock, way: str) -> None:
    """The last bytes wait for a peer that does not read, but not for ever, however the connection ended."""
    protocol, transport, handler = serve(idle_timeout=60.0)
    transport.read(on=False)
    protocol.connection.output.append(b"x" * 100)
    protocol.flush()
    began = clock.monotonic()
    match way:
        case "finish":
            protocol.connection.close()
            protocol.finish()
        case "close":
            protocol.data_received(frame(0, Close()))
        case "eof":
            assert protocol.eof_received() is False
        case "idle":
            began += 60
    await protocol.wait_closed()
    assert transport.ended is not None
    ended, was_cut = transport.ended
    assert ended == pytest.approx(began + CLOSE_TIMEOUT, abs=0.1)
    assert was_cut
    assert len(handler.closed) == 1


async def test_finished_by_its_handler(clock: VirtualClock) -> None:
    """A handler may finish the stream from within an event; a peer that does not read is cut off all the same."""

    class Finishing(Recorder):
        def on_events(self, events: list[Event]) -> None:
            super().on_events(events)
            if any(isinstance(event, Opened) for event in events):
                protocol.finish()

    handler = Finishing()
    handler.engine = Connection(config(idle_timeout=60.0), Role.SERVER)
    protocol = ConnectionProtocol(handler.engine, handler)
    transport = MemoryTransport(protocol)
    protocol.data_received(OPENING)
    transport.read(on=False)
    began = clock.monotonic()
    protocol.data_received(frame(0, Open("peer", idle_time_out=20_000)))
    await protocol.wait_closed()
    assert clock.monotonic() - began == pytest.approx(CLOSE_TIMEOUT, abs=0.1)


async def test_last_bytes_of_a_slow_peer() -> None:
    """A peer that reads in time gets the last bytes, and the stream then ends without being cut."""
    protocol, transport, _ = serve()
    transport.read(on=False)
    protocol.connection.output.append(b"the last")
    protocol.finish()
    await asyncio.sleep(CLOSE_TIMEOUT / 2)
    transport.read()
    await protocol.wait_closed()
    assert transport.written.endswith(b"the last")
    assert transport.ended is not None
    assert not transport.ended[1]


async def test_pause_and_resume() -> None:
    """A slow peer pauses the writers; when it reads again they are told."""
    protocol, transport, handler = serve()
    seen = [(protocol.is_paused, handler.writable)]
    transport.read(on=False)
    protocol.connection.output.append(b"x" * 600_000)
    protocol.flush()
    seen.append((protocol.is_paused, handler.writable))
    transport.read()
    seen.append((protocol.is_paused, handler.writable))
    assert seen == [(False, 0), (True, 0), (False, 1)]
    protocol.abort()
    await protocol.wait_closed()


async def test_answers_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that asks and asks, and reads no answer, is not read any more; when it reads, it is again."""
    monkeypatch.setattr(stream, "_READ_STOP", 600_000)  # enough, and sooner there
    protocol, transport, _ = serve()
    protocol.data_received(frame(0, Begin(None, 0, 10, 10)))
    transport.read(on=False)
    question = frame(0, Flow(0, 10, 0, 10, echo=True)) * 2000
    for _ in range(100):
        if transport.is_reading_here:
            protocol.data_received(question)
    assert 600_000 < transport.get_write_buffer_size() < 900_000
    transport.read()
    assert transport.is_reading_here
    assert protocol.connection.is_open
    protocol.abort()
    await protocol.wait_closed()


async def test_flush_soon() -> None:
    """What is queued in one turn of the loop goes out in one write, after the turn."""
    protocol, transport, _ = serve()
    transport.written = b""
    for part in (b"a", b"b", b"c"):
        protocol.connection.output.append(part)
        protocol.flush_soon()
    assert transport.written == b""
    await asyncio.sleep(0)
    assert transport.written == b"abc"
    protocol.abort()
    await protocol.wait_closed()
    protocol.flush_soon()
    await asyncio.sleep(0)


async def test_refused_credential() -> None:
    """A refused client gets the outcome, and the stream ends."""
    protocol, transport, handler = serve(opened=False)
    assert handler.engine is not None
    engine = handler.engine
    refuse: Any = lambda *, ok: Connection.sasl_outcome(engine, ok=False)  # noqa: E731 - whatever is asked
    engine.sasl_outcome = refuse  # type: ignore[method-assign]  # this server trusts nobody
    protocol.data_received(OPENING)
    await protocol.wait_closed()
    assert transport.written.endswith(b"\x00\x53\x44\xc0\x04\x02\x50\x01\x40")
    assert handler.closed == [None]


# -------------------------------------------------------------------------------------------- real sockets


async def start(handler: Recorder, tls: ssl.SSLContext | None = None) -> tuple[asyncio.Server, int]:
    """Serve one engine on a loopback port."""
    handler.engine = Connection(config(container_id="you"), Role.SERVER)
    engine = handler.engine
    server = await asyncio.get_running_loop().create_server(
        lambda: ConnectionProtocol(engine, handler), "127.0.0.1", 0, ssl=tls
    )
    return server, server.sockets[0].getsockname()[1]


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    """A certificate authority of our own."""
    return trustme.CA()


class Client(Recorder):
    """A client that attaches one sender and sends one large message; `done` is set when the stream is gone."""

    def __init__(self, payload: bytes) -> None:
        super().__init__()
        self.engine = Connection(ConnectionConfig(container_id="me", hostname="localhost"), Role.CLIENT)
        self.engine.start()
        self.payload = payload
        self.protocol: ConnectionProtocol | None = None

    def on_events(self, events: list[Event]) -> None:
        super().on_events(events)
        assert self.engine is not None
        for event in events:
            match event:
                case Opened():
                    self.engine.begin()
                case SessionBegun(session):
                    session.attach("up", is_receiver=False, source=Source(), target=Target("there"))
                case _ if type(event).__name__ == "CreditChanged":
                    cast("Any", event).link.send(self.payload, settled=True)
                    self.engine.close()
                case _:
                    pass


@pytest.mark.real_time
@pytest.mark.parametrize("is_tls", [False, True])
async def test_loopback(authority: trustme.CA, is_tls: bool, tmp_path: Any) -> None:
    """Over real sockets, plain and TLS, a message of many frames arrives, and both ends close in order."""
    server_tls = client_context = None
    if is_tls:
        server_tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        authority.issue_cert("localhost").configure_cert(server_tls)
        ca_file = tmp_path / "ca.pem"
        authority.cert_pem.write_to_path(str(ca_file))
        client_context = client_tls(str(ca_file))
    service = Recorder()
    server, port = await start(service, server_tls)
    client = Client(bytes(range(256)) * 20_000)
    assert client.engine is not None
    async with asyncio.timeout(20):
        protocol = await dial(client.engine, client, Route("localhost", port, client_context))
        await protocol.wait_closed()
        server.close()
        await server.wait_closed()
        await service.gone.wait()
    assert only(service.events, Messages).payloads == [client.payload]
    assert only(client.events, Closed).error is None
    assert only(service.events, Closed).error is None


@pytest.mark.real_time
async def test_untrusted_certificate(authority: trustme.CA) -> None:
    """A certificate of an authority that is not trusted is an error, and leaves no stream."""
    server_tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("localhost").configure_cert(server_tls)
    service = Recorder()
    server, port = await start(service, server_tls)
    client = Client(b"")
    assert client.engine is not None
    with pytest.raises(ConnectionLostError, match=f"certificate of localhost:{port} was refused") as caught:
        await dial(client.engine, client, Route("localhost", port, client_tls()))
    assert caught.value.recovery is Recovery.GIVE_UP
    server.close()


@pytest.mark.real_time
async def test_nobody_listens() -> None:
    """A port nobody listens on is a connection lost, to try again."""
    service = Recorder()
    server, port = await start(service)
    server.close()
    await server.wait_closed()
    client = Client(b"")
    assert client.engine is not None
    with pytest.raises(ConnectionLostError, match=f"cannot connect to 127.0.0.1:{port}: Connection refused") as caught:
        await dial(client.engine, client, Route("127.0.0.1", port))
    assert caught.value.recovery is Recovery.RECONNECT


@pytest.mark.real_time
async def test_server_gone() -> None:
    """A stream cut by the server is told as a lost connection."""
    service = Recorder()
    engine = service.engine = Connection(config(), Role.SERVER)

    class Cutting(ConnectionProtocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            self.abort()

    server = await asyncio.get_running_loop().create_server(lambda: Cutting(engine, service), "127.0.0.1", 0)
    client = Client(b"")
    assert client.engine is not None
    protocol = await dial(client.engine, client, Route("127.0.0.1", server.sockets[0].getsockname()[1]))
    async with asyncio.timeout(20):
        await protocol.wait_closed()
    error = only(client.events, Closed).error
    assert error is not None
    assert error.condition == "amqp:connection:forced"
    assert len(client.closed) == 1
    server.close()
