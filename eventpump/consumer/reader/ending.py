"""Detects that retention has removed the rest of a range: no event follows, and the service does not report it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from eventpump.aio.tasks import TaskSet
from eventpump.errors import EventPumpError
from eventpump.interfaces import PartitionProperties

QUIET = 15.0
"""Seconds without an event after which the service is asked, and again until its answer counts."""

_log = logging.getLogger("eventpump.consumer")


class RangeWatch:
    """Finds out from the partition's properties that the rest of a range is gone. It asks only while nothing arrives.

    The properties describe what the service holds, and not what it has already sent: the range is over when nothing has
    arrived for the same time again.

    Args:
        ask: Reads the partition's properties.
        is_gone: Returns whether a partition with these properties holds nothing of the range and never will.
        wake: Called when `is_over` has to be called again.
    """

    def __init__(
        self,
        ask: Callable[[], Awaitable[PartitionProperties]],
        is_gone: Callable[[PartitionProperties], bool],
        wake: Callable[[], None],
    ) -> None:
        self._ask = ask
        self._is_gone = is_gone
        self._wake = wake
        self._tasks = TaskSet(self._failed)
        self._newest: bytes | None = None
        self._quiet_since = asyncio.get_running_loop().time()
        self._is_known_gone = False

    def is_over(self, newest: bytes | None) -> bool:
        """Return whether no event of the range follows the newest message received.
        All received ones have been read."""
        now = asyncio.get_running_loop().time()
        if newest is not self._newest:
            self._newest, self._quiet_since = newest, now
        if now - self._quiet_since < QUIET or self._tasks:
            return False
        if not self._is_known_gone:
            self._tasks.spawn(self._find_out(), "look for the rest of a range")
        return self._is_known_gone

    @property
    def patience(self) -> float | None:
        """Seconds after which to call `is_over` again; None for not before `wake`."""
        if self._tasks:
            return None
        return max(0.0, self._quiet_since + QUIET - asyncio.get_running_loop().time())

    async def _find_out(self) -> None:
        try:
            self._is_known_gone = self._is_gone(await self._ask())
        except EventPumpError as error:
            _log.debug("it is not known whether the rest of a range is gone: %s", error)
        finally:
            self._quiet_since = asyncio.get_running_loop().time()
            # Later, when this task is no longer in the set.
            asyncio.get_running_loop().call_soon(self._wake)

    @staticmethod
    def _failed(name: str, error: BaseException) -> None:
        _log.error("%s: failed", name, exc_info=error)

    async def aclose(self, timeout: float) -> None:
        """Cancel the task, and wait for that so many seconds."""
        await self._tasks.cancel(timeout)
