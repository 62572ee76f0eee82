"""One partition's idempotent publishing: carries out what the sequencer decides.

It is used by `EventProducer`, `BufferedProducer`, and the Spark writer.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import random
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from eventpump.aio.retry import try_expired, within_try
from eventpump.aio.tasks import reject, wait_for_event
from eventpump.aio.wakeup import Wakeup
from eventpump.amqp.types import Int, Short
from eventpump.cancellation import is_cancelled
from eventpump.core.backoff import TryPace, is_used_up, least_delay
from eventpump.core.sequencer import (
    AttachRequest,
    Outcome,
    PartitionSequencer,
    Publication,
    SequencerState,
    Step,
)
from eventpump.errors import (
    ClosedError,
    EntityNotFoundError,
    EventPumpError,
    EventTooLargeError,
    ProducerStateLostError,
    PublishOutcomeUnknownError,
    Recovery,
    ServiceBusyError,
    ServiceError,
    StoreError,
)
from eventpump.eventhubs.conditions import (
    ARGUMENT_OUT_OF_RANGE,
    NOT_ALLOWED,
    OUT_OF_ORDER_SEQUENCE,
    PRODUCER_EPOCH_STOLEN,
)
from eventpump.eventhubs.names import (
    BATCH_MESSAGE_FORMAT,
    IDEMPOTENT_PRODUCER,
    PRODUCER_EPOCH,
    PRODUCER_ID,
    PRODUCER_SEQUENCE_NUMBER,
)
from eventpump.eventhubs.sealing import SealedBatch
from eventpump.interfaces import PostedMessage, SendLink, SendLinkOpener, SendLinkSpec
from eventpump.logs import log_retry
from eventpump.options.base import RetryOptions

_log = logging.getLogger("eventpump.producer")
_T = TypeVar("_T")


def attach_spec(hub: str, partition_id: str, asked: AttachRequest) -> SendLinkSpec:
    """Return what to attach with, to publish to a partition with numbers."""
    properties: dict[str, object] = {}
    if not asked.is_blank:
        properties = {
            PRODUCER_ID: asked.producer_id,
            PRODUCER_EPOCH: None if asked.owner_level is None else Short(asked.owner_level),
            PRODUCER_SEQUENCE_NUMBER: None if asked.number is None else Int(asked.number),
        }
    return SendLinkSpec(hub, partition_id, properties, (IDEMPOTENT_PRODUCER,))


def attach_answer(link: SendLink) -> tuple[int | None, int | None, int | None]:
    """Return the producer id, the owner level and the last number that the service stated for a link."""
    producer_id, level, number = map(link.properties.get, (PRODUCER_ID, PRODUCER_EPOCH, PRODUCER_SEQUENCE_NUMBER))
    return _number(producer_id), _number(level), _number(number)


def _number(value: object) -> int | None:
    return int(value) if isinstance(value, int) and not isinstance(value, bool) else None


class _Waiters(Generic[_T]):
    """The callers that wait for one outcome.

    Attributes:
        tries: For each of them, the number of attempts that failed meanwhile.
    """

    __slots__ = ("tries",)

    def __init__(self) -> None:
        self.tries: dict[Wakeup[_T], int] = {}

    def add(self) -> Wakeup[_T]:
        """Return the future outcome for one more caller, which calls `remove` if it waits no longer."""
        waiter: Wakeup[_T] = Wakeup(loop=asyncio.get_running_loop())
        self.tries[waiter] = 0
        return waiter

    def remove(self, waiter: Wakeup[_T]) -> None:
        """Forget a caller that does not wait any more."""
        self.tries.pop(waiter, None)

    async def wait(self, begin: Callable[[], None]) -> _T:
        """Wait for the outcome, and return or raise it. `begin` is called once the caller counts as one that waits."""
        waiter = self.add()
        begin()
        try:
            return await waiter
        finally:
            self.remove(waiter)

    def resolve(self, result: _T) -> None:
        """Have `wait` return this for all that wait. They go on within this call where no task runs."""
        waiters, self.tries = self.tries, {}
        for waiter in waiters:
            waiter.complete(result)

    def fail(self, error: Exception) -> None:
        """Have `wait` raise this for all that wait."""
        waiters, self.tries = self.tries, {}
        for waiter in waiters:
            reject(waiter, error)

    def count(self, tries: int) -> None:
        """Count attempts that failed."""
        for waiter in self.tries:
            self.tries[waiter] += tries

    @property
    def fewest_tries(self) -> int:
        """The failed attempts since the newest began to wait; 0 if there are none that wait."""
        return min(self.tries.values(), default=0)

    def expire(self, most: int | None, error: Exception) -> None:
        """Have `wait` raise this for those that have waited for more failed attempts; with None, for none of them."""
        if most is None:
            return
        for waiter in [each for each, tries in self.tries.items() if tries > most]:
            del self.tries[waiter]
            reject(waiter, error)


class _Job(_Waiters[int]):
    """A batch on its way, and the callers that wait for its outcome.

    Attributes:
        too_large: Why it is not stored, if the next attach does not answer that it is.
        began: When its newest transfer began, on the loop's clock.
    """

    __slots__ = ("began", "publication", "sealed", "too_large")

    def __init__(self, sealed: SealedBatch) -> None:
        self.tries = {}  # without a call of the base: one is made for each message
        self.sealed = sealed
        self.publication: Publication[SealedBatch] | None = None
        self.too_large: EventTooLargeError | None = None
        self.began = 0.0


class PartitionPublisher:
    """Publishes sealed batches to one partition, each exactly once, one at a time and in the order of the calls.

    A transfer is posted within the call of its caller, or within the report of the outcome before. What has to be
    awaited, an attach and the delay after a failure, is done by a task of its own, which ends when nothing is left to
    await; so what a caller no longer waits for is settled all the same. The task cancelled from outside fails the
    waiting callers, and the next use starts another; an unexpected error, wherever it is raised, fails every later use
    too.

    Args:
        on_concluded: Called once for every batch when its outcome is known: with the number of its first
            event, or None if it is not stored and never will be. Not for one that is in doubt when the publisher ends.

    Attributes:
        on_unknown: Called when the service has refused the first attach because there is no such partition or hub,
            and no caller waits any more: the publisher is closed then, and holds nothing.
        on_retried: Called with a batch before each retry of it.
    """

    def __init__(
        self,
        transport: SendLinkOpener,
        hub: str,
        sequencer: PartitionSequencer[SealedBatch],
        *,
        retry: RetryOptions,
        rng: random.Random,
        on_concluded: Callable[[SealedBatch, int | None], None] | None = None,
    ) -> None:
        self._transport = transport
        self._hub = hub
        self._sequencer = sequencer
        self._retry = retry
        self._rng = rng
        self._pace = TryPace.of(retry)
        self._on_concluded = on_concluded
        self.on_retried: Callable[[SealedBatch], None] | None = None
        self._link: SendLink | None = None
        self._is_fresh = False  # the link was attached for the current batch, and has sent nothing yet
        self._posted: PostedMessage | None = None
        """The transfer whose outcome is awaited: then there is no task."""
        self._expiry: asyncio.TimerHandle | None = None
        self._failed: tuple[EventPumpError, float] | None = None
        """What a transfer failed with, and when it began, while the task has not begun to deal with that."""
        self._max_message_size = 0
        self._jobs: deque[_Job] = deque()
        self._current: _Job | None = None
        self._attaching: _Waiters[None] = _Waiters()
        self._settling: _Waiters[None] = _Waiters()
        self._hurry = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._is_closing = False
        self._is_closed = False
        self._broken: BaseException | None = None
        self._is_unknown = False  # the service knows no such partition
        self.on_unknown: Callable[[], None] | None = None

    # ------------------------------------------------------------------------------------------ for callers

    @property
    def sequencer(self) -> PartitionSequencer[SealedBatch]:
        """The state machine, for reading."""
        return self._sequencer

    @property
    def doubtful(self) -> SealedBatch | None:
        """The batch whose outcome is not known; None if there is none."""
        job = self._current
        in_doubt = job is not None and job.publication is not None and job.publication.outcome is Outcome.UNKNOWN
        return job.sealed if job is not None and in_doubt else None

    @property
    def max_message_size(self) -> int:
        """The largest message the service takes, in bytes; 0 while that is not known."""
        return self._max_message_size

    def is_awaited(self, sealed: SealedBatch) -> bool:
        """Whether a caller waits for the outcome of a batch."""
        return any(job is not None and job.sealed is sealed and bool(job.tries) for job in (self._current, *self._jobs))

    async def attached(self) -> None:
        """Wait until the link is attached, so that the service's state is known.
        Raises an error if the partition has failed."""
        self._require_open()
        if self._sequencer.failure is not None:
            raise self._sequencer.error()
        if self._sequencer.last_number is not None:
            return
        await self._attaching.wait(self._go_on)

    async def send(self, sealed: SealedBatch) -> int:
        """Publish a batch, after those sent before it. If given again, a batch in doubt waits for its settlement.

        If cancelled before a byte of it is sent, it is not published, and may be sent as new; later it is in doubt,
        and the publisher settles it.

        Returns:
            The number of its first event.

        Raises:
            EventTooLargeError: It is larger than the link allows, or the service refused it as too large; not stored.
            PublishOutcomeUnknownError: No success within the retries, and it may be stored; it is being settled.
            ServiceError: Refused, or no success within the retries, and it is not stored.
            ProducerDisconnectedError: Another publisher took over. Final.
            InvalidClientStateError: The numbers do not agree with the service's. Final.
            ProducerStateLostError: The service has forgotten the publisher. Final.
        """
        if self._is_closing or self._broken is not None:
            raise self._closed_error()
        job = self._job(sealed)
        waiter = job.add()
        self._go_on()
        try:
            return await waiter
        except asyncio.CancelledError:
            job.remove(waiter)
            if not job.tries:
                self._abandon(job)
            raise

    async def settled(self) -> None:
        """Wait until nothing is in doubt. The next attempt to settle is made at once.
        Raises an error if the partition has failed."""
        while self.doubtful is not None:
            if self._sequencer.failure is not None:
                raise self._sequencer.error()
            if self._is_closed or self._broken is not None:
                raise self._closed_error()
            self._hurry.set()
            await self._settling.wait(self._go_on)

    async def drained(self) -> None:
        """Accept no more batches, fail those not sent yet, and wait for the rest.
        Raises an error if the partition has failed."""
        self._is_closing = True
        self._end_all(ClosedError("producer"), is_final=False)
        await self.settled()

    async def aclose(self) -> None:
        """End the task and detach. Pending sends fail; a batch in doubt stays so. Closing twice is fine.

        If cancelled, pending sends fail nevertheless.
        """
        self._is_closing = self._is_closed = True
        try:
            if self._task is not None:
                self._task.cancel()
                await asyncio.wait({self._task})
        finally:
            self._forget_transfer()
            if self._sequencer.step is Step.WAIT:
                self._sequencer.outcome_unknown()
            self._end_all(ClosedError("producer"))
        await self._drop_link()

    # ------------------------------------------------------------------------------------------ inside

    def _require_open(self) -> None:
        if self._is_closing or self._broken is not None:
            raise self._closed_error()

    def _closed_error(self) -> ClosedError:
        error = ClosedError("producer")
        error.__cause__ = self._broken
        return error

    def _job(self, sealed: SealedBatch) -> _Job:
        """Find the job of a batch that is on its way already, or queue a new one."""
        for job in (self._current, *self._jobs):
            if job is not None and job.sealed is sealed:
                return job
        job = _Job(sealed)
        self._jobs.append(job)
        return job

    def _abandon(self, job: _Job) -> None:
        """Called when no caller waits for a job any more."""
        if job.publication is None:
            if job in self._jobs:
                self._jobs.remove(job)
                self._finish(job)
        elif job is self._current and self._sequencer.withdraw(job.publication) is not Outcome.UNKNOWN:
            self._forget_transfer()
            self._conclude()
            self._go_on()

    def _go_on(self) -> None:
        """Do what is next: at once where nothing has to be awaited for it, otherwise in a task."""
        if self._task is not None or self._posted is not None or self._is_closed or self._broken is not None:
            return  # each goes on from where it ends
        try:
            if not self._proceed():
                return
        except (Exception, asyncio.CancelledError) as error:
            self._break(error)
            return
        partition_id = self._sequencer.partition_id
        self._task = asyncio.create_task(self._drive(), name=f"eventpump publisher of partition {partition_id}")
        self._task.add_done_callback(self._ended)

    def _proceed(self) -> bool:
        """Do what is next, up to a transfer or to what has to be awaited.

        Returns:
            Whether something has to be awaited. If not, a transfer is out, or nothing is left to do.
        """
        sequencer = self._sequencer
        while self._posted is None:
            if self._failed is not None:
                return True
            if sequencer.failure is not None:
                self._fail_all()
            elif self._current is None and self._jobs:
                job = self._current = self._jobs.popleft()
                job.publication = sequencer.offer(job.sealed, job.sealed.count)
            if sequencer.failure is not None or (self._current is None and not self._attaching.tries):
                self._is_fresh = False
                self._pace.reset()
                return False
            if sequencer.step is not Step.SEND:
                return True
            self._transfer()
        return False

    async def _drive(self) -> None:
        # User code may have swallowed the cancellation.
        while not self._is_closed and self._broken is None and self._proceed():
            await self._advance()
        self._task = None  # a call from here on starts another one
        if self._is_unknown and self._posted is None and not self._is_closed:
            self._is_closing = self._is_closed = True
            if self.on_unknown is not None:
                self.on_unknown()

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Called when the task has ended: fail the waiting callers. The state machine is consistent at any point."""
        if task.cancelled():
            self._task = None
            if not self._is_closed:
                partition_id = self._sequencer.partition_id
                _log.warning("partition %s: its publisher was cancelled", partition_id)
                self._end_all(ServiceError("publishing was cancelled", entity=partition_id))
        elif (error := task.exception()) is not None:
            self._task = None
            self._break(error)

    def _break(self, error: BaseException) -> None:
        """End it, after a defect here or in what the user passed in: callers, waiting and later ones, get the error."""
        _log.error("partition %s: its publisher has failed", self._sequencer.partition_id, exc_info=error)
        if self._broken is None:
            self._broken = error
            self._end_all(error if isinstance(error, Exception) else RuntimeError(f"the publisher ended: {error!r}"))

    async def _advance(self) -> None:
        """Do what has to be awaited next, and notify the waiting callers of its outcome."""
        if self._failed is not None:
            (error, began), self._failed = self._failed, None
            await self._trouble(error, Step.SEND, began)
            return
        began = asyncio.get_running_loop().time()
        try:
            await within_try(self._attach, self._retry.try_timeout)
            self._answer_attaching()
            self._conclude()
        except EventPumpError as error:
            await self._trouble(error, Step.ATTACH, began)
        except asyncio.CancelledError as error:
            if is_cancelled():
                raise
            await self._trouble(self._cancelled("attempt", error), Step.ATTACH, began)

    def _cancelled(self, what: str, error: asyncio.CancelledError) -> ServiceError:
        trouble = ServiceError(f"the {what} was cancelled by what it waited for", entity=self._sequencer.partition_id)
        trouble.__cause__ = error
        return trouble

    async def _attach(self) -> None:
        await self._drop_link()
        sequencer = self._sequencer
        spec = attach_spec(self._hub, sequencer.partition_id, sequencer.attach_request)
        try:
            link = await self._transport.open_send_link(spec)
        except ProducerStateLostError as error:
            # A batch in doubt stays so indefinitely: the service has lost the state that would settle it.
            sequencer.state_lost(error.problem)
            return
        except ServiceError as error:
            if error.condition == PRODUCER_EPOCH_STOLEN:
                sequencer.fenced(error.description, transfer_refused=False)
                return
            if sequencer.last_number is None and _is_unknown(error):
                self._is_unknown = True
            raise
        self._is_unknown = False
        self._link = link
        self._is_fresh = True
        self._max_message_size = link.max_message_size
        sequencer.attached(*attach_answer(link))
        _log.debug(
            "partition %s: the producer is attached: id %s, owner level %s, last sequence number %s",
            *(sequencer.partition_id, sequencer.producer_id, sequencer.owner_level, sequencer.last_number),
            extra={"hub": self._hub, "partition_id": sequencer.partition_id},
        )

    def _transfer(self) -> None:
        """Send the current batch on the link, or record that the link has ended."""
        sequencer, link, job = self._sequencer, self._link, self._current
        assert link is not None
        assert job is not None
        if not link.is_attached and not self._is_fresh:
            sequencer.detached()  # while there was nothing to send; no fault of this batch
            return
        assert job.publication is not None
        assert job.publication.first is not None
        assert sequencer.producer_id is not None
        assert sequencer.owner_level is not None
        message = job.sealed.numbered(sequencer.producer_id, sequencer.owner_level, job.publication.first)
        loop = asyncio.get_running_loop()
        job.began = loop.time()
        try:
            self._posted = link.post(
                message, self._transferred, message_format=BATCH_MESSAGE_FORMAT, on_sent=self._sent
            )
        except EventPumpError as error:
            self._came_to(error)
            return
        if (limit := self._retry.try_timeout) is not None:
            self._expiry = loop.call_later(limit, self._expired, limit)

    def _sent(self) -> None:
        self._is_fresh = False
        self._sequencer.sending()

    def _transferred(self, error: BaseException | None) -> None:
        """Called with the outcome of a transfer. Last of all, the callers that wait for it go on within this call."""
        self._posted = None
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        try:
            if error is None:
                self._sequencer.accepted()
                self._conclude()
            else:
                self._came_to(error)
                self._go_on()
        except (Exception, asyncio.CancelledError) as unexpected:
            self._break(unexpected)

    def _expired(self, limit: float) -> None:
        """Called when a transfer has taken longer than a try may."""
        self._forget_transfer()
        self._transferred(try_expired(limit))

    def _forget_transfer(self) -> None:
        """Expect no outcome of a transfer any more. One of which no byte was sent is not sent."""
        posted, self._posted = self._posted, None
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        if posted is not None:
            posted.withdraw()

    def _came_to(self, error: BaseException) -> None:
        """Record in the state machine that a transfer has failed.

        Raises:
            BaseException: The error, if it is none of this package.
        """
        sequencer, link, job = self._sequencer, self._link, self._current
        assert link is not None
        assert job is not None
        if not isinstance(error, EventPumpError):
            if sequencer.step is Step.WAIT:
                sequencer.outcome_unknown()
            if not isinstance(error, asyncio.CancelledError):
                raise error
            self._failed = self._cancelled("transfer", error), job.began
        elif self._explained(link, error):
            self._conclude()
        else:
            self._failed = error, job.began

    def _explained(self, link: SendLink, error: EventPumpError) -> bool:
        """Record in the state machine what an error implies for a transfer.

        Unless the service rejected the transfer on a live link, or as too large, the outcome of a transfer in flight is
        unknown.
        """
        sequencer = self._sequencer
        is_out = sequencer.step is Step.WAIT
        if isinstance(error, ServiceError) and error.condition == PRODUCER_EPOCH_STOLEN:
            # If the link ended with it, the transfer was not answered.
            sequencer.fenced(error.description, transfer_refused=is_out and link.is_attached)
            return True
        if not is_out:
            # Not a byte of it was sent.
            if not link.is_attached:
                sequencer.detached()
            return False
        if isinstance(error, EventTooLargeError):
            sequencer.refused_as_too_large()
            if not link.is_attached:
                sequencer.detached()
            if sequencer.state is SequencerState.OVERSIZED:
                assert self._current is not None
                self._current.too_large = error
                return True
        elif not isinstance(error, ServiceError) or not link.is_attached:
            sequencer.outcome_unknown()
        elif error.condition == OUT_OF_ORDER_SEQUENCE:
            sequencer.refused_out_of_order()
            return True
        elif isinstance(error, ServiceBusyError):
            sequencer.refused_for_now()
        elif error.recovery is Recovery.GIVE_UP:
            sequencer.refused()
            if error.condition == NOT_ALLOWED:
                sequencer.detached()  # the service may have forgotten the producer: the next attach shows it
        else:
            sequencer.outcome_unknown()
        return False

    async def _trouble(self, error: EventPumpError, step: Step, began: float) -> None:
        """Fail the callers that have waited long enough, and wait before the next try, as a step failed that began at
        this time."""
        counts = self._pace.counts(began)
        is_final = not isinstance(error, StoreError) and (
            not isinstance(error, ServiceError) or error.recovery is Recovery.GIVE_UP
        )
        # Not `retrying`: each waiter has attempts of its own, and settling a batch in doubt has no last one.
        job = self._current
        if job is not None:
            job.count(counts)
            if job.tries and (is_final or is_used_up(self._retry, job.fewest_tries - 1)):
                self._give_up(job, error)
        self._conclude(error)
        self._attaching.count(counts)
        self._attaching.expire(-1 if is_final else self._retry.max_retries, error)
        if self._sequencer.failure is not None or (self._current is None and not self._attaching.tries):
            return
        if self._current is not None and self.on_retried is not None:
            self.on_retried(self._current.sealed)
        delay = self._pace.next(
            self._rng,
            began=began,
            now=asyncio.get_running_loop().time(),
            is_connection_lost=isinstance(error, ServiceError) and error.recovery is Recovery.RECONNECT,
            was_attached=step is Step.SEND,
            at_least=least_delay(error),
        )
        partition_id = self._sequencer.partition_id
        if counts and self._current is not None and not self._current.tries:
            _log.warning("partition %s: a batch is in doubt, next attempt in %.1f s: %s", partition_id, delay, error)
        else:
            what = f"partition {partition_id}: {'publishing' if self.doubtful is None else 'settling a send in doubt'}"
            attempt = self._pace.failures
            log_retry(_log, what, error, delay=delay, attempt=attempt, hub=self._hub, partition_id=partition_id)
        self._hurry.clear()
        await wait_for_event(self._hurry, delay)

    def _give_up(self, job: _Job, error: EventPumpError) -> None:
        """Fail the callers that wait for the current job; one in doubt is settled nevertheless."""
        assert job.publication is not None
        if self._sequencer.withdraw(job.publication) is Outcome.UNKNOWN:
            job.fail(self._unknown(job, error))

    def _unknown(self, job: _Job, cause: BaseException) -> PublishOutcomeUnknownError:
        publication = job.publication
        assert publication is not None
        error = PublishOutcomeUnknownError(self._sequencer.partition_id, publication.first, publication.count)
        error.__cause__ = cause
        return error

    def _conclude(self, error: Exception | None = None) -> None:
        """Finish the current job, if its outcome is known;
        with an error if it is not stored, and the partition has not failed."""
        job = self._current
        if job is None or job.publication is None or job.publication is self._sequencer.head:
            return
        self._current = None
        if job.publication.outcome is Outcome.PUBLISHED:
            self._pace.reset()
        elif job.tries:
            failure = self._sequencer.error() if self._sequencer.failure is not None else error or job.too_large
            assert failure is not None
            error = _saying("the events are not stored", failure)
        self._finish(job, error)

    def _finish(self, job: _Job, error: Exception | None = None) -> None:
        """End a job. Every job ends here, once, unless it is in doubt when the publisher is closed."""
        publication = job.publication
        is_published = publication is not None and publication.outcome is Outcome.PUBLISHED
        first = publication.first if publication is not None and is_published else None
        if self._on_concluded is not None:
            try:
                self._on_concluded(job.sealed, first)
            except (Exception, asyncio.CancelledError) as unexpected:
                self._break(unexpected)
        # Last, as callers may go on within, with other calls.
        if first is None:
            if job.tries:
                assert error is not None
                job.fail(error)
        else:
            if self._jobs:
                self._go_on()
            job.resolve(first)
        if self._settling.tries:
            self._settling.resolve(None)

    def _end_all(self, error: Exception, *, is_final: bool = True) -> None:
        """Fail what was not sent. If final, also fail the callers that wait for a batch in doubt: it stays so."""
        self._conclude(error)
        self._fail_queued(lambda: error)
        current = self._current
        if current is not None:
            assert current.publication is not None
            if self._sequencer.withdraw(current.publication) is not Outcome.UNKNOWN:
                self._forget_transfer()
                self._conclude(error)
            elif is_final:
                current.fail(self._unknown(current, error))  # it stays current, so that `doubtful` returns it
        if is_final:
            self._settling.fail(error)

    def _fail_all(self) -> None:
        """Called when the partition has failed: fail the waiting callers with its error. Later ones get it too."""
        self._fail_queued(self._sequencer.error)
        if self._current is not None:
            unknown = "whether the events are stored is not known"
            self._current.fail(_saying(unknown, self._sequencer.error()))
        self._settling.resolve(None)

    def _fail_queued(self, error: Callable[[], Exception]) -> None:
        """Fail the callers that wait for the link, and finish the jobs that were not begun."""
        self._attaching.fail(error())
        while self._jobs:
            self._finish(self._jobs.popleft(), error())

    def _answer_attaching(self) -> None:
        if self._sequencer.failure is None and self._sequencer.last_number is not None:
            self._attaching.resolve(None)

    async def _drop_link(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            await link.aclose()


def _is_unknown(error: ServiceError) -> bool:
    """Whether a refused attach says that there is no such partition or hub."""
    return isinstance(error, EntityNotFoundError) or error.condition == ARGUMENT_OUT_OF_RANGE


def _saying(known: str, error: Exception) -> Exception:
    """Return a copy of a service's error, which several callers may share, that adds what is known of the batch."""
    if not isinstance(error, ServiceError):
        return error
    copied = copy.copy(error)
    copied.args = (f"{error}; {known}",)
    copied.__cause__ = error
    return copied
