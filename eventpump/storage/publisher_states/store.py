"""The states of idempotent publishers as records, in any record store."""

from __future__ import annotations

import re
from collections.abc import Awaitable
from typing import Final, TypeVar

from eventpump.core.claim import PublisherState, StoredPublisherState
from eventpump.errors import ConfigurationError, StoreError
from eventpump.interfaces import RecordStore
from eventpump.storage.publisher_states.form import check_key, check_writable, decode_state, encode_state

_T = TypeVar("_T")

# What may not be in a blob's name, or would make a folder of it; and "." at the end, which a URL loses.
_UNSAFE: Final = re.compile(r"[%/\\?#]|\.$")


class RecordPublisherStateStore:
    """A `PublisherStateStore` in a `RecordStore`: the record of a state is `{name}/{partition}.json`.

    Args:
        records: Stores the records; closed with this store.
    """

    def __init__(self, records: RecordStore) -> None:
        self._records = records

    async def open(self) -> None:
        """Open the store. Opening twice is fine.

        Raises:
            ConfigurationError: What the states are kept in does not exist, or cannot be used.
            StoreError: It cannot be opened now.
        """
        await self._records.open()

    async def read_state(self, name: str, partition_id: str) -> StoredPublisherState | None:
        """See `PublisherStateStore`."""
        return await self._read("read state", name, partition_id)

    async def write_state(
        self, name: str, partition_id: str, state: PublisherState, replaces: StoredPublisherState | None
    ) -> StoredPublisherState | None:
        """See `PublisherStateStore`."""
        operation = "write state"
        record, body = record_name(name, partition_id), encode_state(check_writable(state))
        former = None if replaces is None else replaces.version
        version = await self._call(operation, partition_id, self._records.swap(record, body, former))
        if version is not None:
            return StoredPublisherState(state, version)
        # An equal state counts as this one, also in another form; what is no state raises.
        found = await self._read(operation, name, partition_id)
        return found if found is not None and found.state == state else None

    async def reset_state(self, name: str, partition_id: str) -> None:
        """See `PublisherStateStore`."""
        record = record_name(name, partition_id)
        await self._call("reset state", partition_id, self._records.delete(record))

    async def aclose(self) -> None:
        """Close the store. States stay. Closing twice is fine."""
        await self._records.aclose()

    async def _read(self, operation: str, name: str, partition_id: str) -> StoredPublisherState | None:
        record = record_name(name, partition_id)
        found = await self._call(operation, partition_id, self._records.read(record))
        if found is None:
            return None
        try:
            return StoredPublisherState(decode_state(found.body), found.version)
        except ValueError as error:
            raise StoreError(operation, str(error), partition_id=partition_id) from None

    async def _call(self, operation: str, partition_id: str, call: Awaitable[_T]) -> _T:
        try:
            return await call
        except StoreError as error:
            raise StoreError(operation, error.reason, partition_id=partition_id) from error
        except ValueError as error:
            raise ConfigurationError("name", str(error)) from None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._records!r})"


def record_name(name: str, partition_id: str) -> str:
    """Return the name of a state's record. Raises `ConfigurationError` if publisher or partition is not valid."""
    parts = (_UNSAFE.sub(lambda found: f"%{ord(found.group()):02X}", each) for each in check_key(name, partition_id))
    return "/".join(parts) + ".json"
