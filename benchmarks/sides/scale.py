"""Hosts of many partitions: from the start to events from all of them, idle, and with events coming."""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eventpump import EventProcessor, EventProcessorHost
from eventpump.consumer.processor import PartitionContext
from eventpump.core.checkpoint import CheckpointPolicy
from eventpump.eventhubs.events import ReceivedEvent
from eventpump.sources.memory import MemorySource
from eventpump.storage.leases.memory import MemoryLeases, MemoryLeaseStore

BODY = b"x" * 1024
SETTLE = 6.0
"""Seconds until the first checkpoints are written (after 5 s); they are not part of what idle hosts do permanently."""


class Seen:
    """Which partitions had an event, and how many events there were, on all hosts."""

    def __init__(self) -> None:
        self.partitions: set[str] = set()
        self.events = 0
        self.news = asyncio.Event()

    async def until(self, partitions: int, events: int, timeout: float) -> None:
        """Wait until so many partitions have had an event, and there were so many events."""
        async with asyncio.timeout(timeout):
            while len(self.partitions) < partitions or self.events < events:
                self.news.clear()
                await self.news.wait()


class Counting(EventProcessor):
    """Counts what comes."""

    def __init__(self, seen: Seen) -> None:
        self._seen = seen

    async def process_events(self, context: PartitionContext, events: Sequence[ReceivedEvent]) -> None:
        """Count a batch."""
        self._seen.partitions.add(context.partition_id)
        self._seen.events += len(events)
        self._seen.news.set()


def resident() -> float:
    """Return the resident memory of this process, in MiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    return 0.0


async def fill(connection_string: str, hub: str, partitions: int, each: int) -> None:
    """Send events to every partition, from another process, so that this one's CPU time has no part in it."""
    arguments = {"connection_string": connection_string, "hub": hub, "partitions": partitions}
    text = json.dumps({**arguments, "events": partitions * each, "body_size": len(BODY)})
    command = (sys.executable, "-m", "benchmarks.sides", "ours:fill", text, "asyncio")
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.DEVNULL)
    if code := await process.wait():
        raise RuntimeError(f"sending events ended with code {code}")


async def scale(
    partitions: int,
    hosts: int,
    each: int,
    idle: float,
    connection_string: str | None = None,
    hub: str | None = None,
    interval: float = 0.0,
) -> dict[str, float]:
    """Run hosts in this process.

    Args:
        partitions: How many there are; each has one event at the start.
        hosts: How many hosts share them.
        each: How many more events of each partition are processed then. With a service another process sends them.
        idle: Seconds for which nothing happens, to measure what that costs.
        connection_string: Of an emulator whose partitions have one event each; None for a source in memory.
        hub: The hub there.
        interval: The `delivery_interval`, in seconds.

    Returns:
        `start`: seconds until all partitions had an event; `start_cpu`: the CPU seconds of that; `idle`: per cent of a
        core; `memory`: MiB more than before the first host; `cost`: microseconds of CPU per event, without
        what is spent when idle.
    """
    seen, leases = Seen(), MemoryLeases()
    source = None if connection_string else MemorySource(partitions)
    if source is not None:
        for number in range(partitions):
            source.append(str(number), BODY)
    gc.collect()
    before = resident()
    place: dict[str, Any] = {"source": source} if source is not None else {}
    given = () if source is not None else (connection_string, hub)
    running = [
        EventProcessorHost(
            *given,
            **place,
            processor=Counting(seen),
            lease_store=MemoryLeaseStore(leases),
            checkpoint_policy=CheckpointPolicy(every_seconds=5.0),
            owner_id=f"host-{number}",
            delivery_interval=interval,
        )
        for number in range(hosts)
    ]
    wall, cpu = time.perf_counter(), time.process_time()
    tasks = [asyncio.create_task(host.run()) for host in running]
    try:
        await seen.until(partitions, partitions, 300)
        found = {"start": time.perf_counter() - wall, "start_cpu": time.process_time() - cpu}
        if idle:
            await asyncio.sleep(SETTLE)
            gc.collect()
            wall, cpu = time.perf_counter(), time.process_time()
            await asyncio.sleep(idle)
            found["idle"] = (time.process_time() - cpu) / (time.perf_counter() - wall) * 100
        found["memory"] = resident() - before
        wall, cpu = time.perf_counter(), time.process_time()
        if source is not None:
            for number in range(partitions):
                began = time.process_time()
                source.append(str(number), *(BODY for _ in range(each)))
                cpu += time.process_time() - began
                # All at once would block the event loop for so long that leases are lost.
                await asyncio.sleep(0)
        elif connection_string is not None and hub is not None:
            await fill(connection_string, hub, partitions, each)
        await seen.until(partitions, partitions * (each + 1), 300)
        # It takes long until all are there. What the host would have done without them is not their cost.
        cpu += found.get("idle", 0.0) / 100 * (time.perf_counter() - wall)
        found["cost"] = (time.process_time() - cpu) / (each * partitions) * 1e6
    finally:
        for host in running:
            await host.aclose()
        await asyncio.gather(*tasks)
    return found
