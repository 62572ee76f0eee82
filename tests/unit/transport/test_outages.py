"""How soon events flow after an outage, with default settings and the real transport, on virtual time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest

from eventpump.amqp.types import Int, Short
from eventpump.consumer.link.feed import PartitionFeed, as_received
from eventpump.errors import ConnectionLostError, EventPumpError
from eventpump.eventhubs.events import EventData
from eventpump.eventhubs.names import PRODUCER_EPOCH, PRODUCER_ID, PRODUCER_SEQUENCE_NUMBER
from eventpump.interfaces import ReceiveLinkSpec
from eventpump.options.base import RetryOptions
from eventpump.options.consumer import FeedSettings
from eventpump.producer.producer import HubProducer
from eventpump.transport.namespace import RECONNECT_DELAY_MAX
from eventpump.transport.native import NativeTransport
from tests.unit.transport.service import EARLIEST, Service, settings

WITHIN = 6.0
"""Seconds after which events flow again, as docs/networks.md has it."""


def _now() -> float:
    return asyncio.get_running_loop().time()


async def _refused() -> None:
    raise ConnectionLostError("cannot connect: Connection refused")


class _Reading:
    """Some partitions read over one transport, with default settings."""

    def __init__(self, service: Service, seed: int, partitions: int = 4) -> None:
        self.rng = random.Random(seed)
        self.transport = NativeTransport(settings(), rng=self.rng, dialer=service.dial)
        self.attached: dict[str, float] = {}
        self._changed = asyncio.Event()
        self.reported: list[float] = []
        self.feeds = [self._feed(str(number)) for number in range(partitions)]

    def _feed(self, partition_id: str) -> PartitionFeed[bytes]:
        spec = ReceiveLinkSpec("telemetry", "$Default", partition_id, EARLIEST)
        feed = PartitionFeed(
            self.transport,
            spec,
            FeedSettings(hub="telemetry"),
            wrap=as_received,
            rng=self.rng,
            on_attached=lambda: self._attached(partition_id),
            on_trouble=lambda error, delay: self.reported.append(_now()),
        )
        feed.start()
        return feed

    def _attached(self, partition_id: str) -> None:
        self.attached[partition_id] = _now()
        self._changed.set()

    async def until_attached(self) -> float:
        """Wait until every link is attached, and return when the last one was."""
        while len(self.attached) < len(self.feeds):
            self._changed.clear()
            await self._changed.wait()
        return max(self.attached.values())

    async def aclose(self) -> None:
        for feed in self.feeds:
            await feed.aclose()
        await self.transport.aclose()


async def _outage(service: Service, seed: int, length: float, how: Callable[[], Awaitable[None]] = _refused) -> float:
    """Return the seconds from the end of an outage until every link is attached again."""
    reading = _Reading(service, seed)
    await reading.until_attached()
    await asyncio.sleep(random.Random(seed).uniform(0, 100))
    service.script.connect = how
    reading.attached.clear()
    service.connection.drop()
    await asyncio.sleep(length)
    assert reading.attached == {}
    service.script.connect = None
    mended = _now()
    attached = await reading.until_attached()
    await reading.aclose()
    return attached - mended


@pytest.mark.parametrize("length", [0.5, 12.0, 150.0, 3600.0])
async def test_receive_continues_within_seconds_of_any_outage(
    service: Service, length: float, request: pytest.FixtureRequest
) -> None:
    """With default settings every link is attached again within 6 s of the end of an outage."""
    count = 400 if request.config.getoption("--long") else 20
    waits = [await _outage(service, seed, length) for seed in range(count if length < 1000 else count // 10)]
    assert max(waits) <= WITHIN
    # No worse than one full-jitter delay: the mean is half its bound.
    assert sum(waits) / len(waits) <= RECONNECT_DELAY_MAX / 2 + 0.5


class _Sending:
    """A program that sends one event after the other, and what has failed at once again."""

    def __init__(
        self, service: Service, rng: random.Random, connecting: random.Random, *, idempotent: bool, retries: int = 3
    ) -> None:
        service.script.properties = lambda: {
            PRODUCER_ID: 7,
            PRODUCER_EPOCH: Short(0),
            PRODUCER_SEQUENCE_NUMBER: Int(len(service.stored) - 1),
        }
        self.failures = 0
        transport = NativeTransport(settings(), rng=connecting, dialer=service.dial)
        retry = RetryOptions(max_retries=retries)
        self._producer = HubProducer(transport, "telemetry", retry=retry, rng=rng, idempotent=idempotent)
        self._stored = asyncio.Event()
        self._task = asyncio.create_task(self._send())

    async def _send(self) -> None:
        while True:
            await self._send_one([EventData("x")])
            self._stored.set()
            await asyncio.sleep(0.5)

    async def _send_one(self, events: list[EventData]) -> None:
        while True:
            try:
                await self._producer.send(events, partition_id="0")
            except EventPumpError:
                self.failures += 1
            else:
                return

    async def until_stored(self) -> float:
        """Wait until one more event is stored, and return how long that took."""
        began = _now()
        self._stored.clear()
        await self._stored.wait()
        return _now() - began

    async def aclose(self) -> None:
        self._task.cancel()
        await asyncio.wait({self._task})
        await self._producer.aclose()


async def _send_outage(seed: int, length: float, *, idempotent: bool, retries: int) -> float:
    """Return the seconds from the end of an outage until an event is stored."""
    service, rng = Service(), random.Random(seed)
    sending = _Sending(service, rng, rng, idempotent=idempotent, retries=retries)
    await sending.until_stored()
    await asyncio.sleep(random.Random(seed).uniform(0, 20))
    service.script.connect = _refused
    service.connection.drop()
    await asyncio.sleep(length)
    service.script.connect = None
    took = await sending.until_stored()
    await sending.aclose()
    return took


@pytest.mark.parametrize("idempotent", [False, True])
@pytest.mark.parametrize("retries", [3, 100])
@pytest.mark.parametrize("length", [0.5, 12.0, 150.0])
async def test_send_continues_within_seconds_of_any_outage(
    length: float, retries: int, idempotent: bool, request: pytest.FixtureRequest
) -> None:
    """What waits to be sent is stored within 6 s of the end of an outage, however long its own delays are."""
    count = 200 if request.config.getoption("--long") else 10
    waits = [await _send_outage(seed, length, idempotent=idempotent, retries=retries) for seed in range(count)]
    assert max(waits) <= WITHIN
    assert sum(waits) / len(waits) <= RECONNECT_DELAY_MAX / 2 + 0.5


class _Always(random.Random):
    """Chance that gives the highest value allowed, up to a bound."""

    def __init__(self, bound: float) -> None:
        super().__init__()
        self.bound = bound

    def uniform(self, a: float, b: float) -> float:
        return min(b, self.bound)


@pytest.mark.parametrize("idempotent", [False, True])
async def test_send_outlasts_an_outage_as_long_as_its_delays(service: Service, idempotent: bool) -> None:
    """That tries come early uses up no retry: a send fails only after as long as all its delays take together."""
    sending = _Sending(service, _Always(60.0), _Always(0.3), idempotent=idempotent)
    await sending.until_stored()
    await asyncio.sleep(0.2)
    service.script.connect = _refused
    service.connection.drop()
    await asyncio.sleep(0.3 + 0.8 + 1.6 + 3.2)
    assert sending.failures == 0
    assert len(service.attempts) > 10
    await asyncio.sleep(3.0)
    assert sending.failures > 0
    service.script.connect = None
    await sending.until_stored()
    await sending.aclose()


async def test_outage_is_reported_ever_more_rarely(service: Service) -> None:
    """What each link reports of an outage that goes on becomes ever less."""
    reading = _Reading(service, 1)
    await reading.until_attached()
    service.script.connect = _refused
    service.connection.drop()
    await asyncio.sleep(600)
    attempts = len(service.attempts)
    assert attempts > 150
    assert 4 * 15 < len(reading.reported) < 4 * 80
    await reading.aclose()


async def test_attach_that_ends_the_connection_is_spaced_out(service: Service) -> None:
    """A connection lost at every attach of one link is replaced after delays that grow, though others attached."""
    reading = _Reading(service, 1, partitions=2)
    await reading.until_attached()

    async def drop_soon() -> None:
        asyncio.get_running_loop().call_later(0.2, lambda: service.connection.drop())

    service.script.connect = drop_soon
    began, before = _now(), len(service.attempts)
    service.connection.drop()
    await asyncio.sleep(600)
    assert 20 < len(service.attempts) - before < 0.6 * (_now() - began)
    service.script.connect = None
    await asyncio.sleep(20)
    await reading.aclose()
