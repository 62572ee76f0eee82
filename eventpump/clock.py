"""The clock that stores and hosts use unless they are given one."""

from __future__ import annotations

import asyncio
import functools
import os
import time
from collections.abc import Callable
from typing import Final, Protocol

_TRIES: Final = 5


class SuspendedTime:
    """How long the machine was suspended, by the distance of two clocks of which one stands still meanwhile.

    Args:
        running: The clock that stands still while the machine is suspended, in seconds.
        counting: The clock that goes on, in seconds.
    """

    def __init__(self, running: Callable[[], float], counting: Callable[[], float]) -> None:
        self._running = running
        self._counting = counting
        # A thread can be held up between two readings. Read in this order that makes the distance too large, and in
        # the other order too small: so what is found later never exceeds the truth, and without a suspension is 0.
        self._at_start = min(-running() + counting() for _ in range(_TRIES))
        self._since_start = 0.0

    @property
    def since_start(self) -> float:
        """Seconds of suspension since this object was made. Never less than before."""
        found = self._counting() - self._running() - self._at_start
        if found > self._since_start:
            self._since_start = found
        return self._since_start

    def reading(self, clock: Callable[[], float]) -> tuple[Callable[[], float], float] | None:
        """Return what reads a clock with the suspension since this object was made, and how far it is ahead of that.

        None if that takes two readings. One is enough of the clock that stands still while the machine is suspended:
        with the suspension it is the one that goes on, but for their distance at the start. That distance is too large
        rather than too small, so what is read this way does not exceed the truth either.
        """
        return (self._counting, self._at_start) if clock is self._running else None

    @property
    def in_all(self) -> float:
        """How far the clock that goes on is ahead of the other, in seconds."""
        return self._at_start + self.since_start


def _suspended_time() -> SuspendedTime | None:
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    if clock is None:
        return None
    try:
        return SuspendedTime(time.monotonic, functools.partial(time.clock_gettime, clock))
    except OSError:  # a kernel or a sandbox without that clock
        return None


_SUSPENDED: Final = _suspended_time()
"""One for the process: the readings of one clock, such as a store's, are compared with another's, such as a host's."""


@functools.cache
def _boot_id() -> str | None:
    """Return an id of the boot that `CLOCK_BOOTTIME` counts from; None if boots cannot be distinguished."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot_id = file.read().strip()
    except (OSError, ValueError):
        return None
    try:
        # Containers of one boot may have their clocks shifted against each other.
        namespace = os.readlink("/proc/self/ns/time")
    except OSError:  # a kernel that cannot shift them
        namespace = ""
    return f"{boot_id} {namespace}".strip() or None


def clock_of(loop: asyncio.AbstractEventLoop) -> Callable[[], float]:
    """Return what reads a loop's time, in seconds: of asyncio's own loops the function of C that their `time` calls."""
    is_own = getattr(loop.time, "__func__", None) is asyncio.BaseEventLoop.time
    return time.monotonic if is_own else loop.time


class _Monotonic(Protocol):
    def monotonic(self) -> float: ...


def reading_of(clock: _Monotonic) -> tuple[Callable[[], float], float]:
    """Return what reads a clock on the running loop, for one who does so often, and how far it is ahead of the clock.

    Of a `LoopClock` on a loop of asyncio's own, that is one function of C.
    """
    if type(clock) is LoopClock:
        now = clock_of(asyncio.get_running_loop())
        found = (now, 0.0) if _SUSPENDED is None else _SUSPENDED.reading(now)
        if found is not None:
            return found
    return clock.monotonic, 0.0


class LoopClock:
    """The running loop's time, so that on a loop with virtual time leases expire in virtual time.

    It includes the time that the machine is suspended, on systems that report it (Linux); Windows always includes it.
    """

    def monotonic(self) -> float:
        """Seconds on the running loop's clock, and those that the machine was suspended."""
        now = asyncio.get_running_loop().time()
        return now if _SUSPENDED is None else now + _SUSPENDED.since_start

    def time(self) -> float:
        """Seconds since the Unix epoch."""
        return time.time()

    @property
    def boot_id(self) -> str | None:
        """See `MachineClock`: None on systems other than Linux."""
        return None if _SUSPENDED is None else _boot_id()

    def boot_time(self) -> float:
        """Seconds since the machine was started, on the running loop's clock; see `MachineClock`."""
        now = asyncio.get_running_loop().time()
        return now if _SUSPENDED is None else now + _SUSPENDED.in_all
