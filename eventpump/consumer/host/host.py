"""A processor host: one member of the fleet that shares a hub's partitions."""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import random
import secrets
import socket
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any, Unpack

from eventpump.aio.closing import AsyncResource
from eventpump.aio.home import HomeLoop
from eventpump.aio.signals import handling_first_signal
from eventpump.cancellation import is_failure
from eventpump.clock import LoopClock
from eventpump.consumer.bounds.limits import BoundedLeaseStore, BoundedTransport, PacedDirectory
from eventpump.consumer.bounds.loop_gate import LoopGate
from eventpump.consumer.host.manager import PartitionManager
from eventpump.consumer.host.monitoring import ReportTally, lag_of, metrics_of
from eventpump.consumer.host.planning import check_shared
from eventpump.consumer.lease.parking import Parking
from eventpump.consumer.lease.services import HostServices
from eventpump.consumer.processor import Processor, ProcessorSource
from eventpump.consumer.pump.batches import BatchIterator, BatchQueue, BatchSource
from eventpump.core.budget import BufferBudget
from eventpump.core.monitoring import Health, Metric
from eventpump.core.weights import with_weight
from eventpump.errors import ClosedError, ConfigurationError
from eventpump.eventhubs.partitions import partition_order
from eventpump.interfaces import (
    CLOSE_TIMEOUT,
    Clock,
    ConsumerScope,
    EventSender,
    HubDirectory,
    LeaseStore,
    SharedLeaseStore,
    Transport,
)
from eventpump.options.consumer import (
    HostSettings,
    SubscriptionOptions,
    SubscriptionPosition,
    SubscriptionSettings,
    sought_position,
)
from eventpump.options.predecessor import CONSUMER, answers
from eventpump.reports import Hook, HostDescription, PartitionStatus, Reporter, SharedStoreNotice
from eventpump.storage.groups import GroupRecords
from eventpump.telemetry.interface import ConsumerTelemetry
from eventpump.texts import not_the_class

_log = logging.getLogger("eventpump.consumer")

STORE_SHARE = 0.45
"""The part of (lease duration - renew interval) that one call of the store may take: two fit before a lease expires."""

BLOCKED_SHARE = 0.1
"""The part of the lease duration from which a standstill of the event loop is reported; no lease is in danger yet."""

LAST_SECOND = 1.0
"""Seconds that transport and store may take each to close if the host's time to close has run out."""


@answers(CONSUMER)
class HubHost(AsyncResource):
    """Shares the partitions of one hub and consumer group with the hosts that use the same leases.

    Every event from a partition's start on is processed at least once, or reported as lost. Under each epoch of a
    partition one host delivers; `docs/guarantees.md` has the conditions. The host opens and closes both the transport
    it creates and the store it is given; a store that is open already it refuses, and does not close.

    Args:
        transport_factory: Creates the transport, when `run` is called.
        leases: The lease store; each host needs an object of its own.
        processor: A coroutine function of context and events or an `EventProcessor` (shared by all partitions), a
            subclass, or a factory: that of the subscription "default". None if there are only others; see `subscribe`.
        hooks: Called with every report, on the event loop.
        clock: The clock by which the store's leases expire; None for the running loop's.
        rng: Randomness, for delays; None for an unseeded one.
        owns_transport: Whether the transport is closed with the host. Default: True.
        open_sender: Returns what sends to a hub over the transport, by the hub's name; for `Park`.

    Raises:
        ConfigurationError: The renew interval is not below the store's lease duration, or `processor` is not one.
    """

    def __init__(
        self,
        transport_factory: Callable[[], Transport],
        leases: LeaseStore,
        settings: HostSettings,
        processor: Processor | None = None,
        *,
        hooks: Iterable[Hook] = (),
        clock: Clock | None = None,
        rng: random.Random | None = None,
        owns_transport: bool = True,
        open_sender: Callable[[Transport, str], EventSender] | None = None,
    ) -> None:
        self._transport_factory = transport_factory
        self._open_sender = open_sender
        self._parking = Parking(self._sender)
        self._budget = BufferBudget(settings.max_buffered_bytes, settings.prefetch_bytes)
        self._owns_transport = owns_transport
        self._leases = leases
        self._settings = settings
        self._source = None if processor is None else ProcessorSource.of(processor)
        if self._source is not None:
            self._source.check(settings)
        self._fields = {"hub": settings.hub, "consumer_group": settings.consumer_group}
        self._tally = ReportTally()
        self._hooks: tuple[Hook, ...] = (self._tally.count, *hooks)
        self._clock = LoopClock() if clock is None else clock
        self._rng = random.Random() if rng is None else rng
        if not callable(getattr(leases, "write_checkpoint", None)) or isinstance(leases, type):
            problem = "must be a lease store, such as SqliteLeaseStore(path)"
            raise ConfigurationError("lease_store", problem + not_the_class(leases))
        if isinstance(leases, SharedLeaseStore):
            check_shared(settings)
        duration = leases.lease_duration
        self._renew_interval = duration / 3 if settings.renew_interval is None else settings.renew_interval
        if self._renew_interval >= duration:
            problem = f"must be below the lease duration of the store, which is {duration:g} s"
            raise ConfigurationError("renew_interval", problem)
        self._owner_id = with_weight(settings.owner_id or _make_name(), settings.weight)
        self._main: asyncio.Task[None] | None = None
        self._transport: Transport | None = None
        self._manager: PartitionManager | None = None
        self._batches: BatchQueue | None = None
        self._batches_run: asyncio.Task[None] | None = None
        self._is_closed = False
        self._home = HomeLoop(type(self).__name__)

    @property
    def hub(self) -> str:
        """The event hub's name."""
        return self._settings.hub

    @property
    def is_closed(self) -> bool:
        """Whether the host is closing or closed: `run` cannot be called."""
        return self._is_closed

    @property
    def owner_id(self) -> str:
        """The owner's name in the leases, with its weight if that is not 1."""
        return self._owner_id

    @property
    def partitions(self) -> list[PartitionStatus]:
        """The partitions this host runs now, ordered by id."""
        statuses = [] if self._manager is None else self._manager.statuses
        return sorted(statuses, key=lambda status: partition_order(status.partition_id))

    @property
    def buffered_bytes(self) -> int:
        """Bytes of events, as encoded, that were received and are not processed yet, over all partitions.

        At most `max_buffered_bytes`, and one event more for each receive link; see `docs/guarantees.md`.
        """
        return self._budget.held

    def health(self) -> Health:
        """Return how the host is, for the probes of a supervisor. Call it on the event loop.

        Live is that the event loop turns, which it does where this is called: a host whose hub or store fails keeps
        trying, and a restart would not help it. Ready is that hub and store have answered, and that the first round of
        leases is done, also where there was none left for this host. It stays ready until it closes, with or without
        events.
        """
        if self._is_closed:
            waits_for: str | None = "its end: it is closing, or closed"
        else:
            waits_for = "the call of run" if self._manager is None else self._manager.waits_for
        if waits_for is None:
            return Health(live=True, ready=True)
        return Health(live=True, ready=False, reasons=(f"host {self._owner_id} waits for {waits_for}",))

    def metrics(self) -> Iterable[Metric]:
        """Return what the host has counted, and the status of its partitions, as metrics; none before it runs.

        `docs/reference/metrics.md` has all of them. A `HealthServer` serves them.
        """
        if self._manager is None:
            return ()
        return metrics_of(self._manager.scope, self.partitions, self._tally, is_ready=self.health().ready)

    def behind(self) -> Mapping[str, Any] | None:
        """Return how far the partitions that this host runs are behind, as JSON values; None before it runs.

        `lag` is the sum over the partitions of which it is known; see `PartitionContext.lag`.
        """
        return None if self._manager is None else lag_of(self._manager.scope, self.partitions)

    def describe(self) -> HostDescription:
        """Return what the host is doing now: what each partition waits for, and the calls of its store.

        Call it on the event loop. `str` of it is a text of some lines, which a `HealthServer` with `debug=True` shows.
        """
        manager, health = self._manager, self.health()
        found = [] if manager is None else manager.descriptions
        return HostDescription(
            self._owner_id,
            self._settings.hub,
            self._settings.consumer_group,
            "ready" if health.ready else health.reasons[0],
            repr(self._leases),
            self.buffered_bytes,
            tuple(sorted(found, key=lambda each: partition_order(each.status.partition_id))),
            () if manager is None else tuple(manager.leases.calls),
        )

    async def run(self, *, handle_signals: bool = False, until: Awaitable[object] | None = None) -> None:
        """Process events until `aclose` or `stop` is called. May be called once.

        When cancelled, it closes in order, which may take the close time-out, and then raises `CancelledError`. After a
        second cancellation it closes at once. No task is left, except for user code that ignores cancellation.

        Args:
            handle_signals: Whether to close on SIGTERM and SIGINT. A second signal has the effect that it has without
                the host, and one that is ignored stays so. Default: False.
            until: Close when this is done, such as `done.wait()` with an `asyncio.Event` that the processor sets after
                the last event that is wanted, or `asyncio.sleep(60)`. It is cancelled if the host is closed before.
                None for no such end. Default: None.

        Raises:
            Exception: What `until` raised. The host is closed in order before.
            EventPumpError: The credential, the hub or the consumer group is wrong, or could not be reached within the
                start-up time-out.
            ProcessorFailedError: The processor raised, and the failure policy is "stop".
            ClosedError: The host was closed before.
        """
        self._home.enter()
        if self._is_closed:
            raise ClosedError("processor host")
        if self._main is not None:
            raise ConfigurationError("run", "may be called only once per host")
        given: object = until
        if given is not None and not inspect.isawaitable(given):
            problem = f"must be awaitable, such as done.wait() or asyncio.sleep(60), and is {type(given).__name__}"
            raise ConfigurationError("until", problem)
        main = self._main = asyncio.get_running_loop().create_task(self._run(), name="eventpump host")
        end = None if until is None else asyncio.ensure_future(until)
        if end is not None:
            end.add_done_callback(lambda _: self._stop(self._settings.close_timeout))
        cancelled: asyncio.CancelledError | None = None
        try:
            with handling_first_signal(self._signalled) if handle_signals else nullcontext():
                while not main.done():
                    try:
                        await asyncio.wait({main})
                    except asyncio.CancelledError as error:
                        self._stop(self._settings.close_timeout if cancelled is None else 0.0)
                        cancelled = error
        finally:
            self._is_closed = True
            has_ended = end is not None and end.done()
            if end is not None and not end.done():
                end.cancel()
                await asyncio.wait({end})
        if cancelled is not None:
            if not main.cancelled() and (failure := main.exception()) is not None:
                _log.error("host %s: failed while closing: %s", self._owner_id, failure)
            raise cancelled
        main.result()
        if end is not None and has_ended:
            end.result()

    async def aclose(self, deadline: float | None = None) -> None:
        """Stop receiving, let handlers finish their batches, write the last checkpoints, release the leases.

        May be called again; the shorter deadline applies. When cancelled, the host continues to close. A processor must
        not call this, because it waits for the processor: it can call `stop`.

        Args:
            deadline: Seconds that closing may take; None for the close time-out. If they do not suffice, releasing the
                leases, cancelling, and closing the connection and the store may each take one second more.
        """
        self._home.enter()
        self.stop(deadline)
        if self._batches is not None:
            self._batches.give_back(asyncio.current_task())
        if self._main is None:
            await self._disconnect()
        elif not self._main.done():
            await asyncio.wait({self._main})
        if self._batches_run is not None and not self._batches_run.done():
            await asyncio.wait({self._batches_run})

    def batches(self, *, handle_signals: bool = False) -> BatchIterator:
        """Return an asynchronous iterator over the batches of the partitions, in place of a processor.

        ::

            host = EventProcessorHost(connection_string, "telemetry", lease_store=leases)
            async with host:
                async for batch in host.batches():
                    await store(batch.context.partition_id, batch.events)

        The first loop starts the host, unless `run` was called. Of each partition at most one batch is in the hand of a
        loop, and of each loop at most one batch. A batch is acknowledged when its loop asks for the next one, and then
        the checkpoint policy applies to it; until then its partition waits, and no other one does if there are loops
        for them: call this once for each task that is to have a loop of its own.

        A loop that is left before, by `break`, `return`, an exception or a cancellation, acknowledges nothing: its
        batch is delivered again, to the next loop of this host or to the next owner of the partition. What
        `batch.checkpoint()` has stored is not delivered again. If this object is kept in a variable, close it
        (`await batches.aclose()`), because only then is it known that the loop was left; a second loop over it begins
        with that batch. The host goes on without a loop, with its partitions waiting, until it is closed.

        If the partition moves to another host while its batch is in hand, `batch.context.ownership_lost` is set,
        `batch.checkpoint()` raises `OwnershipLostError`, and the next owner receives the events again. A loop ends when
        the host has closed: a batch in hand then has the close time-out to be acknowledged. In the body of a loop call
        `stop`; `aclose` from there gives the batch in hand back.

        Args:
            handle_signals: As of `run`, if this loop starts the host. Default: False.

        Raises:
            ConfigurationError: The host has a processor, or was used without a processor before, or an option does not
                work with a loop: `failure_policy`, or `on_handler_timeout="cancel"`.
            ClosedError: The host is closed.
        """
        if self._is_closed:
            raise ClosedError("processor host")
        if self._batches is None:
            if self._source is not None:
                raise ConfigurationError("processor", "cannot be given together with batches(): a batch has one reader")
            if self._manager is not None:
                raise ConfigurationError("batches", "must be called before `subscribe` and `run`")
            queue = BatchQueue()
            source = ProcessorSource.of(BatchSource(queue))
            source.check(self._settings)
            self._batches, self._source = queue, source
        return BatchIterator(self._batches, partial(self._start_for_batches, handle_signals))

    def _start_for_batches(self, handle_signals: bool) -> asyncio.Task[None]:
        """Return the task that runs the host, started if there is none."""
        self._home.enter()
        if self._batches_run is None:
            running = self._main
            if running is None:
                work = self.run(handle_signals=handle_signals)
                running = asyncio.get_running_loop().create_task(work, name="eventpump host")
            self._batches_run = running
            running.add_done_callback(self._batches_ended)
        return self._batches_run

    def _batches_ended(self, running: asyncio.Task[None]) -> None:
        assert self._batches is not None
        is_awaited = self._batches.wake_all()
        if not running.cancelled() and (error := running.exception()) is not None and not is_awaited:
            # A loop that asks later raises it, but there may be none.
            _log.error("host %s: failed: %s: %s", self._owner_id, type(error).__name__, error)

    async def subscribe(self, name: str, processor: Processor, **options: Unpack[SubscriptionOptions]) -> None:
        """Deliver the events of the hub to another processor, beside the others, over the same receive links.

        Each subscription has a pace and checkpoints of its own. What is published after this has returned is delivered
        to it at least once, and in order per partition, by the hosts that have subscribed to it; each of them has to.
        The first one records where it begins. A subscription that there is already is joined, and its record counts;
        one that was ended with its checkpoints kept continues after these.

        May be called before `run`, or while it runs.

        Args:
            name: The subscription: 1 to 64 letters, digits, "_" and "-"; not "default".
            processor: A coroutine function of context and events or an `EventProcessor` (shared by all partitions), a
                subclass, or a factory.
            options: See `SubscriptionOptions`: where it begins and how it catches up, what to do if it is slow, which
                part of the events it takes, and its own checkpoint policy, batch size, failure policy and time-outs.

        Raises:
            ConfigurationError: An option cannot work, or this host has subscribed already.
            EventPumpError: The service or the store failed. Nothing is stored, or the subscription is: call it again.
            ClosedError: The host is closed.
        """
        settings = SubscriptionSettings(name=name, **options)
        await self._prepare().subscribe(settings, ProcessorSource.of(processor))

    async def unsubscribe(self, name: str, *, keep_checkpoint: bool = False) -> None:
        """End a subscription for all hosts. They finish the batches that they have in hand.

        Args:
            name: The subscription. Nothing happens if there is none of that name.
            keep_checkpoint: Whether its checkpoints are kept, so that it continues there when it is subscribed to
                again. Default: False.

        Raises:
            EventPumpError: The store failed; call it again.
            ClosedError: The host is closed.
        """
        await self._prepare().unsubscribe(name, keep_checkpoint=keep_checkpoint)

    def stop(self, deadline: float | None = None) -> None:
        """Begin to close, without waiting: `run` returns when the host is closed. A processor may call this.

        Args:
            deadline: As of `aclose`.
        """
        if self._manager is not None:
            self._home.enter()
        self._stop(self._settings.close_timeout if deadline is None else deadline)

    def _stop(self, within: float) -> None:
        self._is_closed = True
        if self._manager is not None:
            self._manager.stop(max(0.0, within))

    async def seek(
        self, name: str, position: SubscriptionPosition, partition_ids: Collection[str] | None = None
    ) -> tuple[str, ...]:
        """Let a subscription continue at another position, on the partitions that this host owns.

        On each partition it takes effect after the running batch, and is stored before the first event from the new
        position is delivered: it holds for every later owner. A partition that is given up meanwhile may have it stored
        or not; one that is not returned was not sought, as far as this host knows. A processor calls `context.seek`
        instead: this waits for its batch.

        Args:
            name: The subscription; "default" for that of the host's own processor.
            position: As `start` of `subscribe`: "earliest", "latest", a sequence number, a time, a timedelta, an
                offset, or an `EventPosition`. On a partition whose oldest event is later, that one is the next.
            partition_ids: The partitions; those that this host does not own are left out. Default: all that it owns.

        Returns:
            The partitions on which it is stored.

        Raises:
            ConfigurationError: This host has no processor for the subscription, the hub has no such partition, or one
                of the partitions no such position, as beyond its end; or the caller has one of their batches in hand.
                Nothing is changed.
            EventPumpError: The service failed. Nothing is changed.
            ClosedError: The host is closed.
        """
        where = sought_position("position", position)
        return await self._prepare().seek(name, where, partition_ids)

    async def replay(
        self,
        name: str,
        *,
        from_: SubscriptionPosition,
        to: SubscriptionPosition,
        partition_ids: Collection[str] | None = None,
    ) -> tuple[str, ...]:
        """Deliver a range again to a subscription, on the partitions that this host owns; then it continues as before.

        The range is delivered once the running batch has ended, and its checkpoint does not change meanwhile:
        `context.checkpoint` does nothing for these events. Events of the range that the hub drops before they are read
        are reported (`DataLost`). A seek, and the end of the ownership, end a replay; it is not taken up again.

        Args:
            name: The subscription; "default" for that of the host's own processor.
            from_: Where the range begins; as `position` of `seek`, but an event at a sequence number, time or offset
                belongs to the range, unless it is an `EventPosition` that is not inclusive.
            to: Where it ends; likewise. "latest" is the end of the partition at the call.
            partition_ids: As of `seek`.

        Returns:
            The partitions on which the whole range was processed; not those on which it is empty.

        Raises:
            ConfigurationError: As of `seek`.
            EventPumpError: As of `seek`.
            ClosedError: The host is closed.
        """
        begin, end = sought_position("from_", from_, inclusive=True), sought_position("to", to, inclusive=True)
        return await self._prepare().replay(name, begin, end, partition_ids)

    async def drain(self, name: str) -> tuple[str, ...]:
        """Wait until a subscription has processed what its partitions hold at the call, on those that this host owns.

        A partition that is paused is waited for. A processor must not wait for this: it would wait for itself.

        Args:
            name: The subscription; "default" for that of the host's own processor.

        Returns:
            The partitions on which that is so; not those that were given up before.

        Raises:
            ConfigurationError: No processor is known for the subscription, or the caller has a batch of it in hand.
            EventPumpError: The service failed.
            ClosedError: The host is closed.
        """
        return await self._prepare().drain(name)

    def pause(self, name: str) -> tuple[str, ...]:
        """Deliver no more to a subscription after its running batches, on the partitions that this host owns.

        It keeps its place, and holds no other subscription back. A partition that another host takes over, or this one
        again, is not paused.

        Args:
            name: The subscription; "default" for that of the host's own processor.

        Returns:
            The partitions on which it is paused.

        Raises:
            ConfigurationError: This host has no processor for the subscription.
            ClosedError: The host is closed.
        """
        return self._prepare().pause(name)

    def resume(self, name: str) -> tuple[str, ...]:
        """Deliver to a subscription again on the partitions where this host has paused it.

        Or suspended it, with `on_slow="suspend"`.

        Args:
            name: The subscription; "default" for that of the host's own processor.

        Returns:
            The partitions on which it was paused or suspended.

        Raises:
            ConfigurationError: This host has no processor for the subscription.
            ClosedError: The host is closed.
        """
        return self._prepare().resume(name)

    def _prepare(self) -> PartitionManager:
        """Return the manager, made when it is first needed."""
        self._home.enter()
        if self._is_closed:
            raise ClosedError("processor host")
        if self._manager is None:
            self._manager = self._make_manager()
        return self._manager

    def _make_manager(self) -> PartitionManager:
        settings = self._settings
        transport = self._transport = self._transport_factory()
        store_timeout = (self._leases.lease_duration - self._renew_interval) * STORE_SHARE
        loop_gate = LoopGate(self._clock)
        scope = ConsumerScope(transport.fully_qualified_namespace, settings.hub, settings.consumer_group)
        store = BoundedLeaseStore(self._leases, timeout=store_timeout, clock=self._clock, loop_gate=loop_gate)
        telemetry: ConsumerTelemetry | None = None
        hooks = self._hooks
        directory: HubDirectory = transport
        if settings.telemetry is not None:
            telemetry = settings.telemetry.of_host(scope, self._owner_id, transport, lambda: self.partitions)
            hooks, directory = (*hooks, telemetry.report), telemetry.directory(transport)
        reporter = Reporter(_log, hooks, self._fields)
        services = HostServices(
            transport=BoundedTransport(transport, rng=self._rng),
            directory=PacedDirectory(directory, transport.fully_qualified_namespace),
            store=store,
            group=GroupRecords(store, scope, telemetry),
            settings=settings,
            scope=scope,
            owner_id=self._owner_id,
            clock=self._clock,
            rng=self._rng,
            reporter=reporter,
            store_timeout=store_timeout,
            blocked_after=min(self._renew_interval / 2, self._leases.lease_duration * BLOCKED_SHARE),
            loop_gate=loop_gate,
            renew_interval=self._renew_interval,
            parking=self._parking,
            budget=self._budget,
            telemetry=telemetry,
        )
        if isinstance(self._leases, SharedLeaseStore):
            self._leases.attend(self._renew_interval, partial(self._noticed, reporter))
        return PartitionManager(services, self._source, renew_interval=self._renew_interval)

    def _noticed(self, reporter: Reporter, partition_id: str | None, problem: str) -> None:
        reporter.report(SharedStoreNotice(self._owner_id, partition_id, problem))

    def _sender(self, hub: str) -> EventSender:
        assert self._transport is not None
        if self._open_sender is None:
            raise ConfigurationError("to", "this host cannot send to a hub; give a producer or a function")
        return self._open_sender(self._transport, hub)

    async def _run(self) -> None:
        settings, fields = self._settings, {**self._fields, "owner_id": self._owner_id}
        if self._manager is None:
            self._manager = self._make_manager()
        _log.info("host %s: started on hub %s, %s", self._owner_id, settings.hub, settings.consumer_group, extra=fields)
        if self._is_closed:
            self._manager.stop(0.0)
        try:
            await self._manager.run()
        finally:
            await self._disconnect()
            _log.info("host %s: closed", self._owner_id, extra=fields)

    async def _disconnect(self) -> None:
        """Close the transport and the store. Does nothing if they were never used, or are closed."""
        self._home.close()
        transport, self._transport = self._transport, None
        if transport is None or self._manager is None:
            return
        leases = self._manager.leases
        closes = (transport.aclose, leases.aclose) if self._owns_transport else (leases.aclose,)
        for close in (self._parking.aclose, *closes):
            try:
                async with asyncio.timeout(min(CLOSE_TIMEOUT, max(LAST_SECOND, self._manager.remaining))):
                    await close()
            except BaseException as error:
                if not is_failure(error):
                    raise
                _log.warning("host %s: closing failed: %s: %s", self._owner_id, type(error).__name__, error)

    def _signalled(self) -> None:
        _log.info("host %s: closing on a signal", self._owner_id)
        self._stop(self._settings.close_timeout)


def _make_name() -> str:
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
