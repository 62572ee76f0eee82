"""Decide which of many requests may run now: a bounded number at a time, the urgent ones first."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


class RequestQueue:
    """Requests that wait to run. A request is identified by the number that `ask` returns.

    Args:
        shares: For each priority, the most urgent first, how many of that priority may run at a time. If the sum for
            the lower priorities is below the limit, the most urgent requests never wait only for lower ones.
    """

    def __init__(self, limit: int, shares: Sequence[int]) -> None:
        assert limit > 0
        assert all(share > 0 for share in shares)
        self._limit = limit
        self._shares = shares
        self._waiting: list[list[tuple[float, int]]] = [[] for _ in shares]
        self._priorities: dict[int, int] = {}
        self._running: dict[int, int] = {}
        self._counts = [0] * len(shares)
        self._last = 0

    @property
    def running(self) -> int:
        """How many run now."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """How many wait."""
        return len(self._priorities)

    def ask(self, priority: int, order: float = 0.0) -> int:
        """Add a request of a priority, 0 the most urgent;
        of equal ones the lower `order`, then the earlier, is first."""
        self._last += 1
        self._priorities[self._last] = priority
        heapq.heappush(self._waiting[priority], (order, self._last))
        return self._last

    def begin_now(self, priority: int) -> int | None:
        """Return a new request of a priority that runs from now on; None if it has to wait, or others do."""
        if self._priorities or len(self._running) >= self._limit or self._counts[priority] >= self._shares[priority]:
            return None
        self._last += 1
        self._running[self._last] = priority
        self._counts[priority] += 1
        return self._last

    def begin(self) -> int | None:
        """Return the request that runs from now on; None if none may."""
        if len(self._running) >= self._limit:
            return None
        for priority, waiting in enumerate(self._waiting):
            if self._counts[priority] >= self._shares[priority]:
                continue
            while waiting:
                _, request = heapq.heappop(waiting)
                if self._priorities.pop(request, None) is not None:
                    self._running[request] = priority
                    self._counts[priority] += 1
                    return request
        return None

    def leave(self, request: int) -> None:
        """Remove a request that has run, or that was withdrawn."""
        priority = self._running.pop(request, None)
        if priority is not None:
            self._counts[priority] -= 1
        else:
            self._priorities.pop(request, None)

    def waiting_of(self, priority: int) -> list[int]:
        """Return the requests of a priority that wait."""
        return [request for request, each in self._priorities.items() if each == priority]
