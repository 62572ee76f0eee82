"""Traces that lead from azure-eventhub with its tracing plugin to eventpump, and the other way round."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import pytest

from eventpump import Emulator, EventData, EventProcessorHost, EventProducer, MemoryLeaseStore
from tests.support.telemetry import Recording

pytestmark = pytest.mark.asyncio(loop_scope="session")

COUNT = 3


async def _azure(emulator: Emulator, hub: str, what: str) -> list[dict[str, Any]]:
    """Run azure-eventhub in a process of its own. Return its spans."""
    module = "tests.interop.peers.azure_tracing"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, emulator.connection_string, hub, what, str(COUNT)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(90):
            output, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0, errors.decode()
    return [json.loads(line) for line in output.splitlines() if line.startswith(b"{")]


async def test_process_span_is_linked_to_what_azure_eventhub_sent(emulator: Emulator, hub: str) -> None:
    """Each event of azure-eventhub has a span of its own, and the span of our batch has a link to each."""
    theirs = [span for span in await _azure(emulator, hub, "send") if span["name"] == "EventHubs.message"]
    assert len(theirs) == COUNT
    recording, done = Recording(), asyncio.Event()
    seen = 0

    async def handle(context: Any, events: Any) -> None:
        nonlocal seen
        seen += len(events)
        if seen == COUNT:
            done.set()

    host = EventProcessorHost(
        emulator.connection_string,
        hub,
        processor=handle,
        lease_store=MemoryLeaseStore(),
        telemetry=recording.telemetry,
    )
    async with asyncio.timeout(60):
        await host.run(until=done.wait())
    linked = [
        [each.context.trace_id, each.context.span_id] for span in recording.spans("process") for each in span.links
    ]
    assert linked == [[span["trace"], span["span"]] for span in theirs]


@pytest.mark.parametrize("create_spans", [False, True])
async def test_azure_eventhub_is_linked_to_what_eventpump_sent(
    emulator: Emulator, hub: str, create_spans: bool
) -> None:
    """Its spans for our events name the send, or the span that each event was created in."""
    recording = Recording(create_spans=create_spans)
    async with EventProducer(emulator.connection_string, hub, telemetry=recording.telemetry) as producer:
        await producer.send([EventData(str(number)) for number in range(COUNT)], partition_id="0")
    ours = recording.spans("create") if create_spans else recording.spans("send") * COUNT
    spans = [span for span in await _azure(emulator, hub, "receive") if span["name"] == "EventHubs.process"]
    assert len(spans) == COUNT
    expected = [[each.context.trace_id, each.context.span_id] for each in ours]
    # Without a batch callback it takes the event's context for the parent, and has no link.
    assert [span["parent"] for span in spans] == expected
