"""Tasks with an owner, shared attempts, and waits that end."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from eventpump.aio.tasks import SingleFlight, StoppedError, TaskSet, gather, reject, resolve, wait_for_event
from eventpump.errors import ClosedError


def _set() -> tuple[TaskSet, list[str]]:
    failed: list[str] = []
    return TaskSet(lambda name, error: failed.append(f"{name}: {error}")), failed


async def _ended_after(seconds: float, result: str = "done", error: BaseException | None = None) -> str:
    await asyncio.sleep(seconds)
    if error is not None:
        raise error
    return result


async def test_task_set_reports_a_failure_and_keeps_the_others() -> None:
    """A task that raises is reported with its name; what the set itself cancels is not."""
    tasks, failed = _set()
    tasks.spawn(_ended_after(1, error=KeyError("x")), "first")
    tasks.spawn(_ended_after(9), "second")
    stranger = tasks.spawn(_ended_after(9), "third")
    await asyncio.sleep(2)
    stranger.cancel()
    assert not await tasks.wait(1)
    assert len(tasks) == 1
    assert await tasks.cancel(1)
    assert failed == ["first: 'x'", "third: cancelled, and not by eventpump"]


async def test_task_set_starts_work_after_its_caller_with_any_task_factory() -> None:
    """Also where the loop's factory is eager, as it may be from Python 3.12 on."""
    tasks, failed = _set()
    steps: list[str] = []

    async def work() -> None:
        steps.append("work")

    def eager(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Future[None]:
        with pytest.raises(StopIteration):
            coroutine.send(None)
        return loop.create_future()

    loop = asyncio.get_running_loop()
    loop.set_task_factory(eager)  # type: ignore[arg-type]  # it does not say that its future is one of the loop
    try:
        task = tasks.spawn(work(), "work")
        steps.append("caller")
    finally:
        loop.set_task_factory(None)
    await task
    assert (steps, failed) == (["caller", "work"], [])


async def test_unless_returns_or_raises_what_the_work_does() -> None:
    """Results and errors pass, and no error is a failure of the set."""
    tasks, failed = _set()
    stop = asyncio.Event()
    assert await tasks.unless(stop, _ended_after(1), "work") == "done"
    for error in (KeyError("x"), asyncio.CancelledError("of something else")):
        with pytest.raises(type(error)):
            await tasks.unless(stop, _ended_after(1, error=error), "work")
    assert await tasks.wait(1)
    assert failed == []


async def test_unless_stopped_leaves_the_work_behind() -> None:
    """The stop ends the wait even where the work ignores its cancellation; the set still owns that."""
    tasks, failed = _set()
    stop, loop = asyncio.Event(), asyncio.get_running_loop()

    async def stubborn() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await asyncio.sleep(30)
            raise

    began = loop.time()
    loop.call_later(1, stop.set)
    with pytest.raises(StoppedError):
        await tasks.unless(stop, stubborn(), "work")
    assert loop.time() == began + 1
    await asyncio.sleep(0)
    assert len(tasks) == 1
    assert await tasks.wait(60)
    assert loop.time() == began + 31
    assert failed == []


async def test_unless_cancelled_cancels_the_work() -> None:
    """A cancellation of the caller leaves nothing running."""
    tasks, failed = _set()
    task = asyncio.create_task(tasks.unless(asyncio.Event(), _ended_after(60), "work"))
    await asyncio.sleep(1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await tasks.wait(0.1)
    assert failed == []


async def test_single_flight_shares_one_attempt() -> None:
    """Callers that come while an attempt is under way get its result, or its error; a later one begins another."""
    flight: SingleFlight[int] = SingleFlight("attempt", of="thing")
    begun = 0

    async def work() -> int:
        nonlocal begun
        begun += 1
        await asyncio.sleep(1)
        if begun == 2:
            raise KeyError("second")
        return begun

    assert await asyncio.gather(*(flight.run(work) for _ in range(3))) == [1, 1, 1]
    outcomes = await asyncio.gather(*(flight.run(work) for _ in range(3)), return_exceptions=True)
    assert [type(each) for each in outcomes] == [KeyError] * 3
    assert await flight.run(work) == 3


async def test_single_flight_survives_the_cancellation_of_a_caller() -> None:
    """The attempt goes on for those who ask next, also where the caller that began it was cancelled."""
    flight: SingleFlight[str] = SingleFlight("attempt", of="thing")
    loop = asyncio.get_running_loop()
    began = loop.time()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1):
            await flight.run(lambda: _ended_after(3))
    assert await flight.run(lambda: _ended_after(99)) == "done"
    assert loop.time() == began + 3


async def test_single_flight_closed_raises_to_its_callers() -> None:
    """Closing cancels the attempt: its callers get `ClosedError`, and are not cancelled. Without one it is a no-op."""
    flight: SingleFlight[str] = SingleFlight("attempt", of="thing")
    await flight.aclose()
    caller = asyncio.create_task(flight.run(lambda: _ended_after(9)))
    await asyncio.sleep(1)
    await flight.aclose()
    with pytest.raises(ClosedError, match="thing"):
        await caller


async def test_gather_returns_results_in_order() -> None:
    """All run at the same time; the results keep the order of the coroutines."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    assert await gather(_ended_after(3 - each, str(each)) for each in range(3)) == ["0", "1", "2"]
    assert loop.time() == began + 3
    assert await gather([]) == []


async def test_gather_bounds_how_many_run() -> None:
    """With `at_once`, no more run at a time."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    await gather((_ended_after(1) for _ in range(5)), at_once=2)
    assert loop.time() == began + 3


@pytest.mark.parametrize("at_once", [None, 2])
async def test_gather_raises_the_first_error(at_once: int | None) -> None:
    """The others are cancelled, begun or not, and their end is waited for; the error is no group."""
    ended: list[int] = []

    async def work(number: int) -> None:
        try:
            await asyncio.sleep(1 + number)
            raise KeyError(number)
        finally:
            ended.append(number)

    with pytest.raises(KeyError, match="0"):
        await gather((work(each) for each in range(4)), at_once=at_once)
    assert set(ended) >= {0, 1}
    assert (3 in ended) is (at_once is None)


async def test_wait_for_event_returns_whether_it_is_set() -> None:
    """The wait ends with the event or with its time."""
    loop, event = asyncio.get_running_loop(), asyncio.Event()
    began = loop.time()
    assert not await wait_for_event(event, 2)
    assert loop.time() == began + 2
    loop.call_later(1, event.set)
    assert await wait_for_event(event, 2)
    assert loop.time() == began + 3
    assert await wait_for_event(event, 2)


async def test_resolve_and_reject_leave_a_future_that_is_done() -> None:
    """The first outcome stands, a cancellation too."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[int] = loop.create_future()
    resolve(future, 1)
    resolve(future, 2)
    reject(future, KeyError("x"))
    assert await future == 1
    future = loop.create_future()
    reject(future, KeyError("x"))
    resolve(future, 2)
    with pytest.raises(KeyError):
        await future
    future = loop.create_future()
    future.cancel()
    resolve(future, 1)
    reject(future, KeyError("x"))
    assert future.cancelled()


async def test_single_flight_closed_at_the_moment_of_a_time_out_within() -> None:
    """Closing ends an attempt that has just given up one of its tries, and would go on with the next."""
    flight: SingleFlight[str] = SingleFlight("attempt", of="thing")
    tries = 0

    async def work() -> str:
        nonlocal tries
        while tries < 5:
            tries += 1
            try:
                async with asyncio.timeout(1):
                    await asyncio.sleep(60)
            except TimeoutError:
                pass
        return "done"

    loop = asyncio.get_running_loop()
    running = asyncio.ensure_future(flight.run(work))
    await asyncio.sleep(0)
    closing: list[asyncio.Task[None]] = []
    # In the same turn as the time-out, after it: its cancellation is on the way, and is not ours.
    loop.call_at(loop.time() + 1, lambda: closing.append(asyncio.ensure_future(flight.aclose())))
    with pytest.raises(ClosedError):
        await running
    await closing[0]
    assert tries == 1


async def test_gather_that_is_cancelled_is_cancelled_whatever_ends_with_an_error() -> None:
    """A caller that is cancelled gets no error of a coroutine that fails while it ends."""

    async def fails_at_its_end() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            raise ValueError("cleanup")

    running = asyncio.ensure_future(gather([fails_at_its_end(), asyncio.sleep(60)]))
    await asyncio.sleep(1)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert running.cancelled()


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4, 5, 6, 7), (7, 6, 5, 4, 3, 2, 1, 0)])
async def test_gather_raises_the_error_of_the_first_coroutine_in_order(order: tuple[int, ...]) -> None:
    """Where several fail in the same turn, which error is raised does not depend on hashes."""

    async def fail(number: int) -> None:
        raise KeyError(number)

    for _ in range(20):
        with pytest.raises(KeyError) as raised:
            await gather(fail(each) for each in order)
        assert raised.value.args == (order[0],)
