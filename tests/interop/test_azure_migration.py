"""A program of azure-eventhub is joined by one of eventpump, or replaced by one, which continues at its checkpoints."""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Callable

import pytest
from azure.eventhub import EventData as EventDataOfAzure
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


async def test_example_joins_a_fleet_of_azure_eventhub_and_leaves_it(
    emulator: Emulator, hub: str, azurite: Azurite
) -> None:
    """`examples/join_azure_eventhub.py` takes half the partitions; when it has stopped, the rest goes on after it."""
    storage, container = azurite.connection_string, f"azure-{uuid.uuid4().hex}"
    async with ContainerClient.from_connection_string(storage, container) as client:
        await client.create_container()
    ours: list[str] = []
    theirs: list[str] = []
    owned: dict[str, set[str]] = {"ours": set(), "theirs": set()}
    progress = asyncio.Condition()

    async def until(holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(60), progress:
            await progress.wait_for(holds)

    async def on_event(context: PartitionContext, event: EventDataOfAzure | None) -> None:
        assert event is not None
        await context.update_checkpoint(event)
        async with progress:
            theirs.append(event.body_as_str())
            progress.notify_all()

    async def on_partition_initialize(context: PartitionContext) -> None:
        owned["theirs"].add(context.partition_id)

    async def on_partition_close(context: PartitionContext, reason: object) -> None:
        async with progress:
            owned["theirs"].discard(context.partition_id)
            progress.notify_all()

    async def read(output: asyncio.StreamReader) -> None:
        async for line in output:
            partition, *rest = line.decode().split()
            async with progress:
                if rest == ["is", "ours"]:
                    owned["ours"].add(partition)
                elif rest[0] != "is":
                    ours.append(rest[1])
                progress.notify_all()

    sent: list[str] = []
    async with EventProducer(emulator.connection_string, hub) as producer:

        async def send(stage: str) -> None:
            for partition in BEFORE:
                bodies = [f"{stage}-{partition}-{n}" for n in range(3)]
                await producer.send([EventData(body) for body in bodies], partition_id=partition)
                sent.extend(bodies)

        await send("alone")
        store = BlobCheckpointStore.from_connection_string(storage, container)
        official = EventHubConsumerClient.from_connection_string(
            emulator.connection_string, "$Default", eventhub_name=hub, checkpoint_store=store, load_balancing_interval=1
        )
        async with store, official:
            receiving = asyncio.create_task(
                official.receive(
                    on_event,
                    starting_position="-1",
                    on_partition_initialize=on_partition_initialize,
                    on_partition_close=on_partition_close,
                )
            )
            await until(lambda: sorted(theirs) == sorted(sent))
            async with ContainerClient.from_connection_string(storage, container) as client:
                namespace = (await anext(client.list_blob_names())).split("/")[0]
            process = await start_python(
                *("examples/join_azure_eventhub.py", "--connection-string", emulator.connection_string),
                *("--hub", hub, "--storage", storage, "--container", container),
                *("--namespace", namespace, "--lease-duration", "6"),
                stdout=asyncio.subprocess.PIPE,
            )
            assert process.stdout is not None
            reading = asyncio.create_task(read(process.stdout))
            try:
                await until(lambda: (len(owned["ours"]), len(owned["theirs"])) == (2, 2))
                assert not owned["ours"] & owned["theirs"]
                await send("both")
                await until(lambda: set(sent) <= {*ours, *theirs})
                assert any(body.startswith("both") for body in ours)
                assert any(body.startswith("both") for body in theirs)
                process.terminate()
                await reading
                assert await process.wait() == 0
            finally:
                if process.returncode is None:
                    process.kill()
            await send("after")
            await until(lambda: set(sent) <= {*ours, *theirs})
            receiving.cancel()
            await asyncio.gather(receiving, return_exceptions=True)
    assert not any(body.startswith("after") for body in ours)
    assert not any(body.startswith("both") for body in {*ours} & {*theirs}), "a member that stops in order is repeated"


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
