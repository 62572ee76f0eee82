"""Virtual environments of their own, for what cannot stand beside what is installed here: made once, into a cache."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from eventpump.errors import StoreError
from tests.support.node import user_cache

_INSTALL_TIMEOUT = 900.0


def python_with(*requirements: str, directory: Path | None = None, interpreter: Path | None = None) -> Path:
    """Make an environment with some distributions, from PyPI, where there is none yet.

    Several processes may do so at once: each makes a directory of its own, and one rename wins.

    Args:
        requirements: As pip takes them; pin what matters, since an environment that exists is used as it is.
        directory: Where environments are kept; None for the user's cache directory.
        interpreter: Of another Python, which the environment is for; None for this one.

    Returns:
        Its interpreter.

    Raises:
        StoreError: Pip failed.
    """
    of = [sys.version] if interpreter is None else [_version_of(interpreter), str(interpreter.resolve())]
    named = hashlib.sha256("\n".join([*of, *requirements]).encode()).hexdigest()[:16]
    home = (directory or user_cache()) / f"venv-{named}"
    python = home / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    # It came into being by one rename, so it is whole; a link to an interpreter that is gone does not exist.
    if python.exists():
        return python
    home.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f"{home.name}.", dir=home.parent))
    dead = staging.with_name(f"{staging.name}.dead")
    task = f"install {requirements[0]}"
    try:
        made = str(staging / python.relative_to(home))
        if interpreter is None:
            venv.create(staging, with_pip=True)
            pip = [made, "-m", "pip", "install"]
        else:
            # The pip of this environment installs into that one: to install pip there takes longer than its use.
            subprocess.run([interpreter, "-m", "venv", "--without-pip", staging], capture_output=True, check=True)
            pip = [sys.executable, "-m", "pip", "--python", made, "install", "--no-compile"]
        command = [*pip, "--quiet", "--no-input", *requirements]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_INSTALL_TIMEOUT, check=False)
        except subprocess.TimeoutExpired as error:
            raise StoreError(task, f"pip did not end within {_INSTALL_TIMEOUT:.0f} s") from error
        if done.returncode != 0:
            raise StoreError(task, f"pip failed: {done.stderr.strip()[-1000:]}")
        with contextlib.suppress(OSError):  # another process was first; its environment is as good
            if not python.exists():
                home.rename(dead)  # its interpreter was removed, or moved, since it was made
        with contextlib.suppress(OSError):
            staging.rename(home)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        shutil.rmtree(dead, ignore_errors=True)
    return python


def _version_of(interpreter: Path) -> str:
    command = [str(interpreter), "-c", "import sys; print(sys.version)"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
