"""A partition that is published to idempotently: service, network and application, simulated around one sequencer.

The service follows protocol.md 8.2 and 8.5, written down here a second time, apart from the emulator's ledger; where
sources disagree, a world has it one way or the other. The application publishes an endless row of events; one that was
refused is replaced by another of the same place, so that a number used twice for different events shows.
"""

from __future__ import annotations

import enum
import itertools
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from eventpump.core.sequencer import (
    AttachRequest,
    Failure,
    Outcome,
    PartitionSequencer,
    Publication,
    SequencerInput,
    SequencerState,
    Step,
)
from eventpump.eventhubs.numbering import NUMBERS, advance

Event = tuple[int, int]
"""Its place in the application's row, and which one of that place it is. A rival's have negative places."""
Batch = tuple[Event, ...]

PRODUCER_ID = 7
LEVEL = 3


class Answer(enum.Enum):
    """What the service says of a transfer."""

    ACCEPTED = "accepted"
    OUT_OF_ORDER = "out of order"
    FENCED = "fenced"
    TOO_LARGE = "too large"


@dataclass(frozen=True)
class Transfer:
    """A batch under way."""

    producer_id: int
    level: int
    first: int
    events: Batch


@dataclass
class Ledger:
    """What the service keeps of one producer."""

    level: int
    last: int
    is_fresh: bool
    recent: deque[tuple[int, int]]


@dataclass
class Service:
    """One partition of it.

    Args:
        nothing: The number answered where nothing is published, -1 or 0.
        look_back: How many batches a repeat is recognised among; 0 refuses repeats.
        keeps_claims: Whether a number given to a fresh producer is answered to the next attach too.
    """

    nothing: int
    look_back: int
    keeps_claims: bool
    log: list[Event] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    too_large: set[Batch] = field(default_factory=set)
    producers: dict[int, Ledger] = field(default_factory=dict)

    def add(self, producer_id: int, level: int, last: int | None) -> None:
        standing = self.nothing if last is None else last
        self.producers[producer_id] = Ledger(level, standing, last is None, deque(maxlen=self.look_back))

    def attach(self, asked: AttachRequest) -> tuple[int, int, int] | None:
        """Answer an attach; None where it is fenced."""
        if asked.producer_id is None:
            self.add(PRODUCER_ID, asked.owner_level or 0, None)
        producer_id = asked.producer_id or PRODUCER_ID
        known = self.producers[producer_id]
        level = known.level if asked.owner_level is None else asked.owner_level
        if level < known.level:
            return None
        if level > known.level:
            self.add(producer_id, level, None)
            known = self.producers[producer_id]
        if asked.number is None:
            return producer_id, level, known.last
        if known.is_fresh and self.keeps_claims:
            known.last = asked.number
        return producer_id, level, asked.number

    def take(self, transfer: Transfer) -> Answer:
        """Store a transfer, or not."""
        if transfer.events in self.too_large:
            return Answer.TOO_LARGE
        known = self.producers[transfer.producer_id]
        if transfer.level < known.level:
            return Answer.FENCED
        assert transfer.level == known.level
        batch = (transfer.first, len(transfer.events))
        if not known.is_fresh and transfer.first != (known.last + 1) % NUMBERS:
            return Answer.ACCEPTED if batch in known.recent else Answer.OUT_OF_ORDER
        known.is_fresh = False
        known.last = (transfer.first + len(transfer.events) - 1) % NUMBERS
        known.recent.append(batch)
        for place, event in enumerate(transfer.events):
            self.log.append(event)
            self.numbers.append((transfer.first + place) % NUMBERS)
        return Answer.ACCEPTED


class Observed(PartitionSequencer[Batch]):
    """A sequencer that notes which transitions were made."""

    seen: set[tuple[SequencerState, SequencerInput]]

    def _move(self, happened: SequencerInput) -> None:
        before = self.state
        super()._move(happened)
        self.seen.add((before, happened))


class World:
    """Everything, and what must be true of it whatever happens.

    Args:
        last: The number published last by an earlier life under the id and level given; None for a new producer.
        is_claimed: Whether that number is given at the first attach, instead of asked for.
        off_by: How far the number given is off the truth.
        is_raised: Whether the first life raises the level with that number.
    """

    def __init__(
        self,
        *,
        last: int | None = None,
        is_claimed: bool = False,
        off_by: int = 0,
        is_raised: bool = False,
        nothing: int = 0,
        look_back: int = 5,
        keeps_claims: bool = True,
    ) -> None:
        self.service = Service(nothing, look_back, keeps_claims)
        self.seen: set[tuple[SequencerState, SequencerInput]] = set()
        self.generations: dict[int, int] = {}
        self.base: int | None = None
        """The number of the application's first event."""
        self.cursor = 0
        """How many of its events the application knows to be published."""
        self.publication: Publication[Batch] | None = None
        self.out: Transfer | None = None
        self.held: list[Transfer] = []
        self.stamped: dict[int, Event] = {}
        """Which event a number was sent with, unless the service refused it."""
        self.is_shared = is_claimed and off_by != 0
        """Whether another process uses our numbers."""
        self.is_superseded = False
        self.is_raised = is_raised
        self.has_former = False
        """Whether transfers of a former life may still arrive under our level."""
        if last is None:
            self.sequencer = self._start()
        else:
            self.service.add(PRODUCER_ID, LEVEL, last)
            number = last if is_raised else (last + off_by) % NUMBERS if is_claimed else None
            self.sequencer = self._start(producer_id=PRODUCER_ID, owner_level=LEVEL + is_raised, starting_number=number)

    def _start(
        self,
        *,
        producer_id: int | None = None,
        owner_level: int | None = None,
        starting_number: int | None = None,
    ) -> Observed:
        sequencer = Observed("0", producer_id=producer_id, owner_level=owner_level, starting_number=starting_number)
        sequencer.seen = self.seen
        self.is_new = True
        return sequencer

    def event(self, place: int) -> Event:
        return place, self.generations.get(place, 0)

    # ------------------------------------------------------------------------------------------ what may happen now

    @property
    def state(self) -> SequencerState:
        return self.sequencer.state

    @property
    def is_failed(self) -> bool:
        return self.sequencer.failure is not None

    @property
    def may_offer(self) -> bool:
        # After a restart the application does not know what comes next before the service has said so.
        return not self.is_failed and self.publication is None and not (self.is_new and self.base is not None)

    @property
    def may_attach(self) -> bool:
        return self.sequencer.step is Step.ATTACH

    @property
    def may_send(self) -> bool:
        return self.sequencer.step is Step.SEND

    @property
    def is_out(self) -> bool:
        return self.out is not None

    @property
    def may_withdraw(self) -> bool:
        return self.publication is not None

    @property
    def may_deliver(self) -> bool:
        # Between the reading of the number and the raise nothing of the former life is stored: the start has seen that.
        return bool(self.held) and not (self.is_new and self.is_raised)

    @property
    def may_restart(self) -> bool:
        known = self.service.producers.get(PRODUCER_ID)
        if known is None or (known.is_fresh and not self.service.keeps_claims and known.level > 0):
            # The number a level was raised with is known only to the former process: it must be in its saved state.
            return False
        return (
            not self.is_shared
            and not self.is_superseded
            and self.base is not None
            and not self.is_new
            and known.level == self.sequencer.owner_level
        )

    @property
    def is_published_to(self) -> bool:
        return PRODUCER_ID in self.service.producers and not self.is_new

    # ------------------------------------------------------------------------------------------ the application

    def offer(self, count: int) -> None:
        """Send a batch."""
        batch = tuple(self.event(self.cursor + place) for place in range(count))
        self.publication = self.sequencer.offer(batch, count)

    def withdraw(self) -> None:
        """Cancel the call, or let it run out of retries."""
        assert self.publication is not None
        outcome = self.sequencer.withdraw(self.publication)
        assert outcome is self.publication.outcome
        assert outcome is not Outcome.PENDING
        self._look()

    def restart(self, *, is_raised: bool, is_stored_late: bool) -> None:
        """Die, and start again with the id, under the same level or the next; go on from what the service says."""
        if self.out is not None:
            self._lose(is_stored_late)
        self.has_former = not is_raised and (self.has_former or bool(self.held))
        producer_id, level = self.sequencer.producer_id, self.sequencer.owner_level
        assert level is not None
        number: int | None = None
        self.is_raised = is_raised
        if is_raised:
            answer = self.service.attach(AttachRequest(producer_id, level))
            assert answer is not None
            number, level = None if answer[2] < 0 else answer[2], level + 1
        self.sequencer = self._start(producer_id=producer_id, owner_level=level, starting_number=number)
        self.publication = None

    # ------------------------------------------------------------------------------------------ the network

    def attach(self, *, is_answered: bool = True, is_heard: bool = True) -> None:
        """Attach a link. Where it is not answered, the service may have heard of it or not."""
        asked = self.sequencer.attach_request
        if not is_heard:
            return
        answer = self.service.attach(asked)
        if not is_answered:
            return
        if answer is None:
            assert self.is_superseded
            self.sequencer.fenced("stolen", transfer_refused=False)
        else:
            self.sequencer.attached(*answer)
            if self.is_new and not self.is_failed:
                self._counted()
        self._look()

    def _counted(self) -> None:
        self.is_new = False
        last = self.sequencer.last_number
        assert last is not None
        if self.base is None:
            self.base = advance(last)
            return
        stored = (last + 1 - self.base) % NUMBERS
        assert stored >= self.cursor, "something published is not there any more"
        self.cursor = stored

    def send(self) -> None:
        """Hand the head's bytes to the link."""
        assert self.publication is not None
        assert self.publication is self.sequencer.head
        assert self.out is None
        first = self.sequencer.sending()
        sequencer = self.sequencer
        assert sequencer.producer_id is not None
        assert sequencer.owner_level is not None
        for place, event in enumerate(self.publication.batch):
            number = (first + place) % NUMBERS
            assert self.stamped.setdefault(number, event) == event, "a number was given to two different events"
        self.out = Transfer(sequencer.producer_id, sequencer.owner_level, first, self.publication.batch)

    def _taken(self) -> Transfer:
        assert self.out is not None
        transfer, self.out = self.out, None
        return transfer

    def arrive(self) -> None:
        """Let the transfer reach the service, and its answer reach us."""
        match self.service.take(self._taken()):
            case Answer.ACCEPTED:
                self.sequencer.accepted()
            case Answer.OUT_OF_ORDER:
                self.sequencer.refused_out_of_order()
            case Answer.FENCED:
                self.sequencer.fenced("stolen", transfer_refused=True)
            case Answer.TOO_LARGE:
                self.sequencer.refused_as_too_large()
        self._look()

    def shrink(self) -> None:
        """Let the service take no message of this size any more, and the transfer reach it."""
        assert self.out is not None
        self.service.too_large.add(self.out.events)
        self.arrive()

    def refuse(self, *, for_now: bool) -> None:
        """Let the service refuse the transfer for a reason of another kind."""
        self._taken()
        if for_now:
            self.sequencer.refused_for_now()
        else:
            self.sequencer.refused()
        self._look()

    def lose(self, *, is_stored: bool) -> None:
        """Lose the link before the transfer is stored, or its answer afterwards."""
        transfer = self._taken()
        if is_stored:
            self.service.take(transfer)
        self.sequencer.detached()
        self._look()

    def hold(self) -> None:
        """Give up waiting for a transfer that arrives later, or never."""
        self.held.append(self._taken())
        self.sequencer.outcome_unknown()
        self._look()

    def _lose(self, is_stored_late: bool) -> None:
        transfer = self._taken()
        if is_stored_late:
            self.held.append(transfer)

    def deliver(self, which: int) -> None:
        """Let a transfer of an ended link reach the service. Its answer is dropped."""
        self.service.take(self.held.pop(which % len(self.held)))
        self._look()

    def detach(self) -> None:
        """Lose the link while nothing is out."""
        self.sequencer.detached()
        self._look()

    # ------------------------------------------------------------------------------------------ others

    def supersede(self) -> None:
        """Let another publisher raise the level of our id, and publish."""
        known = self.service.producers[PRODUCER_ID]
        answer = self.service.attach(AttachRequest(PRODUCER_ID, known.level + 1))
        assert answer is not None
        self.is_superseded = True
        # Its events are not ours to count.
        known = self.service.producers[PRODUCER_ID]
        known.is_fresh = False
        known.last = advance(known.last, 4)

    def steal_link(self) -> None:
        """Let the service end our link because of it."""
        if self.out is not None:
            self.held.append(self._taken())
        self.sequencer.fenced("stolen", transfer_refused=False)
        self._look()

    def share(self, count: int) -> None:
        """Let another publisher use our id, level and numbers."""
        known = self.service.producers[PRODUCER_ID]
        self.is_shared = True
        events = tuple((-1, len(self.service.log) + place) for place in range(count))
        taken = self.service.take(Transfer(PRODUCER_ID, known.level, advance(known.last), events))
        assert taken is Answer.ACCEPTED

    # ------------------------------------------------------------------------------------------ what must be true

    def _look(self) -> None:
        """Record the outcome of the batch, and check what is guaranteed about it."""
        publication = self.publication
        if publication is not None:
            batch = publication.batch
            if publication.outcome is Outcome.PUBLISHED:
                assert publication.last is not None
                stored = set(self.service.log)
                missing = [event for event in batch if event not in stored]
                if missing:
                    assert self.is_shared, "published, but not stored"
                    where = [self.service.numbers[at] for at, (place, _) in enumerate(self.service.log) if place < 0]
                    assert publication.last in where, "published, though no process used its numbers"
                self.cursor += publication.count
                self.publication = None
            elif publication.outcome is Outcome.REFUSED:
                assert publication.first is None
                if not self.has_former:
                    level = self.sequencer.owner_level
                    late = [each.events for each in self.held if each.level == level]
                    on_the_way = {event for each in late if each not in self.service.too_large for event in each}
                    assert not on_the_way & set(batch), "refused, but it may still arrive"
                    assert not set(batch) & set(self.service.log), "refused, but stored"
                    for place, _ in batch:
                        self.generations[place] = self.generations.get(place, 0) + 1
                    for number in [each for each, event in self.stamped.items() if event in batch]:
                        del self.stamped[number]
                self.publication = None
            else:
                assert self.sequencer.head is publication
        self.check()

    def check(self) -> None:
        """No loss, no duplicate, no reorder; and the sequencer agrees with itself."""
        ours = [event for event in self.service.log if event[0] >= 0]
        if self.is_shared:
            assert all(before[0] < after[0] for before, after in itertools.pairwise(ours)), "not in order"
        else:
            assert ours == [self.event(place) for place in range(len(ours))], "lost, twice or out of order"
            assert len(ours) >= self.cursor, "published, but not stored"
            assert self.sequencer.failure is not Failure.FENCED or self.is_superseded
        if self.publication is None:
            assert self.sequencer.head is None
        elif self.is_failed:
            assert self.publication.outcome is Outcome.UNKNOWN
        assert (self.sequencer.step is Step.WAIT) == self.is_out

    def finish(self) -> None:
        """Let everything go well from now on: doubt ends, and nothing is left over."""
        if self.publication is not None and self.state is not SequencerState.OVERSIZED:
            self.service.too_large.discard(self.publication.batch)
        for _ in range(12):
            if self.is_out:
                self.arrive()
            elif self.may_attach:
                self.attach()
            elif self.may_send:
                self.send()
            elif self.may_restart and self.is_failed:
                # Numbers of a former life that arrived late, counted in by the next.
                assert self.has_former or not self.service.look_back
                self.restart(is_raised=False, is_stored_late=False)
            else:
                break
        if self.is_superseded or self.is_shared:
            return
        assert self.publication is None
        assert not self.is_failed
        assert self.sequencer.step in (Step.REST, Step.ATTACH)
        if self.has_former:
            return
        assert len(self.service.log) == self.cursor, "something is stored that is not accounted for"
        while self.held:
            self.deliver(0)
        assert len(self.service.log) == self.cursor, "something arrived late and was stored again"

    # ------------------------------------------------------------------------------------------ by chance

    def step(self, rng: random.Random) -> None:
        """Let one thing happen."""
        moves: list[Callable[[], None]] = []
        if self.may_offer:
            moves += [lambda: self.offer(rng.randint(1, 3))] * 4
        if self.may_attach:
            moves += [self.attach] * 6
            moves += [lambda: self.attach(is_answered=False, is_heard=rng.random() < 0.5)]
        if self.may_send:
            moves += [self.send] * 6
        if self.is_out:
            moves += [self.arrive] * 4 + [self.hold] * 2 + [self.shrink]
            moves += [lambda: self.refuse(for_now=rng.random() < 0.6), lambda: self.lose(is_stored=rng.random() < 0.5)]
        else:
            moves += [self.detach]
        if self.may_withdraw:
            moves += [self.withdraw]
        if self.may_deliver:
            moves += [lambda: self.deliver(rng.randrange(9))] * 2
        if self.may_restart and (self.is_failed or rng.random() < 0.1):
            is_raised = self.service.keeps_claims and rng.random() < 0.5
            moves += [lambda: self.restart(is_raised=is_raised, is_stored_late=rng.random() < 0.5)]
        if self.is_published_to and rng.random() < 0.03:
            moves += [lambda: self.share(rng.randint(1, 3)), self.supersede]
        if self.is_superseded:
            moves += [self.steal_link]
        rng.choice(moves)()


def walk(seed: int, steps: int) -> set[tuple[SequencerState, SequencerInput]]:
    """Run a world by chance.

    Returns:
        The transitions made.
    """
    rng = random.Random(seed)
    last = rng.choice([None, 5, NUMBERS - 1, NUMBERS - 3])
    keeps_claims = rng.random() < 0.7
    world = World(
        last=last,
        is_claimed=last is not None and rng.random() < 0.4,
        off_by=rng.choice([0, 0, 0, -2, 1]),
        is_raised=last is not None and rng.random() < 0.2,
        nothing=rng.choice([-1, 0]),
        look_back=rng.choice([0, 1, 5]),
        keeps_claims=keeps_claims,
    )
    for _ in range(steps):
        world.step(rng)
    world.finish()
    return world.seen
