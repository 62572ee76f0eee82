"""Measuring the CPU of the process itself, over the steady part of a run."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Mapping


def page_faults() -> int:
    """Return how many minor page faults this process has had: pages it got from the system without reading a disk."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


class Meter:
    """Counts events, and takes CPU, page faults and wall time between two counts: start-up and the end are left out.

    Args:
        first: The count at which the steady part begins, at the earliest.
        last: The count at which it ends, at the earliest.
        cpu: Seconds of CPU the process has used, over all its threads.
        wall: Seconds from a fixed moment.
        faults: How many page faults the process has had.
    """

    __slots__ = ("_began", "_cpu", "_ended", "_faults", "_first", "_last", "_wall", "count")

    def __init__(
        self,
        first: int,
        last: int,
        *,
        cpu: Callable[[], float] = time.process_time,
        wall: Callable[[], float] = time.perf_counter,
        faults: Callable[[], int] = page_faults,
    ) -> None:
        if not 0 <= first < last:
            raise ValueError("the steady part ends before it begins")
        self._first = first
        self._last = last
        self._cpu = cpu
        self._wall = wall
        self._faults = faults
        self._began: tuple[int, float, float, int] | None = None
        self._ended: tuple[int, float, float, int] | None = None
        self.count = 0
        """Events so far."""

    @property
    def is_done(self) -> bool:
        """Whether the steady part is over."""
        return self._ended is not None

    def add(self, events: int) -> None:
        """Count events in."""
        self.count += events
        if self._began is None:
            if self.count >= self._first:
                self._began = self._state()
        elif self._ended is None and self.count >= self._last:
            self._ended = self._state()

    def _state(self) -> tuple[int, float, float, int]:
        return self.count, self._cpu(), self._wall(), self._faults()

    def result(self) -> dict[str, float]:
        """Return the steady part's figures.

        `cost` is microseconds of CPU per event, `busy` CPU over wall time, `rate` events per second, `faults` minor
        page faults per event, `events` their number.
        """
        assert self._began is not None, "the steady part never began"
        assert self._ended is not None, "the steady part never ended"
        events, cpu, wall, faults = (after - before for before, after in zip(self._began, self._ended, strict=True))
        return {
            "cost": cpu / events * 1e6,
            "busy": cpu / wall,
            "rate": events / wall,
            "faults": faults / events,
            "events": float(events),
        }


def median_run(runs: list[Mapping[str, float]], by: str = "cost") -> Mapping[str, float]:
    """Return the run in the middle of a value; the lower of two."""
    return sorted(runs, key=lambda run: run[by])[(len(runs) - 1) // 2]
