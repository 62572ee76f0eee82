"""Requests to `$cbs` and `$management`, and their answers: what both nodes have in common (protocol.md 3, 4)."""

from __future__ import annotations

import uuid
from typing import Any, Final

from eventpump.amqp.message import Message, Properties
from eventpump.amqp.types import Int, Symbol
from eventpump.errors import ProtocolError
from eventpump.eventhubs.conditions import ARGUMENT_ERROR, INVALID_FIELD, error_for_status
from eventpump.eventhubs.names import ERROR_CONDITION, STATUS_CODE, STATUS_DESCRIPTION

MessageId = uuid.UUID | str
"""What a client may name a request with; an answer's correlation id is the same value of the same type."""

# azure-sdk-for-js accepts these spellings too, so some peer writes them.
_CAMEL: Final = {STATUS_CODE: "statusCode", STATUS_DESCRIPTION: "statusDescription", ERROR_CONDITION: "errorCondition"}


class SecretText(str):
    """A token on its way into or out of a message: text whose repr does not show it."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "'**********'"


class BadRequestError(ValueError):
    """A request cannot be answered with anything but this status code and error condition."""

    def __init__(self, problem: str, *, code: int = 400, condition: Symbol = ARGUMENT_ERROR) -> None:
        super().__init__(problem)
        self.code = code
        self.condition = condition


def message_id(message: Message) -> Any:
    """Return a request's message id, None where it has none."""
    return None if message.properties is None else message.properties.message_id


def correlation_id(message: Message) -> Any:
    """Return an answer's correlation id, None where it has none."""
    return None if message.properties is None else message.properties.correlation_id


def reply_to(message: Message) -> str | None:
    """Return a request's reply-to; None where it has none, as those of the official Python client."""
    address = None if message.properties is None else message.properties.reply_to
    return address if isinstance(address, str) else None


def text_field(message: Message, name: str) -> str | None:
    """Return a text among a request's application properties; None if there is no text with that name."""
    value = (message.application_properties or {}).get(name)
    return value if isinstance(value, str) else None


def answer(
    request: Message,
    code: int,
    description: str | None,
    condition: str | None = None,
    more: dict[str, Any] | None = None,
) -> Message:
    """Make the answer to a request; `body` is for the caller to fill in. The properties `more` come first."""
    fields: dict[Any, Any] = {**(more or {}), STATUS_CODE: Int(code)}
    if description is not None:
        fields[STATUS_DESCRIPTION] = description
    if condition is not None:
        fields[ERROR_CONDITION] = Symbol(condition)
    return Message(
        properties=Properties(to=reply_to(request), correlation_id=message_id(request)),
        application_properties=fields,
    )


def check_answer(message: Message, *, entity: str | None = None) -> None:
    """Check that an answer reports success. Raises `ServiceError` if not, `ProtocolError` if it has no status code."""
    code = _field(message, STATUS_CODE)
    if not isinstance(code, int) or isinstance(code, bool):
        raise ProtocolError(INVALID_FIELD, "an answer has no status code")
    if 200 <= code < 300:
        return
    condition = _field(message, ERROR_CONDITION)
    description = _field(message, STATUS_DESCRIPTION)
    raise error_for_status(
        int(code),
        condition if isinstance(condition, str) and condition else None,
        description if isinstance(description, str) else None,
        entity=entity,
    )


def _field(message: Message, name: str) -> Any:
    fields = message.application_properties or {}
    return fields.get(name, fields.get(_CAMEL[name]))
