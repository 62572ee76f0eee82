"""Opening, closing and deadlines of a connection, in both roles."""

from __future__ import annotations

import pytest

from eventpump.amqp.connection import (
    AMQP_HEADER,
    EMPTY_FRAME,
    FRAME_COST,
    SASL_HEADER,
    Closed,
    Connection,
    Messages,
    Opened,
    Role,
    SaslRequested,
    SessionBegun,
    SessionEnded,
)
from eventpump.amqp.performatives import (
    AmqpError,
    Begin,
    Close,
    Composite,
    Detach,
    End,
    Flow,
    Open,
    SaslChallenge,
    SaslInit,
    SaslMechanisms,
    SaslOutcome,
    SaslResponse,
    Transfer,
)
from eventpump.amqp.types import Symbol
from eventpump.errors import ClosedError
from tests.unit.amqp.pair import Pair, condition, config, frame, only, opened, payloads

MECHANISMS = [("ANONYMOUS", b""), ("PLAIN", b"\0name\0key"), ("MSSBCBS", b""), ("EXTERNAL", b"")]


@pytest.mark.parametrize(("mechanism", "response"), MECHANISMS)
def test_connection_opens_with_every_sasl_mechanism(mechanism: str, response: bytes) -> None:
    """Every SASL mechanism opens the connection, and the server sees what the client said."""
    pair = Pair(config(mechanism=mechanism, initial_response=response, container_id="me"), config(container_id="you"))
    pair.open()
    asked = only(pair.server_events, SaslRequested)
    assert (asked.mechanism, asked.response, asked.hostname) == (mechanism, response, "host")
    assert only(pair.server_events, Opened).open.container_id == "me"
    assert only(pair.client_events, Opened).open.container_id == "you"


def test_server_offers_its_mechanisms_in_order() -> None:
    """The server offers its mechanisms in order, as an array of symbols (protocol.md 2.2)."""
    pair = opened()
    offered = b"MSSBCBS", b"PLAIN", b"ANONYMOUS", b"EXTERNAL"
    places = [pair.to_client[0].index(name) for name in offered]
    assert places == sorted(places)
    assert pair.to_client[0].startswith(SASL_HEADER)


def test_connection_reports_a_refused_credential_at_both_ends() -> None:
    """A refused credential is an event at both ends, and nothing more is sent."""
    pair = Pair(is_welcome=False)
    pair.client.start()
    client, server = pair.run()
    assert condition(client) == condition(server) == "amqp:unauthorized-access"
    assert pair.client.is_closed
    assert pair.server.is_closed


@pytest.mark.parametrize(
    ("code", "expected"), [(1, "amqp:unauthorized-access"), (2, "amqp:internal-error"), (4, "amqp:internal-error")]
)
def test_sasl_outcome_code_1_alone_is_an_authentication_error(code: int, expected: str) -> None:
    """Only code 1 speaks of the credential (5.3.3.6)."""
    client = Connection(config(), Role.CLIENT)
    client.start()
    client.receive(SASL_HEADER + frame(0, SaslMechanisms([Symbol("ANONYMOUS")]), kind=1))
    assert condition(client.receive(frame(0, SaslOutcome(code), kind=1))) == expected


@pytest.mark.parametrize(
    ("role", "unexpected"), [(Role.CLIENT, SaslChallenge(b"?")), (Role.SERVER, SaslResponse(b"!"))]
)
def test_connection_ends_at_a_challenge_or_its_response(role: Role, unexpected: Composite) -> None:
    """No mechanism of ours has a challenge: one is an unexpected SASL frame, not one that cannot be decoded."""
    engine = Connection(config(), role)
    if role is Role.CLIENT:
        engine.start()
    assert condition(engine.receive(SASL_HEADER + frame(0, unexpected, kind=1))) == "amqp:illegal-state"


def test_connection_ends_when_the_mechanism_is_not_offered() -> None:
    """A client that cannot use what is offered gives up; a server refuses what it does not offer."""
    pair = Pair(config(mechanism="PLAIN"), config(mechanisms=("ANONYMOUS",)))
    pair.client.start()
    assert condition(pair.run()[0]) == "amqp:unauthorized-access"
    server = Connection(config(mechanisms=("ANONYMOUS",)), Role.SERVER)
    events = server.receive(SASL_HEADER + frame(0, SaslInit("PLAIN"), kind=1))
    assert condition(events) == "amqp:unauthorized-access"
    assert server.data_to_send().endswith(frame(0, SaslOutcome(1), kind=1))


def test_connection_holds_pipelined_bytes_until_the_sasl_outcome() -> None:
    """A client may send everything at once: what came after its SASL choice waits for the answer (2.4.1)."""
    server = Connection(config(), Role.SERVER)
    pipelined = (
        SASL_HEADER
        + frame(0, SaslInit("ANONYMOUS"), kind=1)
        + AMQP_HEADER
        + frame(0, Open("me"))
        + frame(0, Begin(None, 0, 10, 10))
        + frame(0, End())
        + frame(0, Close())
    )
    assert [type(event) for event in server.receive(pipelined)] == [SaslRequested]
    server.sasl_outcome(ok=True)
    assert [type(event) for event in server.receive(b"")] == [Opened, SessionBegun, SessionEnded, Closed]


@pytest.mark.parametrize("first", [1, 500, 65_536, 65_600, 100_000, 150_000])
def test_connection_takes_pipelined_frames_however_they_are_cut(first: int) -> None:
    """More than a frame's worth of valid frames behind the SASL choice is served, wherever the stream is cut.

    The engine says that it is behind until it may go on: then nothing more should be read.
    """
    server = Connection(config(max_frame_size=65_536), Role.SERVER)
    flows = frame(0, Flow(0, 10, 0, 10)) * 7000
    begin = frame(0, Begin(None, 0, 10, 10))
    pipelined = frame(0, SaslInit("ANONYMOUS"), kind=1) + AMQP_HEADER + frame(0, Open("me")) + begin + flows
    assert len(pipelined) > 160_000
    server.receive(SASL_HEADER)
    assert not server.is_behind
    events = []
    for data in (pipelined[:first], pipelined[first:] + frame(0, Close())):
        came = server.receive(data)
        if any(isinstance(event, SaslRequested) for event in came):
            assert server.is_behind is (len(data) > len(frame(0, SaslInit("ANONYMOUS"), kind=1)))
            server.sasl_outcome(ok=True)
            came += server.receive(b"")
        assert not server.is_behind
        events += came
    assert [type(event) for event in events] == [SaslRequested, Opened, SessionBegun, Closed]
    assert only(events, Closed) == Closed(None)


def test_receive_ends_its_turn_after_a_number_of_frames() -> None:
    """A turn ends after so many frames; what is left waits, and the engine says so until it is done."""
    pair = opened()
    data = b"".join(frame(channel, Begin(None, 0, 10, 10)) for channel in range(10))
    assert len(pair.server.receive(data, 3 * FRAME_COST)) == 3
    assert pair.server.is_behind
    assert len(pair.server.receive(b"", 4 * FRAME_COST)) == 4
    assert pair.server.is_behind
    assert len(pair.server.receive(frame(10, Begin(None, 0, 10, 10)), 100 * FRAME_COST)) == 4
    assert not pair.server.is_behind


def test_receive_counts_plain_transfers_as_frames_of_a_turn() -> None:
    """A plain transfer counts one, in runs and between other frames, and a run ends with its turn."""
    pair = opened()
    session, theirs = pair.session()
    sender, receiver = pair.link(session, is_receiver=False)
    receiver.set_credit(100)
    pair.run()
    sender.send_run([b"%d" % number for number in range(50)])
    data = pair.client.data_to_send()
    came = payloads(pair.server.receive(data, 8))  # the first is decoded in whole, to know the form
    assert came == [b"0"]
    for turn, total in ((10, 11), (1, 12), (30, 42)):
        came += payloads(pair.server.receive(b"", turn))
        assert pair.server.is_behind
        assert came == [b"%d" % number for number in range(total)]
        assert receiver.delivery_count == total
        assert theirs.next_incoming_id == total
    came += payloads(pair.server.receive(b"", 8))
    assert len(came) == 50
    assert not pair.server.receive(b"")
    assert not pair.server.is_behind


def test_receive_ends_its_turn_within_a_read_of_a_known_form() -> None:
    """A run at the beginning of a read counts, ends with the turn, and is reported with what follows it."""
    pair = opened()
    sender, receiver = pair.link(pair.session()[0], is_receiver=False)
    receiver.set_credit(100)
    pair.run()

    def send(*numbers: int) -> bytes:
        sender.send_run([b"%d" % number for number in numbers])
        return pair.client.data_to_send()

    assert payloads(pair.server.receive(send(0, 1))) == [b"0", b"1"]
    assert payloads(pair.server.receive(send(2, 3, 4, 5), 3)) == [b"2", b"3", b"4"]
    assert pair.server.is_behind
    assert payloads(pair.server.receive(b"")) == [b"5"]
    sender.send_run([b"6", b"7", b"8"])
    for number in (b"9", b"10"):
        sender.send(number, settled=True, tag=number)  # in a form of its own
    found = only(pair.server.receive(pair.client.data_to_send(), 3 + FRAME_COST), Messages)
    assert found.payloads == [b"6", b"7", b"8", b"9"]
    assert pair.server.is_behind
    assert payloads(pair.server.receive(b"", 1)) == [b"10"]


@pytest.mark.parametrize("is_settled", [False, True])
def test_receive_counts_a_message_for_what_it_weighs(*, is_settled: bool) -> None:
    """A message ends the turn that it exceeds, whole, settled or not; those after it wait for the next turns."""
    pair = opened(server=config(weigh=int))
    session, _ = pair.session()
    sender, receiver = pair.link(session, is_receiver=False)
    receiver.set_credit(100)
    pair.run()
    weights = [100, 3, 900, 5000, 1, 1, 998, 1000]
    for weight in weights:
        sender.send(b"%d" % weight, settled=is_settled)
    came = [payloads(pair.server.receive(pair.client.data_to_send(), 1000))]
    while pair.server.is_behind:
        came.append(payloads(pair.server.receive(b"", 1000)))
    assert [[int(each) for each in turn] for turn in came] == [[100, 3, 900], [5000], [1, 1, 998], [1000]]


def test_receive_bounds_what_waits_for_the_sasl_outcome() -> None:
    """A caller that reads on, though the engine is behind, is stopped: what waits for the SASL outcome is bounded."""
    server = Connection(config(max_frame_size=1000), Role.SERVER)
    server.receive(SASL_HEADER + frame(0, SaslInit("ANONYMOUS"), kind=1) + b"x" * 900)
    assert condition(server.receive(b"x" * 101)) == "amqp:connection:framing-error"


@pytest.mark.parametrize("header", [AMQP_HEADER, b"AMQP\x00\x00\x09\x01", b"GET / HTTP/1.1\r\n", b"\x16\x03\x01", b"B"])
def test_server_answers_another_protocol_header_with_its_own(header: bytes) -> None:
    """A client that begins in another way gets the header of what is spoken here (2.2)."""
    server = Connection(config(), Role.SERVER)
    assert condition(server.receive(header)) == "amqp:connection:framing-error"
    assert server.data_to_send() == SASL_HEADER


@pytest.mark.parametrize("header", [AMQP_HEADER, b"AMQP\x00\x00\x09\x01", b"HTTP/1.1", b"x"])
def test_client_raises_on_a_server_of_another_protocol(header: bytes) -> None:
    """A server of another protocol is an error that says so."""
    client = Connection(config(), Role.CLIENT)
    client.start()
    assert condition(client.receive(header)) == "amqp:connection:framing-error"


@pytest.mark.parametrize("closer", ["client", "server"])
@pytest.mark.parametrize("error", [None, AmqpError("amqp:connection:forced", "bye", {Symbol("why"): 1})])
def test_close_is_reported_once_at_both_ends(closer: str, error: AmqpError | None) -> None:
    """Either end closes, with or without an error, and both are notified once."""
    pair = opened()
    getattr(pair, closer).close(error)
    getattr(pair, closer).close(error)
    client, server = pair.run()
    events, answered = (server, client) if closer == "client" else (client, server)
    assert only(events, Closed) == Closed(error)
    assert only(answered, Closed) == Closed(None)
    assert pair.client.receive_eof() == pair.server.receive_eof() == []


def test_close_that_crosses_the_peers_needs_no_answer() -> None:
    """Closes that cross need no answer."""
    pair = opened()
    pair.client.close()
    pair.server.close()
    client, server = pair.run()
    assert only(client, Closed) == only(server, Closed) == Closed(None)


def test_close_in_the_middle_of_a_frame_keeps_the_place_in_the_stream() -> None:
    """A close while half a frame has arrived loses no place in the stream."""
    pair = opened()
    half = frame(0, Begin(None, 0, 10, 10))
    assert pair.client.receive(half[:20]) == []
    pair.client.close()
    assert pair.client.receive(half[20:] + frame(0, Close())) == [Closed(None)]


def test_close_before_open_ends_the_connection() -> None:
    """A connection that never opened is simply over."""
    client = Connection(config(), Role.CLIENT)
    client.start()
    client.close()
    assert client.is_closed
    assert client.receive(SASL_HEADER) == []


@pytest.mark.parametrize("closing", [False, True])
def test_eof_is_an_error_unless_the_connection_was_closing(closing: bool) -> None:
    """The end of the stream is an error, unless the connection was closing."""
    pair = opened()
    if closing:
        pair.client.close()
    (event,) = pair.client.receive_eof()
    assert isinstance(event, Closed)
    assert event.is_local
    assert (event.error is None) is closing
    assert pair.client.receive_eof() == []


def test_deadlines_are_half_of_each_idle_time_out() -> None:
    """Half of the own idle time-out is advertised, and heartbeats come at half of the peer's (2.4.5)."""
    pair = opened(config(idle_timeout=60.0), config(idle_timeout=480.0))
    assert only(pair.server_events, Opened).open.idle_time_out == 30_000
    assert pair.client.idle_timeout == 60.0
    assert pair.client.heartbeat_interval == 120.0
    assert pair.server.heartbeat_interval == 15.0
    silent = opened(server=config(idle_timeout=None))
    assert silent.server.idle_timeout is None
    assert silent.client.heartbeat_interval is None


def test_heartbeat_is_an_empty_frame_without_an_event() -> None:
    """A heartbeat is an empty frame, and says nothing to who gets it."""
    pair = opened()
    pair.client.heartbeat()
    assert pair.client.data_to_send() == EMPTY_FRAME
    assert pair.server.receive(EMPTY_FRAME * 3) == []
    pair.client.close()
    pair.client.data_to_send()
    pair.client.heartbeat()
    assert pair.client.data_to_send() == b""


def test_silent_peer_is_closed_once_at_the_idle_time_out() -> None:
    """A peer silent for too long is closed, once."""
    pair = opened()
    assert condition(pair.client.time_out()) == "amqp:resource-limit-exceeded"
    assert pair.client.time_out() == []
    assert condition(pair.run()[1]) == "amqp:resource-limit-exceeded"


@pytest.mark.parametrize("idle", [1, 999, 1000, 0, None])
def test_open_with_too_short_an_idle_time_out_is_refused(idle: int | None) -> None:
    """An idle time-out below the least that is supported is refused at the open, in words that state both."""
    server = Connection(config(min_idle_time_out=1000), Role.SERVER)
    server.receive(SASL_HEADER + frame(0, SaslInit("ANONYMOUS"), kind=1))
    server.sasl_outcome(ok=True)
    events = server.receive(AMQP_HEADER + frame(0, Open("x", idle_time_out=idle)))
    if idle not in (1, 999):
        only(events, Opened)
        return
    error = only(events, Closed).error
    assert error == AmqpError("amqp:not-allowed", f"an idle-time-out of {idle} ms, below 1000")


@pytest.mark.parametrize(("own", "advertised"), [(60.0, 30_000), (2.0, 1000), (1.5, 1000), (1.0, 1000), (0.5, 500)])
def test_open_advertises_half_of_the_idle_time_out(own: float, advertised: int) -> None:
    """Half of the own one is advertised (2.4.5), but not less than a second of what there is: peers refuse less."""
    pair = opened(config(idle_timeout=own))
    assert only(pair.server_events, Opened).open.idle_time_out == advertised


def test_heartbeats_are_bounded_whatever_the_peer_asks_for() -> None:
    """Whatever a service asks for, a client sends a hundred heartbeats a second at most, or closes the connection."""
    pair = opened(server=config(idle_timeout=0.02))
    assert pair.client.heartbeat_interval == 0.01
    pair = Pair(server=config(idle_timeout=0.019))
    pair.client.start()
    assert condition(pair.run()[0]) == "amqp:not-allowed"


@pytest.mark.parametrize("bad", [Open("x", max_frame_size=511), Open("x", idle_time_out=1)])
@pytest.mark.parametrize("role", list(Role))
def test_invalid_open_closes_the_connection_with_an_open_of_its_own(bad: Open, role: Role) -> None:
    """An open that cannot be kept to closes the connection with an open of its own."""
    engine = Connection(config(), role)
    if role is Role.CLIENT:
        engine.start()
        engine.receive(SASL_HEADER + frame(0, SaslMechanisms([Symbol("ANONYMOUS")]), kind=1))
        engine.receive(frame(0, SaslOutcome(0), kind=1))
    else:
        engine.receive(SASL_HEADER + frame(0, SaslInit("ANONYMOUS"), kind=1))
        engine.sasl_outcome(ok=True)
    events = engine.receive(AMQP_HEADER + frame(0, bad))
    assert condition(events) in ("amqp:invalid-field", "amqp:not-allowed")
    sent = engine.data_to_send()
    assert sent.index(b"\x00\x53\x10") < sent.index(b"\x00\x53\x18")


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"\x00\x00\x00\x07\x02\x00\x00\x00", "amqp:connection:framing-error"),
        (b"\xff\xff\xff\xff\x02\x00\x00\x00", "amqp:connection:framing-error"),
        (b"\x00\x00\x00\x08\x01\x00\x00\x00", "amqp:connection:framing-error"),
        (b"\x00\x00\x00\x08\x03\x00\x00\x00", "amqp:connection:framing-error"),
        (b"\x00\x00\x00\x08\x02\x01\x00\x00", "amqp:connection:framing-error"),
        (b"\x00\x00\x00\x08\x02\x02\x00\x00", "amqp:connection:framing-error"),
        (b"\x00\x00\x00\x09\x02\x00\x00\x00\x40", "amqp:decode-error"),
        (frame(0, Begin(None, 0, 1, 1), b"x"), "amqp:connection:framing-error"),
        (frame(0, Open("again")), "amqp:not-found"),
        (frame(7, Flow(None, 1, 1, 1)), "amqp:not-found"),
        (frame(7, Transfer(0)), "amqp:not-found"),
        (frame(256, Begin(None, 0, 1, 1)), "amqp:not-allowed"),
        (frame(0, Begin(3, 0, 1, 1)), "amqp:not-allowed"),
        (frame(0, Begin(None, 0, 1, 1)) * 2, "amqp:not-allowed"),
        (frame(0, Begin(None, 0, 1, 1)) + frame(0, Detach(0)), "amqp:session:unattached-handle"),
        (frame(0, Begin(None, 0, 1, 1)) + frame(0, Transfer(0)), "amqp:session:unattached-handle"),
        (frame(0, Begin(None, 0, 1, 1)) + frame(0, Flow(None, 1, 1, 1, 9)), "amqp:session:unattached-handle"),
        (frame(0, Begin(None, 0, 1, 1)) + frame(0, Open("again")), "amqp:illegal-state"),
    ],
)
def test_broken_rule_closes_the_connection_with_its_condition(data: bytes, expected: str) -> None:
    """A broken rule closes the connection with its condition, which the peer gets; the rest is not read."""
    pair = opened()
    assert condition(pair.server.receive(data + data)) == expected
    assert pair.server.receive(data) == []
    assert expected.encode() in pair.server.data_to_send()


@pytest.mark.parametrize("late", [End(), Detach(0, closed=True)])
def test_end_or_detach_of_an_ended_session_is_ignored(late: End | Detach) -> None:
    """Both ends have ended the session: a late end or detach of it is ignored, and its channel begins a new one."""
    pair = opened()
    session, _ = pair.session()
    session.end()
    pair.run()
    assert pair.server.receive(frame(0, late)) == []
    assert pair.server.data_to_send() == b""
    pair.session()


def test_begin_uses_channels_up_to_the_lower_channel_max() -> None:
    """Channels are used up to the lower channel-max of the two, and again when a session has ended."""
    pair = opened(config(channel_max=9), config(channel_max=1))
    first, _ = pair.session()
    second, _ = pair.session()
    assert (first.channel, second.channel) == (0, 1)
    first.end()
    pair.run()
    third, _ = pair.session()
    assert third.channel == 0


@pytest.mark.parametrize("ender", [0, 1])
@pytest.mark.parametrize("error", [None, AmqpError("amqp:session:window-violation", "too much")])
def test_session_end_is_reported_once_at_both_ends(ender: int, error: AmqpError | None) -> None:
    """Either end ends a session, with or without an error, and both are notified once, with the links."""
    pair = opened()
    sessions = pair.session()
    link, _ = pair.link(sessions[0], is_receiver=True)
    sessions[ender].end(error)
    sessions[ender].end(error)
    events = pair.run()
    ended = only(events[1 - ender], SessionEnded)
    assert ended.error == error
    assert [each.name for each in ended.links] == ["link"]
    assert only(events[ender], SessionEnded).error is None
    assert not link.is_attached
    assert pair.client.sessions == pair.server.sessions == {}
    with pytest.raises(ClosedError):
        sessions[0].attach("late", is_receiver=True, source=None, target=None)  # type: ignore[arg-type]  # not read


def test_begin_on_a_connection_that_is_not_open_is_refused() -> None:
    """A session on a connection that is not open is refused."""
    with pytest.raises(ClosedError):
        Connection(config(), Role.CLIENT).begin()


def test_repr_of_config_and_events_shows_no_credential() -> None:
    """Neither the config nor the events show a credential: a message may be a request with a token."""
    assert "key" not in repr(config(initial_response=b"\0name\0key")) + repr(SaslRequested("PLAIN", b"key", None))
    pair = opened()
    mine, theirs = pair.link(pair.session()[0], is_receiver=False)
    theirs.set_credit(1)
    pair.run()
    mine.send(b"a token")
    _, events = pair.run()
    assert "token" not in repr(events)


def test_receive_of_a_large_frame_in_pieces_copies_little() -> None:
    """A frame of the largest size comes whole from any number of pieces, without each copying all before it."""
    pair = opened(server=config(max_frame_size=1 << 20))
    mine, _ = pair.session()
    sender, receiver = pair.link(mine, is_receiver=False)
    receiver.set_credit(1)
    pair.run()
    payload = bytes(range(256)) * 4000
    sender.send(payload, settled=True)
    data = pair.client.data_to_send()
    events = []
    for start in range(0, len(data), 7):
        events += pair.server.receive(data[start : start + 7])
    assert payloads(events) == [payload]
