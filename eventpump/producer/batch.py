"""A batch of events, filled to what one message holds."""

from __future__ import annotations

from eventpump.dialect.envelope import EnvelopeSize, encode_batch
from eventpump.errors import EventError, EventTooLargeError
from eventpump.events import EventData


class EventBatch:
    """Events for one message to one target. Made by a producer's `create_batch`.

    :ivar max_size: bytes.
    :ivar partition_id: the partition it is for, None for another target.
    :ivar partition_key: the key its events share, None for none.
    """

    __slots__ = ("_events", "_size", "max_size", "partition_id", "partition_key")

    def __init__(self, max_size: int, *, partition_id: str | None = None, partition_key: str | None = None) -> None:
        self.max_size = max_size
        self.partition_id = partition_id
        self.partition_key = partition_key
        self._events: list[bytes] = []
        self._size = EnvelopeSize(partition_key)

    def try_add(self, event: EventData) -> bool:
        """Add an event. :returns: False, and nothing added, where it does not fit any more.

        :raises EventTooLargeError: it would not fit an empty batch either.
        :raises EventError: it is no `EventData`, or cannot be encoded.
        """
        if not isinstance(event, EventData):
            raise EventError(f"an event to send is an EventData, not {type(event).__name__}")
        encoded = event.encode(self.partition_key)
        size = self._size.with_event(len(encoded))
        if size > self.max_size:
            if not self._events:
                raise EventTooLargeError(size, self.max_size)
            return False
        self._size.add(len(encoded))
        self._events.append(encoded)
        return True

    @property
    def count(self) -> int:
        """How many events it holds."""
        return len(self._events)

    @property
    def size(self) -> int:
        """Its size on the wire, in bytes."""
        return self._size.size

    def encode(self) -> bytes:
        """Encode it as one message of the batch format."""
        return encode_batch(self._events, self.partition_key)

    def __len__(self) -> int:
        return len(self._events)

    def __repr__(self) -> str:
        return f"EventBatch({self.count} events, {self.size} of {self.max_size} bytes)"
