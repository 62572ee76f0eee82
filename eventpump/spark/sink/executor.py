"""The executors' part of the foreachBatch producer. A separate module, because each Python worker loads it."""

from __future__ import annotations

import asyncio
import hashlib
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Final, TypeAlias

import pyarrow as pa
from pyspark.sql.types import BinaryType, StructField, StructType

from eventpump.interfaces import Transport
from eventpump.options.callables import loaded_codecs
from eventpump.spark import worker
from eventpump.spark.connection import SparkConnection
from eventpump.spark.sink.blocks import blocks_of
from eventpump.spark.sink.columns import EventColumns
from eventpump.spark.sink.encode import ANYWHERE, EventEncoder, StableRouter, hashed, task_number
from eventpump.spark.sink.exactly_once import PartitionPublishing, PublishOptions
from eventpump.spark.sink.records import Plan, encode_outcome

_AT_ONCE: Final = 32
"""Partitions that a task publishes at a time."""
_IN_FLIGHT: Final = 16 * 1024 * 1024
"""Bytes of partitions that a task holds before it takes the rows of another one."""
_AT_A_TIME: Final = 1000
"""Rows that are encoded before they are put into blocks: their memory is used again for the next."""
_OUTCOME: Final = pa.schema([("outcome", pa.string())])
OUTCOME_DDL: Final = "outcome string"


@dataclass(frozen=True, slots=True)
class EncodeTask:
    """Encodes the rows of one task of a DataFrame: for `mapInArrow`. Pickled for executors.

    Args:
        columns: The columns of the batches, in the order of `EventColumns.names`.
        reserved: Bytes that will be added to each event besides its numbers.
        router: How keys are assigned to partitions.
        encode: The codecs to encode bodies with, or their import name.
    """

    columns: EventColumns
    partition_count: int
    max_message_size: int
    reserved: int
    router: StableRouter = "hash"
    encode: object = ()

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Return partition, ordering columns, and encoded event.

        Raises:
            EventError: A row cannot be an event.
        """
        encoder = self.encoder()
        names = encoded_names(len(self.columns.order_by))
        for batch in batches:
            partitions, events = encoder.encode(batch)
            ordering = batch.columns[len(batch.columns) - len(self.columns.order_by) :]
            routed = pa.array(hashed(partitions, events, self.partition_count), pa.int32())
            yield pa.RecordBatch.from_arrays([routed, *ordering, pa.array(events, pa.binary())], names)

    def encoder(self) -> EventEncoder:
        """Return the encoder of one task's rows."""
        worker.spare_collections()
        return EventEncoder(
            self.columns,
            partition_count=self.partition_count,
            max_message_size=self.max_message_size,
            reserved=self.reserved,
            router=self.router,
            codecs=loaded_codecs("encode", self.encode),
        )


def encoded_names(order_by: int) -> list[str]:
    """Return the names of the columns of encoded rows.

    Args:
        order_by: How many columns order them.
    """
    return ["partition", *(f"order_{number}" for number in range(order_by)), "event"]


@dataclass(frozen=True, slots=True)
class BlockTask:
    """Encodes the rows of one task, without ordering columns, in blocks: for `mapInArrow`. Pickled for executors."""

    encoding: EncodeTask

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Return partition, place and block, see :mod:`eventpump.spark.sink.blocks`. Raises like `EncodeTask`."""
        return blocks_of(self._rows(batches), partition_count=self.encoding.partition_count)

    def _rows(self, batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[list[int], list[int], list[bytes]]]:
        encoder, count = self.encoding.encoder(), self.encoding.partition_count
        for batch in _portions(batches):
            partitions, events = encoder.encode(batch)
            hashes = list(map(zlib.crc32, events))
            routed = [
                found % count if each == ANYWHERE else each for each, found in zip(partitions, hashes, strict=True)
            ]
            yield routed, hashes, events


def _portions(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Divide batches, unless they have nested columns: a slice of a map still has the items of all rows."""
    for batch in batches:
        if any(pa.types.is_nested(field.type) for field in batch.schema):
            yield batch
            continue
        for start in range(0, batch.num_rows, _AT_A_TIME):
            yield batch.slice(start, _AT_A_TIME)


COLLECTED_TYPE: Final = StructType([StructField("rows", BinaryType())])
"""Not DDL, which the driver would have the JVM parse for each batch."""
_COLLECTED: Final = pa.schema([("rows", pa.binary())])


@dataclass(frozen=True, slots=True)
class CollectTask:
    """Encodes the rows of one task, for a driver that collects them: for `mapInArrow`. Pickled for executors.

    Each task returns one row: the encoded rows as an Arrow stream, or null if they take more than its share of the
    bytes; it stops then.

    Args:
        tasks: How many tasks share the bytes. Further tasks may return no rows.
        most_bytes: The most bytes of all tasks together, as Arrow holds them.
    """

    encoding: EncodeTask
    tasks: int
    most_bytes: int

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Encode. Raises like :class:`EncodeTask`."""
        room = self.most_bytes // self.tasks if task_number() < self.tasks else 0
        kept: list[pa.RecordBatch] = []
        for batch in self.encoding(batches):
            room -= batch.nbytes if batch.num_rows else 0
            if room < 0:
                yield pa.RecordBatch.from_arrays([pa.array([None], pa.binary())], schema=_COLLECTED)
                return
            kept.append(batch)
        stream = pa.BufferOutputStream()
        if any(each.num_rows for each in kept):
            with pa.ipc.new_stream(stream, kept[0].schema) as writer:
                for each in kept:
                    writer.write_batch(each)
        yield pa.RecordBatch.from_arrays([pa.array([stream.getvalue().to_pybytes()], pa.binary())], schema=_COLLECTED)


RowsOf: TypeAlias = Callable[[Iterable[pa.RecordBatch]], Iterator[tuple[int, list[bytes]]]]
"""Returns the rows of whole hub partitions in their order, portion by portion: `sorted_rows` or `merged_rows`."""

DIGEST_DDL: Final = "partition int, count bigint, digest string"


@dataclass(frozen=True, slots=True)
class DigestTask:
    """Returns how many rows each hub partition has, and their digest: for `mapInArrow`. Pickled for executors.

    Args:
        rows_of: Reads the batches.
    """

    rows_of: RowsOf

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Return a row for each partition."""
        names = ["partition", "count", "digest"]
        for partition, shares in groupby(self.rows_of(batches), key=itemgetter(0)):
            digest, count = hashlib.sha256(), 0
            for _, events in shares:
                digest.update(b"".join(events))
                count += len(events)
            values = [pa.array([partition], pa.int32()), pa.array([count], pa.int64()), pa.array([digest.hexdigest()])]
            yield pa.RecordBatch.from_arrays(values, names)


@dataclass(frozen=True, slots=True)
class PublishTask:
    """Publishes the rows of whole hub partitions, several at a time: for `mapInArrow`. Pickled for executors.

    Args:
        rows_of: Reads the batches; returns the rows in the order of the plan's numbers.
        compares: Whether rows that are stored are compared with these.
        sends: Whether rows are sent; otherwise only those that are stored are compared.
    """

    connection: SparkConnection
    plan: Plan
    options: PublishOptions
    rows_of: RowsOf
    compares: bool = False
    sends: bool = True

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Publish, and yield one outcome per partition; or, if nothing is sent, its id or the loss of its producer's
        state. Raises like :class:`PartitionPublishing`."""
        worker.spare_collections()
        publishing = _Publishing(
            worker.transport(self.connection), self.plan, self.options, compares=self.compares, sends=self.sends
        )
        try:
            for partition, shares in groupby(self.rows_of(batches), key=itemgetter(0)):
                worker.run(publishing.begin(self.plan.partition_ids[partition]))
                for _, events in shares:
                    if not worker.run(publishing.put(events)):
                        break
            outcomes = worker.run(publishing.finish())
        finally:
            worker.run(publishing.aclose())
        if outcomes:
            yield pa.RecordBatch.from_arrays([pa.array(outcomes)], schema=_OUTCOME)


class _Publishing:
    """The partitions of a task: one is given its rows while those before it are still being sent.

    On the loop's thread.
    """

    def __init__(
        self, transport: Transport, plan: Plan, options: PublishOptions, *, compares: bool, sends: bool
    ) -> None:
        self._transport = transport
        self._plan = plan
        self._options = options
        self._compares = compares
        self._sends = sends
        self._current: PartitionPublishing | None = None
        self._ending: dict[asyncio.Task[str], PartitionPublishing] = {}
        self._outcomes: list[str] = []

    async def begin(self, partition_id: str) -> None:
        """Begin with the next partition. Waits while too much is being sent.

        Raises:
            EventPumpError: A partition's attempt has failed.
        """
        self._end_current()
        while self._ending and (
            len(self._ending) >= _AT_ONCE or sum(each.held_bytes for each in self._ending.values()) > _IN_FLIGHT
        ):
            await self._some_ended()
        publishing = PartitionPublishing(
            self._transport,
            self._plan,
            partition_id,
            options=self._options,
            compares=self._compares,
            sends=self._sends,
        )
        self._current = await publishing.__aenter__()

    async def put(self, events: list[bytes]) -> bool:
        """Add the partition's next rows. As `PartitionPublishing.put`."""
        assert self._current is not None
        return await self._current.put(events)

    async def finish(self) -> list[str]:
        """Wait until everything is stored, or compared.

        Returns:
            The outcomes as text; if nothing is sent, ids of partitions in place of receipts.

        Raises:
            EventPumpError: A partition's attempt has failed.
        """
        self._end_current()
        while self._ending:
            await self._some_ended()
        return self._outcomes

    def _end_current(self) -> None:
        current, self._current = self._current, None
        if current is not None:
            self._ending[asyncio.get_running_loop().create_task(self._finish(current))] = current

    async def _finish(self, publishing: PartitionPublishing) -> str:
        try:
            if self._sends:
                return encode_outcome(await publishing.finish())
            loss = await publishing.compare()
            return publishing.partition_id if loss is None else encode_outcome(loss)
        finally:
            await publishing.__aexit__(None, None, None)

    async def _some_ended(self) -> None:
        ended, _ = await asyncio.wait(self._ending, return_when=asyncio.FIRST_COMPLETED)
        for task in ended:
            del self._ending[task]
        errors = [error for task in ended if (error := task.exception()) is not None]
        if errors:
            raise errors[0]
        self._outcomes += [task.result() for task in ended]

    async def aclose(self) -> None:
        """End the attempts that have not ended."""
        current, self._current = self._current, None
        for task in self._ending:
            task.cancel()
        await asyncio.gather(*self._ending, return_exceptions=True)
        if current is not None:
            await current.__aexit__(None, None, None)


def sorted_rows(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[int, list[bytes]]]:
    """Return the rows of whole partitions: partition and events, portion by portion.

    Args:
        batches: Partition and event, sorted by Spark.
    """
    for batch in batches:
        start = 0
        for partition, rows in groupby(batch.column(0).to_pylist()):
            count = sum(1 for _ in rows)
            yield partition, batch.column(1).slice(start, count).to_pylist()
            start += count
