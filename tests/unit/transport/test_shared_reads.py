"""The service ends something in the same read as an answer: over the emulator, on virtual time."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable

import pytest

from eventpump.consumer.host.host import HubHost
from eventpump.consumer.processor import PartitionContext
from eventpump.consumer.reader.reader import HubReader
from eventpump.emulator.faults import (
    Action,
    CloseConnection,
    DetachLink,
    EndSession,
    Fault,
    LinkRole,
    Performative,
)
from eventpump.emulator.log import PartitionLog
from eventpump.emulator.service import Service
from eventpump.errors import AuthenticationError
from eventpump.eventhubs.events import EventData, ReceivedEvent
from eventpump.options.consumer import HostSettings, ReaderSettings
from eventpump.producer.buffered import HubBufferedProducer
from eventpump.producer.producer import HubProducer
from eventpump.storage.leases.memory import MemoryLeaseStore
from tests.support.fleet import Record, RecordingProcessor
from tests.support.seeds import seeds
from tests.unit.emulator.serving import serve, transport_to

CLOSE, END, DETACH = CloseConnection(answered=True), EndSession(answered=True), DetachLink(answered=True)
_ATTACH, _TRANSFER = Performative.ATTACH, Performative.TRANSFER
ENDS: list[tuple[Action, Performative, LinkRole | None]] = [
    (CLOSE, Performative.OPEN, None),
    (CLOSE, Performative.BEGIN, None),
    (END, Performative.BEGIN, None),
    *((action, on, role) for on in (_ATTACH, _TRANSFER) for action in (CLOSE, END, DETACH) for role in LinkRole),
    *((action, Performative.DETACH, role) for action in (CLOSE, END) for role in LinkRole),
]
"""Every end that can share a read with an answer of the service."""

Phase = Callable[[int], Awaitable[None]]


class _NoTicket:
    """Answers no client."""

    def stored(self) -> None:
        pass

    def failed(self, reason: str) -> None:
        raise AssertionError(reason)


class World:
    """A service and one client of each kind, whose work can be begun, disturbed and checked."""

    def __init__(self, service: Service, seed: int) -> None:
        self.service = service
        self.rng = random.Random(seed)
        self.clients = contextlib.AsyncExitStack()
        self.read: list[int] = []

    def partition(self, partition_id: str = "0") -> PartitionLog:
        """Return what the service stores of a partition."""
        hub = self.service.hub("telemetry")
        assert hub is not None
        partition = hub.partition(partition_id)
        assert partition is not None
        return partition

    def stored(self) -> list[int]:
        """Return the numbers that were sent to the partition."""
        return [int(ReceivedEvent(raw).body) for raw in self.partition().payloads]

    def publish(self, number: int) -> None:
        """Store an event without a connection."""
        self.service.store(self.partition(), [EventData(str(number)).encode()], None, _NoTicket())  # type: ignore[arg-type]  # it has no link

    def add(self, action: Action, on: Performative, role: LinkRole | None, *, after: int = 0) -> Fault:
        """Add a fault."""
        return self.service.faults.add(action, on=on, role=role, after=after)

    def drop(self) -> None:
        """Cut every connection."""
        for connection in list(self.service.connections):
            connection.abort()

    # ----------------------------------------------------------------------------- the clients: one phase each

    def _producer(self, *, idempotent: bool = False) -> HubProducer:
        return HubProducer(transport_to(self.service, self.rng), "telemetry", rng=self.rng, idempotent=idempotent)

    async def sending(self, *, idempotent: bool) -> Phase:
        producer = await self.clients.enter_async_context(self._producer(idempotent=idempotent))

        async def phase(number: int) -> None:
            await producer.send(EventData(str(number)), partition_id="0")
            assert number in self.stored()

        return phase

    async def buffering(self, *, idempotent: bool) -> Phase:
        # Not entered here: its first `send` opens it.
        producer = HubBufferedProducer(self._producer(idempotent=idempotent))
        self.clients.push_async_callback(producer.aclose)

        async def phase(number: int) -> None:
            await producer.send_and_wait(EventData(str(number)), partition_id="0")
            assert number in self.stored()

        return phase

    async def asking(self) -> Phase:
        producer = await self.clients.enter_async_context(self._producer())

        async def phase(number: int) -> None:
            assert await producer.get_partition_ids() == ("0", "1")
            assert (await producer.get_partition_properties("1")).partition_id == "1"

        return phase

    async def reading(self) -> Phase:
        settings = ReaderSettings(hub="telemetry", partition_id="0", consumer_group="second")
        reader = HubReader(lambda: transport_to(self.service, self.rng), settings, rng=self.rng)
        entered = False

        async def phase(number: int) -> None:
            nonlocal entered
            self.publish(number)
            if not entered:
                entered = True
                await self.clients.enter_async_context(reader)
            while number not in self.read:
                self.read += [int(event.body) for event in await reader.read()]

        return phase

    async def relaying(self) -> Phase:
        """Read, and send and ask on the same connection in the very step in which an event has come."""
        transport = transport_to(self.service, self.rng)
        producer = await self.clients.enter_async_context(HubProducer(transport, "telemetry", rng=self.rng))
        settings = ReaderSettings(hub="telemetry", partition_id="0", consumer_group="second")
        reader = HubReader(lambda: transport, settings, rng=self.rng)
        entered = False
        seen: set[int] = set()

        async def phase(number: int) -> None:
            nonlocal entered
            self.publish(number)
            if not entered:
                entered = True
                await self.clients.enter_async_context(reader)
            while number not in seen:
                for event in await reader.read():
                    seen.add(int(event.body))
                    await asyncio.gather(
                        producer.get_partition_properties(self.rng.choice("01")),
                        producer.send(EventData(b"relayed"), partition_id="1"),
                    )

        return phase

    async def hosting(self) -> Phase:
        record = Record()
        handled: dict[int, asyncio.Event] = {}

        async def handle(context: PartitionContext, events: list[ReceivedEvent]) -> None:
            for event in events:
                handled.setdefault(int(event.body), asyncio.Event()).set()

        host = HubHost(
            lambda: transport_to(self.service, self.rng),
            MemoryLeaseStore(),
            HostSettings(hub="telemetry", owner_id="a"),
            RecordingProcessor(record, on_events=handle),  # type: ignore[arg-type]  # it takes any sequence
            rng=self.rng,
        )
        running = asyncio.create_task(host.run())

        async def close() -> None:
            await host.aclose()
            await running

        self.clients.push_async_callback(close)

        async def phase(number: int) -> None:
            self.publish(number)
            waiting = asyncio.ensure_future(handled.setdefault(number, asyncio.Event()).wait())
            await asyncio.wait({waiting, running}, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            if running.done():
                await running
            assert handled[number].is_set()

        return phase


CLIENTS: dict[str, Callable[[World], Awaitable[Phase]]] = {
    "plain": lambda world: world.sending(idempotent=False),
    "idempotent": lambda world: world.sending(idempotent=True),
    "buffered": lambda world: world.buffering(idempotent=False),
    "buffered idempotent": lambda world: world.buffering(idempotent=True),
    "properties": World.asking,
    "reader": World.reading,
    "relay": World.relaying,
    "host": World.hosting,
}


async def _broken(client: str, is_start: bool, action: Action, on: Performative, role: LinkRole | None) -> str | None:
    """Return what goes wrong with a client for one fault; None if nothing does."""
    world = World(await serve(), 1)
    async with world.clients, asyncio.timeout(300):
        phase = await CLIENTS[client](world)
        if not is_start:
            await phase(0)
        world.add(action, on, role)
        world.drop()
        try:
            await phase(1)
            await phase(2)
        except Exception as error:
            return f"{type(action).__name__} at {on.value} of {role}: {error!r}"
        if "idempotent" in client:
            assert world.stored() == ([1, 2] if is_start else [0, 1, 2])
    await world.service.aclose()
    return None


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("is_start", [True, False], ids=["start", "reconnect"])
async def test_client_whose_answer_shares_a_read_with_an_end_goes_on(client: str, is_start: bool) -> None:
    """Whatever ends with whichever answer, at the start or at a reconnect: no caller gets an error, nothing is lost."""
    broken = [await _broken(client, is_start, *each) for each in ENDS]
    assert [each for each in broken if each is not None] == []


@seeds(4, of=60)
async def test_clients_under_random_ends_with_answers_lose_nothing(seed: int) -> None:
    """All clients at once, ends with answers and lost connections at random: each event arrives, once if idempotent."""
    world = World(await serve(), seed)
    rng = random.Random(seed)
    async with world.clients, asyncio.timeout(600):
        phases = {name: await make(world) for name, make in CLIENTS.items()}

        async def work(name: str, offset: int) -> None:
            for number in range(20):
                await asyncio.sleep(rng.choice([0.0, 1.0, 10.0]))
                await phases[name](offset + number)

        async def disturb() -> None:
            while True:
                await asyncio.sleep(rng.uniform(0, 20))
                world.add(*rng.choice(ENDS), after=rng.randrange(4))
                if rng.random() < 0.3:
                    world.drop()

        disturbing = asyncio.create_task(disturb())
        try:
            await asyncio.gather(*(work(name, 1000 * at) for at, name in enumerate(phases)))
        finally:
            disturbing.cancel()
    await world.service.aclose()
    stored = world.stored()
    assert world.read == stored[: len(world.read)]
    for at, name in enumerate(CLIENTS):
        own = [number for number in stored if number // 1000 == at]
        if "idempotent" in name:
            assert own == list(range(1000 * at, 1000 * at + 20)), name


@pytest.mark.parametrize("action", [CloseConnection, EndSession])
async def test_end_with_the_answer_to_a_begin_is_raised_with_its_condition(
    action: type[CloseConnection | EndSession],
) -> None:
    """What the service says at the end is what the caller gets, not that something is closed here."""
    service = await serve()
    transport = transport_to(service, random.Random(1))
    service.faults.add(action("amqp:unauthorized-access", "Go away.", answered=True), on=Performative.BEGIN)
    with pytest.raises(AuthenticationError, match="Go away"):
        await transport.get_hub_properties("telemetry")
    await transport.aclose()
    await service.aclose()
