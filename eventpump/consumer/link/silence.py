"""Finds links that are attached but silent although the hub has events for them, and opens them again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from eventpump.aio.tasks import TaskSet
from eventpump.consumer.link.feed import PartitionFeed
from eventpump.core.silence import (
    LOOK_INTERVAL,
    PROBE_TIMEOUT,
    HubAnswer,
    Patience,
    Peer,
    SilenceCheck,
    SilenceStep,
    is_ahead,
)
from eventpump.errors import EventPumpError, LinkDetachedError, ServiceTimeoutError
from eventpump.eventhubs.events import ReceivedEvent
from eventpump.interfaces import HubDirectory, ReceiveLink

_ENOUGH = 0.9
"""The part of the patience after which a check may begin."""


@dataclass(slots=True)
class _Watched:
    """The state of one feed.

    Attributes:
        batches: How many batches it had received when it was last looked at.
        next_at: When the next check may begin, on the loop's clock.
        withheld: The last sequence number in the hub when the connection was dropped because of missing events.
    """

    patience: Patience
    batches: int = 0
    check: asyncio.Task[None] | None = None
    next_at: float = 0.0
    withheld: int | None = None


@dataclass(frozen=True, slots=True)
class SilentLink:
    """A link that is considered dead: why, in words;
    whether its connection is dropped, or another link opened on it."""

    evidence: str
    silent_for: float
    drops_connection: bool


class SilenceWatch:
    """Checks the silent links of one host, or of one reader; `core.silence` has the rules.

    A check is a task, one per feed at most. Only a link that stays silent during the whole check is opened again, after
    the last message received: nothing is lost.

    Args:
        max_silence: Seconds after which a silent link is checked, and again; at least 1.
        on_unexpected: Called with the name and the error of a check that failed unexpectedly.
    """

    def __init__(
        self, directory: HubDirectory, hub: str, max_silence: float, on_unexpected: Callable[[str, BaseException], None]
    ) -> None:
        self._directory = directory
        self._hub = hub
        self.max_silence = max(max_silence, LOOK_INTERVAL)
        """Seconds after which a silent link is checked, for the first time."""
        self._tasks = TaskSet(on_unexpected)
        self._peer = Peer()
        self._watched: dict[PartitionFeed[Any], _Watched] = {}
        # Held by the check that may ask management; the others wait in order.
        self._turn = asyncio.Lock()
        self._look_at = 0.0

    def waited(self, feed: PartitionFeed[Any], partition_id: str, on_silent: Callable[[SilentLink], None]) -> None:
        """Begin a check if one is due. Called when a wait for events of a feed has ended without any."""
        watched = self._watched.get(feed)
        if watched is None:
            watched = self._watched[feed] = _Watched(Patience(self.max_silence))
        if feed.facts.batches != watched.batches:
            watched.batches = feed.facts.batches
            watched.patience.helped()
            if watched.withheld is not None and feed.facts.first is not None:
                if ReceivedEvent(feed.facts.first).sequence_number <= watched.withheld:
                    self._peer.drop_helped()
                watched.withheld = None
        now = asyncio.get_running_loop().time()
        # A bit less: a wait of this length began a little before the link was attached, or before the last check.
        enough = watched.patience.seconds * _ENOUGH
        is_due = now >= watched.next_at and now - feed.facts.quiet_since >= enough
        if watched.check is None and is_due and feed.is_silent:
            watched.next_at = now + enough
            check = self._check(feed, partition_id, watched, on_silent)
            watched.check = self._tasks.spawn(check, f"eventpump check of partition {partition_id}")

    def forget(self, feed: PartitionFeed[Any]) -> None:
        """End the check of a feed that has ended. May be called twice."""
        watched = self._watched.pop(feed, None)
        if watched is not None and watched.check is not None:
            self._tasks.drop(watched.check)

    async def aclose(self) -> None:
        """End every check. Closing twice is fine."""
        await self._tasks.cancel(LOOK_INTERVAL)

    # ----------------------------------------------------------------------------------------------- one check

    async def _check(
        self, feed: PartitionFeed[Any], partition_id: str, watched: _Watched, on_silent: Callable[[SilentLink], None]
    ) -> None:
        loop = asyncio.get_running_loop()
        may_drop = self._peer.may_drop(loop.time())
        check = SilenceCheck(self._peer, was_reopened=watched.patience.was_in_vain, may_drop=may_drop)
        holds_turn = False
        seen = _mark(feed)
        try:
            while check.step is not SilenceStep.REST:
                link = feed.link
                if link is None or not feed.is_silent or _mark(feed) != seen:
                    return
                if check.step is SilenceStep.PROBE:
                    answer = await link.probe(PROBE_TIMEOUT)
                    if answer or _mark(feed) == seen:
                        check.probed(answer)
                elif check.step is SilenceStep.ASK and not holds_turn:
                    # Held for both questions, so that the second follows right after the first.
                    holds_turn = await self._turn.acquire()
                elif check.step is SilenceStep.ASK:
                    ahead = await self._look(feed, partition_id)
                    if _mark(feed) == seen and feed.link is link:
                        check.looked(ahead)
                elif check.step is SilenceStep.REOPEN:
                    if holds_turn:
                        # The other checks need not wait for the attach.
                        holds_turn = False
                        self._turn.release()
                    watched.patience.tried()
                    on_silent(self._judged(feed, check))
                    feed.reopen(LinkDetachedError("the link was silent, and is closed"))
                    check.reopened(_is_attached(await feed.until_reopened()))
                    seen = _mark(feed)
                if check.step is SilenceStep.DROP:
                    if self._peer.may_drop(loop.time()):
                        self._drop(feed, link, watched, check, on_silent)
                    return
        finally:
            if holds_turn:
                self._turn.release()
            watched.check = None

    def _drop(
        self,
        feed: PartitionFeed[Any],
        link: ReceiveLink,
        watched: _Watched,
        check: SilenceCheck,
        on_silent: Callable[[SilentLink], None],
    ) -> None:
        self._peer.dropped(asyncio.get_running_loop().time(), was_mute=not check.is_ahead)
        if check.is_ahead and feed.facts.hub_answer is not None:
            watched.patience.tried()
            watched.withheld = feed.facts.hub_answer.last
        judged = self._judged(feed, check)
        on_silent(judged)
        link.drop_connection(f"links over it are silent: {judged.evidence}")

    async def _look(self, feed: PartitionFeed[Any], partition_id: str) -> bool | None:
        """Ask management, once it may be asked again. None if it does not answer, or if messages came meanwhile."""
        loop = asyncio.get_running_loop()
        await asyncio.sleep(self._look_at - loop.time())
        now, seen = loop.time(), _mark(feed)
        try:
            found = await self._directory.get_partition_properties(self._hub, partition_id)
        except EventPumpError:
            return None  # the discovery of partitions reports that management fails
        finally:
            # From the answer on: what the hub held then has had this time to arrive when the next question is asked.
            self._look_at = loop.time() + LOOK_INTERVAL
        if _mark(feed) != seen:
            return None
        ahead = is_ahead(
            received=None if feed.facts.newest is None else ReceivedEvent(feed.facts.newest).sequence_number,
            position=feed.position,
            last=found.last_enqueued_sequence_number,
            last_offset=found.last_enqueued_offset,
            last_time=found.last_enqueued_time.timestamp(),
            is_empty=found.is_empty,
        )
        feed.facts.hub_answer = HubAnswer(now, found.last_enqueued_sequence_number, ahead)
        return ahead

    @staticmethod
    def _judged(feed: PartitionFeed[Any], check: SilenceCheck) -> SilentLink:
        silent_for = asyncio.get_running_loop().time() - feed.facts.quiet_since
        if check.is_ahead and feed.facts.hub_answer is not None:
            evidence = f"the hub holds events up to sequence number {feed.facts.hub_answer.last}"
        elif feed.link is None:
            evidence = "a link in its place was not attached in time"
        else:
            evidence = "it does not answer a probe"
        return SilentLink(evidence, silent_for, check.step is SilenceStep.DROP)


def _mark(feed: PartitionFeed[Any]) -> tuple[int, int]:
    """Return a value that changes when a feed receives messages, or has another link."""
    return feed.facts.links, feed.facts.batches


def _is_attached(error: Exception | None) -> bool | None:
    """Return whether an attempt to attach succeeded; None if it failed with anything but a missing answer."""
    if error is None:
        return True
    return False if isinstance(error, ServiceTimeoutError) else None
