"""What tests of producers wait for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable


async def idle() -> None:
    """Let everything run that can without time passing."""
    for _ in range(50):
        await asyncio.sleep(0)


async def error_of(use: Awaitable[object]) -> BaseException:
    """Return the error that a use raises."""
    found = (await asyncio.gather(use, return_exceptions=True))[0]
    assert isinstance(found, BaseException), "no error was raised"
    return found
