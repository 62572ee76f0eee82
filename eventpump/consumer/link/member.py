"""One subscription's events of a partition's receive link, which it shares with others or has for itself."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Protocol

from eventpump.aio.tasks import resolve
from eventpump.compiled import based_on_core
from eventpump.consumer.link.feed import FeedCursor, FeedStream, PartitionFeed
from eventpump.consumer.link.kept_link import LinkFacts
from eventpump.consumer.link.position_search import FIRST_EVENT_TIME
from eventpump.consumer.record.starts import Beginning
from eventpump.core.sharing import Held, LinkState, Pressure
from eventpump.core.starts import first_number
from eventpump.core.streams import Selection, StreamCursor
from eventpump.errors import EventError, ServiceError
from eventpump.eventhubs.events import EventPosition, ReceivedEvent
from eventpump.interfaces import CLOSE_TIMEOUT, PartitionProperties

_NO_FACTS: Final = LinkFacts()
"""What is known where nothing receives."""


class SharedLink(Protocol):
    """What a `MemberFeed` calls of the link that it shares; see `SharedPartition`."""

    @property
    def is_shared(self) -> bool:
        """Whether several read over it."""

    @property
    def is_watching(self) -> bool:
        """Whether a member that holds the others back is looked for."""

    def observe(self) -> None:
        """Find out which member holds the others back."""

    def rejoin(self, member: MemberFeed) -> None:
        """Let a member with a link of its own share the others' again if it is close behind."""

    def leave(self, member: MemberFeed) -> None:
        """Forget a member that reads no more."""

    async def close_feed(self, feed: PartitionFeed[ReceivedEvent], timeout: float) -> None:
        """Detach a feed that is not read any more."""


@dataclass(frozen=True, slots=True)
class MemberCalls:
    """What a shared link calls of a subscription that reads over it.

    Attributes:
        facts: Reads the partition's properties; tried until that succeeds.
        troubled: Called when the link fails, with the seconds until it is opened again, None if it is not; and with
            whether this subscription is the one that reports it.
        rewound: Called when the link is opened again further back for this subscription, with the sequence number of
            the first event that it needs, if that is known.
        link_changed: Called when `MemberFeed.link_state` may have changed.
    """

    facts: Callable[[], Awaitable[PartitionProperties]]
    attached: Callable[[], None]
    troubled: Callable[[Exception, float | None, bool], None]
    rewound: Callable[[int | None], None]
    slow: Callable[[Held], None]
    link_changed: Callable[[], None]


@based_on_core("PlainMember")
class MemberFeed:
    """One subscription's events of a shared link, each once and in order. Made by `SharedPartition.join`.

    Args:
        slow_after: Seconds after which it counts as slow while it holds the others back.
        catch_up_group: The consumer group in which it has a link of its own while it is behind; None for none.
    """

    __slots__ = (
        "_cursor",
        "_doubt",
        "_error",
        "_feed",
        "_finding",
        "_first_unread",
        "_is_waiting",
        "_name",
        "_number",
        "_pin",
        "_position",
        "_shared",
        "_skip_below",
        "_taken",
        "_unprocessed",
        "_waiter",
        "calls",
        "catch_up_group",
        "has_own_link",
        "hub_created_at",
        "pressure",
        "selection",
        "shares_from",
    )

    def __init__(
        self,
        shared: SharedLink,
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
        self._taken: ReceivedEvent | None = None
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
    def facts(self) -> LinkFacts:
        """What is known of the link, and of what was received over it, whether it was taken here or not."""
        return _NO_FACTS if self._feed is None else self._feed.facts

    def take(self, limit: int) -> Sequence[ReceivedEvent]:
        """Take what is there, at most `limit` events; empty where nothing is. What was taken before is processed."""
        cursor = self._cursor
        if self._unprocessed is not None:
            self._processed()
        if cursor is None:
            return ()
        if self.selection is not None:
            assert isinstance(cursor, FeedStream)
            events = self._take_matching(cursor, limit)
        elif events := cursor.take(limit):
            if self._skip_below is not None:
                events = self._skip(cursor, events, limit, self._skip_below)
            if events:
                # Only the last one: the others are kept as long as the processor needs them, and no longer.
                self._note_taken(events)
            shared = self._shared
            if shared.is_shared and (shared.is_watching or (self._feed is not None and self._feed.is_filling)):
                shared.observe()
        if self.has_own_link:
            self._shared.rejoin(self)
        return events

    def _note_taken(self, events: Sequence[ReceivedEvent]) -> None:
        last = events[-1]
        try:
            last.sequence_number  # noqa: B018 - whether it can be read is the question
            self._taken = last
        except EventError:
            self._taken = _last_of(events) or self._taken

    _take = take
    """What the compiled core does not do."""

    def processed(self) -> bool:
        """Record that what was taken is processed, as the next `take` does, if there is nothing to take."""
        cursor = self._cursor
        return cursor is not None and self.selection is None and not self.has_own_link and cursor.settle()

    def _skip(
        self, cursor: FeedCursor[ReceivedEvent], events: Sequence[ReceivedEvent], limit: int, below: int
    ) -> Sequence[ReceivedEvent]:
        """Take on until events are there that this subscription has not had: from the number `below` on."""
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

    def _take_matching(self, cursor: FeedStream[ReceivedEvent], limit: int) -> Sequence[ReceivedEvent]:
        """Take what belongs to the stream; one for which its function failed comes alone, with the error in `doubt`."""
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
            self._taken = newest
        return self._taken

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

    def wait(
        self, timeout: float | None, work: Callable[[], bool] | None = None, task: asyncio.Task[Any] | None = None
    ) -> Awaitable[bool]:
        """Wait as `FeedCursor.wait` does, while there may be something to take, or reading has not ended."""
        if self._cursor is not None and self._error is None:
            return self._cursor.wait(timeout, work, task)
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
        return self._number if self._taken is None else self._taken.sequence_number + 1

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
        return self._position if self._taken is None else EventPosition.at_offset(self._taken.offset)

    @property
    def held(self) -> tuple[int, int]:
        """Events and bytes that only this subscription has not read yet."""
        return (0, 0) if self._cursor is None else self._cursor.held

    def attach(self, feed: PartitionFeed[ReceivedEvent], *, skip_below: int | None, head: int | None = None) -> None:
        """Read from a feed.

        Args:
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
        """Find the number of the first event to take, by a feed of one event from the position on.
        No other link may be open."""
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


def _number_at(beginning: Beginning) -> int | None:
    """Return the sequence number that reading begins with; None where only the service can find it out."""
    return first_number(beginning.position, None) if beginning.expected is None else beginning.expected


def _from(events: Sequence[ReceivedEvent], number: int) -> Sequence[ReceivedEvent]:
    """Return the events from a sequence number on. One whose number cannot be read counts as its successor does."""
    for index in range(len(events) - 1, -1, -1):
        with suppress(EventError):
            if events[index].sequence_number < number:
                return events[index + 1 :]
    return events


def _reaches(events: Sequence[ReceivedEvent], number: int) -> bool:
    """Return whether the event after these is known to have a sequence number, or a later one."""
    with suppress(EventError):
        return events[-1].sequence_number + 1 >= number
    return False


def _last_of(events: Sequence[ReceivedEvent]) -> ReceivedEvent | None:
    """Return the last event whose place can be read, if there is one."""
    for event in reversed(events):
        try:
            event.sequence_number  # noqa: B018 - whether it can be read is the question
        except EventError:
            continue
        return event
    return None
