"""What is published, installed and used: the sdist, the wheel for every platform, the one with the compiled core."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from eventpump import EventData, EventProducer
from eventpump.compiled import PURE
from eventpump.testing.threaded import EmulatorThread
from tests.support.pages import python_blocks
from tests.test_pythons import _VERSIONS, _interpreter

ROOT = Path(__file__).parents[1]
_SOURCES = ("eventpump", "pyspark_eventpump", "pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE")
_TIMEOUT = 900.0
_WORKFLOW = ROOT / ".github/workflows/release.yml"
_PUBLISHED = re.findall(r"^ +- run: (.*\bpython -m build .*)$", _WORKFLOW.read_text(encoding="utf-8"), re.M)
"""The commands that make what is published: the sdist, and the wheel for every platform."""

_PROGRAM = """
import asyncio
import eventpump
from eventpump import Emulator, EventData, EventProducer, PartitionReader


async def main():
    async with Emulator({"telemetry": 1}) as emulator:
        async with EventProducer(emulator.connection_string, "telemetry") as producer:
            events = [EventData(str(number), properties={"n": number}) for number in range(50)]
            await producer.send(events, partition_id="0")
            await producer.send([EventData(b"plain")], partition_id="0")
        reader = PartitionReader(emulator.connection_string, "telemetry", partition_id="0", end="@latest")
        async with reader:
            bodies = [event.body_as_str() async for event in reader]
    assert bodies == [*map(str, range(50)), "plain"], bodies


asyncio.run(main())
print(eventpump.reports.build_info(), eventpump.reports.build_info().reason, sep="|")
"""

pytestmark = [pytest.mark.long, pytest.mark.timeout(4 * _TIMEOUT)]


def _run(*command: str | Path, cwd: Path, **variables: str) -> str:
    """Run a command without the variables of this run; return what it printed."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("EVENTPUMP_", "PYTEST_"))}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        command, cwd=cwd, env=environment | variables, capture_output=True, text=True, timeout=_TIMEOUT, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-10_000:]
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources, as in a clean checkout."""
    copy = tmp_path_factory.mktemp("wheels") / "source"
    copy.mkdir()
    for name in _SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.so", "*.pyd"))
        else:
            shutil.copy(ROOT / name, copy)
    return copy


@pytest.fixture(scope="module")
def python(folder: Path) -> Iterator[Path]:
    """The interpreter of an environment that has what the package needs, and not the package."""
    environment = folder.parent / "environment"
    _run(sys.executable, "-m", "venv", environment, cwd=folder)
    interpreter = environment / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    _run(interpreter, "-m", "pip", "install", "-q", "--no-input", folder, cwd=folder.parent, **{PURE: "1"})
    _run(interpreter, "-m", "pip", "uninstall", "-q", "-y", "eventpump", cwd=folder.parent)
    yield interpreter
    shutil.rmtree(environment, ignore_errors=True)


def _build(folder: Path, out: str, *options: str, **variables: str) -> Path:
    """Build with `python -m build`; return the one new file that is a wheel, or the sdist's folder."""
    target = folder.parent / out
    _run(sys.executable, "-m", "build", "--outdir", target, *options, folder, cwd=folder.parent, **variables)
    return target


def _published(folder: Path) -> Path:
    """Build by the commands of the workflow, as it has them; return the folder of the files."""
    target = folder.parent / "release"
    for command in _PUBLISHED:
        words = shlex.split(command)
        variables = dict(word.split("=", 1) for word in words if re.match(r"[A-Z_]+=", word))
        assert words[len(variables) :][:3] == ["python", "-m", "build"]
        options = [str(target) if word == "dist" else word for word in words[len(variables) + 1 :]]
        _run(sys.executable, *options, cwd=folder, **variables)
    return target


def _used(python: Path, *what: str | Path, **variables: str) -> str:
    """Install the package, use it, and return which build it says that it is."""
    printed = _run(
        python, "-m", "pip", "install", "-q", "--no-deps", "--force-reinstall", *what, cwd=python.parent, **variables
    )
    assert printed.strip() == ""  # not even a warning
    return _run(python, "-W", "error", "-c", _PROGRAM, cwd=python.parent).strip()


def _has_compiler() -> bool:
    return any(map(shutil.which, ("cc", "gcc", "clang", "cl")))


def test_sdist_and_wheels_are_built_and_used(folder: Path, python: Path) -> None:
    """The sdist has the core's source and nothing generated; the wheels have the core, or are for every platform."""
    if not _has_compiler():
        pytest.skip("there is no C compiler")
    published = _build(folder, "published")
    sdist, wheel = next(published.glob("*.tar.gz")), next(published.glob("*.whl"))
    with tarfile.open(sdist) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
    assert {"setup.py", "eventpump/compiled.py", "eventpump/_core.pyx"} <= names
    assert not [name for name in names if name.endswith((".c", ".so", ".pyd"))]
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert f"-{tag}-{tag}-" in wheel.name
    with zipfile.ZipFile(wheel) as zipped:
        (compiled,) = (name for name in zipped.namelist() if not name.endswith(".py") and "/_core" in name)
    assert compiled.startswith("eventpump/_core.")
    assert compiled.endswith((".so", ".pyd"))
    assert _used(python, wheel) == "compiled core|"
    pure = next(_build(folder, "pure", "--wheel", **{PURE: "1"}).glob("*.whl"))
    assert pure.name.endswith("-py3-none-any.whl")
    assert _used(python, pure) == "pure Python|it was not built"
    assert _used(python, sdist) == "compiled core|"


@pytest.mark.parametrize("is_editable", [False, True], ids=["installed", "editable"])
def test_without_a_compiler_the_build_works_and_is_silent(folder: Path, python: Path, *, is_editable: bool) -> None:
    """Installed from the source tree, editable too."""
    copy = shutil.copytree(folder, folder.parent / f"without-{is_editable}")
    what = ["-e", copy] if is_editable else [copy]
    assert _used(python, *what, CC="no-such-compiler", CXX="no-such-compiler") == "pure Python|it was not built"


def test_editable_install_builds_the_core_in_place(folder: Path, python: Path) -> None:
    """It is used until its source changes, and again after the next install. Spark can find the format."""
    if not _has_compiler():
        pytest.skip("there is no C compiler")
    copy = shutil.copytree(folder, folder.parent / "editable")
    assert _used(python, "-e", copy) == "compiled core|"
    # As Spark looks for formats: only in what is a path.
    listing = "import pkgutil; print(*(each.name for each in pkgutil.iter_modules()))"
    assert "pyspark_eventpump" in _run(python, "-c", listing, cwd=python.parent).split()
    with (copy / "eventpump" / "_core.pyx").open("a") as source:
        source.write("\n# a change\n")
    printed = _run(python, "-c", _PROGRAM, cwd=python.parent).strip()
    assert printed == "pure Python|it was built from another source; install the package again"
    assert _used(python, "-e", copy) == "compiled core|"


async def _send(connection_string: str) -> None:
    async with EventProducer(connection_string, "telemetry") as producer:
        await producer.send([EventData("one")], partition_id="0")


@pytest.mark.parametrize("kind", ["*.whl", "*.tar.gz"])
@pytest.mark.parametrize("version", _VERSIONS)
def test_published_files_run_the_first_program_of_readme(folder: Path, version: str, kind: str, tmp_path: Path) -> None:
    """In a fresh environment of each Python: it prints what was sent, and ends on SIGTERM."""
    interpreter = _interpreter(version)
    if interpreter is None:
        pytest.skip(f"no Python {version} is found in pyenv's folder or on the path")
    release = folder.parent / "release"
    (file,) = (release if release.is_dir() else _published(folder)).glob(kind)
    _run(interpreter, "-m", "venv", tmp_path / "environment", cwd=tmp_path)
    python = tmp_path / "environment" / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    _run(python, "-m", "pip", "install", "-q", "--no-input", file, cwd=tmp_path)
    (tmp_path / "program.py").write_text(python_blocks(ROOT / "README.md")[0], encoding="utf-8")
    with EmulatorThread("telemetry:4") as service:
        service.run(_send(service.connection_string))
        environment = {
            "PATH": os.environ["PATH"],
            "PYTHONUNBUFFERED": "1",
            "EVENTPUMP_CONNECTION_STRING": service.connection_string,
        }
        command = [str(python), "-W", "error", "program.py"]
        with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            printed = process.stdout.readline()
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=60)
    assert (printed, process.returncode) == ("0 0 one\n", 0)
