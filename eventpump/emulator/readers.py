"""The rules for concurrent readers of a partition: epochs and the limit of five readers. Pure.

The scope is one consumer group of one partition; only attached readers count.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from eventpump.eventhubs.conditions import LINK_STOLEN, RESOURCE_LIMIT_EXCEEDED
from eventpump.texts import excerpt

MAX_SHARED_READERS = 5


@dataclass(frozen=True, slots=True)
class Reader:
    """A reader of a partition.

    Args:
        name: Its receiver name, shown in other readers' errors.
        epoch: Its owner level; None shares the partition.
    """

    key: Hashable
    name: str | None
    epoch: int | None

    @property
    def shown_name(self) -> str:
        """The name as shown in the service's texts."""
        return "nil" if self.name is None else excerpt(self.name)


@dataclass(frozen=True, slots=True)
class Refusal:
    """The reason why a reader or a producer is refused or disconnected."""

    condition: str
    description: str


@dataclass(frozen=True, slots=True)
class Eviction:
    """A reader to disconnect, and the reason."""

    reader: Reader
    refusal: Refusal


class ReaderTable:
    """The attached readers of one consumer group and partition."""

    def __init__(self) -> None:
        self._readers: dict[Hashable, Reader] = {}

    def __len__(self) -> int:
        return len(self._readers)

    def admit(self, reader: Reader) -> Refusal | list[Eviction]:
        """Admit a reader, and return the readers that it disconnects, which are removed at once; or return the
        refusal."""
        holder = next((each for each in self._readers.values() if each.epoch is not None), None)
        if reader.epoch is None:
            if holder is not None:
                return Refusal(
                    LINK_STOLEN,
                    f"At least one receiver for the endpoint is created with epoch of '{holder.epoch}', and so "
                    "non-epoch receiver is not allowed. Either reconnect with a higher epoch, or make sure all epoch "
                    "receivers are closed or disconnected.",
                )
            if len(self._readers) >= MAX_SHARED_READERS:
                names = ", ".join(each.shown_name for each in self._readers.values())
                return Refusal(
                    RESOURCE_LIMIT_EXCEEDED,
                    "Exceeded the maximum number of allowed receivers per partition in a consumer group which is "
                    f"{MAX_SHARED_READERS}. List of connected receivers - {names}.",
                )
            self._readers[reader.key] = reader
            return []
        if holder is not None and holder.epoch is not None and reader.epoch < holder.epoch:
            return Refusal(
                LINK_STOLEN,
                f"Receiver '{holder.shown_name}' with a higher epoch '{holder.epoch}' already exists. Receiver "
                f"'{reader.shown_name}' with epoch {reader.epoch} cannot be created. Make sure you are creating "
                "receivers with increasing epoch values.",
            )
        evictions = [Eviction(each, _superseded(each, reader)) for each in self._readers.values()]
        self._readers = {reader.key: reader}
        return evictions

    def leave(self, key: Hashable) -> None:
        """Remove a reader, if it is still there."""
        self._readers.pop(key, None)


def _superseded(old: Reader, new: Reader) -> Refusal:
    epoch = "" if old.epoch is None else str(old.epoch)
    return Refusal(
        LINK_STOLEN,
        f"New receiver '{new.shown_name}' with higher epoch of '{new.epoch}' is created hence current receiver "
        f"'{old.shown_name}' with epoch '{epoch}' is getting disconnected. If you are recreating the receiver, make "
        "sure a higher epoch is used.",
    )
