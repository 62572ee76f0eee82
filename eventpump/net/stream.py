"""The asyncio shell that drives an AMQP connection over a byte stream, in either role."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Protocol, cast

from eventpump.amqp.connection import Closed, Connection, ConnectionState, Event, Messages, Opened, Role, SaslRequested
from eventpump.clock import clock_of
from eventpump.net.trace import trace_frames
from eventpump.texts import excerpt

CLOSE_TIMEOUT = 5.0
"""Seconds that a connection may take to end, until a peer that does not read its last bytes is cut off."""
LINGER = 1.0
"""Seconds for which a server that closes because of what a client sent reads on, and drops, what is still coming."""
_WRITE_BUFFER = 512 * 1024
_CHUNK = 64 * 1024
"""Bytes that are joined and written at once, about. Larger objects would be given back to the system after each write,
and their pages be fetched again for the next one, which costs more than to copy them."""
_FEW = 64
"""Pieces that are divided into chunks at most: more of them are small, and to measure each costs more than it saves."""
_READ_BUFFER = 64 * 1024
"""Bytes of the buffer for reads over asyncio's TLS, at first."""
_RECORD = 16 * 1024
"""The most bytes of a TLS record (RFC 8446, 5.1)."""
_FEW_BYTES = 64 * 1024
"""A read of fewer has emptied the socket: asyncio and uvloop read up to four times as many at once, and so does TLS,
whose pieces have as many (`tls.PIECE`)."""
_READ_STOP = 8 * 1024 * 1024
"""Unsent bytes above which a peer that does not read is not read either, as answers would pile up without bound."""
_TURN = 2048
"""How many plain transfers a connection may send before others have their turn; 64 of other frames.

That is about ten milliseconds of work on a slow machine; what a message costs that is more can be said
(`ConnectionConfig.weigh`). What one read brings of events of 100 bytes or more fits into
one turn.
"""


def reason_of(error: BaseException) -> str:
    """Return why a stream failed, without the text that libraries add; a peer's text in it is an excerpt."""
    if isinstance(error, ssl.SSLError) and error.reason:
        return excerpt(f"TLS: {error.reason.replace('_', ' ').lower()}")
    if isinstance(error, OSError):
        # asyncio reports a failed connect with a text of its own around the number.
        has_words = error.errno is None or isinstance(error, socket.gaierror)
        text = (error.strerror if has_words else os.strerror(error.errno or 0)) or str(error)
        return excerpt(text) or type(error).__name__
    return excerpt(str(error)) or type(error).__name__


def _chunks(pieces: Iterable[bytes | memoryview]) -> Iterator[list[bytes | memoryview]]:
    """Divide pieces into chunks of `_CHUNK` bytes, and less than a piece more."""
    chunk: list[bytes | memoryview] = []
    size = 0
    for piece in pieces:
        chunk.append(piece)
        size += len(piece)
        if size >= _CHUNK:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


class ConnectionHandler(Protocol):
    """What owns a connection. All calls come from the event loop, never block and never raise."""

    def on_events(self, events: list[Event]) -> None:
        """Called with what the peer did. What is queued in answer is sent when this returns."""

    def on_writable(self) -> None:
        """Called when a peer that was slow to read takes more again."""

    def on_closed(self, error: Exception | None) -> None:
        """Called last, when the stream has ended. `Closed` was among the events before it."""


class ConnectionProtocol(asyncio.Protocol):
    """Feeds received bytes to the engine, its events to the handler, and its output to the stream.

    Keeps the engine's deadlines: heartbeats to the peer, and the silence after which the peer is dead.
    """

    def __init__(self, connection: Connection, handler: ConnectionHandler) -> None:
        self.connection = connection
        self._handler = handler
        self._loop = asyncio.get_running_loop()
        self._now = clock_of(self._loop)
        self._transport: asyncio.Transport | None = None
        self._is_paused = False
        self._unwritten: deque[Sequence[bytes | memoryview]] = deque()
        self._unwritten_size = 0
        self._is_flush_due = False
        self._is_finishing = False
        self._is_reading = True
        self._is_glutted = False
        self._is_turn_due = False
        self._received_at = self._sent_at = self._ends_at = self._now()
        self._timer: asyncio.TimerHandle | None = None
        self._lost = self._loop.create_future()
        self._held: asyncio.TimerHandle | None = None
        self.hold_for: Callable[[], float] | None = None
        """Returns for how many seconds nothing is to be read, after a read that has emptied the socket: 0 while an
        answer of the peer is awaited. Asked again when something is written, or `flush` is called. None for never."""
        trace_frames(connection)

    # -------------------------------------------------------------------------------- for the handler

    @property
    def is_paused(self) -> bool:
        """Whether the peer is slow to read: more output would only pile up here."""
        return self._is_paused

    @property
    def peer(self) -> tuple[str, int] | None:
        """The address and the port of the socket's peer; None without a stream."""
        found = None if self._transport is None else self._transport.get_extra_info("peername")
        return None if not isinstance(found, tuple) else (str(found[0]), int(found[1]))

    @property
    def unsent(self) -> int:
        """How many bytes wait for a peer that is slow to read."""
        waiting = 0 if self._transport is None else self._transport.get_write_buffer_size()
        return waiting + self._unwritten_size

    @property
    def is_closing(self) -> bool:
        """Whether the stream is closed or closing."""
        return self._transport is None or self._transport.is_closing()

    def flush(self) -> None:
        """Write what the engine has queued; what a peer that is slow to read does not take, once it reads again."""
        self._is_flush_due = False
        if self._held is not None and (self.hold_for is None or self.hold_for() <= 0):
            self._read_on()
        transport, output = self._transport, self.connection.output
        if transport is None or not output:
            return
        if transport.is_closing():
            output.clear()
            return
        self._sent_at = self._now()
        if len(output) <= _FEW and (size := sum(map(len, output))) > _CHUNK:
            self._unwritten += _chunks(output)
            self._unwritten_size += size
            output.clear()
            self._write_on(transport)
            return
        data = self.connection.data_to_send()
        if self._unwritten:
            self._unwritten.append((data,))
            self._unwritten_size += len(data)
        else:
            transport.write(data)

    def _write_on(self, transport: asyncio.Transport) -> None:
        """Write what waits until the peer is slow to read."""
        unwritten = self._unwritten
        while unwritten and not self._is_paused and not transport.is_closing():
            data = b"".join(unwritten.popleft())
            self._unwritten_size -= len(data)
            transport.write(data)

    def flush_soon(self) -> None:
        """Write what the engine has queued once this turn of the loop is over, with all that others queue in it."""
        if not self._is_flush_due:
            self._is_flush_due = True
            self._loop.call_soon(self.flush)

    def _hold(self, hold_for: Callable[[], float]) -> None:
        """Read nothing for a while: what comes meanwhile comes with one read, of one turn of the event loop."""
        transport = self._transport
        if transport is not None and self._is_reading and not self._is_finishing and self._held is None:
            seconds = hold_for()
            if seconds > 0 and not transport.is_closing():
                transport.pause_reading()
                self._held = self._loop.call_later(seconds, self._read_on)

    def _read_on(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            held.cancel()
            if self.connection.idle_timeout is not None:
                # Later than this only if the loop was blocked: what has come meanwhile is read first, and no silence.
                self._received_at = max(self._received_at, self._now() - self.connection.idle_timeout / 4)
            if self._transport is not None and not self._transport.is_closing():
                self._transport.resume_reading()

    def abort(self) -> None:
        """Drop the stream at once."""
        if self._transport is not None:
            self._transport.abort()

    async def wait_closed(self) -> None:
        """Wait until the stream is closed."""
        await asyncio.shield(self._lost)

    # -------------------------------------------------------------------------------- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=_WRITE_BUFFER)
        self._received_at = self._sent_at = self._now()
        self._keep_deadlines()
        self.flush()

    def data_received(self, data: bytes) -> None:
        """Pass bytes to the engine for one turn, its events to the handler, and its output to the peer.

        Args:
            data: What was read; none where a turn of what was read before follows.
        """
        if data:
            self._received_at = self._now()
        connection = self.connection
        events = connection.receive(data, _TURN)
        if len(events) == 1 and type(events[0]) is Messages:
            self._handler.on_events(events)  # as nearly always, without a call for each read
        elif events:
            self._report(events)
        if connection.output:
            self.flush()
        if self._is_paused or connection.pending or not self._is_reading:
            self._pace()
        if self.hold_for is not None and 0 < len(data) < _FEW_BYTES:
            self._hold(self.hold_for)

    def _pace(self) -> None:
        """Read from the peer only while it takes its answers, and while nothing that it sent waits for a turn."""
        transport = self._transport
        if transport is None or self._is_finishing or transport.is_closing():
            return
        if self._is_paused and self.unsent > _READ_STOP:
            self._is_glutted = True
        is_behind = self.connection.is_behind
        # While the SASL answer is due a turn could do nothing: the answer is followed by a call of `data_received`.
        is_turn_wanted = is_behind and self.connection.state is not ConnectionState.SASL_ANSWER
        if is_turn_wanted and not self._is_glutted and not self._is_turn_due:
            self._is_turn_due = True
            self._loop.call_soon(self._take_turn)
        may_read = not is_behind and not self._is_glutted
        if may_read is not self._is_reading:
            self._is_reading = may_read
            if may_read:
                transport.resume_reading()
            else:
                transport.pause_reading()

    def _take_turn(self) -> None:
        self._is_turn_due = False
        if self._transport is not None and not self._is_finishing and not self._is_glutted:
            self.data_received(b"")

    def eof_received(self) -> bool:
        self.finish()  # connection_lost reports the end
        return False

    def pause_writing(self) -> None:
        self._is_paused = True

    def resume_writing(self) -> None:
        self._is_paused = self._is_glutted = False
        transport = self._transport
        if transport is not None:
            self._write_on(transport)
        if not self._is_reading:
            self._pace()
        if not self._is_paused:
            self._handler.on_writable()
            self.flush()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._held is not None:
            self._held.cancel()
        self._transport = self.hold_for = None
        self._unwritten.clear()
        self._unwritten_size = 0
        events = self.connection.receive_eof() if exc is None else self.connection.receive_eof(reason_of(exc))
        if events:
            self._handler.on_events(events)
        self._handler.on_closed(exc)
        self.connection.release()
        if not self._lost.done():
            self._lost.set_result(None)

    # ---------------------------------------------------------------------------------------- inside

    def _report(self, events: list[Event], *, is_silent: bool = False) -> None:
        while events:
            self._handler.on_events(events)
            may_go_on = False
            for event in events:
                if isinstance(event, Closed):
                    self.finish(lingers=event.is_local and not is_silent and self.connection.role is Role.SERVER)
                    return
                if isinstance(event, Opened):
                    # Only now is the heartbeat interval of the peer known.
                    self._keep_deadlines()
                elif isinstance(event, SaslRequested):
                    may_go_on = True
            if not may_go_on:
                return
            # A client that did not wait for the SASL outcome has sent more already.
            events = self.connection.receive(b"", _TURN)

    def finish(self, *, lingers: bool = False) -> None:
        """Send the last bytes, then close the stream. A peer that does not read has `CLOSE_TIMEOUT` seconds in all.

        A call without `lingers` ends the wait of an earlier call with it.

        Args:
            lingers: Read on, and drop it, until the peer ends the stream, for at most `LINGER` seconds. A stream that
                is closed before all was read is reset (RFC 1122, 4.2.2.13), and a reset can overtake the last bytes: a
                client that is still sending would not get the close, and not its reason. TLS and WebSocket streams do
                not wait here: they end with a handshake, and read on during it.
        """
        self.flush()
        transport = self._transport
        if transport is None:
            return
        if self._is_finishing:
            if not lingers and not transport.is_closing():
                self._close()
            return
        self._is_finishing = True
        self._ends_at = self._now() + CLOSE_TIMEOUT
        if self._unwritten and not transport.is_closing():
            # The stream sends these after what it has, then closes.
            transport.write(b"".join(chain.from_iterable(self._unwritten)))
            self._unwritten.clear()
            self._unwritten_size = 0
        if not lingers or transport.is_closing() or not transport.can_write_eof():
            self._close()
            return
        self._end_by(self._now() + LINGER, self._close)
        # This side is not ended meanwhile: that fails for a peer that is gone, and later, out of reach, if there is
        # output left. A client that gets the close ends the stream itself.
        transport.set_protocol(_DroppedReads(self))
        if not self._is_reading:
            transport.resume_reading()

    def _close(self) -> None:
        assert self._transport is not None
        self._end_by(self._ends_at, self.abort)
        self._transport.close()

    def _end_by(self, moment: float, call: Callable[[], None]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(moment, call)

    def _keep_deadlines(self) -> None:
        """Do what is due, and wake up again when the next may be. One timer, not moved by traffic."""
        if self._is_finishing:
            return
        if self._timer is not None:
            self._timer.cancel()
        now = self._now()
        connection = self.connection
        wake = now + 3600.0
        if connection.idle_timeout is not None:
            if now >= self._received_at + connection.idle_timeout:
                self._read_on()
            dead_at = self._received_at + connection.idle_timeout
            if now >= dead_at:
                self.time_out()
                return
            wake = min(wake, dead_at)
        if connection.heartbeat_interval is not None:
            due = self._sent_at + connection.heartbeat_interval
            if now >= due:
                connection.heartbeat()
                self.flush()
                due = now + connection.heartbeat_interval
            wake = min(wake, due)
        self._timer = self._loop.call_at(wake, self._keep_deadlines)

    def time_out(self) -> None:
        """Close, as the peer was silent for too long."""
        self._report(self.connection.time_out(), is_silent=True)


class _DroppedReads(asyncio.Protocol):
    """Drops what is read. All else that happens to the stream is its protocol's, the end too."""

    def __init__(self, protocol: asyncio.Protocol) -> None:
        self.pause_writing = protocol.pause_writing  # type: ignore[method-assign]
        self.resume_writing = protocol.resume_writing  # type: ignore[method-assign]
        self.connection_lost = protocol.connection_lost  # type: ignore[method-assign]


class BufferedReads(asyncio.BufferedProtocol):
    """Reads for another protocol, into one buffer that is kept. For a server's streams over TLS, which is asyncio's.

    Without it, asyncio and uvloop decrypt each record of 16 KiB into an object of 256 KiB of its own, whose pages may
    go back to the system each time. Over plain TCP a read is one object already, and this would only copy it. What the
    protocol gets is its own: it may keep it.
    """

    def __init__(self, protocol: asyncio.Protocol) -> None:
        self._buffer = memoryview(bytearray(_READ_BUFFER))
        self._receive = protocol.data_received
        # Without a call in between.
        self.connection_made = protocol.connection_made  # type: ignore[method-assign]
        self.eof_received = protocol.eof_received  # type: ignore[method-assign]
        self.pause_writing = protocol.pause_writing  # type: ignore[method-assign]
        self.resume_writing = protocol.resume_writing  # type: ignore[method-assign]
        self.connection_lost = protocol.connection_lost  # type: ignore[method-assign]

    def get_buffer(self, sizehint: int) -> memoryview:
        # At the end of a stream it is asked once: so the buffer must take all that has come, and that is `sizehint`
        # bytes that are not decrypted, and up to one record that is.
        if sizehint + _RECORD > len(self._buffer):
            self._buffer = memoryview(bytearray(sizehint + _RECORD))
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._receive(bytes(self._buffer[:nbytes]))
