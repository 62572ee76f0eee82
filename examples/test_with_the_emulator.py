"""How to test your own processor against the local service: `pytest examples`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

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
from eventpump.testing.fixtures import eventpump_emulator

__all__ = ["eventpump_emulator"]  # a fixture is found by its name in the module


class Collector(EventProcessor):
    """The processor under test."""

    def __init__(self, expected: int) -> None:
        self.bodies: list[str] = []
        self.expected = expected
        self.all_here = asyncio.Event()

    async def process_events(self, context: PartitionContext, events: Sequence[ReceivedEvent]) -> None:
        self.bodies += [event.body_as_str() for event in events]
        if len(self.bodies) >= self.expected:
            self.all_here.set()


async def test_a_processor_sees_every_event(eventpump_emulator: Emulator) -> None:
    """Whatever partition the service chooses, the processor gets the event."""
    connection_string = eventpump_emulator.connection_string
    async with EventProducer(connection_string, "telemetry") as producer:
        for number in range(10):
            await producer.send(EventData(f"reading {number}"))
    collector = Collector(expected=10)
    host = EventProcessorHost(connection_string, "telemetry", processor=collector, lease_store=MemoryLeaseStore())
    async with host:
        running = asyncio.create_task(host.run())
        await asyncio.wait_for(collector.all_here.wait(), timeout=30)
        await host.aclose()
        await running
    assert sorted(collector.bodies) == sorted(f"reading {number}" for number in range(10))
