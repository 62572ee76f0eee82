"""The checkpoints and ownerships that the official SDKs write are those on record, and `eventpump lag` reads them."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from azure.storage.blob.aio import ContainerClient

from eventpump import Emulator
from tests.integration.test_cli_send_tail import run
from tests.interop.members.fleet import FAST, Kind, MixedFleet
from tests.support.azurite import Azurite
from tests.support.golden import COUNT, GOLDEN, OWNER, PARTITIONS, SCOPE, Blobs, list_metadata
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
