"""A program as a user writes it, for type checkers (`test_checkers.py`). It uses public names only, and is not run."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import assert_type

from eventpump import (
    BufferedProducer,
    CheckpointPolicy,
    CloseReason,
    EventData,
    EventPosition,
    EventProcessor,
    EventProcessorHost,
    EventProducer,
    FairBalancer,
    GreedyBalancer,
    HashRouter,
    MemoryLeases,
    MemoryLeaseStore,
    Park,
    PartitionContext,
    PartitionReader,
    ReceivedEvent,
    RetryOptions,
    RingBalancer,
    RingRouter,
    SendResult,
    SqliteLeaseStore,
    SqlitePublisherStateStore,
    StaticAssignment,
    make_transport,
)
from eventpump.interfaces import (
    Checkpoint,
    FleetView,
    LeasePlan,
    LeaseStore,
    PartitionBalancer,
    PartitionRouter,
    Transport,
)
from eventpump.options import ConnectionOptions, HostOptions, SubscriptionOptions, connection_settings
from eventpump.reports import DataLost, HostReport


class Alerts(EventProcessor):
    """Overrides every method."""

    async def open(self, context: PartitionContext) -> None:
        assert_type(context.partition_id, str)

    async def process_events(self, context: PartitionContext, events: Sequence[ReceivedEvent]) -> None:
        for event in events:
            assert_type(event.sequence_number, int)
        await context.checkpoint()

    async def process_error(self, context: PartitionContext, error: Exception) -> None:
        assert_type(context.lag, int | None)

    async def close(self, context: PartitionContext, reason: CloseReason) -> None:
        assert reason is not CloseReason.FAILED


async def process(context: PartitionContext, events: Sequence[ReceivedEvent]) -> None:
    """Processes events without a class."""
    await context.checkpoint(events[-1])


def make_alerts(threshold: float) -> Alerts:
    """A function that is given with its argument."""
    assert threshold > 0
    return Alerts()


async def run_functions(connection_string: str) -> None:
    """Coroutine functions and factories as processors, and every form of a position."""
    store = MemoryLeaseStore(MemoryLeases())
    host = EventProcessorHost(connection_string, processor=process, lease_store=store)
    await host.subscribe("second", process, start="earliest", catch_up="shared")
    await host.subscribe(
        "third", partial(make_alerts, 1.5), start={"0": 17, "1": timedelta(hours=-1)}, catch_up="shared"
    )
    await host.subscribe("fourth", lambda: Alerts(), start=datetime(2024, 1, 1, tzinfo=UTC), catch_up="shared")
    await host.run(until=asyncio.sleep(60))
    EventProcessorHost(connection_string, processor=process, lease_store=store, initial_position=timedelta(hours=-1))
    EventProcessorHost(
        connection_string,
        processor=process,
        lease_store=store,
        checkpoint_policy=CheckpointPolicy.manual(),
        initial_position={"0": "latest", "1": "earliest", "2": "@latest", "3": EventPosition.at_offset("512")},
    )
    async with PartitionReader(connection_string, partition_id="0", position="earliest", end="latest") as reader:
        assert_type(await reader.read_all(), list[ReceivedEvent])


class OddRouter:
    """A router of the user's own."""

    def __init__(self) -> None:
        self._others = HashRouter()

    def route(self, event: EventData, partition_key: str | None, partition_ids: Sequence[str]) -> str:
        return self._others.route(event, partition_key, partition_ids[1::2])


class EvenBalancer:
    """A balancer of the user's own."""

    def __init__(self) -> None:
        self._others = FairBalancer(maturity=30)

    def plan(self, view: FleetView) -> LeasePlan:
        assert_type(view.leases[0].epoch, int | None)
        even = tuple(each.partition_id for each in view.leases if int(each.partition_id) % 2 == 0 and not each.is_held)
        return LeasePlan(acquire=even) if view.age < 60 else self._others.plan(view)


def balancer_of(name: str) -> PartitionBalancer:
    """Any of them."""
    every: dict[str, PartitionBalancer] = {
        "even": EvenBalancer(),
        "greedy": GreedyBalancer(limit=4),
        "ring": RingBalancer(),
        "static": StaticAssignment(ordinal=0, of=2),
        "list": StaticAssignment(["0"]),
    }
    return every[name]


def log(report: HostReport) -> None:
    """A hook."""
    if isinstance(report, DataLost):
        assert_type(report.loss.first_missing, int)
    logging.info(report.describe())


async def consume(connection_string: str, level: int | None) -> None:
    """Receives."""
    store: LeaseStore = SqliteLeaseStore("leases.db")
    settings: HostOptions = {
        "prefetch_events": 1000,
        "checkpoint_policy": CheckpointPolicy(every_seconds=5.0),
        "initial_position": {"0": EventPosition.latest(), "1": datetime(2024, 1, 1, tzinfo=UTC), "2": 17},
        "handler_retry": RetryOptions(max_retries=5),
        "renew_interval": None,
        "balancer": balancer_of("even"),
        "weight": 2.0,
    }
    host = EventProcessorHost(
        connection_string,
        "telemetry",
        processor=Alerts,
        lease_store=store,
        hooks=[log],
        **settings,
    )
    options: SubscriptionOptions = {"start": timedelta(days=-1), "catch_up": "shared", "max_batch_size": None}
    async with host:
        await host.subscribe("archive", Alerts, **options)
        await host.subscribe("audit", Alerts, on_slow="suspend")
        await host.unsubscribe("audit", keep_checkpoint=True)
        await host.run(handle_signals=True)
    assert_type(host.hub, str)
    assert_type(host.fully_qualified_namespace, str)
    assert_type(host.is_closed, bool)
    async with PartitionReader(connection_string, partition_id="0", end="@latest", owner_level=level) as reader:
        async for event in reader:
            assert_type(event, ReceivedEvent)


async def keep(context: PartitionContext, event: ReceivedEvent, error: Exception) -> None:
    """Stores an event that cannot be processed."""
    logging.error("%s of %s: %s", event.offset, context.partition_id, error)


async def subscribe(connection_string: str, producer: EventProducer, buffered: BufferedProducer) -> None:
    """Several processors, each with a failure policy."""
    host = EventProcessorHost(
        connection_string, lease_store=SqliteLeaseStore("leases.db"), failure_policy="skip", on_retries_exhausted="stop"
    )
    await host.subscribe("first", Alerts, failure_policy=Park("parked"))
    await host.subscribe("second", Alerts, failure_policy=Park(keep))
    await host.subscribe("third", Alerts, on_retries_exhausted=Park(producer), handler_retry=RetryOptions())
    await host.subscribe("fourth", Alerts, on_retries_exhausted=Park(buffered), failure_policy="retry")
    await host.run()


async def publish(connection_string: str) -> None:
    """Sends."""
    connection: ConnectionOptions = {"transport_type": "websocket", "idle_timeout": 30.0}
    async with EventProducer(
        connection_string,
        idempotent=True,
        name="meter",
        state_store=SqlitePublisherStateStore("states.db"),
        mode="exclusive",
        router=RingRouter(),
        **connection,
    ) as producer:
        batch = await producer.create_batch(partition_id="0")
        if not batch.try_add(EventData(b"one", properties={"unit": "W"})):
            raise ValueError("too large")
        await producer.send(batch)
    router: PartitionRouter = OddRouter()
    async with BufferedProducer(connection_string, router=router, max_wait_time=0.1) as buffered:
        receipt = await buffered.send(EventData("21.5"), partition_key="sensor-7")
        assert_type(await receipt, SendResult)


async def share(connection_string: str) -> None:
    """Two clients on one connection."""
    transport: Transport = make_transport(connection_settings(connection_string, "telemetry"))
    try:
        async with (
            EventProducer(hub="telemetry", transport=transport, owns_transport=False) as producer,
            PartitionReader(hub="telemetry", partition_id="0", transport=transport, owns_transport=False) as reader,
        ):
            await producer.send(EventData(b"one"))
            assert_type(await reader.read(), list[ReceivedEvent])
    finally:
        await transport.aclose()


def own_store(connection_string: str) -> EventProcessorHost:
    """A store in memory, for tests."""
    assert_type(Checkpoint("0", "512", 12).sequence_number, int)
    return EventProcessorHost(connection_string, processor=Alerts(), lease_store=MemoryLeaseStore(MemoryLeases()))
