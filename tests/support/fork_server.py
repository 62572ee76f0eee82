"""Starts Python programs by forking a process that has imported what they need; see `tests/support/forks.py`.

Its one argument is the descriptor of a socket, with whose end it ends, in the middle of a request too. A request is its
length in 4 bytes and JSON: `{"prepare": modules, "program": ...}`, answered by a null byte once the modules, and what
the program imports at its top, are imported; or `{"program": ...}` with the descriptors of a new process's standard
input, output and error and of a pipe, answered by the process id in 8 bytes. The exit code then comes in 4 bytes
through the pipe.
"""

from __future__ import annotations

import ast
import gc
import io
import json
import os
import runpy
import select
import signal
import socket
import struct
import sys
import threading
import types
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from typing import Any

_STREAMS = 3


def _prepare(modules: list[str], program: dict[str, Any]) -> None:
    """Import modules, and whatever a program imports at its top.

    Of the program itself nothing runs here. What fails, with whatever exception, fails again in the program, and only
    there: this process is for the next program too.
    """
    with suppress(BaseException):
        for name in modules:
            import_module(name)
        if (source := program["source"]) is None:
            path = program["script"] or getattr(find_spec(program["module"]), "origin", None)
            if path is None:
                return
            with open(path, encoding="utf-8") as file:
                source = file.read()
        found: list[ast.stmt] = []
        found += (each for each in ast.parse(source).body if isinstance(each, ast.Import | ast.ImportFrom))
        exec(compile(ast.Module(found, []), "<imports>", "exec"), {"__name__": program["module"] or "__main__"})


class _Server:
    """What the loop below holds: the socket, and the children with their pipes."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._pipes: dict[int, int] = {}
        self._wakes, self._waker = socket.socketpair()
        self._waker.setblocking(False)
        # Ctrl-C in the terminal of the tests is for pytest, which then closes the socket.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)

    def serve(self) -> dict[str, Any] | None:
        """Serve until the socket is closed.

        Returns:
            None at the end; in a new process, the program that it is to run.

        Raises:
            EOFError: The other end was closed in the middle of a request.
            BrokenPipeError: The other end was closed before the answer.
        """
        while True:
            ready, _, _ = select.select([self._control, self._wakes], [], [])
            if self._wakes in ready:
                self._wakes.recv(4096)
                self._reap()
            if self._control not in ready:
                continue
            head, streams, _, _ = socket.recv_fds(self._control, 4, _STREAMS + 1)
            if not head:
                return None
            head += self._received(4 - len(head))
            request = json.loads(self._received(*struct.unpack("!I", head)))
            program: dict[str, Any] = request["program"]
            if "prepare" in request:
                _prepare(request["prepare"], program)
                gc.collect()
                gc.freeze()  # the first collection of each child would copy all pages
                self._control.sendall(b"\0")
                continue
            if threading.active_count() > 1:
                raise RuntimeError(f"a process with threads cannot be forked: {threading.enumerate()}")
            if not (pid := os.fork()):
                self._become(program, streams)
                return program
            self._pipes[pid] = streams.pop()
            for stream in streams:
                os.close(stream)
            self._control.sendall(struct.pack("!q", pid))

    def _received(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            if not (received := self._control.recv(count - len(data))):
                raise EOFError("the other end of the socket was closed in the middle of a request")
            data += received
        return bytes(data)

    def _reap(self) -> None:
        while self._pipes:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            pipe = self._pipes.pop(pid)
            with suppress(BrokenPipeError):  # the test that would have read it is over
                os.write(pipe, struct.pack("!i", os.waitstatus_to_exitcode(status)))
            os.close(pipe)

    def _become(self, program: dict[str, Any], streams: list[int]) -> None:
        """Give this process what a new interpreter has: its streams, signals, environment and directory."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for each in (self._control, self._wakes, self._waker):
            each.detach()
        for number, stream in enumerate(streams[:_STREAMS]):
            os.dup2(stream, number)
        os.closerange(_STREAMS, os.sysconf("SC_OPEN_MAX"))
        environment: dict[str, str] = program["environment"]
        is_unbuffered = bool(environment.get("PYTHONUNBUFFERED"))
        for number, name in enumerate(("stdin", "stdout", "stderr")):
            was = getattr(sys, name)
            raw = io.FileIO(number, "wb" if number else "rb", closefd=False)
            raw.name = f"<{name}>"
            buffer: Any = io.BufferedReader(raw) if not number else raw if is_unbuffered else io.BufferedWriter(raw)
            made = io.TextIOWrapper(
                buffer,
                encoding=was.encoding,
                errors=was.errors,
                line_buffering=name == "stderr" or os.isatty(number),
                write_through=is_unbuffered,
            )
            setattr(sys, name, made)
            setattr(sys, f"__{name}__", made)
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(program["directory"])
        script = program["script"]
        first = program["directory"] if script is None else os.path.dirname(script)
        paths = environment.get("PYTHONPATH", "").split(os.pathsep)
        sys.path[:1] = [first, *(path for path in paths if path and path not in sys.path)]


def _run(program: dict[str, Any]) -> None:
    """Run a program in this process. It ends as any does: with the exit code, or the traceback, of what it raises."""
    sys.argv[1:] = program["arguments"]
    if program["source"] is not None:
        sys.argv[0] = "-c"
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(program["source"], "<string>", "exec"), vars(main))
    elif program["script"] is not None:
        sys.argv[0] = program["script"]
        runpy.run_path(program["script"], run_name="__main__")
    else:
        sys.modules.pop(program["module"], None)
        runpy.run_module(program["module"], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    given: dict[str, Any] | None = None
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        given = _Server(socket.socket(fileno=int(sys.argv[1]))).serve()
    if given is not None:
        _run(given)
