"""Where a suspended coroutine waits."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from eventpump.aio.frames import waits_at


async def _sleeps() -> None:
    await asyncio.sleep(1000)


async def _calls() -> None:
    await _sleeps()


async def _waits_for_a_task() -> None:
    await asyncio.create_task(_calls())


async def _waits_for_a_future() -> None:
    await asyncio.get_running_loop().create_future()


async def _iterates() -> None:
    async def numbers() -> Any:
        await asyncio.sleep(1000)
        yield 1

    async for _ in numbers():
        pass


def _line(function: Callable[..., Any], text: str = "await") -> int:
    lines = Path(__file__).read_text().splitlines()
    first = function.__code__.co_firstlineno
    return next(number for number in range(first + 1, len(lines)) if text in lines[number - 1])


@pytest.mark.parametrize(
    ("work", "deepest", "awaited"),
    [
        (_sleeps, _sleeps, ", for asyncio.tasks.sleep"),
        (_calls, _sleeps, ", for asyncio.tasks.sleep"),
        (_waits_for_a_task, _sleeps, ", for asyncio.tasks.sleep"),
        (_waits_for_a_future, _waits_for_a_future, ""),
    ],
)
async def test_waits_at_is_the_innermost_line_of_user_code(
    work: Callable[[], Coroutine[Any, Any, None]], deepest: Callable[..., Any], awaited: str
) -> None:
    """Through calls and tasks; with the function of a library that it awaits there."""
    coroutine = work()
    task = asyncio.create_task(coroutine)
    await asyncio.sleep(1)
    assert waits_at(coroutine, task) == f"{__file__}:{_line(deepest)} {deepest.__name__}{awaited}"
    task.cancel()
    await asyncio.wait({task})
    assert waits_at(coroutine, task) is None


async def test_waits_at_within_an_async_generator_is_the_line_that_iterates() -> None:
    """What an asynchronous generator awaits is not public, and the line before it is."""
    coroutine = _iterates()
    task = asyncio.create_task(coroutine)
    await asyncio.sleep(1)
    where = waits_at(coroutine, task)
    assert where is not None
    assert where.startswith(f"{__file__}:{_line(_iterates, 'async for')} _iterates")
    task.cancel()
    await asyncio.wait({task})


async def test_waits_at_leaves_out_libraries_but_the_one_that_the_code_is_of() -> None:
    """A handler that is itself installed has its own line; what it calls in other libraries is what it awaits."""
    code = "async def outer(call):\n    await call()\n"
    scopes: list[dict[str, Any]] = [{"__name__": "installed.handlers"}, {"__name__": "driver.pool"}]
    for scope, name in zip(scopes, ("handlers.py", "pool.py"), strict=True):
        exec(compile(code, f"{json.__file__.rpartition('/json/')[0]}/site-packages/{name}", "exec"), scope)
    inner = scopes[1]["outer"]
    coroutine = scopes[0]["outer"](lambda: inner(lambda: asyncio.sleep(1000)))
    task = asyncio.create_task(coroutine)
    await asyncio.sleep(1)
    where = waits_at(coroutine, task)
    assert where is not None
    assert where.endswith("site-packages/handlers.py:2 outer, for driver.pool.outer")
    task.cancel()
    await asyncio.wait({task})


async def test_waits_at_of_what_is_no_coroutine_is_not_known() -> None:
    """Any awaitable may be a handler's result."""
    assert waits_at(asyncio.get_running_loop().create_future(), None) is None
