"""Which hub the leases of a container are of: two hubs or namespaces, two spellings, and a container that is absent."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from azure.storage.blob.aio import ContainerClient

from eventpump.consumer.host.host import HubHost
from eventpump.consumer.processor import EventProcessor, PartitionContext
from eventpump.errors import ConfigurationError, StoreError
from eventpump.eventhubs.events import Checkpoint, ReceivedEvent
from eventpump.interfaces import ConsumerScope
from eventpump.options.consumer import HostSettings
from eventpump.reports import HostReport, LeaseStoreEmpty
from eventpump.storage.leases.blob import BlobLeaseStore
from eventpump.storage.ledgers.blob import BlobLedger
from eventpump.storage.publisher_states.blob import BlobPublisherStateStore
from eventpump.storage.scope_form import HubNames, ScopeRecord, SubscriptionRecord, encode_named_record
from eventpump.testing.transport import FakeHub, FakeTransport
from tests.support.azurite import Azurite
from tests.support.leases import group, unheld, unnamed_record
from tests.support.seeds import seeds

HERE = ConsumerScope("example.servicebus.windows.net", "telemetry", "$Default")
OTHER_HUB = replace(HERE, hub="alerts")
OTHER_NAMESPACE = replace(HERE, fully_qualified_namespace="staging.servicebus.windows.net")
RECORD = ScopeRecord(datetime(2026, 3, 1, 12, 30, tzinfo=UTC), 4, {"": "offset>77"})
RECORD_BLOB = "$Default~scope.json"


class Container:
    """A container, the stores on it, and a plain client beside them."""

    def __init__(self, azurite: Azurite, name: str, stack: AsyncExitStack) -> None:
        self.name = name
        self.connection_string = azurite.connection_string
        self._stack = stack
        self.raw = ContainerClient.from_connection_string(azurite.connection_string, name)
        stack.push_async_callback(self.raw.close)

    def store(self, **options: Any) -> BlobLeaseStore:
        store = BlobLeaseStore(self.name, connection_string=self.connection_string, lease_duration=15, **options)
        self._stack.push_async_callback(store.aclose)
        return store

    async def opened(self, scope: ConsumerScope, **options: Any) -> BlobLeaseStore:
        store = self.store(**options)
        await store.open(scope)
        group(store, scope)
        return store

    async def names(self) -> list[str]:
        return [name async for name in self.raw.list_blob_names()]

    async def record(self, blob: str = RECORD_BLOB) -> Any:
        """Return a record's members, but for the random text of its writer."""
        members = json.loads(await (await self.raw.get_blob_client(blob).download_blob()).readall())
        members.pop("id", None)
        return members


@pytest.fixture
async def container(azurite: Azurite, container_name: str) -> AsyncIterator[Container]:
    """An empty container."""
    async with AsyncExitStack() as stack:
        made = Container(azurite, container_name, stack)
        await made.raw.create_container()
        yield made


# ------------------------------------------------------------------------------------------------------- two hubs


@pytest.mark.parametrize("other", [OTHER_HUB, OTHER_NAMESPACE], ids=["hub", "namespace"])
async def test_open_for_another_hub_is_refused_with_both_names(container: Container, other: ConsumerScope) -> None:
    """Its leases and checkpoints would be taken for the other hub's; a prefix separates them, as the error says."""
    store = await container.opened(HERE)
    await store.ensure(["0"])
    before = await container.names()
    with pytest.raises(ConfigurationError) as caught:
        await container.opened(other)
    text = str(caught.value)
    for each in (HERE.hub, HERE.fully_qualified_namespace, other.hub, other.fully_qualified_namespace):
        assert each in text
    assert f'prefix="{other.hub}/"' in text
    assert f'consumerGroup: "{other.hub}/$Default"' in text
    assert await container.names() == before
    beside = await container.opened(other, prefix=f"{other.hub}/")
    await beside.ensure(["0"])
    assert f"{other.hub}/$Default/0" in await container.names()
    same = replace(HERE, fully_qualified_namespace="EXAMPLE.servicebus.windows.net", hub="Telemetry")
    await (await container.opened(same)).ensure(["0", "1"])


async def test_hub_is_named_before_anything_of_the_group_is_written(container: Container) -> None:
    """An open writes nothing, as the hub may not exist; the first leases do, and the record of the starts is kept."""
    store = await container.opened(HERE)
    assert await container.names() == []
    await store.ensure(["0"])
    assert await container.record() == {
        "version": 2, "namespace": HERE.fully_qualified_namespace, "hub": HERE.hub
    }  # fmt: skip
    assert await group(store).read_scope_record() is None
    written = await group(store).write_scope_record(RECORD, None)
    assert await group(store).read_scope_record() == written
    assert await group(store).write_scope_record(RECORD, None) is None


async def test_record_of_an_earlier_version_is_adopted(container: Container) -> None:
    """The first host's hub is named in it, and what it says is kept; from then on another hub is refused."""
    await container.raw.upload_blob(RECORD_BLOB, unnamed_record(RECORD))
    late = await container.opened(OTHER_HUB)
    store = await container.opened(HERE)
    stored = await group(store).read_scope_record()
    assert stored is not None
    assert stored.record == RECORD
    await store.ensure(["0"])
    again = await group(store).read_scope_record()
    assert again is not None
    assert again.record == RECORD
    named = {"version": 2, "namespace": HERE.fully_qualified_namespace, "hub": HERE.hub}
    assert await container.record() == {**json.loads(unnamed_record(RECORD)), **named}
    with pytest.raises(ConfigurationError, match="telemetry"):
        await late.ensure(["0"])
    for refused in (
        group(late).read_scope_record(),
        group(late).write_scope_record(RECORD, None),
        container.opened(OTHER_HUB),
    ):
        with pytest.raises(ConfigurationError, match="telemetry"):
            await refused


async def test_record_without_random_text_is_the_groups(container: Container) -> None:
    """One with the names of its hub is read, kept from other hubs, and replaced by one that has random text."""
    blob = container.raw.get_blob_client(RECORD_BLOB)
    members = json.loads(encode_named_record(HubNames.of(HERE), RECORD, ""))
    del members["id"]
    await blob.upload_blob(json.dumps(members))
    store = await container.opened(HERE)
    await store.ensure(["0"])
    assert await group(store).write_scope_record(RECORD, None) is None
    stored = await group(store).read_scope_record()
    assert stored is not None
    assert stored.record == RECORD
    assert await group(store).write_scope_record(RECORD, stored) is not None
    after = json.loads(await (await blob.download_blob()).readall())
    assert after == {**members, "id": after["id"]}
    assert after["id"]
    with pytest.raises(ConfigurationError, match="telemetry"):
        await container.opened(OTHER_HUB)


async def test_subscription_names_the_hub_first(container: Container) -> None:
    """A host without a processor of its own writes a subscription before there are leases."""
    store, late = await container.opened(HERE), await container.opened(OTHER_HUB)
    subscription = SubscriptionRecord("archive", "0f3a", RECORD.hub_created_at, 2)
    assert await group(store).write_subscription(subscription, None) is not None
    with pytest.raises(ConfigurationError, match="telemetry"):
        await group(late).write_subscription(replace(subscription, name="other"), None)


@seeds(6, of=200)
async def test_hubs_that_race_for_a_group_in_random_histories(container: Container, seed: int) -> None:
    """Of several hosts of two hubs and two namespaces one hub has the group; only its hosts ever wrote anything."""
    rng = random.Random(seed)
    scopes = [HERE, OTHER_HUB, OTHER_NAMESPACE]
    match rng.randrange(4):
        case 0:
            await container.raw.upload_blob(RECORD_BLOB, unnamed_record(RECORD))
        case 1:
            await container.raw.upload_blob("$Default/0", b'{"Offset":"5","SequenceNumber":5,"PartitionId":"0"}')
        case 2:
            scopes = [HERE, OTHER_HUB]
    held: dict[ConsumerScope, int] = {}
    refused: dict[ConsumerScope, int] = {}

    async def host(scope: ConsumerScope) -> None:
        store = container.store()
        try:
            for _ in range(rng.randrange(3)):
                await asyncio.sleep(0)
            await store.open(scope)
            for _ in range(rng.randrange(4)):
                await asyncio.sleep(0)
            own = replace(RECORD, partition_count=1 + scopes.index(scope))
            if rng.random() < 0.6 and await group(store, scope).read_scope_record() is None:
                await group(store, scope).write_scope_record(own, None)
            await store.ensure(["0"])
            held[scope] = held.get(scope, 0) + 1
            lease = await store.acquire(unheld("0"), f"{scope.hub}@{scope.fully_qualified_namespace}")
            if lease is not None:
                number = 1 + scopes.index(scope)
                assert await group(store, scope).write_checkpoint(lease, Checkpoint("0", str(number), number + 5))
                await store.release(lease)
        except ConfigurationError:
            refused[scope] = refused.get(scope, 0) + 1

    async def delayed(scope: ConsumerScope) -> None:
        await asyncio.sleep(rng.choice([0, 0, 0.002, 0.01]))
        await host(scope)

    hosts = [rng.choice(scopes) for _ in range(rng.randint(3, 7))]
    await asyncio.gather(*(delayed(scope) for scope in hosts))
    assert len(held) == 1
    (winner,) = held
    assert set(refused) == set(hosts) - {winner}
    assert held[winner] == hosts.count(winner)
    record = await container.record()
    assert (record["namespace"], record["hub"]) == (winner.fully_qualified_namespace, winner.hub)
    store = await container.opened(winner)
    stored, checkpoint = await group(store).read_scope_record(), await group(store).read_checkpoint("0")
    assert stored is None or stored.record in (RECORD, replace(RECORD, partition_count=1 + scopes.index(winner)))
    assert checkpoint is None or checkpoint.sequence_number in (5, 6 + scopes.index(winner))


class _Numbers(EventProcessor):
    """Records what it is given, and checkpoints."""

    def __init__(self, expected: int) -> None:
        self.bodies: list[str] = []
        self.done = asyncio.Event()
        self._expected = expected

    async def process_events(self, context: PartitionContext, events: Sequence[ReceivedEvent]) -> None:
        self.bodies += [event.body_as_str() for event in events]
        await context.checkpoint()
        if len(set(self.bodies)) == self._expected:
            self.done.set()


async def test_hosts_of_two_hubs_on_one_container_lose_nothing(container: Container) -> None:
    """The second hub's host ends before it reads anything; with a prefix it gets every event of its hub."""
    first, second = FakeHub("a", partitions=2), FakeHub("b", partitions=2)
    for hub, count in ((first, 50), (second, 60)):
        for partition_id in hub.partition_ids:
            hub.publish(partition_id, *(f"{hub.name}/{partition_id}/{number}" for number in range(count)))

    async def run(hub: FakeHub, expected: int, **options: Any) -> list[str]:
        processor = _Numbers(expected)
        settings = HostSettings(hub=hub.name, owner_id=f"host-of-{hub.name}", renew_interval=1.0)
        host = HubHost(lambda: FakeTransport(hub), container.store(**options), settings, processor)
        async with asyncio.timeout(60):
            await host.run(until=processor.done.wait())
        return sorted(set(processor.bodies))

    assert len(await run(first, 100)) == 100
    with pytest.raises(ConfigurationError, match=r"are those of hub a of .*this host reads hub b of"):
        await run(second, 120)
    assert second.attached == []
    assert len(await run(second, 120, prefix="b/")) == 120


# --------------------------------------------------------------------------------------------------- two spellings


async def test_open_of_a_group_in_another_case_is_refused_with_both_spellings(container: Container) -> None:
    """Event Hubs takes both for one group, and each half of its hosts would have leases of its own."""
    await (await container.opened(HERE, prefix="app/")).ensure(["0"])
    with pytest.raises(ConfigurationError, match=r"consumer_group: .*\$Default.*spelled \$default") as caught:
        await container.opened(replace(HERE, consumer_group="$default"), prefix="app/")
    assert "app/$Default/" in str(caught.value)
    await container.opened(replace(HERE, consumer_group="$default"))
    await container.opened(replace(HERE, consumer_group="$default"), prefix="APP/")
    await container.opened(replace(HERE, consumer_group="$defaulted"), prefix="app/")
    await container.opened(HERE, prefix="app/")


async def test_blobs_of_a_v5_store_are_no_leases_of_another_spelling(container: Container) -> None:
    """Checkpoints and ownerships of azure-eventhub's store, in lower case, and what is beside the leases, count not."""
    prefix = "example.servicebus.windows.net/telemetry/"
    for name in ("$default/checkpoint/0", "$default/ownership/0", "$default~scope.json", "$DEFAULT~checkpoints/a/0"):
        await container.raw.upload_blob(prefix + name, b"")
    store = await container.opened(HERE, prefix=prefix)
    await store.ensure(["0"])
    assert [each.partition_id for each in await store.list()] == ["0"]
    with pytest.raises(ConfigurationError, match="spelled"):
        await container.opened(replace(HERE, consumer_group="$DEFAULT"), prefix=prefix)


# -------------------------------------------------------------------------------------------------------- location


def test_location_is_one_for_all_ways_to_the_account(azurite: Azurite) -> None:
    """The place does not depend on how the account is given, nor on the group's case; its text has no signature."""
    by_name = BlobLeaseStore("leases", connection_string=azurite.connection_string, prefix="a/")
    by_url = BlobLeaseStore("leases", account_url=f"{azurite.blob_endpoint}?sv=2024&sig=c2VjcmV0", prefix="a/")
    place = by_name.location("$Default")
    assert place == by_url.location("$default") == f"{azurite.blob_endpoint}/leases/a/$default/"
    assert place != BlobLeaseStore("leases", connection_string=azurite.connection_string).location("$Default")


# ----------------------------------------------------------------------------------------------- a missing container


async def test_open_without_the_container_is_an_error_that_names_it(azurite: Azurite, container_name: str) -> None:
    """A misspelled container is not created, so that nothing is read from the beginning, unless `create` is given."""
    text = azurite.connection_string

    def stores(**options: Any) -> list[tuple[Any, tuple[Any, ...]]]:
        return [
            (BlobLeaseStore(container_name, connection_string=text, **options), (HERE,)),
            (BlobPublisherStateStore(container_name, connection_string=text, **options), ()),
            (BlobLedger(container_name, connection_string=text, **options), ()),
        ]

    async with ContainerClient.from_connection_string(text, container_name) as raw:
        for store, arguments in stores():
            with pytest.raises(ConfigurationError, match=f"container: .*{container_name}.*create=True"):
                await store.open(*arguments)
            await store.aclose()
        assert not await raw.exists()
        for number, (store, arguments) in enumerate(stores(create=True)):
            await store.open(*arguments)
            await store.aclose()
            there, _ = stores()[number]
            await there.open(*arguments)
            await there.aclose()
            await raw.delete_container()


async def test_host_without_its_container_ends_before_it_reads(azurite: Azurite, container_name: str) -> None:
    """The error ends the host at once: it is no outage, and no lease can be had."""
    hub = FakeHub(partitions=1)
    hub.publish("0", count=5)
    store = BlobLeaseStore(container_name, connection_string=azurite.connection_string)
    host = HubHost(lambda: FakeTransport(hub), store, HostSettings(hub=hub.name, owner_id="a"), _Numbers(5))
    with pytest.raises(ConfigurationError, match="create=True"):
        async with asyncio.timeout(20):
            await host.run()
    assert hub.attached == []


async def test_host_on_another_container_reports_that_it_begins(container: Container) -> None:
    """An existing container that is not the group's: all is read again, with one WARNING, and not by a second host."""
    hub = FakeHub(partitions=1)
    hub.publish("0", count=5)
    reports: list[HostReport] = []
    for name in ("a", "b"):
        processor = _Numbers(5)
        settings = HostSettings(hub=hub.name, owner_id=name, renew_interval=1.0)
        host = HubHost(lambda: FakeTransport(hub), container.store(), settings, processor, hooks=[reports.append])
        async with asyncio.timeout(30):
            await host.run(until=processor.done.wait() if name == "a" else asyncio.sleep(0.5))
    assert [each.host for each in reports if isinstance(each, LeaseStoreEmpty)] == ["a"]


async def test_record_of_a_later_version_is_not_taken_for_a_hub(container: Container) -> None:
    """What cannot be read is an error, and nothing is written over it."""
    await container.raw.upload_blob(RECORD_BLOB, b'{"version":3}')
    store = container.store()
    with pytest.raises(StoreError, match="version 3"):
        await store.open(HERE)
    assert await container.record() == {"version": 3}
