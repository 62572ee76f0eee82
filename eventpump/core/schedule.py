"""A schedule: names, each with the time at which it is due."""

from __future__ import annotations

import heapq


class Schedule:
    """Names with the times they are due at, in seconds on the caller's clock."""

    def __init__(self) -> None:
        self._due: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._due)

    def set(self, name: str, due: float) -> None:
        """Set the time at which a name is due, replacing an earlier one."""
        self._due[name] = due
        heapq.heappush(self._heap, (due, name))

    def remove(self, name: str) -> None:
        self._due.pop(name, None)

    def due_at(self, name: str) -> float | None:
        """Return when a name is due; None if it is not scheduled."""
        return self._due.get(name)

    def take(self, now: float) -> list[str]:
        """Remove and return the names that are due, the longest due first."""
        due: list[str] = []
        while (first := self.first) is not None and first <= now:
            name = heapq.heappop(self._heap)[1]
            del self._due[name]
            due.append(name)
        return due

    @property
    def first(self) -> float | None:
        """When the next name is due; None if there is none."""
        heap = self._heap
        while heap and self._due.get(heap[0][1]) != heap[0][0]:
            heapq.heappop(heap)
        return heap[0][0] if heap else None
