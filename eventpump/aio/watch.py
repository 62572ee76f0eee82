"""Runs user code step by step, to detect steps that block the event loop."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from typing import Any, Final, Self, TypeVar

from eventpump.core.loop_load import NOTED_STEP

_T = TypeVar("_T")

ESCAPED: Final = "the code raised GeneratorExit"
"""What is wrong with code that raises one by itself."""


class Watched(Awaitable[_T]):
    """Awaits an awaitable, and reports steps that blocked the event loop.

    Args:
        clock: Read twice per step; in seconds, excluding the time in which the machine is suspended.
        threshold: Seconds; shorter steps are not reported.
        blocked: Called with the duration of a longer step, in seconds.
        stepped: Called with the duration of every step longer than `NOTED_STEP`, in seconds.
    """

    __slots__ = ("_begun", "_blocked", "_clock", "_stepped", "_threshold", "_waits", "_work", "ended", "is_closing")

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
        self._begun: tuple[Generator[Any, Any, Any], object] | None = None
        self._clock = clock
        self._threshold = threshold
        self._blocked = blocked
        self._stepped = stepped
        self._waits = waits
        self.ended = 0.0
        """When the last step ended, by the clock."""
        self.is_closing = False
        """Whether it is being closed: the `GeneratorExit` in the work is not the work's own."""

    def step(self, steps: Generator[Any, Any, Any], error: BaseException | None, began: float) -> Any:
        """Do one step of what an awaitable's `__await__` has returned, and measure it.

        Returns:
            What it waits for. As in PEP 380, except for values sent in: an event loop sends none.

        Raises:
            StopIteration: It has ended.
            BaseException: What it raises.
        """
        try:
            return next(steps) if error is None else steps.throw(error)
        except GeneratorExit as escaped:
            # As in PEP 479 for StopIteration: raised by the code itself it is an error, and does not close this
            # awaitable.
            raise RuntimeError(ESCAPED) from escaped
        finally:
            ended = self.ended = self._clock()
            if ended - began > NOTED_STEP:
                self.noted(ended - began)

    def noted(self, took: float) -> None:
        """Report a step that took longer than `NOTED_STEP`."""
        self._stepped(took)
        if took > self._threshold:
            self._blocked(took)

    def rest(self, steps: Generator[Any, Any, Any], waits_for: object) -> Self:
        """Return this object, to be awaited at once for what follows a first `step`, which has returned `waits_for`."""
        self._begun = steps, waits_for
        return self

    def __await__(self) -> Generator[Any, Any, _T]:
        try:
            if self._begun is None:
                # What was done is not kept.
                work, self._work = self._work, None
                assert work is not None
                steps: Generator[Any, Any, Any] = work.__await__()
                waits_for = self.step(steps, None, self._clock())
            else:
                (steps, waits_for), self._begun = self._begun, None
            while True:
                if self._waits is not None:
                    self._waits()
                error: BaseException | None = None
                try:
                    yield waits_for
                except GeneratorExit:
                    self.is_closing = True
                    steps.close()
                    raise
                except BaseException as thrown:
                    error = thrown
                waits_for = self.step(steps, error, self._clock())
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]  # StopIteration is not typed
