"""The lag of a fleet of azure-eventhub, read by its own checkpoints."""

from __future__ import annotations

import asyncio
import re
import uuid
from urllib.parse import urlsplit

import pytest
from azure.eventhub.aio import EventHubConsumerClient, PartitionContext
from azure.eventhub.extensions.checkpointstoreblobaio import BlobCheckpointStore
from azure.storage.blob.aio import ContainerClient

from eventpump import Emulator, EventData, EventProducer
from eventpump.lag import BlobCheckpointReader, GroupLag, LagReader, LagState
from tests.support.azurite import Azurite

pytestmark = pytest.mark.asyncio(loop_scope="session")

SENT = {"0": 5, "1": 7, "2": 3, "3": 0}
AFTER = 4


async def test_lag_of_azure_eventhub_is_read(emulator: Emulator, hub: str, azurite: Azurite) -> None:
    """Owned and processed while it runs; once it is closed without an owner; and then behind by what was sent since."""
    storage, name = azurite.connection_string, f"azure-{uuid.uuid4().hex}"
    async with ContainerClient.from_connection_string(storage, name) as container:
        await container.create_container()
    async with EventProducer(emulator.connection_string, hub) as producer:
        for partition, count in SENT.items():
            if count:
                await producer.send([EventData(b"x") for _ in range(count)], partition_id=partition)
        running = await _lag_while_processing(emulator, hub, storage, name)
        assert {each.partition_id: each.sequence_number for each in running.partitions} == {
            partition: count - 1 if count else None for partition, count in SENT.items()
        }
        owners = {each.checkpoint.owner for each in running.partitions if each.checkpoint is not None}
        assert len(owners) == 1
        assert None not in owners
        states = {each.partition_id: each.state for each in running.partitions}
        assert states == {**dict.fromkeys("012", LagState.OK), "3": LagState.NO_CHECKPOINT}
        for partition in SENT:
            await producer.send([EventData(b"x") for _ in range(AFTER)], partition_id=partition)
    stopped = await _read(emulator, hub, storage, name)
    assert {each.partition_id: (each.state, each.lag) for each in stopped.partitions} == {
        **dict.fromkeys("012", (LagState.UNOWNED, AFTER)),
        "3": (LagState.NO_CHECKPOINT, AFTER),
    }


async def _read(emulator: Emulator, hub: str, storage: str, container: str) -> GroupLag:
    # azure-eventhub keeps the port, which the emulator's connection string has.
    endpoint = re.search("Endpoint=([^;]+)", emulator.connection_string)
    assert endpoint is not None
    namespace = urlsplit(endpoint[1]).netloc
    checkpoints = BlobCheckpointReader(container, connection_string=storage, namespace=namespace)
    async with LagReader(emulator.connection_string, hub, checkpoints=checkpoints) as reader:
        return await reader.read()


async def _lag_while_processing(emulator: Emulator, hub: str, storage: str, container: str) -> GroupLag:
    """Process everything that the hub holds with azure-eventhub, a checkpoint per event, and return the lag then."""
    left = sum(SENT.values())
    begun: set[str] = set()
    done = asyncio.Event()

    def check() -> None:
        if left == 0 and len(begun) == len(SENT):
            done.set()

    async def on_event(context: PartitionContext, event: object) -> None:
        nonlocal left
        if event is not None:
            await context.update_checkpoint(event)  # type: ignore[arg-type]  # the official types leave out the event
            left -= 1
            check()

    async def on_partition_initialize(context: PartitionContext) -> None:
        begun.add(context.partition_id)
        check()

    store = BlobCheckpointStore.from_connection_string(storage, container)
    client = EventHubConsumerClient.from_connection_string(
        emulator.connection_string, "$Default", eventhub_name=hub, checkpoint_store=store, load_balancing_interval=1
    )
    async with store, client:
        receiving = asyncio.create_task(
            client.receive(
                on_event,
                on_partition_initialize=on_partition_initialize,
                starting_position="-1",
            )
        )
        try:
            async with asyncio.timeout(60):
                await done.wait()
            return await _read(emulator, hub, storage, container)
        finally:
            receiving.cancel()
            await asyncio.gather(receiving, return_exceptions=True)
