"""The suites that implementations of an interface have to pass, and what several of them use."""

from __future__ import annotations

from collections.abc import Awaitable

from eventpump.errors import EventPumpError


async def error_of(call: Awaitable[object]) -> EventPumpError | None:
    """Return what a call raises; None if nothing."""
    try:
        await call
    except EventPumpError as error:
        return error
    return None
