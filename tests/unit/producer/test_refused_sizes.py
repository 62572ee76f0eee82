"""Batches that the service refuses as too large, though the link's limit allows them; on virtual time."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

import pytest

from eventpump.errors import ClosedError, EventPumpError, EventTooLargeError, PublishOutcomeUnknownError, ServiceError
from eventpump.eventhubs.events import EventData
from eventpump.options.base import RetryOptions
from eventpump.options.producer import BufferSettings
from eventpump.producer.buffered import HubBufferedProducer
from eventpump.producer.intake import DeliveryReceipt, SendResult
from eventpump.producer.producer import HubProducer
from eventpump.testing.transport import FakeHub, FakeTransport, SendFault
from tests.support.seeds import seeds

RETRY = RetryOptions(max_retries=4, base_delay=0.1, max_delay=1.0)


class StrictHub(FakeHub):
    """Refuses messages above a limit that its links do not state."""

    def __init__(self, allowed: int, **options: Any) -> None:
        super().__init__(**options)
        self.allowed = allowed
        self.refused: list[int] = []

    def store(
        self, payload: bytes, message_format: int, partition_id: str | None, *, is_idempotent: bool = False
    ) -> None:
        if len(payload) > self.allowed:
            self.refused.append(len(payload))
            raise EventTooLargeError(len(payload))
        super().store(payload, message_format, partition_id, is_idempotent=is_idempotent)


def buffered(hub: FakeHub, *, idempotent: bool, seed: int = 1, **settings: Any) -> HubBufferedProducer:
    service = HubProducer(
        FakeTransport(hub), hub.name, idempotent=idempotent, retry=RETRY, rng=random.Random(seed), max_in_flight=None
    )
    return HubBufferedProducer(service, BufferSettings(**settings))


async def outcome_of(receipt: DeliveryReceipt) -> SendResult | EventPumpError:
    try:
        return await receipt
    except EventPumpError as error:
        return error


@pytest.mark.parametrize("idempotent", [False, True])
@pytest.mark.parametrize("place", [0, 4, 9])
async def test_batch_refused_as_too_large_is_halved(place: int, *, idempotent: bool) -> None:
    """Down to single events: one that is too large fails alone, with its size, the others are stored in order."""
    hub = StrictHub(1000, partitions=1)
    bodies = [f"{number:0300}" for number in range(10)]
    bodies[place] = "x" * 2000
    async with buffered(hub, idempotent=idempotent) as producer:
        receipts = [await producer.send(EventData(body), partition_id="0") for body in bodies]
        outcomes = [await outcome_of(receipt) for receipt in receipts]
        assert producer.buffered_events == 0
    error = outcomes.pop(place)
    assert isinstance(error, EventTooLargeError)
    assert (error.limit, error.size) == (None, min(size for size in hub.refused if size > 2000))
    del bodies[place]
    assert [event.body_as_str() for event in hub.events("0")] == bodies
    numbers = [outcome.published_sequence_number for outcome in outcomes if isinstance(outcome, SendResult)]
    assert numbers == (list(range(1, 10)) if idempotent else [None] * 9)


@pytest.mark.parametrize("fault", [SendFault.LOST_BEFORE_STORE, SendFault.STORED_LATE])
async def test_batch_refused_as_too_large_after_a_lost_transfer_is_halved(fault: SendFault) -> None:
    """The transfer that was lost, of the same size, leaves no doubt; arriving late, it is refused too."""
    hub = StrictHub(1000, partitions=1)
    hub.lose(fault, connection=True)
    async with buffered(hub, idempotent=True) as producer:
        receipts = [await producer.send(EventData(f"{number:0300}"), partition_id="0") for number in range(10)]
        results = [await receipt for receipt in receipts]
        hub.deliver_late()
    assert [result.published_sequence_number for result in results] == list(range(1, 11))
    assert [int(event.body_as_str()) for event in hub.events("0")] == list(range(10))


class History:
    """Sends, cancellations, cut connections and a limit that changes, by chance; and what must be true afterwards."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.idempotent = self.rng.random() < 0.6
        self.hub = StrictHub(self.rng.choice([400, 700, 1500]), partitions=2)
        self.hub.latency = self.rng.choice([0.0, 0.01])
        self.lowest = self.hub.allowed
        self.producer = buffered(
            self.hub,
            idempotent=self.idempotent,
            seed=seed,
            max_wait_time=0.05,
            max_batch_events=self.rng.choice([3, 10, 50]),
        )
        self.accepted: list[tuple[str, str, int, DeliveryReceipt]] = []
        self.may_repeat = False

    async def run(self) -> None:
        rng, hub, calls = self.rng, self.hub, list[asyncio.Task[None]]()
        async with self.producer:
            for number in range(rng.randint(20, 120)):
                chance = rng.random()
                if chance < 0.75:
                    calls.append(asyncio.create_task(self._send(number)))
                elif chance < 0.8:
                    rng.choice(calls).cancel() if calls else None
                elif chance < 0.84:
                    hub.allowed = rng.choice([300, 400, 700, 1500])
                    self.lowest = min(self.lowest, hub.allowed)
                elif chance < 0.9:
                    hub.lose(rng.choice(list(SendFault)), connection=rng.random() < 0.5)
                    self.may_repeat = not self.idempotent
                elif chance < 0.92:
                    hub.lose_connections()
                    self.may_repeat = not self.idempotent
                elif chance < 0.94:
                    hub.refuse(ServiceError("not now"), operation="transfer")
                else:
                    await asyncio.sleep(rng.choice([0, 0.01, 0.1, 1]))
                if rng.random() < 0.02:
                    hub.deliver_late()
                await asyncio.sleep(0)
            await asyncio.wait_for(self.producer.flush(), 600)
            await asyncio.gather(*calls, return_exceptions=True)
        hub.deliver_late()

    async def _send(self, number: int) -> None:
        partition_id = self.rng.choice(["0", "1"])
        body = f"{number} ".ljust(self.rng.choice([10, 10, 100, 350, 900, 2000]), "x")
        event = EventData(body)
        size = len(event.encode())
        receipt = await self.producer.send(event, partition_id=partition_id)
        self.accepted.append((partition_id, body, size, receipt))
        if self.rng.random() < 0.3:
            await receipt

    async def check(self) -> None:
        stored = {each: [event.body_as_str() for event in self.hub.events(each)] for each in ("0", "1")}
        for partition_id, bodies in stored.items():
            mine = [each for each in self.accepted if each[0] == partition_id]
            counts = Counter(bodies)
            ended = [(body, size, await outcome_of(receipt)) for _, body, size, receipt in mine]
            for body, size, outcome in ended:
                if isinstance(outcome, SendResult):
                    assert counts[body] == 1 or (self.may_repeat and counts[body] > 1), "lost, or stored twice"
                elif isinstance(outcome, EventTooLargeError):
                    assert outcome.limit is None
                    assert size + 200 > self.lowest, "an event failed that is not too large by itself"
                    assert not counts[body] or self.may_repeat, "stored, and an error"
                else:
                    assert not isinstance(outcome, ClosedError | PublishOutcomeUnknownError)
                    assert not self.idempotent, f"not in doubt and not too large: {outcome!r}"
            # Plain, what arrives late though its retry was refused comes after others.
            reported = [body for body, _, outcome in ended if self.idempotent or isinstance(outcome, SendResult)]
            assert [body for body in dict.fromkeys(bodies) if body in reported] == [
                body for body in reported if counts[body]
            ], "not in order"


@seeds(40, of=3000)
async def test_buffer_ends_every_event_once_whatever_the_service_refuses_as_too_large(seed: int) -> None:
    """Limits that the client does not know, and that change, cut connections, late transfers and cancelled calls:

    every event is stored, or too large by itself and fails alone; stored once with idempotence; in order.
    """
    history = History(seed)
    await history.run()
    await history.check()
