"""Sessions and links between two engines: transfers, windows, credit, outcomes, and every end."""

from __future__ import annotations

from typing import Any

import pytest

from eventpump.amqp.connection import (
    CreditChanged,
    FlowAnswered,
    LinkAttached,
    LinkDetached,
    Messages,
    Outcomes,
    SessionEnded,
)
from eventpump.amqp.link import AttachState, Link
from eventpump.amqp.performatives import (
    Accepted,
    AmqpError,
    Attach,
    Begin,
    Detach,
    Disposition,
    Flow,
    Modified,
    Received,
    Rejected,
    Released,
    Source,
    Target,
    Transfer,
)
from eventpump.amqp.types import Symbol
from eventpump.errors import ClosedError, EventTooLargeError
from tests.unit.amqp.pair import Pair, condition, config, frame, only, opened, payloads

MAX = 0xFFFF_FFFF


def linked(
    *, client_sends: bool, client: Any = None, server: Any = None, limit: int | None = None
) -> tuple[Pair, Link, Link]:
    """Return an open pair with a link in one direction.

    Returns:
        The pair, the sender's end and the receiver's.
    """
    pair = opened(client, server)
    mine, _ = pair.session()
    mine_end, theirs = pair.link(
        mine,
        is_receiver=not client_sends,
        max_message_size=None if client_sends else limit,
        server_max_message_size=limit if client_sends else None,
    )
    return (pair, mine_end, theirs) if client_sends else (pair, theirs, mine_end)


def events_at(pair: Pair, link: Link) -> list[Any]:
    """Run, and return the events of the end of a link."""
    client, server = pair.run()
    return client if pair.engine_of(link) is pair.client else server


BOTH_WAYS = pytest.mark.parametrize("client_sends", [True, False])


@BOTH_WAYS
@pytest.mark.parametrize("size", [0, 1, 447, 448, 449, 5000])
@pytest.mark.parametrize("settled", [True, False])
def test_transfer_of_any_size_arrives_whole(client_sends: bool, size: int, settled: bool) -> None:
    """A message arrives whole, whatever its size beside the smallest frame, with its format and id."""
    pair, sender, receiver = linked(
        client_sends=client_sends, client=config(max_frame_size=512), server=config(max_frame_size=512)
    )
    receiver.set_credit(2)
    assert only(events_at(pair, sender), CreditChanged).link is sender
    first = sender.send(b"a" * size, message_format=0x80013700, settled=settled)
    second = sender.send(b"b" * size, settled=settled)
    event = only(events_at(pair, receiver), Messages)
    assert event.payloads == [b"a" * size, b"b" * size]
    assert event.formats == [0x80013700, 0]
    assert event.delivery_ids == ([] if settled else [first, second])
    assert (sender.credit, receiver.credit) == (0, 0)
    for flight in pair.to_server + pair.to_client:
        assert all(len(each) <= 512 for each in frames(flight))


def frames(flight: bytes) -> list[bytes]:
    """Take a flight of frames apart; protocol headers count as frames."""
    found = []
    while flight:
        size = 8 if flight[:4] == b"AMQP" else int.from_bytes(flight[:4], "big")
        found.append(flight[:size])
        flight = flight[size:]
    return found


@BOTH_WAYS
def test_send_run_sends_what_credit_allows_as_one_event(client_sends: bool) -> None:
    """A run sends what credit allows, arrives as one event, and counts as single messages do."""
    pair, sender, receiver = linked(client_sends=client_sends)
    receiver.set_credit(10)
    pair.run()
    messages = [bytes([number]) * number for number in range(20)]
    assert sender.send_run(messages, 5, 1 << 20) == 10
    assert sender.send_run(messages, 15, 1 << 20) == 0
    assert only(events_at(pair, receiver), Messages).payloads == messages[5:15]
    assert (receiver.credit, sender.credit) == (0, 0)
    assert receiver.delivery_count == sender.delivery_count == 10


def test_send_run_stops_at_its_bytes_and_frames() -> None:
    """A run ends with the message that reaches the bytes; one too large for a frame goes in several."""
    pair, sender, receiver = linked(client_sends=True, server=config(max_frame_size=600))
    receiver.set_credit(100)
    pair.run()
    messages = [b"a" * 100, b"b" * 100, b"c" * 5000, b"d" * 100]
    assert sender.send_run(messages, 0, 150) == 2
    assert sender.send_run(messages, 2, 150) == 1
    assert sender.send_run(messages, 3, 150) == 1
    assert sender.send_run(messages, 4, 150) == 0
    assert payloads(events_at(pair, receiver)) == messages


@pytest.mark.parametrize("call", ["send", "run"])
def test_send_of_a_message_above_the_peers_max_size_is_refused(call: str) -> None:
    """A message larger than the peer takes is refused before it is sent."""
    pair, sender, receiver = linked(client_sends=True, limit=1000)
    receiver.set_credit(10)
    pair.run()
    assert sender.remote_max_message_size == 1000
    sender.send(b"x" * 1000)
    assert sender.send_run([b"x" * 1000, b"x" * 1001]) == 1
    with pytest.raises(EventTooLargeError, match="1001"):
        sender.send(b"x" * 1001) if call == "send" else sender.send_run([b"x" * 1001])
    assert [len(payload) for payload in payloads(events_at(pair, receiver))] == [1000, 1000]


@pytest.mark.parametrize("size", [1000, 100_000])
def test_receive_of_a_message_above_the_max_size_detaches_the_link(size: int) -> None:
    """A peer that sends more than was advertised is detached, before the whole of it is held."""
    pair, sender, receiver = linked(client_sends=True, limit=999, server=config(max_frame_size=2000))
    receiver.set_credit(10)
    pair.run()
    assert sender.remote is not None
    sender.remote.max_message_size = None
    sender.send(b"x" * 10)
    sender.send(b"x" * size)
    client, server = pair.run()
    assert payloads(server) == [b"x" * 10]
    for event in only(client, LinkDetached), only(server, LinkDetached):
        assert event.error is not None
        assert event.error.condition == "amqp:link:message-size-exceeded"
    assert receiver.incoming.buffer is None


def test_send_beyond_the_session_window_waits_in_order() -> None:
    """What the session window holds back goes out when it opens, in order; runs stop at it and are reported."""
    pair, sender, receiver = linked(client_sends=True, server=config(incoming_window=10))
    receiver.set_credit(1000)
    pair.run()
    assert sender.session.remote_incoming_window == 10
    assert sender.send_run([b"r"] * 100) == 10
    assert sender.send_run([b"r"] * 100) == 0
    for number in range(30):
        sender.send(b"%d" % number)
    blocked = sender.session.is_blocked
    client, server = pair.run()
    assert payloads(server) == [b"r"] * 10 + [b"%d" % number for number in range(30)]
    assert (blocked, sender.session.is_blocked) == (True, False)
    assert any(isinstance(event, CreditChanged) for event in client)


def test_large_messages_pass_a_small_window_both_ways() -> None:
    """Messages of more frames than the window go through, both ways at once."""
    small = config(incoming_window=3, max_frame_size=512)
    pair = opened(small, small)
    mine, _ = pair.session()
    out, there = pair.link(mine, is_receiver=False, name="out")
    back, here = pair.link(mine, is_receiver=True, name="back")
    there.set_credit(5)
    back.set_credit(5)
    pair.run()
    for number in range(5):
        out.send(bytes([number]) * 10_000)
        here.send(bytes([number + 10]) * 10_000, settled=True)
    client, server = pair.run()
    assert payloads(server) == [bytes([number]) * 10_000 for number in range(5)]
    assert payloads(client) == [bytes([number + 10]) * 10_000 for number in range(5)]


def test_transfers_beyond_credit_detach_the_sender() -> None:
    """A sender that exceeds its credit is detached; what it had credit for arrives."""
    pair, sender, receiver = linked(client_sends=True)
    receiver.set_credit(2)
    pair.run()
    for number in range(4):
        sender.send(bytes([number]), settled=True)
    client, server = pair.run()
    assert payloads(server) == [b"\0", b"\1"]
    for event in only(client, LinkDetached), only(server, LinkDetached):
        assert event.error is not None
        assert event.error.condition == "amqp:link:transfer-limit-exceeded"


def test_transfers_beyond_credit_are_taken_with_leniency() -> None:
    """With leniency, transfers without credit are taken (protocol.md 7.5)."""
    pair, sender, receiver = linked(client_sends=True, server=config(enforce_credit=False))
    sender.send(b"a", settled=True)
    sender.send(b"b", settled=True)
    assert payloads(events_at(pair, receiver)) == [b"a", b"b"]
    assert receiver.delivery_count == 2


def test_transfers_on_their_way_when_credit_is_lowered_are_taken() -> None:
    """Messages that were on their way when credit was lowered are taken; no more than was ever allowed are."""
    pair, sender, receiver = linked(client_sends=True)
    receiver.set_credit(3)
    pair.run()
    receiver.set_credit(0)
    for _ in range(3):
        sender.send(b"x", settled=True)
    assert len(payloads(events_at(pair, receiver))) == 3
    assert receiver.credit == 0
    assert sender.credit <= 0
    sender.send(b"x", settled=True)
    assert only(events_at(pair, receiver), LinkDetached).error is not None


@pytest.mark.parametrize("start", [MAX - 3, MAX, 0x7FFF_FFFF])
def test_counts_and_ids_wrap_around_at_2_32(start: int) -> None:
    """Delivery counts, delivery ids and transfer ids wrap around at 2^32 (RFC 1982)."""
    pair, sender, receiver = linked(client_sends=True, server=config(incoming_window=4))
    sender.delivery_count = receiver.delivery_count = start
    mine, theirs = sender.session, receiver.session
    mine.outgoing_delivery_id = mine.next_outgoing_id = theirs.next_incoming_id = start
    receiver.set_credit(8)
    pair.run()
    assert sender.credit == 8
    ids = [sender.send(bytes([number])) for number in range(8)]
    event_ids = [
        each for event in events_at(pair, receiver) if isinstance(event, Messages) for each in event.delivery_ids
    ]
    assert event_ids == ids == [(start + step) & MAX for step in range(8)]
    assert sender.delivery_count == receiver.delivery_count == (start + 8) & MAX
    receiver.settle(ids[0], ids[-1], Accepted())
    assert only(events_at(pair, sender), Outcomes).outcomes == [(each, Accepted()) for each in ids]
    receiver.set_credit(2)
    pair.run()
    assert sender.credit == 2


@pytest.mark.parametrize("start", [MAX - 3, 0x7FFF_FFFF, 5])
def test_flow_that_crosses_messages_counts_from_its_senders_state(start: int) -> None:
    """Credit counts from what its giver had received; a drain from what was sent; around 2^32 too (2.6.7)."""
    pair, sender, receiver = linked(client_sends=True)
    sender.delivery_count = receiver.delivery_count = start
    receiver.set_credit(8)
    pair.run()
    for _ in range(8):
        sender.send(b"x", settled=True)
    receiver.set_credit(20)
    assert len(payloads(events_at(pair, receiver))) == 8
    assert (sender.credit, receiver.credit) == (12, 12)
    sender.drained()
    pair.run()
    assert (sender.credit, receiver.credit) == (0, 0)
    assert sender.delivery_count == receiver.delivery_count == (start + 20) & MAX


@BOTH_WAYS
def test_drain_uses_up_the_credit(client_sends: bool) -> None:
    """A drain uses up the credit: messages if there are any, the rest without (2.6.7)."""
    pair, sender, receiver = linked(client_sends=client_sends)
    receiver.set_credit(10, drain=True)
    assert only(events_at(pair, sender), CreditChanged).link is sender
    assert sender.drain
    sender.send(b"x", settled=True)
    sender.drained()
    events = events_at(pair, receiver)
    assert payloads(events) == [b"x"]
    assert only(events, CreditChanged).link is receiver
    assert receiver.credit == sender.credit == 0
    assert receiver.delivery_count == sender.delivery_count == 10
    assert not receiver.drain
    receiver.set_credit(1)
    pair.run()
    assert sender.credit == 1


def test_drain_is_answered_after_what_the_window_held_back() -> None:
    """A drain is answered when what the window holds back is out, not before."""
    pair, sender, receiver = linked(client_sends=True, server=config(incoming_window=2))
    receiver.set_credit(10)
    pair.run()
    for _ in range(6):
        sender.send(b"x", settled=True)
    sender.drain = True
    sender.drained()
    assert sender.drain
    client, server = pair.run()
    assert len(payloads(server)) == 6
    assert only([event for event in client if isinstance(event, CreditChanged)][-1:], CreditChanged).link is sender
    sender.drained()
    pair.run()
    assert receiver.credit == 0


def test_probe_is_answered_once_behind_what_was_sent() -> None:
    """A receiver gets the flow it asked for, once per probe, behind what was sent before; credit stays."""
    pair = opened()
    receiver, sender = pair.link(pair.session()[0], is_receiver=True)
    receiver.set_credit(7)
    pair.run()
    assert receiver.probe()
    sender.send(b"before", settled=True)
    events, _ = pair.run()
    assert [type(event) for event in events] == [Messages, FlowAnswered]
    assert (receiver.credit, receiver.allowance, sender.credit) == (6, 6, 6)
    sender.session.send_flow(sender.handle, delivery_count=sender.delivery_count, credit=sender.credit)
    assert pair.run() == ([], [])
    sender.answers_echo = False
    assert receiver.probe()
    events, _ = pair.run()
    assert events == []
    sender.session.send_flow(sender.handle, delivery_count=sender.delivery_count, credit=sender.credit)
    events, _ = pair.run()
    assert [type(event) for event in events] == [FlowAnswered]
    receiver.detach()
    assert not receiver.probe()


def test_echo_is_answered_with_the_state_of_link_or_session() -> None:
    """A flow that asks for an echo gets the state of the link, or of the session."""
    pair, sender, receiver = linked(client_sends=True)
    receiver.set_credit(7)
    pair.run()
    receiver.session.send_flow(receiver.handle, delivery_count=0, credit=7, echo=True)
    pair.run()
    (answer,) = frames(pair.to_server[-1])
    assert answer == frame(0, Flow(0, 65_535, 0, 65_535, 0, 0, 7, 0))
    receiver.session.send_flow(echo=True)
    pair.run()
    (answer,) = frames(pair.to_server[-1])
    assert answer == frame(0, Flow(0, 65_535, 0, 65_535))
    assert sender.credit == 7


def test_flow_of_a_sender_advances_the_delivery_count_only() -> None:
    """A receiver ignores the credit a sender claims, and follows a delivery count that it advances."""
    pair, sender, receiver = linked(client_sends=True)
    receiver.set_credit(5)
    pair.run()
    sender.session.send_flow(sender.handle, delivery_count=0, credit=10_000)
    pair.run()
    assert receiver.credit == 5
    sender.session.send_flow(sender.handle, delivery_count=3, credit=2)
    pair.run()
    assert (receiver.credit, receiver.delivery_count) == (2, 3)


OUTCOMES: list[Any] = [
    Accepted(),
    Released(),
    Rejected(),
    Rejected(AmqpError("amqp:link:message-size-exceeded", "too large", {Symbol("n"): 1})),
    Modified(True, True, {Symbol("k"): "v"}),
]


@BOTH_WAYS
@pytest.mark.parametrize("outcome", OUTCOMES)
def test_settle_reports_every_outcome_once_for_its_delivery(client_sends: bool, outcome: Any) -> None:
    """Every outcome arrives as it was given, once, for its own delivery."""
    pair, sender, receiver = linked(client_sends=client_sends)
    receiver.set_credit(3)
    pair.run()
    ids = [sender.send(b"x") for _ in range(3)]
    pair.run()
    receiver.settle(ids[1], ids[1], outcome)
    assert only(events_at(pair, sender), Outcomes).outcomes == [(ids[1], outcome)]
    receiver.settle(ids[0], ids[2], Accepted())
    assert only(events_at(pair, sender), Outcomes).outcomes == [(ids[0], Accepted()), (ids[2], Accepted())]
    assert sender.session.unsettled == {}


def test_disposition_settles_deliveries_of_several_links() -> None:
    """One disposition may apply to several links of a session."""
    pair = opened()
    mine, _ = pair.session()
    ends = [pair.link(mine, is_receiver=False, name=f"link-{number}") for number in range(2)]
    for _, receiver in ends:
        receiver.set_credit(2)
    pair.run()
    ids = [ends[number % 2][0].send(b"x") for number in range(4)]
    pair.run()
    ends[0][1].settle(ids[0], ids[3], Accepted())
    found = {event.link.name: event.outcomes for event in pair.run()[0] if isinstance(event, Outcomes)}
    assert found == {
        "link-0": [(ids[0], Accepted()), (ids[2], Accepted())],
        "link-1": [(ids[1], Accepted()), (ids[3], Accepted())],
    }


@pytest.mark.parametrize(("first", "last"), [(0, 0x7FFF_FFFF), (0xC000_0000, 0x3FFF_FFFF), (0, None), (5, 9)])
def test_disposition_over_a_huge_range_costs_what_is_unsettled(first: int, last: int | None) -> None:
    """A disposition over 2^31 deliveries costs what is unsettled, not its range."""
    pair, sender, receiver = linked(client_sends=True)
    receiver.set_credit(3)
    pair.run()
    ids = [sender.send(b"x") for _ in range(3)]
    pair.run()
    receiver.session.send(Disposition(True, first, last, True, Accepted()))
    covered = [each for each in ids if (each - first) & MAX <= ((last or first) - first) & MAX]
    found = [event.outcomes for event in pair.run()[0] if isinstance(event, Outcomes)]
    assert found == ([[(each, Accepted()) for each in covered]] if covered else [])


def test_disposition_whose_range_is_reversed_is_refused() -> None:
    """A range of more than 2^31 has its end before its beginning, which is refused."""
    pair, _, receiver = linked(client_sends=True)
    receiver.session.send(Disposition(True, 5, 4, True, Accepted()))
    assert condition(pair.run()[0]) == "amqp:invalid-field"


def test_settle_in_mode_second_confirms_the_outcome_once() -> None:
    """A receiver that settles second gets its outcome confirmed, for what was sent and no more (2.6.12)."""
    pair, sender, receiver = linked(client_sends=True)
    receiver.set_credit(2)
    pair.run()
    ids = [sender.send(b"x") for _ in range(2)]
    pair.run()
    receiver.session.send(Disposition(True, ids[0], 0x7000_0000, False, Accepted()))
    client, _ = pair.run()
    assert only(client, Outcomes).outcomes == [(each, Accepted()) for each in ids]
    assert frames(pair.to_server[-1]) == [frame(0, Disposition(False, ids[0], ids[1], True, Accepted()))]
    receiver.session.send(Disposition(True, ids[0], ids[1], False, Accepted()))
    assert pair.run() == ([], [])


def test_disposition_with_a_state_not_terminal_is_no_outcome() -> None:
    """A state that is not terminal has no effect; settled without one, the delivery was not taken."""
    pair, sender, receiver = linked(client_sends=True)
    receiver.set_credit(1)
    pair.run()
    (sent,) = [sender.send(b"x")]
    pair.run()
    receiver.session.send(Disposition(True, sent, None, False, Received(0, 0)))
    assert pair.run()[0] == []
    receiver.session.send(Disposition(True, sent, None, True, None))
    assert only(pair.run()[0], Outcomes).outcomes == [(sent, Released())]


@BOTH_WAYS
def test_settled_and_unsettled_messages_keep_their_order(client_sends: bool) -> None:
    """Settled and unsettled messages of one link keep their order, and an id settles only its own."""
    pair, sender, receiver = linked(client_sends=client_sends)
    receiver.set_credit(9)
    pair.run()
    sent = [(bytes([number]), number in (2, 3, 6)) for number in range(9)]
    ids = [sender.send(payload, settled=not unsettled) for payload, unsettled in sent]
    events = [event for event in events_at(pair, receiver) if isinstance(event, Messages)]
    assert payloads(list(events)) == [payload for payload, _ in sent]
    assert all(len(event.delivery_ids) in (0, len(event.payloads)) for event in events)
    assert [each for event in events for each in event.delivery_ids] == [ids[2], ids[3], ids[6]]


def test_receive_gives_one_event_per_link() -> None:
    """Links that take turns get one event each."""
    pair = opened()
    mine, _ = pair.session()
    ends = [pair.link(mine, is_receiver=True, name=f"link-{number}") for number in range(3)]
    for receiver, _ in ends:
        receiver.set_credit(100)
    pair.run()
    for turn in range(30):
        ends[turn % 3][1].send_run([b"%d" % turn], 0)
    client, _ = pair.run()
    assert [type(event) for event in client] == [Messages] * 3
    for number, (receiver, _) in enumerate(ends):
        event = only([each for each in client if isinstance(each, Messages) and each.link is receiver], Messages)
        assert event.payloads == [b"%d" % turn for turn in range(number, 30, 3)]


# ------------------------------------------------------------------------------------- hand-written transfers


def receiving(**changes: Any) -> tuple[Pair, Link]:
    """Return an open pair whose server receives on handle 0 with credit 10."""
    pair, _, receiver = linked(client_sends=True, server=config(**changes), limit=1000)
    receiver.set_credit(10)
    pair.run()
    return pair, receiver


def test_aborted_delivery_is_dropped() -> None:
    """An aborted delivery leaves nothing behind."""
    pair, receiver = receiving()
    data = frame(0, Transfer(0, 0, b"t", 0, True, True), b"part") + frame(0, Transfer(0, aborted=True))
    assert pair.server.receive(data) == []
    assert receiver.incoming.buffer is None
    assert payloads(pair.server.receive(frame(0, Transfer(0, 1, b"t", 0, True), b"whole"))) == [b"whole"]


def test_delivery_settled_by_a_later_frame_is_settled() -> None:
    """A delivery is settled when any of its frames says so (2.7.5); later frames need no id."""
    pair, _ = receiving()
    data = frame(0, Transfer(0, 0, b"t", 0, None, True), b"a") + frame(0, Transfer(0, settled=True), b"b")
    event = only(pair.server.receive(data), Messages)
    assert (event.payloads, event.delivery_ids) == ([b"ab"], [])


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (frame(0, Transfer(0, None, b"t"), b"x"), "amqp:invalid-field"),
        (frame(0, Transfer(0, 0, b"t", more=True), b"x") + frame(0, Transfer(0, 1, b"t"), b"y"), "amqp:not-allowed"),
        (frame(0, Attach("link", 0, False)), "amqp:session:handle-in-use"),
        (frame(0, Attach("other", 2000, False)), "amqp:connection:framing-error"),
    ],
)
def test_broken_link_rule_closes_the_connection_with_its_condition(data: bytes, expected: str) -> None:
    """What breaks a rule of links closes the connection with its condition."""
    pair, _ = receiving()
    assert condition(pair.server.receive(data)) == expected


def test_transfer_to_a_sender_is_refused() -> None:
    """A transfer against the direction of its link is refused."""
    pair, _, receiver = linked(client_sends=False)
    assert receiver.remote_handle == 0
    assert condition(pair.server.receive(frame(0, Transfer(0, 0, b"t"), b"x"))) == "amqp:not-allowed"


@pytest.mark.parametrize("sizes", [[10, 10, 1001], [1001], [10] * 5 + [1000, 1000, 1001]])
def test_receive_of_a_run_checks_the_size_of_each_message(sizes: list[int]) -> None:
    """Each message of a run is held to the advertised size; what came before a larger one arrives."""
    pair, receiver = receiving()
    data = b"".join(frame(0, Transfer(0, at, b"t", 0, True), b"x" * size) for at, size in enumerate(sizes))
    events = pair.server.receive(data)
    assert [len(payload) for payload in payloads(events)] == sizes[:-1]
    error = only(events, LinkDetached).error
    assert error is not None
    assert error.condition == "amqp:link:message-size-exceeded"
    assert not receiver.is_attached


def test_delivery_without_an_end_is_bounded() -> None:
    """Frames without content do not add up, and content adds up to the advertised size at most."""
    pair, receiver = receiving()
    pair.server.receive(frame(0, Transfer(0, 0, b"t", more=True)) * 5000)
    assert receiver.incoming.buffer == bytearray()
    events = pair.server.receive(frame(0, Transfer(0, 0, b"t", more=True), b"x" * 100) * 11)
    assert only(events, LinkDetached).error is not None
    assert receiver.incoming.buffer is None


# ------------------------------------------------------------------------------------------------- endings

ERRORS = pytest.mark.parametrize("error", [None, AmqpError("amqp:link:stolen", "a higher epoch", None)])


@BOTH_WAYS
@ERRORS
@pytest.mark.parametrize("sender_ends", [True, False])
def test_detach_is_reported_once_at_both_ends(client_sends: bool, sender_ends: bool, error: AmqpError | None) -> None:
    """Either end detaches, with or without an error, and both are notified once."""
    pair, sender, receiver = linked(client_sends=client_sends)
    ender, other = (sender, receiver) if sender_ends else (receiver, sender)
    ender.detach(error)
    ender.detach(error)
    client, server = pair.run()
    assert only(client if pair.engine_of(other) is pair.client else server, LinkDetached).error == error
    assert only(client if pair.engine_of(ender) is pair.client else server, LinkDetached).error is None
    assert sender.state is receiver.state is AttachState.DETACHED
    assert pair.client.sessions[0].links == pair.server.sessions[0].links == {}
    with pytest.raises(ClosedError):
        sender.send(b"x")
    with pytest.raises(ClosedError):
        sender.send_run([b"x"])
    receiver.set_credit(5)
    sender.drained()
    sender.detach()
    assert pair.run() == ([], [])


def test_detach_that_crosses_the_peers_needs_no_answer() -> None:
    """Detaches that cross need no answer."""
    pair, sender, receiver = linked(client_sends=True)
    sender.detach()
    receiver.detach()
    client, server = pair.run()
    assert only(client, LinkDetached).error is None
    assert only(server, LinkDetached).error is None


def test_refuse_sends_an_attach_without_termini_and_a_detach() -> None:
    """A refusal is an attach without termini and a detach with the error (2.6.3), reported as a detach only."""
    pair = opened()
    mine, theirs = pair.session()
    for is_receiver in (True, False):
        link = mine.attach("link", is_receiver=is_receiver, source=Source("a"), target=Target("b"), snd_settle_mode=2)
        pair.run()
        refused = only(pair.server_events[-1:], LinkAttached).link
        refused.refuse(AmqpError("amqp:not-found", "no such hub"))
        client, server = pair.run()
        assert only(client, LinkDetached) == LinkDetached(link, AmqpError("amqp:not-found", "no such hub"), True)
        assert only(server, LinkDetached).link is refused
        assert not any(isinstance(event, LinkAttached) for event in client)
        attach = frames(pair.to_client[-1])[0]
        assert attach == frame(0, Attach("link", refused.handle, not is_receiver))
    assert mine.links == theirs.links == {}


@pytest.mark.parametrize("answer", ["accept", "refuse", "detach"])
def test_attach_detached_by_the_peer_before_its_answer(answer: str) -> None:
    """An attach that is detached before it was answered is answered by null termini and a detach; then by nothing."""
    pair = opened()
    mine, _ = pair.session()
    link = mine.attach("link", is_receiver=True, source=Source("a"), target=Target("b"), snd_settle_mode=2)
    link.detach()
    client, server = pair.run()
    theirs = only(server, LinkAttached).link
    assert only(server, LinkDetached).link is theirs
    assert only(client, LinkDetached).link is link
    if answer == "refuse":
        theirs.refuse(AmqpError("amqp:not-found"))
    else:
        getattr(theirs, answer)()
    assert pair.run() == ([], [])


def test_detach_instead_of_an_answer_refuses_the_link() -> None:
    """Detaching a link that waits for its answer refuses it."""
    pair = opened()
    mine, _ = pair.session()
    link = mine.attach("link", is_receiver=True, source=Source("a"), target=Target("b"), snd_settle_mode=2)
    _, server = pair.run()
    only(server, LinkAttached).link.detach(AmqpError("amqp:not-found"))
    assert only(pair.run()[0], LinkDetached) == LinkDetached(link, AmqpError("amqp:not-found"), True)


def test_send_and_flow_on_an_unattached_link_are_refused() -> None:
    """A link that is not attached yet takes neither messages nor credit."""
    pair = opened()
    mine, _ = pair.session()
    link = mine.attach("link", is_receiver=True, source=Source("a"), target=Target("b"), snd_settle_mode=2)
    with pytest.raises(ClosedError):
        link.set_credit(1)
    with pytest.raises(ClosedError):
        link.send(b"x")


def test_attach_that_steals_in_the_middle_of_a_message_drops_it() -> None:
    """A link stolen in the middle of a message loses that message only; the next link gets none of it."""
    pair, sender, receiver = linked(
        client_sends=False, client=config(incoming_window=8, max_frame_size=512), server=config(max_frame_size=512)
    )
    receiver.set_credit(10)
    pair.run()
    sender.send(b"a" * 100, settled=True)
    sender.send(b"b" * 100_000, settled=True)
    blocked = sender.session.is_blocked
    sender.detach(AmqpError("amqp:link:stolen", "higher"))
    assert (blocked, sender.session.is_blocked) == (True, False)
    client, _ = pair.run()
    assert payloads(client) == [b"a" * 100]
    assert only(client, LinkDetached).error is not None
    again, theirs = pair.link(pair.client.sessions[0], is_receiver=True)
    again.set_credit(1)
    pair.run()
    theirs.send(b"c", settled=True)
    assert payloads(pair.run()[0]) == [b"c"]


def test_detach_by_the_peer_drops_what_waits_for_the_window() -> None:
    """What waits for the window is dropped when the peer detaches: its handle may be another link's by then."""
    pair, sender, receiver = linked(client_sends=True, server=config(incoming_window=1, handle_max=0))
    receiver.set_credit(10)
    pair.run()
    for _ in range(5):
        sender.send(b"x" * 10)
    receiver.detach()
    pair.client.receive(pair.server.data_to_send())
    assert not sender.session.is_blocked
    assert sender.session.unsettled == {}
    pair.run()
    again, _ = pair.link(pair.client.sessions[0], is_receiver=False, name="again")
    assert again.handle == 0
    assert pair.server.is_open


def test_transfers_to_a_detached_link_are_dropped() -> None:
    """What arrives after the own detach is dropped (2.6.6), for a run as for the rest; so after the own end."""
    for end in (False, True):
        pair, sender, receiver = linked(client_sends=False)
        receiver.set_credit(100)
        pair.run()
        sender.send_run([b"x"], 0)
        pair.run()
        sender.send_run([b"x"] * 5, 0)
        if end:
            receiver.session.end()
        else:
            receiver.detach()
        client, _ = pair.run()
        assert payloads(client) == []
        assert [type(event) for event in client] == [SessionEnded if end else LinkDetached]


def test_handles_are_used_again_after_a_detach() -> None:
    """Any number of links one after the other fit the peer's handle-max, and only so many at once."""
    pair = opened(server=config(handle_max=2))
    mine, theirs = pair.session()
    assert mine.free_handles == theirs.free_handles == 3
    kept, _ = pair.link(mine, is_receiver=True, name="kept")
    for number in range(10):
        link, _ = pair.link(mine, is_receiver=True, name=f"link-{number}")
        assert link.handle <= 2
        assert link.handle != kept.handle
        link.detach()
        pair.run()
    assert mine.free_handles == 2
    for number in range(2):
        pair.link(mine, is_receiver=True, name=f"more-{number}")
    assert mine.free_handles == 0
    with pytest.raises(AssertionError):
        mine.attach("too many", is_receiver=True, source=Source(), target=Target())


def test_attach_beyond_the_handle_max_is_refused() -> None:
    """A peer that attaches more links than it takes itself is refused."""
    pair = opened()
    pair.server.receive(frame(0, Begin(None, 0, 1, 1, handle_max=0)) + frame(0, Attach("a", 0, True)))
    assert condition(pair.server.receive(frame(0, Attach("b", 1, True)))) == "amqp:resource-limit-exceeded"


def test_attach_takes_a_name_once_per_direction_and_session() -> None:
    """A name may be used once in each direction, and again in another session (2.6.1)."""
    pair = opened()
    for _ in range(2):
        mine, _ = pair.session()
        for is_receiver in (True, False):
            link, theirs = pair.link(mine, is_receiver=is_receiver, name="same")
            assert link.is_receiver is not theirs.is_receiver


@pytest.mark.parametrize("how", ["close", "end", "eof"])
def test_calls_after_the_end_send_nothing(how: str) -> None:
    """After a close, an end or the end of the stream no verb sends anything, and no sender has credit."""
    pair, sender, receiver = linked(client_sends=True)
    back, _ = pair.link(pair.client.sessions[0], is_receiver=True, name="back")
    receiver.set_credit(10)
    pair.run()
    if how == "close":
        pair.client.close()
    elif how == "end":
        sender.session.end()
    else:
        pair.client.receive_eof()
    pair.client.data_to_send()
    assert sender.credit == 0
    assert not sender.is_attached
    assert not back.is_attached
    with pytest.raises(ClosedError):
        sender.send(b"x")
    back.set_credit(1)
    back.settle(0, 0, Accepted())
    sender.drained()
    sender.detach()
    sender.session.end()
    assert pair.client.data_to_send() == b""


def test_frames_for_an_ending_link_are_harmless_or_refused() -> None:
    """Flows, outcomes and a second detach that cross the own detach are harmless, or a broken rule."""
    pair, sender, receiver = linked(client_sends=True)
    receiver.set_credit(1)
    pair.run()
    sent = sender.send(b"x")
    sender.detach()
    crossing = frame(0, Flow(0, 10, 0, 10, 0, 0, 5, drain=True, echo=True)) + frame(
        0, Disposition(True, sent, sent, True, Accepted())
    )
    events = pair.client.receive(crossing + frame(0, Detach(0, True)))
    assert [type(event) for event in events] == [Outcomes, LinkDetached]
    assert condition(pair.client.receive(frame(0, Detach(0, True)))) == "amqp:session:unattached-handle"


# ------------------------------------------------------------------------------ the settlement mode of the sender


@pytest.mark.parametrize(("mode", "settled"), [(0, True), (1, False)])
def test_send_against_the_settlement_mode_raises(mode: int, settled: bool) -> None:
    """A link that was attached for unsettled messages sends no settled one, nor the other way round (2.8.2)."""
    pair, sender, receiver = linked(client_sends=True)
    receiver.set_credit(2)
    pair.run()
    sender.snd_settle_mode = mode
    with pytest.raises(ValueError, match="cannot be sent settled" if settled else "cannot be sent unsettled"):
        sender.send(b"x", settled=settled)
    if mode == 0:
        with pytest.raises(ValueError, match="cannot be sent settled"):
            sender.send_run([b"x"])
    assert sender.credit == 2
    sender.send(b"x", settled=not settled)


def test_attach_and_accept_state_the_settlement_mode() -> None:
    """The mode that counts is that of the sender's own attach: as it was requested here, or as the answer says."""
    pair = Pair()
    pair.open()
    session, theirs = pair.session()
    mine = session.attach("x", is_receiver=True, source=Source("a"), target=Target("b"), snd_settle_mode=1)
    pair.run()
    (answering,) = theirs.links.values()
    answering.accept(snd_settle_mode=0)
    pair.run()
    assert (mine.snd_settle_mode, answering.snd_settle_mode) == (1, 0)


def test_settle_of_what_was_sent_reports_no_outcome() -> None:
    """A sender that settles its own delivery says so as a sender, and hears no outcome of it later."""
    pair, sender, receiver = linked(client_sends=True)
    receiver.set_credit(1)
    pair.run()
    sent = sender.send(b"x")
    pair.run()
    sender.settle(sent, sent, Accepted())
    pair.run()
    (said,) = frames(pair.to_server[-1])
    assert said == frame(0, Disposition(False, sent, None, True, Accepted()))
    assert sender.session.unsettled == {}
