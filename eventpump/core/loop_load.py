"""Delays deliveries so that a host with CPU-bound handlers keeps its leases."""

from __future__ import annotations

import itertools
import math

SLOW_TURN = 0.05
"""Seconds; a longer iteration ("turn") of the event loop is slow."""

NOTED_STEP = 0.0002
"""Seconds; shorter steps of a handler are not recorded: even a thousand of them are a harmless turn."""

FRESH = 1.0
"""Seconds for which a slow turn predicts the next one."""

CALL_TURNS = 16
"""Turns of the loop that a call of a store may take: SQLite takes 3, HTTP about 10."""


class LoopLoad:
    """One host's slow turns, and the work that must not wait for them: due renewals, and calls of the store.

    A call of the store needs several turns of the loop, and each costs a step of every handler. So while turns are
    slow, no delivery starts as long as a renewal is due, or a call might time out if more slow turns followed. Handlers
    with quick turns are never delayed, however slow the store is. All times are seconds on one clock.
    """

    __slots__ = ("_began", "_calls", "_due", "_is_holding", "_keys", "_slow", "_slow_at", "is_watching")

    def __init__(self) -> None:
        self._began: float | None = None
        self._slow = 0.0
        self._slow_at = -math.inf
        self._is_holding = False
        self._due: dict[str, float] = {}
        self._calls: dict[int, float] = {}
        self._keys = itertools.count()
        self.is_watching = False
        """Whether `is_closed` may be true; False for a host without CPU-bound handlers."""

    def stepped(self, began: float) -> bool:
        """Record a step longer than `NOTED_STEP`; True for the turn's first: call `turned` in the next turn."""
        if self._began is not None:
            return False
        self._began = began
        self.is_watching = True
        return True

    def turned(self, now: float) -> None:
        """Record that the turn has ended."""
        assert self._began is not None
        length = now - self._began
        self._began = None
        self._slow, self._slow_at = (length, now) if length > SLOW_TURN else (0.0, -math.inf)
        self.is_watching = self._slow > 0.0

    def lease_held(self, partition_id: str, due_at: float) -> None:
        """Record an acquired or renewed lease, and when its next renewal is due."""
        self._due[partition_id] = due_at

    def lease_gone(self, partition_id: str) -> None:
        """Record that a lease is not held any more."""
        self._due.pop(partition_id, None)

    def call_begun(self, ends_at: float) -> int:
        """Record a call of the store that times out at this time; return the key for `call_ended`."""
        key = next(self._keys)
        self._calls[key] = ends_at
        return key

    def call_ended(self, key: int) -> None:
        """Record that a call of the store has ended."""
        del self._calls[key]

    def is_closed(self, now: float) -> bool:
        """Return whether no delivery may start now. Once it is closed, only a renewal or the end of a call opens it."""
        # While deliveries are delayed the turns are quick, which does not mean that the waiting deliveries are.
        length = self._slow if self._is_holding or now - self._slow_at < FRESH else 0.0
        if self._began is not None:
            length = max(length, now - self._began)
        self._is_holding = length > SLOW_TURN and (
            any(due_at <= now for due_at in self._due.values())
            or any(ends_at - now < length * CALL_TURNS for ends_at in self._calls.values())
        )
        return self._is_holding
