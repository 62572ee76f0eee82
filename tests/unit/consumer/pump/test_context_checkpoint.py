"""`context.checkpoint()` without an event: what it stores, by where it is called from."""

from __future__ import annotations

import asyncio
import pickle
import weakref
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from contextvars import ContextVar

import pytest

from eventpump.consumer.processor import CloseReason, PartitionContext
from eventpump.errors import ConfigurationError, OwnershipLostError
from eventpump.eventhubs.events import ReceivedEvent
from tests.support.fleet import RecordingProcessor, stocked

Events = Sequence[ReceivedEvent]


class _Value:
    """What a program keeps in its context."""


_VALUE: ContextVar[_Value] = ContextVar("value")


async def _second_fails(context: PartitionContext, events: Events) -> None:
    """Process 0 to 4; 5 to 9 never."""
    if events[-1].sequence_number > 4:
        raise ValueError("poison")


async def _second_hangs(context: PartitionContext, events: Events) -> None:
    if events[-1].sequence_number > 4:
        await asyncio.sleep(1e6)


async def _checkpoint(context: PartitionContext, *_: object) -> None:
    await context.checkpoint()


@pytest.mark.parametrize("handler", [_second_fails, _second_hangs], ids=["raised", "cancelled by the close time-out"])
async def test_checkpoint_in_close_stores_the_last_batch_processed(
    handler: Callable[[PartitionContext, Events], Awaitable[None]],
) -> None:
    """In `close`, `checkpoint()` means the last batch whose handler returned, not one that raised or was cancelled."""
    async with stocked(10) as fleet:
        processor = RecordingProcessor(fleet.record, on_events=handler, on_close=_checkpoint)
        await fleet.start("a", processor, max_batch_size=5)
        await asyncio.sleep(10)
        await fleet.hosts["a"].aclose()
        assert fleet.record.reasons("a", "0") == [CloseReason.SHUTDOWN]
        assert fleet.record.deliveries[-1].numbers == (5, 6, 7, 8, 9)
        assert fleet.checkpoint("0") == 4


async def test_checkpoint_in_close_stores_nothing_where_nothing_was_processed() -> None:
    """In `close`, after no handler returned, `checkpoint()` stores nothing and returns."""

    async def poison(context: PartitionContext, events: Events) -> None:
        raise ValueError("poison")

    async with stocked(10) as fleet:
        await fleet.start("a", RecordingProcessor(fleet.record, on_events=poison, on_close=_checkpoint))
        await asyncio.sleep(10)
        await fleet.hosts["a"].aclose()
        assert fleet.record.reasons("a", "0") == [CloseReason.SHUTDOWN]
        assert fleet.stores["a"].written == []


async def test_checkpoint_in_process_error_leaves_out_the_batch_that_raised() -> None:
    """In `process_error`, `checkpoint()` means the last batch whose handler returned."""
    async with stocked(10) as fleet:
        processor = RecordingProcessor(fleet.record, on_events=_second_fails, on_error=_checkpoint)
        await fleet.start("a", processor, max_batch_size=5)
        await asyncio.sleep(60)
        assert len(fleet.record.errors) > 1
        assert fleet.checkpoint("0") == 4


@pytest.mark.parametrize("handler", [_second_fails, _second_hangs], ids=["raises", "runs"])
async def test_checkpoint_from_a_timer_task_stores_the_last_batch_processed(
    handler: Callable[[PartitionContext, Events], Awaitable[None]],
) -> None:
    """From a timer task, `checkpoint()` means the last batch whose handler returned, whatever the current one does."""
    tasks: list[asyncio.Task[None]] = []

    async def every_second(context: PartitionContext) -> None:
        with suppress(OwnershipLostError):
            while True:
                await asyncio.sleep(1)
                await context.checkpoint()

    async def begin(context: PartitionContext) -> None:
        tasks.append(asyncio.create_task(every_second(context)))

    async with stocked(10) as fleet:
        processor = RecordingProcessor(fleet.record, on_events=handler, on_open=begin)
        await fleet.start("a", processor, max_batch_size=5)
        await asyncio.sleep(30)
        assert fleet.record.deliveries[-1].numbers == (5, 6, 7, 8, 9)
        assert fleet.checkpoint("0") == 4
        await fleet.hosts["a"].aclose()
        await asyncio.gather(*tasks)


async def test_checkpoint_from_a_task_of_an_earlier_batch_leaves_out_this_one() -> None:
    """A task started by an earlier batch does not store the batch that runs now, which may fail yet."""
    left: list[asyncio.Task[None]] = []

    async def later(context: PartitionContext) -> None:
        await asyncio.sleep(5)
        await context.checkpoint()

    async def leave_a_task(context: PartitionContext, events: Events) -> None:
        if not left:
            left.append(asyncio.create_task(later(context)))
        await _second_hangs(context, events)

    async with stocked(10) as fleet:
        await fleet.start("a", RecordingProcessor(fleet.record, on_events=leave_a_task), max_batch_size=5)
        await asyncio.sleep(10)
        await left[0]
        assert fleet.record.deliveries[-1].numbers == (5, 6, 7, 8, 9)
        assert fleet.checkpoint("0") == 4


async def test_checkpoint_from_a_task_of_a_failed_try_leaves_out_the_batch() -> None:
    """A task started by a try that raised does not store the batch while the next try runs."""
    left: list[asyncio.Task[None]] = []

    async def later(context: PartitionContext) -> None:
        await asyncio.sleep(5)
        await context.checkpoint()

    async def leave_a_task(context: PartitionContext, events: Events) -> None:
        if events[-1].sequence_number > 4:
            if not left:
                left.append(asyncio.create_task(later(context)))
                raise ValueError("the first try")
            await asyncio.sleep(1e6)

    async with stocked(10) as fleet:
        await fleet.start("a", RecordingProcessor(fleet.record, on_events=leave_a_task), max_batch_size=5)
        await asyncio.sleep(10)
        await left[0]
        assert [delivery.numbers[0] for delivery in fleet.record.deliveries] == [0, 5, 5]
        assert fleet.checkpoint("0") == 4


async def _in_a_task(context: PartitionContext) -> None:
    await asyncio.create_task(context.checkpoint())


async def _in_a_thread(context: PartitionContext) -> None:
    loop = asyncio.get_running_loop()
    await asyncio.to_thread(lambda: asyncio.run_coroutine_threadsafe(context.checkpoint(), loop).result())


@pytest.mark.parametrize(
    "ask", [PartitionContext.checkpoint, _in_a_task, _in_a_thread], ids=["itself", "task", "thread"]
)
async def test_checkpoint_in_the_handler_stores_its_batch(ask: Callable[[PartitionContext], Awaitable[None]]) -> None:
    """From the running handler, and from a task or thread that it started, `checkpoint()` means its batch."""
    stored: list[int | None] = []
    async with stocked(10) as fleet:

        async def handler(context: PartitionContext, events: Events) -> None:
            await ask(context)
            stored.append(fleet.checkpoint("0"))

        await fleet.start("a", RecordingProcessor(fleet.record, on_events=handler), max_batch_size=5)
        await asyncio.sleep(10)
        assert stored == [4, 9]


async def test_checkpoint_of_a_named_event_is_stored_though_its_batch_fails() -> None:
    """An event that is named is stored, whether its batch is processed or not: the caller says so."""

    async def part(context: PartitionContext, events: Events) -> None:
        await context.checkpoint(events[2])
        raise ValueError("the rest")

    async with stocked(10) as fleet:
        await fleet.start("a", RecordingProcessor(fleet.record, on_events=part), max_batch_size=5)
        await asyncio.sleep(10)
        assert fleet.checkpoint("0") == 2


async def test_checkpoint_of_an_event_of_another_partition_is_refused() -> None:
    """An event that another partition delivered is refused by name, though its number was delivered here too."""
    refused: list[ConfigurationError] = []
    batches: dict[str, Events] = {}
    both = asyncio.Event()

    async def swap(context: PartitionContext, events: Events) -> None:
        batches[context.partition_id] = events
        if len(batches) == 2:
            both.set()
        await both.wait()
        (other,) = batches.keys() - {context.partition_id}
        try:
            await context.checkpoint(batches[other][3])
        except ConfigurationError as error:
            refused.append(error)

    async with stocked(10, 2) as fleet:
        await fleet.start("a", RecordingProcessor(fleet.record, on_events=swap))
        await asyncio.sleep(10)
        assert [error.field for error in refused] == ["event"] * 2
        assert {fleet.checkpoint("0"), fleet.checkpoint("1")} == {None}


async def test_checkpoint_of_a_pickled_event_knows_its_partition() -> None:
    """An event keeps its origin through pickling, as it does on its way to a process pool and back."""

    async def copy(context: PartitionContext, events: Events) -> None:
        await context.checkpoint(pickle.loads(pickle.dumps(events))[6])

    async with stocked(10) as fleet:
        await fleet.start("a", RecordingProcessor(fleet.record, on_events=copy))
        await asyncio.sleep(10)
        assert fleet.checkpoint("0") == 6


async def test_checkpoint_in_open_is_refused_or_stores_nothing() -> None:
    """Before anything was delivered no event can be stored, and `checkpoint()` stores nothing."""
    refused: list[ConfigurationError] = []
    kept: list[ReceivedEvent] = []

    async def keep(context: PartitionContext, events: Events) -> None:
        kept.append(events[0])

    async def early(context: PartitionContext) -> None:
        await context.checkpoint()
        if kept:
            try:
                await context.checkpoint(kept[0])
            except ConfigurationError as error:
                refused.append(error)

    async with stocked(10) as fleet:
        processor = RecordingProcessor(fleet.record, on_events=keep, on_open=early)
        await fleet.start("a", processor)
        await asyncio.sleep(10)
        await fleet.hosts["a"].aclose()
        await fleet.start("b", processor)
        await asyncio.sleep(10)
        assert len(refused) == 1
        assert fleet.checkpoint("0") is None


async def test_checkpoints_of_a_partition_are_written_by_one_task() -> None:
    """However many are asked for one after the other, no task is made for each; and it keeps nothing of who asked."""
    writers: set[asyncio.Task[object]] = set()
    values: list[weakref.ref[_Value]] = []

    async def each(context: PartitionContext, events: Events) -> None:
        value = _Value()
        values.append(weakref.ref(value))
        _VALUE.set(value)
        for event in events:
            await context.checkpoint(event)
            writers.update(task for task in asyncio.all_tasks() if task.get_name() == "eventpump checkpoint writer")

    async def start_batch(context: PartitionContext, events: Events) -> None:
        await asyncio.create_task(each(context, events))

    async with stocked(10) as fleet:
        await fleet.start("a", RecordingProcessor(fleet.record, on_events=start_batch), max_batch_size=5)
        await asyncio.sleep(10)
        assert fleet.checkpoint("0") == 9
        assert len(writers) == 1
        assert [value() for value in values] == [None, None]
        await fleet.hosts["a"].aclose()
        assert all(writer.done() for writer in writers)
