"""Back-off."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventpump.core.backoff import RECONNECT_JITTER, Backoff, Retries, TryPace, Unlimited, gives_up, least_delay
from eventpump.errors import (
    ClosedError,
    ConnectionLostError,
    EntityNotFoundError,
    Recovery,
    ServiceBusyError,
    ServiceError,
    StoreError,
)
from eventpump.eventhubs.conditions import SERVER_BUSY_WAIT
from eventpump.options.base import RetryOptions


@given(seed=st.integers(), base=st.floats(0.01, 5), factor=st.floats(1, 50), failures=st.integers(1, 40))
def test_delay_stays_below_a_ceiling_that_doubles(seed: int, base: float, factor: float, failures: int) -> None:
    """The n-th wait is at most base * 2**(n-1), and never more than the maximum."""
    rng, backoff = random.Random(seed), Backoff(base, base * factor)
    for failure in range(failures):
        assert 0 <= backoff.next(rng) <= min(base * 2**failure, base * factor)
    assert backoff.failures == failures


def test_delay_spreads_over_its_whole_range() -> None:
    """Waits spread over the whole of their range, so that clients that failed together do not come back together."""
    waits = [Backoff(8, 8).next(random.Random(seed)) for seed in range(200)]
    assert min(waits) < 1
    assert max(waits) > 7


def test_reset_starts_the_delays_over() -> None:
    """After a reset the first ceiling holds again."""
    backoff = Backoff(1, 64)
    for _ in range(6):
        backoff.next(random.Random(1))
    backoff.reset()
    assert backoff.failures == 0
    assert backoff.next(random.Random(2)) <= 1


def test_delay_is_at_least_what_the_peer_asks_for() -> None:
    """A throttling peer gets at least the wait it asked for."""
    assert Backoff(1, 1).next(random.Random(3), at_least=4) >= 4


@pytest.mark.parametrize(("base", "maximum"), [(0, 1), (-1, 1), (2, 1)])
def test_backoff_with_impossible_bounds_is_refused(base: float, maximum: float) -> None:
    """A backoff that could not wait, or could not grow, is refused."""
    with pytest.raises(ValueError, match="backoff"):
        Backoff(base, maximum)


class _Highest(random.Random):
    """Chance that gives the highest value allowed."""

    def uniform(self, a: float, b: float) -> float:
        return b


TRIES = st.lists(st.tuples(st.floats(0.0, 20.0), st.booleans(), st.booleans()), min_size=1, max_size=60)
"""How long a try takes, whether it fails with the connection, and whether it had a link."""


@given(TRIES)
def test_early_tries_do_not_use_up_the_retries(tries: list[tuple[float, bool, bool]]) -> None:
    """Early tries cost nothing: those that count begin after the whole delay, so a retry is used up no sooner; and of
    tries with a link at most one comes early for each that counts."""
    pace, rng, now = TryPace(1.0, 60.0), _Highest(), 0.0
    due, failures, early_links = 0.0, 0, 0
    for took, is_lost, was_attached in tries:
        began, now = now, now + took
        assert pace.counts(began) is (began >= due)
        if pace.counts(began):
            due = now + min(2.0**failures, 60.0)
            failures += 1
            early_links = 0
        else:
            early_links += was_attached
        assert early_links <= 1
        wait = pace.next(rng, began=began, now=now, is_connection_lost=is_lost, was_attached=was_attached)
        assert pace.failures == failures
        assert wait <= max(due - now, 0.0)
        now += wait


def test_early_tries_follow_only_a_lost_connection() -> None:
    """While a connection is lost tries follow each other at once; any other failure waits for its delay."""
    pace, rng = TryPace(8.0, 8.0), _Highest()
    asked = {"is_connection_lost": True, "was_attached": False}
    assert pace.next(rng, began=0.0, now=1.0, **asked) == RECONNECT_JITTER
    assert pace.next(rng, began=2.0, now=3.0, **asked) == RECONNECT_JITTER
    assert pace.next(rng, began=4.0, now=5.0, is_connection_lost=False, was_attached=True) == 4.0
    assert pace.next(rng, began=9.0, now=9.5, is_connection_lost=False, was_attached=True) == 8.0
    assert pace.next(rng, began=17.5, now=17.6, is_connection_lost=False, was_attached=True, at_least=4.0) == 12.0
    pace.reset()
    assert pace.counts(17.7)
    assert pace.failures == 0


@pytest.mark.parametrize("recovery", Recovery)
def test_gives_up_follows_the_recovery_of_a_service_error(recovery: Recovery) -> None:
    """The service's error says by itself whether another attempt can help."""
    assert gives_up(ServiceError("x", recovery=recovery)) is (recovery is Recovery.GIVE_UP)


def test_gives_up_on_all_but_the_service_and_stores() -> None:
    """A store's failure may pass; a closed object, or a bug, does not."""
    assert gives_up(EntityNotFoundError("x"))
    assert not gives_up(StoreError("write", "x"))
    assert gives_up(ClosedError("producer"))
    assert gives_up(KeyError("x"))


def test_least_delay_is_what_a_throttling_service_asks_for() -> None:
    """Only a busy service asks for a wait."""
    assert least_delay(ServiceBusyError("x")) == SERVER_BUSY_WAIT
    assert least_delay(ServiceError("x")) == 0.0


def test_retries_are_used_up() -> None:
    """As many delays follow failures as the policy has retries."""
    retries, rng = Retries(RetryOptions(max_retries=2, base_delay=1.0, max_delay=8.0)), _Highest()
    delays = [retries.delay_after(ServiceError("x"), rng, began=now, now=now) for now in (0.0, 1.0, 3.0)]
    assert delays == [1.0, 2.0, None]


def test_retries_count_an_attempt_that_began_too_soon() -> None:
    """Where attempts may not come early, none is free: a timer that fires a moment too soon makes no difference."""
    retries, rng = Retries(RetryOptions(max_retries=1, base_delay=1.0, max_delay=1.0)), _Highest()
    assert retries.delay_after(ConnectionLostError("x"), rng, began=0.0, now=0.0) == 1.0
    assert retries.delay_after(ConnectionLostError("x"), rng, began=0.999, now=0.999) is None


def test_retries_end_with_their_time() -> None:
    """No attempt begins at the end or after it."""
    rng = _Highest()
    assert Retries(Unlimited(1.0, 8.0), until=5.1).delay_after(ServiceError("x"), rng, began=4.0, now=4.0) == 1.0
    assert Retries(Unlimited(1.0, 8.0), until=5.0).delay_after(ServiceError("x"), rng, began=4.0, now=4.0) is None
