"""Clients that have the emulator hold, or decode, more than it has for one: each is refused, and the others go on."""

from __future__ import annotations

import asyncio
import gc
import re
import uuid
import weakref
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import psutil  # type: ignore[import-untyped]  # it comes without types
import pytest

from eventpump import Emulator
from eventpump.amqp.config import ConnectionConfig
from eventpump.amqp.link import Link
from eventpump.amqp.message import AmqpValue, Data, Message, Properties
from eventpump.amqp.performatives import Accepted, Rejected, Source, Target
from eventpump.amqp.session import Session
from eventpump.emulator import bounds, server
from eventpump.emulator.auth import DEFAULT_KEY, DEFAULT_KEY_NAME
from eventpump.eventhubs import cbs, management, sas
from eventpump.eventhubs.names import SAS_TOKEN_TYPE
from eventpump.net import stream
from tests.support.peer import AUDIENCE, AmqpPeer, LinkRefusedError
from tests.support.processes import EmulatorProcess
from tests.support.served import served_connections

KIB = 1024
MIB = 1024 * KIB
EXCEEDED = "amqp:resource-limit-exceeded"


@pytest.fixture
async def emulator() -> AsyncIterator[Emulator]:
    """Serve a hub."""
    async with Emulator({"telemetry": 4}) as started:
        yield started


@pytest.fixture
async def stranger(emulator: Emulator) -> AsyncIterator[AmqpPeer]:
    """Connect without a token."""
    async with await AmqpPeer.connect(emulator) as connected:
        yield connected


async def requests_to(peer: AmqpPeer, node: str, session: Session | None = None) -> Link:
    return await peer.attach(session or await peer.begin(), source=node, target=node, is_receiver=False)


async def answers_of(peer: AmqpPeer, node: str, session: Session, **options: Any) -> Link:
    return await peer.attach(session, source=node, target=node, is_receiver=True, **options)


def overdo(link: Link) -> None:
    """Have a link send messages larger than the peer takes."""
    assert link.remote is not None
    link.remote.max_message_size = None


async def condition_of(peer: AmqpPeer, link: Link) -> str:
    await peer.until(lambda: link in peer.detached)
    error = peer.detached[link]
    assert error is not None
    assert error.description
    assert len(error.description) <= 256
    return str(error.condition)


def request(size: int) -> bytes:
    return Message(body=AmqpValue("x" * size), properties=Properties(message_id="m")).encode()


# ------------------------------------------------------------------------------------------------- request links


async def test_request_links_before_a_token_take_64_kib(stranger: AmqpPeer) -> None:
    """They take 64 KiB, though they state no limit (attach-cbs-sender), and a larger request ends its link only."""
    link, other = await requests_to(stranger, "$cbs"), await requests_to(stranger, "$cbs")
    assert link.remote_max_message_size == (1 << 64) - 1
    assert bounds.REQUEST_WITHOUT_TOKEN == 64 * KIB
    overdo(link)
    link.send(request(65 * KIB))
    stranger.flush()
    assert await condition_of(stranger, link) == "amqp:link:message-size-exceeded"
    assert isinstance(await stranger.send(other, request(60 * KIB)), Accepted)
    assert await stranger.put_token(AUDIENCE) == 202


@pytest.mark.parametrize("node", ["$cbs", "$management"])
async def test_request_links_after_a_token_take_1_mib(peer: AmqpPeer, node: str) -> None:
    """They take 1 MiB, though they state no limit, and a larger request ends its link only."""
    link = await requests_to(peer, node)
    assert link.remote_max_message_size == (1 << 64) - 1
    assert bounds.REQUEST == MIB
    assert isinstance(await peer.send(link, request(MIB - KIB)), Accepted)
    overdo(link)
    link.send(request(2 * MIB))
    peer.flush()
    assert await condition_of(peer, link) == "amqp:link:message-size-exceeded"


@pytest.mark.parametrize("body", [AmqpValue([[]] * 60_000), AmqpValue(dict.fromkeys(range(2000)))])
async def test_request_of_many_values_is_rejected_undecoded(stranger: AmqpPeer, body: AmqpValue) -> None:
    """It is rejected without being decoded."""
    outcome = await stranger.send(await requests_to(stranger, "$cbs"), Message(body=body).encode())
    assert isinstance(outcome, Rejected)
    assert outcome.error is not None
    assert outcome.error.condition == "amqp:decode-error"


async def test_links_before_a_token_are_bounded(stranger: AmqpPeer) -> None:
    """There are a few; with a token there are as many as a client wants, also on that connection."""
    session = await stranger.begin()
    for _ in range(bounds.LINKS_WITHOUT_TOKEN - 2):
        await requests_to(stranger, "$cbs", session)
    assert await stranger.put_token(AUDIENCE, key="wrong") == 401
    for _ in range(2):
        await requests_to(stranger, "$cbs", session)
    with pytest.raises(LinkRefusedError) as refused:
        await requests_to(stranger, "$cbs", session)
    assert refused.value.error.condition == EXCEEDED


async def test_pipelined_token_and_links_are_all_attached(stranger: AmqpPeer) -> None:
    """A token and 256 links in one write: all are attached, so a client that pipelines meets no bound."""
    session, producers = await stranger.begin(), await stranger.begin()
    token = await requests_to(stranger, "$cbs", session)
    signature = sas.generate(AUDIENCE, DEFAULT_KEY_NAME, DEFAULT_KEY, 4_000_000_000)
    token.send(cbs.put_token_request(signature, SAS_TOKEN_TYPE, AUDIENCE, message_id=uuid.uuid4()).encode())
    links = [
        producers.attach(f"link {number}", is_receiver=False, source=Source("me"), target=Target("telemetry"))
        for number in range(256)
    ]
    stranger.flush()
    await stranger.until(lambda: all(link.is_attached for link in links))
    assert stranger.closed is None


# ------------------------------------------------------------------------------------------------------ answers


@pytest.mark.parametrize(("has_token", "size"), [(False, 30 * KIB), (True, 900 * KIB)])
@pytest.mark.parametrize("credit", ["none", "no window"])
async def test_answers_without_credit_are_bounded_in_bytes(
    emulator: Emulator, has_token: bool, size: int, credit: str
) -> None:
    """They wait within bounds in bytes, over all links; then a link is detached, and the next answers find room."""
    mechanism: dict[str, Any] = {}
    if has_token:
        mechanism = {"mechanism": "PLAIN", "initial_response": f"\0{DEFAULT_KEY_NAME}\0{DEFAULT_KEY}".encode()}
    config = ConnectionConfig(container_id="me", incoming_window=0 if credit == "no window" else 5000, **mechanism)
    async with await AmqpPeer.connect(emulator, config) as peer:
        session = await peer.begin()
        service = served_connections(emulator)[0]
        for _ in range(3):
            answers = await answers_of(peer, "$cbs", session, name=str(uuid.uuid4()))
            requests = await requests_to(peer, "$cbs", session)
            if credit == "no window":
                answers.set_credit(1000)
            sent = 0
            message = Message(body=AmqpValue("t"), properties=Properties(message_id="m" * size)).encode()
            while answers not in peer.detached:
                await peer.send(requests, message)
                sent += 1
                assert service.waiting_answers <= service.max_waiting_answers
                assert sent < 100
            assert await condition_of(peer, answers) == EXCEEDED
            assert service.waiting_answers == 0
            assert sent * size > service.max_waiting_answers / 2
            requests.detach()


async def test_answer_larger_than_the_client_takes_ends_its_link(peer: AmqpPeer) -> None:
    """It ends the link that it was to go on, and no more."""
    session = await peer.begin()
    answers = await answers_of(peer, "$management", session, max_message_size=100)
    requests = await requests_to(peer, "$management", session)
    answers.set_credit(10)
    await peer.send(requests, management.hub_request("telemetry", message_id="m").encode())
    assert await condition_of(peer, answers) == "amqp:link:message-size-exceeded"
    assert requests.is_attached


# ------------------------------------------------------------------------------------------------------ messages


async def test_large_messages_to_256_partitions_in_turn_are_stored(request: pytest.FixtureRequest) -> None:
    """A client that sends frame by frame in turn meets no bound: every message is stored. The long form: 1 MiB each."""
    size = (MIB if request.config.getoption("--long") else 160 * KIB) - 64
    async with Emulator({"telemetry": 256}) as emulator, await AmqpPeer.connect(emulator) as peer:
        assert await peer.put_token(AUDIENCE) == 202
        session = await peer.begin()
        links = [
            session.attach(
                str(number), is_receiver=False, source=Source("me"), target=Target(f"telemetry/Partitions/{number}")
            )
            for number in range(256)
        ]
        peer.flush()
        await peer.until(lambda: all(link.credit > 0 for link in links))
        payload = Message(body=Data((bytes(size),))).encode()
        frames: list[list[bytes | memoryview]] = []
        for link in links:
            link.send(payload)
            frames.append(list(peer.engine.output))
            peer.engine.output.clear()
        service = served_connections(emulator)[0]
        last = max(map(len, frames)) - 2
        for turn in range(0, last, 2):
            for pieces in frames:
                peer.engine.output.extend(pieces[turn : turn + 2])
        extra = await peer.attach(await peer.begin(), target="telemetry")  # answered behind all of them
        assert extra.is_attached
        assert service.engine.unfinished_bytes.count == sum(sum(map(len, pieces[1:last:2])) for pieces in frames)
        for pieces in frames:
            peer.engine.output.extend(pieces[last:])
        peer.flush()
        await peer.until(lambda: sum(len(peer.outcomes[link]) for link in links) == 256)
        assert all(isinstance(outcome, Accepted) for link in links for outcome in peer.outcomes[link].values())
        assert service.engine.unfinished_bytes.count == 0


async def test_event_with_a_million_annotations_is_rejected(peer: AmqpPeer) -> None:
    """It is rejected, and its producer goes on."""
    link = await peer.attach(await peer.begin(), target="telemetry")
    bomb = Message(body=Data((b"x",)), message_annotations={"x": [[]] * (MIB - KIB)}).encode()
    outcome = await peer.send(link, bomb)
    assert isinstance(outcome, Rejected)
    assert outcome.error is not None
    assert outcome.error.condition == "amqp:decode-error"
    assert isinstance(await peer.send(link, Message(body=Data((b"x",))).encode()), Accepted)


# ------------------------------------------------------------------------------------------------------ endings


async def test_ended_connection_is_freed_without_the_collector(emulator: Emulator) -> None:
    """With its client gone, nothing of a connection waits for the cyclic collector."""
    peer = await AmqpPeer.connect(emulator)
    assert await peer.put_token(AUDIENCE) == 202
    session = await peer.begin()
    await peer.attach(session, target="telemetry")
    await peer.attach(session, source="telemetry/ConsumerGroups/$Default/Partitions/0")
    await answers_of(peer, "$cbs", session)
    service = served_connections(emulator)[0]
    links = [weakref.ref(link) for each in service.engine.sessions.values() for link in each.links.values()]
    references: list[weakref.ref[Any]] = [*links, weakref.ref(service), weakref.ref(service.engine)]
    assert len(links) >= 3
    gc.collect()
    gc.disable()
    try:
        closed = service.closed
        del service
        await peer.aclose()
        await closed
        del closed
        for _ in range(3):
            await asyncio.sleep(0)
        assert [reference() for reference in references] == [None] * len(references)
    finally:
        gc.enable()


# ------------------------------------------------------------------------------------------------- a real process

ROOM = 64 * MIB
"""What the process may grow by under all attacks together: the bounds of twenty connections, and what Python keeps."""


async def hoard(port: int) -> bytes:
    """Send one WebSocket message that does not end.

    Returns:
        What the server said in the end.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(
        b"GET /$servicebus/websocket HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n"
        b"Sec-WebSocket-Protocol: AMQPWSB10\r\n\r\n"
    )
    await reader.readuntil(b"\r\n\r\n")
    start, piece = b"\x02", bytes(256 * KIB)
    answer = b""
    try:
        for _ in range(80):
            writer.write(start + b"\xff" + len(piece).to_bytes(8, "big") + bytes(4) + piece)
            await writer.drain()
            start = b"\x00"
        answer = await reader.read()
    except ConnectionError:
        answer = answer or b"cut"
    finally:
        writer.close()
    return answer


async def test_memory_held_by_hostile_clients_is_bounded() -> None:
    """Clients without a token that have it hold what they can: it grows by little, and another client is served."""
    async with EmulatorProcess("telemetry:2", arguments=("--ws-port", "0")) as service:
        found = re.search(r":(\d+);", (await service.child.line("Endpoint=", after=1)).string)
        assert found is not None
        ws_port = int(found.group(1))
        process = psutil.Process(service.child.pid)
        where = SimpleNamespace(host="127.0.0.1", port=service.port)
        peers = [await AmqpPeer.connect(where) for _ in range(4)]
        before = process.memory_info().rss
        # Messages that do not end.
        for peer in peers[:2]:
            session = await peer.begin()
            for _ in range(bounds.LINKS_WITHOUT_TOKEN):
                link = await requests_to(peer, "$cbs", session)
                overdo(link)
                session.remote_incoming_window = 1000
                link.send(bytes(6 * MIB))
                peer.engine.output[-2:] = []  # all but the last frame
                peer.flush()
                await condition_of(peer, link)
        # Answers that are not read.
        session = await peers[2].begin()
        message = Message(body=AmqpValue("t"), properties=Properties(message_id="m" * 60 * KIB)).encode()
        for _ in range(60):
            answers = await answers_of(peers[2], "$cbs", session, name=str(uuid.uuid4()))
            requests = await requests_to(peers[2], "$cbs", session)
            for _ in range(10):
                requests.send(message)
            peers[2].flush()
            assert await condition_of(peers[2], answers) == EXCEEDED
            requests.detach()
        # Attaches that hold much.
        session = await peers[3].begin()
        for number in range(200):
            session.attach(
                str(number),
                is_receiver=False,
                source=Source("a"),
                target=Target("$cbs"),
                properties={"x": "y" * 60_000},
            )
        peers[3].flush()
        await peers[3].until(lambda: peers[3].closed is not None)
        assert peers[3].closed is not None
        assert peers[3].closed.error is not None
        assert peers[3].closed.error.condition == EXCEEDED
        # WebSocket messages that do not end.
        assert all(await asyncio.gather(*(hoard(ws_port) for _ in range(10))))
        assert process.memory_info().rss - before < ROOM
        async with await AmqpPeer.connect(where) as client:
            assert await client.put_token(AUDIENCE) == 202
            assert isinstance(
                await client.send(
                    await client.attach(await client.begin(), target="telemetry"), Message(body=Data((b"x",))).encode()
                ),
                Accepted,
            )
        for peer in peers:
            await peer.aclose()


# ------------------------------------------------------------------------------------------------- no AMQP at all


@pytest.mark.parametrize("call", ["aclose", "restart"])
async def test_stop_does_not_wait_for_a_client_that_broke_a_rule(
    emulator: Emulator, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that got its close and does not end the stream is cut off when the emulator stops."""
    monkeypatch.setattr(stream, "LINGER", 3600.0)
    monkeypatch.setattr(stream, "CLOSE_TIMEOUT", 3600.0)
    monkeypatch.setattr(server, "STOP_TIMEOUT", 3600.0)
    reader, writer = await asyncio.open_connection("127.0.0.1", emulator.port)
    writer.write(b"GET / HTTP/1.1\r\n\r\n")
    assert (await reader.readexactly(4)) == b"AMQP"
    async with asyncio.timeout(20):
        await getattr(emulator, call)()
        await reader.read()
    writer.close()
