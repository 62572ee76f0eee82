"""One live connection of uamqp, as the event loop uses it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping
from typing import Any, Final, cast

from eventpump.amqp.performatives import AmqpError
from eventpump.errors import ConnectionLostError, QuotaExceededError, Recovery, ServiceError
from eventpump.net.route import open_stream
from eventpump.net.stream import CLOSE_TIMEOUT
from eventpump.options.connection import ConnectionSettings
from eventpump.transport.base import (
    BaseConnection,
    LinkOwner,
    LinkSpec,
    WaitingSender,
    connection_properties,
    end_error,
)
from eventpump.transport.connection import client_route
from eventpump.transport.uamqp.door import CA_FILE
from eventpump.transport.uamqp.worker import HANDLES, SESSIONS, Ask, Worker, WorkerEndpoint

_MAX_UNSETTLED: Final = 4 * 1024 * 1024
"""Bytes of messages that wait in uamqp for their outcome; the rest waits here, where a send can be cancelled."""
_PLENTY: Final = 2**31 - 1


class UamqpLink:
    """A link of a connection, as :class:`eventpump.transport.base.LinkHandle`.

    uamqp does not expose a sender's credit, and queues messages for which there is none: so there always appears to be
    credit, until too many bytes wait for an outcome.
    """

    def __init__(self, connection: UamqpConnection, number: int, session: int, owner: LinkOwner) -> None:
        self.number = number
        self.session = session
        self.owner = owner
        self.is_attached = False
        self.drain = False
        self.remote_max_message_size: int | None = None
        self.remote_properties: Mapping[Any, Any] = {}
        self._connection = connection
        self._ids = itertools.count()
        self._sizes: dict[int, int] = {}
        self._unsettled = 0
        self._is_detaching = False

    @property
    def credit(self) -> int:
        """How many messages may be sent now."""
        return _PLENTY if self._unsettled < _MAX_UNSETTLED else 0

    def set_credit(self, credit: int) -> None:
        """Allow the peer to send `credit` more messages."""
        self._connection.worker.set_credit(self.number, credit)

    def send(self, payload: bytes, *, message_format: int = 0) -> int:
        """See `LinkHandle.send`."""
        delivery_id = next(self._ids)
        self._sizes[delivery_id] = len(payload)
        self._unsettled += len(payload)
        self._connection.worker.send(self.number, delivery_id, payload, message_format)
        return delivery_id

    def probe(self) -> bool:
        """Request a flow from the peer: uamqp cannot."""
        return False

    def settle(self, first: int, last: int, outcome: Any) -> None:
        """Settle deliveries of the peer. There are none: uamqp delivers them as settled."""
        raise AssertionError("uamqp reports no unsettled delivery")

    def drained(self) -> None:
        """Do nothing: uamqp answers a drain itself."""

    def detach(self) -> None:
        """Detach, for good."""
        self.is_attached = False
        if not self._is_detaching:
            self._is_detaching = True
            self._connection.worker.detach(self.number)

    # ------------------------------------------------------------------------------- called by the worker

    def on_attached(self, max_message_size: int | None, properties: Mapping[Any, Any]) -> None:
        """See :class:`eventpump.transport.uamqp.worker.LinkOwner`."""
        self._connection.ever_attached = True
        if not self._is_detaching:
            self.is_attached = True
            self.remote_max_message_size = max_message_size
            self.remote_properties = properties
            self.owner.on_attached()

    def on_messages(self, payloads: list[bytes]) -> None:
        """See :class:`eventpump.transport.uamqp.worker.LinkOwner`."""
        self.owner.on_messages(payloads)

    def on_outcome(self, delivery_id: int, outcome: Any) -> None:
        """See :class:`eventpump.transport.uamqp.worker.LinkOwner`."""
        self._unsettled -= self._sizes.pop(delivery_id)
        self.owner.on_outcomes([(delivery_id, outcome)])
        self.owner.on_credit()

    def on_detached(self, error: AmqpError | None, is_free: bool) -> None:
        """See :class:`eventpump.transport.uamqp.worker.LinkOwner`."""
        self._connection.forget(self, is_free=is_free)
        self.end(end_error(error, self.owner.entity, Recovery.RELINK, "the link was closed"))

    def end(self, error: ServiceError) -> None:
        """Report the end of the link to its owner."""
        self.is_attached = False
        self.owner.on_detached(error)


class UamqpConnection(BaseConnection):
    """A connection of uamqp. Made by :meth:`open`."""

    def __init__(self, settings: ConnectionSettings) -> None:
        super().__init__(settings)
        self._opened: asyncio.Future[None] = self._loop.create_future()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._numbers = itertools.count()
        self._links: dict[int, UamqpLink] = {}
        self._held = [0] * SESSIONS
        self.worker = Worker(
            WorkerEndpoint(
                host=settings.host,
                port=settings.port,
                hostname=settings.fully_qualified_namespace,
                container_id=self.container_id,
                idle_timeout=settings.idle_timeout,
                ca_file=CA_FILE if settings.ca_file is None else str(settings.ca_file),
                properties=connection_properties(),
            ),
            self,
            self._loop,
        )

    @classmethod
    async def open(cls, settings: ConnectionSettings) -> UamqpConnection:
        """Connect, and wait for the service's open. Cancelled, nothing is left."""
        route = client_route(settings)
        connection: UamqpConnection | None = None
        try:
            async with asyncio.timeout(settings.operation_timeout):
                # While uamqp connects it blocks every thread of the process, for ten seconds if there is no answer, and
                # it does not report why it rejects a certificate. So the route is tested first.
                (await open_stream(_Knock, route)).leave()
                connection = cls(settings)
                connection.worker.start()
                await connection._opened
            connection.require_live()  # the end may have come with the open
        except BaseException as error:
            if connection is not None:
                connection.abort()
                await connection.ended()
            if isinstance(error, TimeoutError):
                raise ConnectionLostError(f"no answer from {route} within {settings.operation_timeout} s") from None
            raise
        return connection

    # ----------------------------------------------------------------------------------------- for links

    @property
    def is_alive(self) -> bool:
        """Whether links can be attached."""
        return self.error is None

    @property
    def is_paused(self) -> bool:
        """Whether the peer is slow to read: uamqp does not report it; a limit on unsettled bytes bounds what waits."""
        return False

    async def attach(self, owner: LinkOwner, spec: LinkSpec, *, is_receiver: bool) -> UamqpLink:
        """Attach a link on the session that has the most room. See `BaseConnection.attach`."""
        self.require_live()
        session = self._held.index(min(self._held))
        if self._held[session] >= HANDLES:
            if len(self._links) >= SESSIONS * HANDLES:
                raise QuotaExceededError(f"a connection of uamqp takes no more than {SESSIONS * HANDLES} links")
            error = ConnectionLostError("the places of refused links are used up; another connection has them all")
            self._lose(error)
            self.abort()
            raise error
        link = UamqpLink(self, next(self._numbers), session, owner)
        self._held[session] += 1
        self._links[link.number] = link
        self.worker.attach(link.number, session, link, spec, is_receiver=is_receiver)
        return link

    def forget(self, link: UamqpLink, *, is_free: bool) -> None:
        """Called when a link is over; whether another can take its place in the session."""
        if self._links.pop(link.number, None) is not None and is_free:
            self._held[link.session] -= 1

    def flush_soon(self) -> None:
        """Send what is queued, soon: the worker does."""

    def queued(self, size: int) -> None:
        """Send what is queued, soon: the worker does."""

    def deliver_together(self) -> None:
        """Do nothing: the worker reads what there is."""

    def hold_back(self, link: WaitingSender) -> None:
        """Resume a link when the peer reads again; see :attr:`is_paused`."""
        raise AssertionError("nothing is held back")

    def abort(self) -> None:
        """Drop the connection at once."""
        self.worker.stop()

    async def aclose(self) -> None:
        """See :class:`eventpump.transport.base.BaseConnection`."""
        self._lose(ConnectionLostError("the connection was closed here", recovery=Recovery.GIVE_UP))
        self.worker.stop()
        await self.ended()

    async def ended(self) -> None:
        """Wait for the thread to end. Where uamqp is stuck, it ends when that is over, and is not waited for."""
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT):
                await asyncio.shield(self._ended)
        except TimeoutError:
            return
        self.worker.join()

    # ------------------------------------------------------------------------------- called by the worker

    def on_calls(self, calls: list[Ask]) -> None:
        """See :class:`eventpump.transport.uamqp.worker.ConnectionOwner`."""
        self._heard += 1
        for what, arguments in calls:
            what(*arguments)

    def on_opened(self) -> None:
        """See :class:`eventpump.transport.uamqp.worker.ConnectionOwner`."""
        if not self._opened.done():
            self._opened.set_result(None)

    def on_closed(self, error: AmqpError | None) -> None:
        """See :class:`eventpump.transport.uamqp.worker.ConnectionOwner`."""
        self._lose(self.passing(end_error(error, None, Recovery.RECONNECT, "the service closed the connection")))

    def on_lost(self, reason: str | None) -> None:
        """See :class:`eventpump.transport.uamqp.worker.ConnectionOwner`."""
        because = "" if reason is None else f": {reason}"
        self._lose(ConnectionLostError(f"the connection was lost{because}"))

    def on_ended(self) -> None:
        """See :class:`eventpump.transport.uamqp.worker.ConnectionOwner`."""
        self._ended.set_result(None)

    def _lose(self, error: ServiceError) -> None:
        if self.error is not None:
            return
        self.error = error
        self._log_end(error)
        if not self._opened.done():
            self._opened.set_exception(error)
            self._opened.exception()  # the waiter gets it; without one, it is not an error
        links, self._links = list(self._links.values()), {}
        for link in links:
            link.end(error)


class _Knock(asyncio.Protocol):
    """A stream that is opened to see whether it can be."""

    def __init__(self) -> None:
        self._stream: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._stream = cast("asyncio.Transport", transport)  # uvloop's is of no class of asyncio's

    def leave(self) -> None:
        """Close it."""
        assert self._stream is not None
        self._stream.abort()
