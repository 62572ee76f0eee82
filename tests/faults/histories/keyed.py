"""Histories of hosts with a keyed processor: keys at the same time, with handlers that do what they should not.

Beside what must hold in every history of hosts: under one epoch the events of a key come in order, one call at a time,
and an event that was processed does not come again; no more calls run than were allowed; the checkpoint never passes an
event that is neither processed, skipped nor parked, whatever user code asks for; and an owner begins after it. The
function of the key fails at random: the order is kept nevertheless.

The same of subscriptions to a part of the events ("streams"): they get nothing else, their checkpoints come to the end
nevertheless, and a drain that returned has had all events processed that belong to them. Their functions fail at
random.
"""

from __future__ import annotations

import contextlib
import random
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

from eventpump import CloseReason, KeyedProcessor, Park, PartitionContext, ReceivedEvent, RetryOptions
from eventpump.errors import EventPumpError
from eventpump.reports import EventParked, EventSkipped, HostReport, PumpClosed
from tests.faults.histories.consumer import PROFILES as CONSUMER_PROFILES
from tests.faults.histories.consumer import ConsumerHistory, HistoryHost, Profile, on_file
from tests.faults.histories.ledger import Call, Ledger, Place, named_call
from tests.faults.histories.manners import Oddity, UnrulyProcessor
from tests.faults.histories.subscribers import (
    NAMES,
    Subscriber,
    SubscribersHistory,
    SubscribersProfile,
    SubscriptionLedger,
)
from tests.faults.histories.world import Life, World, own_paces

KEYS = 5
"""Keys of a partition; events of a sixth kind have none."""

_WORKS = {**CONSUMER_PROFILES["unruly"].works, "slow": 6.0, "compute": 0.1}
_ASKS = CONSUMER_PROFILES["asks"].checkpoints

PROFILES: dict[str, Profile] = {
    "unruly": Profile({"leave": 1.0, "join": 1.0, "detach": 0.5}, _WORKS, _ASKS, hosts=2, is_asking=True, compute=0.2),
    "fleet": Profile(
        {"join": 2.0, "leave": 1.0, "crash": 1.5, "freeze": 0.7, "wake": 1.5, "detach": 0.7, "cut": 0.5, "pause": 0.5,
         "go on": 1.0, "retention": 0.2},
        {"quick": 5.0, "slow": 5.0, "raise": 0.7, "deaf": 0.1},
        _ASKS,
    ),
}  # fmt: skip

_NAMED = {"subscribe": 3.0, "drain": 1.0, "pause": 0.5, "go on": 1.0, "join": 1.5, "leave": 1.0}

STREAMS: dict[str, SubscribersProfile] = {
    "streams": SubscribersProfile(
        {**_NAMED, "crash": 1.0, "freeze": 0.5, "wake": 1.5, "detach": 0.7, "cut": 0.5, "retention": 0.2},
        {**_WORKS, "quick": 5.0},
        _ASKS,
        is_asking=True,
        compute=0.2,
    ),
}


def key_of(event: ReceivedEvent) -> Hashable:
    """Return the key of an event: it follows from its number."""
    key = event.sequence_number % (KEYS + 1)
    return key if key < KEYS else None


class KeyedLedger(Ledger):
    """What a keyed processor is judged by.

    Args:
        *args: What its base takes.
        concurrency: The most calls at a time.
        batch: The most events in one.
    """

    def __init__(self, *args: Any, concurrency: int, batch: int) -> None:
        super().__init__(*args)
        self._concurrency = concurrency
        self._batch = batch
        self._calls: defaultdict[tuple[Place, int], set[Call]] = defaultdict(set)
        self._begun_at: dict[tuple[Place, int], int] = {}
        """The checkpoint before the first delivery of an epoch."""
        self._ok: defaultdict[tuple[Place, int], set[int]] = defaultdict(set)
        self._reached_of_key: dict[tuple[Place, int, Hashable], int] = {}
        self._passed_over: defaultdict[Place, set[int]] = defaultdict(set)

    def begin(self, host: str, partition_id: str, epoch: int, events: tuple[ReceivedEvent, ...]) -> Call:
        """Record a call of the handler, and check that it may be."""
        self._running.clear()  # several run at a time
        call = super().begin(host, partition_id, epoch, events)
        where, keys = (call.place, epoch), {key_of(event) for event in events}
        running = {each for each in self._calls[where] if each.is_running}
        self._calls[where] = {*running, call}
        stored = self._begun_at.setdefault(where, self.stored.get(partition_id, -1))
        what = f"partition {partition_id}: {named_call(call)}"
        if len(running) >= self._concurrency:
            self._world.violate(f"{what} is one more than {self._concurrency}")
        if len(keys) > 1 or (None in keys and len(events) > 1) or len(events) > self._batch:
            self._world.violate(f"{what} has {len(events)} events of the keys {keys}")
        (key,) = {None} if len(keys) > 1 else keys
        kind = call.numbers[0] % (KEYS + 1)
        for other in running:
            if set(other.numbers) & set(call.numbers) or (key is not None and other.numbers[0] % (KEYS + 1) == kind):
                self._world.violate(f"{what} runs beside {named_call(other)}")
        if call.numbers[0] <= stored:
            self._world.violate(f"{what} comes though {stored} was stored")
        if again := self._ok[where] & set(call.numbers):
            self._world.violate(f"{what} comes again, and {sorted(again)} were processed")
        if key is not None:
            self._check_key(call, key)
        return call

    def _check_key(self, call: Call, key: Hashable) -> None:
        """Check that no event of a key was left out before a call."""
        shore, at = self._shores[call.place], (call.place, call.epoch, key)
        reached = self._reached_of_key.get(at)
        for before, after in zip((reached, *call.numbers), call.numbers, strict=False):
            if before is None or after <= before:
                continue
            missing = set(range(before + KEYS + 1, after, KEYS + 1)) - shore.reported
            missing -= self._passed_over[call.place]
            if missing := {number for number in missing if number >= shore.truncated and self.is_for(number)}:
                self._world.violate(f"{named_call(call)} came without {sorted(missing)} of its key")
        self._reached_of_key[at] = max(call.numbers[-1], -1 if reached is None else reached)

    def _check_order(self, call: Call) -> None:
        """Check nothing: the order is that of each key."""

    def ok(self, call: Call) -> None:
        """Record that a call returned."""
        super().ok(call)
        self._ok[call.place, call.epoch].update(call.numbers)

    def claim(self, call: Call, last: int) -> None:
        """Record nothing: any request for a checkpoint stores processed events only."""

    def was_passed_over(self, partition_id: str, number: int) -> None:
        """Record that an event was skipped or parked, perhaps without a call: it may not have belonged to a stream."""
        self._shores[self.making, partition_id].processed.add(number)
        self._passed_over[self.making, partition_id].add(number)

    def was_closed(self, partition_id: str) -> None:
        """Record that reading has ended: under the same epoch it may begin again, after the checkpoint."""
        place = (self.making, partition_id)
        for kept in (self._ok, self._begun_at):
            for where in [each for each in kept if each[0] == place]:
                kept.pop(where)
        for of_key in [each for each in self._reached_of_key if each[0] == place]:
            del self._reached_of_key[of_key]


class KeyedSubscriptionLedger(KeyedLedger, SubscriptionLedger):
    """What one making of a subscription with a keyed processor is judged by."""


class Unruly(UnrulyProcessor):
    """What the processor does; see there."""

    def stream(self, purpose: str) -> random.Random:
        """Return a stream of random numbers of its own."""
        return self._world.stream(f"{purpose} of {self._life.name}")

    async def _claim(
        self, context: PartitionContext, event: ReceivedEvent, call: Call, *, is_named: bool = True
    ) -> None:
        with contextlib.suppress(EventPumpError):
            await context.checkpoint(event if is_named else None)


class UnrulySubscriber(Unruly, Subscriber):
    """The same, of a subscription."""


class UnrulyKeyed(KeyedProcessor):
    """A host's processor."""

    def __init__(self, unruly: Unruly, **bounds: Any) -> None:
        super().__init__(unruly.process_events, key=self._key_of, **bounds)
        self._unruly = unruly
        self._keys = unruly.stream("keys")

    def _key_of(self, event: ReceivedEvent) -> Hashable:
        if self._keys.random() < 0.03 and not self._unruly._manners.is_good.is_set():
            raise Oddity("the key's")
        return key_of(event)

    async def open(self, context: PartitionContext) -> None:
        await self._unruly.open(context)

    async def process_error(self, context: PartitionContext, error: Exception) -> None:
        await self._unruly.process_error(context, error)

    async def close(self, context: PartitionContext, reason: CloseReason) -> None:
        await self._unruly.close(context, reason)


def keyed_bounds(rng: random.Random) -> dict[str, int]:
    """Return the bounds of a keyed processor."""
    concurrency, batch = rng.choice((1, 3, 10)), rng.choice((1, 1, 4))
    events = concurrency + rng.choice((0, 5, 100))
    return {
        "concurrency": concurrency,
        "max_batch_per_key": batch,
        "max_events_in_flight": events,
        "max_bytes_in_flight": rng.choice((500, 1 << 20)),
        "max_ahead": concurrency + rng.choice((0, 10, 100)),
    }


def keyed_policies(rng: random.Random, park: Any) -> dict[str, Any]:
    """Return the failure policy of a keyed processor."""
    passes = rng.choice(("skip", Park(park), Park(park), "stop_partition"))
    policy: Any = rng.choice(("retry", "retry", "retry", passes))
    return {
        "failure_policy": policy,
        "handler_retry": RetryOptions(max_retries=rng.choice((1, 4)), base_delay=0.2, max_delay=3.0),
        "on_retries_exhausted": passes,
        "handler_timeout": 15.0,
        "on_handler_timeout": rng.choice(("report", "cancel")),
    }


def named_policies(options: Mapping[str, Any]) -> list[str]:
    """Return what follows a failure, for the trace: without the address of a function."""
    policies = options["failure_policy"], options["on_retries_exhausted"]
    return [each if isinstance(each, str) else type(each).__name__ for each in policies]


class KeyedHistory(ConsumerHistory):
    """One history with a keyed processor."""

    def __init__(self, world: World, profile: Profile, directory: Path | None) -> None:
        super().__init__(world, profile, directory)
        self.bounds = keyed_bounds(world.rng)
        limits = {"concurrency": self.bounds["concurrency"], "batch": self.bounds["max_batch_per_key"]}
        self.ledger = KeyedLedger(world, self.hub, self.start, **limits)
        self._parking = world.stream("parking")
        self.options |= keyed_policies(world.rng, self._park)
        world.note("keyed", self.bounds, *named_policies(self.options))

    async def _park(self, context: PartitionContext, event: ReceivedEvent, error: Exception) -> None:
        if self._parking.random() < 0.3 and not self.manners.is_good.is_set():
            raise OSError("no room to park")

    def processor(self, life: Life) -> Any:
        return UnrulyKeyed(Unruly(self.world, life, self.ledger, self.manners), **self.bounds)

    def _reported(self, host: HistoryHost, report: HostReport) -> None:
        super()._reported(host, report)
        if isinstance(report, EventSkipped | EventParked):
            assert isinstance(self.ledger, KeyedLedger)
            assert report.partition_id is not None
            assert report.sequence_number is not None
            self.ledger.was_passed_over(report.partition_id, report.sequence_number)

    async def pause(self) -> None:
        if self._living:
            host = self.world.rng.choice(self._living)
            self.world.note("pause", host.life.name)
            host.life.call(self.world.loop, self._set_paused, host, True)

    async def go_on(self) -> None:
        for host in self._living:
            host.life.call(self.world.loop, self._set_paused, host, False)

    @staticmethod
    def _set_paused(host: HistoryHost, is_paused: bool) -> None:
        with contextlib.suppress(EventPumpError):
            (host.host.pause if is_paused else host.host.resume)("default")

    async def _end_faults(self) -> None:
        await super()._end_faults()
        await self.go_on()


class KeyedStreamsHistory(SubscribersHistory):
    """One history of subscriptions with keyed processors, most to a part of the events."""

    by_name: dict[str, SubscriptionLedger]

    def __init__(self, world: World, profile: SubscribersProfile, directory: Path | None) -> None:
        super().__init__(world, profile, directory)
        rng = self._parking = world.stream("keyed")
        self.bounds = {name: keyed_bounds(rng) for name in NAMES}
        for name, options in self.options_of.items():
            options |= keyed_policies(rng, self._park)
            world.note("keyed", name, self.bounds[name], *named_policies(options))

    async def _park(self, context: PartitionContext, event: ReceivedEvent, error: Exception) -> None:
        if self._parking.random() < 0.3 and not self.is_ending:
            raise OSError("no room to park")

    def make_ledger(self, name: str, *args: Any) -> SubscriptionLedger:
        bounds = self.bounds[name]
        limits = {"concurrency": bounds["concurrency"], "batch": bounds["max_batch_per_key"]}
        return KeyedSubscriptionLedger(*args, **limits)

    def subscriber(self, *args: Any) -> Any:
        return UnrulyKeyed(UnrulySubscriber(*args), **self.bounds[args[-1]])

    def _reported(self, host: HistoryHost, report: HostReport) -> None:
        super()._reported(host, report)
        ledger = self.by_name.get(str(getattr(report, "subscription", None)))
        if not isinstance(ledger, KeyedSubscriptionLedger) or report.partition_id is None:
            return
        if isinstance(report, EventSkipped | EventParked):
            assert report.sequence_number is not None
            ledger.was_passed_over(report.partition_id, report.sequence_number)
        elif isinstance(report, PumpClosed):
            ledger.was_closed(report.partition_id)

    async def drain(self) -> None:
        if self._living:
            host = self.world.rng.choice(self._living)
            self._spawn(host, self._drain(host, self.world.rng.choice(NAMES)))

    async def _drain(self, host: HistoryHost, name: str) -> None:
        ledger = self.by_name.get(name)
        if ledger is None or host.host.is_closed:
            return
        before = {each: ledger.end(each) for each in self.hub.partition_ids}
        self.world.note("drain", host.life.name, name)
        try:
            done = await host.host.drain(name)
        except EventPumpError as error:
            self.world.note("refused", host.life.name, name, repr(error)[:120])
            return
        self.world.note("drained", host.life.name, name, done)
        for partition_id in done:
            if missing := ledger.missing((ledger.making, partition_id), before.get(partition_id, 0)):
                self.world.violate(f"{name}: partition {partition_id}: drain returned, without {sorted(missing)}")

    async def pause(self) -> None:
        if self._living:
            host, name = self.world.rng.choice(self._living), self.world.rng.choice(NAMES)
            self.world.note("pause", host.life.name, name)
            host.life.call(self.world.loop, self._set_paused, host, True, (name,))

    async def go_on(self) -> None:
        for host in self._living:
            host.life.call(self.world.loop, self._set_paused, host, False, NAMES)

    @staticmethod
    def _set_paused(host: HistoryHost, is_paused: bool, names: Sequence[str]) -> None:
        for name in names:
            with contextlib.suppress(EventPumpError):
                (host.host.pause if is_paused else host.host.resume)(name)

    async def _end_faults(self) -> None:
        await super()._end_faults()
        await self.go_on()


async def keyed_streams_history(world: World, size: int) -> None:
    """Live one history of streams with keyed processors. Its profile is the part of its kind behind "keyed:"."""
    name = world.kind.partition(":")[2]
    world.note("profile", name)
    with on_file(world, is_wanted=False) as directory, own_paces():
        await KeyedStreamsHistory(world, STREAMS[name], directory).run(size)


async def keyed_history(world: World, size: int) -> None:
    """Live one history with a keyed processor. Its profile is the part of its kind behind "keyed:"."""
    name = world.kind.partition(":")[2]
    with on_file(world, is_wanted=False) as directory:
        await KeyedHistory(world, PROFILES[name], directory).run(size)
