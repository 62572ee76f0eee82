"""A future whose task goes on within the call that completes it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import Context, copy_context
from typing import TYPE_CHECKING, Any, TypeVar

from eventpump.compiled import core

_T = TypeVar("_T")


class WakeupInPython(asyncio.Future[_T]):
    """What one task waits for, as for any future; `complete` runs the task at once where no other task runs.

    A future has its task run in the next turn of the event loop. Where a callback of the loop completes it, as that
    of a socket does, that is one more turn, in which nothing else is done. The task is run as the loop would run it:
    with its own context variables, as the current task, until it waits for something else.

    Await it at once; only one task may. In the compiled build `Wakeup` is a class of the core, which does the same.
    """

    __slots__ = ("_resumes",)

    def __init__(self, *, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop=loop)
        self._resumes: tuple[Callable[[Any], object], Context] | None = None

    def add_done_callback(self, fn: Callable[[Any], object], /, *, context: Context | None = None) -> None:
        if self._resumes is None and not self.done():
            self._resumes = fn, copy_context() if context is None else context
        else:
            super().add_done_callback(fn, context=context)

    def remove_done_callback(self, fn: Callable[[Any], object], /) -> int:
        removed = super().remove_done_callback(fn)
        if self._resumes is not None and self._resumes[0] == fn:
            self._resumes = None
            removed += 1
        return removed

    def set_result(self, result: _T, /) -> None:
        super().set_result(result)
        self._resume_later()

    def set_exception(self, exception: type | BaseException, /) -> None:
        super().set_exception(exception)
        self._resume_later()

    def cancel(self, msg: Any | None = None) -> bool:
        is_cancelled = super().cancel(msg)
        self._resume_later()
        return is_cancelled

    def complete(self, result: _T) -> None:
        """Set the result, and run the task that waits until it waits again. Does nothing where it is done.

        Within another task this one is run in the next turn, as by `set_result`.
        """
        if self.done():
            return
        super().set_result(result)
        # Taken at once: a signal handler may cancel the task between any two of the calls here.
        resumes, self._resumes = self._resumes, None
        if resumes is None:
            return
        resume, context = resumes
        if asyncio.current_task(self.get_loop()) is not None:
            self.get_loop().call_soon(resume, self, context=context)
            return
        try:
            context.run(resume, self)
        except RuntimeError:
            # The callback runs in this very context, which the task's maker has given to both, and none is entered
            # twice. A task raises no such error.
            self.get_loop().call_soon(resume, self, context=context)
        except BaseException as error:
            # A task raises these only, which end the loop: not the work of the caller, before that is done.
            self.get_loop().call_soon(_raise, error)

    def end(self: WakeupInPython[None], error: BaseException | None) -> None:
        """Complete it with None, or with an error, which is for the next turn. Does nothing where it is done."""
        if error is None:
            self.complete(None)
        elif not self.done():
            self.set_exception(error)

    def _resume_later(self) -> None:
        if self._resumes is not None:
            (resume, context), self._resumes = self._resumes, None
            self.get_loop().call_soon(resume, self, context=context)


def _raise(error: BaseException) -> None:
    raise error


if TYPE_CHECKING or core is None:
    Wakeup = WakeupInPython
else:
    core.wake_tasks(
        asyncio.current_task,
        asyncio._enter_task,  # noqa: SLF001 - documented, in "Extending"
        asyncio._leave_task,  # noqa: SLF001 - likewise
        asyncio.CancelledError,
        asyncio.InvalidStateError,
        _raise,
    )
    Wakeup = core.Wakeup
