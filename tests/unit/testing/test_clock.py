"""The virtual-time loop."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

import eventpump.testing.clock
from eventpump.testing.clock import DeadlockError, VirtualClock, VirtualTimeLoop


async def test_sleep_of_an_hour_passes_at_once(clock: VirtualClock) -> None:
    """A timer an hour away comes without an hour's wait, and the clock says an hour."""
    began, began_virtual = time.monotonic(), clock.monotonic()
    await asyncio.sleep(3600)
    assert clock.monotonic() - began_virtual == pytest.approx(3600)
    assert time.monotonic() - began < 10


async def test_timers_keep_their_order() -> None:
    """Tasks wake in the order of their deadlines."""
    woken: list[float] = []

    async def sleeper(delay: float) -> None:
        await asyncio.sleep(delay)
        woken.append(delay)

    await asyncio.gather(*(sleeper(delay) for delay in (3.0, 1.0, 2.0)))
    assert woken == [1.0, 2.0, 3.0]


def test_wait_for_nothing_raises() -> None:
    """A task that waits for what cannot happen ends the run with an error."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner, pytest.raises(DeadlockError):
        runner.run(asyncio.Event().wait())


async def test_executor_work_ends_before_time_moves_on(clock: VirtualClock) -> None:
    """Work in the executor finishes before virtual time moves on."""
    began = clock.monotonic()
    async with asyncio.timeout(5):
        await asyncio.to_thread(time.sleep, 0.02)
    assert clock.monotonic() == began


def test_end_of_the_loop_waits_for_threads_in_real_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop that ends waits for a thread whose work was cancelled, and no virtual time passes meanwhile."""
    monkeypatch.setattr(eventpump.testing.clock, "_DEADLOCK_AFTER", 0.0)
    loop, release, ended = VirtualTimeLoop(), threading.Event(), threading.Event()

    def work() -> None:
        release.wait()
        ended.set()

    async def leave_a_thread_behind() -> None:
        asyncio.get_running_loop().run_in_executor(None, work).cancel()

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(leave_a_thread_behind())
        began = loop.time()
        threading.Timer(0.05, release.set).start()
    assert ended.is_set()
    assert loop.time() == began


async def test_block_of_the_loop_moves_the_clock(clock: VirtualClock) -> None:
    """A task that blocks the loop is seen by the clock, without a wait."""
    began = clock.monotonic()
    clock.block(12)
    assert clock.monotonic() - began == 12
