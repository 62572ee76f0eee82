"""Routing: the choice of a partition for an event."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

from eventpump.core.ring import HashRing, check_virtual_nodes
from eventpump.errors import ConfigurationError
from eventpump.eventhubs.events import EventData
from eventpump.eventhubs.hashing import partition_for_key
from eventpump.texts import not_the_class


class PartitionRouter(Protocol):
    """Chooses a partition for each event without an explicit one.

    A router may also have a method `batch_ended(partition_id)`. A `BufferedProducer` calls it when the batch that it
    fills for a partition is complete, or has waited long enough, and when the partition's buffer is full; an
    `EventProducer` for every message.
    """

    def route(self, event: EventData, partition_key: str | None, partition_ids: Sequence[str]) -> str:
        """Choose a partition.

        Events of one key have to go to one partition for as long as the partitions are the same, or their order is
        lost.

        Args:
            event: The event; of several that are sent as one message the first, and an empty event for a batch that has
                none yet.
            partition_key: None for an event without key.
            partition_ids: The hub's partitions, in the service's order; at least one.

        Returns:
            One of them.
        """


def check_router(router: PartitionRouter | None) -> None:
    """Check that something can be a router. Raises `ConfigurationError` if it has no method `route`, or is a class."""
    if router is not None and (isinstance(router, type) or not callable(getattr(router, "route", None))):
        problem = "must be a router, such as HashRouter(): an object with a method route(event, key, partition_ids)"
        raise ConfigurationError("router", problem + not_the_class(router))


class RoundRobinRouter:
    """Routes each event to the next partition in turn, also events with a key: the most even distribution.

    The events of a key have no order: readers of different partitions process them at the same time.
    """

    __slots__ = ("_next",)

    def __init__(self) -> None:
        self._next = 0

    def route(self, event: EventData, partition_key: str | None, partition_ids: Sequence[str]) -> str:
        """Choose a partition: of `PartitionRouter`."""
        index = self._next % len(partition_ids)
        self._next = index + 1
        return partition_ids[index]


class HashRouter:
    """Routes keys as the service does, and events without key round robin. The default of `BufferedProducer`.

    The events of a key keep their order, and share a partition with those that other clients send with this key. If
    partitions are added to the hub, nearly every key changes its partition.

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


class StickyRouter:
    """Routes events without key to one partition until its batch is complete, then to the next. Keys as `HashRouter`.

    As Kafka's sticky partitioner: at a low rate, messages are fewer and larger than round robin, and over time the
    distribution is as even. Events without key have no order beyond their batch. Made for `BufferedProducer`, which
    fills the batches. Of `EventProducer` every call sends a message of its own: there it is as `RoundRobinRouter`, but
    for keys.
    """

    __slots__ = ("_current", "_keyed", "_others")

    def __init__(self) -> None:
        self._keyed = HashRouter()
        self._others = RoundRobinRouter()
        self._current: str | None = None

    def route(self, event: EventData, partition_key: str | None, partition_ids: Sequence[str]) -> str:
        """Choose a partition: of `PartitionRouter`."""
        if partition_key is not None:
            return self._keyed.route(event, partition_key, partition_ids)
        if self._current is None or self._current not in partition_ids:
            self._current = self._others.route(event, None, partition_ids)
        return self._current

    def batch_ended(self, partition_id: str) -> None:
        """Go on with the next partition if the batch of the current one has ended."""
        if partition_id == self._current:
            self._current = None


class RingRouter:
    """Routes keys by a consistent hash ring with virtual nodes, and events without key round robin.

    The events of a key keep their order. If the hub gets one more partition, making n, only about 1/n of the keys
    change theirs, all of them to the new one. Clients that let the service assign keys use other partitions: use it in
    every producer of a hub, or in none.

    Args:
        virtual_nodes: The places of each partition on the ring: more distribute keys more evenly, and make the ring
            larger. The same in every producer of a hub. From 1 to 10,000. Default: 128.

    Raises:
        ConfigurationError: `virtual_nodes` is out of these bounds.
    """

    __slots__ = ("_ids", "_others", "_ring", "_virtual_nodes")

    def __init__(self, virtual_nodes: int = 128) -> None:
        self._virtual_nodes = check_virtual_nodes(virtual_nodes)
        self._others = RoundRobinRouter()
        self._ids: Sequence[str] = ()
        self._ring: HashRing | None = None

    def route(self, event: EventData, partition_key: str | None, partition_ids: Sequence[str]) -> str:
        """Choose a partition: of `PartitionRouter`. An empty key is a key."""
        if partition_key is None:
            return self._others.route(event, None, partition_ids)
        if self._ring is None or (partition_ids is not self._ids and tuple(partition_ids) != tuple(self._ids)):
            self._ids = tuple(partition_ids)
            self._ring = HashRing(dict.fromkeys(self._ids, self._virtual_nodes))
        return self._ring.place_of(partition_key)


ROUTERS: Final[Mapping[str, Callable[[], PartitionRouter]]] = {
    "hash": HashRouter,
    "round-robin": RoundRobinRouter,
    "sticky": StickyRouter,
    "ring": RingRouter,
}
"""The routers by the names that commands and Spark's options have for them."""
