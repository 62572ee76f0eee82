"""What stores and readers of the other SDKs' form make of a container's listings, over one in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from typing import Any

import pytest

from eventpump.checkpoints import BlobCheckpointWriter
from eventpump.clock import LoopClock
from eventpump.eventhubs.events import Checkpoint
from eventpump.interfaces import ConsumerScope
from eventpump.lag import BlobCheckpointReader
from eventpump.storage.leases.ownership import BlobOwnershipStore
from tests.support.blobs import Container, container_client

SCOPE = ConsumerScope("Ns.servicebus.windows.net", "telemetry", "$Default")
LOWER = "ns.servicebus.windows.net/telemetry/$default"
KEPT = "Ns.servicebus.windows.net/telemetry/$Default"

LOOKED_AT = datetime(2026, 3, 1, tzinfo=UTC)


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    """Closes what a test opens."""
    async with AsyncExitStack() as made:
        yield made


async def opened(stack: AsyncExitStack, container: Container) -> BlobOwnershipStore:
    store = BlobOwnershipStore(container_client(container))
    stack.push_async_callback(store.aclose)
    await store.open(SCOPE)
    return store


def reader(stack: AsyncExitStack, container: Container) -> BlobCheckpointReader:
    made = BlobCheckpointReader(container_client(container))
    stack.push_async_callback(made.aclose)
    return made


def writer(stack: AsyncExitStack, container: Container) -> BlobCheckpointWriter:
    made = BlobCheckpointWriter(container_client(container))
    stack.push_async_callback(made.aclose)
    return made


async def test_listings_of_several_pages_are_read_to_their_end(stack: AsyncExitStack) -> None:
    """Owners and checkpoints after the first 5,000 blobs are as good as those before."""
    container = Container(LoopClock().time, page=3)
    partition_ids = [str(number) for number in range(8)]
    for each in partition_ids:
        container.put(f"{LOWER}/checkpoint/{each}", metadata={"offset": f"{each}00", "sequencenumber": each})
        container.put(f"{LOWER}/ownership/{each}", metadata={"ownerid": f"host-{each}"})
    store = await opened(stack, container)
    assert [(each.partition_id, each.owner) for each in await store.list()] == [
        (each, f"host-{each}") for each in partition_ids
    ]
    for make in (reader, writer):
        found = (await make(stack, container).read(SCOPE, partition_ids)).partitions
        assert {each: (got.sequence_number, got.owner) for each, got in found.items()} == {
            each: (int(each), f"host-{each}") for each in partition_ids
        }


async def test_versions_and_deleted_blobs_are_not_read(stack: AsyncExitStack) -> None:
    """In an account that keeps them, what was replaced or deleted neither owns a partition nor is a checkpoint."""
    container = Container(LoopClock().time, keeps_history=True)
    container.put(f"{LOWER}/ownership/1", metadata={"ownerid": "gone"})
    container.put(f"{LOWER}/checkpoint/1", metadata={"offset": "900", "sequencenumber": "9"})
    container.delete(f"{LOWER}/ownership/1")
    container.delete(f"{LOWER}/checkpoint/1")
    store = await opened(stack, container)
    await store.ensure(["0", "1"])
    lease = await store.acquire((await store.list())[0], "ours")
    assert lease is not None
    assert await store.write_checkpoint(lease, Checkpoint("0", "700", 7))
    assert await store.write_checkpoint(lease, Checkpoint("0", "300", 3), backwards=True)
    assert container.history
    assert [(each.owner, each.is_held) for each in await store.list()] == [("ours", True), (None, False)]
    assert await store.read_checkpoint("0") == Checkpoint("0", "300", 3)
    assert await store.read_checkpoint("1") is None
    for make in (reader, writer):
        found = (await make(stack, container).read(SCOPE, ["0", "1"])).partitions
        assert [(got.sequence_number, got.owner) for got in found.values()] == [(3, "ours"), (None, None)]


@pytest.mark.parametrize("error", [-3600.0, 3600.0], ids=["ahead", "behind"])
async def test_owners_are_judged_by_the_clock_of_the_account(stack: AsyncExitStack, error: float) -> None:
    """An owner is neither taken for gone, so that its checkpoint is reset under it, nor for alive; a note says why."""
    clock = LoopClock()
    now = clock.time() + error
    container = Container(lambda: now)
    container.put(f"{LOWER}/ownership/1", metadata={"ownerid": "gone"})
    now += 600
    container.put(f"{LOWER}/ownership/0", metadata={"ownerid": "theirs"})
    for make in (reader, writer):
        read = await make(stack, container).read(SCOPE, ["0", "1"])
        assert [got.is_owned for got in read.partitions.values()] == [True, False]
        (note,) = read.notes
        assert ("behind" if error > 0 else "ahead of") in note
    target = writer(stack, container)
    assert not await target.check(SCOPE, ["0", "1"], LOOKED_AT)
    await target.begin(SCOPE, ["0"])
    assert await target.write("0", None, Checkpoint("0", "-1", -1), from_owner=False) == "theirs owns it"


async def test_two_spellings_at_once_are_noted_by_a_reader(stack: AsyncExitStack) -> None:
    """The lag may be that of blobs that no member uses any more. It takes one more listing, once."""
    container = Container(LoopClock().time)
    for directory, number in ((LOWER, "5"), (KEPT, "9")):
        container.put(f"{directory}/checkpoint/0", metadata={"offset": "100", "sequencenumber": number})
    made = reader(stack, container)
    for _ in range(2):
        read = await made.read(SCOPE, ["0"])
        assert read.partitions["0"].sequence_number == 5
        (note,) = read.notes
        assert f"{LOWER}/" in note
        assert f"{KEPT}/" in note
    before = container.requests
    await made.read(SCOPE, ["0"])
    assert container.requests == before + 1


async def test_reading_takes_one_listing_or_one_read_per_lease(stack: AsyncExitStack) -> None:
    """Of 1,024 partitions: after the first reading one request for v5; for leases one more each, at most 32 at once."""
    container = Container(LoopClock().time)
    partition_ids = [str(number) for number in range(1024)]
    for each in partition_ids:
        container.put(f"{LOWER}/checkpoint/{each}", metadata={"offset": "1", "sequencenumber": "0"})
        container.put(f"{LOWER}/ownership/{each}", metadata={"ownerid": "host"})
        container.put(f"$Default/{each}", f'{{"Offset":"1","SequenceNumber":0,"PartitionId":"{each}"}}'.encode())
    at_once = [0, 0]

    async def door(operation: str, work: Callable[[], Any]) -> Any:
        at_once[0] += 1
        at_once[1] = max(at_once)
        await asyncio.sleep(0)
        at_once[0] -= 1
        return work()

    made = reader(stack, container)
    leases = BlobCheckpointReader(container_client(container, door), format="event-processor-host")
    stack.push_async_callback(leases.aclose)
    for some, requests in ((made, 1), (leases, 1 + 1024)):
        await some.read(SCOPE, partition_ids)
        before = container.requests
        assert len((await some.read(SCOPE, partition_ids)).partitions) == 1024
        assert container.requests - before == requests
    assert at_once[1] == 32
