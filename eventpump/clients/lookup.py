"""Reads a single event of a partition."""

from __future__ import annotations

from eventpump.clients.consumers import PartitionReader
from eventpump.eventhubs.events import EventPosition, ReceivedEvent
from eventpump.interfaces import Transport


async def read_event(
    transport: Transport,
    hub: str,
    partition_id: str,
    position: EventPosition,
    *,
    consumer_group: str,
    timeout: float,
) -> ReceivedEvent | None:
    """Return the first event at a position; None if none has arrived in time.

    Args:
        transport: A transport, which stays open.
        hub: The hub's name.
        partition_id: The partition.
        position: The position.
        consumer_group: The consumer group to read with.
        timeout: Seconds to wait for it.

    Raises:
        EventPumpError: It cannot be read.
    """
    reader = PartitionReader(
        hub=hub,
        partition_id=partition_id,
        transport=transport,
        owns_transport=False,
        consumer_group=consumer_group,
        position=position,
        prefetch_events=1,
    )
    async with reader:
        events = await reader.read(1, timeout)
    return events[0] if events else None
