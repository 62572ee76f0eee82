"""On uvloop, whose handles differ from asyncio's: what is due at once has no time of its own there."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from eventpump import BufferedProducer, Emulator, EventData, EventProducer, PartitionReader
from eventpump.options.connection import connection_settings
from eventpump.transport.native import NativeTransport
from tests.authority import Authority
from tests.ways import Way, over_both

uvloop = pytest.importorskip("uvloop")

ROOT = Path(__file__).parents[2]
EVENTS = 300


def test_buffered_producer_on_uvloop_loses_nothing() -> None:
    """A buffer whose batches wait for no other event, fed by several tasks without a pause, loses nothing."""

    async def main() -> None:
        async with Emulator({"telemetry": 1}) as emulator:
            producer = BufferedProducer(emulator.connection_string, "telemetry", max_wait_time=0, max_batch_events=7)

            async def send(first: int) -> None:
                for number in range(first, EVENTS, 3):
                    await producer.send(EventData(str(number)), partition_id="0")

            async with producer:
                await asyncio.gather(*map(send, range(3)))
            reader = PartitionReader(emulator.connection_string, "telemetry", partition_id="0", end="@latest")
            async with reader:
                found = sorted([int(event.body_as_str()) async for event in reader])
            assert found == list(range(EVENTS))

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


@pytest.mark.parametrize("make_loop", [uvloop.new_event_loop, asyncio.new_event_loop])
@pytest.mark.parametrize("tls", [True, False])
def test_delivery_interval_keeps_all_events_on_each_loop(
    make_loop: Callable[[], asyncio.AbstractEventLoop], tls: bool, authority: Authority
) -> None:
    """Events that come one by one, while others are sent on the same connection: none is held for good."""

    async def main() -> None:
        async with Emulator({"telemetry": 1}, tls=authority.server("127.0.0.1") if tls else None) as emulator:
            settings = connection_settings(
                emulator.connection_string, "telemetry", ca_file=authority.file if tls else None
            )
            transport = NativeTransport(settings)
            producer = EventProducer(hub="telemetry", transport=transport, owns_transport=False)
            reader = PartitionReader(
                hub="telemetry",
                transport=transport,
                owns_transport=False,
                partition_id="0",
                end=EVENTS - 1,
                delivery_interval=0.01,
            )
            async with producer, reader:

                async def send() -> None:
                    for number in range(EVENTS):
                        await producer.send(EventData(str(number)), partition_id="0")

                sending = asyncio.create_task(send())
                found = [int(event.body_as_str()) async for event in reader]
                await sending
            await transport.aclose()
            assert found == list(range(EVENTS))

    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(main())


@over_both()
def test_each_transport_connects_on_uvloop(way: Way) -> None:
    """Its streams are of no class of asyncio's."""

    async def main() -> None:
        async with Emulator({"telemetry": 1}, tls=way.tls) as emulator:
            connection_string = emulator.connection_string
            async with EventProducer(connection_string, "telemetry", **way.options) as producer:
                await producer.send(EventData("1"), partition_id="0")
            options = {"partition_id": "0", "end": "@latest", **way.options}
            async with PartitionReader(connection_string, "telemetry", **options) as reader:
                assert [event.body_as_str() async for event in reader] == ["1"]

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


@pytest.mark.long
@pytest.mark.timeout(3700)
def test_integration_suite_passes_on_uvloop() -> None:
    """All other files of this folder, whose loops are made by uvloop's policy."""
    taps = ("EVENTPUMP_", "PYTEST_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(taps)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.support.on_uvloop"]
    command += ["--ignore", __file__, str(Path(__file__).parent)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=3600, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-10_000:]
    loops = re.search(r"loops of uvloop: (\d+)", done.stdout)
    assert loops is not None
    assert int(loops[1]) > 200
