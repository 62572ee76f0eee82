"""The transport on uamqp, for applications that must use that AMQP stack. Its limitations: docs/transports.md."""

from __future__ import annotations

from eventpump.transport.base import BaseConnection
from eventpump.transport.namespace import NamespaceTransport
from eventpump.transport.uamqp.connection import UamqpConnection


class UamqpTransport(NamespaceTransport):
    """A connection to one namespace over AMQP on TLS, with uamqp: implements `eventpump.interfaces.Transport`."""

    async def _open(self) -> BaseConnection:
        return await UamqpConnection.open(self._settings)
