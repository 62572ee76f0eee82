"""Says on a signal what a command is doing: its hosts, and the line at which each task stands. Only commands use it."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final, Protocol, TypeVar
from weakref import WeakSet

from eventpump.aio.frames import stands_at


class Describes(Protocol):
    """What can say what it is doing."""

    def describe(self) -> object:
        """Return what it is doing now; `str` of it is shown."""


_D = TypeVar("_D", bound=Describes)

_SHOWN: Final[WeakSet[Describes]] = WeakSet()

_MOST_TASKS: Final = 200


def shown(made: _D) -> _D:
    """Show what something does, too, as long as it exists. Return it."""
    _SHOWN.add(made)
    return made


@contextmanager
def answering_signal(write: Callable[[str], None]) -> Iterator[None]:
    """Write what the program is doing whenever it gets SIGUSR1, also while Python code blocks its event loop.

    Outside of the main thread, and where there is no such signal, nothing is changed.

    Args:
        write: Called with the text. It is called between any two steps of the program, and must not use its objects.
    """
    number = getattr(signal, "SIGUSR1", None)
    if number is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(number, lambda _, frame: write(now(frame)))
    try:
        yield
    finally:
        signal.signal(number, signal.SIG_DFL if before is None else before)


def now(frame: FrameType | None) -> str:
    """Return what the program is doing, which was interrupted in this frame, if that is known."""
    here = "" if frame is None else f" at {frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_qualname}"
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return f"no event loop runs; it is{here}"
    parts = [_described(each) for each in list(_SHOWN)]
    current = asyncio.current_task(loop)
    tasks = sorted(asyncio.all_tasks(loop) - {current}, key=lambda task: task.get_name())
    lines = [] if current is None else [f"task {current.get_name()} runs{here}"]
    lines += [f"task {task.get_name()} waits at {stands_at(task)}" for task in tasks[:_MOST_TASKS]]
    if len(tasks) > _MOST_TASKS:
        lines.append(f"and {len(tasks) - _MOST_TASKS} tasks more")
    return "\n".join([*parts, *lines])


def _described(each: Describes) -> str:
    try:
        return str(each.describe())
    except Exception as error:  # it was interrupted in the middle of a change, or its loop has ended
        return f"{type(each).__name__}: it cannot be described now ({type(error).__name__})"
