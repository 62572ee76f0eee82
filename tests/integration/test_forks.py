"""Forked programs are what a new interpreter would make of them: see `tests/support/forks.py`."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import struct
import subprocess
import sys
from asyncio.subprocess import DEVNULL, PIPE, STDOUT
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]  # it comes without types
import pytest

from tests.support.forks import hash_seed, run_python, server_pid, start_python

_FACTS = """
import asyncio, json, os, random, signal, sys, threading

print(json.dumps({
    "name": __name__, "arguments": sys.argv[1:], "first": sys.path[0], "folder": os.getcwd(),
    "environment": {name: value for name, value in os.environ.items() if name != "LC_CTYPE"},
    "signals": {number: str(signal.getsignal(number)) for number in sorted(signal.valid_signals())},
    "files": [name for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")],
    "terminals": [stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr)],
    "streams": [[each.name, each.encoding, each.errors, each.line_buffering] for each in (sys.stdin, sys.stdout)],
    "threads": [each.name for each in threading.enumerate()], "read": sys.stdin.read(),
    "awaited": asyncio.run(asyncio.sleep(0, "yes")),
}))
print(os.getpid(), random.random())
"""

_ENDS = {
    "returns": "print('done')",
    "exits": "import sys\nprint('done')\nsys.exit(7)",
    "exits with a text": "import sys\nsys.exit('why')",
    "raises": "import json\njson.loads('{')",
    "is interrupted": "raise KeyboardInterrupt",
    "is killed": "import os, signal\nprint('never')\nos.kill(os.getpid(), signal.SIGKILL)",
    "has a thread": "import threading, time\nthreading.Timer(0.01, print, ['late']).start()",
    "cleans up": "import atexit\natexit.register(print, 'last')\nprint('first')",
    "lacks a module": "import no_such_module",
    "lacks an import": "print(json, signal, os)",
    "lacks an import in a function": "import json\ndef run():\n    return os.getpid()\nrun()",
    "imports what raises": "import tests.no_such.module",
    "pickles its own": "import pickle\nclass Own: pass\nprint(type(pickle.loads(pickle.dumps(Own()))))",
    "is no program": "def",
}


def _kill_server() -> None:
    if (pid := server_pid()) is not None:
        server = psutil.Process(pid)
        server.kill()
        server.wait(30)


async def _exec(*arguments: str, **options: Any) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(sys.executable, *arguments, **options)


async def test_forked_script_finds_what_a_new_interpreter_shows(tmp_path: Path) -> None:
    """Its arguments, input, environment, directory, paths, signals and open files; but its own id and randomness."""
    script, folder = tmp_path / "facts.py", tmp_path / "folder"
    script.write_text(_FACTS)
    folder.mkdir()
    environment = {**os.environ, "FACT": "1"}
    shown, own = [], []
    options: Any = {"stdin": PIPE, "stdout": PIPE, "stderr": PIPE, "env": environment, "cwd": folder}
    command = (str(script), "a", "-b")
    for is_new in (True, False, False):
        process: asyncio.subprocess.Process | subprocess.Popen[bytes]
        if is_new:
            # Not by the loop: a program that uvloop started had descriptors of earlier tests open, too.
            process = subprocess.Popen([sys.executable, *command], **options)  # noqa: ASYNC220 - as above
            out, err = await asyncio.to_thread(process.communicate, b"input")
        else:
            process = await start_python(*command, **options)
            out, err = await process.communicate(b"input")
        assert (process.returncode, err) == (0, b"")
        facts, rest = out.decode().splitlines()
        shown.append(json.loads(facts))
        own.append(rest.split())
        assert own[-1][0] == str(process.pid)
    assert shown[0] == shown[1] == shown[2]
    assert own[1][1] != own[2][1]


@pytest.mark.parametrize("source", _ENDS.values(), ids=_ENDS)
async def test_forked_program_ends_as_a_new_interpreter_does(source: str) -> None:
    """The same exit code or signal, output, and last line of its errors."""
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    for environment in (buffered, {**buffered, "PYTHONUNBUFFERED": "1"}):
        ends = []
        for start in (_exec, start_python):
            process = await start("-c", source, stdin=DEVNULL, stdout=PIPE, stderr=PIPE, env=environment)
            out, err = await process.communicate()
            ends.append((process.returncode, out, err.splitlines()[-1:]))
        assert ends[0] == ends[1]


async def test_forked_module_is_signaled_and_killed() -> None:
    """By its process id: its handlers run, and SIGKILL ends it."""
    source = "import signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(5))\nprint('up', flush=True)\n"
    for number, expected in ((signal.SIGTERM, 5), (signal.SIGINT, -signal.SIGINT), (signal.SIGKILL, -signal.SIGKILL)):
        process = await start_python("-c", source + "signal.pause()", stdout=PIPE, stderr=STDOUT)
        assert process.stdout is not None
        assert await process.stdout.readline() == b"up\n"
        process.send_signal(number)
        assert await process.wait() == expected


def test_program_that_does_not_end_in_time_is_killed() -> None:
    """And the process that was forked for it has no further child."""
    run_python("-c", "pass", timeout=30)
    server = psutil.Process(server_pid())
    before = {child.pid for child in server.children()}
    with pytest.raises(TimeoutError):
        run_python("-c", "import signal\nsignal.pause()", timeout=0.2)
    assert {child.pid for child in server.children()} <= before


@pytest.mark.parametrize("raised", ["RuntimeError('no such device')", "SystemExit(3)", "BaseException('skipped')"])
def test_program_whose_imports_raise_fails_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raised: str) -> None:
    """It ends as in a new interpreter; the next one runs, forked from the same process."""
    (tmp_path / "raises_at_import.py").write_text(f"raise {raised}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    _kill_server()  # the new one finds the module
    try:
        programs = [("-m", "raises_at_import"), ("-c", "import raises_at_import"), ("-m", "no_such_package.main")]
        servers = set()
        for arguments in programs:
            command = [sys.executable, *arguments]
            real = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
            done = run_python(*arguments, timeout=30)
            assert done.returncode == real.returncode != 0
            # Of a module that is not there the interpreter says so in other words than `runpy`.
            assert (done.stderr.splitlines()[-1:] == real.stderr.splitlines()[-1:]) or "no_such_package" in done.stderr
            assert run_python("-c", "print(1)", timeout=30).stdout == "1\n"
            servers.add(server_pid())
        assert len(servers) == 1
    finally:
        _kill_server()


def test_killed_server_is_replaced() -> None:
    """The next program runs, with the same hash seed."""
    program = ("-c", "print(hash('key'))")
    before = run_python(*program, timeout=30).stdout
    killed = server_pid()
    _kill_server()
    after = run_python(*program, timeout=30)
    assert (after.returncode, after.stdout) == (0, before)
    assert server_pid() != killed
    seed = hash_seed()
    assert seed is not None
    environment = {**os.environ, "PYTHONHASHSEED": str(seed)}
    real = subprocess.run([sys.executable, *program], env=environment, capture_output=True, text=True, check=True)
    assert real.stdout == before


def test_exchange_that_is_interrupted_is_the_last_of_its_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """No program gets the answer to the request of another."""
    run_python("-c", "print(0)", timeout=30)
    server = server_pid()
    # Between the request and its answer, as by Ctrl-C: the call that would receive the answer raises.
    with monkeypatch.context() as patched:
        patched.setattr(socket, "MSG_WAITALL", None)
        with pytest.raises(TypeError):
            run_python("-c", "print('lost')", timeout=30)
    assert server_pid() is None
    for number in range(3):
        assert run_python("-c", f"print({number})", timeout=30).stdout == f"{number}\n"
    assert server_pid() not in (None, server)


def test_server_ends_when_its_peer_is_gone_in_a_request() -> None:
    """At every byte of a request; without a word, and without waiting for more."""
    request = struct.pack("!I", 5000) + b'{"prog'
    for count in (0, 2, 4, len(request)):
        ours, theirs = socket.socketpair()
        with theirs:
            server = subprocess.Popen(
                [sys.executable, "-m", "tests.support.fork_server", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stderr=PIPE,
            )
        with ours:
            ours.sendall(request[:count])
        try:
            assert (server.communicate(timeout=30)[1], server.returncode) == (b"", 0)
        finally:
            server.kill()
            server.wait()
