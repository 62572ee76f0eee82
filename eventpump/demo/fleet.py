"""The processes of the demo: the service and the hosts."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eventpump.errors import EventPumpError
from eventpump.options.connection import ClientOptions

STOP_TIMEOUT = 20.0
"""Seconds that a process may take to stop on request."""
_RATE_WINDOW = 2.0


class DemoError(EventPumpError):
    """A process of the demo failed."""


class Meter:
    """A count's rate over the last seconds."""

    def __init__(self) -> None:
        self._points: deque[tuple[float, int]] = deque()

    def note(self, count: int) -> None:
        """Record the current count."""
        now = time.monotonic()
        self._points.append((now, count))
        while len(self._points) > 2 and self._points[1][0] < now - _RATE_WINDOW:
            self._points.popleft()

    @property
    def rate(self) -> float:
        """Events per second."""
        if len(self._points) < 2:
            return 0.0
        (begin, before), (end, after) = self._points[0], self._points[-1]
        if time.monotonic() - end > _RATE_WINDOW or end <= begin:
            return 0.0
        return max(0.0, (after - before) / (end - begin))


class LocalService:
    """`eventpump emulator` in its own process."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self.connection_string = ""
        """The connection string for clients."""

    async def start(self, hubs: Mapping[str, int], tls: Sequence[str] = (), *, is_websocket: bool = False) -> None:
        """Start it, with the hubs and their partition counts, and wait until it accepts connections: else a
        `DemoError`."""
        ports = ["--port", "0", *(["--ws-port", "0"] if is_websocket else [])]
        arguments = [argument for hub, count in hubs.items() for argument in ("--hub", f"{hub}:{count}")]
        process = self._process = await asyncio.create_subprocess_exec(
            *python("eventpump.cli.main", "emulator", *arguments, *ports, *tls, "--stop-with-stdin"),
            stdin=asyncio.subprocess.PIPE,  # it ends with this process, even if this one is killed
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        assert process.stdout is not None
        assert process.stderr is not None
        lines = [(await process.stdout.readline()).decode().strip() for _ in ports[::2]]
        line = lines[-1]
        if not line.startswith("Endpoint="):
            reason = (await process.stderr.read()).decode(errors="replace").strip()
            raise DemoError(f"the local service did not start: {reason}")
        self.connection_string = line

    async def stop(self) -> None:
        """Request its end, and wait for it. Does nothing if it was not started."""
        if self._process is not None:
            if self._process.returncode is None:
                self._process.send_signal(signal.SIGTERM)
            await ended(self._process)

    def kill(self) -> None:
        """Kill it. Does nothing if it does not run."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()


@dataclass(slots=True)
class HostProcess:
    """One processor host and its last status; `killed_at` is in seconds since the Unix epoch, None if not killed."""

    name: str
    process: asyncio.subprocess.Process
    records: Path
    archive: Path
    log: Path
    reader: asyncio.Task[None] | None = None
    processed: int = 0
    partitions: dict[str, dict[str, Any]] = field(default_factory=dict)
    archived: dict[str, dict[str, Any]] = field(default_factory=dict)
    meter: Meter = field(default_factory=Meter)
    killed_at: float | None = None
    heard: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def state(self) -> str:
        """The state in one word."""
        if self.killed_at is not None:
            return "killed"
        return "running" if self.process.returncode is None else "stopped"

    @property
    def is_running(self) -> bool:
        """Whether it may currently process events."""
        return self.state == "running"

    async def read_status(self) -> None:
        """Read its status lines until it ends."""
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            said = json.loads(line)
            self.processed, self.partitions, self.archived = said["processed"], said["partitions"], said["archive"]
            self.meter.note(self.processed)
            self.heard.set()
        await self.process.wait()
        if self.killed_at is not None:
            self.partitions = {}
        self.heard.set()

    def kill(self) -> None:
        """Kill it, without cleanup."""
        self.killed_at = time.time()
        self.process.send_signal(signal.SIGKILL)

    def complaint(self) -> str:
        """The last line of its log."""
        lines = self.log.read_text(errors="replace").splitlines()
        return lines[-1] if lines else f"exit code {self.process.returncode}"


@dataclass(slots=True)
class Fleet:
    """All processes of the demo, with a folder of leases, records and logs."""

    folder: Path
    hub: str
    partitions: int
    lease_duration: float
    options: ClientOptions
    hosts: list[HostProcess] = field(default_factory=list)
    _service: LocalService = field(default_factory=LocalService)

    @property
    def connection_string(self) -> str:
        """The connection string for clients of the service."""
        return self._service.connection_string

    async def start_service(self) -> None:
        """Start the local service and wait until it accepts connections. Raises `DemoError` if it does not start."""
        tls = self._certify() if self.options.get("transport") == "uamqp" else []
        is_websocket = self.options.get("transport_type") == "websocket"
        await self._service.start({self.hub: self.partitions}, tls, is_websocket=is_websocket)

    def _certify(self) -> list[str]:
        """Create a certificate that the hosts trust, as uamqp supports only TLS. Return the service's arguments."""
        import trustme  # only this needs it

        authority, files = trustme.CA(), {name: self.folder / f"{name}.pem" for name in ("ca", "cert", "key")}
        certificate = authority.issue_cert("127.0.0.1")
        authority.cert_pem.write_to_path(str(files["ca"]))
        certificate.cert_chain_pems[0].write_to_path(str(files["cert"]))
        certificate.private_key_pem.write_to_path(str(files["key"]))
        self.options["ca_file"] = str(files["ca"])
        return ["--tls-cert", str(files["cert"]), "--tls-key", str(files["key"])]

    async def start_host(self) -> HostProcess:
        """Start one more host."""
        name = f"host-{len(self.hosts) + 1}"
        records, archive, log = (self.folder / f"{name}.{kind}" for kind in ("records", "archive", "log"))
        process = await start(
            "eventpump.demo.host",
            *("--name", name, "--hub", self.hub, "--lease-duration", str(self.lease_duration)),
            *("--options", json.dumps(self.options)),
            *("--leases", str(self.folder / "leases.db"), "--records", str(records), "--archive", str(archive)),
            log=log,
            connection_string=self.connection_string,
        )
        host = HostProcess(name, process, records, archive, log)
        host.reader = asyncio.create_task(host.read_status(), name=f"status of {name}")
        self.hosts.append(host)
        return host

    def owner(self, partition_id: str) -> HostProcess | None:
        """The running host that reports the partition, with the highest epoch if there are several."""
        claims = [host for host in self.hosts if host.is_running and partition_id in host.partitions]
        return max(claims, key=lambda host: int(host.partitions[partition_id]["epoch"]), default=None)

    async def wait(self, what: str, condition: Any, timeout: float) -> None:
        """Wait until the hosts' status meets a condition. Raises `DemoError` if the time is over, or a host ended."""
        try:
            async with asyncio.timeout(timeout):
                while not condition():
                    for host in self.hosts:
                        if not host.is_running and host.killed_at is None:
                            raise DemoError(f"{host.name} ended: {host.complaint()}")
                        host.heard.clear()
                    waits = [asyncio.ensure_future(host.heard.wait()) for host in self.hosts if host.is_running]
                    try:
                        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                    finally:
                        for wait in waits:
                            wait.cancel()
        except TimeoutError:
            raise DemoError(f"not within {timeout:.0f} s: {what}") from None

    async def stop_hosts(self) -> None:
        """Request every running host to stop, and wait until all have."""
        for host in self.hosts:
            if host.process.returncode is None:
                host.process.send_signal(signal.SIGTERM)
        for host in self.hosts:
            await ended(host.process)
            if host.reader is not None:
                await host.reader

    async def stop(self) -> None:
        """Stop all processes that are still running."""
        try:
            await self.stop_hosts()
        finally:
            await self._service.stop()

    def kill(self) -> None:
        """Kill all processes."""
        for host in self.hosts:
            if host.process.returncode is None:
                host.process.kill()
        self._service.kill()


async def start(module: str, *arguments: str, log: Path, connection_string: str) -> asyncio.subprocess.Process:
    """Start a module as a client of the service, with its errors in a file."""
    with log.open("wb") as stderr:
        return await asyncio.create_subprocess_exec(
            *python(module, *arguments),
            stdin=asyncio.subprocess.PIPE,  # it ends with this process, even if this one is killed
            stdout=asyncio.subprocess.PIPE,
            stderr=stderr,
            env={**os.environ, "EVENTPUMP_CONNECTION_STRING": connection_string},
            # A Ctrl-C is for the demo, which stops its processes in order, and a kill for all that this one starts.
            start_new_session=True,
        )


async def ended(process: asyncio.subprocess.Process) -> None:
    """Wait for the end of a process that was requested to stop; one that takes too long is killed."""
    try:
        async with asyncio.timeout(STOP_TIMEOUT):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


def python(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module in this interpreter."""
    return [sys.executable, "-m", module, *arguments]
