"""Histories of hosts with several subscriptions: created, ended and recreated, slow and unruly, on hosts that differ.

Beside what must hold in every history of hosts, for each subscription by itself, and for each time that it was made:
it gets at least once what was published after its `subscribe` returned, or a report of its loss, whichever hosts die,
move and come; never anything from before its start; in order per partition and epoch; and its checkpoint never passes
an event that it has not processed. No cache exceeds its bound. A subscription that was ended with its checkpoints kept
is made active again at the end, and gets what was published meanwhile.

Some subscriptions take a part of the events, by key or by a filter: they get nothing else, and their checkpoints come
to the end nevertheless. Their functions fail at random.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from eventpump import ReceivedEvent
from eventpump.core.checkpoint import DEFAULT_SUBSCRIPTION, CheckpointPolicy
from eventpump.errors import ClosedError, ConfigurationError, EventPumpError
from eventpump.eventhubs.events import Checkpoint, EventPosition
from eventpump.reports import DataLost, HostReport
from eventpump.storage.scope_form import SubscriptionRecord
from eventpump.testing.transport import FakeHub
from tests.faults.histories.consumer import (
    PROFILES as CONSUMER_PROFILES,
)
from tests.faults.histories.consumer import (
    RECOVERY,
    ConsumerHistory,
    HistoryHost,
    Profile,
    on_file,
)
from tests.faults.histories.ledger import Call, Ledger, Start, named_call
from tests.faults.histories.manners import Manners, Oddity, UnrulyProcessor
from tests.faults.histories.world import Life, Violation, World, choose, own_paces
from tests.support.inside import feed_of, number_at, owned

NAMES = ("alerts", "archive", "audit")
GROUP = "catching-up"
"""The consumer group in which a subscription may have links of its own."""
ANSWER = 180.0
"""Seconds after the last fault within which `subscribe` and `unsubscribe` have returned."""

_NAMES = {"subscribe": 4.0, "unsubscribe": 1.0, "unsubscribe and keep": 1.0}
_FLEET = {"join": 2.0, "leave": 1.0, "crash": 1.5, "freeze": 0.7, "wake": 1.5}
_USER = CONSUMER_PROFILES["unruly"].works


@dataclass(frozen=True)
class SubscribersProfile(Profile):
    """A kind of history with several subscriptions.

    Args:
        kinds: Where a subscription begins, by weight: "latest", "earliest", "number" or "time".
        without_default: The chance that a host has no processor of its own.
    """

    kinds: Mapping[str, float] = field(
        default_factory=lambda: {"latest": 3.0, "earliest": 1.0, "number": 1.0, "time": 1.0}
    )
    without_default: float = 0.2


PROFILES: dict[str, SubscribersProfile] = {
    "names": SubscribersProfile({**_NAMES, "join": 1.5, "leave": 0.7, "crash": 0.7, "detach": 0.5}),
    "fleet": SubscribersProfile({**_FLEET, "subscribe": 2.0, "detach": 0.7, "cut": 0.5, "refuse": 0.3, "accept": 1.0}),
    "unruly": SubscribersProfile(
        {"subscribe": 2.0, "join": 1.0, "leave": 1.0, "unsubscribe and keep": 0.3, "detach": 0.3},
        {**_USER, "compute": 0.2},
        CONSUMER_PROFILES["asks"].checkpoints,
        hosts=2,
        is_asking=True,
        compute=0.7,
    ),
    "store": SubscribersProfile(
        {**_NAMES, "trouble store": 2.0, "heal": 2.5, "clock step": 0.3, "join": 0.7, "leave": 0.5, "crash": 0.5}
    ),
    "hubs": SubscribersProfile(
        {"subscribe": 3.0, "unsubscribe": 0.3, "unsubscribe and keep": 0.5, "retention": 2.0, "make again": 0.4,
         "add partition": 0.5, "detach": 0.5, "join": 1.0, "leave": 1.0, "crash": 0.5},
    ),
    "all": SubscribersProfile(
        {**_NAMES, **_FLEET, "detach": 1.0, "cut": 1.0, "refuse": 0.5, "accept": 1.5, "stall": 0.5, "resume": 1.0,
         "trouble store": 0.7, "heal": 1.5, "add partition": 0.2, "retention": 0.3, "make again": 0.1},
        _USER,
        CONSUMER_PROFILES["asks"].checkpoints,
        is_asking=True,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Part:
    """Which events a subscription takes: those whose number, divided by another, leaves certain rests.

    Args:
        by: What the number is divided by.
        rests: The rests.
        is_filter: Whether it is given by a filter, and not by key.
    """

    by: int
    rests: frozenset[int]
    is_filter: bool

    def has(self, number: int) -> bool:
        """Return whether it has the event with a number."""
        return number % self.by in self.rests


class _Key:
    """The key function of a host, which fails now and then until the faults have ended.

    Args:
        by: What an event's number is divided by.
        rests: Those for which a filter returns true; None to return the rest as the key.
    """

    def __init__(self, history: SubscribersHistory, host: HistoryHost, by: int, rests: frozenset[int] | None) -> None:
        self._history = history
        self._rng = history.world.stream(f"key function of {host.life.name} by {by} {rests}")
        self._by = by
        self._rests = rests

    def __call__(self, event: ReceivedEvent) -> object:
        rest = event.sequence_number % self._by
        if not self._history.is_ending and self._rng.random() < self._history.failing_keys:
            match self._rng.choice(("raise", "base", "list", "later")):
                case "raise":
                    raise RuntimeError("the key function's")
                case "base":
                    raise Oddity("the key function's")
                case "list" if self._rests is None:
                    return [rest]
                case "later":
                    return _later()
        return rest if self._rests is None else rest in self._rests


async def _later() -> None:
    """A coroutine, which is no key."""


class _Named:
    """A world that names a subscription in its lines."""

    def __init__(self, world: World, name: str) -> None:
        self._world = world
        self._name = name

    def note(self, what: str, *details: object) -> None:
        self._world.note(what, f"{self._name}:", *details)

    def violate(self, text: str) -> None:
        self._world.violate(f"{self._name}: {text}")


class SubscriptionLedger(Ledger):
    """What one making of a subscription is judged by: from the moment at which its record was stored.

    Args:
        making: How often the hub was recreated.
        record: Its record.
        part: Which events it takes; None for all.
    """

    def __init__(
        self, world: World, hub: FakeHub, making: int, record: SubscriptionRecord, part: Part | None = None
    ) -> None:
        super().__init__(_Named(world, record.name), hub, Start("latest"))  # type: ignore[arg-type]  # the part used
        self.making = making
        self.starts = record.starts
        self.part = part
        self._left_out: dict[tuple[int, str], int] = {}
        self.is_active = True
        self._start_of: dict[tuple[int, str], int] = {}
        self._epochs: dict[str, int] = {}
        """By partition: the latest epoch under which anything was delivered."""
        is_of_this_hub = record.hub_created_at == hub.created_at
        for partition_id in hub.partition_ids:
            partition, shore = hub.partition(partition_id), self._shores[making, partition_id]
            text = record.starts.get(partition_id)
            position = EventPosition.earliest() if text is None else EventPosition.parse(text)
            shore.required = shore.truncated = partition.first
            if is_of_this_hub:
                shore.required = self._start_of[making, partition_id] = number_at(hub, partition_id, position)
                shore.is_pinned = position.sequence_number is not None
            self.pinned.add(partition_id)

    def is_for(self, number: int) -> bool:
        return self.part is None or self.part.has(number)

    def missing(self, place: tuple[int, str], end: int) -> set[int]:
        if self.part is not None:
            first = self._left_out.get(place, 0)
            self._shores[place].exempt.update(each for each in range(first, end) if not self.part.has(each))
            self._left_out[place] = max(first, end)
        return super().missing(place, end)

    def added(self, partition_id: str) -> None:
        """Record a partition that is new in the hub: it is read from its beginning."""
        self._shores[self.making, partition_id].required = 0
        self.pinned.add(partition_id)

    def recreated(self) -> None:
        """Record that the hub was recreated; the history checks its report."""
        super().recreated()
        self.stored.clear()
        self.unreported.clear()

    def skipped(self, partition_id: str, first: int) -> None:
        """Record a report of a loss after which everything up to the partition's end is passed over."""
        self._shores[self.making, partition_id].reported.update(range(first, self.end(partition_id)))

    def returned(self, chosen: Collection[tuple[str, str]]) -> None:
        """Check, where `subscribe` has returned, that what is published from now on is delivered.

        Args:
            chosen: The partitions and positions at which users had it begin in an earlier hub: the record has them also
                where the present hub ends before them.
        """
        for partition_id in self._hub.partition_ids:
            is_chosen = (partition_id, self.starts.get(partition_id)) in chosen
            required = self._shores[self.making, partition_id].required
            if required is None or (required > self.end(partition_id) and not is_chosen):
                text = f"partition {partition_id}: subscribe returned at {self.end(partition_id)}, start is {required}"
                self._world.violate(text)

    def begin(self, host: str, partition_id: str, epoch: int, events: tuple[ReceivedEvent, ...]) -> Call:
        """Record a call of `process_events`, and check that it may be."""
        stored = self.stored.get(partition_id, -1)
        is_first = partition_id not in self._epochs or epoch > self._epochs[partition_id]
        self._epochs[partition_id] = epoch
        call = super().begin(host, partition_id, epoch, events)
        if not all(map(self.is_for, call.numbers)):
            self._world.violate(f"partition {partition_id}: {named_call(call)} has events that do not belong to it")
        if is_first and call.place[0] == self.making and call.numbers[0] <= stored:
            self._world.violate(f"partition {partition_id}: {named_call(call)} begins before the checkpoint {stored}")
        if call.numbers[0] < self._start_of.get(call.place, 0):
            self._world.violate(f"partition {partition_id}: {call.numbers[0]} is before the start")
        return call


class _OfCall(Ledger):
    """Passes what user code of one host does on to the ledger of the subscription's present making there."""

    def __init__(self, history: SubscribersHistory, host: HistoryHost, name: str) -> None:
        self._history = history
        self._member = host
        self._name = name
        self._of: dict[Call, Ledger] = {}

    def begin(self, host: str, partition_id: str, epoch: int, events: tuple[ReceivedEvent, ...]) -> Call:
        partition = owned(self._member.host, partition_id)
        assert partition is not None
        ledger = self._history.by_key[partition.pumps[self._name]._reading.key]
        call = ledger.begin(host, partition_id, epoch, events)
        self._of[call] = ledger
        return call

    def ok(self, call: Call) -> None:
        self._of[call].ok(call)

    def failed(self, call: Call, error: BaseException) -> None:
        self._of[call].failed(call, error)

    def claim(self, call: Call, last: int) -> None:
        self._of[call].claim(call, last)

    def took(
        self, partition_id: str, epoch: int, asked: Checkpoint, held: Checkpoint | None, *, is_reset: bool
    ) -> None:
        raise AssertionError("user code stores nothing")


class Subscriber(UnrulyProcessor):
    """A host's processor of one subscription."""

    def __init__(self, world: World, life: Life, ledger: Ledger, manners: Manners, name: str) -> None:
        super().__init__(world, life, ledger, manners)
        self._rng = world.stream(f"user code of {life.name} for {name}")


class SubscribersHistory(ConsumerHistory):
    """One history with several subscriptions."""

    def __init__(self, world: World, profile: SubscribersProfile, directory: Path | None) -> None:
        super().__init__(world, profile, directory)
        self.hub.consumer_groups.add(GROUP)
        self.kinds = profile.kinds
        self.without_default = profile.without_default
        self.by_key: dict[str, SubscriptionLedger] = {}
        """Every making of every subscription, by the name of its checkpoints in the store."""
        self.by_name: dict[str, SubscriptionLedger] = {}
        """Those there are now, active or kept."""
        self.unsubscribed: set[str] = set()
        """Names that were ever asked to be ended."""
        self.dropped: set[str] = set()
        """Those of them whose checkpoints were not to be kept."""
        self.unreported: dict[str, None] = {}
        """Subscriptions with checkpoints of a hub that is no more, and of which there was no report."""
        self.chosen: list[tuple[str, int, tuple[str, str]]] = []
        """Where users had them begin: the name, how often the hub was recreated before, the partition and position."""
        self.users: list[tuple[HistoryHost, asyncio.Task[None]]] = []
        """The calls of `subscribe` and `unsubscribe` there were, and the hosts they were made on."""
        self.is_ending = False
        rng = world.rng
        slow, works = rng.choice(NAMES), dict(profile.works)
        self.manners_of = {
            name: replace(
                self.manners, works={**works, "slow": works.get("slow", 1.0) * (20.0 if name == slow else 0.5)}
            )
            for name in NAMES
        }
        self.options_of: dict[str, dict[str, Any]] = {
            name: {
                "slow_after": rng.choice((1.0, 5.0, 60.0)),
                "on_slow": rng.choice(("hold", "suspend")),
                "catch_up": "shared",
                "catch_up_group": rng.choice((None, GROUP)),
                "on_data_loss": rng.choice((None, None, "latest")),
                "max_batch_size": rng.choice((None, 1, 7, 100)),
                "checkpoint_policy": rng.choice(
                    (None, CheckpointPolicy(every_events=rng.randint(1, 20)), CheckpointPolicy.manual())
                ),
            }
            for name in NAMES
        }
        chance = world.stream("parts")
        self.part_of: dict[str, Part | None] = {name: self._part(chance) for name in NAMES}
        self.failing_keys = chance.choice((0.0, 0.0, 0.01, 0.1))
        self._keys: dict[tuple[HistoryHost, int], _Key] = {}
        world.note("subscriptions", f"{slow} is slow,", self.options_of)
        world.note(
            "parts", *(f"{name}: {part and (part.by, sorted(part.rests))}" for name, part in self.part_of.items())
        )

    @staticmethod
    def _part(rng: random.Random) -> Part | None:
        if rng.random() < 0.4:
            return None
        by = rng.choice((2, 2, 7, 40))
        return Part(by, frozenset(rng.sample(range(by), rng.randint(1, by // 2))), rng.random() < 0.3)

    def _stream(self, host: HistoryHost, name: str) -> dict[str, Any]:
        """Return the options by which a subscription takes its part."""
        part = self.part_of[name]
        if part is None:
            return {}
        if part.is_filter:
            return {"filter": _Key(self, host, part.by, part.rests)}
        # Those that divide by the same share the function.
        key = self._keys.setdefault((host, part.by), _Key(self, host, part.by, None))
        return {"key": key, "keys": part.rests}

    # ----------------------------------------------------------------------------------------------- what is known

    def make_ledger(self, name: str, *args: Any) -> SubscriptionLedger:
        """Make the ledger of a new record of a subscription."""
        return SubscriptionLedger(*args)

    def subscriber(self, *args: Any) -> Subscriber:
        """Make a host's processor of a subscription."""
        return Subscriber(*args)

    @property
    def ledgers(self) -> list[Ledger]:
        return [self.ledger, *self.by_key.values()]

    def ledger_of(self, key: str) -> Ledger:
        return self.ledger if key == DEFAULT_SUBSCRIPTION else self.by_key[key]

    def recorded(self, record: SubscriptionRecord | None, before: SubscriptionRecord | None) -> None:
        if record is None:
            assert before is not None
            self.world.note("deleted", before.name)
            if before.name not in self.dropped:
                self.world.violate(f"{before.name}: deleted, and its checkpoints were to be kept")
            # Its checkpoints go with it, and until a host finds that out it may deliver from the start.
            self.by_name.pop(before.name).stored.clear()
            self.unreported.pop(before.name, None)
        elif record.key not in self.by_key:
            if before is not None and before.hub_created_at == record.hub_created_at:
                self.world.violate(f"{record.name}: recreated over one of the same hub")
            self.world.note("recorded" if before is None else "replaced", record.name, dict(record.starts))
            part = self.part_of[record.name]
            ledger = self.make_ledger(record.name, self.world, self.hub, self.ledger.making, record, part)
            self.by_key[record.key] = self.by_name[record.name] = ledger
        else:
            self.world.note("made active" if record.is_active else "kept", record.name)
            self.by_name[record.name].is_active = record.is_active

    def _started(self, subscription: str | None, partition_id: str) -> None:
        if subscription == DEFAULT_SUBSCRIPTION:
            self.ledger.started(partition_id)

    def _loss_reported(self, report: HostReport) -> None:
        if not isinstance(report, DataLost) or report.subscription in (None, DEFAULT_SUBSCRIPTION):
            super()._loss_reported(report)
            return
        name, loss = str(report.subscription), report.loss
        ledger = self.by_name.get(name)
        if loss.kind.name != "RETENTION":
            self.unreported.pop(name, None)
        elif ledger is not None:
            assert report.partition_id is not None
            assert loss.last_missing is not None
            ledger.lost(report.partition_id, loss.first_missing, loss.last_missing)
            if report.action == "latest":
                ledger.skipped(report.partition_id, loss.first_missing)

    def _look_for_orphans(self, host: HistoryHost) -> None:
        super()._look_for_orphans(host)
        bound = self.options["prefetch_events"]
        for partition_id in self.hub.partition_ids:
            slot = owned(host.host, partition_id)
            feed = None if slot is None else feed_of(slot.shared)
            if feed is not None and feed.events_held > bound:
                text = f"partition {partition_id}: {host.life.name} holds {feed.events_held} events of {bound}"
                self.world.violate(text)

    # ------------------------------------------------------------------------------------------------------- hosts

    def processor(self, life: Life) -> UnrulyProcessor | None:
        if not self.is_ending and self.world.rng.random() < self.without_default:
            self.world.note("without a processor", life.name)
            return None
        return super().processor(life)

    async def work_of(self, host: HistoryHost) -> None:
        rng = self.world.stream(f"subscriptions of {host.life.name}")
        wanted = [name for name in self.by_name if rng.random() < 0.7]
        if rng.random() < 0.5:
            for name in wanted:
                await self._subscribe(host, name)
        else:
            self._spawn(host, *(self._subscribe(host, name) for name in wanted))
        if not host.host.is_closed:
            await host.host.run()

    def _spawn(self, host: HistoryHost, *works: Any) -> list[asyncio.Task[None]]:
        tasks = [self.world.spawn(host.life, work, f"user of {host.life.name}") for work in works]
        self.users += [(host, task) for task in tasks]
        return tasks

    async def _subscribe(self, host: HistoryHost, name: str) -> None:
        """Subscribe on a host, again until that succeeds, as its user would."""
        world, rng = self.world, self.world.stream(f"{name} on {host.life.name} at {self.world.loop.time()}")
        processor = self.subscriber(world, host.life, _OfCall(self, host, name), self.manners_of[name], name)
        start = self._start(choose(rng, self.kinds), rng.random())
        options = {**self.options_of[name], **start, **self._stream(host, name)}
        world.note("subscribe", name, "on", host.life.name, start)
        if isinstance(positions := start.get("start"), dict):
            self.chosen += [(name, self.ledger.making, (each, str(position))) for each, position in positions.items()]
        while not host.host.is_closed:
            try:
                await host.host.subscribe(name, processor, **options)
            except ClosedError:
                return
            except ConfigurationError as error:
                if "already" not in str(error):
                    raise
                return
            except EventPumpError as error:
                world.note("not subscribed", name, "on", host.life.name, repr(error)[:120])
                await asyncio.sleep(rng.uniform(0.1, 3.0))
                continue
            world.note("subscribed", name, "on", host.life.name)
            ledger = self.by_name.get(name)
            if ledger is None and name not in self.unsubscribed:
                world.violate(f"{name}: subscribe returned, and there is no record")
            elif ledger is not None and "start" not in start:
                ledger.returned({each for of, making, each in self.chosen if of == name and making < ledger.making})
            return

    def _start(self, kind: str, share: float) -> dict[str, Any]:
        if kind == "latest":
            return {}
        start: Any = kind
        if kind == "time":
            start = EventPosition.at_enqueued_time(self.hub.now() - timedelta(seconds=60.0 * share), inclusive=True)
        elif kind == "number":
            start = {
                each: EventPosition.at_sequence_number(int(share * end) - 1) if end else "earliest"
                for each in self.hub.partition_ids
                for end in (self.ledger.end(each),)
            }
        return {"start": start}

    async def _unsubscribe(self, host: HistoryHost, name: str, *, keeps: bool) -> None:
        world, rng = self.world, self.world.stream(f"no {name} on {host.life.name} at {self.world.loop.time()}")
        world.note("unsubscribe", name, "on", host.life.name, "keep" if keeps else "")
        self.unsubscribed.add(name)
        if not keeps:
            self.dropped.add(name)
        while not host.host.is_closed:
            try:
                await host.host.unsubscribe(name, keep_checkpoint=keeps)
            except ClosedError:
                return
            except EventPumpError as error:
                world.note("not unsubscribed", name, "on", host.life.name, repr(error)[:120])
                await asyncio.sleep(rng.uniform(0.1, 3.0))
                continue
            world.note("unsubscribed", name, "on", host.life.name)
            return

    async def subscribe(self) -> None:
        """Subscribe on one host, or on all."""
        rng = self.world.rng
        name = rng.choice(NAMES)
        if self._living:
            hosts = self._living if rng.random() < 0.3 else [rng.choice(self._living)]
            for host in hosts:
                self._spawn(host, self._subscribe(host, name))

    async def unsubscribe(self) -> None:
        await self._unsubscribe_somewhere(keeps=False)

    async def unsubscribe_and_keep(self) -> None:
        await self._unsubscribe_somewhere(keeps=True)

    async def _unsubscribe_somewhere(self, *, keeps: bool) -> None:
        if self._living:
            host = self.world.rng.choice(self._living)
            self._spawn(host, self._unsubscribe(host, self.world.rng.choice(NAMES), keeps=keeps))

    async def make_again(self) -> None:
        for name, ledger in self.by_name.items():
            if ledger.stored:
                self.unreported[name] = None
        await super().make_again()

    # --------------------------------------------------------------------------------------------------- its end

    async def _end(self) -> None:
        world = self.world
        self.is_ending = True
        await self._end_faults()
        for manners in self.manners_of.values():
            manners.is_good.set()
            manners.works = {"quick": 1.0}
        for host in self._living:
            if host.host._source is None:
                world.note("leave", host.life.name)
                self._begin_to_leave(host)
        await self._subscribe_everywhere()
        if not self._living:
            # Or the last one could not begin within its start-up time.
            await self.join()
            await self._subscribe_everywhere()
        resuming = world.loop.create_task(self._resume_suspended(), name="resume")
        for _ in range(2):
            for partition_id in self.hub.partition_ids:
                self.ledger.published(partition_id, 3)
            await world.until(self._is_done, self._patience())
        self._check_end()
        if world.violation is None:
            for host in self._living:
                await self._close(host)
            self._check_end()
        resuming.cancel()
        if world.violation is not None:
            raise Violation(world.violation)

    async def _subscribe_everywhere(self) -> None:
        """Let every host have every subscription, those that were ended with their checkpoints kept too."""
        await self._until_answered()
        for name in list(self.by_name):
            for host in self._living:
                self._spawn(host, self._subscribe(host, name))
        await self._until_answered()
        for name, ledger in self.by_name.items():
            if self._living and not ledger.is_active:
                self.world.violate(f"{name}: subscribed to, and not active")

    async def _until_answered(self) -> None:
        def is_answered() -> bool:
            return all(task.done() for host, task in self.users if host.life.is_running)

        if not await self.world.until(is_answered, ANSWER):
            self.world.violate(f"a call of subscribe or unsubscribe has not returned after {ANSWER} s")

    async def _resume_suspended(self) -> None:
        while True:
            for host in self._living:
                for name in NAMES:
                    # This host may have no processor for it.
                    with contextlib.suppress(ConfigurationError):
                        host.host.resume(name)
            await asyncio.sleep(10.0)

    def _is_done(self) -> bool:
        pending = any(ledger.unprocessed() for ledger in (self.ledger, *self.by_name.values()))
        return not pending and set(self.hub.partition_ids) <= self.ledger.pinned and not self.unreported

    def _check_end(self) -> None:
        self.ledger.check_end()
        for ledger in self.by_name.values():
            ledger.check_end()
        for name in self.unreported:
            self.world.violate(f"{name}: no report says that the hub was recreated")

    def _patience(self) -> float:
        left = sum(len(each) for ledger in self.ledgers for each in ledger.unprocessed().values())
        return super()._patience() + left * 0.2 + RECOVERY


async def subscribers_history(world: World, size: int) -> None:
    """Live one history of hosts with several subscriptions. Its profile is the part of its kind behind the colon."""
    name = world.kind.partition(":")[2]
    world.note("profile", name)
    with on_file(world, is_wanted=name == "store") as directory, own_paces():
        await SubscribersHistory(world, PROFILES[name], directory).run(size)
