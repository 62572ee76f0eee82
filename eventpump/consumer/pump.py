"""One owned partition, from the first call of the processor's `open` to the end."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NoReturn, TypeVar

from eventpump.aio.retry import retrying
from eventpump.aio.tasks import StoppedError, TaskSet, resolve, wait_for_event
from eventpump.cancellation import is_failure
from eventpump.consumer.checkpoints import CheckpointWriter, store_error
from eventpump.consumer.continuity import ContinuityCheck
from eventpump.consumer.handler import HandlerRunner, PumpEndedError, as_exception
from eventpump.consumer.limits import BoundedLeaseStore
from eventpump.consumer.opening import (
    BEYOND_END_PAUSE,
    Beginning,
    HubRecreatedError,
    PartitionOpening,
    RecordChangedError,
    loss_error,
)
from eventpump.consumer.parking import Parking
from eventpump.consumer.partition import OpenPartition, delivered_before_seek, describe_position, not_delivered
from eventpump.consumer.processor import EventProcessor, PartitionContext
from eventpump.consumer.rewind import Drain, Replay, ReplayedRanges, Requests, Seek
from eventpump.consumer.sharing import MemberCalls, MemberFeed, SharedPartition
from eventpump.consumer.silence import SilenceWatch, SilentLink
from eventpump.consumer.subscriptions import Subscription, SubscriptionEndedError, SubscriptionStart
from eventpump.consumer.turns import Turns
from eventpump.core.backoff import UNLIMITED, Backoff
from eventpump.core.checkpoint import DEFAULT_SUBSCRIPTION, CheckpointTracker
from eventpump.core.failures import FailureStep, ProcessorFailures
from eventpump.core.lease import PartitionLease
from eventpump.core.pump_state import CloseReason, PumpLife, PumpState
from eventpump.core.rewind import PlaceSearch, UnknownPlaceError
from eventpump.core.sharing import Held
from eventpump.core.starts import Loss, LossKind, first_number, retained_from
from eventpump.errors import (
    ConfigurationError,
    ConsumerDisconnectedError,
    EventError,
    EventPumpError,
    OwnershipLostError,
    ProcessorFailedError,
    RequestRefusedError,
)
from eventpump.eventhubs.conditions import ARGUMENT_ERROR
from eventpump.eventhubs.events import Checkpoint, EventPosition, ReceivedEvent
from eventpump.interfaces import (
    CLOSE_TIMEOUT,
    Clock,
    ConsumerScope,
    HubDirectory,
    PartitionProperties,
    Transport,
)
from eventpump.options.consumer import HostSettings, Park, failure_step
from eventpump.reports import (
    CheckpointDropped,
    CheckpointWritten,
    DataLost,
    EventParked,
    EventSkipped,
    LinkFailed,
    LinkRestored,
    LinkRewound,
    LinkStalled,
    OwnLink,
    PositionSought,
    ProcessorFailed,
    PumpClosed,
    PumpOverdue,
    PumpStarted,
    RangeReplayed,
    Reporter,
    ServiceFailed,
    StoreFailed,
    SubscriptionSlow,
    UnexpectedFailure,
)

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class PumpSurroundings:
    """What all pumps of a host share.

    Attributes:
        transport: Opens the links.
        directory: Reads the properties of the hub and its partitions.
        store: The leases and checkpoints; each call ends at the store's time-out.
        settings: The options of the host.
        scope: Namespace, hub and consumer group.
        owner_id: The owner's name in the leases.
        clock: The clock that leases go by.
        rng: Randomness, for delays.
        reporter: Receives the reports.
        store_timeout: Seconds for one call of the store, once it is sent.
        blocked_after: Seconds; a longer standstill of the event loop is reported.
        turns: Holds deliveries back while handlers compute and the store needs the loop.
        renew_interval: Seconds between renewals.
        parking: Stores events elsewhere that cannot be processed.
    """

    transport: Transport
    directory: HubDirectory
    store: BoundedLeaseStore
    settings: HostSettings
    scope: ConsumerScope
    owner_id: str
    clock: Clock
    rng: random.Random
    reporter: Reporter
    store_timeout: float
    blocked_after: float
    turns: Turns
    renew_interval: float
    parking: Parking


class PartitionPump:
    """Pumps one partition under one lease. `run` does the work; the manager reports changes of the lease to it.

    The user's code runs in the task of `run`, and nothing else of the pump waits for that code to return: the feed,
    the checkpoint writer and the deadlines are independent of it.

    Args:
        around: What all pumps of a host share.
        lease: The lease of the partition.
        subscription: Whose events it delivers.
        shared: The receive link of the partition.
        silence: Checks its link when it is silent.
        on_stolen: Called when a reader with a higher owner level took the link; no batch follows.
        on_lost: Called with how it was found that the lease is lost.
        on_overdue: Called when the pump should have ended and has not.
        on_suspended: Called when it holds other subscriptions back for too long, and is to be suspended for it.
    """

    def __init__(
        self,
        around: PumpSurroundings,
        lease: PartitionLease,
        subscription: Subscription,
        shared: SharedPartition,
        *,
        silence: SilenceWatch,
        on_stolen: Callable[[ConsumerDisconnectedError], None],
        on_lost: Callable[[str], None],
        on_overdue: Callable[[], None],
        on_suspended: Callable[[], None],
    ) -> None:
        self._around = around
        self._subscription = subscription
        self._shared = shared
        settings = self._settings = subscription.settings
        self._clock = around.clock
        self._loop = asyncio.get_running_loop()
        self._silence = silence
        self._on_stolen = on_stolen
        self._on_lost = on_lost
        self._on_overdue = on_overdue
        self._on_suspended = on_suspended
        self._life = PumpLife(ownership_lost_grace=settings.ownership_lost_grace, close_timeout=settings.close_timeout)
        self._runner = HandlerRunner(
            lease.partition_id,
            settings,
            blocked_after=around.blocked_after,
            blocked_pause=around.renew_interval,
            stepped=around.turns.stepped,
            report=self._report,
        )
        self._tasks = TaskSet(self._unexpected)
        self._ending = asyncio.Event()
        self._overdue_timer: asyncio.TimerHandle | None = None
        self._held_back: asyncio.Future[None] | None = None
        self._processor: EventProcessor | None = None
        self._partition: OpenPartition | None = None
        self._requests = Requests()
        self._sought_back = (0, 0)
        self._sought: Checkpoint | None = None
        self._failures = ProcessorFailures(
            failure_step(settings.failure_policy), failure_step(settings.on_retries_exhausted), settings.handler_retry
        )
        self._group = subscription.start
        self._key = DEFAULT_SUBSCRIPTION
        self._opening = PartitionOpening(
            subscription.start,
            around.store,
            around.directory,
            settings,
            lease.partition_id,
            store_timeout=around.store_timeout,
            rng=around.rng,
            lease=lambda: self.lease,
            key=lambda: self._key,
            step=self._unless_ending,
            pause=self._pause_or_end,
            report=self._report,
            on_refused=self._refused,
        )
        self.lease = lease
        """The lease as last renewed."""
        self.context = PartitionContext(
            around.scope,
            lease.partition_id,
            around.owner_id,
            lease.epoch,
            self.subscription,
            checkpoint=self._checkpoint,
            seek=self._seek_by_processor,
            newest=lambda: None if self._partition is None else self._partition.feed.newest,
            lag=self._lag,
        )
        self.failure: Exception | None = None
        """Why the pump failed, if it did not end because of the lease or the host."""
        self.was_attached = False
        self._has_link_trouble = False
        """Whether a link was ever attached."""
        self.is_overdue = False
        """Whether it should have ended and has not."""

    # ---------------------------------------------------------------------------------- called by PartitionManager

    @property
    def partition_id(self) -> str:
        """The partition."""
        return self.lease.partition_id

    @property
    def subscription(self) -> str:
        """The name of the subscription."""
        return self._subscription.name

    @property
    def key(self) -> str:
        """Identifies the pump among those of a host."""
        if self.subscription == DEFAULT_SUBSCRIPTION:
            return self.partition_id
        return f"{self.partition_id} of {self.subscription}"

    def is_of(self, subscription: Subscription | None) -> bool:
        """Return whether this pump is that subscription's, and, if it reads already, of its present record."""
        if subscription is None or self._subscription is not subscription:
            return False
        return self._partition is None or self._key == subscription.start.key

    @property
    def state(self) -> PumpState:
        """The state of the pump."""
        return self._life.state

    @property
    def is_ending(self) -> bool:
        """Whether no further batch follows."""
        return self._life.is_ending or self._life.is_over

    @property
    def is_attached(self) -> bool:
        """Whether its link is attached now."""
        return self._partition is not None and self._partition.feed.is_attached

    @property
    def has_own_link(self) -> bool:
        """Whether it reads over a link of its own, in another consumer group."""
        return self._partition is not None and self._partition.feed.has_own_link

    @property
    def held_events(self) -> int:
        """Events in the cache that only this subscription has not read yet."""
        return 0 if self._partition is None else self._partition.feed.held[0]

    @property
    def is_abandoned(self) -> bool:
        """Whether `abandon` was called."""
        return self._runner.is_abandoned

    def renewed(self, lease: PartitionLease) -> None:
        """Continue under a renewed lease."""
        self.lease = lease

    def hub_found(self, created_at: datetime) -> None:
        """Open the link again if the hub was created again since the start position was found."""
        if self._partition is not None:
            self._partition.hub_found(created_at)

    def stop(self, reason: CloseReason, within: float | None = None) -> None:
        """End in order: finish the running batch, write the last checkpoint, close.

        Args:
            reason: Why the pump ends.
            within: Seconds it may take; None for the close time-out. A later call can only shorten it.
        """
        if not self._life.is_over:
            self._life.ending(reason, self._clock.monotonic(), within)
            self._begin_to_end()

    def ownership_lost(self) -> None:
        """End because the lease is lost: no batch and no checkpoint from now on."""
        if not self._life.is_over and not self._life.is_lost:
            self._life.ownership_lost(self._clock.monotonic())
            self._disown()
            self._begin_to_end()

    @property
    def is_paused(self) -> bool:
        """Whether nothing is delivered because that was asked for."""
        return self._requests.is_paused

    def pause(self, *, is_paused: bool) -> None:
        """Deliver nothing after the running batch, or deliver again."""
        self._requests.pause(is_paused=is_paused)
        self._wake()

    def seek(self, place: Checkpoint) -> asyncio.Future[bool]:
        """Go on after a checkpoint, once the running batch has ended.

        Returns:
            Completes with whether that checkpoint is stored: not if the pump ends before.
        """
        done: asyncio.Future[bool] = self._loop.create_future()
        self._requests.seek(Seek(place, done))
        self._wake()
        return done

    def replay(self, after: Checkpoint, through: int) -> asyncio.Future[bool]:
        """Deliver a range again once the running batch has ended, and then go on as before.

        Args:
            after: The checkpoint before the first event of the range.
            through: The sequence number of the last one.

        Returns:
            Completes with whether all of it was processed: not if the pump ends before, or a seek comes.
        """
        done: asyncio.Future[bool] = self._loop.create_future()
        self._requests.replay(Replay(after, through, done))
        self._wake()
        return done

    def drain(self, facts: PartitionProperties) -> asyncio.Future[bool]:
        """Wait until the partition is processed up to its end.

        Args:
            facts: The properties of the partition, which name its newest event.

        Returns:
            Completes with whether they are: not if the pump ends before.
        """
        done: asyncio.Future[bool] = self._loop.create_future()
        self._requests.drain(Drain(facts, done))
        self._wake()
        return done

    async def place_of(self, position: EventPosition) -> Checkpoint:
        """Return the checkpoint after which reading begins as it does from a position.

        Raises:
            ConfigurationError: The partition has no such position.
            EventPumpError: The service failed, or the partition is given up.
        """
        directory, hub = self._around.directory, self._around.scope.hub

        async def facts() -> PartitionProperties:
            return await directory.get_partition_properties(hub, self.partition_id)

        created_at = (await self._group.hub()).created_at
        try:
            try:
                search = PlaceSearch(self.partition_id, position, await facts())
            except UnknownPlaceError:
                # The properties may lag a little behind the events received.
                await asyncio.sleep(BEYOND_END_PAUSE)
                search = PlaceSearch(self.partition_id, position, await facts())
            if search.found is None:
                return await self._shared.find_place(search, created_at, facts)
            return search.found
        except UnknownPlaceError as error:
            raise ConfigurationError("position", f"partition {self.partition_id}: {error}") from error
        except RequestRefusedError as error:
            if error.condition != ARGUMENT_ERROR:
                raise
            raise ConfigurationError("position", f"partition {self.partition_id}: {error.description}") from error

    def abandon(self) -> None:
        """Let the next cancellation of the pump's task end it at once, without calling the processor."""
        self._runner.abandon()

    # ------------------------------------------------------------------------------------------------- its life

    async def run(self) -> None:
        """Run the pump until it has shut down completely. If it failed, `failure` holds the cause."""
        try:
            try:
                partition = await self._start(await self._open_processor())
                self._life.started()
                await self._deliver_all(partition)
            except PumpEndedError:
                pass
            except asyncio.CancelledError as error:
                # Not in the user's code, which `HandlerRunner` takes care of.
                await self._runner.take_cancellation_back()
                if not self._life.is_ending:
                    failure = RuntimeError("the task of the pump was cancelled, and not by eventpump")
                    failure.__cause__ = error
                    self._fail(failure)
            except Exception as error:
                self._fail(error)
            await self._close()
        finally:
            self._life.terminated()
            self._requests.close()
            self._disown()
            self._clear_timers()
            self._runner.stop()
            if self._partition is not None:
                await self._partition.feed.aclose(0.0)
                await self._partition.writer.aclose()
            await self._tasks.cancel(self._around.store_timeout)

    async def _open_processor(self) -> EventProcessor:
        """Create the processor and call its `open` until it returns. Raises `PumpEndedError` if the pump ends first."""
        while not self._life.is_ending:
            try:
                if self._processor is None:
                    self._processor = self._made()
                await self._runner.run("open", self._processor.open, self.context)
            except ConfigurationError:
                raise
            except Exception as error:
                await self._processor_failed("open", error, None)
                continue
            self._life.opened()
            self._failures.settled()
            self._check_ending()
            return self._processor
        raise PumpEndedError

    def _made(self) -> EventProcessor:
        try:
            return self._subscription.source.make()
        except (Exception, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            raise as_exception("making the processor", error) from error

    async def _start(self, processor: EventProcessor, *, opens_anew: int | None = None) -> OpenPartition:
        """Find the start position and begin to read there.

        Args:
            processor: The processor, open.
            opens_anew: As of `SharedPartition.join`.

        Raises:
            PumpEndedError: The pump ends, maybe because the position could not be found.
        """
        try:
            beginning = await self._find_beginning()
        except SubscriptionEndedError:
            self.stop(CloseReason.SHUTDOWN)
            raise PumpEndedError from None
        except EventPumpError as error:
            await self._feed_failed(error)
            raise PumpEndedError from error
        self._check_ending()
        partition_id, around = self.partition_id, self._around
        tracker = CheckpointTracker(partition_id, self._settings.checkpoint_policy, beginning.checkpoint)
        writer = CheckpointWriter(
            around.store,
            tracker,
            lambda: self.lease,
            self._key,
            timeout=around.store_timeout,
            rng=around.rng,
            on_written=lambda checkpoint: self._report(CheckpointWritten, checkpoint),
            on_failed=lambda error: self._report(StoreFailed, "write checkpoint", error),
            on_refused=lambda: self._on_lost("a checkpoint was refused"),
            on_unexpected=self._unexpected,
        )
        feed = self._join(beginning, opens_anew=opens_anew)
        origin = (around.scope, partition_id, beginning.hub_created_at)
        replayed = ReplayedRanges(*self._sought_back)
        self._sought = None
        self._partition = OpenPartition(
            partition_id,
            processor,
            feed,
            tracker,
            writer,
            self._continuity_from(beginning),
            beginning,
            origin,
            self._life,
            replayed,
        )
        return self._partition

    def _continuity_from(self, beginning: Beginning) -> ContinuityCheck:
        return ContinuityCheck(
            beginning,
            self.partition_id,
            self._settings,
            directory=self._around.directory,
            group=self._group,
            clock=self._clock,
            step=self._unless_ending,
            until_done=self._opening.until_done,
            report=self._report,
        )

    def _join(self, beginning: Beginning, *, opens_anew: int | None) -> MemberFeed:
        since, below = self._sought_back
        is_below = beginning.expected is None or beginning.expected < below
        if opens_anew is None and is_below and self._shared.link < since:
            # By that link these events would count as delivered before the seek.
            opens_anew = below
        return self._shared.join(
            self.subscription,
            beginning,
            MemberCalls(
                self._opening.facts,
                lambda: self._attached(describe_position(beginning.position)),
                self._link_trouble,
                lambda number: self._report(LinkRewound, number),
                self._slow,
                lambda is_own: self._report(OwnLink, is_own),
            ),
            slow_after=self._subscription.slow_after,
            catch_up_group=self._subscription.catch_up_group,
            opens_anew=opens_anew,
        )

    async def _restart(self, partition: OpenPartition, seek: Seek | None = None) -> OpenPartition:
        """Find the start position again, and read from there.

        Args:
            partition: What was being read.
            seek: The checkpoint to store before; None if what was being read does not exist any more.

        Raises:
            PumpEndedError: The pump ends.
        """
        self._check_ending()
        await partition.feed.aclose()
        if seek is None:
            partition.tracker.closing()
        await self._unless_ending(partition.writer.flush(self._around.store_timeout))
        await partition.writer.aclose()
        partition.cancel_timer()
        # A checkpoint requested from now on, until reading begins, would be one of what does not exist any more, or of
        # what was delivered before a seek.
        self._partition = None
        opens_anew: int | None = None
        if seek is not None:
            assert isinstance(seek.place, Checkpoint)
            self._sought = seek.place
            await self._opening.store(seek.place, is_reset=True)
            self._report(PositionSought, seek.place)
            if seek.done is not None:
                resolve(seek.done, True)
            before = partition.feed.number
            if before is None or seek.place.sequence_number + 1 < before:
                opens_anew = max(self._sought_back[1], before or 0)
                self._sought_back = self._shared.feeds_made, opens_anew
        return await self._start(partition.processor, opens_anew=opens_anew)

    async def _find_beginning(self) -> Beginning:
        while True:
            self._key = self._group.key
            stored = await self._read_checkpoint()
            self._check_ending()
            try:
                return await self._opening.find(stored)
            except RecordChangedError:
                assert isinstance(self._group, SubscriptionStart)
                await self._renew_record(self._group, stored)

    async def _renew_record(self, start: SubscriptionStart, stored: Checkpoint | None) -> None:
        """Follow, or make, the record of the present hub in place of the one of an earlier hub.

        Args:
            start: The subscription's record.
            stored: Its checkpoint in the earlier hub.

        Raises:
            DataLossError: The settings say to fail.
            SubscriptionEndedError: The subscription was ended.
        """
        until_done, step = self._opening.until_done, self._unless_ending
        hub = await until_done(lambda: step(start.refresh()))
        if hub is None:
            return
        first = 0 if stored is None else stored.sequence_number + 1
        if stored is None and (number := first_number(start.start_of(self.partition_id), None)) is not None:
            first = number
        loss = Loss(LossKind.RECREATED, first, None)
        action = loss.action(self._settings.on_data_loss)
        if action == "fail":
            self._report(DataLost, loss, action)
            raise loss_error(self._around.scope.hub, self.partition_id, loss)
        if await until_done(lambda: step(start.begin_anew(hub, action))):
            self._report(DataLost, loss, action)

    async def _read_checkpoint(self) -> Checkpoint | None:
        """Read the partition's checkpoint; tried until it succeeds. Raises `PumpEndedError` if the pump ends first.

        Of another subscription than the default one it is claimed, so that no earlier owner can write it any more.
        """
        operation, timeout, store = "read checkpoint", self._around.store_timeout, self._around.store

        def report(error: Exception, _: float) -> None:
            self._report(StoreFailed, operation, store_error(error, operation, self.partition_id, timeout))

        async def read() -> Checkpoint | None:
            if self._key == DEFAULT_SUBSCRIPTION:
                return await store.read_checkpoint(self.partition_id)
            claim = await store.claim_checkpoint(self.lease, self._key)
            if claim is None:
                self._refused()
            return claim.checkpoint

        return await retrying(
            lambda: self._unless_ending(read()),
            UNLIMITED,
            self._around.rng,
            is_final=lambda _: False,
            on_retry=report,
            sleep=self._pause_or_end,
        )

    async def _deliver_all(self, partition: OpenPartition) -> None:
        """Deliver batches until the pump ends."""
        settings = self._settings
        limit = settings.max_batch_size
        while not self._life.is_ending:
            feed = partition.feed
            if self._life.is_suspended:
                # The link is stolen. The manager checks whether the lease is lost, too.
                await self._ending.wait()
                return
            if self._requests.is_due:
                partition = await self._obey(partition)
                continue
            events = tuple(feed.take(limit))
            if events:
                if not partition.continuity.follows(events) and not await self._may_pass_gap(partition, events):
                    partition = await self._restart(partition)
                    continue
                while events := await self._deliver(partition, events):
                    before, partition = partition, await self._obey(partition)
                    if partition is not before:
                        break
                if feed.available:
                    # A handler that never suspends must not block the event loop.
                    await asyncio.sleep(0)
            elif feed.error is not None:
                if not await self._can_restart(partition, feed.error):
                    await self._feed_failed(feed.error if self.was_attached else partition.explained(feed.error))
                    return
                partition = await self._restart(partition)
            elif not await feed.wait(settings.max_wait_time) and self._may_deliver():
                if feed.feed is not None:
                    self._silence.waited(feed.feed, self.partition_id, self._link_silent)
                if self._requests.drains:
                    await self._drain_past_lost(partition)
                if settings.call_when_idle:
                    await self._deliver(partition, ())

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
            await self._opening.skip_to_end(loss)
            return False
        self._report(DataLost, loss, action)
        if action == "fail":
            await self._feed_failed(loss_error(self._around.scope.hub, self.partition_id, loss))
            return False
        return True

    async def _can_restart(self, partition: OpenPartition, error: Exception) -> bool:
        """Return whether the start position is to be found again after the feed ended with an error."""
        if isinstance(error, HubRecreatedError):
            return True
        start = partition.recorded_start
        if not isinstance(error, RequestRefusedError) or self.was_attached or start is None:
            return False
        try:
            return await self._unless_ending(self._group.give_way(self.partition_id, start))
        except EventPumpError as another:
            self._report(StoreFailed, "write scope record", another)
            return False

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
        tracker, processor, context = partition.tracker, partition.processor, self.context
        ledger = self._around.turns.ledger
        # An event whose place cannot be read is covered by the checkpoint of a later one.
        last = next(filter(_has_place, reversed(events)), None)
        is_replay = partition.replayed.is_running
        while self._may_deliver():
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
                step = await self._processor_failed("process_events", error, len(events))
                if step is not FailureStep.NARROW and (
                    step is FailureStep.RETRY or not await self._pass_over(step, events, error)
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
            if not self._may_deliver():
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

    async def _pass_over(self, step: FailureStep, events: tuple[ReceivedEvent, ...], error: Exception) -> bool:
        """Skip an event, or park it.

        Args:
            step: What to do.
            events: The event; none if the processor failed at an idle call.
            error: What it failed with.

        Returns:
            False if the pump ends before that is done, or is asked to read elsewhere.
        """
        if not self._may_deliver():
            return False
        if not events:
            return True
        (event,) = events
        number = event.sequence_number if _has_place(event) else None
        failures, settings = self._failures, self._settings
        if step is FailureStep.SKIP:
            self._report(EventSkipped, number, error, failures.attempts)
            return True
        policies = (settings.failure_policy, settings.on_retries_exhausted)
        park = next(each for each in policies if isinstance(each, Park))
        backoff = Backoff(settings.handler_retry.base_delay, settings.handler_retry.max_delay)
        assert failures.first_failed is not None
        facts = (park, self.context, event, error, failures.attempts, failures.first_failed)
        # Not `retrying`: each failure goes to `process_error`, and the lease must be alive at each attempt.
        while self._may_deliver():
            try:
                await self._runner.run("park", self._around.parking.park, *facts)
            except Exception as failure:
                delay = backoff.next(self._around.rng)
                self._report(
                    ProcessorFailed, "park", failure, backoff.failures, None if self._life.is_ending else delay
                )
                await self._call_process_error(failure)
                await wait_for_event(self._requests.news, delay)
                if self._requests.is_due:
                    return False
                continue
            hub = park.to if isinstance(park.to, str) else getattr(park.to, "hub", None)
            self._report(EventParked, number, error, failures.attempts, hub)
            return True
        return False

    # ------------------------------------------------------------------------------------------- seek and replay

    async def _obey(self, partition: OpenPartition) -> OpenPartition:
        """Carry out what is asked for, and wait while the pump is paused.

        Returns:
            What is being read then: another object after a seek.
        """
        requests = self._requests
        while self._goes_on():
            match requests.take():
                case Seek() as seek:
                    partition = await self._seek(partition, seek)
                case Replay() as replay:
                    await self._replay(partition, replay)
                case None if requests.is_paused:
                    await self._stay_paused(partition)
                case None:
                    break
        if requests.drains:
            requests.processed(partition.next_number(requests.drains[-1].facts))
        return partition

    async def _seek(self, partition: OpenPartition, seek: Seek) -> OpenPartition:
        """Store where to go on, and go on there. Return what is being read then."""
        place = seek.place
        try:
            if isinstance(place, EventPosition):
                place = await self._unless_ending(self.place_of(place))
        except OwnershipLostError:
            return partition
        except EventPumpError as error:
            self._report(ServiceFailed, f"seeking {seek.place}", error)
            await self._call_process_error(error)
            return partition
        # The failures of a batch that is left are not those of another one.
        self._failures.settled()
        try:
            return await self._restart(partition, Seek(place, seek.done))
        finally:
            # It is stored by now, or never will be.
            if seek.done is not None:
                resolve(seek.done, False)

    async def _stay_paused(self, partition: OpenPartition) -> None:
        """Wait until the pump is to deliver again, or to seek. The link, and the cache, are left to the others."""
        requests = self._requests
        place = await self._leave(partition)
        while requests.is_paused and not requests.has_seek() and self._goes_on():
            requests.news.clear()
            await requests.news.wait()
        self._rejoin(partition, place)

    async def _leave(self, partition: OpenPartition) -> Beginning:
        """Read no more for now. Return where to go on."""
        feed, beginning = partition.feed, partition.beginning
        await feed.aclose()
        return Beginning(feed.position, beginning.checkpoint, feed.number, beginning.hub_created_at)

    def _rejoin(self, partition: OpenPartition, place: Beginning) -> None:
        """Read on from a place, unless the pump ends."""
        opens_anew: int | None = None
        if partition.replayed.is_running:
            opens_anew = sys.maxsize
        elif not self._shared.is_open:
            # A link that is opened again begins with the check that the hub is still the same.
            opens_anew = 0
        if self._goes_on():
            partition.feed = self._join(place, opens_anew=opens_anew)

    async def _replay(self, partition: OpenPartition, replay: Replay) -> None:
        """Deliver a range, and go on as before."""
        first, through, is_done = replay.after.sequence_number + 1, replay.through, False
        try:
            place = await self._leave(partition)
            hub = place.hub_created_at
            beginning = Beginning(EventPosition.at_offset(replay.after.offset), None, first, hub)
            partition.replayed.begin(self._shared.feeds_made)
            try:
                self._rejoin(partition, beginning)
                is_done = await self._deliver_range(partition, self._continuity_from(beginning), through)
            finally:
                partition.replayed.end(through + 1 if place.expected is None else place.expected)
        finally:
            resolve(replay.done, is_done)
        if is_done:
            self._report(RangeReplayed, first, through)
        if self._goes_on():
            await partition.feed.aclose()
            self._rejoin(partition, place)

    async def _deliver_range(self, partition: OpenPartition, continuity: ContinuityCheck, through: int) -> bool:
        """Deliver the events of a replay. Return whether all of them were processed."""
        settings = self._settings
        while await self._replays_on(partition):
            feed = partition.feed
            events = tuple(feed.take(settings.max_batch_size))
            if events:
                if not continuity.follows(events):
                    try:
                        loss = await continuity.find_loss(events)
                    except HubRecreatedError:
                        return False
                    if loss is not None:
                        # Whatever the settings say: delivery goes on after the checkpoint in any case.
                        self._report(DataLost, loss, "earliest")
                placed = [event for event in events if _has_place(event)]
                is_last = bool(placed) and placed[-1].sequence_number >= through
                if is_last:
                    events = tuple(event for event in placed if event.sequence_number <= through)
                while events and (events := await self._deliver(partition, events)):
                    if not await self._replays_on(partition):
                        return False
                if is_last:
                    return self._goes_on()
                if feed.available:
                    await asyncio.sleep(0)
            elif feed.error is not None:
                return False
            elif not await feed.wait(settings.max_wait_time):
                if feed.feed is not None:
                    self._silence.waited(feed.feed, self.partition_id, self._link_silent)
                if retained_from(await self._opening.facts()) > through and not feed.available:
                    return True
        return False

    async def _replays_on(self, partition: OpenPartition) -> bool:
        """Wait while the pump is paused. Return whether a replay is to continue."""
        if self._requests.is_paused and not self._requests.has_seek():
            await self._stay_paused(partition)
        # What waits for the end of the replay must not shorten the delays between attempts.
        self._requests.news.clear()
        return self._goes_on() and not self._requests.has_seek()

    async def _drain_past_lost(self, partition: OpenPartition) -> None:
        """End the waits for events that the hub has dropped: nothing follows that would show it."""
        facts = await self._opening.facts()
        # Where reading goes on may lie beyond that: after a loss it may have been the end.
        kept = max(retained_from(facts), partition.next_number(facts))
        if not partition.feed.available:
            self._requests.processed(kept)

    def _goes_on(self) -> bool:
        """Return whether the pump neither ends nor has lost its link to another reader."""
        return not self._life.is_ending and not self._life.is_suspended

    def _seek_by_processor(self, position: EventPosition) -> None:
        if self._life.is_ending or self.context.ownership_lost.is_set():
            raise OwnershipLostError(self.partition_id)
        self._requests.seek(Seek(position))
        self._wake()

    def _wake(self) -> None:
        if self._partition is not None:
            self._partition.feed.wake()

    async def _hold_back(self) -> bool:
        """Wait while handlers compute and the store needs the loop. Return False, without a wait, if that is not so.

        The wait ends early if the pump ends.
        """
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
        """Return whether a batch may be delivered now: the lease must not have expired by the host's own clock."""
        if self._life.is_ending or self._life.is_suspended:
            return False
        if self._clock.monotonic() >= self.lease.expires_at:
            self._on_lost("it ran out")
            return False
        return True

    async def _feed_failed(self, error: Exception) -> None:
        self._fail(error)
        await self._call_process_error(error)

    def _fail(self, error: Exception) -> None:
        if self.failure is None:
            self.failure = error
        self.stop(CloseReason.FAILED)

    async def _close(self) -> None:
        """Close the processor and write the last checkpoint, each until its deadline."""
        life, partition = self._life, self._partition
        if not life.is_ending:
            self.stop(CloseReason.FAILED)
        was_opened = life.drained()
        assert life.reason is not None
        if partition is not None and not life.is_lost:
            partition.tracker.closing()
            partition.writer.kick()
        if was_opened:
            assert self._processor is not None
            try:
                await self._runner.run("close", self._processor.close, self.context, life.reason)
            except PumpEndedError:
                pass
            except Exception as error:
                self._report(ProcessorFailed, "close", error, 1, None)
        if partition is not None:
            await self._close_partition(partition)
        life.closed()
        self._report(PumpClosed, life.reason)

    async def _close_partition(self, partition: OpenPartition) -> None:
        """Write the last checkpoint and detach, within the time that the end may take."""
        life = self._life
        timeout = min(self._around.store_timeout, self._time_to_write())
        await partition.continuity.report_last_gap(timeout)
        if not life.is_lost:
            await partition.writer.flush(self._time_to_write())
        self._disown()
        await partition.writer.aclose()
        if (dropped := partition.tracker.unwritten) is not None:
            self._report(CheckpointDropped, dropped)
        # A service that does not answer must not use up the time for closing.
        await partition.feed.aclose(min(CLOSE_TIMEOUT, self._time_to_write()))

    def _time_to_write(self) -> float:
        return max(0.0, self._life.write_until - self._clock.monotonic())

    # --------------------------------------------------------------------------------------------------- its end

    def _begin_to_end(self) -> None:
        """Stop receiving, and set the deadlines."""
        self._ending.set()
        self._requests.close()
        self._shared.left(self.subscription)
        if self._held_back is not None:
            resolve(self._held_back, None)
        if self._partition is not None:
            self._partition.stop()
            self._tasks.spawn(self._partition.feed.aclose(), f"eventpump detach of partition {self.partition_id}")
        self._clear_timers()
        now, life = self._clock.monotonic(), self._life
        self._runner.set_deadlines(max(0.0, life.handler_until - now), max(0.0, life.close_until - now))
        self._overdue_timer = self._loop.call_later(max(0.0, life.overdue_at - now), self._overdue)

    def _disown(self) -> None:
        self.context.ownership_lost.set()
        if self._partition is not None:
            self._partition.writer.stop()

    def _clear_timers(self) -> None:
        if self._overdue_timer is not None:
            self._overdue_timer.cancel()
        if self._partition is not None:
            self._partition.cancel_timer()

    def _overdue(self) -> None:
        reason = self._life.reason
        assert reason is not None
        self._disown()
        waited = self._clock.monotonic() - self._life.ending_since
        self._report(PumpOverdue, reason, self._runner.operation, waited)
        self.is_overdue = True
        self._on_overdue()

    def _check_ending(self) -> None:
        """Raise `PumpEndedError` if the pump ends."""
        if self._life.is_ending:
            raise PumpEndedError

    # -------------------------------------------------------------------------------------------------- failures

    async def _processor_failed(self, operation: str, error: Exception, events: int | None) -> FailureStep:
        """Apply the failure policy: return what follows, after the delay if that is another attempt.

        If the policy is to stop, the pump ends.

        Args:
            operation: The method that raised.
            error: What it raised.
            events: The number of events that were delivered; None if it was another method than `process_events`.
        """
        failures = self._failures
        step = failures.failed(events, self._clock.time())
        delay = None
        if step is FailureStep.RETRY and not self._life.is_ending:
            delay = failures.delay(self._around.rng)
        self._report(ProcessorFailed, operation, error, failures.in_a_row, delay)
        if step in (FailureStep.STOP, FailureStep.STOP_PARTITION):
            failure = ProcessorFailedError(self.partition_id, operation, stops_host=step is FailureStep.STOP)
            failure.__cause__ = error
            # First: a process_error that hangs must not keep the host from stopping.
            self._fail(failure)
        await self._call_process_error(error)
        if delay is not None:
            # Not `retrying`: the policy decides whether an attempt follows, and `process_error` is called before it.
            # A seek away from a batch that fails must not wait for its next attempt.
            await wait_for_event(self._requests.news if operation == "process_events" else self._ending, delay)
        return step

    async def _call_process_error(self, error: Exception) -> None:
        if self._processor is None:
            return
        try:
            await self._runner.run("process_error", self._processor.process_error, self.context, error)
        except Exception as another:
            self._report(ProcessorFailed, "process_error", another, 1, None)

    async def _pause_or_end(self, delay: float) -> None:
        """Wait for a time in seconds. Raises `PumpEndedError` if the pump ends."""
        await wait_for_event(self._ending, delay)
        self._check_ending()

    def _refused(self) -> NoReturn:
        self._on_lost("a checkpoint was refused")
        raise PumpEndedError

    async def _unless_ending(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run a step of the pump. Raises `PumpEndedError` if the pump ends first."""
        try:
            return await self._tasks.unless(self._ending, work, f"eventpump step of partition {self.partition_id}")
        except StoppedError:
            raise PumpEndedError from None
        except Exception:
            raise
        except BaseException as error:
            if not is_failure(error):
                raise
            raise as_exception("a step of the pump", error) from error

    # ------------------------------------------------------------------------------- called through the context

    def _checkpoint(self, event: ReceivedEvent | None) -> asyncio.Future[None] | None:
        if self._life.is_lost or self._life.is_over or self.context.ownership_lost.is_set():
            raise OwnershipLostError(self.partition_id)
        if self._clock.monotonic() >= self.lease.expires_at:
            self._on_lost("it ran out")
            raise OwnershipLostError(self.partition_id)
        if self._partition is not None:
            return self._partition.checkpoint(event, is_in_batch=self._runner.is_in_batch)
        if event is not None and self._sought is None:
            raise not_delivered(self.partition_id)
        if event is not None and self._sought is not None and event.sequence_number > self._sought.sequence_number:
            raise delivered_before_seek()
        return None

    def _lag(self) -> int | None:
        if self._partition is None:
            return None
        return self._partition.lag(lambda: self.context.last_sequence_number, self._silence.max_silence)

    # -------------------------------------------------------------------------------------------------- reports

    def _attached(self, position: str) -> None:
        if not self.was_attached:
            self.was_attached = True
            self._report(PumpStarted, self.lease.epoch, position)
        elif self._has_link_trouble:
            self._report(LinkRestored, self.lease.epoch, position)
        self._has_link_trouble = False

    def _link_trouble(self, error: Exception, delay: float | None, reports: bool) -> None:
        if self._life.is_ending:
            return
        if isinstance(error, ConsumerDisconnectedError):
            # Not reported here: only the manager can find out whether it is a move inside the fleet.
            self._life.stolen()
            self._on_stolen(error)
        elif delay is not None and reports:
            # Without a delay the feed has ended, and the manager reports or raises the error.
            self._has_link_trouble = True
            self._report(LinkFailed, error, delay)

    def _slow(self, held: Held) -> None:
        subscription = self._subscription
        suspends = subscription.suspends and subscription.catch_up_group is None and not self._life.is_ending
        self._report(SubscriptionSlow, held.share, held.seconds, suspends)
        if suspends:
            self._on_suspended()

    def _link_silent(self, link: SilentLink) -> None:
        self._report(LinkStalled, link.evidence, link.silent_for, link.drops_connection)

    def _unexpected(self, operation: str, error: BaseException) -> None:
        self._report(UnexpectedFailure, operation, error)

    def _report(self, kind: Callable[..., Any], *facts: object) -> None:
        self._around.reporter.report(
            kind(self._around.owner_id, self.partition_id, *facts, subscription=self.subscription)
        )


def _has_place(event: ReceivedEvent) -> bool:
    """Return whether an event's offset and sequence number can be read."""
    try:
        event.sequence_number  # noqa: B018 - whether it can be read is the question
    except EventError:
        return False
    return True
