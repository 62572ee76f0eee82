"""azure-eventhub with its tracing plugin, as a process of its own: sends events, or receives what there is.

    python -m tests.interop.peers.azure_tracing CONNECTION_STRING HUB send COUNT
    python -m tests.interop.peers.azure_tracing CONNECTION_STRING HUB receive COUNT

It prints its spans, one JSON object per line: name, kind, trace, span, and the linked traces and spans.
"""

from __future__ import annotations

import json
import sys
import threading

from azure.core.settings import settings
from azure.eventhub import EventData, EventHubConsumerClient, EventHubProducerClient
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter


def _send(text: str, hub: str, count: int) -> None:
    with EventHubProducerClient.from_connection_string(text, eventhub_name=hub) as client:
        batch = client.create_batch(partition_id="0")
        for number in range(count):
            batch.add(EventData(str(number)))
        client.send_batch(batch)


def _receive(text: str, hub: str, count: int) -> None:
    left, done = count, threading.Event()
    client = EventHubConsumerClient.from_connection_string(text, "$Default", eventhub_name=hub)

    def on_event(context: object, event: object) -> None:
        nonlocal left
        left -= 1
        if left <= 0:
            done.set()

    thread = threading.Thread(
        target=client.receive, args=(on_event,), kwargs={"partition_id": "0", "starting_position": "-1"}, daemon=True
    )
    thread.start()
    done.wait(60)
    client.close()
    thread.join(30)


def main(text: str, hub: str, what: str, count: str) -> None:
    """Do what is asked for, and print the spans."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    settings.tracing_implementation.set_value("opentelemetry")
    (_send if what == "send" else _receive)(text, hub, int(count))
    for span in exporter.get_finished_spans():
        context = span.context
        found = {
            "name": span.name,
            "kind": span.kind.name,
            "trace": context.trace_id,
            "span": context.span_id,
            "parent": None if span.parent is None else [span.parent.trace_id, span.parent.span_id],
            "links": [[each.context.trace_id, each.context.span_id] for each in span.links],
        }
        sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
