"""Pytest fixtures for users of eventpump.

To be imported by a `conftest.py`: `from eventpump.testing.fixtures import eventpump_emulator`.
Needs pytest and pytest-asyncio; nothing else of eventpump imports this module.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest_asyncio

from eventpump.emulator.server import Emulator

EmulatorFactory = Callable[..., Awaitable[Emulator]]


@pytest_asyncio.fixture
async def eventpump_emulator() -> AsyncIterator[Emulator]:
    """Run an emulator with one hub, `telemetry`, of four partitions."""
    async with Emulator({"telemetry": 4}) as emulator:
        yield emulator


@pytest_asyncio.fixture
async def eventpump_emulators() -> AsyncIterator[EmulatorFactory]:
    """Return a function that starts an emulator, with the parameters of `Emulator`; all stop with the test."""
    async with AsyncExitStack() as stack:

        async def start(*args: Any, **options: Any) -> Emulator:
            return await stack.enter_async_context(Emulator(*args, **options))

        yield start
