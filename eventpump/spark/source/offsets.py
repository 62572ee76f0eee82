"""Planning of a query in sequence numbers: offsets, positions, limits, data loss, and the tasks' shares. Pure.

Numbers are sequence numbers of a hub partition. An offset holds, per partition, the next number to read. A partition
that it does not name was added to the hub or chosen later, and is read from the first event that there is.
"""

from __future__ import annotations

import heapq
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, Final, TypeVar

from eventpump.core.backoff import UNLIMITED, RetryPolicy
from eventpump.errors import ConfigurationError, ConsumerDisconnectedError, DataLossError
from eventpump.eventhubs.events import LATEST_OFFSET, START_OFFSET, EventPosition
from eventpump.eventhubs.partitions import partition_order
from eventpump.interfaces import PartitionProperties
from eventpump.spark.connection import RETRY_TIMEOUT

_T = TypeVar("_T")

MAX_READERS: Final = 5
"""How many readers without an owner level the service lets read a partition in one consumer group."""

ROWS_PER_TASK: Final = 20_000
"""The fewest events of a task, unless a batch has fewer: a Python task costs 20 to 30 ms whatever it reads, and an
event about 0.01 ms."""

TASKS_PER_SLOT: Final = 2
"""The most tasks for each slot: while one waits for its rows, another has the cores."""

KEEP_LINKS: Final = 10.0
"""The most seconds for which an exclusive link stays open after its task, for the next one."""

LEAST_KEEP_LINKS: Final = 1.0
"""The fewest: with many triggers a second, one that is late must not cost all links."""

REFUSED_PATIENCE: Final = KEEP_LINKS + 2.0
"""Seconds for which a shared reader tries again while an exclusive one has its partition: the links that a query left
behind are closed by then."""

FIRST_START: Final = "(start)"
"""The key under which the offset of a query's first batch keeps that batch's start. No hub can have this name."""

CREATED: Final = "(created)"
"""The key under which an offset keeps when each of its hubs was created."""

RESERVED: Final = frozenset({FIRST_START, CREATED})
"""The members of an offset that are not hubs."""


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
    hub: int = 0


@dataclass(frozen=True, slots=True)
class ReceiveOptions:
    """How a task receives its ranges.

    Args:
        owner_level: The epoch of an exclusive reader; None shares the partition.
        prefetch_count: The most events of one range that are received ahead.
        receiver_timeout: Seconds without an event after which the service is asked whether the remaining events are
            gone.
        retry_timeout: Seconds for which a service that cannot be reached is tried again.
        retry: The delays before it is, and before a failed link is opened again. `UNLIMITED` if the user gives none:
            then links have their own.
        fail_on_data_loss: Raise `DataLossError` for numbers that are gone; otherwise log a warning and continue.
        decode: The import name of the codecs that decode bodies; None to return them as they are.
    """

    consumer_group: str = "$Default"
    owner_level: int | None = 0
    prefetch_count: int = 4000
    receiver_timeout: float = 60.0
    retry_timeout: float = RETRY_TIMEOUT
    retry: RetryPolicy = UNLIMITED
    fail_on_data_loss: bool = True
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
    """Return the seconds for which exclusive links stay open after their task;
    batches are an interval apart, if that is known."""
    return KEEP_LINKS if interval is None else min(KEEP_LINKS, max(LEAST_KEEP_LINKS, 2 * interval))


# --------------------------------------------------------------------------------------------------- what the hub has


@dataclass(frozen=True, slots=True)
class PartitionBounds:
    """The numbers that a partition holds: from `earliest` to before `latest`;
    the mean size of its events is in bytes."""

    earliest: int
    latest: int
    mean_size: float | None = None

    @classmethod
    def of(cls, properties: PartitionProperties, mean_size: float | None = None) -> PartitionBounds:
        """Create it from the service's answer. An empty partition begins at the number of its next event."""
        latest = properties.last_enqueued_sequence_number + 1
        return cls(latest if properties.is_empty else properties.beginning_sequence_number, latest, mean_size)


@dataclass(frozen=True, slots=True)
class HubSnapshot:
    """The bounds of a hub's partitions at one moment.

    Args:
        created_at: When the hub was created; a different time means that the hub was recreated.
    """

    hub: str
    created_at: datetime
    bounds: Mapping[str, PartitionBounds]

    @classmethod
    def of(
        cls,
        hub: str,
        created_at: datetime,
        partitions: Iterable[PartitionProperties],
        sizes: Mapping[str, float] = MappingProxyType({}),
    ) -> HubSnapshot:
        """Create it from the service's answers, and the mean sizes of the partitions' events, where they are known."""
        bounds = {each.partition_id: PartitionBounds.of(each, sizes.get(each.partition_id)) for each in partitions}
        return cls(hub, created_at, in_order(bounds))

    @property
    def latest(self) -> HubOffset:
        """The offset after all events that it had."""
        ends = {each: bounds.latest for each, bounds in self.bounds.items()}
        return HubOffset(self.hub, ends, created_at=self.created_at)


def in_order(values: Mapping[str, _T]) -> dict[str, _T]:
    """Return a mapping by partition id in numeric order."""
    return {each: values[each] for each in sorted(values, key=partition_order)}


# ---------------------------------------------------------------------------------------------------------- offsets


@dataclass(frozen=True, slots=True)
class HubOffset:
    """A query's position in one hub.

    Spark stores the end of each batch, and uses it as the start of the next; for the first batch it asks again after a
    restart, and would get another answer. So the first batch's offset keeps its start too, and so does the first one
    after a hub was added to the query or recreated, or a partition was added whose first event has another number than
    0.

    Args:
        following: Per partition id, the next number to read; in numeric order.
        first_start: Where the batch that ends here starts; None if that is the offset of the batch before, with 0 for
            partitions that it does not name.
        created_at: When the hub was created whose numbers these are; None if it is not known, as in offsets of the
            Scala connector.
    """

    hub: str
    following: Mapping[str, int]
    first_start: Mapping[str, int] | None = None
    created_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class SourceOffset:
    """A query's position in its hubs, as in Spark's checkpoint: `{"<hub>": {"0": n, "1": n}}`, with one member per hub.

    For one hub the format is that of Microsoft's Scala connector. Spark compares offsets as text, so hubs and
    partitions are always written the same way, whatever the order in which the user names them. Where a batch keeps its
    start in a hub (see `HubOffset`), a further member has it: `{"(start)": {"0": n}}` if there is only this hub, and
    `{"(start)": {"<hub>": {"0": n}}}` if there are several. Another one has when each hub was created, so that a
    recreated hub is not read at an old position: `{"(created)": {"<hub>": "2030-01-01T00:00:00+00:00"}}`.

    Args:
        hubs: By the hub's name in lower case, in alphabetical order.
    """

    hubs: Mapping[str, HubOffset]

    @classmethod
    def of(cls, hubs: Iterable[HubOffset]) -> SourceOffset:
        """Create it from the offsets of several hubs."""
        return cls({each.hub.lower(): each for each in sorted(hubs, key=lambda each: each.hub.lower())})

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        document: dict[str, Any] = {each.hub: in_order(each.following) for each in self.hubs.values()}
        starts = {each.hub: in_order(each.first_start) for each in self.hubs.values() if each.first_start is not None}
        if starts:
            document[FIRST_START] = starts if len(self.hubs) > 1 else next(iter(starts.values()))
        created = {
            each.hub: each.created_at.astimezone(UTC).isoformat()
            for each in self.hubs.values()
            if each.created_at is not None
        }
        if created:
            document[CREATED] = created
        return document

    @classmethod
    def from_json(cls, document: object) -> SourceOffset:
        """Create it from JSON values. Raises `ConfigurationError` if the document is not an offset of this source."""
        if not isinstance(document, dict):
            raise _bad_offset("an offset must be a JSON object")
        names = [name for name in document if name not in RESERVED]
        if not names or not all(isinstance(name, str) for name in names):
            raise _bad_offset("an offset must name a hub")
        starts = document.get(FIRST_START)
        if starts is None:
            starts = {}
        elif not isinstance(starts, dict) or (len(names) > 1 and not starts.keys() <= set(names)):
            raise _bad_offset("an offset must have the start of each hub's first batch by hub")
        elif len(names) == 1 and not isinstance(starts.get(names[0]), dict):
            starts = {names[0]: starts}
        created = document.get(CREATED, {})
        if not isinstance(created, dict) or not created.keys() <= set(names):
            raise _bad_offset("an offset must have the creation time of each hub by hub")
        found = cls.of(
            HubOffset(
                name,
                _numbers(document[name]),
                _numbers(starts[name]) if name in starts else None,
                _moment(created[name]) if name in created else None,
            )
            for name in names
        )
        if len(found.hubs) < len(names):
            raise _bad_offset("an offset must name a hub once")
        return found


def _bad_offset(problem: str) -> ConfigurationError:
    return ConfigurationError("checkpoint", problem)


def _numbers(value: object) -> dict[str, int]:
    if not isinstance(value, dict) or not all(
        isinstance(each, str) and type(number) is int and number >= 0 for each, number in value.items()
    ):
        raise _bad_offset("an offset must have the next sequence number to read for each partition id")
    return in_order(value)


def _moment(value: object) -> datetime:
    try:
        moment = datetime.fromisoformat(value)  # type: ignore[arg-type] # what is not text is a TypeError
    except (TypeError, ValueError):
        moment = None
    if moment is None or moment.tzinfo is None:
        raise _bad_offset("an offset must have creation times in the form 2030-01-01T00:00:00+00:00")
    return moment.astimezone(UTC)


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
class QueryLoss:
    """Unread events of a query that are gone, and whether that shows that the hub was recreated."""

    hub: str
    partition_id: str
    problem: str
    is_other_hub: bool = False

    def error(self) -> DataLossError:
        """Return the error with which the query fails, unless failOnDataLoss is false."""
        remedy = (
            "set it to false to continue with the first events of the new hub, or begin another query with a new "
            "checkpoint"
            if self.is_other_hub
            else "set it to false to continue with the events that still exist"
        )
        return DataLossError(
            self.hub,
            self.partition_id,
            f"{self.problem}. The query stops because failOnDataLoss is true, and will stop again when it is "
            f"restarted; {remedy}",
        )


def _is_gone(hub: str, partition_id: str, start: int, earliest: int) -> QueryLoss:
    return QueryLoss(
        hub,
        partition_id,
        f"the next event to read has sequence number {start}, but the partition now begins at {earliest}: "
        "retention has removed the events in between",
    )


def _went_back(hub: str, partition_id: str, number: int, latest: int) -> QueryLoss:
    return QueryLoss(
        hub,
        partition_id,
        f"sequence number {number} was reached before, but the partition now ends at {latest - 1}: "
        "the hub was recreated",
        is_other_hub=True,
    )


def _is_recreated(snapshot: HubSnapshot, before: datetime) -> QueryLoss:
    return QueryLoss(
        snapshot.hub,
        next(iter(snapshot.bounds), "0"),
        f"the hub was recreated: its creation time is now {snapshot.created_at.isoformat()}, and was "
        f"{before.isoformat()} when the query read it. What was unread of the former hub is gone, in all partitions",
        is_other_hub=True,
    )


def _is_left_out(offset: HubOffset) -> QueryLoss:
    return QueryLoss(
        offset.hub,
        next(iter(offset.following), "0"),
        "the checkpoint has this hub, and the option hub no longer names it: its unread events would be left out",
    )


def _is_missing(hub: str, partition_id: str) -> QueryLoss:
    return QueryLoss(hub, partition_id, "the hub no longer has it: the hub was recreated", is_other_hub=True)


# --------------------------------------------------------------------------------------------------------- triggers


@dataclass(frozen=True, slots=True)
class TriggerLimits:
    """The size of one batch.

    Args:
        max_events: The most events, but at least one of each partition that has any; None for no limit.
        min_events: The number of new events before which there is no batch.
        max_delay: Seconds after which there is a batch in spite of `min_events`.
        max_bytes: About how many bytes, by the mean sizes of events; None for no limit.
    """

    max_events: int | None = None
    min_events: int | None = None
    max_delay: float = 900.0
    max_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class BatchEnd:
    """The end of the next batch, the same object as its start if there is nothing to read; and the losses before it."""

    offset: SourceOffset
    losses: tuple[QueryLoss, ...] = ()


class StreamPlanner:
    """Decides where the batches of one run of a query end.

    Used by one thread. Times are seconds on a clock that never goes back.
    """

    def __init__(self, limits: TriggerLimits) -> None:
        self._limits = limits
        self._last_batch: float | None = None
        self._target: dict[str, HubSnapshot] | None = None
        self._begun: dict[str, HubOffset] = {}
        self._created_at: dict[str, datetime] = {}

    @property
    def begun(self) -> Mapping[str, HubOffset]:
        """Where hubs start that this run has begun, by name in lower case: Spark asks several times."""
        return self._begun

    def begin(self, offset: HubOffset) -> None:
        """Set where the query starts in a hub that its checkpoint does not have."""
        self._begun[offset.hub.lower()] = offset

    def aim(self, target: Mapping[str, HubSnapshot]) -> None:
        """Let the batches end at the snapshots' ends (`Trigger.AvailableNow`).

        Where a hub is recreated after that, they end at the first ends that the planner gets to know of the new one.
        """
        self._target = dict(target)

    def end(
        self, start: SourceOffset, snapshots: Mapping[str, HubSnapshot], *, is_limited: bool, now: float
    ) -> BatchEnd:
        """Return where the batch that begins at `start` ends.

        A hub of the snapshots that `start` does not have is one that was added to the query; it must have been begun.

        Args:
            snapshots: Of all hubs of the query, by name in lower case.
            is_limited: Whether the limits apply; a trigger may request all events.
        """
        losses: list[QueryLoss] = [_is_left_out(each) for name, each in start.hubs.items() if name not in snapshots]
        starts: dict[str, HubOffset] = {}
        effective: dict[_Place, int] = {}
        recreated: set[str] = set()
        for name, snapshot in snapshots.items():
            begin = starts[name] = start.hubs.get(name) or self._begun[name]
            numbers, gone, is_recreated = self._effective_start(name, begin, snapshot)
            losses += gone
            if is_recreated:
                recreated.add(name)
            effective |= {(name, each): number for each, number in numbers.items()}
            if self._target and name in self._target and self._target[name].created_at != snapshot.created_at:
                self._target[name] = snapshot
        backlog = {each: max(0, self._latest(each, snapshots) - number) for each, number in effective.items()}
        if not losses and self._waits(sum(backlog.values()), now):
            backlog = dict.fromkeys(backlog, 0)
        shares = self._limited(backlog, snapshots) if is_limited else backlog
        offsets = []
        is_new = starts.keys() != start.hubs.keys()
        is_initial = start == SourceOffset.of(self._begun.values())
        for name, begin in starts.items():
            following = {
                partition_id: number + shares[hub, partition_id]
                for (hub, partition_id), number in effective.items()
                if hub == name and (partition_id in begin.following or number + shares[hub, partition_id] > 0)
            }
            # There is a batch even if there is nothing to read, because it stores the start in the checkpoint.
            is_first = is_initial or name not in start.hubs
            is_new = is_new or is_first or name in recreated or following != begin.following
            first_start: dict[str, int] | None
            if name in recreated:
                first_start = {each: effective[name, each] for each in following}
            else:
                added = {each: effective[name, each] for each in following if each not in begin.following}
                first_start = {**begin.following, **added} if is_first or any(added.values()) else None
            offsets.append(HubOffset(begin.hub, following, first_start, snapshots[name].created_at))
        if not is_new:
            return BatchEnd(start, tuple(losses))
        self._last_batch = now
        return BatchEnd(SourceOffset.of(offsets), tuple(losses))

    def is_full(self, start: SourceOffset, snapshots: Mapping[str, HubSnapshot]) -> bool:
        """Return whether the limits leave events of the snapshots for later, if the batch begins at `start`.

        Not if anything else is to be decided first: a hub that is new to the query or was recreated, or a loss.
        """
        backlog: dict[_Place, int] = {}
        for name, snapshot in snapshots.items():
            begin = start.hubs.get(name)
            if begin is None or (begin.created_at or self._created_at.get(name)) != snapshot.created_at:
                return False
            numbers, losses = _effective_start(begin, snapshot)
            if losses:
                return False
            for each, number in numbers.items():
                backlog[name, each] = max(0, self._latest((name, each), snapshots) - number)
        if not start.hubs.keys() <= snapshots.keys():
            return False
        return sum(self._limited(backlog, snapshots).values()) < sum(backlog.values())

    def _limited(self, backlog: Mapping[_Place, int], snapshots: Mapping[str, HubSnapshot]) -> Mapping[_Place, int]:
        """Return each partition's share of the backlog within the limits.

        Raises:
            ConfigurationError: The sizes of a partition's events are not known, and the limit is in bytes.
        """
        limits = self._limits
        shares = backlog if limits.max_events is None else share(backlog, limits.max_events, _place_order)
        if limits.max_bytes is None:
            return shares
        sizes: dict[_Place, float] = {}
        for place, events in shares.items():
            hub, partition_id = place
            size = snapshots[hub].bounds[partition_id].mean_size
            if events and size is None:
                raise ConfigurationError(
                    "maxBytesPerTrigger",
                    f"the sizes of events in partition {partition_id} of hub {snapshots[hub].hub} are not known: its "
                    "offsets are not positions in bytes. Use maxEventsPerTrigger",
                )
            sizes[place] = size or 1.0
        if sum(events * sizes[each] for each, events in shares.items()) <= limits.max_bytes:
            return shares  # converted to bytes and back, they would be rounded down
        in_bytes = share(
            {each: round(events * sizes[each]) for each, events in shares.items()}, limits.max_bytes, _place_order
        )
        return {each: min(events, max(1, int(in_bytes[each] / sizes[each]))) for each, events in shares.items()}

    def _latest(self, place: _Place, snapshots: Mapping[str, HubSnapshot]) -> int:
        hub, partition_id = place
        latest = snapshots[hub].bounds[partition_id].latest
        if self._target is None:
            return latest
        target = self._target[hub].bounds.get(partition_id) if hub in self._target else None
        return 0 if target is None else min(latest, target.latest)

    def _waits(self, events: int, now: float) -> bool:
        least = self._limits.min_events
        if least is None or self._target is not None or events >= least:
            return False
        if self._last_batch is None:
            self._last_batch = now
        return now - self._last_batch < self._limits.max_delay

    def _effective_start(
        self, name: str, start: HubOffset, snapshot: HubSnapshot
    ) -> tuple[dict[str, int], list[QueryLoss], bool]:
        """Move a start into what the hub holds.

        A recreated hub is read from its beginning, in every partition: some of its numbers may have been reached before
        by chance. It is recognized by the creation time in the start. If that has none, by what this run has seen
        before, and in its first look by the numbers.
        """
        seen, self._created_at[name] = self._created_at.get(name), snapshot.created_at
        before = start.created_at or seen
        numbers, losses = _effective_start(start, snapshot)
        if before is None:
            is_recreated = any(each.is_other_hub for each in losses)
        elif is_recreated := before != snapshot.created_at:
            losses = [_is_recreated(snapshot, before), *(each for each in losses if each.is_other_hub)]
        if is_recreated:
            numbers = {each: bounds.earliest for each, bounds in snapshot.bounds.items()}
        return numbers, losses, is_recreated


_Place = tuple[str, str]
"""A hub's name in lower case, and a partition id."""


def _place_order(place: _Place) -> tuple[str, tuple[int, str]]:
    return place[0], partition_order(place[1])


def _effective_start(start: HubOffset, snapshot: HubSnapshot) -> tuple[dict[str, int], list[QueryLoss]]:
    """Move a start into the bounds of the partitions; return where reading continues in each, and the losses."""
    effective: dict[str, int] = {}
    losses = [_is_missing(start.hub, each) for each in start.following if each not in snapshot.bounds]
    for partition_id, bounds in snapshot.bounds.items():
        number = start.following.get(partition_id, bounds.earliest)
        if number > bounds.latest:
            losses.append(_went_back(start.hub, partition_id, number - 1, bounds.latest))
            number = bounds.earliest
        elif number < bounds.earliest:
            losses.append(_is_gone(start.hub, partition_id, number, bounds.earliest))
            number = bounds.earliest
        effective[partition_id] = number
    return effective, losses


def share(
    backlog: Mapping[_T, int],
    limit: int,
    order: Callable[[_T], Any] = partition_order,  # type: ignore[assignment]
) -> dict[_T, int]:
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
    by_fraction = sorted(lagging, key=lambda each: (-((backlog[each] - 1) * left % of), order(each)))
    for each in by_fraction[:rounded]:
        shares[each] += 1
    return shares


# --------------------------------------------------------------------------------------------------------- batches


def source_ranges(
    start: SourceOffset, end: SourceOffset, snapshots: Mapping[str, HubSnapshot]
) -> tuple[dict[str, list[SequenceRange]], list[QueryLoss]]:
    """Return the ranges of a batch, by hub in lower case, and their losses.

    Args:
        snapshots: Of the query's hubs, by name in lower case. A hub of the batch that is not among them is a loss, if
            the batch has events of it.
    """
    if start == end:  # how Spark before 4.2 reports its position to a restarted query
        return {}, []
    ranges: dict[str, list[SequenceRange]] = {}
    losses: list[QueryLoss] = []
    for name, stop in end.hubs.items():
        begin = start.hubs.get(name) or HubOffset(stop.hub, {})
        snapshot = snapshots.get(name)
        if snapshot is not None:
            ranges[name], found = batch_ranges(begin, stop, snapshot)
            losses += found
        elif stop.following != (begin.following if stop.first_start is None else stop.first_start):
            losses.append(_is_left_out(stop))
    return ranges, losses


def batch_ranges(
    start: HubOffset, end: HubOffset, snapshot: HubSnapshot
) -> tuple[list[SequenceRange], list[QueryLoss]]:
    """Return the ranges of a batch in one hub, by partition number, and their losses.

    The same offsets give the same ranges, however often the batch is planned, as long as no event of it is gone. Of a
    batch of a hub that was recreated since, nothing is read: the same numbers are other events. A partition whose end
    is before its start belongs to a recreated hub, and is read from its beginning.
    """
    begun = start.following if end.first_start is None else end.first_start
    ranges: list[SequenceRange] = []
    losses: list[QueryLoss] = []
    if end.created_at is not None and end.created_at != snapshot.created_at:
        is_empty = all(begun.get(each, 0) == stop for each, stop in end.following.items())
        return [], [] if is_empty else [_is_recreated(snapshot, end.created_at)]
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
    max_tasks: int | None = None,
    keep_links: float = KEEP_LINKS,
    index: int = 0,
) -> list[SourcePartition]:
    """Assign each task its share: a range, several small ones, or a part of a large one.

    Spark assigns tasks in this order to free executors. Hubs begin the list with different partitions, by the hash of
    their names, so that queries with few events do not all load the same executor.

    Args:
        min_partitions: Split the largest ranges until there are this many, each into at most `MAX_READERS` parts.
        partitions_per_task: How many ranges one task reads at the same time; None to choose the number of tasks by the
            events, one for `ROWS_PER_TASK` of them.
        max_tasks: The most tasks if their number is chosen; None for no limit.
    """
    if min_partitions is not None:
        shares: list[tuple[SequenceRange, ...]] = [(each,) for each in split_ranges(ranges, min_partitions)]
    elif partitions_per_task is not None:
        shares = group_ranges(ranges, -(-len(ranges) // partitions_per_task), partitions_per_task)
    else:
        small = [each.size for each in ranges if each.size < ROWS_PER_TASK]
        count = max(1, len(ranges) - len(small) + sum(small) // ROWS_PER_TASK) if ranges else 0
        count = min(count, max_tasks or count)
        shares = group_ranges(ranges, count, len(ranges))
        while count > 1 and min(sum(each.size for each in group) for group in shares) < ROWS_PER_TASK:
            count -= 1
            shares = group_ranges(ranges, count, len(ranges))
    seed = zlib.crc32(hub.lower().encode())
    count = max((int(each.partition_id) + 1 for each in ranges), default=1)

    def key(ranges: tuple[SequenceRange, ...]) -> tuple[int, int]:
        return (seed + int(ranges[0].partition_id)) % count, ranges[0].start

    return [SourcePartition(each, keep_links, index) for each in sorted(shares, key=key)]


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
