"""Histories of subscriptions that are sought, replayed, paused, drained, and whose events are skipped or parked.

Beside what must hold in every history of subscriptions:

* A seek that returned a partition is stored, and one that raised is not, also not later. Once it is stored, every event
  from there on is processed at least once by calls that began after it, whichever hosts die, move and come; the host
  that stored it delivers next exactly the event that it names; and no checkpoint goes back before the next seek.
* A replay that returned a partition has had each event of its range processed since it was asked for.
* A partition that `pause` returned is given no further call until `resume`, as long as its owner is the same.
* A drain that returned a partition has had all events processed that the partition held at the call.
* An event that is skipped or parked counts as processed from then on, and not before.
"""

from __future__ import annotations

import asyncio
import functools
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eventpump import Park, PartitionContext, ReceivedEvent, RetryOptions
from eventpump.core.checkpoint import DEFAULT_SUBSCRIPTION
from eventpump.errors import ClosedError, ConfigurationError, EventPumpError
from eventpump.eventhubs.events import Checkpoint, EventPosition
from eventpump.reports import EventSkipped, HostReport
from tests.faults.histories.consumer import PROFILES as CONSUMER_PROFILES
from tests.faults.histories.consumer import HistoryHost, on_file
from tests.faults.histories.ledger import Call, Ledger, Place
from tests.faults.histories.manners import Oddity, UnrulyProcessor
from tests.faults.histories.subscribers import (
    NAMES,
    Subscriber,
    SubscribersHistory,
    SubscribersProfile,
    SubscriptionLedger,
)
from tests.faults.histories.world import Life, World, own_paces
from tests.support.inside import owned

_CALLS = {"seek": 4.0, "replay": 2.0, "pause": 1.5, "unpause": 1.5, "drain": 1.0, "subscribe": 2.0}

PROFILES: dict[str, SubscribersProfile] = {
    "calm": SubscribersProfile({**_CALLS, "join": 0.7, "leave": 0.5}),
    "fleet": SubscribersProfile(
        {**_CALLS, "join": 2.0, "leave": 1.0, "crash": 1.5, "freeze": 0.7, "wake": 1.5, "detach": 0.7, "cut": 0.5}
    ),
    "unruly": SubscribersProfile(
        {**_CALLS, "join": 1.0, "leave": 0.7, "crash": 0.5, "detach": 0.5},
        CONSUMER_PROFILES["unruly"].works,
        CONSUMER_PROFILES["asks"].checkpoints,
        hosts=2,
        is_asking=True,
    ),
    "store": SubscribersProfile({**_CALLS, "trouble store": 2.0, "heal": 2.5, "join": 0.7, "leave": 0.5, "crash": 0.5}),
}
"""None has retention or a recreated hub: what a seek stores could not be distinguished from a loss."""


@dataclass(eq=False)
class _Sought:
    """A seek that was asked for: it is stored as a sequence number from `low` to `high`."""

    low: int
    high: int


@dataclass(eq=False)
class Replay:
    """A range that was asked for again, and which of its events were processed since."""

    host: str
    partition_id: str
    first: int
    last: int
    processed: set[int] = field(default_factory=set)


class Rewound(Ledger):
    """What one making of a subscription is judged by, between one seek and the next."""

    name: str = DEFAULT_SUBSCRIPTION
    history: RewindHistory

    def __init__(self, *args: Any, **options: Any) -> None:
        self.sought: defaultdict[str, list[_Sought]] = defaultdict(list)
        self.generations: defaultdict[Place, int] = defaultdict(int)
        """How many seeks were stored."""
        self.replays: list[Replay] = []
        self._passed_over: defaultdict[Place, set[int]] = defaultdict(set)
        """Since the last call: of a stream also events that were in doubt, and are in no call."""
        self._began_in: dict[Call, int] = {}
        self._next: dict[tuple[Place, int], int] = {}
        """By place and epoch: the event that a seek named, until it is delivered."""
        self._start_of: dict[Place, int] = {}
        super().__init__(*args, **options)

    def took(
        self, partition_id: str, epoch: int, asked: Checkpoint, held: Checkpoint | None, *, is_reset: bool
    ) -> None:
        number = asked.sequence_number
        found = [each for each in self.sought[partition_id] if each.low <= number <= each.high]
        if is_reset and found:
            place = (self.making, partition_id)
            self.generations[place] += 1
            shore = self._shores[place]
            shore.required, shore.floor, shore.processed = number + 1, 0, set()
            self._reached[place, epoch] = number
            self._next[place, epoch] = number + 1
            self._start_of[place] = min(number + 1, self._start_of.get(place, 0))
        super().took(partition_id, epoch, asked, held, is_reset=is_reset)

    def begin(self, host: str, partition_id: str, epoch: int, events: tuple[ReceivedEvent, ...]) -> Call:
        place, first = (self.making, partition_id), events[0].sequence_number
        reached = self._reached.get((place, epoch))
        if self.history.is_paused(host, partition_id, self.name):
            self._world.violate(f"partition {partition_id}: {host} delivers {first} although it is paused")
        if self.replay_of(host, partition_id, first) is not None:
            # It may lie before or behind what the epoch has come to, and changes nothing of that.
            stored, starts, self.stored, self._start_of = self.stored, self._start_of, {}, {}
            self._reached[place, epoch] = first - 1
            call = super().begin(host, partition_id, epoch, events)
            self.stored, self._start_of = stored, starts
            if reached is None:
                del self._reached[place, epoch]
            else:
                # One that follows on what was delivered may be no replay yet: the next batch, which began before it.
                self._reached[place, epoch] = max(reached, call.numbers[-1] if first <= reached + 1 else -1)
        else:
            wanted = self._next.get((place, epoch))
            while wanted is not None and (not self.is_for(wanted) or wanted in self._passed_over[place]):
                wanted += 1
            if wanted is not None and not self._may_be_first(first, wanted):
                self._world.violate(f"partition {partition_id}: {first} is delivered, and the seek was to {wanted}")
            self._next.pop((place, epoch), None)
            call = super().begin(host, partition_id, epoch, events)
            self._called(place)
        self._began_in[call] = self.generations[call.place]
        return call

    def _may_be_first(self, number: int, wanted: int) -> bool:
        """Return whether the first event after a seek may be this one, and not the one that the seek named."""
        return number == wanted

    def _called(self, place: Place) -> None:
        """Forget, at a call, what was passed over before it."""
        self._passed_over[place].clear()

    def replay_of(self, host: str, partition_id: str, number: int) -> Replay | None:
        """Return the replay that an event may be delivered for."""
        for each in self.replays:
            if (each.host, each.partition_id) == (host, partition_id) and each.first <= number <= each.last:
                return each
        return None

    def ok(self, call: Call) -> None:
        self._processed(call.host, call.place[1], call.numbers)
        if self._is_of_now(call):
            super().ok(call)
        else:
            call.is_running = False
            self._world.note("ok, before a seek", call.host)

    def claim(self, call: Call, last: int) -> None:
        if self._is_of_now(call):
            super().claim(call, last)

    def passed_over(self, place: Place) -> set[int]:
        return self._passed_over[place]

    def passed(self, host: str, partition_id: str, number: int) -> None:
        """Record that an event was skipped or parked."""
        self._processed(host, partition_id, (number,))
        self._passed_over[self.making, partition_id].add(number)
        self._shores[self.making, partition_id].processed.add(number)

    def _is_of_now(self, call: Call) -> bool:
        return self._began_in[call] == self.generations[call.place]

    def _processed(self, host: str, partition_id: str, numbers: Sequence[int]) -> None:
        for replay in self.replays:
            if (replay.host, replay.partition_id) == (host, partition_id):
                replay.processed.update(numbers)


class _DefaultLedger(Rewound):
    def __init__(self, history: RewindHistory) -> None:
        self.history = history
        super().__init__(history.world, history.hub, history.start)


class _NamedLedger(Rewound, SubscriptionLedger):
    def __init__(self, history: RewindHistory, name: str, *args: Any) -> None:
        self.history, self.name = history, name
        super().__init__(*args)


class Seeking(UnrulyProcessor):
    """User code that now and then seeks from within its call."""

    history: RewindHistory
    name = DEFAULT_SUBSCRIPTION

    async def process_events(self, context: PartitionContext, events: Sequence[ReceivedEvent]) -> None:
        await super().process_events(context, events)
        if not self._manners.is_good.is_set() and self._rng.random() < 0.02:
            ledger = self.history.ledger_named(self.name)
            if ledger is not None:
                number = self._rng.randint(0, events[-1].sequence_number + 1)
                self._world.note("context.seek", context.owner_id, context.partition_id, self.name, number)
                ledger.sought[context.partition_id].append(_Sought(number - 1, number - 1))
                context.seek(EventPosition.at_sequence_number(number, inclusive=True))


class SeekingSubscriber(Seeking, Subscriber):
    """The same, of a subscription."""

    def __init__(self, history: RewindHistory, *args: Any) -> None:
        super().__init__(*args)
        self.history, self.name = history, args[-1]


class RewindHistory(SubscribersHistory):
    """One history of subscriptions that are sought, replayed, paused and drained."""

    ledger: _DefaultLedger
    by_name: dict[str, SubscriptionLedger]

    def __init__(self, world: World, profile: SubscribersProfile, directory: Path | None) -> None:
        super().__init__(world, profile, directory)
        self.ledger = _DefaultLedger(self)
        self._paused: dict[tuple[str, str, str], Any] = {}
        """By host, partition and subscription: the pump that is paused."""
        rng = world.rng
        for name, options in self.options_of.items():
            parking = Park(functools.partial(self._park, name))
            ceiling: Any = {"handler_retry": RetryOptions(max_retries=rng.choice((0, 2)))}
            chosen = rng.choice(
                (
                    {},
                    {"failure_policy": "skip"},
                    {"failure_policy": parking},
                    {**ceiling, "on_retries_exhausted": "skip"},
                    {**ceiling, "on_retries_exhausted": parking},
                )
            )
            world.note("policy", name, sorted(chosen))
            options.update(chosen)
        self._parks = world.stream("parking")

    # ----------------------------------------------------------------------------------------------- what is known

    def make_ledger(self, name: str, *args: Any) -> SubscriptionLedger:
        return _NamedLedger(self, name, *args)

    def ledger_named(self, name: str) -> Rewound | None:
        """Return the ledger of a subscription; None where there is no record of it."""
        if name == DEFAULT_SUBSCRIPTION:
            return self.ledger
        ledger = self.by_name.get(name)
        assert ledger is None or isinstance(ledger, Rewound)
        return ledger

    def is_paused(self, host: str, partition_id: str, name: str) -> bool:
        """Return whether a pump, the one that would call user code now, is paused."""
        pump = self._paused.get((host, partition_id, name))
        return pump is not None and pump is self._pump(host, partition_id, name)

    def _pump(self, host: str, partition_id: str, name: str) -> Any:
        member = next(each for each in self.hosts if each.life.name == host)
        slot = owned(member.host, partition_id)
        return None if slot is None else slot.pumps.get(name)

    def processor(self, life: Life) -> UnrulyProcessor | None:
        if super().processor(life) is None:
            return None
        processor = Seeking(self.world, life, self.ledger, self.manners)
        processor.history = self
        return processor

    def subscriber(self, *args: Any) -> Subscriber:
        return SeekingSubscriber(self, *args)

    def _reported(self, host: HistoryHost, report: HostReport) -> None:
        if isinstance(report, EventSkipped):
            ledger = self.ledger_named(str(report.subscription))
            if ledger is not None:
                assert report.partition_id is not None
                assert report.sequence_number is not None
                ledger.passed(host.life.name, report.partition_id, report.sequence_number)
        super()._reported(host, report)

    async def _park(self, name: str, context: PartitionContext, event: ReceivedEvent, error: Exception) -> None:
        """Store an event elsewhere, as user code that fails now and then."""
        rng = self._parks
        if rng.random() < 0.3:
            await asyncio.sleep(rng.uniform(0.0, 2.0))
        if not self.is_ending and rng.random() < 0.2:
            raise rng.choice((RuntimeError("not parked"), Oddity("not parked")))
        ledger = self.ledger_named(name)
        if ledger is not None:
            ledger.passed(context.owner_id, context.partition_id, event.sequence_number)

    # ------------------------------------------------------------------------------------------------ what happens

    def _ask(self, work: Any) -> None:
        """Ask something of one host, in its process, for one subscription."""
        if self._living:
            rng = self.world.rng
            host, name = rng.choice(self._living), rng.choice((DEFAULT_SUBSCRIPTION, *NAMES))
            stream = random.Random(rng.getrandbits(64))
            self._spawn(host, self._asked(work, host, name, stream))

    async def _asked(self, work: Any, host: HistoryHost, name: str, rng: random.Random) -> None:
        ledger = self.ledger_named(name)
        if ledger is None or host.host.is_closed:
            return
        try:
            await work(host, name, ledger, rng)
        except ConfigurationError as error:
            if "has no processor" not in str(error) and "waits until the code" not in str(error):
                raise
        except (ClosedError, EventPumpError) as error:
            self.world.note("refused", host.life.name, name, repr(error)[:120])

    async def seek(self) -> None:
        self._ask(self._seek)

    async def _seek(
        self, host: HistoryHost, name: str, ledger: Rewound, rng: random.Random, partition_id: str | None = None
    ) -> tuple[str, ...]:
        partition_id = partition_id or rng.choice(self.hub.partition_ids)
        place, end = (ledger.making, partition_id), ledger.end(partition_id)
        position: Any
        if (kind := rng.choice(("number", "number", "earliest", "latest"))) == "number":
            number = rng.randint(0, end)
            position, sought = EventPosition.at_sequence_number(number, inclusive=True), _Sought(number - 1, number - 1)
        else:
            position, sought = kind, _Sought(-1, -1) if kind == "earliest" else _Sought(end - 1, 1 << 60)
        before = ledger.generations[place]
        ledger.sought[partition_id].append(sought)
        self.world.note("seek", host.life.name, name, partition_id, position)
        try:
            done = await host.host.seek(name, position, [partition_id])
        except EventPumpError:
            ledger.sought[partition_id].remove(sought)
            raise
        self.world.note("sought", host.life.name, name, done)
        if partition_id in done and ledger.generations[place] == before:
            self.world.violate(f"{name}: partition {partition_id}: seek returned, and nothing is stored")
        return done

    async def replay(self) -> None:
        self._ask(self._replay)

    async def _replay(
        self, host: HistoryHost, name: str, ledger: Rewound, rng: random.Random, partition_id: str | None = None
    ) -> tuple[str, ...]:
        partition_id = partition_id or rng.choice(self.hub.partition_ids)
        if not (end := ledger.end(partition_id)):
            return ()
        first = rng.randint(0, end - 1)
        replay = Replay(host.life.name, partition_id, first, rng.randint(first, min(end - 1, first + 30)))
        ledger.replays.append(replay)
        self.world.note("replay", host.life.name, name, partition_id, replay.first, replay.last)
        try:
            done = await host.host.replay(name, from_=replay.first, to=replay.last, partition_ids=[partition_id])
        finally:
            ledger.replays.remove(replay)
        self.world.note("replayed", host.life.name, name, done)
        asked = set(filter(ledger.is_for, range(first, replay.last + 1)))
        if partition_id in done and (missing := asked - replay.processed):
            self.world.violate(f"{name}: partition {partition_id}: replay returned, without {sorted(missing)}")
        return done

    async def pause(self) -> None:
        self._ask(self._pause)

    async def _pause(self, host: HistoryHost, name: str, ledger: Rewound, rng: random.Random) -> None:
        for partition_id in host.host.pause(name):
            self._paused[host.life.name, partition_id, name] = self._pump(host.life.name, partition_id, name)
        self.world.note("paused", host.life.name, name)

    async def unpause(self) -> None:
        self._ask(self._unpause)

    async def _unpause(self, host: HistoryHost, name: str, ledger: Rewound, rng: random.Random) -> None:
        for partition_id in self.hub.partition_ids:
            self._paused.pop((host.life.name, partition_id, name), None)
        host.host.resume(name)
        self.world.note("resumed", host.life.name, name)

    async def drain(self) -> None:
        self._ask(self._drain)

    async def _drain(
        self, host: HistoryHost, name: str, ledger: Rewound, rng: random.Random, partition_id: str | None = None
    ) -> tuple[str, ...]:
        before = {each: (ledger.end(each), ledger.generations[ledger.making, each]) for each in self.hub.partition_ids}
        self.world.note("drain", host.life.name, name)
        done = await host.host.drain(name)
        self.world.note("drained", host.life.name, name, done)
        for partition_id in done:
            end, generation = before.get(partition_id, (0, 0))
            place = (ledger.making, partition_id)
            if ledger.generations[place] == generation and (missing := ledger.missing(place, end)):
                self.world.violate(f"{name}: partition {partition_id}: drain returned, without {sorted(missing)}")
        return done

    async def _end_faults(self) -> None:
        await super()._end_faults()
        for host in self._living:
            for name in (DEFAULT_SUBSCRIPTION, *NAMES):
                ledger = self.ledger_named(name)
                if ledger is not None:
                    self._spawn(host, self._asked(self._unpause, host, name, random.Random(0)))


async def rewind_history(world: World, size: int) -> None:
    """Live one history of such subscriptions. Its profile is the part of its kind behind the colon."""
    name = world.kind.partition(":")[2]
    world.note("profile", name)
    with on_file(world, is_wanted=name == "store") as directory, own_paces():
        await RewindHistory(world, PROFILES[name], directory).run(size)
