"""The fixtures of `async def` tests, which `eventpump.testing.pytest_plugin` adds where pytest-asyncio is loaded.

Each emulator runs on the loop of the test that uses it, whatever the loop scope of the test is: that of its `asyncio`
mark, or else `asyncio_default_test_loop_scope`. `asyncio_default_fixture_loop_scope` has no influence.

A `conftest.py` may import the fixtures too, in a project that loads the plugin. Nothing else of eventpump imports this
module.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, Literal, get_args

import pytest
import pytest_asyncio

if TYPE_CHECKING:
    from eventpump.emulator.server import Emulator

EmulatorFactory = Callable[..., "Awaitable[Emulator]"]

_Scope = Literal["function", "class", "module", "package", "session"]


@pytest.fixture
def eventpump_emulator(request: pytest.FixtureRequest) -> Emulator:
    """Run an emulator with one hub, `telemetry`, of four partitions, on the test's loop."""
    emulator: Emulator = _on_the_tests_loop(request, "_eventpump_emulator")
    return emulator


@pytest.fixture
def eventpump_emulators(request: pytest.FixtureRequest) -> EmulatorFactory:
    """Return a function that starts an emulator, with the parameters of `Emulator`; all stop with the test."""
    start: EmulatorFactory = _on_the_tests_loop(request, "_eventpump_emulators")
    return start


def _on_the_tests_loop(request: pytest.FixtureRequest, name: str) -> Any:
    """Return the value of the fixture for the loop scope of the test. pytest-asyncio runs a fixture on the loop of the
    scope with which it was made, so there is one for each."""
    mark = request.node.get_closest_marker("asyncio")
    of_mark = None if mark is None else mark.kwargs.get("loop_scope") or mark.kwargs.get("scope")
    scope = of_mark or request.config.getini("asyncio_default_test_loop_scope")
    try:
        return request.getfixturevalue(f"{name}_{scope}")
    except pytest.FixtureLookupError as error:
        if error.argname != f"{name}_{scope}":
            raise
        pytest.fail(
            f"{request.fixturename} was imported, but the plugin that it belongs to is not loaded: run pytest with "
            "`-p eventpump.testing.pytest_plugin`, or add it to `pytest_plugins` of the conftest.py at the top",
            pytrace=False,
        )


def _emulator_on(scope: _Scope) -> Any:
    @pytest_asyncio.fixture(loop_scope=scope, name=f"_eventpump_emulator_{scope}")
    async def emulator() -> AsyncIterator[Emulator]:
        from eventpump.emulator.server import Emulator

        async with Emulator({"telemetry": 4}) as emulator:
            yield emulator

    return emulator


def _emulators_on(scope: _Scope) -> Any:
    @pytest_asyncio.fixture(loop_scope=scope, name=f"_eventpump_emulators_{scope}")
    async def emulators() -> AsyncIterator[EmulatorFactory]:
        from eventpump.emulator.server import Emulator

        async with AsyncExitStack() as stack:

            async def start(*args: Any, **options: Any) -> Emulator:
                return await stack.enter_async_context(Emulator(*args, **options))

            yield start

    return emulators


# pytest finds fixtures by the attributes of a module.
for _scope in get_args(_Scope):
    globals()[f"_eventpump_emulator_{_scope}"] = _emulator_on(_scope)
    globals()[f"_eventpump_emulators_{_scope}"] = _emulators_on(_scope)
