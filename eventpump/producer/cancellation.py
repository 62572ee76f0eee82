"""Telling a cancellation of one's own task from a `CancelledError` that what it awaits has raised by itself.

The latter comes of a store or credential that awaits a future or task somebody else has cancelled. It is a failure of
theirs, and no wish that we end.
"""

from __future__ import annotations

import asyncio


def is_cancelled() -> bool:
    """Whether the running task itself was asked to end."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
