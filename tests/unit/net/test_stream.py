"""The shell of a connection: deadlines on virtual time, slow and silent peers."""

from __future__ import annotations

import asyncio
import logging
import random
import socket
import ssl
import struct
from asyncio import sslproto
from contextlib import suppress
from typing import Any

import pytest
import trustme

from eventpump.amqp.connection import (
    AMQP_HEADER,
    EMPTY_FRAME,
    FRAME_COST,
    SASL_HEADER,
    Closed,
    Connection,
    Event,
    LinkAttached,
    LinkDetached,
    Messages,
    Opened,
    Role,
    SaslRequested,
)
from eventpump.amqp.performatives import Attach, Begin, Close, Detach, Flow, Open, SaslInit, Source, Target, Transfer
from eventpump.net import stream
from eventpump.net.stream import CLOSE_TIMEOUT, BufferedReads, ConnectionProtocol
from eventpump.testing.clock import VirtualClock
from tests.support.seeds import seeds
from tests.unit.amqp.pair import config, frame, only, sent
from tests.unit.net.ends import Recorder


class MemoryTransport(asyncio.Transport):
    """A byte stream to a peer that takes bytes, or not.

    Attributes:
        written: What the peer has taken.
        reading: Set while this end reads.
        ended: When the stream was gone, and whether it was cut; None before.
        peer: Gets what the peer sends.
    """

    def __init__(self, protocol: ConnectionProtocol) -> None:
        super().__init__()
        self.written = b""
        self.is_peer_reading = True
        self.ended: tuple[float, bool] | None = None
        self.reading = asyncio.Event()
        self.reading.set()
        self.peer: asyncio.Protocol = protocol
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
                self.peer.pause_writing()
            else:
                self.peer.resume_writing()

    @property
    def is_reading_here(self) -> bool:
        return self.reading.is_set()

    def pause_reading(self) -> None:
        self.reading.clear()

    def resume_reading(self) -> None:
        self.reading.set()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        assert isinstance(protocol, asyncio.Protocol)
        self.peer = protocol

    def can_write_eof(self) -> bool:
        return True

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
            self._loop.call_soon(self.peer.connection_lost, ConnectionAbortedError() if cut else None)


OPENING = SASL_HEADER + frame(0, SaslInit("ANONYMOUS"), kind=1) + AMQP_HEADER


def serve(
    *,
    idle_timeout: float | None = None,
    peer_idle_ms: int | None = None,
    opened: bool = True,
    make: type[Connection] = Connection,
) -> tuple[ConnectionProtocol, MemoryTransport, Recorder]:
    """Return a server's end whose peer is written by hand."""
    handler = Recorder(make(config(idle_timeout=idle_timeout), Role.SERVER))
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


async def test_heartbeats_come_at_half_of_the_peers_idle_time_out() -> None:
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


async def test_heartbeats_keep_a_silent_connection_for_an_hour() -> None:
    """Heartbeats go on, evenly, and keep an otherwise silent connection alive."""
    protocol, transport, _ = serve(peer_idle_ms=60_000)
    transport.written = b""
    await asyncio.sleep(3601)
    assert transport.written == EMPTY_FRAME * 120
    assert protocol.connection.is_open
    protocol.abort()
    await protocol.wait_closed()


@pytest.mark.parametrize("is_open", [True, False])
async def test_silent_peer_is_closed_at_the_idle_time_out(clock: VirtualClock, is_open: bool) -> None:
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


async def test_silent_peer_is_kept_without_an_idle_time_out() -> None:
    """Without an idle time-out, silence is fine forever."""
    protocol, _, handler = serve()
    await asyncio.sleep(100_000)
    assert handler.closed == []
    protocol.abort()
    await protocol.wait_closed()
    assert only(handler.events, Closed).is_local


async def test_close_by_the_peer_is_answered_and_ends_the_stream() -> None:
    """A close by the peer is answered, reported, and ends the stream, once."""
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


async def test_broken_rule_is_reported_to_the_peer() -> None:
    """A peer that breaks a rule gets which one, and the end of the stream."""
    protocol, transport, _ = serve()
    protocol.data_received(b"\xff" * 8)
    assert b"amqp:connection:framing-error" in transport.written
    assert not transport.is_closing()
    await protocol.wait_closed()


@pytest.mark.parametrize("ends", [True, False], ids=["ends", "goes on"])
async def test_peer_that_broke_a_rule_is_read_until_it_ends(clock: VirtualClock, ends: bool) -> None:
    """What it still sends is read and dropped, for a second at most: a reset would overtake the close."""
    protocol, transport, handler = serve()
    protocol.data_received(b"\xff" * 8)
    began, written = clock.monotonic(), transport.written
    for _ in range(4):
        await asyncio.sleep(0.2)
        assert not transport.is_closing()
        assert transport.is_reading_here
        transport.peer.data_received(bytes(1 << 20))
    if ends:
        assert not transport.peer.eof_received()
        transport.close()  # asyncio does, for a protocol that does not want to write on
    await protocol.wait_closed()
    assert transport.ended is not None
    ended, was_cut = transport.ended
    assert ended == pytest.approx(began + (0.8 if ends else stream.LINGER))
    assert not was_cut
    assert transport.written == written
    assert only(handler.events, Closed).is_local
    assert handler.closed == [None]


async def test_peer_that_broke_a_rule_and_does_not_read_has_one_deadline(clock: VirtualClock) -> None:
    """The wait for its end is part of the time that a closing connection may take."""
    protocol, transport, _ = serve()
    transport.read(on=False)
    began = clock.monotonic()
    protocol.data_received(b"\xff" * 8)
    await protocol.wait_closed()
    assert transport.ended is not None
    ended, was_cut = transport.ended
    assert ended == pytest.approx(began + CLOSE_TIMEOUT)
    assert was_cut


async def test_finish_ends_the_wait_for_a_peer_that_broke_a_rule(clock: VirtualClock) -> None:
    """A service that stops does not wait; what is waiting to be sent is sent."""
    protocol, transport, handler = serve()
    protocol.data_received(b"\xff" * 8)
    began = clock.monotonic()
    protocol.finish(lingers=True)
    assert not transport.is_closing()
    protocol.finish()
    await protocol.wait_closed()
    assert transport.ended is not None
    ended, was_cut = transport.ended
    assert ended == pytest.approx(began)
    assert not was_cut
    assert handler.closed == [None]


@pytest.mark.parametrize("is_reading", [True, False], ids=["read", "paused"])
async def test_peer_that_broke_a_rule_and_reset_the_stream_is_gone(
    caplog: pytest.LogCaptureFixture, is_reading: bool
) -> None:
    """Over a socket: the connection ends at once, though it was not read when the reset came, and nothing is logged."""
    made: list[tuple[ConnectionProtocol, Recorder]] = []

    def make() -> ConnectionProtocol:
        handler = Recorder(Connection(config(), Role.SERVER))
        made.append((ConnectionProtocol(handler.engine, handler), handler))
        return made[-1][0]

    loop = asyncio.get_running_loop()
    problems: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: problems.append(context))
    server = await loop.create_server(make, "127.0.0.1")
    with socket.create_connection(server.sockets[0].getsockname()) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.setblocking(False)
        await loop.sock_sendall(client, SASL_HEADER)
        await loop.sock_recv(client, 1000)
    # The reset is there, and is not read yet: this turn of the loop is the one in which `client` was closed.
    ((protocol, handler),) = made
    if not is_reading:
        transport = protocol._transport
        assert transport is not None
        transport.pause_reading()
        protocol._is_reading = False
    protocol.data_received(b"\0" * 16)
    await asyncio.wait_for(protocol.wait_closed(), 0.5)
    assert len(handler.closed) == 1
    assert not problems
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    server.close()
    await server.wait_closed()


async def test_client_does_not_linger() -> None:
    """A client that closes because of what the service sent goes on at once."""
    handler = Recorder(Connection(config(), Role.CLIENT))
    protocol = ConnectionProtocol(handler.engine, handler)
    handler.engine.start()
    transport = MemoryTransport(protocol)
    protocol.data_received(b"\xff" * 8)
    assert transport.ended is not None
    await protocol.wait_closed()


@pytest.mark.parametrize("end", ["finish", "close", "eof", "idle"])
async def test_close_waits_a_bounded_time_for_a_peer_that_does_not_read(clock: VirtualClock, end: str) -> None:
    """The last bytes wait for a peer that does not read, but not forever, however the connection ended."""
    protocol, transport, handler = serve(idle_timeout=60.0)
    transport.read(on=False)
    protocol.connection.output.append(b"x" * 100)
    protocol.flush()
    began = clock.monotonic()
    match end:
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


async def test_finish_from_within_an_event_cuts_off_the_peer(clock: VirtualClock) -> None:
    """A handler may finish the stream from within an event; a peer that does not read is cut off all the same."""

    class Finishing(Recorder):
        def on_events(self, events: list[Event]) -> None:
            super().on_events(events)
            if any(isinstance(event, Opened) for event in events):
                protocol.finish()

    handler = Finishing(Connection(config(idle_timeout=60.0), Role.SERVER))
    protocol = ConnectionProtocol(handler.engine, handler)
    transport = MemoryTransport(protocol)
    protocol.data_received(OPENING)
    transport.read(on=False)
    began = clock.monotonic()
    protocol.data_received(frame(0, Open("peer", idle_time_out=20_000)))
    await protocol.wait_closed()
    assert clock.monotonic() - began == pytest.approx(CLOSE_TIMEOUT, abs=0.1)


async def test_finish_gives_a_slow_peer_the_last_bytes() -> None:
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


async def test_slow_peer_pauses_the_writers_until_it_reads() -> None:
    """A slow peer pauses the writers; when it reads again they are notified."""
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


async def test_peer_that_reads_no_answers_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that asks and asks, and reads no answer, is not read any more; when it reads, it is again."""
    monkeypatch.setattr(stream, "_READ_STOP", 600_000)  # enough, and sooner there
    protocol, transport, _ = serve()
    protocol.data_received(frame(0, Begin(None, 0, 10, 10)))
    transport.read(on=False)
    question = frame(0, Flow(0, 10, 0, 10, echo=True)) * 2000
    for _ in range(1000):
        if transport.is_reading_here:
            protocol.data_received(question)
        await asyncio.sleep(0)
    assert 600_000 < transport.get_write_buffer_size() < 650_000
    transport.read()
    async with asyncio.timeout(1):
        await transport.reading.wait()
    assert protocol.connection.is_open
    protocol.abort()
    await protocol.wait_closed()


ECHO = frame(0, Flow(0, 10, 0, 10, echo=True))
BEGIN = frame(0, Begin(None, 0, 10, 10))
FRAMES = stream._TURN // FRAME_COST
"""What is worked off in one turn."""


async def test_read_full_of_small_frames_is_done_in_turns() -> None:
    """A read full of small frames is worked off in turns: others are served meanwhile, and no more of it is read."""
    flooding, flooded, _ = serve()
    other, answered, _ = serve()
    flooding.data_received(BEGIN)
    other.data_received(BEGIN)
    flooded.written = answered.written = b""
    flooding.data_received(ECHO * 6000)
    turns = 0
    while not flooded.is_reading_here:
        taken = len(sent(flooded.written, Flow))
        assert 0 < taken <= FRAMES
        flooded.written = b""
        other.data_received(ECHO)
        assert len(sent(answered.written, Flow)) == turns + 1
        turns += 1
        await asyncio.sleep(0)
    assert turns == 6000 // FRAMES
    assert len(sent(flooded.written, Flow)) == 6000 % FRAMES
    for protocol in (flooding, other):
        protocol.abort()
        await protocol.wait_closed()


async def test_attaches_and_detaches_are_handled_in_turns() -> None:
    """What a flood asks of the handler is bounded by the same turns, in order."""
    protocol, transport, handler = serve()
    protocol.data_received(BEGIN)
    pair = frame(0, Attach("x", 0, True, source=Source("a"), target=Target("b"))) + frame(0, Detach(0, closed=True))
    handler.events.clear()
    protocol.data_received(pair * 1000)
    turns = [len(handler.events)]
    while not transport.is_reading_here:
        await asyncio.sleep(0)
        turns.append(len(handler.events) - sum(turns))
    assert max(turns) == FRAMES
    assert [type(event) for event in handler.events] == [LinkAttached, LinkDetached] * 1000
    protocol.abort()
    await protocol.wait_closed()


async def test_rest_of_a_read_is_dropped_when_the_stream_ends() -> None:
    """A stream that is lost, or finished, in the middle of a read's turns: the rest is not read."""
    protocol, transport, handler = serve()
    protocol.data_received(BEGIN + ECHO * 2000)
    assert not transport.is_reading_here
    protocol.abort()
    await protocol.wait_closed()
    assert only(handler.events, Closed).is_local
    protocol, transport, handler = serve()
    protocol.data_received(BEGIN + ECHO * 300 + frame(0, Close()) + ECHO * 300)
    await protocol.wait_closed()
    assert only(handler.events, Closed) == Closed(None)
    assert len(sent(transport.written, Flow)) == 300


@pytest.mark.parametrize("piece", [100, 4096, 65_536, 1 << 20])
async def test_pipelined_frames_are_served_however_they_are_cut(piece: int) -> None:
    """Valid frames behind the SASL choice are all answered, however the stream is cut and however many there are."""
    protocol, transport, _ = serve(opened=False)
    data = OPENING + frame(0, Open("peer")) + BEGIN + ECHO * 8000 + frame(0, Close())
    assert len(data) > 200_000
    for start in range(0, len(data), piece):
        await transport.reading.wait()
        protocol.data_received(data[start : start + piece])
    await protocol.wait_closed()
    assert len(sent(transport.written, Flow)) == 8000
    assert [each.error for each in sent(transport.written, Close)] == [None]


async def test_pipelined_frames_wait_for_a_late_sasl_outcome() -> None:
    """A server that looks a credential up takes its time: no turn is taken meanwhile, and nothing that came is lost."""

    class Patient(Recorder):
        def on_events(self, events: list[Event]) -> None:
            if any(isinstance(event, SaslRequested) for event in events):
                asyncio.get_running_loop().call_later(1, self.answer)
            else:
                super().on_events(events)

        def answer(self) -> None:
            self.engine.sasl_outcome(ok=True)
            protocol.data_received(b"")

    handler = Patient(Connection(config(), Role.SERVER))
    protocol = ConnectionProtocol(handler.engine, handler)
    MemoryTransport(protocol)
    protocol.data_received(OPENING + frame(0, Open("peer")))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not handler.engine.is_open
    async with asyncio.timeout(5):  # on virtual time, which stands still while turns are taken
        await asyncio.sleep(2)
    assert handler.engine.is_open


async def test_read_that_empties_the_socket_may_be_the_last_for_a_while() -> None:
    """Nothing is read for as long as the owner says, unless an answer is awaited when something is written."""
    protocol, transport, handler = serve(idle_timeout=30.0)
    seconds = 0.5
    protocol.hold_for = lambda: seconds
    protocol.data_received(EMPTY_FRAME)
    assert not transport.reading.is_set()
    await asyncio.sleep(0.4)
    assert not transport.reading.is_set()
    protocol.flush()  # nothing is awaited
    assert not transport.reading.is_set()
    await asyncio.sleep(0.2)
    assert transport.reading.is_set()
    protocol.data_received(EMPTY_FRAME)
    seconds = 0.0
    protocol.flush()
    assert transport.reading.is_set()
    protocol.data_received(EMPTY_FRAME)
    assert transport.reading.is_set()
    # The loop was blocked for longer than the peer may be silent: what has come meanwhile is read first.
    seconds = 0.5
    protocol.data_received(EMPTY_FRAME)
    VirtualClock().block(40)
    await asyncio.sleep(0.1)
    assert transport.reading.is_set()
    assert not handler.closed
    # A large read is not the last one of what has come: the beginning of a frame of 128 KiB.
    protocol.data_received(b"\x00\x02\x00\x00\x02\x00\x00\x00" + bytes(64 * 1024))
    assert transport.reading.is_set()
    protocol.data_received(bytes(10))
    assert not transport.reading.is_set()
    protocol.abort()
    await protocol.wait_closed()
    assert protocol.hold_for is None


async def test_flush_soon_writes_once_after_the_turn() -> None:
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


class Distrustful(Connection):
    """A server that trusts no one."""

    def sasl_outcome(self, *, ok: bool) -> None:
        super().sasl_outcome(ok=False)


async def test_refused_credential_gets_the_outcome_and_ends_the_stream() -> None:
    """A refused client gets the outcome, and the stream ends."""
    protocol, transport, handler = serve(opened=False, make=Distrustful)
    protocol.data_received(OPENING)
    await protocol.wait_closed()
    assert transport.written.endswith(b"\x00\x53\x44\xc0\x04\x02\x50\x01\x40")
    assert handler.closed == [None]


# ------------------------------------------------------------------------------------------------- output


class SlowTransport(MemoryTransport):
    """A byte stream to a peer that takes a part now and then, and counts what it was given.

    Attributes:
        given: All that was written.
        largest: The size of the largest write.
    """

    def __init__(self, protocol: ConnectionProtocol) -> None:
        self.given = bytearray()
        self.largest = 0
        super().__init__(protocol)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.given += data
        self.largest = max(self.largest, len(data))
        super().write(data)

    def take(self, size: int) -> None:
        """Let the peer read so many bytes."""
        self.written += self._held[:size]
        del self._held[:size]
        self._move()


def slow() -> tuple[ConnectionProtocol, SlowTransport, Recorder]:
    """Return an open server's end whose peer does not read by itself."""
    handler = Recorder(Connection(config(), Role.SERVER))
    protocol = ConnectionProtocol(handler.engine, handler)
    transport = SlowTransport(protocol)
    protocol.data_received(OPENING + frame(0, Open("peer")))
    transport.read(on=False)
    transport.written = b""
    transport.given.clear()
    return protocol, transport, handler


def a_batch(number: int) -> list[bytes | memoryview]:
    """Return a message of 1 MiB as a link queues it: frame by frame, without copies."""
    message = memoryview(bytes([number]) * (1 << 20))
    size = 65_536 - 50
    pieces: list[bytes | memoryview] = []
    for start in range(0, len(message), size):
        pieces += (b"h" * 50, message[start : start + size])
    return pieces


async def test_large_message_is_written_in_chunks_while_the_peer_reads() -> None:
    """No write is of the size of the message, and a peer that does not read is given little more than the limit."""
    protocol, transport, handler = slow()
    expected = b""
    for number in range(3):
        pieces = a_batch(number)
        expected += b"".join(pieces)
        protocol.connection.output += pieces
        protocol.flush()
        assert protocol.unsent == len(expected)
    assert protocol.is_paused
    assert transport.largest <= 2 * 65_536
    assert 0 < transport.get_write_buffer_size() - stream._WRITE_BUFFER <= 2 * 65_536
    transport.read()
    assert transport.written == expected
    assert (protocol.unsent, protocol.is_paused, handler.writable) == (0, False, 1)
    protocol.abort()
    await protocol.wait_closed()


async def test_finish_sends_what_waits_for_a_slow_peer() -> None:
    """What a slow peer has not been given is sent before the stream closes, and in order."""
    protocol, transport, _ = slow()
    protocol.connection.output += a_batch(1)
    protocol.flush()
    protocol.connection.output.append(b"the last")
    protocol.finish()
    transport.read()
    await protocol.wait_closed()
    assert transport.written == b"".join(a_batch(1)) + b"the last"
    assert transport.ended is not None
    assert not transport.ended[1]
    assert protocol.unsent == 0


@seeds(4, of=10)
async def test_output_arrives_in_order_whatever_is_queued_and_read(seed: int) -> None:
    """Small answers, runs of events and large messages, a peer that reads in fits: each byte comes once, in order.

    A handler is called only where it may write, and always once the peer has read everything.
    """
    rng = random.Random(seed)
    protocol, transport, handler = slow()
    called: list[bool] = []
    handler.on_writable = lambda: called.append(protocol.is_paused)  # type: ignore[method-assign]
    queued = bytearray()
    for _ in range(60):
        match rng.randrange(6):
            case 0:
                pieces: list[bytes | memoryview] = [rng.randbytes(rng.randrange(1, 200))]
            case 1:
                pieces = [rng.randbytes(rng.randrange(1, 700)) for _ in range(rng.choice([10, 64, 65, 400]))]
            case 2:
                whole = memoryview(rng.randbytes(rng.choice([65_535, 65_536, 65_537, 300_000])))
                cut = rng.randrange(len(whole) + 1)
                pieces = [whole[:cut], whole[cut:]]
            case 3:
                pieces = a_batch(rng.randrange(256))
            case _:
                pieces = []
                transport.take(rng.randrange(1_000_000))
        protocol.connection.output += pieces
        queued += b"".join(pieces)
        if rng.random() < 0.8:
            protocol.flush()
        else:
            protocol.flush_soon()
            await asyncio.sleep(0)
        assert transport.given == queued[: len(transport.given)]
        assert protocol.unsent == len(queued) - len(transport.written)
        assert protocol.is_paused or transport.given == queued
    was_paused = protocol.is_paused
    called.clear()
    while protocol.unsent:
        transport.take(rng.randrange(1, 400_000))
    assert transport.written == queued
    assert not protocol.is_paused
    assert called == [False] * was_paused
    protocol.abort()
    await protocol.wait_closed()
    assert len(handler.closed) == 1


# ------------------------------------------------------------------------------------------------- input


def transfers(count: int, rng: random.Random) -> tuple[bytes, list[bytes]]:
    """Return plain transfers of one form, many more than a turn takes, and their payloads."""
    payloads = [rng.randbytes(rng.randrange(1, 300)) for _ in range(count)]
    frames = [
        frame(0, Transfer(0, number, number.to_bytes(4, "big"), 0, settled=True), payload)
        for number, payload in enumerate(payloads)
    ]
    return b"".join(frames), payloads


@seeds(4, of=10)
async def test_what_a_kept_buffer_brings_is_not_overwritten_by_the_next_read(seed: int) -> None:
    """Payloads, frames that were cut, and what waits for a turn are as they came, whatever comes into the buffer."""
    rng = random.Random(seed)
    handler = Recorder(Connection(config(enforce_credit=False), Role.SERVER))
    protocol = ConnectionProtocol(handler.engine, handler)
    reads = BufferedReads(protocol)
    transport = MemoryTransport(protocol)
    stream_of_frames, payloads = transfers(2 * FRAMES * FRAME_COST + 500, rng)
    attach = frame(0, Attach("x", 0, False, source=Source("a"), target=Target("b"), initial_delivery_count=0))
    begin = frame(0, Begin(None, 0, 100_000, 100_000))
    rest = memoryview(OPENING + frame(0, Open("peer")) + begin + attach + stream_of_frames)
    largest = rng.choice([500, 5000, 70_000, 1_000_000])
    while rest:
        if not transport.is_reading_here:
            await asyncio.sleep(0)
            continue
        size = min(rng.randrange(1, largest + 1), len(rest))
        buffer = reads.get_buffer(rng.choice([-1, 0, size]))
        size = min(size, len(buffer))
        buffer[:size] = rest[:size]
        reads.buffer_updated(size)
        buffer[:size] = b"\xee" * size
        rest = rest[size:]
    await transport.reading.wait()
    assert [each for event in handler.events if isinstance(event, Messages) for each in event.payloads] == payloads
    protocol.abort()
    await protocol.wait_closed()
    assert len(handler.closed) == 1


class _TlsTransport(asyncio.Transport):
    """The stream below TLS: keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return False

    def close(self) -> None:
        pass

    abort = pause_reading = resume_reading = close

    def _force_close(self, exc: BaseException | None) -> None:
        """What asyncio's TLS calls, for which its own streams are made."""


class _Counting(asyncio.Protocol):
    """Counts what it reads, and stops to read once it has a number of bytes."""

    got, most = 0, -1
    transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.got += len(data)
        if 0 <= self.most < self.got:
            self.most = -1
            self.transport.pause_reading()


@pytest.mark.parametrize(("first", "second"), [(65_386, 60_000), (65_386, 100_000), (150_000, 200_000)])
async def test_tls_stream_that_ends_while_it_is_not_read_is_read_to_its_end(first: int, second: int) -> None:
    """What was not decrypted then, and what was, but had no room: by asyncio's own TLS, which reads once at the end."""
    authority = trustme.CA()
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(server)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    authority.configure_trust(client)
    loop, counting, below = asyncio.get_running_loop(), _Counting(), _TlsTransport()
    tls = sslproto.SSLProtocol(loop, BufferedReads(counting), client, loop.create_future(), False, "localhost")
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    peer = server.wrap_bio(incoming, outgoing, server_side=True)

    async def received(data: bytes) -> None:
        while data:
            buffer = tls.get_buffer(-1)
            size = min(len(buffer), len(data))
            buffer[:size] = data[:size]
            tls.buffer_updated(size)
            data = data[size:]
        await asyncio.sleep(0)

    tls.connection_made(below)
    for _ in range(4):
        incoming.write(below.written)
        below.written.clear()
        with suppress(ssl.SSLWantReadError):
            peer.do_handshake()
        await received(outgoing.read())
    peer.write(bytes(16_384))
    record = outgoing.read()
    await received(record[:-50])
    counting.most = counting.got + 1
    for size in (first, second):
        peer.write(bytes(size))
        await received(record[-50:] + outgoing.read())
        record = b""
    tls.eof_received()
    counting.transport.resume_reading()
    for _ in range(8):
        await asyncio.sleep(0)
    counting.transport.abort()
    tls.connection_lost(None)
    assert counting.got == 16_384 + first + second


async def test_buffer_takes_what_a_stream_has_at_its_end() -> None:
    """A stream that ends is read once: the buffer is as large as what it says has come and one record, and stays so."""
    handler = Recorder(Connection(config(), Role.SERVER))
    reads = BufferedReads(ConnectionProtocol(handler.engine, handler))
    assert len(reads.get_buffer(-1)) == len(reads.get_buffer(1)) == 65_536
    assert len(reads.get_buffer(300_000)) == len(reads.get_buffer(0)) == 300_000 + 16_384
