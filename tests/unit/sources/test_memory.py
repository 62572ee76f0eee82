"""A source in memory, under a host and a reader: what a user's unit test relies on."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from typing import Any

import pytest

from eventpump.clients.consumers import EventProcessorHost, PartitionReader
from eventpump.consumer.processor import EventProcessor, PartitionContext
from eventpump.core.checkpoint import CheckpointPolicy
from eventpump.errors import (
    ClosedError,
    ConfigurationError,
    DataLossError,
    EntityNotFoundError,
    EventError,
    RequestRefusedError,
    ServiceBusyError,
)
from eventpump.eventhubs.events import EventData, ReceivedEvent
from eventpump.reports import DataLost, HostReport, LinkFailed, PartitionFailed
from eventpump.sources.memory import MemorySource
from eventpump.storage.leases.memory import MemoryLeases, MemoryLeaseStore


class Collecting(EventProcessor):
    """Collects numbers, and counts."""

    def __init__(self) -> None:
        self.numbers: dict[str, list[int]] = {}
        self._more = asyncio.Event()

    async def process_events(self, context: PartitionContext, events: Sequence[ReceivedEvent]) -> None:
        self.numbers.setdefault(context.partition_id, []).extend(event.sequence_number for event in events)
        self._more.set()

    async def until(self, count: int) -> None:
        async with asyncio.timeout(100):
            while sum(map(len, self.numbers.values())) < count:
                self._more.clear()
                await self._more.wait()


@asynccontextmanager
async def _running(source: Any, processor: EventProcessor, **options: Any) -> AsyncIterator[EventProcessorHost]:
    options.setdefault("lease_store", MemoryLeaseStore(MemoryLeases()))
    options.setdefault("rng", random.Random(1))
    host = EventProcessorHost(source=source, processor=processor, **options)
    task = asyncio.create_task(host.run())
    try:
        yield host
    finally:
        await host.aclose()
        await task


async def test_host_processes_what_is_appended() -> None:
    """All partitions, what was there before and what comes later, each in order."""
    source, processor = MemorySource(partitions=2), Collecting()
    source.append("0", b"one", "two", EventData("three", properties={"kind": 3}))
    async with _running(source, processor):
        await processor.until(3)
        assert source.append("1", *[b"x"] * 1000) == list(range(1000))
        await processor.until(1003)
    assert processor.numbers == {"0": [0, 1, 2], "1": list(range(1000))}
    assert source.credit("0") == source.credit("1") == []  # the host closed its links, and not the source
    assert (await source.partitions()).partition_ids == ("0", "1")


async def test_host_keeps_a_partition_that_has_ended() -> None:
    """It is not reported as failed, nor opened again and again; a drain ends."""
    source, processor, reports = MemorySource(), Collecting(), list[HostReport]()
    source.append("0", *[b"x"] * 10)
    source.end()
    async with _running(source, processor, hooks=[reports.append]) as host:
        await processor.until(10)
        await asyncio.sleep(500)
        assert await host.drain("default") == ("0",)
        assert [status.partition_id for status in host.partitions] == ["0"]
    assert not [report for report in reports if isinstance(report, LinkFailed | PartitionFailed)]
    assert processor.numbers == {"0": list(range(10))}


async def test_events_are_as_they_were_appended() -> None:
    """Body, properties, key and time arrive, as from a hub."""
    source = MemorySource(first=100)
    moment = (await source.partitions()).created_at + timedelta(hours=1)
    event = EventData("text", properties={"n": 5}, message_id="m", content_type="text/plain")
    source.append("0", event, partition_key="key", enqueued_time=moment)
    source.append("0", EventData(value=[1, 2]))
    source.end("0")
    async with PartitionReader(source=source, partition_id="0") as reader:
        first, second = [event async for event in reader]
    assert (first.body_as_str(), first.properties, first.partition_key) == ("text", {"n": 5}, "key")
    assert (first.sequence_number, first.enqueued_time, first.message_id) == (100, moment, "m")
    assert (second.value, second.enqueued_time) == ([1, 2], moment + timedelta(milliseconds=1))


async def test_what_cannot_be_appended_adds_nothing() -> None:
    """Of several events of which one cannot be encoded, none is added."""
    source = MemorySource()
    with pytest.raises(EventError):
        source.append("0", b"good", EventData(properties={"bad": object()}))
    with pytest.raises(ConfigurationError, match="no partition"):
        source.append("7", b"x")
    source.append("0", b"x")
    created_at = (await source.partitions()).created_at
    with pytest.raises(ConfigurationError, match="enqueued_time"):
        source.append("0", b"x", enqueued_time=created_at - timedelta(days=1))
    source.end()
    with pytest.raises(ConfigurationError, match="has ended"):
        source.append("0", b"x")
    assert (await source.partition_properties("0")).last_enqueued_sequence_number == 0


async def test_times_without_a_zone_are_refused_and_add_nothing() -> None:
    """They cannot be compared with those of the events before."""
    with pytest.raises(ConfigurationError, match="created_at: must be a datetime with a time zone"):
        MemorySource(created_at=datetime(2024, 1, 1))
    source = MemorySource()
    with pytest.raises(ConfigurationError, match="enqueued_time: must be a datetime with a time zone"):
        source.append("0", b"x", enqueued_time=datetime(2050, 1, 1))
    assert source.append("0", b"x") == [0]


async def test_lost_links_lose_and_repeat_nothing() -> None:
    """At random moments links are lost, fail or are refused; the reader gets each event once, in order."""
    for seed in range(5):
        rng, source = random.Random(seed), MemorySource()
        async with PartitionReader(
            source=source, partition_id="0", prefetch_events=50, startup_timeout=10_000
        ) as reader:
            seen, appended = list[int](), 0
            while appended < 400 or len(seen) < appended:
                match rng.randrange(5) if appended < 400 else None:
                    case None:
                        pass
                    case 0:
                        source.lose_links()
                    case 1:
                        source.refuse(ServiceBusyError("busy"), times=2)
                        source.fail(ServiceBusyError("busy"), "0")
                    case _:
                        appended += len(source.append("0", *[b"x"] * rng.randrange(1, 30)))
                seen += [event.sequence_number for event in await reader.read(max_wait_time=rng.choice([0, 0.1, 5]))]
                assert sum(source.credit("0")) <= 50
        assert seen == list(range(appended))


async def test_error_that_is_final_reaches_the_reader() -> None:
    """An error that no retry can help is raised; received events come first."""
    source = MemorySource()
    source.append("0", b"one")
    async with PartitionReader(source=source, partition_id="0") as reader:
        assert len(await reader.read()) == 1
        assert source.fail(RequestRefusedError("enough")) == 1
        with pytest.raises(RequestRefusedError, match="enough"):
            await reader.read()


async def test_checkpoints_are_continued_from_and_losses_reported() -> None:
    """A second host with the same leases continues; what was dropped meanwhile is reported with its numbers."""
    source, leases, reports = MemorySource(), MemoryLeases(), list[HostReport]()
    source.append("0", *[b"x"] * 10)
    for first, until in ((0, 10), (15, 5)):
        processor = Collecting()
        store = MemoryLeaseStore(leases)
        async with _running(
            source,
            processor,
            lease_store=store,
            checkpoint_policy=CheckpointPolicy(every_events=1),
            hooks=[reports.append],
        ):
            await processor.until(until)
        assert processor.numbers["0"] == list(range(first, first + until))
        if first == 0:
            source.append("0", *[b"x"] * 10)
            source.drop("0", 15)
    (lost,) = [report for report in reports if isinstance(report, DataLost)]
    assert (lost.loss.first_missing, lost.loss.last_missing) == (10, 14)


async def test_read_of_dropped_events_raises() -> None:
    """With `on_data_loss="fail"` it is an error with the numbers."""
    source = MemorySource()
    source.append("0", *[b"x"] * 10)
    async with PartitionReader(
        source=source, partition_id="0", position=2, on_data_loss="fail", prefetch_events=1
    ) as reader:
        assert [event.sequence_number for event in await reader.read()] == [3]
        source.drop("0", 8)
        with pytest.raises(DataLossError) as caught:
            await _read_on(reader)
    assert caught.value.last_missing == 7


async def _read_on(reader: PartitionReader) -> None:
    while await reader.read():
        pass


async def test_names_and_closing() -> None:
    """A partition that is not there is refused, and a closed source too; bad values name their field."""
    source = MemorySource()
    with pytest.raises(EntityNotFoundError):
        await source.partition_properties("1")
    await source.aclose()
    with pytest.raises(ClosedError):
        await source.partitions()
    nonsense: list[dict[str, Any]] = [{"partitions": 0}, {"partitions": "2"}, {"first": -1}]
    for options in nonsense:
        with pytest.raises(ConfigurationError):
            MemorySource(**options)
