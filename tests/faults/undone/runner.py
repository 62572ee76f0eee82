"""Runs a history, or a test, against a copy of the package with a promise's mechanism undone; see README.md here.

`python -m tests.faults.undone.runner <patch> [--seeds n] [--from n] [--kind kind]` looks for seeds that see it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from eventpump.compiled import PURE
from tests.faults.histories.kinds import SIZE

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
TIMEOUT = 120.0
"""Real seconds a history may take in its process. One that takes longer hangs, and has failed."""


@dataclass(frozen=True)
class Undone:
    """A patch, and what sees it: a history with its seed, or a test."""

    path: Path
    what: str
    history: str
    seed: int
    size: int
    violation: str
    test: str

    @classmethod
    def read(cls, path: Path) -> Undone:
        """Read a patch's facts.

        Raises:
            KeyError: One is missing.
        """
        head = path.read_text().partition("\n--- ")[0]
        facts = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in head.splitlines())}
        return cls(
            path,
            facts["what"],
            "" if "test" in facts else facts["history"],
            int(facts.get("seed", -1)),
            int(facts.get("size", SIZE)),
            facts.get("violation", ""),
            facts.get("test", ""),
        )


@contextmanager
def copied(patch: Path | None) -> Iterator[Path]:
    """Return a copy of the package and the histories, with a patch applied.

    Raises:
        AssertionError: It does not apply.
    """
    with tempfile.TemporaryDirectory(prefix="undone-") as name:
        directory = Path(name)
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "eventpump", directory / "eventpump", ignore=ignored)
        shutil.copytree(ROOT / "tests", directory / "tests", ignore=ignored)
        shutil.copy(ROOT / "pyproject.toml", directory)
        if patch is not None:
            # As a repository of its own: else it is applied to the one around it, if there is one.
            subprocess.run(["git", "init", "-q"], cwd=directory, check=True, timeout=TIMEOUT)
            applied = subprocess.run(
                ["git", "apply", str(patch)],
                cwd=directory,
                capture_output=True,
                text=True,
                check=False,
                timeout=TIMEOUT,
            )
            assert applied.returncode == 0, f"{patch.name} does not apply: {applied.stderr}"
        yield directory


def _environment(directory: Path) -> dict[str, str]:
    """Return the environment for a package. The patches are of the reference, whose place the compiled core takes."""
    return {**os.environ, "PYTHONPATH": str(directory), PURE: "1"}


def lived(directory: Path, history: str, seed: int, size: int, count: int = 1) -> tuple[int, str]:
    """Live through histories with the package of a directory. Gives the exit code (1: violated) and what it said."""
    command = [sys.executable, "-m", "tests.faults.histories", history, str(seed)]
    command += ["--size", str(size), "--count", str(count)]
    run = subprocess.run(
        command,
        cwd=directory,
        env=_environment(directory),
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT * count,
    )
    assert run.returncode in (0, 1), run.stderr
    return run.returncode, run.stdout


def examined(directory: Path, test: str) -> tuple[int, str]:
    """Run a test with the package of a directory. Return the exit code of pytest and what it said."""
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", test],
        cwd=directory,
        env=_environment(directory),
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT,
    )
    assert run.returncode in (0, 1), run.stdout + run.stderr
    return run.returncode, run.stdout


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.undone.runner", description=__doc__)
    parser.add_argument("patch", type=Path)
    parser.add_argument("--seeds", type=int, default=50, help="how many to try")
    parser.add_argument("--from", type=int, default=1, dest="first", help="the first")
    parser.add_argument("--kind", help="another history than the patch names")
    parser.add_argument("--size", type=int, help="steps of trouble")
    options = parser.parse_args()
    undone = Undone.read(options.patch.resolve())
    kind, size = options.kind or undone.history, options.size or undone.size
    with copied(undone.path) as directory:
        _, said = lived(directory, kind, options.first, size, max(2, options.seeds))
    found = [line for line in said.splitlines()[:-1] if line.split()[0].isdigit()]
    with copied(None) as directory:
        kept = 0
        for line in found:
            seed = int(line.split()[0])
            if lived(directory, kind, seed, size)[0] == 0:
                kept += 1
                sys.stdout.write(f"seed {line}\n")
    sys.stdout.write(
        f"{kind}: {len(found)} of {options.seeds} seeds break with the patch, {kept} of them only with it\n"
    )
    return int(not kept)


if __name__ == "__main__":
    sys.exit(main())
