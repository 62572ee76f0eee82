"""Receive and send links, on the connection of any AMQP implementation."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar

from eventpump.aio.tasks import resolve
from eventpump.aio.wakeup import Wakeup
from eventpump.amqp.performatives import Accepted, Modified, Rejected, Released
from eventpump.errors import (
    AuthenticationError,
    EventPumpError,
    EventTooLargeError,
    LinkDetachedError,
    Recovery,
    RequestRefusedError,
    ServiceError,
    ServiceTimeoutError,
)
from eventpump.eventhubs.addresses import parse_address
from eventpump.eventhubs.conditions import MESSAGE_SIZE_EXCEEDED, error_for
from eventpump.interfaces import CLOSE_TIMEOUT, ReceiveSink
from eventpump.logs import present
from eventpump.transport.base import Asked, BaseConnection, LinkHandle, LinkSpec

_UNLIMITED = 2**63

_log = logging.getLogger("eventpump.transport")


def _drop(payloads: list[bytes]) -> None:
    """Drop what arrives on a link that is closing."""


class ClientLink:
    """The base of both directions: attach and detach. It has ended if it has an error."""

    is_receiver: ClassVar[bool]

    delivery_interval: float | None = None
    """Seconds for which what arrives may be left unread; None if that does not matter to this link."""

    def __init__(
        self, connection: BaseConnection, *, entity: str, on_expired: Callable[[], None] | None = None
    ) -> None:
        """Create a link that is not attached yet.
        `on_expired` is called if the service detaches it as its token has expired."""
        self.connection = connection
        self.entity = entity
        self.link: LinkHandle | None = None
        self._loop = loop = asyncio.get_running_loop()
        self._attached: asyncio.Future[None] = loop.create_future()
        self._gone: asyncio.Future[None] = loop.create_future()
        self._on_expired = on_expired
        self._is_open = False
        self._is_closing = False
        self.error: ServiceError | None = None
        self._name: str | None = None

    def _debug(self, what: str, detail: object = "") -> None:
        """Log a step in the life of the link."""
        if _log.isEnabledFor(logging.DEBUG):
            fields: dict[str, object | None] = {"link": self._name}
            with suppress(ValueError):
                address = parse_address(self.entity)
                fields["hub"] = address.hub or None
                fields |= {"consumer_group": address.consumer_group, "partition_id": address.partition_id}
            _log.debug("link to %s: %s%s", self.entity, what, detail, extra=present(**fields))

    async def attach(self, spec: LinkSpec) -> None:
        """Attach. Raises `ServiceError` if the service refused, or did not answer."""
        timeout = self.connection.settings.operation_timeout
        asked = self.connection.asked()
        self._name = spec.name
        self._debug("attaching a receiver" if self.is_receiver else "attaching a sender")
        try:
            async with asyncio.timeout(timeout):
                self.link = await self.connection.attach(self, spec, is_receiver=self.is_receiver)
                await self._attached
            if self.error is not None:
                raise self.error  # it ended before this task ran again; `_on_lost` is not called then
        except TimeoutError:
            self._debug("the attach was not answered in time")
            self.detach_now()
            recovery = Recovery.RECONNECT if self.connection.unanswered(asked) else Recovery.RELINK
            raise ServiceTimeoutError(
                f"no answer to the attach within {timeout} s", entity=self.entity, recovery=recovery
            ) from None
        except asyncio.CancelledError:
            self.detach_now()
            # The caller may have a shorter time-out, with which none of ours ever expires.
            self.connection.unanswered(asked)
            raise
        except BaseException:
            self.detach_now()
            raise
        self._is_open = True
        self._debug("attached")

    @property
    def is_awaiting(self) -> bool:
        """Whether something is awaited of the peer for this link, beside messages."""
        return not self.is_attached

    @property
    def is_attached(self) -> bool:
        """Whether messages can flow."""
        return self.link is not None and self.link.is_attached and not self._is_closing and self.error is None

    @property
    def max_message_size(self) -> int:
        """The largest message that the service takes, in bytes."""
        size = None if self.link is None else self.link.remote_max_message_size
        return _UNLIMITED if size is None else size

    def detach_now(self) -> None:
        """Begin to detach, without waiting for the peer."""
        self._is_closing = True
        if self.link is not None and self.connection.is_alive:
            if self.link.is_attached:
                self._debug("detaching")
            self.link.detach()
            self.connection.flush_soon()

    async def aclose(self) -> None:
        """Detach, and wait for the answer. Closing twice is fine."""
        self.detach_now()
        if self.link is None or not self.connection.is_alive or self.error is not None:
            return
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT):
                await asyncio.shield(self._gone)
        except TimeoutError:
            return  # the peer does not answer; the idle time-out detects whether it is alive

    # ------------------------------------------------------------------------- called by the connection

    def on_attached(self) -> None:
        """The peer attached."""
        resolve(self._attached, None)

    def on_detached(self, error: ServiceError) -> None:
        """The link has ended: refused, detached by either end, or with its session or connection."""
        resolve(self._gone, None)
        if self.error is not None:
            return
        self.error = error
        self._debug("detached: ", error)
        if not self._attached.done():
            self._attached.set_exception(error)
            self._attached.exception()
        elif isinstance(error, AuthenticationError) and self.connection.is_alive:
            # It was authorized before: its token has expired, and a new one may be accepted.
            error.recovery = Recovery.RELINK
            if self._on_expired is not None:
                self._on_expired()
        self._on_end(error)
        if self._is_open and not self._is_closing:
            self._on_lost(error)

    def _on_lost(self, error: ServiceError) -> None:
        """Called when an attached link ended for a reason other than `aclose`."""

    def _on_end(self, error: EventPumpError) -> None:
        """Called when the link ended, for any reason."""

    def on_messages(self, payloads: list[bytes], unsettled: Sequence[int] = ()) -> None:
        """Messages arrived; `unsettled` has the ids of the deliveries, if they are not settled."""

    def on_settled(self, payloads: list[bytes]) -> None:
        """Messages arrived that are settled; as `on_messages`."""

    def on_credit(self) -> None:
        """Credit arrived."""

    def on_answered(self) -> None:
        """The peer answered a probe with a flow."""

    def on_outcomes(self, outcomes: list[tuple[int, Any]]) -> None:
        """Outcomes arrived."""


class ClientReceiveLink(ClientLink):
    """A receive link: `eventpump.interfaces.ReceiveLink`."""

    is_receiver = True

    def __init__(
        self,
        connection: BaseConnection,
        sink: ReceiveSink,
        *,
        entity: str,
        on_expired: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(connection, entity=entity, on_expired=on_expired)
        self._sink = sink
        self.on_settled = sink.messages  # type: ignore[assignment,method-assign]  # without a call in between
        self._answer: asyncio.Future[bool | None] | None = None

    @property
    def is_awaiting(self) -> bool:
        return self._answer is not None or super().is_awaiting

    def set_credit(self, credit: int) -> None:
        """See `ReceiveLink`. Does nothing on a link that has ended."""
        if self.is_attached:
            assert self.link is not None
            self.link.set_credit(credit)
            self.connection.flush_soon()

    async def probe(self, timeout: float) -> bool | None:
        """See `ReceiveLink`."""
        if not self.is_attached:
            return None
        assert self.link is not None
        if not self.link.probe():
            return None
        self.connection.flush_soon()
        if self._answer is None:
            self._answer = asyncio.get_running_loop().create_future()
        answer = self._answer
        await asyncio.wait({answer}, timeout=timeout)
        # Not `asyncio.timeout`: if the answer and the end of the time come in one turn, the answer counts.
        return answer.result() if answer.done() else False

    def drop_connection(self, reason: str) -> None:
        """See `ReceiveLink`."""
        self.connection.drop(reason)

    def on_answered(self) -> None:
        self._settle_probe(True)

    def _settle_probe(self, outcome: bool | None) -> None:
        answer, self._answer = self._answer, None
        if answer is not None:
            answer.set_result(outcome)

    def detach_now(self) -> None:
        self._settle_probe(None)
        self.on_settled = _drop  # type: ignore[method-assign]
        super().detach_now()

    def _on_end(self, error: EventPumpError) -> None:
        self._settle_probe(None)

    def on_messages(self, payloads: list[bytes], unsettled: Sequence[int] = ()) -> None:
        if unsettled and self.is_attached:
            assert self.link is not None
            self.link.settle(unsettled[0], unsettled[-1], Accepted())
        self.on_settled(payloads)

    def _on_lost(self, error: ServiceError) -> None:
        self._sink.detached(error)


class _Posted:
    """A message on its way: `eventpump.interfaces.PostedMessage`.

    Attributes:
        on_outcome: Called with its outcome; None where nobody waits for that any more.
        asked: When an answer was asked for, as of `BaseConnection.asked`.
    """

    __slots__ = ("_link", "asked", "message", "message_format", "on_outcome", "on_sent", "size")

    def __init__(
        self,
        link: ClientSendLink,
        message: bytes,
        message_format: int,
        on_sent: Callable[[], None] | None,
        on_outcome: Callable[[BaseException | None], None],
        asked: Asked,
    ) -> None:
        self._link = link
        self.message = message
        self.size = len(message)
        self.message_format = message_format
        self.on_sent = on_sent
        self.on_outcome: Callable[[BaseException | None], None] | None = on_outcome
        self.asked = asked

    def withdraw(self) -> None:
        """See `PostedMessage`."""
        if self.on_outcome is not None:
            self.on_outcome = None
            self._link.withdrawn(self)

    def ended(self, error: BaseException | None) -> None:
        """Report its outcome, once."""
        on_outcome, self.on_outcome = self.on_outcome, None
        if on_outcome is not None:
            on_outcome(error)


class _Outcome(Wakeup[None]):
    """What a caller of `send` waits for.
    A cancellation withdraws the message at once, not when the caller runs again."""

    __slots__ = ("posted",)

    posted: _Posted

    def cancel(self, msg: Any | None = None) -> bool:
        self.posted.withdraw()
        return super().cancel(msg)


class ClientSendLink(ClientLink):
    """A send link: `eventpump.interfaces.SendLink`.

    Messages wait in one queue, from which they are sent while there is credit and the peer reads.
    """

    is_receiver = False

    def __init__(
        self,
        connection: BaseConnection,
        *,
        entity: str,
        on_expired: Callable[[], None] | None = None,
        on_lost: Callable[[ServiceError], None] | None = None,
    ) -> None:
        """Create a link that is not attached yet. `on_lost` is called if it ends for a reason other than `aclose`."""
        super().__init__(connection, entity=entity, on_expired=on_expired)
        self._on_lost_link = on_lost
        self._queue: OrderedDict[_Posted, None] = OrderedDict()
        self._unsettled: dict[int, _Posted] = {}
        """Those sent, in their order; also those whose outcome nobody waits for any more."""
        # One timer for all messages: they have the same time each, so that the first that is due is the oldest.
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_awaiting(self) -> bool:
        return bool(self._queue or self._unsettled) or super().is_awaiting

    @property
    def properties(self) -> Mapping[str, object]:
        """See `SendLink`."""
        return {} if self.link is None else {str(key): value for key, value in self.link.remote_properties.items()}

    async def send(self, message: bytes, *, message_format: int = 0, on_sent: Callable[[], None] | None = None) -> None:
        """See `SendLink`."""
        outcome = _Outcome(loop=self._loop)
        outcome.posted = posted = self.post(message, outcome.end, message_format=message_format, on_sent=on_sent)
        try:
            await outcome
        except BaseException:
            posted.withdraw()
            raise

    def post(
        self,
        message: bytes,
        on_outcome: Callable[[BaseException | None], None],
        *,
        message_format: int = 0,
        on_sent: Callable[[], None] | None = None,
    ) -> _Posted:
        """See `SendLink`."""
        link, connection = self.link, self.connection
        limit = None if link is None else link.remote_max_message_size
        if limit is not None and len(message) > limit:
            raise EventTooLargeError(len(message), limit)
        if self.error is not None:
            raise self.error
        if self._is_closing:
            raise self._closed_here()
        posted = _Posted(self, message, message_format, on_sent, on_outcome, connection.asked())
        if self._timer is None:
            self._set_timer(posted)
        self._queue[posted] = None
        self._pump()
        if self._queue:
            connection.flush_soon()  # the flow with the credit is to be read
        return posted

    def withdrawn(self, posted: _Posted) -> None:
        """Called when a message is withdrawn. One that is sent is kept until its outcome arrives."""
        if posted in self._queue:
            del self._queue[posted]
        else:
            self.connection.unanswered(posted.asked)  # as of an attach

    def _set_timer(self, oldest: _Posted) -> None:
        # It is not cancelled when the outcome arrives, and then finds nothing due: to set one for each message costs as
        # much as the engine.
        due = oldest.asked[0] + self.connection.settings.operation_timeout
        self._timer = self._loop.call_at(due, self._expire, due)

    def _expire(self, due: float) -> None:
        """End the waits whose time is over, and wait for the next."""
        self._timer = None
        connection, limit = self.connection, self.connection.settings.operation_timeout
        now = max(due, self._loop.time())
        expired: list[tuple[_Posted, str]] = []
        for posted in (*self._unsettled.values(), *self._queue):
            if posted.on_outcome is None:
                continue
            if posted.asked[0] + limit > now:
                self._set_timer(posted)
                break
            is_unsent = posted in self._queue
            if is_unsent:
                del self._queue[posted]
            expired.append((posted, "credit" if is_unsent else "outcome"))
        for posted, what in expired:
            # Before the connection may be dropped for it; and not earlier, as the report before may withdraw it.
            on_outcome, posted.on_outcome = posted.on_outcome, None
            if on_outcome is None:
                continue
            recovery = Recovery.RECONNECT if connection.unanswered(posted.asked) else Recovery.RELINK
            problem = f"no {what} for the message within {limit} s"
            on_outcome(ServiceTimeoutError(problem, entity=self.entity, recovery=recovery))

    def _pump(self) -> None:
        """Send what credit and the stream allow."""
        link, connection, queue = self.link, self.connection, self._queue
        while queue and link is not None and link.credit > 0 and link.is_attached:
            if connection.is_paused:
                connection.hold_back(self)
                return
            posted, _ = queue.popitem(last=False)
            message, posted.message = posted.message, b""
            if posted.on_sent is not None:
                posted.on_sent()
            self._unsettled[link.send(message, message_format=posted.message_format)] = posted
            connection.queued(posted.size)

    def on_writable(self) -> None:
        """The peer reads again."""
        self._pump()

    def on_credit(self) -> None:
        self._pump()
        assert self.link is not None
        if self.link.drain:
            self.link.drained()

    def on_outcomes(self, outcomes: list[tuple[int, Any]]) -> None:
        # All before the first is reported: who waits for it goes on within the report, and may close the link.
        answered: list[tuple[_Posted, Any]] = []
        for number, outcome in outcomes:
            posted = self._unsettled.pop(number, None)
            if posted is not None:
                answered.append((posted, outcome))
        for posted, outcome in answered:
            on_outcome, posted.on_outcome = posted.on_outcome, None
            if on_outcome is not None:
                on_outcome(None if type(outcome) is Accepted else self._error(outcome, posted.size))

    def on_detached(self, error: ServiceError) -> None:
        if self._is_open and error.condition == MESSAGE_SIZE_EXCEEDED and self.connection.is_alive:
            # Whichever message it is for, the largest one under way is not smaller: no new link takes that either. The
            # others are sent again.
            largest = max((each.size for each in self._unsettled.values()), default=0)
            for each in [each for each in self._unsettled.values() if each.size == largest]:
                each.ended(self._too_large(largest, error))
            error = LinkDetachedError(
                error.description, condition=error.condition, entity=self.entity, tracking_id=error.tracking_id
            )
        super().on_detached(error)

    @staticmethod
    def _too_large(size: int, refusal: ServiceError) -> EventTooLargeError:
        error = EventTooLargeError(size)
        error.__cause__ = refusal
        return error

    def _error(self, outcome: Any, size: int) -> EventPumpError | None:
        match outcome:
            case EventPumpError():
                return outcome  # it was not sent
            case Accepted():
                return None
            case Rejected(error) if error is not None:
                refusal = error_for(str(error.condition), error.description, entity=self.entity)
                return self._too_large(size, refusal) if refusal.condition == MESSAGE_SIZE_EXCEEDED else refusal
            case Released() | Modified():
                return ServiceError("the service released the message", entity=self.entity)
            case _:
                return RequestRefusedError("the message was rejected without a reason", entity=self.entity)

    def abandon(self, error: EventPumpError) -> None:
        """Begin to detach, without waiting for the peer. Pending sends fail with the error."""
        self._on_end(error)
        self.detach_now()

    def _closed_here(self) -> LinkDetachedError:
        return LinkDetachedError("the link was closed here", entity=self.entity)

    async def aclose(self) -> None:
        """See `SendLink`."""
        self._is_closing = True
        self._on_end(self._closed_here())
        await super().aclose()

    def _on_lost(self, error: ServiceError) -> None:
        if self._on_lost_link is not None:
            self._on_lost_link(error)

    def _on_end(self, error: EventPumpError) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        waiting = (*self._unsettled.values(), *self._queue)
        self._queue.clear()
        self._unsettled.clear()
        for each in waiting:
            each.ended(error)
