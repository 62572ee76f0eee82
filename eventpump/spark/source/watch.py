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
from eventpump.spark.source.known_hubs import ACTIVE_SHARE, HubFacts, Item, KnownHubs, RequestBudget
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

CHECK_SECONDS: Final = 5.0
"""Every so often, one of the partitions and hubs that links watch is asked for all the same."""

SETTLE_SECONDS: Final = 2.0
"""A link that has waited for its event for so long shows that the partition had none when it began to."""

_EARLY: Final = 0.001
"""By how many seconds a timer may be early."""

AWAY_SECONDS: Final = 5.0
"""After so long without a call everything is asked for that links do not watch: the next call is a trigger later."""


class HubsWatch:
    """Keeps the driver's knowledge of the hubs of one query up to date. On one event loop, one call at a time.

    While a batch is planned and read, one round of requests may be under way (`refresh_behind`); every other call that
    makes requests waits for it first.
    """

    def __init__(self, transport: Callable[[], Transport], hubs: Sequence[SourceOptions]) -> None:
        self._transport = transport
        self._hubs = tuple(hubs)
        self._names = [each.connection.hub for each in hubs]
        self._interval = hubs[0].snapshot_interval
        self._known = KnownHubs(len(hubs))
        self._budget = RequestBudget()
        self._last_round = self._called_at = self._checked_at = float("-inf")
        self._reading: asyncio.Task[None] | None = None
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
    def is_complete(self) -> bool:
        """Whether everything was asked for at least once since each hub was created."""
        return not self._known.unknown(_EVER)

    @property
    def facts(self) -> list[HubFacts]:
        """What is known of each hub."""
        return [self._known.facts(index) for index in range(len(self._hubs))]

    def is_known_since(self, moment: float) -> bool:
        """Return whether everything was asked for since a moment, on the loop's clock, or is watched since then."""
        unknown = self._known.unknown(moment)
        settled = asyncio.get_running_loop().time() - SETTLE_SECONDS
        return not unknown or (moment <= settled + _EARLY and self._watched_items(settled).issuperset(unknown))

    async def look_at_all(self) -> None:
        """Read everything again. Raises `ServiceError` if the service did not answer in time, or refused."""
        await self._joined()
        self._checked_at = since = asyncio.get_running_loop().time()
        while unknown := self._known.unknown(since):
            # A hub's partitions are known once it has answered.
            hubs = [each for each in unknown if each.partition_id is None]
            await self._read(hubs or unknown)

    async def until_known(self) -> None:
        """Read everything, if that was not done yet. Raises as `look_at_all`."""
        if not self.is_complete:
            await self.look_at_all()

    async def refresh(self) -> None:
        """Read what the budget allows at once, if there was news since the last time, or `snapshot_interval` is over.

        After a long time without a call everything is read, as fast as the budget allows. What links watch is not asked
        for: a link that waits for an event shows that there is none.
        """
        await self._joined()
        await self.until_known()
        await self._read_due()

    async def refresh_behind(self) -> None:
        """Begin what `refresh` does, unless that is in progress. Only the hubs' own properties are waited for, if they
        were not asked for within `AWAY_SECONDS`: nothing that is known of a hub holds once it is recreated."""
        since = asyncio.get_running_loop().time() - AWAY_SECONDS
        await self._read_now([each for each in self._known.unknown(since) if each.partition_id is None])
        if self._reading is None or self._reading.done():
            await self._joined()
            self._reading = asyncio.create_task(self._read_due(), name="refresh what is known of the hubs")

    async def _joined(self) -> None:
        """Wait for what was begun behind a batch. Raises its `ServiceError`."""
        if self._reading is not None:
            await asyncio.wait({self._reading})
            reading, self._reading = self._reading, None
            reading.result()

    async def _read_due(self) -> None:
        now = asyncio.get_running_loop().time()
        called_at, self._called_at = self._called_at, now
        rate = self._budget.rate(now)
        if self._interval is None:
            is_due = self._known.news_at > self._last_round or now >= called_at + AWAY_SECONDS
        else:
            is_due = now >= self._last_round + min(self._interval, self._known.pace(rate, self._interval, now).seconds)
        if is_due and (free := self._budget.free(now)):
            # After a long trigger interval everything is old: what is not read now would wait for the next trigger.
            age = max(self._interval or 0.0, AWAY_SECONDS + _OLD_ROUNDS * len(self._known) / rate)
            watched = self._watched_items()
            old = [each for each in self._known.unknown(now - age) if each not in watched]
            await self._read(old if len(old) > free else self._chosen(free, now, free // ACTIVE_SHARE))
        self._called_at = asyncio.get_running_loop().time()

    def _chosen(self, count: int, now: float, active: int) -> list[Item]:
        """Return what to read: so many items that no link watches, and one that a link does if that was long ago."""
        watched = self._watched_items()
        items = self._known.next(count, now, active=active, without=watched)
        if watched and now >= self._checked_at + CHECK_SECONDS - _EARLY:
            self._checked_at = now
            items.append(self._known.stalest(watched, now))
        return items

    def _watched_items(self, since: float = float("inf")) -> set[Item]:
        """Return the partitions whose next event a link waits for, and the hubs of which that is each partition, if the
        hub was read after its links were attached.

        Args:
            since: Only those whose link was attached before this moment.
        """
        found: set[Item] = set()
        for index, links in enumerate(self._links):
            if links is None:
                continue
            ends = self._known.ends(index)
            attached = {each: at for each, end in ends.items() if (at := links.waits_since(each, end)) is not None}
            found |= {Item(index, each) for each, at in attached.items() if at <= since}
            hub = Item(index, None)
            if ends and attached.keys() == ends.keys() and hub not in self._known.unknown(max(attached.values())):
                found.add(hub)
        return found

    def watch(self, drained: Mapping[int, Mapping[str, int]], *, skips_busy: bool = False) -> None:
        """Have links show the next event of partitions.

        Args:
            skips_busy: Whether no new link is opened where more than `FOLLOWED` events came since the call before.
        """
        for index, links in enumerate(self._links):
            if links is not None:
                links.watch(drained.get(index, {}), skips_busy=skips_busy)

    def planned(self) -> None:
        """Record that a batch was planned: what came while it is read, the next `refresh` asks for."""
        self._known.news_at = asyncio.get_running_loop().time()

    async def until_news(self, drained: Mapping[int, Mapping[str, int]]) -> None:
        """Wait until something may have changed: an event was shown by a link, or the next round of requests is
        done."""
        await self._joined()
        loop = asyncio.get_running_loop()
        self.watch(drained)
        now = loop.time()
        watched = self._watched_items()
        pace = self._known.pace(self._budget.rate(now), self._interval, now)
        turn = max(self._last_round + pace.seconds, now + self._budget.wait(pace.requests, now))
        pauses = [turn] if len(watched) < len(self._known) else []
        if watched:
            pauses += [self._checked_at + CHECK_SECONDS, now + SETTLE_SECONDS]
        try:
            async with asyncio.timeout(max(0.0, min(pauses) - now)):
                await self._news.wait()
        except TimeoutError:
            count = pace.requests if loop.time() >= turn - _EARLY else 0
            if items := self._chosen(count, loop.time(), pace.active):
                await self._read(items)
        else:
            await asyncio.sleep(GATHER)
        self._news.clear()
        self._called_at = loop.time()

    async def aclose(self) -> None:
        """Close the links. May be called twice."""
        if (reading := self._reading) is not None:
            reading.cancel()
            await asyncio.wait({reading})
            if not reading.cancelled():
                reading.exception()  # nobody is left whom it concerns
            self._reading = None
        await gather(links.aclose() for links in self._links if links is not None)

    def _shown(self, index: int, partition_id: str, event: ReceivedEvent) -> None:
        now = asyncio.get_running_loop().time()
        if self._known.shown(index, partition_id, event.sequence_number, event.last_enqueued, now):
            self._news.set()

    async def _read(self, items: Sequence[Item]) -> None:
        """Read items; and, of a hub that turns out to be another one, everything."""
        self._last_round = asyncio.get_running_loop().time()
        await self._read_now(items)

    async def _read_now(self, items: Sequence[Item]) -> None:
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
    attached_at: float = 0.0
    followed: int = FOLLOWED
    known: int = 0
    is_parked: bool = False


class _WatchLinks:
    """The links of one hub: one for each partition that is read to its end, with credit for one event.

    They are in a consumer group of their own and have no owner level, so they disturb no reader.
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
        """Watch partitions that are read to their ends. Links of others have no credit, or show what is known;
        they stay."""
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

        def attached() -> None:
            watched.attached_at = asyncio.get_running_loop().time()

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
            on_attached=attached,
        )
        watched = self._watched[partition_id] = _Watched(feed, feed.cursor(), number)
        feed.start()
        self._show(partition_id, watched)

    def waits_since(self, partition_id: str, number: int) -> float | None:
        """Return when a link was attached that shows an event as soon as the partition has it; None without one."""
        watched = self._watched.get(partition_id)
        if watched is None or watched.is_parked or watched.number != number or not watched.feed.is_attached:
            return None
        return watched.attached_at

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
