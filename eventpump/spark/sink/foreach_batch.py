"""The foreachBatch producer: each micro-batch of a query is published exactly once.

A batch is one job. Its first stage encodes rows and assigns each its hub partition. Of a small batch, the driver
collects what that stage returns, and publishes it. Of a larger one, the shuffle moves the rows of a partition to one
task, in blocks (see :mod:`eventpump.spark.sink.blocks`), and the task publishes them. Either way the order depends only
on the rows. The ledger encloses the publishing: before
it, the plan with the number of each row is stored; after it, the record that the batch is done. So a task can fail, run
again or run twice at a time, and so can the driver, and a batch may be repeated in the other way; see
:mod:`eventpump.spark.sink.protocol`.
"""

from __future__ import annotations

import hashlib
import logging
import os
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Self, TypeVar, Unpack

from pydantic import BeforeValidator, Field, model_validator
from pyspark.sql.types import BinaryType, IntegerType, StructField, StructType

from eventpump.errors import ConfigurationError, StoreError
from eventpump.eventhubs.codecs import PayloadCodec
from eventpump.eventhubs.stamps import row_stamp_prefix, stamped
from eventpump.logs import retry_logger
from eventpump.options.base import Name, RetryOptions, Seconds, SettingsModel
from eventpump.options.callables import check_codecs, loaded_codecs
from eventpump.spark import worker
from eventpump.spark.connection import RETRY_TIMEOUT, SparkConnection, SparkConnectionOptions
from eventpump.spark.sink import staging as staged
from eventpump.spark.sink.at_least_once import RECEIPTS_DDL, SendTask, message_limit
from eventpump.spark.sink.blocks import BLOCKS_TYPE, merged_rows
from eventpump.spark.sink.calls import BatchCalls
from eventpump.spark.sink.columns import EventColumns
from eventpump.spark.sink.encode import SinkRouter, StableRouter
from eventpump.spark.sink.exactly_once import (
    PublishOptions,
    finish_batch,
    plan_batch,
    planned_batch,
    prepare_batch,
    sink_of,
)
from eventpump.spark.sink.executor import (
    COLLECTED_TYPE,
    DIGEST_DDL,
    OUTCOME_DDL,
    BlockTask,
    CollectTask,
    DigestTask,
    EncodeTask,
    PublishTask,
    RowsOf,
    encoded_names,
    sorted_rows,
)
from eventpump.spark.sink.patience import patiently, retried
from eventpump.spark.sink.protocol import DriverRun, MicroBatch, OnProducerStateLost, Unplanned, require_form
from eventpump.spark.sink.records import (
    Done,
    PackingLimits,
    PartitionOutcome,
    Plan,
    RowForm,
    Sink,
    decode_outcome,
    directory_name,
)
from eventpump.spark.sink.small import (
    COLLECTED_BYTES,
    BatchSizes,
    KeptPublishers,
    SmallBatches,
    compare_shares,
    is_orderable,
    publish_shares,
    shares_of,
    unpacked,
)
from eventpump.storage.ledgers.interface import LedgerStore
from eventpump.storage.ledgers.opening import open_ledger
from eventpump.telemetry.interface import ClientTelemetry, checked

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from eventpump.telemetry.telemetry import Telemetry

_log = logging.getLogger("eventpump.spark")

T = TypeVar("T")

_CALLS: Final = BatchCalls()
_QUERY_ID: Final = "sql.streaming.queryId"
_LAST_ROW: Final = 2**63 - 1
_LARGER_FORMS: Final = 12
"""Additional bytes of the map of properties, and of the event's envelope, in their larger forms."""
_ROWS_PER_TASK: Final = 10_000
"""Rows of a batch for which another task is worth its start."""
_FEW_TASKS: Final = 4
_UNKNOWN_SLOTS: Final = 16
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
            a store, such as `BlobLedger`. The container has to exist. None only with `idempotent=False`.
        idempotent: Whether to publish every row exactly once; otherwise at least once, and without a ledger. Default:
            True.
        staging: A directory, as path or URI, that driver and executors can write to: each batch's rows are written
            there, and published from there, so that a query may return other rows when a batch is repeated. None for no
            staging.
        order_by: Columns that order the rows of a hub partition, such as "sequenceNumber"; rows that are equal in them,
            and all rows without it, are ordered by their content, also those of a key. Default: `()`.
        stamp: Whether to add the property `eventpump:stamp` to every event: sink, batch, partition and row index.
            Default: False.
        on_producer_state_lost: What happens if the service has forgotten which rows of a batch it has stored: "fail",
            "tailScan" (needs `stamp`), or "atLeastOnce". Default: "fail".
        router: How rows without a partition are routed. "hash": by key as the service does, and others by their
            content. "ring": keys by a consistent ring, as `RingRouter` does. With `idempotent=False` also
            "round-robin", whatever the key, and "sticky", one partition per message for rows without key. Default:
            "hash".
        encode: Compresses or encrypts bodies: a `PayloadCodec`, or several that are applied in this order; or
            "module:name", the import name of either in every process. Publishing exactly once without `staging`, they
            must return the same bytes for the same body, which encryption with a random nonce does not. Default: `()`.
        max_tasks: The most tasks that publish a batch; None for as many as its expected size asks for, one per hub
            partition at most. A task publishes several partitions at the same time.
        small_batches: Which batches the driver publishes itself, without tasks and a shuffle, over links that it keeps.
            "auto": those expected to be small, by the batch before. "always": every one; "never": none. A batch
            that turns out to be larger than 4 MiB is published by tasks in any case, and the query evaluated a second
            time for that. With `staging`, or an `order_by` that only Spark can order by (structs, arrays, intervals,
            collations), tasks publish every batch. Default: "auto".
        first_batch: The number of the query's batch that is the first for this sink, where that is not 0, as for a sink
            that was added to a query, or is not called for every batch. At another batch that may be repeated, into a
            hub that has had events, a ledger without records is an error. Default: 0.
        retry_timeout: Seconds for which an outage of the service or of the ledger is waited for without any progress,
            before the query fails with the last error. Default: 120.0.
        max_batch_events: The most events in a message. Default: 5000.
        max_batch_bytes: The largest size of a message in bytes, at most the service's limit; a larger event is sent
            alone. Default: 1048576 (1 MiB).
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
    small_batches: SmallBatches = "auto"
    first_batch: int = Field(default=0, ge=0)
    retry_timeout: Seconds = RETRY_TIMEOUT
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
        for name in ("ledger", "sink_id", "staging", "order_by", "stamp", "first_batch"):
            if getattr(self, name):
                raise ConfigurationError(name, "is only for the idempotent sink")
        return self

    @property
    def publishing(self) -> PublishOptions:
        """The options of attempts."""
        retry = self.connection.retry or RetryOptions()
        return PublishOptions(retry=retry, retry_timeout=self.retry_timeout)

    @property
    def limits(self) -> PackingLimits:
        """The limits for packing messages."""
        return PackingLimits(max_events=self.max_batch_events, max_bytes=self.max_batch_bytes)


class SinkOptions(SparkConnectionOptions, total=False):
    """Keyword arguments of :func:`foreach_batch_producer`; see `sink.foreach_batch.SinkSettings`."""

    order_by: str | Sequence[str]
    stamp: bool
    router: SinkRouter
    encode: str | PayloadCodec | Sequence[PayloadCodec]
    on_producer_state_lost: OnProducerStateLost | Literal["fail", "tailScan", "atLeastOnce"]
    max_tasks: int
    small_batches: SmallBatches
    first_batch: int
    retry_timeout: float
    max_batch_events: int
    max_batch_bytes: int


# ---------------------------------------------------------------------------------------------------- the writer


class _Running:
    """What a run of the driver has in one process."""

    def __init__(self, small_batches: SmallBatches) -> None:
        self.process_id = os.getpid()
        self.driver = DriverRun(uuid.uuid4().hex)
        self.kept = KeptPublishers()
        self.sizes = BatchSizes(small_batches)
        self.encoding: EncodeTask | None = None
        """How the rows of the last batch were encoded."""
        worker.close_first(self.kept)


@dataclass(frozen=True)
class _Collected:
    """The rows of a small batch.

    Args:
        encoding: How they were encoded.
        shares: Encoded rows by the partition's number, in the order of the plan's numbers.
    """

    encoding: EncodeTask
    shares: dict[int, list[bytes]]


class ForeachBatchWriter:
    """Publishes micro-batches: the callable that :func:`foreach_batch_producer` returns for `foreachBatch`.

    It is created where the query is defined and called where the batches are: it can be pickled, and process-wide
    objects are created at its first call there.

    Args:
        settings: The options of the producer.
        on_receipt: Called with the published rows of each batch, as of `foreach_batch_producer`. Default: None.
        telemetry: Records each batch, as of `foreach_batch_producer`. Default: None.

    Attributes:
        settings: The options of the producer.
    """

    def __init__(
        self,
        settings: SinkSettings,
        on_receipt: Callable[[BatchReceipt], None] | None = None,
        telemetry: ClientTelemetry | None = None,
    ) -> None:
        self.settings = settings
        self._on_receipt = on_receipt
        self._telemetry = telemetry
        self._states: dict[str, _Running] = {}
        self._opened_by: int | None = None
        self._max_message_size = 0
        self._has_warned_of_order = False

    def __getstate__(self) -> dict[str, Any]:
        # Elsewhere it is another run, with a ledger to open.
        return {**self.__dict__, "_states": {}, "_opened_by": None}

    def _running(self, sink_id: str) -> _Running:
        """Return what this process has of a sink's run. Without a `sink_id`, several queries may use one writer."""
        state = self._states.get(sink_id)
        if state is None or state.process_id != os.getpid():
            state = self._states[sink_id] = _Running(self.settings.small_batches)
        return state

    def __call__(self, frame: DataFrame, batch_id: int) -> None:
        """Publish a micro-batch, and return when all of it is stored.

        Called once for a batch in each run of a query. A batch that an earlier run has published is not published
        again, but `on_receipt` is called again.

        Raises:
            ConfigurationError: A column is missing or has a wrong type; the ledger does not match the query, or the
                rows those that an earlier run has stored; or it is called twice for a batch.
            ProducerStateLostError: The service has forgotten which rows of the batch it has stored.
            EventPumpError: The service or the ledger failed; when the batch is repeated, nothing is lost or stored
                twice.
        """
        columns = EventColumns.of(frame.schema, self.settings.order_by)
        publish = partial(self._publish if self.settings.idempotent else self._send, frame, columns, batch_id)
        receipt = publish() if self._telemetry is None else self._recorded(self._telemetry, publish)
        if self._on_receipt is not None:
            self._on_receipt(receipt)

    def _recorded(self, telemetry: ClientTelemetry, publish: Callable[[], BatchReceipt]) -> BatchReceipt:
        """Publish a batch, and record it."""
        connection = self.settings.connection
        recorder = telemetry.of_sink(connection.hub, self.settings.sink_id, worker.transport(connection))
        return recorder.publishing(publish, lambda done: {each.partition_id: each.count for each in done.partitions})

    def __repr__(self) -> str:
        return f"ForeachBatchWriter(hub={self.settings.connection.hub!r}, sink_id={self.settings.sink_id!r})"

    # ------------------------------------------------------------------------------------------ at least once

    def _send(self, frame: DataFrame, columns: EventColumns, batch_id: int) -> BatchReceipt:
        connection = self.settings.connection
        ask = partial(worker.transport(connection).get_hub_properties, connection.hub)
        hub = worker.run(retried(ask, self.settings.retry_timeout))
        task = SendTask(
            connection,
            columns,
            len(hub.partition_ids),
            idempotent=False,
            router=self.settings.router,
            retry_timeout=self.settings.retry_timeout,
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
        query = _RunningQuery.of(frame)
        query_id = query.query_id
        sink_id = settings.sink_id or query_id
        if sink_id is None:
            raise ConfigurationError("sink_id", "is required if Spark does not provide the query's id, as with Connect")
        transport = worker.transport(settings.connection)
        running = self._running(sink_id)
        sink = sink_of(transport, settings.connection.hub, sink_id)
        self._warn_of_order(sink_id, columns)
        batch = MicroBatch(
            sink,
            query_id,
            running.driver,
            batch_id,
            settings.limits,
            settings.stamp,
            router="ring" if settings.router == "ring" else "hash",
            first_batch=settings.first_batch,
            form=RowForm(
                order_by=tuple(name.lower() for name in columns.order_by),
                encode=tuple(each.content_encoding for each in loaded_codecs("encode", settings.encode)),
                is_staged=settings.staging is not None,
            ),
            may_repeat=query.newest_batch is None or query.newest_batch >= batch_id,
        )
        # Without the run's id, a batch that is done is compared, which staged rows cannot be.
        is_certain = query.run_id is not None or settings.staging is not None
        with _CALLS.call(sink, query.run_id or running.driver.run_id, batch_id, is_certain=is_certain):
            publication = _Publication(self, frame, columns, batch, self._store(), query)
            done = publication.publish()
            if settings.staging is not None:
                self._unstage(frame.sparkSession, sink_id, batch_id)
        return _receipt(done)

    def _warn_of_order(self, sink_id: str, columns: EventColumns) -> None:
        """Log, once, that rows of a key are not in the order of the source."""
        if columns.partition_key is None or columns.order_by or self._has_warned_of_order:
            return
        self._has_warned_of_order = True
        _log.warning(
            "sink %r: the rows have keys, and no order_by: those of a key are published in an order made of their "
            "content, not in that of the source. Set order_by to the columns that order them, such as %r",
            sink_id,
            columns.sequence_number or "sequenceNumber",
        )

    def _message_limit(self) -> int:
        """Return the service's limit for one message, in bytes."""
        if not self._max_message_size:
            ask = partial(message_limit, self.settings.connection)
            self._max_message_size = worker.run(retried(ask, self.settings.retry_timeout))
        return self._max_message_size

    # ------------------------------------------------------------------------------------------ what is kept

    def _store(self) -> LedgerStore:
        """Open the ledger, once per process."""
        store: LedgerStore = self.settings.ledger
        if self._opened_by != os.getpid():
            self._ask_store(store.open)
            self._opened_by = os.getpid()
        return store

    def _ask_store(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Call the ledger's store, again where it failed, until `retry_timeout` is over."""
        settings = self.settings
        on_retry = retry_logger(_log, "ledger", hub=settings.connection.hub)
        base_delay = settings.publishing.retry.base_delay
        return worker.run(patiently(ask, settings.retry_timeout, base_delay=base_delay, on_retry=on_retry))

    def _staged(self, rows: DataFrame, plan: Plan) -> tuple[DataFrame, bool]:
        """Write the rows, unless an earlier attempt has.

        Returns:
            The rows that were written first, and whether these were evaluated.
        """
        store, sink = self._store(), directory_name(plan.sink.sink_id)
        name = f"{sink}/{staged.record_name(plan.batch_id)}"
        raw = self._ask_store(lambda: store.read(name))
        is_evaluated = False
        if raw is None:
            assert self.settings.staging is not None
            body = staged.write(rows, staged.batch_directory(self.settings.staging, sink, plan.batch_id)).encode()
            is_first = self._ask_store(lambda: store.create(name, body))
            raw = body if is_first else self._ask_store(lambda: store.read(name))
            assert raw is not None, "an existing record is gone"
            is_evaluated = True
        return staged.read(rows.sparkSession, staged.Staged.decode(raw)), is_evaluated

    def _unstage(self, spark: SparkSession, sink_id: str, batch_id: int) -> None:
        """Delete the rows of a batch that is done. If that fails, it is logged."""
        assert self.settings.staging is not None
        store, sink = self._store(), directory_name(sink_id)
        name = f"{sink}/{staged.record_name(batch_id)}"
        directories = {staged.batch_directory(self.settings.staging, sink, batch_id)}
        try:
            raw = worker.run(store.read(name))
            if raw is not None:  # the option may be another than when the rows were written
                directories.add(staged.Staged.decode(raw).directory.rpartition("/")[0])
            for directory in directories:
                staged.discard(spark, directory)
            worker.run(store.delete(name))
        except StoreError as error:
            _log.warning("batch %d of the sink %r is done, but its staged rows are left: %s", batch_id, sink_id, error)


class _Publication:
    """One batch on its way, in one of the two ways."""

    def __init__(
        self,
        writer: ForeachBatchWriter,
        frame: DataFrame,
        columns: EventColumns,
        batch: MicroBatch,
        store: LedgerStore,
        query: _RunningQuery,
    ) -> None:
        self._writer = writer
        self._settings = writer.settings
        self._running = writer._running(batch.sink.sink_id)  # noqa: SLF001 - it is of this module
        self._options = writer.settings.publishing
        self._frame = frame
        self._columns = columns
        self._batch = batch
        self._store = store
        self._query = query
        self._transport = worker.transport(writer.settings.connection)
        self._collected: _Collected | None = None
        self._has_overflowed = False
        self._is_evaluated = False
        """Whether all rows were evaluated, or will be by the job that is prepared."""

    def publish(self) -> Done:
        """Publish the batch, or find that it is done."""
        running, ledger = self._running, (self._store, self._transport)
        with worker.running(self._patient(partial(prepare_batch, *ledger, self._batch, self._options))) as preparing:
            # Meanwhile the rows are encoded, as those of the last batch were.
            if running.encoding is not None and self._is_small():
                self._collect(replace(running.encoding, columns=self._columns))
            step = preparing.result()
        if isinstance(step, Done):
            if None in (step.query_id, self._query.query_id, self._query.run_id):
                self._require_same_rows(step)
            self._evaluate()
            running.sizes.last_rows = _count(step)
            return step
        if isinstance(step, Unplanned) and running.sizes.last_rows is None and step.prior is not None:
            running.sizes.last_rows = _count(step.prior)
        is_first = False
        if isinstance(step, Unplanned):
            used: list[str] | None = None
            if self._is_collected(self._encoding(len(step.partition_ids), self._batch.router, self._batch.is_stamped)):
                used = [step.partition_ids[each] for each in self._shares]
            step = worker.run(self._patient(partial(plan_batch, *ledger, step, used, self._options)))
            is_first = step.run_id == self._batch.run_id
        compares = is_repeated = not is_first
        while isinstance(step, Plan):
            plan = step
            if is_repeated and any(each.offset for each in plan.partitions):
                _log.warning(
                    "batch %d of the sink %r was begun before: rows that were counted by their stamps, because the "
                    "service had lost a producer, are not compared with this query's",
                    plan.batch_id,
                    plan.sink.sink_id,
                )
            outcomes = self._outcomes(plan, is_first=is_first, compares=compares)
            is_first = compares = False
            finishing = partial(
                finish_batch, *ledger, self._batch, plan, outcomes, self._settings.on_producer_state_lost, self._options
            )
            step = worker.run(self._patient(finishing))
        running.sizes.published(_count(step))
        return step

    def _patient(self, attempt: Callable[[], Awaitable[T]]) -> Coroutine[Any, Any, T]:
        return retried(attempt, self._settings.retry_timeout)

    def _outcomes(self, plan: Plan, *, is_first: bool, compares: bool) -> list[PartitionOutcome]:
        if compares and self._settings.staging is not None and plan.form is not None and plan.form.is_staged:
            # What is stored is of the rows that were staged, and so is what follows.
            if None in (plan.query_id, self._batch.query_id):
                _log.warning(
                    "batch %d of the sink %r was begun, and goes on with the rows that were staged then; it is not "
                    "known whether it is this query's: Spark does not provide the query's id",
                    plan.batch_id,
                    plan.sink.sink_id,
                )
            compares = False
        encoding = self._encoding(len(plan.partitions), plan.router, plan.is_stamped)
        kept = self._running.kept
        if self._is_collected(encoding):
            shares = {plan.partition_ids[each]: events for each, events in self._shares.items()}
            publishing = publish_shares(
                self._transport, plan, shares, kept, self._options, is_first=is_first, compares=compares
            )
            return worker.run(publishing)
        worker.run(kept.aclose())  # tasks will publish under the same numbers
        task = PublishTask(self._settings.connection, plan, self._options, self._rows_of, compares=compares)
        placed = self._placed(encoding, plan)
        if compares:
            # A job of its own: no row is sent to any partition where those of another query are stored in one.
            used = {row["outcome"] for row in placed.mapInArrow(replace(task, sends=False), OUTCOME_DDL).collect()}
            losses = [decode_outcome(each) for each in used.difference(plan.partition_ids)]
            lost = {each.partition_id for each in losses}
            unused: dict[str, list[bytes]] = {each: [] for each in plan.partition_ids if each not in used | lost}
            worker.run(compare_shares(self._transport, plan, unused, self._options))
            if losses:
                return losses
        return [decode_outcome(row["outcome"]) for row in placed.mapInArrow(task, OUTCOME_DDL).collect()]

    # ------------------------------------------------------------------------------------------ rows

    def _encoding(self, partition_count: int, router: StableRouter, is_stamped: bool) -> EncodeTask:
        reserved = stamp_room(self._batch.sink, partition_count) if is_stamped else 0
        limit = self._writer._message_limit()  # noqa: SLF001 - it is of this module
        self._running.encoding = EncodeTask(
            self._columns, partition_count, limit, reserved, router, self._settings.encode
        )
        return self._running.encoding

    def _encoded(self, task: EncodeTask) -> DataFrame:
        names = encoded_names(len(self._columns.order_by))
        schema = self._frame.schema
        kinds = [IntegerType(), *(schema[name].dataType for name in self._columns.order_by), BinaryType()]
        return _selected(self._frame, self._columns).mapInArrow(
            task, StructType([StructField(name, kind) for name, kind in zip(names, kinds, strict=True)])
        )

    def _placed(self, encoding: EncodeTask, plan: Plan | None) -> DataFrame:
        """Encode the rows, and have all of a hub partition in one task, in order: for `_rows_of`.

        Args:
            plan: Of the batch; None to look at the rows only.
        """
        if self._is_in_blocks:
            blocks = _selected(self._frame, self._columns).mapInArrow(BlockTask(encoding), BLOCKS_TYPE)
            placed = self._gathered(blocks, encoding.partition_count)
            return placed.sortWithinPartitions("place").select("place", "block")
        rows = self._encoded(encoding)
        ordering = [name for name in rows.columns if name.startswith("order_")]
        if self._settings.staging is not None and plan is not None:
            rows, is_evaluated = self._writer._staged(rows, plan)  # noqa: SLF001 - it is of this module
            if is_evaluated:
                self._is_evaluated = True
            self._evaluate()
        placed = self._gathered(rows.selectExpr("*", "crc32(event) AS hash"), encoding.partition_count)
        return placed.sortWithinPartitions("partition", *ordering, "hash", "event").select("partition", "event")

    @property
    def _is_in_blocks(self) -> bool:
        """Whether rows are exchanged in blocks. Spark orders them by columns, and stages them, one by one."""
        return not self._columns.order_by and self._settings.staging is None

    @property
    def _rows_of(self) -> RowsOf:
        return merged_rows if self._is_in_blocks else sorted_rows

    def _gathered(self, rows: DataFrame, partition_count: int) -> DataFrame:
        """Have all rows of a hub partition in one task. Correctness requires that none is split."""
        tasks = self._tasks(partition_count)
        if tasks == 1 and (self._running.sizes.tasks or _FEW_TASKS + 1) <= _FEW_TASKS:
            return rows.coalesce(1)  # not for more: what they do would be done by one task, too
        if hasattr(rows, "repartitionById"):
            return rows.repartitionById(tasks, "partition")
        return rows.repartition(tasks, "partition")  # before Spark 4.1, some tasks get several partitions

    def _tasks(self, partition_count: int) -> int:
        """Return how many tasks publish the batch: as many as the rows need that it is expected to have."""
        most = min(partition_count, self._settings.max_tasks or partition_count)
        rows = self._running.sizes.expected_rows
        if rows is None:
            return min(most, 2 * _slots(self._frame.sparkSession))
        return min(most, 1 + rows // _ROWS_PER_TASK)

    # ------------------------------------------------------------------------------------------ small batches

    @property
    def _shares(self) -> dict[int, list[bytes]]:
        assert self._collected is not None
        return self._collected.shares

    def _is_small(self) -> bool:
        return (
            not self._has_overflowed
            and self._settings.staging is None
            and self._running.sizes.is_small
            and all(is_orderable(self._frame.schema[name].dataType) for name in self._columns.order_by)
        )

    def _evaluate(self) -> None:
        """Evaluate the rows, unless that was done, where they are not published.

        Spark requires it of each batch of a stateful query: the state of a repeated batch is stored by its evaluation.
        """
        if not self._is_evaluated:
            self._frame.write.format("noop").mode("overwrite").save()
            self._is_evaluated = True

    def _is_collected(self, encoding: EncodeTask) -> bool:
        """Collect the rows if they are expected to be few. Return whether the driver has them, encoded like this."""
        if self._collected is not None and self._collected.encoding != encoding:
            self._collected = None
        if self._collected is None and self._is_small():
            self._collect(encoding)
        return self._collected is not None

    def _collect(self, encoding: EncodeTask) -> None:
        """Collect the encoded rows, unless they turn out to be too many."""
        sizes = self._running.sizes
        tasks = sizes.tasks or max(_slots(self._frame.sparkSession), _shuffle_tasks(self._frame.sparkSession))
        task = CollectTask(encoding, tasks, COLLECTED_BYTES)
        found = [
            row["rows"] for row in _selected(self._frame, self._columns).mapInArrow(task, COLLECTED_TYPE).collect()
        ]
        if None in found:
            self._has_overflowed = True
            sizes.overflowed(len(found))
            return
        self._is_evaluated = True
        shares = shares_of(unpacked(found))
        sizes.collected(len(found), sum(map(len, shares.values())), sum(map(len, found)))
        self._collected = _Collected(encoding, shares)

    # ------------------------------------------------------------------------------------------ repeated batches

    def _require_same_rows(self, done: Done) -> None:
        """Check that a batch which is done has the rows that it had, where it may be another query's, or a second call.

        Raises:
            ConfigurationError: It has others.
        """
        if self._settings.staging is not None:
            _log.warning(
                "batch %d of the sink %r is done already and is not published; it is not known whether it is this "
                "query's: Spark does not provide the query's id, and staged rows may differ when they are repeated",
                done.batch_id,
                done.sink.sink_id,
            )
            return
        plan = worker.run(planned_batch(self._store, self._transport, self._batch, self._options))
        if plan is not None:
            require_form(self._batch, plan)
        router, is_stamped = (self._batch.router, False) if plan is None else (plan.router, plan.is_stamped)
        encoding = self._encoding(len(done.partitions), router, is_stamped)
        if self._is_collected(encoding):
            found = {
                done.partitions[each].partition_id: (len(events), hashlib.sha256(b"".join(events)).hexdigest())
                for each, events in self._shares.items()
            }
        else:
            rows = self._placed(encoding, None).mapInArrow(DigestTask(self._rows_of), DIGEST_DDL).collect()
            self._is_evaluated = True
            found = {done.partitions[each["partition"]].partition_id: (each["count"], each["digest"]) for each in rows}
        if found != {each.partition_id: (each.count, each.digest) for each in done.partitions if each.count}:
            raise ConfigurationError(
                "sink_id",
                f"batch {done.batch_id} of the sink {done.sink.sink_id!r} is done with other rows than this query's: "
                "it is another query's, this query returns other rows when a batch is repeated, or the producer is "
                "called twice for a batch. Nothing was sent; use another sink_id for a query with a new checkpoint, or "
                "for each call",
            )


def _count(done: Done) -> int:
    return sum(each.count for each in done.partitions)


def _slots(spark: SparkSession) -> int:
    """Return how many tasks Spark runs at a time."""
    try:
        return int(spark.sparkContext.defaultParallelism)
    except AttributeError:  # a Connect client has no context
        return _UNKNOWN_SLOTS


def _shuffle_tasks(spark: SparkSession) -> int:
    return int(spark.conf.get("spark.sql.shuffle.partitions") or _UNKNOWN_SLOTS)


def stamp_room(sink: Sink, partition_count: int) -> int:
    """Return the most bytes that a stamp adds to an event, in any batch: rows are encoded before theirs is known."""
    stamp = f"{row_stamp_prefix(sink.sink_id, _LAST_ROW, str(partition_count))}{_LAST_ROW}"
    return len(stamped(b"", stamp)) + _LARGER_FORMS


def _selected(frame: DataFrame, columns: EventColumns) -> DataFrame:
    """Select the columns of events, in the order that encoders expect; a column may be selected twice."""
    if not columns.order_by and frame.schema.names == columns.names:
        return frame  # selecting takes Spark some milliseconds, of which a small batch has few
    quoted = [f"`{name.replace('`', '``')}`" for name in columns.names]
    return frame.selectExpr(*(f"{name} AS column_{number}" for number, name in enumerate(quoted)))


@dataclass(frozen=True, slots=True)
class _RunningQuery:
    """The query that a batch is of, as far as Spark provides it: not for a call by hand, nor under Connect.

    Args:
        query_id: The same over restarts.
        run_id: Another one for each of them.
        newest_batch: The newest batch that this run has ended; None before the first.
    """

    query_id: str | None = None
    run_id: str | None = None
    newest_batch: int | None = None

    @classmethod
    def of(cls, frame: DataFrame) -> Self:
        """Find the query of a batch's DataFrame."""
        try:
            context = frame.sparkSession.sparkContext
        except AttributeError:  # a Connect client has none
            return cls()
        query_id = context.getLocalProperty(_QUERY_ID)
        if not query_id:
            return cls()
        session: Any = frame.sparkSession
        jvm: Any = context._jvm  # noqa: SLF001 - PySpark has no public access to the JVM
        try:
            # The batch's own session, a clone, has no queries.
            queries = session._jsparkSession.sharedState().activeStreamingQueries()  # noqa: SLF001 - likewise
            found = queries.get(jvm.java.util.UUID.fromString(query_id))
            progress = found.lastProgress()
            return cls(query_id, found.runId().toString(), None if progress is None else progress.batchId())
        except Exception:  # what is not public may be missing in another Spark
            return cls(query_id)


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
    telemetry: Telemetry | None = None,
    **options: Unpack[SinkOptions],
) -> ForeachBatchWriter:
    """Return a function for `foreachBatch` that publishes every row exactly once, per hub partition in the order of
    `order_by`; without it, in an order made of the rows' content.

    ::

        producer = foreach_batch_producer(
            connection_string,
            "alerts",
            sink_id="alerts",
            ledger="/srv/ledgers",
            order_by="sequenceNumber",
        )
        writer = frame.writeStream.option("checkpointLocation", "/srv/checkpoint")
        writer.foreachBatch(producer).start()

    The DataFrame has a column `body`, string or binary; and optionally `partition` (or `partitionId`) or
    `partitionKey`; `properties`, a map or struct of simple types; `contentType`, `correlationId`, `messageId`; and the
    source's `systemProperties`. See `sink.encode.EventColumns`. For a row without partition and key, the partition is
    chosen by a hash of the row.

    Exactly once holds as long as the query returns the same rows when a batch is repeated (otherwise use `staging`),
    and Spark's checkpoint and the ledger are both kept; otherwise the query fails. The function is called at most once
    for a batch in a run of the query.

    Args:
        connection_string: As shown in the Azure portal; None to give `fully_qualified_namespace` and `credential`,
            which is "module:callable".
        hub: The hub's name; None if the connection string has an `EntityPath`.
        sink_id: The sink's name in its ledger, see `sink.foreach_batch.SinkSettings`; None for the id of the query.
        ledger: A directory, the URL of a blob container, or a store; see `sink.foreach_batch.SinkSettings`. None only
            with `idempotent=False`.
        idempotent: Whether to publish every row exactly once; otherwise at least once, and without a ledger. Default:
            True.
        staging: A directory through which the rows go, see `sink.foreach_batch.SinkSettings`; True selects one next to
            the ledger's records, if `ledger` is a directory that executors can write to as well. False for no staging.
            Default: False.
        on_receipt: Called with the published rows of each batch, where the batches are published: in the driver, or
            with Connect on the server. It is called again if a batch is repeated. Default: None.
        telemetry: An `eventpump.telemetry.Telemetry`, which records a span and the metrics of each batch, where the
            batches are published; not the messages, which executors send. With Connect that is the server, whose own
            providers it uses. Default: None.
        options: See `sink.foreach_batch.SinkOptions`; units and defaults are in `sink.foreach_batch.SinkSettings` and
            :class:`eventpump.spark.connection.SparkConnection`.

    Raises:
        ConfigurationError: A value is invalid.
    """
    given: dict[str, Any] = {**options}
    connection = {name: given.pop(name) for name in SparkConnectionOptions.__annotations__ if name in given}
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
    try:
        checked(telemetry)
    except ValueError as error:
        raise ConfigurationError("telemetry", str(error)) from None
    return ForeachBatchWriter(SinkSettings.model_validate(settings), on_receipt, telemetry)


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
