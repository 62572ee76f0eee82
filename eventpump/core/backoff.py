"""Whether a failed operation is attempted again, and how long to wait before."""

from __future__ import annotations

import math
import random
from typing import Final, NamedTuple, Protocol

from eventpump.errors import Recovery, ServiceBusyError, ServiceError, StoreError
from eventpump.eventhubs.conditions import SERVER_BUSY_WAIT


class RetryPolicy(Protocol):
    """How often, and after which delays, a failed operation is repeated. `RetryOptions` is one, and `Unlimited`."""

    @property
    def max_retries(self) -> int | None:
        """Attempts after the first; None for no limit."""

    @property
    def base_delay(self) -> float:
        """Seconds; the bound of the first delay, doubled with each further one."""

    @property
    def max_delay(self) -> float:
        """Seconds; the bound of the longest delay."""

    @property
    def mode(self) -> str:
        """Return "exponential", or "fixed": each delay is `base_delay`."""

    @property
    def try_timeout(self) -> float | None:
        """Seconds that one attempt may take; None for no limit."""


class Unlimited(NamedTuple):
    """A policy that repeats an operation until it succeeds, or fails in a way that no repeat can help."""

    base_delay: float
    max_delay: float
    max_retries: None = None
    mode: str = "exponential"
    try_timeout: None = None


UNLIMITED: Final = Unlimited(0.2, 5.0)
"""The policy of operations that only their owner's end, a time limit or a final error ends."""


def is_used_up(policy: RetryPolicy, failures: int) -> bool:
    """Return whether no further attempt may follow so many failures."""
    return policy.max_retries is not None and failures >= policy.max_retries


def gives_up(error: Exception) -> bool:
    """Return whether repeating the operation that failed cannot help.

    A `ServiceError` states it in `Recovery`; a `StoreError` may be transient; every other error is left to the caller.
    """
    if isinstance(error, ServiceError):
        return error.recovery is Recovery.GIVE_UP
    return not isinstance(error, StoreError)


def least_delay(error: BaseException) -> float:
    """Return the seconds that the service asks its clients to wait after an error: 0 unless it is throttling."""
    return SERVER_BUSY_WAIT if isinstance(error, ServiceBusyError) else 0.0


class Backoff:
    """Exponential backoff with full jitter: a random wait up to a ceiling that doubles with every failure.

    Args:
        base: The first ceiling, in seconds.
        maximum: The highest ceiling, in seconds.
    """

    __slots__ = ("_base", "_ceiling", "_is_fixed", "_maximum", "failures")

    def __init__(self, base: float, maximum: float, *, is_fixed: bool = False) -> None:
        if not 0 < base <= maximum and not is_fixed:
            raise ValueError("a backoff needs 0 < base <= maximum")
        self._is_fixed = is_fixed
        self._base = base
        self._maximum = maximum
        self._ceiling = base
        self.failures = 0

    @classmethod
    def of(cls, policy: RetryPolicy) -> Backoff:
        """Return the waits of a policy."""
        return cls(policy.base_delay, policy.max_delay, is_fixed=policy.mode == "fixed")

    def next(self, rng: random.Random, *, at_least: float = 0.0) -> float:
        """Count a failure, and return how long to wait, in seconds.

        Args:
            at_least: The wait that a throttling service requests, in seconds; jitter is added to it.
        """
        ceiling = self._ceiling
        self.failures += 1
        if self._is_fixed:
            return at_least + self._base
        self._ceiling = min(ceiling * 2, self._maximum)
        return at_least + rng.uniform(0, ceiling)

    def reset(self) -> None:
        """Start over, after a success."""
        self._ceiling = self._base
        self.failures = 0


RECONNECT_JITTER = 0.2
"""Seconds; the longest delay of an early attempt."""


class TryPace:
    """The delays between attempts of an operation that may have failed together with its connection.

    The transport spaces attempts to connect, so an attempt that only has to wait for a connection may come before its
    delay is over: two delays in a row would prolong an outage. In return, an early attempt that fails does not count.
    Attempts that count are as far apart as if none came early, so the same number of attempts survives an outage of the
    same length.

    A link that is attached early, and fails, fails once; then the rest of the delay is waited for.
    """

    __slots__ = ("_backoff", "_due")

    def __init__(self, base: float, maximum: float, *, is_fixed: bool = False) -> None:
        self._backoff = Backoff(base, maximum, is_fixed=is_fixed)
        self._due = -math.inf

    @classmethod
    def of(cls, policy: RetryPolicy) -> TryPace:
        """Return the delays of a policy."""
        return cls(policy.base_delay, policy.max_delay, is_fixed=policy.mode == "fixed")

    @property
    def failures(self) -> int:
        """How many failed attempts counted."""
        return self._backoff.failures

    def counts(self, began: float) -> bool:
        """Return whether a failed attempt counts that began at this time, in seconds."""
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
        """Record a failed attempt, and return how long to wait, in seconds.

        Args:
            is_connection_lost: Whether it failed because the connection was lost.
            was_attached: Whether there was a link.
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
        if self._due > -math.inf:
            self._backoff.reset()
            self._due = -math.inf


class Retries:
    """Decides on the attempts of one operation: whether another one follows a failure, and after how long.

    Args:
        policy: The number of attempts and the delays between them.
        until: The time, in seconds, at which no further attempt begins.
        allows_early: Attempts that failed with their connection are repeated early, and then do not count (`TryPace`).
            Only for operations on links, because the transport spaces attempts to connect by itself.
    """

    __slots__ = ("_allows_early", "_pace", "_policy", "_until")

    def __init__(self, policy: RetryPolicy, *, until: float = math.inf, allows_early: bool = False) -> None:
        self._pace = TryPace.of(policy)
        self._policy = policy
        self._until = until
        self._allows_early = allows_early

    def delay_after(
        self, error: Exception, rng: random.Random, *, began: float, now: float, was_attached: bool = False
    ) -> float | None:
        """Return the seconds until the next attempt; None if none follows, because the limits are reached.

        Whether the error itself is final is up to the caller (`gives_up`).

        Args:
            was_attached: Whether the attempt had a link.
        """
        if not self._allows_early:
            began = math.inf  # a timer may fire a moment too soon, and each attempt counts
        if self._pace.counts(began) and is_used_up(self._policy, self._pace.failures):
            return None
        is_connection_lost = isinstance(error, ServiceError) and error.recovery is Recovery.RECONNECT
        delay = self._pace.next(
            rng,
            began=began,
            now=now,
            is_connection_lost=self._allows_early and is_connection_lost,
            was_attached=was_attached,
            at_least=least_delay(error),
        )
        return delay if now + delay < self._until else None
