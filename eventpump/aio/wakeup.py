"""A future whose task goes on within the call that completes it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import Context, copy_context
from typing import Any, TypeVar

_T = TypeVar("_T")


class Wakeup(asyncio.Future[_T]):
    """What one task waits for, as for any future; `complete` runs the task at once where no other task runs.

    A future has its task run in the next turn of the event loop. Where a callback of the loop completes it, as that
    of a socket does, that is one more turn, in which nothing else is done. The task is run as the loop would run it:
    with its own context variables, as the current task, until it waits for something else.

    Await it at once; only one task may. `resumes` has to be set to None when it is made: the class has no
    constructor, because one is made for each wait.
    """

    __slots__ = ("resumes",)

    resumes: tuple[Callable[[Any], object], Context] | None
    """What the task that waits has asked to be called, and in which context."""

    def add_done_callback(self, fn: Callable[[Any], object], /, *, context: Context | None = None) -> None:
        if self.resumes is None and not self.done():
            self.resumes = fn, copy_context() if context is None else context
        else:
            super().add_done_callback(fn, context=context)

    def remove_done_callback(self, fn: Callable[[Any], object], /) -> int:
        removed = super().remove_done_callback(fn)
        if self.resumes is not None and self.resumes[0] == fn:
            self.resumes = None
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
        resumes, self.resumes = self.resumes, None
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

    def end(self: Wakeup[None], error: BaseException | None) -> None:
        """Complete it with None, or with an error, which is for the next turn. Does nothing where it is done."""
        if error is None:
            self.complete(None)
        elif not self.done():
            self.set_exception(error)

    def _resume_later(self) -> None:
        if self.resumes is not None:
            (resume, context), self.resumes = self.resumes, None
            self.get_loop().call_soon(resume, self, context=context)


def _raise(error: BaseException) -> None:
    raise error
