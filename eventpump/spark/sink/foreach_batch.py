"""The foreachBatch producer: each micro-batch of a query is published by its executors, exactly once.

One batch is one job. Its first stage encodes rows and assigns each its hub partition; the shuffle moves the rows of a
partition to one task, which publishes them in an order that depends only on the rows. The ledger encloses the job:
before it, the plan with the number of each row is stored; after it, the record that the batch is done. So a task can
fail, run again or run twice at a time, and so can the driver; see :mod:`eventpump.spark.sink.protocol`.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Self, TypedDict, Unpack

from pydantic import BeforeValidator, Field, model_validator
from pyspark.sql.types import BinaryType, IntegerType, StructField, StructType

from eventpump.amqp.sections import APPLICATION_PROPERTIES, section
from eventpump.errors import ConfigurationError
from eventpump.eventhubs.codecs import PayloadCodec
from eventpump.options.base import Name, SettingsModel
from eventpump.options.callables import check_codecs
from eventpump.spark import worker
from eventpump.spark.connection import SparkConnection
from eventpump.spark.sink import staging as staged
from eventpump.spark.sink.at_least_once import RECEIPTS_DDL, SendTask, message_limit, retried
from eventpump.spark.sink.encode import EventColumns, SinkRouter
from eventpump.spark.sink.exactly_once import begin_batch, finish_batch, sink_of
from eventpump.spark.sink.executor import OUTCOME_DDL, EncodeTask, PublishTask, encoded_names
from eventpump.spark.sink.protocol import STAMP, Batch, OnProducerStateLost
from eventpump.spark.sink.records import Done, PackingLimits, PartitionOutcome, Plan, decode_outcome, directory_name
from eventpump.storage.ledgers.interface import LedgerStore
from eventpump.storage.ledgers.opening import open_ledger

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_QUERY_ID: Final = "sql.streaming.queryId"
_LAST_ROW: Final = 2**63 - 1
_LARGER_FORMS: Final = 12
"""Additional bytes of the map of properties, and of the event's envelope, in their larger forms."""
_STAGING: Final = "staging~"
"""The staging directory next to a ledger's sinks; none of their names contains a tilde."""


# ---------------------------------------------------------------------------------------------------- receipts


@dataclass(frozen=True, slots=True)
class PublishedRows:
    """The rows that a batch has published to one hub partition.

    Args:
        partition_id: None for events whose partition the service chose and does not report.
        first: The published number of the first row; None if it was sent without numbers. After a take-over, that of
            the first row published since.
        last: The published number of the last row; smaller than `first` if the numbers wrapped to 0.
        count: How many rows there are.
    """

    partition_id: str | None
    first: int | None
    last: int | None
    count: int


@dataclass(frozen=True, slots=True)
class BatchReceipt:
    """The rows that a batch has published.

    Args:
        sink_id: None if the sink has no ledger.
        partitions: The partitions with rows, by number.
    """

    sink_id: str | None
    batch_id: int
    partitions: tuple[PublishedRows, ...]

    @property
    def count(self) -> int:
        """How many rows were published."""
        return sum(each.count for each in self.partitions)


# ---------------------------------------------------------------------------------------------------- settings


def _ledger(value: object) -> object:
    if isinstance(value, str | os.PathLike):
        return open_ledger(value)
    if value is not None and not callable(getattr(value, "create", None)):
        raise ValueError("must be a directory, the URL of a blob container, or a ledger store")
    return value


def _codecs(value: object) -> object:
    return check_codecs("encode", value)


def _names(value: object) -> object:
    return (value,) if isinstance(value, str) else value


class SinkSettings(SettingsModel):
    """The options of the producer.

    Args:
        sink_id: The sink's name in its ledger, stable across restarts, for one query and one hub; None for the id of
            the query, which Spark Connect does not provide.
        ledger: A directory that every driver of the query can access; the URL of a blob container, with a SAS token; or
            a store, such as `BlobLedger`.
        idempotent: Publish every row exactly once; otherwise at least once, and without a ledger.
        staging: A directory, as path or URI, that driver and executors can write to: each batch's rows are written
            there, and published from there, so that a query may return other rows when a batch is repeated.
        order_by: Columns that order the rows of a hub partition; rows that are equal in them, and all rows without it,
            are ordered by their content.
        stamp: Add the property `eventpump:stamp` to every event: sink, batch, partition and row index.
        on_producer_state_lost: What happens if the service has forgotten which rows of a batch it has stored: "fail",
            "tailScan" (needs `stamp`), or "atLeastOnce".
        router: How rows without a partition are routed. "hash": by key as the service does, and others by their
            content. "ring": keys by a consistent ring, as `RingRouter` does. With `idempotent=False` also
            "round-robin", whatever the key, and "sticky", one partition per message for rows without key.
        encode: Compresses or encrypts bodies: a `PayloadCodec`, or several that are applied in this order; or
            "module:name", the import name of either in every process. Publishing exactly once without `staging`, they
            must return the same bytes for the same body, which encryption with a random nonce does not.
        max_tasks: How many tasks publish at a time; None for one per hub partition. With fewer, a task publishes
            several partitions one after another.
        max_batch_events: The most events in a message.
        max_batch_bytes: The largest size of a message in bytes; a larger event is sent alone.
    """

    connection: SparkConnection
    sink_id: Name | None = None
    ledger: Annotated[Any, BeforeValidator(_ledger)] = None
    idempotent: bool = True
    staging: str | None = None
    order_by: Annotated[tuple[str, ...], BeforeValidator(_names)] = ()
    stamp: bool = False
    on_producer_state_lost: OnProducerStateLost = OnProducerStateLost.FAIL
    router: SinkRouter = "hash"
    encode: Annotated[Any, BeforeValidator(_codecs)] = ()
    max_tasks: int | None = Field(default=None, ge=1)
    max_batch_events: int = Field(default=PackingLimits().max_events, ge=1, le=1_000_000)
    max_batch_bytes: int = Field(default=PackingLimits().max_bytes, ge=1024)

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.idempotent:
            if self.ledger is None:
                raise ConfigurationError("ledger", "is required: set it to a directory, or the URL of a blob container")
            if self.on_producer_state_lost is OnProducerStateLost.TAIL_SCAN and not self.stamp:
                raise ConfigurationError("on_producer_state_lost", "tailScan requires stamps: set stamp=True")
            if self.router not in ("hash", "ring"):
                problem = f"cannot be {self.router}: a repeated batch has to route each row as before"
                raise ConfigurationError("router", problem)
            if self.sink_id is not None:
                directory_name(self.sink_id)
            return self
        for name in ("ledger", "sink_id", "staging", "order_by", "stamp"):
            if getattr(self, name):
                raise ConfigurationError(name, "is only for the idempotent sink")
        return self

    @property
    def limits(self) -> PackingLimits:
        """The limits for packing messages."""
        return PackingLimits(max_events=self.max_batch_events, max_bytes=self.max_batch_bytes)


class ConnectionOptions(TypedDict, total=False):
    """Keyword arguments for the connection; see :class:`eventpump.spark.connection.SparkConnection`."""

    fully_qualified_namespace: str
    credential: str
    custom_endpoint_address: str
    ca_file: str
    auth_timeout: float
    operation_timeout: float
    idle_timeout: float


class SinkOptions(ConnectionOptions, total=False):
    """Keyword arguments of :func:`foreach_batch_producer`; see `sink.foreach_batch.SinkSettings`."""

    order_by: str | Sequence[str]
    stamp: bool
    router: SinkRouter
    encode: str | PayloadCodec | Sequence[PayloadCodec]
    on_producer_state_lost: OnProducerStateLost | Literal["fail", "tailScan", "atLeastOnce"]
    max_tasks: int
    max_batch_events: int
    max_batch_bytes: int


# ---------------------------------------------------------------------------------------------------- the writer


class ForeachBatchWriter:
    """Publishes micro-batches: the callable that :func:`foreach_batch_producer` returns for `foreachBatch`.

    It is created where the query is defined and called where the batches are: it can be pickled, and process-wide
    objects are created at its first call there.

    Attributes:
        settings: The options of the producer.
    """

    def __init__(self, settings: SinkSettings, on_receipt: Callable[[BatchReceipt], None] | None = None) -> None:
        self.settings = settings
        self._on_receipt = on_receipt
        self._opened_by: int | None = None
        self._max_message_size = 0

    def __call__(self, frame: DataFrame, batch_id: int) -> None:
        """Publish a micro-batch, and return when all of it is stored.

        A batch that is already done is not published again, but `on_receipt` is called again.

        Raises:
            ConfigurationError: A column is missing or has a wrong type, or the ledger does not match the query.
            ProducerStateLostError: The service has forgotten which rows of the batch it has stored.
            EventPumpError: The service or the ledger failed; when the batch is repeated, nothing is lost or stored
                twice.
        """
        columns = EventColumns.of(frame.schema, self.settings.order_by)
        receipt = (self._publish if self.settings.idempotent else self._send)(frame, columns, batch_id)
        if self._on_receipt is not None:
            self._on_receipt(receipt)

    def __repr__(self) -> str:
        return f"ForeachBatchWriter(hub={self.settings.connection.hub!r}, sink_id={self.settings.sink_id!r})"

    # ------------------------------------------------------------------------------------------ at least once

    def _send(self, frame: DataFrame, columns: EventColumns, batch_id: int) -> BatchReceipt:
        connection = self.settings.connection
        hub = worker.run(retried(lambda: worker.transport(connection).get_hub_properties(connection.hub)))
        task = SendTask(
            connection,
            columns,
            len(hub.partition_ids),
            idempotent=False,
            router=self.settings.router,
            encode=self.settings.encode,
        )
        counts: dict[int | None, int] = {}
        for row in _selected(frame, columns).mapInArrow(task, RECEIPTS_DDL).collect():
            counts[row["partition"]] = counts.get(row["partition"], 0) + row["count"]
        partitions = sorted(counts, key=lambda each: -1 if each is None else each)
        return BatchReceipt(
            None,
            batch_id,
            tuple(PublishedRows(None if each is None else str(each), None, None, counts[each]) for each in partitions),
        )

    # ------------------------------------------------------------------------------------------ exactly once

    def _publish(self, frame: DataFrame, columns: EventColumns, batch_id: int) -> BatchReceipt:
        settings = self.settings
        query_id = _query_id(frame)
        sink_id = settings.sink_id or query_id
        if sink_id is None:
            raise ConfigurationError("sink_id", "is required if Spark does not provide the query's id, as with Connect")
        transport = worker.transport(settings.connection)
        batch = Batch(
            sink_of(transport, settings.connection.hub, sink_id),
            query_id,
            uuid.uuid4().hex,
            batch_id,
            settings.limits,
            settings.stamp,
            router="ring" if settings.router == "ring" else "hash",
        )
        store = self._store()
        step = worker.run(retried(lambda: begin_batch(store, transport, batch)))
        while isinstance(step, Plan):
            plan = step
            outcomes = self._run(frame, columns, plan)
            finishing = partial(finish_batch, store, transport, batch, plan, outcomes, settings.on_producer_state_lost)
            step = worker.run(retried(finishing))
        if settings.staging is not None:
            self._unstage(frame.sparkSession, sink_id, batch_id)
        return _receipt(step)

    def _run(self, frame: DataFrame, columns: EventColumns, plan: Plan) -> list[PartitionOutcome]:
        """Publish the rows in one job."""
        rows = self._encoded(frame, columns, plan)
        if self.settings.staging is not None:
            rows = self._staged(rows, plan)
        tasks = min(len(plan.partitions), self.settings.max_tasks or len(plan.partitions))
        placed = rows.selectExpr("*", "crc32(event) AS hash")
        # Correctness requires that no hub partition is split. Before Spark 4.1, some tasks get several of them.
        if hasattr(placed, "repartitionById"):
            placed = placed.repartitionById(tasks, "partition")
        else:
            placed = placed.repartition(tasks, "partition")
        ordering = [name for name in rows.columns if name.startswith("order_")]
        placed = placed.sortWithinPartitions("partition", *ordering, "hash", "event").select("partition", "event")
        task = PublishTask(self.settings.connection, plan)
        return [decode_outcome(row["outcome"]) for row in placed.mapInArrow(task, OUTCOME_DDL).collect()]

    def _encoded(self, frame: DataFrame, columns: EventColumns, plan: Plan) -> DataFrame:
        task = EncodeTask(
            columns, len(plan.partitions), self._message_limit(), stamp_room(plan), plan.router, self.settings.encode
        )
        names = encoded_names(len(columns.order_by))
        kinds = [IntegerType(), *(frame.schema[name].dataType for name in columns.order_by), BinaryType()]
        return _selected(frame, columns).mapInArrow(
            task, StructType([StructField(name, kind) for name, kind in zip(names, kinds, strict=True)])
        )

    def _message_limit(self) -> int:
        """Return the service's limit for one message, in bytes."""
        if not self._max_message_size:
            self._max_message_size = worker.run(message_limit(self.settings.connection))
        return self._max_message_size

    # ------------------------------------------------------------------------------------------ what is kept

    def _store(self) -> LedgerStore:
        """Open the ledger, once per process."""
        store: LedgerStore = self.settings.ledger
        if self._opened_by != os.getpid():
            worker.run(store.open())
            self._opened_by = os.getpid()
        return store

    def _staged(self, rows: DataFrame, plan: Plan) -> DataFrame:
        """Write the rows, unless an earlier attempt has, and return the rows that were written first."""
        store, sink = self._store(), directory_name(plan.sink.sink_id)
        name = f"{sink}/{staged.record_name(plan.batch_id)}"
        raw = worker.run(store.read(name))
        if raw is None:
            assert self.settings.staging is not None
            rows_at = staged.write(rows, staged.batch_directory(self.settings.staging, sink, plan.batch_id))
            raw = rows_at.encode()
            if not worker.run(store.create(name, raw)):
                raw = worker.run(store.read(name))
                assert raw is not None, "an existing record is gone"
        return staged.read(rows.sparkSession, staged.Staged.decode(raw))

    def _unstage(self, spark: SparkSession, sink_id: str, batch_id: int) -> None:
        assert self.settings.staging is not None
        store, sink = self._store(), directory_name(sink_id)
        staged.discard(spark, staged.batch_directory(self.settings.staging, sink, batch_id))
        worker.run(store.delete(f"{sink}/{staged.record_name(batch_id)}"))


def stamp_room(plan: Plan) -> int:
    """Return the most bytes that a stamp adds to an event."""
    if not plan.is_stamped:
        return 0
    stamp = plan.stamp(max(plan.partition_ids, key=len), _LAST_ROW)
    return len(section(APPLICATION_PROPERTIES, {STAMP: stamp})) + _LARGER_FORMS


def _selected(frame: DataFrame, columns: EventColumns) -> DataFrame:
    """Select the columns of events, in the order that encoders expect; a column may be selected twice."""
    quoted = [f"`{name.replace('`', '``')}`" for name in columns.names]
    return frame.selectExpr(*(f"{name} AS column_{number}" for number, name in enumerate(quoted)))


def _query_id(frame: DataFrame) -> str | None:
    """Return the id of the batch's query; None if Spark does not provide it."""
    try:
        context = frame.sparkSession.sparkContext
    except AttributeError:  # a Connect client has none
        return None
    found = context.getLocalProperty(_QUERY_ID)
    return found or None


def _receipt(done: Done) -> BatchReceipt:
    return BatchReceipt(
        done.sink.sink_id,
        done.batch_id,
        tuple(
            PublishedRows(each.partition_id, each.first_number, each.last_number, each.count) for each in done.receipts
        ),
    )


# ---------------------------------------------------------------------------------------------------- the public way


def foreach_batch_producer(
    connection_string: str | None = None,
    hub: str | None = None,
    *,
    sink_id: str | None = None,
    ledger: str | os.PathLike[str] | LedgerStore | None = None,
    idempotent: bool = True,
    staging: bool | str = False,
    on_receipt: Callable[[BatchReceipt], None] | None = None,
    **options: Unpack[SinkOptions],
) -> ForeachBatchWriter:
    """Return a function for `foreachBatch` that publishes every row exactly once, in order per hub partition.

    ::

        producer = foreach_batch_producer(connection_string, "alerts", sink_id="alerts", ledger="/srv/ledgers")
        frame.writeStream.foreachBatch(producer).option("checkpointLocation", "/srv/checkpoint").start()

    The DataFrame has a column `body`, string or binary; and optionally `partition` (or `partitionId`) or
    `partitionKey`, and `properties`, map<string,string>. For a row without partition and key, the partition is chosen
    by a hash of the row.

    Exactly once holds as long as the query returns the same rows when a batch is repeated (otherwise use `staging`),
    and Spark's checkpoint and the ledger are both kept.

    Args:
        connection_string: As shown in the Azure portal; alternatively set `fully_qualified_namespace` and `credential`,
            which is "module:callable".
        hub: The hub's name; optional if the connection string has an `EntityPath`.
        staging: See `sink.foreach_batch.SinkSettings`; True selects a directory next to the ledger's records, if
            `ledger` is a directory that executors can write to as well.
        on_receipt: Called with the published rows of each batch, where the batches are published: in the driver, or
            with Connect on the server. It is called again if a batch is repeated.
        options: See `sink.foreach_batch.SinkOptions`; units and defaults are in `sink.foreach_batch.SinkSettings` and
            :class:`eventpump.spark.connection.SparkConnection`.

    Raises:
        ConfigurationError: A value is invalid.
    """
    given: dict[str, Any] = {**options}
    connection = {name: given.pop(name) for name in ConnectionOptions.__annotations__ if name in given}
    settings = {
        "connection": SparkConnection.model_validate(
            {"connection_string": connection_string, "hub": hub, **connection}
        ),
        "sink_id": sink_id,
        "ledger": ledger,
        "idempotent": idempotent,
        "staging": _staging_root(staging, ledger),
        **given,
    }
    return ForeachBatchWriter(SinkSettings.model_validate(settings), on_receipt)


def _staging_root(staging: bool | str, ledger: object) -> str | None:
    if not isinstance(staging, bool):
        return staging
    if not staging:
        return None
    if not isinstance(ledger, str | os.PathLike) or "://" in os.fspath(ledger):
        raise ConfigurationError(
            "staging", "must be a path or URI that executors can write to, because the ledger is not a directory"
        )
    return f"{staged.LOCAL}{Path(ledger).absolute().as_posix()}/{_STAGING}"
