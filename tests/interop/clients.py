"""Our own client in each of the ways it speaks AMQP, for what every one of them must hold."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eventpump.clients.connection import make_transport
from eventpump.interfaces import Transport
from eventpump.options.connection import connection_settings


@dataclass(frozen=True)
class ClientKind:
    """A way our client speaks AMQP.

    Args:
        uses_tls: Whether it speaks nothing but TLS.
        uses_web_socket: Whether AMQP goes in a WebSocket.
        options: Of the connection.
    """

    name: str
    uses_tls: bool = False
    uses_web_socket: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def transport(self, connection_string: str, hub: str, ca_file: Path, **options: Any) -> Transport:
        """Make a transport to a service."""
        trust: dict[str, Any] = {"ca_file": ca_file} if self.uses_tls else {}
        return make_transport(connection_settings(connection_string, hub, **self.options, **trust, **options))

    def __str__(self) -> str:
        return self.name


NATIVE_TCP = ClientKind("native TCP")
NATIVE_WEBSOCKET = ClientKind("native WebSocket", uses_web_socket=True, options={"transport_type": "websocket"})
UAMQP = ClientKind("uamqp", uses_tls=True, options={"transport": "uamqp"})
CLIENTS = (NATIVE_TCP, NATIVE_WEBSOCKET, UAMQP)
