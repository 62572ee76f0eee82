"""The states of connections, sessions and links: every state meets every input."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from eventpump.amqp.connection import (
    AMQP_HEADER,
    CONNECTION_STEPS,
    SASL_HEADER,
    Closed,
    Connection,
    ConnectionInput,
    ConnectionState,
    Event,
    Opened,
    Role,
    SaslRequested,
)
from eventpump.amqp.flow import SessionState
from eventpump.amqp.link import LINK_STEPS, AttachState, Link, LinkAction, LinkInput
from eventpump.amqp.performatives import (
    Attach,
    Begin,
    Close,
    Detach,
    Open,
    SaslInit,
    SaslMechanisms,
    SaslOutcome,
    Source,
    Target,
    decode_performative,
)
from eventpump.amqp.session import SESSION_STEPS, Session, SessionAction, SessionInput
from eventpump.amqp.types import Symbol
from tests.unit.amqp.pair import Pair, condition, config, frame, opened


def sent_by(engine: Connection) -> list[str]:
    """Return the names of the headers and performatives that wait to be sent."""
    data, names = engine.data_to_send(), []
    while data:
        if data.startswith(b"AMQP"):
            names.append({SASL_HEADER: "SASL header", AMQP_HEADER: "AMQP header"}[data[:8]])
            data = data[8:]
            continue
        size = int.from_bytes(data[:4], "big")
        names.append(type(decode_performative(data, 8, size)[0]).__name__)
        data = data[size:]
    return names


# ----------------------------------------------------------------------------------------------- connections

_S, _I = ConnectionState, ConnectionInput

# What leads to each state, from the state that a connection begins in.
_PATHS: dict[Role, dict[ConnectionState, list[ConnectionInput]]] = {
    Role.CLIENT: {
        _S.START: [],
        _S.SASL_HEADER: [_I.START],
        _S.SASL: [_I.START, _I.RECEIVE_SASL_HEADER],
        _S.SASL_OUTCOME: [_I.START, _I.RECEIVE_SASL_HEADER, _I.RECEIVE_MECHANISMS],
    },
    Role.SERVER: {
        _S.SASL_HEADER: [],
        _S.SASL: [_I.RECEIVE_SASL_HEADER],
        _S.SASL_ANSWER: [_I.RECEIVE_SASL_HEADER, _I.RECEIVE_INIT],
    },
}
for _role, _last, _answer in (
    (Role.CLIENT, _S.SASL_OUTCOME, _I.RECEIVE_OUTCOME),
    (Role.SERVER, _S.SASL_ANSWER, _I.ACCEPT),
):
    _way = [*_PATHS[_role][_last], _answer]
    _PATHS[_role] |= {
        _S.AMQP_HEADER: _way,
        _S.OPENING: [*_way, _I.RECEIVE_AMQP_HEADER],
        _S.OPENED: [*_way, _I.RECEIVE_AMQP_HEADER, _I.RECEIVE_OPEN],
        _S.CLOSE_SENT: [*_way, _I.RECEIVE_AMQP_HEADER, _I.RECEIVE_OPEN, _I.CLOSE],
        _S.CLOSED: [*_way, _I.CLOSE],
    }

_Reported = list[type[Event]]
_Entries = dict[ConnectionState, dict[ConnectionInput, tuple[ConnectionState, list[str], _Reported]]]

_CLOSES: dict[ConnectionInput, tuple[ConnectionState, list[str], _Reported]] = {
    _I.CLOSE: (_S.CLOSED, [], []),
    _I.FAIL: (_S.CLOSED, [], [Closed]),
    _I.RECEIVE_EOF: (_S.CLOSED, [], [Closed]),
}
_SHARED: _Entries = {
    _S.OPENED: {
        _I.CLOSE: (_S.CLOSE_SENT, ["Close"], []),
        _I.RECEIVE_CLOSE: (_S.CLOSED, ["Close"], [Closed]),
        _I.FAIL: (_S.CLOSED, ["Close"], [Closed]),
        _I.RECEIVE_EOF: (_S.CLOSED, [], [Closed]),
    },
    _S.CLOSE_SENT: {
        _I.RECEIVE_CLOSE: (_S.CLOSED, [], [Closed]),
        _I.FAIL: (_S.CLOSED, [], [Closed]),
        _I.RECEIVE_EOF: (_S.CLOSED, [], [Closed]),
    },
    _S.CLOSED: {},
}
_CONNECTIONS: dict[Role, _Entries] = {
    Role.CLIENT: {
        **_SHARED,
        _S.START: {**_CLOSES, _I.START: (_S.SASL_HEADER, ["SASL header"], [])},
        _S.SASL_HEADER: {**_CLOSES, _I.RECEIVE_SASL_HEADER: (_S.SASL, [], [])},
        _S.SASL: {**_CLOSES, _I.RECEIVE_MECHANISMS: (_S.SASL_OUTCOME, ["SaslInit"], [])},
        _S.SASL_OUTCOME: {**_CLOSES, _I.RECEIVE_OUTCOME: (_S.AMQP_HEADER, ["AMQP header"], [])},
        _S.AMQP_HEADER: {**_CLOSES, _I.RECEIVE_AMQP_HEADER: (_S.OPENING, ["Open"], [])},
        _S.OPENING: {
            **_CLOSES,
            _I.RECEIVE_OPEN: (_S.OPENED, [], [Opened]),
            _I.RECEIVE_CLOSE: (_S.CLOSED, ["Close"], [Closed]),
            _I.FAIL: (_S.CLOSED, ["Close"], [Closed]),
        },
    },
    Role.SERVER: {
        **_SHARED,
        _S.SASL_HEADER: {
            **_CLOSES,
            _I.RECEIVE_SASL_HEADER: (_S.SASL, ["SASL header", "SaslMechanisms"], []),
            _I.RECEIVE_AMQP_HEADER: (_S.OPENING, ["AMQP header"], []),
        },
        _S.SASL: {**_CLOSES, _I.RECEIVE_INIT: (_S.SASL_ANSWER, [], [SaslRequested])},
        _S.SASL_ANSWER: {
            **_CLOSES,
            _I.ACCEPT: (_S.AMQP_HEADER, ["SaslOutcome"], []),
            _I.REFUSE: (_S.CLOSED, ["SaslOutcome"], [Closed]),
        },
        _S.AMQP_HEADER: {**_CLOSES, _I.RECEIVE_AMQP_HEADER: (_S.OPENING, ["AMQP header"], [])},
        _S.OPENING: {
            **_CLOSES,
            _I.RECEIVE_OPEN: (_S.OPENED, ["Open"], [Opened]),
            _I.RECEIVE_CLOSE: (_S.CLOSED, [], [Closed]),
            _I.FAIL: (_S.CLOSED, ["Open", "Close"], [Closed]),
        },
    },
}

_RECEIVED: dict[ConnectionInput, bytes] = {
    _I.RECEIVE_SASL_HEADER: SASL_HEADER,
    _I.RECEIVE_MECHANISMS: frame(0, SaslMechanisms([Symbol("ANONYMOUS")]), kind=1),
    _I.RECEIVE_INIT: frame(0, SaslInit("ANONYMOUS"), kind=1),
    _I.RECEIVE_OUTCOME: frame(0, SaslOutcome(0), kind=1),
    _I.RECEIVE_AMQP_HEADER: AMQP_HEADER,
    _I.RECEIVE_OPEN: frame(0, Open("peer")),
    _I.RECEIVE_CLOSE: frame(0, Close()),
}


def answer(engine: Connection, *, ok: bool) -> list[Event]:
    """Answer a SASL request, and return what comes of it."""
    engine.sasl_outcome(ok=ok)
    return engine.receive(b"")


def happen(engine: Connection, happened: ConnectionInput) -> list[Event]:
    """Have an input happen to a connection. Returns the events."""
    match happened:
        case ConnectionInput.START:
            engine.start()
        case ConnectionInput.CLOSE:
            engine.close()
        case ConnectionInput.ACCEPT | ConnectionInput.REFUSE:
            return answer(engine, ok=happened is ConnectionInput.ACCEPT)
        case ConnectionInput.FAIL:
            return engine.time_out()
        case ConnectionInput.RECEIVE_EOF:
            return engine.receive_eof()
        case _:
            return engine.receive(_RECEIVED[happened])
    return []


def outcome_of(
    role: Role, state: ConnectionState, happened: ConnectionInput
) -> tuple[ConnectionState, list[str], _Reported]:
    """Return the state, what is sent and what is reported after an input. What the peer may not send fails."""
    entries = _CONNECTIONS[role][state]
    if happened in entries:
        return entries[happened]
    is_unread = state in (_S.START, _S.SASL_ANSWER, _S.CLOSED)
    is_discarded = state is _S.CLOSE_SENT and happened is _I.RECEIVE_OPEN  # 2.4.6: it was on its way
    if happened not in _RECEIVED or is_unread or is_discarded:
        return state, [], []
    if role is Role.SERVER and state in _HEADERS:
        return _S.CLOSED, [_HEADERS[state]], [Closed]  # 2.2: another header is answered with the server's own
    return entries[_I.FAIL]


_HEADERS = {_S.SASL_HEADER: "SASL header", _S.AMQP_HEADER: "AMQP header"}
_CALLS_OF_ONE_STATE = {_I.START: _S.START, _I.ACCEPT: _S.SASL_ANSWER, _I.REFUSE: _S.SASL_ANSWER}
"""Calls that only a wrong shell makes in other states, except an answer after the connection was lost."""


@pytest.mark.parametrize(
    ("role", "state", "happened"),
    [
        (role, state, happened)
        for role in Role
        for state, happened in itertools.product(_PATHS[role], ConnectionInput)
        if state in (_CALLS_OF_ONE_STATE.get(happened, state), _S.CLOSED) and (state, happened) != (_S.CLOSED, _I.START)
    ],
)
def test_connection_takes_each_input_in_each_state(
    role: Role, state: ConnectionState, happened: ConnectionInput
) -> None:
    """Each pair leads where the table says, sends what it says and reports it; what the peer may not send, closes."""
    engine = Connection(config(requires_sasl=False), role)
    for each in _PATHS[role][state]:
        happen(engine, each)
    assert engine.state is state
    engine.data_to_send()
    expected = outcome_of(role, state, happened)
    events = happen(engine, happened)
    assert (engine.state, sent_by(engine), [type(event) for event in events]) == expected


def test_amqp_header_first_where_sasl_is_required() -> None:
    """A server that requires SASL answers the AMQP header with the SASL header, and closes (2.2)."""
    engine = Connection(config(), Role.SERVER)
    assert [type(event) for event in engine.receive(AMQP_HEADER)] == [Closed]
    assert engine.data_to_send() == SASL_HEADER


@pytest.mark.parametrize("role", Role)
def test_connection_steps_have_each_entry(role: Role) -> None:
    """The table of each role has the entries that are tested, and no others."""
    tested = {
        (state, happened): after
        for state, entries in _CONNECTIONS[role].items()
        for happened, (after, _, _) in entries.items()
    }
    assert {pair: after for pair, (_, after) in CONNECTION_STEPS[role].items()} == tested


def test_fail_with_an_open_too_large() -> None:
    """A server whose open is too large for a peer that has not said what it takes closes without one."""
    pair = Pair(server=config(container_id="x" * 600))
    pair.client.start()
    for each in _PATHS[Role.SERVER][_S.OPENING]:
        happen(pair.server, each)
    pair.server.data_to_send()
    events = pair.server.receive(b"\x00" * 8)
    assert condition(events) == "amqp:connection:framing-error"
    assert pair.server.data_to_send() == b""


# ----------------------------------------------------------------------------------------------------- links

_LINKS: dict[AttachState, dict[LinkInput, tuple[AttachState, list[str]]]] = {
    AttachState.ATTACH_SENT: {
        LinkInput.RECEIVE_ATTACH: (AttachState.ATTACHED, []),
        LinkInput.RECEIVE_REFUSAL: (AttachState.REFUSED, []),
        LinkInput.DETACH: (AttachState.DETACH_SENT, ["Detach"]),
        LinkInput.SESSION_ENDED: (AttachState.DETACHED, []),
    },
    AttachState.ATTACH_RECEIVED: {
        LinkInput.ACCEPT: (AttachState.ATTACHED, ["Attach"]),
        LinkInput.DETACH: (AttachState.DETACH_SENT, ["Attach", "Detach"]),
        LinkInput.RECEIVE_DETACH: (AttachState.DETACHED, ["Attach", "Detach"]),
        LinkInput.SESSION_ENDED: (AttachState.DETACHED, []),
    },
    AttachState.ATTACHED: {
        LinkInput.DETACH: (AttachState.DETACH_SENT, ["Detach"]),
        LinkInput.RECEIVE_DETACH: (AttachState.DETACHED, ["Detach"]),
        LinkInput.SESSION_ENDED: (AttachState.DETACHED, []),
    },
    AttachState.REFUSED: {
        LinkInput.DETACH: (AttachState.DETACH_SENT, ["Detach"]),
        LinkInput.RECEIVE_DETACH: (AttachState.DETACHED, ["Detach"]),
        LinkInput.SESSION_ENDED: (AttachState.DETACHED, []),
    },
    AttachState.DETACH_SENT: {
        LinkInput.RECEIVE_ATTACH: (AttachState.DETACH_SENT, []),
        LinkInput.RECEIVE_REFUSAL: (AttachState.DETACH_SENT, []),
        LinkInput.RECEIVE_DETACH: (AttachState.DETACHED, []),
        LinkInput.SESSION_ENDED: (AttachState.DETACHED, []),
    },
    AttachState.DETACHED: {},
}


def attach_of(link: Link, source: Source | None) -> Attach:
    """Return an attach of the peer for a receiver."""
    return Attach(link.name, 0, role=not link.is_receiver, source=source, target=Target("there"))


_LINK_CALLS: dict[LinkInput, Callable[[Link], object]] = {
    LinkInput.ACCEPT: Link.accept,
    LinkInput.DETACH: Link.detach,
    LinkInput.RECEIVE_ATTACH: lambda link: link.on_attach(attach_of(link, Source("here")), 0),
    LinkInput.RECEIVE_REFUSAL: lambda link: link.on_attach(attach_of(link, None), 0),
    LinkInput.RECEIVE_DETACH: lambda link: link.on_detach(Detach(0, closed=True)),
    LinkInput.SESSION_ENDED: Link.on_session_ended,
}


@pytest.mark.parametrize(("state", "happened"), list(itertools.product(AttachState, LinkInput)))
def test_link_takes_each_input_in_each_state(state: AttachState, happened: LinkInput) -> None:
    """Each pair leads where the table says and sends what it says, or changes and sends nothing."""
    pair = opened()
    session, _ = pair.session()
    link, _ = pair.link(session, is_receiver=True)
    link.state = state
    target, sent = _LINKS[state].get(happened, (state, []))
    action, after = LINK_STEPS.get((state, happened), (None, state))
    assert after is target
    returned = _LINK_CALLS[happened](link)
    assert link.state is target
    assert sent_by(pair.client) == sent
    if happened in (LinkInput.RECEIVE_ATTACH, LinkInput.RECEIVE_REFUSAL):
        assert returned is (action is LinkAction.REPORT)


# -------------------------------------------------------------------------------------------------- sessions

_SESSIONS: dict[SessionState, dict[SessionInput, tuple[SessionState, list[str]]]] = {
    SessionState.BEGIN_SENT: {
        SessionInput.END: (SessionState.END_SENT, ["End"]),
        SessionInput.RECEIVE_BEGIN: (SessionState.MAPPED, []),
    },
    SessionState.MAPPED: {
        SessionInput.END: (SessionState.END_SENT, ["End"]),
        SessionInput.RECEIVE_END: (SessionState.ENDED, ["End"]),
    },
    SessionState.END_SENT: {
        SessionInput.RECEIVE_BEGIN: (SessionState.END_SENT, []),
        SessionInput.RECEIVE_END: (SessionState.ENDED, []),
    },
    SessionState.ENDED: {},
}

_SESSION_CALLS: dict[SessionInput, Callable[[Session], object]] = {
    SessionInput.END: Session.end,
    SessionInput.RECEIVE_BEGIN: lambda session: session.on_begin(Begin(None, 0, 10, 10), 0, 0),
    SessionInput.RECEIVE_END: Session.on_end,
}


@pytest.mark.parametrize(("state", "happened"), list(itertools.product(SessionState, SessionInput)))
def test_session_takes_each_input_in_each_state(state: SessionState, happened: SessionInput) -> None:
    """Each pair leads where the table says and sends what it says, or changes and sends nothing."""
    pair = opened()
    session, _ = pair.session()
    session.state = state
    target, sent = _SESSIONS[state].get(happened, (state, []))
    action, after = SESSION_STEPS.get((state, happened), (None, state))
    assert after is target
    assert (action is SessionAction.SEND_END) is bool(sent)
    _SESSION_CALLS[happened](session)
    assert session.state is target
    assert sent_by(pair.client) == sent
