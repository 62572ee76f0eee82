"""Reads one partition without leases: tail, replay, catch-up."""

from __future__ import annotations

import asyncio
import logging
import random
from bisect import bisect_left
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Self

from eventpump.consumer.ending import RangeWatch
from eventpump.consumer.feed import CLOSE_TIMEOUT, PartitionFeed
from eventpump.errors import ClosedError, ConfigurationError
from eventpump.events import EventPosition, LastEnqueued, ReceivedEvent
from eventpump.ports import PartitionProperties, ReceiveLinkSpec, Transport
from eventpump.settings import ReaderSettings

logger = logging.getLogger("eventpump.consumer")

_START = "-1"
_LATEST = "@latest"


class PartitionReader:
    """Reads one partition from a position, to the end of a range or for ever.

    Shared, or with an owner level. A link that fails is opened again after the last event received: nothing is lost
    and nothing comes twice. The reader owns the transport it makes.

    Used as `async with reader:` and then `async for event in reader`, `read` or `read_raw`; one of them at a time.

    :param transport_factory: makes the way to the namespace, on entering.
    :param rng: spreads load; None for an unseeded one.
    """

    def __init__(
        self, transport_factory: Callable[[], Transport], settings: ReaderSettings, *, rng: random.Random | None = None
    ) -> None:
        self._transport_factory = transport_factory
        self._settings = settings
        self._rng = random.Random() if rng is None else rng
        self._transport: Transport | None = None
        self._feed: PartitionFeed | None = None
        self._watch: RangeWatch | None = None
        self._is_end_passed = False
        self._is_closed = False
        self._end = settings.end
        self._is_at_end = False
        self._last: bytes | None = None

    @property
    def position(self) -> EventPosition:
        """Where a reader that goes on after what this one gave would begin."""
        if self._last is None:
            return self._settings.position
        return EventPosition.at_offset(ReceivedEvent(self._last).offset)

    @property
    def is_at_end(self) -> bool:
        """Whether the range is read, or what was left of it is gone. Never without an end."""
        return self._is_at_end

    @property
    def last_enqueued(self) -> LastEnqueued | None:
        """The partition's newest event, as told with the last one received. None without `track_last_enqueued`."""
        newest = None if self._feed is None else self._feed.newest
        return None if newest is None else ReceivedEvent(newest).last_enqueued

    async def __aenter__(self) -> Self:
        """Connect, and find the end of the range. :raises ServiceError: the partition cannot be read."""
        if self._is_closed or self._feed is not None:
            raise ClosedError("partition reader")
        settings = self._settings
        transport = self._transport = self._transport_factory()
        try:
            if self._end is not None:
                properties = await transport.get_partition_properties(settings.hub, settings.partition_id)
                self._bound(self._end, properties)
        except BaseException:
            await self.aclose()
            raise
        self._feed = PartitionFeed(
            transport,
            ReceiveLinkSpec(
                hub=settings.hub,
                consumer_group=settings.consumer_group,
                partition_id=settings.partition_id,
                position=settings.position,
                owner_level=settings.owner_level,
                receiver_name=settings.receiver_name,
                track_last_enqueued=settings.track_last_enqueued,
                max_message_size=settings.max_message_size,
            ),
            settings,
            rng=self._rng,
            startup_timeout=settings.startup_timeout,
        )
        if not self._is_at_end:
            self._feed.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def __aiter__(self) -> AsyncIterator[ReceivedEvent]:
        """Iterate over the events, to the end of the range. Breaking off loses what of a batch was not given."""
        while events := await self.read():
            for event in events:
                yield event

    async def read(self, max_events: int = 300, max_wait_time: float | None = None) -> list[ReceivedEvent]:
        """Read what is there, one event or more, as soon as there is one.

        Cancelled, nothing is lost.

        :param max_wait_time: seconds to wait for the first; None for as long as it takes.
        :returns: empty where the time ran out or the range is read; see `is_at_end`.
        :raises ServiceError: the link ended for a reason that trying again does not cure.
        """
        return list(map(ReceivedEvent, await self.read_raw(max_events, max_wait_time)))

    async def read_raw(self, max_messages: int = 300, max_wait_time: float | None = None) -> list[bytes]:
        """Read as `read` does, but give the encoded messages."""
        if max_messages < 1:
            raise ConfigurationError("max_messages", "must be at least 1")
        feed = self._feed
        if feed is None or self._is_closed:
            raise ClosedError("partition reader")
        loop = asyncio.get_running_loop()
        until = None if max_wait_time is None else loop.time() + max_wait_time
        while not self._is_at_end:
            messages = feed.take(max_messages)
            if messages:
                messages = self._within(messages)
                if messages:
                    self._last = messages[-1]
                return messages
            if feed.error is not None:
                raise feed.error
            if self._is_rest_gone(feed):
                break
            remaining = None if until is None else until - loop.time()
            if remaining is not None and remaining <= 0:
                return []
            patience = None if self._watch is None else self._watch.patience
            await feed.wait(min((each for each in (remaining, patience) if each is not None), default=None))
        return []

    def _is_rest_gone(self, feed: PartitionFeed) -> bool:
        """Whether retention has removed what was left of the range. Nothing waits to be taken from the feed."""
        if self._end is None:
            return False
        if self._watch is None:
            self._watch = RangeWatch(self._ask, self._has_nothing_left, feed.wake)
        if not self._watch.is_over(feed.newest):
            return False
        logger.warning(
            "hub %s, partition %s: what was left of the range is gone", self._settings.hub, self._settings.partition_id
        )
        self._is_at_end = True
        self._stop()
        return True

    async def _ask(self) -> PartitionProperties:
        assert self._transport is not None
        return await self._transport.get_partition_properties(self._settings.hub, self._settings.partition_id)

    def _has_nothing_left(self, properties: PartitionProperties) -> bool:
        """Whether a partition holds nothing up to the end of the range, and what is stored from now on lies beyond."""
        end, newest = self._end, properties.last_enqueued_sequence_number
        assert end is not None
        if end.sequence_number is not None:
            last = end.sequence_number if end.inclusive else end.sequence_number - 1
            return properties.beginning_sequence_number > last or (properties.is_empty and newest >= last)
        assert end.enqueued_time is not None
        # A partition that was emptied may not say any more when its newest event came.
        if properties.is_empty:
            return self._is_end_passed
        self._is_end_passed = properties.last_enqueued_time > end.enqueued_time
        return False

    async def aclose(self) -> None:
        """Detach and disconnect. Closing twice is fine; cancelled, the link still ends."""
        self._is_closed = True
        try:
            if self._watch is not None:
                await self._watch.aclose(CLOSE_TIMEOUT)
            if self._feed is not None:
                await self._feed.aclose()
        finally:
            if self._transport is not None:
                await self._transport.aclose()

    # --------------------------------------------------------------------------------------------------- the end

    def _bound(self, end: EventPosition, properties: PartitionProperties) -> None:
        """Make a sequence number or a time of the end, and see whether anything lies before it at all."""
        newest = properties.last_enqueued_sequence_number
        if end.offset == _LATEST:
            end = EventPosition.at_sequence_number(newest, inclusive=True)
            self._is_at_end = properties.is_empty
        self._end = end
        if end.enqueued_time is not None:
            self._is_end_passed = not properties.is_empty and properties.last_enqueued_time > end.enqueued_time
        start = self._settings.position
        if end.sequence_number is not None:
            last = end.sequence_number if end.inclusive else end.sequence_number - 1
            self._is_at_end = self._is_at_end or last < properties.beginning_sequence_number
            if start.sequence_number is not None:
                first = start.sequence_number if start.inclusive else start.sequence_number + 1
                self._is_at_end = self._is_at_end or first > last
            elif _is_after(start, properties):
                self._is_at_end = self._is_at_end or newest >= last

    def _within(self, messages: list[bytes]) -> list[bytes]:
        """Cut a batch off at the end of the range. Only its last message is decoded, unless the end lies in it."""
        if self._end is None:
            return messages
        if self._is_past(messages[-1]):
            self._is_at_end = True
            self._stop()
            return messages[: bisect_left(messages, True, key=self._is_past)]
        if self._end.sequence_number is not None:
            last = self._end.sequence_number if self._end.inclusive else self._end.sequence_number - 1
            if ReceivedEvent(messages[-1]).sequence_number >= last:
                self._is_at_end = True
                self._stop()
        return messages

    def _stop(self) -> None:
        if self._feed is not None:
            self._feed.stop()

    def _is_past(self, message: bytes) -> bool:
        end, event = self._end, ReceivedEvent(message)
        assert end is not None
        if end.sequence_number is not None:
            past: float = event.sequence_number - end.sequence_number
        else:
            assert end.enqueued_time is not None
            past = (event.enqueued_time - end.enqueued_time).total_seconds()
        return past > 0 if end.inclusive else past >= 0


def _is_after(start: EventPosition, properties: PartitionProperties) -> bool:
    """Tell whether a position is known to lie after everything the partition holds."""
    if start.enqueued_time is not None:
        return start.enqueued_time > properties.last_enqueued_time
    if start.offset in {_START, None}:
        return False
    return start.offset == _LATEST or (start.offset == properties.last_enqueued_offset and not start.inclusive)
