"""One partition that a host owns: its lease, its link, and a pump for each subscription."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from eventpump.aio.tasks import TaskSet
from eventpump.consumer.lease.services import HostServices
from eventpump.consumer.link.feeds import FeedMaker
from eventpump.consumer.link.sharing import SharedPartition
from eventpump.consumer.link.silence import SilenceWatch
from eventpump.consumer.pump.pump import PartitionPump
from eventpump.consumer.record.starts import BeginningRecord
from eventpump.consumer.record.subscriptions import Subscription, Subscriptions
from eventpump.core.lease import PartitionLease
from eventpump.core.link_dispute import LinkDispute
from eventpump.core.pump_state import CloseReason
from eventpump.core.sharing import LinkState
from eventpump.errors import ConsumerDisconnectedError
from eventpump.eventhubs.events import EventPosition
from eventpump.interfaces import ReceiveLinkSpec
from eventpump.reports import (
    HostReport,
    LinkStateChanged,
    PartitionDescription,
    PartitionStatus,
    UnexpectedFailure,
    WaitsFor,
)

_KEPT = frozenset({LinkState.PAUSED, LinkState.SUSPENDED})
"""States that outlast the pump."""


@dataclass(frozen=True, slots=True)
class OwnerCalls:
    """What an owned partition asks of the manager, which has the lease.

    Attributes:
        stolen: Called when another reader took the link: is the lease lost, too?
        lost: Called with how it was found that the lease is lost.
        unused: Called when no pump needs the lease any more, though one may not have ended.
        started: Called when a pump is started.
        failed: Called with the error of a pump that has failed.
        ended: Called after a pump has ended, whatever the reason.
    """

    stolen: Callable[[OwnedPartition], None]
    lost: Callable[[OwnedPartition, str], None]
    unused: Callable[[OwnedPartition], None]
    started: Callable[[PartitionPump], None]
    failed: Callable[[OwnedPartition, PartitionPump, Exception], None]
    ended: Callable[[OwnedPartition, PartitionPump], Awaitable[None]]


class OwnedPartition:
    """Runs the pumps of one partition, while the manager takes, renews and releases its lease.

    Args:
        subscriptions: The subscriptions that have a processor here.

    Attributes:
        lease: The lease; None if it is not held. Set by the manager.
        pumps: By subscription. A pump stays here until it has ended, even if the lease is lost meanwhile.
        shared: The receive link, of the lease that its pumps were started with.
        stolen: How another reader took the link, until it is known whether the lease is lost, too.
        dispute: Decides whether to attach again if it is not.
        expiry: The timer of the lease. Set by the manager, as are the next two.
        is_renewing: Whether a renewal is under way.
        is_taking: Whether the lease is being acquired or stolen.
        avoid_until: When the lease may be taken again.
    """

    def __init__(
        self,
        services: HostServices,
        partition_id: str,
        group: BeginningRecord,
        subscriptions: Subscriptions,
        silence: SilenceWatch,
        tasks: TaskSet,
        calls: OwnerCalls,
    ) -> None:
        self._services = services
        self._group = group
        self._subscriptions = subscriptions
        self._silence = silence
        self._tasks = tasks
        self._calls = calls
        self._failed_until: dict[str, float] = {}
        # Both for as long as the lease is held. A suspended one held the others back.
        self._paused: set[str] = set()
        self._suspended: dict[str, PartitionStatus] = {}
        # Pumps that were suspended and have not ended yet: their subscription may be resumed meanwhile.
        self._suspending: set[PartitionPump] = set()
        # What was reported last of a subscription.
        self._link_states: dict[str, LinkState] = {}
        self.partition_id = partition_id
        self.lease: PartitionLease | None = None
        self.pumps: dict[str, PartitionPump] = {}
        self.shared: SharedPartition | None = None
        self.stolen: ConsumerDisconnectedError | None = None
        self.dispute = LinkDispute(services.store.lease_duration)
        # Whether the pumps end in order to be started again over a new link.
        self._is_reopening = False
        self.expiry: asyncio.TimerHandle | None = None
        self.is_renewing = False
        self.is_taking = False
        self.avoid_until = -math.inf

    @property
    def is_in_use(self) -> bool:
        """Whether a pump needs the lease: one that runs, or that ends and is not overdue."""
        return any(not pump.is_overdue for pump in self.pumps.values())

    @property
    def statuses(self) -> list[PartitionStatus]:
        """The status of each pump, and of each subscription that is suspended."""
        buffered_bytes = self._buffered_bytes
        suspended = [
            replace(each, buffered_bytes=buffered_bytes)
            for name, each in self._suspended.items()
            if name not in self.pumps
        ]
        return [self._status(pump) for pump in self.pumps.values()] + suspended

    def _status(self, pump: PartitionPump) -> PartitionStatus:
        busy_since, in_hand = pump.busy or (None, None)
        return PartitionStatus(
            self.partition_id,
            pump.subscription,
            None if self.lease is None else self.lease.epoch,
            pump.state,
            pump.last_sequence_number,
            pump.context.lag,
            pump.is_attached,
            pump.held_events,
            pump.pressure,
            LinkState.SUSPENDED if pump.subscription in self._suspended else pump.link_state,
            pump.checkpoint,
            self._buffered_bytes,
            busy_since,
            in_hand,
        )

    def describe(self, renewal_in: float | None) -> list[PartitionDescription]:
        """Return what each subscription does on the partition; None for a renewal not planned, or under way."""
        found = []
        for status in self.statuses:
            pump = self.pumps.get(status.subscription)
            kind, text = (WaitsFor.RESUME, "a call of resume") if pump is None else pump.waits_for
            expires_in = None if self.lease is None else self.lease.expires_at - self._services.clock.monotonic()
            found.append(PartitionDescription(status, kind, text, expires_in, renewal_in, self.is_renewing))
        return found

    @property
    def _buffered_bytes(self) -> int:
        return 0 if self.shared is None else self.shared.buffered_bytes

    def is_barred(self, now: float) -> bool:
        """Return whether it must not be started here now; above all while an old pump of it has not ended."""
        return bool(self.pumps) or self.is_taking or now < self.avoid_until

    def running(self, name: str) -> PartitionPump | None:
        """Return the pump of a subscription; None if there is none, it ends, or the lease is not held."""
        pump = self.pumps.get(name)
        return None if self.lease is None or pump is None or pump.is_ending else pump

    def lease_gone(self) -> None:
        """Record that the lease is not held any more."""
        self.lease = None
        self.stolen = None
        self._is_reopening = False
        self._paused.clear()
        self._suspended.clear()
        self._link_states.clear()
        if self.expiry is not None:
            self.expiry.cancel()
            self.expiry = None

    # -------------------------------------------------------------------------------------------------- pumps

    def start_pumps(self, lease: PartitionLease) -> None:
        """Start a pump for each subscription that has none here, and whose last one did not fail just now."""
        if self._is_reopening and self.pumps:
            return
        self._is_reopening = False
        now = self._services.clock.monotonic()
        due = [
            each
            for each in self._subscriptions.runnable
            if each.name not in self.pumps
            and each.name not in self._suspended
            and now >= self._failed_until.get(each.name, -math.inf)
        ]
        if not self.pumps:
            self.shared = self._share(lease)
        assert self.shared is not None
        for subscription in due:
            self.shared.expect(subscription.name)
        for subscription in due:
            self._start_pump(self.shared, lease, subscription)

    def reopen(self) -> None:
        """End the pumps in order, with the lease kept. They are started again, over a new link, when all have ended."""
        self.stolen = None
        self._is_reopening = True
        for pump in self.pumps.values():
            pump.stop(CloseReason.SHUTDOWN)

    def _share(self, lease: PartitionLease) -> SharedPartition:
        services, settings = self._services, self._services.settings
        feeds = FeedMaker(
            services.transport,
            ReceiveLinkSpec(
                hub=services.scope.hub,
                consumer_group=services.scope.consumer_group,
                partition_id=lease.partition_id,
                position=EventPosition.earliest(),
                owner_level=lease.owner_level,
                receiver_name=services.owner_id,
                track_last_enqueued=settings.track_last_enqueued,
                max_message_size=settings.max_message_size,
                delivery_interval=settings.delivery_interval,
            ),
            settings,
            scope=services.scope,
            rng=services.rng,
            hub=self._group.hub,
            budget=services.budget,
        )
        return SharedPartition(feeds, on_closed=self._silence.forget, on_unexpected=self._unexpected)

    def _start_pump(self, shared: SharedPartition, lease: PartitionLease, subscription: Subscription) -> None:
        name = subscription.name

        def stolen(error: ConsumerDisconnectedError) -> None:
            if self._is_running(pump) and self.lease is not None:
                self.stolen = error
                self._calls.stolen(self)

        pump = self.pumps[name] = PartitionPump(
            self._services,
            lease,
            subscription,
            shared,
            silence=self._silence,
            on_stolen=stolen,
            on_lost=lambda why: self._lost_by(pump, why),
            on_overdue=lambda: self._overdue(pump),
            on_suspended=lambda: self._suspend(pump),
            on_link_changed=lambda: self._link_changed(pump),
        )
        if name in self._paused:
            pump.pause(is_paused=True)
        self._calls.started(pump)
        task = self._tasks.spawn(self._run_pump(pump), f"eventpump pump of partition {pump.key}")
        task.add_done_callback(lambda _: self._pump_ended(pump))

    def stop_unwanted(self, wanted: dict[str, Subscription]) -> None:
        """Stop the pumps whose subscription was ended or recreated: it is not among those wanted here."""
        # A subscription that is ended and recreated is neither paused nor suspended.
        self._paused &= wanted.keys()
        for name in self._suspended.keys() - wanted.keys():
            del self._suspended[name]
            if name not in self.pumps:
                self._set_link_state(name, LinkState.ENDED)
        for pump in list(self.pumps.values()):
            if not pump.is_of(wanted.get(pump.subscription)):
                self._set_link_state(pump.subscription, LinkState.ENDED)
                pump.stop(CloseReason.SHUTDOWN)

    def _is_running(self, pump: PartitionPump) -> bool:
        return self.pumps.get(pump.subscription) is pump

    def avoid(self, pump: PartitionPump) -> float:
        """Leave a subscription's partition alone for a while, all of it if no other pump is left;
        return the seconds."""
        avoided_for = self._services.store.lease_duration
        until = self._failed_until[pump.subscription] = self._services.clock.monotonic() + avoided_for
        if not self.is_in_use:
            self.avoid_until = until
        return avoided_for

    async def _run_pump(self, pump: PartitionPump) -> None:
        escaped: BaseException | None = None
        was_suspended = False
        try:
            await pump.run()
        except (KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except BaseException as error:
            if pump.is_abandoned:
                raise
            escaped = error
        finally:
            was_suspended = pump in self._suspending
            self._suspending.discard(pump)
            # Only now may it be started here again.
            if self._is_running(pump):
                del self.pumps[pump.subscription]
                if pump.subscription in self._suspended:
                    self._suspended[pump.subscription] = replace(self._status(pump), lag=None, is_attached=False)
                elif self._link_states.get(pump.subscription) not in _KEPT:
                    self._link_states.pop(pump.subscription, None)
        if escaped is not None:
            self._pump_broke(pump, escaped)
        elif pump.failure is not None:
            self._calls.failed(self, pump, pump.failure)
        elif (
            not was_suspended
            and not self._is_reopening
            and self.lease is not None
            and any(pump.is_of(each) for each in self._subscriptions.runnable)
        ):
            # Its subscription was ended, which the next listing shows.
            self._failed_until[pump.subscription] = self._services.clock.monotonic() + self._services.renew_interval
        if not self.pumps and self.shared is not None:
            await self.shared.aclose()
        await self._calls.ended(self, pump)

    def _pump_broke(self, pump: PartitionPump, error: BaseException) -> None:
        """Report an end of a pump that never should be, and leave the partition to others for a while."""
        task = asyncio.current_task()
        while task is not None and task.cancelling():
            # The cancellation ended the pump; the lease is still to be released.
            task.uncancel()
        self.avoid(pump)
        self._report(UnexpectedFailure, pump.subscription, "the pump", error)

    def _pump_ended(self, pump: PartitionPump) -> None:
        if self._is_running(pump):
            # Cancelled before its first step, by code that cancels whatever task it finds.
            del self.pumps[pump.subscription]
            self.avoid(pump)
            if not self.is_in_use:
                self._calls.unused(self)

    def _overdue(self, pump: PartitionPump) -> None:
        """Let others have a partition of which no processor returns. It was reported."""
        if self._is_running(pump) and self.lease is not None and not self.is_in_use:
            self._calls.unused(self)

    def _lost_by(self, pump: PartitionPump, why: str) -> None:
        if self._is_running(pump) and self.lease is not None:
            self._calls.lost(self, why)
        else:
            pump.ownership_lost()

    # ----------------------------------------------------------------------------------- pause and suspension

    def _suspend(self, pump: PartitionPump) -> None:
        """Stop a subscription that holds the others of a partition back, until `resume`."""
        self._suspended[pump.subscription] = self._status(pump)
        self._suspending.add(pump)
        self._set_link_state(pump.subscription, LinkState.SUSPENDED)
        pump.stop(CloseReason.SHUTDOWN)

    def pause(self, name: str) -> bool:
        """Deliver no more to a subscription. Return whether it is run here."""
        pump = self.running(name)
        if pump is not None and name not in self._paused:
            self._paused.add(name)
            pump.pause(is_paused=True)
            self._link_changed(pump)
        return pump is not None

    def resume(self, name: str) -> bool:
        """Deliver to a subscription again. Return whether it was paused or suspended."""
        is_paused, is_suspended = name in self._paused, name in self._suspended
        self._suspended.pop(name, None)
        self._paused.discard(name)
        if is_paused and (pump := self.pumps.get(name)) is not None:
            pump.pause(is_paused=False)
            self._link_changed(pump)
        return is_paused or is_suspended

    # -------------------------------------------------------------------------------------------------- reports

    def _link_changed(self, pump: PartitionPump) -> None:
        if self._is_running(pump):
            self._set_link_state(pump.subscription, pump.link_state)

    def _set_link_state(self, name: str, state: LinkState) -> None:
        """Record what a subscription reads over, and report it if it has changed."""
        before = self._link_states.get(name, LinkState.OPENING)
        if state is before or state is LinkState.OPENING:
            # Until the link is open it has nothing else to read over: that is reported then.
            return
        self._link_states[name] = state
        if before is not LinkState.OPENING or state is not LinkState.SHARED:
            # The usual begin is reported as `PumpStarted`.
            self._report(LinkStateChanged, name, before, state)

    def _report(self, kind: Callable[..., HostReport], name: str, *facts: object) -> None:
        self._services.reporter.report(kind(self._services.owner_id, self.partition_id, *facts, subscription=name))

    def _unexpected(self, operation: str, error: BaseException) -> None:
        self._services.reporter.report(UnexpectedFailure(self._services.owner_id, None, operation, error))
