"""Files of certificates and keys that are replaced while a client runs."""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from eventpump.clients.connection import make_transport
from eventpump.consumer.host.host import HubHost
from eventpump.consumer.processor import EventProcessor, PartitionContext
from eventpump.consumer.reader.reader import HubReader
from eventpump.emulator.server import Emulator
from eventpump.errors import ConfigurationError, EventPumpError, Recovery, ServiceError
from eventpump.eventhubs.events import EventData, EventPosition, ReceivedEvent
from eventpump.interfaces import HubProperties, ReceiveLink, ReceiveLinkSpec, ReceiveSink, SendLinkSpec, Transport
from eventpump.options.base import RetryOptions
from eventpump.options.connection import connection_settings
from eventpump.options.consumer import HostSettings, ReaderSettings
from eventpump.reports import HostReport, LinkFailed
from eventpump.storage.leases.memory import MemoryLeaseStore
from eventpump.testing.sink import PATIENCE
from eventpump.transport.native import NativeTransport
from tests.authority import Authority
from tests.ways import need_uamqp

HUB = "telemetry"
RETRY = RetryOptions(base_delay=0.01, max_delay=0.05)


@dataclass
class Files:
    """The files a client was given, which a test replaces."""

    ca: Path
    cert: Path
    key: Path

    def __post_init__(self) -> None:
        self._good = {path: path.read_bytes() for path in (self.ca, self.cert, self.key)}

    def put_back(self) -> None:
        """Make them as they were."""
        for path, content in self._good.items():
            path.write_bytes(content)


def _absent(files: Files, _: Authority) -> None:
    files.ca.unlink()


def _empty(files: Files, _: Authority) -> None:
    files.ca.write_bytes(b"")


def _other_authority(files: Files, other: Authority) -> None:
    other.ca.cert_pem.write_to_path(str(files.ca))


def _no_certificate(files: Files, _: Authority) -> None:
    files.cert.unlink()


def _other_key(files: Files, other: Authority) -> None:
    files.key.write_bytes(other.ca.issue_cert("client.test").private_key_pem.bytes())


CA_CASES: list[tuple[Callable[[Files, Authority], None], str]] = [
    (_absent, "ca_file: cannot be used"),
    (_empty, "ca_file: cannot be used"),
    (_other_authority, "certificate of .* was refused"),
]
CLIENT_CASES: list[tuple[Callable[[Files, Authority], None], str]] = [
    (_no_certificate, "client_cert_file: cannot be used"),
    (_other_key, "client_cert_file: cannot be used with its key"),
]


@pytest.fixture
def files(authority: Authority, tmp_path: Path) -> Files:
    """A client's own copies of its authority's certificate, its certificate and its key."""
    made = authority.ca.issue_cert("client.test")
    files = tmp_path / "its-ca.pem", tmp_path / "client.pem", tmp_path / "client.key"
    files[0].write_bytes(authority.file.read_bytes())
    files[1].write_bytes(b"".join(each.bytes() for each in made.cert_chain_pems))
    files[2].write_bytes(made.private_key_pem.bytes())
    return Files(*files)


@pytest.fixture
async def emulator(authority: Authority) -> AsyncIterator[Emulator]:
    """A service with TLS, which asks for a certificate where a client has one."""
    tls = authority.server("127.0.0.1")
    tls.verify_mode = ssl.CERT_OPTIONAL
    authority.ca.configure_trust(tls)
    async with Emulator({HUB: 1}, tls=tls, ws_port=0) as started:
        yield started


@pytest.fixture
def other(tmp_path: Path) -> Authority:
    """An authority that the service is not of."""
    folder = tmp_path / "other"
    folder.mkdir()
    return Authority.new(folder)


def transport_to(emulator: Emulator, kind: str, files: Files, *, has_certificate: bool) -> Transport:
    """Make a transport of a kind: tcp, websocket or uamqp."""
    options: dict[str, Any] = {"ca_file": files.ca, "retry": RETRY}
    if has_certificate:
        options |= {"client_cert_file": files.cert, "client_key_file": files.key}
    if kind == "websocket":
        text = emulator.ws_connection_string
        return NativeTransport(connection_settings(text, HUB, transport_type="websocket", **options))
    if kind == "uamqp":
        need_uamqp()
        return make_transport(connection_settings(emulator.connection_string, HUB, transport="uamqp", **options))
    return NativeTransport(connection_settings(emulator.connection_string, HUB, **options))


async def publish(emulator: Emulator, authority: Authority, *bodies: bytes) -> None:
    transport = NativeTransport(connection_settings(emulator.connection_string, HUB, ca_file=authority.file))
    link = await transport.open_send_link(SendLinkSpec(HUB, "0"))
    for body in bodies:
        await link.send(EventData(body).encode())
    await transport.aclose()


class Watched:
    """A transport that keeps what its attaches fail with, and the question before them, in a queue."""

    def __init__(self, transport: Transport) -> None:
        self.failures: asyncio.Queue[EventPumpError] = asyncio.Queue()
        self._attach = transport.open_receive_link
        transport.open_receive_link = self.open_receive_link  # type: ignore[method-assign]  # to see what it raises
        self._ask = transport.get_hub_properties
        transport.get_hub_properties = self.get_hub_properties  # type: ignore[method-assign]  # as above

    async def open_receive_link(self, spec: ReceiveLinkSpec, sink: ReceiveSink) -> ReceiveLink:
        try:
            return await self._attach(spec, sink)
        except EventPumpError as error:
            self.failures.put_nowait(error)
            raise

    async def get_hub_properties(self, hub: str) -> HubProperties:
        try:
            return await self._ask(hub)
        except EventPumpError as error:
            self.failures.put_nowait(error)
            raise


@pytest.mark.parametrize(
    ("kind", "spoil", "problem", "has_certificate"),
    [
        *(("tcp", *case, False) for case in CA_CASES),
        *(("tcp", *case, True) for case in CLIENT_CASES),
        ("websocket", *CA_CASES[0], False),
        ("websocket", *CA_CASES[2], False),
        ("uamqp", *CA_CASES[0], False),
        ("uamqp", *CA_CASES[2], False),
    ],
)
async def test_reader_goes_on_after_certificate_files_were_replaced(
    emulator: Emulator,
    authority: Authority,
    other: Authority,
    files: Files,
    kind: str,
    spoil: Callable[[Files, Authority], None],
    problem: str,
    has_certificate: bool,
) -> None:
    """Files that cannot be used at a reconnect are failures to try again; put back, the reader goes on."""
    transport = transport_to(emulator, kind, files, has_certificate=has_certificate)
    watched = Watched(transport)
    settings = ReaderSettings(
        hub=HUB, partition_id="0", position=EventPosition.earliest(), link_retry=RetryOptions(base_delay=0.01)
    )
    async with asyncio.timeout(PATIENCE), HubReader(lambda: transport, settings) as reader:
        await publish(emulator, authority, b"before")
        assert [event.body for event in await reader.read()] == [b"before"]
        spoil(files, other)
        emulator.drop_connections()
        await watched.failures.get()
        error = await watched.failures.get()
        assert isinstance(error, ServiceError)
        assert error.recovery is Recovery.RECONNECT
        assert re.search(problem, str(error))
        files.put_back()
        await publish(emulator, authority, b"after")
        assert [event.body for event in await reader.read()] == [b"after"]


class Passing(EventProcessor):
    """Hands on what it gets."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[ReceivedEvent] = asyncio.Queue()

    async def process_events(self, context: PartitionContext, events: Any) -> None:
        for event in events:
            self.events.put_nowait(event)


async def test_host_goes_on_after_certificate_files_were_replaced(
    emulator: Emulator, authority: Authority, files: Files
) -> None:
    """A host reports each attempt that files made fail, names the file, and goes on when they are back."""
    reports: asyncio.Queue[HostReport] = asyncio.Queue()
    processor = Passing()
    host = HubHost(
        lambda: transport_to(emulator, "tcp", files, has_certificate=True),
        MemoryLeaseStore(lease_duration=10.0),
        HostSettings(hub=HUB, initial_position=EventPosition.earliest(), link_retry=RetryOptions(base_delay=0.01)),
        processor,
        hooks=[reports.put_nowait],
    )
    async with asyncio.timeout(PATIENCE), host:
        running = asyncio.create_task(host.run())
        await publish(emulator, authority, b"before")
        assert (await processor.events.get()).body == b"before"
        _other_key(files, authority)
        emulator.drop_connections()
        reported = 0
        while reported < 2:
            report = await reports.get()
            if isinstance(report, LinkFailed) and "client_cert_file" in str(report.error):
                reported += 1
        files.put_back()
        await publish(emulator, authority, b"after")
        assert (await processor.events.get()).body == b"after"
        assert not running.done()
        await host.aclose()
        await running


@pytest.mark.parametrize("kind", ["tcp", "uamqp"])
async def test_certificate_files_that_never_worked_raise_at_connect(
    emulator: Emulator, files: Files, kind: str
) -> None:
    """At the first connect of a transport a file that cannot be used is a mistake in the settings, each time."""
    transport = transport_to(emulator, kind, files, has_certificate=False)
    files.ca.write_bytes(b"")
    for _ in range(2):
        with pytest.raises(ConfigurationError, match="ca_file"):
            await transport.get_hub_properties(HUB)
    files.put_back()
    await transport.get_hub_properties(HUB)
    await transport.aclose()
