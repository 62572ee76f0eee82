"""Frames are never larger than the peer takes, whatever they carry (2.4.1, 2.7.1, 5.3.1)."""

from __future__ import annotations

from typing import Any

import pytest

from eventpump.amqp.connection import Connection, LinkAttached, LinkDetached, Role, SessionEnded
from eventpump.amqp.frames import MIN_MAX_FRAME_SIZE
from eventpump.amqp.performatives import (
    AmqpError,
    Attach,
    Begin,
    Close,
    Detach,
    Disposition,
    End,
    Modified,
    Open,
    Rejected,
    SaslMechanisms,
    Source,
    Target,
)
from eventpump.amqp.types import Symbol
from eventpump.errors import ProtocolError
from tests.unit.amqp.pair import Pair, condition, config, frame, frames, only, opened, payloads, sent

TOO_SMALL = "amqp:frame-size-too-small"
LIMIT = MIN_MAX_FRAME_SIZE


def small() -> Pair:
    """Return an open pair whose client takes the smallest frames."""
    return opened(config(max_frame_size=LIMIT))


def sent_by(server: Connection) -> bytes:
    """Take what a server sends. No frame may be too large for its client."""
    data = server.data_to_send()
    assert all(size <= LIMIT for _, size in frames(data))
    return data


def attached(pair: Pair, name: str, **options: Any) -> bytes:
    """Attach by hand, and have it accepted.

    Returns:
        What the server answers.
    """
    attach = Attach(name=name, handle=0, role=True, **{"source": Source("a"), "target": Target("b"), **options})
    pair.server.receive(frame(0, Begin(None, 0, 10, 10)))
    pair.server.data_to_send()
    link = only(pair.server.receive(frame(0, attach)), LinkAttached).link
    link.accept()
    return sent_by(pair.server)


@pytest.mark.parametrize("length", range(250, 500, 5))
def test_attach_with_a_name_too_long_to_answer_is_refused(length: int) -> None:
    """An attach is answered where its answer fits; a name too long for that is refused, by link or by session."""
    pair = small()
    data = attached(pair, "n" * length)
    attach, end, detach = sent(data, Attach), sent(data, End), sent(data, Detach)
    if attach:
        assert attach[0].name == "n" * length
        assert (attach[0].source is None) is bool(detach)
        assert not end
    else:
        assert end
        assert end[0].error is not None
        assert end[0].error.condition == TOO_SMALL
    assert [each.error.condition for each in detach if each.error] == [TOO_SMALL] * len(detach)


def test_attach_whose_refusal_does_not_fit_ends_the_session() -> None:
    """Not even the refusal of such an attach fits: its session ends, with its links, and the connection goes on."""
    pair = small()
    data = attached(pair, "n" * 2000)
    (end,) = sent(data, End)
    assert end.error is not None
    assert end.error.condition == TOO_SMALL
    assert [link.name for link in only(pair.server.receive(frame(0, End())), SessionEnded).links] == ["n" * 2000]
    assert pair.server.is_open
    assert pair.server.sessions == {}
    assert pair.server.links == {}


def test_attach_whose_answer_does_not_fit_is_refused() -> None:
    """An attach whose answer is too large is refused: null termini, then a detach that says why."""
    pair = small()
    data = attached(pair, "link", source=Source("a" * 600))
    (attach,), (detach,) = sent(data, Attach), sent(data, Detach)
    assert (attach.source, attach.target) == (None, None)
    assert detach.error is not None
    assert detach.error.condition == TOO_SMALL
    assert only(pair.server.receive(frame(0, Detach(0, closed=True))), LinkDetached).link.name == "link"


@pytest.mark.parametrize("end", ["detach", "end", "close", "reject"])
@pytest.mark.parametrize("text", ["x" * 100, "x" * 395, "x" * 5000, "€" * 5000, ""])
@pytest.mark.parametrize("info", [None, {Symbol("why"): "y" * 5000}])
def test_error_description_too_long_for_a_frame_is_shortened(end: str, text: str, info: dict[Any, Any] | None) -> None:
    """An error whose description is too long arrives shortened, with its condition; the info goes first."""
    pair = small()
    session, theirs = pair.session()
    _, link = pair.link(session, is_receiver=False)
    error = AmqpError("amqp:internal-error", text, info)
    if end == "detach":
        link.detach(error)
    elif end == "end":
        theirs.end(error)
    elif end == "close":
        pair.server.close(error)
    else:
        link.settle(0, 0, Rejected(error))
    (performative,) = [each for each, _ in frames(sent_by(pair.server))]
    found = performative.state.error if isinstance(performative, Disposition) else performative.error
    assert found.condition == "amqp:internal-error"
    assert found.info is None
    if len(text) <= 395:
        assert (found.description or "") == text
    else:
        assert found.description.endswith("...")
        assert text.startswith(found.description[:-3])
        assert len(found.description.encode()) > 400


@pytest.mark.parametrize("length", range(380, 480))
def test_error_that_fits_exactly_is_not_shortened(length: int) -> None:
    """What fits exactly is sent as it is."""
    pair = small()
    error = AmqpError("amqp:internal-error", "x" * length)
    is_fitting = len(Close(error=error).encode()) + 8 <= LIMIT
    pair.server.close(error)
    ((close, size),) = frames(sent_by(pair.server))
    assert (close.error == error) is is_fitting
    assert is_fitting or size > LIMIT - 8


def test_close_with_a_condition_too_long_for_a_frame_is_sent() -> None:
    """Whatever an error is, a close is sent."""
    pair = small()
    pair.server.close(AmqpError("x" * 1000, "y"))
    (close,) = sent(sent_by(pair.server), Close)
    assert close.error == AmqpError("amqp:internal-error")


def test_settlement_echo_leaves_out_annotations_that_do_not_fit() -> None:
    """The state that a receiver settles with is echoed to it (2.6.12) without the annotations it cannot take back."""
    pair = small()
    session, _ = pair.session()
    mine, theirs = pair.link(session, is_receiver=True)
    mine.set_credit(1)
    pair.run()
    delivery_id = theirs.send(b"x")
    pair.server.data_to_send()
    state = Modified(delivery_failed=True, message_annotations={Symbol("why"): "x" * 5000})
    pair.server.receive(frame(0, Disposition(role=True, first=delivery_id, state=state)))
    (answer,) = sent(sent_by(pair.server), Disposition)
    assert answer.settled
    assert answer.state == Modified(delivery_failed=True)


@pytest.mark.parametrize("size", [0, 1, 440, 448, 460, 470, 480, 512, 1000, 5000])
@pytest.mark.parametrize("is_run", [True, False])
def test_send_splits_a_message_into_as_many_frames_as_it_needs(size: int, is_run: bool) -> None:
    """A message of any size takes as many frames as it needs."""
    pair = small()
    session, _ = pair.session()
    mine, theirs = pair.link(session, is_receiver=True)
    mine.set_credit(10)
    pair.run()
    if is_run:
        theirs.send_run([b"x" * size])
    else:
        theirs.send(b"x" * size)
    assert payloads(pair.client.receive(sent_by(pair.server))) == [b"x" * size]


def test_attach_that_does_not_fit_frees_its_handle() -> None:
    """A link whose attach the peer would not take is not made; its handle is free again."""
    pair = opened(server=config(max_frame_size=LIMIT))
    session, _ = pair.session()
    free = session.free_handles
    with pytest.raises(ProtocolError, match="512 bytes") as caught:
        session.attach("n" * 600, is_receiver=True, source=Source("a"), target=Target("b"), snd_settle_mode=2)
    assert caught.value.condition == TOO_SMALL
    assert session.free_handles == free
    assert pair.client.data_to_send() == b""
    pair.link(session, is_receiver=True)


def test_open_leaves_out_properties_that_do_not_fit_into_512_bytes() -> None:
    """Before the peer's open its limit is 512 bytes: properties that make the own one larger are left out."""
    pair = Pair(config(properties={"user-agent": "x" * 200}))
    pair.open()
    assert [each.properties for each in sent(pair.to_server[-1], Open)] == [{"user-agent": "x" * 200}]
    pair = Pair(config(properties={"user-agent": "x" * 500}))
    pair.open()
    assert [each.properties for each in sent(pair.to_server[-1], Open)] == [None]


@pytest.mark.parametrize("options", [{"initial_response": b"x" * 512}, {"container_id": "x" * 600}])
def test_connect_with_a_credential_that_fits_no_frame_is_refused(options: dict[str, Any]) -> None:
    """A SASL response or a name that no frame of 512 bytes holds ends the attempt, before it is sent."""
    pair = Pair(config(**options))
    pair.client.start()
    client, _ = pair.run()
    assert condition(client) == TOO_SMALL
    assert all(size <= LIMIT for data in pair.to_server for _, size in frames(data))


def test_server_mechanisms_that_fit_no_frame_are_refused() -> None:
    """SASL frames of a server have the same limit."""
    server = Connection(config(mechanisms=tuple(f"MECHANISM-{number}" for number in range(100))), Role.SERVER)
    assert condition(server.receive(b"AMQP\x03\x01\x00\x00")) == TOO_SMALL
    assert sent(server.data_to_send(), SaslMechanisms) == []
