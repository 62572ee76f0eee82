"""The interop matrix: each of our clients with each service, and each peer with the emulator."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from eventpump import Emulator, EventData, EventProducer
from eventpump.eventhubs.envelope import encode_batch
from eventpump.eventhubs.events import EventPosition
from eventpump.eventhubs.names import BATCH_MESSAGE_FORMAT
from eventpump.interfaces import ReceiveLinkSpec, SendLinkSpec, Transport
from eventpump.testing.sink import RecordingSink
from tests.authority import Authority
from tests.interop.clients import CLIENTS, UAMQP, ClientKind
from tests.interop.matrix import EMULATOR, NOTE, PEERS, PROPERTY, RHEA, cell_of
from tests.interop.peers import driver, javascript
from tests.interop.peers.driver import AzurePeer
from tests.interop.peers.javascript import JavaScriptPeer
from tests.interop.peers.lines import PeerError
from tests.interop.peers.rhea import RheaOptions, RheaServer
from tests.interop.peers.uamqp import converse_by_uamqp
from tests.support.reading import read_bodies
from tests.ways import need_uamqp

pytestmark = pytest.mark.asyncio(loop_scope="session")

HUB = "telemetry"
PATIENCE = 40.0
BODIES = [b"first", os.urandom(300_000), b"\x00\xff", *(b"%d" % number for number in range(50))]
"""Among them one of several frames."""

Record = Callable[[str, object], None]


@pytest_asyncio.fixture(loop_scope="session")
async def plain() -> AsyncIterator[Emulator]:
    """Serve on TCP, and WebSockets too, without TLS."""
    async with Emulator({HUB: 2}, ws_port=0) as service:
        yield service


@pytest_asyncio.fixture(loop_scope="session")
async def secure(authority: Authority) -> AsyncIterator[Emulator]:
    """The same over TLS."""
    async with Emulator({HUB: 2}, ws_port=0, tls=authority.server("localhost", "127.0.0.1")) as service:
        yield service


# ----------------------------------------------------------------------------------------------------- our clients


async def converse(transport: Transport) -> None:
    """Describe the hub, publish single events and a batch, read all of it over a link with little credit, close."""
    try:
        assert (await transport.get_hub_properties(HUB)).partition_ids == ("0", "1")
        sender = await transport.open_send_link(SendLinkSpec(HUB, "0"))
        for body in BODIES[:3]:
            await sender.send(EventData(body).encode())
        batch = encode_batch([EventData(body).encode() for body in BODIES[3:]], None)
        await sender.send(batch, message_format=BATCH_MESSAGE_FORMAT)
        sink = RecordingSink()
        spec = ReceiveLinkSpec(HUB, "$Default", "0", EventPosition.earliest())
        receiver = await transport.open_receive_link(spec, sink)
        for count in range(10, len(BODIES) + 10, 10):
            receiver.set_credit(10)
            await sink.received(min(count, len(BODIES)))
        assert sink.bodies == BODIES
        assert [event.sequence_number for event in sink.events] == list(range(len(BODIES)))
        properties = await transport.get_partition_properties(HUB, "0")
        assert properties.last_enqueued_sequence_number == len(BODIES) - 1
        await receiver.aclose()
        await sender.aclose()
    finally:
        await transport.aclose()


@pytest.mark.parametrize("kind", CLIENTS, ids=str)
async def test_matrix_of_our_client_and_the_emulator(
    kind: ClientKind, plain: Emulator, secure: Emulator, authority: Authority, record_property: Record
) -> None:
    """It connects, describes, publishes and reads."""
    record_property(PROPERTY, cell_of(kind.name, EMULATOR))
    if kind is UAMQP:
        need_uamqp()
    service = secure if kind.uses_tls else plain
    string = service.ws_connection_string if kind.uses_web_socket else service.connection_string
    await converse(kind.transport(string, HUB, authority.file))


@pytest.mark.parametrize("kind", CLIENTS, ids=str)
async def test_matrix_of_our_client_and_rhea(
    kind: ClientKind, authority: Authority, server_certificate: Path, record_property: Record
) -> None:
    """It does the same with a service on another engine; `test_rhea.py` has the rest."""
    record_property(PROPERTY, cell_of(kind.name, RHEA))
    if kind is UAMQP:
        need_uamqp()
    tls = server_certificate if kind.uses_tls else None
    # Frames as the real service has them: of a peer that names no size uamqp makes nothing.
    options = RheaOptions(max_frame_size=65_536, tls=tls, web_socket=kind.uses_web_socket)
    async with RheaServer(options) as server:
        await converse(kind.transport(server.connection_string, HUB, authority.file))
        assert server.stderr == ""


# ----------------------------------------------------------------------------------------------------------- peers


async def publish(service: Emulator, authority: Authority, *bodies: bytes) -> None:
    """Publish by our own producer, on TCP."""
    trust: dict[str, Any] = {} if service.connection_string.endswith("=true") else {"ca_file": authority.file}
    async with EventProducer(service.connection_string, HUB, **trust) as producer:
        await producer.send([EventData(body) for body in bodies], partition_id="0")


async def stored(service: Emulator, authority: Authority) -> list[bytes]:
    """Read by our own reader, on TCP."""
    trust: dict[str, Any] = {} if service.connection_string.endswith("=true") else {"ca_file": authority.file}
    return await read_bodies(service.connection_string, HUB, "0", **trust)


@pytest.mark.parametrize("name", PEERS[:2])
async def test_matrix_of_azure_eventhub(
    name: str, plain: Emulator, secure: Emulator, authority: Authority, record_property: Record, azure: AzurePeer
) -> None:
    """azure-eventhub describes the hub, publishes what we read, and reads what we publish."""
    record_property(PROPERTY, cell_of(name, EMULATOR))
    service, options = plain, dict[str, Any]()
    if name.endswith("WebSocket"):
        service = secure
        options = {
            "transport_type": "AmqpOverWebsocket",
            "custom_endpoint_address": f"sb://127.0.0.1:{secure.ws_port}",
            "connection_verify": str(authority.file),
        }
    producer = await azure.producer(service.connection_string, HUB, **options)
    assert (await producer.hub_properties())["partition_ids"] == ["0", "1"]
    for body in BODIES[:3]:
        await producer.send([driver.event(body)], "batch", PATIENCE, partition_id="0")
    await producer.send([driver.event(body) for body in BODIES[3:]], "batch", PATIENCE, partition_id="0")
    assert await stored(service, authority) == BODIES
    consumer = await azure.consumer(
        service.connection_string, HUB, client=options, partition_id="0", starting_position="-1"
    )
    await consumer.receive(len(BODIES), PATIENCE)
    await publish(service, authority, b"from us")
    found = await consumer.receive(len(BODIES) + 1, PATIENCE)
    assert [event.data for event in found] == [*BODIES, b"from us"]


async def test_matrix_of_azure_eventhub_on_uamqp(
    secure: Emulator, authority: Authority, record_property: Record, azure: AzurePeer
) -> None:
    """azure-eventhub on uamqp describes the hub and reads what we publish; its producer cannot attach anywhere."""
    record_property(PROPERTY, cell_of(PEERS[2], EMULATOR))
    need_uamqp()
    record_property(NOTE, "receives only: the producer of 5.15.1 gives uamqp its capabilities in a form uamqp refuses")
    options: dict[str, Any] = {
        "uamqp_transport": True,
        "transport_type": "Amqp",
        "custom_endpoint_address": f"sb://127.0.0.1:{secure.port}",
        "connection_verify": str(authority.file),
    }
    consumer = await azure.consumer(
        secure.connection_string, HUB, client=options, partition_id="0", starting_position="-1"
    )
    assert (await consumer.hub_properties())["partition_ids"] == ["0", "1"]
    assert (await consumer.partition_properties("0"))["is_empty"]
    await publish(secure, authority, *BODIES)
    found = await consumer.receive(len(BODIES), PATIENCE)
    assert [event.data for event in found] == BODIES
    assert [event.sequence_number for event in found] == list(range(len(BODIES)))
    producer = await azure.producer(secure.connection_string, HUB, **options, retry_total=0)
    with pytest.raises(PeerError, match="desired_capabilities"):
        await producer.send([driver.event(b"x")], "batch", PATIENCE, partition_id="0")


@pytest.mark.parametrize("name", PEERS[3:5])
async def test_matrix_of_azure_event_hubs_for_javascript(
    name: str, plain: Emulator, secure: Emulator, authority: Authority, record_property: Record
) -> None:
    """@azure/event-hubs describes the hub, publishes what we read, and reads what we publish."""
    record_property(PROPERTY, cell_of(name, EMULATOR))
    is_web_socket = name.endswith("WebSocket")
    service = secure if is_web_socket else plain
    string = service.ws_connection_string if is_web_socket else service.connection_string
    options: dict[str, Any] = {"webSocket": is_web_socket}
    async with JavaScriptPeer(authority.file) as peer:
        producer = await peer.producer(string, HUB, **options)
        assert await producer.describe() == {"name": HUB, "partitionIds": ["0", "1"]}
        for body in BODIES[:3]:
            await producer.send([javascript.event(body)], partitionId="0")
        await producer.send_in_batch([javascript.event(body) for body in BODIES[3:]], partitionId="0")
        assert await stored(service, authority) == BODIES
        consumer = await peer.consumer(string, HUB, "0", client=options)
        await consumer.receive(len(BODIES))
        await publish(service, authority, b"from us")
        assert await consumer.receive(len(BODIES) + 1) == [*BODIES, b"from us"]


async def test_matrix_of_uamqp_without_our_transport(
    secure: Emulator, authority: Authority, record_property: Record
) -> None:
    """uamqp by itself, without our transport around it, publishes what we read, and reads what we publish."""
    record_property(PROPERTY, cell_of(PEERS[5], EMULATOR))
    need_uamqp()
    await publish(secure, authority, b"from us")
    found = await converse_by_uamqp(secure, authority, HUB, BODIES, len(BODIES) + 1)
    assert [bytes.fromhex(each["body"]) for each in found] == [b"from us", *BODIES]
    assert [each["sequence_number"] for each in found] == list(range(len(BODIES) + 1))
    assert await stored(secure, authority) == [b"from us", *BODIES]
