"""What a producer has sent, as numbers: for metrics, logs and health checks."""

from __future__ import annotations

from collections.abc import Iterator

from eventpump.core.monitoring import Health, Metric, Sample, labels_of
from eventpump.core.status import ProducerStats, SendCount


class SendCounters:
    """Counts what a producer sends."""

    __slots__ = ("_failed", "_retried", "_sent")

    def __init__(self) -> None:
        # Plain numbers: a message costs no more than three additions.
        self._sent = [0, 0, 0]
        self._failed = [0, 0, 0]
        self._retried = [0, 0, 0]

    def sent(self, events: int, size: int) -> None:
        """Count a message that is stored."""
        sent = self._sent
        sent[0] += events
        sent[1] += size
        sent[2] += 1

    def failed(self, events: int, size: int) -> None:
        """Count a message that is not confirmed."""
        _add(self._failed, events, size)

    def retried(self, events: int, size: int) -> None:
        """Count the retry of a message."""
        _add(self._retried, events, size)

    @property
    def stats(self) -> ProducerStats:
        """The counts until now."""
        return ProducerStats(SendCount(*self._sent), SendCount(*self._failed), SendCount(*self._retried))


def health_of(what: str, *, is_closed: bool) -> Health:
    """Return how a producer is: ready until it is closed. One that cannot send at present retries by itself."""
    return Health(live=True, ready=not is_closed, reasons=(f"{what} is closed",) if is_closed else ())


def metrics_of(
    namespace: str, hub: str, stats: ProducerStats, *, buffered_bytes: int | None = None
) -> Iterator[Metric]:
    """Return the metrics of a producer; a buffer's bytes are of events whose outcome is open."""
    labels = labels_of(namespace, hub)
    yield Metric(
        "messaging_client_sent_messages_total",
        "counter",
        "Events that were sent, with the label error_type those that failed.",
        [Sample(labels, stats.sent.events), Sample({**labels, "error_type": "_OTHER"}, stats.failed.events)],
    )
    yield Metric(
        "eventpump_producer_retried_messages_total",
        "counter",
        "Events that were sent again, or were about to be, once for each retry.",
        [Sample(labels, stats.retried.events)],
    )
    if buffered_bytes is not None:
        yield Metric(
            "eventpump_producer_buffer_bytes",
            "gauge",
            "Bytes of events that are accepted and whose outcome is open.",
            [Sample(labels, buffered_bytes)],
        )


def _add(count: list[int], events: int, size: int) -> None:
    count[0] += events
    count[1] += size
    count[2] += 1
