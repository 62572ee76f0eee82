"""How the source's tests read hubs, in batches and in queries."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from tests.spark.service import SparkService

BODIES = "body BINARY, partition STRING, sequenceNumber BIGINT"
"""A schema of what most tests look at."""

Key = tuple[str, int, bytes]
"""Partition, sequence number and body of an event."""


class HubReading:
    """One hub, read by Spark.

    Attributes:
        batches: What `foreachBatch` got: per batch id, keys in order of partition and number.
    """

    def __init__(self, spark: SparkSession, service: SparkService, hub: str, checkpoint: str | None = None) -> None:
        self.spark = spark
        self.service = service
        self.hub = hub
        self.batches: dict[int, list[Key]] = {}
        self._checkpoint = checkpoint

    def options(self, **options: Any) -> dict[str, str]:
        given = {name: str(value) for name, value in options.items()}
        return {"connectionString": self.service.connection_string, "hub": self.hub, **given}

    def batch(self, schema: str | None = BODIES, **options: Any) -> DataFrame:
        """Read a batch.

        Args:
            schema: None for the source's own.
        """
        reader = self.spark.read.format("eventpump").options(**self.options(**options))
        return (reader if schema is None else reader.schema(schema)).load()

    def keys(self, **options: Any) -> list[Key]:
        """Read a batch's keys."""
        return keys_of(self.batch(**options))

    def stream(self, schema: str | None = BODIES, **options: Any) -> DataFrame:
        """Read a query's rows."""
        reader = self.spark.readStream.format("eventpump").options(**self.options(**options))
        return (reader if schema is None else reader.schema(schema)).load()

    def note(self, frame: DataFrame, batch_id: int) -> None:
        """Take note of a batch; for `foreachBatch`. A repeated batch takes the place of the one before."""
        self.batches[batch_id] = keys_of(frame)

    @contextmanager
    def query(
        self,
        note: Callable[[DataFrame, int], None] | None = None,
        *,
        available_now: bool = False,
        **options: Any,
    ) -> Iterator[StreamingQuery]:
        """Run a query that notes its batches. It is stopped in the end."""
        assert self._checkpoint is not None
        writer = self.stream(**options).writeStream.foreachBatch(note or self.note)
        writer = writer.option("checkpointLocation", self._checkpoint)
        query = (writer.trigger(availableNow=True) if available_now else writer).start()
        try:
            yield query
        finally:
            query.stop()

    def run_now(self, **options: Any) -> None:
        """Read what is there, batch after batch, and end.

        Raises:
            StreamingQueryException: The query failed.
        """
        with self.query(available_now=True, **options) as query:
            assert query.awaitTermination(60)

    @property
    def rows(self) -> list[Key]:
        """What all batches got, in their order."""
        return [key for batch_id in sorted(self.batches) for key in self.batches[batch_id]]

    def published(self) -> list[Key]:
        """Read what the hub holds, without Spark."""
        return [
            (partition_id, event.sequence_number, event.body)
            for partition_id, events in self.service.read(self.hub).items()
            for event in events
        ]


def key_of(row: Row) -> Key:
    return row["partition"], row["sequenceNumber"], bytes(row["body"])


def keys_of(frame: DataFrame) -> list[Key]:
    """Collect a frame's keys, by partition; those of one partition stay in the order they came in."""
    return sorted(map(key_of, frame.collect()), key=lambda key: int(key[0]))
