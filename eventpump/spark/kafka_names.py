"""The option names of Spark's Kafka source and sink, of which queries that are moved still have some."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from eventpump.errors import ConfigurationError

GUIDE: Final = "docs/from-kafka-in-spark.md"
_CONNECTION: Final = "`connectionString`, or `fullyQualifiedNamespace` and `credential`"
_START: Final = "`startingPosition`, or `startingPositions` by partition"
_END: Final = "`endingPosition`, or `endingPositions` by partition"

NAMES: Final[Mapping[str, str]] = {
    "assign": "`partitions`",
    "endingOffsets": _END,
    "endingOffsetsByTimestamp": _END,
    "endingTimestamp": _END,
    "fetchOffset.numRetries": "`retryTimeout`, a time",
    "fetchOffset.retryIntervalMs": "`retryTimeout`, a time",
    "groupIdPrefix": "`consumerGroup`, which has to exist",
    "includeHeaders": "`includeProperties`",
    "kafka.acks": "nothing: an event counts as sent when the service has stored it",
    "kafka.batch.size": "`max_batch_bytes` of `foreach_batch_producer`",
    "kafka.bootstrap.servers": _CONNECTION,
    "kafka.compression.type": "`encode`, for the sink",
    "kafka.delivery.timeout.ms": "`retryTimeout`",
    "kafka.enable.idempotence": "`idempotent`, for the sink",
    "kafka.fetch.max.bytes": "`prefetchCount`",
    "kafka.group.id": "`consumerGroup`, which has to exist",
    "kafka.isolation.level": "nothing: there are no transactions",
    "kafka.linger.ms": "nothing: no event waits for others",
    "kafka.max.poll.records": "`prefetchCount`",
    "kafka.partitioner.class": "`router`, for the sink",
    "kafka.request.timeout.ms": "`operationTimeout`",
    "kafka.sasl.jaas.config": _CONNECTION,
    "kafka.sasl.mechanism": _CONNECTION,
    "kafka.security.protocol": _CONNECTION,
    "kafkaConsumer.pollTimeoutMs": "`receiverTimeout`",
    "maxOffsetsPerTrigger": "`maxEventsPerTrigger`",
    "minOffsetsPerTrigger": "`minEventsPerTrigger`",
    "startingOffsets": _START,
    "startingOffsetsByTimestamp": _START,
    "startingOffsetsByTimestampStrategy": "`noMatchingPosition`",
    "startingTimestamp": _START,
    "subscribe": "`hub`",
    "subscribePattern": "`hub`, with the names: AMQP cannot list a namespace",
    "topic": "`hub`",
}
"""Options of Kafka's connector that have another name here or none, and what to write in their place."""
_SPELLED: Final = {name.lower(): name for name in NAMES}


def refuse_kafka_names(options: Iterable[str]) -> None:
    """Check that no option has a name of Kafka's, which are not case-sensitive, as all of Spark's."""
    names = {name.lower() for name in options}
    found = [_SPELLED[name] for name in _SPELLED if name in names]
    unknown = sorted(name for name in names if name.startswith("kafka.") and name not in _SPELLED)
    if not found and not unknown:
        return
    answers = [f"for {name} {'write ' if '`' in NAMES[name] else ''}{NAMES[name]}" for name in found]
    answers += [f"for {name} nothing: no option has its meaning" for name in unknown]
    raise ConfigurationError((found or unknown)[0], f"is a name of Kafka's connector ({GUIDE}): " + "; ".join(answers))
