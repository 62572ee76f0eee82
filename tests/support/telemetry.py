"""A telemetry object whose spans and metrics a test can read; and one that raises in every call."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from typing import Any

from opentelemetry.metrics import MeterProvider as AnyMeterProvider
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import HistogramDataPoint, InMemoryMetricReader, Metric
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import TracerProvider as AnyTracerProvider

from eventpump.telemetry import Telemetry

PARENT = "00-0af7651916cd43dd8448eb211c80319c-{:016x}-01"
"""A `traceparent`, of the trace with this number; the span is to be filled in."""

TRACE = 0x0AF7651916CD43DD8448EB211C80319C


class Recording:
    """A telemetry object, and what it has recorded.

    Args:
        options: Of `Telemetry`.
    """

    def __init__(self, **options: Any) -> None:
        self.exporter = InMemorySpanExporter()
        self.tracers = TracerProvider(shutdown_on_exit=False)
        self.tracers.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.reader = InMemoryMetricReader()
        self.meters = MeterProvider([self.reader], shutdown_on_exit=False)
        self.telemetry = Telemetry(self.tracers, self.meters, **options)

    def spans(self, operation: str) -> list[ReadableSpan]:
        """Return the spans of an operation that have ended, in order."""
        return [each for each in self.exporter.get_finished_spans() if each.name.partition(" ")[0] == operation]

    @property
    def metrics(self) -> dict[str, Metric]:
        """The metrics by name."""
        data = self.reader.get_metrics_data()
        if data is None:
            return {}
        return {
            metric.name: metric
            for resource in data.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
        }

    def points(self, name: str) -> list[tuple[dict[str, Any], Any]]:
        """Return the points of a metric: the attributes, and the value, of a histogram how many there were."""
        metric = self.metrics.get(name)
        return (
            [] if metric is None else [(dict(each.attributes or {}), _value(each)) for each in metric.data.data_points]
        )

    def value(self, name: str, **attributes: Any) -> Any:
        """Return the sum of the points of a metric that have some attributes, whose dots are written as underscores."""
        wanted = attributes.items()
        found = [
            value
            for each, value in self.points(name)
            if wanted <= {key.replace(".", "_"): given for key, given in each.items()}.items()
        ]
        return sum(found) if found else None


def _value(point: Any) -> Any:
    return point.count if isinstance(point, HistogramDataPoint) else point.value


def links(span: ReadableSpan) -> list[tuple[int, Mapping[str, Any]]]:
    """Return the links of a span: the linked span, and the attributes."""
    return [(each.context.span_id, dict(each.attributes or {})) for each in span.links]


class Broken:
    """Raises in every call of every method, and where an attribute is called that it does not have.

    Args:
        error: What it raises.
        working: How many calls work before, each of which returns this object.
    """

    def __init__(self, error: BaseException, working: int = 0) -> None:
        self._error = error
        self._working = working
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._called

    def _called(self, *_: Any, **__: Any) -> Broken:
        self.calls += 1
        if self.calls <= self._working:
            return self
        raise self._error


class Erratic:
    """Stands for a provider and all that it makes: each call works, raises something, or returns nonsense, by chance.

    The tracer, the meter and the instruments themselves are made.

    Args:
        rng: Decides.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.calls = self.failures = 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._made if name.startswith(("get_tracer", "get_meter", "create_")) else self._called

    def _made(self, *_: Any, **__: Any) -> Any:
        return self

    def _called(self, *_: Any, **__: Any) -> Any:
        self.calls += 1
        if self._rng.random() < 0.3:
            self.failures += 1
            errors = (ValueError("erratic"), asyncio.CancelledError(), GeneratorExit(), TimeoutError(), StopIteration())
            raise self._rng.choice(errors)
        return self._rng.choice((self, None, 7))


def broken_telemetry(error: BaseException, working: int = 0, **options: Any) -> tuple[Telemetry, Broken, Broken]:
    """Return a telemetry object over providers that raise, and these."""
    tracers, meters = Broken(error, working), Broken(error, 17 + working)
    given: tuple[AnyTracerProvider, AnyMeterProvider] = (tracers, meters)  # type: ignore[assignment]  # they have no types
    return Telemetry(*given, **options), tracers, meters
