"""Continue where consumers of azure-eventhub stopped: read the positions from the checkpoints of its blob store.

    python examples/from_azure_eventhub.py --hub telemetry --storage "DefaultEndpointsProtocol=..." --checkpoints azure

Stop the consumers of azure-eventhub first. The positions become the starts of the partitions that have no checkpoint of
eventpump yet; the first host of the consumer group records them in its lease store, and they are not read again.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence

from azure.storage.blob.aio import ContainerClient

from eventpump import (
    BlobLeaseStore,
    CheckpointPolicy,
    EventPosition,
    EventProcessor,
    EventProcessorHost,
    EventProducer,
    EventPumpError,
    PartitionContext,
    ReceivedEvent,
)


class Printer(EventProcessor):
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


async def checkpointed(
    container: ContainerClient, namespace: str, hub: str, group: str
) -> dict[str, EventPosition]:
    """Return the positions after azure-eventhub's checkpoints, by partition."""
    starts = {}
    async for blob in container.list_blobs(include=["metadata"]):
        host, *path, partition = blob.name.lower().split("/")
        if (
            host.partition(":")[0] == namespace
            and "/".join(path) == f"{hub}/{group}/checkpoint".lower()
        ):
            starts[partition] = EventPosition.at_sequence_number(
                int(blob.metadata["sequencenumber"])
            )
    return starts


async def main(
    connection_string: str,
    hub: str,
    group: str,
    storage: str,
    checkpoints: str,
    leases: str,
) -> None:
    namespace = EventProducer(connection_string, hub).fully_qualified_namespace
    async with ContainerClient.from_connection_string(
        storage, checkpoints
    ) as container:
        starts = await checkpointed(container, namespace, hub, group)
    print(
        {
            partition: position.sequence_number
            for partition, position in sorted(starts.items())
        },
        flush=True,
    )
    host = EventProcessorHost(
        connection_string,
        hub,
        consumer_group=group,
        processor=Printer,
        lease_store=BlobLeaseStore(leases, connection_string=storage),
        checkpoint_policy=CheckpointPolicy(every_seconds=5),
        initial_position=starts,
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
        "--checkpoints", required=True, help="the container that azure-eventhub used"
    )
    parser.add_argument(
        "--leases",
        default="leases",
        help="the container for eventpump's leases, which exists",
    )
    args = parser.parse_args()
    try:
        asyncio.run(
            main(
                args.connection_string,
                args.hub,
                args.consumer_group,
                args.storage,
                args.checkpoints,
                args.leases,
            )
        )
    except (EventPumpError, KeyboardInterrupt) as error:
        sys.exit(f"{type(error).__name__}: {error}")
