"""The writers of `format("eventpump")`: a batch DataFrame or a stream is appended to a hub, at least once.

Spark tells a data source's writer nothing that a plan could be made with, so what a retried task, a repeated batch or
a restarted query sends again comes twice: :func:`eventpump.spark.foreach_batch_producer` publishes exactly once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

import pyarrow as pa
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from eventpump.errors import ConfigurationError
from eventpump.options.base import SettingsModel, unknown_option
from eventpump.spark import worker
from eventpump.spark.connection import CONNECTION_OPTIONS, CONNECTOR_PREFIX, SparkConnection
from eventpump.spark.sink.at_least_once import SendTask, retried
from eventpump.spark.sink.encode import EventColumns
from eventpump.spark.source.options import SOURCE_OPTIONS, WITHOUT_EFFECT


class WriterOptions(SettingsModel):
    """What a writer takes besides its connection.

    Args:
        idempotent: Have the service tell repeats within one attempt of a task; needs a hub that offers idempotent
            publishing.
    """

    idempotent: bool = True


_NOT_OURS: Final = {"checkpointlocation", *(name.lower() for name in (*SOURCE_OPTIONS, *WITHOUT_EFFECT))}
"""What Spark takes of the same options and hands on, and the source's: the connector's users give both one map."""


def _options(given: Mapping[str, str]) -> WriterOptions:
    """Read the options, their names in any case.

    Raises:
        ConfigurationError: There is no such option, or value.
    """
    values: dict[str, str] = {}
    for name, value in given.items():
        plain = name.lower().removeprefix(CONNECTOR_PREFIX)
        if plain in WriterOptions.model_fields:
            values[plain] = value
        elif plain not in _NOT_OURS:
            raise unknown_option(name, (*CONNECTION_OPTIONS, *WriterOptions.model_fields), spelled=plain)
    return WriterOptions.model_validate(values)


@dataclass(frozen=True)
class Written(WriterCommitMessage):
    """What one task has written.

    Args:
        counts: Events by hub partition.
    """

    counts: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class _Writing:
    """Writes what one task holds. Travels to executors."""

    task: SendTask
    positions: tuple[int, ...]

    @classmethod
    def plan(cls, options: Mapping[str, str], schema: StructType, *, overwrite: bool) -> _Writing:
        """Check everything that can be before anything is sent; reads the number of partitions from the service.

        Raises:
            ConfigurationError: An option or a column cannot work.
            ServiceError: The hub cannot be reached.
        """
        if overwrite:
            raise ConfigurationError("mode", "a hub is only ever appended to")
        connection, rest = SparkConnection.split_options(options)
        settings = _options(rest)
        columns = EventColumns.of(schema)
        positions = tuple(schema.fieldNames().index(name) for name in columns.names)
        transport = worker.transport(connection)
        properties = worker.run(retried(lambda: transport.get_hub_properties(connection.hub)))
        return cls(SendTask(connection, columns, len(properties.partition_ids), settings.idempotent), positions)

    def write(self, batches: Iterator[pa.RecordBatch]) -> Written:
        positions = list(self.positions)
        return Written(dict(self.task.send(batch.select(positions) for batch in batches)))


class BatchWriter(DataSourceArrowWriter):
    """Appends a DataFrame to a hub, at least once.

    Args:
        options: As Spark's users write them.

    Raises:
        ConfigurationError: An option or a column cannot work.
        ServiceError: The hub cannot be reached.
    """

    def __init__(self, options: Mapping[str, str], schema: StructType, *, overwrite: bool) -> None:
        self._writing = _Writing.plan(options, schema, overwrite=overwrite)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Send what one task holds. Raises as :meth:`eventpump.spark.sink.at_least_once.SendTask.send`."""
        return self._writing.write(iterator)


class StreamWriter(DataSourceStreamArrowWriter):
    """Appends each micro-batch of a stream to a hub, at least once. See :class:`BatchWriter`."""

    def __init__(self, options: Mapping[str, str], schema: StructType, *, overwrite: bool) -> None:
        self._writing = _Writing.plan(options, schema, overwrite=overwrite)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Send what one task holds. Raises as :meth:`eventpump.spark.sink.at_least_once.SendTask.send`."""
        return self._writing.write(iterator)
