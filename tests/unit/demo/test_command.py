"""`eventpump demo` before it plays: what it loads, and what it offers."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import get_args

from eventpump.demo.command import TRANSPORT_TYPES, TRANSPORTS
from eventpump.demo.processing import Processing
from eventpump.options.connection import TransportName, TransportType


def test_first_line_of_the_demo_waits_for_no_model() -> None:
    """What the command imports before it prints takes a tenth of a second: no pydantic, aiohttp or SDK."""
    program = "import sys, eventpump.demo.command; print(*{'aiohttp', 'azure', 'pydantic', 'rich'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.split() == []


def test_transports_of_the_demo_are_those_of_the_options() -> None:
    """They are written again, so that the options' models are not imported for them."""
    assert get_args(TransportType) == TRANSPORT_TYPES
    assert get_args(TransportName) == TRANSPORTS


def _processing(folder: Path, imports: float, events: int = 200_000) -> Processing:
    args = argparse.Namespace(transport_type="tcp", transport="native", partitions=2, events=events, seconds=20.0)
    return Processing(args, folder, imports)


def test_estimate_of_the_demo_is_of_this_machine(tmp_path: Path) -> None:
    """It grows with the time that the modules took to be imported, and with the events to compare."""
    assert _processing(tmp_path, 0.5).announcement == "this takes about 28 s here; Ctrl-C ends it"
    assert _processing(tmp_path, 1.0).announcement == "this takes about 36 s here; Ctrl-C ends it"
    assert _processing(tmp_path, 1.0, 400_000).announcement == "this takes about 46 s here; Ctrl-C ends it"


def test_comparison_of_the_demo_is_seen_to_move(tmp_path: Path) -> None:
    """From its beginning on, the figures have how many events were compared."""
    scene = _processing(tmp_path, 0.5).scene
    assert [name for name, _ in scene.head()] == ["published", "processed"]
    assert "compared" not in scene.line()
    scene.compared = 1_500
    assert scene.head()[-1] == ("compared", "1,500")
    assert "compared 1,500" in scene.line()
