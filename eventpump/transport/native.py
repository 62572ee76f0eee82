"""The native transport: asyncio, on the engine of `eventpump.amqp`. One connection carries all links of a client."""

from __future__ import annotations

import asyncio
import random
import uuid

from eventpump.amqp.performatives import Source, Target
from eventpump.core.backoff import Backoff
from eventpump.dialect import management
from eventpump.dialect.addresses import audience, consumer_address, producer_address
from eventpump.dialect.filters import source_filter
from eventpump.dialect.names import (
    CBS_NODE,
    EPOCH,
    GEOREPLICATION,
    MANAGEMENT_NODE,
    RECEIVER_NAME,
    RUNTIME_METRIC,
)
from eventpump.errors import ClosedError, EventPumpError
from eventpump.ports import (
    HubProperties,
    PartitionProperties,
    ReceiveLinkSpec,
    ReceiveSink,
    SendLinkSpec,
)
from eventpump.settings import ConnectionSettings
from eventpump.transport.connection import ClientConnection
from eventpump.transport.links import NativeReceiveLink, NativeSendLink
from eventpump.transport.requests import RequestLinks
from eventpump.transport.tokens import Authorizer, TokenSource


class _Live:
    """A connection, with what serves requests on it."""

    def __init__(self, connection: ClientConnection, source: TokenSource, rng: random.Random) -> None:
        self.connection = connection
        self.management = RequestLinks(connection, MANAGEMENT_NODE)
        self.authorizer = Authorizer(
            source, RequestLinks(connection, CBS_NODE), auth_timeout=connection.settings.auth_timeout, rng=rng
        )

    async def aclose(self) -> None:
        await self.authorizer.aclose()
        await self.connection.aclose()


class NativeTransport:
    """The way to one namespace over AMQP on TCP or TLS: `eventpump.ports.Transport`.

    :param settings: where to connect, and as whom.
    :param rng: spreads the back-off.
    """

    def __init__(self, settings: ConnectionSettings, *, rng: random.Random | None = None) -> None:
        self._settings = settings
        self._rng = rng or random.Random()
        self._source = TokenSource(settings.credential)
        self._backoff = Backoff(settings.retry.base_delay, settings.retry.max_delay)
        self._not_before = 0.0
        self._live: _Live | None = None
        self._connecting: asyncio.Task[_Live] | None = None
        self._is_closed = False

    @property
    def fully_qualified_namespace(self) -> str:
        """See the port."""
        return self._settings.fully_qualified_namespace

    # ------------------------------------------------------------------------------------------- links

    async def open_receive_link(self, spec: ReceiveLinkSpec, sink: ReceiveSink) -> NativeReceiveLink:
        """See the port."""
        live = await self._connected()
        await live.authorizer.authorize(self._audience(spec.hub, spec.consumer_group))
        address = consumer_address(spec.hub, spec.consumer_group, spec.partition_id)
        link = NativeReceiveLink(live.connection, sink, entity=address)
        name = live.connection.new_name(address)
        properties: dict[str, object] = {}
        if spec.owner_level is not None:
            properties[EPOCH] = spec.owner_level
        if spec.receiver_name is not None:
            properties[RECEIVER_NAME] = spec.receiver_name
        await link.attach(
            name=name,
            source=Source(address=address, filter=source_filter(spec.position)),
            target=Target(address=name),
            max_message_size=spec.max_message_size,
            properties=properties,
            desired_capabilities=[GEOREPLICATION, *([RUNTIME_METRIC] if spec.track_last_enqueued else [])],
        )
        self._backoff.reset()
        return link

    async def open_send_link(self, spec: SendLinkSpec) -> NativeSendLink:
        """See the port."""
        live = await self._connected()
        await live.authorizer.authorize(self._audience(spec.hub))
        address = producer_address(spec.hub, spec.partition_id)
        link = NativeSendLink(live.connection, entity=address)
        name = live.connection.new_name(address)
        await link.attach(
            name=name,
            source=Source(address=name),
            target=Target(address=address),
            properties=spec.properties,
            desired_capabilities=[GEOREPLICATION, *spec.desired_capabilities],
        )
        self._backoff.reset()
        return link

    def _audience(self, hub: str, consumer_group: str | None = None) -> str:
        return audience(self._settings.fully_qualified_namespace, hub, consumer_group=consumer_group)

    # --------------------------------------------------------------------------------------- directory

    async def get_hub_properties(self, hub: str) -> HubProperties:
        """See the port."""
        live = await self._connected()
        token = await live.authorizer.authorize(self._audience(hub))
        name = str(uuid.uuid4())
        answer = await live.management.request(
            lambda reply_to: management.hub_request(hub, message_id=name, reply_to=reply_to, security_token=token),
            name,
            timeout=self._settings.operation_timeout,
        )
        facts = management.parse_hub_response(answer, hub=hub)
        return HubProperties(facts.name, facts.created_at, facts.partition_ids)

    async def get_partition_properties(self, hub: str, partition_id: str) -> PartitionProperties:
        """See the port."""
        live = await self._connected()
        token = await live.authorizer.authorize(self._audience(hub))
        name = str(uuid.uuid4())
        answer = await live.management.request(
            lambda reply_to: management.partition_request(
                hub, partition_id, message_id=name, reply_to=reply_to, security_token=token
            ),
            name,
            timeout=self._settings.operation_timeout,
        )
        facts = management.parse_partition_response(answer, hub=hub, partition_id=partition_id)
        return PartitionProperties(
            facts.hub,
            facts.partition_id,
            facts.beginning_sequence_number,
            facts.last_enqueued_sequence_number,
            facts.last_enqueued_offset,
            facts.last_enqueued_time,
            facts.is_empty,
        )

    # -------------------------------------------------------------------------------------- connection

    async def _connected(self) -> _Live:
        """Give the live connection, or make one. Those who come meanwhile share the attempt and its failure."""
        if self._is_closed:
            raise ClosedError("transport")
        if self._live is not None and self._live.connection.is_alive:
            return self._live
        if self._connecting is None:
            self._connecting = asyncio.create_task(self._connect(), name="connect")
            self._connecting.add_done_callback(self._connected_or_not)
        return await asyncio.shield(self._connecting)

    def _connected_or_not(self, task: asyncio.Task[_Live]) -> None:
        self._connecting = None
        if not task.cancelled():
            task.exception()  # told to those who waited, if any still do

    async def _connect(self) -> _Live:
        loop = asyncio.get_running_loop()
        old, self._live = self._live, None
        if old is not None:
            await old.aclose()
        await asyncio.sleep(self._not_before - loop.time())
        # The next attempt, should this one or what it brings fail, comes no sooner; a link that attaches resets it.
        try:
            connection = await ClientConnection.open(self._settings)
        except EventPumpError:
            self._not_before = loop.time() + self._backoff.next(self._rng)
            raise
        self._not_before = loop.time() + self._backoff.next(self._rng)
        self._live = _Live(connection, self._source, self._rng)
        return self._live

    async def aclose(self) -> None:
        """See the port."""
        self._is_closed = True
        connecting, live = self._connecting, self._live
        if connecting is not None:
            connecting.cancel()
            await asyncio.gather(connecting, return_exceptions=True)
        if live is None:
            live = self._live
        self._live = None
        if live is not None:
            await live.aclose()
