"""Our client against a service on another engine: rhea, from npm, in JavaScript."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from eventpump.errors import (
    AuthenticationError,
    ConnectionLostError,
    ConsumerDisconnectedError,
    EntityNotFoundError,
    LinkDetachedError,
    Recovery,
    ServiceBusyError,
    ServiceError,
)
from eventpump.eventhubs.envelope import encode_batch
from eventpump.eventhubs.events import EventData, EventPosition
from eventpump.eventhubs.names import BATCH_MESSAGE_FORMAT
from eventpump.interfaces import ReceiveLink, ReceiveLinkSpec, SendLink, SendLinkSpec, Transport
from eventpump.testing.sink import RecordingSink
from tests.authority import Authority
from tests.interop.clients import CLIENTS, NATIVE_WEBSOCKET, UAMQP, ClientKind
from tests.interop.peers.rhea import RheaOptions, RheaServer
from tests.ways import need_uamqp

HUB = RheaServer.hub
PATIENCE = 20.0
WORDS = "moved away. TrackingId:4711_G2_B3, SystemTracker:rhea, Timestamp:2024-01-01T00:00:00"

Serve = Callable[..., AbstractAsyncContextManager[tuple[RheaServer, Transport]]]


UAMQP_CANNOT = {
    "test_attach_to_nowhere_is_refused": "uamqp takes rhea's attach for success, and reports the refusal later",
    "test_unsettled_deliveries_are_accepted": "uamqp settles nothing here: the service sends its events settled",
    "test_send_released_by_rhea_may_be_repeated": "uamqp reports released and modified as rejected",
    "test_link_ended_with_an_error_reports_it[uamqp-end]": "uamqp reports the end of a session as that of a connection",
    "test_close_is_orderly_at_rhea": "uamqp does not wait for the answer to its close, and may cut it off",
    "test_silent_rhea_is_a_lost_connection": "uamqp closes a silent connection twice, which rhea takes amiss",
}
"""What the AMQP stack cannot do, each tried and seen to fail."""
SHORT = {
    "test_connect_to_rhea_passes_the_handshake",
    "test_messages_of_many_frames_pass_rhea",
    "test_connection_closed_with_an_error_reports_it",
    "test_close_is_orderly_at_rhea",
    "test_idle_links_are_kept_alive_by_heartbeats_both_ways",
    "test_silent_rhea_is_a_lost_connection",
}
"""What a WebSocket may change about AMQP; the rest goes over it in the long form only."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each test of `kind` in every way that our client speaks AMQP, or leave one to the long form."""
    if "kind" in metafunc.fixturenames:
        over = pytest.mark.long if metafunc.function.__name__ not in SHORT else ()
        kinds = [pytest.param(each, marks=over if each is NATIVE_WEBSOCKET else ()) for each in CLIENTS]
        metafunc.parametrize("kind", kinds, ids=map(str, CLIENTS), indirect=True)


@pytest.fixture
def kind(request: pytest.FixtureRequest) -> ClientKind:
    """One way our client speaks AMQP."""
    found: ClientKind = request.param
    if found is UAMQP:
        need_uamqp()
        for name in (request.node.originalname, request.node.name):
            if (reason := UAMQP_CANNOT.get(name)) is not None:
                pytest.skip(reason)
    return found


@pytest.fixture
def serve(kind: ClientKind, authority: Authority, server_certificate: Path) -> Serve:
    """Return a function that starts the service, and a transport of ours to it. rhea found no fault in what it got."""

    @asynccontextmanager
    async def start(
        *, client: dict[str, Any] | None = None, **options: Any
    ) -> AsyncIterator[tuple[RheaServer, Transport]]:
        tls = server_certificate if kind.uses_tls else None
        made = RheaOptions(tls=tls, web_socket=kind.uses_web_socket, **options)
        async with RheaServer(made) as server:
            transport = kind.transport(server.connection_string, HUB, authority.file, **(client or {}))
            try:
                yield server, transport
            finally:
                await transport.aclose()
            assert server.stderr == "" or made.log_frames
            assert not [note for note in server.notes if note["note"] == "broken"]

    return start


async def reader(
    transport: Transport, *, credit: int = 1000, position: EventPosition | None = None
) -> tuple[ReceiveLink, RecordingSink]:
    sink = RecordingSink()
    spec = ReceiveLinkSpec(HUB, "$Default", "0", position or EventPosition.earliest())
    link = await transport.open_receive_link(spec, sink)
    if credit:
        link.set_credit(credit)
    return link, sink


async def sender(transport: Transport) -> SendLink:
    return await transport.open_send_link(SendLinkSpec(HUB, "0"))


def encoded(*bodies: bytes) -> list[bytes]:
    return [EventData(body).encode() for body in bodies]


async def failure(use: Any) -> ServiceError:
    with pytest.raises(ServiceError) as caught:
        async with asyncio.timeout(PATIENCE):
            await use
    return caught.value


# --------------------------------------------------------------------------------------------------- handshake


async def test_connect_to_rhea_passes_the_handshake(serve: Serve) -> None:
    """SASL, open, tokens and the hub's description pass, and rhea saw namespace, name and limits of our client."""
    async with serve(partitions=3, client={"idle_timeout": 30.0}) as (server, transport):
        properties = await transport.get_hub_properties(HUB)
        assert (properties.name, properties.partition_ids) == (HUB, ("0", "1", "2"))
        partition = await transport.get_partition_properties(HUB, "2")
        assert (partition.is_empty, partition.last_enqueued_sequence_number) == (True, -1)
        with pytest.raises(EntityNotFoundError):
            await transport.get_hub_properties("elsewhere")
        await reader(transport)
        seen = await server.seen()
        (opened,) = seen["opens"]
        assert opened["hostname"] == transport.fully_qualified_namespace
        assert opened["container_id"]
        assert 512 <= opened["max_frame_size"] <= 2**32 - 1
        host = transport.fully_qualified_namespace
        assert {kind for kind, _ in seen["tokens"]} == {"servicebus.windows.net:sastoken"}
        assert {name for _, name in seen["tokens"]} >= {f"sb://{host}/{HUB}/consumergroups/$Default"}


async def test_attach_to_nowhere_is_refused(serve: Serve) -> None:
    """A refused link is the error of its condition, whatever order rhea puts attach and detach in."""
    async with serve() as (server, transport):
        assert isinstance(await failure(transport.open_send_link(SendLinkSpec("elsewhere", "0"))), EntityNotFoundError)
        assert isinstance(await failure(transport.open_send_link(SendLinkSpec(HUB, "7"))), EntityNotFoundError)
        await server.call("refuse", condition="amqp:link:stolen", description=WORDS)
        error = await failure(reader(transport))
        assert isinstance(error, ConsumerDisconnectedError)
        assert error.tracking_id == "4711_G2_B3"
        await server.call("refuse", condition="amqp:unauthorized-access", description="no right")
        assert isinstance(await failure(sender(transport)), AuthenticationError)
        await reader(transport)


# ---------------------------------------------------------------------------------------------------- messages


async def test_send_and_receive_through_rhea_keep_every_value(serve: Serve) -> None:
    """Single events and batches, sent to rhea and encoded by it again, come back with body, properties and numbers."""
    async with serve() as (server, transport):
        properties = {"symbol": "MSFT", "price": 101.5, "live": True}
        link = await sender(transport)
        await link.send(EventData(b"\x00\xff", properties=properties, message_id="m-1", content_type="text/x").encode())
        batch = encode_batch([EventData(b"%d" % n).encode() for n in range(100)], None)
        await link.send(batch, message_format=BATCH_MESSAGE_FORMAT)
        stored = await server.events(0)
        assert [event.body for event in stored] == [b"\x00\xff", *(b"%d" % n for n in range(100))]
        assert stored[0].properties == properties
        _, sink = await reader(transport)
        assert await sink.received(101) == [event.body for event in stored]
        first = sink.events[0]
        assert (first.properties, first.message_id, first.content_type) == (properties, "m-1", "text/x")
        assert [event.sequence_number for event in sink.events] == list(range(101))
        assert [event.offset for event in sink.events] == [f"{100 * n}" for n in range(101)]
        again, resumed = await reader(transport, position=EventPosition.at_offset(sink.events[97].offset))
        assert await resumed.received(3) == [b"97", b"98", b"99"]
        await again.aclose()


async def test_messages_of_many_frames_pass_rhea(serve: Serve) -> None:
    """Messages larger than a frame go in many, of 512 bytes at rhea's wish, and come whole, in both directions."""
    sizes = [1, 511, 512, 513, 1023, 100_000, 0]
    bodies = [os.urandom(size) for size in sizes]
    async with serve(max_frame_size=512, log_frames=True) as (server, transport):
        link = await sender(transport)
        await asyncio.gather(*(link.send(message) for message in encoded(*bodies)))
        assert server.stderr.count("<- transfer#14") > sum(sizes) / 512
        assert [event.body for event in await server.events(0)] == bodies
        _, sink = await reader(transport)
        assert await sink.received(len(bodies)) == bodies


async def test_messages_of_many_megabytes_pass_rhea(serve: Serve) -> None:
    """Messages larger than the frames of either side, where the link allows them, pass whole, others between them."""
    large = [os.urandom(3_000_000), b"small", os.urandom(1_100_000)]
    async with serve(max_frame_size=65_536, max_message_size=8_000_000) as (_, transport):
        link = await sender(transport)
        assert link.max_message_size == 8_000_000
        await asyncio.gather(*(link.send(message) for message in encoded(*large)))
        _, sink = await reader(transport)
        assert await sink.received(3) == large


# ------------------------------------------------------------------------------------------------ flow control


async def test_send_to_rhea_follows_its_credit(serve: Serve) -> None:
    """Without credit nothing is sent; each grant lets so many messages go, in order, and the rest wait."""
    async with serve(credit_window=0) as (server, transport):
        link = await sender(transport)
        sends = [asyncio.ensure_future(link.send(message)) for message in encoded(b"0", b"1", b"2", b"3", b"4")]
        await transport.get_hub_properties(HUB)
        assert (await server.seen())["transfers"] == 0
        for grant, sent in ((2, 2), (1, 3), (10, 5)):
            await server.call("grant", count=grant)
            async with asyncio.timeout(PATIENCE):
                await asyncio.gather(*sends[:sent])
            await transport.get_hub_properties(HUB)
            assert (await server.seen())["transfers"] == sent
            assert [send.done() for send in sends] == [True] * sent + [False] * (5 - sent)
        assert [event.body for event in await server.events(0)] == [b"0", b"1", b"2", b"3", b"4"]


async def test_receive_from_rhea_follows_our_credit(serve: Serve) -> None:
    """rhea sends no more than it was let; more credit brings more, zero stops it, and nothing is lost or sent twice."""
    async with serve() as (server, transport):
        link = await sender(transport)
        await asyncio.gather(*(link.send(message) for message in encoded(*(b"%d" % n for n in range(300)))))
        receiving, sink = await reader(transport, credit=5)
        await sink.received(5)
        await transport.get_hub_properties(HUB)
        assert len(sink.events) == 5
        assert max(await server.call("credits")) <= 0  # uamqp counts a delivery late
        receiving.set_credit(250)
        await sink.received(255)
        receiving.set_credit(20)
        await sink.received(275)
        await transport.get_hub_properties(HUB)
        assert len(sink.events) == 275
        assert max(await server.call("credits")) <= 0
        receiving.set_credit(1000)
        assert await sink.received(300) == [b"%d" % n for n in range(300)]
        receiving.set_credit(0)
        await transport.get_hub_properties(HUB)
        await transport.get_hub_properties(HUB)
        assert max(await server.call("credits")) <= 0
        await link.send(EventData(b"held back").encode())
        await transport.get_hub_properties(HUB)
        assert len(sink.events) == 300


async def test_unsettled_deliveries_are_accepted(serve: Serve) -> None:
    """Where a service sends unsettled, every delivery is accepted, or it would keep them forever."""
    async with serve(is_settled=False) as (server, transport):
        link = await sender(transport)
        await asyncio.gather(*(link.send(message) for message in encoded(*(b"%d" % n for n in range(50)))))
        _, sink = await reader(transport, credit=100)
        assert len(await sink.received(50)) == 50
        await transport.get_hub_properties(HUB)
        await transport.get_hub_properties(HUB)
        assert (await server.seen())["outcomes"] == ["accepted"] * 50


# --------------------------------------------------------------------------------------------- outcomes and ends


async def test_send_rejected_by_rhea_fails_alone(serve: Serve) -> None:
    """A rejection is the error of its condition, and fails its send alone: the link serves the next."""
    async with serve() as (server, transport):
        link = await sender(transport)
        await server.call("answer", kind="rejected", condition="com.microsoft:server-busy", description=WORDS, count=1)
        busy = await failure(link.send(*encoded(b"a")))
        assert isinstance(busy, ServiceBusyError)
        assert (busy.recovery, busy.tracking_id) == (Recovery.RETRY, "4711_G2_B3")
        await server.call("answer", kind="rejected", condition="amqp:not-allowed", description="never", count=1)
        assert (await failure(link.send(*encoded(b"c")))).recovery is Recovery.GIVE_UP
        assert link.is_attached
        await link.send(*encoded(b"d"))
        assert [event.body for event in await server.events(0)] == [b"d"]


async def test_send_released_by_rhea_may_be_repeated(serve: Serve) -> None:
    """Released or modified, a message was not stored, and may be sent again on the same link."""
    async with serve() as (server, transport):
        link = await sender(transport)
        for outcome in ("released", "modified"):
            await server.call("answer", kind=outcome, count=1)
            assert (await failure(link.send(*encoded(b"a")))).recovery is Recovery.RETRY
        await link.send(*encoded(b"a"))
        assert [event.body for event in await server.events(0)] == [b"a"]


@pytest.mark.parametrize("verb", ["detach", "end"])
async def test_link_ended_with_an_error_reports_it(serve: Serve, verb: str) -> None:
    """A detach or the end of a session passes its error to sink and sender; new links use the same connection."""
    async with serve(credit_window=0) as (server, transport):
        _, sink = await reader(transport)
        link = await sender(transport)
        await server.call("grant", count=1)
        await link.send(*encoded(b"before"))
        await sink.received(1)
        waiting = asyncio.ensure_future(link.send(*encoded(b"waits")))
        await server.call(verb, condition="amqp:link:detach-forced", description=WORDS)
        error = await sink.ended()
        assert isinstance(error, LinkDetachedError)
        assert (error.condition, error.tracking_id) == ("amqp:link:detach-forced", "4711_G2_B3")
        assert error.recovery is Recovery.RELINK
        assert (await failure(waiting)).recovery is Recovery.RELINK
        assert not link.is_attached
        link = await sender(transport)
        await server.call("grant", count=1)
        await link.send(*encoded(b"after"))
        _, again = await reader(transport)
        assert await again.received(2) == [b"before", b"after"]
        assert (sink.bodies, sink.late) == ([b"before"], 0)
        assert len((await server.seen())["opens"]) == 1


async def test_connection_closed_with_an_error_reports_it(serve: Serve) -> None:
    """A close passes its error to every link and to a pending send; the next use connects again."""
    async with serve(credit_window=0) as (server, transport):
        _, sink = await reader(transport)
        link = await sender(transport)
        waiting = asyncio.ensure_future(link.send(*encoded(b"waits")))
        await transport.get_hub_properties(HUB)
        await server.call("close", condition="amqp:connection:forced", description=WORDS)
        error = await sink.ended()
        assert isinstance(error, ConnectionLostError)
        assert (error.condition, error.tracking_id) == ("amqp:connection:forced", "4711_G2_B3")
        assert (await failure(waiting)).recovery is Recovery.RECONNECT
        await server.noted("closed")
        link = await sender(transport)
        await server.call("grant", count=1)
        await link.send(*encoded(b"after"))
        assert len((await server.seen())["opens"]) == 2
        assert [event.body for event in await server.events(0)] == [b"after"]


async def test_close_is_orderly_at_rhea(serve: Serve) -> None:
    """Closing links and transport is a detach and a close without error to rhea, not a cut."""
    async with serve() as (server, transport):
        receiving, _ = await reader(transport)
        link = await sender(transport)
        await receiving.aclose()
        await link.aclose()
        await server.noted("detached", 2)
        await transport.aclose()
        (closed,) = await server.noted("closed")
        assert closed["error"] is None
        assert {note["error"] for note in server.notes if note["note"] == "detached"} == {None}
        assert not [note for note in server.notes if note["note"] == "lost"]


# ---------------------------------------------------------------------------------------------- idle time-outs


async def test_idle_links_are_kept_alive_by_heartbeats_both_ways(serve: Serve) -> None:
    """With nothing to say for several idle time-outs of either side, heartbeats both ways keep the connection."""
    async with serve(idle_time_out=1000, client={"idle_timeout": 1.0}) as (server, transport):
        _, sink = await reader(transport)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(sink.until(lambda: bool(sink.errors)), 3.2)
        await (await sender(transport)).send(*encoded(b"alive"))
        assert await sink.received(1) == [b"alive"]
        assert len((await server.seen())["opens"]) == 1


async def test_silent_rhea_is_a_lost_connection(serve: Serve) -> None:
    """A service that stands still for the idle time-out is a lost connection; awake again, it serves a new one."""
    async with serve(client={"idle_timeout": 0.5}) as (server, transport):
        _, sink = await reader(transport)
        server.child.freeze()
        try:
            error = await sink.ended()
        finally:
            server.child.wake()
        assert isinstance(error, ConnectionLostError)
        assert error.recovery is Recovery.RECONNECT
        _, again = await reader(transport)
        await (await sender(transport)).send(*encoded(b"awake"))
        assert await again.received(1) == [b"awake"]
