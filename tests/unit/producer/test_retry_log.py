"""The debug log of producers: what is tried again, when, and why."""

from __future__ import annotations

import logging
import random

import pytest

from eventpump.errors import LinkDetachedError, ServiceBusyError
from eventpump.eventhubs.events import EventData
from eventpump.options.base import RetryOptions
from eventpump.producer.producer import HubProducer
from eventpump.testing.transport import FakeHub, FakeTransport, SendFault

RETRY = RetryOptions(max_retries=3, base_delay=1.0, max_delay=8.0)


def producer(hub: FakeHub, *, idempotent: bool = False) -> HubProducer:
    transport = FakeTransport(hub)
    return HubProducer(transport, hub.name, retry=RETRY, rng=random.Random(1), idempotent=idempotent)


@pytest.mark.parametrize("is_throttled", [True, False])
async def test_retry_of_a_send(is_throttled: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Each retry of a plain send is a line with attempt and fields: at INFO where the service throttles, else DEBUG."""
    caplog.set_level(logging.DEBUG, "eventpump.producer")
    hub = FakeHub(partitions=1)
    error = ServiceBusyError("wait") if is_throttled else LinkDetachedError("gone")
    hub.refuse(error, operation="send", times=2)
    sender = producer(hub)
    await sender.send(EventData("x"), partition_id="0")
    await sender.aclose()
    assert [record.levelno for record in caplog.records] == [logging.INFO if is_throttled else logging.DEBUG] * 2
    assert [record.__dict__["attempt"] for record in caplog.records] == [1, 2]
    assert {(record.__dict__["hub"], record.__dict__["partition_id"]) for record in caplog.records} == {(hub.name, "0")}
    assert all(record.getMessage().startswith("sending to partition 0: ") for record in caplog.records)
    assert all(record.getMessage().endswith(f" s: {error}") for record in caplog.records)


async def test_send_in_doubt(caplog: pytest.LogCaptureFixture) -> None:
    """A send whose outcome is unknown is a line that says so, and so is the attach that settles it."""
    caplog.set_level(logging.DEBUG, "eventpump.producer")
    hub = FakeHub(partitions=1)
    sender = producer(hub, idempotent=True)
    hub.lose(SendFault.LOST_AFTER_STORE)
    await sender.send(EventData("x"), partition_id="0")
    await sender.aclose()
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.DEBUG]
    doubt = [line.startswith("partition 0: settling a send in doubt: attempt 1 failed, retried in ") for line in lines]
    attached = [line.startswith("partition 0: the producer is attached: id ") for line in lines]
    assert (doubt, attached) == ([False, True, False], [True, False, True])
    assert all(record.__dict__["partition_id"] == "0" for record in caplog.records)
