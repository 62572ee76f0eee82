"""The executors' part of the foreachBatch producer. A separate module, because each Python worker loads it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Final

import pyarrow as pa

from eventpump.interfaces import Transport
from eventpump.options.callables import loaded_codecs
from eventpump.spark import worker
from eventpump.spark.connection import SparkConnection
from eventpump.spark.sink.encode import EventColumns, EventEncoder, StableRouter, hashed
from eventpump.spark.sink.exactly_once import PartitionPublishing
from eventpump.spark.sink.records import PartitionOutcome, Plan, encode_outcome

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
        encoder = EventEncoder(
            self.columns,
            partition_count=self.partition_count,
            max_message_size=self.max_message_size,
            reserved=self.reserved,
            router=self.router,
            codecs=loaded_codecs("encode", self.encode),
        )
        names = encoded_names(len(self.columns.order_by))
        for batch in batches:
            partitions, events = encoder.encode(batch)
            ordering = batch.columns[len(batch.columns) - len(self.columns.order_by) :]
            routed = pa.array(hashed(partitions, events, self.partition_count), pa.int32())
            yield pa.RecordBatch.from_arrays([routed, *ordering, pa.array(events, pa.binary())], names)


def encoded_names(order_by: int) -> list[str]:
    """Return the names of the columns of encoded rows.

    Args:
        order_by: How many columns order them.
    """
    return ["partition", *(f"order_{number}" for number in range(order_by)), "event"]


@dataclass(frozen=True, slots=True)
class PublishTask:
    """Publishes the rows of whole hub partitions, one partition after another: for `mapInArrow`. Pickled for executors.

    The batches hold partition and event, in the order of the plan's numbers.
    """

    connection: SparkConnection
    plan: Plan

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Publish, and yield one outcome per partition. Raises like :class:`PartitionPublishing`."""
        transport = worker.transport(self.connection)
        for partition, shares in groupby(_shares(batches), key=itemgetter(0)):
            outcome = self._publish(transport, partition, (events for _, events in shares))
            yield pa.RecordBatch.from_arrays([pa.array([encode_outcome(outcome)])], schema=_OUTCOME)

    def _publish(self, transport: Transport, partition: int, portions: Iterable[list[bytes]]) -> PartitionOutcome:
        publishing = PartitionPublishing(transport, self.plan, self.plan.partition_ids[partition])
        worker.run(publishing.__aenter__())
        try:
            for events in portions:
                if not worker.run(publishing.put(events)):
                    break
            return worker.run(publishing.finish())
        finally:
            worker.run(publishing.__aexit__(None, None, None))


def _shares(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[int, list[bytes]]]:
    """Split batches where the partition changes."""
    for batch in batches:
        start = 0
        for partition, rows in groupby(batch.column(0).to_pylist()):
            count = sum(1 for _ in rows)
            yield partition, batch.column(1).slice(start, count).to_pylist()
            start += count
