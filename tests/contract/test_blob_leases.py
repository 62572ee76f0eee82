"""What is particular to blob leases, on real Azurite: the stored form, the peers that share it, the faults."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import logging
import traceback
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from aiohttp import web
from azure.core.exceptions import HttpResponseError, ServiceResponseError
from azure.core.pipeline.transport import AioHttpTransport
from azure.storage.blob.aio import BlobClient, BlobLeaseClient, ContainerClient

from eventpump.consumer.host.host import HubHost
from eventpump.consumer.processor import EventProcessor, PartitionContext
from eventpump.core.lease import PartitionLease
from eventpump.errors import ConfigurationError, StoreError
from eventpump.eventhubs.events import Checkpoint, ReceivedEvent
from eventpump.interfaces import Clock, ConsumerScope
from eventpump.options.consumer import HostSettings
from eventpump.storage.leases.blob import BlobLeaseStore
from eventpump.storage.scope_form import ScopeRecord
from eventpump.testing.transport import FakeHub, FakeTransport
from tests.support.azurite import Azurite
from tests.support.blob_faults import FaultTransport, Send, on, service
from tests.support.leases import group, unheld

SCOPE = ConsumerScope("example.servicebus.windows.net", "telemetry", "$Default")
OWNER = "worker-a-6f0c"


class Hosts:
    """Makes stores on one container, and a plain client beside them."""

    def __init__(self, azurite: Azurite, name: str, stack: AsyncExitStack) -> None:
        self.azurite = azurite
        self.name = name
        self._stack = stack
        self.raw = ContainerClient.from_connection_string(azurite.connection_string, name)
        stack.push_async_callback(self.raw.close)

    async def store(
        self,
        *partition_ids: str,
        transport: AioHttpTransport | None = None,
        call_timeout: float | None = None,
        clock: Clock | None = None,
        prefix: str = "",
        scope: ConsumerScope = SCOPE,
    ) -> BlobLeaseStore:
        client = ContainerClient.from_connection_string(
            self.azurite.connection_string, self.name, **({"transport": transport} if transport else {})
        )
        self._stack.push_async_callback(client.close)
        store = BlobLeaseStore(client, call_timeout=call_timeout, clock=clock, prefix=prefix, create=True)
        self._stack.push_async_callback(store.aclose)
        await store.open(scope)
        await store.ensure(partition_ids)
        return store

    def blob(self, partition_id: str) -> BlobClient:
        return self.raw.get_blob_client(f"$Default/{partition_id}")

    async def look(self, partition_id: str) -> tuple[dict[str, Any], dict[str, str], str]:
        """The body, the metadata and the lease state of a lease blob."""
        stream = await self.blob(partition_id).download_blob()
        properties = stream.properties
        return json.loads(await stream.readall()), dict(properties.metadata), str(properties.lease.state)


@pytest.fixture
async def hosts(azurite: Azurite, container_name: str) -> AsyncIterator[Hosts]:
    """Hosts on a container of this test's own."""
    async with AsyncExitStack() as stack:
        yield Hosts(azurite, container_name, stack)


async def acquire(store: BlobLeaseStore, partition_id: str, owner: str = OWNER) -> PartitionLease:
    lease = await store.acquire(unheld(partition_id), owner)
    assert lease is not None
    return lease


# ---------------------------------------------------------------------------------------- the stored form


async def test_stored_form_is_that_of_a_dotnet_host(hosts: Hosts) -> None:
    """Body, metadata and lease are those of a .NET EventProcessorHost, from creation to release."""
    store = await hosts.store("3")
    assert [blob.name async for blob in hosts.raw.list_blobs("$Default/")] == ["$Default/3"]
    nobody = {"Offset": None, "SequenceNumber": -1, "PartitionId": "3", "Owner": "", "Token": "", "Epoch": 0}
    assert await hosts.look("3") == (nobody, {}, "available")

    lease = await acquire(store, "3")
    owned = {**nobody, "Owner": OWNER, "Token": lease.token, "Epoch": 1}
    assert await hosts.look("3") == (owned, {"OWNINGHOST": OWNER}, "leased")
    await BlobLeaseClient(hosts.blob("3"), lease_id=lease.token).renew()

    assert await group(store).write_checkpoint(lease, Checkpoint("3", "4294968112", 1201))
    written = {**owned, "Offset": "4294968112", "SequenceNumber": 1201}
    assert await hosts.look("3") == (written, {"OWNINGHOST": OWNER}, "leased")
    raw = await (await hosts.blob("3").download_blob()).readall()
    assert (
        raw
        == (
            f'{{"Offset":"4294968112","SequenceNumber":1201,"PartitionId":"3","Owner":"{OWNER}",'
            f'"Token":"{lease.token}","Epoch":1}}'
        ).encode()
    )

    assert await store.release(lease)
    assert await hosts.look("3") == ({**written, "Owner": "", "Token": ""}, {}, "available")


async def test_checkpoint_keeps_owninghost(hosts: Hosts) -> None:
    """Put Blob replaces the metadata, so every one carries OWNINGHOST: after a steal it names the thief, always."""
    store, thief = await hosts.store("0"), await hosts.store()
    lease = await acquire(store, "0")
    for number in range(3):
        assert await group(store).write_checkpoint(lease, Checkpoint("0", str(number), number))
        assert (await hosts.look("0"))[1] == {"OWNINGHOST": OWNER}
    stolen = await thief.acquire((await thief.list())[0], "thief", held=True)
    assert stolen is not None
    assert (await hosts.look("0"))[1] == {"OWNINGHOST": "thief"}
    assert await group(thief).write_checkpoint(stolen, Checkpoint("0", "9", 9))
    assert (await hosts.look("0"))[1] == {"OWNINGHOST": "thief"}


async def test_prefix_goes_before_the_consumer_group(hosts: Hosts) -> None:
    """Blob names are `{prefix}{consumer group}/{partition}`, and what lies below or beside them is no lease."""
    store = await hosts.store("0", prefix="ns/hub/")
    for name in ("ns/hub/$Default/checkpoint/0", "ns/hub/$Default/ownership/0", "ns/hub/audit/0", "$Default/1"):
        await hosts.raw.upload_blob(name, b"")
    lease = await acquire(store, "0")
    assert await group(store).write_checkpoint(lease, Checkpoint("0", "1", 1), "audit")
    assert [(seen.partition_id, seen.owner) for seen in await store.list()] == [("0", OWNER)]
    directory = [blob.name async for blob in hosts.raw.list_blobs("ns/hub/$Default/")]
    assert directory == ["ns/hub/$Default/0", "ns/hub/$Default/checkpoint/0", "ns/hub/$Default/ownership/0"]


@pytest.mark.parametrize(
    "body",
    [
        b'{"Offset":"500","SequenceNumber":50,"PartitionId":"0","Owner":"","Token":"","Epoch":16}',
        b'{"offset":"500","sequenceNumber":50,"partitionId":"0","owner":"","epoch":16}',
        b'{"partition_id":"0","owner":null,"token":null,"epoch":16,"offset":"500","sequence_number":50}',
    ],
    ids=["dotnet", "java", "python"],
)
async def test_lease_of_another_host_is_continued(hosts: Hosts, body: bytes) -> None:
    """A lease that a .NET, Java or Python host left keeps its checkpoint, and its epoch grows on."""
    await hosts.raw.create_container()
    await hosts.blob("0").upload_blob(body)
    store = await hosts.store("0")
    assert await group(store).read_checkpoint("0") == Checkpoint("0", "500", 50)
    lease = await acquire(store, "0")
    assert lease.epoch == 17
    assert await group(store).read_checkpoint("0") == Checkpoint("0", "500", 50)


async def test_steal_from_an_event_processor_host_succeeds(hosts: Hosts) -> None:
    """A lease held by a host of the legacy format is stolen by the token in its body, in any case of its metadata."""
    await hosts.raw.create_container()
    token = str(uuid.uuid4())
    body = {"Offset": "500", "SequenceNumber": 50, "PartitionId": "0", "Owner": "eph", "Token": token, "Epoch": 4}
    blob = hosts.blob("0")
    await blob.upload_blob(b"{}")
    theirs = await blob.acquire_lease(30, token)
    await blob.upload_blob(json.dumps(body), overwrite=True, lease=theirs)
    await blob.set_blob_metadata({"owninghost": "eph"}, lease=theirs)

    store = await hosts.store()
    (seen,) = await store.list()
    assert (seen.owner, seen.is_held) == ("eph", True)
    lease = await store.acquire(seen, OWNER, held=True)
    assert lease is not None
    assert lease.epoch == 5
    with pytest.raises(HttpResponseError):
        await theirs.renew()
    assert await group(store).read_checkpoint("0") == Checkpoint("0", "500", 50)


async def test_steal_by_an_event_processor_host_is_noticed(hosts: Hosts) -> None:
    """A host that follows the legacy protocol can take our lease by our token, and we detect it."""
    store = await hosts.store("0")
    lease = await acquire(store, "0")
    assert await group(store).write_checkpoint(lease, Checkpoint("0", "500", 50))
    body, _, _ = await hosts.look("0")
    theirs = BlobLeaseClient(hosts.blob("0"), lease_id=body["Token"])
    await theirs.change(str(uuid.uuid4()))
    await theirs.renew()
    assert await store.renew(lease) is None
    assert not await group(store).write_checkpoint(lease, Checkpoint("0", "600", 60))
    assert not await store.release(lease)
    assert await group(store).read_checkpoint("0") == Checkpoint("0", "500", 50)


async def test_held_lease_without_a_token_is_left_alone(hosts: Hosts) -> None:
    """A lease is not stolen from a host that has acquired it and not yet written its body."""
    transport = FaultTransport()
    store = await hosts.store("0", transport=transport)
    blob = hosts.blob("0")
    theirs = await blob.acquire_lease(30)
    body = b'{"Offset":null,"SequenceNumber":0,"PartitionId":"0","Owner":"eph","Token":"","Epoch":4}'
    await blob.upload_blob(body, overwrite=True, lease=theirs, metadata={"OWNINGHOST": "eph"})
    (seen,) = await store.list()
    transport.requests.clear()
    assert await store.acquire(seen, OWNER, held=True) is None
    assert transport.requests == ["Get Blob"]
    await theirs.renew()


class _Numbers(EventProcessor):
    """Records the numbers that it is given, stores a checkpoint after each batch, and is done at the last one."""

    def __init__(self, last: int) -> None:
        self.numbers: list[int] = []
        self.done = asyncio.Event()
        self._last = last

    async def process_events(self, context: PartitionContext, events: Sequence[ReceivedEvent]) -> None:
        self.numbers += [event.sequence_number for event in events]
        await context.checkpoint()
        if events[-1].sequence_number == self._last:
            self.done.set()


@pytest.mark.parametrize(
    "wiped",
    [
        b'{"partitionId":"0","owner":"","epoch":-1,"sequenceNumber":0}',
        b'{"partition_id":"0","owner":null,"token":null,"epoch":0,"offset":null,"sequence_number":null}',
    ],
    ids=["javascript", "python"],
)
async def test_released_lease_that_a_legacy_host_overwrote_begins_again(hosts: Hosts, wiped: bytes) -> None:
    """An EventProcessorHost of JavaScript or Python 1 creates leases over those that are there, if they are not held.

    Without its checkpoint the partition is read from where the group began: again, and nothing is left out.
    """
    await hosts.raw.create_container()
    hub = FakeHub("telemetry", partitions=1)
    hub.publish("0", count=10)

    async def run(processor: _Numbers, *, overwrites: bool = False) -> None:
        store = BlobLeaseStore(hosts.name, connection_string=hosts.azurite.connection_string)
        settings = HostSettings(hub=hub.name, owner_id=OWNER)
        host = HubHost(lambda: FakeTransport(hub), store, settings, processor)

        async def until() -> None:
            await processor.done.wait()
            if overwrites:
                with pytest.raises(HttpResponseError):
                    await hosts.blob("0").upload_blob(wiped, overwrite=True)

        async with asyncio.timeout(30):
            await host.run(until=until())

    first = _Numbers(9)
    await run(first, overwrites=True)
    assert first.numbers == list(range(10))
    assert (await hosts.look("0"))[0]["SequenceNumber"] == 9
    await hosts.blob("0").upload_blob(wiped, overwrite=True)
    hub.publish("0", count=5)
    second = _Numbers(14)
    await run(second)
    assert second.numbers == list(range(15))
    assert (await hosts.look("0"))[0]["SequenceNumber"] == 14


async def test_container_is_created_by_the_first_host(hosts: Hosts) -> None:
    """The first host makes the container, and one that comes second, or at the same time, finds it."""
    assert not await hosts.raw.exists()
    first, *_ = await asyncio.gather(*(hosts.store("0") for _ in range(3)))
    lease = await acquire(first, "0")
    transport = FaultTransport()
    second = await hosts.store("0", "1", transport=transport)
    assert "Create Container" not in transport.requests
    assert [(each.partition_id, each.owner) for each in await second.list()] == [("0", OWNER), ("1", None)]
    assert await first.renew(lease) is not None


async def test_body_that_is_no_lease_raises(hosts: Hosts) -> None:
    """A body that cannot be read is not taken for a lease without a checkpoint, and stays as it is."""
    await hosts.raw.create_container()
    await hosts.blob("0").upload_blob(b"not json")
    store = await hosts.store("0")
    with pytest.raises(StoreError, match="acquire of partition 0: the lease is not JSON"):
        await store.acquire(unheld("0"), OWNER)
    with pytest.raises(StoreError, match="not JSON"):
        await group(store).read_checkpoint("0")
    assert await (await hosts.blob("0").download_blob()).readall() == b"not json"


async def test_first_checkpoint_of_an_unused_partition_has_an_offset(hosts: Hosts) -> None:
    """The start of a never-used partition has an offset, "-1", in the body: a null one reads as no checkpoint."""
    store = await hosts.store("0")
    lease = await acquire(store, "0")
    assert await group(store).write_checkpoint(lease, Checkpoint("0", "-1", -1))
    assert await group(store).write_checkpoint(lease, Checkpoint("0", "-1", -1), "audit")
    body, _, _ = await hosts.look("0")
    assert (body["Offset"], body["SequenceNumber"]) == ("-1", -1)
    audit = await hosts.raw.get_blob_client("$Default~checkpoints/audit/0").get_blob_properties()
    assert (audit.metadata["offset"], audit.metadata["sequencenumber"]) == ("-1", "-1")


# ------------------------------------------------------------------------------------------ the scope record

RECORD = ScopeRecord(datetime(2026, 3, 1, 12, 30, tzinfo=UTC), 4, {"": "@latest"})
RECORD_BLOB = "ns/$Default~scope.json"


async def test_scope_record_lies_beside_the_leases(hosts: Hosts) -> None:
    """The record is a JSON blob outside the leases' directory, so that no EventProcessorHost lists or rewrites it."""
    store = await hosts.store("0", prefix="ns/")
    assert await group(store).write_scope_record(RECORD, None) is not None
    assert [blob.name async for blob in hosts.raw.list_blobs()] == ["ns/$Default/0", RECORD_BLOB]
    assert [blob.name async for blob in hosts.raw.list_blobs("ns/$Default/")] == ["ns/$Default/0"]
    raw = await (await hosts.raw.get_blob_client(RECORD_BLOB).download_blob()).readall()
    members = json.loads(raw)
    assert len(members.pop("id")) == 16
    assert members == {
        "version": 2, "namespace": "example.servicebus.windows.net", "hub": "telemetry",
        "hubCreatedAt": "2026-03-01T12:30:00+00:00", "partitionCount": 4, "starts": {"": "@latest"},
        "resetFor": None, "resetPartitions": [],
    }  # fmt: skip


async def test_scope_record_costs_one_request_each_way(hosts: Hosts) -> None:
    """Reading and swapping the record are one request each; what is there is read before the first, and if refused."""
    transport = FaultTransport()
    store = await hosts.store(transport=transport)
    transport.requests.clear()
    assert await group(store).read_scope_record() is None
    stored = await group(store).write_scope_record(RECORD, None)
    assert await group(store).write_scope_record(RECORD, None) is None
    assert await group(store).write_scope_record(RECORD, stored) is not None
    assert await group(store).write_scope_record(replace(RECORD, partition_count=9), stored) is None
    assert transport.requests == ["Get Blob", "Get Blob", "Put Blob", "Get Blob", "Put Blob", "Put Blob", "Get Blob"]


@pytest.mark.parametrize("is_first", [True, False])
async def test_scope_record_that_arrives_late_is_refused(hosts: Hosts, is_first: bool) -> None:
    """A record given up on, which reaches the store after another's, replaces nothing."""
    transport = FaultTransport()
    store, other = await hosts.store(transport=transport), await hosts.store()
    before = None if is_first else await group(other).write_scope_record(RECORD, None)
    late: list[Send] = []

    async def lose(request: Any, go_on: Send) -> Any:
        late.append(go_on)
        raise ServiceResponseError("the connection broke")

    transport.hook = on("Put Blob", lose)
    with pytest.raises(StoreError, match="write scope record: ServiceResponseError"):
        await group(store).write_scope_record(replace(RECORD, partition_count=1), before)
    newer = await group(other).write_scope_record(replace(RECORD, partition_count=2), before)
    assert newer is not None
    (send,) = late
    assert (await send()).status_code == 412
    assert await group(store).read_scope_record() == newer


async def test_scope_record_that_was_deleted_is_not_replaced(hosts: Hosts) -> None:
    """If the record was deleted, a swap stores nothing, and the next start writes a first one again."""
    store = await hosts.store(prefix="ns/")
    stored = await group(store).write_scope_record(RECORD, None)
    await hosts.raw.get_blob_client(RECORD_BLOB).delete_blob()
    assert await group(store).write_scope_record(RECORD, stored) is None
    assert await group(store).read_scope_record() is None
    assert await group(store).write_scope_record(RECORD, None) is not None


async def test_scope_record_under_a_blob_lease_raises(hosts: Hosts) -> None:
    """A record under a foreign blob lease cannot be replaced: an error, not a lost race to retry."""
    store = await hosts.store(prefix="ns/")
    stored = await group(store).write_scope_record(RECORD, None)
    await hosts.raw.get_blob_client(RECORD_BLOB).acquire_lease(15)
    with pytest.raises(StoreError, match=r"ns/\$Default~scope.json has a blob lease held elsewhere"):
        await group(store).write_scope_record(replace(RECORD, partition_count=9), stored)
    assert await group(store).write_scope_record(RECORD, None) is None
    assert await group(store).read_scope_record() == stored


@pytest.mark.parametrize("raw", [b"not json", b'{"version":3,"more":1}', b'{"version":2,"more":1}'])
async def test_scope_record_that_cannot_be_read_raises(hosts: Hosts, raw: bytes) -> None:
    """What cannot be read, or is a later version's, is not taken for no record, and is not replaced by a first one."""
    store = await hosts.store(prefix="ns/")
    await hosts.raw.upload_blob(RECORD_BLOB, raw, overwrite=True)
    with pytest.raises(StoreError, match=r"read scope record: scope.json in Blob.*ns/\$Default~'\): the scope record"):
        await group(store).read_scope_record()
    with pytest.raises(StoreError, match=r"write scope record: scope.json in Blob.*ns/\$Default~'\): the scope record"):
        await group(store).write_scope_record(RECORD, None)
    assert await (await hosts.raw.get_blob_client(RECORD_BLOB).download_blob()).readall() == raw


@pytest.mark.parametrize("owner", ["", "größe", "a\nb", " a"])
async def test_owner_that_metadata_cannot_carry_is_refused(hosts: Hosts, owner: str) -> None:
    """A host name that OWNINGHOST cannot hold is refused before anything is taken."""
    store = await hosts.store("0")
    with pytest.raises(ConfigurationError, match="owner"):
        await store.acquire(unheld("0"), owner)
    assert (await hosts.look("0"))[2] == "available"


# ------------------------------------------------------------------------------------------------- requests


async def test_each_operation_makes_the_requests_it_needs(hosts: Hosts) -> None:
    """A renewal is one request that writes no body, a checkpoint one, a listing one, and nothing is asked twice."""
    transport = FaultTransport()
    store = await hosts.store("0", "1", transport=transport)

    def made() -> list[str]:
        requests, transport.requests = transport.requests, []
        return requests

    named = ["Get Blob", "Get Blob", "Put Blob"]  # what names the hub
    made_at_start = ["Create Container", *["List Blobs"] * 3, *named, "Put Blob", "Put Blob"]
    assert sorted(made()) == sorted(made_at_start)
    lease = await acquire(store, "0")
    assert made() == ["Acquire Lease", "Get Blob", "Put Blob"]
    assert await store.renew(lease) is not None
    assert made() == ["Renew Lease"]
    assert await group(store).write_checkpoint(lease, Checkpoint("0", "1", 1))
    assert made() == ["Put Blob"]
    assert len(await store.list()) == 2
    assert made() == ["List Blobs"]
    assert await store.release(lease)
    assert made() == ["Put Blob", "Release Lease"]
    other = await hosts.store()
    held = await acquire(other, "0", "other")
    (seen, _) = await store.list()
    made()
    assert await store.acquire(seen, OWNER, held=True) is not None
    assert made() == ["Get Blob", "Change Lease", "Renew Lease", "Put Blob"]
    assert await other.renew(held) is None


async def test_body_writes_of_a_partition_wait_for_each_other(hosts: Hosts) -> None:
    """At most one body write per partition is under way; renewals, and other partitions, do not wait for it."""
    transport = FaultTransport()
    store = await hosts.store("0", "1", transport=transport)
    lease, other = await acquire(store, "0"), await acquire(store, "1")
    entered, go_on_now = asyncio.Event(), asyncio.Event()
    transport.requests.clear()

    async def hold(request: Any, go_on: Send) -> Any:
        entered.set()
        await go_on_now.wait()
        return await go_on()

    transport.hook = on("Put Blob", hold)
    writes = [asyncio.create_task(group(store).write_checkpoint(lease, Checkpoint("0", str(n), n))) for n in range(5)]
    await entered.wait()
    assert await store.renew(lease) is not None
    assert await group(store).write_checkpoint(other, Checkpoint("1", "1", 1))
    assert transport.requests == ["Put Blob", "Renew Lease", "Put Blob"]
    go_on_now.set()
    assert all(await asyncio.gather(*writes))
    assert await group(store).read_checkpoint("0") == Checkpoint("0", "4", 4)


class SteppingClock:
    """A clock moved by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now


async def test_lease_counts_from_when_its_request_was_sent(hosts: Hosts) -> None:
    """However long the answer takes, the lease expires one duration after the request that took or renewed it."""
    clock, transport = SteppingClock(), FaultTransport()

    async def slow(request: Any, go_on: Send) -> Any:
        answer = await go_on()
        clock.now += 4
        return answer

    store, other = await hosts.store("0", "1", transport=transport, clock=clock), await hosts.store()
    transport.hook = on("Acquire Lease", slow)
    lease = await acquire(store, "0")
    assert (clock.now, lease.expires_at) == (104.0, 130.0)
    transport.hook = on("Renew Lease", slow)
    renewed = await store.renew(lease)
    assert renewed is not None
    assert (clock.now, renewed.expires_at) == (108.0, 134.0)
    await acquire(other, "1", "other")
    (_, seen) = await store.list()
    transport.hook = on("Change Lease", slow)
    stolen = await store.acquire(seen, OWNER, held=True)
    assert stolen is not None
    # A change leaves the lease its old end: the renewal after it counts.
    assert (clock.now, stolen.expires_at) == (112.0, 142.0)


# --------------------------------------------------------------------------------------------------- faults


async def test_checkpoint_written_during_a_steal_is_kept(hosts: Hosts) -> None:
    """What the victim stores between the thief's reading and its taking of the lease stays stored."""
    transport = FaultTransport()
    store, thief = await hosts.store("0"), await hosts.store(transport=transport)
    lease = await acquire(store, "0")
    (seen,) = await thief.list()

    async def meanwhile(request: Any, go_on: Send) -> Any:
        assert await group(store).write_checkpoint(lease, Checkpoint("0", "500", 50))
        return await go_on()

    transport.hook = on("Change Lease", meanwhile)
    stolen = await thief.acquire(seen, "thief", held=True)
    assert stolen is not None
    assert await group(thief).read_checkpoint("0") == Checkpoint("0", "500", 50)
    assert (await hosts.look("0"))[0]["Epoch"] == 2


async def test_checkpoint_written_during_an_acquisition_is_kept(hosts: Hosts) -> None:
    """An acquirer reads the body under the lease, so that nothing the last owner stored is written over."""
    transport = FaultTransport()
    store, other = await hosts.store("0"), await hosts.store(transport=transport)
    lease = await acquire(store, "0")

    async def meanwhile(request: Any, go_on: Send) -> Any:
        assert await group(store).write_checkpoint(lease, Checkpoint("0", "500", 50))
        assert await store.release(lease)
        return await go_on()

    transport.hook = on("Acquire Lease", meanwhile)
    assert (await acquire(other, "0", "other")).epoch == 2
    assert await group(other).read_checkpoint("0") == Checkpoint("0", "500", 50)


@pytest.mark.parametrize("subscription", ["default", "audit"])
async def test_checkpoint_that_arrives_late_is_refused(hosts: Hosts, subscription: str) -> None:
    """A checkpoint given up on, which reaches the store after a newer one, is refused there."""
    transport = FaultTransport()
    store = await hosts.store("0", transport=transport)
    lease = await acquire(store, "0")
    assert await group(store).write_checkpoint(lease, Checkpoint("0", "50", 5), subscription)
    late: list[Send] = []

    async def lose(request: Any, go_on: Send) -> Any:
        late.append(go_on)
        raise ServiceResponseError("the connection broke")

    transport.hook = on("Put Blob" if subscription == "default" else "Set Blob Metadata", lose)
    with pytest.raises(StoreError, match="write checkpoint of partition 0: ServiceResponseError"):
        await group(store).write_checkpoint(lease, Checkpoint("0", "100", 10), subscription)
    assert await group(store).write_checkpoint(lease, Checkpoint("0", "200", 20), subscription)
    (send,) = late
    assert (await send()).status_code == 412
    assert await group(store).read_checkpoint("0", subscription) == Checkpoint("0", "200", 20)


@pytest.mark.parametrize("subscription", ["default", "audit"])
@pytest.mark.parametrize("late_one", ["write", "reset"])
async def test_checkpoint_or_reset_that_arrives_late_is_refused(hosts: Hosts, subscription: str, late_one: str) -> None:
    """A reset given up on undoes no newer checkpoint, and a checkpoint given up on undoes no reset."""
    transport = FaultTransport()
    store = await hosts.store("0", transport=transport)
    lease = await acquire(store, "0")
    assert await group(store).write_checkpoint(lease, Checkpoint("0", "50", 5), subscription)
    late: list[Send] = []

    async def lose(request: Any, go_on: Send) -> Any:
        late.append(go_on)
        raise ServiceResponseError("the connection broke")

    transport.hook = on("Put Blob" if subscription == "default" else "Set Blob Metadata", lose)
    write, reset = Checkpoint("0", "100", 10), Checkpoint("0", "-1", -1)
    if late_one == "reset":
        with pytest.raises(StoreError, match="reset checkpoint of partition 0: ServiceResponseError"):
            await group(store).write_checkpoint(lease, reset, subscription, backwards=True)
        assert await group(store).write_checkpoint(lease, write, subscription)
    else:
        with pytest.raises(StoreError, match="write checkpoint of partition 0: ServiceResponseError"):
            await group(store).write_checkpoint(lease, write, subscription)
        assert await group(store).write_checkpoint(lease, reset, subscription, backwards=True)
    (send,) = late
    assert (await send()).status_code == 412
    assert await group(store).read_checkpoint("0", subscription) == (write if late_one == "reset" else reset)


@pytest.mark.parametrize("subscription", ["default", "audit"])
async def test_checkpoint_after_a_lost_answer_is_stored(hosts: Hosts, subscription: str) -> None:
    """A write whose answer was lost may have been stored: the next one finds out, and goes on from there."""
    transport = FaultTransport()
    store = await hosts.store("0", transport=transport)
    lease = await acquire(store, "0")
    assert await group(store).write_checkpoint(lease, Checkpoint("0", "50", 5), subscription)

    async def lose_answer(request: Any, go_on: Send) -> Any:
        await go_on()
        raise ServiceResponseError("the connection broke")

    transport.hook = on("Put Blob" if subscription == "default" else "Set Blob Metadata", lose_answer)
    with pytest.raises(StoreError):
        await group(store).write_checkpoint(lease, Checkpoint("0", "100", 10), subscription)
    assert await group(store).write_checkpoint(lease, Checkpoint("0", "70", 7), subscription)
    assert await group(store).read_checkpoint("0", subscription) == Checkpoint("0", "100", 10)
    assert await group(store).write_checkpoint(lease, Checkpoint("0", "200", 20), subscription)
    assert await group(store).read_checkpoint("0", subscription) == Checkpoint("0", "200", 20)


async def test_call_without_an_answer_delays_no_other_partition(hosts: Hosts) -> None:
    """A request without an answer fails after the call time-out, while the other partitions go on."""
    transport = FaultTransport()
    store = await hosts.store("0", "1", transport=transport, call_timeout=0.3)
    silent, other = await acquire(store, "0"), await acquire(store, "1")

    async def never(request: Any, go_on: Send) -> Any:
        if "/0" in request.url:
            await asyncio.Event().wait()
        return await go_on()

    transport.hook = never
    renewal = asyncio.create_task(store.renew(silent))
    assert await store.renew(other) is not None
    assert await group(store).write_checkpoint(other, Checkpoint("1", "1", 1))
    assert not renewal.done()
    with pytest.raises(StoreError, match=r"renew of partition 0: no answer within 0\.3 s"):
        await renewal
    transport.hook = None
    assert await store.renew(silent) is not None


@pytest.mark.parametrize("kind", ["Acquire Lease", "Get Blob", "Put Blob"])
@pytest.mark.parametrize("how", ["cancelled", "failed"])
async def test_acquisition_that_ends_half_way_is_undone(hosts: Hosts, kind: str, how: str) -> None:
    """Cancelled or failed after any of its requests, an acquisition leaves a lease that others can take at once."""
    transport = FaultTransport()
    store, other = await hosts.store("0", transport=transport), await hosts.store()
    reached = asyncio.Event()

    async def stop(request: Any, go_on: Send) -> Any:
        await go_on()
        reached.set()
        if how == "failed":
            raise ServiceResponseError("the connection broke")
        return await asyncio.Event().wait()

    transport.hook = on(kind, stop)
    attempt = asyncio.create_task(store.acquire(unheld("0"), OWNER))
    await reached.wait()
    if how == "cancelled":
        attempt.cancel()
    (outcome,) = await asyncio.gather(attempt, return_exceptions=True)
    assert isinstance(outcome, asyncio.CancelledError if how == "cancelled" else StoreError)
    await store.aclose()
    taken = await acquire(other, "0", "other")
    assert taken.epoch == (2 if kind == "Put Blob" else 1)


async def test_release_that_failed_half_way_can_be_repeated(hosts: Hosts) -> None:
    """When only the body was written, the lease is released by the next try."""
    transport = FaultTransport()
    store, other = await hosts.store("0", transport=transport), await hosts.store()
    lease = await acquire(store, "0")

    async def lose(request: Any, go_on: Send) -> Any:
        raise ServiceResponseError("the connection broke")

    transport.hook = on("Release Lease", lose)
    with pytest.raises(StoreError, match="release of partition 0"):
        await store.release(lease)
    assert await other.acquire(unheld("0"), "other") is None
    assert await store.release(lease)
    assert await other.acquire(unheld("0"), "other") is not None
    assert not await store.release(lease)


async def test_lease_that_was_deleted_is_lost(hosts: Hosts) -> None:
    """A lease that is no longer there is lost, not an error to be tried again; its listing says so too."""
    store = await hosts.store("0")
    lease = await acquire(store, "0")
    await hosts.blob("0").delete_blob(lease=BlobLeaseClient(hosts.blob("0"), lease_id=lease.token))
    assert await store.renew(lease) is None
    assert await group(store).read_checkpoint("0") is None
    assert await store.list() == []


async def test_close_leaves_a_client_of_the_caller_open(hosts: Hosts) -> None:
    """Closing the store closes only a client it made itself."""
    await hosts.raw.create_container()
    store = BlobLeaseStore(hosts.raw)
    await store.open(SCOPE)
    await store.aclose()
    assert await hosts.raw.exists()


async def test_store_from_an_account_url_and_a_key_shows_neither(azurite: Azurite, container_name: str) -> None:
    """A store can be made of an account's URL and a credential; its repr shows neither key nor URL."""
    store = BlobLeaseStore(
        container_name, account_url=azurite.blob_endpoint, credential=azurite.account_key, create=True
    )
    try:
        await store.open(SCOPE)
        await store.ensure(["0"])
        await acquire(store, "0")
        assert repr(store) == f"BlobLeaseStore({container_name!r}, prefix='')"
    finally:
        await store.aclose()


async def test_requests_are_not_logged_at_info(hosts: Hosts, caplog: pytest.LogCaptureFixture) -> None:
    """An application that logs at INFO does not see every renewal."""
    transport = FaultTransport()
    with caplog.at_level(logging.INFO):
        store = await hosts.store("0", transport=transport)
        lease = await acquire(store, "0")
        assert await group(store).write_checkpoint(lease, Checkpoint("0", "1", 1))
        for _ in range(2):
            renewed = await store.renew(lease)
            assert renewed is not None
            lease = renewed
        assert await store.release(lease)
    assert transport.requests.count("Renew Lease") >= 2
    assert caplog.messages == []


# -------------------------------------------------------------------------- a storage service of our own making

SECRET = "c2VjcmV0LXNpZ25hdHVyZS1vZi1vdXJz"
KEY = base64.b64encode(b"a key that must not be seen").decode()


def listing() -> web.Response:
    """An empty listing, by which the store sees that its container is there."""
    body = '<?xml version="1.0"?><EnumerationResults><Blobs /><NextMarker /></EnumerationResults>'
    return web.Response(text=body, content_type="application/xml")


@asynccontextmanager
async def store_on(answer: Callable[[web.Request], web.Response]) -> AsyncIterator[tuple[BlobLeaseStore, list[str]]]:
    """An open store on a service with an empty container and no record of the group; all else is answered as given."""

    def respond(request: web.Request) -> web.Response:
        if request.query.get("comp") == "list":
            return listing()
        return web.Response(status=404) if request.path.endswith("~scope.json") else answer(request)

    async with service(respond) as (url, requests):
        store = BlobLeaseStore("leases", account_url=url, credential=KEY, lease_duration=15)
        try:
            await store.open(SCOPE)
            requests.clear()
            yield store, requests
        finally:
            await store.aclose()


LEASE = PartitionLease("0", OWNER, 3, 3, "1d2e7c1a-0000-4000-8000-000000000001", 0.0)


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (409, None),
        (412, None),
        (409, "LeaseLost"),
        (412, "LeaseLost"),
        (409, "LeaseIdMismatchWithLeaseOperation"),
        (412, "LeaseIdMismatchWithBlobOperation"),
        (409, "LeaseNotPresentWithLeaseOperation"),
        (412, "LeaseNotPresentWithBlobOperation"),
        (409, "LeaseIsBrokenAndCannotBeRenewed"),
    ],
)
async def test_refusal_for_the_lease_means_lost(status: int, code: str | None) -> None:
    """A conflict or failed condition with a lease code, or with none at all, is a lost lease and no error."""
    headers = {} if code is None else {"x-ms-error-code": code}
    async with store_on(lambda request: web.Response(status=status, headers=headers)) as (store, requests):
        assert await store.renew(LEASE) is None
        assert requests == ["renew"]


async def test_renewal_of_another_lease_means_lost() -> None:
    """Where the store renews and names another lease than ours, ours is lost (Azurite does so after an expiry)."""
    another = {"x-ms-lease-id": str(uuid.uuid4())}
    async with store_on(lambda request: web.Response(headers=another)) as (store, _):
        assert await store.renew(LEASE) is None
    ours = {"x-ms-lease-id": LEASE.token}
    async with store_on(lambda request: web.Response(headers=ours)) as (store, _):
        assert await store.renew(LEASE) is not None


@pytest.mark.parametrize(
    ("status", "code"), [(503, "ServerBusy"), (500, "InternalError"), (409, "ContainerBeingDeleted"), (400, "Other")]
)
async def test_store_that_fails_is_asked_once(status: int, code: str) -> None:
    """The SDK tries nothing again behind our back: one request, one StoreError with status and code."""
    headers = {"x-ms-error-code": code}
    async with store_on(lambda request: web.Response(status=status, headers=headers)) as (store, requests):
        with pytest.raises(StoreError, match=f"renew of partition 0: HTTP status {status} {code}"):
            await store.renew(LEASE)
        assert requests == ["renew"]


async def test_error_shows_no_signature() -> None:
    """What the service or the HTTP client quotes of our credential is not in the error, its causes, or a traceback."""
    quoting = (
        '<?xml version="1.0"?><Error><Code>AuthenticationFailed</Code><Message>Server failed to authenticate.'
        f"</Message><AuthenticationErrorDetail>The signature {SECRET} is wrong</AuthenticationErrorDetail></Error>"
    )

    def refuse(request: web.Request) -> web.Response:
        headers = {"x-ms-error-code": "AuthenticationFailed"}
        return web.Response(status=403, text=quoting, content_type="application/xml", headers=headers)

    async with service(refuse) as (url, _):
        for account_url, credential in ((url, KEY), (f"{url}?sv=2021-08-06&sig={SECRET}", None)):
            store = BlobLeaseStore("leases", account_url=account_url, credential=credential)
            # Final: at the start a refused credential is a mistake, and a host would try for its whole start-up time.
            with pytest.raises(
                ConfigurationError, match="the storage account refuses it for container leases"
            ) as caught:
                await store.open(SCOPE)
            shown = "".join(traceback.format_exception(caught.value)) + repr(caught.value) + repr(store)
            assert SECRET not in shown
            assert KEY not in shown
            await store.aclose()


async def test_store_that_cannot_be_reached_raises_store_error() -> None:
    """A closed port gives one StoreError, with what the HTTP client said as its cause and without the signature."""
    async with service(lambda request: web.Response()) as (url, _):
        pass
    store = BlobLeaseStore("leases", account_url=f"{url}?sv=2021-08-06&sig={SECRET}")
    with pytest.raises(StoreError, match="open: ServiceRequestError: Cannot connect") as caught:
        await store.open(SCOPE)
    assert caught.value.__cause__ is not None
    assert SECRET not in "".join(traceback.format_exception(caught.value))
    await store.aclose()


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({}, "connection_string"),
        ({"connection_string": "x", "account_url": "https://account"}, "connection_string"),
        ({"connection_string": f"AccountName=x;AccountKey={SECRET}=;Blob"}, "connection_string"),
        ({"connection_string": ""}, "connection_string"),
        ({"account_url": ""}, "account_url"),
        ({"account_url": "https://account", "credential": 3}, "account_url"),
        ({"account_url": "https://account", "lease_duration": 14}, "lease_duration"),
        ({"account_url": "https://account", "lease_duration": 61}, "lease_duration"),
        ({"account_url": "https://account", "lease_duration": 20.5}, "lease_duration"),
        ({"account_url": "https://account", "call_timeout": 30}, "call_timeout"),
        ({"account_url": "https://account", "call_timeout": 0}, "call_timeout"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any], field: str) -> None:
    """Each wrong value gives one ConfigurationError that names it, and shows nothing secret."""
    with pytest.raises(ConfigurationError) as caught:
        BlobLeaseStore("leases", **options)
    assert caught.value.field == field
    assert SECRET not in "".join(traceback.format_exception(caught.value))


async def test_open_to_read_creates_nothing(azurite: Azurite, hosts: Hosts) -> None:
    """A store that is opened to read creates no container, also with `create`, and writes no blob."""
    reader = BlobLeaseStore("not-there", connection_string=azurite.connection_string, create=True)
    with pytest.raises(ConfigurationError, match="there is no container not-there"):
        await reader.open(SCOPE, read_only=True)
    store = await hosts.store("0")
    lease = await acquire(store, "0")
    assert await store.write_checkpoint(lease, Checkpoint("0", "9", 9))
    assert await group(store).write_checkpoint(lease, Checkpoint("0", "5", 5), "audit.1")
    before = {blob.name: blob.etag async for blob in hosts.raw.list_blobs()}
    name = hosts.raw.container_name
    async with contextlib.aclosing(BlobLeaseStore(name, connection_string=azurite.connection_string)) as other:
        await other.open(SCOPE, read_only=True)
        assert [each.owner for each in await other.list()] == [OWNER]
        assert await other.read_checkpoint("0") == Checkpoint("0", "9", 9)
        assert await group(other).read_checkpoint("0", "audit.1") == Checkpoint("0", "5", 5)
    assert {blob.name: blob.etag async for blob in hosts.raw.list_blobs()} == before
