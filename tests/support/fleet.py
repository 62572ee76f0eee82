"""Hosts around one hub in memory, with everything they do written down: for tests on virtual time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self, TypeVar

from eventpump.consumer.host.host import HubHost
from eventpump.consumer.processor import CloseReason, EventProcessor, PartitionContext
from eventpump.core.checkpoint import CheckpointPolicy
from eventpump.eventhubs.events import Checkpoint, ReceivedEvent
from eventpump.interfaces import ConsumerScope
from eventpump.options.consumer import HostSettings
from eventpump.reports import HostReport
from eventpump.storage.leases.memory import MemoryLeaseStore
from eventpump.testing.transport import FakeHub, FakeTransport
from tests.support.inside import budget_of
from tests.support.leases import SharedLeases
from tests.support.store import FlakyLeaseStore

_R = TypeVar("_R", bound=HostReport)


@dataclass(frozen=True, slots=True)
class Delivery:
    """One call of `process_events`.

    Args:
        at: When it began, on the loop's clock.
    """

    host: str
    partition_id: str
    owner_level: int
    numbers: tuple[int, ...]
    at: float


@dataclass(slots=True)
class Record:
    """What processors were called with, in order."""

    deliveries: list[Delivery] = field(default_factory=list)
    opened: list[tuple[str, str]] = field(default_factory=list)
    """Host and partition."""
    closed: list[tuple[str, str, CloseReason]] = field(default_factory=list)
    errors: list[tuple[str, str, Exception]] = field(default_factory=list)

    def numbers(self, partition_id: str, host: str | None = None) -> list[int]:
        """Return the sequence numbers delivered from a partition, in order."""
        return [
            number
            for delivery in self.deliveries
            if delivery.partition_id == partition_id and host in {None, delivery.host}
            for number in delivery.numbers
        ]

    def reasons(self, host: str, partition_id: str) -> list[CloseReason]:
        """Return the reasons of a host's closes of a partition."""
        return [reason for each, partition, reason in self.closed if (each, partition) == (host, partition_id)]


Step = Callable[[PartitionContext, Sequence[ReceivedEvent]], Awaitable[None]]


class RecordingProcessor(EventProcessor):
    """Writes down what it is called with, then does what the test says.

    Args:
        on_events: What to do with a batch; None to checkpoint it.
    """

    def __init__(
        self,
        record: Record,
        *,
        on_events: Step | None = None,
        on_open: Callable[[PartitionContext], Awaitable[None]] | None = None,
        on_error: Callable[[PartitionContext, Exception], Awaitable[None]] | None = None,
        on_close: Callable[[PartitionContext, CloseReason], Awaitable[None]] | None = None,
    ) -> None:
        self.record = record
        self._on_events = on_events
        self._on_open = on_open
        self._on_error = on_error
        self._on_close = on_close

    async def open(self, context: PartitionContext) -> None:
        """Record an opening."""
        self.record.opened.append((context.owner_id, context.partition_id))
        if self._on_open is not None:
            await self._on_open(context)

    async def process_events(self, context: PartitionContext, events: Sequence[ReceivedEvent]) -> None:
        """Record a batch."""
        numbers = tuple(event.sequence_number for event in events)
        now = asyncio.get_running_loop().time()
        delivery = Delivery(context.owner_id, context.partition_id, context.owner_level, numbers, now)
        self.record.deliveries.append(delivery)
        if self._on_events is not None:
            await self._on_events(context, events)
        else:
            await context.checkpoint()

    async def process_error(self, context: PartitionContext, error: Exception) -> None:
        """Record an error."""
        self.record.errors.append((context.owner_id, context.partition_id, error))
        if self._on_error is not None:
            await self._on_error(context, error)

    async def close(self, context: PartitionContext, reason: CloseReason) -> None:
        """Record a close."""
        self.record.closed.append((context.owner_id, context.partition_id, reason))
        if self._on_close is not None:
            await self._on_close(context, reason)


NO_PROCESSOR = object()
"""Stands for a host without the subscription "default"."""


class Fleet:
    """Any number of hosts on one hub and one lease store. Leaving it closes them, and checks that no task is left.

    Args:
        lease_duration: In seconds.
        seed: Of everything that is left to chance.
    """

    def __init__(self, hub: FakeHub | None = None, *, lease_duration: float = 30.0, seed: int = 0) -> None:
        self.hub = FakeHub() if hub is None else hub
        self.record = Record()
        self.hosts: dict[str, HubHost] = {}
        self.stores: dict[str, FlakyLeaseStore] = {}
        self.transports: dict[str, FakeTransport] = {}
        self.reports: dict[str, list[HostReport]] = {}
        self.runs: dict[str, asyncio.Task[None]] = {}
        self.leases = SharedLeases()
        self._lease_duration = lease_duration
        self._seed = seed
        self._before: set[asyncio.Task[Any]] = set()

    async def __aenter__(self) -> Self:
        self._before = asyncio.all_tasks()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for store in self.stores.values():
            store.heal()
        await asyncio.gather(*(host.aclose() for host in self.hosts.values()))
        await asyncio.gather(*self.runs.values(), return_exceptions=True)
        if error is None:
            left = [task for task in asyncio.all_tasks() - self._before if not task.done()]
            assert not left, f"tasks outlived their hosts: {left}"
            for name, host in self.hosts.items():
                assert (host.buffered_bytes, budget_of(host).links) == (0, 0), f"{name} counts what it does not hold"

    def host(self, name: str = "a", processor: Any = None, **options: Any) -> HubHost:
        """Make a host, not running yet."""
        open_sender, hooks = options.pop("open_sender", None), options.pop("hooks", ())
        memory = MemoryLeaseStore(self.leases, lease_duration=self._lease_duration)
        store = self.stores[name] = FlakyLeaseStore(memory)
        transport = self.transports[name] = FakeTransport(self.hub)
        reports = self.reports[name] = []
        # Most tests say themselves when a checkpoint is written.
        defaults = {"hub": self.hub.name, "owner_id": name, "checkpoint_policy": CheckpointPolicy.manual()}
        settings = HostSettings(**{**defaults, **options})
        host = self.hosts[name] = HubHost(
            lambda: transport,
            store,
            settings,
            RecordingProcessor(self.record) if processor is None else None if processor is NO_PROCESSOR else processor,
            hooks=[reports.append, *hooks],
            rng=random.Random(f"{self._seed} {name}"),
            open_sender=open_sender,
        )
        return host

    async def start(self, name: str = "a", processor: Any = None, **options: Any) -> HubHost:
        """Make a host and let it run."""
        host = self.host(name, processor, **options)
        self.runs[name] = asyncio.create_task(host.run(), name=f"host {name}")
        await asyncio.sleep(0)
        return host

    async def until(self, holds: Callable[[], bool], within: float, *, step: float = 0.1) -> float:
        """Let time pass in steps until something holds, and give how long it took, in seconds of the loop's clock."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        for _ in range(int(within / step) + 1):
            if holds():
                return loop.time() - began
            await asyncio.sleep(step)
        raise AssertionError(f"it does not hold after {within} s")

    def reported(self, name: str, kind: type[_R], partition_id: str | None = None) -> list[_R]:
        """Return a host's reports of a kind."""
        return [
            each for each in self.reports[name] if isinstance(each, kind) and partition_id in {None, each.partition_id}
        ]

    def owned(self, name: str) -> set[str]:
        """Return the partitions whose lease a host holds."""
        return {status.partition_id for status in self.hosts[name].partitions if status.epoch is not None}

    def owner(self, partition_id: str) -> str | None:
        """Return the name in a partition's lease."""
        return self.leases.leases(self.scope)[partition_id].owner

    def checkpoint(self, partition_id: str) -> int | None:
        """Return the sequence number of a partition's stored checkpoint."""
        found: Checkpoint | None = self.leases.checkpoints(self.scope).get((partition_id, "default"))
        return None if found is None else found.sequence_number

    @property
    def scope(self) -> ConsumerScope:
        """The scope of the leases, as the memory store keys it."""
        return ConsumerScope(self.hub.fully_qualified_namespace.lower(), self.hub.name.lower(), "$default")


def stocked(count: int = 0, partitions: int = 1, *, seed: int = 0, lease_duration: float = 30.0, **hub: Any) -> Fleet:
    """Return a fleet whose hub holds a number of events in each partition.

    Args:
        seed: As of `Fleet`, as is `lease_duration`.
        hub: More arguments of `FakeHub`.
    """
    fleet = Fleet(FakeHub(partitions=partitions, **hub), seed=seed, lease_duration=lease_duration)
    if count:
        for partition_id in fleet.hub.partition_ids:
            fleet.hub.publish(partition_id, count=count)
    return fleet
