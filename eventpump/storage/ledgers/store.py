"""Records of the Spark sink in any record store, each created once."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TypeVar

from eventpump.errors import ClosedError, StoreError
from eventpump.interfaces import RecordStore
from eventpump.storage.ledgers.interface import split_name

_T = TypeVar("_T")

KIND = "ledger"
"""What such a store is, in errors."""


class RecordLedger:
    """A `LedgerStore` in a `RecordStore`; None where `open` creates the store."""

    def __init__(self, records: RecordStore | None) -> None:
        self._records = records
        self._is_closed = False

    async def open(self) -> None:
        """Open it. Opening twice is fine."""
        if self._is_closed:
            raise ClosedError(KIND)
        await self._open("open").open()

    async def create(self, name: str, body: bytes) -> bool:
        """Create a record where there is none."""
        operation = f"create {_checked(name)}"
        return await self._answer("create", self._open(operation).swap(name, body, None)) is not None

    async def read(self, name: str) -> bytes | None:
        operation = f"read {_checked(name)}"
        found = await self._answer("read", self._open(operation).read(name))
        return None if found is None else found.body

    async def list(self, directory: str) -> list[str]:
        _checked(f"{directory}/any")
        found = await self._answer("list", self._open(f"list {directory}").list(f"{directory}/"))
        return sorted(name.removeprefix(f"{directory}/") for name in found)

    async def delete(self, name: str) -> None:
        operation = f"delete {_checked(name)}"
        await self._answer("delete", self._open(operation).delete(name))

    async def aclose(self) -> None:
        """Close it."""
        self._is_closed = True
        if self._records is not None:
            await self._records.aclose()

    def _open(self, operation: str) -> RecordStore:
        if self._is_closed:
            raise ClosedError(KIND)
        if self._records is None:
            raise StoreError(operation, "the ledger is not open: call open() first")
        return self._records

    async def _answer(self, operation: str, call: Awaitable[_T]) -> _T:
        try:
            return await call
        except StoreError as error:
            _, _, record = error.operation.partition(" ")
            raise StoreError(f"{operation} {record}", error.reason) from error


def _checked(name: str) -> str:
    return "/".join(split_name(name))
