"""Where a partition begins, and which of its events are gone: decided from record, checkpoint and what the hub says.

A start is kept as text: ``offset>-1``, ``offset>@latest``, ``number>=5``, ``time>2024-01-01T00:00:00+00:00``; the
operator is ``>=`` where the event at the place itself is read too.
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
"""What follows where events are gone: go on at the oldest event kept, at the end of the partition, or not at all."""

ASK_PAUSE = 1.0
ASK_PAUSE_MAX = 60.0
"""Seconds between two questions about gaps in a partition whose last gap was no loss; doubled each time, up to this."""

_NUMBERED = re.compile(r"[0-9]{1,9}")


def starts_text(configured: EventPosition | Mapping[str, EventPosition]) -> dict[str, str]:
    """Write the starts that a host is configured with, as a record keeps them: by partition id, "" for the others."""
    if isinstance(configured, EventPosition):
        return {"": str(configured)}
    return {"": str(EventPosition.earliest())} | {
        partition_id: str(position) for partition_id, position in configured.items()
    }


# ----------------------------------------------------------------------------------------------------- the record


class Record(Protocol):
    """A consumer group's record; see `eventpump.interfaces.ScopeRecord`."""

    @property
    def hub_created_at(self) -> datetime:
        """The hub that checkpoints belong to."""

    @property
    def partition_count(self) -> int:
        """Partitions with a number not below it were added later."""

    @property
    def starts(self) -> Mapping[str, str]:
        """By partition id, and "" for the others."""

    @property
    def reset_for(self) -> datetime | None:
        """The newer hub that checkpoints are being reset for."""

    @property
    def reset_partitions(self) -> frozenset[str]:
        """The partitions whose state belongs to that newer hub."""


def start_of(record: Record, partition_id: str) -> EventPosition:
    """Return where a partition without a checkpoint begins: one that was added later, at its beginning.

    Raises:
        ValueError: The record holds something else than starts.
    """
    if _NUMBERED.fullmatch(partition_id) and int(partition_id) >= record.partition_count:
        return EventPosition.earliest()
    text = record.starts.get(partition_id, record.starts.get(""))
    return EventPosition.earliest() if text is None else EventPosition.parse(text)


def hub_of(record: Record, partition_id: str) -> datetime:
    """Return when the hub was created that a partition's checkpoint, or its having none, belongs to."""
    if record.reset_for is not None and partition_id in record.reset_partitions:
        return record.reset_for
    return record.hub_created_at


@dataclass(frozen=True, slots=True)
class RecordChange:
    """What is new in a record; see `eventpump.interfaces.ScopeRecord`."""

    hub_created_at: datetime
    partition_count: int
    reset_for: datetime | None
    reset_partitions: frozenset[str]


def entered(
    record: Record, partition_ids: Collection[str], created_at: datetime, known: Collection[str], partition_count: int
) -> RecordChange | None:
    """Enter partitions whose state belongs to the hub created then; None where the record says so already.

    Call it only with a record that was read before the service was asked when the hub was created: a newer hub that
    the record speaks of would be forgotten.

    Args:
        known: Every partition that may have a checkpoint: those of the leases and those of the hub.
        partition_count: Of the hub now.
    """
    if all(hub_of(record, each) == created_at for each in partition_ids):
        return None
    before = record.reset_partitions if record.reset_for == created_at else frozenset[str]()
    listed = before | frozenset(partition_ids)
    if listed >= frozenset(known):
        # A partition that neither hub had at first is read from its beginning.
        return RecordChange(created_at, min(record.partition_count, partition_count), None, frozenset())
    return RecordChange(record.hub_created_at, record.partition_count, created_at, listed)


# ------------------------------------------------------------------------------------------------------ what is gone


class PartitionFacts(Protocol):
    """What the service says of a partition; see `eventpump.interfaces.PartitionProperties`."""

    @property
    def beginning_sequence_number(self) -> int:
        """Of the oldest event kept."""

    @property
    def last_enqueued_sequence_number(self) -> int:
        """Of the newest event there ever was; -1 where there was none."""

    @property
    def last_enqueued_offset(self) -> str:
        """Its offset."""

    @property
    def is_empty(self) -> bool:
        """Whether no event is kept."""


class TimedPartitionFacts(PartitionFacts, Protocol):
    """The same, with a time."""

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
    """The position lies behind the partition's newest event."""


@dataclass(frozen=True, slots=True)
class Loss:
    """Events that were to be read and are gone.

    Args:
        first_missing: The sequence number of the first of them.
        last_missing: That of the last; None where nobody knows, because their hub is gone.
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
            return f"retention has passed: sequence {numbers} gone"
        return f"the position lies beyond the partition's end: sequence {numbers} not there"

    def action(self, configured: OnDataLoss | None) -> OnDataLoss:
        """Return what follows.

        Args:
            configured: None for the default of this kind of loss.
        """
        if configured is not None:
            return configured
        return "earliest" if self.kind is LossKind.RETENTION else "fail"


def retained_from(facts: PartitionFacts) -> int:
    """Return the first sequence number that may still be read. Of an empty partition only what is still to come is."""
    return facts.last_enqueued_sequence_number + 1 if facts.is_empty else facts.beginning_sequence_number


def find_loss(stored: Checkpoint, facts: PartitionFacts | None, *, is_of_this_hub: bool) -> Loss | None:
    """Return what a reader that goes on after a checkpoint would miss; None where nothing.

    Args:
        facts: What the service says of the partition now; not needed where the checkpoint is of another hub.
    """
    if not is_of_this_hub:
        return Loss(LossKind.RECREATED, stored.sequence_number + 1, None)
    assert facts is not None
    if stored.sequence_number > facts.last_enqueued_sequence_number:
        return Loss(LossKind.BEYOND_END, facts.last_enqueued_sequence_number + 1, stored.sequence_number)
    first_kept = retained_from(facts)
    if stored.sequence_number + 1 < first_kept:
        return Loss(LossKind.RETENTION, stored.sequence_number + 1, first_kept - 1)
    return None


def at_end(partition_id: str, facts: PartitionFacts) -> Checkpoint:
    """Return the checkpoint that pins the end of a partition: what comes after its newest event is read.

    By that event's offset and number, although retention may have dropped it; before the first event ever, by "-1" and
    -1. Never a checkpoint without an offset, or at number 0 before event 0: other readers of the store would take the
    first for none, and skip event 0 after the second.
    """
    number = facts.last_enqueued_sequence_number
    return Checkpoint(partition_id, START_OFFSET if number < 0 else facts.last_enqueued_offset, max(number, -1))


def at_beginning(partition_id: str) -> Checkpoint:
    """Return the checkpoint that stands before a partition's first event."""
    return Checkpoint(partition_id, START_OFFSET, -1)


def end_position(start: EventPosition, facts: PartitionFacts) -> EventPosition:
    """Pin `@latest` to what the partition's end is now. Inclusive, its newest event is read too, where it is kept."""
    assert start.offset == LATEST_OFFSET
    pinned = at_end("", facts)
    return EventPosition.at_offset(pinned.offset, inclusive=start.inclusive and not facts.is_empty)


def first_number(start: EventPosition, facts: TimedPartitionFacts | None) -> int | None:
    """Return the sequence number that reading from a position begins with; None where only reading tells.

    Args:
        start: The position.
        facts: What the service says of the partition; None where it was not asked.
    """
    if start.sequence_number is not None:
        return start.sequence_number + (not start.inclusive)
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


# --------------------------------------------------------------------------------------------------- while reading


class NumberWatch:
    """The sequence numbers of what is read, batch by batch: which are missing, and when to ask whether they are lost.

    Numbers may be missing rightly: compaction drops single events. Only the service knows whether the partition begins
    behind them now. In a partition whose gaps were no loss that is asked less and less often, and gaps that come
    between two questions are judged together.

    Args:
        expected: The number of the next event; None where that is not known.
    """

    __slots__ = ("_ask_at", "_pause", "expected", "first_missing", "last_missing")

    def __init__(self, expected: int | None) -> None:
        self.expected = expected
        self.first_missing: int | None = None
        """The first of the missing numbers that are not judged yet."""
        self.last_missing = -1
        """The last of them."""
        self._ask_at = 0.0
        self._pause = 0.0

    def passed(self, first: int, last: int, count: int) -> bool:
        """Record a batch by its first and last number. False where numbers are missing, now or from before."""
        expected = self.expected
        self.expected = last + 1
        if first == expected and last - first + 1 == count and self.first_missing is None:
            return True
        if expected is not None and first > expected:
            self._missing(expected, first - 1)
        return last - first + 1 == count and self.first_missing is None

    def look_into(self, numbers: Collection[int]) -> None:
        """Record what is missing between the numbers of a batch."""
        before: int | None = None
        for number in numbers:
            if before is not None and number > before + 1:
                self._missing(before + 1, number - 1)
            before = number

    def is_due(self, now: float) -> bool:
        """Return whether the service should be asked now.

        Args:
            now: Seconds on any steady clock.
        """
        return self.first_missing is not None and now >= self._ask_at

    def not_answered(self, now: float) -> None:
        """Record that the service did not answer: it is asked again later."""
        self._ask_at = now + ASK_PAUSE

    def judge(self, facts: PartitionFacts, now: float) -> Loss | None:
        """Return what is lost of the missing numbers, by what the service says after they were missed; forget them."""
        first, last = self.first_missing, self.last_missing
        assert first is not None
        self.first_missing, self.last_missing = None, -1
        first_kept = retained_from(facts)
        if first_kept <= first:
            self._pause = min(max(self._pause * 2, ASK_PAUSE), ASK_PAUSE_MAX)
            self._ask_at = now + self._pause
            return None
        self._pause = 0.0
        self._ask_at = now
        return Loss(LossKind.RETENTION, first, min(last, first_kept - 1))

    def _missing(self, first: int, last: int) -> None:
        if self.first_missing is None:
            self.first_missing = first
        self.first_missing = min(first, self.first_missing)
        self.last_missing = max(last, self.last_missing)
