"""What hosts of a consumer group keep in any lease store's records: scope records, subscriptions, their checkpoints."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from typing import TYPE_CHECKING

import pytest

from eventpump.core.lease import LeaseSnapshot, PartitionLease
from eventpump.eventhubs.events import Checkpoint
from eventpump.interfaces import ConsumerScope
from eventpump.storage.checkpoint_form import CheckpointRecord
from eventpump.storage.groups import GroupRecords, checkpoint_name
from eventpump.storage.scope_form import ScopeRecord, SubscriptionRecord
from eventpump.testing.conformance.leases import OTHER_SCOPE, SCOPE, CheckpointContract, LeaseHarness
from tests.support.leases import group, unheld

if TYPE_CHECKING:
    from eventpump.interfaces import LeaseStore
    from eventpump.storage.groups import StoredScopeRecord, StoredSubscription

RECORD = ScopeRecord(datetime(2026, 3, 1, 12, 30, 15, 125_000, tzinfo=UTC), 4, {"": "@latest"})
SUBSCRIPTION = SubscriptionRecord(
    "archive", "0f3a", datetime(2026, 3, 1, 12, 30, 15, 125_000, tzinfo=UTC), 2, {"0": "offset>-1", "1": "offset>77"}
)


class SubscriptionCheckpoints(CheckpointContract):
    """The checkpoints of a subscription, which a new owner of a partition claims."""

    async def read(self, store: LeaseStore, partition_id: str) -> Checkpoint | None:
        return await group(store).read_checkpoint(partition_id, "audit")

    async def write(
        self, store: LeaseStore, lease: PartitionLease, checkpoint: Checkpoint, *, backwards: bool = False
    ) -> bool:
        return await group(store).write_checkpoint(lease, checkpoint, "audit", backwards=backwards)

    async def claim(self, store: LeaseStore, lease: PartitionLease) -> Checkpoint | None:
        claim = await group(store).claim_checkpoint(lease, "audit")
        assert claim is not None
        return claim.checkpoint

    async def release(self, store: LeaseStore, lease: PartitionLease) -> bool:
        group(store).forget_claims(lease.partition_id)
        return await store.release(lease)


class LeaseHost(GroupRecords):
    """What one host does with a lease store: with its leases, and with the records of the consumer group in it.

    Args:
        store: The store.
        scope: The consumer group; None for that of the suite.
    """

    def __init__(self, store: LeaseStore, scope: ConsumerScope | None = None) -> None:
        self.store = store
        self.scope = SCOPE if scope is None else scope
        super().__init__(store, self.scope)

    async def acquire(self, partition_id: str, owner: str) -> PartitionLease | None:
        """Acquire a lease that is not held."""
        return await self.store.acquire(unheld(partition_id), owner)

    async def steal(self, snapshot: LeaseSnapshot, owner: str) -> PartitionLease | None:
        """Take a lease from the owner that the snapshot names."""
        return await self.store.acquire(snapshot, owner, held=True)

    async def open(self, scope: ConsumerScope) -> None:
        """See `LeaseStore`."""
        await self.store.open(scope)

    async def ensure(self, partition_ids: Sequence[str]) -> None:
        """See `LeaseStore`."""
        await self.store.ensure(partition_ids)

    async def renew(self, lease: PartitionLease) -> PartitionLease | None:
        """See `LeaseStore`."""
        return await self.store.renew(lease)

    async def release(self, lease: PartitionLease) -> bool:
        """See `LeaseStore`."""
        self.forget_claims(lease.partition_id)
        return await self.store.release(lease)

    async def aclose(self) -> None:
        """See `LeaseStore`."""
        await self.store.aclose()

    @property
    def lease_duration(self) -> float:
        """See `LeaseStore`."""
        return self.store.lease_duration

    async def list(self) -> list[LeaseSnapshot]:
        """See `LeaseStore`."""
        return await self.store.list()


class GroupContract(SubscriptionCheckpoints):
    """The guarantees of `GroupRecords`."""

    async def test_write_checkpoint_of_each_subscription_is_separate(self, harness: LeaseHarness) -> None:
        """Each subscription of a partition has its own checkpoint, whatever its name, and none of them is a lease."""
        store, other = await _open(harness, "0", "1"), await _open(harness)
        lease = await _acquire(store, "0", "a")
        names = ["default", "Default", "audit", "0", "a/b", "größe & co", "~"]
        for number, name in enumerate(names):
            assert await store.read_checkpoint("0", name) is None
            assert await store.write_checkpoint(lease, Checkpoint("0", str(number), number), name)
        for number, name in enumerate(names):
            assert await other.read_checkpoint("0", name) == Checkpoint("0", str(number), number)
            assert await other.read_checkpoint("1", name) is None
        assert [snapshot.partition_id for snapshot in await other.list()] == ["0", "1"]

    # ---- checkpoints that a new owner claims

    async def test_claim_returns_the_checkpoint(self, harness: LeaseHarness) -> None:
        """A claim reads what is stored, and leaves it as it is; without a checkpoint it stores none."""
        store, other = await _open(harness, "0"), await _open(harness)
        lease = await _acquire(store, "0", "a")
        for _ in range(2):
            claim = await store.claim_checkpoint(lease, "audit")
            assert claim is not None
            assert claim.checkpoint is None
            assert await other.read_checkpoint("0", "audit") is None
        assert await store.write_checkpoint(lease, Checkpoint("0", "200", 20), "audit")
        claim = await store.claim_checkpoint(lease, "audit")
        assert claim is not None
        assert claim.checkpoint == Checkpoint("0", "200", 20)
        assert await other.read_checkpoint("0", "audit") == Checkpoint("0", "200", 20)
        assert [snapshot.partition_id for snapshot in await store.list()] == ["0"]

    async def test_claim_after_the_lease_is_lost_returns_none(self, harness: LeaseHarness) -> None:
        """A former owner claims nothing, after a release and after a steal, and the new owner's claim holds."""
        store, other = await _open(harness, "0"), await _open(harness)
        lease = await _acquire(store, "0", "a")
        stolen = await _steal(other, "0", "b")
        assert await other.claim_checkpoint(stolen, "audit") is not None
        assert await store.claim_checkpoint(lease, "audit") is None
        assert await other.write_checkpoint(stolen, Checkpoint("0", "100", 10), "audit")
        assert await other.release(stolen)
        assert await other.claim_checkpoint(stolen, "audit") is None

    async def test_claim_when_a_former_owner_writes_on_is_the_last_word(self, harness: LeaseHarness) -> None:
        """Whatever a former owner writes before, during or after a claim, the new owner's claim read it or it fails."""
        store, other = await _open(harness, "0"), await _open(harness)
        lease = await _acquire(store, "0", "a")
        assert await store.write_checkpoint(lease, Checkpoint("0", "1", 1), "audit")
        stolen = await _steal(other, "0", "b")
        writes = [
            asyncio.create_task(store.write_checkpoint(lease, Checkpoint("0", str(each), each), "audit"))
            for each in range(10, 15)
        ]
        claim = await other.claim_checkpoint(stolen, "audit")
        assert claim is not None
        await asyncio.gather(*writes)
        assert await other.read_checkpoint("0", "audit") == claim.checkpoint
        assert not await store.write_checkpoint(lease, Checkpoint("0", "900", 900), "audit")
        assert await other.write_checkpoint(stolen, Checkpoint("0", "800", 800), "audit")
        assert await store.read_checkpoint("0", "audit") == Checkpoint("0", "800", 800)

    async def test_claim_when_cancelled_may_be_made_again(self, harness: LeaseHarness) -> None:
        """Wherever a claim is cancelled, the next one succeeds and writes work."""
        store = await _open(harness, "0")
        lease = await _acquire(store, "0", "a")
        for turns in range(8):
            attempt = asyncio.create_task(store.claim_checkpoint(lease, "audit"))
            for _ in range(turns):
                await asyncio.sleep(0)
            attempt.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await attempt
            assert await store.claim_checkpoint(lease, "audit") is not None
            assert await store.write_checkpoint(lease, Checkpoint("0", str(turns), turns), "audit")

    async def test_claim_counts_from_the_stored_epoch(self, harness: LeaseHarness) -> None:
        """A claim's epoch is above the stored one, also of a lease whose own epoch is below."""
        store, name = await _open(harness, "0"), checkpoint_name("audit", "0")
        lease = await _acquire(store, "0", "a")
        before = CheckpointRecord(Checkpoint("0", "200", 20), 41, "b", claim="0f")
        assert await store.store.records.swap(name, before.encode(), None) is not None
        claim = await store.claim_checkpoint(lease, "audit")
        assert claim is not None
        assert claim.checkpoint == before.checkpoint
        found = await store.store.records.read(name)
        assert found is not None
        after = CheckpointRecord.decode(found.body, "0")
        assert (after.epoch, after.owner, after.checkpoint) == (42, "a", before.checkpoint)
        assert after.claim not in ("", before.claim)

    # ---- subscriptions

    async def test_list_subscriptions_returns_what_every_host_wrote(self, harness: LeaseHarness) -> None:
        """Records are listed by name, member by member as they were written, and none of them is a lease."""
        store, other = await _open(harness, "0"), await _open(harness)
        assert await store.list_subscriptions() == []
        assert await store.read_subscription("archive") is None
        record = replace(
            SUBSCRIPTION, name="b_2", starts={"": "offset>-1", "12": 'größe "\n;🜁'}, is_active=False, partition_count=0
        )
        second = await store.write_subscription(record, None)
        first = await other.write_subscription(SUBSCRIPTION, None)
        assert first is not None
        assert second is not None
        assert (first.record, second.record) == (SUBSCRIPTION, record)
        for each in (store, other, store):
            assert await each.list_subscriptions() == [first, second]
            assert await each.read_subscription("archive") == first
        assert [snapshot.partition_id for snapshot in await store.list()] == ["0"]

    async def test_write_subscription_by_many_at_once_stores_one(self, harness: LeaseHarness) -> None:
        """Of hosts that make a subscription at once, or replace it as they read it, one succeeds."""
        stores = [await _open(harness) for _ in range(4)]
        current: StoredSubscription | None = None
        for round_number in range(3):
            records = [replace(SUBSCRIPTION, incarnation=f"{round_number}-{number // 2}") for number in range(4)]
            outcomes = await asyncio.gather(
                *(store.write_subscription(record, current) for store, record in zip(stores, records, strict=True))
            )
            (won,) = [stored for stored in outcomes if stored is not None]
            assert won.record == records[outcomes.index(won)]
            for store in stores:
                assert await store.read_subscription("archive") == won
                assert await store.list_subscriptions() == [won]
                if current is not None:
                    assert await store.write_subscription(SUBSCRIPTION, current) is None
            current = won

    async def test_delete_subscription_deletes_its_checkpoints_only(self, harness: LeaseHarness) -> None:
        """Record and checkpoints of one incarnation go; others, and the default subscription's, stay."""
        store, other = await _open(harness, "0"), await _open(harness)
        lease = await _acquire(store, "0", "a")
        first = await store.write_subscription(SUBSCRIPTION, None)
        assert first is not None
        later = replace(SUBSCRIPTION, incarnation="later")
        keys = ("default", "archive", SUBSCRIPTION.key, later.key)
        for key in keys:
            assert await store.write_checkpoint(lease, Checkpoint("0", "1", 1), key)
        assert await other.delete_subscription(first)
        assert await other.delete_subscription(first)
        assert await store.list_subscriptions() == []
        assert await store.write_subscription(later, first) is None
        found = [await other.read_checkpoint("0", key) is not None for key in keys]
        assert found == [True, True, False, True]
        assert await store.write_subscription(later, None) is not None

    async def test_delete_subscription_that_has_changed_deletes_nothing(self, harness: LeaseHarness) -> None:
        """A record is deleted only as it was read."""
        store, other = await _open(harness), await _open(harness)
        first = await store.write_subscription(SUBSCRIPTION, None)
        second = await other.write_subscription(replace(SUBSCRIPTION, is_active=False), first)
        assert first is not None
        assert second is not None
        assert not await store.delete_subscription(first)
        assert await store.read_subscription("archive") == second
        assert await store.delete_subscription(second)
        assert await other.read_subscription("archive") is None

    async def test_subscriptions_of_consumer_groups_are_apart(self, harness: LeaseHarness) -> None:
        """Each consumer group has subscriptions of its own."""
        store, other = await _open(harness), await _open(harness, scope=OTHER_SCOPE)
        assert await store.write_subscription(SUBSCRIPTION, None) is not None
        assert await other.list_subscriptions() == []
        assert await other.read_subscription("archive") is None

    # ---- the consumer group's record

    async def test_scope_record_is_read_by_every_host(self, harness: LeaseHarness) -> None:
        """Before the first there is no record; what one host stored every host reads, member by member, and itself."""
        store, other = await _open(harness), await _open(harness)
        assert await store.read_scope_record() is None
        record = ScopeRecord(
            datetime(2026, 3, 1, 12, 30, 15, 123_456, tzinfo=timezone(timedelta(hours=2))),
            0,
            {"": "@latest", "12": 'größe "\n;🜁'},
            datetime(2026, 3, 2, tzinfo=UTC),
            frozenset({"0", "12"}),
        )
        stored = await store.write_scope_record(record, None)
        assert stored is not None
        assert stored.record == record
        assert await other.read_scope_record() == stored
        assert await store.read_scope_record() == stored

    async def test_scope_record_first_stored_by_many_at_once_is_one(self, harness: LeaseHarness) -> None:
        """Of hosts that store the first record at once one succeeds, also of equal ones, and every host reads it."""
        stores = [await _open(harness) for _ in range(4)]
        records = [replace(RECORD, partition_count=count) for count in (0, 1, 1, 0)]
        outcomes = await asyncio.gather(
            *(store.write_scope_record(record, None) for store, record in zip(stores, records, strict=True))
        )
        (won,) = [stored for stored in outcomes if stored is not None]
        assert won.record == records[outcomes.index(won)]
        for store in stores:
            assert await store.read_scope_record() == won
            for record in (RECORD, won.record):
                assert await store.write_scope_record(record, None) is None
        assert await stores[0].read_scope_record() == won

    async def test_scope_record_replaced_by_many_at_once_is_one(self, harness: LeaseHarness) -> None:
        """Of hosts that replace the record they read at once one succeeds, and the others store nothing."""
        stores = [await _open(harness) for _ in range(4)]
        first = await _record(stores[0], RECORD, None)
        records = [replace(RECORD, reset_partitions=frozenset({str(number)})) for number in range(4)]
        outcomes = await asyncio.gather(
            *(store.write_scope_record(record, first) for store, record in zip(stores, records, strict=True))
        )
        (won,) = [stored for stored in outcomes if stored is not None]
        assert won.record == records[outcomes.index(won)]
        assert won.version != first.version
        for store in stores:
            assert await store.read_scope_record() == won

    async def test_scope_record_that_is_stale_replaces_nothing(self, harness: LeaseHarness) -> None:
        """A record is replaced only where it is as it was read: an earlier state of the same content does not do."""
        store, other = await _open(harness), await _open(harness)
        first = await _record(store, RECORD, None)
        second = await _record(other, replace(RECORD, partition_count=8), first)
        third = await _record(store, RECORD, second)
        assert third.record == first.record
        for stale in (first, second):
            assert await other.write_scope_record(replace(RECORD, partition_count=9), stale) is None
        assert await other.read_scope_record() == third
        assert await _record(other, RECORD, third) != third

    async def test_scope_record_never_stored_is_not_replaced(self, harness: LeaseHarness) -> None:
        """Replacing a record where there is none stores nothing."""
        store, other = await _open(harness), await _open(harness, scope=OTHER_SCOPE)
        elsewhere = await _record(other, RECORD, None)
        assert await store.write_scope_record(RECORD, elsewhere) is None
        assert await store.read_scope_record() is None

    async def test_scope_record_outlives_its_store(self, harness: LeaseHarness) -> None:
        """The record is there after its writer closed, and a store opened later may replace it."""
        store = await _open(harness, "0")
        written = await _record(store, RECORD, None)
        await store.aclose()
        later = await _open(harness, "0")
        found = await later.read_scope_record()
        assert found == written
        newer = await _record(later, replace(RECORD, reset_for=datetime(2026, 4, 1, tzinfo=UTC)), found)
        assert await later.read_scope_record() == newer

    async def test_scope_records_of_consumer_groups_are_separate(self, harness: LeaseHarness) -> None:
        """Each consumer group has a record of its own."""
        store, other = await _open(harness), await _open(harness, scope=OTHER_SCOPE)
        mine = await _record(store, RECORD, None)
        assert await other.read_scope_record() is None
        theirs = await _record(other, replace(RECORD, partition_count=7), None)
        assert await store.read_scope_record() == mine
        assert await other.read_scope_record() == theirs

    async def test_scope_record_is_no_lease(self, harness: LeaseHarness) -> None:
        """The record is in no listing, and creating leases, owning them and checkpointing leave it as it is."""
        store = await _open(harness)
        written = await _record(store, RECORD, None)
        assert await store.list() == []
        await store.ensure(["0"])
        lease = await _acquire(store, "0", "a")
        assert await store.write_checkpoint(lease, Checkpoint("0", "1", 1), "audit")
        assert [snapshot.partition_id for snapshot in await store.list()] == ["0"]
        assert await store.read_scope_record() == written

    async def test_scope_record_whose_write_is_cancelled_is_whole(self, harness: LeaseHarness) -> None:
        """Wherever a write is cancelled, the record is the old or the new one, whole, and is never stored later."""
        store, other = await _open(harness), await _open(harness)
        current = await _record(store, RECORD, None)
        for turns in range(8):
            attempted = replace(RECORD, partition_count=1000 + turns)
            attempt = asyncio.create_task(store.write_scope_record(attempted, current))
            for _ in range(turns):
                await asyncio.sleep(0)
            attempt.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await attempt
            found = await other.read_scope_record()
            assert found is not None
            assert found.record in (current.record, attempted), f"cancelled after {turns} turns"
            swapped = await other.write_scope_record(replace(RECORD, partition_count=turns), found)
            if swapped is None:  # the cancelled write came in between
                found = await other.read_scope_record()
                assert found is not None
                assert found.record == attempted
                swapped = await _record(other, replace(RECORD, partition_count=turns), found)
            assert await store.read_scope_record() == swapped
            current = swapped


async def _open(harness: LeaseHarness, *partition_ids: str, scope: ConsumerScope = SCOPE) -> LeaseHost:
    store = LeaseHost(harness.new_store(), scope)
    await store.open(scope)
    await store.ensure(partition_ids)
    return store


async def _acquire(store: LeaseHost, partition_id: str, owner: str) -> PartitionLease:
    lease = await store.acquire(partition_id, owner)
    assert lease is not None
    return lease


async def _steal(store: LeaseHost, partition_id: str, owner: str) -> PartitionLease:
    lease = await store.steal(await _snapshot(store, partition_id), owner)
    assert lease is not None
    return lease


async def _record(store: LeaseHost, record: ScopeRecord, replaces: StoredScopeRecord | None) -> StoredScopeRecord:
    stored = await store.write_scope_record(record, replaces)
    assert stored is not None
    return stored


async def _snapshot(store: LeaseHost, partition_id: str) -> LeaseSnapshot:
    snapshots: Sequence[LeaseSnapshot] = await store.list()
    (found,) = [snapshot for snapshot in snapshots if snapshot.partition_id == partition_id]
    return found


class TestMemoryGroups(GroupContract):
    """In memory."""

    @pytest.fixture
    def harness(self, memory_harness: LeaseHarness) -> LeaseHarness:
        return memory_harness


class TestSqliteGroups(GroupContract):
    """In one file."""

    @pytest.fixture
    def harness(self, sqlite_harness: LeaseHarness) -> LeaseHarness:
        return sqlite_harness


class TestBlobGroups(GroupContract):
    """On real Azurite."""

    @pytest.fixture
    def harness(self, blob_harness: LeaseHarness) -> LeaseHarness:
        return blob_harness


class TestBlobOwnershipGroups(GroupContract):
    """On real Azurite, beside what the other SDKs' members share."""

    @pytest.fixture
    def harness(self, ownership_harness: LeaseHarness) -> LeaseHarness:
        return ownership_harness


class TestOwnGroups(GroupContract):
    """In a store of one's own."""

    @pytest.fixture
    def harness(self, own_harness: LeaseHarness) -> LeaseHarness:
        return own_harness
