"""Writes what a Python process started by the tests logs, down to DEBUG, where the tests look for secrets."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

_DIRECTORY = os.environ.get("EVENTPUMP_LEAK_LOGS")


def _tap(directory: Path) -> None:
    spec = importlib.util.spec_from_file_location("_log_tap", Path(__file__).parents[1] / "log_tap.py")
    assert spec is not None
    assert spec.loader is not None
    log_tap = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(log_tap)
    file = directory / f"{os.getpid()}.log"

    def take(text: str) -> None:
        # Opened for each text, since a fork may close what it does not know; without the objects of a file, which take
        # most of the time.
        log = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            os.write(log, f"{text}\n".encode(errors="replace"))
        finally:
            os.close(log)

    log_tap.tap(take)


if _DIRECTORY is not None:
    _tap(Path(_DIRECTORY))
