"""Other Pythons: the package is installed on those that are found here, and its unit tests pass there.

Looked for where pyenv keeps its versions, and on the path. The gate installs it on the newest, without its compiled
core, and runs a part of the unit tests there; what the package needs comes from an environment in the user's cache
directory. The long form recreates environments, and runs all of the unit tests on each Python, and a part in the
compiled build. The checkout is pure Python there, as its compiled core is of the Python of this run: compiled is what
is installed, where there is a C compiler, and it is tested from a copy of the tests.
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

from tests.support.venv import python_with

ROOT = Path(__file__).parents[1]
_PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
_VERSIONS = re.findall(r"Python :: (3\.\d+)$", "\n".join(_PROJECT["classifiers"]), re.M)
_HERE = ".".join(platform.python_version_tuple()[:2])
_INSTALLED = ("eventpump", "pyspark_eventpump", "pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE")
_TESTS = ("tests", "docs", "pyproject.toml", "README.md")
"""What the tests of the installed package need, likewise in `tool.cibuildwheel`."""

_PART = ("cli", "net", "storage", "testing", "transport")
"""The folders of unit tests that the gate runs: where the event loop, threads, TLS and SQLite are used."""
_COMPILED_PART = (
    "test_core.py",
    "eventhubs/test_events.py",
    "eventhubs/test_sealing.py",
    "producer/test_buffered.py",
)
"""What the long form runs in the compiled build: what uses the compiled core directly."""
_NEEDED = re.compile(r"hypothesis|psutil|pytest-timeout|trustme")
"""What they need of the extra `test`: not Spark, which is most of what it installs."""

_CYTHON = ', "Cython>=3.1"'
"""What only the compiled core needs, in `build-system.requires`."""

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


def _run(timeout: float, *command: str | Path, folder: Path = ROOT, installed: Path | None = None) -> None:
    """Run a command in a folder that modules are found in, without the taps of the watch over this run.

    Args:
        installed: Where the package is installed, if not in the environment.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("EVENTPUMP_", "PYTEST_"))}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, filter(None, (folder, installed))))
    environment["PIP_COMPILE"] = "0"  # also in the environment that pip makes to build the package
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-10_000:]


def _copy(names: tuple[str, ...], to: Path) -> None:
    to.mkdir()
    for name in names:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, to / name, ignore=shutil.ignore_patterns("__pycache__", "*.so", "*.pyd"))
        else:
            shutil.copy(ROOT / name, to)


def _leave_out_core(source: Path) -> None:
    """Have a copy of the sources built without the compiled core, and so without Cython, which is large to install."""
    (source / "setup.py").unlink()
    project = source / "pyproject.toml"
    text = project.read_text(encoding="utf-8")
    assert text.count(_CYTHON) == 1
    project.write_text(text.replace(_CYTHON, ""), encoding="utf-8")


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
    source = tmp_path / "source"
    _copy(_INSTALLED, source)  # a copy: what is built leaves files in its folder
    if request.config.getoption("--long"):
        _test_all(python, source, tmp_path)
    else:
        _test_part(python, source, tmp_path / "package")


def _test_part(python: Path, source: Path, package: Path) -> None:
    """Install the package beside an environment of what it needs, import it, and run a part of its unit tests."""
    _leave_out_core(source)
    extras = _PROJECT["optional-dependencies"]
    needed = [*_PROJECT["dependencies"], *extras["cli"], *extras["testing"], *filter(_NEEDED.match, extras["test"])]
    interpreter = python_with(*needed, interpreter=python)
    pip = (sys.executable, "-m", "pip", "--python", str(interpreter))
    _run(_INSTALL_TIMEOUT, *pip, "install", "--quiet", "--no-input", "--no-deps", "--target", package, source)
    imported = f"import eventpump as found; assert found.__file__.startswith({str(package)!r}); found.EventProducer"
    _run(_INSTALL_TIMEOUT, interpreter, "-c", imported, folder=package)
    tests = [ROOT / "tests" / "unit" / name for name in _PART]
    pytest_there = (interpreter, "-m", "pytest", "-p", "no:cacheprovider", "--build", "pure")
    _run(_TEST_TIMEOUT, *pytest_there, "--hypothesis-profile=few", *tests, installed=package)


def _test_all(python: Path, source: Path, folder: Path) -> None:
    """Make an environment, install the package with all that its tests need, and run its unit tests in both builds."""
    environment, copied = folder / "environment", folder / "tests"
    try:
        # The pip of this environment installs into that one: making one there takes as long as all its tests.
        _run(_INSTALL_TIMEOUT, python, "-m", "venv", "--without-pip", environment)
        interpreter = environment / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
        pip = (sys.executable, "-m", "pip", "--python", str(interpreter))
        _run(_INSTALL_TIMEOUT, *pip, "install", "--quiet", "--no-input", f"{source}[test]")
        pytest_there = (interpreter, "-m", "pytest", "-p", "no:cacheprovider", "--build")
        _run(_TEST_TIMEOUT, *pytest_there, "pure", ROOT / "tests" / "unit")
        if any(map(shutil.which, ("cc", "gcc", "clang", "cl"))):
            _copy(_TESTS, copied)
            part = [copied / "tests" / "unit" / name for name in _COMPILED_PART]
            _run(_TEST_TIMEOUT, *pytest_there, "compiled", *part, folder=copied)
    finally:
        shutil.rmtree(environment, ignore_errors=True)  # a gigabyte
