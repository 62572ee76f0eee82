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
from eventpump.net.tls import secure
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


async def open_stream(make: Callable[[], _P], route: Route) -> _P:
    """Connect a protocol to the service, for its bytes to go on TCP or TLS. Cancelled, no stream is left.

    Raises:
        ServiceError: It cannot connect; the text says which step failed.
    """
    loop = asyncio.get_running_loop()
    proxy = route.proxy
    if proxy is None:
        with _converted(f"{route.host}:{route.port}"):
            connected = await _connect(route.host, route.port)
            if route.tls is None:
                _, protocol = await loop.create_connection(make, sock=connected)
                return protocol
            stream, _ = await loop.create_connection(_BeforeTls, sock=connected)
            return await _secured(stream, make(), route.tls, route.host, str(route))
    handshake = TunnelHandshake(proxy, route.host, route.port)
    to_proxy = f"the proxy {proxy.host}:{proxy.port}"
    with _converted(to_proxy):
        connected = await _connect(proxy.host, proxy.port)
        tunnel = TunnelProtocol(handshake)
        if not proxy.use_tls:
            await loop.create_connection(lambda: tunnel, sock=connected)
        else:
            assert route.proxy_tls is not None
            stream, _ = await loop.create_connection(_BeforeTls, sock=connected)
            await _secured(stream, tunnel, route.proxy_tls, proxy.host, to_proxy)
    stream = await tunnel.opened()
    _log.debug("the proxy %s:%d opened a tunnel to %s:%d", proxy.host, proxy.port, route.host, route.port)
    protocol = make()
    if route.tls is None:
        stream.set_protocol(protocol)
        protocol.connection_made(stream)
        stream.resume_reading()
        return protocol
    with _converted(str(route)):
        return await _secured(stream, protocol, route.tls, route.host, str(route))


async def _secured(
    stream: asyncio.Transport, protocol: _P, context: ssl.SSLContext, server_hostname: str, where: str
) -> _P:
    """Begin TLS on a stream, and connect the protocol to it."""
    secured = await secure(stream, protocol, context, server_hostname)
    if _log.isEnabledFor(logging.DEBUG):
        tls = secured.get_extra_info("ssl_object")
        _log.debug("TLS established with %s: %s, %s", where, tls.version(), tls.cipher()[0])
    protocol.connection_made(secured)
    return protocol


async def _connect(host: str, port: int) -> socket.socket:
    _log.debug("connecting to %s:%d", host, port)
    connected = await connect(host, port)
    if _log.isEnabledFor(logging.DEBUG):
        with contextlib.suppress(OSError):  # the peer may have reset it already
            _log.debug("connected to %s:%d at %s", host, port, connected.getpeername()[0])
    return connected


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
        # There is no reason where the peer closes in the handshake.
        reason = "it was closed in the TLS handshake" if type(error) is ConnectionResetError and not error.args else ""
        raise ConnectionLostError(f"cannot connect to {where}: {reason or reason_of(error)}") from error
