"""A local service that speaks the protocol of Azure Event Hubs."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self

from eventpump.amqp.performatives import AmqpError
from eventpump.emulator.auth import DEFAULT_KEY, DEFAULT_KEY_NAME, LOOPBACK, AccessRule, KeyRing, TokenVerifier
from eventpump.emulator.bounds import WEBSOCKET_MESSAGE
from eventpump.emulator.config import HubSpec, hub_specs
from eventpump.emulator.connection import ServiceConnection
from eventpump.emulator.faults import Faults
from eventpump.emulator.ledger import ProducerRetention
from eventpump.emulator.log import DURABLE_RETENTION, Retention
from eventpump.emulator.service import Deadlines, Service
from eventpump.errors import ConfigurationError
from eventpump.net.stream import ConnectionProtocol

if TYPE_CHECKING:
    from eventpump.net.websocket import WebSocketServer

STOP_TIMEOUT = 3.0
"""Seconds that clients have to let go of their connections when the service stops."""


class Emulator:
    """A local Event Hubs service, on real sockets.

    ::

        async with Emulator({"telemetry": 4}) as emulator:
            client = SomeClient(emulator.connection_string, "telemetry")

    Everything but making it is called from its event loop.

    Args:
        hubs: Names and partition counts, or `HubSpec`s with consumer groups too. What `data` holds is there as well.
        host: The address to listen on.
        port: The port; 0 takes a free one.
        ws_port: A port for AMQP over WebSockets, beside the other; 0 takes a free one, None serves none.
        key_name: The name of the access rule with all rights.
        key: Its key, really checked.
        rules: Further access rules.
        token_verifier: Accepts JWTs; without one they are refused.
        data: A directory that keeps the hubs over restarts; None keeps them in memory.
        fsync: Survive power loss too, not only a killed process.
        tls: The certificate to serve with; None is plain TCP, as the official emulator.
        retention: How much is kept; beyond it the oldest events are dropped. By default 1 GiB, over all partitions, for
            an hour, or with `data` seven days. Durable hubs are held in memory too.
        max_message_size: The largest event or batch taken, in bytes.
        deadlines: How long idle connections and links are put up with.
        now: The time in seconds since the Unix epoch, for enqueued times and tokens.
        nothing_published: The last sequence number an idempotent producer is told before its first event. Of the real
            service both are reported; a client should bear both.
        refuse_long_keys: Refuse partition keys of more than 128 characters, as the clients here and the JavaScript
            client do; what the real service does is not known. By default a key may be as long as a message allows.
        names: Further host names that clients reach it by, such as a namespace's or a container's. Signatures must be
            for one of them, for `host`, or for localhost, 127.0.0.1 or ::1. Where it listens on all interfaces and no
            name is given, a signature may be for any host, as long as the token is put for the same.
        producer_retention: How long a partition remembers idempotent producers that nobody uses; by default a day, and
            10,000 of them. What the real service does is not known.

    Raises:
        ConfigurationError: A value that cannot work.
    """

    def __init__(
        self,
        hubs: Mapping[str, int] | Iterable[HubSpec],
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        ws_port: int | None = None,
        key_name: str = DEFAULT_KEY_NAME,
        key: str = DEFAULT_KEY,
        rules: Iterable[AccessRule] = (),
        token_verifier: TokenVerifier | None = None,
        data: str | Path | None = None,
        fsync: bool = False,
        tls: ssl.SSLContext | None = None,
        retention: Retention | None = None,
        max_message_size: int = 1024 * 1024,
        deadlines: Deadlines | None = None,
        now: Callable[[], float] = time.time,
        nothing_published: Literal[0, -1] = 0,
        refuse_long_keys: bool = False,
        names: Iterable[str] = (),
        producer_retention: ProducerRetention | None = None,
    ) -> None:
        self._specs = hub_specs(hubs)
        if not self._specs and data is None:
            raise ConfigurationError("hub", "there is none to serve")
        for field, number in (("port", port), ("ws_port", ws_port or 0)):
            if not 0 <= number <= 65_535:
                raise ConfigurationError(field, f"{number} is no port")
        _check_key(key_name, key)
        if max_message_size < 1024:
            raise ConfigurationError("max_message_size", "it is below 1024 bytes")
        self._host = host
        self._requested_ports = port, ws_port
        self._key_name = key_name
        self._key = key
        self._keys = KeyRing([AccessRule(key_name, key), *rules], token_verifier, hosts=_hosts(host, names))
        self._data = None if data is None else Path(data)
        self._fsync = fsync
        self._tls = tls
        self._retention = retention or (Retention() if data is None else DURABLE_RETENTION)
        self._max_message_size = max_message_size
        self._deadlines = deadlines or Deadlines()
        self._now = now
        self._nothing_published = nothing_published
        self._refuse_long_keys = refuse_long_keys
        self._producer_retention = producer_retention
        self._service: Service | None = None
        self._server: asyncio.Server | None = None
        self._ws_server: WebSocketServer | None = None
        self._port = 0
        self._ws_port: int | None = None

    # ------------------------------------------------------------------------------------------------- life

    async def start(self) -> None:
        """Load the hubs and listen. Cancelled or failed, nothing is left.

        Raises:
            ConfigurationError: The address cannot be listened on, or the data directory not be used.
        """
        await self._start(*self._requested_ports)

    async def _start(self, port: int, ws_port: int | None) -> None:
        if self._server is not None:
            raise RuntimeError("the emulator is started already")
        service = Service(
            keys=self._keys,
            retention=self._retention,
            deadlines=self._deadlines,
            max_message_size=self._max_message_size,
            now=self._now,
            nothing_published=self._nothing_published,
            refuses_long_keys=self._refuse_long_keys,
            producer_retention=self._producer_retention,
        )
        await service.open(self._specs, data=self._data, fsync=self._fsync)
        server: asyncio.Server | None = None
        ws_server: WebSocketServer | None = None

        def make() -> ConnectionProtocol:
            return _ServedProtocol(ServiceConnection(service))

        try:
            with self._listening("port", port):
                server = await asyncio.get_running_loop().create_server(
                    make, self._host, port, ssl=self._tls, backlog=1024
                )
            if ws_port is not None:
                from eventpump.net.websocket import WebSocketServer  # aiohttp takes long to import

                with self._listening("ws_port", ws_port):
                    ws_server = await WebSocketServer.start(
                        make,
                        self._host,
                        ws_port,
                        tls=self._tls,
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

    @contextlib.contextmanager
    def _listening(self, field: str, port: int) -> Iterator[None]:
        try:
            yield
        except (OSError, UnicodeError) as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
            raise ConfigurationError(field, f"cannot listen on {self._host}:{port}: {reason}") from None

    async def aclose(self) -> None:
        """Stop: write what came, close every connection in order, free the port. Closing twice is fine.

        Cancelled, connections are cut instead of closed in order.
        """
        service, server, ws_server = self._service, self._server, self._ws_server
        if service is None or server is None:
            return
        self._service = self._server = self._ws_server = None
        server.close()
        if ws_server is not None:
            ws_server.stop_listening()
        try:
            # What was taken is on disk, and answered, before its connection is closed.
            await service.aclose()
            service.faults.clear()
            connections = list(service.connections)
            for connection in connections:
                connection.close(AmqpError("amqp:connection:forced", "The service is stopping."))
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
        """Stop, and start again on the same ports. With `data` the hubs are there again; memory forgets everything.

        Faults are gone. Cancelled or failed, it is stopped.

        Raises:
            ConfigurationError: The port is somebody else's by now, or the data directory cannot be used.
        """
        self._running()
        ports = self._port, self._ws_port
        await self.aclose()
        await self._start(*ports)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

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
        """The port it listens on for WebSockets; None where, or while, it does not."""
        return self._ws_port

    @property
    def connection_string(self) -> str:
        """What a client connects with. It holds the key."""
        return self.connection_string_for(self._key_name, self._key)

    def connection_string_for(self, key_name: str, key: str) -> str:
        """Spell a connection string with another access rule."""
        return self._spell(self._port, key_name, key)

    @property
    def ws_connection_string(self) -> str:
        """What a client connects with that uses WebSockets. It holds the key."""
        if self._ws_port is None:
            raise RuntimeError("the emulator serves no WebSockets")
        return self._spell(self._ws_port, self._key_name, self._key)

    def _spell(self, port: int, key_name: str, key: str) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        emulator = "" if self._tls is not None else ";UseDevelopmentEmulator=true"
        return f"Endpoint=sb://{host}:{port};SharedAccessKeyName={key_name};SharedAccessKey={key}{emulator}"

    # ------------------------------------------------------------------------------------------ for tests

    @property
    def faults(self) -> Faults:
        """The faults it commits. They are gone when it stops."""
        return self._running().faults

    @property
    def connection_count(self) -> int:
        """How many connections are up."""
        return len(self._running().connections)

    async def add_partitions(self, hub: str, count: int) -> None:
        """Let a hub grow, as its owner may at any time.

        Raises:
            ConfigurationError: There is no such hub, or it would have too many partitions.
            StoreError: The data directory could not be written.
        """
        await self._running().add_partitions(hub, count)

    def drop_events(self, hub: str, partition_id: str, before: int) -> None:
        """Drop a partition's oldest events, as retention does: those with sequence numbers below `before`.

        Raises:
            ConfigurationError: There is no such hub or partition.
        """
        self._running().drop_events(hub, partition_id, before)

    def recreate_hub(self, hub: str, partitions: int | None = None) -> None:
        """Delete a hub and create it anew: its links end, its events are gone, and numbers begin at 0 again.

        Args:
            partitions: How many the new one has; None for as many as the old one.

        Raises:
            ConfigurationError: There is no such hub, it lies on disk, or the count cannot be.
        """
        self._running().recreate_hub(hub, partitions)

    def forget_producers(self, hub: str, *, takes_strangers: bool = False) -> None:
        """Forget a hub's idempotent producers, as a service may that has not heard of them for long.

        Args:
            takes_strangers: What the service does with one it does not know any more is not known: by default it is
                refused; otherwise it counts as new, with the id and epoch it says, and nothing published.

        Raises:
            ConfigurationError: There is no such hub, or it lies on disk.
        """
        self._running().forget_producers(hub, takes_strangers=takes_strangers)

    def replace_key(self, key: str, *, key_name: str | None = None) -> None:
        """Replace the key of an access rule, as its owner may at any time; by default the one of the connection string.

        What was put with the old key stays until it ends.

        Raises:
            ConfigurationError: There is no such rule, or the key cannot be one.
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
        """Cut every connection without a word."""
        for connection in list(self._running().connections):
            connection.abort()

    def _running(self) -> Service:
        if self._service is None:
            raise RuntimeError("the emulator is not started")
        return self._service


def _hosts(host: str, names: Iterable[str]) -> frozenset[str] | None:
    """Return what signatures may be for; None where that is not known."""
    given = {name.strip("[]").lower() for name in names}
    if not given and host in ("0.0.0.0", "::", ""):  # noqa: S104 - not bound here
        return None
    return LOOPBACK | given | {host.lower()}


def _check_key(name: str, key: str) -> None:
    # A client strips the blanks around a part of the string, and the string is printed as one line.
    is_carried = all(text and text.isprintable() and text == text.strip() for text in (name, key))
    if not is_carried or set(";=") & set(name) or ";" in key:
        raise ConfigurationError("key", "a connection string cannot carry its name or text")


class _ServedProtocol(ConnectionProtocol):
    """A shell that tells its connection when it is up: over TLS that is later than accepted, or never.

    Whatever its engine raises on what a client sends is for the connection's last resort.
    """

    def __init__(self, served: ServiceConnection) -> None:
        super().__init__(served.engine, served)
        self._served = served

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._served.on_connected(self)

    def take(self, data: bytes) -> None:
        self._served.guard(super().take, data)
