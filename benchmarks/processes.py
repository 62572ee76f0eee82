"""The processes of a benchmark: the emulator, and each side."""

from __future__ import annotations

import json
import os
import platform
import queue
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Final, Self

if TYPE_CHECKING:
    from benchmarks.certificates import Certificate

CHECKOUT = Path(__file__).resolve().parents[1]
START_TIMEOUT = 30.0
PREPARE_TIMEOUT = 120.0
"""Seconds that the canned service may take to prepare its bytes."""
STOP_TIMEOUT = 10.0

READY = "ready"
"""What a side prints on a line of its own once it has come to rest, where it waits for the command to go on."""


class BenchmarkError(Exception):
    """A side or the emulator failed; the text says how."""


class Process:
    """A Python process that talks in lines on stdin and stdout; its stderr is shown when it fails."""

    def __init__(self, *arguments: str, variables: Mapping[str, str] | None = None) -> None:
        self._what = " ".join(arguments[:2])
        self._process = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            cwd=CHECKOUT,
            env={**os.environ, "PYTHONPATH": str(CHECKOUT), **(variables or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
        )
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._errors: list[str] = []
        self._threads = [
            threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True),
            threading.Thread(target=self._errors.extend, args=(self._process.stderr,), daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def _read(self, stream: IO[str]) -> None:
        for line in stream:
            self._lines.put(line.rstrip("\n"))
        self._lines.put(None)

    def line(self, timeout: float) -> str:
        """Wait for a line.

        Raises:
            BenchmarkError: None came, or the process ended.
        """
        try:
            line = self._lines.get(timeout=timeout)
        except queue.Empty:
            raise BenchmarkError(f"{self._what}: nothing within {timeout:.0f} s") from None
        if line is None:
            self._process.wait()
            self._threads[1].join()
            said = "".join(self._errors).strip()[-3000:]
            raise BenchmarkError(f"{self._what}: ended with code {self._process.returncode}\n{said}")
        return line

    def tell(self, line: str) -> None:
        """Send a line."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def stop(self) -> None:
        """Stop it, by force if necessary. May be called twice."""
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for thread in self._threads:
            thread.join()
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            assert stream is not None
            stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


class EmulatorProcess(Process):
    """The emulator, in a process of its own, with one hub.

    Args:
        partitions: Of the hub `HUB`.
        arguments: Of the command, besides.
    """

    HUB = "bench"

    def __init__(self, partitions: int, *arguments: str) -> None:
        hub = f"{self.HUB}:{partitions}"
        super().__init__("eventpump.cli.main", "emulator", "--hub", hub, "--port", "0", *arguments)
        try:
            while not (line := self.line(START_TIMEOUT)).startswith("Endpoint="):
                pass
        except BaseException:
            self.stop()
            raise
        self.partitions = partitions
        self.connection_string = line


class CannedService(Process):
    """The service of prepared bytes (`benchmarks.canned`), in a process of its own, with one hub.

    Args:
        kind: Of the events it holds, one of `benchmarks.events.KINDS`.
        partitions: Of the hub `HUB`.
        events: How many it holds, over all partitions.
        certificate: What it serves TLS with; None is plain TCP.
        pace: How its events come, as keyword arguments of `benchmarks.canned.Pace`; None if all are there from the
            start.
    """

    HUB = "bench"

    def __init__(
        self,
        kind: str,
        partitions: int,
        events: int,
        certificate: Certificate | None = None,
        pace: Mapping[str, object] | None = None,
    ) -> None:
        files = {} if certificate is None else {"cert": certificate.chain, "key": certificate.key}
        arguments = {"kind": kind, "partitions": partitions, "events": events, "pace": pace, **files}
        super().__init__("benchmarks.canned", json.dumps(arguments))
        try:
            port, raw_port = json.loads(self.line(PREPARE_TIMEOUT))
        except BaseException:
            self.stop()
            raise
        self.partitions = partitions
        self.certificate = certificate
        self.raw_port = int(raw_port)
        """Where the same bytes come from without being asked for."""
        emulator = ";UseDevelopmentEmulator=true" if certificate is None else ""
        self.connection_string = (
            f"Endpoint=sb://127.0.0.1:{port};SharedAccessKeyName=canned;SharedAccessKey=canned{emulator}"
        )

    def place(self, side: str) -> dict[str, object]:
        """Return the arguments that say where to connect: of our sides and floors, or of a peer's."""
        place: dict[str, object] = {"connection_string": self.connection_string, "hub": self.HUB}
        if self.certificate is not None:
            option = "ca_file" if side.partition(":")[0] in ("ours", "floors") else "connection_verify"
            place["options"] = {option: self.certificate.authority}
        return place

    def counts(self) -> Mapping[str, float]:
        """Return what it did so far.

        `events` and `bytes` came from producers, `delivered` events went to readers, `cpu` is the seconds it took.
        `size` is that of all its events together, as they come from the `raw_port`. Where events come at a pace, the
        file of the moments when they were written is complete to this moment.
        """
        self.tell("counts")
        counts: Mapping[str, float] = json.loads(self.line(START_TIMEOUT))
        return counts


class Side(Process):
    """One side of a benchmark, in a process of its own: a function of `benchmarks.sides`.

    Args:
        function: Its name, as `module:function`.
        loop: The event loop of a side that has one: `asyncio` or `uvloop`.
        is_pure: Whether it does without the compiled core, if there is one.
        arguments: Its keyword arguments, as JSON can carry them.
    """

    def __init__(self, function: str, loop: str = "asyncio", is_pure: bool = False, /, **arguments: object) -> None:
        variables = {"EVENTPUMP_PURE": "1"} if is_pure else {}
        super().__init__("benchmarks.sides", function, json.dumps(arguments), loop, variables=variables)

    def wait_ready(self, timeout: float) -> None:
        """Wait until it says it is ready.

        Raises:
            BenchmarkError: It did not.
        """
        if (line := self.line(timeout)) != READY:
            raise BenchmarkError(f"{self._what}: said {line!r} instead of being ready")

    def go_on(self) -> None:
        """Let it go on from where it said it was ready."""
        self.tell("go")

    def result(self, timeout: float) -> Mapping[str, float]:
        """Wait for its result.

        Raises:
            BenchmarkError: It failed.
        """
        result: Any = json.loads(self.line(timeout))
        return {str(key): float(value) for key, value in result.items()}


class LimitedEmulator(Side):
    """The emulator in a process of its own, with the service's limit of requests (`benchmarks.sides.limited`).

    Args:
        hubs: How many partitions each hub has, by name.
        consumer_groups: Those that each hub has, besides `$Default`.
    """

    def __init__(self, hubs: Mapping[str, int], consumer_groups: Sequence[str] = ()) -> None:
        super().__init__("limited:service", hubs=hubs, consumer_groups=consumer_groups)
        try:
            self.connection_string = self.line(START_TIMEOUT)
        except BaseException:
            self.stop()
            raise


def run_side(
    function: str, timeout: float, loop: str = "asyncio", is_pure: bool = False, /, **arguments: object
) -> Mapping[str, float]:
    """Run a side to its end and return its result.

    Raises:
        BenchmarkError: It failed.
    """
    with Side(function, loop, is_pure, **arguments) as side:
        return side.result(timeout)


PURE: Final = "pure Python"
"""The build without the compiled core."""


def build() -> str:
    """Return which build of the package is measured."""
    from eventpump.reports import build_info

    return str(build_info())


def is_compiled() -> bool:
    """Return whether there are two builds to measure: this one with the compiled core, and pure Python."""
    return build() != PURE


def version(distribution: str) -> str | None:
    """Return the installed version of a distribution, None where it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def machine() -> str:
    """Return the machine's processors and system in a line."""
    processor = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        names = [
            line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        processor = names[0] if names else processor
    return f"{os.cpu_count()} × {processor}, {platform.system()} {platform.release()}"


def versions() -> dict[str, str]:
    """Return the versions of Python and of what the benchmarks compare, by name."""
    return {
        platform.python_implementation(): platform.python_version(),
        **{name: version(name) or "not installed" for name in ("eventpump", "azure-eventhub", "uvloop")},
    }
