"""The lag of a consumer group, computed from its checkpoints and from what the partitions hold. Pure."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from eventpump.interfaces import ConsumerScope, PartitionProperties
from eventpump.storage.checkpoints.stored import StoredCheckpoint


class LagState(enum.StrEnum):
    """The state of a consumer group in a partition. Of several that are true, it is the first in this order."""

    UNKNOWN = "unknown"
    """The partition was not read yet, or reading it has failed."""
    BEYOND_END = "beyond-end"
    """The checkpoint's number is above the newest event's: the hub was recreated, or its copy restored."""
    EXPIRED = "expired"
    """Events after the checkpoint are gone by retention before the group has read them."""
    NO_CHECKPOINT = "no-checkpoint"
    """There is no checkpoint, or none that can be used. Every event of the partition counts as unread."""
    UNOWNED = "unowned"
    """No consumer owns the partition."""
    STALLED = "stalled"
    """Events wait, and the checkpoint has not been written for longer than `stalled_after`."""
    BEHIND = "behind"
    """Events wait."""
    OK = "ok"
    """Every event is processed."""


@dataclass(frozen=True, slots=True)
class PartitionProgress:
    """How far a consumer group has come in a partition.

    Args:
        partition_id: The partition.
        state: How the group stands.
        lag: How many events the group has not processed; None if that is not known, as where the checkpoint is beyond
            the newest event. Of numbers that retention has removed it counts none.
        lost: How many events retention has removed before the group has processed them.
        first: The number of the oldest event; None in an empty partition, or where the partition was not read.
        last: The number of the newest event; -1 if there never was one; None where the partition was not read.
        last_enqueued_at: When that was enqueued; None likewise.
        read_at: When the partition was read; None if it never was.
        checkpoint: What the store has of it; None if that is nothing.
        checkpoint_age: Seconds since the checkpoint was stored; None if that is not known.
        seconds: For how long the oldest unprocessed event has been in the partition; 0.0 if there is none, and None
            without `reader_group`.
        error: Why the partition could not be read at the last attempt; None if it was read.
    """

    partition_id: str
    state: LagState
    lag: int | None
    lost: int
    first: int | None
    last: int | None
    last_enqueued_at: datetime | None
    read_at: datetime | None
    checkpoint: StoredCheckpoint | None
    checkpoint_age: float | None
    seconds: float | None = None
    error: str | None = None

    @property
    def sequence_number(self) -> int | None:
        """The number of the checkpoint; None if there is none."""
        return None if self.checkpoint is None else self.checkpoint.sequence_number


@dataclass(frozen=True, slots=True)
class GroupLag:
    """How far a consumer group is behind.

    Args:
        scope: The consumer group.
        read_at: When its checkpoints were read.
        partitions: By partition number.
        notes: What its reader should know, in sentences. Default: `()`.
    """

    scope: ConsumerScope
    read_at: datetime
    partitions: Sequence[PartitionProgress]
    notes: Sequence[str] = ()

    @property
    def total(self) -> int:
        """How many events the group has not processed, in the partitions where that is known."""
        return sum(each.lag or 0 for each in self.partitions)

    @property
    def unknown(self) -> tuple[str, ...]:
        """The partitions whose lag is not known."""
        return tuple(each.partition_id for each in self.partitions if each.lag is None)


@dataclass(frozen=True, slots=True)
class PartitionRead:
    """What was read of a partition: the checkpoint, and after it what the partition holds.

    They are kept together. An older end with a newer checkpoint would look as if the hub had been recreated.

    Args:
        unchanged_since: Since when the checkpoint has been found at this position.
        unread_since: When the oldest unprocessed event was enqueued; None if that is not known.
        error: Why the last attempt has failed; None if it has not.
    """

    properties: PartitionProperties | None = None
    read_at: datetime | None = None
    checkpoint: StoredCheckpoint | None = None
    unchanged_since: datetime | None = None
    unread_since: datetime | None = None
    error: str | None = None


def progress_of(partition_id: str, read: PartitionRead, now: datetime, stalled_after: float) -> PartitionProgress:
    """Compute the progress in one partition.

    Args:
        stalled_after: Seconds without a new checkpoint after which a group with unprocessed events has stalled.
    """
    properties, checkpoint = read.properties, read.checkpoint
    written_at = None if checkpoint is None else checkpoint.written_at
    age = None if written_at is None else max(0.0, (now - written_at).total_seconds())
    if properties is None:
        return PartitionProgress(
            partition_id, LagState.UNKNOWN, None, 0, None, None, None, None, checkpoint, age, error=read.error
        )
    lag, lost = count_unprocessed(properties, checkpoint)
    seconds = 0.0 if lag == 0 else None
    if read.unread_since is not None:
        seconds = max(0.0, (now - read.unread_since).total_seconds())
    last = properties.last_enqueued_sequence_number
    return PartitionProgress(
        partition_id,
        _state(read, lag, lost, now, stalled_after),
        lag,
        lost,
        None if properties.is_empty else properties.beginning_sequence_number,
        last,
        None if last < 0 else properties.last_enqueued_time,
        read.read_at,
        checkpoint,
        age,
        seconds,
        read.error,
    )


def first_unprocessed(properties: PartitionProperties, checkpoint: StoredCheckpoint | None) -> int | None:
    """Return the number of the first retained event after a checkpoint, there or not yet; None if it is not known."""
    last = properties.last_enqueued_sequence_number
    # An empty partition begins with its next event.
    first = last + 1 if properties.is_empty else properties.beginning_sequence_number
    if checkpoint is None or not checkpoint.is_usable:
        return first
    number = checkpoint.sequence_number
    if number is None:
        # Some writers stored an offset alone; offsets have no order.
        return last + 1 if checkpoint.offset == properties.last_enqueued_offset else None
    return None if number > last else max(first, number + 1)


def count_unprocessed(properties: PartitionProperties, checkpoint: StoredCheckpoint | None) -> tuple[int | None, int]:
    """Return how many retained events follow a checkpoint, None if that is not known, and how many are lost."""
    following = first_unprocessed(properties, checkpoint)
    if following is None:
        return None, 0
    number = None if checkpoint is None else checkpoint.sequence_number
    lost = 0 if number is None else following - (number + 1)
    return properties.last_enqueued_sequence_number + 1 - following, lost


def _state(read: PartitionRead, lag: int | None, lost: int, now: datetime, stalled_after: float) -> LagState:
    checkpoint = read.checkpoint
    if checkpoint is None or not checkpoint.is_usable:
        return LagState.NO_CHECKPOINT
    if lag is None and checkpoint.sequence_number is not None:
        return LagState.BEYOND_END
    if lost:
        return LagState.EXPIRED
    if checkpoint.is_owned is False:
        return LagState.UNOWNED
    if lag == 0:
        return LagState.OK
    # A store without times has only what was seen of it.
    written_at = checkpoint.written_at or read.unchanged_since
    limit = timedelta(seconds=stalled_after)
    if written_at is not None and now - written_at > limit and _has_waited(read, lag, now, limit):
        return LagState.STALLED
    return LagState.BEHIND


def _has_waited(read: PartitionRead, lag: int | None, now: datetime, limit: timedelta) -> bool:
    """Return whether the oldest unprocessed event may have waited for that long.

    The first events after a silence find an old checkpoint, and have not waited. A single unprocessed event is the
    newest one, whose time is known; of several, the time of the oldest is known with `reader_group` only.
    """
    if read.unread_since is not None:
        return now - read.unread_since > limit
    assert read.properties is not None
    return lag != 1 or now - read.properties.last_enqueued_time > limit
