"""Awaitables whose steps run in a context, or whose first step is done."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from typing import Any

import pytest

from eventpump.aio.steps import AllDone, InContext, Rest

_PLACE: ContextVar[str] = ContextVar("place", default="nowhere")

Work = Coroutine[Any, Any, str]


def _rest(work: Work) -> Awaitable[str]:
    steps = work.__await__()
    return Rest(steps, next(steps))


def _in_context(work: Work) -> Awaitable[str]:
    return InContext(work, copy_context())


either = pytest.mark.parametrize("wrapped", [_rest, _in_context], ids=["rest", "in a context"])


async def _awaited(wrapped: Callable[[Work], Awaitable[str]], work: Work) -> str:
    return await wrapped(work)


@either
async def test_steps_return_and_raise_what_the_work_does(wrapped: Callable[[Work], Awaitable[str]]) -> None:
    """Work that waits several times returns and raises as it would by itself, errors of what it awaits included."""

    async def fine() -> str:
        await asyncio.sleep(0)
        await asyncio.sleep(1)
        return "done"

    async def faulty() -> str:
        await asyncio.sleep(1)
        raise KeyError("x")

    async def refused() -> str:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(future.set_exception, ValueError("y"))
        try:
            await future
        except ValueError:
            await asyncio.sleep(1)
        return "went on"

    assert await _awaited(wrapped, fine()) == "done"
    assert await _awaited(wrapped, refused()) == "went on"
    with pytest.raises(KeyError):
        await _awaited(wrapped, faulty())


@either
async def test_steps_pass_cancellations_in(wrapped: Callable[[Work], Awaitable[str]]) -> None:
    """A cancellation is thrown in where the work waits, which may wait again, be cancelled again, and return."""
    seen: list[str] = []

    async def stubborn() -> str:
        for _ in range(2):
            try:
                await asyncio.sleep(100)
            except asyncio.CancelledError:
                seen.append("cancelled")
        return "survived"

    task = asyncio.create_task(_awaited(wrapped, stubborn()))
    for _ in range(2):
        await asyncio.sleep(1)
        task.cancel()
    assert await task == "survived"
    assert seen == ["cancelled", "cancelled"]

    async def plain() -> str:
        await asyncio.sleep(100)
        return "never"

    task = asyncio.create_task(_awaited(wrapped, plain()))
    await asyncio.sleep(1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@either
async def test_steps_close_the_work_when_they_are_closed(wrapped: Callable[[Work], Awaitable[str]]) -> None:
    """What is closed while it waits closes the work, so that its `finally` runs."""
    closed: list[str] = []

    async def work() -> str:
        try:
            await asyncio.sleep(0)
        finally:
            closed.append("closed")
        return "never"

    waiting = _awaited(wrapped, work())
    waiting.send(None)
    waiting.close()
    assert closed == ["closed"]


async def test_in_context_runs_every_step_there() -> None:
    """Each step sees and sets the variables of the context, also after a cancellation and at the close."""
    seen: list[str] = []
    context = Context()
    context.run(_PLACE.set, "there")

    async def work() -> str:
        seen.append(_PLACE.get())
        token = _PLACE.set("within")
        await asyncio.sleep(1)
        seen.append(_PLACE.get())
        try:
            await asyncio.sleep(100)
        except asyncio.CancelledError:
            _PLACE.reset(token)
            seen.append(_PLACE.get())
        try:
            await asyncio.sleep(100)
        finally:
            seen.append(_PLACE.get())
        return "never"

    async def here() -> str:
        try:
            return await InContext(work(), context)
        finally:
            seen.append(_PLACE.get())

    task = asyncio.create_task(here())
    await asyncio.sleep(2)
    task.cancel()
    await asyncio.sleep(1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert seen == ["there", "within", "there", "there", "nowhere"]


async def test_in_context_closes_the_work_there() -> None:
    """What is closed while it waits closes the work in its context, where its tokens are valid."""
    closed: list[str] = []
    context = Context()

    async def work() -> str:
        token = _PLACE.set("within")
        try:
            await asyncio.sleep(0)
        finally:
            _PLACE.reset(token)
            closed.append("closed")
        return "never"

    waiting = _awaited(lambda each: InContext(each, context), work())
    waiting.send(None)
    waiting.close()
    assert closed == ["closed"]


async def test_error_of_a_rest_is_raised_where_the_work_waits() -> None:
    """In place of the wait: the task was cancelled before it came to the rest. The work may go on after it."""
    seen: list[object] = []

    async def work() -> str:
        try:
            await asyncio.sleep(100)
        except asyncio.CancelledError as error:
            seen.append(error)
            await asyncio.sleep(1)
        return "went on"

    steps = work().__await__()
    rest = Rest(steps, next(steps))
    rest.error = error = asyncio.CancelledError()
    assert await rest == "went on"
    assert seen == [error]


async def test_work_that_has_ended_in_its_first_step_returns_or_raises() -> None:
    """As if it were awaited, without a wait; an error that is set later replaces what it returned."""
    assert await AllDone(5) == 5
    with pytest.raises(KeyError):
        await AllDone(None, KeyError("x"))
    cancelled = AllDone(5)
    cancelled.error = asyncio.CancelledError()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
