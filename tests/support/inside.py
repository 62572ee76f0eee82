"""Where several tests look into what is private to the package: each name stands here alone."""

from __future__ import annotations

from typing import Any, TypeVar

from eventpump.amqp.connection import Connection
from eventpump.consumer.host.host import HubHost
from eventpump.consumer.host.owned import OwnedPartition
from eventpump.consumer.link.feed import PartitionFeed
from eventpump.consumer.link.member import MemberFeed
from eventpump.consumer.link.sharing import SharedPartition
from eventpump.consumer.pump.partition import OpenPartition
from eventpump.consumer.pump.pump import PartitionPump
from eventpump.core.budget import BufferBudget
from eventpump.eventhubs.events import EventData, EventPosition
from eventpump.producer.producer import HubProducer
from eventpump.producer.targets import SendTarget
from eventpump.testing.transport import FakeHub

Sent = TypeVar("Sent", bound=EventData)


def owned(host: HubHost, partition_id: str) -> OwnedPartition | None:
    """Return what a host runs for a partition; None if it runs nothing for it."""
    return None if host._manager is None else host._manager._partitions.get(partition_id)


def partition_read(pump: PartitionPump | None) -> OpenPartition | None:
    """Return what a pump reads now."""
    return None if pump is None else pump._partition


def budget_of(host: HubHost) -> BufferBudget:
    """Return what bounds the bytes that a host holds."""
    return host._budget


def feed_of(shared: SharedPartition | None) -> PartitionFeed[Any] | None:
    """Return what reads the link that subscriptions share, while they do."""
    return None if shared is None else shared._feed


def own_links(shared: SharedPartition) -> dict[str, MemberFeed]:
    """Return by name the subscriptions that read along, and have or had a link of their own."""
    return shared._own


def members_of(shared: SharedPartition) -> list[MemberFeed]:
    """Return all that read along."""
    return [*shared._members.values(), *own_links(shared).values()]


def number_at(hub: FakeHub, partition_id: str, position: EventPosition) -> int:
    """Return the sequence number at which a position begins."""
    return hub._index(hub.partition(partition_id), position)


def published(event: Sent, number: int) -> Sent:
    """Set the sequence number with which an event was published."""
    event._published_number = number
    return event


def publishers_of(producer: HubProducer) -> list[SendTarget]:
    """Return the publishers of single partitions that a producer keeps."""
    return list(producer._context.kept)


def unread_by(engine: Connection) -> bytes:
    """Return what an engine was given and has not read: the beginning of a frame, or what another turn reads."""
    return b"".join(engine.pending)


def forms_of(engine: Connection) -> dict[Any, Any]:
    """Return what an engine keeps of the transfers that it read, to recognize the next ones like them."""
    return engine._forms
