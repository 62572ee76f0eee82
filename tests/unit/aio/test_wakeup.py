"""A task that goes on within the call that completes what it waits for."""

from __future__ import annotations

import asyncio
import gc
import signal
from collections.abc import Callable
from contextvars import ContextVar, copy_context
from typing import Any

import pytest

from eventpump.aio.wakeup import Wakeup, WakeupInPython

_NAME: ContextVar[str] = ContextVar("name", default="none")


Make = Callable[[], Wakeup[bool]]


@pytest.fixture(params=dict.fromkeys((Wakeup, WakeupInPython)), ids=lambda kind: kind.__module__)
def make(request: pytest.FixtureRequest) -> Make:
    """Make one of either build, where there are two."""
    return lambda: request.param(loop=asyncio.get_running_loop())


async def _waits(made: Wakeup[bool], steps: list[object]) -> None:
    _NAME.set("the task's")
    try:
        steps.append(await made)
        steps.append((_NAME.get(), asyncio.current_task() is not None))
        async with asyncio.timeout(1):
            await asyncio.sleep(0)
        steps.append("later")
    except asyncio.CancelledError:
        steps.append("cancelled")
        raise


def _complete(made: Wakeup[bool]) -> Callable[[], None]:
    return lambda: made.complete(True)


async def _called(*calls: object) -> None:
    """Make calls in a callback of the loop, and wait until it has run."""
    done = asyncio.get_running_loop().create_future()

    def run() -> None:
        for call in calls:
            assert callable(call)
            call()
        done.set_result(None)

    asyncio.get_running_loop().call_soon(run)
    await done


async def test_complete_in_a_callback_runs_the_task_within_the_call(make: Make) -> None:
    """As itself, with its own context variables, until it waits again; and the callback keeps its own."""
    made, steps = make(), list[object]()
    task = asyncio.create_task(_waits(made, steps))
    await asyncio.sleep(0)
    await _called(_complete(made), lambda: steps.append((_NAME.get(), asyncio.current_task())), _complete(made))
    assert steps[:3] == [True, ("the task's", True), ("none", None)]
    await task
    assert steps[3:] == ["later"]


async def test_complete_in_a_task_leaves_the_other_for_the_next_turn(make: Make) -> None:
    """Two tasks cannot run within each other."""
    made, steps = make(), list[object]()
    task = asyncio.create_task(_waits(made, steps))
    await asyncio.sleep(0)
    made.complete(True)
    assert steps == []
    await task
    assert steps == [True, ("the task's", True), "later"]


async def test_set_result_is_for_the_next_turn_everywhere(make: Make) -> None:
    """It is a future: nothing runs within the call."""
    made, steps = make(), list[object]()
    task = asyncio.create_task(_waits(made, steps))
    await asyncio.sleep(0)
    await _called(lambda: made.set_result(False), lambda: steps.append("callback"))
    await task
    assert steps == ["callback", False, ("the task's", True), "later"]


@pytest.mark.parametrize("is_completed", [False, True])
async def test_cancelled_task_ends_once(make: Make, is_completed: bool) -> None:
    """Before the wait is over, or in the turn in which it is: it is not lost, and what comes later changes nothing."""
    made, steps = make(), list[object]()
    task = asyncio.create_task(_waits(made, steps))
    await asyncio.sleep(0)
    calls = [_complete(made), task.cancel] if is_completed else [task.cancel, _complete(made)]
    await _called(*calls)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert steps == ([True, ("the task's", True)] if is_completed else []) + ["cancelled"]


async def test_task_that_a_signal_cancels_within_complete_ends_once() -> None:
    """As by Ctrl-C, whose handler runs between two calls of `complete`: that raises nothing in what completes it."""

    class Interrupted(WakeupInPython[bool]):
        __slots__ = ("is_interrupted",)
        is_interrupted: bool

        def get_loop(self) -> asyncio.AbstractEventLoop:
            if self.done() and not self.is_interrupted:
                self.is_interrupted = True
                signal.raise_signal(signal.SIGINT)
            return super().get_loop()

    made, steps = Interrupted(loop=asyncio.get_running_loop()), list[object]()
    made.is_interrupted = False
    task = asyncio.create_task(_waits(made, steps))
    await asyncio.sleep(0)
    before = signal.signal(signal.SIGINT, lambda *_: task.cancel())
    try:
        await asyncio.wait_for(_called(_complete(made)), 1)
    finally:
        signal.signal(signal.SIGINT, before)
    await asyncio.wait({task})
    assert made.is_interrupted
    assert task.cancelled()
    assert steps == ["cancelled"]


async def test_error_is_for_the_next_turn(make: Make) -> None:
    """It is a future: an error ends the wait as well, and nothing runs within the call."""
    made, steps = make(), list[object]()
    task = asyncio.create_task(_waits(made, steps))
    await asyncio.sleep(0)
    await _called(lambda: made.set_exception(ValueError("no")), lambda: steps.append("callback"))
    with pytest.raises(ValueError, match="no"):
        await task
    assert steps == ["callback"]


async def test_complete_within_the_context_of_the_task_that_waits_loses_no_wake_up(make: Make) -> None:
    """A context cannot be entered twice: the task goes on in the next turn."""
    made, steps, context = make(), list[object](), copy_context()
    task = asyncio.create_task(_waits(made, steps), context=context)
    await asyncio.sleep(0)
    asyncio.get_running_loop().call_soon(made.complete, True, context=context)
    await task
    assert steps == [True, ("the task's", True), "later"]


async def test_task_that_begins_to_wait_after_the_end_does_not_wait(make: Make) -> None:
    """What is done already is done."""
    made = make()
    made.complete(True)
    assert await made


async def test_timeout_ends_the_wait(make: Make) -> None:
    """A caller that wraps it in a wait with a time-out gets the time-out, and what is completed later runs nothing."""
    made = make()
    _, pending = await asyncio.wait({made}, timeout=1)
    assert pending == {made}
    await _called(_complete(made))
    assert made.result()


def test_exit_in_the_task_ends_the_loop_and_not_the_caller(make: Make) -> None:
    """What is to be done after the call is done: a SystemExit is raised by a callback of its own."""
    steps: list[str] = []
    tasks: list[asyncio.Task[None]] = []

    async def main() -> None:
        made = make()

        async def exits() -> None:
            await made
            raise SystemExit(3)

        tasks.append(asyncio.create_task(exits()))
        await asyncio.sleep(0)
        await _called(_complete(made), lambda: steps.append("after"))
        await asyncio.sleep(9)

    with pytest.raises(SystemExit):
        asyncio.run(main())
    assert steps == ["after"]
    assert isinstance(tasks[0].exception(), SystemExit)


async def test_each_error_that_nobody_has_seen_is_reported(make: Make) -> None:
    """Once for each, and not only for the first of those that have had the same place in memory."""
    reports: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reports.append(context["message"]))
    for _ in range(5):
        make().set_exception(ValueError("x"))
    gc.collect()
    assert len(reports) == 5
    seen = make()
    seen.set_exception(ValueError("x"))
    assert isinstance(seen.exception(), ValueError)
    del seen
    gc.collect()
    assert len(reports) == 5


@pytest.mark.parametrize("returns", [False, True])
async def test_gather_ends_with_a_cancelled_one(make: Make, *, returns: bool) -> None:
    """As with any future."""
    made = make()
    gathered = asyncio.gather(made, return_exceptions=returns)
    made.cancel("why")
    done, _ = await asyncio.wait({gathered}, timeout=1)
    assert done
    if returns:
        assert [type(each) for each in gathered.result()] == [asyncio.CancelledError]
    else:
        with pytest.raises(asyncio.CancelledError, match="why"):
            gathered.result()


async def test_what_is_no_error_changes_nothing(make: Make) -> None:
    """It waits on, to be completed with something else."""
    made: Any = make()
    for wrong in (5, int):
        with pytest.raises(TypeError):
            made.set_exception(wrong)
        assert not made.done()
    made.complete(True)
    assert await made
