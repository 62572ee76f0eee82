"""The emulator's own certificate and standard ports, and tokens in place of Entra's: what is served and refused."""

from __future__ import annotations

import errno
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from eventpump.emulator import server
from eventpump.emulator.server import Emulator
from eventpump.errors import ConfigurationError


async def test_standard_ports_are_those_that_clients_use_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """It listens on both, and connection strings have none; the restarted service has the same authority."""
    assert server.STANDARD_PORTS == (5671, 443)
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
        ports = one.getsockname()[1], two.getsockname()[1]
    monkeypatch.setattr(server, "STANDARD_PORTS", ports)
    async with Emulator({"telemetry": 1}, tls="auto", standard_ports=True) as emulator:
        assert (emulator.port, emulator.ws_port) == ports
        assert emulator.connection_string == emulator.ws_connection_string
        assert emulator.connection_string.startswith("Endpoint=sb://127.0.0.1;SharedAccessKeyName=")
        assert emulator.authority_file is not None
        first = emulator.authority_file.read_bytes()
        await emulator.restart()
        assert emulator.authority_file.read_bytes() == first
        with pytest.raises(ConfigurationError, match=r"standard_ports: .*in use; without standard_ports, port 0"):
            await Emulator({"telemetry": 1}, tls="auto", standard_ports=True).start()
    assert emulator.authority_file is None


@pytest.mark.skipif(sys.platform != "linux", reason="the right is one of Linux")
def test_missing_right_to_a_port_is_a_plain_error() -> None:
    """A process without the right gets one line that says so and names the way by free ports, and exit code 2."""
    start = Path("/proc/sys/net/ipv4/ip_unprivileged_port_start")
    if int(start.read_text()) <= server.STANDARD_PORTS[1]:
        pytest.skip("here every process has the right")
    without = ("setpriv", "--bounding-set", "-net_bind_service") if os.geteuid() == 0 else ()
    if without and shutil.which("setpriv") is None:
        pytest.skip("the superuser has the right, and there is no setpriv to give it up")
    command = (*without, sys.executable, "-m", "eventpump", "emulator", "--hub", "a:1", "--tls", "auto")
    refusal = "this process does not have the right to listen on this port"
    free = "without --standard-ports, --port 0 and --ws-port 0 select free ones"
    in_use = "the address is in use"  # another service of this machine may have 5671
    for options, pattern in (
        (("--port", "0", "--ws-port", "443"), rf"--ws-port: .*: {refusal}; try --ws-port 0, which selects a free one"),
        (("--standard-ports",), rf"--standard-ports: .*: ({refusal}|{in_use}); {free}"),
    ):
        ended = subprocess.run([*command, *options], capture_output=True, text=True, timeout=60, check=False)
        assert (ended.returncode, ended.stdout) == (2, "")
        assert re.fullmatch(rf"eventpump emulator: {pattern}\n", ended.stderr)


@pytest.mark.parametrize(
    ("field", "names"),
    [
        ("standard_ports", "without standard_ports, port 0 and ws_port 0"),
        ("port", "try port 0"),
        ("ws_port", "try ws_port 0"),
    ],
)
def test_error_of_a_missing_right_names_the_free_port_way(field: str, names: str) -> None:
    """The right to a port below 1024 is missing: what to do in place of it."""
    text = server.refused(PermissionError(errno.EACCES, "Permission denied"), field)
    assert text == f"this process does not have the right to listen on this port; {names}" + (
        " select free ones" if field == "standard_ports" else ", which selects a free one"
    )


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"accept_jwt": ""}, "accept_jwt: must be"),
        ({"accept_jwt": "any", "host": "0.0.0.0"}, "accept_jwt: any token is accepted on a loopback address only"),
        ({"accept_jwt": "any", "token_verifier": lambda text: None}, "accept_jwt: cannot be combined"),
        ({"tls": "on"}, "tls: must be a context"),
        ({"tls_directory": "x"}, "tls_directory: requires"),
        ({"standard_ports": True}, "standard_ports: requires tls"),
        ({"standard_ports": True, "tls": "auto", "port": 1}, "standard_ports: requires tls"),
    ],
)
def test_options_of_identity_that_do_not_fit_are_refused(options: dict[str, Any], names: str) -> None:
    """Each is refused by its name; any token is accepted on each name of this machine."""
    with pytest.raises(ConfigurationError, match=names):
        Emulator({"telemetry": 1}, **options)
    for host in ("localhost", "127.0.0.1", "::1", "127.0.0.2"):
        Emulator({"telemetry": 1}, host=host, accept_jwt="any")
