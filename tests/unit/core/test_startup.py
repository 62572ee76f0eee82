"""When a refusal ends a host: tables of histories."""

from __future__ import annotations

import pytest

from eventpump.core.startup import HostStart
from eventpump.errors import (
    AuthenticationError,
    ConnectionLostError,
    EntityNotFoundError,
    QuotaExceededError,
    RequestRefusedError,
)

Step = tuple[str, str]


def _after(*steps: Step, at: float = 5.0) -> tuple[str | None, bool]:
    """Return what a host that may start until 60 s ends with after these steps, and whether that is still open."""
    start = HostStart(60.0)
    errors = {
        "no right": AuthenticationError("no right"),
        "no group": EntityNotFoundError("no group"),
        "bad offset": RequestRefusedError("bad offset"),
        "full": QuotaExceededError("full"),
        "no way": ConnectionLostError("no way"),
    }
    for what, partition_id in steps:
        if what == "tried":
            start.tried(partition_id)
        elif what == "linked":
            start.linked()
        elif what == "ended":
            start.ended(partition_id)
        else:
            start.refused(partition_id, errors[what])
    verdict = start.verdict(at)
    assert verdict is None or verdict in errors.values()
    return None if verdict is None else str(verdict), start.is_open(at)


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([], (None, False)),
        ([("tried", "0")], (None, False)),
        ([("tried", "0"), ("no right", "0")], ("no right", False)),
        ([("tried", "0"), ("no group", "0")], ("no group", False)),
        ([("tried", "0"), ("bad offset", "0")], (None, False)),
        ([("tried", "0"), ("full", "0")], (None, False)),
        ([("tried", "0"), ("no way", "0")], (None, False)),
        ([("tried", "0"), ("tried", "1"), ("no group", "0")], (None, True)),
        ([("tried", "0"), ("tried", "1"), ("no group", "0"), ("no right", "1")], ("no group", False)),
        ([("tried", "0"), ("tried", "1"), ("no group", "0"), ("bad offset", "1")], (None, False)),
        ([("tried", "0"), ("tried", "1"), ("no group", "0"), ("linked", "1")], (None, False)),
        ([("tried", "0"), ("tried", "1"), ("no group", "0"), ("ended", "1")], ("no group", False)),
        ([("tried", "0"), ("no group", "0"), ("tried", "1")], ("no group", False)),
        ([("tried", "0"), ("tried", "1"), ("no group", "0"), ("tried", "2"), ("no group", "1")], ("no group", False)),
        ([("linked", "0"), ("tried", "1"), ("no right", "1")], (None, False)),
        ([("tried", "0"), ("bad offset", "0"), ("tried", "0"), ("no group", "0")], (None, False)),
        ([("tried", "0"), ("ended", "0")], (None, False)),
    ],
)
def test_refusal_of_everything_tried_ends_the_host(steps: list[Step], expected: tuple[str | None, bool]) -> None:
    """Only where everything tried was refused for the credential, the hub or the group does the host end."""
    assert _after(*steps) == expected


@pytest.mark.parametrize(("at", "expected"), [(60.0, "no right"), (60.1, None), (86_400.0, None)])
def test_refusal_after_the_start_does_not_end_the_host(at: float, expected: str | None) -> None:
    """After the start-up time-out the same refusal is a partition's matter."""
    assert _after(("tried", "0"), ("no right", "0"), at=at) == (expected, False)


def test_attempt_undecided_when_the_start_is_over_is_decided() -> None:
    """An attempt that never ends keeps nothing open beyond the start."""
    assert _after(("tried", "0"), ("tried", "1"), ("no right", "0"), at=60.0) == (None, True)
    assert _after(("tried", "0"), ("tried", "1"), ("no right", "0"), at=61.0) == (None, False)
