"""What a host asks for at a time: of its store, of links, of management."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from eventpump.consumer.bounds.limits import (
    ATTACH_BURST,
    ATTACH_RATE,
    ATTACHES,
    STORE_CALLS,
    BoundedLeaseStore,
    BoundedTransport,
    PacedDirectory,
)
from eventpump.consumer.bounds.loop_gate import LoopGate
from eventpump.consumer.host.host import HubHost
from eventpump.core.lease import LeaseSnapshot, PartitionLease
from eventpump.errors import StoreError
from eventpump.eventhubs.events import Checkpoint, EventPosition
from eventpump.interfaces import ConsumerScope, ReceiveLinkSpec
from eventpump.options.consumer import HostSettings
from eventpump.reports import HostReport, LeaseLost, LeaseTaken, StoreFailed
from eventpump.storage.leases.memory import MemoryLeases, MemoryLeaseStore
from eventpump.testing.clock import VirtualClock
from eventpump.testing.transport import FakeHub, FakeTransport
from tests.support.fleet import Record, RecordingProcessor
from tests.support.leases import unheld
from tests.support.store import FlakyLeaseStore

SCOPE = ConsumerScope("fake.servicebus.windows.net", "telemetry", "$Default")


class BusyStore(MemoryLeaseStore):
    """A store that serves 100 requests at a time, each in the same time; the others stand in line there.

    An acquisition is 3 requests, a steal 4, a release 2, as on blobs. A lease's end counts from the first request.
    """

    def __init__(self, leases: MemoryLeases, clock: VirtualClock, pace: float) -> None:
        super().__init__(leases, clock=clock)
        self._now = clock.monotonic
        self._pace = pace
        self._places = asyncio.Semaphore(100)
        self.calls = 0
        self.peak = 0
        self.renewed_at: list[float] = []
        self.late: list[PartitionLease] = []

    @asynccontextmanager
    async def _requests(self, count: int = 1) -> AsyncIterator[None]:
        self.calls += 1
        self.peak = max(self.peak, self.calls)
        try:
            for _ in range(count):
                async with self._places:
                    await asyncio.sleep(self._pace)
            yield
        finally:
            self.calls -= 1

    def _since(self, lease: PartitionLease | None, sent: float) -> PartitionLease | None:
        if lease is None:
            return None
        return replace(lease, expires_at=sent + self.lease_duration)

    async def list(self) -> list[LeaseSnapshot]:
        async with self._requests():
            return await super().list()

    async def acquire(self, snapshot: LeaseSnapshot, owner: str, *, held: bool = False) -> PartitionLease | None:
        sent = self._now()
        async with self._requests(4 if held else 3):
            return self._since(await super().acquire(snapshot, owner, held=held), sent)

    async def renew(self, lease: PartitionLease) -> PartitionLease | None:
        sent = self._now()
        self.renewed_at.append(sent)
        if sent >= lease.expires_at:
            self.late.append(lease)
        async with self._requests():
            return self._since(await super().renew(lease), sent)

    async def release(self, lease: PartitionLease) -> bool:
        async with self._requests(2):
            return await super().release(lease)

    async def read_checkpoint(self, partition_id: str) -> Checkpoint | None:
        async with self._requests():
            return await super().read_checkpoint(partition_id)

    async def write_checkpoint(self, lease: PartitionLease, checkpoint: Checkpoint, *, backwards: bool = False) -> bool:
        async with self._requests():
            return await super().write_checkpoint(lease, checkpoint, backwards=backwards)


@pytest.mark.timeout(900)
async def test_store_with_a_thousand_partitions_and_slow_calls_loses_none(
    request: pytest.FixtureRequest, clock: VirtualClock
) -> None:
    """1,000 partitions, 100 requests at a time of 0.6 s: all owned within 5 minutes, none lost (--long: in an hour)."""
    hub, leases, record = FakeHub(partitions=1000), MemoryLeases(), Record()
    store = BusyStore(leases, clock, 0.6)
    reports: list[HostReport] = []
    transport = FakeTransport(hub)
    host = HubHost(
        lambda: transport,
        store,
        HostSettings(hub=hub.name, owner_id="a"),
        RecordingProcessor(record),
        hooks=[reports.append],
        rng=random.Random(1),
    )
    running = asyncio.create_task(host.run())
    began = clock.monotonic()
    while len(record.opened) < 1000 or not all(hub.owner_levels(each) for each in hub.partition_ids):
        await asyncio.sleep(1)
        assert clock.monotonic() - began < 300, f"{len(record.opened)} are owned"
    assert sum(isinstance(report, LeaseTaken) for report in reports) == 1000
    await asyncio.sleep(3600 if request.config.getoption("--long") else 45)
    for partition_id in hub.partition_ids:
        hub.publish(partition_id, "x")
    await asyncio.sleep(25)
    assert all(record.numbers(partition_id) == [0] for partition_id in hub.partition_ids)
    assert [report for report in reports if isinstance(report, LeaseLost | StoreFailed)] == []
    assert store.late == []
    assert store.peak <= STORE_CALLS
    # Spread: no second has far more renewals than the mean of 111, where all at one instant would be 1000.
    begun = [int(at) for at in store.renewed_at if at > clock.monotonic() - 40]
    assert max(begun.count(second) for second in set(begun)) < 250
    await host.aclose()
    await running
    assert store.peak <= STORE_CALLS


async def test_renewals_are_spread_over_the_interval(clock: VirtualClock) -> None:
    """500 leases that were taken in one instant are not renewed in one, from the first renewal on."""
    hub, leases = FakeHub(partitions=500), MemoryLeases()
    store = BusyStore(leases, clock, 0.0)
    transport = FakeTransport(hub)
    settings = HostSettings(hub=hub.name, owner_id="a")
    host = HubHost(lambda: transport, store, settings, RecordingProcessor(Record()), rng=random.Random(1))
    running = asyncio.create_task(host.run())
    await asyncio.sleep(40)
    assert len(store.renewed_at) >= 1500
    for start in store.renewed_at:
        # The mean is 55 in a second.
        assert sum(start <= at < start + 1 for at in store.renewed_at) < 150
    await host.aclose()
    await running


async def test_close_sends_no_acquisition_that_waits(clock: VirtualClock) -> None:
    """A host that is closed while hundreds of acquisitions wait for their turn sends none of them any more."""
    hub, leases = FakeHub(partitions=1000), MemoryLeases()
    store = BusyStore(leases, clock, 0.6)
    transport = FakeTransport(hub)
    settings = HostSettings(hub=hub.name, owner_id="a")
    host = HubHost(lambda: transport, store, settings, RecordingProcessor(Record()), rng=random.Random(1))
    running = asyncio.create_task(host.run())
    await asyncio.sleep(10)
    held = [row for row in leases.leases(_keyed(SCOPE)).values() if row.owner == "a"]
    assert 50 < len(held) < 500
    began = clock.monotonic()
    await host.aclose()
    await running
    assert clock.monotonic() - began < 12
    assert [row for row in leases.leases(_keyed(SCOPE)).values() if row.owner == "a"] == []


def _keyed(scope: ConsumerScope) -> ConsumerScope:
    return ConsumerScope(scope.fully_qualified_namespace.lower(), scope.hub.lower(), scope.consumer_group.lower())


# ------------------------------------------------------------------------------------------------------ the store


async def _bounded() -> tuple[BoundedLeaseStore, FlakyLeaseStore]:
    flaky = FlakyLeaseStore(MemoryLeaseStore())
    bounded = BoundedLeaseStore(flaky, timeout=9.0, clock=VirtualClock(), loop_gate=LoopGate(VirtualClock()))
    await bounded.open(SCOPE)
    await bounded.ensure([str(number) for number in range(200)])
    return bounded, flaky


async def _take_all(store: BoundedLeaseStore, count: int) -> list[PartitionLease]:
    leases = [await store.acquire(unheld(str(number)), "a") for number in range(count)]
    return [lease for lease in leases if lease is not None]


async def test_renewal_is_sent_while_other_calls_hang() -> None:
    """While every other call hangs, as many as there may be, a renewal is sent at once."""
    store, flaky = await _bounded()
    (lease,) = await _take_all(store, 1)
    for operation in ("acquire", "read", "write", "list", "release"):
        flaky.hang(operation)
    work: list[Any] = [store.acquire(unheld(str(number)), "b") for number in range(1, 150)]
    work += [store.read_checkpoint(str(number)) for number in range(150)]
    work += [store.list() for _ in range(20)]
    tasks = [asyncio.ensure_future(each) for each in work]
    await asyncio.sleep(1)
    assert len([call for call in flaky.calls if call[0] != "renew"]) < STORE_CALLS
    async with asyncio.timeout(0.001):
        assert await store.renew(lease) is not None
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def test_renewal_of_the_lease_that_runs_out_first_is_sent_first() -> None:
    """Of the renewals that wait, the most urgent one is sent next."""
    store, flaky = await _bounded()
    leases = await _take_all(store, 150)
    ordered: list[str] = []
    flaky.delay(5.0, "renew")
    tasks = []
    for lease in reversed(leases):
        await asyncio.sleep(0)
        tasks.append(asyncio.create_task(store.renew(lease)))
    await asyncio.sleep(0)
    rest = [partition_id for operation, partition_id in flaky.calls if operation == "renew"]
    assert len(rest) == STORE_CALLS
    urgent = PartitionLease("199", "a", 1, 1, "no", asyncio.get_running_loop().time() + 8)
    tasks.append(asyncio.create_task(store.renew(urgent)))
    await asyncio.sleep(5.01)
    ordered = [str(partition_id) for operation, partition_id in flaky.calls if operation == "renew"]
    assert ordered[STORE_CALLS] == "199"
    await asyncio.wait(tasks)


async def test_call_time_out_counts_from_when_the_call_is_sent() -> None:
    """A call that waited longer for its turn than it may take is sent all the same, and then has its whole time."""
    store, flaky = await _bounded()
    flaky.delay(8.0, "acquire")
    tasks = [asyncio.create_task(store.acquire(unheld(str(number)), "a")) for number in range(120)]
    done, _ = await asyncio.wait(tasks, timeout=8.0 * 3 + 1)
    assert len(done) == 120
    assert all(task.result() is not None for task in done)
    flaky.heal()
    flaky.hang("list")
    with pytest.raises(TimeoutError):
        await store.list()
    flaky.heal()


async def test_renewal_after_its_lease_ran_out_is_not_sent() -> None:
    """A renewal whose turn comes too late fails without a request."""
    store, flaky = await _bounded()
    leases = await _take_all(store, 130)
    flaky.delay(8.9, "renew")
    tasks = [asyncio.create_task(store.renew(lease)) for lease in leases[:STORE_CALLS]]
    soon = PartitionLease("129", "a", 1, 1, leases[129].token, asyncio.get_running_loop().time() + 5)
    tasks.append(asyncio.create_task(store.renew(soon)))
    await asyncio.wait(tasks)
    with pytest.raises(StoreError, match="ran out"):
        tasks[-1].result()
    assert ("renew", "129") not in flaky.calls


async def test_call_that_is_cancelled_gives_its_turn_to_the_next() -> None:
    """Whether it waits or runs, a call that is cancelled takes no room any more."""
    store, flaky = await _bounded()
    flaky.hang("acquire")
    tasks = [asyncio.create_task(store.acquire(unheld(str(number)), "a")) for number in range(200)]
    await asyncio.sleep(1)
    sent = sum(operation == "acquire" for operation, _ in flaky.calls)
    assert 0 < sent < 100
    for task in tasks[:sent] + tasks[100:]:
        task.cancel()
    await asyncio.sleep(0.01)
    followed = [partition_id for operation, partition_id in flaky.calls if operation == "acquire"][sent:]
    assert followed == [str(number) for number in range(sent, min(2 * sent, 100))]
    flaky.heal()
    leases = await asyncio.gather(*tasks[sent:100])
    assert None not in leases


# ---------------------------------------------------------------------------------------------- links, management


class _Sink:
    def messages(self, batch: list[bytes]) -> None:
        pass

    def detached(self, error: Exception) -> None:
        pass


class _WatchedTransport(FakeTransport):
    """Notes when attaches begin, and how many are under way."""

    def __init__(self, hub: FakeHub) -> None:
        super().__init__(hub)
        self.begun: list[float] = []
        self.open = 0
        self.peak = 0

    async def open_receive_link(self, spec: ReceiveLinkSpec, sink: Any) -> Any:
        self.begun.append(asyncio.get_running_loop().time())
        self.open += 1
        self.peak = max(self.peak, self.open)
        try:
            return await super().open_receive_link(spec, sink)
        finally:
            self.open -= 1


async def test_attach_of_a_thousand_links_is_bounded(clock: VirtualClock) -> None:
    """After a reconnect they come back within seconds: a bounded number at a time, and so many a second."""
    hub = FakeHub(partitions=1000, latency=0.05)
    inner = _WatchedTransport(hub)
    transport = BoundedTransport(inner, rng=random.Random(3))
    specs = [ReceiveLinkSpec(hub.name, "$Default", each, EventPosition.latest()) for each in hub.partition_ids]
    began = clock.monotonic()
    await asyncio.gather(*(transport.open_receive_link(spec, _Sink()) for spec in specs))
    assert clock.monotonic() - began < 6
    assert inner.peak <= ATTACHES
    for start in inner.begun:
        assert sum(start <= each < start + 1 for each in inner.begun) <= (ATTACH_RATE + ATTACH_BURST) * 1.1
    later = [at for at in inner.begun if at > began]
    assert len({round(at, 4) for at in later}) > 0.8 * len(later)
    await transport.aclose()


async def test_attach_of_a_single_link_is_immediate(clock: VirtualClock) -> None:
    """The bound costs those nothing who stay below it."""
    hub = FakeHub(partitions=32)
    transport = BoundedTransport(FakeTransport(hub), rng=random.Random(3))
    began = clock.monotonic()
    for partition_id in hub.partition_ids:
        await transport.open_receive_link(
            ReceiveLinkSpec(hub.name, "$Default", partition_id, EventPosition.latest()), _Sink()
        )
    assert clock.monotonic() == began
    await transport.aclose()


async def test_management_reads_are_below_50_a_second() -> None:
    """However many partitions and hosts of this process ask, the namespace sees fewer than 50 reads in any second."""
    hub = FakeHub(partitions=300)
    asked: list[float] = []

    class Counting(FakeTransport):
        async def get_partition_properties(self, hub: str, partition_id: str) -> Any:
            asked.append(asyncio.get_running_loop().time())
            return await super().get_partition_properties(hub, partition_id)

    directories = [PacedDirectory(Counting(hub), name) for name in ("ns.example.net", "NS.example.net")]
    other = PacedDirectory(FakeTransport(hub), "other.example.net")
    reads = [
        directories[number % 2].get_partition_properties(hub.name, partition_id)
        for number, partition_id in enumerate(hub.partition_ids)
    ]
    reading = asyncio.gather(*reads)
    async with asyncio.timeout(0.01):
        await other.get_hub_properties(hub.name)
    await reading
    assert len(asked) == 300
    for start in asked:
        assert sum(start <= each < start + 1 for each in asked) < 50


async def test_management_reads_of_a_closed_host_delay_no_others(clock: VirtualClock) -> None:
    """A host that ends before its partitions were asked about leaves no wait to the next one."""
    hub = FakeHub(partitions=1)
    directory = PacedDirectory(FakeTransport(hub), "ns.example.net")
    for _ in range(5):
        reads = [asyncio.create_task(directory.get_partition_properties(hub.name, "0")) for _ in range(1000)]
        await asyncio.sleep(1)
        for read in reads:
            read.cancel()
        await asyncio.wait(reads)
    began = clock.monotonic()
    await directory.get_hub_properties(hub.name)
    assert clock.monotonic() - began < 0.1
