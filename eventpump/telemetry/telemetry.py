"""`Telemetry`: what programs give to clients, to have them recorded with OpenTelemetry."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

from eventpump.errors import ConfigurationError
from eventpump.interfaces import ConsumerScope, Transport
from eventpump.reports import PartitionStatus
from eventpump.telemetry.attributes import ClientPlace
from eventpump.telemetry.consuming import ConsumerRecorder
from eventpump.telemetry.otel import MeterProvider, Recorder, TracerProvider
from eventpump.telemetry.producing import ProducerRecorder, SinkRecorder
from eventpump.texts import not_the_class

Propagation: TypeAlias = bool | Literal["azure"]
"""Whether events carry a trace context, and in which properties."""


class Telemetry:
    """Records spans and metrics of hosts, readers, producers and applications with OpenTelemetry.

    ::

        telemetry = Telemetry()
        host = EventProcessorHost(..., telemetry=telemetry)
        producer = EventProducer(..., telemetry=telemetry)

    One object may serve any number of clients. Without a provider that records (the program has set up no SDK), nothing
    is recorded, at a cost of one or two microseconds per batch. What tracers, meters and exporters raise is logged once
    and changes nothing else. Pickled, as for another process, it records with the providers of that process.

    Names and attributes are those of the semantic conventions for messaging, version 1.44.0; docs/reference/metrics.md
    and docs/reference/traces.md list them.

    Args:
        tracer_provider: Makes the spans. Default: None, the provider of the process.
        meter_provider: Makes the metrics. Default: None, the provider of the process.
        create_spans: Whether each event that is sent gets a span of its own, `create`, whose context it carries. That
            costs tens of microseconds per event. Default: False.
        propagate: Whether events that are sent carry the current trace context, as the application properties
            `traceparent` and `tracestate`, unless they have a `traceparent`. "azure" for `Diagnostic-Id` too, which
            older .NET clients read. Default: True.
        process_spans: "batch": a span for a batch is linked to the contexts of its events. "event": besides, the
            context of a single event, if that is the batch, is the parent of the span. Default: "batch".
        management_spans: Whether reads of the properties of hubs and partitions have spans. Default: False.
        partition_attribute: Whether measurements have the partition id as an attribute. Spans always have it. Without
            it, the gauges are the sums over partitions. Default: True.

    Raises:
        ConfigurationError: An argument cannot work, or OpenTelemetry's API is not installed.
    """

    def __init__(
        self,
        tracer_provider: TracerProvider | None = None,
        meter_provider: MeterProvider | None = None,
        *,
        create_spans: bool = False,
        propagate: Propagation = True,
        process_spans: Literal["batch", "event"] = "batch",
        management_spans: bool = False,
        partition_attribute: bool = True,
    ) -> None:
        _check("tracer_provider", tracer_provider, "get_tracer")
        _check("meter_provider", meter_provider, "get_meter")
        if propagate not in (True, False, "azure"):
            raise ConfigurationError("propagate", 'must be True, False or "azure"')
        if process_spans not in ("batch", "event"):
            raise ConfigurationError("process_spans", 'must be "batch" or "event"')
        if create_spans and propagate is False:
            raise ConfigurationError("create_spans", "needs propagate: events carry the contexts of their spans")
        self._options = {
            "create_spans": create_spans,
            "propagate": propagate,
            "process_spans": process_spans,
            "management_spans": management_spans,
            "partition_attribute": partition_attribute,
        }
        self._recorder = Recorder(tracer_provider, meter_provider)
        self._create_spans = bool(create_spans)
        self._propagate: Propagation = propagate
        self._has_parent = process_spans == "event"
        self._management_spans = bool(management_spans)
        self._partition_attribute = bool(partition_attribute)

    def of_host(
        self, scope: ConsumerScope, owner_id: str, transport: object, statuses: Callable[[], list[PartitionStatus]]
    ) -> ConsumerRecorder:
        """Return what records a host; see `ClientTelemetry`."""
        return self._consumer(scope, owner_id, transport, statuses)

    def of_reader(self, scope: ConsumerScope, name: str | None, transport: object) -> ConsumerRecorder:
        """Return what records a reader; see `ClientTelemetry`."""
        return self._consumer(scope, name, transport, None)

    def of_producer(
        self, hub: str, name: str | None, transport: Transport, in_doubt: Callable[[], Mapping[str, int]]
    ) -> ProducerRecorder:
        """Return what records a producer; see `ClientTelemetry`."""
        port = getattr(transport, "port", None)
        place = ClientPlace(hub, transport.fully_qualified_namespace, port, name, None, self._partition_attribute)
        return ProducerRecorder(
            self._recorder,
            place,
            transport,
            creates_spans=self._create_spans,
            propagates=self._propagate is not False,
            has_old_name=self._propagate == "azure",
            has_management_spans=self._management_spans,
            in_doubt=in_doubt,
        )

    def of_sink(self, hub: str, name: str | None, namespace: str, port: int) -> SinkRecorder:
        """Return what records Spark's sink; see `ClientTelemetry`."""
        place = ClientPlace(hub, namespace, port, name, None, self._partition_attribute)
        return SinkRecorder(self._recorder, place)

    def __reduce__(self) -> tuple[object, ...]:
        # In another process, such as Spark's, it records with the providers of that process.
        return _made, (self._options,)

    def _consumer(
        self,
        scope: ConsumerScope,
        name: str | None,
        transport: object,
        statuses: Callable[[], list[PartitionStatus]] | None,
    ) -> ConsumerRecorder:
        place = ClientPlace(
            scope.hub,
            scope.fully_qualified_namespace,
            getattr(transport, "port", None),
            name,
            scope.consumer_group,
            self._partition_attribute,
        )
        return ConsumerRecorder(
            self._recorder,
            place,
            transport,
            statuses,
            has_parent=self._has_parent,
            has_management_spans=self._management_spans,
        )


def _made(options: dict[str, Any]) -> Telemetry:
    return Telemetry(**options)


def _check(name: str, provider: object, method: str) -> None:
    if provider is not None and (isinstance(provider, type) or not callable(getattr(provider, method, None))):
        problem = f"must be a provider of OpenTelemetry, with a method {method}, or None"
        raise ConfigurationError(name, problem + not_the_class(provider))
