"""The leases of a host: renews them, takes those of its fair share, and runs a pump for each."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

from eventpump.aio.retry import retrying
from eventpump.aio.tasks import StoppedError, TaskSet, gather, wait_for_event
from eventpump.cancellation import is_failure
from eventpump.consumer.checkpoints import store_error
from eventpump.consumer.opening import GroupStart
from eventpump.consumer.processor import ProcessorSource
from eventpump.consumer.pump import PartitionPump, PumpSurroundings
from eventpump.consumer.sharing import SharedPartition
from eventpump.consumer.silence import SilenceWatch
from eventpump.consumer.subscriptions import Subscription, SubscriptionRecords, Subscriptions
from eventpump.core.backoff import UNLIMITED, Backoff
from eventpump.core.balancer import first_step, plan_leases
from eventpump.core.checkpoint import DEFAULT_SUBSCRIPTION
from eventpump.core.lease import LeaseSnapshot, PartitionLease
from eventpump.core.pump_state import CloseReason, PumpState
from eventpump.core.rewind import end_of_range
from eventpump.core.schedule import Schedule
from eventpump.core.startup import HostStart
from eventpump.errors import (
    ConfigurationError,
    ConsumerDisconnectedError,
    EventPumpError,
    OwnershipLostError,
    ProcessorFailedError,
    ServiceError,
    ServiceTimeoutError,
    StoreError,
)
from eventpump.eventhubs.events import Checkpoint, EventPosition
from eventpump.eventhubs.partitions import partition_order
from eventpump.interfaces import PartitionProperties, ReceiveLinkSpec
from eventpump.options.consumer import SubscriptionSettings
from eventpump.reports import (
    HostReport,
    LeaseLost,
    LeaseReleased,
    LeaseTaken,
    LoopBlocked,
    OutsideReader,
    PartitionFailed,
    PartitionsFound,
    ServiceFailed,
    StartIgnored,
    StoreFailed,
    SubscriptionPaused,
    UnexpectedFailure,
)

_T = TypeVar("_T")

JITTER = 0.2
"""The part of an interval by which it is shortened at random, so that hosts started together drift apart."""

FIRST_JITTER = 0.5
"""The same for the first renewal of a lease, so that leases taken together are not always renewed together."""

FIRST_STEP = 0.25
"""The part of an interval that a joining host waits after its first lease, for hosts that join at the same time."""

RELEASE_TIME = 1.0
"""Seconds that a release may always take, even if the time to close has run out."""

_ASKED_AT_ONCE = 16

LEAST_START_TIME = 1.0
"""Seconds that an attempt at the start may always take, even if the time to start has run out."""


@dataclass(slots=True, eq=False)
class _Slot:
    """The state of one partition in the manager."""

    partition_id: str
    lease: PartitionLease | None = None
    pumps: dict[str, PartitionPump] = field(default_factory=dict)
    """By subscription. A pump stays here until it has ended, even if the lease is lost meanwhile."""
    expiry: asyncio.TimerHandle | None = None
    is_renewing: bool = False
    is_taking: bool = False
    stolen: ConsumerDisconnectedError | None = None
    shared: SharedPartition | None = None
    """The receive link, of the lease that its pumps were started with."""
    avoid_until: float = -math.inf
    failed_until: dict[str, float] = field(default_factory=dict)
    """The subscriptions whose pump failed, and when it may be started again."""
    paused: set[str] = field(default_factory=set)
    """The subscriptions that are paused, for as long as the lease is held."""
    suspended: set[str] = field(default_factory=set)
    """The subscriptions that held the others back, and are not run until that is asked for."""

    @property
    def is_in_use(self) -> bool:
        """Whether a pump needs the lease: one that runs, or that ends and is not overdue."""
        return any(not pump.is_overdue for pump in self.pumps.values())


@dataclass(frozen=True, slots=True)
class PartitionStatus:
    """The status of a partition on a host.

    Args:
        partition_id: The partition.
        subscription: The subscription whose processor runs.
        epoch: The epoch of the lease; None if the lease is gone and the pump has not ended yet.
        state: The state of the pump.
        last_sequence_number: The sequence number of the last event delivered.
        lag: See `PartitionContext.lag`; None if it is not known.
        is_attached: Whether its link is attached now.
        held_events: Events received that only this subscription has not read yet: what it holds back from the others
            that share its link.
        has_own_link: Whether it reads over a link of its own, in its `catch_up_group`.
        is_paused: Whether it is paused.
    """

    partition_id: str
    subscription: str
    epoch: int | None
    state: PumpState
    last_sequence_number: int | None
    lag: int | None
    is_attached: bool
    held_events: int
    has_own_link: bool
    is_paused: bool


@dataclass(slots=True)
class _Outcome:
    """Whether and why the manager ends."""

    wake: asyncio.Event = field(default_factory=asyncio.Event)
    is_stopping: bool = False
    failure: EventPumpError | None = None


class PartitionManager:
    """Runs the partitions of one host until `stop` is called or the host fails.

    Each lease is renewed at a time of its own, in a task of its own. Every interval starts two more operations that do
    not wait for each other: listing all leases and taking those of this host's share, again in a task each; and looking
    for new partitions of the hub. So a call that hangs or fails delays no other, and nothing here waits for user code.
    The store (`BoundedLeaseStore`) bounds the number of its calls that are under way.

    Args:
        around: What all pumps of the host share.
        renew_interval: Seconds between renewals.
    """

    def __init__(self, around: PumpSurroundings, source: ProcessorSource | None, *, renew_interval: float) -> None:
        self._around = around
        self._settings = around.settings
        self._store = around.store
        self._clock = around.clock
        self._group = GroupStart(around.store, around.directory, around.settings, store_timeout=around.store_timeout)
        records = SubscriptionRecords(
            around.store, around.directory, self._group.hub, self._settings.hub, store_timeout=around.store_timeout
        )
        self._subscriptions = Subscriptions(records, self._settings, around.owner_id, self._report)
        self._has_default = source is not None
        if source is not None:
            self._subscriptions.set_default(Subscription(DEFAULT_SUBSCRIPTION, self._settings, source, self._group))
        self._renew_interval = renew_interval
        self._slots: dict[str, _Slot] = {}
        self._known: set[str] = set()
        self._chores = TaskSet(self._unexpected)
        self._renewals = TaskSet(self._unexpected)
        self._renewals_due = Schedule()
        self._renewal_timer: asyncio.TimerHandle | None = None
        self._renews = True
        self._takings = TaskSet(self._unexpected)
        self._pumps = TaskSet(self._unexpected)
        self._silence = SilenceWatch(
            around.directory, self._settings.hub, self._settings.max_wait_time, self._unexpected
        )
        self._end = _Outcome()
        self._close_by = math.inf
        self._hurry = asyncio.Event()
        self._is_listing = False
        self._is_listing_subscriptions = False
        self._is_running_partitions = False
        self._is_discovering = False
        self._start_of_host = HostStart(math.inf)
        self._withheld: list[PartitionFailed] = []

    @property
    def statuses(self) -> list[PartitionStatus]:
        """The partitions that this host runs, in no particular order."""
        return [
            PartitionStatus(
                slot.partition_id,
                pump.subscription,
                None if slot.lease is None else slot.lease.epoch,
                pump.state,
                None if (last := pump.context.last_delivered) is None else last.sequence_number,
                pump.context.lag,
                pump.is_attached,
                pump.held_events,
                pump.has_own_link,
                pump.is_paused,
            )
            for slot in self._slots.values()
            for pump in slot.pumps.values()
        ]

    async def run(self) -> None:
        """Run until `stop` is called, then close in order.

        Raises:
            EventPumpError: The service or the store could not be used from the start, or the processor failed and the
                failure policy is "stop". Everything is closed by then.
        """
        try:
            await self._start()
            self._is_running_partitions = True
            while not self._is_ending:
                self._judge_start()
                self._chores.spawn(self._discover_once(), "eventpump discovery")
                self._chores.spawn(self._balance_once(), "eventpump balancing")
                self._chores.spawn(self._list_subscriptions_once(), "eventpump listing of subscriptions")
                await self._sleep(self._renew_interval * (1 - JITTER * self._around.rng.random()))
        except EventPumpError as error:
            self._fail(error)
        finally:
            await self._close()
        if self._end.failure is not None:
            raise self._end.failure

    def stop(self, within: float) -> None:
        """End `run`. A later call can only shorten the time.

        Args:
            within: Seconds that closing may take.
        """
        self._close_by = min(self._close_by, self._clock.monotonic() + within)
        self._end.is_stopping = True
        self._end.wake.set()
        self._hurry.set()
        for pump in self._all_pumps():
            pump.stop(CloseReason.SHUTDOWN, within)

    @property
    def remaining(self) -> float:
        """The seconds left for closing; infinite before `stop`."""
        return self._close_by - self._clock.monotonic()

    def _all_pumps(self) -> list[PartitionPump]:
        return [pump for slot in self._slots.values() for pump in slot.pumps.values()]

    @property
    def _is_ending(self) -> bool:
        return self._end.is_stopping or self._end.failure is not None

    def _fail(self, error: EventPumpError) -> None:
        if self._end.failure is None:
            self._end.failure = error
        self._end.wake.set()

    # ------------------------------------------------------------------------------------------------ beginning

    async def _start(self) -> None:
        """Open the store and find the partitions. Failures that may be transient are reported and retried."""
        until = self._clock.monotonic() + self._settings.startup_timeout
        self._start_of_host = HostStart(until)
        await self._at_start("open the lease store", lambda: self._store.open(self._around.scope), until)
        hub = self._settings.hub
        properties = await self._at_start(
            f"reading the properties of hub {hub}",
            lambda: self._around.directory.get_hub_properties(hub),
            until,
            is_read=True,
        )
        if properties is not None:
            ids = properties.partition_ids
            unknown = self._settings.positions_without_partition(ids)
            if unknown:
                raise ConfigurationError("initial_position", f"the hub has no partition {unknown[0]}")
            # Before the leases: a group that has leases has a record, whenever a host dies.
            record = None
            if self._has_default:
                record = await self._at_start(
                    "agree on the consumer group's record", lambda: self._group.agree(properties), until
                )
                if record is None:
                    return
            await self._at_start("list subscriptions", self._subscriptions.refresh, until)
            if record is not None and record.starts != self._group.starts and not self._settings.has_relative_start:
                self._report(StartIgnored(self._around.owner_id, None, record.starts, self._group.starts))
            if await self._at_start("ensure leases", lambda: self._ensure(ids), until):
                self._found(ids)

    async def _ensure(self, partition_ids: tuple[str, ...]) -> bool:
        """Create the leases. False if some could not be created: the others are used, and discovery tries again."""
        try:
            await self._store.ensure_leases(partition_ids)
        except StoreError as error:
            if error.partition_id is None or not await self._store.list_leases():
                raise
            self._report(StoreFailed(self._around.owner_id, error.partition_id, "ensure leases", error))
            return False
        return True

    async def _at_start(
        self, operation: str, call: Callable[[], Awaitable[_T]], until: float, *, is_read: bool = False
    ) -> _T | None:
        """Run an operation that the start depends on, and return its result; None if the manager ended first.

        Args:
            operation: The name of the operation, for reports and errors.
            call: Starts it.
            until: The time, by the clock, after which no attempt begins.
            is_read: Whether it is a call of the service, and not of the store.

        Raises:
            EventPumpError: The error of the last attempt: no retry can help, or the time is over.
        """
        if self._is_ending:
            return None

        async def attempt() -> _T:
            try:
                return await call()
            except BaseException as error:
                if not is_failure(error) or isinstance(error, EventPumpError):
                    raise
                raise self._own_error(operation, error, is_read) from error

        def report(failure: Exception, _: float) -> None:
            kind = ServiceFailed if is_read else StoreFailed
            self._report(kind(self._around.owner_id, None, operation, failure))

        attempts = retrying(
            attempt,
            UNLIMITED,
            self._around.rng,
            until=asyncio.get_running_loop().time() + until - self._clock.monotonic(),
            least_time=LEAST_START_TIME,
            on_retry=report,
        )
        try:
            return await self._chores.unless(self._end.wake, attempts, f"eventpump start: {operation}")
        except StoppedError:
            return None
        except TimeoutError as error:
            raise self._own_error(operation, error, is_read) from error

    def _own_error(self, operation: str, error: BaseException, is_read: bool) -> EventPumpError:
        """Return the error for what a call raised at the start."""
        if is_read and not isinstance(error, EventPumpError):
            return ServiceTimeoutError(f"{operation}: no answer ({type(error).__name__})")
        return store_error(error, operation, None, self._settings.startup_timeout)

    # --------------------------------------------------------------------------------------------- the interval

    async def _sleep(self, delay: float, *, measured: bool = True) -> None:
        """Wait for a time, or until the manager ends. Reports a standstill of the loop longer than an interval."""
        # By the loop's own time: a machine that was suspended has not blocked it.
        loop = asyncio.get_running_loop()
        due = loop.time() + delay
        seen = self._around.reporter.count(LoopBlocked)
        await wait_for_event(self._end.wake, delay)
        late = loop.time() - due
        if measured and late > self._around.blocked_after and self._around.reporter.count(LoopBlocked) == seen:
            self._report(LoopBlocked(self._around.owner_id, None, late, None))

    async def _discover_once(self) -> None:
        """Find new partitions, and a hub that was recreated, unless the last attempt has not ended."""
        if self._is_discovering:
            return
        self._is_discovering = True
        try:
            try:
                properties = await self._around.directory.get_hub_properties(self._settings.hub)
            except EventPumpError as error:
                operation = f"reading the properties of hub {self._settings.hub}"
                self._report(ServiceFailed(self._around.owner_id, None, operation, error))
                return
            for pump in self._all_pumps():
                pump.hub_found(properties.created_at)
            new = tuple(each for each in properties.partition_ids if each not in self._known)
            if not new:
                return
            timeout = self._around.store_timeout
            if await self._stored("ensure leases", None, self._store.ensure_leases(new), timeout) is not _FAILED:
                self._found(new)
                self._chores.spawn(self._balance_once(), "eventpump balancing")
        finally:
            self._is_discovering = False

    def _found(self, partition_ids: tuple[str, ...]) -> None:
        self._known.update(partition_ids)
        self._report(PartitionsFound(self._around.owner_id, None, partition_ids))

    async def _balance_once(self) -> None:
        """List the leases, plan, and start to take the planned ones, unless the last listing has not ended."""
        if self._is_listing or not self._subscriptions.runnable:
            return
        self._is_listing = True
        try:
            snapshots = await self._stored("list leases", None, self._store.list_leases())
        finally:
            self._is_listing = False
        if isinstance(snapshots, _Failed) or self._is_ending:
            return
        now = self._clock.monotonic()
        host = self._around.owner_id
        taking = [slot.partition_id for slot in self._slots.values() if slot.is_taking]
        plan = plan_leases(
            snapshots,
            host=host,
            held=[slot.partition_id for slot in self._slots.values() if slot.lease is not None],
            rng=self._around.rng,
            taking=taking,
            avoid=[slot.partition_id for slot in self._slots.values() if self._is_barred(slot, now)],
        )
        step = first_step(plan, snapshots, host=host, taking=taking)
        plan = plan if step is None else step
        tries = [self._take(partition_id, None) for partition_id in plan.acquire]
        tries += [self._take(snapshot.partition_id, snapshot) for snapshot in plan.steal]
        begun = [task for task in tries if task is not None]
        if plan.spare:
            task = self._takings.spawn(self._take_spare(plan.spare, begun), "eventpump taking of a spare lease")
            begun = [*begun, task]
        if step is not None and begun:
            self._chores.spawn(self._balance_after(begun), "eventpump balancing")

    async def _balance_after(self, tries: Collection[asyncio.Task[None]]) -> None:
        """Take the rest of a joining host's share, soon after its first lease."""
        await asyncio.wait(tries)
        await self._sleep(self._renew_interval * FIRST_STEP * (1 - JITTER * self._around.rng.random()), measured=False)
        if not self._is_ending:
            await self._balance_once()

    async def _take_spare(self, spare: Sequence[LeaseSnapshot], tries: Collection[asyncio.Task[None]]) -> None:
        """Take one lease if every other attempt failed: the other hosts do not see a host without leases."""
        if tries:
            await asyncio.wait(tries)
        for snapshot in spare:
            if self._is_ending or any(slot.lease is not None for slot in self._slots.values()):
                return
            task = self._take(snapshot.partition_id, snapshot)
            if task is not None:
                await asyncio.wait((task,))

    def _is_barred(self, slot: _Slot, now: float) -> bool:
        """Return whether a partition must not be started here now; above all while an old pump of it has not ended."""
        return bool(slot.pumps) or slot.is_taking or now < slot.avoid_until

    # ------------------------------------------------------------------------------------------ subscriptions

    async def subscribe(self, settings: SubscriptionSettings, source: ProcessorSource) -> None:
        """Make a subscription, or adopt one, and start its pumps on the partitions owned; see `PartitionHost`."""
        await self._store.open(self._around.scope)
        await self._subscriptions.subscribe(settings, source)
        self._run_subscriptions()
        if self._is_running_partitions and not any(slot.lease is not None for slot in self._slots.values()):
            self._chores.spawn(self._balance_once(), "eventpump balancing")

    async def unsubscribe(self, name: str, *, keep_checkpoint: bool) -> None:
        """End a subscription, and its pumps here; see `PartitionHost`."""
        await self._store.open(self._around.scope)
        await self._subscriptions.unsubscribe(name, keep_checkpoint=keep_checkpoint)
        self._run_subscriptions()

    async def _list_subscriptions_once(self) -> None:
        """Find out which subscriptions there are, unless the last listing has not ended."""
        if self._is_listing_subscriptions:
            return
        self._is_listing_subscriptions = True
        try:
            if await self._stored("list subscriptions", None, self._subscriptions.refresh()) is not _FAILED:
                self._run_subscriptions()
        finally:
            self._is_listing_subscriptions = False

    def _run_subscriptions(self) -> None:
        """Start the pumps that are missing, and stop those whose subscription was ended or made anew."""
        if self._is_ending or not self._is_running_partitions:
            return
        wanted = {each.name: each for each in self._subscriptions.runnable}
        for slot in self._slots.values():
            # One that is ended is not paused, nor suspended, when it is made again.
            slot.paused &= wanted.keys()
            slot.suspended &= wanted.keys()
            for pump in list(slot.pumps.values()):
                if not pump.is_of(wanted.get(pump.subscription)):
                    pump.stop(CloseReason.SHUTDOWN)
            if slot.pumps:
                self._start_missing(slot)

    def _start_missing(self, slot: _Slot) -> None:
        """Start the pumps that a partition has none of, if it is to be kept."""
        is_kept = slot.stolen is None and self._clock.monotonic() >= slot.avoid_until and not self._is_ending
        if slot.lease is not None and is_kept:
            self._start_pumps(slot, slot.lease)
            if not slot.is_renewing and self._renewals_due.due_at(slot.partition_id) is None:
                # A renewal that was due while there was no pump has ended without another.
                self._renew_later(slot, slot.lease)

    # ------------------------------------------------------------------------------------------------- leases

    def _take(self, partition_id: str, snapshot: LeaseSnapshot | None) -> asyncio.Task[None] | None:
        slot = self._slots.setdefault(partition_id, _Slot(partition_id))
        if slot.lease is not None or self._is_barred(slot, self._clock.monotonic()):
            return None
        slot.is_taking = True
        task = self._takings.spawn(self._take_one(slot, snapshot), f"eventpump taking of partition {partition_id}")
        task.add_done_callback(lambda _: self._taken(slot))
        return task

    @staticmethod
    def _taken(slot: _Slot) -> None:
        # Not in a `finally` of the task: one that is cancelled before its first step does not run it.
        slot.is_taking = False

    async def _take_one(self, slot: _Slot, snapshot: LeaseSnapshot | None) -> None:
        owner = self._around.owner_id
        if snapshot is None:
            call = self._store.acquire_lease(slot.partition_id, owner)
        else:
            call = self._store.steal_lease(snapshot, owner)
        lease = await self._stored("acquire" if snapshot is None else "steal", slot.partition_id, call)
        if lease is None or isinstance(lease, _Failed):
            return
        self._own(slot, lease)
        self._renew_later(slot, lease, FIRST_JITTER)
        if self._is_ending:
            await self._release(slot)
            return
        source = None if snapshot is None else snapshot.owner
        self._report(LeaseTaken(owner, slot.partition_id, lease.epoch, source))
        self._start_pumps(slot, lease)
        if not slot.pumps:
            slot.avoid_until = self._clock.monotonic() + self._store.lease_duration
            await self._release(slot)

    def _own(self, slot: _Slot, lease: PartitionLease) -> None:
        """Record a lease that was taken or renewed, and when it expires."""
        slot.lease = lease
        due_at = lease.expires_at - self._store.lease_duration + self._renew_interval
        self._around.turns.lease_held(slot.partition_id, due_at)
        if slot.expiry is not None:
            slot.expiry.cancel()
        delay = max(0.0, lease.expires_at - self._clock.monotonic())
        slot.expiry = asyncio.get_running_loop().call_later(delay, self._expired, slot)

    def _expired(self, slot: _Slot) -> None:
        slot.expiry = None
        if slot.lease is None:
            return
        if self._clock.monotonic() < slot.lease.expires_at:
            self._own(slot, slot.lease)
        else:
            self._lost(slot, "it was not renewed in time")

    def _lost(self, slot: _Slot, why: str) -> None:
        if slot.lease is None:
            return
        self._report(LeaseLost(self._around.owner_id, slot.partition_id, slot.lease.epoch, why))
        self._forget(slot)
        for pump in list(slot.pumps.values()):
            pump.ownership_lost()

    def _forget(self, slot: _Slot) -> None:
        slot.lease = None
        slot.stolen = None
        slot.paused.clear()
        slot.suspended.clear()
        self._renewals_due.remove(slot.partition_id)
        self._around.turns.lease_gone(slot.partition_id)
        if slot.expiry is not None:
            slot.expiry.cancel()
            slot.expiry = None

    def _renew_later(self, slot: _Slot, lease: PartitionLease, jitter: float = JITTER) -> None:
        """Schedule a renewal one interval after the last request, shortened at random."""
        asked = lease.expires_at - self._store.lease_duration
        wait = self._renew_interval * (1 - jitter * self._around.rng.random())
        self._renewals_due.set(slot.partition_id, asked + wait)
        self._set_renewal_timer()

    def _set_renewal_timer(self) -> None:
        if self._renewal_timer is not None:
            self._renewal_timer.cancel()
            self._renewal_timer = None
        first = self._renewals_due.first
        if first is not None and self._renews:
            delay = max(0.0, first - self._clock.monotonic())
            self._renewal_timer = asyncio.get_running_loop().call_later(delay, self._renew_due)

    def _renew_due(self) -> None:
        self._renewal_timer = None
        for partition_id in self._renewals_due.take(self._clock.monotonic()):
            self._renew(self._slots[partition_id])
        self._set_renewal_timer()

    def _renew_no_more(self) -> None:
        self._renews = False
        self._set_renewal_timer()

    def _renew(self, slot: _Slot) -> None:
        if not slot.is_renewing:
            slot.is_renewing = True
            task = self._renewals.spawn(self._renew_one(slot), f"eventpump renewal of partition {slot.partition_id}")
            task.add_done_callback(lambda _: self._renewal_ended(slot))

    def _renewal_ended(self, slot: _Slot) -> None:
        slot.is_renewing = False
        lease = slot.lease if slot.pumps else None
        if lease is not None and self._renewals_due.due_at(slot.partition_id) is None:
            # It was taken again meanwhile, and became due while the renewal of the lease before was under way.
            self._renew_later(slot, lease)

    async def _renew_one(self, slot: _Slot) -> None:
        """Renew a lease; retried while that fails and the lease has not expired."""
        # Not `retrying`: what to do next depends after each attempt, and after each delay, on what has happened to the
        # lease meanwhile, and a renewal that succeeds may have to be repeated as well.
        backoff = Backoff(self._around.store_timeout / 16, self._around.store_timeout / 4)
        # A lease without a pump is never kept, however the pump ended.
        while (lease := slot.lease) is not None and slot.pumps:
            if self._clock.monotonic() >= lease.expires_at:
                # Maybe before its timer, because timers stand still while the machine is suspended.
                self._lost(slot, "it was not renewed in time")
                return
            stolen = slot.stolen
            renewed = await self._stored("renew", slot.partition_id, self._store.renew_lease(lease))
            if slot.lease is not lease:
                return
            if isinstance(renewed, _Failed):
                await asyncio.sleep(backoff.next(self._around.rng))
                continue
            if renewed is None:
                self._lost(slot, "another host took it" if slot.stolen is None else "the link was stolen with it")
                return
            self._own(slot, renewed)
            self._renew_later(slot, renewed)
            for pump in slot.pumps.values():
                pump.renewed(renewed)
            if slot.stolen is None:
                return
            if slot.stolen is stolen:
                self._leave_to_outsider(slot, stolen)
                return
            # The link was stolen during the renewal: the answer may be older than that. Renew again.

    def _leave_to_outsider(self, slot: _Slot, error: ConsumerDisconnectedError) -> None:
        """Leave a partition whose lease this host holds, but whose link a reader without a lease has taken."""
        avoided_for = self._store.lease_duration
        slot.stolen = None
        slot.avoid_until = self._clock.monotonic() + avoided_for
        self._report(OutsideReader(self._around.owner_id, slot.partition_id, avoided_for, error))
        for pump in slot.pumps.values():
            pump.stop(CloseReason.OWNERSHIP_LOST)

    async def _release(self, slot: _Slot) -> None:
        lease = slot.lease
        if lease is None:
            return
        self._forget(slot)
        if self._clock.monotonic() >= lease.expires_at:
            return
        # Only while the host closes is there a limit to the time that a release waits for its turn.
        remaining = self._close_by - self._clock.monotonic()
        timeout = None if remaining == math.inf else max(RELEASE_TIME, remaining)
        if await self._stored("release", slot.partition_id, self._store.release_lease(lease), timeout) is True:
            self._report(LeaseReleased(self._around.owner_id, slot.partition_id, lease.epoch))

    # -------------------------------------------------------------------------------------------------- pumps

    def _start_pumps(self, slot: _Slot, lease: PartitionLease) -> None:
        """Start a pump for each subscription that has none here, and whose last one did not fail just now."""
        now = self._clock.monotonic()
        due = [
            each
            for each in self._subscriptions.runnable
            if each.name not in slot.pumps
            and each.name not in slot.suspended
            and now >= slot.failed_until.get(each.name, -math.inf)
        ]
        if not slot.pumps:
            slot.shared = self._share(lease)
        assert slot.shared is not None
        for subscription in due:
            slot.shared.expect(subscription.name)
        for subscription in due:
            self._start_pump(slot, slot.shared, lease, subscription)

    def _share(self, lease: PartitionLease) -> SharedPartition:
        around, settings = self._around, self._settings
        return SharedPartition(
            around.transport,
            ReceiveLinkSpec(
                hub=around.scope.hub,
                consumer_group=around.scope.consumer_group,
                partition_id=lease.partition_id,
                position=EventPosition.earliest(),
                owner_level=lease.epoch,
                receiver_name=around.owner_id,
                track_last_enqueued=settings.track_last_enqueued,
                max_message_size=settings.max_message_size,
            ),
            settings,
            scope=around.scope,
            rng=around.rng,
            hub=self._group.hub,
            on_closed=self._silence.forget,
            on_unexpected=self._unexpected,
        )

    def _start_pump(
        self, slot: _Slot, shared: SharedPartition, lease: PartitionLease, subscription: Subscription
    ) -> None:
        name = subscription.name

        def stolen(error: ConsumerDisconnectedError) -> None:
            if slot.pumps.get(name) is pump and slot.lease is not None:
                slot.stolen = error
                self._renew(slot)

        pump = slot.pumps[name] = PartitionPump(
            self._around,
            lease,
            subscription,
            shared,
            silence=self._silence,
            on_stolen=stolen,
            on_lost=lambda why: self._lost_by(slot, pump, why),
            on_overdue=lambda: self._overdue(slot, pump),
            on_suspended=lambda: self._suspend(slot, pump),
        )
        if name in slot.paused:
            pump.pause(is_paused=True)
        self._start_of_host.tried(pump.key)
        task = self._pumps.spawn(self._run_pump(slot, pump), f"eventpump pump of partition {pump.key}")
        task.add_done_callback(lambda _: self._pump_ended(slot, pump))

    def _is_running(self, slot: _Slot, pump: PartitionPump) -> bool:
        return slot.pumps.get(pump.subscription) is pump

    def _pump_ended(self, slot: _Slot, pump: PartitionPump) -> None:
        if self._is_running(slot, pump):
            # Cancelled before its first step, by code that cancels whatever task it finds.
            del slot.pumps[pump.subscription]
            self._avoid(slot, pump)
            if not slot.is_in_use:
                self._takings.spawn(self._release(slot), f"eventpump release of partition {slot.partition_id}")

    def _avoid(self, slot: _Slot, pump: PartitionPump) -> float:
        """Leave a subscription's partition alone for a while, and the partition where no other pump is left.

        Returns:
            For how long, in seconds.
        """
        avoided_for = self._store.lease_duration
        until = slot.failed_until[pump.subscription] = self._clock.monotonic() + avoided_for
        if not slot.is_in_use:
            slot.avoid_until = until
        return avoided_for

    def _lost_by(self, slot: _Slot, pump: PartitionPump, why: str) -> None:
        if self._is_running(slot, pump) and slot.lease is not None:
            self._lost(slot, why)
        else:
            pump.ownership_lost()

    async def _run_pump(self, slot: _Slot, pump: PartitionPump) -> None:
        escaped: BaseException | None = None
        try:
            await pump.run()
        except (KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except BaseException as error:
            if pump.is_abandoned:
                raise
            escaped = error
        finally:
            # Only now may it be started here again.
            if self._is_running(slot, pump):
                del slot.pumps[pump.subscription]
        if escaped is not None:
            self._pump_broke(slot, pump, escaped)
        elif pump.failure is not None:
            self._pump_failed(slot, pump, pump.failure)
        elif slot.lease is not None and any(pump.is_of(each) for each in self._subscriptions.runnable):
            # Its subscription was ended, which the next listing shows.
            slot.failed_until[pump.subscription] = self._clock.monotonic() + self._renew_interval
        if not slot.pumps and slot.shared is not None:
            await slot.shared.aclose()
        self._attempt_ended(pump)
        self._start_missing(slot)
        if not slot.is_in_use:
            await self._release(slot)

    def _attempt_ended(self, pump: PartitionPump) -> None:
        """Record the end of an attempt, and end the host if no attempt is left that could succeed."""
        if pump.was_attached:
            self._start_of_host.linked()
        self._start_of_host.ended(pump.key)
        self._judge_start()

    def _judge_start(self) -> None:
        """End the host because of the refusals at its start, or report them, once that is decided."""
        now, start = self._clock.monotonic(), self._start_of_host
        if any(pump.was_attached for pump in self._all_pumps()):
            start.linked()
        error = start.verdict(now)
        if isinstance(error, EventPumpError) and not self._end.is_stopping:
            self._fail(error)
            self._withheld.clear()
        elif self._is_ending or not start.is_open(now):
            withheld, self._withheld = self._withheld, []
            for report in withheld:
                self._report(report)

    def _pump_broke(self, slot: _Slot, pump: PartitionPump, error: BaseException) -> None:
        """Report an end of a pump that never should be, and leave the partition to others for a while."""
        task = asyncio.current_task()
        while task is not None and task.cancelling():
            # The cancellation ended the pump; the lease is still to be released.
            task.uncancel()
        self._avoid(slot, pump)
        self._report(
            UnexpectedFailure(
                self._around.owner_id, slot.partition_id, "the pump", error, subscription=pump.subscription
            )
        )

    def _pump_failed(self, slot: _Slot, pump: PartitionPump, error: Exception) -> None:
        if isinstance(error, ConfigurationError) or (isinstance(error, ProcessorFailedError) and error.stops_host):
            self._fail(error)
            return
        if isinstance(error, ServiceError):
            self._start_of_host.refused(pump.key, error)
        avoided_for = self._avoid(slot, pump)
        # The error that ends a host is raised by `run`, and not reported once per partition as well.
        self._withheld.append(
            PartitionFailed(
                self._around.owner_id, slot.partition_id, avoided_for, error, subscription=pump.subscription
            )
        )

    def _suspend(self, slot: _Slot, pump: PartitionPump) -> None:
        """Stop a subscription that holds the others of a partition back, until `resume`."""
        slot.suspended.add(pump.subscription)
        pump.stop(CloseReason.SHUTDOWN)

    # ------------------------------------------------------------------------------------------- seek and replay

    async def seek(self, name: str, position: EventPosition, partition_ids: Collection[str] | None) -> tuple[str, ...]:
        """Let a subscription go on at a position; see `PartitionHost`."""
        places = await self._find(await self._running(name, partition_ids), position)
        return await _those_done([(pump, pump.seek(place)) for pump, place in places])

    async def replay(
        self, name: str, begin: EventPosition, end: EventPosition, partition_ids: Collection[str] | None
    ) -> tuple[str, ...]:
        """Deliver a range again; see `PartitionHost`."""
        pumps = await self._running(name, partition_ids)
        begins = await self._find(pumps, begin)
        ends = dict(await self._find([pump for pump, _ in begins], end_of_range(end)))
        ranges = [(pump, after, ends[pump].sequence_number) for pump, after in begins if pump in ends]
        replays = [(pump, after, last) for pump, after, last in ranges if last > after.sequence_number]
        return await _those_done([(pump, pump.replay(after, last)) for pump, after, last in replays])

    async def drain(self, name: str) -> tuple[str, ...]:
        """Wait until a subscription has processed what there is now; see `PartitionHost`."""

        async def facts(pump: PartitionPump) -> tuple[PartitionPump, PartitionProperties]:
            directory, hub = self._around.directory, self._settings.hub
            return pump, await directory.get_partition_properties(hub, pump.partition_id)

        found = await gather((facts(pump) for pump in await self._running(name, None)), at_once=_ASKED_AT_ONCE)
        return await _those_done([(pump, pump.drain(properties)) for pump, properties in found])

    def pause(self, name: str) -> tuple[str, ...]:
        """Deliver no more to a subscription on the partitions owned; see `PartitionHost`."""
        self._check_name(name)
        paused = []
        for slot in self._slots.values():
            pump = slot.pumps.get(name)
            if slot.lease is not None and pump is not None and not pump.is_ending:
                if name not in slot.paused:
                    slot.paused.add(name)
                    pump.pause(is_paused=True)
                    self._report_pause(pump)
                paused.append(slot.partition_id)
        return _in_order(paused)

    def resume(self, name: str) -> tuple[str, ...]:
        """Deliver to a subscription again where it is paused or suspended; see `PartitionHost`."""
        self._check_name(name)
        resumed = []
        for slot in self._slots.values():
            if name in slot.paused or name in slot.suspended:
                resumed.append(slot.partition_id)
            slot.suspended.discard(name)
            if name in slot.paused:
                slot.paused.discard(name)
                if (pump := slot.pumps.get(name)) is not None:
                    pump.pause(is_paused=False)
                    self._report_pause(pump)
        self._run_subscriptions()
        return _in_order(resumed)

    def _report_pause(self, pump: PartitionPump) -> None:
        owner = self._around.owner_id
        self._report(SubscriptionPaused(owner, pump.partition_id, pump.is_paused, subscription=pump.subscription))

    def _check_name(self, name: str) -> None:
        """Raise `ConfigurationError` if this host has no processor for a subscription."""
        if not any(each.name == name for each in self._subscriptions.runnable):
            raise ConfigurationError("name", f"this host has no processor for a subscription {name}: subscribe first")

    async def _running(self, name: str, partition_ids: Collection[str] | None) -> list[PartitionPump]:
        """Return the pumps of a subscription, on some partitions or all of those owned."""
        self._check_name(name)
        if isinstance(partition_ids, str):
            raise ConfigurationError("partition_ids", "must be several partition ids, and is one text")
        if partition_ids is not None:
            known = (await self._group.hub()).partition_ids
            unknown = sorted(set(partition_ids) - set(known))
            if unknown:
                raise ConfigurationError("partition_ids", f"the hub has no partition {unknown[0]}")
        return [
            pump
            for slot in self._slots.values()
            if slot.lease is not None and (partition_ids is None or slot.partition_id in partition_ids)
            if (pump := slot.pumps.get(name)) is not None and not pump.is_ending
        ]

    async def _find(
        self, pumps: Collection[PartitionPump], position: EventPosition
    ) -> list[tuple[PartitionPump, Checkpoint]]:
        """Find a position in the partitions of some pumps. Those whose partition is given up meanwhile are left out."""

        async def place_of(pump: PartitionPump) -> tuple[PartitionPump, Checkpoint] | None:
            try:
                return pump, await pump.place_of(position)
            except OwnershipLostError:
                return None

        found = await gather((place_of(pump) for pump in pumps), at_once=_ASKED_AT_ONCE)
        return [each for each in found if each is not None]

    def _overdue(self, slot: _Slot, pump: PartitionPump) -> None:
        """Let others have a partition of which no processor returns. It was reported."""
        if self._is_running(slot, pump) and slot.lease is not None and not slot.is_in_use:
            self._takings.spawn(self._release(slot), f"eventpump release of partition {slot.partition_id}")

    # ------------------------------------------------------------------------------------------------- closing

    async def _close(self) -> None:
        """Stop every pump and release every lease, within the time to close."""
        if self._close_by == math.inf:
            self._close_by = self._clock.monotonic() + self._settings.close_timeout
        self._store.take_no_more()
        for pump in self._all_pumps():
            pump.stop(CloseReason.SHUTDOWN, max(0.0, self._close_by - self._clock.monotonic()))
        await self._chores.cancel(RELEASE_TIME)
        await self._silence.aclose()
        await self._wait_for_pumps()
        self._renew_no_more()
        await self._renewals.cancel(RELEASE_TIME)
        for slot in self._slots.values():
            if slot.lease is not None:
                self._takings.spawn(self._release(slot), f"eventpump release of partition {slot.partition_id}")
        await self._takings.wait(max(RELEASE_TIME, self._close_by - self._clock.monotonic()))
        await self._takings.cancel(RELEASE_TIME)
        for pump in self._all_pumps():
            pump.abandon()
        await self._pumps.cancel(RELEASE_TIME)
        self._judge_start()
        for slot in self._slots.values():
            self._forget(slot)

    async def _wait_for_pumps(self) -> None:
        """Wait until the pumps have ended or the time is over, which a second call of `stop` can shorten."""
        # Renewals continue meanwhile, so that a slow handler does not lose its lease.
        while len(self._pumps) and (remaining := self._close_by + RELEASE_TIME - self._clock.monotonic()) > 0:
            self._hurry.clear()
            with suppress(StoppedError):
                await self._chores.unless(self._hurry, self._pumps.wait(remaining), "eventpump closing")
        await self._chores.wait(RELEASE_TIME)

    # ------------------------------------------------------------------------------------------------- helpers

    async def _stored(
        self, operation: str, partition_id: str | None, call: Awaitable[_T], timeout: float | None = None
    ) -> _T | _Failed:
        """Call the store. A failure is reported and returned, not raised.

        Args:
            operation: The name of the operation, for reports.
            partition_id: The partition, if there is one.
            call: The call.
            timeout: Seconds for the call and its wait for a turn; None for only the store's own time-out per call.
        """
        try:
            async with asyncio.timeout(timeout):
                return await call
        except BaseException as error:
            if not is_failure(error):
                raise
            failure = store_error(error, operation, partition_id, timeout or self._around.store_timeout)
            self._report(StoreFailed(self._around.owner_id, partition_id, operation, failure))
            return _FAILED

    def _unexpected(self, operation: str, error: BaseException) -> None:
        self._report(UnexpectedFailure(self._around.owner_id, None, operation, error))

    def _report(self, report: HostReport) -> None:
        self._around.reporter.report(report)


async def _those_done(asked: Sequence[tuple[PartitionPump, asyncio.Future[bool]]]) -> tuple[str, ...]:
    """Wait for what was asked of pumps. Return the partitions where it was done, in order."""
    for _, done in asked:
        await done
    return _in_order([pump.partition_id for pump, done in asked if done.result()])


def _in_order(partition_ids: Collection[str]) -> tuple[str, ...]:
    return tuple(sorted(partition_ids, key=partition_order))


class _Failed:
    """The result of a call of the store that failed, and was reported."""


_FAILED = _Failed()
