"""azure-eventhub's sides: its aio clients, over its default (pure Python) transport, used as its documentation does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from itertools import cycle, islice
from typing import Any

from azure.eventhub import EventData
from azure.eventhub.aio import EventHubConsumerClient, EventHubProducerClient, PartitionContext

import eventpump
from benchmarks.events import samples
from benchmarks.meter import Meter
from benchmarks.sides.azure import client_options, event_of, reading, taken
from benchmarks.sides.common import (
    BODY_SIZE,
    FanTally,
    PacedTally,
    Tally,
    connections_to,
    measure_delivery,
    measure_idle,
    measure_latency,
    port_of,
    rest_until_told,
)


async def _receive(
    client: EventHubConsumerClient,
    done: asyncio.Future[None],
    on_event_batch: Callable[[PartitionContext, list[EventData]], Awaitable[None]],
    prefetch: int,
    max_batch_size: int = 300,
) -> None:
    """Receive from the beginning until `done`, and raise what failed."""
    receiving = asyncio.create_task(
        client.receive_batch(on_event_batch, max_batch_size=max_batch_size, prefetch=prefetch, starting_position="-1")
    )
    await asyncio.wait({receiving, done}, return_when=asyncio.FIRST_COMPLETED)
    if not done.done():
        await receiving
    await done
    # Left to end by itself it would sleep out its load-balancing interval.
    receiving.cancel()
    await asyncio.gather(receiving, return_exceptions=True)


async def receive(
    connection_string: str,
    hub: str,
    partitions: int,
    events: int,
    available: int,
    kind: str | None = None,
    work: str = "fields",
    prefetch: int = 3000,
    max_batch_size: int = 300,
    options: dict[str, Any] | None = None,
) -> dict[str, float]:
    """Receive so many events, and read them.

    Args:
        work: What is done with each event: one of `benchmarks.events.WORKS`.
        options: Of the connection.
    """
    read = reading(work)
    tally = Tally(partitions, events, available, kind)
    done = asyncio.get_running_loop().create_future()

    async def on_event_batch(context: PartitionContext, batch: list[EventData]) -> None:
        if not batch or done.done():
            return
        try:
            if tally.add(context.partition_id, *read(batch)):
                done.set_result(None)
        except AssertionError as error:
            # The client would log it and go on.
            done.set_exception(error)

    client = EventHubConsumerClient.from_connection_string(
        connection_string, "$Default", eventhub_name=hub, **client_options(connection_string, options)
    )
    async with client:
        await _receive(client, done, on_event_batch, prefetch, max_batch_size)
    return tally.meter.result()


async def forward(
    connection_string: str,
    hub: str,
    partitions: int,
    events: int,
    available: int,
    kind: str,
    work: str,
    prefetch: int = 300,
    max_batch_size: int = 300,
    options: dict[str, Any] | None = None,
) -> dict[str, float]:
    """Receive so many events, and send each on through a buffered producer.

    Args:
        work: `forward`.
        options: Of the connection; the others as of `Tally`.
    """
    tally = Tally(partitions, events, available, kind)
    done = asyncio.get_running_loop().create_future()

    async def stored(events: list[Any], partition_id: str | None) -> None:
        pass

    async def failed(events: list[Any], partition_id: str | None, error: Exception) -> None:
        if not done.done():
            done.set_exception(AssertionError(f"{len(events)} events were not stored"))

    connection = client_options(connection_string, options)
    client = EventHubConsumerClient.from_connection_string(
        connection_string, "$Default", eventhub_name=hub, **connection
    )
    producer = EventHubProducerClient.from_connection_string(
        connection_string, eventhub_name=hub, buffered_mode=True, on_success=stored, on_error=failed, **connection
    )

    async def on_event_batch(context: PartitionContext, batch: list[EventData]) -> None:
        if not batch or done.done():
            return
        for event in batch:
            made = EventData(b"".join(event.body))  # type: ignore[arg-type]  # see `read`
            made.properties = event.properties
            key = event.partition_key
            await producer.send_event(made, partition_key=None if key is None else key.decode())
        last = batch[-1]
        size = len(b"".join(last.body))  # type: ignore[arg-type]  # see `read`
        first, number = batch[0].sequence_number or 0, last.sequence_number or 0
        try:
            if tally.add(context.partition_id, first, number, len(batch), size, last.enqueued_time):
                done.set_result(None)
        except AssertionError as error:
            # The client would log it and go on.
            done.set_exception(error)

    async with producer, client:
        await _receive(client, done, on_event_batch, prefetch, max_batch_size)
    return tally.meter.result()


async def paced(
    connection_string: str,
    hub: str,
    partitions: int,
    events: int,
    kind: str,
    work: str,
    times: str,
    prefetch: int = 300,
    options: dict[str, Any] | None = None,
) -> dict[str, float]:
    """Receive events that come at a pace.

    Args:
        work: What is done with each event: one of `benchmarks.events.WORKS`.
        options: Of the connection; the others as of `PacedTally`.
    """
    read = reading(work)
    tally = PacedTally(partitions, events, kind, times)
    done = asyncio.get_running_loop().create_future()

    async def on_event_batch(context: PartitionContext, batch: list[EventData]) -> None:
        if not batch or done.done():
            return
        tally.arrived = time.perf_counter_ns()
        try:
            if tally.add(context.partition_id, *read(batch)):
                done.set_result(None)
        except AssertionError as error:
            # The client would log it and go on.
            done.set_exception(error)

    client = EventHubConsumerClient.from_connection_string(
        connection_string, "$Default", eventhub_name=hub, **client_options(connection_string, options)
    )
    async with client:
        await _receive(client, done, on_event_batch, prefetch)
    await rest_until_told()
    return tally.result()


async def fanout(
    connection_string: str,
    hub: str,
    partitions: int,
    events: int,
    available: int,
    consumers: int,
    reads: bool,
    kind: str,
    prefetch: int = 3000,
    max_batch_size: int = 300,
    options: dict[str, Any] | None = None,
) -> dict[str, float]:
    """Receive so many events by several clients, each in a consumer group of its own.

    Args:
        consumers: How many clients there are.
        reads: Whether each reads four fields of every event.
        options: Of the connection; the others as of `FanTally`.
    """
    tally = FanTally(consumers, partitions, events, available, kind)
    done = asyncio.get_running_loop().create_future()

    async def receive_all(consumer: int) -> None:
        async def on_event_batch(context: PartitionContext, batch: list[EventData]) -> None:
            if not batch or done.done():
                return
            try:
                if taken(tally, consumer, context.partition_id, batch, reads):
                    done.set_result(None)
            except AssertionError as error:
                # The client would log it and go on.
                done.set_exception(error)

        client = EventHubConsumerClient.from_connection_string(
            connection_string, f"group-{consumer}", eventhub_name=hub, **client_options(connection_string, options)
        )
        async with client:
            await client.receive_batch(
                on_event_batch, max_batch_size=max_batch_size, prefetch=prefetch, starting_position="-1"
            )

    receiving = [asyncio.create_task(receive_all(consumer)) for consumer in range(consumers)]
    await asyncio.wait({*receiving, done}, return_when=asyncio.FIRST_COMPLETED)
    for task in receiving:
        if not done.done() and task.done():
            await task
        # Left to end by itself it would sleep out its load-balancing interval.
        task.cancel()
    await asyncio.gather(*receiving, return_exceptions=True)
    await done
    return tally.result()


async def send(
    connection_string: str,
    hub: str,
    partitions: int,
    batches: int,
    warm_up: int,
    kind: str = "uniform",
    body_size: int = BODY_SIZE,
    options: dict[str, Any] | None = None,
) -> dict[str, float]:
    """Fill batches to the brim and send them, one after the other.

    Args:
        options: Of the connection.
    """
    endless = cycle(samples(kind, body_size))
    sent = 0
    meter: Meter | None = None
    client = EventHubProducerClient.from_connection_string(
        connection_string, eventhub_name=hub, **client_options(connection_string, options)
    )
    async with client:
        for number in range(batches):
            batch = await client.create_batch(partition_id=str(number % partitions))
            for sample in endless:
                try:
                    batch.add(event_of(sample))
                except ValueError:
                    break
            await client.send_batch(batch)
            sent += len(batch)
            if meter is None:
                meter = Meter(len(batch) * warm_up, len(batch) * batches * 19 // 20)
            meter.add(len(batch))
    assert meter is not None
    return {**meter.result(), "sent": sent}


async def buffered(
    connection_string: str,
    hub: str,
    events: int,
    warm_up: int,
    kind: str = "uniform",
    body_size: int = BODY_SIZE,
    options: dict[str, Any] | None = None,
) -> dict[str, float]:
    """Send single events through its buffer: to the partition of their key, or to whatever partition it likes."""
    endless = cycle(samples(kind, body_size))
    meter = Meter(warm_up, warm_up + events)
    stored = 0

    async def on_success(events: list[Any], partition_id: str | None) -> None:
        nonlocal stored
        stored += len(events)

    async def on_error(events: list[Any], partition_id: str | None, error: Exception) -> None:
        raise AssertionError(f"{len(events)} events were not stored") from error

    client = EventHubProducerClient.from_connection_string(
        connection_string,
        eventhub_name=hub,
        buffered_mode=True,
        on_success=on_success,
        on_error=on_error,
        **client_options(connection_string, options),
    )
    async with client:
        for count in (warm_up, events):
            for sample in islice(endless, count):
                await client.send_event(event_of(sample), partition_key=sample.partition_key)
            await client.flush()
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
    options: dict[str, Any] | None = None,
) -> dict[str, float]:
    """Send single events, each after the one before is stored.

    Args:
        options: Of the connection.
    """
    endless = cycle(samples(kind))
    client = EventHubProducerClient.from_connection_string(
        connection_string, eventhub_name=hub, **client_options(connection_string, options)
    )
    async with client:
        result = await measure_latency(
            lambda: client.send_event(event_of(next(endless)), partition_id="0"), sends, warm_up
        )
    return {**result, "sent": warm_up + sends}


async def delivery(connection_string: str, hub: str, events: int, options: dict[str, Any]) -> dict[str, float]:
    """Read single events that come now and then, sent by our producer.

    Args:
        options: Of the connection.
    """
    arrived: asyncio.Queue[bytes] = asyncio.Queue()

    async def on_event(context: PartitionContext, event: EventData | None) -> None:
        if event is not None:
            arrived.put_nowait(b"".join(event.body))  # type: ignore[arg-type]  # see `receive`

    ca_file = options["connection_verify"]
    client = EventHubConsumerClient.from_connection_string(
        connection_string, "$Default", eventhub_name=hub, **client_options(connection_string, options)
    )
    async with eventpump.EventProducer(connection_string, hub, ca_file=ca_file) as producer, client:
        reading = asyncio.create_task(client.receive(on_event, partition_id="0", starting_position="@latest"))
        result = await measure_delivery(
            lambda body: producer.send(eventpump.EventData(body), partition_id="0"), arrived, events
        )
        # Left to end by itself it would sleep out its load-balancing interval.
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
    return result


async def idle(
    connection_string: str,
    hub: str,
    partitions: int,
    seconds: float,
    settle: float,
    blob: str | None = None,
    store_pid: int | None = None,
    options: dict[str, Any] | None = None,
) -> dict[str, float]:
    """Own idle partitions: in memory, or with its own checkpoint store on blobs.

    Args:
        options: Of the connection.
    """
    options = client_options(connection_string, options)
    if blob is not None:
        from azure.eventhub.extensions.checkpointstoreblobaio import BlobCheckpointStore

        store = BlobCheckpointStore.from_connection_string(blob, "azure-eventhub")
        await _make_container(blob, "azure-eventhub")
        options["checkpoint_store"] = store
    left = set(map(str, range(partitions)))
    ready = asyncio.Event()

    async def on_initialize(context: PartitionContext) -> None:
        left.discard(context.partition_id)
        if not left:
            ready.set()

    async def on_event_batch(context: PartitionContext, batch: list[EventData]) -> None:
        pass

    client = EventHubConsumerClient.from_connection_string(connection_string, "$Default", eventhub_name=hub, **options)
    async with client:
        receiving = asyncio.create_task(
            client.receive_batch(on_event_batch, on_partition_initialize=on_initialize, starting_position="-1")
        )
        port = port_of(connection_string)
        async with asyncio.timeout(120):
            await ready.wait()
            while connections_to(port) < partitions:  # noqa: ASYNC110 - nothing reports them
                await asyncio.sleep(0.5)
        await asyncio.sleep(settle)
        result = await measure_idle(seconds, port=port, store_pid=store_pid)
        # Left to end by itself it would sleep out its load-balancing interval.
        receiving.cancel()
        await asyncio.gather(receiving, return_exceptions=True)
    return result


async def _make_container(connection_string: str, name: str) -> None:
    from azure.storage.blob.aio import ContainerClient

    async with ContainerClient.from_connection_string(connection_string, name) as container:
        await container.create_container()
