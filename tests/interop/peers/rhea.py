"""Runs the service on rhea in a process of its own, and talks to it."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from tests.interop.peers.lines import WS_VERSION, LinePeer
from tests.support.node import install_npm_package, node_binary

RHEA_VERSION = "3.0.5"
_PROGRAM = Path(__file__).with_name("rhea_server.mjs")


@dataclass(frozen=True, kw_only=True)
class RheaOptions:
    """How the service behaves.

    Args:
        partitions: Of the hub, `telemetry`.
        max_frame_size: The largest frame it takes, in bytes; None for rhea's default.
        idle_time_out: Milliseconds, as its open says; it bears twice as many. None for none.
        credit_window: Messages it takes without being granted credit; 0 has `grant` say how many.
        is_settled: Whether it sends events settled, as the real service does.
        max_message_size: What its links for publishing say.
        tls: A file with its certificate and key (PEM); None for plain TCP.
        web_socket: Serve AMQP over WebSockets.
        log_frames: Have rhea write every frame to stderr.
    """

    partitions: int = 2
    max_frame_size: int | None = None
    idle_time_out: int | None = None
    credit_window: int = 1000
    is_settled: bool = True
    max_message_size: int = 1024 * 1024
    tls: Path | None = None
    web_socket: bool = False
    log_frames: bool = False


@dataclass(frozen=True)
class StoredEvent:
    """An event as rhea decoded it."""

    body: bytes
    properties: dict[str, Any]
    annotations: dict[str, Any]


class RheaServer(LinePeer):
    """The process of the service.

    Attributes:
        notes: What happened by itself, in order: a kind, and more.
    """

    hub = "telemetry"

    def __init__(self, options: RheaOptions | None = None) -> None:
        super().__init__()
        self.options = options or RheaOptions()
        self.notes: list[dict[str, Any]] = []
        self.port = 0

    async def command(self) -> tuple[str, ...]:
        """See the base."""
        rhea = await asyncio.to_thread(install_npm_package, "rhea", RHEA_VERSION)
        ws = await asyncio.to_thread(install_npm_package, "ws", WS_VERSION)
        spelled = {_camel(name): value for name, value in asdict(self.options).items() if value is not None}
        options = json.dumps({"hub": self.hub, **spelled}, default=str)
        return str(node_binary()), str(_PROGRAM), str(rhea), str(ws), options

    @property
    def environment(self) -> Mapping[str, str]:
        """See the base."""
        return {"DEBUG": "rhea:frames"} if self.options.log_frames else {}

    def take(self, note: dict[str, Any]) -> None:
        """See the base."""
        self.notes.append(note)

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        (listening,) = await self.noted("listening")
        self.port = listening["port"]
        return self

    async def noted(self, kind: str, count: int = 1) -> list[dict[str, Any]]:
        """Wait until something happened a number of times."""

        def found() -> list[dict[str, Any]]:
            return [note for note in self.notes if note["note"] == kind]

        await self.until(lambda: len(found()) >= count, lambda: f"{kind} in {self.notes} {self.stderr}")
        return found()

    @property
    def connection_string(self) -> str:
        """What a client connects with. The service takes any key."""
        plain = ";UseDevelopmentEmulator=true" if self.options.tls is None else ""
        return f"Endpoint=sb://127.0.0.1:{self.port};SharedAccessKeyName=any;SharedAccessKey=any-key-will-do{plain}"

    async def events(self, partition: int = 0) -> list[StoredEvent]:
        """Return what it stored."""
        return [
            StoredEvent(base64.b64decode(each["body"]), each["properties"], each["annotations"])
            for each in await self.call("events", partition=partition)
        ]

    async def seen(self) -> dict[str, Any]:
        """Return what it has seen of its clients."""
        return dict(await self.call("seen"))


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)
