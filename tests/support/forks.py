"""Python programs as processes of their own, without the half second of imports that each would begin with.

They are forks of one process, `tests/support/fork_server.py`, that has imported what they need: real processes, with
their own process id, streams, signals and end. What they do not show is what their imports lack or cost, and what the
interpreter does before the first line of a program: tests of those start `sys.executable`.

Forks of one process also share its hash seed, so processes of one test iterate over a set in the same order, where real
ones would not. The seed is another one in every run and worker of the tests (`hash_seed`). For tests in which processes
must agree about something, such as who owns what, or what was published, that is not enough: at least one of
each kind starts real interpreters with `is_forked=False` (in `tests/faults/test_hosts.py` and
`tests/integration/test_killed_publishers.py`).
"""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from asyncio.base_subprocess import BaseSubprocessTransport
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from eventpump.cli.main import COMMANDS
from tests.support.seeds import RUN_VARIABLE

COMMAND = ("-m", "eventpump.cli.main")
"""The command line of `eventpump` begins with this."""

_ROOT = Path(__file__).parents[2]
_LIMIT = 1 << 16
_END_TIMEOUT = 10.0


def _can_fork() -> bool:
    """Elsewhere forks are unsafe, or there are none; and the measurement of coverage starts with the interpreter."""
    return sys.platform == "linux" and "COVERAGE_PROCESS_START" not in os.environ


def hash_seed() -> int | None:
    """Return the hash seed of the programs that are forked for this process; None leaves it to the interpreter."""
    if (run := os.environ.get(RUN_VARIABLE)) is None:
        return None
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")
    return (int(run) + int(worker)) % (1 << 32)


async def start_python(
    *arguments: str,
    stdin: int | None = None,
    stdout: int | None = None,
    stderr: int | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    limit: int = _LIMIT,
    is_forked: bool = True,
) -> asyncio.subprocess.Process:
    """Start a program, as `asyncio.create_subprocess_exec(sys.executable, ...)` does.

    Args:
        arguments: What follows `python` in a command line: `-m` and a module, `-c` and a program's text, or a script;
            then its arguments.
        stdin: A descriptor, `subprocess.PIPE`, `subprocess.DEVNULL`, or None for that of this process.
        stdout: The same for its output.
        stderr: The same for its errors, or `subprocess.STDOUT`.
        env: All its variables; None for those of this process. Of those that Python itself reads only PYTHONPATH and
            PYTHONUNBUFFERED count.
        cwd: Where it runs; None for the root of the repository.
        limit: As of `asyncio.create_subprocess_exec`.
        is_forked: False for a real interpreter, with a hash seed of its own.
    """
    if not (is_forked and _can_fork()):
        return await asyncio.create_subprocess_exec(
            sys.executable,
            *arguments,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            env=env,
            cwd=cwd or _ROOT,
            limit=limit,
        )
    program = _program(arguments, os.environ if env is None else env, _ROOT if cwd is None else cwd)
    server = await asyncio.to_thread(_Server.prepared, program)  # imports, for which no event loop has to stand still
    loop = asyncio.get_running_loop()
    protocol = asyncio.subprocess.SubprocessStreamProtocol(limit=limit, loop=loop)
    connected: asyncio.Future[None] = loop.create_future()
    transport = _Transport(
        loop, protocol, arguments, False, stdin, stdout, stderr, 0, waiter=connected, server=server, program=program
    )
    try:
        await connected
    except BaseException:
        transport.close()
        await transport._wait()
        raise
    return asyncio.subprocess.Process(transport, protocol, loop)


def run_python(
    *arguments: str, env: Mapping[str, str] | None = None, cwd: Path | None = None, timeout: float
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, as `subprocess.run([sys.executable, ...], capture_output=True, text=True)` does.

    Not for a thread that has an event loop.

    Raises:
        TimeoutError: It was killed, for it had not ended in time, in seconds.
    """

    async def run() -> subprocess.CompletedProcess[str]:
        process = await start_python(
            *arguments, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env, cwd=cwd
        )
        try:
            async with asyncio.timeout(timeout):
                out, err = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert process.returncode is not None
        return subprocess.CompletedProcess(arguments, process.returncode, out.decode(), err.decode())

    return asyncio.run(run())


def server_pid() -> int | None:
    """Return the id of the process whose forks the programs are; None while there is none."""
    started = _Server.started
    return None if started is None or started.process.poll() is not None else started.process.pid


def _program(arguments: Sequence[str], env: Mapping[str, str], cwd: Path) -> dict[str, Any]:
    """Return a program as the server takes it."""
    kind = arguments[0] if arguments[0] in ("-m", "-c") else None
    skipped = 1 if kind is None else 2
    return {
        "module": arguments[1] if kind == "-m" else None,
        "source": arguments[1] if kind == "-c" else None,
        "script": str(cwd / arguments[0]) if kind is None else None,
        "arguments": arguments[skipped:],
        "environment": dict(env),
        "directory": str(cwd),
    }


class _Server:
    """The process that is forked. It is started with the first program, and ends with this process."""

    started: _Server | None = None
    _lock = threading.Lock()

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair()
        self._prepared: set[tuple[str, ...]] = set()
        seed = hash_seed()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.fork_server", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                cwd=_ROOT,
                env=dict(os.environ) if seed is None else {**os.environ, "PYTHONHASHSEED": str(seed)},
            )
        atexit.register(self._end)

    @classmethod
    def prepared(cls, program: dict[str, Any]) -> _Server:
        """Return the server, when it has imported what a program needs."""
        first = next(iter(program["arguments"]), "")
        command = COMMANDS.get(first) if program["module"] == COMMAND[1] else None
        key = tuple(str(program[name]) for name in ("module", "source", "script"))
        key += (str(command), "" if program["script"] is None else Path(program["script"]).read_text(encoding="utf-8"))
        with cls._lock:
            if cls.started is not None and cls.started.process.poll() is not None:
                cls.started.discard()
            if cls.started is None:
                cls.started = cls()
            server = cls.started
            server.prepare(key, command, program)
            return server

    def prepare(self, key: tuple[str, ...], command: str | None, program: dict[str, Any]) -> None:
        """Import what a program needs, unless that has been done.

        Args:
            key: Identifies what it needs.
            command: The module of its command.
        """
        if key not in self._prepared:
            self._exchange({"prepare": [] if command is None else [command], "program": program}, (), 1)
            self._prepared.add(key)

    def fork(self, program: dict[str, Any], streams: Sequence[int]) -> int:
        """Start a program.

        Args:
            program: What to run; prepared.
            streams: The descriptors of its standard streams, and of the pipe for its exit code.

        Returns:
            Its process id.
        """
        with self._lock:
            (pid,) = struct.unpack("!q", self._exchange({"program": program}, streams, 8))
        return int(pid)

    def _exchange(self, request: dict[str, Any], streams: Sequence[int], count: int) -> bytes:
        """Send a request and return the bytes of its answer; what ends halfway is the last with this server.

        The next request would otherwise get the answer to this one.

        Raises:
            ChildProcessError: The server has ended.
        """
        answer = b""
        try:
            data = json.dumps(request).encode()
            socket.send_fds(self._control, [struct.pack("!I", len(data))], list(streams))
            self._control.sendall(data)
            answer = self._control.recv(count, socket.MSG_WAITALL)
        except (BrokenPipeError, ConnectionResetError):
            pass
        finally:
            if len(answer) < count:
                self.discard()
        if len(answer) < count:
            raise ChildProcessError(
                f"the process to fork ended with {self.process.returncode}; see its traceback. "
                "The next use starts another"
            )
        return answer

    def discard(self) -> None:
        """End it, so that the next use starts another."""
        if _Server.started is self:
            _Server.started = None
        atexit.unregister(self._end)
        self._control.close()
        with suppress(subprocess.TimeoutExpired):  # it has ended, as a rule, with an exit code that is worth knowing
            self.process.wait(0.5)
        self.process.kill()
        self.process.wait()

    def _end(self) -> None:
        self._control.close()
        try:
            self.process.wait(_END_TIMEOUT)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class _Child:
    """What asyncio needs of a `subprocess.Popen`."""

    def __init__(self, pid: int, ours: Mapping[int, IO[bytes]]) -> None:
        self.pid = pid
        self.stdin, self.stdout, self.stderr = map(ours.get, range(3))
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class _Transport(BaseSubprocessTransport):
    """A forked process for asyncio."""

    def _start(  # type: ignore[override]  # the server and the program come as further options
        self,
        args: Sequence[str],
        shell: bool,
        stdin: int | None,
        stdout: int | None,
        stderr: int | None,
        bufsize: int,
        *,
        server: _Server,
        program: dict[str, Any],
    ) -> None:
        ours: dict[int, IO[bytes]] = {}
        theirs: list[int] = []
        opened: list[int] = []
        try:
            for number, wanted in enumerate((stdin, stdout, stderr)):
                if wanted == subprocess.PIPE:
                    reading, writing = os.pipe()
                    kept, given = (reading, writing) if number else (writing, reading)
                    ours[number] = open(kept, "rb" if number else "wb", 0)  # noqa: SIM115 - asyncio closes it
                    opened.append(given)
                elif wanted == subprocess.DEVNULL:
                    given = os.open(os.devnull, os.O_RDWR)
                    opened.append(given)
                elif wanted == subprocess.STDOUT:
                    given = theirs[1]
                else:
                    given = number if wanted is None else wanted
                theirs.append(given)
            exit_code, writing = os.pipe()
            opened.append(writing)
            try:
                self._proc: Any = _Child(server.fork(program, [*theirs, writing]), ours)
            except BaseException:
                os.close(exit_code)
                raise
        except BaseException:
            for stream in ours.values():
                stream.close()
            raise
        finally:
            for each in opened:
                os.close(each)
        self._loop.add_reader(exit_code, self._ended, exit_code)

    def _ended(self, exit_code: int) -> None:
        self._loop.remove_reader(exit_code)
        data = os.read(exit_code, 4)
        os.close(exit_code)
        # Without one, the server was ended from outside: nothing is known of its child then.
        self._process_exited(struct.unpack("!i", data)[0] if data else 255)
