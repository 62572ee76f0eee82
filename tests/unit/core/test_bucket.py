"""The bucket: a bound for every second, and no wait without need."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventpump.core.bucket import TokenBucket


def test_bucket_after_a_pause_allows_a_burst() -> None:
    """So many at once, then evenly."""
    bucket = TokenBucket(10.0, 3)
    assert [bucket.take(100.0) for _ in range(5)] == pytest.approx([0, 0, 0, 0.1, 0.2])
    assert bucket.take(200.0) == 0


@given(st.lists(st.floats(0, 0.3), min_size=1, max_size=200), st.integers(1, 12))
def test_bucket_allows_at_most_rate_plus_burst_in_any_second(gaps: list[float], burst: int) -> None:
    """Whatever the times of asking, in any second at most rate + burst begin."""
    bucket, now = TokenBucket(20.0, burst), 0.0
    begun: list[float] = []
    for gap in gaps:
        now += gap if gap > 0.05 else 0.0
        begun.append(now + bucket.take(now))
    assert begun == sorted(begun)
    for start in begun:
        assert sum(start <= each < start + 1 for each in begun) <= 20 + burst
