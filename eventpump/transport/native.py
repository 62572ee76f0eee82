"""The native transport: asyncio, on the engine of `eventpump.amqp`."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from eventpump.net.dialing import dial
from eventpump.options.connection import ConnectionSettings
from eventpump.transport.base import BaseConnection
from eventpump.transport.connection import ClientConnection, Dial
from eventpump.transport.namespace import NamespaceTransport


class NativeTransport(NamespaceTransport):
    """A connection to one namespace over AMQP on TCP or TLS: implements `eventpump.interfaces.Transport`."""

    def __init__(
        self,
        settings: ConnectionSettings,
        *,
        rng: random.Random | None = None,
        dialer: Dial = dial,
        now: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(settings, rng=rng, now=now)
        self._dialer = dialer

    async def _open(self) -> BaseConnection:
        return await ClientConnection.open(self._settings, dialer=self._dialer)
