"""One partition's receive link, shared by the subscriptions of a host."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from datetime import datetime

from eventpump.aio.tasks import TaskSet, reject
from eventpump.consumer.calls.handler import PumpEndedError
from eventpump.consumer.link.feed import PartitionFeed
from eventpump.consumer.link.feeds import FeedMaker
from eventpump.consumer.link.member import MemberCalls, MemberFeed
from eventpump.consumer.link.position_search import PositionRequest, search_position
from eventpump.consumer.record.starts import Beginning, HubRecreatedError
from eventpump.core.rewind import PositionSearch
from eventpump.core.sharing import Placement, ShareLedger
from eventpump.core.streams import Selection
from eventpump.errors import (
    ConsumerDisconnectedError,
    OwnershipLostError,
    RequestRefusedError,
    ServiceError,
)
from eventpump.eventhubs.events import Checkpoint, ReceivedEvent
from eventpump.interfaces import (
    CLOSE_TIMEOUT,
    PartitionProperties,
)

JOIN_TIME = 1.0
"""Seconds that a link waits, after the first subscription is ready to read, for the others that are expected."""


class SharedPartition:
    """The receive link of one owned partition, which the subscriptions of a host share.

    The link begins at the lowest position of those that read, and the others skip what lies before theirs. One that
    joins later reads from the cache where that holds all it needs; else the link is opened again at its position, and
    the others skip what they have had. So there is neither a gap nor a repeat.
    """

    def __init__(
        self,
        feeds: FeedMaker,
        *,
        on_closed: Callable[[PartitionFeed[ReceivedEvent]], None],
        on_unexpected: Callable[[str, BaseException], None],
    ) -> None:
        self._feeds = feeds
        self._spec = feeds.spec
        self._settings = feeds.settings
        self._on_closed = on_closed
        self._members: dict[str, MemberFeed] = {}
        self._own: dict[str, MemberFeed] = {}
        self._awaited: set[str] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._feed: PartitionFeed[ReceivedEvent] | None = None
        self._chosen: MemberFeed | None = None
        self._hub_created_at: datetime | None = None
        self._ledger = ShareLedger()
        self._tasks = TaskSet(on_unexpected)
        self._is_opening = False
        self._room = max(1, feeds.settings.prefetch_events // 4)
        self._searches: deque[PositionRequest] = deque()
        self._is_held_back = False
        self._pressure_timer: asyncio.TimerHandle | None = None
        self.is_shared = False
        """Whether several subscriptions read."""
        self.is_watching = False
        """Whether `observe` is to be called whenever a member has read, even if the shared feed is not filling."""
        self.link = 0
        """The number of the link that is shared now, or was shared last: how many were opened before it."""

    @property
    def buffered_bytes(self) -> int:
        """Bytes received over all its links that are not processed yet."""
        return self._feeds.buffered_bytes

    @property
    def feeds_made(self) -> int:
        """How many links were opened, links in place of failed ones not counted."""
        return self._feeds.made

    @property
    def is_open(self) -> bool:
        """Whether there is a link, or one is being opened."""
        return self._feed is not None and not self._feed.is_stopped

    # -------------------------------------------------------------------------------------------- who reads along

    def expect(self, name: str) -> None:
        """Wait a moment for a subscription before the link is opened."""
        self._awaited.add(name)

    def left(self, name: str) -> None:
        """Wait for a subscription no more: it does not join."""
        if name in self._awaited:
            self._awaited.discard(name)
            self._open_when_ready()

    def join(
        self,
        name: str,
        beginning: Beginning,
        calls: MemberCalls,
        *,
        slow_after: float,
        catch_up_group: str | None = None,
        selection: Selection[ReceivedEvent] | None = None,
        shares_from: int | None = None,
    ) -> MemberFeed:
        """Read along from a position.

        Args:
            name: The subscription; one that has left, or has not joined yet.
            shares_from: Read from links that are opened from now on, even if the cache has everything needed, and share
                an existing one only from this sequence number on; None to read from any link.
        """
        self._awaited.discard(name)
        member = MemberFeed(self, name, beginning, calls, slow_after, catch_up_group, selection)
        member.shares_from = shares_from or 0
        if self._feed is not None and self._hub_created_at != member.hub_created_at:
            assert self._hub_created_at is not None
            error = HubRecreatedError(self._spec.hub, self._spec.partition_id, "the hub was deleted and recreated")
            if member.hub_created_at < self._hub_created_at:
                member.fail(error)
                return member
            self._feed.fail(error)
        self._members[name] = member
        feed = self._feed
        if feed is None and shares_from is None:
            self._open_when_ready()
        elif feed is None or feed.is_stopped:
            # Or its last reader has just left, and it is about to be closed.
            self._begin_opening()
        elif shares_from is None and self._placement(member) is Placement.IN_CACHE:
            member.attach(feed, skip_below=member.number, head=self._head)
            if feed.is_attached:
                calls.attached()
        elif self._is_far_behind(member, feed.first_held):
            self._open_own(member)
        else:
            calls.rewound(member.number)
            self._begin_opening()
        self._readers_changed()
        return member

    async def find_position(
        self, search: PositionSearch, hub_created_at: datetime, facts: Callable[[], Awaitable[PartitionProperties]]
    ) -> Checkpoint:
        """Find the event at a position by receiving events. The link is closed meanwhile, and opened again after it.

        Raises:
            UnknownPositionError: There is no such position.
            ServiceError: The position was refused, or the link failed for good.
            HubRecreatedError: The hub was deleted and recreated.
            OwnershipLostError: The partition is given up.
        """
        request = PositionRequest(search, hub_created_at, facts, asyncio.get_running_loop().create_future())
        self._searches.append(request)
        self._begin_opening()
        try:
            return await request.found
        finally:
            request.found.cancel()

    def leave(self, member: MemberFeed) -> None:
        """Forget a subscription that reads no more."""
        if self._members.get(member.name) is member:
            del self._members[member.name]
            self._ledger.leave(member.name)
            self._readers_changed()
            self.observe()
        elif self._own.get(member.name) is member:
            del self._own[member.name]
            self._unpin(member)
            self._readers_changed()

    async def close_feed(self, feed: PartitionFeed[ReceivedEvent], timeout: float) -> None:
        """Detach a feed that is not read any more, and wait so long for the answer."""
        if feed is self._feed:
            self._feed = None
            self._ledger.closed()
        self._on_closed(feed)
        await feed.aclose(timeout)

    def observe(self) -> None:
        """Find out which member holds the others back. Called when one of several has read, or has left."""
        feed = self._feed
        for member in self._own.values():
            room_in_bytes = self._settings.prefetch_bytes if feed is None else feed.room_in_bytes
            if member.pinned > self._room or member.pinned_bytes > room_in_bytes // 4:
                self._unpin(member)
        held_back = feed is not None and len(self._members) > 1 and feed.is_filling
        if not held_back and not self._is_held_back:
            return
        self._is_held_back = held_back
        self._readers_changed()
        settings = self._settings
        room = settings.prefetch_events, settings.prefetch_bytes if feed is None else feed.room_in_bytes
        now = asyncio.get_running_loop().time()
        for member in list(self._members.values()):
            held = member.pressure.observe(member.held if held_back else (0, 0), room, now)
            if held is not None:
                member.calls.slow(held)
                if member.catch_up_group is not None and self._members.get(member.name) is member:
                    self._open_own(member)
        if self._pressure_timer is not None:
            self._pressure_timer.cancel()
            self._pressure_timer = None
        due = [at for each in self._members.values() if (at := each.pressure.next_report) is not None]
        if due:
            self._pressure_timer = asyncio.get_running_loop().call_at(min(due), self.observe)

    async def aclose(self) -> None:
        """End what is under way. Every member has left."""
        for timer in (self._timer, self._pressure_timer):
            if timer is not None:
                timer.cancel()
        await self._tasks.cancel(CLOSE_TIMEOUT)
        while self._searches:
            reject(self._searches.popleft().found, OwnershipLostError(self._spec.partition_id))

    # --------------------------------------------------------------------------------------------------- the link

    def _readers_changed(self) -> None:
        self.is_shared = len(self._members) + len(self._own) > 1
        self.is_watching = self._is_held_back or bool(self._own)

    def _is_far_behind(self, member: MemberFeed, first: int | None) -> bool:
        """Return whether a member is to have a link of its own, as it needs more than fits into the cache."""
        if member.catch_up_group is None:
            return False
        return member.number is None or first is None or first - member.number > self._settings.prefetch_events

    def _open_own(self, member: MemberFeed) -> None:
        """Open a link of its own for a member, in its catch-up group and without an owner level."""
        del self._members[member.name]
        self._ledger.leave(member.name)
        self._own[member.name] = member
        self._readers_changed()
        member.detach()
        feed = self._feeds.make(
            member.position,
            member.hub_created_at,
            consumer_group=member.catch_up_group,
            checks_hub=True,
            on_attached=member.calls.attached,
            on_trouble=lambda error, delay: self._own_troubled(member, feed, error, delay),
        )
        member.has_own_link = True
        member.attach(feed, skip_below=None)
        feed.start()

    def _own_troubled(
        self, member: MemberFeed, feed: PartitionFeed[ReceivedEvent], error: Exception, delay: float | None
    ) -> None:
        if member.feed is not feed or isinstance(error, HubRecreatedError):
            return
        # Not as it is: a link that is stolen in that group says nothing about the lease.
        failure = ServiceError(f"the link of its own in consumer group {member.catch_up_group}: {error}")
        is_over = delay is None or isinstance(error, ConsumerDisconnectedError)
        member.calls.troubled(failure, 0.0 if delay is None else delay, True)
        if is_over:
            # As when five others read the partition in that group: it shares the link of the others, and they wait.
            member.catch_up_group = None
            # It has not come as far as what is kept for it.
            self._unpin(member)
            self._share(member)

    def rejoin(self, member: MemberFeed) -> None:
        """Let a member with a link of its own share the others' again if it is close behind. Called when it reads."""
        feed = self._feed
        if feed is not None and self._hub_created_at != member.hub_created_at:
            return  # its own link finds that out, or the other one
        if feed is not None and not feed.is_stopped:
            head = self._head
            if head is not None and head >= member.shares_from and member.pin(feed, head, self._room):
                self._share(member)
        elif not self._members and not self._awaited and not self._is_opening:
            self._share(member)

    def _share(self, member: MemberFeed) -> None:
        """Let a member read over the shared link: from where it is pinned, or, if it is not, from its position."""
        own, is_pinned = member.feed, member.is_pinned
        member.share()
        del self._own[member.name]
        self._members[member.name] = member
        self._readers_changed()
        if own is not None:
            self._tasks.spawn(self.close_feed(own, CLOSE_TIMEOUT), "eventpump closing of a link of its own")
        if is_pinned:
            if self._ledger.is_open and member.number is not None:
                self._ledger.join(member.name, member.number)
        elif self._feed is None and self._awaited:
            self._open_when_ready()
        else:
            # With a check that the hub is still the one that the position is of.
            self._begin_opening()

    def _unpin(self, member: MemberFeed) -> None:
        unread = member.unpin()
        if unread is not None:
            self._tasks.spawn(self.close_feed(unread, CLOSE_TIMEOUT), "eventpump closing of a link that none reads")

    @property
    def _head(self) -> int | None:
        """The sequence number of the next event that the shared link receives; None if it is not known."""
        feed = self._feed
        if feed is None or (feed.facts.newest is None and self._chosen is not None):
            return None if self._chosen is None else self._chosen.number
        return feed.facts.next_number

    def _placement(self, member: MemberFeed) -> Placement:
        """Return what a member that joins needs, in the state of the link and of the others now."""
        feed, ledger = self._feed, self._ledger
        assert feed is not None
        first = feed.first_held
        if member.number is None or not ledger.is_open or any(each.number is None for each in self._members.values()):
            return Placement.REOPEN
        if first is not None:
            ledger.freed(first)
        return ledger.join(member.name, member.number)

    def _open_when_ready(self) -> None:
        """Open the link, unless some that are expected are worth a moment more."""
        if self._feed is not None or self._is_opening or not self._members:
            return
        if self._awaited:
            if self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(JOIN_TIME, self._wait_no_more)
        elif len(self._members) > 1 and any(each.number is None for each in self._sharing()):
            self._begin_opening()
        else:
            self._open()

    def _sharing(self) -> list[MemberFeed]:
        """Return the members that need the shared link: those without another way, or all if all have one."""
        members = list(self._members.values())
        return [each for each in members if each.catch_up_group is None] or members

    def _wait_no_more(self) -> None:
        self._timer = None
        self._awaited.clear()
        self._open_when_ready()

    def _begin_opening(self) -> None:
        if not self._is_opening:
            self._is_opening = True
            self._tasks.spawn(self._open_again(), f"eventpump opening of partition {self._spec.partition_id}")

    async def _open_again(self) -> None:
        """Close the link, find the numbers that are not known, and open it at the lowest one."""
        try:
            while self._members or self._searches:
                if self._feed is not None:
                    feed = self._feed
                    for member in self._members.values():
                        member.wait_for_link()
                    for member in self._own.values():
                        member.unpin()
                    await self.close_feed(feed, CLOSE_TIMEOUT)
                if self._searches:
                    await search_position(self._searches[0], self._feeds, self._spec.partition_id)
                    self._searches.popleft()
                    continue
                unknown = next((each for each in self._sharing() if each.number is None), None)
                if unknown is None or len(self._members) == 1:
                    break
                try:
                    await unknown.find_number(self._probe)
                except PumpEndedError:
                    self.leave(unknown)
                except Exception as error:
                    unknown.fail(error)
                if unknown.error is not None:
                    self.leave(unknown)
        finally:
            self._is_opening = False
        if self._members:
            self._open(checks_hub=True)

    def _probe(self, member: MemberFeed) -> PartitionFeed[ReceivedEvent]:
        """Make a feed that receives one event from a member's position on."""

        def troubled(error: Exception, delay: float | None) -> None:
            member.calls.troubled(error, delay, True)

        return self._feeds.make(member.position, member.hub_created_at, limit=1, on_trouble=troubled)

    def _open(self, *, checks_hub: bool = False) -> None:
        """Open the link at the lowest position of those that read."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        newest_hub = max(each.hub_created_at for each in self._members.values())
        for member in list(self._members.values()):
            if member.hub_created_at < newest_hub:
                self.leave(member)
                member.fail(
                    HubRecreatedError(self._spec.hub, self._spec.partition_id, "the hub was deleted and recreated")
                )
        first = min(-1 if each.number is None else each.number for each in self._sharing())
        for member in list(self._members.values()):
            if member not in self._sharing() and self._is_far_behind(member, first):
                self._open_own(member)
        members = list(self._members.values())
        lowest = self._chosen = min(members, key=lambda each: -1 if each.number is None else each.number)
        self._hub_created_at = newest_hub
        self.link = self.feeds_made
        feed = self._feed = self._feeds.make(
            lowest.position,
            newest_hub,
            checks_hub=checks_hub,
            on_attached=lambda: self._attached(feed),
            on_trouble=lambda error, delay: self._troubled(feed, error, delay),
        )
        self._ledger = ShareLedger()
        if lowest.number is not None:
            self._ledger.opened(lowest.number)
        for member in members:
            if member.number is not None:
                self._ledger.join(member.name, member.number)
            is_first = member is lowest or member.number == lowest.number
            member.attach(feed, skip_below=None if is_first else member.number, head=lowest.number)
        feed.start()

    def _attached(self, feed: PartitionFeed[ReceivedEvent]) -> None:
        if feed is self._feed:
            for member in list(self._members.values()):
                member.calls.attached()

    def _troubled(self, feed: PartitionFeed[ReceivedEvent], error: Exception, delay: float | None) -> None:
        if feed is not self._feed:
            return
        # One that has just come from a link of its own waits for another link, and not for this one.
        members = [each for each in self._members.values() if each.feed is feed]
        chosen = self._chosen
        if delay is None:
            self._feed = None
            self._ledger.closed()
            for member in self._own.values():
                member.unpin()
            is_position_refused = isinstance(error, RequestRefusedError) and not feed.facts.links
            if chosen in members and len(members) > 1 and is_position_refused:
                # It was that one's position that was refused: the others go on without it.
                assert chosen is not None
                self.leave(chosen)
                chosen.detach()
                chosen.fail(error)
                chosen.calls.troubled(error, delay, True)
                for member in self._members.values():
                    member.wait_for_link()
                self._tasks.spawn(self.close_feed(feed, CLOSE_TIMEOUT), "eventpump closing of a refused link")
                self._open_when_ready()
                return
            # Each of them ends, or finds its position again and rejoins.
            for member in members:
                self.leave(member)
                self._awaited.add(member.name)
        for index, member in enumerate(members):
            member.calls.troubled(error, delay, index == 0)
