"""SIGINT and SIGTERM for code on an event loop.

A signal that is ignored stays ignored: a script starts a job in the background with SIGINT ignored, so that Ctrl-C ends
what is in the foreground only.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


def _not_ignored() -> list[signal.Signals]:
    return [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]


@contextmanager
def handling_signals(arrived: Callable[[signal.Signals], None]) -> Iterator[None]:
    """Call a function on the running loop for each SIGINT and SIGTERM; afterwards they are handled as before.

    One that is ignored stays so. Works on every platform. Outside of the main thread, which alone can handle signals,
    nothing is changed.

    Args:
        arrived: Called with the signal. Must not raise.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    before: dict[signal.Signals, Any] = {number: signal.getsignal(number) for number in _not_ignored()}
    for number in before:
        try:
            loop.add_signal_handler(number, arrived, number)
        except NotImplementedError:  # on Windows, where the loop wakes up for signals by itself
            signal.signal(number, lambda caught, _: loop.call_soon_threadsafe(arrived, signal.Signals(caught)))
    try:
        yield
    finally:
        for number, handler in before.items():
            with suppress(NotImplementedError):
                loop.remove_signal_handler(number)
            if handler is not None:  # of code that is not Python's
                signal.signal(number, handler)


@contextmanager
def handling_first_signal(arrived: Callable[[], None]) -> Iterator[None]:
    """Call a function on the running loop for the first SIGINT or SIGTERM; from then on both are handled as before.

    One that is ignored stays so. Where a loop handles no signals, outside of the main thread and on Windows, nothing is
    changed.

    Args:
        arrived: Called once at most. Must not raise.
    """
    loop = asyncio.get_running_loop()
    handled: dict[signal.Signals, Any] = {}

    def give_back() -> None:
        while handled:
            number, handler = handled.popitem()
            loop.remove_signal_handler(number)
            if handler is not None:  # of code that is not Python's
                signal.signal(number, handler)

    def first() -> None:
        give_back()
        arrived()

    for number in _not_ignored():
        before = signal.getsignal(number)
        # Raises outside of the main thread, and on some platforms.
        with suppress(NotImplementedError, RuntimeError, ValueError):
            loop.add_signal_handler(number, first)
            handled[number] = before
    try:
        yield
    finally:
        give_back()
