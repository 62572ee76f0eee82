"""What is recorded of producers: sends, the trace contexts that events carry, and what is held or in doubt."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, TypeVar

from eventpump.eventhubs.events import EventData, sent_context, set_sent_context, with_properties
from eventpump.interfaces import HubDirectory
from eventpump.telemetry import names, otel
from eventpump.telemetry.asking import LoopQuestion
from eventpump.telemetry.attributes import ClientPlace, of_sent, with_error
from eventpump.telemetry.contexts import (
    DIAGNOSTIC_ID,
    MOST_LINKS,
    TRACEPARENT,
    TRACESTATE,
    EventContext,
    EventLink,
    formatted,
    parsed,
    texts_of,
)
from eventpump.telemetry.otel import Observable, Observed, Recorder, SpanKind
from eventpump.telemetry.requests import MeasuredDirectory

_T = TypeVar("_T")

Encode = Callable[[EventData], EventData]


class ContextWriter:
    """Makes the events to send of those given: with a trace context, unless they have one.

    Args:
        encode: Makes the event to send, but for the context; None if that is the given one.

    Attributes:
        contexts: The contexts of the events, each once, the first `MOST_LINKS`.
    """

    __slots__ = ("_carried", "_carrier", "_context", "_encode", "_owner", "contexts")

    def __init__(self, owner: ProducerRecorder, encode: Encode | None) -> None:
        self._owner = owner
        self._encode = encode
        self.contexts: dict[EventContext, None] = {}
        self._context: object = None
        self._carrier: Mapping[str, str] = {}
        self._carried: EventContext | None = None

    def __call__(self, event: EventData) -> EventData:
        """Return the event to send. Raises as `encode`."""
        sent = event if self._encode is None else self._encode(event)
        if not self._owner.recorder.is_on:
            return sent
        try:
            return self._written(event, sent)
        except BaseException as error:
            self._owner.recorder.guard.failed(error)
            return sent

    def _written(self, event: EventData, sent: EventData) -> EventData:
        context: EventContext | None = None
        # Where there are none, `properties` would make a dictionary.
        properties = None if sent.data is not None else sent.properties
        if (texts := texts_of(properties)) is not None:
            context = parsed(*texts)
        elif self._owner.creates_spans:
            context, carrier = self._owner.created(event)
            sent = with_properties(sent, carrier) if carrier else sent
        elif self._owner.propagates:
            current = otel.current_context()
            if current is not self._context:
                self._context = current
                self._carried, self._carrier = self._owner.carried(current)
            context = self._carried
            if context is not None:
                sent = with_properties(sent, self._carrier)
        if context is not None and len(self.contexts) < MOST_LINKS:
            self.contexts[context] = None
        set_sent_context(event, context)
        return sent


class BufferWriter(ContextWriter):
    """A `ContextWriter` for single events, whose contexts are looked up when their message is sent."""

    __slots__ = ()

    def _written(self, event: EventData, sent: EventData) -> EventData:
        sent = super()._written(event, sent)
        self.contexts.clear()
        return sent


class SendRecord:
    """One call of `send`. Its partition is None while it is not known, and may be set until the call ends."""

    __slots__ = ("partition_id", "writer")

    def __init__(self, writer: ContextWriter, partition_id: str | None) -> None:
        self.writer = writer
        self.partition_id = partition_id


class ProducerRecorder(Observable):
    """Records a producer; see `ProducerTelemetry`.

    Args:
        transport: The connection, whose peer is an attribute if it is known.
        creates_spans: Whether each event gets a span of its own.
        propagates: Whether events carry the current context.
        has_old_name: Whether they carry it as `Diagnostic-Id` too.
        has_management_spans: Whether reads of properties have spans.
        in_doubt: Returns the number of events in doubt by partition. Called on the event loop.
    """

    def __init__(
        self,
        recorder: Recorder,
        place: ClientPlace,
        transport: object,
        *,
        creates_spans: bool,
        propagates: bool,
        has_old_name: bool,
        has_management_spans: bool,
        in_doubt: Callable[[], Mapping[str, int]],
    ) -> None:
        self.recorder = recorder
        self.creates_spans = creates_spans
        self.propagates = propagates
        self._place = place
        self._peer = partial(otel.peer_of, transport)
        self._has_old_name = has_old_name
        self._has_management_spans = has_management_spans
        self._in_doubt = in_doubt
        self._buffered: Callable[[], int] | None = None
        self._held: LoopQuestion[Observed] | None = None

    # --------------------------------------------------------------------------------------------------- sending

    def writer(self, encode: Encode | None) -> ContextWriter:
        return ContextWriter(self, encode)

    def record(self, encode: Encode | None, partition_id: str | None) -> SendRecord | None:
        if not self.recorder.is_on:
            return None
        return SendRecord(self.writer(encode), partition_id)

    async def sending(
        self, work: Awaitable[_T], record: SendRecord, events: Sequence[EventData] | None, count: int, written: object
    ) -> _T:
        self._observe()
        recorder, now = self.recorder, asyncio.get_running_loop().time
        began, span, token = now(), None, None
        given: Iterable[EventContext] = written.contexts if isinstance(written, ContextWriter) else ()
        try:
            if recorder.tracer is not None:
                is_own = self._carries_own(events)
                if events is not None:
                    given = _own_contexts(events)
                kind = SpanKind.PRODUCER if is_own else SpanKind.CLIENT
                attributes = of_sent(self._of_span(record.partition_id), events, count)
                span = recorder.start(self._place, names.SEND, kind, attributes, self._links(given))
                if is_own:
                    token = recorder.enter(span)
        except BaseException as error:
            recorder.guard.failed(error)

        def ended(error: BaseException | None) -> None:
            if self.creates_spans and span is not None and events is not None:
                otel.add_links(recorder, span, self._links(record.writer.contexts, known=given))
            partition = None if record.partition_id is None else {names.PARTITION: record.partition_id}
            recorder.end(span, error, self._peer(), partition)
            self._sent(record.partition_id, count, now() - began, error)

        return await recorder.awaiting(work, token, ended)

    async def publishing(
        self, work: Awaitable[_T], events: Sequence[object], count: int, partition_id: str | None
    ) -> _T:
        recorder, now = self.recorder, asyncio.get_running_loop().time
        if not recorder.is_on:
            return await work
        began, span = now(), None
        try:
            if recorder.tracer is not None:
                carried = dict.fromkeys(filter(None, map(sent_context, events)))
                given = [each for each in events if isinstance(each, EventData)] if count == 1 else None
                attributes = of_sent(self._of_span(partition_id), given, count)
                # Not in the context of the task that sends: that of whichever event was accepted first.
                span = recorder.start(
                    self._place, names.SEND, SpanKind.CLIENT, attributes, _links_to(carried), context=otel.ROOT
                )
        except BaseException as error:
            recorder.guard.failed(error)

        def ended(error: BaseException | None) -> None:
            recorder.end(span, error, self._peer())
            self._sent(partition_id, count, now() - began, error)

        return await recorder.awaiting(work, None, ended)

    def _of_span(self, partition_id: str | None) -> dict[str, Any]:
        return self._place.of_span(names.SEND, partition_id)

    def _carries_own(self, events: Sequence[EventData] | None) -> bool:
        """Return whether events carry the context of the span that sends them: no other is to be carried."""
        if events is None or not self.propagates or self.creates_spans or otel.current_event_context() is not None:
            return False
        return any(each.data is not None or texts_of(each.properties) is None for each in events)

    def _links(self, carried: Iterable[EventContext], known: Iterable[EventContext] = ()) -> list[EventLink]:
        """Return links to contexts, but for the current one, which is the parent, and those that are known."""
        left_out = {*known, otel.current_event_context()}
        return _links_to(each for each in carried if each not in left_out)

    def _sent(self, partition_id: str | None, count: int, took: float, error: BaseException | None) -> None:
        meters = self.recorder.meters
        if meters is None:
            return
        attributes = with_error(self._place.of_metric(names.SEND, partition_id), error)
        self.recorder.measure(meters.sent_messages, count, attributes)
        self.recorder.measure(meters.operation_duration, took, attributes)

    # -------------------------------------------------------------------------------------------------- contexts

    def created(self, event: EventData) -> tuple[EventContext | None, dict[str, str]]:
        """Record that an event is created: return the context of its span, and the properties that carry it."""
        attributes = of_sent(self._place.of_span(names.CREATE, None), [event], 1)
        span = self.recorder.start(self._place, names.CREATE, SpanKind.PRODUCER, attributes)
        if span is None:
            return None, {}
        found = self.carried(otel.with_span(span))
        self.recorder.end(span, None)
        return found

    def carried(self, context: otel.Context) -> tuple[EventContext | None, dict[str, str]]:
        """Return the context of the current span of a context, and the properties that carry it; None if it has none.

        Beside the properties of W3C's Trace Context these are what the configured propagators write, such as `baggage`.
        """
        found = otel.current_event_context(context)
        if found is None:
            return None, {}
        carrier = otel.injected(context)
        carrier[TRACEPARENT] = formatted(found)
        if found.state:
            carrier[TRACESTATE] = found.state
        if self._has_old_name:
            carrier[DIAGNOSTIC_ID] = carrier[TRACEPARENT]
        return found, carrier

    # ------------------------------------------------------------------------------------------- reads and gauges

    def directory(self, directory: HubDirectory) -> HubDirectory:
        return MeasuredDirectory(
            directory, self.recorder, self._place, self._peer, has_spans=self._has_management_spans
        )

    def buffering(self, encode: Encode | None, buffered: Callable[[], int]) -> ContextWriter:
        self._buffered = buffered
        return BufferWriter(self, encode)

    def opened(self) -> None:
        self._observe()

    def _observe(self) -> None:
        if self._held is None and self.recorder.instruments is not None:
            self._held = LoopQuestion(self._holds)
            self.recorder.instruments.observables.add(self)

    def close(self) -> None:
        self._held = None
        if self.recorder.instruments is not None:
            self.recorder.instruments.observables.discard(self)

    def observed(self) -> Observed:
        return [] if self._held is None else self._held.answer() or []

    def _holds(self) -> Observed:
        found: list[tuple[names.Instrument, float, Mapping[str, Any]]] = []
        if self._buffered is not None:
            found.append((names.PRODUCER_BUFFER, self._buffered(), self._place.of_metric(None, None)))
        doubts: dict[str | None, int] = {}
        for partition_id, events in self._in_doubt().items():
            known = partition_id if self._place.has_partition else None
            doubts[known] = doubts.get(known, 0) + events
        found += [
            (names.PRODUCER_IN_DOUBT, events, self._place.of_metric(None, known)) for known, events in doubts.items()
        ]
        return found


def _links_to(contexts: Iterable[EventContext]) -> list[EventLink]:
    return [EventLink(each, None) for each in islice(contexts, MOST_LINKS)]


def _own_contexts(events: Sequence[EventData]) -> dict[EventContext, None]:
    """Return the contexts that events were given by the program, each once."""
    found: dict[EventContext, None] = {}
    for each in events:
        texts = None if each.data is not None else texts_of(each.properties)
        context = None if texts is None else parsed(*texts)
        if context is not None:
            found[context] = None
    return found


class SinkRecorder:
    """Records Spark's sink, on the driver; see `SinkTelemetry`."""

    def __init__(self, recorder: Recorder, place: ClientPlace) -> None:
        self._recorder = recorder
        self._place = place

    def publishing(self, publish: Callable[[], _T], counts: Callable[[_T], Mapping[str | None, int]]) -> _T:
        recorder, place, began = self._recorder, self._place, time.monotonic()
        span = recorder.start(place, names.SEND, SpanKind.CLIENT, place.of_span(names.SEND, None))
        token = recorder.enter(span)
        raised: BaseException | None = None
        rows: Mapping[str | None, int] = {}
        try:
            done = publish()
            rows = counts(done)
            return done
        except BaseException as error:
            raised = error
            raise
        finally:
            recorder.leave(token)
            recorder.end(span, raised, None, {names.MESSAGE_COUNT: sum(rows.values())} if rows else None)
            if (meters := recorder.meters) is not None:
                took = time.monotonic() - began
                recorder.measure(meters.operation_duration, took, with_error(place.of_metric(names.SEND, None), raised))
                for partition_id, count in rows.items():
                    recorder.measure(meters.sent_messages, count, place.of_metric(names.SEND, partition_id))
            raised = None  # its traceback refers to this frame
