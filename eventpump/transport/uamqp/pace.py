"""Adaptive polling interval."""

from __future__ import annotations


class Pace:
    """Waits that are short after something happened, and double while nothing does, within these seconds."""

    def __init__(self, shortest: float, longest: float) -> None:
        assert 0 < shortest <= longest
        self._shortest = shortest
        self._longest = longest
        self.wait = shortest
        """Seconds to wait before the next look."""

    def looked(self, *, found: bool) -> None:
        """Record whether the last look found something."""
        self.wait = self._shortest if found else min(self.wait * 2, self._longest)
