"""azure-eventhub's own live tests, from its source distribution, against the emulator."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import certifi

from eventpump import Emulator
from eventpump.emulator.auth import DEFAULT_KEY, DEFAULT_KEY_NAME, VerifiedToken
from eventpump.errors import ConfigurationError, StoreError
from tests.authority import Authority
from tests.suites import Outcome, Result
from tests.support.node import user_cache
from tests.support.venv import python_with

HOST = "127.0.0.1"
PORT, WS_PORT = 5671, 443
"""The ports of the service: most of the tests have no option for others."""
WORKERS = 6
"""Processes of pytest by default: nearly all that the tests do is to wait."""

_NAME = "azure-eventhub"
_FOLDERS = ("livetest", "pyamqp_tests/synctests", "pyamqp_tests/asynctests")
_PLUGIN = Path(__file__).with_name("plugin")
_HUBS = 500
"""More than there are tests."""
_FETCH_TIMEOUT = 300.0
_BESIDE = (
    "aiohttp",
    "azure-eventhub-checkpointstoreblob",
    "azure-eventhub-checkpointstoreblob-aio",
    "azure-identity",
    "certifi",
    "pytest",
    "pytest-asyncio",
    "pytest-xdist",
    "python-dotenv",
    "websocket-client",
)


def version() -> str:
    """Return the version that this project is tested with."""
    for requirement in importlib.metadata.requires("eventpump") or ():
        if found := re.match(rf"{_NAME}==([\w.]+)", requirement):
            return found[1]
    raise ConfigurationError(_NAME, "no version is pinned; install eventpump[test]")


def fetch(directory: Path | None = None) -> Path:
    """Fetch the source distribution from PyPI where it is not yet.

    Args:
        directory: Where it is kept; None for the user's cache directory.

    Returns:
        The directory of its tests.

    Raises:
        StoreError: Pip failed.
    """
    home = (directory or user_cache()) / f"{_NAME}-{version()}-sdist"
    unpacked = home / f"azure_eventhub-{version()}"
    # It came into being by one rename, so it is whole.
    if not unpacked.is_dir():
        home.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f"{home.name}.", dir=home.parent))
        try:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--no-deps"]
            command += ["--no-binary", ":all:", f"{_NAME}=={version()}"]
            done = subprocess.run(
                command, cwd=staging, capture_output=True, text=True, timeout=_FETCH_TIMEOUT, check=False
            )
            if done.returncode != 0:
                raise StoreError(f"fetch {_NAME}", f"pip failed: {done.stderr.strip()[-1000:]}")
            (archive,) = staging.glob("*.tar.gz")
            with tarfile.open(archive) as tar:
                tar.extractall(staging, filter="data")
            with contextlib.suppress(OSError):  # another process was first; its files are as good
                staging.rename(home)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    return unpacked / "tests"


async def run(tests: Sequence[str] = (), *, workers: int = WORKERS) -> dict[str, Result]:
    """Run the suite, and show on stdout what its pytest prints.

    Args:
        tests: The ids of tests, as pytest takes them below the suite's `tests/`; none for all.
        workers: Processes of pytest.

    Returns:
        The result of each test, by its id.

    Raises:
        ConfigurationError: The ports cannot be listened on.
        StoreError: The suite, or what it requires, could not be installed.
    """
    below = await asyncio.to_thread(fetch)
    python = await asyncio.to_thread(python_with, f"{_NAME}=={version()}", *_BESIDE)
    with tempfile.TemporaryDirectory(prefix="eventpump-suite-") as scratch:
        work = Path(scratch)
        authority = Authority.new(work)
        authorities = work / "authorities.pem"
        authorities.write_text(certifi.contents() + authority.file.read_text())
        hubs = [f"hub-{number:03}" for number in range(_HUBS)]
        free = work / "hubs"
        free.mkdir()
        for hub in hubs:
            (free / hub).touch()
        (work / "pytest.ini").write_text("[pytest]\nasyncio_default_fixture_loop_scope = function\n")
        report = work / "report.xml"
        command = [str(python), "-m", "pytest", "-c", str(work / "pytest.ini"), "--rootdir", str(below)]
        command += ["-p", "hosted", "-p", "no:cacheprovider", "-n", str(workers), "--sleep", "False"]
        command += ["-rfE", "-W", "ignore", "--tb=short", "--show-capture=no", f"--junitxml={report}"]
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")},
            "PYTHONPATH": str(_PLUGIN),
            "PYTHONDONTWRITEBYTECODE": "1",
            "SUITE_HUBS": str(free),
            "SUITE_AUTHORITIES": str(authorities),
            "SUITE_KEY": f"{DEFAULT_KEY_NAME}:{DEFAULT_KEY}",
            "EVENT_HUB_NAMESPACE": HOST,
            "EVENT_HUB_ENDPOINT_SUFFIX": "",
            "EVENTHUB_RESOURCE_GROUP": "none",
            "AZURE_SUBSCRIPTION_ID": "none",
        }
        async with Emulator(
            dict.fromkeys(hubs, 2),
            host=HOST,
            port=PORT,
            ws_port=WS_PORT,
            tls=authority.server("localhost", HOST),
            token_verifier=lambda _: VerifiedToken(time.time() + 3600),
        ):
            process = await asyncio.create_subprocess_exec(
                *command, *(tests or _FOLDERS), cwd=below, env=environment, stdin=asyncio.subprocess.DEVNULL
            )
            try:
                await process.wait()
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
        return results_of(report) if report.exists() else {}


def results_of(report: Path) -> dict[str, Result]:
    """Read pytest's report in the form of JUnit."""
    results: dict[str, Result] = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        test = f"{case.get('classname', '').removeprefix('tests.').replace('.', '/')}.py::{case.get('name')}"
        result = Result(Outcome.PASSED)
        for child in case:
            if child.tag in ("failure", "error"):
                result = Result(Outcome.FAILED, (child.get("message") or "").strip().partition("\n")[0])
                break
            if child.tag == "skipped":
                result = Result(Outcome.SKIPPED, child.get("message") or "")
        # A test whose teardown fails comes twice.
        if test not in results or result.outcome is Outcome.FAILED:
            results[test] = result
    return results
