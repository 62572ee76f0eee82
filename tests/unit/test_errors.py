"""Errors say whether another try can help."""

from __future__ import annotations

import pytest

from eventpump.errors import (
    AuthenticationError,
    BufferFullError,
    ClosedError,
    ConfigurationError,
    ConnectionLostError,
    EventPumpError,
    EventTooLargeError,
    OwnershipLostError,
    PublishOutcomeUnknownError,
    Recovery,
    ServiceBusyError,
    ServiceError,
    StoreError,
)


@pytest.mark.parametrize(
    ("error", "is_retryable"),
    [
        (ConnectionLostError("gone"), True),
        (ConnectionLostError("closed here", recovery=Recovery.GIVE_UP), False),
        (ServiceBusyError("busy"), True),
        (ServiceError("odd"), True),
        (AuthenticationError("no"), False),
        (BufferFullError("0", 1, 2, 3), True),
        (StoreError("renew", "locked"), True),
        (PublishOutcomeUnknownError("0", 5, 1), True),
        (PublishOutcomeUnknownError("0", 5, 1, problem="another process"), False),
        (ConfigurationError("hub", "is required"), False),
        (EventTooLargeError(2, 1), False),
        (OwnershipLostError("0"), False),
        (ClosedError("producer"), False),
        (EventPumpError("other"), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_error_says_whether_another_try_can_help(error: EventPumpError, is_retryable: bool) -> None:
    """As its recovery says, where it has one."""
    assert error.is_retryable is is_retryable
