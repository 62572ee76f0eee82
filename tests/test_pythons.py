"""Other Pythons: the package is installed on those that are found here, and its unit tests pass there.

Looked for where pyenv keeps its versions, and on the path. The gate runs a part of the unit tests on the newest, the
long form all of them on each.
"""

from __future__ import annotations

import functools
import os
import platform
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
_PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
_VERSIONS = re.findall(r"Python :: (3\.\d+)$", "\n".join(_PROJECT["classifiers"]), re.M)
_HERE = ".".join(platform.python_version_tuple()[:2])
_INSTALLED = ("eventpump", "pyspark_eventpump", "pyproject.toml", "README.md", "LICENSE")

_PART = ("cli", "net", "storage", "testing", "transport")
"""The folders of unit tests that the gate runs: where the event loop, threads, TLS and SQLite are used."""
_NEEDED = re.compile(r"hypothesis|psutil|pytest-timeout|trustme")
"""What they need of the extra `test`: not Spark, which is most of what it installs."""

_INSTALL_TIMEOUT, _TEST_TIMEOUT = 900.0, 3600.0


def _candidates(version: str) -> list[Path]:
    """List the files that may be the interpreter of a version."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    found = sorted(pyenv.glob(f"{version}*/bin/python{version}"), reverse=True)
    on_path = shutil.which(f"python{version}")
    return [*found, Path(on_path)] if on_path else found


@functools.cache
def _interpreter(version: str) -> Path | None:
    """Return the first that is released, of that version, and can make environments; None where there is none."""
    probe = "import ensurepip, venv, sys; print(*sys.version_info[:2], sys.version_info.releaselevel)"
    for candidate in _candidates(version):
        done = subprocess.run([candidate, "-c", probe], capture_output=True, text=True, check=False)
        if done.returncode == 0 and done.stdout.split() == [*version.split("."), "final"]:
            return candidate
    return None


def _run(timeout: float, *command: str | Path) -> None:
    """Run a command in the project's folder, without the taps of the watch over this run."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("EVENTPUMP_", "PYTEST_"))}
    environment["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-10_000:]


@pytest.fixture
def python(request: pytest.FixtureRequest) -> Path:
    """The interpreter of a version, where this form of the run uses it."""
    version: str = request.param
    if version == _HERE:
        pytest.skip(f"Python {version} runs all the tests")
    found = _interpreter(version)
    if found is None:
        pytest.skip(f"no Python {version} is found in pyenv's folder or on the path")
    if not request.config.getoption("--long"):
        newest = next(each for each in reversed(_VERSIONS) if each != _HERE and _interpreter(each) is not None)
        if version != newest:
            pytest.skip(f"with --long; this form runs on Python {newest}")
    return found


@pytest.mark.timeout(2 * _INSTALL_TIMEOUT + _TEST_TIMEOUT)
@pytest.mark.parametrize("python", _VERSIONS, indirect=True)
def test_unit_tests_pass_on_another_python(python: Path, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """The package installs on another Python, and its unit tests pass there: a part of them, or all."""
    is_long = request.config.getoption("--long")
    source, environment = tmp_path / "source", tmp_path / "environment"
    source.mkdir()
    # A copy: what is built leaves files in its folder.
    for name in _INSTALLED:
        whole = ROOT / name
        if whole.is_dir():
            shutil.copytree(whole, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(whole, source)
    test: list[str] = _PROJECT["optional-dependencies"]["test"]
    wanted = [f"{source}[test]"] if is_long else [f"{source}[cli,testing]", *filter(_NEEDED.match, test)]
    tests = [ROOT / "tests" / "unit" / name for name in _PART] if not is_long else [ROOT / "tests" / "unit"]
    try:
        # The pip of this environment installs into that one: making one there takes as long as all its tests.
        _run(_INSTALL_TIMEOUT, python, "-m", "venv", "--without-pip", environment)
        interpreter = environment / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
        pip = (sys.executable, "-m", "pip", "--python", str(interpreter))
        _run(_INSTALL_TIMEOUT, *pip, "install", "--quiet", "--no-input", "--no-compile", *wanted)
        _run(_TEST_TIMEOUT, interpreter, "-m", "pytest", "-p", "no:cacheprovider", *tests)
    finally:
        shutil.rmtree(environment, ignore_errors=True)  # a gigabyte, in the long form
