"""A plugin of pytest, `-p tests.support.on_uvloop`: every event loop of the run is uvloop's."""

from __future__ import annotations

import asyncio

import pytest
import uvloop


class CountingPolicy(uvloop.EventLoopPolicy):  # type: ignore[misc]  # its base depends on the Python version
    """Makes the loops, and counts them."""

    made = 0

    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        """Make a loop."""
        CountingPolicy.made += 1
        loop: asyncio.AbstractEventLoop = super().new_event_loop()
        return loop


def pytest_configure() -> None:
    asyncio.set_event_loop_policy(CountingPolicy())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.line(f"loops of uvloop: {CountingPolicy.made}")
