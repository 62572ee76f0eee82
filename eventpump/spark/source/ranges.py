"""Progress of reading a range. Pure."""

from __future__ import annotations

from bisect import bisect_left

from eventpump.core.starts import NumberWatch, retained_from
from eventpump.eventhubs.events import ReceivedEvent
from eventpump.interfaces import PartitionProperties
from eventpump.spark.source.offsets import SequenceRange


def number_of(message: bytes) -> int:
    """Return an encoded event's sequence number. Raises `EventError` if it has none."""
    return ReceivedEvent(message).sequence_number


class RangeProgress:
    """The progress of reading one range.

    Numbers may have gaps: a compacted hub drops superseded events. So a range ends at the first event at or after its
    end, and missing numbers are lost only if the partition begins after them.
    """

    def __init__(self, wanted: SequenceRange) -> None:
        self.partition_id = wanted.partition_id
        self.next = wanted.start
        self.end = max(wanted.start, wanted.end)
        # Each gap is judged at once: the task ends with its range.
        self.numbers = NumberWatch(None, through=self.end - 1, max_pause=0.0)
        self._has_passed_end = False

    @property
    def is_done(self) -> bool:
        """Whether the range is completely read."""
        return self.next >= self.end

    @property
    def left(self) -> int:
        """How many numbers are left: an upper bound of the events left."""
        return self.end - self.next

    @property
    def is_at_end(self) -> bool:
        """Whether the link of this range can continue at `end`: no event after it was received."""
        return self.is_done and not self._has_passed_end

    def received(self, messages: list[bytes]) -> list[bytes]:
        """Record received events, in order; return those within the range.
        Raises `ValueError` if the numbers go backwards."""
        first, last = number_of(messages[0]), number_of(messages[-1])
        if first == self.next and last - first == len(messages) - 1 and last < self.end:
            # The usual case is recognized by its two ends; numbers within a delivery always increase.
            self.next = last + 1
            return messages
        numbers = [number_of(message) for message in messages]
        for number in numbers:
            if number < self.next:
                raise ValueError(f"received event {number}, but expected {self.next} or a later one")
            if number > self.next and self.next < self.end:
                self.numbers.missed(self.next, min(number, self.end) - 1)
            self.next = number + 1
        if self.next > self.end:
            self._has_passed_end = True
            self.next = self.end
            return messages[: bisect_left(numbers, self.end)]
        return messages

    def overdue(self) -> None:
        """Record that the rest of the range is missing, after a time-out."""
        self.numbers.missed(self.next, self.end - 1)

    def give_up_missing(self, properties: PartitionProperties) -> None:
        """Skip the events that are lost, after `overdue`."""
        self.end = max(min(self.end, properties.last_enqueued_sequence_number + 1), self.next)
        self.next = min(max(self.next, retained_from(properties)), self.end)
        self.numbers.through = self.end - 1
