"""Passes the events of a partition on to a `KeyedProcessor`, several keys at a time, and tracks the watermark."""

from __future__ import annotations

import asyncio
from functools import partial

from eventpump.aio.tasks import resolve
from eventpump.consumer.calls.handler import has_place
from eventpump.consumer.calls.keyed_driver import KeyedDriver
from eventpump.consumer.keyed import KeyedProcessor
from eventpump.consumer.pump.dispatch import still_belongs
from eventpump.consumer.pump.partition import OpenPartition
from eventpump.consumer.pump.parts import PumpParts
from eventpump.core.failures import FailureStep, ProcessorFailures
from eventpump.core.keyed import KeyedQueue
from eventpump.eventhubs.events import ReceivedEvent


class KeyedDispatch(KeyedDriver):
    """Accepts events without waiting for their end, and has workers call the processor.

    Everything that is accepted belongs to one queue. It is finished, or dropped as a whole, before events of another
    place in the partition are accepted: so the watermark is always one of what is being read.
    """

    def __init__(
        self,
        parts: PumpParts,
        processor: KeyedProcessor,
    ) -> None:
        ownership = self._ownership = parts.ownership
        self._loop_gate = ownership.services.loop_gate
        self._requests = parts.requests
        self._failing = parts.failing
        self._partition: OpenPartition | None = None
        self._recorded = 0
        self._doubts: dict[ReceivedEvent, BaseException | None] = {}
        self._held_back: asyncio.Future[None] | None = None
        self._is_held = False
        self._heeds_requests = True
        failures = parts.failing.new_failures
        super().__init__(processor, parts.context, parts.runner, ownership.tasks, failures, parts.telemetry)

    @property
    def in_hand(self) -> int:
        """Events that were accepted, and are neither processed nor passed over."""
        return self._queue.events

    def begin(self, partition: OpenPartition, events: tuple[ReceivedEvent, ...]) -> bool:
        """Return False: `deliver` does all."""
        return False

    async def deliver(self, partition: OpenPartition, events: tuple[ReceivedEvent, ...]) -> tuple[ReceivedEvent, ...]:
        """Accept a batch, as there is room for it; see `Dispatch`."""
        self._partition = partition
        while self._ownership.may_deliver():
            count = self._accept(events)
            if count:
                self._accepted(partition, events[:count])
            self._workers.look(self._queue)
            events = events[count:]
            if not events:
                break
            if self._is_called_away(partition):
                return events
            await self._change()
        return ()

    def _is_called_away(self, partition: OpenPartition) -> bool:
        """Return whether something is asked of the pump that does not wait for room. In a replay, other ones do."""
        requests = self._requests
        return requests.interrupts_batch() if partition.replayed.is_running else requests.is_due

    def _accepted(self, partition: OpenPartition, events: tuple[ReceivedEvent, ...]) -> None:
        if partition.doubts and events[0] in partition.doubts:
            self._doubts[events[0]] = partition.doubts.pop(events[0])
            self._queue.doubtful.add(events[0])
        last = next(filter(has_place, reversed(events)), None)
        if last is not None:
            self._context.last_delivered = last
            if not partition.replayed.is_running:
                partition.tracker.events_delivered(last)

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

    def _fail(self, error: Exception) -> None:
        if not self._ownership.life.is_ending:
            self._ownership.fail(error)

    def _goes_on(self) -> bool:
        return self._ownership.goes_on()

    def _advance(self) -> None:
        self.record()

    # ------------------------------------------------------------------------------------------------------- failures

    async def _failed(
        self, failures: ProcessorFailures, error: Exception, events: tuple[ReceivedEvent, ...]
    ) -> tuple[FailureStep, float | None]:
        operation = "filter" if events[0] in self._doubts else "process_events"
        return await self._failing.failed(failures, operation, error, events)

    async def _pass_over(
        self, failures: ProcessorFailures, step: FailureStep, events: tuple[ReceivedEvent, ...], error: Exception
    ) -> bool:
        wait = partial(self._may_go_on, self._dropped)
        if not await self._failing.pass_over(failures, step, events, error, wait=wait):
            return False
        self._doubts.pop(events[0], None)
        return True

    async def _belongs(self, event: ReceivedEvent) -> bool:
        partition = self._partition
        assert partition is not None
        return event not in self._doubts or await still_belongs(self._runner, partition, self._doubts, event, event)
