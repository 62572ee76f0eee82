"""The runner of user code, on its own."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import fields

import pytest

from eventpump.consumer.calls.handler import Call, HandlerRunner, HandlerTimeout, PumpEndedError, as_exception
from eventpump.eventhubs.events import ReceivedEvent
from eventpump.options.consumer import HostSettings
from eventpump.reports import HandlerSlow, LoopBlocked, ProcessorFailed
from eventpump.testing.clock import VirtualClock


class _Oddity(BaseException):
    """Not an `Exception`."""


class _Scene:
    """A runner, and what it reported."""

    def __init__(self, on_handler_timeout: str = "report", handler_timeout: float = 10) -> None:
        self.reports: list[tuple[object, ...]] = []
        settings = HostSettings.model_validate(
            {"hub": "h", "handler_timeout": handler_timeout, "on_handler_timeout": on_handler_timeout}
        )
        self.runner = HandlerRunner(
            "0",
            settings,
            blocked_after=60,
            blocked_pause=60,
            stepped=lambda _: None,
            report=lambda kind, *facts: self.reports.append((kind, *facts)),
        )

    async def run(self, method: Callable[..., Awaitable[None]], operation: str = "process_events") -> None:
        try:
            await self.runner.run(operation, method)
        finally:
            self.runner.stop()


class _FailedError(Exception):
    pass


async def _forever() -> None:
    await asyncio.Event().wait()


async def test_run_calls_with_the_arguments_and_names_the_operation() -> None:
    """While the method runs, and only then, its name is the operation."""
    scene, seen = _Scene(), []

    async def method(*args: object) -> None:
        seen.append((args, scene.runner.operation))

    await scene.runner.run("open", method, 1, 2)
    scene.runner.stop()
    assert seen == [((1, 2), "open")]
    assert scene.runner.operation is None
    assert scene.reports == []


@pytest.mark.parametrize("deadlines", [(5, 100), (1, 5)])
async def test_run_at_a_deadline_raises_pump_ended(deadlines: tuple[float, float]) -> None:
    """The call is cancelled and reported; the task itself is not cancelled any more. Later deadlines replace others."""
    scene = _Scene()
    scene.runner.set_deadlines(2, 2)
    scene.runner.set_deadlines(*deadlines)
    began = asyncio.get_running_loop().time()
    with pytest.raises(PumpEndedError):
        await scene.run(_forever)
    assert asyncio.get_running_loop().time() - began == pytest.approx(deadlines[0])
    ((kind, operation, error, failures, delay, events),) = scene.reports
    assert events is None
    assert (kind, operation, failures, delay) == (ProcessorFailed, "process_events", 1, None)
    assert isinstance(error, TimeoutError)
    task = asyncio.current_task()
    assert task is not None
    assert not task.cancelling()


async def test_run_of_close_ends_at_its_own_deadline() -> None:
    """The deadline of handlers leaves `close` alone."""
    scene = _Scene()
    scene.runner.set_deadlines(1, 4)
    began = asyncio.get_running_loop().time()
    with pytest.raises(PumpEndedError):
        await scene.run(_forever, "close")
    assert asyncio.get_running_loop().time() - began == pytest.approx(4)


async def test_run_that_ignores_its_deadline_returns() -> None:
    """What swallows the cancellation and returns has returned."""
    scene = _Scene()
    scene.runner.set_deadlines(1, 1)

    async def stubborn() -> None:
        try:
            await _forever()
        except asyncio.CancelledError:
            await asyncio.sleep(3)

    await scene.run(stubborn)
    assert scene.reports == []


async def test_run_that_times_out_raises_timeout_error() -> None:
    """With "cancel" the slow call is reported once and cancelled."""
    scene = _Scene("cancel", 2)
    with pytest.raises(TimeoutError, match="had not returned after 2 s"):
        await scene.run(_forever)
    ((kind, operation, took, is_cancelled, events, where),) = scene.reports
    assert (kind, operation, took, is_cancelled, events) == (
        HandlerSlow,
        "process_events",
        pytest.approx(2),
        True,
        None,
    )
    assert str(where).endswith(" _forever, for asyncio.locks.Event.wait")


async def test_run_that_is_slow_is_reported_each_time_it_took_twice_as_long() -> None:
    """With "report" it goes on."""
    scene = _Scene(handler_timeout=2)
    await scene.run(lambda: asyncio.sleep(9))
    assert [report[2] for report in scene.reports] == [pytest.approx(2), pytest.approx(4), pytest.approx(8)]


async def test_run_of_what_raises_no_exception_wraps_it() -> None:
    """The failure policy handles an `Exception`; its cause is what was raised."""

    async def odd() -> None:
        raise _Oddity("odd")

    with pytest.raises(RuntimeError, match=r"process_events raised _Oddity, which is not an Exception: odd") as caught:
        await _Scene().run(odd)
    assert isinstance(caught.value.__cause__, _Oddity)
    same = ValueError()
    assert as_exception("x", same) is same


async def test_run_of_what_ends_the_interpreter_raises_it() -> None:
    """`SystemExit` is not for the failure policy."""

    async def leave() -> None:
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        await _Scene().run(leave)


async def test_run_cancelled_by_other_code_wraps_the_cancellation() -> None:
    """The task goes on: nothing is left of the request."""
    task = asyncio.current_task()
    assert task is not None

    async def suicidal() -> None:
        task.cancel()
        await _forever()

    with pytest.raises(RuntimeError, match="was cancelled, and not by eventpump"):
        await _Scene().run(suicidal)
    assert not task.cancelling()
    await asyncio.sleep(0)


async def test_run_cancelled_after_abandon_is_cancelled() -> None:
    """Then the cancellation counts."""
    scene = _Scene()
    running = asyncio.ensure_future(scene.run(_forever))
    await asyncio.sleep(1)
    scene.runner.abandon()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert scene.runner.is_abandoned


async def test_run_of_what_cannot_be_awaited_raises_type_error() -> None:
    """A plain function is named as the mistake it is."""
    with pytest.raises(TypeError, match="process_events gave a NoneType to await"):
        await _Scene().run(lambda: None)  # type: ignore[arg-type, return-value]  # the mistake


async def test_call_that_runs_is_watched_as_one_that_began() -> None:
    """`run_call` watches its call as `began` does for those who make the call themselves."""
    scene = _Scene()
    runner = scene.runner
    facts: list[dict[str, object]] = []

    async def method() -> None:
        facts.append(asdict(mine))

    def asdict(call: Call) -> dict[str, object]:
        return {field.name: getattr(call, field.name) for field in fields(call) if field.name != "work"}

    for is_first in (True, False):
        mine, other = runner.call("process_events"), runner.call("process_events")
        for call in (mine, other):
            call.is_late = call.is_timed_out = not is_first
        runner.began(other)
        runner.ended(other)
        await runner.run_call(mine, method, (), ())
        assert facts.pop() == asdict(other)
        assert (mine.began, mine.ended) == (other.began, mine.began)
        assert runner.operation is None
    last = runner.call("process_events")
    await runner.run_call(last, asyncio.sleep, (5,), ())
    assert last.ended == last.began + 5
    runner.stop()


@pytest.mark.parametrize("waits", [False, True])
async def test_first_step_is_watched_as_any_other(clock: VirtualClock, waits: bool) -> None:
    """A step that blocks is reported and noted, the first one of a call and a later one, and whatever ends it."""
    reports: list[tuple[object, ...]] = []
    noted: list[float] = []
    runner = HandlerRunner(
        "0",
        HandlerTimeout(),
        blocked_after=2,
        blocked_pause=0,
        stepped=noted.append,
        report=lambda kind, *facts: reports.append((kind, *facts)),
    )

    async def method(seconds: float, error: BaseException | None) -> None:
        if waits:
            await asyncio.sleep(0)
        clock.block(seconds)
        if error is not None:
            raise error

    await runner.run("process_events", method, 1.0, None)
    await runner.run("process_events", method, 3.0, None)
    with pytest.raises(KeyError):
        await runner.run("process_events", method, 5.0, KeyError("x"))
    with pytest.raises(RuntimeError, match="the code raised GeneratorExit") as caught:
        await runner.run("process_events", method, 0.0, GeneratorExit())
    runner.stop()
    assert isinstance(caught.value.__cause__, GeneratorExit)
    assert noted == pytest.approx([1.0, 3.0, 5.0])
    assert reports == [(LoopBlocked, pytest.approx(each), "process_events") for each in (3.0, 5.0)]


@pytest.mark.parametrize("pause", [None, 1.0])
async def test_is_in_batch_is_true_only_in_the_running_batch(pause: float | None) -> None:
    """For what the batch started too, until the batch has returned, whether it has waited or not."""
    scene, seen, left = _Scene(), [], []
    returned = asyncio.Event()

    async def later() -> None:
        seen.append(scene.runner.is_in_batch)
        await returned.wait()
        seen.append(scene.runner.is_in_batch)

    async def batch(*_: object) -> None:
        seen.append(scene.runner.is_in_batch)
        left.append(asyncio.ensure_future(later()))
        if pause is not None:
            await asyncio.sleep(pause)

    seen.append(scene.runner.is_in_batch)
    await scene.runner.run_call(scene.runner.call("process_events"), batch, (None, ()), (), is_batch=True)
    scene.runner.stop()
    seen.append(scene.runner.is_in_batch)
    returned.set()
    await left[0]
    assert seen == ([False, True, True, False, False] if pause else [False, True, False, False, False])


@pytest.mark.parametrize("fails", [False, True])
async def test_call_that_has_ended_keeps_nothing_of_its_batch(fails: bool) -> None:
    """The pump keeps it for the next one; an error, and what it refers to, is not left to the cyclic collector."""
    scene, event = _Scene(), ReceivedEvent(b"not read")
    call = scene.runner.call("process_events")
    raised: list[weakref.ref[_FailedError]] = []

    async def batch(*_: object) -> None:
        if fails:
            error = _FailedError()
            raised.append(weakref.ref(error))
            try:
                raise error
            finally:
                del error  # which the frame would keep

    gc.disable()
    try:
        with suppress(_FailedError):
            await scene.runner.run_call(call, batch, (None, (event,)), (event,), is_batch=True)
        assert [each() for each in raised] == [None] * fails
    finally:
        gc.enable()
        scene.runner.stop()
    assert (call.events, call.work, call.range) == ((), None, None)


async def test_what_a_batch_has_started_keeps_nothing_of_the_pump() -> None:
    """It has the context of the batch for as long as it lives, and may outlive the host: a pool, a ticker."""
    scene = _Scene()
    runner = weakref.ref(scene.runner)
    started: list[asyncio.TimerHandle] = []

    async def batch(*_: object) -> None:
        started.append(asyncio.get_running_loop().call_later(1e6, print))

    # In a task of its own, as that of a pump: its context ends with it.
    await asyncio.create_task(_batch_of(scene, batch))
    scene.runner.stop()
    del scene, batch
    gc.collect()
    assert runner() is None
    started[0].cancel()


async def _batch_of(scene: _Scene, batch: Callable[[], Awaitable[None]]) -> None:
    await scene.runner.run_call(scene.runner.call("process_events"), batch, (None, ()), (), is_batch=True)
