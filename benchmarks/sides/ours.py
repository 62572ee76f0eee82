"""eventpump's sides."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Coroutine, Generator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from itertools import cycle, islice
from typing import Any, TypeVar

from benchmarks.events import samples
from benchmarks.meter import Meter
from benchmarks.sides.common import (
    BODY_SIZE,
    FanTally,
    Fleet,
    PacedTally,
    Tally,
    measure_delivery,
    measure_idle,
    measure_latency,
    port_of,
    resident,
    rest_until_told,
)
from eventpump import (
    BlobLeaseStore,
    BufferedProducer,
    CheckpointPolicy,
    EventData,
    EventProcessor,
    EventProcessorHost,
    EventProducer,
    MemoryLeaseStore,
    PartitionContext,
    PartitionReader,
    ReceivedEvent,
    SqliteLeaseStore,
)
from eventpump.core.lease import LeaseSnapshot, PartitionLease
from eventpump.eventhubs.events import Checkpoint
from eventpump.interfaces import (
    ConsumerScope,
    LeaseStore,
    RecordStore,
)
from eventpump.reports import HostReport, PumpStarted

_T = TypeVar("_T")
Options = dict[str, Any]

_REPLAYED = 32
"""How many batches a handler is called with again, to measure what it costs by itself."""
_REPLAYS = 15
"""How many times with each of them."""


# ----------------------------------------------------------------------------------------------------- filling


async def fill(
    connection_string: str,
    hub: str,
    partitions: int,
    events: int,
    body_size: int = BODY_SIZE,
    options: Options | None = None,
) -> dict[str, int]:
    """Send events, full batches in turn to every partition, the same number to each.

    Args:
        options: Of the connection.
    """
    event = EventData(b"x" * body_size)
    async with EventProducer(connection_string, hub, **(options or {})) as producer:
        left = {str(number): events // partitions for number in range(partitions)}
        while left:
            for partition_id in list(left):
                batch = await producer.create_batch(partition_id=partition_id)
                while batch.count < left[partition_id] and batch.try_add(event):
                    pass
                await producer.send(batch)
                left[partition_id] -= batch.count
                if not left[partition_id]:
                    del left[partition_id]
    return {"events": events // partitions * partitions}


# --------------------------------------------------------------------------------------------------- receiving


class _Reading(EventProcessor):
    """Reads four fields of every event, and sees that none is missing."""

    def __init__(self, meter: Meter, seen: Callable[[int], None], body_size: int = BODY_SIZE) -> None:
        self._meter = meter
        self._seen = seen
        self._body_size = body_size
        self._next: dict[str, int] = {}

    async def process_events(self, context: PartitionContext, events: Sequence[ReceivedEvent]) -> None:
        body, offset, number, enqueued = b"", "", -1, None
        for event in events:
            body, offset, number, enqueued = event.body, event.offset, event.sequence_number, event.enqueued_time
        first = events[0].sequence_number
        expected = self._next.get(context.partition_id, first)
        if first != expected or number != first + len(events) - 1:
            raise AssertionError(f"partition {context.partition_id}: {first}..{number} came instead of {expected}")
        if len(body) != self._body_size or not offset or enqueued is None:
            raise AssertionError("an event is not what was sent")
        self._next[context.partition_id] = number + 1
        self._meter.add(len(events))
        self._seen(self._meter.count)


class _Tallying(EventProcessor):
    """Reads four fields of every event."""

    def __init__(self, tally: Tally | PacedTally, stop: Callable[[], None]) -> None:
        self._tally = tally
        self._stop = stop

    async def process_events(self, context: PartitionContext, events: Sequence[ReceivedEvent]) -> None:
        body, offset, number, enqueued = b"", "", -1, None
        for event in events:
            body, offset, number, enqueued = event.body, event.offset, event.sequence_number, event.enqueued_time
        self.found(context, events, offset, number, len(body), enqueued)

    def found(
        self,
        context: PartitionContext,
        events: Sequence[ReceivedEvent],
        offset: str,
        number: int,
        size: int,
        enqueued: datetime | None,
    ) -> None:
        """Record a batch that was read: what was read of its last event."""
        if not offset:
            raise AssertionError("an event has no offset")
        first = events[0].sequence_number
        if self._tally.add(context.partition_id, first, number, len(events), size, enqueued):
            self._stop()


class _Telemetry(_Tallying):
    """Reads JSON, two properties, the key, offset, number and enqueued time of every event."""

    def __init__(self, tally: Tally | PacedTally, stop: Callable[[], None]) -> None:
        super().__init__(tally, stop)
        self._fleet = Fleet()

    async def process_events(self, context: PartitionContext, events: Sequence[ReceivedEvent]) -> None:
        fleet = self._fleet
        offset, number, enqueued = "", -1, None
        for event in events:
            report = event.body_as_json()
            properties: Any = event.properties
            key = event.partition_key
            offset, number, enqueued = event.offset, event.sequence_number, event.enqueued_time
            fleet.report(properties["type"], properties["firmware"], key, number, report)
        self.found(context, events, offset, number, len(events[-1].body), enqueued)


class _Properties(_Telemetry):
    """Reads the same without the JSON."""

    async def process_events(self, context: PartitionContext, events: Sequence[ReceivedEvent]) -> None:
        fleet = self._fleet
        offset, number, enqueued = "", -1, None
        for event in events:
            properties: Any = event.properties
            key = event.partition_key
            offset, number, enqueued = event.offset, event.sequence_number, event.enqueued_time
            fleet.note(properties["type"], properties["firmware"], key, number)
        self.found(context, events, offset, number, len(events[-1].body), enqueued)


_WORKS: Mapping[str, type[_Tallying]] = {"fields": _Tallying, "properties": _Properties, "telemetry": _Telemetry}


async def receive(
    connection_string: str,
    hub: str,
    partitions: int,
    events: int,
    available: int,
    kind: str | None = None,
    work: str = "fields",
    interval: float = 0.0,
    options: Options | None = None,
) -> dict[str, float]:
    """Receive so many events through a host.

    Args:
        work: What is done with each event: one of `benchmarks.events.WORKS`.
        interval: The `delivery_interval`, in seconds.
        options: Of the connection; the others as of `Tally`.
    """
    tally = Tally(partitions, events, available, kind)
    host = EventProcessorHost(
        connection_string,
        hub,
        processor=_WORKS[work](tally, lambda: host.stop()),
        lease_store=MemoryLeaseStore(),
        max_batch_size=300,
        failure_policy="stop",
        delivery_interval=interval,
        **(options or {}),
    )
    async with host:
        await host.run()
    return tally.meter.result()


class _Timed(EventProcessor):
    """Takes the moment in which a batch comes, and hands it on."""

    def __init__(self, tally: PacedTally, processor: EventProcessor) -> None:
        self._tally = tally
        self._processor = processor

    def process_events(self, context: PartitionContext, events: Sequence[ReceivedEvent]) -> Coroutine[Any, Any, None]:
        self._tally.arrived = time.perf_counter_ns()
        return self._processor.process_events(context, events)  # without a coroutine of its own


async def paced(
    connection_string: str,
    hub: str,
    partitions: int,
    events: int,
    kind: str,
    work: str,
    times: str,
    interval: float = 0.0,
    options: Options | None = None,
) -> dict[str, float]:
    """Receive events that come at a pace, through a host.

    Args:
        work: What is done with each event: one of `benchmarks.events.WORKS`.
        interval: The `delivery_interval`, in seconds.
        options: Of the connection; the others as of `PacedTally`.
    """
    tally = PacedTally(partitions, events, kind, times)
    host = EventProcessorHost(
        connection_string,
        hub,
        processor=_Timed(tally, _WORKS[work](tally, lambda: host.stop())),
        lease_store=MemoryLeaseStore(),
        max_batch_size=300,
        failure_policy="stop",
        delivery_interval=interval,
        **(options or {}),
    )
    async with host:
        await host.run()
    await rest_until_told()
    return tally.result()


class _Fanned(EventProcessor):
    """One of several consumers: it reads four fields of every event, or only what shows that none is missing."""

    def __init__(self, consumer: int, tally: FanTally, reads: bool, stop: Callable[[], None]) -> None:
        self._consumer = consumer
        self._tally = tally
        self._reads = reads
        self._stop = stop
        self.newest: deque[tuple[PartitionContext, Sequence[ReceivedEvent]]] = deque(maxlen=_REPLAYED)
        """The newest batches."""

    async def process_events(self, context: PartitionContext, events: Sequence[ReceivedEvent]) -> None:
        if not self._consumer:
            self.newest.append((context, events))
        place = self._consumer, context.partition_id, events[0].sequence_number
        if not self._reads:
            is_enough = self._tally.add_unread(*place, events[-1].sequence_number, len(events))
        else:
            body, offset, number, enqueued = b"", "", -1, None
            for event in events:
                body, offset, number, enqueued = event.body, event.offset, event.sequence_number, event.enqueued_time
            if not offset:
                raise AssertionError("an event has no offset")
            is_enough = self._tally.add(*place, number, len(events), len(body), enqueued)
        if is_enough:
            self._stop()


async def fanout(
    connection_string: str,
    hub: str,
    partitions: int,
    events: int,
    available: int,
    consumers: int,
    reads: bool,
    kind: str,
    options: Options | None = None,
) -> dict[str, float]:
    """Receive so many events once, and deliver each to several subscriptions of a host.

    Args:
        consumers: How many subscriptions there are.
        reads: Whether each reads four fields of every event.
        options: Of the connection; the others as of `FanTally`.
    """
    tally = FanTally(consumers, partitions, events, available, kind)
    host = EventProcessorHost(
        connection_string,
        hub,
        lease_store=MemoryLeaseStore(),
        max_batch_size=300,
        failure_policy="stop",
        **(options or {}),
    )
    processors = [_Fanned(consumer, tally, reads, host.stop) for consumer in range(consumers)]
    async with host:
        for consumer, processor in enumerate(processors):
            await host.subscribe(f"consumer-{consumer}", processor, start="earliest", catch_up="shared")
        await host.run()
    newest = processors[0].newest
    return {**tally.result(), "handlers": consumers * _cost_of_handler(newest, partitions, available, reads, kind)}


def _cost_of_handler(
    batches: Collection[tuple[PartitionContext, Sequence[ReceivedEvent]]],
    partitions: int,
    available: int,
    reads: bool,
    kind: str,
) -> float:
    """Return what one handler costs by itself for each event, in microseconds: called with a batch again, in a loop.

    The events are decoded by then, and in the processor's caches, as for all but the first of several subscriptions.
    """
    costs = []
    for context, events in batches:
        tallies = [FanTally(2, partitions, available, available, kind, begins_anywhere=True) for _ in range(_REPLAYS)]
        handlers = [_Fanned(1, tally, reads, _no_stop) for tally in tallies]
        began = 0.0
        for handler in handlers:
            # The first call only reads the events into the processor's caches.
            began = began if handler is not handlers[1] else time.process_time()
            with suppress(StopIteration):
                handler.process_events(context, events).send(None)
        costs.append((time.process_time() - began) / (_REPLAYS - 1) / len(events))
    return statistics.median(costs) * 1e6


def _no_stop() -> None:
    pass


async def fanout_pair(first: int, second: int, **arguments: Any) -> dict[str, float]:
    """Run `fanout` with one number of subscriptions and then with another, in the same process.

    Args:
        first: How many there are first.
        second: How many then.
        arguments: The others of `fanout`.

    Returns:
        For each number the cost of an event published before the handlers, and that of the handlers by themselves.
    """
    found: dict[str, float] = {}
    for consumers in (first, second):
        figures = await fanout(consumers=consumers, **arguments)
        found[f"{consumers} handlers"] = figures["handlers"]
        found[f"{consumers}"] = figures["cost"] - figures["handlers"]
    return found


# ----------------------------------------------------------------------------------------------------- sending


async def send(
    connection_string: str,
    hub: str,
    partitions: int,
    batches: int,
    warm_up: int,
    kind: str = "uniform",
    body_size: int = BODY_SIZE,
    idempotent: bool = False,
    options: Options | None = None,
) -> dict[str, float]:
    """Fill batches to the brim and send them, one after the other.

    Args:
        kind: Of the events; without their partition keys, as those of a batch have one in common.
        options: Of the connection.
    """
    made = samples(kind, body_size)
    body = made[0].body
    endless = cycle([(each.body, each.properties) for each in made])
    sent = 0
    meter: Meter | None = None
    async with EventProducer(connection_string, hub, idempotent=idempotent, **(options or {})) as producer:
        for number in range(batches):
            batch = await producer.create_batch(partition_id=str(number % partitions))
            if len(made) == 1:
                while batch.try_add(EventData(body)):
                    pass
            else:
                for each, properties in endless:
                    if not batch.try_add(EventData(each, properties=properties)):
                        break
            await producer.send(batch)
            sent += batch.count
            if meter is None:
                # Varied batches differ a little in their count.
                meter = Meter(batch.count * warm_up, batch.count * batches * 19 // 20)
            meter.add(batch.count)
    assert meter is not None
    return {**meter.result(), "sent": sent}


async def buffered(
    connection_string: str,
    hub: str,
    events: int,
    warm_up: int,
    kind: str = "uniform",
    body_size: int = BODY_SIZE,
    idempotent: bool = False,
    options: Options | None = None,
) -> dict[str, float]:
    """Send single events through a buffer: to the partition of their key, or to whatever partition it likes.

    Args:
        options: Of the connection.
    """
    made = samples(kind, body_size)
    body = made[0].body
    endless = cycle([(each.body, each.properties, each.partition_key) for each in made])
    meter = Meter(warm_up, warm_up + events)
    stored = 0

    def on_success(events: Sequence[EventData], partition_id: str) -> None:
        nonlocal stored
        stored += len(events)

    producer = BufferedProducer(connection_string, hub, idempotent=idempotent, on_success=on_success, **(options or {}))
    async with producer:
        for count in (warm_up, events):
            if len(made) == 1:
                for _ in range(count):
                    await producer.send(EventData(body))
            else:
                for each, properties, key in islice(endless, count):
                    await producer.send(EventData(each, properties=properties), partition_key=key)
            await producer.flush()
            meter.add(count)
    if stored != meter.count:
        raise AssertionError(f"{stored} events are stored of {meter.count}")
    return {**meter.result(), "sent": meter.count}


async def latency(
    connection_string: str,
    hub: str,
    sends: int,
    warm_up: int,
    kind: str = "uniform",
    idempotent: bool = False,
    options: Options | None = None,
) -> dict[str, float]:
    """Send single events, each after the one before is stored.

    Args:
        options: Of the connection.
    """
    endless = cycle([(each.body, each.properties) for each in samples(kind)])
    async with EventProducer(connection_string, hub, idempotent=idempotent, **(options or {})) as producer:

        async def send_next() -> None:
            body, properties = next(endless)
            await producer.send(EventData(body, properties=properties), partition_id="0")

        return {**await measure_latency(send_next, sends, warm_up), "sent": warm_up + sends}


async def delivery(connection_string: str, hub: str, events: int, options: Options) -> dict[str, float]:
    """Read single events that come now and then.

    Args:
        options: Of the connection.
    """
    arrived: asyncio.Queue[bytes] = asyncio.Queue()

    async def read() -> None:
        async with PartitionReader(connection_string, hub, partition_id="0", position="@latest", **options) as reader:
            async for event in reader:
                arrived.put_nowait(event.body)

    ca_file = options["ca_file"]
    async with EventProducer(connection_string, hub, ca_file=ca_file) as producer, asyncio.TaskGroup() as group:
        reading = group.create_task(read())
        result = await measure_delivery(lambda body: producer.send(EventData(body), partition_id="0"), arrived, events)
        reading.cancel()
    return result


# ---------------------------------------------------------------------------------------------------- idleness


class _Metered(Awaitable[_T]):
    """Awaits a call of the store, and takes the CPU of its steps in the event loop's thread."""

    def __init__(self, work: Awaitable[_T], spent: Callable[[float], None]) -> None:
        self._work = work
        self._spent = spent

    def __await__(self) -> Generator[Any, Any, _T]:
        steps = self._work.__await__()
        error: BaseException | None = None
        while True:
            began = time.thread_time()
            try:
                waits_for = next(steps) if error is None else steps.throw(error)
            except StopIteration as stop:
                return stop.value  # type: ignore[no-any-return]  # StopIteration is not typed
            finally:
                self._spent(time.thread_time() - began)
            error = None
            try:
                yield waits_for
            except GeneratorExit:
                steps.close()
                raise
            except BaseException as thrown:
                error = thrown


class MeteredStore:
    """A lease store whose calls' CPU is counted apart.

    Counted is what runs in the task of the call: the store, its SDK, and the writing to the socket. What the event loop
    does besides, such as reading the answers, stays with the host.

    Attributes:
        cpu: Seconds.
    """

    def __init__(self, store: LeaseStore) -> None:
        self._store = store
        self.cpu = 0.0

    def _spent(self, seconds: float) -> None:
        self.cpu += seconds

    @property
    def lease_duration(self) -> float:
        """See the port."""
        return self._store.lease_duration

    @property
    def records(self) -> RecordStore:
        """See the port. Their calls are not counted."""
        return self._store.records

    async def open(self, scope: ConsumerScope, *, read_only: bool = False) -> None:
        """See the port."""
        await _Metered(self._store.open(scope, read_only=read_only), self._spent)

    async def ensure(self, partition_ids: Sequence[str]) -> None:
        """See the port."""
        await _Metered(self._store.ensure(partition_ids), self._spent)

    async def list(self) -> list[LeaseSnapshot]:
        """See the port."""
        return await _Metered(self._store.list(), self._spent)

    async def acquire(self, snapshot: LeaseSnapshot, owner: str, *, held: bool = False) -> PartitionLease | None:
        """See the port."""
        return await _Metered(self._store.acquire(snapshot, owner, held=held), self._spent)

    async def renew(self, lease: PartitionLease) -> PartitionLease | None:
        """See the port."""
        return await _Metered(self._store.renew(lease), self._spent)

    async def release(self, lease: PartitionLease) -> bool:
        """See the port."""
        return await _Metered(self._store.release(lease), self._spent)

    async def read_checkpoint(self, partition_id: str) -> Checkpoint | None:
        """See the port."""
        return await _Metered(self._store.read_checkpoint(partition_id), self._spent)

    async def write_checkpoint(self, lease: PartitionLease, checkpoint: Checkpoint, *, backwards: bool = False) -> bool:
        """See the port."""
        return await _Metered(self._store.write_checkpoint(lease, checkpoint, backwards=backwards), self._spent)

    async def aclose(self) -> None:
        """See the port."""
        await self._store.aclose()


class _Attached:
    """A hook that is set when so many partitions have a link."""

    def __init__(self, partitions: int) -> None:
        self._left = partitions
        self.all = asyncio.Event()

    def __call__(self, report: HostReport) -> None:
        if isinstance(report, PumpStarted):
            self._left -= 1
            if self._left == 0:
                self.all.set()


class _Ignoring(EventProcessor):
    async def process_events(self, context: PartitionContext, events: Sequence[ReceivedEvent]) -> None:
        pass


async def idle(
    connection_string: str,
    hub: str,
    partitions: int,
    seconds: float,
    settle: float,
    sqlite: str | None = None,
    blob: str | None = None,
    store_pid: int | None = None,
    options: Options | None = None,
) -> dict[str, float]:
    """Own idle partitions, on SQLite leases (a path) or blob leases (a connection string).

    Args:
        options: Of the connection.
    """
    leases = SqliteLeaseStore(sqlite) if sqlite else BlobLeaseStore("eventpump", connection_string=blob, create=True)
    store = MeteredStore(leases)
    attached = _Attached(partitions)
    host = EventProcessorHost(
        connection_string, hub, processor=_Ignoring(), lease_store=store, hooks=[attached], **(options or {})
    )
    async with host:
        running = asyncio.create_task(host.run())
        async with asyncio.timeout(60):
            await attached.all.wait()
        await asyncio.sleep(settle)
        before = store.cpu
        result = await measure_idle(seconds, port=port_of(connection_string), store_pid=store_pid)
        result["store_client"] = (store.cpu - before) / seconds * 100
        if running.done():
            await running
    await running
    return result


# ------------------------------------------------------------------------------------------------------ memory


async def memory(
    connection_string: str, hub: str, partitions: int, events: int, sqlite: str, samples: int = 50
) -> dict[str, float]:
    """Receive so many events, with checkpoints, and watch the resident memory.

    Returns:
        `early` (the highest of the second tenth) and `late` (the highest of the last), in MiB.
    """
    meter = Meter(events // 10, events)
    taken: list[tuple[int, float]] = []
    attached = _Attached(partitions)

    def seen(count: int) -> None:
        if count * samples >= (len(taken) + 1) * events:
            taken.append((count, resident()))
        if count >= events:
            host.stop()

    host = EventProcessorHost(
        connection_string,
        hub,
        processor=_Reading(meter, seen),
        lease_store=SqliteLeaseStore(sqlite),
        checkpoint_policy=CheckpointPolicy(every_events=1000),
        hooks=[attached],
        failure_policy="stop",
    )
    async with host:
        running = asyncio.create_task(host.run())
        await asyncio.wait({running, asyncio.create_task(attached.all.wait())}, return_when=asyncio.FIRST_COMPLETED)
        await rest_until_told()
        await running
    return {
        "early": max(size for count, size in taken if count <= events * 0.2),
        "late": max(size for count, size in taken if count > events * 0.9),
        **meter.result(),
    }


class _Slow(EventProcessor):
    def __init__(self, delay: float) -> None:
        self._delay = delay
        self.events = 0

    async def process_events(self, context: PartitionContext, events: Sequence[ReceivedEvent]) -> None:
        await asyncio.sleep(self._delay)
        self.events += len(events)


async def slow(
    connection_string: str,
    hub: str,
    partitions: int,
    seconds: float,
    prefetch_bytes: int,
    prefetch_events: int,
    batch: int,
    delay: float,
) -> dict[str, float]:
    """Process large events slowly, and watch the resident memory.

    Returns:
        `grown`, the most it was above what it was before the first event, in MiB.
    """
    processor = _Slow(delay)
    attached = _Attached(partitions)
    host = EventProcessorHost(
        connection_string,
        hub,
        processor=processor,
        lease_store=MemoryLeaseStore(),
        prefetch_bytes=prefetch_bytes,
        prefetch_events=prefetch_events,
        max_batch_size=batch,
        hooks=[attached],
        failure_policy="stop",
    )
    async with host:
        running = asyncio.create_task(host.run())
        async with asyncio.timeout(60):
            await attached.all.wait()
        before = highest = resident()
        await rest_until_told()
        until = time.monotonic() + seconds
        while time.monotonic() < until and not running.done():
            await asyncio.sleep(0.02)
            highest = max(highest, resident())
        host.stop(0.5)
        await running
    return {"before": before, "grown": highest - before, "events": float(processor.events)}
