"""Sending single events in batches: an event joins the batch of its partition, and its receipt tells its outcome.

An event is *accepted* once it has found room. From then on it ends in exactly one of success or error, told by its
receipt and by `on_success` or `on_error`. Per partition one batch is on its way at a time, so that events stay in
order; partitions do not wait for each other.

Per event there is no task, timer or future: a receipt is two slots, and shares what its batch knows. Per batch there is
a turn of its partition's task, which lives while there is something to send. One timer serves all partitions.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections import deque
from collections.abc import Callable, Generator, Sequence
from functools import lru_cache, partial
from math import inf
from typing import Any, NamedTuple, Self, cast

from eventpump.cancellation import is_cancelled
from eventpump.core.accumulator import Batch, BatchAccumulator, BufferRoom
from eventpump.core.router import HashRouter, PartitionRouter
from eventpump.errors import (
    BufferFullError,
    ClosedError,
    ConfigurationError,
    EventError,
    EventPumpError,
    EventTooLargeError,
    PublishOutcomeUnknownError,
    ServiceError,
)
from eventpump.eventhubs.envelope import envelope_head
from eventpump.eventhubs.events import EventData
from eventpump.eventhubs.hashing import check_key_length, partition_for_key
from eventpump.eventhubs.numbering import NUMBERS
from eventpump.eventhubs.sealing import SealedBatch, pieces, pieces_of
from eventpump.eventhubs.stamps import with_room
from eventpump.options.producer import BufferSettings
from eventpump.producer.producer import CLOSE_TIMEOUT, LAST_SECOND, HubProducer
from eventpump.producer.targets import PartitionPublishingProperties

OnSuccess = Callable[[Sequence[EventData], str], None]
OnError = Callable[[Sequence[EventData], str, Exception], None]

_NAME = "buffered producer"
_CLOSE_GRACE = 5.0
"""Seconds for sends to learn that their producer was closed."""

_log = logging.getLogger("eventpump.producer")


class SendResult(NamedTuple):
    """Where an event was stored.

    Args:
        partition_id: The partition.
        published_sequence_number: Its number at an idempotent producer; None at a plain one.
    """

    partition_id: str
    published_sequence_number: int | None


class DeliveryReceipt:
    """What becomes of an accepted event. Await it, as often and in as many tasks as you like, or let it be.

    Awaiting gives :class:`SendResult`, or raises what the event failed with. Cancelled, or given up by a time-out, only
    that one wait ends: the event goes on, and so do the others of its batch.
    """

    __slots__ = ("_fate", "_index")

    def __init__(self, fate: _Fate, index: int) -> None:
        self._fate = fate
        self._index = index

    def __await__(self) -> Generator[Any, None, SendResult]:
        fate, index = self._fate, self._index
        part = fate.part(index)
        if part is None:
            # A future of this wait alone: cancelling a task cancels the future it waits for.
            waiter: asyncio.Future[_Part] = asyncio.get_running_loop().create_future()
            fate.waiters[waiter] = index
            try:
                part = yield from waiter
            finally:
                fate.waiters.pop(waiter, None)
        if part.error is not None:
            raise part.error.with_traceback(None)
        number = None if part.first is None else (part.first + index - part.start) % NUMBERS
        return SendResult(fate.partition_id, number)

    @property
    def partition_id(self) -> str:
        """The partition the event goes to."""
        return self._fate.partition_id

    def done(self) -> bool:
        """Return whether the outcome is known."""
        return self._fate.part(self._index) is not None

    def __repr__(self) -> str:
        part = self._fate.part(self._index)
        state = "pending" if part is None else "published" if part.error is None else "failed"
        return f"DeliveryReceipt(partition {self._fate.partition_id}, {state})"


class _Part(NamedTuple):
    """What became of the events of a batch from `start` to `end`: all of them, unless it took several messages."""

    start: int
    end: int
    first: int | None
    error: Exception | None


class _Fate:
    """The one future of a batch, which its receipts share.

    Attributes:
        pieces: Its events as they are sent, two pieces of each, beside those the batch has as they were given.
        parts: What is known.
        waiters: Who waits for which event.
        flushes: Who waits for the whole.
    """

    __slots__ = ("flushes", "partition_id", "parts", "pieces", "waiters")

    def __init__(self, partition_id: str) -> None:
        self.partition_id = partition_id
        self.pieces: list[bytes] = []
        self.parts: list[_Part] = []
        self.waiters: dict[asyncio.Future[_Part], int] = {}
        self.flushes: list[_Flush] = []

    def size(self, start: int, end: int) -> int:
        """Return what events take in a message, in bytes."""
        return sum(map(len, self.pieces[2 * start : 2 * end]))

    def part(self, index: int) -> _Part | None:
        """Find what is known of an event."""
        for part in self.parts:
            if part.start <= index < part.end:
                return part
        return None

    def settle(self, part: _Part) -> bool:
        """Tell everybody who waits for it.

        Returns:
            Whether somebody did.
        """
        self.parts.append(part)
        told = False
        for waiter, index in self.waiters.items():
            if part.start <= index < part.end and not waiter.done():
                waiter.set_result(part)
                told = True
        return told


class _Flush:
    """Waits for the end of several batches."""

    __slots__ = ("future", "remaining")

    def __init__(self, fates: set[_Fate]) -> None:
        self.remaining = len(fates)
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        for fate in fates:
            fate.flushes.append(self)

    def ended(self) -> None:
        self.remaining -= 1
        if not self.remaining and not self.future.done():
            self.future.set_result(None)


class _Waiter(NamedTuple):
    size: int
    future: asyncio.Future[bool]
    """True once the room is reserved; False where the producer was closed."""


class _Lane:
    """The way to one partition.

    Attributes:
        waiting: Sends that wait for room, in order.
        admitted: Sends that have been given room and have not run since.
        sending: Tasks that send, and have not found that there is nothing to send.
    """

    __slots__ = ("admitted", "partition_id", "sending", "waiting")

    def __init__(self, partition_id: str) -> None:
        self.partition_id = partition_id
        self.waiting: deque[_Waiter] = deque()
        self.admitted = 0
        self.sending: set[asyncio.Task[None]] = set()


class HubBufferedProducer:
    """Sends single events in batches. Belongs to one event loop.

    Events given by the calls of `send` for one partition, or with one key, keep the order of these calls. With an
    idempotent producer each is published exactly once; a batch in doubt holds up its own partition only, until its
    outcome is known.

    With a state store, each partition starts with the first event for it. A start in doubt (`on_doubt`) sends nothing
    there: the events fail with a `PublishOutcomeUnknownError` whose `is_settling` is False, until a producer with
    another `on_doubt` is made. An application that does not go on by `events_published` has nothing to count, and
    passes `on_doubt="accept"`.

    The partitions are read once, when it is opened: a hub that is given more of them goes on with those, and keys stay
    where they are.

    Args:
        producer: Sends the batches. Closed with this.
        router: Chooses the partition of an event that names none; by default keys go where the service's hash puts
            them, and events without key go round. For an event without key it is asked again where the partition it
            chose has no room.
        on_success: Is called with the events of a message that is stored, in order, and the partition. Must not block.
        on_error: Is called with the events that failed, the partition, and the error. Must not block. Without it a
            failure that no receipt waits for is logged.
        encode: Is called with every event, and gives the event that is sent in its place: compressed, encrypted,
            annotated. What is larger afterwards counts as larger.

    Raises:
        ConfigurationError: Options that cannot work together.
    """

    def __init__(
        self,
        producer: HubProducer,
        settings: BufferSettings | None = None,
        *,
        router: PartitionRouter | None = None,
        on_success: OnSuccess | None = None,
        on_error: OnError | None = None,
        encode: Callable[[EventData], EventData] | None = None,
    ) -> None:
        self._settings = settings = settings or BufferSettings()
        self._is_idempotent = producer.is_idempotent
        self._is_stamping = producer.is_stamping  # looked at for every event
        if self._is_idempotent and settings.max_in_flight > 1:
            raise ConfigurationError("max_in_flight", "is 1 for an idempotent producer")
        for name, callback in {"on_success": on_success, "on_error": on_error, "encode": encode}.items():
            if inspect.iscoroutinefunction(callback):
                raise ConfigurationError(name, "is a plain function; let it start a task for what takes time")
        self._producer = producer
        self._router = router or HashRouter(partition_for_key)
        self._on_success = on_success
        self._on_error = on_error
        self._hook = encode
        self._accumulator: BatchAccumulator[EventData] = BatchAccumulator(
            max_events=settings.max_batch_events,
            max_bytes=settings.max_batch_bytes,
            max_wait_time=settings.max_wait_time,
        )
        self._partition_ids: tuple[str, ...] = ()
        self._lanes: dict[str, _Lane] = {}
        self._room: BufferRoom
        self._time: Callable[[], float]
        self._is_open = False
        self._opening: asyncio.Event | None = None
        self._is_closed = False
        self._ended = asyncio.Event()
        self._open_fates: set[_Fate] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._roaming: deque[asyncio.Future[None]] = deque()  # sends that wait for room in any partition
        self._wanting = 0  # sends that wait for room at all
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = inf  # kept here, as a handle of uvloop that is due at once does not have it
        # A send at or after this moment first lets the loop run: something is due to be sent.
        self._yield_at = inf
        self._yielding = 0
        self._keeps_asking = True

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    @property
    def hub(self) -> str:
        """The event hub's name."""
        return self._producer.hub

    @property
    def fully_qualified_namespace(self) -> str:
        """The namespace's host name."""
        return self._producer.fully_qualified_namespace

    @property
    def is_closed(self) -> bool:
        """Whether `aclose` was called: no event is accepted."""
        return self._is_closed

    async def open(self) -> None:
        """Learn the hub's partitions. The first `send` does it too. Opening twice is fine.

        Raises:
            ServiceError: As of the transport. It may be tried again.
            ConfigurationError: The buffer is too small for that many partitions.
        """
        self._require_open()
        while not self._is_open:
            if self._opening is not None:
                await self._opening.wait()
                self._require_open()
                continue
            self._opening = asyncio.Event()
            try:
                self._lay_out(await self._producer.get_partition_ids())
            except EventPumpError:
                self._require_open()
                raise
            finally:
                self._opening.set()
                self._opening = None

    def _lay_out(self, partition_ids: tuple[str, ...]) -> None:
        self._require_open()
        settings = self._settings
        try:
            self._room = BufferRoom(
                partition_ids,
                max_events=settings.max_events,
                max_bytes=settings.max_bytes,
                max_partition_events=settings.max_partition_events,
                max_partition_bytes=settings.max_partition_bytes,
            )
        except ValueError as error:
            raise ConfigurationError("max_events", str(error)) from None
        self._time = asyncio.get_running_loop().time
        self._partition_ids = partition_ids
        self._lanes = {partition_id: _Lane(partition_id) for partition_id in partition_ids}
        self._is_open = True

    # ------------------------------------------------------------------------------------------ accepting

    async def send(
        self, event: EventData, *, partition_id: str | None = None, partition_key: str | None = None
    ) -> DeliveryReceipt:
        """Accept an event, once there is room for it.

        Cancelled, it was not accepted.

        Args:
            partition_id: Send to this partition.
            partition_key: Send where events of this key go. Readers see the key. At most 128 characters, the JavaScript
                client's limit; what the service does with a longer one is not known.

        Returns:
            A receipt, which need not be awaited.

        Raises:
            EventError: It cannot be encoded.
            ConfigurationError: The key is too long.
            ServiceError: Not open yet, and it cannot be.
        """
        if not self._is_open:
            await self._open_in_turn()
        now = self._time()
        if self._yielding or now >= self._yield_at:
            await self._let_others_run()
            now = self._time()
        if self._is_closed:
            raise ClosedError(_NAME)
        head, rest = self._encode(event, partition_key)
        size = len(head) + len(rest)
        lane = self._route(event, partition_id, partition_key)
        if lane.waiting or lane.admitted or not self._room.reserve(lane.partition_id, size):
            if partition_id is None and partition_key is None:
                lane = await self._find_room(event, size)
            else:
                await self._wait_for_room(lane, size)
            now = self._time()
        return self._accept(lane, event, head, rest, now)

    def send_nowait(
        self, event: EventData, *, partition_id: str | None = None, partition_key: str | None = None
    ) -> DeliveryReceipt:
        """Accept an event at once, as `send` does.

        Raises:
            BufferFullError: There is no room now, or others wait for it. Nothing was taken.
            ConfigurationError: It is not open yet, or the key is too long.
        """
        self._require_open()
        if not self._is_open:
            raise ConfigurationError(_NAME, "is not open: enter it with `async with`, or await `open()`")
        head, rest = self._encode(event, partition_key)
        size = len(head) + len(rest)
        lane: _Lane | None = self._route(event, partition_id, partition_key)
        assert lane is not None
        if not self._reserve(lane, size):
            full, lane = lane, None
            if partition_id is None and partition_key is None:
                lane = self._roomy_lane(event, size)
            if lane is None:
                self._hurry()
                raise BufferFullError(full.partition_id, size, self._room.events, self._room.bytes)
        return self._accept(lane, event, head, rest, self._time())

    async def send_and_wait(
        self, event: EventData, *, partition_id: str | None = None, partition_key: str | None = None
    ) -> SendResult:
        """Send an event as `send` does, and wait until it is stored.

        Cancelled, it may have been accepted: it is then sent all the same.

        Raises:
            EventPumpError: What it failed with.
        """
        return await (await self.send(event, partition_id=partition_id, partition_key=partition_key))

    @property
    def buffered_events(self) -> int:
        """How many events are accepted whose outcome is open."""
        return self._room.events if self._is_open else 0

    @property
    def buffered_bytes(self) -> int:
        """What they take in their messages."""
        return self._room.bytes if self._is_open else 0

    async def get_partition_publishing_properties(self, partition_id: str) -> PartitionPublishingProperties:
        """Return how a partition is published to, and with a state store how many events are published there.

        What is accepted and not stored yet is not counted. Attaches first where that is not known yet.

        Raises:
            EventPumpError: It cannot be attached, or the partition has failed.
        """
        return await self._producer.get_partition_publishing_properties(partition_id)

    def _encode(self, event: EventData, partition_key: str | None) -> tuple[bytes, bytes]:
        """Encode an event, in two pieces. The sum of their lengths is what it adds to a message, in bytes."""
        if self._is_idempotent and event.published_sequence_number is not None:
            raise EventError("the event is published already, with a number")
        if self._hook is not None:
            event = self._hook(event)
        if partition_key is None:
            return pieces_of(event, idempotent=self._is_idempotent, stamped=self._is_stamping)
        # A key's annotation stands before all that an event encodes.
        encoded = with_room(event.encode()) if self._is_stamping else event.encode()
        return pieces(_keyed_head(partition_key) + encoded, idempotent=self._is_idempotent)

    def _route(self, event: EventData, partition_id: str | None, partition_key: str | None) -> _Lane:
        if partition_id is None:
            lane = self._lanes.get(self._router.route(event, partition_key, self._partition_ids))
            if lane is None:
                raise ConfigurationError("router", "chose a partition that the hub does not have")
            return lane
        if partition_key is not None:
            raise ConfigurationError("partition_key", "cannot be given along with partition_id")
        lane = self._lanes.get(partition_id)
        if lane is None:
            raise ConfigurationError("partition_id", f"the hub has no partition {partition_id!r}")
        return lane

    def _accept(self, lane: _Lane, event: EventData, head: bytes, rest: bytes, now: float) -> DeliveryReceipt:
        """Add an event that has its room to its partition's batch."""
        accumulator = self._accumulator
        is_ready = accumulator.add(lane.partition_id, event, len(head) + len(rest), now)
        batch = accumulator.newest
        assert batch is not None
        fate = batch.outcome
        if fate is None:
            fate = batch.outcome = _Fate(lane.partition_id)
            self._open_fates.add(fate)
            if self._timer is None:
                self._set_timer()
        if is_ready:
            self._wake(lane)
            self._yield_at = -inf
        if self._wanting:
            self._hurry()
        fate.pieces.append(head)
        fate.pieces.append(rest)
        return DeliveryReceipt(fate, len(batch.events) - 1)

    async def _open_in_turn(self) -> None:
        self._yielding += 1
        try:
            await self.open()
        finally:
            self._yielding -= 1

    async def _let_others_run(self) -> None:
        """Let the loop run once, so that what is due goes out though somebody sends without a pause.

        Sends that come meanwhile do so too, and thus stay behind this one.
        """
        self._yielding += 1
        try:
            await asyncio.sleep(0)
        finally:
            self._yielding -= 1
        self._yield_at = inf if self._timer is None else self._timer_at

    # ------------------------------------------------------------------------------------------ room

    def _reserve(self, lane: _Lane, size: int) -> bool:
        return not lane.waiting and not lane.admitted and self._room.reserve(lane.partition_id, size)

    async def _wait_for_room(self, lane: _Lane, size: int) -> None:
        """Wait for room in a partition, behind those who wait already, and reserve it."""
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        waiter = _Waiter(size, future)
        lane.waiting.append(waiter)
        self._wanting += 1
        self._hurry()
        try:
            is_admitted = await future
        except asyncio.CancelledError:
            if waiter in lane.waiting:
                lane.waiting.remove(waiter)
                self._admit(lane)
            elif not future.cancelled() and future.result():
                lane.admitted -= 1
                self._release(lane, 1, size)
            raise
        finally:
            self._wanting -= 1
        if not is_admitted:
            raise ClosedError(_NAME)
        lane.admitted -= 1
        if self._is_closed:
            self._release(lane, 1, size)
            raise ClosedError(_NAME)

    async def _find_room(self, event: EventData, size: int) -> _Lane:
        """Wait for room in any partition the router chooses, and reserve it."""
        is_woken = False
        while True:
            try:
                lane = self._roomy_lane(event, size)
            except BaseException:
                if is_woken:
                    self._wake_roaming(1)  # the room is another's, if the router does not choose for this one
                raise
            if lane is not None:
                return lane
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._roaming.append(future)
            self._wanting += 1
            self._hurry()
            try:
                await future
            except asyncio.CancelledError:
                if future in self._roaming:
                    self._roaming.remove(future)
                elif not future.cancelled():
                    self._wake_roaming(1)
                raise
            finally:
                self._wanting -= 1
            is_woken = True
            if self._is_closed:
                raise ClosedError(_NAME)

    def _roomy_lane(self, event: EventData, size: int) -> _Lane | None:
        """Ask the router until it chooses a partition with room, once per partition. Reserves it."""
        for _ in self._partition_ids:
            lane = self._route(event, None, None)
            if self._reserve(lane, size):
                return lane
        return None

    def _release(self, lane: _Lane, events: int, size: int) -> None:
        """Give room back, and let those in who wait for it."""
        if self._room.release(lane.partition_id, events, size):
            for each in self._lanes.values():
                if each.waiting:
                    self._admit(each)
        elif lane.waiting:
            self._admit(lane)
        self._wake_roaming(events)

    def _admit(self, lane: _Lane) -> None:
        waiting = lane.waiting
        while waiting:
            size, future = waiting[0]
            if not future.done():
                if not self._room.reserve(lane.partition_id, size):
                    return
                lane.admitted += 1
                future.set_result(True)
            waiting.popleft()

    def _wake_roaming(self, count: int) -> None:
        while count and self._roaming:
            future = self._roaming.popleft()
            if not future.done():
                future.set_result(None)
                count -= 1

    # ------------------------------------------------------------------------------------------ sending

    def _set_timer(self) -> None:
        """Have the next batch that is due by age found. Later ones are due later, so that one timer is enough."""
        deadline = self._accumulator.deadline
        if deadline is not None:
            self._timer = asyncio.get_running_loop().call_at(deadline, self._tick, deadline)
            self._timer_at = deadline
            self._yield_at = min(self._yield_at, deadline)

    def _tick(self, deadline: float) -> None:
        self._timer = None
        self._yield_at = inf
        for partition_id in self._accumulator.expire(max(deadline, self._time())):
            self._wake(self._lanes[partition_id])
        self._set_timer()

    def _hurry(self) -> None:
        """Send what waits for others: there is nothing to wait for any more."""
        for partition_id in self._accumulator.flush():
            self._wake(self._lanes[partition_id])

    def _wake(self, lane: _Lane) -> None:
        if len(lane.sending) < self._settings.max_in_flight:
            name = f"send to partition {lane.partition_id}"
            task = asyncio.get_running_loop().create_task(self._send_batches(lane), name=name)
            lane.sending.add(task)
            self._tasks.add(task)
            task.add_done_callback(partial(self._sending_ended, lane))

    async def _send_batches(self, lane: _Lane) -> None:
        while (batch := self._accumulator.take(lane.partition_id)) is not None:
            await self._send_batch(lane, batch)
        # At once, and not when the task has ended: what becomes ready from here on needs another.
        lane.sending.discard(cast("asyncio.Task[None]", asyncio.current_task()))

    def _sending_ended(self, lane: _Lane, task: asyncio.Task[None]) -> None:
        """A task that sends has ended. What it left, cancelled or by a mistake of ours, must end all the same."""
        self._tasks.discard(task)
        lane.sending.discard(task)
        if task.cancelled():
            # Nobody but the end of the loop, or closing, cancels it: another task would not come to its end.
            if not lane.sending:
                while (batch := self._accumulator.take(lane.partition_id)) is not None:
                    self._settle(lane, batch, 0, len(batch.events), None, self._not_sent(lane))
                    self._end(batch)
            return
        if (error := task.exception()) is not None:
            _log.error("partition %s: sending batches failed", lane.partition_id, exc_info=error)
            if self._accumulator.is_ready(lane.partition_id):
                self._wake(lane)

    def _not_sent(self, lane: _Lane) -> EventPumpError:
        if self._is_closed:
            return ClosedError(_NAME)
        return ServiceError("sending was cancelled before the events left", entity=lane.partition_id)

    async def _send_batch(self, lane: _Lane, batch: Batch[EventData]) -> None:
        """Send a batch, in parts where the service takes less in one message, and tell what became of every event."""
        fate: _Fate = batch.outcome
        parts = [(0, len(batch.events))]
        try:
            while parts:
                start, end = parts[-1]
                first: int | None = None
                error: Exception | None = None
                try:
                    first = await self._publish(lane.partition_id, fate.pieces[2 * start : 2 * end])
                except EventTooLargeError as too_large:
                    if end - start > 1:
                        parts[-1:] = reversed(self._split(fate, start, end, too_large.limit))
                        continue
                    error = too_large
                except Exception as failure:
                    error = failure
                except BaseException as failure:
                    # Cancelled, or raised by what the user gave: the part on its way may be stored.
                    error = PublishOutcomeUnknownError(lane.partition_id, None, end - start)
                    error.__cause__ = failure
                    if is_cancelled() or not isinstance(failure, asyncio.CancelledError):
                        parts.pop()
                        self._settle(lane, batch, start, end, None, error)
                        raise
                parts.pop()
                self._settle(lane, batch, start, end, first, error)
        finally:
            for start, end in reversed(parts):
                self._settle(lane, batch, start, end, None, self._not_sent(lane))
            self._end(batch)

    async def _publish(self, partition_id: str, pieces: list[bytes]) -> int | None:
        sealed = SealedBatch(pieces, idempotent=self._is_idempotent, stamped=self._is_stamping)
        unknown: PublishOutcomeUnknownError | None = None
        while True:
            try:
                return await self._producer.send_sealed(sealed, partition_id=partition_id)
            except PublishOutcomeUnknownError as error:
                # Its partition publishes nothing else before it is settled, so nothing is gained by giving up.
                if not self._keeps_asking or not error.is_settling:
                    raise
                unknown = error
            except ClosedError:
                if unknown is not None:
                    raise unknown from None
                raise

    def _split(self, fate: _Fate, start: int, end: int, limit: int) -> list[tuple[int, int]]:
        """Divide a batch that is too large into parts that are not, where an event is not by itself."""
        parts: list[tuple[int, int]] = []
        at, size = start, 0
        for index in range(start, end):
            more = fate.size(index, index + 1)
            if size and size + more > limit:
                parts.append((at, index))
                at, size = index, 0
            size += more
        parts.append((at, end))
        if len(parts) == 1:
            middle = (start + end) // 2
            return [(start, middle), (middle, end)]
        return parts

    def _settle(
        self, lane: _Lane, batch: Batch[EventData], start: int, end: int, first: int | None, error: Exception | None
    ) -> None:
        """Tell what became of events, and give their room back."""
        events = batch.events[start:end]
        is_whole = len(events) == len(batch.events)
        size = batch.size if is_whole else batch.outcome.size(start, end)
        is_told = batch.outcome.settle(_Part(start, end, first, error))
        self._release(lane, end - start, size)
        try:
            if error is None:
                if self._on_success is not None:
                    self._on_success(events, lane.partition_id)
            elif self._on_error is not None:
                self._on_error(events, lane.partition_id, error)
            elif not is_told:
                _log.error("partition %s: %d events were not sent: %s", lane.partition_id, end - start, error)
        except (KeyboardInterrupt, SystemExit) as error:
            # It ends the program from a step of its own: what is to be done for the other events is done first.
            asyncio.get_running_loop().call_soon(_raise, error)
        except BaseException:
            # Also a `CancelledError`: nobody can cancel a callback, so it comes of what the callback looked at.
            _log.exception("partition %s: a callback of the buffered producer failed", lane.partition_id)

    def _end(self, batch: Batch[EventData]) -> None:
        """Let go of a batch whose every event has ended."""
        fate: _Fate = batch.outcome
        self._open_fates.discard(fate)
        for flush in fate.flushes:
            flush.ended()
        fate.flushes.clear()
        batch.events = []  # the accumulator remembers its newest batch, and a receipt the fate
        fate.pieces = []

    # ------------------------------------------------------------------------------------------ ending

    async def flush(self) -> None:
        """Send everything that was accepted without waiting for more, and wait until its outcome is known.

        Failures are told by receipts and `on_error`. Cancelled, everything goes on.
        """
        self._hurry()
        if self._open_fates:
            await _Flush(self._open_fates).future

    async def aclose(self, *, flush: bool = True, deadline: float | None = None) -> None:
        """Accept nothing more, end everything that was accepted, and close the producer. Closing twice is fine.

        What has not ended at the deadline fails: with `ClosedError` where it was not begun, and otherwise with what its
        send raises as the producer closes. Cancelled, it is as if the deadline had come.

        Args:
            flush: Whether to send what is not on its way yet; without, it fails.
            deadline: Seconds for what is on its way to end. None: as long as the retries take, and 20 to close the
                producer then; but where a send has waited for one answer of the state store for 20, it is closed at
                once. Where the time does not suffice, a second more each to end what sends, and to close the connection
                and the state store.

        Raises:
            PublishOutcomeUnknownError: Idempotent: something stayed in doubt; everything is closed nevertheless.
        """
        if self._is_closed:
            await self._ended.wait()
            return
        self._is_closed = True
        self._keeps_asking = deadline is not None
        end = None if deadline is None else asyncio.get_running_loop().time() + deadline
        for lane in self._lanes.values():
            for waiter in lane.waiting:
                if not waiter.future.done():
                    waiter.future.set_result(False)
            lane.waiting.clear()
        self._wake_roaming(len(self._roaming))
        try:
            if not flush:
                self._drop()
            if end is None:
                await self._flush_unless_stuck()
            else:
                async with asyncio.timeout_at(end):
                    await self.flush()
        except TimeoutError:
            end = asyncio.get_running_loop().time()
        except asyncio.CancelledError:
            end = asyncio.get_running_loop().time()
            raise
        finally:
            await self._shut_down(end)

    async def _flush_unless_stuck(self) -> None:
        """Flush. Sends end with their retries, but a call of the state store that hangs does not.

        Raises:
            TimeoutError: A send has waited for one for `CLOSE_TIMEOUT` since closing began.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        flushing = asyncio.create_task(self.flush(), name="flush a buffered producer that closes")
        try:
            while not flushing.done():
                since = self._producer.waits_for_store_since
                until = (loop.time() if since is None else max(since, began)) + CLOSE_TIMEOUT
                if until <= loop.time():
                    _log.warning("closing a producer: its state store does not answer, and is not waited for")
                    raise TimeoutError
                await asyncio.wait({flushing}, timeout=until - loop.time())
        finally:
            flushing.cancel()
        flushing.result()

    def _drop(self) -> None:
        """Fail what is not on its way."""
        self._accumulator.flush()
        for lane in self._lanes.values():
            while (batch := self._accumulator.take(lane.partition_id)) is not None:
                self._settle(lane, batch, 0, len(batch.events), None, ClosedError(_NAME))
                self._end(batch)

    async def _shut_down(self, end: float | None) -> None:
        self._keeps_asking = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._drop()
        left = None if end is None else max(0.0, end - asyncio.get_running_loop().time())
        try:
            try:
                await self._producer.aclose(left)
            finally:
                if self._tasks:
                    await asyncio.wait(self._tasks, timeout=_CLOSE_GRACE if left is None else LAST_SECOND)
        finally:
            for task in self._tasks:
                task.cancel()
            try:
                if self._tasks:
                    await asyncio.wait(self._tasks, timeout=LAST_SECOND)
            finally:
                self._ended.set()

    def _require_open(self) -> None:
        if self._is_closed:
            raise ClosedError(_NAME)

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else "open" if self._is_open else "not open"
        return f"<{type(self).__name__} {state}, {self.buffered_events} events, {self.buffered_bytes} bytes>"


def _raise(error: BaseException) -> None:
    raise error


@lru_cache(maxsize=16384)
def _keyed_head(partition_key: str) -> bytes:
    """Encode what stands before an event that has a key. Remembered, because keys come again."""
    if not isinstance(partition_key, str):
        raise EventError("a partition key is text")
    check_key_length(partition_key)
    return envelope_head(partition_key)
