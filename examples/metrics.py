"""Probes and metrics of a host and a buffered producer for Prometheus, without another dependency.

    python examples/metrics.py --port 9108
    curl http://localhost:9108/metrics

All of it is one `HealthServer`. Nothing is computed per event, and nothing runs between two scrapes. Without a
connection string it processes some events of a local service, prints its metrics once, and ends.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack

from eventpump import (
    BufferedProducer,
    Emulator,
    EventData,
    EventProcessorHost,
    EventPumpError,
    MemoryLeaseStore,
    PartitionContext,
    ReceivedEvent,
    SqliteLeaseStore,
)
from eventpump.health import HealthServer, exposition

LOCAL_EVENTS = 500


async def main(args: argparse.Namespace) -> None:
    seen, enough = 0, asyncio.Event()

    async def process(
        context: PartitionContext, events: Sequence[ReceivedEvent]
    ) -> None:
        nonlocal seen
        print(f"partition {context.partition_id}: {len(events)} events", flush=True)
        seen += len(events)
        if seen >= LOCAL_EVENTS:
            enough.set()

    async with AsyncExitStack() as stack:
        connection_string, is_local = (
            args.connection_string,
            args.connection_string is None,
        )
        if connection_string is None:
            service = await stack.enter_async_context(Emulator({args.hub: 4}))
            connection_string = service.connection_string
        producer = await stack.enter_async_context(
            BufferedProducer(connection_string, args.hub)
        )
        host = EventProcessorHost(
            connection_string,
            args.hub,
            processor=process,
            lease_store=MemoryLeaseStore()
            if is_local
            else SqliteLeaseStore(args.leases),
            track_last_enqueued=True,  # the lag is known with every event
        )
        async with HealthServer(
            host, producer, address="0.0.0.0", port=args.port
        ) as server:
            print(f"listening on port {server.port}", flush=True)

            async def show_once() -> None:
                await enough.wait()
                print(exposition([*host.metrics(), *producer.metrics()]), flush=True)

            if is_local:
                for number in range(LOCAL_EVENTS):
                    await producer.send(
                        EventData(f"reading {number}"),
                        partition_key=f"sensor-{number % 20}",
                    )
            async with host:
                await host.run(
                    handle_signals=True, until=show_once() if is_local else None
                )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--connection-string", default=os.environ.get("EVENTPUMP_CONNECTION_STRING")
    )
    parser.add_argument("--hub", default="telemetry")
    parser.add_argument(
        "--leases",
        default="leases.db",
        help="a SQLite file; hosts that share it share the partitions",
    )
    parser.add_argument("--port", type=int, default=9108, help="0 for a free one")
    try:
        asyncio.run(main(parser.parse_args()))
    except (EventPumpError, KeyboardInterrupt) as error:
        sys.exit(f"{type(error).__name__}: {error}")
