"""The debug log of frames: its lines, their fields, and nothing at all while it is off."""

from __future__ import annotations

import asyncio
import logging

import pytest

from eventpump.amqp import performatives as p
from eventpump.amqp.connection import Connection, Role
from eventpump.net import trace
from eventpump.net.stream import ConnectionProtocol
from eventpump.net.trace import FrameLog
from tests.unit.amqp.pair import Pair, config
from tests.unit.net.ends import Recorder


@pytest.fixture
def pair() -> Pair:
    """A pair whose client is logged."""
    pair = Pair()
    pair.client.trace = FrameLog(Role.CLIENT)
    return pair


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the messages after the connection's number."""
    return [record.getMessage().split(maxsplit=3)[3] for record in caplog.records]


def test_frames_of_a_link(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    """Frames about a link carry its name, whichever end numbered the handle, until it is detached."""
    pair.open()
    session, _ = pair.session()
    pair.link(session, is_receiver=True, name="other")
    caplog.set_level(logging.DEBUG, "eventpump.amqp")
    mine, theirs = pair.link(session, is_receiver=False)
    theirs.set_credit(10)
    pair.run()
    mine.send_run([b"12345"] * 2)
    mine.detach()
    pair.run()
    assert [line for line in lines(caplog) if "link" in line] == [
        (
            "> channel=0 attach name='link' handle=1 role=sender snd_settle_mode=2 rcv_settle_mode=0"
            " source='here' target='there' initial_delivery_count=0"
        ),
        (
            "< channel=0 attach name='link' handle=1 role=receiver snd_settle_mode=2 rcv_settle_mode=0"
            " source='here' target='there'"
        ),
        (
            "< channel=0 flow next_incoming_id=0 incoming_window=65535 next_outgoing_id=0 outgoing_window=65535"
            " handle=1 delivery_count=0 link_credit=10 link='link'"
        ),
        "> channel=0 transfer handle=1 count=2 payload=10 link='link'",
        "> channel=0 detach handle=1 closed=True link='link'",
        "< channel=0 detach handle=1 closed=True link='link'",
    ]
    assert {record.__dict__.get("link") for record in caplog.records} == {"link"}
    assert {record.name for record in caplog.records} == {"eventpump.amqp"}
    assert {record.levelno for record in caplog.records} == {logging.DEBUG}
    assert len({record.__dict__["connection"] for record in caplog.records}) == 1


def test_names_end_with_their_session(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    """After the end of a session, the handles of its links mean nothing any more."""
    pair.open()
    session, _ = pair.session()
    pair.link(session, is_receiver=True)
    session.end()
    pair.run()
    frames = pair.client.trace
    assert frames is not None
    caplog.set_level(logging.DEBUG, "eventpump.amqp")
    frames.frame(0, p.Flow(handle=0), is_sent=True)
    frames.frame(0, p.Flow(handle=0), is_sent=False)
    frames.frame(0, None, is_sent=True)
    assert all("link=" not in line for line in lines(caplog))
    assert lines(caplog)[-1] == "> channel=0 heartbeat"


async def test_log_is_off(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Where the log of frames is off when a connection begins, no trace is set and nothing is formatted."""
    asked: list[int] = []

    def is_enabled(level: int) -> bool:
        asked.append(level)
        return False

    def formats(performative: object) -> str:
        raise AssertionError("formatted")

    monkeypatch.setattr(trace._log, "isEnabledFor", is_enabled)
    monkeypatch.setattr(trace, "describe", formats)
    monkeypatch.setattr(FrameLog, "transfers", formats)
    pair = Pair()
    for engine in (pair.client, pair.server):
        ConnectionProtocol(engine, Recorder(engine))
        assert engine.trace is None
    pair.open()
    session, _ = pair.session()
    mine, theirs = pair.link(session, is_receiver=True)
    mine.set_credit(10)
    pair.run()
    theirs.send_run([b"x"] * 5)
    pair.run()
    assert asked == [logging.DEBUG] * 2
    assert caplog.records == []


async def test_log_is_on(caplog: pytest.LogCaptureFixture) -> None:
    """Where it is on, the shell sets a trace of the connection's role."""
    caplog.set_level(logging.DEBUG, "eventpump.amqp")
    engine = Connection(config(), Role.SERVER)
    ConnectionProtocol(engine, Recorder(engine))
    assert engine.trace is not None
    engine.trace.frame(0, p.Close(), is_sent=False)
    assert caplog.messages[0].startswith("server connection ")
    assert caplog.messages[0].endswith(" < channel=0 close")
    await asyncio.sleep(0)
