"""The table of docs/spark-runtimes.md: each row is tried, and what a platform has installed stays as it is.

The short form tries the row of the Spark that is installed here. The long form makes an environment for each row, with
a Spark, pandas and pyarrow as a platform has them, and installs eventpump beside them by the page's line.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pyspark
import pytest

from eventpump.emulator.config import HubSpec
from eventpump.testing.threaded import EmulatorThread
from tests.support.pages import ROOT
from tests.support.venv import python_with
from tests.test_pythons import _INSTALLED, _copy

PAGE = ROOT / "docs" / "spark-runtimes.md"
PROGRAM = Path(__file__).with_name("runtime_program.py")
_TRIED = {
    "source": ("batch", "query"),
    "`maxEventsPerTrigger`": ("limit",),
    "true `availableNow`": ("availableNow",),
    "Connect": ("connect",),
    "exactly once": ("exactly once",),
    '`format("eventpump")`: batch': ("batch writer",),
    '`format("eventpump")`: query': ("stream writer",),
}
"""The features of the program that each column stands for."""
_CONNECT = ("grpcio==1.76.0", "grpcio-status==1.76.0", "googleapis-common-protos==1.72.0", "zstandard==0.25.0")
_NEWER = ("pandas==2.2.3", "pyarrow==18.1.0", "numpy==2.1.3", *_CONNECT)
PLATFORMS: Mapping[str, Sequence[str]] = {
    "3.5.9": ("pandas==2.0.3", "pyarrow==15.0.2", "numpy==1.26.4"),
    **dict.fromkeys(("4.0.5", "4.1.4", "4.2.1", "4.3.0"), _NEWER),
}
"""What stands beside each pyspark."""
_INSTALL_TIMEOUT, _RUN_TIMEOUT = 900.0, 500.0


def rows() -> dict[str, dict[str, str]]:
    """Return the table of the page: by pyspark, what each column says."""
    lines = re.findall(r"^\| (.*) \|$", PAGE.read_text(encoding="utf-8"), re.M)
    _, *columns = lines[0].split(" | ")
    return {row[0]: dict(zip(columns, row[1:], strict=True)) for row in (line.split(" | ") for line in lines[1:])}


def tried(python: Path, folder: Path) -> dict[str, str]:
    """Return what came of each feature with the pyspark of an interpreter."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    with EmulatorThread([HubSpec(f"{each}-{number}", 2) for each in ("in", "out") for number in range(10)]) as hubs:
        done = subprocess.run(
            [python, PROGRAM],
            input=f"{hubs.connection_string}\n",
            cwd=folder,
            env={**environment, "PYSPARK_PYTHON": str(python)},
            capture_output=True,
            text=True,
            timeout=_RUN_TIMEOUT,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-5000:]
    found: dict[str, str] = json.loads(done.stdout)
    return found


def compare(found: Mapping[str, str], row: Mapping[str, str]) -> None:
    """Check that a row says what was found."""
    assert row.keys() == _TRIED.keys()
    for column, said in row.items():
        outcomes = {feature: found[feature] for feature in _TRIED[column]}
        if said != "not tried":
            assert (set(outcomes.values()) == {"yes"}) == (said == "yes"), f"{column}: {outcomes}"


def test_table_has_a_row_for_each_platform() -> None:
    """What is on the page is what the long form tries, and the Spark that is installed here is among it."""
    assert rows().keys() == PLATFORMS.keys()
    assert pyspark.__version__ in rows()


@pytest.mark.timeout(2 * _RUN_TIMEOUT)
def test_row_of_the_spark_that_is_installed(tmp_path: Path) -> None:
    """Every feature does what the row of this Spark says."""
    compare(tried(Path(sys.executable), tmp_path), rows()[pyspark.__version__])


@pytest.mark.long
@pytest.mark.timeout(3 * _INSTALL_TIMEOUT + _RUN_TIMEOUT)
@pytest.mark.parametrize("version", PLATFORMS)
def test_row_beside_a_platforms_own_packages(version: str, tmp_path: Path) -> None:
    """The page's line installs eventpump and changes no package that is there; each feature does what the row says."""
    platform = python_with(f"pyspark=={version}", *PLATFORMS[version])
    python = _layer_on(platform, tmp_path / "layer")
    pip = (sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check")
    before = _run(*pip, "list", "--format=freeze", folder=tmp_path)
    (tmp_path / "platform.txt").write_text(before, encoding="utf-8")
    (line,) = re.findall(r"^pip (install --constraint .*)$", PAGE.read_text(encoding="utf-8"), re.M)
    *options, checkout = line.split()
    assert checkout == "."
    _copy(_INSTALLED, tmp_path / "source")  # what is built leaves files in its folder
    _run(*pip, *options, "--quiet", "--no-input", tmp_path / "source", folder=tmp_path)
    after = _run(*pip, "list", "--format=freeze", folder=tmp_path)
    assert set(before.split()) - set(after.split()) == set()
    assert re.search(r"^eventpump==", after, re.M)
    compare(tried(python, tmp_path), rows()[version])


def _layer_on(platform: Path, folder: Path) -> Path:
    """Make an environment on top of another one, whose packages are found and stay where they are."""
    _run(platform, "-m", "venv", "--without-pip", folder, folder=folder.parent)
    python = folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    below, own = (_run(each, "-c", where, folder=folder).strip() for each in (platform, python))
    Path(own, "platform.pth").write_text(f"{below}\n", encoding="utf-8")
    return python


def _run(*command: str | Path, folder: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["EVENTPUMP_PURE"] = "1"
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=_INSTALL_TIMEOUT, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
    return done.stdout
