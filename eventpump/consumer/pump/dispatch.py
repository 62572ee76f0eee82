"""Passes batches on to a processor: the interface, and the way in which one batch follows the other."""

from __future__ import annotations

import asyncio
from typing import Final, Protocol, TypeVar

from eventpump.aio.tasks import resolve, wait_for_event
from eventpump.consumer.calls.handler import BegunCall, Call, HandlerRunner, InHand, has_place
from eventpump.consumer.pump.partition import OpenPartition
from eventpump.consumer.pump.parts import PumpParts
from eventpump.consumer.pump.steps import Steps
from eventpump.core.failures import FailureStep
from eventpump.errors import EventError
from eventpump.eventhubs.events import ReceivedEvent

_K = TypeVar("_K")

_NARROW: Final = FailureStep.NARROW
"""Read for each batch: reading a member of an enumeration from its class is slow."""


class Dispatch(Protocol):
    """Calls the processor of one pump with the events of its partition."""

    @property
    def in_hand(self) -> int:
        """Events that were accepted, and are neither processed nor passed over."""

    async def deliver(self, partition: OpenPartition, events: tuple[ReceivedEvent, ...]) -> tuple[ReceivedEvent, ...]:
        """Accept a batch. It need not be processed when this returns.

        Args:
            events: The batch; none for a call while the partition is idle.

        Returns:
            The events of it that were not accepted because of requests: deliver them again once those are carried out.
        """

    def begin(self, partition: OpenPartition, events: tuple[ReceivedEvent, ...]) -> bool:
        """Deliver a batch within this call, if nothing has to be waited for. Called in the pump's task.

        Returns:
            Whether it is processed. If not, `deliver` is to be called with it at once, which goes on with it.
        """

    async def settle(self, *, heeds_requests: bool) -> bool:
        """Wait until everything that was accepted is processed or passed over.

        Args:
            heeds_requests: Whether a pause or a seek ends the wait.
        """

    def hold(self, *, is_held: bool) -> None:
        """Begin no call from now on, or begin calls again."""

    async def drop(self) -> None:
        """Wait until no call runs, and forget what was accepted and is not processed."""

    def record(self) -> None:
        """Let the tracker know all that is processed by now."""

    def wake(self) -> None:
        """Look again at what is asked of the pump."""

    def stop(self) -> None:
        """Begin no further call: the pump ends."""


class SerialDispatch:
    """Calls `process_events` in the pump's task, with one batch until it is processed or passed over.

    Args:
        steps: Records which events of a running batch are finished; None if a batch is processed as a whole.
    """

    def __init__(
        self,
        parts: PumpParts,
        steps: Steps | None = None,
    ) -> None:
        ownership = self._ownership = parts.ownership
        self._steps = steps
        self._life = ownership.life
        self._loop_gate = ownership.services.loop_gate
        self._runner = parts.runner
        self._context = parts.context
        self._requests = parts.requests
        self._failing = parts.failing
        self._failures = parts.failing.failures
        self._telemetry = parts.telemetry
        self._held_back: asyncio.Future[None] | None = None
        # All its batches are processed in one task, one after the other.
        self._call: Call | None = None
        self._begun: BegunCall | None = None

    @property
    def in_hand(self) -> int:
        """None: a batch is processed when `deliver` returns."""
        return 0

    async def deliver(
        self, partition: OpenPartition, events: tuple[ReceivedEvent, ...], *, is_narrowed: bool = False
    ) -> tuple[ReceivedEvent, ...]:
        """Deliver a batch, or one of its events, until it is processed or passed over. See `Dispatch.deliver`."""
        begun, self._begun = self._begun, None
        ledger, last, is_replay = self._loop_gate.ledger, _last_of(events), partition.replayed.is_running
        # No checkpoint is stored for what a replay delivers.
        steps = None if is_replay else self._steps
        while begun is not None or self._ownership.may_deliver():
            if begun is None and ledger.is_watching and await self._hold_back():
                continue
            step, operation, belongs = None, "process_events", True
            try:
                if begun is None and partition.doubts and events and events[0] in partition.doubts:
                    operation = "filter"
                    belongs = await still_belongs(self._runner, partition, partition.doubts, events[0], events[0])
                    operation = "process_events"
                if belongs:
                    waiting, begun = begun, None
                    if waiting is None:
                        waiting = self._begin(partition, events, last, is_replay=is_replay, is_narrowed=is_narrowed)
                    if waiting is not None:
                        assert self._call is not None
                        await self._runner.finish(self._call, waiting)
            except Exception as error:
                if not is_replay:
                    partition.tracker.events_failed()
                if steps is not None and operation == "process_events":
                    steps.record()
                    # What is finished is not delivered again.
                    events = steps.end()
                step, delay = await self._failing.failed(self._failures, operation, error, events)
                if delay is not None:
                    # Not `retrying`: the policy decides whether an attempt follows. A seek away from a batch that fails
                    # must not wait for its next attempt.
                    await wait_for_event(self._requests.news, delay)
                if step is not FailureStep.NARROW and (
                    step is FailureStep.RETRY
                    or not await self._failing.pass_over(self._failures, step, events, error, wait=self._wait)
                ):
                    if self._requests.is_due and not self._life.is_ending:
                        return events
                    continue
            if step is _NARROW:
                return events if self._requests.interrupts_batch() else await self._deliver_singly(partition, events)
            if partition.doubts and events:
                partition.doubts.pop(events[0], None)
            self._passed(partition, events, last, is_replay=is_replay, is_called=step is None and belongs)
            return ()
        return ()

    def begin(self, partition: OpenPartition, events: tuple[ReceivedEvent, ...]) -> bool:
        """Call `process_events`, if nothing has to be waited for before that. See `Dispatch.begin`."""
        if self._loop_gate.ledger.is_watching or not self._ownership.may_deliver():
            return False
        last, is_replay = _last_of(events), partition.replayed.is_running
        try:
            self._begun = self._begin(partition, events, last, is_replay=is_replay)
        except Exception as error:  # of the processor, before it was called: it is for `deliver`, as one of the call
            self._begun = BegunCall(InHand(), error=error)
        if self._begun is not None:
            return False
        self._passed(partition, events, last, is_replay=is_replay)
        return True

    def _begin(
        self,
        partition: OpenPartition,
        events: tuple[ReceivedEvent, ...],
        last: ReceivedEvent | None,
        *,
        is_replay: bool,
        is_narrowed: bool = False,
    ) -> BegunCall | None:
        """Call `process_events`. See `HandlerRunner.begin`."""
        context, call = self._context, self._call
        if call is None:
            call = self._call = self._runner.call("process_events")
        if last is not None:
            context.last_delivered = last
            if not is_replay:
                partition.tracker.events_delivered(last, is_again=is_narrowed)
        if self._steps is not None and not is_replay:
            self._steps.begin(partition, events)
        process = partition.processor.process_events
        if self._telemetry is not None:
            process = self._telemetry.around(process)
        return self._runner.begin(call, process, (context, events), events, is_batch=True)

    def _passed(
        self,
        partition: OpenPartition,
        events: tuple[ReceivedEvent, ...],
        last: ReceivedEvent | None,
        *,
        is_replay: bool,
        is_called: bool = True,
    ) -> None:
        """Record that a batch is processed, by a call that has ended just now, or passed over."""
        if self._failures.in_a_row:
            self._failures.settled()
        if is_replay:
            return
        ended: float | None = None
        if is_called:
            assert self._call is not None
            ended = self._call.ended
            if self._steps is not None:
                events = self._steps.end()
        partition.processed(last, len(events), now=ended)
        if last is not None and self._requests.drains:
            self._requests.processed(last.sequence_number + 1)

    async def _deliver_singly(
        self, partition: OpenPartition, events: tuple[ReceivedEvent, ...]
    ) -> tuple[ReceivedEvent, ...]:
        """Deliver the events of a batch that failed one by one; as `deliver`."""
        self._failures.narrowed()
        for number, event in enumerate(events):
            if not self._ownership.may_deliver():
                break
            if self._requests.interrupts_batch() or await self.deliver(partition, (event,), is_narrowed=True):
                self._failures.settled()
                self._failures.widened()
                # Those before it are processed, skipped or parked, and are not delivered again.
                return events[number:]
            # Handlers that never suspend must not block the event loop.
            await asyncio.sleep(0)
        self._failures.widened()
        return ()

    async def _hold_back(self) -> bool:
        """Wait while handlers compute and the store needs the loop. Return False, without a wait, if that is not so.

        The wait ends early if the pump ends.
        """
        loop_gate = self._loop_gate
        waiter = self._held_back = loop_gate.hold()
        if waiter is None:
            return False
        try:
            await waiter
        finally:
            self._held_back = None
            loop_gate.release(waiter)
        return True

    async def settle(self, *, heeds_requests: bool) -> bool:
        """Return at once: nothing is in hand."""
        return self._ownership.goes_on()

    def hold(self, *, is_held: bool) -> None:
        """Do nothing: the pump itself begins all calls."""

    async def drop(self) -> None:
        """Record what is finished of a batch whose call the end of the pump has cancelled. Nothing else is in hand."""
        if self._steps is not None:
            self._steps.record()
            self._steps.end()

    def record(self) -> None:
        """Let the tracker know what is finished of the running batch; `deliver` has done so for all before it."""
        if self._steps is not None:
            self._steps.record()

    def wake(self) -> None:
        """Do nothing: requests are looked at between two batches."""

    def stop(self) -> None:
        """End a wait for other handlers: the pump ends."""
        if self._held_back is not None:
            resolve(self._held_back, None)

    async def _wait(self, delay: float) -> bool:
        """Wait before another attempt, in seconds, or until there is a request. Return whether it may follow."""
        await wait_for_event(self._requests.news, delay)
        return not self._requests.is_due


def _last_of(events: tuple[ReceivedEvent, ...]) -> ReceivedEvent | None:
    """Return the last event whose place can be read: the others are covered by the checkpoint of a later one."""
    last = events[-1] if events else None
    try:
        if last is not None:
            last.sequence_number  # noqa: B018 - whether it can be read is the question
    except EventError:
        return next(filter(has_place, reversed(events)), None)
    return last


async def still_belongs(
    runner: HandlerRunner,
    partition: OpenPartition,
    doubts: dict[_K, BaseException | None],
    doubt: _K,
    event: ReceivedEvent,
) -> bool:
    """Return whether an event belongs to the stream, for which the function failed when it was received.

    Args:
        doubts: As `OpenPartition.doubts`. Once it is known whether the event belongs to the stream, it is not in doubt.
    """
    selection = partition.feed.selection
    assert selection is not None
    found = False

    async def ask() -> None:
        nonlocal found
        if (error := doubts[doubt]) is not None:
            # The failure on receipt counts like any other.
            doubts[doubt] = None
            raise error
        found = selection.matches(event)

    await runner.run("filter", ask, events=(event,))
    del doubts[doubt]
    return found
