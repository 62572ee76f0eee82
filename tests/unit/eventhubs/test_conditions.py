from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
from eventpump.eventhubs.conditions import (
    CONDITIONS,
    SERVER_BUSY_WAIT,
    STATUS_CONDITIONS,
    error_for,
    error_for_status,
    tracking_id,
)

MISSING = "The messaging entity 'sb://ns/hub' could not be found. To know more visit https://aka.ms/x."
GIVE_UP, RETRY, RELINK, RECONNECT = Recovery.GIVE_UP, Recovery.RETRY, Recovery.RELINK, Recovery.RECONNECT

# The rows of protocol.md 9, written out a second time on purpose.
ROWS: dict[str, tuple[type[ServiceError], Recovery]] = {
    "com.microsoft:server-busy": (ServiceBusyError, RETRY),
    "com.microsoft:timeout": (ServiceTimeoutError, RETRY),
    "com.microsoft:operation-cancelled": (ServiceTimeoutError, RETRY),
    "com.microsoft:container-close": (ConnectionLostError, RECONNECT),
    "amqp:internal-error": (ServiceError, RETRY),
    "amqp:connection:forced": (ConnectionLostError, RECONNECT),
    "amqp:link:detach-forced": (LinkDetachedError, RELINK),
    "amqp:connection:framing-error": (ConnectionLostError, RECONNECT),
    "amqp:link:transfer-limit-exceeded": (LinkDetachedError, RELINK),
    "amqp:illegal-state": (LinkDetachedError, RELINK),
    "amqp:link:stolen": (ConsumerDisconnectedError, GIVE_UP),
    "com.microsoft:producer-epoch-stolen": (ProducerDisconnectedError, GIVE_UP),
    "com.microsoft:out-of-order-sequence": (RequestRefusedError, GIVE_UP),
    "amqp:resource-limit-exceeded": (QuotaExceededError, GIVE_UP),
    "amqp:link:message-size-exceeded": (RequestRefusedError, GIVE_UP),
    "amqp:not-found": (EntityNotFoundError, GIVE_UP),
    "amqp:unauthorized-access": (AuthenticationError, GIVE_UP),
    "com.microsoft:auth-failed": (AuthenticationError, GIVE_UP),
    "com.microsoft:argument-error": (RequestRefusedError, GIVE_UP),
    "com.microsoft:argument-out-of-range": (RequestRefusedError, GIVE_UP),
    "com.microsoft:entity-disabled": (RequestRefusedError, GIVE_UP),
    "com.microsoft:publisher-revoked": (AuthenticationError, GIVE_UP),
    "amqp:not-allowed": (RequestRefusedError, GIVE_UP),
    "amqp:not-implemented": (RequestRefusedError, GIVE_UP),
    "amqp:precondition-failed": (RequestRefusedError, GIVE_UP),
    "com.microsoft:precondition-failed": (RequestRefusedError, GIVE_UP),
    "amqp:invalid-field": (RequestRefusedError, GIVE_UP),
    "amqp:decode-error": (RequestRefusedError, GIVE_UP),
    "amqp:resource-deleted": (EntityNotFoundError, GIVE_UP),
    "amqp:resource-locked": (RequestRefusedError, GIVE_UP),
    "amqp:link:redirect": (RequestRefusedError, GIVE_UP),
    "amqp:connection:redirect": (RequestRefusedError, GIVE_UP),
    "amqp:session:window-violation": (RequestRefusedError, GIVE_UP),
    "amqp:session:errant-link": (RequestRefusedError, GIVE_UP),
    "amqp:session:handle-in-use": (RequestRefusedError, GIVE_UP),
    "amqp:session:unattached-handle": (RequestRefusedError, GIVE_UP),
    "com.microsoft:address-already-in-use": (RequestRefusedError, GIVE_UP),
    "com.microsoft:entity-already-exists": (RequestRefusedError, GIVE_UP),
    "com.microsoft:partition-not-owned": (RequestRefusedError, GIVE_UP),
    "com.microsoft:store-lock-lost": (RequestRefusedError, GIVE_UP),
    "com.microsoft:message-wait-timeout": (RequestRefusedError, GIVE_UP),
    "com.microsoft:message-lock-lost": (RequestRefusedError, GIVE_UP),
    "com.microsoft:message-not-found": (RequestRefusedError, GIVE_UP),
    "com.microsoft:session-lock-lost": (RequestRefusedError, GIVE_UP),
    "com.microsoft:session-cannot-be-locked": (RequestRefusedError, GIVE_UP),
    "com.microsoft:session-not-found": (RequestRefusedError, GIVE_UP),
}


@pytest.mark.parametrize("condition", ROWS)
def test_condition_is_raised_as_its_class_and_recovery(condition: str) -> None:
    """Each condition of the reference is raised as its class, with its recovery."""
    error = error_for(condition, MISSING, entity="hub/Partitions/0")
    assert (type(error), error.recovery) == ROWS[condition]
    assert (error.condition, error.description, error.entity) == (condition, MISSING, "hub/Partitions/0")


def test_condition_table_has_no_row_without_a_test() -> None:
    """The table has the rows that are tested here, and no other."""
    assert set(CONDITIONS) == set(ROWS)


@pytest.mark.parametrize(
    ("text", "kind", "recovery"),
    [
        (MISSING, EntityNotFoundError, GIVE_UP),
        ("Put token failed. status-code: 404, status-description: gone", EntityNotFoundError, GIVE_UP),
        ("No connection to the broker", ServiceError, RELINK),
        (None, ServiceError, RELINK),
    ],
)
def test_not_found_is_final_only_where_an_entity_is_missing(
    text: str | None, kind: type[ServiceError], recovery: Recovery
) -> None:
    """Not-found is final only where the text says that an entity is missing."""
    error = error_for("amqp:not-found", text)
    assert (type(error), error.recovery) == (kind, recovery)


@pytest.mark.parametrize("condition", ["acme:odd", None])
@pytest.mark.parametrize(
    ("lost", "kind"), [(RETRY, ServiceError), (RELINK, LinkDetachedError), (RECONNECT, ConnectionLostError)]
)
def test_condition_not_listed_is_retried(condition: str | None, lost: Recovery, kind: type[ServiceError]) -> None:
    """An unknown condition, or none, is retried on what is left."""
    error = error_for(condition, "odd", lost=lost)
    assert (type(error), error.recovery, error.condition) == (kind, lost, condition)


@pytest.mark.parametrize("condition", ROWS)
@pytest.mark.parametrize("lost", [RETRY, RELINK, RECONNECT])
def test_recovery_covers_what_ended(condition: str, lost: Recovery) -> None:
    """Recovery rebuilds what ended with the error at least, and a final error stays final."""
    order = [RETRY, RELINK, RECONNECT, GIVE_UP]
    _, recovery = ROWS[condition]
    error = error_for(condition, MISSING, lost=lost)
    assert error.recovery is order[max(order.index(recovery), order.index(lost))]


def test_link_condition_on_a_close_is_a_lost_connection() -> None:
    """A link condition on a connection's close is a lost connection."""
    assert type(error_for("amqp:link:detach-forced", "x", lost=RECONNECT)) is ConnectionLostError


@pytest.mark.parametrize(
    ("code", "kind", "recovery", "condition"),
    [
        (400, RequestRefusedError, GIVE_UP, "com.microsoft:argument-error"),
        (401, AuthenticationError, GIVE_UP, "amqp:unauthorized-access"),
        (403, QuotaExceededError, GIVE_UP, "amqp:resource-limit-exceeded"),
        (404, EntityNotFoundError, GIVE_UP, "amqp:not-found"),
        (408, ServiceTimeoutError, RETRY, "com.microsoft:timeout"),
        (410, ConsumerDisconnectedError, GIVE_UP, "amqp:link:stolen"),
        (500, ServiceError, RETRY, "amqp:internal-error"),
        (501, RequestRefusedError, GIVE_UP, "amqp:not-implemented"),
        (503, ServiceBusyError, RETRY, "com.microsoft:server-busy"),
        (418, RequestRefusedError, GIVE_UP, None),
        (502, ServiceError, RETRY, None),
        (0, ServiceError, RETRY, None),
    ],
)
def test_status_code_without_a_condition_is_mapped(
    code: int, kind: type[ServiceError], recovery: Recovery, condition: str | None
) -> None:
    """Without a condition, the status code decides which it is."""
    error = error_for_status(code, None, None, entity="hub")
    assert (type(error), error.recovery, error.condition, error.entity) == (kind, recovery, condition, "hub")


def test_status_code_table_has_no_row_without_a_test() -> None:
    """Every mapped code stands in the test above."""
    assert set(STATUS_CONDITIONS) == {400, 401, 403, 404, 408, 410, 500, 501, 503}


def test_condition_outweighs_the_status_code() -> None:
    """An answer's condition takes precedence over its code."""
    error = error_for_status(400, "com.microsoft:server-busy", "wait")
    assert (type(error), error.recovery) == (ServiceBusyError, RETRY)


@pytest.mark.parametrize("condition", ["amqp:not-found", None])
def test_status_404_is_final(condition: str | None) -> None:
    """A 404 answer speaks of the entity asked for, whatever its words."""
    assert type(error_for_status(404, condition, "no such thing")) is EntityNotFoundError


def test_not_found_rule_holds_for_another_status_code() -> None:
    """The text rule holds for an answer of another code."""
    assert error_for_status(500, "amqp:not-found", "broker away").recovery is RELINK


def test_tracking_id_is_read_from_the_suffix() -> None:
    """The tracking id is read out of the service's suffix."""
    text = (
        "The link is stolen. Reference:abc, TrackingId:1f2e_G3_B7, SystemTracker:ns:eventhub:hub~0|$default, "
        "Timestamp:2024-01-01T00:00:00"
    )
    assert error_for("amqp:link:stolen", text).tracking_id == "1f2e_G3_B7"
    assert error_for("amqp:link:stolen", "gone TrackingId:abc").tracking_id == "abc"
    assert error_for("amqp:link:stolen", "gone").tracking_id is None


@given(st.none() | st.text(), st.none() | st.text(), st.integers(-(2**31), 2**31 - 1))
def test_error_of_any_words_is_made(condition: str | None, description: str | None, code: int) -> None:
    """Whatever a peer writes becomes an error, and writing never fails."""
    assert str(error_for(condition, description))
    assert str(error_for_status(code, condition, description))
    tracking_id(description or "")


def test_server_busy_waits_as_long_as_asked() -> None:
    """A throttled client waits as long as the service asks."""
    assert SERVER_BUSY_WAIT == 4.0


@pytest.mark.parametrize("make", [lambda text: error_for(text, text), lambda text: error_for_status(503, text, text)])
def test_error_quotes_a_short_excerpt_on_one_line(make: Callable[[str], ServiceError]) -> None:
    """However much a service says, and with whatever controls, the error is short and on one line."""
    error = make("amqp:x\r\n\x1b[2J TrackingId:" + "\x1bmessaging entity " * 50_000)
    assert str(error).isprintable()
    assert len(error.description) <= 256
    assert len(str(error)) < 600
    assert len(error.condition or "") <= 256
    assert len(error.tracking_id or "") <= 256
    assert (error.tracking_id or "").isprintable()
