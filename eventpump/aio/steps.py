"""Steps of awaitables: in a context of their own, and the rest of work whose first step is done."""

from __future__ import annotations

from collections.abc import Awaitable, Generator
from contextvars import Context
from typing import Any, TypeVar

_T = TypeVar("_T")


class InContext(Awaitable[_T]):
    """Awaits some work whose steps run in a context, as those of a task do, but in the current task."""

    __slots__ = ("_context", "_work")

    def __init__(self, work: Awaitable[_T], context: Context) -> None:
        self._work = work
        self._context = context

    def __await__(self) -> Generator[Any, Any, _T]:
        steps, run = self._work.__await__(), self._context.run
        error: BaseException | None = None
        while True:
            try:
                # As in PEP 380, except for values sent in: an event loop sends none.
                waits_for = run(next, steps) if error is None else run(steps.throw, error)
            except StopIteration as stop:
                return stop.value  # type: ignore[no-any-return]  # StopIteration is not typed
            error = None
            try:
                yield waits_for
            except GeneratorExit:
                run(steps.close)
                raise
            except BaseException as thrown:
                error = thrown


class Rest(Awaitable[_T]):
    """The rest of some work, to be awaited at once by the task that has made its first step.

    Attributes:
        error: What is raised where the work waits, in place of waiting: the task was cancelled meanwhile.
    """

    __slots__ = ("_steps", "_waits_for", "error")

    def __init__(self, steps: Generator[Any, Any, _T], waits_for: object) -> None:
        self._steps = steps
        self._waits_for = waits_for
        self.error: BaseException | None = None

    def __await__(self) -> Generator[Any, Any, _T]:
        steps, waits_for = self._steps, self._waits_for
        self._waits_for = None  # it may refer to much, and this object may be kept
        while True:
            try:
                if self.error is not None:
                    error, self.error = self.error, None
                    raise error
                yield waits_for
            except GeneratorExit:
                steps.close()
                raise
            except BaseException as error:
                try:
                    waits_for = steps.throw(error)
                except StopIteration as stop:
                    return stop.value  # type: ignore[no-any-return]  # StopIteration is not typed
            else:
                return (yield from steps)


class AllDone(Awaitable[_T]):
    """Some work of which the first step was all: returns or raises what it did."""

    __slots__ = ("_result", "error")

    def __init__(self, result: _T, error: BaseException | None = None) -> None:
        self._result = result
        self.error = error

    def __await__(self) -> Generator[Any, Any, _T]:
        if self.error is not None:
            raise self.error
        yield from ()  # a generator: what this returns has to be an iterator
        return self._result
