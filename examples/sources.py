"""Process synthetic events, repeatable and without any service: `python examples/sources.py`.

The processor counts the events per key. Links are lost on the way, as they are in the field; nothing is lost with them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from collections import Counter
from collections.abc import Sequence

from eventpump import (
    EventProcessor,
    EventProcessorHost,
    GeneratorSource,
    MemoryLeaseStore,
    MemorySource,
    PartitionContext,
    PartitionReader,
    ReceivedEvent,
)


class Hottest(EventProcessor):
    """Finds the highest value of each sensor."""

    def __init__(self, expected: int) -> None:
        self.highest: dict[str, float] = {}
        self.events = 0
        self.expected = expected
        self.all_here = asyncio.Event()

    async def process_events(
        self, context: PartitionContext, events: Sequence[ReceivedEvent]
    ) -> None:
        for event in events:
            key, value = event.partition_key or "", event.body_as_json()["value"]
            self.highest[key] = max(value, self.highest.get(key, value))
        self.events += len(events)
        if self.events >= self.expected:
            self.all_here.set()


def reading(partition_id: str, number: int, rng: random.Random) -> str:
    """Return a body. The random numbers repeat with the event."""
    return json.dumps({"value": round(rng.gauss(20, 5), 2)})


async def synthetic(events: int) -> None:
    """Process what a generator makes."""
    processor = Hottest(expected=2 * events)
    async with GeneratorSource(
        seed=7, partitions=2, events=events, rate=None, keys=5, skew=1.0, body=reading
    ) as source:
        host = EventProcessorHost(
            source=source, processor=processor, lease_store=MemoryLeaseStore()
        )
        running = asyncio.create_task(host.run())
        await processor.all_here.wait()
        await host.aclose()
        await running
        print(
            f"{processor.events} events; the hottest sensor was at {max(processor.highest.values())}"
        )
        async with PartitionReader(
            source=source, partition_id="1", position=9, end=11
        ) as reader:
            print(
                "numbers 10 and 11 of partition 1 are always",
                [event.body_as_str() async for event in reader],
            )


async def appended() -> None:
    """Read what a test appends, over links that are lost."""
    source, counts = MemorySource(), Counter[str]()
    async with PartitionReader(source=source, partition_id="0") as reader:
        for number in range(300):
            source.append(
                "0", f"reading {number}", partition_key=f"sensor-{number % 3}"
            )
            if number % 50 == 0:
                source.lose_links()
        source.end()
        async for event in reader:
            counts[event.partition_key or ""] += 1
    print("over lost links:", dict(sorted(counts.items())))


def main() -> None:
    """Run both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--events", type=int, default=2000, help="per partition (default: %(default)s)"
    )
    asyncio.run(synthetic(parser.parse_args().events))
    asyncio.run(appended())


if __name__ == "__main__":
    main()
