"""How long to wait before trying again."""

from __future__ import annotations

import random


class Backoff:
    """Exponential back-off with full jitter: wait anything up to a ceiling that doubles with every failure.

    :param base: the first ceiling, in seconds.
    :param maximum: the highest ceiling, in seconds.
    """

    __slots__ = ("_base", "_ceiling", "_maximum", "failures")

    def __init__(self, base: float, maximum: float) -> None:
        if not 0 < base <= maximum:
            raise ValueError("a back-off needs 0 < base <= maximum")
        self._base = base
        self._maximum = maximum
        self._ceiling = base
        self.failures = 0

    def next(self, rng: random.Random, *, at_least: float = 0.0) -> float:
        """Count a failure, and say how long to wait, in seconds.

        :param at_least: what the peer asked for (a throttling service wants its clients to wait); jitter comes on top.
        """
        ceiling = self._ceiling
        self.failures += 1
        self._ceiling = min(ceiling * 2, self._maximum)
        return at_least + rng.uniform(0, ceiling)

    def reset(self) -> None:
        """Start over, after a success."""
        self._ceiling = self._base
        self.failures = 0
