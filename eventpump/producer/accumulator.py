"""Events on their way into batches, one batch being filled per partition; and the room they may take. Without I/O.

A batch is ready when it holds `max_events`, when the next event would make it larger than `max_bytes`, when its first
event has waited for `max_wait_time`, or when it is flushed. A ready batch that is not full goes on filling until it is
taken: a partition that is slow to send sends fewer and larger batches. What is taken takes no more events.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, Generic, NamedTuple, TypeVar

from eventpump.compiled import based_on_core
from eventpump.producer.packing import BatchPacker

E = TypeVar("E")

_MOST: Final = 2**60
"""More than any process holds, in bytes or events: the compiled core counts in 64 bits, options have no upper bound."""


class Part(NamedTuple):
    """The outcome of the events of a batch from `start` to `end`: all of them, unless it took several messages.

    Args:
        error: What they failed with; None if they are stored.
    """

    start: int
    end: int
    first: int | None
    error: Exception | None


class Batch(BatchPacker, Generic[E]):
    """Events for one message, and their outcome.

    Attributes:
        partition_id: Where it goes; None for the gateway.
        home: The event loop that will know the outcome, a `HomeLoop`; None if there is none.
        is_due: Whether it may be taken.
        parts: The outcomes that are known.
        waiters: The futures of those who wait for the outcome of an event, with the event's number.
    """

    __slots__ = ("events", "home", "is_due", "partition_id", "parts", "waiters")

    def __init__(self, partition_id: str | None, limit: int, *, idempotent: bool, stamped: bool) -> None:
        super().__init__(limit, idempotent=idempotent, stamped=stamped, oversized=True)
        self.partition_id = partition_id
        self.events: list[E] = []
        self.home: Any = None
        self.is_due = False
        self.parts: list[Part] = []
        self.waiters: dict[Any, int] = {}

    def join(self, event: E, head: bytes, rest: bytes, size: int, most: int) -> int:
        """Add an event that neither begins nor ends the batch.

        Args:
            head: The first piece of its encoding.
            rest: The other piece.
            most: The number of events that ends a batch.

        Returns:
            Its number; -1, and nothing added, where it would end the batch.
        """
        events = self.events
        index = len(events)
        after = self.size + size
        if index + 1 >= most or after >= self.limit:
            return -1
        self.size = after
        pieces = self._pieces
        pieces.append(head)
        pieces.append(rest)
        events.append(event)
        return index

    def part(self, index: int) -> Part | None:
        """Return the outcome of an event; None if it is not known."""
        for part in self.parts:
            if part.start <= index < part.end:
                return part
        return None

    def settle(self, part: Part) -> list[Any]:
        """Record an outcome, and return those who wait for it."""
        self.parts.append(part)
        return [waiter for waiter, index in self.waiters.items() if part.start <= index < part.end]

    def forget_events(self) -> None:
        """Keep only the outcome, which receipts refer to."""
        self.events = []
        self._pieces = []

    def __repr__(self) -> str:
        return f"Batch({len(self.events)} events, {self.size} bytes)"


class Lane(Generic[E]):
    """What there is for one partition, or for the gateway, from the room for an event to the task that sends it.

    Attributes:
        filling: The batch that takes events; None if there is none.
        full: The batches that take no more events, the oldest first.
        waiting: The calls that wait for room here, in order (`outbox.RoomQueue`).
        admitted: The number of calls for which room is reserved and which have not run since.
        sending: The tasks that send, and have not found that there is nothing to send (`outbox.Outbox`).
    """

    __slots__ = ("admitted", "filling", "full", "partition_id", "sending", "waiting")

    def __init__(self, partition_id: str | None) -> None:
        self.partition_id = partition_id
        self.filling: Batch[E] | None = None
        self.full: deque[Batch[E]] = deque()
        self.waiting: deque[Any] = deque()
        self.admitted = 0
        self.sending: set[Any] = set()

    @property
    def is_ready(self) -> bool:
        """Whether there is a batch to take."""
        return bool(self.full) or (self.filling is not None and self.filling.is_due)

    def take(self) -> Batch[E] | None:
        """Take the oldest ready batch, which takes no more events from then on. None if no batch is ready."""
        if self.full:
            return self.full.popleft()
        batch = self.filling
        if batch is None or not batch.is_due:
            return None
        self.filling = None
        return batch


class BatchAccumulator(Generic[E]):
    """Fills a batch for each lane.

    Args:
        max_bytes: The maximum size of a batch, in bytes. A larger event makes a batch of its own.
        max_wait_time: How long the first event of a batch waits for others, in seconds; infinite for no limit.
        on_begun: Called after an event has begun a batch, with the batch. `deadline` may be new then: it is at most
            `max_wait_time` away.
        on_ready: Called after an event, with the lane, if the lane has a batch to take that it had not before.
    """

    __slots__ = (
        "_idempotent",
        "_max_bytes",
        "_max_events",
        "_max_wait_time",
        "_on_begun",
        "_on_ready",
        "_stamped",
        "_waiting",
    )

    def __init__(
        self,
        *,
        max_events: int,
        max_bytes: int,
        max_wait_time: float,
        on_begun: Callable[[Batch[E]], object],
        on_ready: Callable[[Lane[E]], object],
        idempotent: bool = False,
        stamped: bool = False,
    ) -> None:
        if max_events < 1 or max_bytes < 1 or max_wait_time < 0:
            raise ValueError("a batch needs room for an event, and a wait of 0 or more")
        self._max_events = max_events
        self._max_bytes = min(max_bytes, _MOST)
        self._max_wait_time = max_wait_time
        self._idempotent = idempotent
        self._stamped = stamped
        self._on_begun = on_begun
        self._on_ready = on_ready
        # Lanes whose batch is not due yet, the oldest first: all wait equally long, so it is the next to be due.
        self._waiting: dict[Lane[E], float] = {}

    @property
    def deadline(self) -> float | None:
        """When the next batch is due by age; None if none waits."""
        return next(iter(self._waiting.values()), None)

    def add(self, lane: Lane[E], event: E, head: bytes, rest: bytes, now: float) -> Batch[E]:
        """Add an event, in two pieces (`eventhubs.sealing.pieces_of`), and return the batch whose last event it is
        now."""
        batch = lane.filling
        is_new = is_ready = False
        if batch is not None and not batch.add(head, rest):
            is_ready = not batch.is_due
            self._close(lane, batch)
            batch = None
        if batch is None:
            is_new = True
            batch = lane.filling = Batch(
                lane.partition_id, self._max_bytes, idempotent=self._idempotent, stamped=self._stamped
            )
            batch.add(head, rest)
            self._waiting[lane] = now + self._max_wait_time
        events = batch.events
        events.append(event)
        if len(events) >= self._max_events or batch.size >= self._max_bytes:
            is_ready = is_ready or not batch.is_due
            self._close(lane, batch)
        if is_new:
            self._on_begun(batch)
        if is_ready:
            self._on_ready(lane)
        return batch

    def expire(self, now: float) -> list[Lane[E]]:
        """Make the batches ready that have become due by age, and return their lanes, the oldest first."""
        due: list[Lane[E]] = []
        for lane, at in self._waiting.items():
            if at > now:
                break
            due.append(lane)
        for lane in due:
            self.make_due(lane)
        return due

    def flush(self) -> list[Lane[E]]:
        """Make everything ready that waits, and return the lanes concerned."""
        due = list(self._waiting)
        for lane in due:
            self.make_due(lane)
        return due

    def make_due(self, lane: Lane[E]) -> None:
        """Make the batch of a lane ready, which waits."""
        del self._waiting[lane]
        assert lane.filling is not None
        lane.filling.is_due = True

    def _close(self, lane: Lane[E], batch: Batch[E]) -> None:
        lane.full.append(batch)
        lane.filling = None
        if not batch.is_due:
            batch.is_due = True
            del self._waiting[lane]


@based_on_core("PlainRoom")
class BufferRoom:
    """The room for events that were accepted and whose outcome is open, in events and bytes, overall and per partition.

    Half of the whole is divided among the partitions: a partition can always use its own part, however many events the
    others hold. The other half is common, up to each partition's limit. A partition that holds nothing may have one
    event, however large: by what such events exceed their partitions' own parts, the bytes held may exceed the bound,
    and by no more.

    Args:
        max_events: The maximum overall; at least one per partition.
        max_partition_events: The maximum per partition; None for no limit but the overall one.
        max_partition_bytes: The maximum per partition, in bytes; None for no limit but the overall one.
    """

    __slots__ = (
        "_free_bytes",
        "_free_events",
        "_held",
        "_own_bytes",
        "_own_events",
        "_partition_bytes",
        "_partition_events",
    )

    def __init__(
        self,
        partition_ids: Sequence[str | None],
        *,
        max_events: int,
        max_bytes: int,
        max_partition_events: int | None = None,
        max_partition_bytes: int | None = None,
    ) -> None:
        max_events, max_bytes = min(max_events, _MOST), min(max_bytes, _MOST)
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

    @property
    def events(self) -> int:
        """The number of events held."""
        return sum(events for events, _ in self._held.values())

    @property
    def bytes(self) -> int:
        """Their size, in bytes."""
        return sum(size for _, size in self._held.values())

    def reserve(self, partition_id: str | None, size: int) -> bool:
        """Reserve room for an event of so many bytes; return False if there is none now.
        Raises `KeyError` for another partition."""
        held = self._held[partition_id]
        events, before = held
        after = before + size
        own = self._own_bytes
        if events < self._own_events and after <= own:
            # The partition's own part is within all other limits.
            held[0] = events + 1
            held[1] = after
            return True
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
        return True

    def release(self, partition_id: str | None, events: int, size: int) -> bool:
        """Release the room of events whose outcome is known; return whether other partitions have more now too."""
        held = self._held[partition_id]
        if events > held[0] or size > held[1]:
            raise ValueError(f"partition {partition_id} does not hold {events} events of {size} bytes")
        freed_events = min(events, max(0, held[0] - self._own_events))
        freed_bytes = min(size, max(0, held[1] - self._own_bytes))
        held[0] -= events
        held[1] -= size
        self._free_events += freed_events
        self._free_bytes += freed_bytes
        return bool(freed_events or freed_bytes)
