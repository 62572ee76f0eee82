"""Hosts under each balancer, on virtual time, and what they do about one that misbehaves."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from eventpump.consumer.processor import CloseReason, PartitionContext
from eventpump.core.balancer import LeasePlan
from eventpump.core.balancers import FairBalancer, GreedyBalancer, RingBalancer, StaticAssignment
from eventpump.core.fleet import FleetView
from eventpump.core.lease import LeaseSnapshot
from eventpump.errors import ConfigurationError, StoreError
from eventpump.eventhubs.events import ReceivedEvent
from eventpump.reports import BalancerFailed, LeaseReleased, LeaseTaken, UnexpectedFailure
from tests.support.fleet import Fleet, RecordingProcessor, stocked
from tests.support.seeds import seeds


def _counts(fleet: Fleet) -> dict[str, int]:
    return {name: len(fleet.owned(name)) for name in fleet.hosts}


def _all_owned(fleet: Fleet, partitions: int) -> Callable[[], bool]:
    return lambda: sum(_counts(fleet).values()) == partitions


class _Balancer:
    """A balancer of the user's, by a function."""

    def __init__(self, plan: Callable[[FleetView], Any]) -> None:
        self.views: list[FleetView] = []
        self._plan = plan

    def plan(self, view: FleetView) -> LeasePlan:
        self.views.append(view)
        return self._plan(view)  # type: ignore[no-any-return]  # whatever a test has it return


# ------------------------------------------------------------------------------------------- every balancer


async def test_weights_share_partitions_in_proportion() -> None:
    """A host's weight is part of its name in the leases, by which the others know it."""
    async with stocked(partitions=12) as fleet:
        light = await fleet.start("light")
        heavy = await fleet.start("heavy", weight=3)
        await fleet.until(lambda: _counts(fleet) == {"light": 3, "heavy": 9}, 60)
        assert (light.owner_id, heavy.owner_id) == ("light", "heavy;weight=3")
        assert {row.owner for row in fleet.leases.leases(fleet.scope).values()} == {"light", "heavy;weight=3"}


async def test_greedy_standby_takes_over_when_the_owner_ends() -> None:
    """Until then it takes nothing."""
    async with stocked(partitions=4) as fleet:
        host = await fleet.start("a", balancer=GreedyBalancer())
        await fleet.until(_all_owned(fleet, 4), 30)
        await fleet.start("b", balancer=GreedyBalancer())
        await asyncio.sleep(120)
        assert _counts(fleet) == {"a": 4, "b": 0}
        await host.aclose()
        await fleet.until(lambda: _counts(fleet)["b"] == 4, 30)


async def test_ring_gives_a_returning_host_its_partitions_back() -> None:
    """A host under its former name takes the same partitions, and the others keep theirs."""
    async with stocked(partitions=16) as fleet:
        for name in "abc":
            await fleet.start(name, balancer=RingBalancer())
        await fleet.until(_all_owned(fleet, 16), 60)
        await asyncio.sleep(60)
        before = {name: fleet.owned(name) for name in "abc"}
        assert all(before.values())
        await fleet.hosts["b"].aclose()
        await fleet.until(lambda: len(fleet.owned("a") | fleet.owned("c")) == 16, 60)
        assert before["a"] <= fleet.owned("a")
        await fleet.start("b", balancer=RingBalancer())
        await fleet.until(lambda: {name: fleet.owned(name) for name in "abc"} == before, 60)


async def _moves_of_a_deployment(maturity: float) -> int:
    """Return how many leases are taken while each of three hosts is replaced."""
    async with stocked(partitions=12, seed=4) as fleet:
        for name in "abc":
            await fleet.start(name, balancer=FairBalancer(maturity=maturity))
        await fleet.until(lambda: sorted(_counts(fleet).values()) == [4, 4, 4], 200)
        await asyncio.sleep(30)
        before = sum(len(fleet.reported(name, LeaseTaken)) for name in fleet.hosts)
        for old, new in zip("abc", "xyz", strict=True):
            await fleet.hosts[old].aclose()
            await asyncio.sleep(12)
            await fleet.start(new, balancer=FairBalancer(maturity=maturity))
            await asyncio.sleep(25)
        await fleet.until(lambda: [_counts(fleet)[name] for name in "xyz"] == [4, 4, 4], 200)
        return sum(len(fleet.reported(name, LeaseTaken)) for name in fleet.hosts) - before


async def test_rolling_deployment_with_maturity_moves_partitions_once() -> None:
    """From each host that ends to the one that replaces it; without maturity, most move twice."""
    assert await _moves_of_a_deployment(60.0) == 12
    assert await _moves_of_a_deployment(0.0) > 18


# ---------------------------------------------------------------------------------------------------- static


async def test_static_hosts_release_what_is_not_theirs_with_a_checkpoint() -> None:
    """The batch in hand is finished and its checkpoint written before another host takes the partition."""
    finished: list[tuple[str, float]] = []

    async def slowly(context: PartitionContext, events: Sequence[ReceivedEvent]) -> None:
        await asyncio.sleep(12)
        await context.checkpoint()
        finished.append((context.owner_id, asyncio.get_running_loop().time()))

    async with stocked(partitions=4) as fleet:
        sets = [StaticAssignment(ordinal=0, of=1)]
        slow = RecordingProcessor(fleet.record, on_events=slowly)
        await fleet.start("a", slow, balancer=_Balancer(lambda view: sets[-1].plan(view)))
        await fleet.until(_all_owned(fleet, 4), 30)
        await fleet.start("b", balancer=StaticAssignment(["1", "2", "3"]))
        fleet.hub.publish("1", *(b"x" for _ in range(5)))
        await fleet.until(lambda: bool(fleet.record.deliveries), 30)
        sets.append(StaticAssignment(["0"]))
        # Another batch waits behind the one in hand: it is the next host's.
        fleet.hub.publish("1", *(b"y" for _ in range(5)))
        await fleet.until(lambda: _counts(fleet) == {"a": 1, "b": 3}, 60)
        await fleet.until(lambda: len(fleet.record.numbers("1")) >= 10, 60)
        assert fleet.record.numbers("1") == list(range(10))
        assert fleet.record.numbers("1", "a") == [0, 1, 2, 3, 4]
        (delivery,) = [each for each in fleet.record.deliveries if each.host == "b"]
        assert finished[0][0] == "a"
        assert delivery.at >= finished[0][1]
        assert len(fleet.reported("a", LeaseReleased)) == 3
        assert not [each for each in fleet.reported("b", LeaseTaken) if each.stolen_from]
        assert fleet.record.reasons("a", "1") == [CloseReason.SHUTDOWN]


async def test_static_assignment_of_an_unknown_partition_ends_the_host() -> None:
    """The hub's partitions are known only then."""
    async with stocked(partitions=2) as fleet:
        host = fleet.host("a", balancer=StaticAssignment(["0", "7"]))
        with pytest.raises(ConfigurationError, match="no partition 7"):
            await host.run()


@seeds(1, of=3)
async def test_static_rollout_from_5_to_6_reads_no_partition_twice_in_an_epoch(seed: int) -> None:
    """Hosts of both configurations live at once, some die; every event is processed, by one host per epoch."""
    rng = random.Random(seed)
    async with stocked(partitions=16, seed=seed) as fleet:
        for ordinal in range(5):
            await fleet.start(f"old-{ordinal}", balancer=StaticAssignment(ordinal=ordinal, of=5))
        await fleet.until(_all_owned(fleet, 16), 60)
        sent: Counter[str] = Counter()

        def publish() -> None:
            for each in range(16):
                fleet.hub.publish(str(each), b"x")
                sent[str(each)] += 1

        steps = [("end", f"old-{each}") for each in range(5)] + [("start", str(each)) for each in range(6)]
        rng.shuffle(steps)
        for kind, name in steps:
            publish()
            if kind == "start":
                await fleet.start(f"new-{name}", balancer=StaticAssignment(ordinal=int(name), of=6))
            elif rng.random() < 0.5:
                await fleet.hosts[name].aclose()
            else:
                # The store fails, so that the leases expire.
                fleet.stores[name].fail("release", times=float("inf"))
                await fleet.hosts[name].aclose(deadline=1.0)
            await asyncio.sleep(rng.uniform(0, 30))
        publish()
        await fleet.until(lambda: [len(fleet.owned(f"new-{each}")) for each in range(6)] == [3, 3, 3, 3, 2, 2], 200)
        await fleet.until(
            lambda: all(set(range(sent[each])) <= set(fleet.record.numbers(each)) for each in sent), within=60
        )
        for ordinal in range(6):
            assert {int(each) % 6 for each in fleet.owned(f"new-{ordinal}")} == {ordinal}
        readers: dict[tuple[str, int], set[str]] = {}
        for delivery in fleet.record.deliveries:
            readers.setdefault((delivery.partition_id, delivery.owner_level), set()).add(delivery.host)
        assert all(len(hosts) == 1 for hosts in readers.values())
        for name in fleet.hosts:
            assert not [each for each in fleet.reported(name, LeaseTaken) if each.stolen_from]


# ------------------------------------------------------------------------------------------------- nonsense


class _Interrupt(BaseException):
    """An exception that is no `Exception`."""


def _raises(error: BaseException) -> Callable[[FleetView], LeasePlan]:
    def plan(view: FleetView) -> LeasePlan:
        raise error

    return plan


async def _later(view: FleetView) -> LeasePlan:
    return LeasePlan()


def _forged(view: FleetView) -> LeasePlan:
    return LeasePlan(steal=(LeaseSnapshot("0", "b", is_held=True, token="memory-1"),))


NONSENSE: dict[str, tuple[Callable[[FleetView], Any], str]] = {
    "raises": (_raises(ValueError("broken")), "raised ValueError: broken"),
    "raises no Exception": (_raises(_Interrupt("now")), "raised _Interrupt"),
    "raises a cancellation": (_raises(asyncio.CancelledError()), "raised CancelledError"),
    "is a coroutine function": (_later, "returned coroutine"),
    "returns None": (lambda _: None, "returned NoneType"),
    "unknown partition": (lambda _: LeasePlan(acquire=("9",)), "no lease of a partition '9'"),
    "partition of a live owner": (lambda _: LeasePlan(acquire=("0", "1")), "belongs to b; only `steal`"),
    "the same twice": (lambda v: LeasePlan(steal=(v.leases[0],) * 2), "more than once"),
    "a forged lease": (_forged, "not a lease of the view"),
    "releases another's": (lambda _: LeasePlan(release=("0",)), "does not hold partition 0"),
    "its lists are none": (lambda _: LeasePlan(acquire=7, steal=None), "`acquire` is int"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", NONSENSE)
async def test_balancer_that_returns_nonsense_is_reported_and_breaks_nothing(name: str) -> None:
    """The report names the problem, once; the fence holds, and the host serves what it has."""
    plan, problem = NONSENSE[name]
    balancer = _Balancer(plan)
    async with stocked(partitions=2) as fleet:
        await fleet.start("b", balancer=GreedyBalancer())
        await fleet.until(_all_owned(fleet, 2), 30)
        epochs = {each: row.epoch for each, row in fleet.leases.leases(fleet.scope).items()}
        await fleet.start("a", balancer=balancer)
        await fleet.until(lambda: len(balancer.views) > 3, 120)
        (report,) = (
            fleet.reported("a", BalancerFailed) if name != "the same twice" else fleet.reported("a", BalancerFailed)[:1]
        )
        assert problem in report.describe()
        assert fleet.reported("a", UnexpectedFailure) == []
        assert not fleet.runs["a"].done()
        if name != "the same twice":
            assert _counts(fleet) == {"b": 2, "a": 0}
            assert {each: row.epoch for each, row in fleet.leases.leases(fleet.scope).items()} == epochs


async def test_balancer_may_raise_a_configuration_error_to_end_its_host() -> None:
    """As `StaticAssignment` does: the host cannot work, and says why."""
    async with stocked() as fleet:
        host = fleet.host("a", balancer=_Balancer(_raises(ConfigurationError("zone", "must be one of east, west"))))
        with pytest.raises(ConfigurationError, match="zone"):
            await host.run()


async def test_random_balancers_break_no_fence() -> None:
    """Hosts that take, steal and release at random read each epoch of a partition from one place, and lose nothing."""

    def at_random(view: FleetView) -> LeasePlan:
        def some(ids: list[Any]) -> tuple[Any, ...]:
            return tuple(each for each in ids if view.rng.random() < 0.3)

        if view.rng.random() < 0.2:
            raise StoreError("plan", "at random")
        everything = [each.partition_id for each in view.leases] + ["x"]
        return LeasePlan(some(everything), some([*view.leases]), some([*view.leases]), some(everything))

    async with stocked(partitions=6) as fleet:
        for name in "abc":
            await fleet.start(name, balancer=_Balancer(at_random))
        for _ in range(20):
            for each in range(6):
                fleet.hub.publish(str(each), b"x")
            await asyncio.sleep(9)
        for name in "abc":
            await fleet.hosts[name].aclose()
        await fleet.start("z")
        await fleet.until(lambda: all(set(range(20)) <= set(fleet.record.numbers(str(e))) for e in range(6)), 120)
        readers: dict[tuple[str, int], set[str]] = {}
        for delivery in fleet.record.deliveries:
            readers.setdefault((delivery.partition_id, delivery.owner_level), set()).add(delivery.host)
        assert all(len(hosts) == 1 for hosts in readers.values())
        assert len(readers) > 30
        assert {"a", "b", "c"} <= {host for hosts in readers.values() for host in hosts}


async def test_view_has_what_a_balancer_may_want() -> None:
    """Ages by the host's clock, owners, epochs, what is held and what is to be avoided."""
    fair = FairBalancer()
    balancer = _Balancer(fair.plan)
    async with stocked(partitions=2) as fleet:
        await fleet.start("a", balancer=balancer)
        await fleet.until(lambda: len(balancer.views) >= 5, 120)
        first, last = balancer.views[0], balancer.views[-1]
        assert (first.age, set(first.ages.values()), first.held, first.hosts) == (0.0, {0.0}, frozenset(), {})
        assert last.held == {"0", "1"} == last.partition_ids
        assert [(each.owner, each.epoch) for each in last.leases] == [("a", 1), ("a", 1)]
        assert last.age > 20
        assert 0 < last.ages["0"] < last.age
        assert 0 < last.hosts["a"] < last.age


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"weight": -1.0}, "weight"),
        ({"weight": 0}, "weight"),
        ({"weight": 1001}, "weight"),
        ({"weight": "heavy"}, "weight"),
        ({"weight": 2, "owner_id": "a;weight=3"}, "owner_id"),
        ({"balancer": FairBalancer}, "balancer"),
        ({"balancer": "greedy"}, "balancer"),
        ({"balancer": None}, "balancer"),
    ],
)
async def test_host_refuses_a_wrong_balancer_or_weight(options: dict[str, Any], field: str) -> None:
    """At construction, with an error that names the option."""
    async with stocked() as fleet:
        with pytest.raises(ConfigurationError) as caught:
            fleet.host("a", **options)
        assert caught.value.field == field
