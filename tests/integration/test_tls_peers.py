"""TLS with OpenSSL's own server, `openssl s_server`: renegotiation, key updates, and its close."""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast

import pytest
import trustme

from eventpump.net.route import Route, client_tls, open_stream
from eventpump.net.tls import TlsTransport

OPENSSL = shutil.which("openssl")
pytestmark = pytest.mark.skipif(OPENSSL is None, reason="openssl is not installed")


class _Numbers(asyncio.Protocol):
    """Writes numbered lines as fast as they come, and keeps what it gets."""

    def __init__(self) -> None:
        self.got = bytearray()
        self.sent = self.most_waiting = 0
        self.lost: list[Exception | None] = []
        self.over = asyncio.Event()
        self.stream: TlsTransport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.stream = cast("TlsTransport", transport)

    def data_received(self, data: bytes) -> None:
        self.got += data

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.append(exc)
        self.over.set()

    async def write(self, count: int) -> None:
        for _ in range(count):
            self.stream.write(b"<%d>\n" % self.sent)
            self.sent += 1
            self.most_waiting = max(self.most_waiting, self.stream.get_write_buffer_size())
            await asyncio.sleep(0)


class _Server:
    """A running `openssl s_server`, and all that it has printed."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.printed = b""
        self._has_more = asyncio.Event()

    async def read(self) -> None:
        assert self.process.stdout is not None
        while data := await self.process.stdout.read(1 << 16):
            self.printed += data
            self._has_more.set()

    async def until(self, pattern: bytes) -> re.Match[bytes]:
        while (found := re.search(pattern, self.printed)) is None:
            self._has_more.clear()
            await self._has_more.wait()
        return found

    def say(self, line: str) -> None:
        """Send a line to the client, or say what it is to do."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n".encode())


@contextlib.asynccontextmanager
async def _serving(directory: Path, *options: str) -> AsyncIterator[tuple[_Server, Route]]:
    assert OPENSSL is not None
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(directory / "ca.pem"))
    authority.issue_cert("localhost").private_key_and_cert_chain_pem.write_to_path(str(directory / "server.pem"))
    process = await asyncio.create_subprocess_exec(
        OPENSSL,
        *("s_server", "-accept", "127.0.0.1:0", "-cert", str(directory / "server.pem"), *options),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    server = _Server(process)
    reading = asyncio.create_task(server.read())
    try:
        async with asyncio.timeout(20):
            port = int((await server.until(rb"ACCEPT [^\n]*:(\d+)\n"))[1])
            yield server, Route("localhost", port, client_tls(str(directory / "ca.pem")))
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        await reading


async def _until(client: _Numbers, data: bytes) -> None:
    while data not in client.got:
        assert not client.lost, client.lost
        await client.write(1)
        await asyncio.sleep(0.001)


def _numbers(printed: bytes) -> list[int]:
    return [int(number) for number in re.findall(rb"<(\d+)>", printed)]


@pytest.mark.parametrize(
    ("options", "commands", "has_backlog"),
    [
        (("-tls1_2",), ("R", "r", "R"), True),
        (("-tls1_3",), ("k", "K", "k", "K"), False),
    ],
    ids=["TLS 1.2 renegotiates", "TLS 1.3 changes keys"],
)
async def test_data_goes_on_both_ways_while_the_peer_makes_new_keys(
    tmp_path: Path, options: tuple[str, ...], commands: tuple[str, ...], has_backlog: bool
) -> None:
    """What is written while OpenSSL takes nothing waits, in order, and counts as unsent; then the stream closes."""
    async with _serving(tmp_path, *options) as (server, route):
        client = await open_stream(_Numbers, route)
        await client.write(5)
        for number, command in enumerate(commands):
            server.say(command)
            await client.write(2000)
            server.say(f"from the server {number}")
            await _until(client, b"from the server %d\n" % number)
        await client.write(5)
        await server.until(b"<%d>" % (client.sent - 1))
        assert client.got == b"".join(b"from the server %d\n" % number for number in range(len(commands)))
        assert client.stream.get_write_buffer_size() == 0
        assert (client.most_waiting > 0) is has_backlog
        client.stream.close()
        await client.over.wait()
        assert client.lost == [None]
        await server.until(rb"\nDONE")
        assert _numbers(server.printed) == list(range(client.sent))


async def test_peer_that_closes_is_the_end(tmp_path: Path) -> None:
    """Its close is answered, and no error."""
    async with _serving(tmp_path) as (server, route):
        client = await open_stream(_Numbers, route)
        server.say("the last")
        await _until(client, b"the last\n")
        server.say("Q")
        await client.over.wait()
        assert client.lost == [None]
        assert client.got == b"the last\n"
