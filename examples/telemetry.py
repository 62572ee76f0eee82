"""Traces and metrics with OpenTelemetry: a producer, a host that forwards, and the links between their spans.

    pip install 'eventpump[otel]' opentelemetry-sdk
    python examples/telemetry.py

It sends events to a local service within a span, processes them, and prints a line for each
span, with what it is linked to, and then the metrics. In a program of yours the exporters of
`opentelemetry-exporter-otlp` are in the place of these, and the program calls
`trace.set_tracer_provider` and `metrics.set_meter_provider`; then `Telemetry()` needs no
arguments.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from eventpump import (
    BufferedProducer,
    ConfigurationError,
    Emulator,
    EventData,
    EventProcessorHost,
    EventProducer,
    MemoryLeaseStore,
    PartitionContext,
    ReceivedEvent,
)

try:
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader
    from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
    from opentelemetry.sdk.trace.export import (
        SimpleSpanProcessor,
        SpanExporter,
        SpanExportResult,
    )

    from eventpump.telemetry import Telemetry
except (ImportError, ConfigurationError):
    sys.exit("this example needs: pip install 'eventpump[otel]' opentelemetry-sdk")

EVENTS = 4


class Printed(SpanExporter):
    """Prints each span when it has ended: its id, its name, and the spans that it is below or linked to."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        for span in spans:
            parent = "" if span.parent is None else f", in {span.parent.span_id:016x}"
            links = "".join(
                f", linked to {each.context.span_id:016x}" for each in span.links
            )
            print(f"{span.context.span_id:016x} {span.name}{parent}{links}", flush=True)
        return SpanExportResult.SUCCESS


async def main() -> None:
    tracers = TracerProvider()
    tracers.add_span_processor(SimpleSpanProcessor(Printed()))
    reader = InMemoryMetricReader()
    telemetry = Telemetry(tracers, MeterProvider([reader]))
    async with Emulator(hubs={"telemetry": 1, "copy": 1}) as service:
        text = service.connection_string
        async with EventProducer(text, "telemetry", telemetry=telemetry) as producer:
            with tracers.get_tracer("example").start_as_current_span("measure"):
                await producer.send(
                    [EventData(f"reading {number}") for number in range(EVENTS)]
                )
        copied = asyncio.Event()
        async with BufferedProducer(text, "copy", telemetry=telemetry) as copies:

            async def forward(
                context: PartitionContext, events: Sequence[ReceivedEvent]
            ) -> None:
                # In the span of the batch: the copies carry its context.
                await copies.send_and_wait([EventData(event.body) for event in events])
                copied.set()

            host = EventProcessorHost(
                text,
                "telemetry",
                processor=forward,
                lease_store=MemoryLeaseStore(),
                telemetry=telemetry,
            )
            await host.run(until=copied.wait())
    data = reader.get_metrics_data()
    for resource in () if data is None else data.resource_metrics:
        for scope in resource.scope_metrics:
            print(
                "\nmetrics:",
                *sorted(metric.name for metric in scope.metrics),
                sep="\n  ",
            )


if __name__ == "__main__":
    asyncio.run(main())
