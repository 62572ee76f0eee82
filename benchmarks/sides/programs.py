"""eventpump's sides of what programs do with events, beyond reading them in a processor."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from benchmarks.sides.common import EventTally, Fleet
from benchmarks.sides.models import PlainReport, Report
from eventpump import (
    BufferedProducer,
    CloudEvent,
    EventHubsApp,
    EventProcessor,
    EventProcessorHost,
    MemoryLeaseStore,
    PartitionContext,
    ReceivedEvent,
)

Options = dict[str, Any]


async def app(
    connection_string: str,
    hub: str,
    partitions: int,
    events: int,
    available: int,
    work: str,
    options: Options | None = None,
) -> dict[str, float]:
    """Handle so many events by a decorated function that takes the payload as a model.

    Args:
        work: `pydantic` or `msgspec`; or `traceparent`: pydantic, and a middleware that reads this property.
        options: Of the connection; the others as of `EventTally`.
    """
    tally = EventTally(partitions, events, available)
    fleet = Fleet()
    traces: set[str] = set()

    async def traced(context: PartitionContext, event: ReceivedEvent, call: Callable[[], Awaitable[Any]]) -> Any:
        parent = event.properties.get("traceparent")
        if parent is not None:
            traces.add(str(parent)[:1])
        return await call()

    program = EventHubsApp(
        connection_string,
        lease_store=MemoryLeaseStore,
        max_batch_size=300,
        failure_policy="stop",
        middleware=traced if work == "traceparent" else None,
        **(options or {}),
    )

    def handled(device: str, celsius: float, partition_id: str, number: int) -> None:
        fleet.temperatures[device] = celsius
        if tally.add(partition_id, number):
            program.stop()

    if work == "msgspec":

        @program.subscriber(hub)
        async def watch_plain(report: PlainReport, event: ReceivedEvent, context: PartitionContext) -> None:
            handled(report.dev, report.temp, context.partition_id, event.sequence_number)

    else:

        @program.subscriber(hub)
        async def watch(report: Report, event: ReceivedEvent, context: PartitionContext) -> None:
            handled(report.dev, report.temp, context.partition_id, event.sequence_number)

    await program.run_async()
    return tally.meter.result()


class _CloudEvents(EventProcessor):
    """Reads each event as a CloudEvent."""

    def __init__(self, tally: EventTally) -> None:
        self._tally = tally
        self._fleet = Fleet()

    async def process_events(self, context: PartitionContext, events: Sequence[ReceivedEvent]) -> None:
        for event in events:
            report: Any = CloudEvent.from_event(event).data
            self._fleet.temperatures[report["dev"]] = report["temp"]
            self._tally.add(context.partition_id, event.sequence_number)


class _Forwarding(EventProcessor):
    """Sends each event on."""

    def __init__(self, tally: EventTally, producer: BufferedProducer) -> None:
        self._tally = tally
        self._producer = producer

    async def process_events(self, context: PartitionContext, events: Sequence[ReceivedEvent]) -> None:
        for event in events:
            await self._producer.send(event.to_event_data(), partition_key=event.partition_key)
            self._tally.add(context.partition_id, event.sequence_number)


class _Checkpointing(EventProcessor):
    """Stores a checkpoint after each event."""

    def __init__(self, tally: EventTally) -> None:
        self._tally = tally

    async def process_events(self, context: PartitionContext, events: Sequence[ReceivedEvent]) -> None:
        for event in events:
            await context.checkpoint(event)
            self._tally.add(context.partition_id, event.sequence_number)


async def host(
    connection_string: str,
    hub: str,
    partitions: int,
    events: int,
    available: int,
    work: str,
    options: Options | None = None,
) -> dict[str, float]:
    """Process so many events by a host.

    Args:
        work: `cloudevents`, `forward` or `checkpoint`.
        options: Of the connection; the others as of `EventTally`.
    """
    tally = EventTally(partitions, events, available)
    async with BufferedProducer(connection_string, hub, **(options or {})) as producer:
        running = EventProcessorHost(
            connection_string,
            hub,
            processor=_processor(work, tally, producer),
            lease_store=MemoryLeaseStore(),
            max_batch_size=300,
            failure_policy="stop",
            **(options or {}),
        )
        tally.stop = running.stop
        async with running:
            await running.run()
    return tally.meter.result()


def _processor(work: str, tally: EventTally, producer: BufferedProducer) -> EventProcessor:
    match work:
        case "cloudevents":
            return _CloudEvents(tally)
        case "forward":
            return _Forwarding(tally, producer)
    return _Checkpointing(tally)
