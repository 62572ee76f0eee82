"""Histories of mixed fleets: hosts of ours and members of official SDKs on one hub, one group and one v5 container.

They join, leave, die, and stall for longer than an ownership lives; requests to the container fail, are carried out
late, or lose their answers; clocks are wrong; a hub is recreated while a JavaScript member's last checkpoint is still
under way. What must hold:

* Every event is processed by at least one member, and no checkpoint is stored that passes one which is not.
* After a host of ours has read that its link was stolen, it begins no batch of that partition, and does not attach
  again, before its ownership has been renewed; and it sends no checkpoint without having read just before that the
  partition is its own.
* When the faults have ended, every partition is read again within the longest expiry and a cycle.
* Then members join. Ten cycles of the slowest member later no member owns two more than another; and for ten more
  cycles no partition moves and no link is stolen. Until then the number of stolen links is bounded.
* No host takes a partition back from the member that has taken it without having listed the owners since.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from eventpump import CloseReason, EventProcessor, PartitionContext, ReceivedEvent
from eventpump.consumer.host.host import HubHost
from eventpump.core.balancers import FairBalancer
from eventpump.core.checkpoint import CheckpointPolicy
from eventpump.errors import ConnectionLostError, ConsumerDisconnectedError, EventPumpError
from eventpump.eventhubs.conditions import error_for
from eventpump.eventhubs.events import EventPosition
from eventpump.interfaces import ReceiveLinkSpec, ReceiveSink
from eventpump.options.consumer import HostSettings
from eventpump.reports import CheckpointWritten, HostReport
from eventpump.storage.leases.ownership import BlobOwnershipStore
from eventpump.testing.transport import FakeHub, FakeReceiveLink
from tests.faults.histories.ledger import body_of
from tests.faults.histories.official import EPOCH, MEMBERS, ContainerDoor, Journal, OfficialMember, Pace
from tests.faults.histories.stores import Trouble
from tests.faults.histories.world import Life, LifeTransport, Violation, World, own_paces
from tests.support.blobs import Blob, Container, container_client

CYCLES = 10
"""Cycles of the slowest member within which a fleet is balanced, and for which it then does not move."""
IN_FLIGHT = 20.0
"""Seconds from the answer to who owns a partition until a checkpoint is sent: two requests, each at its longest."""
SLOWEST = 3.0
"""The most seconds that user code takes for a batch."""
START_UP = 60.0
"""Seconds in which a host that starts while the container is in trouble may end."""

_FLEET = {"join": 2.0, "leave": 1.0, "crash": 1.5, "freeze": 1.0, "wake": 2.0}
_STORE = {"trouble store": 2.0, "heal": 2.5}

# As the SDKs' defaults are, and as operators who align them set them: seconds of interval, expiry; greedy or not.
PACES: Mapping[str, Sequence[Pace]] = {
    "py": [Pace(30.0, 180.0, is_greedy=True), Pace(10.0, 60.0, is_greedy=True), Pace(30.0, 180.0, is_greedy=False)],
    "js": [Pace(10.0, 60.0, is_greedy=False), Pace(10.0, 60.0, is_greedy=True)],
}


OUR_PACE = Pace(20.0, 120.0, is_greedy=True)
"""That of our hosts, by their defaults: the longer of the times that they give other members and each other."""


@dataclass(frozen=True)
class MixedProfile:
    """A kind of history of a mixed fleet.

    Args:
        actions: Weights beside those of publishing.
        kinds: Which members join, by weight: "our", "py", "js".
        members: The most at a time.
        partitions: The fewest and the most.
    """

    actions: Mapping[str, float]
    kinds: Mapping[str, float] = field(default_factory=lambda: {"our": 3.0, "py": 2.0, "js": 2.0})
    members: int = 5
    partitions: tuple[int, int] = (1, 9)


PROFILES: dict[str, MixedProfile] = {
    "fleet": MixedProfile({**_FLEET, "detach": 0.5, "cut": 0.5}),
    "store": MixedProfile({**_FLEET, **_STORE, "detach": 0.3}),
    "python": MixedProfile({**_FLEET, **_STORE}, {"our": 1.0, "py": 1.5}),
    "javascript": MixedProfile({**_FLEET, **_STORE}, {"our": 1.0, "js": 1.5}),
    "hubs": MixedProfile({"join": 1.0, "detach": 0.5, "make again": 1.5}, {"our": 2.0, "js": 1.0}, members=4),
}


@dataclass(eq=False)
class Batch:
    """One call of user code."""

    member: str
    place: tuple[int, str]
    numbers: tuple[int, ...]


class MixedLedger(Journal):
    """What members processed, and what is stored of it."""

    def __init__(self, world: World, hub: FakeHub) -> None:
        self._world = world
        self._hub = hub
        self.making = 0
        """How often the hub was recreated."""
        self.processed: dict[tuple[int, str], set[int]] = {}
        self.repeated = 0
        self.begun = 0
        self._begun_at: dict[str, float] = {}

    def published(self, partition_id: str, count: int) -> None:
        """Store events in the hub."""
        first = self._hub.partition(partition_id).next
        bodies = [body_of(self.making, partition_id, first + index) for index in range(count)]
        self._hub.publish(partition_id, *bodies)

    def begin(self, member: str, partition_id: str, events: Sequence[ReceivedEvent]) -> Batch:
        making = int(events[0].body.decode().partition("/")[0])
        batch = Batch(member, (making, partition_id), tuple(event.sequence_number for event in events))
        self.begun += 1
        self._begun_at[partition_id] = self._world.loop.time()
        self._world.note("begin", member, f"{partition_id}[{batch.numbers[0]}..{batch.numbers[-1]}]")
        return batch

    def ok(self, call: object) -> None:
        assert isinstance(call, Batch)
        processed = self.processed.setdefault(call.place, set())
        self.repeated += len(processed.intersection(call.numbers))
        processed.update(call.numbers)
        self._world.note("ok", call.member, f"{call.place[1]}[{call.numbers[0]}..{call.numbers[-1]}]")

    def missing(self, partition_id: str, end: int | None = None) -> set[int]:
        """Return the numbers of a partition of the present hub that no member has processed."""
        end = self._hub.partition(partition_id).next if end is None else end
        return set(range(end)) - self.processed.get((self.making, partition_id), set())

    def unread_since(self, moment: float) -> list[str]:
        """Return the partitions of which something is missing, and no batch was begun since."""
        return [each for each in self.all_missing() if self._begun_at.get(each, -math.inf) < moment]

    def all_missing(self) -> dict[str, set[int]]:
        """Return what no member has processed, by partition."""
        missing = {each: self.missing(each) for each in self._hub.partition_ids}
        return {partition_id: numbers for partition_id, numbers in missing.items() if numbers}


class CountingHub(FakeHub):
    """Counts the links that were stolen by another reader."""

    def __init__(self, world: World, partitions: int, latency: float) -> None:
        super().__init__(partitions=partitions, latency=latency)
        self._world = world
        self.thefts = 0

    def admit(self, link: FakeReceiveLink) -> None:
        """Attach a link."""
        before = list(self.partition(link.spec.partition_id).links)
        super().admit(link)
        for stolen in set(before) - set(link.partition.links):
            self.thefts += 1
            names = f"{stolen.spec.receiver_name} by {link.spec.receiver_name}"
            self._world.note("link stolen", link.spec.partition_id, "of", names)


class OurTransport(LifeTransport):
    """A host's transport. It records of which partitions the link was stolen, until the host knows that it has them."""

    def __init__(self, hub: FakeHub, life: Life, world: World) -> None:
        super().__init__(hub, life)
        self.stolen: dict[str, float] = {}
        """When it read that, by partition."""
        self._world = world

    async def open_receive_link(self, spec: ReceiveLinkSpec, sink: ReceiveSink) -> FakeReceiveLink:
        """Attach a link."""
        if spec.partition_id in self.stolen:
            text = f"{spec.receiver_name} attaches again, and has not read that the partition is its own"
            self._world.violate(f"partition {spec.partition_id}: {text}")
        return await super().open_receive_link(spec, _Watched(self, spec.partition_id, sink))

    def owns(self, partition_id: str) -> None:
        """Record that the host has read that a partition is its own, or has made it so."""
        self.stolen.pop(partition_id, None)


class _Watched:
    """A sink that records that the link was stolen."""

    def __init__(self, transport: OurTransport, partition_id: str, sink: ReceiveSink) -> None:
        self._transport = transport
        self._partition_id = partition_id
        self._sink = sink

    def messages(self, batch: list[bytes]) -> None:
        self._sink.messages(batch)

    def detached(self, error: EventPumpError) -> None:
        if isinstance(error, ConsumerDisconnectedError):
            self._transport.stolen[self._partition_id] = asyncio.get_running_loop().time()
        self._sink.detached(error)


class OurProcessor(EventProcessor):
    """A host's processor."""

    def __init__(self, history: MixedHistory, transport: OurTransport, name: str) -> None:
        self._history = history
        self._transport = transport
        self._rng = history.world.stream(f"user code of {name}")

    async def process_events(self, context: PartitionContext, events: Sequence[ReceivedEvent]) -> None:
        """Process a batch."""
        ledger, partition_id = self._history.ledger, context.partition_id
        # Not at the same moment: the pump is notified in the loop's next turns.
        if self._transport.stolen.get(partition_id, math.inf) < self._history.world.loop.time():
            text = f"{context.owner_id} begins a batch after it has read that its link was stolen"
            self._history.world.violate(f"partition {partition_id}: {text}")
        batch = ledger.begin(context.owner_id, partition_id, events)
        await asyncio.sleep(self._rng.choice((0.0, 0.05, 0.5, 3.0)))
        ledger.ok(batch)
        if self._rng.random() < 0.6:
            await context.checkpoint()

    async def close(self, context: PartitionContext, reason: CloseReason) -> None:
        """Record the end."""
        self._history.world.note("close", context.owner_id, context.partition_id, reason.value)


@dataclass(eq=False)
class Member:
    """One member, of whatever kind."""

    life: Life
    kind: str
    expiry: float
    interval: float
    began: float
    host: HubHost | None = None
    transport: LifeTransport | None = None
    official: OfficialMember | None = None
    run: asyncio.Task[None] | None = None
    is_leaving: bool = False
    was_frozen: bool = False

    @property
    def is_living(self) -> bool:
        """Whether it runs and is not about to leave."""
        return self.life.is_running and not self.is_leaving


class MixedHistory:
    """One history."""

    def __init__(self, world: World, profile: MixedProfile) -> None:
        self.world = world
        self.profile = profile
        rng = world.rng
        self.hub = CountingHub(world, rng.randint(*profile.partitions), rng.choice((0.0, 0.0, 0.01, 0.3)))
        self.container = Container(lambda: EPOCH + world.loop.time())
        self.container.on_write = self._written
        self.ledger = MixedLedger(world, self.hub)
        self.members: list[Member] = []
        self.trouble = Trouble()
        self.had_trouble_at = -1e9
        self.prefix = f"{self.hub.fully_qualified_namespace}/{self.hub.name}/$default".lower()
        # One fleet is configured alike.
        self.paces = {kind: rng.choice(paces) for kind, paces in PACES.items()}
        self.moves: list[tuple[float, str, str]] = []
        """Every change of an owner: when, partition, new owner."""
        self._owners: dict[str, str] = {}
        self._taken: dict[str, tuple[float, str]] = {}
        """By partition: when it was taken from its owner last, and from which."""
        self._listed_at: dict[str, float] = {}
        """When each host has listed the owners last."""
        self._names = 0
        world.note("begins", f"{len(self.hub.partition_ids)} partitions", self.paces)

    # ------------------------------------------------------------------------------------------------ its course

    async def run(self, size: int) -> None:
        """Live through `size` steps of trouble, end it, and check.

        Raises:
            Violation: A promise did not hold.
        """
        world = self.world
        for partition_id in self.hub.partition_ids:
            self.ledger.published(partition_id, world.rng.randint(0, 30))
        actions = {"publish": 3.0, **self.profile.actions}
        self._start(world.rng.choice(("our", *self.profile.kinds)))
        for _ in range(size):
            await world.sleep(world.rng.expovariate(1.0) * world.rng.choice((0.5, 5.0, 30.0, 60.0)))
            await getattr(self, world.chosen(actions).replace(" ", "_"))()
        await self._end()

    async def _end(self) -> None:
        world, ledger = self.world, self.ledger
        world.note("the faults end")
        await self.heal()
        for member in self.members:
            if member.life.is_frozen and not member.life.is_dead:
                member.life.wake(world.loop)
        if not any(member.kind == "our" for member in self.living):
            self._start("our")  # what is promised of the fleet is promised of hosts that are in it
        slowest = max(member.interval for member in self.living)
        expiry = max(member.expiry for member in self.living)
        for partition_id in self.hub.partition_ids:
            ledger.published(partition_id, 3)
        ended = world.loop.time()
        if not await world.until(lambda: not ledger.unread_since(ended), expiry + slowest + 30.0):
            unread = ", ".join(ledger.unread_since(ended))
            world.violate(f"not read again within the longest expiry and a cycle: {unread}")
        backlog = sum(map(len, ledger.all_missing().values()))
        if not await world.until(lambda: not ledger.all_missing(), 60.0 + SLOWEST * backlog):
            world.violate(f"not processed: {_named(ledger.all_missing())}")
        for _ in range(world.rng.randint(1, 2)):
            self._start(world.chosen(self.profile.kinds))
        slowest = max(slowest, *(member.interval for member in self.living))
        expiry = max(expiry, *(member.expiry for member in self.living))
        # What dead members owned counts for their share until it expires.
        await world.sleep(expiry)
        thefts = self.hub.thefts
        await world.sleep(CYCLES * slowest)
        self._check_balanced()
        stolen, bound = self.hub.thefts - thefts, 3 * len(self.hub.partition_ids)
        if stolen > bound:
            world.violate(f"{stolen} links were stolen while the fleet was left alone")
        began, thefts = world.loop.time(), self.hub.thefts
        for partition_id in self.hub.partition_ids:
            ledger.published(partition_id, 3)
        await world.sleep(CYCLES * slowest)
        self._check_balanced()
        if late := [f"{each} to {owner}" for when, each, owner in self.moves if when >= began]:
            world.violate(f"a balanced fleet moved partitions: {', '.join(late)}")
        if self.hub.thefts > thefts:
            world.violate(f"{self.hub.thefts - thefts} links were stolen in a balanced fleet")
        if missing := ledger.all_missing():
            world.violate(f"never processed: {_named(missing)}")
        world.note("counts", f"{ledger.begun} batches, {ledger.repeated} repeated, {self.container.requests} requests")
        if world.violation is not None:
            raise Violation(world.violation)

    def _check_balanced(self) -> None:
        counts = {member.life.name: 0 for member in self.living}
        for partition_id in self.hub.partition_ids:
            owner = self._owners.get(partition_id, "")
            if owner not in counts:
                self.world.violate(f"partition {partition_id} belongs to {owner or 'no member'} in a quiet fleet")
            else:
                counts[owner] += 1
        if max(counts.values()) > min(counts.values()) + 1:
            shares = ", ".join(f"{name} {count}" for name, count in counts.items())
            self.world.violate(f"not balanced {CYCLES} cycles after the faults: {shares}")

    def _written(self, blob: Blob) -> None:
        """Check, and take down, what was written to the container."""
        kind, _, partition_id = blob.name.removeprefix(f"{self.prefix}/").partition("/")
        if kind == "ownership":
            owner, former = blob.metadata.get("ownerid", ""), self._owners.get(partition_id, "")
            if owner != former:
                self.world.note("owner", partition_id, "is", owner or "none")
                self._check_not_taken_back(partition_id, owner, former)
                self._owners[partition_id] = owner
                self.moves.append((self.world.loop.time(), partition_id, owner))
        elif kind == "checkpoint":
            number = int(blob.metadata["sequencenumber"])
            self.world.note("checkpoint", partition_id, number)
            is_of_this_hub = number < self.hub.partition(partition_id).next and not self.ledger.making
            if is_of_this_hub and (missing := self.ledger.missing(partition_id, number + 1)):
                text = f"checkpoint {number} is stored, and {_named({partition_id: missing})} not processed"
                self.world.violate(f"partition {partition_id}: {text}")

    def _check_not_taken_back(self, partition_id: str, owner: str, former: str) -> None:
        now = self.world.loop.time()
        taken_at, victim = self._taken.get(partition_id, (-math.inf, ""))
        if former and owner == victim and self._listed_at.get(owner, math.inf) < taken_at:
            self.world.violate(f"partition {partition_id}: {owner} takes it back from {former}, which has taken it")
        if former and owner:
            self._taken[partition_id] = (now, former)

    # -------------------------------------------------------------------------------------------------- members

    @property
    def living(self) -> list[Member]:
        """Members that run and are not about to leave."""
        return [member for member in self.members if member.is_living]

    async def join(self) -> None:
        """Start a member."""
        if len(self.living) < self.profile.members:
            self._start(self.world.chosen(self.profile.kinds))

    def _start(self, kind: str) -> None:
        self._names += 1
        life = self.world.life(f"{kind}{self._names}")
        member = self._our(life) if kind == "our" else self._official(life, kind)
        self.members.append(member)
        self.world.note("join", life.name)
        work = member.host.run() if member.host is not None else member.official.run()  # type: ignore[union-attr]
        member.run = self.world.spawn(life, work, f"member {life.name}")
        member.run.add_done_callback(lambda run: self._ended(member, run))

    def _door(self, name: str) -> ContainerDoor:
        return ContainerDoor(self.world, name, lambda: self.trouble)

    def _official(self, life: Life, kind: str) -> Member:
        pace = self.paces[kind]
        official = MEMBERS[kind](
            self.world, life, self.hub, self.container, self.prefix, self._door(life.name), self.ledger, pace,
            clock_error=self.world.rng.uniform(-2.0, 2.0),
        )  # fmt: skip
        interval = 1.2 * pace.interval if kind == "py" else pace.interval
        now = self.world.loop.time()
        return Member(life, kind, pace.expiry, interval, now, official=official, transport=official.transport)

    def _our(self, life: Life) -> Member:
        world, rng, name = self.world, self.world.rng, life.name
        transport = OurTransport(self.hub, life, world)
        door = self._door(name)

        async def let_through(operation: str, work: Any) -> Any:
            partition_id, now = operation.rpartition("/")[2], world.loop.time()
            if "/ownership/" in operation and operation.startswith("HEAD"):
                looked[partition_id] = (now, self._owners.get(partition_id) == name)
            elif "/checkpoint/" in operation and operation.startswith("PUT"):
                looked_at, is_own = looked.get(partition_id, (-math.inf, False))
                if not is_own or now - looked_at > IN_FLIGHT:
                    text = f"{name} sends a checkpoint, and has not read that the partition is its own"
                    world.violate(f"partition {partition_id}: {text}")
            answer = await door.request(operation, work)
            if operation.startswith("GET list"):
                self._listed_at[name] = world.loop.time()
            if "/ownership/" in operation and operation.startswith("PUT") and answer.status < 300:
                transport.owns(partition_id)
            return answer

        # When it read last who owns a partition, and whether that was itself.
        looked: dict[str, tuple[float, bool]] = {}
        store = BlobOwnershipStore(
            container_client(self.container, let_through), clock=OurClock(world, rng.choice((0.0, -60.0, 60.0)))
        )
        settings = HostSettings(
            hub=self.hub.name,
            owner_id=name,
            balancer=FairBalancer(),
            renew_interval=OUR_PACE.interval,
            max_batch_size=rng.randint(1, 10),
            prefetch_events=rng.choice((20, 100)),
            checkpoint_policy=rng.choice(
                (CheckpointPolicy(every_events=rng.randint(1, 20)), CheckpointPolicy(every_seconds=rng.uniform(1, 9)))
            ),
            initial_position=EventPosition.earliest(),
            failure_policy="retry",
            on_data_loss="earliest",
            delivery_interval=world.interval(name),
        )
        host = HubHost(
            lambda: transport,
            store,
            settings,
            OurProcessor(self, transport, name),
            hooks=[lambda report: self._reported(name, report)],
            rng=world.stream(f"host {name}"),
        )
        pace, now = OUR_PACE, world.loop.time()
        return Member(life, "our", pace.expiry, pace.interval, now, host=host, transport=transport)

    async def leave(self) -> None:
        """Stop a member in order."""
        if self.living:
            member = self.world.rng.choice(self.living)
            self.world.note("leave", member.life.name)
            self._begin_to_leave(member)

    def _begin_to_leave(self, member: Member) -> None:
        member.is_leaving = True
        if member.host is not None:
            self.world.spawn(member.life, member.host.aclose(), f"close {member.life.name}")
        else:
            assert member.official is not None
            member.life.call(self.world.loop, member.official.stop)

    async def crash(self) -> None:
        """Kill a member."""
        running = [each for each in self.members if each.run is not None and not each.run.done()]
        if candidates := [each for each in running if not each.life.is_dead]:
            self._kill(self.world.rng.choice(candidates))

    def _kill(self, member: Member) -> None:
        self.world.note("crash", member.life.name)
        member.life.kill()
        assert member.transport is not None
        member.transport.lose(ConnectionLostError("the process was killed"))

    async def freeze(self) -> None:
        """Stop a member's process, for longer than its ownership lives or not."""
        if self.living:
            member = self.world.rng.choice(self.living)
            self.world.note("freeze", member.life.name)
            member.life.freeze()
            member.was_frozen = True
            if self.world.rng.random() < 0.5:
                assert member.transport is not None
                member.transport.lose(ConnectionLostError("idle for too long"))

    async def wake(self) -> None:
        """Let a process go on."""
        if frozen := [each for each in self.members if each.life.is_frozen and not each.life.is_dead]:
            member = self.world.rng.choice(frozen)
            self.world.note("wake", member.life.name)
            member.life.wake(self.world.loop)

    def _reported(self, name: str, report: HostReport) -> None:
        if not isinstance(report, CheckpointWritten):
            self.world.note("report", name, report.partition_id or "", report.describe()[:160])

    def _ended(self, member: Member, run: asyncio.Task[None]) -> None:
        error = asyncio.CancelledError() if run.cancelled() else run.exception()
        self.world.note("ended", member.life.name, repr(error))
        if member.is_leaving or member.life.is_dead or self.world.violation is not None:
            return
        age, now = self.world.loop.time() - member.began, self.world.loop.time()
        was_hard = self.trouble != Trouble() or (now - self.had_trouble_at < 2 * START_UP and age < 2 * START_UP)
        if isinstance(error, EventPumpError) and (was_hard or member.was_frozen):
            member.is_leaving = True  # it could not begin within its start-up time
            return
        self.world.violate(f"{member.life.name} ended by itself after {age:.0f} s: {error!r}")

    # ------------------------------------------------------------------------------------------------------ hub

    async def publish(self) -> None:
        """Store events."""
        rng = self.world.rng
        partition_id, count = rng.choice(self.hub.partition_ids), rng.choice((1, 1, 3, 10, 40))
        self.world.note("publish", partition_id, count)
        self.ledger.published(partition_id, count)

    async def detach(self) -> None:
        """End links, as the service does now and then."""
        partition_id = self.world.rng.choice((None, *self.hub.partition_ids))
        self.world.note("detach", partition_id or "all")
        self.hub.detach(partition_id, error_for("amqp:link:detach-forced", "by the history"))

    async def cut(self) -> None:
        """End a member's connection."""
        if self.living:
            member = self.world.rng.choice(self.living)
            self.world.note("cut", member.life.name)
            assert member.transport is not None
            member.transport.lose(ConnectionLostError("cut by the history"))

    async def make_again(self) -> None:
        """Recreate the hub, once. The other SDKs' members are stopped first, and checkpoints of theirs are still late.

        They are of partitions that hosts of ours own by then: those move a checkpoint back, and what is written late
        does not win over that.
        """
        world, hub, ledger = self.world, self.hub, self.ledger
        strangers = [member for member in self.members if member.official is not None]
        if ledger.making or not strangers or not any(member.kind == "our" for member in self.living):
            return
        for partition_id in hub.partition_ids:
            ledger.published(partition_id, 60)
        await self._until("the hub is not read", lambda: not ledger.all_missing())
        names = {member.life.name for member in self.living if member.kind == "our"}
        for partition_id in hub.partition_ids:
            if self._owners.get(partition_id) in names:
                writer, event = world.rng.choice(strangers).official, hub.events(partition_id)[-1]
                assert writer is not None
                writer.write_late(partition_id, event, world.rng.uniform(0.0, 90.0))
        for member in strangers:
            if member.run is not None and not member.run.done() and not member.life.is_dead:
                self._kill(member)
        world.note("make again")
        hub.recreate()
        ledger.making += 1
        for count in (3, 25):
            for partition_id in hub.partition_ids:
                ledger.published(partition_id, count)
            await self._until("the recreated hub is not read", lambda: not ledger.all_missing())
            await world.sleep(100.0)
        for blob in self.container.list(f"{self.prefix}/checkpoint/"):
            number, end = int(blob.metadata["sequencenumber"]), hub.partition(blob.name.rpartition("/")[2]).next
            if number >= end:
                world.violate(f"{blob.name}: a late checkpoint of the hub before, {number}, is not replaced: {end}")

    async def _until(self, problem: str, holds: Callable[[], bool]) -> None:
        if not await self.world.until(holds, 400.0):
            self.world.violate(f"{problem}: {_named(self.ledger.all_missing())}")

    # ---------------------------------------------------------------------------------------------------- store

    async def trouble_store(self) -> None:
        """Have requests to the container fail, or their answers be late or lost."""
        rng = self.world.rng
        self.trouble = rng.choice(
            [
                Trouble(fails=0.5),
                Trouble(loses=0.4),
                Trouble(lates=0.4),
                Trouble(slow=rng.choice((0.5, 3.0, 12.0))),
                Trouble(fails=0.2, loses=0.2, lates=0.2, slow=2.0),
                Trouble(hangs=True),
            ]
        )
        self.had_trouble_at = self.world.loop.time()
        self.world.note("store", self.trouble)

    async def heal(self) -> None:
        """End that."""
        if self.trouble != Trouble():
            self.had_trouble_at = self.world.loop.time()
            self.world.note("heal")
        self.trouble = Trouble()


class OurClock:
    """A host's clocks: monotonic as the loop's, and a wall clock that is wrong."""

    def __init__(self, world: World, error: float) -> None:
        self._world = world
        self._error = error

    def monotonic(self) -> float:
        return self._world.loop.time()

    def time(self) -> float:
        return EPOCH + self._world.loop.time() + self._error


def _named(missing: Mapping[str, set[int]]) -> str:
    parts = [f"{partition_id}: {len(numbers)} from {min(numbers)}" for partition_id, numbers in missing.items()]
    return ", ".join(parts)


async def mixed_history(world: World, size: int) -> None:
    """Live one history of a mixed fleet. Its profile is the part of its kind behind "mixed:"."""
    name = world.kind.partition(":")[2]
    world.note("profile", name)
    with own_paces():
        await MixedHistory(world, PROFILES[name]).run(size)
