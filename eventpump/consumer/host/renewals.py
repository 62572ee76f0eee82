"""When each lease of a host is renewed: the times, and one timer for all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from eventpump.core.schedule import Schedule
from eventpump.interfaces import Clock


class RenewalTimes:
    """Calls `on_due` when the lease of a partition is due to be renewed. Each time that is set counts once."""

    def __init__(self, clock: Clock, on_due: Callable[[str], None]) -> None:
        self._clock = clock
        self._on_due = on_due
        self._due = Schedule()
        self._timer: asyncio.TimerHandle | None = None
        self._is_stopped = False

    def set(self, partition_id: str, due_at: float) -> None:
        """Set the time of a partition, replacing an earlier one."""
        self._due.set(partition_id, due_at)
        self._set_timer()

    def due_at(self, partition_id: str) -> float | None:
        """Return the time of a partition; None if it has none."""
        return self._due.due_at(partition_id)

    def remove(self, partition_id: str) -> None:
        self._due.remove(partition_id)

    def stop(self) -> None:
        """Call no more."""
        self._is_stopped = True
        self._set_timer()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        first = self._due.first
        if first is not None and not self._is_stopped:
            delay = max(0.0, first - self._clock.monotonic())
            self._timer = asyncio.get_running_loop().call_later(delay, self._time_is_up)

    def _time_is_up(self) -> None:
        self._timer = None
        for partition_id in self._due.take(self._clock.monotonic()):
            self._on_due(partition_id)
        self._set_timer()
