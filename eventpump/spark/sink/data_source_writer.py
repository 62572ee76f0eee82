"""The writers of `format("eventpump")`: a batch DataFrame or a stream is appended to a hub, at least once.

Spark passes a data source's writer too little to make a plan, so a retried task, a repeated batch or a restarted query
stores its rows again: :func:`eventpump.spark.foreach_batch_producer` publishes exactly once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Final

import pyarrow as pa
from pydantic import AfterValidator
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from eventpump.errors import ConfigurationError
from eventpump.options.base import SettingsModel, unknown_option
from eventpump.options.callables import check_import_name
from eventpump.spark import worker
from eventpump.spark.connection import (
    CONNECTION_OPTIONS,
    CONNECTOR_PREFIX,
    RETRY_TIMEOUT,
    Duration,
    SparkConnection,
    option_names,
    split_fields,
)
from eventpump.spark.sink.at_least_once import SendTask
from eventpump.spark.sink.columns import EventColumns
from eventpump.spark.sink.encode import SinkRouter
from eventpump.spark.sink.patience import retried
from eventpump.spark.source.options import SOURCE_OPTIONS, WITHOUT_EFFECT

try:
    from pyspark.sql.datasource import DataSourceStreamArrowWriter
except ImportError:  # Spark 4.0 has none for queries, which `EventPumpDataSource.streamWriter` says
    DataSourceStreamArrowWriter = DataSourceArrowWriter  # type: ignore[misc, assignment] # replaces the missing one


class WriterOptions(SettingsModel):
    """The options of a writer besides its connection.

    Args:
        idempotent: Let the service discard repeats within one attempt of a task; needs a hub that offers idempotent
            publishing.
        router: How rows without a partition are routed: "hash", "ring", "round-robin" or "sticky"; see `SinkSettings`.
        retry_timeout: `retryTimeout`: about how many seconds an outage of the service is waited for. Default: 120.0.
        encode: "module:name", the import name of a `PayloadCodec` or a list of them, that encode bodies; None to
            send them as they are.
    """

    idempotent: bool = True
    router: SinkRouter = "hash"
    retry_timeout: Duration = RETRY_TIMEOUT
    encode: Annotated[str, AfterValidator(check_import_name)] | None = None


WRITER_OPTIONS: Final = option_names(WriterOptions)
"""The options of a writer, not case-sensitive, and the fields they set."""
_NOT_OURS: Final = {"checkpointlocation", *(name.lower() for name in (*SOURCE_OPTIONS, *WITHOUT_EFFECT))}
"""Accepted options without effect: Spark's own, and the source's, because users of the connector share one map."""


def writer_options(given: Mapping[str, str]) -> WriterOptions:
    """Parse the options; their names are not case-sensitive.
    Raises `ConfigurationError` for one that is unknown or invalid."""
    values, rest = split_fields(given, WRITER_OPTIONS)
    for name in rest:
        plain = name.lower().removeprefix(CONNECTOR_PREFIX)
        if plain not in _NOT_OURS:
            raise unknown_option(name, (*CONNECTION_OPTIONS, *WRITER_OPTIONS), spelled=plain)
    return WriterOptions.model_validate(values)


@dataclass(frozen=True)
class Written(WriterCommitMessage):
    """The result of one task: how many events it wrote, by hub partition."""

    counts: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class _Writing:
    """Writes the rows of one task. Pickled for executors."""

    task: SendTask
    positions: tuple[int, ...]

    @classmethod
    def plan(cls, options: Mapping[str, str], schema: StructType, *, overwrite: bool) -> _Writing:
        """Check everything that can be checked before sending; reads the number of partitions from the service."""
        if overwrite:
            raise ConfigurationError(
                "mode",
                'must be append: a hub keeps the events that it has, nothing overwrites them. Write .mode("append")',
            )
        connection, rest = SparkConnection.split_options(options)
        settings = writer_options(rest)
        columns = EventColumns.of(schema)
        positions = tuple(schema.fieldNames().index(name) for name in columns.names)
        transport = worker.transport(connection)
        patience = settings.retry_timeout
        properties = worker.run(retried(lambda: transport.get_hub_properties(connection.hub), patience))
        count = len(properties.partition_ids)
        task = SendTask(connection, columns, count, settings.idempotent, settings.router, patience, settings.encode)
        return cls(task, positions)

    def write(self, batches: Iterator[pa.RecordBatch]) -> Written:
        positions = list(self.positions)
        return Written(dict(self.task.send(batch.select(positions) for batch in batches)))


class _Writer:
    """Appends rows to a hub, at least once. Raises as `_Writing.plan`."""

    def __init__(self, options: Mapping[str, str], schema: StructType, *, overwrite: bool) -> None:
        self._writing = _Writing.plan(options, schema, overwrite=overwrite)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Send the rows of one task. Raises like :meth:`eventpump.spark.sink.at_least_once.SendTask.send`."""
        return self._writing.write(iterator)


class BatchWriter(_Writer, DataSourceArrowWriter):
    """Appends a DataFrame to a hub."""


class StreamWriter(_Writer, DataSourceStreamArrowWriter):
    """Appends each micro-batch of a stream to a hub."""
