"""What a batch of the source covers, as numbers. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SequenceRange:
    """The events of one hub partition with sequence numbers from `start` to before `end`. Numbers may have gaps."""

    partition_id: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class SourcePartition:
    """What one task reads: ranges of one hub, each of another hub partition or another part of one."""

    ranges: tuple[SequenceRange, ...]


@dataclass(frozen=True, slots=True)
class ReceiveOptions:
    """How a task receives its ranges.

    :param owner_level: the epoch of an exclusive reader; None shares the partition.
    :param prefetch_count: events of one range received ahead, at most.
    :param receiver_timeout: seconds without an event after which the partition is asked whether the rest is gone.
    :param fail_on_data_loss: raise `DataLossError` for numbers that are gone; otherwise log a warning and go on.
    :param cache_memory: bytes of the last ranges a worker keeps in memory; 0 keeps none.
    :param cache_disk: bytes of the last ranges a worker keeps in its spill file.
    """

    consumer_group: str = "$Default"
    owner_level: int | None = 0
    prefetch_count: int = 4000
    receiver_timeout: float = 60.0
    fail_on_data_loss: bool = True
    cache_memory: int = 64 * 1024 * 1024
    cache_disk: int = 512 * 1024 * 1024
