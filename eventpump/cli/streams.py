"""The command's ends: input read as lines, output that may block or break, signals, and the options of a connection."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import logging
import os
import queue
import signal
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final, Self, TypeVar, get_args

from eventpump.clients import ConnectionOptions
from eventpump.errors import ConfigurationError
from eventpump.options.connection import TransportType

T = TypeVar("T")

CONNECTION_VARIABLE: Final = "EVENTPUMP_CONNECTION_STRING"
FAILURE: Final = 1
"""The exit code where the work was begun and not done."""

_CHUNK: Final = 1 << 18


def add_connection_options(parser: argparse.ArgumentParser) -> None:
    """Add what every subcommand that connects takes."""
    parser.add_argument(
        "--connection-string", metavar="TEXT", help=f"how to reach the service (default: ${CONNECTION_VARIABLE})"
    )
    parser.add_argument("--hub", metavar="NAME", help="the hub (default: the connection string's EntityPath)")
    parser.add_argument(
        "--transport-type", choices=get_args(TransportType), default="tcp", help="what carries AMQP (default: tcp)"
    )
    parser.add_argument("--trust-env", action="store_true", help="go through the proxy of $HTTPS_PROXY")
    parser.add_argument("--ca-file", metavar="FILE", help="CA certificates (PEM) to trust instead of the system's")


def keep_quiet() -> None:
    """Leave what is tried again to the end's one line: a warning on the way would go through the bar, or the output."""
    logging.getLogger("eventpump").setLevel(logging.ERROR)


def connection_options(args: argparse.Namespace) -> ConnectionOptions:
    """Return what those options say, but for the connection string and the hub."""
    options = ConnectionOptions(transport_type=args.transport_type, trust_env=args.trust_env)
    if args.ca_file is not None:
        options["ca_file"] = args.ca_file
    return options


def connection_text(args: argparse.Namespace) -> str:
    """Find the connection string.

    Raises:
        ConfigurationError: There is none.
    """
    text: str | None = args.connection_string
    if text is None:
        text = os.environ.get(CONNECTION_VARIABLE)
    if not text:
        raise ConfigurationError("--connection-string", f"give it, or set {CONNECTION_VARIABLE}")
    return text


def whole_number(field: str, text: str, lowest: int, highest: int) -> int:
    """Read an option's number.

    Raises:
        ConfigurationError: It is none, or lies outside.
    """
    if not text.isascii() or not text.isdigit() or len(text) > 19 or not lowest <= int(text) <= highest:
        raise ConfigurationError(field, f"{text[:40]!r} is no number from {lowest} to {highest}")
    return int(text)


class Blocking:
    """A thread for calls that may block for ever: reading from a terminal, writing to a pager.

    A daemon, so that such a call does not keep the process from ending.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], asyncio.Future[Any]]] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name=name, daemon=True).start()

    async def run(self, call: Callable[[], T]) -> T:
        """Make a call, after those asked for before, and give its result. Cancelled, it is made all the same."""
        future: asyncio.Future[T] = self._loop.create_future()
        self._calls.put((call, future))
        return await future

    def _serve(self) -> None:
        while True:
            call, future = self._calls.get()
            result: Any = None
            failure: Exception | None = None
            try:
                result = call()
            except Exception as error:  # it is the asker's
                failure = error
            # The loop may be gone: then nobody waits any more.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(_settle, future, result, failure)


def _settle(future: asyncio.Future[Any], result: object, failure: Exception | None) -> None:
    if future.done():
        return
    if failure is None:
        future.set_result(result)
    else:
        future.set_exception(failure)


class LineSource:
    """The lines of a file, a pipe or a terminal, as they come.

    A line ends with LF or CR LF, which are no part of it; the last one may lack it.

    Args:
        name: A path; None or "-" for the standard input.

    Raises:
        ConfigurationError: It cannot be opened.
    """

    def __init__(self, name: str | None) -> None:
        if name is None or name == "-":
            if sys.stdin is None:
                raise ConfigurationError("FILE", "there is no standard input")
            self._fd = 0
        else:
            try:
                self._fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC)
            except (OSError, ValueError) as error:
                raise ConfigurationError("FILE", f"{name}: {_reason(error)}") from None
        status = os.fstat(self._fd)
        if stat.S_ISDIR(status.st_mode):
            raise ConfigurationError("FILE", f"{name or '-'}: {os.strerror(errno.EISDIR)}")
        self.is_file = stat.S_ISREG(status.st_mode)
        """Whether it has an end that can be read at once."""
        self.is_terminal = os.isatty(self._fd)
        self._thread: Blocking | None = None
        self._begun = b""
        self.longest = 1 << 20
        """Bytes of a line that are kept. A longer one is cut to one byte more."""

    @property
    def remaining(self) -> int | None:
        """Bytes to its end; None where that is not known."""
        if not self.is_file:
            return None
        return max(0, os.fstat(self._fd).st_size - os.lseek(self._fd, 0, os.SEEK_CUR))

    async def read(self) -> list[bytes]:
        """Wait for lines.

        Returns:
            One or more; none at the end.

        Raises:
            OSError: It cannot be read.
        """
        if self._thread is None:
            self._thread = Blocking("eventpump input")
        while chunk := await self._thread.run(lambda: os.read(self._fd, _CHUNK)):
            lines = chunk.split(b"\n")
            lines[0] = self._begun + lines[0]
            self._begun = lines.pop()[: self.longest + 1]
            if lines:
                return [line.removesuffix(b"\r") for line in lines]
        last, self._begun = self._begun, b""
        return [last.removesuffix(b"\r")] if last else []

    def count_rest(self) -> int:
        """Count the lines of a file that were not read yet. Nothing may be reading it."""
        count, last = 0, self._begun[-1:]
        with contextlib.suppress(OSError):
            while chunk := os.read(self._fd, _CHUNK):
                count += chunk.count(b"\n")
                last = chunk[-1:]
        return count + (last not in (b"", b"\n"))


class Output:
    """The standard output, for lines of bytes. Writing waits for a slow reader without holding up the loop.

    Raises:
        ConfigurationError: There is none.
    """

    def __init__(self) -> None:
        if sys.stdout is None:
            raise ConfigurationError("tail", "there is no standard output")
        self._fd = 1
        self.is_terminal = os.isatty(self._fd)
        self._thread = Blocking("eventpump output")

    async def write(self, data: bytes) -> None:
        """Write all of it, in one piece.

        Raises:
            OSError: It failed; `BrokenPipeError` where its reader has gone.
        """

        def write_all() -> None:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(self._fd, rest) :]

        await self._thread.run(write_all)

    @contextlib.contextmanager
    def watched(self, closed: Callable[[], None]) -> Iterator[None]:
        """Have a function called when the reader of a pipe goes, even while there is nothing to write."""
        loop = asyncio.get_running_loop()
        if not stat.S_ISFIFO(os.fstat(self._fd).st_mode):
            yield
            return

        def gone() -> None:
            loop.remove_reader(self._fd)
            closed()

        # The end for writing becomes "readable" when the other end is closed, and at no other time.
        loop.add_reader(self._fd, gone)
        try:
            yield
        finally:
            loop.remove_reader(self._fd)


class Interrupts:
    """SIGINT and SIGTERM, in a `with` block: the first asks to finish, the second to give up, the third ends it.

    Args:
        grace: Seconds to finish in before giving up.
    """

    def __init__(self, grace: float) -> None:
        self._grace = grace
        self._timer: asyncio.TimerHandle | None = None
        self.finish = asyncio.Event()
        self.give_up = asyncio.Event()
        self.number: signal.Signals | None = None
        """The first signal."""

    @property
    def exit_code(self) -> int:
        """The exit code that tells of it; 0 without one."""
        return 0 if self.number is None else 128 + self.number

    def __enter__(self) -> Self:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._arrived, number)
        return self

    def __exit__(self, *exc: object) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
        if self._timer is not None:
            self._timer.cancel()

    def _arrived(self, number: signal.Signals) -> None:
        if self.number is None:
            self.number = number
            self.finish.set()
            self._timer = asyncio.get_running_loop().call_later(self._grace, self.give_up.set)
        elif not self.give_up.is_set():
            self.give_up.set()
        else:
            os._exit(128 + number)


def say(text: str) -> None:
    """Print a line, to nobody where whoever read it has gone."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # Or the interpreter would try again, and complain, at its end.
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.close(null)


def complain(text: str) -> None:
    """Print a line on the standard error."""
    with contextlib.suppress(OSError):
        print(f"eventpump: {text}", file=sys.stderr, flush=True)


def _reason(error: Exception) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)
