"""On uvloop, whose handles differ from asyncio's: what is due at once has no time of its own there."""

from __future__ import annotations

import asyncio

import pytest

from eventpump import BufferedProducer, Emulator, EventData, PartitionReader

uvloop = pytest.importorskip("uvloop")

EVENTS = 300


def test_buffered_producer_on_uvloop_loses_nothing() -> None:
    """A buffer whose batches wait for no other event, fed by several tasks without a pause, loses nothing."""

    async def main() -> None:
        async with Emulator({"telemetry": 1}) as emulator:
            producer = BufferedProducer(emulator.connection_string, "telemetry", max_wait_time=0, max_batch_events=7)

            async def send(first: int) -> None:
                for number in range(first, EVENTS, 3):
                    await producer.send(EventData(str(number)), partition_id="0")

            async with producer:
                await asyncio.gather(*map(send, range(3)))
            reader = PartitionReader(emulator.connection_string, "telemetry", partition_id="0", end="@latest")
            async with reader:
                found = sorted([int(event.body_as_str()) async for event in reader])
            assert found == list(range(EVENTS))

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
