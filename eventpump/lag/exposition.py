"""The lag of a consumer group as JSON and as Prometheus metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from typing import Any, Final

from eventpump.core.monitoring import Metric, Sample, labels_of
from eventpump.lag.group import GroupLag, LagState, PartitionProgress


def document(lag: GroupLag) -> dict[str, Any]:
    """Return the lag as JSON values. `lag` is the sum of what is known, for scalers that read a number."""
    return {
        "namespace": lag.scope.fully_qualified_namespace,
        "hub": lag.scope.hub,
        "consumer_group": lag.scope.consumer_group,
        "read_at": lag.read_at.isoformat(),
        "lag": lag.total,
        "unknown": list(lag.unknown),
        "partitions": {each.partition_id: _partition(each) for each in lag.partitions},
        "notes": list(lag.notes),
    }


def _partition(each: PartitionProgress) -> dict[str, Any]:
    stored = each.checkpoint
    return {
        "state": each.state.value,
        "lag": each.lag,
        "lost": each.lost,
        "seconds": each.seconds,
        "first": each.first,
        "last": each.last,
        "last_enqueued_at": _time(each.last_enqueued_at),
        "read_at": _time(each.read_at),
        "error": each.error,
        "checkpoint": None
        if stored is None
        else {
            "sequence_number": stored.sequence_number,
            "offset": stored.offset,
            "written_at": _time(stored.written_at),
            "age": each.checkpoint_age,
            "format": stored.format,
            "place": stored.place,
        },
        "owner": None if stored is None else stored.owner,
        "is_owned": None if stored is None else stored.is_owned,
    }


def _time(moment: datetime | None) -> str | None:
    return None if moment is None else moment.isoformat()


_GAUGES: Final[Sequence[tuple[str, str, Callable[[PartitionProgress, datetime], float | None]]]] = (
    (
        "eventpump_partition_lag_seconds",
        "Seconds for which the oldest event that is not processed has been in the partition.",
        lambda each, _: each.seconds,
    ),
    (
        "eventpump_partition_lost_events",
        "Events that retention has removed before they were processed.",
        lambda each, _: each.lost,
    ),
    (
        "eventpump_partition_checkpoint_age_seconds",
        "Seconds since the checkpoint was stored.",
        lambda each, _: each.checkpoint_age,
    ),
    (
        "eventpump_partition_read_age_seconds",
        "Seconds since the partition and its checkpoint were read.",
        lambda each, now: None if each.read_at is None else (now - each.read_at).total_seconds(),
    ),
)


def metrics(lag: GroupLag, now: datetime) -> Iterator[Metric]:
    """Return the lag as metrics. A partition of which a value is not known has no sample of it."""
    group = lag.scope.fully_qualified_namespace, lag.scope.hub, lag.scope.consumer_group
    rows = [(labels_of(*group, each.partition_id), each) for each in lag.partitions]
    yield Metric(
        "eventpump_partition_lag",
        "gauge",
        "Events of the partition that are not processed, by the checkpoint.",
        [Sample({**labels, "position": "checkpointed"}, each.lag) for labels, each in rows if each.lag is not None],
    )
    for name, text, value_of in _GAUGES:
        values = ((labels, value_of(each, now)) for labels, each in rows)
        yield Metric(name, "gauge", text, [Sample(labels, value) for labels, value in values if value is not None])
    yield Metric(
        "eventpump_partition_state",
        "gauge",
        "1 for the state in which the consumer group is in the partition, 0 for all others.",
        [
            Sample({**labels, "state": state.value}, int(each.state is state))
            for labels, each in rows
            for state in LagState
        ],
    )
