"""WebSockets: the server's handshake and frames on streams in memory, the client's against a server of the test."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import re
from collections.abc import Callable
from random import Random
from typing import Any, ClassVar, Final

from eventpump.errors import ServiceError
from eventpump.net.route import Route
from eventpump.net.websocket import WebSocketServer, WebSocketTransport, connect
from tests.fuzz import captures
from tests.fuzz.entry import BreachError, Entry, require, same
from tests.fuzz.memory import MemoryTransport, Unhandled, settle
from tests.fuzz.mutations import mutate_bytes, pieces

_GUID: Final = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_TURNS: Final = 30
_PATIENCE: Final = 20.0
_OPCODES: Final = (0, 1, 2, 2, 2, 8, 9, 10, 3, 15)


def ws_frame(rng: Random, payload: bytes, *, is_masked: bool, opcode: int = 2, is_final: bool = True) -> bytes:
    """Make a frame, sound but where the dice say otherwise."""
    first = (0x80 if is_final else 0) | opcode
    if rng.random() < 0.05:
        first |= rng.choice((0x10, 0x20, 0x40))
    size = len(payload)
    if rng.random() < 0.05:
        size = rng.choice((0, 1, 125, 126, 65_535, 65_536, 1 << 20, 1 << 26, 1 << 31, 1 << 62, (1 << 64) - 1))
    mask = 0x80 if is_masked is not (rng.random() < 0.03) else 0
    if size < 126:
        head = bytes((first, mask | size))
    elif size < 65_536:
        head = bytes((first, mask | 126)) + size.to_bytes(2, "big")
    else:
        head = bytes((first, mask | 127)) + size.to_bytes(8, "big")
    if not mask:
        return head + payload
    key = rng.randbytes(4)
    return head + key + bytes(byte ^ key[at & 3] for at, byte in enumerate(payload))


def frames_of(rng: Random, amqp: bytes, *, is_masked: bool) -> list[bytes]:
    """Put AMQP's bytes into frames, with others among them."""
    made: list[bytes] = []
    for part in pieces(rng, amqp[:3000]):
        if rng.random() < 0.15:
            opcode = rng.choice(_OPCODES)
            payload = rng.randbytes(rng.choice((0, 1, 2, 20, 125, 126, 300)))
            if opcode == 8 and rng.random() < 0.7:
                payload = rng.choice((0, 999, 1000, 1001, 1005, 1011, 2999, 4000, 65_535)).to_bytes(2, "big") + payload
            made.append(ws_frame(rng, payload, is_masked=is_masked, opcode=opcode, is_final=rng.random() < 0.8))
        is_whole = rng.random() < 0.9
        made.append(ws_frame(rng, part, is_masked=is_masked, is_final=is_whole))
        if not is_whole:
            made.append(ws_frame(rng, b"", is_masked=is_masked, opcode=0))
    if made and rng.random() < 0.3:
        at = rng.randrange(len(made))
        made[at] = mutate_bytes(rng, made[at], made)
    return made


class _End(asyncio.Protocol):
    """The end that AMQP would have: keeps what it gets."""

    def __init__(self) -> None:
        self.received = bytearray()
        self.ends = 0
        self.lost: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
        self.transport: asyncio.BaseTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.received += data

    def connection_lost(self, exc: Exception | None) -> None:
        self.ends += 1
        if not self.lost.done():
            self.lost.set_result(exc)


class _NoServer:
    """Stands for a server that listens, and for its socket."""

    @property
    def sockets(self) -> list[_NoServer]:
        return [self]

    def getsockname(self) -> tuple[str, int]:
        return "127.0.0.1", 0

    def close(self) -> None:
        pass

    async def wait_closed(self) -> None:
        pass


class _MemoryLoop(asyncio.SelectorEventLoop):
    """A loop on which a server listens to nothing: its connections are made by hand."""

    listening: Callable[[], asyncio.BaseProtocol]

    async def create_server(self, protocol_factory: Any, *_: Any, **__: Any) -> Any:
        self.listening = protocol_factory
        return _NoServer()


class _WebSocketEntry(Entry):
    """One role of a WebSocket. A string is the handshake, and the bytes behind it."""

    overhead = 2 * 1024 * 1024
    make_loop: ClassVar[Callable[[], asyncio.AbstractEventLoop]] = asyncio.new_event_loop

    def __init__(self) -> None:
        self._runner = asyncio.Runner(loop_factory=type(self).make_loop)
        self._unhandled = Unhandled(self._runner.get_loop(), "asyncio", "aiohttp", "eventpump")
        self._dialogues = tuple(each for each in captures.dialogues() if each.is_web_socket)
        self._amqp = captures.plain_dialogues()

    def close(self) -> None:
        """Close the loop."""
        self._unhandled.close()
        self._runner.close()


class WebSocketServerEntry(_WebSocketEntry):
    """The emulator's WebSockets."""

    name, gate, long = "websocket-server", 150, 10_000
    make_loop = _MemoryLoop

    def make(self, rng: Random) -> tuple[bytes, ...]:
        """Make a handshake and frames of a client."""
        head = rng.choice(self._dialogues).flights[0].data.partition(b"\r\n\r\n")[0] + b"\r\n\r\n"
        if rng.random() < 0.3:
            head = mutate_bytes(rng, head, (head,))
        amqp = rng.choice(self._amqp).side(is_to_service=True)
        return head, b"".join(frames_of(rng, amqp, is_masked=True))

    def run(self, string: tuple[bytes, ...], rng: Random) -> None:
        """However the bytes are cut: the same bytes reach AMQP, and the stream ends alike; nothing is unhandled."""
        data = b"".join(string)
        whole = self._runner.run(self._serve([data]))
        split = self._runner.run(self._serve(pieces(rng, data)))
        self._unhandled.check()
        same(split, whole, "what reaches AMQP of a WebSocket in pieces and whole")

    async def _serve(self, parts: list[bytes]) -> Any:
        ends: list[_End] = []

        def make() -> _End:
            ends.append(_End())
            return ends[-1]

        loop = asyncio.get_running_loop()
        assert isinstance(loop, _MemoryLoop)
        server = await WebSocketServer.start(make, "127.0.0.1", 0, tls=None)
        transport = MemoryTransport(loop.listening())
        for part in parts:
            if transport.is_closing():
                break
            protocol = transport.get_protocol()
            assert isinstance(protocol, asyncio.Protocol)
            protocol.data_received(part)
            await settle(_TURNS if len(parts) < 50 else 6)
        await settle(_TURNS)
        transport.close()
        await settle(_TURNS)
        await server.aclose()
        await settle(_TURNS)
        require(holds=len(ends) <= 1, what="a stream has several ends")
        for end in ends:
            require(holds=end.ends == 1, what=f"an end was notified {end.ends} times that it is over")
        return [bytes(end.received) for end in ends]


class WebSocketClientEntry(_WebSocketEntry):
    """The client's WebSockets, against a server of the test on a socket."""

    name, gate, long = "websocket-client", 100, 10_000

    def make(self, rng: Random) -> tuple[bytes, ...]:
        """Make an answer to the handshake and frames of a service."""
        flight = next(each for each in rng.choice(self._dialogues).flights if not each.is_to_service)
        head = flight.data.partition(b"\r\n\r\n")[0] + b"\r\n\r\n"
        head = re.sub(rb"(?i)(sec-websocket-accept: )[^\r\n]*", rb"\g<1>ACCEPT", head)
        if rng.random() < 0.3:
            head = mutate_bytes(rng, head, (head,))
        amqp = rng.choice(self._amqp).side(is_to_service=False)
        return head, b"".join(frames_of(rng, amqp, is_masked=False))

    def run(self, string: tuple[bytes, ...], rng: Random) -> None:
        """The client connects and its end is reported once, or has a documented error; nothing is unhandled."""
        self._runner.run(self._connect(string))
        self._unhandled.check()

    async def _connect(self, string: tuple[bytes, ...]) -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                request = await reader.readuntil(b"\r\n\r\n")
                key = re.search(rb"(?i)sec-websocket-key: ([^\r\n]*)", request)
                assert key is not None
                accept = base64.b64encode(hashlib.sha1(key[1] + _GUID).digest())
                writer.write(string[0].replace(b"ACCEPT", accept) + string[1])
                await writer.drain()
                writer.write_eof()
                await reader.read()
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        route = Route("127.0.0.1", server.sockets[0].getsockname()[1], is_websocket=True)
        try:
            async with asyncio.timeout(_PATIENCE):
                try:
                    end = await connect(_End, route)
                except ServiceError:
                    return
                await end.lost
                assert isinstance(end.transport, WebSocketTransport)
                assert end.transport.task is not None
                await asyncio.wait([end.transport.task])
                if (error := end.transport.task.exception()) is not None:
                    raise BreachError(f"what carries a WebSocket ends with {type(error).__name__}") from error
                require(holds=end.ends == 1, what="an end was notified more than once that it is over")
        except TimeoutError as error:
            raise BreachError("the client hangs") from error
        finally:
            server.close()
            await server.wait_closed()
            await settle(_TURNS)
