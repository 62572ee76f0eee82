"""Random histories with a telemetry object whose every call may raise: they are those without one."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import pytest

from eventpump.consumer.keyed import KeyedProcessor
from eventpump.consumer.processor import PartitionContext
from eventpump.core.checkpoint import CheckpointPolicy
from eventpump.errors import LinkDetachedError
from eventpump.eventhubs.events import EventData, ReceivedEvent
from eventpump.options.base import RetryOptions
from eventpump.producer.producer import HubProducer
from eventpump.telemetry import Telemetry
from eventpump.testing.transport import FakeTransport
from tests.support.fleet import Fleet, stocked
from tests.support.seeds import seeds
from tests.support.telemetry import PARENT, Erratic

COUNT = 60
"""Events per partition."""


async def _publish(fleet: Fleet, telemetry: Telemetry | None) -> None:
    """Send events to both partitions, some with a context."""
    async with HubProducer(
        FakeTransport(fleet.hub), fleet.hub.name, rng=random.Random(1), telemetry=telemetry
    ) as producer:
        for partition_id in fleet.hub.partition_ids:
            for start in range(0, COUNT, 20):
                properties = {"traceparent": PARENT.format(start + 1)} if start else {}
                events = [EventData(str(start + number), properties=properties) for number in range(20)]
                await producer.send(events, partition_id=partition_id)


async def _history(seed: int, telemetry: Telemetry | None, *, is_keyed: bool) -> list[tuple[str, str, int, float]]:
    """Return what two hosts processed, and when, while handlers, links and stores fail and one host closes."""
    rng = random.Random(seed)
    seen: list[tuple[str, str, int, float]] = []
    loop = asyncio.get_running_loop()
    start = loop.time()

    async def handle(context: PartitionContext, events: Sequence[ReceivedEvent]) -> None:
        await asyncio.sleep(rng.choice((0.0, 0.01, 0.3)))
        if rng.random() < 0.1:
            raise ValueError("by chance")
        began = round(loop.time() - start, 6)
        seen.extend((context.owner_id, context.partition_id, event.sequence_number, began) for event in events)
        if rng.random() < 0.3 and not is_keyed:
            await context.checkpoint()

    def processor() -> Any:
        return KeyedProcessor(handle, key=lambda event: event.sequence_number % 7) if is_keyed else handle

    async with stocked(partitions=2, seed=seed) as fleet:
        await _publish(fleet, telemetry)
        options: dict[str, Any] = {
            "telemetry": telemetry,
            "max_batch_size": rng.choice((1, 4, 50)),
            "handler_retry": RetryOptions(max_retries=20, base_delay=0.1, max_delay=1.0),
            "checkpoint_policy": CheckpointPolicy(every_events=10, every_seconds=2),
        }
        for name in ("a", "b"):
            await fleet.start(name, processor() if is_keyed else handle, **options)
        for _ in range(6):
            await asyncio.sleep(rng.uniform(0.1, 3.0))
            fleet.hub.detach(rng.choice(fleet.hub.partition_ids), LinkDetachedError("by chance"))
        await fleet.hosts["a"].aclose()
        await fleet.until(lambda: all(fleet.checkpoint(each) == COUNT - 1 for each in fleet.hub.partition_ids), 600)
    return seen


@pytest.mark.parametrize("is_keyed", [False, True])
@seeds(4, of=300)
async def test_history_with_erratic_telemetry_is_that_without(seed: int, is_keyed: bool) -> None:
    """The same events, on the same hosts, at the same time: nothing is lost, repeated or delayed by what it raises."""
    tracers, meters = Erratic(random.Random(seed)), Erratic(random.Random(seed + 1))
    given: tuple[Any, Any] = (tracers, meters)
    seen = await _history(seed, Telemetry(*given, create_spans=bool(seed % 2)), is_keyed=is_keyed)
    numbers = {(partition_id, number) for _, partition_id, number, _ in seen}
    assert numbers == {(each, number) for each in ("0", "1") for number in range(COUNT)}
    assert seen == await _history(seed, None, is_keyed=is_keyed)
    assert tracers.failures
    assert meters.failures
