"""The buffered producer against the emulator, over real sockets: what was reported as sent is what readers find."""

from __future__ import annotations

import asyncio
import random
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from eventpump import (
    BufferedProducer,
    ConfigurationError,
    Emulator,
    EventData,
    EventProducer,
    EventTooLargeError,
    RetryOptions,
    SendResult,
)
from eventpump.emulator.faults import Action, DetachLink, DropConnection, Hold, LinkRole, Reject
from eventpump.eventhubs.conditions import MESSAGE_SIZE_EXCEEDED
from tests.ways import Served, Way, over_both

pytestmark = over_both()

RETRY = RetryOptions(max_retries=10, base_delay=0.01, max_delay=0.05)
PARTITIONS = ("0", "1", "2", "3")


@pytest.fixture
async def service(way: Way) -> AsyncIterator[Served]:
    async with Emulator({"telemetry": 4}, tls=way.tls) as emulator:
        yield Served(emulator, way.options)


def buffered(service: Served, **options: Any) -> BufferedProducer:
    """Make a producer to the service."""
    return BufferedProducer(service.connection_string, "telemetry", **{**service.options, **options})


async def test_send_with_keys_arrives_in_order_where_the_gateway_routes(service: Served) -> None:
    """Keys of buffered events and of gateway sends meet; readers see each key; its events are in order."""
    keys = [f"sensor-{number}" for number in range(20)]
    async with (
        buffered(service, max_batch_events=50) as producer,
        EventProducer(service.connection_string, "telemetry", **service.options) as plain,
    ):
        for number in range(2000):
            await producer.send(EventData(str(number)), partition_key=keys[number % 20])
        await producer.flush()
        for key in keys:
            await plain.send(EventData("last"), partition_key=key)
    found: defaultdict[str | None, list[str]] = defaultdict(list)
    for partition_id in PARTITIONS:
        for event in await service.read("telemetry", partition_id):
            found[event.partition_key].append(event.body_as_str())
    assert found == {key: [*(str(number) for number in range(at, 2000, 20)), "last"] for at, key in enumerate(keys)}


@pytest.mark.parametrize("seed", range(3))
async def test_send_with_idempotence_arrives_once_through_every_fault(service: Served, seed: int) -> None:
    """Connections dropped before and after storing, messages refused: each event is there once, with its number.

    Partitions whose batches are in doubt hold up no other, and numbers count from the first event of the partition.
    """
    rng = random.Random(seed)
    actions: list[Action] = [DropConnection(), DropConnection(stored=True), Reject("amqp:internal-error")]
    faults = [
        service.faults.add(rng.choice(actions), role=LinkRole.PRODUCER, after=rng.randrange(1, 100))
        for _ in range(20 if not service.options else 8)  # over TLS each costs a connection that is slow to make
    ]
    reported: Counter[str] = Counter()

    def success(events: Sequence[EventData], partition_id: str) -> None:
        reported[partition_id] += len(events)

    async with BufferedProducer(
        service.connection_string,
        "telemetry",
        **service.options,
        idempotent=True,
        retry=RETRY,
        max_batch_events=10,
        on_success=success,
    ) as producer:
        receipts = [
            await producer.send(EventData(str(number)), partition_key=str(number % 40)) for number in range(2000)
        ]
        outcomes = [await receipt for receipt in receipts]
    assert all(fault.fired for fault in faults)
    for partition_id in PARTITIONS:
        events = await service.read("telemetry", partition_id)
        mine = [(number, at) for number, at in enumerate(outcomes) if at.partition_id == partition_id]
        assert [event.body_as_str() for event in events] == [str(number) for number, _ in mine]
        numbers = [at.published_sequence_number for _, at in mine]
        first = numbers[0]
        assert first is not None
        assert numbers == list(range(first, first + len(numbers)))
        assert reported[partition_id] == len(events)


async def test_send_without_idempotence_arrives_through_lost_connections(service: Served) -> None:
    """Without idempotence a lost answer has its batch sent again, and no event is lost."""
    for after in (3, 5, 4):
        service.faults.add(DropConnection(stored=True), role=LinkRole.PRODUCER, after=after)
    async with buffered(service, retry=RETRY, max_batch_events=10) as producer:
        receipts = [await producer.send(EventData(str(number)), partition_id="0") for number in range(500)]
        assert {await receipt for receipt in receipts} == {SendResult("0", None)}
    bodies = Counter(event.body_as_str() for event in await service.read("telemetry", "0"))
    assert set(bodies) == {str(number) for number in range(500)}
    assert max(bodies.values()) > 1


@pytest.mark.parametrize("idempotent", [False, True])
async def test_send_to_a_hanging_partition_delays_no_other(service: Served, *, idempotent: bool) -> None:
    """With one partition silent and its part of the buffer full, thousands of events go to the others."""
    fault = service.faults.add(Hold(), role=LinkRole.PRODUCER, partition="0", count=None)
    async with buffered(service, idempotent=idempotent, retry=RETRY, max_events=400) as producer:
        stuck = [asyncio.ensure_future(producer.send(EventData("s"), partition_id="0")) for _ in range(500)]
        async with asyncio.timeout(30):
            last = [await producer.send(EventData("o"), partition_id=str(1 + number % 3)) for number in range(5000)]
            await asyncio.gather(*last[-3:])
        assert not all(each.done() for each in stuck)
        fault.remove()
        await asyncio.wait(stuck)
    counts = [len(await service.read("telemetry", partition_id)) for partition_id in PARTITIONS]
    assert counts == [500, 1667, 1667, 1666]


@pytest.mark.parametrize("idempotent", [False, True])
async def test_send_above_the_services_limit_goes_in_parts(way: Way, *, idempotent: bool) -> None:
    """Where the service takes less in a message than a batch holds, batches go in parts, and too large events fail."""
    async with Emulator({"telemetry": 1}, tls=way.tls, max_message_size=2000) as emulator:
        await _keep_a_smaller_limit(Served(emulator, way.options), idempotent=idempotent)


async def _keep_a_smaller_limit(service: Served, *, idempotent: bool) -> None:
    async with buffered(service, idempotent=idempotent, on_error=_ignore) as producer:
        receipts = [await producer.send(EventData(f"{number:0150}")) for number in range(50)]
        large = await producer.send(EventData(b"l" * 2500))
        receipts += [await producer.send(EventData(f"{number:0150}")) for number in range(50, 100)]
        outcomes = await asyncio.gather(*receipts)
        with pytest.raises(EventTooLargeError) as caught:
            await large
        assert caught.value.limit == 2000
        assert 2500 < caught.value.size < 2700
        assert [int(event.body_as_str()) for event in await service.read("telemetry", "0")] == list(range(100))
        if idempotent:
            first = outcomes[0].published_sequence_number
            assert first is not None
            assert [each.published_sequence_number for each in outcomes] == list(range(first, first + 100))


@pytest.mark.parametrize("action", [Reject, DetachLink])
@pytest.mark.parametrize("idempotent", [False, True])
async def test_send_that_the_service_refuses_as_too_large_goes_in_parts(
    service: Served, action: type[Reject | DetachLink], *, idempotent: bool
) -> None:
    """A batch that fits the link and is refused for its size, by a rejection or a detach, is halved."""
    fault = service.faults.add(action(MESSAGE_SIZE_EXCEEDED), role=LinkRole.PRODUCER, count=3)
    async with buffered(service, idempotent=idempotent, retry=RETRY, on_error=_ignore) as producer:
        receipts = [await producer.send(EventData(str(number)), partition_id="0") for number in range(4)]
        outcomes = await asyncio.gather(*receipts, return_exceptions=True)
        assert fault.fired == 3  # four, two and one
        large, *others = outcomes
        assert isinstance(large, EventTooLargeError)
        assert large.limit is None
        assert [event.body_as_str() for event in await service.read("telemetry", "0")] == ["1", "2", "3"]
        if idempotent:
            assert [each.published_sequence_number for each in others if isinstance(each, SendResult)] == [1, 2, 3]


async def test_options_that_cannot_work_are_refused(service: Served) -> None:
    """An unknown option, a bound of nothing, and pipelining with idempotence each name themselves."""
    for options, name in (
        ({"max_batch": 1}, "max_batch"),
        ({"max_events": 0}, "max_events"),
        ({"max_wait_time": -1}, "max_wait_time"),
        ({"idempotent": True, "max_in_flight": 2}, "max_in_flight"),
    ):
        with pytest.raises(ConfigurationError, match=name):
            buffered(service, **options)


def _ignore(*_: object) -> None:
    pass
