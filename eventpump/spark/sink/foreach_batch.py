"""The foreachBatch producer: each micro-batch of a query is published by its executors, exactly once.

One batch is one job. Its first stage encodes rows and gives each its hub partition; the shuffle brings the rows of a
partition to one task, which publishes them in an order that follows from the rows alone. The ledger stands around the
job: before it the plan, which says what number each row has, and after it the record that the batch is done. So a task
may fail, run again or run twice at a time, and so may the driver; see :mod:`eventpump.spark.sink.protocol`.
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
from eventpump.options.base import Name, SettingsModel
from eventpump.spark import worker
from eventpump.spark.connection import SparkConnection
from eventpump.spark.sink import staging as staged
from eventpump.spark.sink.at_least_once import RECEIPTS_DDL, SendTask, message_limit, retried
from eventpump.spark.sink.encode import EventColumns
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
"""Bytes that the map of properties, and what holds the event, take more in their larger forms."""
_STAGING: Final = "staging~"
"""The directory beside a ledger's sinks; none of them is spelled with a tilde."""


# ---------------------------------------------------------------------------------------------------- receipts


@dataclass(frozen=True, slots=True)
class PublishedRows:
    """What a batch has published to one hub partition.

    Args:
        partition_id: None for events whose partition the service chose, and does not tell.
        first: The published number of the first row; None where it was sent without numbers. After a take-over, of the
            first row that was published since.
        last: The published number of the last row; smaller than `first` where numbers began anew at 0.
        count: How many rows there are.
    """

    partition_id: str | None
    first: int | None
    last: int | None
    count: int


@dataclass(frozen=True, slots=True)
class BatchReceipt:
    """What a batch has published.

    Args:
        sink_id: None where the sink keeps no ledger.
        partitions: Those that got rows, by number.
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


def _names(value: object) -> object:
    return (value,) if isinstance(value, str) else value


class SinkSettings(SettingsModel):
    """How batches are published.

    Args:
        sink_id: The sink's name in its ledger, the same over restarts, for one query and one hub; None for the id of
            the query, which Spark Connect does not tell.
        ledger: A directory that every driver of the query sees; the URL of a blob container, with a signature; or a
            store, such as `BlobLedger`.
        idempotent: Publish every row exactly once; otherwise at least once, and without a ledger.
        staging: A directory, by path or URI, that driver and executors can write: each batch's rows are written there,
            and published from there, so that a query may give other rows when a batch is repeated.
        order_by: Columns that order the rows of a hub partition; rows they leave equal have an order that follows from
            the rows, and so have all rows without it.
        stamp: Add the property `eventpump:stamp` to every event: sink, batch, partition and place.
        on_producer_state_lost: What follows when the service has forgotten what it had of a batch: "fail", "tailScan"
            (needs `stamp`), or "atLeastOnce".
        max_tasks: How many tasks publish at a time; None for one per hub partition. With fewer, a task publishes
            several partitions one after another.
        max_batch_events: Events of a message, at most.
        max_batch_bytes: Of a message, at most; a larger event goes alone.
    """

    connection: SparkConnection
    sink_id: Name | None = None
    ledger: Annotated[Any, BeforeValidator(_ledger)] = None
    idempotent: bool = True
    staging: str | None = None
    order_by: Annotated[tuple[str, ...], BeforeValidator(_names)] = ()
    stamp: bool = False
    on_producer_state_lost: OnProducerStateLost = OnProducerStateLost.FAIL
    max_tasks: int | None = Field(default=None, ge=1)
    max_batch_events: int = Field(default=PackingLimits().max_events, ge=1, le=1_000_000)
    max_batch_bytes: int = Field(default=PackingLimits().max_bytes, ge=1024)

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.idempotent:
            if self.ledger is None:
                raise ConfigurationError("ledger", "is required: a directory, or the URL of a blob container")
            if self.on_producer_state_lost is OnProducerStateLost.TAIL_SCAN and not self.stamp:
                raise ConfigurationError("on_producer_state_lost", "tailScan takes events with stamps: stamp=True")
            if self.sink_id is not None:
                directory_name(self.sink_id)
            return self
        for name in ("ledger", "sink_id", "staging", "order_by", "stamp"):
            if getattr(self, name):
                raise ConfigurationError(name, "is for the idempotent sink only")
        return self

    @property
    def limits(self) -> PackingLimits:
        """How messages are packed."""
        return PackingLimits(max_events=self.max_batch_events, max_bytes=self.max_batch_bytes)


class ConnectionOptions(TypedDict, total=False):
    """Keyword arguments that say how to connect; see :class:`eventpump.spark.connection.SparkConnection`."""

    fully_qualified_namespace: str
    credential: str
    custom_endpoint_address: str
    ca_file: str
    auth_timeout: float
    operation_timeout: float
    idle_timeout: float


class SinkOptions(ConnectionOptions, total=False):
    """Keyword arguments of :func:`foreach_batch_producer`; see :class:`SinkSettings`."""

    order_by: str | Sequence[str]
    stamp: bool
    on_producer_state_lost: OnProducerStateLost | Literal["fail", "tailScan", "atLeastOnce"]
    max_tasks: int
    max_batch_events: int
    max_batch_bytes: int


# ---------------------------------------------------------------------------------------------------- the writer


class ForeachBatchWriter:
    """Publishes micro-batches: what :func:`foreach_batch_producer` gives to `foreachBatch`.

    It is made where the query is defined and called where the batches are: it can be pickled, and what belongs to a
    process is made when it is first called there.

    Attributes:
        settings: How it publishes.
    """

    def __init__(self, settings: SinkSettings, on_receipt: Callable[[BatchReceipt], None] | None = None) -> None:
        self.settings = settings
        self._on_receipt = on_receipt
        self._opened_by: int | None = None
        self._max_message_size = 0

    def __call__(self, frame: DataFrame, batch_id: int) -> None:
        """Publish a micro-batch, and return when all of it is stored.

        A batch that is done already is not published again; its receipt is.

        Raises:
            ConfigurationError: A column is missing or of a wrong type, or the ledger does not fit the query.
            ProducerStateLostError: The service has forgotten what it had of the batch.
            EventPumpError: The service or the ledger failed; nothing is lost or stored twice when the batch is
                repeated.
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
        task = SendTask(connection, columns, len(hub.partition_ids), idempotent=False)
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
            raise ConfigurationError("sink_id", "is required where Spark does not tell the query's id, as with Connect")
        transport = worker.transport(settings.connection)
        batch = Batch(
            sink_of(transport, settings.connection.hub, sink_id),
            query_id,
            uuid.uuid4().hex,
            batch_id,
            settings.limits,
            settings.stamp,
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
        """Publish the rows by one job."""
        rows = self._encoded(frame, columns, plan)
        if self.settings.staging is not None:
            rows = self._staged(rows, plan)
        tasks = min(len(plan.partitions), self.settings.max_tasks or len(plan.partitions))
        placed = rows.selectExpr("*", "crc32(event) AS hash")
        # What correctness needs is that no hub partition is divided. Below Spark 4.1 some tasks get several of them.
        if hasattr(placed, "repartitionById"):
            placed = placed.repartitionById(tasks, "partition")
        else:
            placed = placed.repartition(tasks, "partition")
        ordering = [name for name in rows.columns if name.startswith("order_")]
        placed = placed.sortWithinPartitions("partition", *ordering, "hash", "event").select("partition", "event")
        task = PublishTask(self.settings.connection, plan)
        return [decode_outcome(row["outcome"]) for row in placed.mapInArrow(task, OUTCOME_DDL).collect()]

    def _encoded(self, frame: DataFrame, columns: EventColumns, plan: Plan) -> DataFrame:
        task = EncodeTask(columns, len(plan.partitions), self._message_limit(), stamp_room(plan))
        names = encoded_names(len(columns.order_by))
        kinds = [IntegerType(), *(frame.schema[name].dataType for name in columns.order_by), BinaryType()]
        return _selected(frame, columns).mapInArrow(
            task, StructType([StructField(name, kind) for name, kind in zip(names, kinds, strict=True)])
        )

    def _message_limit(self) -> int:
        """Learn what the service takes in one message, in bytes."""
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
        """Write the rows, unless an earlier attempt has, and read back what was written first."""
        store, sink = self._store(), directory_name(plan.sink.sink_id)
        name = f"{sink}/{staged.record_name(plan.batch_id)}"
        raw = worker.run(store.read(name))
        if raw is None:
            assert self.settings.staging is not None
            rows_at = staged.write(rows, staged.batch_directory(self.settings.staging, sink, plan.batch_id))
            raw = rows_at.encode()
            if not worker.run(store.create(name, raw)):
                raw = worker.run(store.read(name))
                assert raw is not None, "a record that was there is gone"
        return staged.read(rows.sparkSession, staged.Staged.decode(raw))

    def _unstage(self, spark: SparkSession, sink_id: str, batch_id: int) -> None:
        assert self.settings.staging is not None
        store, sink = self._store(), directory_name(sink_id)
        staged.discard(spark, staged.batch_directory(self.settings.staging, sink, batch_id))
        worker.run(store.delete(f"{sink}/{staged.record_name(batch_id)}"))


def stamp_room(plan: Plan) -> int:
    """Return what a stamp adds to an event at most, in bytes."""
    if not plan.is_stamped:
        return 0
    stamp = plan.stamp(max(plan.partition_ids, key=len), _LAST_ROW)
    return len(section(APPLICATION_PROPERTIES, {STAMP: stamp})) + _LARGER_FORMS


def _selected(frame: DataFrame, columns: EventColumns) -> DataFrame:
    """Select what makes events, in the order that encoders expect; one column may stand there twice."""
    quoted = [f"`{name.replace('`', '``')}`" for name in columns.names]
    return frame.selectExpr(*(f"{name} AS column_{number}" for number, name in enumerate(quoted)))


def _query_id(frame: DataFrame) -> str | None:
    """Learn the id of the query whose batch this is; None where Spark does not tell it."""
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
    """Make what publishes a query's micro-batches to a hub: every row exactly once, in order per hub partition.

    ::

        producer = foreach_batch_producer(connection_string, "alerts", sink_id="alerts", ledger="/srv/ledgers")
        frame.writeStream.foreachBatch(producer).option("checkpointLocation", "/srv/checkpoint").start()

    The DataFrame has a column `body`, string or binary; and, as far as wanted, `partition` (or `partitionId`) or
    `partitionKey`, and `properties`, map<string,string>. A row without partition and key goes by a hash of itself.

    Exactly once holds as long as the query gives the same rows when a batch is repeated (otherwise: `staging`), and
    Spark's checkpoint and the ledger are both kept.

    Args:
        connection_string: As the portal gives it; or give `fully_qualified_namespace` and `credential`, which is
            "module:callable".
        hub: The hub; may be left out where the connection string has an `EntityPath`.
        staging: See :class:`SinkSettings`; True is a directory beside the ledger's records, where `ledger` is one that
            executors can write too.
        on_receipt: Is called with what each batch has published, where the batches are published: in the driver, or
            with Connect on the server. A batch that is repeated calls it again.
        options: See :class:`SinkOptions`; units and defaults stand in :class:`SinkSettings` and
            :class:`eventpump.spark.connection.SparkConnection`.

    Raises:
        ConfigurationError: A value that cannot work.
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
            "staging", "takes a path or URI that executors can write, where the ledger is no directory"
        )
    return f"{staged.LOCAL}{Path(ledger).absolute().as_posix()}/{_STAGING}"
