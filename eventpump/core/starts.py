"""Where a partition begins, and which of its events are gone: decided from record, checkpoint and what the hub says.

A start is kept as text: ``offset>-1``, ``offset>@latest``, ``number>=5``, ``time>2024-01-01T00:00:00+00:00``; the
operator is ``>=`` if the event at the position itself is read too.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, Protocol, TypeAlias

from eventpump.eventhubs.events import LATEST_OFFSET, START_OFFSET, Checkpoint, EventPosition

OnDataLoss: TypeAlias = Literal["earliest", "latest", "fail"]
"""What happens if events are gone: continue at the oldest available event, at the partition's end, or fail."""

ASK_PAUSE = 1.0
ASK_PAUSE_MAX = 60.0
"""The longest time in seconds between two checks of gaps in a partition whose last gap was not a loss; doubled each
time."""

NO_NUMBER = -(2**63)
"""The sequence number of a checkpoint that another library wrote without one. It is read at its offset."""

_NUMBERED = re.compile(r"[0-9]{1,9}")


def starts_text(configured: EventPosition | Mapping[str, EventPosition]) -> dict[str, str]:
    """Return a host's configured starts in the form of a record: by partition id, "" for the others."""
    if isinstance(configured, EventPosition):
        return {"": str(configured)}
    return {"": str(EventPosition.earliest())} | {
        partition_id: str(position) for partition_id, position in configured.items()
    }


# ----------------------------------------------------------------------------------------------------- the record


class Starts(Protocol):
    """Where partitions without a checkpoint begin."""

    @property
    def partition_count(self) -> int:
        """Partitions with this number or a higher one were added later."""

    @property
    def starts(self) -> Mapping[str, str]:
        """By partition id, and "" for the others."""


class GroupRecord(Starts, Protocol):
    """A consumer group's record; see `eventpump.storage.scope_form.ScopeRecord`."""

    @property
    def hub_created_at(self) -> datetime:
        """The hub that checkpoints belong to."""

    @property
    def reset_for(self) -> datetime | None:
        """The newer hub that checkpoints are being reset for."""

    @property
    def reset_partitions(self) -> frozenset[str]:
        """The partitions whose state belongs to that newer hub."""


def start_of(record: Starts, partition_id: str) -> EventPosition:
    """Return where a partition without a checkpoint begins: an added one at its beginning. Raises `ValueError`."""
    if _NUMBERED.fullmatch(partition_id) and int(partition_id) >= record.partition_count:
        return EventPosition.earliest()
    text = record.starts.get(partition_id, record.starts.get(""))
    return EventPosition.earliest() if text is None else EventPosition.parse(text)


def hub_of(record: GroupRecord, partition_id: str) -> datetime:
    """Return the creation time of the hub to which a partition's checkpoint, or its absence, belongs."""
    if record.reset_for is not None and partition_id in record.reset_partitions:
        return record.reset_for
    return record.hub_created_at


@dataclass(frozen=True, slots=True)
class RecordChange:
    """The changed fields of a record; see `eventpump.storage.scope_form.ScopeRecord`."""

    hub_created_at: datetime
    partition_count: int
    reset_for: datetime | None
    reset_partitions: frozenset[str]


def entered(
    record: GroupRecord,
    partition_ids: Collection[str],
    created_at: datetime,
    known: Collection[str],
    partition_count: int,
) -> RecordChange | None:
    """Record partitions whose state belongs to the hub created at that time; None if the record already has them.

    Call it only with a record that was read before the hub's creation time was requested: otherwise a newer hub in the
    record would be lost.

    Args:
        known: Every partition that may have a checkpoint: those of the leases and those of the hub.
    """
    if all(hub_of(record, each) == created_at for each in partition_ids):
        return None
    before = record.reset_partitions if record.reset_for == created_at else frozenset[str]()
    listed = before | frozenset(partition_ids)
    if listed >= frozenset(known):
        # A partition that neither hub had initially is read from its beginning.
        return RecordChange(created_at, min(record.partition_count, partition_count), None, frozenset())
    return RecordChange(record.hub_created_at, record.partition_count, created_at, listed)


# ------------------------------------------------------------------------------------------------------ what is gone


class PartitionFacts(Protocol):
    """The service's properties of a partition; see `eventpump.interfaces.PartitionProperties`."""

    @property
    def beginning_sequence_number(self) -> int:
        """The number of the oldest available event."""

    @property
    def last_enqueued_sequence_number(self) -> int:
        """The number of the newest event there ever was; -1 if there was none."""

    @property
    def last_enqueued_offset(self) -> str:
        """That event's offset."""

    @property
    def is_empty(self) -> bool:
        """Whether no event is available."""


class TimedPartitionFacts(PartitionFacts, Protocol):
    """`PartitionFacts`, and the time of the newest event."""

    @property
    def last_enqueued_time(self) -> datetime:
        """When its newest event was enqueued."""


class LossKind(enum.Enum):
    """Why events are gone."""

    RETENTION = "retention"
    """The hub has dropped them before they were read."""
    RECREATED = "hub recreated"
    """The hub was deleted and recreated; the position is one of the previous hub."""
    BEYOND_END = "beyond the end"
    """The position is after the partition's newest event."""


@dataclass(frozen=True, slots=True)
class Loss:
    """Unread events that are gone.

    Args:
        first_missing: The sequence number of the first.
        last_missing: That of the last; None if it is unknown, because their hub is gone.
    """

    kind: LossKind
    first_missing: int
    last_missing: int | None

    def describe(self) -> str:
        """Return which events are gone, and why, in words."""
        if self.last_missing is None:
            return f"the hub was deleted and recreated: the events from number {self.first_missing} on are gone with it"
        if self.first_missing == self.last_missing:
            numbers = f"number {self.first_missing} is"
        else:
            numbers = f"numbers {self.first_missing} to {self.last_missing} are"
        if self.kind is LossKind.RETENTION:
            return f"retention has removed unread events: sequence {numbers} gone"
        return f"the position is beyond the partition's end: sequence {numbers} not there"

    def action(self, configured: OnDataLoss | None) -> OnDataLoss:
        """Return the action to take.

        Args:
            configured: The user's option; None for the default of this kind of loss.
        """
        if configured is not None:
            return configured
        return "earliest" if self.kind is LossKind.RETENTION else "fail"


def retained_from(facts: PartitionFacts) -> int:
    """Return the first sequence number that can still be read; for an empty partition, that of its next event."""
    return facts.last_enqueued_sequence_number + 1 if facts.is_empty else facts.beginning_sequence_number


def loss_among(first: int, last: int | None, facts: PartitionFacts, through: int | None = None) -> Loss | None:
    """Return the loss among missing numbers; None if none of them is lost.

    Args:
        facts: The partition's properties, read after they were missed.
        through: A number that the partition had: if it ends before it now, it is another one.
    """
    first_kept, newest = retained_from(facts), facts.last_enqueued_sequence_number
    if first_kept > first:
        return Loss(LossKind.RETENTION, first, first_kept - 1 if last is None else min(last, first_kept - 1))
    return Loss(LossKind.BEYOND_END, newest + 1, through) if through is not None and through > newest else None


def find_loss(stored: Checkpoint, facts: PartitionFacts | None, *, is_of_this_hub: bool) -> Loss | None:
    """Return the loss of a reader that continues after a checkpoint, or None."""
    number = stored.sequence_number
    if not is_of_this_hub:
        return Loss(LossKind.RECREATED, max(number + 1, 0), None)
    if number == NO_NUMBER:
        return None
    assert facts is not None
    return loss_among(number + 1, None, facts, through=number)


def at_end(partition_id: str, facts: PartitionFacts) -> Checkpoint:
    """Return the checkpoint that pins the end of a partition: events after its newest one are read.

    It has that event's offset and number, although retention may have removed it; before the first event ever, "-1" and
    -1. It never lacks an offset, and is never at number 0 before event 0: other readers of the store would treat the
    former as no checkpoint, and skip event 0 after the latter.
    """
    number = facts.last_enqueued_sequence_number
    return Checkpoint(partition_id, START_OFFSET if number < 0 else facts.last_enqueued_offset, max(number, -1))


def at_beginning(partition_id: str) -> Checkpoint:
    """Return the checkpoint before a partition's first event."""
    return Checkpoint(partition_id, START_OFFSET, -1)


def end_position(start: EventPosition, facts: PartitionFacts) -> EventPosition:
    """Pin `@latest` to the partition's current end. If inclusive, its newest event is read too, if available."""
    assert start.offset == LATEST_OFFSET
    pinned = at_end("", facts)
    return EventPosition.at_offset(pinned.offset, inclusive=start.inclusive and not facts.is_empty)


def pinned_number(start: EventPosition) -> int | None:
    """Return the sequence number that a position names, as the first one to be read; None if it names none."""
    return None if start.sequence_number is None else start.sequence_number + (not start.inclusive)


def first_number(start: EventPosition, facts: TimedPartitionFacts | None) -> int | None:
    """Return the sequence number that reading from a position begins with; None if only reading can show it."""
    if start.sequence_number is not None:
        return pinned_number(start)
    if start.offset == START_OFFSET:
        return 0
    if facts is None:
        return None
    end = facts.last_enqueued_sequence_number + 1
    if facts.is_empty or start.offset == LATEST_OFFSET:
        return end
    if start.enqueued_time is not None:
        newest = facts.last_enqueued_time
        return end if start.enqueued_time > newest or (start.enqueued_time == newest and not start.inclusive) else None
    return end if start.offset == facts.last_enqueued_offset and not start.inclusive else None


def lag_after(stored: Checkpoint | None, start: EventPosition, facts: TimedPartitionFacts) -> int | None:
    """Return how many events of a partition are not processed, by the checkpoint; None if only reading can show it."""
    first = first_number(start, facts) if stored is None else stored.sequence_number + 1
    return None if first is None else max(0, facts.last_enqueued_sequence_number + 1 - max(first, retained_from(facts)))


# --------------------------------------------------------------------------------------------------- while reading


class NumberWatch:
    """Tracks the sequence numbers that are read: which are missing, and when to check whether they are lost.

    Gaps can be normal: compaction drops single events. Only the service knows whether the partition now begins after
    them. In a partition whose gaps were not losses, it is asked less and less often, and gaps between two requests are
    checked together.

    Args:
        through: A number that the partition had; None if none is known.
    """

    __slots__ = ("_ask_at", "_max_pause", "_pause", "expected", "first_missing", "last_missing", "through")

    def __init__(self, expected: int | None, *, through: int | None = None, max_pause: float = ASK_PAUSE_MAX) -> None:
        self.expected = expected
        self.through = through
        self.first_missing: int | None = None
        """The first of the missing numbers that were not checked yet."""
        self.last_missing = -1
        """The last of them."""
        self._ask_at = 0.0
        self._pause = 0.0
        self._max_pause = max_pause

    def passed(self, first: int, last: int, count: int) -> bool:
        """Record a batch by its first and last number. Return False if numbers are missing, now or from before."""
        expected, self.expected = self.expected, last + 1
        if expected is not None and first > expected:
            self.missed(expected, first - 1)
        return last - first + 1 == count and self.first_missing is None

    def look_into(self, numbers: Collection[int]) -> None:
        """Record the numbers that are missing within a batch."""
        before: int | None = None
        for number in numbers:
            if before is not None and number > before + 1:
                self.missed(before + 1, number - 1)
            before = number

    def is_due(self, now: float) -> bool:
        """Return whether the service should be asked now."""
        return self.first_missing is not None and now >= self._ask_at

    def not_answered(self, now: float) -> None:
        """Record that the service did not answer: it is asked again later."""
        self._ask_at = now + ASK_PAUSE

    def judge(self, facts: PartitionFacts, now: float) -> Loss | None:
        """Return the loss among the missing numbers, by properties that were read after they were missed; forget
        them."""
        first, last = self.first_missing, self.last_missing
        assert first is not None
        self.first_missing, self.last_missing = None, -1
        loss = loss_among(first, last, facts, self.through)
        self._pause = 0.0 if loss is not None else min(max(self._pause * 2, ASK_PAUSE), self._max_pause)
        self._ask_at = now + self._pause
        return loss

    def missed(self, first: int, last: int) -> None:
        """Record numbers that are missing, from the first to the last."""
        if self.first_missing is None:
            self.first_missing = first
        self.first_missing = min(first, self.first_missing)
        self.last_missing = max(last, self.last_missing)
