"""Reads about hubs and partitions from the `$management` node (protocol.md 4)."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from eventpump.amqp.message import AmqpValue, Data, Message, Properties
from eventpump.amqp.types import Array, Int, Symbol, Timestamp
from eventpump.errors import ProtocolError
from eventpump.eventhubs.conditions import INVALID_FIELD, NOT_ALLOWED
from eventpump.eventhubs.names import (
    BEGIN_SEQUENCE_NUMBER_EPOCH,
    HUB_TYPE,
    LAST_ENQUEUED_OFFSET,
    LAST_ENQUEUED_SEQUENCE_NUMBER,
    LAST_ENQUEUED_SEQUENCE_NUMBER_EPOCH,
    LAST_ENQUEUED_TIME,
    MANAGEMENT_NODE,
    NAME,
    OPERATION,
    PARTITION,
    PARTITION_TYPE,
    READ,
    SECURITY_TOKEN,
    TYPE,
)
from eventpump.eventhubs.properties import HubProperties, PartitionProperties
from eventpump.eventhubs.requests import BadRequestError, MessageId, SecretText, answer, check_answer, text_field
from eventpump.texts import MAX_EXCERPT, excerpt

NEVER = datetime.datetime(1, 1, 1, tzinfo=datetime.UTC)
"""When the last event of a partition that never had one was enqueued."""

_NO_BODY = Data((b"[]",))
"""A message has a body (AMQP 1.0, 3.2), though the service takes a request without: this is that of JavaScript."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class ManagementRequest:
    """A parsed request to read the properties of a partition, or of the hub, with the token that it carries."""

    hub: str
    partition_id: str | None
    security_token: str | None = field(default=None, repr=False)


# ---------------------------------------------------------------------------------------------------- requests


def hub_request(
    hub: str, *, message_id: MessageId, reply_to: str | None = None, security_token: str | None = None
) -> Message:
    """Make a request for a hub's facts. The answer is awaited on a link whose target address is `reply_to`."""
    return _request(HUB_TYPE, hub, {}, message_id, reply_to, security_token)


def partition_request(
    hub: str,
    partition_id: str,
    *,
    message_id: MessageId,
    reply_to: str | None = None,
    security_token: str | None = None,
) -> Message:
    """Make a request for a partition's facts. Parameters as of `hub_request`."""
    return _request(PARTITION_TYPE, hub, {PARTITION: partition_id}, message_id, reply_to, security_token)


def _request(
    kind: str,
    hub: str,
    more: Mapping[str, str],
    message_id: MessageId,
    reply_to: str | None,
    security_token: str | None,
) -> Message:
    fields: dict[Any, Any] = {OPERATION: READ, TYPE: kind, NAME: hub, **more}
    if security_token is not None:
        fields[SECURITY_TOKEN] = SecretText(security_token)
    return Message(
        body=_NO_BODY,
        properties=Properties(message_id=message_id, to=MANAGEMENT_NODE, reply_to=reply_to),
        application_properties=fields,
    )


def parse_request(message: Message) -> ManagementRequest:
    """Take a request apart. Its body, if it has one, means nothing."""
    operation = text_field(message, OPERATION)
    kind = text_field(message, TYPE)
    hub = text_field(message, NAME)
    if operation is None or kind is None:
        raise BadRequestError("a management request needs an operation and a type")
    if operation.upper() != READ or kind not in {HUB_TYPE, PARTITION_TYPE}:
        raise BadRequestError(
            f"this node does not know operation '{excerpt(operation, 120)}' of '{excerpt(kind, 120)}'",
            condition=NOT_ALLOWED,
        )
    if not hub:
        raise BadRequestError("a management request needs the name of a hub")
    token = text_field(message, SECURITY_TOKEN)
    secret = None if token is None else SecretText(token)
    if kind == HUB_TYPE:
        return ManagementRequest(hub, None, secret)
    partition_id = text_field(message, PARTITION)
    if not partition_id:
        raise BadRequestError("a partition read needs the id of a partition")
    return ManagementRequest(hub, partition_id, secret)


# --------------------------------------------------------------------------------------------------- responses


def hub_response(request: Message, facts: HubProperties) -> Message:
    """Make the answer to a hub read. The types of its values are part of the promise: .NET casts strictly."""
    return _success(
        request,
        {
            "name": facts.name,
            "type": HUB_TYPE,
            "created_at": Timestamp.from_datetime(facts.created_at),
            "partition_count": Int(len(facts.partition_ids)),
            "partition_ids": Array(facts.partition_ids, of=str),
            "georeplication_factor": Int(1),
        },
    )


def partition_response(request: Message, facts: PartitionProperties) -> Message:
    """Make the answer to a partition read. Sequence numbers go out as longs, and the epochs say: not replicated."""
    return _success(
        request,
        {
            "name": facts.hub,
            "partition": facts.partition_id,
            "type": PARTITION_TYPE,
            BEGIN_SEQUENCE_NUMBER_EPOCH: Int(-1),
            "begin_sequence_number": facts.beginning_sequence_number,
            str(LAST_ENQUEUED_SEQUENCE_NUMBER_EPOCH): Int(-1),
            str(LAST_ENQUEUED_SEQUENCE_NUMBER): facts.last_enqueued_sequence_number,
            str(LAST_ENQUEUED_OFFSET): facts.last_enqueued_offset,
            str(LAST_ENQUEUED_TIME): Timestamp.from_datetime(facts.last_enqueued_time),
            "is_partition_empty": facts.is_empty,
        },
    )


def error_response(request: Message, code: int, condition: Symbol, description: str) -> Message:
    """Make the answer to a request that fails."""
    return answer(request, code, description, condition, _echo(request))


def _success(request: Message, facts: dict[str, Any]) -> Message:
    made = answer(request, 200, None, more=_echo(request))
    made.body = AmqpValue(facts)
    return made


def _echo(request: Message) -> dict[str, Any]:
    operation = text_field(request, OPERATION)
    return {} if operation is None or len(operation) > MAX_EXCERPT else {OPERATION: operation}


def parse_hub_response(message: Message, *, hub: str) -> HubProperties:
    """Parse the answer to a read of a hub. Raises `ServiceError` if it failed, `ProtocolError` if it is no answer."""
    facts = _facts(message, hub)
    ids = _get(facts, "partition_ids", list)
    if not all(isinstance(each, str) for each in ids):
        raise ProtocolError(INVALID_FIELD, "a management answer has partition ids that are no text")
    return HubProperties(
        name=_get(facts, "name", str),
        created_at=_get(facts, "created_at", Timestamp).to_datetime(),
        partition_ids=tuple(ids),
    )


def parse_partition_response(message: Message, *, hub: str, partition_id: str) -> PartitionProperties:
    """Parse the answer to a read of a partition. Raises as `parse_hub_response`."""
    facts = _facts(message, f"{hub}/Partitions/{partition_id}")
    return PartitionProperties(
        hub=_get(facts, "name", str),
        partition_id=_get(facts, "partition", str),
        beginning_sequence_number=int(_get(facts, "begin_sequence_number", int)),
        last_enqueued_sequence_number=int(_get(facts, LAST_ENQUEUED_SEQUENCE_NUMBER, int)),
        last_enqueued_offset=_get(facts, LAST_ENQUEUED_OFFSET, str),
        # The service's "never" is year 1, the earliest moment a datetime knows.
        last_enqueued_time=_get(facts, LAST_ENQUEUED_TIME, Timestamp).to_datetime(),
        is_empty=_get(facts, "is_partition_empty", bool),
    )


def _facts(message: Message, entity: str) -> dict[Any, Any]:
    check_answer(message, entity=entity)
    match message.body:
        case AmqpValue(dict() as facts):
            return facts
    raise ProtocolError(INVALID_FIELD, "a management answer carries no map")


def _get(facts: Mapping[Any, Any], key: str, kind: type[_T]) -> _T:
    value = facts.get(key)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ProtocolError(INVALID_FIELD, f"a management answer has no {key} of type {kind.__name__}")
    return value
