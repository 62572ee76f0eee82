"""A consumer as a service: totals per sensor and minute in SQLite, with probes, a query over HTTP and an orderly end.

    python examples/consumer_service.py --folder totals --port 8080
    curl 'http://localhost:8080/minutes?sensor=sensor-7'

A batch is one transaction, which updates the totals and, per partition, the number of the last event that they contain
and the epoch of the owner that wrote it: events that come again are left out, and a former owner is refused, so the
totals are exact whatever is killed (docs/howto/exactly-once-into-a-database.md; a `KeyedProcessor` needs the number per
key). A body that is not a reading is counted and left out, so that it does not stop its partition.

`/live` answers as long as the event loop runs; `/ready` with 200 once the host has found the hub and its lease store.
SIGTERM and Ctrl-C end it: the batches at work are finished, checkpoints stored, and leases released. Start it several
times with one folder and different ports to share the partitions. Without a connection string it counts some readings
from a local service, and ends.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import random
import sqlite3
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing
from pathlib import Path

from aiohttp import web

from eventpump import (
    Emulator,
    EventData,
    EventError,
    EventProcessor,
    EventProcessorHost,
    EventProducer,
    EventPumpError,
    PartitionContext,
    ReceivedEvent,
    SqliteLeaseStore,
)
from eventpump.reports import HostReport, PartitionsFound

log = logging.getLogger("consumer_service")

SCHEMA = """
create table if not exists minutes (
    sensor text, minute text, readings integer, total real, lowest real, highest real, primary key (sensor, minute)
);
create table if not exists progress (
    partition text primary key, epoch integer, number integer, rejected integer not null default 0
);
"""
ADD = """
insert into minutes values (?, ?, 1, ?3, ?3, ?3) on conflict (sensor, minute) do update set
    readings = readings + 1, total = total + excluded.total,
    lowest = min(lowest, excluded.lowest), highest = max(highest, excluded.highest)
"""


class FencedError(Exception):
    """A later owner of the partition has written to the database."""


class Totals(EventProcessor):
    """Adds up readings. One object serves all partitions."""

    def __init__(self, path: Path, count: int | None) -> None:
        self.path = path
        self.count = count
        self.enough = asyncio.Event()
        with closing(sqlite3.connect(path, timeout=30)) as file:
            file.execute(
                "pragma journal_mode = wal"
            )  # readers and the writer do not wait for each other
            file.executescript(SCHEMA)

    async def open(self, context: PartitionContext) -> None:
        # From here on, former owners can write nothing more.
        await asyncio.to_thread(
            self.add, context.partition_id, context.owner_level, -1, [], []
        )

    async def process_events(
        self, context: PartitionContext, events: Sequence[ReceivedEvent]
    ) -> None:
        readings, rejected = [], []
        for event in events:
            try:
                reading = event.body_as_json()
                minute = event.enqueued_time.strftime("%Y-%m-%dT%H:%M")
                row = (str(reading["sensor"]), minute, float(reading["celsius"]))
            except (EventError, KeyError, TypeError, ValueError) as error:
                log.warning(
                    "partition %s: event %d is not a reading: %s",
                    context.partition_id,
                    event.sequence_number,
                    error,
                )
                rejected.append(event.sequence_number)
            else:
                readings.append((event.sequence_number, row))
        # In a thread: a write that waits for the disk does not hold up the leases.
        total = await asyncio.to_thread(
            self.add,
            context.partition_id,
            context.owner_level,
            events[-1].sequence_number,
            readings,
            rejected,
        )
        if self.count is not None and total >= self.count:
            self.enough.set()

    def add(
        self,
        partition: str,
        epoch: int,
        last: int,
        readings: Sequence[tuple[int, tuple[str, str, float]]],
        rejected: Sequence[int],
    ) -> int:
        """Add readings that are not contained yet, and return how many events the totals account for."""
        with closing(
            sqlite3.connect(self.path, timeout=30, isolation_level=None)
        ) as file:
            file.execute("begin immediate")
            with file:
                row = file.execute(
                    "select epoch, number from progress where partition = ?",
                    [partition],
                ).fetchone()
                stored_epoch, contained = row or (-1, -1)
                if epoch < stored_epoch:
                    raise FencedError(
                        f"partition {partition}: epoch {epoch} is older than {stored_epoch}"
                    )
                file.executemany(
                    ADD, [row for number, row in readings if number > contained]
                )
                file.execute(
                    "insert into progress values (?, ?, ?, ?) on conflict (partition) do update set"
                    " epoch = excluded.epoch, number = excluded.number, rejected = rejected + excluded.rejected",
                    [
                        partition,
                        epoch,
                        max(last, contained),
                        sum(number > contained for number in rejected),
                    ],
                )
            return sum(self.counts(file))

    def counts(self, file: sqlite3.Connection) -> tuple[int, int]:
        """Return how many readings are in the totals, and how many events were not readings."""
        (readings,) = file.execute(
            "select coalesce(sum(readings), 0) from minutes"
        ).fetchone()
        (rejected,) = file.execute(
            "select coalesce(sum(rejected), 0) from progress"
        ).fetchone()
        return int(readings), int(rejected)

    def minutes(self, sensor: str) -> list[dict[str, str | float]]:
        """Return the totals of a sensor, newest first."""
        names = ("minute", "readings", "total", "lowest", "highest")
        with closing(sqlite3.connect(self.path, timeout=30)) as file:
            query = f"select {', '.join(names)} from minutes where sensor = ? order by minute desc limit 1440"
            return [
                dict(zip(names, row, strict=True))
                for row in file.execute(query, [sensor])
            ]


@asynccontextmanager
async def serve_http(
    totals: Totals, ready: asyncio.Event, port: int
) -> AsyncIterator[None]:
    async def get_live(request: web.Request) -> web.Response:
        return web.Response(text="live\n")

    async def get_ready(request: web.Request) -> web.Response:
        return (
            web.Response(text="ready\n")
            if ready.is_set()
            else web.Response(text="starting\n", status=503)
        )

    async def get_minutes(request: web.Request) -> web.Response:
        return web.json_response(
            await asyncio.to_thread(totals.minutes, request.query.get("sensor", ""))
        )

    app = web.Application()
    app.add_routes(
        [
            web.get("/live", get_live),
            web.get("/ready", get_ready),
            web.get("/minutes", get_minutes),
        ]
    )
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=5)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "0.0.0.0", port)
        await site.start()
        print(f"listening on port {site.port}", flush=True)
        yield
    finally:
        await runner.cleanup()


async def serve(
    connection_string: str,
    hub: str,
    folder: Path,
    port: int,
    count: int | None,
    lease_duration: float,
) -> None:
    totals = Totals(folder / "totals.db", count)
    ready = asyncio.Event()

    def watch(report: HostReport) -> None:
        if isinstance(
            report, PartitionsFound
        ):  # the lease store is open, and the hub has answered
            ready.set()

    host = EventProcessorHost(
        connection_string,
        hub,
        processor=totals,
        lease_store=SqliteLeaseStore(
            folder / "leases.db", lease_duration=lease_duration
        ),
        hooks=[watch],
    )
    async with serve_http(totals, ready, port), host:
        await host.run(handle_signals=True, until=totals.enough.wait())
    with closing(sqlite3.connect(totals.path)) as file:
        readings, rejected = totals.counts(file)
    print(f"{readings} readings, {rejected} rejected", flush=True)


async def publish(connection_string: str, hub: str, count: int) -> None:
    """Publish random readings, the last of which is not one."""
    rng = random.Random(1)
    readings = [
        {"sensor": f"sensor-{number % 20}", "celsius": round(rng.gauss(21, 3), 2)}
        for number in range(count - 1)
    ]
    async with EventProducer(connection_string, hub) as producer:
        for start in range(0, len(readings), 500):
            events = [
                EventData(json.dumps(reading))
                for reading in readings[start : start + 500]
            ]
            await producer.send(events, partition_id=str(start // 500 % 4))
        await producer.send(EventData("not a reading"))


async def main(args: argparse.Namespace) -> None:
    async with AsyncExitStack() as stack:
        connection_string, folder, count = (
            args.connection_string,
            args.folder,
            args.count,
        )
        if connection_string is None:
            service = await stack.enter_async_context(Emulator({args.hub: 4}))
            connection_string, folder, count = (
                service.connection_string,
                None,
                count or 5000,
            )
            await publish(connection_string, args.hub, count)
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        await serve(
            connection_string, args.hub, folder, args.port, count, args.lease_duration
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
        help="for the leases and the totals (default: one that is removed)",
    )
    parser.add_argument("--port", type=int, default=8080, help="0 for a free one")
    parser.add_argument(
        "--count", type=int, help="stop when so many events are accounted for"
    )
    parser.add_argument(
        "--lease-duration",
        type=float,
        default=30.0,
        help="seconds that a killed process is waited for",
    )
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    try:
        asyncio.run(main(parser.parse_args()))
    except (EventPumpError, KeyboardInterrupt) as error:
        sys.exit(f"{type(error).__name__}: {error}")
