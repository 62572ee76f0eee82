"""Counters of producers: every message whose outcome is known is counted once, as sent or as failed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import pytest

from eventpump.core.status import ProducerStats, SendCount
from eventpump.errors import (
    EventPumpError,
    EventTooLargeError,
    LinkDetachedError,
    PublishOutcomeUnknownError,
    RequestRefusedError,
    ServiceBusyError,
)
from eventpump.eventhubs.events import EventData
from eventpump.options.base import RetryOptions
from eventpump.options.producer import BufferSettings
from eventpump.producer.buffered import HubBufferedProducer
from eventpump.producer.producer import HubProducer
from eventpump.testing.transport import FakeHub, FakeTransport, SendFault
from tests.support.seeds import seeds

RETRY = RetryOptions(max_retries=2, base_delay=1, mode="fixed")


def _producer(hub: FakeHub, **options: Any) -> HubProducer:
    return HubProducer(FakeTransport(hub), hub.name, rng=random.Random(1), retry=RETRY, **options)


@pytest.mark.parametrize("idempotent", [False, True])
async def test_what_is_stored_is_sent_and_what_is_refused_failed(*, idempotent: bool) -> None:
    """With events, bytes and messages; a try that is followed by another one is a retry."""
    hub = FakeHub(partitions=1)
    async with _producer(hub, idempotent=idempotent) as producer:
        assert producer.stats == ProducerStats()
        await producer.send([EventData("1"), EventData("2")], partition_id="0")
        before = producer.stats
        assert before.sent.events == 2
        assert before.sent.batches == 1
        assert before.sent.bytes > 2
        hub.refuse(ServiceBusyError("busy"), operation="transfer")
        await producer.send(EventData("3"), partition_id="0")
        assert producer.stats.sent.events == 3
        assert (producer.stats.retried.events, producer.stats.retried.batches) == (1, 1)
        hub.refuse(RequestRefusedError("no"), operation="transfer")
        with pytest.raises(EventPumpError):
            await producer.send([EventData("4"), EventData("5")], partition_id="0")
        hub.refuse(ServiceBusyError("busy"), operation="transfer", times=3)
        with pytest.raises(ServiceBusyError):
            await producer.send(EventData("6"), partition_id="0")
    stats = producer.stats
    assert (stats.sent.events, stats.sent.batches) == (3, 2)
    assert (stats.failed.events, stats.failed.batches) == (3, 2)
    assert (stats.retried.events, stats.retried.batches) == (3, 3)
    assert before.sent.events == 2  # a snapshot, that does not change


async def test_what_is_in_doubt_is_counted_when_its_outcome_is_known() -> None:
    """Once, though the call that sent it has failed."""
    hub = FakeHub(partitions=1)
    retry = RetryOptions(max_retries=0, base_delay=1, mode="fixed")
    async with HubProducer(FakeTransport(hub), hub.name, retry=retry, idempotent=True) as producer:
        hub.lose(SendFault.LOST_AFTER_STORE)
        with pytest.raises(PublishOutcomeUnknownError):
            await producer.send(EventData("1"), partition_id="0")
        assert (producer.stats.sent.events, producer.stats.failed.events) == (0, 0)
        await producer.settle("0")
        assert (producer.stats.sent.events, producer.stats.failed.events) == (1, 0)
        with pytest.raises(EventTooLargeError):
            await producer.send(EventData(b"x" * 2**20), partition_id="0")
        assert (producer.stats.sent.events, producer.stats.failed.events) == (1, 1)


@pytest.mark.parametrize("idempotent", [False, True])
@seeds(3, of=8)
async def test_buffered_producer_counts_every_accepted_event_once(seed: int, *, idempotent: bool) -> None:
    """Faults of every kind: receipts, callbacks and counters agree, and stored events of idempotent ones are sent."""
    rng = random.Random(seed)
    hub = FakeHub(partitions=2)
    reported = {"sent": 0, "failed": 0}
    unknown = 0

    def on_error(events: Sequence[EventData], partition_id: str, error: Exception) -> None:
        nonlocal unknown
        reported["failed"] += len(events)
        unknown += len(events) * isinstance(error, PublishOutcomeUnknownError)

    settings = BufferSettings(max_batch_events=5, max_wait_time=0.01)
    buffered = HubBufferedProducer(
        _producer(hub, idempotent=idempotent),
        settings,
        on_success=lambda events, _: reported.update(sent=reported["sent"] + len(events)),
        on_error=on_error,
    )
    accepted = 0
    async with buffered:
        for number in range(120):
            match rng.randrange(30):
                case 0:
                    hub.refuse(ServiceBusyError("busy"), operation="transfer", times=rng.randint(1, 4))
                case 1:
                    hub.refuse(RequestRefusedError("no"), operation="transfer")
                case 2:
                    hub.detach(error=LinkDetachedError("detached"))
                case 3:
                    hub.lose(rng.choice([SendFault.LOST_BEFORE_STORE, SendFault.LOST_AFTER_STORE]))
            await buffered.send(EventData(str(number)), partition_id=rng.choice("01"))
            accepted += 1
            if rng.random() < 0.2:
                await asyncio.sleep(rng.random() * 3)
    stats = buffered.stats
    assert {"sent": stats.sent.events, "failed": stats.failed.events} == reported
    assert stats.sent.events + stats.failed.events == accepted
    assert stats.sent.batches <= stats.sent.events
    stored = sum(len(hub.events(each)) for each in "01")
    if idempotent:
        assert stats.sent.events <= stored <= stats.sent.events + unknown
    else:
        assert stored >= stats.sent.events


def test_counts_compare_and_begin_at_nothing() -> None:
    """As data does."""
    assert ProducerStats().sent == SendCount() == SendCount(0, 0, 0)


async def test_producer_is_watched_by_its_counters() -> None:
    """As metrics: those that failed have a label of their own; ready until it is closed, and without a lag."""
    hub = FakeHub(partitions=1)
    async with _producer(hub) as plain, HubBufferedProducer(_producer(hub), BufferSettings()) as buffered:
        await plain.send([EventData("1"), EventData("2")], partition_id="0")
        hub.refuse(EventTooLargeError(2, 1), operation="transfer")
        with pytest.raises(EventTooLargeError):
            await plain.send(EventData("3"), partition_id="0")
        found = {each.name: [sample.value for sample in each.samples] for each in plain.metrics()}
        assert found == {
            "messaging_client_sent_messages_total": [2, 1],
            "eventpump_producer_retried_messages_total": [0],
        }
        (sent, *_) = plain.metrics()
        assert [each.labels.get("error_type") for each in sent.samples] == [None, "_OTHER"]
        hub.hang("transfer")
        await buffered.send(EventData("4"), partition_id="0")
        (metric,) = (each for each in buffered.metrics() if each.name == "eventpump_producer_buffer_bytes")
        assert [each.value for each in metric.samples] == [buffered.buffered_bytes]
        assert buffered.buffered_bytes > 0
        hub.answer("transfer")
        for producer in (plain, buffered):
            assert producer.health().ready
            assert producer.behind() is None
    for closed in (plain, buffered):
        assert closed.health().reasons == (f"the producer of hub {hub.name} is closed",)
        assert closed.health().live
