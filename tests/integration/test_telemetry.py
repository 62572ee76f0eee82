"""Spans, links and metrics of a whole program against the local service, over sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanKind

from eventpump import (
    BufferedProducer,
    ConfigurationError,
    Emulator,
    EventData,
    EventHubsApp,
    EventProcessorHost,
    EventProducer,
    MemoryLeaseStore,
    Park,
    PartitionContext,
    PartitionReader,
)
from tests.support.telemetry import Recording, links


@pytest.fixture
async def service() -> AsyncIterator[Emulator]:
    """A service with the hubs of these programs."""
    async with Emulator(hubs={"numbers": 2, "doubles": 2, "parked": 1}) as started:
        yield started


def _linked(span: ReadableSpan, *others: ReadableSpan) -> bool:
    return [number for number, _ in links(span)] == [each.context.span_id for each in others]


async def test_trace_leads_from_producer_over_app_to_reader(service: Emulator) -> None:
    """Send, process of the app, what it publishes, and receive are linked; each has the place of the service."""
    text, recording = service.connection_string, Recording(management_spans=True)
    app = EventHubsApp(text, lease_store=MemoryLeaseStore, telemetry=recording.telemetry)
    handled = asyncio.Event()

    @app.subscriber("numbers")
    @app.publisher("doubles")
    async def double(number: int, context: PartitionContext) -> int:
        with recording.tracers.get_tracer("mine").start_as_current_span("mine"):
            handled.set()
            return number * 2

    async with app:
        async with EventProducer(text, "numbers", telemetry=recording.telemetry) as producer:
            await producer.send(EventData.json(21), partition_id="0")
        async with (
            PartitionReader(
                text, "doubles", partition_id="0", receiver_name="reader", telemetry=recording.telemetry
            ) as first,
            PartitionReader(text, "doubles", partition_id="1", telemetry=recording.telemetry) as second,
        ):
            reads = [asyncio.create_task(each.read()) for each in (first, second)]
            done, pending = await asyncio.wait(reads, return_when=asyncio.FIRST_COMPLETED, timeout=30)
            for each in pending:
                each.cancel()
            await asyncio.wait(pending)
        (event,) = done.pop().result()
    assert event.body == b"42"
    (process,), (mine,), (receive,) = (recording.spans(name) for name in ("process", "mine", "receive"))
    sent, published = sorted(recording.spans("send"), key=lambda span: span.name != "send numbers")
    assert (sent.kind, published.kind) == (SpanKind.PRODUCER, SpanKind.CLIENT)
    assert _linked(process, sent)
    assert mine.parent is not None
    assert mine.parent.span_id == process.context.span_id
    assert _linked(published, process)
    assert _linked(receive, process)
    place = {"server.address": "127.0.0.1", "server.port": service.port}
    for span in (process, sent, published, receive, *recording.spans("get_event_hub_properties")):
        attributes: dict[str, Any] = dict(span.attributes or {})
        assert place.items() <= attributes.items()
        if span is not process:
            assert attributes["network.peer.address"] in ("127.0.0.1", "::1")
            assert attributes["network.peer.port"] == service.port
    assert recording.spans("get_event_hub_properties")


async def test_application_under_test_is_recorded(service: Emulator) -> None:
    """`app.test` keeps the option, for hosts and producers."""
    recording = Recording()
    app = EventHubsApp(telemetry=recording.telemetry, failure_policy="stop")

    @app.subscriber("numbers", concurrency=2)
    @app.publisher("doubles")
    async def double(number: int) -> int:
        return number * 2

    async with app.test(partitions=1) as hubs:
        await hubs["numbers"].publish(1, 2)
        await hubs["numbers"].handled()
    assert len(recording.spans("process")) == 2
    assert recording.value("messaging.client.sent.messages") == 2


async def test_parked_event_keeps_its_context(service: Emulator) -> None:
    """It is sent in the trace of its own sender, not of the host that could not process it; the send is recorded."""
    text, recording = service.connection_string, Recording()

    async def handle(context: PartitionContext, events: Any) -> None:
        raise ValueError

    async with EventProducer(text, "numbers", telemetry=recording.telemetry) as producer:
        await producer.send(EventData(b"a"), partition_id="0")
    host = EventProcessorHost(
        text,
        "numbers",
        processor=handle,
        lease_store=MemoryLeaseStore(),
        failure_policy=Park("parked"),
        telemetry=recording.telemetry,
    )
    running = asyncio.create_task(host.run())
    async with PartitionReader(text, "parked", partition_id="0") as reader, asyncio.timeout(30):
        assert len(await reader.read()) == 1
    await host.aclose()
    await running
    sent, parked = recording.spans("send")
    assert _linked(parked, sent)
    assert recording.value("eventpump.handler.failures", outcome="parked") == 1


@pytest.mark.parametrize("client", [EventProducer, BufferedProducer, PartitionReader, EventProcessorHost])
def test_each_client_takes_telemetry_and_nothing_else(client: Any) -> None:
    """The option is checked when a client is created."""
    more: dict[str, Any] = {"partition_id": "0"} if client is PartitionReader else {}
    if client is EventProcessorHost:
        more = {"lease_store": MemoryLeaseStore()}
    text = "Endpoint=sb://localhost;SharedAccessKeyName=a;SharedAccessKey=b;UseDevelopmentEmulator=true"
    with pytest.raises(ConfigurationError, match="telemetry"):
        client(text, "numbers", telemetry="yes", **more)
    assert client(text, "numbers", telemetry=Recording().telemetry, **more) is not None
