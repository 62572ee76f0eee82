"""Which build runs is decided in one place, can be seen, and says why it is not the compiled one."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import eventpump
from eventpump import compiled

ROOT = Path(__file__).parents[2]

_SHOW = """
from eventpump.compiled import build_info
info = build_info()
print(info, info.is_compiled, info.reason, sep='|')
"""


def _shown(folder: Path, **variables: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != compiled.PURE}
    environment |= {"PYTHONPATH": str(folder), **variables}
    # Without site-packages: an editable install would add the modules of the checkout.
    command = [sys.executable, "-S", "-W", "error", "-c", _SHOW]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=True
    ).stdout.strip()


def _checkout(folder: Path) -> Path:
    """Copy the modules that are needed for the question, without a compiled core."""
    (folder / "eventpump").mkdir()
    for name in ("__init__.py", "compiled.py", "homes.py", "_core.pyx"):
        (folder / "eventpump" / name).write_bytes((ROOT / "eventpump" / name).read_bytes())
    return folder


@pytest.mark.parametrize("value", ["1", "true"])
def test_environment_forces_pure_python(value: str) -> None:
    """Also where the compiled core is built."""
    assert _shown(ROOT, EVENTPUMP_PURE=value) == "pure Python|False|EVENTPUMP_PURE is set"


@pytest.mark.parametrize("value", ["0", ""])
def test_environment_of_zero_forces_nothing(value: str, tmp_path: Path) -> None:
    """It is as if the variable were not there."""
    assert _shown(_checkout(tmp_path), EVENTPUMP_PURE=value) == "pure Python|False|it was not built"


def test_without_extension_the_library_is_pure_and_silent(tmp_path: Path) -> None:
    """No warning (they are errors there), no output but the answer."""
    assert _shown(_checkout(tmp_path)) == "pure Python|False|it was not built"


def test_extension_of_another_source_is_not_used(tmp_path: Path) -> None:
    """In a checkout whose source has changed since it was installed, calls and code could differ."""
    extension = _checkout(tmp_path) / "eventpump" / "_core.py"
    extension.write_text("SOURCE = 1\n")
    assert _shown(tmp_path).startswith("pure Python|False|it was built from another source")


def test_extension_that_cannot_be_loaded_is_reported(tmp_path: Path) -> None:
    """One for another machine, say: the library works without it, and `build_info` has the reason."""
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    (_checkout(tmp_path) / "eventpump" / f"_core{suffix}").write_bytes(b"not a library")
    assert _shown(tmp_path).startswith("pure Python|False|it cannot be loaded: ")


def test_build_info_is_what_the_seams_use() -> None:
    """Public function, the seams' module and the text agree."""
    info = eventpump.reports.build_info()
    assert info.is_compiled is (compiled.core is not None)
    assert str(info) == ("compiled core" if info.is_compiled else "pure Python")
    assert bool(info.reason) is not info.is_compiled


def test_compiled_core_is_not_declared_for_free_threading() -> None:
    """It never ran on such a Python: importing it there turns the global lock on, which protects what it shares."""
    assert "freethreading_compatible" not in (ROOT / "eventpump" / "_core.pyx").read_text(encoding="utf-8")
