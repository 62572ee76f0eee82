"""The lag of a consumer group as JSON and as Prometheus metrics."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Any

from eventpump.lag.group import GroupLag, LagState, PartitionProgress
from eventpump.net.health import Metric, Sample


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


def metrics(lag: GroupLag) -> Iterator[Metric]:
    """Return the lag as metrics. A partition of which a value is not known has no sample of it."""
    labels = {
        "messaging_system": "eventhubs",
        "server_address": lag.scope.fully_qualified_namespace,
        "messaging_destination_name": lag.scope.hub,
        "messaging_consumer_group_name": lag.scope.consumer_group,
    }

    def of(each: PartitionProgress, **more: str) -> dict[str, str]:
        return {**labels, "messaging_destination_partition_id": each.partition_id, **more}

    yield Metric(
        "eventpump_partition_lag",
        "gauge",
        "Events of the partition that are not processed, by the checkpoint.",
        [Sample(of(each, position="checkpointed"), each.lag) for each in lag.partitions if each.lag is not None],
    )
    yield Metric(
        "eventpump_partition_lag_seconds",
        "gauge",
        "Seconds for which the oldest event that is not processed has been in the partition.",
        [Sample(of(each), each.seconds) for each in lag.partitions if each.seconds is not None],
    )
    yield Metric(
        "eventpump_partition_lost_events",
        "gauge",
        "Events that retention has removed before they were processed.",
        [Sample(of(each), each.lost) for each in lag.partitions],
    )
    yield Metric(
        "eventpump_partition_checkpoint_age_seconds",
        "gauge",
        "Seconds since the checkpoint was stored.",
        [Sample(of(each), each.checkpoint_age) for each in lag.partitions if each.checkpoint_age is not None],
    )
    yield Metric(
        "eventpump_partition_state",
        "gauge",
        "1 for the state in which the consumer group is in the partition, 0 for all others.",
        [
            Sample(of(each, state=state.value), int(each.state is state))
            for each in lag.partitions
            for state in LagState
        ],
    )
