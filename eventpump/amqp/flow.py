"""The flow of a session (AMQP 1.0, 2.5.6): its windows and ids, and how what its links send goes out."""

from __future__ import annotations

import enum
from collections import deque

from eventpump.amqp.config import ConnectionConfig
from eventpump.amqp.fitting import FRAME_SIZE_TOO_SMALL
from eventpump.amqp.frames import FrameWriter
from eventpump.amqp.performatives import AmqpError, Composite, Flow
from eventpump.amqp.receiver import UnfinishedBytes
from eventpump.compiled import based_on_core

UINT = 0xFFFF_FFFF


class SessionState(enum.Enum):
    """Where a session is between begin and end (2.5.5)."""

    BEGIN_SENT = "begin sent"
    MAPPED = "mapped"
    END_SENT = "end sent"
    ENDED = "ended"


@based_on_core("PlainSession")
class SessionFlow:
    """A session as its links see it. What a link sends goes out here; `Session` adds what the peer sends.

    Args:
        unfinished_bytes: Counts what has arrived of messages that are not whole, over all links of the connection.

    Attributes:
        remote_channel: The peer's channel, once its begin has arrived.
        unsettled: The handle of the link of each delivery that the peer has not settled, by delivery id.
        reopens_at: How many transfers the peer may still send when the window is opened again.
        remote_incoming_window: How many transfers the peer takes now.
        is_starved: Whether a sender was held back by the window since it last opened.
    """

    __slots__ = (
        "_blocked",
        "_initial_outgoing_id",
        "channel",
        "config",
        "frames",
        "incoming_window",
        "is_starved",
        "next_incoming_id",
        "next_outgoing_id",
        "outgoing_delivery_id",
        "remote_channel",
        "remote_incoming_window",
        "reopens_at",
        "state",
        "unfinished_bytes",
        "unsettled",
    )

    def __init__(
        self, frames: FrameWriter, config: ConnectionConfig, unfinished_bytes: UnfinishedBytes, channel: int
    ) -> None:
        self.frames = frames
        self.config = config
        self.unfinished_bytes = unfinished_bytes
        self.channel = channel
        self.remote_channel: int | None = None
        self.state = SessionState.BEGIN_SENT
        self.unsettled: dict[int, int] = {}
        self.outgoing_delivery_id = 0
        self.next_outgoing_id = config.first_transfer_id
        self.next_incoming_id = 0
        self.incoming_window = config.incoming_window
        self.reopens_at = config.incoming_window >> 1
        self.remote_incoming_window = 0
        self.is_starved = False
        self._blocked: deque[tuple[int, bytes, memoryview]] = deque()
        self._initial_outgoing_id = config.first_transfer_id

    def end(self, error: AmqpError | None = None) -> None:
        """End the session (2.5.5). Does nothing on one that is ending."""
        raise NotImplementedError

    @property
    def is_open(self) -> bool:
        """Whether links can be attached and used here."""
        return self.state is SessionState.MAPPED and self.frames.is_open

    @property
    def outgoing_window(self) -> int:
        """The outgoing window that this end states."""
        window = self.config.outgoing_window
        return max(self.remote_incoming_window, 0) if window is None else window

    @property
    def is_blocked(self) -> bool:
        """Whether messages wait for the peer to open the session window."""
        return bool(self._blocked)

    # ------------------------------------------------------------------------------------------- sending

    def send(self, performative: Composite) -> None:
        """Queue one performative on this session's channel; after an end or close nothing more may follow.

        Where it does not fit into the peer's max-frame-size, the session is ended: the two ends would no longer agree
        on its state.
        """
        if self.state not in (SessionState.BEGIN_SENT, SessionState.MAPPED) or not self.frames.is_open:
            return
        if not self.frames.send(self.channel, performative):
            what = type(performative).__name__.lower()
            self.end(AmqpError(FRAME_SIZE_TOO_SMALL, f"The {what} that is due does not fit into a frame."))

    def send_flow(
        self,
        handle: int | None = None,
        *,
        delivery_count: int | None = None,
        credit: int | None = None,
        drain: bool = False,
        echo: bool = False,
    ) -> None:
        """Queue a flow: this end's windows, and the credit of the link of a handle, where one is given (2.7.4).

        A link's flow states that no message waits for credit: what is not sent yet is not counted here.
        """
        self.incoming_window = self.config.incoming_window
        self.send(
            Flow(
                next_incoming_id=self.next_incoming_id,
                incoming_window=self.incoming_window,
                next_outgoing_id=self.next_outgoing_id,
                outgoing_window=self.outgoing_window,
                handle=handle,
                delivery_count=delivery_count,
                link_credit=credit,
                available=None if handle is None else 0,
                drain=drain,
                echo=echo,
            )
        )

    def next_delivery_id(self, unsettled_on: int | None) -> int:
        """Return the next delivery id (2.6.12); `unsettled_on` is the handle of the link on which it is settled."""
        delivery_id = self.outgoing_delivery_id
        self.outgoing_delivery_id = (delivery_id + 1) & UINT
        if unsettled_on is not None:
            self.unsettled[delivery_id] = unsettled_on
        return delivery_id

    def sent_run(self, count: int) -> None:
        """Count settled transfers that a link has queued, with consecutive delivery ids and within the window."""
        self.outgoing_delivery_id = (self.outgoing_delivery_id + count) & UINT
        self.next_outgoing_id = (self.next_outgoing_id + count) & UINT
        self.remote_incoming_window -= count

    def mark_starved(self) -> None:
        """Record that a sender may have been held back by the window."""
        self.is_starved = self.is_starved or self.remote_incoming_window <= 0

    def send_transfer(self, handle: int, header: bytes, payload: memoryview) -> None:
        """Queue a transfer frame, or hold it back until the peer's window opens (2.5.6)."""
        if self.remote_incoming_window <= 0 or self._blocked:
            self._blocked.append((handle, header, payload))
        else:
            self._write_transfer(handle, header, payload)

    def _write_transfer(self, handle: int, header: bytes, payload: memoryview) -> None:
        self.remote_incoming_window -= 1
        self.next_outgoing_id = (self.next_outgoing_id + 1) & UINT
        frames = self.frames
        frames.output += (header, payload)
        if frames.trace is not None:
            frames.trace.transfers(self.channel, handle, 1, len(payload), is_sent=True)

    def unblock(self, handle: int) -> None:
        """Drop what is held back for a link that has ended: another link may get its handle."""
        if self._blocked:
            self._blocked = deque(held for held in self._blocked if held[0] != handle)

    # ----------------------------------------------------------------------------------------- receiving

    def used_window(self, frames: int) -> None:
        """Count transfers that arrived, and open the window again when half of it is used."""
        self.next_incoming_id = (self.next_incoming_id + frames) & UINT
        self.incoming_window -= frames
        if self.incoming_window <= self.reopens_at and self.state is SessionState.MAPPED:
            self.send_flow()

    def open_window(self, flow: Flow) -> bool:
        """Handle the window of a flow of the peer (2.5.6), and send what was held back for it."""
        expected = self._initial_outgoing_id if flow.next_incoming_id is None else flow.next_incoming_id
        ahead = (self.next_outgoing_id - expected) & UINT
        if ahead > UINT >> 1:
            ahead = 0
        self.remote_incoming_window = max(flow.incoming_window - ahead, 0)
        while self._blocked and self.remote_incoming_window > 0:
            self._write_transfer(*self._blocked.popleft())
            self.is_starved = True  # a drain may wait for it
        if not self.is_starved or self.remote_incoming_window <= 0:
            return False
        self.is_starved = False
        return True
