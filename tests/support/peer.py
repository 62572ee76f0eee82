"""A bare AMQP client, for tests that look at what a service says frame by frame.

It keeps every event and offers a few awaitable calls; its users read the rest from the engine.
"""

from __future__ import annotations

import ssl
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from eventpump.amqp.config import ConnectionConfig
from eventpump.amqp.connection import (
    Closed,
    Connection,
    Event,
    LinkDetached,
    Messages,
    Opened,
    Outcomes,
    Role,
    SessionBegun,
    SessionEnded,
)
from eventpump.amqp.link import Link
from eventpump.amqp.message import Message
from eventpump.amqp.performatives import AmqpError, Source, Target
from eventpump.amqp.session import Session
from eventpump.emulator.auth import DEFAULT_KEY, DEFAULT_KEY_NAME
from eventpump.eventhubs import cbs, sas
from eventpump.eventhubs.names import SAS_TOKEN_TYPE
from eventpump.net.dialing import dial
from eventpump.net.route import Route
from eventpump.net.stream import ConnectionProtocol
from tests.support.waiting import Changes

PATIENCE = 10.0
"""Seconds to wait for what must come."""

AUDIENCE = "sb://127.0.0.1/telemetry"
"""For a token: the hub that most tests of a service serve."""

_T = TypeVar("_T")


class Listening(Protocol):
    """Where a service listens; an `Emulator` has it."""

    @property
    def host(self) -> str:
        """The address."""

    @property
    def port(self) -> int:
        """The port."""


class LinkRefusedError(Exception):
    """The link was refused.

    Args:
        error: What the service said.
    """

    def __init__(self, error: AmqpError | None) -> None:
        super().__init__(str(error))
        assert error is not None
        self.error = error


class AmqpPeer:
    """A connection to a service.

    Attributes:
        events: Everything that happened.
        received: The messages of each link.
        outcomes: Of each link's deliveries.
        detached: Why links ended.
    """

    def __init__(self, config: ConnectionConfig | None = None) -> None:
        self.engine = Connection(config or ConnectionConfig(container_id=f"peer-{uuid.uuid4()}"), Role.CLIENT)
        self.events: list[Event] = []
        self.received: dict[Link, list[bytes]] = defaultdict(list)
        self.outcomes: dict[Link, dict[int, Any]] = defaultdict(dict)
        self.detached: dict[Link, AmqpError | None] = {}
        self.closed: Closed | None = None
        self.is_gone = False
        self.protocol: ConnectionProtocol | None = None
        self._changes = Changes()

    @classmethod
    async def connect(
        cls, service: Listening, config: ConnectionConfig | None = None, *, tls: ssl.SSLContext | None = None
    ) -> Self:
        """Connect, and wait until the connection is open or refused."""
        made = cls(config)
        made.engine.start()
        made.protocol = await dial(made.engine, made, Route(service.host, service.port, tls))
        await made.until(lambda: any(isinstance(event, Opened) for event in made.events) or made.closed is not None)
        return made

    # ------------------------------------------------------------------------------------------ the shell's calls

    def on_events(self, events: list[Event]) -> None:
        """Keep what happened."""
        self.events += events
        for event in events:
            match event:
                case Messages(link, payloads):
                    self.received[link] += payloads
                case Outcomes(link, outcomes):
                    self.outcomes[link].update(outcomes)
                case LinkDetached(link, error):
                    self.detached[link] = error
                case SessionEnded(_, links, error):
                    self.detached.update((link, error) for link in links)
                case Closed():
                    self.closed = event
        self._changes.happened()

    def on_writable(self) -> None:
        """Nothing waits for it."""

    def on_closed(self, _error: Exception | None) -> None:
        """Record that the stream is gone."""
        self.is_gone = True
        self._changes.happened()

    # ------------------------------------------------------------------------------------------------- the verbs

    async def until(self, found: Callable[[], _T]) -> _T:
        """Wait until a question has an answer that is true.

        Raises:
            TimeoutError: It never had.
        """
        return await self._changes.until(found, PATIENCE)

    def flush(self) -> None:
        """Send what the engine has queued."""
        assert self.protocol is not None
        self.protocol.flush()

    async def begin(self) -> Session:
        """Begin a session."""
        session = self.engine.begin()
        self.flush()
        await self.until(lambda: SessionBegun(session) in self.events)
        return session

    async def attach(
        self,
        session: Session,
        *,
        source: str | Source | None = None,
        target: str | Target | None = None,
        name: str | None = None,
        **options: Any,
    ) -> Link:
        """Attach a link: a receiver where only a source is given, a sender where a target is.

        Raises:
            LinkRefusedError: The service refused it.
        """
        link = session.attach(
            name or str(uuid.uuid4()),
            is_receiver=options.pop("is_receiver", target is None),
            source=source if isinstance(source, Source) else Source(address=source),
            target=target if isinstance(target, Target) else Target(address=target),
            **options,
        )
        self.flush()
        await self.until(lambda: link.is_attached or link in self.detached or self.closed)
        if not link.is_attached:
            raise LinkRefusedError(self.detached.get(link))
        return link

    async def request(self, node: str, request: Message, *, session: Session | None = None) -> Message:
        """Send a request to a node over a pair of links of its own, the answer being the only thing to come back."""
        session = session or await self.begin()
        receiver = await self.attach(session, source=node, target=node, is_receiver=True)
        sender = await self.attach(session, source=node, target=node, is_receiver=False)
        receiver.set_credit(10)
        sender.send(request.encode())
        self.flush()
        await self.until(lambda: self.received[receiver])
        for link in (receiver, sender):
            link.detach()
        self.flush()
        return Message.decode(self.received[receiver][0])

    async def put_token(
        self,
        audience: str,
        *,
        key_name: str = DEFAULT_KEY_NAME,
        key: str = DEFAULT_KEY,
        lifetime: float = 3600,
        resource: str | None = None,
    ) -> int:
        """Put a signed token.

        Returns:
            The status code.
        """
        token = sas.generate(resource or audience, key_name, key, int(time.time() + lifetime))
        request = cbs.put_token_request(token, SAS_TOKEN_TYPE, audience, message_id=uuid.uuid4())
        return status_of(await self.request("$cbs", request))

    async def send(self, link: Link, payload: bytes, *, message_format: int = 0) -> Any:
        """Send a message and wait for its outcome."""
        delivery_id = link.send(payload, message_format=message_format)
        self.flush()
        return await self.until(lambda: self.outcomes[link].get(delivery_id))

    async def aclose(self) -> None:
        """Close the connection, in order where it still can be."""
        assert self.protocol is not None
        self.engine.close()
        self.flush()
        if not self.protocol.is_closing:
            await self.until(lambda: self.closed is not None or self.is_gone)
        self.protocol.abort()
        await self.protocol.wait_closed()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()


def fields_of(message: Message) -> Mapping[Any, Any]:
    """Return a message's application properties."""
    return message.application_properties or {}


def status_of(message: Message) -> int:
    """Return an answer's status code."""
    code = fields_of(message)["status-code"]
    assert isinstance(code, int)
    return int(code)


async def connect(service: Listening) -> AmqpPeer:
    """Connect with a token for the hub."""
    peer = await AmqpPeer.connect(service)
    assert await peer.put_token(AUDIENCE) == 202
    return peer
