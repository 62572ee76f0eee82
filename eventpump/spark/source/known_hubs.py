"""What the driver knows of the hubs of a query, and which of it to read again next. Pure.

The service answers about 50 requests for properties a second. So partitions are not all read at the same pace: those
that have lately had events are read more often, and every other one in its turn.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Final, NamedTuple

from eventpump.eventhubs.events import LastEnqueued
from eventpump.eventhubs.partitions import partition_order
from eventpump.interfaces import HubProperties, PartitionProperties
from eventpump.spark.source.offsets import HubSnapshot

REQUESTS_PER_SECOND: Final = 40
"""The most requests that a query makes in any second, of the 50 that the service answers; they take about 1 % of a
core."""

RECENT_RATE: Final = 10
"""Requests a second while nothing is new, for `RECENT_SECONDS` after the last event: 4 partitions are read twice a
second, and 32 in three seconds."""

RECENT_SECONDS: Final = 10.0
"""After so long without an event a query is idle."""

IDLE_RATE: Final = 1
"""Requests a second of an idle query: every other query in the namespace needs some of the 50, too."""

ROUND: Final = 10
"""How many requests at least are made at once while nothing is new, if there are so many to make: partitions that
lately had events are read up to four times a second, however many others there are."""

_LEAST_RATE: Final = 5
"""The same while the service answers that it is busy."""

_BUSY_SECONDS: Final = 60.0
"""Seconds after which the full rate is tried again."""

ACTIVE_SECONDS: Final = 60.0
"""A partition that had a new event within this time is read more often, if not all can be read each time."""

_HUB_SECONDS: Final = 10.0
"""For so long a hub that links watch is not asked for: only its own properties show new partitions."""

ACTIVE_SHARE: Final = 3
"""One of so many requests is for such partitions at most, if all that the rate allows are made; the others go round."""

USUAL_SIZE: Final = 1024.0
"""Bytes of an event, as long as nothing is known of the sizes in its hub."""

SETTLE_SECONDS: Final = 5.0
"""For so long after a link has shown an event, an answer that does not know it yet is ignored."""


class RequestBudget:
    """Counts requests, so that there are at most `REQUESTS_PER_SECOND` in any second. Times are in seconds."""

    def __init__(self) -> None:
        self._spent: deque[float] = deque()
        self._rate = REQUESTS_PER_SECOND
        self._busy_until = 0.0

    def rate(self, now: float) -> int:
        """Return how many requests a second there may be."""
        if now >= self._busy_until:
            self._rate = REQUESTS_PER_SECOND
        return self._rate

    def free(self, now: float) -> int:
        """Return how many requests may be made now."""
        self._forget(now)
        return max(0, self.rate(now) - len(self._spent))

    def turn(self, now: float) -> float:
        """Count a request, and return the seconds until it may be made."""
        self._forget(now)
        rate = self.rate(now)
        begun = self._spent[-rate] + 1.0 if len(self._spent) >= rate else now
        at = max(now, begun, self._spent[-1] if self._spent else now)
        self._spent.append(at)
        return at - now

    def wait(self, count: int, now: float) -> float:
        """Return the seconds until `count` requests may be made at once, or as many as there may ever be."""
        self._forget(now)
        rate = self.rate(now)
        ending = len(self._spent) + min(count, rate) - rate
        return 0.0 if ending <= 0 else max(0.0, self._spent[ending - 1] + 1.0 - now)

    def _forget(self, now: float) -> None:
        while self._spent and self._spent[0] <= now - 1.0:
            self._spent.popleft()

    def refused(self, now: float) -> None:
        """Make fewer requests for a time: the service answered that it is busy."""
        self._rate = max(_LEAST_RATE, self.rate(now) // 2)
        self._busy_until = now + _BUSY_SECONDS


class LookPace(NamedTuple):
    """How requests are made while nothing is new.

    Args:
        requests: How many at once.
        seconds: From one round to the next.
        active: How many of a round are for partitions that lately had events, at most.
    """

    requests: int
    seconds: float
    active: int = 0


class Item(NamedTuple):
    """What one request reads: the properties of a hub by its index in the query, or of one of its partitions."""

    hub: int
    partition_id: str | None


@dataclass(frozen=True, slots=True)
class HubFacts:
    """The properties of a hub and of the partitions to read. They were not all read at the same moment."""

    hub: HubProperties
    partitions: tuple[PartitionProperties, ...]
    sizes: Mapping[str, float] = field(default_factory=dict)
    """The mean size of the events of each partition, in bytes; not of those whose offsets are not positions in
    bytes."""

    def snapshot(self, hub: str) -> HubSnapshot:
        """Return the sequence numbers as a snapshot, under the hub's name as the query spells it."""
        return HubSnapshot.of(hub, self.hub.created_at, self.partitions, self.sizes)


@dataclass(slots=True)
class _Hub:
    """What is known of one hub."""

    properties: HubProperties | None = None
    partitions: dict[str, PartitionProperties] = field(default_factory=dict)
    sizes: dict[str, float] = field(default_factory=dict)
    recreated_at: float = float("-inf")
    """When it was seen to be another hub than before."""


class KnownHubs:
    """What a query's driver knows of its hubs, since when, and which part of it to read next."""

    def __init__(self, hubs: int) -> None:
        self._hubs = [_Hub() for _ in range(hubs)]
        self._asked: dict[Item, float] = {Item(index, None): float("-inf") for index in range(hubs)}
        self._active: dict[Item, float] = {}
        self._shown: dict[Item, float] = {}
        self.news_at = float("-inf")
        """When an event, or a hub, was last seen to be new."""

    def __len__(self) -> int:
        """Return how many requests it takes to read all hubs and partitions once."""
        return len(self._asked)

    def chosen(
        self, hub: int, properties: HubProperties, partition_ids: Collection[str], asked_at: float, now: float
    ) -> None:
        """Record a hub's properties.

        Of a hub that was recreated, nothing else is known any more. What was asked for before what is known is left
        out: two requests may be under way, and be answered in either order.

        Args:
            partition_ids: The partitions to read; those that are new are read next, and others are forgotten.
        """
        known = self._hubs[hub]
        if asked_at < self._asked[Item(hub, None)]:
            return
        if known.properties is None or known.properties.created_at != properties.created_at:
            self.news_at = asked_at
        if known.properties is not None and known.properties.created_at != properties.created_at:
            known.recreated_at = now
            self._forget(hub, partition_ids=())
        known.properties = properties
        self._asked[Item(hub, None)] = asked_at
        self._forget(hub, partition_ids)
        for partition_id in partition_ids:
            self._asked.setdefault(Item(hub, partition_id), float("-inf"))

    def _forget(self, hub: int, partition_ids: Collection[str]) -> None:
        """Forget all partitions of a hub but some."""
        known = self._hubs[hub]
        for each in [each for each in self._asked if each.hub == hub and each.partition_id is not None]:
            if each.partition_id not in partition_ids:
                known.partitions.pop(str(each.partition_id), None)
                known.sizes.pop(str(each.partition_id), None)
                for values in (self._asked, self._active, self._shown):
                    values.pop(each, None)

    def answered(self, hub: int, properties: PartitionProperties, asked_at: float, now: float) -> None:
        """Record a partition's properties, unless it is no longer to be read, they may be of the hub before it was
        recreated, or they were asked for before what is known.

        Where numbers went back, the hub is to be read again: it may be another one.
        """
        item = Item(hub, properties.partition_id)
        if item not in self._asked or asked_at < max(self._hubs[hub].recreated_at, self._asked[item]):
            return
        self._asked[item] = asked_at
        known = self._hubs[hub].partitions
        before = known.get(properties.partition_id)
        if (size := mean_size(before, properties)) is not None:
            sizes = self._hubs[hub].sizes
            sizes[properties.partition_id] = (size + sizes.get(properties.partition_id, size)) / 2
        if before is not None:
            grown = properties.last_enqueued_sequence_number - before.last_enqueued_sequence_number
            if grown < 0 and asked_at < self._shown.get(item, float("-inf")) + SETTLE_SECONDS:
                return
            if grown:
                self._active[item] = self.news_at = now
            if grown < 0 or properties.beginning_sequence_number < before.beginning_sequence_number:
                self._asked[Item(hub, None)] = float("-inf")
        known[properties.partition_id] = properties

    def shown(self, hub: int, partition_id: str, number: int, newest: LastEnqueued | None, now: float) -> bool:
        """Record an event that a link has shown, and what it stated of the partition's newest one;
        return whether that is news."""
        item = Item(hub, partition_id)
        before = self._hubs[hub].partitions.get(partition_id)
        if before is None:
            return False
        last, offset, moment = number, before.last_enqueued_offset, before.last_enqueued_time
        if newest is not None and newest.sequence_number is not None and newest.sequence_number >= number:
            last = newest.sequence_number
            offset, moment = newest.offset or offset, newest.enqueued_time or moment
        if last <= before.last_enqueued_sequence_number:
            return False
        self._active[item] = self._shown[item] = self.news_at = now
        self._hubs[hub].partitions[partition_id] = replace(
            before,
            beginning_sequence_number=number if before.is_empty else before.beginning_sequence_number,
            last_enqueued_sequence_number=last,
            last_enqueued_offset=offset,
            last_enqueued_time=moment,
            is_empty=False,
        )
        return True

    def created_at(self, hub: int) -> datetime | None:
        """Return when a hub was created, as far as it is known."""
        properties = self._hubs[hub].properties
        return None if properties is None else properties.created_at

    def ends(self, hub: int) -> dict[str, int]:
        """Return the number of the next event of each partition of a hub."""
        return {each: found.last_enqueued_sequence_number + 1 for each, found in self._hubs[hub].partitions.items()}

    def unknown(self, moment: float) -> list[Item]:
        """Return what was not asked for since a moment: hubs first."""
        return sorted((each for each, asked in self._asked.items() if asked < moment), key=_order)

    def pace(self, rate: int, interval: float | None, now: float) -> LookPace:
        """Return how to make requests so that everything is read once per interval, if the rate allows it.

        Otherwise the requests are as many as the rate allows, and partitions that lately had events get more of them.

        Args:
            interval: Seconds; None for a rate that follows from when the last event was seen.
        """
        if interval is None:
            rate = min(rate, RECENT_RATE if now < self.news_at + RECENT_SECONDS else IDLE_RATE)
            count = min(len(self), math.ceil(rate * 0.6))
            return LookPace(count, count / rate, count // 6)
        if len(self) <= rate * interval:
            rounds = math.ceil(len(self) / rate)
            return LookPace(math.ceil(len(self) / rounds), interval / rounds)
        count = min(len(self), rate, max(ROUND, math.ceil(rate * interval)))
        return LookPace(count, count / rate, count // ACTIVE_SHARE)

    def next(self, count: int, now: float, *, active: int = 0, without: Collection[Item] = ()) -> list[Item]:
        """Return what to read next: what was not read for the longest time, and partitions that lately had events.

        Args:
            active: How many such partitions are among it, at most, even if it is not their turn.
        """
        wanted = self._asked.keys() - without
        if count >= len(wanted):
            return sorted(wanted, key=_order)
        turns = sorted(wanted, key=lambda each: (self._asked[each], _order(each)))
        lately = now - ACTIVE_SECONDS
        first = [each for each in turns if self._active.get(each, float("-inf")) >= lately][:active]
        return first + [each for each in turns if each not in first][: count - len(first)]

    def stalest(self, items: Collection[Item], now: float) -> Item:
        """Return what was not read for the longest time of some items; a hub that was not for long precedes them."""
        before = now - _HUB_SECONDS * len(self._hubs)
        hubs = [each for each in items if each.partition_id is None and self._asked[each] <= before]
        return min(hubs or items, key=lambda each: (self._asked[each], _order(each)))

    def facts(self, hub: int) -> HubFacts:
        """Return what is known of a hub. All of it must have been read."""
        known = self._hubs[hub]
        assert known.properties is not None
        ids = sorted(known.partitions, key=partition_order)
        partitions = tuple(known.partitions[each] for each in ids)
        usual = sum(known.sizes.values()) / len(known.sizes) if known.sizes else USUAL_SIZE
        sizes = {
            each.partition_id: known.sizes.get(each.partition_id, usual) for each in partitions if _has_bytes(each)
        }
        return HubFacts(known.properties, partitions, sizes)

    def snapshots(self, names: Iterable[str]) -> Mapping[str, HubSnapshot]:
        """Return the sequence numbers of all hubs, by name in lower case."""
        return {name.lower(): self.facts(index).snapshot(name) for index, name in enumerate(names)}


def mean_size(before: PartitionProperties | None, now: PartitionProperties) -> float | None:
    """Return the mean size in bytes of the events that a partition got between two answers.

    An offset is a position in the partition's log, in bytes, save in namespaces with geo-replication. A partition's
    first answer gives the mean over its whole life.

    Returns:
        None if there were none, or if the offsets are not in bytes.
    """
    if not _has_bytes(now) or (before is not None and not _has_bytes(before)):
        return None
    # The offset is where the newest event begins: the first answer does not have that event's own size.
    number, offset = 0, 0
    if before is not None and before.last_enqueued_sequence_number >= 0:
        number, offset = before.last_enqueued_sequence_number, int(before.last_enqueued_offset)
    events, size = now.last_enqueued_sequence_number - number, int(now.last_enqueued_offset) - offset
    return size / events if events > 0 and size > 0 else None


def _has_bytes(properties: PartitionProperties) -> bool:
    return properties.last_enqueued_offset.removeprefix("-").isdecimal()


def _order(item: Item) -> tuple[bool, int, tuple[int, str]]:
    """Return the key that sorts hubs before partitions."""
    return item.partition_id is not None, item.hub, partition_order(item.partition_id or "")
