"""What follows each failure of a processor."""

from __future__ import annotations

import random

import pytest

from eventpump.core.failures import FailureStep, ProcessorFailures
from eventpump.options.base import RetryOptions

RETRY, NARROW, SKIP, PARK = FailureStep.RETRY, FailureStep.NARROW, FailureStep.SKIP, FailureStep.PARK
STOP, STOP_PARTITION = FailureStep.STOP, FailureStep.STOP_PARTITION


def _failures(policy: FailureStep, exhausted: FailureStep = STOP, retries: int | None = 2) -> ProcessorFailures:
    return ProcessorFailures(policy, exhausted, RetryOptions(max_retries=retries, base_delay=1, max_delay=4))


@pytest.mark.parametrize("policy", [STOP, STOP_PARTITION])
def test_policy_to_stop_does_so_at_the_first_failure(policy: FailureStep) -> None:
    """Of a batch, an idle call, or another method."""
    for events in (5, 1, 0, None):
        assert _failures(policy).failed(events, 0.0) is policy


@pytest.mark.parametrize("exhausted", [STOP, STOP_PARTITION])
def test_retries_that_are_used_up_lead_to_what_was_chosen(exhausted: FailureStep) -> None:
    """Two retries are three attempts."""
    for events in (5, 1, 0, None):
        failures = _failures(RETRY, exhausted)
        assert [failures.failed(events, 0.0) for _ in range(3)] == [RETRY, RETRY, exhausted]


def test_without_a_limit_retries_go_on() -> None:
    """The default."""
    failures = _failures(RETRY, retries=None)
    assert {failures.failed(3, 0.0) for _ in range(1000)} == {RETRY}
    assert failures.in_a_row == 1000


@pytest.mark.parametrize("passing", [SKIP, PARK])
def test_batch_is_narrowed_and_a_single_event_is_not(passing: FailureStep) -> None:
    """At once where that is the policy, and after the last retry where it follows these."""
    assert _failures(passing).failed(2, 0.0) is NARROW
    assert _failures(passing).failed(1, 0.0) is passing
    assert _failures(passing).failed(0, 0.0) is SKIP
    failures = _failures(RETRY, passing)
    assert [failures.failed(2, 0.0) for _ in range(3)] == [RETRY, RETRY, NARROW]


def test_each_event_of_a_narrowed_batch_has_all_retries() -> None:
    """Attempts count those of the batch, and start over for each event; the first failure is the batch's."""
    failures = _failures(RETRY, PARK)
    assert [failures.failed(3, 7.0 + number) for number in range(3)][-1] is NARROW
    failures.narrowed()
    for _ in range(2):
        assert (failures.in_a_row, failures.attempts) == (0, 3)
        assert [failures.failed(1, 20.0) for _ in range(3)] == [RETRY, RETRY, PARK]
        assert (failures.in_a_row, failures.attempts, failures.first_failed) == (3, 6, 7.0)
        failures.settled()
    failures.widened()
    assert failures.failed(3, 30.0) is RETRY
    assert (failures.attempts, failures.first_failed) == (1, 30.0)


def test_failed_after_settled_counts_from_zero() -> None:
    """A batch that succeeded at last leaves no count behind."""
    failures = _failures(RETRY)
    failures.failed(3, 1.0)
    failures.settled()
    assert (failures.attempts, failures.first_failed) == (0, None)
    assert [failures.failed(3, 2.0) for _ in range(3)] == [RETRY, RETRY, STOP]


@pytest.mark.parametrize("passing", [SKIP, PARK])
def test_processor_that_cannot_be_opened_passes_over_nothing(passing: FailureStep) -> None:
    """There is no event that failed: it is tried again, and the partition is left after the last retry."""
    failures = _failures(passing)
    assert [failures.failed(None, 0.0) for _ in range(3)] == [RETRY, RETRY, STOP]
    failures = _failures(RETRY, passing)
    assert [failures.failed(None, 0.0) for _ in range(3)] == [RETRY, RETRY, STOP_PARTITION]


def test_delays_grow_to_the_limit_and_start_over() -> None:
    """Full jitter below a ceiling that doubles."""

    class Most(random.Random):
        def uniform(self, a: float, b: float) -> float:
            return b

    failures = _failures(RETRY)
    assert [failures.delay(Most()) for _ in range(4)] == [1, 2, 4, 4]
    failures.settled()
    assert failures.delay(Most()) == 1
