"""Input, output and signals of the command, and its connection options."""

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

from eventpump.aio.signals import handling_signals
from eventpump.cli.logs import complain as complain
from eventpump.cli.main import CONNECTION_VARIABLE
from eventpump.cli.outages import FIRST_CONTACT
from eventpump.errors import ConfigurationError
from eventpump.options.connection import ConnectionOptions, TransportType, checked_hub
from eventpump.options.connection_string import ConnectionString
from eventpump.options.environment import (
    CONNECTION_STRING,
    CONSUMER_GROUP,
    HUB,
    NAMESPACE,
    Environment,
)

T = TypeVar("T")

_ENVIRONMENT: Final = Environment()
HUB_VARIABLE: Final = _ENVIRONMENT.name(HUB)
GROUP_VARIABLE: Final = _ENVIRONMENT.name(CONSUMER_GROUP)
DEFAULT_GROUP: Final = "$Default"

_CHUNK: Final = 1 << 18


def add_connection_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--connection-string", metavar="TEXT", help=f"the connection string (default: ${CONNECTION_VARIABLE})"
    )
    help_text = f"the hub's name (default: ${HUB_VARIABLE}, or the connection string's EntityPath)"
    parser.add_argument("--hub", metavar="NAME", help=help_text)
    parser.add_argument(
        "--transport-type", choices=get_args(TransportType), default="tcp", help="the transport of AMQP (default: tcp)"
    )
    parser.add_argument("--trust-env", action="store_true", help="use the proxy in $HTTPS_PROXY")
    parser.add_argument("--ca-file", metavar="FILE", help="CA certificates (PEM) to trust instead of the system's")


def add_patience(parser: argparse.ArgumentParser) -> None:
    """Add the option of subcommands that wait for a service that is out of reach."""
    parser.add_argument(
        "--retry-for",
        metavar="S",
        help=f"seconds to wait for a service that cannot be reached (default: {FIRST_CONTACT:g} at the start, and then "
        "no limit)",
    )


def patience(args: argparse.Namespace) -> float | None:
    """Return the value of that option in seconds; None if it is not given. Raises `ConfigurationError` for another
    text."""
    return None if args.retry_for is None else float(whole_number("--retry-for", args.retry_for, 0, 10**9))


def keep_quiet() -> None:
    """Suppress warnings about retries, which would break the progress bar or the output; errors end in one line."""
    logging.getLogger("eventpump").setLevel(logging.ERROR)


def connection_options(args: argparse.Namespace) -> ConnectionOptions:
    """Return the values of those options, except for the connection string and the hub."""
    options = ConnectionOptions(transport_type=args.transport_type, trust_env=args.trust_env)
    if args.ca_file is not None:
        options["ca_file"] = args.ca_file
    return options


def connection_text(args: argparse.Namespace) -> str:
    """Return the connection string. Raises `ConfigurationError` if neither the option nor the variable is set."""
    text: str | None = args.connection_string
    if text:
        return text
    text = _ENVIRONMENT.get(CONNECTION_STRING) if text is None else None
    if text is None:
        problem = f"is required, here or in {CONNECTION_VARIABLE}"
        if _ENVIRONMENT.get(NAMESPACE) is not None:
            problem += f": the command signs in with keys only, and {_ENVIRONMENT.name(NAMESPACE)} has none"
        raise ConfigurationError("--connection-string", problem)
    try:
        ConnectionString.parse(text)
    except ConfigurationError as error:
        problem = error.problem if error.field == "connection_string" else f"{error.field}: {error.problem}"
        raise ConfigurationError(_ENVIRONMENT.name(CONNECTION_STRING), problem) from None
    return text


def hub_name(args: argparse.Namespace) -> str | None:
    """Return the hub that is given, or that of the environment; None for that of the connection string."""
    name: str | None = args.hub
    if name is not None or (hub := _ENVIRONMENT.get(HUB)) is None:
        return name
    if args.connection_string and ConnectionString.parse(args.connection_string).hub is not None:
        return None  # what is given counts
    try:
        checked_hub(hub)
    except ConfigurationError as error:
        raise ConfigurationError(HUB_VARIABLE, error.problem) from None
    parsed = ConnectionString.parse(connection_text(args)).hub
    if parsed is not None and parsed.lower() != hub.lower():
        problem = f"is not the hub that EntityPath of {CONNECTION_VARIABLE} names"
        raise ConfigurationError(HUB_VARIABLE, problem)
    return hub


def add_group_option(parser: argparse.ArgumentParser, text: str) -> None:
    help_text = f"{text} (default: ${GROUP_VARIABLE}, or {DEFAULT_GROUP})"
    parser.add_argument(
        "--consumer-group",
        default=_ENVIRONMENT.get(CONSUMER_GROUP) or DEFAULT_GROUP,
        metavar="NAME",
        help=help_text,
    )


def whole_number(field: str, text: str, lowest: int, highest: int) -> int:
    """Parse an option's number. Raises `ConfigurationError` if it is none, or outside the range."""
    if not text.isascii() or not text.isdigit() or len(text) > 19 or not lowest <= int(text) <= highest:
        raise ConfigurationError(field, f"must be a number from {lowest} to {highest}, not {text[:40]!r}")
    return int(text)


class Blocking:
    """A thread for calls that may block forever: reading from a terminal, writing to a pager.

    It is a daemon thread, so such a call does not prevent the process from ending.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], asyncio.Future[Any]]] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name=name, daemon=True).start()

    async def run(self, call: Callable[[], T]) -> T:
        """Run a call after earlier ones, and return its result. The call is made even if this is cancelled."""
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
            except Exception as error:  # raised in the caller
                failure = error
            # The loop may be closed: then no caller is waiting.
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
    """The lines of a file, a pipe or a terminal, as they arrive.

    A line ends with LF or CR LF, which are not part of it; they are optional at the end of the last line.

    Args:
        name: A path; None or "-" for the standard input.

    Raises:
        ConfigurationError: The file cannot be opened.
    """

    def __init__(self, name: str | None) -> None:
        if name is None or name == "-":
            if sys.stdin is None:
                raise ConfigurationError("FILE", "there is no standard input")
            self._fd = 0
        else:
            try:
                self._fd = os.open(name, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0))
            except (OSError, ValueError) as error:
                raise ConfigurationError("FILE", f"{name}: {_reason(error)}") from None
        status = os.fstat(self._fd)
        if stat.S_ISDIR(status.st_mode):
            raise ConfigurationError("FILE", f"{name or '-'}: {os.strerror(errno.EISDIR)}")
        self.is_file = stat.S_ISREG(status.st_mode)
        """Whether all of it can be read at once."""
        self.is_terminal = os.isatty(self._fd)
        self._thread: Blocking | None = None
        self._begun = b""
        self.longest = 1 << 20
        """The most bytes of a line that are kept. A longer line is cut to one byte more."""

    @property
    def remaining(self) -> int | None:
        """Bytes to its end; None if unknown."""
        if not self.is_file:
            return None
        return max(0, os.fstat(self._fd).st_size - os.lseek(self._fd, 0, os.SEEK_CUR))

    async def read(self) -> list[bytes]:
        """Wait for one or more lines; none at the end. Raises `OSError` if reading failed."""
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
        """Count the lines of a file that were not read yet. No read may be in progress."""
        count, last = 0, self._begun[-1:]
        with contextlib.suppress(OSError):
            while chunk := os.read(self._fd, _CHUNK):
                count += chunk.count(b"\n")
                last = chunk[-1:]
        return count + (last not in (b"", b"\n"))


class Output:
    """The standard output, for lines of bytes. Writing waits for a slow reader without blocking the loop."""

    def __init__(self) -> None:
        if sys.stdout is None:
            raise ConfigurationError("tail", "there is no standard output")
        self._fd = 1
        self.is_terminal = os.isatty(self._fd)
        self._thread = Blocking("eventpump output")

    async def write(self, data: bytes) -> None:
        """Write all of it, in one piece. Raises `OSError`: a `BrokenPipeError` if the reader has closed the pipe."""

        def write_all() -> None:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(self._fd, rest) :]

        await self._thread.run(write_all)

    @contextlib.contextmanager
    def watched(self, closed: Callable[[], None]) -> Iterator[None]:
        """Call a function when the reader closes the pipe, even while there is nothing to write."""
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
    """Handle SIGINT and SIGTERM: the first asks to finish within `grace` seconds, the second gives up, the third
    kills."""

    def __init__(self, grace: float) -> None:
        self._grace = grace
        self._timer: asyncio.TimerHandle | None = None
        self._handling = contextlib.ExitStack()
        self.finish = asyncio.Event()
        self.give_up = asyncio.Event()
        self.number: signal.Signals | None = None
        """The first signal."""

    @property
    def exit_code(self) -> int:
        """The exit code for the signal; 0 without one."""
        return 0 if self.number is None else 128 + self.number

    def __enter__(self) -> Self:
        self._handling.enter_context(handling_signals(self._arrived))
        return self

    def __exit__(self, *exc: object) -> None:
        self._handling.close()
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
    """Print a line; ignored if the reader has closed the pipe."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # Otherwise the interpreter would try again at exit, and print an error.
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.close(null)


def _reason(error: Exception) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)
