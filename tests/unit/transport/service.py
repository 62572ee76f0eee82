"""A scripted service on the engine's server role, over streams in memory: everything happens on virtual time."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from eventpump.amqp.config import ConnectionConfig
from eventpump.amqp.connection import (
    Closed,
    Connection,
    Event,
    LinkAttached,
    LinkDetached,
    Messages,
    Role,
    SaslRequested,
)
from eventpump.amqp.link import Link
from eventpump.amqp.message import Message
from eventpump.amqp.performatives import Accepted, AmqpError
from eventpump.eventhubs import cbs, management
from eventpump.eventhubs.events import EventData, EventPosition, ReceivedEvent
from eventpump.eventhubs.properties import HubProperties
from eventpump.interfaces import ReceiveLinkSpec, SendLinkSpec
from eventpump.net.route import Route
from eventpump.net.stream import ConnectionHandler, ConnectionProtocol
from eventpump.options.connection import ConnectionSettings, connection_settings
from eventpump.options.credentials import Credential, SharedKey
from eventpump.testing.clock import VirtualClock
from eventpump.testing.sink import RecordingSink
from eventpump.transport.links import ClientReceiveLink, ClientSendLink
from eventpump.transport.native import NativeTransport

KEY = "c2VjcmV0LWtleQ=="
EARLIEST = EventPosition.earliest()


class MemoryStream(asyncio.Transport):
    """One end of a stream in memory.

    Attributes:
        is_stalled: Whether what is written stays here, as when the peer does not read.
        is_read: Whether this end takes what the other one writes.
        is_mute: Whether what is written is lost, as on a half-open connection.
        is_lost: Whether it is gone.
    """

    def __init__(self, protocol: ConnectionProtocol) -> None:
        super().__init__()
        self.peer: MemoryStream
        self.is_stalled = False
        self.is_read = True
        self.is_mute = False
        self.protocol = protocol
        self._buffer: list[bytes] = []
        self._high = 64 * 1024
        self._is_paused = False
        self._is_closing = False
        self.is_lost = False
        self._loop = asyncio.get_running_loop()

    def write(self, data: Any) -> None:
        if self._is_closing or self.is_mute:
            return
        self._buffer.append(bytes(data))
        if self.get_write_buffer_size() > self._high and not self._is_paused:
            self._is_paused = True
            self.protocol.pause_writing()
        self._loop.call_soon(self.deliver)

    def resume(self) -> None:
        """End a stall."""
        self.is_stalled = False
        self.deliver()

    def can_write_eof(self) -> bool:
        return False

    def pause_reading(self) -> None:
        self.is_read = False

    def resume_reading(self) -> None:
        self.is_read = True
        self._loop.call_soon(self.peer.deliver)

    def deliver(self) -> None:
        if self.is_stalled or not self.peer.is_read:
            return
        data, self._buffer = b"".join(self._buffer), []
        if data and not self.peer.is_lost:
            self.peer.protocol.data_received(data)
        if self._is_paused:
            self._is_paused = False
            self.protocol.resume_writing()
        if self._is_closing:
            self.abort()

    def get_write_buffer_size(self) -> int:
        return sum(map(len, self._buffer))

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = high or self._high

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        self._is_closing = True
        self._loop.call_soon(self.deliver)

    def abort(self) -> None:
        self._is_closing = True
        self._buffer.clear()
        self._loop.call_soon(self.lose)
        if not self.is_mute:
            self._loop.call_soon(self.peer.lose)

    def lose(self) -> None:
        if not self.is_lost:
            self.is_lost = self._is_closing = True
            self.protocol.connection_lost(None)


@dataclass
class Script:
    """What the service does. Addresses are those of links: `$cbs`, `$management`, or of a partition.

    Attributes:
        hold_attach: Addresses whose attach is not answered.
        refuse_attach: Errors to refuse an attach with, by address.
        detach_at_once: Errors to detach with right after the attach, in one write.
        hold_messages: Addresses whose messages get neither outcome nor answer.
        answer: Makes the answer of the token node; None leaves it unanswered.
        credit: What every sender is given.
        properties: Makes the link properties that a sender's attach is answered with.
        snd_settle_mode: The settlement mode that attaches are answered with; None for the one that was asked for.
        connect: Is awaited before a stream is made.
    """

    hold_attach: set[str] = field(default_factory=set)
    refuse_attach: dict[str, AmqpError] = field(default_factory=dict)
    detach_at_once: dict[str, AmqpError] = field(default_factory=dict)
    hold_messages: set[str] = field(default_factory=set)
    answer: Callable[[Message], Message | None] = lambda request: cbs.response(request, 202, "Accepted")
    credit: int = 1000
    snd_settle_mode: int | None = None
    properties: Callable[[], dict[str, object] | None] = lambda: None
    connect: Callable[[], Awaitable[None]] | None = None


class Served(ConnectionHandler):
    """The service's end of one connection.

    Attributes:
        links: By the address of the node; for `$cbs` and `$management` both links of the pair.
        detached: The addresses of links the client detached.
    """

    def __init__(self, service: Service) -> None:
        self.service = service
        self.engine = Connection(service.config, Role.SERVER)
        self.protocol = ConnectionProtocol(self.engine, self)
        self.stream = MemoryStream(self.protocol)
        self.links: dict[str, list[Link]] = {}
        self.detached: list[str] = []
        self.is_gone = False

    def flush(self) -> None:
        """Send what the engine has queued."""
        self.protocol.flush()

    def drop(self) -> None:
        """Cut the connection."""
        self.stream.abort()

    def mute(self) -> None:
        """Let the connection be half open: nothing comes through any more, in either direction."""
        self.stream.is_mute = self.stream.peer.is_mute = True

    def only(self, address: str) -> Link:
        """Return the one link to an address."""
        (link,) = self.links[address]
        return link

    def detach(self, address: str, error: AmqpError | None = None) -> None:
        """Detach every link to an address."""
        for link in self.links.pop(address):
            link.detach(error)
        self.flush()

    def on_events(self, events: list[Event]) -> None:
        for event in events:
            match event:
                case SaslRequested():
                    self.engine.sasl_outcome(ok=True)
                case LinkAttached(link):
                    self._attach(link)
                case LinkDetached(link):
                    address = address_of(link)
                    self.detached.append(address)
                    if link in self.links.get(address, []):
                        self.links[address].remove(link)
                case Messages(link, payloads, delivery_ids):
                    for payload, delivery_id in zip(payloads, delivery_ids, strict=True):
                        self._message(link, payload, delivery_id)
                case Closed():
                    self.is_gone = True
                case _:
                    pass

    def on_writable(self) -> None:
        pass

    def on_closed(self, error: Exception | None) -> None:
        self.is_gone = True

    def _attach(self, link: Link) -> None:
        script, address = self.service.script, address_of(link)
        self.service.seen.append(address)
        if address in script.hold_attach:
            return
        if address in script.refuse_attach:
            link.refuse(script.refuse_attach[address])
            return
        self.links.setdefault(address, []).append(link)
        is_sender = address.startswith("Partitions/") and link.is_receiver
        link.accept(
            max_message_size=self.service.max_message_size if link.is_receiver else None,
            properties=script.properties() if is_sender else None,
            snd_settle_mode=script.snd_settle_mode,
        )
        if address in script.detach_at_once:
            self.links[address].remove(link)
            link.detach(script.detach_at_once.pop(address))
        elif link.is_receiver and script.credit:
            link.set_credit(script.credit)

    def _message(self, link: Link, payload: bytes, delivery_id: int) -> None:
        address = address_of(link)
        if address in self.service.script.hold_messages:
            self.service.held.append((link, delivery_id))
            return
        link.settle(delivery_id, delivery_id, Accepted())
        if address not in {"$cbs", "$management"}:
            self.service.stored.append(payload)
            return
        request = Message.decode(payload)
        answer: Message | None
        if address == "$cbs":
            put = cbs.parse_put_token(request)
            self.service.tokens.append((asyncio.get_running_loop().time(), put))
            answer = self.service.script.answer(request)
        else:
            answer = management.hub_response(
                request, HubProperties(management.parse_request(request).hub, datetime.now(UTC), ("0", "1"))
            )
        if answer is not None:
            reply = next(each for each in self.links[address] if not each.is_receiver)
            reply.send(answer.encode(), settled=True)


class Service:
    """A scripted service.

    Attributes:
        attempts: The times of the connects.
        seen: The addresses of all attaches.
        stored: The messages sent to it, without tokens and reads.
        held: The deliveries the script held.
        tokens: The tokens put, with their time.
    """

    def __init__(self, config: ConnectionConfig | None = None, *, max_message_size: int = 1024 * 1024) -> None:
        self.config = config or ConnectionConfig(container_id="service", idle_timeout=None)
        self.max_message_size = max_message_size
        self.script = Script()
        self.connections: list[Served] = []
        self.attempts: list[float] = []
        self.seen: list[str] = []
        self.stored: list[bytes] = []
        self.held: list[tuple[Link, int]] = []
        self.tokens: list[tuple[float, cbs.PutToken]] = []

    @property
    def connection(self) -> Served:
        """The newest connection."""
        return self.connections[-1]

    async def dial(self, connection: Connection, handler: ConnectionHandler, route: Route) -> ConnectionProtocol:
        """See :class:`eventpump.transport.connection.Dial`."""
        self.attempts.append(asyncio.get_running_loop().time())
        if self.script.connect is not None:
            await self.script.connect()
        client = ConnectionProtocol(connection, handler)
        served = Served(self)
        stream = MemoryStream(client)
        stream.peer, served.stream.peer = served.stream, stream
        self.connections.append(served)
        served.protocol.connection_made(served.stream)
        client.connection_made(stream)
        return client

    def transport(self, *, credential: Credential | None = None, **options: Any) -> NativeTransport:
        """Make a transport to it."""
        clock = VirtualClock(epoch=time.time())
        return NativeTransport(settings(credential, **options), rng=Highest(), dialer=self.dial, now=clock.time)


class Highest(random.Random):
    """Chance at its worst: delays are as long as they may be."""

    def uniform(self, a: float, b: float) -> float:
        return b


def settings(credential: Credential | None = None, **options: Any) -> ConnectionSettings:
    """Make settings without TLS, with short time-outs."""
    return connection_settings(
        "Endpoint=sb://example.test;UseDevelopmentEmulator=true",
        "telemetry",
        credential=credential or SharedKey("key", KEY),  # type: ignore[arg-type]  # plain text is taken too
        **{"operation_timeout": 20.0, "auth_timeout": 10.0, "idle_timeout": 60.0, **options},
    )


def address_of(link: Link) -> str:
    """Return the address of the node a link leads to, shortened to the partition."""
    assert link.remote is not None
    terminus = link.remote.target if link.is_receiver else link.remote.source
    assert terminus is not None
    return str(terminus.address).removeprefix("telemetry/").removeprefix("ConsumerGroups/$Default/Partitions/")


async def open_reader(
    transport: NativeTransport, partition_id: str = "0", sink: RecordingSink | None = None, **options: Any
) -> tuple[ClientReceiveLink, RecordingSink]:
    """Open a receive link."""
    sink = sink or RecordingSink()
    spec = ReceiveLinkSpec("telemetry", "$Default", partition_id, EARLIEST, **options)
    return await transport.open_receive_link(spec, sink), sink


async def open_sender(transport: NativeTransport, partition_id: str = "0") -> ClientSendLink:
    """Open a send link; its address, at the service, is `Partitions/<id>`."""
    return await transport.open_send_link(SendLinkSpec("telemetry", partition_id))


def event(body: bytes = b"x") -> bytes:
    """Encode an event to send."""
    return EventData(body).encode()


def stored_event(body: bytes = b"x") -> bytes:
    """Encode an event as the service sends it."""
    now = datetime(2024, 1, 1, tzinfo=UTC)
    return ReceivedEvent.build(body, offset="0", sequence_number=0, enqueued_time=now).raw


async def settle(turns: int = 50) -> None:
    """Let everything happen that needs no time."""
    for _ in range(turns):
        await asyncio.sleep(0)
