"""`RetryOptions`: what cannot work is refused, and clients heed a limit per try."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from eventpump.consumer.reader.reader import HubReader
from eventpump.core.backoff import Backoff
from eventpump.errors import ConfigurationError, PublishOutcomeUnknownError, ServiceTimeoutError
from eventpump.eventhubs.events import EventData
from eventpump.interfaces import ReceiveLinkSpec, ReceiveSink, SendLinkSpec
from eventpump.options.base import RetryOptions
from eventpump.options.consumer import HostSettings, ReaderSettings, SubscriptionSettings
from eventpump.producer.producer import HubProducer
from eventpump.testing.transport import FakeHub, FakeReceiveLink, FakeSendLink, FakeTransport


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"mode": "linear"}, "mode"),
        ({"try_timeout": 0}, "try_timeout"),
        ({"try_timeout": "5 s"}, "try_timeout"),
        ({"base_delay": 2, "max_delay": 1}, "max_delay"),
        ({"max_tries": 2}, "max_tries"),
    ],
)
def test_what_cannot_be_is_refused(given: dict[str, Any], field: str) -> None:
    """With the name of the field."""
    with pytest.raises(ConfigurationError, match=f"^{field}: "):
        RetryOptions(**given)


def test_long_base_delay_needs_no_longest_one() -> None:
    """The longest is as long then; in fixed mode it has no effect."""
    assert RetryOptions(base_delay=100).max_delay == 100
    assert Backoff.of(RetryOptions(base_delay=5, max_delay=1, mode="fixed")).failures == 0
    assert "mode" not in repr(RetryOptions())
    assert repr(RetryOptions(mode="fixed", try_timeout=5)).endswith("max_delay=60.0, mode='fixed', try_timeout=5.0)")


@pytest.mark.parametrize("made", [HostSettings, SubscriptionSettings])
def test_handler_has_another_option_for_it(made: Any) -> None:
    """The error names it; a fixed delay is possible, and what is not given is the option's default."""
    where = {"hub": "telemetry"} if made is HostSettings else {"name": "alerts"}
    with pytest.raises(ConfigurationError, match=r"^handler_retry: .*set handler_timeout"):
        made(**where, handler_retry=RetryOptions(try_timeout=5))
    retry = made(**where, handler_retry=RetryOptions(mode="fixed", base_delay=50)).handler_retry
    assert (retry.mode, retry.base_delay, retry.max_retries) == ("fixed", 50, None)


class HangingTransport(FakeTransport):
    """Answers neither the first attaches nor cancels them by itself."""

    def __init__(self, hub: FakeHub, hangs: int) -> None:
        super().__init__(hub)
        self.hangs = hangs
        self.attaches: list[float] = []

    async def _hang(self) -> None:
        self.attaches.append(round(asyncio.get_running_loop().time(), 3))
        if len(self.attaches) <= self.hangs:
            await asyncio.Event().wait()

    async def open_send_link(self, spec: SendLinkSpec) -> FakeSendLink:
        await self._hang()
        return await super().open_send_link(spec)

    async def open_receive_link(self, spec: ReceiveLinkSpec, sink: ReceiveSink) -> FakeReceiveLink:
        await self._hang()
        return await super().open_receive_link(spec, sink)


RETRY = RetryOptions(max_retries=3, base_delay=1, mode="fixed", try_timeout=10)


@pytest.mark.parametrize("idempotent", [False, True])
async def test_sends_heed_delay_and_limit(*, idempotent: bool) -> None:
    """Plain and idempotent ones: the third try succeeds, with a limit for each and the same delay between them."""
    hub = FakeHub(partitions=1)
    transport = HangingTransport(hub, 2)
    start = asyncio.get_running_loop().time()
    async with HubProducer(transport, hub.name, retry=RETRY, idempotent=idempotent) as producer:
        await producer.send(EventData("x"), partition_id="0")
    assert [round(each - start) for each in transport.attaches] == [0, 11, 22]
    assert [event.body for event in hub.events("0")] == [b"x"]


@pytest.mark.parametrize("idempotent", [False, True])
async def test_send_ends_when_its_tries_do(*, idempotent: bool) -> None:
    """With the error that names the limit."""
    hub = FakeHub(partitions=1)
    transport = HangingTransport(hub, 100)
    start = asyncio.get_running_loop().time()
    async with HubProducer(transport, hub.name, retry=RETRY, idempotent=idempotent) as producer:
        with pytest.raises(ServiceTimeoutError, match="try_timeout"):
            await producer.send(EventData("x"), partition_id="0")
        assert round(asyncio.get_running_loop().time() - start) == 43


async def test_transfer_beyond_its_time_is_settled() -> None:
    """It has left, so its outcome is unknown; sent again, it is stored once."""
    hub = FakeHub(partitions=1)
    hub.hang("transfer")
    retry = RetryOptions(max_retries=0, base_delay=1, mode="fixed", try_timeout=10)
    async with HubProducer(FakeTransport(hub), hub.name, retry=retry, idempotent=True) as producer:
        event = EventData("x")
        events = [event]
        with pytest.raises(PublishOutcomeUnknownError) as caught:
            await producer.send(events, partition_id="0")
        assert isinstance(caught.value.__cause__, ServiceTimeoutError)
        hub.answer("transfer")
        await asyncio.sleep(60)
        assert caught.value.batch is not None
        await producer.send(caught.value.batch)
        assert event.published_sequence_number == 1
    assert [each.body for each in hub.events("0")] == [b"x"]


async def test_link_that_does_not_answer_within_a_try_is_replaced() -> None:
    """As after the time-out of a single step; otherwise every later send would wait for the same link."""
    hub = FakeHub(partitions=1)
    retry = RetryOptions(max_retries=1, base_delay=1, mode="fixed", try_timeout=10)
    async with HubProducer(FakeTransport(hub), hub.name, retry=retry) as producer:
        hub.hang("transfer")
        with pytest.raises(ServiceTimeoutError, match="try_timeout"):
            await producer.send(EventData("x"), partition_id="0")
        assert len(hub.send_links) == 2
        hub.answer("transfer")
        await producer.send(EventData("y"), partition_id="0")
        assert len(hub.send_links) == 3
    assert hub.events("0")[-1].body == b"y"


@pytest.mark.parametrize("retry", [{"max_delay": 5}, {"mode": "fixed", "max_delay": 1}])
async def test_attaches_beyond_their_time_are_failures_in_a_row(retry: dict[str, Any]) -> None:
    """However long an attach took, it is no link that has lived."""
    hub = FakeHub(partitions=1)
    transport = HangingTransport(hub, 100)
    options: dict[str, Any] = {"link_retry": RetryOptions(max_retries=2, base_delay=1, try_timeout=10, **retry)}
    settings = ReaderSettings(hub=hub.name, partition_id="0", startup_timeout=1000, **options)
    async with HubReader(lambda: transport, settings) as reader:
        with pytest.raises(ServiceTimeoutError, match="try_timeout"):
            async with asyncio.timeout(500):
                await reader.read()
    assert len(transport.attaches) == 3


async def test_links_heed_delay_and_limit() -> None:
    """Of a reader, and so of a host: each attach has its time."""
    hub = FakeHub(partitions=1)
    hub.publish("0", count=3)
    transport = HangingTransport(hub, 2)
    start = asyncio.get_running_loop().time()
    options: dict[str, Any] = {"end": "@latest", "link_retry": RETRY}
    settings = ReaderSettings(hub=hub.name, partition_id="0", **options)
    async with HubReader(lambda: transport, settings) as reader:
        assert [event.sequence_number async for event in reader] == [0, 1, 2]
    assert [round(each - start) for each in transport.attaches] == [0, 11, 22]
