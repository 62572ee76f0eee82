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
        with file.open("a", encoding="utf-8", errors="replace") as log:
            log.write(text + "\n")

    log_tap.tap(take)


if _DIRECTORY is not None:
    _tap(Path(_DIRECTORY))
