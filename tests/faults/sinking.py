"""A query without Spark, for the faults of the idempotent sink: its batches, its driver, and attempts at its shares.

What a batch holds follows from its number alone, unless a test says otherwise.
"""

from __future__ import annotations

import hashlib
import random
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
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
    Stores,
    finish_batch,
    plan_batch,
    prepare_batch,
    sink_of,
)
from eventpump.spark.sink.kept import KeptBatch, RowReader, encode_segments, segmented
from eventpump.spark.sink.patience import retried
from eventpump.spark.sink.protocol import DriverRun, MicroBatch, OnProducerStateLost, Unplanned, WrittenRows
from eventpump.spark.sink.publishing import KeptPublishers, publish_rows
from eventpump.spark.sink.records import Done, KeptRows, PackingLimits, PartitionOutcome, Plan, Sink, rows_stem
from eventpump.storage.ledgers.directory import DirectoryLedger
from eventpump.storage.rows.directory import DirectoryRowStore
from eventpump.storage.rows.interface import RowStore
from tests.faults.programs import CONNECTION, HUB, RETRY, stored

PARTITIONS = ("0", "1", "2", "3")
LIMITS = PackingLimits(max_events=7)
OPTIONS = PublishOptions(
    retry=RetryOptions(max_retries=20, base_delay=0.002, max_delay=0.02),
    buffer_bytes=300,
    scan_timeout=20.0,
)


PATHS: dict[str, Callable[[random.Random], Callable[[], bool]]] = {
    "switching": lambda rng: lambda: rng.random() < 0.5,
    "small": lambda _: lambda: True,
    "tasks": lambda _: lambda: False,
}
"""Who writes and publishes a batch: the driver, as a small one, or tasks."""


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
        paths: Return whether the driver has the rows of the next batch, and publishes it itself, as a small one.
        on_plan: Called when a plan of the query's own rows is made.
        may_repeat: Whether an earlier run may have begun the batch.
    """

    transport: Transport
    store: DirectoryLedger
    rows: RowStore
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
    batch_of: KeptBatch | None = None
    on_plan: Callable[[], None] = lambda: None
    sink_id: str = "sink"
    part: str | None = None
    may_repeat: bool = True
    calls: BatchCalls = field(default_factory=BatchCalls)

    @property
    def sink(self) -> Sink:
        """The sink."""
        return sink_of(self.transport.fully_qualified_namespace, HUB, self.sink_id, self.part)

    @property
    def stores(self) -> Stores:
        """The stores."""
        return Stores(self.store, self.rows)

    def batch(self, batch_id: int) -> MicroBatch:
        """Announce a batch."""
        values: dict[str, Any] = {"first_batch": self.first_batch, "may_repeat": self.may_repeat}
        if self.renew_at is not None:
            values["renew_at"] = self.renew_at
        return MicroBatch(self.sink, "query", self.driver, batch_id, self.limits, self.is_stamped, **values)

    async def begin(self, batch_id: int, *, is_small: bool = True) -> Plan | Done:
        """Begin a batch.

        Args:
            is_small: Whether the driver has the rows, and no task writes them.
        """
        batch = self.batch(batch_id)
        step = await retried(lambda: prepare_batch(self.stores, self.transport, batch, OPTIONS))
        self.is_first, self.batch_of = False, None
        if isinstance(step, Unplanned):
            unplanned = step
            kept, rows = await self.write(batch_id, unplanned.partition_ids, is_small=is_small)
            step = await retried(lambda: plan_batch(self.stores, self.transport, unplanned, rows, OPTIONS))
            self.is_first = step.rows == rows.kept
            self.batch_of = kept if self.is_first else None
            if self.is_first:
                self.on_plan()
        if isinstance(step, Plan) and step.rows is not None and self.batch_of is None:
            raw = await self.rows.read(f"{self.sink.rows_directory}/{step.rows.name}", 0, step.rows.size)
            assert raw is not None
            self.batch_of = KeptBatch.decode(raw, step.rows)
        return step

    async def write(
        self, batch_id: int, partition_ids: tuple[str, ...], *, is_small: bool
    ) -> tuple[KeptBatch, WrittenRows]:
        """Keep the rows of a batch, as two tasks and the driver do."""
        await self.rows.begin(f"{self.sink.rows_directory}/token")
        stem = f"{self.sink.rows_directory}/{rows_stem(batch_id)}"
        found: list[tuple[str, bytes | None]] = []
        for task in range(2):
            partitions: list[int] = []
            events: list[bytes] = []
            for number, each in enumerate(partition_ids):
                rows = encoded(self.shares(batch_id, each))
                own = rows[: len(rows) // 2] if task == 0 else rows[len(rows) // 2 :]
                partitions += [number] * len(own)
                events += own
            if events:
                parts, segments = segmented(partitions, events, is_compressed=not is_small and task == 0)
                if is_small:
                    found.append((encode_segments(segments), b"".join(parts)))
                else:
                    name = (await self.rows.write(stem, parts)).rpartition("/")[2]
                    found.append((encode_segments(replace(each, name=name) for each in segments), None))
        batch = KeptBatch.collected(found)
        if not found:
            return batch, WrittenRows(None, {}, {})
        raw = batch.encode()
        name = (await self.rows.write(stem, [raw])).rpartition("/")[2]
        kept = KeptRows(name=name, size=len(raw), digest=hashlib.sha256(raw).hexdigest())
        counts = {partition_ids[number]: count for number, count in batch.counts.items()}
        return batch, WrittenRows(kept, batch.objects, counts)

    async def plan(self, batch_id: int, *, is_small: bool = True) -> Plan:
        """Begin a batch that is not done."""
        step = await self.begin(batch_id, is_small=is_small)
        assert isinstance(step, Plan)
        return step

    async def finish(self, plan: Plan, outcomes: list[PartitionOutcome]) -> Plan | Done:
        """Finish a batch."""
        batch = self.batch(plan.batch_id)
        return await retried(
            lambda: finish_batch(self.stores, self.transport, batch, plan, outcomes, self.policy, OPTIONS)
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
        async with PartitionPublishing(self.transport, plan, partition_id, options=OPTIONS) as publishing:
            for number, start in enumerate(range(0, len(rows), portion)):
                if number == killed_at:
                    raise KilledError
                await publishing.put(start, rows[start : start + portion])
            return await publishing.finish()

    async def tasks(self, plan: Plan, *, only: list[str] | None = None) -> list[PartitionOutcome]:
        """Publish every share that has rows, from what is kept: as the driver a small batch, and as tasks others."""
        is_first, self.is_first = self.is_first, False
        if self.batch_of is None:
            return []
        kept = self.kept if self.batch_of.is_small else None
        if kept is None:
            await self.kept.aclose()
        reader = RowReader(self.rows, self.sink.rows_directory, self.batch_of, timeout=1.0)
        return await publish_rows(
            self.transport, plan, reader, OPTIONS, only=only, kept=kept, is_first=is_first and kept is not None
        )

    async def run(self, batch_id: int) -> Done:
        """Publish a batch from beginning to end."""
        with self.calls.call(self.sink, self.driver.run_id, batch_id):
            step = await self.begin(batch_id, is_small=self.paths())
            while isinstance(step, Plan):
                step = await self.finish(step, await self.tasks(step))
            return step


@asynccontextmanager
async def query_of(connection_string: str, path: Path, **options: Any) -> AsyncIterator[Query]:
    """Make a run, closed at the end."""
    settings = connection_settings(connection_string, HUB, retry=RETRY, **CONNECTION)
    transport, store, rows = make_transport(settings), DirectoryLedger(path), DirectoryRowStore(path / "rows~")
    query: Query | None = None
    try:
        await store.open()
        await rows.open()
        query = Query(transport, store, rows, **options)
        yield query
    finally:
        if query is not None:
            await query.kept.aclose()
        await transport.aclose()
        await store.aclose()
        await rows.aclose()


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
