"""Every error of eventpump.

::

    EventPumpError
    ├── ConfigurationError            a value given by the user cannot work: option, connection string, file
    ├── ProtocolError                 the peer broke AMQP 1.0; the connection is closed with `condition`
    ├── EventError                    an event cannot be encoded or decoded
    │   ├── EventTooLargeError        it, or its batch, is larger than the link or the service allows
    │   └── DecodeError               the payload of a received event is not what its decoder expects
    ├── ServiceError                  the service or the connection to it failed; `recovery` says what to rebuild
    │   ├── ConnectionLostError       the connection ended or could not be made
    │   ├── LinkDetachedError         the link ended
    │   ├── ServiceBusyError          throttled
    │   ├── ServiceTimeoutError       no answer in time: the outcome is unknown
    │   ├── AuthenticationError       the credential was refused
    │   ├── EntityNotFoundError       no such hub, consumer group or partition
    │   ├── ConsumerDisconnectedError another reader with an equal or higher owner level took the partition
    │   ├── ProducerDisconnectedError another publisher with a higher owner level took over; final for the partition
    │   ├── QuotaExceededError        a limit of the service
    │   ├── RequestRefusedError       the service refused the request; sending it again cannot help
    │   └── CaptureFileError          a Capture file is truncated, or is not one
    ├── PublishOutcomeUnknownError    it is unknown whether events are stored; those of a batch are being settled
    ├── InvalidClientStateError       a publisher's numbers and the service's disagree; final for the partition
    ├── ProducerStateLostError        the service has forgotten a producer: what it stored is unknown
    ├── BufferFullError               the buffer is full
    ├── DataLossError                 events that were to be read are gone from their partition
    │   └── CaptureGapError           neither the Capture files nor the hub hold some of the events
    ├── SourceEndedError              a partition of a source has ended: no event follows
    ├── StoreError                    a store of leases, checkpoints or publishers' states failed
    ├── OwnershipLostError            the partition is no longer owned by this host
    ├── ProcessorFailedError          the user's processor raised, and the policy is to stop
    └── ClosedError                   used after it was closed, or on another event loop

AMQP conditions are mapped to these in :mod:`eventpump.eventhubs.conditions` only. No error contains a key, a signature
or a token.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from eventpump.texts import without_secrets


class Recovery(enum.Enum):
    """What has to be rebuilt before a retry can succeed."""

    RETRY = "retry"
    """Nothing: the retry uses the same link."""
    RELINK = "relink"
    """The link."""
    RECONNECT = "reconnect"
    """The connection, and everything on it."""
    GIVE_UP = "give up"
    """A retry cannot succeed."""


class EventPumpError(Exception):
    """The base of every error raised by eventpump."""

    @property
    def is_retryable(self) -> bool:
        """Whether the same call may succeed later, without a change of the program or of the service's configuration.

        It does not indicate whether the failed call has taken effect: see the errors' own documentation.
        """
        return False


class ConfigurationError(EventPumpError):
    """A value given by the user cannot work.

    Args:
        field: The option, connection string key or file entry at fault.
        problem: What is wrong with it. Secrets of connection strings, signatures and URLs in it are masked.
    """

    def __init__(self, field: str, problem: str) -> None:
        problem = without_secrets(problem)
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


class ProtocolError(EventPumpError):
    """The peer violated the protocol.

    Args:
        condition: The AMQP error condition with which the connection is closed.
        description: Which rule was violated.
    """

    def __init__(self, condition: str, description: str) -> None:
        super().__init__(f"{condition}: {description}")
        self.condition = condition
        self.description = description


class EventError(EventPumpError):
    """An event cannot be encoded, or a received message cannot be decoded."""


class EventTooLargeError(EventError):
    """An event or batch is larger than the link allows, or the service refused it as too large. It is not stored.

    Args:
        size: Its encoded size in bytes.
        limit: The link's maximum message size in bytes; None if the service refused a message within that. Default:
            None.
    """

    def __init__(self, size: int, limit: int | None = None) -> None:
        allowed = "the service refused it as too large" if limit is None else f"the link allows {limit}"
        super().__init__(f"the message takes {size} bytes, {allowed}")
        self.size = size
        self.limit = limit


class DecodeError(EventError):
    """The payload of a received event cannot be decoded. An error of the decoder itself is chained.

    Another attempt cannot help: where the failure policy is to retry, `on_retries_exhausted` applies at once.

    Args:
        partition_id: The event's partition; None if that is not known.
        sequence_number: The event's sequence number; None if it cannot be read.
        problem: What is wrong with the payload, of which it shows at most an excerpt, or how the decoder failed.
        wanted: The type that was wanted; None if it is about the encoding.
    """

    def __init__(
        self, partition_id: str | None, sequence_number: int | None, problem: str, wanted: str | None = None
    ) -> None:
        where = "" if partition_id is None else f"partition {partition_id}, "
        place = "an event" if sequence_number is None else f"event {sequence_number}"
        what = "cannot be decoded" if wanted is None else f"the payload cannot be decoded as {wanted}"
        super().__init__(f"{where}{place}: {what}: {problem}")
        self.partition_id = partition_id
        self.sequence_number = sequence_number
        self.problem = problem
        self.wanted = wanted

    def __reduce__(self) -> tuple[type[DecodeError], tuple[str | None, int | None, str, str | None]]:
        return DecodeError, (self.partition_id, self.sequence_number, self.problem, self.wanted)


class ServiceError(EventPumpError):
    """The service or the connection to it failed.

    Args:
        description: The service's text, or a text of this library if the service could not be reached.
        condition: The AMQP error condition; None if there was none.
        recovery: What has to be rebuilt before a retry; None for the default of the class.
        entity: The address of the link or the name of the entity; None if it is about the connection.
        tracking_id: The service's tracking id; None if it gave none.
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
        if len(parts) > 1:
            parts[0] = description.removesuffix(".")
        super().__init__("; ".join(parts))
        self.description = description
        self.condition = condition
        self.recovery = self.default_recovery if recovery is None else recovery
        self.entity = entity
        self.tracking_id = tracking_id

    @property
    def is_retryable(self) -> bool:
        """Whether the same call may succeed later: whether `recovery` is not to give up."""
        return self.recovery is not Recovery.GIVE_UP


class ConnectionLostError(ServiceError):
    """The connection ended, or could not be established."""

    default_recovery = Recovery.RECONNECT


class LinkDetachedError(ServiceError):
    """The link ended."""

    default_recovery = Recovery.RELINK


class ServiceBusyError(ServiceError):
    """The service is throttling: it asks to wait before a retry."""

    default_recovery = Recovery.RETRY


class ServiceTimeoutError(ServiceError):
    """There was no answer in time; the request may have taken effect."""

    default_recovery = Recovery.RETRY


class AuthenticationError(ServiceError):
    """The credential was refused, or gives no right to this entity."""

    default_recovery = Recovery.GIVE_UP


class EntityNotFoundError(ServiceError):
    """The hub, consumer group or partition does not exist."""

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


class CaptureFileError(ServiceError):
    """A Capture file cannot be read. Events that precede the fault were delivered.

    Args:
        name: The file's name.
        problem: What is wrong with it.
    """

    default_recovery = Recovery.GIVE_UP

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(f"Capture file {name}: {problem}")
        self.name = name
        self.problem = problem

    def __reduce__(self) -> tuple[type[CaptureFileError], tuple[str, str]]:
        return CaptureFileError, (self.name, self.problem)


class UnsettledBatch(Protocol):
    """A batch whose outcome is unknown: the `EventBatch` that was sent. Send it again to wait for its outcome."""

    @property
    def partition_id(self) -> str | None:
        """The partition it is for; None for another target."""

    @property
    def events(self) -> Sequence[Any]:
        """Its events."""

    @property
    def state(self) -> enum.Enum:
        """What is known of it: a `BatchState`."""


class PublishOutcomeUnknownError(EventPumpError):
    """It is unknown whether the service has stored events. The cause, if there is one, is chained.

    If the events are of a batch: the batch keeps its numbers, and nothing else is sent to its partition until its
    outcome is known. ``await producer.send(error.batch)`` waits for that, and returns if the events are stored, also if
    the outcome became known in the meantime.

    If the events are of the former process with a publisher's name (see `on_doubt` of
    :class:`eventpump.EventProducer`): this producer sends nothing to the partition.

    Args:
        partition_id: The partition.
        first: The number of the first event; None if no number was assigned.
        count: The number of events; for a former process, the largest possible number.
        problem: The reason and what to do, if sending the same batch again does not settle its outcome; else None.

    Attributes:
        batch: The batch that was sent, or that has the events of the list that was sent; for a list that takes several
            messages, the one whose outcome is unknown. None for a former process, and for a buffered producer.
        is_settling: Whether sending the same batch again waits for its outcome. False for a former process.
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
        self.batch: UnsettledBatch | None = None
        self.is_settling = problem is None

    @property
    def is_retryable(self) -> bool:
        """Whether sending the same batch again waits for its outcome: `is_settling`."""
        return self.is_settling


class InvalidClientStateError(EventPumpError):
    """A publisher's numbers and the service's disagree. Every later send to the partition raises this error.

    Args:
        partition_id: The partition.
        problem: What disagrees.
    """

    def __init__(self, partition_id: str, problem: str) -> None:
        super().__init__(f"partition {partition_id}: {problem}; it takes a new producer to publish there")
        self.partition_id = partition_id
        self.problem = problem


class ProducerStateLostError(EventPumpError):
    """The service has forgotten a producer, or what it had accepted from it: it is unknown which events are stored.

    Args:
        partition_ids: The partitions.
        problem: How it was noticed, and what to do.
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
    """The buffer is full. The event was not accepted.

    Args:
        partition_id: The event's partition.
        size: The event's size in bytes.
        events: The number of events in the buffer.
        held: Their size in bytes.
    """

    def __init__(self, partition_id: str, size: int, events: int, held: int) -> None:
        super().__init__(
            f"partition {partition_id}: no room for {size} bytes in a buffer with {events} events of {held} bytes"
        )
        self.partition_id = partition_id
        self.size = size
        self.events = events
        self.held = held

    @property
    def is_retryable(self) -> bool:
        """True: there is room once events have been sent."""
        return True


class DataLossError(EventPumpError):
    """Events that were to be read are gone: retention has removed them, or the hub was recreated.

    Args:
        hub: The hub.
        partition_id: The partition.
        problem: Which events are gone, and how it was noticed.
        first_missing: The sequence number of the first event that is gone; None if unknown.
        last_missing: The sequence number of the last event that is gone; None if unknown.
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


class CaptureGapError(DataLossError):
    """Neither the Capture files nor the live hub hold some of the events that were to be read.

    Its `first_missing` and `last_missing` are the sequence numbers of the first and the last of them.
    """


class SourceEndedError(EventPumpError):
    """A partition of an event source has ended: all its events were delivered, and no event follows.

    A reader ends its iteration; a host keeps the partition, as one to which no event is published.

    Args:
        partition_id: The partition.
    """

    def __init__(self, partition_id: str) -> None:
        super().__init__(f"the source of partition {partition_id} has ended")
        self.partition_id = partition_id


class StoreError(EventPumpError):
    """A store failed. (A lost race is not a failure, but a return value of the store.)

    Args:
        operation: The operation that failed, such as "renew".
        reason: Why it failed.
        partition_id: The partition; None if the operation is not about one partition.
    """

    def __init__(self, operation: str, reason: str, *, partition_id: str | None = None) -> None:
        where = "" if partition_id is None else f" of partition {partition_id}"
        super().__init__(f"{operation}{where}: {reason}")
        self.operation = operation
        self.reason = reason
        self.partition_id = partition_id

    @property
    def is_retryable(self) -> bool:
        """True: stores fail for a time, unless their configuration is at fault, which is another error."""
        return True


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
        stops_host: Whether the host stops for it; if not, it leaves the partition, and tries it again later. Default:
            True.
    """

    def __init__(self, partition_id: str, operation: str, *, stops_host: bool = True) -> None:
        then = "" if stops_host else " the partition"
        super().__init__(f"partition {partition_id}: {operation} failed, and the failure policy is to stop{then}")
        self.partition_id = partition_id
        self.operation = operation
        self.stops_host = stops_host


class ClosedError(EventPumpError):
    """An object was used after it was closed, or on another event loop than the one that it belongs to.

    Args:
        what: What was used, such as "EventProducer".
        problem: Why it cannot be used. Default: "is closed".
    """

    def __init__(self, what: str, problem: str = "is closed") -> None:
        super().__init__(f"the {what} {problem}")
        self.what = what
        self.problem = problem

    def __reduce__(self) -> tuple[type[ClosedError], tuple[str, str]]:
        return ClosedError, (self.what, self.problem)


if not TYPE_CHECKING:  # checkers take every name without an underscore
    __all__ = [name for name, made in globals().items() if getattr(made, "__module__", None) == __name__]
