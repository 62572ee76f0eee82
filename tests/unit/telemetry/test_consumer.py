"""Spans and metrics of hosts and readers, as the tables of docs/reference/traces.md and metrics.md have them."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.trace import SpanKind, StatusCode

from eventpump.consumer.host.host import HubHost
from eventpump.consumer.keyed import KeyedProcessor
from eventpump.consumer.processor import PartitionContext
from eventpump.consumer.reader.reader import HubReader
from eventpump.core.checkpoint import CheckpointPolicy
from eventpump.errors import ConfigurationError, DataLossError, ServiceBusyError, ServiceTimeoutError, StoreError
from eventpump.eventhubs.events import EventData, ReceivedEvent
from eventpump.options.base import RetryOptions
from eventpump.options.consumer import Park, ReaderSettings
from eventpump.producer.producer import HubProducer
from eventpump.reports import LeaseLost, LinkFailed, LoopBlocked, StoreFailed
from eventpump.telemetry import Telemetry
from eventpump.telemetry.consuming import counts_of
from eventpump.testing.transport import FakeHub, FakeTransport
from tests.support.fleet import NO_PROCESSOR, Fleet, RecordingProcessor, stocked
from tests.support.telemetry import PARENT, TRACE, Recording, broken_telemetry, links

PLACE = {
    "messaging.system": "eventhubs",
    "messaging.destination.name": "telemetry",
    "messaging.destination.partition.id": "0",
    "messaging.consumer.group.name": "$Default",
    "server.address": "fake.servicebus.windows.net",
}
"""What all that a host records has, beside the operation."""

PROCESS = {**PLACE, "messaging.operation.name": "process", "messaging.operation.type": "process"}


def _of_span(operation: str, kind: str, **more: Any) -> dict[str, Any]:
    of_client = {"messaging.client.id": "a", "az.namespace": "Microsoft.EventHub"}
    return {**PLACE, "messaging.operation.name": operation, "messaging.operation.type": kind, **of_client, **more}


async def _publish(hub: FakeHub, *events: EventData, partition_id: str = "0") -> None:
    async with HubProducer(FakeTransport(hub), hub.name) as producer:
        await producer.send(list(events), partition_id=partition_id)


def _traced(span_id: int, body: bytes = b"", **standard: Any) -> EventData:
    return EventData(body, properties={"traceparent": PARENT.format(span_id)}, **standard)


async def _process(fleet: Fleet, recording: Recording, count: int, processor: Any = None, **options: Any) -> None:
    """Run a host until so many events are processed."""
    await fleet.start("a", processor, telemetry=recording.telemetry, **options)
    await fleet.until(lambda: len(fleet.record.numbers("0")) >= count, 60)
    await fleet.hosts["a"].aclose()


# ----------------------------------------------------------------------------------------------------- process


async def test_batch_has_a_process_span_with_its_row_of_the_table() -> None:
    """One span per batch, CONSUMER, with the attributes of the table and a link per context."""
    recording = Recording()
    async with stocked() as fleet:
        await _publish(fleet.hub, _traced(1), _traced(2), _traced(2), EventData(b"without"))
        await _process(fleet, recording, 4)
    (span,) = recording.spans("process")
    assert (span.name, span.kind, span.status.status_code) == ("process telemetry", SpanKind.CONSUMER, StatusCode.UNSET)
    assert dict(span.attributes or {}) == _of_span("process", "process", **{"messaging.batch.message_count": 4})
    assert [number for number, _ in links(span)] == [1, 2]
    assert {each.context.trace_id for each in span.links} == {TRACE}
    assert span.parent is None
    for _, attributes in links(span):
        assert attributes.keys() == {"messaging.eventhubs.message.enqueued_time", "enqueuedTime"}
        assert attributes["messaging.eventhubs.message.enqueued_time"] == attributes["enqueuedTime"] // 1000
    scope = span.instrumentation_scope
    assert scope is not None
    assert (scope.name, scope.schema_url) == ("eventpump", "https://opentelemetry.io/schemas/1.44.0")


async def test_single_event_has_its_own_attributes_in_place_of_a_count() -> None:
    """Message id, conversation and time are those of the event, which is linked, and is not the parent."""
    recording = Recording()
    async with stocked() as fleet:
        await _publish(fleet.hub, _traced(9, message_id="m-1", correlation_id=7))
        await _process(fleet, recording, 1)
    (span,) = recording.spans("process")
    attributes = dict(span.attributes or {})
    seconds = attributes.pop("messaging.eventhubs.message.enqueued_time")
    assert isinstance(seconds, int)
    ids = {"messaging.message.id": "m-1", "messaging.message.conversation_id": "7"}
    assert attributes == _of_span("process", "process", **ids)
    assert [number for number, _ in links(span)] == [9]
    assert span.parent is None


async def test_event_is_the_parent_only_where_that_is_asked_for() -> None:
    """With `process_spans="event"` the context of a single event is parent and link; of a batch it is a link."""
    recording = Recording(process_spans="event")
    async with stocked() as fleet:
        await _publish(fleet.hub, _traced(9))
        await _process(fleet, recording, 1, max_batch_size=2)
        await _publish(fleet.hub, _traced(10), _traced(11))
        await fleet.start("b", telemetry=recording.telemetry, max_batch_size=2)
        await fleet.until(lambda: len(fleet.record.numbers("0", "b")) >= 2, 60)
    one, two = recording.spans("process")
    assert one.parent is not None
    assert (one.parent.span_id, one.context.trace_id) == (9, TRACE)
    assert [number for number, _ in links(one)] == [9]
    assert two.parent is None


async def test_span_is_the_current_one_while_the_processor_runs() -> None:
    """And not afterwards: the next batch has another, which has no parent."""
    recording = Recording()
    current: list[int] = []

    async def handle(context: PartitionContext, events: Sequence[ReceivedEvent]) -> None:
        current.append(trace.get_current_span().get_span_context().span_id)
        await asyncio.sleep(0.1)
        with recording.tracers.get_tracer("mine").start_as_current_span("mine"):
            pass
        current.append(trace.get_current_span().get_span_context().span_id)

    async with stocked(4) as fleet:
        await fleet.start(
            "a",
            lambda: RecordingProcessor(fleet.record, on_events=handle),
            max_batch_size=2,
            telemetry=recording.telemetry,
        )
        await fleet.until(lambda: len(recording.spans("process")) == 2, 60)
    ids = [span.context.span_id for span in recording.spans("process")]
    assert current == [ids[0], ids[0], ids[1], ids[1]]
    assert [span.parent.span_id for span in recording.spans("mine") if span.parent is not None] == ids
    assert [span.parent for span in recording.spans("process")] == [None, None]
    assert not trace.get_current_span().get_span_context().is_valid


async def test_metrics_of_a_batch_have_their_rows_of_the_table() -> None:
    """Names, units, buckets and attributes; once per batch, and the events in a counter."""
    recording = Recording()
    async with stocked(5) as fleet:
        await _process(fleet, recording, 5, max_batch_size=3)
    metrics = recording.metrics
    assert {name: metrics[name].unit for name in metrics if name.startswith("messaging.")} == {
        "messaging.client.operation.duration": "s",
        "messaging.client.consumed.messages": "{message}",
        "messaging.process.duration": "s",
        "messaging.eventhubs.consumer.lag": "s",
    }
    assert recording.points("messaging.client.consumed.messages") == [(PROCESS, 5)]
    assert recording.points("messaging.process.duration") == [(PROCESS, 2)]
    assert recording.points("messaging.eventhubs.consumer.lag") == [(PLACE, 2)]
    checkpoint = {**PLACE, "messaging.operation.name": "checkpoint", "messaging.operation.type": "settle"}
    assert (checkpoint, len(recording.spans("checkpoint"))) in recording.points("messaging.client.operation.duration")
    for name in ("messaging.process.duration", "messaging.client.operation.duration"):
        for point in metrics[name].data.data_points:
            bounds = [0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10]
            assert list(getattr(point, "explicit_bounds")) == bounds  # noqa: B009 - other points have none


async def test_partition_can_be_left_out_of_the_metrics() -> None:
    """With `partition_attribute=False` gauges are sums, and spans keep the partition."""
    recording = Recording(partition_attribute=False)
    async with stocked(3, partitions=4) as fleet:
        await fleet.start(telemetry=recording.telemetry)
        await fleet.until(lambda: all(fleet.record.numbers(each) for each in fleet.hub.partition_ids), 60)
        owned = recording.points("eventpump.partition.owned")
    without = {key: value for key, value in PLACE.items() if key != "messaging.destination.partition.id"}
    assert owned == [({**without, "state": "running"}, 4)]
    assert recording.value("messaging.client.consumed.messages") == 12
    assert not any(
        "partition" in key for attributes, _ in recording.points("messaging.process.duration") for key in attributes
    )
    partitions = {(span.attributes or {})["messaging.destination.partition.id"] for span in recording.spans("process")}
    assert partitions == {"0", "1", "2", "3"}


async def test_failure_is_in_the_span_and_in_the_metrics() -> None:
    """The class of an error is its type, and the AMQP condition where it has one; the failure is counted."""
    recording = Recording()
    errors: list[Exception] = [
        ValueError("wrong"),
        ServiceBusyError("busy", condition="com.microsoft:server-busy"),
    ]

    async def handle(context: PartitionContext, events: Sequence[ReceivedEvent]) -> None:
        if errors:
            raise errors.pop(0)

    async with stocked(1) as fleet:
        await fleet.start(
            "a", lambda: RecordingProcessor(fleet.record, on_events=handle), telemetry=recording.telemetry
        )
        await fleet.until(lambda: len(recording.spans("process")) == 3, 60)
    first, second, third = recording.spans("process")
    assert (first.attributes or {})["error.type"] == "ValueError"
    assert (first.status.status_code, first.status.description) == (StatusCode.ERROR, "ValueError: wrong")
    assert (second.attributes or {})["error.type"] == "com.microsoft:server-busy"
    assert third.status.status_code is StatusCode.UNSET
    assert recording.value("messaging.process.duration", error_type="ValueError") == 1
    failed = {"outcome": "retried"}
    assert recording.value("eventpump.handler.failures", error_type="ValueError", **failed) == 1
    assert recording.value("eventpump.handler.failures", error_type="com.microsoft:server-busy", **failed) == 1


@pytest.mark.parametrize(("policy", "outcome"), [("skip", "skipped"), ("park", "parked"), ("stop", "stopped")])
async def test_failures_are_counted_by_what_follows(policy: str, outcome: str) -> None:
    """Each event that is skipped or parked counts once, and a failure after which the host stops."""
    recording = Recording()

    async def handle(context: PartitionContext, events: Sequence[ReceivedEvent]) -> None:
        raise ValueError

    async def store(context: PartitionContext, event: ReceivedEvent, error: Exception) -> None:
        return None

    chosen: Any = Park(store) if policy == "park" else policy
    async with stocked(1) as fleet:
        await fleet.start(
            "a",
            lambda: RecordingProcessor(fleet.record, on_events=handle),
            failure_policy=chosen,
            telemetry=recording.telemetry,
        )
        await fleet.until(lambda: recording.value("eventpump.handler.failures", outcome=outcome) is not None, 60)
    assert recording.value("eventpump.handler.failures") == 1


async def test_calls_without_events_are_not_recorded() -> None:
    """With `call_when_idle` the processor is called without a batch, which has no span."""
    recording = Recording()
    async with stocked(1) as fleet:
        await fleet.start(telemetry=recording.telemetry, call_when_idle=True, max_wait_time=1.0)
        await fleet.until(lambda: len(fleet.record.deliveries) > 3, 60)
    assert len(recording.spans("process")) == 1


# -------------------------------------------------------------------------------------------- other ways to process


@pytest.mark.parametrize("size", [1, 4])
async def test_each_call_of_a_keyed_processor_is_a_batch(size: int) -> None:
    """Its span is current in that call only, while others run; a call that is retried has a span each."""
    recording = Recording()
    seen: list[tuple[tuple[int, ...], int]] = []
    has_failed = False

    async def handle(context: PartitionContext, events: Sequence[ReceivedEvent]) -> None:
        nonlocal has_failed
        before = trace.get_current_span().get_span_context().span_id
        await asyncio.sleep(0.01)
        assert trace.get_current_span().get_span_context().span_id == before
        numbers = tuple(event.sequence_number for event in events)
        seen.append((numbers, before))
        if 3 in numbers and not has_failed:
            has_failed = True
            raise ValueError

    processor = KeyedProcessor(handle, key=lambda event: event.sequence_number % 3, max_batch_per_key=size)
    retry = RetryOptions(max_retries=3)
    async with stocked() as fleet:
        await _publish(fleet.hub, *(_traced(number + 1) for number in range(12)))
        await fleet.start("a", lambda: processor, telemetry=recording.telemetry, handler_retry=retry)
        await fleet.until(lambda: sum(len(numbers) for numbers, _ in seen) >= 13, 60)
    spans = {span.context.span_id: span for span in recording.spans("process")}
    assert len(spans) == len(seen)
    assert recording.value("messaging.process.duration") == len(seen)
    for numbers, span_id in seen:
        assert [number for number, _ in links(spans[span_id])] == [number + 1 for number in numbers]
    assert [span for span in spans.values() if span.status.status_code is StatusCode.ERROR]


async def test_batch_of_a_loop_has_a_span_until_it_is_acknowledged() -> None:
    """It is current in the body of the loop; and neither in the next batch nor after the loop."""
    recording = Recording()
    ids: list[int] = []
    async with stocked(6) as fleet:
        host = fleet.host("a", NO_PROCESSOR, telemetry=recording.telemetry, max_batch_size=2)
        async for batch in host.batches():
            ids.append(trace.get_current_span().get_span_context().span_id)
            await asyncio.sleep(0.1)
            if batch.events[-1].sequence_number == 5:
                host.stop()
        assert not trace.get_current_span().get_span_context().is_valid
    spans = recording.spans("process")
    assert [span.context.span_id for span in spans] == ids
    assert [span.parent for span in spans] == [None, None, None]
    assert all(span.status.status_code is StatusCode.UNSET for span in spans)
    assert recording.value("messaging.client.consumed.messages") == 6


async def test_batch_of_a_loop_that_is_left_has_failed() -> None:
    """And its span, although the context of the task still has it, is not the current one of what follows."""
    recording = Recording()
    async with stocked(4) as fleet:
        host = fleet.host("a", NO_PROCESSOR, telemetry=recording.telemetry, max_batch_size=2)
        async for _ in host.batches():
            break
        await fleet.until(lambda: len(recording.spans("process")) == 1, 60)
        assert not trace.get_current_span().get_span_context().is_valid
        with recording.tracers.get_tracer("mine").start_as_current_span("mine"):
            pass
    assert recording.spans("mine")[0].parent is None
    (span,) = recording.spans("process")
    assert (span.attributes or {})["error.type"] == "NotAcknowledgedError"


async def test_each_subscription_records_its_own_batches() -> None:
    """Two subscriptions have a span each for the same events, and a lag each, that of the second with its name."""
    recording = Recording()
    async with stocked() as fleet:
        host = fleet.host("a", telemetry=recording.telemetry)
        await host.subscribe("audit", lambda: RecordingProcessor(fleet.record))
        fleet.runs["a"] = asyncio.create_task(host.run())
        await _publish(fleet.hub, _traced(1))
        await fleet.until(lambda: len(recording.spans("process")) == 2, 60)
        await fleet.until(lambda: len(recording.points("eventpump.partition.lag")) >= 2, 60)
        lags = recording.points("eventpump.partition.lag")
    assert [[number for number, _ in links(span)] for span in recording.spans("process")] == [[1], [1]]
    assert {attributes.get("eventpump.subscription") for attributes, _ in lags} == {None, "audit"}


# -------------------------------------------------------------------------------------- checkpoints and management


async def test_checkpoint_has_a_span_in_that_of_the_batch_which_asked_for_it() -> None:
    """CLIENT, `settle`, one per write; a failure of the store has its class."""
    recording = Recording()
    async with stocked(1) as fleet:
        await _process(fleet, recording, 1)
    (process,), (span, *_) = recording.spans("process"), recording.spans("checkpoint")
    assert (span.name, span.kind) == ("checkpoint telemetry", SpanKind.CLIENT)
    assert dict(span.attributes or {}) == _of_span("checkpoint", "settle")
    assert not span.links
    assert any(
        each.parent is not None and each.parent.span_id == process.context.span_id
        for each in recording.spans("checkpoint")
    )


async def test_checkpoint_of_each_batch_has_a_span_in_that_of_its_batch() -> None:
    """Whatever asked before: the batch that asks for a checkpoint has its span, and events are reported within it."""
    recording = Recording()
    async with stocked(3) as fleet:
        await _process(fleet, recording, 3, max_batch_size=1)
    asked = [span.context.span_id for span in recording.spans("process")]
    assert len(set(asked)) == 3
    assert [each.parent.span_id for each in recording.spans("checkpoint") if each.parent is not None] == asked


async def test_failed_checkpoint_has_an_error() -> None:
    """The store's error is in the span and in the metric, and the failure is counted."""
    recording = Recording()
    async with stocked(1) as fleet:
        host = fleet.host("a", telemetry=recording.telemetry)
        store = fleet.stores["a"]
        write, failing = store.write_checkpoint, True

        async def refuse(*args: Any, **options: Any) -> bool:
            if failing:
                raise StoreError("write checkpoint", "full")
            return await write(*args, **options)

        store.write_checkpoint = refuse  # type: ignore[method-assign]  # one that fails
        fleet.runs["a"] = asyncio.create_task(host.run())
        await fleet.until(lambda: recording.value("eventpump.store.failures") is not None, 60)
        failing = False
        await fleet.until(lambda: fleet.checkpoint("0") == 0, 60)
    assert {(span.attributes or {}).get("error.type") for span in recording.spans("checkpoint")} == {None, "StoreError"}
    name = "messaging.client.operation.duration"
    assert recording.value(name, messaging_operation_name="checkpoint", error_type="StoreError") >= 1
    assert recording.value("eventpump.store.failures", operation="write checkpoint") >= 1


@pytest.mark.parametrize("has_spans", [False, True])
async def test_management_reads_are_measured_and_have_spans_if_asked_for(has_spans: bool) -> None:
    """Their operations have no type, and no consumer group."""
    recording = Recording(management_spans=has_spans)
    async with stocked(1) as fleet:
        await _process(fleet, recording, 1)
    measured = {
        attributes["messaging.operation.name"]: attributes
        for attributes, _ in recording.points("messaging.client.operation.duration")
    }
    assert measured.keys() == {"get_event_hub_properties", "get_partition_properties", "checkpoint"}
    base = {key: PLACE[key] for key in ("messaging.system", "messaging.destination.name", "server.address")}
    assert measured["get_event_hub_properties"] == {**base, "messaging.operation.name": "get_event_hub_properties"}
    spans = recording.spans("get_partition_properties")
    assert bool(spans) is has_spans
    for span in spans:
        partition = {"messaging.destination.partition.id": "0", "messaging.client.id": "a"}
        operation = {"messaging.operation.name": "get_partition_properties", "az.namespace": "Microsoft.EventHub"}
        assert (span.kind, dict(span.attributes or {})) == (SpanKind.CLIENT, {**base, **partition, **operation})


# ------------------------------------------------------------------------------------------------ reports and gauges


async def test_gauges_show_what_a_host_holds_also_to_another_thread() -> None:
    """Lag, owned partitions and bytes; a thread that collects metrics asks the loop; none after the host's end."""
    recording = Recording()
    async with stocked(3) as fleet:
        await fleet.start(telemetry=recording.telemetry)
        await fleet.until(lambda: fleet.checkpoint("0") == 2 and recording.value("eventpump.partition.lag") == 0, 60)
        from_loop = recording.points("eventpump.partition.owned")
        collected = asyncio.get_running_loop().create_future()
        loop = asyncio.get_running_loop()

        def collect() -> None:
            found = recording.points("eventpump.partition.owned")
            loop.call_soon_threadsafe(collected.set_result, found)

        thread = threading.Thread(target=collect)
        thread.start()
        assert await collected == from_loop == [({**PLACE, "state": "running"}, 1)]
        thread.join()
        units = {name: metric.unit for name, metric in recording.metrics.items() if name.startswith("eventpump.")}
        lags = recording.points("eventpump.partition.lag")
        held = recording.points("eventpump.cache.size")
        await fleet.hosts["a"].aclose()
        assert recording.points("eventpump.partition.owned") == []
    assert units == {
        "eventpump.partition.lag": "{event}",
        "eventpump.partition.owned": "{partition}",
        "eventpump.partition.moves": "{move}",
        "eventpump.cache.size": "By",
    }
    assert lags == [({**PLACE, "position": "delivered"}, 0), ({**PLACE, "position": "checkpointed"}, 0)]
    assert held == [(PLACE, 0)]
    assert recording.value("eventpump.partition.moves", reason="acquired") == 1
    assert recording.value("eventpump.partition.moves", reason="released") == 1


SERIES = {
    "eventpump.partition.owned": "eventpump_partition_owned",
    "eventpump.partition.lag": "eventpump_partition_lag",
    "eventpump.partition.moves": "eventpump_partition_moves_total",
    "eventpump.handler.failures": "eventpump_handler_failures_total",
    "eventpump.link.reopens": "eventpump_link_reopens_total",
    "eventpump.cache.size": "eventpump_cache_size_bytes",
}
"""What a `HealthServer` serves, by the instrument."""


async def test_both_ways_show_the_same_values_with_the_same_labels() -> None:
    """A host with telemetry and a page of metrics: partitions that wait, that fail, that are detached and attached."""
    recording = Recording()

    async def process(context: PartitionContext, events: Sequence[ReceivedEvent]) -> None:
        if events[0].sequence_number == 3:
            raise ValueError
        if events[0].sequence_number == 4:
            await asyncio.sleep(3600)

    def differing(host: HubHost) -> dict[str, Any]:
        pages: dict[str, list[Any]] = {name: [] for name in SERIES.values()}
        for metric in host.metrics():
            if metric.name in pages:
                pages[metric.name] += [(sorted(each.labels.items()), each.value) for each in metric.samples]
        recorded = {
            page: [
                (sorted((key.replace(".", "_"), text) for key, text in attributes.items()), value)
                for attributes, value in recording.points(name)
            ]
            for name, page in SERIES.items()
        }
        return {
            page: (values, recorded[page]) for page, values in pages.items() if sorted(values) != sorted(recorded[page])
        }

    async with stocked(20, partitions=2) as fleet:
        processor = RecordingProcessor(fleet.record, on_events=process)
        options = {"max_batch_size": 1, "track_last_enqueued": True, "failure_policy": "skip"}
        host = await fleet.start("a", processor, telemetry=recording.telemetry, **options)
        await asyncio.sleep(20)
        assert differing(host) == {}
        skipped = recording.value(
            "eventpump.handler.failures", outcome="skipped", messaging_destination_partition_id="0"
        )
        assert skipped == 1
        fleet.hub.refuse(ServiceTimeoutError("no answer"), times=float("inf"))
        fleet.hub.detach("0")
        await asyncio.sleep(1)
        states = {attributes["state"] for attributes, _ in recording.points("eventpump.partition.owned")}
        assert states == {"running", "detached"}
        assert differing(host) == {}
        fleet.hub.accept()


async def test_two_telemetry_objects_over_one_provider_show_both_hosts() -> None:
    """The API has one instrument per name: hosts with objects of their own are all seen."""
    recording = Recording()
    other = Telemetry(recording.tracers, recording.meters)
    async with stocked(1, partitions=2) as fleet:
        await fleet.start("a", telemetry=recording.telemetry)
        await fleet.start("b", telemetry=other)
        await fleet.until(lambda: all(len(host.partitions) == 1 for host in fleet.hosts.values()), 120)
        assert recording.value("eventpump.partition.owned") == 2


@pytest.mark.parametrize(
    ("report", "name", "attributes"),
    [
        (LeaseLost("a", "0", 1, "why"), "eventpump.partition.moves", {"reason": "lost"}),
        (LinkFailed("a", "0", ValueError(), 1.0), "eventpump.link.reopens", {"error.type": "ValueError"}),
        (StoreFailed("a", "0", "renew", ValueError()), "eventpump.store.failures", {"operation": "renew"}),
        (LoopBlocked("a", None, 3.0, "open"), "eventpump.loop.blocked", {"operation": "open"}),
        (LoopBlocked("a", None, 3.0, None), "eventpump.loop.blocked", {}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_reports_are_counted(report: Any, name: str, attributes: dict[str, str]) -> None:
    """Each with its instrument, and what distinguishes it."""
    counted = counts_of(report)
    assert counted is not None
    assert (counted[0].name, counted[1], counted[2]) == (name, 3.0 if name.endswith("blocked") else 1, attributes)


# ---------------------------------------------------------------------------------------------------------- readers


def _reader(hub: FakeHub, recording: Recording, **options: Any) -> HubReader:
    settings = ReaderSettings(
        hub=hub.name, partition_id="0", receiver_name="a", telemetry=recording.telemetry, **options
    )
    return HubReader(lambda: FakeTransport(hub), settings, rng=random.Random(1))


async def test_read_has_a_receive_span_that_covers_the_wait() -> None:
    """CLIENT, for events that are returned to the caller; not for those received ahead, nor for a read without any."""
    recording = Recording()
    hub = FakeHub(partitions=1)
    async with _reader(hub, recording) as reader:
        assert await reader.read(max_wait_time=1) == []
        reading = asyncio.create_task(reader.read(2))
        await asyncio.sleep(2)
        await _publish(hub, _traced(1), _traced(2), _traced(3))
        assert len(await reading) == 2
    (span,) = recording.spans("receive")
    assert (span.name, span.kind) == ("receive telemetry", SpanKind.CLIENT)
    assert dict(span.attributes or {}) == _of_span("receive", "receive", **{"messaging.batch.message_count": 2})
    assert [number for number, _ in links(span)] == [1, 2]
    assert span.start_time is not None
    assert span.end_time is not None
    assert span.end_time - span.start_time > 1.9e9
    receive = {**PLACE, "messaging.operation.name": "receive", "messaging.operation.type": "receive"}
    assert recording.points("messaging.client.consumed.messages") == [(receive, 2)]
    assert (receive, 1) in recording.points("messaging.client.operation.duration")
    assert recording.points("messaging.eventhubs.consumer.lag") == [(PLACE, 1)]


async def test_read_that_fails_has_an_error() -> None:
    """The span and the measurement have the type of the error; it is raised as without telemetry."""
    recording = Recording()
    hub = FakeHub(partitions=1)
    hub.publish("0", count=5)
    async with _reader(hub, recording, on_data_loss="fail") as reader:
        assert len(await reader.read(1)) == 1
        hub.compact("0", [5, 6])
        hub.publish("0", count=3)
        hub.truncate("0", 7)
        assert len(await reader.read()) == 4
        with pytest.raises(DataLossError) as raised:
            await reader.read()
    failed = [span for span in recording.spans("receive") if span.status.status_code is StatusCode.ERROR]
    assert [(span.attributes or {})["error.type"] for span in failed] == [type(raised.value).__name__]


async def test_keyed_reading_has_process_spans() -> None:
    """`run` processes, and its own reads are not passed to the program."""
    recording = Recording()
    hub = FakeHub(partitions=1)
    hub.publish("0", count=3)

    async def handle(context: PartitionContext, events: Sequence[ReceivedEvent]) -> None:
        await asyncio.sleep(0)

    async with _reader(hub, recording, end="@latest") as reader:
        await reader.run(KeyedProcessor(handle, key=lambda event: event.sequence_number))
    assert (len(recording.spans("process")), recording.spans("receive")) == (3, [])


# ------------------------------------------------------------------------------------------------ absent, and broken


_PROGRAM = """
import asyncio, sys
from eventpump import EventData, EventProducer, Emulator, EventProcessorHost, MemoryLeaseStore, PartitionReader

async def main():
    async with Emulator(hubs={"telemetry": 1}) as service:
        text = service.connection_string
        async with EventProducer(text, "telemetry") as producer:
            await producer.send(EventData(b""))
        done = asyncio.Event()
        async def handle(context, events):
            done.set()
        host = EventProcessorHost(text, "telemetry", processor=handle, lease_store=MemoryLeaseStore())
        await host.run(until=done.wait())
        async with PartitionReader(text, "telemetry", partition_id="0", end="@latest") as reader:
            assert await reader.read_all()

asyncio.run(main())
print(*(name for name in sys.modules if name.startswith(("opentelemetry", "eventpump.telemetry."))))
"""


def test_nothing_is_imported_without_telemetry() -> None:
    """Neither OpenTelemetry nor what records: only the interface, which options name."""
    result = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["eventpump.telemetry.interface"]


async def test_no_telemetry_object_is_called_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted: each function of the package is replaced by one that counts, and a host without telemetry calls none."""
    import eventpump.telemetry.consuming as consuming
    import eventpump.telemetry.otel as otel

    calls: list[str] = []
    for module in (consuming, otel):
        for made in vars(module).values():
            if not isinstance(made, type) or made.__module__ != module.__name__:
                continue
            for name, method in list(vars(made).items()):
                if callable(method) and not name.startswith("__"):
                    counted = _counting(calls, f"{made.__name__}.{name}", method)
                    monkeypatch.setattr(made, name, counted)
    async with stocked(3) as fleet:
        await fleet.start()
        await fleet.until(lambda: fleet.checkpoint("0") == 2, 60)
    options: dict[str, Any] = {"hub": "telemetry", "partition_id": "0", "end": "@latest"}
    async with HubReader(lambda: FakeTransport(fleet.hub), ReaderSettings(**options)) as reader:
        assert len(await reader.read_all()) == 3
    assert calls == []
    recording = Recording()
    async with stocked(1) as fleet:
        await _process(fleet, recording, 1)
    assert "Recorder.start" in calls
    assert "PartitionRecorder.around" in calls


def _counting(calls: list[str], name: str, method: Any) -> Any:
    def counted(*args: Any, **options: Any) -> Any:
        calls.append(name)
        return method(*args, **options)

    return counted


@pytest.mark.parametrize("working", range(4))
@pytest.mark.parametrize("error", [ValueError("broken"), asyncio.CancelledError(), GeneratorExit()], ids=repr)
@pytest.mark.parametrize("kind", ["batches", "keyed", "loop"])
async def test_broken_telemetry_changes_nothing(
    kind: str, error: BaseException, working: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever tracers, spans and instruments raise, and from which call on: each event is processed once."""
    telemetry, tracers, meters = broken_telemetry(error, working)
    seen: list[int] = []

    async def handle(context: PartitionContext, events: Sequence[ReceivedEvent]) -> None:
        await asyncio.sleep(0.01)
        seen.extend(event.sequence_number for event in events)

    async with stocked() as fleet:
        await _publish(fleet.hub, *(_traced(number + 1) for number in range(20)))
        policy = CheckpointPolicy(every_events=1)
        options: dict[str, Any] = {"telemetry": telemetry, "checkpoint_policy": policy, "max_batch_size": 3}
        if kind == "loop":
            host = fleet.host("a", NO_PROCESSOR, **options)
            async for batch in host.batches():
                await handle(batch.context, batch.events)
                if seen[-1] == 19:
                    host.stop()
        else:
            keyed = KeyedProcessor(handle, key=lambda event: event.sequence_number % 5)
            retry = RetryOptions(max_retries=0)
            await fleet.start("a", (lambda: keyed) if kind == "keyed" else handle, handler_retry=retry, **options)
        await fleet.until(lambda: fleet.checkpoint("0") == 19, 60)
    assert sorted(seen) == list(range(20))
    assert tracers.calls > working
    assert meters.calls > working
    failed = [record for record in caplog.records if record.name == "eventpump.telemetry"]
    assert len(failed) == 1


async def test_cancelled_handler_ends_its_span() -> None:
    """A handler that is cancelled at its deadline has a span with that error, and the pump ends as without."""
    recording = Recording()
    has_begun = asyncio.Event()

    async def handle(context: PartitionContext, events: Sequence[ReceivedEvent]) -> None:
        has_begun.set()
        await asyncio.sleep(3600)

    async with stocked(1) as fleet:
        await fleet.start(
            "a", lambda: RecordingProcessor(fleet.record, on_events=handle), telemetry=recording.telemetry
        )
        await has_begun.wait()
        await fleet.hosts["a"].aclose(1.0)
    (span,) = recording.spans("process")
    assert (span.attributes or {})["error.type"] == "CancelledError"


async def test_telemetry_of_another_kind_is_refused() -> None:
    """By hosts and readers, with the name of the option; and arguments of `Telemetry` that cannot work."""
    given: Any
    for given in (object(), Telemetry, True):
        with pytest.raises(ConfigurationError, match=r"telemetry: must be an eventpump\.telemetry\.Telemetry"):
            ReaderSettings(hub="telemetry", partition_id="0", telemetry=given)
    wrong: dict[str, Any]
    for wrong in ({"propagate": "w3c"}, {"process_spans": "all"}, {"tracer_provider": 1}, {"meter_provider": 1}):
        with pytest.raises(ConfigurationError, match=next(iter(wrong))):
            Telemetry(**wrong)
    host: HubHost | None = None
    with suppress(ConfigurationError):
        host = Fleet().host("a", telemetry=object())
    assert host is None
