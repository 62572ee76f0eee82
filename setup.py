"""The compiled core, an optional extension. Everything else about the build is in `pyproject.toml`.

Without a C compiler the package is built without it, and runs on the Python code alone. With `EVENTPUMP_PURE=1` in the
environment it is not built: so the wheel for every platform (py3-none-any) is made.
"""

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from zlib import crc32

from setuptools import Extension, setup

SOURCE = "eventpump/_core.pyx"


def extensions() -> list[Extension]:
    """Return the extension, if it is wanted and can be built."""
    is_wanted = os.environ.get("EVENTPUMP_PURE", "0") in ("", "0")
    if not is_wanted or sys.implementation.name != "cpython" or find_spec("Cython") is None:
        return []
    # By it `eventpump.compiled` recognizes an extension that was built from an older source, in a checkout.
    checksum = crc32((Path(__file__).parent / SOURCE).read_bytes().replace(b"\r\n", b"\n"))
    macros: list[tuple[str, str | None]] = [("EVENTPUMP_SOURCE", f"{checksum}U")]
    flags = [] if sys.platform == "win32" else ["-g0"]  # without debug information it has a third of the size
    return [Extension("eventpump._core", [SOURCE], define_macros=macros, extra_compile_args=flags, optional=True)]


setup(ext_modules=extensions(), options={"build_ext": {"cython_c_in_temp": True}})
