"""Decide which leases a host takes of a fair share, from one listing of all leases. The algorithm of `FairBalancer`.

Hosts know of each other only through the names on live leases, so they cannot agree; they compute the same answer
instead. From one listing every host derives the same share for each host in it, in proportion to the weights that the
names contain, and selects the same new owner for every free lease and every lease above its owner's share. A host
without a live lease is invisible to the others and may
compete with other invisible hosts: it still takes the leases that it lacks, and if it loses every race, one spare
lease, so that it becomes visible.

Processors of other SDKs in a group are owners like hosts, and balance by rules of their own. They all aim at even
shares, but some never steal more than an even share rounded down, and leave it to the other members to spread the rest.
"""

from __future__ import annotations

import random
import zlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from eventpump.core.lease import LeaseSnapshot
from eventpump.core.weights import weight_of

SPARES = 16
"""How many spare leases of each kind a plan names."""
PATIENCE = 60.0
"""Seconds for which a surplus of another SDK's processor is left to those that lack it: two of their cycles."""


@dataclass(frozen=True, slots=True)
class LeasePlan:
    """The leases that a host takes and releases in one cycle. Calls may overlap; only `spare` follows on lost races.

    Args:
        acquire: Partitions without a live owner, in the order to try them. Default: `()`.
        steal: Leases to take from a live owner, as listed, in the order to try them. Default: `()`.
        spare: Leases to steal one after another, until one is won, if the host holds nothing and won nothing of
            `acquire` and `steal`: a host that owns nothing is invisible to the others. Default: `()`.
        release: Partitions of this host to give up. Their processors finish the batch they have, the last checkpoint is
            written, and then the lease is released. Default: `()`.
        again: Whether to plan again soon after the calls of `acquire`, `steal` and `spare` have ended, and not only
            after the interval. Default: False.
    """

    acquire: tuple[str, ...] = ()
    steal: tuple[LeaseSnapshot, ...] = ()
    spare: tuple[LeaseSnapshot, ...] = ()
    release: tuple[str, ...] = ()
    again: bool = False


def plan_leases(
    snapshots: Sequence[LeaseSnapshot],
    *,
    host: str,
    held: Collection[str],
    rng: random.Random,
    taking: Collection[str] = (),
    avoid: Collection[str] = (),
    absent: Collection[str] = (),
) -> LeasePlan:
    """Plan one cycle of a host's leases: take all that it lacks to its share.

    A host's share is in proportion to its weight (`weight_of`), rounded up or down. Free leases are taken before any is
    stolen, and hosts of one weight steal only from one with at least two more leases. A host above its share releases
    nothing: hosts below their share take it. A live lease under the host's own name that is not in `held` (of an
    earlier run, or one whose acquisition got no answer) counts as the host's own, as for every other host, and is not
    touched until it expires; then it is the first that this host takes.

    Args:
        held: The partitions whose leases this process holds, by its own state; even if the listing shows no owner or
            another, because only a renewal determines which of the two is older.
        taking: The partitions whose acquisition or steal was started in an earlier cycle and has not ended; they
            already count as the host's own.
        rng: Used by an invisible host, so that its competitors, which see the same, choose differently.
        avoid: Partitions that this host must not take now. One whose lease expired under this host is left to the
            others, and it takes another instead. One that it or another host released remains free for it.
        absent: Hosts without a live lease for which a share is kept: their free leases are left to who replaces them.
    """
    mine = frozenset(held).union(taking)
    picture = _Picture(snapshots, host, mine, absent)
    taken: list[LeaseSnapshot] = []
    spare: list[LeaseSnapshot] = []
    if picture.lacks(host):
        barred = mine.union(avoid)
        if picture.is_host_seen:
            taken = _appointed(picture, host, barred)
        else:
            taken, spare = _drawn(picture, host, barred, rng)
    return LeasePlan(
        acquire=tuple(lease.partition_id for lease in taken if not lease.is_held),
        steal=tuple(lease for lease in taken if lease.is_held),
        spare=tuple(spare),
    )


def first_step(
    plan: LeasePlan, snapshots: Sequence[LeaseSnapshot], *, host: str, taking: Collection[str] = ()
) -> LeasePlan | None:
    """Return the part of a plan that makes an invisible host visible; None if it is visible, or steals nothing.

    Hosts that join at the same time do not see each other: if each stole its whole share of what it sees, the first
    would take half of all leases, the second a third, and most of them would move again. With one lease each they see
    each other, and the next plan needs the fewest moves.
    """
    if not plan.steal or any(lease.is_held and lease.owner == host for lease in snapshots):
        return None
    if taking:
        return replace(plan, steal=(), spare=(), again=True)
    steal = () if plan.acquire else plan.steal[:1]
    spare = (*plan.steal[len(steal) :], *plan.spare)[: 2 * SPARES]
    return replace(plan, steal=steal, spare=spare, again=True)


def plan_for_others(
    snapshots: Sequence[LeaseSnapshot],
    *,
    host: str,
    held: Collection[str],
    ages: Mapping[str, float],
    taking: Collection[str] = (),
    avoid: Collection[str] = (),
) -> LeasePlan:
    """Plan what a host that lacks nothing does so that processors of other SDKs have their share too.

    Those that own an even share rounded down may steal no more, and still take what is free. So a host above its share
    releases the surplus. Where another SDK's processor is above its share, and none of those that lack one has taken it
    for a while, the first host by name takes it, to release it next.

    Args:
        ages: For each partition, the seconds since its lease was first listed with its owner.
    """
    picture = _Picture(snapshots, host, frozenset(held).union(taking), ())
    lacking = {name: lack for name in picture.owned if (lack := picture.lacks(name))}
    is_for_others = lacking.keys() <= picture.foreign
    may_steal = any(len(picture.owned[name]) < picture.least[name] for name in lacking)
    if not lacking or not is_for_others or may_steal or picture.free or taking:
        return LeasePlan()
    count = sum(lacking.values())
    if surplus := picture.exceeds(host):
        # The one that was taken last has the least to lose.
        own = sorted((each for each in held if each in ages), key=lambda each: (ages[each], each))
        return LeasePlan(release=tuple(own[: min(count, surplus)]))
    if host != min(picture.owned.keys() - picture.foreign):
        return LeasePlan()
    spared = [
        lease
        for name in sorted(picture.foreign)
        for lease in sorted(picture.owned[name], key=_order)[: picture.exceeds(name)]
        if ages.get(lease.partition_id, 0.0) >= PATIENCE and lease.partition_id not in avoid
    ]
    return LeasePlan(steal=tuple(spared[:count]))


class _Picture:
    """The owners of leases by a listing, and the target of each host."""

    def __init__(
        self, snapshots: Sequence[LeaseSnapshot], host: str, mine: Collection[str], absent: Collection[str]
    ) -> None:
        self.is_host_seen = False
        self.free: list[LeaseSnapshot] = []
        self.owned: dict[str, list[LeaseSnapshot]] = {host: []}
        for lease in snapshots:
            owner = lease.owner if lease.is_held else None
            self.is_host_seen |= owner == host
            if lease.partition_id in mine:
                # If the listing differs, it may be older than the lease; the renewal will show.
                self.owned[host].append(lease)
            elif owner is not None:
                self.owned.setdefault(owner, []).append(lease)
            elif not lease.is_held:
                self.free.append(lease)
            # else a host has taken the lease and not yet written its name
        for name in absent:
            self.owned.setdefault(name, [])
        self.foreign = {lease.owner for lease in snapshots if lease.is_held and lease.is_foreign and lease.owner}
        self.foreign.discard(host)
        count, weights = len(snapshots), {name: weight_of(name) for name in self.owned}
        total = sum(weights.values())
        self.least = {name: count * weight // total for name, weight in weights.items()}
        """The share of each host, rounded down."""
        lost = {name: count * weight % total for name, weight in weights.items()}
        extra = count - sum(self.least.values())
        # Of the hosts that the rounding took something from, those above their share are the first to have one more,
        # which needs the fewest moves; then those that lost most, and of these hosts before other SDKs' processors,
        # which may not take it. The others are ordered by name, not by count, because counts change while leases move.
        names = sorted(
            self.owned,
            key=lambda name: (
                not lost[name],
                len(self.owned[name]) <= self.least[name],
                -lost[name],
                name in self.foreign,
                name,
            ),
        )
        self._targets = {name: self.least[name] + (rank < extra) for rank, name in enumerate(names)}

    def lacks(self, name: str) -> int:
        """How many leases a host is below its target."""
        return max(0, self._targets[name] - len(self.owned[name]))

    def exceeds(self, name: str) -> int:
        """How many leases a host is above its target."""
        return max(0, len(self.owned[name]) - self._targets[name])


def _order(lease: LeaseSnapshot) -> tuple[int, str]:
    """Return a sort key that is the same on every host, for every listing, and unrelated to the assignment order.

    Because taken leases do not change the order of the others, hosts that use different listings select alike, and no
    owner loses more than its surplus.
    """
    return zlib.crc32(lease.partition_id.encode()), lease.partition_id


def _appointed(picture: _Picture, host: str, barred: Collection[str]) -> list[LeaseSnapshot]:
    """Return the leases that every host selects this one to take."""
    lacking = {name: lack for name in sorted(picture.owned) if (lack := picture.lacks(name))}
    appointed: list[LeaseSnapshot] = []
    supply: list[LeaseSnapshot] = []
    for lease in sorted(picture.free, key=_order):
        if lease.owner is not None and lacking.get(lease.owner, 0) > 0:
            lacking[lease.owner] -= 1
            if lease.owner == host:
                appointed.append(lease)
        else:
            supply.append(lease)
    surplus: list[LeaseSnapshot] = []
    for name, leases in picture.owned.items():
        if exceeds := picture.exceeds(name):
            surplus += sorted(leases, key=_order)[:exceeds]
    supply += sorted(surplus, key=_order)
    # One slice for each host, by name: leases taken from one slice do not move the others.
    start = sum(lack for name, lack in lacking.items() if name < host)
    appointed += supply[start : start + lacking[host]]
    return _without_barred(appointed, picture, host, barred)


def _without_barred(
    appointed: list[LeaseSnapshot], picture: _Picture, host: str, barred: Collection[str]
) -> list[LeaseSnapshot]:
    """Replace leases that the host is selected for but must not take, so that they do not wait for it forever.

    A lease to steal is replaced by another of the same owner. A free one that expired under this host is replaced by
    one of the largest owner: this fills the host's share, so that another host is selected for the free one.
    """
    taken = [lease for lease in appointed if lease.partition_id not in barred]
    names = {lease.partition_id for lease in appointed}
    spared = {name: len(leases) for name, leases in picture.owned.items() if name != host}
    for lease in appointed:
        if lease.is_held and lease.owner is not None:
            spared[lease.owner] -= 1
    for lease in appointed:
        if lease.partition_id not in barred or not spared:
            continue
        if lease.is_held and lease.owner is not None:
            victim = lease.owner
        elif lease.owner == host:
            victim = max(sorted(spared), key=spared.__getitem__)
            if spared[victim] <= len(picture.owned[host]) + len(taken):
                continue
            spared[victim] -= 1
        else:
            continue
        for other in sorted(picture.owned[victim], key=_order):
            if other.partition_id not in names and other.partition_id not in barred:
                names.add(other.partition_id)
                taken.append(other)
                break
    return taken


def _drawn(
    picture: _Picture, host: str, barred: Collection[str], rng: random.Random
) -> tuple[list[LeaseSnapshot], list[LeaseSnapshot]]:
    """Return the leases that an invisible host takes, and spare ones in case it wins none of them."""
    free = [lease for lease in picture.free if lease.partition_id not in barred]
    rng.shuffle(free)
    free.sort(key=lambda lease: lease.owner != host)
    taken = free[: picture.lacks(host)]
    surplus = [name for name in picture.owned for _ in range(picture.exceeds(name))]
    quotas = Counter(rng.sample(surplus, min(len(surplus), picture.lacks(host) - len(taken))))
    steal: list[LeaseSnapshot] = []
    above: list[LeaseSnapshot] = []
    below: list[LeaseSnapshot] = []
    for name, leases in picture.owned.items():
        excess = len(leases) - picture.least[name]
        if quotas and excess > 0:
            quota = quotas[name]
            choice = [lease for lease in sorted(leases, key=_order) if lease.partition_id not in barred]
            steal += choice[:quota]
            above += choice[quota:excess]
            # Competitors may draw the same owner: a quarter of its leases is excluded, so that it remains visible.
            below += choice[excess : len(leases) - max(1, len(leases) // 4)]
    for leases in (steal, above, below):
        rng.shuffle(leases)
    spare = [] if picture.owned[host] else above[:SPARES] + below[:SPARES]
    return taken + steal, spare
