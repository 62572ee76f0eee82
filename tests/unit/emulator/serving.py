"""The emulator's service over streams in memory: everything happens on virtual time."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from typing import Any

from eventpump.amqp.config import ConnectionConfig
from eventpump.amqp.connection import AMQP_HEADER, SASL_HEADER, Connection, Opened
from eventpump.amqp.performatives import Open, SaslInit
from eventpump.emulator.auth import DEFAULT_KEY, DEFAULT_KEY_NAME, AccessRule, KeyRing, TokenVerifier
from eventpump.emulator.config import HubSpec
from eventpump.emulator.connection import ServiceConnection
from eventpump.emulator.log import Retention
from eventpump.emulator.server import _ServedProtocol
from eventpump.emulator.service import Deadlines, Service
from eventpump.net.route import Route
from eventpump.net.stream import ConnectionHandler, ConnectionProtocol
from eventpump.options.credentials import SharedKey
from eventpump.testing.clock import VirtualClock
from eventpump.transport.native import NativeTransport
from tests.support.peer import AmqpPeer
from tests.unit.amqp.pair import frame
from tests.unit.transport.service import MemoryStream, settings

AUDIENCE = "sb://memory/telemetry"
OPENING = (
    SASL_HEADER
    + frame(0, SaslInit("PLAIN", f"\0{DEFAULT_KEY_NAME}\0{DEFAULT_KEY}".encode()), kind=1)
    + AMQP_HEADER
    + frame(0, Open("peer", "memory", max_frame_size=65_536))
)


async def serve(*, verifier: TokenVerifier | None = None, now: Callable[[], float] = time.time) -> Service:
    """Make a service of one hub, "telemetry", with two partitions and the consumer groups `$Default` and `second`."""
    service = Service(
        keys=KeyRing([AccessRule(DEFAULT_KEY_NAME, DEFAULT_KEY)], verifier),
        retention=Retention(),
        deadlines=Deadlines(),
        max_message_size=1 << 20,
        now=now,
    )
    await service.open([HubSpec("telemetry", 2, ("second",))], data=None, fsync=False)
    service.authority = "memory"
    return service


async def connect(service: Service, config: ConnectionConfig | None = None) -> AmqpPeer:
    """Connect a client, and wait until its connection is open or refused."""
    peer = AmqpPeer(config)
    protocol = ConnectionProtocol(peer.engine, peer)
    served = _ServedProtocol(ServiceConnection(service))
    here, there = MemoryStream(protocol), MemoryStream(served)
    here.peer, there.peer = there, here
    peer.protocol = protocol
    peer.engine.start()
    served.connection_made(there)
    protocol.connection_made(here)
    await peer.until(lambda: any(isinstance(event, Opened) for event in peer.events) or peer.closed is not None)
    return peer


class Sink(asyncio.Transport):
    """The stream of a client that is written by hand.

    Attributes:
        written: What the service sent.
        reading: Set while the service reads.
    """

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.reading = asyncio.Event()
        self.reading.set()
        self._is_closing = False

    def write(self, data: Any) -> None:
        self.written += data

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Nothing is ever held back."""

    def can_write_eof(self) -> bool:
        return False

    def pause_reading(self) -> None:
        self.reading.clear()

    def resume_reading(self) -> None:
        self.reading.set()

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        self._is_closing = True

    def abort(self) -> None:
        self._is_closing = True


def by_hand(service: Service) -> tuple[ConnectionProtocol, Sink]:
    """Make a connection whose client is written by hand."""
    served = _ServedProtocol(ServiceConnection(service))
    sink = Sink()
    served.connection_made(sink)
    return served, sink


def transport_to(service: Service, rng: random.Random, **options: Any) -> NativeTransport:
    """Make a client's transport to a service."""

    async def dial(connection: Connection, handler: ConnectionHandler, route: Route) -> ConnectionProtocol:
        client, served = ConnectionProtocol(connection, handler), _ServedProtocol(ServiceConnection(service))
        here, there = MemoryStream(client), MemoryStream(served)
        here.peer, there.peer = there, here
        served.connection_made(there)
        client.connection_made(here)
        return client

    wanted = settings(SharedKey(DEFAULT_KEY_NAME, DEFAULT_KEY), **options)  # type: ignore[arg-type]  # as `settings`
    return NativeTransport(wanted, rng=rng, dialer=dial, now=VirtualClock(epoch=time.time()).time)
