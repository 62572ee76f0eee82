"""`delivery_interval`: what arrives is left in the socket for a while, unless something is awaited."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Awaitable, Callable

import pytest

from eventpump.amqp.message import Message
from eventpump.eventhubs import cbs
from eventpump.testing.clock import VirtualTimeLoop
from eventpump.testing.sink import RecordingSink
from eventpump.transport.links import ClientReceiveLink
from eventpump.transport.native import NativeTransport
from tests.support.seeds import seeds
from tests.unit.transport.service import Service, event, open_reader, open_sender, settle, stored_event

EVERY = 0.5


def now() -> float:
    return asyncio.get_running_loop().time()


async def reader(
    transport: NativeTransport, interval: float, partition_id: str = "0"
) -> tuple[ClientReceiveLink, RecordingSink]:
    link, sink = await open_reader(transport, partition_id, delivery_interval=interval)
    link.set_credit(10_000)
    await settle()
    return link, sink


async def publish(service: Service, partition_id: str = "0", *, count: int = 1, body: bytes = b"x") -> None:
    """Send events, and let all happen that needs no time."""
    service.connection.only(partition_id).send_run([stored_event(body)] * count, max_bytes=1 << 30)
    service.connection.flush()
    await settle()


async def test_websocket_is_read_at_once(service: Service) -> None:
    """aiohttp reads it by itself: to hold what has come would save nothing."""
    transport = service.transport(transport_type="websocket")
    _, sink = await reader(transport, EVERY)
    for number in range(3):
        await publish(service)
        assert len(sink.events) == number + 1
    await transport.aclose()


async def test_first_event_comes_at_once_and_what_follows_together(service: Service) -> None:
    """None waits longer than the interval, and what comes in it comes with one read."""
    transport = service.transport()
    _, sink = await reader(transport, EVERY)
    await asyncio.sleep(5)
    await publish(service)
    assert len(sink.events) == 1
    for number in range(4):
        await asyncio.sleep(EVERY / 5)
        await publish(service)
        assert len(sink.events) == 1, number
    await asyncio.sleep(EVERY / 5)
    await settle()
    assert len(sink.events) == 5
    # After a silence it is at once again.
    await asyncio.sleep(EVERY)
    await publish(service)
    assert len(sink.events) == 6
    await transport.aclose()


async def test_without_an_interval_all_comes_at_once(service: Service) -> None:
    """The default."""
    transport = service.transport()
    _, sink = await reader(transport, 0.0)
    for number in range(3):
        await publish(service)
        assert len(sink.events) == number + 1
    await transport.aclose()


@pytest.mark.parametrize(("others", "counts"), [(EVERY / 2, EVERY / 2), (0.0, 0.0), (9.0, EVERY)])
async def test_smallest_interval_of_a_connection_counts(service: Service, others: float, counts: float) -> None:
    """And only as long as its link is attached: 0 where one has 0."""
    transport = service.transport()
    _, sink = await reader(transport, EVERY)
    other, _ = await reader(transport, others, "1")
    await asyncio.sleep(20)
    await publish(service)
    await publish(service)
    assert len(sink.events) == (1 if counts else 2)
    await asyncio.sleep(counts)
    await settle()
    assert len(sink.events) == 2
    await other.aclose()
    await asyncio.sleep(20)
    await publish(service)
    await publish(service)
    assert len(sink.events) == 3
    await asyncio.sleep(EVERY)
    await settle()
    assert len(sink.events) == 4
    await transport.aclose()


async def _send(transport: NativeTransport) -> None:
    await (await open_sender(transport)).send(event())


async def _ask(transport: NativeTransport) -> None:
    await transport.get_hub_properties("telemetry")


async def _attach(transport: NativeTransport) -> None:
    await open_reader(transport, "5", delivery_interval=9.0)


@pytest.mark.parametrize("work", [_send, _ask, _attach])
async def test_what_is_awaited_is_read_at_once(
    service: Service, work: Callable[[NativeTransport], Awaitable[None]]
) -> None:
    """A send, a request and an attach, also if they begin while nothing is read; and then it is left unread again."""
    transport = service.transport()
    _, sink = await reader(transport, EVERY)
    await _send(transport)
    await _ask(transport)
    await asyncio.sleep(5)
    await publish(service)
    await publish(service)
    assert len(sink.events) == 1
    began = now()
    await work(transport)
    assert now() == began
    assert len(sink.events) == 2
    await settle()
    await publish(service)
    await publish(service)
    assert len(sink.events) < 4
    await asyncio.sleep(EVERY)
    await settle()
    assert len(sink.events) == 4
    await transport.aclose()


async def test_answer_that_follows_its_outcome_is_read_at_once(service: Service) -> None:
    """A request waits for the answer, and not only until its message is accepted."""
    transport = service.transport()
    await reader(transport, EVERY)
    await asyncio.sleep(5)
    asked: list[Message] = []
    service.script.answer = asked.append
    asking = asyncio.create_task(transport.get_hub_properties("telemetry"))
    await settle()
    (request,) = asked
    began = now()
    reply = next(each for each in service.connection.links["$cbs"] if not each.is_receiver)
    reply.send(cbs.response(request, 202, "Accepted").encode(), settled=True)
    service.connection.flush()
    await asking
    assert now() == began
    await transport.aclose()


async def test_probe_detach_and_close_are_answered_at_once(service: Service) -> None:
    """The ends, too: nobody waits an interval for them."""
    transport = service.transport()
    link, sink = await reader(transport, EVERY)
    other, _ = await reader(transport, EVERY, "1")
    awaits: list[Callable[[], Awaitable[object]]] = [lambda: link.probe(5), other.aclose, transport.aclose]
    for awaited in awaits:
        await asyncio.sleep(5)
        await publish(service)
        await publish(service)
        assert len(sink.events) % 2
        began = now()
        await awaited()
        assert now() == began
        await settle()
    assert len(sink.events) >= 5


async def test_send_without_credit_goes_on_when_the_credit_is_there(service: Service) -> None:
    """The flow with the credit is awaited as well."""
    transport = service.transport()
    _, sink = await reader(transport, EVERY)
    service.script.credit = 0
    sender = await open_sender(transport)
    await asyncio.sleep(5)
    await publish(service)
    await publish(service)
    assert len(sink.events) == 1
    sending = asyncio.create_task(sender.send(event()))
    await settle()
    began = now()
    service.connection.only("Partitions/0").set_credit(1)
    service.connection.flush()
    await sending
    assert now() == began
    await transport.aclose()


async def test_full_reads_are_followed_by_the_next(service: Service) -> None:
    """Where a read may not have emptied the socket, the next one follows at once."""
    transport = service.transport()
    _, sink = await reader(transport, EVERY)
    await asyncio.sleep(5)
    for number in range(5):
        await publish(service, count=100, body=bytes(1000))
        assert len(sink.events) == 100 * (number + 1)
    await transport.aclose()


@pytest.mark.parametrize("interval", [0.0, 15.0])
async def test_silent_service_is_found_at_most_an_interval_later(service: Service, interval: float) -> None:
    """The idle time-out begins when something was read last."""
    transport = service.transport()
    _, sink = await reader(transport, interval)
    await asyncio.sleep(5)
    await publish(service)
    service.connection.mute()
    await asyncio.sleep(61 + interval)
    assert len(sink.errors) == 1
    await transport.aclose()


@pytest.mark.parametrize("interval", [0.0, 15.0])
@pytest.mark.parametrize("is_reading", [False, True])
async def test_blocked_loop_is_no_silence_of_the_service(
    service: Service, monkeypatch: pytest.MonkeyPatch, interval: float, is_reading: bool
) -> None:
    """What has come while a handler computed for longer than the idle time-out is read before that is judged."""
    loop, receive = asyncio.get_running_loop(), RecordingSink.messages
    assert isinstance(loop, VirtualTimeLoop)

    def block() -> None:
        service.connection.only("0").send_run([stored_event(b"x")], max_bytes=1 << 30)
        service.connection.flush()
        loop.advance(70)

    def blocks(sink: RecordingSink, batch: list[bytes]) -> None:
        receive(sink, batch)
        if len(sink.events) == 1:
            block()

    if is_reading:
        monkeypatch.setattr(RecordingSink, "messages", blocks)
    transport = service.transport()
    _, sink = await reader(transport, interval)
    await asyncio.sleep(50)
    await publish(service)
    if not is_reading:
        block()
    await asyncio.sleep(interval)
    await settle()
    assert (sink.errors, len(sink.events)) == ([], 2)
    await transport.aclose()


async def test_connection_that_is_lost_while_nothing_is_read_ends(service: Service) -> None:
    """Its timer does nothing any more."""
    transport = service.transport()
    _, sink = await reader(transport, EVERY)
    await asyncio.sleep(5)
    await publish(service)
    service.connection.drop()
    await settle()
    await asyncio.sleep(2 * EVERY)
    assert len(sink.errors) == 1
    await transport.aclose()


class _TimedSink(RecordingSink):
    """A sink that knows which events are due, and notes how long each was left unread."""

    def __init__(self) -> None:
        super().__init__()
        self.due: deque[tuple[bytes, float]] = deque()
        """The events to come, with the times when they have to be here."""
        self.problems: list[str] = []

    def messages(self, batch: list[bytes]) -> None:
        super().messages(batch)
        for raw in batch:
            published, until = self.due.popleft()
            if raw != published or now() > until + 1e-6:
                self.problems.append(f"due at {until}, here at {now()}")

    def blocked(self, seconds: float) -> None:
        """Expect what is to come later, by so much."""
        self.due = deque((raw, until + seconds) for raw, until in self.due)


@seeds(40, of=2000)
async def test_any_history_delivers_each_event_within_the_interval(service: Service, seed: int) -> None:
    """Each event once, in order, and no later than the smallest interval; and nobody waits for what is awaited."""
    rng, loop, transport = random.Random(seed), asyncio.get_running_loop(), service.transport()
    assert isinstance(loop, VirtualTimeLoop)
    readers: dict[str, tuple[ClientReceiveLink, _TimedSink, float]] = {}
    sinks: list[_TimedSink] = []
    sender = await open_sender(transport)

    async def begin() -> None:
        partition_id = next(each for each in map(str, range(9)) if each not in readers)
        interval, sink = rng.choice((0.0, 0.01, 0.5, 0.5, 2.0, 15.0)), _TimedSink()
        sinks.append(sink)
        link, _ = await open_reader(transport, partition_id, sink, delivery_interval=interval)
        link.set_credit(100_000)
        await settle()
        readers[partition_id] = link, sink, interval

    async def end() -> None:
        link, _, _ = readers.pop(rng.choice(list(readers)))
        await link.aclose()

    def publish_some() -> None:
        smallest = min(interval for _, _, interval in readers.values())
        for partition_id in rng.sample(list(readers), rng.randint(1, len(readers))):
            events = [stored_event(bytes(rng.choice((1, 100, 3000)))) for _ in range(rng.choice((1, 1, 2, 30)))]
            sink = readers[partition_id][1]
            sink.due.extend((raw, loop.time() + smallest) for raw in events)
            service.connection.only(partition_id).send_run(events, max_bytes=1 << 30)
        service.connection.flush()

    for _ in range(60):
        awaited: Awaitable[object] | None = None
        match rng.choice(
            ("sleep", "sleep", "publish", "publish", "publish", "send", "ask", "probe", "begin", "end", "block")
        ):
            case "begin" if len(readers) < 5:
                awaited = begin()
            case "end" if readers:
                awaited = end()
            case "publish" if readers:
                publish_some()
            case "probe" if readers:
                awaited = rng.choice(list(readers.values()))[0].probe(5)
            case "block" if readers:
                publish_some()
                blocked = rng.choice((1.0, 70.0))
                loop.advance(blocked)
                for sink in sinks:
                    sink.blocked(blocked)
            case "send":
                awaited = sender.send(event())
            case "ask":
                awaited = transport.get_hub_properties("telemetry")
            case _:
                await asyncio.sleep(rng.choice((0.001, 0.02, 0.3, 1, 20)))
        began = loop.time()
        if awaited is not None:
            await awaited
        if rng.random() < 0.7:
            await settle()
        assert loop.time() == began
    await asyncio.sleep(15)
    await settle()
    for sink in sinks:
        assert (sink.problems, sink.errors) == ([], [])
    assert not any(sink.due for _, sink, _ in readers.values())
    await transport.aclose()
