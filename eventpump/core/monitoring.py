"""What programs show to those who watch them: health, metrics in the terms of Prometheus, and both of several parts."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

PARTITION: Final = "messaging_destination_partition_id"
"""The label of a partition."""

CLIENT: Final = "client"
"""The label of a client beside another one with the same labels."""

BUCKETS: Final = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
"""The upper limits of a histogram's buckets, in seconds: those of OpenTelemetry's conventions for messaging."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One value of a metric.

    Args:
        labels: Its labels.
        value: The value.
        suffix: What its name has beyond that of the metric: "_bucket", "_sum" and "_count" of a histogram. Default: "".
    """

    labels: Mapping[str, str]
    value: float
    suffix: str = ""


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric with its values, in the terms of Prometheus.

    Args:
        name: Its name.
        kind: Its type.
        text: What it measures, with its unit.
        samples: Its values. Without any it is left out.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    text: str
    samples: Sequence[Sample]


@dataclass(frozen=True, slots=True)
class Health:
    """How a program is.

    Args:
        live: Whether it works: a supervisor restarts it otherwise.
        ready: Whether it has begun its work.
        reasons: Why it is not, in sentences. Default: `()`.
    """

    live: bool
    ready: bool
    reasons: Sequence[str] = ()


class Durations:
    """Counts durations as a histogram does."""

    __slots__ = ("_counts", "_sum")

    def __init__(self) -> None:
        self._counts = [0] * (len(BUCKETS) + 1)
        self._sum = 0.0

    def add(self, seconds: float) -> None:
        """Count a duration."""
        self._counts[bisect_left(BUCKETS, seconds)] += 1
        self._sum += seconds

    def samples(self, labels: Mapping[str, str]) -> list[Sample]:
        """Return the samples of the histogram, each with these labels."""
        found, total = [], 0
        for limit, more in zip((*BUCKETS, math.inf), self._counts, strict=True):
            total += more
            found.append(Sample({**labels, "le": _number(limit)}, total, "_bucket"))
        return [*found, Sample(labels, self._sum, "_sum"), Sample(labels, total, "_count")]


def labels_of(
    namespace: str, hub: str, consumer_group: str | None = None, partition_id: str | None = None
) -> dict[str, str]:
    labels = {"messaging_system": "eventhubs", "server_address": namespace, "messaging_destination_name": hub}
    if consumer_group is not None:
        labels["messaging_consumer_group_name"] = consumer_group
    if partition_id is not None:
        labels[PARTITION] = partition_id
    return labels


def all_healthy(parts: Iterable[Health]) -> Health:
    """Return the health of what has several parts: as that of the part that is worst."""
    found = list(parts)
    reasons = [reason for each in found for reason in each.reasons]
    return Health(all(each.live for each in found), all(each.ready for each in found), tuple(dict.fromkeys(reasons)))


def merged(parts: Iterable[Iterable[Metric]]) -> list[Metric]:
    """Return the metrics of several parts, each name once and each series once."""
    found: dict[str, Metric] = {}
    taken: set[tuple[object, ...]] = set()
    for part in parts:
        metrics = given = list(part)
        number = 1
        while not taken.isdisjoint(series := set(_series(metrics))):
            number += 1
            metrics = [replace(each, samples=[_of_client(sample, number) for sample in each.samples]) for each in given]
        taken |= series
        for metric in metrics:
            known = found.get(metric.name)
            samples = metric.samples if known is None else [*known.samples, *metric.samples]
            found[metric.name] = Metric(metric.name, metric.kind, metric.text, samples)
    return list(found.values())


def _series(metrics: Iterable[Metric]) -> Iterator[tuple[object, ...]]:
    for metric in metrics:
        for sample in metric.samples:
            yield metric.name, sample.suffix, *sorted(sample.labels.items())


def _of_client(sample: Sample, number: int) -> Sample:
    before = sample.labels.get(CLIENT)  # of a part that is merged itself, as an application is
    return replace(sample, labels={**sample.labels, CLIENT: f"{number}" if before is None else f"{number}.{before}"})


def exposition(metrics: Iterable[Metric]) -> str:
    """Return metrics in Prometheus' text format, version 0.0.4."""
    lines = []
    for metric in metrics:
        if not metric.samples:
            continue
        lines += [f"# HELP {metric.name} {_escaped(metric.text)}", f"# TYPE {metric.name} {metric.kind}"]
        for sample in metric.samples:
            labels = ",".join(f'{name}="{_quoted(value)}"' for name, value in sample.labels.items())
            name = f"{metric.name}{sample.suffix}"
            lines.append(f"{name}{f'{{{labels}}}' if labels else ''} {_number(sample.value)}")
    return "".join(f"{line}\n" for line in lines)


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")


def _quoted(text: str) -> str:
    return _escaped(text).replace('"', r"\"")


def _number(value: float) -> str:
    if isinstance(value, int):
        return str(value)
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(value)
