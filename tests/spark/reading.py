"""How the source's tests read hubs, in batches and in queries."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.streaming.listener import StreamingQueryListener
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


class _Endings(StreamingQueryListener):
    """Waits for the end of every query that has begun."""

    def __init__(self) -> None:
        self._running = 0
        self._changed = threading.Condition()

    def onQueryStarted(self, event: Any) -> None:  # noqa: N802 - Spark's name
        self._count(1)

    def onQueryProgress(self, event: Any) -> None:  # noqa: N802 - Spark's name
        pass

    def onQueryIdle(self, event: Any) -> None:  # noqa: N802 - Spark's name
        pass

    def onQueryTerminated(self, event: Any) -> None:  # noqa: N802 - Spark's name
        self._count(-1)

    def _count(self, change: int) -> None:
        with self._changed:
            self._running += change
            self._changed.notify_all()

    def wait(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._running == 0)


@contextmanager
def listening(spark: Any, listener: StreamingQueryListener) -> Iterator[None]:
    """Have a listener called, until the queries that are started meanwhile have ended; they must be stopped in it.

    With Spark Connect, removing the last listener waits forever if an event comes at that moment (SPARK-59623).
    """
    endings = _Endings()
    spark.streams.addListener(listener)
    spark.streams.addListener(endings)  # called after the other one
    try:
        yield
    finally:
        endings.wait()
        spark.streams.removeListener(endings)
        spark.streams.removeListener(listener)
