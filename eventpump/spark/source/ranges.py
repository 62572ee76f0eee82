"""How far a range is read, and what became of the rest. Pure."""

from __future__ import annotations

from bisect import bisect_left

from eventpump.eventhubs.events import ReceivedEvent
from eventpump.interfaces import PartitionProperties
from eventpump.spark.source.offsets import SequenceRange


def number_of(message: bytes) -> int:
    """Return an encoded event's sequence number.

    Raises:
        EventError: It has none.
    """
    return ReceivedEvent(message).sequence_number


class RangeProgress:
    """How far one range is read.

    Numbers may have gaps: a compacted hub drops what is superseded. So a range ends at the first event at or past its
    end, and what is missing is lost only where the partition begins behind it.

    Attributes:
        next: The number from which on nothing is read yet.
        end: The number before which the range ends.
        gap: The first number found missing by the last `received`; None where none was.
    """

    def __init__(self, wanted: SequenceRange) -> None:
        self.partition_id = wanted.partition_id
        self.next = wanted.start
        self.end = max(wanted.start, wanted.end)
        self.gap: int | None = None
        self._has_passed_end = False

    @property
    def is_done(self) -> bool:
        """Whether nothing more of the range can come."""
        return self.next >= self.end

    @property
    def left(self) -> int:
        """How many numbers are left, so how many events at most."""
        return self.end - self.next

    @property
    def is_at_end(self) -> bool:
        """Whether a link that gave exactly this range can go on at `end`: nothing behind it was taken off the link."""
        return self.is_done and not self._has_passed_end

    def received(self, messages: list[bytes]) -> list[bytes]:
        """Take in events in their order, and give those within the range.

        Raises:
            ValueError: The numbers run backwards; the text says how.
        """
        self.gap = None
        first, last = number_of(messages[0]), number_of(messages[-1])
        if first == self.next and last - first == len(messages) - 1 and last < self.end:
            # The usual case is told by its ends; numbers within a delivery cannot but rise.
            self.next = last + 1
            return messages
        numbers = [number_of(message) for message in messages]
        for number in numbers:
            if number < self.next:
                raise ValueError(f"event {number} came where {self.next} or a later one was due")
            if number > self.next and self.gap is None and self.next < self.end:
                self.gap = self.next
            self.next = number + 1
        if self.next > self.end:
            self._has_passed_end = True
            self.next = self.end
            return messages[: bisect_left(numbers, self.end)]
        return messages

    def missing(self, since: int, properties: PartitionProperties) -> str | None:
        """Say what of the range is lost, as a partition shows after an event was due and another, or none, came.

        Args:
            since: The first number that is missing.

        Returns:
            None where nothing is: it was compacted, or is only slow.
        """
        last = properties.last_enqueued_sequence_number
        first = last + 1 if properties.is_empty else properties.beginning_sequence_number
        if first > since:
            return f"events {since} to {min(first, self.end) - 1} are gone: the partition begins at {first} now"
        if last + 1 < self.end:
            return (
                f"events up to {self.end - 1} were due, and the partition ends at {last}: it is not the one it was, "
                "as after its hub was deleted and created anew"
            )
        return None

    def give_up_missing(self, properties: PartitionProperties) -> None:
        """Want no more of what `missing` told of, where nothing came."""
        last = properties.last_enqueued_sequence_number
        first = last + 1 if properties.is_empty else properties.beginning_sequence_number
        self.end = max(min(self.end, last + 1), self.next)
        self.next = min(max(self.next, first), self.end)
