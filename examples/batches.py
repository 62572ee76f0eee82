"""Insert the events of a hub into a table, batch by batch: a loop, and no class.

    python examples/batches.py --count 2000

Two loops share the partitions. A batch is acknowledged when its loop asks for the next one; a loop that fails gives its
batch back, as the first one does here once, and no event is lost. Without a connection string the events go to a local
service, which ends with the program.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sqlite3
import sys
import tempfile
from contextlib import AsyncExitStack, closing
from pathlib import Path

from eventpump import (
    BufferedProducer,
    CheckpointPolicy,
    Emulator,
    EventData,
    EventProcessorHost,
    EventPumpError,
    SqliteLeaseStore,
)


class Table:
    """Each event once, whatever is delivered again."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._fails = True
        connection.execute(
            "create table events (partition text, number integer, body blob, primary key (partition, number))"
        )

    def insert(self, partition_id: str, rows: list[tuple[int, bytes]]) -> None:
        """Insert events. The first call fails, as a database may."""
        if self._fails:
            self._fails = False
            raise sqlite3.OperationalError("database is locked")
        with self._connection:
            self._connection.executemany(
                "insert or ignore into events values (?, ?, ?)",
                [(partition_id, *row) for row in rows],
            )

    @property
    def count(self) -> int:
        """The number of events."""
        (count,) = self._connection.execute("select count(*) from events").fetchone()
        return int(count)


async def insert_all(host: EventProcessorHost, table: Table, count: int) -> None:
    """Insert batches until the table has so many events, or the host is closed."""
    while True:
        try:
            async for batch in host.batches(handle_signals=True):
                rows = [(event.sequence_number, event.body) for event in batch.events]
                table.insert(batch.context.partition_id, rows)
                if table.count == count:
                    host.stop()
            return
        except sqlite3.OperationalError as error:
            print(f"{error}: the batch is delivered again", flush=True)


async def run(connection_string: str, hub: str, folder: Path, count: int) -> None:
    async with BufferedProducer(connection_string, hub) as producer:
        for number in range(count):
            await producer.send(EventData(f"event {number}"))
    host = EventProcessorHost(
        connection_string,
        hub,
        lease_store=SqliteLeaseStore(folder / "leases.db"),
        checkpoint_policy=CheckpointPolicy(every_seconds=1),
        max_batch_size=100,
    )
    with closing(sqlite3.connect(folder / "events.db")) as connection:
        table = Table(connection)
        async with host, asyncio.TaskGroup() as tasks:
            for _ in range(2):
                tasks.create_task(insert_all(host, table, count))
        print(f"inserted {table.count} of {count} events")


async def main(
    connection_string: str | None, hub: str, folder: Path | None, count: int
) -> None:
    async with AsyncExitStack() as stack:
        if connection_string is None:
            service = await stack.enter_async_context(Emulator({hub: 4}))
            connection_string, folder = service.connection_string, None
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        await run(connection_string, hub, folder, count)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--connection-string", default=os.environ.get("EVENTPUMP_CONNECTION_STRING")
    )
    parser.add_argument("--hub", default="telemetry")
    parser.add_argument(
        "--folder",
        type=Path,
        help="for the leases and the table (default: one that is removed)",
    )
    parser.add_argument(
        "--count", type=int, default=2000, help="publish and insert so many events"
    )
    args = parser.parse_args()
    try:
        asyncio.run(main(args.connection_string, args.hub, args.folder, args.count))
    except (EventPumpError, ExceptionGroup, KeyboardInterrupt) as error:
        first = error.exceptions[0] if isinstance(error, ExceptionGroup) else error
        sys.exit(f"{type(first).__name__}: {first}")
