"""Sending the rows of a task at least once, from the Python worker it runs in.

Plain, events of one partition keep their order, and a send whose outcome is not known is repeated: once too often,
where it was stored. Idempotent, the service gives this attempt of the task a producer of its own per partition, and
such a repeat is none. What neither knows of is another attempt at the same rows: Spark's retries send them again.
"""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

import pyarrow as pa

from eventpump.aio.retry import retrying
from eventpump.core.backoff import gives_up
from eventpump.errors import ServiceError
from eventpump.eventhubs.sealing import SealedBatch, pieces
from eventpump.interfaces import (
    Transport,
)
from eventpump.options.base import RetryOptions
from eventpump.producer.packing import BatchPacker
from eventpump.producer.producer import HubProducer
from eventpump.spark import worker
from eventpump.spark.connection import SparkConnection
from eventpump.spark.sink.encode import ANYWHERE, EventColumns, EventEncoder, task_number

T = TypeVar("T")

_IN_FLIGHT: Final = 8 * 1024 * 1024
"""Bytes that a task has on their way at a time, to all partitions together."""


async def message_limit(connection: SparkConnection) -> int:
    """Ask what the service takes in one message, in bytes. On the loop's thread.

    Raises:
        ServiceError: No answer.
    """
    producer = HubProducer(worker.transport(connection), connection.hub, owns_transport=False)
    try:
        return await producer.message_limit(None)
    finally:
        await producer.aclose()


async def retried(attempt: Callable[[], Awaitable[T]]) -> T:
    """Ask the service, again where that may help.

    Raises:
        ServiceError: Of the last try.
    """

    def is_final(error: Exception) -> bool:
        return not isinstance(error, ServiceError) or gives_up(error)  # the ledger's store is retried by itself

    return await retrying(attempt, RetryOptions(), random.Random(), is_final=is_final)


class _Producers:
    """The plain producers of this process, whose links live across tasks: one per hub and credential."""

    def __init__(self) -> None:
        self._kept: dict[SparkConnection, tuple[Transport, HubProducer]] = {}

    def plain(self, connection: SparkConnection) -> HubProducer:
        transport = worker.transport(connection)
        kept, producer = self._kept.get(connection, (None, None))
        if producer is None or kept is not transport:
            producer = HubProducer(transport, connection.hub, max_in_flight=1, owns_transport=False)
            self._kept[connection] = (transport, producer)
        return producer


class _Sender:
    """Packs encoded events into messages, and keeps some of these on their way. On the loop's thread.

    Args:
        limit: What the service takes in one message, in bytes.
        anywhere: The partition that events without one go to first; another follows with each message.
    """

    def __init__(self, producer: HubProducer, *, limit: int, partition_count: int, anywhere: int) -> None:
        self._producer = producer
        self._is_idempotent = producer.is_idempotent
        self._partition_count = partition_count
        # A plain producer leaves the choice to the service.
        self._anywhere = anywhere % partition_count if self._is_idempotent else ANYWHERE
        self._packers = defaultdict[int, BatchPacker](partial(BatchPacker, limit, idempotent=self._is_idempotent))
        self._sends: set[asyncio.Task[int | None]] = set()
        self._in_flight = 0
        self.counts: dict[int, int] = {}
        """Events taken in, by partition."""

    async def add(self, partitions: Iterable[int], events: Iterable[bytes]) -> None:
        """Take events in. Waits while too much is on its way.

        Raises:
            EventPumpError: An earlier send failed.
        """
        packers, is_idempotent = self._packers, self._is_idempotent
        for partition, event in zip(partitions, events, strict=True):
            target = self._anywhere if partition == ANYWHERE else partition
            head, rest = pieces(event, idempotent=is_idempotent)
            if packers[target].add(head, rest):
                continue
            await self._send(target)
            if partition == ANYWHERE and is_idempotent:
                target = self._anywhere = (target + 1) % self._partition_count
                if packers[target].add(head, rest):
                    continue
                await self._send(target)
            packers[target].add(head, rest)

    async def finish(self) -> None:
        """Send what is left, and wait for everything.

        Raises:
            EventPumpError: A send failed.
        """
        for target in [each for each, packer in self._packers.items() if packer.count]:
            await self._send(target)
        while self._sends:
            await self._one_ended()

    async def aclose(self) -> None:
        """Give up what is on its way. Twice is fine."""
        for send in self._sends:
            send.cancel()
        if self._sends:
            await asyncio.wait(self._sends)

    async def _send(self, target: int) -> None:
        sealed = self._packers[target].take()
        self.counts[target] = self.counts.get(target, 0) + sealed.count
        partition_id = None if target == ANYWHERE else str(target)
        self._sends.add(asyncio.create_task(self._carry(sealed, partition_id), name="send a batch of rows"))
        self._in_flight += sealed.size
        while self._in_flight > _IN_FLIGHT:
            await self._one_ended()

    async def _carry(self, sealed: SealedBatch, partition_id: str | None) -> int | None:
        try:
            return await self._producer.send_sealed(sealed, partition_id=partition_id)
        finally:
            self._in_flight -= sealed.size

    async def _one_ended(self) -> None:
        ended, self._sends = await asyncio.wait(self._sends, return_when=asyncio.FIRST_COMPLETED)
        for error in [send.exception() for send in ended]:
            if error is not None:
                raise error


RECEIPTS: Final = pa.schema(
    [("partition", pa.int32()), ("first", pa.int64()), ("last", pa.int64()), ("count", pa.int64())]
)
"""What a task tells of each partition it published to; a null partition is one that the service chose."""

RECEIPTS_DDL: Final = "partition int, first bigint, last bigint, count bigint"


@dataclass(frozen=True, slots=True)
class SendTask:
    """Sends what one task of a DataFrame holds, at least once. Travels to executors.

    Args:
        columns: What the batches hold, in the order of `EventColumns.names`.
        partition_count: How many partitions the hub has.
        idempotent: Have the service tell repeats, within this attempt.
    """

    connection: SparkConnection
    columns: EventColumns
    partition_count: int
    idempotent: bool

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Send, and give receipts without numbers: for `mapInArrow`."""
        counts = self.send(batches)
        if counts:
            values: list[list[int | None]] = [
                [None if partition == ANYWHERE else partition for partition in counts],
                [None] * len(counts),
                [None] * len(counts),
                list(counts.values()),
            ]
            yield pa.RecordBatch.from_arrays(list(map(pa.array, values, RECEIPTS.types)), schema=RECEIPTS)

    def send(self, batches: Iterable[pa.RecordBatch]) -> Mapping[int, int]:
        """Send, and wait until everything is stored.

        Returns:
            How many events went to each partition.

        Raises:
            EventError: A row cannot be an event; those of earlier record batches may be sent.
            ServiceError: A send failed; some events may be sent.
        """
        sender: _Sender | None = None
        encoder: EventEncoder | None = None
        producer = self._producer()
        try:
            for batch in batches:
                if sender is None or encoder is None:
                    limit = worker.run(producer.message_limit("0" if self.idempotent else None))
                    sender = _Sender(
                        producer, limit=limit, partition_count=self.partition_count, anywhere=task_number()
                    )
                    encoder = EventEncoder(self.columns, partition_count=self.partition_count, max_message_size=limit)
                worker.run(sender.add(*encoder.encode(batch)))
            if sender is None:
                return {}
            worker.run(sender.finish())
            return sender.counts
        finally:
            if sender is not None:
                worker.run(sender.aclose())
            if self.idempotent:
                worker.run(producer.aclose())

    def _producer(self) -> HubProducer:
        if not self.idempotent:
            return worker.once(_Producers).plain(self.connection)
        transport = worker.transport(self.connection)
        return HubProducer(transport, self.connection.hub, idempotent=True, owns_transport=False)
