"""A link that is kept open: its states, and what follows a failure."""

from __future__ import annotations

import itertools
import random

import pytest

from eventpump.core.kept_link import KEPT_LINK_STEPS, KeptLinkInput, KeptLinkState, LinkFailures
from eventpump.errors import (
    ConnectionLostError,
    EntityNotFoundError,
    LinkDetachedError,
    RequestRefusedError,
    ServiceBusyError,
)
from eventpump.options.base import RetryOptions

_LEGAL = {
    KeptLinkState.CLOSED: {KeptLinkInput.START: KeptLinkState.OPENING},
    KeptLinkState.OPENING: {
        KeptLinkInput.ATTACHED: KeptLinkState.ATTACHED,
        KeptLinkInput.FAILED: KeptLinkState.WAITING,
    },
    KeptLinkState.ATTACHED: {
        KeptLinkInput.FAILED: KeptLinkState.WAITING,
        KeptLinkInput.REOPEN: KeptLinkState.WAITING,
        KeptLinkInput.PARK: KeptLinkState.PARKED,
    },
    KeptLinkState.WAITING: {KeptLinkInput.FAILED: KeptLinkState.WAITING, KeptLinkInput.RETRY: KeptLinkState.OPENING},
    KeptLinkState.PARKED: {
        KeptLinkInput.REOPEN: KeptLinkState.PARKED,
        KeptLinkInput.PARK: KeptLinkState.PARKED,
        KeptLinkInput.RESUME: KeptLinkState.ATTACHED,
    },
    KeptLinkState.ENDED: dict.fromkeys(KeptLinkInput, KeptLinkState.ENDED),
}


@pytest.mark.parametrize(("state", "happened"), list(itertools.product(KeptLinkState, KeptLinkInput)))
def test_kept_link_takes_each_input_in_each_state(state: KeptLinkState, happened: KeptLinkInput) -> None:
    """Each pair leads where it has to, or is refused: every state can end, and an end is final."""
    legal = {**_LEGAL[state], KeptLinkInput.END: KeptLinkState.ENDED}
    assert KEPT_LINK_STEPS.get((state, happened)) is legal.get(happened)


def _failures(max_retries: int | None = None, startup_timeout: float | None = None) -> LinkFailures:
    policy = RetryOptions(base_delay=0.5, max_delay=8.0, max_retries=max_retries)
    return LinkFailures(policy, random.Random(1), startup_timeout)


def test_failed_link_is_final_by_its_recovery_and_the_limit() -> None:
    """What cannot be cured is final, but for a hub that may have been recreated while its link was open; so is a
    failure after the last retry, unless it is of the connection."""
    failures = _failures(max_retries=1)
    refused, gone = RequestRefusedError("no"), EntityNotFoundError("no such hub")
    assert failures.is_final(refused, was_opened=True, is_located=True)
    assert [failures.is_final(gone, was_opened=opened, is_located=True) for opened in (True, False)] == [False, True]
    assert failures.is_final(gone, was_opened=True, is_located=False)
    detached = LinkDetachedError("detached")
    assert not failures.is_final(detached, was_opened=True, is_located=True)
    failures.delay_after(detached, is_own=False)
    assert failures.is_final(detached, was_opened=True, is_located=True)
    assert not failures.is_final(ConnectionLostError("lost"), was_opened=True, is_located=True)
    failures.worked()
    assert not failures.is_final(detached, was_opened=True, is_located=True)


def test_delay_grows_with_failures_of_the_link_alone() -> None:
    """A lost connection, and a link that was closed here, count as no failure and wait only a little."""
    failures = _failures()
    assert all(failures.delay_after(ConnectionLostError("lost"), is_own=False) <= 0.5 for _ in range(100))
    assert all(failures.delay_after(LinkDetachedError("closed here"), is_own=True) <= 0.5 for _ in range(100))
    assert failures.in_a_row == 0
    delays = [failures.delay_after(LinkDetachedError("detached"), is_own=False) for _ in range(100)]
    assert failures.in_a_row == 100
    assert 4.0 < max(delays) <= 8.0
    assert failures.delay_after(ServiceBusyError("busy"), is_own=False) >= 4.0


def test_failures_of_an_outage_are_reported_ever_less_often() -> None:
    """Until a link is attached again; failures of the link itself are all reported."""
    failures = _failures()
    lost = ConnectionLostError("lost")
    reported = [now for now in range(200) if failures.is_reported(lost, float(now))]
    assert reported[0] == 0
    assert 200 / 8 <= len(reported) < 150
    assert all(failures.is_reported(LinkDetachedError("detached"), 200.0) for _ in range(3))
    failures.is_reported(lost, 200.0)
    failures.attached()
    assert failures.is_reported(lost, 200.0)


def test_link_that_was_never_attached_is_given_up_in_time() -> None:
    """After `startup_timeout`; one that was attached once never is."""
    failures = _failures(startup_timeout=30.0)
    assert [failures.is_too_late(seconds) for seconds in (29.9, 30.0)] == [False, True]
    failures.attached()
    assert not failures.is_too_late(1e6)
    assert not _failures().is_too_late(1e6)
