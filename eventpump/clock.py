"""The clock that stores and hosts use unless they are given one."""

from __future__ import annotations

import asyncio
import time


class LoopClock:
    """The running loop's time, so that on a loop with virtual time leases expire in virtual time."""

    def monotonic(self) -> float:
        """Seconds on the running loop's clock."""
        return asyncio.get_running_loop().time()

    def time(self) -> float:
        """Seconds since the Unix epoch."""
        return time.time()
