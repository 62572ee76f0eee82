"""What a host sees of its fleet, what a balancer makes of it, and the check of what it made."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from eventpump.core.balancer import LeasePlan
from eventpump.core.lease import LeaseSnapshot

MEMORY = 3600.0
"""Seconds for which a host remembers another that has no live lease any more."""


@dataclass(frozen=True, slots=True)
class FleetView:
    """What a host sees of its fleet when it plans.

    A listing is a picture of a moment: others may take leases while it is looked at. Ages are what this host itself has
    observed, from one listing to the next, because no store keeps them: the real ages are not less.

    Args:
        host: The name of the planning host in the leases.
        leases: Every lease of the consumer group, as just listed, in the order of partition ids.
        partition_ids: The partitions of the hub that this host knows; a lease may be missing for one just added.
            Default: `frozenset()`.
        held: The partitions whose leases this host holds, by its own state; even if the listing shows no owner or
            another. Default: `frozenset()`.
        taking: The partitions that this host is taking now. They count as its own. Default: `frozenset()`.
        avoid: The partitions that this host must not take now: one of its processors has not returned yet, or failed a
            moment ago. Planning to take one has no effect. Default: `frozenset()`.
        ages: For each partition, the seconds since its lease was first listed as it is now: with this owner and epoch,
            held or not. Default: `{}`.
        hosts: The hosts with a live lease, each with the seconds since it was first listed with one; infinite for those
            of the first listing. Default: `{}`.
        departed: The hosts that had a live lease within the last hour and have none now, each with the seconds since it
            was last listed with one. Default: `{}`.
        age: The seconds since this host's first listing. Default: inf.
        rng: Randomness, for hosts that see the same and should choose differently. Default: an unseeded generator.
    """

    host: str
    leases: tuple[LeaseSnapshot, ...]
    partition_ids: frozenset[str] = frozenset()
    held: frozenset[str] = frozenset()
    taking: frozenset[str] = frozenset()
    avoid: frozenset[str] = frozenset()
    ages: Mapping[str, float] = field(default_factory=dict)
    hosts: Mapping[str, float] = field(default_factory=dict)
    departed: Mapping[str, float] = field(default_factory=dict)
    age: float = math.inf
    rng: random.Random = field(default_factory=random.Random, repr=False, compare=False)


class PartitionBalancer(Protocol):
    """Decides which leases a host takes, steals and releases.

    It decides only: the host carries a plan out by calls to the lease store, each of which takes effect only if the
    lease is still as listed. So whatever a balancer plans, a lease has one owner, and each epoch of a partition one
    reader. Hosts know of each other only through the names on live leases: balancers of one fleet should be of one kind
    and compute the same answer from one view.
    """

    def plan(self, view: FleetView, /) -> LeasePlan:
        """Plan one cycle. Called after every listing of the leases; must not block.

        Raises:
            ConfigurationError: The balancer cannot work with this hub: it ends the host. Anything else that it raises
                is reported, and this cycle takes and releases nothing.
        """


class FleetMemory:
    """Remembers, from one listing to the next, since when leases and hosts are as they are."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._leases: dict[str, tuple[LeaseSnapshot, float]] = {}
        self._first: dict[str, float] = {}
        self._last: dict[str, float] = {}
        self._now = 0.0

    def listed(self, leases: Sequence[LeaseSnapshot], now: float) -> None:
        """Record a listing of every lease, at a time of the host's clock."""
        is_first = self._began is None
        self._began = now if self._began is None else self._began
        self._now = now
        before = self._leases
        self._leases = {}
        live: set[str] = set()
        for lease in leases:
            was, since = before.get(lease.partition_id, (None, now))
            # The token distinguishes one acquisition from the next, for stores whose listing contains it.
            self._leases[lease.partition_id] = (lease, since if was == lease else now)
            if lease.is_held and lease.owner is not None:
                live.add(lease.owner)
        for name in live:
            if name not in self._first:
                self._first[name] = -math.inf if is_first else now
            self._last[name] = now
        for name in [name for name in self._first if name not in live]:
            del self._first[name]
        for name in [name for name, last in self._last.items() if now - last > MEMORY]:
            del self._last[name]

    @property
    def ages(self) -> dict[str, float]:
        """As `FleetView.ages`, at the last listing."""
        return {partition_id: self._now - since for partition_id, (_, since) in self._leases.items()}

    @property
    def hosts(self) -> dict[str, float]:
        """As `FleetView.hosts`."""
        return {name: self._now - first for name, first in self._first.items()}

    @property
    def departed(self) -> dict[str, float]:
        """As `FleetView.departed`."""
        return {name: self._now - last for name, last in self._last.items() if name not in self._first}

    @property
    def age(self) -> float:
        """As `FleetView.age`."""
        return 0.0 if self._began is None else self._now - self._began


def checked_plan(plan: object, view: FleetView) -> tuple[LeasePlan, list[str]]:
    """Return the part of a balancer's plan that can be carried out, and a sentence for each thing wrong with it."""
    if not isinstance(plan, LeasePlan):
        return LeasePlan(), [f"it returned {type(plan).__name__}, and not a LeasePlan"]
    check = _Check(view)
    checked = LeasePlan(
        acquire=tuple(each for each in check.items("acquire", plan.acquire) if check.can_acquire(each)),
        steal=tuple(each for each in check.items("steal", plan.steal) if check.can_steal(each)),
        spare=tuple(each for each in check.items("spare", plan.spare) if check.can_steal(each)),
        release=tuple(each for each in check.items("release", plan.release) if check.can_release(each)),
        again=plan.again is True,
    )
    return checked, check.problems


class _Check:
    """Checks the parts of one plan."""

    def __init__(self, view: FleetView) -> None:
        self.problems: list[str] = []
        self._view = view
        self._leases = {lease.partition_id: lease for lease in view.leases}
        self._named: set[str] = set()

    def items(self, part: str, given: object) -> tuple[Any, ...]:
        if isinstance(given, tuple | list | set | frozenset):
            return tuple(given)
        self.problems.append(f"its `{part}` is {type(given).__name__}, and not a tuple")
        return ()

    def can_acquire(self, partition_id: object) -> bool:
        lease = self._lease(partition_id)
        if lease is None:
            return False
        if lease.is_held and lease.partition_id not in self._view.held:
            owner = "another host" if lease.owner is None else lease.owner
            return self._refuse(f"partition {partition_id} belongs to {owner}; only `steal` takes it from a live owner")
        return self._is_missing(lease)

    def can_steal(self, given: object) -> bool:
        lease = self._lease(given.partition_id) if isinstance(given, LeaseSnapshot) else None
        if not isinstance(given, LeaseSnapshot) or (lease is not None and given != lease):
            return self._refuse(f"{given!r:.80} in `steal` is not a lease of the view")
        if lease is None:
            return False
        if not lease.is_held:
            return self._refuse(f"partition {lease.partition_id} has no live owner; `acquire` takes it")
        return self._is_missing(lease)

    def can_release(self, partition_id: object) -> bool:
        lease = self._lease(partition_id)
        if lease is not None and lease.partition_id not in self._view.held:
            return self._refuse(f"this host does not hold partition {partition_id}, and cannot release it")
        return lease is not None

    def _is_missing(self, lease: LeaseSnapshot) -> bool:
        if lease.partition_id in self._view.held:
            return self._refuse(f"this host holds partition {lease.partition_id} already")
        return True

    def _lease(self, partition_id: object) -> LeaseSnapshot | None:
        if not isinstance(partition_id, str) or partition_id not in self._leases:
            self._refuse(f"there is no lease of a partition {partition_id!r:.80}")
            return None
        if partition_id in self._named:
            self._refuse(f"it names partition {partition_id} more than once")
            return None
        self._named.add(partition_id)
        return self._leases[partition_id]

    def _refuse(self, problem: str) -> bool:
        self.problems.append(problem)
        return False
