"""Receive and send links of the native transport."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from typing import Any

from eventpump.amqp.connection import Messages
from eventpump.amqp.link import Link
from eventpump.amqp.performatives import Accepted, Modified, Rejected, Released
from eventpump.dialect.conditions import error_for
from eventpump.errors import (
    ClosedError,
    EventPumpError,
    EventTooLargeError,
    LinkDetachedError,
    Recovery,
    RequestRefusedError,
    ServiceError,
    ServiceTimeoutError,
)
from eventpump.ports import ReceiveSink
from eventpump.transport.connection import ClientConnection

_UNLIMITED = 2**63


class NativeLink:
    """What both directions have in common: attach, detach, and learning of their end.

    :ivar entity: the address, for errors.
    """

    def __init__(self, connection: ClientConnection, *, entity: str) -> None:
        self.connection = connection
        self.entity = entity
        self.link: Link | None = None
        loop = asyncio.get_running_loop()
        self._attached: asyncio.Future[None] = loop.create_future()
        self._gone: asyncio.Future[None] = loop.create_future()
        self._is_closing = False
        self.error: EventPumpError | None = None

    async def _attach(self, name: str, **attach: Any) -> None:
        timeout = self.connection.settings.operation_timeout
        try:
            async with asyncio.timeout(timeout):
                self.link = await self.connection.attach(self, name, **attach)
                await self._attached
        except TimeoutError:
            self.detach_now()
            raise ServiceTimeoutError(
                f"no answer to the attach within {timeout} s", entity=self.entity, recovery=Recovery.RECONNECT
            ) from None
        except BaseException:
            self.detach_now()
            raise

    @property
    def is_usable(self) -> bool:
        """Whether messages can flow."""
        return self.link is not None and self.link.is_attached and not self._is_closing

    @property
    def max_message_size(self) -> int:
        """See the ports."""
        size = None if self.link is None else self.link.remote_max_message_size
        return _UNLIMITED if size is None else size

    def detach_now(self) -> None:
        """Begin to detach, without waiting for the peer."""
        self._is_closing = True
        if self.link is not None and self.connection.is_alive:
            self.link.detach()
            self.connection.flush_soon()

    async def aclose(self) -> None:
        """See the ports."""
        self.detach_now()
        if self.link is None or not self.connection.is_alive or self.error is not None:
            return
        try:
            async with asyncio.timeout(self.connection.settings.operation_timeout):
                await asyncio.shield(self._gone)
        except TimeoutError:
            return  # the peer does not answer; the idle time-out will find out whether it is still there

    # ------------------------------------------------------------------------- called by the connection

    def on_attached(self) -> None:
        """The peer attached."""
        if not self._attached.done():
            self._attached.set_result(None)

    def on_detached(self, error: ServiceError) -> None:
        """The link is over: refused, detached by either end, or its session or connection ended."""
        if not self._gone.done():
            self._gone.set_result(None)
        if self.error is not None:
            return
        self.error = error
        if not self._attached.done():
            self._attached.set_exception(error)
            self._attached.exception()
        elif not self._is_closing:
            self._on_lost(error)
        self._on_end(error)

    def _on_lost(self, error: ServiceError) -> None:
        """An attached link ended, and not because of its owner."""

    def _on_end(self, error: ServiceError) -> None:
        """The link ended, whatever the reason."""

    def on_messages(self, event: Messages) -> None:
        """Messages arrived."""

    def on_credit(self) -> None:
        """Credit arrived."""

    def on_outcomes(self, outcomes: list[tuple[int, Any]]) -> None:
        """Outcomes arrived."""


class NativeReceiveLink(NativeLink):
    """A receive link: `eventpump.ports.ReceiveLink`."""

    def __init__(self, connection: ClientConnection, sink: ReceiveSink, *, entity: str) -> None:
        super().__init__(connection, entity=entity)
        self._sink = sink

    async def attach(self, **attach: Any) -> None:
        """Attach. :raises ServiceError: refused, or no answer."""
        # Wire reference 5.1: the service settles events as it sends them, whatever is asked for.
        await self._attach(is_receiver=True, snd_settle_mode=1, rcv_settle_mode=0, **attach)

    def set_credit(self, credit: int) -> None:
        """See the port. On a link that is over it does nothing: the sink was told, or asked for it."""
        if self.is_usable:
            assert self.link is not None
            self.link.set_credit(credit)
            self.connection.flush_soon()

    def on_messages(self, event: Messages) -> None:
        if event.delivery_ids and self.is_usable:
            event.link.settle(event.delivery_ids[0], event.delivery_ids[-1], Accepted())
        if not self._is_closing:
            self._sink.messages(event.payloads)

    def _on_lost(self, error: ServiceError) -> None:
        self._sink.detached(error)


class NativeSendLink(NativeLink):
    """A send link: `eventpump.ports.SendLink`. Sends wait for credit in the order of their calls."""

    def __init__(self, connection: ClientConnection, *, entity: str) -> None:
        super().__init__(connection, entity=entity)
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._unsettled: dict[int, asyncio.Future[None]] = {}

    async def attach(self, **attach: Any) -> None:
        """Attach. :raises ServiceError: refused, or no answer."""
        await self._attach(is_receiver=False, snd_settle_mode=0, rcv_settle_mode=0, **attach)

    @property
    def properties(self) -> Mapping[str, object]:
        """See the port."""
        remote = None if self.link is None else self.link.remote
        return {str(key): value for key, value in ((remote.properties if remote is not None else None) or {}).items()}

    async def send(self, message: bytes, *, message_format: int = 0) -> None:
        """See the port."""
        if len(message) > self.max_message_size:
            raise EventTooLargeError(len(message), self.max_message_size)
        timeout = self.connection.settings.operation_timeout
        outcome: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(timeout):
                await self.connection.writable()
                await self._credit()
                link = self._require_usable()
                delivery_id = link.send(message, message_format=message_format)
                self._unsettled[delivery_id] = outcome
                self.connection.flush_soon()
                try:
                    await outcome
                finally:
                    self._unsettled.pop(delivery_id, None)
        except TimeoutError:
            raise ServiceTimeoutError(f"no outcome within {timeout} s", entity=self.entity) from None

    def _require_usable(self) -> Link:
        if self.error is not None:
            raise self.error
        if self._is_closing or self.link is None:
            raise ClosedError("send link")
        return self.link

    async def _credit(self) -> None:
        """Wait for a turn with credit, in the order of the calls."""
        link = self._require_usable()
        if link.credit > 0 and not self._waiting:
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except BaseException:
            self._waiting.remove(turn)
            self._grant(link.credit)  # a turn that came in the moment of a cancellation goes to the next
            raise
        self._waiting.remove(turn)

    def _grant(self, turns: int) -> None:
        """Give the first `turns` of those who wait their turn; some may have it and not have run yet."""
        for turn in self._waiting:
            if turns <= 0:
                return
            if not turn.done():
                turn.set_result(None)
            turns -= 1

    def on_credit(self) -> None:
        assert self.link is not None
        if self.link.drain:
            self.link.drained()
            return
        self._grant(self.link.credit)

    def on_outcomes(self, outcomes: list[tuple[int, Any]]) -> None:
        for delivery_id, outcome in outcomes:
            waiting = self._unsettled.pop(delivery_id, None)
            if waiting is None or waiting.done():
                continue
            error = self._error(outcome)
            if error is None:
                waiting.set_result(None)
            else:
                waiting.set_exception(error)

    def _error(self, outcome: Any) -> ServiceError | None:
        match outcome:
            case Accepted():
                return None
            case Rejected(error) if error is not None:
                return error_for(str(error.condition), error.description, entity=self.entity)
            case Released() | Modified():
                return ServiceError("the service gave the message back", entity=self.entity)
            case _:
                return RequestRefusedError("the message was rejected without a reason", entity=self.entity)

    async def aclose(self) -> None:
        """See the port."""
        self._is_closing = True
        self._on_end(LinkDetachedError("the link was closed here", entity=self.entity))
        await super().aclose()

    def _on_end(self, error: ServiceError) -> None:
        for waiting in (*self._waiting, *self._unsettled.values()):
            if not waiting.done():
                waiting.set_exception(error)
