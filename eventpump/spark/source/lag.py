"""The lag of a query behind its hubs, and the rates at which events arrive and are read, computed from its progress.
Pure."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter

from eventpump.eventhubs.partitions import partition_order
from eventpump.spark.source.offsets import CREATED, RESERVED

_MAX_OBSERVATIONS = 512


@dataclass(frozen=True, slots=True)
class PartitionLag:
    """The lag of a query in one partition, after a batch.

    Args:
        position: The sequence number of the first unread event; 0 if the hub was recreated after the batch.
        events: How many sequence numbers lie between `position` and the partition's end.
        seconds: How long the event at `position` has been in the partition, as far as the query has observed it grow; 0
            if nothing is left to read.
        is_lower_bound: The event was there before the query first looked, so `seconds` may be higher.
        arrival_rate: Events per second that the partition got since the end of the batch before, as far as the query
            has observed it grow; None if this is the first batch that the listener sees of it, or the hub was recreated
            since.
        read_rate: Events per second that the query has read since then; None likewise.
    """

    hub: str
    partition_id: str
    position: int
    events: int
    seconds: float
    is_lower_bound: bool
    arrival_rate: float | None = None
    read_rate: float | None = None


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure over all partitions."""

    min: float
    max: float
    avg: float


@dataclass(frozen=True, slots=True)
class QueryLag:
    """The lag of a query, after a batch.

    Args:
        query_id: Stays the same across restarts from a checkpoint.
        run_id: Identifies this run of the query.
        name: The query's name; None if it has none.
        time: When the batch ended, in seconds since the Unix epoch.
        partitions: The lag of each partition of all its eventpump sources; never empty.
    """

    query_id: str
    run_id: str
    name: str | None
    batch_id: int
    time: float
    partitions: tuple[PartitionLag, ...]

    @property
    def total(self) -> int:
        """Events behind, over all partitions."""
        return sum(each.events for each in self.partitions)

    @property
    def events(self) -> Spread:
        """Events behind, per partition."""
        return _spread(self.partitions, attrgetter("events"))

    @property
    def seconds(self) -> Spread:
        """Seconds behind, per partition."""
        return _spread(self.partitions, attrgetter("seconds"))

    @property
    def arrival_rate(self) -> float | None:
        """Events per second that arrived since the batch before, over all partitions of which it is known; None if it
        is known of none."""
        return _total(each.arrival_rate for each in self.partitions)

    @property
    def read_rate(self) -> float | None:
        """Events per second that were read since the batch before, over all partitions of which it is known; None if it
        is known of none."""
        return _total(each.read_rate for each in self.partitions)

    def describe(self) -> str:
        """Return it as one line of text."""
        events, seconds, arrival_rate, read_rate = self.events, self.seconds, self.arrival_rate, self.read_rate
        rates = ""
        if arrival_rate is not None and read_rate is not None:
            rates = f", {arrival_rate:.1f} arrive and {read_rate:.1f} are read per second"
        mark = ">=" if any(each.is_lower_bound for each in self.partitions) else ""
        return (
            f"query {self.name or self.query_id}, batch {self.batch_id}: {self.total} events behind{rates}; "
            f"per partition min {events.min:.0f}, avg {events.avg:.0f}, max {events.max:.0f}; "
            f"seconds min {seconds.min:.1f}, avg {seconds.avg:.1f}, max {mark}{seconds.max:.1f}"
        )


def _spread(partitions: tuple[PartitionLag, ...], figure: Callable[[PartitionLag], float]) -> Spread:
    figures = [figure(each) for each in partitions]
    return Spread(min(figures), max(figures), sum(figures) / len(figures))


def _total(rates: Iterable[float | None]) -> float | None:
    known = [each for each in rates if each is not None]
    return sum(known) if known else None


@dataclass(frozen=True, slots=True)
class Offsets:
    """A position as the source writes it into a query's progress.

    Args:
        created: When each hub was created, as text, by its name in lower case; without those where it is not known.
    """

    numbers: Mapping[tuple[str, str], int]
    created: Mapping[str, str]


def parse_offsets(text: str | None) -> Offsets | None:
    """Parse offsets as the source writes them into a query's progress; None if the source did not write them."""
    try:
        offsets = json.loads(text or "null")
    except ValueError:  # Spark reports a missing offset as "None"
        return None
    if not isinstance(offsets, dict):
        return None
    found: dict[tuple[str, str], int] = {}
    for hub, partitions in offsets.items():
        if hub in RESERVED:
            continue
        if not isinstance(partitions, dict):
            return None
        for partition_id, number in partitions.items():
            if not (partition_id.isascii() and partition_id.isdigit()) or type(number) is not int:
                return None
            found[hub, partition_id] = number
    created = offsets.get(CREATED, {})
    if not found or not isinstance(created, dict):
        return None
    return Offsets(found, {hub.lower(): str(moment) for hub, moment in created.items()})


@dataclass(slots=True)
class _Growth:
    """The observed ends of a partition, with the times of observation. Both only increase.

    Args:
        created: When the hub was created, as text; None if that is not known.
        batch: When the last batch ended, its position, and the partition's end then.
    """

    created: str | None = None
    times: list[float] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    batch: tuple[float, int, int] | None = None

    def note(self, time: float, end: int) -> None:
        if self.ends and end < self.ends[-1]:  # the hub was recreated
            self.times, self.ends = [], []
        if len(self.ends) > 1 and self.ends[-1] == self.ends[-2] == end:
            self.times[-1] = time
            return
        if len(self.ends) == _MAX_OBSERVATIONS:
            del self.times[1::2], self.ends[1::2]
        self.times.append(time)
        self.ends.append(end)

    def rates(self, time: float, position: int, end: int) -> tuple[float | None, float | None]:
        """Record a batch;
        return the events per second that arrived and were read since the one before, None if not known."""
        before, self.batch = self.batch, (time, position, end)
        if before is None:
            return None, None
        since, position_then, end_then = before
        if time <= since or position < position_then or end < end_then:
            return None, None
        return (end - end_then) / (time - since), (position - position_then) / (time - since)

    def forget_before(self, position: int) -> None:
        """Drop the observations that are not needed for the event at a position and later ones."""
        drop = bisect_right(self.ends, position) - 1
        if drop > 0:
            del self.times[:drop], self.ends[:drop]

    def arrival(self, position: int) -> tuple[float, bool]:
        """Return when the event at a position came, as estimated, and whether it was there before the first
        observation."""
        after = bisect_right(self.ends, position)
        assert after < len(self.ends)
        if after == 0:
            return self.times[0], True
        begin, end = self.ends[after - 1], self.ends[after]
        since, until = self.times[after - 1], self.times[after]
        # Events are assumed to have been enqueued evenly between two observations.
        return since + (until - since) * (position - begin + 1) / (end - begin), False


class LagLedger:
    """Records how the partitions of running queries grow and are read, and computes lag and rates from it."""

    def __init__(self) -> None:
        self._runs: dict[str, dict[tuple[int, str, str], _Growth]] = {}

    def progressed(
        self, run_id: str, time: float, sources: Iterable[tuple[str | None, str | None]]
    ) -> tuple[PartitionLag, ...]:
        """Record the end of a batch.

        Args:
            time: When it ended, in seconds since the Unix epoch.
            sources: For each eventpump source, the end of the batch and the latest offsets, as it wrote them.
        """
        found: list[PartitionLag] = []
        grown = self._runs.setdefault(run_id, {})
        for number, (end, latest) in enumerate(sources):
            positions = parse_offsets(end)
            if positions is None:
                continue
            known = parse_offsets(latest) or Offsets({}, {})
            # The end has the checkpoint's spelling of the hub, the latest offsets have the option's.
            ends = {(hub.lower(), partition_id): last for (hub, partition_id), last in known.numbers.items()}
            for (hub, partition_id), position in positions.numbers.items():
                place = hub.lower(), partition_id
                of_position = positions.created.get(place[0])
                created = known.created.get(place[0], of_position)
                if of_position not in {None, created}:
                    # The hub was recreated after the batch, and the next one begins with its first events.
                    position = 0
                growth = grown.setdefault((number, *place), _Growth(created))
                if growth.created != created:
                    growth = grown[number, *place] = _Growth(created)
                last = max(position, ends.get(place, position))
                growth.note(time, last)
                seconds, is_lower_bound = 0.0, False
                if last > position:
                    arrived, is_lower_bound = growth.arrival(position)
                    seconds = max(0.0, time - arrived)
                growth.forget_before(position)
                rates = growth.rates(time, position, last)
                found.append(
                    PartitionLag(hub, partition_id, position, last - position, seconds, is_lower_bound, *rates)
                )
        return tuple(sorted(found, key=lambda each: (each.hub, partition_order(each.partition_id))))

    def idled(self, run_id: str, time: float) -> None:
        """Record that a query looked for new events and found none."""
        for growth in self._runs.get(run_id, {}).values():
            growth.note(time, growth.ends[-1])

    def ended(self, run_id: str) -> None:
        """Forget a query."""
        self._runs.pop(run_id, None)
