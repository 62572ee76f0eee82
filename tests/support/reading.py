"""Reading everything that a partition holds, by our own reader."""

from __future__ import annotations

from typing import Any

from eventpump import PartitionReader, ReceivedEvent


async def read_partition(connection_string: str, hub: str, partition_id: str, **options: Any) -> list[ReceivedEvent]:
    """Read what a partition holds now, from its beginning to its end.

    Args:
        connection_string: Where the service is.
        hub: The hub.
        partition_id: The partition.
        **options: More options of `PartitionReader`.

    Returns:
        The events, in order.
    """
    async with PartitionReader(
        connection_string, hub, partition_id=partition_id, position="-1", end="@latest", **options
    ) as reader:
        return [event async for event in reader]


async def read_bodies(connection_string: str, hub: str, partition_id: str, **options: Any) -> list[bytes]:
    """Read the bodies of what a partition holds now; see :func:`read_partition`."""
    return [event.body for event in await read_partition(connection_string, hub, partition_id, **options)]
