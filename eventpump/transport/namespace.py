"""The transport of one namespace: one connection, of either AMQP implementation, for all links of a client."""

from __future__ import annotations

import asyncio
import logging
import random
import ssl
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

from eventpump.aio.home import HomeLoop
from eventpump.aio.tasks import SingleFlight
from eventpump.amqp.message import Message
from eventpump.amqp.performatives import Source, Target
from eventpump.core.backoff import Backoff
from eventpump.errors import (
    ClosedError,
    ConfigurationError,
    ConnectionLostError,
    EventPumpError,
    ProtocolError,
    Recovery,
    ServiceError,
)
from eventpump.eventhubs import management
from eventpump.eventhubs.addresses import audience, consumer_address, producer_address
from eventpump.eventhubs.filters import source_filter
from eventpump.eventhubs.names import CBS_NODE, EPOCH, GEOREPLICATION, MANAGEMENT_NODE, RECEIVER_NAME, RUNTIME_METRIC
from eventpump.interfaces import HubProperties, PartitionProperties, ReceiveLinkSpec, ReceiveSink, SendLinkSpec
from eventpump.options.connection import ConnectionSettings
from eventpump.transport.base import BaseConnection, LinkSpec
from eventpump.transport.links import ClientReceiveLink, ClientSendLink
from eventpump.transport.requests import RequestLinks
from eventpump.transport.tokens import Authorizer, TokenSource

_T = TypeVar("_T")

_log = logging.getLogger("eventpump.transport")

RECONNECT_DELAY_MAX = 5.0
"""Seconds; the longest delay between attempts to connect, so that events flow soon after an outage of any length."""

STEADY_AFTER = 10.0
"""Seconds between two connections that worked after which the delays start from the smallest again."""


class _Live:
    """A connection, with its links for requests and its tokens;
    proven once an attach or a request has succeeded on it."""

    def __init__(self, connection: BaseConnection, source: TokenSource, rng: random.Random) -> None:
        self.connection = connection
        self.management = RequestLinks(connection, MANAGEMENT_NODE)
        self.authorizer = Authorizer(
            source, RequestLinks(connection, CBS_NODE), auth_timeout=connection.settings.auth_timeout, rng=rng
        )
        self.is_proven = False

    async def aclose(self) -> None:
        """Close the connection in order. If cancelled, the connection is dropped."""
        try:
            await self.authorizer.aclose()
        except asyncio.CancelledError:
            self.connection.abort()
            raise
        await self.connection.aclose()

    async def drop(self) -> None:
        """Release a connection that has ended."""
        self.connection.abort()
        await self.authorizer.aclose()


class NamespaceTransport(ABC):
    """A client of one namespace: `eventpump.interfaces.Transport`. Connects on first use, and again after a failure.

    Args:
        settings: The namespace, the credential and the options of the connection.
        rng: Randomness, for delays; None for an unseeded one.
        now: Returns the time in seconds since the Unix epoch, for tokens.
    """

    def __init__(
        self,
        settings: ConnectionSettings,
        *,
        rng: random.Random | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._settings = settings
        self._rng = rng or random.Random()
        self._source = TokenSource(settings.credential, sas_lifetime=settings.sas_lifetime, now=now)
        retry = settings.retry
        # Not `retrying`: nothing is repeated here. It spaces the attempts that links and requests cause.
        base, longest = min(retry.base_delay, RECONNECT_DELAY_MAX), min(retry.max_delay, RECONNECT_DELAY_MAX)
        self._backoff = Backoff(base, longest, is_fixed=retry.mode == "fixed")
        self._proven_at = float("-inf")
        self._not_before = 0.0
        self._live: _Live | None = None
        self._connecting = SingleFlight[_Live]("connect", of="transport")
        self._had_usable_files = False
        self._is_closed = False
        self._home = HomeLoop(type(self).__name__, warns=False)

    @property
    def fully_qualified_namespace(self) -> str:
        """See `Transport`."""
        return self._settings.fully_qualified_namespace

    @property
    def port(self) -> int:
        """The port of the namespace."""
        return self._settings.port

    @property
    def peer(self) -> tuple[str, int] | None:
        """The address and the port that the connection goes to, such as a proxy's; None if that is not known."""
        return None if self._live is None else self._live.connection.peer

    # ------------------------------------------------------------------------------------------- links

    async def open_receive_link(self, spec: ReceiveLinkSpec, sink: ReceiveSink) -> ClientReceiveLink:
        """See `Transport`."""
        return await self._use(lambda live: self._open_receive_link(live, spec, sink))

    async def _open_receive_link(self, live: _Live, spec: ReceiveLinkSpec, sink: ReceiveSink) -> ClientReceiveLink:
        resource = self._audience(spec.hub, spec.consumer_group)
        await live.authorizer.authorize(resource)
        address = consumer_address(spec.hub, spec.consumer_group, spec.partition_id)
        link = ClientReceiveLink(
            live.connection, sink, entity=address, on_expired=partial(live.authorizer.forget, resource)
        )
        link.delivery_interval = spec.delivery_interval
        if spec.delivery_interval:
            live.connection.deliver_together()
        name = live.connection.new_name(address)
        properties: dict[str, object] = {}
        if spec.owner_level is not None:
            properties[EPOCH] = spec.owner_level
        if spec.receiver_name is not None:
            properties[RECEIVER_NAME] = spec.receiver_name
        await link.attach(
            LinkSpec(
                name,
                Source(address=address, filter=source_filter(spec.position)),
                Target(address=name),
                max_message_size=spec.max_message_size,
                properties=properties,
                desired_capabilities=[GEOREPLICATION, *([RUNTIME_METRIC] if spec.track_last_enqueued else [])],
            )
        )
        return link

    async def open_send_link(self, spec: SendLinkSpec) -> ClientSendLink:
        """See `Transport`."""
        return await self._use(lambda live: self._open_send_link(live, spec))

    async def _open_send_link(self, live: _Live, spec: SendLinkSpec) -> ClientSendLink:
        resource = self._audience(spec.hub)
        await live.authorizer.authorize(resource)
        address = producer_address(spec.hub, spec.partition_id)
        link = ClientSendLink(live.connection, entity=address, on_expired=partial(live.authorizer.forget, resource))
        name = live.connection.new_name(address)
        await link.attach(
            LinkSpec(
                name,
                Source(address=name),
                Target(address=address),
                properties=spec.properties,
                desired_capabilities=[GEOREPLICATION, *spec.desired_capabilities],
            )
        )
        return link

    async def _use(self, operate: Callable[[_Live], Awaitable[_T]]) -> _T:
        """Do something on the live connection. The way in to it for all that can fail with it."""
        live = await self._connected()
        try:
            result = await operate(live)
        except ClosedError as error:
            # Of the engine, or of the tokens of a connection that has been replaced meanwhile.
            if self._is_closed:
                raise
            live.connection.require_live()
            raise ConnectionLostError(f"what was to be used is gone: {error}") from error
        self._succeeded(live)
        return result

    def _audience(self, hub: str, consumer_group: str | None = None) -> str:
        return audience(self._settings.fully_qualified_namespace, hub, consumer_group=consumer_group)

    # --------------------------------------------------------------------------------------- directory

    async def get_hub_properties(self, hub: str) -> HubProperties:
        """See `HubDirectory`."""
        make, parse = partial(management.hub_request, hub), partial(management.parse_hub_response, hub=hub)
        return await self._use(lambda live: self._read(live, hub, make, parse))

    async def get_partition_properties(self, hub: str, partition_id: str) -> PartitionProperties:
        """See `HubDirectory`."""
        make = partial(management.partition_request, hub, partition_id)
        parse = partial(management.parse_partition_response, hub=hub, partition_id=partition_id)
        return await self._use(lambda live: self._read(live, hub, make, parse))

    async def _read(self, live: _Live, hub: str, make: Callable[..., Message], parse: Callable[[Message], _T]) -> _T:
        token = await live.authorizer.authorize(self._audience(hub))
        name = str(uuid.uuid4())
        answer = await live.management.request(
            lambda reply_to: make(message_id=name, reply_to=reply_to, security_token=token),
            name,
            timeout=self._settings.operation_timeout,
        )
        try:
            return parse(answer)
        except ProtocolError as error:
            raise ServiceError(error.description, condition=error.condition, entity=hub) from error

    # -------------------------------------------------------------------------------------- connection

    async def _connected(self) -> _Live:
        """Return the live connection, or connect. Concurrent callers share the attempt and its failure."""
        self._home.enter()
        if self._is_closed:
            raise ClosedError("transport")
        if self._live is not None and self._live.connection.is_alive:
            return self._live
        return await self._connecting.run(self._connect)

    @abstractmethod
    async def _open(self) -> BaseConnection:
        """Connect, and wait for the service's open. If cancelled, no connection is left."""

    async def _open_again(self) -> BaseConnection:
        """Connect. A certificate file that cannot be used is a final error only if none was ever usable.

        Files may be replaced while a client runs, and are read at each attempt: one that is missing, half written, or
        of another key or authority may be right at the next attempt.
        """
        try:
            connection = await self._open()
        except ConfigurationError as error:
            if not self._had_usable_files:
                raise
            raise ConnectionLostError(f"cannot connect: {error}") from error
        except ServiceError as error:
            self._had_usable_files = True
            if self._live is not None and isinstance(error.__cause__, ssl.SSLCertVerificationError):
                error.recovery = Recovery.RECONNECT
            raise
        self._had_usable_files = True
        return connection

    async def _connect(self) -> _Live:
        loop = asyncio.get_running_loop()
        if self._live is not None:
            await self._live.drop()
        delay = max(self._not_before - loop.time(), 0.0)
        attempt = {"attempt": self._backoff.failures + 1}
        _log.debug("connecting to %s in %.3f s", self.fully_qualified_namespace, delay, extra=attempt)
        await asyncio.sleep(self._not_before - loop.time())
        try:
            connection = await self._open_again()
        except EventPumpError as error:
            _log.debug("no connection to %s: %s", self.fully_qualified_namespace, error, extra=attempt)
            raise
        finally:
            # No earlier attempt follows, if this one or its connection fails; see `_succeeded`.
            self._not_before = loop.time() + self._backoff.next(self._rng)
        level, what = (logging.DEBUG, "is open") if self._live is None else (logging.INFO, "is restored")
        _log.log(level, "the connection to %s %s (%s)", self.fully_qualified_namespace, what, connection.container_id)
        self._live = _Live(connection, self._source, self._rng)
        return self._live

    def _succeeded(self, live: _Live) -> None:
        """Record that a connection works: the delays before further ones start from the smallest again.

        Not if the connection before has worked only just now: one link whose attach ends the connection each time must
        not make all others reconnect with it several times per second.
        """
        if not live.is_proven:
            live.is_proven = True
            now = asyncio.get_running_loop().time()
            before, self._proven_at = self._proven_at, now
            if now - before < STEADY_AFTER:
                return
            self._backoff.reset()
            soon = now + self._rng.uniform(0, self._settings.retry.base_delay)
            self._not_before = min(self._not_before, soon)

    async def aclose(self) -> None:
        """See `Transport`. If cancelled, the connection is dropped instead of closed in order."""
        self._home.enter()
        self._home.close()
        self._is_closed = True
        try:
            await self._connecting.aclose()
        except asyncio.CancelledError:
            if self._live is not None:
                self._live.connection.abort()
            raise
        if self._live is not None:
            await self._live.aclose()
