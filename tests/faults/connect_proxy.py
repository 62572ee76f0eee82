"""A small HTTP CONNECT proxy in a process of its own, which knows nothing of eventpump; and how a test runs it.

Run as a program it prints `port N` once it listens, and `CONNECT host:port status` for every request. Lines of JSON on
its standard input change how it answers: `null` as a proxy should; `{"say": text, "times": n}` with a text in place of
a tunnel; `{"say": null, ...}` never. `times` null means from now on. Each is confirmed by the line `set`.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import json
import re
import ssl
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from tests.support.processes import ChildProcess

BAD_GATEWAY = "HTTP/1.1 502 Bad Gateway\r\nContent-Length: 4\r\n\r\nbad\n"
GARBAGE = "\x00\x15not the protocol you think it is\r\n\r\n"


class ConnectProxy:
    """The proxy of a test. An async context manager.

    Args:
        credentials: `username:password` that it requires; None to require none.
        tls: Files of a certificate and its key; to be reached over TLS then.
    """

    def __init__(self, *, credentials: str | None = None, tls: tuple[Path, Path] | None = None) -> None:
        self._arguments: list[str] = [] if credentials is None else ["--credentials", credentials]
        if tls is not None:
            self._arguments += ["--cert", str(tls[0]), "--key", str(tls[1])]
        self._scheme = "http" if tls is None else "https"
        self._child: ChildProcess | None = None
        self.port = 0
        """Where it listens; the same after a restart."""

    async def start(self) -> None:
        """Start it, or start it again."""
        from tests.support.processes import ChildProcess

        child = self._child = ChildProcess(sys.executable, __file__, "--port", str(self.port), *self._arguments)
        await child.start()
        self.port = int((await child.line(r"port (\d+)")).group(1))

    async def kill(self) -> None:
        """Kill it, with every tunnel it has. Twice is fine."""
        if self._child is not None:
            await self._child.kill()

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.kill()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.kill()

    @property
    def child(self) -> ChildProcess:
        """The process."""
        assert self._child is not None
        return self._child

    @property
    def address(self) -> str:
        """Where it listens: host and port."""
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        """What a client is given that has no credentials."""
        return f"{self._scheme}://{self.address}"

    def url_for(self, credentials: str) -> str:
        """Spell it for a client that has."""
        return f"{self._scheme}://{credentials}@{self.address}"

    @property
    def requests(self) -> list[str]:
        """What it was asked for since it was started, and the status it answered: `host:port status`."""
        return [line.removeprefix("CONNECT ") for line in self.child.lines if line.startswith("CONNECT ")]

    async def say(self, text: str | None, *, times: int | None = None) -> None:
        """Have it answer with a text, or never, in place of a tunnel; so often, or from now on."""
        await self._tell({"say": text, "times": times})

    async def serve(self) -> None:
        """Have it do its work again."""
        await self._tell(None)

    async def _tell(self, mode: object) -> None:
        count = self.child.lines.count("set")
        await self.child.tell(json.dumps(mode))
        await self.child.until(lambda lines: lines.count("set") > count)


# --------------------------------------------------------------------------------------------- the program


def _say(line: str) -> None:
    print(line, flush=True)  # noqa: T201 - it is a program


class _Program:
    def __init__(self, credentials: str | None) -> None:
        self._expected = None if credentials is None else base64.b64encode(credentials.encode()).decode()
        self._mode: dict[str, Any] | None = None

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, ValueError):
            await self._serve(reader, writer)
        writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        line, _, headers = head.partition("\r\n")
        method, target, _version = line.split(" ")
        if (mode := self._mode) is not None:
            if mode["times"] is not None:
                mode["times"] -= 1
                if mode["times"] <= 0:
                    self._mode = None
            _say(f"CONNECT {target} -")
            if mode["say"] is None:
                await reader.read()
                return
            writer.write(mode["say"].encode("latin-1"))
            await writer.drain()
            return
        if self._expected is not None:
            given = re.search(r"(?im)^proxy-authorization: basic (.*)\r$", headers)
            if given is None or given[1] != self._expected:
                _say(f"CONNECT {target} 407")
                writer.write(
                    b'HTTP/1.1 407 Proxy Authentication Required\r\nProxy-Authenticate: Basic realm="test"\r\n\r\n'
                )
                return
        if method != "CONNECT":
            _say(f"CONNECT {target} 405")
            writer.write(b"HTTP/1.1 405 Method Not Allowed\r\n\r\n")
            return
        host, _, port = target.rpartition(":")
        try:
            far_reader, far_writer = await asyncio.open_connection(host.strip("[]"), int(port))
        except OSError:
            _say(f"CONNECT {target} 502")
            writer.write(BAD_GATEWAY.encode())
            return
        _say(f"CONNECT {target} 200")
        writer.write(b"HTTP/1.1 200 Connection established\r\nVia: 1.1 test\r\n\r\n")
        async with asyncio.TaskGroup() as both:
            both.create_task(_pump(reader, far_writer))
            both.create_task(_pump(far_reader, writer))

    async def obey(self) -> None:
        """Take commands until the standard input ends."""
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        while line := await reader.readline():
            self._mode = json.loads(line)
            _say("set")


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()


async def _run(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--credentials")
    parser.add_argument("--cert")
    parser.add_argument("--key")
    args = parser.parse_args(arguments)
    tls = None
    if args.cert is not None:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(args.cert, args.key)
    program = _Program(args.credentials)
    server = await asyncio.start_server(program.serve, "127.0.0.1", args.port, ssl=tls)
    _say(f"port {server.sockets[0].getsockname()[1]}")
    await program.obey()


if __name__ == "__main__":
    asyncio.run(_run())
