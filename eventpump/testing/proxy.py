"""A TCP proxy that breaks the network on request, between any client and any service, TLS or not.

Bytes that it holds back are not lost: TCP delivers late or not at all, never with a gap. A stalled direction is not
read either, so that the sender's buffers fill, as when the other end has stopped reading.
"""

from __future__ import annotations

import asyncio
import enum
import socket
import struct
from collections import deque
from dataclasses import dataclass, field
from typing import Self, cast

from eventpump.aio.closing import AsyncResource

_BUFFER = 256 * 1024
_RESET = struct.pack("ii", 1, 0)


class Direction(enum.Enum):
    """The direction of bytes."""

    TO_SERVICE = "to service"
    TO_CLIENT = "to client"

    @property
    def opposite(self) -> Direction:
        """The other way."""
        return Direction.TO_CLIENT if self is Direction.TO_SERVICE else Direction.TO_SERVICE


class FaultProxy(AsyncResource):
    """Forwards connections to a service, and breaks them. An async context manager.

    ::

        async with FaultProxy(emulator.port) as proxy:
            text, address = emulator.connection_string, proxy.address
            client = SomeClient(text, custom_endpoint_address=address)
            proxy.cut()

    It belongs to the loop that starts it, and every method is called from there. `half_open`, `stall`, `delay` and
    `refuse` apply to current and later connections, until `restore`.

    Args:
        port: The service's port.
        host: The service's host name or address. Default: "127.0.0.1".
    """

    def __init__(self, port: int, *, host: str = "127.0.0.1") -> None:
        self._network = _Network(host, port)
        self._port = 0
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Start listening. Raises `OSError` if that fails."""
        if self._server is not None:
            raise RuntimeError("the proxy is already started")
        self._server = await asyncio.get_running_loop().create_server(
            lambda: _ClientSide(_Pair(self._network)), "127.0.0.1", self._port
        )
        self._port = self._server.sockets[0].getsockname()[1]

    async def aclose(self) -> None:
        """Drop every connection and free the port. May be called twice."""
        server, self._server = self._server, None
        if server is None:
            return
        server.close()
        pairs = list(self._network.pairs)
        self.cut()
        if pairs:
            await asyncio.wait([pair.ended for pair in pairs])
        await server.wait_closed()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    # ----------------------------------------------------------------------------------------------- facts

    @property
    def port(self) -> int:
        """The port it listens on, at 127.0.0.1; 0 before it does."""
        return self._port

    @property
    def address(self) -> str:
        """The address for clients: host and port."""
        return f"127.0.0.1:{self._port}"

    @property
    def connections_accepted(self) -> int:
        """How many connections clients have made."""
        return self._network.accepted

    @property
    def connection_count(self) -> int:
        """How many connections are open, forwarded or held."""
        return len(self._network.pairs)

    def bytes_forwarded(self, direction: Direction) -> int:
        """How many bytes went one way."""
        return self._network.forwarded[direction]

    async def until_accepted(self, count: int) -> None:
        """Wait until clients have made this many connections, counted from the start."""
        while self._network.accepted < count:
            await self._network.change()

    # ---------------------------------------------------------------------------------------------- faults

    def cut(self) -> int:
        """Reset every connection, on both sides. Later ones are served.

        Returns:
            How many there were.
        """
        return self._network.cut()

    def cut_after(self, count: int) -> None:
        """Drop every connection after `count` more bytes to clients, most likely in the middle of a frame."""
        self._network.cut_at = self._network.forwarded[Direction.TO_CLIENT] + count

    def half_open(self) -> None:
        """Go silent: connections stay up, and new ones are accepted, but nothing is forwarded, not even an end."""
        self.stall(*Direction)

    def stall(self, *directions: Direction) -> None:
        """Forward nothing in these directions."""
        self._network.stalled.update(directions)
        self._network.apply()

    def delay(self, seconds: float) -> None:
        """Forward everything this much later."""
        self._network.delay = seconds

    def refuse(self) -> None:
        """Reset new connections, as if there were no service."""
        self._network.is_refusing = True

    def restore(self) -> None:
        """Forward again, what was held back first."""
        network = self._network
        network.stalled.clear()
        network.delay, network.is_refusing, network.cut_at = 0.0, False, None
        network.apply()


@dataclass(eq=False)
class _Network:
    """The state shared by all connections: the current faults, and the counts."""

    host: str
    port: int
    pairs: set[_Pair] = field(default_factory=set)
    stalled: set[Direction] = field(default_factory=set)
    delay: float = 0.0
    is_refusing: bool = False
    cut_at: int | None = None
    accepted: int = 0
    forwarded: dict[Direction, int] = field(default_factory=lambda: dict.fromkeys(Direction, 0))
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_silent(self) -> bool:
        return len(self.stalled) == len(Direction)

    async def change(self) -> None:
        """Wait until a count changes."""
        self._changed.clear()
        await self._changed.wait()

    def changed(self) -> None:
        self._changed.set()

    def apply(self) -> None:
        for pair in list(self.pairs):
            pair.apply()

    def cut(self) -> int:
        pairs = list(self.pairs)
        for pair in pairs:
            pair.cut()
        return len(pairs)

    def pass_on(self, direction: Direction, data: bytes) -> bytes:
        """Count bytes to forward; return those that are still forwarded: fewer if a cut is due."""
        if direction is Direction.TO_CLIENT and self.cut_at is not None:
            left = self.cut_at - self.forwarded[direction]
            if len(data) >= left:
                data, self.cut_at = data[: max(0, left)], None
                asyncio.get_running_loop().call_soon(self.cut)
        self.forwarded[direction] += len(data)
        self.changed()
        return data


class _Pair:
    """A client's connection, and its connection to the service."""

    def __init__(self, network: _Network) -> None:
        self.network = network
        self.pipes = {direction: _Pipe(self, direction) for direction in Direction}
        self.transports: dict[Direction, asyncio.Transport] = {}
        """The streams, by the direction of what is written to them."""
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._open_sides = 0
        self._dialling: asyncio.Task[None] | None = None
        self._is_cut = False

    def side_opened(self, towards: Direction, transport: asyncio.Transport) -> None:
        """Register a stream."""
        self._open_sides += 1
        self.transports[towards] = transport
        transport.set_write_buffer_limits(high=_BUFFER)
        if self._is_cut:
            transport.abort()

    def side_lost(self) -> None:
        """Record the end of a stream."""
        self._open_sides -= 1
        self._end_if_over()

    def apply(self) -> None:
        """Apply the current faults."""
        if self._is_cut:
            return
        if not self.network.is_silent and self._dialling is None and Direction.TO_SERVICE not in self.transports:
            self._dialling = asyncio.get_running_loop().create_task(self._dial(), name="fault proxy dial")
            self._dialling.add_done_callback(self._dialled)
        for pipe in self.pipes.values():
            pipe.apply()

    async def _dial(self) -> None:
        network = self.network
        try:
            await asyncio.get_running_loop().create_connection(lambda: _ServiceSide(self), network.host, network.port)
        except OSError:
            self.cut()

    def _dialled(self, _: asyncio.Task[None]) -> None:
        self._dialling = None
        self._end_if_over()

    def cut(self) -> None:
        """Reset both streams."""
        self._is_cut = True
        if self._dialling is not None:
            self._dialling.cancel()
        for transport in self.transports.values():
            found = transport.get_extra_info("socket")
            if found is not None and not transport.is_closing():
                found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            transport.abort()

    def _end_if_over(self) -> None:
        if self._open_sides or self._dialling is not None or self.ended.done():
            return
        self.network.pairs.discard(self)
        for pipe in self.pipes.values():
            pipe.close()
        self.ended.set_result(None)
        self.network.changed()


class _Pipe:
    """One direction of a pair."""

    def __init__(self, pair: _Pair, direction: Direction) -> None:
        self._pair = pair
        self._direction = direction
        self._held: deque[tuple[float, bytes]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._is_full = False
        self._is_over = False

    def received(self, data: bytes) -> None:
        """Queue received bytes for forwarding."""
        self._held.append((asyncio.get_running_loop().time() + self._pair.network.delay, data))
        self.apply()

    def source_ended(self) -> None:
        """Record the end of the stream, which is forwarded after the bytes."""
        self._is_over = True
        self.apply()

    def full(self, is_full: bool) -> None:
        """Record whether the sink is slow to read."""
        self._is_full = is_full
        self.apply()

    def apply(self) -> None:
        """Forward what may be forwarded, and pause or resume reading."""
        transports, is_stalled = self._pair.transports, self._direction in self._pair.network.stalled
        source, sink = transports.get(self._direction.opposite), transports.get(self._direction)
        if sink is not None and not is_stalled:
            self._forward(sink)
        if source is not None and not source.is_closing():
            if sink is None or is_stalled or self._is_full:
                source.pause_reading()
            else:
                source.resume_reading()

    def _forward(self, sink: asyncio.Transport) -> None:
        loop = asyncio.get_running_loop()
        while self._held and self._held[0][0] <= loop.time():
            data = self._pair.network.pass_on(self._direction, self._held.popleft()[1])
            if not sink.is_closing():
                sink.write(data)
        if self._held:
            if self._timer is None:
                self._timer = loop.call_at(self._held[0][0], self._due)
        elif self._is_over:
            sink.close()

    def _due(self) -> None:
        self._timer = None
        self.apply()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


class _Side(asyncio.Protocol):
    """A stream of a pair."""

    def __init__(self, pair: _Pair, towards: Direction) -> None:
        self._pair = pair
        self._towards = towards
        self._output, self._input = pair.pipes[towards], pair.pipes[towards.opposite]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._pair.side_opened(self._towards, cast("asyncio.Transport", transport))
        self._pair.apply()

    def data_received(self, data: bytes) -> None:
        self._input.received(data)

    def eof_received(self) -> bool:
        self._input.source_ended()
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self._input.source_ended()
        self._pair.side_lost()

    def pause_writing(self) -> None:
        self._output.full(True)

    def resume_writing(self) -> None:
        self._output.full(False)


class _ClientSide(_Side):
    def __init__(self, pair: _Pair) -> None:
        super().__init__(pair, Direction.TO_CLIENT)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        network = self._pair.network
        network.pairs.add(self._pair)
        network.accepted += 1
        super().connection_made(transport)
        if network.is_refusing:
            self._pair.cut()
        network.changed()


class _ServiceSide(_Side):
    def __init__(self, pair: _Pair) -> None:
        super().__init__(pair, Direction.TO_SERVICE)
