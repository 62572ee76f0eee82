"""Watch readings and publish alerts: an application of decorated functions.

    python examples/app.py --count 500

`watch` handles the readings of different devices at the same time, and those of one device in order; what it returns is
published before the checkpoint of the reading. A reading that is no valid JSON is parked at once. `notify` reads the
alerts. Without a connection string all of it happens in a local service, which ends with the program.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path

from pydantic import BaseModel

from eventpump import (
    BufferedProducer,
    CheckpointPolicy,
    Emulator,
    EventData,
    EventHubsApp,
    EventPumpError,
    Park,
    PartitionContext,
    ReceivedEvent,
    RetryOptions,
    SqliteLeaseStore,
)


class Reading(BaseModel):
    """What a device sends."""

    device: str
    celsius: float


class Alert(BaseModel):
    """What `watch` returns for a reading that is too high."""

    device: str
    celsius: float
    partition: str


def make_app(
    connection_string: str, folder: Path, expected: Counter[str], counts: Counter[str]
) -> EventHubsApp:
    """Return the application. It stops when as many readings and alerts are counted as are expected."""
    app = EventHubsApp(
        connection_string,
        lease_store=lambda: SqliteLeaseStore(folder / "leases.db"),
        checkpoint_policy=CheckpointPolicy(every_seconds=1),
        handler_retry=RetryOptions(max_retries=5),
        on_retries_exhausted=Park("readings-parked"),
    )

    def stop_at_the_end() -> None:
        if counts >= expected:
            app.stop()

    def by_device(event: ReceivedEvent) -> str | None:
        return event.partition_key

    @app.subscriber("readings", key=by_device, concurrency=16)
    @app.publisher("alerts")
    async def watch(reading: Reading, context: PartitionContext) -> Alert | None:
        await asyncio.sleep(0.001)  # a database
        counts["readings"] += 1
        stop_at_the_end()
        if reading.celsius < 90:
            return None
        counts["too high"] += 1
        return Alert(**reading.model_dump(), partition=context.partition_id)

    @app.subscriber("alerts")
    async def notify(alert: Alert) -> None:
        counts["alerts"] += 1
        stop_at_the_end()

    return app


async def publish(connection_string: str, count: int) -> int:
    """Publish readings, one of them no JSON. Return how many of them are too high."""
    chance, too_high = random.Random(1), 0
    async with BufferedProducer(connection_string, "readings") as producer:
        for number in range(count):
            reading = Reading(
                device=f"device-{number % 50}", celsius=round(chance.uniform(0, 100), 1)
            )
            too_high += reading.celsius >= 90
            await producer.send(
                EventData(reading.model_dump_json()), partition_key=reading.device
            )
        await producer.send(EventData("garbled"), partition_key="device-7")
    return too_high


async def run(connection_string: str, folder: Path, count: int) -> None:
    counts: Counter[str] = Counter()
    expected = await publish(connection_string, count)
    app = make_app(
        connection_string, folder, Counter(readings=count, alerts=expected), counts
    )
    await app.run_async(handle_signals=True)
    print(
        f"handled {counts['readings']} readings, of which {counts['too high']} were too high"
    )
    print(f"received {counts['alerts']} of {expected} alerts")


async def main(connection_string: str | None, folder: Path | None, count: int) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        if connection_string is not None:
            await run(connection_string, folder or Path(temporary), count)
            return
        async with Emulator(["readings:2", "alerts:2", "readings-parked:1"]) as service:
            await run(service.connection_string, Path(temporary), count)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--connection-string", default=os.environ.get("EVENTPUMP_CONNECTION_STRING")
    )
    parser.add_argument(
        "--folder", type=Path, help="for the leases (default: one that is removed)"
    )
    parser.add_argument(
        "--count", type=int, default=500, help="publish and handle so many readings"
    )
    args = parser.parse_args()
    try:
        asyncio.run(main(args.connection_string, args.folder, args.count))
    except (EventPumpError, KeyboardInterrupt) as error:
        sys.exit(f"{type(error).__name__}: {error}")
