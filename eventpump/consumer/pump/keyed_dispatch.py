"""Passes the events of a partition on to a `KeyedProcessor`, several keys at a time, and tracks the watermark."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

from eventpump.aio.tasks import resolve, wait_for_event
from eventpump.consumer.calls.handler import HandlerRunner, has_place
from eventpump.consumer.calls.workers import Entry, KeyedWorkers
from eventpump.consumer.keyed import KeyedProcessor, bounds_of
from eventpump.consumer.processor import PartitionContext
from eventpump.consumer.pump.dispatch import still_belongs
from eventpump.consumer.pump.failing import FailureHandling
from eventpump.consumer.pump.ownership import Ownership
from eventpump.consumer.pump.partition import OpenPartition
from eventpump.consumer.pump.requests import Requests
from eventpump.core.failures import FailureStep, ProcessorFailures
from eventpump.core.keyed import KeyedQueue
from eventpump.eventhubs.events import ReceivedEvent


class KeyedDispatch:
    """Accepts events without waiting for their end, and has workers call the processor.

    Everything that is accepted belongs to one queue. It is finished, or dropped as a whole, before events of another
    place in the partition are accepted: so the watermark is always one of what is being read.

    Args:
        ownership: The pump's lease and state.
        runner: Runs the user's code.
        context: What the processor is called with.
        requests: What is asked of the pump.
        failing: Handles the failures of the processor.
        processor: The processor.
    """

    def __init__(
        self,
        ownership: Ownership,
        runner: HandlerRunner,
        context: PartitionContext,
        requests: Requests,
        failing: FailureHandling,
        processor: KeyedProcessor,
    ) -> None:
        self._ownership = ownership
        self._loop_gate = ownership.services.loop_gate
        self._loop = asyncio.get_running_loop()
        self._runner = runner
        self._context = context
        self._requests = requests
        self._failing = failing
        self._processor = processor
        self._partition: OpenPartition | None = None
        self._bounds = bounds_of(processor.settings)
        self._queue: KeyedQueue[ReceivedEvent] = KeyedQueue(self._bounds)
        self._recorded = 0
        self._seen = 0
        self._dropped = asyncio.Event()
        self._doubts: dict[ReceivedEvent, BaseException | None] = {}
        self._waiters: list[asyncio.Future[None]] = []
        self._held_back: asyncio.Future[None] | None = None
        self._is_held = False
        self._heeds_requests = True
        self._workers = KeyedWorkers(
            processor.settings.concurrency,
            key=processor.key,
            runner=runner,
            tasks=ownership.tasks,
            handle=partial(processor.first_call, context),
            may_start=self._may_start,
            recover=self._recover,
            waits=self._progressed,
            ended=self._worker_ended,
            failed=self._worker_failed,
            stepped=self._loop_gate.stepped,
        )

    @property
    def in_hand(self) -> int:
        """Events that were accepted, and are neither processed nor passed over."""
        return self._queue.events

    async def deliver(self, partition: OpenPartition, events: tuple[ReceivedEvent, ...]) -> tuple[ReceivedEvent, ...]:
        """Accept a batch, as there is room for it; see `Dispatch`."""
        self._partition = partition
        accepted = 0
        while self._ownership.may_deliver():
            accepted = self._accept(partition, events, accepted)
            self._workers.look(self._queue)
            if accepted == len(events):
                break
            if self._is_called_away(partition):
                return events[accepted:]
            await self._change()
        return ()

    def _is_called_away(self, partition: OpenPartition) -> bool:
        """Return whether something is asked of the pump that does not wait for room. In a replay, other ones do."""
        requests = self._requests
        return requests.interrupts_batch() if partition.replayed.is_running else requests.is_due

    def _accept(self, partition: OpenPartition, events: tuple[ReceivedEvent, ...], first: int) -> int:
        """Accept the events from an index on for which there is room. Return the index of the next one."""
        queue = self._queue
        chunk = events[first : first + queue.room]
        sizes = queue.fitting([len(event.raw) for event in chunk])
        number = first + len(sizes)
        if partition.doubts and number > first and events[first] in partition.doubts:
            self._doubts[events[first]] = partition.doubts.pop(events[first])
            queue.doubtful.add(events[first])
        queue.accept(events[first:number], sizes)
        self._seen = queue.events
        if number > first:
            last = next(filter(has_place, reversed(events[first:number])), None)
            if last is not None:
                self._context.last_delivered = last
                if not partition.replayed.is_running:
                    partition.tracker.events_delivered(last)
        return number

    async def settle(self, *, heeds_requests: bool) -> bool:
        """Wait until everything that was accepted is finished; see `Dispatch`."""
        requests = self._requests
        self._heeds_requests = heeds_requests
        try:
            while self._queue.events:
                if not self._ownership.goes_on() or (heeds_requests and (requests.is_paused or requests.has_seek())):
                    return False
                self._workers.look(self._queue)
                await self._change()
        finally:
            self._heeds_requests = True
        self.record()
        return self._ownership.goes_on()

    def hold(self, *, is_held: bool) -> None:
        """Begin no call from now on, or begin calls again."""
        self._is_held = is_held
        self.wake()

    async def drop(self) -> None:
        """Wait until no call runs, and forget what was accepted and is not finished."""
        self._dropped.set()
        self._changed()
        while self._workers.active:
            await self._change()
        self.record()
        self._queue = KeyedQueue(self._bounds)
        self._recorded = self._seen = 0
        self._doubts.clear()
        if not self._ownership.life.is_ending:
            self._dropped = asyncio.Event()

    def record(self) -> None:
        """Let the tracker know the watermark."""
        partition, watermark = self._partition, self._queue.watermark
        self._queue.advance()
        count = watermark.count - self._recorded
        if not count or partition is None:
            return
        self._recorded = watermark.count
        if partition.replayed.is_running:
            return
        last, drains = watermark.position, self._requests.drains
        partition.processed(last, count, is_newest_taken=False)
        if last is not None and drains:
            self._requests.processed(last.sequence_number + 1)
        if partition.feed.selection is not None and not partition.in_hand:
            # The pump may be waiting for the next event of the stream already.
            partition.note_passed(is_drained=bool(drains))
            if drains:
                self._requests.processed(partition.next_number(drains[-1].facts))

    def wake(self) -> None:
        """Look again at what is asked of the pump."""
        self._workers.check_again()
        self._changed()
        self._workers.look(self._queue)

    def stop(self) -> None:
        """Begin no further call: the pump ends."""
        self._workers.check_again()
        self._dropped.set()
        if self._held_back is not None:
            resolve(self._held_back, None)
        self._changed()

    # ------------------------------------------------------------------------------------------ called by the workers

    def _may_start(self) -> bool:
        """Return whether a call may begin now. If not, something wakes the workers later."""
        requests = self._requests
        if self._is_held or self._dropped.is_set():
            return False
        if self._heeds_requests and (requests.is_paused or requests.has_seek()):
            return False
        if self._loop_gate.ledger.is_watching and self._is_held_back():
            return False
        return self._ownership.may_deliver()

    def _is_held_back(self) -> bool:
        """Return whether handlers compute and the store needs the loop. The workers are woken when that is over."""
        if self._held_back is None:
            waiter = self._loop_gate.hold()
            if waiter is None:
                return False
            self._held_back = waiter
            waiter.add_done_callback(self._held_no_more)
        return True

    def _held_no_more(self, waiter: asyncio.Future[None]) -> None:
        self._loop_gate.release(waiter)
        self._held_back = None
        self.wake()

    def _worker_failed(self, error: Exception) -> None:
        if not self._ownership.life.is_ending:
            self._ownership.fail(error)

    def _worker_ended(self) -> None:
        self.record()
        self._changed()

    def _progressed(self) -> None:
        # Not without a reason: a worker that waits for a change would end its own wait.
        if self._queue.events != self._seen:
            self._seen = self._queue.events
            self.record()
            self._changed()

    def _changed(self) -> None:
        """Let what waits look again."""
        waiters = self._waiters
        if waiters:
            self._waiters = []
            for waiter in waiters:
                resolve(waiter, None)

    async def _change(self) -> None:
        """Wait until something has changed that what waits may look at."""
        waiter = self._loop.create_future()
        self._waiters.append(waiter)
        await waiter

    # ------------------------------------------------------------------------------------------------------- failures

    async def _recover(self, batch: list[Entry], error: Exception | None) -> bool:
        """Apply the failure policy to the events of a call that raised, or that cannot be called yet.

        Returns:
            Whether they are finished, or the key of the one whose key was not known is now.
        """
        return await self._finish(self._failing.new_failures(), batch, error)

    async def _finish(self, failures: ProcessorFailures, batch: Sequence[Entry], error: Exception | None) -> bool:
        """Deliver events until they are processed or passed over, or a missing key is known. Return whether they are.

        Args:
            failures: Their failures.
            batch: Their entries.
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
            operation = "filter" if events[0] in self._doubts else "process_events"
            step, delay = await self._failing.failed(failures, operation, error, events)
            match step:
                case FailureStep.RETRY:
                    if delay is None or not await self._may_go_on(dropped, delay):
                        return False
                case FailureStep.NARROW:
                    return await self._finish_singly(failures, batch)
                case FailureStep.SKIP | FailureStep.PARK:
                    if not await self._pass_over(failures, step, events, error, dropped):
                        return False
                    break
                case _:
                    return False
            error = None
        if is_unkeyed and self._queue.unkeyed is not batch[0]:
            return True
        for entry in batch:
            self._queue.finish(entry)
        self._doubts.pop(events[0], None)
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
        """Call the processor, once it is known that the event belongs to the stream. Return what was raised.

        An event whose key is not known is given its place in the line of its key instead.
        """
        (event, *_), partition = events, self._partition
        assert partition is not None
        try:
            if event in self._doubts:
                belongs = await still_belongs(self._runner, partition, self._doubts, event, event)
                if not belongs:
                    return None
            if batch[0] is self._queue.unkeyed:
                return self._workers.key_again(self._queue, event)
            await self._runner.run(
                "process_events", self._processor.process_events, self._context, events, events=events
            )
        except Exception as raised:
            return raised
        return None

    async def _pass_over(
        self,
        failures: ProcessorFailures,
        step: FailureStep,
        events: tuple[ReceivedEvent, ...],
        error: Exception,
        dropped: asyncio.Event,
    ) -> bool:
        """Skip or park an event. Return whether that is done."""
        if not await self._may_go_on(dropped, 0.0):
            return False

        async def wait(delay: float) -> bool:
            return await self._may_go_on(dropped, delay)

        return await self._failing.pass_over(failures, step, events, error, wait=wait)

    async def _may_go_on(self, dropped: asyncio.Event, delay: float) -> bool:
        """Wait before something is done with events in hand.

        Args:
            dropped: Set when they are dropped.
            delay: Seconds to wait at least.

        Returns:
            Whether to go on; not if the pump ends, or the events are dropped.
        """
        if delay:
            await self._workers.rest(self._queue, wait_for_event(dropped, delay))
        while not dropped.is_set() and not self._may_start():
            if not self._ownership.goes_on():
                return False
            await self._change()
        return not dropped.is_set()
