"""Sending events in batches: room for them, a batch being filled per lane, and the tasks that send full or due batches.

A lane is a partition, or the gateway. Its batches are sent in order, at most `max_in_flight` at a time; lanes do not
wait for each other. Per event there is no task, timer or future. Per lane there is a task while it has something to
send, and one timer serves all lanes.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import inf
from typing import Any, Generic, NamedTuple, TypeVar

from eventpump.aio.tasks import reject, resolve
from eventpump.cancellation import is_cancelled
from eventpump.errors import (
    ClosedError,
    EventPumpError,
    EventTooLargeError,
    PublishOutcomeUnknownError,
    ServiceError,
)
from eventpump.eventhubs.sealing import SealedBatch
from eventpump.producer.accumulator import Batch, BatchAccumulator, BufferRoom, Lane, Part
from eventpump.producer.producer import LAST_SECOND, HubProducer

E = TypeVar("E")


class Ended(NamedTuple, Generic[E]):
    """The outcome of the events of one message.

    Args:
        events: What was given for each of them.
        error: What they failed with; None if they are stored.
        is_awaited: Whether the outcome of one of them is awaited.
    """

    lane: Lane[E]
    events: Sequence[E]
    event_count: int
    size: int
    error: Exception | None
    is_awaited: bool


_log = logging.getLogger("eventpump.producer")


class _Waiter(NamedTuple):
    reserve: Callable[[set[Lane[Any]]], Lane[Any] | None]
    """Reserves the room, and returns where; None if there is none now. Adds the lanes that refused it to those given,
    and asks none of these."""
    future: asyncio.Future[Lane[Any] | None]
    """The lane where room was reserved; None if the queue was closed."""


class RoomQueue:
    """The room of a buffer, for calls that wait for it in order.

    Args:
        name: What the `ClosedError` of those that wait names.
        on_wait: Called when a call begins to wait; makes room sooner, if possible.
    """

    def __init__(self, name: str, room: BufferRoom, lanes: Mapping[Any, Lane[Any]], on_wait: Callable[[], object]):
        self.wanting = 0
        self._name = name
        self._room = room
        self._lanes = lanes
        self._on_wait = on_wait
        self._anywhere: deque[_Waiter] = deque()  # those that take room in any lane
        self._is_closed = False

    def reserve(self, lane: Lane[Any], size: int) -> bool:
        """Reserve room in a lane, unless others wait for it. Return whether it was reserved."""
        return not lane.waiting and not lane.admitted and self._room.reserve(lane.partition_id, size)

    def reserve_any(self, choose: Callable[[], Lane[Any]], size: int) -> Lane[Any] | None:
        """Reserve room in the first lane chosen that has some. Asks as often as there are lanes; None if none had."""
        return self._reserve_any(choose, size, {lane for lane in self._lanes.values() if lane.admitted})

    def _reserve_any(self, choose: Callable[[], Lane[Any]], size: int, refusing: set[Lane[Any]]) -> Lane[Any] | None:
        for _ in self._lanes:
            lane = choose()
            if lane not in refusing and not lane.waiting and self._room.reserve(lane.partition_id, size):
                return lane
            refusing.add(lane)
        return None

    def _reserve_in(self, lane: Lane[Any], size: int, refusing: set[Lane[Any]]) -> Lane[Any] | None:
        if self._room.reserve(lane.partition_id, size):
            return lane
        refusing.add(lane)
        return None

    async def acquire(self, lane: Lane[Any], size: int) -> Lane[Any]:
        """Wait for room in a lane, behind those that wait already, and reserve it. Cancelled, nothing is reserved."""
        return await self._wait(lane.waiting, partial(self._reserve_in, lane, size), size)

    async def acquire_any(self, choose: Callable[[], Lane[Any]], size: int) -> Lane[Any]:
        """Wait for room in any lane that `choose` returns, and reserve it. Cancelled, nothing is reserved."""
        lane = self.reserve_any(choose, size)
        return lane or await self._wait(self._anywhere, partial(self._reserve_any, choose, size), size)

    async def _wait(
        self, queue: deque[_Waiter], reserve: Callable[[set[Lane[Any]]], Lane[Any] | None], size: int
    ) -> Lane[Any]:
        waiter = _Waiter(reserve, asyncio.get_running_loop().create_future())
        queue.append(waiter)
        self.wanting += 1
        self._on_wait()
        try:
            lane = await waiter.future
        except asyncio.CancelledError:
            if waiter in queue:
                queue.remove(waiter)
                self._admit(queue)
            elif not (waiter.future.cancelled() or waiter.future.exception()) and (lane := waiter.future.result()):
                self._take_back(lane, size)
            raise
        finally:
            self.wanting -= 1
        if lane is not None and self._is_closed:
            self._take_back(lane, size)
        if self._is_closed or lane is None:
            raise ClosedError(self._name)
        lane.admitted -= 1
        return lane

    def _take_back(self, lane: Lane[Any], size: int) -> None:
        lane.admitted -= 1
        self.release(lane, 1, size)

    def release(self, lane: Lane[Any], events: int, size: int) -> None:
        """Release the room of events, and admit calls that wait for it."""
        others = self._room.release(lane.partition_id, events, size)
        for each in self._lanes.values() if others else (lane,):
            self._admit(each.waiting)
        self._admit(self._anywhere)

    def _admit(self, queue: deque[_Waiter]) -> None:
        """Admit the calls of a queue for which there is room.

        One for which there is none keeps its place, and the lanes that refused it refuse those behind it too, however
        small: so each lane keeps the order of the calls. Once all lanes refuse, no other call is asked.
        """
        most = len(self._lanes) if queue is self._anywhere else 1
        refusing: set[Lane[Any]] = set()
        kept: list[_Waiter] = []
        while queue and len(refusing) < most:
            waiter = queue.popleft()
            if waiter.future.done():
                continue
            try:
                lane = waiter.reserve(refusing)
            except BaseException as error:  # raised by the user's router: it ends this call, and no other
                reject(waiter.future, RuntimeError(repr(error)) if isinstance(error, StopIteration) else error)
            else:
                if lane is None:
                    kept.append(waiter)
                else:
                    lane.admitted += 1
                    resolve(waiter.future, lane)
        queue.extendleft(reversed(kept))

    def close(self) -> None:
        """Have all that wait raise `ClosedError`."""
        self._is_closed = True
        for queue in (self._anywhere, *(lane.waiting for lane in self._lanes.values())):
            for waiter in queue:
                resolve(waiter.future, None)
            queue.clear()


class Outbox(Generic[E]):
    """Fills a batch per lane, and sends what is full, due or flushed. Belongs to one event loop.

    Args:
        name: What the `ClosedError` of events that are not sent any more names.
        on_end: Called once with every event, when its outcome is known. Must not raise.
        max_bytes: The maximum size of a batch, in bytes. A larger event is sent alone. Where the service takes less in
            one message, a batch is sent in parts.
        max_wait_time: How long the first event of a batch waits for others, in seconds; by default until it is full or
            flushed.
        max_in_flight: The maximum number of batches of one lane that are being sent at a time.
        settle_tries: How many times a batch whose outcome stayed unknown is waited for again, each time for all retries
            of a send. May be changed.

    Attributes:
        add: `BatchAccumulator.add`, which adds an event to the batch of a lane; `now` is the time by the loop's clock.
            Bound once, because it is called for every event.
        is_closed: Whether the `ClosedError` is the reason that events are not sent.
        yield_at: A task that adds events at or after this time, by the loop's clock, should first call `let_run`.
        on_due: Called with the lane's partition when a batch is full, due or flushed; None to call nothing. Must not
            raise.
    """

    def __init__(
        self,
        producer: HubProducer,
        name: str,
        on_end: Callable[[Ended[E]], None],
        *,
        max_bytes: int,
        max_events: int = sys.maxsize,
        max_wait_time: float = inf,
        max_in_flight: int = 1,
        settle_tries: float = 0,
    ) -> None:
        self.lanes: dict[str | None, Lane[E]] = {}
        self.settle_tries = settle_tries
        self.is_closed = False
        self.yield_at = inf
        self.on_due: Callable[[str | None], None] | None = None
        self._producer = producer
        self._home = producer.home
        self._telemetry = producer.telemetry
        self._name = name
        self._on_end = on_end
        self._max_in_flight = max_in_flight
        self._accumulator: BatchAccumulator[E] = BatchAccumulator(
            max_events=max_events,
            max_bytes=max_bytes,
            max_wait_time=max_wait_time,
            idempotent=producer.is_idempotent,
            stamped=producer.is_stamping,
            on_begun=self._begun,
            on_ready=self._ready,
        )
        self.add = self._accumulator.add
        self._open: set[Batch[E]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._progress = asyncio.Event()  # a batch was taken, or has ended
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = inf  # kept here, as a handle of uvloop that is due at once does not have it

    def add_lanes(self, partition_ids: Iterable[str | None]) -> None:
        """Add lanes; None for the gateway. Called before the first event is added."""
        self.lanes.update((each, Lane(each)) for each in partition_ids)

    # ------------------------------------------------------------------------------------------ filling

    def _begun(self, batch: Batch[E]) -> None:
        batch.home = self._home
        self._open.add(batch)
        if self._timer is None:
            self._set_timer()

    def _ready(self, lane: Lane[E]) -> None:
        self._wake(lane)
        self.yield_at = -inf

    async def let_run(self) -> None:
        """Let the loop run once, so that what is due is sent although a task adds events without a pause."""
        await asyncio.sleep(0)
        self.yield_at = inf if self._timer is None else self._timer_at

    def _set_timer(self) -> None:
        """Set the timer for the next batch that is due by age. Later ones are due later, so that one is enough."""
        deadline = self._accumulator.deadline
        if deadline is not None and deadline < inf:
            self._timer = asyncio.get_running_loop().call_at(deadline, self._tick, deadline)
            self._timer_at = deadline
            self.yield_at = min(self.yield_at, deadline)

    def _tick(self, deadline: float) -> None:
        self._timer = None
        self.yield_at = inf
        for lane in self._accumulator.expire(max(deadline, asyncio.get_running_loop().time())):
            self._wake(lane)
        self._set_timer()

    def send_now(self, lane: Lane[E] | None = None) -> None:
        """Send what waits to be filled, in one lane or in all, without waiting for more."""
        if lane is None:
            for each in self._accumulator.flush():
                self._wake(each)
        elif lane.filling is not None and not lane.filling.is_due:
            self._accumulator.make_due(lane)
            self._ready(lane)

    # ------------------------------------------------------------------------------------------ sending

    def _wake(self, lane: Lane[E]) -> None:
        if self.on_due is not None:
            self.on_due(lane.partition_id)
        if len(lane.sending) < self._max_in_flight:
            name = "send to the gateway" if lane.partition_id is None else f"send to partition {lane.partition_id}"
            # Not by the loop's task factory: an eager one would have the task send, and end the batch, before `add` has
            # returned it.
            task = asyncio.Task(self._send_batches(lane), loop=asyncio.get_running_loop(), name=name)
            lane.sending.add(task)
            self._tasks.add(task)
            task.add_done_callback(partial(self._sending_ended, lane))

    async def _send_batches(self, lane: Lane[E]) -> None:
        while (batch := lane.take()) is not None:
            self._progress.set()
            await self._send_batch(lane, batch)
        # At once, and not when the task has ended: what becomes ready from here on needs another.
        lane.sending.discard(asyncio.current_task())

    def _sending_ended(self, lane: Lane[E], task: asyncio.Task[None]) -> None:
        """A task that sends has ended. What it left, cancelled or because of a defect, must end all the same."""
        self._tasks.discard(task)
        lane.sending.discard(task)
        if task.cancelled():
            # Only the end of the loop, or closing, cancels it: another task would not come to its end.
            if not lane.sending:
                self._fail_ready(lane)
            return
        if (error := task.exception()) is not None:
            _log.error("partition %s: sending batches failed", lane.partition_id, exc_info=error)
            if lane.is_ready:
                self._wake(lane)

    async def _send_batch(self, lane: Lane[E], batch: Batch[E]) -> None:
        """Send a batch, in parts where the service takes less in one message, and settle every part."""
        start, left = 0, [batch.seal()]
        try:
            while left:
                end = start + left[0].count
                first: int | None = None
                error: Exception | None = None
                try:
                    publishing = self._publish(lane, left[0])
                    if self._telemetry is not None:
                        sent = batch.events[start:end]
                        publishing = self._telemetry.publishing(publishing, sent, end - start, lane.partition_id)
                    first = await publishing
                except EventTooLargeError as too_large:
                    if end - start > 1:
                        left[:1] = batch.divide(start, end, too_large.limit)
                        continue
                    error = too_large
                except Exception as failure:
                    error = failure
                except BaseException as failure:
                    # Cancelled, or raised by what the user gave: the part on its way may be stored.
                    error = PublishOutcomeUnknownError(lane.partition_id or "", None, end - start)
                    error.__cause__ = failure
                    if is_cancelled() or not isinstance(failure, asyncio.CancelledError):
                        del left[0]
                        self._settle(lane, batch, Part(start, end, None, error))
                        start = end
                        raise
                del left[0]
                self._settle(lane, batch, Part(start, end, first, error))
                start = end
        finally:
            self._end(lane, batch, start, *(sealed.count for sealed in left))

    async def _publish(self, lane: Lane[E], sealed: SealedBatch) -> int | None:
        unknown: PublishOutcomeUnknownError | None = None
        tries = 0
        # Not `retrying`: there is no delay, because a further call joins the settlement that the publisher continues in
        # any case, with delays of its own.
        while True:
            try:
                return await self._producer.send_sealed(sealed, partition_id=lane.partition_id)
            except PublishOutcomeUnknownError as error:
                # Its partition publishes nothing else before it is settled, so nothing is gained by giving up.
                if tries >= self.settle_tries or not error.is_settling:
                    raise
                unknown = error
                tries += 1
            except ClosedError:
                if unknown is not None:
                    raise unknown from None
                raise

    def _settle(self, lane: Lane[E], batch: Batch[E], part: Part) -> None:
        """Report the outcome of events."""
        count = part.end - part.start
        # The list itself where it is all of them: the batch forgets it.
        events = batch.events if count == len(batch.events) else batch.events[part.start : part.end]
        size = batch.size if count == batch.count else batch.size_of(part.start, part.end)
        is_awaited = False
        for waiter in batch.settle(part):
            is_awaited = is_awaited or not waiter.done()
            resolve(waiter, part)
        self._on_end(Ended(lane, events, count, size, part.error, is_awaited))

    def _end(self, lane: Lane[E], batch: Batch[E], start: int, *counts: int) -> None:
        """End a batch, of which parts with so many events from number `start` on were not begun: they are not sent."""
        for count in counts:
            error: EventPumpError = ClosedError(self._name)
            if not self.is_closed:
                error = ServiceError("sending was cancelled before the events left", entity=lane.partition_id)
            self._settle(lane, batch, Part(start, start + count, None, error))
            start += count
        self._open.discard(batch)
        batch.forget_events()
        self._progress.set()

    def _fail_ready(self, lane: Lane[E]) -> None:
        # Only what is ready now: `on_end` may add an event for each one that fails, without an end.
        for batch in list(iter(lane.take, None)):
            self._end(lane, batch, 0, batch.count)

    # ------------------------------------------------------------------------------------------ ending

    @property
    def outgoing_bytes(self) -> int:
        """The size of what is full, due or being sent, in bytes."""
        return sum(batch.size for batch in self._open if batch.is_due)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds, which depends on batches that are taken to be sent, or end."""
        while not condition():
            self._progress.clear()
            await self._progress.wait()

    async def flush(self) -> None:
        """Send everything that was added without waiting for more, and wait for its outcome. Cancelled, it goes on."""
        self.send_now()
        await self.until(partial(self._open.copy().isdisjoint, self._open))

    def drop(self) -> None:
        """Fail what is not being sent with `ClosedError`."""
        self.is_closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._accumulator.flush()
        for lane in self.lanes.values():
            self._fail_ready(lane)

    async def aclose(self, timeout: float = 0) -> None:
        """End everything: `drop`, wait for what is being sent for a time in seconds, then cancel it."""
        self.drop()
        try:
            if self._tasks and timeout:
                await asyncio.wait(self._tasks, timeout=timeout)
        finally:
            for task in self._tasks:
                task.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=LAST_SECOND)
