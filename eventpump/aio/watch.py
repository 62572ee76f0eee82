"""Runs user code step by step, to detect steps that block the event loop."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from typing import Any, Self, TypeVar

from eventpump.core.loop_load import NOTED_STEP

_T = TypeVar("_T")


class Watched(Awaitable[_T]):
    """Awaits an awaitable, and reports steps that blocked the event loop.

    Args:
        work: The work; None until `again` is called.
        clock: Read twice per step; in seconds, excluding the time in which the machine is suspended.
        threshold: Seconds; shorter steps are not reported.
        blocked: Called with the duration of a longer step, in seconds.
        stepped: Called with the duration of every step longer than `NOTED_STEP`, in seconds.
        waits: Called after every step but the last: the work waits. None for nothing.
    """

    __slots__ = ("_blocked", "_clock", "_stepped", "_threshold", "_waits", "_work", "ended", "is_closing")

    def __init__(
        self,
        work: Awaitable[_T] | None,
        clock: Callable[[], float],
        threshold: float,
        blocked: Callable[[float], None],
        stepped: Callable[[float], None],
        waits: Callable[[], None] | None = None,
    ) -> None:
        self._work = work
        self._clock = clock
        self._threshold = threshold
        self._blocked = blocked
        self._stepped = stepped
        self._waits = waits
        self.ended = 0.0
        """When the last step ended, by the clock."""
        self.is_closing = False
        """Whether it is being closed: the `GeneratorExit` in the work is not the work's own."""

    def again(self, work: Awaitable[_T]) -> Self:
        """Watch other work, in place of an object of its own for it. Return this object, to be awaited at once."""
        self._work = work
        return self

    def __await__(self) -> Generator[Any, Any, _T]:
        # What was done is not kept.
        work, self._work = self._work, None
        assert work is not None
        steps = work.__await__()
        clock, threshold = self._clock, self._threshold
        error: BaseException | None = None
        while True:
            began = clock()
            try:
                # As in PEP 380, except for values sent in: an event loop sends none.
                waits_for = next(steps) if error is None else steps.throw(error)
            except StopIteration as stop:
                return stop.value  # type: ignore[no-any-return]  # StopIteration is not typed
            except GeneratorExit as escaped:
                # As in PEP 479 for StopIteration: raised by the code itself it is an error, and does not close this
                # awaitable.
                raise RuntimeError("the code raised GeneratorExit") from escaped
            finally:
                ended = self.ended = clock()
                took = ended - began
                if took > NOTED_STEP:
                    self._stepped(took)
                    if took > threshold:
                        self._blocked(took)
            error = None
            if self._waits is not None:
                self._waits()
            try:
                yield waits_for
            except GeneratorExit:
                self.is_closing = True
                steps.close()
                raise
            except BaseException as thrown:
                error = thrown
