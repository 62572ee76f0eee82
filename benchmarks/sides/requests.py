"""Fleets of hosts that own idle partitions by blobs in azure-eventhub's form: how often they ask the store."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

from azure.core.pipeline.transport import AioHttpTransport
from azure.eventhub.aio import EventHubConsumerClient, PartitionContext
from azure.eventhub.extensions.checkpointstoreblobaio import BlobCheckpointStore
from azure.storage.blob.aio import ContainerClient

from eventpump import BlobOwnershipStore, EventProcessor, EventProcessorHost
from eventpump.consumer.processor import PartitionContext as OurContext
from eventpump.eventhubs.events import ReceivedEvent

CONTAINER = "fleet"
TIMEOUT = 120.0


class _Count:
    """Requests to a store, and among them the listings of ownerships, of which each host makes one per cycle."""

    def __init__(self) -> None:
        self.requests = 0
        self.cycles = 0

    def transport(self) -> AioHttpTransport:
        """Return a transport whose requests are counted."""
        return _Transport(self)


class _Transport(AioHttpTransport):  # type: ignore[misc]  # azure.core has no types for it
    def __init__(self, count: _Count) -> None:
        super().__init__()
        self._count = count

    async def send(self, request: Any, **config: Any) -> Any:
        self._count.requests += 1
        self._count.cycles += "comp=list" in request.url and "ownership" in request.url
        return await super().send(request, **config)


class _Owned:
    """How many partitions each host reads."""

    def __init__(self, hosts: int, partitions: int) -> None:
        self._least, self._partitions = partitions // hosts, partitions
        self.shares = [0] * hosts
        self._changed = asyncio.Event()

    def changes(self, host: int, by: int) -> None:
        self.shares[host] += by
        self._changed.set()

    async def until_shared(self) -> None:
        """Wait until the partitions are shared out, as evenly as they can be."""
        async with asyncio.timeout(TIMEOUT):
            while sum(self.shares) != self._partitions or min(self.shares) < self._least:
                self._changed.clear()
                await self._changed.wait()


class _Idle(EventProcessor):
    def __init__(self, changes: Callable[[int], None]) -> None:
        self._changes = changes

    async def open(self, context: OurContext) -> None:
        self._changes(1)

    async def close(self, context: OurContext, reason: object) -> None:
        self._changes(-1)

    async def process_events(self, context: OurContext, events: Sequence[ReceivedEvent]) -> None:
        """Do nothing: there are none."""


async def _measure(owned: _Owned, count: _Count, interval: float, cycles: float) -> Mapping[str, float]:
    await owned.until_shared()
    # What was stolen last is released, and found so by the others.
    await asyncio.sleep(4 * interval)
    requests, listings = count.requests, count.cycles
    await asyncio.sleep(cycles * interval)
    made, listed = count.requests - requests, count.cycles - listings
    return {"per_interval": made / cycles, "per_cycle": made / listed}


async def ours(
    connection_string: str, hub: str, blob: str, hosts: int, partitions: int, interval: float, cycles: float
) -> Mapping[str, float]:
    """Run hosts of ours on a `BlobOwnershipStore`, and count once they have shared the partitions out.

    Args:
        connection_string: Of an emulator.
        hub: The hub there, without events.
        blob: An Azure Storage connection string.
        hosts: How many hosts.
        partitions: How many the hub has.
        interval: Seconds between two renewals.
        cycles: For how many intervals to count.

    Returns:
        `per_interval`: requests of all hosts, in an interval; `per_cycle`: those of one host, in one of its cycles.
    """
    count, owned = _Count(), _Owned(hosts, partitions)
    async with AsyncExitStack() as stack:
        running = []
        for number in range(hosts):
            container = ContainerClient.from_connection_string(blob, CONTAINER, transport=count.transport())
            await stack.enter_async_context(container)
            store = BlobOwnershipStore(container, lease_duration=3 * interval, create=True)

            def changes(by: int, number: int = number) -> None:
                owned.changes(number, by)

            host = EventProcessorHost(
                connection_string,
                hub,
                processor=_Idle(changes),
                lease_store=store,
                owner_id=f"host-{number}",
                renew_interval=interval,
            )
            running.append(host)
        tasks = [asyncio.create_task(host.run()) for host in running]
        try:
            return await _measure(owned, count, interval, cycles)
        finally:
            await asyncio.gather(*(host.aclose() for host in running))
            await asyncio.gather(*tasks)


async def theirs(
    connection_string: str, hub: str, blob: str, hosts: int, partitions: int, interval: float, cycles: float
) -> Mapping[str, float]:
    """Do the same with clients of azure-eventhub."""
    count, owned = _Count(), _Owned(hosts, partitions)
    async with AsyncExitStack() as stack:
        container = await stack.enter_async_context(ContainerClient.from_connection_string(blob, CONTAINER))
        if not await container.exists():
            await container.create_container()

        async def receive(number: int) -> None:
            async def on_initialize(context: PartitionContext) -> None:
                owned.changes(number, 1)

            async def on_close(context: PartitionContext, reason: object) -> None:
                owned.changes(number, -1)

            async def on_event_batch(context: PartitionContext, batch: object) -> None:
                pass

            store = BlobCheckpointStore.from_connection_string(blob, CONTAINER, transport=count.transport())
            client = EventHubConsumerClient.from_connection_string(
                connection_string,
                "$Default",
                eventhub_name=hub,
                checkpoint_store=store,
                load_balancing_interval=interval,
                partition_ownership_expiration_interval=6 * interval,
            )
            async with store, client:
                await client.receive_batch(
                    on_event_batch,
                    on_partition_initialize=on_initialize,
                    on_partition_close=on_close,
                    starting_position="-1",
                    max_wait_time=1,
                )

        tasks = [asyncio.create_task(receive(number)) for number in range(hosts)]
        try:
            return await _measure(owned, count, interval, cycles)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
