"""A source as a transport: hosts and readers read it as they read a hub, with the same feed, cache and credit."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from eventpump.aio.tasks import TaskSet
from eventpump.cancellation import is_failure
from eventpump.errors import (
    ClosedError,
    ConnectionLostError,
    EventPumpError,
    RequestRefusedError,
    ServiceError,
    SourceEndedError,
)
from eventpump.interfaces import (
    CLOSE_TIMEOUT,
    EventSource,
    HubProperties,
    PartitionProperties,
    ProbedSourceLink,
    ReceiveLinkSpec,
    ReceiveSink,
    SendLink,
    SendLinkSpec,
    SourceLink,
)

_log = logging.getLogger("eventpump.sources")

_T = TypeVar("_T")


class SourceTransport:
    """`interfaces.Transport` over an event source. It does not close the source.

    An error that a source may not raise, such as a `KeyError`, counts as a failure after which the link is opened
    again: what is wrong with a user's code must not end a host.

    Args:
        keeps_ended: Whether a link stays open when its partition has ended, as to a hub to which no event is published.
            For hosts; a reader gets the end.
    """

    def __init__(self, source: EventSource, *, keeps_ended: bool) -> None:
        self.source = source
        self._keeps_ended = keeps_ended
        self._links: set[_Link] = set()
        self._tasks = TaskSet(self._failed)
        self._is_closed = False

    @property
    def fully_qualified_namespace(self) -> str:
        """The source's namespace."""
        return self.source.fully_qualified_namespace

    async def get_hub_properties(self, hub: str) -> HubProperties:
        return await self._call("partitions", self.source.partitions, HubProperties)

    async def get_partition_properties(self, hub: str, partition_id: str) -> PartitionProperties:
        source = self.source
        return await self._call(
            "partition_properties", lambda: source.partition_properties(partition_id), PartitionProperties
        )

    async def open_receive_link(self, spec: ReceiveLinkSpec, sink: ReceiveSink) -> _Link:
        source, link = self.source, _Link(self, sink, spec.max_message_size, keeps_ended=self._keeps_ended)
        group, level = spec.consumer_group, spec.owner_level
        self._links.add(link)
        try:
            inner = await self._call(
                "open",
                lambda: source.open(spec.partition_id, spec.position, link, consumer_group=group, owner_level=level),
                None,
            )
            link.opened(inner)
        except BaseException:
            link.leave()
            raise
        if self._is_closed:
            await link.aclose()
            raise ClosedError("transport")
        return link

    async def open_send_link(self, spec: SendLinkSpec) -> SendLink:
        """Raise `RequestRefusedError`: a source has no hub to send to."""
        raise RequestRefusedError("an event source cannot be sent to; give a producer of a hub")

    async def aclose(self) -> None:
        """Close all links. The source stays open."""
        self._is_closed = True
        for link in tuple(self._links):
            link.end(ConnectionLostError("the source's links were closed here"))
        await self._tasks.wait(CLOSE_TIMEOUT)

    def left(self, link: _Link) -> None:
        """Called when a link has ended."""
        self._links.discard(link)

    def close_later(self, link: SourceLink) -> None:
        """Close a link of the source without waiting for it."""
        self._tasks.spawn(link.aclose(), "eventpump closes a source's link")

    async def _call(self, operation: str, call: Callable[[], Awaitable[_T]], kind: type[_T] | None) -> _T:
        """Call the source, and raise what it may not raise or return as a failure of it."""
        if self._is_closed:
            raise ClosedError("transport")
        try:
            answer = await call()
            if not (callable(getattr(answer, "set_credit", None)) if kind is None else isinstance(answer, kind)):
                expected = "a SourceLink" if kind is None else kind.__name__
                raise TypeError(f"it must return {expected}, and returned {type(answer).__name__}")
        except EventPumpError:
            raise
        except BaseException as error:
            if not is_failure(error):
                raise
            raise _failure(operation, error) from error
        return answer

    def _failed(self, operation: str, error: BaseException) -> None:
        _log.warning("%s failed: %s: %s", operation, type(error).__name__, error)


class _Link:
    """A `ReceiveLink` over a source's link, and the sink of that."""

    def __init__(self, transport: SourceTransport, sink: ReceiveSink, max_message_size: int, *, keeps_ended: bool):
        self._transport = transport
        self._sink = sink
        self._max_message_size = max_message_size
        self._keeps_ended = keeps_ended
        self._inner: SourceLink | None = None
        self._is_open = True

    @property
    def max_message_size(self) -> int:
        """The largest message that was requested, in bytes."""
        return self._max_message_size

    def opened(self, inner: SourceLink) -> None:
        """Connect it to the source's link."""
        self._inner = inner

    # What the source calls.

    def messages(self, batch: list[bytes]) -> None:
        """Pass on a run of events: the list as it is."""
        if batch and self._is_open:
            self._sink.messages(batch)

    def detached(self, error: BaseException) -> None:
        """Pass on the end, if it is the first one."""
        if isinstance(error, SourceEndedError) and self._keeps_ended:
            return
        if self.leave():
            self._sink.detached(error if isinstance(error, EventPumpError) else _failure("the link", error))

    # What the host or reader calls.

    def set_credit(self, credit: int) -> None:
        if not self._is_open or self._inner is None:
            return
        try:
            self._inner.set_credit(credit)
        except Exception as error:
            self._fail("set_credit", error)

    async def probe(self, timeout: float) -> bool | None:
        """See `ReceiveLink`. None unless the source's link can be probed."""
        if self._is_open and isinstance(self._inner, ProbedSourceLink):
            return await self._inner.probe(timeout)
        return None

    def drop_connection(self, reason: str) -> None:
        """See `ReceiveLink`. A link without a connection ends alone."""
        if isinstance(self._inner, ProbedSourceLink):
            self._inner.drop_connection(reason)
        else:
            self.end(ConnectionLostError(reason))

    def end(self, error: EventPumpError) -> None:
        """Close the source's link in the background, and end with an error."""
        if self.leave():
            if self._inner is not None:
                self._transport.close_later(self._inner)
            self._sink.detached(error)

    async def aclose(self) -> None:
        self.leave()
        if self._inner is not None:
            await self._inner.aclose()

    def _fail(self, operation: str, error: Exception) -> None:
        """End it in the next turn: its caller does not expect an end within a call."""
        asyncio.get_running_loop().call_soon(
            self.end, error if isinstance(error, EventPumpError) else _failure(operation, error)
        )

    def leave(self) -> bool:
        """Call the sink no more. False if that is so already."""
        if not self._is_open:
            return False
        self._is_open = False
        self._transport.left(self)
        return True


def _failure(operation: str, error: BaseException) -> ServiceError:
    failure = ServiceError(f"{operation} of the event source raised {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure
