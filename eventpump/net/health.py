"""A small HTTP server for what watches a program: `/metrics`, `/lag.json`, `/livez` and `/readyz`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Literal, Protocol, Self

from aiohttp import web

from eventpump.errors import ConfigurationError

_TEXT: Final = "text/plain; version=0.0.4; charset=utf-8"
_MAX_BODY: Final = 1024
_KEEP_ALIVE: Final = 15.0
_SHUTDOWN_TIMEOUT: Final = 1.0


@dataclass(frozen=True, slots=True)
class Sample:
    """One value of a metric.

    Args:
        labels: Its labels.
        value: The value.
    """

    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric with its values, in the terms of Prometheus.

    Args:
        name: Its name.
        kind: Its type.
        text: What it measures, with its unit.
        samples: Its values. Without any it is left out.
    """

    name: str
    kind: Literal["counter", "gauge"]
    text: str
    samples: Sequence[Sample]


@dataclass(frozen=True, slots=True)
class Health:
    """How a program is.

    Args:
        live: Whether it works: a supervisor restarts it otherwise.
        ready: Whether it has begun its work.
        reasons: Why it is not, in sentences. Default: `()`.
    """

    live: bool
    ready: bool
    reasons: Sequence[str] = ()


class Monitored(Protocol):
    """What a `HealthServer` reports. Its methods are called for each request, and must not block."""

    def health(self) -> Health:
        """Return how it is."""

    def metrics(self) -> Iterable[Metric]:
        """Return its metrics."""

    def lag(self) -> Mapping[str, Any] | None:
        """Return the lag as JSON values, with the sum as `lag`; None if there is none yet."""


class HealthServer:
    """Serves what watches a program, on the program's event loop.

    ::

        async with HealthServer(watched, port=9108) as server:
            print(server.url)

    Args:
        watched: What is reported.
        address: The address to listen on; that of the default is reached from this machine alone. Default: "127.0.0.1".
        port: The port; 0 for a free one. Default: 8080.

    Raises:
        ConfigurationError: The port is no port.
    """

    def __init__(self, watched: Monitored, *, address: str = "127.0.0.1", port: int = 8080) -> None:
        if not 0 <= port <= 65535:
            raise ConfigurationError("port", "must be a number from 0 to 65535")
        self._watched = watched
        self._address = address
        self._port = port
        app = web.Application(client_max_size=_MAX_BODY)
        app.router.add_get("/livez", self._livez)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/lag.json", self._lag)
        # Its log of accesses is the prober's, not the program's.
        self._runner = web.AppRunner(
            app, access_log=None, keepalive_timeout=_KEEP_ALIVE, shutdown_timeout=_SHUTDOWN_TIMEOUT
        )

    @property
    def port(self) -> int:
        """The port that it listens on, once it is started."""
        addresses = self._runner.addresses
        return int(addresses[0][1]) if addresses else self._port

    @property
    def url(self) -> str:
        """Where it is reached, without a path."""
        host = f"[{self._address}]" if ":" in self._address else self._address
        return f"http://{host}:{self.port}"

    async def start(self) -> None:
        """Begin to listen.

        Raises:
            ConfigurationError: The address or the port cannot be used.
        """
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, self._address, self._port).start()
        except OSError as error:
            await self._runner.cleanup()
            raise ConfigurationError("port", f"{self._address}:{self._port}: {error.strerror or error}") from None

    async def aclose(self) -> None:
        """Stop listening, and end the requests. May be called more than once."""
        await self._runner.cleanup()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def _livez(self, _: web.Request) -> web.Response:
        health = self._watched.health()
        return _answer(health.live, health.reasons)

    async def _readyz(self, _: web.Request) -> web.Response:
        health = self._watched.health()
        return _answer(health.ready, health.reasons)

    async def _metrics(self, _: web.Request) -> web.Response:
        body = exposition(self._watched.metrics()).encode()
        return web.Response(body=body, headers={"Content-Type": _TEXT})

    async def _lag(self, _: web.Request) -> web.Response:
        found = self._watched.lag()
        if found is None:
            return web.json_response({"error": "the lag was not read yet"}, status=503)
        return web.Response(text=json.dumps(found, ensure_ascii=False), content_type="application/json")


def _answer(is_well: bool, reasons: Sequence[str]) -> web.Response:
    return web.Response(
        text="ok\n" if is_well else "\n".join(reasons or ("not yet",)) + "\n", status=200 if is_well else 503
    )


def exposition(metrics: Iterable[Metric]) -> str:
    """Return metrics in Prometheus' text format, version 0.0.4."""
    lines = []
    for metric in metrics:
        if not metric.samples:
            continue
        lines += [f"# HELP {metric.name} {_escaped(metric.text)}", f"# TYPE {metric.name} {metric.kind}"]
        for sample in metric.samples:
            labels = ",".join(f'{name}="{_quoted(value)}"' for name, value in sample.labels.items())
            lines.append(f"{metric.name}{f'{{{labels}}}' if labels else ''} {_number(sample.value)}")
    return "".join(f"{line}\n" for line in lines)


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")


def _quoted(text: str) -> str:
    return _escaped(text).replace('"', r"\"")


def _number(value: float) -> str:
    if isinstance(value, int):
        return str(value)
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(value)
