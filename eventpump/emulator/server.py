"""A local service that speaks the protocol of Azure Event Hubs."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import ipaddress
import ssl
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

from eventpump.aio.closing import AsyncResource
from eventpump.aio.home import HomeLoop
from eventpump.amqp.connection import EMPTY_FRAME
from eventpump.amqp.performatives import AmqpError
from eventpump.emulator.auth import DEFAULT_KEY, DEFAULT_KEY_NAME, LOOPBACK, AccessRule, KeyRing, TokenVerifier
from eventpump.emulator.bounds import WEBSOCKET_MESSAGE
from eventpump.emulator.capture import CaptureSettings
from eventpump.emulator.config import Hubs, hub_specs
from eventpump.emulator.connection import ServiceConnection
from eventpump.emulator.faults import Faults
from eventpump.emulator.ledger import ProducerRetention
from eventpump.emulator.log import DURABLE_RETENTION, Retention
from eventpump.emulator.service import Deadlines, Service
from eventpump.emulator.web_tokens import ANY, accepting
from eventpump.errors import ConfigurationError
from eventpump.eventhubs.conditions import CONNECTION_FORCED
from eventpump.net.stream import BufferedReads, ConnectionProtocol

if TYPE_CHECKING:
    from eventpump.emulator.certificates import OwnCertificate
    from eventpump.net.websocket import WebSocketServer

STOP_TIMEOUT = 3.0
"""Seconds that clients have to close their connections when the service stops."""
STANDARD_PORTS = 5671, 443
"""The service's own, of AMQP and of WebSockets: where SDKs connect to if nothing names a port."""


class Emulator(AsyncResource):
    """A local Event Hubs service, on real sockets.

    ::

        async with Emulator({"telemetry": 4}) as emulator:
            client = SomeClient(emulator.connection_string, "telemetry")

    Everything except the constructor is called from its event loop.

    Args:
        hubs: The hubs to serve: a dictionary of names and partition counts; or a text such as "telemetry:4", or
            "telemetry:4:dashboard,archive" with consumer groups besides $Default; or several of these texts, or
            `HubSpec`s. A name alone is a hub of 4 partitions. The hubs stored in `data` are served too.
        host: The address to listen on. Default: "127.0.0.1".
        port: The port; 0 selects a free one. Default: 0.
        ws_port: An additional port for AMQP over WebSockets; 0 selects a free one, None disables it.
        key_name: The name of the access rule with all rights. Default: "RootManageSharedAccessKey".
        key: Its key, against which signatures are verified. Default: "SAS_KEY_VALUE".
        rules: Additional access rules. Default: `()`.
        token_verifier: Accepts JWTs; None to refuse them.
        accept_jwt: Accepts JWTs in place of Microsoft Entra's, without a verifier of one's own: "any" every one, on a
            loopback address only; another text those that are signed with it as the secret (HS256), have an expiration
            time and are for Event Hubs ("https://eventhubs.azure.net") or a name of this service. None to refuse them.
        data: A directory that stores the hubs across restarts; None keeps them in memory.
        fsync: Whether to survive power loss too, not only a killed process. Default: False.
        tls: The TLS context of the server; "auto" for a certificate by an authority of its own, whose certificate is
            in `authority_file`; None for plain TCP, like the official emulator.
        tls_directory: A directory that keeps the certificate of `tls="auto"` and its key, so that clients need to trust
            it once; None for another certificate each time.
        standard_ports: Listen on 5671, and on 443 for WebSockets, in place of `port` and `ws_port`: connection strings
            have no port then. Requires `tls`, and often a right of the process. Default: False.
        retention: How much is kept; beyond it the oldest events are dropped. By default 1 GiB, over all partitions, for
            an hour, or with `data` seven days. Durable hubs are held in memory too.
        max_message_size: The largest event or batch that is accepted, in bytes. Default: 1,048,576.
        deadlines: The time limits of idle connections and links; None for those of the service, which are 20 s to 10
            min, except that a reader ends at once when its partition is taken, and not 5 s later.
        now: Returns the time in seconds since the Unix epoch, for enqueued times and tokens. Default: `time.time`.
        nothing_published: The last sequence number that an idempotent producer gets before its first event. Both values
            have been observed; clients should accept either. Default: 0.
        refuse_long_keys: Refuse partition keys of more than 128 characters, like our clients and the JavaScript client;
            the real service's behavior is unknown. By default a key may be as long as a message allows.
        names: Additional host names that clients use, such as a namespace's or a container's. Signatures must be for
            one of them, for `host`, or for localhost, 127.0.0.1 or ::1. If it listens on all interfaces and no name is
            given, a signature may be for any host, as long as the token is put for the same. Default: `()`.
        capture: Write the events also as the files of Event Hubs Capture: the directory, or `CaptureSettings`, which
            also have the windows. Requires the extra `capture`. None to write none.
        producer_retention: How long a partition keeps the states of unused idempotent producers; by default a day, and
            10,000 of them. The real service's retention is unknown.

    Raises:
        ConfigurationError: A value is invalid.
    """

    def __init__(
        self,
        hubs: Hubs,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        ws_port: int | None = None,
        key_name: str = DEFAULT_KEY_NAME,
        key: str = DEFAULT_KEY,
        rules: Iterable[AccessRule] = (),
        token_verifier: TokenVerifier | None = None,
        accept_jwt: str | None = None,
        data: str | Path | None = None,
        fsync: bool = False,
        tls: ssl.SSLContext | Literal["auto"] | None = None,
        tls_directory: str | Path | None = None,
        standard_ports: bool = False,
        retention: Retention | None = None,
        max_message_size: int = 1024 * 1024,
        deadlines: Deadlines | None = None,
        now: Callable[[], float] = time.time,
        nothing_published: Literal[0, -1] = 0,
        refuse_long_keys: bool = False,
        names: Iterable[str] = (),
        producer_retention: ProducerRetention | None = None,
        capture: str | Path | CaptureSettings | None = None,
    ) -> None:
        self._specs = hub_specs(hubs)
        if not self._specs and data is None:
            raise ConfigurationError("hub", "no hubs configured")
        for field, number in (("port", port), ("ws_port", ws_port or 0)):
            if not 0 <= number <= 65_535:
                raise ConfigurationError(field, f"must be between 0 and 65535, not {number}")
        _check_key(key_name, key)
        if max_message_size < 1024:
            raise ConfigurationError("max_message_size", "must be at least 1024 bytes")
        if standard_ports and (tls is None or port or ws_port is not None):
            raise ConfigurationError("standard_ports", "requires tls, and cannot be combined with port or ws_port")
        if tls_directory is not None and tls != "auto":
            raise ConfigurationError("tls_directory", 'requires tls="auto"')
        if isinstance(tls, str) and tls != "auto":
            raise ConfigurationError("tls", f'must be a context, "auto" or None, not {tls[:40]!r}')
        if accept_jwt is not None:
            _check_accepted(accept_jwt, host, token_verifier)
        names = tuple(names)
        hosts = _hosts(host, names)
        self._host = host
        self._names = names
        self._standard_ports = standard_ports
        self._requested_ports = STANDARD_PORTS if standard_ports else (port, ws_port)
        self._key_name = key_name
        self._key = key
        verifier = token_verifier if accept_jwt is None else accepting(accept_jwt, hosts=hosts, now=now)
        self._keys = KeyRing([AccessRule(key_name, key), *rules], verifier, hosts=hosts)
        self._data = None if data is None else Path(data)
        self._fsync = fsync
        self._tls = tls
        self._tls_directory = None if tls_directory is None else Path(tls_directory)
        self._own_certificate: OwnCertificate | None = None
        self._deadlines = deadlines or Deadlines()
        self._make_service = functools.partial(
            Service,
            keys=self._keys,
            retention=retention or (Retention() if data is None else DURABLE_RETENTION),
            deadlines=self._deadlines,
            max_message_size=max_message_size,
            now=now,
            nothing_published=nothing_published,
            refuses_long_keys=refuse_long_keys,
            producer_retention=producer_retention,
            capture=CaptureSettings(capture) if isinstance(capture, str | Path) else capture,
        )
        self._service: Service | None = None
        self._server: asyncio.Server | None = None
        self._ws_server: WebSocketServer | None = None
        self._port = 0
        self._ws_port: int | None = None
        self._home = HomeLoop(type(self).__name__)  # while it runs

    # ------------------------------------------------------------------------------------------------- life

    async def start(self) -> None:
        """Load the hubs and listen. If it is cancelled or fails, nothing is left open.

        Raises:
            ConfigurationError: Listening on the address failed, or the data directory cannot be used.
        """
        await self._start(*self._requested_ports)

    async def _start(self, port: int, ws_port: int | None) -> None:
        if self._server is not None:
            raise RuntimeError("the emulator is already started")
        try:
            await self._listen(port, ws_port, self._server_tls())
        except BaseException:
            self._discard_certificate()
            raise

    async def _listen(self, port: int, ws_port: int | None, tls: ssl.SSLContext | None) -> None:
        service = self._make_service()
        await service.open(self._specs, data=self._data, fsync=self._fsync)
        server: asyncio.Server | None = None
        ws_server: WebSocketServer | None = None

        def make() -> ConnectionProtocol:
            return _ServedProtocol(ServiceConnection(service))

        def make_tls() -> BufferedReads:
            return BufferedReads(make())

        try:
            with self._listening("port", port):
                server = await asyncio.get_running_loop().create_server(
                    make if tls is None else make_tls,
                    self._host,
                    port,
                    ssl=tls,
                    ssl_handshake_timeout=None if tls is None else self._deadlines.no_token,
                    backlog=1024,
                )
            if ws_port is not None:
                from eventpump.net.websocket import WebSocketServer  # aiohttp takes long to import

                with self._listening("ws_port", ws_port):
                    ws_server = await WebSocketServer.start(
                        make,
                        self._host,
                        ws_port,
                        tls=tls,
                        max_message=WEBSOCKET_MESSAGE,
                        handshake_timeout=self._deadlines.no_token,
                    )
        except BaseException:
            if server is not None:
                server.close()
            await service.aclose()
            raise
        self._server, self._ws_server = server, ws_server
        self._port = server.sockets[0].getsockname()[1]
        self._ws_port = None if ws_server is None else ws_server.port
        service.authority = f"{self.host}:{self._port}"
        self._service = service
        self._home.enter()

    @contextlib.contextmanager
    def _listening(self, field: str, port: int) -> Iterator[None]:
        try:
            yield
        except (OSError, UnicodeError) as error:
            field = "standard_ports" if self._standard_ports else field
            reason = refused(error, field)
            raise ConfigurationError(field, f"cannot listen on {self._host}:{port}: {reason}") from None

    def _server_tls(self) -> ssl.SSLContext | None:
        if not isinstance(self._tls, str):
            return self._tls
        if self._own_certificate is None:
            from eventpump.emulator.certificates import OwnCertificate  # few need what makes certificates

            served = {self._host} - {"0.0.0.0", "::", ""}  # noqa: S104 - not bound here
            self._own_certificate = OwnCertificate.open({*LOOPBACK, *served, *self._names}, self._tls_directory)
        return self._own_certificate.context

    def _discard_certificate(self) -> None:
        if self._own_certificate is not None:
            self._own_certificate.discard()
        self._own_certificate = None

    async def aclose(self) -> None:
        """Stop: write accepted events, close every connection cleanly, free the port. May be called twice.

        If it is cancelled, connections are dropped instead of closed.
        """
        try:
            await self._stop()
        finally:
            self._discard_certificate()

    async def _stop(self) -> None:
        service, server, ws_server = self._service, self._server, self._ws_server
        if service is None or server is None:
            return
        self._home.enter()
        self._home.release()
        self._service = self._server = self._ws_server = None
        server.close()
        if ws_server is not None:
            ws_server.stop_listening()
        try:
            # Accepted events are on disk, and answered, before their connection is closed.
            await service.aclose()
            service.faults.clear()
            connections = list(service.connections)
            for connection in connections:
                connection.close(AmqpError(CONNECTION_FORCED, "The service is stopping."))
            if connections:
                await asyncio.wait([connection.closed for connection in connections], timeout=STOP_TIMEOUT)
        finally:
            left = list(service.connections)
            for connection in left:
                connection.abort()
        if left:
            await asyncio.wait([connection.closed for connection in left])
        if ws_server is not None:
            await ws_server.aclose()
        await server.wait_closed()

    async def restart(self) -> None:
        """Stop, and start again on the same ports. With `data` the hubs are loaded again; hubs in memory are lost.

        Faults are removed. If it is cancelled or fails, the emulator is stopped.

        Raises:
            ConfigurationError: The port is in use by another process, or the data directory cannot be used.
        """
        self._running()
        ports = self._port, self._ws_port
        await self._stop()
        await self._start(*ports)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    # ------------------------------------------------------------------------------------------------ access

    @property
    def host(self) -> str:
        """The address clients connect to."""
        return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(self._host, self._host)  # noqa: S104 - not bound here

    @property
    def port(self) -> int:
        """The port it listens on; 0 before it does."""
        return self._port

    @property
    def ws_port(self) -> int | None:
        """The port it listens on for WebSockets; None if it does not, or not yet."""
        return self._ws_port

    @property
    def authority_file(self) -> Path | None:
        """The certificate of the authority that clients must trust, in PEM; None without `tls="auto"`, or not yet."""
        return None if self._own_certificate is None else self._own_certificate.authority

    @property
    def hubs(self) -> dict[str, int]:
        """The names and partition counts of the hubs it serves; empty while it does not run."""
        service = self._service
        return {} if service is None else {hub.name: len(hub.partitions) for hub in service.hubs}

    @property
    def connection_string(self) -> str:
        """The connection string for clients. It contains the key."""
        return self.connection_string_for(self._key_name, self._key)

    def connection_string_for(self, key_name: str, key: str) -> str:
        """Return a connection string with another access rule."""
        return self._spell(self._port, key_name, key)

    @property
    def ws_connection_string(self) -> str:
        """The connection string for clients that use WebSockets. It contains the key."""
        if self._ws_port is None:
            raise RuntimeError("the emulator does not serve WebSockets: set ws_port")
        return self._spell(self._ws_port, self._key_name, self._key)

    def _spell(self, port: int, key_name: str, key: str) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        emulator = "" if self._tls is not None else ";UseDevelopmentEmulator=true"
        at = host if self._standard_ports else f"{host}:{port}"
        return f"Endpoint=sb://{at};SharedAccessKeyName={key_name};SharedAccessKey={key}{emulator}"

    # ------------------------------------------------------------------------------------------ for tests

    @property
    def faults(self) -> Faults:
        """The faults that it injects. They are removed when it stops."""
        return self._running().faults

    @property
    def connection_count(self) -> int:
        """How many connections are open."""
        return len(self._running().connections)

    async def add_partitions(self, hub: str, count: int) -> None:
        """Add partitions to a hub, as its owner may at any time.

        Raises:
            ConfigurationError: The hub does not exist, or would have too many partitions.
            StoreError: The data directory could not be written.
        """
        await self._running().add_partitions(hub, count)

    def drop_events(self, hub: str, partition_id: str, before: int) -> None:
        """Drop a partition's oldest events, as retention does: those with sequence numbers below `before`.

        Raises:
            ConfigurationError: The hub or partition does not exist.
        """
        self._running().drop_events(hub, partition_id, before)

    def recreate_hub(self, hub: str, partitions: int | None = None) -> None:
        """Delete and recreate a hub: its links end, its events are gone, and numbers begin at 0 again.

        Args:
            partitions: The new number of partitions; None for the same as before.

        Raises:
            ConfigurationError: The hub does not exist, is stored on disk, or the count is invalid.
        """
        self._running().recreate_hub(hub, partitions)

    def forget_producers(self, hub: str, *, accept_unknown_producers: bool = False) -> None:
        """Forget a hub's idempotent producers, as the service may after they have been unused for a long time.

        Args:
            accept_unknown_producers: Whether an unknown producer is accepted as new, with its own id and epoch and
                nothing published, instead of being refused; the real service's behavior is undocumented. Default:
                False.

        Raises:
            ConfigurationError: The hub does not exist, or is stored on disk.
        """
        self._running().forget_producers(hub, accept_unknown_producers=accept_unknown_producers)

    def replace_key(self, key: str, *, key_name: str | None = None) -> None:
        """Replace the key of an access rule, as its owner may at any time.

        Tokens put with the old key remain valid until they expire.

        Args:
            key_name: The name of the rule; None for that of the connection string.

        Raises:
            ConfigurationError: There is no such rule, or the key is invalid.
        """
        name = self._key_name if key_name is None else key_name
        _check_key(name, key)
        try:
            self._keys.replace_key(name, key)
        except KeyError:
            raise ConfigurationError("key_name", "there is no such rule") from None
        if name == self._key_name:
            self._key = key

    def drop_connections(self) -> None:
        """Drop every connection without a close."""
        for connection in list(self._running().connections):
            connection.abort()

    def _running(self) -> Service:
        if self._service is None:
            raise RuntimeError("the emulator is not started")
        self._home.enter()
        return self._service


def _check_accepted(accepted: str, host: str, verifier: TokenVerifier | None) -> None:
    if verifier is not None:
        raise ConfigurationError("accept_jwt", "cannot be combined with token_verifier")
    if not accepted:
        raise ConfigurationError("accept_jwt", 'must be "any" or the key that tokens must be signed with, not empty')
    try:
        is_loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = host.lower() in LOOPBACK
    if accepted == ANY and not is_loopback:
        raise ConfigurationError(
            "accept_jwt",
            f"any token is accepted on a loopback address only, not on {host[:80]!r}: "
            "give the key that tokens must be signed with",
        )


def refused(error: Exception, field: str) -> str:
    """Return why listening failed, and what to do."""
    free = f"try {field} 0, which selects a free one"
    if field == "standard_ports":
        free = "without standard_ports, port 0 and ws_port 0 select free ones"
    match error:
        case OSError(errno=errno.EADDRINUSE):
            return f"the address is in use; {free}"
        case OSError(errno=errno.EACCES | errno.EPERM):
            return f"this process does not have the right to listen on this port; {free}"
        case OSError(strerror=str(reason)):
            return reason
    return str(error)


def _hosts(host: str, names: Iterable[str]) -> frozenset[str] | None:
    """Return the hosts that signatures may be for; None if they are unknown."""
    given = {name.strip("[]").lower() for name in names}
    if not given and host in ("0.0.0.0", "::", ""):  # noqa: S104 - not bound here
        return None
    return LOOPBACK | given | {host.lower()}


def _check_key(name: str, key: str) -> None:
    # A client strips blanks around a part of the string, and the string is printed in one line.
    is_carried = all(text and text.isprintable() and text == text.strip() for text in (name, key))
    if not is_carried or set(";=") & set(name) or ";" in key:
        raise ConfigurationError("key", "its name or text cannot be part of a connection string")


class _ServedProtocol(ConnectionProtocol):
    """A shell that notifies its connection once it is established (with TLS later, or never), and guards it."""

    def __init__(self, served: ServiceConnection) -> None:
        super().__init__(served.engine, served)
        self._served = served

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        peer = transport.get_extra_info("peername")
        self._served.peer_address = str(peer[0]) if isinstance(peer, tuple) and peer else ""
        self._served.on_connected(self)

    def time_out(self) -> None:
        self._served.guard(self._served.on_silence)

    def data_received(self, data: bytes) -> None:
        # Several heartbeats may come in one read.
        if data and not (data.startswith(EMPTY_FRAME) and data == EMPTY_FRAME * (len(data) // len(EMPTY_FRAME))):
            self._served.heard()
        self._served.guard(super().data_received, data)
