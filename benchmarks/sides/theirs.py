"""azure-eventhub's sides: its aio clients, over its default (pure Python) transport, used as its documentation does."""

from __future__ import annotations

import asyncio
from typing import Any

from azure.eventhub import EventData, TransportType
from azure.eventhub.aio import EventHubConsumerClient, EventHubProducerClient, PartitionContext

import eventpump
from benchmarks.meter import Meter
from benchmarks.sides.common import BODY_SIZE, connections_to, measure_delivery, measure_idle, measure_latency, port_of


def _options(connection_string: str, options: dict[str, Any] | None) -> dict[str, Any]:
    """Give a client's options: over TLS it takes a port other than 5671 only as a custom endpoint."""
    if not options:
        return {}
    endpoint = f"sb://127.0.0.1:{port_of(connection_string)}"
    return {**options, "custom_endpoint_address": endpoint, "transport_type": TransportType.Amqp}


async def receive(
    connection_string: str, hub: str, events: int, first: int, last: int, options: dict[str, Any] | None = None
) -> dict[str, float]:
    """Receive so many events, and read four fields of each. :param options: of the connection."""
    meter = Meter(first, last)
    done = asyncio.Event()
    expected: dict[str, int] = {}

    async def on_event_batch(context: PartitionContext, batch: list[EventData]) -> None:
        if not batch:
            return
        body, offset, number, enqueued = b"", None, -1, None
        for event in batch:
            body, offset, number, enqueued = (
                b"".join(event.body),  # type: ignore[arg-type]  # the body of a data message is an iterable of bytes
                event.offset,
                event.sequence_number or 0,
                event.enqueued_time,
            )
        start = batch[0].sequence_number or 0
        if start != expected.get(context.partition_id, start) or number != start + len(batch) - 1:
            raise AssertionError(f"partition {context.partition_id}: {start}..{number} came out of turn")
        if len(body) != BODY_SIZE or not offset or enqueued is None:
            raise AssertionError("an event is not what was sent")
        expected[context.partition_id] = number + 1
        meter.add(len(batch))
        if meter.count >= events:
            done.set()

    client = EventHubConsumerClient.from_connection_string(
        connection_string, "$Default", eventhub_name=hub, **_options(connection_string, options)
    )
    async with client:
        receiving = asyncio.create_task(
            client.receive_batch(on_event_batch, max_batch_size=300, prefetch=3000, starting_position="-1")
        )
        waiting = asyncio.create_task(done.wait())
        await asyncio.wait({receiving, waiting}, return_when=asyncio.FIRST_COMPLETED)
        result = meter.result()
        # Left to end by itself it would sleep out its load-balancing interval.
        receiving.cancel()
        await asyncio.gather(receiving, return_exceptions=True)
    return result


async def send(
    connection_string: str,
    hub: str,
    partitions: int,
    batches: int,
    warm_up: int,
    body_size: int = BODY_SIZE,
    options: dict[str, Any] | None = None,
) -> dict[str, float]:
    """Fill batches to the brim and send them, one after the other. :param options: of the connection."""
    body = b"x" * body_size
    meter: Meter | None = None
    client = EventHubProducerClient.from_connection_string(
        connection_string, eventhub_name=hub, **_options(connection_string, options)
    )
    async with client:
        for number in range(batches):
            batch = await client.create_batch(partition_id=str(number % partitions))
            while True:
                try:
                    batch.add(EventData(body))
                except ValueError:
                    break
            await client.send_batch(batch)
            if meter is None:
                meter = Meter(len(batch) * warm_up, len(batch) * batches)
            meter.add(len(batch))
    assert meter is not None
    return meter.result()


async def buffered(connection_string: str, hub: str, events: int, warm_up: int, body_size: int) -> dict[str, float]:
    """Send single events through its buffer, to whatever partition it likes."""
    body = b"x" * body_size
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
    )
    async with client:
        for count in (warm_up, events):
            for _ in range(count):
                await client.send_event(EventData(body))
            await client.flush()
            meter.add(count)
    if stored != meter.count:
        raise AssertionError(f"{stored} events are stored of {meter.count}")
    return meter.result()


async def latency(connection_string: str, hub: str, sends: int, warm_up: int) -> dict[str, float]:
    """Send single events, each after the one before is stored."""
    body = b"x" * BODY_SIZE
    client = EventHubProducerClient.from_connection_string(connection_string, eventhub_name=hub)
    async with client:
        return await measure_latency(lambda: client.send_event(EventData(body), partition_id="0"), sends, warm_up)


async def delivery(connection_string: str, hub: str, events: int, options: dict[str, Any]) -> dict[str, float]:
    """Read single events that come now and then, sent by our producer. :param options: of the connection."""
    arrived: asyncio.Queue[bytes] = asyncio.Queue()

    async def on_event(context: PartitionContext, event: EventData | None) -> None:
        if event is not None:
            arrived.put_nowait(b"".join(event.body))  # type: ignore[arg-type]  # see `receive`

    ca_file = options["connection_verify"]
    client = EventHubConsumerClient.from_connection_string(
        connection_string, "$Default", eventhub_name=hub, **_options(connection_string, options)
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
    """Own idle partitions: in memory, or with its own checkpoint store on blobs. :param options: of the connection."""
    options = _options(connection_string, options)
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
            while connections_to(port) < partitions:  # noqa: ASYNC110 - nothing tells of them
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
