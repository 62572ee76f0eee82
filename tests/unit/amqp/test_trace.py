"""The trace of a connection: what it is called with, and performatives as text."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventpump.amqp import performatives as p
from eventpump.amqp.trace import describe
from eventpump.amqp.types import Described, Symbol, UInt
from tests.unit.amqp.pair import Pair, opened

SECRET = "a secret that must not be seen"


class Recorded:
    """A trace that records what it is called with."""

    def __init__(self) -> None:
        self.frames: list[tuple[bool, str]] = []
        self.runs: list[tuple[bool, int, int, int]] = []

    def frame(self, channel: int, performative: p.Composite | None, payload_size: int = 0, *, is_sent: bool) -> None:
        name = "heartbeat" if performative is None else type(performative).__name__
        self.frames.append((is_sent, f"{name}+{payload_size}" if payload_size else name))

    def transfers(self, channel: int, handle: int, count: int, size: int, *, is_sent: bool) -> None:
        self.runs.append((is_sent, handle, count, size))


def traced() -> tuple[Pair, Recorded]:
    """Return an unopened pair whose client is traced."""
    pair, recorded = Pair(), Recorded()
    pair.client.trace = recorded
    return pair, recorded


def test_trace_of_an_opening() -> None:
    """Every frame of SASL and AMQP is traced once, in the order of the stream."""
    pair, recorded = traced()
    pair.open()
    session, _ = pair.session()
    link, _ = pair.link(session, is_receiver=True)
    link.set_credit(5)
    pair.client.heartbeat()
    link.detach()
    session.end()
    pair.client.close()
    pair.run()
    sent = [name for is_sent, name in recorded.frames if is_sent]
    received = [name for is_sent, name in recorded.frames if not is_sent]
    assert sent == ["SaslInit", "Open", "Begin", "Attach", "Flow", "heartbeat", "Detach", "End", "Close"]
    assert received == ["SaslMechanisms", "SaslOutcome", "Open", "Begin", "Attach", "Detach", "End", "Close"]
    assert recorded.runs == []


def test_trace_of_transfers_sent() -> None:
    """A run sent is one call with its count; single messages, and those that the window held back, are one each."""
    pair = opened()
    recorded = pair.client.trace = Recorded()
    mine, theirs = pair.link(pair.session()[0], is_receiver=False)
    theirs.set_credit(100)
    pair.run()
    assert mine.send_run([b"12345"] * 7) == 7
    mine.send(b"123")
    mine.session.remote_incoming_window = 0
    mine.send(b"12")
    pair.run()
    assert recorded.runs == [(True, 0, 7, 35), (True, 0, 1, 3)]
    theirs.session.send_flow()
    pair.run()
    assert recorded.runs[2:] == [(True, 0, 1, 2)]


def test_trace_of_transfers_received() -> None:
    """A run received is one call with its count and size; a transfer for the general decoder is a frame."""
    pair = opened()
    recorded = pair.client.trace = Recorded()
    mine, theirs = pair.link(pair.session()[0], is_receiver=True)
    mine.set_credit(100)
    pair.run()
    assert theirs.send_run([b"12345"] * 7) == 7
    pair.run()
    assert theirs.send_run([b"12345"] * 3) == 3
    theirs.send(b"123")  # unsettled: another form
    pair.run()
    assert recorded.frames[-2:] == [(False, "Transfer+5"), (False, "Transfer+3")]
    assert recorded.runs == [(False, 0, 6, 30), (False, 0, 3, 15)]


def test_no_trace_by_default() -> None:
    """A connection has no trace unless its shell sets one."""
    pair = opened()
    assert pair.client.trace is None
    assert pair.server.trace is None


@pytest.mark.parametrize(
    ("performative", "text"),
    [
        (p.Open("me", hostname="host", properties={"a": SECRET}), "open container_id='me' hostname='host' "),
        (p.Begin(remote_channel=0, incoming_window=5), "begin remote_channel=0 next_outgoing_id=0 incoming_window=5 "),
        (p.Flow(handle=1, link_credit=0, drain=True), "handle=1 link_credit=0 drain=True"),
        (p.Transfer(handle=1, delivery_tag=SECRET.encode(), settled=True), "transfer handle=1 settled=True"),
        (p.Disposition(role=True, first=1, last=2, state=p.Accepted()), "role=receiver first=1 last=2 state=accepted"),
        (p.Disposition(state=p.Rejected(p.AmqpError("a:b", "no"))), "state=rejected(a:b 'no')"),
        (p.Disposition(state=p.Modified(message_annotations={"a": SECRET})), "first=0 state=modified"),
        (p.Detach(2, closed=True, error=p.AmqpError("a:b", "no\nway", {"a": SECRET})), r"error=a:b 'no\nway'"),
        (p.Close(), "close"),
        (p.SaslMechanisms([Symbol("PLAIN"), Symbol("ANONYMOUS")]), "sasl_server_mechanisms=PLAIN,ANONYMOUS"),
        (p.SaslInit("PLAIN", SECRET.encode(), "host"), "saslinit mechanism='PLAIN' hostname='host'"),
        (p.SaslChallenge(SECRET.encode()), "saslchallenge"),
        (p.SaslResponse(SECRET.encode()), "saslresponse"),
        (p.SaslOutcome(0, SECRET.encode()), "sasloutcome code=0"),
    ],
)
def test_describe(performative: p.Composite, text: str) -> None:
    """Every performative is one line, and its fields that can hold a credential or a user's data are not in it."""
    said = describe(performative)
    assert text in said
    assert SECRET not in said
    assert "\n" not in said


def test_describe_an_attach() -> None:
    """An attach shows its addresses, the position of its filter, and of its properties the numbers only."""
    where = Described(Symbol("apache.org:selector-filter:string"), "amqp.annotation.x-opt-offset > '7'")
    source = p.Source(address="hub/Partitions/0", filter={"f": where})
    properties = {"epoch": UInt(3), "key": SECRET, 4: "x"}
    said = describe(p.Attach("name", 1, role=True, source=source, target=p.Target(b"x"), properties=properties))
    assert "attach name='name' handle=1 role=receiver" in said
    assert "source='hub/Partitions/0' where 'amqp.annotation.x-opt-offset > '7''" in said
    assert "target=bytes properties=epoch=3,key" in said
    assert SECRET not in said


_anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.binary() | st.builds(Described, st.just(1), st.text()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(_anything, st.dictionaries(st.text() | st.integers(), _anything, max_size=3), st.text())
def test_describe_never_raises(address: Any, given_map: dict[Any, Any], name: str) -> None:
    """Whatever a peer puts into an attach, its description is one line of bounded length."""
    source = p.Source(address=address, filter=given_map)
    said = describe(p.Attach(name * 1000, source=source, target=p.Target(address), properties=given_map))
    assert said.isprintable()
    assert len(said) < 3000
