"""One partition's receive link, shared by the subscriptions of a host."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import repeat
from typing import Any

from eventpump.aio.tasks import TaskSet, reject, resolve
from eventpump.consumer.feed import FeedCursor, FeedStream, PartitionFeed
from eventpump.consumer.handler import PumpEndedError
from eventpump.consumer.opening import Beginning, HubRecreatedError
from eventpump.core.budget import Account, BufferBudget
from eventpump.core.rewind import PlaceSearch
from eventpump.core.sharing import FREE_AT, Held, LinkState, Placement, Pressure, ShareLedger
from eventpump.core.silence import Look
from eventpump.core.starts import first_number
from eventpump.core.streams import Selection, StreamCursor
from eventpump.errors import (
    ConsumerDisconnectedError,
    EventError,
    OwnershipLostError,
    RequestRefusedError,
    ServiceError,
)
from eventpump.eventhubs.codecs import event_maker
from eventpump.eventhubs.events import Checkpoint, EventPosition, ReceivedEvent
from eventpump.interfaces import (
    CLOSE_TIMEOUT,
    ConsumerScope,
    HubProperties,
    PartitionProperties,
    ReceiveLinkSpec,
    Transport,
)
from eventpump.options.consumer import FeedSettings

JOIN_TIME = 1.0
"""Seconds that a link waits, after the first subscription is ready to read, for the others that are expected."""

FIRST_EVENT_TIME = 10.0
"""Seconds to wait for the first event behind a position that has one, before the partition is looked at again."""


@dataclass(frozen=True, slots=True)
class MemberCalls:
    """What a shared link calls of one that reads along.

    Attributes:
        facts: Reads the partition's properties; tried until that succeeds.
        attached: Called each time the link is attached.
        troubled: Called when the link fails, with the seconds until it is opened again, None if it is not; and with
            whether this subscription is the one that reports it.
        rewound: Called when the link is opened again further back for this subscription, with the sequence number of
            the first event that it needs, if that is known.
        slow: Called when this subscription has held the others back for long.
        link_changed: Called when `MemberFeed.link_state` may have changed.
    """

    facts: Callable[[], Awaitable[PartitionProperties]]
    attached: Callable[[], None]
    troubled: Callable[[Exception, float | None, bool], None]
    rewound: Callable[[int | None], None]
    slow: Callable[[Held], None]
    link_changed: Callable[[], None]


@dataclass(frozen=True, slots=True, eq=False)
class _Look:
    """A search for a place in the partition, for which the link is closed.

    Attributes:
        search: What to look for.
        hub_created_at: The hub that it is to be found in.
        facts: Reads the partition's properties.
        found: Completes with the place.
    """

    search: PlaceSearch
    hub_created_at: datetime
    facts: Callable[[], Awaitable[PartitionProperties]]
    found: asyncio.Future[Checkpoint]


class MemberFeed:
    """One subscription's events of a shared link, each once and in order. Made by `SharedPartition.join`.

    Args:
        shared: The shared link.
        name: The subscription.
        beginning: Where its reading begins.
        calls: What to call of the subscription's pump.
        slow_after: Seconds after which it counts as slow while it holds the others back.
        catch_up_group: The consumer group in which it has a link of its own while it is behind; None for none.
        selection: Which events it takes; None for all.
    """

    def __init__(
        self,
        shared: SharedPartition,
        name: str,
        beginning: Beginning,
        calls: MemberCalls,
        slow_after: float,
        catch_up_group: str | None,
        selection: Selection[ReceivedEvent] | None = None,
    ) -> None:
        self._shared = shared
        self._name = name
        self.calls = calls
        """What to call of the subscription's pump."""
        self.pressure = Pressure(slow_after)
        """How far it holds the others back."""
        self._feed: PartitionFeed[ReceivedEvent] | None = None
        self._cursor: FeedCursor[ReceivedEvent] | None = None
        self._skip_below: int | None = None
        self._taken: list[ReceivedEvent] = []
        self._first_unread: ReceivedEvent | None = None
        self._doubt: BaseException | None = None
        self.selection = selection
        """Which events it takes; None for all."""
        self._unprocessed: FeedCursor[ReceivedEvent] | None = None
        self._waiter: asyncio.Future[bool] | None = None
        self._finding: FeedCursor[ReceivedEvent] | None = None
        self._pin: tuple[PartitionFeed[ReceivedEvent], FeedCursor[ReceivedEvent], int] | None = None
        self.catch_up_group = catch_up_group
        """The consumer group in which it has a link of its own while it is behind."""
        self.has_own_link = False
        """Whether it reads over a link of its own."""
        self._is_waiting = False
        self.shares_from = 0
        """The sequence number from which it may share a link that was opened before it joined."""
        self._error: Exception | None = None
        self._position = beginning.position
        self._number = _number_at(beginning)
        self.hub_created_at = beginning.hub_created_at
        """When the hub was created that the events are of."""

    # ---------------------------------------------------------------------------------------- called by the pump

    @property
    def feed(self) -> PartitionFeed[ReceivedEvent] | None:
        """What receives over the link now; None where there is nothing that does."""
        return None if self._cursor is None else self._feed

    @property
    def error(self) -> Exception | None:
        """Why nothing more is received; what is there can still be taken."""
        return self._error or (None if self._cursor is None or self._feed is None else self._feed.error)

    @property
    def available(self) -> int:
        """How many events can be taken now, at most."""
        return 0 if self._cursor is None else self._cursor.available

    @property
    def is_attached(self) -> bool:
        """Whether there is a link now."""
        return self._feed is not None and self._feed.is_attached

    @property
    def link_state(self) -> LinkState:
        """What it reads over."""
        if self.has_own_link:
            return LinkState.OWN
        if self._is_waiting:
            return LinkState.WAITING
        return LinkState.OPENING if self._cursor is None else LinkState.SHARED

    @property
    def is_silent(self) -> bool:
        """Whether events could come and none is there."""
        return self._feed is not None and self._feed.is_silent and not self.available

    @property
    def newest(self) -> bytes | None:
        """The last message received over the link, whether it was taken here or not."""
        return None if self._feed is None else self._feed.newest

    @property
    def received_at(self) -> float:
        """When that message came; on the loop's clock."""
        return -float("inf") if self._feed is None else self._feed.received_at

    @property
    def look(self) -> Look | None:
        """What management said since then, where it was asked."""
        return None if self._feed is None else self._feed.look

    def take(self, limit: int) -> list[ReceivedEvent]:
        """Take what is there, at most `limit` events; empty where nothing is. What was taken before is processed."""
        cursor = self._cursor
        if self._unprocessed is not None:
            self._processed()
        if cursor is None:
            return []
        if isinstance(cursor, FeedStream):
            events = self._take_matching(cursor, limit)
        elif events := cursor.take(limit):
            if self._skip_below is not None:
                events = self._skip(cursor, events, limit, self._skip_below)
            if events:
                # Only the last one: the others are kept as long as the processor needs them, and no longer.
                self._taken = _last_of(events) or self._taken
            if self._shared.is_shared:
                self._shared.observe()
        if self.has_own_link:
            self._shared.rejoin(self)
        return events

    def _skip(
        self, cursor: FeedCursor[ReceivedEvent], events: list[ReceivedEvent], limit: int, below: int
    ) -> list[ReceivedEvent]:
        """Take on until events are there that this subscription has not had.

        Args:
            cursor: What to take from.
            events: What was taken.
            limit: How many to take at once.
            below: The sequence number of the first event that it has not had.
        """
        while events:
            new = _from(events, below)
            if new:
                self._skip_below = None
            if new or _reaches(events, below):
                self._set_waiting(False)
            if new:
                return new
            events = cursor.take(limit)
        return events

    def _set_waiting(self, is_waiting: bool) -> None:
        self._is_waiting = is_waiting
        self.calls.link_changed()

    def _take_matching(self, cursor: FeedStream[ReceivedEvent], limit: int) -> list[ReceivedEvent]:
        """Take what belongs to the stream; an event for which its function failed alone, and then `doubt` is why."""
        events = cursor.take(limit)
        self._doubt = cursor.stream.doubt
        self._taken = _last_of(events) or self._taken
        if self._shared.is_shared and events:
            self._shared.observe()
        if self.has_own_link:
            # It may come close to the others without any event for it.
            cursor.stream.wake_after(1)
        return events

    def take_doubt(self) -> BaseException | None:
        """Return why it is not known whether the one event taken last belongs to the stream; None if it is known."""
        doubt, self._doubt = self._doubt, None
        return doubt

    def take_missing(self) -> list[tuple[int, int]]:
        """Return which sequence numbers are missing before the event that is taken next: the first and last, each.

        Empty where all events are taken: there it shows from their numbers.
        """
        stream = self._stream
        return [] if stream is None else stream.take_missing()

    @property
    def passed(self) -> ReceivedEvent | None:
        """Of a stream, the newest event up to which all that belong to it were taken; None if it is not known.

        It need not belong to the stream.
        """
        if self.selection is None:
            return None
        if (stream := self._stream) is not None and (newest := stream.passed) is not None:
            self._taken = [newest]
        return self._taken[-1] if self._taken else None

    def count_passed(self, *, is_to_end: bool) -> int | None:
        """Return how many events of the partition a stream has come past since the last call; None if it is none.

        Args:
            is_to_end: Whether what came after the last event taken counts now, or by a later call.
        """
        if self.selection is None:
            return None
        return 0 if self._stream is None else self._stream.count_passed(is_to_end=is_to_end)

    def wake_after(self, count: int) -> None:
        """Wake a stream when so many events have come, whether they belong to it or not."""
        if self._stream is not None:
            self._stream.wake_after(count)

    def wait(self, timeout: float | None) -> Coroutine[Any, Any, bool]:
        """Wait until there may be something to take, reading has ended, or `wake` is called. One caller at a time.

        Args:
            timeout: Seconds; None for as long as it takes.

        Returns:
            False where the time ran out. Cancelled, nothing is lost.
        """
        # No coroutine of its own around that of the cursor: this is called for each batch.
        if self._cursor is not None and self._error is None:
            return self._cursor.wait(timeout)
        return self._wait_for_feed(timeout)

    async def _wait_for_feed(self, timeout: float | None) -> bool:
        if self._error is not None:
            return True
        waiter: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiter = waiter
        try:
            async with asyncio.timeout(timeout):
                return await waiter
        except TimeoutError:
            return False
        finally:
            self._waiter = None

    def wake(self) -> None:
        """End a wait."""
        if self._cursor is not None:
            self._cursor.wake()
        if self._waiter is not None:
            resolve(self._waiter, True)
        if self._finding is not None:
            self._finding.wake()

    def reopen(self, error: ServiceError) -> None:
        """Close the link with an error of ours, and open another. Do nothing where there is none."""
        if self._feed is not None and self._cursor is not None:
            self._feed.reopen(error)

    def stop(self) -> None:
        """Take no more. Where no other subscription reads, credit goes to 0. Stopping twice is fine."""
        self._shared.leave(self)
        if self._cursor is not None:
            assert self._feed is not None
            if self._feed.readers == 1:
                self._feed.stop()
            self.detach()
        self.wake()

    async def aclose(self, timeout: float = CLOSE_TIMEOUT, *, is_processing: bool = False) -> None:
        """Leave, and detach where no other subscription reads. Closing twice is fine; cancelled, the link still ends.

        Args:
            timeout: Seconds to wait for the service's answer; the detach goes on without being waited for.
            is_processing: Whether what was taken is still being processed; `aclose` is called again after that.
        """
        self.stop()
        if not is_processing:
            self._processed()
        if self._feed is not None and not self._feed.readers:
            await self._shared.close_feed(self._feed, timeout)

    # ---------------------------------------------------------------------------------- called by SharedPartition

    @property
    def name(self) -> str:
        """The subscription."""
        return self._name

    @property
    def number(self) -> int | None:
        """The sequence number of the next event to take; None where that is not known."""
        with suppress(EventError):
            if (ahead := self._next_taken) is not None:
                return ahead.sequence_number
        for event in reversed(self._taken):
            with suppress(EventError):
                return event.sequence_number + 1
        return self._number

    @property
    def _stream(self) -> StreamCursor[ReceivedEvent] | None:
        return self._cursor.stream if isinstance(self._cursor, FeedStream) else None

    @property
    def _next_taken(self) -> ReceivedEvent | None:
        """The event that a stream takes next, if it has come; where none has, all that came counts as taken."""
        if self.selection is not None and (stream := self._stream) is not None:
            self._first_unread = stream.first_unread
            if self._first_unread is None:
                self.passed  # noqa: B018 - it is noted
        return self._first_unread

    @property
    def pinned(self) -> int:
        """How many events the shared feed keeps for what this subscription is to go on with."""
        return 0 if self._pin is None else self._pin[1].available

    @property
    def pinned_bytes(self) -> int:
        """The same in bytes."""
        return 0 if self._pin is None else self._pin[1].held[1]

    @property
    def is_pinned(self) -> bool:
        """Whether the shared feed keeps what this subscription is to go on with."""
        return self._pin is not None

    @property
    def position(self) -> EventPosition:
        """Where a link for this subscription alone would begin."""
        with suppress(EventError):
            if (ahead := self._next_taken) is not None:
                return EventPosition.at_offset(ahead.offset, inclusive=True)
        for event in reversed(self._taken):
            with suppress(EventError):
                return EventPosition.at_offset(event.offset)
        return self._position

    @property
    def held(self) -> tuple[int, int]:
        """Events and bytes that only this subscription has not read yet."""
        return (0, 0) if self._cursor is None else self._cursor.held

    def attach(self, feed: PartitionFeed[ReceivedEvent], *, skip_below: int | None, head: int | None = None) -> None:
        """Read from a feed.

        Args:
            feed: What receives.
            skip_below: The sequence number of the first event to take; None where the feed's first one is it.
            head: That of the next event that the feed receives, if it is known.
        """
        if self.selection is None:
            self._feed, self._cursor, self._skip_below = feed, feed.cursor(), skip_below
            self._set_waiting(skip_below is not None and head is not None and head < skip_below)
        else:
            since = self.number
            self._feed, self._cursor, self._first_unread = feed, feed.stream(self.selection, since=since), None
            self._set_waiting(False)
        if self._waiter is not None:
            resolve(self._waiter, True)

    def pin(self, feed: PartitionFeed[ReceivedEvent], head: int, room: int) -> bool:
        """Keep what a shared feed receives from now on until this subscription has come so far on its own link.

        Args:
            feed: The shared feed.
            head: The sequence number of the next event that the shared feed receives.
            room: How many events it may be behind for that.

        Returns:
            Whether it has come so far, and can go on with the shared feed.
        """
        number = self.number
        if self._pin is not None and self._pin[0] is not feed:
            self.unpin()
        if number is None:
            return False
        if self._pin is None and head - number <= room:
            selection = self.selection
            cursor = feed.cursor(at_end=True) if selection is None else feed.stream(selection, since=head, at_end=True)
            self._pin = feed, cursor, head
        return self._pin is not None and number >= self._pin[2]

    def unpin(self) -> PartitionFeed[ReceivedEvent] | None:
        """Give up what `pin` keeps. Return the feed if nothing reads it any more."""
        if self._pin is None:
            return None
        (feed, cursor, _), self._pin = self._pin, None
        cursor.close()
        return None if feed.readers else feed

    def share(self) -> PartitionFeed[ReceivedEvent] | None:
        """Go on with the shared feed that is pinned, if one is. Return the own feed, which is to be closed."""
        own, self.has_own_link = self._feed, False
        number = self.number
        self.detach()
        if self._pin is not None:
            (self._feed, self._cursor, _), self._pin = self._pin, None
            self._first_unread = None
            self._set_waiting(False)
            if self._stream is None:
                self._skip_below = number
            elif number is not None:
                self._stream.skip(number)
                self._feed.adjust_credit()
        return own

    def detach(self) -> None:
        """Read no more from the feed. Another may follow."""
        if self._cursor is not None:
            self._next_taken  # noqa: B018 - where it goes on is noted
            cursor, self._cursor = self._cursor, None
            cursor.close()
            if cursor.has_in_hand:
                self._unprocessed = cursor

    def _processed(self) -> None:
        """What was taken from a feed that is not read any more is processed."""
        if self._unprocessed is not None:
            cursor, self._unprocessed = self._unprocessed, None
            cursor.processed()

    def wait_for_link(self) -> None:
        """Read no more from the feed, which is opened again for another member."""
        if self._cursor is not None:
            self.detach()
            self._set_waiting(True)

    def fail(self, error: Exception) -> None:
        """End with an error."""
        self._error = error
        self.wake()

    async def find_number(self, open_feed: Callable[[MemberFeed], PartitionFeed[ReceivedEvent]]) -> None:
        """Find the sequence number of the first event to take, for which no other link may be open.

        Args:
            open_feed: Makes a feed that receives one event from the position on.
        """
        while self._number is None and self._error is None:
            self._number = first_number(self._position, await self.calls.facts())
            if self._number is not None:
                return
            feed = open_feed(self)
            cursor = self._finding = feed.cursor()
            try:
                feed.start()
                await cursor.wait(FIRST_EVENT_TIME)
                for event in cursor.take(1):
                    self._number = event.sequence_number
                if self._number is None and feed.error is not None:
                    self.fail(feed.error)
            finally:
                self._finding = None
                cursor.processed()
                await feed.aclose()


class SharedPartition:
    """The receive link of one owned partition, which the subscriptions of a host share.

    The link begins at the lowest position of those that read, and the others skip what lies before theirs. One that
    joins later reads from the cache where that holds all it needs; else the link is opened again at its position, and
    the others skip what they have had. So there is neither a gap nor a repeat.

    Args:
        transport: Opens the link.
        spec: The link; its position is replaced.
        settings: How far to read ahead.
        scope: Namespace, hub and consumer group, for the events' origin.
        rng: Randomness, for delays.
        hub: Reads the hub's properties, before each link but the first.
        on_closed: Called with a feed that has ended.
        on_unexpected: Called with what a task failed with that should not.
        budget: The bytes that all links of the host may hold; None if each is bounded on its own only.
    """

    def __init__(
        self,
        transport: Transport,
        spec: ReceiveLinkSpec,
        settings: FeedSettings,
        *,
        scope: ConsumerScope,
        rng: random.Random,
        hub: Callable[[], Awaitable[HubProperties]],
        on_closed: Callable[[PartitionFeed[ReceivedEvent]], None],
        on_unexpected: Callable[[str, BaseException], None],
        budget: BufferBudget | None = None,
    ) -> None:
        self._transport = transport
        self._spec = spec
        self._settings = settings
        self._scope = scope
        self._rng = rng
        self._hub = hub
        self._budget = budget
        self._accounts: list[Account] = []
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
        self._room = max(1, settings.prefetch_events // 4)
        self._free_events = settings.prefetch_events * FREE_AT
        self._looks: deque[_Look] = deque()
        self._is_held_back = False
        self._pressure_timer: asyncio.TimerHandle | None = None
        self.is_shared = False
        """Whether several subscriptions read."""
        self.link = 0
        """The number of the link that is shared now, or was shared last: how many were opened before it."""
        self.feeds_made = 0
        """How many links were opened, links in place of failed ones not counted. Each event's origin ends with the
        count before its own link."""

    @property
    def buffered_bytes(self) -> int:
        """Bytes received over all its links that are not processed yet."""
        return sum(account.held for account in self._accounts)

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
        opens_anew: int | None = None,
    ) -> MemberFeed:
        """Read along from a position.

        Args:
            name: The subscription; one that has left, or has not joined yet.
            beginning: Where its reading begins.
            calls: What to call of its pump.
            slow_after: Seconds after which it counts as slow while it holds the others back.
            catch_up_group: The consumer group in which it has a link of its own while it is behind; None for none.
            selection: Which events it takes; None for all.
            opens_anew: Read from links that are opened from now on, although the cache may have all that is needed, and
                share an earlier one at this sequence number or later only; None to read from any link.
        """
        self._awaited.discard(name)
        member = MemberFeed(self, name, beginning, calls, slow_after, catch_up_group, selection)
        member.shares_from = opens_anew or 0
        if self._feed is not None and self._hub_created_at != member.hub_created_at:
            assert self._hub_created_at is not None
            error = HubRecreatedError(self._spec.hub, self._spec.partition_id, "the hub was deleted and made again")
            if member.hub_created_at < self._hub_created_at:
                member.fail(error)
                return member
            self._feed.fail(error)
        self._members[name] = member
        feed = self._feed
        if feed is None and opens_anew is None:
            self._open_when_ready()
        elif feed is None or feed.is_stopped:
            # Or its last reader has just left, and it is about to be closed.
            self._begin_opening()
        elif opens_anew is None and self._placement(member) is Placement.IN_CACHE:
            member.attach(feed, skip_below=member.number, head=self._head)
            if feed.is_attached:
                calls.attached()
        elif self._is_far_behind(member, feed.first_held):
            self._open_own(member)
        else:
            calls.rewound(member.number)
            self._begin_opening()
        self.is_shared = len(self._members) + len(self._own) > 1
        return member

    async def find_place(
        self, search: PlaceSearch, hub_created_at: datetime, facts: Callable[[], Awaitable[PartitionProperties]]
    ) -> Checkpoint:
        """Find a place in the partition by receiving events. The link is closed meanwhile, and opened again after it.

        Args:
            search: What to look for.
            hub_created_at: The hub that it is to be found in.
            facts: Reads the partition's properties.

        Raises:
            UnknownPlaceError: There is no such place.
            ServiceError: The position was refused, or the link failed for good.
            HubRecreatedError: The hub was deleted and made again.
            OwnershipLostError: The partition is given up.
        """
        look = _Look(search, hub_created_at, facts, asyncio.get_running_loop().create_future())
        self._looks.append(look)
        self._begin_opening()
        try:
            return await look.found
        finally:
            look.found.cancel()

    def leave(self, member: MemberFeed) -> None:
        """Forget a subscription that reads no more."""
        if self._members.get(member.name) is member:
            del self._members[member.name]
            self._ledger.leave(member.name)
            self.is_shared = len(self._members) + len(self._own) > 1
            self.observe()
        elif self._own.get(member.name) is member:
            del self._own[member.name]
            self._unpin(member)
            self.is_shared = len(self._members) + len(self._own) > 1

    async def close_feed(self, feed: PartitionFeed[ReceivedEvent], timeout: float) -> None:
        """Detach a feed that is not read any more.

        Args:
            feed: The feed.
            timeout: Seconds to wait for the service's answer.
        """
        if feed is self._feed:
            self._feed = None
            self._ledger.closed()
        self._on_closed(feed)
        await feed.aclose(timeout)

    def observe(self) -> None:
        """Find out which member holds the others back. Called when one of several has read, or has left."""
        feed, held_back = self._feed, False
        room_in_bytes = self._settings.prefetch_bytes if feed is None else feed.room_in_bytes
        for member in self._own.values():
            if member.pinned > self._room or member.pinned_bytes > room_in_bytes // 4:
                self._unpin(member)
        if feed is not None and len(self._members) > 1:
            held_back = feed.events_held > self._free_events or feed.bytes_held > room_in_bytes * FREE_AT
        if not held_back and not self._is_held_back:
            return
        self._is_held_back = held_back
        room = self._settings.prefetch_events, room_in_bytes
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
        while self._looks:
            reject(self._looks.popleft().found, OwnershipLostError(self._spec.partition_id))

    # --------------------------------------------------------------------------------------------------- the link

    def _is_far_behind(self, member: MemberFeed, first: int | None) -> bool:
        """Return whether a member is to have a link of its own, as it needs more than fits into the cache.

        Args:
            member: The member.
            first: The number of the first event that the shared link has for the others; None if it is not known.
        """
        if member.catch_up_group is None:
            return False
        return member.number is None or first is None or first - member.number > self._settings.prefetch_events

    def _open_own(self, member: MemberFeed) -> None:
        """Open a link of its own for a member, in its catch-up group and without an owner level."""
        del self._members[member.name]
        self._ledger.leave(member.name)
        self._own[member.name] = member
        member.detach()
        feed = self._make_feed(
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
        self.is_shared = len(self._members) + len(self._own) > 1
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
        if feed is None or (feed.newest is None and self._chosen is not None):
            return None if self._chosen is None else self._chosen.number
        return feed.next_number

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
            while self._members or self._looks:
                if self._feed is not None:
                    feed = self._feed
                    for member in self._members.values():
                        member.wait_for_link()
                    for member in self._own.values():
                        member.unpin()
                    await self.close_feed(feed, CLOSE_TIMEOUT)
                if self._looks:
                    await self._look(self._looks[0])
                    self._looks.popleft()
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

    async def _look(self, look: _Look) -> None:
        """Receive what a search asks for until it has found its place, or nobody waits for it any more."""
        search = look.search
        try:
            while search.found is None and not look.found.done():
                await self._receive(look)
        except (PumpEndedError, ConsumerDisconnectedError):
            # The next link of the partition finds out who took it.
            reject(look.found, OwnershipLostError(self._spec.partition_id))
        except Exception as error:
            reject(look.found, error)
        else:
            if search.found is not None:
                resolve(look.found, search.found)

    async def _receive(self, look: _Look) -> None:
        """Receive the events of one probe."""
        search, probe = look.search, look.search.probe
        feed = self._make_feed(
            probe.position, look.hub_created_at, limit=probe.limit, checks_hub=True, on_trouble=_ignore
        )
        cursor = feed.cursor()
        try:
            feed.start()
            while search.found is None and search.probe is probe and not look.found.done():
                if not await cursor.wait(FIRST_EVENT_TIME):
                    search.silent(await look.facts())
                    return
                for event in cursor.take(probe.limit):
                    with suppress(EventError):
                        if search.received(event.sequence_number, event.offset):
                            return
                if feed.error is not None:
                    raise feed.error
        finally:
            cursor.processed()
            await feed.aclose()

    def _probe(self, member: MemberFeed) -> PartitionFeed[ReceivedEvent]:
        """Make a feed that receives one event from a member's position on."""

        def troubled(error: Exception, delay: float | None) -> None:
            member.calls.troubled(error, delay, True)

        return self._make_feed(member.position, member.hub_created_at, limit=1, on_trouble=troubled)

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
                    HubRecreatedError(self._spec.hub, self._spec.partition_id, "the hub was deleted and made again")
                )
        first = min(-1 if each.number is None else each.number for each in self._sharing())
        for member in list(self._members.values()):
            if member not in self._sharing() and self._is_far_behind(member, first):
                self._open_own(member)
        members = list(self._members.values())
        lowest = self._chosen = min(members, key=lambda each: -1 if each.number is None else each.number)
        self._hub_created_at = newest_hub
        self.link = self.feeds_made
        feed = self._feed = self._make_feed(
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

    def _make_feed(
        self,
        position: EventPosition,
        hub_created_at: datetime,
        *,
        consumer_group: str | None = None,
        limit: int | None = None,
        checks_hub: bool = False,
        on_attached: Callable[[], None] | None = None,
        on_trouble: Callable[[Exception, float | None], None],
    ) -> PartitionFeed[ReceivedEvent]:
        origin = (self._scope, self._spec.partition_id, hub_created_at, self.feeds_made)
        self.feeds_made += 1
        was_located = checks_hub

        async def locate(position: EventPosition) -> EventPosition:
            # Not before the first link: that the hub is this one was found out just now.
            nonlocal was_located
            if was_located and (await self._hub()).created_at != hub_created_at:
                problem = "the hub was deleted and made again while it was read"
                raise HubRecreatedError(self._spec.hub, self._spec.partition_id, problem)
            was_located = True
            return position

        spec = replace(self._spec, position=position)
        if consumer_group is not None:
            spec = replace(spec, consumer_group=consumer_group, owner_level=None)
        made = event_maker(self._settings.decode or (), spec.partition_id)
        feed: PartitionFeed[ReceivedEvent] = PartitionFeed(
            self._transport,
            spec,
            self._settings,
            wrap=lambda messages: list(map(made, messages, repeat(origin))),
            number=_sequence_number,
            rng=self._rng,
            budget=self._budget,
            limit=limit,
            locate=locate,
            on_attached=on_attached,
            on_trouble=on_trouble,
        )
        if feed.account is not None:
            self._accounts = [each for each in self._accounts if each.held or not each.is_closed]
            self._accounts.append(feed.account)
        return feed

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
            if chosen in members and len(members) > 1 and isinstance(error, RequestRefusedError) and not feed.links:
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


def _sequence_number(event: ReceivedEvent) -> int | None:
    try:
        return event.sequence_number
    except EventError:
        return None


def _ignore(error: Exception, delay: float | None) -> None:
    """Do nothing: who asked for the place gets the error, and a link that fails now is opened again."""


def _number_at(beginning: Beginning) -> int | None:
    """Return the sequence number that reading begins with; None where only the service can find it out."""
    return first_number(beginning.position, None) if beginning.expected is None else beginning.expected


def _from(events: list[ReceivedEvent], number: int) -> list[ReceivedEvent]:
    """Return the events from a sequence number on. One whose number cannot be read counts as its successor does."""
    for index in range(len(events) - 1, -1, -1):
        with suppress(EventError):
            if events[index].sequence_number < number:
                return events[index + 1 :]
    return events


def _reaches(events: list[ReceivedEvent], number: int) -> bool:
    """Return whether the event after these is known to have a sequence number, or a later one."""
    with suppress(EventError):
        return events[-1].sequence_number + 1 >= number
    return False


def _last_of(events: list[ReceivedEvent]) -> list[ReceivedEvent]:
    """Return the last event whose place can be read, if there is one."""
    for event in reversed(events):
        try:
            event.sequence_number  # noqa: B018 - whether it can be read is the question
        except EventError:
            continue
        return [event]
    return []
