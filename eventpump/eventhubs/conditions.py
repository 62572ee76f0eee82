"""What an AMQP error condition means: the one table (protocol.md 9)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from eventpump.amqp.types import Symbol
from eventpump.errors import (
    AuthenticationError,
    ConnectionLostError,
    ConsumerDisconnectedError,
    EntityNotFoundError,
    LinkDetachedError,
    ProducerDisconnectedError,
    QuotaExceededError,
    Recovery,
    RequestRefusedError,
    ServiceBusyError,
    ServiceError,
    ServiceTimeoutError,
)
from eventpump.eventhubs.names import VENDOR
from eventpump.texts import excerpt

SERVER_BUSY_WAIT: Final = 4.0
"""Seconds a throttled client is asked to wait."""

SERVER_BUSY: Final = Symbol(VENDOR + "server-busy")
TIMEOUT: Final = Symbol(VENDOR + "timeout")
OPERATION_CANCELLED: Final = Symbol(VENDOR + "operation-cancelled")
CONTAINER_CLOSE: Final = Symbol(VENDOR + "container-close")
PRODUCER_EPOCH_STOLEN: Final = Symbol(VENDOR + "producer-epoch-stolen")
OUT_OF_ORDER_SEQUENCE: Final = Symbol(VENDOR + "out-of-order-sequence")
AUTH_FAILED: Final = Symbol(VENDOR + "auth-failed")
ARGUMENT_ERROR: Final = Symbol(VENDOR + "argument-error")
ARGUMENT_OUT_OF_RANGE: Final = Symbol(VENDOR + "argument-out-of-range")
ENTITY_DISABLED: Final = Symbol(VENDOR + "entity-disabled")
PUBLISHER_REVOKED: Final = Symbol(VENDOR + "publisher-revoked")

INTERNAL_ERROR: Final = Symbol("amqp:internal-error")
CONNECTION_FORCED: Final = Symbol("amqp:connection:forced")
FRAMING_ERROR: Final = Symbol("amqp:connection:framing-error")
CONNECTION_REDIRECT: Final = Symbol("amqp:connection:redirect")
DETACH_FORCED: Final = Symbol("amqp:link:detach-forced")
TRANSFER_LIMIT_EXCEEDED: Final = Symbol("amqp:link:transfer-limit-exceeded")
LINK_STOLEN: Final = Symbol("amqp:link:stolen")
LINK_REDIRECT: Final = Symbol("amqp:link:redirect")
MESSAGE_SIZE_EXCEEDED: Final = Symbol("amqp:link:message-size-exceeded")
ILLEGAL_STATE: Final = Symbol("amqp:illegal-state")
RESOURCE_LIMIT_EXCEEDED: Final = Symbol("amqp:resource-limit-exceeded")
RESOURCE_DELETED: Final = Symbol("amqp:resource-deleted")
RESOURCE_LOCKED: Final = Symbol("amqp:resource-locked")
NOT_FOUND: Final = Symbol("amqp:not-found")
NOT_ALLOWED: Final = Symbol("amqp:not-allowed")
NOT_IMPLEMENTED: Final = Symbol("amqp:not-implemented")
UNAUTHORIZED_ACCESS: Final = Symbol("amqp:unauthorized-access")
PRECONDITION_FAILED: Final = Symbol("amqp:precondition-failed")
INVALID_FIELD: Final = Symbol("amqp:invalid-field")
DECODE_ERROR: Final = Symbol("amqp:decode-error")

Row = tuple[type[ServiceError], Recovery]

_REFUSED: Row = (RequestRefusedError, Recovery.GIVE_UP)

# The official clients disagree on a few rows; where they do, ours is the one that gets a long-running pump going again.
_ROWS: dict[str, Row] = {
    SERVER_BUSY: (ServiceBusyError, Recovery.RETRY),
    TIMEOUT: (ServiceTimeoutError, Recovery.RETRY),
    OPERATION_CANCELLED: (ServiceTimeoutError, Recovery.RETRY),
    CONTAINER_CLOSE: (ConnectionLostError, Recovery.RECONNECT),
    INTERNAL_ERROR: (ServiceError, Recovery.RETRY),
    CONNECTION_FORCED: (ConnectionLostError, Recovery.RECONNECT),
    DETACH_FORCED: (LinkDetachedError, Recovery.RELINK),
    FRAMING_ERROR: (ConnectionLostError, Recovery.RECONNECT),
    TRANSFER_LIMIT_EXCEEDED: (LinkDetachedError, Recovery.RELINK),
    ILLEGAL_STATE: (LinkDetachedError, Recovery.RELINK),
    LINK_STOLEN: (ConsumerDisconnectedError, Recovery.GIVE_UP),
    PRODUCER_EPOCH_STOLEN: (ProducerDisconnectedError, Recovery.GIVE_UP),
    OUT_OF_ORDER_SEQUENCE: _REFUSED,
    RESOURCE_LIMIT_EXCEEDED: (QuotaExceededError, Recovery.GIVE_UP),
    MESSAGE_SIZE_EXCEEDED: _REFUSED,  # a send link makes it EventTooLargeError, with the size
    # Holds where the text or the status says that an entity is missing; `error_for` knows the other case.
    NOT_FOUND: (EntityNotFoundError, Recovery.GIVE_UP),
    UNAUTHORIZED_ACCESS: (AuthenticationError, Recovery.GIVE_UP),
    AUTH_FAILED: (AuthenticationError, Recovery.GIVE_UP),
    ARGUMENT_ERROR: _REFUSED,
    ARGUMENT_OUT_OF_RANGE: _REFUSED,
    ENTITY_DISABLED: _REFUSED,
    PUBLISHER_REVOKED: (AuthenticationError, Recovery.GIVE_UP),
    NOT_ALLOWED: _REFUSED,
    NOT_IMPLEMENTED: _REFUSED,
    PRECONDITION_FAILED: _REFUSED,
    VENDOR + "precondition-failed": _REFUSED,
    INVALID_FIELD: _REFUSED,
    DECODE_ERROR: _REFUSED,
    RESOURCE_DELETED: (EntityNotFoundError, Recovery.GIVE_UP),
    RESOURCE_LOCKED: _REFUSED,
    LINK_REDIRECT: _REFUSED,
    CONNECTION_REDIRECT: _REFUSED,
    "amqp:session:window-violation": _REFUSED,
    "amqp:session:errant-link": _REFUSED,
    "amqp:session:handle-in-use": _REFUSED,
    "amqp:session:unattached-handle": _REFUSED,
    VENDOR + "address-already-in-use": _REFUSED,
    VENDOR + "entity-already-exists": _REFUSED,
    VENDOR + "partition-not-owned": _REFUSED,
    VENDOR + "store-lock-lost": _REFUSED,
    VENDOR + "message-wait-timeout": _REFUSED,
    VENDOR + "message-lock-lost": _REFUSED,
    VENDOR + "message-not-found": _REFUSED,
    VENDOR + "session-lock-lost": _REFUSED,
    VENDOR + "session-cannot-be-locked": _REFUSED,
    VENDOR + "session-not-found": _REFUSED,
}

CONDITIONS: Final[Mapping[str, Row]] = MappingProxyType(_ROWS)
"""What each known condition is raised as, and what must be rebuilt before trying again."""

STATUS_CONDITIONS: Final[Mapping[int, Symbol]] = MappingProxyType(
    {
        400: ARGUMENT_ERROR,
        401: UNAUTHORIZED_ACCESS,
        403: RESOURCE_LIMIT_EXCEEDED,
        404: NOT_FOUND,
        408: TIMEOUT,
        410: LINK_STOLEN,
        500: INTERNAL_ERROR,
        501: NOT_IMPLEMENTED,
        503: SERVER_BUSY,
    }
)
"""The condition a status code stands for where an answer names none (protocol.md 4.2)."""

_SCOPES = (Recovery.RETRY, Recovery.RELINK, Recovery.RECONNECT, Recovery.GIVE_UP)
_MISSING_ENTITY = re.compile(r"messaging entity .*could not be found|status-code: 404", re.IGNORECASE | re.DOTALL)
_TRACKING_ID = re.compile(r"TrackingId:([^\s,]+)")
_READ = 4096
"""Characters of a description that are looked at: searching the whole of a very long one would take long."""


def error_for(
    condition: str | None,
    description: str | None,
    *,
    entity: str | None = None,
    lost: Recovery = Recovery.RETRY,
) -> ServiceError:
    """Make the error a peer's condition stands for.

    A condition that is not listed is retried.

    Args:
        description: The peer's words, of which the error keeps an excerpt.
        entity: The address of the link concerned.
        lost: What ended with the error, so what must be rebuilt at least: nothing (`RETRY`) for a rejected message or
            request, the link (`RELINK`) for a detach or end, the connection (`RECONNECT`) for a close.
    """
    text = (description or "")[:_READ]
    kind, recovery = _ROWS.get(condition or "", (ServiceError, Recovery.RETRY))
    if condition == NOT_FOUND and not _MISSING_ENTITY.search(text):
        # Without those words the service means that it cannot be reached, not that the entity does not exist.
        kind, recovery = ServiceError, Recovery.RELINK
    return _make(kind, recovery, condition, text, entity, lost)


def error_for_status(
    code: int, condition: str | None, description: str | None, *, entity: str | None = None
) -> ServiceError:
    """Make the error a `$cbs` or `$management` answer stands for.

    Args:
        condition: Its error condition, where it names one; it weighs more than the code.
    """
    text = (description or "")[:_READ]
    if code == 404 and condition in {None, NOT_FOUND}:
        # A status speaks of the entity asked for: the text rule of `error_for` is for links.
        kind, recovery = _ROWS[NOT_FOUND]
        return _make(kind, recovery, NOT_FOUND, text, entity, Recovery.RETRY)
    if condition is None:
        condition = STATUS_CONDITIONS.get(code)
        if condition is None:
            kind, recovery = _REFUSED if 400 <= code < 500 else (ServiceError, Recovery.RETRY)
            return _make(kind, recovery, None, text or f"status {code}", entity, Recovery.RETRY)
    return error_for(condition, text or f"status {code}", entity=entity)


def tracking_id(description: str) -> str | None:
    """Find the service's tracking id in an error description (protocol.md 2.5)."""
    found = _TRACKING_ID.search(description)
    return None if found is None else excerpt(found[1])


def _make(
    kind: type[ServiceError],
    recovery: Recovery,
    condition: str | None,
    description: str,
    entity: str | None,
    lost: Recovery,
) -> ServiceError:
    recovery = max(recovery, lost, key=_SCOPES.index)
    if kind is ServiceError:
        kind = {Recovery.RELINK: LinkDetachedError, Recovery.RECONNECT: ConnectionLostError}.get(lost, ServiceError)
    elif kind is LinkDetachedError and lost is Recovery.RECONNECT:
        kind = ConnectionLostError
    return kind(
        excerpt(description) or "the service gave no reason",
        condition=None if condition is None else excerpt(str(condition)),
        recovery=recovery,
        entity=entity,
        tracking_id=tracking_id(description),
    )
