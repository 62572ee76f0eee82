"""Delivers a partition's events: takes batches from the cache, and passes them on to what calls the processor."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, Final

from eventpump.aio.steps import AllDone, Rest
from eventpump.consumer.calls.handler import PumpEndedError, has_place
from eventpump.consumer.keyed import KeyedProcessor
from eventpump.consumer.pump.batches import BatchDispatch, BatchSource
from eventpump.consumer.pump.dispatch import Dispatch, SerialDispatch
from eventpump.consumer.pump.keyed_dispatch import KeyedDispatch
from eventpump.consumer.pump.partition import OpenPartition
from eventpump.consumer.pump.parts import PumpParts
from eventpump.consumer.pump.reading import PartitionReading
from eventpump.consumer.pump.rewind import Rewinding
from eventpump.consumer.pump.steps import Steps, StepwiseProcessor
from eventpump.consumer.record.starts import HubRecreatedError, loss_error
from eventpump.core.pump_state import PumpState
from eventpump.core.starts import retained_from
from eventpump.eventhubs.events import ReceivedEvent
from eventpump.reports import DataLost

_SUSPENDED: Final = PumpState.SUSPENDED
"""Read for each batch: reading a member of an enumeration from its class is slow."""


class Delivery:
    """Delivers the events of one pump, in its task."""

    def __init__(
        self,
        parts: PumpParts,
        reading: PartitionReading,
        rewinding: Rewinding,
    ) -> None:
        self._parts = parts
        ownership = self._ownership = parts.ownership
        self._life = ownership.life
        self._settings = ownership.settings
        self._requests = parts.requests
        self._failing = parts.failing
        self._reading = reading
        self._rewinding = rewinding
        self._dispatch: Dispatch | None = None
        self._task: asyncio.Task[Any] | None = None
        self._partition: OpenPartition | None = None
        # What `_deliver_at_once` leaves to the task: a batch of which the first step is done, or one before which
        # numbers are missing.
        self._begun: Rest[tuple[ReceivedEvent, ...]] | AllDone[tuple[ReceivedEvent, ...]] | None = None
        self._before_gap: tuple[ReceivedEvent, ...] = ()

    async def run(self, partition: OpenPartition) -> None:
        """Deliver batches until the pump ends."""
        settings = self._settings
        life, requests, limit = self._life, self._requests, settings.max_batch_size
        dispatch = self._dispatch = self._make_dispatch(partition)
        self._task = asyncio.current_task()
        has_settled = False
        while life.reason is None:
            feed = partition.feed
            if life.state is _SUSPENDED:
                # The link is stolen. The manager checks whether the lease is lost, too.
                await self._ownership.ending.wait()
                return
            if requests.is_due:
                partition = await self._rewinding.carry_out(dispatch)
                continue
            if feed.selection is not None and not await self._passes_missing(partition, dispatch):
                partition = await self._restart(dispatch)
                continue
            # Where nothing has come since a batch was processed, a wait follows. It ends at once if the feed has ended.
            is_waiting, has_settled = has_settled, False
            # Of several subscriptions that keep pace each gets the very same tuple.
            events = () if is_waiting else tuple(feed.take(limit))
            if events:
                partition.in_hand += len(events)
                if feed.selection is None:
                    follows = partition.continuity.follows(events)
                else:
                    follows = True
                    partition.took(events)
                    if requests.drains and partition.in_hand == len(events) and has_place(events[0]):
                        # All before it is processed, or need not be.
                        requests.processed(events[0].sequence_number)
                if not follows and not await self._may_pass_gap(partition, dispatch, events):
                    partition = await self._restart(dispatch)
                    continue
                left = await dispatch.deliver(partition, events)
            elif not is_waiting and feed.error is not None:
                if not await self._reading.may_restart(feed.error):
                    return
                partition = await self._restart(dispatch)
                continue
            elif feed.selection is not None:
                if not await self._news_of(partition) and self._ownership.may_deliver():
                    await self._idle(partition, dispatch)
                continue
            else:
                has_come = await self._wait(partition)
                begun, self._begun = self._begun, None
                events, self._before_gap = self._before_gap, ()
                if begun is not None:
                    left = await begun
                elif events:
                    if not await self._may_pass_gap(partition, dispatch, events):
                        partition = await self._restart(dispatch)
                        continue
                    left = await dispatch.deliver(partition, events)
                else:
                    if not has_come and self._ownership.may_deliver():
                        await self._idle(partition, dispatch)
                    continue
            while left:
                before, partition = partition, await self._rewinding.carry_out(dispatch)
                if partition is not before:
                    break
                left = await dispatch.deliver(partition, left)
            has_settled = feed.processed()
            if not has_settled:
                # A handler that never suspends must not block the event loop.
                await asyncio.sleep(0)

    async def _wait(self, partition: OpenPartition) -> bool:
        """Wait for events. Return whether there is something to do, which may have begun (`_deliver_at_once`)."""
        self._partition = partition
        try:
            return await partition.feed.wait(self._settings.max_wait_time, self._deliver_at_once, self._task)
        except asyncio.CancelledError as error:
            if self._begun is None:
                raise
            # It hits what has begun, where that waits.
            self._begun.error = error
            return True

    def _deliver_at_once(self) -> bool:
        """Deliver what has come within the call that brings it, where the handler does not wait for anything.

        Called while the pump's task waits for events, as that task and in its context, and does what the task would do.
        What is left of it is for the task; so is all else, as whatever asks for that ends the wait.

        Returns:
            Whether the task is to wait on: everything that came is processed.
        """
        partition, dispatch = self._partition, self._dispatch
        assert partition is not None
        assert dispatch is not None
        feed = partition.feed
        try:
            events = tuple(feed.take(self._settings.max_batch_size))
            if not events:
                return False
            partition.in_hand += len(events)
            if not partition.continuity.follows(events):
                self._before_gap = events
                return False
            if dispatch.begin(partition, events):
                return feed.processed()
            steps = dispatch.deliver(partition, events).__await__()
            waits_for = next(steps)
        except StopIteration as stop:
            if not stop.value and feed.processed():
                return True
            self._begun = AllDone(stop.value)
        except BaseException as error:
            self._begun = AllDone((), error)
        else:
            self._begun = Rest(steps, waits_for)
        return False

    def _make_dispatch(self, partition: OpenPartition) -> Dispatch:
        processor, parts = partition.processor, self._parts
        if isinstance(processor, BatchSource):
            return BatchDispatch(parts, processor)
        if isinstance(processor, KeyedProcessor):
            return KeyedDispatch(parts, processor)
        return SerialDispatch(parts, Steps(processor) if isinstance(processor, StepwiseProcessor) else None)

    def wake(self) -> None:
        """Look again at what is asked of the pump."""
        if self._dispatch is not None:
            self._dispatch.wake()

    def record(self) -> None:
        """Let the tracker know all that is processed by now."""
        if self._dispatch is not None:
            self._dispatch.record()

    async def _passes_missing(self, partition: OpenPartition, dispatch: Dispatch) -> bool:
        """Look for missing numbers before the next event of a stream. Return whether to deliver it."""
        if not partition.continuity.misses(partition.feed.take_missing()):
            return True
        # No checkpoint passes what may be lost before that is handled.
        partition.in_hand += 1
        if not await self._may_pass_gap(partition, dispatch, ()):
            return False
        partition.in_hand -= 1
        return True

    def _news_of(self, partition: OpenPartition) -> Awaitable[bool]:
        """Record how far a stream has come. Return a wait for its events, false where none came for long."""
        feed, drains = partition.feed, self._requests.drains
        partition.note_passed(is_drained=bool(drains))
        if drains:
            self._requests.processed(partition.next_number(drains[-1].facts))
        return feed.wait(self._settings.max_wait_time)

    async def _idle(self, partition: OpenPartition, dispatch: Dispatch) -> None:
        """Do what is due after a wait in which no event has come."""
        self._reading.waited()
        if self._requests.drains:
            # The hub may have dropped the events that are waited for: nothing follows that would show it.
            facts = await self._reading.facts()
            # Where reading goes on may lie beyond that: after a loss it may have been the end.
            kept = max(retained_from(facts), partition.next_number(facts))
            if not partition.feed.available and not dispatch.in_hand:
                self._requests.processed(kept)
        if self._settings.call_when_idle:
            await dispatch.deliver(partition, ())

    def stop(self) -> None:
        """Begin no further call of the processor: the pump ends."""
        if self._dispatch is not None:
            self._dispatch.stop()

    async def aclose(self) -> None:
        """Wait until no call of `process_events` runs any more. `stop` was called before.
        Raises `CancelledError` if abandoned."""
        while self._dispatch is not None:
            try:
                await self._dispatch.drop()
                return
            except asyncio.CancelledError:
                await self._parts.runner.take_cancellation_back()

    async def _restart(self, dispatch: Dispatch) -> OpenPartition:
        """Find the start position again, once everything that was received is processed, and read from there."""
        await dispatch.settle(heeds_requests=False)
        await dispatch.drop()
        return await self._reading.restart()

    async def _may_pass_gap(
        self, partition: OpenPartition, dispatch: Dispatch, events: tuple[ReceivedEvent, ...]
    ) -> bool:
        """Find out whether missing numbers are lost, and apply `on_data_loss`. Return whether to deliver the batch."""
        try:
            loss = await partition.continuity.find_loss(events)
        except HubRecreatedError:
            # The hub of the missing events was deleted: everything in it that was not processed is reported as lost.
            return False
        if loss is None:
            return True
        action = loss.action(self._settings.on_data_loss)
        if action == "latest":
            # What was received before the gap is not to be passed over with it.
            if not await dispatch.settle(heeds_requests=False):
                await self._ownership.ending.wait()
                raise PumpEndedError
            await self._reading.skip_to_end(loss)
            return False
        self._ownership.report(DataLost, loss, action)
        if action == "fail":
            await self._failing.end_with(loss_error(self._settings.hub, self._ownership.partition_id, loss))
            return False
        return True
