"""Receiving ranges in an executor's task, on kept links and new ones."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import socket
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from eventpump.aio.tasks import TaskSet
from eventpump.consumer.link.feed import FeedCursor, PartitionFeed, as_received
from eventpump.consumer.record.continuity import ContinuityCheck
from eventpump.consumer.record.starts import data_loss
from eventpump.core.backoff import Backoff
from eventpump.core.starts import LossKind
from eventpump.errors import ConsumerDisconnectedError, DataLossError, RequestRefusedError, ServiceError
from eventpump.eventhubs.events import EventPosition
from eventpump.interfaces import PartitionProperties, ReceiveLinkSpec, Transport
from eventpump.options.base import RetryOptions
from eventpump.options.callables import loaded_codecs
from eventpump.options.consumer import LINK_RETRY, FeedSettings
from eventpump.spark import worker
from eventpump.spark.connection import SparkConnection
from eventpump.spark.source.lookups import persist
from eventpump.spark.source.offsets import KEEP_LINKS, REFUSED_PATIENCE, ReceiveOptions, SequenceRange
from eventpump.spark.source.ranges import RangeProgress, number_of
from eventpump.spark.source.rows import PartitionMessages, RowEncoder

_log = logging.getLogger("eventpump.spark")

MAX_ROWS = 8192
"""Rows of a range, or of several together, that fill an Arrow batch: one has up to twice as many."""

MAX_BYTES = 8 * 1024 * 1024
"""Bytes of events that fill a batch, likewise, and bytes that are received ahead."""

_LEAST_BYTES = 1024 * 1024
"""The same for each range of a task that reads many, as long as they are not more than `_MOST_BYTES` together."""

_MOST_BYTES = 64 * 1024 * 1024

_REFUSED_DELAYS = 0.2, 1.0
"""Seconds: the bounds of the first and of every delay before a partition that is read exclusively is tried again."""


@dataclass(frozen=True, slots=True)
class ReceiveCounters:
    """Counters of what this process has received for Spark.

    Args:
        from_kept_link: Ranges that were read on a link kept from an earlier task.
        from_new_link: Ranges that were read on a new link.
    """

    ranges: int = 0
    from_kept_link: int = 0
    from_new_link: int = 0
    events: int = 0


class _Counting:
    """The counters of the process. Changed by one task at a time, because Spark's workers run one at a time."""

    def __init__(self) -> None:
        self.now = ReceiveCounters()

    def add(self, **more: int) -> None:
        self.now = replace(self.now, **{name: getattr(self.now, name) + count for name, count in more.items()})


def counters() -> ReceiveCounters:
    """Return the counters of this process."""
    return worker.once(_Counting).now


def read_ranges(
    connection: SparkConnection,
    options: ReceiveOptions,
    ranges: Sequence[SequenceRange],
    columns: Sequence[str],
    *,
    keep_links: float = KEEP_LINKS,
) -> Generator[pa.RecordBatch, None, None]:
    """Read ranges of a hub, several concurrently, as Arrow batches; for the thread of a Spark task.

    Every event of every range is returned once; those of one range in order. With an owner level, links stay open for
    the next task that continues where this one ended; without, they are closed, and a partition that another reader has
    exclusively is tried again for `REFUSED_PATIENCE` seconds. Closing the iterator stops receiving.

    Raises:
        DataLossError: Events of a range are gone, and `fail_on_data_loss` is set.
        ConsumerDisconnectedError: Another reader took the partition with an equal or a higher owner level.
        ServiceError: The service cannot be reached, or refuses.
        EventError: A message cannot be decoded.
        ConfigurationError: The codecs cannot be imported.
    """
    worker.spare_collections()
    counting = worker.once(_Counting)
    codecs = loaded_codecs("decode", options.decode)
    encoder = RowEncoder(columns, codecs, connection.hub)
    receiver = RangesReceiver(
        worker.transport(connection),
        connection.hub,
        ranges,
        options,
        links=worker.once(KeptLinks),
        scope=connection,
        keep_links=keep_links,
    )
    try:
        worker.run(receiver.start())
        while (received := worker.run(receiver.next())) is not None:
            counting.add(events=sum(len(each.messages) for each in received))
            yield encoder.encode(received)
        counting.add(ranges=len(ranges), from_kept_link=receiver.kept, from_new_link=len(ranges) - receiver.kept)
    except ServiceError as error:
        if not isinstance(error, ConsumerDisconnectedError):
            # Whatever the cause, the task's next attempt uses a new connection.
            worker.drop(connection)
        raise
    finally:
        worker.run(receiver.aclose())


# ---------------------------------------------------------------------------------------------------------- links


@dataclass(frozen=True, slots=True)
class LinkKey:
    """The identity of a kept link: one partition for one set of options; scopes distinguish hubs and credentials."""

    scope: object
    partition_id: str
    options: ReceiveOptions


@dataclass(frozen=True, slots=True, eq=False)
class _Kept:
    """A link that no task uses, the next number that it receives, and the timer that closes it."""

    feed: PartitionFeed[bytes]
    number: int
    timer: asyncio.TimerHandle


class KeptLinks:
    """Exclusive links that no task uses, each for a limited time. Used only on the loop.

    While one is open, no reader without an owner level gets its partition: a query that has ended, or is idle, must not
    keep others out.
    """

    def __init__(self) -> None:
        self._kept: dict[LinkKey, _Kept] = {}
        self._closing = TaskSet(_not_closed)
        self._has_warned = False

    def __len__(self) -> int:
        return len(self._kept)

    async def take(self, key: LinkKey, number: int) -> PartitionFeed[bytes] | None:
        """Return the link that continues exactly at a number, or None. A link at another number is closed."""
        kept = self._kept.pop(key, None)
        if kept is None:
            return None
        kept.timer.cancel()
        if kept.number == number and kept.feed.error is None:
            return kept.feed
        await kept.feed.aclose()
        return None

    def keep(self, key: LinkKey, feed: PartitionFeed[bytes], number: int, seconds: float) -> None:
        """Keep a parked feed, and close it unless it is taken within a time."""
        timer = asyncio.get_running_loop().call_later(seconds, self._expire, key, feed)
        self._kept[key] = _Kept(feed, number, timer)

    def forget(self, key: LinkKey, feed: PartitionFeed[bytes]) -> bool:
        """Drop a feed that ended, as when another worker took over its partition; return whether it was kept."""
        kept = self._kept.get(key)
        if kept is None or kept.feed is not feed:
            return False
        kept.timer.cancel()
        del self._kept[key]
        return True

    def warn_of_theft(self, error: ConsumerDisconnectedError) -> None:
        """Log that another exclusive reader took a partition in the middle of a task, the first time in this process.

        Of two queries in one consumer group, each takes the partition back when Spark repeats its task, so that both go
        on, slowly, and neither fails for a long time.
        """
        if not self._has_warned:
            self._has_warned = True
            _log.warning("%s; until then each takes it from the other, and both are slow", error)

    def _expire(self, key: LinkKey, feed: PartitionFeed[bytes]) -> None:
        if self.forget(key, feed):
            self._closing.spawn(feed.aclose(), f"close the kept link of partition {key.partition_id}")


def _not_closed(name: str, error: BaseException) -> None:
    _log.error("%s failed", name, exc_info=error)


def _receiver_name() -> str:
    return f"eventpump-spark-{socket.gethostname()[:32]}-{os.getpid()}"


# ---------------------------------------------------------------------------------------------------------- ranges


class _RangeLink:
    """One range on its link."""

    def __init__(
        self,
        transport: Transport,
        hub: str,
        wanted: SequenceRange,
        options: ReceiveOptions,
        *,
        links: KeptLinks,
        key: LinkKey,
        max_bytes: int,
        keep_links: float,
    ) -> None:
        self._transport = transport
        self._hub = hub
        self._options = options
        self._links = links
        self._key = key
        self._max_bytes = max_bytes
        self._keep_links = keep_links
        self._progress = RangeProgress(wanted)
        self._continuity: ContinuityCheck[bytes] = ContinuityCheck(
            self._progress.numbers, number_of, self._ask, lambda: asyncio.get_running_loop().time()
        )
        self._refused_since: float | None = None
        self._rng = random.Random()
        self._refusals = Backoff(*_REFUSED_DELAYS)
        self._feed: PartitionFeed[bytes] | None = None
        self._cursor: FeedCursor[bytes] | None = None
        self.partition_id = wanted.partition_id
        """The partition of the range."""
        self.is_kept = False
        """Whether the range is read on a link of an earlier task."""

    async def open(self) -> None:
        """Use the kept link, or open a new one."""
        progress = self._progress
        if progress.is_done:
            return
        kept = await self._links.take(self._key, progress.next)
        if kept is not None:
            self.is_kept = True
            self._feed, self._cursor = kept, kept.cursor()
            kept.resume(progress.left)
            return
        self._open_new()

    def _open_new(self) -> None:
        progress = self._progress
        key, links, retry = self._key, self._links, self._options.retry

        def troubled(error: Exception, delay: float | None) -> None:
            if delay is None:
                links.forget(key, feed)
            else:
                _log.info("partition %s: the link ended and will be replaced: %s", key.partition_id, error)

        feed = PartitionFeed(
            self._transport,
            ReceiveLinkSpec(
                hub=self._hub,
                consumer_group=self._options.consumer_group,
                partition_id=progress.partition_id,
                position=EventPosition.at_sequence_number(progress.next, inclusive=True),
                owner_level=self._options.owner_level,
                receiver_name=_receiver_name(),
            ),
            FeedSettings(
                hub=self._hub,
                consumer_group=self._options.consumer_group,
                prefetch_events=self._options.prefetch_count,
                prefetch_bytes=self._max_bytes,
                link_retry=retry if isinstance(retry, RetryOptions) else LINK_RETRY,
            ),
            wrap=as_received,
            rng=self._rng,
            startup_timeout=self._options.retry_timeout,
            limit=progress.left,
            on_attached=self._attached,
            on_trouble=troubled,
        )
        self._feed, self._cursor = feed, feed.cursor()
        feed.start()

    def _attached(self) -> None:
        self._refused_since = None

    async def read(self) -> list[bytes]:
        """Return the next events: a full batch, or those up to the range's end; none if the range is completely
        read."""
        progress = self._progress
        found: list[bytes] = []
        size = 0
        while not progress.is_done and len(found) < MAX_ROWS and size < self._max_bytes:
            feed, cursor = self._feed, self._cursor
            assert feed is not None
            assert cursor is not None
            messages = list(cursor.take(min(MAX_ROWS - len(found), progress.left)))
            if messages:
                messages = await self._within(messages)
                found = found + messages if found else messages
                size += sum(map(len, messages))
            elif feed.error is not None:
                await self._replace(feed, feed.error)
            elif not await cursor.wait(self._options.receiver_timeout):
                await self._find_out()
        return found

    async def _replace(self, feed: PartitionFeed[bytes], error: Exception) -> None:
        """Open another link after one was refused or disconnected by an exclusive reader, for a time, or because the
        range begins beyond the partition's end, where what is missing may be given up.

        Raises:
            ConsumerDisconnectedError: The reader is exclusive itself, or the time is over.
            DataLossError: The range begins beyond the end of a hub that was recreated.
            Exception: The error with which the link ended, if it is another one.
        """
        if isinstance(error, RequestRefusedError) and await self._gives_up_missing():
            await feed.aclose()
            if not self._progress.is_done:
                self._open_new()
            return
        if not isinstance(error, ConsumerDisconnectedError):
            raise error
        # Not `retrying`: an attempt is a link, which is opened without waiting, and whose end a later pass of `read`
        # finds, maybe in another call.
        now = asyncio.get_running_loop().time()
        if self._refused_since is None:
            self._refused_since = now
            self._refusals.reset()
        remaining = self._refused_since + REFUSED_PATIENCE - now
        if self._options.owner_level is not None or remaining <= 0:
            ended = self._options.disconnected(error, self._hub, self._progress.partition_id)
            if self._options.owner_level is not None:
                self._links.warn_of_theft(ended)
            raise ended from error
        delay = min(self._refusals.next(self._rng), remaining)
        _log.info("partition %s is read exclusively; trying again in %.1f s", self._progress.partition_id, delay)
        await feed.aclose()
        await asyncio.sleep(delay)
        self._open_new()

    async def _within(self, messages: list[bytes]) -> list[bytes]:
        progress = self._progress
        try:
            messages = progress.received(messages)
        except ValueError as error:
            raise DataLossError(self._hub, progress.partition_id, str(error)) from None
        if progress.numbers.first_missing is not None:
            await self._is_lost()
        return messages

    async def _find_out(self) -> None:
        """Find out whether events that did not arrive are late or gone."""
        if not await self._gives_up_missing():
            _log.info(
                "partition %s: no event for %g s, although %d are expected",
                self._progress.partition_id,
                self._options.receiver_timeout,
                self._progress.left,
            )

    async def _gives_up_missing(self) -> bool:
        """Ask the hub whether the missing events are lost, and if so continue behind them. Return whether they are."""
        self._progress.overdue()
        if not await self._is_lost():
            return False
        assert self._continuity.facts is not None
        self._progress.give_up_missing(self._continuity.facts)
        return True

    async def _is_lost(self) -> bool:
        """Return whether missing events are lost, which is logged;
        or raises `DataLossError`, if `fail_on_data_loss` is set."""
        loss = await self._continuity.find_loss()
        if loss is None:
            return False
        cause = "" if loss.kind is LossKind.RETENTION else "the hub was probably deleted and recreated"
        error = data_loss(self._hub, self._progress.partition_id, loss, cause)
        if self._options.fail_on_data_loss:
            raise error
        _log.warning("%s", error)
        return True

    async def _ask(self) -> PartitionProperties:
        return await persist(
            lambda: self._transport.get_partition_properties(self._hub, self._progress.partition_id),
            self._options.retry_timeout,
            retry=self._options.retry,
        )

    async def release(self) -> None:
        """Release the link of a completely read range: keep it if it is exclusive and can continue, otherwise close
        it."""
        feed, cursor = self._feed, self._cursor
        if feed is None or cursor is None:
            return
        if self._options.owner_level is not None and self._progress.is_at_end and feed.park():
            cursor.close()
            self._links.keep(self._key, feed, self._progress.next, self._keep_links)
        else:
            await feed.aclose()
        self._feed = None

    async def aclose(self) -> None:
        """Close the link, unless it was released."""
        if self._feed is not None:
            await self._feed.aclose()


class RangesReceiver:
    """Receives several ranges concurrently, each on its own link. On one event loop.

    Call `start`, then `next` until it returns None, then `aclose`.
    """

    def __init__(
        self,
        transport: Transport,
        hub: str,
        ranges: Sequence[SequenceRange],
        options: ReceiveOptions,
        *,
        links: KeptLinks,
        scope: object,
        keep_links: float = KEEP_LINKS,
    ) -> None:
        count = max(1, len(ranges))
        max_bytes = max(MAX_BYTES // count, min(_LEAST_BYTES, _MOST_BYTES // count))
        self._links = [
            _RangeLink(
                transport,
                hub,
                each,
                options,
                links=links,
                key=LinkKey(scope, each.partition_id, options),
                max_bytes=max_bytes,
                keep_links=keep_links,
            )
            for each in ranges
        ]
        self._received: asyncio.Queue[PartitionMessages | None] = asyncio.Queue()
        # One batch in progress for every range, and one that waits for `next`.
        self._room = asyncio.Semaphore(len(ranges) + 1)
        self._task: asyncio.Task[None] | None = None

    @property
    def kept(self) -> int:
        """How many ranges were read on kept links."""
        return sum(link.is_kept for link in self._links)

    async def start(self) -> None:
        """Start receiving."""
        self._task = asyncio.create_task(self._receive_all(), name="receive ranges")

    async def next(self) -> list[PartitionMessages] | None:
        """Return the next received events, of one or several ranges, up to about an Arrow batch of them; None once
        every range is read. If it is cancelled, nothing is lost."""
        assert self._task is not None
        received = await self._received.get()
        found: list[PartitionMessages] = []
        rows = size = 0
        while received is not None:
            self._room.release()
            found.append(received)
            rows += len(received.messages)
            size += sum(map(len, received.messages))
            if rows >= MAX_ROWS or size >= MAX_BYTES or self._received.empty():
                return found
            received = self._received.get_nowait()
        self._received.put_nowait(None)
        if found:
            return found
        try:
            await self._task
        except BaseExceptionGroup as group:
            # The first is the cause; the others were cancelled, or failed because of it.
            raise _first(group) from None
        return None

    async def aclose(self) -> None:
        """Stop receiving. May be called twice; if it is cancelled, the tasks still end."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
            if not self._task.cancelled():
                self._task.exception()  # `next` has raised it, or is not called any more

    async def _receive_all(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for link in self._links:
                    group.create_task(self._receive(link))
        finally:
            self._received.put_nowait(None)

    async def _receive(self, link: _RangeLink) -> None:
        try:
            await link.open()
            while True:
                await self._room.acquire()
                messages = await link.read()
                if not messages:
                    break
                self._received.put_nowait(PartitionMessages(link.partition_id, messages))
            self._room.release()
            await link.release()
        finally:
            await link.aclose()


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
