"""What a producer shows of its batches and of what it has sent: plain values."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field


class BatchState(enum.Enum):
    """The state of a batch of an idempotent producer. Any other stays `OPEN`."""

    OPEN = "open"
    """It takes events, and may be sent."""
    IN_FLIGHT = "in flight"
    PUBLISHED = "published"
    """It is stored, once. It is not sent again."""
    REFUSED = "refused"
    """It is not stored, and has no numbers. It takes events, and may be sent as new."""
    IN_DOUBT = "in doubt"
    """It may be stored. It keeps its numbers; sending it again waits for its outcome."""


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
