"""All imports from uamqp, in one place."""

from __future__ import annotations

import sys

from eventpump.errors import ConfigurationError

try:
    # uamqp has no types: everything that comes from it is Any.
    import certifi
    from uamqp import _Platform, c_uamqp  # type: ignore[import-untyped]
    from uamqp.authentication import SASLAnonymous  # type: ignore[import-untyped]
except ImportError as error:
    if sys.version_info >= (3, 14):
        problem = "uamqp has no release for Python 3.14 and later; use the native transport"
    else:
        problem = "uamqp is not installed; install eventpump[uamqp], or use the native transport"
    raise ConfigurationError("transport", problem) from error

_Platform.initialize()  # once per process; it stays initialized for other users of the package

CA_FILE: str = certifi.where()
"""The certificates (PEM) that uamqp trusts by default."""

__all__ = ["CA_FILE", "SASLAnonymous", "c_uamqp"]
