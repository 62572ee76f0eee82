"""The fixtures of `async def` tests, which `eventpump.testing.pytest_plugin` adds where pytest-asyncio is loaded.

A `conftest.py` may import them too. Nothing else of eventpump imports this module.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import pytest_asyncio

if TYPE_CHECKING:
    from eventpump.emulator.server import Emulator

EmulatorFactory = Callable[..., "Awaitable[Emulator]"]


@pytest_asyncio.fixture
async def eventpump_emulator() -> AsyncIterator[Emulator]:
    """Run an emulator with one hub, `telemetry`, of four partitions, on the test's loop."""
    from eventpump.emulator.server import Emulator

    async with Emulator({"telemetry": 4}) as emulator:
        yield emulator


@pytest_asyncio.fixture
async def eventpump_emulators() -> AsyncIterator[EmulatorFactory]:
    """Return a function that starts an emulator, with the parameters of `Emulator`; all stop with the test."""
    from eventpump.emulator.server import Emulator

    async with AsyncExitStack() as stack:

        async def start(*args: Any, **options: Any) -> Emulator:
            return await stack.enter_async_context(Emulator(*args, **options))

        yield start
