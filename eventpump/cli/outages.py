"""Outages of the service, for the commands: they wait until it is back, and say so."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from eventpump.errors import ConnectionLostError, Recovery, ServiceError
from eventpump.interfaces import (
    HubProperties,
    PartitionProperties,
    ReceiveLink,
    ReceiveLinkSpec,
    ReceiveSink,
    SendLink,
    SendLinkSpec,
    Transport,
)

T = TypeVar("T")

FIRST_CONTACT: Final = 30.0
"""Seconds for which the service is tried to be reached at the start: its name may be wrong."""
_UNREMARKABLE: Final = 1.0
"""Seconds for which the service may be out of reach without a word."""


class OutageError(ConnectionLostError):
    """The service could not be reached for longer than is waited for."""

    default_recovery = Recovery.GIVE_UP

    @property
    def is_retryable(self) -> bool:
        """True: the next run of the command may reach it."""
        return True


class PatientTransport:
    """A transport whose calls wait until the service can be reached. Implements `Transport`.

    A link still ends with its connection; its successor is then opened by a call that waits. The transport below spaces
    the attempts to connect.

    Args:
        transport: The transport below. It is closed with this one.
        limit: Seconds to wait for the service; None for `FIRST_CONTACT` until it was reached for the first time, and
            then for no limit.
        say: Called with a line when the service is out of reach, and when it is back.
    """

    def __init__(self, transport: Transport, limit: float | None, say: Callable[[str], None]) -> None:
        self._transport = transport
        self._limit = limit
        self._say = say
        self._was_reached = False
        self._down_since: float | None = None
        self._reason = ""
        self._timer: asyncio.TimerHandle | None = None
        self._is_announced = False

    @property
    def fully_qualified_namespace(self) -> str:
        return self._transport.fully_qualified_namespace

    async def get_hub_properties(self, hub: str) -> HubProperties:
        return await self._patiently(lambda: self._transport.get_hub_properties(hub))

    async def get_partition_properties(self, hub: str, partition_id: str) -> PartitionProperties:
        return await self._patiently(lambda: self._transport.get_partition_properties(hub, partition_id))

    async def open_receive_link(self, spec: ReceiveLinkSpec, sink: ReceiveSink) -> ReceiveLink:
        return await self._patiently(lambda: self._transport.open_receive_link(spec, sink))

    async def open_send_link(self, spec: SendLinkSpec) -> SendLink:
        return await self._patiently(lambda: self._transport.open_send_link(spec))

    async def aclose(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        await self._transport.aclose()

    async def _patiently(self, attempt: Callable[[], Awaitable[T]]) -> T:
        loop = asyncio.get_running_loop()
        failure: ServiceError = ConnectionLostError("no answer")
        # Not `retrying`: the transport below spaces the attempts, and the limit counts from the start of the outage,
        # which another call may have noticed.
        while True:
            limit = self._patience
            since = loop.time() if self._down_since is None else self._down_since
            within = asyncio.timeout_at(None if limit is None else since + limit)
            try:
                async with within:
                    made = await attempt()
            except TimeoutError:
                if not within.expired():
                    raise
                assert limit is not None
                raise OutageError(f"{failure.description} (tried for {limit:g} s)") from failure
            except ServiceError as error:
                if error.recovery is not Recovery.RECONNECT:
                    raise
                failure = error
                self._failed(error, since)
            else:
                self._succeeded(loop.time())
                return made

    def _failed(self, error: ServiceError, since: float) -> None:
        self._reason = error.description
        if self._down_since is None:
            self._down_since = since
            self._timer = asyncio.get_running_loop().call_later(_UNREMARKABLE, self._announce)

    @property
    def _patience(self) -> float | None:
        """Seconds for which the service is waited for; None for no limit."""
        return FIRST_CONTACT if self._limit is None and not self._was_reached else self._limit

    def _announce(self) -> None:
        self._is_announced = True
        limit = self._patience
        until = "until it can" if limit is None else f"for {limit:g} s in all"
        self._say(f"the service cannot be reached, trying again {until}: {self._reason}")

    def _succeeded(self, now: float) -> None:
        self._was_reached = True
        if self._timer is not None:
            self._timer.cancel()
        if self._is_announced and self._down_since is not None:
            self._say(f"the service is back after {now - self._down_since:.0f} s")
        self._down_since, self._timer, self._is_announced = None, None, False
