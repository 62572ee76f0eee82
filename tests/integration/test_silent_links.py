"""A link to the emulator that is open and silent while its connection lives."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from eventpump.clients.connection import make_transport
from eventpump.consumer.host.host import HubHost
from eventpump.consumer.link import silence
from eventpump.consumer.processor import EventProcessor, PartitionContext
from eventpump.emulator.faults import Hold, LinkRole
from eventpump.emulator.server import Emulator
from eventpump.eventhubs.events import EventData, EventPosition, ReceivedEvent
from eventpump.interfaces import PartitionProperties, SendLinkSpec, Transport
from eventpump.options.base import RetryOptions
from eventpump.options.connection import connection_settings
from eventpump.options.consumer import HostSettings
from eventpump.reports import HostReport, LinkStalled
from eventpump.storage.leases.memory import MemoryLeaseStore
from tests.authority import Authority
from tests.ways import need_uamqp

HUB = "telemetry"
PATIENCE = 30.0


class Passing(EventProcessor):
    """Hands on what it gets."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[ReceivedEvent] = asyncio.Queue()

    async def process_events(self, context: PartitionContext, events: Any) -> None:
        for event in events:
            self.events.put_nowait(event)


async def publish(transport: Transport, body: bytes) -> None:
    link = await transport.open_send_link(SendLinkSpec(HUB, "0"))
    await link.send(EventData(body).encode())
    await link.aclose()


@pytest.mark.parametrize(
    ("kind", "answers_echo", "evidence"),
    [
        ("native", False, "it does not answer a probe"),
        ("native", True, "the hub holds events up to sequence number 1"),
        ("uamqp", True, "the hub holds events up to sequence number 1"),
    ],
)
async def test_silent_link_is_found_and_opened_again(
    authority: Authority, monkeypatch: pytest.MonkeyPatch, kind: str, answers_echo: bool, evidence: str
) -> None:
    """A link stalled by the service is found by a probe, or by management, and its event is delivered by another."""
    monkeypatch.setattr(silence, "PROBE_TIMEOUT", 0.3)
    looked = asyncio.Event()
    reports: list[HostReport] = []
    processor = Passing()
    if kind == "uamqp":
        need_uamqp()
    tls = authority.server("127.0.0.1") if kind == "uamqp" else None
    async with asyncio.timeout(PATIENCE), Emulator({HUB: 1}, tls=tls) as emulator:
        options: dict[str, Any] = {"ca_file": authority.file, "transport": "uamqp"} if kind == "uamqp" else {}
        settings = connection_settings(emulator.connection_string, HUB, **options)
        transport, other = make_transport(settings), make_transport(settings)
        look = transport.get_partition_properties

        async def get_partition_properties(hub: str, partition_id: str) -> PartitionProperties:
            try:
                return await look(hub, partition_id)
            finally:
                looked.set()

        transport.get_partition_properties = get_partition_properties  # type: ignore[method-assign]  # to see it called
        host = HubHost(
            lambda: transport,
            MemoryLeaseStore(lease_duration=20.0),
            HostSettings(
                hub=HUB,
                initial_position=EventPosition.earliest(),
                max_wait_time=1.0,
                link_retry=RetryOptions(base_delay=0.01),
            ),
            processor,
            hooks=[reports.append],
        )
        running = asyncio.create_task(host.run())
        await publish(other, b"before")
        assert (await processor.events.get()).body == b"before"
        # A check, and so a probe, has come to its end by then.
        await looked.wait()
        emulator.faults.add(Hold(answers_echo=answers_echo), role=LinkRole.CONSUMER)
        await publish(other, b"behind")
        assert (await processor.events.get()).body == b"behind"
        found = [report for report in reports if isinstance(report, LinkStalled)]
        assert [(report.evidence, report.drops_connection) for report in found] == [(evidence, False)]
        await host.aclose()
        await running
        await other.aclose()
