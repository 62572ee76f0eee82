"""What reads one consumer group from outside has in common: the hub, by requests at a rate, and its checkpoints."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable
from datetime import UTC, datetime
from typing import Final, TypeVar

from eventpump.aio.closing import AsyncResource
from eventpump.clients.connection import HubConnection
from eventpump.clients.consumers import PartitionReader
from eventpump.clock import LoopClock
from eventpump.core.bucket import TokenBucket
from eventpump.errors import ConfigurationError, EventPumpError, StoreError
from eventpump.eventhubs.events import EventPosition, ReceivedEvent
from eventpump.eventhubs.partitions import partition_order
from eventpump.interfaces import CLOSE_TIMEOUT, Clock, ConsumerScope, HubProperties, PartitionProperties
from eventpump.storage.checkpoints.stored import CheckpointReader, GroupCheckpoints

_T = TypeVar("_T")

AT_ONCE: Final = 8
"""Partitions that are asked for at a time, and requests that may begin at once after a pause."""
EVENT_TIMEOUT: Final = 10.0
"""Seconds in which a single event has to arrive."""


class GroupClient(AsyncResource):
    """The base of clients of one consumer group. It closes its connection, unless that is the caller's.

    Args:
        connection: To the hub.
        consumer_group: The consumer group.
        checkpoints: Reads the group's checkpoints; closed with this.
        rate: The most requests per second to the hub.
        clock: None for the machine's time.

    Raises:
        ConfigurationError: The rate cannot work.
    """

    def __init__(
        self,
        connection: HubConnection,
        consumer_group: str,
        checkpoints: CheckpointReader,
        rate: float,
        clock: Clock | None,
    ) -> None:
        if not 0 < rate <= 1000:
            raise ConfigurationError("rate", "must be above 0 and at most 1,000 requests per second")
        self._connection = connection
        self._scope = ConsumerScope(connection.fully_qualified_namespace, connection.hub, consumer_group)
        self._checkpoints = checkpoints
        self._transport = connection.make()
        self._clock = LoopClock() if clock is None else clock
        self._bucket = TokenBucket(rate, max(1, min(AT_ONCE, int(rate))))
        self._is_closed = False

    @property
    def scope(self) -> ConsumerScope:
        """The consumer group."""
        return self._scope

    async def _hub(self) -> HubProperties:
        await self._turn()
        return await self._transport.get_hub_properties(self._scope.hub)

    async def _facts(self, partition_id: str) -> PartitionProperties:
        await self._turn()
        return await self._transport.get_partition_properties(self._scope.hub, partition_id)

    async def _first_event(
        self, partition_id: str, position: EventPosition, consumer_group: str
    ) -> ReceivedEvent | None:
        """Return the first event at a position; None if none has arrived within `EVENT_TIMEOUT`.

        Raises:
            EventPumpError: It cannot be read.
        """
        await self._turn()
        reader = PartitionReader(
            hub=self._scope.hub,
            partition_id=partition_id,
            transport=self._transport,
            owns_transport=False,
            consumer_group=consumer_group,
            position=position,
            prefetch_events=1,
        )
        async with reader:
            events = await reader.read(1, EVENT_TIMEOUT)
        return events[0] if events else None

    async def _stored(self, reader: CheckpointReader, hub: HubProperties) -> GroupCheckpoints:
        """Read what a store has of all partitions: of some alone, it may be nothing."""
        found = await self._calling(reader.read(self._scope, sorted(hub.partition_ids, key=partition_order)))
        return GroupCheckpoints(dict(found.partitions), tuple(found.notes))

    async def _calling(self, call: Awaitable[_T]) -> _T:
        """Await a call of a reader or a writer, which may be the user's own: its errors are those of a store."""
        try:
            return await call
        except EventPumpError:
            raise
        except Exception as error:
            raise StoreError("access checkpoints", f"{type(error).__name__}: {error}") from error

    async def _turn(self) -> None:
        """Wait until another request may be made."""
        delay = self._bucket.take(self._clock.monotonic())
        if delay:
            await asyncio.sleep(delay)

    def _now(self) -> datetime:
        return datetime.fromtimestamp(self._clock.time(), UTC)

    async def aclose(self) -> None:
        """Close the connection, unless it is the caller's, and what reads the checkpoints. May be called twice."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            await self._checkpoints.aclose()
        finally:
            if self._connection.is_owned:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(CLOSE_TIMEOUT):
                        await self._transport.aclose()

    def __repr__(self) -> str:
        scope = self._scope
        group = f"consumer_group={scope.consumer_group!r}"
        return f"{type(self).__name__}({scope.fully_qualified_namespace}/{scope.hub}, {group})"
