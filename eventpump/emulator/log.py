"""The emulator's data: hubs, their partitions, and each partition's log of encoded events. No I/O, no clock.

A batch goes through two steps, so that a durable hub can write between them: `number` stamps it with its sequence
numbers and offsets, `publish` makes it visible to readers. Numbered batches are published in their order.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from eventpump.amqp.types import Timestamp
from eventpump.emulator.ledger import ProducerState, PublishingLedger
from eventpump.emulator.stamping import stamp
from eventpump.eventhubs.events import EventPosition
from eventpump.eventhubs.management import NEVER
from eventpump.eventhubs.names import DEFAULT_CONSUMER_GROUP
from eventpump.eventhubs.properties import PartitionProperties
from eventpump.texts import excerpt

_OFFSET = re.compile(r"-?[0-9]{1,19}")
_MOST_DIGITS = 9


class BeyondEndError(Exception):
    """A reader requested an offset or sequence number (`what`) after the last event."""

    def __init__(self, what: str, wanted: str, last: int) -> None:
        super().__init__(
            f"The supplied {what} '{excerpt(wanted)}' is invalid. The last {what} in the system is '{last}'"
        )


class InvalidPositionError(Exception):
    """A reader's position has an invalid value."""


@dataclass(slots=True)
class NumberedBatch:
    """A batch with its numbers, not visible yet; `producer` is the state of its idempotent producer after it."""

    partition: PartitionLog
    sequence_number: int
    time_ms: int
    payloads: list[bytes]
    offsets: array[int]
    next_offset: int
    size: int
    producer: ProducerState | None = None

    @property
    def next_sequence_number(self) -> int:
        """The first free number after it."""
        return self.sequence_number + len(self.payloads)


@dataclass(slots=True, frozen=True)
class LogEnd:
    """The end of a partition's numbers.

    Args:
        last_offset: The offset of the last event there ever was, -1 before the first.
        last_enqueued_ms: That event's enqueued time, in milliseconds since the Unix epoch.
    """

    next_sequence_number: int = 0
    next_offset: int = 0
    last_offset: int = -1
    last_enqueued_ms: int | None = None


class PartitionLog:
    """The events of one partition. One task mutates it.

    `payloads` holds the retained events; the one at index `i` has the sequence number `beginning + i`.

    Attributes:
        publishing: Its idempotent producers.
    """

    def __init__(self, hub: str, partition_id: str, *, resume: LogEnd | None = None) -> None:
        end = LogEnd() if resume is None else resume
        self.hub = hub
        self.partition_id = partition_id
        self.payloads: list[bytes] = []
        self.beginning = end.next_sequence_number
        self.size = 0
        self.dropping_reported = False
        self.publishing = PublishingLedger()
        self.listeners: set[Callable[[], None]] = set()
        self._offsets: array[int] = array("q")
        self._times: array[int] = array("q")
        self._last_offset = end.last_offset
        self._last_ms = end.last_enqueued_ms
        self._next_number = end.next_sequence_number
        self._next_offset = end.next_offset
        self._clock_ms = -1 if end.last_enqueued_ms is None else end.last_enqueued_ms

    @property
    def end(self) -> int:
        """The sequence number after the last visible event."""
        return self.beginning + len(self.payloads)

    @property
    def last_offset(self) -> int:
        """The offset of the last visible event, -1 if there never was one."""
        return self._last_offset

    @property
    def last_enqueued_ms(self) -> int | None:
        """When the last visible event was enqueued, in milliseconds since the Unix epoch."""
        return self._last_ms

    @property
    def first_enqueued_ms(self) -> int | None:
        """When the oldest retained event was enqueued; None if nothing is retained."""
        return self._times[0] if self._times else None

    def number(
        self, events: list[bytes], now_ms: int, batch_key: str | None = None, producer: ProducerState | None = None
    ) -> NumberedBatch:
        """Assign a batch its numbers and the enqueued time. Times never go back, whatever the clock does.

        Raises:
            AmqpDecodeError: An event is not an AMQP message; no number was assigned.
        """
        time_ms = max(now_ms, self._clock_ms)
        stamped = stamp(events, self._next_number, self._next_offset, time_ms, batch_key)
        batch = NumberedBatch(
            self,
            self._next_number,
            time_ms,
            stamped.payloads,
            stamped.offsets,
            stamped.next_offset,
            stamped.size,
            producer,
        )
        if producer is not None:
            self.publishing.advance(producer)
        self._clock_ms = time_ms
        self._next_number += len(events)
        self._next_offset = stamped.next_offset
        return batch

    def publish(self, batch: NumberedBatch) -> None:
        """Make the next numbered batch visible, and notify the listeners."""
        assert batch.sequence_number == self.end
        self.payloads += batch.payloads
        self._offsets += batch.offsets
        self._times.extend([batch.time_ms] * len(batch.payloads))
        self._last_offset = batch.offsets[-1]
        self._last_ms = batch.time_ms
        self.size += batch.size
        if batch.producer is not None:
            self.publishing.committed(batch.producer)
        for listener in tuple(self.listeners):
            listener()

    def restore(self, batch: NumberedBatch) -> None:
        """Restore a stored batch, in order."""
        if not self.payloads:
            self.beginning = batch.sequence_number
        self.publish(batch)
        self._next_number = self.end
        self._next_offset = batch.next_offset
        self._clock_ms = batch.time_ms

    def take_back(self) -> None:
        """Revert the numbers of all unpublished batches, which no client has seen."""
        self.publishing.take_back()
        self._next_number = self.end
        if self.payloads:
            self._next_offset = self._last_offset + len(self.payloads[-1])

    def drop_oldest(self, count: int) -> int:
        """Drop the oldest events; return how many bytes that freed."""
        count = min(count, len(self.payloads))
        freed = sum(map(len, self.payloads[:count]))
        del self.payloads[:count]
        del self._offsets[:count]
        del self._times[:count]
        self.beginning += count
        self.size -= freed
        return freed

    def count_older_than(self, time_ms: int) -> int:
        """Count the retained events that were enqueued before a time."""
        return bisect_left(self._times, time_ms)

    def facts(self) -> PartitionProperties:
        """Return the properties of the visible events."""
        return PartitionProperties(
            hub=self.hub,
            partition_id=self.partition_id,
            # As the service has it of a partition that never held an event; where others begin is known.
            beginning_sequence_number=self.beginning if self.end else -1,
            last_enqueued_sequence_number=self.end - 1,
            last_enqueued_offset=str(self._last_offset),
            last_enqueued_time=NEVER if self._last_ms is None else Timestamp(self._last_ms).to_datetime(),
            is_empty=not self.payloads,
        )

    def locate(self, position: EventPosition | None) -> int:
        """Return the sequence number at which a reader starts. None is the start of the stream.

        For a time beyond the end, the reader waits there.

        Raises:
            BeyondEndError: The offset or sequence number is after the last event (protocol.md 5.2).
            InvalidPositionError: The offset is not a number.
        """
        if position is None:
            return self.beginning
        if position.offset is not None:
            return self._locate_offset(position.offset, inclusive=position.inclusive)
        if position.sequence_number is not None:
            if position.sequence_number > self.end - 1 and position.sequence_number >= 0:
                raise BeyondEndError("sequence number", str(position.sequence_number), self.end - 1)
            wanted = position.sequence_number + (0 if position.inclusive else 1)
            return max(wanted, self.beginning)
        assert position.enqueued_time is not None
        time_ms = Timestamp.from_datetime(position.enqueued_time)
        find = bisect_left if position.inclusive else bisect_right
        return self.beginning + find(self._times, time_ms)

    def _locate_offset(self, offset: str, *, inclusive: bool) -> int:
        if offset == "@latest":
            return max(self.beginning, self.end - 1) if inclusive else self.end
        if _OFFSET.fullmatch(offset) is None:
            raise InvalidPositionError(f"The supplied offset '{excerpt(offset)}' is not an offset of this partition.")
        value = int(offset)
        if value > self._last_offset and value >= 0:
            raise BeyondEndError("offset", offset, self._last_offset)
        find = bisect_left if inclusive else bisect_right
        return self.beginning + find(self._offsets, value)


@dataclass(slots=True)
class Hub:
    """A hub: its consumer groups and partitions.

    Args:
        name: As declared; names compare case-insensitively.
        created_ms: Milliseconds since the Unix epoch.
        groups: Consumer group names as declared, by their lower case.
    """

    name: str
    created_ms: int
    groups: dict[str, str]
    partitions: list[PartitionLog]
    _turn: int = field(default=0)

    def next_partition(self) -> PartitionLog:
        """Return the next partition in rotation, for events without a key."""
        partition = self.partitions[self._turn % len(self.partitions)]
        self._turn += 1
        return partition

    def partition(self, partition_id: str) -> PartitionLog | None:
        """Return the partition with an id, or None."""
        if not partition_id.isascii() or not partition_id.isdigit() or len(partition_id) > _MOST_DIGITS:
            return None
        number = int(partition_id)
        if number >= len(self.partitions) or str(number) != partition_id:
            return None
        return self.partitions[number]

    def has_group(self, name: str) -> bool:
        """Return whether a consumer group exists."""
        return name.lower() in self.groups


def group_names(names: Iterable[str]) -> dict[str, str]:
    """Return consumer groups by their lower-case names; the default group always exists."""
    groups = {DEFAULT_CONSUMER_GROUP.lower(): DEFAULT_CONSUMER_GROUP}
    for name in names:
        groups.setdefault(name.lower(), name)
    return groups


@dataclass(slots=True, frozen=True)
class Retention:
    """How much is kept, over all partitions, and for how long.

    Args:
        size: Bytes of stored events.
        seconds: The age of events.
    """

    size: int = 1 << 30
    seconds: float = 3600.0


DURABLE_RETENTION = Retention(seconds=7 * 86_400.0)
"""Durable hubs keep events longer than the official emulator's hour."""


def enforce_retention(partitions: Sequence[PartitionLog], retention: Retention, now_ms: int) -> list[PartitionLog]:
    """Drop events that are too old, then the oldest of the largest partitions; return the partitions concerned."""
    dropped: dict[int, PartitionLog] = {}
    horizon = now_ms - int(retention.seconds * 1000)
    for partition in partitions:
        first = partition.first_enqueued_ms
        if first is not None and first < horizon:
            partition.drop_oldest(partition.count_older_than(horizon))
            dropped[id(partition)] = partition
    total = sum(partition.size for partition in partitions)
    while total > retention.size:
        largest = max(partitions, key=lambda partition: partition.size)
        # A sixteenth at a time: dropping from the front of a list costs its length.
        total -= largest.drop_oldest(max(1, len(largest.payloads) // 16))
        dropped[id(largest)] = largest
    return list(dropped.values())


def entity_not_found(entity: str) -> str:
    """Return the text for a missing entity, in the words that clients look for."""
    return f"The messaging entity '{entity}' could not be found."


def invalid_partition(hub: Hub, partition_id: str) -> str:
    """Return the text for an unknown partition: the service's words, and then ours."""
    return (
        "The specified partition is invalid for an EventHub partition sender or receiver. "
        f"It should be between 0 and {len(hub.partitions) - 1}. It was '{excerpt(partition_id)}'."
    )
