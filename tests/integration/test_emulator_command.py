"""`eventpump emulator` as a process: what it prints, how it stops, and how it says no."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import signal
import socket
import sys
from asyncio.subprocess import PIPE
from pathlib import Path
from typing import Any

import pytest
import trustme
from azure.core.credentials import AccessToken

from eventpump import EventData, EventProducer
from eventpump.amqp.connection import SASL_HEADER
from eventpump.emulator.config import HubSpec, load_config
from tests.support.forks import COMMAND, start_python


class Stub:
    """A credential of Entra's kind, whose token is a word."""

    async def get_token(self, *scopes: str, **options: Any) -> AccessToken:
        return AccessToken("stub", 2**32)


async def launch(*arguments: str) -> asyncio.subprocess.Process:
    return await start_python(
        *COMMAND,
        "emulator",
        *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_emulator_serves_until_a_signal(number: signal.Signals, tmp_path: Path) -> None:
    """The first line is the connection string, the port is open by then, and a signal ends it with exit code 0."""
    process = await launch("--hub", "telemetry:4", "--hub", "other:2", "--port", "0", "--data", str(tmp_path / "hubs"))
    assert process.stdout is not None
    async with asyncio.timeout(30):
        line = (await process.stdout.readline()).decode().strip()
        start, _, rest = line.partition(";")
        assert start.startswith("Endpoint=sb://127.0.0.1:")
        assert rest == (
            "SharedAccessKeyName=RootManageSharedAccessKey;SharedAccessKey=SAS_KEY_VALUE;UseDevelopmentEmulator=true"
        )
        _, writer = await asyncio.open_connection("127.0.0.1", int(start.rpartition(":")[2]))
        assert (tmp_path / "hubs").stat().st_mode & 0o777 == 0o700  # events are in it
        process.send_signal(number)
        out, err = await process.communicate()
        writer.close()
        await writer.wait_closed()
    assert (process.returncode, out, err) == (0, b"", b"")


async def test_emulator_in_the_background_of_a_script_is_not_interrupted() -> None:
    """A shell starts it with SIGINT ignored: Ctrl-C does not end it, and SIGTERM does, in order."""
    command = (sys.executable, "-m", "eventpump", "emulator", "--hub", "a:1", "--port", "0")
    process = await asyncio.create_subprocess_exec(
        "sh", "-c", 'trap "" INT; exec "$@"', "sh", *command, stdout=PIPE, stderr=PIPE
    )
    assert process.stdout is not None
    async with asyncio.timeout(30):
        port = int((await process.stdout.readline()).partition(b";")[0].rpartition(b":")[2])
        process.send_signal(signal.SIGINT)
        for _ in range(3):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(SASL_HEADER)
            assert await reader.readexactly(8) == SASL_HEADER
            writer.close()
            await writer.wait_closed()
        process.terminate()
        out, err = await process.communicate()
    assert (process.returncode, out, err) == (0, b"", b"")


async def test_emulator_serves_tls_and_the_official_config_file(tmp_path: Path) -> None:
    """A certificate makes it TLS, which the connection string shows, and a Config.json names the hubs."""
    certificate = trustme.CA().issue_cert("127.0.0.1")
    certificate.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    certificate.private_key_pem.write_to_path(tmp_path / "key.pem")
    entities = [{"Name": "eh1", "PartitionCount": 2, "ConsumerGroups": [{"Name": "cg1"}]}]
    namespaces = [{"Type": "EventHub", "Name": "emulatorNs1", "Entities": entities}]
    (tmp_path / "Config.json").write_text(json.dumps({"UserConfig": {"NamespaceConfig": namespaces}}))
    process = await launch(
        "--config", str(tmp_path / "Config.json"), "--port", "0", "--key", "another",
        "--tls-cert", str(tmp_path / "cert.pem"), "--tls-key", str(tmp_path / "key.pem"),
    )  # fmt: skip
    assert process.stdout is not None
    async with asyncio.timeout(30):
        line = (await process.stdout.readline()).decode()
        assert line.endswith(";SharedAccessKey=another\n")
        process.terminate()
        await process.communicate()
    assert process.returncode == 0


async def test_emulator_makes_its_own_certificate_and_accepts_tokens(tmp_path: Path) -> None:
    """With `--tls auto` the last line is the authority's file, by which a client with a stub token connects."""
    process = await launch(
        "--hub", "a:1", "--port", "0", "--ws-port", "0", "--tls", "auto", "--tls-directory", str(tmp_path / "tls"),
        "--accept-jwt", "any",
    )  # fmt: skip
    assert process.stdout is not None
    async with asyncio.timeout(60):
        first, second, authority = [(await process.stdout.readline()).decode().strip() for _ in range(3)]
        assert authority == str(tmp_path / "tls" / "authority.pem")
        for line, kind in ((first, "tcp"), (second, "websocket")):
            endpoint = line.partition(";")[0]
            options: dict[str, Any] = {"transport_type": "websocket"} if kind == "websocket" else {}
            async with EventProducer(endpoint, "a", credential=Stub(), ca_file=authority, **options) as producer:
                await producer.send(EventData("hello"))
        process.terminate()
        out, err = await process.communicate()
    assert (process.returncode, out, err) == (0, b"", b"")


@pytest.mark.parametrize(
    ("variable", "arguments", "key"),
    [("secret", [], "secret"), ("secret", ["--key", "other"], "other"), ("", [], "SAS_KEY_VALUE")],
)
async def test_emulator_has_its_key_from_a_variable(
    monkeypatch: pytest.MonkeyPatch, variable: str, arguments: list[str], key: str
) -> None:
    """A key in the environment is not seen in the list of processes; one in the arguments goes first."""
    monkeypatch.setenv("EVENTPUMP_EMULATOR_KEY", variable)
    process = await launch("--hub", "a:1", "--port", "0", *arguments)
    assert process.stdout is not None
    async with asyncio.timeout(30):
        assert f";SharedAccessKey={key};".encode() in await process.stdout.readline()
        process.terminate()
        await process.communicate()


@pytest.mark.parametrize("arguments", [(), ("--tls", "auto")])
async def test_emulator_on_a_terminal_says_what_to_do_next(arguments: tuple[str, ...]) -> None:
    """After the connection string a person sees what to type, and it works; a program that reads a pipe gets none of
    it."""
    ours, theirs = pty.openpty()
    shown = bytearray()
    is_complete = asyncio.Event()

    def read() -> None:
        shown.extend(os.read(ours, 65536))
        if b"eventpump tail --hub telemetry" in shown and shown.endswith(b"\n"):
            is_complete.set()

    asyncio.get_running_loop().add_reader(ours, read)
    try:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "eventpump", "emulator", "--hub", "telemetry:4:dashboard", "--port", "0", *arguments,
            stdout=theirs, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        async with asyncio.timeout(60):
            await is_complete.wait()
            typed = shown.decode().partition("In another terminal:")[2].partition("  eventpump tail")[0]
            sender = await asyncio.create_subprocess_exec(
                "sh", "-c", typed.replace("\r", "").replace("eventpump send", f"{sys.executable} -m eventpump send"),
                stderr=asyncio.subprocess.PIPE,
            )  # fmt: skip
            _, said = await sender.communicate()
            assert sender.returncode == 0, said
            process.send_signal(signal.SIGINT)
            _, err = await process.communicate()
    finally:
        asyncio.get_running_loop().remove_reader(ours)
        os.close(ours)
        os.close(theirs)
    assert (process.returncode, err) == (0, b"")
    assert shown.startswith(b"Endpoint=sb://127.0.0.1:")
    assert b"Serves telemetry (4 partitions) on 127.0.0.1:" in shown
    assert b"Ctrl-C stops it" in shown
    assert b"export EVENTPUMP_CONNECTION_STRING='Endpoint=sb://127.0.0.1:" in shown
    assert (b"eventpump send --hub telemetry\r\n" in shown) is not bool(arguments)


async def test_emulator_prints_a_config_file(tmp_path: Path) -> None:
    """The printed file declares the hubs of the command line, or a sample; nothing is served."""
    for arguments, expected in (
        (["--hub", "a:2:x,y"], [HubSpec("a", 2, ("x", "y"))]),
        ([], [HubSpec("telemetry", 4, ("dashboard", "archive"))]),
    ):
        process = await launch(*arguments, "--print-config")
        async with asyncio.timeout(60):
            out, err = await process.communicate()
        assert (process.returncode, err) == (0, b"")
        (tmp_path / "Config.json").write_bytes(out)
        assert load_config(tmp_path / "Config.json") == expected


async def test_emulator_with_a_closed_stdout_exits_with_2() -> None:
    """A reader that went away is no traceback: one line, exit code 2."""
    reading, writing = os.pipe()
    os.close(reading)
    process = await start_python(
        *COMMAND, "emulator", "--hub", "a:1", "--port", "0", stdout=writing, stderr=asyncio.subprocess.PIPE
    )
    os.close(writing)
    async with asyncio.timeout(60):
        _, err = await process.communicate()
    assert process.returncode == 2
    assert err.decode() == "eventpump emulator: stdout: the connection string cannot be printed: Broken pipe\n"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "--hub"),
        (("--hub", "telemetry"), "telemetry:4"),
        (("--hub", "a:1", "--hub", "A:2"), "twice"),
        (("--hub", "a:1", "--port", "x"), "--port"),
        (("--hub", "a:1", "--port", "65536"), "--port"),
        (("--hub", "a:1", "--port", "0", "--ws-port", "x"), "--ws-port"),
        (("--hub", "a:1", "--port", "0", "--ws-port", "{taken}"), "--ws-port 0"),
        (("--hub", "a:1", "--host", "no.such.host.invalid"), "cannot listen on"),
        (("--config", "{tmp}/nothing.json"), "cannot be read"),
        (("--config", "{tmp}/broken.json"), "not JSON"),
        (("--hub", "a:1", "--fsync"), "--data"),
        (("--data", "{tmp}/new", "--port", "0"), "holds none"),
        (("--hub", "a:1", "--data", "{tmp}/broken.json"), "cannot be used"),
        (("--hub", "a:1", "--tls-cert", "{tmp}/broken.json"), "--tls-key"),
        (("--hub", "a:1", "--tls-cert", "{tmp}/broken.json", "--tls-key", "{tmp}/broken.json"), "PEM"),
        (("--hub", "a:1", "--tls-cert", "{tmp}/nothing", "--tls-key", "{tmp}/nothing"), "No such file"),
        (("--hub", "a:1", "--tls", "auto", "--tls-cert", "x", "--tls-key", "x"), "--tls: cannot be combined with"),
        (("--hub", "a:1", "--tls-directory", "{tmp}"), '--tls-directory: requires --tls="auto"'),
        (("--hub", "a:1", "--tls", "auto", "--tls-directory", "{tmp}/broken.json"), "--tls-directory: "),
        (("--hub", "a:1", "--standard-ports"), "--standard-ports: requires --tls, and"),
        (("--hub", "a:1", "--tls", "auto", "--standard-ports", "--port", "1"), "combined with --port or --ws-port"),
        (("--hub", "a:1", "--accept-jwt", ""), "--accept-jwt: must be"),
        (("--hub", "a:1", "--host", "0.0.0.0", "--accept-jwt", "any"), "--accept-jwt: any token is accepted on a"),
        (("--hub", "a:1", "--key", "secret;text"), "key"),
        (("--hub", "a:1", "--key", "secret\ntext"), "key"),
        (("--hub", "a:1", "--key", " secret"), "key"),
        (("--hub", "a:1", "--retention-bytes", "-1"), "--retention-bytes"),
        (("--hub", "a:1", "--port", "{taken}"), "the address is in use; try --port 0"),
        (("--hub", "a:1:b:c"), "telemetry:4:dashboard,archive"),
    ],
)
async def test_emulator_with_bad_input_exits_with_2_and_one_line(
    arguments: tuple[str, ...], says: str, tmp_path: Path
) -> None:
    """What cannot work is one clear line on stderr and exit code 2; the key is not in it."""
    (tmp_path / "broken.json").write_text("{")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        process = await launch(*(each.replace("{tmp}", str(tmp_path)).replace("{taken}", port) for each in arguments))
        async with asyncio.timeout(60):
            out, err = await process.communicate()
    assert process.returncode == 2
    assert out == b""
    lines = err.decode().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("eventpump emulator: ")
    assert says in lines[0]
    assert "secret" not in lines[0]
