"""Sending single events in batches: an event joins the batch of its partition, and its receipt has its outcome.

An event is *accepted* once room for it is reserved. From then on it ends in exactly one of success or error, reported
by its receipt and by `on_success` or `on_error`. Accepting without a wait: `producer/intake.py`. How batches are filled
and sent: `producer/outbox.py`.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from math import inf
from typing import Self, cast, overload

from eventpump.aio.closing import AsyncResource
from eventpump.core.monitoring import Health, Metric
from eventpump.core.router import HashRouter, PartitionRouter, check_router
from eventpump.core.status import ProducerStats
from eventpump.errors import BufferFullError, ClosedError, ConfigurationError, EventPumpError
from eventpump.eventhubs.events import EventData
from eventpump.eventhubs.hashing import partition_for_key
from eventpump.interfaces import HubProperties, PartitionProperties
from eventpump.net import stream
from eventpump.options.predecessor import PRODUCER, answers
from eventpump.options.producer import BufferSettings, OnError, OnSuccess, PartitionPublishingProperties
from eventpump.producer.accumulator import BufferRoom, Lane
from eventpump.producer.intake import DeliveryReceipt, Intake, SendResult, clock_of
from eventpump.producer.outbox import Ended, Outbox, RoomQueue
from eventpump.producer.producer import CLOSE_TIMEOUT, LAST_SECOND, HubProducer, events_of
from eventpump.producer.stats import SendCounters, health_of, metrics_of

_NAME = "buffered producer"

_log = logging.getLogger("eventpump.producer")


@answers(PRODUCER)
class HubBufferedProducer(AsyncResource):
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
    ) -> None:
        self._settings = settings = settings or BufferSettings()
        if producer.is_idempotent and settings.max_in_flight > 1:
            raise ConfigurationError("max_in_flight", "is 1 for an idempotent producer")
        for name, callback in {"on_success": on_success, "on_error": on_error}.items():
            if inspect.iscoroutinefunction(callback):
                raise ConfigurationError(name, "is a plain function; let it start a task for what takes time")
        check_router(router)
        self._producer = producer
        self._home = producer.home
        self._home.represents(type(self).__name__, lost=self._what_is_lost, on_end=self._loop_ended)
        self._on_success = on_success
        self._on_error = on_error
        self._outbox: Outbox[EventData] = Outbox(
            producer,
            _NAME,
            self._ended,
            max_events=settings.max_batch_events,
            max_bytes=settings.max_batch_bytes,
            max_wait_time=settings.max_wait_time,
            max_in_flight=settings.max_in_flight,
            settle_tries=inf,
        )
        self._on_batch_ended: Callable[[str], object] | None = getattr(router, "batch_ended", None)
        if self._on_batch_ended is not None:
            self._outbox.on_due = self._batch_ended
        self._intake = Intake(
            router or HashRouter(partition_for_key),
            self._outbox,
            encode=producer.encode
            if producer.telemetry is None
            else producer.telemetry.buffering(producer.encode, lambda: self.buffered_bytes),
            max_events=settings.max_batch_events,
            idempotent=producer.is_idempotent,
            stamping=producer.is_stamping,
        )
        self._accept = self._intake.accept
        self._room: BufferRoom
        self._queue: RoomQueue
        self._time: Callable[[], float]
        self._is_open = False
        self._opening: asyncio.Event | None = None
        self._is_closed = False
        self._has_ended = asyncio.Event()
        self._yielding = 0
        self._counters = SendCounters()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

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
        """Read the ids of the hub's partitions, again under the producer's `retry`. The first `send` does it too.

        Opening twice is fine.

        Raises:
            ServiceError: The last attempt failed. `open` may be called again.
            ConfigurationError: The buffer is too small for that many partitions.
        """
        self._home.enter()
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
        self._time = clock_of(asyncio.get_running_loop())
        self._outbox.add_lanes(partition_ids)
        self._queue = RoomQueue(_NAME, self._room, self._outbox.lanes, self._outbox.send_now)
        self._intake.begin(partition_ids, self._room, self._queue, self._time, self._home.runner)
        self._is_open = True
        if self._producer.telemetry is not None:
            self._producer.telemetry.opened()

    # ------------------------------------------------------------------------------------------ accepting

    @overload
    async def send(
        self, event: EventData, *, partition_id: str | None = None, partition_key: str | None = None
    ) -> DeliveryReceipt: ...

    @overload
    async def send(
        self, event: Iterable[EventData], *, partition_id: str | None = None, partition_key: str | None = None
    ) -> list[DeliveryReceipt]: ...

    async def send(
        self,
        event: EventData | Iterable[EventData],
        *,
        partition_id: str | None = None,
        partition_key: str | None = None,
    ) -> DeliveryReceipt | list[DeliveryReceipt]:
        """Accept an event, or several, once there is room.

        Cancelled, an event was not accepted. Of several, those for which there was room before were accepted, and are
        sent all the same; so they were if the producer is closed meanwhile.

        Args:
            event: An event; or several, such as a list, which are accepted one after the other in their order, as if
                each was given to a call of its own: each has a receipt, and events of other calls may come between
                them. If one of them cannot be encoded, none is accepted. All of them are encoded first, so do not give
                more at once than fit into memory twice.
            partition_id: Send to this partition; None for one that the router chooses.
            partition_key: Send where events of this key go; None for no key. Readers see the key. At most 128
                characters, the JavaScript client's limit; what the service does with a longer one is not known.

        Returns:
            A receipt, which need not be awaited; for several events a list of receipts, in their order.

        Raises:
            EventError: It cannot be encoded; or, idempotent, the outcome of the same event, given before, is open.
            ConfigurationError: The key is too long, or there is no such partition.
            ServiceError: Not open yet, and it cannot be.
        """
        if (receipt := self._accept(event, partition_id, partition_key)) is not None:  # type: ignore[arg-type]  # it looks
            return receipt
        if isinstance(event, EventData):
            return await self._send_in_turn(event, partition_id, partition_key)
        return await self._send_each(event, partition_id, partition_key)

    async def _send_in_turn(
        self,
        event: EventData,
        partition_id: str | None,
        partition_key: str | None,
        encoded: tuple[bytes, bytes] | None = None,
    ) -> DeliveryReceipt:
        """Accept an event that could not be accepted at once; see `send`."""
        refused = self._intake.take_refused()  # nothing else has run since
        if encoded is None:
            self._intake.hold(event)  # nor is it given by another call while this one waits
        try:
            return await self._wait_for_room(event, partition_id, partition_key, encoded, refused)
        except BaseException:
            if encoded is None:
                self._intake.free((event,))
            raise

    async def _wait_for_room(
        self,
        event: EventData,
        partition_id: str | None,
        partition_key: str | None,
        encoded: tuple[bytes, bytes] | None,
        refused: tuple[bytes, bytes, Lane[EventData]] | None,
    ) -> DeliveryReceipt:
        if refused is not None:
            head, rest, lane = refused
            size = len(head) + len(rest)
            has_room = False
        else:
            self._home.enter()
            if not self._is_open:
                await self._in_turn(self.open())
            if self._yielding or self._time() >= self._outbox.yield_at:
                # Sends that come meanwhile do so too, and thus stay behind this one.
                await self._in_turn(self._outbox.let_run())
            if self._is_closed:
                raise ClosedError(_NAME)
            head, rest = encoded or self._intake.encode(event, partition_key)
            size = len(head) + len(rest)
            lane = self._intake.route(event, partition_id, partition_key)
            has_room = self._queue.reserve(lane, size)
        if not has_room:
            if partition_id is None and partition_key is None:
                lane = await self._queue.acquire_any(partial(self._route_elsewhere, event), size)
            else:
                await self._queue.acquire(lane, size)
        batch = self._outbox.add(lane, event, head, rest, self._time())
        if self._queue.wanting:
            self._outbox.send_now()
        return DeliveryReceipt(batch, len(batch.events) - 1)

    async def _send_each(
        self, events: Iterable[EventData], partition_id: str | None, partition_key: str | None
    ) -> list[DeliveryReceipt]:
        """Accept several events; see `send`."""
        each = events_of(events)
        self._home.enter()
        self._require_open()
        if partition_id is not None and self._is_open:
            self._intake.route(
                EventData(b""), partition_id, partition_key
            )  # what it refuses, it refuses before the first one
        encoded = [(one, self._intake.encode(one, partition_key)) for one in each]
        receipts: list[DeliveryReceipt] = []
        held = 0
        try:
            for event in each:
                self._intake.hold(event)
                held += 1
            for event, pair in encoded:
                receipt = self._accept(event, partition_id, partition_key, pair)
                receipts.append(receipt or await self._send_in_turn(event, partition_id, partition_key, pair))
        except BaseException:
            self._intake.free(each[len(receipts) : held])
            raise
        return receipts

    def send_nowait(
        self, event: EventData, *, partition_id: str | None = None, partition_key: str | None = None
    ) -> DeliveryReceipt:
        """Accept an event at once, as `send` does. One event per call: of several, there could be room for some only.

        Raises:
            BufferFullError: There is no room now, or others wait for it. Nothing was taken.
            ConfigurationError: It is not open yet, or the key is too long.
        """
        self._require_open()
        if not self._intake.is_home():
            self._home.enter()
        if not self._is_open:
            raise ConfigurationError(_NAME, "is not open: enter it with `async with`, or await `open()`")
        self._intake.require_free(event)
        head, rest = self._intake.encode(event, partition_key)
        size = len(head) + len(rest)
        lane = self._intake.route(event, partition_id, partition_key)
        if not self._queue.reserve(lane, size):
            other = None
            if partition_id is None and partition_key is None:
                other = self._queue.reserve_any(partial(self._route_elsewhere, event), size)
            if other is None:
                self._outbox.send_now()
                raise BufferFullError(lane.partition_id or "", size, self._room.events, self._room.bytes)
            lane = other
        self._intake.hold(event)
        batch = self._outbox.add(lane, event, head, rest, self._time())
        if self._queue.wanting:
            self._outbox.send_now()
        return DeliveryReceipt(batch, len(batch.events) - 1)

    @overload
    async def send_and_wait(
        self, event: EventData, *, partition_id: str | None = None, partition_key: str | None = None
    ) -> SendResult: ...

    @overload
    async def send_and_wait(
        self, event: Iterable[EventData], *, partition_id: str | None = None, partition_key: str | None = None
    ) -> list[SendResult]: ...

    async def send_and_wait(
        self,
        event: EventData | Iterable[EventData],
        *,
        partition_id: str | None = None,
        partition_key: str | None = None,
    ) -> SendResult | list[SendResult]:
        """Send an event, or several, as `send` does, and wait until all are stored.

        Cancelled, they may have been accepted: they are then sent all the same.

        Returns:
            Where it was stored; for several events a list, in their order.

        Raises:
            EventPumpError: What it failed with; of several, the first that failed, once the outcome of all is known.
        """
        accepted = await self.send(event, partition_id=partition_id, partition_key=partition_key)
        if isinstance(accepted, DeliveryReceipt):
            return await accepted
        results: list[SendResult] = []
        first: Exception | None = None
        for receipt in accepted:
            try:
                results.append(await receipt)
            except Exception as error:
                first = first or error
        if first is not None:
            raise first
        return results

    @property
    def buffered_events(self) -> int:
        """How many events are accepted whose outcome is open."""
        return self._room.events if self._is_open else 0

    @property
    def buffered_bytes(self) -> int:
        """What they take in their messages."""
        return self._room.bytes if self._is_open else 0

    @property
    def stats(self) -> ProducerStats:
        """What was sent, failed and was retried since the producer was created, as numbers at this moment.

        Events that are accepted and whose outcome is open are in `buffered_events` only; `failed` counts those for
        which receipts and `on_error` have an error.
        """
        mine = self._counters.stats
        return ProducerStats(mine.sent, mine.failed, self._producer.stats.retried)

    def health(self) -> Health:
        """Return how the producer is, for a `HealthServer`: ready until it is closed."""
        return health_of(f"the producer of hub {self.hub}", is_closed=self.is_closed)

    def metrics(self) -> Iterable[Metric]:
        """Return what was counted as metrics, for a `HealthServer`; `docs/reference/metrics.md` has all of them."""
        return metrics_of(self.fully_qualified_namespace, self.hub, self.stats, buffered_bytes=self.buffered_bytes)

    def behind(self) -> None:
        """Return None: a producer has no lag."""

    async def get_properties(self) -> HubProperties:
        """Read about the hub. Raises as `HubProducer.get_properties`."""
        return await self._producer.get_properties()

    async def get_partition_ids(self) -> tuple[str, ...]:
        """List the hub's partitions. Raises as `HubProducer.get_properties`."""
        return await self._producer.get_partition_ids()

    async def get_partition_properties(self, partition_id: str) -> PartitionProperties:
        """Read about a partition. Raises as `HubProducer.get_properties`."""
        return await self._producer.get_partition_properties(partition_id)

    async def settle(self, partition_id: str) -> None:
        """Wait until nothing is in doubt on a partition.

        Raises:
            EventPumpError: The partition has failed.
        """
        await self._producer.settle(partition_id)

    async def get_partition_publishing_properties(self, partition_id: str) -> PartitionPublishingProperties:
        """Return how a partition is published to, and with a state store how many events are published there.

        What is accepted and not stored yet is not counted. Attaches first where that is not known yet.

        Raises:
            EventPumpError: It cannot be attached, or the partition has failed.
        """
        return await self._producer.get_partition_publishing_properties(partition_id)

    def _route_elsewhere(self, event: EventData) -> Lane[EventData]:
        """Choose a partition again for an event without key, because the buffer of the one chosen is full."""
        lane = self._intake.route(event, None, None)
        self._batch_ended(lane.partition_id)
        return lane

    def _batch_ended(self, partition_id: str | None) -> None:
        """Call the router's `batch_ended`, if it has one. Called from timers, too: what it raises is logged."""
        if self._on_batch_ended is None or partition_id is None:
            return
        try:
            self._on_batch_ended(partition_id)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:
            _log.exception("partition %s: the router's batch_ended failed", partition_id)

    async def _in_turn(self, work: Awaitable[None]) -> None:
        """Wait for work, and have sends that come meanwhile stay behind this one."""
        self._yielding += 1
        self._intake.blocked += 1
        try:
            await work
        finally:
            self._yielding -= 1
            self._intake.blocked -= 1

    def _ended(self, ended: Ended[EventData]) -> None:
        """Release the room of events whose outcome is known, and call the user's callbacks."""
        lane, events, count, size, error, is_awaited = ended
        (self._counters.sent if error is None else self._counters.failed)(count, size)
        self._intake.free(events)
        self._queue.release(lane, count, size)
        partition_id = cast("str", lane.partition_id)
        try:
            if error is None:
                if self._on_success is not None:
                    self._on_success(events, partition_id)
            elif self._on_error is not None:
                self._on_error(events, partition_id, error)
            elif not is_awaited:
                _log.error("partition %s: %d events were not sent: %s", partition_id, count, error)
        except (KeyboardInterrupt, SystemExit) as end:
            # It ends the program in a later step of the loop: the other events' callbacks are called first.
            asyncio.get_running_loop().call_soon(_raise, end)
        except BaseException:
            # Also a `CancelledError`: a callback cannot be cancelled, so it comes from a future whose result it read.
            _log.exception("partition %s: a callback of the buffered producer failed", partition_id)

    # ------------------------------------------------------------------------------------------ ending

    async def flush(self) -> None:
        """Send everything that was accepted without waiting for more, and wait until its outcome is known.

        Failures are reported by receipts and `on_error`. Cancelled, everything goes on.
        """
        self._home.enter()
        await self._outbox.flush()

    async def aclose(self, *, flush: bool = True, deadline: float | None = None) -> None:
        """Accept nothing more, end everything that was accepted, and close the producer. Closing twice is fine.

        What has not ended at the deadline fails: with `ClosedError` where it was not begun, and otherwise with what its
        send raises as the producer closes. Cancelled, it is as if the deadline had come, and an
        error of closing is logged.

        Args:
            flush: Whether to send what is not on its way yet; without, it fails. Default: True.
            deadline: Seconds for what is on its way to end. None: as long as the retries take, and 20 to close the
                producer then; but where a send has waited for one answer of the state store for 20, it is closed at
                once. Where the time does not suffice, a second more each to end what sends, and to close the connection
                and the state store.

        Raises:
            PublishOutcomeUnknownError: Idempotent: something stayed in doubt; everything is closed nevertheless.
        """
        self._home.enter()
        if self._is_closed:
            await self._has_ended.wait()
            return
        self._is_closed = self._outbox.is_closed = True
        self._intake.blocked += 1
        self._outbox.settle_tries = 0 if deadline is None else inf
        end = None if deadline is None else asyncio.get_running_loop().time() + deadline
        if self._is_open:
            self._queue.close()
        is_cancelled = False
        try:
            if not flush:
                self._outbox.drop()
            if end is None:
                await self._flush_unless_stuck()
            else:
                async with asyncio.timeout_at(end):
                    await self.flush()
        except TimeoutError:
            end = asyncio.get_running_loop().time()
        except asyncio.CancelledError:
            is_cancelled = True
            end = asyncio.get_running_loop().time()
            raise
        finally:
            try:
                await self._shut_down(end)
            except Exception as error:
                if not is_cancelled:
                    raise
                # Raised, it would take the place of the cancellation, and the task would go on.
                _log.error("closing a producer, cancelled: %s", error)

    async def _flush_unless_stuck(self) -> None:
        """Flush, unless a send has waited `CLOSE_TIMEOUT` for a call of the state store: then a `TimeoutError`."""
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

    async def _shut_down(self, end: float | None) -> None:
        self._outbox.settle_tries = 0
        self._outbox.drop()
        left = None if end is None else max(0.0, end - asyncio.get_running_loop().time())
        try:
            await self._producer.aclose(left)
        finally:
            try:
                await self._outbox.aclose(stream.CLOSE_TIMEOUT if left is None else LAST_SECOND)
            finally:
                self._has_ended.set()

    def _what_is_lost(self) -> str:
        events = self.buffered_events
        return f"{events} event{'s' * (events != 1)} in its buffer" if events else ""

    async def _loop_ended(self) -> None:
        """Called at the end of the loop, if this is not closed: what it holds fails, as when it is closed."""
        self._is_closed = True
        self._intake.blocked += 1
        await self._outbox.aclose()  # another step of the loop may have begun to send meanwhile

    def _require_open(self) -> None:
        if self._is_closed:
            raise ClosedError(_NAME)

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else "open" if self._is_open else "not open"
        return f"<{type(self).__name__} {state}, {self.buffered_events} events, {self.buffered_bytes} bytes>"


def _raise(error: BaseException) -> None:
    raise error
