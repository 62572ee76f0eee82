"""Whether a store of records is open."""

from __future__ import annotations

from eventpump.errors import ClosedError, StoreError


class OpenedRecords:
    """A `RecordStore` that is opened once and closed once.

    Args:
        kind: What errors call it.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._is_open = False
        self._is_closed = False

    def _check_not_closed(self) -> None:
        if self._is_closed:
            raise ClosedError(self._kind)

    def _check_open(self, operation: str) -> None:
        self._check_not_closed()
        if not self._is_open:
            raise StoreError(operation, "the store is not open: call open() first")
