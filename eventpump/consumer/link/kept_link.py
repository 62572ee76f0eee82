"""Keeps one receive link open: opens it, and opens it again after failures, until it is not wanted any more."""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NoReturn, Protocol

from eventpump.aio.retry import within_try
from eventpump.aio.tasks import TaskSet, resolve
from eventpump.compiled import based_on_core
from eventpump.core.kept_link import KEPT_LINK_STEPS, KeptLinkInput, KeptLinkState, LinkFailures
from eventpump.core.silence import HubAnswer
from eventpump.errors import EventError, EventPumpError, LinkDetachedError, ServiceError
from eventpump.eventhubs.events import EventPosition, ReceivedEvent
from eventpump.interfaces import CLOSE_TIMEOUT, ReceiveLink, ReceiveLinkSpec, ReceiveSink, Transport
from eventpump.logs import log_retry
from eventpump.options.base import RetryOptions

_log = logging.getLogger("eventpump.consumer")


class FeedFullError(LinkDetachedError):
    """The link is opened again because events arrived that the host had no room for. No failure of the service."""

    def __init__(self, partition_id: str, max_bytes: int, refused: int) -> None:
        super().__init__(
            f"partition {partition_id}: {refused} events were not kept, as they would exceed the {max_bytes} bytes of "
            "max_buffered_bytes; they are received again. Events have grown suddenly, or the option is too low"
        )


@based_on_core("PlainFacts")
@dataclass(slots=True)
class LinkFacts:
    """What is known of a link and of what was received over it.

    Attributes:
        newest: The last message received; of a large one the part that has its place.
        first: The first message received over the last link, likewise.
        quiet_since: When the last message was received, or the link was attached after it; on the loop's clock.
        hub_answer: The answer of management since the last message, if it was asked.
    """

    newest: bytes | None = None
    first: bytes | None = None
    batches: int = 0
    links: int = 0
    quiet_since: float = 0.0
    received_at: float = -math.inf
    hub_answer: HubAnswer | None = None

    @property
    def next_number(self) -> int | None:
        """The sequence number after that of the last message received; None if it is not known."""
        with suppress(EventError):
            return None if self.newest is None else ReceivedEvent(self.newest).sequence_number + 1
        return None


class LinkUser(ReceiveSink, Protocol):
    """What receives over the link; see `PartitionFeed`."""

    def link_opening(self) -> None:
        """Called when the link is about to be attached."""

    def link_attached(self, link: ReceiveLink) -> None:
        """Called when the link is attached."""

    def link_closed(self) -> None:
        """Called when the link is not attached any more."""

    def link_ended(self, error: Exception) -> None:
        """Called when no link follows."""


class _Attempt:
    """One link, from the search for its position to its end."""

    __slots__ = ("ended", "is_attaching", "is_opened")

    def __init__(self, ended: asyncio.Future[EventPumpError]) -> None:
        self.ended = ended
        self.is_attaching = self.is_opened = False


class KeptLink:
    """Keeps a receive link open for one user. `KEPT_LINK_STEPS` has its states.

    The error's `Recovery` decides what follows the end of a link: GIVE_UP ends it, any other value opens the link
    again after the last message *received*.

    Args:
        spec: The link; its position is where the first one begins.
        facts: What is known of it, also written by the user.
        locate: Called before each link with the position where it would begin; returns where it begins. An error that
            it raises counts as a failure of the link.
        on_trouble: Called when the link fails, with the seconds until it is opened again; None if it is not.

    Attributes:
        spec: The link; its position is where one begins before the first message.
        link: The link while it is attached; None otherwise.
    """

    def __init__(
        self,
        transport: Transport,
        spec: ReceiveLinkSpec,
        user: LinkUser,
        facts: LinkFacts,
        retry: RetryOptions,
        *,
        rng: random.Random,
        startup_timeout: float | None,
        locate: Callable[[EventPosition], Awaitable[EventPosition]] | None,
        on_trouble: Callable[[Exception, float | None], None] | None,
    ) -> None:
        self._transport = transport
        self.spec = spec
        self._user = user
        self._facts = facts
        self._try_timeout = retry.try_timeout
        self._locate = locate
        self._on_trouble = on_trouble
        self._failures = LinkFailures(retry, rng, startup_timeout)
        self.state = KeptLinkState.CLOSED
        self.link: ReceiveLink | None = None
        self._attempt: _Attempt | None = None
        self._tasks = TaskSet(self._keeper_failed)
        self._keeper: asyncio.Task[None] | None = None
        self._is_closing = False
        self._reopening: asyncio.Future[Exception | None] | None = None

    @property
    def position(self) -> EventPosition:
        """Where a link opened now would begin: after the last message received."""
        newest = self._facts.newest
        return self.spec.position if newest is None else EventPosition.at_offset(ReceivedEvent(newest).offset)

    def start(self) -> None:
        """Open the link, and keep it open. May be called once."""
        self._step(KeptLinkInput.START)
        self._keeper = self._tasks.spawn(self._keep(), f"eventpump feed of partition {self.spec.partition_id}")

    def park(self) -> None:
        """Let the end of the link be final."""
        self._step(KeptLinkInput.PARK)

    def resume(self) -> None:
        """Open the link again if it ends, as before `park`."""
        self._step(KeptLinkInput.RESUME)

    def reopen(self, error: ServiceError) -> None:
        """Close the link, as if it had ended with an error, and open another one. Does nothing if there is no link."""
        attempt = self._attempt
        if self.link is not None and attempt is not None and not attempt.ended.done():
            self._step(KeptLinkInput.REOPEN)
            self.link = None
            attempt.ended.set_result(error)

    def detached(self, error: EventPumpError) -> None:
        """Called when the link ended."""
        if self._attempt is not None:
            resolve(self._attempt.ended, error)

    def fail(self, error: Exception) -> None:
        """End with an error of ours, and detach."""
        self._end(error)
        if self._keeper is not None:
            self._tasks.drop(self._keeper)

    async def until_reopened(self) -> Exception | None:
        """Wait for the next attempt to open a link, and return its error; None if the link is attached.

        If it has ended, the reason is returned. One caller at a time; a cancelled call has no effect.
        """
        outcome: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
        self._reopening = outcome
        try:
            return await outcome
        finally:
            self._reopening = None

    async def aclose(self, error: Exception, timeout: float) -> None:
        """Detach. Closing twice is fine. If cancelled, the link still ends."""
        if self._is_closing:
            await self._tasks.wait(timeout)
        else:
            # Only once: a second cancellation would interrupt the detach.
            self._is_closing = True
            self._step(KeptLinkInput.END)
            self._attempted(error)
            await self._tasks.cancel(timeout)

    def _step(self, event: KeptLinkInput) -> KeptLinkState:
        self.state = KEPT_LINK_STEPS[self.state, event]
        return self.state

    async def _keep(self) -> None:
        # Not `retrying`: an attempt that succeeds lasts until its link ends, and whether that counts as another failure
        # in a row, or as one at all, depends on how long the link lived and what was received.
        loop = asyncio.get_running_loop()
        failures, began = self._failures, loop.time()
        while True:
            attempt = self._attempt = _Attempt(loop.create_future())
            opened_at, newest = loop.time(), self._facts.newest
            try:
                await self._use_link(attempt)
            except EventPumpError as error:
                if attempt.is_attaching:
                    self._attempted(error)
                has_lived = not attempt.is_attaching and failures.has_lived(loop.time() - opened_at)
                if self._facts.newest is not newest or has_lived:
                    failures.worked()
                if not isinstance(error, ServiceError) or self._is_final(error, attempt):
                    self._end(error)
                    return
                delay = failures.delay_after(error, is_own=isinstance(error, FeedFullError))
                if failures.is_too_late(loop.time() - began + delay):
                    self._end(error)
                    return
                self._step(KeptLinkInput.FAILED)
                if failures.is_reported(error, loop.time()) and self._on_trouble is not None:
                    self._on_trouble(error, delay)
                else:
                    self._log_retry(error, delay)
            await asyncio.sleep(delay)
            self._step(KeptLinkInput.RETRY)

    def _is_final(self, error: ServiceError, attempt: _Attempt) -> bool:
        if self.state is KeptLinkState.PARKED:
            return True
        return not isinstance(error, FeedFullError) and self._failures.is_final(
            error, was_opened=attempt.is_opened, is_located=self._locate is not None
        )

    def _log_retry(self, error: ServiceError, delay: float) -> None:
        spec, attempt = self.spec, self._failures.in_a_row
        fields = {"hub": spec.hub, "consumer_group": spec.consumer_group, "partition_id": spec.partition_id}
        log_retry(_log, f"receiving partition {spec.partition_id}", error, delay=delay, attempt=attempt, **fields)

    async def _open(self, attempt: _Attempt) -> ReceiveLink:
        position = self.position
        if self._locate is not None and (located := await self._locate(position)) != position:
            self.spec = replace(self.spec, position=located)
            self._facts.newest = None
        attempt.is_attaching = True
        self._user.link_opening()
        return await self._transport.open_receive_link(replace(self.spec, position=self.position), self._user)

    async def _use_link(self, attempt: _Attempt) -> NoReturn:
        """Open the link, and raise the error with which it ends."""
        ended = attempt.ended
        link = await within_try(lambda: self._open(attempt), self._try_timeout)
        attempt.is_attaching = False
        try:
            self.link = link
            attempt.is_opened = True
            self._step(KeptLinkInput.ATTACHED)
            facts = self._facts
            facts.links += 1
            facts.first = None
            facts.quiet_since = asyncio.get_running_loop().time()
            self._attempted(None)
            self._failures.attached()
            self._user.link_attached(link)
            raise await ended
        finally:
            is_given_up = self.link is None
            self.link = None
            self._user.link_closed()
            if is_given_up or not ended.done() or ended.cancelled():
                with suppress(TimeoutError):
                    async with asyncio.timeout(CLOSE_TIMEOUT):
                        await link.aclose()

    def _end(self, error: Exception) -> None:
        was_ended = self.state is KeptLinkState.ENDED
        self._step(KeptLinkInput.END)
        self._user.link_ended(error)
        if not was_ended and self._on_trouble is not None:
            self._on_trouble(error, None)
        self._attempted(error)

    def _keeper_failed(self, _: str, error: BaseException) -> None:
        self._end(error if isinstance(error, Exception) else RuntimeError(f"the feed's task ended: {error!r}"))

    def _attempted(self, error: Exception | None) -> None:
        if self._reopening is not None:
            resolve(self._reopening, error)
