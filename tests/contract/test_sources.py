"""The contract of event sources, over every implementation."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import pytest

pytest.register_assert_rewrite("eventpump.testing.conformance.source")

from eventpump.clients import EventHubSource, EventProducer  # noqa: E402 - after the registration
from eventpump.emulator.server import Emulator  # noqa: E402
from eventpump.eventhubs.events import EventData  # noqa: E402
from eventpump.sources.generator import GeneratorSource  # noqa: E402
from eventpump.sources.hub import HubSource  # noqa: E402
from eventpump.sources.memory import MemorySource  # noqa: E402
from eventpump.testing.conformance.source import SourceContract  # noqa: E402
from eventpump.testing.transport import FakeHub, FakeTransport  # noqa: E402

if TYPE_CHECKING:
    from eventpump.interfaces import EventSource

    def _are_sources(generator: GeneratorSource, memory: MemorySource, hub: HubSource) -> list[EventSource]:
        return [generator, memory, hub]


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
