"""Publishing a batch exactly once: the shells around the ledger, for the driver and for the tasks.

On the driver, after the rows were written (see :mod:`eventpump.spark.sink.kept`)::

    batch = MicroBatch(sink_of(namespace, hub, sink_id), query_id, run, batch_id, limits, is_stamped)
    step = await prepare_batch(stores, transport, batch)
    if isinstance(step, Unplanned):
        step = await plan_batch(stores, transport, step, rows)
    while isinstance(step, Plan):
        outcomes = ...  # of every partition with rows, see below
        step = await finish_batch(stores, transport, batch, step, outcomes, policy)
    step.receipts

For each hub partition that has rows, in the driver or in a task::

    async with PartitionPublishing(transport, plan, partition_id) as publishing:
        await publishing.put(await publishing.needed(), events)  # in portions of any size
        outcome = await publishing.finish()
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self, TypeVar

from pydantic import Field

from eventpump.aio.tasks import gather
from eventpump.amqp.codec import AmqpDecodeError, encode
from eventpump.amqp.message import Message
from eventpump.core.backoff import Backoff, least_delay
from eventpump.core.sequencer import AttachRequest, PartitionSequencer, ProducerAnswer, SequencerState
from eventpump.errors import (
    ClosedError,
    ConfigurationError,
    EventError,
    EventPumpError,
    EventTooLargeError,
    InvalidClientStateError,
    ProducerDisconnectedError,
    PublishOutcomeUnknownError,
    Recovery,
    ServiceError,
    StoreError,
)
from eventpump.eventhubs.conditions import NOT_ALLOWED
from eventpump.eventhubs.events import ReceivedEvent
from eventpump.eventhubs.sealing import SealedBatch, pieces
from eventpump.eventhubs.stamps import STAMP, read_row_stamp, stamped
from eventpump.interfaces import Transport
from eventpump.logs import retry_logger
from eventpump.options.base import Name, RetryOptions, Seconds, SettingsModel
from eventpump.options.consumer import LINK_RETRY
from eventpump.producer.packing import BatchPacker
from eventpump.producer.publisher import PartitionPublisher
from eventpump.producer.tail import read_tail
from eventpump.spark.connection import RETRY_TIMEOUT
from eventpump.spark.sink.attempt import PartitionWork, WorkStep, may_continue
from eventpump.spark.sink.patience import LONGEST_DELAY, patiently
from eventpump.spark.sink.protocol import (
    AttachProducers,
    CreateRecord,
    DeleteRecords,
    DeleteRows,
    FindRows,
    ListObsoleteRows,
    ListRecords,
    ListRows,
    MicroBatch,
    OnProducerStateLost,
    PartitionTail,
    Procedure,
    ReadPartitions,
    ReadRecord,
    ReadTails,
    Request,
    Together,
    Unplanned,
    WrittenRows,
    find_plan,
    finish,
    make_plan,
    overtaken,
    prepare,
)
from eventpump.spark.sink.records import (
    Done,
    PartitionOutcome,
    PartitionPlan,
    Plan,
    Sink,
    directory_name,
    is_obsolete,
)

if TYPE_CHECKING:
    # Not loaded by executors: they bring the blob SDK with them.
    from eventpump.storage.ledgers.interface import LedgerStore
    from eventpump.storage.rows.interface import RowStore

_log = logging.getLogger("eventpump.spark")

T = TypeVar("T")
U = TypeVar("U")

AT_ONCE: Final = 32
"""Partitions that are asked for, or published to, at a time."""
_DELETED_AT_ONCE: Final = 8
"""Records that are deleted at a time."""


class Stores(NamedTuple):
    """What a sink keeps outside of the service: open stores, of the ledger's records and of the rows of batches not
    done."""

    ledger: LedgerStore
    rows: RowStore


class PublishOptions(SettingsModel):
    """How a batch's rows are published.

    Args:
        retry: The delays between tries of sends, of looks and of the ledger's store; and how often a request is
            repeated that the service refuses.
        retry_timeout: Seconds without progress after which an attempt fails with its last error.
        buffer_bytes: Rows of a partition that were given and are not stored yet; a portion may go beyond it, and so
            may a message that is not full.
        consumer_group: Whom the tail is read as. It takes one of the group's five readers of a partition.
        scan_timeout: Seconds to wait for the next event of the tail.
    """

    retry: RetryOptions = RetryOptions()
    retry_timeout: Seconds = RETRY_TIMEOUT
    buffer_bytes: int = Field(default=4 * 1024 * 1024, ge=1)
    consumer_group: Name = "$Default"
    scan_timeout: Seconds = 60.0


_DEFAULTS: Final = PublishOptions()


def sink_of(namespace: str, hub: str, sink_id: str, part: str | None = None) -> Sink:
    """Name a sink, or a part of one. Raises `ConfigurationError` if sink id or part cannot be a name."""
    directory_name(sink_id)
    if part is not None:
        directory_name(part, "part")
    return Sink(sink_id=sink_id, namespace=namespace, hub=hub, part=part)


async def prepare_batch(
    stores: Stores, transport: Transport, batch: MicroBatch, options: PublishOptions = _DEFAULTS
) -> Plan | Done | Unplanned:
    """Find that a batch is done, or the plan it has, or what its plan is made of. It can run while rows are encoded.

    Raises:
        ConfigurationError: The sink belongs to another query or hub, its ledger does not fit the query, or the hub
            offers no idempotent publishing.
        StoreError: The store failed, or a record of it cannot be read.
        ProducerStateLostError: A take-over that was begun cannot count what is stored.
        ServiceError: The service could not be asked.
    """
    step = await _Outside(stores, transport, batch, options).carry_out(prepare(batch))
    if isinstance(step, Plan):
        _warn_of_missing(batch, step)
    return step


async def plan_batch(
    stores: Stores,
    transport: Transport,
    unplanned: Unplanned,
    rows: WrittenRows,
    options: PublishOptions = _DEFAULTS,
) -> Plan:
    """Make the plan of a batch that has none. Nothing of the batch is sent before.

    Cancelled, the plan is made or not; call it again.

    Args:
        rows: Where the rows are.

    Raises:
        ConfigurationError: This driver does not see rows that tasks have written.
        Exception: As `prepare_batch`.
    """
    batch = unplanned.batch
    plan = await _Outside(stores, transport, batch, options).carry_out(make_plan(unplanned, rows))
    _warn_of_missing(batch, plan)
    return plan


async def planned_batch(
    stores: Stores, transport: Transport, batch: MicroBatch, options: PublishOptions = _DEFAULTS
) -> Plan | None:
    """Return the plan of a batch, which may be done; None if the ledger has none. Raises `StoreError`."""
    return await _Outside(stores, transport, batch, options).carry_out(find_plan(batch))


async def check_overtaken(
    stores: Stores, transport: Transport, batch: MicroBatch, options: PublishOptions = _DEFAULTS
) -> None:
    """Check, where publishing has failed, whether that is as another run of the query goes on: then a `StoreError`."""
    await _Outside(stores, transport, batch, options).carry_out(overtaken(batch))


def _warn_of_missing(batch: MicroBatch, plan: Plan) -> None:
    for each in plan.partitions if plan.run_id == batch.run_id else ():
        if each.missing:
            _log.warning(
                "%s, partition %s: its last event is %d before where it was: the service has lost accepted events, or "
                "the hub was recreated",
                batch.sink.hub,
                each.partition_id,
                each.missing,
            )


async def finish_batch(
    stores: Stores,
    transport: Transport,
    batch: MicroBatch,
    plan: Plan,
    outcomes: Iterable[PartitionOutcome],
    policy: OnProducerStateLost = OnProducerStateLost.FAIL,
    options: PublishOptions = _DEFAULTS,
) -> Plan | Done:
    """Record that a batch is done; or replace the producers that were lost, and return the plan to continue with.

    Args:
        outcomes: Those of the plan's tasks: one per partition with rows; repeats of a task's are fine.

    Returns:
        A plan where the tasks must run again, all of them; what is stored is found, and not sent twice.

    Raises:
        ProducerStateLostError: Producers were lost, and the policy is to fail, or what is stored cannot be counted.
        ConfigurationError: The policy is to scan, and the plan is without stamps.
        InvalidClientStateError: An outcome does not fit the plan.
        StoreError: The store failed; or another run of the query has finished the batch.
        ServiceError: The service could not be asked.
    """
    return await _Outside(stores, transport, batch, options).carry_out(finish(batch, plan, outcomes, policy))


class _Outside:
    """Carries out what the procedures of the ledger ask for."""

    def __init__(self, stores: Stores, transport: Transport, batch: MicroBatch, options: PublishOptions) -> None:
        self._store, self._objects = stores
        self._transport = transport
        self._hub = batch.sink.hub
        self._directory = batch.sink.directory
        self._rows_directory = batch.sink.rows_directory
        self._run = batch.run
        self._options = options
        self._rng = random.Random()

    async def carry_out(self, procedure: Procedure[T]) -> T:
        try:
            request = next(procedure)
            while True:
                request = procedure.send(await self._answer(request))
        except StopIteration as stop:
            result: T = stop.value
            return result
        finally:
            procedure.close()

    async def _answer(self, request: Request) -> object:
        match request:
            case ReadRecord(name):
                return await self._stored(lambda: self._store.read(f"{self._directory}/{name}"))
            case CreateRecord(name, body):
                return await self._stored(lambda: self._store.create(f"{self._directory}/{name}", body))
            case ListRecords():
                return await self._stored(lambda: self._store.list(self._directory))
            case DeleteRecords(names):
                await self._delete(names)
                return None
            case ListRows():
                return await self._stored(lambda: self._objects.list(self._rows_directory))
            case ListObsoleteRows(before):
                return await self._obsolete_rows(before)
            case DeleteRows(names):
                await self._delete_rows(names)
                return None
            case ReadPartitions():
                return (await self._transport.get_hub_properties(self._hub)).partition_ids
            case ReadTails(partition_ids):
                return await each_partition({each: each for each in partition_ids}, self._tail)
            case AttachProducers(producers):
                return await each_partition(producers, self._attach)
            case FindRows(plan, ranges):
                return await each_partition(ranges, lambda each, range_: self._rows(plan, each, *range_))
            case Together(requests):
                return await gather(map(self._answer, requests))

    async def _stored(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Call the store, again where it failed. Its `create` may be called again."""
        on_retry = retry_logger(_log, f"ledger directory {self._directory}", hub=self._hub)
        options = self._options
        base_delay = options.retry.base_delay
        return await patiently(ask, options.retry_timeout, base_delay=base_delay, rng=self._rng, on_retry=on_retry)

    async def _delete(self, names: Iterable[str]) -> None:
        try:
            await gather((self._store.delete(f"{self._directory}/{name}") for name in names), at_once=_DELETED_AT_ONCE)
        except StoreError as error:
            _log.warning("records that are not needed any more stay in the ledger: %s", error)

    async def _obsolete_rows(self, before: int) -> list[str]:
        try:
            listed = await self._objects.list(self._rows_directory)
        except StoreError as error:
            _warn_of_left(error)
            return []
        return [each for each in listed if is_obsolete(each, before, self._run.claim or 0)]

    async def _delete_rows(self, names: Sequence[str]) -> None:
        try:
            await self._objects.delete([f"{self._rows_directory}/{each}" for each in names])
        except StoreError as error:
            _warn_of_left(error)

    async def _tail(self, partition_id: str, _: object) -> PartitionTail:
        found = await self._transport.get_partition_properties(self._hub, partition_id)
        last = found.last_enqueued_sequence_number
        # Of an empty partition the beginning says nothing (protocol.md 6.2).
        return PartitionTail(last + 1 if found.is_empty else found.beginning_sequence_number, last)

    async def _attach(self, partition_id: str, asked: AttachRequest) -> ProducerAnswer | None:
        sequencer = PartitionSequencer[SealedBatch](
            partition_id, producer_id=asked.producer_id, owner_level=asked.owner_level
        )
        publisher = PartitionPublisher(self._transport, self._hub, sequencer, retry=self._options.retry, rng=self._rng)
        try:
            await publisher.attached()
        except InvalidClientStateError as error:
            raise ConfigurationError(
                "idempotent", f"the hub {self._hub} offers no idempotent publishing: {error.problem}"
            ) from error
        except ServiceError as error:
            if error.condition == NOT_ALLOWED and asked.producer_id is not None:
                return None
            raise
        finally:
            await publisher.aclose()
        assert sequencer.producer_id is not None
        assert sequencer.owner_level is not None
        assert sequencer.last_number is not None
        return ProducerAnswer(sequencer.producer_id, sequencer.owner_level, sequencer.last_number)

    async def _rows(self, plan: Plan, partition_id: str, after: int, through: int) -> list[int]:
        prefix = plan.stamp_prefix(partition_id)
        rows: list[int] = []
        events = _tail_of(self._transport, self._hub, partition_id, after, through, self._options)
        async with aclosing(events):
            async for event in events:
                row = read_row_stamp(event.properties.get(STAMP), prefix)
                if row is not None:
                    rows.append(row)
        return rows


def _warn_of_left(error: StoreError) -> None:
    _log.warning("rows that are not needed any more are left, until the next batch is done: %s", error)


async def each_partition(
    work: Mapping[str, T], do: Callable[[str, T], Coroutine[Any, Any, U]], *, at_once: int = AT_ONCE
) -> dict[str, U]:
    """Do something for every partition, several at a time. The first error ends it."""
    results = await gather((do(key, value) for key, value in work.items()), at_once=at_once)
    return dict(zip(work, results, strict=True))


def _tail_of(
    transport: Transport, hub: str, partition_id: str, after: int, through: int, options: PublishOptions
) -> AsyncGenerator[ReceivedEvent, None]:
    """Read the events of a partition after one sequence number, up to and with another; see `read_tail`."""
    group, timeout = options.consumer_group, options.scan_timeout
    return read_tail(transport, hub, group, partition_id, after, through, timeout=timeout, retry=LINK_RETRY)


def _content(raw: bytes) -> tuple[Any, ...]:
    """Return what the service does not change of an event: all but header and annotations (AMQP 3.2, bare message)."""
    message = Message.decode(raw)
    # As values, a NaN does not equal itself.
    properties = {name: encode(value) for name, value in (message.application_properties or {}).items()}
    return message.properties, properties, message.body


def _content_of(event: ReceivedEvent) -> tuple[Any, ...] | None:
    """Return the same of a received event; None of one that cannot be decoded, as those of others may be."""
    try:
        return _content(event.raw)
    except (AmqpDecodeError, EventError):
        return None


def _may_pass(error: EventPumpError) -> bool:
    """Return whether a failure may pass by itself, as outages do: then only time limits the tries."""
    if isinstance(error, ServiceError):
        return error.recovery is not Recovery.GIVE_UP
    return isinstance(error, PublishOutcomeUnknownError)


class _Packed:
    """Rows in one message."""

    __slots__ = ("count", "first", "sealed")

    def __init__(self, first: int, sealed: SealedBatch) -> None:
        self.first = first
        self.count = sealed.count
        self.sealed = sealed


class PartitionPublishing:
    """One attempt to publish one hub partition's rows of a batch. A context manager; the attempt ends with it.

    A task of its own sends what is packed while the caller reads more. Rows that are stored already, by an earlier
    attempt or a rival, are not needed. Cancelled or failed, it is of no more use; another attempt may follow at once.

    Args:
        publisher: One that was kept from an earlier batch, to begin with instead of looking; see `may_continue`.

    Raises:
        KeyError: The plan has no such partition.
    """

    def __init__(
        self,
        transport: Transport,
        plan: Plan,
        partition_id: str,
        *,
        options: PublishOptions = _DEFAULTS,
        rng: random.Random | None = None,
        publisher: PartitionPublisher | None = None,
    ) -> None:
        self._transport = transport
        self._plan = plan
        self._entry: PartitionPlan = plan.partition(partition_id)
        self._options = options
        self._rng = random.Random() if rng is None else rng
        self._backoff = Backoff(options.retry.base_delay, max(options.retry.base_delay, LONGEST_DELAY))
        self._work = PartitionWork(self._entry, max_tries=options.retry.max_retries)
        self._progressed_at = 0.0
        self._publisher = publisher
        self._rows: list[bytes] = []  # those that are not known to be stored; the first is row `_base`
        self._base = self._entry.offset
        self._held = 0
        self._packed: deque[_Packed] = deque()
        self._open_from = 0  # the row after the last one that is packed
        # Rows that make no full message yet; its limit is known with the first link.
        self._open = BatchPacker(0, idempotent=True, oversized=True)
        self._changed = asyncio.Event()
        self._room = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        if publisher is not None:
            assert may_continue(publisher.sequencer, self._entry)
            self._limit_messages(publisher)
            self._work.continued()

    @property
    def partition_id(self) -> str:
        """The partition."""
        return self._entry.partition_id

    async def __aenter__(self) -> Self:
        """Begin to ask the service how far the batch is."""
        assert self._task is None
        self._progressed_at = asyncio.get_running_loop().time()
        name = f"eventpump batch {self._plan.batch_id} of partition {self._entry.partition_id}"
        self._task = asyncio.create_task(self._run(), name=name)
        self._task.add_done_callback(lambda _: self._room.set())
        return self

    async def __aexit__(self, *_: object) -> None:
        """End the attempt: what is on its way may still be stored."""
        assert self._task is not None
        self._task.cancel()
        try:
            await asyncio.wait({self._task})
            if not self._task.cancelled():
                self._task.exception()  # the caller has had it, or left before
        finally:
            await self._drop_publisher()

    async def needed(self) -> int | None:
        """Wait until it is known how many rows are stored.

        Returns:
            The first row that is not stored; None where the producer's state is lost: go on to `finish`.
        """
        while not self._is_over():
            if self._work.needed is not None:
                return self._work.needed
            self._room.clear()
            await self._room.wait()
        return None if self._work.loss is not None else self._work.needed

    async def put(self, first: int, events: Sequence[bytes]) -> None:
        """Add the next rows, and wait until there is room for more.

        Args:
            first: The index of the first of them. Rows before it were added, or are stored.
            events: Encoded events, without numbers of idempotent publishing.
        """
        if self._is_over():
            return
        self._add(first, events)
        self._work.received(first + len(events))
        self._pack()
        self._changed.set()
        # Rows of a message that is not full yet are not sent: waiting for them to be stored would not end.
        while self._held > self._options.buffer_bytes and (self._packed or self._work.position is None):
            self._room.clear()
            await self._room.wait()
            if self._is_over():
                return

    async def finish(self) -> PartitionOutcome:
        """Wait until all rows are stored, after all that are needed were added.

        Returns:
            A receipt; or the loss of the producer's state, for `finish_batch`.

        Raises:
            ProducerDisconnectedError: The producer was taken over: the query must fail.
            InvalidClientStateError: The service has more rows of the batch than there are.
            EventError: An event is larger than the service takes, or carries numbers already; a note names its row.
            ServiceError: No success within the retries; another attempt may have it.
        """
        assert self._task is not None
        await asyncio.shield(self._task)
        if self._work.loss is not None:
            return self._work.loss
        return self._work.receipt()

    def release(self) -> PartitionPublisher | None:
        """Return the publisher, the caller's now, for the next batch, after `finish` has returned a receipt;
        None if it is no use."""
        assert self._task is not None
        assert self._task.done()
        publisher = self._publisher
        if publisher is None or publisher.sequencer.state is not SequencerState.IDLE:
            return None
        self._publisher = None
        return publisher

    # ------------------------------------------------------------------------------------------ rows

    def _is_over(self) -> bool:
        """Whether nothing more is sent. Raises an error if the attempt has failed."""
        task = self._task
        if task is None or task.cancelled():
            raise ClosedError("partition's publishing")
        if task.done():
            task.result()
        return task.done()

    def _add(self, first: int, events: Sequence[bytes]) -> None:
        """Keep rows that are not known to be stored."""
        needed = self._work.needed
        skipped = max(0, (self._entry.offset if needed is None else needed) - first)
        rows: Sequence[bytes] = events[skipped:] if skipped else events
        if not self._rows:
            self._base = first + skipped
        if self._plan.is_stamped:
            prefix = self._plan.stamp_prefix(self._entry.partition_id)
            rows = [stamped(event, f"{prefix}{row}") for row, event in enumerate(rows, first + skipped)]
        self._rows += rows
        self._held += sum(map(len, rows))

    def _pack(self) -> None:
        """Put rows into messages: as many as fit, so that attempts which begin at the same row make the same ones."""
        if self._work.position is None:
            return
        packer, most, count = self._open, self._plan.limits.max_events, self._open.count
        for event in self._rows[self._open_from + count - self._base :]:
            try:
                head, rest = pieces(event, idempotent=True)
            except EventError as error:
                raise self._naming(error, self._open_from + count) from None
            if not packer.add(head, rest):
                self._close(packer.take())
                packer.add(head, rest)
                count = 0
            count += 1
            if count == most:
                self._close(packer.take())
                count = 0
        if count and self._work.rows == self._entry.count:
            self._close(packer.take())

    def _naming(self, error: EventError, row: int) -> EventError:
        error.add_note(f"row {row} of the share of partition {self._entry.partition_id}")
        return error

    def _close(self, sealed: SealedBatch) -> None:
        """Keep a full message."""
        self._packed.append(_Packed(self._open_from, sealed))
        self._open_from += sealed.count

    def _forget_stored(self) -> None:
        """Drop the rows that are stored. What was packed stays, unless a message would begin elsewhere now."""
        self._room.set()
        position = self._work.position
        if position is None:
            return
        dropped = self._rows[: max(0, position - self._base)]
        del self._rows[: len(dropped)]
        self._held -= sum(map(len, dropped))
        self._base = max(self._base, position)
        while self._packed and self._packed[0].first < position:
            self._packed.popleft()
        if (self._packed[0].first if self._packed else self._open_from) != position:
            self._packed.clear()
            self._open_from = position
            self._open = BatchPacker(self._open.limit, idempotent=True, oversized=True)
        self._pack()

    # ------------------------------------------------------------------------------------------ the attempt

    async def _run(self) -> None:
        # Not `retrying`: after a failure the next step is another one, and troubles in a row go on to count over steps
        # that succeed, until a row is stored: `PartitionWork` decides.
        work = self._work
        while True:
            step = work.step
            if step in (WorkStep.END, WorkStep.LOST):
                return
            if step is WorkStep.FAIL:
                raise work.error()
            if step is WorkStep.REST or (step is WorkStep.SEND and not self._packed):
                self._changed.clear()
                await self._changed.wait()
                continue
            try:
                if step is WorkStep.LOOK:
                    await self._look()
                elif step is WorkStep.SCAN:
                    await self._scan()
                else:
                    await self._send()
                self._forget_stored()
            except ProducerDisconnectedError as error:
                work.fenced(error)
            except (EventError, ConfigurationError):
                raise
            except EventPumpError as error:
                if step is WorkStep.LOOK and isinstance(error, ServiceError) and error.recovery is Recovery.GIVE_UP:
                    raise
                passed = asyncio.get_running_loop().time() - self._progressed_at
                if work.troubled(error, counts=not _may_pass(error), is_late=passed > self._options.retry_timeout):
                    _log.info("partition %s: looking again: %s", self._entry.partition_id, error)
                    await asyncio.sleep(self._backoff.next(self._rng, at_least=least_delay(error)))

    async def _look(self) -> None:
        await self._drop_publisher()
        entry = self._entry
        sequencer = PartitionSequencer[SealedBatch](
            entry.partition_id, producer_id=entry.producer_id, owner_level=entry.owner_level
        )
        publisher = self._publisher = PartitionPublisher(
            self._transport, self._plan.sink.hub, sequencer, retry=self._options.retry, rng=self._rng
        )
        try:
            await publisher.attached()
        except ServiceError as error:
            if error.condition == NOT_ALLOWED:
                self._work.unknown_producer()
                return
            raise
        assert sequencer.last_number is not None
        self._limit_messages(publisher)
        self._looked(sequencer.last_number)

    def _looked(self, last_number: int) -> None:
        position = self._work.position
        self._work.looked(last_number)
        if self._work.position != position:
            self._progressed_at = asyncio.get_running_loop().time()

    def _limit_messages(self, publisher: PartitionPublisher) -> None:
        self._open.limit = min(self._plan.limits.max_bytes, publisher.max_message_size)

    async def _scan(self) -> None:
        entry, hub = self._entry, self._plan.sink.hub
        row = self._rows[0]
        tail = await self._transport.get_partition_properties(hub, entry.partition_id)
        last = tail.last_enqueued_sequence_number
        # Where retention has passed events, the row may have been among them.
        is_stored = last > entry.tail and (tail.is_empty or tail.beginning_sequence_number > entry.tail + 1)
        if not is_stored:
            events = _tail_of(self._transport, hub, entry.partition_id, entry.tail, last, self._options)
            sought = self._plan.stamp(entry.partition_id, entry.offset) if self._plan.is_stamped else _content(row)
            async with aclosing(events):
                async for event in events:
                    found = event.properties.get(STAMP) if self._plan.is_stamped else _content_of(event)
                    if found == sought:
                        is_stored = True
                        break
        self._work.scanned(is_stored=is_stored)

    async def _send(self) -> None:
        assert self._publisher is not None
        packed = self._packed[0]
        assert packed.first == self._work.position
        try:
            first = await self._publisher.send(packed.sealed)
        except EventTooLargeError as error:
            raise self._naming(error, packed.first) from None
        self._backoff.reset()
        self._progressed_at = asyncio.get_running_loop().time()
        self._work.published(first, packed.count)

    async def _drop_publisher(self) -> None:
        publisher, self._publisher = self._publisher, None
        if publisher is not None:
            await publisher.aclose()
