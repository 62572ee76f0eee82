"""What all row stores have in common: they are opened and closed, and check the names that they are given."""

from __future__ import annotations

from eventpump.errors import ClosedError, StoreError
from eventpump.storage.ledgers.interface import split_name
from eventpump.storage.rows.interface import KIND


class OpenedRows:
    """The state of a store, which its calls check."""

    is_remote = True

    def __init__(self) -> None:
        self._is_open = False
        self._is_closed = False

    async def open(self) -> None:
        """Open it. Opening twice is fine."""
        if self._is_closed:
            raise ClosedError(KIND)
        self._is_open = True

    async def aclose(self) -> None:
        """Close it. Closing twice is fine."""
        self._is_closed = True

    def _find(self, operation: str, name: str) -> tuple[str, str]:
        """Return directory and file of a name. Raises `ValueError` for none, another error if the store is not open."""
        parts = split_name(name)
        if self._is_closed:
            raise ClosedError(KIND)
        if not self._is_open:
            raise StoreError(f"{operation} {name}", f"the {KIND} is not open: call open() first")
        return parts

    def _find_directory(self, operation: str, directory: str) -> str:
        return self._find(operation, f"{directory}/any")[0]
