"""Sees every log record down to DEBUG, and changes nothing about who else sees which.

For the tests' own process, and for every Python process they start (`children/sitecustomize.py`): it stands on nothing
but `logging`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

_FOREIGN = "py4j"
"""A trace, at DEBUG, of all that a Spark driver is told by its user: the options with their keys are in it."""

_FRAMES = "eventpump.amqp"
"""One line per AMQP frame: some tests and programs have hundreds of thousands."""
MOST_FRAMES = 500
"""How often the log of frames is asked for that its own level does not enable, until the count begins anew."""


def tap(take: Callable[[str], None]) -> Callable[[], None]:
    """Have the text of every record taken, with its traceback, before its logger's own level has a say.

    Of the log of frames only the first ones are, for the time that all of them would take.

    Returns:
        A function to call where the count of frames begins anew.
    """
    formatter = logging.Formatter("%(name)s %(levelname)s %(message)s")
    kind: Any = logging.Logger
    call_handlers, is_enabled_for = kind.callHandlers, kind.isEnabledFor

    frames_left = MOST_FRAMES

    def renew() -> None:
        nonlocal frames_left
        frames_left = MOST_FRAMES

    def enabled(logger: logging.Logger, level: int) -> bool:
        nonlocal frames_left
        if logger.name == _FRAMES:
            frames_left -= 1
            return frames_left >= 0 or bool(is_enabled_for(logger, level))
        return not logger.name.startswith(_FOREIGN) or bool(is_enabled_for(logger, level))

    def taken(logger: logging.Logger, record: logging.LogRecord) -> None:
        try:
            text = formatter.format(record)
        except Exception:  # an argument that cannot be shown shows nothing
            text = str(record.msg)
        take(text)
        if record.levelno >= logger.getEffectiveLevel() and record.levelno > logger.manager.disable:
            call_handlers(logger, record)

    kind.isEnabledFor = enabled
    kind.callHandlers = taken
    return renew
