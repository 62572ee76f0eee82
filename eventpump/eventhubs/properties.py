"""What the service answers about hubs and partitions."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True, slots=True)
class HubProperties:
    """What the service reports about a hub.

    Args:
        name: The hub's name.
        created_at: When it was created.
        partition_ids: Its partitions, in the service's order.
    """

    name: str
    created_at: datetime
    partition_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PartitionProperties:
    """What the service reports about a partition.

    Args:
        hub: The hub's name.
        partition_id: The partition.
        beginning_sequence_number: The sequence number of the oldest retained event.
        last_enqueued_sequence_number: The sequence number of the newest event; -1 if there never was one.
        last_enqueued_offset: The offset of the newest event, an opaque text.
        last_enqueued_time: When the newest event was enqueued.
        is_empty: Whether the partition retains no event.
    """

    hub: str
    partition_id: str
    beginning_sequence_number: int
    last_enqueued_sequence_number: int
    last_enqueued_offset: str
    last_enqueued_time: datetime
    is_empty: bool
