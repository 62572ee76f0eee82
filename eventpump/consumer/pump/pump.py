"""One owned partition for one subscription, from the first call of the processor's `open` to the end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime

from eventpump.aio.tasks import wait_for_event
from eventpump.consumer.calls.handler import HandlerRunner, PumpEndedError, as_exception
from eventpump.consumer.lease.ownership import Ownership
from eventpump.consumer.lease.services import HostServices
from eventpump.consumer.link.sharing import SharedPartition
from eventpump.consumer.link.silence import SilenceWatch
from eventpump.consumer.processor import EventProcessor, PartitionContext
from eventpump.consumer.pump.delivery import Delivery
from eventpump.consumer.pump.failing import FailureHandling
from eventpump.consumer.pump.partition import OpenPartition
from eventpump.consumer.pump.parts import PumpParts
from eventpump.consumer.pump.reading import PartitionReading
from eventpump.consumer.pump.requests import Drain, Replay, Requests, Seek
from eventpump.consumer.pump.rewind import Rewinding
from eventpump.consumer.record.subscriptions import Subscription
from eventpump.core.checkpoint import DEFAULT_SUBSCRIPTION
from eventpump.core.lease import PartitionLease
from eventpump.core.pump_state import CloseReason, PumpState
from eventpump.core.sharing import LinkState, PressureState
from eventpump.errors import ConfigurationError, ConsumerDisconnectedError, OwnershipLostError
from eventpump.eventhubs.events import Checkpoint, EventPosition, ReceivedEvent
from eventpump.interfaces import PartitionProperties
from eventpump.reports import EventRange, ProcessorFailed, PumpClosed, PumpOverdue, WaitsFor


class PartitionPump:
    """Pumps one partition under one lease. `run` does the work; the manager reports changes of the lease to it.

    The user's code runs in the task of `run`, or in workers (`KeyedProcessor`), and nothing else of the pump waits for
    that code to return: the feed, the checkpoint writer and the deadlines are independent of it.

    Args:
        on_stolen: Called when a reader with a higher owner level took the link; no batch follows.
        on_lost: Called with how it was found that the lease is lost.
        on_overdue: Called when the pump should have ended and has not.
        on_suspended: Called when it holds other subscriptions back for too long, and is to be suspended for it.
        on_link_changed: Called when `link_state` may have changed.
    """

    def __init__(
        self,
        services: HostServices,
        lease: PartitionLease,
        subscription: Subscription,
        shared: SharedPartition,
        *,
        silence: SilenceWatch,
        on_stolen: Callable[[ConsumerDisconnectedError], None],
        on_lost: Callable[[str], None],
        on_overdue: Callable[[], None],
        on_suspended: Callable[[], None],
        on_link_changed: Callable[[], None],
    ) -> None:
        self._services = services
        self._subscription = subscription
        self._on_overdue = on_overdue
        ownership = self._ownership = Ownership(
            services, lease, subscription.name, subscription.settings, end=self.stop, on_lost=on_lost
        )
        self._life = ownership.life
        runner = self._runner = HandlerRunner(
            lease.partition_id,
            subscription.settings,
            blocked_after=services.blocked_after,
            blocked_pause=services.renew_interval,
            stepped=services.loop_gate.stepped,
            report=ownership.report,
        )
        requests = self._requests = Requests()
        context = self.context = PartitionContext(
            services.scope,
            lease.partition_id,
            services.owner_id,
            lease.owner_level,
            self.subscription,
            checkpoint=self._checkpoint,
            seek=self._seek_by_processor,
            newest=self._newest,
            lag=self._lag,
        )
        failing = self._failing = FailureHandling(ownership, runner, context)
        reading = self._reading = PartitionReading(
            ownership,
            subscription,
            shared,
            silence=silence,
            failing=failing,
            on_stolen=on_stolen,
            on_suspended=on_suspended,
            on_link_changed=on_link_changed,
        )
        telemetry = None if services.telemetry is None else services.telemetry.partition(lease.partition_id)
        parts = PumpParts(ownership, runner, context, requests, failing, telemetry)
        self._delivery = Delivery(parts, reading, Rewinding(parts, reading))
        self._overdue_timer: asyncio.TimerHandle | None = None
        self.is_overdue = False
        """Whether it should have ended and has not."""

    # ---------------------------------------------------------------------------------- called by PartitionManager

    @property
    def partition_id(self) -> str:
        """The partition."""
        return self._ownership.partition_id

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
        return self._partition is None or self._reading.key == subscription.start.key

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
    def link_state(self) -> LinkState:
        """What it reads over."""
        if self._requests.is_paused:
            return LinkState.PAUSED
        return LinkState.OPENING if self._partition is None else self._partition.feed.link_state

    @property
    def checkpoint(self) -> Checkpoint | None:
        """The checkpoint that the store is known to hold."""
        return None if self._partition is None else self._partition.tracker.stored

    @property
    def pressure(self) -> PressureState:
        """How it holds the other subscriptions back."""
        feed = None if self._partition is None else self._partition.feed
        return PressureState.FREE if feed is None or feed.has_own_link else feed.pressure.state

    @property
    def last_sequence_number(self) -> int | None:
        """The sequence number of the last event delivered, or, of a stream, passed over; None if there is none."""
        if self._subscription.selection is not None and self._partition is not None:
            position = self._partition.position
            if position is not None:
                return position
        last = self.context.last_delivered
        return None if last is None else last.sequence_number

    @property
    def busy(self) -> tuple[datetime, EventRange | None] | None:
        """When the running call of the processor began, of several the oldest, and its events; None if none runs."""
        oldest = self._runner.oldest
        if oldest is None:
            return None
        took, events = oldest
        return datetime.fromtimestamp(self._services.clock.time() - took, UTC), events

    @property
    def waits_for(self) -> tuple[WaitsFor, str]:
        """What it waits for now, and the same in words."""
        if (running := self._runner.running) is not None:
            return WaitsFor.HANDLER, str(running)
        state, partition = self.state, self._partition
        if state is PumpState.SUSPENDED:
            return WaitsFor.LEASE, "another reader took the link: the lease is being checked"
        if self.is_ending:
            return WaitsFor.END, f"the last checkpoint and the end of its link ({state.value})"
        if self._failing.failures.in_a_row:
            return (
                WaitsFor.RETRY,
                f"the next attempt, after {self._failing.failures.in_a_row} failures of the processor",
            )
        if partition is None:
            return WaitsFor.START, "its checkpoint, or the position to begin at"
        if self._requests.is_paused:
            return WaitsFor.RESUME, "a call of resume: it is paused"
        feed = partition.feed
        if feed.available or partition.in_hand:
            if self._services.loop_gate.ledger.is_watching:
                return WaitsFor.LEASE, "a renewal, or a call of the store: handlers keep the event loop busy"
            return WaitsFor.HANDLER, f"the processor, or a loop over batches(), to take {feed.available} events"
        link = feed.feed
        if link is None or not feed.is_attached:
            return WaitsFor.LINK, f"its link ({feed.link_state.value if link is None else link.link_state.value})"
        if not link.credit:
            return WaitsFor.CREDIT, "credit: what was received takes all the room of the cache or of the host"
        return WaitsFor.EVENTS, f"events: the cache is empty, with credit for {link.credit}"

    @property
    def held_events(self) -> int:
        """Events in the cache that only this subscription has not read yet."""
        return 0 if self._partition is None else self._partition.feed.held[0]

    @property
    def _partition(self) -> OpenPartition | None:
        """What is being read."""
        return self._reading.partition

    @property
    def failure(self) -> Exception | None:
        """Why the pump failed, if it did not end because of the lease or the host."""
        return self._ownership.failure

    @property
    def was_attached(self) -> bool:
        """Whether a link was ever attached."""
        return self._reading.was_attached

    @property
    def is_abandoned(self) -> bool:
        """Whether `abandon` was called."""
        return self._runner.is_abandoned

    @property
    def waits_for_caller(self) -> bool:
        """Whether the pump carries out no request before the current code, or what has started it, has returned."""
        return self._runner.is_waited_for

    def renewed(self, lease: PartitionLease) -> None:
        """Continue under a renewed lease."""
        self._ownership.lease = lease

    def hub_found(self, created_at: datetime) -> None:
        """Open the link again if the hub was created again since the start position was found."""
        if self._partition is not None:
            self._partition.hub_found(created_at)

    def stop(self, reason: CloseReason, within: float | None = None) -> None:
        """End in order: finish the running batch, write the last checkpoint, close.

        Args:
            within: Seconds it may take; None for the close time-out. A later call can only shorten it.
        """
        if not self._life.is_over:
            self._life.ending(reason, self._services.clock.monotonic(), within)
            self._begin_to_end()

    def ownership_lost(self) -> None:
        """End because the lease is lost: no batch and no checkpoint from now on."""
        if not self._life.is_over and not self._life.is_lost:
            self._life.ownership_lost(self._services.clock.monotonic())
            self._disown()
            self._begin_to_end()

    def pause(self, *, is_paused: bool) -> None:
        """Deliver nothing after the running batch, or deliver again."""
        self._requests.pause(is_paused=is_paused)
        self._wake()

    def seek(self, place: Checkpoint) -> asyncio.Future[bool]:
        """Go on after a checkpoint, once the running batch has ended.
        Completes with whether that is stored: not if the pump ends."""
        done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._requests.seek(Seek(place, done))
        self._wake()
        return done

    def replay(self, after: Checkpoint, through: int) -> asyncio.Future[bool]:
        """Deliver a range again once the running batch has ended, and then go on as before.

        Returns:
            Completes with whether all of it was processed: not if the pump ends before, or a seek comes.
        """
        done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._requests.replay(Replay(after, through, done))
        self._wake()
        return done

    def drain(self, facts: PartitionProperties) -> asyncio.Future[bool]:
        """Wait until the partition is processed up to the newest event in these facts.
        Completes with False if the pump ends before."""
        done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._requests.drain(Drain(facts, done))
        self._wake()
        return done

    async def place_of(self, position: EventPosition) -> Checkpoint:
        """Return the checkpoint after which reading begins as from a position.
        Raises `ConfigurationError` if there is none."""
        return await self._reading.place_of(position)

    def _wake(self) -> None:
        """Check for pending requests."""
        self._reading.wake()
        self._delivery.wake()

    def abandon(self) -> None:
        """Let the next cancellation of the pump's task end it at once, without calling the processor."""
        self._runner.abandon()

    # --------------------------------------------------------------------------------------------------------- its life

    async def run(self) -> None:
        """Run the pump until it has shut down completely. If it failed, `failure` holds the cause."""
        try:
            try:
                partition = await self._reading.start(await self._open_processor())
                self._life.started()
                await self._delivery.run(partition)
            except PumpEndedError:
                pass
            except asyncio.CancelledError as error:
                # Not in the user's code, which `HandlerRunner` takes care of.
                await self._runner.take_cancellation_back()
                if not self._life.is_ending:
                    failure = RuntimeError("the task of the pump was cancelled, and not by eventpump")
                    failure.__cause__ = error
                    self._ownership.fail(failure)
            except Exception as error:
                self._ownership.fail(error)
            await self._close()
        finally:
            self._life.terminated()
            self._requests.close()
            self._disown()
            self._clear_timer()
            self._runner.stop()
            await self._reading.abort()
            await self._ownership.tasks.cancel(self._services.store_timeout)

    async def _open_processor(self) -> EventProcessor:
        """Create the processor and call its `open` until it returns. Raises `PumpEndedError` if the pump ends first."""
        # Not `retrying`: the policy decides whether an attempt follows, and each failure goes to `process_error`.
        while not self._life.is_ending:
            try:
                if self._failing.processor is None:
                    self._failing.processor = self._made()
                await self._runner.run("open", self._failing.processor.open, self.context)
            except ConfigurationError:
                raise
            except Exception as error:
                _, delay = await self._failing.failed(self._failing.failures, "open", error, None)
                if delay is not None:
                    await wait_for_event(self._ownership.ending, delay)
                continue
            self._life.opened()
            self._failing.failures.settled()
            self._ownership.check_ending()
            return self._failing.processor
        raise PumpEndedError

    def _made(self) -> EventProcessor:
        try:
            processor = self._subscription.source.make()
            type(processor).check_settings(self._subscription.settings)
            return processor
        except (Exception, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            raise as_exception("making the processor", error) from error

    async def _close(self) -> None:
        """Close the processor and write the last checkpoint, each until its deadline."""
        life = self._life
        if not life.is_ending:
            self.stop(CloseReason.FAILED)
        await self._delivery.aclose()
        was_opened = life.drained()
        assert life.reason is not None
        self._reading.closing()
        if was_opened:
            assert self._failing.processor is not None
            try:
                await self._runner.run("close", self._failing.processor.close, self.context, life.reason)
            except PumpEndedError:
                pass
            except Exception as error:
                self._ownership.report(ProcessorFailed, "close", error, 1, None)
        await self._reading.write_last()
        self._disown()
        await self._reading.aclose()
        life.closed()
        self._ownership.report(PumpClosed, life.reason)

    # ---------------------------------------------------------------------------------------------------------- its end

    def _begin_to_end(self) -> None:
        """Stop receiving, and set the deadlines."""
        self._ownership.ending.set()
        self._requests.close()
        self._delivery.stop()
        self._reading.stop()
        self._clear_timer()
        now, life = self._services.clock.monotonic(), self._life
        self._runner.set_deadlines(max(0.0, life.handler_until - now), max(0.0, life.close_until - now))
        self._overdue_timer = asyncio.get_running_loop().call_later(max(0.0, life.overdue_at - now), self._overdue)

    def _disown(self) -> None:
        self.context.ownership_lost.set()
        self._reading.disown()

    def _clear_timer(self) -> None:
        if self._overdue_timer is not None:
            self._overdue_timer.cancel()

    def _overdue(self) -> None:
        reason = self._life.reason
        assert reason is not None
        self._disown()
        waited = self._services.clock.monotonic() - self._life.ending_since
        self._ownership.report(PumpOverdue, reason, self._runner.operation, waited)
        self.is_overdue = True
        self._on_overdue()

    # --------------------------------------------------------------------------------------- called through the context

    def _checkpoint(self, event: ReceivedEvent | None) -> asyncio.Future[None] | None:
        if self._life.is_lost or self._life.is_over or self.context.ownership_lost.is_set():
            raise OwnershipLostError(self.partition_id)
        if not self._ownership.is_lease_valid():
            raise OwnershipLostError(self.partition_id)
        self._delivery.record()
        return self._reading.checkpoint(event, is_in_batch=self._runner.is_in_batch)

    def _seek_by_processor(self, position: EventPosition) -> None:
        if self._life.is_ending or self.context.ownership_lost.is_set():
            raise OwnershipLostError(self.partition_id)
        self._requests.seek(Seek(position))
        self._wake()

    def _newest(self) -> bytes | None:
        return None if self._partition is None else self._partition.feed.facts.newest

    def _lag(self) -> int | None:
        return self._reading.lag(lambda: self.context.last_sequence_number)
