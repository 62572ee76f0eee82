"""Virtual time: an event loop whose clock jumps to the next timer when nothing else is left to do.

An hour of renewals takes milliseconds, and waiting for something that can never happen is an error instead of a hang.
Not for sockets. Work in threads is waited for in real time when it went through the loop's executor.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from typing import Any, TypeVar, TypeVarTuple, Unpack

_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")

_DEADLOCK_AFTER = 1.0
"""Real seconds that an unknown thread may take to wake the loop."""


class DeadlockError(RuntimeError):
    """Every task waits, and no timer is left to wake one."""


class _JumpingSelector(selectors.BaseSelector):
    """Asks the real selector what is ready; if nothing is, advances the time instead of waiting."""

    def __init__(self, jump: Callable[[float], None], is_working: Callable[[], bool]) -> None:
        self._real = selectors.DefaultSelector()
        self._jump = jump
        self._is_working = is_working

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = self._real.select(0)
        if ready or timeout == 0:
            return ready
        if self._is_working():
            return self._real.select(None)
        if timeout is None:
            ready = self._real.select(_DEADLOCK_AFTER)
            if not ready:
                raise DeadlockError("every task waits for something that cannot happen any more")
            return ready
        self._jump(timeout)
        return []

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._real.unregister(fileobj)

    def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.modify(fileobj, events, data)

    def close(self) -> None:
        self._real.close()

    def get_key(self, fileobj: Any) -> selectors.SelectorKey:
        return self._real.get_key(fileobj)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._real.get_map()


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop on virtual time, for tests.

    With pytest-asyncio, give it to the `pytest_asyncio_loop_factories` hook of a directory's conftest.
    """

    def __init__(self) -> None:
        self._now = 1000.0
        self._working = 0
        super().__init__(_JumpingSelector(self.advance, lambda: self._working > 0))

    def time(self) -> float:
        """The virtual time, in seconds."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Advance the time at once; called from a task, as if that task had blocked the loop for that long."""
        self._now += seconds

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[Unpack[_Ts]], _T], *args: *_Ts
    ) -> asyncio.Future[_T]:
        future = super().run_in_executor(executor, func, *args)
        self._working += 1
        future.add_done_callback(self._worked)
        return future

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """Wait until the threads of the executor have ended: in real time, while virtual time stands still.

        Args:
            timeout: Not used. `asyncio.Runner` passes 300 s since Python 3.12, which would be over at once here.
                Default: None.
        """
        self._working += 1
        try:
            await super().shutdown_default_executor()
        finally:
            self._working -= 1

    def _worked(self, _: asyncio.Future[Any]) -> None:
        self._working -= 1


class VirtualClock:
    """`interfaces.Clock` on the time of a virtual loop.

    Args:
        loop: The loop; None for the one that runs when the clock is read.
        epoch: The value of `time` when the loop's time is 0, in seconds since the Unix epoch. Default: 1,700,000,000.0.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None, *, epoch: float = 1_700_000_000.0) -> None:
        self._loop = loop
        self._epoch = epoch

    def monotonic(self) -> float:
        """The loop's time, in seconds."""
        return (self._loop or asyncio.get_running_loop()).time()

    def time(self) -> float:
        """Seconds since the Unix epoch."""
        return self._epoch + self.monotonic()

    def block(self, seconds: float) -> None:
        """Advance the time as if the calling task had blocked the loop for that long."""
        loop = self._loop or asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        loop.advance(seconds)
