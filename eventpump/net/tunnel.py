"""A tunnel through an HTTP proxy: the client's side of CONNECT (RFC 9110, 9.3.6), without I/O, and its shell."""

from __future__ import annotations

import asyncio
import base64
import http
import re
from typing import Final, cast

from eventpump.errors import AuthenticationError, ConnectionLostError, Recovery, ServiceError
from eventpump.options.connection import ProxySettings

_HEAD_LIMIT: Final = 64 * 1024
"""Bytes of the answer's head that are read at most."""
_MOST_INTERIM: Final = 16
"""Interim answers that are skipped at most."""
_STATUS_LINE: Final = re.compile(rb"HTTP/1\.[01] ([1-5][0-9]{2})(?: [^\r\n]*)?\r?\n")
_HEAD_END: Final = re.compile(rb"\r?\n\r?\n")


def refusal(who: str, status: int) -> ServiceError:
    """Return the error for an HTTP status that does not mean success.

    A status that may change by itself allows a reconnect; one that refuses the request does not.
    """
    try:
        text = f"{who} answered {status} {http.HTTPStatus(status).phrase}"
    except ValueError:
        text = f"{who} answered {status}"
    lasts = status < 500 and status not in {408, 425, 429}
    return ConnectionLostError(text, recovery=Recovery.GIVE_UP if lasts else Recovery.RECONNECT)


class TunnelHandshake:
    """Asks a proxy for a tunnel to a host and port, and reads its answer."""

    def __init__(self, proxy: ProxySettings, host: str, port: int) -> None:
        self._proxy = proxy
        self._who = f"the proxy {proxy.host}:{proxy.port}"
        self._authority = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._head = b""
        self._interim = 0

    def request(self) -> bytes:
        lines = [f"CONNECT {self._authority} HTTP/1.1", f"Host: {self._authority}"]
        if self._proxy.username is not None:
            pair = f"{self._proxy.username}:{self._proxy.password.get_secret_value()}"
            lines.append(f"Proxy-Authorization: Basic {base64.b64encode(pair.encode()).decode()}")
        return "\r\n".join([*lines, "", ""]).encode()

    def receive(self, data: bytes) -> bool:
        """Read bytes of the answer. Up to 16 interim answers (1xx) before it are skipped (RFC 9110, 15.2).

        Raises:
            ServiceError: The proxy refused, or its answer is invalid.
        """
        self._head += data
        while (is_open := self._read_answer()) is None:
            self._interim += 1
            if self._interim > _MOST_INTERIM:
                raise ConnectionLostError(f"{self._who} sent {self._interim} interim answers to CONNECT, no final one")
        return is_open

    def _read_answer(self) -> bool | None:
        """Read one answer of what has come: False where it is not complete, None where it is an interim one."""
        # An invalid answer is reported as soon as it is recognized: the rest of it may never arrive.
        if not b"HTTP/1."[: len(self._head)] == self._head[:7]:
            raise self._no_answer()
        end = _HEAD_END.search(self._head)
        if (len(self._head) if end is None else end.end()) > _HEAD_LIMIT:
            raise self._no_answer()
        if end is None:
            return False
        status_line = _STATUS_LINE.match(self._head)
        if status_line is None:
            raise self._no_answer()
        status = int(status_line[1])
        if status == http.HTTPStatus.PROXY_AUTHENTICATION_REQUIRED:
            did = "asks for a username and password" if self._proxy.username is None else "refused the credentials"
            raise AuthenticationError(f"{self._who} {did} (407 Proxy Authentication Required)")
        # 101 is not one of these: the client has not asked for an upgrade.
        if 100 <= status < 200 and status != http.HTTPStatus.SWITCHING_PROTOCOLS:
            self._head = self._head[end.end() :]
            return None
        if not 200 <= status < 300:
            raise refusal(self._who, status)
        if end.end() < len(self._head):
            # In AMQP, and in TLS, the client speaks first.
            raise ConnectionLostError(f"{self._who} sent more than an answer to CONNECT")
        return True

    def receive_eof(self) -> ServiceError:
        """Return the error of an answer that ended early."""
        return ConnectionLostError(f"{self._who} closed the connection instead of answering CONNECT")

    def _no_answer(self) -> ServiceError:
        return ConnectionLostError(f"{self._who} does not answer in HTTP")


class TunnelProtocol(asyncio.Protocol):
    """Opens a tunnel on a stream to a proxy, for another protocol that replaces this one."""

    def __init__(self, handshake: TunnelHandshake) -> None:
        self._handshake = handshake
        self._transport: asyncio.Transport | None = None
        self._opened: asyncio.Future[asyncio.Transport] = asyncio.get_running_loop().create_future()

    async def opened(self) -> asyncio.Transport:
        """Wait until the tunnel is open. On failure or cancellation the stream is aborted.

        Raises:
            ServiceError: The proxy refused, or does not speak HTTP.
        """
        try:
            return await self._opened
        except BaseException:
            if self._transport is not None:
                self._transport.abort()
            raise

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.write(self._handshake.request())

    def data_received(self, data: bytes) -> None:
        if self._opened.done():
            return
        try:
            if self._handshake.receive(data):
                assert self._transport is not None
                self._transport.pause_reading()  # what arrives from now on, an end too, is for the next protocol
                self._opened.set_result(self._transport)
        except ServiceError as error:
            self._opened.set_exception(error)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._opened.done():
            self._opened.set_exception(self._handshake.receive_eof())
