"""How long to wait before trying again."""

from __future__ import annotations

import math
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


RECONNECT_JITTER = 0.2
"""Seconds; the longest delay of a try that comes early."""


class TryPace:
    """How long to wait before something is tried again that may have failed with its connection.

    Attempts to connect are spaced by the transport, so a try that only has to wait for a connection may come before its
    delay is over: two delays in a row would make an outage longer. In return it does not count where it fails too.
    Those that count are as far apart as if none came early, so an outage is outlasted as long with as many tries.

    A link that is attached early, and fails, fails once; then the rest of the delay is waited for.

    :param base: the first ceiling of the delays, in seconds.
    :param maximum: the highest, in seconds.
    """

    __slots__ = ("_backoff", "_due")

    def __init__(self, base: float, maximum: float) -> None:
        self._backoff = Backoff(base, maximum)
        self._due = -math.inf

    @property
    def failures(self) -> int:
        """How many failed tries counted."""
        return self._backoff.failures

    def counts(self, began: float) -> bool:
        """Return whether a try that failed counts. :param began: when it began, in seconds."""
        return began >= self._due

    def next(
        self,
        rng: random.Random,
        *,
        began: float,
        now: float,
        is_connection_lost: bool,
        was_attached: bool,
        at_least: float = 0.0,
    ) -> float:
        """Go on after a failed try, and return how long to wait, in seconds.

        :param began: when it began.
        :param is_connection_lost: whether it failed because there is no connection any more.
        :param was_attached: whether there was a link.
        :param at_least: as of `Backoff.next`.
        """
        has_counted = self.counts(began)
        if has_counted:
            self._due = now + self._backoff.next(rng, at_least=at_least)
        rest = max(self._due - now, at_least)
        if is_connection_lost and (has_counted or not was_attached):
            return min(rest, rng.uniform(0, RECONNECT_JITTER))
        return rest

    def reset(self) -> None:
        """Start over, after a success."""
        self._backoff.reset()
        self._due = -math.inf
