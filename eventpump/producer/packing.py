"""Packing encoded events into messages under a size limit."""

from __future__ import annotations

from eventpump.compiled import based_on_core
from eventpump.errors import EventTooLargeError
from eventpump.eventhubs.envelope import envelope_head
from eventpump.eventhubs.sealing import SealedBatch


@based_on_core("PlainPacker")
class BatchPacker:
    """Packs encoded events into one message after the other, each no larger than a limit.

    Args:
        partition_key: The key that the service routes the message by; None for none.
        oversized: Whether an event larger than the limit makes a message of its own, and is not an error.
    """

    __slots__ = ("_idempotent", "_oversized", "_pieces", "_stamped", "limit", "partition_key", "size")

    def __init__(
        self,
        limit: int,
        *,
        partition_key: str | None = None,
        idempotent: bool = False,
        stamped: bool = False,
        oversized: bool = False,
    ) -> None:
        self.limit = limit
        self.partition_key = partition_key
        self.size = len(envelope_head(partition_key))
        self._idempotent = idempotent
        self._stamped = stamped
        self._oversized = oversized
        self._pieces: list[bytes] = []

    def add(self, head: bytes, rest: bytes) -> bool:
        """Add an event to the message being packed.

        Returns:
            Whether it was added; False, if it does not fit any more.

        Raises:
            EventTooLargeError: It does not fit an empty message either, and `oversized` is not set.
        """
        size = self.size + len(head) + len(rest)
        if size > self.limit:
            if self._pieces:
                return False
            if not self._oversized:
                raise EventTooLargeError(size, self.limit)
        self.size = size
        self._pieces += (head, rest)
        return True

    def pack(self, head: bytes, rest: bytes) -> SealedBatch | None:
        """Add an event, to the next message if it does not fit any more: return the message that is full then."""
        if self.add(head, rest):
            return None
        sealed = self.take()
        self.add(head, rest)
        return sealed

    @property
    def count(self) -> int:
        """The number of events in the message being packed."""
        return len(self._pieces) // 2

    def size_of(self, start: int, end: int) -> int:
        """Return the size of the events from number `start` to `end`, in bytes."""
        return sum(map(len, self._pieces[2 * start : 2 * end]))

    def divide(self, start: int, end: int, limit: int | None) -> list[SealedBatch]:
        """Return the events from number `start` to `end` as several messages.

        Args:
            limit: The maximum size of each message, in bytes, as far as it has more than one event; None if it is not
                known. Then, and where they all fit one message, they are divided into halves.
        """
        pieces = self._pieces[2 * start : 2 * end]
        if limit is not None:
            packer = BatchPacker(limit, idempotent=self._idempotent, stamped=self._stamped, oversized=True)
            packed = [packer.pack(head, rest) for head, rest in zip(pieces[::2], pieces[1::2], strict=True)]
            if packer.count < end - start:
                return [*(sealed for sealed in packed if sealed is not None), packer.take()]
        middle = (end - start) // 2 * 2
        return [self._sealed(pieces[:middle]), self._sealed(pieces[middle:])]

    def seal(self) -> SealedBatch:
        """Return the message being packed, which does not change if events are added.
        Raises `ValueError` if there are none."""
        # Plain, they are joined at once.
        return self._sealed(tuple(self._pieces) if self._idempotent else self._pieces, self.size)

    def take(self) -> SealedBatch:
        """Return the message being packed, and begin the next one. Raises `ValueError` if there are no events in it."""
        sealed = self._sealed(self._pieces, self.size)
        self._pieces = []
        self.size = len(envelope_head(self.partition_key))
        return sealed

    def _sealed(self, pieces: list[bytes] | tuple[bytes, ...], size: int | None = None) -> SealedBatch:
        return SealedBatch(
            pieces, partition_key=self.partition_key, idempotent=self._idempotent, stamped=self._stamped, size=size
        )
