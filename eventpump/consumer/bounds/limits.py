"""Bounds the requests of a host: wrappers around store, transport and hub directory."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeVar
from weakref import WeakKeyDictionary

from eventpump.aio.steps import Rest
from eventpump.aio.tasks import resolve
from eventpump.aio.users import Users
from eventpump.consumer.bounds.loop_gate import LoopGate
from eventpump.core.bucket import TokenBucket
from eventpump.core.lease import LeaseSnapshot, PartitionLease
from eventpump.core.request_queue import RequestQueue
from eventpump.errors import ConfigurationError, StoreError
from eventpump.eventhubs.events import Checkpoint
from eventpump.interfaces import (
    Clock,
    ConsumerScope,
    HubDirectory,
    HubProperties,
    LeaseStore,
    ListedRecord,
    PartitionProperties,
    ReceiveLink,
    ReceiveLinkSpec,
    ReceiveSink,
    RecordStore,
    SendLink,
    SendLinkSpec,
    StoredRecord,
    Transport,
)
from eventpump.logs import present
from eventpump.reports import StoreCall
from eventpump.storage.groups import CHECKPOINTS

_T = TypeVar("_T")

_log = logging.getLogger("eventpump.consumer")

STORE_CALLS: Final = 128
"""The number of calls of the store that are under way at a time, per host."""

RENEWAL, CHECKPOINT, LISTING, TAKING = range(4)
"""Calls of the store by priority: a lease that is not renewed is lost, and taking another one can wait."""

STORE_SHARES: Final = (STORE_CALLS, 48, 8, 40)
"""The same per priority. The lower ones leave 32 calls to renewals, even if all others hang."""

ATTACHES: Final = 128
"""The number of receive links that are being attached at a time, per host."""

ATTACH_RATE: Final = 400.0
"""Receive links that a host attaches per second, after the first ones that follow a pause."""

ATTACH_BURST: Final = 100
"""Receive links that a host may attach at once after a pause."""

READ_RATE: Final = 35.0
"""Reads about hubs and partitions per second and namespace. The service takes 50."""

READ_BURST: Final = 10
"""Reads that may begin at once after a pause."""


class WithdrawnError(Exception):
    """The request was withdrawn before its turn."""


class RequestGate:
    """Lets tasks wait for their turn in a queue."""

    def __init__(self, queue: RequestQueue) -> None:
        self._queue = queue
        self._waiting: dict[int, asyncio.Future[bool]] = {}

    @asynccontextmanager
    async def turn(self, priority: int = 0, order: float = 0.0) -> AsyncIterator[None]:
        """Wait for a turn, which ends with the context; see `enter`."""
        request = self.enter_now(priority)
        if request is None:
            request = await self.enter(priority, order)
        try:
            yield
        finally:
            self.leave(request)

    def enter_now(self, priority: int) -> int | None:
        """Return a request whose turn has come, for `leave`; None if it has to wait by `enter`."""
        return self._queue.begin_now(priority)

    async def enter(self, priority: int, order: float) -> int:
        """Wait for a turn, and return its request, for `leave`. If cancelled, the request leaves the queue."""
        request = self._queue.ask(priority, order)
        has_turn = False
        try:
            turn = self._waiting[request] = asyncio.get_running_loop().create_future()
            self._begin()
            # Without an await if the turn has come: that saves a turn of the event loop.
            has_turn = turn.result() if turn.done() else await turn
            if not has_turn:
                raise WithdrawnError
            return request
        finally:
            del self._waiting[request]
            if not has_turn:
                self.leave(request)

    def leave(self, request: int) -> None:
        """End the turn of a request, or its wait for one."""
        self._queue.leave(request)
        if self._queue.waiting:
            self._begin()

    def withdraw(self, priority: int) -> None:
        """End the waits of a priority."""
        for request in self._queue.waiting_of(priority):
            resolve(self._waiting[request], False)
            self._queue.leave(request)

    def _begin(self) -> None:
        while (request := self._queue.begin()) is not None:
            resolve(self._waiting[request], True)


_STORES: Final = Users()
"""The hosts that have opened each lease store."""


class BoundedLeaseStore:
    """A `LeaseStore` that has a bounded number of calls under way: renewals first, then checkpoints, listings, takings.

    The time of a call begins when it is sent: a call that waits here is not late, and cancelling it would not make the
    store faster. `open` and `ensure` are passed on without a bound, and `aclose` closes only what `open` has
    opened, or has failed to open for a time.

    Args:
        loop_gate: Holds deliveries back that would make a call exceed its time.

    Raises:
        TimeoutError: From each call that takes longer.
    """

    def __init__(self, store: LeaseStore, *, timeout: float, clock: Clock, loop_gate: LoopGate) -> None:
        self._store = store
        self._timeout = timeout
        self._loop_gate = loop_gate
        self._clock = clock
        self._gate = RequestGate(RequestQueue(STORE_CALLS, STORE_SHARES))
        self._takes_more = True
        self._opening = asyncio.Lock()
        self._is_open = False
        self._is_ours = False
        self._fields: dict[str, object] = {}
        self._calls: set[_Call] = set()

    @property
    def calls(self) -> list[StoreCall]:
        """The calls that are under way, or wait for their turn, the longest first."""
        now = asyncio.get_running_loop().time()
        found = [StoreCall(each.operation, each.partition_id, now - each.began, each.is_sent) for each in self._calls]
        return sorted(found, key=lambda each: -each.seconds)

    @property
    def lease_duration(self) -> float:
        return self._store.lease_duration

    def take_no_more(self) -> None:
        """Have every acquisition and steal that has not been sent yet return None, as a lost race does."""
        self._takes_more = False
        self._gate.withdraw(TAKING)

    async def open(self, scope: ConsumerScope, *, read_only: bool = False) -> None:
        """See `LeaseStore`. Opening again does nothing."""
        async with self._opening:
            if not self._is_open:
                if not self._is_ours and not _STORES.enter(self._store, self):
                    _STORES.leave(self._store, self)
                    raise ConfigurationError("lease_store", "another host uses this store: create one store per host")
                self._is_ours = True
                try:
                    await self._store.open(scope, read_only=read_only)
                except ConfigurationError:
                    # Open already, by other code than a host; or refused, and then nothing is left open.
                    self._disown()
                    raise
                self._is_open = True
        self._fields = {"hub": scope.hub, "consumer_group": scope.consumer_group}
        self._debug(None, "the lease store is open")

    async def ensure(self, partition_ids: Sequence[str]) -> None:
        await self._store.ensure(partition_ids)

    async def list(self) -> list[LeaseSnapshot]:
        leases = await self._call(LISTING, self._store.list, "list leases")
        self._debug(None, "%d leases listed, %d of them held", len(leases), sum(lease.is_held for lease in leases))
        return leases

    async def acquire(self, snapshot: LeaseSnapshot, owner: str, *, held: bool = False) -> PartitionLease | None:
        if not self._takes_more:
            return None
        try:
            lease = await self._call(
                TAKING,
                lambda: self._store.acquire(snapshot, owner, held=held),
                "steal" if held else "acquire",
                snapshot.partition_id,
            )
        except WithdrawnError:
            return None
        if lease is None:
            self._debug(snapshot.partition_id, "lease not acquired: another host was first", owner_id=owner)
        return lease

    async def renew(self, lease: PartitionLease) -> PartitionLease | None:
        """See `LeaseStore`. The lease that expires first is renewed first.

        Raises:
            StoreError: Also if the lease expired before the call was sent.
        """

        def renew() -> Awaitable[PartitionLease | None]:
            if self._clock.monotonic() >= lease.expires_at:
                raise StoreError("renew", "the lease ran out before its turn", partition_id=lease.partition_id)
            return self._store.renew(lease)

        renewed = await self._call(RENEWAL, renew, "renew", lease.partition_id, lease.expires_at)
        if renewed is not None:
            left = renewed.expires_at - self._clock.monotonic()
            self._debug(lease.partition_id, "lease renewed for %.1f s", left, owner_id=lease.owner)
        return renewed

    async def release(self, lease: PartitionLease) -> bool:
        return await self._call(CHECKPOINT, lambda: self._store.release(lease), "release", lease.partition_id)

    async def read_checkpoint(self, partition_id: str) -> Checkpoint | None:
        found = await self._call(
            CHECKPOINT, lambda: self._store.read_checkpoint(partition_id), "read checkpoint", partition_id
        )
        self._debug(partition_id, "checkpoint read: %s", "none" if found is None else found.sequence_number)
        return found

    def write_checkpoint(
        self, lease: PartitionLease, checkpoint: Checkpoint, *, backwards: bool = False
    ) -> Coroutine[Any, Any, bool]:
        return self._call(
            CHECKPOINT,
            lambda: self._store.write_checkpoint(lease, checkpoint, backwards=backwards),
            "write checkpoint",
            lease.partition_id,
        )

    @property
    def records(self) -> BoundedRecordStore:
        return BoundedRecordStore(self._store.records, self._call)

    async def aclose(self) -> None:
        """Close the store, unless other code has opened it."""
        if self._is_ours:
            try:
                await self._store.aclose()
            finally:
                self._disown()

    def _disown(self) -> None:
        self._is_ours = False
        _STORES.leave(self._store, self)

    def _debug(self, partition_id: str | None, text: str, *values: object, owner_id: str | None = None) -> None:
        """Log an operation that no report of the host covers."""
        if _log.isEnabledFor(logging.DEBUG):
            where = "" if partition_id is None else f"partition {partition_id}: "
            extra = {**self._fields, **present(partition_id=partition_id, owner_id=owner_id)}
            _log.debug(f"%s{text}", where, *values, extra=extra)

    async def _call(
        self,
        priority: int,
        call: Callable[[], Awaitable[_T]],
        operation: str,
        partition_id: str | None = None,
        order: float = 0.0,
    ) -> _T:
        loop = asyncio.get_running_loop()
        asked = sent = loop.time()
        request = self._gate.enter_now(priority)
        if request is None:
            with self._shown(_Call(operation, partition_id, asked)):
                request = await self._gate.enter(priority, order)
            sent = loop.time()
        try:
            steps = call().__await__()
            try:
                waits_for = next(steps)
            except StopIteration as stop:
                return stop.value  # type: ignore[no-any-return]  # StopIteration is not typed
            # Only a call that waits needs a time-out, or the event loop.
            with self._shown(_Call(operation, partition_id, asked, is_sent=True)), self._loop_gate.call(self._timeout):
                async with asyncio.timeout_at(sent + self._timeout):
                    return await Rest(steps, waits_for)
        finally:
            self._gate.leave(request)

    @contextmanager
    def _shown(self, call: _Call) -> Iterator[None]:
        self._calls.add(call)
        try:
            yield
        finally:
            self._calls.discard(call)


@dataclass(slots=True, eq=False)
class _Call:
    operation: str
    partition_id: str | None
    began: float
    is_sent: bool = False


class BoundedRecordStore:
    """The `RecordStore` of a `BoundedLeaseStore`: checkpoints of subscriptions wait as such, others as listings."""

    def __init__(
        self, records: RecordStore, call: Callable[[int, Callable[[], Awaitable[Any]], str], Awaitable[Any]]
    ) -> None:
        self._records = records
        self._call = call

    async def open(self) -> None:
        """Do nothing: the lease store opens its records."""

    async def read(self, name: str) -> StoredRecord | None:
        found: StoredRecord | None = await self._call(_priority(name), lambda: self._records.read(name), "read record")
        return found

    async def swap(self, name: str, body: bytes, replaces: str | None) -> str | None:
        version: str | None = await self._call(
            _priority(name), lambda: self._records.swap(name, body, replaces), "write record"
        )
        return version

    async def list(self, prefix: str) -> dict[str, ListedRecord]:
        listed: dict[str, ListedRecord] = await self._call(LISTING, lambda: self._records.list(prefix), "list records")
        return listed

    async def delete(self, name: str, version: str | None = None) -> bool:
        is_deleted: bool = await self._call(LISTING, lambda: self._records.delete(name, version), "delete record")
        return is_deleted

    async def aclose(self) -> None:
        """Do nothing: the lease store closes its records."""

    def __repr__(self) -> str:
        return repr(self._records)


def _priority(name: str) -> int:
    return CHECKPOINT if name.startswith(CHECKPOINTS) else LISTING


class BoundedTransport:
    """A `Transport` that bounds how many receive links are attached at a time, and per second.

    A thousand links that were lost together are attached again within seconds, but not all at once, and not in step
    with other hosts that lost theirs at the same time.
    """

    def __init__(self, transport: Transport, *, rng: random.Random) -> None:
        self._transport = transport
        self._rng = rng
        self._gate = RequestGate(RequestQueue(ATTACHES, (ATTACHES,)))
        self._bucket = TokenBucket(ATTACH_RATE, ATTACH_BURST)

    @property
    def fully_qualified_namespace(self) -> str:
        return self._transport.fully_qualified_namespace

    async def open_receive_link(self, spec: ReceiveLinkSpec, sink: ReceiveSink) -> ReceiveLink:
        async with self._gate.turn():
            wait = self._bucket.take(asyncio.get_running_loop().time())
            if wait:
                # Spread at random in both directions, so that the mean rate is the same.
                await asyncio.sleep(wait * self._rng.uniform(0.5, 1.5))
            return await self._transport.open_receive_link(spec, sink)

    async def open_send_link(self, spec: SendLinkSpec) -> SendLink:
        return await self._transport.open_send_link(spec)

    async def get_hub_properties(self, hub: str) -> HubProperties:
        return await self._transport.get_hub_properties(hub)

    async def get_partition_properties(self, hub: str, partition_id: str) -> PartitionProperties:
        return await self._transport.get_partition_properties(hub, partition_id)

    async def aclose(self) -> None:
        await self._transport.aclose()


_PACES: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, tuple[TokenBucket, RequestGate]]] = WeakKeyDictionary()


class PacedDirectory:
    """A `HubDirectory` that stays below the 50 reads per second that the service accepts per namespace.

    All hosts of one event loop share the bound of a namespace. Other processes have bounds of their own; if they read
    too often together, the service answers that it is busy, and the reads are retried.
    """

    def __init__(self, directory: HubDirectory, fully_qualified_namespace: str) -> None:
        self._directory = directory
        self._namespace = fully_qualified_namespace.lower()

    async def get_hub_properties(self, hub: str) -> HubProperties:
        await self._wait()
        return await self._directory.get_hub_properties(hub)

    async def get_partition_properties(self, hub: str, partition_id: str) -> PartitionProperties:
        await self._wait()
        return await self._directory.get_partition_properties(hub, partition_id)

    async def _wait(self) -> None:
        loop = asyncio.get_running_loop()
        paces = _PACES.setdefault(loop, {})
        pace = paces.get(self._namespace)
        if pace is None:
            pace = paces[self._namespace] = TokenBucket(READ_RATE, READ_BURST), RequestGate(RequestQueue(1, (1,)))
        bucket, gate = pace
        # One after the other, so that a caller that is cancelled while it waits has taken nothing from the bucket.
        async with gate.turn():
            if wait := bucket.take(loop.time()):
                await asyncio.sleep(wait)
