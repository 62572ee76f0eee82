"""How frames go out: what a connection, its sessions and its links share for sending (AMQP 1.0, 2.3, 2.4.1, 5.3.1)."""

from __future__ import annotations

from eventpump.amqp.fitting import FRAME_SIZE_TOO_SMALL, shorten
from eventpump.amqp.performatives import Close, Composite, End
from eventpump.amqp.trace import Trace
from eventpump.errors import ProtocolError

MIN_MAX_FRAME_SIZE = 512
"""Bytes that every peer takes in a frame, also one that has not said how many it takes (2.8.16)."""


class FrameWriter:
    """Queues frames for the shell to send.

    Attributes:
        is_open: Whether sessions and links may send: after both opens, before a close.
        trace: Called with each frame sent or received; None for no trace.
    """

    __slots__ = ("is_open", "max_frame_size", "output", "trace")

    def __init__(self) -> None:
        self.output: list[bytes | memoryview] = []
        self.max_frame_size = MIN_MAX_FRAME_SIZE
        self.is_open = False
        self.trace: Trace | None = None

    def send(self, channel: int, performative: Composite) -> bool:
        """Queue one performative as a frame that the peer takes (2.4.1).

        One that is too large is sent with less in it where that is possible: a shorter error, no properties of an open.
        """
        body = performative.encode()
        if isinstance(performative, End | Close) and performative.error is None:
            assert body[3] == 0xC0  # never list0: a peer's decoder fails on it (protocol.md 13)
        room = self.max_frame_size - 8
        if len(body) > room:
            shortened = shorten(performative, len(body) - room)
            body = shortened.encode()
            if len(body) > room:
                return False
        self._write(b"\x02\x00" + channel.to_bytes(2, "big"), body)
        if self.trace is not None:
            self.trace.frame(channel, performative, is_sent=True)
        return True

    def send_sasl(self, performative: Composite) -> None:
        """Queue one performative as a SASL frame.
        Raises `ProtocolError` if it exceeds 512 bytes, which every peer takes."""
        body = performative.encode()
        if len(body) + 8 > MIN_MAX_FRAME_SIZE:  # 5.3.1
            raise ProtocolError(FRAME_SIZE_TOO_SMALL, "a SASL frame larger than any peer must take")
        self._write(b"\x02\x01\x00\x00", body)
        if self.trace is not None:
            self.trace.frame(0, performative, is_sent=True)

    def _write(self, header: bytes, body: bytes) -> None:
        self.output.append((len(body) + 8).to_bytes(4, "big") + header + body)
