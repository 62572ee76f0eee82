"""What follows a failure of the user's processor: another attempt, single events, the next event, or the end."""

from __future__ import annotations

import enum
import random

from eventpump.core.backoff import Backoff, RetryPolicy, is_used_up


class FailureStep(enum.StrEnum):
    """What follows a failure. The values are those of the options `failure_policy` and `on_retries_exhausted`."""

    RETRY = "retry"
    """The same events are delivered again, after a delay."""
    NARROW = "narrow"
    """The events of the batch are delivered one by one, to find those that fail by themselves. Not an option."""
    SKIP = "skip"
    """The event counts as processed."""
    PARK = "park"
    """The event is stored elsewhere, and then counts as processed."""
    STOP = "stop"
    """The host stops."""
    STOP_PARTITION = "stop_partition"
    """The host leaves the partition, and tries it again later."""


_PASSING = frozenset({FailureStep.SKIP, FailureStep.PARK})


class ProcessorFailures:
    """The failures of one partition's processor, and what follows each of them.

    A batch is delivered until it is processed or the policy ends its retries. Where the policy then passes over events
    (skips or parks them), a batch of several is narrowed first: its events are delivered one by one, each by the same
    policy, with all of its retries.

    Args:
        on_exhausted: What follows the failure after the last retry; never RETRY.
    """

    __slots__ = ("_backoff", "_before", "_on_exhausted", "_policy", "_retry", "first_failed", "in_a_row")

    def __init__(self, policy: FailureStep, on_exhausted: FailureStep, retry: RetryPolicy) -> None:
        self._policy = policy
        self._on_exhausted = on_exhausted
        self._retry = retry
        self._backoff = Backoff.of(retry)
        self._before = 0
        self.in_a_row = 0
        """How many times in a row the present call has failed."""
        self.first_failed: float | None = None
        """When the events in hand failed for the first time, alone or in their batch, in seconds since the epoch."""

    @property
    def attempts(self) -> int:
        """How many times the events in hand were delivered in vain, alone and in their batch."""
        return self._before + self.in_a_row

    def failed(self, events: int | None, now: float, *, can_retry: bool = True) -> FailureStep:
        """Record a failure, and return what follows.

        Args:
            events: The number of events that were delivered; None if it was another call than a delivery.
            can_retry: Whether a retry can succeed. If not, this failure is as the one after the last retry. Default:
                True.
        """
        self.in_a_row += 1
        if self.first_failed is None:
            self.first_failed = now
        is_last = not can_retry or is_used_up(self._retry, self.in_a_row - 1)
        step = self._policy
        if step is FailureStep.RETRY and is_last:
            step = self._on_exhausted
        if step not in _PASSING:
            return step
        if events is not None:
            # Without an event there is nothing to park: the call is only not repeated.
            return FailureStep.NARROW if events > 1 else step if events else FailureStep.SKIP
        # A processor that cannot be opened fails for every event: none of them can be passed over for it.
        if not is_last:
            return FailureStep.RETRY
        return FailureStep.STOP_PARTITION if self._on_exhausted in _PASSING else self._on_exhausted

    def delay(self, rng: random.Random) -> float:
        """Return the seconds to wait before the next attempt."""
        return self._backoff.next(rng)

    def narrowed(self) -> None:
        """Begin with the single events of a batch that failed."""
        self._before = self.in_a_row
        self._begin()

    def settled(self) -> None:
        """Record that the events in hand were processed, or passed over."""
        self._begin()
        if not self._before:
            self.first_failed = None

    def widened(self) -> None:
        """Record that all single events of a batch are settled."""
        self._before = 0
        self.first_failed = None

    def _begin(self) -> None:
        self.in_a_row = 0
        self._backoff.reset()
