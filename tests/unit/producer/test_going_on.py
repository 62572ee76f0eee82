"""Callers of sends that go on within the report of their outcome, and there do whatever they like to the producer."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

from eventpump.core.status import BatchState
from eventpump.emulator.faults import CloseConnection, DetachLink, EndSession, Hold, LinkRole, Performative
from eventpump.errors import EventPumpError, PublishOutcomeUnknownError
from eventpump.eventhubs.events import EventData, ReceivedEvent
from eventpump.options.base import RetryOptions
from eventpump.producer.batch import EventBatch
from eventpump.producer.producer import HubProducer
from tests.support.seeds import seeds
from tests.unit.emulator.serving import serve, transport_to

_ENDS = [kind(answered=answered) for kind in (CloseConnection, EndSession, DetachLink) for answered in (True, False)]


class _Life:
    """Producers that share a connection, and callers that send by them.

    Attributes:
        outcomes: What each event's send came to, by the event's number: None for stored, or the error.
        batches: The batches that were sent, by the number of their first event.
        by: The producer of each event, by number.
    """

    def __init__(self, producers: list[HubProducer], drop: Callable[[], None], rng: random.Random) -> None:
        self.producers = producers
        self.rng = rng
        self.outcomes: dict[int, BaseException | None] = {}
        self.by: dict[int, HubProducer] = {}
        self.batches: dict[int, tuple[EventBatch, list[int]]] = {}
        self.callers: list[asyncio.Task[Any]] = []
        self._drop = drop

    def begin(self, work: Coroutine[Any, Any, Any]) -> None:
        self.callers.append(asyncio.create_task(work))

    async def call(self, sends: int) -> None:
        """Send so many times, each at once after the one before or a little later, and meddle in between."""
        for _ in range(sends):
            await self._send()
            await self._meddle()  # within the report of the outcome, if the service has answered
            if self.rng.random() < 0.3:
                await asyncio.sleep(self.rng.choice([0, 0.01, 1.0]))

    async def _send(self) -> None:
        rng, producer = self.rng, self.rng.choice(self.producers)
        numbers = [len(self.by) + place for place in range(rng.choice([1, 1, 1, 3]))]
        self.by |= dict.fromkeys(numbers, producer)
        events = [EventData(str(number)) for number in numbers]
        error: BaseException | None = None
        try:
            async with asyncio.timeout(rng.choice([None, None, None, None, 0, 0.001, 2.0])):
                if rng.random() < 0.3:
                    batch = await producer.create_batch(partition_id="0")
                    self.batches[numbers[0]] = batch, numbers
                    assert all(map(batch.try_add, events))
                    await producer.send(batch)
                else:
                    await producer.send(events[0] if len(events) == 1 else events, partition_id="0")
        except (EventPumpError, TimeoutError, asyncio.CancelledError) as failure:
            error = failure
            if isinstance(failure, asyncio.CancelledError):
                raise
        finally:
            self.outcomes |= dict.fromkeys(numbers, error)

    async def _meddle(self) -> None:
        rng = self.rng
        what = rng.random()
        if what < 0.1:
            rng.choice(self.callers).cancel()
        elif what < 0.15:
            self._drop()
        elif what < 0.2 and len(self.callers) < 40:
            self.begin(self.call(3))
        elif what < 0.22:
            await rng.choice(self.producers).aclose()
        elif what < 0.25:
            await rng.choice(self.producers).settle("0")
        elif what < 0.28:
            raise ZeroDivisionError("the caller's own")


@seeds(20, of=300)
async def test_callers_that_go_on_within_the_report_and_meddle_lose_and_double_nothing(seed: int) -> None:
    """Sends end; None is stored, once if idempotent and in its caller's order; an error says no more than is true."""
    rng = random.Random(seed)
    service = await serve()
    hub = service.hub("telemetry")
    assert hub is not None
    partition = hub.partition("0")
    assert partition is not None
    transport = transport_to(service, rng)
    retry = RetryOptions(max_retries=rng.choice([0, 2, 5]), try_timeout=rng.choice([None, None, 5.0]))
    plain, idempotent = (
        HubProducer(transport, "telemetry", retry=retry, rng=rng, owns_transport=False, idempotent=each)
        for each in (False, True)
    )

    def drop() -> None:
        for connection in list(service.connections):
            connection.abort()

    async def disturb() -> None:
        role = LinkRole.PRODUCER
        while True:
            await asyncio.sleep(rng.uniform(0, 3))
            on = rng.choice([Performative.ATTACH, Performative.TRANSFER])
            if rng.random() < 0.5:
                service.faults.add(rng.choice(_ENDS), on=on, role=role, after=rng.randrange(4))
                continue
            held = service.faults.add(Hold(), on=on, role=role, count=None)
            await asyncio.sleep(rng.choice([0.01, 1.0, 8.0]))
            held.remove()  # what is waited for, and by whom, may be another then

    life = _Life([plain, idempotent], drop, rng)
    disturbing = asyncio.create_task(disturb())
    for _ in range(5):
        life.begin(life.call(12))
    async with asyncio.timeout(3600):
        while pending := [each for each in life.callers if not each.done()]:
            await asyncio.wait(pending)
        disturbing.cancel()
        service.faults.clear()
        for producer in (plain, idempotent):
            await asyncio.gather(producer.aclose(3600.0), return_exceptions=True)
    for each in life.callers:
        error = None if each.cancelled() else each.exception()
        assert error is None or isinstance(error, EventPumpError | ZeroDivisionError), repr(error)
    await transport.aclose()
    await service.aclose()

    stored = [int(ReceivedEvent(raw).body) for raw in partition.payloads]
    times = Counter(stored)
    for number, error in life.outcomes.items():
        is_once = life.by[number] is idempotent
        assert times[number] <= 1 or not is_once, number
        if error is None:
            assert times[number] >= 1, number
        elif is_once and not isinstance(error, PublishOutcomeUnknownError | TimeoutError | asyncio.CancelledError):
            assert times[number] == 0, (number, error)
    for batch, numbers in life.batches.values():
        if life.by[numbers[0]] is idempotent and batch.state is not BatchState.IN_DOUBT:
            assert (batch.state is BatchState.PUBLISHED) is (times[numbers[0]] == 1), (numbers, batch)
    is_known = all(batch.state is not BatchState.IN_DOUBT for batch, _ in life.batches.values())
    own = [number for number in stored if life.by[number] is idempotent]
    count = idempotent.stats.sent.events
    assert count == len(own) if is_known else count <= len(own)
