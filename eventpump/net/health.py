"""A small HTTP server for what watches a program: `/livez`, `/readyz`, `/metrics`, `/lag.json` and `/debug`."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Protocol, Self, runtime_checkable

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from eventpump.aio.closing import AsyncResource
from eventpump.core.monitoring import Health, Metric, all_healthy, exposition, merged
from eventpump.errors import ConfigurationError
from eventpump.net.stream import reason_of
from eventpump.texts import without_secrets

_TEXT: Final = "text/plain; version=0.0.4; charset=utf-8"
_MAX_BODY: Final = 1024
_KEEP_ALIVE: Final = 15.0
_SHUTDOWN_TIMEOUT: Final = 1.0

MOST_CONNECTIONS: Final = 512
"""How many connections there are at a time. One more closes the oldest."""

LONGEST_CONNECTION: Final = 60.0
"""Seconds after which a connection is closed, whether its request has come to an end or not."""

_LAST_ANSWER: Final = 2.0

REUSED: Final = 10
"""For how many times as long as it took to compute it an answer is given again: so requests, however many, take at most
a tenth of the loop's time for that."""

_LOCAL_NAMES: Final = frozenset({"localhost", "127.0.0.1", "[::1]"})


class Monitored(Protocol):
    """What a `HealthServer` reports. Its methods are called for requests, and must not block."""

    def health(self) -> Health:
        """Return how it is."""

    def metrics(self) -> Iterable[Metric]:
        """Return its metrics."""

    def behind(self) -> Mapping[str, Any] | None:
        """Return the lag as JSON values, with the sum as `lag`; None if there is none yet."""


@runtime_checkable
class Describable(Protocol):
    """What a `HealthServer` shows under `/debug`, if it has this beside the methods of `Monitored`."""

    def describe(self) -> object:
        """Return what it is doing now; `str` of it is shown."""


class HealthServer(AsyncResource):
    """Serves what watches a program, on the program's event loop.

    ::

        async with HealthServer(host, port=9108), host:
            await host.run()

    An event loop that hangs gives no answer, which a supervisor counts as not live.

    Args:
        watched: What is reported: hosts, applications, readers, producers, or objects of your own. The program is live
            and ready if all of them are.
        address: The address to listen on; that of the default is reached from this machine alone. Default: "127.0.0.1".
        port: The port; 0 for a free one. Default: 8080.
        debug: Whether `/debug` shows what the program is doing, with names of its files and functions. Only for an
            address of this machine alone. Default: False.

    Raises:
        ConfigurationError: Nothing is watched, the port is no port, or `debug` is given with another address.
    """

    def __init__(self, *watched: Monitored, address: str = "127.0.0.1", port: int = 8080, debug: bool = False) -> None:
        if not watched:
            raise ConfigurationError("watched", "is required: give a host, an application, a reader or a producer")
        if not 0 <= port <= 65535:
            raise ConfigurationError("port", "must be a number from 0 to 65535")
        if debug and address != "localhost" and not _is_loopback(address):
            problem = f"is for an address of this machine alone, such as 127.0.0.1, and not for {address}"
            raise ConfigurationError("debug", problem)
        self._watched = watched
        self._address = address
        self._port = port
        app = web.Application(client_max_size=_MAX_BODY)
        app.router.add_get("/livez", self._livez)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/lag.json", self._lag)
        if debug:
            app.router.add_get("/debug", self._debug)
        self._exposed = _Reused(lambda: exposition(merged(each.metrics() for each in self._watched)).encode())
        self._lags = _Reused(self._lag_text)
        # Its log of accesses is the prober's, not the program's.
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=_SHUTDOWN_TIMEOUT)
        self._server: asyncio.Server | None = None

    @property
    def port(self) -> int:
        """The port that it listens on, once it is started."""
        sockets = () if self._server is None else self._server.sockets
        return int(sockets[0].getsockname()[1]) if sockets else self._port

    @property
    def url(self) -> str:
        """Where it is reached, without a path."""
        host = f"[{self._address}]" if ":" in self._address else self._address
        return f"http://{host}:{self.port}"

    async def start(self) -> None:
        """Begin to listen. Nothing happens if it does already.

        Raises:
            ConfigurationError: The address or the port cannot be used.
        """
        if self._server is not None:
            return
        await self._runner.setup()
        loop, connections = asyncio.get_running_loop(), dict[_Connection, None]()
        try:
            self._server = await loop.create_server(
                lambda: _Connection(self._runner, connections, loop), self._address, self._port
            )
        except OSError as error:
            await self._runner.cleanup()
            raise ConfigurationError("port", f"{self._address}:{self._port}: {reason_of(error)}") from None

    async def aclose(self) -> None:
        """Stop listening, and end the requests. May be called more than once."""
        server, self._server = self._server, None
        if server is not None:
            self._port = int(server.sockets[0].getsockname()[1]) if server.sockets else self._port
            server.close()
        await self._runner.cleanup()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    @property
    def _health(self) -> Health:
        return all_healthy(each.health() for each in self._watched)

    async def _livez(self, _: web.Request) -> web.Response:
        health = self._health
        return _answer(health.live, health)

    async def _readyz(self, _: web.Request) -> web.Response:
        health = self._health
        return _answer(health.ready, health)

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=self._exposed(), headers={"Content-Type": _TEXT})

    async def _lag(self, _: web.Request) -> web.Response:
        found = self._lags()
        if not found:
            return web.json_response({"error": "the lag was not read yet"}, status=503)
        return web.Response(body=found, content_type="application/json")

    def _lag_text(self) -> bytes:
        found = [lag for each in self._watched if (lag := each.behind()) is not None]
        if not found:
            return b""
        whole = found[0] if len(found) == 1 else {"lag": sum(each["lag"] for each in found), "parts": found}
        return json.dumps(whole, ensure_ascii=False).encode()

    async def _debug(self, request: web.Request) -> web.Response:
        # A page of the web that has its name resolve to this machine must not read it through the user's browser.
        if request.host.rpartition(":")[0] not in _LOCAL_NAMES and request.host not in _LOCAL_NAMES:
            return web.Response(status=403, text="ask for it as 127.0.0.1 or localhost\n")
        shown = [str(each.describe()) for each in self._watched if isinstance(each, Describable)]
        return web.Response(text=without_secrets("\n\n".join(shown)) + "\n")


class _Connection(RequestHandler):
    """A connection of the server, which ends after a time: a client that sends or reads slowly keeps nothing open."""

    __slots__ = ("_connections", "_ends")

    def __init__(
        self, runner: web.AppRunner, connections: dict[_Connection, None], loop: asyncio.AbstractEventLoop
    ) -> None:
        assert runner.server is not None
        super().__init__(
            runner.server,
            loop=loop,
            access_log=None,  # type: ignore[arg-type] # as `AppRunner` does it
            keepalive_timeout=_KEEP_ALIVE,
            lingering_time=_SHUTDOWN_TIMEOUT,
        )
        self._connections = connections
        self._ends: list[asyncio.TimerHandle] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if len(self._connections) >= MOST_CONNECTIONS:
            next(iter(self._connections)).abort()
        self._connections[self] = None
        later = asyncio.get_running_loop().call_later
        self._ends = [later(LONGEST_CONNECTION, self.close), later(LONGEST_CONNECTION + _LAST_ANSWER, self.abort)]

    def connection_lost(self, exc: BaseException | None) -> None:
        self._connections.pop(self, None)
        for timer in self._ends:
            timer.cancel()
        super().connection_lost(exc)

    def abort(self) -> None:
        """Close it, without what was not sent yet."""
        self._connections.pop(self, None)
        if self.transport is not None:
            self.transport.abort()


class _Reused:
    """Computes an answer, and gives it again for a time that grows with what it costs."""

    def __init__(self, compute: Callable[[], bytes]) -> None:
        self._compute = compute
        self._answer = b""
        self._until = 0.0

    def __call__(self) -> bytes:
        now = time.monotonic()
        if now >= self._until:
            self._answer = self._compute()
            ended = time.monotonic()
            self._until = ended + REUSED * (ended - now)
        return self._answer


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _answer(is_well: bool, health: Health) -> web.Response:
    return web.Response(
        text="ok\n" if is_well else "\n".join(health.reasons or ("not yet",)) + "\n", status=200 if is_well else 503
    )
