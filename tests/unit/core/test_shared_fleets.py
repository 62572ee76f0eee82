"""The balancers beside processors of other SDKs, whose rules are those of `tests.faults.histories.official`."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from eventpump.core.balancer import PATIENCE, LeasePlan
from eventpump.core.balancers import FairBalancer, GreedyBalancer
from eventpump.core.fleet import FleetMemory, FleetView, PartitionBalancer
from eventpump.core.lease import LeaseSnapshot
from tests.faults.histories.official import Ownership, Pace, javascript_claims, python_claims
from tests.support.seeds import seeds

OURS = 20.0
PYTHON, JAVASCRIPT = Pace(30.0, 180.0, is_greedy=True), Pace(10.0, 60.0, is_greedy=False)
CYCLE = 36.0
"""Seconds of the slowest cycle, of Python."""


@dataclass
class Group:
    """A consumer group whose members balance one after another, each at its own pace, without faults."""

    rng: random.Random
    ids: tuple[str, ...]
    balancer: PartitionBalancer
    owners: dict[str, str] = field(default_factory=dict)
    """By partition; "" where it is free."""
    moves: list[tuple[float, str, str]] = field(default_factory=list)
    now: float = 0.0

    def __post_init__(self) -> None:
        self._due: list[tuple[float, int, str]] = []
        self._memories: dict[str, FleetMemory] = {}
        self._kept: dict[tuple[str, str], float] = {}

    def add(self, *names: str) -> None:
        """Let members join. Their names begin with their kind: "our", "py" or "js"."""
        for name in names:
            heapq.heappush(self._due, (self.now + self.rng.uniform(0.0, 10.0), len(self._due), name))
            self._memories[name] = FleetMemory()

    @property
    def names(self) -> list[str]:
        return sorted(self._memories)

    def run(self, seconds: float) -> None:
        """Let time pass."""
        until = self.now + seconds
        while self._due[0][0] <= until:
            self.now, number, name = heapq.heappop(self._due)
            pause = {"ou": self._our, "py": self._python, "js": self._javascript}[name[:2]](name)
            heapq.heappush(self._due, (self.now + pause, number, name))
        self.now = until

    def counts(self) -> list[int]:
        """Return how many partitions each member owns."""
        counts = Counter(self.owners.values())
        return [counts[name] for name in self.names]

    def _set(self, partition_id: str, owner: str) -> None:
        if self.owners.get(partition_id, "") != owner:
            self.moves.append((self.now, partition_id, owner))
            self.owners[partition_id] = owner

    def _our(self, name: str) -> float:
        leases = tuple(
            LeaseSnapshot(each, owner or None, bool(owner), owner[:2] or None, 0, bool(owner) and owner[:2] != "ou")
            for each, owner in sorted(self.owners.items())
        )
        memory, held = self._memories[name], frozenset(each for each in self.ids if self.owners[each] == name)
        memory.listed(leases, self.now)
        avoid = {each for each in self.ids if self._kept.get((name, each), -1.0) > self.now}
        view = FleetView(
            name, leases, frozenset(self.ids), held, frozenset(), frozenset(avoid), memory.ages, memory.hosts,
            memory.departed, memory.age, self.rng,
        )  # fmt: skip
        plan = self.balancer.plan(view)
        taken = [*plan.acquire, *(each.partition_id for each in plan.steal)]
        taken += [each.partition_id for each in plan.spare[:1] if not held and not taken]
        for each in taken:
            self._set(each, name)
        for each in plan.release:
            self._kept[name, each] = self.now + 60.0
            self._set(each, "")
        return OURS * (FIRST_STEP if plan.again else self.rng.uniform(0.8, 1.0))

    def _listed(self) -> list[Ownership]:
        return [Ownership(each, owner, self.now, "etag") for each, owner in sorted(self.owners.items())]

    def _python(self, name: str) -> float:
        for each in python_claims(self._listed(), self.ids, name, self.now, PYTHON, self.rng):
            self._set(each.partition_id, name)
        return PYTHON.interval * self.rng.uniform(1.0, 1.2)

    def _javascript(self, name: str) -> float:
        owned = [each for each in self._listed() if each.owner]
        for each in javascript_claims(owned, self.ids, name, self.now, JAVASCRIPT, self.rng):
            self._set(each, name)
        return JAVASCRIPT.interval


FIRST_STEP = 0.25


def group_of(
    seed: int, make: Callable[[], PartitionBalancer] = FairBalancer, *, weights: Sequence[float] = ()
) -> Group:
    """Return a group of members of all kinds, whose partitions belong to some of them by chance."""
    rng = random.Random(seed)
    group = Group(rng, tuple(map(str, range(rng.randint(1, 20)))), make())
    kinds = ["our", *rng.choices(("our", "py", "py", "js"), k=rng.randint(1, 5))]
    names = [f"{kind}{number}" for number, kind in enumerate(kinds)]
    group.owners = {each: rng.choice((*names[: rng.randint(1, len(names))], "")) for each in group.ids}
    group.add(*names)
    return group


@seeds(200, of=3000)
def test_fair_balancer_beside_other_sdks_comes_to_even_shares_and_rests(seed: int) -> None:
    """From any ownership, no member owns two more than another after ten cycles of the slowest; then nothing moves."""
    group = group_of(seed, FairBalancer)
    group.run(10 * CYCLE)
    counts = group.counts()
    assert sum(counts) == len(group.ids)
    assert max(counts) - min(counts) <= 1, dict(zip(group.names, counts, strict=True))
    at_rest = len(group.moves)
    group.run(10 * CYCLE)
    assert group.moves[at_rest:] == []


@seeds(50, of=500)
def test_greedy_balancer_beside_other_sdks_rests(seed: int) -> None:
    """It takes what is free and steals nothing, and the others steal from it to their share: then nothing moves."""
    group = group_of(seed, GreedyBalancer)
    group.run(20 * CYCLE)
    at_rest = len(group.moves)
    group.run(10 * CYCLE)
    assert group.moves[at_rest:] == []
    assert "" not in group.owners.values()


def view_of(host: str, owners: Sequence[str], *, age: float = 1e9) -> FleetView:
    """Return what a host sees. Owners whose names begin with "x" are processors of another SDK."""
    leases = tuple(
        LeaseSnapshot(str(number), owner or None, bool(owner), is_foreign=owner.startswith("x"))
        for number, owner in enumerate(owners)
    )
    held = frozenset(lease.partition_id for lease in leases if lease.owner == host)
    return FleetView(host, leases, held=held, ages={lease.partition_id: age for lease in leases})


def test_plan_beside_other_sdks_gives_hosts_the_rest_of_a_share() -> None:
    """A processor of another SDK may not steal more than its share rounded down: a host does."""
    plan = FairBalancer().plan(view_of("z", [*["x1"] * 4, *["z"] * 2, *["x0"] * 2], age=0.0))
    assert len(plan.steal) == 1
    assert plan.steal[0].owner == "x1"


def test_plan_of_a_host_above_its_share_releases_what_other_sdks_do_not_steal() -> None:
    """Two of eight more than the others own: one is released, which the others see as free."""
    plan = FairBalancer().plan(view_of("a", [*["a"] * 4, *["x1"] * 2, *["x2"] * 2]))
    assert plan == LeasePlan(release=("0",))


@pytest.mark.parametrize(
    ("owners", "why"),
    [
        ((*["a"] * 5, *["x1"] * 2, "x2"), "x2 is below its share rounded down, and steals"),
        ((*["a"] * 4, *["x1"] * 2, "x2", ""), "there is a free one"),
        ((*["a"] * 4, *["b"] * 2, *["x1"] * 2), "the host b takes it"),
        ((*["a"] * 3, *["x1"] * 3, *["x2"] * 2), "the shares are even"),
        ((*["a"] * 4, *["b"] * 4), "there is no other SDK"),
    ],
    ids=lambda value: value.replace(" ", "_") if isinstance(value, str) else None,
)
def test_plan_of_a_host_releases_nothing_where_another_takes_it(owners: Sequence[str], why: str) -> None:
    """A release leaves a partition unread until it is taken."""
    assert FairBalancer().plan(view_of("a", owners)).release == (), why


def test_plan_takes_from_another_sdk_what_its_peers_do_not_after_a_while() -> None:
    """Four members have one or two each, and one three: the first host takes one of those, to release it."""
    owners = ["x1"] * 3 + ["x2"] * 2 + ["a"] * 2 + ["b"] * 2 + ["x3"] + ["x4"]
    assert FairBalancer().plan(view_of("a", owners, age=PATIENCE - 1.0)) == LeasePlan()
    plan = FairBalancer().plan(view_of("a", owners))
    assert [each.owner for each in plan.steal] == ["x1"]
    assert FairBalancer().plan(view_of("b", owners)) == LeasePlan(), "one host does"
