"""Whether a `CancelledError` is a cancellation of the running task, or a failure of what the task awaits.

A store, a credential or a handler that awaits something which somebody else has cancelled raises it too. That is a
failure of theirs, and no request that the task end.
"""

from __future__ import annotations

import asyncio


def is_cancelled() -> bool:
    """Return whether somebody cancelled the running task. False outside of tasks."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def is_failure(error: BaseException) -> bool:
    """Return whether what the running task called has failed, so that the task may handle it and go on.

    A `CancelledError` is a failure where nobody cancelled this task. False for a cancellation of this task, for what
    ends the interpreter, and for the close of a coroutine.
    """
    if isinstance(error, asyncio.CancelledError):
        return not is_cancelled()
    return not isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit)
