"""Sending the rows of a task at least once, from the Python worker it runs in.

Plain, events of one partition keep their order, and a send whose outcome is not known is repeated: once too often,
where it was stored. Idempotent, the service gives this attempt of the task a producer of its own per partition, and
such a repeat is none. What neither knows of is another attempt at the same rows: Spark's retries send them again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import inf
from typing import Final

import pyarrow as pa

from eventpump.eventhubs.sealing import pieces
from eventpump.interfaces import (
    Transport,
)
from eventpump.options.callables import loaded_codecs
from eventpump.producer.outbox import Ended, Outbox
from eventpump.producer.producer import HubProducer
from eventpump.spark import worker
from eventpump.spark.connection import RETRY_TIMEOUT, SparkConnection
from eventpump.spark.sink.columns import EventColumns
from eventpump.spark.sink.encode import ANYWHERE, EventEncoder, SinkRouter, task_number
from eventpump.spark.sink.patience import patient_retry

_IN_FLIGHT: Final = 8 * 1024 * 1024
"""Bytes that a task has on their way at a time, to all partitions together."""


async def message_limit(connection: SparkConnection) -> int:
    """Ask what the service takes in one message, in bytes. On the loop's thread.
    Raises `ServiceError` for no answer."""
    producer = HubProducer(worker.transport(connection), connection.hub, owns_transport=False)
    try:
        return await producer.message_limit(None)
    finally:
        await producer.aclose()


class _Producers:
    """The plain producers of this process, whose links live across tasks: one per hub and credential."""

    def __init__(self) -> None:
        self._kept: dict[tuple[SparkConnection, float], tuple[Transport, HubProducer]] = {}

    def plain(self, connection: SparkConnection, retry_timeout: float) -> HubProducer:
        transport = worker.transport(connection)
        key = (connection, retry_timeout)
        kept, producer = self._kept.get(key, (None, None))
        if producer is None or kept is not transport:
            retry = patient_retry(retry_timeout, connection.retry)
            producer = HubProducer(transport, connection.hub, retry=retry, max_in_flight=1, owns_transport=False)
            self._kept[key] = (transport, producer)
        return producer


class _Sender:
    """Sends encoded events: those of one partition in order, one message at a time. On the loop's thread.

    Args:
        anywhere: The partition that events without one go to first; another follows with each message.
        is_sticky: Whether that is so also for a plain producer, which else leaves their choice to the service.
    """

    def __init__(
        self, producer: HubProducer, *, limit: int, partition_count: int, anywhere: int, is_sticky: bool
    ) -> None:
        self._outbox = outbox = Outbox[None](producer, "task's sink", self._ended, max_bytes=limit)
        outbox.add_lanes([None, *map(str, range(partition_count))])
        gateway, *lanes = outbox.lanes.values()
        self._is_idempotent = producer.is_idempotent
        self._is_sticky = self._is_idempotent or is_sticky
        self._anywhere = anywhere
        # At `ANYWHERE`, -1: the current lane, or the gateway where the choice is left to the service.
        self._lanes = [*lanes, lanes[anywhere % partition_count] if self._is_sticky else gateway]
        self._failure: Exception | None = None
        self.counts: dict[int, int] = {}

    def _ended(self, ended: Ended[None]) -> None:
        if ended.error is None:
            partition = ANYWHERE if ended.lane.partition_id is None else int(ended.lane.partition_id)
            self.counts[partition] = self.counts.get(partition, 0) + ended.event_count
        elif self._failure is None:
            self._failure = ended.error
            self._outbox.drop()

    async def add(self, partitions: Iterable[int], events: Iterable[bytes]) -> None:
        """Send encoded events, each to its partition or `ANYWHERE`. Waits while too much is being sent."""
        outbox, is_idempotent, lanes = self._outbox, self._is_idempotent, self._lanes
        for partition, event in zip(partitions, events, strict=True):
            head, rest = pieces(event, idempotent=is_idempotent)
            filling = lanes[partition].filling
            if filling is not None and filling.add(head, rest):
                continue  # most events; what an outbox keeps for each event is not needed here
            if partition == ANYWHERE and self._is_sticky and filling is not None:
                outbox.send_now(lanes[ANYWHERE])
                self._anywhere += 1
                lanes[ANYWHERE] = lanes[self._anywhere % (len(lanes) - 1)]
            outbox.add(lanes[partition], None, head, rest, 0.0)
            if outbox.yield_at < inf:  # a message is full
                await outbox.let_run()
                await self._until_below(_IN_FLIGHT)

    async def finish(self) -> None:
        """Send what is left, and wait until everything is stored. Raises the error of the first send that failed."""
        self._outbox.send_now()
        await self._until_below(0)

    async def _until_below(self, most: int) -> None:
        """Wait while more bytes are being sent. Raises the error of the first send that failed."""
        outbox = self._outbox
        await outbox.until(lambda: self._failure is not None or outbox.outgoing_bytes <= most)
        if self._failure is not None:
            raise self._failure

    async def aclose(self) -> None:
        """Cancel what is being sent. Closing twice is fine."""
        await self._outbox.aclose()


RECEIPTS: Final = pa.schema(
    [("partition", pa.int32()), ("first", pa.int64()), ("last", pa.int64()), ("count", pa.int64())]
)
"""What a task reports of each partition it published to; a null partition is one that the service chose."""

RECEIPTS_DDL: Final = "partition int, first bigint, last bigint, count bigint"


@dataclass(frozen=True, slots=True)
class SendTask:
    """Sends what one task of a DataFrame holds, at least once. Travels to executors.

    Args:
        columns: What the batches hold, in the order of `EventColumns.names`.
        router: How rows without a partition are routed.
        retry_timeout: About how many seconds an outage of the service is waited for.
        encode: The codecs to encode bodies with, or their import name.
    """

    connection: SparkConnection
    columns: EventColumns
    partition_count: int
    idempotent: bool
    router: SinkRouter = "hash"
    retry_timeout: float = RETRY_TIMEOUT
    encode: object = ()

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Send, and give receipts without numbers: for `mapInArrow`."""
        worker.spare_collections()
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
                        producer,
                        limit=limit,
                        partition_count=self.partition_count,
                        anywhere=task_number(),
                        is_sticky=self.router == "sticky",
                    )
                    encoder = EventEncoder(
                        self.columns,
                        partition_count=self.partition_count,
                        max_message_size=limit,
                        router=self.router,
                        first=task_number(),
                        codecs=loaded_codecs("encode", self.encode),
                    )
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
            return worker.once(_Producers).plain(self.connection, self.retry_timeout)
        transport = worker.transport(self.connection)
        retry = patient_retry(self.retry_timeout, self.connection.retry)
        return HubProducer(transport, self.connection.hub, retry=retry, idempotent=True, owns_transport=False)
