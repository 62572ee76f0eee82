"""Fails the test in which a credential shows itself: a pytest plugin over the whole run.

It reads every log record down to DEBUG (of those of AMQP frames, the first of each test and program), of this process
and of every Python process a test starts; what the processes print; the text of every error of eventpump as it is made;
and, in the suites that stand on real parts, the repr of what is alive at the end of each test. It looks for the keys,
signatures and tokens that the run uses, and for what looks like one.
"""

from __future__ import annotations

import asyncio.subprocess
import gc
import os
import re
import subprocess
from collections import Counter
from collections.abc import Generator
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import pydantic
import pytest
from hypothesis import currently_in_test_context

from eventpump import errors
from eventpump.emulator.auth import DEFAULT_KEY
from eventpump.eventhubs.requests import SecretText
from tests.leaks.log_tap import Renew, tap
from tests.support.azurite import Azurite

_SHAPES = re.compile(
    "|".join(
        (
            r"SharedAccessKey=[^;\s*<']{4,}",
            r"\bsig=[\w%+/]{16,}",
            r"(?<![\w+/=%-])[A-Za-z0-9+/]{43}(?:=(?!=)|%3D)",  # an HMAC of 32 bytes, as a signature has it
            r"(?<![A-Za-z0-9+/])[A-Za-z0-9%]{43,80}%3D(?![\w%])",  # the same, with its other signs escaped
            r"\beyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]{8,}",  # a JSON web token
        )
    )
)
"""What a credential looks like."""
_PARTS = ("SharedAccessKey=", "sig=", "%3D", "eyJ")
_END_OF_A_KEY = re.compile(r"=(?!=)(?<=[A-Za-z0-9+/]{43}=)")
"""What each of the shapes holds, one or the other: looked for first, in a twentieth of the time. A run has two million
texts."""
_MEANT = re.compile(
    r"Endpoint=sb://[^;]+;SharedAccessKeyName=[^;]+;SharedAccessKey=[^;]+(;UseDevelopmentEmulator=true)?"
    r"|\s*SAS_KEY_VALUE\)"
)
"""Whole lines that a program prints for its user: the connection string of the emulator, and its help on the key."""
_SHORTEST = 8
"""A secret of fewer characters is as good as a word, and is not looked for."""
_REPRS_PER_CLASS = 3


class LeakedError(Exception):
    """A credential showed itself."""


@dataclass(frozen=True)
class Leak:
    """Where a credential showed itself: the source, and the text with its middle cut out."""

    source: str
    text: str


class LeakWatch:
    """The plugin. Its hooks are called by pytest; `look` by the taps that :meth:`pytest_sessionstart` lays."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._constants = {DEFAULT_KEY, Azurite().account_key}
        self._secrets = set(self._constants)
        self._leaks: list[Leak] = []
        self._late: list[str] = []
        self._pieces: dict[tuple[object, int], bytes] = {}
        self._read: Counter[str] = Counter()
        self._is_off = False
        self._was_unit = False
        self._renew_tap: Renew = lambda *, off=False: None
        self.looked: Counter[str] = Counter()
        """How many texts of each source were looked at."""

    # ---------------------------------------------------------------------------------------------------- looking

    def remember(self, secret: object) -> None:
        """Register a secret that the current test uses."""
        if not self._is_off and isinstance(secret, str) and len(secret) >= _SHORTEST:
            self._secrets.add(secret)

    def look(self, source: str, text: str) -> None:
        """Look at a text."""
        if self._is_off:
            return
        self.looked[source] += 1
        for secret in tuple(self._secrets):  # a copy: other threads make tokens meanwhile
            if secret in text:
                if secret == DEFAULT_KEY and currently_in_test_context():
                    return  # Hypothesis draws texts from the constants of the source, this one among them
                found = secret
                break
        else:
            for part in _PARTS:
                if part in text:
                    break
            else:
                if "=" not in text or _END_OF_A_KEY.search(text) is None:
                    return
            if (shaped := _SHAPES.search(text)) is None:
                return
            found = shaped.group()
        if not _MEANT.fullmatch(text):
            place = text.index(found)
            shown = f"{text[max(0, place - 200) : place]}{found[:4]}[...]{text[place + len(found) :][:100]}"
            self._leaks.append(Leak(source, shown))

    def _look_at_output(self, stream: tuple[object, int], data: bytes) -> None:
        """Look at what a child printed, by whole lines."""
        *lines, rest = (self._pieces.pop(stream, b"") + data).split(b"\n")
        for line in lines:
            self.look("output", line.decode(errors="replace"))
        if rest:
            self._pieces[stream] = rest

    def _look_at_children(self) -> None:
        """Look at what they printed since without ending a line, and at what they logged."""
        while self._pieces:
            self.look("output", self._pieces.popitem()[1].decode(errors="replace"))
        with os.scandir(self._directory) as files:
            # A file for each child so far: most have nothing new, and this comes after every test.
            grown = [file.path for file in files if file.stat().st_size > self._read[file.path]]
        for file in grown:
            with Path(file).open("rb") as log:
                log.seek(self._read[file])
                data = log.read()
            whole = data.rfind(b"\n") + 1
            self._read[file] += whole
            for line in data[:whole].decode(errors="replace").splitlines():
                self.look("log of a child", line)

    def _look_at_reprs(self) -> None:
        left: dict[Any, int] = {}  # by class, how many are to be shown
        for living in gc.get_objects():
            kind: Any = type(living)
            wanted = left.get(kind)
            if wanted is None:
                is_ours = str(kind.__module__).startswith("eventpump") and kind.__repr__ is not object.__repr__
                wanted = left[kind] = _REPRS_PER_CLASS if is_ours else 0
            if wanted:
                left[kind] = wanted - 1
                try:
                    text = repr(living)
                except Exception:  # one that is half made or half gone
                    continue
                self.look("repr", text)

    def _check(self) -> None:
        leaks, self._leaks = self._leaks, []
        if leaks:
            raise LeakedError("\n".join(f"in the {leak.source}: {leak.text}" for leak in leaks))

    # ------------------------------------------------------------------------------------------------------- hooks

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Lay the taps: from now on, for the life of this process."""
        if session.config.pluginmanager.hasplugin("dsession"):
            # This process only distributes, with pytest-xdist. Its workers lay their own; as its children they would
            # also log to it.
            return
        here = Path(__file__).parent / "children"
        os.environ["EVENTPUMP_LEAK_LOGS"] = str(self._directory)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(here), os.environ.get("PYTHONPATH"))))
        self._renew_tap = tap(lambda text: self.look("log", text))
        _after(errors.EventPumpError, "__init__", self._look_at_error)
        _after(pydantic.SecretStr, "__init__", lambda made: self.remember(made.get_secret_value()))
        _after(SecretText, "__init__", self.remember)
        self._watch_children()

    def _look_at_error(self, error: errors.EventPumpError) -> None:
        self.look("error", str(error))
        self.look("error", repr(error))

    def _watch_children(self) -> None:
        protocol: Any = asyncio.subprocess.SubprocessStreamProtocol
        popen: Any = subprocess.Popen
        received, communicate = protocol.pipe_data_received, popen.communicate

        @wraps(received)
        def pipe_data_received(child: Any, fd: int, data: bytes) -> None:
            self._look_at_output((child, fd), data)
            received(child, fd, data)

        @wraps(communicate)
        def communicated(child: Any, *arguments: Any, **options: Any) -> Any:
            outputs = communicate(child, *arguments, **options)
            for fd, output in enumerate(outputs):
                data = output.encode() if isinstance(output, str) else output or b""
                self._look_at_output((child, fd), data + b"\n")
            return outputs

        protocol.pipe_data_received = pipe_data_received
        popen.communicate = communicated

    def pytest_collection_finish(self) -> None:
        """Leave what is there before the first test out of the looks at what is alive."""
        gc.collect()
        gc.freeze()

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Look away from a test whose tokens are any text: half of what it says would hold one."""
        is_unit = _is_unit(item)
        if self._is_off or (self._was_unit and not is_unit):
            gc.collect()  # or the garbage of tests that are not looked at is found among what is alive after this one
        self._was_unit = is_unit
        self._is_off = item.get_closest_marker("made_up_tokens") is not None
        self._renew_tap(off=self._is_off)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, None, None]:
        """Fail a test that leaked, once its fixtures are gone too."""
        if not _is_unit(item):
            self._look_at_reprs()
        yield
        self._look_at_children()
        self._secrets = set(self._constants)
        self._check()

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail a run in which something leaked after the last test."""
        self._look_at_children()
        try:
            self._check()
        except LeakedError as error:
            self._late.append(str(error))
        if (output := getattr(session.config, "workeroutput", None)) is not None:  # a worker of pytest-xdist
            output["leaks"] = {"looked": dict(self.looked), "late": self._late}
        elif self._late:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Add what a worker of pytest-xdist found; one that crashed has failed its test, and sends nothing."""
        if (found := getattr(node, "workeroutput", {}).get("leaks")) is not None:
            self.looked.update(found["looked"])
            self._late += found["late"]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Say how much was looked at."""
        if self._late:
            terminalreporter.section("credentials leaked after the last test", red=True, bold=True)
            terminalreporter.line("\n".join(self._late))
        counts = ", ".join(f"{count} {source}" for source, count in sorted(self.looked.items()))
        terminalreporter.line(f"looked for credentials in: {counts or 'nothing'}")


def _is_unit(item: pytest.Item) -> bool:
    return "unit" in item.path.parts


def _after(kind: type, name: str, then: Any) -> None:
    """Have something called with each object after a method of its making."""
    method = getattr(kind, name)

    @wraps(method)
    def wrapped(made: Any, *arguments: Any, **options: Any) -> None:
        if method is not object.__init__:
            method(made, *arguments, **options)
        then(made)

    setattr(kind, name, wrapped)
