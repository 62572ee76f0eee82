"""The readers of `format("eventpump")`: what Spark calls to read a hub, in queries and in batches."""

from __future__ import annotations

import asyncio
import difflib
import logging
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, TypeVar

from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

from eventpump.errors import ConfigurationError, ServiceError
from eventpump.interfaces import Transport
from eventpump.spark import worker
from eventpump.spark.source import lookups
from eventpump.spark.source.offsets import (
    KEEP_LINKS,
    MAX_READERS,
    HubOffset,
    HubSnapshot,
    Loss,
    SequenceRange,
    SourcePartition,
    StreamPlanner,
    batch_ranges,
    keep_links_for,
    plan_tasks,
)
from eventpump.spark.source.options import SourceOptions
from eventpump.spark.source.schema import COLUMN_TYPES

if TYPE_CHECKING:
    import pyarrow as pa

try:
    from pyspark.sql.streaming.datasource import (
        ReadAllAvailable,
        ReadLimit,
        ReadMaxRows,
        SupportsTriggerAvailableNow,
    )
except ImportError:  # Spark before 4.2 has no limits: it calls latestOffset without arguments

    class ReadLimit:  # type: ignore[no-redef] # replaces the missing one
        """How much a trigger requests."""

    class ReadAllAvailable(ReadLimit):  # type: ignore[no-redef] # as above
        """Everything that is available."""

    class ReadMaxRows(ReadLimit):  # type: ignore[no-redef] # as above
        """A number of rows."""

        def __init__(self, max_rows: int) -> None:
            self.max_rows = max_rows

    class SupportsTriggerAvailableNow:  # type: ignore[no-redef] # as above
        """Marks a source that supports `Trigger.AvailableNow`."""


_T = TypeVar("_T")

_log = logging.getLogger("eventpump.spark")

IDLE_REQUESTS: Final = 40
"""How many requests a second an idle query makes; they take about 1 % of a core."""

IDLE_INTERVAL: Final = 2.0
"""The most seconds between two looks of an idle query at a hub, however many partitions it has."""


LOAD_PATIENCE: Final = 10.0
"""Seconds for which `load` waits for the service's answer whether the consumer group exists."""


def check_consumer_group(options: SourceOptions) -> None:
    """Check that the consumer group exists, before a query begins and writes to its checkpoint.

    Whatever else is wrong with the service, the query itself finds out, with more patience.

    Raises:
        ConfigurationError: It does not exist.
    """
    if options.consumer_group.lower() == "$default":
        return
    transport = worker.transport(options.connection)
    try:
        worker.run(lookups.require_consumer_group(transport, options), LOAD_PATIENCE)
    except ServiceError as error:
        _log.info("the consumer group could not be checked: %s", error)
        worker.drop(options.connection)


def columns_of(schema: StructType) -> tuple[str, ...]:
    """Return the names of the columns to read: some of the source's, in any order.

    Raises:
        ConfigurationError: A column is unknown, has another type, or is not nullable.
    """
    for field in schema.fields:
        wanted = COLUMN_TYPES.get(field.name)
        if wanted is None:
            spelling = {name.lower(): name for name in COLUMN_TYPES}
            nearest = difflib.get_close_matches(field.name.lower(), spelling, n=1)
            hint = f"; did you mean {spelling[nearest[0]]}?" if nearest else "."
            there_is = ", ".join(COLUMN_TYPES)
            raise ConfigurationError("schema", f"unknown column {field.name}{hint} The source has: {there_is}")
        if field.dataType.simpleString() != wanted.lower().replace(" ", ""):
            raise ConfigurationError("schema", f"column {field.name} must be {wanted}")
        if not field.nullable:
            raise ConfigurationError("schema", f"column {field.name} must be nullable")
    return tuple(schema.fieldNames())


class _Reader:
    """The part of both readers that executors need: options and columns. It is pickled, so it must hold nothing
    large."""

    def __init__(self, options: SourceOptions, columns: Sequence[str]) -> None:
        self._options = options
        self._columns = tuple(columns)
        self._is_noted = False

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read a task's ranges. Runs on executors.

        Raises:
            DataLossError: Events are gone, and `fail_on_data_loss` is set.
            ServiceError: The service refused, or another reader took over a partition: Spark retries the task.
        """
        from eventpump.spark.source.receive import (
            read_ranges,  # only executors create rows, and the module takes long to load
        )

        task = partition.value
        assert isinstance(task, SourcePartition)
        options = self._options
        return read_ranges(options.connection, options.receive, task.ranges, self._columns, keep_links=task.keep_links)

    def _tasks(self, ranges: Sequence[SequenceRange], keep_links: float = KEEP_LINKS) -> list[InputPartition]:
        options = self._options
        tasks = plan_tasks(
            options.connection.hub,
            ranges,
            min_partitions=options.min_partitions,
            partitions_per_task=options.partitions_per_task,
            keep_links=keep_links,
        )
        wanted = options.min_partitions
        if wanted is not None and 0 < len(tasks) < wanted and not self._is_noted:
            self._is_noted = True
            _log.warning(
                "minPartitions is %d, but there are only %d tasks: the service lets %d readers share a partition, and "
                "a task reads at least one event (%d partitions, %d events)",
                wanted,
                len(tasks),
                MAX_READERS,
                len(ranges),
                sum(each.size for each in ranges),
            )
        return [InputPartition(each) for each in tasks]

    def _tell(self, losses: Sequence[Loss]) -> None:
        """Raise for lost events, or log them.

        Raises:
            DataLossError: `fail_on_data_loss` is set.
        """
        for loss in losses:
            if self._options.fail_on_data_loss:
                raise loss.error()
            _log.warning("hub %s, partition %s: %s; going on", loss.hub, loss.partition_id, loss.problem)


class BatchReader(_Reader, DataSourceReader):
    """Reads a hub once, from the starting to the ending positions as they are when the batch is planned."""

    def partitions(self) -> Sequence[InputPartition]:
        """Resolve the positions, and split the events between them into tasks.

        Raises:
            ConfigurationError: A position is invalid.
            DataLossError: A starting position is before the oldest event, and `fail_on_data_loss` is set.
            ServiceError: The service did not answer.
        """
        options = self._options
        hub = options.connection.hub
        transport = worker.transport(options.connection)

        async def ask() -> tuple[HubSnapshot, dict[str, int], dict[str, int]]:
            facts = await lookups.read_facts(transport, options)
            start = await lookups.find_numbers(transport, options, facts)
            end = await lookups.find_numbers(transport, options, facts, is_end=True)
            return facts.snapshot(hub), start, end

        snapshot, start, end = worker.run(ask())
        end = {each: max(number, start[each]) for each, number in end.items()}
        ranges, losses = batch_ranges(HubOffset(hub, start), HubOffset(hub, end), snapshot)
        self._tell(losses)
        # For a batch without tasks, Spark creates a task with a partition that is not ours.
        return self._tasks(ranges) or [InputPartition(SourcePartition(()))]


class StreamReader(_Reader, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads a hub for a query.

    Spark creates several. One exists as long as the query, in its own process on the driver, and returns offsets;
    others are pickled, and read on executors.

    Args:
        notes: Lines that are logged once, in the query's process.
    """

    def __init__(self, options: SourceOptions, columns: Sequence[str], notes: Sequence[str] = ()) -> None:
        super().__init__(options, columns)
        self._notes = tuple(notes)
        self._query: _Query | None = None

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """Return where a new query begins: at the user's position, or at the newest event. It stays the same."""
        return self._own_query().first_start().to_json()

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        """Return how much a batch holds by default."""
        limit = self._options.max_events_per_trigger
        return ReadAllAvailable() if limit is None else ReadMaxRows(limit)

    def latestOffset(  # noqa: N802 - Spark's name
        self, start: dict[str, Any] | None = None, limit: ReadLimit | None = None
    ) -> dict[str, Any]:
        """Return where the batch that begins at `start` ends.

        "Nothing new" is returned only after a look at the service that is not older than this call. The look waits
        until `snapshot_interval` has passed since the last one, or up to `IDLE_INTERVAL` for a hub with many
        partitions. So an idle query makes few requests, and one that waits for all available events
        (`processAllAvailable`) misses none.

        Raises:
            DataLossError: Unread events are gone, and `fail_on_data_loss` is set.
            ServiceError: The service did not answer.
        """
        return self._own_query().latest(start, is_limited=limit is None or isinstance(limit, ReadMaxRows))

    def reportLatestOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """Return the end of the hub, for the query's progress."""
        return self._own_query().snapshot().latest.to_json()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        """Let the query end at the events that are available now."""
        self._own_query().aim()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Split a batch into tasks.

        Raises:
            DataLossError: Unread events are gone, and `fail_on_data_loss` is set.
            ServiceError: The service did not answer.
        """
        query = self._own_query()
        ranges = query.ranges(start, end)
        return self._tasks(ranges, query.keep_links)

    def commit(self, end: dict[str, Any]) -> None:
        """Do nothing when a batch is done: the service keeps no positions."""

    def stop(self) -> None:
        """Close the query's connections."""
        if self._query is not None:
            worker.close()

    def _own_query(self) -> _Query:
        """Return the query's state, which only the process that serves it has."""
        if self._query is None:
            for note in self._notes:
                _log.warning("%s", note)
            _end_in_order()
            self._query = _Query(self._options, self._tell)
        return self._query


class _Query:
    """The driver's state of a running query: where it began, and the last snapshot of the hub.

    Used only by the thread on which Spark calls the reader.

    Args:
        tell: Called with the losses; it raises if the query has to fail.
    """

    def __init__(self, options: SourceOptions, tell: Callable[[Sequence[Loss]], None]) -> None:
        self._options = options
        self._hub = options.connection.hub
        self._tell = tell
        self._planner = StreamPlanner(options.limits)
        self._snapshot: HubSnapshot | None = None
        self._taken_at = 0.0
        self._ends_at_target = False
        self._last: HubOffset | None = None
        self._planned_at: float | None = None
        self.keep_links = KEEP_LINKS
        """Seconds for which the last batch's links stay open for the next one: two triggers, within limits."""

    def first_start(self) -> HubOffset:
        """Return where the query begins, decided once."""
        start = self._planner.first_start
        if start is None:
            check_consumer_group(self._options)
            facts = self._look()
            start = HubOffset(self._hub, self._run(lookups.find_numbers(self._transport(), self._options, facts)))
            self._planner.begin(start)
        return start

    def latest(self, asked_from: dict[str, Any] | None, *, is_limited: bool) -> dict[str, Any]:
        """Return where the next batch ends.

        Args:
            asked_from: Where it begins; None from Spark before 4.2.
        """
        start = (self._last or self.first_start()) if asked_from is None else self._offset(asked_from)
        asked_at = time.monotonic()
        while True:
            end = self._planner.end(start, self.snapshot(), is_limited=is_limited, now=time.monotonic())
            self._tell(end.losses)
            if end.offset is not start:
                return end.offset.to_json()
            if self._ends_at_target or self._taken_at >= asked_at:
                # As Spark wrote it: offsets are compared as text, and one written by hand may be spelled differently.
                return start.to_json() if asked_from is None else asked_from
            self._look(self._taken_at + self._idle_interval())

    def aim(self) -> None:
        """Let the query end at the events that are available now."""
        self._look()
        self._planner.aim(self.snapshot())
        self._ends_at_target = True

    def ranges(self, start: dict[str, Any], end: dict[str, Any]) -> list[SequenceRange]:
        """Return the ranges of a batch."""
        before, self._planned_at = self._planned_at, time.monotonic()
        self.keep_links = keep_links_for(None if before is None else self._planned_at - before)
        self._last = self._offset(end)
        ranges, losses = batch_ranges(self._offset(start), self._last, self.snapshot())
        self._tell(losses)
        return ranges

    def _offset(self, document: dict[str, Any]) -> HubOffset:
        """Return an offset from the checkpoint.

        Raises:
            ConfigurationError: It belongs to another hub, or has a partition that is not chosen: its unread events
                would be left out without a word.
        """
        offset = HubOffset.from_json(self._hub, document)
        chosen = self._options.partitions
        for partition_id in offset.following:
            if chosen is not None and partition_id not in chosen:
                raise ConfigurationError(
                    "partitions",
                    f"the checkpoint has partition {partition_id}, which is not chosen; choose it too, or begin "
                    "another query with a new checkpoint",
                )
        return offset

    def snapshot(self) -> HubSnapshot:
        """Return what the hub holds, from a snapshot at most `snapshot_interval` old."""
        if self._snapshot is None or time.monotonic() >= self._taken_at + self._options.snapshot_interval:
            self._look()
        assert self._snapshot is not None
        return self._snapshot

    def _idle_interval(self) -> float:
        """Return the seconds between two looks while there is nothing new. A look takes one request per partition."""
        assert self._snapshot is not None
        requests = 1 + len(self._snapshot.bounds)
        return max(self._options.snapshot_interval, min(requests / IDLE_REQUESTS, IDLE_INTERVAL))

    def _look(self, not_before: float = 0.0) -> lookups.HubFacts:
        """Read from the service what the hub holds.

        Args:
            not_before: The earliest time for the requests, in monotonic seconds.
        """

        async def look() -> tuple[float, lookups.HubFacts]:
            await asyncio.sleep(not_before - time.monotonic())
            began = time.monotonic()
            return began, await lookups.read_facts(self._transport(), self._options)

        self._taken_at, facts = self._run(look())
        self._snapshot = facts.snapshot(self._hub)
        return facts

    def _transport(self) -> Transport:
        return worker.transport(self._options.connection)

    def _run(self, work: Coroutine[Any, Any, _T]) -> _T:
        try:
            return worker.run(work)
        except ServiceError:
            worker.drop(self._options.connection)
            raise


def _end_in_order() -> None:
    """Make the process end cleanly when Spark ends it: by default it ends before its connections are closed."""

    def leave(_signal: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sys.exit(0)

    signal.signal(signal.SIGTERM, leave)
