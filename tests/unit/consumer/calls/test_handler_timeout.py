"""Methods of the processor that do not return."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from eventpump.consumer.keyed import KeyedProcessor
from eventpump.consumer.processor import PartitionContext
from eventpump.core.checkpoint import CheckpointPolicy
from eventpump.errors import ProcessorFailedError
from eventpump.eventhubs.events import ReceivedEvent
from eventpump.options.base import RetryOptions
from eventpump.reports import EventRange, HandlerSlow, HostReport, ProcessorFailed
from eventpump.testing.clock import VirtualClock
from tests.support.fleet import NO_PROCESSOR, RecordingProcessor, stocked

Events = Sequence[ReceivedEvent]


async def _hang(*_: object) -> None:
    await asyncio.sleep(1e6)


async def test_handler_that_never_returns_is_reported(clock: VirtualClock) -> None:
    """By default it is reported after 60 seconds and then rarely, not cancelled, and the lease is kept."""
    times: list[float] = []

    def note(report: HostReport) -> None:
        if isinstance(report, HandlerSlow):
            times.append(clock.monotonic())

    async with stocked(3) as fleet:
        host = fleet.host("a", RecordingProcessor(fleet.record, on_events=_hang), hooks=[note])
        running = asyncio.create_task(host.run())
        await asyncio.sleep(1000)
        began = fleet.record.deliveries[0].at
        assert [time - began for time in times] == pytest.approx([60, 120, 240, 480, 960])
        reported = fleet.reported("a", HandlerSlow, "0")
        assert [report.running_for for report in reported] == pytest.approx([60, 120, 240, 480, 960])
        assert {(report.operation, report.is_cancelled) for report in reported} == {("process_events", False)}
        assert fleet.owned("a") == {"0"}
        assert len(fleet.record.deliveries) == 1
        await host.aclose()
        await running


@pytest.mark.parametrize("kind", ["plain", "keyed", "loop"])
async def test_handler_that_hangs_is_found_by_its_line_and_its_events(kind: str, caplog: Any) -> None:
    """In the report, in the fields of its line of the log, and in the status of the partition, as long as it hangs."""
    gate = asyncio.Event()

    async def handle(context: PartitionContext, events: Events) -> None:
        await gate.wait()

    async def loop() -> None:
        async for batch in host.batches():
            await handle(batch.context, batch.events)

    processor = {"plain": handle, "keyed": KeyedProcessor(handle, concurrency=1), "loop": NO_PROCESSOR}[kind]
    line = handle.__code__.co_firstlineno + 1
    count = 1 if kind == "keyed" else 3
    async with stocked(3) as fleet:
        host = fleet.host("a", processor, handler_retry=RetryOptions(max_retries=3), handler_timeout=5.0)
        run = asyncio.create_task(loop() if kind == "loop" else host.run())
        await asyncio.sleep(3)
        earliest = datetime.now(UTC) - timedelta(seconds=3)
        (status,) = host.partitions
        assert status.busy_since is not None
        assert earliest <= status.busy_since <= datetime.now(UTC) - timedelta(seconds=2)
        assert status.events_in_hand == EventRange(0, count - 1, count)
        await asyncio.sleep(4)
        (report,) = fleet.reported("a", HandlerSlow)
        assert report.events == status.events_in_hand
        assert report.waits_at == f"{__file__}:{line} {handle.__qualname__}, for asyncio.locks.Event.wait"
        assert report.waits_at in report.describe()
        (record,) = [each for each in caplog.records if "has not returned" in each.message]
        fields = (record.first_sequence_number, record.last_sequence_number, record.event_count)
        assert fields == (0, count - 1, count)
        gate.set()
        await asyncio.sleep(1)
        (status,) = host.partitions
        assert (status.busy_since, status.events_in_hand) == (None, None)
        await host.aclose()
        await run


@pytest.mark.parametrize("kind", ["plain", "keyed"])
async def test_handler_that_raises_is_found_by_its_events(kind: str, caplog: Any) -> None:
    """The report and the line of the log have the first and last number and the count of what it was called with."""

    async def handle(context: PartitionContext, events: Events) -> None:
        if any(each.sequence_number == 2 for each in events):
            raise ValueError("poison")

    async with stocked(5) as fleet:
        processor = KeyedProcessor(handle) if kind == "keyed" else handle
        retry = RetryOptions(max_retries=1)
        await fleet.start("a", processor, handler_retry=retry, on_retries_exhausted="skip", max_batch_size=3)
        await asyncio.sleep(60)
        ranges = [report.events for report in fleet.reported("a", ProcessorFailed)]
        alone = EventRange(2, 2, 1)
        assert ranges == (
            [alone, alone] if kind == "keyed" else [EventRange(0, 2, 3), EventRange(0, 2, 3), alone, alone]
        )
        text = "process_events raised for event 2" if kind == "keyed" else "process_events raised for events 0 to 2 (3)"
        (record, *_) = [each for each in caplog.records if text in each.message]
        assert (record.last_sequence_number, record.event_count) == (2, 1 if kind == "keyed" else 3)


async def test_handler_cancelled_at_its_time_out_is_tried_again() -> None:
    """Where that is asked for it is cancelled, which counts as raising `TimeoutError`: the batch comes again."""
    left = [1]

    async def once(context: PartitionContext, events: Events) -> None:
        if left:
            left.pop()
            await _hang()

    async with stocked(3) as fleet:
        processor = RecordingProcessor(fleet.record, on_events=once)
        policy = CheckpointPolicy(every_events=1)
        await fleet.start(
            "a",
            processor,
            handler_timeout=5,
            on_handler_timeout="cancel",
            checkpoint_policy=policy,
            handler_retry=RetryOptions(base_delay=0.1),
        )
        await asyncio.sleep(10)
        assert [report.is_cancelled for report in fleet.reported("a", HandlerSlow)] == [True]
        assert [delivery.numbers for delivery in fleet.record.deliveries] == [(0, 1, 2)] * 2
        assert [type(error) for _, _, error in fleet.record.errors] == [TimeoutError]
        assert fleet.checkpoint("0") == 2


async def test_handler_cancelled_at_its_time_out_ends_the_host_under_stop() -> None:
    """Under the policy `stop` the time-out is the host's failure."""
    async with stocked(3) as fleet:
        processor = RecordingProcessor(fleet.record, on_events=_hang)
        host = fleet.host("a", processor, handler_timeout=5, on_handler_timeout="cancel", failure_policy="stop")
        async with asyncio.timeout(60):
            with pytest.raises(ProcessorFailedError) as caught:
                await host.run()
        assert isinstance(caught.value.__cause__, TimeoutError)
        assert fleet.owner("0") is None


@pytest.mark.parametrize("method", ["on_open", "on_error"])
async def test_open_and_process_error_have_the_same_time_out(method: str) -> None:
    """`open` and `process_error` that do not return are reported and cancelled in the same way."""
    left = [1]

    async def once(*_: object) -> None:
        if left:
            left.pop()
            await _hang()

    failing = [1] if method == "on_error" else []

    async def handle(context: PartitionContext, events: Events) -> None:
        if failing:
            failing.pop()
            raise ValueError("once")
        await context.checkpoint()

    async with stocked(3) as fleet:
        steps: dict[str, Any] = {method: once}
        processor = RecordingProcessor(fleet.record, on_events=handle, **steps)
        await fleet.start("a", processor, handler_timeout=5, on_handler_timeout="cancel")
        await asyncio.sleep(20)
        operation = {"on_open": "open", "on_error": "process_error"}[method]
        assert [report.operation for report in fleet.reported("a", HandlerSlow)] == [operation]
        assert fleet.reported("a", ProcessorFailed)[-1].operation == operation
        assert fleet.checkpoint("0") == 2


async def test_handler_that_swallows_its_cancellation_has_not_failed() -> None:
    """One that catches the cancellation and returns has processed its batch; one that goes on is reported again."""

    async def stubborn(context: PartitionContext, events: Events) -> None:
        for _ in range(2):
            with suppress(asyncio.CancelledError):
                await _hang()

    async with stocked(3) as fleet:
        processor = RecordingProcessor(fleet.record, on_events=stubborn)
        policy = CheckpointPolicy(every_events=1)
        await fleet.start("a", processor, handler_timeout=5, on_handler_timeout="cancel", checkpoint_policy=policy)
        await asyncio.sleep(30)
        assert [report.running_for for report in fleet.reported("a", HandlerSlow)] == pytest.approx([5, 10])
        assert fleet.reported("a", ProcessorFailed) == []
        assert fleet.checkpoint("0") == 2


async def test_handler_calls_that_return_in_time_share_one_timer() -> None:
    """Many short calls over a long time are never reported, and set no timer each."""
    loop = asyncio.get_running_loop()
    real, timers = loop.call_at, [0]

    def counting(when: float, callback: Callable[..., Any], *args: Any, **options: Any) -> asyncio.TimerHandle:
        timers[0] += getattr(callback, "__name__", "") == "_call_may_be_slow"
        return real(when, callback, *args, **options)

    async def brief(context: PartitionContext, events: Events) -> None:
        await asyncio.sleep(0.1)

    async with stocked(1000) as fleet:
        loop.call_at = counting  # type: ignore[method-assign, assignment]  # counts
        try:
            processor = RecordingProcessor(fleet.record, on_events=brief)
            await fleet.start("a", processor, handler_timeout=10, max_batch_size=1)
            await asyncio.sleep(110)
        finally:
            loop.call_at = real  # type: ignore[method-assign]  # as it was
        assert len(fleet.record.deliveries) == 1000
        assert fleet.reported("a", HandlerSlow) == []
        assert 1 <= timers[0] <= 12


@pytest.mark.parametrize("mode", ["report", "cancel"])
async def test_handler_that_is_stuck_does_not_hide_another(clock: VirtualClock, mode: str) -> None:
    """While one key's call goes on, however long, those of other keys are reported, or cancelled, at their time."""
    times: list[float] = []

    async def handle(context: PartitionContext, events: Events) -> None:
        if events[0].sequence_number:
            times.append(clock.monotonic())
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(200)
            times.append(clock.monotonic())
        while not times[1:]:
            with suppress(asyncio.CancelledError):  # it does not heed its time-out
                await asyncio.sleep(100)

    async with stocked(1) as fleet:
        processor = KeyedProcessor(handle, key=lambda event: event.sequence_number)
        retry = RetryOptions(max_retries=0)
        await fleet.start("a", processor, handler_timeout=10, on_handler_timeout=mode, handler_retry=retry)
        await asyncio.sleep(700)
        fleet.hub.publish("0", count=1)
        before = len(fleet.reported("a", HandlerSlow))
        await fleet.until(lambda: len(times) == 2, 300)
        assert times[1] - times[0] == pytest.approx(10 if mode == "cancel" else 200)
        assert fleet.reported("a", HandlerSlow)[before].running_for == pytest.approx(10)
