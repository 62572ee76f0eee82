"""KEDA's `blobMetadata` arithmetic, on blobs of azure-eventhub's form, beside the lag that is true."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio
from azure.eventhub.extensions.checkpointstoreblobaio import BlobCheckpointStore
from azure.storage.blob.aio import ContainerClient

from eventpump import BlobOwnershipStore, Emulator, EventData, EventProducer
from eventpump.eventhubs.events import Checkpoint
from eventpump.interfaces import ConsumerScope
from tests.support.azurite import Azurite
from tests.support.golden import list_metadata
from tests.support.keda import STALE_THRESHOLD, PollFailedError, blob_name, partition_lag
from tests.support.leases import unheld
from tests.support.reading import read_partition

pytestmark = pytest.mark.asyncio(loop_scope="session")

NAMESPACE, GROUP = "127.0.0.1", "$Default"


@dataclass(frozen=True)
class State:
    """A partition, and what is stored of it.

    Args:
        sent: Events that were sent.
        dropped: How many of them retention has removed.
        number: The checkpoint's number; None for none.
        lag: What KEDA computes where that is not the true lag; None where it is.
    """

    sent: int
    number: int | None
    dropped: int = 0
    lag: int | None = None


STATES = {
    "nothing-sent": State(0, None),
    "before-the-first-checkpoint": State(5, None),
    "first-event-without-checkpoint": State(1, None),
    "some-expired-without-checkpoint": State(9, None, dropped=4),
    "processed": State(5, 4),
    "behind": State(9, 4),
    "at-the-beginning": State(5, -1),
    "processed-and-expired": State(5, 4, dropped=5),
    "some-expired-behind": State(9, 6, dropped=4),
    # What the format, or KEDA, does not permit to be right.
    "one-event-left-without-checkpoint": State(8, None, dropped=7, lag=0),
    "expired-unread": State(9, 1, dropped=4, lag=7),
    "little-beyond-the-end": State(3, 40, lag=0),
    "far-beyond-the-end": State(3, STALE_THRESHOLD + 40, lag=2**63 - 1 - STALE_THRESHOLD - 40 + 2),
}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def service() -> AsyncIterator[Emulator]:
    """A hub for each state, named in lower case, as names of blobs are."""
    async with Emulator({f"hub-{name}": 1 for name in STATES}) as emulator:
        yield emulator


@pytest_asyncio.fixture(loop_scope="session")
async def container(azurite: Azurite) -> AsyncIterator[ContainerClient]:
    """A container of the test's own."""
    name = f"keda-{uuid.uuid4().hex}"
    async with ContainerClient.from_connection_string(azurite.connection_string, name) as made:
        await made.create_container()
        yield made


async def stored_by_azure(azurite: Azurite, container: str, hub: str, number: int, offset: str) -> None:
    """Store a checkpoint as azure-eventhub does."""
    scope = {"fully_qualified_namespace": NAMESPACE, "eventhub_name": hub, "consumer_group": GROUP}
    async with BlobCheckpointStore.from_connection_string(azurite.connection_string, container) as store:
        await store.update_checkpoint({**scope, "partition_id": "0", "offset": offset, "sequence_number": number})


async def stored_by_ours(azurite: Azurite, container: str, hub: str, number: int, offset: str) -> None:
    """Store a checkpoint as a host does."""
    store = BlobOwnershipStore(container, connection_string=azurite.connection_string)
    try:
        await store.open(ConsumerScope(NAMESPACE, hub, GROUP))
        await store.ensure(["0"])
        lease = await store.acquire(unheld("0"), "host-a")
        assert lease is not None
        assert await store.write_checkpoint(lease, Checkpoint("0", offset, number))
    finally:
        await store.aclose()


@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize("stored_by", [stored_by_azure, stored_by_ours], ids=lambda each: each.__name__)
async def test_keda_computes_the_lag(
    service: Emulator, azurite: Azurite, container: ContainerClient, name: str, stored_by: Any
) -> None:
    """It is the number of events that are there and not processed, in every state in which the page says so."""
    state, hub = STATES[name], f"hub-{name}"
    async with EventProducer(service.connection_string, hub) as producer:
        there = (await producer.get_partition_properties("0")).last_enqueued_sequence_number + 1
        if there < state.sent:
            await producer.send([EventData(b"x") for _ in range(state.sent - there)], partition_id="0")
        service.drop_events(hub, "0", before=state.dropped)
        properties = await producer.get_partition_properties("0")
    if state.number is not None:
        await stored_by(azurite, container.container_name, hub, state.number, "0")
    blobs: Mapping[str, Mapping[str, str]] = await list_metadata(container)
    metadata = blobs.get(blob_name(NAMESPACE, hub, GROUP, "0"))
    assert (metadata is None) == (state.number is None)
    first, last = properties.beginning_sequence_number, properties.last_enqueued_sequence_number
    found = partition_lag(first, last, metadata)
    events = await read_partition(service.connection_string, hub, "0")
    processed = -1 if state.number is None or state.number > last else state.number
    truth = sum(event.sequence_number > processed for event in events)
    assert found == (truth if state.lag is None else state.lag)
    assert (found == truth) == (state.lag is None)


@pytest.mark.parametrize("text", [None, "", "no number", str(2**63)])
async def test_checkpoint_without_a_number_fails_the_whole_poll(text: str | None) -> None:
    """As .NET has stored some, with an offset alone."""
    with pytest.raises(PollFailedError):
        partition_lag(0, 4, {"offset": "100"} if text is None else {"offset": "100", "sequencenumber": text})
