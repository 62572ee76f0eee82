"""Every error of eventpump.

::

    EventPumpError
    ├── ConfigurationError            a value given by the user cannot work: option, connection string, file
    ├── ProtocolError                 the peer broke AMQP 1.0; the connection is closed with `condition`
    ├── EventError                    an event cannot be encoded or decoded
    │   └── EventTooLargeError        it, or its batch, is larger than the link allows
    ├── ServiceError                  the service, or the way to it, failed; `recovery` says what to rebuild
    │   ├── ConnectionLostError       the connection ended or could not be made
    │   ├── LinkDetachedError         the link ended
    │   ├── ServiceBusyError          throttled
    │   ├── ServiceTimeoutError       no answer in time: the outcome is not known
    │   ├── AuthenticationError       the credential was refused
    │   ├── EntityNotFoundError       no such hub, consumer group or partition
    │   ├── ConsumerDisconnectedError another reader with an equal or higher owner level took the partition
    │   ├── ProducerDisconnectedError another publisher with a higher owner level took over; final for the partition
    │   ├── QuotaExceededError        a limit of the service
    │   └── RequestRefusedError       the service refused the request; sending it again cannot help
    ├── PublishOutcomeUnknownError    whether events are stored is not known; those of a batch are being settled
    ├── InvalidClientStateError       a publisher's numbers and the service's disagree; final for the partition
    ├── ProducerStateLostError        the service has forgotten a producer: what it stored is not known
    ├── BufferFullError               a buffer has no room for an event right now
    ├── DataLossError                 events that were to be read are gone from their partition
    ├── StoreError                    a store of leases, checkpoints or publishers' states failed
    ├── OwnershipLostError            the partition is no longer owned by this host
    ├── ProcessorFailedError          the user's processor raised, and the policy is to stop
    └── ClosedError                   used after it was closed

An AMQP condition becomes one of these in :mod:`eventpump.eventhubs.conditions`, and nowhere else.
No error ever carries a key, a signature or a token.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from eventpump.producer.batch import EventBatch


class Recovery(enum.Enum):
    """What has to be rebuilt before trying again can help."""

    RETRY = "retry"
    """Nothing: the same link serves the next try."""
    RELINK = "relink"
    """The link."""
    RECONNECT = "reconnect"
    """The connection, and everything on it."""
    GIVE_UP = "give up"
    """Trying again cannot help."""


class EventPumpError(Exception):
    """The base of every error raised by eventpump."""


class ConfigurationError(EventPumpError):
    """A value given by the user cannot work.

    Args:
        field: The option, connection string key or file entry at fault.
        problem: What is wrong with it, without its value where that is a secret.
    """

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


class ProtocolError(EventPumpError):
    """The peer broke the protocol.

    Args:
        condition: The AMQP error condition the connection is closed with.
        description: Which rule was broken.
    """

    def __init__(self, condition: str, description: str) -> None:
        super().__init__(f"{condition}: {description}")
        self.condition = condition
        self.description = description


class EventError(EventPumpError):
    """An event cannot be encoded, or what was received cannot be decoded."""


class EventTooLargeError(EventError):
    """An event or batch is larger than the link allows.

    Args:
        size: Its encoded size in bytes.
        limit: The link's maximum message size in bytes.
    """

    def __init__(self, size: int, limit: int) -> None:
        super().__init__(f"the message takes {size} bytes, the link allows {limit}")
        self.size = size
        self.limit = limit


class ServiceError(EventPumpError):
    """The service, or the way to it, failed.

    Args:
        description: The peer's words, or ours where there was no peer.
        condition: The AMQP error condition, None where none was given.
        recovery: What must be rebuilt before trying again.
        entity: The address of the link or the name of the entity, where one is concerned.
        tracking_id: The service's tracking id, where it gave one.
    """

    default_recovery = Recovery.RETRY

    def __init__(
        self,
        description: str,
        *,
        condition: str | None = None,
        recovery: Recovery | None = None,
        entity: str | None = None,
        tracking_id: str | None = None,
    ) -> None:
        parts = [description]
        if condition is not None:
            parts.append(f"condition {condition}")
        if entity is not None:
            parts.append(f"entity {entity}")
        super().__init__("; ".join(parts))
        self.description = description
        self.condition = condition
        self.recovery = self.default_recovery if recovery is None else recovery
        self.entity = entity
        self.tracking_id = tracking_id


class ConnectionLostError(ServiceError):
    """The connection ended, or could not be made."""

    default_recovery = Recovery.RECONNECT


class LinkDetachedError(ServiceError):
    """The link ended."""

    default_recovery = Recovery.RELINK


class ServiceBusyError(ServiceError):
    """The service asks to wait (throttling)."""

    default_recovery = Recovery.RETRY


class ServiceTimeoutError(ServiceError):
    """No answer came in time; whether the request took effect is not known."""

    default_recovery = Recovery.RETRY


class AuthenticationError(ServiceError):
    """The credential was refused, or gives no right to this entity."""

    default_recovery = Recovery.GIVE_UP


class EntityNotFoundError(ServiceError):
    """There is no such hub, consumer group or partition."""

    default_recovery = Recovery.GIVE_UP


class ConsumerDisconnectedError(ServiceError):
    """Another reader with an equal or higher owner level took the partition; final for this link."""

    default_recovery = Recovery.GIVE_UP


class ProducerDisconnectedError(ServiceError):
    """Another publisher with the same producer id and a higher owner level took over; final for the partition."""

    default_recovery = Recovery.GIVE_UP


class QuotaExceededError(ServiceError):
    """A limit of the service is reached."""

    default_recovery = Recovery.GIVE_UP


class RequestRefusedError(ServiceError):
    """The service refused the request; sending it again cannot help."""

    default_recovery = Recovery.GIVE_UP


class PublishOutcomeUnknownError(EventPumpError):
    """Whether the service has stored events is not known. The cause, if there is one, is chained.

    Of a batch: it keeps its numbers, and nothing else goes to its partition, until its publisher has settled it.
    ``await producer.send(error.batch)`` waits for that, and returns if the events are stored, also if that was found
    out in the meantime.

    Of the former process with a publisher's name (see `on_doubt` of :class:`eventpump.EventProducer`): nothing is sent
    to the partition by this producer.

    Args:
        partition_id: The partition.
        first: The number of the first event; None where no number was assigned.
        count: How many events there are; of a former process, how many there may be at most.
        problem: How the doubt arose and what can be done, where sending the same batch again does not settle it.

    Attributes:
        batch: The batch that was sent, or that holds the events of the list that was sent; of a list that takes several
            messages, the one whose outcome is not known. None of a former process's events, and of a buffered producer.
        is_settling: Whether sending the same batch again waits for its outcome. False of a former process's events.
    """

    def __init__(self, partition_id: str, first: int | None, count: int, *, problem: str | None = None) -> None:
        numbers = "" if first is None else f" from number {first}"
        super().__init__(
            f"partition {partition_id}: the outcome of {count} events{numbers} is not known; "
            + (problem or "send the same batch again to wait for it")
        )
        self.partition_id = partition_id
        self.first = first
        self.count = count
        self.batch: EventBatch | None = None
        self.is_settling = problem is None


class InvalidClientStateError(EventPumpError):
    """A publisher's numbers and the service's disagree. Every later send to the partition fails with it.

    Args:
        partition_id: The partition.
        problem: What does not agree.
    """

    def __init__(self, partition_id: str, problem: str) -> None:
        super().__init__(f"partition {partition_id}: {problem}; it takes a new producer to publish there")
        self.partition_id = partition_id
        self.problem = problem


class ProducerStateLostError(EventPumpError):
    """The service has forgotten a producer, or what it had accepted of it: its numbers do not say what is stored.

    Args:
        partition_ids: The partitions concerned.
        problem: How that shows, and what can be done.
    """

    def __init__(self, partition_ids: tuple[str, ...], problem: str) -> None:
        which = "partition" if len(partition_ids) == 1 else "partitions"
        super().__init__(
            f"the service has lost the state of the producer of {which} {', '.join(partition_ids)}: {problem}"
        )
        self.partition_ids = partition_ids
        self.problem = problem

    def __reduce__(self) -> tuple[type[ProducerStateLostError], tuple[tuple[str, ...], str]]:
        return ProducerStateLostError, (self.partition_ids, self.problem)


class BufferFullError(EventPumpError):
    """A buffer has no room for an event right now. Nothing was taken.

    Args:
        partition_id: The partition the event was for.
        size: What the event takes, in bytes.
        events: How many events the buffer holds.
        held: How many bytes they take.
    """

    def __init__(self, partition_id: str, size: int, events: int, held: int) -> None:
        super().__init__(
            f"partition {partition_id}: no room for {size} bytes in a buffer with {events} events of {held} bytes"
        )
        self.partition_id = partition_id
        self.size = size
        self.events = events
        self.held = held


class DataLossError(EventPumpError):
    """Events that were to be read are gone: retention passed them, or their partition or hub is another one.

    Args:
        hub: The hub.
        partition_id: The partition.
        problem: Which events are gone, and how that shows.
        first_missing: The sequence number of the first event that is gone; None where that is not known.
        last_missing: That of the last one; None where that is not known.
    """

    def __init__(
        self,
        hub: str,
        partition_id: str,
        problem: str,
        *,
        first_missing: int | None = None,
        last_missing: int | None = None,
    ) -> None:
        super().__init__(f"hub {hub}, partition {partition_id}: {problem}")
        self.hub = hub
        self.partition_id = partition_id
        self.problem = problem
        self.first_missing = first_missing
        self.last_missing = last_missing


class StoreError(EventPumpError):
    """A store failed, as distinct from losing a race, which is a return value.

    Args:
        operation: What was being done, such as "renew".
        reason: Why it failed.
        partition_id: The partition concerned, None where the whole store is.
    """

    def __init__(self, operation: str, reason: str, *, partition_id: str | None = None) -> None:
        where = "" if partition_id is None else f" of partition {partition_id}"
        super().__init__(f"{operation}{where}: {reason}")
        self.operation = operation
        self.reason = reason
        self.partition_id = partition_id


class OwnershipLostError(EventPumpError):
    """The partition is no longer owned by this host, so nothing may be written for it.

    Args:
        partition_id: The partition.
    """

    def __init__(self, partition_id: str) -> None:
        super().__init__(f"partition {partition_id} is no longer owned by this host")
        self.partition_id = partition_id


class ProcessorFailedError(EventPumpError):
    """The user's processor raised, and the failure policy is to stop. The cause is chained.

    Args:
        partition_id: The partition.
        operation: The method that raised, such as "process_events".
    """

    def __init__(self, partition_id: str, operation: str) -> None:
        super().__init__(f"partition {partition_id}: {operation} failed, and the failure policy is to stop")
        self.partition_id = partition_id
        self.operation = operation


class ClosedError(EventPumpError):
    """It was used after it was closed.

    Args:
        what: What was closed.
    """

    def __init__(self, what: str) -> None:
        super().__init__(f"the {what} is closed")
        self.what = what
