"""Planning leases: single plans, and whole fleets, simulated."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventpump.core.balancer import LeasePlan, plan_leases
from eventpump.core.lease import LeaseSnapshot
from tests.unit.core.balancing import Fleet, Timing

ME = "me"


def leases(*owners: str | None) -> list[LeaseSnapshot]:
    """List leases with these owners: None is free, a name in brackets died under it, `?` is held without a name."""
    listing = []
    for number, owner in enumerate(owners):
        if owner is not None and owner.startswith("("):
            lease = LeaseSnapshot(str(number), owner.strip("()"), is_held=False)
        elif owner == "?":
            lease = LeaseSnapshot(str(number), None, is_held=True, token=f"t{number}")
        else:
            lease = LeaseSnapshot(str(number), owner, is_held=owner is not None, token=f"t{number}")
        listing.append(lease)
    return listing


def plan(
    listing: Sequence[LeaseSnapshot],
    *,
    host: str = ME,
    held: Collection[str] | None = None,
    taking: Collection[str] = (),
    avoid: Collection[str] = (),
    seed: int = 0,
) -> LeasePlan:
    if held is None:
        held = {lease.partition_id for lease in listing if lease.is_held and lease.owner == host}
    return plan_leases(listing, host=host, held=held, taking=taking, avoid=avoid, rng=random.Random(seed))


def ids(snapshots: Sequence[LeaseSnapshot]) -> set[str]:
    return {snapshot.partition_id for snapshot in snapshots}


names = st.sampled_from(["a", "b", "c", "d", ME])
snapshots = st.lists(
    st.one_of(st.none(), st.just("?"), names, names, names.map("({})".format)), min_size=1, max_size=40
).map(lambda owners: leases(*owners))


# ---------------------------------------------------------------------------------------------- single plans


def test_plan_of_a_lone_host_takes_every_free_lease() -> None:
    """A host that sees no other acquires every lease, in one plan."""
    result = plan(leases(*[None] * 8))
    assert set(result.acquire) == {str(n) for n in range(8)}
    assert result.steal == ()


def test_plans_of_hosts_without_peers_try_leases_in_different_orders() -> None:
    """Two hosts that start at once do not try the same leases one after the other."""
    listing = leases(*[None] * 20)
    assert plan(listing, seed=1).acquire != plan(listing, seed=2).acquire


def test_plan_prefers_a_free_lease_to_a_stolen_one() -> None:
    """A host that lacks two leases, and finds two free, steals none."""
    result = plan(leases("a", "a", "a", "b", "b", "b", None, None))
    assert set(result.acquire) == {"6", "7"}
    assert result.steal == ()


@pytest.mark.parametrize("hosts", [1, 2, 7, 99])
def test_plan_of_a_joiner_takes_its_whole_deficit_in_one_cycle(hosts: int) -> None:
    """One plan brings a joiner to its share, spread over those above theirs, and takes no host below it."""
    fleet = Fleet(1000, Timing.FRESH, seed=hosts)
    fleet.join(hosts)
    fleet.give_evenly()
    before = fleet.counts()
    fleet.join(1)
    joiner = next(name for name in fleet.hosts if name not in before)
    result = fleet.plan(joiner)
    share = 1000 // (hosts + 1)
    assert result.acquire == ()
    assert len(set(result.steal)) == share
    lost = Counter(lease.owner for lease in result.steal)
    left = [before[name] - lost[name] for name in before]
    assert share <= min(left)
    assert max(left) <= share + 1


@pytest.mark.parametrize(
    ("owners", "why"),
    [
        (["a", "a", ME], "one more is not too many"),
        (["a", "b", "c"], "more hosts than partitions"),
        (["a", "a", "b", "b", ME, ME], "even"),
        (["a", "a", "b", "?", "?"], "what is held without a name is on its way to a host"),
    ],
)
def test_plan_takes_nothing_where_nothing_is_gained(owners: list[str], why: str) -> None:
    """A plan moves no lease unless both hosts come closer to even."""
    result = plan(leases(*owners))
    assert (result.acquire, result.steal, result.spare) == ((), (), ()), why


def test_plan_of_a_host_above_its_share_is_empty() -> None:
    """Those below take it; the plan of the host is empty."""
    result = plan(leases(ME, ME, ME, ME, "a"))
    assert result == LeasePlan()


def test_plan_of_a_restarted_host_leaves_its_living_leases_alone() -> None:
    """Leases alive under the host's own name, but not held, count as its own; it does not steal them."""
    result = plan(leases(ME, ME, "a", "a"), held=set())
    assert result == LeasePlan()


def test_plan_of_a_restarted_host_takes_its_dead_leases_first() -> None:
    """Of the leases that died, a host takes those that died under its name."""
    for seed in range(10):
        result = plan(leases("a", "(a)", "(me)", "(b)", "(me)", "a"), held=set(), seed=seed)
        assert result.acquire[:2] in (("2", "4"), ("4", "2"))
    seen = leases("a", ME, *["(me)", "(a)", None, None, None, None] * 4)
    died_under_me = {str(n) for n in range(2, 26, 6)}
    assert died_under_me <= set(plan(seen).acquire)
    assert died_under_me.isdisjoint(plan(seen, host="a").acquire)


def test_plan_counts_a_held_lease_that_is_listed_as_expired() -> None:
    """A lease this process holds, but the listing shows dead, counts as held."""
    result = plan(leases("(me)", "(me)", "a", "a"), held={"0", "1"})
    assert result == LeasePlan()
    result = plan(leases("(me)", "(me)", "a", "a", None, None), held={"0", "1"})
    assert len(result.acquire) == 1


def test_plan_counts_a_held_lease_that_is_listed_for_another_host() -> None:
    """It counts as held, be the listing or the holding the older, and nothing is stolen for it before that is known."""
    assert plan(leases(ME, "a", "a", "a"), held={"0", "1"}) == LeasePlan()


def test_plan_counts_what_is_being_taken() -> None:
    """A call of an earlier cycle that has not ended is neither repeated nor compensated."""
    assert plan(leases("a", "a", "a", "a"), taking={"1", "3"}) == LeasePlan()
    assert plan(leases("a", "a", None, None), taking={"2", "3"}) == LeasePlan()
    half = plan(leases("a", "a", "a", "a", ME, None), taking={"0"})
    assert half.acquire == ("5",)
    assert half.steal == ()


def test_plan_replaces_avoided_leases_by_others_of_the_same_owner() -> None:
    """A host that must not take what it is appointed to steal still gets its share."""
    listing = leases("a", "a", "a", "a", "a", ME)
    appointed = ids(plan(listing).steal)
    result = plan(listing, avoid=appointed)
    assert len(appointed) == len(result.steal) == 2
    assert ids(result.steal).isdisjoint(appointed)


def test_plan_replaces_an_avoided_lease_that_expired_under_the_host() -> None:
    """The host takes another lease for it, so that the fleet appoints another host: it does not stay unread."""
    listing = leases("a", "a", ME, "(me)")
    result = plan(listing, avoid={"3"})
    assert len(result.steal) == 1
    assert result.acquire == ()
    stolen = result.steal[0].partition_id
    listing = [
        LeaseSnapshot(lease.partition_id, ME, is_held=True) if lease.partition_id == stolen else lease
        for lease in listing
    ]
    assert plan(listing, avoid={"3"}).steal == ()
    assert plan(listing, host="a").acquire == ("3",)


def test_plan_leaves_an_avoided_lease_that_was_released() -> None:
    """A partition given up to a reader outside the fleet is not passed round the fleet."""
    listing = leases("a", "a", ME, None)
    assert plan(listing, avoid={"3"}) == LeasePlan()
    assert plan(listing, host="a").acquire == ()


def test_plan_gives_spare_leases_to_a_host_without_any() -> None:
    """Spare leases make a host seen; they leave every owner some, and name none twice."""
    listing = leases(*["a"] * 12, *["b"] * 4)
    joiner = plan(listing)
    assert joiner.spare
    assert ids(joiner.spare).isdisjoint(ids(joiner.steal))
    reached = Counter(lease.owner for lease in (*joiner.steal, *joiner.spare))
    assert reached["a"] <= 9
    assert reached["b"] <= 3
    assert plan([*listing, LeaseSnapshot("16", ME, is_held=True)]).spare == ()


@given(snapshots, st.sets(st.integers(0, 39).map(str)), st.integers(0, 5))
def test_plan_of_any_listing_takes_nothing_twice_or_without_gain(
    listing: list[LeaseSnapshot], avoid: set[str], seed: int
) -> None:
    """Whatever the listing, nothing is taken twice, wrongly, to excess or no gain."""
    before = list(listing)
    result = plan(listing, avoid=avoid, seed=seed)
    assert listing == before
    assert result == plan(listing, avoid=avoid, seed=seed)
    mine = {lease.partition_id for lease in listing if lease.is_held and lease.owner == ME}
    by_id = {lease.partition_id: lease for lease in listing}
    taken = [*result.acquire, *(lease.partition_id for lease in result.steal)]
    assert len(taken) == len(set(taken))
    assert not avoid.intersection(taken)
    assert mine.isdisjoint(taken)
    assert not avoid.intersection(ids(result.spare))
    assert not any(by_id[partition_id].is_held for partition_id in result.acquire)
    owned = Counter(lease.owner for lease in listing if lease.is_held and lease.owner is not None)
    hosts = len(owned.keys() | {ME})
    assert owned[ME] + len(taken) <= max(owned[ME], -(-len(listing) // hosts))
    lost = Counter(lease.owner for lease in result.steal)
    died_avoided = any(lease.owner == ME and not lease.is_held and lease.partition_id in avoid for lease in listing)
    for name, count in lost.items():
        assert name not in (None, ME)
        assert by_id.keys() >= ids(result.steal)
        if not died_avoided:
            assert owned[name] - count >= len(listing) // hosts
            assert owned[name] - owned[ME] >= 2


@given(st.lists(st.one_of(st.none(), names, names.map("({})".format)), min_size=1, max_size=60))
def test_plans_from_one_listing_never_race(owners: list[str | None]) -> None:
    """Hosts that plan from one listing take different leases, and together exactly what makes the fleet even."""
    listing = leases(*owners)
    seen = sorted({lease.owner for lease in listing if lease.is_held and lease.owner is not None})
    if not seen:
        return
    after = Counter({name: owners.count(name) for name in seen})
    moved: set[str] = set()
    for name in seen:
        result = plan(listing, host=name)
        assert moved.isdisjoint(result.acquire)
        assert moved.isdisjoint(ids(result.steal))
        moved.update(result.acquire, ids(result.steal))
        after[name] += len(result.acquire) + len(result.steal)
        after.subtract(Counter(str(lease.owner) for lease in result.steal))
    assert after.total() == len(listing)
    assert max(after.values()) - min(after.values()) <= 1


# -------------------------------------------------------------------------------------- fleets, fresh snapshots


@pytest.mark.parametrize("crashes", [1, 37, 99])
def test_plans_after_a_crash_move_only_the_freed_leases(crashes: int) -> None:
    """On fresh snapshots survivors take exactly what the dead owned, in one cycle, and then nothing more moves."""
    fleet = Fleet(1000, Timing.FRESH, seed=crashes)
    fleet.join(100)
    fleet.give_evenly()
    fleet.crash(crashes)
    freed = sum(not lease.is_held for lease in fleet.leases.values())
    assert fleet.run(1) == freed == fleet.moves
    assert fleet.is_even()
    assert fleet.run(2) == 0


def test_plans_for_each_joiner_make_the_fewest_moves() -> None:
    """On fresh snapshots a fleet that grows from 1 to 100 hosts one by one makes the fewest moves at every step."""
    fleet = Fleet(1000, Timing.FRESH, seed=0)
    for _ in range(100):
        fleet.join(1)
        fewest = fleet.fewest_moves()
        assert fleet.run(1) == fewest
        assert fleet.is_even()
    assert fleet.run(1) == 0


@given(st.lists(st.integers(0, 11), min_size=1, max_size=60), st.integers(0, 1000))
def test_plans_for_any_unevenness_make_the_fewest_moves(owners: list[int], seed: int) -> None:
    """On fresh snapshots any distribution becomes even by the fewest moves in one cycle, where all hosts are seen."""
    fleet = Fleet(len(owners), Timing.FRESH, seed)
    fleet.join(len(set(owners)))
    names = dict(zip(sorted(set(owners)), fleet.hosts, strict=True))
    for partition, owner in enumerate(owners):
        fleet.give(str(partition), names[owner])
    fewest = fleet.fewest_moves()
    assert fleet.run(1) == fewest
    assert fleet.is_even()
    assert fleet.run(1) == 0


# -------------------------------------------------------------------------------------- fleets, stale snapshots

# Partitions, hosts, of which crash, and hosts that join at the same moment.
JOINS = [(1000, 50, 0, 50), (1000, 10, 0, 90), (1000, 1, 0, 99), (1000, 99, 0, 1), (100, 10, 0, 90), (64, 4, 0, 4)]
CRASHES = [(1000, 100, 1, 0), (1000, 100, 60, 0), (997, 100, 99, 0), (32, 8, 3, 0)]
BOTH = [(1000, 60, 30, 40), (1000, 50, 49, 50), (100, 60, 50, 40)]
STARTS = [(1000, 0, 0, 100), (100, 0, 0, 100), (32, 0, 0, 32), (64, 0, 0, 100), (32, 0, 0, 4)]


def fleet_after(partitions: int, hosts: int, crashes: int, joins: int, timing: Timing, seed: int) -> Fleet:
    fleet = Fleet(partitions, timing, seed)
    if hosts:
        fleet.join(hosts)
        fleet.give_evenly()
        assert fleet.run(2) == 0
        fleet.crash(crashes)
    fleet.join(joins)
    return fleet


def seeds(request: pytest.FixtureRequest) -> range:
    return range(12 if request.config.getoption("--long", default=False) else 1)


LARGE = 900
"""Partitions of a fleet that takes a second to simulate: such a scenario runs with one timing, with --long with all."""


@pytest.mark.parametrize(
    ("timing", "scenario"),
    [
        pytest.param(
            *(timing, scenario),
            marks=[pytest.mark.long] if scenario[0] > LARGE and timing is not Timing.ONE_PICTURE else [],
        )
        for timing, scenarios in (
            (Timing.ONE_PICTURE, JOINS + CRASHES + BOTH + STARTS),
            (Timing.OUT_OF_STEP, JOINS + CRASHES + BOTH + STARTS),
            (Timing.BURSTS, JOINS + CRASHES),
        )
        for scenario in scenarios
    ],
)
def test_plans_from_stale_snapshots_come_to_rest(
    timing: Timing, scenario: tuple[int, int, int, int], request: pytest.FixtureRequest
) -> None:
    """Acting on old pictures, a fleet is even after five cycles and twice the fewest moves, and then rests."""
    for seed in seeds(request):
        fleet = fleet_after(*scenario, timing, seed)
        fewest = fleet.fewest_moves()
        moves = fleet.run(5)
        assert fleet.is_even(), seed
        assert moves <= 2 * fewest, seed
        assert fleet.run(2) == 0, seed


@pytest.mark.parametrize("scenario", STARTS + BOTH)
def test_plans_at_a_cold_start_come_to_rest(
    scenario: tuple[int, int, int, int], request: pytest.FixtureRequest
) -> None:
    """If the first may take all that is free before others are seen, the fleet is even after five cycles."""
    for seed in seeds(request):
        fleet = fleet_after(*scenario, Timing.BURSTS, seed)
        fewest = fleet.fewest_moves()
        moves = fleet.run(5)
        assert fleet.is_even(), seed
        assert moves <= 3 * fewest, seed
        assert fleet.run(2) == 0, seed


@pytest.mark.parametrize("scenario", [JOINS[0], CRASHES[1], BOTH[0], STARTS[-1]])
def test_plans_with_a_slow_store_cost_no_further_moves(
    scenario: tuple[int, int, int, int], request: pytest.FixtureRequest
) -> None:
    """Calls that take up to three cycles delay an even fleet, and cost no further moves."""
    for seed in seeds(request):
        fleet = fleet_after(*scenario, Timing.SLOW_STORE, seed)
        fewest = fleet.fewest_moves()
        moves = fleet.run(15)
        assert fleet.is_even(), seed
        assert moves <= 2 * fewest, seed
        assert fleet.run(3) == 0, seed


@given(
    st.sampled_from(Timing),
    st.integers(1, 40),
    st.lists(st.tuples(st.sampled_from(["join", "crash"]), st.integers(1, 8)), min_size=1, max_size=6),
    st.integers(0, 10_000),
)
def test_plans_come_to_rest_after_any_history(
    timing: Timing, partitions: int, history: list[tuple[str, int]], seed: int
) -> None:
    """Whatever hosts join and crash, at rest or not, a fleet that is left alone becomes even and rests."""
    fleet = Fleet(partitions, timing, seed)
    fleet.join(1)
    for event, count in history:
        if event == "join":
            fleet.join(count)
        else:
            fleet.crash(min(count, len(fleet.hosts) - 1))
        fleet.run(1)
    fleet.run(30 if timing is Timing.SLOW_STORE else 10)
    assert fleet.is_even()
    assert fleet.run(3) == 0
