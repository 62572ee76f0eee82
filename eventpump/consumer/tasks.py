"""Tasks that have an owner."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


class TaskSet:
    """The tasks of one owner, which ends them all. Unlike a `TaskGroup`, one that fails does not end the others.

    :param failed: is called with the name and the error of a task that raised what it should have handled; with a
        `CancelledError` where something else than this set cancelled it, or what it called did so by itself.
    """

    def __init__(self, failed: Callable[[str, BaseException], None]) -> None:
        self._failed = failed
        self._tasks: set[asyncio.Task[Any]] = set()
        self._cancelled: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def spawn(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Start a task."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        is_ours = task in self._cancelled
        self._cancelled.discard(task)
        if task.cancelled():
            if not is_ours:
                self._failed(task.get_name(), asyncio.CancelledError("cancelled, and not by eventpump"))
        elif (error := task.exception()) is not None:
            self._failed(task.get_name(), error)

    def drop(self, task: asyncio.Task[Any]) -> None:
        """Cancel one of them, without waiting for its end."""
        if task in self._tasks:
            self._cancelled.add(task)
            task.cancel()

    async def wait(self, timeout: float) -> bool:
        """Wait for all of them, for a time in seconds. True where none is left. Cancelled, they go on."""
        deadline = asyncio.get_running_loop().time() + timeout
        while self._tasks:
            remaining = deadline - asyncio.get_running_loop().time()
            if remaining <= 0:
                return False
            await asyncio.wait(self._tasks, timeout=remaining)
        return True

    async def cancel(self, timeout: float) -> bool:
        """Cancel all of them, and wait for their end, for a time in seconds. True where none is left."""
        for task in self._tasks:
            self.drop(task)
        return await self.wait(timeout)
