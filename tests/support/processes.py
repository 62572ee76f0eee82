"""Child processes for tests: what they print are facts to wait for, and they can be killed, frozen and woken."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.support.forks import COMMAND, start_python
from tests.support.waiting import Changes

STOP_TIMEOUT = 10.0
"""Seconds a child has to end on SIGTERM before it is killed."""

_LINE_LIMIT = 64 << 20


class ChildEndedError(Exception):
    """A child ended, or printed its last line, before the fact that was waited for.

    Args:
        command: What was run.
        returncode: Its exit code, negative for a signal; None while it has not ended.
        stderr: What it said on its way.
    """

    def __init__(self, command: Sequence[str], returncode: int | None, stderr: str) -> None:
        super().__init__(f"{' '.join(command[:4])} ... ended with {returncode}: {stderr[-2000:]}")
        self.returncode = returncode
        self.stderr = stderr


class ChildProcess:
    """A child process and the lines it prints. An async context manager: left, the child is killed.

    Args:
        command: The program and its arguments. With `sys.executable` it is forked: see `tests/support/forks.py`.
        on_line: Is called with every line it prints.
        directory: Where it runs; None for where this process does.
        environment: Variables it has beside those of this process.
        is_forked: False for a real interpreter.
    """

    def __init__(
        self,
        *command: str,
        on_line: Callable[[str], None] | None = None,
        directory: Path | None = None,
        environment: Mapping[str, str] | None = None,
        is_forked: bool = True,
    ) -> None:
        self._command = command
        self._is_forked = is_forked
        self._on_line = on_line
        self._directory = directory
        self._environment = environment
        self._process: asyncio.subprocess.Process | None = None
        self._readers: list[asyncio.Task[None]] = []
        self._changes = Changes()
        self._stderr: list[bytes] = []
        self._is_over = False
        self.lines: list[str] = []
        """What it printed so far."""

    async def start(self) -> None:
        """Start it.

        Raises:
            OSError: It cannot be.
        """
        program, *arguments = self._command
        start: Callable[..., Awaitable[asyncio.subprocess.Process]]
        if program == sys.executable:
            start = partial(start_python, is_forked=self._is_forked)
        else:
            start = partial(asyncio.create_subprocess_exec, program)
        process = self._process = await start(
            *arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=_LINE_LIMIT,
            cwd=self._directory,
            env=None if self._environment is None else {**os.environ, **self._environment},
        )
        assert process.stdout is not None
        assert process.stderr is not None
        loop = asyncio.get_running_loop()
        self._readers = [
            loop.create_task(self._read_lines(process.stdout), name="child output"),
            loop.create_task(self._read_errors(process.stderr), name="child errors"),
        ]

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.kill()

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._process is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        return None if self._process is None else self._process.returncode

    @property
    def stderr(self) -> str:
        """What it said on its standard error so far."""
        return b"".join(self._stderr).decode(errors="replace")

    # ------------------------------------------------------------------------------------------------ facts

    async def until(self, is_so: Callable[[list[str]], bool]) -> None:
        """Wait until something holds of its lines.

        Raises:
            ChildEndedError: It ended first.
        """
        await self._changes.until(lambda: is_so(self.lines) or self._is_over, None)
        if not is_so(self.lines):
            raise ChildEndedError(self._command, self.returncode, self.stderr)

    async def line(self, pattern: str, *, after: int = 0) -> re.Match[str]:
        """Wait for a line that a regular expression matches from its beginning.

        Args:
            after: How many lines, of those printed so far, are not looked at.

        Raises:
            ChildEndedError: It ended first.
        """
        looked_at = after
        expression = re.compile(pattern)
        while True:
            for line in self.lines[looked_at:]:
                looked_at += 1
                if found := expression.match(line):
                    return found
            seen = looked_at
            await self.until(lambda lines, seen=seen: len(lines) > seen)  # type: ignore[misc]  # the default is the type

    async def wait(self) -> int:
        """Wait for its end, and for everything it printed.

        Returns:
            The exit code.
        """
        assert self._process is not None
        await asyncio.wait(self._readers)
        return await self._process.wait()

    # ---------------------------------------------------------------------------------------------- control

    async def tell(self, line: str) -> None:
        """Write a line to its standard input."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode() + b"\n")
        await self._process.stdin.drain()

    def end_input(self) -> None:
        """Close its standard input, at whose end many a program ends."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.close()

    def freeze(self) -> None:
        """Stop it where it stands (SIGSTOP), as a machine that is suspended or starved does."""
        self._signal(signal.SIGSTOP)

    def wake(self) -> None:
        """Let it go on after `freeze`."""
        self._signal(signal.SIGCONT)

    async def kill(self) -> int | None:
        """Kill it (SIGKILL), frozen or not, and wait for its end. Twice is fine.

        Returns:
            The exit code.
        """
        if self._process is None:
            return None
        self._signal(signal.SIGKILL)
        return await self._ended()

    async def stop(self) -> int:
        """Ask it to end (SIGTERM), and kill it if it does not in time.

        Returns:
            The exit code.
        """
        assert self._process is not None
        self._signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(STOP_TIMEOUT):
                return await self._ended()
        except TimeoutError:
            await self.kill()
            raise

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)

    async def _ended(self) -> int:
        assert self._process is not None
        assert self._process.stdin is not None
        returncode = await self.wait()
        self._process.stdin.close()
        return returncode

    async def _read_lines(self, stream: asyncio.StreamReader) -> None:
        try:
            async for line in stream:
                text = line.decode(errors="replace").rstrip("\n")
                self.lines.append(text)
                if self._on_line is not None:
                    self._on_line(text)
                self._changes.happened()
        finally:
            self._is_over = True
            self._changes.happened()

    async def _read_errors(self, stream: asyncio.StreamReader) -> None:
        async for line in stream:
            self._stderr.append(line)


class EmulatorProcess:
    """`eventpump emulator` in a process of its own, which can be killed and started again at the same port.

    Args:
        hubs: What to serve, as `name:partitions`.
        data: The directory that keeps the hubs; None keeps them in memory, and a kill loses them.
        arguments: Further command line arguments.
    """

    def __init__(self, *hubs: str, data: Path | None = None, arguments: Sequence[str] = ()) -> None:
        self._arguments = [argument for hub in hubs for argument in ("--hub", hub)]
        if data is not None:
            self._arguments += ["--data", str(data)]
        self._arguments += arguments
        self._child: ChildProcess | None = None
        self.connection_string = ""
        """What clients connect with; the same after a restart."""
        self.port = 0
        """The port it listens on; the same after a restart."""

    @property
    def child(self) -> ChildProcess:
        """The process."""
        assert self._child is not None
        return self._child

    async def start(self) -> None:
        """Start it, and wait until it accepts connections.

        Raises:
            ChildEndedError: It does not.
        """
        command = [sys.executable, *COMMAND, "emulator", "--port", str(self.port), *self._arguments]
        child = self._child = ChildProcess(*command)
        await child.start()
        self.connection_string = (await child.line("Endpoint=")).string
        found = re.search(r"^Endpoint=sb://[^;]*:(\d+)", self.connection_string)
        assert found is not None
        self.port = int(found.group(1))

    async def kill(self) -> None:
        """Kill it (SIGKILL). Twice is fine."""
        if self._child is not None:
            await self._child.kill()

    async def stop(self) -> int:
        """Ask it to end, and wait.

        Returns:
            The exit code.
        """
        return await self.child.stop()

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.kill()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.kill()
