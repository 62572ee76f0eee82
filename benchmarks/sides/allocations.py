"""Counts allocations of CPython, by a library that is compiled when it is needed (`allocations.c`)."""

from __future__ import annotations

import ctypes
import shlex
import subprocess
import sysconfig
import tempfile
from pathlib import Path

_SOURCE = Path(__file__).with_suffix(".c")


class Allocations:
    """Counts the allocations between two calls, of all threads.

    Raises:
        OSError: No C compiler is found, or it cannot compile against this Python.
    """

    def __init__(self) -> None:
        compiler = shlex.split(sysconfig.get_config_var("CC") or "cc")
        include = f"-I{sysconfig.get_path('include')}"
        with tempfile.TemporaryDirectory() as directory:
            library = str(Path(directory, "allocations.so"))
            command = [*compiler, "-O2", "-shared", "-fPIC", include, str(_SOURCE), "-o", library]
            try:
                subprocess.run(command, check=True, capture_output=True)
            except subprocess.CalledProcessError as error:
                raise OSError(f"the library that counts allocations cannot be compiled: {error.stderr!r}") from error
            # Loaded with the lock of the interpreter held, as its allocators require.
            self._library = ctypes.PyDLL(library)
        self._library.end.restype = ctypes.c_ulonglong

    def begin(self) -> None:
        """Count from here on."""
        self._library.begin()

    def end(self) -> int:
        """Return how many there were."""
        return int(self._library.end())
