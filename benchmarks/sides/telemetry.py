"""Batches that are processed and sent, with and without telemetry, in turns in one process."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider

from eventpump.eventhubs.events import EventData, ReceivedEvent
from eventpump.interfaces import ConsumerScope
from eventpump.producer.producer import HubProducer
from eventpump.telemetry import Telemetry
from eventpump.telemetry.interface import PartitionTelemetry
from eventpump.testing.transport import FakeHub, FakeTransport

BATCHES = 30
"""Batches of 300 events in each round, or as many events in smaller ones."""

_NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def _raw(count: int, contexts: int) -> list[bytes]:
    """Return events, with so many different contexts; 0 for none."""
    return [
        ReceivedEvent.build(
            b"x" * 1000,
            offset=str(number),
            sequence_number=number,
            enqueued_time=_NOON,
            properties={"unit": "C", **({"traceparent": _parent(number % contexts)} if contexts else {})},
        ).raw
        for number in range(count)
    ]


def _parent(number: int) -> str:
    return f"00-0af7651916cd43dd8448eb211c80319c-{number + 1:016x}-01"


def _partition(telemetry: Telemetry) -> PartitionTelemetry:
    scope = ConsumerScope("example.servicebus.windows.net", "telemetry", "$Default")
    return telemetry.of_host(scope, "host", None, list).partition("0")


async def _process(context: object, events: Sequence[ReceivedEvent]) -> None:
    """Do nothing: what is measured is around it."""


async def _processed(method: Callable[..., Awaitable[None]], raw: Sequence[bytes], batches: int) -> float:
    """Return the microseconds of CPU per batch, of so many times as many batches as have 300 events."""
    total = batches * max(1, 300 // len(raw))
    took = 0
    while batches:
        # As fresh as from a socket, and several of a kind, which the clock is too coarse for.
        given = [[ReceivedEvent(bytes(memoryview(each))) for each in raw] for _ in range(max(1, 300 // len(raw)))]
        began = time.process_time_ns()
        for events in given:
            await method(None, events)
        took += time.process_time_ns() - began
        batches -= 1
    return took / total / 1e3


async def _sent(producer: HubProducer, batches: int) -> float:
    events = [EventData(b"x" * 1000) for _ in range(batches)]
    began = time.process_time()
    for event in events:
        await producer.send(event, partition_id="0")
    return (time.process_time() - began) / batches * 1e6


def _providers() -> tuple[TracerProvider, MeterProvider]:
    """Return providers that record; what exports the spans does nothing."""
    tracers = TracerProvider(shutdown_on_exit=False)
    tracers.add_span_processor(SpanProcessor())
    return tracers, MeterProvider([InMemoryMetricReader()], shutdown_on_exit=False)


def _alone(providers: tuple[TracerProvider, MeterProvider]) -> float:
    """Return what the SDK takes for a span with eleven attributes and three measurements, in microseconds of CPU."""
    tracer, meter = providers[0].get_tracer("alone"), providers[1].get_meter("alone")
    attributes = {f"attribute.{number}": "value" for number in range(11)}
    durations, lags, events = meter.create_histogram("d"), meter.create_histogram("l"), meter.create_counter("e")
    began = time.process_time()
    for _ in range(1000):
        span = tracer.start_span("alone", attributes=attributes)
        durations.record(1.0, attributes)
        lags.record(1.0, attributes)
        events.add(1, attributes)
        span.end()
    return (time.process_time() - began) * 1e3


async def telemetry(rounds: int) -> dict[str, float]:
    """Measure each case in turn.

    Returns:
        Microseconds of CPU: the medians over the rounds of what each costs above the same without telemetry, per batch.
    """
    recording_providers = _providers()
    recording = Telemetry(*recording_providers)
    absent, recorded = (_partition(each) for each in (Telemetry(), recording))
    plain, linked = _raw(300, 0), _raw(100, 100)
    shared = _raw(300, 1)
    costs: dict[str, list[float]] = {}
    hub = FakeHub(partitions=1)
    producers = {
        name: HubProducer(FakeTransport(hub), hub.name, telemetry=given)
        for name, given in (("none", None), ("absent", Telemetry()), ("recorded", recording))
    }

    async def over(name: str, method: PartitionTelemetry, raw: Sequence[bytes]) -> None:
        before = await _processed(_process, raw, BATCHES)
        after = await _processed(method.around(_process), raw, BATCHES)
        costs.setdefault(name, []).append(after - before)

    for _ in range(rounds):
        for size in (1, 300):
            few = plain[:size]
            await over(f"absent_{size}", absent, few)
            await over(f"recorded_{size}", recorded, few)
        await over("linked_1", recorded, linked[:1])
        await over("linked_100", recorded, linked)
        await over("shared_300", recorded, shared)
        costs.setdefault("sdk", []).append(_alone(recording_providers))
        sent = {name: await _sent(producer, 300) for name, producer in producers.items()}
        for name in ("absent", "recorded"):
            costs.setdefault(f"{name}_send", []).append(sent[name] - sent["none"])
        hub.truncate("0", hub.partition("0").next)
        await asyncio.sleep(0)
    for producer in producers.values():
        await producer.aclose()
    return {name: statistics.median(values) for name, values in costs.items()}
