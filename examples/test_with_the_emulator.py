"""How to test your own processor against the local service: `pytest examples`.

The fixtures come with eventpump: pytest loads its plugin by itself. They need pytest-asyncio, except for the last one:
`pip install '.[testing]'`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

try:
    import pytest
except ModuleNotFoundError as error:
    raise SystemExit(f"{error}: pip install 'eventpump[testing]'") from None

from eventpump import (
    Emulator,
    EventData,
    EventProcessor,
    EventProcessorHost,
    EventProducer,
    MemoryLeaseStore,
    PartitionContext,
    ReceivedEvent,
)
from eventpump.emulator.faults import DropConnection, LinkRole
from eventpump.testing.threaded import EmulatorThread


class Collector(EventProcessor):
    """The processor under test."""

    def __init__(self, expected: int) -> None:
        self.bodies: list[str] = []
        self.expected = expected
        self.all_here = asyncio.Event()

    async def process_events(
        self, context: PartitionContext, events: Sequence[ReceivedEvent]
    ) -> None:
        self.bodies += [event.body_as_str() for event in events]
        if len(self.bodies) >= self.expected:
            self.all_here.set()


@pytest.mark.asyncio
async def test_a_processor_sees_every_event(eventpump_emulator: Emulator) -> None:
    """Whatever partition the service chooses, the processor gets the event."""
    connection_string = eventpump_emulator.connection_string
    async with EventProducer(connection_string, "telemetry") as producer:
        for number in range(10):
            await producer.send(EventData(f"reading {number}"))
    collector = Collector(expected=10)
    host = EventProcessorHost(
        connection_string,
        "telemetry",
        processor=collector,
        lease_store=MemoryLeaseStore(),
    )
    async with asyncio.timeout(30), host:
        await host.run(until=collector.all_here.wait())
    assert sorted(collector.bodies) == sorted(
        f"reading {number}" for number in range(10)
    )


@pytest.mark.asyncio
async def test_a_processor_sees_every_event_over_a_lost_connection(
    eventpump_emulator: Emulator,
) -> None:
    """The service drops the connection in the middle; no event is left out, and none comes twice."""
    connection_string = eventpump_emulator.connection_string
    async with EventProducer(connection_string, "telemetry") as producer:
        await producer.send(
            [EventData(f"reading {number}") for number in range(100)], partition_id="0"
        )
    fault = eventpump_emulator.faults.add(
        DropConnection(), role=LinkRole.CONSUMER, partition="0", after=40
    )
    collector = Collector(expected=100)
    host = EventProcessorHost(
        connection_string,
        "telemetry",
        processor=collector,
        lease_store=MemoryLeaseStore(),
    )
    async with asyncio.timeout(30), host:
        await host.run(until=collector.all_here.wait())
    assert fault.fired == 1
    assert collector.bodies == [f"reading {number}" for number in range(100)]


def test_a_program_without_a_loop(eventpump_emulator_thread: EmulatorThread) -> None:
    """Code that starts its own loop, or is not asyncio at all, finds the service on another thread."""

    async def publish_and_consume(connection_string: str) -> list[str]:
        async with EventProducer(connection_string, "telemetry") as producer:
            await producer.send(EventData("reading"))
        collector = Collector(expected=1)
        host = EventProcessorHost(
            connection_string,
            "telemetry",
            processor=collector,
            lease_store=MemoryLeaseStore(),
        )
        async with asyncio.timeout(30), host:
            await host.run(until=collector.all_here.wait())
        return collector.bodies

    assert asyncio.run(
        publish_and_consume(eventpump_emulator_thread.connection_string)
    ) == ["reading"]
