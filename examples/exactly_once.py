"""Sum up readings per sensor in SQLite so that each event counts exactly once, in any number of processes.

    python examples/exactly_once.py --folder readings

Delivery is at least once: after a crash, or when a partition moves to another process, events come again, and for a
moment two processes may work on the same ones. So the database keeps, per partition, the number of the last event that
is counted and the epoch of the owner that counted it, and both change in the transaction that changes the sums. Events
that are counted are left out, and an owner with a lower epoch than the stored one is refused.

With `--keyed` it counts several sensors of a partition at a time. They are finished in any order, and so the number of
the last event is kept per partition and sensor.

Start it several times with one folder, kill any of them: the sums stay exact. Without a connection string the readings
go to a local service, which ends with the program.
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
    KeyedProcessor,
    PartitionContext,
    ReceivedEvent,
    RetryOptions,
    SqliteLeaseStore,
)

ADD = (
    "insert into sums values (?, 1, ?) on conflict (sensor)"
    " do update set readings = readings + 1, total = total + excluded.total"
)


class FencedError(Exception):
    """A later owner of the partition has written to the database."""


class Sums(EventProcessor):
    """Adds up readings. One object serves all partitions."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with closing(sqlite3.connect(path, timeout=30)) as file, file:
            file.execute(
                "create table if not exists sums (sensor text primary key, readings integer, total integer)"
            )
            file.execute(
                "create table if not exists progress (partition text primary key, epoch integer, number integer)"
            )

    async def open(self, context: PartitionContext) -> None:
        # From here on, former owners can write nothing more.
        await asyncio.to_thread(
            self.count, context.partition_id, context.owner_level, []
        )

    async def process_events(
        self, context: PartitionContext, events: Sequence[ReceivedEvent]
    ) -> None:
        readings = [(event.sequence_number, event.body_as_json()) for event in events]
        # In a thread: a write that waits for the disk does not hold up the leases.
        await asyncio.to_thread(
            self.count, context.partition_id, context.owner_level, readings
        )

    def count(
        self,
        partition: str,
        epoch: int,
        readings: Sequence[tuple[int, dict[str, int | str]]],
    ) -> None:
        with closing(
            sqlite3.connect(self.path, timeout=30, isolation_level=None)
        ) as file:
            file.execute("begin immediate")
            with file:
                row = file.execute(
                    "select epoch, number from progress where partition = ?",
                    [partition],
                ).fetchone()
                stored_epoch, counted = row or (-1, -1)
                if epoch < stored_epoch:
                    raise FencedError(
                        f"partition {partition}: epoch {epoch} is older than {stored_epoch}"
                    )
                for number, reading in readings:
                    if number > counted:
                        file.execute(ADD, [reading["sensor"], reading["value"]])
                last = max([counted, *(number for number, _ in readings)])
                file.execute(
                    "insert or replace into progress values (?, ?, ?)",
                    [partition, epoch, last],
                )

    def result(self) -> tuple[int, int]:
        with closing(sqlite3.connect(self.path, timeout=30)) as file:
            readings, total = file.execute(
                "select sum(readings), sum(total) from sums"
            ).fetchone()
        return int(readings or 0), int(total or 0)


class KeyedSums(KeyedProcessor):
    """Adds up readings of several sensors at a time. One object serves all partitions."""

    def __init__(self, path: Path) -> None:
        super().__init__(
            self.add,
            key=lambda event: event.partition_key or "",
            concurrency=8,
            max_batch_per_key=20,
        )
        self.path = path
        self.result = Sums(path).result
        with closing(sqlite3.connect(path, timeout=30)) as file, file:
            file.execute(
                "create table if not exists owners (partition text primary key, epoch integer)"
            )
            file.execute(
                "create table if not exists progress_of_keys"
                " (partition text, key text, number integer, primary key (partition, key))"
            )

    async def open(self, context: PartitionContext) -> None:
        await asyncio.to_thread(
            self.count, context.partition_id, context.owner_level, "", []
        )

    async def add(
        self, context: PartitionContext, events: Sequence[ReceivedEvent]
    ) -> None:
        readings = [(event.sequence_number, event.body_as_json()) for event in events]
        key = events[0].partition_key or ""
        await asyncio.to_thread(
            self.count, context.partition_id, context.owner_level, key, readings
        )

    def count(
        self,
        partition: str,
        epoch: int,
        key: str,
        readings: Sequence[tuple[int, dict[str, int | str]]],
    ) -> None:
        with closing(
            sqlite3.connect(self.path, timeout=30, isolation_level=None)
        ) as file:
            file.execute("begin immediate")
            with file:
                row = file.execute(
                    "select epoch from owners where partition = ?", [partition]
                ).fetchone()
                if row is not None and epoch < row[0]:
                    raise FencedError(
                        f"partition {partition}: epoch {epoch} is older than {row[0]}"
                    )
                file.execute(
                    "insert or replace into owners values (?, ?)", [partition, epoch]
                )
                row = file.execute(
                    "select number from progress_of_keys where partition = ? and key = ?",
                    [partition, key],
                ).fetchone()
                counted = -1 if row is None else row[0]
                for number, reading in readings:
                    if number > counted:
                        file.execute(ADD, [reading["sensor"], reading["value"]])
                last = max([counted, *(number for number, _ in readings)])
                file.execute(
                    "insert or replace into progress_of_keys values (?, ?, ?)",
                    [partition, key, last],
                )


async def process(
    connection_string: str,
    hub: str,
    folder: Path,
    count: int | None,
    lease_duration: float,
    *,
    keyed: bool,
) -> None:
    sums = KeyedSums(folder / "sums.db") if keyed else Sums(folder / "sums.db")
    host = EventProcessorHost(
        connection_string,
        hub,
        processor=sums,
        # A key is not retried forever: a partition whose readings cannot be counted is left to another process.
        handler_retry=RetryOptions(max_retries=5 if keyed else None),
        on_retries_exhausted="stop_partition",
        lease_store=SqliteLeaseStore(
            folder / "leases.db", lease_duration=lease_duration
        ),
        checkpoint_policy=CheckpointPolicy(every_seconds=5),
    )
    async with host:
        running = asyncio.create_task(host.run(handle_signals=True))
        counted = 0
        while not running.done() and (count is None or counted < count):
            await asyncio.wait({running}, timeout=1.0)
            counted, _ = await asyncio.to_thread(sums.result)
            print(f"{counted} readings are counted", flush=True)
        host.stop()
        await running
    readings, total = sums.result()
    print(f"{readings} readings, total {total}", flush=True)


async def publish(connection_string: str, hub: str, count: int) -> int:
    """Publish random readings, and return their total."""
    chance, total = random.Random(1), 0
    async with BufferedProducer(connection_string, hub) as producer:
        for number in range(count):
            sensor, value = f"sensor-{number % 20}", chance.randrange(100)
            await producer.send(
                EventData(json.dumps({"sensor": sensor, "value": value})),
                partition_key=sensor,
            )
            total += value
    return total


async def main(
    connection_string: str | None,
    hub: str,
    folder: Path | None,
    count: int | None,
    lease_duration: float,
    *,
    keyed: bool = False,
) -> None:
    async with AsyncExitStack() as stack:
        if connection_string is None:
            service = await stack.enter_async_context(Emulator({hub: 4}))
            connection_string, folder, count = (
                service.connection_string,
                None,
                count or 5000,
            )
            print(f"published: total {await publish(connection_string, hub, count)}")
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        await process(
            connection_string, hub, folder, count, lease_duration, keyed=keyed
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--connection-string", default=os.environ.get("EVENTPUMP_CONNECTION_STRING")
    )
    parser.add_argument("--hub", default="telemetry")
    parser.add_argument(
        "--folder",
        type=Path,
        help="for the leases and the sums (default: one that is removed)",
    )
    parser.add_argument(
        "--count", type=int, help="stop when so many readings are counted"
    )
    parser.add_argument(
        "--lease-duration",
        type=float,
        default=30.0,
        help="seconds that a killed process is waited for",
    )
    parser.add_argument(
        "--keyed",
        action="store_true",
        help="count several sensors of a partition at a time",
    )
    args = parser.parse_args()
    given = (
        args.connection_string,
        args.hub,
        args.folder,
        args.count,
        args.lease_duration,
    )
    try:
        asyncio.run(main(*given, keyed=args.keyed))
    except (EventPumpError, KeyboardInterrupt) as error:
        sys.exit(f"{type(error).__name__}: {error}")
