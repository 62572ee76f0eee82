"""Which attributes a span, a link or a measurement has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

from eventpump.errors import EventError
from eventpump.eventhubs.events import EventData, ReceivedEvent
from eventpump.telemetry import names
from eventpump.telemetry.contexts import EventLink, enqueued
from eventpump.telemetry.names import Operation
from eventpump.texts import excerpt, without_secrets

Attributes: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ClientPlace:
    """What a client works on.

    Attributes:
        address: The namespace's host name; an empty text if the events come from elsewhere.
        group: The consumer group; None for a producer.
        has_partition: Whether measurements have the partition among their attributes. Spans always have it.
    """

    hub: str
    address: str
    port: int | None
    client_id: str | None
    group: str | None
    has_partition: bool

    def span_name(self, operation: Operation) -> str:
        """Return the name of a span: the operation and the hub."""
        return f"{operation.name} {self.hub}"

    def of_metric(self, operation: Operation | None, partition_id: str | None) -> Attributes:
        """Return the attributes of a measurement; None for no operation, and for no or an unknown partition."""
        found = self._of_both(operation, partition_id if self.has_partition else None)
        if self.group is not None and (operation is None or operation.type is not None):
            found[names.GROUP] = self.group
        return found

    def of_span(
        self, operation: Operation, partition_id: str | None, peer: tuple[str, int] | None = None
    ) -> Attributes:
        """Return the attributes that a span has when it starts, on which samplers may decide."""
        found = self._of_both(operation, partition_id)
        if self.group is not None and operation.type is not None:
            found[names.GROUP] = self.group
        if self.client_id is not None:
            found[names.CLIENT_ID] = self.client_id
        if peer is not None:
            found[names.PEER_ADDRESS], found[names.PEER_PORT] = peer
        found[names.AZURE_NAMESPACE] = names.AZURE_EVENT_HUBS
        return found

    def _of_both(self, operation: Operation | None, partition_id: str | None) -> Attributes:
        found: Attributes = {names.SYSTEM: names.EVENT_HUBS, names.DESTINATION: self.hub}
        if operation is not None:
            found[names.OPERATION_NAME] = operation.name
            if operation.type is not None:
                found[names.OPERATION_TYPE] = operation.type
        if partition_id is not None:
            found[names.PARTITION] = partition_id
        if self.address:
            found[names.SERVER_ADDRESS] = self.address
            if self.port is not None:
                found[names.SERVER_PORT] = self.port
        return found


def of_received(base: Attributes, events: Sequence[ReceivedEvent]) -> Attributes:
    """Return the attributes of a span for received events: their number, or what a single one has."""
    found = dict(base)
    if len(events) != 1:
        found[names.MESSAGE_COUNT] = len(events)
        return found
    (event,) = events
    seconds = enqueued(event)
    if seconds is not None:
        found[names.ENQUEUED_TIME] = int(seconds)
    with suppress(EventError):
        _identify(found, event.message_id, event.correlation_id)
    return found


def of_sent(base: Attributes, events: Sequence[EventData] | None, count: int) -> Attributes:
    """Return these attributes of a span, and those of events that are sent, where the producer has them."""
    found = dict(base)
    if count != 1:
        found[names.MESSAGE_COUNT] = count
    elif events:
        standard = events[0].standard or {}
        _identify(found, standard.get("message_id"), standard.get("correlation_id"))
    return found


def of_link(link: EventLink) -> Attributes:
    """Return the attributes of a link to the context of a received event."""
    enqueued_at = link.enqueued
    if enqueued_at is None:
        return {}
    return {names.ENQUEUED_TIME: int(enqueued_at), names.AZURE_ENQUEUED_TIME: round(enqueued_at * 1000)}


def error_type(error: BaseException) -> str:
    """Return the type of an error: the AMQP condition where it has one, else its class."""
    condition = getattr(error, "condition", None)
    return condition if isinstance(condition, str) and condition else type(error).__name__


def with_error(base: Mapping[str, Any], error: BaseException | None) -> Mapping[str, Any]:
    """Return the attributes of a measurement, with the type of an error if there was one."""
    return base if error is None else {**base, names.ERROR_TYPE: error_type(error)}


def description(error: BaseException) -> str:
    """Return the text of an error for the status of a span."""
    return excerpt(without_secrets(f"{type(error).__name__}: {error}"))


def _identify(found: Attributes, message_id: object, correlation_id: object) -> None:
    for name, value in ((names.MESSAGE_ID, message_id), (names.CONVERSATION_ID, correlation_id)):
        if value is not None:
            # As text, which attributes of messages are: numbers without the name of their AMQP type.
            text = value.decode("utf-8", "replace") if isinstance(value, bytes) else value
            found[name] = str(int(text)) if isinstance(text, int) else str(text)
