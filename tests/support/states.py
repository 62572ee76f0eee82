"""The states of idempotent publishers that `MemoryPublisherStateStore`s share."""

from __future__ import annotations

from eventpump.core.claim import StoredPublisherState
from eventpump.interfaces import StoredRecord
from eventpump.storage.publisher_states.form import decode_state, encode_state
from eventpump.storage.publisher_states.store import record_name


class SharedStates(dict[str, StoredRecord]):
    """The records, with the states in them by the publisher's name and partition."""

    def state(self, key: tuple[str, str]) -> StoredPublisherState:
        found = self[record_name(*key)]
        return StoredPublisherState(decode_state(found.body), found.version)

    def put(self, key: tuple[str, str], stored: StoredPublisherState) -> None:
        self[record_name(*key)] = StoredRecord(encode_state(stored.state), stored.version)
