"""A fleet of hosts that share leases by a balancer, simulated.

A host works in cycles, as the partition manager does: it lists, plans, and carries out the plan by calls to the store
that take effect later, while others do the same. Only by the leases do hosts see each other.
"""

from __future__ import annotations

import enum
import functools
import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from eventpump.core.balancer import LeasePlan, plan_leases
from eventpump.core.balancers import FairBalancer, GreedyBalancer, RingBalancer, StaticAssignment
from eventpump.core.fleet import FleetMemory, FleetView, PartitionBalancer, checked_plan
from eventpump.core.lease import LeaseSnapshot

INTERVAL = 10.0
"""Seconds that a cycle stands for, as balancers see them."""


class Timing(enum.Enum):
    """When hosts list, and when their calls take effect."""

    FRESH = "one host after the other lists and acts, in one moment"
    ONE_PICTURE = "all list at once, every call takes effect at a random moment of the cycle"
    BURSTS = "all list at once, each host's calls all take effect at one random moment of the cycle"
    OUT_OF_STEP = "each lists at a moment of its own, every call takes effect at a random moment of half a cycle"
    SLOW_STORE = "as OUT_OF_STEP, but calls take up to three cycles, and plans are made meanwhile"


@dataclass
class Host:
    """A process, by what it knows of itself."""

    name: str
    rng: random.Random
    held: set[str] = field(default_factory=set)
    taking: set[str] = field(default_factory=set)
    cycles: int = 0
    balancer: PartitionBalancer | None = None
    memory: FleetMemory = field(default_factory=FleetMemory)


class Fleet:
    """Hosts and leases. Time is in cycles. A move is a lease that changed hands, free or stolen.

    Args:
        balancer: Makes the balancer of a host, from the number of the host; None for bare plans of `plan_leases`.
    """

    def __init__(
        self,
        partitions: int,
        timing: Timing,
        seed: int,
        balancer: Callable[[int], PartitionBalancer] | None = None,
    ) -> None:
        self.moves = 0
        self.problems: list[str] = []
        """What was wrong with plans."""
        self.unread = 0.0
        """For how many cycles partitions had no owner, all of them together."""
        self.steals = 0
        """How many leases were taken from a live owner."""
        self._balancer = balancer
        self.hosts: dict[str, Host] = {}
        self.leases = {str(n): LeaseSnapshot(str(n), None, is_held=False) for n in range(partitions)}
        self._timing = timing
        self._rng = random.Random(seed)
        self._now = 0.0
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    # ------------------------------------------------------------------------------------------------ events

    def join(self, count: int, *, suffix: str = "", balancer: PartitionBalancer | None = None) -> None:
        """Start hosts.

        Args:
            count: How many.
            suffix: What their names end with, such as a weight.
            balancer: Their balancer, if not that of the fleet.
        """
        for _ in range(count):
            number = next(self._numbers)
            # names in no order of age
            name = f"host-{number * 7919 % 1009:04}-{number}{suffix}"
            host = Host(name, random.Random(self._rng.random()))
            host.balancer = balancer or (None if self._balancer is None else self._balancer(len(self.hosts)))
            self.hosts[host.name] = host
            if self._timing is not Timing.FRESH:
                is_in_step = self._timing in (Timing.ONE_PICTURE, Timing.BURSTS)
                self._at(0.0 if is_in_step else self._rng.random(), functools.partial(self._cycle, host))

    def crash(self, count: int) -> None:
        """Kill hosts, and go to the moment when their leases have expired."""
        for name in self._rng.sample(sorted(self.hosts), count):
            self.die(name)

    def die(self, name: str) -> None:
        """Kill a host, and go to the moment when its leases have expired."""
        for partition_id in self.hosts.pop(name).held:
            self.leases[partition_id] = LeaseSnapshot(partition_id, name, is_held=False)

    def leave(self, name: str) -> None:
        """Stop a host in order: it releases its leases."""
        for partition_id in self.hosts.pop(name).held:
            self.leases[partition_id] = LeaseSnapshot(partition_id, None, is_held=False)

    def give(self, partition_id: str, name: str) -> None:
        """Make a host the owner of a lease, no matter which host has it now."""
        owner = self.leases[partition_id].owner
        if owner in self.hosts:
            self.hosts[owner].held.discard(partition_id)
        self.leases[partition_id] = LeaseSnapshot(partition_id, name, is_held=True, token=str(next(self._numbers)))
        self.hosts[name].held.add(partition_id)

    def give_evenly(self) -> None:
        """Give every host an even share, at random."""
        names = itertools.cycle(self._rng.sample(sorted(self.hosts), len(self.hosts)))
        for partition_id in self._rng.sample(sorted(self.leases), len(self.leases)):
            self.give(partition_id, next(names))

    # ------------------------------------------------------------------------------------------------ cycles

    def run(self, cycles: int) -> int:
        """Let every host go through a number of cycles to their end; return the moves made meanwhile."""
        before = self.moves
        if self._timing is Timing.FRESH:
            for _ in range(cycles):
                for name in self._rng.sample(sorted(self.hosts), len(self.hosts)):
                    self._cycle(self.hosts[name])
                self._now += 1.0
        else:
            goals = [(host, host.cycles + cycles) for host in self.hosts.values()]
            while goals:
                at, _, act = heapq.heappop(self._agenda)
                if self._balancer is not None and at > self._now:
                    self.unread += (at - self._now) * sum(not lease.is_held for lease in self.leases.values())
                self._now = at
                act()
                while goals and goals[-1][0].cycles >= goals[-1][1]:
                    goals.pop()
        return self.moves - before

    def plan(self, name: str) -> LeasePlan:
        """Plan for a host on a fresh listing."""
        host = self.hosts[name]
        if host.balancer is None:
            return plan_leases(list(self.leases.values()), host=name, held=host.held, taking=host.taking, rng=host.rng)
        leases = list(self.leases.values())
        host.memory.listed(leases, self._now * INTERVAL)
        view = FleetView(
            name,
            tuple(leases),
            frozenset(self.leases),
            frozenset(host.held),
            frozenset(host.taking),
            ages=host.memory.ages,
            hosts=host.memory.hosts,
            departed=host.memory.departed,
            age=host.memory.age,
            rng=host.rng,
        )
        plan, problems = checked_plan(host.balancer.plan(view), view)
        self.problems += problems
        return plan

    def _cycle(self, host: Host) -> None:
        if host.name not in self.hosts:
            return
        plan = self.plan(host.name)
        calls = [functools.partial(self._acquire, partition_id, host) for partition_id in plan.acquire]
        calls += [functools.partial(self._steal, seen, host) for seen in plan.steal]
        calls += [functools.partial(self._release, partition_id, host) for partition_id in plan.release]
        host.taking.update(plan.acquire, (seen.partition_id for seen in plan.steal))
        if self._timing is Timing.FRESH:
            for call in calls:
                call()
            return
        if self._timing in (Timing.ONE_PICTURE, Timing.BURSTS):
            until_next = longest = 1.0
        else:
            until_next = self._rng.uniform(0.9, 1.1)
            longest = 3.0 if self._timing is Timing.SLOW_STORE else until_next / 2
        moment = self._rng.uniform(0.0, longest)
        moments = [moment if self._timing is Timing.BURSTS else self._rng.uniform(0.0, longest) for _ in calls]
        for at, call in zip(moments, calls, strict=True):
            self._at(at, call)
        if plan.spare:
            self._at(max(moments, default=0.0), functools.partial(self._use_spare, plan, host))
        if plan.again and until_next > longest / 2:
            self._at(longest, functools.partial(self._again, host))
        self._at(until_next, functools.partial(self._end_cycle, host))

    def _again(self, host: Host) -> None:
        """Plan once more within a cycle, as a host does after its first lease; that plan ends with the cycle."""
        if host.name in self.hosts:
            plan = self.plan(host.name)
            for partition_id in plan.acquire:
                self._acquire(partition_id, host)
            for seen in plan.steal:
                self._steal(seen, host)

    def _end_cycle(self, host: Host) -> None:
        host.cycles += 1
        if host.name in self.hosts:
            self._at(0.0, functools.partial(self._cycle, host))  # after the ends of all that are in step

    def _at(self, delay: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (self._now + delay, next(self._numbers), act))

    def _use_spare(self, plan: LeasePlan, host: Host) -> None:
        for seen in plan.spare:
            if host.held:
                break
            self._steal(seen, host)

    # ------------------------------------------------------------------------------------------------- store

    def _acquire(self, partition_id: str, host: Host) -> None:
        self._take(partition_id, host, is_won=not self.leases[partition_id].is_held)

    def _steal(self, seen: LeaseSnapshot, host: Host) -> None:
        is_won = self.leases[seen.partition_id] == seen
        self.steals += is_won and host.name in self.hosts
        self._take(seen.partition_id, host, is_won=is_won)

    def _release(self, partition_id: str, host: Host) -> None:
        if host.name in self.hosts and partition_id in host.held:
            host.held.discard(partition_id)
            self.leases[partition_id] = LeaseSnapshot(partition_id, None, is_held=False)

    def _take(self, partition_id: str, host: Host, *, is_won: bool) -> None:
        host.taking.discard(partition_id)
        if is_won and host.name in self.hosts:
            self.give(partition_id, host.name)
            self.moves += 1

    # ---------------------------------------------------------------------------------------------- measures

    def counts(self) -> Counter[str]:
        """How many leases each host owns."""
        return Counter({name: len(host.held) for name, host in self.hosts.items()})

    def is_even(self) -> bool:
        """Whether every lease is held, and the largest host owns at most one more than the smallest."""
        counts = self.counts().values()
        return sum(counts) == len(self.leases) and max(counts) - min(counts) <= 1

    def fewest_moves(self) -> int:
        """The fewest moves that make the fleet even, for an observer that sees every host."""
        share, extra = divmod(len(self.leases), len(self.hosts))
        counts = sorted(self.counts().values(), reverse=True)
        return sum(max(0, share + (rank < extra) - count) for rank, count in enumerate(counts))


# ----------------------------------------------------------------------------------------------------- figures


@dataclass(frozen=True)
class Figures:
    """What a change of a fleet costs under a balancer.

    Args:
        least: The partitions of the host with the fewest, at rest.
        most: And with the most.
        moves: Leases that changed hands.
        cycles: Cycles until the last of them.
        unread: The time that each partition was without an owner, in cycles, on average.
    """

    least: float
    most: float
    moves: float
    cycles: float
    unread: float


Kind = Callable[[int], PartitionBalancer]
HOSTS, PARTITIONS = 10, 100
KINDS: dict[str, Kind] = {
    "`FairBalancer()`": lambda _: FairBalancer(),
    "`FairBalancer(maturity=60)`": lambda _: FairBalancer(maturity=60),
    "`GreedyBalancer()`": lambda _: GreedyBalancer(),
    "`RingBalancer()`": lambda _: RingBalancer(),
    "`StaticAssignment(ordinal=n, of=10)`": lambda n: StaticAssignment(ordinal=n % HOSTS, of=HOSTS),
}


def _start(fleet: Fleet, kind: Kind) -> None:
    fleet.join(HOSTS)


def _started(fleet: Fleet, kind: Kind) -> None:
    """Let a fleet come to rest, then forget what it cost."""
    for number in range(HOSTS):
        fleet.join(1, balancer=kind(number))
        fleet.run(1)
    fleet.run(20)
    fleet.moves, fleet.unread = 0, 0.0


def _join(fleet: Fleet, kind: Kind) -> None:
    _started(fleet, kind)
    fleet.join(1, balancer=kind(HOSTS))


def _crash(fleet: Fleet, kind: Kind) -> None:
    _started(fleet, kind)
    fleet.crash(1)


def _deployment(fleet: Fleet, kind: Kind) -> None:
    _started(fleet, kind)
    for number, name in enumerate(list(fleet.hosts)):
        fleet.leave(name)
        fleet.run(1)
        fleet.join(1, balancer=kind(number))
        fleet.run(2)


CHANGES: dict[str, Callable[[Fleet, Kind], None]] = {
    "10 hosts start at once": _start,
    "an 11th joins": _join,
    "1 of 10 dies": _crash,
    "a rolling deployment of 10": _deployment,
}


def figures(change: Callable[[Fleet, Kind], None], kind: Kind, seed: int) -> Figures:
    """Simulate a change of a fleet until it rests."""
    fleet = Fleet(PARTITIONS, Timing.OUT_OF_STEP, seed, kind)
    change(fleet, kind)
    cycles = 0
    for cycle in range(1, 31):
        if fleet.run(1):
            cycles = cycle
    assert not fleet.problems, fleet.problems
    counts = fleet.counts().values()
    return Figures(min(counts), max(counts), fleet.moves, cycles, fleet.unread / PARTITIONS)


def table(seeds: int = 3) -> str:
    """Return the figures of all balancers, as the table in docs/balancing.md."""
    lines = [
        "| | partitions per host | moves | cycles to rest | cycles unread, per partition |",
        "|---|---|---|---|---|",
    ]
    for change_name, change in CHANGES.items():
        lines.append(f"| **{change_name}** | | | | |")
        for kind_name, kind in KINDS.items():
            found = [figures(change, kind, seed) for seed in range(seeds)]
            least, most = min(each.least for each in found), max(each.most for each in found)
            moves, cycles, unread = (
                sum(getattr(each, name) for each in found) / seeds for name in ("moves", "cycles", "unread")
            )
            lines.append(f"| {kind_name} | {least} to {most} | {moves:.0f} | {cycles:.0f} | {unread:.2f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())  # noqa: T201 - a command for docs/balancing.md
