"""The steps below AMQP: name, connection, proxy, TLS. Each makes a connection of its own, and closes it."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
import time
from dataclasses import replace
from typing import Any, Final, cast

from eventpump.doctor.findings import ProblemFoundError, StepOutcome, clean, span
from eventpump.errors import AuthenticationError, ConnectionLostError
from eventpump.net.addresses import connect
from eventpump.net.route import Route, open_stream
from eventpump.net.stream import reason_of

_WEBSOCKET_PORT: Final = 443
_SOON: Final = 7 * 86_400
"""Seconds before the end of a certificate, from which on it is worth a word."""


class _Silent(asyncio.Protocol):
    """A stream on which nothing is sent."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def close(self) -> None:
        if self.transport is not None:
            self.transport.abort()


def first_hop(route: Route) -> tuple[str, int]:
    """Return the host and the port that this machine itself connects to: those of the proxy, or of the service."""
    return (route.host, route.port) if route.proxy is None else (route.proxy.host, route.proxy.port)


async def resolve_name(host: str, timeout: float) -> str:
    """Look the name up. Raises `ProblemFoundError` if it has no address, or none is known in time."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        pass
    else:
        return f"{host} is an address, nothing to look up"
    try:
        async with asyncio.timeout(timeout):
            found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except TimeoutError:
        raise ProblemFoundError(
            f"the name {host} cannot be looked up: DNS does not answer within {timeout:g} s",
            "check this machine's DNS servers, and that a firewall lets it reach them",
        ) from None
    except OSError as error:
        raise ProblemFoundError(
            f"the name {host} cannot be looked up: {reason_of(error)}",
            "check the spelling of the namespace in the connection string, and this machine's DNS; a namespace with a "
            "private endpoint has its name in a private DNS zone",
        ) from error
    addresses = list(dict.fromkeys(str(each[4][0]) for each in found))
    private = all(ipaddress.ip_address(each.partition("%")[0]).is_private for each in addresses)
    kind = ", private" if private else ""
    return f"{host} is {', '.join(addresses[:4])}{', ...' if len(addresses) > 4 else ''}{kind}"


async def reach(route: Route, timeout: float) -> str:
    """Connect by TCP, to the proxy if there is one. Raises `ProblemFoundError` if that fails."""
    host, port = first_hop(route)
    began = time.monotonic()
    try:
        async with asyncio.timeout(timeout):
            connected = await connect(host, port)
    except TimeoutError:
        raise ProblemFoundError(
            f"{host} does not answer on port {port} within {timeout:g} s",
            f"a firewall on the way drops the packets: open port {port}{await _other_way(route, timeout)}",
        ) from None
    except OSError as error:
        raise ProblemFoundError(
            f"cannot connect to {host} on port {port}: {reason_of(error)}",
            f"check the host and the port{await _other_way(route, timeout)}",
        ) from error
    address = connected.getpeername()[0]
    connected.close()
    return f"{address} port {port} answers in {(time.monotonic() - began) * 1000:.0f} ms"


async def _other_way(route: Route, timeout: float) -> str:
    """Try the port of WebSockets. Return what the advice has about it; "" where it does not apply."""
    if route.proxy is not None or route.is_websocket or route.port == _WEBSOCKET_PORT:
        return ""
    try:
        async with asyncio.timeout(timeout):
            (await connect(route.host, _WEBSOCKET_PORT)).close()
    except (TimeoutError, OSError):
        return f"; port {_WEBSOCKET_PORT} (--transport-type websocket) cannot be reached either"
    return f", or use --transport-type websocket: port {_WEBSOCKET_PORT} answers"


async def open_tunnel(route: Route, timeout: float) -> str:
    """Have the proxy open a tunnel. Raises `ProblemFoundError` if it does not."""
    assert route.proxy is not None
    who = f"the proxy {route.proxy.host}:{route.proxy.port}"
    try:
        async with asyncio.timeout(timeout):
            stream = await open_stream(_Silent, replace(route, tls=None))
    except TimeoutError:
        raise ProblemFoundError(f"{who} does not answer within {timeout:g} s", "ask who runs the proxy") from None
    except AuthenticationError as error:
        raise ProblemFoundError(
            clean(str(error)),
            "give the proxy's user name and password in its URL, percent-encoded: http://user:password@host:port",
        ) from error
    except ConnectionLostError as error:
        raise ProblemFoundError(
            clean(str(error)), f"the proxy must allow CONNECT to {route.host}:{route.port}; ask who runs it"
        ) from error
    stream.close()
    return f"{who} opens a tunnel to {route.host}:{route.port}"


async def secure(route: Route, timeout: float) -> str:
    """Establish TLS. Raises `ProblemFoundError` if that fails, or the certificate is of another name, or ends soon."""
    try:
        async with asyncio.timeout(timeout):
            stream = await open_stream(_Silent, route)
    except TimeoutError:
        raise ProblemFoundError(
            f"{route} does not answer in the TLS handshake within {timeout:g} s",
            "something on the way takes the connection, and is not the service: check the port",
        ) from None
    except ConnectionLostError as error:
        raise ProblemFoundError(clean(str(error)), _tls_advice(route, error.__cause__)) from error
    try:
        return _described(stream)
    finally:
        stream.close()


def _described(stream: _Silent) -> str:
    assert stream.transport is not None
    secured: ssl.SSLObject = stream.transport.get_extra_info("ssl_object")
    certificate: Any = secured.getpeercert() or {}
    issuer = {key: value for part in certificate.get("issuer", ()) for key, value in part}
    name = issuer.get("organizationName") or issuer.get("commonName") or "an authority without a name"
    text = f"{secured.version()}, the certificate is issued by {name}"
    left = ssl.cert_time_to_seconds(certificate["notAfter"]) - time.time() if "notAfter" in certificate else _SOON
    if left < _SOON:
        text += f", and ends in {span(left)}"
        raise ProblemFoundError(text, "the certificate of the server must be renewed", outcome=StepOutcome.WARNING)
    return text


def _tls_advice(route: Route, cause: BaseException | None) -> str:
    if isinstance(cause, ssl.SSLCertVerificationError):
        text = cause.verify_message.lower()
        if "mismatch" in text or "not valid for" in text:
            return f"the server at {route.host} is another one, or the certificate is for another name: check the host"
        if "expired" in text or "not yet valid" in text:
            return "check this machine's clock; if it is right, the certificate of the server must be renewed"
        return (
            "if a proxy inspects TLS here, or the service is local, give the file of its authority with --ca-file; "
            "otherwise update this system's certificates"
        )
    if isinstance(cause, ssl.SSLError):
        return f"check the port: what listens on {route.port} does not speak TLS as the service does"
    return "something on the way ends the connection: check the port, and firewalls that inspect TLS"
