"""The foreachBatch producer: each micro-batch of a query is published exactly once.

Its rows are kept first: the tasks that encode them write them down, in the frame's own order, by hub partition; those
of a small batch the driver writes, which then publishes it by itself. Then the plan is stored, which names what was
written and the number of each row; then what the plan names is read and published, and after the record that the batch
is done, deleted. So a task can fail, run again or run twice at a time, and so can the driver, and when Spark repeats a
batch, its rows may be others: the kept ones are published; see :mod:`eventpump.spark.sink.protocol`.
"""

from __future__ import annotations

import copy
import hashlib
import logging
import os
import threading
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Self, TypeAlias, TypeVar, Unpack

from pydantic import BeforeValidator, Field, model_validator
from pyspark.sql.types import BinaryType, IntegerType, LongType, StructField, StructType

from eventpump.errors import ConfigurationError, EventPumpError, StoreError
from eventpump.eventhubs.codecs import PayloadCodec
from eventpump.eventhubs.stamps import row_stamp_prefix, stamped
from eventpump.logs import retry_logger
from eventpump.options.base import Name, RetryOptions, Seconds, SettingsModel
from eventpump.options.callables import check_codecs
from eventpump.spark import worker
from eventpump.spark.connection import RETRY_TIMEOUT, SparkConnection, SparkConnectionOptions
from eventpump.spark.sink.at_least_once import RECEIPTS_DDL, SendTask, message_limit
from eventpump.spark.sink.calls import BatchCalls
from eventpump.spark.sink.columns import EventColumns
from eventpump.spark.sink.encode import NOWHERE, OnBadRow, SinkRouter, StableRouter, bad_row
from eventpump.spark.sink.exactly_once import (
    PublishOptions,
    Stores,
    check_overtaken,
    finish_batch,
    plan_batch,
    planned_batch,
    prepare_batch,
    sink_of,
)
from eventpump.spark.sink.executor import (
    KEPT_DDL,
    OUTCOME_DDL,
    EncodeTask,
    KeepTask,
    OrderTask,
    PublishTask,
    SharedRows,
    ordered_rows,
)
from eventpump.spark.sink.kept import KeptBatch, RowReader, read_batch
from eventpump.spark.sink.patience import patiently, retried
from eventpump.spark.sink.protocol import DriverRun, MicroBatch, OnProducerStateLost, Unplanned, WrittenRows
from eventpump.spark.sink.publishing import KeptPublishers, publish_rows
from eventpump.spark.sink.queries import RunningQuery, server_session
from eventpump.spark.sink.records import (
    Done,
    KeptRows,
    PackingLimits,
    PartitionOutcome,
    Plan,
    Sink,
    decode_outcome,
    directory_name,
    rows_stem,
    token_name,
)
from eventpump.storage.ledgers.interface import LedgerStore
from eventpump.storage.ledgers.opening import open_ledger
from eventpump.storage.rows.interface import RowStore
from eventpump.storage.rows.opening import named_rows, open_rows
from eventpump.telemetry.interface import ClientTelemetry, checked

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from eventpump.telemetry.telemetry import Telemetry

_log = logging.getLogger("eventpump.spark")

T = TypeVar("T")

_CALLS: Final = BatchCalls()
_OPENING: Final = threading.Lock()
"""Held while a writer makes what its process needs once, by the parts that are published at the same time."""
_LAST_ROW: Final = 2**63 - 1
_LARGER_FORMS: Final = 12
"""Additional bytes of the map of properties, and of the event's envelope, in their larger forms."""
_ROWS_PER_TASK: Final = 10_000
"""Rows of a batch for which another task is worth its start."""
_TASKS_PER_SLOT: Final = 2
_UNKNOWN_SLOTS: Final = 16
_RETURNED_BYTES: Final = 4 * 1024 * 1024
"""The most bytes of rows that the tasks of a batch return to the driver, together."""

SmallBatches: TypeAlias = Literal["auto", "never"]
"""Which batches the driver publishes itself: those whose rows all came back to it, or none."""


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
        part: As the producer was called with; None for none. Default: None.
        bad_rows: How many rows could not be events, and were left out or kept. Default: 0.
    """

    sink_id: str | None
    batch_id: int
    partitions: tuple[PublishedRows, ...]
    part: str | None = None
    bad_rows: int = 0

    @property
    def count(self) -> int:
        """How many rows were published."""
        return sum(each.count for each in self.partitions)


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that could not be an event.

    Args:
        error: Why.
        values: Those of the columns that the producer takes, by name.
    """

    error: str
    values: Mapping[str, Any]


# ---------------------------------------------------------------------------------------------------- settings


def _ledger(value: object) -> object:
    if isinstance(value, str | os.PathLike):
        return open_ledger(value)
    if value is not None and not callable(getattr(value, "create", None)):
        raise ValueError("must be a directory, the URL of a blob container, or a ledger store")
    return value


def _row_store(value: object) -> object:
    if isinstance(value, str | os.PathLike):
        return named_rows(value)
    if value is not None and not callable(getattr(value, "write", None)):
        raise ValueError("must be a directory, the URL of a blob container, or a row store")
    if value is not None and not hasattr(value, "is_remote"):
        raise ValueError("is a row store without `is_remote`: it says whether objects go over a network")
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
        rows: Where the rows of a batch are kept until it is done: a directory or URI that the driver and all executors
            can write to, or a `RowStore`. None for a place beside the records of `ledger`, which executors have to
            reach as well then.
        order_by: Columns that order the rows of a hub partition, such as "sequenceNumber"; rows that are equal in them
            stay in the order of the DataFrame, as all rows do without it. Default: `()`.
        stamp: Whether to add the property `eventpump:stamp` to every event: sink, batch, partition and row index.
            Default: False.
        on_producer_state_lost: What happens if the service has forgotten which rows of a batch it has stored: "fail",
            or "scan" (needs `stamp`). Default: "fail".
        router: How rows without a partition are routed. "hash": by key as the service does, and others by their
            content. "ring": keys by a consistent ring, as `RingRouter` does. With `idempotent=False` also
            "round-robin", whatever the key, and "sticky", one partition per message for rows without key. Default:
            "hash".
        encode: Compresses or encrypts bodies: a `PayloadCodec`, or several that are applied in this order; or
            "module:name", the import name of either in every process. Default: `()`.
        max_tasks: The most tasks that publish a batch; None for as many as its size asks for, two for each slot and one
            per hub partition at most. A task publishes several partitions at the same time.
        small_batches: Which batches the driver publishes itself, over links that it keeps. "auto": those of at most
            4 MiB in few tasks; "never": none. Default: "auto".
        on_bad_row: What happens with a row that cannot be an event, such as one without a body, or above the service's
            limit. "fail": the batch fails, and nothing of it is sent. "skip": the row is left out, and counted in the
            receipt. "keep": likewise, and `bad_rows` of the producer returns it until the next batch is done. Default:
            "fail".
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
    rows: Annotated[Any, BeforeValidator(_row_store)] = None
    order_by: Annotated[tuple[str, ...], BeforeValidator(_names)] = ()
    stamp: bool = False
    on_producer_state_lost: OnProducerStateLost = OnProducerStateLost.FAIL
    router: SinkRouter = "hash"
    encode: Annotated[Any, BeforeValidator(_codecs)] = ()
    max_tasks: int | None = Field(default=None, ge=1)
    small_batches: SmallBatches = "auto"
    on_bad_row: OnBadRow = "fail"
    first_batch: int = Field(default=0, ge=0)
    retry_timeout: Seconds = RETRY_TIMEOUT
    max_batch_events: int = Field(default=PackingLimits().max_events, ge=1, le=1_000_000)
    max_batch_bytes: int = Field(default=PackingLimits().max_bytes, ge=1024)

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.idempotent:
            if self.ledger is None:
                raise ConfigurationError("ledger", "is required: set it to a directory, or the URL of a blob container")
            if self.on_producer_state_lost is OnProducerStateLost.SCAN and not self.stamp:
                raise ConfigurationError("on_producer_state_lost", "scan requires stamps: set stamp=True")
            if self.router not in ("hash", "ring"):
                problem = f"cannot be {self.router} for the idempotent sink"
                raise ConfigurationError("router", problem)
            if self.sink_id is not None:
                directory_name(self.sink_id)
            return self
        for name in ("ledger", "sink_id", "rows", "order_by", "stamp", "first_batch"):
            if getattr(self, name):
                raise ConfigurationError(name, "is only for the idempotent sink")
        if self.on_bad_row != "fail":
            raise ConfigurationError("on_bad_row", "is only for the idempotent sink")
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
    on_producer_state_lost: OnProducerStateLost | Literal["fail", "scan"]
    max_tasks: int
    small_batches: SmallBatches
    on_bad_row: OnBadRow
    first_batch: int
    retry_timeout: float
    max_batch_events: int
    max_batch_bytes: int


# ---------------------------------------------------------------------------------------------------- the writer


class _Running:
    """What a run of the driver has in one process."""

    def __init__(self) -> None:
        self.process_id = os.getpid()
        self.driver = DriverRun(uuid.uuid4().hex)
        self.kept = KeptPublishers()
        self.shared: SharedRows | None = None
        """The row store of tasks, which has this run's token."""
        self.encoding: EncodeTask | None = None
        """How the rows of the last batch were encoded."""
        self.tasks: int | None = None
        """How many tasks encoded the rows of the last batch, or more; None before the first."""
        self.last_rows: int | None = None
        """How many rows the last batch had; None if that is not known."""
        worker.close_first(self.kept)


@dataclass(frozen=True)
class _Encoded:
    """The rows of a batch, and how they were encoded."""

    encoding: EncodeTask
    batch: KeptBatch


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
        self._rows = open_rows(settings.rows, settings.ledger) if settings.idempotent else None
        self._states: dict[str, _Running] = {}
        self._newest: dict[str, MicroBatch] = {}
        self._stores: tuple[int, Stores] | None = None
        self._max_message_size = 0
        self._session: Any = None
        self._is_warned = False

    def __getstate__(self) -> dict[str, Any]:
        # Elsewhere it is another run, with a ledger to open.
        return {**self.__dict__, "_states": {}, "_newest": {}, "_stores": None, "_session": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._session = server_session()

    def _running(self, directory: str) -> _Running:
        """Return what this process has of the run of a sink, or of its part, by the directory.

        Without a `sink_id`, several queries may use one writer.
        """
        with _OPENING:
            state = self._states.get(directory)
            if state is None or state.process_id != os.getpid():
                state = self._states[directory] = _Running()
            return state

    def __call__(self, frame: DataFrame, batch_id: int, *, part: str | None = None) -> None:
        """Publish a micro-batch, and return when all of it is stored.

        Called once for a batch in each run of a query; several times if each call names another part. A batch that an
        earlier run has published is not published again, but `on_receipt` is called again.

        Args:
            frame: The rows. Two parts are two evaluations of what they are made of, unless that is persisted.
            batch_id: The batch's number.
            part: Which of several calls it is, the same whenever the batch is repeated. Parts may be published at the
                same time, by threads that are an `InheritableThread` of PySpark.

        Raises:
            ConfigurationError: A column is missing or has a wrong type; the ledger does not match the query; or it is
                called twice for a batch.
            ProducerStateLostError: The service has forgotten which rows of the batch it has stored.
            EventPumpError: The service or the ledger failed; when the batch is repeated, nothing is lost or stored
                twice.
        """
        publish = partial(self._publish if self.settings.idempotent else self._send, frame, batch_id, part)
        receipt = publish() if self._telemetry is None else self._recorded(self._telemetry, publish)
        if self._on_receipt is not None:
            self._on_receipt(receipt)

    def bad_rows(self, batch_id: int, *, part: str | None = None) -> list[BadRow]:
        """Return the rows of a batch that could not be events, with `on_bad_row="keep"`: the same after a repetition.

        Called where the producer was called for the batch, and before it is for the next one.

        Args:
            batch_id: The batch, as Spark numbers it.
            part: The part that the producer was called with; None for none. Default: None.

        Raises:
            ConfigurationError: It was not called for this batch; or several queries use it, without a `sink_id`.
            StoreError: A store failed, or does not have the rows.
        """
        called = [each for each in self._newest.values() if each.sink.part == part]
        if len(called) > 1:
            problem = (
                "several queries use this producer, and whose bad rows are meant is not known: give each query its own"
            )
            raise ConfigurationError("sink_id", problem)
        batch = called[0] if called else None
        if batch is None or batch.batch_id != batch_id:
            raise ConfigurationError("batch_id", f"the newest batch that the producer was called for is not {batch_id}")
        stores, transport = self._open_stores(), worker.transport(self.settings.connection)
        plan = worker.run(planned_batch(stores, transport, batch, self.settings.publishing))
        if plan is None or plan.rows is None or not plan.bad_rows:
            return []
        kept = worker.run(read_batch(stores.rows, batch.sink.rows_directory, plan, self.settings.retry_timeout))
        reader = RowReader(stores.rows, batch.sink.rows_directory, kept, self.settings.retry_timeout)
        segments = reader.segments(NOWHERE)
        found = [event for each in segments for event in worker.run(reader.read(plan, each, 0)) if event]
        return [BadRow(*bad_row(each)) for each in found]

    def _recorded(self, telemetry: ClientTelemetry, publish: Callable[[], BatchReceipt]) -> BatchReceipt:
        """Publish a batch, and record it, or why it is not published."""
        connection = self.settings.connection
        namespace, port = connection.address
        recorder = telemetry.of_sink(connection.hub, self.settings.sink_id, namespace, port)
        return recorder.publishing(publish, lambda done: {each.partition_id: each.count for each in done.partitions})

    def __repr__(self) -> str:
        return f"ForeachBatchWriter(hub={self.settings.connection.hub!r}, sink_id={self.settings.sink_id!r})"

    # ------------------------------------------------------------------------------------------ at least once

    def _send(self, frame: DataFrame, batch_id: int, part: str | None) -> BatchReceipt:
        columns = EventColumns.of(frame.schema)
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
            part,
        )

    # ------------------------------------------------------------------------------------------ exactly once

    def _publish(self, frame: DataFrame, batch_id: int, part: str | None) -> BatchReceipt:
        settings = self.settings
        query = RunningQuery.of(frame, batch_id, self._session)
        query_id = query.query_id
        sink_id = settings.sink_id or (None if query.is_sought else query_id)
        if sink_id is None:
            raise ConfigurationError("sink_id", "is required if Spark does not provide the query's id, as with Connect")
        sink = sink_of(settings.connection.address[0], settings.connection.hub, sink_id, part)
        if query.is_sought and query_id is None and not self._is_warned:
            self._is_warned = True
            _log.warning(
                "batch %d of the sink %r: Spark Connect does not say which of the session's queries calls it, and more "
                "than one may: that no other query uses this sink_id is not checked",
                batch_id,
                sink.name,
            )
        running = self._running(sink.directory)
        batch = MicroBatch(
            sink,
            query_id,
            running.driver,
            batch_id,
            settings.limits,
            settings.stamp,
            first_batch=settings.first_batch,
            may_repeat=query.newest_batch is None or query.newest_batch >= batch_id,
        )
        with _CALLS.call(sink, query.run_id or running.driver.run_id, batch_id):
            columns = EventColumns.of(frame.schema, settings.order_by)
            publication = _Publication(self, frame, columns, batch, running)
            self._newest[sink.directory] = batch
            return _receipt(publication.publish())

    def _message_limit(self) -> int:
        """Return the service's limit for one message, in bytes."""
        if not self._max_message_size:
            ask = partial(message_limit, self.settings.connection)
            self._max_message_size = worker.run(retried(ask, self.settings.retry_timeout))
        return self._max_message_size

    # ------------------------------------------------------------------------------------------ what is kept

    def _open_stores(self) -> Stores:
        """Open the stores, once per process."""
        with _OPENING:
            if self._stores is None or self._stores[0] != os.getpid():
                # Of the row store a copy: tasks take the one that is not open.
                assert self._rows is not None
                stores = Stores(self.settings.ledger, copy.deepcopy(self._rows))
                for each in stores:
                    self._ask_store(each.open)
                worker.close_with(self, stores.rows)
                self._stores = os.getpid(), stores
            return self._stores[1]

    def _share_rows(self, running: _Running, directory: str) -> SharedRows:
        """Return the row store of tasks, after this run's token is in it."""
        if running.shared is None:
            assert running.driver.claim is not None, "nothing is kept for a batch before the sink is claimed"
            token, rows = token_name(running.driver.claim, running.driver.run_id), self._open_stores().rows
            self._ask_store(lambda: rows.begin(f"{directory}/{token}"))
            assert self._rows is not None
            running.shared = SharedRows(self._rows, directory, token, self.settings.retry_timeout)
        return running.shared

    def _ask_store(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Call a store, again where it failed, until `retry_timeout` is over."""
        settings = self.settings
        on_retry = retry_logger(_log, "ledger", hub=settings.connection.hub)
        base_delay = settings.publishing.retry.base_delay
        return worker.run(patiently(ask, settings.retry_timeout, base_delay=base_delay, on_retry=on_retry))


class _Publication:
    """One batch on its way."""

    def __init__(
        self, writer: ForeachBatchWriter, frame: DataFrame, columns: EventColumns, batch: MicroBatch, running: _Running
    ) -> None:
        self._writer = writer
        self._settings = writer.settings
        self._running = running
        self._options = writer.settings.publishing
        self._frame = frame
        self._columns = columns
        self._batch = batch
        self._directory = batch.sink.rows_directory
        self._stores = writer._open_stores()  # noqa: SLF001 - it is of this module
        self._transport = worker.transport(writer.settings.connection)

    def publish(self) -> Done:
        """Publish the batch, or find that it is done."""
        running, outside = self._running, (self._stores, self._transport)
        encoded: _Encoded | None = None
        with worker.running(self._patient(partial(prepare_batch, *outside, self._batch, self._options))) as preparing:
            # Meanwhile the rows are encoded, as those of the last batch were.
            if running.encoding is not None:
                encoded = self._encode(running.encoding)
            step = preparing.result()
        batch: KeptBatch | None = None
        if isinstance(step, Unplanned):
            if running.last_rows is None and step.prior is not None:
                running.last_rows = _count(step.prior)
            encoding = self._encoding(len(step.partition_ids))
            if encoded is None or encoded.encoding != encoding:
                encoded = self._encode(encoding)
            rows = self._written(encoded.batch, step.partition_ids)
            step = worker.run(self._patient(partial(plan_batch, *outside, step, rows, self._options)))
            if step.rows == rows.kept:
                batch = encoded.batch
        elif encoded is None:
            self._run_to_its_end()
        if isinstance(step, Done) and None in (step.query_id, self._batch.query_id):
            _log.warning(
                "batch %d of the sink %r is done already and is not published; it is not known whether it is this "
                "query's, because Spark does not provide the query's id: each query needs a sink_id of its own",
                step.batch_id,
                step.sink.name,
            )
        is_first = batch is not None
        while isinstance(step, Plan):
            outcomes: list[PartitionOutcome] = []
            if any(each.count for each in step.partitions):
                if batch is None:
                    batch = self._read(step)
                outcomes = self._published(step, batch, is_first=is_first)
            is_first = False
            policy = self._settings.on_producer_state_lost
            finishing = partial(finish_batch, *outside, self._batch, step, outcomes, policy, self._options)
            step = worker.run(self._patient(finishing))
        running.last_rows = _count(step)
        return step

    def _patient(self, attempt: Callable[[], Awaitable[T]]) -> Coroutine[Any, Any, T]:
        return retried(attempt, self._settings.retry_timeout)

    def _run_to_its_end(self) -> None:
        """Evaluate the rows, where others are published: Spark requires it of each batch of a stateful query, because
        the state of a repeated batch is stored by its evaluation."""
        self._frame.write.format("noop").mode("overwrite").save()

    # ------------------------------------------------------------------------------------------ what is kept

    def _written(self, batch: KeptBatch, partition_ids: Sequence[str]) -> WrittenRows:
        """Write the object that has the rows which were returned, and names those which tasks have written."""
        if not batch.segments:
            return WrittenRows(None, {}, {})
        raw = batch.encode()
        stem = f"{self._directory}/{rows_stem(self._batch.batch_id)}"
        self._share()
        name = self._writer._ask_store(lambda: self._stores.rows.write(stem, [raw]))  # noqa: SLF001 - of this module
        kept = KeptRows(name=name.rpartition("/")[2], size=len(raw), digest=hashlib.sha256(raw).hexdigest())
        counts = {partition_ids[number]: count for number, count in batch.counts.items()}
        return WrittenRows(kept, batch.objects, counts, batch.bad_rows)

    def _read(self, plan: Plan) -> KeptBatch:
        """Read the object that a plan names.
        Raises `StoreError` if it is not as it was written, or another run goes on."""
        try:
            return worker.run(read_batch(self._stores.rows, self._directory, plan, self._settings.retry_timeout))
        except StoreError as error:
            self._check_overtaken(error)
            raise

    def _share(self) -> SharedRows:
        return self._writer._share_rows(self._running, self._directory)  # noqa: SLF001 - likewise

    # ------------------------------------------------------------------------------------------ publishing

    def _published(self, plan: Plan, batch: KeptBatch, *, is_first: bool) -> list[PartitionOutcome]:
        """Publish what a plan names."""
        kept = self._running.kept
        try:
            if batch.is_small and self._settings.small_batches == "auto":
                reader = RowReader(self._stores.rows, self._directory, batch, self._settings.retry_timeout)
                publishing = publish_rows(self._transport, plan, reader, self._options, kept=kept, is_first=is_first)
                return worker.run(publishing)
            worker.run(kept.aclose())  # tasks will publish under the same numbers
            tasks = self._tasks(len(batch.counts), sum(batch.counts.values()))
            task = PublishTask(self._settings.connection, plan, self._options, self._share(), batch, tasks)
            numbers = self._frame.sparkSession.range(0, tasks, 1, tasks)
            return [decode_outcome(row["outcome"]) for row in numbers.mapInArrow(task, OUTCOME_DDL).collect()]
        except Exception as error:
            self._check_overtaken(error)
            raise

    def _check_overtaken(self, cause: Exception | None = None) -> None:
        """Check, where publishing has failed, whether that is because another run goes on: then a `StoreError`."""
        check = check_overtaken(self._stores, self._transport, self._batch, self._options)
        try:
            worker.run(check)
        except EventPumpError as overtaken:
            raise overtaken from cause

    # ------------------------------------------------------------------------------------------ rows

    def _encoding(self, partition_count: int) -> EncodeTask:
        reserved = stamp_room(self._batch.sink, partition_count) if self._batch.is_stamped else 0
        limit = self._writer._message_limit()  # noqa: SLF001 - it is of this module
        router: StableRouter = "ring" if self._settings.router == "ring" else "hash"
        self._running.encoding = EncodeTask(
            self._columns, partition_count, limit, reserved, router, self._settings.encode, self._settings.on_bad_row
        )
        return self._running.encoding

    def _encode(self, encoding: EncodeTask) -> _Encoded:
        """Encode the rows, and keep them."""
        running, encoding = self._running, replace(encoding, columns=self._columns)
        frame, spark = _selected(self._frame, self._columns), self._frame.sparkSession
        tasks = running.tasks or max(_slots(spark), _shuffle_tasks(spark))
        if self._columns.order_by:
            tasks = self._tasks(encoding.partition_count, running.last_rows)
            frame = self._ordered(frame, encoding, tasks)
        most = _RETURNED_BYTES if self._settings.small_batches == "auto" else 0
        rows_of = ordered_rows if self._columns.order_by else encoding.rows
        task = KeepTask(
            rows_of,
            self._share(),
            self._batch.batch_id,
            most,
            tasks,
            is_first=running.tasks is None,
            has_summaries=bool(self._columns.order_by) and tasks > 1,
        )
        try:
            found = frame.mapInArrow(task, KEPT_DDL).collect()
        except Exception as error:
            self._check_overtaken(error)
            raise
        self._require_one_evaluation({row["summaries"] for row in found} - {None})
        running.tasks = max(1, len(found))
        return _Encoded(encoding, KeptBatch.collected((row["segments"], row["rows"]) for row in found))

    def _require_one_evaluation(self, summaries: set[str]) -> None:
        """Check that all tasks have ordered rows of the same evaluation.

        Raises:
            ConfigurationError: They have not.
        """
        if not hasattr(self._frame, "repartitionById"):
            summaries = summaries - {"[]"}  # before Spark 4.1, a task may have no hub partition
        if len(summaries) > 1:
            raise ConfigurationError(
                "order_by",
                f"rows of batch {self._batch.batch_id} were others when Spark evaluated them again, after an executor "
                "had died: some would be lost or published twice. Nothing of the batch is sent. Without order_by, or "
                "with rows that are the same whenever they are evaluated, a lost executor does no harm",
            )

    def _ordered(self, frame: DataFrame, encoding: EncodeTask, tasks: int) -> DataFrame:
        """Encode the rows, and have all of a hub partition in one of so many tasks, in the order of `order_by`.

        Correctness requires that no partition is split.
        """
        schema, names = self._frame.schema, self._columns.order_by
        orders = [StructField(f"order_{number}", schema[name].dataType) for number, name in enumerate(names)]
        places = [StructField("place", LongType()), StructField("event", BinaryType())]
        encoded = frame.mapInArrow(
            OrderTask(encoding, has_summary=tasks > 1),
            StructType([StructField("partition", IntegerType()), *orders, *places]),
        )
        if hasattr(encoded, "repartitionById"):
            gathered = encoded.repartitionById(tasks, "partition")
        else:
            gathered = encoded.repartition(tasks, "partition")  # before Spark 4.1, some tasks get several partitions
        ordered = gathered.sortWithinPartitions("partition", *(each.name for each in orders), "place")
        return ordered.select("partition", "event")

    def _tasks(self, partition_count: int, rows: int | None) -> int:
        """Return how many tasks have the rows of these hub partitions;
        None if it is not known how many rows there are."""
        slots = _slots(self._frame.sparkSession)
        most = min(partition_count, self._settings.max_tasks or partition_count, _TASKS_PER_SLOT * slots)
        return most if rows is None else min(most, 1 + rows // _ROWS_PER_TASK)


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
    stamp = f"{row_stamp_prefix(sink.stamp_name, _LAST_ROW, str(partition_count))}{_LAST_ROW}"
    return len(stamped(b"", stamp)) + _LARGER_FORMS


def _selected(frame: DataFrame, columns: EventColumns) -> DataFrame:
    """Select the columns of events, in the order that encoders expect; a column may be selected twice."""
    if not columns.order_by and frame.schema.names == columns.names:
        return frame  # selecting takes Spark some milliseconds, of which a small batch has few
    quoted = [f"`{name.replace('`', '``')}`" for name in columns.names]
    return frame.selectExpr(*(f"{name} AS column_{number}" for number, name in enumerate(quoted)))


def _receipt(done: Done) -> BatchReceipt:
    return BatchReceipt(
        done.sink.sink_id,
        done.batch_id,
        tuple(
            PublishedRows(each.partition_id, each.first_number, each.last_number, each.count) for each in done.receipts
        ),
        done.sink.part,
        done.bad_rows,
    )


# ---------------------------------------------------------------------------------------------------- the public way


def foreach_batch_producer(
    connection_string: str | None = None,
    hub: str | None = None,
    *,
    sink_id: str | None = None,
    ledger: str | os.PathLike[str] | LedgerStore | None = None,
    idempotent: bool = True,
    rows: str | os.PathLike[str] | RowStore | None = None,
    on_receipt: Callable[[BatchReceipt], None] | None = None,
    telemetry: Telemetry | None = None,
    **options: Unpack[SinkOptions],
) -> ForeachBatchWriter:
    """Return a function for `foreachBatch` that publishes every row exactly once, per hub partition in the order of the
    DataFrame, or of `order_by`.

    ::

        producer = foreach_batch_producer(
            connection_string,
            "alerts",
            sink_id="alerts",
            ledger="/srv/ledgers",
        )
        writer = frame.writeStream.option("checkpointLocation", "/srv/checkpoint")
        writer.foreachBatch(producer).start()

    The DataFrame has a column `body`, string or binary; and optionally `partition` (or `partitionId`) or
    `partitionKey`; `properties`, a map or struct of simple types; `contentType`, `correlationId`, `messageId`; and the
    source's `systemProperties`. See `sink.encode.EventColumns`. For a row without partition and key, the partition is
    chosen by a hash of the row.

    The rows of a batch are kept until it is done, and those are published that the query returned first. Exactly once
    holds as long as Spark's checkpoint and the ledger are both kept; otherwise the query fails. The function is called
    at most once for a batch in a run of the query, or once for each `part="name"`.

    Args:
        connection_string: As shown in the Azure portal; None to give `fully_qualified_namespace` and `credential`,
            which is "module:callable".
        hub: The hub's name; None if the connection string has an `EntityPath`.
        sink_id: The sink's name in its ledger, see `sink.foreach_batch.SinkSettings`; None for the id of the query.
        ledger: A directory, the URL of a blob container, or a store; see `sink.foreach_batch.SinkSettings`. None only
            with `idempotent=False`.
        idempotent: Whether to publish every row exactly once; otherwise at least once, and without a ledger. Default:
            True.
        rows: Where the rows of a batch are kept until it is done, see `sink.foreach_batch.SinkSettings`; None for a
            place beside the ledger's records.
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
        "rows": rows,
        **given,
    }
    try:
        checked(telemetry)
    except ValueError as error:
        raise ConfigurationError("telemetry", str(error)) from None
    return ForeachBatchWriter(SinkSettings.model_validate(settings), on_receipt, telemetry)
