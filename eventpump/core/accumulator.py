"""Events on their way into batches, one batch being filled per partition; and the room they may take.

A batch is ready when it holds `max_events`, when the next event would make it larger than `max_bytes`, when its first
event has waited for `max_wait_time`, or when it is flushed. A ready batch that is not full goes on filling until it is
taken: a partition that is slow to send sends fewer and larger batches. What is taken is fixed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

E = TypeVar("E")


class Batch(Generic[E]):
    """Events for one message.

    Attributes:
        events: In the order they were added.
        size: What they take in the message, with its head, in bytes.
        outcome: What the accumulator's user keeps with the batch; None at first.
    """

    __slots__ = ("events", "is_due", "outcome", "size")

    def __init__(self, size: int) -> None:
        self.events: list[E] = []
        self.size = size
        self.is_due = False
        self.outcome: Any = None

    def __repr__(self) -> str:
        return f"Batch({len(self.events)} events, {self.size} bytes)"


class _Partition(Generic[E]):
    __slots__ = ("filling", "full", "since")

    def __init__(self) -> None:
        self.filling: Batch[E] | None = None
        self.since = 0.0
        self.full: deque[Batch[E]] = deque()


class BatchAccumulator(Generic[E]):
    """Fills a batch for each partition.

    Args:
        max_events: A batch with so many is full.
        max_bytes: What a message may take, in bytes.
        max_wait_time: How long the first event of a batch waits for others, in seconds.
        head_size: What a message takes without events, in bytes.

    Attributes:
        newest: The batch that the last event went into; None before the first.
    """

    __slots__ = ("_head_size", "_max_bytes", "_max_events", "_max_wait_time", "_partitions", "_waiting", "newest")

    def __init__(self, *, max_events: int, max_bytes: int, max_wait_time: float, head_size: int = 0) -> None:
        if max_events < 1 or max_bytes <= head_size or max_wait_time < 0 or head_size < 0:
            raise ValueError("a batch needs room for an event, and a wait of 0 or more")
        self._max_events = max_events
        self._max_bytes = max_bytes
        self._max_wait_time = max_wait_time
        self._head_size = head_size
        self._partitions: dict[str, _Partition[E]] = {}
        # Partitions whose batch is not due yet, the oldest first: all wait equally long, so it is the next to be due.
        self._waiting: dict[str, float] = {}
        self.newest: Batch[E] | None = None

    @property
    def deadline(self) -> float | None:
        """When the next batch is due by age; None where none waits."""
        for due in self._waiting.values():
            return due
        return None

    def add(self, partition_id: str, event: E, size: int, now: float) -> bool:
        """Add an event.

        Args:
            size: What it adds to a message, in bytes. One too large for any message is the caller's to refuse.
            now: Never less than before.

        Returns:
            Whether the partition has a batch to take that it had not before. Where it has not, `deadline` may be new:
            it is at most `max_wait_time` away.
        """
        partition = self._partitions.get(partition_id)
        if partition is None:
            partition = self._partitions[partition_id] = _Partition()
        batch = partition.filling
        is_ready = False
        if batch is not None and batch.size + size > self._max_bytes:
            is_ready = not batch.is_due
            self._close(partition_id, partition, batch)
            batch = None
        if batch is None:
            batch = partition.filling = Batch(self._head_size)
            self._waiting[partition_id] = now + self._max_wait_time
        self.newest = batch
        batch.events.append(event)
        batch.size += size
        if len(batch.events) >= self._max_events or batch.size >= self._max_bytes:
            is_ready = is_ready or not batch.is_due
            self._close(partition_id, partition, batch)
        return is_ready

    def expire(self, now: float) -> list[str]:
        """Find the partitions whose batch has become due by age."""
        due: list[str] = []
        for partition_id, at in self._waiting.items():
            if at > now:
                break
            due.append(partition_id)
        for partition_id in due:
            self._make_due(partition_id)
        return due

    def flush(self, partition_id: str | None = None) -> list[str]:
        """Make everything ready that waits.

        Args:
            partition_id: Only this one; None for all.

        Returns:
            The partitions concerned.
        """
        due = [each for each in self._waiting if partition_id in (None, each)]
        for each in due:
            self._make_due(each)
        return due

    def take(self, partition_id: str) -> Batch[E] | None:
        """Take the partition's oldest ready batch, which nothing is added to any more. None where none is ready."""
        partition = self._partitions.get(partition_id)
        if partition is None:
            return None
        if partition.full:
            return partition.full.popleft()
        batch = partition.filling
        if batch is None or not batch.is_due:
            return None
        partition.filling = None
        return batch

    def is_ready(self, partition_id: str) -> bool:
        """Return whether there is a batch to take."""
        partition = self._partitions.get(partition_id)
        if partition is None:
            return False
        return bool(partition.full) or (partition.filling is not None and partition.filling.is_due)

    def is_empty(self) -> bool:
        """Return whether everything that was added has been taken."""
        return all(each.filling is None and not each.full for each in self._partitions.values())

    def _close(self, partition_id: str, partition: _Partition[E], batch: Batch[E]) -> None:
        partition.full.append(batch)
        partition.filling = None
        if not batch.is_due:
            del self._waiting[partition_id]

    def _make_due(self, partition_id: str) -> None:
        del self._waiting[partition_id]
        batch = self._partitions[partition_id].filling
        assert batch is not None
        batch.is_due = True


class BufferRoom:
    """The room for events that were taken in and whose outcome is open, in events and bytes, overall and per partition.

    Half of the whole is shared out: a partition's own part is there for it however slow or many the others are. The
    other half is common, up to each partition's limit. A partition that holds nothing is let have one event, however
    large: by what such events exceed their partitions' own parts, the bytes held may exceed the bound.

    Args:
        partition_ids: Those that share it.
        max_events: Overall; one per partition at least.
        max_bytes: Overall, in bytes.
        max_partition_events: Per partition; None for no limit but the overall one.
        max_partition_bytes: Per partition, in bytes; None likewise.
    """

    __slots__ = (
        "_free_bytes",
        "_free_events",
        "_held",
        "_own_bytes",
        "_own_events",
        "_partition_bytes",
        "_partition_events",
        "bytes",
        "events",
    )

    def __init__(
        self,
        partition_ids: Sequence[str],
        *,
        max_events: int,
        max_bytes: int,
        max_partition_events: int | None = None,
        max_partition_bytes: int | None = None,
    ) -> None:
        most_events = max_events if max_partition_events is None else min(max_events, max_partition_events)
        most_bytes = max_bytes if max_partition_bytes is None else min(max_bytes, max_partition_bytes)
        count = len(partition_ids)
        if not 0 < count <= max_events or most_events < 1 or most_bytes < 1:
            raise ValueError("a buffer needs room for an event of each partition")
        self._partition_events = most_events
        self._partition_bytes = most_bytes
        self._own_events = min(max(1, max_events // (2 * count)), most_events)
        self._own_bytes = min(max_bytes // (2 * count), most_bytes)
        # What is left of the common half; bytes are below 0 while an event is held that is too large for it.
        self._free_events = max_events - count * self._own_events
        self._free_bytes = max_bytes - count * self._own_bytes
        self._held = {partition_id: [0, 0] for partition_id in partition_ids}
        self.events = 0
        """How many are held."""
        self.bytes = 0
        """What they take."""

    def reserve(self, partition_id: str, size: int) -> bool:
        """Take room for an event.

        Args:
            size: In bytes.

        Returns:
            False, and nothing taken, where there is none now.

        Raises:
            KeyError: No such partition.
        """
        held = self._held[partition_id]
        events, before = held
        after = before + size
        own = self._own_bytes
        more_events = events >= self._own_events
        more_bytes = 0 if after <= own else after - (before if before > own else own)
        if events and (
            events >= self._partition_events
            or after > self._partition_bytes
            or (more_events and self._free_events < 1)
            or (more_bytes and more_bytes > self._free_bytes)
        ):
            return False
        self._free_events -= more_events
        self._free_bytes -= more_bytes
        held[0] = events + 1
        held[1] = after
        self.events += 1
        self.bytes += size
        return True

    def release(self, partition_id: str, events: int, size: int) -> bool:
        """Give room back, for the events of a batch whose outcome is known.

        Args:
            events: How many.
            size: What was reserved for them together.

        Returns:
            Whether other partitions have more room now too.
        """
        held = self._held[partition_id]
        if events > held[0] or size > held[1]:
            raise ValueError(f"partition {partition_id} does not hold {events} events of {size} bytes")
        freed_events = min(events, max(0, held[0] - self._own_events))
        freed_bytes = min(size, max(0, held[1] - self._own_bytes))
        held[0] -= events
        held[1] -= size
        self.events -= events
        self.bytes -= size
        self._free_events += freed_events
        self._free_bytes += freed_bytes
        return bool(freed_events or freed_bytes)

    def held(self, partition_id: str) -> tuple[int, int]:
        """Return the events and bytes a partition holds."""
        events, size = self._held[partition_id]
        return events, size
