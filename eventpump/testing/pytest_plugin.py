"""The pytest plugin: an emulator for tests. pytest loads it by itself where eventpump is installed.

* `eventpump_emulator`: in an `async def` test, an `Emulator` with the hub `telemetry` of four partitions, on the test's
  loop. Needs pytest-asyncio, in either mode: `pip install 'eventpump[testing]'`.
* `eventpump_emulators`: in an `async def` test, a function that starts an emulator, with the parameters of `Emulator`.
* `eventpump_emulator_thread`: in any test, an `EmulatorThread` with that hub: the emulator on a thread of its own, for
  code without an event loop.
* `eventpump_emulator_threads`: a function that starts one, with the parameters of `Emulator`.

Until a test uses one of them, nothing but pytest is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Never, NoReturn

import pytest

if TYPE_CHECKING:
    from eventpump.testing.threaded import EmulatorThread

EmulatorThreadFactory = Callable[..., "EmulatorThread"]


class _WithoutAsyncio:
    """Replaces the fixtures of `async def` tests if nothing can run them."""

    @pytest.fixture
    def eventpump_emulator(self) -> NoReturn:
        """Fail with what to install."""
        pytest.fail(
            "eventpump_emulator runs on the loop of an `async def` test, which needs pytest-asyncio: pip install "
            "'eventpump[testing]'. A test without a loop takes eventpump_emulator_thread",
            pytrace=False,
        )

    @pytest.fixture
    def eventpump_emulators(self, eventpump_emulator: Never) -> None:
        """Fail likewise."""


def pytest_configure(config: pytest.Config) -> None:
    """Add the fixtures of `async def` tests, if pytest-asyncio is loaded."""
    plugins = config.pluginmanager
    if plugins.hasplugin("asyncio") or plugins.hasplugin("pytest_asyncio.plugin"):
        from eventpump.testing import fixtures

        plugins.register(fixtures, "eventpump fixtures")
    else:
        plugins.register(_WithoutAsyncio(), "eventpump fixtures")


@pytest.fixture
def eventpump_emulator_thread() -> Iterator[EmulatorThread]:
    """Run an emulator with one hub, `telemetry`, of four partitions, on a thread of its own."""
    from eventpump.testing.threaded import EmulatorThread

    with EmulatorThread({"telemetry": 4}) as emulator:
        yield emulator


@pytest.fixture
def eventpump_emulator_threads() -> Iterator[EmulatorThreadFactory]:
    """Return a function that starts an emulator on a thread, with the parameters of `Emulator`; all stop with the
    test."""
    from eventpump.testing.threaded import EmulatorThread

    with ExitStack() as stack:

        def start(*args: Any, **options: Any) -> EmulatorThread:
            return stack.enter_context(EmulatorThread(*args, **options))

        yield start
