"""The native transport on real sockets: TLS, endpoints, sizes, dead peers, and what is left when it is closed."""

from __future__ import annotations

import asyncio
import datetime
import os
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import trustme

from eventpump.emulator.faults import CloseConnection, DetachLink, Hold, LinkRole, Performative, Refuse, Reject
from eventpump.emulator.server import Emulator
from eventpump.errors import (
    AuthenticationError,
    ConnectionLostError,
    LinkDetachedError,
    Recovery,
    ServiceBusyError,
    ServiceError,
)
from eventpump.eventhubs.events import EventData, EventPosition
from eventpump.interfaces import ReceiveLinkSpec, SendLinkSpec
from eventpump.options.connection import connection_settings
from eventpump.testing.proxy import FaultProxy
from eventpump.testing.sink import PATIENCE, RecordingSink
from eventpump.transport.native import NativeTransport
from tests.authority import Authority
from tests.support.connecting import connection_string_to
from tests.support.served import served_connections
from tests.support.sockets import open_sockets

HUB = "telemetry"
NAMESPACE = "example.servicebus.windows.net"


@pytest.fixture
async def emulator() -> AsyncIterator[Emulator]:
    """A service of two partitions. When the test is over, neither a task nor a socket is left."""
    sockets = open_sockets()
    async with Emulator({HUB: 2}) as started:
        yield started
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert not open_sockets() - sockets


def transport_to(emulator: Emulator, **options: Any) -> NativeTransport:
    return NativeTransport(connection_settings(emulator.connection_string, HUB, **options))


def reading(partition_id: str = "0") -> ReceiveLinkSpec:
    return ReceiveLinkSpec(HUB, "$Default", partition_id, EventPosition.earliest())


# ------------------------------------------------------------------------------------------------------ TLS


async def use(transport: NativeTransport) -> None:
    link = await transport.open_send_link(SendLinkSpec(HUB, "0"))
    await link.send(EventData(b"x").encode())


async def test_connect_over_tls_with_an_own_authority(authority: Authority) -> None:
    """Over TLS, with the authority named, everything works, large messages too."""
    async with Emulator({HUB: 1}, tls=authority.server("localhost", "127.0.0.1")) as emulator:
        transport = transport_to(emulator, ca_file=authority.file)
        await use(transport)
        link = await transport.open_send_link(SendLinkSpec(HUB, "0"))
        body = os.urandom(1_000_000)
        await link.send(EventData(body).encode())
        sink = RecordingSink()
        (await transport.open_receive_link(reading(), sink)).set_credit(10)
        assert await sink.received(2) == [b"x", body]
        await transport.aclose()


async def test_connect_with_an_invalid_certificate_gives_up(authority: Authority, tmp_path: Path) -> None:
    """A certificate that is not trusted, self-signed, for another host or expired is one clear error to give up on."""
    past = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
    own = trustme.CA()
    self_signed = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    own.private_key_pem.write_to_path(str(tmp_path / "key.pem"))
    own.cert_pem.write_to_path(str(tmp_path / "cert.pem"))
    self_signed.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    cases = [
        (
            authority.server("127.0.0.1"),
            None,
            "self-signed certificate|unable to get local issuer",
        ),
        (self_signed, authority.file, "self-signed certificate|unable to get local issuer"),
        (authority.server("elsewhere.test"), authority.file, "IP address mismatch|not valid for '127.0.0.1'"),
        (authority.server("127.0.0.1", not_after=past), authority.file, "expired"),
    ]
    for tls, ca_file, reason in cases:
        async with Emulator({HUB: 1}, tls=tls) as emulator:
            transport = transport_to(emulator, ca_file=ca_file)
            with pytest.raises(ConnectionLostError, match=reason) as caught:
                async with asyncio.timeout(PATIENCE):
                    await use(transport)
            assert caught.value.recovery is Recovery.GIVE_UP
            assert f"certificate of 127.0.0.1:{emulator.port}" in str(caught.value)
            await transport.aclose()


async def test_connect_over_tls_to_a_plain_server_raises(authority: Authority) -> None:
    """A server that speaks no TLS is an error that says so; nothing is sent to it in the clear."""
    async with Emulator({HUB: 1}) as plain:
        text = plain.connection_string.removesuffix(";UseDevelopmentEmulator=true")
        assert text != plain.connection_string
        transport = NativeTransport(connection_settings(text, HUB, ca_file=authority.file))
        with pytest.raises(ConnectionLostError, match="TLS"):
            await use(transport)
        await transport.aclose()


async def test_connect_to_a_custom_endpoint_verifies_its_host(authority: Authority) -> None:
    """A custom endpoint's host is dialled and has to match the certificate; the open names the namespace."""
    text = (
        "Endpoint=sb://example.servicebus.windows.net/;SharedAccessKeyName=RootManageSharedAccessKey;SharedAccessKey="
    )
    tls = authority.server("localhost")
    async with Emulator({HUB: 1}, key="k3y", tls=tls, names=[NAMESPACE]) as emulator:
        settings = connection_settings(
            text + "k3y", HUB, custom_endpoint_address=f"localhost:{emulator.port}", ca_file=authority.file
        )
        transport = NativeTransport(settings)
        assert transport.fully_qualified_namespace == NAMESPACE
        await use(transport)
        (connection,) = served_connections(emulator)
        assert connection.engine.remote is not None
        assert connection.engine.remote.hostname == NAMESPACE
        await transport.aclose()
        # The same server, dialled by a name that its certificate lacks.
        other = connection_settings(
            text + "k3y", HUB, custom_endpoint_address=f"127.0.0.1:{emulator.port}", ca_file=authority.file
        )
        transport = NativeTransport(other)
        with pytest.raises(ConnectionLostError, match="certificate") as caught:
            await use(transport)
        assert caught.value.recovery is Recovery.GIVE_UP
        await transport.aclose()


# ----------------------------------------------------------------------------------------------- connecting


async def test_connect_to_a_closed_port_names_it_and_may_be_retried() -> None:
    """A port without a listener is an error that names host, port and reason, and is worth another try."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        text = connection_string_to("127.0.0.1", port, key="s3cret", is_plain=True)
        transport = NativeTransport(connection_settings(text, HUB))
        with pytest.raises(ConnectionLostError, match=f"127.0.0.1:{port}.*refused") as caught:
            await use(transport)
        assert caught.value.recovery is Recovery.RECONNECT
        assert "s3cret" not in str(caught.value)
        await transport.aclose()


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "another protocol"),
        (b"", "the peer closed the byte stream"),
        (None, r"^no answer from 127\.0\.0\.1:\d+ within 1\.0 s"),
    ],
    ids=["http", "end", "silence"],
)
async def test_connect_to_another_protocol_says_what_was_there(answer: bytes | None, says: str) -> None:
    """Where HTTP, or nothing at all, answers, the error says what was there, in time."""
    is_over = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        if answer is None:
            await is_over.wait()
        else:
            writer.write(answer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    text = connection_string_to("127.0.0.1", port, is_plain=True)
    transport = NativeTransport(connection_settings(text, HUB, operation_timeout=1.0))
    with pytest.raises(ConnectionLostError, match=says):
        await asyncio.wait_for(use(transport), 5.0)
    await transport.aclose()
    is_over.set()
    server.close()
    await server.wait_closed()


async def test_connect_with_a_wrong_key_gives_up(emulator: Emulator) -> None:
    """A key the service does not know is an authentication error to give up on, and not part of it."""
    text = emulator.connection_string_for("RootManageSharedAccessKey", "wr0ng")
    transport = NativeTransport(connection_settings(text, HUB))
    for _ in range(2):
        with pytest.raises(AuthenticationError) as caught:
            await use(transport)
        assert caught.value.recovery is Recovery.GIVE_UP
        assert "wr0ng" not in str(caught.value)
    await transport.aclose()


async def test_open_says_product_version_and_platform(emulator: Emulator) -> None:
    """The open carries product, version and platform, which a service's operator sees."""
    transport = transport_to(emulator)
    await use(transport)
    (connection,) = served_connections(emulator)
    assert connection.engine.remote is not None
    properties = connection.engine.remote.properties
    assert properties is not None
    assert properties["product"] == "eventpump"
    assert str(properties["user-agent"]).startswith("eventpump/")
    assert len(str(properties["user-agent"])) <= 512
    await transport.aclose()


# ------------------------------------------------------------------------------------------------- lifetimes


async def test_links_beyond_a_session_share_one_connection(emulator: Emulator) -> None:
    """More links than one session of the service carries share one connection, and are gone when it closes."""
    transport = transport_to(emulator)
    links = await asyncio.gather(*(transport.open_send_link(SendLinkSpec(HUB, str(n % 2))) for n in range(300)))
    await asyncio.gather(*(link.send(EventData(b"x").encode()) for link in links))
    assert emulator.connection_count == 1
    (connection,) = served_connections(emulator)
    assert len(connection.engine.sessions) == 2
    await transport.aclose()
    async with asyncio.timeout(PATIENCE):
        await connection.closed
    assert emulator.connection_count == 0


async def test_silent_peer_ends_the_links_within_the_idle_time_out(emulator: Emulator) -> None:
    """A peer that goes silent without a word ends the links within the idle time-out."""
    async with FaultProxy(emulator.port) as proxy:
        transport = transport_to(emulator, custom_endpoint_address=proxy.address, idle_timeout=1.0)
        sink = RecordingSink()
        await transport.open_receive_link(reading(), sink)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(sink.until(lambda: bool(sink.errors)), 2.0)  # heartbeats keep it
        proxy.half_open()
        error = await asyncio.wait_for(sink.ended(), 3.0)
        assert isinstance(error, ConnectionLostError)
        assert "sent nothing for 1.0 seconds" in str(error)
        await transport.aclose()


async def test_faults_arrive_with_condition_and_tracking_id(emulator: Emulator) -> None:
    """What the service says at a refusal, a detach, a rejection or a close arrives with condition and tracking id."""
    transport = transport_to(emulator)
    words = "moved. TrackingId:4711_G2_B3, SystemTracker:ns, Timestamp:2024-01-01T00:00:00"
    emulator.faults.add(Refuse("com.microsoft:timeout", words), on=Performative.ATTACH, role=LinkRole.CONSUMER)
    with pytest.raises(ServiceError, match="moved") as caught:
        await transport.open_receive_link(reading(), RecordingSink())
    assert (caught.value.condition, caught.value.tracking_id) == ("com.microsoft:timeout", "4711_G2_B3")

    emulator.faults.add(DetachLink("amqp:link:detach-forced", words), role=LinkRole.CONSUMER)
    sink = RecordingSink()
    (await transport.open_receive_link(reading(), sink)).set_credit(10)
    sender = await transport.open_send_link(SendLinkSpec(HUB, "0"))
    await sender.send(EventData(b"x").encode())
    error = await sink.ended()
    assert isinstance(error, LinkDetachedError)
    assert error.tracking_id == "4711_G2_B3"
    assert error.entity == f"{HUB}/ConsumerGroups/$Default/Partitions/0"

    emulator.faults.add(Reject(description=words), role=LinkRole.PRODUCER)
    with pytest.raises(ServiceBusyError) as busy:
        await sender.send(EventData(b"x").encode())
    assert busy.value.tracking_id == "4711_G2_B3"
    await sender.send(EventData(b"y").encode())

    emulator.faults.add(CloseConnection(description=words), role=LinkRole.PRODUCER)
    with pytest.raises(ConnectionLostError, match="moved"):
        await sender.send(EventData(b"z").encode())
    await transport.aclose()


async def test_attach_that_is_cancelled_leaves_nothing_at_the_service(emulator: Emulator) -> None:
    """Cancelled at an attach that is never answered, nothing is left at the service once it may answer."""
    transport = transport_to(emulator)
    await transport.get_hub_properties(HUB)
    hold = emulator.faults.add(Hold(), on=Performative.ATTACH, role=LinkRole.CONSUMER, count=None)
    opening = [asyncio.ensure_future(transport.open_receive_link(reading(), RecordingSink())) for _ in range(20)]
    async with asyncio.timeout(PATIENCE):
        while hold.fired < 20:
            await transport.get_hub_properties(HUB)
    for task in opening:
        task.cancel()
    await asyncio.gather(*opening, return_exceptions=True)
    hold.remove()
    links = [await transport.open_receive_link(reading(), RecordingSink()) for _ in range(5)]
    assert len(links) == 5
    await transport.aclose()
