"""The lease store of a history's host: it fails as a test says, and what it really stores is seen.

Over memory, or over a file as `SqliteLeaseStore` keeps it: with its work done in the loop's thread, because what a
thread does has no fixed place in a history.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, TypeVarTuple, Unpack

from eventpump.aio.sqlite_thread import SqliteThread
from eventpump.core.lease import LeaseSnapshot, PartitionLease
from eventpump.errors import StoreError
from eventpump.eventhubs.events import Checkpoint
from eventpump.interfaces import (
    CheckpointClaim,
    ConsumerScope,
    LeaseStore,
    ScopeRecord,
    StoredScopeRecord,
    StoredSubscription,
    SubscriptionRecord,
)
from tests.faults.histories.ledger import Ledger
from tests.faults.histories.world import Life, World

_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")


@dataclass
class Trouble:
    """How a store fails, for all hosts: chances per call, and seconds.

    Args:
        fails: The call does nothing and fails.
        loses: It does its work, and its answer is lost.
        lates: The caller gets a failure, and the work is done seconds later.
        cancels: The call raises `CancelledError`, as a client library does whose own task was cancelled.
        slow: Seconds that every call takes at most.
        hangs: No call is answered until this is over.
    """

    fails: float = 0.0
    loses: float = 0.0
    lates: float = 0.0
    cancels: float = 0.0
    slow: float = 0.0
    hangs: bool = False


class HistoryStore:
    """Forwards every call to a real store, with faults, and reports to the ledgers what is stored.

    Args:
        ledger_of: Returns the ledger of a subscription, by the name under which the store keeps its checkpoints.
        recorded: Called with a subscription's record that was stored, None where it was deleted, and the one before.
    """

    def __init__(
        self,
        world: World,
        life: Life,
        store: LeaseStore,
        trouble: Callable[[], Trouble],
        *,
        ledger_of: Callable[[str], Ledger],
        recorded: Callable[[SubscriptionRecord | None, SubscriptionRecord | None], None],
    ) -> None:
        self._world = world
        self._life = life
        self._store = store
        self._ledger_of = ledger_of
        self._recorded = recorded
        self._trouble = trouble
        self._rng = world.stream(f"store of {life.name}")
        self._late: set[asyncio.Task[Any]] = set()

    async def _call(
        self, operation: str, work: Callable[[], Awaitable[_T]], late: Callable[[], Awaitable[_T]] | None = None
    ) -> _T:
        """Do something, or not.

        Args:
            late: What happens instead where it reaches the store late.
        """
        trouble, rng = self._trouble(), self._rng
        while trouble.hangs:
            await asyncio.sleep(1.0)
            trouble = self._trouble()
        if trouble.slow:
            await asyncio.sleep(rng.uniform(0.0, trouble.slow))
        chance = rng.random()
        for share, fate in (
            (trouble.cancels, self._cancelled),
            (trouble.fails, self._failed),
            (trouble.lates, self._happens_late),
            (trouble.loses, self._answer_lost),
        ):
            if chance < share:
                return await fate(operation, late or work if fate == self._happens_late else work)
            chance -= share
        return await work()

    async def _failed(self, operation: str, work: Callable[[], Awaitable[_T]]) -> _T:
        raise StoreError(operation, "503 server busy")

    async def _cancelled(self, operation: str, work: Callable[[], Awaitable[_T]]) -> _T:
        raise asyncio.CancelledError("the store's own")

    async def _answer_lost(self, operation: str, work: Callable[[], Awaitable[_T]]) -> _T:
        await work()
        raise StoreError(operation, "the answer was lost")

    async def _happens_late(self, operation: str, work: Callable[[], Awaitable[_T]]) -> _T:
        delay = self._rng.uniform(0.1, 8.0)

        async def later() -> None:
            await asyncio.sleep(delay)
            with contextlib.suppress(Exception):
                await work()

        task = asyncio.get_running_loop().create_task(later(), name=f"late {operation}")
        self._late.add(task)
        task.add_done_callback(self._late.discard)
        raise StoreError(operation, "no answer yet")

    # ------------------------------------------------------------------------------------------------ LeaseStore

    @property
    def lease_duration(self) -> float:
        return self._store.lease_duration

    async def open(self, scope: ConsumerScope) -> None:
        # Not late, and not with its answer lost: a store is opened once.
        if self._rng.random() < self._trouble().fails:
            raise StoreError("open", "503 server busy")
        await self._store.open(scope)

    async def ensure_leases(self, partition_ids: Sequence[str]) -> None:
        await self._call("ensure leases", lambda: self._store.ensure_leases(partition_ids))

    async def list_leases(self) -> list[LeaseSnapshot]:
        return await self._call("list", self._store.list_leases)

    async def acquire_lease(self, partition_id: str, owner: str) -> PartitionLease | None:
        return await self._call("acquire", lambda: self._store.acquire_lease(partition_id, owner))

    async def steal_lease(self, snapshot: LeaseSnapshot, owner: str) -> PartitionLease | None:
        return await self._call("steal", lambda: self._store.steal_lease(snapshot, owner))

    async def renew_lease(self, lease: PartitionLease) -> PartitionLease | None:
        return await self._call("renew", lambda: self._store.renew_lease(lease))

    async def release_lease(self, lease: PartitionLease) -> bool:
        return await self._call("release", lambda: self._store.release_lease(lease))

    async def read_checkpoint(self, partition_id: str, subscription: str = "default") -> Checkpoint | None:
        return await self._call("read checkpoint", lambda: self._store.read_checkpoint(partition_id, subscription))

    async def write_checkpoint(
        self, lease: PartitionLease, checkpoint: Checkpoint, subscription: str = "default"
    ) -> bool:
        async def write() -> bool:
            is_stored = await self._store.write_checkpoint(lease, checkpoint, subscription)
            if is_stored:
                held = await self._store.read_checkpoint(lease.partition_id, subscription)
                ledger = self._ledger_of(subscription)
                ledger.took(lease.partition_id, lease.epoch, checkpoint, held, is_reset=False)
            return is_stored

        return await self._call("write checkpoint", write, self._unless_newer(lease, subscription, write))

    def _unless_newer(
        self, lease: PartitionLease, subscription: str, work: Callable[[], Awaitable[bool]]
    ) -> Callable[[], Awaitable[bool]]:
        """Return a write of a checkpoint that does nothing if one was reset meanwhile.

        That is what a write which reaches a real store late is refused for: its condition names the version before.
        """
        resets, partition_id = self._ledger_of(subscription).resets, lease.partition_id
        before = resets[partition_id]

        async def late() -> bool:
            return resets[partition_id] == before and await work()

        return late

    async def reset_checkpoint(
        self, lease: PartitionLease, checkpoint: Checkpoint, subscription: str = "default"
    ) -> bool:
        async def reset() -> bool:
            is_stored = await self._store.reset_checkpoint(lease, checkpoint, subscription)
            if is_stored:
                ledger = self._ledger_of(subscription)
                ledger.took(lease.partition_id, lease.epoch, checkpoint, checkpoint, is_reset=True)
            return is_stored

        return await self._call("reset checkpoint", reset, self._unless_newer(lease, subscription, reset))

    async def read_scope_record(self) -> StoredScopeRecord | None:
        return await self._call("read scope record", self._store.read_scope_record)

    async def write_scope_record(
        self, record: ScopeRecord, replaces: StoredScopeRecord | None
    ) -> StoredScopeRecord | None:
        return await self._call("write scope record", lambda: self._store.write_scope_record(record, replaces))

    async def claim_checkpoint(self, lease: PartitionLease, subscription: str = "default") -> CheckpointClaim | None:
        return await self._call("claim checkpoint", lambda: self._store.claim_checkpoint(lease, subscription))

    async def list_subscriptions(self) -> list[StoredSubscription]:
        return await self._call("list subscriptions", self._store.list_subscriptions)

    async def read_subscription(self, name: str) -> StoredSubscription | None:
        return await self._call("read subscription", lambda: self._store.read_subscription(name))

    async def write_subscription(
        self, record: SubscriptionRecord, replaces: StoredSubscription | None
    ) -> StoredSubscription | None:
        async def write() -> StoredSubscription | None:
            stored = await self._store.write_subscription(record, replaces)
            if stored is not None:
                self._recorded(record, None if replaces is None else replaces.record)
            return stored

        return await self._call("write subscription", write)

    async def delete_subscription(self, stored: StoredSubscription) -> bool:
        async def delete() -> bool:
            is_deleted = await self._store.delete_subscription(stored)
            if is_deleted:
                self._recorded(None, stored.record)
            return is_deleted

        return await self._call("delete subscription", delete)

    async def aclose(self) -> None:
        await self._store.aclose()


def _in_the_loop(self: SqliteThread, work: Callable[[Unpack[_Ts]], _T], *arguments: *_Ts) -> asyncio.Future[_T]:
    """Do a SQLite connection's work in the next turn of the loop, instead of in a thread."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[_T] = loop.create_future()

    def do() -> None:
        if not outcome.cancelled():
            try:
                outcome.set_result(work(*arguments))
            except Exception as error:
                outcome.set_exception(error)

    loop.call_soon(do)
    return outcome


@contextlib.contextmanager
def sqlite_inline() -> Iterator[None]:
    """Have the SQLite stores work in the loop's thread meanwhile."""
    real = SqliteThread._submit
    SqliteThread._submit = _in_the_loop  # type: ignore[method-assign]  # for as long as a history lasts
    try:
        yield
    finally:
        SqliteThread._submit = real  # type: ignore[method-assign]  # see above


class SteppedClock:
    """The clock of a history's stores: monotonic as the loop's, and a wall clock that can be set."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.offset = 0.0
        """Seconds that the wall clock was moved, forwards or backwards."""

    def monotonic(self) -> float:
        return self._world.loop.time()

    def time(self) -> float:
        return 1_700_000_000.0 + self._world.loop.time() + self.offset

    @property
    def boot_id(self) -> str | None:
        """All processes of a history run on one machine, which is not started again."""
        return "the history's"

    def boot_time(self) -> float:
        return self._world.loop.time()
