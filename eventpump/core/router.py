"""Routing: the choice of a partition for an event."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from eventpump.eventhubs.events import EventData
from eventpump.eventhubs.hashing import partition_for_key


class PartitionRouter(Protocol):
    """Chooses a partition for each event without an explicit one."""

    def route(self, event: EventData, partition_key: str | None, partition_ids: Sequence[str]) -> str:
        """Choose a partition.

        Events of one key have to go to one partition for as long as the partitions are the same, or their order is
        lost.

        Args:
            partition_key: None for an event without key.
            partition_ids: The hub's partitions, in the service's order; at least one.

        Returns:
            One of them.
        """


class HashRouter:
    """Routes keys as the service does, and events without key round robin.

    Args:
        partition_for_key: The service's hash, from key and number of partitions to an index
            (`eventhubs.hashing.partition_for_key`); by default that.
    """

    __slots__ = ("_next", "_partition_for_key")

    def __init__(self, partition_for_key: Callable[[str, int], int] = partition_for_key) -> None:
        self._partition_for_key = partition_for_key
        self._next = 0

    def route(self, event: EventData, partition_key: str | None, partition_ids: Sequence[str]) -> str:
        """Choose a partition: of `PartitionRouter`. An empty key is a key."""
        count = len(partition_ids)
        if partition_key is not None:
            return partition_ids[self._partition_for_key(partition_key, count)]
        index = self._next % count
        self._next = index + 1
        return partition_ids[index]
