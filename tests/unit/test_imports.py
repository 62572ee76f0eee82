"""What a program loads by importing and constructing a client: nothing that it does not use."""

from __future__ import annotations

import subprocess
import sys
from typing import Final

import pytest

_HOST: Final = """
import sys
from eventpump import EventProcessor, EventProcessorHost, MemoryLeaseStore

class Processor(EventProcessor):
    async def process_events(self, context, events):
        pass

place = "Endpoint=sb://localhost/;SharedAccessKeyName=name;SharedAccessKey=a2V5"
host = EventProcessorHost(place, "hub", processor=Processor(), lease_store=MemoryLeaseStore())
"""
_RUN: Final = """
import asyncio
from eventpump import GeneratorSource

async def run():
    received = asyncio.Event()

    async def process(context, events):
        received.set()

    source = GeneratorSource(partitions=1, events=10, rate=None)
    async with EventProcessorHost(source=source, processor=process, lease_store=MemoryLeaseStore()) as host:
        running = asyncio.create_task(host.run())
        await received.wait()
        host.stop()
        await running

asyncio.run(run())
"""
_SHOW: Final = "print(*sys.modules, sep='\\n')"


def _loaded(program: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", program + _SHOW], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.fixture(scope="module")
def loaded() -> set[str]:
    """The modules of a program that has imported and constructed a host."""
    return _loaded(_HOST)


@pytest.mark.parametrize(
    "module",
    [
        # what reaches the service is created when the host runs
        *("eventpump.amqp.connection", "eventpump.net", "eventpump.transport"),
        # other clients and their parts
        *("eventpump.app", "eventpump.emulator", "eventpump.producer", "eventpump.spark", "eventpump.testing"),
        *("eventpump.checkpoints", "eventpump.cli", "eventpump.doctor", "eventpump.health", "eventpump.lag"),
        # stores, codecs and decoders that were not chosen
        *("eventpump.storage.blob_access", "eventpump.storage.leases.blob", "eventpump.storage.leases.sqlite"),
        *("eventpump.eventhubs.capture", "eventpump.eventhubs.decoding", "eventpump.telemetry.otel"),
        # what these need, and what extras bring
        *("aiohappyeyeballs", "aiohttp", "azure", "cryptography", "fastavro", "msgspec", "opentelemetry", "pandas"),
        *("pyarrow", "pyspark", "pytest", "rich", "uamqp", "uvloop"),
        # the parts of the standard library that cost most
        *("http", "multiprocessing", "sqlite3", "unittest", "urllib.request", "xml"),
    ],
)
def test_constructing_a_host_does_not_load(module: str, loaded: set[str]) -> None:
    """A module that a host does without until it runs, or that only other programs use, is not loaded."""
    assert "eventpump.consumer.host.host" in loaded
    assert [each for each in sorted(loaded) if each == module or each.startswith(f"{module}.")] == []


def test_running_a_host_of_a_source_does_not_load_the_engine() -> None:
    """A host whose events come from a source other than a hub does without the engine, also when it runs."""
    engine = ("eventpump.amqp.connection", "eventpump.net", "eventpump.transport")
    assert [each for each in sorted(_loaded(_HOST + _RUN)) if each.startswith(engine)] == []
