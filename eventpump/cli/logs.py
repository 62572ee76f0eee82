"""The lines that commands write on the standard error: as text, or as JSON (`--log-format json`)."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Final

from eventpump.texts import without_secrets

_IS_JSON: ContextVar[bool] = ContextVar("eventpump_log_format_json", default=False)

_OF_EVERY_RECORD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def add_log_option(parser: argparse.ArgumentParser, *, default: object = "text") -> None:
    parser.add_argument(
        "--log-format",
        choices=("text", "json"),
        default=default,
        help="how errors and the log are written on the standard error: json for one object per line (default: text)",
    )


class JsonLines(logging.Formatter):
    """Writes a log record as a line of JSON, with its fields such as `hub` and `partition_id`."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {name: value for name, value in vars(record).items() if name not in _OF_EVERY_RECORD}
        if record.exc_info and record.exc_info[1] is not None:
            fields["error"] = "".join(traceback.format_exception(record.exc_info[1])).rstrip()
        moment = datetime.fromtimestamp(record.created, UTC)
        return _line(moment, record.levelname, record.name, record.getMessage(), fields)


def _line(moment: datetime, level: str, logger: str, message: str, fields: dict[str, Any]) -> str:
    """Return a line. Its own names count before those of fields, and secrets are masked."""
    head = {"time": moment.isoformat(), "level": level.lower(), "logger": logger, "message": without_secrets(message)}
    rest = {
        name: without_secrets(value) if isinstance(value, str) else value
        for name, value in fields.items()
        if name not in head
    }
    return json.dumps({**head, **rest}, ensure_ascii=False, default=lambda value: without_secrets(str(value)))


@contextmanager
def writing_logs(log_format: str) -> Iterator[None]:
    """Write the log of the library, and what `complain` prints, as "text" or as "json"."""
    if log_format != "json":
        yield
        return
    logger, handler = logging.getLogger("eventpump"), logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    before = logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    token = _IS_JSON.set(True)
    try:
        yield
    finally:
        _IS_JSON.reset(token)
        logger.propagate = before
        logger.removeHandler(handler)


def complain(text: str) -> None:
    """Print a line on the standard error."""
    line = f"eventpump: {without_secrets(text)}"
    if _IS_JSON.get():
        line = _line(datetime.now(UTC), "ERROR", "eventpump.cli", text, {})
    with suppress(OSError):
        print(line, file=sys.stderr, flush=True)


def write_state(text: str) -> None:
    """Write what the command is doing on the standard error. Does not use its buffers: see `answering_signal`."""
    text = without_secrets(text)
    if _IS_JSON.get():
        text = _line(datetime.now(UTC), "INFO", "eventpump.cli", text, {})
    with suppress(OSError):
        os.write(2, f"{text}\n".encode())
