"""One owned partition: its processor, its feed, its checkpoints, from the first call of `open` to the end."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from itertools import repeat
from typing import Any, TypeVar

from eventpump.aio.tasks import TaskSet
from eventpump.aio.watch import Watched
from eventpump.cancellation import is_failure
from eventpump.consumer.checkpoints import CheckpointWriter, store_error
from eventpump.consumer.feed import CLOSE_TIMEOUT, PartitionFeed
from eventpump.consumer.limits import BoundedLeaseStore
from eventpump.consumer.opening import Beginning, GroupStart, HubMadeAgainError, PartitionOpening, loss_error
from eventpump.consumer.processor import EventProcessor, PartitionContext, ProcessorSource
from eventpump.consumer.silence import SilenceWatch, SilentLink
from eventpump.consumer.turns import Turns
from eventpump.core.backoff import Backoff
from eventpump.core.checkpoint import CheckpointTracker
from eventpump.core.lease import PartitionLease
from eventpump.core.pump_state import CloseReason, PumpLife, PumpState
from eventpump.core.silence import lag
from eventpump.core.starts import NumberWatch
from eventpump.errors import (
    ConfigurationError,
    ConsumerDisconnectedError,
    EventError,
    EventPumpError,
    LinkDetachedError,
    OwnershipLostError,
    ProcessorFailedError,
    RequestRefusedError,
    ServiceError,
    ServiceTimeoutError,
)
from eventpump.eventhubs.conditions import ARGUMENT_ERROR
from eventpump.eventhubs.events import Checkpoint, EventPosition, ReceivedEvent
from eventpump.interfaces import Clock, ConsumerScope, HubDirectory, PartitionProperties, ReceiveLinkSpec, Transport
from eventpump.options.consumer import HostSettings
from eventpump.reports import (
    CheckpointDropped,
    CheckpointWritten,
    DataLost,
    HandlerSlow,
    LinkFailed,
    LinkStalled,
    LoopBlocked,
    ProcessorFailed,
    PumpClosed,
    PumpOverdue,
    PumpStarted,
    Reporter,
    ServiceFailed,
    StoreFailed,
    UnexpectedFailure,
)

_T = TypeVar("_T")

_RUNNING_BATCH: ContextVar[object | None] = ContextVar("eventpump_running_batch", default=None)
"""Names the call of `process_events` that the code at hand belongs to; tasks and threads that it starts inherit it."""


@dataclass(frozen=True, slots=True)
class PumpSurroundings:
    """What all pumps of a host share.

    :param directory: reads about the hub and its partitions.
    :param owner_id: the owner's name in the leases.
    :param store: gives its calls up after the store's time-out.
    :param store_timeout: seconds for one call of the store, once it is sent.
    :param renew_interval: seconds between renewals.
    :param blocked_after: seconds that make a standstill of the event loop worth telling.
    :param turns: holds deliveries back while handlers compute and the store needs the loop.
    """

    transport: Transport
    directory: HubDirectory
    store: BoundedLeaseStore
    settings: HostSettings
    source: ProcessorSource
    scope: ConsumerScope
    owner_id: str
    clock: Clock
    rng: random.Random
    reporter: Reporter
    store_timeout: float
    blocked_after: float
    turns: Turns
    renew_interval: float


class PartitionPump:
    """Pumps one partition under one lease. `run` is its life; the manager tells it what happens to the lease.

    The user's code runs in the task of `run`, and nothing else of the pump depends on that code to return: the feed,
    the checkpoint writer and the deadlines are on their own.

    :param group: the consumer group's record.
    :param silence: checks its link when it is silent.
    :param on_stolen: is called once when a reader with a higher owner level took the link; no batch follows.
    :param on_lost: is called with the way it was learned that the lease is lost.
    :param on_overdue: is called when the end should have come and has not.
    """

    def __init__(
        self,
        around: PumpSurroundings,
        lease: PartitionLease,
        group: GroupStart,
        *,
        silence: SilenceWatch,
        on_stolen: Callable[[ConsumerDisconnectedError], None],
        on_lost: Callable[[str], None],
        on_overdue: Callable[[], None],
    ) -> None:
        self._around = around
        self._settings = around.settings
        self._clock = around.clock
        # What only this process measures goes by the loop: its time is read at each delivery, costs less than the clock
        # that leases go by, and stands still while the machine is suspended, as timers and handlers do.
        self._loop = asyncio.get_running_loop()
        self._silence = silence
        self._on_stolen = on_stolen
        self._on_lost = on_lost
        self._on_overdue = on_overdue
        self._life = PumpLife(
            ownership_lost_grace=around.settings.ownership_lost_grace, close_timeout=around.settings.close_timeout
        )
        self._tasks = TaskSet(self._unexpected)
        self._ending = asyncio.Event()
        self._timers: list[asyncio.TimerHandle] = []
        self._began_to_end = 0.0
        self._task: asyncio.Task[Any] | None = None
        self._operation: str | None = None
        self._called_at = 0.0
        self._slow_at = 0.0
        self._slow_timer: asyncio.TimerHandle | None = None
        self._is_timed_out = False
        self._batch: object | None = None
        self._origin: object = None
        self._cancels = 0
        self._is_suspended = False
        self._held_back: asyncio.Future[None] | None = None
        self._blocked_again_after = 0.0
        self._is_over = False
        self._is_abandoned = False
        self._processor: EventProcessor | None = None
        self._is_open = False
        self._feed: PartitionFeed | None = None
        self._tracker: CheckpointTracker | None = None
        self._writer: CheckpointWriter | None = None
        self._due_timer: asyncio.TimerHandle | None = None
        self._beginning = ""
        self._backoff = Backoff(around.settings.retry_delay, around.settings.retry_delay_max)
        self._group = group
        self._opening = PartitionOpening(
            group,
            around.store,
            around.directory,
            around.settings,
            lease.partition_id,
            store_timeout=around.store_timeout,
            rng=around.rng,
            lease=lambda: self.lease,
            step=self._unless_ending,
            pause=self._pause_or_end,
            report=self._report,
            on_refused=self._refused,
        )
        self._numbers = NumberWatch(None)
        self._hub_created_at: datetime | None = None
        self._recorded_start: EventPosition | None = None
        self.lease = lease
        """The lease as last renewed."""
        self.context = PartitionContext(
            around.scope,
            lease.partition_id,
            around.owner_id,
            lease.epoch,
            checkpoint=self._checkpoint,
            newest=lambda: None if self._feed is None else self._feed.newest,
            lag=self._lag,
        )
        self.failure: Exception | None = None
        """Why the partition cannot go on, where that was not the lease."""
        self.was_attached = False
        """Whether there ever was a link."""

    # ------------------------------------------------------------------------------------- what the manager tells

    @property
    def partition_id(self) -> str:
        """The partition."""
        return self.lease.partition_id

    @property
    def state(self) -> PumpState:
        """Where the pump stands."""
        return self._life.state

    @property
    def is_attached(self) -> bool:
        """Whether its link is attached now."""
        return self._feed is not None and self._feed.is_attached

    @property
    def operation(self) -> str | None:
        """The processor's method that runs now."""
        return self._operation

    @property
    def is_abandoned(self) -> bool:
        """Whether `abandon` was called."""
        return self._is_abandoned

    def renewed(self, lease: PartitionLease) -> None:
        """Go on under a renewed lease."""
        self.lease = lease

    def hub_found(self, created_at: datetime) -> None:
        """Open the link again where the hub was made again since the position was found.

        Before each link that is checked; but it may have happened between the check and the attach.
        """
        if self._feed is not None and self._hub_created_at is not None and created_at > self._hub_created_at:
            self._feed.reopen(LinkDetachedError("the hub was made again"))

    def stop(self, reason: CloseReason, within: float | None = None) -> None:
        """End in order: finish the batch in the handler's hands, write the last checkpoint, close.

        :param within: seconds it may take; None for the close time-out. A later call can only shorten it.
        """
        if self._is_over:
            return
        self._note_end()
        self._life.ending(reason, self._clock.monotonic(), within)
        self._begin_to_end()

    def ownership_lost(self) -> None:
        """End because the lease is gone: no batch and no checkpoint from now on."""
        if self._is_over or self._life.is_lost:
            return
        self._note_end()
        self._life.ownership_lost(self._clock.monotonic())
        self._disown()
        self._begin_to_end()

    def abandon(self) -> None:
        """Let the next cancellation of its task end the pump at once, without calling the processor.

        Any other cancellation comes from the user's code or from a stranger, and counts as a failure.
        """
        self._is_abandoned = True

    # ------------------------------------------------------------------------------------------------- its life

    async def run(self) -> None:
        """Live. Returns when nothing is left of the pump; why it failed, if it did, is in `failure`."""
        self._task = asyncio.current_task()
        try:
            try:
                if await self._open():
                    await self._deliver_all()
            except _Ended:
                pass
            except asyncio.CancelledError as error:
                # Not in the user's code, which is another matter (see `_call`).
                await self._take_cancellation_back()
                if not self._life.is_ending:
                    failure = RuntimeError("the task of the pump was cancelled, and not by eventpump")
                    failure.__cause__ = error
                    self._fail(failure)
            except Exception as error:
                self._fail(error)
            await self._close()
        finally:
            self._is_over = True
            self._disown()
            self._clear_timers()
            if self._slow_timer is not None:
                self._slow_timer.cancel()
            if self._feed is not None:
                self._silence.forget(self._feed)
                await self._feed.aclose(0.0)
            if self._writer is not None:
                await self._writer.aclose()
            await self._tasks.cancel(self._around.store_timeout)

    async def _open(self) -> bool:
        """Open the processor, find the position, start the feed. False where the end came first."""
        if not await self._open_processor() or not await self._begin():
            return False
        self._life.opened()
        return True

    async def _begin(self) -> bool:
        """Find the position and start the feed; again where what is being read is gone. False where the end came."""
        if self._ending.is_set():
            return False
        if self._feed is not None:
            self._silence.forget(self._feed)
            await self._feed.aclose()
        if self._writer is not None and self._tracker is not None:
            self._tracker.closing()
            await self._unless_ending(self._writer.flush(self._around.store_timeout))
            await self._writer.aclose()
            # What is asked for from now on, until reading begins, would be a checkpoint of what is gone.
            self._writer = self._tracker = None
        stored = await self._read_checkpoint()
        if self._life.is_ending:
            return False
        partition_id, around = self.partition_id, self._around
        try:
            beginning = await self._opening.find(stored)
        except EventPumpError as error:
            await self._feed_failed(error)
            return False
        if self._ending.is_set():
            return False
        position = beginning.position
        # Plain values, so that an event keeps its origin in a process pool.
        self._origin = (around.scope, partition_id, beginning.hub_created_at)
        self._hub_created_at = beginning.hub_created_at
        self._numbers = NumberWatch(beginning.expected)
        self._recorded_start = position if beginning.checkpoint is None else None
        self._tracker = CheckpointTracker(partition_id, self._settings.checkpoint_policy, beginning.checkpoint)
        source = _FROM_SETTINGS if beginning.checkpoint is None else _FROM_CHECKPOINT
        self._beginning = f"{_words(position)}, {source}"
        self._writer = CheckpointWriter(
            around.store,
            self._tracker,
            lambda: self.lease,
            timeout=around.store_timeout,
            rng=around.rng,
            on_written=lambda checkpoint: self._report(CheckpointWritten, checkpoint),
            on_failed=lambda error: self._report(StoreFailed, "write checkpoint", error),
            on_refused=lambda: self._on_lost("a checkpoint was refused"),
            on_unexpected=self._unexpected,
        )
        self._feed = PartitionFeed(
            around.transport,
            ReceiveLinkSpec(
                hub=around.scope.hub,
                consumer_group=around.scope.consumer_group,
                partition_id=partition_id,
                position=position,
                owner_level=self.lease.epoch,
                receiver_name=around.owner_id,
                track_last_enqueued=self._settings.track_last_enqueued,
                max_message_size=self._settings.max_message_size,
            ),
            self._settings,
            rng=around.rng,
            locate=self._checker(beginning),
            on_attached=lambda: self._attached(position),
            on_trouble=self._link_trouble,
        )
        self._feed.start()
        return True

    def _checker(self, beginning: Beginning) -> Callable[[EventPosition], Awaitable[EventPosition]]:
        """Return what checks, before a link is opened again, that the hub is the one that was being read."""
        is_first = True

        async def check(position: EventPosition) -> EventPosition:
            nonlocal is_first
            if is_first:
                is_first = False
            elif (await self._group.hub()).created_at != beginning.hub_created_at:
                problem = "the hub was deleted and made again while it was read"
                raise HubMadeAgainError(self._around.scope.hub, self.partition_id, problem)
            return position

        return check

    async def _open_processor(self) -> bool:
        while not self._life.is_ending:
            try:
                if self._processor is None:
                    self._processor = self._made()
                await self._call("open", self._processor.open, self.context)
            except ConfigurationError:
                raise
            except Exception as error:
                await self._processor_failed("open", error)
                continue
            self._is_open = True
            self._backoff.reset()
            return not self._life.is_ending
        return False

    def _made(self) -> EventProcessor:
        try:
            return self._around.source.make()
        except (Exception, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            raise _no_exception("making the processor", error) from error

    async def _read_checkpoint(self) -> Checkpoint | None:
        backoff = Backoff(0.2, 5.0)
        while not self._life.is_ending:
            try:
                return await self._unless_ending(self._around.store.read_checkpoint(self.partition_id))
            except Exception as error:
                timeout = self._around.store_timeout
                self._report(
                    StoreFailed, "read checkpoint", store_error(error, "read checkpoint", self.partition_id, timeout)
                )
                await self._pause(backoff.next(self._around.rng))
        return None

    async def _deliver_all(self) -> None:
        settings = self._settings
        limit = settings.max_batch_size
        while not self._life.is_ending:
            feed = self._feed
            assert feed is not None
            if self._is_suspended:
                # The link is stolen; whether the lease is too, the manager is finding out.
                await self._ending.wait()
                return
            raw = feed.take(limit)
            if raw:
                events = tuple(map(ReceivedEvent, raw, repeat(self._origin)))
                if not self._follows(events) and not await self._go_on_over_gap(events):
                    if not await self._begin():
                        return
                    continue
                await self._deliver(events)
                if feed.events_held:
                    # A handler that never really waits must not keep the loop from turning.
                    await asyncio.sleep(0)
            elif feed.error is not None:
                if not await self._can_begin_anew(feed.error):
                    await self._feed_failed(feed.error)
                    return
                if not await self._begin():
                    return
            elif not await feed.wait(settings.max_wait_time) and self._may_deliver():
                self._silence.waited(feed, self.partition_id, self._link_silent)
                if settings.call_when_idle:
                    await self._deliver(())

    def _follows(self, events: tuple[ReceivedEvent, ...]) -> bool:
        """Check that no number is missing before or in a batch. Only its first and last event are looked at."""
        try:
            return self._numbers.passed(events[0].sequence_number, events[-1].sequence_number, len(events))
        except EventError:
            # The processor finds that out too; which number should follow, nobody knows.
            self._numbers.expected = None
            return True

    async def _go_on_over_gap(self, events: tuple[ReceivedEvent, ...]) -> bool:
        """Find out whether missing numbers are lost, and do what the settings say. False where not to deliver."""
        numbers, now = self._numbers, self._clock.monotonic()
        try:
            if events[-1].sequence_number - events[0].sequence_number + 1 != len(events):
                numbers.look_into([event.sequence_number for event in events])
        except EventError:
            numbers.expected = None
        if not numbers.is_due(now):
            return True
        settings, hub = self._settings, self._around.scope.hub
        try:
            try:
                facts = await self._unless_ending(self._facts_once())
            except ServiceError as error:
                self._report(ServiceFailed, f"reading the properties of hub {hub}", error)
                numbers.not_answered(now)
                if settings.on_data_loss != "fail":
                    return True
                facts = await self._opening.until_done(lambda: self._unless_ending(self._facts_once()))
        except HubMadeAgainError:
            # What is missing went before the rest of its hub did: all that was not processed is reported as gone.
            return False
        loss = numbers.judge(facts, now)
        if loss is None:
            return True
        action = loss.action(settings.on_data_loss)
        if action == "latest":
            await self._opening.skip_to_end(loss)
            return False
        self._report(DataLost, loss, action)
        if action == "fail":
            await self._feed_failed(loss_error(hub, self.partition_id, loss))
            return False
        return True

    async def _judge_last_gap(self) -> None:
        """Report whether numbers are lost that are missing and were not judged yet: no later owner sees that gap."""
        numbers, now = self._numbers, self._clock.monotonic()
        first, last = numbers.first_missing, numbers.last_missing
        if first is None:
            return
        try:
            async with asyncio.timeout(min(self._around.store_timeout, max(0.0, self._life.write_until - now))):
                loss = numbers.judge(await self._facts_once(), now)
        except HubMadeAgainError:
            return  # the next owner reports all that was not processed of that hub
        except (EventPumpError, TimeoutError) as error:
            question = f"asking whether the missing numbers {first} to {last} are lost"
            failure = error if isinstance(error, EventPumpError) else ServiceTimeoutError("no answer in time")
            self._report(ServiceFailed, question, failure)
        else:
            if loss is not None:
                self._report(DataLost, loss, "earliest")

    async def _facts_once(self) -> PartitionProperties:
        """Read the partition's properties. :raises HubMadeAgainError: they may be of another hub than is being read."""
        hub = self._around.scope.hub
        facts = await self._around.directory.get_partition_properties(hub, self.partition_id)
        if (await self._group.hub()).created_at != self._hub_created_at:
            raise HubMadeAgainError(hub, self.partition_id, "the hub was deleted and made again while it was read")
        return facts

    async def _can_begin_anew(self, error: Exception) -> bool:
        """Return whether the end of the feed is one after which the position is found anew."""
        if isinstance(error, HubMadeAgainError):
            return True
        if not isinstance(error, RequestRefusedError) or self.was_attached or self._recorded_start is None:
            return False
        try:
            return await self._unless_ending(self._group.give_way(self.partition_id, self._recorded_start))
        except EventPumpError as another:
            self._report(StoreFailed, "write scope record", another)
            return False

    async def _deliver(self, events: tuple[ReceivedEvent, ...]) -> None:
        """Hand a batch over, the same again until it is processed, as long as it is ours to."""
        tracker, processor, context = self._tracker, self._processor, self.context
        assert tracker is not None
        assert processor is not None
        ledger = self._around.turns.ledger
        # An event without a readable place is passed by the checkpoint of a later one.
        last = next(filter(_has_place, reversed(events)), None)
        while self._may_deliver():
            if ledger.is_watching and await self._hold_back():
                continue
            if last is not None:
                context.last_delivered = last
                tracker.events_delivered(last)
                # A new name for each try: what an earlier one left running does not speak for this one.
                self._batch = object()
            belongs_to = _RUNNING_BATCH.set(self._batch)
            try:
                try:
                    await self._call("process_events", processor.process_events, context, events)
                finally:
                    _RUNNING_BATCH.reset(belongs_to)
                    self._batch = None
            except Exception as error:
                tracker.events_failed()
                await self._processor_failed("process_events", error)
                continue
            if self._backoff.failures:
                self._backoff.reset()
            if last is not None:
                tracker.events_handled(last, len(events), self._loop.time())
                self._save_what_is_due()
            return

    async def _hold_back(self) -> bool:
        """Wait while handlers compute and the store needs the loop. False, without a wait, where that is not so."""
        turns = self._around.turns
        waiter = self._held_back = turns.hold()
        if waiter is None:
            return False
        try:
            await waiter
        finally:
            self._held_back = None
            turns.release(waiter)
        return True

    def _may_deliver(self) -> bool:
        """Check, immediately before a delivery, that the partition is still ours by our own clock."""
        if self._life.is_ending or self._is_suspended:
            return False
        if self._clock.monotonic() >= self.lease.expires_at:
            self._on_lost("it ran out")
            return False
        return True

    async def _feed_failed(self, error: Exception) -> None:
        if isinstance(error, RequestRefusedError) and error.condition == ARGUMENT_ERROR and not self.was_attached:
            error = RequestRefusedError(
                f"{error.description}; reading was to begin at {self._beginning}",
                condition=error.condition,
                entity=error.entity,
                tracking_id=error.tracking_id,
            )
        self._fail(error)
        await self._tell_processor(error)

    def _fail(self, error: Exception) -> None:
        if self.failure is None:
            self.failure = error
        self.stop(CloseReason.FAILED)

    async def _close(self) -> None:
        """Close the processor and write the last checkpoint, each until its deadline."""
        life, writer, tracker = self._life, self._writer, self._tracker
        if not life.is_ending:
            self.stop(CloseReason.FAILED)
        life.drained()
        assert life.reason is not None
        if writer is not None and tracker is not None and not life.is_lost:
            tracker.closing()
            writer.kick()
        if self._is_open and self._processor is not None:
            try:
                await self._call("close", self._processor.close, self.context, life.reason)
            except _Ended:
                pass
            except Exception as error:
                self._report(ProcessorFailed, "close", error, 1, None)
        await self._judge_last_gap()
        if writer is not None and tracker is not None:
            if not life.is_lost:
                await writer.flush(life.write_until - self._clock.monotonic())
            self._disown()
            await writer.aclose()
            if (dropped := tracker.unwritten) is not None:
                self._report(CheckpointDropped, dropped)
        if self._feed is not None:
            # A service that does not answer must not take the time that closing may.
            await self._feed.aclose(min(CLOSE_TIMEOUT, max(0.0, life.write_until - self._clock.monotonic())))
        life.closed()
        self._report(PumpClosed, life.reason)

    # --------------------------------------------------------------------------------------------------- its end

    def _note_end(self) -> None:
        if not self._life.is_ending:
            self._began_to_end = self._clock.monotonic()

    def _begin_to_end(self) -> None:
        """Stop receiving, and set the deadlines."""
        self._ending.set()
        if self._held_back is not None and not self._held_back.done():
            self._held_back.set_result(None)
        if self._feed is not None:
            self._feed.stop()
            self._feed.wake()
            self._tasks.spawn(self._feed.aclose(), f"eventpump detach of partition {self.partition_id}")
        if self._due_timer is not None:
            self._due_timer.cancel()
            self._due_timer = None
        self._clear_timers()
        now, life = self._clock.monotonic(), self._life
        if life.state is PumpState.CLOSED:
            return
        later = self._loop.call_later
        self._timers = [
            later(max(0.0, life.handler_until - now), self._cancel_handler),
            later(max(0.0, life.close_until - now), self._cancel_user),
            later(max(0.0, life.overdue_at - now), self._overdue),
        ]

    def _disown(self) -> None:
        self.context.ownership_lost.set()
        if self._writer is not None:
            self._writer.stop()

    def _clear_timers(self) -> None:
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        if self._due_timer is not None:
            self._due_timer.cancel()

    def _cancel_handler(self) -> None:
        if self._operation != "close":
            self._cancel_user()

    def _cancel_user(self) -> None:
        """Cancel the user's code, and nothing of ours: it is inside that code that the task waits now."""
        if self._operation is not None:
            assert self._task is not None
            self._cancels += 1
            self._task.cancel(f"partition {self.partition_id} is given up")

    def _overdue(self) -> None:
        if self._life.state is PumpState.CLOSED:
            return
        reason = self._life.reason
        assert reason is not None
        self._disown()
        waited = self._clock.monotonic() - self._began_to_end
        self._report(PumpOverdue, reason, self._operation, waited)
        self._on_overdue()

    # ------------------------------------------------------------------------------------------ the user's code

    async def _call(self, operation: str, method: Callable[..., Awaitable[None]], *args: object) -> None:
        """Run a method of the processor in this task. What leaves it and is no `Exception` is raised as one, save what
        ends the interpreter: the failure policy decides of that, too.

        :raises _Ended: it was cancelled by a deadline.
        """
        self._operation = operation
        now = self._loop.time
        self._called_at = now()
        self._slow_at = self._called_at + self._settings.handler_timeout
        if self._slow_timer is None:
            self._time_call()
        task = self._task
        assert task is not None
        raised: BaseException | None = None
        try:
            work = method(*args)
            if not isinstance(work, Awaitable):
                raise TypeError(f"{operation} gave a {type(work).__name__} to await: it must be a coroutine function")
            around = self._around
            await Watched(work, now, around.blocked_after, self._blocked, around.turns.stepped)
        except GeneratorExit:
            # This coroutine is being closed, and may not wait any more.
            raise
        except BaseException as error:
            raised = error
        self._operation = None
        is_late, is_timed_out, self._is_timed_out = self._cancels > 0, self._is_timed_out, False
        if is_late or task.cancelling():
            await self._take_cancellation_back()
        if raised is None:
            return
        try:
            if isinstance(raised, asyncio.CancelledError):
                if is_late:
                    late = TimeoutError(f"{operation} had not returned in time, and was cancelled")
                    self._report(ProcessorFailed, operation, late, 1, None)
                    raise _Ended
                if is_timed_out:
                    timeout = self._settings.handler_timeout
                    raise TimeoutError(f"{operation} had not returned after {timeout:g} s, and was cancelled")
                # The processor waited for something that was cancelled, or somebody cancelled this task in its code.
                raise RuntimeError(f"{operation} was cancelled, and not by eventpump") from raised
            if isinstance(raised, Exception | KeyboardInterrupt | SystemExit):
                raise raised
            raise _no_exception(operation, raised)
        finally:
            # The traceback holds this frame, which must not hold the error in turn.
            raised = None

    def _time_call(self) -> None:
        # One timer, which calls that return in time leave as it is: it finds out by itself whose time is up, and when.
        self._slow_timer = self._loop.call_at(self._slow_at, self._call_may_be_slow)

    def _call_may_be_slow(self) -> None:
        self._slow_timer = None
        if self._operation is None or self._is_over:
            return
        now = self._loop.time()
        if now >= self._slow_at:
            took = now - self._called_at
            # The same call is reported again when it has taken twice as long.
            self._slow_at = now + took
            is_cancelled = self._settings.on_handler_timeout == "cancel"
            self._report(HandlerSlow, self._operation, took, is_cancelled)
            if is_cancelled:
                assert self._task is not None
                self._is_timed_out = True
                self._task.cancel(f"{self._operation} of partition {self.partition_id} takes too long")
        self._time_call()

    async def _take_cancellation_back(self) -> None:
        """Forget every request to cancel the task: it was for what ran in it, and that has ended.

        :raises CancelledError: the manager cancels the task, which stands.
        """
        task = self._task
        assert task is not None
        if self._is_abandoned:
            raise asyncio.CancelledError
        self._cancels = 0
        while task.cancelling():
            task.uncancel()
        try:
            # Before Python 3.13 a request that was not raised yet is raised at the next wait, taken back or not.
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            if self._is_abandoned:
                raise

    async def _processor_failed(self, operation: str, error: Exception) -> None:
        """Do what the failure policy says: end the pump, or return when it is time to try again."""
        delay: float | None = None
        failures = self._backoff.failures + 1
        if self._settings.failure_policy == "retry" and not self._life.is_ending:
            delay = self._backoff.next(self._around.rng)
        self._report(ProcessorFailed, operation, error, failures, delay)
        if self._settings.failure_policy == "stop":
            failure = ProcessorFailedError(self.partition_id, operation)
            failure.__cause__ = error
            # First: a process_error that hangs must not keep the host from stopping.
            self._fail(failure)
        await self._tell_processor(error)
        if delay is not None:
            await self._pause(delay)

    async def _tell_processor(self, error: Exception) -> None:
        if self._processor is None:
            return
        try:
            await self._call("process_error", self._processor.process_error, self.context, error)
        except Exception as another:
            self._report(ProcessorFailed, "process_error", another, 1, None)

    async def _pause(self, delay: float) -> None:
        """Wait, or until the end begins."""
        try:
            async with asyncio.timeout(delay):
                await self._ending.wait()
        except TimeoutError:
            pass

    async def _pause_or_end(self, delay: float) -> None:
        """Wait. :raises _Ended: the end began."""
        await self._pause(delay)
        if self._life.is_ending:
            raise _Ended

    def _refused(self) -> None:
        self._on_lost("a checkpoint was refused")
        raise _Ended

    async def _unless_ending(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run something of ours. :raises _Ended: the end began first."""
        task = self._tasks.spawn(_outcome(work), f"eventpump step of partition {self.partition_id}")
        ending = self._tasks.spawn(_wait(self._ending), f"eventpump end of partition {self.partition_id}")
        try:
            await asyncio.wait({task, ending}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise _Ended
            if task.cancelled():
                raise RuntimeError("a step of the pump was cancelled, and not by eventpump")
            result, error = task.result()
            if error is not None:
                raise error
            return result  # type: ignore[no-any-return]  # the task is typed by its coroutine, which the set forgets
        finally:
            self._tasks.drop(task)
            self._tasks.drop(ending)

    # ---------------------------------------------------------------------------------------------- checkpoints

    def _checkpoint(self, event: ReceivedEvent | None) -> asyncio.Future[None] | None:
        if self._life.is_lost or self._is_over or self.context.ownership_lost.is_set():
            raise OwnershipLostError(self.partition_id)
        if self._clock.monotonic() >= self.lease.expires_at:
            self._on_lost("it ran out")
            raise OwnershipLostError(self.partition_id)
        if event is not None and (self._tracker is None or event.origin != self._origin):
            raise ConfigurationError("event", f"it was not delivered by partition {self.partition_id} here")
        if self._tracker is None or self._writer is None:
            return None
        batch = _RUNNING_BATCH.get()
        wanted = self._tracker.requested(event, is_in_batch=batch is not None and batch is self._batch)
        return None if wanted is None else self._writer.stored(wanted)

    def _save_what_is_due(self) -> None:
        tracker, writer = self._tracker, self._writer
        assert tracker is not None
        assert writer is not None
        if not tracker.is_settled:
            writer.kick()
        if self._due_timer is None and not self._life.is_ending and (deadline := tracker.deadline) is not None:
            self._due_timer = self._loop.call_at(deadline, self._due)

    def _due(self) -> None:
        self._due_timer = None
        if self._tracker is not None and not self._life.is_ending:
            self._tracker.due(self._loop.time())
            self._save_what_is_due()

    # -------------------------------------------------------------------------------------------------- reports

    def _attached(self, position: EventPosition) -> None:
        if not self.was_attached:
            self.was_attached = True
            self._report(PumpStarted, self.lease.epoch, _words(position))

    def _link_trouble(self, error: Exception, delay: float | None) -> None:
        if self._life.is_ending:
            return
        if isinstance(error, ConsumerDisconnectedError):
            # No report: whether it is an ordinary move or a reader outside the fleet, the manager will tell.
            self._is_suspended = True
            self._on_stolen(error)
        elif delay is not None:
            # Else the feed has ended, and the manager tells or raises the error.
            self._report(LinkFailed, error, delay)

    def _link_silent(self, link: SilentLink) -> None:
        self._report(LinkStalled, link.evidence, link.silent_for, link.drops_connection)

    def _lag(self) -> int | None:
        feed, tracker, now = self._feed, self._tracker, self._loop.time()
        if feed is None or tracker is None:
            return None
        # Not by the context: what it had last may be of a hub that was made again since.
        delivered = tracker.delivered
        return lag(
            delivered=None if delivered is None else delivered.sequence_number,
            told=None if feed.newest is None else self.context.last_sequence_number,
            look=feed.look,
            is_attached=feed.is_attached,
            silent_for=now - feed.received_at if feed.is_silent else None,
            now=now,
            patience=self._silence.max_silence,
        )

    def _blocked(self, duration: float) -> None:
        now = self._loop.time()
        if now >= self._blocked_again_after:
            self._blocked_again_after = now + self._around.renew_interval
            self._report(LoopBlocked, duration, self._operation)

    def _unexpected(self, operation: str, error: BaseException) -> None:
        self._report(UnexpectedFailure, operation, error)

    def _report(self, kind: Callable[..., Any], *facts: object) -> None:
        self._around.reporter.report(kind(self._around.owner_id, self.partition_id, *facts))


class _Ended(BaseException):
    """The user's code, or a step of ours, was broken off because the pump ends. No `except Exception` may take it."""


async def _outcome(work: Coroutine[Any, Any, _T]) -> tuple[_T | None, Exception | None]:
    """Give what it returned or raised, so that an expected error is not an unexpected one of the task."""
    try:
        return await work, None
    except BaseException as error:
        if not is_failure(error):
            raise
        return None, error if isinstance(error, Exception) else _no_exception("a step of the pump", error)


def _no_exception(operation: str, error: BaseException) -> RuntimeError:
    """Make an exception of what is none, so that what handles failures handles it."""
    failure = RuntimeError(f"{operation} raised {type(error).__name__}, which is no Exception: {error}")
    failure.__cause__ = error
    return failure


def _has_place(event: ReceivedEvent) -> bool:
    """Return whether an event's offset and sequence number can be read."""
    try:
        event.sequence_number  # noqa: B018 - whether it can be read is the question
    except EventError:
        return False
    return True


async def _wait(event: asyncio.Event) -> None:
    await event.wait()


_FROM_SETTINGS = "the host's initial_position: give one that the partition has"
_FROM_CHECKPOINT = "the partition's checkpoint, which may be of another hub or of the hub before it was made again"


def _words(position: EventPosition) -> str:
    if position.sequence_number is not None:
        place = f"sequence number {position.sequence_number}"
    elif position.enqueued_time is not None:
        place = f"enqueued time {position.enqueued_time.isoformat()}"
    else:
        place = f"offset {position.offset}"
    return f"{place}{', inclusive' if position.inclusive else ''}"
