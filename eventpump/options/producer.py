"""Options of the buffered producer."""

from __future__ import annotations

from pydantic import Field

from eventpump.options.base import SettingsModel


class BufferSettings(SettingsModel):
    """How a buffered producer fills its batches, and how much it holds.

    Args:
        max_batch_events: The number of events at which a batch is sent without waiting for more.
        max_batch_bytes: The size in bytes at which a batch is sent without waiting for more. A larger event is sent
            alone. If the service's limit for a message is lower, a batch is sent in several messages.
        max_wait_time: Seconds that the first event of a batch waits for others to join it.
        max_events: The most events in the buffer, over all partitions: accepted, and their outcome not known yet. When
            it is full, `send` waits.
        max_bytes: The most bytes in the buffer, over all partitions. A partition of which the buffer holds no event may
            have one of any size: what that event exceeds the partition's share by (`max_bytes` divided by twice the
            number of partitions, or `max_partition_bytes` if that is less) may come on top.
        max_partition_events: The most events in the buffer per partition; None for no limit but `max_events`.
        max_partition_bytes: The most bytes in the buffer per partition, or one larger event; None for no limit but
            `max_bytes`.
        max_in_flight: The most batches that are being sent to one partition at a time. With more than 1, a retry may
            reorder events, also those with the same key; an idempotent producer allows only 1.
    """

    max_batch_events: int = Field(default=5000, ge=1, le=1_000_000)
    max_batch_bytes: int = Field(default=256 * 1024, ge=1)
    max_wait_time: float = Field(default=0.005, ge=0, le=86_400)
    max_events: int = Field(default=100_000, ge=1)
    max_bytes: int = Field(default=8 * 1024 * 1024, ge=1)
    max_partition_events: int | None = Field(default=None, ge=1)
    max_partition_bytes: int | None = Field(default=None, ge=1)
    max_in_flight: int = Field(default=1, ge=1, le=1000)
