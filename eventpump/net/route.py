"""Where a service is, and a stream to it: over TCP, directly or through an HTTP proxy, with or without TLS."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar, cast

from eventpump.errors import ConnectionLostError, Recovery
from eventpump.net.addresses import connect
from eventpump.net.stream import reason_of
from eventpump.net.tunnel import TunnelHandshake, TunnelProtocol
from eventpump.options.connection import ProxySettings

_P = TypeVar("_P", bound=asyncio.BaseProtocol)

_log = logging.getLogger("eventpump.net")


@dataclass(frozen=True, slots=True)
class Route:
    """Where to connect, and how.

    Args:
        host: Of the service; its certificate must be for this name.
        port: Of the service.
        tls: TLS settings for the service; None for a connection without TLS.
        is_websocket: Whether AMQP goes in a WebSocket (protocol.md 2.1).
        proxy: The HTTP proxy to tunnel through; None to connect directly.
        proxy_tls: TLS settings for a proxy that is itself reached over TLS.
    """

    host: str
    port: int
    tls: ssl.SSLContext | None = None
    is_websocket: bool = False
    proxy: ProxySettings | None = None
    proxy_tls: ssl.SSLContext | None = None

    def __str__(self) -> str:
        way = "" if self.proxy is None else f" through the proxy {self.proxy.host}:{self.proxy.port}"
        return f"{self.host}:{self.port}{way}"


def client_tls(ca_file: str | None = None) -> ssl.SSLContext:
    """Make TLS settings: TLS 1.2 at least, certificate and host name verified, by the system's CAs or those given."""
    context = ssl.create_default_context(cafile=ca_file)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


class _BeforeTls(asyncio.Protocol):
    """Reads nothing: what comes is for the protocol that follows."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast("asyncio.ReadTransport", transport).pause_reading()  # uvloop's is of no such class


async def open_stream(
    make: Callable[[], _P], route: Route, *, under: Callable[[asyncio.ReadTransport], None] | None = None
) -> _P:
    """Connect a protocol to the service, for its bytes to go on TCP or TLS. Cancelled, no stream is left.

    Args:
        under: Called with the transport that the stream, or the TLS on it, reads from. While that is paused nothing is
            read; a paused TLS transport only decrypts nothing, and reads on.

    Raises:
        ServiceError: It cannot connect; the text says which step failed.
    """
    loop = asyncio.get_running_loop()
    proxy = route.proxy
    if proxy is None:
        with _converted(f"{route.host}:{route.port}"):
            connected = await _connect(route.host, route.port)
            if route.tls is None:
                plain, protocol = await loop.create_connection(make, sock=connected)
                if under is not None:
                    under(plain)
                return protocol
            stream, _ = await loop.create_connection(_BeforeTls, sock=connected)
            return await _secured(stream, make(), route, under)
    handshake = TunnelHandshake(proxy, route.host, route.port)
    with _converted(f"the proxy {proxy.host}:{proxy.port}"):
        connected = await _connect(proxy.host, proxy.port)
        to_proxy, tunnel = await loop.create_connection(
            lambda: TunnelProtocol(handshake),
            sock=connected,
            ssl=route.proxy_tls if proxy.use_tls else None,
            server_hostname=proxy.host if proxy.use_tls else None,
        )
    _log_tls(to_proxy, f"the proxy {proxy.host}:{proxy.port}")
    stream = await tunnel.opened()
    _log.debug("the proxy %s:%d opened a tunnel to %s:%d", proxy.host, proxy.port, route.host, route.port)
    protocol = make()
    if route.tls is None:
        stream.set_protocol(protocol)
        protocol.connection_made(stream)
        stream.resume_reading()
        if under is not None:
            under(stream)
        return protocol
    with _converted(str(route)):
        return await _secured(stream, protocol, route, under)


async def _secured(
    stream: asyncio.Transport, protocol: _P, route: Route, under: Callable[[asyncio.ReadTransport], None] | None
) -> _P:
    """Begin TLS on a stream, and connect the protocol to it."""
    assert route.tls is not None
    secured = await asyncio.get_running_loop().start_tls(stream, protocol, route.tls, server_hostname=route.host)
    if secured is None:
        raise ConnectionLostError(f"cannot connect to {route}: the stream ended")
    _log_tls(secured, str(route))
    protocol.connection_made(secured)
    if under is not None:
        under(stream)
    return protocol


async def _connect(host: str, port: int) -> socket.socket:
    _log.debug("connecting to %s:%d", host, port)
    connected = await connect(host, port)
    if _log.isEnabledFor(logging.DEBUG):
        with contextlib.suppress(OSError):  # the peer may have reset it already
            _log.debug("connected to %s:%d at %s", host, port, connected.getpeername()[0])
    return connected


def _log_tls(stream: asyncio.BaseTransport, where: str) -> None:
    secured = stream.get_extra_info("ssl_object")
    if secured is not None and _log.isEnabledFor(logging.DEBUG):
        _log.debug("TLS established with %s: %s, %s", where, secured.version(), secured.cipher()[0])


@contextlib.contextmanager
def _converted(where: str) -> Iterator[None]:
    """Convert the errors of streams to `ConnectionLostError`."""
    try:
        yield
    except ssl.SSLCertVerificationError as error:
        # A retry cannot help: it is another server, or one whose certificate authority is not trusted here.
        raise ConnectionLostError(
            f"the certificate of {where} was refused: {error.verify_message}", recovery=Recovery.GIVE_UP
        ) from error
    except ssl.SSLError as error:
        raise ConnectionLostError(f"cannot connect to {where}: {reason_of(error)}") from error
    except OSError as error:
        # asyncio gives no reason where the peer closes in the handshake.
        reason = "it was closed in the TLS handshake" if type(error) is ConnectionResetError and not error.args else ""
        raise ConnectionLostError(f"cannot connect to {where}: {reason or reason_of(error)}") from error
