"""One connection of the emulator: its last resort, and clients that do not wait or do not fit."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import sys
import time
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

import pytest

from eventpump.amqp.config import ConnectionConfig
from eventpump.amqp.connection import ConnectionState, SaslRequested
from eventpump.amqp.link import Link
from eventpump.amqp.message import AmqpValue, Data, Message, Properties
from eventpump.amqp.performatives import (
    Accepted,
    Attach,
    Begin,
    Close,
    Detach,
    Disposition,
    Flow,
    Source,
    Target,
    Transfer,
)
from eventpump.amqp.sections import section
from eventpump.amqp.types import Symbol
from eventpump.emulator.auth import DEFAULT_KEY_NAME, Right, VerifiedToken
from eventpump.emulator.connection import CLOSE_GRACE
from eventpump.emulator.faults import Delay, Hold, LinkRole, Performative
from eventpump.emulator.service import Deadlines, Service
from eventpump.eventhubs import cbs, sas
from eventpump.eventhubs.envelope import encode_batch
from eventpump.eventhubs.names import BATCH_MESSAGE_FORMAT, JWT_TOKEN_TYPE, PARTITION_KEY, SAS_TOKEN_TYPE
from tests.support.peer import AmqpPeer, LinkRefusedError
from tests.support.served import served_connections
from tests.unit.amqp.pair import frame, sent
from tests.unit.emulator.serving import AUDIENCE, OPENING, by_hand, connect, serve

EVENT = Message(body=Data((b"x",))).encode()
SECRET = "c2VjcmV0IG9mIGEgdG9rZW4="


class Broken:
    """User code that misbehaves.

    Attributes:
        error: What it raises; None while it works.
    """

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def verify(self, _token: str) -> VerifiedToken | None:
        """See `TokenVerifier`."""
        if self.error is not None:
            raise self.error
        return VerifiedToken(rights=Right.ALL, expires_at=time.time() + 100)

    def now(self) -> float:
        """Return the time."""
        if self.error is not None:
            raise self.error
        return time.time()


async def ask(peer: AmqpPeer) -> None:
    """Put a token that the service's verifier looks at, without waiting for what comes of it."""
    session = await peer.begin()
    link = await peer.attach(session, source="$cbs", target="$cbs", is_receiver=False)
    link.send(cbs.put_token_request("token", JWT_TOKEN_TYPE, AUDIENCE, message_id="1").encode())
    peer.flush()


def failures(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize("path", ["read", "delay", "removal"])
async def test_unexpected_exception_closes_one_connection_and_is_logged(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    """An unexpected exception closes one connection with a condition, and is logged once, with its traceback.

    That holds for what the client's bytes lead to at once, and after a fault's delay or removal. Others are served.
    """
    broken = Broken()
    service = await serve(verifier=broken.verify)
    other = await connect(service)
    peer = await connect(service)
    fault = None
    if path == "delay":
        service.faults.add(Delay(1.0), role=LinkRole.CBS)
    elif path == "removal":
        fault = service.faults.add(Hold(), role=LinkRole.CBS)
    broken.error = ValueError(f"unexpected {SECRET}")
    await ask(peer)
    if fault is not None:
        await fault.until_fired()
        fault.remove()
    await peer.until(lambda: peer.closed is not None)
    assert peer.closed is not None
    error = peer.closed.error
    assert error is not None
    assert error.condition == "amqp:internal-error"
    assert SECRET not in (error.description or "")
    assert "Traceback" not in (error.description or "")
    (record,) = failures(caplog)
    assert record.name == "eventpump.emulator"
    assert record.exc_info is not None
    assert record.exc_info[1] is broken.error
    broken.error = None
    assert await other.put_token(AUDIENCE) == 202
    await asyncio.sleep(CLOSE_GRACE)
    assert len(service.connections) == 1
    assert len(failures(caplog)) == 1
    await other.aclose()
    await peer.aclose()


async def test_unexpected_exception_in_a_timer_closes_the_connection(caplog: pytest.LogCaptureFixture) -> None:
    """The connection's own timer has the same last resort."""
    broken = Broken()
    service = await serve(now=broken.now)
    peer = await connect(service)
    assert await peer.put_token(AUDIENCE, lifetime=1000) == 202
    await asyncio.sleep(1)  # its links are gone: only the timer is left
    broken.error = RuntimeError("no clock")
    await asyncio.wait_for(asyncio.shield(next(iter(service.connections)).closed), 2000)
    assert peer.closed is not None
    assert peer.closed.error is not None
    assert peer.closed.error.condition == "amqp:internal-error"
    assert len(failures(caplog)) == 1
    await peer.aclose()


async def test_handlers_of_events_do_not_raise(caplog: pytest.LogCaptureFixture) -> None:
    """The shell's calls do not raise, whatever they are given: here an event that cannot be, on an open connection."""
    service = await serve()
    peer = await connect(service)
    (served,) = served_connections(service)
    served.on_events([SaslRequested("PLAIN", b"", None)])
    await peer.until(lambda: peer.closed is not None)
    assert peer.closed is not None
    assert peer.closed.error is not None
    assert peer.closed.error.condition == "amqp:internal-error"
    assert len(failures(caplog)) == 1
    await peer.aclose()


async def test_unexpected_exception_while_closing_cuts_the_connection(caplog: pytest.LogCaptureFixture) -> None:
    """A connection that fails again while it is closed is cut, and logs no more."""
    service = await serve()
    peer = await connect(service)
    (served,) = served_connections(service)

    def fail() -> None:
        raise RuntimeError("unexpected")

    served.guard(fail)
    served.guard(fail)
    await served.closed
    assert len(failures(caplog)) == 1
    await peer.aclose()


@pytest.mark.parametrize("kind", [asyncio.CancelledError, KeyboardInterrupt, SystemExit])
async def test_base_exception_passes(kind: type[BaseException], caplog: pytest.LogCaptureFixture) -> None:
    """A cancellation, or the end of the program, is nothing that the last resort keeps."""
    broken = Broken()
    service = await serve(verifier=broken.verify)
    protocol, sink = by_hand(service)
    protocol.data_received(
        OPENING
        + frame(0, Begin(None, 0, 10, 10))
        + frame(0, Attach("in", 0, False, source=Source("$cbs"), target=Target("$cbs")))
    )
    broken.error = kind()
    request = cbs.put_token_request("token", JWT_TOKEN_TYPE, AUDIENCE, message_id="1").encode()
    with pytest.raises(kind):
        protocol.data_received(frame(0, Transfer(0, 0, b"0", 0), request))
    assert sent(sink.written, Close) == []
    assert not failures(caplog)
    protocol.connection_lost(None)


async def test_unexpected_exception_of_the_engine_closes_the_connection(caplog: pytest.LogCaptureFixture) -> None:
    """What the engine itself raises on a client's bytes is for the last resort too."""
    service = await serve()
    protocol, sink = by_hand(service)
    protocol.data_received(OPENING + frame(0, Begin(None, 0, 10, 10)))
    protocol.data_received(None)  # type: ignore[arg-type]  # no bytes: nothing the engine expects
    (close,) = sent(sink.written, Close)
    assert close.error is not None
    assert close.error.condition == "amqp:internal-error"
    assert len(failures(caplog)) == 1
    protocol.connection_lost(None)
    assert not service.connections


# ---------------------------------------------------------------------------------------- clients that do not wait


def stored(service: Service) -> int:
    hub = service.hub("telemetry")
    assert hub is not None
    return sum(partition.end - partition.beginning for partition in hub.partitions)


def sending(count: int) -> bytes:
    """Write a begin, a producer's attach and its transfers in one flight."""
    return (
        frame(0, Begin(None, 0, 1000, 1000))
        + frame(0, Attach("out", 0, False, source=Source("me"), target=Target("telemetry/Partitions/0")))
        + b"".join(frame(0, Transfer(0, number, b"%d" % number, 0), EVENT) for number in range(count))
    )


async def test_transfers_read_with_their_attach_are_stored() -> None:
    """The service bears transfers before credit (protocol.md 7.5), also before its answer to the attach."""
    service = await serve()
    protocol, sink = by_hand(service)
    protocol.data_received(OPENING + sending(3))
    accepted = sent(sink.written, Disposition)
    assert [(each.first, each.last, each.settled, each.state) for each in accepted] == [(0, 2, True, Accepted())]
    assert stored(service) == 3
    protocol.connection_lost(None)


async def test_token_read_with_open_and_attach_is_answered() -> None:
    """A client that opens, attaches its pair of links and puts its token in one write gets its answer."""
    service = await serve(verifier=Broken().verify)
    protocol, sink = by_hand(service)
    request = cbs.put_token_request("token", JWT_TOKEN_TYPE, AUDIENCE, message_id="1").encode()
    protocol.data_received(
        OPENING
        + frame(0, Begin(None, 0, 10, 10))
        + frame(0, Attach("in", 0, True, source=Source("$cbs"), target=Target("$cbs")))
        + frame(0, Attach("out", 1, False, source=Source("$cbs"), target=Target("$cbs")))
        + frame(0, Flow(0, 10, 0, 10, handle=0, delivery_count=0, link_credit=1))
        + frame(0, Transfer(1, 0, b"0", 0), request)
    )
    assert b"Accepted" in sink.written
    assert [each.state for each in sent_before_answer(sink.written)] == [Accepted()]
    protocol.connection_lost(None)


def sent_before_answer(data: bytes) -> list[Disposition]:
    """Return the dispositions of a flight whose last frame is a transfer."""
    cut = data.rindex(b"\x00\x53\x14") - 8
    return sent(data[:cut], Disposition)


async def test_transfers_for_a_link_that_waits_detach_it() -> None:
    """Where the answer to the attach takes longer, the link is detached for them."""
    service = await serve()
    fault = service.faults.add(Hold(), on=Performative.ATTACH, role=LinkRole.PRODUCER)
    protocol, sink = by_hand(service)
    protocol.data_received(OPENING + sending(3))
    (detach,) = sent(sink.written, Detach)
    assert detach.error is not None
    assert detach.error.condition == "amqp:link:transfer-limit-exceeded"
    fault.remove()
    protocol.data_received(frame(0, Detach(0, closed=True)))
    assert len(sent(sink.written, Attach)) == len(sent(sink.written, Detach)) == 1
    assert stored(service) == 0
    protocol.connection_lost(None)


async def test_transfers_read_with_a_refused_attach_are_dropped() -> None:
    """What comes with an attach that is refused is dropped with it."""
    service = await serve()
    protocol, sink = by_hand(service)
    protocol.data_received(OPENING + sending(3).replace(b"Partitions/0", b"Partitions/9"))
    assert sent(sink.written, Disposition) == []
    assert len(sent(sink.written, Detach)) == 1
    assert sent(sink.written, Close) == []
    protocol.connection_lost(None)


@pytest.mark.parametrize("piece", [1000, 65_536, 1 << 20])
async def test_pipelined_transfers_are_stored_however_they_are_cut(piece: int) -> None:
    """More than 64 KiB behind the SASL choice, all valid, is served; the emulator reads on when it has caught up."""
    service = await serve()
    protocol, sink = by_hand(service)
    data = OPENING + sending(3000)
    assert len(data) > 100_000
    for start in range(0, len(data), piece):
        await sink.reading.wait()
        protocol.data_received(data[start : start + piece])
    await sink.reading.wait()
    assert stored(service) == 3000
    assert sent(sink.written, Close) == []
    protocol.connection_lost(None)


# ------------------------------------------------------------------------------------------------ open, frames, names


async def test_open_with_a_short_idle_time_out_is_refused() -> None:
    """An idle-time-out below a second is refused at the open; a second is granted, with two heartbeats in it."""
    service = await serve()
    peer = await connect(service, ConnectionConfig(container_id="short", idle_timeout=0.999))
    assert peer.closed is not None
    assert peer.closed.error is not None
    assert peer.closed.error.condition == "amqp:not-allowed"
    assert "below 1000" in (peer.closed.error.description or "")
    peer = await connect(service, ConnectionConfig(container_id="long", idle_timeout=1.0))
    (served,) = served_connections(service)
    assert served.engine.heartbeat_interval == 0.5
    await peer.put_token(AUDIENCE)
    await asyncio.sleep(10)
    assert peer.closed is None
    await peer.aclose()


async def test_client_with_frames_of_512_bytes_reads_and_sends() -> None:
    """A client that takes frames of 512 bytes can put a token, read, and send; what is too long for it is refused."""
    service = await serve()
    peer = await connect(service, ConnectionConfig(container_id="small", max_frame_size=512))
    assert await peer.put_token(AUDIENCE) == 202
    session = await peer.begin()
    sender = await peer.attach(session, target="telemetry/Partitions/0")
    assert await peer.send(sender, Message(body=Data((b"x" * 5000,))).encode()) == Accepted()
    receiver = await peer.attach(session, source="telemetry/ConsumerGroups/$Default/Partitions/0", name="n" * 200)
    receiver.set_credit(1)
    peer.flush()
    (raw,) = await peer.until(lambda: peer.received[receiver])
    assert b"x" * 5000 in raw
    with pytest.raises(LinkRefusedError) as refused:
        await peer.attach(session, target="telemetry/Partitions/0", source="s" * 500)
    assert refused.value.error.condition == "amqp:frame-size-too-small"
    with pytest.raises(LinkRefusedError) as refused:
        await peer.attach(session, target="telemetry/Partitions/0", name="n" * 2000)
    assert refused.value.error.condition == "amqp:frame-size-too-small"
    await asyncio.sleep(0)
    assert not session.is_open
    assert await peer.put_token(AUDIENCE) == 202
    await peer.aclose()


@pytest.mark.parametrize("is_receiver", [True, False])
@pytest.mark.parametrize("is_same_session", [True, False])
async def test_attach_of_a_name_steals_within_its_connection_only(is_receiver: bool, is_same_session: bool) -> None:
    """The second attach of a name detaches the first as stolen, and works; other connections keep theirs.

    Clients share names between connections (protocol.md 7.1).
    """
    service = await serve()
    peers = [await connect(service, ConnectionConfig(container_id="same")) for _ in range(2)]
    address = "telemetry/ConsumerGroups/$Default/Partitions/0" if is_receiver else "telemetry/Partitions/0"
    where = {"source": address} if is_receiver else {"target": address}
    links = []
    for peer in peers:
        assert await peer.put_token(AUDIENCE) == 202
        links.append(await peer.attach(await peer.begin(), name="x", **where))
    peer = peers[0]
    session = peer.engine.sessions[links[0].session.channel] if is_same_session else await peer.begin()
    second = await peer.attach(session, name="x", **where)
    stolen = await peer.until(lambda: peer.detached.get(links[0]))
    assert stolen is not None
    assert stolen.condition == "amqp:link:stolen"
    assert second.is_attached
    assert links[1].is_attached
    if is_receiver:
        sender = await peer.attach(session, target="telemetry/Partitions/0")
        second.set_credit(1)
        peer.flush()
        assert await peer.send(sender, EVENT) == Accepted()
        assert len(await peer.until(lambda: peer.received[second])) == 1
        assert not peer.received[links[0]]
    else:
        assert await peer.send(second, EVENT) == Accepted()
    for each in peers:
        await each.aclose()


async def test_flood_of_one_client_leaves_others_their_turns() -> None:
    """While one client's read full of echoes is worked off, another's token is put, long before the flood is over."""
    service = await serve()
    peer = await connect(service)
    protocol, sink = by_hand(service)
    echo = frame(0, Flow(0, 10, 0, 10, echo=True))
    protocol.data_received(OPENING + frame(0, Begin(None, 0, 10, 10)))
    sink.written = b""
    protocol.data_received(echo * 8000)
    assert await peer.put_token(AUDIENCE) == 202
    assert len(sent(sink.written, Flow)) < 8000
    await sink.reading.wait()
    assert len(sent(sink.written, Flow)) == 8000
    protocol.connection_lost(None)
    await peer.aclose()


def _annotated(count: int, *, descriptor: bytes = b"\x00\x53\x72") -> bytes:
    names = {Symbol(f"{number:03x}"): None for number in range(count)}
    return descriptor + section(0x72, names)[3:] + EVENT


def _request(body: AmqpValue | None = None) -> bytes:
    return Message(body=body, properties=Properties(message_id="1"), application_properties={}).encode()


COSTLY = {
    "requests that are empty": ("$cbs", 0, _request()),
    "requests of many values": ("$cbs", 0, _request(AmqpValue([[] for _ in range(900)]))),
    "tokens with a wrong signature": (
        "$cbs",
        0,
        cbs.put_token_request(
            sas.generate(AUDIENCE, DEFAULT_KEY_NAME, "wrong", 2**31), SAS_TOKEN_TYPE, AUDIENCE, message_id="1"
        ).encode(),
    ),
    "questions": (
        "$management",
        0,
        Message(application_properties={"operation": "READ", "name": "telemetry"}).encode(),
    ),
    "events with annotations": ("telemetry", 0, _annotated(600)),
    "events with one large annotation": ("telemetry", 0, section(0x72, {Symbol("a"): [None] * 4000}) + EVENT),
    "annotations in another form": ("telemetry", 0, _annotated(600, descriptor=b"\x00\x80" + bytes(7) + b"\x72")),
    "annotations out of place": ("telemetry", 0, section(0x73, []) + _annotated(600)),
    "annotations in a batch": ("telemetry", BATCH_MESSAGE_FORMAT, encode_batch([_annotated(600)])),
    "annotations of another form in a batch": (
        "telemetry",
        BATCH_MESSAGE_FORMAT,
        encode_batch([_annotated(600, descriptor=b"\x00\xa3\x1camqp:message-annotations:map")]),
    ),
    "annotations of a batch": (
        "telemetry",
        BATCH_MESSAGE_FORMAT,
        section(0x72, {Symbol(f"{number:03x}"): None for number in range(600)}) + encode_batch([EVENT]),
    ),
    "batches of small events": ("telemetry", BATCH_MESSAGE_FORMAT, encode_batch([EVENT] * 400)),
}


@pytest.mark.parametrize("is_settled", [True, False], ids=["settled", "unsettled"])
@pytest.mark.parametrize("kind", COSTLY)
async def test_turn_is_bounded_by_work(kind: str, *, is_settled: bool) -> None:
    """Whatever fills a read of 256 KiB, no turn makes more than 200,000 calls: some ten milliseconds."""
    node, message_format, payload = COSTLY[kind]
    protocol, _ = by_hand(await serve())
    link = Attach("l", 0, False, source=Source("x"), target=Target(node), initial_delivery_count=0)
    protocol.data_received(OPENING + frame(0, Begin(None, 0, 99_999, 99_999)) + frame(0, link))
    await asyncio.sleep(0)
    transfer = Transfer(0, 0, b"", message_format, settled=is_settled)
    one = len(frame(0, transfer, payload))
    numbers = range(1, 262_144 // one)
    read = b"".join(frame(0, dataclasses.replace(transfer, delivery_id=number), payload) for number in numbers)
    assert _calls(protocol.data_received, read) < 200_000
    for _ in range(2):
        assert protocol.connection.is_behind
        assert _calls(protocol.data_received, b"") < 200_000
    assert protocol.connection.state is ConnectionState.OPENED
    protocol.connection_lost(None)


def _calls(function: Callable[[bytes], object], data: bytes) -> int:
    """Return how many functions a call calls: the work that it does, on any machine."""
    count = 0

    def counted(_frame: object, _event: str, _arg: object) -> None:
        nonlocal count
        count += 1

    before = sys.getprofile()
    sys.setprofile(counted)
    try:
        function(data)
    finally:
        sys.setprofile(before)
    return count


@pytest.mark.parametrize("seed", range(20))
async def test_idle_links_and_connections_end_on_time(seed: int) -> None:
    """In a random history each producer is detached when it has been idle for its time, and the connection when it has
    had no link for its time; neither sooner nor later, whatever else comes and goes.
    """
    random = Random(seed)
    clock = asyncio.get_running_loop().time
    service = await serve()
    idle = random.choice((50.0, 300.0))
    service.deadlines = Deadlines(no_token=None, no_link=idle, idle_connection=idle, idle_producer=100.0)
    peer = await connect(service)
    assert await peer.put_token(AUDIENCE, lifetime=10**6) == 202
    session = await peer.begin()
    until: dict[Link, float] = {}
    empty = clock() + idle
    for _ in range(60):
        if until and random.random() < 0.3:
            link = random.choice(list(until))
            assert await peer.send(link, EVENT) == Accepted()
            until[link] = clock() + 100.0
        elif until and random.random() < 0.3:
            link = random.choice(list(until))
            link.detach()
            peer.flush()
            await peer.until(partial(peer.detached.__contains__, link))
            del until[link]
            empty = clock() + idle
        elif random.random() < 0.6:
            until[await peer.attach(session, target="telemetry/Partitions/0")] = clock() + 100.0
        await asyncio.sleep(random.choice((1.0, 20.0, 60.0)) * random.uniform(0.5, 1.5))
        for link in [link for link, end in until.items() if end < clock()]:
            assert link in peer.detached
            empty = max(empty, until.pop(link) + idle)
        assert not until.keys() & peer.detached.keys()
        assert (peer.closed is not None) == (not until and empty < clock())
        if peer.closed is not None:
            break
    await peer.aclose()


async def test_attach_costs_the_same_with_many_links() -> None:
    """The work of attaching and detaching does not grow with the links that a connection has."""
    protocol, _ = by_hand(await serve())
    protocol.data_received(OPENING + b"".join(frame(channel, Begin(None, 0, 99, 99)) for channel in range(8)))
    costs = {}
    for number in range(2000):
        channel, handle = divmod(number, 250)
        name = f"l{number}"
        attach = Attach(name, handle, False, source=Source("x"), target=Target("telemetry"), initial_delivery_count=0)
        if number % 250 < 249:
            protocol.data_received(frame(channel, attach))
        else:
            costs[number] = _calls(protocol.data_received, frame(channel, attach) + frame(channel, Detach(handle)))
    assert protocol.connection.state is ConnectionState.OPENED
    assert costs[1999] < 1.1 * costs[249]
    protocol.connection_lost(None)


LONG_KEY = Message(body=Data((b"x",)), message_annotations={PARTITION_KEY: "k" * 400_000}).encode()


async def hashing(service: Service) -> tuple[AmqpPeer, asyncio.Future[Any]]:
    """Send an event whose key takes several turns of the loop to hash.

    Returns:
        The client, and its send.
    """
    peer = await connect(service)
    assert await peer.put_token(AUDIENCE, lifetime=1000) == 202
    sender = await peer.attach(await peer.begin(), target="telemetry")
    sending = asyncio.ensure_future(peer.send(sender, LONG_KEY))
    for _ in range(20):  # of some fifty that it takes
        await asyncio.sleep(0)
    assert service.long_keys.count == 1
    return peer, sending


async def test_unexpected_exception_after_a_long_key_closes_the_connection(caplog: pytest.LogCaptureFixture) -> None:
    """What fails after a long key was hashed ends the connection with an answer, as what fails at once does."""
    broken = Broken()
    service = await serve(now=broken.now)
    peer, sending = await hashing(service)
    broken.error = RuntimeError("no clock")
    await peer.until(lambda: peer.closed is not None)
    assert peer.closed is not None
    assert peer.closed.error is not None
    assert peer.closed.error.condition == "amqp:internal-error"
    broken.error = None
    sending.cancel()
    await peer.aclose()


@pytest.mark.parametrize("ends", ["hub", "service"])
async def test_send_whose_hub_ends_while_its_key_is_hashed_stores_nothing(ends: str) -> None:
    """An event for a hub that was recreated meanwhile, or for a service that is closed, is gone with it."""
    service = await serve()
    peer, sending = await hashing(service)
    hub = service.hub("telemetry")
    assert hub is not None
    if ends == "hub":
        service.recreate_hub("telemetry", None)
    else:
        await service.aclose()
    await asyncio.sleep(1)
    assert not service.long_keys.count
    assert [partition.end for partition in hub.partitions] == [0, 0]
    sending.cancel()
    await peer.aclose()
