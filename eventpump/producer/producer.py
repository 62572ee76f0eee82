"""Sending events: at least once, to a partition, by a key, or wherever the service likes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Self, TypeVar

from eventpump.core.backoff import Backoff
from eventpump.dialect.conditions import SERVER_BUSY_WAIT
from eventpump.dialect.names import BATCH_MESSAGE_FORMAT
from eventpump.errors import (
    ClosedError,
    ConfigurationError,
    Recovery,
    ServiceBusyError,
    ServiceError,
)
from eventpump.events import EventData
from eventpump.ports import HubProperties, PartitionProperties, SendLink, SendLinkSpec, Transport
from eventpump.producer.batch import EventBatch
from eventpump.settings import RetryOptions

MAX_BATCH_SIZE = 1024 * 1024
"""Bytes; what a batch is filled to where the service states no limit."""


_T = TypeVar("_T")


class HubProducer:
    """Sends events to one hub over a transport. One send link per target, attached when first used.

    Sends to one target overlap, so that a retry may reorder them; await each for order.

    :param transport: closed with the producer.
    """

    def __init__(
        self, transport: Transport, hub: str, *, retry: RetryOptions | None = None, rng: random.Random | None = None
    ) -> None:
        self._transport = transport
        self._hub = hub
        self._retry = retry or RetryOptions()
        self._rng = rng or random.Random()
        self._links: dict[str | None, SendLink] = {}
        self._opening: dict[str | None, asyncio.Lock] = {}
        self._dropping: set[asyncio.Task[None]] = set()
        self._closed = asyncio.Event()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    async def create_batch(
        self, *, partition_id: str | None = None, partition_key: str | None = None, max_size: int | None = None
    ) -> EventBatch:
        """Make an empty batch, bound to its target, of what the service takes in one message.

        :param max_size: a lower limit, in bytes.
        :raises ServiceError: the link that knows the limit cannot be attached.
        """
        _one_target(partition_id, partition_key)
        link = await self._with_retries(partition_id, _itself)
        limit = MAX_BATCH_SIZE if link.max_message_size >= 2**62 else link.max_message_size
        if max_size is not None:
            if not 0 < max_size <= limit:
                raise ConfigurationError("max_size", f"must lie between 1 and the service's limit of {limit}")
            limit = max_size
        return EventBatch(limit, partition_id=partition_id, partition_key=partition_key)

    async def send(
        self,
        events: EventData | Sequence[EventData] | EventBatch,
        *,
        partition_id: str | None = None,
        partition_key: str | None = None,
    ) -> None:
        """Send events as one message, and wait until the service has stored them.

        :param events: an event, several, or a batch, which knows its target by itself.
        :param partition_id: send to this partition.
        :param partition_key: send where events of this key go.
        :raises EventTooLargeError: they do not fit one message; nothing is sent.
        :raises ServiceError: refused, or no success within the retries; after a lost connection or a time-out the
            events may have been stored. Cancelled, they may have been too.
        """
        if isinstance(events, EventBatch):
            if partition_id is not None or partition_key is not None:
                raise ConfigurationError("partition_id", "a batch knows its target; give it to create_batch")
            partition_id, partition_key = events.partition_id, events.partition_key
            batch = events
        else:
            _one_target(partition_id, partition_key)
            batch = EventBatch(2**62, partition_id=partition_id, partition_key=partition_key)
            for event in [events] if isinstance(events, EventData) else events:
                batch.try_add(event)
        if batch.count == 0:
            return
        message = batch.encode()

        async def attempt(link: SendLink) -> None:
            await link.send(message, message_format=BATCH_MESSAGE_FORMAT)

        await self._with_retries(partition_id, attempt)

    async def get_hub_properties(self) -> HubProperties:
        """Read about the hub. :raises ServiceError: as of the transport."""
        return await self._transport.get_hub_properties(self._hub)

    async def get_partition_ids(self) -> tuple[str, ...]:
        """List the hub's partitions. :raises ServiceError: as of the transport."""
        return (await self.get_hub_properties()).partition_ids

    async def get_partition_properties(self, partition_id: str) -> PartitionProperties:
        """Read about a partition. :raises ServiceError: as of the transport."""
        return await self._transport.get_partition_properties(self._hub, partition_id)

    async def aclose(self) -> None:
        """Close the links and the connection. Sends still waiting fail. Closing twice is fine."""
        self._closed.set()
        self._links.clear()
        await self._transport.aclose()
        if self._dropping:
            await asyncio.wait(self._dropping)  # with the connection gone, they have nothing to wait for

    # ------------------------------------------------------------------------------------------ inside

    async def _with_retries(self, partition_id: str | None, attempt: Callable[[SendLink], Awaitable[_T]]) -> _T:
        """Run an attempt on the target's link, again under the retry policy where that can help."""
        backoff = Backoff(self._retry.base_delay, self._retry.max_delay)
        while True:
            link: SendLink | None = None
            try:
                link = await self._link(partition_id)
                return await attempt(link)
            except ServiceError as error:
                if link is not None and error.recovery in (Recovery.RELINK, Recovery.RECONNECT):
                    self._drop(partition_id, link)
                if error.recovery is Recovery.GIVE_UP or backoff.failures >= self._retry.max_retries:
                    raise
                wait = SERVER_BUSY_WAIT if isinstance(error, ServiceBusyError) else 0.0
                await self._pause(backoff.next(self._rng, at_least=wait), error)

    async def _pause(self, seconds: float, error: ServiceError) -> None:
        """Wait before the next try. :raises ServiceError: the one given, where the producer is closed meanwhile."""
        try:
            async with asyncio.timeout(seconds):
                await self._closed.wait()
        except TimeoutError:
            return
        raise error

    async def _link(self, partition_id: str | None) -> SendLink:
        async with self._opening.setdefault(partition_id, asyncio.Lock()):
            if self._closed.is_set():
                raise ClosedError("producer")
            link = self._links.get(partition_id)
            if link is None:
                link = await self._transport.open_send_link(SendLinkSpec(self._hub, partition_id))
                self._links[partition_id] = link
            return link

    def _drop(self, partition_id: str | None, link: SendLink) -> None:
        """Let go of a link that failed; another send may have put a new one in its place.

        A service that does not answer the detach holds up nobody.
        """
        if self._links.get(partition_id) is link:
            del self._links[partition_id]
            task = asyncio.create_task(link.aclose(), name="close a failed send link")
            self._dropping.add(task)
            task.add_done_callback(self._dropping.discard)


async def _itself(link: SendLink) -> SendLink:
    return link


def _one_target(partition_id: str | None, partition_key: str | None) -> None:
    for field, value in (("partition_id", partition_id), ("partition_key", partition_key)):
        # A key of another type would be routed by nothing at all.
        if value is not None and not isinstance(value, str):
            raise ConfigurationError(field, f"must be text, not {type(value).__name__}")
    if partition_id is not None and partition_key is not None:
        raise ConfigurationError("partition_key", "cannot be given along with partition_id")
