"""The door to uamqp: what of it is used, imported in one place."""

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

_Platform.initialize()  # once per process, which the package keeps in mind for whoever else uses it

CA_FILE: str = certifi.where()
"""The certificates (PEM) uamqp trusts where it is told of no other."""

__all__ = ["CA_FILE", "SASLAnonymous", "c_uamqp"]
