"""Histories of keyed processors that are sought, replayed, paused and drained, also by their own handlers.

Beside what must hold of keyed processors (`keyed`) and of such calls (`rewinds`), in one:

* After a seek the events of each key come in order, and none that was processed since it was stored comes again under
  the same epoch, whichever keys ran, waited for an attempt or were parked when it came.
* A replay delivers nothing outside of its range, the events of a key in order, and each once; what is processed for a
  replay counts for no checkpoint, and what lies ahead of the position is delivered afterwards nevertheless.
* A seek, replay or drain that a handler calls for its own partition is refused at once, directly, through a task,
  `wait_for` or a thread. One of a task that it left over has returned or raised in the end, as any other has.
"""

from __future__ import annotations

import asyncio
import functools
import random
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eventpump import PartitionContext, ReceivedEvent
from eventpump.core.checkpoint import DEFAULT_SUBSCRIPTION
from eventpump.errors import ConfigurationError, EventPumpError
from eventpump.eventhubs.events import Checkpoint
from eventpump.reports import HostReport, PumpClosed
from tests.faults.histories.callbacks import AT_ONCE, CALLS, WAYS, in_way
from tests.faults.histories.consumer import HistoryHost
from tests.faults.histories.keyed import (
    PROFILES as KEYED_PROFILES,
)
from tests.faults.histories.keyed import (
    KeyedLedger,
    KeyedSubscriptionLedger,
    Unruly,
    UnrulyKeyed,
    UnrulySubscriber,
    keyed_bounds,
    keyed_policies,
    named_policies,
)
from tests.faults.histories.ledger import Call, Place
from tests.faults.histories.rewinds import PROFILES as REWINDS_PROFILES
from tests.faults.histories.rewinds import Replay, RewindHistory, Rewound, Seeking, SeekingSubscriber
from tests.faults.histories.subscribers import NAMES, SubscribersProfile, SubscriptionLedger
from tests.faults.histories.world import Life, World, own_paces
from tests.support.inside import partition_read

_KEYED = KEYED_PROFILES["unruly"]
_CALM = REWINDS_PROFILES["calm"]

PROFILES: dict[str, SubscribersProfile] = {
    "rewinds": SubscribersProfile(
        {**_CALM.actions, "crash": 0.5, "detach": 0.5},
        {"quick": 5.0, "slow": 5.0, "raise": 0.7},
        _KEYED.checkpoints,
        is_asking=True,
    ),
    "rewinds-fleet": SubscribersProfile(
        REWINDS_PROFILES["fleet"].actions, {"quick": 5.0, "slow": 5.0, "raise": 0.7, "deaf": 0.1}, _KEYED.checkpoints
    ),
    "rewinds-unruly": SubscribersProfile(
        REWINDS_PROFILES["unruly"].actions, _KEYED.works, _KEYED.checkpoints, hosts=2, is_asking=True, compute=0.2
    ),
}


@dataclass(eq=False)
class _Replayed:
    """What came in one replay.

    Attributes:
        ok: What was processed.
        reached: How far each key came.
        passed: What was skipped or parked.
    """

    ok: defaultdict[tuple[Place, int], set[int]] = field(default_factory=lambda: defaultdict(set))
    reached: dict[tuple[Place, int, Hashable], int] = field(default_factory=dict)
    passed: defaultdict[Place, set[int]] = field(default_factory=lambda: defaultdict(set))


class _KeyedRewound(Rewound, KeyedLedger):
    """What a keyed processor is judged by, between one seek and the next, and in replays."""

    history: KeyedRewindHistory

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._of_replay: dict[Call, Replay] = {}
        self._replayed: defaultdict[Replay, _Replayed] = defaultdict(_Replayed)
        self._overlapping: set[Replay] = set()
        """Those that were asked for at the same time: which of them an event came for cannot be said."""

    def took(
        self, partition_id: str, epoch: int, asked: Checkpoint, held: Checkpoint | None, *, is_reset: bool
    ) -> None:
        place = (self.making, partition_id)
        before = self.generations[place]
        super().took(partition_id, epoch, asked, held, is_reset=is_reset)
        if self.generations[place] != before:
            where = (place, epoch)
            self._ok.pop(where, None)
            self._begun_at.pop(where, None)
            for at in [each for each in self._reached_of_key if each[:2] == where]:
                del self._reached_of_key[at]
            self._passed_over[place].clear()

    def begin(self, host: str, partition_id: str, epoch: int, events: tuple[ReceivedEvent, ...]) -> Call:
        replay = self.replay_of(host, partition_id, events[0].sequence_number)
        if replay is None:
            if self._is_replaying(host, partition_id):
                numbers = [event.sequence_number for event in events]
                self._world.violate(f"partition {partition_id}: {host} replays {numbers}, which nothing asked for")
            return super().begin(host, partition_id, epoch, events)
        if (last := events[-1].sequence_number) > replay.last:
            self._world.violate(f"partition {partition_id}: {last} is replayed, and the range ends at {replay.last}")
        replays = self._replays_of(host, partition_id)
        if len(replays) > 1:
            self._overlapping.update(replays)
        replayed = _Replayed() if replay in self._overlapping else self._replayed[replay]
        kept: Any = self._ok, self._reached_of_key, self._passed_over, self._begun_at
        self._ok, self._reached_of_key, self._passed_over = replayed.ok, replayed.reached, replayed.passed
        self._begun_at = {((self.making, partition_id), epoch): -1}
        try:
            call = super().begin(host, partition_id, epoch, events)
        finally:
            self._ok, self._reached_of_key, self._passed_over, self._begun_at = kept
        self._of_replay[call] = replay
        return call

    def replay_of(self, host: str, partition_id: str, number: int) -> Replay | None:
        return super().replay_of(host, partition_id, number) if self._is_replaying(host, partition_id) else None

    def ok(self, call: Call) -> None:
        replay = self._of_replay.pop(call, None)
        if replay is None:
            super().ok(call)
            return
        # It counts for no checkpoint: what lies ahead of the position comes again.
        call.is_running = False
        self._world.note("ok, replayed", call.host, call.numbers)
        self._processed(call.host, call.place[1], call.numbers)
        self._replayed[replay].ok[call.place, call.epoch].update(call.numbers)

    def passed(self, host: str, partition_id: str, number: int) -> None:
        if not self._is_replaying(host, partition_id):
            super().passed(host, partition_id, number)
            return
        self._processed(host, partition_id, (number,))
        for replay in self._replays_of(host, partition_id):
            self._replayed[replay].passed[self.making, partition_id].add(number)

    def _processed(self, host: str, partition_id: str, numbers: Sequence[int]) -> None:
        if self._is_replaying(host, partition_id):
            super()._processed(host, partition_id, numbers)

    def _is_replaying(self, host: str, partition_id: str) -> bool:
        return self.history.is_replaying(host, partition_id, self.name)

    def _replays_of(self, host: str, partition_id: str) -> list[Replay]:
        return [each for each in self.replays if (each.host, each.partition_id) == (host, partition_id)]

    def _called(self, place: Place) -> None:
        """Keep what was passed over: other keys come to it later."""


class _DefaultLedger(_KeyedRewound):
    def __init__(self, history: KeyedRewindHistory) -> None:
        self.history = history
        super().__init__(history.world, history.hub, history.start, **history.limits_of(DEFAULT_SUBSCRIPTION))


class _NamedLedger(_KeyedRewound, KeyedSubscriptionLedger):
    def __init__(self, history: KeyedRewindHistory, name: str, *args: Any) -> None:
        self.history, self.name = history, name
        super().__init__(*args, **history.limits_of(name))

    def _may_be_first(self, number: int, wanted: int) -> bool:
        # One of which it is in doubt whether it belongs to the stream holds up only its key.
        return number >= wanted if self.part is not None else super()._may_be_first(number, wanted)


class _Calling(Unruly, Seeking):
    """A handler that calls its host."""

    history: KeyedRewindHistory

    async def _process(self, context: PartitionContext, events: Sequence[ReceivedEvent], call: Call) -> None:
        if not self._manners.is_good.is_set() and self._rng.random() < 0.05:
            await self.history.call_back(self._life, context, self.name, random.Random(self._rng.getrandbits(64)))
        await super()._process(context, events, call)


class _CallingSubscriber(_Calling, UnrulySubscriber, SeekingSubscriber):
    """The same, of a subscription."""


class KeyedRewindHistory(RewindHistory):
    """One history of keyed processors that are sought, replayed, paused and drained."""

    def __init__(self, world: World, profile: SubscribersProfile, directory: Path | None) -> None:
        rng = world.stream("keyed")
        self.bounds = {name: keyed_bounds(rng) for name in (DEFAULT_SUBSCRIPTION, *NAMES)}
        super().__init__(world, profile, directory)
        self.ledger = _DefaultLedger(self)  # type: ignore[assignment]  # beside the one of plain processors
        for name, options in ((DEFAULT_SUBSCRIPTION, self.options), *self.options_of.items()):
            options |= keyed_policies(rng, functools.partial(self._park, name))
            options.setdefault("on_retries_exhausted", "stop_partition")
            world.note("keyed", name, self.bounds[name], *named_policies(options))

    def limits_of(self, name: str) -> dict[str, int]:
        """Return what the calls of a subscription are limited to."""
        bounds = self.bounds[name]
        return {"concurrency": bounds["concurrency"], "batch": bounds["max_batch_per_key"]}

    def is_replaying(self, host: str, partition_id: str, name: str) -> bool:
        """Return whether a pump, the one that would call user code now, delivers the events of a replay."""
        pump = self._pump(host, partition_id, name)
        partition = partition_read(pump)
        return partition is not None and partition.is_replaying

    def make_ledger(self, name: str, *args: Any) -> SubscriptionLedger:
        return _NamedLedger(self, name, *args)

    def processor(self, life: Life) -> Any:
        if super().processor(life) is None:
            return None
        calling = _Calling(self.world, life, self.ledger, self.manners)
        calling.history = self
        return UnrulyKeyed(calling, **self.bounds[DEFAULT_SUBSCRIPTION])

    def subscriber(self, *args: Any) -> Any:
        return UnrulyKeyed(_CallingSubscriber(self, *args), **self.bounds[args[-1]])

    def _reported(self, host: HistoryHost, report: HostReport) -> None:
        super()._reported(host, report)
        if isinstance(report, PumpClosed) and report.partition_id is not None:
            ledger = self.ledger_named(str(report.subscription))
            if isinstance(ledger, _KeyedRewound):
                ledger.was_closed(report.partition_id)

    # ------------------------------------------------------------------------------------------ called by user code

    async def call_back(self, life: Life, context: PartitionContext, name: str, rng: random.Random) -> None:
        """Call the host from within a handler, for the handler's own partition, or later from a task of it."""
        what, way = rng.choice(CALLS), rng.choice(WAYS)
        host = next(each for each in self.hosts if each.life is life)
        ledger, partition_id = self.ledger_named(name), context.partition_id
        text = f"{life.name} {what} {way} from {partition_id} of {name}"
        self.world.note("calls back", text)
        if ledger is None:
            return
        work = getattr(self, f"_{what}")
        if way == "later":
            self.users.append((host, asyncio.create_task(self._call_later(work, host, name, rng, partition_id))))
            return

        def is_waited_for() -> bool:
            # Not once the partition was given up: then the call is for what the host still owns.
            pump = self._pump(life.name, partition_id, name)
            return pump is not None and pump.context is context and not pump.is_ending and not host.was_frozen

        def is_late() -> None:
            if is_waited_for():
                self.world.violate(f"{text} neither returned nor raised within {AT_ONCE} s")

        watch = self.world.loop.call_later(AT_ONCE, is_late)
        try:
            done = await in_way(way, functools.partial(work, host, name, ledger, rng, partition_id))
        except ConfigurationError:
            return
        except EventPumpError as error:
            self.world.note("refused", text, repr(error)[:120])
            return
        finally:
            watch.cancel()
        if partition_id in done and is_waited_for():
            self.world.violate(f"{text} returned {done}, and its batch was in hand")

    async def _call_later(self, work: Any, host: HistoryHost, name: str, rng: random.Random, partition_id: str) -> None:
        await asyncio.sleep(rng.choice((0.0, rng.uniform(0.0, 5.0))))

        async def call(*args: Any) -> None:
            await work(*args, partition_id)

        await self._asked(call, host, name, rng)


async def keyed_rewind_history(world: World, size: int) -> None:
    """Live one history of such processors. Its profile is the part of its kind behind the colon."""
    name = world.kind.partition(":")[2]
    world.note("profile", name)
    with own_paces():
        await KeyedRewindHistory(world, PROFILES[name], None).run(size)
