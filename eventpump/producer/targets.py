"""The targets of a producer: the gateway, or one partition, plain or idempotent.

There is one object per target. It is created by the first use, and it lives while it is in use or has something to
keep: a link, or the state of an idempotent publisher.
"""

from __future__ import annotations

import asyncio
import logging
import operator
import random
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

from eventpump.aio.retry import retrying
from eventpump.cancellation import is_cancelled
from eventpump.core.sequencer import AttachRequest, PartitionSequencer
from eventpump.core.status import BatchState
from eventpump.errors import (
    ClosedError,
    EventError,
    PublishOutcomeUnknownError,
    Recovery,
    ServiceError,
    StoreError,
)
from eventpump.eventhubs.events import EventData
from eventpump.eventhubs.names import BATCH_MESSAGE_FORMAT
from eventpump.eventhubs.numbering import advance
from eventpump.eventhubs.sealing import SealedBatch
from eventpump.interfaces import SendLink, SendLinkSpec, Transport
from eventpump.logs import retry_logger
from eventpump.options.base import RetryOptions
from eventpump.options.producer import PartitionPublishingOptions, PartitionPublishingProperties
from eventpump.producer.batch import EventBatch
from eventpump.producer.claiming import PublisherLinks, PublisherStart, PublisherStates
from eventpump.producer.publisher import PartitionPublisher
from eventpump.producer.stats import SendCounters

_T = TypeVar("_T")

_log = logging.getLogger("eventpump.producer")


class TargetContext:
    """What all targets of one producer share.

    Attributes:
        kept: The targets that have something to keep between two uses.
        holds: Which batch an event is in, while its outcome is open.
        check_partitions: Checks what was given for single partitions against those of the hub, before the first
            publisher is made; None if there is nothing to check.
    """

    def __init__(
        self, transport: Transport, hub: str, *, retry: RetryOptions, rng: random.Random, owns_transport: bool
    ) -> None:
        self.transport = transport
        self.owns_transport = owns_transport
        self.hub = hub
        self.retry = retry
        self.rng = rng
        self.closed = asyncio.Event()
        self.kept: set[SendTarget] = set()
        self.holds = EventHolds()
        self.counters = SendCounters()
        self.check_partitions: Callable[[], Awaitable[None]] | None = None
        self._left: set[asyncio.Task[Any]] = set()

    def require_open(self) -> None:
        """Check that the producer is open. Raises `ClosedError` if it is not."""
        if self.closed.is_set():
            raise ClosedError("producer")

    def leave_behind(self, work: Coroutine[Any, Any, object], name: str) -> None:
        """Run work that no caller waits for. Closing the producer waits for it."""
        self.own(asyncio.create_task(work, name=name))

    def own(self, task: asyncio.Task[Any]) -> None:
        """Keep a task that no caller waits for until it has ended. Closing the producer waits for it."""
        self._left.add(task)
        task.add_done_callback(self._left.discard)

    async def end_left(self) -> None:
        """Wait for the tasks that no caller waits for."""
        if self._left:
            await asyncio.wait(self._left)

    async def unless_closed(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run work that awaits what the user gave, such as the state store.
        Closing the producer cancels it: a `ClosedError`."""
        task = asyncio.create_task(work, name="prepare a publisher")
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # retrieved, so that it is not logged
        closed = asyncio.create_task(self.closed.wait(), name="wait for the end of a producer")
        try:
            try:
                await asyncio.wait({task, closed}, return_when=asyncio.FIRST_COMPLETED)
            except asyncio.CancelledError:
                # Not before it has ended: the next caller would begin the same beside it.
                task.cancel()
                await asyncio.wait({task, closed}, return_when=asyncio.FIRST_COMPLETED)
                raise
        finally:
            closed.cancel()
            if not task.done():
                task.cancel()
                self.own(task)
        self.require_open()
        if task.cancelled():
            raise StoreError("read state", "the store's call was cancelled")
        return task.result()


class EventHolds:
    """Which batch holds an event whose outcome is open, so that it is not sent in another one at the same time.

    Attributes:
        is_any: Whether there may be such a batch.
    """

    def __init__(self) -> None:
        self.is_any = False
        self._holders: dict[int, EventBatch] = {}  # by the event's identity
        self._unlisted: set[EventBatch] = set()  # batches whose events are not listed there yet

    def hold(self, batch: EventBatch) -> None:
        """Keep the events of a batch from being sent in another one."""
        self._unlisted.add(batch)
        self.is_any = True

    def free(self, batch: EventBatch) -> None:
        """End what `hold` began."""
        self._unlisted.discard(batch)
        for event in batch.events if self._holders else ():
            if self._holders.get(id(event)) is batch:
                del self._holders[id(event)]
        self.is_any = bool(self._unlisted or self._holders)

    def require_free(self, events: Sequence[EventData], batch: EventBatch | None = None) -> None:
        """Check that no batch but the given one holds any of these events: else an `EventError`."""
        # Listed only when needed: a producer that sends one batch after the other never has to compare.
        for each in self._unlisted:
            self._holders.update(dict.fromkeys(map(id, each.events), each))
        self._unlisted.clear()
        if not self._holders or self._holders.keys().isdisjoint(map(id, events)):
            return
        for event in events:
            holder = self._holders.get(id(event))
            if holder is None or holder is batch:
                continue
            if holder.state is BatchState.IN_DOUBT:
                raise EventError(
                    "an event is in doubt; to wait for its outcome, send the batch of the error, or the very same "
                    "batch or list, again"
                )
            raise EventError("an event is being sent already, in another batch or list")


class SendTarget(Protocol):
    """Where a producer sends messages: the gateway, or a partition."""

    async def limit(self) -> int:
        """Return the largest message that the service takes, in bytes; attach first if that is not known yet."""
        ...

    async def send(self, sealed: SealedBatch) -> int | None:
        """Send a message, and wait until it is stored; return its first number, if it has any.
        Raises as `HubProducer.send`."""
        ...

    async def send_batch(self, batch: EventBatch) -> None:
        """Send the message of a batch, and keep the batch's state. Raises as `HubProducer.send`."""
        ...

    async def send_events(self, events: list[EventData], pack: Callable[[], list[EventBatch]]) -> None:
        """Send events, in the batches of `pack`, one message after the other. Raises as `HubProducer.send`."""
        ...

    async def properties(self) -> PartitionPublishingProperties:
        """Return how it is published to; attach first if that is not known yet."""
        ...

    async def settle(self) -> None:
        """Wait until the outcome of every batch is known. Raises an error if the partition has failed."""
        ...

    async def drain(self) -> None:
        """Fail what was not sent yet, and wait until the outcome of the rest is known.
        Raises an error if the partition has failed."""
        ...

    async def store_last_mark(self) -> None:
        """Store how far it is. Called after `drain`."""
        ...

    async def aclose(self) -> None:
        """End it. Its links end with the transport's connection, or here if the producer does not own that."""
        ...

    @property
    def doubt(self) -> PublishOutcomeUnknownError | None:
        """The error for a batch whose outcome stayed unknown; None if there is none."""
        ...


class PlainTarget:
    """Sends without numbers, again while that may help: each event is stored at least once.

    Args:
        max_in_flight: The maximum number of sends at a time; None for no limit.
    """

    def __init__(self, context: TargetContext, partition_id: str | None, *, max_in_flight: int | None) -> None:
        self._context = context
        self._partition_id = partition_id
        self._turns = None if max_in_flight is None else asyncio.Semaphore(max_in_flight)
        self._opening = asyncio.Lock()
        self._openers = 0
        """How many sends wait for the link, which later ones must not overtake."""
        self._link: SendLink | None = None

    async def limit(self) -> int:
        """See :class:`SendTarget`."""
        return (await self._with_retries(_itself)).max_message_size

    def send(self, sealed: SealedBatch) -> Coroutine[Any, Any, None]:
        """See :class:`SendTarget`."""
        return self._send(sealed) if self._turns is None else self._send_in_turn(sealed, self._turns)

    async def _send_in_turn(self, sealed: SealedBatch, turns: asyncio.Semaphore) -> None:
        async with turns:
            await self._send(sealed)

    async def _send(self, sealed: SealedBatch) -> None:
        counters = self._context.counters
        failed: ServiceError | asyncio.CancelledError | None = None
        try:
            # What retries need is made after a failure: most sends have none.
            link = self._ready() if self._context.retry.try_timeout is None else None
            if link is not None:
                try:
                    await link.send(sealed.message, message_format=BATCH_MESSAGE_FORMAT)
                except (ServiceError, asyncio.CancelledError) as failure:
                    failed = failure
            if link is None or failed is not None:
                await self._with_retries(
                    lambda link: link.send(sealed.message, message_format=BATCH_MESSAGE_FORMAT),
                    sealed,
                    None if link is None or failed is None else (link, failed),
                )
        except BaseException:
            counters.failed(sealed.count, sealed.size)
            raise
        finally:
            failed = None  # its traceback holds this frame
        counters.sent(sealed.count, sealed.size)

    def send_batch(self, batch: EventBatch) -> Coroutine[Any, Any, None]:
        """See :class:`SendTarget`."""
        return self.send(batch.seal())

    async def send_events(self, events: list[EventData], pack: Callable[[], list[EventBatch]]) -> None:
        """See :class:`SendTarget`."""
        for batch in pack():
            await self.send(batch.seal())

    async def properties(self) -> PartitionPublishingProperties:
        """See :class:`SendTarget`."""
        return PartitionPublishingProperties(self._partition_id or "", False, None, None, None)

    async def settle(self) -> None:
        """Return at once: it has no numbers to settle anything by."""

    drain = store_last_mark = settle

    async def aclose(self) -> None:
        """See :class:`SendTarget`."""
        link, self._link = self._link, None
        if link is not None and not self._context.owns_transport:
            await link.aclose()

    @property
    def doubt(self) -> None:
        """None, as for :meth:`settle`."""

    async def _with_retries(
        self,
        use: Callable[[SendLink], Awaitable[_T]],
        sealed: SealedBatch | None = None,
        first: tuple[SendLink, ServiceError | asyncio.CancelledError] | None = None,
    ) -> _T:
        """Call `use` with the target's link, again under the retry policy if that can help.

        Args:
            first: The link and the error of the first attempt, if that was made already.
        """
        link: SendLink | None = None

        async def attempt() -> _T:
            nonlocal link, first
            link = None
            try:
                if first is not None:
                    (link, failure), first = first, None
                    raise failure
                link = self._ready() or await self._attached()
                return await use(link)
            except (ServiceError, asyncio.CancelledError) as failure:
                error = _as_failure(failure)
                if link is not None and error.recovery in (Recovery.RELINK, Recovery.RECONNECT):
                    self._drop(link)
                raise error from error.__cause__

        context = self._context
        log: Callable[[Exception, float], None] | None = None

        def on_expired() -> None:
            # As after the time-out of a single step: a link that does not answer is no use for the next attempt.
            if link is not None:
                self._drop(link)

        def on_retry(error: Exception, delay: float) -> None:
            nonlocal log
            if sealed is not None:
                context.counters.retried(sealed.count, sealed.size)
            if log is None:
                what = "sending" if self._partition_id is None else f"sending to partition {self._partition_id}"
                log = retry_logger(_log, what, hub=context.hub, partition_id=self._partition_id)
            log(error, delay)

        return await retrying(
            attempt,
            context.retry,
            context.rng,
            was_attached=lambda: link is not None,
            stop=context.closed,
            on_expired=on_expired,
            on_retry=on_retry,
        )

    def _ready(self) -> SendLink | None:
        """Return the link if it can be used at once; None if it must be attached, or if others wait for it."""
        link, context = self._link, self._context
        if self._openers or link is None or not link.is_attached:
            return None
        if context.closed.is_set():
            context.require_open()
        return link

    async def _attached(self) -> SendLink:
        self._openers += 1
        try:
            async with self._opening:
                return await self._open()
        finally:
            self._openers -= 1

    async def _open(self) -> SendLink:
        """Attach the link, unless one is attached. Called with the lock held."""
        self._context.require_open()
        link = self._link
        if link is not None and not link.is_attached:
            # It has ended, whatever the reason: its error belongs to those who used it then.
            self._drop(link)
            link = None
        if link is None:
            spec = SendLinkSpec(self._context.hub, self._partition_id)
            link = self._link = await self._context.transport.open_send_link(spec)
            self._context.kept.add(self)
            if self._context.closed.is_set():  # since: a transport of others would keep the link
                self._drop(link)
                self._context.require_open()
        return link

    def _drop(self, link: SendLink) -> None:
        """Close a link that failed, unless another send has replaced it already.

        A service that does not answer the detach delays no send.
        """
        if self._link is link:
            self._link = None
            self._context.kept.discard(self)
            self._context.leave_behind(link.aclose(), "close a failed send link")


class _Split:
    """A list that takes several messages, and how many calls send it."""

    __slots__ = ("batches", "events", "senders")

    def __init__(self, events: list[EventData], batches: list[EventBatch]) -> None:
        self.events = events
        self.batches = batches
        self.senders = 0

    @property
    def is_under_way(self) -> bool:
        """Whether it is being sent, or the outcome of a message is not known."""
        return self.senders > 0 or any(batch.is_under_way for batch in self.batches)


class IdempotentTarget:
    """Publishes to one partition with numbers: each event is stored exactly once, in the order of the calls."""

    def __init__(
        self,
        context: TargetContext,
        partition_id: str,
        options: PartitionPublishingOptions,
        states: PublisherStates | None,
    ) -> None:
        self._context = context
        self._partition_id = partition_id
        self._first = AttachRequest(options.producer_group_id, options.owner_level, options.starting_sequence_number)
        self._states = states
        self._opening = asyncio.Lock()
        self._openers = 0
        """How many calls wait for the publisher, which later ones must not overtake."""
        self._start: PublisherStart | None = None
        self._links: PublisherLinks | None = None
        self._publisher: PartitionPublisher | None = None
        self._under_way: dict[SealedBatch, EventBatch] = {}
        self._splits: list[_Split] = []

    async def limit(self) -> int:
        """See :class:`SendTarget`."""
        publisher = self._present() or await self._ready()
        await publisher.attached()
        return publisher.max_message_size

    async def send(self, sealed: SealedBatch) -> int:
        """See :class:`SendTarget`."""
        publisher = self._present() or await self._ready()
        first = await publisher.send(sealed)
        await self._confirmed()
        return first

    async def send_batch(self, batch: EventBatch) -> None:
        """See :class:`SendTarget`. A batch whose outcome is open, given again, waits for it."""
        await self._send_batch(self._present() or await self._ready(), batch)

    def knows(self, events: Sequence[EventData]) -> bool:
        """Return whether `send_events` of these events would continue an earlier call."""
        return any(batch.is_list and _are_same(batch.events, events) for batch in self._under_way.values()) or any(
            _are_same(each.events, events) for each in self._splits
        )

    async def send_events(self, events: list[EventData], pack: Callable[[], list[EventBatch]]) -> None:
        """See :class:`SendTarget`. A list whose outcome is open, given again, waits for it."""
        publisher = self._present() or await self._ready()
        # Nothing is awaited from here on until the batch is with its publisher: of two callers the second finds it.
        for batch in self._under_way.values():
            if batch.is_list and _are_same(batch.events, events):
                await self._send_batch(publisher, batch)
                return
        for split_up in self._splits:
            if _are_same(split_up.events, events):
                break
        else:
            batches = pack()
            for batch in batches:
                batch.is_list = True
            if len(batches) == 1:
                await self._send_batch(publisher, batches[0])
                return
            self._context.holds.require_free(events)
            split_up = _Split(events, batches)
            self._splits = [*(each for each in self._splits if each.is_under_way), split_up]
        await self._send_split(publisher, split_up)
        self._splits = [each for each in self._splits if each is not split_up]

    async def properties(self) -> PartitionPublishingProperties:
        """See :class:`SendTarget`."""
        publisher = self._present() or await self._ready()
        await publisher.attached()
        sequencer = publisher.sequencer
        marks, last = None if self._start is None else self._start.marks, sequencer.last_number
        assert last is not None
        return PartitionPublishingProperties(
            self._partition_id,
            True,
            sequencer.producer_id,
            sequencer.owner_level,
            last,
            None if marks is None else marks.count(last),
        )

    async def settle(self) -> None:
        """See :class:`SendTarget`."""
        if self._publisher is not None:
            await self._publisher.settled()

    async def drain(self) -> None:
        """See :class:`SendTarget`."""
        if self._publisher is not None:
            await self._publisher.drained()

    async def store_last_mark(self) -> None:
        """See :class:`SendTarget`."""
        publisher = self._publisher
        if publisher is not None and self._start is not None and self._start.marks is not None:
            is_clean = publisher.doubtful is None and publisher.sequencer.failure is None
            await self._start.marks.close(is_clean=is_clean)

    async def aclose(self) -> None:
        """See :class:`SendTarget`."""
        if self._start is not None:
            await self._start.aclose()
        if self._publisher is not None:
            await self._publisher.aclose()

    @property
    def doubt(self) -> PublishOutcomeUnknownError | None:
        """See :class:`SendTarget`."""
        publisher = self._publisher
        if publisher is None or publisher.doubtful is None:
            return None
        sequencer = publisher.sequencer
        head = sequencer.head
        assert head is not None
        error = PublishOutcomeUnknownError(sequencer.partition_id, head.first, head.count)
        error.__cause__ = None if sequencer.failure is None else sequencer.error()
        error.batch = self._under_way.get(publisher.doubtful)
        return error

    # ------------------------------------------------------------------------------------------ batches

    async def _send_split(self, publisher: PartitionPublisher, split_up: _Split) -> None:
        """Send what is not published of a list that takes several messages, and hold its events meanwhile."""
        holds = self._context.holds
        unsent = [each for each in split_up.batches if not (each.is_under_way or each.state is BatchState.PUBLISHED)]
        for batch in unsent:
            holds.require_free(batch.events, batch)
            if any(event.published_sequence_number is not None for event in batch.events):
                raise EventError("an event of the list was published since, in another batch or list")
        for batch in unsent:
            holds.hold(batch)
        split_up.senders += 1
        try:
            for batch in split_up.batches:
                if batch.state is not BatchState.PUBLISHED:
                    await self._send_batch(publisher, batch)
        finally:
            split_up.senders -= 1
            if not split_up.senders:
                for batch in split_up.batches:
                    if not batch.is_under_way:
                        holds.free(batch)

    async def _send_batch(self, publisher: PartitionPublisher, batch: EventBatch) -> None:
        """Publish a batch, or wait for the outcome of the one that is under way."""
        if batch.state is BatchState.PUBLISHED:
            if not batch.was_in_doubt:
                raise EventError("the batch is published; it is not sent again as new")
            await self._confirmed()  # settled since a caller got the error that its outcome is unknown
            return
        sealed = batch.seal()
        if sealed not in self._under_way:
            if batch.is_under_way:
                raise EventError(f"the batch is {batch.state.value} at another producer")
            holds = self._context.holds
            if holds.is_any:
                holds.require_free(batch.events, batch)
            self._under_way[sealed] = batch
            holds.hold(batch)
        batch.begun()
        try:
            await publisher.send(sealed)
            if self._start is not None:
                await self._confirmed()
        except PublishOutcomeUnknownError as error:
            error.batch = batch
            raise
        finally:
            if sealed in self._under_way and not publisher.is_awaited(sealed):
                if publisher.doubtful is sealed:
                    batch.left_in_doubt()
                else:
                    self._conclude(sealed, None)

    async def _confirmed(self) -> None:
        """Wait until the store knows that something is published."""
        marks = None if self._start is None else self._start.marks
        if marks is not None and not marks.is_confirmed:
            assert self._states is not None
            with self._states.waits.call():
                await marks.confirmed()

    def _concluded(self, sealed: SealedBatch, first: int | None) -> None:
        """Called by the publisher when the outcome of a message is known, whether or not a caller waits for it."""
        counters = self._context.counters
        (counters.failed if first is None else counters.sent)(sealed.count, sealed.size)
        if first is not None:
            last = advance(first, sealed.count - 1)
            assert self._links is not None
            self._links.published(last)
            if self._start is not None and self._start.marks is not None:
                self._start.marks.published(last)
        self._conclude(sealed, first)

    def _conclude(self, sealed: SealedBatch, first: int | None) -> None:
        """Record the outcome of a batch."""
        batch = self._under_way.pop(sealed, None)
        if batch is None:
            return
        self._context.holds.free(batch)
        batch.ended(first)

    # ------------------------------------------------------------------------------------------ publisher

    def _present(self) -> PartitionPublisher | None:
        """Return the publisher; None if it is to be waited for by `_ready`."""
        if self._openers or self._publisher is None:
            return None
        if self._context.closed.is_set():
            self._context.require_open()
        return self._publisher

    async def _ready(self) -> PartitionPublisher:
        """Return the publisher. The first call makes it, and with a state store claims the partition."""
        self._openers += 1
        try:
            async with self._opening:
                self._context.require_open()
                if self._publisher is None:
                    if self._context.check_partitions is not None:
                        await self._context.check_partitions()
                        self._context.require_open()
                    self._publisher = await self._context.unless_closed(self._make_publisher())
                    self._publisher.on_unknown = self._forget
                    self._context.kept.add(self)
                return self._publisher
        finally:
            self._openers -= 1

    async def _make_publisher(self) -> PartitionPublisher:
        context, first = self._context, self._first
        if self._states is None:
            self._links = PublisherLinks(context.transport, self._partition_id)
            sequencer: PartitionSequencer[SealedBatch] = PartitionSequencer(
                self._partition_id,
                producer_id=first.producer_id,
                owner_level=first.owner_level,
                starting_number=first.number,
            )
        else:
            await self._states.open()
            start = self._start
            if start is None:
                start = self._start = PublisherStart(
                    context.transport,
                    context.hub,
                    self._partition_id,
                    self._states,
                    first=first,
                    retry=context.retry,
                    rng=context.rng,
                )
                context.kept.add(self)
            self._links = start.links
            try:
                sequencer = await start.started()
            except BaseException:
                if start.is_untouched:
                    await start.aclose()
                    self._start = None
                    context.kept.discard(self)
                raise

        publisher = PartitionPublisher(
            self._links, context.hub, sequencer, retry=context.retry, rng=context.rng, on_concluded=self._concluded
        )
        publisher.on_retried = lambda sealed: context.counters.retried(sealed.count, sealed.size)
        return publisher

    def _forget(self) -> None:
        """Keep nothing of a partition that the service does not know: its id is the caller's mistake."""
        self._publisher = None
        self._context.kept.discard(self)
        start, self._start = self._start, None
        if start is not None:
            self._context.leave_behind(start.aclose(), "end the start of a publisher")


def _as_failure(failure: ServiceError | asyncio.CancelledError) -> ServiceError:
    """Return the error of a failed attempt; or raise `CancelledError`, if the caller was cancelled."""
    if isinstance(failure, ServiceError):
        return failure
    if is_cancelled():
        raise failure
    error = ServiceError("the attempt was cancelled by what it waited for")
    error.__cause__ = failure
    return error


async def _itself(link: SendLink) -> SendLink:
    return link


def _are_same(some: Sequence[object], others: Sequence[object]) -> bool:
    """Return whether two lists are of the very same objects."""
    return len(some) == len(others) and all(map(operator.is_, some, others))
