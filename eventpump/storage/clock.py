"""The clock a store uses unless it is given one."""

from __future__ import annotations

import asyncio
import time


class LoopClock:
    """The running loop's time, so that leases on a loop with virtual time expire in virtual time."""

    def monotonic(self) -> float:
        """Seconds on the running loop's clock."""
        return asyncio.get_running_loop().time()

    def time(self) -> float:
        """Seconds since the Unix epoch."""
        return time.time()
