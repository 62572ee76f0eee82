"""A host that is watched, in a process of its own: CONNECTION_STRING HUB LEASES NAME. Prints the port of its server."""

from __future__ import annotations

import asyncio
import sys

from eventpump import EventProcessorHost, PartitionContext, SqliteLeaseStore
from eventpump.health import HealthServer


async def process(context: PartitionContext, events: object) -> None:
    await context.checkpoint()


async def main(connection_string: str, hub: str, leases: str, name: str) -> None:
    """Run until it is killed."""
    host = EventProcessorHost(
        connection_string,
        hub,
        processor=process,
        lease_store=SqliteLeaseStore(leases, lease_duration=2),
        track_last_enqueued=True,
        owner_id=name,
    )
    async with HealthServer(host, port=0) as server, host:
        print(server.port, flush=True)  # noqa: T201 - the answer to the test
        await host.run(handle_signals=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
