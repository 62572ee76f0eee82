"""How transfers become deliveries at the receiving end of a link (AMQP 1.0, 2.6.7, 2.6.14, 2.7.5)."""

from __future__ import annotations

from typing import NamedTuple

from eventpump.amqp.performatives import Transfer
from eventpump.compiled import based_on_core


class Delivery(NamedTuple):
    """A message that has arrived whole. If the sender settled it, there is nothing to settle."""

    payload: bytes
    delivery_id: int
    message_format: int
    is_settled: bool


class Violation(NamedTuple):
    """Why a link must be detached: its peer exceeded what it was granted."""

    condition: str
    description: str


class UnfinishedBytes:
    """Counts the bytes of deliveries that are not whole yet, over all links of a connection."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0

    def add(self, size: int, limit: int | None) -> bool:
        """Count more bytes. Return False, and count none, where there would be more than `limit` then."""
        if limit is not None and self.count + size > limit:
            return False
        self.count += size
        return True

    def remove(self, size: int) -> None:
        """Stop counting bytes that are no longer held."""
        self.count -= size


@based_on_core("PlainReassembly")
class Reassembly:
    """The delivery that is arriving on a link.

    Attributes:
        buffer: The payload received so far; None between deliveries.
        is_settled: Whether one of its transfers stated that it is settled.
    """

    __slots__ = ("_unfinished", "buffer", "delivery_id", "is_settled", "message_format")

    def __init__(self, unfinished: UnfinishedBytes) -> None:
        self._unfinished = unfinished
        self.buffer: bytearray | None = None
        self.delivery_id = 0
        self.message_format = 0
        self.is_settled = False

    def begin(self, delivery_id: int, message_format: int) -> None:
        """Start a delivery, at its first transfer."""
        self.buffer = bytearray()
        self.delivery_id = delivery_id
        self.message_format = message_format
        self.is_settled = False

    def add(
        self, transfer: Transfer, payload: bytes, size_limit: int, total_limit: int | None
    ) -> Delivery | Violation | None:
        """Add a transfer, its first one too, to the delivery.

        Args:
            size_limit: The largest message, in bytes.
            total_limit: How many bytes of unfinished deliveries the connection holds at most; None for no limit.

        Returns:
            The delivery where it is whole now; a violation where it is larger than allowed; None where more follows, or
            where it was aborted.
        """
        buffer = self.buffer
        assert buffer is not None
        if transfer.settled:
            self.is_settled = True
        if transfer.aborted:
            self.drop()
            return None
        if len(buffer) + len(payload) > size_limit:
            return Violation("amqp:link:message-size-exceeded", f"a message of more than {size_limit} bytes")
        if transfer.more:
            if not self._unfinished.add(len(payload), total_limit):
                return Violation(
                    "amqp:resource-limit-exceeded",
                    f"the unfinished messages of one connection take more than {total_limit} bytes",
                )
            buffer += payload
            return None
        self.drop()
        whole = b"".join((buffer, payload)) if buffer else payload
        return Delivery(whole, self.delivery_id, self.message_format, self.is_settled)

    def drop(self) -> None:
        """Release what is held: the delivery is whole, aborted, or will never be whole. Does nothing between them."""
        if self.buffer is not None:
            self._unfinished.remove(len(self.buffer))
            self.buffer = None
