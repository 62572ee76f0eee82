"""Sees every log record down to DEBUG, and changes nothing about who else sees which.

For the tests' own process, and for every Python process they start (`children/sitecustomize.py`): it stands on nothing
but `logging`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any


def tap(take: Callable[[str], None]) -> None:
    """Have the text of every record taken, with its traceback, before its logger's own level has a say."""
    formatter = logging.Formatter("%(name)s %(levelname)s %(message)s")
    kind: Any = logging.Logger
    call_handlers = kind.callHandlers

    def taken(logger: logging.Logger, record: logging.LogRecord) -> None:
        try:
            text = formatter.format(record)
        except Exception:  # an argument that cannot be shown shows nothing
            text = str(record.msg)
        take(text)
        if record.levelno >= logger.getEffectiveLevel() and record.levelno > logger.manager.disable:
            call_handlers(logger, record)

    kind.isEnabledFor = lambda _logger, _level: True
    kind.callHandlers = taken
