"""The events of one partition: what is received over a link that is kept open, in a bounded cache."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, Generic, TypeVar

from eventpump.aio.tasks import resolve
from eventpump.aio.wakeup import Wakeup
from eventpump.clock import clock_of
from eventpump.compiled import based_on_core, core
from eventpump.consumer.link.kept_link import FeedFullError, KeptLink, LinkFacts
from eventpump.core.budget import Account, BufferBudget
from eventpump.core.cache import Cursor, EventCache
from eventpump.core.credit import CreditWindow
from eventpump.core.kept_link import KeptLinkState
from eventpump.core.sharing import FREE_AT
from eventpump.core.streams import Selection, StreamCursor
from eventpump.errors import ClosedError, EventError, EventPumpError, ServiceError
from eventpump.eventhubs.events import LATEST_OFFSET, EventPosition, ReceivedEvent, without_body
from eventpump.interfaces import CLOSE_TIMEOUT, ReceiveLink, ReceiveLinkSpec, Transport
from eventpump.options.consumer import FeedSettings

_T = TypeVar("_T")

LARGE = 4096
"""The size in bytes from which on a message is not kept for its place alone: its body is left out then."""


@based_on_core("PlainFeed")
class PartitionFeed(Generic[_T]):
    """Receives one partition: the sink of a `KeptLink`, and its cache.

    Received messages stay in the cache while the link is opened again, after the last of them, so nothing is lost and
    nothing is delivered twice.

    Args:
        spec: The link; its position is where the first one begins.
        wrap: Called with received messages; returns what cursors read of them: an item for each, in order.
        number: Returns an item's sequence number, None if it cannot be read; needed for streams.
        limit: The number of messages to receive, until `resume` raises it; None for no limit.
        locate: Called before each link with the position where it would begin; returns where it begins. An error that
            it raises counts as a failure of the link.
        on_trouble: Called when the link fails, with the seconds until it is opened again; None if it is not.
    """

    __slots__ = (
        "__weakref__",
        "_budget",
        "_cache",
        "_credit",
        "_cursors",
        "_free_bytes",
        "_free_events",
        "_is_refusing",
        "_kept",
        "_on_attached",
        "_plain",
        "_settings",
        "_streams",
        "account",
        "error",
        "facts",
        "is_filling",
        "is_stopped",
        "loop",
        "now",
    )

    def __init__(
        self,
        transport: Transport,
        spec: ReceiveLinkSpec,
        settings: FeedSettings,
        *,
        wrap: Callable[[list[bytes]], list[_T]],
        number: Callable[[_T], int | None] = lambda _: None,
        rng: random.Random,
        budget: BufferBudget | None = None,
        startup_timeout: float | None = None,
        limit: int | None = None,
        locate: Callable[[EventPosition], Awaitable[EventPosition]] | None = None,
        on_attached: Callable[[], None] | None = None,
        on_trouble: Callable[[Exception, float | None], None] | None = None,
    ) -> None:
        # With "@latest", each new link would begin at another end.
        assert spec.position.offset != LATEST_OFFSET
        self._settings = settings
        self.loop = asyncio.get_running_loop()
        """The event loop that it runs in."""
        self.now = clock_of(self.loop)
        """Returns that loop's time, in seconds."""
        self.facts = LinkFacts()
        """What is known of the link, and of what was received."""
        self._kept = KeptLink(
            transport,
            spec,
            self,
            self.facts,
            settings.link_retry,
            rng=rng,
            startup_timeout=startup_timeout,
            locate=locate,
            on_trouble=on_trouble,
        )
        self._on_attached = on_attached
        self._cache = EventCache(wrap, number)
        self._cursors: tuple[FeedCursor[_T], ...] = ()
        self._plain: tuple[FeedCursor[_T], ...] = ()
        self._streams: dict[StreamCursor[_T], FeedCursor[_T]] = {}
        self._credit = CreditWindow(
            settings.prefetch_events, settings.prefetch_bytes, strict=settings.strict_prefetch_bytes, left=limit
        )
        self._budget = budget
        self.account: Account | None = None if budget is None else budget.open(self._grant)
        """What this feed holds of the budget."""
        self._is_refusing = False
        self._free_events = int(settings.prefetch_events * FREE_AT)
        self._free_bytes = int(settings.prefetch_bytes * FREE_AT)
        self.is_filling = False
        """Whether several cursors read, and the cache held more than `FREE_AT` of what it may hold, in events or in
        bytes, when its credit was adjusted last."""
        self.is_stopped = False
        """Whether nothing more is received."""
        self.error: Exception | None = None
        """Why the feed ended; what is in the cache can still be taken."""

    @property
    def link(self) -> ReceiveLink | None:
        """The current link."""
        return self._kept.link

    @property
    def is_silent(self) -> bool:
        """Whether messages could arrive and none is there: attached, with credit, and a cursor has read everything."""
        is_wanting = self._kept.state is KeptLinkState.ATTACHED and not self.is_stopped
        return is_wanting and self._credit.credit > 0 and not all(cursor.available for cursor in self._cursors)

    @property
    def credit(self) -> int:
        """How many messages the service may still send."""
        return self._credit.credit

    @property
    def link_state(self) -> KeptLinkState:
        """The state of the link."""
        return self._kept.state

    @property
    def readers(self) -> int:
        """How many cursors there are."""
        return len(self._cursors)

    @property
    def first_held(self) -> int | None:
        """The sequence number of the oldest message in the cache, or of the next one to come.

        None if nothing was dropped from the cache yet; a number above all others if that number cannot be read.
        """
        oldest = self._cache.oldest or self.facts.newest
        if not self._cache.start or oldest is None:
            return None
        with suppress(EventError):
            return ReceivedEvent(oldest).sequence_number + (self._cache.oldest is None)
        return 2**63

    @property
    def position(self) -> EventPosition:
        """Where a link opened now would begin: after the last message received."""
        return self._kept.position

    @property
    def is_attached(self) -> bool:
        """Whether there is a link now."""
        return self._kept.link is not None

    @property
    def events_held(self) -> int:
        """Events received and not taken."""
        return self._cache.count

    @property
    def bytes_held(self) -> int:
        """The same in bytes."""
        return self._cache.size

    @property
    def room_in_bytes(self) -> int:
        """How many bytes the cache may hold now."""
        most = self._settings.prefetch_bytes
        if self.account is None or self._budget is None or self._budget.is_ample:
            return most
        return max(1, min(most, self.account.room))

    def start(self) -> None:
        """Open the link, and keep it open. May be called once."""
        self._kept.start()

    def cursor(self, *, at_end: bool = False) -> FeedCursor[_T]:
        """Make a reader of what is received, from the oldest message held on, or after the newest one received."""
        cursor = FeedCursor(self, self._cache.cursor(at_end=at_end), self._cache)
        self._plain = (*self._plain, cursor)
        self._cursors = (*self._cursors, cursor)
        self.adjust_credit()
        return cursor

    def stream(self, selection: Selection[_T], *, since: int | None = None, at_end: bool = False) -> FeedStream[_T]:
        """Make a reader of a part of what is received.

        Args:
            since: The sequence number below which it reads none; None to read whatever comes.
        """
        cursor = self._cache.stream(selection, since=since, at_end=at_end)
        stream = self._streams[cursor] = FeedStream(self, cursor, self._cache)
        self._cursors = (*self._cursors, stream)
        self.adjust_credit()
        return stream

    def stop(self) -> None:
        """Take no more: credit goes to 0."""
        self.is_stopped = True
        credit, link = self._credit.withdraw(), self._kept.link
        if credit is not None and link is not None:
            link.set_credit(credit)

    def park(self) -> bool:
        """Keep the link without credit: if it ends meanwhile, the feed ends.

        Returns:
            False, without an effect, if there is no link, or if some messages of the limit are still to be received or
            taken.
        """
        if self._kept.link is None or self.error is not None or self._cache.count or self._credit.left != 0:
            return False
        self._kept.park()
        return True

    def resume(self, limit: int) -> None:
        """Continue a parked feed, for so many messages from now on."""
        self._kept.resume()
        self._credit.left = limit
        self.adjust_credit()

    def reopen(self, error: ServiceError) -> None:
        """Close the link, as if it had ended with an error, and open another one. Does nothing if there is no link."""
        self._kept.reopen(error)

    def fail(self, error: Exception) -> None:
        """End with an error of ours, and detach. What is in the cache can still be taken."""
        self.stop()
        self._kept.fail(error)

    async def until_reopened(self) -> Exception | None:
        """Wait for the next attempt to open a link, and return its error; None if the link is attached.

        If the feed has ended, its error is returned. One caller at a time; a cancelled call has no effect.
        """
        return self.error if self.error is not None else await self._kept.until_reopened()

    async def aclose(self, timeout: float = CLOSE_TIMEOUT) -> None:
        """Detach and drop the cache. Closing twice is fine. If cancelled, the feed still ends."""
        self.is_stopped = True
        if self.error is None:
            self.error = ClosedError("partition feed")
        for cursor in self._cursors:
            cursor.end()
        try:
            await self._kept.aclose(self.error, timeout)
        finally:
            self._cache.clear()
            if self.account is not None:
                self.account.close()
                self.adjust_credit()

    # ------------------------------------------------------------------------------------------ the link's sink

    def messages(self, batch: list[bytes]) -> None:
        """Add a batch to the cache: one append and at most one wake-up, however many messages it has.

        Those that wait for it take it within this call, if that is made by a callback of the event loop.
        """
        if self._is_refusing or not batch:
            return
        cache = self._cache
        size = self._credit.received(batch)
        account = self.account
        if account is not None and not account.received(size):
            batch = self._kept_of(account, batch)
            if not batch:
                return
            size = sum(map(len, batch))
        woken = cache.append(batch, size)
        newest, facts = batch[-1], self.facts
        facts.newest = newest if len(newest) <= LARGE else without_body(newest)
        if facts.first is None:
            facts.first = without_body(batch[0]) if len(batch[0]) > LARGE else batch[0]
        facts.batches += 1
        facts.received_at = facts.quiet_since = self.now()
        facts.hub_answer = None
        is_read_alone = len(self._cursors) == 1 and not self._streams
        if not is_read_alone:
            self.adjust_credit()
        for cursor in self._plain:
            cursor.arrived()
        for stream in woken:
            # One that the function of another has closed is not among them any more.
            if (reader := self._streams.get(stream)) is not None:
                reader.arrived()
        if is_read_alone and cache.count:
            # It has adjusted the credit if it has taken all.
            self.adjust_credit()

    def _kept_of(self, account: Account, batch: list[bytes]) -> list[bytes]:
        """Return the messages of a batch that the budget has room for. If not all, open the link again after them."""
        count = account.fitting(list(map(len, batch)))
        refused = len(batch) - count
        if refused:
            assert self._budget is not None
            self._is_refusing = True
            self._credit.refused(refused)
            self.reopen(FeedFullError(self._kept.spec.partition_id, self._budget.max_bytes, refused))
        return batch[:count]

    def detached(self, error: EventPumpError) -> None:
        """Called when the link ended."""
        self._kept.detached(error)

    # ------------------------------------------------------------------------------------------ called by KeptLink

    def link_opening(self) -> None:
        """Accept messages again, of the link that follows."""
        self._is_refusing = False

    def link_attached(self, link: ReceiveLink) -> None:
        """Give the link its credit."""
        self._credit.link_opened(link.max_message_size)
        if self._on_attached is not None:
            self._on_attached()
        self.adjust_credit()

    def link_closed(self) -> None:
        """Expect nothing more of what the link had credit for."""
        self._credit.link_ended()
        if self.account is not None:
            self.account.expects(0)

    def link_ended(self, error: Exception) -> None:
        """End with an error. What is in the cache can still be taken."""
        if self.error is None:
            self.error = error
        for cursor in self._cursors:
            cursor.wake()

    # -------------------------------------------------------------------------------------------------- the credit

    def adjust_credit(self) -> None:
        """Let the service send what there is room for. Called when messages were received, taken or given up."""
        account, cache = self.account, self._cache
        if account is None:
            self._grant()
        else:
            is_due = account.holds(cache.size + cache.in_hand)
            self._grant()
            if is_due:
                self._settle()

    def processed(self) -> None:
        """Adjust the credit after something that is not in the cache any more was processed."""
        account, cache = self.account, self._cache
        if account is not None and account.holds(cache.size + cache.in_hand):
            self._grant()
            self._settle()

    def _grant(self) -> None:
        link, account, cache = self._kept.link, self.account, self._cache
        if len(self._cursors) > 1:
            # Not when a cursor has read: nothing changes by that until the last of them has.
            free = self._free_bytes
            if self._budget is not None and not self._budget.is_ample:
                free = int(self.room_in_bytes * FREE_AT)
            self.is_filling = cache.count > self._free_events or cache.size > free
        else:
            self.is_filling = False
        if link is None or self.is_stopped:
            return
        if account is None or self._budget is None or self._budget.is_ample:
            credit = self._credit.grant(cache.count, cache.size)
        else:
            room, is_alone, recalls = account.room - cache.in_hand, not account.held, account.recalls
            credit = self._credit.grant(cache.count, cache.size, room, is_alone=is_alone, recalls=recalls)
            if not (self._credit.credit or cache.count) and self._credit.left != 0:
                account.waits()
            account.expects(self._credit.expected)
        if credit is not None:
            link.set_credit(credit)

    def _settle(self) -> None:
        """Adjust the credit of the feeds that have another room since the bytes held have changed."""
        assert self._budget is not None
        for account in self._budget.settle():
            account.adjust()

    def forget(self, cursor: FeedCursor[_T]) -> None:
        """Receive for the other cursors only."""
        self._cursors = tuple(each for each in self._cursors if each is not cursor)
        self._plain = tuple(each for each in self._plain if each is not cursor)
        if isinstance(cursor, FeedStream):
            self._streams.pop(cursor.stream, None)
        self.adjust_credit()


@based_on_core("PlainFeedCursor")
class FeedCursor(Generic[_T]):
    """One reader's place in a feed."""

    __slots__ = ("_cache", "_cursor", "_feed", "_timer", "_timer_at", "_wait_until", "_waiter")

    def __init__(self, feed: PartitionFeed[_T], cursor: Cursor[_T] | StreamCursor[_T], cache: EventCache[_T]) -> None:
        self._feed = feed
        self._cursor = cursor
        self._cache = cache
        self._waiter: Wakeup[bool] | None = None
        self._wait_until = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0  # kept here, as a handle of uvloop that is due at once does not have it

    @property
    def available(self) -> int:
        """How many messages can be taken now."""
        return self._cursor.available

    @property
    def held(self) -> tuple[int, int]:
        """Messages, and their bytes, that only this cursor has not read yet."""
        return self._cursor.held

    def take(self, limit: int) -> Sequence[_T]:
        """Take what is there, at most `limit` messages; empty where nothing is.

        What was taken before counts as processed then. The only cursor gets a list of its own; of several each may get
        the same tuple.
        """
        feed, cache = self._feed, self._cache
        held, in_hand = cache.count, cache.in_hand
        messages = self._cursor.read(limit)
        if cache.count < held:
            # Of several cursors only the last one to read makes room in the cache.
            feed.adjust_credit()
        elif cache.in_hand != in_hand:
            feed.processed()
        return messages

    @property
    def has_in_hand(self) -> bool:
        """Whether something was taken that was not processed yet."""
        return self._cursor.has_in_hand

    def processed(self) -> None:
        """Record that what was taken is processed. Also after the cursor was closed; calling it twice is fine."""
        cache = self._cache
        in_hand = cache.in_hand
        self._cursor.processed()
        if cache.in_hand != in_hand:
            # Of several cursors that have the same in hand only the last one to process it makes room.
            self._feed.processed()

    def settle(self) -> bool:
        """Record that what was taken is processed, if there is nothing to take. Return whether that is so."""
        cache = self._cache
        in_hand = cache.in_hand
        if not self._cursor.settle():
            return False
        if cache.in_hand != in_hand:
            self._feed.processed()
        return True

    def wait(
        self,
        timeout: float | None,
        work: Callable[[], bool] | None = None,
        task: asyncio.Task[Any] | None = None,
    ) -> asyncio.Future[bool]:
        """Wait until there is something to take, the feed has ended, or `wake` is called. Await it at once;
        False at the time-out.

        In the compiled build `work` is called when something can be taken, as the task that waits would be run: it
        returns whether that is to wait on, for as long again. Here that is run itself.
        """
        # No coroutine around the future: this is called for each batch.
        feed = self._feed
        waiter: Wakeup[bool] = Wakeup(loop=feed.loop)
        if self._cursor.available or feed.error is not None:
            waiter.set_result(True)
            return waiter
        self._waiter = waiter
        if timeout is not None:
            # The timer of an earlier wait is left to run out, and set again then: most waits end long before it.
            until = self._wait_until = feed.now() + timeout
            if self._timer is None or self._timer_at > until:
                self._set_timer()
        else:
            self._wait_until = float("inf")
        return waiter

    def arrived(self) -> None:
        """End a wait, as there is something to take: the task that waits takes it within this call, if it may."""
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            waiter.complete(True)

    def wake(self) -> None:
        """End a wait."""
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            if not waiter.done():
                waiter.set_result(True)

    def end(self) -> None:
        """End a wait, and its timer: the feed is closed, or the cursor."""
        self.wake()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def close(self) -> None:
        """Read no more: what only this cursor has not read is dropped. Closing twice is fine."""
        self._cursor.close()
        self._feed.forget(self)
        self.end()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._feed.loop.call_at(self._wait_until, self._time_is_up)
        self._timer_at = self._wait_until

    def _time_is_up(self) -> None:
        self._timer = None
        if self._waiter is None or self._waiter.done():
            return
        if self._feed.now() < self._wait_until:
            if self._wait_until != float("inf"):
                self._set_timer()
            return
        resolve(self._waiter, False)


class FeedStream(FeedCursor[_T]):
    """One reader's place in a part of a feed."""

    __slots__ = ("stream",)

    def __init__(self, feed: PartitionFeed[_T], stream: StreamCursor[_T], cache: EventCache[_T]) -> None:
        super().__init__(feed, stream, cache)
        self.stream = stream
        """The place in the cache."""


def as_received(messages: list[bytes]) -> list[bytes]:
    """Return the messages as they are, for cursors that read encoded messages."""
    return messages


if core is not None:
    core.feed_events(LARGE, without_body)
