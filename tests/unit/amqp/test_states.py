"""The lives of links and sessions: every state meets every input."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from eventpump.amqp.connection import Connection
from eventpump.amqp.link import LINK_STEPS, Link, LinkAction, LinkInput, LinkState
from eventpump.amqp.performatives import Attach, Begin, Detach, Source, Target, decode_performative
from eventpump.amqp.session import SESSION_STEPS, Session, SessionAction, SessionInput, SessionState
from tests.unit.amqp.pair import opened


def sent_by(engine: Connection) -> list[str]:
    """Return the names of the performatives that wait to be sent."""
    data, names = engine.data_to_send(), []
    while data:
        size = int.from_bytes(data[:4], "big")
        names.append(type(decode_performative(data, 8, size)[0]).__name__)
        data = data[size:]
    return names


# ----------------------------------------------------------------------------------------------------- links

_LINKS: dict[LinkState, dict[LinkInput, tuple[LinkState, list[str]]]] = {
    LinkState.ATTACH_SENT: {
        LinkInput.RECEIVE_ATTACH: (LinkState.ATTACHED, []),
        LinkInput.RECEIVE_REFUSAL: (LinkState.REFUSED, []),
        LinkInput.DETACH: (LinkState.DETACH_SENT, ["Detach"]),
        LinkInput.SESSION_ENDED: (LinkState.DETACHED, []),
    },
    LinkState.ATTACH_RECEIVED: {
        LinkInput.ACCEPT: (LinkState.ATTACHED, ["Attach"]),
        LinkInput.DETACH: (LinkState.DETACH_SENT, ["Attach", "Detach"]),
        LinkInput.RECEIVE_DETACH: (LinkState.DETACHED, ["Attach", "Detach"]),
        LinkInput.SESSION_ENDED: (LinkState.DETACHED, []),
    },
    LinkState.ATTACHED: {
        LinkInput.DETACH: (LinkState.DETACH_SENT, ["Detach"]),
        LinkInput.RECEIVE_DETACH: (LinkState.DETACHED, ["Detach"]),
        LinkInput.SESSION_ENDED: (LinkState.DETACHED, []),
    },
    LinkState.REFUSED: {
        LinkInput.DETACH: (LinkState.DETACH_SENT, ["Detach"]),
        LinkInput.RECEIVE_DETACH: (LinkState.DETACHED, ["Detach"]),
        LinkInput.SESSION_ENDED: (LinkState.DETACHED, []),
    },
    LinkState.DETACH_SENT: {
        LinkInput.RECEIVE_ATTACH: (LinkState.DETACH_SENT, []),
        LinkInput.RECEIVE_REFUSAL: (LinkState.DETACH_SENT, []),
        LinkInput.RECEIVE_DETACH: (LinkState.DETACHED, []),
        LinkInput.SESSION_ENDED: (LinkState.DETACHED, []),
    },
    LinkState.DETACHED: {},
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


@pytest.mark.parametrize(("state", "happened"), list(itertools.product(LinkState, LinkInput)))
def test_link_takes_each_input_in_each_state(state: LinkState, happened: LinkInput) -> None:
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
