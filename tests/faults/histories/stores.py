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
from eventpump.core.checkpoint import DEFAULT_SUBSCRIPTION
from eventpump.core.lease import LeaseSnapshot, PartitionLease
from eventpump.errors import StoreError
from eventpump.eventhubs.events import Checkpoint
from eventpump.interfaces import ConsumerScope, LeaseStore, ListedRecord, RecordStore, StoredRecord
from eventpump.storage.groups import SUBSCRIPTIONS
from eventpump.storage.scope_form import SubscriptionRecord, parse_subscription
from tests.faults.histories.ledger import Ledger
from tests.faults.histories.world import Life, World
from tests.support.store import CheckpointChange, checkpoint_change

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
        self.recorded = recorded
        self._trouble = trouble
        self._rng = world.stream(f"store of {life.name}")
        self._late: set[asyncio.Task[Any]] = set()
        self._epochs: dict[str, int] = {}
        """By partition: the epoch of the lease that was acquired last."""

    async def call(
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

    @property
    def records(self) -> RecordStore:
        return HistoryRecords(self, self._store.records)

    async def open(self, scope: ConsumerScope, *, read_only: bool = False) -> None:
        # Not late, and not with its answer lost: a store is opened once.
        if self._rng.random() < self._trouble().fails:
            raise StoreError("open", "503 server busy")
        await self._store.open(scope, read_only=read_only)

    async def ensure(self, partition_ids: Sequence[str]) -> None:
        await self.call("ensure leases", lambda: self._store.ensure(partition_ids))

    async def list(self) -> list[LeaseSnapshot]:
        return await self.call("list", self._store.list)

    async def acquire(self, snapshot: LeaseSnapshot, owner: str, *, held: bool = False) -> PartitionLease | None:
        async def acquire() -> PartitionLease | None:
            lease = await self._store.acquire(snapshot, owner, held=held)
            if lease is not None:
                self._epochs[lease.partition_id] = lease.epoch
            return lease

        return await self.call("steal" if held else "acquire", acquire)

    async def renew(self, lease: PartitionLease) -> PartitionLease | None:
        return await self.call("renew", lambda: self._store.renew(lease))

    async def release(self, lease: PartitionLease) -> bool:
        return await self.call("release", lambda: self._store.release(lease))

    async def read_checkpoint(self, partition_id: str) -> Checkpoint | None:
        return await self.call("read checkpoint", lambda: self._store.read_checkpoint(partition_id))

    async def write_checkpoint(self, lease: PartitionLease, checkpoint: Checkpoint, *, backwards: bool = False) -> bool:
        partition_id, ledger = lease.partition_id, self._ledger_of(DEFAULT_SUBSCRIPTION)

        async def write() -> bool:
            is_stored = await self._store.write_checkpoint(lease, checkpoint, backwards=backwards)
            if is_stored:
                held = checkpoint if backwards else await self._store.read_checkpoint(partition_id)
                ledger.took(partition_id, lease.epoch, checkpoint, held, is_reset=backwards)
            return is_stored

        resets = ledger.resets[partition_id]

        async def late() -> bool:
            # What a write that reaches a real store late is refused for: its condition names the version before.
            return ledger.resets[partition_id] == resets and await write()

        return await self.call("write checkpoint", write, late)

    def swapping(
        self, change: CheckpointChange, swap: Callable[[], Awaitable[str | None]]
    ) -> Callable[[], Awaitable[str | None]]:
        """Return a swap of a subscription's checkpoint that is reported to its ledger."""
        partition_id, checkpoint = change.partition_id, change.checkpoint
        epoch = self._epochs.get(partition_id, 0)

        async def swapped() -> str | None:
            version = await swap()
            if version is not None and change.operation != "read":
                assert checkpoint is not None
                ledger, is_reset = self._ledger_of(change.subscription), change.operation == "reset"
                ledger.took(partition_id, epoch, checkpoint, checkpoint, is_reset=is_reset)
            return version

        return swapped

    async def aclose(self) -> None:
        await self._store.aclose()


class HistoryRecords:
    """The records of a `HistoryStore`, with its faults."""

    def __init__(self, leases: HistoryStore, records: RecordStore) -> None:
        self._leases = leases
        self._records = records

    async def open(self) -> None:
        pass

    async def read(self, name: str) -> StoredRecord | None:
        return await self._leases.call(f"read {name}", lambda: self._records.read(name))

    async def swap(self, name: str, body: bytes, replaces: str | None) -> str | None:
        async def swap() -> str | None:
            before = await self._records.read(name)
            version = await self._records.swap(name, body, replaces)
            if (
                version is not None
                and name.startswith(SUBSCRIPTIONS)
                and (before is None or before.version == replaces)
            ):
                self._leases.recorded(
                    parse_subscription(body), None if before is None else parse_subscription(before.body)
                )
            return version

        change = await checkpoint_change(self._records, name, body)
        return await self._leases.call(f"swap {name}", self._leases.swapping(change, swap) if change else swap)

    async def list(self, prefix: str) -> dict[str, ListedRecord]:
        return await self._leases.call(f"list {prefix}", lambda: self._records.list(prefix))

    async def delete(self, name: str, version: str | None = None) -> bool:
        async def delete() -> bool:
            before = await self._records.read(name)
            is_deleted = await self._records.delete(name, version)
            if is_deleted and before is not None and name.startswith(SUBSCRIPTIONS):
                self._leases.recorded(None, parse_subscription(before.body))
            return is_deleted

        return await self._leases.call(f"delete {name}", delete)

    async def aclose(self) -> None:
        pass


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
