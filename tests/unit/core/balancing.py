"""A fleet of hosts that share leases by `plan_leases`, simulated.

A host works in cycles, as the partition manager does: it lists, plans, and carries out the plan by calls to the store
that take effect later, while others do the same. Nothing but the leases tells hosts of each other.
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
from eventpump.core.lease import LeaseSnapshot


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


class Fleet:
    """Hosts and leases. Time is in cycles. A move is a lease that changed hands, free or stolen."""

    def __init__(self, partitions: int, timing: Timing, seed: int) -> None:
        self.moves = 0
        self.hosts: dict[str, Host] = {}
        self.leases = {str(n): LeaseSnapshot(str(n), None, is_held=False) for n in range(partitions)}
        self._timing = timing
        self._rng = random.Random(seed)
        self._now = 0.0
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    # ------------------------------------------------------------------------------------------------ events

    def join(self, count: int) -> None:
        """Start hosts."""
        for _ in range(count):
            number = next(self._numbers)
            # names in no order of age
            host = Host(f"host-{number * 7919 % 1009:04}-{number}", random.Random(self._rng.random()))
            self.hosts[host.name] = host
            if self._timing is not Timing.FRESH:
                is_in_step = self._timing in (Timing.ONE_PICTURE, Timing.BURSTS)
                self._at(0.0 if is_in_step else self._rng.random(), functools.partial(self._cycle, host))

    def crash(self, count: int) -> None:
        """Kill hosts, and go to the moment when their leases have expired."""
        for name in self._rng.sample(sorted(self.hosts), count):
            for partition_id in self.hosts.pop(name).held:
                self.leases[partition_id] = LeaseSnapshot(partition_id, name, is_held=False)

    def give(self, partition_id: str, name: str) -> None:
        """Make a host the owner of a lease, whoever has it now."""
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
        else:
            goals = [(host, host.cycles + cycles) for host in self.hosts.values()]
            while goals:
                self._now, _, act = heapq.heappop(self._agenda)
                act()
                while goals and goals[-1][0].cycles >= goals[-1][1]:
                    goals.pop()
        return self.moves - before

    def plan(self, name: str) -> LeasePlan:
        """Plan for a host on a fresh listing."""
        host = self.hosts[name]
        return plan_leases(list(self.leases.values()), host=name, held=host.held, taking=host.taking, rng=host.rng)

    def _cycle(self, host: Host) -> None:
        if host.name not in self.hosts:
            return
        plan = self.plan(host.name)
        calls = [functools.partial(self._acquire, partition_id, host) for partition_id in plan.acquire]
        calls += [functools.partial(self._steal, seen, host) for seen in plan.steal]
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
        self._at(until_next, functools.partial(self._end_cycle, host))

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
        self._take(seen.partition_id, host, is_won=self.leases[seen.partition_id] == seen)

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
        """The fewest moves that make the fleet even, for somebody who sees every host."""
        share, extra = divmod(len(self.leases), len(self.hosts))
        counts = sorted(self.counts().values(), reverse=True)
        return sum(max(0, share + (rank < extra) - count) for rank, count in enumerate(counts))
