"""The balancers to choose from: which leases a host takes, steals and releases. `docs/balancing.md` compares them."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache

from eventpump.core.balancer import LeasePlan, first_step, plan_for_others, plan_leases
from eventpump.core.fleet import MEMORY, FleetView
from eventpump.core.lease import LeaseSnapshot
from eventpump.core.ring import HashRing, check_virtual_nodes
from eventpump.core.weights import UNIT, weight_of
from eventpump.errors import ConfigurationError
from eventpump.texts import not_the_class


def _seconds(option: str, value: object, least: float, most: float) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most:
        return float(value)
    problem = f"must be a number of seconds from {least:g} to {most:g}, and is {value!r:.40}"
    raise ConfigurationError(option, problem)


def _whole_number(option: str, value: object, least: int) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value >= least:
        return value
    raise ConfigurationError(option, f"must be a whole number of {least} or more, and is {value!r:.40}")


class FairBalancer:
    """Shares the partitions evenly, or by weight, with as few moves as possible. The default.

    A host takes what it lacks to its share in one step: free partitions first, then some of hosts above their share.
    Hosts that see the same compute the same shares, so that no partition moves twice. A host has the weight that its
    option `weight` gives it.

    Args:
        maturity: Seconds for which a change of the fleet does not move partitions between hosts that live: the share of
            a host that left is kept for the one that replaces it, and a new host takes free partitions only. So in a
            rolling deployment each partition moves once, from the host that leaves to the one that comes. After a host
            has gone for good, its partitions are not read for that long; 0 to have the others take them at once. At
            most 3,600. Make it longer than a host takes to be replaced, and than the renew interval. Default: 0.0.

    Raises:
        ConfigurationError: `maturity` is not a number from 0 to 3,600.
    """

    __slots__ = ("_maturity",)

    def __init__(self, *, maturity: float = 0.0) -> None:
        self._maturity = _seconds("maturity", maturity, 0, MEMORY)

    def plan(self, view: FleetView) -> LeasePlan:
        """Plan one cycle: of `PartitionBalancer`."""
        is_young = view.age < self._maturity
        plan = plan_leases(
            view.leases,
            host=view.host,
            held=view.held,
            rng=view.rng,
            taking=view.taking,
            avoid=view.avoid,
            absent=self._absent(view),
        )
        if is_young:
            return replace(plan, steal=(), spare=())
        if plan == LeasePlan() and any(lease.is_foreign and lease.is_held for lease in view.leases):
            return plan_for_others(
                view.leases,
                host=view.host,
                held=view.held,
                ages=view.ages,
                taking=view.taking,
                avoid=view.avoid,
            )
        return first_step(plan, view.leases, host=view.host, taking=view.taking) or plan

    def _absent(self, view: FleetView) -> list[str]:
        """Return the hosts that left a moment ago and are not replaced yet. Who comes replaces who left first."""
        left = [(-age, name) for name, age in view.departed.items() if age < self._maturity and name != view.host]
        arrivals = [-age for name, age in view.hosts.items() if age < self._maturity and name != view.host]
        if not view.held and not view.taking:
            # This host can be the replacement. With partitions, it has replaced a host already.
            arrivals.append(0.0)
        left.sort()
        for arrived in sorted(arrivals):
            if left and left[0][0] < arrived:
                del left[0]
        return [name for _, name in left]

    def __repr__(self) -> str:
        return f"FairBalancer(maturity={self._maturity:g})"


class GreedyBalancer:
    """Takes every free partition at once, and none from a live owner.

    The first host takes all; one that joins later waits until a partition is free, because its owner released it or
    died. So partitions move only when an owner ends: for a host with others on standby, or for hosts that each take as
    many partitions as they can process. Not even: this is not what azure-eventhub calls "greedy", which is how
    `FairBalancer` works.

    Args:
        limit: The most partitions of this host, 1 or more; None for no limit. Partitions beyond the limits of all hosts
            are read by none of them. Default: None.

    Raises:
        ConfigurationError: `limit` is not a whole number of 1 or more.
    """

    __slots__ = ("_limit",)

    def __init__(self, *, limit: int | None = None) -> None:
        self._limit = None if limit is None else _whole_number("limit", limit, 1)

    def plan(self, view: FleetView) -> LeasePlan:
        """Plan one cycle: of `PartitionBalancer`."""
        own = view.held | view.taking
        # One of an earlier run under this name counts, and is free when it has expired.
        own |= {lease.partition_id for lease in view.leases if lease.is_held and lease.owner == view.host}
        free = [lease for lease in view.leases if not lease.is_held and _may_take(lease, view)]
        view.rng.shuffle(free)
        free.sort(key=lambda lease: lease.owner != view.host)
        room = None if self._limit is None else max(0, self._limit - len(own))
        return LeasePlan(acquire=tuple(lease.partition_id for lease in free[:room]))

    def __repr__(self) -> str:
        return f"GreedyBalancer(limit={self._limit})"


class RingBalancer:
    """Assigns partitions to the live hosts by a consistent hash ring: which host has which depends on their names only.

    A host that joins takes its partitions from the others, and no other partition moves. One that leaves leaves its own
    to the others; when it comes back under the same name (option `owner_id`), it takes the same ones again, for example
    because it has a cache of what belongs to them. Shares are uneven, and with few partitions a host may have none. A
    host's `weight` multiplies its virtual nodes.

    Args:
        virtual_nodes: The virtual nodes of a host of weight 1; the same on every host of the fleet. More make shares
            more even. From 1 to 10,000. Default: 64.
        patience: Seconds for which a free partition waits for the host that the ring assigns it to; then the next one
            on the ring takes it, and so on. From 1 to 86,400. Default: 60.0.

    Raises:
        ConfigurationError: An argument is out of these bounds.
    """

    __slots__ = ("_patience", "_virtual_nodes")

    def __init__(self, *, virtual_nodes: int = 64, patience: float = 60.0) -> None:
        self._virtual_nodes = check_virtual_nodes(virtual_nodes)
        self._patience = _seconds("patience", patience, 1, 86_400)

    def plan(self, view: FleetView) -> LeasePlan:
        """Plan one cycle: of `PartitionBalancer`."""
        live = {lease.owner for lease in view.leases if lease.is_held and lease.owner is not None} | {view.host}
        ring = _ring(tuple((name, max(1, self._virtual_nodes * weight_of(name) // UNIT)) for name in sorted(live)))
        acquire: list[str] = []
        steal: list[LeaseSnapshot] = []
        for lease in view.leases:
            if not _may_take(lease, view):
                continue
            if lease.is_held:
                if lease.owner not in (None, view.host) and ring.place_of(lease.partition_id) == view.host:
                    steal.append(lease)
            elif self._is_ours(ring, lease, view):
                acquire.append(lease.partition_id)
        plan = LeasePlan(acquire=tuple(acquire), steal=tuple(steal))
        return first_step(plan, view.leases, host=view.host, taking=view.taking) or plan

    def _is_ours(self, ring: HashRing, lease: LeaseSnapshot, view: FleetView) -> bool:
        """Return whether a free lease is for this host: the first on the ring, or one of the next after a while."""
        candidates = 1 + view.ages.get(lease.partition_id, 0.0) // self._patience
        for rank, name in enumerate(ring.places_of(lease.partition_id), 1):
            if rank > candidates:
                break
            if name == view.host:
                return True
        return False

    def __repr__(self) -> str:
        return f"RingBalancer(virtual_nodes={self._virtual_nodes}, patience={self._patience:g})"


@lru_cache(maxsize=16)
def _ring(places: tuple[tuple[str, int], ...]) -> HashRing:
    """Return the ring of some hosts. Remembered, because most cycles see the same ones."""
    return HashRing(dict(places))


class StaticAssignment:
    """Assigns a fixed set of partitions to a host: a part of all (`ordinal`, `of`), or those of a list.

    The host takes free leases of its set, never one from a live owner, and releases what it holds beside it. So sets
    may overlap, and may change from one host to the next while all of them run, for example from `of=5` to `of=6`: each
    partition waits until its owner releases it or ends, and has never two. A partition that is in the set of no live
    host is not read.

    Args:
        partition_ids: The partitions of this host, such as `["0", "3"]`; or give `ordinal` and `of`. Default: None.
        ordinal: The number of this host among the `of` that there are, from 0; it has the partitions whose number
            leaves this remainder when it is divided by `of`. In a Kubernetes StatefulSet the number at the end of the
            pod's name. Default: None.
        of: How many hosts there are. Default: None.

    Raises:
        ConfigurationError: Neither a list nor both numbers are given, or all of them; `ordinal` is not from 0 to
            `of` - 1; the list is empty or names a partition twice. `EventProcessorHost.run` raises it if the hub has no
            such partition.
    """

    __slots__ = ("_ids", "_of", "_ordinal")

    def __init__(
        self, partition_ids: Iterable[str] | None = None, *, ordinal: int | None = None, of: int | None = None
    ) -> None:
        self._ids = None if partition_ids is None else _checked_ids(partition_ids)
        self._ordinal, self._of = 0, 1
        if self._ids is not None:
            if ordinal is not None or of is not None:
                raise ConfigurationError("partition_ids", "cannot be given along with ordinal and of: give one of both")
            return
        if ordinal is None or of is None:
            raise ConfigurationError("ordinal", "give both ordinal and of, or a list of partition ids")
        self._of = _whole_number("of", of, 1)
        self._ordinal = _whole_number("ordinal", ordinal, 0)
        if ordinal >= of:
            raise ConfigurationError("ordinal", f"must be from 0 to {of - 1} for of={of}, and is {ordinal}")

    def plan(self, view: FleetView) -> LeasePlan:
        """Plan one cycle: of `PartitionBalancer`."""
        if self._ids is not None and view.partition_ids and (unknown := sorted(self._ids - view.partition_ids)):
            raise ConfigurationError("partition_ids", f"the hub has no partition {unknown[0]}")
        return LeasePlan(
            acquire=tuple(
                lease.partition_id
                for lease in view.leases
                if not lease.is_held and self._has(lease.partition_id) and _may_take(lease, view)
            ),
            release=tuple(
                lease.partition_id
                for lease in view.leases
                if lease.partition_id in view.held and not self._has(lease.partition_id)
            ),
        )

    def _has(self, partition_id: str) -> bool:
        # By the id alone: whatever other partitions a host knows of, all hosts agree.
        return partition_id in self._ids if self._ids is not None else _number(partition_id) % self._of == self._ordinal

    def __repr__(self) -> str:
        if self._ids is not None:
            return f"StaticAssignment({sorted(self._ids)})"
        return f"StaticAssignment(ordinal={self._ordinal}, of={self._of})"


def _checked_ids(given: object) -> frozenset[str]:
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise ConfigurationError("partition_ids", f"must be several partition ids, and is {given!r:.40}")
    ids = list(given)
    for each in ids:
        if not isinstance(each, str) or not each:
            raise ConfigurationError("partition_ids", f'must be texts such as "0", and one of them is {each!r:.40}')
        if ids.count(each) > 1:
            raise ConfigurationError("partition_ids", f"names partition {each} more than once")
    if not ids:
        raise ConfigurationError("partition_ids", "must name a partition: a host without one has nothing to do")
    return frozenset(ids)


def _number(partition_id: str) -> int:
    """Return a partition's number, or a hash of an id that is not a number."""
    if partition_id.isascii() and partition_id.isdecimal():
        return int(partition_id)
    return zlib.crc32(partition_id.encode())


def _may_take(lease: LeaseSnapshot, view: FleetView) -> bool:
    """Return whether this host has not taken a lease yet and may do so."""
    partition_id = lease.partition_id
    return partition_id not in view.held and partition_id not in view.taking and partition_id not in view.avoid


def check_balancer(balancer: object) -> None:
    """Check that something can be a balancer. Raises `ValueError` if it has no method `plan`, or is a class."""
    if isinstance(balancer, type) or not callable(getattr(balancer, "plan", None)):
        problem = "must be a balancer, such as FairBalancer(): an object with a method plan(view)"
        raise ValueError(problem + not_the_class(balancer))
