"""Add a process to a running fleet of azure-eventhub, or of the SDKs of other languages: it takes its share.

    python examples/join_azure_eventhub.py --hub telemetry --storage "DefaultEndpointsProtocol=..." --container azure

Nothing else has to change. Stop it, and the others go on where it stopped; stop the others, and it takes the rest.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence

from eventpump import (
    BlobOwnershipStore,
    CheckpointPolicy,
    CloseReason,
    EventProcessor,
    EventProcessorHost,
    EventPumpError,
    PartitionContext,
    ReceivedEvent,
)


class Printer(EventProcessor):
    async def open(self, context: PartitionContext) -> None:
        print(context.partition_id, "is ours", flush=True)

    async def process_events(
        self, context: PartitionContext, events: Sequence[ReceivedEvent]
    ) -> None:
        for event in events:
            print(
                context.partition_id,
                event.sequence_number,
                event.body_as_str(),
                flush=True,
            )

    async def close(self, context: PartitionContext, reason: CloseReason) -> None:
        print(context.partition_id, "is left:", reason.value, flush=True)


async def main(args: argparse.Namespace) -> None:
    store = BlobOwnershipStore(
        args.container,
        connection_string=args.storage,
        preserve_case=args.preserve_case,
        namespace=args.namespace,
        lease_duration=args.lease_duration,
    )
    host = EventProcessorHost(
        args.connection_string,
        args.hub,
        consumer_group=args.consumer_group,
        processor=Printer,
        lease_store=store,
        checkpoint_policy=CheckpointPolicy(every_events=1_000, every_seconds=5),
    )
    async with host:
        await host.run(handle_signals=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    given = os.environ.get("EVENTPUMP_CONNECTION_STRING")
    parser.add_argument("--connection-string", default=given, required=given is None)
    parser.add_argument("--hub", default="telemetry")
    parser.add_argument("--consumer-group", default="$Default")
    parser.add_argument(
        "--storage", required=True, help="the connection string of the storage account"
    )
    parser.add_argument(
        "--container", required=True, help="the fleet's container of checkpoints"
    )
    parser.add_argument(
        "--preserve-case",
        action="store_true",
        help="for a fleet of Java or Go, whose blobs are named as it was configured",
    )
    parser.add_argument(
        "--namespace",
        help="as the blobs' names have it, if that is not the host name of the hub",
    )
    parser.add_argument(
        "--lease-duration",
        type=float,
        default=60.0,
        help="the shortest time, in seconds, after which a member takes a partition",
    )
    try:
        asyncio.run(main(parser.parse_args()))
    except (EventPumpError, KeyboardInterrupt) as error:
        sys.exit(f"{type(error).__name__}: {error}")
