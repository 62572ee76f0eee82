"""Branch coverage of packages by their own unit tests, against floors that only rise.

Measuring takes more than three times the CPU on Python 3.11: the normal run measures the packages with short tests.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.coverage import PROPERTY

ROOT = Path(__file__).parents[1]
FLOORS: dict[str, dict[str, float]] = tomllib.loads((ROOT / "tests/coverage_floors.toml").read_text(encoding="utf-8"))

_TIMEOUT = 3600.0


@pytest.mark.timeout(_TIMEOUT + 60)
@pytest.mark.parametrize(
    ("package", "floor"),
    [
        *FLOORS["floors"].items(),
        *(pytest.param(*each, marks=pytest.mark.long) for each in FLOORS["long"].items()),
    ],
    ids=[*FLOORS["floors"], *FLOORS["long"]],
)
def test_coverage_is_not_below_its_floor(
    package: str, floor: float, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """The unit tests of a package execute at least the recorded share of its lines and branches."""
    report = tmp_path / "coverage.json"
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("EVENTPUMP_", "PYTEST_"))}
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", f"tests/unit/{package}", "-p", "no:cacheprovider"),
            "--hypothesis-profile=few",  # more examples cost much time here, and execute no further lines
            *(f"--cov=eventpump.{package}", "--cov-branch", f"--cov-report=json:{report}"),
        ],
        cwd=ROOT,
        env=environment | {"COVERAGE_FILE": str(tmp_path / "data"), "EVENTPUMP_PURE": "1"},
        capture_output=True,
        text=True,
        timeout=_TIMEOUT,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-10_000:]
    measured = json.loads(report.read_text(encoding="utf-8"))
    modules = {name: round(of["summary"]["percent_covered"], 1) for name, of in measured["files"].items()}
    record_property(PROPERTY, json.dumps(modules))
    assert measured["totals"]["percent_covered"] >= floor, modules
