"""Reads what an event loop holds, in the thread that collects metrics."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final, Generic, TypeVar

_T = TypeVar("_T")

ANSWER_TIME: Final = 1.0
"""Seconds that a thread which collects metrics waits for an event loop."""


class LoopQuestion(Generic[_T]):
    """Something to be read on the running event loop, by any thread."""

    def __init__(self, read: Callable[[], _T]) -> None:
        self._read = read
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._not_before = 0.0

    def answer(self) -> _T | None:
        """Return what is read now. Another thread than the loop's waits for it; None if the loop does not answer."""
        if threading.get_ident() == self._thread:
            return self._read()
        if self._loop.is_closed() or time.monotonic() < self._not_before:
            return None
        found: Future[_T] = Future()

        def read() -> None:
            if not found.set_running_or_notify_cancel():
                return  # it is not waited for any more
            try:
                found.set_result(self._read())
            except Exception as error:
                found.set_exception(error)

        try:
            self._loop.call_soon_threadsafe(read)
            return found.result(ANSWER_TIME)
        except TimeoutError:
            # One wait per collection is enough: what is asked next fails at once.
            found.cancel()
            self._not_before = time.monotonic() + ANSWER_TIME
        except RuntimeError:
            if not self._loop.is_closed():  # else it was closed meanwhile
                raise
        return None
