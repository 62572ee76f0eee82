"""The contract of event sources, over every implementation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from azure.storage.blob.aio import ContainerClient

pytest.register_assert_rewrite("eventpump.testing.conformance.source")

from eventpump.clients.consumers import EventHubSource  # noqa: E402 - after the registration
from eventpump.clients.producers import EventProducer  # noqa: E402 - after the registration
from eventpump.emulator.server import Emulator  # noqa: E402
from eventpump.eventhubs.events import EventData  # noqa: E402
from eventpump.sources.capture import CaptureSource  # noqa: E402
from eventpump.sources.files import CaptureContainer  # noqa: E402
from eventpump.sources.generator import GeneratorSource  # noqa: E402
from eventpump.sources.hub import HubSource  # noqa: E402
from eventpump.sources.memory import MemorySource  # noqa: E402
from eventpump.testing.conformance.source import SourceContract  # noqa: E402
from eventpump.testing.transport import FakeHub, FakeTransport  # noqa: E402
from tests.support.azurite import Azurite  # noqa: E402
from tests.unit.sources.capturing import HUB, memory_hub, write_capture  # noqa: E402

if TYPE_CHECKING:
    from eventpump.interfaces import EventSource

    def _are_sources(
        generator: GeneratorSource, memory: MemorySource, hub: HubSource, capture: CaptureSource
    ) -> list[EventSource]:
        return [generator, memory, hub, capture]


class TestGeneratorSource(SourceContract):
    """Events that are all there."""

    @pytest.fixture
    async def source(self) -> AsyncIterator[EventSource]:
        async with GeneratorSource(seed=5, partitions=2, events=500, rate=None, keys=3) as source:
            yield source


class TestMemorySource(SourceContract):
    """Events that a test appended, of which the oldest are gone."""

    @pytest.fixture
    async def source(self) -> AsyncIterator[EventSource]:
        async with MemorySource(partitions=2, first=10) as source:
            source.append("0", *(b"%d" % number for number in range(40)))
            source.drop("0", 15)
            yield source


class TestHubSource(SourceContract):
    """A hub in memory."""

    @pytest.fixture
    async def source(self) -> AsyncIterator[EventSource]:
        hub = FakeHub()
        hub.publish("0", count=40)
        async with HubSource(FakeTransport(hub), hub.name) as source:
            yield source


class TestCaptureSource(SourceContract):
    """Capture files alone."""

    @pytest.fixture
    async def source(self, tmp_path: Path) -> AsyncIterator[EventSource]:
        _, events = memory_hub(40)
        write_capture(tmp_path, [events[:13], [], events[13:39], events[39:]])
        write_capture(tmp_path, [[]], "1")
        async with CaptureSource(tmp_path, hub=HUB, namespace="ns") as source:
            yield source


class TestSplicedSource(SourceContract):
    """Capture files, continued by a hub that has dropped some of their events."""

    @pytest.fixture
    async def source(self, tmp_path: Path) -> AsyncIterator[EventSource]:
        live, events = memory_hub(40, partitions=2)
        write_capture(tmp_path, [events[:10], events[10:17]])
        live.drop("0", 12)
        async with CaptureSource(tmp_path, live=live) as source:
            yield source


class TestCaptureContainer(SourceContract):
    """Capture files in a container of Azurite."""

    @pytest.fixture
    async def source(self, azurite: Azurite, container_name: str, tmp_path: Path) -> AsyncIterator[EventSource]:
        live, events = memory_hub(40, partitions=2)
        live.drop("0", 30)
        write_capture(tmp_path, [events[:13], [], events[13:35]])
        async with ContainerClient.from_connection_string(azurite.connection_string, container_name) as client:
            await client.create_container()
            for path in await asyncio.to_thread(lambda: sorted(tmp_path.rglob("*.avro"))):
                await client.upload_blob(
                    path.relative_to(tmp_path).as_posix(), await asyncio.to_thread(path.read_bytes)
                )
        files = CaptureContainer(container_name, connection_string=azurite.connection_string)
        async with CaptureSource(files, live=live, namespace="ns") as source:
            yield source


class TestEventHubSource(SourceContract):
    """A hub of the emulator, over sockets."""

    @pytest.fixture
    async def source(self) -> AsyncIterator[EventSource]:
        async with Emulator({"telemetry": 2}) as emulator:
            async with EventProducer(emulator.connection_string, "telemetry") as producer:
                for _ in range(2):
                    await producer.send([EventData(b"%d" % number) for number in range(20)], partition_id="0")
            async with EventHubSource(emulator.connection_string, "telemetry") as source:
                yield source
