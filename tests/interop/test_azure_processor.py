"""azure-eventhub's own processor: several share a hub through blobs on real Azurite, on our emulator.

Its balancing runs every half second here, and ownership expires after three; by default that is 30 s and 3 min.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Sequence

import pytest
import pytest_asyncio
from azure.storage.blob.aio import ContainerClient

from eventpump import Emulator, EventData, EventProducer
from tests.interop.peers.driver import AzurePeer, PeerConsumer
from tests.interop.reading import PARTITIONS
from tests.support.azurite import Azurite

pytestmark = pytest.mark.asyncio(loop_scope="session")

INTERVAL = 0.5


@pytest_asyncio.fixture(loop_scope="session")
async def store(azurite: Azurite) -> tuple[str, str]:
    """A container for ownerships and checkpoints: the store's connection string, and the container's name."""
    name = f"checkpoints-{uuid.uuid4().hex}"
    async with ContainerClient.from_connection_string(azurite.connection_string, name) as container:
        await container.create_container()
    return azurite.connection_string, name


class Stream:
    """Events sent all the time, to every partition."""

    def __init__(self, producer: EventProducer) -> None:
        self._producer = producer
        self._stopping = asyncio.Event()
        self.sent: dict[str, int] = dict.fromkeys(PARTITIONS, 0)

    async def run(self) -> None:
        while not self._stopping.is_set():
            for partition in PARTITIONS:
                await self._producer.send(EventData(f"{partition}-{self.sent[partition]}"), partition_id=partition)
                self.sent[partition] += 1
            try:
                async with asyncio.timeout(0.02):
                    await self._stopping.wait()
            except TimeoutError:
                pass

    def stop(self) -> None:
        self._stopping.set()


@pytest_asyncio.fixture(loop_scope="session")
async def stream(emulator: Emulator, hub: str) -> AsyncIterator[Stream]:
    """A stream that is running."""
    async with EventProducer(emulator.connection_string, hub) as producer, asyncio.TaskGroup() as group:
        running = Stream(producer)
        group.create_task(running.run())
        yield running
        running.stop()


async def join(azure: AzurePeer, emulator: Emulator, hub: str, store: tuple[str, str]) -> PeerConsumer:
    """Start a processor: it shares the hub's partitions, and checkpoints every batch."""
    return await azure.consumer(
        emulator.connection_string,
        hub,
        store=store,
        client={"load_balancing_interval": INTERVAL, "partition_ownership_expiration_interval": 6 * INTERVAL},
        starting_position="-1",
    )


def seen(consumers: Sequence[PeerConsumer]) -> dict[str, set[int]]:
    """The sequence numbers that any of the processors was given, by partition."""
    found: dict[str, set[int]] = {partition: set() for partition in PARTITIONS}
    for consumer in consumers:
        for each in consumer.notes.received:
            assert each.data.decode() == f"{each.partition}-{each.sequence_number}"
            found[each.partition].add(each.sequence_number)
    return found


def has_all(consumers: Sequence[PeerConsumer], sent: dict[str, int]) -> bool:
    return seen(consumers) == {partition: set(range(count)) for partition, count in sent.items()}


async def test_azure_processors_share_a_hub_and_take_over(
    emulator: Emulator, azure: AzurePeer, hub: str, store: tuple[str, str], stream: Stream
) -> None:
    """A second processor takes half of the partitions, the first leaves and it takes them all: nothing is lost."""
    one = await join(azure, emulator, hub, store)
    await one.until(lambda notes: notes.owned == set(PARTITIONS) and len(notes.received) > 8)
    two = await join(azure, emulator, hub, store)
    await two.until(lambda notes: len(notes.owned) == 2)
    await one.until(lambda notes: len(notes.owned) == 2)
    assert one.notes.owned | two.notes.owned == set(PARTITIONS)
    await two.until(lambda notes: {each.partition for each in notes.received} >= two.notes.owned)
    await one.close()
    await two.until(lambda notes: notes.owned == set(PARTITIONS))
    stream.stop()
    await two.until(lambda _: has_all([one, two], stream.sent))
    # Those it lost to the other were taken by a reader of the same level: the newest wins.
    assert {error.kind for error in one.notes.errors} <= {"ConnectionLostError"}
    assert two.notes.errors == []


@pytest.mark.long  # another process, and a wait for ownership to expire
async def test_azure_processor_takes_over_from_a_killed_one(
    emulator: Emulator,
    azure: AzurePeer,
    hub: str,
    store: tuple[str, str],
    stream: Stream,
) -> None:
    """A processor killed without a word loses its partitions when its ownership expires, and nothing is lost."""
    async with AzurePeer() as doomed:
        one = await join(doomed, emulator, hub, store)
        await one.until(lambda notes: notes.owned == set(PARTITIONS) and len(notes.received) > 8)
        await doomed.child.kill()
    two = await join(azure, emulator, hub, store)
    await two.until(lambda notes: notes.owned == set(PARTITIONS))
    stream.stop()
    await two.until(lambda _: has_all([one, two], stream.sent))
    assert two.notes.errors == []
