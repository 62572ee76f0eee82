"""A session (AMQP 1.0, part 2.5): a two-way, windowed sequence of transfers over one channel."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from eventpump.amqp.config import ConnectionConfig
from eventpump.amqp.fitting import FRAME_SIZE_TOO_SMALL
from eventpump.amqp.flow import UINT, SessionFlow, SessionState
from eventpump.amqp.frames import FrameWriter
from eventpump.amqp.link import Link
from eventpump.amqp.performatives import (
    Accepted,
    AmqpError,
    Attach,
    Begin,
    Detach,
    Disposition,
    End,
    Flow,
    Modified,
    Rejected,
    Released,
    Source,
    Target,
    Transfer,
)
from eventpump.amqp.receiver import Delivery, UnfinishedBytes, Violation
from eventpump.errors import ClosedError, ProtocolError

_TERMINAL = (Accepted, Rejected, Released, Modified)


class SessionInput(enum.Enum):
    """What can happen to a session."""

    END = "this end ends it"
    RECEIVE_BEGIN = "the peer's begin arrives"
    RECEIVE_END = "the peer ends it"


class SessionAction(enum.Enum):
    """What a session does then."""

    NOTHING = "nothing"
    REPORT = "report that it is mapped"
    SEND_END = "send an end"


SESSION_STEPS: Mapping[tuple[SessionState, SessionInput], tuple[SessionAction, SessionState]] = MappingProxyType(
    {
        (SessionState.BEGIN_SENT, SessionInput.RECEIVE_BEGIN): (SessionAction.REPORT, SessionState.MAPPED),
        (SessionState.BEGIN_SENT, SessionInput.END): (SessionAction.SEND_END, SessionState.END_SENT),
        (SessionState.MAPPED, SessionInput.END): (SessionAction.SEND_END, SessionState.END_SENT),
        (SessionState.MAPPED, SessionInput.RECEIVE_END): (SessionAction.SEND_END, SessionState.ENDED),
        (SessionState.END_SENT, SessionInput.RECEIVE_BEGIN): (SessionAction.NOTHING, SessionState.END_SENT),
        (SessionState.END_SENT, SessionInput.RECEIVE_END): (SessionAction.NOTHING, SessionState.ENDED),
    }
)
"""Every change of a session's state: what it does, and the state after it. Where there is no entry, nothing happens."""


class Session(SessionFlow):
    """One end of a session. Made by `Connection.begin`, or for the peer's begin by the engine.

    Attributes:
        links_by_remote_handle: The links that the peer has attached, by its handles.
        kept: What the peer's begin takes here, in bytes, as `Connection.kept` counts it.
    """

    def __init__(
        self,
        frames: FrameWriter,
        config: ConnectionConfig,
        unfinished_bytes: UnfinishedBytes,
        channel: int,
        *,
        is_remote_initiated: bool,
    ) -> None:
        super().__init__(frames, config, unfinished_bytes, channel)
        self.is_remote_initiated = is_remote_initiated
        self.remote: Begin | None = None
        self.links: dict[int, Link] = {}
        self.links_by_remote_handle: dict[int, Link] = {}
        self.kept = 0
        self._next_handle = 0

    # ----------------------------------------------------------------------------------------- the verbs

    @property
    def free_handles(self) -> int:
        """How many more links the peer allows here; 0 until it has answered (2.7.2, handle-max)."""
        return max(self._highest_handle + 1 - len(self.links), 0) if self.is_open else 0

    @property
    def _highest_handle(self) -> int:
        assert self.remote is not None
        return min(self.remote.handle_max, self.config.handle_max)

    def attach(
        self,
        name: str,
        *,
        is_receiver: bool,
        source: Source,
        target: Target,
        snd_settle_mode: int = 0,
        rcv_settle_mode: int = 0,
        max_message_size: int | None = None,
        properties: Mapping[str, Any] | None = None,
        desired_capabilities: Sequence[str] = (),
    ) -> Link:
        """Attach a link (2.6.3). The answer is reported as `LinkAttached`, or `LinkDetached` if it is refused."""
        if not self.is_open:
            raise ClosedError("session")
        assert self.free_handles > 0, "the caller spreads links over sessions"
        link = self._new_link(name, is_receiver=is_receiver, is_remote_initiated=False)
        link.limit_messages(max_message_size)
        link.snd_settle_mode = snd_settle_mode
        attach = Attach(
            name=name,
            handle=link.handle,
            role=is_receiver,
            snd_settle_mode=snd_settle_mode,
            rcv_settle_mode=rcv_settle_mode,
            source=source,
            target=target,
            initial_delivery_count=None if is_receiver else 0,
            max_message_size=max_message_size,
            desired_capabilities=list(desired_capabilities) or None,  # type: ignore[arg-type]  # symbols are made when encoding
            properties=dict(properties) if properties else None,
        )
        if not self.frames.send(self.channel, attach):
            del self.links[link.handle]
            raise ProtocolError(
                FRAME_SIZE_TOO_SMALL, f"the attach does not fit into {self.frames.max_frame_size} bytes"
            )
        return link

    def end(self, error: AmqpError | None = None) -> None:
        """End the session (2.5.5). Does nothing on one already ending."""
        if self._step(SessionInput.END, error) is not None:
            self.stop()

    def _step(self, happened: SessionInput, error: AmqpError | None = None) -> SessionAction | None:
        """Go to the next state, and send the end that is due. Returns None where nothing happens in this state."""
        action, state = SESSION_STEPS.get((self.state, happened), (None, self.state))
        if action is SessionAction.SEND_END:
            self.send(End(error=error))  # while the state still allows it
        self.state = state
        return action

    def stop(self) -> None:
        """Stop: drop what waits for the window and what arrives, and take all credit from the links."""
        self._blocked.clear()
        self.unsettled.clear()
        for link in self.links.values():
            link.stop()

    def release(self) -> None:
        """Drop the links: the connection has ended and its last event is handled."""
        self.links.clear()
        self.links_by_remote_handle.clear()

    def _new_link(self, name: str, *, is_receiver: bool, is_remote_initiated: bool) -> Link:
        # Handles are given in turn, so that a new link seldom gets one that was just freed, up to the peer's limit.
        count = self._highest_handle + 1
        if len(self.links) >= count:
            raise ProtocolError("amqp:resource-limit-exceeded", f"more than {count} links in a session")
        handle = self._next_handle % count
        while handle in self.links:
            handle = (handle + 1) % count
        self._next_handle = handle + 1
        link = Link(self, name, handle, is_receiver=is_receiver, is_remote_initiated=is_remote_initiated)
        self.links[handle] = link
        return link

    # ------------------------------------------------------------------------------------------- sending

    def send_begin(self) -> None:
        """Queue this end's begin."""
        config = self.config
        self.send(
            Begin(
                remote_channel=self.remote_channel if self.is_remote_initiated else None,
                next_outgoing_id=self.next_outgoing_id,
                incoming_window=config.incoming_window,
                outgoing_window=self.outgoing_window,
                handle_max=config.handle_max,
            )
        )

    # ----------------------------------------------------------------------------------------- receiving

    def on_begin(self, begin: Begin, channel: int, kept: int) -> None:
        """Handle the peer's begin, once per session; `kept` is what it takes here, in bytes."""
        self.remote = begin
        self.kept = kept
        self.remote_channel = channel
        self.next_incoming_id = begin.next_outgoing_id
        self.remote_incoming_window = begin.incoming_window
        self._step(SessionInput.RECEIVE_BEGIN)

    def on_transfer(
        self, transfer: Transfer, payload: bytes, unfinished_limit: int | None
    ) -> tuple[Link, Delivery | Violation | None]:
        """Handle a transfer (`Link.on_transfer`), unless the session is ending;
        return its link, and what follows for it."""
        self.used_window(1)
        link = self._link_of(transfer.handle)
        return link, link.on_transfer(transfer, payload, unfinished_limit)

    def _link_of(self, handle: int) -> Link:
        link = self.links_by_remote_handle.get(handle)
        if link is None:
            raise ProtocolError("amqp:session:unattached-handle", f"handle {handle} is not attached")
        return link

    def on_attach(self, attach: Attach, kept: int) -> tuple[Link, bool]:
        """Handle the peer's attach. Returns the link, and whether it is to be reported (`Link.on_attach`)."""
        if attach.handle in self.links_by_remote_handle:
            raise ProtocolError("amqp:session:handle-in-use", f"handle {attach.handle} is attached already")
        if attach.handle > self.config.handle_max:
            raise ProtocolError("amqp:connection:framing-error", f"handle {attach.handle} is above the handle-max")
        link = next(
            (
                each
                for each in self.links.values()
                if each.name == attach.name and each.is_receiver is not attach.role and each.remote_handle is None
            ),
            None,
        )
        if link is None:
            link = self._new_link(attach.name, is_receiver=not attach.role, is_remote_initiated=True)
        self.links_by_remote_handle[attach.handle] = link
        return link, link.on_attach(attach, kept)

    def on_detach(self, detach: Detach) -> Link:
        """Handle the peer's detach, and answer it."""
        link = self._link_of(detach.handle)
        del self.links_by_remote_handle[detach.handle]
        link.on_detach(detach)
        self._forget(link)
        return link

    def _forget(self, link: Link) -> None:
        del self.links[link.handle]
        if not link.is_receiver:
            for delivery_id in [key for key, handle in self.unsettled.items() if handle == link.handle]:
                del self.unsettled[delivery_id]

    def on_flow(self, flow: Flow) -> list[Link]:
        """Handle a flow; return the links to report: senders that may send more, receivers that are drained."""
        ready: list[Link] = []
        if self.open_window(flow):
            ready = [link for link in self.links.values() if not link.is_receiver and (link.credit > 0 or link.drain)]
        if flow.handle is not None:
            link = self._link_of(flow.handle)
            if link.on_flow(flow) and link not in ready:
                ready.append(link)
            if flow.echo and link.is_attached and link.answers_echo:
                self.send_flow(link.handle, delivery_count=link.delivery_count, credit=max(link.credit, 0))
        elif flow.echo:
            self.send_flow()
        return ready

    def answered(self, flow: Flow) -> Link | None:
        """Return the receiver link whose probe a flow answers, once per probe; None where it answers none."""
        link = None if flow.handle is None else self.links_by_remote_handle.get(flow.handle)
        return link if link is not None and link.answer_probe() else None

    def on_disposition(self, disposition: Disposition) -> dict[Link, list[tuple[int, Any]]]:
        """Handle a disposition; return the deliveries that it settles, with their outcomes, of each sender link."""
        first = disposition.first
        last = first if disposition.last is None else disposition.last
        span = (last - first) & UINT
        if span > UINT >> 1:
            raise ProtocolError("amqp:invalid-field", "a disposition's last is before its first")
        state = disposition.state
        if not disposition.role:
            return {}
        is_terminal = isinstance(state, _TERMINAL)
        if not is_terminal and not disposition.settled:
            return {}
        reported: dict[Link, list[tuple[int, Any]]] = {}
        if not span:
            ids = [first] if first in self.unsettled else []
        elif span < len(self.unsettled):
            ids = [each for each in ((first + step) & UINT for step in range(span + 1)) if each in self.unsettled]
        else:
            ids = sorted(
                (each for each in self.unsettled if (each - first) & UINT <= span),
                key=lambda each: (each - first) & UINT,
            )
        # 3.4: settled without a state leaves the sender to its default, which is released here: not taken.
        outcome = state if is_terminal else Released()
        for delivery_id in ids:
            reported.setdefault(self.links[self.unsettled.pop(delivery_id)], []).append((delivery_id, outcome))
        if not disposition.settled and ids:
            # 2.6.12, rcv-settle-mode second: the receiver settles once the sender has.
            self.send(Disposition(role=False, first=ids[0], last=ids[-1], settled=True, state=state))
        return reported

    def on_end(self) -> list[Link]:
        """Handle the peer's end, and answer it. Returns the links that ended with the session."""
        self._step(SessionInput.RECEIVE_END)
        self._blocked.clear()
        ended = list(self.links.values())
        for link in ended:
            link.on_session_ended()
        self.links.clear()
        self.links_by_remote_handle.clear()
        self.unsettled.clear()
        return ended
