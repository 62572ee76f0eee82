"""azure-eventhub, in a process of its own, begins where `eventpump.checkpoints` has put its checkpoints."""

from __future__ import annotations

import asyncio
import contextlib
import re
import uuid
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from azure.storage.blob.aio import ContainerClient

from eventpump import Emulator, EventData, EventProducer
from eventpump.checkpoints import BlobCheckpointWriter, CheckpointEditor, CheckpointExport, SqliteCheckpointWriter
from eventpump.checkpoints.plan import Start
from eventpump.lag import BlobCheckpointReader, LagReader
from tests.interop.peers.driver import AzurePeer
from tests.interop.reading import PARTITIONS, read_hub
from tests.support.azurite import Azurite

pytestmark = pytest.mark.asyncio(loop_scope="session")

COUNT = 6


class Fleet:
    """A hub with six events in each partition, and the container of a group of azure-eventhub."""

    def __init__(self, emulator: Emulator, hub: str, azurite: Azurite, azure: AzurePeer, directory: Path) -> None:
        self.emulator = emulator
        self.hub = hub
        self.azure = azure
        self.directory = directory
        self.storage = azurite.connection_string
        self.container = f"azure-{uuid.uuid4().hex}"
        # azure-eventhub keeps the port, which the emulator's connection string has.
        endpoint = re.search("Endpoint=([^;]+)", emulator.connection_string)
        assert endpoint is not None
        self.namespace = urlsplit(endpoint[1]).netloc

    async def fill(self) -> None:
        async with ContainerClient.from_connection_string(self.storage, self.container) as container:
            await container.create_container()
        async with EventProducer(self.emulator.connection_string, self.hub) as producer:
            for partition in PARTITIONS:
                events = [EventData(f"{partition}-{number}") for number in range(COUNT)]
                await producer.send(events, partition_id=partition)

    def target(self) -> BlobCheckpointWriter:
        return BlobCheckpointWriter(
            self.container, connection_string=self.storage, namespace=self.namespace, owner_timeout=5.0
        )

    def editor(self, target: BlobCheckpointWriter | SqliteCheckpointWriter) -> CheckpointEditor:
        return CheckpointEditor(self.emulator.connection_string, self.hub, checkpoints=target)

    def file(self) -> Path:
        return self.directory / f"{uuid.uuid4().hex}.json"

    async def reset(self, to: Start, partition: str) -> None:
        async with self.editor(self.target()) as editor:
            plan = await editor.plan_reset(to, partitions=[partition], is_new=True)
            assert (await editor.apply(plan, export_to=self.file())).written == [partition]

    async def consume(self, count: int) -> dict[str, list[int]]:
        """Return the numbers that azure-eventhub receives from where its checkpoints say, up to a count.

        A partition without a checkpoint would begin at its end. It is closed once its checkpoints are stored.
        """
        consumer = await self.azure.consumer(
            self.emulator.connection_string,
            self.hub,
            store=(self.storage, self.container),
            client={"load_balancing_interval": 0.5},
            starting_position="@latest",
        )
        events = await consumer.receive(count)
        received: dict[str, list[int]] = {}
        for event in events:
            received.setdefault(event.partition, []).append(event.sequence_number)
        await self.until_no_lag()
        assert consumer.notes.errors == []
        await consumer.close()
        return received

    async def until_no_lag(self) -> None:
        """Wait until the checkpoints are those of the newest events."""
        checkpoints = BlobCheckpointReader(self.container, connection_string=self.storage, namespace=self.namespace)
        reader = LagReader(self.emulator.connection_string, self.hub, checkpoints=checkpoints)
        async with reader, asyncio.timeout(30), contextlib.aclosing(reader.watch(0.2)) as readings:
            async for lag in readings:
                if (lag.total, lag.unknown) == (0, ()):
                    return


@pytest.fixture
def fleet(emulator: Emulator, hub: str, azurite: Azurite, azure: AzurePeer, tmp_path: Path) -> Fleet:
    """A fleet that has not begun."""
    return Fleet(emulator, hub, azurite, azure, tmp_path)


async def test_azure_eventhub_begins_where_it_was_reset_to(fleet: Fleet) -> None:
    """At the start, at a number, at a time; and at the end nothing comes but what is sent afterwards."""
    await fleet.fill()
    held = await read_hub(fleet.emulator, fleet.hub)
    await fleet.reset("earliest", "0")
    await fleet.reset(4, "1")
    await fleet.reset(held["2"][0].enqueued_time, "2")
    await fleet.reset("latest", "3")
    assert await fleet.consume(6 + 2 + 6) == {"0": list(range(6)), "1": [4, 5], "2": list(range(6))}


async def test_azure_eventhub_reads_again_what_an_import_takes_back(fleet: Fleet) -> None:
    """A file that was saved before it worked brings it back to there; another form takes the same positions."""
    await fleet.fill()
    for partition in PARTITIONS:
        await fleet.reset(COUNT - 2, partition)
    async with fleet.editor(fleet.target()) as editor:
        saved = CheckpointExport.decode((await editor.export()).encode(), "file")
    expected = {partition: [COUNT - 2, COUNT - 1] for partition in PARTITIONS}
    assert await fleet.consume(8) == expected
    async with fleet.editor(fleet.target()) as editor:
        outcome = await editor.apply(await editor.plan_import(saved), export_to=fleet.file())
        assert (outcome.is_complete, outcome.written) == (True, list(PARTITIONS))
    assert await fleet.consume(8) == expected
    sqlite, blobs = SqliteCheckpointWriter(fleet.directory / "leases.db"), fleet.target()
    try:
        async with fleet.editor(sqlite) as editor:
            assert (await editor.apply(await editor.plan_copy(blobs), export_to=fleet.file())).is_complete
            _, stored = await editor.read()
    finally:
        await blobs.aclose()
    held = await read_hub(fleet.emulator, fleet.hub)
    assert {each: (got.sequence_number, got.offset) for each, got in stored.partitions.items()} == {
        partition: (COUNT - 1, held[partition][-1].offset) for partition in PARTITIONS
    }


async def test_running_azure_eventhub_is_refused(fleet: Fleet) -> None:
    """It would overwrite the new checkpoint with its next one; once it is closed, the partition is written."""
    await fleet.fill()
    for partition in PARTITIONS:
        await fleet.reset(COUNT - 1, partition)
    consumer = await fleet.azure.consumer(
        fleet.emulator.connection_string,
        fleet.hub,
        store=(fleet.storage, fleet.container),
        client={"load_balancing_interval": 0.5},
        starting_position="@latest",
    )
    await consumer.receive(len(PARTITIONS))
    async with fleet.editor(fleet.target()) as editor:
        plan = await editor.plan_reset("earliest")
        reasons = {each.partition_id: each.reason or "" for each in plan.changes}
        assert list(reasons) == list(PARTITIONS)
        assert all(reason.endswith(" owns it") for reason in reasons.values())
        outcome = await editor.apply(plan, export_to=fleet.file())
        assert (outcome.export, outcome.written) == (None, ())
        await consumer.close()
        assert (await editor.apply(await editor.plan_reset("earliest"), export_to=fleet.file())).is_complete
    assert await fleet.consume(4 * COUNT) == {partition: list(range(COUNT)) for partition in PARTITIONS}
