"""The contract of `LeaseStore`, as a pytest class.

Subclass it under a name that starts with `Test`, in a module with a fixture `harness` that gives a `LeaseHarness`, and
with pytest-asyncio in auto mode. For assertions that explain themselves call, before the import,
`pytest.register_assert_rewrite("eventpump.testing.conformance.leases")`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from typing import TYPE_CHECKING, Protocol

from eventpump.core.lease import LeaseSnapshot, PartitionLease
from eventpump.errors import ClosedError, ConfigurationError, EventPumpError, StoreError
from eventpump.eventhubs.events import Checkpoint
from eventpump.interfaces import ConsumerScope, ScopeRecord, SubscriptionRecord
from eventpump.storage.groups import GroupRecords

if TYPE_CHECKING:
    from eventpump.interfaces import Clock, LeaseStore, StoredScopeRecord, StoredSubscription

SCOPE = ConsumerScope("example.servicebus.windows.net", "telemetry", "$Default")
OTHER_SCOPE = ConsumerScope("example.servicebus.windows.net", "telemetry", "audit")
OTHER_HUBS = (
    ConsumerScope("example.servicebus.windows.net", "alerts", "$Default"),
    ConsumerScope("staging.servicebus.windows.net", "telemetry", "$Default"),
)
RECORD = ScopeRecord(datetime(2026, 3, 1, 12, 30, 15, 125_000, tzinfo=UTC), 4, {"": "@latest"})
PINNED = Checkpoint("0", "-1", -1)
SUBSCRIPTION = SubscriptionRecord(
    "archive", "0f3a", datetime(2026, 3, 1, 12, 30, 15, 125_000, tzinfo=UTC), 2, {"0": "offset>-1", "1": "offset>77"}
)


class LeaseHarness(Protocol):
    """Creates the suite's stores."""

    @property
    def clock(self) -> Clock:
        """The clock the stores use."""

    def new_store(self) -> LeaseStore:
        """Return a store of another host, not open yet, on the same data as the others. The harness closes it."""

    async def let_expire(self, store: LeaseStore) -> None:
        """Wait until every lease that the store lists is older than its duration. One test calls this, once."""


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
        return await self.store.acquire(LeaseSnapshot(partition_id, None, False), owner)

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


class LeaseStoreContract:
    """The guarantees of `LeaseStore`, and of what hosts keep in its records."""

    # ---- opening and closing

    async def test_call_before_open_raises_store_error(self, harness: LeaseHarness) -> None:
        """A store that is not open fails with a StoreError."""
        store = LeaseHost(harness.new_store())
        assert isinstance(await _error_of(store.list()), StoreError)

    async def test_open_twice_raises(self, harness: LeaseHarness) -> None:
        """A store serves one consumer group: opening it again is the caller's error."""
        store = await _open(harness)
        assert isinstance(await _error_of(store.open(OTHER_SCOPE)), ConfigurationError)

    async def test_close_twice_is_fine(self, harness: LeaseHarness) -> None:
        """A store may be closed twice, and before it was opened; used after that it raises ClosedError."""
        store = await _open(harness)
        await store.aclose()
        await store.aclose()
        assert isinstance(await _error_of(store.list()), ClosedError)
        never_opened = LeaseHost(harness.new_store())
        await never_opened.aclose()
        assert isinstance(await _error_of(never_opened.open(SCOPE)), ClosedError)

    async def test_close_leaves_leases_as_they_are(self, harness: LeaseHarness) -> None:
        """Closing releases nothing: the lease stays held until it is released or expires."""
        store, other = await _open(harness, "0"), await _open(harness)
        await _acquire(store, "0", "a")
        await store.aclose()
        assert await other.acquire("0", "b") is None
        assert (await _snapshot(other, "0")).owner == "a"

    # ---- creating and listing

    async def test_ensure_leases_creates_leases_without_an_owner(self, harness: LeaseHarness) -> None:
        """Leases just created are listed in the order of partition ids, unheld and unowned."""
        store = await _open(harness, "10", "0", "2")
        leases = await store.list()
        assert [lease.partition_id for lease in leases] == ["0", "2", "10"]
        assert [(lease.owner, lease.is_held) for lease in leases] == [(None, False)] * 3

    async def test_list_leases_shows_owners_with_their_weight_and_epochs(self, harness: LeaseHarness) -> None:
        """A name with a weight is listed as it is; an epoch, if the listing has any, is that of the last owner."""
        store, other = await _open(harness, "0"), await _open(harness)
        assert (await _snapshot(other, "0")).epoch in (None, 0)
        lease = await _acquire(store, "0", "host;weight=2.5")
        assert await store.release(lease)
        await _acquire(store, "0", "host;weight=2.5")
        seen = await _snapshot(other, "0")
        assert (seen.owner, seen.is_held) == ("host;weight=2.5", True)
        assert seen.epoch in (None, 2)

    async def test_ensure_leases_leaves_existing_ones_alone(self, harness: LeaseHarness) -> None:
        """Creating what exists changes neither owner, nor epoch, nor checkpoint."""
        store, other = await _open(harness, "0"), await _open(harness)
        lease = await _acquire(store, "0", "a")
        assert await store.write_checkpoint(lease, Checkpoint("0", "100", 5))
        await other.ensure(["0", "1"])
        assert [snapshot.partition_id for snapshot in await store.list()] == ["0", "1"]
        assert (await _snapshot(other, "0")).owner == "a"
        assert await other.read_checkpoint("0") == Checkpoint("0", "100", 5)
        assert await store.renew(lease) is not None

    async def test_ensure_leases_by_several_hosts_at_once_succeeds(self, harness: LeaseHarness) -> None:
        """Several hosts that create the same leases at the same time all succeed, and there is one of each."""
        stores = [await _open(harness) for _ in range(4)]
        partitions = [str(number) for number in range(8)]
        await asyncio.gather(*(store.ensure(partitions) for store in stores))
        assert [snapshot.partition_id for snapshot in await stores[0].list()] == partitions

    async def test_leases_of_consumer_groups_are_separate(self, harness: LeaseHarness) -> None:
        """A lease and a checkpoint of one consumer group do not affect another."""
        store, other = await _open(harness, "0"), await _open(harness, "0", scope=OTHER_SCOPE)
        lease = await _acquire(store, "0", "a")
        assert await store.write_checkpoint(lease, Checkpoint("0", "100", 5))
        assert await other.read_checkpoint("0") is None
        assert (await _acquire(other, "0", "b")).epoch == 1

    async def test_leases_of_two_hubs_are_separate_or_refused(self, harness: LeaseHarness) -> None:
        """A store of another hub, or of another namespace's hub of that name, shares nothing with it, or is refused."""
        store = await _open(harness, "0")
        written = await store.write_scope_record(RECORD, None)
        lease = await _acquire(store, "0", "a")
        assert await store.write_checkpoint(lease, Checkpoint("0", "100", 5))
        for scope in OTHER_HUBS:
            other = LeaseHost(harness.new_store(), scope)
            try:
                await other.open(scope)
                await other.ensure(["0"])
            except ConfigurationError as error:
                assert scope.hub in str(error) and scope.fully_qualified_namespace in str(error)  # noqa: PT017, PT018
            else:
                assert await other.read_scope_record() is None
                assert await other.read_checkpoint("0") is None
                own = await _acquire(other, "0", "b")
                assert await other.write_checkpoint(own, Checkpoint("0", "9", 1))
        assert await store.read_scope_record() == written
        assert await store.read_checkpoint("0") == Checkpoint("0", "100", 5)
        assert await store.renew(lease) is not None

    async def test_leases_of_two_hubs_at_once_are_separate_or_of_one(self, harness: LeaseHarness) -> None:
        """Of hosts of several hubs that start at the same time, those that are not refused share nothing."""
        scopes = (SCOPE, *OTHER_HUBS, *OTHER_HUBS, SCOPE)
        stores = [LeaseHost(harness.new_store(), scope) for scope in scopes]

        async def start(store: LeaseHost, scope: ConsumerScope) -> bool:
            try:
                await store.open(scope)
                await store.ensure(["0"])
            except ConfigurationError:
                return False
            return True

        started = await asyncio.gather(*(start(*each) for each in zip(stores, scopes, strict=True)))
        kept = [(scope, store) for is_kept, scope, store in zip(started, scopes, stores, strict=True) if is_kept]
        hubs = {scope for scope, _ in kept}
        assert len(kept) == 2 * len(hubs) > 0, "all hosts of one hub start, or none"
        for scope in hubs:
            first, second = (store for each, store in kept if each == scope)
            assert await first.read_checkpoint("0") is None
            lease = await _acquire(first, "0", "a")
            assert await first.write_checkpoint(lease, Checkpoint("0", scope.hub, 5))
            assert await second.read_checkpoint("0") == Checkpoint("0", scope.hub, 5)

    # ---- acquiring

    async def test_acquire_lease_makes_the_owner_known(self, harness: LeaseHarness) -> None:
        """An acquired lease has the first epoch, expires one duration after the call, and every host sees its owner."""
        store, other = await _open(harness, "0"), await _open(harness)
        before = harness.clock.monotonic()
        lease = await _acquire(store, "0", "a")
        after = harness.clock.monotonic()
        assert (lease.partition_id, lease.owner, lease.epoch) == ("0", "a", 1)
        assert before + store.lease_duration <= lease.expires_at <= after + store.lease_duration
        seen = await _snapshot(other, "0")
        assert (seen.owner, seen.is_held) == ("a", True)

    async def test_acquire_lease_that_is_held_fails(self, harness: LeaseHarness) -> None:
        """A lease that is held cannot be acquired, not even by a second host of the same name."""
        store, other = await _open(harness, "0"), await _open(harness)
        lease = await _acquire(store, "0", "a")
        assert await other.acquire("0", "b") is None
        assert await other.acquire("0", "a") is None
        assert await store.acquire("0", "a") is None
        assert await store.renew(lease) is not None

    async def test_acquire_lease_that_was_never_created_raises(self, harness: LeaseHarness) -> None:
        """Acquiring a partition without a lease is not a lost race: it raises StoreError with the partition's id."""
        store = await _open(harness, "0")
        error = await _error_of(store.acquire("7", "a"))
        assert isinstance(error, StoreError)
        assert error.partition_id == "7"

    async def test_acquire_lease_by_many_at_once_succeeds_once(self, harness: LeaseHarness) -> None:
        """Of hosts that acquire the same leases at once, exactly one gets each."""
        partitions = [str(number) for number in range(6)]
        stores = [await _open(harness, *partitions) for _ in range(4)]
        attempts = [
            store.acquire(partition_id, f"host-{index}")
            for partition_id in partitions
            for index, store in enumerate(stores)
        ]
        won = [lease for lease in await asyncio.gather(*attempts) if lease is not None]
        assert sorted(lease.partition_id for lease in won) == partitions
        assert {lease.epoch for lease in won} == {1}
        owners = {snapshot.partition_id: snapshot.owner for snapshot in await stores[0].list()}
        assert owners == {lease.partition_id: lease.owner for lease in won}

    async def test_acquire_lease_raises_the_epoch_each_time(self, harness: LeaseHarness) -> None:
        """Each acquisition, by whatever host and way, has the next epoch; renewals and checkpoints keep it."""
        store, other = await _open(harness, "0"), await _open(harness)
        first = await _acquire(store, "0", "a")
        assert await store.write_checkpoint(first, Checkpoint("0", "1", 1))
        assert await store.release(first)
        second = await _acquire(other, "0", "b")
        renewed = await other.renew(second)
        assert renewed is not None
        third = await _steal(store, "0", "a")
        fourth = await _steal(other, "0", "b")
        assert [lease.epoch for lease in (first, second, renewed, third, fourth)] == [1, 2, 2, 3, 4]
        assert len({lease.token for lease in (first, second, third, fourth)}) == 4

    async def test_acquire_lease_that_is_cancelled_leaves_it_free(self, harness: LeaseHarness) -> None:
        """Wherever an acquisition is cancelled, once its store is closed the lease is free, or was returned."""
        other = await _open(harness, *(str(turns) for turns in range(12)))
        for turns in range(12):
            store = await _open(harness)
            attempt = asyncio.create_task(store.acquire(str(turns), "a"))
            for _ in range(turns):
                await asyncio.sleep(0)
            attempt.cancel()
            lease = None
            with contextlib.suppress(asyncio.CancelledError):
                lease = await attempt
            await store.aclose()
            taken = await other.acquire(str(turns), "b")
            assert (taken is None) == (lease is not None), f"cancelled after {turns} turns"

    # ---- stealing

    async def test_steal_lease_ends_the_former_ownership(self, harness: LeaseHarness) -> None:
        """After a steal the thief holds the lease, and nothing the victim does has any effect."""
        store, thief = await _open(harness, "0"), await _open(harness)
        lost = await _acquire(store, "0", "a")
        before = harness.clock.monotonic()
        stolen = await _steal(thief, "0", "b")
        after = harness.clock.monotonic()
        assert (stolen.owner, stolen.epoch) == ("b", 2)
        assert before + store.lease_duration <= stolen.expires_at <= after + store.lease_duration
        assert await store.renew(lost) is None
        assert not await store.write_checkpoint(lost, Checkpoint("0", "9", 9))
        assert not await store.release(lost)
        seen = await _snapshot(store, "0")
        assert (seen.owner, seen.is_held) == ("b", True)
        assert await thief.read_checkpoint("0") is None
        assert await thief.renew(stolen) is not None

    async def test_steal_lease_by_a_snapshot_of_an_earlier_owner_fails(self, harness: LeaseHarness) -> None:
        """A steal planned against one owner takes nothing from the next one."""
        store, other, third = await _open(harness, "0"), await _open(harness), await _open(harness)
        await _acquire(store, "0", "a")
        stale = await _snapshot(third, "0")
        current = await _steal(other, "0", "b")
        assert await third.steal(stale, "c") is None
        assert (await _snapshot(third, "0")).owner == "b"
        assert await other.renew(current) is not None

    async def test_steal_lease_after_a_checkpoint_in_between_succeeds(self, harness: LeaseHarness) -> None:
        """A steal needs the same owner, not the same checkpoint; and it keeps the checkpoint."""
        store, thief = await _open(harness, "0"), await _open(harness)
        lease = await _acquire(store, "0", "a")
        seen = await _snapshot(thief, "0")
        assert await store.write_checkpoint(lease, Checkpoint("0", "100", 5))
        assert await store.renew(lease) is not None
        assert await thief.steal(seen, "b") is not None
        assert await thief.read_checkpoint("0") == Checkpoint("0", "100", 5)

    async def test_steal_lease_without_an_owner_fails(self, harness: LeaseHarness) -> None:
        """A lease never taken, or released since the listing, is not stolen."""
        store, thief = await _open(harness, "0", "1"), await _open(harness)
        assert await thief.steal(await _snapshot(thief, "0"), "b") is None
        lease = await _acquire(store, "1", "a")
        seen = await _snapshot(thief, "1")
        assert await store.release(lease)
        assert await thief.steal(seen, "b") is None
        assert [snapshot.is_held for snapshot in await thief.list()] == [False, False]

    async def test_steal_lease_by_many_at_once_succeeds_once(self, harness: LeaseHarness) -> None:
        """Of hosts that steal on the same snapshot at once, exactly one succeeds, with the next epoch."""
        partitions = [str(number) for number in range(4)]
        store = await _open(harness, *partitions)
        for partition_id in partitions:
            await _acquire(store, partition_id, "victim")
        thieves = [await _open(harness) for _ in range(4)]
        seen = await thieves[0].list()
        attempts = [thief.steal(snapshot, f"thief-{index}") for snapshot in seen for index, thief in enumerate(thieves)]
        won = [lease for lease in await asyncio.gather(*attempts) if lease is not None]
        assert sorted(lease.partition_id for lease in won) == partitions
        assert {lease.epoch for lease in won} == {2}
        owners = {snapshot.partition_id: snapshot.owner for snapshot in await store.list()}
        assert owners == {lease.partition_id: lease.owner for lease in won}

    # ---- renewing and releasing

    async def test_renew_lease_extends_the_same_lease(self, harness: LeaseHarness) -> None:
        """A renewed lease is the same one, and expires one duration after the call that renewed it."""
        store = await _open(harness, "0")
        lease = await _acquire(store, "0", "a")
        before = harness.clock.monotonic()
        renewed = await store.renew(lease)
        after = harness.clock.monotonic()
        assert renewed is not None
        assert (renewed.owner, renewed.epoch, renewed.token) == (lease.owner, lease.epoch, lease.token)
        assert before + store.lease_duration <= renewed.expires_at <= after + store.lease_duration

    async def test_release_lease_makes_it_free_at_once(self, harness: LeaseHarness) -> None:
        """A released lease has no owner, can be acquired at once, and is not renewed by who released it."""
        store, other = await _open(harness, "0"), await _open(harness)
        lease = await _acquire(store, "0", "a")
        assert await store.write_checkpoint(lease, Checkpoint("0", "100", 5))
        assert await store.release(lease)
        seen = await _snapshot(other, "0")
        assert (seen.owner, seen.is_held) == (None, False)
        assert await store.renew(lease) is None
        assert not await store.release(lease)
        taken = await _acquire(other, "0", "b")
        assert not await store.release(lease)
        assert await other.renew(taken) is not None
        assert await other.read_checkpoint("0") == Checkpoint("0", "100", 5)

    async def test_calls_for_many_partitions_at_once_keep_them_apart(self, harness: LeaseHarness) -> None:
        """One store serves many partitions at the same time, and mixes none of them up."""
        partitions = [str(number) for number in range(32)]
        store = await _open(harness, *partitions)
        leases = await asyncio.gather(*(_acquire(store, partition_id, "a") for partition_id in partitions))
        renewals, stored = await asyncio.gather(
            asyncio.gather(*(store.renew(lease) for lease in leases)),
            asyncio.gather(
                *(
                    store.write_checkpoint(lease, Checkpoint(lease.partition_id, f"at-{lease.partition_id}", number))
                    for number, lease in enumerate(leases)
                )
            ),
        )
        assert all(renewals)
        assert all(stored)
        read = await asyncio.gather(*(store.read_checkpoint(partition_id) for partition_id in partitions))
        assert read == [Checkpoint(pid, f"at-{pid}", number) for number, pid in enumerate(partitions)]

    # ---- checkpoints

    async def test_read_checkpoint_by_the_next_owner_gives_the_stored_one(self, harness: LeaseHarness) -> None:
        """Every host reads the stored checkpoint, with the lease or without; before the first there is none."""
        store, other = await _open(harness, "0"), await _open(harness)
        lease = await _acquire(store, "0", "a")
        assert await store.read_checkpoint("0") is None
        assert await store.write_checkpoint(lease, Checkpoint("0", "4294968112", 1201))
        assert await other.read_checkpoint("0") == Checkpoint("0", "4294968112", 1201)
        await _steal(other, "0", "b")
        assert await store.read_checkpoint("0") == Checkpoint("0", "4294968112", 1201)

    async def test_write_checkpoint_at_sequence_number_0_is_stored(self, harness: LeaseHarness) -> None:
        """The first event of a partition has sequence number 0 and offset 0, and can be checkpointed."""
        store = await _open(harness, "0")
        lease = await _acquire(store, "0", "a")
        assert await store.write_checkpoint(lease, Checkpoint("0", "0", 0))
        assert await store.read_checkpoint("0") == Checkpoint("0", "0", 0)

    async def test_write_checkpoint_keeps_offset_and_number_unchanged(self, harness: LeaseHarness) -> None:
        """An offset is any text, a sequence number any 64-bit one; neither is changed on its way."""
        store = await _open(harness, "0")
        lease = await _acquire(store, "0", "a")
        for subscription in ("default", "audit"):
            checkpoint = Checkpoint("0", 'geo-1:007@a/b;"c"', 2**63 - 1)
            assert await store.write_checkpoint(lease, checkpoint, subscription)
            assert await store.read_checkpoint("0", subscription) == checkpoint

    async def test_write_checkpoint_never_goes_backwards(self, harness: LeaseHarness) -> None:
        """A lower sequence number is not stored, by its own host or a later owner; the lease is not lost by that."""
        store, other = await _open(harness, "0"), await _open(harness)
        lease = await _acquire(store, "0", "a")
        for subscription in ("default", "audit"):
            assert await store.write_checkpoint(lease, Checkpoint("0", "200", 20), subscription)
            assert await store.write_checkpoint(lease, Checkpoint("0", "100", 10), subscription)
            assert await other.read_checkpoint("0", subscription) == Checkpoint("0", "200", 20)
        stolen = await _steal(other, "0", "b")
        for subscription in ("default", "audit"):
            assert await other.write_checkpoint(stolen, Checkpoint("0", "150", 15), subscription)
            assert await store.read_checkpoint("0", subscription) == Checkpoint("0", "200", 20)
            assert await other.write_checkpoint(stolen, Checkpoint("0", "300", 30), subscription)
            assert await store.read_checkpoint("0", subscription) == Checkpoint("0", "300", 30)

    async def test_write_checkpoint_by_many_at_once_stores_the_latest(self, harness: LeaseHarness) -> None:
        """Of checkpoints written at the same time, in whatever order, the one with the highest number is stored."""
        store = await _open(harness, "0")
        lease = await _acquire(store, "0", "a")
        for subscription in ("default", "audit"):
            numbers = [7, 2, 9, 4, 8]
            writes = (store.write_checkpoint(lease, Checkpoint("0", str(n * 10), n), subscription) for n in numbers)
            assert all(await asyncio.gather(*writes))
            assert await store.read_checkpoint("0", subscription) == Checkpoint("0", "90", 9)

    async def test_write_checkpoint_by_a_former_owner_is_refused(self, harness: LeaseHarness) -> None:
        """After a release or a claim by the next owner, a write by the former one returns False and changes nothing."""
        store, other = await _open(harness, "0", "1"), await _open(harness)
        released = await _acquire(store, "0", "a")
        stolen = await _acquire(store, "1", "a")
        for subscription in ("default", "audit"):
            for lease in (released, stolen):
                checkpoint = Checkpoint(lease.partition_id, "200", 20)
                assert await store.write_checkpoint(lease, checkpoint, subscription)
        assert await store.release(released)
        thief = await _steal(other, "1", "b")
        for subscription in ("default", "audit"):
            claim = await other.claim_checkpoint(thief, subscription)
            assert claim is not None
            assert claim.checkpoint == Checkpoint("1", "200", 20)
            for lease in (released, stolen):
                for number in (10, 20, 30):
                    checkpoint = Checkpoint(lease.partition_id, str(number), number)
                    assert not await store.write_checkpoint(lease, checkpoint, subscription)
                expected = Checkpoint(lease.partition_id, "200", 20)
                assert await other.read_checkpoint(lease.partition_id, subscription) == expected

    async def test_write_checkpoint_leaves_the_owner_in_place(self, harness: LeaseHarness) -> None:
        """Writing checkpoints changes nothing about who is seen to own the lease."""
        store, other = await _open(harness, "0"), await _open(harness)
        lease = await _acquire(store, "0", "a")
        for subscription in ("default", "audit"):
            assert await store.write_checkpoint(lease, Checkpoint("0", "200", 20), subscription)
            seen = await _snapshot(other, "0")
            assert (seen.owner, seen.is_held) == ("a", True)

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

    async def test_write_checkpoint_of_an_unused_partition_is_stored(self, harness: LeaseHarness) -> None:
        """The start of a never-used partition, offset "-1" and number -1, is stored as such, and goes on from there."""
        store, other = await _open(harness, "0"), await _open(harness)
        lease = await _acquire(store, "0", "a")
        for subscription in ("default", "audit"):
            assert await store.write_checkpoint(lease, PINNED, subscription)
            assert await other.read_checkpoint("0", subscription) == PINNED
            assert await store.write_checkpoint(lease, Checkpoint("0", "0", 0), subscription)
            assert await store.write_checkpoint(lease, PINNED, subscription)
            assert await other.read_checkpoint("0", subscription) == Checkpoint("0", "0", 0)

    # ---- checkpoints that go backwards

    async def test_reset_checkpoint_goes_backwards(self, harness: LeaseHarness) -> None:
        """A reset stores a lower number than the stored one, for every subscription; from there numbers grow again."""
        store, other = await _open(harness, "0"), await _open(harness)
        lease = await _acquire(store, "0", "a")
        for subscription in ("default", "audit"):
            assert await store.write_checkpoint(lease, Checkpoint("0", "200", 20), subscription)
            for reset in (Checkpoint("0", "100", 10), PINNED, Checkpoint("0", "300", 30), Checkpoint("0", "50", 5)):
                assert await store.reset_checkpoint(lease, reset, subscription)
                assert await other.read_checkpoint("0", subscription) == reset
            assert await store.write_checkpoint(lease, Checkpoint("0", "40", 4), subscription)
            assert await other.read_checkpoint("0", subscription) == Checkpoint("0", "50", 5)
            assert await store.write_checkpoint(lease, Checkpoint("0", "60", 6), subscription)
            assert await other.read_checkpoint("0", subscription) == Checkpoint("0", "60", 6)

    async def test_reset_checkpoint_may_be_the_first_checkpoint(self, harness: LeaseHarness) -> None:
        """Where there is no checkpoint a reset stores one; other partitions and subscriptions keep theirs."""
        store = await _open(harness, "0", "1")
        lease, beside = await _acquire(store, "0", "a"), await _acquire(store, "1", "a")
        assert await store.write_checkpoint(beside, Checkpoint("1", "9", 9))
        for subscription in ("default", "audit"):
            assert await store.reset_checkpoint(lease, Checkpoint("0", "100", 10), subscription)
            assert await store.read_checkpoint("0", subscription) == Checkpoint("0", "100", 10)
        assert await store.read_checkpoint("0", "third") is None
        assert await store.read_checkpoint("1") == Checkpoint("1", "9", 9)

    async def test_reset_checkpoint_by_a_former_owner_is_refused(self, harness: LeaseHarness) -> None:
        """After a release or a claim by the next owner, a reset by the former one returns False and changes nothing."""
        store, other = await _open(harness, "0", "1"), await _open(harness)
        released, stolen = await _acquire(store, "0", "a"), await _acquire(store, "1", "a")
        for subscription in ("default", "audit"):
            for lease in (released, stolen):
                checkpoint = Checkpoint(lease.partition_id, "200", 20)
                assert await store.write_checkpoint(lease, checkpoint, subscription)
        assert await store.release(released)
        thief = await _steal(other, "1", "b")
        for subscription in ("default", "audit"):
            assert await other.claim_checkpoint(thief, subscription) is not None
            for lease in (released, stolen):
                for number in (-1, 10, 30):
                    checkpoint = Checkpoint(lease.partition_id, str(number), number)
                    assert not await store.reset_checkpoint(lease, checkpoint, subscription)
                expected = Checkpoint(lease.partition_id, "200", 20)
                assert await other.read_checkpoint(lease.partition_id, subscription) == expected
            assert await other.reset_checkpoint(thief, Checkpoint("1", "10", 1), subscription)
            assert await store.read_checkpoint("1", subscription) == Checkpoint("1", "10", 1)

    async def test_reset_checkpoint_leaves_the_lease_in_place(self, harness: LeaseHarness) -> None:
        """A reset changes nothing about who owns the lease, and its epoch grows on."""
        store, other = await _open(harness, "0"), await _open(harness)
        lease = await _acquire(store, "0", "a")
        for subscription in ("default", "audit"):
            assert await store.reset_checkpoint(lease, PINNED, subscription)
            seen = await _snapshot(other, "0")
            assert (seen.owner, seen.is_held) == ("a", True)
        assert await store.renew(lease) is not None
        assert (await _steal(other, "0", "b")).epoch == 2

    async def test_reset_checkpoint_that_is_cancelled_undoes_nothing_newer(self, harness: LeaseHarness) -> None:
        """Wherever a reset is cancelled, a checkpoint written after it stays."""
        store = await _open(harness, "0")
        lease = await _acquire(store, "0", "a")
        for subscription in ("default", "audit"):
            for turns in range(8):
                newer = Checkpoint("0", str(turns), 100 + turns)
                attempt = asyncio.create_task(store.reset_checkpoint(lease, PINNED, subscription))
                for _ in range(turns):
                    await asyncio.sleep(0)
                attempt.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await attempt
                assert await store.write_checkpoint(lease, newer, subscription)
                assert await store.read_checkpoint("0", subscription) == newer, f"cancelled after {turns} turns"

    # ---- checkpoints that a new owner claims

    async def test_claim_returns_the_checkpoint(self, harness: LeaseHarness) -> None:
        """A claim reads what is stored, and leaves it as it is; without a checkpoint it stores none."""
        store, other = await _open(harness, "0"), await _open(harness)
        lease = await _acquire(store, "0", "a")
        for subscription in ("default", "audit"):
            for _ in range(2):
                claim = await store.claim_checkpoint(lease, subscription)
                assert claim is not None
                assert claim.checkpoint is None
                assert await other.read_checkpoint("0", subscription) is None
            assert await store.write_checkpoint(lease, Checkpoint("0", "200", 20), subscription)
            claim = await store.claim_checkpoint(lease, subscription)
            assert claim is not None
            assert claim.checkpoint == Checkpoint("0", "200", 20)
            assert await other.read_checkpoint("0", subscription) == Checkpoint("0", "200", 20)
        assert [snapshot.partition_id for snapshot in await store.list()] == ["0"]

    async def test_claim_after_the_lease_is_lost_returns_none(self, harness: LeaseHarness) -> None:
        """A former owner claims nothing, after a release and after a steal, and the new owner's claim holds."""
        store, other = await _open(harness, "0"), await _open(harness)
        lease = await _acquire(store, "0", "a")
        stolen = await _steal(other, "0", "b")
        for subscription in ("default", "audit"):
            assert await other.claim_checkpoint(stolen, subscription) is not None
            assert await store.claim_checkpoint(lease, subscription) is None
            assert await other.write_checkpoint(stolen, Checkpoint("0", "100", 10), subscription)
        assert await other.release(stolen)
        for subscription in ("default", "audit"):
            assert await other.claim_checkpoint(stolen, subscription) is None

    async def test_claim_when_a_former_owner_writes_on_is_the_last_word(self, harness: LeaseHarness) -> None:
        """Whatever a former owner writes before, during or after a claim, the new owner's claim read it or it fails."""
        store, other = await _open(harness, "0"), await _open(harness)
        lease = await _acquire(store, "0", "a")
        for subscription in ("default", "audit"):
            assert await store.write_checkpoint(lease, Checkpoint("0", "1", 1), subscription)
        stolen = await _steal(other, "0", "b")
        for number, subscription in enumerate(("default", "audit"), 10):
            writes = [
                asyncio.create_task(store.write_checkpoint(lease, Checkpoint("0", str(each), each), subscription))
                for each in range(number, number + 5)
            ]
            claim = await other.claim_checkpoint(stolen, subscription)
            assert claim is not None
            await asyncio.gather(*writes)
            assert await other.read_checkpoint("0", subscription) == claim.checkpoint
            assert not await store.write_checkpoint(lease, Checkpoint("0", "900", 900), subscription)
            assert await other.write_checkpoint(stolen, Checkpoint("0", "800", 800), subscription)
            assert await store.read_checkpoint("0", subscription) == Checkpoint("0", "800", 800)

    async def test_claim_when_cancelled_may_be_made_again(self, harness: LeaseHarness) -> None:
        """Wherever a claim is cancelled, the next one succeeds and writes work."""
        store = await _open(harness, "0")
        lease = await _acquire(store, "0", "a")
        for subscription in ("default", "audit"):
            for turns in range(8):
                attempt = asyncio.create_task(store.claim_checkpoint(lease, subscription))
                for _ in range(turns):
                    await asyncio.sleep(0)
                attempt.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await attempt
                assert await store.claim_checkpoint(lease, subscription) is not None
                assert await store.write_checkpoint(lease, Checkpoint("0", str(turns), turns), subscription)

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
        for subscription in ("default", "audit"):
            assert await store.write_checkpoint(lease, Checkpoint("0", "1", 1), subscription)
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

    # ---- expiry

    async def test_expired_lease_can_be_acquired_or_renewed(self, harness: LeaseHarness) -> None:
        """An expired lease keeps its last owner's name; any host may acquire it, its owner may renew it until then."""
        names = ["taken", "renewed", "written", "released", "stolen", "raced"]
        partitions = {name: str(number) for number, name in enumerate(names)}
        store, other, third = await _open(harness, *partitions.values()), await _open(harness), await _open(harness)
        old = {name: await _acquire(store, partition_id, "a") for name, partition_id in partitions.items()}
        for lease in old.values():
            assert await store.write_checkpoint(lease, Checkpoint(lease.partition_id, "100", 10))
        await harness.let_expire(other.store)
        seen = {snapshot.partition_id: snapshot for snapshot in await other.list()}
        assert [(snapshot.owner, snapshot.is_held) for snapshot in seen.values()] == [("a", False)] * len(names)

        taken = await _acquire(other, partitions["taken"], "b")
        assert taken.epoch == 2
        assert await store.renew(old["taken"]) is None
        assert not await store.write_checkpoint(old["taken"], Checkpoint(partitions["taken"], "200", 20))
        assert not await store.release(old["taken"])
        assert await other.read_checkpoint(partitions["taken"]) == Checkpoint(partitions["taken"], "100", 10)
        assert (await _snapshot(store, partitions["taken"])).owner == "b"

        renewed = await store.renew(old["renewed"])
        assert renewed is not None
        assert renewed.expires_at > old["renewed"].expires_at
        assert await other.acquire(partitions["renewed"], "b") is None

        checkpoint = Checkpoint(partitions["written"], "200", 20)
        assert await store.write_checkpoint(old["written"], checkpoint)
        assert await other.read_checkpoint(partitions["written"]) == checkpoint

        assert await store.release(old["released"])
        assert (await _snapshot(other, partitions["released"])).owner is None

        stolen = await other.steal(seen[partitions["stolen"]], "b")
        assert stolen is not None
        assert stolen.epoch == 2
        assert await store.renew(old["stolen"]) is None

        race: list[PartitionLease | None] = await asyncio.gather(
            *(host.acquire(partitions["raced"], name) for host, name in ((other, "b"), (third, "c"), (store, "a")))
        )
        assert [lease.epoch for lease in race if lease is not None] == [2]


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


async def _error_of(call: object) -> EventPumpError | None:
    assert asyncio.iscoroutine(call)
    try:
        await call
    except EventPumpError as error:
        return error
    return None
