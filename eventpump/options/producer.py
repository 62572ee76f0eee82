"""Options of the buffered producer."""

from __future__ import annotations

from pydantic import (
    Field,
)

from eventpump.options.base import SettingsModel


class BufferSettings(SettingsModel):
    """How a buffered producer fills its batches, and how much it holds.

    Args:
        max_batch_events: A batch with so many is sent at once.
        max_batch_bytes: And so is one of so many bytes. A larger event goes alone; what the service takes in one
            message may be less, and a batch is then sent in parts.
        max_wait_time: Seconds the first event of a batch waits for others.
        max_events: Events taken in whose outcome is open, of all partitions together.
        max_bytes: The same in bytes.
        max_partition_events: The same per partition; None for no bound but the one of all.
        max_partition_bytes: The same per partition, in bytes.
        max_in_flight: Batches on their way to one partition at a time. With more than 1 a retry may reorder events,
            those of one key too; an idempotent producer has 1.
    """

    max_batch_events: int = Field(default=5000, ge=1, le=1_000_000)
    max_batch_bytes: int = Field(default=256 * 1024, ge=1)
    max_wait_time: float = Field(default=0.005, ge=0, le=86_400)
    max_events: int = Field(default=100_000, ge=1)
    max_bytes: int = Field(default=8 * 1024 * 1024, ge=1)
    max_partition_events: int | None = Field(default=None, ge=1)
    max_partition_bytes: int | None = Field(default=None, ge=1)
    max_in_flight: int = Field(default=1, ge=1, le=1000)
