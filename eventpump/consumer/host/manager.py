"""The leases of a host: renews them, takes and releases them as its balancer plans, and runs a pump for each."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

from eventpump.aio.tasks import StoppedError, TaskSet, wait_for_event
from eventpump.cancellation import is_failure
from eventpump.consumer.bounds.limits import BoundedLeaseStore
from eventpump.consumer.host.commands import drain_all, in_order, replay_all, seek_all
from eventpump.consumer.host.owned import OwnedPartition, OwnerCalls
from eventpump.consumer.host.planning import LeasePlanner
from eventpump.consumer.host.renewals import RenewalTimes
from eventpump.consumer.host.startup import HostOpening, StartProgress
from eventpump.consumer.host.unserved import UnservedSubscriptions
from eventpump.consumer.lease.services import HostServices
from eventpump.consumer.link.silence import SilenceWatch
from eventpump.consumer.processor import ProcessorSource
from eventpump.consumer.pump.pump import PartitionPump
from eventpump.consumer.record.checkpoints import store_error
from eventpump.consumer.record.starts import GroupStart
from eventpump.consumer.record.subscriptions import Subscription, SubscriptionRecords, Subscriptions
from eventpump.core.backoff import Backoff
from eventpump.core.checkpoint import DEFAULT_SUBSCRIPTION
from eventpump.core.lease import LeaseSnapshot, PartitionLease
from eventpump.core.pump_state import CloseReason
from eventpump.core.startup import HostStart
from eventpump.errors import (
    ConfigurationError,
    ConsumerDisconnectedError,
    EventPumpError,
    ProcessorFailedError,
    ServiceError,
)
from eventpump.eventhubs.events import EventPosition
from eventpump.interfaces import ConsumerScope
from eventpump.options.consumer import SubscriptionSettings
from eventpump.reports import (
    HostReport,
    LeaseLost,
    LeaseReleased,
    LeaseTaken,
    LinkFailed,
    LoopBlocked,
    OutsideReader,
    PartitionDescription,
    PartitionFailed,
    PartitionsFound,
    PartitionStatus,
    ServiceFailed,
    StoreFailed,
    StoreRestored,
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


@dataclass(slots=True)
class _End:
    """Whether, why and by when the manager ends.

    Attributes:
        wake: Set when the end begins.
        hurry: Set when it has to be over earlier than before.
        close_by: When closing has to be over, by the host's clock.
    """

    wake: asyncio.Event = field(default_factory=asyncio.Event)
    hurry: asyncio.Event = field(default_factory=asyncio.Event)
    is_stopping: bool = False
    failure: EventPumpError | None = None
    close_by: float = math.inf


class PartitionManager:
    """Runs the partitions of one host until `stop` is called or the host fails.

    Each lease is renewed at a time of its own, in a task of its own. Every interval starts two more operations that do
    not wait for each other: listing all leases and taking those that the balancer plans, again in a task each; and
    looking for new partitions of the hub. So a call that hangs or fails delays no other, and nothing here waits for
    user code, except for the balancer's plan.
    The store (`BoundedLeaseStore`) bounds the number of its calls that are under way.
    """

    def __init__(self, services: HostServices, source: ProcessorSource | None, *, renew_interval: float) -> None:
        self._services = services
        self._settings = services.settings
        self._store = services.store
        self._clock = services.clock
        self._group = GroupStart(
            services.store,
            services.group,
            services.directory,
            services.settings,
            store_timeout=services.store_timeout,
        )
        records = SubscriptionRecords(
            services.group,
            services.directory,
            self._group.hub,
            self._settings.hub,
            store_timeout=services.store_timeout,
        )
        self._subscriptions = Subscriptions(records, self._settings, services.owner_id, self._report)
        self._unserved = UnservedSubscriptions(services, self._subscriptions)
        self._has_default = source is not None
        if source is not None:
            self._subscriptions.set_default(Subscription(DEFAULT_SUBSCRIPTION, self._settings, source, self._group))
        self._renew_interval = renew_interval
        self._planner = LeasePlanner(self._settings.balancer, services.owner_id, services.rng, services.reporter)
        self._partitions: dict[str, OwnedPartition] = {}
        self._known: set[str] = set()
        self._chores = TaskSet(self._unexpected)
        self._renewals = TaskSet(self._unexpected)
        self._renewals_due = RenewalTimes(self._clock, lambda due: self._renew(self._partitions[due]))
        # When calls of the store began to fail that have not succeeded since, by operation and partition.
        self._store_troubles: dict[tuple[str, str | None], float] = {}
        self._takings = TaskSet(self._unexpected)
        self._pumps = TaskSet(self._unexpected)
        self._silence = SilenceWatch(
            services.directory, self._settings.hub, self._settings.max_wait_time, self._unexpected
        )
        self._end = _End()
        # Operations of which one begins in each interval, and that are not begun while the last one runs.
        self._under_way: set[str] = set()
        self._is_running_partitions = False
        self._start_of_host = HostStart(math.inf)
        self._progress = StartProgress()
        self._withheld: list[PartitionFailed] = []

    @property
    def leases(self) -> BoundedLeaseStore:
        """The lease store."""
        return self._store

    @property
    def waits_for(self) -> str | None:
        """What the host waits for before it is ready, in words; None if it is."""
        return "its end: it is closing" if self._is_ending else self._progress.waits_for

    @property
    def scope(self) -> ConsumerScope:
        """What the host reads."""
        return self._services.scope

    @property
    def statuses(self) -> list[PartitionStatus]:
        """The partitions that this host runs, in no particular order."""
        return [status for partition in self._partitions.values() for status in partition.statuses]

    @property
    def descriptions(self) -> list[PartitionDescription]:
        """What this host does on each partition, in no particular order."""
        now = self._clock.monotonic()
        found = []
        for partition in self._partitions.values():
            due_at = self._renewals_due.due_at(partition.partition_id)
            found += partition.describe(None if due_at is None else due_at - now)
        return found

    async def run(self) -> None:
        """Run until `stop` is called, then close in order.

        Raises:
            EventPumpError: The service or the store could not be used from the start, or the processor failed and the
                failure policy is "stop". Everything is closed by then.
        """
        try:
            until = self._clock.monotonic() + self._settings.startup_timeout
            self._start_of_host = HostStart(until)
            group = self._group if self._has_default else None
            opening = HostOpening(
                self._services, group, self._subscriptions, self._chores, self._end.wake, self._progress
            )
            if found := await opening.run(until):
                self._found(found)
            self._progress.step = self._progress.failure = None
            self._is_running_partitions = True
            while not self._is_ending:
                self._judge_start()
                self._chores.spawn(self._discover_once(), "eventpump discovery")
                self._chores.spawn(self._balance_once(), "eventpump balancing")
                self._chores.spawn(self._list_subscriptions_once(), "eventpump listing of subscriptions")
                await self._sleep(self._renew_interval * (1 - JITTER * self._services.rng.random()))
        except EventPumpError as error:
            self._fail(error)
        finally:
            await self._close()
        if self._end.failure is not None:
            raise self._end.failure

    def stop(self, within: float) -> None:
        """End `run` within so many seconds. A later call can only shorten the time."""
        self._end.close_by = min(self._end.close_by, self._clock.monotonic() + within)
        self._end.is_stopping = True
        self._end.wake.set()
        self._end.hurry.set()
        for pump in self._all_pumps():
            pump.stop(CloseReason.SHUTDOWN, within)

    @property
    def remaining(self) -> float:
        """The seconds left for closing; infinite before `stop`."""
        return self._end.close_by - self._clock.monotonic()

    def _all_pumps(self) -> list[PartitionPump]:
        return [pump for partition in self._partitions.values() for pump in partition.pumps.values()]

    @property
    def _owned(self) -> list[OwnedPartition]:
        return [partition for partition in self._partitions.values() if partition.lease is not None]

    @property
    def _is_ending(self) -> bool:
        return self._end.is_stopping or self._end.failure is not None

    def _fail(self, error: EventPumpError) -> None:
        if self._end.failure is None:
            self._end.failure = error
        self._end.wake.set()

    # --------------------------------------------------------------------------------------------- the interval

    async def _sleep(self, delay: float, *, measured: bool = True) -> None:
        """Wait for a time, or until the manager ends. Reports a standstill of the loop longer than an interval."""
        # By the loop's own time: a machine that was suspended has not blocked it.
        loop = asyncio.get_running_loop()
        due = loop.time() + delay
        seen = self._services.reporter.count(LoopBlocked)
        await wait_for_event(self._end.wake, delay)
        late = loop.time() - due
        if measured and late > self._services.blocked_after and self._services.reporter.count(LoopBlocked) == seen:
            self._report(LoopBlocked(self._services.owner_id, None, late, None))

    async def _discover_once(self) -> None:
        """Find new partitions, and a hub that was recreated, unless the last attempt has not ended."""
        if "discovery" in self._under_way:
            return
        self._under_way.add("discovery")
        try:
            try:
                properties = await self._services.directory.get_hub_properties(self._settings.hub)
            except EventPumpError as error:
                operation = f"reading the properties of hub {self._settings.hub}"
                self._report(ServiceFailed(self._services.owner_id, None, operation, error))
                return
            for pump in self._all_pumps():
                pump.hub_found(properties.created_at)
            new = tuple(each for each in properties.partition_ids if each not in self._known)
            if not new:
                return
            timeout = self._services.store_timeout
            if await self._stored("ensure leases", None, self._store.ensure(new), timeout) is not _FAILED:
                self._found(new)
                self._chores.spawn(self._balance_once(), "eventpump balancing")
        finally:
            self._under_way.discard("discovery")

    def _found(self, partition_ids: tuple[str, ...]) -> None:
        self._known.update(partition_ids)
        self._report(PartitionsFound(self._services.owner_id, None, partition_ids))

    async def _balance_once(self) -> None:
        """List the leases, plan, and start to take the planned ones, unless the last listing has not ended."""
        if not self._subscriptions.runnable:
            self._progress.has_round = True  # there is nothing to lease
            return
        if "listing" in self._under_way:
            return
        self._under_way.add("listing")
        try:
            snapshots = await self._stored("list leases", None, self._store.list())
        finally:
            self._under_way.discard("listing")
        if isinstance(snapshots, _Failed) or self._is_ending:
            return
        now = self._clock.monotonic()
        partitions = self._partitions.values()
        try:
            plan = self._planner.plan(
                snapshots,
                now,
                known=self._known,
                held=[partition.partition_id for partition in self._owned],
                taking=[partition.partition_id for partition in partitions if partition.is_taking],
                avoid=[partition.partition_id for partition in partitions if partition.is_barred(now)],
            )
        except ConfigurationError as error:
            self._fail(error)
            return
        for partition_id in plan.release:
            self._give_up(self._partitions[partition_id])
        listed = {snapshot.partition_id: snapshot for snapshot in snapshots}
        tries = [self._take(listed[partition_id]) for partition_id in plan.acquire]
        tries += [self._take(snapshot, held=True) for snapshot in plan.steal]
        begun = [task for task in tries if task is not None]
        if plan.spare:
            task = self._takings.spawn(self._take_spare(plan.spare, begun), "eventpump taking of a spare lease")
            begun = [*begun, task]
        if plan.again and begun:
            self._chores.spawn(self._balance_after(begun), "eventpump balancing")
        if not self._progress.has_round:
            if begun:
                await asyncio.wait(begun)
            self._progress.has_round = True

    async def _balance_after(self, tries: Collection[asyncio.Task[None]]) -> None:
        """Plan again soon: a joining host takes the rest of its share after its first lease."""
        await asyncio.wait(tries)
        await self._sleep(
            self._renew_interval * FIRST_STEP * (1 - JITTER * self._services.rng.random()), measured=False
        )
        if not self._is_ending:
            await self._balance_once()

    async def _take_spare(self, spare: Sequence[LeaseSnapshot], tries: Collection[asyncio.Task[None]]) -> None:
        """Take one lease if every other attempt failed: the other hosts do not see a host without leases."""
        if tries:
            await asyncio.wait(tries)
        for snapshot in spare:
            if self._is_ending or self._owned:
                return
            task = self._take(snapshot, held=True)
            if task is not None:
                await asyncio.wait((task,))

    # ------------------------------------------------------------------------------------------ subscriptions

    async def subscribe(self, settings: SubscriptionSettings, source: ProcessorSource) -> None:
        """Make a subscription, or adopt one, and start its pumps on the partitions owned; see `HubHost`."""
        await self._store.open(self._services.scope)
        await self._subscriptions.subscribe(settings, source)
        self._run_subscriptions()
        if self._is_running_partitions and not self._owned:
            self._chores.spawn(self._balance_once(), "eventpump balancing")

    async def unsubscribe(self, name: str, *, keep_checkpoint: bool) -> None:
        """End a subscription, and its pumps here; see `HubHost`."""
        await self._store.open(self._services.scope)
        await self._subscriptions.unsubscribe(name, keep_checkpoint=keep_checkpoint)
        self._run_subscriptions()

    async def _list_subscriptions_once(self) -> None:
        """Find out which subscriptions there are, if that is due and the last listing has ended."""
        if "subscriptions" in self._under_way:
            return
        if not self._unserved.is_listing_due([partition.partition_id for partition in self._owned]):
            return
        self._under_way.add("subscriptions")
        try:
            if await self._stored("list subscriptions", None, self._subscriptions.refresh()) is not _FAILED:
                self._run_subscriptions()
                await self._unserved.report([partition.partition_id for partition in self._owned])
        finally:
            self._under_way.discard("subscriptions")

    def _run_subscriptions(self) -> None:
        """Start the pumps that are missing, and stop those whose subscription was ended or recreated."""
        if self._is_ending or not self._is_running_partitions:
            return
        wanted = {each.name: each for each in self._subscriptions.runnable}
        for partition in self._partitions.values():
            partition.stop_unwanted(wanted)
            if partition.pumps:
                self._start_missing(partition)

    def _start_missing(self, partition: OwnedPartition) -> None:
        """Start the pumps that a partition has none of, if it is to be kept."""
        is_kept = partition.stolen is None and self._clock.monotonic() >= partition.avoid_until and not self._is_ending
        if partition.lease is not None and is_kept:
            partition.start_pumps(partition.lease)
            if not partition.is_renewing and self._renewals_due.due_at(partition.partition_id) is None:
                # A renewal that was due while there was no pump has ended without another.
                self._renew_later(partition, partition.lease)

    # ------------------------------------------------------------------------------------------------- leases

    def _take(self, snapshot: LeaseSnapshot, *, held: bool = False) -> asyncio.Task[None] | None:
        partition_id = snapshot.partition_id
        partition = self._partitions.get(partition_id) or self._add(partition_id)
        if partition.lease is not None or partition.is_barred(self._clock.monotonic()):
            return None
        partition.is_taking = True
        task = self._takings.spawn(
            self._take_one(partition, snapshot, held=held), f"eventpump taking of partition {partition_id}"
        )
        task.add_done_callback(lambda _: self._taken(partition))
        return task

    def _add(self, partition_id: str) -> OwnedPartition:
        partition = self._partitions[partition_id] = OwnedPartition(
            self._services,
            partition_id,
            self._group,
            self._subscriptions,
            self._silence,
            self._pumps,
            OwnerCalls(
                stolen=self._renew,
                lost=self._lost,
                unused=self._release_later,
                started=lambda pump: self._start_of_host.tried(pump.key),
                failed=self._pump_failed,
                ended=self._pump_ended,
            ),
        )
        return partition

    @staticmethod
    def _taken(partition: OwnedPartition) -> None:
        # Not in a `finally` of the task: one that is cancelled before its first step does not run it.
        partition.is_taking = False

    async def _take_one(self, partition: OwnedPartition, snapshot: LeaseSnapshot, *, held: bool) -> None:
        owner = self._services.owner_id
        call = self._store.acquire(snapshot, owner, held=held)
        lease = await self._stored("steal" if held else "acquire", partition.partition_id, call)
        if lease is None or isinstance(lease, _Failed):
            return
        self._own(partition, lease)
        self._renew_later(partition, lease, FIRST_JITTER)
        if self._is_ending:
            await self._release(partition)
            return
        source = snapshot.owner if held else None
        self._report(LeaseTaken(owner, partition.partition_id, lease.epoch, source))
        partition.start_pumps(lease)
        if not partition.pumps:
            partition.avoid_until = self._clock.monotonic() + self._store.lease_duration
            await self._release(partition)

    def _own(self, partition: OwnedPartition, lease: PartitionLease) -> None:
        """Record a lease that was taken or renewed, and when it expires."""
        partition.lease = lease
        due_at = lease.expires_at - self._store.lease_duration + self._renew_interval
        self._services.loop_gate.lease_held(partition.partition_id, due_at)
        if partition.expiry is not None:
            partition.expiry.cancel()
        delay = max(0.0, lease.expires_at - self._clock.monotonic())
        partition.expiry = asyncio.get_running_loop().call_later(delay, self._expired, partition)

    def _expired(self, partition: OwnedPartition) -> None:
        partition.expiry = None
        if partition.lease is None:
            return
        if self._clock.monotonic() < partition.lease.expires_at:
            self._own(partition, partition.lease)
        else:
            self._lost(partition, "it was not renewed in time")

    def _lost(self, partition: OwnedPartition, why: str) -> None:
        if partition.lease is None:
            return
        self._report(LeaseLost(self._services.owner_id, partition.partition_id, partition.lease.epoch, why))
        self._forget(partition)
        for pump in list(partition.pumps.values()):
            pump.ownership_lost()

    def _forget(self, partition: OwnedPartition) -> None:
        partition.lease_gone()
        self._services.group.forget_claims(partition.partition_id)
        self._renewals_due.remove(partition.partition_id)
        self._services.loop_gate.lease_gone(partition.partition_id)

    def _renew_later(self, partition: OwnedPartition, lease: PartitionLease, jitter: float = JITTER) -> None:
        """Schedule a renewal one interval after the last request, shortened at random."""
        asked = lease.expires_at - self._store.lease_duration
        wait = self._renew_interval * (1 - jitter * self._services.rng.random())
        self._renewals_due.set(partition.partition_id, asked + wait)

    def _renew(self, partition: OwnedPartition) -> None:
        if not partition.is_renewing:
            partition.is_renewing = True
            name = f"eventpump renewal of partition {partition.partition_id}"
            task = self._renewals.spawn(self._renew_one(partition), name)
            task.add_done_callback(lambda _: self._renewal_ended(partition))

    def _renewal_ended(self, partition: OwnedPartition) -> None:
        partition.is_renewing = False
        lease = partition.lease if partition.pumps else None
        if lease is not None and self._renewals_due.due_at(partition.partition_id) is None:
            # It was taken again meanwhile, and became due while the renewal of the lease before was under way.
            self._renew_later(partition, lease)

    async def _renew_one(self, partition: OwnedPartition) -> None:
        """Renew a lease; retried while that fails and the lease has not expired."""
        # Not `retrying`: what to do next depends after each attempt, and after each delay, on what has happened to the
        # lease meanwhile, and a renewal that succeeds may have to be repeated as well.
        backoff = Backoff(self._services.store_timeout / 16, self._services.store_timeout / 4)
        # A lease without a pump is never kept, however the pump ended.
        while (lease := partition.lease) is not None and partition.pumps:
            if self._clock.monotonic() >= lease.expires_at:
                # Maybe before its timer, because timers stand still while the machine is suspended.
                self._lost(partition, "it was not renewed in time")
                return
            stolen = partition.stolen
            renewed = await self._stored("renew", partition.partition_id, self._store.renew(lease))
            if partition.lease is not lease:
                return
            if isinstance(renewed, _Failed):
                await asyncio.sleep(backoff.next(self._services.rng))
                continue
            if renewed is None:
                is_stolen = partition.stolen is not None
                self._lost(partition, "the link was stolen with it" if is_stolen else "another host took it")
                return
            self._own(partition, renewed)
            self._renew_later(partition, renewed)
            for pump in partition.pumps.values():
                pump.renewed(renewed)
            if partition.stolen is None:
                return
            if partition.stolen is stolen:
                self._settle_dispute(partition, renewed, stolen)
                return
            # The link was stolen during the renewal: the answer may be older than that. Renew again.

    def _settle_dispute(
        self, partition: OwnedPartition, lease: PartitionLease, error: ConsumerDisconnectedError
    ) -> None:
        """Attach again where another reader took the link, and not the lease, by an equal owner level; or leave it."""
        if partition.dispute.attaches_again(self._clock.monotonic(), lease.owner_level):
            self._report(LinkFailed(self._services.owner_id, partition.partition_id, error, 0.0))
            partition.reopen()
        else:
            self._leave_to_outsider(partition, error)

    def _leave_to_outsider(self, partition: OwnedPartition, error: ConsumerDisconnectedError) -> None:
        """Leave a partition whose lease this host holds, but whose link a reader without a lease has taken."""
        avoided_for = self._store.lease_duration
        partition.stolen = None
        partition.avoid_until = self._clock.monotonic() + avoided_for
        self._report(OutsideReader(self._services.owner_id, partition.partition_id, avoided_for, error))
        for pump in partition.pumps.values():
            pump.stop(CloseReason.OWNERSHIP_LOST)

    def _give_up(self, partition: OwnedPartition) -> None:
        """End the pumps of a partition in order, which releases its lease."""
        partition.avoid_until = self._clock.monotonic() + self._store.lease_duration
        for pump in partition.pumps.values():
            pump.stop(CloseReason.SHUTDOWN)

    def _release_later(self, partition: OwnedPartition) -> None:
        self._takings.spawn(self._release(partition), f"eventpump release of partition {partition.partition_id}")

    async def _release(self, partition: OwnedPartition) -> None:
        lease = partition.lease
        if lease is None:
            return
        self._forget(partition)
        if self._clock.monotonic() >= lease.expires_at:
            return
        # Only while the host closes is there a limit to the time that a release waits for its turn.
        remaining = self._end.close_by - self._clock.monotonic()
        timeout = None if remaining == math.inf else max(RELEASE_TIME, remaining)
        if await self._stored("release", partition.partition_id, self._store.release(lease), timeout) is True:
            self._report(LeaseReleased(self._services.owner_id, partition.partition_id, lease.epoch))

    # -------------------------------------------------------------------------------------------------- pumps

    async def _pump_ended(self, partition: OwnedPartition, pump: PartitionPump) -> None:
        """Start what is missing, or release the lease; end the host if no attempt is left that could succeed."""
        if pump.was_attached:
            self._start_of_host.linked()
        self._start_of_host.ended(pump.key)
        self._judge_start()
        self._start_missing(partition)
        if not partition.is_in_use:
            await self._release(partition)

    def _judge_start(self) -> None:
        """End the host because of the refusals at its start, or report them, once that is decided."""
        now, start = self._clock.monotonic(), self._start_of_host
        # Not a list of all: this is called when any of them ends.
        if any(pump.was_attached for partition in self._partitions.values() for pump in partition.pumps.values()):
            start.linked()
        error = start.verdict(now)
        if isinstance(error, EventPumpError) and not self._end.is_stopping:
            self._fail(error)
            self._withheld.clear()
        elif self._is_ending or not start.is_open(now):
            withheld, self._withheld = self._withheld, []
            for report in withheld:
                self._report(report)

    def _pump_failed(self, partition: OwnedPartition, pump: PartitionPump, error: Exception) -> None:
        if isinstance(error, ConfigurationError) or (isinstance(error, ProcessorFailedError) and error.stops_host):
            self._fail(error)
            return
        if isinstance(error, ServiceError):
            self._start_of_host.refused(pump.key, error)
        avoided_for = partition.avoid(pump)
        # The error that ends a host is raised by `run`, and not reported once per partition as well.
        self._withheld.append(
            PartitionFailed(
                self._services.owner_id, partition.partition_id, avoided_for, error, subscription=pump.subscription
            )
        )

    # --------------------------------------------------------------------------------------------- seek and replay

    async def seek(self, name: str, position: EventPosition, partition_ids: Collection[str] | None) -> tuple[str, ...]:
        """Let a subscription go on at a position; see `HubHost`."""
        return await seek_all(await self._running("seek", name, partition_ids), position)

    async def replay(
        self, name: str, begin: EventPosition, end: EventPosition, partition_ids: Collection[str] | None
    ) -> tuple[str, ...]:
        """Deliver a range again; see `HubHost`."""
        return await replay_all(await self._running("replay", name, partition_ids), begin, end)

    async def drain(self, name: str) -> tuple[str, ...]:
        """Wait until a subscription has processed what there is now; see `HubHost`."""
        pumps = await self._running("drain", name, None)
        return await drain_all(pumps, self._services.directory, self._settings.hub)

    def pause(self, name: str) -> tuple[str, ...]:
        """Deliver no more to a subscription on the partitions owned; see `HubHost`."""
        self._check_name(name)
        return in_order([each.partition_id for each in self._partitions.values() if each.pause(name)])

    def resume(self, name: str) -> tuple[str, ...]:
        """Deliver to a subscription again where it is paused or suspended; see `HubHost`."""
        self._check_name(name)
        resumed = [each.partition_id for each in self._partitions.values() if each.resume(name)]
        self._run_subscriptions()
        return in_order(resumed)

    def _check_name(self, name: str) -> None:
        """Raise `ConfigurationError` if this host has no processor for a subscription."""
        if not any(each.name == name for each in self._subscriptions.runnable):
            raise ConfigurationError("name", f"this host has no processor for a subscription {name}: subscribe first")

    async def _running(self, operation: str, name: str, partition_ids: Collection[str] | None) -> list[PartitionPump]:
        """Return the pumps of a subscription, on some partitions or all of those owned.

        Raises:
            ConfigurationError: One of them waits for the code that calls this, or for what has started that code.
        """
        self._check_name(name)
        if isinstance(partition_ids, str):
            raise ConfigurationError("partition_ids", "must be several partition ids, and is one text")
        if partition_ids is not None:
            known = (await self._group.hub()).partition_ids
            unknown = sorted(set(partition_ids) - set(known))
            if unknown:
                raise ConfigurationError("partition_ids", f"the hub has no partition {unknown[0]}")
        pumps = [
            pump
            for partition in self._partitions.values()
            if partition_ids is None or partition.partition_id in partition_ids
            if (pump := partition.running(name)) is not None
        ]
        if any(pump.waits_for_caller for pump in pumps):
            await asyncio.sleep(0)  # a loop that was just left has dropped its iterator, which says so in the next turn
        for pump in pumps:
            if pump.waits_for_caller:
                instead = "call context.seek, or " if operation == "seek" else ""
                problem = (
                    f"waits until the code that calls it is done with its batch of partition {pump.partition_id}: "
                    f"{instead}call it when that code has returned; a task or thread that it started waits likewise"
                )
                raise ConfigurationError(operation, problem)
        return pumps

    # ------------------------------------------------------------------------------------------------- closing

    async def _close(self) -> None:
        """Stop every pump and release every lease, within the time to close."""
        if self._end.close_by == math.inf:
            self._end.close_by = self._clock.monotonic() + self._settings.close_timeout
        self._store.take_no_more()
        for pump in self._all_pumps():
            pump.stop(CloseReason.SHUTDOWN, max(0.0, self._end.close_by - self._clock.monotonic()))
        await self._chores.cancel(RELEASE_TIME)
        await self._silence.aclose()
        await self._wait_for_pumps()
        self._renewals_due.stop()
        await self._renewals.cancel(RELEASE_TIME)
        for partition in self._partitions.values():
            if partition.lease is not None:
                self._release_later(partition)
        await self._takings.wait(max(RELEASE_TIME, self._end.close_by - self._clock.monotonic()))
        await self._takings.cancel(RELEASE_TIME)
        for pump in self._all_pumps():
            pump.abandon()
        await self._pumps.cancel(RELEASE_TIME)
        self._judge_start()
        for partition in self._partitions.values():
            self._forget(partition)

    async def _wait_for_pumps(self) -> None:
        """Wait until the pumps have ended or the time is over, which a second call of `stop` can shorten."""
        # Renewals continue meanwhile, so that a slow handler does not lose its lease.
        while len(self._pumps) and (remaining := self._end.close_by + RELEASE_TIME - self._clock.monotonic()) > 0:
            self._end.hurry.clear()
            with suppress(StoppedError):
                await self._chores.unless(self._end.hurry, self._pumps.wait(remaining), "eventpump closing")
        await self._chores.wait(RELEASE_TIME)

    # ------------------------------------------------------------------------------------------------- helpers

    async def _stored(
        self, operation: str, partition_id: str | None, call: Awaitable[_T], timeout: float | None = None
    ) -> _T | _Failed:
        """Call the store. A failure is reported and returned, not raised; one of the settings ends a starting host.

        Args:
            operation: The name of the operation, for reports.
            timeout: Seconds for the call and its wait for a turn; None for only the store's own time-out per call.
        """
        key = operation, partition_id
        try:
            async with asyncio.timeout(timeout):
                result = await call
        except BaseException as error:
            if not is_failure(error):
                raise
            failure = store_error(error, operation, partition_id, timeout or self._services.store_timeout)
            if isinstance(failure, ConfigurationError) and not self._start_of_host.was_answered:
                # What it refuses it has refused from the start, as a name that it cannot store: no retry can help.
                self._fail(failure)
                return _FAILED
            self._store_troubles.setdefault(key, self._clock.monotonic())
            self._report(StoreFailed(self._services.owner_id, partition_id, operation, failure))
            return _FAILED
        if key in self._store_troubles:
            failed_for = self._clock.monotonic() - min(self._store_troubles.values())
            self._store_troubles.clear()
            self._report(StoreRestored(self._services.owner_id, partition_id, operation, failed_for))
        return result

    def _unexpected(self, operation: str, error: BaseException) -> None:
        self._report(UnexpectedFailure(self._services.owner_id, None, operation, error))

    def _report(self, report: HostReport) -> None:
        self._services.reporter.report(report)


class _Failed:
    """The result of a call of the store that failed, and was reported."""


_FAILED = _Failed()
