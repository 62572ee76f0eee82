"""Histories of what several hosts share: a store, of two hubs; and in one process the objects that make a host.

Two hubs on one store (memory, a file): what must hold in every history of hosts holds of the hosts of each hub, as if
the others were not there. The hosts of both have the same names in half of the histories, and the hubs the same name in
two namespaces.

Two hosts in one process share their processor, their balancer, and in some histories a store object:

* Of two hosts that are given one store object the first one has it. The other one ends with a `ConfigurationError` that
  says so, before it has opened a link; once the first one has closed it, with a `ClosedError`. Neither this nor its
  `aclose` closes the store of the first, which goes on.
* Whichever of them leaves, the other one goes on with processor and balancer, and nothing is lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from eventpump.errors import ClosedError, ConfigurationError, ConnectionLostError
from eventpump.testing.transport import FakeHub
from tests.faults.histories.consumer import PROFILES as CONSUMER_PROFILES
from tests.faults.histories.consumer import ConsumerHistory, HistoryHost, Profile, on_file
from tests.faults.histories.keyed import KeyedHistory
from tests.faults.histories.stores import HistoryStore
from tests.faults.histories.world import Life, World, own_paces

_FLEET = CONSUMER_PROFILES["fleet"].actions

HUBS: dict[str, Profile] = {
    "memory": Profile(
        {**_FLEET, "detach": 0.5, "retention": 0.3, "trouble store": 0.3, "heal": 1.0},
        starts={"earliest": 3.0, "latest": 1.0},
    ),
    "sqlite": Profile(
        {**_FLEET, "detach": 0.5, "retention": 0.3, "trouble store": 0.3, "heal": 1.0, "clock step": 0.2},
        starts={"earliest": 3.0, "latest": 1.0},
    ),
}

SHARED: dict[str, Profile] = {
    name: Profile(
        {"join": 1.0, "sibling": 2.0, "borrow": 2.0, "borrow at once": 0.7, "leave": 1.5, "crash": 1.0, "detach": 0.5},
        {"quick": 6.0, "slow": 3.0, "raise": 0.5},
        {"none": 1.0, "end": 1.0},
        hosts=5,
        balancers=0,
    )
    for name in ("plain", "keyed")
}


class _HubHistory(ConsumerHistory):
    """The part of a history that one of two hubs has."""

    def __init__(self, name: str, namespace: str, *args: Any) -> None:
        self._hub_name, self._namespace = name, namespace
        super().__init__(*args)

    def make_hub(self, partitions: int, latency: float) -> FakeHub:
        return FakeHub(self._hub_name, partitions, latency=latency, fully_qualified_namespace=self._namespace)


async def hubs_history(world: World, size: int) -> None:
    """Live one history of two hubs on one store. Its profile is the part of its kind behind "hubs:"."""
    name = world.kind.partition(":")[2]
    profile = HUBS[name]
    world.note("profile", name)
    with on_file(world, is_wanted=name == "sqlite", chance=1.0) as directory, own_paces():
        other = world.rng.choice((("orders", "fake.servicebus.windows.net"), ("telemetry", "other.example.net")))
        parts = [
            _HubHistory(*names, world, profile, directory)
            for names in (("telemetry", "fake.servicebus.windows.net"), other)
        ]
        first, second = parts
        second.leases, second.clock = first.leases, first.clock
        if world.rng.random() < 0.5:
            second.prefix = "g"
        await asyncio.gather(*(part.run(size // 2) for part in parts))


class _Sharing(ConsumerHistory):
    """One history of hosts that share a process, and what was made for them."""

    def __init__(self, world: World, profile: Profile, directory: Path | None) -> None:
        super().__init__(world, profile, directory)
        self._processors: dict[Life, Any] = {}
        self._stores: dict[str, HistoryStore] = {}
        self._borrowed: dict[str, Callable[[], bool]] = {}
        """By the name of a host that was given another one's store: returns whether that one's has been closed."""
        self._pairs: list[tuple[HistoryHost, HistoryHost]] = []
        """Hosts that were given one store at the same time."""

    def processor(self, life: Life) -> Any:
        if life not in self._processors:
            self._processors[life] = super().processor(life)
        return self._processors[life]

    def _start_host(self, life: Life, name: str, store: HistoryStore) -> HistoryHost:
        self._stores[name] = store
        return super()._start_host(life, name, store)

    def _another_name(self, life: Life) -> str:
        self._names += 1
        return f"{life.name}+{self._names}"

    async def sibling(self) -> None:
        """Start another host in a process, with a store of its own."""
        if self._living and len(self._living) < self.profile.hosts:
            life = self.world.rng.choice(self._living).life
            self._start_host(life, self._another_name(life), self._store_of(life))

    async def borrow(self) -> None:
        """Start a host with the store of one that has opened it: it is refused. Some are closed at once."""
        rng = self.world.rng
        lenders = [each for each in self.hosts if each.life.is_running and each.was_attached]
        if lenders:
            lender = rng.choice(lenders)
            name = self._another_name(lender.life)
            self.world.note("borrows", name, "the store of", lender.host.owner_id)
            self._borrowed[name] = lambda: lender.host.is_closed
            borrower = self._start_host(lender.life, name, self._stores[lender.host.owner_id])
            if rng.random() < 0.3:
                self._begin_to_leave(borrower)

    async def borrow_at_once(self) -> None:
        """Start two hosts with one store: one of them is refused."""
        if len(self._living) + 1 < self.profile.hosts:
            self._names += 1
            life = self.world.life(f"{self.prefix}{self._names}")
            store = self._store_of(life)
            first, second = (self._start_host(life, name, store) for name in (life.name, self._another_name(life)))
            self._pairs.append((first, second))

    async def crash(self) -> None:
        await super().crash()
        for host in self.hosts:
            if host.life.is_dead:
                host.transport.lose(ConnectionLostError("the process was killed"))

    def _ended(self, host: HistoryHost, run: asyncio.Task[None]) -> None:
        error = None if run.cancelled() else run.exception()
        name = host.host.owner_id
        is_refused = isinstance(error, ConfigurationError) and "another host uses this store" in str(error)
        if name in self._borrowed:
            was_closed = self._borrowed[name]()
            if host.transport.links:
                self.world.violate(f"{name} opened a link with the store of another host")
            if not (is_refused or (was_closed and isinstance(error, ClosedError)) or host.is_leaving):
                self.world.violate(f"{name} was given the store of another host, and ended with {error!r}")
            host.is_leaving = True
        elif is_refused:
            pair = next((pair for pair in self._pairs if host in pair), ())
            if any(other.is_leaving for other in pair) or not pair:
                self.world.violate(f"{name} is refused, and no other host has its store")
            host.is_leaving = True
        super()._ended(host, run)

    async def _end_faults(self) -> None:
        await super()._end_faults()
        await self.world.sleep(1.0)
        for name in self._borrowed:
            host = next(each for each in self.hosts if each.host.owner_id == name)
            if host.life.is_running and host.run is not None and not host.run.done():
                self.world.violate(f"{name} was given the store of another host, and runs")


class _KeyedSharing(_Sharing, KeyedHistory):
    """The same with a keyed processor."""


async def shared_history(world: World, size: int) -> None:
    """Live one history of hosts in one process. Its profile is the part of its kind behind "shared:"."""
    name = world.kind.partition(":")[2]
    world.note("profile", name)
    with on_file(world, is_wanted=True) as directory:
        kind = _KeyedSharing if name == "keyed" else _Sharing
        await kind(world, SHARED[name], directory).run(size)
