"""What every fault test stands on, and the check that nothing outlives it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import psutil  # type: ignore[import-untyped]  # it comes without types
import pytest

pytest.register_assert_rewrite("tests.faults.evidence", "tests.faults.programs")

from eventpump import Emulator  # noqa: E402
from tests.faults.programs import Stage, emulator_of  # noqa: E402
from tests.support.forks import server_pid  # noqa: E402
from tests.ways import Way  # noqa: E402

_PATIENCE = 3.0


class Remains:
    """Counts what a test leaves behind: tasks, threads, sockets and child processes."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._threads = set(threading.enumerate())
        self._sockets = self._open_sockets()
        self._children = self._running()

    def _open_sockets(self) -> set[tuple[int, str]]:
        return {(each.fd, f"{each.laddr} {each.raddr}") for each in self._process.net_connections("inet")}

    def left_over(self) -> list[str]:
        current = asyncio.current_task()
        found = [f"task {task.get_name()}: {task.get_coro()}" for task in asyncio.all_tasks() if task is not current]
        # The loop's own executor ends with the loop.
        threads = [each for each in set(threading.enumerate()) - self._threads if not each.name.startswith("asyncio_")]
        found += [f"thread {each.name}" for each in threads]
        found += [f"socket {name}" for _, name in self._open_sockets() - self._sockets]
        found += [f"process {pid}" for pid in self._running() - self._children]
        return found

    def _running(self) -> set[int | None]:
        """Return the children, those forked for this process too; see `tests/support/forks.py`."""
        return {child.pid for child in self._process.children(recursive=True)} - {server_pid()}


async def _gone(left_over: Callable[[], list[str]]) -> list[str]:
    """Return what is left over when there was time enough to go."""
    loop = asyncio.get_running_loop()
    until = loop.time() + _PATIENCE
    # Nothing reports the end of a thread, or of a socket closed with bytes still to send: they are looked at.
    while (found := left_over()) and loop.time() < until:  # noqa: ASYNC110 - see above
        await asyncio.sleep(0.01)
    return found


@pytest.fixture(autouse=True)
async def nothing_left() -> AsyncIterator[None]:
    """*Tidy close*: no task, thread, socket or process of a test outlives it."""
    remains = Remains()
    yield
    assert await _gone(remains.left_over) == []


@pytest.fixture
async def emulator(nothing_left: None, way: Way) -> AsyncIterator[Emulator]:
    """The service, in this process, with four partitions."""
    async with emulator_of(4, tls=way.tls) as started:
        yield started


@pytest.fixture
async def stage(nothing_left: None, emulator: Emulator, way: Way, tmp_path: Path) -> AsyncIterator[Stage]:
    """A test's hosts and journals, on the emulator in this process."""
    stage = Stage(tmp_path, emulator.connection_string, way.options)
    await stage.witness_checkpoints()
    yield stage
    await stage.aclose()
    # Hosts and publishers close their connections; it is not left to the service.
    assert await _gone(lambda: [f"{emulator.connection_count} connections"] * bool(emulator.connection_count)) == []


@pytest.fixture
async def bare_stage(nothing_left: None, tmp_path: Path) -> AsyncIterator[Stage]:
    """The same for a test that brings a service of its own."""
    stage = Stage(tmp_path)
    yield stage
    await stage.aclose()
