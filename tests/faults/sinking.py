"""A query without Spark, for the faults of the idempotent sink: its batches, its driver, and attempts at its shares.

What a batch holds follows from its number alone, as with a deterministic query.
"""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eventpump import Emulator, EventData, RetryOptions
from eventpump.clients.connection import make_transport
from eventpump.interfaces import (
    HubProperties,
    PartitionProperties,
    ReceiveLink,
    ReceiveLinkSpec,
    ReceiveSink,
    SendLink,
    SendLinkSpec,
    Transport,
)
from eventpump.options.connection import connection_settings
from eventpump.spark.sink.calls import BatchCalls
from eventpump.spark.sink.exactly_once import (
    PartitionPublishing,
    PublishOptions,
    finish_batch,
    plan_batch,
    prepare_batch,
    sink_of,
)
from eventpump.spark.sink.patience import retried
from eventpump.spark.sink.protocol import DriverRun, MicroBatch, OnProducerStateLost, Unplanned
from eventpump.spark.sink.records import Done, PackingLimits, PartitionOutcome, Plan, Sink
from eventpump.spark.sink.small import KeptPublishers, compare_shares, publish_shares
from eventpump.storage.ledgers.directory import DirectoryLedger
from tests.faults.programs import CONNECTION, HUB, RETRY, stored

PARTITIONS = ("0", "1", "2", "3")
LIMITS = PackingLimits(max_events=7)
OPTIONS = PublishOptions(
    retry=RetryOptions(max_retries=20, base_delay=0.002, max_delay=0.02),
    buffer_bytes=300,
    scan_timeout=20.0,
    settle_time=0.0,
)


PATHS: dict[str, Callable[[random.Random], Callable[[], bool]]] = {
    "switching": lambda rng: lambda: rng.random() < 0.5,
    "small": lambda _: lambda: True,
    "tasks": lambda _: lambda: False,
}
"""Who publishes a batch: the driver, as a small one, or tasks."""


def share(batch_id: int, partition_id: str) -> list[str]:
    """Return the rows of a batch that go to a partition: none, some or many."""
    rng = random.Random(f"{batch_id} {partition_id}")
    return [f"{batch_id}.{partition_id}.{row}" for row in range(rng.choice([0, 3, 20, 60]))]


def encoded(rows: list[str]) -> list[bytes]:
    """Encode rows."""
    return [EventData(row).encode(None) for row in rows]


class KilledError(Exception):
    """The attempt was killed by the test."""


@dataclass
class Query:
    """A run of the driver, and the transport of its tasks.

    Args:
        shares: What a batch holds for a partition.
        paths: Return whether the driver publishes the next batch itself, as a small one.
        compares: Whether rows that are stored are compared where a plan is not new. Rows of a plan that an earlier run
            has made are compared in any case.
        may_repeat: Whether an earlier run may have begun the batch.
    """

    transport: Transport
    store: DirectoryLedger
    policy: OnProducerStateLost = OnProducerStateLost.FAIL
    limits: PackingLimits = LIMITS
    is_stamped: bool = False
    driver: DriverRun = field(default_factory=lambda: DriverRun(uuid.uuid4().hex))
    renew_at: int | None = None
    first_batch: int = 0
    shares: Callable[[int, str], list[str]] = share
    paths: Callable[[], bool] = lambda: False
    kept: KeptPublishers = field(default_factory=KeptPublishers)
    is_first: bool = False
    compares: bool = False
    sink_id: str = "sink"
    may_repeat: bool = True
    calls: BatchCalls = field(default_factory=BatchCalls)

    @property
    def sink(self) -> Sink:
        """The sink."""
        return sink_of(self.transport, HUB, self.sink_id)

    def _compares(self, plan: Plan) -> bool:
        return self.compares or plan.run_id != self.driver.run_id

    def batch(self, batch_id: int) -> MicroBatch:
        """Announce a batch."""
        values: dict[str, Any] = {"first_batch": self.first_batch, "may_repeat": self.may_repeat}
        if self.renew_at is not None:
            values["renew_at"] = self.renew_at
        return MicroBatch(self.sink, "query", self.driver, batch_id, self.limits, self.is_stamped, **values)

    async def begin(self, batch_id: int, *, is_collected: bool = False) -> Plan | Done:
        """Begin a batch.

        Args:
            is_collected: Whether the driver has the rows, and knows which partitions have any.
        """
        used = [each for each in PARTITIONS if self.shares(batch_id, each)] if is_collected else None
        batch = self.batch(batch_id)
        step = await retried(lambda: prepare_batch(self.store, self.transport, batch, OPTIONS))
        self.is_first = False
        if isinstance(step, Unplanned):
            unplanned = step
            step = await retried(lambda: plan_batch(self.store, self.transport, unplanned, used, OPTIONS))
            self.is_first = step.run_id == self.driver.run_id
        return step

    async def plan(self, batch_id: int) -> Plan:
        """Begin a batch that is not done."""
        step = await self.begin(batch_id)
        assert isinstance(step, Plan)
        return step

    async def finish(self, plan: Plan, outcomes: list[PartitionOutcome]) -> Plan | Done:
        """Finish a batch."""
        batch = self.batch(plan.batch_id)
        return await retried(
            lambda: finish_batch(self.store, self.transport, batch, plan, outcomes, self.policy, OPTIONS)
        )

    async def attempt(
        self, plan: Plan, partition_id: str, *, portion: int = 9, killed_at: int | None = None
    ) -> PartitionOutcome:
        """Publish a share.

        Args:
            portion: Rows given at a time.
            killed_at: The portion before which the attempt is killed.
        """
        rows = encoded(self.shares(plan.batch_id, partition_id))
        async with PartitionPublishing(
            self.transport, plan, partition_id, options=OPTIONS, compares=self._compares(plan)
        ) as publishing:
            for number, start in enumerate(range(0, len(rows), portion)):
                if number == killed_at:
                    raise KilledError
                if not await publishing.put(rows[start : start + portion]):
                    break
            return await publishing.finish()

    async def directly(self, plan: Plan) -> list[PartitionOutcome]:
        """Publish every share that has rows, as the driver does with a small batch."""
        shares = {each: encoded(rows) for each in plan.partition_ids if (rows := self.shares(plan.batch_id, each))}
        is_first, self.is_first = self.is_first, False
        compares = self._compares(plan) and not is_first
        return await publish_shares(
            self.transport, plan, shares, self.kept, OPTIONS, is_first=is_first, compares=compares
        )

    async def tasks(self, plan: Plan) -> list[PartitionOutcome]:
        """Publish every share that has rows."""
        if self.paths():
            return await self.directly(plan)
        await self.kept.aclose()
        if self._compares(plan):
            every = {each: encoded(self.shares(plan.batch_id, each)) for each in plan.partition_ids}
            await compare_shares(self.transport, plan, every, OPTIONS)
        return list(
            await asyncio.gather(
                *(self.attempt(plan, each) for each in plan.partition_ids if self.shares(plan.batch_id, each))
            )
        )

    async def run(self, batch_id: int) -> Done:
        """Publish a batch from beginning to end."""
        with self.calls.call(self.sink, self.driver.run_id, batch_id):
            step = await self.begin(batch_id)
            while isinstance(step, Plan):
                step = await self.finish(step, await self.tasks(step))
            return step


@asynccontextmanager
async def query_of(connection_string: str, path: Path, **options: Any) -> AsyncIterator[Query]:
    """Make a run, closed at the end."""
    settings = connection_settings(connection_string, HUB, retry=RETRY, **CONNECTION)
    transport, store = make_transport(settings), DirectoryLedger(path)
    query: Query | None = None
    try:
        await store.open()
        query = Query(transport, store, **options)
        yield query
    finally:
        if query is not None:
            await query.kept.aclose()
        await transport.aclose()
        await store.aclose()


async def require_exactly(emulator: Emulator, batches: Iterator[int] | range) -> None:
    """Check that the hub holds every row of these batches once, in order."""
    expected = list(batches)
    for each in PARTITIONS:
        rows = [row for batch_id in expected for row in share(batch_id, each)]
        assert await stored(emulator.connection_string, each) == rows, f"partition {each}"


class CountingTransport:
    """A transport that records with what producers are attached."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.attached: list[SendLinkSpec] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    async def open_send_link(self, spec: SendLinkSpec) -> SendLink:
        self.attached.append(spec)
        return await self._transport.open_send_link(spec)


class PlainTransport:
    """A transport to a service that knows nothing of idempotent producers: what asks for them is not passed on."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    @property
    def fully_qualified_namespace(self) -> str:
        return self._transport.fully_qualified_namespace

    async def get_hub_properties(self, hub: str) -> HubProperties:
        return await self._transport.get_hub_properties(hub)

    async def get_partition_properties(self, hub: str, partition_id: str) -> PartitionProperties:
        return await self._transport.get_partition_properties(hub, partition_id)

    async def open_receive_link(self, spec: ReceiveLinkSpec, sink: ReceiveSink) -> ReceiveLink:
        return await self._transport.open_receive_link(spec, sink)

    async def open_send_link(self, spec: SendLinkSpec) -> SendLink:
        return await self._transport.open_send_link(SendLinkSpec(spec.hub, spec.partition_id))

    async def aclose(self) -> None:
        await self._transport.aclose()
