"""Alert on hot sensors at once, archive every reading in SQLite at leisure, and follow one sensor: three subscriptions.

    python examples/subscriptions.py --count 5000

All read the same receive links. `alerts` begins at the end and keeps up; `archive` begins at the oldest event that the
hub still has, and is slow; `sensor-7` gets the readings with that partition key only. Each has checkpoints of its own,
in the file of the leases: start it again, and each continues where it was. Without a connection string the readings go
to a local service, which ends with the program.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sqlite3
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack, closing
from pathlib import Path

from eventpump import (
    BufferedProducer,
    CheckpointPolicy,
    Emulator,
    EventData,
    EventProcessor,
    EventProcessorHost,
    EventPumpError,
    PartitionContext,
    ReceivedEvent,
    SqliteLeaseStore,
)

HOT = 30.0


class Alerts(EventProcessor):
    """Prints hot readings as they come."""

    def __init__(self) -> None:
        self.seen = self.hot = 0

    async def process_events(
        self, context: PartitionContext, events: Sequence[ReceivedEvent]
    ) -> None:
        for event in events:
            reading = event.body_as_json()
            if reading["celsius"] >= HOT:
                self.hot += 1
                if self.hot <= 10:
                    print(
                        f"{context.subscription}: {reading['sensor']} has {reading['celsius']} °C",
                        flush=True,
                    )
        self.seen += len(events)


class Archive(EventProcessor):
    """Writes every reading to SQLite. What is delivered again replaces what is there: a reading is stored once."""

    def __init__(self, path: Path) -> None:
        self.path, self.seen = path, 0
        with closing(sqlite3.connect(path)) as file, file:
            file.execute(
                "create table if not exists reading (partition text, number integer, sensor text, celsius real,"
                " primary key (partition, number))"
            )

    async def process_events(
        self, context: PartitionContext, events: Sequence[ReceivedEvent]
    ) -> None:
        readings = [(event.sequence_number, event.body_as_json()) for event in events]
        rows = [
            (context.partition_id, number, each["sensor"], each["celsius"])
            for number, each in readings
        ]
        # In a thread: a write that waits for the disk holds up neither the other subscription nor the leases.
        await asyncio.to_thread(self.store, rows)
        # A store that is far away: this is what makes it the slow one.
        await asyncio.sleep(0.05)
        self.seen += len(events)
        await context.checkpoint()

    def store(self, rows: Sequence[tuple[str, int, str, float]]) -> None:
        with closing(sqlite3.connect(self.path, timeout=30)) as file, file:
            file.executemany("insert or replace into reading values (?, ?, ?, ?)", rows)

    def count(self) -> int:
        with closing(sqlite3.connect(self.path)) as file:
            (count,) = file.execute("select count(*) from reading").fetchone()
        return int(count)


class Newest(EventProcessor):
    """Keeps the newest reading of its sensor."""

    def __init__(self) -> None:
        self.seen, self.celsius = 0, 0.0

    async def process_events(
        self, context: PartitionContext, events: Sequence[ReceivedEvent]
    ) -> None:
        self.celsius = events[-1].body_as_json()["celsius"]
        self.seen += len(events)


def show(host: EventProcessorHost) -> None:
    """Print how far each subscription is behind: None while that is not known of a partition."""
    for name in ("alerts", "archive", "sensor-7"):
        rows = [each for each in host.partitions if each.subscription == name]
        lags = [each.lag for each in rows]
        lag = "unknown" if None in lags else f"{sum(filter(None, lags)):,} events"
        print(
            f"{name}: lag {lag}, holds {sum(each.held_events for each in rows):,} events in the cache",
            flush=True,
        )


async def process(
    connection_string: str, hub: str, folder: Path, count: int | None
) -> None:
    alerts, archive, newest = Alerts(), Archive(folder / "archive.db"), Newest()
    host = EventProcessorHost(
        connection_string,
        hub,
        lease_store=SqliteLeaseStore(folder / "leases.db"),
        checkpoint_policy=CheckpointPolicy(every_seconds=1),
        track_last_enqueued=True,
    )
    async with host:
        await host.subscribe("alerts", alerts, start="latest")
        await host.subscribe(
            "archive", archive, start="earliest", catch_up="shared", max_batch_size=50
        )
        await host.subscribe("sensor-7", newest, keys={"sensor-7"})
        # Whatever is published from here on reaches all of them.
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(host.run(handle_signals=True))
            if count is not None:
                tasks.create_task(publish(connection_string, hub, count))
            while not running.done() and (
                count is None or alerts.seen < count or archive.seen < count
            ):
                await asyncio.wait({running}, timeout=1.0)
                show(host)
            host.stop()
    print(
        f"alerts saw {alerts.seen} readings, {alerts.hot} of them hot; {archive.count()} are archived"
    )
    print(f"sensor-7 sent {newest.seen} of them, and has {newest.celsius} °C")


async def publish(connection_string: str, hub: str, count: int) -> None:
    chance = random.Random(1)
    async with BufferedProducer(connection_string, hub) as producer:
        for number in range(count):
            sensor, celsius = f"sensor-{number % 20}", round(chance.gauss(21, 4), 1)
            await producer.send(
                EventData(json.dumps({"sensor": sensor, "celsius": celsius})),
                partition_key=sensor,
            )


async def main(
    connection_string: str | None, hub: str, folder: Path | None, count: int | None
) -> None:
    async with AsyncExitStack() as stack:
        if connection_string is None:
            service = await stack.enter_async_context(Emulator({hub: 4}))
            connection_string, folder, count = (
                service.connection_string,
                None,
                count or 5000,
            )
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        await process(connection_string, hub, folder, count)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--connection-string", default=os.environ.get("EVENTPUMP_CONNECTION_STRING")
    )
    parser.add_argument("--hub", default="telemetry")
    parser.add_argument(
        "--folder",
        type=Path,
        help="for the leases and the archive (default: one that is removed)",
    )
    parser.add_argument(
        "--count",
        type=int,
        help="publish so many readings, and stop when both have them",
    )
    args = parser.parse_args()
    try:
        asyncio.run(main(args.connection_string, args.hub, args.folder, args.count))
    except (EventPumpError, ExceptionGroup, KeyboardInterrupt) as error:
        first = error.exceptions[0] if isinstance(error, ExceptionGroup) else error
        sys.exit(f"{type(first).__name__}: {first}")
