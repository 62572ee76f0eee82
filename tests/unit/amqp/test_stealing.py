"""Links attached again under their name (2.6.1), and transfers that come before the answer to their attach (2.6.7)."""

from __future__ import annotations

import pytest

from eventpump.amqp.connection import CreditChanged, LinkAttached, LinkDetached, Messages
from eventpump.amqp.link import AttachState, Link
from eventpump.amqp.performatives import Attach, Begin, Detach, Source, Target, Transfer
from eventpump.amqp.session import Session
from tests.unit.amqp.pair import Pair, config, frame, only, opened, payloads, sent

STOLEN = "amqp:link:stolen"


def attach(pair: Pair, session: Session, *, is_receiver: bool, accepts: bool = True) -> tuple[Link, Link]:
    """Attach a link "x" from the client.

    Returns:
        Both ends.
    """
    mine = session.attach("x", is_receiver=is_receiver, source=Source("a"), target=Target("b"), snd_settle_mode=2)
    events = pair.server.receive(pair.client.data_to_send())
    theirs = only(events, LinkAttached).link
    if accepts:
        theirs.accept()
    pair.server_events += events
    pair.run()
    return mine, theirs


@pytest.mark.parametrize("is_receiver", [True, False])
@pytest.mark.parametrize("is_same_session", [True, False])
@pytest.mark.parametrize("is_waiting", [True, False])
def test_attach_of_a_name_in_use_steals_the_link(is_receiver: bool, is_same_session: bool, is_waiting: bool) -> None:
    """The second attach of a name succeeds, and the first link is detached as stolen: in any session, either direction.

    That holds for a first link whose attach still waits for its answer too.
    """
    pair = opened()
    session, _ = pair.session()
    other = session if is_same_session else pair.session()[0]
    first, their_first = attach(pair, session, is_receiver=is_receiver, accepts=not is_waiting)
    second, their_second = attach(pair, other, is_receiver=is_receiver)
    detached = [event for event in pair.server_events if isinstance(event, LinkDetached)]
    assert [(event.link, event.closed, event.error and event.error.condition) for event in detached] == [
        (their_first, True, STOLEN)
    ]
    happened = only(pair.client_events, LinkDetached)
    assert happened.link is first
    assert happened.error is not None
    assert happened.error.condition == STOLEN
    assert second.is_attached
    assert their_second.is_attached
    receiver, sender = (second, their_second) if is_receiver else (their_second, second)
    receiver.set_credit(1)
    pair.run()
    sender.send(b"x", settled=True)
    assert payloads([event for events in pair.run() for event in events]) == [b"x"]


def test_attach_of_a_stolen_name_steals_again() -> None:
    """Each further attach steals from the one before it, once."""
    pair = opened()
    links = [attach(pair, pair.session()[0], is_receiver=True)[1] for _ in range(5)]
    stolen = [event.link for event in pair.server_events if isinstance(event, LinkDetached)]
    assert stolen == links[:-1]
    assert list(pair.server.links.values()) == links[-1:]


def test_attach_of_a_name_no_longer_in_use_steals_nothing() -> None:
    """A link that is detached, or whose session is over, is not stolen; nor is one of the other direction."""
    pair = opened()
    session, _ = pair.session()
    first, _ = attach(pair, session, is_receiver=True)
    attach(pair, session, is_receiver=False)
    first.detach()
    pair.run()
    attach(pair, session, is_receiver=True)
    session.end()
    pair.run()
    assert pair.server.links == pair.client.links == {}
    attach(pair, pair.session()[0], is_receiver=True)
    assert all(event.error is None for event in pair.server_events if isinstance(event, LinkDetached))


def test_attach_by_the_server_steals_from_its_client() -> None:
    """The rule holds in both roles: a client's link that the server attaches again is stolen, and both know."""
    pair = opened()
    mine, theirs = pair.link(pair.session()[0], is_receiver=True, name="x")
    pair.server.begin()
    pair.run()
    thief = pair.server.sessions[1].attach("x", is_receiver=False, source=Source("a"), target=Target("b"))
    client, _ = pair.run()
    assert only(client, LinkDetached).link is mine
    assert only(client, LinkAttached).link.is_remote_initiated
    assert only(pair.server_events, LinkDetached).link is theirs
    assert thief.state is AttachState.ATTACH_SENT


# --------------------------------------------------------------------------- transfers before their attach's answer


def pipelined() -> bytes:
    """Write a begin, an attach and two transfers in one flight."""
    return (
        frame(0, Begin(None, 0, 10, 10))
        + frame(0, Attach(name="x", handle=3, role=False, source=Source("a"), target=Target("b")))
        + frame(0, Transfer(3, 0, b"0", 0), b"first")
        + frame(0, Transfer(3, 1, b"1", 0), b"second")
    )


def test_transfers_read_with_their_attach_are_reported_without_credit() -> None:
    """Where credit is not enforced, they come as messages behind the attach, to be settled."""
    pair = opened(server=config(enforce_credit=False))
    events = pair.server.receive(pipelined())
    assert [type(event) for event in events if not isinstance(event, CreditChanged)][1:] == [LinkAttached, Messages]
    messages = only(events, Messages)
    assert (messages.payloads, messages.delivery_ids) == ([b"first", b"second"], [0, 1])
    link = messages.link
    link.accept()
    link.set_credit(10)
    assert link.delivery_count == 2
    assert sent(pair.server.data_to_send(), Attach)[0].target == Target("b")


def test_transfers_read_with_their_attach_are_refused_where_enforced() -> None:
    """Where credit is enforced, the link is detached for them, once: the attach is reported before, for nothing."""
    pair = opened()
    events = pair.server.receive(pipelined())
    link = only(events, LinkAttached).link
    error = only(events, LinkDetached).error
    assert error is not None
    assert error.condition == "amqp:link:transfer-limit-exceeded"
    link.accept()
    link.set_credit(10)
    data = pair.server.data_to_send()
    (answer,), (detach,) = sent(data, Attach), sent(data, Detach)
    assert answer.target is None
    assert detach.error == error
    assert pair.server.receive(frame(0, Detach(3, closed=True))) == []


def test_transfers_to_a_refused_link_are_dropped() -> None:
    """What was on its way to a link that is refused by now is dropped, and breaks no rule (2.6.6)."""
    pair = opened(server=config(enforce_credit=False))
    data = pipelined()
    cut = data.index(frame(0, Transfer(3, 0, b"0", 0), b"first"))
    link = only(pair.server.receive(data[:cut]), LinkAttached).link
    link.detach()
    assert pair.server.receive(data[cut:]) == []
    assert pair.server.is_open
