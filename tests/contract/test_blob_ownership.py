"""What is particular to ownership shared with the other SDKs, on real Azurite: its form, its members, the faults."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest
from aiohttp import web
from azure.core import MatchConditions
from azure.core.exceptions import ResourceModifiedError
from azure.eventhub.extensions.checkpointstoreblobaio import BlobCheckpointStore
from azure.storage.blob import ContainerSasPermissions, generate_container_sas
from azure.storage.blob.aio import BlobClient, BlobLeaseClient, ContainerClient

from eventpump.clock import LoopClock
from eventpump.consumer.host.host import HubHost
from eventpump.consumer.processor import EventProcessor, PartitionContext
from eventpump.core.balancers import RingBalancer, StaticAssignment
from eventpump.core.checkpoint import CheckpointPolicy
from eventpump.core.lease import PartitionLease
from eventpump.core.starts import NO_NUMBER
from eventpump.errors import ConfigurationError, StoreError
from eventpump.eventhubs.events import Checkpoint, ReceivedEvent
from eventpump.interfaces import Clock, ConsumerScope
from eventpump.options.consumer import HostSettings
from eventpump.reports import (
    HostReport,
    LeaseLost,
    LeaseStoreEmpty,
    LeaseTaken,
    LinkFailed,
    OutsideReader,
    SharedStoreNotice,
)
from eventpump.storage.leases.ownership import BlobOwnershipStore
from eventpump.testing.transport import FakeHub, FakeTransport
from tests.support.azurite import Azurite
from tests.support.blob_faults import FaultTransport, Send, on, service
from tests.support.leases import unheld

SCOPE = ConsumerScope("Example.servicebus.windows.net", "Telemetry", "$Default")
LOWER = "example.servicebus.windows.net/telemetry/$default"
KEPT = "Example.servicebus.windows.net/Telemetry/$Default"
OWNER = "worker-a-6f0c"
OFFICIAL = "7b3f3c2e-6a51-4c2a-8d1e-0a9a4d1f5b10"


class OffClock(LoopClock):
    """The machine's clock, set wrong."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds

    def time(self) -> float:
        return super().time() + self._seconds


class Members:
    """Makes stores on one container, and acts as members of other SDKs beside them."""

    def __init__(self, azurite: Azurite, name: str, stack: AsyncExitStack) -> None:
        self.azurite = azurite
        self.name = name
        self._stack = stack
        self.notices: list[tuple[str | None, str]] = []
        self.raw = ContainerClient.from_connection_string(azurite.connection_string, name)
        stack.push_async_callback(self.raw.close)

    def store(
        self,
        *,
        transport: FaultTransport | None = None,
        clock: Clock | None = None,
        preserve_case: bool = False,
        interval: float = 20.0,
    ) -> BlobOwnershipStore:
        client = ContainerClient.from_connection_string(
            self.azurite.connection_string, self.name, **({"transport": transport} if transport else {})
        )
        self._stack.push_async_callback(client.close)
        store = BlobOwnershipStore(client, clock=clock, preserve_case=preserve_case)
        self._stack.push_async_callback(store.aclose)
        store.attend(interval, lambda partition_id, problem: self.notices.append((partition_id, problem)))
        return store

    async def opened(self, *partition_ids: str, scope: ConsumerScope = SCOPE, **options: Any) -> BlobOwnershipStore:
        store = self.store(**options)
        await store.open(scope)
        await store.ensure(partition_ids)
        return store

    async def names(self) -> list[str]:
        return [name async for name in self.raw.list_blob_names()]

    def ownership(self, partition_id: str = "0", directory: str = LOWER) -> BlobClient:
        return self.raw.get_blob_client(f"{directory}/ownership/{partition_id}")

    def checkpoint(self, partition_id: str = "0", directory: str = LOWER) -> BlobClient:
        return self.raw.get_blob_client(f"{directory}/checkpoint/{partition_id}")

    async def write(self, blob: BlobClient, **metadata: str) -> None:
        """Write metadata as the other SDKs do, without a condition."""
        await blob.upload_blob(b"", overwrite=True, metadata=metadata)


@pytest.fixture
async def members(azurite: Azurite, container_name: str) -> AsyncIterator[Members]:
    """An empty container."""
    async with AsyncExitStack() as stack:
        made = Members(azurite, container_name, stack)
        await made.raw.create_container()
        yield made


async def acquire(store: BlobOwnershipStore, partition_id: str = "0", owner: str = OWNER) -> PartitionLease:
    lease = await store.acquire(unheld(partition_id), owner)
    assert lease is not None
    return lease


async def steal(store: BlobOwnershipStore, partition_id: str = "0", owner: str = OWNER) -> PartitionLease:
    (snapshot,) = [each for each in await store.list() if each.partition_id == partition_id]
    lease = await store.acquire(snapshot, owner, held=True)
    assert lease is not None
    return lease


async def metadata_of(blob: BlobClient) -> dict[str, str]:
    properties = await blob.get_blob_properties()
    assert properties.size == 0
    return dict(properties.metadata)


# ---------------------------------------------------------------------------------------- the stored form


async def test_stored_form_is_that_of_the_other_sdks(members: Members) -> None:
    """Empty blobs in lower case with their keys; an ownership that was never claimed, or is released, has no owner."""
    store = await members.opened("3")
    assert await members.names() == [f"{LOWER}/ownership/3"]
    assert (await metadata_of(members.ownership("3")))["ownerid"] == ""
    lease = await acquire(store, "3")
    assert lease.owner_level == 0
    assert (await metadata_of(members.ownership("3")))["ownerid"] == OWNER
    assert await store.write_checkpoint(lease, Checkpoint("3", "4294968112", 1201))
    assert await metadata_of(members.checkpoint("3")) == {
        "offset": "4294968112", "sequencenumber": "1201", "clientidentifier": OWNER
    }  # fmt: skip
    assert await store.release(lease)
    assert (await metadata_of(members.ownership("3")))["ownerid"] == ""


async def test_names_keep_their_case_on_request(members: Members) -> None:
    """As Java and Go have them."""
    store = await members.opened("0", preserve_case=True)
    lease = await acquire(store)
    assert await store.write_checkpoint(lease, Checkpoint("0", "1", 1))
    assert sorted(await members.names()) == [f"{KEPT}/checkpoint/0", f"{KEPT}/ownership/0"]


async def test_own_records_lie_in_no_listing_of_others(members: Members) -> None:
    """Named by namespace, hub and group, and below neither of their directories; nor are they partitions of ours."""
    store = await members.opened("0")
    for name in ("scope.json", "subscriptions/alerts.json", "checkpoints/alerts.1/0"):
        assert await store.records.swap(name, b'{"of":"us"}', None)
    ours = [name for name in await members.names() if not name.startswith(f"{LOWER}/")]
    assert sorted(ours) == [
        f"{LOWER}~checkpoints/alerts.1/0", f"{LOWER}~scope.json", f"{LOWER}~subscriptions/alerts.json"
    ]  # fmt: skip
    assert [each.partition_id for each in await store.list()] == ["0"]
    other = await members.opened("0", scope=replace(SCOPE, hub="alerts"))
    assert await other.records.list("") == {}


async def test_members_of_azure_eventhub_and_hosts_read_each_other(members: Members) -> None:
    """The published store of the Python SDK lists our owners and checkpoints, and writes those that we read."""
    store = await members.opened("0", "1")
    lease = await acquire(store)
    assert await store.write_checkpoint(lease, Checkpoint("0", "100", 5))
    where = SCOPE.fully_qualified_namespace, SCOPE.hub, SCOPE.consumer_group
    official = BlobCheckpointStore.from_connection_string(members.azurite.connection_string, members.name)
    async with official:
        owners = {each["partition_id"]: each["owner_id"] for each in await official.list_ownership(*where)}
        assert owners["0"] == OWNER
        assert not owners["1"]
        (checkpoint,) = await official.list_checkpoints(*where)
        assert (checkpoint["offset"], checkpoint["sequence_number"]) == ("100", 5)
        mine = [{**each, "owner_id": OFFICIAL} for each in await official.list_ownership(*where)]
        assert len(list(await official.claim_ownership(mine))) == 2
        await official.update_checkpoint({**checkpoint, "offset": "200", "sequence_number": 7})
    assert [(each.owner, each.is_held) for each in await store.list()] == [(OFFICIAL, True)] * 2
    assert await store.renew(lease) is None
    assert await store.read_checkpoint("0") == Checkpoint("0", "200", 7)


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"offset": "100", "sequencenumber": "5"}, Checkpoint("0", "100", 5)),  # Python, JavaScript, Go
        ({"Offset": "100", "SequenceNumber": "5"}, Checkpoint("0", "100", 5)),  # old Java
        ({"offset": "no offset", "sequencenumber": "5"}, Checkpoint("0", "", 5)),  # .NET 5.11
        ({"offset": "", "sequencenumber": "5", "clientidentifier": "x"}, Checkpoint("0", "", 5)),  # .NET
        ({"offset": "100", "sequencenumber": ""}, Checkpoint("0", "100", NO_NUMBER)),  # .NET, given an offset alone
        ({"offset": "geo:1-2", "sequencenumber": "5"}, Checkpoint("0", "geo:1-2", 5)),  # a geo-replicated namespace
    ],
)
async def test_checkpoint_of_each_sdk_is_read(members: Members, metadata: dict[str, str], expected: Checkpoint) -> None:
    """In whatever case its keys are, and with what stands for an absent offset or number."""
    store = await members.opened("0")
    await members.write(members.checkpoint(), **metadata)
    assert await store.read_checkpoint("0") == expected


# ------------------------------------------------------------------------------------------------- ownership


async def test_owner_of_another_sdk_is_a_member_whose_partition_can_be_taken(members: Members) -> None:
    """It is listed by its name; after a steal its own write under the ETag that it knows fails, and so it notices."""
    await members.write(members.ownership(), ownerid=OFFICIAL)
    known = (await members.ownership().get_blob_properties()).etag
    store = await members.opened("0")
    assert [(each.owner, each.is_held) for each in await store.list()] == [(OFFICIAL, True)]
    assert await store.acquire(unheld("0"), OWNER) is None
    lease = await steal(store)
    with pytest.raises(ResourceModifiedError):
        await members.ownership().set_blob_metadata(
            {"ownerid": OFFICIAL}, etag=known, match_condition=MatchConditions.IfNotModified
        )
    assert await store.renew(lease) is not None


async def test_unconditional_claim_of_another_member_is_a_loss(members: Members) -> None:
    """JavaScript and Go make a first claim without a condition: from then on nothing of ours has an effect."""
    store = await members.opened("0", "1")
    leases = [await acquire(store, each) for each in ("0", "1")]
    for each in ("0", "1"):
        await members.write(members.ownership(each), ownerid=OFFICIAL)
    assert not await store.write_checkpoint(leases[0], Checkpoint("0", "9", 9))
    assert await store.renew(leases[0]) is None
    assert not await store.release(leases[1])
    assert [each.owner for each in await store.list()] == [OFFICIAL] * 2


async def test_hosts_of_one_name_are_not_taken_for_each_other(members: Members) -> None:
    """An ownership is that of a claim, and not of a name."""
    store, other = await members.opened("0"), await members.opened()
    lease = await acquire(store)
    taken = await steal(other)
    assert await store.renew(lease) is None
    assert not await store.write_checkpoint(lease, Checkpoint("0", "1", 1))
    assert not await store.release(lease)
    assert await other.renew(taken) is not None


async def test_two_claims_under_one_etag_have_one_winner(members: Members) -> None:
    """Another member's claim between our reading and our writing is not overwritten."""
    transport = FaultTransport()
    store = await members.opened("0", transport=transport)

    async def race(request: Any, go_on: Send) -> Any:
        await members.write(members.ownership(), ownerid=OFFICIAL)
        return await go_on()

    transport.hook = on("Set Blob Metadata", race)
    assert await store.acquire(unheld("0"), OWNER) is None
    assert (await metadata_of(members.ownership()))["ownerid"] == OFFICIAL


def page(partition_id: str, modified: datetime, marker: str = "") -> web.Response:
    """A listing of one ownership."""
    blob = (
        f"<Blob><Name>{LOWER}/ownership/{partition_id}</Name><Properties>"
        f"<Last-Modified>{format_datetime(modified, usegmt=True)}</Last-Modified><Etag>0x1</Etag>"
        f"<BlobType>BlockBlob</BlobType></Properties><Metadata><ownerid>{OFFICIAL}</ownerid></Metadata></Blob>"
    )
    body = f"<EnumerationResults><Blobs>{blob}</Blobs><NextMarker>{marker}</NextMarker></EnumerationResults>"
    return web.Response(text=f'<?xml version="1.0"?>{body}', content_type="application/xml")


@pytest.mark.parametrize(("seconds", "age"), [(-60.0, 50.0), (60.0, 10.0)])
async def test_expiry_goes_by_the_clock_of_the_account(members: Members, seconds: float, age: float) -> None:
    """A clock that is a minute off makes no owner expire too early or too late; it is reported, once."""
    modified = datetime.now(UTC) - timedelta(seconds=age)
    async with service(lambda request: page("0", modified)) as (url, _):
        store = BlobOwnershipStore(
            "leases",
            account_url=url,
            credential=members.raw.credential.account_key,
            owner_timeout=40.0,
            clock=OffClock(seconds),
        )
        store.attend(20.0, lambda partition_id, problem: members.notices.append((partition_id, problem)))
        try:
            await store.open(SCOPE)
            assert [each.is_held for each in [*await store.list(), *await store.list()]] == [age < 40] * 2
        finally:
            await store.aclose()
    (text,) = [text for _, text in members.notices if "clock" in text]
    assert ("ahead of" if seconds > 0 else "behind") in text


async def test_ownership_that_is_released_can_be_claimed_at_once(members: Members) -> None:
    """By an empty owner, or without one."""
    await members.write(members.ownership("0"), ownerid="")
    await members.write(members.ownership("1"))
    store = await members.opened("0", "1")
    assert [(each.owner, each.is_held) for each in await store.list()] == [(None, False)] * 2
    for each in ("0", "1"):
        await acquire(store, each)


async def test_ownership_that_was_deleted_is_lost_and_made_again(members: Members) -> None:
    """Its partition is not lost with it."""
    store = await members.opened("0")
    lease = await acquire(store)
    await members.ownership().delete_blob()
    assert await store.renew(lease) is None
    assert [(each.partition_id, each.is_held) for each in await store.list()] == [("0", False)]
    assert (await acquire(store)).epoch == 2


async def test_renewal_whose_answer_was_lost_is_no_loss(members: Members) -> None:
    """The ETag is not the known one then, but the claim is still ours."""
    transport = FaultTransport()
    store = await members.opened("0", transport=transport)
    lease = await acquire(store)

    async def lose(request: Any, go_on: Send) -> Any:
        await go_on()
        raise OSError("the answer is lost")

    transport.hook = on("Set Blob Metadata", lose)
    with pytest.raises(StoreError):
        await store.renew(lease)
    assert await store.renew(lease) is not None
    assert await store.write_checkpoint(lease, Checkpoint("0", "1", 1))


async def test_claim_whose_answer_was_lost_is_given_back(members: Members) -> None:
    """Nobody would work under it, and the others would wait for its expiry."""
    transport = FaultTransport()
    store = await members.opened("0", transport=transport)

    async def lose(request: Any, go_on: Send) -> Any:
        await go_on()
        raise OSError("the answer is lost")

    transport.hook = on("Set Blob Metadata", lose)
    with pytest.raises(StoreError):
        await store.acquire(unheld("0"), OWNER)
    await store.aclose()
    assert (await metadata_of(members.ownership()))["ownerid"] == ""
    assert (await acquire(await members.opened())).epoch == 2


async def test_checkpoint_after_a_lost_answer_is_stored(members: Members) -> None:
    """The ETag is not the known one then: what is stored is read, and found to be earlier."""
    transport = FaultTransport()
    store = await members.opened("0", transport=transport)
    lease = await acquire(store)
    assert await store.write_checkpoint(lease, Checkpoint("0", "100", 10))

    async def lose(request: Any, go_on: Send) -> Any:
        await go_on()
        raise OSError("the answer is lost")

    transport.hook = on("Set Blob Metadata", lose)
    with pytest.raises(StoreError):
        await store.write_checkpoint(lease, Checkpoint("0", "200", 20))
    assert await store.write_checkpoint(lease, Checkpoint("0", "300", 30))
    assert await store.read_checkpoint("0") == Checkpoint("0", "300", 30)


async def test_each_operation_makes_the_requests_it_needs(members: Members) -> None:
    """A renewal needs one, a listing one, and a checkpoint two: the first reads who the owner is."""
    transport = FaultTransport()
    store = await members.opened("0", transport=transport)

    async def requests(call: Any) -> list[str]:
        transport.requests.clear()
        assert await call is not None
        return list(transport.requests)

    assert await requests(store.list()) == ["List Blobs"]
    transport.requests.clear()
    lease = await acquire(store)
    assert transport.requests == ["Get Blob Properties", "Set Blob Metadata"]
    assert await requests(store.renew(lease)) == ["Set Blob Metadata"]
    first = store.write_checkpoint(lease, Checkpoint("0", "1", 1))
    assert await requests(first) == ["Get Blob Properties", "Get Blob Properties", "Put Blob"]
    second = store.write_checkpoint(lease, Checkpoint("0", "2", 2))
    assert await requests(second) == ["Get Blob Properties", "Set Blob Metadata"]
    assert await requests(store.release(lease)) == ["Set Blob Metadata"]


# ------------------------------------------------------------------------------------------------ checkpoints


async def test_checkpoint_that_a_former_owner_moved_back_is_moved_on_again(members: Members) -> None:
    """The other SDKs write without a condition: the next checkpoint of the owner is read and compared, and wins."""
    store = await members.opened("0")
    lease = await acquire(store)
    assert await store.write_checkpoint(lease, Checkpoint("0", "200", 20))
    await members.write(members.checkpoint(), offset="100", sequencenumber="10")
    assert await store.write_checkpoint(lease, Checkpoint("0", "300", 30))
    assert await store.read_checkpoint("0") == Checkpoint("0", "300", 30)
    await members.write(members.checkpoint(), offset="900", sequencenumber="90")
    assert await store.write_checkpoint(lease, Checkpoint("0", "400", 40))
    assert await store.read_checkpoint("0") == Checkpoint("0", "900", 90), "what is processed was moved back"
    assert members.notices == []


async def test_checkpoint_written_late_after_a_reset_is_replaced_and_reported(members: Members) -> None:
    """There is no generation: a higher number of a former owner does not undo the reset of this owner."""
    store = await members.opened("0")
    lease = await acquire(store)
    assert await store.write_checkpoint(lease, Checkpoint("0", "200", 20))
    assert await store.write_checkpoint(lease, Checkpoint("0", "-1", -1), backwards=True)
    await members.write(members.checkpoint(), offset="210", sequencenumber="21")
    assert await store.read_checkpoint("0") == Checkpoint("0", "-1", -1), "a pump that starts again would skip events"
    assert await store.write_checkpoint(lease, Checkpoint("0", "10", 1))
    assert await store.read_checkpoint("0") == Checkpoint("0", "10", 1)
    ((partition_id, text),) = members.notices
    assert partition_id == "0"
    assert f"{LOWER}/checkpoint/0" in text
    assert "21" in text
    assert await store.write_checkpoint(lease, Checkpoint("0", "20", 2))
    assert await store.read_checkpoint("0") == Checkpoint("0", "20", 2)


@pytest.mark.parametrize("late_one", ["checkpoint", "reset"])
async def test_checkpoint_that_arrives_late_is_refused(members: Members, late_one: str) -> None:
    """A write that was given up on, and reaches the account after a newer one, changes nothing."""
    transport = FaultTransport()
    store = await members.opened("0", transport=transport)
    lease = await acquire(store)
    assert await store.write_checkpoint(lease, Checkpoint("0", "100", 10))
    sent, late = asyncio.Event(), asyncio.Event()
    outcome: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def delay(request: Any, go_on: Send) -> Any:
        async def arrive() -> None:
            await late.wait()
            response = await go_on()
            outcome.set_result(response.status_code)

        task = asyncio.create_task(arrive())
        sent.set()
        await asyncio.shield(task)

    transport.hook = on("Set Blob Metadata", delay)
    given_up = asyncio.create_task(
        store.write_checkpoint(lease, Checkpoint("0", "150", 15), backwards=late_one == "reset")
    )
    await sent.wait()
    given_up.cancel()
    with pytest.raises(asyncio.CancelledError):
        await given_up
    newer = Checkpoint("0", "50", 5) if late_one == "checkpoint" else Checkpoint("0", "200", 20)
    assert await store.write_checkpoint(lease, newer, backwards=late_one == "checkpoint")
    late.set()
    assert await outcome == 412
    assert await store.read_checkpoint("0") == newer


@pytest.mark.parametrize("backwards", [False, True])
async def test_checkpoint_of_an_owner_that_takes_the_partition_meanwhile_stays(
    members: Members, backwards: bool
) -> None:
    """A write that has found the ownership its own, and is overtaken by a new owner's claim and checkpoint, is lost."""
    transport = FaultTransport()
    store, other = await members.opened("0", transport=transport), await members.opened()
    await members.write(members.checkpoint(), offset="100", sequencenumber="10")
    lease = await acquire(store)

    async def overtake(request: Any, go_on: Send) -> Any:
        response = await go_on()
        if "/ownership/" in str(request.url):
            transport.hook = None
            taken = await steal(other, owner="other")
            assert await other.write_checkpoint(taken, Checkpoint("0", "200", 20))
        return response

    transport.hook = overtake
    assert not await store.write_checkpoint(lease, Checkpoint("0", "150", 15), backwards=backwards)
    assert await other.read_checkpoint("0") == Checkpoint("0", "200", 20)


async def test_offsets_of_two_kinds_are_not_compared(members: Members) -> None:
    """After a failover a geo-replicated namespace counts anew: numbers beside offsets of another kind say nothing."""
    await members.write(members.checkpoint(), offset="100", sequencenumber="1000")
    store = await members.opened("0")
    lease = await acquire(store)
    assert await store.write_checkpoint(lease, Checkpoint("0", "geo:1-7", 7))
    assert await store.read_checkpoint("0") == Checkpoint("0", "geo:1-7", 7)
    assert await store.write_checkpoint(lease, Checkpoint("0", "-1", -1))
    assert await store.read_checkpoint("0") == Checkpoint("0", "geo:1-7", 7), "the start is before each"


# -------------------------------------------------------------------------------------------------- two spellings


@pytest.mark.parametrize("preserve_case", [False, True])
async def test_group_in_the_other_spelling_alone_is_refused(members: Members, preserve_case: bool) -> None:
    """To begin beside its members would be two fleets that take each other's links, each from its own positions."""
    there = LOWER if preserve_case else KEPT
    await members.write(members.checkpoint(directory=there), offset="100", sequencenumber="5")
    store = members.store(preserve_case=preserve_case)
    with pytest.raises(ConfigurationError) as caught:
        await store.open(SCOPE)
    assert f"{there}/" in str(caught.value)
    assert f"preserve_case={not preserve_case}" in str(caught.value)
    assert await members.names() == [f"{there}/checkpoint/0"]
    joined = await members.opened("0", preserve_case=not preserve_case)
    assert await joined.read_checkpoint("0") == Checkpoint("0", "100", 5)


async def test_two_spellings_at_once_are_reported(members: Members) -> None:
    """A group that goes on in its own spelling is not stopped by blobs that may be old."""
    for directory in (LOWER, KEPT):
        await members.write(members.checkpoint(directory=directory), offset="100", sequencenumber="5")
    await members.opened("0")
    ((_, text),) = members.notices
    assert f"{LOWER}/" in text
    assert f"{KEPT}/" in text


# -------------------------------------------------------------------------------------------------------- bad input


async def test_missing_container_is_named(azurite: Azurite, container_name: str) -> None:
    """As of each store: it is a mistake, unless `create` is given."""
    store = BlobOwnershipStore(container_name, connection_string=azurite.connection_string)
    with pytest.raises(ConfigurationError, match=f"no container {container_name}.*create=True"):
        await store.open(SCOPE)


@pytest.mark.parametrize("metadata", [{}, {"offset": "", "sequencenumber": "many"}, {"offset": "no offset"}])
async def test_checkpoint_that_is_no_position_is_not_taken_for_none(members: Members, metadata: dict[str, str]) -> None:
    """It is reported as the store is opened, and the partition not read: to begin anywhere else could lose events."""
    await members.write(members.checkpoint(), **metadata)
    store = await members.opened("0", "1")
    ((partition_id, text),) = members.notices
    assert partition_id == "0"
    assert f"{LOWER}/checkpoint/0 is not a checkpoint" in text
    with pytest.raises(StoreError, match=r"checkpoint/0 is not a checkpoint.*delete the blob"):
        await store.read_checkpoint("0")
    assert await store.read_checkpoint("1") is None
    lease = await acquire(store)
    assert await store.write_checkpoint(lease, Checkpoint("0", "1", 1))
    assert await store.read_checkpoint("0") == Checkpoint("0", "1", 1)
    assert "replaces it" in members.notices[-1][1]


async def test_blob_lease_of_another_program_is_named(members: Members) -> None:
    """It would look like a race that is lost each time."""
    store = await members.opened("0", "1")
    lease = await acquire(store, "1")
    assert await store.write_checkpoint(lease, Checkpoint("1", "1", 1))
    for blob in (members.ownership("0"), members.checkpoint("1")):
        await BlobLeaseClient(blob).acquire(60)
    with pytest.raises(StoreError, match=r"ownership/0 has a blob lease held elsewhere: break"):
        await store.acquire(unheld("0"), OWNER)
    with pytest.raises(StoreError, match=r"checkpoint/1 has a blob lease held elsewhere: break"):
        await store.write_checkpoint(lease, Checkpoint("1", "2", 2))


async def test_blobs_that_are_no_partitions_are_skipped(members: Members) -> None:
    """Whatever lies in the directories."""
    for name in ("ownership/readme.txt", "ownership/0/old", "checkpoint/x", "0"):
        await members.write(members.raw.get_blob_client(f"{LOWER}/{name}"), ownerid="someone")
    store = await members.opened("0")
    assert [(each.partition_id, each.owner) for each in await store.list()] == [("0", None)]


async def test_signature_that_may_not_create_is_named(members: Members, azurite: Azurite) -> None:
    """With the blob and the rights that are needed."""
    sas = generate_container_sas(
        members.raw.account_name,
        members.name,
        account_key=members.raw.credential.account_key,
        permission=ContainerSasPermissions(read=True, list=True),
        expiry=datetime.now(UTC) + timedelta(hours=1),
    )
    store = BlobOwnershipStore(members.name, account_url=f"{azurite.blob_endpoint}?{sas}")
    try:
        await store.open(SCOPE)
        with pytest.raises(
            StoreError, match=r"create .*ownership/0 .*rights to read, list, create and write"
        ) as caught:
            await store.ensure(["0"])
        assert sas not in str(caught.value)
    finally:
        await store.aclose()


async def test_listing_of_several_pages_is_read_to_its_end(members: Members) -> None:
    """A page has 5,000 blobs at most, and may have fewer."""
    pages = {None: ("0", "next"), "next": ("1", "last"), "last": ("2", "")}

    def answer(request: web.Request) -> web.Response:
        partition_id, marker = pages[request.query.get("marker")]
        return page(partition_id, datetime.now(UTC), marker)

    async with service(answer) as (url, _):
        store = BlobOwnershipStore("leases", account_url=url, credential=members.raw.credential.account_key)
        try:
            await store.open(SCOPE)
            assert [each.partition_id for each in await store.list()] == ["0", "1", "2"]
        finally:
            await store.aclose()


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"lease_duration": 0}, "lease_duration"),
        ({"owner_timeout": 0}, "owner_timeout"),
        ({"call_timeout": 60}, "call_timeout"),
        ({"connection_string": None}, "connection_string"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any], field: str) -> None:
    """By their names."""
    with pytest.raises(ConfigurationError) as caught:
        BlobOwnershipStore("leases", **{"connection_string": "UseDevelopmentStorage=true", **options})
    assert caught.value.field == field


# --------------------------------------------------------------------------------------------------------- hosts


class _Numbers(EventProcessor):
    """Records what it is given, and checkpoints."""

    def __init__(self, expected: int) -> None:
        self.numbers: list[tuple[str, int]] = []
        self.done = asyncio.Event()
        self._expected = expected

    async def process_events(self, context: PartitionContext, events: Sequence[ReceivedEvent]) -> None:
        self.numbers += [(context.partition_id, event.sequence_number) for event in events]
        await context.checkpoint()
        if len(set(self.numbers)) == self._expected:
            self.done.set()


async def test_host_goes_on_where_another_sdk_stopped(members: Members) -> None:
    """From an offset, or a number alone; its own times are reported if members would take its partitions."""
    hub = FakeHub("Telemetry", partitions=3)
    for partition_id in hub.partition_ids:
        hub.publish(partition_id, count=10)
    scope = ConsumerScope(hub.fully_qualified_namespace, hub.name, "$Default")
    directory = f"{scope.fully_qualified_namespace}/{scope.hub}/{scope.consumer_group}".lower()
    offset = hub.events("0")[3].offset
    await members.write(members.checkpoint("0", directory), offset=offset, sequencenumber="")
    await members.write(members.checkpoint("1", directory), offset="no offset", sequencenumber="6")
    processor = _Numbers(6 + 3 + 10)
    reports: list[HostReport] = []
    store = BlobOwnershipStore(members.name, connection_string=members.azurite.connection_string)
    settings = HostSettings(hub=hub.name, owner_id="a", renew_interval=25.0)
    host = HubHost(lambda: FakeTransport(hub), store, settings, processor, hooks=[reports.append])
    async with asyncio.timeout(30):
        await host.run(until=processor.done.wait())
    assert sorted(processor.numbers) == [
        *(("0", number) for number in range(4, 10)),
        *(("1", number) for number in range(7, 10)),
        *(("2", number) for number in range(10)),
    ]
    for partition_id in hub.partition_ids:
        metadata = await metadata_of(members.checkpoint(partition_id, directory))
        assert (metadata["offset"], metadata["sequencenumber"]) == (hub.events(partition_id)[9].offset, "9")
        assert (await metadata_of(members.ownership(partition_id, directory)))["ownerid"] == ""
    (notice,) = [each for each in reports if isinstance(each, SharedStoreNotice)]
    assert "renew_interval" in notice.problem
    assert not [each for each in reports if isinstance(each, LeaseStoreEmpty)]
    assert all(spec.owner_level == 0 for spec in hub.attached)


async def test_host_that_joins_gets_its_share_at_level_0(members: Members) -> None:
    """The new owner's link takes the old one's, which does not take it back; nothing is lost, and both have half."""
    hub = FakeHub("Telemetry", partitions=4)
    reports: list[HostReport] = []
    seen: set[tuple[str, int]] = set()
    settled = asyncio.Event()

    class Numbers(EventProcessor):
        async def process_events(self, context: PartitionContext, events: Sequence[ReceivedEvent]) -> None:
            seen.update((context.partition_id, event.sequence_number) for event in events)

    def host(name: str) -> HubHost:
        store = BlobOwnershipStore(
            members.name, connection_string=members.azurite.connection_string, lease_duration=6.0, owner_timeout=6.0
        )

        def reported(report: HostReport) -> None:
            reports.append(report)
            if isinstance(report, LeaseLost | LeaseTaken):
                settled.set()

        settings = HostSettings(hub=hub.name, owner_id=name, checkpoint_policy=CheckpointPolicy(every_events=1))
        return HubHost(lambda: FakeTransport(hub), store, settings, Numbers(), hooks=[reported])

    async def until(holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not holds():
                settled.clear()
                for partition_id in hub.partition_ids:
                    hub.publish(partition_id)
                await settled.wait()

    def owned(each: HubHost) -> int:
        return sum(status.epoch is not None for status in each.partitions)

    first, second = host("a"), host("b")
    runs = [asyncio.create_task(first.run())]
    await until(lambda: owned(first) == 4)
    runs.append(asyncio.create_task(second.run()))
    await until(lambda: (owned(first), owned(second)) == (2, 2))
    await first.aclose()
    await until(lambda: owned(second) == 4)
    assert await second.drain("default") == tuple(hub.partition_ids)
    await second.aclose()
    await asyncio.gather(*runs)
    assert seen == {(each, event.sequence_number) for each in hub.partition_ids for event in hub.events(each)}
    assert {report.host for report in reports if isinstance(report, LeaseLost)} == {"a"}
    assert not [report for report in reports if isinstance(report, OutsideReader | LinkFailed)]
    assert {spec.owner_level for spec in hub.attached} == {0}


async def test_late_checkpoint_of_a_former_owner_does_not_undo_a_reset_for_a_new_hub(members: Members) -> None:
    """A history: the hub is recreated while a member of JavaScript has a batch in hand, and stores its number after."""
    hub = FakeHub("Telemetry", partitions=1)
    hub.publish("0", count=500)
    scope = ConsumerScope(hub.fully_qualified_namespace, hub.name, "$Default")
    directory = f"{scope.fully_qualified_namespace}/{scope.hub}/{scope.consumer_group}".lower()
    blob = members.checkpoint("0", directory)
    reports: list[HostReport] = []

    async def run(processor: _Numbers, **options: Any) -> None:
        store = BlobOwnershipStore(members.name, connection_string=members.azurite.connection_string)
        settings = HostSettings(hub=hub.name, owner_id="a", on_data_loss="earliest", **options)
        host = HubHost(lambda: FakeTransport(hub), store, settings, processor, hooks=[reports.append])
        async with asyncio.timeout(30):
            await host.run(until=processor.done.wait())

    await run(_Numbers(500))
    former = await metadata_of(blob)
    assert former["sequencenumber"] == "499"
    hub.recreate()
    hub.publish("0", count=3)

    class Late(_Numbers):
        async def process_events(self, context: PartitionContext, events: Sequence[ReceivedEvent]) -> None:
            if not self.numbers:
                # Reset by now, for the new hub; the former owner's call of `updateCheckpoint` has no condition.
                assert (await metadata_of(blob))["sequencenumber"] == "-1"
                await members.write(blob, offset=former["offset"], sequencenumber="480")
            await super().process_events(context, events)

    late = Late(3)
    await run(late)
    assert late.numbers == [("0", number) for number in range(3)]
    assert (await metadata_of(blob))["sequencenumber"] == "2"
    (notice,) = [each for each in reports if isinstance(each, SharedStoreNotice)]
    assert "480" in notice.problem


async def test_keda_computes_the_lag_from_our_checkpoints(members: Members) -> None:
    """`blobMetadata`: the last number minus the stored one; before the first checkpoint all that was ever published."""
    hub = FakeHub("Telemetry", partitions=1)
    hub.publish("0", count=7)
    scope = ConsumerScope(hub.fully_qualified_namespace, hub.name, "$Default")
    keda = f"{scope.fully_qualified_namespace}/{scope.hub}/{scope.consumer_group.lower()}/checkpoint/0".lower()
    store = await members.opened("0", scope=scope)
    lease = await acquire(store)

    async def lag() -> int:
        number = int((await members.raw.get_blob_client(keda).get_blob_properties()).metadata["sequencenumber"])
        return 6 - number

    for checkpoint in (Checkpoint("0", "-1", -1), *(Checkpoint("0", str(n * 48), n) for n in (0, 3, 6))):
        assert await store.write_checkpoint(lease, checkpoint, backwards=True)
        assert await lag() == 6 - checkpoint.sequence_number


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"balancer": StaticAssignment(ordinal=0, of=2)}, "balancer"),
        ({"balancer": RingBalancer()}, "balancer"),
        ({"weight": 2.0}, "weight"),
    ],
)
def test_option_that_other_sdks_work_against_is_refused(options: dict[str, Any], field: str) -> None:
    """At the start, by its name: their members would take back what it assigns, again and again."""
    hub = FakeHub("Telemetry", partitions=1)
    store = BlobOwnershipStore("leases", connection_string="UseDevelopmentStorage=true")
    with pytest.raises(ConfigurationError, match="shared with other SDKs") as caught:
        HubHost(lambda: FakeTransport(hub), store, HostSettings(hub=hub.name, **options), _Numbers(1))
    assert caught.value.field == field
