"""`host.batches()`: the batches of a host's partitions for a loop, in place of a processor."""

from __future__ import annotations

import asyncio
import enum
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, Self

from eventpump.aio.tasks import resolve
from eventpump.consumer.calls.handler import HandlerRunner, InHand, has_place
from eventpump.consumer.processor import EventProcessor, PartitionContext
from eventpump.consumer.pump.dispatch import SerialDispatch
from eventpump.consumer.pump.partition import OpenPartition
from eventpump.consumer.pump.parts import PumpParts
from eventpump.errors import ClosedError, ConfigurationError
from eventpump.eventhubs.events import ReceivedEvent
from eventpump.options.consumer import HostSettings
from eventpump.reports import BatchNotTaken, EventRange
from eventpump.telemetry.interface import Running


class _State(enum.Enum):
    """The states of an offer; each is left at most once, in this order."""

    WAITING = enum.auto()
    """No loop has it."""
    IN_HAND = enum.auto()
    """A loop has it."""
    OVER = enum.auto()
    """It is acknowledged, given back or withdrawn: nothing that a loop does with it has an effect any more."""


class Offer:
    """A batch that a pump offers to the loops, until one of them takes it and settles it.

    Args:
        begin: Called when a loop takes it; returns whether it may still be delivered.
        runner: That of the pump, which waits for the loop that has it.
    """

    __slots__ = (
        "_begin",
        "_hand",
        "_runner",
        "_state",
        "_waiter",
        "context",
        "covered",
        "events",
        "is_acknowledged",
        "recorded",
    )

    def __init__(
        self,
        context: PartitionContext,
        events: tuple[ReceivedEvent, ...],
        begin: Callable[[], bool],
        runner: HandlerRunner,
    ) -> None:
        self.context = context
        self.events = events
        self._runner = runner
        self._hand: InHand | None = None
        self.covered = 0
        """How many of the events the loop has stored a checkpoint for."""
        self.is_acknowledged = False
        """Whether the loop has asked for its next batch."""
        self.recorded: Running | None = None
        """The processing of the batch by a loop, if that is recorded."""
        self._begin = begin
        self._state = _State.WAITING
        self._waiter: asyncio.Future[None] | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether no loop has it, and one may take it."""
        return self._state is _State.WAITING

    @property
    def is_in_hand(self) -> bool:
        """Whether a loop has it, and the pump waits for that loop."""
        return self._state is _State.IN_HAND

    def take(self, hand: InHand) -> bool:
        """Take it, for the code of a loop. Return False if it may not be delivered any more; it is withdrawn then."""
        is_taken = self._begin()
        if is_taken:
            self._hand, hand.runner = hand, self._runner
        self._enter(_State.IN_HAND if is_taken else _State.OVER)
        return is_taken

    def acknowledge(self) -> None:
        """Record that the loop has processed it."""
        if self.is_in_hand:
            self.is_acknowledged = True
            self.end()

    def end(self) -> None:
        """Settle it as it is: what is not acknowledged or covered is offered again, if the pump goes on."""
        if self._state is not _State.OVER:
            self._enter(_State.OVER)

    def holder_ended(self, task: asyncio.Task[Any]) -> None:
        """End it if the task that took it has failed: its exception keeps the iterator alive, if that had a name.

        A task that has returned has dropped the iterator, or has passed the batch on.
        """
        if task.cancelled() or task.exception() is not None:
            self.end()

    def cover(self, event: ReceivedEvent) -> None:
        """Record that a checkpoint of one of its events is stored."""
        number = event.sequence_number
        for index in range(len(self.events), self.covered, -1):
            if has_place(self.events[index - 1]) and self.events[index - 1].sequence_number <= number:
                self.covered = index
                return

    async def changed(self) -> None:
        """Wait for its next state. Cancelling this changes nothing."""
        waiter = self._waiter = asyncio.get_running_loop().create_future()
        await waiter

    def _enter(self, state: _State) -> None:
        self._state = state
        if state is _State.OVER and self._hand is not None:
            self._hand.ended()
        if self._waiter is not None:
            resolve(self._waiter, None)


class NotAcknowledgedError(Exception):
    """A loop was left with the batch, or the pump has ended: what telemetry has as the error of its processing."""


class BatchQueue:
    """The batches that the pumps of a host offer, and the loops that wait for one. Each side is served in its order."""

    def __init__(self) -> None:
        self._offers: deque[Offer] = deque()
        self._loops: deque[asyncio.Future[None]] = deque()
        self._holders: dict[Offer, asyncio.Task[Any] | None] = {}

    def offer(self, offer: Offer) -> None:
        """Offer a batch to the loops."""
        self._offers.append(offer)
        self._wake_one()

    def retract(self, offer: Offer) -> None:
        """Forget an offer. A loop that has it cannot settle it any more."""
        offer.end()
        holder = self._holders.pop(offer, None)
        if holder is not None:
            holder.remove_done_callback(offer.holder_ended)
        with suppress(ValueError):
            self._offers.remove(offer)

    def take(self, asked: asyncio.Task[Any] | None, hand: InHand) -> Offer | None:
        """Take the batch that waits longest. Return None if none waits.

        Args:
            asked: The task that asked for it, which processes it if it still runs. The current task may be another one,
                made to wait for it, as by `asyncio.wait_for` before Python 3.12.
        """
        while self._offers:
            offer = self._offers.popleft()
            if offer.is_waiting and offer.take(hand):
                task = asyncio.current_task() if asked is None or asked.done() else asked
                self._holders[offer] = task
                if task is not None:
                    task.add_done_callback(offer.holder_ended)
                return offer
        return None

    def holder_of(self, offer: Offer) -> asyncio.Task[Any] | None:
        """Return the task that has a batch in hand, as far as that is known."""
        return self._holders.get(offer)

    def give_back(self, task: asyncio.Task[Any] | None) -> None:
        """Give back what a task has in hand: it waits for the end of the host, and cannot process it meanwhile."""
        for offer in [offer for offer, holder in self._holders.items() if holder is task]:
            offer.end()

    async def change(self) -> None:
        """Wait until a batch may be there, or the host has ended. Cancelling this takes no batch from another loop."""
        waiter = asyncio.get_running_loop().create_future()
        self._loops.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self._wake_one()
            raise
        finally:
            with suppress(ValueError):
                self._loops.remove(waiter)

    def wake_all(self) -> bool:
        """Let all loops look whether the host has ended. Return whether there is one that waits."""
        is_awaited = bool(self._loops)
        while self._loops:
            resolve(self._loops.popleft(), None)
        return is_awaited

    def _wake_one(self) -> None:
        while self._loops:
            waiter = self._loops.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return


class BatchSource(EventProcessor):
    """Stands for the loops as the processor of a host: `BatchDispatch` offers them the batches."""

    def __init__(self, queue: BatchQueue) -> None:
        self.queue = queue

    @classmethod
    def check_settings(cls, settings: HostSettings) -> None:
        """Refuse what would have to reach into the body of a loop."""
        if settings.failure_policy != "retry":
            problem = (
                "does not apply to batches(): an exception in the body of a loop ends that loop; handle it there, or "
                "give processor="
            )
            raise ConfigurationError("failure_policy", problem)
        if settings.on_handler_timeout != "report":
            problem = (
                'must be "report" for batches(): the body of a loop cannot be cancelled; use asyncio.timeout there'
            )
            raise ConfigurationError("on_handler_timeout", problem)

    async def process_events(self, context: PartitionContext, events: Sequence[ReceivedEvent]) -> None:
        """Not called: `BatchDispatch` delivers."""
        raise AssertionError("batches are offered by BatchDispatch")


class BatchDispatch(SerialDispatch):
    """Offers one batch at a time to the loops, until one of them has acknowledged it.
    A loop has no failures to be handled."""

    def __init__(
        self,
        parts: PumpParts,
        source: BatchSource,
    ) -> None:
        super().__init__(parts)
        self._loop = asyncio.get_running_loop()
        self._queue = source.queue
        self._offer: Offer | None = None

    def begin(self, partition: OpenPartition, events: tuple[ReceivedEvent, ...]) -> bool:
        """Return False: `deliver` does all."""
        return False

    async def deliver(
        self, partition: OpenPartition, events: tuple[ReceivedEvent, ...], *, is_narrowed: bool = False
    ) -> tuple[ReceivedEvent, ...]:
        """Offer a batch until it is acknowledged, or the pump must not deliver any more; see `Dispatch`."""
        is_idle = not events
        while self._ownership.may_deliver():
            if self._loop_gate.ledger.is_watching and await self._hold_back():
                continue
            offer = await self._offered(partition, events)
            done = len(events) if offer.is_acknowledged else offer.covered
            if done:
                self._processed(partition, events[:done])
                events = events[done:]
            if is_idle or not events:
                return ()
            if not partition.replayed.is_running:
                partition.tracker.events_failed()
            if self._requests.is_due and not self._life.is_ending:
                return events
        return ()

    async def _offered(self, partition: OpenPartition, events: tuple[ReceivedEvent, ...]) -> Offer:
        """Offer events to the loops, and return how it ended."""
        last = next(filter(has_place, reversed(events)), None)

        def begin() -> bool:
            if not self._ownership.may_deliver():
                return False
            if last is not None:
                self._context.last_delivered = last
                if not partition.replayed.is_running:
                    partition.tracker.events_delivered(last)
            if self._telemetry is not None:
                offer.recorded = self._telemetry.began(events)
            return True

        offer = self._offer = Offer(self._context, events, begin, self._runner)
        self._wait_for_loop(offer, self._loop.time(), self._runner.timeout)
        try:
            self._queue.offer(offer)
            while offer.is_waiting:
                await offer.changed()
            self._not_taken.cancel()
            while offer.is_in_hand:
                try:
                    worker = self._queue.holder_of(offer)
                    await self._runner.run("process_events", offer.changed, events=events, worker=worker)
                except Exception:  # noqa: S112 - it was cancelled by other code, but a loop still has the batch
                    continue
            return offer
        finally:
            self._not_taken.cancel()
            self._offer = None
            self._queue.retract(offer)
            if offer.recorded is not None:
                offer.recorded.end(None if offer.is_acknowledged else NotAcknowledgedError())

    def _wait_for_loop(self, offer: Offer, began: float, delay: float) -> None:
        """Report an offer after a delay in seconds, and again whenever it has waited twice as long."""

        def late() -> None:
            waited = self._loop.time() - began
            self._ownership.report(BatchNotTaken, waited, EventRange.of(offer.events))
            self._wait_for_loop(offer, began, waited)

        self._not_taken = self._loop.call_later(delay, late)

    def _processed(self, partition: OpenPartition, events: tuple[ReceivedEvent, ...]) -> None:
        if partition.replayed.is_running:
            return
        last = next(filter(has_place, reversed(events)), None)
        partition.processed(last, len(events))
        if last is not None and self._requests.drains:
            self._requests.processed(last.sequence_number + 1)

    def wake(self) -> None:
        """Withdraw a batch that no loop has, if something else is to be done first."""
        if self._requests.is_due:
            self._withdraw()

    def stop(self) -> None:
        """Withdraw a batch that no loop has: the pump ends."""
        super().stop()
        self._withdraw()

    def _withdraw(self) -> None:
        if self._offer is not None and self._offer.is_waiting:
            self._offer.end()


class ReceivedBatch:
    """A batch of one partition, from `EventProcessorHost.batches`.

    Attributes:
        context: The partition during this ownership, as a processor's methods get it.
        events: At least one event, in order; none only with `call_when_idle`.
    """

    __slots__ = ("_offer", "context", "events")

    def __init__(self, offer: Offer) -> None:
        self._offer = offer
        self.context = offer.context
        self.events: Sequence[ReceivedEvent] = offer.events

    async def checkpoint(self, event: ReceivedEvent | None = None) -> None:
        """Store that everything up to an event is processed, and wait until that is stored.

        What it covers is not delivered again, also if the loop then ends without asking for its next batch.

        Args:
            event: An event of this batch; None for the whole batch. Default: None.

        Raises:
            OwnershipLostError: This host no longer owns the partition; the next owner receives the events again.
            ConfigurationError: The event was not delivered by this partition, or was delivered before a seek.
            StoreError: The store failed several times; the write is retried in the background.
        """
        if event is None:
            event = next(filter(has_place, reversed(self.events)), None)
        if event is not None:
            await self.context.checkpoint(event)
            self._offer.cover(event)

    def __repr__(self) -> str:
        return f"ReceivedBatch(partition {self.context.partition_id}, {len(self.events)} events)"


class BatchIterator(AsyncIterator[ReceivedBatch]):
    """One loop over the batches of a host; see `EventProcessorHost.batches`, which makes it.

    Args:
        queue: Where the batches are offered.
        start: Starts the host, if it does not run, and returns the task that runs it.
    """

    def __init__(self, queue: BatchQueue, start: Callable[[], asyncio.Task[None]]) -> None:
        self._queue = queue
        self._start = start
        self._offer: Offer | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_waiting = False
        self._is_closed = False

    def __aiter__(self) -> Self:
        """Begin a loop. A batch that an earlier loop over this object has not acknowledged is delivered again."""
        self._give_back()
        return self

    def __anext__(self) -> Coroutine[Any, Any, ReceivedBatch]:
        """Acknowledge the batch in hand, and return the next one.

        Cancelling it is safe: no batch is lost.

        Raises:
            StopAsyncIteration: The host has closed, or this object was closed.
            EventPumpError: As of `run`.
        """
        # Not a coroutine function: what is returned may be run by another task than the one that will have the batch.
        if self._offer is not None and self._offer.recorded is not None:
            self._offer.recorded.leave()
        hand = InHand()
        hand.ended()  # as the pump does not wait for it yet
        return self._next(asyncio.current_task(), hand.begin())

    async def _next(self, asked: asyncio.Task[Any] | None, hand: InHand) -> ReceivedBatch:
        if self._is_waiting:
            raise ConfigurationError("batches", "is one loop; call host.batches() once for each task")
        if self._offer is not None:
            self._offer.acknowledge()
            self._offer = None
        self._loop = asyncio.get_running_loop()
        self._is_waiting = True
        try:
            while not self._is_closed:
                running = self._start()
                if (offer := self._queue.take(asked, hand)) is not None:
                    self._offer = offer
                    if offer.recorded is not None:
                        offer.recorded.enter()
                    return ReceivedBatch(offer)
                if running.done():
                    if running.cancelled():
                        raise ClosedError("processor host")
                    running.result()
                    break
                await self._queue.change()
        finally:
            self._is_waiting = False
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """End the loop: a batch in hand that is not acknowledged is delivered again. Closing twice is fine."""
        self._give_back()
        self._is_closed = True
        self._queue.wake_all()

    def __del__(self) -> None:
        # A loop that is left by `break` or an exception drops this object, and says nothing else. It may happen on any
        # thread, and in the middle of any code of ours.
        if self._offer is not None and self._loop is not None:
            with suppress(RuntimeError):  # the event loop is closed
                self._loop.call_soon_threadsafe(self._offer.end)

    def _give_back(self) -> None:
        if self._offer is not None:
            self._offer.end()
            self._offer = None
