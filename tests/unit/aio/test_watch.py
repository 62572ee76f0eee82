"""User code, watched step by step."""

from __future__ import annotations

import asyncio

import pytest

from eventpump.aio.watch import Watched
from eventpump.testing.clock import VirtualClock


def _watched(work: object, clock: VirtualClock, blocked: list[float]) -> Watched[object]:
    return Watched(work, clock.monotonic, 1.0, blocked.append, lambda _: None)  # type: ignore[arg-type]  # coroutines of any kind


async def test_watched_returns_and_raises_what_the_coroutine_does(clock: VirtualClock) -> None:
    """What is watched returns and raises as it would by itself."""

    async def fine() -> str:
        await asyncio.sleep(5)
        return "done"

    async def faulty() -> None:
        await asyncio.sleep(0)
        raise KeyError("x")

    assert await _watched(fine(), clock, []) == "done"
    with pytest.raises(KeyError):
        await _watched(faulty(), clock, [])


async def test_watched_reports_only_a_step_that_blocks_beyond_the_threshold(clock: VirtualClock) -> None:
    """Waiting long is fine; keeping the loop from turning for longer than the threshold is reported, and how long."""
    blocked: list[float] = []

    async def work() -> None:
        await asyncio.sleep(100)
        clock.block(0.5)
        await asyncio.sleep(1)
        clock.block(7)
        await asyncio.sleep(1)

    await _watched(work(), clock, blocked)
    assert blocked == [pytest.approx(7)]


async def test_watched_passes_a_cancellation_in_and_its_result_back(clock: VirtualClock) -> None:
    """A cancellation is thrown in where the code waits, which may clean up, and may even refuse."""
    seen: list[str] = []

    async def stubborn() -> str:
        try:
            await asyncio.sleep(100)
        except asyncio.CancelledError:
            seen.append("cancelled")
            await asyncio.sleep(1)
        return "survived"

    task = asyncio.create_task(_wrap(_watched(stubborn(), clock, [])))
    await asyncio.sleep(1)
    task.cancel()
    assert await task == "survived"
    assert seen == ["cancelled"]


async def _wrap(work: Watched[object]) -> object:
    return await work


async def test_watched_that_raises_generator_exit_is_an_error(clock: VirtualClock) -> None:
    """Raised by the code itself it does not close what awaits it."""

    async def escaping() -> None:
        raise GeneratorExit

    with pytest.raises(RuntimeError, match="GeneratorExit"):
        await _watched(escaping(), clock, [])


async def test_watched_that_is_closed_closes_the_coroutine_and_waits_no_more(clock: VirtualClock) -> None:
    """The `GeneratorExit` is then not the coroutine's own; each wait was reported before."""
    ended: list[str] = []
    waits: list[None] = []

    async def waiting() -> None:
        try:
            await asyncio.sleep(0)
        finally:
            ended.append("closed")

    blocked: list[float] = []
    watched = Watched(waiting(), clock.monotonic, 1.0, blocked.append, blocked.append, waits=lambda: waits.append(None))
    steps = watched.__await__()
    next(steps)
    assert (len(waits), watched.is_closing) == (1, False)
    steps.close()
    assert watched.is_closing
    assert ended == ["closed"]
