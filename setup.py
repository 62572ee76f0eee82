"""The compiled core, two optional extensions. Everything else about the build is in `pyproject.toml`.

Without a C compiler the package is built without it, and runs on the Python code alone. With `EVENTPUMP_PURE=1` in the
environment it is not built: so the wheel for every platform (py3-none-any) is made.
"""

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from zlib import crc32

from setuptools import Extension, setup

SOURCES = ("eventpump/_core.pyx", "eventpump/spark/source/_columns.pyx")


def extensions() -> list[Extension]:
    """Return the extensions, if they are wanted and can be built."""
    is_wanted = os.environ.get("EVENTPUMP_PURE", "0") in ("", "0")
    if not is_wanted or sys.implementation.name != "cpython" or find_spec("Cython") is None:
        return []
    # By it `eventpump.compiled` recognizes an extension that was built from an older source, in a checkout.
    found = []
    for path in SOURCES:
        source = crc32((Path(__file__).parent / path).read_bytes().replace(b"\r\n", b"\n"))
        macros: list[tuple[str, str | None]] = [("EVENTPUMP_SOURCE", f"{source}U")]
        flags = [] if sys.platform == "win32" else ["-g0"]  # without debug information it has a third of the size
        name = path.removesuffix(".pyx").replace("/", ".")
        found.append(Extension(name, [path], define_macros=macros, extra_compile_args=flags, optional=True))
    return found


setup(ext_modules=extensions(), options={"build_ext": {"cython_c_in_temp": True}})
