"""Back-off."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventpump.core.backoff import Backoff


@given(seed=st.integers(), base=st.floats(0.01, 5), factor=st.floats(1, 50), failures=st.integers(1, 40))
def test_waits_stay_below_a_ceiling_that_doubles(seed: int, base: float, factor: float, failures: int) -> None:
    """The n-th wait is at most base * 2**(n-1), and never more than the maximum."""
    rng, backoff = random.Random(seed), Backoff(base, base * factor)
    for failure in range(failures):
        assert 0 <= backoff.next(rng) <= min(base * 2**failure, base * factor)
    assert backoff.failures == failures


def test_jitter_is_full() -> None:
    """Waits spread over the whole of their range, so that clients that failed together do not come back together."""
    waits = [Backoff(8, 8).next(random.Random(seed)) for seed in range(200)]
    assert min(waits) < 1
    assert max(waits) > 7


def test_a_success_starts_over() -> None:
    """After a reset the first ceiling holds again."""
    backoff = Backoff(1, 64)
    for _ in range(6):
        backoff.next(random.Random(1))
    backoff.reset()
    assert backoff.failures == 0
    assert backoff.next(random.Random(2)) <= 1


def test_what_the_peer_asks_for_comes_first() -> None:
    """A throttling peer gets at least the wait it asked for."""
    assert Backoff(1, 1).next(random.Random(3), at_least=4) >= 4


@pytest.mark.parametrize(("base", "maximum"), [(0, 1), (-1, 1), (2, 1)])
def test_impossible_bounds_are_refused(base: float, maximum: float) -> None:
    """A back-off that could not wait, or could not grow, is refused."""
    with pytest.raises(ValueError, match="back-off"):
        Backoff(base, maximum)
