"""What is closed at the end of an `async with` block."""

from __future__ import annotations

from typing import Self


class AsyncResource:
    """What its `aclose` closes, and the end of an `async with` block too."""

    async def aclose(self) -> None:
        """Close it."""
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
