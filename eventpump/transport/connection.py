"""One live connection to the service: opened, its links spread over sessions, its events handed to their owners."""

from __future__ import annotations

import asyncio
import ssl
from typing import Protocol

from eventpump.aio.tasks import reject, resolve
from eventpump.amqp.config import ConnectionConfig
from eventpump.amqp.connection import (
    Closed,
    Connection,
    CreditChanged,
    Event,
    FlowAnswered,
    LinkAttached,
    LinkDetached,
    Messages,
    Opened,
    Outcomes,
    Role,
    SessionBegun,
    SessionEnded,
)
from eventpump.amqp.link import Link
from eventpump.amqp.performatives import AmqpError
from eventpump.amqp.session import Session
from eventpump.errors import (
    ConfigurationError,
    ConnectionLostError,
    ProtocolError,
    QuotaExceededError,
    Recovery,
    RequestRefusedError,
    ServiceError,
)
from eventpump.eventhubs.conditions import NOT_ALLOWED, UNAUTHORIZED_ACCESS
from eventpump.net.dialing import dial
from eventpump.net.route import Route, client_tls
from eventpump.net.stream import CLOSE_TIMEOUT, ConnectionHandler, ConnectionProtocol, reason_of
from eventpump.options.connection import ConnectionSettings
from eventpump.transport.base import (
    BaseConnection,
    LinkOwner,
    LinkSpec,
    WaitingSender,
    connection_properties,
    end_error,
    snd_settle_mode,
)

_FLUSH_AT = 256 * 1024
"""Bytes after which output is written to the stream at once, which then reports whether the peer is slow to read."""


class Dial(Protocol):
    """How a stream is opened: :func:`eventpump.net.dialing.dial`, or a replacement."""

    async def __call__(self, connection: Connection, handler: ConnectionHandler, route: Route) -> ConnectionProtocol:
        """Connect. Raises `ServiceError` if that fails."""


class ClientConnection(BaseConnection):
    """A connection on the engine of `eventpump.amqp`. Made by :meth:`open`."""

    def __init__(self, settings: ConnectionSettings) -> None:
        super().__init__(settings)
        self.engine = Connection(
            ConnectionConfig(
                container_id=self.container_id,
                hostname=settings.fully_qualified_namespace,
                idle_timeout=settings.idle_timeout,
                properties=connection_properties(),
            ),
            Role.CLIENT,
        )
        self._protocol: ConnectionProtocol | None = None
        self._opened: asyncio.Future[None] = self._loop.create_future()
        self._begun: dict[Session, asyncio.Future[None]] = {}
        self._ended: dict[Session, ServiceError] = {}
        self._sessions: list[Session] = []
        self._spreading = asyncio.Lock()
        self._unwritten = 0
        self._held_back: dict[WaitingSender, None] = {}

    @classmethod
    async def open(cls, settings: ConnectionSettings, *, dialer: Dial = dial) -> ClientConnection:
        """Connect, and wait for the service's open. Cancelled, nothing is left."""
        route = client_route(settings)
        connection = cls(settings)
        try:
            async with asyncio.timeout(settings.operation_timeout):
                connection.engine.start()
                connection._protocol = await dialer(connection.engine, connection, route)
                await connection._opened
            connection.require_live()  # the end may have come with the open
        except TimeoutError:
            connection.abort()
            raise ConnectionLostError(f"no answer from {route} within {settings.operation_timeout} s") from None
        except BaseException:
            connection.abort()
            raise
        return connection

    # ----------------------------------------------------------------------------------------- for links

    @property
    def is_alive(self) -> bool:
        """Whether links can be attached."""
        return self.error is None and self._protocol is not None

    @property
    def peer(self) -> tuple[str, int] | None:
        """See `BaseConnection`."""
        return None if self._protocol is None else self._protocol.peer

    async def attach(self, owner: LinkOwner, spec: LinkSpec, *, is_receiver: bool) -> Link:
        """Attach a link on a session that has room for it. See `BaseConnection.attach`."""
        async with self._spreading:
            self.require_live()
            session = next((each for each in self._sessions if each.free_handles > 0), None)
            if session is None:
                session = await self._begin()
            try:
                link = session.attach(
                    spec.name,
                    is_receiver=is_receiver,
                    snd_settle_mode=snd_settle_mode(is_receiver=is_receiver),
                    source=spec.source,
                    target=spec.target,
                    max_message_size=spec.max_message_size,
                    properties=spec.properties,
                    desired_capabilities=spec.desired_capabilities,
                )
            except ProtocolError as error:
                raise RequestRefusedError(
                    f"no link can be attached: {error.description}", condition=error.condition
                ) from None
        link.context = owner
        self.flush_soon()
        return link

    async def _begin(self) -> Session:
        try:
            session = self.engine.begin()
        except ProtocolError as error:
            raise QuotaExceededError(f"the connection takes no more links: {error.description}") from None
        begun = self._begun[session] = self._loop.create_future()
        self.flush_soon()
        try:
            await begun
            # Its end, or the connection's, may have come with the answer: whatever awaits looks at both first.
            self.require_live()
            if session in self._ended:
                raise self._ended[session]
        finally:
            self._begun.pop(session, None)
            self._ended.pop(session, None)
        return session

    def deliver_together(self) -> None:
        """See `BaseConnection`."""
        if self._protocol is not None and self.settings.transport_type != "websocket":  # which aiohttp reads by itself
            self._protocol.hold_for = self._hold_for

    def _hold_for(self) -> float:
        """Return for how many seconds nothing need be read: 0 while something is awaited of the service."""
        if self.requests or not self.engine.is_open:
            return 0.0
        intervals: list[float] = []
        for session in self.engine.sessions.values():
            if not session.is_open:
                return 0.0
            for link in session.links.values():
                owner: LinkOwner | None = link.context
                if owner is None or owner.is_awaiting:
                    return 0.0
                if owner.delivery_interval is not None:
                    intervals.append(owner.delivery_interval)
        # Other links of the same transport may have been opened with another idle time-out in mind.
        return min(*intervals, self.settings.idle_timeout / 4) if intervals else 0.0

    def flush_soon(self) -> None:
        """Send what the engine has queued, soon."""
        if self._protocol is not None:
            self._protocol.flush_soon()

    def queued(self, size: int) -> None:
        """Send what the engine has queued, a message of so many bytes among it: soon, for others to share the write.

        At once if it is large, or if no other message is in flight: a single message is seldom followed by another.
        """
        self._unwritten += size
        in_flight = 0
        for session in self._sessions:
            in_flight += len(session.unsettled)
        if self._protocol is None or (self._unwritten < _FLUSH_AT and in_flight > 1):
            self.flush_soon()
            return
        self._unwritten = 0
        self._protocol.flush()

    @property
    def is_paused(self) -> bool:
        """Whether the peer is slow to read."""
        return self._protocol is not None and self._protocol.is_paused

    def hold_back(self, link: WaitingSender) -> None:
        """Resume a link, in the order of the calls, when the peer reads again."""
        self._held_back[link] = None

    def abort(self) -> None:
        """Drop the connection at once."""
        if self._protocol is not None:
            self._protocol.abort()

    async def aclose(self) -> None:
        protocol = self._protocol
        if protocol is None:
            return
        try:
            self._lose(ConnectionLostError("the connection was closed here", recovery=Recovery.GIVE_UP))
            self.engine.close()
            protocol.flush()
            if self.engine.is_closed:
                protocol.finish()
            async with asyncio.timeout(CLOSE_TIMEOUT):
                await protocol.wait_closed()
        except TimeoutError:
            protocol.abort()
            await protocol.wait_closed()
        except asyncio.CancelledError:
            protocol.abort()
            raise

    # ---------------------------------------------------------------------------------- ConnectionHandler

    def on_events(self, events: list[Event]) -> None:
        """See :class:`eventpump.net.stream.ConnectionHandler`."""
        self._heard += 1
        for event in events:
            if type(event) is Messages:  # nearly all are
                owner: LinkOwner | None = event.link.context
                if owner is None:
                    pass
                elif event.delivery_ids:
                    owner.on_messages(event.payloads, event.delivery_ids)
                else:
                    owner.on_settled(event.payloads)
                continue
            match event:
                case Outcomes(link, outcomes) if link.context is not None:
                    link.context.on_outcomes(outcomes)
                case CreditChanged(link) if link.context is not None:
                    link.context.on_credit()
                case FlowAnswered(link) if link.context is not None:
                    link.context.on_answered()
                case LinkAttached(link):
                    self.ever_attached = True
                    if link.is_remote_initiated:
                        link.refuse(AmqpError(NOT_ALLOWED, "this client takes no links"))
                    elif link.context is not None:
                        link.context.on_attached()
                case LinkDetached(link, error) if link.context is not None:
                    link.context.on_detached(
                        end_error(error, link.context.entity, Recovery.RELINK, "the link was closed")
                    )
                case Opened():
                    resolve(self._opened, None)
                case SessionBegun(session) if not session.is_remote_initiated:
                    self._sessions.append(session)
                    if session in self._begun:
                        resolve(self._begun[session], None)
                case SessionEnded(session, links, error):
                    self._end_session(session, links, error)
                case Closed(error, is_local):
                    self._lose(self.passing(_closing_error(error, is_local)))
                case _:
                    pass

    def on_writable(self) -> None:
        """See :class:`eventpump.net.stream.ConnectionHandler`."""
        held_back, self._held_back = self._held_back, {}
        for link in held_back:
            link.on_writable()

    def on_closed(self, error: Exception | None) -> None:
        """See :class:`eventpump.net.stream.ConnectionHandler`."""
        reason = "" if error is None else f": {error}"
        self._lose(ConnectionLostError(f"the connection was lost{reason}"))

    def _end_session(self, session: Session, links: list[Link], error: AmqpError | None) -> None:
        if session in self._sessions:
            self._sessions.remove(session)
        if session in self._begun:
            self._ended[session] = end_error(error, None, Recovery.RELINK, "the service ended the session")
            reject(self._begun[session], self._ended[session])
        for link in links:
            if link.context is not None:
                link.context.on_detached(
                    end_error(error, link.context.entity, Recovery.RELINK, "the service ended the session")
                )

    def _lose(self, error: ServiceError) -> None:
        """Report the end of the connection to its sessions, links and waiters. Once."""
        if self.error is not None:
            return
        self.error = error
        self._log_end(error)
        for waiting in (self._opened, *self._begun.values()):
            if not waiting.done():
                waiting.set_exception(error)
                waiting.exception()  # the waiter gets it; without one, it is not an error
        for session in list(self.engine.sessions.values()):
            for link in list(session.links.values()):
                if link.context is not None:
                    link.context.on_detached(error)
        self._held_back.clear()


def client_route(settings: ConnectionSettings) -> Route:
    proxy = settings.proxy
    return Route(
        settings.host,
        settings.port,
        tls=_service_tls(settings) if settings.use_tls else None,
        is_websocket=settings.transport_type == "websocket",
        proxy=proxy,
        proxy_tls=_trusting_tls(settings) if proxy is not None and proxy.use_tls else None,
    )


def _trusting_tls(settings: ConnectionSettings) -> ssl.SSLContext:
    try:
        return client_tls(None if settings.ca_file is None else str(settings.ca_file))
    except OSError as error:
        raise ConfigurationError("ca_file", f"cannot be used: {reason_of(error)}") from None


def _service_tls(settings: ConnectionSettings) -> ssl.SSLContext:
    context = _trusting_tls(settings)
    if settings.client_cert_file is not None:
        password = settings.client_key_password
        text = "" if password is None else password.get_secret_value()
        try:
            # Without a password here OpenSSL would ask the terminal for one.
            context.load_cert_chain(settings.client_cert_file, settings.client_key_file, password=lambda: text)
        except (OSError, ValueError) as error:
            raise ConfigurationError("client_cert_file", f"cannot be used with its key: {reason_of(error)}") from None
    return context


def _closing_error(error: AmqpError | None, is_local: bool) -> ServiceError:
    if error is not None and is_local and error.condition != UNAUTHORIZED_ACCESS:
        # The condition was sent by this side: the service's silence is not an exceeded quota.
        return ConnectionLostError(f"the connection was given up: {error.description}", condition=str(error.condition))
    return end_error(error, None, Recovery.RECONNECT, "the service closed the connection")
