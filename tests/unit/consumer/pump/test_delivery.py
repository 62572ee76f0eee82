"""Batches that come while the pump waits: the call that brings them delivers them, as the pump's task would."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

import pytest

from eventpump.clock import SuspendedTime
from eventpump.compiled import core
from eventpump.consumer.processor import PartitionContext
from eventpump.consumer.pump.delivery import Delivery
from eventpump.consumer.record.continuity import PumpContinuity
from eventpump.core.checkpoint import CheckpointPolicy
from eventpump.eventhubs.events import ReceivedEvent
from eventpump.options.base import RetryOptions
from eventpump.reports import PartitionFailed, ProcessorFailed, PumpClosed
from tests.support.fleet import Fleet, RecordingProcessor, stocked

Events = Sequence[ReceivedEvent]
_SEEN: ContextVar[int] = ContextVar("seen", default=0)


def _callers() -> set[str]:
    """Return the names of the functions that lie below the caller."""
    frame, found = sys._getframe(1), set[str]()  # what it is for
    while frame.f_back is not None:
        frame = frame.f_back
        found.add(frame.f_code.co_qualname)
    return found


async def _come(fleet: Fleet, count: int, *, pause: float = 1.0) -> None:
    for _ in range(count):
        fleet.hub.publish("0", count=1)
        await asyncio.sleep(pause)


@pytest.mark.skipif(core is None, reason="in pure Python the task is run")
async def test_handler_that_does_not_wait_is_called_without_a_step_of_the_task() -> None:
    """For events that come one by one, from the second on: the first may find the pump busy."""
    below: list[bool] = []

    async def handle(context: PartitionContext, events: Events) -> None:
        below.append(Delivery.run.__qualname__ in _callers())

    async with stocked() as fleet:
        await fleet.start("a", RecordingProcessor(fleet.record, on_events=handle))
        await asyncio.sleep(5)
        await _come(fleet, 10)
        assert len(below) == 10
        assert not any(below[1:])


async def test_what_comes_once_the_lease_has_run_out_is_not_delivered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine was suspended while the pump waited: its timers do not know yet that the lease is gone."""
    slept = 0.0
    monkeypatch.setattr("eventpump.clock._SUSPENDED", SuspendedTime(lambda: 0.0, lambda: slept))
    async with stocked() as fleet:
        await fleet.start("a")
        await _come(fleet, 2)
        slept += 31
        await _come(fleet, 1, pause=40)
        assert [each.owner_level for each in fleet.record.deliveries] == [1, 1, 2]


async def test_processor_whose_method_cannot_be_read_has_failed() -> None:
    """As if the method had raised the error: the policy decides, and a later try delivers the batch."""
    reads: list[int] = []

    class Lazy(RecordingProcessor):
        def __getattribute__(self, name: str) -> Any:
            if name == "process_events":
                reads.append(1)
                if len(reads) in (3, 4):
                    raise ConnectionError("what it is made of is not there")
            return super().__getattribute__(name)

    async with stocked() as fleet:
        await fleet.start("a", Lazy(fleet.record), handler_retry=RetryOptions(base_delay=0.1, max_delay=0.1))
        await asyncio.sleep(5)
        reads.clear()
        await _come(fleet, 5)
        assert fleet.record.numbers("0") == [0, 1, 2, 3, 4]
        assert [type(each.error) for each in fleet.reported("a", ProcessorFailed)] == [ConnectionError] * 2
        assert not fleet.reported("a", PumpClosed)


async def test_handlers_run_in_the_task_and_the_context_of_their_pump() -> None:
    """In the first step and later, in each call: context variables last from one to the next."""
    tasks: set[Any] = set()
    seen: list[int] = []

    async def handle(context: PartitionContext, events: Events) -> None:
        tasks.add(asyncio.current_task())
        seen.append(_SEEN.get())
        _SEEN.set(_SEEN.get() + 1)
        if len(seen) % 3 == 0:
            async with asyncio.timeout(5):
                await asyncio.sleep(0.1)
        tasks.add(asyncio.current_task())

    async with stocked() as fleet:
        await fleet.start("a", RecordingProcessor(fleet.record, on_events=handle))
        await asyncio.sleep(5)
        await _come(fleet, 10)
        assert seen == list(range(10))
        (task,) = tasks
        assert task.get_name() == "eventpump pump of partition 0"
    assert _SEEN.get() == 0


@pytest.mark.parametrize("waits", [0.0, 0.5])
async def test_handler_that_cancels_its_task_and_waits_has_failed(waits: float) -> None:
    """As with events that find the pump busy: the request hits where it waits, and the batch comes again."""
    attempts = list[int]()

    async def handle(context: PartitionContext, events: Events) -> None:
        attempts.append(events[0].sequence_number)
        if attempts == [0, 1]:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            await asyncio.sleep(waits)
            attempts.append(-1)

    async with stocked() as fleet:
        await fleet.start("a", RecordingProcessor(fleet.record, on_events=handle), max_batch_size=1)
        await asyncio.sleep(5)
        await _come(fleet, 3, pause=20.0)
        assert attempts == [0, 1, 1, 2]
        assert len(fleet.reported("a", ProcessorFailed)) == 1
        assert fleet.reported("a", PartitionFailed) == []


@pytest.mark.parametrize("waits", [False, True])
async def test_handler_in_which_the_host_is_stopped_is_awaited_to_its_end(waits: bool) -> None:
    """Its batch is processed, and its checkpoint stored, before the pump ends; and no other batch is delivered."""
    ended: list[int] = []

    async def handle(context: PartitionContext, events: Events) -> None:
        if events[0].sequence_number == 1:
            fleet.hosts["a"].stop()
            if waits:
                await asyncio.sleep(0.5)
        ended.append(events[-1].sequence_number)

    async with stocked() as fleet:
        processor = RecordingProcessor(fleet.record, on_events=handle)
        await fleet.start("a", processor, checkpoint_policy=CheckpointPolicy(1), max_batch_size=1)
        await asyncio.sleep(5)
        await _come(fleet, 1)
        fleet.hub.publish("0", count=3)
        await asyncio.sleep(20)
        assert ended == [0, 1]
        assert fleet.checkpoint("0") == 1
        assert len(fleet.reported("a", PumpClosed)) == 1


@pytest.mark.parametrize("error", [ValueError, KeyError])
async def test_error_of_a_handler_that_does_not_wait_is_handled_as_any(error: type[Exception]) -> None:
    """The batch is delivered again, and what comes meanwhile after it."""
    failing = [1, 1]

    async def handle(context: PartitionContext, events: Events) -> None:
        if events[0].sequence_number == 1 and failing:
            failing.pop()
            raise error("x")

    async with stocked() as fleet:
        await fleet.start("a", RecordingProcessor(fleet.record, on_events=handle), max_batch_size=1)
        await asyncio.sleep(5)
        await _come(fleet, 4, pause=0.1)
        await asyncio.sleep(30)
        assert fleet.record.numbers("0") == [0, 1, 1, 1, 2, 3]
        assert len(fleet.reported("a", ProcessorFailed)) == 2


async def test_time_without_events_counts_from_the_last_one() -> None:
    """`max_wait_time` begins again with each batch, however it was delivered."""
    calls: list[tuple[float, int]] = []

    async def handle(context: PartitionContext, events: Events) -> None:
        calls.append((asyncio.get_running_loop().time(), len(events)))

    async with stocked() as fleet:
        options: dict[str, Any] = {"call_when_idle": True, "max_wait_time": 3.0}
        await fleet.start("a", RecordingProcessor(fleet.record, on_events=handle), **options)
        await asyncio.sleep(5.5)
        calls.clear()
        await _come(fleet, 5, pause=2.0)
        await asyncio.sleep(5)
        assert [count for _, count in calls] == [1] * 5 + [0] * 2
        assert calls[5][0] - calls[4][0] == pytest.approx(3.0, abs=0.1)


async def test_pause_asked_for_in_a_handler_holds_the_next_event_back() -> None:
    """What comes while a pause is due, or carried out, is delivered when the pause is over, once and in order."""

    async def handle(context: PartitionContext, events: Events) -> None:
        if events[0].sequence_number == 1:
            host.pause("default")

    async with stocked() as fleet:
        host = await fleet.start("a", RecordingProcessor(fleet.record, on_events=handle), max_batch_size=1)
        await asyncio.sleep(5)
        await _come(fleet, 4)
        assert fleet.record.numbers("0") == [0, 1]
        host.resume("default")
        await asyncio.sleep(5)
        assert fleet.record.numbers("0") == [0, 1, 2, 3]


async def test_missing_numbers_before_an_event_that_comes_alone_are_looked_into() -> None:
    """The event is delivered once the loss is reported."""
    async with stocked() as fleet:
        await fleet.start("a")
        await asyncio.sleep(5)
        await _come(fleet, 2)
        fleet.hub.stall("0")
        fleet.hub.publish("0", count=3)
        fleet.hub.compact("0", [2, 3, 4])
        fleet.hub.resume("0")
        await _come(fleet, 2, pause=30.0)
        assert fleet.record.numbers("0") == [0, 1, 5, 6]


async def test_events_that_a_request_holds_back_are_delivered_after_it() -> None:
    """A batch that fails where a pause is asked for is left for later, whole."""
    calls: list[list[int]] = []

    async def handle(context: PartitionContext, events: Events) -> None:
        calls.append([each.sequence_number for each in events])
        if len(calls) == 2:
            host.pause("default")
            raise ValueError("x")

    async with stocked() as fleet:
        processor = RecordingProcessor(fleet.record, on_events=handle)
        host = await fleet.start("a", processor, failure_policy="skip", handler_retry=RetryOptions(max_retries=0))
        await asyncio.sleep(5)
        await _come(fleet, 1)
        fleet.hub.publish("0", count=2)
        await asyncio.sleep(5)
        assert calls == [[0], [1, 2]]
        host.resume("default")
        await asyncio.sleep(5)
        assert calls == [[0], [1, 2], [1, 2]]


async def test_unexpected_error_before_the_handler_fails_the_pump_and_not_the_link(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is reported, and the partition goes on with every event after a pause; the link is not disturbed."""
    follows = PumpContinuity.follows
    failing = [1]

    def fail_once(self: PumpContinuity, events: Events) -> bool:
        if failing and events[0].sequence_number == 1:
            failing.pop()
            raise LookupError("unexpected")
        return follows(self, events)

    monkeypatch.setattr(PumpContinuity, "follows", fail_once)
    async with stocked() as fleet:
        await fleet.start("a", RecordingProcessor(fleet.record), checkpoint_policy=CheckpointPolicy(1))
        await asyncio.sleep(5)
        await _come(fleet, 3)
        await fleet.until(lambda: fleet.record.numbers("0") == [0, 1, 2], within=120)
        assert len(fleet.reported("a", PartitionFailed)) == 1
