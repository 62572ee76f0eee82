"""The pytest plugin, in a project of a user's own: another process, without this repository's settings."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

_TESTS = """
import sys

import pytest
from eventpump import EventData, EventProducer, PartitionReader
from eventpump.testing.threaded import EmulatorThread

{mark}
async def test_async(eventpump_emulator):
    async with EventProducer(eventpump_emulator.connection_string, "telemetry") as producer:
        await producer.send([EventData(b"one")], partition_id="0")
    reader = PartitionReader(eventpump_emulator.connection_string, "telemetry", partition_id="0", end="@latest")
    async with reader:
        assert [event.body async for event in reader] == [b"one"]

{mark}
async def test_factory(eventpump_emulators):
    first, second = await eventpump_emulators("orders:2"), await eventpump_emulators({{"orders": 1}})
    assert (first.hubs, second.hubs) == ({{"orders": 2}}, {{"orders": 1}})

@pytest.mark.asyncio(loop_scope="module")
async def test_async_on_the_loop_of_the_module(eventpump_emulator, eventpump_emulators):
    for emulator in (eventpump_emulator, await eventpump_emulators("telemetry:1")):
        async with EventProducer(emulator.connection_string, "telemetry") as producer:
            await producer.send([EventData(b"one")], partition_id="0")

def test_thread(eventpump_emulator_thread, eventpump_emulator_threads):
    assert isinstance(eventpump_emulator_thread, EmulatorThread)
    other = eventpump_emulator_threads("orders:2")
    assert other.connection_string != eventpump_emulator_thread.connection_string
"""


def _pytest(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    # By name and not by the entry points of the environment, whose installation may be older.
    plugins = ["-p", "eventpump.testing.pytest_plugin", "-p", "no:cacheprovider"]
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "pytest", "-q", *plugins, *arguments],
        cwd=folder,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.timeout(100)
@pytest.mark.parametrize(
    ("mode", "of_tests", "of_fixtures"), [("strict", "session", "function"), ("auto", "function", "session")]
)
def test_fixtures_work_in_either_mode_and_on_any_loop(
    mode: str, of_tests: str, of_fixtures: str, tmp_path: Path
) -> None:
    """Neither the asyncio mode nor the loop scopes of a project matter: the emulator runs on the loop of the test."""
    mark = "@pytest.mark.asyncio" if mode == "strict" else ""
    (tmp_path / "test_it.py").write_text(_TESTS.format(mark=mark))
    settings = {
        f"asyncio_default_{name}_loop_scope={scope}" for name, scope in (("test", of_tests), ("fixture", of_fixtures))
    }
    chosen = [argument for setting in sorted(settings) for argument in ("-o", setting)]
    result = _pytest(tmp_path, "-p", "asyncio", f"--asyncio-mode={mode}", *chosen)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "4 passed" in result.stdout


def test_fixture_imported_without_the_plugin_says_how_to_load_it(tmp_path: Path) -> None:
    """An import alone lacks what the plugin adds: the failure is a sentence."""
    (tmp_path / "test_it.py").write_text(
        "from eventpump.testing.fixtures import eventpump_emulator\n\n"
        "async def test_it(eventpump_emulator):\n    pass\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "asyncio", "--asyncio-mode=auto", "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 1, result.stdout + result.stderr
    assert "-p eventpump.testing.pytest_plugin" in result.stdout


def test_without_pytest_asyncio_the_fixture_says_what_to_install(tmp_path: Path) -> None:
    """Fixtures for tests without a loop work; the others fail with a sentence."""
    (tmp_path / "test_it.py").write_text(
        "def test_thread(eventpump_emulator_thread):\n    assert eventpump_emulator_thread.connection_string\n\n"
        "def test_emulator(eventpump_emulator):\n    pass\n\n"
        "def test_emulators(eventpump_emulators):\n    pass\n"
    )
    result = _pytest(tmp_path)
    assert result.returncode == 1, result.stdout + result.stderr
    assert "1 passed, 2 errors" in result.stdout
    assert result.stdout.count("pip install 'eventpump[testing]'") >= 2


def test_plugin_imports_nothing_but_pytest_until_a_fixture_is_used(tmp_path: Path) -> None:
    """A project that has eventpump installed, and uses none of its fixtures, does not pay for them."""
    (tmp_path / "test_it.py").write_text(
        "import sys\n\ndef test_it():\n    ours = {name for name in sys.modules if name.startswith('eventpump')}\n"
        "    assert ours <= {'eventpump', 'eventpump.homes', 'eventpump.testing', 'eventpump.testing.pytest_plugin', "
        "'eventpump.testing.fixtures'}\n    assert not {'pydantic', 'sqlite3', 'aiohttp'} & sys.modules.keys()\n"
    )
    for plugins in ([], ["-p", "asyncio", "-o", "asyncio_default_fixture_loop_scope=function"]):
        result = _pytest(tmp_path, *plugins)
        assert result.returncode == 0, result.stdout + result.stderr


def test_pytest_finds_the_plugin_by_its_entry_point() -> None:
    """The package declares it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["entry-points"]["pytest11"] == {"eventpump": "eventpump.testing.pytest_plugin"}
    assert any(each.startswith("pytest-asyncio") for each in project["optional-dependencies"]["testing"])
