"""Calls a `KeyedProcessor` with what is accepted, several keys at a time, until each event is finished."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from eventpump.aio.tasks import TaskSet, wait_for_event
from eventpump.consumer.calls.handler import HandlerRunner
from eventpump.consumer.calls.workers import Entry, KeyedWorkers
from eventpump.consumer.keyed import KeyedProcessor, bounds_of
from eventpump.consumer.processor import PartitionContext
from eventpump.core.failures import FailureStep, ProcessorFailures
from eventpump.core.keyed import KeyedQueue
from eventpump.eventhubs.events import ReceivedEvent
from eventpump.telemetry.interface import PartitionTelemetry


class KeyedDriver(ABC):
    """Accepts events into one queue, has workers call a processor with them, and handles the calls that fail.

    Hosts and readers differ in what is abstract here.
    """

    def __init__(
        self,
        processor: KeyedProcessor,
        context: PartitionContext,
        runner: HandlerRunner,
        tasks: TaskSet,
        new_failures: Callable[[], ProcessorFailures],
        telemetry: PartitionTelemetry | None,
    ) -> None:
        self._processor = processor
        self._process, first_call = processor.process_events, processor.first_call
        if telemetry is not None:
            self._process, first_call = telemetry.around(self._process), telemetry.around(first_call)
        self._context = context
        self._runner = runner
        self._bounds = bounds_of(processor.settings)
        self._queue: KeyedQueue[ReceivedEvent] = KeyedQueue(self._bounds)
        self._seen = 0
        self._dropped = asyncio.Event()
        """Set when what is in the queue is not to be finished any more."""
        self._news = asyncio.Event()
        self._workers = KeyedWorkers(
            processor,
            first_call,
            context,
            runner,
            tasks,
            may_start=self._may_start,
            recover=lambda batch, error: self._finish(new_failures(), batch, error),
            waits=self._progressed,
            ended=self._worker_ended,
            failed=self._fail,
        )

    @abstractmethod
    def _may_start(self) -> bool:
        """Return whether a call may begin now. If not, `_changed` is called when one may, or `_goes_on` is false."""

    @abstractmethod
    def _goes_on(self) -> bool:
        """Return whether calls that may not begin now may begin later."""

    @abstractmethod
    def _fail(self, error: Exception) -> None:
        """End because of an error that is not that of a call."""

    @abstractmethod
    async def _failed(
        self, failures: ProcessorFailures, error: Exception, events: tuple[ReceivedEvent, ...]
    ) -> tuple[FailureStep, float | None]:
        """Report a failure. Return what follows, and the seconds to wait before it; None if nothing does."""

    @abstractmethod
    async def _pass_over(
        self, failures: ProcessorFailures, step: FailureStep, events: tuple[ReceivedEvent, ...], error: Exception
    ) -> bool:
        """Skip or park an event. Return whether that is done."""

    @abstractmethod
    async def _belongs(self, event: ReceivedEvent) -> bool:
        """Return whether an event that is to be delivered again is to be processed. Its failures count like others."""

    @abstractmethod
    def _advance(self) -> None:
        """Record the watermark: events may be finished."""

    def _accept(self, events: Sequence[ReceivedEvent]) -> int:
        """Accept the first of some events, as there is room for them. Return how many."""
        queue = self._queue
        chunk = events[: queue.room]
        sizes = queue.fitting([len(event.raw) for event in chunk])
        queue.accept(chunk[: len(sizes)], sizes)
        self._seen = queue.events
        return len(sizes)

    def _worker_ended(self) -> None:
        self._advance()
        self._changed()

    def _progressed(self) -> None:
        # Not without a reason: a worker that waits for a change would end its own wait.
        if self._queue.events != self._seen:
            self._seen = self._queue.events
            self._advance()
            self._changed()

    def _changed(self) -> None:
        """Let what waits look again."""
        self._news.set()
        self._news.clear()

    async def _change(self) -> None:
        """Wait until something has changed that what waits may look at."""
        await self._news.wait()

    async def _finish(self, failures: ProcessorFailures, batch: Sequence[Entry], error: Exception | None) -> bool:
        """Deliver events until they are processed or passed over, or a missing key is known. Return whether they are.

        Args:
            error: What they have just failed with; None if they are to be delivered first.
        """
        events, dropped = tuple([entry.event for entry in batch]), self._dropped
        is_unkeyed = self._queue.unkeyed is batch[0]
        # Not `retrying`: the policy decides whether an attempt follows, and during the delay other keys have the
        # worker's place.
        while True:
            if error is None:
                if not await self._may_go_on(dropped, 0.0):
                    return False
                error = await self._deliver_again(batch, events)
                if error is None:
                    break
            step, delay = await self._failed(failures, error, events)
            match step:
                case FailureStep.RETRY:
                    if delay is None or not await self._may_go_on(dropped, delay):
                        return False
                case FailureStep.NARROW:
                    return await self._finish_singly(failures, batch)
                case FailureStep.SKIP | FailureStep.PARK:
                    if not await self._may_go_on(dropped, 0.0):
                        return False
                    if not await self._pass_over(failures, step, events, error):
                        return False
                    break
                case _:
                    return False
            error = None
        if is_unkeyed and self._queue.unkeyed is not batch[0]:
            return True
        for entry in batch:
            self._queue.finish(entry)
        return True

    async def _finish_singly(self, failures: ProcessorFailures, batch: Sequence[Entry]) -> bool:
        """Deliver the events of a batch that failed one by one; as `_finish`."""
        failures.narrowed()
        for entry in batch:
            if not await self._finish(failures, (entry,), None):
                return False
            failures.settled()
            self._progressed()
            # Handlers that never wait must not block the event loop.
            await asyncio.sleep(0)
        return True

    async def _deliver_again(self, batch: Sequence[Entry], events: tuple[ReceivedEvent, ...]) -> Exception | None:
        """Call the processor, if the events are to be processed. Return what was raised.

        An event whose key is not known is given its place in the line of its key instead.
        """
        try:
            if not await self._belongs(events[0]):
                return None
            if batch[0] is self._queue.unkeyed:
                return self._workers.key_again(self._queue, events[0])
            await self._runner.run("process_events", self._process, self._context, events, events=events)
        except Exception as raised:
            return raised
        return None

    async def _may_go_on(self, dropped: asyncio.Event, delay: float) -> bool:
        """Wait so long at least before going on with events in hand;
        return False if the end begins, or they are dropped."""
        if delay:
            await self._workers.rest(self._queue, wait_for_event(dropped, delay))
        while not dropped.is_set() and not self._may_start():
            if not self._goes_on():
                return False
            await self._change()
        return not dropped.is_set()
