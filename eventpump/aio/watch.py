"""Runs the user's code step by step, to see which of it blocks the event loop."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from typing import Any, TypeVar

from eventpump.core.turns import NOTED_STEP

_T = TypeVar("_T")


class Watched(Awaitable[_T]):
    """Awaits something, and tells how long one of its steps kept the loop from turning.

    Args:
        clock: Read twice per step; seconds, not counting those for which the machine is suspended.
        threshold: Seconds; shorter steps are not told.
        blocked: Is called with the seconds of a longer one.
        stepped: Is called with the seconds of every step longer than `NOTED_STEP`.
    """

    __slots__ = ("_blocked", "_clock", "_stepped", "_threshold", "_work")

    def __init__(
        self,
        work: Awaitable[_T],
        clock: Callable[[], float],
        threshold: float,
        blocked: Callable[[float], None],
        stepped: Callable[[float], None],
    ) -> None:
        self._work = work
        self._clock = clock
        self._threshold = threshold
        self._blocked = blocked
        self._stepped = stepped

    def __await__(self) -> Generator[Any, Any, _T]:
        steps = self._work.__await__()
        clock, threshold = self._clock, self._threshold
        error: BaseException | None = None
        while True:
            began = clock()
            try:
                # As in PEP 380, but for values sent in: an event loop sends none.
                waits_for = next(steps) if error is None else steps.throw(error)
            except StopIteration as stop:
                return stop.value  # type: ignore[no-any-return]  # StopIteration is not typed
            except GeneratorExit as escaped:
                # As PEP 479 has it for StopIteration: out of the code itself it is a fault, and closes nothing of ours.
                raise RuntimeError("the code raised GeneratorExit") from escaped
            finally:
                took = clock() - began
                if took > NOTED_STEP:
                    self._stepped(took)
                    if took > threshold:
                        self._blocked(took)
            error = None
            try:
                yield waits_for
            except GeneratorExit:
                steps.close()
                raise
            except BaseException as thrown:
                error = thrown
