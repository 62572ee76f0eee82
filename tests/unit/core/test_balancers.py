"""The balancers to choose from: their arguments, single plans, and fleets under them, simulated."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eventpump.core.balancer import LeasePlan
from eventpump.core.balancers import FairBalancer, GreedyBalancer, RingBalancer, StaticAssignment, check_balancer
from eventpump.core.fleet import FleetView, PartitionBalancer
from eventpump.core.lease import LeaseSnapshot
from eventpump.core.ring import HashRing
from eventpump.core.weights import weight_of, with_weight
from eventpump.errors import ConfigurationError
from tests.unit.core.balancing import CHANGES, KINDS, Fleet, Host, Timing, figures

ME = "me"


def view_of(*owners: str | None, held: frozenset[str] | None = None, **given: Any) -> FleetView:
    """Return what a host sees: the owners of partitions 0, 1, ...; None is free."""
    leases = tuple(
        LeaseSnapshot(str(number), owner, is_held=owner is not None, token=owner) for number, owner in enumerate(owners)
    )
    own = frozenset(lease.partition_id for lease in leases if lease.owner == ME) if held is None else held
    ids = frozenset(lease.partition_id for lease in leases)
    return FleetView(ME, leases, ids, own, rng=random.Random(1), **given)


# ------------------------------------------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: StaticAssignment(ordinal=5, of=5), "ordinal"),
        (lambda: StaticAssignment(ordinal=-1, of=5), "ordinal"),
        (lambda: StaticAssignment(ordinal=True, of=5), "ordinal"),
        (lambda: StaticAssignment(ordinal=0, of=0), "of"),
        (lambda: StaticAssignment(ordinal=0, of=2.0), "of"),  # type: ignore[arg-type]  # wrong on purpose
        (lambda: StaticAssignment(ordinal=0), "ordinal"),
        (lambda: StaticAssignment(), "ordinal"),
        (lambda: StaticAssignment(["0"], ordinal=0, of=2), "partition_ids"),
        (lambda: StaticAssignment([]), "partition_ids"),
        (lambda: StaticAssignment("012"), "partition_ids"),
        (lambda: StaticAssignment(["0", "1", "0"]), "partition_ids"),
        (lambda: StaticAssignment([0]), "partition_ids"),  # type: ignore[list-item]  # wrong on purpose
        (lambda: StaticAssignment(7), "partition_ids"),  # type: ignore[arg-type]  # wrong on purpose
        (lambda: FairBalancer(maturity=-1), "maturity"),
        (lambda: FairBalancer(maturity=math.nan), "maturity"),
        (lambda: FairBalancer(maturity=3601), "maturity"),
        (lambda: FairBalancer(maturity="60"), "maturity"),  # type: ignore[arg-type]  # wrong on purpose
        (lambda: GreedyBalancer(limit=0), "limit"),
        (lambda: GreedyBalancer(limit=1.5), "limit"),  # type: ignore[arg-type]  # wrong on purpose
        (lambda: RingBalancer(virtual_nodes=0), "virtual_nodes"),
        (lambda: RingBalancer(virtual_nodes=10_001), "virtual_nodes"),
        (lambda: RingBalancer(patience=0), "patience"),
    ],
)
def test_balancers_refuse_wrong_arguments(make: Callable[[], object], field: str) -> None:
    """At construction, with an error that names the argument."""
    with pytest.raises(ConfigurationError) as caught:
        make()
    assert caught.value.field == field


def test_check_balancer_refuses_a_class_and_what_cannot_plan() -> None:
    """A class given for an object is the likely mistake."""
    for wrong in (FairBalancer, object(), None, "greedy"):
        with pytest.raises(ValueError, match="must be a balancer"):
            check_balancer(wrong)
    for right in (FairBalancer(), GreedyBalancer(), RingBalancer(), StaticAssignment(ordinal=0, of=1)):
        check_balancer(right)
        assert type(right).__name__ in repr(right)


# ---------------------------------------------------------------------------------------------- single plans


def test_static_plan_takes_free_leases_of_its_set_and_releases_others() -> None:
    """A live owner's lease of the set is left alone, a free one beside the set too."""
    plan = StaticAssignment(ordinal=1, of=2).plan(view_of(ME, None, None, "a", ME, ME))
    assert plan == LeasePlan(acquire=("1",), release=("0", "4"))
    assert StaticAssignment(["2", "3"]).plan(view_of(ME, None, None, "a")) == LeasePlan(acquire=("2",), release=("0",))


def test_static_plan_with_an_unknown_id_is_refused_once_partitions_are_known() -> None:
    """A lease that is not created yet is no reason: the hub's partitions are."""
    balancer = StaticAssignment(["0", "9"])
    with pytest.raises(ConfigurationError, match="no partition 9"):
        balancer.plan(view_of(None))
    listing = (LeaseSnapshot("0", None, is_held=False),)
    assert balancer.plan(FleetView(ME, listing, frozenset())).acquire == ("0",)
    assert balancer.plan(FleetView(ME, listing, frozenset({"0", "9"}))).acquire == ("0",)


def test_static_sets_of_all_ordinals_part_any_ids() -> None:
    """Each partition is in the set of one ordinal, also where ids are no numbers."""
    ids = [*map(str, range(30)), "x", "partition-7", "²", "-1"]
    leases = tuple(LeaseSnapshot(each, None, is_held=False) for each in ids)
    taken = [
        each
        for ordinal in range(7)
        for each in StaticAssignment(ordinal=ordinal, of=7).plan(FleetView(ME, leases)).acquire
    ]
    assert sorted(taken) == sorted(ids)


def test_greedy_plan_takes_what_is_free_to_its_limit() -> None:
    """What it holds or takes counts; a live owner's is never taken."""
    assert set(GreedyBalancer().plan(view_of(None, "a", None, ME)).acquire) == {"0", "2"}
    assert len(GreedyBalancer(limit=3).plan(view_of(None, "a", None, None, ME)).acquire) == 2
    assert GreedyBalancer(limit=1).plan(view_of(None, "a", held=frozenset({"1"}))) == LeasePlan()
    assert GreedyBalancer().plan(view_of(None, None, taking=frozenset("0"), avoid=frozenset("1"))) == LeasePlan()


def test_ring_plan_takes_what_the_ring_gives_the_host_after_a_while_more() -> None:
    """A free partition of another host is taken once that host was waited for."""
    balancer = RingBalancer(patience=60)
    free = [str(each) for each in range(40)]
    listing = (*(LeaseSnapshot(each, None, is_held=False) for each in free), LeaseSnapshot("a", "a", is_held=True))
    ring = HashRing({ME: 64, "a": 64})
    mine = {each for each in free if ring.place_of(each) == ME}
    assert 0 < len(mine) < 40
    assert set(balancer.plan(FleetView(ME, listing, ages=dict.fromkeys(free, 59.0))).acquire) == mine
    assert set(balancer.plan(FleetView(ME, listing, ages=dict.fromkeys(free, 60.0))).acquire) == set(free)


def test_young_host_steals_nothing_before_maturity() -> None:
    """A new host takes free leases only; later, or without maturity, its share."""
    seen = view_of("a", "a", "a", "a", "b", "b", "b", "b", None, age=59.0)
    plan = FairBalancer(maturity=60).plan(seen)
    assert (len(plan.acquire), plan.steal, plan.spare) == (1, (), ())
    crowded = view_of("a", "a", "a", "a", "b", "b", "b", "b", age=60.0)
    assert FairBalancer(maturity=60).plan(crowded).steal
    assert FairBalancer().plan(view_of("a", "a", "a", "a", age=0.0)).steal


def test_mature_host_leaves_the_share_of_one_that_left_to_its_replacement() -> None:
    """Until the maturity is over, or another host has come."""
    seen: dict[str, Any] = {"departed": {"gone": 30.0}, "hosts": {ME: math.inf, "a": math.inf}}
    listing = (ME, ME, "a", "a", None, None)
    balancer = FairBalancer(maturity=60)
    assert balancer.plan(view_of(*listing, **seen)).acquire == ()
    assert len(balancer.plan(view_of(*listing, **{**seen, "departed": {"gone": 60.0}})).acquire) == 1
    assert len(FairBalancer().plan(view_of(*listing, **seen)).acquire) == 1
    arrived = {**seen, "hosts": {ME: math.inf, "a": 20.0}}
    assert len(balancer.plan(view_of(*listing, **arrived)).acquire) == 1


@given(st.lists(st.sampled_from([None, "a", "b", "c", ME]), min_size=1, max_size=12), st.integers(0, 3), st.data())
def test_plan_of_every_balancer_can_be_carried_out(owners: list[str | None], kind: int, data: st.DataObject) -> None:
    """Nothing that is held, being taken or to be avoided is taken, and nothing is named twice."""
    ids = [str(each) for each in range(len(owners))]
    held = frozenset(data.draw(st.sets(st.sampled_from(ids))))
    taking = frozenset(data.draw(st.sets(st.sampled_from(ids)))) - held
    avoid = frozenset(data.draw(st.sets(st.sampled_from(ids))))
    balancer = (FairBalancer(maturity=30), GreedyBalancer(), RingBalancer(), StaticAssignment(ordinal=0, of=2))[kind]
    view = view_of(*owners, held=held, taking=taking, avoid=avoid, age=data.draw(st.sampled_from([0.0, 99.0])))
    plan = balancer.plan(view)
    named = [*plan.acquire, *(lease.partition_id for lease in (*plan.steal, *plan.spare))]
    assert len(set(named)) == len(named)
    assert (held | taking | avoid).isdisjoint(named)
    assert held.issuperset(plan.release)
    if kind in (1, 3):
        assert plan.steal == plan.spare == ()


# --------------------------------------------------------------------------------------------------- weights


@given(st.lists(st.sampled_from([0.5, 1, 2, 3.25, 10]), min_size=1, max_size=8), st.integers(1, 60), st.integers(0, 99))
@settings(max_examples=40)
def test_fair_shares_are_in_proportion_to_weights(weights: list[float], partitions: int, seed: int) -> None:
    """At rest each host has its share, rounded down or up, however hosts come."""
    fleet = Fleet(partitions, Timing.FRESH, seed, lambda _: FairBalancer())
    for weight in weights:
        fleet.join(1, suffix=with_weight("", weight))
        fleet.run(2)
    fleet.run(6)
    total = sum(weight_of(name) for name, count in fleet.counts().items() if count)
    for name, count in fleet.counts().items():
        # One without a partition is seen by none of the others.
        exact = partitions * weight_of(name) / (total + (0 if count else weight_of(name)))
        assert math.floor(exact) <= count <= math.ceil(exact), fleet.counts()
    assert sum(fleet.counts().values()) == partitions
    assert fleet.run(3) == 0


def test_ring_gives_more_to_a_heavier_host() -> None:
    """A weight multiplies the virtual nodes."""
    fleet = Fleet(400, Timing.FRESH, 1, lambda _: RingBalancer(virtual_nodes=100))
    fleet.join(3)
    fleet.join(1, suffix=";weight=3")
    fleet.run(4)
    counts = fleet.counts()
    heavy = next(count for name, count in counts.items() if weight_of(name) == 3000)
    assert 150 <= heavy <= 250


# ---------------------------------------------------------------------------------------------------- fleets

_KINDS: dict[str, Callable[[int], PartitionBalancer]] = {
    "fair": lambda _: FairBalancer(),
    "mature": lambda _: FairBalancer(maturity=40),
    "greedy": lambda _: GreedyBalancer(),
    "ring": lambda _: RingBalancer(virtual_nodes=16),
}


@given(
    st.sampled_from(sorted(_KINDS)),
    st.sampled_from(Timing),
    st.integers(1, 24),
    st.lists(st.tuples(st.sampled_from(["join", "crash", "leave"]), st.integers(1, 5)), min_size=1, max_size=5),
    st.integers(0, 10_000),
)
@settings(max_examples=60)
def test_fleet_of_each_balancer_rests_with_every_partition_owned(
    kind: str, timing: Timing, partitions: int, history: list[tuple[str, int]], seed: int
) -> None:
    """Whatever hosts join, stop and die, a fleet that is left alone comes to rest as its balancer promises."""
    fleet = Fleet(partitions, timing, seed, _KINDS[kind])
    fleet.join(1)
    for event, count in history:
        if event == "join":
            fleet.join(count)
        elif event == "crash":
            fleet.crash(min(count, len(fleet.hosts) - 1))
        else:
            for name in sorted(fleet.hosts)[: min(count, len(fleet.hosts) - 1)]:
                fleet.leave(name)
        fleet.run(1)
    fleet.run(30 if timing is Timing.SLOW_STORE else 20)
    assert fleet.problems == []
    assert sum(fleet.counts().values()) == partitions
    assert fleet.run(3) == 0
    if kind in ("fair", "mature"):
        assert fleet.is_even()
    elif kind == "greedy":
        assert fleet.steals == 0
    else:
        # A host that the ring gives nothing is seen by none of the others, and makes no difference to them.
        ring = HashRing({name: 16 for name, count in fleet.counts().items() if count})
        assert all(lease.owner == ring.place_of(each) for each, lease in fleet.leases.items())


class _Watched(Fleet):
    """A fleet that refuses that a lease is taken while its owner lives."""

    def give(self, partition_id: str, name: str) -> None:
        owner = self.leases[partition_id].owner
        assert not (self.leases[partition_id].is_held and owner in self.hosts), f"{partition_id} taken from {owner}"
        super().give(partition_id, name)


@given(st.sampled_from(Timing), st.integers(1, 24), st.integers(1, 6), st.integers(1, 6), st.integers(0, 10_000))
@settings(max_examples=60)
def test_static_rollout_takes_nothing_from_a_live_owner_and_ends_with_all_owned(
    timing: Timing, partitions: int, before: int, after: int, seed: int
) -> None:
    """Hosts of two configurations live at once, come and end in any order; in the end each partition has its owner."""
    rng = random.Random(seed)
    fleet = _Watched(partitions, timing, seed, lambda _: StaticAssignment(ordinal=0, of=1))
    for ordinal in range(before):
        fleet.join(1, balancer=StaticAssignment(ordinal=ordinal, of=before))
    fleet.run(4)
    assert sum(fleet.counts().values()) == partitions
    steps = [*(("leave", name) for name in fleet.hosts), *(("join", str(each)) for each in range(after))]
    rng.shuffle(steps)
    for step, what in steps:
        if step == "leave":
            (fleet.die if rng.random() < 0.3 else fleet.leave)(what)
        else:
            fleet.join(1, balancer=StaticAssignment(ordinal=int(what), of=after))
        fleet.run(rng.randrange(3) if fleet.hosts else 0)
    fleet.run(12)
    assert sum(fleet.counts().values()) == partitions
    hosts: list[Host] = list(fleet.hosts.values())
    assert all(int(each) % after == ordinal for ordinal, host in _ordinals(hosts) for each in host.held)
    assert fleet.run(3) == 0
    assert fleet.problems == []


def _ordinals(hosts: list[Host]) -> list[tuple[int, Host]]:
    return [(int(repr(host.balancer).split("ordinal=")[1].split(",")[0]), host) for host in hosts]


def test_returning_host_gets_its_partitions_of_the_ring_back() -> None:
    """The same names have the same partitions, whatever happened between."""
    fleet = Fleet(60, Timing.FRESH, 3, _KINDS["ring"])
    fleet.join(5)
    fleet.run(3)
    before = {name: set(host.held) for name, host in fleet.hosts.items()}
    name = max(before, key=lambda each: len(before[each]))
    host = fleet.hosts[name]
    fleet.leave(name)
    assert fleet.run(3) == len(before[name])
    host.held.clear()
    fleet.hosts[name] = host
    assert fleet.run(3) == len(before[name])
    assert {name: host.held for name, host in fleet.hosts.items()} == before


def test_maturity_spares_a_rolling_deployment_its_second_moves() -> None:
    """Each partition moves about once, and without it twice; once it has aged, a loss is made up for all the same."""
    with_it = figures(CHANGES["a rolling deployment of 10"], KINDS["`FairBalancer(maturity=60)`"], 1)
    without = figures(CHANGES["a rolling deployment of 10"], KINDS["`FairBalancer()`"], 1)
    assert with_it.moves <= 130
    assert without.moves >= 180
    assert (with_it.least, with_it.most) == (10, 10)
    lost = figures(CHANGES["1 of 10 dies"], KINDS["`FairBalancer(maturity=60)`"], 1)
    assert (lost.moves, lost.least, lost.most) == (10, 11, 12)
    assert lost.cycles <= 8
