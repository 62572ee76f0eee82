"""Histories of hosts: they join, leave, die and freeze, with a hub, a store and user code that do what they should not.

What must hold: everything stored in the hub from the start on is processed at least once when the faults have ended, or
its loss was reported; `stored <= ok` at every moment; order, and one host, per epoch; no host ends by itself; no lease
is renewed for long without a pump; every partition flows again in time after the last fault.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eventpump.consumer.host.host import HubHost
from eventpump.core.balancer import LeasePlan
from eventpump.core.balancers import FairBalancer, GreedyBalancer, RingBalancer, StaticAssignment
from eventpump.core.checkpoint import CheckpointPolicy
from eventpump.core.fleet import FleetView, PartitionBalancer
from eventpump.errors import ConnectionLostError, EventPumpError
from eventpump.eventhubs.conditions import CONDITIONS, error_for
from eventpump.eventhubs.events import EventPosition
from eventpump.interfaces import ConsumerScope
from eventpump.options.consumer import HostSettings
from eventpump.reports import CheckpointWritten, HostReport, PumpStarted
from eventpump.storage.leases.memory import MemoryLeases, MemoryLeaseStore
from eventpump.storage.leases.sqlite import SqliteLeaseStore
from eventpump.storage.scope_form import SubscriptionRecord
from eventpump.testing.transport import FakeHub
from tests.faults.histories.ledger import Ledger, Start
from tests.faults.histories.manners import Manners, UnrulyProcessor
from tests.faults.histories.stores import HistoryStore, SteppedClock, Trouble, sqlite_inline
from tests.faults.histories.world import Life, LifeTransport, Violation, World

LEASE_DURATION = 30.0
RECOVERY = 300.0
"""Seconds after the last fault within which everything is processed. Two back-offs at their longest (the connection's
and the link's, 30 s each), a lease that must run out, and the pumps barred for another."""
ORPHAN = 4 * LEASE_DURATION
"""Seconds a lease may be held by a host that has no pump for it: it is released within a few tries, or runs out."""
CLOSING = 60.0
"""Seconds a host may take to close once nothing is in its way; its time to close is 20."""

_CANCELLING = {"handler_timeout": 20.0, "on_handler_timeout": "cancel"}
# Conditions a running link can end with, or an attach be refused with. Not those of a reader that was stolen: only
# another reader brings these about.
DETACHES = sorted(each for each in CONDITIONS if "stolen" not in each and "out-of-order" not in each)
REFUSALS = [
    "com.microsoft:entity-disabled", "amqp:not-allowed", "com.microsoft:precondition-failed", "amqp:not-found",
    "amqp:unauthorized-access", "amqp:resource-limit-exceeded", "com.microsoft:server-busy", "amqp:internal-error",
]  # fmt: skip

_USER = {
    "quick": 8.0, "slow": 2.0, "raise": 3.0, "raise late": 2.0, "hang": 0.3, "deaf": 0.1, "cancelled future": 0.5,
    "cancel own task": 0.3, "base": 0.3, "generator exit": 0.3,
}  # fmt: skip
_CHECKPOINTS = {"none": 4.0, "end": 2.0, "middle": 1.0, "begin": 0.5, "left over": 1.0}
_FLEET = {"join": 2.0, "leave": 1.0, "crash": 1.5, "freeze": 1.0, "wake": 2.0}
_NETWORK = {"detach": 3.0, "cut": 2.0, "refuse": 1.5, "accept": 3.0, "stall": 1.0, "resume": 2.0}
_STORE = {"trouble store": 2.0, "heal": 2.0, "clock step": 0.5}


class UnrulyBalancer:
    """A balancer of the user's that raises or plans nonsense now and then, and else is fair."""

    def __init__(self) -> None:
        self._fair = FairBalancer()

    def plan(self, view: FleetView) -> LeasePlan:
        """Plan, or do harm."""
        ids = [lease.partition_id for lease in view.leases]
        match view.rng.choice(("raise", "base", "cancel", "none", "all", "twice", *["fair"] * 8)):
            case "raise":
                raise ValueError("at random")
            case "base":
                raise BalancerError("at random")
            case "cancel":
                raise asyncio.CancelledError
            case "none":
                return None  # type: ignore[return-value]  # nonsense on purpose
            case "all":
                return LeasePlan((*ids, "no such"), view.leases, view.leases, tuple(ids))
            case "twice":
                return LeasePlan(acquire=tuple(ids * 2), steal=view.leases[:1] * 2)
        return self._fair.plan(view)


class BalancerError(BaseException):
    """An exception that is no `Exception`."""


BALANCERS: tuple[Callable[[], PartitionBalancer], ...] = (
    lambda: FairBalancer(maturity=40.0),
    UnrulyBalancer,
    lambda: RingBalancer(patience=20.0),
    GreedyBalancer,
    FairBalancer,
    lambda: StaticAssignment(ordinal=0, of=1),
    lambda: FairBalancer(maturity=15.0),
    lambda: RingBalancer(virtual_nodes=4, patience=10.0),
)
"""Of the hosts of a history, by its seed."""


@dataclass(frozen=True)
class Profile:
    """A kind of consumer history: weights of what happens, and how user code may behave.

    Args:
        actions: Weights beside those of publishing and waiting.
        works: Of user code; see `Manners`.
        hosts: The most at a time.
        starts: Where a partition without a checkpoint may begin, by weight.
        is_asking: Whether user code asks for checkpoints from everywhere, too.
        compute: Seconds that a computing call blocks the loop for, at most.
        partitions: The fewest and the most at the start.
        backlog: The fewest and the most events of a partition at the start.
        balancers: Where the seed's balancer is counted from; None for the default's in every history.
    """

    actions: Mapping[str, float]
    works: Mapping[str, float] = field(default_factory=lambda: {"quick": 6.0, "slow": 2.0, "raise": 0.5})
    checkpoints: Mapping[str, float] = field(default_factory=lambda: {"none": 1.0, "end": 2.0})
    hosts: int = 3
    starts: Mapping[str, float] = field(default_factory=lambda: {"earliest": 1.0})
    is_asking: bool = False
    compute: float = 1.0
    partitions: tuple[int, int] = (1, 4)
    backlog: tuple[int, int] = (0, 30)
    balancers: int | None = None


PROFILES: dict[str, Profile] = {
    "asks": Profile(
        {"leave": 2.0, "join": 2.0, "crash": 0.5, "detach": 1.0},
        {"quick": 5.0, "slow": 3.0, "raise": 4.0, "raise late": 2.0, "hang": 0.3},
        _CHECKPOINTS,
        is_asking=True,
    ),
    "unruly": Profile({"leave": 1.0, "join": 1.0}, _USER, {"none": 1.0, "end": 3.0}, hosts=2),
    "stuck": Profile({"leave": 0.5, "join": 1.0, "detach": 0.5}, {"quick": 8.0, "raise": 1.0, "stuck": 0.7}, hosts=2),
    "fleet": Profile({**_FLEET, "detach": 0.5}, balancers=0),
    "network": Profile({**_NETWORK, "join": 0.7, "leave": 0.5, "crash": 0.3}),
    "silence": Profile({"silence": 3.0, "detach": 1.0, "join": 0.5, "leave": 0.5}),
    "store": Profile({**_STORE, "join": 0.7, "leave": 0.7, "crash": 0.3}),
    "silent-connection": Profile({"silence connection": 1.0, "join": 0.5, "leave": 0.5}),
    "starts": Profile(
        {"detach": 2.0, "cut": 1.0, "join": 1.0, "leave": 1.0, "crash": 0.5, "add partition": 0.7},
        starts={"latest": 4.0, "time": 1.0},
    ),
    "hubs": Profile(
        {"retention": 2.0, "make again": 0.4, "detach": 0.5, "join": 1.0, "leave": 1.5, "crash": 0.5},
        starts={"earliest": 3.0, "latest": 1.0},
    ),
    "compute": Profile(
        {}, {"compute": 1.0}, {"none": 1.0}, hosts=1, compute=1.5, partitions=(8, 16), backlog=(100, 150)
    ),
    "all": Profile(
        {**_FLEET, **_NETWORK, **_STORE, "add partition": 0.2, "retention": 0.2},
        _USER,
        _CHECKPOINTS,
        is_asking=True,
        starts={"earliest": 2.0, "latest": 1.0},
        balancers=3,
    ),
}


@dataclass
class HistoryHost:
    """One life of a host."""

    life: Life
    host: HubHost
    transport: LifeTransport
    began: float
    run: asyncio.Task[None] | None = None
    closing: asyncio.Task[None] | None = None
    is_leaving: bool = False
    was_attached: bool = False
    was_frozen: bool = False
    orphans: dict[str, float] = field(default_factory=dict)
    """Partitions whose lease it holds without a pump, with the moment since when."""


class ConsumerHistory:
    """One history."""

    def __init__(self, world: World, profile: Profile, directory: Path | None) -> None:
        self.world = world
        self.profile = profile
        rng = world.rng
        self.hub = self.make_hub(rng.randint(*profile.partitions), rng.choice((0.0, 0.0, 0.01, 0.3)))
        self.start = Start(world.chosen(profile.starts))  # type: ignore[arg-type]  # the profile's keys are such
        self.ledger = Ledger(world, self.hub, self.start)
        self.hosts: list[HistoryHost] = []
        self.leases = MemoryLeases()
        self.directory = directory
        self.clock = SteppedClock(world)
        self.trouble = Trouble()
        self.is_refusing = False
        self.is_stalling = False
        self.had_trouble_at = -1e9
        self._names = 0
        self.prefix = "h"
        """Begins the names of hosts."""
        self.manners = Manners(
            profile.works,
            profile.checkpoints,
            asks_in_close=profile.is_asking and rng.random() < 0.7,
            asks_in_error=profile.is_asking and rng.random() < 0.5,
            asks_by_timer=profile.is_asking and rng.random() < 0.5,
            compute=profile.compute,
        )
        policies = [
            CheckpointPolicy(every_events=rng.randint(1, 20)),
            CheckpointPolicy(every_seconds=rng.uniform(1, 9)),
        ]
        self.options: dict[str, Any] = {
            "hub": self.hub.name,
            "max_batch_size": rng.randint(1, 20),
            "prefetch_events": rng.choice((20, 100, 1000)),
            "checkpoint_policy": rng.choice([*policies, CheckpointPolicy(on_close=True), CheckpointPolicy.manual()]),
            "initial_position": self._position(),
            "failure_policy": "retry",
            "delivery_interval": world.interval(),
            # If the hub is recreated, the new one is read from its beginning; by default its reading stops.
            # Only user code that does not return of itself is helped by it; elsewhere it would hide other ends of it.
            **(_CANCELLING if "stuck" in profile.works and "handler_timeout" in HostSettings.model_fields else {}),
            **({"on_data_loss": "earliest"} if "on_data_loss" in HostSettings.model_fields else {}),
        }
        if profile.balancers is not None:
            self.options["balancer"] = BALANCERS[(world.seed + profile.balancers) % len(BALANCERS)]()
        policy = self.options["checkpoint_policy"]
        world.note(
            "begins", f"{len(self.hub.partition_ids)} partitions, start {self.start.kind}, {policy},",
            f"store {'memory' if directory is None else 'sqlite'}, {self.manners}",
        )  # fmt: skip

    def make_hub(self, partitions: int, latency: float) -> FakeHub:
        """Make the hub."""
        return FakeHub(partitions=partitions, latency=latency)

    def _position(self) -> EventPosition:
        match self.start.kind:
            case "earliest":
                return EventPosition.earliest()
            case "latest":
                return EventPosition.latest()
            case "time":
                return EventPosition.at_enqueued_time(self.hub.now(), inclusive=True)

    # ------------------------------------------------------------------------------------------------ its course

    async def run(self, size: int) -> None:
        """Live through `size` steps of trouble, end it, and check.

        Raises:
            Violation: A promise did not hold.
        """
        world = self.world
        watching = world.loop.create_task(self._watch(), name="watch")
        actions: dict[str, float] = {"publish": 5.0, **self.profile.actions}
        if self.start.kind == "earliest":
            for partition_id in self.hub.partition_ids:
                self.ledger.published(partition_id, world.rng.randint(*self.profile.backlog))
        await self.join()
        # Some histories begin to be hard at once, most while everything runs.
        await world.sleep(world.rng.choice((0.0, 2.0, 20.0)))
        for _ in range(size):
            await world.sleep(world.rng.expovariate(1.0) * world.rng.choice((0.05, 0.5, 3.0, 15.0)))
            await self.act(world.chosen(actions))
        await self._end()
        watching.cancel()

    async def act(self, action: str) -> None:
        """Do one thing."""
        await getattr(self, action.replace(" ", "_"))()

    async def _end_faults(self) -> None:
        self.world.note("the faults end")
        await self.heal()
        await self.accept()
        await self.resume()
        for host in self.hosts:
            if host.life.is_frozen and not host.life.is_dead:
                host.life.wake(self.world.loop)
        self.manners.is_good.set()

    async def _end(self) -> None:
        """End every fault, and check what must then hold."""
        world, ledger = self.world, self.ledger
        await self._end_faults()
        if not self._living:
            await self.join()
        for partition_id in self.hub.partition_ids:
            # A place whose reading has not begun requires nothing yet: all are read first.
            ledger.published(partition_id, 3)
        await world.until(
            lambda: not ledger.unprocessed() and set(self.hub.partition_ids) <= ledger.pinned, self._patience()
        )
        for partition_id in self.hub.partition_ids:
            ledger.published(partition_id, 3)
        await world.until(lambda: not ledger.unprocessed(), RECOVERY)
        ledger.check_end()
        if world.violation is None:
            for host in self._living:
                await self._close(host)
            ledger.check_end()
        if world.violation is not None:
            raise Violation(world.violation)

    def _patience(self) -> float:
        """Return the seconds within which everything is processed: where handlers compute, twice what that takes."""
        left = sum(map(len, self.ledger.unprocessed().values()))
        is_computing = "compute" in self.profile.works
        batches = left / self.options["max_batch_size"] + 2 * len(self.hub.partition_ids)
        return RECOVERY + (2 * batches * self.profile.compute if is_computing else 0.0)

    async def _close(self, host: HistoryHost) -> None:
        self._begin_to_leave(host)
        if not await self.world.until(lambda: host.run is not None and host.run.done(), CLOSING):
            self.world.violate(f"{host.life.name} is not closed after {CLOSING} s")

    async def _watch(self) -> None:
        """Look after the hosts as they run."""
        while True:
            await asyncio.sleep(5.0)
            for host in self._living:
                self._look_for_orphans(host)

    def _look_for_orphans(self, host: HistoryHost) -> None:
        """Check that a host has a pump for every lease that it keeps."""
        now = self.world.loop.time()
        pumped = {status.partition_id for status in host.host.partitions}
        held = {each for each, owner in self._owners().items() if owner == host.host.owner_id} - pumped
        host.orphans = {each: host.orphans.get(each, now) for each in sorted(held)}
        for partition_id, since in host.orphans.items():
            if now - since > ORPHAN:
                text = (
                    f"partition {partition_id}: {host.life.name} holds its lease without a pump for {now - since:.0f} s"
                )
                self.world.violate(text)

    def _owners(self) -> dict[str, str | None]:
        """Return the owner of every lease that is held now; of leases in memory only."""
        scope = ConsumerScope(self.hub.fully_qualified_namespace.lower(), self.hub.name.lower(), "$default")
        now = self.world.loop.time()
        rows = self.leases.leases(scope)
        return {each: row.owner for each, row in rows.items() if row.token is not None and now < row.expires_at}

    # ---------------------------------------------------------------------------------------------------- hosts

    @property
    def _living(self) -> list[HistoryHost]:
        """Hosts that run and are not about to leave."""
        return [host for host in self.hosts if host.life.is_running and not host.is_leaving]

    async def join(self) -> None:
        if len(self._living) >= self.profile.hosts:
            return
        self._names += 1
        life = self.world.life(f"{self.prefix}{self._names}")
        self._start_host(life, life.name, self._store_of(life))

    def _store_of(self, life: Life) -> HistoryStore:
        """Make the store of a host."""
        return HistoryStore(
            self.world, life, self._store(), lambda: self.trouble, ledger_of=self.ledger_of, recorded=self.recorded
        )

    def _start_host(self, life: Life, name: str, store: HistoryStore) -> HistoryHost:
        """Start a host in a process."""
        world, transport = self.world, LifeTransport(self.hub, life)
        host = HubHost(
            lambda: transport,
            store,
            HostSettings(**{**self.options, "owner_id": name}),
            self.processor(life),
            hooks=[lambda report: self._reported(joined, report)],
            rng=world.stream(f"host {name}"),
        )
        joined = HistoryHost(life, host, transport, world.loop.time())
        self.hosts.append(joined)
        world.note("join", name)
        joined.run = world.spawn(life, self.work_of(joined), f"host {name}")
        joined.run.add_done_callback(lambda run: self._ended(joined, run))
        return joined

    def processor(self, life: Life) -> UnrulyProcessor | None:
        """Make the processor of a host itself."""
        return UnrulyProcessor(self.world, life, self.ledger, self.manners)

    async def work_of(self, host: HistoryHost) -> None:
        """Run a host."""
        await host.host.run()

    def ledger_of(self, key: str) -> Ledger:
        """Return the ledger of a subscription, by the name under which the store keeps its checkpoints."""
        return self.ledger

    def recorded(self, record: SubscriptionRecord | None, before: SubscriptionRecord | None) -> None:
        """Take down that the record of a subscription was stored, or deleted where it is None."""

    @property
    def ledgers(self) -> list[Ledger]:
        """The ledgers of all subscriptions."""
        return [self.ledger]

    def _store(self) -> MemoryLeaseStore | SqliteLeaseStore:
        if self.directory is None:
            return MemoryLeaseStore(self.leases, lease_duration=LEASE_DURATION)
        return SqliteLeaseStore(self.directory / "leases.db", lease_duration=LEASE_DURATION, clock=self.clock)

    async def leave(self) -> None:
        if self._living:
            host = self.world.rng.choice(self._living)
            self.world.note("leave", host.life.name)
            self._begin_to_leave(host)

    def _begin_to_leave(self, host: HistoryHost) -> None:
        host.is_leaving = True
        host.closing = self.world.spawn(host.life, host.host.aclose(), f"close {host.life.name}")

    async def crash(self) -> None:
        candidates = [
            host for host in self.hosts if host.run is not None and not host.run.done() and not host.life.is_dead
        ]
        if candidates:
            host = self.world.rng.choice(candidates)
            self.world.note("crash", host.life.name)
            host.life.kill()
            host.transport.lose(ConnectionLostError("the process was killed"))

    async def freeze(self) -> None:
        if self._living:
            host = self.world.rng.choice(self._living)
            self.world.note("freeze", host.life.name)
            host.life.freeze()
            host.was_frozen = True
            if self.world.rng.random() < 0.5:
                # The service gives the connection of a frozen process up after a while.
                host.transport.lose(ConnectionLostError("idle for too long"))

    async def wake(self) -> None:
        frozen = [host for host in self.hosts if host.life.is_frozen and not host.life.is_dead]
        if frozen:
            host = self.world.rng.choice(frozen)
            self.world.note("wake", host.life.name)
            host.life.wake(self.world.loop)

    def _reported(self, host: HistoryHost, report: HostReport) -> None:
        if not isinstance(report, CheckpointWritten):
            self.world.note("report", host.life.name, report.partition_id or "", report.describe()[:160])
        if isinstance(report, PumpStarted):
            assert report.partition_id is not None
            host.was_attached = True
            self._started(report.subscription, report.partition_id)
        self._loss_reported(report)

    def _started(self, subscription: str | None, partition_id: str) -> None:
        """Take down that a host begins to read a partition."""
        self.ledger.started(partition_id)

    def _loss_reported(self, report: Any) -> None:
        """Take down a report of lost events: it is known by its name, for bases that have none."""
        if type(report).__name__ != "DataLost":
            return
        loss = report.loss
        if loss.kind.name == "RETENTION":
            self.ledger.lost(report.partition_id, loss.first_missing, loss.last_missing)
        else:
            self.ledger.hub_loss_reported(report.partition_id)

    def _ended(self, host: HistoryHost, run: asyncio.Task[None]) -> None:
        """Check that a host that ended was to."""
        error = asyncio.CancelledError() if run.cancelled() else run.exception()
        self.world.note("ended", host.life.name, repr(error))
        if host.is_leaving or host.life.is_dead or self.world.violation is not None:
            return
        age = self.world.loop.time() - host.began
        was_hard = (
            self.is_refusing
            or self.trouble != Trouble()
            or (self.world.loop.time() - self.had_trouble_at < 120.0 and age < 120.0)
        )
        if isinstance(error, EventPumpError) and (was_hard or host.was_frozen) and not host.was_attached:
            host.is_leaving = True  # it could not begin within its start-up time
            return
        self.world.violate(f"{host.life.name} ended by itself after {age:.0f} s: {error!r}")

    # ------------------------------------------------------------------------------------------------------ hub

    async def publish(self) -> None:
        rng = self.world.rng
        partition_id, count = rng.choice(self.hub.partition_ids), rng.choice((1, 1, 3, 10, 40))
        self.world.note("publish", partition_id, f"{count} from {self.ledger.end(partition_id)}")
        self.ledger.published(partition_id, count)

    async def detach(self) -> None:
        rng = self.world.rng
        partition_id = rng.choice((None, *self.hub.partition_ids))
        # Those that mean "give up" end a feed for a lease; the ordinary ones are the frequent ones.
        condition = rng.choice(["amqp:link:detach-forced", "amqp:internal-error", rng.choice(DETACHES)])
        self.world.note("detach", partition_id or "all", condition)
        self.hub.detach(partition_id, error_for(condition, "by the history"))

    async def cut(self) -> None:
        hosts = [host for host in self.hosts if host.run is not None and not host.run.done()]
        if hosts:
            host = self.world.rng.choice(hosts)
            self.world.note("cut", host.life.name)
            host.transport.lose(ConnectionLostError("cut by the history"))

    async def refuse(self) -> None:
        rng = self.world.rng
        partition_id = rng.choice((None, *self.hub.partition_ids))
        operation, condition = rng.choice(("receive", "receive", "hub", "partition")), rng.choice(REFUSALS)
        self.world.note("refuse", operation, partition_id or "all", condition)
        self.is_refusing = True
        self.had_trouble_at = self.world.loop.time()
        self.hub.refuse(
            error_for(condition, "by the history"), operation=operation, partition_id=partition_id, times=float("inf")
        )
        if rng.random() < 0.7:
            # What is refused is seen only by who asks.
            self.hub.detach(partition_id)

    async def accept(self) -> None:
        if self.is_refusing:
            self.world.note("accept")
            self.had_trouble_at = self.world.loop.time()
        self.is_refusing = False
        self.hub.accept()

    async def stall(self) -> None:
        partition_id = self.world.rng.choice((None, *self.hub.partition_ids))
        self.world.note("stall", partition_id or "all")
        self.is_stalling = True
        self.hub.stall(partition_id)

    async def resume(self) -> None:
        if self.is_stalling:
            self.world.note("resume")
            self.is_stalling = False
            self.hub.resume()

    async def silence(self) -> None:
        """Let the links there are now be open and silent forever; nothing but another link mends that."""
        rng = self.world.rng
        self._silence(rng.choice((None, *self.hub.partition_ids)), "reopened", answers_echo=rng.random() < 0.5)

    async def silence_connection(self) -> None:
        """Let links be silent forever that are attached over the connections there are now, later ones too."""
        self._silence(None, "reconnected", answers_echo=self.world.rng.random() < 0.5)

    def _silence(self, partition_id: str | None, until: str, *, answers_echo: bool) -> None:
        self.world.note("silence", partition_id or "all", until, "probes are answered" if answers_echo else "")
        if "until" in inspect.signature(self.hub.stall).parameters:
            stall: Any = self.hub.stall
            stall(partition_id, until=until, answers_echo=answers_echo)
            return
        for each in self.hub.partition_ids if partition_id is None else (partition_id,):
            for link in self.hub.partition(each).links:
                link.serve = _nothing  # type: ignore[method-assign]  # a base without such stalls

    async def add_partition(self) -> None:
        if len(self.hub.partition_ids) < 6:
            partition_id = str(len(self.hub.partition_ids))
            self.world.note("add partition", partition_id)
            self.hub.add_partitions(1)
            for ledger in self.ledgers:
                ledger.added(partition_id)

    async def retention(self) -> None:
        partition_id = self.world.rng.choice(self.hub.partition_ids)
        end = self.ledger.end(partition_id)
        first = self.hub.partition(partition_id).first
        if end > first:
            before = self.world.rng.randint(first + 1, end)
            self.world.note("retention", partition_id, f"takes what is before {before}")
            for ledger in self.ledgers:
                ledger.truncated(partition_id, before)
            self.hub.truncate(partition_id, before)

    async def make_again(self) -> None:
        self.world.note("make again")
        make_again(self.hub)
        for ledger in self.ledgers:
            ledger.recreated()
        self.hub.detach(None, error_for("amqp:resource-deleted", "the hub was deleted"))

    # ---------------------------------------------------------------------------------------------------- store

    async def trouble_store(self) -> None:
        rng = self.world.rng
        self.trouble = rng.choice(
            [
                Trouble(fails=0.5),
                Trouble(loses=0.4),
                Trouble(lates=0.4),
                Trouble(cancels=0.1),
                Trouble(slow=rng.choice((0.5, 3.0, 12.0))),
                Trouble(fails=0.2, loses=0.2, lates=0.2, slow=2.0),
                Trouble(hangs=True),
            ]
        )
        self.had_trouble_at = self.world.loop.time()
        self.world.note("store", self.trouble)

    async def heal(self) -> None:
        if self.trouble != Trouble():
            self.had_trouble_at = self.world.loop.time()
            self.world.note("heal")
        self.trouble = Trouble()

    async def clock_step(self) -> None:
        self.clock.offset += self.world.rng.choice((-3600.0, -20.0, 20.0, 3600.0))
        self.world.note("clock", f"set to {self.clock.offset:+.0f} s")


def _nothing() -> None:
    """Serve nothing."""


def make_again(hub: FakeHub) -> None:
    """Delete a hub and create it under the same name: empty, with as many partitions."""
    hub.recreate()


@contextlib.contextmanager
def on_file(world: World, *, is_wanted: bool, chance: float = 0.5) -> Iterator[Path | None]:
    """Return a directory for a history's leases, in half of the histories where it is wanted; else None: in memory."""
    if not is_wanted or world.rng.random() >= chance:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="history-") as directory, sqlite_inline():
        yield Path(directory)


async def consumer_history(world: World, size: int) -> None:
    """Live one history of hosts. Its profile is the part of its kind behind "consumer:"."""
    name = world.kind.partition(":")[2] or world.chosen(dict.fromkeys(PROFILES, 1.0))
    world.note("profile", name)
    with on_file(world, is_wanted=name == "store") as directory:
        await ConsumerHistory(world, PROFILES[name], directory).run(size)
