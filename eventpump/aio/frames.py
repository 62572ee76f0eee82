"""Finds the line at which a suspended coroutine waits."""

from __future__ import annotations

import asyncio
import inspect
import sysconfig
from collections.abc import Iterator
from types import FrameType
from typing import Any, Final

_DEEPEST: Final = 200
_OURS: Final = frozenset({"eventpump", "asyncio", "concurrent"})
_LIBRARIES: Final = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def waits_at(work: object, task: asyncio.Task[Any] | None) -> str | None:
    """Return where user code waits, as "file:line function", and what it awaits there if that is a known function.

    That is its innermost frame that is neither this library's nor another's: libraries are what is installed, except
    for the package that the code itself begins in.

    Args:
        work: The coroutine that was called, suspended.
        task: The task that it runs in, which may wait for another task; None where that is not known.
    """
    own, frame, awaited = "", None, ""
    for each in _frames(work, task):
        package = _package(each)
        if not own and package not in _OURS:
            own = package
        if package not in _OURS and (package == own or not each.f_code.co_filename.startswith(_LIBRARIES)):
            frame, awaited = each, ""
        elif frame is not None and not awaited:
            awaited = f"{each.f_globals.get('__name__', '')}.{each.f_code.co_qualname}"
    if frame is None:
        return None
    where = f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_qualname}"
    return f"{where}, for {awaited}" if awaited else where


def stands_at(task: asyncio.Task[Any]) -> str:
    """Return where a task that waits stands, as "file:line function": its innermost frame that is not asyncio's."""
    frames = [each for each in _frames(task.get_coro(), None) if _package(each) != "asyncio"]
    if not frames:
        return "?"
    return f"{frames[-1].f_code.co_filename}:{frames[-1].f_lineno} {frames[-1].f_code.co_qualname}"


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _frames(work: object, task: asyncio.Task[Any] | None) -> Iterator[FrameType]:
    """Yield the frames of a suspended coroutine, from the outermost one on, and of the tasks that it waits for."""
    for _ in range(_DEEPEST):
        inner: object
        if inspect.iscoroutine(work):
            frame, inner = work.cr_frame, work.cr_await
        elif inspect.isgenerator(work):
            frame, inner = work.gi_frame, work.gi_yieldfrom
        else:
            # The future that a task waits for is not public; without it, the frames end here.
            waiter = getattr(task, "_fut_waiter", None)
            if not isinstance(waiter, asyncio.Task):
                return
            work, task = waiter.get_coro(), waiter
            continue
        if frame is None:
            return
        yield frame
        work = inner
