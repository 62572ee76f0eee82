"""The contract of `LeaseStore`, as a pytest class.

Subclass it under a name that starts with `Test`, in a module with a fixture `harness` that gives a `LeaseHarness`, and
with pytest-asyncio in auto mode. For assertions that explain themselves call, before the import,
`pytest.register_assert_rewrite("eventpump.testing.conformance.leases")`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from eventpump.core.lease import LeaseSnapshot, PartitionLease
from eventpump.errors import ClosedError, ConfigurationError, StoreError
from eventpump.eventhubs.events import Checkpoint
from eventpump.interfaces import ConsumerScope
from eventpump.testing.conformance import error_of

if TYPE_CHECKING:
    from eventpump.interfaces import Clock, LeaseStore

SCOPE = ConsumerScope("example.servicebus.windows.net", "telemetry", "$Default")
OTHER_SCOPE = ConsumerScope("example.servicebus.windows.net", "telemetry", "audit")
OTHER_HUBS = (
    ConsumerScope("example.servicebus.windows.net", "alerts", "$Default"),
    ConsumerScope("staging.servicebus.windows.net", "telemetry", "$Default"),
)
NOTE = "notes/0.json"
PINNED = Checkpoint("0", "-1", -1)


class LeaseHarness(Protocol):
    """Creates the suite's stores."""

    @property
    def clock(self) -> Clock:
        """The clock the stores use."""

    def new_store(self) -> LeaseStore:
        """Return a store of another host, not open yet, on the same data as the others. The harness closes it."""

    async def let_expire(self, store: LeaseStore) -> None:
        """Wait until every lease that the store lists is older than its duration. One test calls this, once."""


class CheckpointContract:
    """The guarantees of checkpoints under a lease. How they are read and written is in methods, for other ways."""

    async def read(self, store: LeaseStore, partition_id: str) -> Checkpoint | None:
        """Read a checkpoint."""
        return await store.read_checkpoint(partition_id)

    async def write(
        self, store: LeaseStore, lease: PartitionLease, checkpoint: Checkpoint, *, backwards: bool = False
    ) -> bool:
        """Write a checkpoint.

        Args:
            store: The store.
            lease: The lease of the partition.
            checkpoint: The checkpoint.
            backwards: Whether it replaces one with a higher sequence number. Default: False.
        """
        return await store.write_checkpoint(lease, checkpoint, backwards=backwards)

    async def claim(self, store: LeaseStore, lease: PartitionLease) -> Checkpoint | None:
        """Called by a new owner before anything else: read a checkpoint that no former owner can write any more."""
        return await store.read_checkpoint(lease.partition_id)

    async def release(self, store: LeaseStore, lease: PartitionLease) -> bool:
        """Release a lease."""
        return await store.release(lease)

    async def test_read_checkpoint_by_the_next_owner_gives_the_stored_one(self, harness: LeaseHarness) -> None:
        """Every host reads the stored checkpoint, with the lease or without; before the first there is none."""
        store, other = await _open(harness, "0"), await _open(harness)
        lease = await _acquire(store, "0", "a")
        assert await self.read(store, "0") is None
        assert await self.write(store, lease, Checkpoint("0", "4294968112", 1201))
        assert await self.read(other, "0") == Checkpoint("0", "4294968112", 1201)
        await _steal(other, "0", "b")
        assert await self.read(store, "0") == Checkpoint("0", "4294968112", 1201)

    async def test_write_checkpoint_at_sequence_number_0_is_stored(self, harness: LeaseHarness) -> None:
        """The first event of a partition has sequence number 0 and offset 0, and can be checkpointed."""
        store = await _open(harness, "0")
        lease = await _acquire(store, "0", "a")
        assert await self.write(store, lease, Checkpoint("0", "0", 0))
        assert await self.read(store, "0") == Checkpoint("0", "0", 0)

    async def test_write_checkpoint_keeps_offset_and_number_unchanged(self, harness: LeaseHarness) -> None:
        """An offset is any text, a sequence number any 64-bit one; neither is changed on its way."""
        store = await _open(harness, "0")
        lease = await _acquire(store, "0", "a")
        checkpoint = Checkpoint("0", 'geo-1:007@a/b;"c"', 2**63 - 1)
        assert await self.write(store, lease, checkpoint)
        assert await self.read(store, "0") == checkpoint

    async def test_write_checkpoint_never_goes_backwards(self, harness: LeaseHarness) -> None:
        """A lower sequence number is not stored, by its own host or a later owner; the lease is not lost by that."""
        store, other = await _open(harness, "0"), await _open(harness)
        lease = await _acquire(store, "0", "a")
        assert await self.write(store, lease, Checkpoint("0", "200", 20))
        assert await self.write(store, lease, Checkpoint("0", "100", 10))
        assert await self.read(other, "0") == Checkpoint("0", "200", 20)
        stolen = await _steal(other, "0", "b")
        assert await self.write(other, stolen, Checkpoint("0", "150", 15))
        assert await self.read(store, "0") == Checkpoint("0", "200", 20)
        assert await self.write(other, stolen, Checkpoint("0", "300", 30))
        assert await self.read(store, "0") == Checkpoint("0", "300", 30)

    async def test_write_checkpoint_by_many_at_once_stores_the_latest(self, harness: LeaseHarness) -> None:
        """Of checkpoints written at the same time, in whatever order, the one with the highest number is stored."""
        store = await _open(harness, "0")
        lease = await _acquire(store, "0", "a")
        numbers = [7, 2, 9, 4, 8]
        writes = (self.write(store, lease, Checkpoint("0", str(n * 10), n)) for n in numbers)
        assert all(await asyncio.gather(*writes))
        assert await self.read(store, "0") == Checkpoint("0", "90", 9)

    async def test_write_checkpoint_by_a_former_owner_is_refused(self, harness: LeaseHarness) -> None:
        """After a release or a claim by the next owner, a write by the former one returns False and changes nothing."""
        store, other = await _open(harness, "0", "1"), await _open(harness)
        released = await _acquire(store, "0", "a")
        stolen = await _acquire(store, "1", "a")
        for lease in (released, stolen):
            checkpoint = Checkpoint(lease.partition_id, "200", 20)
            assert await self.write(store, lease, checkpoint)
        assert await self.release(store, released)
        thief = await _steal(other, "1", "b")
        assert await self.claim(other, thief) == Checkpoint("1", "200", 20)
        for lease in (released, stolen):
            for number in (10, 20, 30):
                checkpoint = Checkpoint(lease.partition_id, str(number), number)
                assert not await self.write(store, lease, checkpoint)
            expected = Checkpoint(lease.partition_id, "200", 20)
            assert await self.read(other, lease.partition_id) == expected

    async def test_write_checkpoint_leaves_the_owner_in_place(self, harness: LeaseHarness) -> None:
        """Writing checkpoints changes nothing about who is seen to own the lease."""
        store, other = await _open(harness, "0"), await _open(harness)
        lease = await _acquire(store, "0", "a")
        assert await self.write(store, lease, Checkpoint("0", "200", 20))
        seen = await _snapshot(other, "0")
        assert (seen.owner, seen.is_held) == ("a", True)

    async def test_write_checkpoint_of_an_unused_partition_is_stored(self, harness: LeaseHarness) -> None:
        """The start of a never-used partition, offset "-1" and number -1, is stored as such, and goes on from there."""
        store, other = await _open(harness, "0"), await _open(harness)
        lease = await _acquire(store, "0", "a")
        assert await self.write(store, lease, PINNED)
        assert await self.read(other, "0") == PINNED
        assert await self.write(store, lease, Checkpoint("0", "0", 0))
        assert await self.write(store, lease, PINNED)
        assert await self.read(other, "0") == Checkpoint("0", "0", 0)

    async def test_reset_checkpoint_goes_backwards(self, harness: LeaseHarness) -> None:
        """A reset stores a lower number than the stored one; from there numbers grow again."""
        store, other = await _open(harness, "0"), await _open(harness)
        lease = await _acquire(store, "0", "a")
        assert await self.write(store, lease, Checkpoint("0", "200", 20))
        for reset in (Checkpoint("0", "100", 10), PINNED, Checkpoint("0", "300", 30), Checkpoint("0", "50", 5)):
            assert await self.write(store, lease, reset, backwards=True)
            assert await self.read(other, "0") == reset
        assert await self.write(store, lease, Checkpoint("0", "40", 4))
        assert await self.read(other, "0") == Checkpoint("0", "50", 5)
        assert await self.write(store, lease, Checkpoint("0", "60", 6))
        assert await self.read(other, "0") == Checkpoint("0", "60", 6)

    async def test_reset_checkpoint_may_be_the_first_checkpoint(self, harness: LeaseHarness) -> None:
        """Where there is no checkpoint a reset stores one; other partitions keep theirs."""
        store = await _open(harness, "0", "1")
        lease, beside = await _acquire(store, "0", "a"), await _acquire(store, "1", "a")
        assert await self.write(store, beside, Checkpoint("1", "9", 9))
        assert await self.write(store, lease, Checkpoint("0", "100", 10), backwards=True)
        assert await self.read(store, "0") == Checkpoint("0", "100", 10)
        assert await self.read(store, "1") == Checkpoint("1", "9", 9)

    async def test_reset_checkpoint_by_a_former_owner_is_refused(self, harness: LeaseHarness) -> None:
        """After a release or a claim by the next owner, a reset by the former one returns False and changes nothing."""
        store, other = await _open(harness, "0", "1"), await _open(harness)
        released, stolen = await _acquire(store, "0", "a"), await _acquire(store, "1", "a")
        for lease in (released, stolen):
            checkpoint = Checkpoint(lease.partition_id, "200", 20)
            assert await self.write(store, lease, checkpoint)
        assert await self.release(store, released)
        thief = await _steal(other, "1", "b")
        assert await self.claim(other, thief) is not None
        for lease in (released, stolen):
            for number in (-1, 10, 30):
                checkpoint = Checkpoint(lease.partition_id, str(number), number)
                assert not await self.write(store, lease, checkpoint, backwards=True)
            expected = Checkpoint(lease.partition_id, "200", 20)
            assert await self.read(other, lease.partition_id) == expected
        assert await self.write(other, thief, Checkpoint("1", "10", 1), backwards=True)
        assert await self.read(store, "1") == Checkpoint("1", "10", 1)

    async def test_reset_checkpoint_leaves_the_lease_in_place(self, harness: LeaseHarness) -> None:
        """A reset changes nothing about who owns the lease, and its epoch grows on."""
        store, other = await _open(harness, "0"), await _open(harness)
        lease = await _acquire(store, "0", "a")
        assert await self.write(store, lease, PINNED, backwards=True)
        seen = await _snapshot(other, "0")
        assert (seen.owner, seen.is_held) == ("a", True)
        assert await store.renew(lease) is not None
        assert (await _steal(other, "0", "b")).epoch == 2

    async def test_reset_checkpoint_that_is_cancelled_undoes_nothing_newer(self, harness: LeaseHarness) -> None:
        """Wherever a reset is cancelled, a checkpoint written after it stays."""
        store = await _open(harness, "0")
        lease = await _acquire(store, "0", "a")
        for turns in range(8):
            newer = Checkpoint("0", str(turns), 100 + turns)
            attempt = asyncio.create_task(self.write(store, lease, PINNED, backwards=True))
            for _ in range(turns):
                await asyncio.sleep(0)
            attempt.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await attempt
            assert await self.write(store, lease, newer)
            assert await self.read(store, "0") == newer, f"cancelled after {turns} turns"


class LeaseStoreContract(CheckpointContract):
    """The guarantees of `LeaseStore`. That of its records is `RecordStoreContract`."""

    # ---- opening and closing

    async def test_call_before_open_raises_store_error(self, harness: LeaseHarness) -> None:
        """A store that is not open fails with a StoreError."""
        store = harness.new_store()
        assert isinstance(await error_of(store.list()), StoreError)

    async def test_open_twice_raises(self, harness: LeaseHarness) -> None:
        """A store serves one consumer group: opening it again is the caller's error."""
        store = await _open(harness)
        assert isinstance(await error_of(store.open(OTHER_SCOPE)), ConfigurationError)

    async def test_close_twice_is_fine(self, harness: LeaseHarness) -> None:
        """A store may be closed twice, and before it was opened; used after that it raises ClosedError."""
        store = await _open(harness)
        await store.aclose()
        await store.aclose()
        assert isinstance(await error_of(store.list()), ClosedError)
        never_opened = harness.new_store()
        await never_opened.aclose()
        assert isinstance(await error_of(never_opened.open(SCOPE)), ClosedError)

    async def test_close_leaves_leases_as_they_are(self, harness: LeaseHarness) -> None:
        """Closing releases nothing: the lease stays held until it is released or expires."""
        store, other = await _open(harness, "0"), await _open(harness)
        await _acquire(store, "0", "a")
        await store.aclose()
        assert await other.acquire(_free("0"), "b") is None
        assert (await _snapshot(other, "0")).owner == "a"

    async def test_open_to_read_shows_what_hosts_stored(self, harness: LeaseHarness) -> None:
        """A store that is opened to read lists their leases, and has their checkpoints and records."""
        store = await _open(harness, "0", "1")
        lease = await _acquire(store, "0", "a")
        assert await store.write_checkpoint(lease, Checkpoint("0", "100", 5))
        version = await store.records.swap(NOTE, b'{"of":"the host"}', None)
        reader = harness.new_store()
        await reader.open(SCOPE, read_only=True)
        assert await reader.list() == await store.list()
        assert await reader.read_checkpoint("0") == Checkpoint("0", "100", 5)
        assert await reader.read_checkpoint("1") is None
        found = await reader.records.read(NOTE)
        assert found is not None
        assert (found.body, found.version) == (b'{"of":"the host"}', version)
        assert NOTE in await reader.records.list("")
        await reader.aclose()
        assert await store.renew(lease) is not None

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
        note = await store.records.swap(NOTE, b'{"of":"the first"}', None)
        lease = await _acquire(store, "0", "a")
        assert await store.write_checkpoint(lease, Checkpoint("0", "100", 5))
        for scope in OTHER_HUBS:
            other = harness.new_store()
            try:
                await other.open(scope)
                await other.ensure(["0"])
            except ConfigurationError as error:
                assert scope.hub in str(error) and scope.fully_qualified_namespace in str(error)  # noqa: PT017, PT018
            else:
                assert await other.records.read(NOTE) is None
                assert await other.read_checkpoint("0") is None
                own = await _acquire(other, "0", "b")
                assert await other.write_checkpoint(own, Checkpoint("0", "9", 1))
        found = await store.records.read(NOTE)
        assert found is not None
        assert found.version == note
        assert await store.read_checkpoint("0") == Checkpoint("0", "100", 5)
        assert await store.renew(lease) is not None

    async def test_leases_of_two_hubs_at_once_are_separate_or_of_one(self, harness: LeaseHarness) -> None:
        """Of hosts of several hubs that start at the same time, those that are not refused share nothing."""
        scopes = (SCOPE, *OTHER_HUBS, *OTHER_HUBS, SCOPE)
        stores = [harness.new_store() for scope in scopes]

        async def start(store: LeaseStore, scope: ConsumerScope) -> bool:
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
        assert await other.acquire(_free("0"), "b") is None
        assert await other.acquire(_free("0"), "a") is None
        assert await store.acquire(_free("0"), "a") is None
        assert await store.renew(lease) is not None

    async def test_acquire_lease_that_was_never_created_raises(self, harness: LeaseHarness) -> None:
        """Acquiring a partition without a lease is not a lost race: it raises StoreError with the partition's id."""
        store = await _open(harness, "0")
        error = await error_of(store.acquire(_free("7"), "a"))
        assert isinstance(error, StoreError)
        assert error.partition_id == "7"

    async def test_acquire_lease_by_many_at_once_succeeds_once(self, harness: LeaseHarness) -> None:
        """Of hosts that acquire the same leases at once, exactly one gets each."""
        partitions = [str(number) for number in range(6)]
        stores = [await _open(harness, *partitions) for _ in range(4)]
        attempts = [
            store.acquire(_free(partition_id), f"host-{index}")
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
            attempt = asyncio.create_task(store.acquire(_free(str(turns)), "a"))
            for _ in range(turns):
                await asyncio.sleep(0)
            attempt.cancel()
            lease = None
            with contextlib.suppress(asyncio.CancelledError):
                lease = await attempt
            await store.aclose()
            taken = await other.acquire(_free(str(turns)), "b")
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
        assert await third.acquire(stale, "c", held=True) is None
        assert (await _snapshot(third, "0")).owner == "b"
        assert await other.renew(current) is not None

    async def test_steal_lease_after_a_checkpoint_in_between_succeeds(self, harness: LeaseHarness) -> None:
        """A steal needs the same owner, not the same checkpoint; and it keeps the checkpoint."""
        store, thief = await _open(harness, "0"), await _open(harness)
        lease = await _acquire(store, "0", "a")
        seen = await _snapshot(thief, "0")
        assert await store.write_checkpoint(lease, Checkpoint("0", "100", 5))
        assert await store.renew(lease) is not None
        assert await thief.acquire(seen, "b", held=True) is not None
        assert await thief.read_checkpoint("0") == Checkpoint("0", "100", 5)

    async def test_steal_lease_without_an_owner_fails(self, harness: LeaseHarness) -> None:
        """A lease never taken, or released since the listing, is not stolen."""
        store, thief = await _open(harness, "0", "1"), await _open(harness)
        assert await thief.acquire(await _snapshot(thief, "0"), "b", held=True) is None
        lease = await _acquire(store, "1", "a")
        seen = await _snapshot(thief, "1")
        assert await store.release(lease)
        assert await thief.acquire(seen, "b", held=True) is None
        assert [snapshot.is_held for snapshot in await thief.list()] == [False, False]

    async def test_steal_lease_by_many_at_once_succeeds_once(self, harness: LeaseHarness) -> None:
        """Of hosts that steal on the same snapshot at once, exactly one succeeds, with the next epoch."""
        partitions = [str(number) for number in range(4)]
        store = await _open(harness, *partitions)
        for partition_id in partitions:
            await _acquire(store, partition_id, "victim")
        thieves = [await _open(harness) for _ in range(4)]
        seen = await thieves[0].list()
        attempts = [
            thief.acquire(snapshot, f"thief-{index}", held=True)
            for snapshot in seen
            for index, thief in enumerate(thieves)
        ]
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

    # ---- expiry

    async def test_expired_lease_can_be_acquired_or_renewed(self, harness: LeaseHarness) -> None:
        """An expired lease keeps its last owner's name; any host may acquire it, its owner may renew it until then."""
        names = ["taken", "renewed", "written", "released", "stolen", "raced"]
        partitions = {name: str(number) for number, name in enumerate(names)}
        store, other, third = await _open(harness, *partitions.values()), await _open(harness), await _open(harness)
        old = {name: await _acquire(store, partition_id, "a") for name, partition_id in partitions.items()}
        for lease in old.values():
            assert await store.write_checkpoint(lease, Checkpoint(lease.partition_id, "100", 10))
        await harness.let_expire(other)
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
        assert await other.acquire(_free(partitions["renewed"]), "b") is None

        checkpoint = Checkpoint(partitions["written"], "200", 20)
        assert await store.write_checkpoint(old["written"], checkpoint)
        assert await other.read_checkpoint(partitions["written"]) == checkpoint

        assert await store.release(old["released"])
        assert (await _snapshot(other, partitions["released"])).owner is None

        stolen = await other.acquire(seen[partitions["stolen"]], "b", held=True)
        assert stolen is not None
        assert stolen.epoch == 2
        assert await store.renew(old["stolen"]) is None

        race: list[PartitionLease | None] = await asyncio.gather(
            *(
                host.acquire(_free(partitions["raced"]), name)
                for host, name in ((other, "b"), (third, "c"), (store, "a"))
            )
        )
        assert [lease.epoch for lease in race if lease is not None] == [2]


async def _open(harness: LeaseHarness, *partition_ids: str, scope: ConsumerScope = SCOPE) -> LeaseStore:
    store = harness.new_store()
    await store.open(scope)
    await store.ensure(partition_ids)
    return store


async def _acquire(store: LeaseStore, partition_id: str, owner: str) -> PartitionLease:
    lease = await store.acquire(_free(partition_id), owner)
    assert lease is not None
    return lease


async def _steal(store: LeaseStore, partition_id: str, owner: str) -> PartitionLease:
    lease = await store.acquire(await _snapshot(store, partition_id), owner, held=True)
    assert lease is not None
    return lease


def _free(partition_id: str) -> LeaseSnapshot:
    return LeaseSnapshot(partition_id, None, False)


async def _snapshot(store: LeaseStore, partition_id: str) -> LeaseSnapshot:
    snapshots: Sequence[LeaseSnapshot] = await store.list()
    (found,) = [snapshot for snapshot in snapshots if snapshot.partition_id == partition_id]
    return found
