"""Forward the events of a hub to another hub, at least once and in order per partition.

    python examples/forward.py --source-connection-string "Endpoint=..." --source telemetry \
        --connection-string "Endpoint=..." --target copy

A partition of the source goes to one partition of the target, so that its order stays. An event keeps its body and
properties, and gets where it comes from: `forwarded.partition_id`, `forwarded.sequence_number`, `forwarded.offset`,
`forwarded.enqueued_time` and, if it has one, `forwarded.partition_key`.

A batch counts as processed when the target has stored it, so nothing is lost. After a crash, or a send whose answer was
lost, a run of events comes again, with the same numbers. A consumer that leaves out, per `forwarded.partition_id`, the
numbers up to the highest one it has seen, gets each event once and in order. An event that these properties make too
large for the target stops its partition, and is logged until you decide.

Start it several times with one lease file to share the partitions. Without a connection string it forwards some events
within a local service, and ends.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from eventpump import (
    Emulator,
    EventData,
    EventProcessor,
    EventProcessorHost,
    EventProducer,
    EventPumpError,
    MemoryLeaseStore,
    PartitionContext,
    ReceivedEvent,
    SqliteLeaseStore,
)
from eventpump.interfaces import LeaseStore


class Forwarder(EventProcessor):
    """Sends on what it gets. One object serves all partitions."""

    def __init__(
        self, producer: EventProducer, partition_ids: Sequence[str], count: int | None
    ) -> None:
        self.producer = producer
        self.partition_ids = partition_ids
        self.forwarded = 0
        self.count = count
        self.enough = asyncio.Event()

    async def process_events(
        self, context: PartitionContext, events: Sequence[ReceivedEvent]
    ) -> None:
        partition_id = self.partition_ids[
            int(context.partition_id) % len(self.partition_ids)
        ]
        copies = [copy_of(event, context.partition_id) for event in events]
        # What it raises makes the host deliver the same events again.
        await self.producer.send(copies, partition_id=partition_id, split=True)
        self.forwarded += len(events)
        print(
            f"partition {context.partition_id}: forwarded up to {events[-1].sequence_number}",
            flush=True,
        )
        if self.count is not None and self.forwarded >= self.count:
            self.enough.set()


def copy_of(event: ReceivedEvent, partition_id: str) -> EventData:
    copy = event.to_event_data()
    copy.properties |= {
        "forwarded.partition_id": partition_id,
        "forwarded.sequence_number": event.sequence_number,
        "forwarded.offset": event.offset,
        "forwarded.enqueued_time": event.enqueued_time.isoformat(),
    }
    if event.partition_key is not None:
        copy.properties["forwarded.partition_key"] = event.partition_key
    return copy


async def forward(
    source_connection_string: str,
    source: str,
    connection_string: str,
    target: str,
    lease_store: LeaseStore,
    count: int | None,
) -> None:
    async with EventProducer(connection_string, target) as producer:
        forwarder = Forwarder(producer, await producer.get_partition_ids(), count)
        host = EventProcessorHost(
            source_connection_string,
            source,
            processor=forwarder,
            lease_store=lease_store,
        )
        async with host:
            await host.run(handle_signals=True, until=forwarder.enough.wait())
    print(f"forwarded {forwarder.forwarded} events", flush=True)


async def main(args: argparse.Namespace) -> None:
    async with AsyncExitStack() as stack:
        connection_string = args.connection_string
        if connection_string is None:
            service = await stack.enter_async_context(
                Emulator({args.source: 4, args.target: 4})
            )
            args.count = args.count or 1000
            async with EventProducer(
                service.connection_string, args.source
            ) as producer:
                for number in range(args.count):
                    key = f"sensor-{number % 10}"
                    await producer.send(
                        EventData(f"reading {number}"), partition_key=key
                    )
            connection, leases = service.connection_string, MemoryLeaseStore()
            await forward(
                connection, args.source, connection, args.target, leases, args.count
            )
            return
        await forward(
            args.source_connection_string or connection_string,
            args.source,
            connection_string,
            args.target,
            SqliteLeaseStore(args.leases, lease_duration=args.lease_duration),
            args.count,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--connection-string",
        default=os.environ.get("EVENTPUMP_CONNECTION_STRING"),
        help="of the target's namespace, and of the source's, unless that has its own",
    )
    parser.add_argument("--source-connection-string")
    parser.add_argument("--source", default="telemetry")
    parser.add_argument("--target", default="copy")
    parser.add_argument(
        "--leases", type=Path, default=Path("forward.db"), help="a SQLite file"
    )
    parser.add_argument(
        "--lease-duration",
        type=float,
        default=30.0,
        help="seconds that a killed process is waited for",
    )
    parser.add_argument("--count", type=int, help="stop after this many events")
    try:
        asyncio.run(main(parser.parse_args()))
    except (EventPumpError, KeyboardInterrupt) as error:
        sys.exit(f"{type(error).__name__}: {error}")
