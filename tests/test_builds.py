"""Both builds pass: the rest of a run is of one, and what touches the compiled core is run here in the other."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from eventpump.compiled import PURE
from eventpump.reports import build_info

ROOT = Path(__file__).parents[1]

_PART = (
    "tests/unit/test_compiled.py",
    "tests/unit/test_core.py",
    "tests/unit/aio/test_wakeup.py",
    "tests/unit/amqp/test_connection.py",
    "tests/unit/amqp/test_event_scan.py",
    "tests/unit/amqp/test_trace.py",
    "tests/unit/consumer/link/test_feed.py",
    "tests/unit/core/test_budget.py",
    "tests/unit/core/test_cache.py",
    "tests/unit/core/test_credit.py",
    "tests/unit/eventhubs/test_events.py",
    "tests/unit/eventhubs/test_sealing.py",
    "tests/unit/producer/test_accumulator.py",
    "tests/unit/producer/test_batch.py",
    "tests/unit/producer/test_buffered.py",
    "tests/integration/test_producer.py",
)
"""What the gate runs in the other build: what uses the compiled core directly, and one file with a service."""
_TIMEOUT = 240.0


def _run(build: str, timeout: float, *options: str) -> None:
    taps = ("EVENTPUMP_", "PYTEST_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(taps)}
    if build == "pure":
        environment[PURE] = "1"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--build", build, *options]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-10_000:]


def _other() -> str:
    """Return the build that this run does not use.

    Skips the test where there is no compiled core.
    """
    if build_info().is_compiled:
        return "pure"
    if find_spec("eventpump._core") is None:
        pytest.skip("there is one build only: the compiled core was not built")
    return "compiled"


@pytest.mark.timeout(_TIMEOUT + 60)
def test_what_uses_the_core_passes_in_the_other_build() -> None:
    """Unit tests, the comparison with the reference, and one file over a socket."""
    _run(_other(), _TIMEOUT, "--hypothesis-profile=few", *_PART)


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_everything_passes_in_the_other_build() -> None:
    """All of the gate."""
    _run(_other(), 7000, "-n", "2", "--dist", "loadfile", "--ignore", "tests/test_builds.py", "tests")


def test_run_that_expects_the_other_build_fails() -> None:
    """`--build` is a check and no choice: it does not run the tests of another build than it says."""
    other = "pure" if build_info().is_compiled else "compiled"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--build", other, _PART[0]]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "this is the other build" in done.stderr
