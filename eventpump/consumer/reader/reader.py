"""Reads one partition without leases: tail, replay, catch-up."""

from __future__ import annotations

import asyncio
import logging
import math
import random
from bisect import bisect_left
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import repeat
from typing import Self

from eventpump.aio.closing import AsyncResource
from eventpump.aio.home import HomeLoop
from eventpump.aio.retry import retrying
from eventpump.consumer.keyed import KeyedProcessor
from eventpump.consumer.link.feed import FeedCursor, PartitionFeed, as_received
from eventpump.consumer.link.silence import SilenceWatch, SilentLink
from eventpump.consumer.processor import CloseReason, PartitionContext
from eventpump.consumer.reader.ending import RangeWatch
from eventpump.consumer.reader.keyed_reading import KeyedReading
from eventpump.consumer.record.continuity import ContinuityCheck, check_hub
from eventpump.consumer.record.starts import HubRecreatedError, data_loss
from eventpump.core.checkpoint import DEFAULT_SUBSCRIPTION
from eventpump.core.monitoring import Health, Metric, Sample, labels_of
from eventpump.core.starts import Loss, LossKind, NumberWatch, end_position, pinned_number, retained_from
from eventpump.errors import (
    ClosedError,
    ConfigurationError,
    DataLossError,
    EventError,
    ServiceError,
    SourceEndedError,
)
from eventpump.eventhubs.codecs import event_maker
from eventpump.eventhubs.events import LATEST_OFFSET, START_OFFSET, EventPosition, LastEnqueued, ReceivedEvent
from eventpump.interfaces import (
    CLOSE_TIMEOUT,
    ConsumerScope,
    HubDirectory,
    PartitionProperties,
    ReceiveLinkSpec,
    Transport,
)
from eventpump.logs import retry_logger
from eventpump.options.base import RetryOptions
from eventpump.options.consumer import ReaderSettings
from eventpump.options.predecessor import READER, answers
from eventpump.telemetry.interface import ConsumerTelemetry, PartitionTelemetry

SILENCE = 30.0
"""Seconds that a link may be silent while a read waits, before it is checked."""

ASK_TIME = 1.0
"""Seconds by which a read may exceed its time to find out whether missing events are lost."""

_log = logging.getLogger("eventpump.consumer")


@dataclass(slots=True)
class _Retained:
    """What the partition's properties have shown of the range that is read.

    Attributes:
        first: The sequence number of the first event that the hub still holds, or may hold.
        is_end_passed: Whether an event after the end of the range was enqueued; of ends that are times.
    """

    first: int = 0
    is_end_passed: bool = False


@dataclass(frozen=True, slots=True)
class _Service:
    """What a reader uses while it is open; nothing is recorded without telemetry."""

    transport: Transport
    directory: HubDirectory
    telemetry: PartitionTelemetry | None = None


@answers(READER)
class HubReader(AsyncResource):
    """Reads one partition from a position, to the end of a range or without end.

    Beside other readers, or with an owner level. A link that fails is opened again after the last event received:
    nothing is lost and nothing is returned twice, unless the hub drops events before they are read, or is recreated
    (see `on_data_loss`). "@latest" is the end of the partition on entering, whenever the first link is attached.
    The reader owns the transport it creates.

    Used as `async with reader:` and then `async for event in reader`, `read`, `read_raw`, or `run` with a
    `KeyedProcessor`; one of them at a time.

    Args:
        transport_factory: Creates the transport, on entering.
        settings: The options of the reader.
        rng: Randomness, for delays; None for an unseeded one.
        on_loss: Called with the loss if reading continues after it; None to log it.
        owns_transport: Whether the transport is closed with the reader. Default: True.
    """

    def __init__(
        self,
        transport_factory: Callable[[], Transport],
        settings: ReaderSettings,
        *,
        rng: random.Random | None = None,
        on_loss: Callable[[DataLossError], None] | None = None,
        owns_transport: bool = True,
    ) -> None:
        self._transport_factory = transport_factory
        self._owns_transport = owns_transport
        self._settings = settings
        self._event = event_maker(settings.decode or (), settings.partition_id)
        self._on_loss = on_loss or _log_loss
        self._rng = random.Random() if rng is None else rng
        self._service: _Service | None = None
        self._feed: PartitionFeed[bytes] | None = None
        self._cursor: FeedCursor[bytes] | None = None
        self._silence: SilenceWatch | None = None
        self._watch: RangeWatch | None = None
        self._retained = _Retained()
        self._is_closed = False
        self._home = HomeLoop(type(self).__name__)
        self._end = settings.end
        self._is_at_end = False
        self._last: bytes | None = None
        self._start = settings.position
        self._continuity: ContinuityCheck[bytes] = ContinuityCheck(
            NumberWatch(pinned_number(settings.position)),
            lambda message: ReceivedEvent(message).sequence_number,
            self._properties_if_known,
            lambda: asyncio.get_running_loop().time(),
        )
        self._held: list[bytes] = []
        self._keyed: KeyedReading | None = None
        self._unprocessed: list[bytes] = []
        self._before_these = settings.position
        self._failure: DataLossError | None = None
        self._hub_created_at: datetime | None = None

    @property
    def hub(self) -> str:
        """The event hub's name."""
        return self._settings.hub

    @property
    def is_closed(self) -> bool:
        """Whether the reader is closed: nothing can be read."""
        return self._is_closed

    @property
    def position(self) -> EventPosition:
        """Where a reader that continues after the last event returned would begin. Not "@latest" after entering.

        During `run`, and after one that failed or was cancelled, this is after the last event before which, itself
        included, every event is processed.
        """
        if self._keyed is not None and (place := self._keyed.place) is not None:
            return place
        if self._unprocessed:
            return self._before_these
        if self._last is None:
            return self._start
        return EventPosition.at_offset(ReceivedEvent(self._last).offset)

    @property
    def is_at_end(self) -> bool:
        """Whether the range is read, or the rest of it is gone. False without an end."""
        return self._is_at_end and not self._unprocessed

    @property
    def last_enqueued(self) -> LastEnqueued | None:
        """The partition's newest event, as named by the last event received. None without `track_last_enqueued`."""
        newest = None if self._feed is None else self._feed.facts.newest
        return None if newest is None else ReceivedEvent(newest).last_enqueued

    def health(self) -> Health:
        """Return how the reader is, for a `HealthServer`: ready once its link was attached, until it is closed."""
        waits_for = None
        if self._is_closed:
            waits_for = "nothing: it is closed"
        elif self._feed is None or not self._feed.facts.links:
            waits_for = "its link"
        if waits_for is None:
            return Health(live=True, ready=True)
        reason = f"the reader of partition {self._settings.partition_id} waits for {waits_for}"
        return Health(live=True, ready=False, reasons=(reason,))

    def metrics(self) -> Iterable[Metric]:
        """Return what is known of the partition as metrics, for a `HealthServer`; none before it is entered."""
        if self._service is None:
            return
        settings = self._settings
        labels = labels_of(
            self._service.transport.fully_qualified_namespace,
            settings.hub,
            settings.consumer_group,
            settings.partition_id,
        )
        of_events = {**labels, "position": "delivered"}
        yield Metric(
            "eventpump_ready", "gauge", "Whether the link was attached: 1 or 0.", [Sample(labels, self.health().ready)]
        )
        number, behind = self._numbers
        yield Metric(
            "eventpump_partition_sequence_number",
            "gauge",
            "The sequence number of the last event that was returned.",
            [] if number is None else [Sample(of_events, number)],
        )
        yield Metric(
            "eventpump_partition_lag",
            "gauge",
            "Events of the partition that were not returned.",
            [] if behind is None else [Sample(of_events, behind)],
        )

    def behind(self) -> Mapping[str, object] | None:
        """Return how far the reader is behind as JSON values, for a `HealthServer`; None while it is not known.

        It is known with `track_last_enqueued`, from the first event on.
        """
        missing = self._numbers[1]
        partition = {"hub": self._settings.hub, "partition_id": self._settings.partition_id}
        return None if missing is None else {**partition, "lag": missing}

    @property
    def _numbers(self) -> tuple[int | None, int | None]:
        """The number of the last event returned, and how many follow it; None where that is not known."""
        with suppress(EventError):
            number = None if self._last is None else ReceivedEvent(self._last).sequence_number
            newest = None if self.last_enqueued is None else self.last_enqueued.sequence_number
            return number, None if newest is None or number is None else max(0, newest - number)
        return None, None

    async def __aenter__(self) -> Self:
        """Connect, and find the end of the range.

        Raises:
            ServiceError: The partition cannot be read.
        """
        self._home.enter()
        if self._is_closed or self._feed is not None:
            raise ClosedError(type(self).__name__)
        transport = self._connect()
        try:
            if self._end is not None or self._start.offset == LATEST_OFFSET:
                properties = await self._properties_at_start(
                    transport if self._service is None else self._service.directory
                )
                if self._start.offset == LATEST_OFFSET:
                    self._start = end_position(self._start, properties)
                    if not self._start.inclusive:
                        self._continuity.numbers.expected = properties.last_enqueued_sequence_number + 1
                if self._end is not None:
                    self._bound(self._end, properties)
        except BaseException:
            await self.aclose()
            raise
        self._feed = self._make_feed(transport)
        self._cursor = self._feed.cursor()
        self._silence = SilenceWatch(transport, self._settings.hub, SILENCE, self._check_failed)
        if not self._is_at_end:
            self._feed.start()
        return self

    def _connect(self) -> Transport:
        """Make the transport, and record what is done with it if that is asked for."""
        settings, transport = self._settings, self._transport_factory()
        self._service = _Service(transport, transport)
        if settings.telemetry is not None:
            scope = ConsumerScope(transport.fully_qualified_namespace, settings.hub, settings.consumer_group)
            recorder: ConsumerTelemetry = settings.telemetry.of_reader(scope, settings.receiver_name, transport)
            partition = recorder.partition(settings.partition_id)
            self._service = _Service(transport, recorder.directory(transport), partition)
        return transport

    async def __aiter__(self) -> AsyncIterator[ReceivedEvent]:
        """Iterate over the events, to the end of the range. After a `break` the rest of the current batch is lost."""
        while events := await self.read():
            for event in events:
                yield event

    async def read(self, max_events: int = 300, max_wait_time: float | None = None) -> list[ReceivedEvent]:
        """Return the events that are there, as soon as there is at least one.

        Canceling it is safe: no event is lost.

        Args:
            max_events: The most events to return. Default: 300.
            max_wait_time: Seconds to wait for the first event; None for no limit.

        Returns:
            The events; empty if the time ran out or the range is read, see `is_at_end`.

        Raises:
            ServiceError: The link ended, and retries cannot help.
            DataLossError: Events are lost, and `on_data_loss` is "fail". Events returned before are not affected.
        """
        telemetry = None if self._service is None else self._service.telemetry
        if telemetry is None:
            return list(map(self._event, await self.read_raw(max_events, max_wait_time), repeat(None)))
        began = telemetry.reading_began()
        try:
            messages = await self.read_raw(max_events, max_wait_time)
        except (ServiceError, DataLossError) as error:
            telemetry.received(began, (), error)
            raise
        events = list(map(self._event, messages, repeat(None)))
        telemetry.received(began, events)
        return events

    async def read_all(self) -> list[ReceivedEvent]:
        """Return all events up to the end of the range. All of them are held in memory; `async for` does without that.

        Raises:
            ConfigurationError: The reader has no `end`.
            ServiceError: As of `read`.
            DataLossError: As of `read`.
        """
        if self._settings.end is None:
            raise ConfigurationError("end", 'is required to read all: give the reader end="latest", or another end')
        return [event async for event in self]

    async def read_raw(self, max_messages: int = 300, max_wait_time: float | None = None) -> list[bytes]:
        """Read as `read` does, but return the encoded messages.

        Args:
            max_messages: The most messages to return. Default: 300.
            max_wait_time: Seconds to wait for the first message; None for no limit.
        """
        self._home.enter()
        if max_messages < 1:
            raise ConfigurationError("max_messages", "must be at least 1")
        if self._keyed is not None:
            raise _is_running()
        if self._unprocessed and not self._is_closed:
            return self._return_unprocessed(max_messages)
        return await self._read(max_messages, max_wait_time)

    async def run(
        self, processor: KeyedProcessor, *, handler_retry: RetryOptions | None = None, close_timeout: float = 20.0
    ) -> None:
        """Process the events with a `KeyedProcessor`: those of a key in order, and different keys at the same time.

        Returns when the range is read and everything is processed; without an end, it does not return. `position` is
        the watermark: it never passes an event that is not processed. The methods of the processor are called as by a
        host; but its context stores no checkpoints and seeks nowhere: store `position` instead.

        If the handler raises, after its retries, no further call begins, those that run may end, and the error is
        raised. Cancelled, the running calls are cancelled. In both cases nothing is lost: `run`, `read` and iterating
        go on with the events that are not processed, in order. A new reader at `position` gets these, and may get
        events again that were processed after it.

        Args:
            processor: The processor.
            handler_retry: The delays, in seconds, before events that failed are given to the handler again; needs a
                `max_retries`. A `DecodeError` is not retried. Default: None, no retry.
            close_timeout: Seconds that running calls have to end after another one failed; then they are cancelled.
                Default: 20.0.

        Raises:
            ConfigurationError: The processor is no `KeyedProcessor`, or `handler_retry` has no limit.
            ServiceError: As of `read`, once the events that came before are processed.
            DataLossError: Likewise.
            Exception: What the handler raised.
        """
        self._home.enter()
        _check_processor(processor)
        if handler_retry is not None and handler_retry.max_retries is None:
            problem = "must have a limit, because an event that is retried forever would hold `position` back: set "
            raise ConfigurationError("handler_retry", f"{problem}RetryOptions(max_retries=...)")
        if not close_timeout >= 0:
            raise ConfigurationError("close_timeout", "must be a number of seconds, 0 or more")
        if self._keyed is not None:
            raise _is_running()
        if self._feed is None or self._is_closed:
            raise self._not_open()
        context = self._context()
        keyed = self._keyed = KeyedReading(
            processor,
            context,
            self._read_next,
            make=lambda message: self._event(message, None),
            begins_at=self.position,
            retry=handler_retry,
            close_timeout=close_timeout,
            rng=self._rng,
            telemetry=None if self._service is None else self._service.telemetry,
        )
        reason = CloseReason.FAILED
        try:
            await processor.open(context)
            try:
                await keyed.run()
                reason = CloseReason.SHUTDOWN
            except asyncio.CancelledError:
                reason = CloseReason.SHUTDOWN
                raise
            finally:
                await processor.close(context, reason)
        finally:
            before, unprocessed = keyed.place, keyed.unprocessed
            self._keyed = None
            if before is not None:
                self._before_these, self._unprocessed = before, unprocessed + self._unprocessed

    def _context(self) -> PartitionContext:
        """Return the context of a processor."""
        assert self._service is not None
        settings, transport = self._settings, self._service.transport

        def checkpoint(event: ReceivedEvent | None) -> None:
            problem = "a PartitionReader stores no checkpoints: store reader.position, up to which all is processed"
            raise ConfigurationError("checkpoint", problem)

        def seek(position: EventPosition) -> None:
            raise ConfigurationError("seek", "a PartitionReader cannot seek: make another one at that position")

        def lag() -> int | None:
            newest, last = context.last_sequence_number, context.last_delivered
            return None if newest is None or last is None else max(0, newest - last.sequence_number)

        context = PartitionContext(
            ConsumerScope(transport.fully_qualified_namespace, settings.hub, settings.consumer_group),
            settings.partition_id,
            settings.receiver_name or "",
            settings.owner_level or 0,
            DEFAULT_SUBSCRIPTION,
            checkpoint=checkpoint,
            seek=seek,
            newest=lambda: None if self._feed is None else self._feed.facts.newest,
            lag=lag,
        )
        return context

    async def _read_next(self, max_messages: int) -> list[bytes]:
        """Return the next messages for a `run`: first those that an earlier one has left."""
        if self._unprocessed:
            return self._return_unprocessed(max_messages)
        return await self._read(max_messages, None)

    def _return_unprocessed(self, max_messages: int) -> list[bytes]:
        messages, self._unprocessed = self._unprocessed[:max_messages], self._unprocessed[max_messages:]
        with suppress(EventError):
            self._before_these = EventPosition.at_offset(ReceivedEvent(messages[-1]).offset)
        return messages

    def _not_open(self) -> ClosedError:
        name = type(self).__name__
        if self._is_closed:
            return ClosedError(name)
        self._home.release()  # it has nothing that the end of the loop would leave open
        return ClosedError(name, "is not open: use it with `async with`")

    async def _read(self, max_messages: int, max_wait_time: float | None) -> list[bytes]:
        if self._feed is None or self._cursor is None or self._is_closed:
            raise self._not_open()
        loop = asyncio.get_running_loop()
        until = None if max_wait_time is None else loop.time() + max_wait_time
        if self._failure is not None:
            raise self._failure
        while not self._is_at_end:
            feed, cursor = self._feed, self._cursor
            # Held until it is returned: a call that is cancelled while it asks the service loses nothing.
            messages = self._held = self._held or list(cursor.take(max_messages))
            if messages:
                if not self._continuity.follows(messages):
                    try:
                        async with asyncio.timeout_at(None if until is None else max(until, loop.time() + ASK_TIME)):
                            await self._judge_gap(messages)
                    except TimeoutError:
                        if self._settings.on_data_loss == "fail":
                            return []
                        # Otherwise short reads of a slow service would ask, and time out, again and again.
                        self._continuity.numbers.not_answered(loop.time())
                    if not self._held:
                        continue
                messages, self._held = self._within(messages[:max_messages]), messages[max_messages:]
                if messages:
                    self._last = messages[-1]
                return messages
            if feed.error is not None:
                if not isinstance(feed.error, SourceEndedError):
                    raise feed.error
                self._is_at_end = True
                break
            if self._is_rest_gone(feed):
                break
            remaining = None if until is None else until - loop.time()
            if remaining is not None and remaining <= 0:
                return []
            patience = None if self._watch is None else self._watch.patience
            if not await cursor.wait(min(each for each in (remaining, patience, SILENCE) if each is not None)):
                assert self._silence is not None
                self._silence.waited(feed, self._settings.partition_id, self._link_silent)
        return []

    def _is_rest_gone(self, feed: PartitionFeed[bytes]) -> bool:
        """Return whether retention has removed the rest of the range. Everything was taken from the feed."""
        if self._end is None:
            return False
        if self._watch is None:
            self._watch = RangeWatch(self._ask, self._has_nothing_left, self._wake)
        if not self._watch.is_over(feed.facts.newest):
            return False
        self._is_at_end = True
        self._stop()
        self._rest_lost()
        return True

    def _rest_lost(self) -> None:
        """Report that retention has removed the rest of the range. Raises `DataLossError` if the reader is to fail."""
        expected, kept_from, end = self._continuity.numbers.expected, self._retained.first, self._last_number
        if expected is None or expected >= kept_from:
            # Nothing was read yet, or the missing numbers were judged already: it is not known which are gone.
            _log.warning(
                "hub %s, partition %s: the rest of the range is gone",
                self._settings.hub,
                self._settings.partition_id,
            )
            return
        self._lost(Loss(LossKind.RETENTION, expected, kept_from - 1 if end is None else min(end, kept_from - 1)))

    def _wake(self) -> None:
        if self._cursor is not None:
            self._cursor.wake()

    async def _ask(self) -> PartitionProperties:
        assert self._service is not None
        return await self._service.directory.get_partition_properties(self._settings.hub, self._settings.partition_id)

    def _has_nothing_left(self, properties: PartitionProperties) -> bool:
        """Return whether a partition holds no event of the range, and new events will lie beyond its end."""
        end = self._end
        assert end is not None
        self._retained.first = retained_from(properties)
        if self._last_number is not None:
            return self._retained.first > self._last_number
        assert end.enqueued_time is not None
        # The properties of a partition that was emptied may lack the time of its newest event.
        if properties.is_empty:
            return self._retained.is_end_passed
        self._retained.is_end_passed = properties.last_enqueued_time > end.enqueued_time
        return False

    async def aclose(self) -> None:
        """Detach and disconnect. Closing twice is fine. If cancelled, the link still ends."""
        self._home.enter()
        self._is_closed = True
        try:
            if self._watch is not None:
                await self._watch.aclose(CLOSE_TIMEOUT)
            if self._feed is not None:
                await self._feed.aclose()
        finally:
            try:
                if self._silence is not None:
                    await self._silence.aclose()
            finally:
                self._home.close()
                if self._service is not None and self._owns_transport:
                    await self._service.transport.aclose()

    def _link_silent(self, link: SilentLink) -> None:
        what = "its connection is dropped" if link.drops_connection else "it is opened again"
        where = self._settings.hub, self._settings.partition_id
        _log.warning(
            "reader of %s, partition %s: the link was silent for %.1f s, %s: %s",
            *where,
            link.silent_for,
            what,
            link.evidence,
        )

    def _check_failed(self, operation: str, error: BaseException) -> None:
        _log.error("%s failed unexpectedly", operation, exc_info=error)

    # ----------------------------------------------------------------------------------------- what may be gone

    def _make_feed(self, transport: Transport) -> PartitionFeed[bytes]:
        settings = self._settings
        return PartitionFeed(
            transport,
            ReceiveLinkSpec(
                hub=settings.hub,
                consumer_group=settings.consumer_group,
                partition_id=settings.partition_id,
                position=self._start,
                owner_level=settings.owner_level,
                receiver_name=settings.receiver_name,
                track_last_enqueued=settings.track_last_enqueued,
                max_message_size=settings.max_message_size,
                delivery_interval=settings.delivery_interval,
            ),
            settings,
            wrap=as_received,
            rng=self._rng,
            startup_timeout=settings.startup_timeout,
            locate=self._locate,
        )

    async def _properties_at_start(self, directory: HubDirectory) -> PartitionProperties:
        """Return the partition's properties. Transient failures are retried until the start-up time-out."""
        settings = self._settings
        until = asyncio.get_running_loop().time() + settings.startup_timeout
        what = f"reading the properties of partition {settings.partition_id}"
        return await retrying(
            lambda: directory.get_partition_properties(settings.hub, settings.partition_id),
            settings.link_retry,
            self._rng,
            until=until,
            least_time=math.inf,  # the transport has a time-out of its own
            on_retry=retry_logger(_log, what, hub=settings.hub, partition_id=settings.partition_id),
        )

    async def _locate(self, position: EventPosition) -> EventPosition:
        """Check, before a link is opened, that the hub is the one that was read, and return where to begin."""
        assert self._service is not None
        settings = self._settings
        hub = await self._service.directory.get_hub_properties(settings.hub)
        before, self._hub_created_at = self._hub_created_at, hub.created_at
        try:
            check_hub(hub, before, settings.partition_id)
            return position
        except HubRecreatedError as error:
            if settings.on_data_loss in {None, "fail"}:
                raise
            self._on_loss(error)
        self._start, self._last = EventPosition.earliest(), None
        if settings.on_data_loss == "latest":
            properties = await self._service.directory.get_partition_properties(settings.hub, settings.partition_id)
            self._start = end_position(EventPosition.latest(), properties)
        return self._start

    async def _judge_gap(self, messages: list[bytes]) -> None:
        """Find out whether missing numbers are lost.
        If the reader is to fail, this and later reads raise `DataLossError`."""
        settings, service = self._settings, self._service
        loss = await self._continuity.find_loss(messages)
        if loss is None:
            return
        self._lost(loss)
        if settings.on_data_loss == "latest":
            properties = self._continuity.facts
            assert service is not None
            assert properties is not None
            before, self._held, self._last = self._feed, [], None
            self._start = end_position(EventPosition.latest(), properties)
            self._continuity.numbers.expected = properties.last_enqueued_sequence_number + 1
            self._feed = self._make_feed(service.transport)
            self._cursor = self._feed.cursor()
            self._feed.start()
            if before is not None:
                if self._silence is not None:
                    self._silence.forget(before)
                await before.aclose()

    async def _properties_if_known(self) -> PartitionProperties | None:
        try:
            return await self._ask()
        except ServiceError as error:
            where = self._settings.hub, self._settings.partition_id
            _log.warning("hub %s, partition %s: could not find out whether missing events are lost: %s", *where, error)
            return None

    def _lost(self, loss: Loss) -> None:
        """Report a loss. Raises `DataLossError` if `on_data_loss` is "fail"."""
        error = data_loss(self._settings.hub, self._settings.partition_id, loss)
        if self._settings.on_data_loss == "fail":
            self._failure = error
            raise error
        self._on_loss(error)

    # --------------------------------------------------------------------------------------------------- the end

    @property
    def _last_number(self) -> int | None:
        """The sequence number of the last event of the range; None without an end, and where that is a time."""
        if self._end is None or self._end.sequence_number is None:
            return None
        return self._end.sequence_number - (not self._end.inclusive)

    def _bound(self, end: EventPosition, properties: PartitionProperties) -> None:
        """Convert the end to a sequence number or a time, and find out whether the range is empty."""
        newest = properties.last_enqueued_sequence_number
        if end.offset == LATEST_OFFSET:
            end = EventPosition.at_sequence_number(newest, inclusive=True)
            self._is_at_end = properties.is_empty
        self._end = end
        if end.enqueued_time is not None:
            self._retained.is_end_passed = not properties.is_empty and properties.last_enqueued_time > end.enqueued_time
        start, last = self._settings.position, self._last_number
        if last is not None:
            self._is_at_end = self._is_at_end or last < properties.beginning_sequence_number
            if (first := pinned_number(start)) is not None:
                self._is_at_end = self._is_at_end or first > last
            elif _is_after(start, properties):
                self._is_at_end = self._is_at_end or newest >= last

    def _within(self, messages: list[bytes]) -> list[bytes]:
        """Cut a batch at the end of the range. Only its last message is decoded, unless the end lies in the batch."""
        if self._end is None:
            return messages
        if self._is_past(messages[-1]):
            self._is_at_end = True
            self._stop()
            return messages[: bisect_left(messages, True, key=self._is_past)]
        if self._last_number is not None and ReceivedEvent(messages[-1]).sequence_number >= self._last_number:
            self._is_at_end = True
            self._stop()
        return messages

    def _stop(self) -> None:
        if self._feed is not None:
            self._feed.stop()

    def _is_past(self, message: bytes) -> bool:
        end, event = self._end, ReceivedEvent(message)
        if self._last_number is not None:
            return event.sequence_number > self._last_number
        assert end is not None
        assert end.enqueued_time is not None
        return event.enqueued_time > end.enqueued_time if end.inclusive else event.enqueued_time >= end.enqueued_time


def _check_processor(processor: object) -> None:
    if not isinstance(processor, KeyedProcessor):
        problem = "must be a KeyedProcessor; for other code, iterate over the reader: async for event in reader"
        raise ConfigurationError("processor", f"{problem}; it is {processor!r:.100}")


def _is_running() -> ConfigurationError:
    return ConfigurationError("run", "is reading this reader: wait for its end, or make another reader")


def _log_loss(error: DataLossError) -> None:
    _log.warning("%s", error)


def _is_after(start: EventPosition, properties: PartitionProperties) -> bool:
    """Return whether a position is known to lie after everything the partition holds."""
    if start.enqueued_time is not None:
        return start.enqueued_time > properties.last_enqueued_time
    if start.offset in {START_OFFSET, None}:
        return False
    return start.offset == LATEST_OFFSET or (start.offset == properties.last_enqueued_offset and not start.inclusive)
