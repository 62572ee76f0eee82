"""AMQP in WebSockets, in either role (protocol.md 2.1). The one door to aiohttp.

AMQP's bytes travel in binary messages, whose boundaries mean nothing. What bounds the life of a connection is AMQP's
own idle time-out: the WebSocket's pings are answered, and none are sent.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar, cast

import aiohttp
from aiohttp import web

from eventpump.errors import ConnectionLostError, Recovery, ServiceError
from eventpump.net.route import Route, open_stream
from eventpump.net.stream import reason_of
from eventpump.net.tunnel import refusal
from eventpump.texts import excerpt

if TYPE_CHECKING:
    import ssl

    from aiohttp.client_proto import ResponseHandler

_P = TypeVar("_P", bound=asyncio.Protocol)

_log = logging.getLogger("eventpump.net")

PATH: Final = "/$servicebus/websocket"
SUBPROTOCOL: Final = "AMQPWSB10"
_MESSAGE: Final = 256 * 1024
"""Bytes of the largest message that is sent."""
FRAMES_PER_MESSAGE: Final = 4
"""How many of the largest frames that a client offers to take may come in one message: its boundaries mean nothing, so
a service may put several into one."""
_LARGEST: Final = 4 * 1024 * 1024
"""Bytes of the largest message that is accepted by default."""
_SHUTDOWN_TIMEOUT: Final = 1.0
"""Seconds that a request which is not a WebSocket has to end."""


class WebSocketTransport(asyncio.Transport):
    """A byte stream in a WebSocket, for a protocol that knows only streams. Its creator must `run` it."""

    def __init__(
        self,
        socket: aiohttp.ClientWebSocketResponse | web.WebSocketResponse,
        stream: asyncio.Transport,
        protocol: asyncio.Protocol,
    ) -> None:
        super().__init__()
        self._socket = socket
        self._stream = stream
        self._protocol = protocol
        self._output: list[bytes] = []
        self._size = 0
        self._high = 64 * 1024
        self._is_paused = False
        self._is_closing = False
        self._is_over = False
        self._error: Exception | None = None
        self._has_work = asyncio.Event()
        self._may_read = asyncio.Event()
        self._may_read.set()
        self.task: asyncio.Task[None] | None = None
        """The task that runs it, where it has one of its own."""
        protocol.connection_made(self)

    async def run(self) -> None:
        """Carry bytes until the WebSocket ends. Cancellation aborts it."""
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._send(), name="websocket output")
                await self._receive()
                self._is_over = True
                self._has_work.set()
        finally:
            self._is_closing = True
            self._output.clear()
            # Both ends have closed, or one of them never will.
            self._stream.abort()
            try:
                await self._socket.close()  # at once, without a stream; aiohttp would miss it otherwise
            finally:
                self._protocol.connection_lost(self._error)

    async def _receive(self) -> None:
        while True:
            await self._may_read.wait()
            try:
                message = await self._socket.receive()
            except (OSError, aiohttp.ClientError) as error:
                # It answers pings and closes by itself, on a stream that may be gone.
                self._fail(f"the WebSocket failed: {reason_of(error)}")
                return
            match message.type:
                case aiohttp.WSMsgType.BINARY:
                    self._protocol.data_received(message.data)
                case aiohttp.WSMsgType.CLOSE:
                    text = f": {excerpt(str(message.extra))}" if message.extra else ""
                    self._fail(f"the WebSocket was closed with code {message.data}{text}")
                    return
                case aiohttp.WSMsgType.ERROR:
                    self._fail(f"the WebSocket failed: {reason_of(message.data)}")
                    return
                case aiohttp.WSMsgType.TEXT:
                    self._fail("a text message arrived on the WebSocket, where AMQP uses binary ones")
                    return
                case _:
                    self._fail("the WebSocket ended without a close")
                    return

    def _fail(self, text: str) -> None:
        _log.debug("the WebSocket has ended: %s", text)
        if not self._is_closing:
            self._error = ConnectionError(text)

    async def _send(self) -> None:
        try:
            while not self._is_over:
                if self._output:
                    data = self._output[0] if len(self._output) == 1 else b"".join(self._output)
                    self._output.clear()
                    for start in range(0, len(data), _MESSAGE):
                        piece = data[start : start + _MESSAGE]
                        await self._socket.send_bytes(piece)
                        self._size -= len(piece)
                        self._update_pause()
                elif self._is_closing:
                    await self._socket.close()
                    return
                else:
                    self._has_work.clear()
                    await self._has_work.wait()
        except (OSError, aiohttp.ClientError):
            self._stream.abort()  # the reader reports the end

    def _update_pause(self) -> None:
        if self._is_paused:
            if self._size <= self._high // 4:
                self._is_paused = False
                self._protocol.resume_writing()
        elif self._size > self._high:
            self._is_paused = True
            self._protocol.pause_writing()

    # --------------------------------------------------------------------------------- asyncio.Transport

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._is_closing:
            return
        self._output.append(bytes(data))
        self._size += len(data)
        self._has_work.set()
        self._update_pause()

    def close(self) -> None:
        self._is_closing = True
        self._has_work.set()

    def abort(self) -> None:
        self._is_closing = True
        self._may_read.set()
        self._stream.abort()

    def is_closing(self) -> bool:
        return self._is_closing

    def can_write_eof(self) -> bool:
        return False  # a WebSocket has no end of one side

    def pause_reading(self) -> None:
        self._may_read.clear()

    def resume_reading(self) -> None:
        self._may_read.set()

    def is_reading(self) -> bool:
        return self._may_read.is_set()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = self._high if high is None else high

    def get_write_buffer_size(self) -> int:
        return self._size + self._stream.get_write_buffer_size()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._stream.get_extra_info(name, default)


# ----------------------------------------------------------------------------------------------------- client


class _Observed(asyncio.Protocol):
    """Passes everything on to aiohttp's protocol, and keeps what that forgets: the stream, and why it ended."""

    def __init__(self, inner: ResponseHandler) -> None:
        self.inner = inner
        self.stream: asyncio.Transport | None = None
        self.lost: Exception | None = None
        self.data_received = inner.data_received  # type: ignore[method-assign]  # without a call in between
        self.eof_received = inner.eof_received  # type: ignore[method-assign]
        self.pause_writing = inner.pause_writing  # type: ignore[method-assign]
        self.resume_writing = inner.resume_writing  # type: ignore[method-assign]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.stream = cast("asyncio.Transport", transport)
        self.inner.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = exc
        self.inner.connection_lost(exc)


class _Connector(aiohttp.BaseConnector):
    """Makes the one stream of a session, along a route."""

    def __init__(self, route: Route) -> None:
        super().__init__()
        self._route = route
        self.observed: _Observed | None = None

    async def _create_connection(self, req: object, traces: object, timeout: object) -> ResponseHandler:
        if self.observed is not None:
            # aiohttp tries a GET again by itself; when to do that is not for it to say.
            lost = self.observed.lost
            reason = "the connection ended before there was an answer" if lost is None else reason_of(lost)
            raise ConnectionLostError(f"cannot open a WebSocket to {self._route}: {reason}")
        self.observed = await open_stream(lambda: _Observed(self._factory()), self._route)
        return self.observed.inner

    def abort(self) -> None:
        """Cut the stream."""
        if self.observed is not None and self.observed.stream is not None:
            self.observed.stream.abort()


async def connect(make: Callable[[], _P], route: Route, *, max_message: int = _LARGEST) -> _P:
    """Connect a client. Cancelled, no stream is left.

    Args:
        max_message: Bytes that one WebSocket message may hold; a larger one ends the connection with code 1009.

    Raises:
        ServiceError: No connection, or no WebSocket for AMQP.
    """

    async def sent_elsewhere(_: object, __: object, redirect: aiohttp.TraceRequestRedirectParams) -> None:
        redirect.response.close()
        raise refusal(str(route), redirect.response.status)

    connector = _Connector(route)
    trace = aiohttp.TraceConfig()
    trace.on_request_redirect.append(sent_elsewhere)
    session = aiohttp.ClientSession(
        connector=connector,
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None),
        trace_configs=[trace],
    )
    host = f"[{route.host}]" if ":" in route.host else route.host
    scheme = "http" if route.tls is None else "https"
    socket: aiohttp.ClientWebSocketResponse | None = None
    try:
        try:
            socket = await session.ws_connect(
                f"{scheme}://{host}:{route.port}{PATH}", protocols=(SUBPROTOCOL,), max_msg_size=max_message
            )
        except aiohttp.ClientError as error:
            raise _no_websocket(route, error) from error
        if socket.protocol != SUBPROTOCOL:
            raise ConnectionLostError(
                f"{route} accepts WebSockets, but not the subprotocol {SUBPROTOCOL} of AMQP", recovery=Recovery.GIVE_UP
            )
        _log.debug("WebSocket to %s is open: %s", route, SUBPROTOCOL)
        protocol = make()
    except BaseException:
        connector.abort()
        if socket is not None:
            await socket.close()  # at once, without a stream
        await session.close()
        raise
    assert connector.observed is not None
    assert connector.observed.stream is not None
    transport = WebSocketTransport(socket, connector.observed.stream, protocol)
    transport.task = asyncio.create_task(_carry(transport, session), name="websocket")
    return protocol


async def _carry(transport: WebSocketTransport, session: aiohttp.ClientSession) -> None:
    try:
        await transport.run()
    finally:
        await session.close()


def _no_websocket(route: Route, error: aiohttp.ClientError) -> ServiceError:
    if isinstance(error, aiohttp.WSServerHandshakeError) and error.status != 101:
        return refusal(str(route), error.status)
    if isinstance(error, aiohttp.ClientResponseError):
        return ConnectionLostError(f"{route} does not answer as a WebSocket: {excerpt(error.message)}")
    return ConnectionLostError(f"cannot open a WebSocket to {route}: {reason_of(error)}")


# ----------------------------------------------------------------------------------------------------- server


class _Served(asyncio.Protocol):
    """Passes everything on to aiohttp's protocol, and reports when a stream begins and ends."""

    def __init__(
        self,
        inner: web.RequestHandler,
        on_made: Callable[[asyncio.Transport], None],
        on_lost: Callable[[asyncio.BaseTransport], None],
    ) -> None:
        self._inner = inner
        self._on_made = on_made
        self._on_lost = on_lost
        self._stream: asyncio.BaseTransport | None = None
        self.data_received = inner.data_received  # type: ignore[method-assign]  # without a call in between
        self.eof_received = inner.eof_received  # type: ignore[method-assign]
        self.pause_writing = inner.pause_writing  # type: ignore[method-assign]
        self.resume_writing = inner.resume_writing  # type: ignore[method-assign]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._stream = transport
        self._on_made(cast("asyncio.Transport", transport))
        self._inner.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._stream is not None:
            self._on_lost(self._stream)
        self._inner.connection_lost(exc)


class WebSocketServer:
    """Listens for WebSockets, on a port. Made by `start`."""

    def __init__(
        self, make: Callable[[], asyncio.Protocol], max_message: int = _LARGEST, handshake_timeout: float | None = None
    ) -> None:
        self._make = make
        self._max_message = max_message
        self._handshake_timeout = handshake_timeout
        self._opening: dict[asyncio.BaseTransport, asyncio.TimerHandle] = {}
        # An access log would be one line per connection, of no more than the emulator knows.
        self._http = web.Server(self._answer, access_log=None)
        self._streams: set[asyncio.Transport] = set()
        self._listening: asyncio.Server
        self.port = 0

    @classmethod
    async def start(
        cls,
        make: Callable[[], asyncio.Protocol],
        host: str,
        port: int,
        *,
        tls: ssl.SSLContext | None,
        max_message: int = _LARGEST,
        handshake_timeout: float | None = None,
    ) -> Self:
        """Listen.

        Args:
            max_message: Bytes that one WebSocket message may hold; a larger one ends the connection with code 1009.
            handshake_timeout: Seconds that a connection has to become a WebSocket, however it spends them, and before
                that for TLS; it is cut then. None for no limit.

        Raises:
            OSError: It cannot.
        """
        server = cls(make, max_message, handshake_timeout)
        server._listening = await asyncio.get_running_loop().create_server(
            lambda: _Served(server._http(), server._accepted, server._lost),
            host,
            port,
            ssl=tls,
            ssl_handshake_timeout=None if tls is None else handshake_timeout,
            backlog=1024,
        )
        server.port = server._listening.sockets[0].getsockname()[1]
        return server

    def stop_listening(self) -> None:
        """Take no further connections."""
        self._listening.close()

    async def aclose(self) -> None:
        """Free the port. What is still connected is cut."""
        self._listening.close()
        for stream in list(self._streams):
            stream.abort()
        await self._http.shutdown(_SHUTDOWN_TIMEOUT)
        await self._listening.wait_closed()

    def _accepted(self, stream: asyncio.Transport) -> None:
        if self._handshake_timeout is not None:
            loop = asyncio.get_running_loop()
            self._opening[stream] = loop.call_later(self._handshake_timeout, stream.abort)

    def _lost(self, stream: asyncio.BaseTransport) -> None:
        timer = self._opening.pop(stream, None)
        if timer is not None:
            timer.cancel()

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.path.rstrip("/") != PATH:
            return web.Response(status=404, text=f"AMQP is at {PATH}\n")
        socket = web.WebSocketResponse(protocols=(SUBPROTOCOL,), compress=False, max_msg_size=self._max_message)
        try:
            ready = socket.can_prepare(request)
        except ValueError:  # aiohttp decodes the key without looking at it
            return web.Response(status=400, text="a WebSocket key in base64 is expected\n")
        if not ready.ok or ready.protocol != SUBPROTOCOL:
            return web.Response(status=400, text=f"a WebSocket of the subprotocol {SUBPROTOCOL} is expected\n")
        await socket.prepare(request)
        stream = request.transport
        if stream is None:  # it is gone by now
            return socket
        self._lost(stream)  # to the deadline of handshakes; AMQP has its own from here on
        self._streams.add(stream)
        try:
            await WebSocketTransport(socket, stream, self._make()).run()
        finally:
            self._streams.discard(stream)
        return socket
