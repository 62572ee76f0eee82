"""Official SDKs write the checkpoints and ownerships on record, which `eventpump lag` reads, and they read ours."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from azure.eventhub.extensions.checkpointstoreblobaio import BlobCheckpointStore
from azure.storage.blob.aio import ContainerClient

from eventpump import BlobOwnershipStore, Emulator
from eventpump.eventhubs.events import Checkpoint
from tests.integration.test_cli_send_tail import run
from tests.interop.members.fleet import FAST, Kind, MixedFleet
from tests.interop.peers.javascript import JavaScriptPeer
from tests.support.azurite import Azurite
from tests.support.golden import COUNT, GOLDEN, OWNER, PARTITIONS, SCOPE, Blobs, list_metadata
from tests.support.leases import unheld
from tests.support.reading import read_partition

pytestmark = pytest.mark.asyncio(loop_scope="session")


def as_recorded(blobs: Blobs, offset: str) -> Blobs:
    """Return blobs with texts in place of what differs from run to run."""
    values: Mapping[str, Callable[[str], str]] = {
        "ownerid": lambda value: value and OWNER,
        "offset": lambda value: "232" if value == offset else value,
    }
    return {
        name: {key: values.get(key, str)(value) for key, value in metadata.items()} for name, metadata in blobs.items()
    }


async def lag(emulator: Emulator, store: tuple[str, str]) -> list[tuple[str, int, Any, bool]]:
    """Return state, lag, checkpoint and whether it is owned, of each partition by `eventpump lag`."""
    place: Sequence[str] = ("--storage-connection-string", store[0], "--container", store[1])
    code, out, err = await run("lag", "--hub", SCOPE.hub, *place, "--json", emulator=emulator)
    assert (code, err) == (0, "")
    document = json.loads(out)
    assert document["notes"] == []
    return [
        (each["state"], each["lag"], each["checkpoint"] and each["checkpoint"]["sequence_number"], each["is_owned"])
        for each in document["partitions"].values()
    ]


@pytest.mark.parametrize(("kind", "language"), [("azure", "python"), ("javascript", "javascript")])
async def test_sdk_writes_the_blobs_on_record(azurite: Azurite, kind: Kind, language: str) -> None:
    """Names and keys in their case, while it runs and when it is closed; `eventpump lag` is right in both states."""
    store = (azurite.connection_string, f"golden-{uuid.uuid4().hex}")
    count = len(PARTITIONS)
    async with (
        Emulator({SCOPE.hub: count}) as emulator,
        MixedFleet(emulator, store, count, FAST, hub=SCOPE.hub, is_loaded=False) as fleet,
        ContainerClient.from_connection_string(*store) as container,
    ):
        await fleet.send("0", COUNT)
        offset = (await read_partition(emulator.connection_string, SCOPE.hub, "0"))[-1].offset
        member = await fleet.start(kind)
        await fleet.until(lambda: member.stored == {"0": COUNT - 1} and member.reading == set(PARTITIONS))
        assert as_recorded(await list_metadata(container), offset) == GOLDEN[language]["running"]
        assert await lag(emulator, store) == [("ok", 0, COUNT - 1, True), ("no-checkpoint", 0, None, True)]
        await fleet.stop(member)
        assert as_recorded(await list_metadata(container), offset) == GOLDEN[language]["closed"]
        assert await lag(emulator, store) == [("unowned", 0, COUNT - 1, False), ("no-checkpoint", 0, None, False)]


async def test_official_stores_read_what_ours_writes(azurite: Azurite) -> None:
    """Owners, released or not, and checkpoints, in the forms in which the SDKs list those of their own processors."""
    storage = (azurite.connection_string, f"golden-{uuid.uuid4().hex}")
    store = BlobOwnershipStore(storage[1], connection_string=storage[0], create=True)
    await store.open(SCOPE)
    await store.ensure(["0", "1", "2"])
    for partition_id in ("0", "1"):
        lease = await store.acquire(unheld(partition_id), f"host-{partition_id}")
        assert lease is not None
        checkpoint = Checkpoint(partition_id, f"{100 + int(partition_id)}", 7 + int(partition_id))
        assert await store.write_checkpoint(lease, checkpoint)
        if partition_id == "1":
            assert await store.release(lease)
    await store.aclose()
    scope = (SCOPE.fully_qualified_namespace, SCOPE.hub, SCOPE.consumer_group)
    async with BlobCheckpointStore.from_connection_string(*storage) as azure:
        owners = {each["partition_id"]: each["owner_id"] or "" for each in await azure.list_ownership(*scope)}
        places = {
            each["partition_id"]: (each["offset"], each["sequence_number"])
            for each in await azure.list_checkpoints(*scope)
        }
    assert owners == {"0": "host-0", "1": "", "2": ""}
    assert places == {"0": ("100", 7), "1": ("101", 8)}
    async with JavaScriptPeer() as peer:
        listed = await peer.list_stored(storage, *scope)
    assert {each["partitionId"]: each["ownerId"] for each in listed["ownerships"]} == owners
    found = {each["partitionId"]: (each["offset"], each["sequenceNumber"]) for each in listed["checkpoints"]}
    assert found == places
