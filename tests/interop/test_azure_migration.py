"""A program of azure-eventhub is replaced by one of eventpump, which continues at its checkpoints."""

from __future__ import annotations

import asyncio
import re
import uuid

import pytest
from azure.eventhub.aio import EventHubConsumerClient, PartitionContext
from azure.eventhub.extensions.checkpointstoreblobaio import BlobCheckpointStore
from azure.storage.blob.aio import ContainerClient

from eventpump import Emulator, EventData, EventProducer
from tests.support.azurite import Azurite
from tests.support.forks import start_python

pytestmark = pytest.mark.asyncio(loop_scope="session")

BEFORE = {"0": 5, "1": 7, "2": 3, "3": 0}
"""How many events of each partition azure-eventhub had processed."""
AFTER = 4
"""How many were sent to each partition since."""


async def test_example_continues_at_the_checkpoints_of_azure_eventhub(
    emulator: Emulator, hub: str, azurite: Azurite
) -> None:
    """`examples/from_azure_eventhub.py` delivers exactly the events after them, and all of a partition without one."""
    storage, checkpoints, leases = azurite.connection_string, f"azure-{uuid.uuid4().hex}", f"ours-{uuid.uuid4().hex}"
    for name in (checkpoints, leases):
        async with ContainerClient.from_connection_string(storage, name) as container:
            await container.create_container()
    async with EventProducer(emulator.connection_string, hub) as producer:
        for partition, count in BEFORE.items():
            if count:
                await producer.send([EventData(f"{partition}-{n}") for n in range(count)], partition_id=partition)
        await _process_with_azure(emulator, hub, storage, checkpoints)
        for partition, count in BEFORE.items():
            new = [EventData(f"{partition}-{count + n}") for n in range(AFTER)]
            await producer.send(new, partition_id=partition)
    options = ["--hub", hub, "--storage", storage, "--checkpoints", checkpoints, "--leases", leases]
    process = await start_python(
        *("examples/from_azure_eventhub.py", "--connection-string", emulator.connection_string),
        *options,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(60):
            starts = (await process.stdout.readline()).decode()
            lines = [(await process.stdout.readline()).decode().split() for _ in range(AFTER * len(BEFORE))]
        process.terminate()
        rest, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    assert dict(re.findall(r"'(\d)': (\d+)", starts)) == {p: str(n - 1) for p, n in BEFORE.items() if n}
    expected = [f"{partition}-{count + n}" for partition, count in BEFORE.items() for n in range(AFTER)]
    assert sorted(line[2] for line in lines) == sorted(expected)
    assert (rest, process.returncode) == (b"", 0)


async def _process_with_azure(emulator: Emulator, hub: str, storage: str, checkpoints: str) -> None:
    """Process everything that the hub holds with azure-eventhub, and store a checkpoint per event."""
    left = sum(BEFORE.values())
    done = asyncio.Event()

    async def on_event(context: PartitionContext, event: object) -> None:
        nonlocal left
        if event is not None:
            await context.update_checkpoint(event)  # type: ignore[arg-type]  # the official types leave out the event
            left -= 1
            if left == 0:
                done.set()

    store = BlobCheckpointStore.from_connection_string(storage, checkpoints)
    client = EventHubConsumerClient.from_connection_string(
        emulator.connection_string, "$Default", eventhub_name=hub, checkpoint_store=store, load_balancing_interval=1
    )
    async with store, client:
        receiving = asyncio.create_task(client.receive(on_event, starting_position="-1"))
        async with asyncio.timeout(60):
            await done.wait()
        receiving.cancel()
        await asyncio.gather(receiving, return_exceptions=True)
