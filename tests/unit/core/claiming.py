"""A world in which the processes of one publisher start, publish, freeze and die by chance, on one partition."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from eventpump.core.claim import (
    AttachProducer,
    AttachRefused,
    OnDoubt,
    OnStateLost,
    PublisherMode,
    PublisherState,
    ReadStamps,
    ReadState,
    ReadTail,
    Request,
    Started,
    StartPolicy,
    StoredPublisherState,
    SwapState,
    start,
)
from eventpump.core.sequencer import AttachRequest, ProducerAnswer
from eventpump.errors import ProducerDisconnectedError, PublishOutcomeUnknownError
from eventpump.eventhubs.numbering import MAX_OWNER_LEVEL, NUMBERS, advance, distance


@dataclass
class Ledger:
    """What the service keeps of one producer."""

    level: int
    last: int
    is_fresh: bool = True
    recent: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=5))


@dataclass(frozen=True)
class Entry:
    """An event in the partition; of another writer where its place is None."""

    place: int | None
    producer_id: int = -1
    level: int = -1
    number: int = -1


@dataclass(frozen=True)
class Transfer:
    """A batch on its way: events at consecutive places of the application."""

    producer_id: int
    level: int
    first: int
    place: int
    count: int


class Service:
    """One partition, by protocol.md 8.2 and 8.5.

    Args:
        nothing: The number answered where nothing is published, -1 or 0.
        keeps_claims: Whether a number given to a fresh producer is answered to the next attach too.
    """

    def __init__(self, *, nothing: int, keeps_claims: bool) -> None:
        self.nothing = nothing
        self.keeps_claims = keeps_claims
        self.log: list[Entry] = []
        self.producers: dict[int, Ledger] = {}

    def attach(self, asked: AttachRequest) -> ProducerAnswer | AttachRefused:
        producer_id = asked.producer_id
        if producer_id is None:
            producer_id = 100 + len(self.producers)
            self.producers[producer_id] = Ledger(asked.owner_level or 0, self.nothing)
        known = self.producers.get(producer_id)
        if known is None:
            return AttachRefused(is_stolen=False, description="not known")
        level = known.level if asked.owner_level is None else asked.owner_level
        if level < known.level:
            return AttachRefused(is_stolen=True, description=f"level {level} is below {known.level}")
        if level > known.level:
            known = self.producers[producer_id] = Ledger(level, self.nothing)
        if asked.number is None:
            return ProducerAnswer(producer_id, level, known.last)
        assert asked.number >= 0
        if known.is_fresh and self.keeps_claims:
            known.last = asked.number
        return ProducerAnswer(producer_id, level, asked.number)

    def take(self, transfer: Transfer) -> bool | None:
        """Store a transfer, or find it stored: True. False where its level is below; None where it is out of order."""
        known = self.producers[transfer.producer_id]
        if transfer.level < known.level:
            return False
        batch = (transfer.first, transfer.count)
        if not known.is_fresh and transfer.first != (known.last + 1) % NUMBERS:
            return True if batch in known.recent else None
        known.is_fresh = False
        known.last = advance(transfer.first, transfer.count - 1) if transfer.count > 1 else transfer.first
        known.recent.append(batch)
        for index in range(transfer.count):
            number = (transfer.first + index) % NUMBERS
            self.log.append(Entry(transfer.place + index, transfer.producer_id, transfer.level, number))
        return True


class Process:
    """One process: it starts, and then publishes what the count says comes next."""

    def __init__(self, name: int, policy: StartPolicy) -> None:
        self.name = name
        self.policy = policy
        self.procedure = start("0", policy, f"claim {name}", AttachRequest())
        self.request: Request | None = next(self.procedure)
        self.stored: StoredPublisherState | None = None
        self.base = 0
        self.number = 0
        self.last = 0
        self.pending: Transfer | None = None
        self.has_published = False

    @property
    def is_live(self) -> bool:
        return self.request is None

    @property
    def place(self) -> int:
        """The place of the next event."""
        return self.base + distance(self.number, self.last)

    def begin(self, started: Started) -> None:
        self.request = None
        self.stored = started.stored
        self.base, self.number, self.last = started.published, started.number, started.number
        self.has_published = started.stored.state.has_published


class World:
    """Everything, and what must be true of it whatever happens.

    Args:
        first: The state to begin with; its producer is known to the service.
        others: The chance that another writer's event is stored, at each step.
    """

    def __init__(
        self,
        rng: random.Random,
        policy: StartPolicy,
        *,
        nothing: int = 0,
        keeps_claims: bool = True,
        others: float = 0.0,
        first: PublisherState | None = None,
    ) -> None:
        self.rng = rng
        self.policy = policy
        self.others = others
        self.losses = 0.15
        """The chance that the answer to a step of a start is lost."""
        self.service = Service(nothing=nothing, keeps_claims=keeps_claims)
        self.cell: StoredPublisherState | None = None
        self.versions = 0
        self.processes: list[Process] = []
        self.frozen: list[Process] = []
        self.network: list[Transfer] = []
        self.started = 0
        self.acknowledged: set[tuple[int, int, int, int]] = set()
        self.doubts = 0
        self.superseded = 0
        self.levels: dict[tuple[int, int], int] = {}
        """Which process publishes under an id and level."""
        if first is not None:
            self.service.producers[first.producer_id] = Ledger(first.owner_level, first.start)
            self._store(first)

    def _store(self, state: PublisherState) -> StoredPublisherState:
        self.versions += 1
        self.cell = StoredPublisherState(state, str(self.versions))
        return self.cell

    def swap(self, state: PublisherState, replaces: StoredPublisherState | None) -> StoredPublisherState | None:
        if self.cell is not None and self.cell.state == state:
            return self.cell
        if (self.cell and self.cell.version) != (replaces and replaces.version):
            return None
        return self._store(state)

    # ------------------------------------------------------------------------------------------ what may happen

    def spawn(self) -> None:
        self.started += 1
        self.processes.append(Process(self.started, self.policy))

    def die(self, process: Process) -> None:
        self.processes.remove(process)

    def answer(self, request: Request) -> object:
        match request:
            case ReadState():
                return self.cell
            case SwapState(state, replaces):
                return self.swap(state, replaces)
            case ReadTail():
                return len(self.service.log) - 1
            case AttachProducer(asked):
                return self.service.attach(asked)
            case ReadStamps(after, through, producer_id, level):
                return tuple(
                    each.number
                    for each in self.service.log[after + 1 : through + 1]
                    if each.place is not None and (each.producer_id, each.level) == (producer_id, level)
                )

    def go_on(self, process: Process) -> None:
        """Let a start do its next step; where its answer is lost, it does the same again."""
        assert process.request is not None
        answer = self.answer(process.request)
        if self.rng.random() < self.losses:
            return
        try:
            process.request = process.procedure.send(answer)
        except StopIteration as stop:
            process.begin(stop.value)
            assert process.stored is not None
            state = process.stored.state
            if self.policy.mode is PublisherMode.EXCLUSIVE:
                key = (state.producer_id, state.owner_level)
                assert self.levels.setdefault(key, process.name) == process.name, "two processes share a level"
                assert state.owner_level < MAX_OWNER_LEVEL
        except PublishOutcomeUnknownError:
            self.doubts += 1
            self.die(process)
        except ProducerDisconnectedError:
            self.superseded += 1
            self.die(process)

    def send(self, process: Process) -> None:
        """Send the pending batch, again or for the first time."""
        if process.pending is None:
            assert process.stored is not None
            state = process.stored.state
            process.pending = Transfer(
                state.producer_id,
                state.owner_level,
                advance(process.last),
                process.place,
                self.batch_size(process.place),
            )
        self.network.append(process.pending)

    def batch_size(self, place: int) -> int:
        """How many events the batch at a place has: the same in every process, as replayable ones need it."""
        if self.policy.mode is PublisherMode.REPLAYABLE:
            return 1
        return self.rng.randint(1, 3)

    def deliver(self) -> None:
        """Let a transfer arrive; one of those that send it may hear of it."""
        transfer = self.network.pop(self.rng.randrange(len(self.network)))
        taken = self.service.take(transfer)
        heard = [each for each in self.processes if each.pending == transfer]
        if not heard or self.rng.random() < 0.3:
            return
        process = self.rng.choice(heard)
        if taken:
            process.last = advance(process.last, transfer.count)
            process.has_published = True
            process.pending = None
            for index in range(transfer.count):
                number = (transfer.first + index) % NUMBERS
                self.acknowledged.add((transfer.place + index, transfer.producer_id, transfer.level, number))
        elif taken is False:
            self.die(process)
        else:
            # Out of order: final in the sequencer, and nothing of the transfer is stored.
            assert self.policy.mode is PublisherMode.REPLAYABLE
            self.die(process)

    def lose(self) -> None:
        """Let a transfer never arrive."""
        self.network.pop(self.rng.randrange(len(self.network)))

    def mark(self, process: Process, *, is_clean: bool = False) -> None:
        """Write a mark, which fails where another start has changed the state."""
        assert process.stored is not None
        state = process.stored.state
        if process.has_published:
            state = replace(state, start=process.last, published=process.place, has_published=True)
        written = self.swap(replace(state, is_clean=is_clean), process.stored)
        if written is not None:
            process.stored = written

    def close(self, process: Process) -> None:
        """Close with nothing in doubt."""
        self.mark(process, is_clean=self.policy.mode is PublisherMode.EXCLUSIVE)
        self.die(process)

    def step(self) -> None:
        """Let one thing happen."""
        rng = self.rng
        if rng.random() < self.others:
            self.service.log.append(Entry(None))
        moves: list[Callable[[], None]] = []
        if len(self.processes) < 3 and rng.random() < 0.15:
            moves += [self.spawn] * 2
        for process in self.processes:
            if process.is_live:
                moves += [lambda each=process: self.send(each)] * 4  # type: ignore[misc]  # mypy does not see the default
                moves += [lambda each=process: self.mark(each)]  # type: ignore[misc]  # likewise
                if process.pending is None and rng.random() < 0.2:
                    moves += [lambda each=process: self.close(each)]  # type: ignore[misc]  # likewise
            else:
                moves += [lambda each=process: self.go_on(each)] * 5  # type: ignore[misc]  # likewise
            if rng.random() < 0.15:
                moves += [lambda each=process: self.die(each)]  # type: ignore[misc]  # likewise
        if self.network:
            moves += [self.deliver] * 4
            if rng.random() < 0.2:
                moves += [self.lose]
        if moves:
            rng.choice(moves)()

    # ------------------------------------------------------------------------------------------ what must be true

    def finish(self) -> None:
        """Whatever has happened, the next process alone starts, or is in doubt."""
        self.processes.clear()
        self.losses, doubts = 0.0, self.doubts
        self.spawn()
        (last,) = self.processes
        for _ in range(20):
            if not last.is_live and last in self.processes:
                self.go_on(last)
        assert last.is_live or self.doubts > doubts, "no process can start any more"

    def check(self, *, is_exact: bool = True) -> None:
        """What was acknowledged is stored once; and, where it is exact, every place is, in order, up to the newest."""
        stored = [(each.place, each.producer_id, each.level, each.number) for each in self.service.log]
        for event in self.acknowledged:
            assert stored.count(event) == 1, "acknowledged, and not stored exactly once"
        places = [each.place for each in self.service.log if each.place is not None]
        if is_exact:
            base = places[0] if places else 0
            assert places == list(range(base, base + len(places))), "lost, twice or out of order"
        else:
            assert set(places) == set(range(max(places, default=-1) + 1)), "lost"


def walk(
    seed: int,
    steps: int,
    *,
    mode: PublisherMode = PublisherMode.EXCLUSIVE,
    on_doubt: OnDoubt,
    others: float = 0.0,
    is_high: bool = False,
) -> World:
    """Run a world by chance."""
    rng = random.Random(seed)
    policy = StartPolicy(mode, on_doubt, OnStateLost.FAIL)
    first = PublisherState(7, MAX_OWNER_LEVEL - 3, -1 if rng.random() < 0.5 else 0, is_stamped=True)
    nothing = rng.choice([-1, 0])
    world = World(
        rng,
        policy,
        nothing=nothing,
        keeps_claims=rng.random() < 0.7,
        others=others,
        first=replace(first, start=nothing) if is_high else None,
    )
    for _ in range(steps):
        world.step()
        if on_doubt is OnDoubt.FAIL and world.doubts > 5:
            break
    world.finish()
    return world
