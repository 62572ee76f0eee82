"""Hosts that begin at "@latest" on a hub that is cut off, grown and recreated: random histories on virtual time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

from eventpump.consumer.processor import EventProcessor, PartitionContext
from eventpump.errors import ConnectionLostError, ServiceTimeoutError
from eventpump.eventhubs.events import ReceivedEvent
from eventpump.testing.transport import FakeHub
from tests.support.fleet import Fleet
from tests.support.seeds import seeds

STORE = ("list", "acquire", "steal", "read", "write", "reset", "scope", "record", "ensure")


class _Bodies(EventProcessor):
    """Notes what it processed, and checkpoints now and then."""

    def __init__(self, rng: random.Random) -> None:
        self.seen: set[str] = set()
        self._rng = rng

    async def process_events(self, context: PartitionContext, events: Sequence[ReceivedEvent]) -> None:
        await asyncio.sleep(self._rng.choice([0, 0, 0.5, 3]))
        self.seen.update(event.body_as_str() for event in events)
        if self._rng.random() < 0.5:
            await context.checkpoint(events[-1])


class _History:
    """One history: what was sent since the partitions of the group were first opened, per life of the hub."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.fleet = Fleet(FakeHub(partitions=3), seed=seed)
        self.processor = _Bodies(self.rng)
        self.sent: set[str] = set()
        self.alive: list[str] = []
        self._hosts = 0
        self._events = 0

    async def start(self) -> None:
        name = f"h{self._hosts}"
        self._hosts += 1
        self.alive.append(name)
        await self.fleet.start(name, self.processor, initial_position="@latest", on_data_loss="earliest")

    def publish(self) -> None:
        partition_id = self.rng.choice(self.fleet.hub.partition_ids)
        bodies = [f"{partition_id}/{self._events + index}" for index in range(self.rng.randint(1, 8))]
        self._events += len(bodies)
        self.fleet.hub.publish(partition_id, *bodies)
        self.sent.update(bodies)

    async def step(self) -> None:
        rng, hub = self.rng, self.fleet.hub
        match rng.randrange(12):
            case 0 | 1:
                hub.lose_connections()
            case 2:
                hub.detach(rng.choice(hub.partition_ids))
            case 3 if len(self.alive) < 3:
                await self.start()
            case 4 if self.alive:
                await self.fleet.hosts[self.alive.pop(rng.randrange(len(self.alive)))].aclose()
            case 5 if self.alive:
                # Dead at once: nothing of it reaches the store any more.
                name = self.alive.pop(rng.randrange(len(self.alive)))
                for operation in (*STORE, "renew", "release"):
                    self.fleet.stores[name].fail(operation, times=float("inf"))
                self.fleet.runs[name].cancel()
            case 6 if len(hub.partition_ids) < 6:
                hub.add_partitions(1)
            case 7 if rng.random() < 0.5:
                hub.recreate()
                self.sent.clear()
            case 8:
                hub.refuse(ServiceTimeoutError("away"), operation=rng.choice(["hub", "partition"]), times=2)
            case 9:
                hub.refuse(ConnectionLostError("away"), times=3)
            case _ if self.alive:
                store = self.fleet.stores[rng.choice(self.alive)]
                store.fail(rng.choice(STORE), times=rng.randint(1, 3), is_after=rng.random() < 0.5)
        for _ in range(rng.randint(0, 3)):
            self.publish()
        await asyncio.sleep(rng.choice([0, 0.001, 0.1, 1, 8, 40]))

    async def run(self) -> None:
        async with self.fleet as fleet:
            await self.start()
            await asyncio.sleep(10)
            for _ in range(40):
                await self.step()
            if not self.alive:
                await self.start()
            fleet.hub.accept()
            for store in fleet.stores.values():
                store.heal()
            await asyncio.sleep(200)
            assert self.sent - self.processor.seen == set()
            assert fleet.leases.scope_record(fleet.scope).hub_created_at == fleet.hub.created_at
            assert all(spec.position.offset != "@latest" for spec in fleet.hub.attached)


@seeds(4, of=300)
async def test_hosts_process_what_is_sent_to_a_started_hub_in_random_histories(seed: int) -> None:
    """Whatever links, hosts, stores and management do: once opened, a partition loses nothing but what its hub lost."""
    await _History(seed).run()
