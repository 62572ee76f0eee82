"""Environments are kept, until their interpreter is gone: see `tests/support/venv.py`."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

from tests.support.venv import python_with

_METADATA = "Metadata-Version: 2.1\nName: something\nVersion: 1\n"
_WHEEL = "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def test_environment_whose_interpreter_is_gone_is_replaced(tmp_path: Path) -> None:
    """A whole one is used again; one with a dead link is recreated, in the same place, with nothing left beside it."""
    wheel, kept = tmp_path / "something-1-py3-none-any.whl", tmp_path / "kept"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("something.py", "value = 5\n")
        archive.writestr("something-1.dist-info/METADATA", _METADATA)
        archive.writestr("something-1.dist-info/WHEEL", _WHEEL)
        archive.writestr("something-1.dist-info/RECORD", "")
    python = python_with(str(wheel), directory=kept, interpreter=Path(sys.executable))
    home = python.parent.parent
    (home / "old").touch()
    assert python_with(str(wheel), directory=kept, interpreter=Path(sys.executable)) == python
    assert (home / "old").exists()
    for link in python.parent.glob("python*"):
        link.unlink()
    python.symlink_to(tmp_path / "gone")
    assert python_with(str(wheel), directory=kept, interpreter=Path(sys.executable)) == python
    assert list(kept.iterdir()) == [home]
    assert not (home / "old").exists()
    done = subprocess.run([python, "-c", "import something; print(something.value)"], capture_output=True, check=True)
    assert done.stdout.split() == [b"5"]
