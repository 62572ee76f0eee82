"""The only door to OpenTelemetry's API: spans and instruments that never raise."""

from __future__ import annotations

import logging
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextvars import Token
from functools import cache
from importlib import metadata
from typing import Any, Final, TypeAlias, TypeVar
from weakref import WeakKeyDictionary, WeakSet

from eventpump.errors import ConfigurationError
from eventpump.telemetry import names
from eventpump.telemetry.attributes import Attributes, ClientPlace, description, error_type, of_link
from eventpump.telemetry.contexts import TRACEPARENT, TRACESTATE, EventContext, EventLink
from eventpump.telemetry.names import Instrument, Operation

try:
    from opentelemetry import baggage, metrics, propagate, trace
    from opentelemetry import context as contexts
    from opentelemetry.context import Context as Context
    from opentelemetry.metrics import CallbackOptions, Meter, NoOpMeterProvider, Observation
    from opentelemetry.metrics import MeterProvider as MeterProvider
    from opentelemetry.propagators.textmap import TextMapPropagator
    from opentelemetry.trace import (
        Link,
        NonRecordingSpan,
        NoOpTracerProvider,
        ProxyTracerProvider,
        SpanContext,
        Status,
        StatusCode,
        TraceFlags,
        Tracer,
        TraceState,
    )
    from opentelemetry.trace import Span as Span
    from opentelemetry.trace import SpanKind as SpanKind
    from opentelemetry.trace import TracerProvider as TracerProvider
except ImportError as missing:
    raise ConfigurationError("telemetry", "needs OpenTelemetry's API: pip install 'eventpump[otel]'") from missing

_T = TypeVar("_T")
_log = logging.getLogger("eventpump.telemetry")

ROOT: Final = Context()
"""The context of a span without a parent."""


class Guard:
    """Keeps failures of OpenTelemetry's objects from what they observe: the first one is logged, and no other."""

    __slots__ = ("_has_failed",)

    def __init__(self) -> None:
        self._has_failed = False

    def failed(self, error: BaseException) -> None:
        """Called with what such an object raised; an interruption is raised again. Nothing was awaited: cancellations
        are its own."""
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise error
        if not self._has_failed:
            self._has_failed = True
            _log.error("recording telemetry failed; further failures are not logged", exc_info=error)


@cache
def _version() -> str:
    try:
        return metadata.version("eventpump")
    except metadata.PackageNotFoundError:  # run from a checkout or an archive
        return "0"


Observed: TypeAlias = Iterable[tuple[Instrument, float, Mapping[str, Any]]]


class Observable:
    """Something whose state is read when metrics are collected."""

    def observed(self) -> Observed:
        """Return what is measured now. Called in any thread."""
        raise NotImplementedError


class Instruments:
    """The instruments of one meter. There is one object per meter provider, as the API has one instrument per name."""

    def __init__(self, meter: Meter) -> None:
        self.operation_duration = _histogram(meter, names.OPERATION_DURATION, names.BUCKETS).record
        self.process_duration = _histogram(meter, names.PROCESS_DURATION, names.BUCKETS).record
        self.consumer_lag = _histogram(meter, names.CONSUMER_LAG).record
        self.loop_blocked = _histogram(meter, names.LOOP_BLOCKED).record
        self.sent_messages = _counter(meter, names.SENT_MESSAGES)
        self.consumed_messages = _counter(meter, names.CONSUMED_MESSAGES)
        self.partition_moves = _counter(meter, names.PARTITION_MOVES)
        self.handler_failures = _counter(meter, names.HANDLER_FAILURES)
        self.link_reopens = _counter(meter, names.LINK_REOPENS)
        self.store_failures = _counter(meter, names.STORE_FAILURES)
        self.observables: WeakSet[Observable] = WeakSet()
        meter.create_observable_up_down_counter(
            names.PARTITION_OWNED.name, [self._read(names.PARTITION_OWNED)], *names.PARTITION_OWNED[1:]
        )
        for each in (names.PARTITION_LAG, names.CACHE_SIZE, names.PRODUCER_BUFFER, names.PRODUCER_IN_DOUBT):
            meter.create_observable_gauge(each.name, [self._read(each)], *each[1:])

    def _read(self, instrument: Instrument) -> Callable[[CallbackOptions], list[Observation]]:
        def read(_: CallbackOptions) -> list[Observation]:
            return [
                Observation(value, attributes)
                for each in list(self.observables)
                for which, value, attributes in each.observed()
                if which is instrument
            ]

        return read


def _histogram(meter: Meter, instrument: Instrument, buckets: Iterable[float] | None = None) -> metrics.Histogram:
    bounds = None if buckets is None else list(buckets)
    return meter.create_histogram(*instrument, explicit_bucket_boundaries_advisory=bounds)


def _counter(meter: Meter, instrument: Instrument) -> Callable[..., None]:
    return meter.create_counter(*instrument).add


_LOCK: Final = threading.Lock()
_OF_PROVIDER: Final[WeakKeyDictionary[MeterProvider, Instruments]] = WeakKeyDictionary()
_GLOBAL: Final[list[Instruments]] = []
"""The instruments of the provider that is set for the process, or that will be: the API's stand for these."""


def _instruments(given: MeterProvider | None) -> Instruments:
    with _LOCK:
        if given is None or given is metrics.get_meter_provider():
            if not _GLOBAL:
                _GLOBAL.append(Instruments(metrics.get_meter(names.SCOPE, _version(), schema_url=names.SCHEMA_URL)))
            return _GLOBAL[0]
        found = _OF_PROVIDER.get(given)
        if found is None:
            made = given.get_meter(names.SCOPE, _version(), schema_url=names.SCHEMA_URL)
            found = _OF_PROVIDER[given] = Instruments(made)
        return found


class Recorder:
    """Spans and instruments for all clients of one `Telemetry`."""

    def __init__(self, tracer_provider: TracerProvider | None, meter_provider: MeterProvider | None) -> None:
        self.guard = Guard()
        self._given = tracer_provider
        self._tracer: Tracer | None = None
        self._has_tracer = False
        self._unset: object = None
        self._asks_tracer = False
        self.instruments: Instruments | None = None
        try:
            if not isinstance(meter_provider, NoOpMeterProvider):
                if meter_provider is None:
                    # Set later by the program, or never; until then nothing is recorded.
                    self._unset = _unset_meter_provider()
                self.instruments = _instruments(meter_provider)
        except BaseException as error:
            self.guard.failed(error)
        self._is_on = self.meters is not None or self.tracer is not None

    @property
    def is_on(self) -> bool:
        """Whether anything would be recorded. Asked for each batch: what is found once is kept.

        As long as nothing is, the API is asked for one of the two providers at a time, which takes half a microsecond.
        """
        if not self._is_on:
            self._asks_tracer = not self._asks_tracer
            self._is_on = (self.tracer if self._asks_tracer else self.meters) is not None
        return self._is_on

    @property
    def meters(self) -> Instruments | None:
        """The instruments; None where nothing would be recorded."""
        if self._unset is not None:
            if metrics.get_meter_provider() is self._unset:
                return None
            self._unset = None
        return self.instruments

    @property
    def tracer(self) -> Tracer | None:
        """The tracer; None where no span would be recorded, as long as the program has set no provider."""
        if not self._has_tracer:
            provider = self._given or trace.get_tracer_provider()
            if isinstance(provider, ProxyTracerProvider):
                return None
            self._has_tracer = True
            if not isinstance(provider, NoOpTracerProvider):
                try:
                    self._tracer = provider.get_tracer(names.SCOPE, _version(), schema_url=names.SCHEMA_URL)
                except BaseException as error:
                    self.guard.failed(error)
        return self._tracer

    def start(
        self,
        place: ClientPlace,
        operation: Operation,
        kind: SpanKind,
        attributes: Attributes,
        links: Iterable[EventLink] = (),
        *,
        context: Context | None = None,
        start_time: int | None = None,
    ) -> Span | None:
        """Start a span, with a parent of the current context by default, now or at nanoseconds since the epoch. None if
        not recorded."""
        try:
            tracer = self.tracer
            if tracer is None:
                return None
            linked = [Link(span_context(each.context), of_link(each)) for each in links]
            return tracer.start_span(
                place.span_name(operation),
                context,
                kind=kind,
                attributes=attributes,
                links=linked,
                start_time=start_time,
            )
        except BaseException as error:
            self.guard.failed(error)
            return None

    def enter(self, span: Span | None) -> Token[Context] | None:
        """Make a span the current one. Return what `leave` takes; None if it could not be done."""
        if span is None:
            return None
        try:
            return contexts.attach(trace.set_span_in_context(span))
        except BaseException as error:
            self.guard.failed(error)
            return None

    def leave(self, token: Token[Context] | None) -> None:
        """Make the context current again that was so before `enter`."""
        if token is None:
            return
        try:
            contexts.detach(token)
        except BaseException as error:
            self.guard.failed(error)

    async def awaiting(
        self, work: Awaitable[_T], token: Token[Context] | None, ended: Callable[[BaseException | None], None]
    ) -> _T:
        """Await some work, then give back what `enter` returned, and report with which error it ended, or None."""
        raised: BaseException | None = None
        try:
            return await work
        except GeneratorExit as error:
            # This coroutine is being closed, maybe in another context, where a token cannot be given back.
            token, raised = None, error
            raise
        except BaseException as error:
            raised = error
            raise
        finally:
            self.leave(token)
            ended(raised)
            raised = None  # its traceback refers to this frame

    def enter_again(self, token: Token[Context]) -> None:
        """Make the context current again that was so before `enter`, in whatever context this is called."""
        try:
            before = token.old_value
            contexts.attach(Context() if before is Token.MISSING else before)
        except BaseException as error:
            self.guard.failed(error)

    def end(
        self,
        span: Span | None,
        error: BaseException | None,
        peer: tuple[str, int] | None = None,
        more: Mapping[str, Any] | None = None,
    ) -> None:
        """End a span, if there is one, with the error that what it is about has failed with, and further attributes."""
        if span is None:
            return
        try:
            if peer is not None:
                span.set_attribute(names.PEER_ADDRESS, peer[0])
                span.set_attribute(names.PEER_PORT, peer[1])
            if more is not None:
                span.set_attributes(more)
            if error is not None and span.is_recording():
                span.set_attribute(names.ERROR_TYPE, error_type(error))
                span.set_status(Status(StatusCode.ERROR, description(error)))
            span.end()
        except BaseException as failure:
            self.guard.failed(failure)

    def measure(self, record: Callable[..., None], value: float, attributes: Mapping[str, Any]) -> None:
        """Record a value with an instrument."""
        try:
            record(value, attributes)
        except BaseException as error:
            self.guard.failed(error)


def _unset_meter_provider() -> object:
    """Return the object that stands for the provider of the process; None if one is set."""
    provider = metrics.get_meter_provider()
    return provider if type(provider).__module__.startswith(metrics.__name__) else None


_FLAGS: Final = tuple(map(TraceFlags, range(256)))


def span_context(context: EventContext) -> SpanContext:
    """Return a context in the form of the API."""
    trace_id, span_id, flags, text = context
    state = TraceState.from_header([text]) if text else None
    return SpanContext(trace_id, span_id, True, _FLAGS[flags], state)


def event_context(span: Span) -> EventContext | None:
    """Return the context of a span; None if it has none."""
    found = span.get_span_context()
    if not found.is_valid:
        return None
    state = found.trace_state.to_header() if found.trace_state else ""
    return EventContext(found.trace_id, found.span_id, int(found.trace_flags), state)


def with_span(span: Span) -> Context:
    """Return the current context with another current span."""
    return trace.set_span_in_context(span)


def current_context() -> Context:
    """Return the current context."""
    return contexts.get_current()


def current_event_context(context: Context | None = None) -> EventContext | None:
    """Return the context of the current span, in form of an event's; None if there is none."""
    return event_context(trace.get_current_span(context))


@cache
def _is_usual(propagator: TextMapPropagator) -> bool:
    """Return whether a propagator writes nothing but a trace context, which is written anyway, and baggage."""
    return propagator.fields <= {TRACEPARENT, TRACESTATE, "baggage"}


def injected(context: Context) -> dict[str, str]:
    """Return what the configured propagators write for a context, beside its trace context."""
    carrier: dict[str, str] = {}
    if baggage.get_all(context) or not _is_usual(propagate.get_global_textmap()):
        propagate.inject(carrier, context)
    return carrier


def add_links(recorder: Recorder, span: Span, links: Iterable[EventLink]) -> None:
    """Add links to a span that has begun."""
    try:
        for each in links:
            span.add_link(span_context(each.context), of_link(each))
    except BaseException as error:
        recorder.guard.failed(error)


def with_parent(context: EventContext) -> Context:
    """Return a context whose span is that of an event."""
    return trace.set_span_in_context(NonRecordingSpan(span_context(context)), ROOT)


def peer_of(transport: object) -> tuple[str, int] | None:
    """Return the address and the port of a connection's peer; None if they are not known."""
    found = getattr(transport, "peer", None)
    return found if isinstance(found, tuple) else None


class LeavingSpan(Span):
    """Stands for a span in the context of code that may keep the context for longer; then for the one before it."""

    def __init__(self, span: Span) -> None:
        self._span = span
        self._before = trace.get_current_span()

    def leave(self) -> None:
        """Stand for the span before from now on."""
        self._span = self._before

    def end(self, end_time: int | None = None) -> None:
        """Do nothing: what has begun the span ends it."""

    def get_span_context(self) -> SpanContext:
        return self._span.get_span_context()

    def set_attributes(self, attributes: Mapping[str, Any]) -> None:
        self._span.set_attributes(attributes)

    def set_attribute(self, key: str, value: Any) -> None:
        self._span.set_attribute(key, value)

    def add_event(self, name: str, attributes: Mapping[str, Any] | None = None, timestamp: int | None = None) -> None:
        self._span.add_event(name, attributes, timestamp)

    def add_link(self, context: SpanContext, attributes: Mapping[str, Any] | None = None) -> None:
        self._span.add_link(context, attributes)

    def update_name(self, name: str) -> None:
        self._span.update_name(name)

    def is_recording(self) -> bool:
        return self._span.is_recording()

    def set_status(self, status: Status | StatusCode, description: str | None = None) -> None:
        self._span.set_status(status, description)

    def record_exception(
        self,
        exception: BaseException,
        attributes: Mapping[str, Any] | None = None,
        timestamp: int | None = None,
        escaped: bool = False,
    ) -> None:
        self._span.record_exception(exception, attributes, timestamp, escaped)
