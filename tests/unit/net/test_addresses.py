"""A name with several addresses, on loopback: one that swallows, one that refuses, two that answer."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from eventpump.net import addresses
from eventpump.net.dialing import dial
from eventpump.net.route import Route
from eventpump.options.connection import ProxySettings
from tests.support.sockets import open_sockets
from tests.unit.net.ends import Client
from tests.unit.net.test_route import answering

pytestmark = pytest.mark.real_time

Place = tuple[str, int]
PATIENCE = 20.0


@contextlib.contextmanager
def listening() -> Iterator[socket.socket]:
    """Listen without accepting: what connects is connected by the system."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(8)
        yield listener


@contextlib.contextmanager
def swallowing() -> Iterator[Place]:
    """Return a place that answers no attempt to connect: its queue of connections is full."""
    with socket.socket() as listener, contextlib.ExitStack() as held:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        place = listener.getsockname()
        for _ in range(16):
            filler = held.enter_context(socket.socket())
            filler.settimeout(0.2)
            try:
                filler.connect(place)
            except TimeoutError:
                break
        else:
            pytest.fail("the queue does not get full")
        yield place


@contextlib.contextmanager
def refusing() -> Iterator[Place]:
    """Return an address without a listener, which no other program can take."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()


@pytest.fixture
def resolve(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Have a name stand for places in their order, until the test is over."""

    def stand_for(*places: Place) -> None:
        async def getaddrinfo(_host: object, _port: object, **_: Any) -> list[Any]:
            return [(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", place) for place in places]

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)

    return stand_for


@pytest.fixture(autouse=True)
async def nothing_left() -> Any:
    """Check that no task and no socket is left."""
    before = open_sockets()
    yield
    for _ in range(3):
        await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert not open_sockets() - before


async def test_connect_passes_over_an_address_that_does_not_answer(resolve: Any) -> None:
    """Where the first address answers nothing, the second is connected to while the first is still being tried."""
    with swallowing() as hole, listening() as listener:
        resolve(hole, listener.getsockname())
        async with asyncio.timeout(PATIENCE):
            with await addresses.connect("two.test", 1) as connected:
                assert connected.getpeername() == listener.getsockname()


@pytest.mark.parametrize("carrier", ["tcp", "proxy", "websocket"])
async def test_connect_passes_over_an_address_on_every_route(resolve: Any, carrier: str) -> None:
    """Straight, by way of a proxy and as a WebSocket: an address that swallows is passed over."""
    reached = asyncio.Event()

    async def note(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        reached.set()

    client = Client()
    with swallowing() as hole:
        async with asyncio.timeout(PATIENCE), answering(note) as port:
            resolve(hole, ("127.0.0.1", port))
            proxy = ProxySettings.parse("proxy.test:1") if carrier == "proxy" else None
            route = Route("two.test", 1, is_websocket=carrier == "websocket", proxy=proxy)
            dialling = asyncio.ensure_future(dial(client.engine, client, route))
            await reached.wait()
            dialling.cancel()
            with contextlib.suppress(Exception, asyncio.CancelledError):
                (await dialling).abort()
            await asyncio.sleep(0)


async def test_connect_after_a_failed_address_tries_the_next_at_once(
    resolve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refused attempt is not waited out: the next address is tried, however long the stagger."""
    monkeypatch.setattr(addresses, "STAGGER", 3600.0)
    with refusing() as closed, listening() as listener:
        resolve(closed, listener.getsockname())
        async with asyncio.timeout(PATIENCE):
            with await addresses.connect("two.test", 1) as connected:
                assert connected.getpeername() == listener.getsockname()


async def test_connect_to_two_addresses_that_answer_closes_one(resolve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of addresses that answer in one turn of the loop one wins, and the other is closed."""
    monkeypatch.setattr(addresses, "STAGGER", 0.001)
    loop = asyncio.get_running_loop()
    connect, together = loop.sock_connect, asyncio.Barrier(2)

    async def sock_connect(connecting: socket.socket, place: Any) -> None:
        await connect(connecting, place)
        await together.wait()

    monkeypatch.setattr(loop, "sock_connect", sock_connect)
    with listening() as first, listening() as second:
        resolve(first.getsockname(), second.getsockname())
        async with asyncio.timeout(PATIENCE):
            with await addresses.connect("two.test", 1) as connected:
                loser = second if connected.getpeername() == first.getsockname() else first
        other, _ = loser.accept()
        with other:
            other.setblocking(False)
            async with asyncio.timeout(PATIENCE):
                assert await loop.sock_recv(other, 1) == b""


async def test_connect_where_every_address_fails_gives_each_reason(resolve: Any) -> None:
    """Where every address fails, the error gives each reason."""
    with refusing() as one, refusing() as other:
        resolve(one, other)
        with pytest.raises(ConnectionRefusedError):
            await addresses.connect("two.test", 1)
        resolve(one, ("255.255.255.255", 1))
        with pytest.raises(OSError, match=r"Connect call failed.*Network is unreachable"):
            await addresses.connect("two.test", 1)
        resolve()
        with pytest.raises(OSError, match="no address"):
            await addresses.connect("two.test", 1)


async def test_connect_that_is_cancelled_leaves_no_task_or_socket(
    resolve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cancelled while addresses are tried, no task and no socket is left."""
    with swallowing() as hole, swallowing() as other:
        resolve(hole, other)
        loop = asyncio.get_running_loop()
        connect, trying = loop.sock_connect, asyncio.Semaphore(0)

        async def sock_connect(socket: socket.socket, place: Any) -> None:
            trying.release()
            await connect(socket, place)

        monkeypatch.setattr(loop, "sock_connect", sock_connect)
        connecting = asyncio.create_task(addresses.connect("two.test", 1))
        for _ in range(2):
            await trying.acquire()
        connecting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await connecting


async def test_addresses_of_both_families_alternate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Addresses of both families alternate, beginning with the family of the first, each in its own order."""
    loop = asyncio.get_running_loop()
    six, four = [("::1", port, 0, 0) for port in (1, 2, 3)], [("127.0.0.1", port) for port in (4, 5)]
    tried: list[Any] = []

    async def getaddrinfo(_host: object, _port: object, **_: Any) -> list[Any]:
        kind = (socket.SOCK_STREAM, socket.IPPROTO_TCP, "")
        return [(socket.AF_INET6, *kind, each) for each in six] + [(socket.AF_INET, *kind, each) for each in four]

    async def sock_connect(_: socket.socket, place: Any) -> None:
        tried.append(place)
        raise ConnectionRefusedError

    monkeypatch.setattr(loop, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(loop, "sock_connect", sock_connect)
    with pytest.raises(ConnectionRefusedError):
        await addresses.connect("two.test", 1)
    assert tried == [six[0], four[0], six[1], four[1], six[2]]


async def test_address_that_is_numeric_is_not_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is an address already takes no thread."""

    async def getaddrinfo(*_: object, **__: object) -> list[Any]:
        raise AssertionError

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    with listening() as listener, await addresses.connect(*listener.getsockname()) as connected:
        assert connected.getpeername() == listener.getsockname()
