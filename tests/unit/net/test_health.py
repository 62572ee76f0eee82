"""The server of probes and metrics: its addresses, its answers, and what it takes of the event loop."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any

import aiohttp
import pytest

from eventpump.core.monitoring import Health, Metric, Sample
from eventpump.errors import ConfigurationError
from eventpump.net import health as served
from eventpump.net.health import REUSED, HealthServer


class Watched:
    """Something that is as a test says, and counts how often its metrics are asked for."""

    def __init__(self, health: Health | None = None, lag: Mapping[str, Any] | None = None) -> None:
        self.found = Health(live=True, ready=True) if health is None else health
        self.found_lag = lag
        self.asked = 0
        self.takes = 0.0

    def health(self) -> Health:
        return self.found

    def metrics(self) -> tuple[Metric, ...]:
        self.asked += 1
        until = time.monotonic() + self.takes
        while time.monotonic() < until:
            pass
        return (Metric("asked", "counter", "How often.", [Sample({"of": "a"}, self.asked)]),)

    def behind(self) -> Mapping[str, Any] | None:
        return self.found_lag

    def describe(self) -> str:
        return "waits for Endpoint=sb://a.example/;SharedAccessKeyName=k;SharedAccessKey=c2VjcmV0c2VjcmV0c2VjcmV0"


async def answer(server: HealthServer, path: str, **headers: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as client, client.get(f"{server.url}{path}", headers=headers) as response:
        return response.status, await response.text()


async def test_port_in_use_is_a_configuration_error() -> None:
    """It names address and port once, and the reason."""
    async with HealthServer(Watched(), port=0) as server:
        with pytest.raises(ConfigurationError) as raised:
            await HealthServer(Watched(), port=server.port).start()
    assert str(raised.value) == f"port: 127.0.0.1:{server.port}: Address already in use"


async def test_server_that_is_started_twice_listens_once() -> None:
    """Closed, it listens no more."""
    async with HealthServer(Watched(), port=0) as server:
        port = server.port
        await server.start()
        assert server.port == port
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)


async def test_probes_answer_for_all_that_is_watched() -> None:
    """503 with the reasons if one part is not, each reason once; nothing to watch is refused."""
    parts = [Watched(), Watched(Health(live=True, ready=False, reasons=("the hub",))), Watched()]
    async with HealthServer(*parts, port=0) as server:
        assert await answer(server, "/livez") == (200, "ok\n")
        assert await answer(server, "/readyz") == (503, "the hub\n")
        parts[2].found = Health(live=False, ready=False, reasons=("the hub", "the loop"))
        assert await answer(server, "/livez") == (503, "the hub\nthe loop\n")
        parts[1].found = parts[2].found = parts[0].found
        assert await answer(server, "/readyz") == (200, "ok\n")
    with pytest.raises(ConfigurationError, match="watched"):
        HealthServer()


async def test_lag_is_that_of_all_parts_that_have_one() -> None:
    """The document of the one that has; of several their sum; 503 while there is none."""
    parts = [Watched(), Watched(), Watched()]
    async with HealthServer(*parts, port=0) as server:
        assert (await answer(server, "/lag.json"))[0] == 503
    parts[0].found_lag = {"lag": 3, "hub": "a"}
    async with HealthServer(*parts, port=0) as server:
        assert await answer(server, "/lag.json") == (200, '{"lag": 3, "hub": "a"}')
    parts[2].found_lag = {"lag": 4, "hub": "b"}
    async with HealthServer(*parts, port=0) as server:
        _, text = await answer(server, "/lag.json")
        assert text == '{"lag": 7, "parts": [{"lag": 3, "hub": "a"}, {"lag": 4, "hub": "b"}]}'


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "", "192.0.2.1", "example.com"])
def test_server_of_another_address_serves_no_debug(address: str) -> None:
    """What it shows names files and functions of the program."""
    with pytest.raises(ConfigurationError, match="debug"):
        HealthServer(Watched(), address=address, debug=True)


async def test_debug_is_served_if_asked_for_by_a_local_name_and_without_secrets() -> None:
    """Not otherwise, and not to a page of the web whose name was made to point to this machine."""
    async with HealthServer(Watched(), port=0) as server:
        assert (await answer(server, "/debug"))[0] == 404
    async with HealthServer(Watched(), port=0, debug=True) as server:
        status, text = await answer(server, "/debug")
        assert status == 200
        assert text.startswith("waits for Endpoint=sb://a.example/;")
        assert "c2VjcmV0" not in text
        assert (await answer(server, "/debug", Host="localhost"))[0] == 200
        for name in ("evil.example:80", "127.0.0.1.evil.example", "localhost.evil.example:9108"):
            assert await answer(server, "/debug", Host=name) == (403, "ask for it as 127.0.0.1 or localhost\n")


async def test_answer_that_is_costly_is_given_again_for_a_while() -> None:
    """So that requests without end take a tenth of the loop's time at most; a cheap one is computed each time."""
    watched = Watched()
    async with HealthServer(watched, port=0) as server:
        assert "asked{" in (await answer(server, "/metrics"))[1]
        watched.takes = 0.2
        before = watched.asked
        texts = [(await answer(server, "/metrics"))[1] for _ in range(20)]
        assert watched.asked - before <= 1 + len(texts) // REUSED


async def test_hanging_loop_gives_no_answer() -> None:
    """Which a supervisor counts as not live; when the loop turns again, the answer comes."""
    async with HealthServer(Watched(), port=0) as server:
        address, hangs, go_on = ("127.0.0.1", server.port), threading.Event(), threading.Event()

        def probe() -> tuple[bytes, bytes]:
            hangs.wait()
            with socket.create_connection(address) as client:
                client.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
                client.settimeout(0.5)
                try:
                    early = client.recv(1000)
                except TimeoutError:
                    early = b""
                go_on.set()
                client.settimeout(None)
                return early, client.recv(1000)

        probing = asyncio.create_task(asyncio.to_thread(probe))
        await asyncio.sleep(0)
        hangs.set()
        assert go_on.wait(60)  # on the loop's thread
        early, late = await probing
        assert early == b""
        assert late.startswith(b"HTTP/1.1 200")


async def test_connections_that_are_slow_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether they send no request, half of one, one without an end, or do not read the answer."""
    monkeypatch.setattr(served, "LONGEST_CONNECTION", 0.3)
    monkeypatch.setattr(served, "_LAST_ANSWER", 0.1)
    begins = [
        b"",
        b"GET /livez HTTP/1.1\r\nHost: loc",
        b"GET /livez HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab",
    ]
    async with HealthServer(Watched(), port=0) as server:
        for begin in begins:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(begin)
            async with asyncio.timeout(2):
                await reader.read()
            writer.close()
        assert await answer(server, "/livez") == (200, "ok\n")


async def test_one_connection_too_many_closes_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that idle ones cannot keep probes out."""
    monkeypatch.setattr(served, "MOST_CONNECTIONS", 3)
    async with HealthServer(Watched(), port=0) as server:
        open_ones = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(3)]
        assert await answer(server, "/livez") == (200, "ok\n")
        async with asyncio.timeout(2):
            assert await open_ones[0][0].read() == b""
        for _, writer in open_ones:
            writer.close()
