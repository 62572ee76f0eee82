"""A link (AMQP 1.0, part 2.6): one direction of messages between two nodes."""

from __future__ import annotations

import enum
import struct
from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from eventpump.amqp.codec import encode
from eventpump.amqp.fitting import FRAME_SIZE_TOO_SMALL
from eventpump.amqp.flow import UINT, SessionFlow, SessionState
from eventpump.amqp.performatives import AmqpError, Attach, Detach, Disposition, Flow, Source, Target, Transfer
from eventpump.amqp.receiver import Delivery, Reassembly, Violation
from eventpump.amqp.types import UInt
from eventpump.compiled import based_on_core
from eventpump.errors import ClosedError, EventTooLargeError, ProtocolError

_SPARE = 34
"""Bytes that a frame of a delivery in several frames leaves free, as those of the service do (protocol.md 6.1)."""

_TRUE, _FALSE = b"\x41", b"\x42"
_TAILS = (b"\x40\x40\x42\x42\x42", b"\x40\x40\x42\x42\x41")
"""A transfer's fields after `more`: rcv-settle-mode, state, resume, aborted, batchable; which is false, or true."""
_RUN_TAIL = b"\xa0\x00\x43" + _TRUE + _FALSE + _TAILS[True]
"""Those after the delivery id, of a plain settled transfer: an empty tag, message-format 0, settled, and the rest."""
_NOTHING = b"\x40\x40\x40\x40"
_MORE, _LAST = _NOTHING + _TRUE + _TAILS[False], _NOTHING + _FALSE + _TAILS[False]
"""Those after the handle, of a delivery's transfers after the first: they repeat nothing (2.7.5)."""


class AttachState(enum.Enum):
    """Where a link is between attach and detach (2.6.3 to 2.6.6)."""

    ATTACH_SENT = "attach sent"
    ATTACH_RECEIVED = "attach received"
    ATTACHED = "attached"
    REFUSED = "refused"
    """The peer answered with a null terminus and is about to detach (2.6.3)."""
    DETACH_SENT = "detach sent"
    DETACHED = "detached"


_ATTACHED, _MAPPED = AttachState.ATTACHED, SessionState.MAPPED
"""Read for each message: reading a member of an enumeration from its class is slow."""


class LinkInput(enum.Enum):
    """What can happen to a link."""

    ACCEPT = "this end answers the peer's attach"
    DETACH = "this end detaches"
    RECEIVE_ATTACH = "the peer answers our attach"
    RECEIVE_REFUSAL = "the peer answers our attach with a null terminus"
    RECEIVE_DETACH = "the peer detaches"
    SESSION_ENDED = "its session has ended"


class LinkAction(enum.Enum):
    """What a link does then."""

    NOTHING = "nothing"
    REPORT = "report that it is attached"
    SEND_ATTACH = "send an attach"
    SEND_DETACH = "send a detach"
    SEND_REFUSAL = "send an attach with null termini, then a detach"


LINK_STEPS: Mapping[tuple[AttachState, LinkInput], tuple[LinkAction, AttachState]] = MappingProxyType(
    {
        (AttachState.ATTACH_SENT, LinkInput.RECEIVE_ATTACH): (LinkAction.REPORT, AttachState.ATTACHED),
        (AttachState.ATTACH_SENT, LinkInput.RECEIVE_REFUSAL): (LinkAction.NOTHING, AttachState.REFUSED),
        (AttachState.ATTACH_SENT, LinkInput.DETACH): (LinkAction.SEND_DETACH, AttachState.DETACH_SENT),
        (AttachState.ATTACH_SENT, LinkInput.SESSION_ENDED): (LinkAction.NOTHING, AttachState.DETACHED),
        (AttachState.ATTACH_RECEIVED, LinkInput.ACCEPT): (LinkAction.SEND_ATTACH, AttachState.ATTACHED),
        (AttachState.ATTACH_RECEIVED, LinkInput.DETACH): (LinkAction.SEND_REFUSAL, AttachState.DETACH_SENT),
        (AttachState.ATTACH_RECEIVED, LinkInput.RECEIVE_DETACH): (LinkAction.SEND_REFUSAL, AttachState.DETACHED),
        (AttachState.ATTACH_RECEIVED, LinkInput.SESSION_ENDED): (LinkAction.NOTHING, AttachState.DETACHED),
        (AttachState.ATTACHED, LinkInput.DETACH): (LinkAction.SEND_DETACH, AttachState.DETACH_SENT),
        (AttachState.ATTACHED, LinkInput.RECEIVE_DETACH): (LinkAction.SEND_DETACH, AttachState.DETACHED),
        (AttachState.ATTACHED, LinkInput.SESSION_ENDED): (LinkAction.NOTHING, AttachState.DETACHED),
        (AttachState.REFUSED, LinkInput.DETACH): (LinkAction.SEND_DETACH, AttachState.DETACH_SENT),
        (AttachState.REFUSED, LinkInput.RECEIVE_DETACH): (LinkAction.SEND_DETACH, AttachState.DETACHED),
        (AttachState.REFUSED, LinkInput.SESSION_ENDED): (LinkAction.NOTHING, AttachState.DETACHED),
        (AttachState.DETACH_SENT, LinkInput.RECEIVE_ATTACH): (LinkAction.NOTHING, AttachState.DETACH_SENT),
        (AttachState.DETACH_SENT, LinkInput.RECEIVE_REFUSAL): (LinkAction.NOTHING, AttachState.DETACH_SENT),
        (AttachState.DETACH_SENT, LinkInput.RECEIVE_DETACH): (LinkAction.NOTHING, AttachState.DETACHED),
        (AttachState.DETACH_SENT, LinkInput.SESSION_ENDED): (LinkAction.NOTHING, AttachState.DETACHED),
    }
)
"""Every change of a link's state: what it does, and the state after it. Where there is no entry, nothing happens."""


def _delivery_id(value: int) -> bytes:
    """Encode a delivery id: another one each time, and so not by `_uint`."""
    if value < 256:
        return b"\x52" + bytes((value,)) if value else b"\x43"
    return b"\x70" + value.to_bytes(4, "big")


@lru_cache
def _uint(value: int) -> bytes:
    """Encode a handle or a message format, of which there are few."""
    return encode(UInt(value))


def _wrong_mode(*, settled: bool) -> ValueError:
    one, other = ("settled", "unsettled") if settled else ("unsettled", "settled")
    return ValueError(f"a message cannot be sent {one} on a link that was attached for {other} ones")


def _serial_difference(first: int, second: int) -> int:
    """Subtract serial numbers (RFC 1982): between -2^31 and 2^31 - 1."""
    return ((first - second + (1 << 31)) & UINT) - (1 << 31)


@based_on_core("PlainLink")
class Link:
    """One end of a link. Made by `Session.attach`, or for the peer's attach by the engine.

    Attributes:
        remote: The peer's attach, once received.
        credit: Sender: messages the peer takes now; receiver: messages it may still send.
        allowance: Receiver: messages that the peer may send without exceeding what it was granted. More than the credit
            after the credit was lowered, as messages may have been on their way.
        is_probed: Receiver: whether a flow of the peer is awaited in answer to `probe`.
        answers_echo: Whether a flow of the peer that asks for an answer gets one (2.7.4); False simulates a dead link.
        largest_message: Receiver: the largest message it takes, in bytes.
        is_detach_reported: Whether the end of the link was reported when this end detached it (`fail`).
        kept: What the peer's attach takes here, in bytes, as `Connection.kept` counts it.
        snd_settle_mode: The settlement mode that this end's attach states (2.8.2): 0 unsettled, 1 settled, 2 mixed.
        context: Free for the shell that owns the link.
    """

    __slots__ = (
        "__weakref__",
        "_enforces_credit",
        "_pack",
        "_prefix",
        "allowance",
        "answers_echo",
        "context",
        "credit",
        "delivery_count",
        "drain",
        "handle",
        "incoming",
        "is_detach_reported",
        "is_probed",
        "is_receiver",
        "is_remote_initiated",
        "kept",
        "largest_message",
        "name",
        "remote",
        "remote_handle",
        "session",
        "snd_settle_mode",
        "state",
    )

    def __init__(
        self, session: SessionFlow, name: str, handle: int, *, is_receiver: bool, is_remote_initiated: bool
    ) -> None:
        self.session = session
        self.name = name
        self.handle = handle
        self.is_receiver = is_receiver
        self.is_remote_initiated = is_remote_initiated
        self.state = AttachState.ATTACH_RECEIVED if is_remote_initiated else AttachState.ATTACH_SENT
        self.remote: Attach | None = None
        self.remote_handle: int | None = None
        self.credit = 0
        self.allowance = 0
        self.delivery_count = 0
        self.drain = False
        self.largest_message = session.config.max_message_size
        self.context: Any = None
        self.is_detach_reported = False
        self.is_probed = False
        self.answers_echo = True
        self.incoming = Reassembly(session.unfinished_bytes)
        self._enforces_credit = session.config.enforce_credit
        self.kept = 0
        self.snd_settle_mode = 2
        self._pack: struct.Struct | None = None
        self._prefix = b""

    @property
    def is_attached(self) -> bool:
        """Whether messages can flow."""
        session = self.session
        # Asked several times for each message: what `SessionFlow.is_open` says, without a call.
        return self.state is _ATTACHED and session.state is _MAPPED and session.frames.is_open

    @property
    def is_live(self) -> bool:
        """Whether the peer has attached it, and neither end has detached or refused it."""
        return self.state in (AttachState.ATTACHED, AttachState.ATTACH_RECEIVED)

    @property
    def remote_properties(self) -> Mapping[Any, Any]:
        """The link properties the peer attached with."""
        return {} if self.remote is None else self.remote.properties or {}

    @property
    def remote_max_message_size(self) -> int | None:
        """The largest message the peer takes, in bytes; None where it stated no limit."""
        return (self.remote.max_message_size or None) if self.remote is not None else None

    def _require_attached(self) -> None:
        if not self.is_attached:
            raise ClosedError(f"link {self.name}")

    # ------------------------------------------------------------------------------- the peer's attach

    def on_attach(self, attach: Attach, kept: int) -> bool:
        """Handle the peer's attach, once per link.

        Returns:
            Whether it is to be reported: not where it answers an attach of ours with a refusal, or too late.
        """
        self.remote = attach
        self.remote_handle = attach.handle
        self.kept = kept
        if self.is_receiver:
            self.delivery_count = attach.initial_delivery_count or 0
        if self.is_remote_initiated:
            return True
        # 2.6.3: a null source (from a sender) or target (from a receiver) announces a refusal; its detach follows.
        is_refused = (attach.source if self.is_receiver else attach.target) is None
        return self._step(LinkInput.RECEIVE_REFUSAL if is_refused else LinkInput.RECEIVE_ATTACH) is LinkAction.REPORT

    def accept(
        self,
        *,
        source: Source | None = None,
        target: Target | None = None,
        properties: Mapping[str, Any] | None = None,
        max_message_size: int | None = None,
        snd_settle_mode: int | None = None,
        rcv_settle_mode: int | None = None,
        offered_capabilities: Sequence[str] | None = None,
    ) -> None:
        """Answer the peer's attach. Source and target default to what the peer sent.

        Does nothing where the peer has detached meanwhile. Where the peer's max-frame-size leaves no room for the
        answer, the link is detached for it, or the session is ended (`Session.send`).
        """
        if (self.state, LinkInput.ACCEPT) not in LINK_STEPS:
            return
        assert self.remote is not None
        remote = self.remote
        self.snd_settle_mode = remote.snd_settle_mode if snd_settle_mode is None else snd_settle_mode
        answer = Attach(
            name=self.name,
            handle=self.handle,
            role=self.is_receiver,
            snd_settle_mode=self.snd_settle_mode,
            rcv_settle_mode=remote.rcv_settle_mode if rcv_settle_mode is None else rcv_settle_mode,
            source=source or remote.source or Source(),
            target=target or remote.target or Target(),
            initial_delivery_count=None if self.is_receiver else self.delivery_count,
            max_message_size=max_message_size,
            offered_capabilities=list(offered_capabilities) if offered_capabilities else None,  # type: ignore[arg-type]  # symbols are made when encoding
            properties=dict(properties) if properties else None,
        )
        if self.session.is_open and not self.session.frames.send(self.session.channel, answer):
            self.detach(AmqpError(FRAME_SIZE_TOO_SMALL, "The answer to the attach does not fit into a frame."))
            return
        self.limit_messages(max_message_size)
        self._step(LinkInput.ACCEPT)

    def limit_messages(self, max_message_size: int | None) -> None:
        """Limit messages that arrive to what this end's attach says, in bytes; None leaves the connection's limit."""
        self.largest_message = max_message_size or self.session.config.max_message_size

    def refuse(self, error: AmqpError) -> None:
        """Refuse the peer's attach: answer with null termini, then detach (2.6.3)."""
        if self.state is AttachState.ATTACH_RECEIVED:
            self.detach(error)

    # ---------------------------------------------------------------------------------------- detaching

    def detach(self, error: AmqpError | None = None) -> None:
        """Close the link (2.6.6). The peer's answer is reported as `LinkDetached`. Does nothing the second time."""
        self._end(LinkInput.DETACH, Detach(handle=self.handle, closed=True, error=error))

    def fail(self, error: AmqpError) -> None:
        """Detach because of what the peer did. It is reported at once, and not again when the peer answers."""
        self.detach(error)
        self.is_detach_reported = True

    def on_detach(self, detach: Detach) -> None:
        """Handle the peer's detach: answer it, unless it is the answer."""
        self._end(LinkInput.RECEIVE_DETACH, Detach(handle=self.handle, closed=detach.closed))

    def on_session_ended(self) -> None:
        """Handle the end of the session, which is the link's."""
        self._end(LinkInput.SESSION_ENDED, None)

    def _step(self, happened: LinkInput) -> LinkAction | None:
        """Go to the next state. Returns what is to be done; None where nothing happens in this state."""
        action, self.state = LINK_STEPS.get((self.state, happened), (None, self.state))
        return action

    def _end(self, happened: LinkInput, detach: Detach | None) -> None:
        """Release what the link holds, as nothing more is sent or received on it, and send what is due."""
        action = self._step(happened)
        if action is None:
            return
        self.stop()
        self.allowance = 0
        self.drain = False
        self.session.unblock(self.handle)
        if action is LinkAction.SEND_REFUSAL:
            self.session.send(Attach(name=self.name, handle=self.handle, role=self.is_receiver))
        if detach is not None and action is not LinkAction.NOTHING:
            self.session.send(detach)

    def stop(self) -> None:
        """Send nothing more, and drop the delivery that is arriving: session or connection is ending."""
        self.credit = 0
        self.incoming.drop()

    # ----------------------------------------------------------------------------------------- receiving

    def set_credit(self, credit: int, *, drain: bool = False) -> None:
        """Let the peer send `credit` messages from now on (2.6.7). Does nothing on a link that has ended.

        Args:
            drain: Ask the peer to use it up at once; `CreditChanged` reports when it has, with a credit of 0.
        """
        if self.state in (AttachState.ATTACH_SENT, AttachState.ATTACH_RECEIVED):
            raise ClosedError(f"link {self.name}")
        if not self.is_attached:
            return
        self.credit = credit
        self.allowance = max(self.allowance, credit)
        self.drain = drain
        self.session.send_flow(self.handle, delivery_count=self.delivery_count, credit=credit, drain=drain)

    def probe(self) -> bool:
        """Ask the peer of a receiver link for a flow of its own (2.7.4, echo); `FlowAnswered` reports it. False if not
        attached."""
        if not self.is_attached:
            return False
        self.is_probed = True
        credit = max(self.credit, 0)
        self.session.send_flow(
            self.handle, delivery_count=self.delivery_count, credit=credit, drain=self.drain, echo=True
        )
        return True

    def on_transfer(
        self, transfer: Transfer, payload: bytes, unfinished_limit: int | None
    ) -> Delivery | Violation | None:
        """Handle a transfer.

        Args:
            unfinished_limit: How many bytes of unfinished messages the connection holds at most; None for no limit.

        Returns:
            The delivery that is whole with it; a violation for which the link must be detached; None otherwise.

        Raises:
            ProtocolError: The peer broke a rule for which the connection must be closed.
        """
        if not self.is_live:
            return None  # detached or refused here: what was on its way is dropped (2.6.6)
        if not self.is_receiver:
            raise ProtocolError("amqp:not-allowed", "a transfer on a link that sends")
        incoming = self.incoming
        if incoming.buffer is None:
            if transfer.delivery_id is None:
                raise ProtocolError("amqp:invalid-field", "a delivery begins without an id")
            if self._enforces_credit and self.allowance <= 0:
                return Violation("amqp:link:transfer-limit-exceeded", "more messages than credit was given for")
            self.used_credit(1)
            incoming.begin(transfer.delivery_id, transfer.message_format or 0)
        elif transfer.delivery_id is not None and transfer.delivery_id != incoming.delivery_id:
            raise ProtocolError("amqp:not-allowed", "a delivery begins before the last one on its link is whole")
        return incoming.add(transfer, payload, self.largest_message, unfinished_limit)

    def used_credit(self, count: int) -> None:
        """Count deliveries that have begun to arrive, at most as many as `allowance` permits."""
        self.credit = self.credit - count if self.credit > count else 0
        self.allowance -= count
        self.delivery_count = (self.delivery_count + count) & UINT

    def settle(self, first: int, last: int, outcome: Any) -> None:
        """Settle deliveries `first` to `last`, of either direction, with one outcome, in one disposition (2.6.12).

        Of those that this end sent, no outcome is reported any more.
        """
        if not self.is_receiver:
            for delivery_id in range(first, last + 1):
                self.session.unsettled.pop(delivery_id, None)
        # One delivery is named once (2.7.6), as the service does.
        end = None if last == first else last
        self.session.send(Disposition(role=self.is_receiver, first=first, last=end, settled=True, state=outcome))

    # ------------------------------------------------------------------------------------------- sending

    def send(
        self,
        payload: bytes,
        *,
        message_format: int = 0,
        settled: bool = False,
        tag: bytes | None = None,
        batchable: bool = False,
    ) -> int:
        """Send one message in as many frames as it takes.

        What the session window holds back is sent when the peer opens it. The caller checks `credit` first.

        Args:
            tag: The delivery tag, of at most 32 bytes; by default the delivery id, or none of a settled one.

        Returns:
            Its delivery id, by which `Outcomes` reports its outcome.
        """
        if not self.is_attached:
            self._require_attached()
        if self.snd_settle_mode == (0 if settled else 1):
            raise _wrong_mode(settled=settled)
        limit = None if self.remote is None else self.remote.max_message_size or None
        if limit is not None and len(payload) > limit:
            raise EventTooLargeError(len(payload), limit)
        self.credit -= 1
        self.delivery_count = (self.delivery_count + 1) & UINT
        session = self.session
        delivery_id = session.next_delivery_id(None if settled else self.handle)
        if tag is None:
            tag = b"" if settled else delivery_id.to_bytes(4, "big")
        identity = _delivery_id(delivery_id) + b"\xa0" + bytes((len(tag),)) + tag + _uint(message_format)
        fields = identity + (_TRUE if settled else _FALSE) + _FALSE + _TAILS[batchable]
        # What a frame takes beside the fields and the payload: its header, the descriptor, size, count and the handle.
        largest = session.frames.max_frame_size - _SPARE - 14 - len(_uint(self.handle))
        pos, size = 0, len(payload)
        view = memoryview(payload)  # a large message is not copied frame by frame
        if size > (room := largest - len(fields)):
            fields = identity + (_TRUE if settled else _FALSE) + _TRUE + _TAILS[batchable]
            while size - pos > room:
                session.send_transfer(self.handle, self._header(fields, room), view[pos : pos + room])
                pos += room
                fields, room = _MORE, largest - len(_MORE)
            session.send_transfer(self.handle, self._header(_LAST, size - pos), view[pos:])
        else:
            session.send_transfer(self.handle, self._header(fields, size), view)
        return delivery_id

    def _header(self, fields: bytes, payload_size: int) -> bytes:
        """Build a frame header and a transfer with its 11 fields (2.3.1, 2.7.5): these, after the handle."""
        body = _uint(self.handle) + fields
        performative = b"\x00\x53\x14\xc0" + bytes((len(body) + 1, 11)) + body
        size = 8 + len(performative) + payload_size
        return size.to_bytes(4, "big") + b"\x02\x00" + self.session.channel.to_bytes(2, "big") + performative

    def send_run(self, payloads: Sequence[bytes], start: int = 0, max_bytes: int = 262_144) -> int:
        """Send messages pre-settled, batchable, with format 0 and an empty tag, as the service sends events.

        As many are sent from `start` on as credit, window and `max_bytes` allow.

        At least one is sent where credit and window allow one, however large.

        Returns:
            How many were sent.
        """
        self._require_attached()
        if self.snd_settle_mode == 0:
            raise _wrong_mode(settled=True)
        session = self.session
        count = min(self.credit, session.remote_incoming_window, len(payloads) - start)
        if count <= 0:
            session.mark_starved()
            return 0
        if self._pack is None:
            # Size, header and performative up to the delivery id, the id, an empty tag and the rest.
            handle = encode(UInt(self.handle))
            body = len(handle) + 5 + len(_RUN_TAIL)
            self._prefix = (
                b"\x02\x00"
                + session.channel.to_bytes(2, "big")
                + b"\x00\x53\x14\xc0"
                + bytes((body + 1, 11))
                + handle
                + b"\x70"
            )
            self._pack = struct.Struct(f">I{len(self._prefix)}sI{len(_RUN_TAIL)}s")
        pack, prefix = self._pack.pack, self._prefix
        overhead = self._pack.size
        largest = session.frames.max_frame_size - overhead
        limit = self.remote_max_message_size
        if limit is not None and limit < largest:
            largest = limit
        write = session.frames.output.append
        tail = _RUN_TAIL
        delivery_id = session.outgoing_delivery_id
        sent = written = 0
        for payload in payloads[start : start + count]:
            size = len(payload)
            if size > largest:
                break
            write(pack(size + overhead, prefix, delivery_id, tail))
            write(payload)
            delivery_id = (delivery_id + 1) & UINT
            sent += 1
            written += size
            if written >= max_bytes:
                break
        session.sent_run(sent)
        self.credit -= sent
        self.delivery_count = (self.delivery_count + sent) & UINT
        if sent == 0:
            self.send(payloads[start], settled=True, batchable=True)
            return 1
        if session.frames.trace is not None:
            session.frames.trace.transfers(session.channel, self.handle, sent, written, is_sent=True)
        return sent

    def drained(self) -> None:
        """Use up all credit, as the peer asked by `drain`, and send it a flow that says so (2.6.7).

        Does nothing while the session window holds messages back: `CreditChanged` reports when they are sent.
        """
        if not self.is_attached or self.session.is_blocked:
            return
        self.delivery_count = (self.delivery_count + max(self.credit, 0)) & UINT
        self.credit = 0
        self.drain = False
        self.session.send_flow(self.handle, delivery_count=self.delivery_count, credit=0, drain=True)

    # ------------------------------------------------------------------------------------- the peer's flows

    def answer_probe(self) -> bool:
        """Return whether a flow of the peer answers a probe; once per probe."""
        is_answer = self.is_probed and self.is_attached
        if is_answer:
            self.is_probed = False
        return is_answer

    def on_flow(self, flow: Flow) -> bool:
        """Handle a flow for this link; return whether to report it: it changes a sender's credit, or ends a drain."""
        if not self.is_live:
            return False
        if self.is_receiver:
            return self._on_sender_flow(flow)
        if flow.link_credit is None:
            return False
        # 2.6.7: link-credit(snd) := delivery-count(rcv) + link-credit(rcv) - delivery-count(snd), in serial numbers.
        self.credit = flow.link_credit + _serial_difference(flow.delivery_count or 0, self.delivery_count)
        self.drain = flow.drain
        return True

    def _on_sender_flow(self, flow: Flow) -> bool:
        """Follow a sender that used up credit without messages (2.6.7). The link-credit in its flow is ignored."""
        if flow.delivery_count is None:
            return False
        used = _serial_difference(flow.delivery_count, self.delivery_count)
        if used > 0:
            self.delivery_count = flow.delivery_count
            self.credit = max(self.credit - used, 0)
            self.allowance -= used
        was_draining, self.drain = self.drain, self.drain and self.credit > 0
        return was_draining and not self.drain

    def __repr__(self) -> str:
        return f"Link({self.name!r}, {'receiver' if self.is_receiver else 'sender'}, {self.state.value})"
