"""A source as an async context manager."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self


class ClosingSource(ABC):
    """An event source that is closed at the end of an `async with` block."""

    @abstractmethod
    async def aclose(self) -> None:
        """See `EventSource`."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
