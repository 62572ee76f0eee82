"""What a host shows as metrics and as lag: its reports, counted, and the status of its partitions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from eventpump.core.checkpoint import DEFAULT_SUBSCRIPTION
from eventpump.core.monitoring import PARTITION, Durations, Metric, Sample, labels_of
from eventpump.errors import ProcessorFailedError
from eventpump.interfaces import ConsumerScope
from eventpump.reports import (
    CheckpointWritten,
    EventParked,
    EventSkipped,
    HostReport,
    LeaseLost,
    LeaseReleased,
    LeaseTaken,
    LinkFailed,
    LoopBlocked,
    PartitionFailed,
    PartitionStatus,
    ProcessorFailed,
    StoreFailed,
)

_MOVES: Final = "eventpump_partition_moves_total"
_FAILURES: Final = "eventpump_handler_failures_total"
_REOPENS: Final = "eventpump_link_reopens_total"
_STORE_FAILURES: Final = "eventpump_store_failures_total"

_TEXTS: Final = {
    _MOVES: "Leases that the host has acquired, stolen, lost or released.",
    _FAILURES: "Failures of the processor, by what followed.",
    _REOPENS: "Receive links that have failed, and were opened again.",
    _STORE_FAILURES: "Calls of the lease store that have failed.",
}

_Labels = tuple[tuple[str, str], ...]


class ReportTally:
    """Counts the reports of a host, as metrics need them. `count` is one of the host's hooks."""

    def __init__(self) -> None:
        self._reports: Counter[str] = Counter({kind.__name__: 0 for kind in HostReport.__subclasses__()})
        self._counts: dict[str, Counter[_Labels]] = {name: Counter() for name in _TEXTS}
        self._blocked: dict[str, Durations] = {}

    def count(self, report: HostReport) -> None:
        self._reports[type(report).__name__] += 1
        match report:
            case CheckpointWritten():
                pass  # first: it may come with each event
            case LeaseTaken():
                self._add(_MOVES, report, reason="acquired" if report.stolen_from is None else "stolen")
            case LeaseLost():
                self._add(_MOVES, report, reason="lost")
            case LeaseReleased():
                self._add(_MOVES, report, reason="released")
            case ProcessorFailed() if report.delay is not None:
                self._add(_FAILURES, report, outcome="retried", error_type=_type_of(report.error))
            case EventSkipped():
                self._add(_FAILURES, report, outcome="skipped", error_type=_type_of(report.error))
            case EventParked():
                self._add(_FAILURES, report, outcome="parked", error_type=_type_of(report.error))
            case PartitionFailed() if isinstance(report.error, ProcessorFailedError):
                cause = report.error.__cause__ or report.error
                self._add(_FAILURES, report, outcome="stopped", error_type=_type_of(cause))
            case LinkFailed():
                self._add(_REOPENS, report, error_type=_type_of(report.error))
            case StoreFailed():
                self._counts[_STORE_FAILURES][(("operation", report.operation),)] += 1
            case LoopBlocked():
                self._blocked.setdefault(report.operation or "unknown", Durations()).add(report.duration)
            case _:
                pass

    def _add(self, name: str, report: HostReport, **labels: str) -> None:
        place = {} if report.partition_id is None else {PARTITION: report.partition_id}
        self._counts[name][tuple((place | _subscription(report.subscription) | labels).items())] += 1

    def metrics(self, labels: dict[str, str]) -> Iterator[Metric]:
        """Return the metrics, with these labels of every sample."""
        for name, counts in self._counts.items():
            samples = [Sample(labels | dict(more), count) for more, count in counts.items()]
            yield Metric(name, "counter", _TEXTS[name], samples)
        yield Metric(
            "eventpump_reports_total",
            "counter",
            "Reports of the host, by their class.",
            [Sample({**labels, "report": name}, count) for name, count in self._reports.items()],
        )
        yield Metric(
            "eventpump_loop_blocked_seconds",
            "histogram",
            "For how long the event loop was blocked, each time that it was reported.",
            [
                sample
                for operation, durations in self._blocked.items()
                for sample in durations.samples({**labels, "operation": operation})
            ],
        )


def _type_of(error: BaseException) -> str:
    """Return what kind of error it is: the service's condition, or the class of the error."""
    condition = getattr(error, "condition", None)
    return condition if condition and isinstance(condition, str) else type(error).__name__


def _subscription(name: str | None) -> dict[str, str]:
    return {} if name in {None, DEFAULT_SUBSCRIPTION} else {"subscription": str(name)}


def _busy(status: PartitionStatus) -> float | None:
    return None if status.busy_since is None else max(0.0, (datetime.now(UTC) - status.busy_since).total_seconds())


_Rows = Sequence[tuple[dict[str, str], PartitionStatus]]


def _gauge(name: str, text: str, rows: _Rows, values: Sequence[tuple[str, Callable[[Any], float | None]]]) -> Metric:
    """Return a gauge of partitions; `values` returns that of a partition, by the label `position`, "" for none."""
    samples = [
        Sample({**labels, **({"position": position} if position else {})}, value)
        for labels, status in rows
        for position, value_of in values
        if (value := value_of(status)) is not None
    ]
    return Metric(name, "gauge", text, samples)


def metrics_of(
    scope: ConsumerScope, statuses: Sequence[PartitionStatus], tally: ReportTally, *, is_ready: bool
) -> Iterator[Metric]:
    """Return the metrics of a host. A partition of which a value is not known has no sample of it."""
    labels = labels_of(scope.fully_qualified_namespace, scope.hub, scope.consumer_group)
    rows = [({**labels, PARTITION: each.partition_id, **_subscription(each.subscription)}, each) for each in statuses]
    yield Metric("eventpump_ready", "gauge", "Whether the host is ready: 1 or 0.", [Sample(labels, int(is_ready))])
    yield Metric(
        "eventpump_partition_owned",
        "gauge",
        "1 for each partition that the host runs, with its state.",
        [Sample({**row, "state": each.state_name}, 1) for row, each in rows],
    )
    yield _gauge(
        "eventpump_partition_lag",
        "Events of the partition that were not delivered, and that are not processed, by the checkpoint.",
        rows,
        [("delivered", lambda each: each.lag), ("checkpointed", lambda each: each.checkpointed_lag)],
    )
    yield _gauge(
        "eventpump_partition_sequence_number",
        "The sequence number of the last event that was delivered, and of the checkpoint.",
        rows,
        [
            ("delivered", lambda each: each.last_sequence_number),
            ("checkpointed", lambda each: None if each.checkpoint is None else each.checkpoint.sequence_number),
        ],
    )
    yield _gauge(
        "eventpump_handler_running_seconds",
        "Seconds since the processor was called with what it has in hand.",
        rows,
        [("", _busy)],
    )
    once = {each.partition_id: each.buffered_bytes for each in statuses}
    yield Metric(
        "eventpump_cache_size_bytes",
        "gauge",
        "Bytes of the partition that were received and are not processed yet.",
        [Sample({**labels, PARTITION: partition_id}, size) for partition_id, size in once.items()],
    )
    yield from tally.metrics(labels)


def lag_of(scope: ConsumerScope, statuses: Sequence[PartitionStatus]) -> dict[str, Any]:
    """Return the lag of a host's partitions as JSON values. `lag` is the sum of what is known."""
    return {
        "namespace": scope.fully_qualified_namespace,
        "hub": scope.hub,
        "consumer_group": scope.consumer_group,
        "read_at": datetime.now(UTC).isoformat(),
        "lag": sum(each.lag or 0 for each in statuses),
        "unknown": list(dict.fromkeys(each.partition_id for each in statuses if each.lag is None)),
        "partitions": [
            {
                "partition_id": each.partition_id,
                "subscription": each.subscription,
                "state": each.state_name,
                "lag": each.lag,
                "checkpointed_lag": each.checkpointed_lag,
                "last": each.last_sequence_number,
                "checkpoint": None if each.checkpoint is None else each.checkpoint.sequence_number,
            }
            for each in statuses
        ],
    }
