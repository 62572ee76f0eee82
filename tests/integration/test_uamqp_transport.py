"""uamqp on real sockets: what is its own, beside the contract that it shares with the native transport."""

from __future__ import annotations

import asyncio
import datetime
import os
import queue
import socket
import ssl
import threading
import uuid
from collections.abc import AsyncIterator
from typing import Any

import pytest

from eventpump.amqp.message import AmqpSequence, AmqpValue, Data, Message, Properties
from eventpump.amqp.performatives import AmqpError
from eventpump.amqp.types import Char, Int, Symbol, Timestamp
from eventpump.emulator.faults import CloseConnection, DetachLink, LinkRole
from eventpump.emulator.server import Emulator
from eventpump.errors import (
    ClosedError,
    ConnectionLostError,
    EntityNotFoundError,
    EventError,
    LinkDetachedError,
    Recovery,
)
from eventpump.eventhubs.events import EventData, EventPosition, ReceivedEvent
from eventpump.interfaces import ReceiveLinkSpec, SendLinkSpec
from eventpump.options.connection import connection_settings
from eventpump.testing.sink import PATIENCE, RecordingSink
from eventpump.transport.native import NativeTransport
from eventpump.transport.uamqp.pace import Pace
from tests.authority import Authority
from tests.support.connecting import connection_string_to
from tests.ways import need_uamqp

need_uamqp()

from eventpump.transport.uamqp.transport import UamqpTransport  # noqa: E402
from eventpump.transport.uamqp.worker import HANDLES, SESSIONS, Ask, Worker, WorkerEndpoint  # noqa: E402
from tests.support.served import served_connections  # noqa: E402

HUB = "telemetry"
EARLIEST = EventPosition.earliest()


@pytest.fixture
async def emulator(authority: Authority) -> AsyncIterator[Emulator]:
    """A service with TLS. When the test is over, neither a task nor a thread of uamqp is left."""
    async with Emulator({HUB: 2}, tls=authority.server("127.0.0.1")) as started:
        yield started
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert threads() == []


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("uamqp ")]


def transport_to(emulator: Emulator, authority: Authority, **options: Any) -> UamqpTransport:
    settings = connection_settings(
        emulator.connection_string, HUB, **{"ca_file": authority.file, "transport": "uamqp", **options}
    )
    return UamqpTransport(settings)


def reading(partition_id: str = "0", hub: str = HUB) -> ReceiveLinkSpec:
    return ReceiveLinkSpec(hub, "$Default", partition_id, EARLIEST)


# --------------------------------------------------------------------------------------------------- connecting


async def test_connect_with_an_invalid_certificate_gives_up(authority: Authority) -> None:
    """Another host's, an expired and an untrusted certificate are each one clear error to give up on."""
    past = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
    cases = [
        (authority.server("127.0.0.1"), None, "self-signed certificate|unable to get local issuer"),
        (authority.server("elsewhere.test"), authority.file, "IP address mismatch|not valid for '127.0.0.1'"),
        (authority.server("127.0.0.1", not_after=past), authority.file, "expired"),
    ]
    for tls, ca_file, reason in cases:
        async with Emulator({HUB: 1}, tls=tls) as emulator:
            transport = transport_to(emulator, authority, ca_file=ca_file)
            with pytest.raises(ConnectionLostError, match=reason) as caught:
                await transport.get_hub_properties(HUB)
            assert caught.value.recovery is Recovery.GIVE_UP
            await transport.aclose()


async def test_connect_verifies_again_within_uamqp(authority: Authority, tmp_path: Any) -> None:
    """A server that shows a good certificate to the first who comes, and another's to uamqp, gets nothing from it."""
    other = Authority.new(tmp_path)
    good, bad = authority.server("127.0.0.1"), other.server("127.0.0.1")
    shown: list[ssl.SSLContext] = []

    def choose(stream: Any, name: str | None, context: ssl.SSLContext) -> None:
        shown.append(bad if shown else good)
        stream.context = shown[-1]

    good.sni_callback = choose
    async with Emulator({HUB: 1}, tls=good) as emulator:
        transport = transport_to(emulator, authority, operation_timeout=1.0)
        with pytest.raises(ConnectionLostError, match="no answer"):
            await transport.get_hub_properties(HUB)
        assert shown == [good, bad]
        await transport.aclose()
    assert threads() == []


async def test_connect_to_a_custom_endpoint_verifies_its_host(authority: Authority) -> None:
    """A custom endpoint's host is dialled and verified; the open names the namespace."""
    text = (
        "Endpoint=sb://example.servicebus.windows.net/;SharedAccessKeyName=RootManageSharedAccessKey;SharedAccessKey="
    )
    name = "example.servicebus.windows.net"
    async with Emulator({HUB: 1}, key="k3y", tls=authority.server("localhost"), names=[name]) as emulator:
        endpoint = f"localhost:{emulator.port}"
        settings = connection_settings(
            text + "k3y", HUB, custom_endpoint_address=endpoint, ca_file=authority.file, transport="uamqp"
        )
        transport = UamqpTransport(settings)
        await transport.get_hub_properties(HUB)
        (connection,) = served_connections(emulator)
        assert connection.engine.remote is not None
        assert connection.engine.remote.hostname == "example.servicebus.windows.net"
        await transport.aclose()


async def test_connect_without_an_answer_does_not_stop_the_loop(authority: Authority) -> None:
    """While a host answers no connection the event loop goes on, though uamqp would hold up every thread."""
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.01)
            ticks += 1

    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(0)
        crowd = [socket.socket() for _ in range(3)]  # more than it keeps waiting: the next one gets no answer
        for each in crowd:
            each.setblocking(False)
            each.connect_ex(deaf.getsockname())
        text = connection_string_to("127.0.0.1", deaf.getsockname()[1])
        settings = connection_settings(text, HUB, ca_file=authority.file, transport="uamqp", operation_timeout=1.0)
        transport = UamqpTransport(settings)
        ticking = asyncio.create_task(tick())
        with pytest.raises(ConnectionLostError, match="no answer"):
            await transport.get_hub_properties(HUB)
        ticking.cancel()
        await asyncio.gather(ticking, return_exceptions=True)
        for each in crowd:
            each.close()
    await transport.aclose()
    assert ticks >= 10


def test_loop_that_ends_ends_the_thread(authority: Authority) -> None:
    """A transport that was not closed keeps no thread once its event loop is gone, though the service is there."""
    started: queue.SimpleQueue[tuple[Emulator, asyncio.AbstractEventLoop, asyncio.Event]] = queue.SimpleQueue()

    async def serve() -> None:
        end = asyncio.Event()
        async with Emulator({HUB: 1}, tls=authority.server("127.0.0.1")) as emulator:
            started.put((emulator, asyncio.get_running_loop(), end))
            await end.wait()

    async def leave(emulator: Emulator) -> None:
        await transport_to(emulator, authority).get_hub_properties(HUB)
        assert len(threads()) == 1

    service = threading.Thread(target=lambda: asyncio.run(serve()))
    service.start()
    emulator, loop, end = started.get()
    try:
        asyncio.run(leave(emulator))
        for thread in threads():
            thread.join(PATIENCE)
        assert threads() == []
    finally:
        loop.call_soon_threadsafe(end.set)
        service.join()


async def test_close_while_connecting_leaves_no_thread(authority: Authority) -> None:
    """Closed while the service says nothing, a transport is gone with its thread when `aclose` returns."""
    reached = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if await reader.read(1):  # the first connection only sees whether there is a way
            reached.set()
        await reader.read()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0, ssl=authority.server("127.0.0.1"))
    text = connection_string_to("127.0.0.1", server.sockets[0].getsockname()[1])
    transport = UamqpTransport(connection_settings(text, HUB, ca_file=authority.file, transport="uamqp"))
    opening = asyncio.ensure_future(transport.get_hub_properties(HUB))
    async with asyncio.timeout(PATIENCE):
        await reached.wait()
        assert len(threads()) == 1
        await transport.aclose()
    assert threads() == []
    assert isinstance((await asyncio.gather(opening, return_exceptions=True))[0], ClosedError)
    server.close()
    await server.wait_closed()


@pytest.mark.parametrize("is_lost", [True, False], ids=["lost", "stopped"])
async def test_incoming_bytes_are_looked_at_at_once(emulator: Emulator, authority: Authority, is_lost: bool) -> None:
    """A connection opens, is lost, or carries out a request, though its thread polls only once a minute."""
    loop = asyncio.get_running_loop()
    opened, lost, ended = loop.create_future(), loop.create_future(), loop.create_future()

    class Owner:
        def on_calls(self, calls: list[Ask]) -> None:
            for what, arguments in calls:
                what(*arguments)

        def on_opened(self) -> None:
            opened.set_result(None)

        def on_closed(self, error: AmqpError | None) -> None:
            raise AssertionError("it is not closed")

        def on_lost(self, reason: str | None) -> None:
            lost.set_result(reason)

        def on_ended(self) -> None:
            ended.set_result(None)

    endpoint = WorkerEndpoint("127.0.0.1", emulator.port, "127.0.0.1", "slow", 60.0, str(authority.file), {})
    worker = Worker(endpoint, Owner(), loop, pace=Pace(60.0, 60.0))
    worker.start()
    async with asyncio.timeout(PATIENCE):
        await opened
        if is_lost:
            emulator.drop_connections()
            await lost
        else:
            worker.stop()
        await ended
    worker.join()


# ----------------------------------------------------------------------------------------------------- messages


BODIES: dict[str, Data | AmqpValue | AmqpSequence] = {
    "data": Data((b"one", b"two", b"")),
    "value": AmqpValue({"key": [1, "x", None, True, 2.5, uuid.UUID(int=7)]}),
    "sequence": AmqpSequence(([1, 2], ["x"])),
}


@pytest.mark.parametrize("kind", BODIES)
@pytest.mark.parametrize("is_sent", [True, False], ids=["sent", "received"])
async def test_messages_equal_those_of_the_native_transport(
    emulator: Emulator, authority: Authority, kind: str, is_sent: bool
) -> None:
    """Every section and kind of body is the same to a native reader of uamqp's events, and the other way round.

    A body of sequences cannot be sent, and says so.
    """
    message = Message(
        body=BODIES[kind],
        properties=Properties(message_id=uuid.UUID(int=1), subject="a", correlation_id="c", content_type="text/plain"),
        application_properties={"long": 1 << 40, "int": Int(5), "time": Timestamp(99), "text": "ä", "none": None},
        message_annotations={Symbol("x-opt-mine"): "kept"},
        footer={Symbol("end"): b"f"},
    )
    uamqp = transport_to(emulator, authority)
    native = NativeTransport(connection_settings(emulator.connection_string, HUB, ca_file=authority.file))
    sender, receiver = (uamqp, native) if is_sent else (native, uamqp)
    link = await sender.open_send_link(SendLinkSpec(HUB, "0"))
    if is_sent and kind == "sequence":
        with pytest.raises(EventError, match="uamqp cannot carry"):
            await link.send(message.encode())
    else:
        await link.send(message.encode())
        sink = RecordingSink()
        (await receiver.open_receive_link(reading(), sink)).set_credit(1)
        await sink.until(lambda: bool(sink.batches))
        found = Message.decode(sink.batches[0][0])
        assert found.message_annotations is not None
        assert found.message_annotations.pop(Symbol("x-opt-mine")) == "kept"
        found.message_annotations = message.message_annotations
        assert repr(found) == repr(Message.decode(message.encode()))
    await uamqp.aclose()
    await native.aclose()


async def test_send_of_a_value_unknown_to_uamqp_fails_alone(emulator: Emulator, authority: Authority) -> None:
    """A message with a value that uamqp does not know is refused to its sender alone; the link goes on."""
    transport = transport_to(emulator, authority)
    link = await transport.open_send_link(SendLinkSpec(HUB, "0"))
    odd = Message(body=Data((b"x",)), application_properties={"key": Char("x")}).encode()
    outcomes = await asyncio.gather(
        link.send(EventData(b"before").encode()),
        link.send(odd),
        link.send(EventData(b"after").encode()),
        return_exceptions=True,
    )
    assert [type(outcome) for outcome in outcomes] == [type(None), EventError, type(None)]
    assert link.is_attached
    assert (await transport.get_partition_properties(HUB, "0")).last_enqueued_sequence_number == 1
    await transport.aclose()


async def test_receive_of_a_value_unknown_to_uamqp_ends_the_link(emulator: Emulator, authority: Authority) -> None:
    """At an event with a value that uamqp does not know its link ends: what comes behind is not handed over."""
    native = NativeTransport(connection_settings(emulator.connection_string, HUB, ca_file=authority.file))
    link = await native.open_send_link(SendLinkSpec(HUB, "0"))
    odd = Message(body=Data((b"odd",)), application_properties={"key": Char("x")}).encode()
    for raw in (EventData(b"before").encode(), odd, EventData(b"after").encode()):
        await link.send(raw)
    await native.aclose()
    transport = transport_to(emulator, authority)
    sink = RecordingSink()
    (await transport.open_receive_link(reading(), sink)).set_credit(10)
    error = await sink.ended()
    assert isinstance(error, ConnectionLostError)
    assert "cannot decode" in str(error)
    assert sink.bodies == [b"before"]
    await transport.aclose()


async def test_receive_of_large_messages_takes_one_credit_each(emulator: Emulator, authority: Authority) -> None:
    """Messages of many frames count as one each, whatever the credit is set to on the way."""
    native = NativeTransport(connection_settings(emulator.connection_string, HUB, ca_file=authority.file))
    link = await native.open_send_link(SendLinkSpec(HUB, "0"))
    bodies = [os.urandom(400_000) for _ in range(6)]
    for body in bodies:
        await link.send(EventData(body).encode())
    await native.aclose()
    transport = transport_to(emulator, authority)
    sink = RecordingSink()
    reader = await transport.open_receive_link(reading(), sink)
    for count in (1, 3, 5):
        reader.set_credit(count - len(sink.bodies))
        await sink.received(count)
        await transport.get_partition_properties(HUB, "0")
        assert sink.bodies == bodies[:count]
    await transport.aclose()


# -------------------------------------------------------------------------------------------------- links and ends


async def test_close_by_the_service_reports_condition_and_words(emulator: Emulator, authority: Authority) -> None:
    """The service's close and detach come with its condition and words, to sender and reader."""
    transport = transport_to(emulator, authority)
    sink = RecordingSink()
    (await transport.open_receive_link(reading("1"), sink)).set_credit(1)
    link = await transport.open_send_link(SendLinkSpec(HUB, "0"))
    emulator.faults.add(DetachLink("amqp:link:detach-forced", "moved away"), role=LinkRole.PRODUCER)
    with pytest.raises(LinkDetachedError, match="moved away") as detached:
        await link.send(EventData(b"x").encode())
    assert detached.value.recovery is Recovery.RELINK
    link = await transport.open_send_link(SendLinkSpec(HUB, "0"))
    emulator.faults.add(CloseConnection("amqp:connection:forced", "upgrading"), role=LinkRole.PRODUCER)
    with pytest.raises(ConnectionLostError, match="upgrading"):
        await link.send(EventData(b"x").encode())
    error = await sink.ended()
    assert isinstance(error, ConnectionLostError)
    assert (error.condition, error.recovery) == ("amqp:connection:forced", Recovery.RECONNECT)
    await transport.aclose()


async def test_attach_refused_until_handles_are_used_up_reconnects(emulator: Emulator, authority: Authority) -> None:
    """Refused receivers keep their handles; when there are none left, another connection has them all."""
    transport = transport_to(emulator, authority)
    errors: list[type[Exception]] = []
    for _ in range(SESSIONS * HANDLES + 10):
        try:
            await transport.open_receive_link(ReceiveLinkSpec(HUB, "nothere", "0", EARLIEST), RecordingSink())
        except (EntityNotFoundError, ConnectionLostError) as error:
            errors.append(type(error))
    assert errors.count(ConnectionLostError) == 1
    assert errors.index(ConnectionLostError) > (SESSIONS - 1) * HANDLES
    sink = RecordingSink()
    (await transport.open_receive_link(reading(), sink)).set_credit(1)
    await (await transport.open_send_link(SendLinkSpec(HUB, "0"))).send(EventData(b"x").encode())
    assert await sink.received(1) == [b"x"]
    await transport.aclose()


async def test_links_beyond_a_session_share_one_connection(emulator: Emulator, authority: Authority) -> None:
    """More links than one session holds go over one connection, and each carries what is its own."""
    transport = transport_to(emulator, authority)
    specs = [SendLinkSpec(HUB, str(number % 2)) for number in range(HANDLES + 50)]
    links = await asyncio.gather(*map(transport.open_send_link, specs))
    await asyncio.gather(*(link.send(EventData(b"%d" % n).encode()) for n, link in enumerate(links)))
    assert emulator.connection_count == 1
    sinks = [RecordingSink(), RecordingSink()]
    for partition, sink in enumerate(sinks):
        (await transport.open_receive_link(reading(str(partition)), sink)).set_credit(1000)
    bodies = await sinks[0].received((HANDLES + 51) // 2) + await sinks[1].received((HANDLES + 50) // 2)
    assert sorted(map(int, bodies)) == list(range(HANDLES + 50))
    assert all(ReceivedEvent(raw).body for sink in sinks for batch in sink.batches for raw in batch)
    await transport.aclose()
