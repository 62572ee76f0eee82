"""Whether a `CancelledError` is a cancellation of the running task, or a failure of what the task awaits.

A store, a credential or a handler that awaits a cancelled task or future raises it too. That is a failure of that code,
and not a request that the running task end.
"""

from __future__ import annotations

import asyncio


def is_cancelled() -> bool:
    """Return whether the running task was cancelled. False outside of tasks."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def is_failure(error: BaseException) -> bool:
    """Return whether what the running task called has failed, so that the task may handle it and go on.

    A `CancelledError` is a failure if this task was not cancelled. False for a cancellation of this task, for what
    ends the interpreter, and for the close of a coroutine.
    """
    if isinstance(error, asyncio.CancelledError):
        return not is_cancelled()
    return not isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit)
