"""The stored checkpoints of a consumer group, whatever program stored them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from types import MappingProxyType
from typing import Protocol

from eventpump.interfaces import ConsumerScope


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """What a store has of one partition: the checkpoint, and the owner.

    Args:
        partition_id: The partition.
        format: Who writes it so: "v5", "EventProcessorHost", "eventpump" or "Spark".
        place: Where it is: the name of the blob, or the path of the file.
        sequence_number: The number of the last event that is processed; None if there is no checkpoint, or none with a
            number.
        offset: Its offset, an opaque text; None likewise.
        written_at: When it was stored, by the store's clock; None if the store does not say so.
        owner: The name of the consumer that owns the partition, or was its last owner; None for none. Default: None.
        is_owned: Whether the partition has an owner now; None if the store knows of no owners.
        problem: Why the checkpoint cannot be used; None if it can be, or if there is none.
        version: Identifies this state of the checkpoint to its store; None if the store has no versions, or no
            checkpoint. Default: None.
    """

    partition_id: str
    format: str
    place: str
    sequence_number: int | None = None
    offset: str | None = None
    written_at: datetime | None = None
    owner: str | None = None
    is_owned: bool | None = None
    problem: str | None = None
    version: str | None = field(default=None, repr=False)

    @property
    def is_usable(self) -> bool:
        """Whether there is a position to begin at."""
        return self.sequence_number is not None or self.offset is not None


@dataclass(frozen=True, slots=True)
class GroupCheckpoints:
    """What a store has of a consumer group.

    Args:
        partitions: By partition id. A partition of which the store has nothing is not among them. Default: `{}`.
        notes: What its user should know, in sentences. Default: `()`.
    """

    partitions: Mapping[str, StoredCheckpoint] = field(default_factory=lambda: MappingProxyType({}))
    notes: Sequence[str] = ()


class CheckpointReader(Protocol):
    """Reads the stored checkpoints of consumer groups. Nothing is written, and no lease is taken."""

    async def read(self, scope: ConsumerScope, partition_ids: Sequence[str]) -> GroupCheckpoints:
        """Read the checkpoints of a consumer group.

        Args:
            scope: The consumer group.
            partition_ids: The partitions of the hub.

        Raises:
            StoreError: The store failed.
            ConfigurationError: There is no such store.
        """

    async def aclose(self) -> None:
        """Release what it holds. May be called more than once."""
