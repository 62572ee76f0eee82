"""Each promise's mechanism undone, one at a time: the history or test that each patch names sees it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.undone.runner import HERE, Undone, copied, examined, lived

PATCHES = sorted(HERE.glob("*.patch"))
WITH_TEST = [path for path in PATCHES if Undone.read(path).test]
WITH_HISTORY = [path for path in PATCHES if path not in WITH_TEST]


@pytest.mark.long
@pytest.mark.parametrize("path", WITH_TEST, ids=lambda path: path.stem)
def test_named_test_with_a_patch_fails(path: Path) -> None:
    """With the patch the named test fails, and without it passes."""
    undone = Undone.read(path)
    for patch, code in ((undone.path, 1), (None, 0)):
        with copied(patch) as directory:
            assert examined(directory, undone.test)[0] == code, f"{undone.what}: {undone.test}, with {patch}"


@pytest.mark.long
@pytest.mark.parametrize("path", WITH_HISTORY, ids=lambda path: path.stem)
def test_history_with_a_patch_breaks_its_promise(path: Path) -> None:
    """With the patch the named history breaks the stated promise; without it, none."""
    undone = Undone.read(path)
    assert undone.violation
    with copied(undone.path) as directory:
        code, said = lived(directory, undone.history, undone.seed, undone.size)
    assert code == 1, f"{undone.what}: {undone.history} {undone.seed} does not see it"
    assert undone.violation in said.splitlines()[-1], said[-3000:]
    with copied(None) as directory:
        code, said = lived(directory, undone.history, undone.seed, undone.size)
    assert code == 0, said[-3000:]


@pytest.fixture(scope="module")
def package() -> Iterator[Path]:
    """A copy of the package, as a repository of its own."""
    with copied(None) as directory:
        subprocess.run(["git", "init", "-q"], cwd=directory, check=True)
        yield directory


@pytest.mark.parametrize("path", PATCHES, ids=lambda path: path.stem)
def test_patch_applies_to_the_package(path: Path, package: Path) -> None:
    """Every patch applies to the package as it is, and says what sees it."""
    undone = Undone.read(path)
    assert undone.test or (undone.seed >= 0 and undone.violation)
    command = ["git", "apply", "--check", str(path)]
    done = subprocess.run(command, cwd=package, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
