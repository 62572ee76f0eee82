"""A host whose handlers stand still at the first large event, in a process of its own: what it holds is measured.

`python -m tests.integration.buffering_program CONNECTION_STRING HUB PARTITIONS MAX_BUFFERED_BYTES EVENTS` prints, as
JSON, the most that the host counted and the most that the process had allocated beyond what it had before, in bytes.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tracemalloc
from collections.abc import Sequence
from typing import Any

from eventpump import EventProcessor, EventProcessorHost, PartitionContext, ReceivedEvent
from eventpump.consumer.link.feed import PartitionFeed
from eventpump.storage.leases.memory import MemoryLeaseStore

LARGE = 10_000


class StandingStill(EventProcessor):
    """Processes small events, and waits at the first large one of each partition until `go_on` is set."""

    def __init__(self) -> None:
        self.standing: set[str] = set()
        self.counts: dict[str, int] = {}
        self.changed = asyncio.Event()
        self.go_on = asyncio.Event()

    async def process_events(self, context: PartitionContext, events: Sequence[ReceivedEvent]) -> None:
        """Count the events."""
        if any(len(event.raw) > LARGE for event in events):
            self.standing.add(context.partition_id)
            self.changed.set()
            await self.go_on.wait()
        first = self.counts.get(context.partition_id, 0)
        assert [event.sequence_number for event in events] == list(range(first, first + len(events)))
        self.counts[context.partition_id] = first + len(events)
        self.changed.set()


async def main(connection_string: str, hub: str, partitions: int, max_buffered_bytes: int, count: int) -> None:
    """Run the host until it has processed everything."""
    processor = StandingStill()
    host = EventProcessorHost(
        connection_string,
        hub,
        processor=processor,
        lease_store=MemoryLeaseStore(),
        max_buffered_bytes=max_buffered_bytes,
        max_batch_size=50,
    )
    feeds: dict[PartitionFeed[Any], None] = {}
    most = 0
    receive = PartitionFeed.messages

    def messages(feed: PartitionFeed[Any], batch: list[bytes]) -> None:
        nonlocal most
        receive(feed, batch)
        feeds[feed] = None
        most = max(most, host.buffered_bytes)

    PartitionFeed.messages = messages  # type: ignore[assignment,method-assign]  # to see each batch that comes

    async def until(holds: Any) -> None:
        while not holds():
            processor.changed.clear()
            await processor.changed.wait()

    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    run = asyncio.create_task(host.run())
    async with asyncio.timeout(100):
        await until(lambda: len(processor.standing) == partitions)
        # What was sent before the answer to a probe has come by then.
        for _ in range(2):
            for feed in list(feeds):
                if feed.link is not None:
                    await feed.link.probe(10)
        peak = tracemalloc.get_traced_memory()[1] - before
        tracemalloc.stop()
        processor.go_on.set()
        await until(lambda: sum(processor.counts.values()) == count)
    await host.aclose()
    await run
    sys.stdout.write(json.dumps({"counted": most, "allocated": peak, "left": host.buffered_bytes}))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])))
