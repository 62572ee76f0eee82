"""Decide which leases a host acquires and steals, from one listing of all leases.

Hosts know of each other only through the names on live leases, so they cannot agree; they compute the same answer
instead. From one listing every host derives the same share for each host in it, and appoints the same taker for every
free lease and every lease above its owner's share. A host without a live lease is seen by nobody and may have unseen
rivals: it takes what it lacks all the same, and should it lose every race, one spare lease, so that it is seen.
"""

from __future__ import annotations

import random
import zlib
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from eventpump.core.lease import LeaseSnapshot

SPARES = 16
"""How many spare leases of each kind a plan names."""


@dataclass(frozen=True, slots=True)
class LeasePlan:
    """What a host does about leases in one cycle. Calls may overlap; a lost race needs no answer but `spare`.

    Args:
        acquire: Partitions nobody holds, in the order to try them.
        steal: Leases to take from a live owner, as the listing showed them, in the order to try them.
        spare: Leases to steal one after another, until one is won, where the host holds nothing and nothing of
            `acquire` and `steal` was won: a host that owns nothing is not seen by the others.
    """

    acquire: tuple[str, ...] = ()
    steal: tuple[LeaseSnapshot, ...] = ()
    spare: tuple[LeaseSnapshot, ...] = ()


def plan_leases(
    snapshots: Sequence[LeaseSnapshot],
    *,
    host: str,
    held: Collection[str],
    rng: random.Random,
    taking: Collection[str] = (),
    avoid: Collection[str] = (),
) -> LeasePlan:
    """Plan one cycle of a host's leases: take all it lacks to an even share.

    What is free is taken before anything is stolen, and a lease is stolen only from a host with at least two more. A
    host above its share gives nothing up: those below take it. A lease that is alive under the host's own name but not
    in `held` (an earlier run's, or one whose acquisition got no answer) counts as the host's own, as every other host
    counts it, and is left alone until it dies; dead, it is the first this host takes.

    Args:
        snapshots: Every lease of the consumer group, as just listed.
        host: The name of the planning host.
        held: The partitions whose leases this process holds, by its own knowledge; also where the listing gives them to
            nobody or to another, as only a renewal tells which of the two is older.
        taking: The partitions whose acquisition or steal, begun in an earlier cycle, has not ended; they count as the
            host's own already.
        rng: Where a host that nobody sees draws from, so that its rivals, seeing the same, choose otherwise.
        avoid: Partitions this host must not take now. One that died under it is left to the others: it takes another
            for it. One that it or another released stays free for it.
    """
    mine = frozenset(held).union(taking)
    picture = _Picture(snapshots, host, mine)
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
    """Return the part of a plan that makes its host seen, for a host that is not; None where it is, or steals nothing.

    Hosts that join at once do not see each other: if each stole its whole share of what it sees, the first would take
    half of all leases, the second a third, and most of it would move again. With one lease each they see each other,
    and what they are then appointed to is the fewest moves.

    Args:
        plan: What `plan_leases` returned for these snapshots.
        taking: As given to `plan_leases`.
    """
    if not plan.steal or any(lease.is_held and lease.owner == host for lease in snapshots):
        return None
    if taking:
        return replace(plan, steal=(), spare=())
    steal = () if plan.acquire else plan.steal[:1]
    spare = (*plan.steal[len(steal) :], *plan.spare)[: 2 * SPARES]
    return replace(plan, steal=steal, spare=spare)


class _Picture:
    """Who owns what by a listing, and how much everybody should own."""

    def __init__(self, snapshots: Sequence[LeaseSnapshot], host: str, mine: Collection[str]) -> None:
        self.is_host_seen = False
        self.free: list[LeaseSnapshot] = []
        self.owned: dict[str, list[LeaseSnapshot]] = {host: []}
        for lease in snapshots:
            owner = lease.owner if lease.is_held else None
            self.is_host_seen |= owner == host
            if lease.partition_id in mine:
                # Where the listing says otherwise, it may be older than the holding; the renewal will tell.
                self.owned[host].append(lease)
            elif owner is not None:
                self.owned.setdefault(owner, []).append(lease)
            elif not lease.is_held:
                self.free.append(lease)
            # else somebody is between taking the lease and writing its name
        self.share, extra = divmod(len(snapshots), len(self.owned))
        # Those above the share are the first to have one more: fewest moves. The rest goes by name, not by count, as
        # counts change while leases move.
        names = sorted(self.owned, key=lambda name: (len(self.owned[name]) <= self.share, name))
        self._targets = {name: self.share + (rank < extra) for rank, name in enumerate(names)}

    def lacks(self, name: str) -> int:
        """How many leases a host is below its target."""
        return max(0, self._targets[name] - len(self.owned[name]))

    def exceeds(self, name: str) -> int:
        """How many leases a host is above its target."""
        return max(0, len(self.owned[name]) - self._targets[name])


def _order(lease: LeaseSnapshot) -> tuple[int, str]:
    """Order leases alike on every host, in every listing, and unlike the order in which they are dealt out.

    As what was taken leaves the order of the rest as it is, hosts that act on different listings appoint alike, and no
    owner loses more than its surplus.
    """
    return zlib.crc32(lease.partition_id.encode()), lease.partition_id


def _appointed(picture: _Picture, host: str, barred: Collection[str]) -> list[LeaseSnapshot]:
    """Return the leases that every host appoints this one to take."""
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
    # A slice each, by name: what one host has taken of its slice moves nobody else's.
    start = sum(lack for name, lack in lacking.items() if name < host)
    appointed += supply[start : start + lacking[host]]
    return _without_barred(appointed, picture, host, barred)


def _without_barred(
    appointed: list[LeaseSnapshot], picture: _Picture, host: str, barred: Collection[str]
) -> list[LeaseSnapshot]:
    """Take other leases for those the host is appointed to but must not take, lest they wait for it for ever.

    For a lease it should steal, another of the same owner. For a free one that died under this host, one of the
    largest owner: this makes the host even, so that another is appointed to what it cannot take.
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
    """Return the leases an unseen host takes, and spare ones should it win none of them."""
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
        excess = len(leases) - picture.share
        if quotas and excess > 0:
            quota = quotas[name]
            choice = [lease for lease in sorted(leases, key=_order) if lease.partition_id not in barred]
            steal += choice[:quota]
            above += choice[quota:excess]
            # Rivals may draw the same owner: a quarter of its leases is out of reach, so that it goes on being seen.
            below += choice[excess : len(leases) - max(1, len(leases) // 4)]
    for leases in (steal, above, below):
        rng.shuffle(leases)
    spare = [] if picture.owned[host] else above[:SPARES] + below[:SPARES]
    return taken + steal, spare
