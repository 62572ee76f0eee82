"""Sees every log record down to DEBUG, and changes nothing about who else sees which.

For the tests' own process, and for every Python process they start (`children/sitecustomize.py`): it stands on nothing
but `logging`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Protocol

_FOREIGN = "py4j"
"""A trace, at DEBUG, of all that a Spark driver gets from its user: the options with their keys are in it."""

_FRAMES = "eventpump.amqp"
"""One line per AMQP frame: some tests and programs have hundreds of thousands."""
MOST_FRAMES = 500
"""How often the log of frames is asked for that its own level does not enable, until the count is reset."""


class Renew(Protocol):
    """Resets the count of frames."""

    def __call__(self, *, off: bool = False) -> None:
        """Begin it.

        Args:
            off: Only records that their logger's own level enables are made from now on.
        """


def tap(take: Callable[[str], None]) -> Renew:
    """Have the text of every record taken, with its traceback, before its logger's own level has a say.

    Of the log of frames only the first ones are, for the time that all of them would take.

    Returns:
        A function that resets the count of frames.
    """
    formatter = logging.Formatter("%(name)s %(levelname)s %(message)s")
    kind: Any = logging.Logger
    call_handlers, is_enabled_for, log = kind.callHandlers, kind.isEnabledFor, kind._log

    frames_left = MOST_FRAMES
    is_off = False

    def renew(*, off: bool = False) -> None:
        nonlocal frames_left, is_off
        frames_left, is_off = MOST_FRAMES, off

    def enabled(logger: logging.Logger, level: int) -> bool:
        nonlocal frames_left
        if is_off:
            return bool(is_enabled_for(logger, level))
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

    def logged(logger: logging.Logger, level: int, msg: object, args: Any, exc_info: Any = None, **more: Any) -> None:
        if exc_info or more.get("stack_info") or is_enabled_for(logger, level):
            more["stacklevel"] = more.get("stacklevel", 1) + 1  # the caller is one call further away
            log(logger, level, msg, args, exc_info, **more)
            return
        if logger.disabled:
            return  # as for a record: pyspark's client has one that would take every plan, with the options in it
        # Its text is all that is wanted of it: a record, which has its line and thread, takes three times as long.
        try:
            # As a record has it: a single mapping is what the names in the message stand for.
            values = args[0] if len(args) == 1 and args[0] and isinstance(args[0], Mapping) else args
            text = str(msg) % values if values else str(msg)
        except Exception:  # as above
            text = str(msg)
        take(f"{logger.name} {logging.getLevelName(level)} {text}")

    kind._log = logged
    kind.isEnabledFor = enabled
    kind.callHandlers = taken
    return renew
