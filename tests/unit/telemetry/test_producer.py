"""Spans and metrics of producers, and the trace contexts that their events carry."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest
from opentelemetry import baggage, trace
from opentelemetry.context import attach, detach
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanKind, StatusCode

from eventpump.consumer.reader.reader import HubReader
from eventpump.core.router import RoundRobinRouter
from eventpump.errors import (
    BufferFullError,
    ClosedError,
    ConfigurationError,
    PublishOutcomeUnknownError,
    RequestRefusedError,
    ServiceBusyError,
)
from eventpump.eventhubs.codecs import PayloadCodec
from eventpump.eventhubs.events import EventData, ReceivedEvent
from eventpump.options.base import RetryOptions
from eventpump.options.consumer import ReaderSettings
from eventpump.options.producer import BufferSettings
from eventpump.producer.buffered import HubBufferedProducer
from eventpump.producer.producer import HubProducer
from eventpump.telemetry import Telemetry
from eventpump.testing.transport import FakeHub, FakeTransport, SendFault
from tests.support.telemetry import PARENT, TRACE, Recording, broken_telemetry, links

PLACE = {
    "messaging.system": "eventhubs",
    "messaging.destination.name": "telemetry",
    "server.address": "fake.servicebus.windows.net",
}
SEND = {**PLACE, "messaging.operation.name": "send", "messaging.operation.type": "send"}
ZERO = {"messaging.destination.partition.id": "0"}
AZURE = {"az.namespace": "Microsoft.EventHub"}
COUNT = "messaging.batch.message_count"
ONCE = RetryOptions(max_retries=0)


def _producer(hub: FakeHub, telemetry: Telemetry, **options: Any) -> HubProducer:
    return HubProducer(FakeTransport(hub), hub.name, rng=random.Random(1), telemetry=telemetry, **options)


def _buffered(hub: FakeHub, telemetry: Telemetry, settings: BufferSettings | None = None, **options: Any) -> Any:
    return HubBufferedProducer(_producer(hub, telemetry, **options), settings)


async def _stored(hub: FakeHub, partition_id: str = "0") -> list[ReceivedEvent]:
    given: dict[str, Any] = {"hub": hub.name, "partition_id": partition_id, "end": "@latest"}
    async with HubReader(lambda: FakeTransport(hub), ReaderSettings(**given)) as reader:
        return await reader.read_all()


def _parent(span: ReadableSpan) -> str:
    context = span.context
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


@pytest.fixture
def hub() -> FakeHub:
    """Return a hub of one partition."""
    return FakeHub(partitions=1)


# ---------------------------------------------------------------------------------------------------------- one send


async def test_send_has_a_span_whose_context_the_events_carry(hub: FakeHub) -> None:
    """Without a current span that is a PRODUCER, with its row of the table; the given events are not changed."""
    recording = Recording()
    events = [EventData(b"a"), EventData(b"b", properties={"unit": "C"})]
    async with _producer(hub, recording.telemetry) as producer:
        await producer.send(events, partition_id="0")
    (span,) = recording.spans("send")
    assert (span.name, span.kind, span.parent) == ("send telemetry", SpanKind.PRODUCER, None)
    assert dict(span.attributes or {}) == {**SEND, **ZERO, **AZURE, COUNT: 2}
    assert span.status.status_code is StatusCode.UNSET
    assert not span.links
    first, second = await _stored(hub)
    assert first.properties == {"traceparent": _parent(span)}
    assert second.properties == {"traceparent": _parent(span), "unit": "C"}
    assert [event.properties for event in events] == [{}, {"unit": "C"}]
    assert not trace.get_current_span().get_span_context().is_valid


async def test_send_in_a_span_passes_that_one_on(hub: FakeHub) -> None:
    """The events carry the current context, and the span of the send is a CLIENT below it."""
    recording = Recording()
    async with _producer(hub, recording.telemetry) as producer:
        with recording.tracers.get_tracer("mine").start_as_current_span("mine"):
            await producer.send([EventData(b"a"), EventData(b"b")])
    (mine,), (span,) = recording.spans("mine"), recording.spans("send")
    assert span.kind is SpanKind.CLIENT
    assert span.parent is not None
    assert span.parent.span_id == mine.context.span_id
    assert not span.links
    assert dict(span.attributes or {}) == {**SEND, **AZURE, COUNT: 2}
    assert [event.properties for event in await _stored(hub)] == [{"traceparent": _parent(mine)}] * 2


async def test_context_of_the_program_is_kept_and_linked(hub: FakeHub) -> None:
    """An event with a `traceparent` keeps it: all of them so, and the span is a CLIENT, linked to each context once."""
    recording = Recording()
    given = [EventData(properties={"traceparent": PARENT.format(number)}) for number in (1, 2, 2)]
    async with _producer(hub, recording.telemetry) as producer:
        await producer.send(given)
        await producer.send([*given, EventData(b"without")])
    ours, mixed = recording.spans("send")
    assert (ours.kind, mixed.kind) == (SpanKind.CLIENT, SpanKind.PRODUCER)
    assert links(ours) == links(mixed) == [(1, {}), (2, {})]
    stored = [event.properties["traceparent"] for event in await _stored(hub)]
    assert stored == [PARENT.format(number) for number in (1, 2, 2, 1, 2, 2)] + [_parent(mixed)]


async def test_single_event_has_its_ids_in_place_of_a_count(hub: FakeHub) -> None:
    """Message id and conversation are attributes of the span for one event."""
    recording = Recording()
    async with _producer(hub, recording.telemetry) as producer:
        await producer.send(EventData(b"a", message_id="m-1", correlation_id="c-1"))
    (span,) = recording.spans("send")
    ids = {"messaging.message.id": "m-1", "messaging.message.conversation_id": "c-1"}
    assert dict(span.attributes or {}) == {**SEND, **AZURE, **ids}


async def test_create_spans_gives_each_event_a_span_of_its_own(hub: FakeHub) -> None:
    """PRODUCER, `create`, below the current span; the span of the send is a CLIENT that is linked to all of them."""
    recording = Recording(create_spans=True)
    own = EventData(b"own", properties={"traceparent": PARENT.format(7)})
    async with _producer(hub, recording.telemetry) as producer:
        with recording.tracers.get_tracer("mine").start_as_current_span("mine"):
            await producer.send([EventData(b"a", message_id="m"), EventData(b"b"), own])
    (mine,), (span,), created = recording.spans("mine"), recording.spans("send"), recording.spans("create")
    assert [(each.name, each.kind) for each in created] == [("create telemetry", SpanKind.PRODUCER)] * 2
    assert [each.parent and each.parent.span_id for each in created] == [mine.context.span_id] * 2
    create = {**PLACE, **AZURE, "messaging.operation.name": "create", "messaging.operation.type": "create"}
    assert [dict(each.attributes or {}) for each in created] == [{**create, "messaging.message.id": "m"}, create]
    assert span.kind is SpanKind.CLIENT
    assert {number for number, _ in links(span)} == {7, *(each.context.span_id for each in created)}
    stored = [event.properties["traceparent"] for event in await _stored(hub)]
    assert stored == [*map(_parent, created), PARENT.format(7)]


async def test_batch_has_the_contexts_with_which_events_were_added(hub: FakeHub) -> None:
    """The send of a batch is a CLIENT, linked to them; the batch is not encoded again."""
    recording = Recording()
    tracer = recording.tracers.get_tracer("mine")
    async with _producer(hub, recording.telemetry) as producer:
        batch = await producer.create_batch(partition_id="0")
        for number in range(2):
            with tracer.start_as_current_span(f"add{number}"):
                assert batch.try_add(EventData(b"a"))
                assert batch.try_add(EventData(b"b"))
        await producer.send(batch)
    (span,) = recording.spans("send")
    added = [*recording.spans("add0"), *recording.spans("add1")]
    assert span.kind is SpanKind.CLIENT
    assert [number for number, _ in links(span)] == [each.context.span_id for each in added]
    assert dict(span.attributes or {}) == {**SEND, **ZERO, **AZURE, COUNT: 4}
    stored = [event.properties["traceparent"] for event in await _stored(hub)]
    assert stored == [_parent(added[0])] * 2 + [_parent(added[1])] * 2


@pytest.mark.parametrize("propagate", [True, False, "azure"])
async def test_propagation_is_by_the_option(hub: FakeHub, propagate: bool | str) -> None:
    """Off, events are sent as they are; "azure" adds the name that older clients read; the span is a CLIENT then."""
    recording = Recording(propagate=propagate)
    async with _producer(hub, recording.telemetry) as producer:
        await producer.send(EventData(b"a"))
    (event,), (span,) = await _stored(hub), recording.spans("send")
    names = {True: {"traceparent"}, False: set(), "azure": {"traceparent", "Diagnostic-Id"}}[propagate]
    assert event.properties == dict.fromkeys(names, _parent(span))
    assert span.kind is (SpanKind.CLIENT if propagate is False else SpanKind.PRODUCER)


async def test_state_and_baggage_of_the_context_are_passed_on(hub: FakeHub) -> None:
    """`tracestate` of the current span, and what the configured propagators write; a property of the event is kept."""
    recording = Recording()
    state = trace.TraceState([("vendor", "1")])
    remote = trace.SpanContext(TRACE, 5, True, trace.TraceFlags(1), state)
    context = baggage.set_baggage("tenant", "a", trace.set_span_in_context(trace.NonRecordingSpan(remote)))
    token = attach(context)
    async with _producer(hub, recording.telemetry) as producer:
        await producer.send([EventData(b"a"), EventData(b"b", properties={"baggage": "own=1"})])
    detach(token)
    first, second = await _stored(hub)
    carried = {"traceparent": PARENT.format(5), "tracestate": "vendor=1", "baggage": "tenant=a"}
    assert (first.properties, second.properties) == (carried, {**carried, "baggage": "own=1"})


async def test_codecs_and_contexts_go_together(hub: FakeHub) -> None:
    """A body is encoded, and the event that the codec returns carries the context."""
    recording = Recording()
    codec = PayloadCodec("rot", lambda body: body[::-1], lambda body: body[::-1])
    async with _producer(hub, recording.telemetry, encode=codec) as producer:
        await producer.send([EventData(b"abc"), EventData(b"def", message_id="m")])
    first, second = await _stored(hub)
    assert (first.body, second.body, second.message_id) == (b"cba", b"fed", "m")
    (span,) = recording.spans("send")
    assert first.properties == second.properties == {"traceparent": _parent(span)}


async def test_router_and_split_are_recorded_with_their_partition(hub: FakeHub) -> None:
    """A partition that a router chooses is in the span and in the metrics, once it is known; a split is one call."""
    recording = Recording()
    async with _producer(hub, recording.telemetry, router=RoundRobinRouter()) as producer:
        await producer.send([EventData(b"x" * 700_000), EventData(b"y" * 700_000)], split=True)
    (span,) = recording.spans("send")
    assert dict(span.attributes or {}) == {**SEND, **ZERO, **AZURE, COUNT: 2}
    assert recording.points("messaging.client.sent.messages") == [({**SEND, **ZERO}, 2)]


async def test_metrics_of_sends_have_their_rows_of_the_table(hub: FakeHub) -> None:
    """A counter of events and a histogram of durations, without a consumer group; failures with `error.type`."""
    recording = Recording()
    async with _producer(hub, recording.telemetry, retry=ONCE) as producer:
        await producer.send([EventData(b"a")] * 3, partition_id="0")
        hub.refuse(ServiceBusyError("busy", condition="com.microsoft:server-busy"), operation="transfer")
        with pytest.raises(ServiceBusyError):
            await producer.send([EventData(b"a")] * 2, partition_id="0")
        await producer.get_partition_ids()
    failed = {**SEND, **ZERO, "error.type": "com.microsoft:server-busy"}
    assert recording.points("messaging.client.sent.messages") == [({**SEND, **ZERO}, 3), (failed, 2)]
    read = {**PLACE, "messaging.operation.name": "get_event_hub_properties"}
    durations = recording.points("messaging.client.operation.duration")
    assert durations == [({**SEND, **ZERO}, 1), (failed, 1), (read, 1)]
    assert recording.metrics["messaging.client.sent.messages"].unit == "{message}"
    assert [span.status.status_code for span in recording.spans("send")] == [StatusCode.UNSET, StatusCode.ERROR]


async def test_call_that_is_refused_at_once_is_raised_as_without_telemetry(hub: FakeHub) -> None:
    """What is no event, an unknown target, a closed producer; and nothing to send is not recorded."""
    recording = Recording()
    async with _producer(hub, recording.telemetry, idempotent=True) as producer:
        wrong: Any = "text"
        with pytest.raises(Exception, match="an event to send is an EventData"):
            await producer.send([wrong], partition_id="0")
        with pytest.raises(ConfigurationError):
            await producer.send(EventData(b""))
        await producer.send([], partition_id="0")
        recorded = len(recording.spans("send"))
    with pytest.raises(ClosedError):
        await producer.send(EventData(b""), partition_id="0")
    assert recorded <= 2
    assert not await _stored(hub)


# -------------------------------------------------------------------------------------------------------- idempotent


async def test_idempotent_send_in_doubt_is_recorded_and_shown(hub: FakeHub) -> None:
    """Each call has a span, of a list given again too; the gauge shows the events in doubt until they are settled."""
    recording = Recording()
    events = [EventData(b"a"), EventData(b"b")]
    async with _producer(hub, recording.telemetry, idempotent=True, retry=ONCE) as producer:
        await producer.send(EventData(b"first"), partition_id="0")
        hub.lose(SendFault.LOST_AFTER_STORE)
        hub.refuse(RequestRefusedError("away"), operation="send", times=1)
        with pytest.raises(PublishOutcomeUnknownError) as raised:
            await producer.send(events, partition_id="0")
        assert recording.points("eventpump.producer.in_doubt") == [({**PLACE, **ZERO}, 2)]
        await producer.settle("0")
        assert raised.value.batch is not None
        await producer.send(raised.value.batch)
        assert recording.points("eventpump.producer.in_doubt") == []
    assert [(each.attributes or {}).get("error.type") for each in recording.spans("send")] == [
        None,
        "PublishOutcomeUnknownError",
        None,
    ]
    stored = await _stored(hub)
    assert [event.body for event in stored] == [b"first", b"a", b"b"]
    assert [event.properties["traceparent"] for event in stored[1:]] == [_parent(recording.spans("send")[1])] * 2


# ----------------------------------------------------------------------------------------------------------- buffered


@pytest.mark.parametrize("idempotent", [False, True])
async def test_message_of_a_buffer_has_a_span_linked_to_its_events(hub: FakeHub, idempotent: bool) -> None:
    """One CLIENT per message, without a parent, linked to the contexts with which its events were accepted."""
    recording = Recording()
    tracer = recording.tracers.get_tracer("mine")
    async with _buffered(hub, recording.telemetry, idempotent=idempotent) as producer:
        for number in range(3):
            with tracer.start_as_current_span(f"accept{number}"):
                await producer.send(EventData(b"a"))
                producer.send_nowait(EventData(b"b"))
        await producer.send([EventData(b"c"), EventData(properties={"traceparent": PARENT.format(5)})])
        await producer.flush()
        await producer.send_and_wait(EventData(b"alone", message_id="m"))
    first, second = recording.spans("send")
    accepted = [span for number in range(3) for span in recording.spans(f"accept{number}")]
    assert (first.kind, first.parent, second.kind) == (SpanKind.CLIENT, None, SpanKind.CLIENT)
    assert [number for number, _ in links(first)] == [*(each.context.span_id for each in accepted), 5]
    assert dict(first.attributes or {}) == {**SEND, **ZERO, **AZURE, COUNT: 8}
    assert not second.links
    assert dict(second.attributes or {}) == {**SEND, **ZERO, **AZURE, "messaging.message.id": "m"}
    stored = [event.properties.get("traceparent") for event in await _stored(hub)]
    by_pairs = [parent for each in accepted for parent in (_parent(each), _parent(each))]
    assert stored == [*by_pairs, None, PARENT.format(5), None]
    assert recording.points("messaging.client.sent.messages") == [({**SEND, **ZERO}, 9)]


async def test_message_that_is_sent_within_a_span_is_linked_to_it(hub: FakeHub) -> None:
    """The task that sends has the context of the first event: that is neither the parent nor left out of the links."""
    recording = Recording()
    async with _buffered(hub, recording.telemetry) as producer:
        with recording.tracers.get_tracer("mine").start_as_current_span("mine"):
            await producer.send_and_wait(EventData(b"a"))
    (mine,), (span,) = recording.spans("mine"), recording.spans("send")
    assert ([number for number, _ in links(span)], span.parent) == ([mine.context.span_id], None)


async def test_create_spans_of_a_buffer_are_linked(hub: FakeHub) -> None:
    """Each accepted event has a span, whose context it carries, and the message is linked to them."""
    recording = Recording(create_spans=True)
    async with _buffered(hub, recording.telemetry) as producer:
        await producer.send([EventData(b"a"), EventData(b"b")])
    (span,), created = recording.spans("send"), recording.spans("create")
    assert [number for number, _ in links(span)] == [each.context.span_id for each in created]
    assert [event.properties["traceparent"] for event in await _stored(hub)] == [*map(_parent, created)]


async def test_message_that_fails_has_an_error_and_the_gauge_shows_the_buffer(hub: FakeHub) -> None:
    """Bytes in the buffer are shown while they are there, and nothing once the producer is closed."""
    recording = Recording()
    producer = _buffered(hub, recording.telemetry, BufferSettings(max_wait_time=10), retry=ONCE)
    async with producer:
        await producer.send(EventData(b"a"))
        assert recording.points("eventpump.producer.buffer") == [(PLACE, producer.buffered_bytes)]
        assert recording.metrics["eventpump.producer.buffer"].unit == "By"
        hub.refuse(RequestRefusedError("no", condition="amqp:not-allowed"), operation="transfer")
        with pytest.raises(RequestRefusedError):
            await producer.send_and_wait(EventData(b"b"))
    assert recording.points("eventpump.producer.buffer") == []
    failed = {**SEND, **ZERO, "error.type": "amqp:not-allowed"}
    assert recording.points("messaging.client.sent.messages") == [(failed, 2)]
    (span,) = recording.spans("send")
    assert (span.attributes or {})["error.type"] == "amqp:not-allowed"


# ------------------------------------------------------------------------------------------------ absent, and broken


@pytest.mark.parametrize("working", range(4))
@pytest.mark.parametrize("error", [ValueError("broken"), asyncio.CancelledError(), GeneratorExit()], ids=repr)
@pytest.mark.parametrize("options", [{}, {"create_spans": True}], ids=str)
@pytest.mark.parametrize("idempotent", [False, True])
async def test_broken_telemetry_changes_nothing(
    hub: FakeHub, idempotent: bool, options: dict[str, Any], error: BaseException, working: int
) -> None:
    """Whatever tracers, spans and instruments raise, and from which call on: each event is stored once."""
    telemetry, tracers, meters = broken_telemetry(error, working, **options)
    async with _producer(hub, telemetry, idempotent=idempotent) as producer:
        await producer.send([EventData(b"0"), EventData(b"1")], partition_id="0")
        batch = await producer.create_batch(partition_id="0")
        assert batch.try_add(EventData(b"2"))
        await producer.send(batch)
    async with _buffered(hub, telemetry, idempotent=idempotent) as producer:
        await producer.send(EventData(b"3"))
        await producer.send_and_wait([EventData(b"4"), EventData(b"5")])
    assert [event.body for event in await _stored(hub)] == [b"0", b"1", b"2", b"3", b"4", b"5"]
    assert tracers.calls > working
    assert meters.calls > working


async def test_cancelled_send_ends_its_span_and_is_cancelled(hub: FakeHub) -> None:
    """The caller gets its cancellation, and the span that error."""
    recording = Recording()
    async with _producer(hub, recording.telemetry) as producer:
        await producer.send(EventData(b"a"), partition_id="0")
        hub.latency = 5.0
        sending = asyncio.create_task(producer.send(EventData(b"b"), partition_id="0"))
        await asyncio.sleep(1)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        hub.latency = 0.0
    assert (recording.spans("send")[-1].attributes or {})["error.type"] == "CancelledError"


async def test_event_that_is_refused_for_room_leaves_nothing(hub: FakeHub) -> None:
    """It can be given again, in another context, and has that one."""
    recording = Recording()
    tracer = recording.tracers.get_tracer("mine")
    settings = BufferSettings(max_events=1, max_wait_time=10)
    async with _buffered(hub, recording.telemetry, settings) as producer:
        await producer.send(EventData(b"fills"))
        event = EventData(b"a")
        with tracer.start_as_current_span("refused"), pytest.raises(BufferFullError):
            producer.send_nowait(event)
        await producer.flush()
        with tracer.start_as_current_span("accepted"):
            producer.send_nowait(event)
    (accepted,) = recording.spans("accepted")
    assert [number for number, _ in links(recording.spans("send")[-1])] == [accepted.context.span_id]
    assert (await _stored(hub))[-1].properties == {"traceparent": _parent(accepted)}


def test_telemetry_of_another_kind_is_refused() -> None:
    """By producers too; and spans for events that carry nothing."""
    wrong: Callable[[], Any] = lambda: HubProducer(FakeTransport(FakeHub()), "telemetry", telemetry=object())  # type: ignore[arg-type]  # noqa: E731
    with pytest.raises(ConfigurationError, match="telemetry: must be"):
        wrong()
    with pytest.raises(ConfigurationError, match="create_spans"):
        Telemetry(create_spans=True, propagate=False)
