"""Waiting for a condition on what a test's own objects have recorded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")


class Changes:
    """Wakes those who wait for a condition each time that something changed."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()

    def happened(self) -> None:
        """Have every condition that is waited for evaluated again."""
        self._changed.set()

    async def until(self, found: Callable[[], _T], within: float | None) -> _T:
        """Wait until a question has an answer that is true.

        Args:
            found: The question, asked at once and after every change.
            within: The longest wait, in seconds; None for no limit.

        Returns:
            The answer.

        Raises:
            TimeoutError: There was none in time.
        """
        async with asyncio.timeout(within):
            while not (answer := found()):
                self._changed.clear()
                await self._changed.wait()
            return answer
