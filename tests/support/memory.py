"""How much memory a piece of synchronous code takes, and nothing else in the process."""

import contextlib
import gc
import sys
import tracemalloc
from collections.abc import Iterator

_NO_SWITCH = 600.0
"""Seconds for which no other thread is given the interpreter."""


@contextlib.contextmanager
def traced_memory() -> Iterator[None]:
    """Trace the memory that the block allocates, as `tracemalloc.get_traced_memory` returns it within the block.

    The cyclic collector does not run in it: a finalizer of what another test left behind, and the warning that
    it prints, would count. Nor does another thread of the process, unless the block waits.
    """
    interval = sys.getswitchinterval()
    gc.disable()
    sys.setswitchinterval(_NO_SWITCH)
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()
        sys.setswitchinterval(interval)
        gc.enable()
