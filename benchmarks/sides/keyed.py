"""A keyed processor beside a plain one that awaits the same handler for each event, in turns in one process."""

from __future__ import annotations

import asyncio
import gc
import statistics
import time
from collections.abc import Sequence

from eventpump import EventProcessor, EventProcessorHost, KeyedProcessor, RetryOptions
from eventpump.consumer.processor import PartitionContext
from eventpump.eventhubs.events import ReceivedEvent
from eventpump.sources.memory import MemorySource
from eventpump.storage.leases.memory import MemoryLeaseStore

BODY = b"x" * 1024


class Tally:
    """Takes the CPU time from the first event of a host to the last.

    Args:
        count: How many events there are.
    """

    def __init__(self, count: int) -> None:
        self.left = self.count = count
        self.began = self.cost = 0.0
        self.finished = asyncio.Event()

    def add(self) -> None:
        """Count an event in."""
        if self.left == self.count:
            self.began = time.process_time()
        self.left -= 1
        if not self.left:
            self.cost = (time.process_time() - self.began) / self.count * 1e6
            self.finished.set()


class Plain(EventProcessor):
    """Awaits a handler for each event of a batch."""

    def __init__(self, tally: Tally, *, waits: bool) -> None:
        self._tally = tally
        self._waits = waits

    async def process_events(self, context: PartitionContext, events: Sequence[ReceivedEvent]) -> None:
        """Process a batch."""
        for event in events:
            await self._handle(context, (event,))

    async def _handle(self, context: PartitionContext, events: Sequence[ReceivedEvent]) -> None:
        (event,) = events
        if event.partition_key is None:
            raise ValueError("every event has a key")
        if self._waits:
            await asyncio.sleep(0)
        self._tally.add()

    def keyed(self) -> KeyedProcessor:
        """Return a keyed processor of the same handler."""
        return KeyedProcessor(self._handle)


async def keyed(events: int, rounds: int, keys: int, *, waits: bool) -> dict[str, float]:
    """Process the same events, in one partition, with either processor in turn.

    Args:
        events: How many.
        rounds: How often, with each.
        keys: How many partition keys they have.
        waits: Whether the handler lets others have a turn.

    Returns:
        Microseconds of CPU per event: the medians of `plain` and `keyed`, and of their differences, `over`.
    """
    source = MemorySource()
    for number in range(events):
        source.append("0", BODY, partition_key=f"key-{number % keys}")
    costs: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(rounds):
        for is_keyed in (False, True) if turn % 2 else (True, False):
            costs[is_keyed].append(await _cost(source, events, is_keyed=is_keyed, waits=waits))
    plain, cost = costs[False], costs[True]
    over = [each - beside for each, beside in zip(cost, plain, strict=True)]
    return {
        "plain": statistics.median(plain),
        "keyed": statistics.median(cost),
        "over": statistics.median(over),
        "best": min(over),
    }


async def _cost(source: MemorySource, events: int, *, is_keyed: bool, waits: bool) -> float:
    tally = Tally(events)
    plain = Plain(tally, waits=waits)
    host = EventProcessorHost(
        source=source,
        processor=plain.keyed() if is_keyed else plain,
        lease_store=MemoryLeaseStore(),
        handler_retry=RetryOptions(max_retries=0),
    )
    gc.collect()
    running = asyncio.create_task(host.run())
    finished = asyncio.create_task(tally.finished.wait())
    await asyncio.wait({running, finished}, return_when=asyncio.FIRST_COMPLETED)
    finished.cancel()
    await host.aclose()
    await running
    assert not tally.left, "not every event was processed"
    return tally.cost
