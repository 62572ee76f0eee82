"""Token bucket: limits the number of requests per second."""

from __future__ import annotations


class TokenBucket:
    """Delays requests so that in any second at most `rate + burst` begin.

    Args:
        burst: Requests that may begin at once after a pause.
    """

    def __init__(self, rate: float, burst: int) -> None:
        assert rate > 0
        assert burst >= 1
        self._gap = 1.0 / rate
        self._ahead = (burst - 1) * self._gap
        self._next = float("-inf")

    def take(self, now: float) -> float:
        """Count a request at this time; return how many seconds it has to wait, 0 if it may begin now."""
        due = max(self._next, now - self._ahead)
        self._next = due + self._gap
        return max(0.0, due - now)
