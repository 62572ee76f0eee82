"""What a producer has sent, as numbers: for metrics, logs and health checks."""

from __future__ import annotations

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
        _add(self._sent, events, size)

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


def _add(count: list[int], events: int, size: int) -> None:
    count[0] += events
    count[1] += size
    count[2] += 1
