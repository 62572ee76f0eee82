"""The states of idempotent publishers in memory: for tests, and for publishers that never restart."""

from __future__ import annotations

from typing import TYPE_CHECKING

from eventpump.storage.publisher_states.form import KIND
from eventpump.storage.publisher_states.store import RecordPublisherStateStore
from eventpump.storage.records.memory import MemoryRecordStore

if TYPE_CHECKING:
    from eventpump.interfaces import StoredRecord


class MemoryPublisherStateStore(RecordPublisherStateStore):
    """A `PublisherStateStore` that lives as long as its process: for tests.

    Args:
        records: The states, shared by the stores that are given the same dictionary; None for a new one.
    """

    def __init__(self, records: dict[str, StoredRecord] | None = None) -> None:
        super().__init__(MemoryRecordStore(records, kind=KIND))
