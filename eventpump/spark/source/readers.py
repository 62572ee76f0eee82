"""The readers of `format("eventpump")`: what Spark calls to read a hub, in queries and in batches."""

from __future__ import annotations

import asyncio
import difflib
import logging
import signal
import sys
import time
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, TypeVar

from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

from eventpump.aio.tasks import gather
from eventpump.errors import ConfigurationError, ServiceError
from eventpump.interfaces import Transport
from eventpump.spark import worker
from eventpump.spark.source import lookups
from eventpump.spark.source.known_hubs import RequestBudget
from eventpump.spark.source.offsets import (
    KEEP_LINKS,
    MAX_READERS,
    TASKS_PER_SLOT,
    HubOffset,
    HubSnapshot,
    QueryLoss,
    SequenceRange,
    SourceOffset,
    SourcePartition,
    StreamPlanner,
    keep_links_for,
    plan_tasks,
    share,
    source_ranges,
)
from eventpump.spark.source.options import SourceOptions
from eventpump.spark.source.schema import ALL_TYPES
from eventpump.spark.source.watch import HubsWatch

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

MAX_ROWS: Final = 2**63 - 1
"""The limit of rows for Spark where there is only one of bytes: without any it would ask for all events."""

LOAD_PATIENCE: Final = 10.0
"""Seconds for which `load` waits for the service's answer whether the consumer group exists."""


def check_consumer_groups(hubs: Sequence[SourceOptions]) -> None:
    """Check that the consumer groups exist in every hub, before a query begins and writes to its checkpoint.

    Other errors of the service are left to the query itself, which retries for longer.
    """

    async def check(options: SourceOptions) -> None:
        transport = worker.transport(options.connection)
        if options.consumer_group.lower() != "$default":
            await lookups.require_consumer_group(transport, options)
        if (options.watch_consumer_group or "$Default").lower() != "$default":
            await lookups.require_consumer_group(transport, options, "watchConsumerGroup")

    try:
        worker.run(gather(map(check, hubs)), LOAD_PATIENCE)
    except ServiceError as error:
        _log.info("the consumer groups could not be checked: %s", error)
        worker.drop(hubs[0].connection)


def columns_of(schema: StructType) -> tuple[str, ...]:
    """Return the names of the columns to read: some of the source's, in any order. Raises `ConfigurationError`."""
    for field in schema.fields:
        wanted = ALL_TYPES.get(field.name)
        if wanted is None:
            spelling = {name.lower(): name for name in ALL_TYPES}
            nearest = difflib.get_close_matches(field.name.lower(), spelling, n=1)
            hint = f"; did you mean {spelling[nearest[0]]}?" if nearest else "."
            there_is = ", ".join(ALL_TYPES)
            raise ConfigurationError("schema", f"unknown column {field.name}{hint} The source has: {there_is}")
        if field.dataType.simpleString() != wanted.lower().replace(" ", ""):
            raise ConfigurationError("schema", f"column {field.name} must be {wanted}")
        if not field.nullable:
            raise ConfigurationError("schema", f"column {field.name} must be nullable")
    return tuple(schema.fieldNames())


class _Reader:
    """The part of both readers that executors need: options and columns. It is pickled, so it must hold nothing
    large."""

    def __init__(self, hubs: Sequence[SourceOptions], columns: Sequence[str]) -> None:
        self._hubs = tuple(hubs)
        self._columns = tuple(columns)
        self._is_noted = False

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read a task's ranges. Runs on executors."""
        from eventpump.spark.source.receive import (
            read_ranges,  # only executors create rows, and the module takes long to load
        )

        task = partition.value
        assert isinstance(task, SourcePartition)
        options = self._hubs[task.hub]
        return read_ranges(
            options.connection,
            options.receive,
            task.ranges,
            self._columns,
            keep_links=task.keep_links,
        )

    def _tasks(
        self,
        ranges: Mapping[str, Sequence[SequenceRange]],
        keep_links: float = KEEP_LINKS,
    ) -> list[InputPartition]:
        """Return the tasks of a batch, from ranges by hub in lower case."""
        wanted = self._hubs[0].min_partitions
        by_hub = {index: ranges.get(each.connection.hub.lower(), ()) for index, each in enumerate(self._hubs)}
        sizes = {index: sum(each.size for each in found) for index, found in by_hub.items()}
        each_wants = None if wanted is None else share(sizes, wanted, int)
        slots = self._hubs[0].slots
        most = None if slots is None else share(sizes, TASKS_PER_SLOT * slots, int)
        tasks = [
            task
            for index, found in by_hub.items()
            for task in plan_tasks(
                self._hubs[index].connection.hub,
                found,
                min_partitions=None if each_wants is None else max(1, each_wants[index]),
                partitions_per_task=self._hubs[0].partitions_per_task,
                max_tasks=None if most is None else max(1, most[index]),
                keep_links=keep_links,
                index=index,
            )
        ]
        if wanted is not None and 0 < len(tasks) < wanted and not self._is_noted:
            self._is_noted = True
            _log.warning(
                "minPartitions is %d, but there are only %d tasks: the service lets %d readers share a partition, and "
                "a task reads at least one event (%d partitions, %d events)",
                wanted,
                len(tasks),
                MAX_READERS,
                sum(map(len, by_hub.values())),
                sum(each.size for found in by_hub.values() for each in found),
            )
        return [InputPartition(each) for each in tasks]

    def _report_losses(self, losses: Sequence[QueryLoss]) -> None:
        """Raise for lost events if `fail_on_data_loss` is set, or log them."""
        for loss in losses:
            if self._hubs[0].fail_on_data_loss:
                raise loss.error()
            _log.warning("hub %s, partition %s: %s; going on", loss.hub, loss.partition_id, loss.problem)


class BatchReader(_Reader, DataSourceReader):
    """Reads hubs once, from the starting to the ending positions as they are when the batch is planned."""

    def partitions(self) -> Sequence[InputPartition]:
        """Resolve the positions, and split the events between them into tasks."""
        budget = RequestBudget()

        async def ask(options: SourceOptions) -> tuple[HubSnapshot, HubOffset, HubOffset]:
            transport, hub = worker.transport(options.connection), options.connection.hub
            facts = await lookups.read_facts(transport, options, budget)
            start = await lookups.find_numbers(transport, options, facts)
            end = await lookups.find_numbers(transport, options, facts, is_end=True)
            end = {each: max(number, start[each]) for each, number in end.items()}
            return facts.snapshot(hub), HubOffset(hub, start), HubOffset(hub, end)

        found = worker.run(gather(map(ask, self._hubs)))
        starts, ends = (SourceOffset.of(each[index] for each in found) for index in (1, 2))  # type: ignore[misc]
        snapshots = {each[0].hub.lower(): each[0] for each in found}
        ranges, losses = source_ranges(starts, ends, snapshots)
        self._report_losses(losses)
        # For a batch without tasks, Spark creates a task with a partition that is not ours.
        return self._tasks(ranges) or [InputPartition(SourcePartition(()))]


class StreamReader(_Reader, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads hubs for a query.

    Spark creates several. One exists as long as the query, in its own process on the driver, and returns offsets;
    others are pickled, and read on executors.

    Args:
        notes: Lines that are logged once, in the query's process.
    """

    def __init__(self, hubs: Sequence[SourceOptions], columns: Sequence[str], notes: Sequence[str] = ()) -> None:
        super().__init__(hubs, columns)
        self._notes = tuple(notes)
        self._query: _Query | None = None

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """Return where a new query begins: at the user's position, or at the newest event. It stays the same."""
        return self._own_query().first_start().to_json()

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        """Return how much a batch holds by default."""
        options = self._hubs[0]
        if options.max_events_per_trigger is not None:
            return ReadMaxRows(options.max_events_per_trigger)
        # Spark's own limit in bytes is not used: Spark does not get the size of a batch.
        return ReadAllAvailable() if options.max_bytes_per_trigger is None else ReadMaxRows(MAX_ROWS)

    def latestOffset(  # noqa: N802 - Spark's name
        self, start: dict[str, Any] | None = None, limit: ReadLimit | None = None
    ) -> dict[str, Any]:
        """Return where the batch that begins at `start` ends.

        "Nothing new" is returned only after every partition was looked at since this call; so a query that waits for
        all available events (`processAllAvailable`) misses none. Looks are spread over time, so that there are at most
        `REQUESTS_PER_SECOND`; with a `watch_consumer_group`, a new event ends the wait at once.
        """
        return self._own_query().latest(start, is_limited=limit is None or isinstance(limit, ReadMaxRows))

    def reportLatestOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """Return the end of the hub, for the query's progress."""
        return self._own_query().report()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        """Let the query end at the events that are available now."""
        self._own_query().aim()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Split a batch into tasks. Raises as `latestOffset`."""
        query = self._own_query()
        return self._tasks(query.ranges(start, end), query.keep_links)

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
            self._query = _Query(self._hubs, self._report_losses)
        return self._query


class _Query:
    """The driver's state of a running query: where it began, and what is known of its hubs.

    Spark calls it on one thread; what it decides, it decides on the loop, where links show new events meanwhile.

    Args:
        on_losses: Called with the losses; it raises if the query has to fail.
    """

    def __init__(self, hubs: Sequence[SourceOptions], on_losses: Callable[[Sequence[QueryLoss]], None]) -> None:
        self._hubs = hubs
        self._on_losses = on_losses
        self._planner = StreamPlanner(hubs[0].limits)
        self._watch = HubsWatch(self._transport, hubs)
        worker.close_first(self._watch)
        self._ends_at_target = False
        self._last: SourceOffset | None = None
        self._planned_at: float | None = None
        self.keep_links = KEEP_LINKS
        """Seconds for which the last batch's links stay open for the next one: two triggers, within limits."""

    def first_start(self) -> SourceOffset:
        """Return where the query begins, decided once."""
        if not self._planner.begun:
            check_consumer_groups(self._hubs)
        return self._run(self._first_start())

    async def _first_start(self) -> SourceOffset:
        await self._begin(frozenset())
        return SourceOffset.of(self._planner.begun.values())

    async def _begin(self, known: Collection[str]) -> None:
        """Decide where the query begins in the hubs that its offset does not have, once for each."""
        names = [each.connection.hub.lower() for each in self._hubs]
        missing = [index for index, name in enumerate(names) if name not in known and name not in self._planner.begun]
        if not missing:
            return
        await self._watch.look_at_all()

        async def find(index: int) -> HubOffset:
            options, facts = self._hubs[index], self._watch.facts[index]
            numbers = await lookups.find_numbers(self._transport(), options, facts)
            return HubOffset(options.connection.hub, numbers, created_at=facts.hub.created_at)

        for each in await gather(map(find, missing)):
            self._planner.begin(each)

    def latest(self, asked_from: dict[str, Any] | None, *, is_limited: bool) -> dict[str, Any]:
        """Return where the next batch ends that begins at `asked_from`: None from Spark before 4.2."""
        start = self._last or self.first_start() if asked_from is None else self._offset(asked_from)
        found = self._run(self._latest(start, is_limited=is_limited))
        # As Spark wrote it: offsets are compared as text, and one written by hand may be spelled differently.
        return asked_from if found is start and asked_from is not None else found.to_json()

    async def _latest(self, start: SourceOffset, *, is_limited: bool) -> SourceOffset:
        loop = asyncio.get_running_loop()
        asked_at = loop.time()
        await self._begin(start.hubs.keys())
        is_full = is_limited and self._is_full(start)
        if is_full:
            await self._watch.refresh_behind()
            is_full = self._is_full(start)  # unless a hub turned out to be another one
        if not is_full:
            await self._watch.refresh()
        while True:
            snapshots = self._watch.snapshots
            end = self._planner.end(start, snapshots, is_limited=is_limited, now=loop.time())
            self._on_losses(end.losses)
            if end.offset is not start or self._ends_at_target or self._watch.is_known_since(asked_at):
                return end.offset
            await self._watch.until_news(self._drained(start, snapshots))

    def _is_full(self, start: SourceOffset) -> bool:
        """Return whether the next batch can be planned from what is known, because that is more than it may hold."""
        return self._watch.is_complete and self._planner.is_full(start, self._watch.snapshots)

    def _drained(self, start: SourceOffset, snapshots: Mapping[str, HubSnapshot]) -> dict[int, dict[str, int]]:
        """Return the partitions that are read to their end, by hub, with the number of the next event."""
        drained: dict[int, dict[str, int]] = {}
        for index, options in enumerate(self._hubs):
            name = options.connection.hub.lower()
            following = start.hubs[name].following if name in start.hubs else {}
            drained[index] = {
                each: bounds.latest
                for each, bounds in snapshots[name].bounds.items()
                if following.get(each, 0) == bounds.latest
            }
        return drained

    def report(self) -> dict[str, Any]:
        """Return the end of the hubs, as far as it is known."""

        async def known() -> SourceOffset:
            await self._watch.until_known()
            return SourceOffset.of(each.latest for each in self._watch.snapshots.values())

        return self._run(known()).to_json()

    def aim(self) -> None:
        """Let the query end at the events that are available now."""

        async def known() -> Mapping[str, HubSnapshot]:
            await self._watch.look_at_all()
            return self._watch.snapshots

        self._planner.aim(self._run(known()))
        self._ends_at_target = True

    def ranges(self, start: dict[str, Any], end: dict[str, Any]) -> Mapping[str, Sequence[SequenceRange]]:
        """Return the ranges of a batch, by hub in lower case."""
        before, self._planned_at = self._planned_at, time.monotonic()
        self.keep_links = keep_links_for(None if before is None else self._planned_at - before)
        begin, self._last = self._offset(start), self._offset(end)

        async def known() -> Mapping[str, HubSnapshot]:
            await self._watch.until_known()  # not again: the batch's end was just found
            self._watch.planned()
            snapshots = self._watch.snapshots
            assert self._last is not None
            if not self._ends_at_target:
                # What comes while Spark computes is known then. In busy partitions each batch would open another link.
                self._watch.watch(self._drained(self._last, snapshots), skips_busy=True)
            return snapshots

        ranges, losses = source_ranges(begin, self._last, self._run(known()))
        self._on_losses(losses)
        return ranges

    def _offset(self, document: dict[str, Any]) -> SourceOffset:
        """Return an offset from the checkpoint.

        Raises:
            ConfigurationError: It belongs to other hubs, or has a partition that is not chosen: its unread events would
                be left out without a word.
        """
        offset = SourceOffset.from_json(document)
        read = [each.connection.hub for each in self._hubs]
        if not any(name.lower() in offset.hubs for name in read):
            theirs = ", ".join(repr(each.hub) for each in offset.hubs.values())
            raise ConfigurationError(
                "checkpoint", f"it belongs to hub {theirs}, but this query reads {', '.join(map(repr, read))}"
            )
        for options in self._hubs:
            known = offset.hubs.get(options.connection.hub.lower())
            for partition_id in () if known is None else known.following:
                if options.partitions is not None and partition_id not in options.partitions:
                    raise ConfigurationError(
                        "partitions",
                        f"the checkpoint has partition {partition_id}, which is not chosen; choose it too, or begin "
                        "another query with a new checkpoint",
                    )
        return offset

    def _transport(self) -> Transport:
        return worker.transport(self._hubs[0].connection)

    def _run(self, work: Coroutine[Any, Any, _T]) -> _T:
        try:
            return worker.run(work)
        except ServiceError:
            worker.drop(self._hubs[0].connection)
            raise


def _end_in_order() -> None:
    """Make the process end cleanly when Spark ends it: by default it ends before its connections are closed."""

    def leave(_signal: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sys.exit(0)

    signal.signal(signal.SIGTERM, leave)
