"""What a producer has sent, as numbers: for metrics, logs and health checks."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class SendCount:
    """A number of events, and of the messages that held them. Each only ever grows.

    Args:
        events: Events. Default: 0.
        bytes: Bytes of these events in their messages, encoded. Default: 0.
        batches: Messages. Default: 0.
    """

    events: int = 0
    bytes: int = 0
    batches: int = 0


@dataclass(frozen=True, slots=True)
class ProducerStats:
    """What a producer has done since it was created; see `EventProducer.stats` and `BufferedProducer.stats`.

    Every message that was begun and whose outcome is known is counted once, as `sent` or as `failed`.

    Args:
        sent: What the service has confirmed to be stored. Default: `SendCount()`.
        failed: What was not confirmed: refused, given up after the last retry, cancelled while it was sent, or dropped
            when the producer closed. Of a plain producer it may be stored all the same. What an idempotent producer has
            in doubt is in neither until its outcome is known. Default: `SendCount()`.
        retried: What was sent again, or was about to be: once for each retry. Of an idempotent producer also each
            attempt to find out on a new link whether a batch in doubt is stored. Default: `SendCount()`.
    """

    sent: SendCount = field(default_factory=SendCount)
    failed: SendCount = field(default_factory=SendCount)
    retried: SendCount = field(default_factory=SendCount)


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
