"""`BlobOwnershipStore` over azure-storage-blob's client and a container in memory."""

from __future__ import annotations

import pytest

from eventpump.clock import LoopClock
from eventpump.interfaces import ConsumerScope
from eventpump.storage.leases.ownership import BlobOwnershipStore
from tests.support.blobs import Container, container_client

SCOPE = ConsumerScope("ns.servicebus.windows.net", "telemetry", "$Default")
OWNERSHIP = "ns.servicebus.windows.net/telemetry/$default/ownership"


async def test_list_marks_ownership_that_another_sdk_has_written() -> None:
    """Their writes drop the keys of ours: such an owner balances by rules of its own. A released one has no owner."""
    container = Container(LoopClock().time)
    store = BlobOwnershipStore(container_client(container))
    await store.open(SCOPE)
    await store.ensure(["0", "1", "2"])
    listed = await store.list()
    assert await store.acquire(listed[0], "ours") is not None
    taken = await store.acquire(listed[1], "ours")
    assert taken is not None
    container.set_metadata(f"{OWNERSHIP}/1", {"ownerid": "theirs"})
    found = [(each.owner, each.is_held, each.is_foreign) for each in await store.list()]
    assert found == [("ours", True, False), ("theirs", True, True), (None, False, False)]
    assert await store.renew(taken) is None
    await store.aclose()


@pytest.mark.parametrize("error", [-3600.0, 3600.0], ids=["ahead", "behind"])
async def test_list_judges_age_by_the_clock_of_the_account(error: float) -> None:
    """An hour between the two clocks changes nothing."""
    clock = LoopClock()
    container = Container(lambda: clock.time() + error)
    store = BlobOwnershipStore(container_client(container))
    await store.open(SCOPE)
    await store.ensure(["0"])
    container.set_metadata(f"{OWNERSHIP}/0", {"ownerid": "theirs"})
    assert [each.is_held for each in await store.list()] == [True]
    await store.aclose()


async def test_partition_that_the_hub_does_not_have_is_listed_until_that_is_known() -> None:
    """Its checkpoint shows that the group has some; no ownership is created for it, and no host's share counts it."""
    container = Container(LoopClock().time)
    for partition_id in ("0", "7"):
        container.put(
            f"{OWNERSHIP.removesuffix('ownership')}checkpoint/{partition_id}",
            metadata={"offset": "100", "sequencenumber": "5"},
        )
    store = BlobOwnershipStore(container_client(container))
    await store.open(SCOPE)
    assert [each.partition_id for each in await store.list()] == ["0", "7"]
    await store.ensure(["0", "1"])
    assert [each.partition_id for each in await store.list()] == ["0", "1"]
    assert [name for name in sorted(container.blobs) if "/ownership/" in name] == [f"{OWNERSHIP}/0", f"{OWNERSHIP}/1"]
    await store.aclose()
