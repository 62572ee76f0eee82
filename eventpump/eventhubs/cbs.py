"""Claims-based security: putting tokens to the `$cbs` node (protocol.md 3)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from eventpump.amqp.message import AmqpValue, Data, Message, Properties
from eventpump.amqp.types import Symbol, Timestamp
from eventpump.eventhubs.names import CBS_NODE, EXPIRATION, NAME, OPERATION, PUT_TOKEN, TYPE
from eventpump.eventhubs.requests import (
    BadRequestError,
    MessageId,
    SecretText,
    answer,
    message_id,
    reply_to,
    text_field,
)


@dataclass(frozen=True, slots=True)
class PutToken:
    """A put-token request, taken apart."""

    token: str = field(repr=False)
    token_type: str
    audience: str
    expires_at: float | None
    message_id: Any
    reply_to: str | None


def put_token_request(
    token: str,
    token_type: str,
    audience: str,
    *,
    message_id: MessageId,
    expires_at: float | None = None,
    reply_to: str | None = None,
) -> Message:
    """Make a put-token request.

    Args:
        reply_to: The target address of the link that the answer is awaited on.
    """
    fields: dict[Any, Any] = {OPERATION: PUT_TOKEN, TYPE: token_type, NAME: audience}
    if expires_at is not None:
        fields[EXPIRATION] = Timestamp(int(expires_at * 1000))
    return Message(
        body=AmqpValue(SecretText(token)),
        properties=Properties(message_id=message_id, to=CBS_NODE, reply_to=reply_to),
        application_properties=fields,
    )


def parse_put_token(message: Message) -> PutToken:
    """Take a request to the `$cbs` node apart."""
    if text_field(message, OPERATION) != PUT_TOKEN:
        raise BadRequestError(f"the only operation of this node is {PUT_TOKEN}")
    token_type = text_field(message, TYPE)
    audience = text_field(message, NAME)
    if not token_type or not audience:
        raise BadRequestError("a put-token request needs a type and a name")
    match message.body:
        case AmqpValue(str() as token) if token:
            pass
        case AmqpValue(bytes() as raw) | Data((bytes() as raw,)) if raw and raw.isascii():
            token = raw.decode("ascii")
        case _:
            raise BadRequestError("a put-token request carries the token as the text of its body")
    expiry = (message.application_properties or {}).get(EXPIRATION)
    return PutToken(
        token=SecretText(token),
        token_type=token_type,
        audience=audience,
        expires_at=expiry / 1000 if isinstance(expiry, Timestamp) else None,
        message_id=message_id(message),
        reply_to=reply_to(message),
    )


def response(request: Message, code: int, description: str, condition: Symbol | None = None) -> Message:
    """Make the answer to a put-token request: 202 "Accepted", or an error's code, text and condition."""
    return answer(request, code, description, condition)
