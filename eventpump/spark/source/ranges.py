"""Progress of reading a range, and detection of lost events. Pure."""

from __future__ import annotations

from bisect import bisect_left

from eventpump.eventhubs.events import ReceivedEvent
from eventpump.interfaces import PartitionProperties
from eventpump.spark.source.offsets import SequenceRange


def number_of(message: bytes) -> int:
    """Return an encoded event's sequence number.

    Raises:
        EventError: The event has none.
    """
    return ReceivedEvent(message).sequence_number


class RangeProgress:
    """The progress of reading one range.

    Numbers may have gaps: a compacted hub drops superseded events. So a range ends at the first event at or after its
    end, and missing numbers are lost only if the partition begins after them.

    Attributes:
        next: The next number to read.
        end: The number before which the range ends.
        gap: The first number that was missing in the last `received`; None if none was.
    """

    def __init__(self, wanted: SequenceRange) -> None:
        self.partition_id = wanted.partition_id
        self.next = wanted.start
        self.end = max(wanted.start, wanted.end)
        self.gap: int | None = None
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
        """Record received events, in order, and return those within the range.

        Raises:
            ValueError: The numbers go backwards; the text has them.
        """
        self.gap = None
        first, last = number_of(messages[0]), number_of(messages[-1])
        if first == self.next and last - first == len(messages) - 1 and last < self.end:
            # The usual case is recognized by its two ends; numbers within a delivery always increase.
            self.next = last + 1
            return messages
        numbers = [number_of(message) for message in messages]
        for number in numbers:
            if number < self.next:
                raise ValueError(f"received event {number}, but expected {self.next} or a later one")
            if number > self.next and self.gap is None and self.next < self.end:
                self.gap = self.next
            self.next = number + 1
        if self.next > self.end:
            self._has_passed_end = True
            self.next = self.end
            return messages[: bisect_left(numbers, self.end)]
        return messages

    def missing(self, since: int, properties: PartitionProperties) -> str | None:
        """Return a description of the lost events, by the partition's properties after a gap or a time-out.

        Args:
            since: The first number that is missing.

        Returns:
            None if nothing is lost: the events were compacted, or are only late.
        """
        last = properties.last_enqueued_sequence_number
        first = last + 1 if properties.is_empty else properties.beginning_sequence_number
        if first > since:
            return f"events {since} to {min(first, self.end) - 1} are gone: the partition now begins at {first}"
        if last + 1 < self.end:
            return (
                f"events up to {self.end - 1} were expected, but the partition ends at {last}: the hub was "
                "probably deleted and recreated"
            )
        return None

    def give_up_missing(self, properties: PartitionProperties) -> None:
        """Skip the events that `missing` reported as lost after a time-out."""
        last = properties.last_enqueued_sequence_number
        first = last + 1 if properties.is_empty else properties.beginning_sequence_number
        self.end = max(min(self.end, last + 1), self.next)
        self.next = min(max(self.next, first), self.end)
