"""The states of idempotent publishers in memory: for tests, and for publishers that never restart."""

from __future__ import annotations

from eventpump.core.claim import PublisherState, StoredPublisherState
from eventpump.errors import ClosedError, StoreError
from eventpump.storage.publisher_states.form import Key, check_key, check_writable, new_version


class MemoryPublisherStateStore:
    """A `PublisherStateStore` that lives as long as its process: for tests.

    Args:
        states: The states, shared by the stores that are given the same dictionary; None for a new one.
    """

    def __init__(self, states: dict[Key, StoredPublisherState] | None = None) -> None:
        self._states = {} if states is None else states
        self._is_open = False
        self._is_closed = False

    async def open(self) -> None:
        """Open it. Opening twice is fine."""
        if self._is_closed:
            raise ClosedError("publisher state store")
        self._is_open = True

    async def read_state(self, name: str, partition_id: str) -> StoredPublisherState | None:
        """Return a state, or None if there is none."""
        return self._states.get(self._key("read state", name, partition_id))

    async def write_state(
        self, name: str, partition_id: str, state: PublisherState, replaces: StoredPublisherState | None
    ) -> StoredPublisherState | None:
        """Store a state by compare-and-swap. Return None, and store nothing, if another is there."""
        key = self._key("write state", name, partition_id)
        check_writable(state)
        found = self._states.get(key)
        if found is not None and found.state == state:
            return found
        if (found and found.version) != (replaces and replaces.version):
            return None
        stored = self._states[key] = StoredPublisherState(state, new_version())
        return stored

    async def reset_state(self, name: str, partition_id: str) -> None:
        """Delete a state. It is not an error if there is none."""
        self._states.pop(self._key("reset state", name, partition_id), None)

    async def aclose(self) -> None:
        """Close it. Closing twice is fine."""
        self._is_closed = True

    def _key(self, operation: str, name: str, partition_id: str) -> Key:
        if self._is_closed:
            raise ClosedError("publisher state store")
        if not self._is_open:
            raise StoreError(operation, "the store is not open: call open() first", partition_id=partition_id)
        return check_key(name, partition_id)

    def __repr__(self) -> str:
        return f"MemoryPublisherStateStore({len(self._states)} states)"
