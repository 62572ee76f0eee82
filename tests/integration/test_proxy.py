"""The fault proxy breaks what a test says, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from typing import TypeVar

import pytest

from eventpump.testing.proxy import Direction, FaultProxy

_T = TypeVar("_T")
Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    except ConnectionError:
        pass
    finally:
        writer.close()


@pytest.fixture
async def proxy() -> AsyncIterator[FaultProxy]:
    """A proxy before a service that sends back what it is sent."""
    server = await asyncio.start_server(_echo, "127.0.0.1", 0)
    async with server, FaultProxy(server.sockets[0].getsockname()[1]) as proxy:
        yield proxy


async def _connect(proxy: FaultProxy) -> Stream:
    return await asyncio.open_connection("127.0.0.1", proxy.port)


async def _soon(what: Awaitable[_T]) -> _T:
    return await asyncio.wait_for(what, 5.0)


async def _is_silent(stream: Stream) -> bool:
    try:
        await asyncio.wait_for(stream[0].read(1), 0.05)
    except TimeoutError:
        return True
    return False


async def _is_reset(stream: Stream) -> bool:
    try:
        while await _soon(stream[0].read(1 << 16)):
            pass
    except ConnectionResetError:
        return True
    return False


async def test_proxy_without_a_fault_forwards_every_byte(proxy: FaultProxy) -> None:
    """Without a fault every byte arrives, in both directions at once, and so does the end."""
    reader, writer = await _connect(proxy)
    data = bytes(range(256)) * 20_000
    writer.write(data)
    assert await _soon(reader.readexactly(len(data))) == data
    writer.write_eof()
    assert await _soon(reader.read()) == b""
    writer.close()
    assert proxy.connections_accepted == 1
    assert proxy.bytes_forwarded(Direction.TO_CLIENT) == proxy.bytes_forwarded(Direction.TO_SERVICE) == len(data)


async def test_cut_resets_every_connection(proxy: FaultProxy) -> None:
    """Every connection is reset; the next one is served."""
    streams = [await _connect(proxy) for _ in range(3)]
    await _soon(proxy.until_accepted(3))
    assert proxy.cut() == 3
    for stream in streams:
        assert await _is_reset(stream)
        stream[1].close()
    reader, writer = await _connect(proxy)
    writer.write(b"x")
    assert await _soon(reader.readexactly(1)) == b"x"
    writer.close()


async def test_half_open_keeps_connections_silent_until_restored(proxy: FaultProxy) -> None:
    """Old and new connections stay up and silent; restored, what was held back comes, and nothing is missing."""
    old = await _connect(proxy)
    old[1].write(b"a")
    assert await _soon(old[0].readexactly(1)) == b"a"
    proxy.half_open()
    new = await _connect(proxy)
    for stream in (old, new):
        stream[1].write(b"b")
        assert await _is_silent(stream)
    assert proxy.connection_count == 2
    proxy.restore()
    for stream in (old, new):
        assert await _soon(stream[0].readexactly(1)) == b"b"
        stream[1].close()


@pytest.mark.parametrize("direction", list(Direction))
async def test_stall_holds_up_one_direction(proxy: FaultProxy, direction: Direction) -> None:
    """What travels that way waits, what travels the other way does not."""
    reader, writer = stream = await _connect(proxy)
    writer.write(b"a")
    assert await _soon(reader.readexactly(1)) == b"a"
    proxy.stall(direction)
    writer.write(b"b")
    assert await _is_silent(stream)
    assert proxy.bytes_forwarded(Direction.TO_SERVICE) == (1 if direction is Direction.TO_SERVICE else 2)
    proxy.restore()
    assert await _soon(reader.readexactly(1)) == b"b"
    writer.close()


async def test_cut_after_a_number_of_bytes_resets_there(proxy: FaultProxy) -> None:
    """After so many bytes to clients the connections are reset, and no byte more went."""
    _, writer = stream = await _connect(proxy)
    proxy.cut_after(1000)
    writer.write(b"x" * 100_000)
    assert await _is_reset(stream)
    assert proxy.bytes_forwarded(Direction.TO_CLIENT) == 1000
    writer.close()


async def test_delay_keeps_the_order(proxy: FaultProxy) -> None:
    """Everything comes, in order, no sooner than configured."""
    proxy.delay(0.05)
    loop = asyncio.get_running_loop()
    reader, writer = await _connect(proxy)
    began = loop.time()
    for number in range(10):
        writer.write(bytes([number]))
        await writer.drain()
        await asyncio.sleep(0)
    assert await _soon(reader.readexactly(10)) == bytes(range(10))
    assert loop.time() - began >= 0.1
    writer.close()


async def test_refuse_resets_new_connections(proxy: FaultProxy) -> None:
    """New connections are reset, until it is restored; the old ones live."""
    old = await _connect(proxy)
    await _soon(proxy.until_accepted(1))
    proxy.refuse()
    new = await _connect(proxy)
    assert await _is_reset(new)
    old[1].write(b"a")
    assert await _soon(old[0].readexactly(1)) == b"a"
    for stream in (old, new):
        stream[1].close()


async def test_connection_to_a_service_that_is_gone_is_reset() -> None:
    """Without a listener behind it, connections are reset."""
    server = await asyncio.start_server(_echo, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    async with FaultProxy(port) as proxy:
        stream = await _connect(proxy)
        assert await _is_reset(stream)
        stream[1].close()


async def test_close_leaves_no_connection(proxy: FaultProxy) -> None:
    """Closed, in the middle of a fault, every connection is gone; closing twice is fine."""
    stream = await _connect(proxy)
    await _soon(proxy.until_accepted(1))
    proxy.half_open()
    await proxy.aclose()
    await proxy.aclose()
    assert await _is_reset(stream)
    assert proxy.connection_count == 0
    stream[1].close()
    with pytest.raises(ConnectionRefusedError):
        await _connect(proxy)
