"""Which sockets this process has."""

from __future__ import annotations

import os

import psutil  # type: ignore[import-untyped]  # it comes without types


def open_sockets() -> frozenset[tuple[object, ...]]:
    """Return the sockets that are open.

    What was open before a test may be closed meanwhile, by other tests' garbage: compare which are new, not how many.
    """
    found = psutil.Process(os.getpid()).net_connections("inet")
    return frozenset((each.fd, each.laddr, each.raddr) for each in found)
