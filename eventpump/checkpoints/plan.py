"""Which checkpoints are to be written, and which are not, and why. Pure."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from types import MappingProxyType
from typing import Literal, TypeAlias

from eventpump.core.starts import at_end, retained_from
from eventpump.eventhubs.events import START_OFFSET, Checkpoint, EventPosition
from eventpump.interfaces import ConsumerScope, PartitionProperties
from eventpump.storage.checkpoints.stored import StoredCheckpoint
from eventpump.storage.checkpoints.writing import owned_by
from eventpump.texts import excerpt

Start: TypeAlias = Literal["earliest", "latest"] | int | datetime
"""Where a group begins after a reset: the oldest retained event, what arrives from now on, an event by its sequence
number, or the first event that was enqueued at a time or after it."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """An event has to be read, at a position, to find what a checkpoint needs of it."""

    position: EventPosition
    number: int | None = None


@dataclass(frozen=True, slots=True)
class Refused:
    """A checkpoint cannot be made, for this reason."""

    reason: str


def before_event(
    partition_id: str, start: Literal["earliest", "latest"] | int, facts: PartitionProperties
) -> Checkpoint | Wanted | Refused:
    """Return the checkpoint after which an event is the next one.

    Before the oldest retained event its offset is "-1", the start of the partition to every SDK. To have no checkpoint
    is not that: there each program begins where it is configured to, by default at the end in Python and JavaScript.

    Args:
        start: The sequence number of the event, or one of the ends of the partition.
    """
    first, last = retained_from(facts), facts.last_enqueued_sequence_number
    if start == "latest" or start == last + 1:
        return at_end(partition_id, facts)
    if start == "earliest" or start == first:
        return Checkpoint(partition_id, START_OFFSET, first - 1)
    assert isinstance(start, int)
    if start > last:
        return Refused(f"{start:,} is beyond its end: the next event will be {last + 1:,}")
    if start < first:
        return Refused(f"{start:,} is gone by retention: the oldest event is {first:,}")
    return Wanted(EventPosition.at_sequence_number(start - 1, inclusive=True), start - 1)


def at_time(moment: datetime, facts: PartitionProperties) -> Wanted | Literal["latest"]:
    """Return the event before which reading begins at a time: "latest" if none was enqueued then or later."""
    if facts.is_empty or moment > facts.last_enqueued_time:
        return "latest"
    return Wanted(EventPosition.at_enqueued_time(moment, inclusive=True))


def completed(
    partition_id: str, number: int | None, offset: str | None, facts: PartitionProperties
) -> Checkpoint | Wanted | Refused:
    """Return a stored position, which has a number, an offset or both, as a checkpoint, which has both."""
    last = facts.last_enqueued_sequence_number
    if number is not None and number > last:
        return Refused(f"{number:,} is beyond its end, {last:,}: the hub was recreated, or it is another hub's")
    if number is None:
        assert offset is not None
        if offset == facts.last_enqueued_offset and last >= 0:
            return at_end(partition_id, facts)
        if offset == START_OFFSET:
            return Checkpoint(partition_id, START_OFFSET, retained_from(facts) - 1)
        if last < 0:
            return Refused(f"offset {excerpt(offset)} is not one of it: it has never had an event")
        if facts.is_empty:
            return at_end(partition_id, facts)
        return Wanted(EventPosition.at_offset(offset, inclusive=True))
    if offset is not None:
        return Checkpoint(partition_id, offset, number)
    if number == last:
        return at_end(partition_id, facts)
    if number < retained_from(facts):
        return Checkpoint(partition_id, START_OFFSET, number)
    return Wanted(EventPosition.at_sequence_number(number, inclusive=True), number)


def of_event(partition_id: str, wanted: Wanted, number: int, offset: str) -> Checkpoint | Refused:
    """Return the checkpoint for which an event of this number and offset was read."""
    if wanted.number is not None and number != wanted.number:
        return Refused(f"the event {wanted.number:,} is gone: the next one is {number:,}")
    asked = wanted.position.offset
    if asked is not None and asked != offset:
        # That event is gone. The one that was found is the first to be processed.
        return Checkpoint(partition_id, asked, number - 1)
    return Checkpoint(partition_id, offset, number)


class ChangeAction(enum.StrEnum):
    """What a plan does in a partition."""

    WRITE = "write"
    """The checkpoint is replaced, created or removed."""
    KEEP = "unchanged"
    """It is there already."""
    REFUSE = "refused"
    """It is not written, for the reason that is beside it."""


@dataclass(frozen=True, slots=True)
class CheckpointChange:
    """What is planned for a partition.

    Args:
        partition_id: The partition.
        before: What the store has of it; None if that is nothing.
        after: The new checkpoint; None for none, or where it is not known.
        action: Whether it is written.
        reason: Why it is refused; None if it is not. Default: None.
    """

    partition_id: str
    before: StoredCheckpoint | None
    after: Checkpoint | None
    action: ChangeAction
    reason: str | None = None

    @property
    def moved(self) -> int | None:
        """By how many events it moves: below 0 they are processed again, above 0 skipped. None if that is not known."""
        number = None if self.before is None else self.before.sequence_number
        return None if number is None or self.after is None else self.after.sequence_number - number

    @property
    def is_forced(self) -> bool:
        """Whether it is written although a consumer owns the partition."""
        return self.action is ChangeAction.WRITE and self.before is not None and bool(self.before.is_owned)


@dataclass(frozen=True, slots=True)
class CheckpointPlan:
    """Which checkpoints of a consumer group are to be written.

    Args:
        scope: The consumer group.
        hub_created_at: When its hub was created.
        format: The form of the store.
        changes: One for each partition, in order.
        notes: What its reader should know, in sentences. Default: `()`.
        force: Whether partitions are written that consumers own. Default: False.
    """

    scope: ConsumerScope
    hub_created_at: datetime
    format: str
    changes: Sequence[CheckpointChange]
    notes: Sequence[str] = ()
    force: bool = False

    def having(self, action: ChangeAction) -> tuple[CheckpointChange, ...]:
        """Return the changes of an action.

        Args:
            action: The action.
        """
        return tuple(change for change in self.changes if change.action is action)


def plan_changes(
    wanted: Mapping[str, Checkpoint | Refused | None],
    stored: Mapping[str, StoredCheckpoint],
    unwritable: Mapping[str, str] = MappingProxyType({}),
    *,
    force: bool = False,
    forward_only: bool = False,
) -> list[CheckpointChange]:
    """Decide what is written in each partition.

    Args:
        wanted: The new checkpoint of each partition, None for none; or why there cannot be one.
        unwritable: Why the store does not take a partition's checkpoint, by partition id. Default: `{}`.
        force: Whether partitions that consumers own are written. Default: False.
        forward_only: Whether a checkpoint that is further on is kept. Default: False.
    """
    return [
        _change(partition_id, each, stored.get(partition_id), unwritable.get(partition_id), force, forward_only)
        for partition_id, each in wanted.items()
    ]


def _change(
    partition_id: str,
    wanted: Checkpoint | Refused | None,
    before: StoredCheckpoint | None,
    unwritable: str | None,
    force: bool,
    forward_only: bool,
) -> CheckpointChange:
    def refused(reason: str) -> CheckpointChange:
        after = None if isinstance(wanted, Refused) else wanted
        return CheckpointChange(partition_id, before, after, ChangeAction.REFUSE, reason)

    if isinstance(wanted, Refused):
        return refused(wanted.reason)
    if before is not None and before.problem is not None:
        return refused(f"{before.place}: {before.problem}; delete it if no consumer needs it")
    if unwritable is not None:
        return refused(unwritable)
    if position_of(before) == (None if wanted is None else (wanted.sequence_number, wanted.offset)):
        return CheckpointChange(partition_id, before, wanted, ChangeAction.KEEP)
    if before is not None and before.is_owned and not force:
        return refused(owned_by(before.owner))
    number = None if before is None else before.sequence_number
    if forward_only and number is not None and (wanted is None or wanted.sequence_number < number):
        return refused(f"it is further on already, at {number:,}")
    return CheckpointChange(partition_id, before, wanted, ChangeAction.WRITE)


def position_of(stored: StoredCheckpoint | None) -> tuple[int | None, str | None] | None:
    """Return number and offset of what is stored; None if it is no position."""
    return None if stored is None or not stored.is_usable else (stored.sequence_number, stored.offset)


def still(plan: CheckpointPlan, stored: Mapping[str, StoredCheckpoint]) -> list[CheckpointChange]:
    """Return the writes of a plan as they are now: those of which the store has something else are refused."""
    changes = []
    for change in plan.having(ChangeAction.WRITE):
        now, reason = stored.get(change.partition_id), None
        if position_of(now) != position_of(change.before):
            reason = "its checkpoint has changed since the plan was made"
        elif now is not None and now.is_owned and not plan.force:
            reason = owned_by(now.owner)
        action = ChangeAction.WRITE if reason is None else ChangeAction.REFUSE
        changes.append(CheckpointChange(change.partition_id, now, change.after, action, reason))
    return changes


@dataclass(frozen=True, slots=True)
class CheckpointOutcome:
    """What has been written of a plan.

    Args:
        export: The file with what was stored before; None if nothing was to be written.
        written: The partitions that were written.
        refused: Why a partition was not written, by partition id: the plan's, and those that changed since. Default:
            `{}`.
        failed: Why the write of a partition failed, which may have been stored, by partition id. Default: `{}`.
        left: The partitions that were not tried after a failure. Default: `()`.
    """

    export: str | None
    written: Sequence[str]
    refused: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    failed: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    left: Sequence[str] = ()

    @property
    def is_complete(self) -> bool:
        """Whether every partition of the plan has the planned checkpoint."""
        return not self.refused and not self.failed and not self.left
