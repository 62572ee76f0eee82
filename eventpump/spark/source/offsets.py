"""Planning of a query in sequence numbers: offsets, positions, limits, data loss, and the tasks' shares. Pure.

Numbers are sequence numbers of a hub partition. An offset holds, per partition, the next number to read; for a
partition that it does not name, that is 0. So a partition that was added to the hub while the query was running is read
completely.
"""

from __future__ import annotations

import heapq
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Final, TypeVar

from eventpump.errors import ConfigurationError, ConsumerDisconnectedError, DataLossError
from eventpump.eventhubs.events import LATEST_OFFSET, START_OFFSET, EventPosition
from eventpump.eventhubs.partitions import partition_order
from eventpump.interfaces import PartitionProperties
from eventpump.spark.connection import RETRY_TIMEOUT

_T = TypeVar("_T")

MAX_READERS: Final = 5
"""How many readers without an owner level the service lets read a partition in one consumer group."""

ROWS_PER_TASK: Final = 4096
"""Events of a range from which on it has a task of its own, and of small ranges that share one. A Python task costs 20
to 30 ms whatever it reads, and an event about 0.01 ms: with this many, a batch of any size costs at most about twice
what its events cost."""

MAX_RANGES_PER_TASK: Final = 32
"""The most ranges of one task if their number is chosen: each has a link, and up to 1 MiB is received ahead on it."""

KEEP_LINKS: Final = 10.0
"""The most seconds for which an exclusive link stays open after its task, for the next one."""

LEAST_KEEP_LINKS: Final = 1.0
"""The fewest: with many triggers a second, one that is late must not cost all links."""

REFUSED_PATIENCE: Final = KEEP_LINKS + 2.0
"""Seconds for which a shared reader tries again while an exclusive one has its partition: the links that a query left
behind are closed by then."""

FIRST_START: Final = "(start)"
"""The key under which the offset of a query's first batch keeps that batch's start. No hub can have this name."""


# ------------------------------------------------------------------------------------------------- what a task reads


@dataclass(frozen=True, slots=True)
class SequenceRange:
    """The events of one hub partition with sequence numbers from `start` to before `end`. Numbers may have gaps."""

    partition_id: str
    start: int
    end: int

    @property
    def size(self) -> int:
        """How many events it has, if there are no gaps."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class SourcePartition:
    """The input of one task: ranges of one hub, each of a different hub partition.

    Args:
        keep_links: Seconds for which its exclusive links stay open for the next task.
    """

    ranges: tuple[SequenceRange, ...]
    keep_links: float = KEEP_LINKS


@dataclass(frozen=True, slots=True)
class ReceiveOptions:
    """How a task receives its ranges.

    Args:
        owner_level: The epoch of an exclusive reader; None shares the partition.
        prefetch_count: The most events of one range that are received ahead.
        receiver_timeout: Seconds without an event after which the service is asked whether the remaining events are
            gone.
        retry_timeout: Seconds for which a service that cannot be reached is tried again.
        fail_on_data_loss: Raise `DataLossError` for numbers that are gone; otherwise log a warning and continue.
        cache_memory: How many bytes of the last ranges a worker keeps in memory; 0 disables the cache.
        cache_disk: How many bytes of the last ranges a worker keeps in its spill file.
        decode: The import name of the codecs that decode bodies; None to return them as they are.
    """

    consumer_group: str = "$Default"
    owner_level: int | None = 0
    prefetch_count: int = 4000
    receiver_timeout: float = 60.0
    retry_timeout: float = RETRY_TIMEOUT
    fail_on_data_loss: bool = True
    cache_memory: int = 64 * 1024 * 1024
    cache_disk: int = 512 * 1024 * 1024
    decode: str | None = None

    def disconnected(self, error: ConsumerDisconnectedError, hub: str, partition_id: str) -> ConsumerDisconnectedError:
        """Return the error for a reader that another one keeps from its partition, with what the user can do."""
        place = f"partition {partition_id} of hub {hub}, consumer group {self.consumer_group}"
        if self.owner_level is None:
            problem = (
                f"{place}, is read exclusively, and was not free within {REFUSED_PATIENCE:g} s: probably by a query of "
                "your own that is running. Read with another consumerGroup, or stop the query, or run the query with "
                "useExclusiveReceiver=false"
            )
        else:
            problem = (
                f"{place}, was taken over by another exclusive reader: probably by another query of your own. Each "
                "query needs its own consumerGroup, or useExclusiveReceiver=false"
            )
        return ConsumerDisconnectedError(
            f"{problem} (the service: {error.description})",
            condition=error.condition,
            entity=error.entity,
            tracking_id=error.tracking_id,
        )


def keep_links_for(interval: float | None) -> float:
    """Return the seconds for which exclusive links stay open after their task.

    Args:
        interval: Seconds between the last two batches of the query; None if there was only one.
    """
    return KEEP_LINKS if interval is None else min(KEEP_LINKS, max(LEAST_KEEP_LINKS, 2 * interval))


# --------------------------------------------------------------------------------------------------- what the hub has


@dataclass(frozen=True, slots=True)
class PartitionBounds:
    """The numbers that a partition holds: from `earliest` to before `latest`."""

    earliest: int
    latest: int

    @classmethod
    def of(cls, properties: PartitionProperties) -> PartitionBounds:
        """Create it from the service's answer. An empty partition begins at the number of its next event."""
        latest = properties.last_enqueued_sequence_number + 1
        return cls(latest if properties.is_empty else properties.beginning_sequence_number, latest)


@dataclass(frozen=True, slots=True)
class HubSnapshot:
    """The bounds of a hub's partitions at one moment.

    Args:
        created_at: When the hub was created; a different time means that the hub was recreated.
        bounds: Per partition id, in numeric order.
    """

    hub: str
    created_at: datetime
    bounds: Mapping[str, PartitionBounds]

    @classmethod
    def of(cls, hub: str, created_at: datetime, partitions: Iterable[PartitionProperties]) -> HubSnapshot:
        """Create it from the service's answers."""
        bounds = {each.partition_id: PartitionBounds.of(each) for each in partitions}
        return cls(hub, created_at, in_order(bounds))

    @property
    def latest(self) -> HubOffset:
        """The offset after all events that it held."""
        return HubOffset(self.hub, {each: bounds.latest for each, bounds in self.bounds.items()})


def in_order(values: Mapping[str, _T]) -> dict[str, _T]:
    """Return a mapping by partition id in numeric order."""
    return {each: values[each] for each in sorted(values, key=partition_order)}


# ---------------------------------------------------------------------------------------------------------- offsets


@dataclass(frozen=True, slots=True)
class HubOffset:
    """A query's position in a hub, as in Spark's checkpoint: `{"<hub>": {"0": n, "1": n}}`.

    The format is that of Microsoft's Scala connector. Spark compares offsets as text, so a hub and its partitions are
    always written the same way. Spark stores the end of each batch, and uses it as the start of the next; for the first
    batch it asks again after a restart, and would get another answer. So the first batch's offset keeps its start too.

    Args:
        following: Per partition id, the next number to read; in numeric order.
        first_start: Where the query's first batch starts; only in the offset of that batch.
    """

    hub: str
    following: Mapping[str, int]
    first_start: Mapping[str, int] | None = None

    def to_json(self) -> dict[str, dict[str, int]]:
        """Return it as JSON values."""
        document = {self.hub: in_order(self.following)}
        if self.first_start is not None:
            document[FIRST_START] = in_order(self.first_start)
        return document

    @classmethod
    def from_json(cls, hub: str, document: object) -> HubOffset:
        """Create it from JSON values.

        Raises:
            ConfigurationError: The document is not an offset, or one of another hub.
        """
        if not isinstance(document, dict):
            raise _bad_offset("an offset must be a JSON object")
        names = [name for name in document if name != FIRST_START]
        if len(names) != 1 or not isinstance(names[0], str):
            raise _bad_offset("an offset must name exactly one hub")
        if names[0].lower() != hub.lower():
            raise _bad_offset(f"it belongs to hub {names[0]!r}, but this query reads {hub!r}")
        first_start = document.get(FIRST_START)
        return cls(names[0], _numbers(document[names[0]]), None if first_start is None else _numbers(first_start))


def _bad_offset(problem: str) -> ConfigurationError:
    return ConfigurationError("checkpoint", problem)


def _numbers(value: object) -> dict[str, int]:
    if not isinstance(value, dict) or not all(
        isinstance(each, str) and type(number) is int and number >= 0 for each, number in value.items()
    ):
        raise _bad_offset("an offset must have the next sequence number to read for each partition id")
    return in_order(value)


# -------------------------------------------------------------------------------------------------------- positions


def number_of(
    position: EventPosition,
    properties: PartitionProperties,
    *,
    option: str,
    is_end: bool = False,
    must_exist: bool = True,
) -> int | None:
    """Return the number of a position: the first to read or, for an end, the first not to be read.

    "-1" and "@latest" are the partition's beginning and end. An inclusive position includes the event at it, as a start
    and as an end.

    Args:
        option: The user's option, for errors.
        must_exist: Raise for a sequence number that the partition has not reached yet; otherwise it is the partition's
            end.

    Returns:
        None if the number can only be found by reading events; see `lookup_of`.

    Raises:
        ConfigurationError: A sequence number that the partition has not reached yet.
    """
    bounds = PartitionBounds.of(properties)
    if position.sequence_number is not None:
        number = position.sequence_number + (1 if position.inclusive == is_end else 0)
        if number > bounds.latest and must_exist:
            raise ConfigurationError(
                option,
                f"partition {properties.partition_id} ends at sequence number {bounds.latest - 1}, before "
                f"{position.sequence_number}",
            )
        return max(0, min(number, bounds.latest))
    if position.offset == START_OFFSET:
        return bounds.earliest
    if position.offset == LATEST_OFFSET:
        return bounds.latest
    return bounds.latest if is_behind(position, properties, is_end=is_end) else None


def is_behind(position: EventPosition, properties: PartitionProperties, *, is_end: bool = False) -> bool:
    """Return whether an offset or a time is known to be after all events of the partition.

    False for the partition's two ends and for sequence numbers, which have their own rules.
    """
    if position.sequence_number is not None or position.offset in {START_OFFSET, LATEST_OFFSET}:
        return False
    wants_itself = position.inclusive != is_end
    if properties.is_empty:
        return True
    if position.enqueued_time is not None:
        newest = properties.last_enqueued_time
        return position.enqueued_time > newest or (position.enqueued_time == newest and not wants_itself)
    return position.offset == properties.last_enqueued_offset and not wants_itself


def lookup_of(position: EventPosition, *, is_end: bool = False) -> EventPosition:
    """Return the position to attach at: the first event received has the number that `number_of` could not
    determine."""
    return replace(position, inclusive=not position.inclusive) if is_end else position


# ----------------------------------------------------------------------------------------------------------- losses


@dataclass(frozen=True, slots=True)
class Loss:
    """Unread events of a query that are gone.

    Args:
        problem: A description for the user.
    """

    hub: str
    partition_id: str
    problem: str

    def error(self) -> DataLossError:
        """Return the error with which the query fails, unless failOnDataLoss is false."""
        return DataLossError(
            self.hub,
            self.partition_id,
            f"{self.problem}. The query stops because failOnDataLoss is true; set it to false to continue with the "
            "events that still exist",
        )


def _is_gone(hub: str, partition_id: str, start: int, earliest: int) -> Loss:
    return Loss(
        hub,
        partition_id,
        f"the next event to read has sequence number {start}, but the partition now begins at {earliest}: "
        "retention has removed the events in between",
    )


def _went_back(hub: str, partition_id: str, number: int, latest: int) -> Loss:
    return Loss(
        hub,
        partition_id,
        f"sequence number {number} was reached before, but the partition now ends at {latest - 1}: "
        "the hub was recreated",
    )


def _is_missing(hub: str, partition_id: str) -> Loss:
    return Loss(hub, partition_id, "the hub no longer has it: the hub was recreated")


# --------------------------------------------------------------------------------------------------------- triggers


@dataclass(frozen=True, slots=True)
class TriggerLimits:
    """The size of one batch.

    Args:
        max_events: The most events, but at least one of each partition that has any; None for no limit.
        min_events: The number of new events before which there is no batch.
        max_delay: Seconds after which there is a batch in spite of `min_events`.
    """

    max_events: int | None = None
    min_events: int | None = None
    max_delay: float = 900.0


@dataclass(frozen=True, slots=True)
class BatchEnd:
    """The end of the next batch.

    Args:
        offset: The end; equal to the batch's start, the same object, if there is nothing to read.
        losses: The lost events before the end.
    """

    offset: HubOffset
    losses: tuple[Loss, ...] = ()


class StreamPlanner:
    """Decides where the batches of one run of a query end.

    Used by one thread. Times are seconds on a clock that never goes back.
    """

    def __init__(self, limits: TriggerLimits) -> None:
        self._limits = limits
        self._last_batch: float | None = None
        self._target: HubSnapshot | None = None
        self._first_start: HubOffset | None = None
        self._created_at: datetime | None = None

    @property
    def first_start(self) -> HubOffset | None:
        """Where the query starts, once this is decided in this run: Spark asks several times."""
        return self._first_start

    def begin(self, offset: HubOffset) -> None:
        """Set where a new query starts."""
        self._first_start = offset

    def aim(self, target: HubSnapshot) -> None:
        """Let the batches end at a snapshot's end (`Trigger.AvailableNow`)."""
        self._target = target

    def end(self, start: HubOffset, snapshot: HubSnapshot, *, is_limited: bool, now: float) -> BatchEnd:
        """Return where the batch that begins at `start` ends.

        Args:
            is_limited: Whether the limit of events applies; a trigger may request all events.
        """
        losses = self._recreation(snapshot)
        effective, gone = _effective_start(start, snapshot)
        losses += gone
        backlog = {each: max(0, self._latest(each, snapshot) - number) for each, number in effective.items()}
        if not losses and self._waits(sum(backlog.values()), now):
            backlog = dict.fromkeys(backlog, 0)
        limit = self._limits.max_events if is_limited else None
        shares = backlog if limit is None else share(backlog, limit)
        following = {
            each: number + shares[each]
            for each, number in effective.items()
            if each in start.following or number + shares[each] > 0
        }
        first = self._first_start
        if first is not None and start == first:
            # There is a batch even if there is nothing to read, because it stores the start in the checkpoint.
            offset = HubOffset(start.hub, following, first.following)
        elif following == start.following:
            return BatchEnd(start, tuple(losses))
        else:
            offset = HubOffset(start.hub, following)
        self._last_batch = now
        return BatchEnd(offset, tuple(losses))

    def _latest(self, partition_id: str, snapshot: HubSnapshot) -> int:
        latest = snapshot.bounds[partition_id].latest
        if self._target is None:
            return latest
        target = self._target.bounds.get(partition_id)
        return 0 if target is None else min(latest, target.latest)

    def _waits(self, events: int, now: float) -> bool:
        least = self._limits.min_events
        if least is None or self._target is not None or events >= least:
            return False
        if self._last_batch is None:
            self._last_batch = now
        return now - self._last_batch < self._limits.max_delay

    def _recreation(self, snapshot: HubSnapshot) -> list[Loss]:
        """Check whether the hub was recreated since the last snapshot: its numbers alone may not show it."""
        before, self._created_at = self._created_at, snapshot.created_at
        if before is None or before == snapshot.created_at:
            return []
        partition_id = next(iter(snapshot.bounds), "0")
        return [
            Loss(
                snapshot.hub,
                partition_id,
                f"the hub was recreated: its creation time is now {snapshot.created_at.isoformat()}, and was "
                f"{before.isoformat()} before",
            )
        ]


def _effective_start(start: HubOffset, snapshot: HubSnapshot) -> tuple[dict[str, int], list[Loss]]:
    """Move a start into the bounds of the partitions.

    Returns:
        Per partition of the hub, where reading continues; and the losses.
    """
    effective: dict[str, int] = {}
    losses = [_is_missing(start.hub, each) for each in start.following if each not in snapshot.bounds]
    for partition_id, bounds in snapshot.bounds.items():
        number = start.following.get(partition_id, 0)
        if number > bounds.latest:
            losses.append(_went_back(start.hub, partition_id, number - 1, bounds.latest))
            number = bounds.earliest
        elif number < bounds.earliest:
            losses.append(_is_gone(start.hub, partition_id, number, bounds.earliest))
            number = bounds.earliest
        effective[partition_id] = number
    return effective, losses


def share(backlog: Mapping[str, int], limit: int) -> dict[str, int]:
    """Split a limit in proportion to backlog.

    The shares add up to the limit, or to the backlog where that is less. Each partition with a backlog gets at least
    one event, beyond the limit if necessary, so that every partition advances.
    """
    total = sum(backlog.values())
    if total <= limit:
        return dict(backlog)
    lagging = [each for each, events in backlog.items() if events]
    shares = {each: min(1, events) for each, events in backlog.items()}
    # Each partition gets one event; the rest of the limit is split in proportion to the remaining backlogs, and the
    # remainder of rounding goes to the largest fractions.
    if limit <= len(lagging):
        return shares
    left, of = limit - len(lagging), total - len(lagging)
    for each in lagging:
        shares[each] += (backlog[each] - 1) * left // of
    rounded = limit - sum(shares.values())
    by_fraction = sorted(lagging, key=lambda each: (-((backlog[each] - 1) * left % of), partition_order(each)))
    for each in by_fraction[:rounded]:
        shares[each] += 1
    return shares


# --------------------------------------------------------------------------------------------------------- batches


def batch_ranges(start: HubOffset, end: HubOffset, snapshot: HubSnapshot) -> tuple[list[SequenceRange], list[Loss]]:
    """Return the ranges of a batch, by partition number, and their losses.

    The same offsets give the same ranges, however often the batch is planned, as long as no event of it is gone. A
    partition whose end is before its start belongs to a recreated hub, and is read from its beginning.
    """
    if start == end:  # how Spark before 4.2 reports its position to a restarted query
        return [], []
    begun = start.following if end.first_start is None else end.first_start
    ranges: list[SequenceRange] = []
    losses: list[Loss] = []
    for partition_id, stop in in_order(end.following).items():
        first = begun.get(partition_id, 0)
        if first == stop:
            continue
        bounds = snapshot.bounds.get(partition_id)
        if bounds is None:
            losses.append(_is_missing(end.hub, partition_id))
            continue
        if stop > bounds.latest:
            losses.append(_went_back(end.hub, partition_id, stop - 1, bounds.latest))
        elif first > stop:
            losses.append(_went_back(end.hub, partition_id, first - 1, bounds.latest))
            first = bounds.earliest
        elif first < bounds.earliest:
            losses.append(_is_gone(end.hub, partition_id, first, bounds.earliest))
        first, stop = max(first, bounds.earliest), min(stop, bounds.latest)
        if first < stop:
            ranges.append(SequenceRange(partition_id, first, stop))
    return ranges, losses


def plan_tasks(
    hub: str,
    ranges: Sequence[SequenceRange],
    *,
    min_partitions: int | None = None,
    partitions_per_task: int | None = None,
    keep_links: float = KEEP_LINKS,
) -> list[SourcePartition]:
    """Assign each task its share: a range, several small ones, or a part of a large one.

    Spark assigns tasks in this order to free executors. Hubs begin the list with different partitions, by the hash of
    their names, so that queries with few events do not all load the same executor.

    Args:
        min_partitions: Split the largest ranges until there are this many, each into at most `MAX_READERS` parts.
        partitions_per_task: How many ranges one task reads at the same time; None to choose the number of tasks by the
            events: see `tasks_needed`.
        keep_links: Seconds for which exclusive links stay open after their task.
    """
    if min_partitions is not None:
        shares: list[tuple[SequenceRange, ...]] = [(each,) for each in split_ranges(ranges, min_partitions)]
    elif partitions_per_task is not None:
        shares = group_ranges(ranges, -(-len(ranges) // partitions_per_task), partitions_per_task)
    else:
        shares = group_ranges(ranges, tasks_needed(ranges), MAX_RANGES_PER_TASK)
    seed = zlib.crc32(hub.lower().encode())
    count = max((int(each.partition_id) + 1 for each in ranges), default=1)

    def key(ranges: tuple[SequenceRange, ...]) -> tuple[int, int]:
        return (seed + int(ranges[0].partition_id)) % count, ranges[0].start

    return [SourcePartition(each, keep_links) for each in sorted(shares, key=key)]


def tasks_needed(ranges: Sequence[SequenceRange]) -> int:
    """Return how many tasks read ranges: one for each large range, and as many for the small ones as have
    `ROWS_PER_TASK` events.

    The planner of a Python source does not know how many tasks Spark can run at a time. With this rule it does not need
    to: more tasks would cost more than they could save.
    """
    small = [each.size for each in ranges if each.size < ROWS_PER_TASK]
    by_events = len(ranges) - len(small) + -(-sum(small) // ROWS_PER_TASK)
    return max(by_events, -(-len(ranges) // MAX_RANGES_PER_TASK))


def split_ranges(ranges: Sequence[SequenceRange], at_least: int) -> list[SequenceRange]:
    """Split ranges, the largest parts first, until there are `at_least` parts or no range can be split further."""
    parts = dict.fromkeys(ranges, 1)
    largest = [(-each.size, index) for index, each in enumerate(ranges)]
    heapq.heapify(largest)
    while largest and sum(parts.values()) < at_least:
        _, index = heapq.heappop(largest)
        each = ranges[index]
        if parts[each] < min(MAX_READERS, each.size):
            parts[each] += 1
            heapq.heappush(largest, (-(each.size // parts[each]), index))
    return [
        SequenceRange(
            each.partition_id,
            each.start + each.size * part // count,
            each.start + each.size * (part + 1) // count,
        )
        for each, count in parts.items()
        for part in range(count)
    ]


def group_ranges(ranges: Sequence[SequenceRange], count: int, at_most: int) -> list[tuple[SequenceRange, ...]]:
    """Distribute ranges over groups that are about equally large, the largest range first.

    Args:
        ranges: The ranges.
        count: The number of groups, at least as many as `at_most` allows and at most as many as there are ranges.
        at_most: The most ranges of one group.
    """
    groups: list[list[SequenceRange]] = [[] for _ in range(count)]
    loads = [(0, index) for index in range(count)]
    for each in sorted(ranges, key=lambda each: (-each.size, partition_order(each.partition_id))):
        load, index = heapq.heappop(loads)
        groups[index].append(each)
        if len(groups[index]) < at_most:
            heapq.heappush(loads, (load + each.size, index))
    return [tuple(sorted(group, key=lambda each: partition_order(each.partition_id))) for group in groups]
