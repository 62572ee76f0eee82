"""An AMQP 1.0 connection without I/O (part 2.4): bytes in, events out, bytes to send drained by the shell.

It has no clock: it states its deadlines (`heartbeat_interval`, `idle_timeout`) and the shell keeps them. Whatever the
peer sends, `Connection.receive` raises nothing: a broken rule closes the connection with the matching condition, and is
reported as `Closed`. The shell that drives it is its only caller.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from eventpump.amqp.config import ConnectionConfig
from eventpump.amqp.fitting import FRAME_SIZE_TOO_SMALL
from eventpump.amqp.flow import UINT, SessionState
from eventpump.amqp.forms import Form, form_of, take_run
from eventpump.amqp.frames import MIN_MAX_FRAME_SIZE, FrameWriter
from eventpump.amqp.limits import LINK_COST, SESSION_COST, cost_of
from eventpump.amqp.link import AttachState, Link
from eventpump.amqp.performatives import (
    AmqpError,
    Attach,
    Begin,
    Close,
    Composite,
    Detach,
    Disposition,
    End,
    Flow,
    Open,
    SaslInit,
    SaslMechanisms,
    SaslOutcome,
    Transfer,
    decode_performative,
)
from eventpump.amqp.receiver import Delivery, UnfinishedBytes
from eventpump.amqp.session import Session
from eventpump.amqp.trace import Trace
from eventpump.amqp.types import Symbol
from eventpump.compiled import based_on_core, core
from eventpump.errors import ClosedError, ProtocolError

AMQP_HEADER = b"AMQP\x00\x01\x00\x00"
SASL_HEADER = b"AMQP\x03\x01\x00\x00"
EMPTY_FRAME = b"\x00\x00\x00\x08\x02\x00\x00\x00"
FRAME_COST = 32
"""What a frame that takes the general decoder, and perhaps an answer, counts in a turn; a plain transfer counts 1."""
SASL_FRAME_LIMIT = 4096
"""SASL frames are bounded apart: nothing is known of the peer yet."""

_FRAME = struct.Struct(">IBBH")
"""Size, data offset, type, channel (2.3.1)."""
_from_bytes = int.from_bytes
_MAX_FORMS = 1024
_UNLIMITED = 1 << 62


class Role(enum.Enum):
    """Which end of the connection this is."""

    CLIENT = "client"
    SERVER = "server"


# ------------------------------------------------------------------------------------------------ events


@dataclass(slots=True)
class SaslRequested:
    """Server: the client chose a mechanism. Answer with `Connection.sasl_outcome`."""

    mechanism: str
    response: bytes = field(repr=False)
    hostname: str | None


@dataclass(slots=True)
class Opened:
    """The peer's open arrived. A server has answered it."""

    open: Open


@dataclass(slots=True)
class SessionBegun:
    """A session is mapped: ours was answered, or the peer's was begun and answered."""

    session: Session


@dataclass(slots=True)
class SessionEnded:
    """A session ended, and its links with it; there is no `LinkDetached` for them."""

    session: Session
    links: list[Link]
    error: AmqpError | None


@dataclass(slots=True)
class LinkAttached:
    """The peer attached: an answer to ours, or (`link.is_remote_initiated`) a link that waits for accept or refuse."""

    link: Link
    attach: Attach


@dataclass(slots=True)
class LinkDetached:
    """The peer detached a link, or refused one of ours."""

    link: Link
    error: AmqpError | None
    closed: bool


@dataclass(slots=True)
class CreditChanged:
    """A sender link may send more, or was asked to drain; or a receiver link's drain is done."""

    link: Link


@dataclass(slots=True)
class FlowAnswered:
    """The peer of a receiver link sent a flow for it after `Link.probe`: the link is alive at the other end."""

    link: Link


@based_on_core("PlainMessages")
@dataclass(slots=True, init=False)
class Messages:
    """Messages arrived on a link, in order.

    At most one of these per link and `receive`, unless the sender mixes settled and unsettled: each is of one sort.
    The engine sets the attributes: with an `__init__` there would be a call for each read.

    Attributes:
        payloads: Not shown: a request for a token, or with one, is such a message.
        formats: Their message formats; None where all are 0.
    """

    link: Link
    payloads: list[bytes] = field(repr=False)
    delivery_ids: list[int]
    formats: list[int] | None


@dataclass(slots=True)
class Outcomes:
    """The peer settled deliveries: their ids and outcomes, in order."""

    link: Link
    outcomes: list[tuple[int, Any]]


@dataclass(slots=True)
class Closed:
    """The connection has ended. Nothing more is received; what is left to send should still be sent.

    Args:
        error: The reason; None for an orderly close.
        is_local: Whether the reason was found here: a broken rule or the end of the stream.
    """

    error: AmqpError | None
    is_local: bool = False


Event = (
    SaslRequested
    | Opened
    | SessionBegun
    | SessionEnded
    | LinkAttached
    | LinkDetached
    | CreditChanged
    | FlowAnswered
    | Messages
    | Outcomes
    | Closed
)


class ConnectionState(enum.Enum):
    """Where the connection is (2.4.6), with the SASL exchange before it (5.3)."""

    START = "start"
    """Client: nothing is sent yet."""
    SASL_HEADER = "waiting for the SASL header"
    SASL = "waiting for the SASL mechanisms or the choice of one"
    SASL_OUTCOME = "waiting for the SASL outcome"
    """Client: the mechanism is chosen."""
    SASL_ANSWER = "SASL answer due"
    """Server: the mechanism is chosen and the shell has not answered; what came after it waits."""
    AMQP_HEADER = "waiting for the AMQP header"
    OPENING = "waiting for open"
    OPENED = "opened"
    CLOSE_SENT = "close sent"
    CLOSED = "closed"


class ConnectionInput(enum.Enum):
    """What can happen to a connection."""

    START = "this end starts"
    RECEIVE_SASL_HEADER = "the SASL header arrives"
    RECEIVE_MECHANISMS = "the server offers SASL mechanisms, one of them ours"
    RECEIVE_INIT = "the client chooses a SASL mechanism that was offered"
    ACCEPT = "this end accepts the client's credential"
    REFUSE = "this end refuses the client's credential"
    RECEIVE_OUTCOME = "the server accepts the credential"
    RECEIVE_AMQP_HEADER = "the AMQP header arrives"
    RECEIVE_OPEN = "the peer's open arrives"
    CLOSE = "this end closes"
    RECEIVE_CLOSE = "the peer's close arrives"
    FAIL = "the peer breaks a rule or is silent for too long"
    RECEIVE_EOF = "the byte stream ends"


class ConnectionAction(enum.Enum):
    """What a connection does then."""

    NOTHING = "nothing"
    SEND_SASL_HEADER = "send the SASL header"
    SEND_MECHANISMS = "send the SASL header and the mechanisms"
    SEND_INIT = "send the chosen mechanism and its response"
    SEND_ACCEPTANCE = "send a SASL outcome that accepts"
    SEND_REFUSAL = "send a SASL outcome that refuses"
    SEND_AMQP_HEADER = "send the AMQP header"
    SEND_OPEN = "send an open"
    SEND_CLOSE = "send a close"
    SEND_OPEN_AND_CLOSE = "send an open, which must come first, and a close"
    REPORT_LOSS = "report that the connection was lost"


_Steps = Mapping[tuple[ConnectionState, ConnectionInput], tuple[ConnectionAction, ConnectionState]]

_S, _I, _A = ConnectionState, ConnectionInput, ConnectionAction
_BEFORE_OPENING = (_S.SASL_HEADER, _S.SASL, _S.AMQP_HEADER)

# What clients and servers do alike.
_STEPS: _Steps = {
    **{(state, _I.CLOSE): (_A.NOTHING, _S.CLOSED) for state in (*_BEFORE_OPENING, _S.OPENING)},
    **{(state, _I.FAIL): (_A.NOTHING, _S.CLOSED) for state in _BEFORE_OPENING},
    **{(state, _I.RECEIVE_EOF): (_A.REPORT_LOSS, _S.CLOSED) for state in (*_BEFORE_OPENING, _S.OPENING, _S.OPENED)},
    (_S.OPENED, _I.CLOSE): (_A.SEND_CLOSE, _S.CLOSE_SENT),
    (_S.OPENED, _I.RECEIVE_CLOSE): (_A.SEND_CLOSE, _S.CLOSED),
    (_S.OPENED, _I.FAIL): (_A.SEND_CLOSE, _S.CLOSED),
    (_S.CLOSE_SENT, _I.RECEIVE_CLOSE): (_A.NOTHING, _S.CLOSED),
    (_S.CLOSE_SENT, _I.FAIL): (_A.NOTHING, _S.CLOSED),
    (_S.CLOSE_SENT, _I.RECEIVE_EOF): (_A.NOTHING, _S.CLOSED),
}

CONNECTION_STEPS: Mapping[Role, _Steps] = MappingProxyType(
    {
        Role.CLIENT: {
            **_STEPS,
            (_S.START, _I.START): (_A.SEND_SASL_HEADER, _S.SASL_HEADER),
            (_S.START, _I.CLOSE): (_A.NOTHING, _S.CLOSED),
            (_S.START, _I.FAIL): (_A.NOTHING, _S.CLOSED),
            (_S.START, _I.RECEIVE_EOF): (_A.REPORT_LOSS, _S.CLOSED),
            (_S.SASL_HEADER, _I.RECEIVE_SASL_HEADER): (_A.NOTHING, _S.SASL),
            (_S.SASL, _I.RECEIVE_MECHANISMS): (_A.SEND_INIT, _S.SASL_OUTCOME),
            (_S.SASL_OUTCOME, _I.RECEIVE_OUTCOME): (_A.SEND_AMQP_HEADER, _S.AMQP_HEADER),
            (_S.SASL_OUTCOME, _I.CLOSE): (_A.NOTHING, _S.CLOSED),
            (_S.SASL_OUTCOME, _I.FAIL): (_A.NOTHING, _S.CLOSED),
            (_S.SASL_OUTCOME, _I.RECEIVE_EOF): (_A.REPORT_LOSS, _S.CLOSED),
            (_S.AMQP_HEADER, _I.RECEIVE_AMQP_HEADER): (_A.SEND_OPEN, _S.OPENING),
            (_S.OPENING, _I.RECEIVE_OPEN): (_A.NOTHING, _S.OPENED),
            (_S.OPENING, _I.RECEIVE_CLOSE): (_A.SEND_CLOSE, _S.CLOSED),
            (_S.OPENING, _I.FAIL): (_A.SEND_CLOSE, _S.CLOSED),
        },
        Role.SERVER: {
            **_STEPS,
            (_S.SASL_HEADER, _I.RECEIVE_SASL_HEADER): (_A.SEND_MECHANISMS, _S.SASL),
            (_S.SASL_HEADER, _I.RECEIVE_AMQP_HEADER): (_A.SEND_AMQP_HEADER, _S.OPENING),
            (_S.SASL, _I.RECEIVE_INIT): (_A.NOTHING, _S.SASL_ANSWER),
            (_S.SASL_ANSWER, _I.ACCEPT): (_A.SEND_ACCEPTANCE, _S.AMQP_HEADER),
            (_S.SASL_ANSWER, _I.REFUSE): (_A.SEND_REFUSAL, _S.CLOSED),
            (_S.SASL_ANSWER, _I.CLOSE): (_A.NOTHING, _S.CLOSED),
            (_S.SASL_ANSWER, _I.FAIL): (_A.NOTHING, _S.CLOSED),
            (_S.SASL_ANSWER, _I.RECEIVE_EOF): (_A.REPORT_LOSS, _S.CLOSED),
            (_S.AMQP_HEADER, _I.RECEIVE_AMQP_HEADER): (_A.SEND_AMQP_HEADER, _S.OPENING),
            (_S.OPENING, _I.RECEIVE_OPEN): (_A.SEND_OPEN, _S.OPENED),
            (_S.OPENING, _I.RECEIVE_CLOSE): (_A.NOTHING, _S.CLOSED),
            (_S.OPENING, _I.FAIL): (_A.SEND_OPEN_AND_CLOSE, _S.CLOSED),
        },
    }
)
"""Every change of a connection's state, per role: what it does, and the state after it."""

_SASL_INPUTS: Mapping[type[Composite], ConnectionInput] = {
    SaslMechanisms: ConnectionInput.RECEIVE_MECHANISMS,
    SaslInit: ConnectionInput.RECEIVE_INIT,
    SaslOutcome: ConnectionInput.RECEIVE_OUTCOME,
}
# Tuples, with the state of most frames first: a set would call a Python function at each frame, for the state's hash.
_IN_SASL = (_S.SASL, _S.SASL_OUTCOME)
_FRAMED = (_S.OPENED, _S.OPENING, _S.CLOSE_SENT, *_IN_SASL)
_DEAF = (_S.CLOSED, _S.START)
_OPENED, _MAPPED, _ATTACHED = _S.OPENED, SessionState.MAPPED, AttachState.ATTACHED
"""Read for each run: reading a member of an enumeration from its class is slow."""


def _trace_run(trace: Trace, link: Link, payloads: list[bytes]) -> None:
    channel, handle = link.session.remote_channel, link.remote_handle
    assert channel is not None
    assert handle is not None
    trace.transfers(channel, handle, len(payloads), sum(map(len, payloads)), is_sent=False)


@based_on_core("PlainConnection")
class Connection:
    """One end of a connection, in either role.

    Attributes:
        links: The links that both ends have attached, by name and whether this end receives (2.6.1).
        limits: At first those of the config; the shell may put others here at any time.
        pending: What was read and is not handled yet: a frame that is not whole, or what waits (`is_behind`).
        unfinished_bytes: Counts what has arrived of messages that are not whole, over all links.
        kept: What the peer's open, begins and attaches take, in bytes, until their sessions and links have ended.
    """

    __slots__ = (
        "__weakref__",
        "_events",
        "_forms",
        "_frames",
        "_inboxes",
        "_is_plain",
        "_max_frame_size",
        "_pending_size",
        "_sessions_by_remote_channel",
        "_turn",
        "_wanted",
        "config",
        "kept",
        "limits",
        "links",
        "output",
        "pending",
        "remote",
        "role",
        "sessions",
        "state",
        "unfinished_bytes",
    )

    def __init__(self, config: ConnectionConfig, role: Role) -> None:
        self.config = config
        self.role = role
        self.state = ConnectionState.START if role is Role.CLIENT else ConnectionState.SASL_HEADER
        self.remote: Open | None = None
        self.sessions: dict[int, Session] = {}
        self.links: dict[tuple[str, bool], Link] = {}
        self._frames = FrameWriter()
        self.output = self._frames.output
        self._sessions_by_remote_channel: dict[int, Session] = {}
        self.pending: list[bytes] = []
        self._pending_size = self._wanted = 0
        self._turn = _UNLIMITED
        self._events: list[Event] = []
        self._inboxes: dict[Link, Messages] = {}
        self._forms: dict[bytes, Form] = {}
        self._max_frame_size = config.max_frame_size
        self._is_plain = config.weigh is None
        self.limits = config.limits
        self.unfinished_bytes = UnfinishedBytes()
        self.kept = 0

    @property
    def trace(self) -> Trace | None:
        """Called with each frame sent or received; None for no trace."""
        return self._frames.trace

    @trace.setter
    def trace(self, trace: Trace | None) -> None:
        self._frames.trace = trace
        self._is_plain = trace is None and self.config.weigh is None

    @property
    def is_open(self) -> bool:
        """Whether sessions can be begun and used."""
        return self.state is ConnectionState.OPENED

    @property
    def is_closed(self) -> bool:
        """Whether the connection has ended."""
        return self.state is ConnectionState.CLOSED

    # ----------------------------------------------------------------------------------------- deadlines

    @property
    def idle_timeout(self) -> float | None:
        """Seconds without a byte from the peer after which to call `time_out`; None for never."""
        return self.config.idle_timeout

    @property
    def heartbeat_interval(self) -> float | None:
        """Seconds without a byte sent after which to call `heartbeat`; None where the peer asks for none."""
        if self.remote is None or not self.remote.idle_time_out:
            return None
        return self.remote.idle_time_out / 2000

    def heartbeat(self) -> None:
        """Queue an empty frame (2.4.5)."""
        if self.state is ConnectionState.OPENED:
            self.output.append(EMPTY_FRAME)
            if self._frames.trace is not None:
                self._frames.trace.frame(0, None, is_sent=True)

    def time_out(self) -> list[Event]:
        """Close, as the peer was silent for too long; return events, as `receive`.
        A shell with more to say closes first."""
        if self.state is ConnectionState.CLOSED:
            return []
        return self._fail(
            "amqp:resource-limit-exceeded", f"the peer sent nothing for {self.config.idle_timeout} seconds"
        )

    # ------------------------------------------------------------------------------------------ the verbs

    def start(self) -> None:
        """Client: queue the first bytes. The rest of the opening follows the server's answers."""
        assert self.role is Role.CLIENT
        assert self.state is ConnectionState.START
        self._step(ConnectionInput.START)

    def sasl_outcome(self, *, ok: bool) -> None:
        """Server: answer `SaslRequested`; code 0, or 1 for a refused credential (5.3.3.6).

        A client that did not wait for it may have sent more: call `receive` with no bytes to go on; after a
        refusal that returns `Closed`. Does nothing where the connection was lost meanwhile.
        """
        assert self.state in (ConnectionState.SASL_ANSWER, ConnectionState.CLOSED)
        action = self._step(ConnectionInput.ACCEPT if ok else ConnectionInput.REFUSE)
        if action is ConnectionAction.SEND_REFUSAL:
            error = AmqpError("amqp:unauthorized-access", "the credential was refused")
            self._events.append(Closed(error, is_local=True))

    def begin(self) -> Session:
        """Begin a session; `SessionBegun` reports that it is mapped. Raises `ClosedError` if the connection is not."""
        if self.state is not ConnectionState.OPENED:
            raise ClosedError("connection")
        session = self._new_session(is_remote_initiated=False)
        session.send_begin()
        return session

    def close(self, error: AmqpError | None = None) -> None:
        """Close in order (2.4.3). The peer's close is reported as `Closed`. Does nothing where close was sent."""
        self._step(ConnectionInput.CLOSE, error)

    def _step(self, happened: ConnectionInput, error: AmqpError | None = None) -> ConnectionAction | None:
        """Go to the next state, and send what is due; return what was done, None where nothing happens here."""
        action, state = CONNECTION_STEPS[self.role].get((self.state, happened), (None, self.state))
        match action:
            case ConnectionAction.SEND_SASL_HEADER:
                self.output.append(SASL_HEADER)
            case ConnectionAction.SEND_MECHANISMS:
                self.output.append(SASL_HEADER)
                self._frames.send_sasl(SaslMechanisms([Symbol(each) for each in self.config.mechanisms]))
            case ConnectionAction.SEND_INIT:
                config = self.config
                self._frames.send_sasl(SaslInit(config.mechanism, config.initial_response, config.hostname))
            case ConnectionAction.SEND_ACCEPTANCE | ConnectionAction.SEND_REFUSAL:
                is_accepted = action is ConnectionAction.SEND_ACCEPTANCE
                greeting = self.config.greeting if is_accepted else None
                self._frames.send_sasl(SaslOutcome(code=0 if is_accepted else 1, additional_data=greeting))
            case ConnectionAction.SEND_AMQP_HEADER:
                self.output.append(AMQP_HEADER)
            case ConnectionAction.SEND_OPEN:
                if not self._send_open():
                    raise ProtocolError(FRAME_SIZE_TOO_SMALL, "this end's open fits into no frame that the peer takes")
            case ConnectionAction.SEND_OPEN_AND_CLOSE:
                if self._send_open():
                    self._frames.send(0, Close(error=error))
            case ConnectionAction.SEND_CLOSE:
                self._frames.send(0, Close(error=error))
        self.state = state
        self._frames.is_open = state is ConnectionState.OPENED
        if action is not None and state in (ConnectionState.CLOSE_SENT, ConnectionState.CLOSED):
            # Nothing more is sent on any link: what was held for them goes.
            for session in self.sessions.values():
                session.stop()
            if state is ConnectionState.CLOSED:
                self.pending = []
        return action

    def data_to_send(self) -> bytes:
        """Take what is to be sent now; empty when there is nothing."""
        data = b"".join(self.output)
        self.output.clear()
        return data

    # ------------------------------------------------------------------------------------------- sending

    def _send_open(self) -> bool:
        """Queue this end's open. Return False, and queue nothing, where it is larger than the peer's max-frame-size."""
        config = self.config
        idle: int | None = None
        if config.idle_timeout is not None:
            # Peers need not support one below a second (2.4.5): then less time is left for heartbeats that are late.
            idle = int(max(config.idle_timeout * 500, min(config.idle_timeout * 1000, 1000)))
        return self._frames.send(
            0,
            Open(
                container_id=config.container_id,
                hostname=config.hostname,
                max_frame_size=config.max_frame_size,
                channel_max=config.channel_max,
                idle_time_out=idle,
                properties=dict(config.properties) or None,
            ),
        )

    def _new_session(self, *, is_remote_initiated: bool) -> Session:
        assert self.remote is not None
        highest = min(self.config.channel_max, self.remote.channel_max)
        for channel in range(highest + 1):
            if channel not in self.sessions:
                session = Session(
                    self._frames, self.config, self.unfinished_bytes, channel, is_remote_initiated=is_remote_initiated
                )
                self.sessions[channel] = session
                return session
        raise ProtocolError("amqp:not-allowed", "every channel is in use")

    # ------------------------------------------------------------------------------------------ receiving

    @property
    def is_behind(self) -> bool:
        """Whether bytes wait here that could be read by now, so that further ones would only pile up.

        They wait for the end of a turn (call `receive` with no bytes), or for `sasl_outcome`. A caller that reads
        nothing meanwhile bounds what waits here: by what it passed to one `receive`, and less than a frame before it.
        """
        if not self.pending or self.state is ConnectionState.CLOSED:
            return False
        return self._turn <= 0 or self.state is ConnectionState.SASL_ANSWER

    def receive(self, data: bytes, turn: int = _UNLIMITED) -> list[Event]:
        """Handle bytes from the peer, split anywhere.

        Args:
            turn: How many plain transfers to take at most before returning; another frame counts for `FRAME_COST` of
                them, and a message for what `ConnectionConfig.weigh` returns. What is left waits for the next call: see
                `is_behind`.

        Returns:
            The events, in order. Raises nothing.
        """
        if self.state in _DEAF:
            return self._take_events()
        self._turn = turn
        pos = 0
        try:
            if self.pending:
                self._check_backlog(len(data))
                missing = self._wanted - self._pending_size
                # A large frame that comes in many pieces is put together once.
                self.pending.append(data)
                self._pending_size += len(data)
                if missing > len(data):
                    return []
                if missing > 0:
                    # Only the frame that was cut is put together, and what came after it is not copied.
                    self.pending[-1] = data[:missing]
                    self._receive_step(b"".join(self.pending), 0)
                    pos = missing
                else:
                    data = b"".join(self.pending)
        except ProtocolError as error:
            return self._fail(error.condition, error.description)
        return self._receive_from(data, pos)

    _receive = receive
    """What the compiled core does not do."""

    def _receive_from(self, data: bytes, pos: int) -> list[Event]:
        """Handle what was read and is not handled yet; return all events."""
        try:
            size = len(data)
            while pos < size and self._turn > 0:
                is_framed = self.state in _FRAMED
                after = self._receive_frames(data, pos) if is_framed else self._receive_step(data, pos)
                if after == pos:
                    break
                pos = after
            if pos < size or self.pending:
                self._keep(data, pos)
        except ProtocolError as error:
            return self._fail(error.condition, error.description)
        # As `_take_events`, without a call for each read.
        events, self._events = self._events, []
        self._inboxes.clear()
        return events

    def _check_backlog(self, size: int) -> None:
        """Bound what a caller reads on while the SASL answer is due, and while it should not (`is_behind`)."""
        is_due = self.state is ConnectionState.SASL_ANSWER
        if is_due and size and self._pending_size + size > self.config.max_frame_size:
            raise ProtocolError("amqp:connection:framing-error", "too much was sent before the SASL outcome")

    def _keep(self, data: bytes, pos: int) -> None:
        """Keep what is not whole yet."""
        self.pending = []
        self._pending_size = self._wanted = 0
        size = len(data) - pos
        if size == 0 or self.state is ConnectionState.CLOSED:
            return
        self.pending.append(data[pos:])
        self._pending_size = size
        if self.state in _FRAMED and size >= 8:
            self._wanted = _from_bytes(data[pos : pos + 4], "big")

    def _take_events(self) -> list[Event]:
        events, self._events = self._events, []
        self._inboxes.clear()
        return events

    def _receive_step(self, data: bytes, pos: int) -> int:
        """Read what the state expects at `pos`; return the position after it, `pos` where there is not enough."""
        if self.state in _FRAMED:
            return self._receive_frames(data, pos)
        if self.state in (ConnectionState.CLOSED, ConnectionState.SASL_ANSWER):
            return pos
        return self._receive_header(data, pos)

    def receive_eof(self, reason: str = "the peer closed the byte stream") -> list[Event]:
        """Handle the end of the byte stream, for this reason; return `Closed`, unless that was reported before."""
        self.output.clear()
        action = self._step(ConnectionInput.RECEIVE_EOF)
        if action is not None:
            is_lost = action is ConnectionAction.REPORT_LOSS
            error = AmqpError("amqp:connection:forced", reason) if is_lost else None
            self._events.append(Closed(error, is_local=True))
        return self._take_events()

    def release(self) -> None:
        """Drop the sessions and links of a connection that is closed, once the shell has handled its last event.

        Connection, sessions and links refer to each other: without this they stay until the cyclic collector comes.
        """
        assert self.state is ConnectionState.CLOSED
        for session in self.sessions.values():
            session.release()
        self.sessions.clear()
        self._sessions_by_remote_channel.clear()
        self.links.clear()
        self._forms.clear()
        self.kept = 0

    def _fail(self, condition: str, description: str) -> list[Event]:
        """Close because of what the peer did; return the events before it, and `Closed`."""
        error = AmqpError(condition, description)
        self._step(ConnectionInput.FAIL, error)
        self._events.append(Closed(error, is_local=True))
        return self._take_events()

    def _receive_header(self, data: bytes, pos: int) -> int:
        """Read a protocol header (2.2)."""
        header = data[pos : pos + 8]
        expected = AMQP_HEADER if self.state is ConnectionState.AMQP_HEADER else SASL_HEADER
        may_skip_sasl = self.state is ConnectionState.SASL_HEADER and self.role is Role.SERVER
        if may_skip_sasl and not self.config.requires_sasl and header[4:5] == AMQP_HEADER[4:5]:
            expected = AMQP_HEADER
        if header != expected[: len(header)]:
            if self.role is Role.SERVER:
                # 2.2: answer with the header that is expected here, then close.
                self.output.append(expected)
                raise ProtocolError("amqp:connection:framing-error", "the client sent an unexpected protocol header")
            what = "another protocol" if header[:4] != b"AMQP" else "another version or layer of AMQP"
            raise ProtocolError("amqp:connection:framing-error", f"the server speaks {what}: it sent {header!r}")
        if len(header) < 8:
            return pos
        is_sasl = expected is SASL_HEADER
        self._step(ConnectionInput.RECEIVE_SASL_HEADER if is_sasl else ConnectionInput.RECEIVE_AMQP_HEADER)
        return pos + 8

    def _receive_frames(self, data: bytes, pos: int) -> int:
        """Read whole frames from `pos` on; return the position after the last whole one."""
        end = len(data)
        is_opened = self.state is _OPENED
        limit = self.config.max_frame_size if is_opened or self.state not in _IN_SASL else SASL_FRAME_LIMIT
        forms, inboxes = self._forms, self._inboxes
        turn = self._turn
        weigh, enforces_credit = self.config.weigh, self.config.enforce_credit
        trace = self._frames.trace
        while end - pos >= 8:
            form = forms.get(data[pos + 4 : pos + 16]) if is_opened else None
            if form is not None:
                link = form.link
                session = link.session
                if link.state is _ATTACHED and session.state is _MAPPED and link.incoming.buffer is None:
                    box = inboxes.get(link) if inboxes else None
                    if box is None or not (box.delivery_ids or box.formats):
                        # A run: consecutive plain transfers on one link. Its counters move once, when the run ends.
                        largest = link.largest_message + form.payload_at
                        if largest > limit:
                            largest = limit
                        room = link.allowance if enforces_credit and link.allowance < turn else turn
                        if weigh is not None and room > 1:
                            room = 1  # each message counts on its own
                        payloads, before = ([], 0) if box is None else (box.payloads, len(box.payloads))
                        after_run = take_run(form, data, pos, largest, room, payloads)
                        if after_run > pos:
                            pos = after_run
                            if box is None:
                                box = inboxes[link] = Messages()
                                box.link, box.payloads, box.delivery_ids, box.formats = link, payloads, [], None
                                self._events.append(box)
                            count = len(payloads) - before
                            if trace is not None:
                                _trace_run(trace, link, payloads[-count:])
                            # As `Link.used_credit` and `SessionFlow.used_window`, without calls for each run.
                            link.credit = link.credit - count if link.credit > count else 0
                            link.allowance -= count
                            link.delivery_count = (link.delivery_count + count) & UINT
                            session.next_incoming_id = (session.next_incoming_id + count) & UINT
                            session.incoming_window -= count
                            if session.incoming_window <= session.reopens_at:
                                session.send_flow()
                            turn -= count if weigh is None else weigh(payloads[-1])
                            if turn <= 0:
                                break
                            continue
            size = _from_bytes(data[pos : pos + 4], "big")
            if size < 8 or size > limit:
                raise ProtocolError(
                    "amqp:connection:framing-error", f"a frame of {size} bytes, where {limit} are allowed"
                )
            after = pos + size
            if after > end:
                break
            self._turn = turn - FRAME_COST
            self._receive_frame(data, pos, after)
            turn = self._turn
            pos = after
            if turn <= 0 or self.state not in _FRAMED:
                break
            is_opened = self.state is _OPENED
        self._turn = turn
        return pos

    def _inbox(self, link: Link, *, is_settled: bool) -> Messages:
        inbox = self._inboxes.get(link)
        if inbox is None or bool(inbox.delivery_ids) is is_settled:
            inbox = self._inboxes[link] = Messages()
            inbox.link, inbox.payloads, inbox.delivery_ids, inbox.formats = link, [], [], None
            self._events.append(inbox)
        return inbox

    def _receive_frame(self, data: bytes, pos: int, after: int) -> None:
        """Read one frame by the general decoder."""
        trace = self._frames.trace
        _, offset, kind, channel = _FRAME.unpack_from(data, pos)
        body = pos + offset * 4
        if offset < 2 or body > after:
            raise ProtocolError("amqp:connection:framing-error", f"a frame with a data offset of {offset}")
        if (kind == 1) is not (self.state in _IN_SASL) or kind > 1:
            raise ProtocolError("amqp:connection:framing-error", f"a frame of type {kind} is not expected here")
        if body == after:
            if kind == 1:
                raise ProtocolError("amqp:connection:framing-error", "an empty SASL frame")
            if trace is not None:
                trace.frame(channel, None, is_sent=False)
            return
        performative, payload = decode_performative(data, body, after)
        if trace is not None:
            trace.frame(channel, performative, after - payload, is_sent=False)
        if payload != after and not isinstance(performative, Transfer):
            raise ProtocolError("amqp:connection:framing-error", "bytes follow a performative that carries none")
        if kind == 1:
            self._on_sasl(performative)
        elif self.state is ConnectionState.OPENING:
            if isinstance(performative, Close):
                self._on_close(performative)
                return
            if not isinstance(performative, Open):
                raise ProtocolError("amqp:illegal-state", "the first frame is not an open")
            self._count_kept(cost_of(data, body, after))
            self._on_open(performative)
        elif isinstance(performative, Transfer):
            self._on_transfer(performative, data[payload:after], channel)
            self._learn_form(performative, data, pos, payload, channel)
        else:
            cost = cost_of(data, body, after) if isinstance(performative, Attach | Begin) else 0
            self._on_performative(performative, channel, cost)

    def _count_kept(self, cost: int) -> None:
        self.kept += cost
        if self.kept > self.limits.kept:
            raise ProtocolError(
                "amqp:resource-limit-exceeded",
                f"the sessions and links of one connection take more than {self.limits.kept} bytes",
            )

    # ------------------------------------------------------------------------------------- SASL (part 5.3)

    def _on_sasl(self, performative: Any) -> None:
        happened = _SASL_INPUTS.get(type(performative))
        if happened is None or (self.state, happened) not in CONNECTION_STEPS[self.role]:
            raise ProtocolError("amqp:illegal-state", "an unexpected SASL frame")
        config = self.config
        match performative:
            case SaslMechanisms(offered) if config.mechanism not in offered:
                raise ProtocolError(
                    "amqp:unauthorized-access",
                    f"the server does not offer SASL {config.mechanism}",
                )
            case SaslOutcome(code) if code != 0:
                # 5.3.3.6: 1 is about the credential, the rest about the server.
                raise ProtocolError(
                    "amqp:unauthorized-access" if code == 1 else "amqp:internal-error",
                    f"SASL {config.mechanism} was refused, code {code}",
                )
            case SaslInit(mechanism) if mechanism not in config.mechanisms:
                self._frames.send_sasl(SaslOutcome(code=1))
                raise ProtocolError("amqp:unauthorized-access", "a SASL mechanism that was not offered")
            case SaslInit(mechanism, response, hostname):
                self._events.append(SaslRequested(str(mechanism), response or b"", hostname))
        self._step(happened)

    # --------------------------------------------------------------------------------- performatives (2.7)

    def _on_open(self, open_: Open) -> None:
        if open_.max_frame_size < MIN_MAX_FRAME_SIZE:
            raise ProtocolError("amqp:invalid-field", f"a max-frame-size below {MIN_MAX_FRAME_SIZE}")
        least = self.config.min_idle_time_out
        if open_.idle_time_out and open_.idle_time_out < least:
            # 2.4.5: no peer must support an arbitrarily short one; it would be a flood of heartbeats.
            raise ProtocolError("amqp:not-allowed", f"an idle-time-out of {open_.idle_time_out} ms, below {least}")
        self.remote = open_
        self._frames.max_frame_size = min(open_.max_frame_size, self.config.max_sent_frame_size)
        self._step(ConnectionInput.RECEIVE_OPEN)
        self._events.append(Opened(open_))

    def _on_performative(self, performative: Any, channel: int, cost: int) -> None:
        if isinstance(performative, Close):
            self._on_close(performative)
            return
        if self.state is ConnectionState.CLOSE_SENT:
            return
        if isinstance(performative, Begin):
            self._on_begin(performative, channel, SESSION_COST + cost)
            return
        if isinstance(performative, End | Detach) and channel not in self._sessions_by_remote_channel:
            # Both ends of the session have ended it, and a peer may send these late. Microsoft's engine, which is the
            # service's, takes no notice either (azure-amqp: AmqpConnection.OnReceiveSessionFrame).
            return
        session = self._session_on(channel)
        if isinstance(performative, End):
            self._on_end(session, performative)
            return
        if session.state is SessionState.END_SENT:
            return
        match performative:
            case Flow():
                self._events.extend(CreditChanged(link) for link in session.on_flow(performative))
                if (probed := session.answered(performative)) is not None:
                    self._events.append(FlowAnswered(probed))
            case Disposition():
                for link, outcomes in session.on_disposition(performative).items():
                    self._events.append(Outcomes(link, outcomes))
            case Attach():
                link, is_reported = session.on_attach(performative, LINK_COST + cost)
                self._count_kept(link.kept)
                if is_reported:
                    self._take_name(link)
                    self._events.append(LinkAttached(link, performative))
            case Detach():
                link = session.on_detach(performative)
                self._forget(link)
                if not link.is_detach_reported:
                    self._events.append(LinkDetached(link, performative.error, performative.closed))
            case _:
                raise ProtocolError("amqp:illegal-state", "an unexpected performative")

    def _session_on(self, channel: int) -> Session:
        session = self._sessions_by_remote_channel.get(channel)
        if session is None:
            raise ProtocolError("amqp:not-found", f"channel {channel} has no session")
        return session

    def _on_close(self, close: Close) -> None:
        self._step(ConnectionInput.RECEIVE_CLOSE)
        self._events.append(Closed(close.error))

    def _on_begin(self, begin: Begin, channel: int, kept: int) -> None:
        if channel in self._sessions_by_remote_channel or channel > self.config.channel_max:
            raise ProtocolError("amqp:not-allowed", f"channel {channel} is in use or above the channel-max")
        if begin.remote_channel is None:
            session = self._new_session(is_remote_initiated=True)
            session.on_begin(begin, channel, kept)
            session.send_begin()
        else:
            found = self.sessions.get(begin.remote_channel)
            if found is None or found.remote_channel is not None:
                raise ProtocolError("amqp:not-allowed", "a begin answers a session that does not wait for one")
            session = found
            session.on_begin(begin, channel, kept)
        self._sessions_by_remote_channel[channel] = session
        self._count_kept(session.kept)
        if session.state is SessionState.MAPPED:
            self._events.append(SessionBegun(session))

    def _on_end(self, session: Session, end: End) -> None:
        assert session.remote_channel is not None
        del self._sessions_by_remote_channel[session.remote_channel]
        del self.sessions[session.channel]
        links = session.on_end()
        self.kept -= session.kept
        for link in links:
            self._forget(link)
        self._events.append(SessionEnded(session, links, end.error))

    def _on_transfer(self, transfer: Transfer, payload: bytes, channel: int) -> None:
        if self.state is ConnectionState.CLOSE_SENT:
            return
        session = self._session_on(channel)
        if session.state is SessionState.END_SENT:
            return  # 2.5.5: what was on its way is discarded
        link, found = session.on_transfer(transfer, payload, self.limits.unfinished)
        if isinstance(found, Delivery):
            self._report_message(link, found)
        elif found is not None:
            self._detach(link, found.condition, found.description)

    def _report_message(self, link: Link, delivery: Delivery) -> None:
        inbox = self._inbox(link, is_settled=delivery.is_settled)
        if not delivery.is_settled:
            inbox.delivery_ids.append(delivery.delivery_id)
        if delivery.message_format and inbox.formats is None:
            inbox.formats = [0] * len(inbox.payloads)
        if inbox.formats is not None:
            inbox.formats.append(delivery.message_format)
        inbox.payloads.append(delivery.payload)
        if self.config.weigh is not None:
            self._turn -= self.config.weigh(delivery.payload)

    def _take_name(self, link: Link) -> None:
        """Register a link. An earlier link of its name, in any session, is detached as stolen (2.6.1)."""
        key = link.name, link.is_receiver
        first = self.links.get(key)
        if first is not None and first.is_live and link.is_remote_initiated:
            self._detach(first, "amqp:link:stolen", "the link was attached again under its name")
        self.links[key] = link

    def _forget(self, link: Link) -> None:
        """Forget what is kept for a link that both ends have ended, and its name, unless another link has it by now."""
        self.kept -= link.kept
        for key in [key for key, form in self._forms.items() if form.link is link]:
            del self._forms[key]
        if self.links.get((link.name, link.is_receiver)) is link:
            del self.links[link.name, link.is_receiver]

    def _detach(self, link: Link, condition: str, description: str) -> None:
        """Detach a link because of what the peer did on it."""
        error = AmqpError(condition, description)
        link.fail(error)
        self._events.append(LinkDetached(link, error, closed=True))

    def _learn_form(self, transfer: Transfer, data: bytes, pos: int, payload: int, channel: int) -> None:
        """Keep the form of the transfer at `pos` where it is plain: the next ones that have it need no decoding."""
        session = self._sessions_by_remote_channel.get(channel)
        link = None if session is None else session.links_by_remote_handle.get(transfer.handle)
        form = None if link is None else form_of(transfer, data, pos, payload, link)
        if form is None:
            return
        if len(self._forms) >= _MAX_FORMS:
            self._forms.clear()
        self._forms[data[pos + 4 : pos + 16]] = form

    def __repr__(self) -> str:
        return f"Connection({self.role.value}, {self.state.value})"


if core is not None:
    core.receive_transfers(_OPENED, _MAPPED, _ATTACHED)
