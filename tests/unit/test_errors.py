"""Errors say whether another try can help."""

from __future__ import annotations

import ast
import copy
import pickle
from collections import Counter
from pathlib import Path

import pytest

import eventpump
from eventpump.errors import (
    AuthenticationError,
    BufferFullError,
    ClosedError,
    ConfigurationError,
    ConnectionLostError,
    DecodeError,
    EventError,
    EventPumpError,
    EventTooLargeError,
    OwnershipLostError,
    PublishOutcomeUnknownError,
    Recovery,
    ServiceBusyError,
    ServiceError,
    StoreError,
)


def test_each_error_has_a_name_of_its_own() -> None:
    """No two modules have an error class of the same name: an `except` means what it says, whatever is imported."""
    found = Counter(
        node.name
        for path in Path(eventpump.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef) and node.name.endswith("Error") and not node.name.startswith("_")
    )
    assert [name for name, count in found.items() if count > 1] == []


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
        (DecodeError("0", 7, "no zstd"), False),
        (OwnershipLostError("0"), False),
        (ClosedError("producer"), False),
        (EventPumpError("other"), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_error_says_whether_another_try_can_help(error: EventPumpError, is_retryable: bool) -> None:
    """As its recovery says, where it has one."""
    assert error.is_retryable is is_retryable


@pytest.mark.parametrize("partition_id", ["3", None])
def test_decode_error_says_which_event_and_survives_copies(partition_id: str | None) -> None:
    """Spark's readers and process pools send errors between processes."""
    error = DecodeError(partition_id, 7, "it is not gzip")
    assert isinstance(error, EventError)
    for made in (error, copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert (made.partition_id, made.sequence_number, made.problem) == (partition_id, 7, "it is not gzip")
        where = "" if partition_id is None else "partition 3, "
        assert str(made) == f"{where}event 7: cannot be decoded: it is not gzip"
