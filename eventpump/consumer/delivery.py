"""Delivers a partition's events: takes batches from the cache, and calls the processor until each is processed."""

from __future__ import annotations

import asyncio

from eventpump.aio.tasks import resolve
from eventpump.consumer.failing import FailureHandling
from eventpump.consumer.handler import HandlerRunner
from eventpump.consumer.opening import HubRecreatedError, loss_error
from eventpump.consumer.partition import OpenPartition, has_place
from eventpump.consumer.processor import PartitionContext
from eventpump.consumer.reading import PartitionReading
from eventpump.consumer.requests import Requests
from eventpump.consumer.rewind import Rewinding
from eventpump.consumer.tenure import Tenure
from eventpump.core.failures import FailureStep
from eventpump.core.starts import retained_from
from eventpump.eventhubs.events import ReceivedEvent
from eventpump.reports import DataLost


class Delivery:
    """Delivers the events of one pump, in its task.

    Args:
        tenure: The pump's lease and state.
        runner: Runs the user's code.
        context: What the processor is called with.
        requests: What is asked of the pump.
        failing: Handles the failures of the processor.
        reading: Where the events come from.
        rewinding: Carries out what is asked of the pump.
    """

    def __init__(
        self,
        tenure: Tenure,
        runner: HandlerRunner,
        context: PartitionContext,
        requests: Requests,
        failing: FailureHandling,
        reading: PartitionReading,
        rewinding: Rewinding,
    ) -> None:
        self._tenure = tenure
        self._life = tenure.life
        self._settings = tenure.subscription.settings
        self._turns = tenure.around.turns
        self._loop = asyncio.get_running_loop()
        self._runner = runner
        self._context = context
        self._requests = requests
        self._failing = failing
        self._failures = failing.failures
        self._reading = reading
        self._rewinding = rewinding
        self._held_back: asyncio.Future[None] | None = None

    async def run(self, partition: OpenPartition) -> None:
        """Deliver batches until the pump ends."""
        settings = self._settings
        limit = settings.max_batch_size
        while not self._life.is_ending:
            feed = partition.feed
            if self._life.is_suspended:
                # The link is stolen. The manager checks whether the lease is lost, too.
                await self._tenure.ending.wait()
                return
            if self._requests.is_due:
                partition = await self._rewinding.obey(partition, self._deliver)
                continue
            events = tuple(feed.take(limit))
            if events:
                if not partition.continuity.follows(events) and not await self._may_pass_gap(partition, events):
                    partition = await self._reading.restart(partition)
                    continue
                while events := await self._deliver(partition, events):
                    before, partition = partition, await self._rewinding.obey(partition, self._deliver)
                    if partition is not before:
                        break
                if feed.available:
                    # A handler that never suspends must not block the event loop.
                    await asyncio.sleep(0)
            elif feed.error is not None:
                if not await self._reading.can_restart(partition, feed.error):
                    await self._failing.end_with(
                        feed.error if self._reading.was_attached else partition.explained(feed.error)
                    )
                    return
                partition = await self._reading.restart(partition)
            elif not await feed.wait(settings.max_wait_time) and self._tenure.may_deliver():
                self._reading.waited(feed)
                if self._requests.drains:
                    await self._drain_past_lost(partition)
                if settings.call_when_idle:
                    await self._deliver(partition, ())

    def stop(self) -> None:
        """End a wait for other handlers: the pump ends."""
        if self._held_back is not None:
            resolve(self._held_back, None)

    async def _may_pass_gap(self, partition: OpenPartition, events: tuple[ReceivedEvent, ...]) -> bool:
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
            await self._reading.skip_to_end(loss)
            return False
        self._tenure.report(DataLost, loss, action)
        if action == "fail":
            await self._failing.end_with(loss_error(self._settings.hub, self._tenure.partition_id, loss))
            return False
        return True

    async def _deliver(
        self, partition: OpenPartition, events: tuple[ReceivedEvent, ...], *, is_narrowed: bool = False
    ) -> tuple[ReceivedEvent, ...]:
        """Deliver a batch until it is processed or passed over, or the pump must not deliver any more.

        Args:
            partition: Where it came from.
            events: The batch.
            is_narrowed: Whether it is a single event of a batch that failed.

        Returns:
            The events of it that are to be delivered again, once the requests are carried out; else none.
        """
        tracker, processor, context = partition.tracker, partition.processor, self._context
        ledger = self._turns.ledger
        # An event whose place cannot be read is covered by the checkpoint of a later one.
        last = next(filter(has_place, reversed(events)), None)
        is_replay = partition.replayed.is_running
        while self._tenure.may_deliver():
            if ledger.is_watching and await self._hold_back():
                continue
            if last is not None:
                context.last_delivered = last
                if not is_replay:
                    tracker.events_delivered(last, is_again=is_narrowed)
            step = None
            try:
                await self._runner.run_batch(processor.process_events, context, events)
            except Exception as error:
                if not is_replay:
                    tracker.events_failed()
                step = await self._failing.failed("process_events", error, len(events))
                if step is not FailureStep.NARROW and (
                    step is FailureStep.RETRY or not await self._failing.pass_over(step, events, error)
                ):
                    if self._requests.is_due and not self._life.is_ending:
                        return events
                    continue
            if step is FailureStep.NARROW:
                return events if self._requests.has_seek() else await self._deliver_singly(partition, events)
            if self._failures.in_a_row:
                self._failures.settled()
            if last is not None and not is_replay:
                tracker.events_handled(last, len(events), self._loop.time())
                partition.save_due_checkpoint()
                if self._requests.drains:
                    self._requests.processed(last.sequence_number + 1)
            return ()
        return ()

    async def _deliver_singly(
        self, partition: OpenPartition, events: tuple[ReceivedEvent, ...]
    ) -> tuple[ReceivedEvent, ...]:
        """Deliver the events of a batch that failed one by one; as `_deliver`."""
        self._failures.narrowed()
        for number, event in enumerate(events):
            if not self._tenure.may_deliver():
                break
            if self._requests.has_seek() or await self._deliver(partition, (event,), is_narrowed=True):
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
        turns = self._turns
        waiter = self._held_back = turns.hold()
        if waiter is None:
            return False
        try:
            await waiter
        finally:
            self._held_back = None
            turns.release(waiter)
        return True

    async def _drain_past_lost(self, partition: OpenPartition) -> None:
        """End the waits for events that the hub has dropped: nothing follows that would show it."""
        facts = await self._reading.facts()
        # Where reading goes on may lie beyond that: after a loss it may have been the end.
        kept = max(retained_from(facts), partition.next_number(facts))
        if not partition.feed.available:
            self._requests.processed(kept)
