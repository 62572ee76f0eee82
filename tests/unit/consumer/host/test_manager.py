"""Hosts among each other: leases, moves, losses, and what a store or an outsider can do to them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any

import pytest

from eventpump.clock import SuspendedTime
from eventpump.consumer.processor import CloseReason, PartitionContext
from eventpump.core.checkpoint import CheckpointPolicy
from eventpump.core.lease import PartitionLease
from eventpump.core.link_dispute import TIMES
from eventpump.errors import ConnectionLostError, OwnershipLostError
from eventpump.eventhubs.events import EventPosition, ReceivedEvent
from eventpump.interfaces import ReceiveLinkSpec
from eventpump.options.base import RetryOptions
from eventpump.reports import (
    LeaseLost,
    LeaseTaken,
    LinkFailed,
    OutsideReader,
    PartitionsFound,
    PumpOverdue,
    ServiceFailed,
    StoreFailed,
    StoreRestored,
    UnexpectedFailure,
)
from eventpump.storage.leases.memory import MemoryLeaseStore
from eventpump.testing.clock import VirtualClock
from eventpump.testing.transport import FakeHub, FakeTransport
from tests.support.fleet import Fleet, Record, RecordingProcessor, stocked
from tests.support.seeds import seeds

Events = Sequence[ReceivedEvent]


async def _nothing(context: PartitionContext, events: Events) -> None:
    pass


async def _steal(fleet: Fleet, partition_id: str = "0", owner: str = "thief") -> PartitionLease:
    """Take a lease over, as another host's store would."""
    store = MemoryLeaseStore(fleet.leases)
    await store.open(fleet.scope)
    (snapshot,) = [each for each in await store.list() if each.partition_id == partition_id]
    lease = await store.acquire(snapshot, owner, held=True)
    assert lease is not None
    return lease


class _Sink:
    """An outsider's sink, which wants nothing."""

    def messages(self, batch: list[bytes]) -> None:
        pass

    def detached(self, error: Exception) -> None:
        pass


async def _read_from_outside(fleet: Fleet, owner_level: int) -> FakeTransport:
    transport = FakeTransport(fleet.hub)
    spec = ReceiveLinkSpec(fleet.hub.name, "$Default", "0", EventPosition.latest(), owner_level=owner_level)
    await transport.open_receive_link(spec, _Sink())
    return transport


def _check_one_deliverer(fleet: Fleet) -> None:
    """One host per partition and epoch, and no epoch begins a delivery after a later one has."""
    holders: dict[tuple[str, int], str] = {}
    newest: dict[str, int] = {}
    for delivery in fleet.record.deliveries:
        key = (delivery.partition_id, delivery.owner_level)
        assert holders.setdefault(key, delivery.host) == delivery.host
        assert delivery.owner_level >= newest.get(delivery.partition_id, 0)
        newest[delivery.partition_id] = delivery.owner_level


# ------------------------------------------------------------------------------------------------------------ moving


async def test_host_that_joins_gets_its_share_and_nothing_is_lost() -> None:
    """A second host gets half the partitions within two intervals; nothing is lost, one deliverer at a time."""
    async with stocked(partitions=8) as fleet:
        await fleet.start("a")
        await asyncio.sleep(5)
        await fleet.start("b")

        async def publish() -> None:
            for _ in range(60):
                for partition_id in fleet.hub.partition_ids:
                    fleet.hub.publish(partition_id, count=3)
                await asyncio.sleep(1)

        publishing = asyncio.create_task(publish())
        await asyncio.sleep(20)
        assert len(fleet.owned("a")) == len(fleet.owned("b")) == 4
        await publishing
        await asyncio.sleep(5)
        for partition_id in fleet.hub.partition_ids:
            assert sorted(set(fleet.record.numbers(partition_id))) == list(range(180))
        _check_one_deliverer(fleet)
        assert len(fleet.reported("b", LeaseTaken)) == 4
        assert all(report.stolen_from == "a" for report in fleet.reported("b", LeaseTaken))
        for moved in fleet.owned("b"):
            assert fleet.record.reasons("a", moved) == [CloseReason.OWNERSHIP_LOST]


async def test_lease_epoch_is_the_owner_level_of_the_link() -> None:
    """Every acquisition opens its link with the epoch it got, so that the service itself cuts off an earlier owner."""
    async with stocked() as fleet:
        for name in "abc":
            await fleet.start(name)
            await asyncio.sleep(12)
            await fleet.hosts[name].aclose()
        assert [spec.owner_level for spec in fleet.hub.attached] == [1, 2, 3]
        assert [spec.receiver_name for spec in fleet.hub.attached] == ["a", "b", "c"]


async def test_partitions_of_a_closed_host_are_taken_at_the_next_cycle() -> None:
    """A host that closes in order releases its leases: the rest has them within one interval, not a lease duration."""
    async with stocked(partitions=4) as fleet:
        await fleet.start("a")
        await fleet.start("b")
        await asyncio.sleep(40)
        await fleet.hosts["a"].aclose()
        await asyncio.sleep(11)
        assert fleet.owned("b") == {"0", "1", "2", "3"}


async def test_partitions_of_a_dead_host_are_taken_when_its_leases_expire() -> None:
    """A host that vanishes is replaced within lease duration and one interval."""
    async with stocked(partitions=2) as fleet:
        await fleet.start("a")
        await asyncio.sleep(5)
        await fleet.start("b")
        await asyncio.sleep(25)
        assert len(fleet.owned("a")) == 1
        for operation in ("renew", "list", "write", "acquire", "steal", "release"):
            fleet.stores["a"].hang(operation)
        assert await fleet.until(lambda: len(fleet.owned("b")) == 2, 60) <= 30 + 10


async def test_partitions_added_to_the_hub_are_found() -> None:
    """Partitions the hub gets while hosts run are read within an interval."""
    async with stocked() as fleet:
        await fleet.start("a")
        await asyncio.sleep(15)
        fleet.hub.add_partitions(2)
        fleet.hub.publish("2", "a")
        await asyncio.sleep(11)
        assert fleet.owned("a") == {"0", "1", "2"}
        assert fleet.record.numbers("2") == [0]
        assert [report.partition_ids for report in fleet.reported("a", PartitionsFound)] == [("0",), ("1", "2")]


@seeds(4, of=12)
async def test_hosts_deliver_everything_in_random_histories(seed: int) -> None:
    """Hosts come and go, links are cut, stores fail and hang: every event arrives, one deliverer, forwards only."""
    rng = random.Random(seed)
    async with Fleet(FakeHub(partitions=5, latency=rng.choice([0.0, 0.05])), seed=seed) as fleet:
        running: list[str] = []
        checkpoints: dict[str, int] = {}

        async def watch() -> None:
            while True:
                for partition_id in fleet.hub.partition_ids:
                    stored = fleet.checkpoint(partition_id)
                    assert (-1 if stored is None else stored) >= checkpoints.get(partition_id, -1)
                    checkpoints[partition_id] = -1 if stored is None else stored
                await asyncio.sleep(0.25)

        async def handle(context: PartitionContext, events: Events) -> None:
            await asyncio.sleep(rng.choice([0, 0, 0.1, 2]))
            if rng.random() < 0.05:
                raise ValueError("sometimes")

        watching = asyncio.create_task(watch())
        for turn in range(60):
            match rng.randrange(8):
                case 0 if len(running) < 4:
                    running.append(f"host-{turn}")
                    await fleet.start(
                        running[-1],
                        RecordingProcessor(fleet.record, on_events=handle),
                        checkpoint_policy=CheckpointPolicy(every_events=20, every_seconds=3),
                        max_batch_size=rng.choice([1, 7, 300]),
                    )
                case 1 if len(running) > 1:
                    leaver = running.pop(rng.randrange(len(running)))
                    await fleet.hosts[leaver].aclose(deadline=rng.choice([0, 1, 10]))
                case 2 if running:
                    fleet.hub.detach(rng.choice(fleet.hub.partition_ids), ConnectionLostError("cut"))
                case 3 if running:
                    fleet.stores[rng.choice(running)].hang(rng.choice(["renew", "list", "write", "acquire"]))
                case 4:
                    for name in running:
                        fleet.stores[name].heal()
                case 5 if running:
                    operation = rng.choice(["renew", "write", "acquire", "steal", "read"])
                    fleet.stores[rng.choice(running)].fail(operation, times=3, is_after=rng.random() < 0.5)
                case _:
                    for partition_id in fleet.hub.partition_ids:
                        fleet.hub.publish(partition_id, count=rng.randrange(30))
            await asyncio.sleep(rng.uniform(0, 12))
        for name in running:
            fleet.stores[name].heal()
        await fleet.start("last", checkpoint_policy=CheckpointPolicy())
        everything = {each: set(range(len(fleet.hub.events(each)))) for each in fleet.hub.partition_ids}
        await fleet.until(
            lambda: all(set(fleet.record.numbers(each)) == numbers for each, numbers in everything.items()),
            3600,
            step=10,
        )
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching
        _check_one_deliverer(fleet)
        for name in fleet.hosts:
            assert fleet.reported(name, UnexpectedFailure) == []


# ----------------------------------------------------------------------------------------------------------- losing


async def test_lost_lease_ends_delivery_after_the_grace(clock: VirtualClock) -> None:
    """Lost: the context says so, no batch follows, the handler is cancelled after the grace, then closed."""
    seen: dict[str, float] = {}

    async def slow(context: PartitionContext, events: Events) -> None:
        await context.ownership_lost.wait()
        seen["reported"] = clock.monotonic()
        try:
            await asyncio.sleep(1e6)
        finally:
            seen["cancelled"] = clock.monotonic()

    async with stocked() as fleet:
        fleet.hub.publish("0", count=100)
        await fleet.start(
            "a", RecordingProcessor(fleet.record, on_events=slow), max_batch_size=10, ownership_lost_grace=4
        )
        await asyncio.sleep(12)
        await _steal(fleet)
        stolen = clock.monotonic()
        await asyncio.sleep(25)
        assert seen["reported"] - stolen <= 10
        assert seen["cancelled"] - seen["reported"] == pytest.approx(4)
        assert len(fleet.record.deliveries) == 1
        assert fleet.record.reasons("a", "0") == [CloseReason.OWNERSHIP_LOST]
        assert len(fleet.reported("a", LeaseLost)) == 1


async def test_lost_lease_does_not_cancel_a_handler_within_its_grace() -> None:
    """A handler that ends within the grace ends by itself."""
    ended: list[bool] = []

    async def brief(context: PartitionContext, events: Events) -> None:
        await context.ownership_lost.wait()
        await asyncio.sleep(3)
        ended.append(True)

    async with stocked() as fleet:
        fleet.hub.publish("0", "a")
        await fleet.start("a", RecordingProcessor(fleet.record, on_events=brief), ownership_lost_grace=4)
        await asyncio.sleep(2)
        await _steal(fleet)
        await asyncio.sleep(20)
        assert ended == [True]


async def test_checkpoint_after_a_lost_lease_is_refused() -> None:
    """Once ownership is lost, checkpoints raise, in the handler and in `close`, and nothing reaches the store."""
    errors: list[type[BaseException]] = []

    async def ask(context: PartitionContext, *_: object) -> None:
        try:
            await context.checkpoint()
        except OwnershipLostError as error:
            errors.append(type(error))

    async def late(context: PartitionContext, events: Events) -> None:
        await context.ownership_lost.wait()
        await ask(context)

    async with stocked() as fleet:
        fleet.hub.publish("0", "a")
        await fleet.start("a", RecordingProcessor(fleet.record, on_events=late, on_close=ask))
        await asyncio.sleep(2)
        await _steal(fleet)
        await asyncio.sleep(20)
        assert errors == [OwnershipLostError] * 2
        assert fleet.stores["a"].written == []


async def test_checkpoint_refused_by_the_store_ends_the_ownership() -> None:
    """A store that refuses a checkpoint ends the ownership at once, and its waiters are notified."""
    errors: list[float] = []
    clock = VirtualClock()

    async with stocked() as fleet:

        async def ask(context: PartitionContext, events: Events) -> None:
            await _steal(fleet)
            try:
                await context.checkpoint()
            except OwnershipLostError:
                errors.append(clock.monotonic())

        fleet.hub.publish("0", "a")
        await fleet.start("a", RecordingProcessor(fleet.record, on_events=ask))
        began = clock.monotonic()
        await asyncio.sleep(2)
        assert [at - began for at in errors] == [pytest.approx(0)]
        assert fleet.owned("a") == set()


async def test_lease_that_ran_out_ends_delivery(clock: VirtualClock) -> None:
    """While the store does not answer renewals, deliveries stop when the lease runs out by our own clock."""
    async with stocked() as fleet:
        await fleet.start("a")
        await asyncio.sleep(1)
        fleet.stores["a"].hang("renew")
        began = clock.monotonic() - 1
        for _ in range(80):
            fleet.hub.publish("0", "x")
            await asyncio.sleep(0.5)
        last = max(delivery.at for delivery in fleet.record.deliveries if delivery.owner_level == 1)
        assert 29 <= last - began <= 30
        assert fleet.record.reasons("a", "0") == [CloseReason.OWNERSHIP_LOST]
        assert [report.why for report in fleet.reported("a", LeaseLost)] == ["it was not renewed in time"]


async def test_lease_is_checked_right_before_every_delivery() -> None:
    """A handler that blocks the loop beyond the lease gets no further batch, though no timer could fire meanwhile."""
    clock = VirtualClock()

    async def block(context: PartitionContext, events: Events) -> None:
        clock.block(31)

    async with stocked() as fleet:
        fleet.hub.publish("0", count=20)
        await fleet.start("a", RecordingProcessor(fleet.record, on_events=block), max_batch_size=5)
        await asyncio.sleep(40)
        first = [delivery for delivery in fleet.record.deliveries if delivery.owner_level == 1]
        assert len(first) == 1
        assert len(fleet.reported("a", LeaseLost)) >= 1


async def test_lease_that_ran_out_in_a_suspension_ends_delivery(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that was suspended for longer than the lease, the next batch is not delivered: the lease is gone."""
    slept = 0.0
    monkeypatch.setattr("eventpump.clock._SUSPENDED", SuspendedTime(lambda: 0.0, lambda: slept))

    async def suspend(context: PartitionContext, events: Events) -> None:
        nonlocal slept
        slept += 31

    async with stocked() as fleet:
        fleet.hub.publish("0", count=20)
        await fleet.start("a", RecordingProcessor(fleet.record, on_events=suspend), max_batch_size=5)
        await asyncio.sleep(40)
        first = [delivery for delivery in fleet.record.deliveries if delivery.owner_level == 1]
        assert len(first) == 1
        assert len(fleet.reported("a", LeaseLost)) >= 1


async def test_lease_that_ran_out_ends_retries() -> None:
    """A failed batch is not tried again once the lease is gone."""

    async def poison(context: PartitionContext, events: Events) -> None:
        raise ValueError("poison")

    async with stocked() as fleet:
        fleet.hub.publish("0", "a")
        processor = RecordingProcessor(fleet.record, on_events=poison)
        await fleet.start("a", processor, handler_retry=RetryOptions(base_delay=0.1, max_delay=0.1))
        await asyncio.sleep(5)
        await _steal(fleet)
        await asyncio.sleep(11)
        count = len(fleet.record.deliveries)
        assert count > 10
        await asyncio.sleep(10)
        assert len(fleet.record.deliveries) == count


# ------------------------------------------------------------------------------------------------- a stolen link


async def test_stolen_link_makes_the_manager_renew_at_once(clock: VirtualClock) -> None:
    """When the new owner's link cuts ours off, the loss is known at once, not at the next renewal."""
    async with stocked() as fleet:
        await fleet.start("a")
        await asyncio.sleep(11)
        lease = await _steal(fleet)
        began = clock.monotonic()
        transport = await _read_from_outside(fleet, lease.epoch)
        await asyncio.sleep(0.01)
        assert fleet.owned("a") == set()
        assert clock.monotonic() - began < 1
        assert fleet.reported("a", OutsideReader) == []
        await transport.aclose()


async def test_stolen_link_with_the_lease_kept_is_reported_and_avoided() -> None:
    """Stolen though the lease is ours: reported, released, and left alone by this host for one lease duration."""
    async with stocked() as fleet:
        fleet.hub.publish("0", "a")
        await fleet.start("a")
        await asyncio.sleep(5)
        transport = await _read_from_outside(fleet, 1000)
        await asyncio.sleep(1)
        assert fleet.owner("0") is None
        assert [report.avoided_for for report in fleet.reported("a", OutsideReader)] == [30]
        assert fleet.reported("a", LeaseLost) == []
        assert fleet.record.reasons("a", "0") == [CloseReason.OWNERSHIP_LOST]
        await transport.aclose()
        fleet.hub.publish("0", "b")
        assert 29 <= await fleet.until(lambda: len(fleet.record.numbers("0")) > 1, 60) <= 40
        assert fleet.record.numbers("0") == [0, 1]


async def _start_at_level_0(fleet: Fleet, name: str = "a", processor: Any = None, **options: Any) -> None:
    """Start a host on a store whose leases have no owner levels, as one that it shares with other libraries has."""
    host = fleet.host(name, processor, **options)
    fleet.stores[name].has_levels = False
    fleet.runs[name] = asyncio.create_task(host.run(), name=f"host {name}")
    await fleet.until(lambda: bool(fleet.hub.owner_levels("0")), 30)


async def test_link_taken_with_the_lease_at_an_equal_level_is_left_to_its_owner() -> None:
    """The new owner's link takes ours; the store is asked before we attach, and says that we do not own it."""
    async with stocked() as fleet:
        await _start_at_level_0(fleet)
        fleet.hub.publish("0", "a")
        await fleet.until(lambda: fleet.record.numbers("0") == [0], 5)
        await _steal(fleet)
        attached = len(fleet.hub.attached)
        transport = await _read_from_outside(fleet, 0)
        fleet.hub.publish("0", "b")
        await asyncio.sleep(9)
        assert fleet.owned("a") == set()
        assert fleet.record.reasons("a", "0") == [CloseReason.OWNERSHIP_LOST]
        assert len(fleet.hub.attached) == attached + 1, "it attached to what is another's"
        assert fleet.record.numbers("0") == [0]
        await transport.aclose()


async def test_link_taken_at_an_equal_level_with_the_lease_kept_is_attached_again() -> None:
    """A reader that does not own the partition loses it again to the owner, which goes on after its checkpoint."""
    async with stocked() as fleet:
        await _start_at_level_0(fleet)
        fleet.hub.publish("0", "a")
        await fleet.until(lambda: fleet.record.numbers("0") == [0], 5)
        transport = await _read_from_outside(fleet, 0)
        fleet.hub.publish("0", "b")
        assert await fleet.until(lambda: fleet.record.numbers("0") == [0, 1], 10) < 5
        assert fleet.owner("0") == "a"
        assert fleet.reported("a", OutsideReader) == []
        assert fleet.reported("a", LeaseLost) == []
        assert len(fleet.reported("a", LinkFailed, "0")) == 1
        assert len(fleet.hub.owner_levels("0")) == 1
        await transport.aclose()


async def test_subscriptions_are_attached_again_together_over_one_link() -> None:
    """Each goes on after its own checkpoint; one whose handler is slow holds the link back until it has returned."""
    gate, got = asyncio.Event(), Record()

    async def slow(context: PartitionContext, events: Events) -> None:
        await gate.wait()
        await context.checkpoint()

    async with stocked() as fleet:
        host = fleet.host("a")
        fleet.stores["a"].has_levels = False
        await host.subscribe("slow", lambda: RecordingProcessor(got, on_events=slow))
        fleet.runs["a"] = asyncio.create_task(host.run())
        await fleet.until(lambda: bool(fleet.hub.owner_levels("0")), 30)
        fleet.hub.publish("0", "a")
        await fleet.until(lambda: (fleet.record.numbers("0"), got.numbers("0")) == ([0], [0]), 5)
        attached = len(fleet.hub.attached)
        transport = await _read_from_outside(fleet, 0)
        fleet.hub.publish("0", "b")
        await asyncio.sleep(3)
        assert len(fleet.hub.attached) == attached + 1
        gate.set()
        await fleet.until(lambda: (fleet.record.numbers("0"), got.numbers("0")) == ([0, 1], [0, 1]), 5)
        assert len(fleet.hub.attached) == attached + 2
        assert fleet.owner("0") == "a"
        await transport.aclose()


async def test_reader_that_takes_the_link_again_and_again_is_left_the_partition() -> None:
    """Two owners do not take turns: a reader that goes on taking it is no member of the group."""
    async with stocked() as fleet:
        await _start_at_level_0(fleet)
        transports = []
        for _ in range(TIMES + 1):
            transports.append(await _read_from_outside(fleet, 0))
            await asyncio.sleep(2)
        assert len(fleet.reported("a", OutsideReader)) == 1
        assert fleet.owner("0") is None
        attached = len(fleet.hub.attached)
        await asyncio.sleep(20)
        assert len(fleet.hub.attached) == attached
        for transport in transports:
            await transport.aclose()


async def test_no_batch_begins_between_a_taken_link_and_the_answer_of_the_store() -> None:
    """What was received before is not delivered either, until it is known whose the partition is."""
    gate = asyncio.Event()

    async def slow(context: PartitionContext, events: Events) -> None:
        await gate.wait()
        await context.checkpoint()

    async with stocked(5) as fleet:
        await _start_at_level_0(fleet, processor=RecordingProcessor(fleet.record, on_events=slow), max_batch_size=1)
        await fleet.until(lambda: len(fleet.record.deliveries) == 1, 5)
        fleet.stores["a"].hang("renew")
        transport = await _read_from_outside(fleet, 0)
        gate.set()
        await asyncio.sleep(3)
        assert len(fleet.record.deliveries) == 1
        fleet.stores["a"].heal()
        await fleet.until(lambda: fleet.record.numbers("0") == [0, 1, 2, 3, 4], 25)
        assert fleet.reported("a", LeaseLost) == []
        await transport.aclose()


async def test_attach_refused_for_a_higher_owner_level_is_not_repeated() -> None:
    """A link that is refused because of a higher owner level is not tried again and again."""
    async with stocked() as fleet:
        transport = await _read_from_outside(fleet, 1000)
        await fleet.start("a")
        await asyncio.sleep(95)
        assert 2 <= len(fleet.reported("a", OutsideReader)) <= 4
        assert fleet.reported("a", LinkFailed) == []
        assert fleet.hub.owner_levels("0") == [1000]
        await transport.aclose()


async def test_stolen_link_ends_delivery_of_what_was_received() -> None:
    """What was received before the link was stolen is not delivered any more, while the store is asked whose it is."""
    async with stocked() as fleet:
        fleet.hub.publish("0", count=200)

        async def slow(context: PartitionContext, events: Events) -> None:
            await asyncio.sleep(2)

        processor = RecordingProcessor(fleet.record, on_events=slow)
        await fleet.start("a", processor, max_batch_size=5)
        await asyncio.sleep(3)
        fleet.stores["a"].hang("renew")
        count = len(fleet.record.deliveries)
        transport = await _read_from_outside(fleet, 1000)
        await asyncio.sleep(15)
        assert len(fleet.record.deliveries) == count
        await transport.aclose()


# ---------------------------------------------------------------------------------------------- a store in trouble


async def test_renewals_continue_while_a_listing_hangs() -> None:
    """A store that answers no listing costs no lease."""
    async with stocked(partitions=3) as fleet:
        await fleet.start("a")
        await asyncio.sleep(5)
        fleet.stores["a"].hang("list")
        await asyncio.sleep(300)
        assert fleet.owned("a") == {"0", "1", "2"}
        assert fleet.reported("a", LeaseLost) == []
        assert fleet.reported("a", StoreFailed)


@pytest.mark.parametrize("trouble", ["hang", "fail"])
async def test_renewal_that_fails_for_one_partition_affects_no_other(trouble: str) -> None:
    """A renewal that hangs or fails for one partition loses that one, and no other."""
    async with stocked(partitions=4) as fleet:
        await fleet.start("a")
        await asyncio.sleep(5)
        if trouble == "hang":
            fleet.stores["a"].hang("renew", "2")
        else:
            fleet.stores["a"].fail("renew", "2", times=float("inf"))
        await asyncio.sleep(50)
        for partition_id in fleet.hub.partition_ids:
            fleet.hub.publish(partition_id, "x")
        await asyncio.sleep(1)
        lost = {report.partition_id for report in fleet.reported("a", LeaseLost)}
        assert lost == {"2"}
        assert fleet.record.numbers("0") == fleet.record.numbers("1") == fleet.record.numbers("3") == [0]


async def test_acquisition_that_hangs_affects_no_other_partition() -> None:
    """While taking one lease hangs, the others are taken and read."""
    async with stocked(partitions=4) as fleet:
        for partition_id in fleet.hub.partition_ids:
            fleet.hub.publish(partition_id, "x")
        fleet.host("a")
        fleet.stores["a"].hang("acquire", "1")
        fleet.runs["a"] = asyncio.create_task(fleet.hosts["a"].run())
        await asyncio.sleep(1)
        assert fleet.owned("a") == {"0", "2", "3"}
        assert fleet.record.numbers("3") == [0]
        fleet.stores["a"].heal()
        await asyncio.sleep(30)
        assert fleet.owned("a") == {"0", "1", "2", "3"}


async def test_renewal_that_fails_for_a_moment_keeps_the_lease() -> None:
    """Failed renewals are reported and tried again soon, while the lease lives."""
    async with stocked() as fleet:
        await fleet.start("a")
        await asyncio.sleep(5)
        fleet.stores["a"].fail("renew", times=4)
        await asyncio.sleep(60)
        assert fleet.owned("a") == {"0"}
        assert fleet.reported("a", LeaseLost) == []
        assert len(fleet.reported("a", StoreFailed, "0")) == 4


@pytest.mark.parametrize(
    "operation", ["ensure", "list", "acquire", "steal", "renew", "release", "read", "write", "scope", "record"]
)
async def test_store_calls_end_before_a_lease_could(
    operation: str, clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once it started, a host gives each call to a silent store up within lease duration minus renew interval."""
    async with stocked(partitions=4) as fleet:
        if operation != "record":  # which is written by the first host only
            await fleet.start("b")
            await asyncio.sleep(5)
        fleet.host("a", renew_interval=8)
        store, took = fleet.stores["a"], []
        before = store.before

        async def timed(called: str, partition_id: str | None) -> BaseException | None:
            began = clock.monotonic()
            try:
                return await before(called, partition_id)
            finally:
                if called == operation:
                    took.append(clock.monotonic() - began)

        monkeypatch.setattr(store, "before", timed)
        if operation != "ensure":
            store.hang(operation)
        fleet.runs["a"] = asyncio.create_task(fleet.hosts["a"].run())
        await asyncio.sleep(5)
        if operation == "ensure":
            store.hang(operation)
        fleet.hub.add_partitions(1)
        for _ in range(20):
            for partition_id in fleet.hub.partition_ids:
                fleet.hub.publish(partition_id, "x")
            await asyncio.sleep(5)
        if "b" in fleet.hosts:
            await fleet.hosts["b"].aclose()
        await asyncio.sleep(50)
        await fleet.hosts["a"].aclose()
        assert 1 < max(took) < 30 - 8


async def test_acquisition_whose_answer_is_lost_is_repeated_at_expiry() -> None:
    """A lease that was acquired without our learning of it is taken again when it runs out."""
    async with stocked() as fleet:
        fleet.hub.publish("0", "x")
        fleet.host("a")
        fleet.stores["a"].fail("acquire", is_after=True)
        fleet.runs["a"] = asyncio.create_task(fleet.hosts["a"].run())
        await asyncio.sleep(42)
        assert fleet.owned("a") == {"0"}
        assert fleet.record.numbers("0") == [0]


async def test_checkpoint_that_cannot_be_read_delays_only_its_partition() -> None:
    """Reading begins only when the checkpoint is known; the wait is reported, and other partitions flow."""
    async with stocked(partitions=2) as fleet:
        for partition_id in "01":
            fleet.hub.publish(partition_id, "x")
        fleet.host("a")
        fleet.stores["a"].fail("read", "0", times=3)
        fleet.runs["a"] = asyncio.create_task(fleet.hosts["a"].run())
        await asyncio.sleep(0.01)
        assert fleet.record.numbers("1") == [0]
        assert fleet.record.numbers("0") == []
        await asyncio.sleep(20)
        assert fleet.record.numbers("0") == [0]
        assert len(fleet.reported("a", StoreFailed, "0")) == 3


async def test_service_without_answers_costs_no_lease() -> None:
    """While the hub does not answer and links cannot be opened, leases are kept, and reading goes on later."""
    async with stocked() as fleet:
        await fleet.start("a")
        await asyncio.sleep(5)
        fleet.hub.hang("hub")
        fleet.hub.refuse(ConnectionLostError("away"), times=float("inf"))
        fleet.hub.detach()
        await asyncio.sleep(200)
        fleet.hub.publish("0", "x")
        fleet.hub.accept()
        fleet.hub.answer("hub")
        await asyncio.sleep(31)
        assert fleet.record.numbers("0") == [0]
        assert fleet.reported("a", LeaseLost) == []


async def test_discovery_that_fails_is_reported_and_repeated() -> None:
    """A hub whose properties cannot be read for a while costs nothing but reports."""
    async with stocked() as fleet:
        await fleet.start("a")
        await asyncio.sleep(5)
        fleet.hub.refuse(ConnectionLostError("away"), operation="hub", times=2)
        fleet.hub.add_partitions(1)
        await asyncio.sleep(35)
        assert len(fleet.reported("a", ServiceFailed)) == 2
        assert fleet.owned("a") == {"0", "1"}


# ------------------------------------------------------------------------------------------------------ user code


@pytest.mark.parametrize("where", ["process_events", "close"])
async def test_partition_whose_old_pump_runs_is_not_started_again(where: str) -> None:
    """At most one pump per partition: one that does not end is reported, and only its end frees the partition here."""
    freed = asyncio.Event()

    async def defy(*_: object) -> None:
        while not freed.is_set():
            try:
                await freed.wait()
            except asyncio.CancelledError:
                continue

    parts: dict[str, Any] = {"on_events": defy} if where == "process_events" else {"on_close": defy}
    async with stocked() as fleet:
        fleet.hub.publish("0", "a")
        await fleet.start("a", RecordingProcessor(fleet.record, **parts), close_timeout=10)
        await asyncio.sleep(5)
        await _steal(fleet)
        await asyncio.sleep(100)
        assert fleet.owner("0") == "thief"
        assert len(fleet.record.opened) == 1
        (overdue,) = fleet.reported("a", PumpOverdue)
        assert overdue.operation == where
        assert overdue.waited == pytest.approx(10)
        freed.set()
        await asyncio.sleep(15)
        assert len(fleet.record.opened) == 2
        assert fleet.owned("a") == {"0"}


async def test_partition_whose_old_pump_runs_may_start_on_another_host() -> None:
    """What one host cannot end, another processes meanwhile."""
    freed = asyncio.Event()

    async def defy(context: PartitionContext, events: Events) -> None:
        while not freed.is_set():
            try:
                await freed.wait()
            except asyncio.CancelledError:
                continue

    async with stocked() as fleet:
        fleet.hub.publish("0", "a", "b")
        await fleet.start("a", RecordingProcessor(fleet.record, on_events=defy), close_timeout=10)
        await asyncio.sleep(5)
        transport = await _read_from_outside(fleet, 1000)
        await asyncio.sleep(0.1)
        await transport.aclose()
        await fleet.start("b")
        await asyncio.sleep(30)
        assert fleet.owned("b") == {"0"}
        assert fleet.record.numbers("0", "b") == [0, 1]
        freed.set()


async def test_renewals_do_not_wait_for_user_code() -> None:
    """Handlers that take forever, in every partition and at every stage, cost no lease."""

    async def forever(*_: object) -> None:
        await asyncio.sleep(1e6)

    async def by_partition(context: PartitionContext) -> None:
        if context.partition_id == "0":
            await forever()

    async with stocked(partitions=3) as fleet:
        for partition_id in "012":
            fleet.hub.publish(partition_id, "x")
        await fleet.start("a", RecordingProcessor(fleet.record, on_open=by_partition, on_events=forever))
        await asyncio.sleep(500)
        assert fleet.owned("a") == {"0", "1", "2"}
        assert fleet.reported("a", LeaseLost) == []


async def test_listings_are_jittered() -> None:
    """Listings come at unequal intervals, none longer than the renew interval."""
    async with stocked() as fleet:
        times: list[float] = []
        host = fleet.host("a")
        store = fleet.stores["a"]
        fleet.runs["a"] = asyncio.create_task(host.run())
        seen = 0
        while len(times) < 20:
            await asyncio.sleep(0.05)
            count = sum(operation == "list" for operation, _ in store.calls)
            if count > seen:
                seen = count
                times.append(asyncio.get_running_loop().time())
        gaps = [later - sooner for sooner, later in pairwise(times)]
        assert max(gaps) <= 10.1
        assert min(gaps) >= 7.9
        assert max(gaps) - min(gaps) > 0.5


async def test_store_that_answers_again_is_reported_once_at_the_level_of_its_failure() -> None:
    """However many partitions and operations had failed; what goes on failing takes no part in it."""
    async with Fleet(FakeHub(partitions=4)) as fleet:
        await fleet.start("a")
        await asyncio.sleep(60)
        assert fleet.reported("a", StoreRestored) == []
        fleet.stores["a"].fail("renew", times=float("inf"))
        fleet.stores["a"].fail("list", times=float("inf"))
        await asyncio.sleep(15)
        assert fleet.reported("a", StoreFailed)
        assert fleet.reported("a", StoreRestored) == []
        fleet.stores["a"].heal()
        await asyncio.sleep(60)
        (restored,) = fleet.reported("a", StoreRestored)
        assert 0 < restored.failed_for < 40
        assert restored.level == StoreFailed.level


async def test_store_that_is_late_at_the_start_is_reported_too() -> None:
    """Trouble, once while it does not last, and its end."""
    async with Fleet(FakeHub(partitions=1)) as fleet:
        fleet.host("a")
        fleet.stores["a"].fail("open", times=3)
        fleet.runs["a"] = asyncio.create_task(fleet.hosts["a"].run())
        await asyncio.sleep(30)
        assert len(fleet.reported("a", StoreFailed)) == 1
        assert len(fleet.reported("a", StoreRestored)) == 1


async def test_lease_with_an_owner_level_of_its_own_is_read_at_that_level() -> None:
    """The level of links, and of the context, is the lease's, which a store may choose apart from the epoch."""
    async with stocked(3) as fleet:
        await fleet.start()
        fleet.stores["a"].level_above_epoch = 41
        await fleet.until(lambda: fleet.checkpoint("0") == 2, 10)
        assert fleet.hub.owner_levels("0") == [42]
        assert [each.owner_level for each in fleet.record.deliveries] == [42] * len(fleet.record.deliveries)
