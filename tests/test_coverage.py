"""Branch coverage of packages by their own unit tests, against floors that only rise. In the long form only.

Measuring takes more than three times the CPU on Python 3.11, which is why the normal run does not.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FLOORS: dict[str, float] = tomllib.loads((ROOT / "tests/coverage_floors.toml").read_text(encoding="utf-8"))["floors"]

_TIMEOUT = 3600.0


@pytest.mark.timeout(_TIMEOUT + 60)
@pytest.mark.parametrize("package", FLOORS)
def test_coverage_is_not_below_its_floor(package: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """The unit tests of a package execute at least the recorded share of its lines and branches."""
    if not request.config.getoption("--long"):
        pytest.skip("with --long")
    report = tmp_path / "coverage.json"
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("EVENTPUMP_", "PYTEST_"))}
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", f"tests/unit/{package}", "-p", "no:cacheprovider"),
            *(f"--cov=eventpump.{package}", "--cov-branch", f"--cov-report=json:{report}"),
        ],
        cwd=ROOT,
        env=environment | {"COVERAGE_FILE": str(tmp_path / "data")},
        capture_output=True,
        text=True,
        timeout=_TIMEOUT,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-10_000:]
    measured = json.loads(report.read_text(encoding="utf-8"))
    modules = {name: round(of["summary"]["percent_covered"], 1) for name, of in measured["files"].items()}
    print(*(f"{share:5.1f} % {name}" for name, share in modules.items()), sep="\n")  # noqa: T201  the report of the run
    assert measured["totals"]["percent_covered"] >= FLOORS[package], modules
