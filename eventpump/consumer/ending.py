"""The end of a range that retention removes before it is read: nothing comes any more, and nothing says so."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from eventpump.aio.tasks import TaskSet
from eventpump.errors import EventPumpError
from eventpump.interfaces import PartitionProperties

QUIET = 15.0
"""Seconds without an event after which the service is asked, and after which its answer counts."""

_log = logging.getLogger("eventpump.consumer")


class RangeWatch:
    """Finds out by management that what is left of a range is gone. It asks only while nothing comes.

    An answer speaks of what the service holds, and not of what it has sent: the range is over once nothing has come for
    as long again.

    Args:
        ask: Reads the partition's properties.
        is_gone: Whether a partition as described holds nothing of the range and never will.
        wake: Is called when `is_over` has to be asked again.
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
        """Whether nothing of the range is left to come.

        Args:
            newest: The last message received, of which none waits to be read.
        """
        now = asyncio.get_running_loop().time()
        if newest is not self._newest:
            self._newest, self._quiet_since = newest, now
        if now - self._quiet_since < QUIET or self._tasks:
            return False
        if not self._is_known_gone:
            self._tasks.spawn(self._find_out(), "ask for what is left of a range")
        return self._is_known_gone

    @property
    def patience(self) -> float | None:
        """Seconds after which to ask `is_over` again; None: when woken."""
        if self._tasks:
            return None
        return max(0.0, self._quiet_since + QUIET - asyncio.get_running_loop().time())

    async def _find_out(self) -> None:
        try:
            self._is_known_gone = self._is_gone(await self._ask())
        except EventPumpError as error:
            _log.debug("what is left of a range is not known: %s", error)
        finally:
            self._quiet_since = asyncio.get_running_loop().time()
            # When this task is no longer in the set.
            asyncio.get_running_loop().call_soon(self._wake)

    @staticmethod
    def _failed(name: str, error: BaseException) -> None:
        _log.error("%s: failed", name, exc_info=error)

    async def aclose(self, timeout: float) -> None:
        """End its task.

        Args:
            timeout: Seconds to wait for that.
        """
        await self._tasks.cancel(timeout)
