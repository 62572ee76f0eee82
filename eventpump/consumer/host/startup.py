"""The start of a host: opens the lease store, agrees on where to begin, and finds the partitions."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from eventpump.aio.retry import retrying
from eventpump.aio.tasks import StoppedError, TaskSet
from eventpump.cancellation import is_failure
from eventpump.consumer.lease.services import HostServices
from eventpump.consumer.record.checkpoints import store_error
from eventpump.consumer.record.starts import GroupStart
from eventpump.consumer.record.subscriptions import Subscriptions
from eventpump.core.backoff import UNLIMITED
from eventpump.errors import ConfigurationError, EventPumpError, ServiceTimeoutError, StoreError
from eventpump.reports import LeaseStoreEmpty, ServiceFailed, StartIgnored, StoreFailed, StoreRestored

_T = TypeVar("_T")


@dataclass(slots=True)
class StartProgress:
    """How far the start of a host has come.

    Attributes:
        step: What it waits for; None once the store and the hub have answered.
        failure: Why that has failed last; None if it has not.
        has_round: Whether the first round of leases is done.
    """

    step: str | None = "the call of run"
    failure: Exception | None = None
    has_round: bool = False

    @property
    def waits_for(self) -> str | None:
        """What the host waits for before it is ready, in words; None if it is."""
        if self.step is not None:
            return self.step if self.failure is None else f"{self.step}: {self.failure}"
        return None if self.has_round else "the first round of leases"


LEAST_START_TIME = 1.0
"""Seconds that an attempt at the start may always take, even if the time to start has run out."""


class HostOpening:
    """Does what has to succeed once before a host can run partitions.

    Args:
        ending: Set when the host ends.
        progress: Is kept up to date.
    """

    def __init__(
        self,
        services: HostServices,
        group: GroupStart | None,
        subscriptions: Subscriptions,
        tasks: TaskSet,
        ending: asyncio.Event,
        progress: StartProgress,
    ) -> None:
        self._services = services
        self._settings = services.settings
        self._store = services.store
        self._clock = services.clock
        self._group = group
        self._subscriptions = subscriptions
        self._tasks = tasks
        self._ending = ending
        self._progress = progress

    async def run(self, until: float) -> tuple[str, ...]:
        """Open the store and find the partitions. Failures that may be transient are reported and retried.

        Args:
            until: The time, by the clock, after which no attempt begins.

        Returns:
            The partitions, if there are leases for all of them; none if that is not known yet, or the host ends.
        """
        await self._until_done("open the lease store", lambda: self._store.open(self._services.scope), until)
        hub = self._settings.hub
        properties = await self._until_done(
            f"reading the properties of hub {hub}",
            lambda: self._services.directory.get_hub_properties(hub),
            until,
            is_read=True,
        )
        if properties is None:
            return ()
        ids = properties.partition_ids
        unknown = self._settings.positions_without_partition(ids)
        if unknown:
            raise ConfigurationError("initial_position", f"the hub has no partition {unknown[0]}")
        # Before the leases: a group that has leases has a record, whenever a host dies.
        group, record = self._group, None
        if group is not None:
            record = await self._until_done(
                "agree on the consumer group's record", lambda: group.agree(properties), until
            )
            if record is None:
                return ()
        await self._until_done("list subscriptions", self._subscriptions.refresh, until)
        is_asked = not self._settings.has_relative_start
        if group is not None and record is not None and record.starts != group.starts and is_asked:
            self._services.reporter.report(StartIgnored(self._services.owner_id, None, record.starts, group.starts))
        if group is not None and group.is_first and not self._settings.has_start:
            # Before there are leases, under which a host may store a checkpoint. The start does not fail for it.
            soon = min(until, self._clock.monotonic() + self._services.store_timeout)
            with suppress(StoreError):
                if await self._until_done("read the checkpoints", self._is_without_checkpoint, soon):
                    self._tasks.spawn(self._report_start(ids), "eventpump start: report of an empty store")
        return ids if await self._until_done("ensure leases", lambda: self._ensure(ids), until) else ()

    async def _is_without_checkpoint(self) -> bool:
        """Return whether the store has no checkpoint of the group, though perhaps leases of other libraries' hosts."""
        for lease in await self._store.list():
            if await self._store.read_checkpoint(lease.partition_id) is not None:
                return False
        return True

    async def _report_start(self, partition_ids: tuple[str, ...]) -> None:
        """Report that the group begins, if a partition has events. Beside the start, which it does not delay."""
        services = self._services

        for partition_id in partition_ids:
            read = partial(services.directory.get_partition_properties, self._settings.hub, partition_id)
            with suppress(EventPumpError):  # it cannot be read at all, as the partition's pump reports
                if not (await retrying(read, UNLIMITED, services.rng)).is_empty:
                    scope = services.scope
                    services.reporter.report(LeaseStoreEmpty(services.owner_id, None, scope.hub, scope.consumer_group))
                    return

    async def _ensure(self, partition_ids: tuple[str, ...]) -> bool:
        """Create the leases. False if some could not be created: the others are used, and discovery tries again."""
        try:
            await self._store.ensure(partition_ids)
        except StoreError as error:
            if error.partition_id is None or not await self._store.list():
                raise
            self._services.reporter.report(
                StoreFailed(self._services.owner_id, error.partition_id, "ensure leases", error)
            )
            return False
        return True

    async def _until_done(
        self, operation: str, call: Callable[[], Awaitable[_T]], until: float, *, is_read: bool = False
    ) -> _T | None:
        """Run an operation that the start depends on, and return its result; None if the manager ended first.

        Args:
            until: The time, by the clock, after which no attempt begins.
            is_read: Whether it is a call of the service, and not of the store.

        Raises:
            EventPumpError: The error of the last attempt: no retry can help, or the time is over.
        """
        if self._ending.is_set():
            return None
        self._progress.step, self._progress.failure = operation, None

        async def attempt() -> _T:
            try:
                return await call()
            except BaseException as error:
                if not is_failure(error) or isinstance(error, EventPumpError):
                    raise
                raise self._own_error(operation, error, is_read) from error

        failed_at: float | None = None
        said, again_at = "", 0.0

        def report(failure: Exception, _: float) -> None:
            nonlocal failed_at, said, again_at
            self._progress.failure = failure
            now = self._clock.monotonic()
            failed_at = now if failed_at is None else failed_at
            if str(failure) == said and now < again_at:
                return
            # The same failure is reported again when it has lasted twice as long.
            said, again_at = str(failure), now + max(1.0, now - failed_at)
            kind = ServiceFailed if is_read else StoreFailed
            left = max(0.0, until - now)
            self._services.reporter.report(kind(self._services.owner_id, None, operation, failure, left))

        attempts = retrying(
            attempt,
            UNLIMITED,
            self._services.rng,
            until=asyncio.get_running_loop().time() + until - self._clock.monotonic(),
            least_time=LEAST_START_TIME,
            on_retry=report,
        )
        try:
            result = await self._tasks.unless(self._ending, attempts, f"eventpump start: {operation}")
        except StoppedError:
            return None
        except TimeoutError as error:
            raise self._own_error(operation, error, is_read) from error
        if failed_at is not None and not is_read:
            failed_for = self._clock.monotonic() - failed_at
            self._services.reporter.report(StoreRestored(self._services.owner_id, None, operation, failed_for))
        return result

    def _own_error(self, operation: str, error: BaseException, is_read: bool) -> EventPumpError:
        """Return the error for what a call raised at the start."""
        if is_read and not isinstance(error, EventPumpError):
            return ServiceTimeoutError(f"{operation}: no answer ({type(error).__name__})")
        return store_error(error, operation, None, self._settings.startup_timeout)
