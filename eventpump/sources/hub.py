"""A hub as a source."""

from __future__ import annotations

from eventpump.aio.closing import AsyncResource
from eventpump.aio.home import HomeLoop
from eventpump.eventhubs.events import EventPosition
from eventpump.interfaces import (
    HubProperties,
    PartitionProperties,
    ReceiveLink,
    ReceiveLinkSpec,
    ReceiveSink,
    Transport,
)


class HubSource(AsyncResource):
    """The events of a hub, over a transport. The source's links are the transport's.

    Args:
        transport: The transport.
        hub: The hub's name.
        owns_transport: Whether the transport is closed with the source. Default: True.
    """

    def __init__(self, transport: Transport, hub: str, *, owns_transport: bool = True) -> None:
        self.transport = transport
        """The transport. A host or a reader of this source uses it directly."""
        self._hub = hub
        self._owns_transport = owns_transport
        self._home = HomeLoop(type(self).__name__)

    @property
    def fully_qualified_namespace(self) -> str:
        """The namespace's host name."""
        return self.transport.fully_qualified_namespace

    @property
    def hub(self) -> str:
        """The hub's name."""
        return self._hub

    async def partitions(self) -> HubProperties:
        """See `EventSource`."""
        self._home.enter()
        return await self.transport.get_hub_properties(self._hub)

    async def partition_properties(self, partition_id: str) -> PartitionProperties:
        """See `EventSource`."""
        self._home.enter()
        return await self.transport.get_partition_properties(self._hub, partition_id)

    async def open(
        self,
        partition_id: str,
        position: EventPosition,
        sink: ReceiveSink,
        *,
        consumer_group: str = "$Default",
        owner_level: int | None = None,
    ) -> ReceiveLink:
        """See `EventSource`."""
        self._home.enter()
        spec = ReceiveLinkSpec(self._hub, consumer_group, partition_id, position, owner_level)
        return await self.transport.open_receive_link(spec, sink)

    async def aclose(self) -> None:
        """See `EventSource`. Links of a transport that is not the source's own stay open."""
        self._home.enter()
        self._home.close()
        if self._owns_transport:
            await self.transport.aclose()
