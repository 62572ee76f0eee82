"""The event loop that an object belongs to: that of its first use."""

from __future__ import annotations

import asyncio
import threading
import warnings
from asyncio import _get_running_loop  # None where no loop runs, without an exception
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from typing import Any, Final

from eventpump.errors import ClosedError

_BINDING: Final = threading.Lock()


class HomeLoop:
    """The event loop that an object belongs to: that of its first use. No other one may use it.

    If the loop ends, or the object is collected, before `close` or `release`, a `ResourceWarning` names the object. The
    end of a loop is noticed by its `shutdown_asyncgens`, which `asyncio.run`, `asyncio.Runner` and pytest-asyncio call.

    Args:
        name: The class of the object, for errors and the warning.
        lost: Returns what is lost if the loop ends first, such as "3 events in its buffer"; "" for nothing.
        on_end: Called and awaited on the loop, once, before the warning is issued.
        warns: Whether there is a warning. False for parts of an object that has one of its own.
    """

    __slots__ = ("_is_closed", "_loop", "_lost", "_name", "_on_end", "_thread_id", "_warns", "_was_lost", "_watch")

    def __init__(
        self,
        name: str,
        *,
        lost: Callable[[], str] | None = None,
        on_end: Callable[[], Awaitable[object]] | None = None,
        warns: bool = True,
    ) -> None:
        self._name = name
        self._lost = lost
        self._on_end = on_end
        self._warns = warns
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread_id: int | None = None
        self._was_lost: str | None = None
        self._watch: AsyncGenerator[None, None] | None = None
        self._is_closed = False

    def represents(
        self, name: str, *, lost: Callable[[], str] | None = None, on_end: Callable[[], Awaitable[object]] | None = None
    ) -> None:
        """Name another object from now on: the one of which this object's owner is a part."""
        self._name, self._lost, self._on_end = name, lost, on_end

    @property
    def runner(self) -> Any:
        """An object whose `_thread_id` is that of the thread in which the loop runs; None, or none, if it does not.

        To compare it with the current thread's costs a tenth of `enter` on Python 3.11, which is for what is called for
        every event. asyncio's loops have it. For another kind of loop it is this object, which knows the thread of the
        first use and the loop's end, and not whether another loop runs in that thread meanwhile.
        """
        return self._loop if hasattr(self._loop, "_thread_id") else self

    def enter(self) -> None:
        """Called where the object is used. The first use on a loop binds it; in another one it raises `ClosedError`.
        0.1 to 0.3 µs."""
        running = _get_running_loop()
        if running is None or running is not self._loop:
            self._arrive(running)

    def _arrive(self, running: asyncio.AbstractEventLoop | None) -> None:
        with _BINDING:
            if self._is_closed:
                return
            if self._loop is None and running is not None:
                self._loop = running
                self._thread_id = threading.get_ident()
                if self._warns:
                    self._watch = self._until_end()
                    with suppress(StopIteration):
                        self._watch.__anext__().send(None)  # the loop notes it, and will close it at its end
                return
            loop = self._loop
        if loop is running:
            return  # bound meanwhile; or neither bound, nor does a loop run
        problem = "belongs to another event loop"
        if loop is not None and (loop.is_closed() or self._was_lost is not None):
            problem += ", which has ended"
            if lost := self._what_is_lost():
                problem += f" and lost {lost}"
        raise ClosedError(self._name, f"{problem}; create one in each event loop that uses it")

    def _what_is_lost(self) -> str:
        if self._was_lost is not None:
            return self._was_lost
        return "" if self._lost is None else self._lost()

    def release(self) -> None:
        """Called when the object is closed and may be opened again, on any loop."""
        watch, self._watch = self._watch, None
        self._loop = self._thread_id = None
        if watch is not None:
            with suppress(StopIteration):
                watch.aclose().send(None)

    def close(self) -> None:
        """Called when the object is closed for good: it is not used any more, and belongs to no loop."""
        self._is_closed = True
        self.release()

    async def _until_end(self) -> AsyncGenerator[None, None]:
        """Wait to be closed: by `release`, by the end of the loop, or as the object is collected."""
        try:
            yield
        finally:
            if self._watch is not None:
                await self._ended()

    async def _ended(self) -> None:
        self._thread_id = None
        lost = self._was_lost = self._what_is_lost()
        try:
            if self._on_end is not None:
                await self._on_end()
        finally:
            what = f"{self._name} was not closed before the end of its event loop"
            advice = "use it with `async with`, or await its `aclose()`"
            warnings.warn(f"{what}{f', which lost {lost}' if lost else ''}: {advice}", ResourceWarning, stacklevel=1)
