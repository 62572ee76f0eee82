"""How the driver of a query finds out what is new: requests within a budget, and links that show the next event."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from eventpump.aio.tasks import TaskSet, gather
from eventpump.consumer.link.feed import FeedCursor, PartitionFeed, as_received
from eventpump.errors import EntityNotFoundError, EventError, RequestRefusedError
from eventpump.eventhubs.events import EventPosition, ReceivedEvent
from eventpump.interfaces import CLOSE_TIMEOUT, ReceiveLinkSpec, Transport
from eventpump.options.consumer import FeedSettings
from eventpump.spark.source.known_hubs import HubFacts, Item, KnownHubs, RequestBudget
from eventpump.spark.source.lookups import request
from eventpump.spark.source.offsets import HubSnapshot
from eventpump.spark.source.options import SourceOptions

_log = logging.getLogger("eventpump.spark")

_EVER: Final = -sys.float_info.max
"""Before any time at which something was asked for."""

GATHER: Final = 0.01
"""Seconds to wait for more new events after the first one, so that events published together are one batch."""

REFUSED_SECONDS: Final = 30.0
"""Seconds after which a partition whose link was refused for good is watched again."""

FOLLOWED: Final = 10
"""The most events that a link shows of a partition between two calls, each of them the newest when it is shown: a link
that falls behind stops, so that no stream is received twice."""

_OLD_ROUNDS: Final = 2
"""A trigger reads, whatever it takes, what was not read for as long as this many rounds of all partitions take."""

TRUSTED_SECONDS: Final = 5.0
"""For so long after an answer, a partition whose link waits for the next event is not asked for again."""


class HubsWatch:
    """Keeps the driver's knowledge of the hubs of one query up to date. On one event loop, one call at a time.

    Args:
        transport: Returns the connection to the namespace.
        hubs: The options of each hub of the query.
    """

    def __init__(self, transport: Callable[[], Transport], hubs: Sequence[SourceOptions]) -> None:
        self._transport = transport
        self._hubs = tuple(hubs)
        self._names = [each.connection.hub for each in hubs]
        self._interval = hubs[0].snapshot_interval
        self._known = KnownHubs(len(hubs))
        self._budget = RequestBudget()
        self._last_round = float("-inf")
        self._news = asyncio.Event()
        self._links = [
            _WatchLinks(transport, each, partial(self._shown, index)) if each.watch_consumer_group is not None else None
            for index, each in enumerate(hubs)
        ]

    @property
    def snapshots(self) -> Mapping[str, HubSnapshot]:
        """What the hubs hold, as far as it is known, by name in lower case."""
        return self._known.snapshots(self._names)

    @property
    def facts(self) -> list[HubFacts]:
        """What is known of each hub."""
        return [self._known.facts(index) for index in range(len(self._hubs))]

    def is_known_since(self, moment: float) -> bool:
        """Return whether everything was asked for since a moment, on the loop's clock."""
        return self._known.is_known_since(moment)

    async def look_at_all(self) -> None:
        """Read everything again.

        Raises:
            ServiceError: The service did not answer in time, or refused.
        """
        since = asyncio.get_running_loop().time()
        while unknown := self._known.unknown(since):
            # A hub's partitions are known once it has answered.
            hubs = [each for each in unknown if each.partition_id is None]
            await self._read(hubs or unknown)

    async def until_known(self) -> None:
        """Read everything, if that was not done yet.

        Raises:
            ServiceError: The service did not answer in time, or refused.
        """
        if not self.is_known_since(_EVER):
            await self.look_at_all()

    async def refresh(self) -> None:
        """Read what the budget allows at once, unless it is too soon after the last time for `snapshot_interval`.

        After a long time without a call everything is read, as fast as the budget allows. What links have shown is not
        asked for: a link that waits for an event shows that there is none.

        Raises:
            ServiceError: The service did not answer in time, or refused.
        """
        await self.until_known()
        now = asyncio.get_running_loop().time()
        pause = min(self._interval, self._known.pace(self._budget.rate(now), self._interval).seconds)
        if now >= self._last_round + pause and (free := self._budget.free(now)):
            shown = self._waiting_links() - set(self._known.unknown(now - TRUSTED_SECONDS))
            # After a long trigger interval everything is old: what is not read now would wait for the next trigger.
            full_rounds = _OLD_ROUNDS * len(self._known) / self._budget.rate(now)
            old = [
                each
                for each in self._known.unknown(now - max(self._interval, TRUSTED_SECONDS + full_rounds))
                if each not in shown
            ]
            if items := old if len(old) > free else self._known.next(free, now, without=shown):
                await self._read(items)

    def _waiting_links(self) -> set[Item]:
        """Return the partitions whose next event a link waits for, and the hubs of which that is each partition."""
        found: set[Item] = set()
        for index, links in enumerate(self._links):
            if links is not None:
                ends = self._known.snapshots(self._names)[self._names[index].lower()].bounds
                waiting = {each for each, bounds in ends.items() if links.waits_for(each, bounds.latest)}
                found |= {Item(index, each) for each in waiting}
                if waiting == ends.keys():
                    found.add(Item(index, None))
        return found

    def watch(self, drained: Mapping[int, Mapping[str, int]], *, skips_busy: bool = False) -> None:
        """Have links show the next event of partitions.

        Args:
            drained: Per index of a hub, and per partition that is read to its end, the number of the next event.
            skips_busy: Whether no new link is opened where more than `FOLLOWED` events came since the call before.
        """
        for index, links in enumerate(self._links):
            if links is not None:
                links.watch(drained.get(index, {}), skips_busy=skips_busy)

    async def until_news(self, drained: Mapping[int, Mapping[str, int]]) -> None:
        """Wait until something may have changed: an event was shown by a link, or the next round of requests is done.

        Args:
            drained: Per index of a hub, and per partition that is read to its end, the number of the next event.

        Raises:
            ServiceError: The service did not answer in time, or refused.
        """
        loop = asyncio.get_running_loop()
        self.watch(drained)
        now = loop.time()
        pace = self._known.pace(self._budget.rate(now), self._interval)
        pause = max(0.0, self._last_round + pace.seconds - now, self._budget.wait(pace.requests, now))
        try:
            async with asyncio.timeout(pause):
                await self._news.wait()
        except TimeoutError:
            await self._read(self._known.next(pace.requests, loop.time(), favors_active=pace.favors_active))
        else:
            await asyncio.sleep(GATHER)
        self._news.clear()

    async def aclose(self) -> None:
        """Close the links. May be called twice."""
        await gather(links.aclose() for links in self._links if links is not None)

    def _shown(self, index: int, partition_id: str, event: ReceivedEvent) -> None:
        now = asyncio.get_running_loop().time()
        if self._known.shown(index, partition_id, event.sequence_number, event.last_enqueued, now):
            self._news.set()

    async def _read(self, items: Sequence[Item]) -> None:
        """Read items; and, of a hub that turns out to be another one, everything."""
        self._last_round = asyncio.get_running_loop().time()
        await gather(map(self._read_one, items))
        while unknown := self._known.unknown(_EVER):
            hubs = [each for each in unknown if each.partition_id is None]
            await gather(map(self._read_one, hubs or unknown))

    async def _read_one(self, item: Item) -> None:
        loop = asyncio.get_running_loop()
        options, transport = self._hubs[item.hub], self._transport()
        hub = options.connection.hub
        if item.partition_id is None:
            began = loop.time()
            found = await request(partial(transport.get_hub_properties, hub), options, self._budget)
            self._known.chosen(item.hub, found, options.chosen(found.partition_ids), began, loop.time())
            return
        began, created_at = loop.time(), self._known.created_at(item.hub)
        ask = partial(transport.get_partition_properties, hub, item.partition_id)
        try:
            properties = await request(ask, options, self._budget)
        except (RequestRefusedError, EntityNotFoundError):
            # A hub that was recreated may have fewer partitions, and there was none of that name for a moment.
            await self._read_one(Item(item.hub, None))
            is_same_hub = self._known.created_at(item.hub) == created_at
            if is_same_hub and item in self._known.unknown(float("inf")):
                raise
            return
        self._known.answered(item.hub, properties, began, loop.time())


@dataclass(slots=True, eq=False)
class _Watched:
    """A partition's link.

    Args:
        number: The number of the event that it shows next, or has shown.
        followed: How many events it may still show after that one.
        known: The number of the partition's next event when its link was last left as it is.
        is_parked: Whether it has shown its event, and can show the one after it.
    """

    feed: PartitionFeed[bytes]
    cursor: FeedCursor[bytes]
    number: int
    followed: int = FOLLOWED
    known: int = 0
    is_parked: bool = False


class _WatchLinks:
    """The links of one hub: one for each partition that is read to its end, with credit for one event.

    They are in a consumer group of their own and have no owner level, so they disturb no reader.

    Args:
        on_shown: Called with a partition and its next event.
    """

    def __init__(
        self,
        transport: Callable[[], Transport],
        options: SourceOptions,
        on_shown: Callable[[str, ReceivedEvent], None],
    ) -> None:
        self._transport = transport
        self._options = options
        self._on_shown = on_shown
        self._watched: dict[str, _Watched] = {}
        self._refused_until: dict[str, float] = {}
        self._tasks = TaskSet(_failed)
        self._rng = random.Random()
        self._is_closed = False

    def watch(self, drained: Mapping[str, int], *, skips_busy: bool) -> None:
        """Watch partitions.

        Args:
            drained: The number of the next event, per partition that is read to its end. Links of other partitions have
                no credit, or show an event that is known; they stay for the next time.
        """
        now = asyncio.get_running_loop().time()
        for partition_id, number in drained.items():
            watched = self._watched.get(partition_id)
            if watched is not None:
                watched.followed = FOLLOWED
                if not watched.is_parked and watched.number == number:
                    continue
                if watched.is_parked and watched.number + 1 == number and watched.feed.error is None:
                    self._go_on(partition_id, watched)
                    continue
                before, watched.known = max(watched.known, watched.number), number
                if skips_busy and number - before > FOLLOWED:
                    continue
                self._drop(partition_id, watched)
            if not self._is_closed and now >= self._refused_until.get(partition_id, now):
                self._open(partition_id, number)

    def _open(self, partition_id: str, number: int) -> None:
        group = self._options.watch_consumer_group
        assert group is not None
        # Not at the number itself: the service may refuse a number that it has not reached.
        before = EventPosition.at_sequence_number(number - 1) if number else EventPosition.earliest()
        feed = PartitionFeed(
            self._transport(),
            ReceiveLinkSpec(
                hub=self._options.connection.hub,
                consumer_group=group,
                partition_id=partition_id,
                position=before,
                receiver_name=f"eventpump-spark-watch-{socket.gethostname()[:32]}-{os.getpid()}",
                track_last_enqueued=True,
            ),
            FeedSettings(hub=self._options.connection.hub, consumer_group=group, prefetch_events=1),
            wrap=as_received,
            rng=self._rng,
            limit=1,
        )
        watched = self._watched[partition_id] = _Watched(feed, feed.cursor(), number)
        feed.start()
        self._show(partition_id, watched)

    def waits_for(self, partition_id: str, number: int) -> bool:
        """Return whether a link is there to show an event as soon as the partition has it."""
        watched = self._watched.get(partition_id)
        return watched is not None and not watched.is_parked and watched.number == number and watched.feed.is_attached

    def _go_on(self, partition_id: str, watched: _Watched) -> None:
        """Have a link that has shown its event show the one after it."""
        watched.number, watched.is_parked = watched.number + 1, False
        watched.feed.resume(1)
        self._show(partition_id, watched)

    def _show(self, partition_id: str, watched: _Watched) -> None:
        self._tasks.spawn(self._until_shown(partition_id, watched), f"watch partition {partition_id}")

    async def _until_shown(self, partition_id: str, watched: _Watched) -> None:
        """Wait for a partition's next event, and report it."""
        feed, cursor = watched.feed, watched.cursor
        while not (messages := cursor.take(1)):
            if feed.error is not None:
                break
            await cursor.wait(None)
        if self._watched.get(partition_id) is not watched:
            return
        if not messages:
            _log.warning(
                "partition %s of hub %s cannot be watched in consumer group %s; new events are looked for by requests: "
                "%s",
                partition_id,
                self._options.connection.hub,
                self._options.watch_consumer_group,
                feed.error,
            )
            self._refused_until[partition_id] = asyncio.get_running_loop().time() + REFUSED_SECONDS
            self._drop(partition_id, watched)
            return
        event = ReceivedEvent(messages[0])
        cursor.processed()
        try:
            watched.number, watched.is_parked = event.sequence_number, feed.park()
        except EventError as error:
            _log.warning("partition %s: an event without a number was received: %s", partition_id, error)
            return
        self._on_shown(partition_id, event)
        newest = event.last_enqueued
        if watched.is_parked and watched.followed and newest is not None and newest.sequence_number == watched.number:
            watched.followed -= 1
            self._go_on(partition_id, watched)

    def _drop(self, partition_id: str, watched: _Watched) -> None:
        del self._watched[partition_id]
        self._tasks.spawn(watched.feed.aclose(), f"close the watch of partition {partition_id}")

    async def aclose(self) -> None:
        """Close all of them. May be called twice."""
        self._is_closed = True
        feeds = [each.feed for each in self._watched.values()]
        self._watched.clear()
        await gather(feed.aclose() for feed in feeds)
        await self._tasks.wait(CLOSE_TIMEOUT)


def _failed(name: str, error: BaseException) -> None:
    _log.error("%s failed", name, exc_info=error)
