"""Compute a running mean per sensor, in any number of processes; start it twice to see them share the partitions.

    python examples/consume.py --connection-string "Endpoint=..." --hub telemetry --leases leases.db

Stops on Ctrl-C, or after --count events.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence

from eventpump import (
    CheckpointPolicy,
    CloseReason,
    EventProcessor,
    EventProcessorHost,
    EventPumpError,
    PartitionContext,
    ReceivedEvent,
    SqliteLeaseStore,
)


class Means(EventProcessor):
    """One object serves all partitions, so it can keep state between calls."""

    def __init__(self, count: int | None) -> None:
        self.means: dict[str, tuple[int, float]] = {}
        self.left = count
        self.enough = asyncio.Event()

    async def open(self, context: PartitionContext) -> None:
        print(f"partition {context.partition_id} is ours, epoch {context.owner_level}")

    async def process_events(
        self, context: PartitionContext, events: Sequence[ReceivedEvent]
    ) -> None:
        for event in events:
            reading = event.body_as_json()
            number, mean = self.means.get(reading["sensor"], (0, 0.0))
            self.means[reading["sensor"]] = (
                number + 1,
                mean + (reading["celsius"] - mean) / (number + 1),
            )
        if self.left is not None:
            self.left -= len(events)
            if self.left <= 0:
                self.enough.set()

    async def process_error(self, context: PartitionContext, error: Exception) -> None:
        print(f"partition {context.partition_id}: {error}")

    async def close(self, context: PartitionContext, reason: CloseReason) -> None:
        print(f"partition {context.partition_id} is closed: {reason.value}")


async def consume(
    connection_string: str, hub: str, leases: str, count: int | None
) -> None:
    processor = Means(count)
    host = EventProcessorHost(
        connection_string,
        hub,
        processor=processor,
        lease_store=SqliteLeaseStore(leases),
        checkpoint_policy=CheckpointPolicy(every_events=10_000, every_seconds=5),
    )

    async def stop_when_enough() -> None:
        await processor.enough.wait()
        await host.aclose()

    async with host, asyncio.TaskGroup() as tasks:
        stopper = tasks.create_task(stop_when_enough())
        try:
            await host.run(handle_signals=True)
        finally:
            stopper.cancel()
    for sensor, (number, mean) in sorted(processor.means.items()):
        print(f"{sensor}: {mean:.2f} °C over {number} readings")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    given = os.environ.get("EVENTPUMP_CONNECTION_STRING")
    parser.add_argument("--connection-string", default=given, required=given is None)
    parser.add_argument("--hub", default="telemetry")
    parser.add_argument(
        "--leases",
        default="leases.db",
        help="a SQLite file; hosts that share it share the partitions",
    )
    parser.add_argument("--count", type=int, help="stop after this many events")
    args = parser.parse_args()
    try:
        asyncio.run(consume(args.connection_string, args.hub, args.leases, args.count))
    except (EventPumpError, ExceptionGroup, KeyboardInterrupt) as error:
        first = error.exceptions[0] if isinstance(error, ExceptionGroup) else error
        sys.exit(f"{type(first).__name__}: {first}")
