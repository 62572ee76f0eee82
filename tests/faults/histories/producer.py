"""Histories of producers: plain, buffered and idempotent ones, in processes that overlap, die and freeze.

What must hold: what was acknowledged is stored, by an idempotent producer exactly once, and nothing of an idempotent
producer is stored twice; README's loop stores every order once and in order; what a buffer accepted ends once; no send,
flush or close hangs when the faults have ended, and a producer that is not shut out publishes again then.
"""

from __future__ import annotations

import asyncio
import inspect
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from eventpump.errors import (
    ClosedError,
    ConnectionLostError,
    EventPumpError,
    InvalidClientStateError,
    ProducerDisconnectedError,
    PublishOutcomeUnknownError,
    StoreError,
)
from eventpump.eventhubs.conditions import error_for
from eventpump.eventhubs.events import EventData
from eventpump.interfaces import StoredRecord
from eventpump.options.base import RetryOptions
from eventpump.options.producer import BufferSettings, PublishingOptions
from eventpump.producer.buffered import HubBufferedProducer
from eventpump.producer.producer import HubProducer
from eventpump.storage.publisher_states.memory import MemoryPublisherStateStore
from eventpump.testing.transport import FakeHub, FakeSendLink, SendFault
from tests.faults.histories.consumer import DETACHES, REFUSALS, make_again
from tests.faults.histories.manners import Oddity
from tests.faults.histories.world import Life, LifeTransport, Violation, World

SETTLING = 300.0
"""Seconds after the last fault within which every send, flush and close has ended: retries at their longest."""
RETRY = RetryOptions(max_retries=3, base_delay=0.2, max_delay=10.0)
NAME = "orders"
_KNOWN = {*inspect.signature(HubProducer.__init__).parameters, *PublishingOptions.__annotations__}

_BASIC = {"start": 1.0, "kill": 0.7, "close": 0.5, "freeze": 0.7, "wake": 1.5}
_WIRE = {"lose": 3.0, "deliver late": 1.5, "end links": 2.0, "refuse": 1.0, "accept": 2.5, "hang": 0.5, "answer": 2.0}
_USER = {"cancel": 1.5}
_STRANGER = {"cancel a task": 1.0}


@dataclass(frozen=True)
class Profile:
    """A kind of producer history.

    Args:
        work: What a producer's process does: send, buffer, or loop (README's over the orders).
        actions: Weights.
        options: Of its producers, where this base knows them.
        producers: The most processes at a time.
        is_idempotent: Whether nothing may be stored twice.
        has_states: Whether a state store keeps who they are.
    """

    work: str
    actions: Mapping[str, float]
    options: Mapping[str, Any] = field(default_factory=dict)
    producers: int = 2
    is_idempotent: bool = False
    has_states: bool = False


PROFILES: dict[str, Profile] = {
    "plain": Profile("send", {**_BASIC, **_WIRE, **_USER, "make again": 0.3}),
    "buffered": Profile("buffer", {**_BASIC, **_WIRE, "make again": 0.2}),
    "buffered-idempotent": Profile("buffer", {**_BASIC, **_WIRE, **_STRANGER}, is_idempotent=True),
    "single": Profile("send", {**_BASIC, **_WIRE, **_USER, **_STRANGER}, is_idempotent=True),
    "doubt": Profile(
        "send",
        {"lose": 4.0, "cancel": 4.0, "hang": 2.0, "answer": 2.0, "refuse": 1.5, "accept": 1.5, "deliver late": 1.0},
        producers=1,
        is_idempotent=True,
    ),
    "states": Profile(
        "send",
        {**_WIRE, **_USER, "trouble states": 3.0, "heal": 2.0, "start": 3.0, "close": 2.5},
        {"mode": "exclusive", "on_doubt": "accept"},
        producers=1,
        is_idempotent=True,
        has_states=True,
    ),
    "exclusive": Profile(
        "send",
        {**_BASIC, **_WIRE, **_USER, **_STRANGER, "start": 2.0},
        {"mode": "exclusive", "on_doubt": "accept"},
        producers=3,
        is_idempotent=True,
        has_states=True,
    ),
    "scan": Profile(
        "loop",
        {**_BASIC, **_WIRE, **_USER, "start": 2.0},
        {"mode": "exclusive", "on_doubt": "scan", "scan_consumer_group": "$Default"},
        producers=2,
        is_idempotent=True,
        has_states=True,
    ),
    "replayable": Profile(
        "loop", {**_BASIC, **_WIRE, **_USER}, {"mode": "replayable"}, producers=3, is_idempotent=True, has_states=True
    ),
    "forgotten": Profile(
        "loop",
        {"start": 1.0, "kill": 1.0, "close": 1.0, "forget": 0.4, "end links": 1.0},
        {"mode": "replayable"},
        producers=1,
        is_idempotent=True,
        has_states=True,
    ),
}


@dataclass
class _Event:
    """One event of a history.

    Args:
        acknowledged: Whether its send returned, or its receipt or callback said so.
        ended: How often a buffer said that it ended.
    """

    body: str
    partition_id: str | None
    acknowledged: bool = False
    ended: int = 0


@dataclass(eq=False)
class _Worker:
    """One life of a producer."""

    life: Life
    transport: LifeTransport
    producer: HubProducer
    buffered: HubBufferedProducer | None = None
    run: asyncio.Task[None] | None = None
    calls: dict[asyncio.Task[Any], str] = field(default_factory=dict)
    """Calls that have not ended, by what they are."""
    accepted: list[_Event] = field(default_factory=list)
    given: dict[int, _Event] = field(default_factory=dict)
    """What was given to its buffer, by the identity of an object that `kept` keeps."""
    kept: list[EventData] = field(default_factory=list)
    is_stopping: bool = False
    is_shut_out: bool = False
    """Whether it was notified that another publisher took over, or that its state is gone."""
    is_closing: bool = False
    has_closed: bool = False


class _States:
    """A state store with trouble. It passes on whatever methods the real one has."""

    def __init__(self, history: ProducerHistory, life: Life) -> None:
        self._history = history
        self._real = MemoryPublisherStateStore(history.states)
        self._rng = history.world.stream(f"states of {life.name}")

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._real, name)
        if not inspect.iscoroutinefunction(method):
            return method

        async def call(*args: Any, **options: Any) -> Any:
            trouble = self._history.trouble
            while trouble == "hangs":
                await asyncio.sleep(1.0)
                trouble = self._history.trouble
            chance = self._rng.random()
            if name not in ("open", "aclose") and trouble is not None and chance < 0.5:
                if trouble == "cancels":
                    raise asyncio.CancelledError("the store's own")
                if trouble == "loses":
                    await method(*args, **options)
                raise StoreError(name, "503 server busy")
            return await method(*args, **options)

        return call


class ProducerHistory:
    """One history."""

    def __init__(self, world: World, profile: Profile) -> None:
        self.world = world
        self.profile = profile
        rng = world.rng
        self.hub = FakeHub(partitions=rng.randint(1, 2), latency=rng.choice((0.0, 0.01, 0.1)))
        self.states: dict[str, StoredRecord] = {}
        self.trouble: str | None = None
        self.workers: list[_Worker] = []
        self.events: dict[str, _Event] = {}
        self.archive: list[str] = []
        """What was stored in earlier makings of the hub."""
        self.hanging: set[str] = set()
        self.chunk = rng.randint(1, 3)
        self.orders = 120 * self.chunk
        self.is_over = False
        self.was_forgotten = False
        self._count = 0
        self._making = 0
        self._names = 0
        world.note("begins", f"{len(self.hub.partition_ids)} partitions, {profile.work}, {dict(profile.options)}")

    # ------------------------------------------------------------------------------------------------ its course

    async def run(self, size: int) -> None:
        """Live through `size` steps of trouble, end it, and check.

        Raises:
            Violation: A promise did not hold.
        """
        world = self.world
        actions = dict(self.profile.actions)
        await self.start()
        for _ in range(size):
            await world.sleep(world.rng.expovariate(1.0) * world.rng.choice((0.05, 0.5, 2.0, 10.0)))
            await self.act(world.chosen(actions))
            self.check_log()
        await self._end()

    async def act(self, action: str) -> None:
        """Do one thing."""
        await getattr(self, action.replace(" ", "_"))()

    async def _end(self) -> None:
        """End every fault, and check what must then hold."""
        world = self.world
        world.note("the faults end")
        await self.accept()
        await self.answer()
        await self.heal()
        await self.deliver_late()
        self.hub._losses.clear()
        self.is_over = True
        for worker in self.workers:
            if worker.life.is_frozen and not worker.life.is_dead:
                worker.life.wake(world.loop)
        # A task cancelled at the last moment ends; then what is out does, and who is not shut out publishes again.
        await world.sleep(1.0)
        await self._until_idle(self._living, "has not ended")
        if self.profile.work == "loop":
            await self._finish_orders()
        else:
            # Nothing shuts out the newest process; of plain ones no other is shut out, either.
            if self.profile.has_states or not self._living:
                await self._close_all()
                await self.start(forced=True)
            for worker in self._living:
                await self._publish_at_last(worker)
        await self._close_all()
        self.check_log()
        self._check_end()
        if world.violation is not None:
            raise Violation(world.violation)

    async def _until_idle(self, workers: Sequence[_Worker], problem: str) -> None:
        for worker in workers:
            worker.is_stopping = True
        busy = [worker for worker in workers if worker.life.is_running]
        if not await self.world.until(lambda: not any(worker.calls for worker in busy), SETTLING):
            calls = [f"{worker.life.name}: {call}" for worker in busy for call in worker.calls.values()]
            self.world.violate(f"{calls[0]} {problem} {SETTLING:.0f} s after the last fault")
            raise Violation

    async def _publish_at_last(self, worker: _Worker) -> None:
        """Check that a producer publishes once nothing is in its way."""
        if worker.is_shut_out:
            return
        errors: list[BaseException] = []
        for partition_id in self.hub.partition_ids:
            call = self._call(
                worker, self._send_at_last(worker, partition_id, errors), f"the last send to {partition_id}"
            )
            await asyncio.wait({call}, timeout=SETTLING)
            if not call.done():
                self.world.violate(f"{worker.life.name}: the last send to {partition_id} hangs")
                raise Violation
        if errors:
            self.world.violate(f"{worker.life.name} cannot publish when the faults have ended: {errors[0]!r}")
            raise Violation

    async def _send_at_last(self, worker: _Worker, partition_id: str, errors: list[BaseException]) -> None:
        event, given = self._given(worker, partition_id)
        try:
            if worker.buffered is not None:
                worker.accepted.append(event)
                await worker.buffered.send_and_wait(given, partition_id=partition_id)
            else:
                await worker.producer.send(given, partition_id=partition_id)
            event.acknowledged = True
        except EventPumpError as error:
            errors.append(error)

    async def _finish_orders(self) -> None:
        """Have the last process go on where the others came to, until every order is stored."""
        await self._close_all()
        for _ in range(2):
            await self.start(forced=True)
            worker = self.workers[-1]
            worker.is_stopping = False
            assert worker.run is not None
            if not await self.world.until(worker.run.done, SETTLING):
                self.world.violate(f"{worker.life.name}: the loop over the orders has not ended {SETTLING:.0f} s after")
                raise Violation
            self.check_log()
            if all(len(self._stored(each)) >= self.orders for each in self.hub.partition_ids):
                return
            await self._close_all()
        if not self.was_forgotten:
            self.world.violate("the loop does not come to the end of the orders when the faults have ended")
            raise Violation

    async def _close_all(self) -> None:
        for worker in self._living:
            await self.close(worker)
        closing = [worker for worker in self.workers if worker.life.is_running]
        await self._until_idle(closing, "has not ended")

    # ------------------------------------------------------------------------------------------------- checking

    def _stored(self, partition_id: str) -> list[str]:
        return [event.body_as_str() for event in self.hub.events(partition_id)]

    def check_log(self) -> None:
        """Check what holds at every moment: nothing idempotent is stored twice, orders are stored in order."""
        if not self.profile.is_idempotent:
            return
        for partition_id in self.hub.partition_ids:
            stored = self._stored(partition_id)
            if self.profile.work == "loop":
                wanted = [f"{partition_id}/{number}" for number in range(len(stored))]
                if stored != wanted:
                    at = next(
                        index for index, pair in enumerate(zip(stored, wanted, strict=True)) if pair[0] != pair[1]
                    )
                    around = stored[max(0, at - 3) : at + 3]
                    self.world.violate(f"partition {partition_id}: order {at} is not stored in its place: {around}")
            twice = [body for body, count in Counter(stored).items() if count > 1]
            if twice:
                self.world.violate(f"partition {partition_id}: {len(twice)} events stored twice, such as {twice[0]}")

    def _check_end(self) -> None:
        stored = set(self.archive)
        for partition_id in self.hub.partition_ids:
            stored.update(self._stored(partition_id))
        missing = [event.body for event in self.events.values() if event.acknowledged and event.body not in stored]
        if missing:
            self.world.violate(f"{len(missing)} acknowledged events are not stored, such as {missing[0]}")
        for worker in self.workers:
            if not worker.has_closed:
                continue
            for event in worker.accepted:
                if event.ended != 1:
                    text = f"{worker.life.name}: {event.body} was accepted and ended {event.ended} times"
                    self.world.violate(text)

    # -------------------------------------------------------------------------------------------------- workers

    @property
    def _living(self) -> list[_Worker]:
        return [worker for worker in self.workers if worker.life.is_running and not worker.is_closing]

    async def start(self, *, forced: bool = False) -> None:
        """Start a process with a producer."""
        if not forced and len(self._living) >= self.profile.producers:
            return
        self._names += 1
        world, profile = self.world, self.profile
        life = world.life(f"p{self._names}")
        transport = LifeTransport(self.hub, life)
        options: dict[str, Any] = {"retry": RETRY, "rng": world.stream(f"producer {life.name}")}
        if profile.is_idempotent:
            options["idempotent"] = True
        if profile.has_states:
            options |= {"name": NAME, "state_store": _States(self, life)}
        options |= {name: value for name, value in profile.options.items() if name in _KNOWN}
        producer = HubProducer(transport, self.hub.name, **options)
        worker = _Worker(life, transport, producer)
        self.workers.append(worker)
        world.note("start", life.name)
        work: Callable[[_Worker, random.Random], Any] = getattr(self, f"_{profile.work}")
        worker.run = world.spawn(life, work(worker, world.stream(f"work of {life.name}")), f"work of {life.name}")
        worker.is_stopping = self.is_over

    def _event(self, partition_id: str | None) -> _Event:
        self._count += 1
        event = _Event(f"e{self._count}", partition_id)
        self.events[event.body] = event
        return event

    def _given(self, worker: _Worker, partition_id: str) -> tuple[_Event, EventData]:
        event = self._event(partition_id)
        given = EventData(event.body)
        worker.kept.append(given)
        worker.given[id(given)] = event
        return event, given

    def _call(self, worker: _Worker, work: Any, name: str) -> asyncio.Task[Any]:
        """Begin a call that must end."""
        call = self.world.spawn(worker.life, work, name)
        worker.calls[call] = name
        call.add_done_callback(lambda task: worker.calls.pop(task, None))
        return call

    async def _send(self, worker: _Worker, rng: random.Random) -> None:
        """Send events that no other producer sends, each list once."""
        while not worker.is_stopping and not worker.is_shut_out:
            partition_id = rng.choice(self.hub.partition_ids)
            events = [self._event(partition_id) for _ in range(rng.randint(1, 4))]
            call = self._call(worker, self._send_once(worker, events, rng), f"send of {events[0].body}")
            if rng.random() < 0.7:
                await asyncio.wait({call})
            await asyncio.sleep(rng.uniform(0.0, 2.0))

    async def _send_once(self, worker: _Worker, events: Sequence[_Event], rng: random.Random) -> None:
        given = [EventData(event.body) for event in events]
        name = f"{worker.life.name} {events[0].body}..{events[-1].body}"
        while True:
            try:
                await worker.producer.send(given, partition_id=events[0].partition_id)
            except asyncio.CancelledError:
                self.world.note("send cancelled", name)
                return
            except PublishOutcomeUnknownError as error:
                self.world.note("send in doubt", name, repr(error)[:100])
                if rng.random() < 0.5:
                    await asyncio.sleep(rng.uniform(0.0, 3.0))
                    continue  # the same list again joins its settlement
            except EventPumpError as error:
                self._note_error(worker, name, error)
            else:
                self.world.note("sent", name)
                for event in events:
                    event.acknowledged = True
            return

    def _note_error(self, worker: _Worker, name: str, error: EventPumpError) -> None:
        self.world.note("send failed", name, repr(error)[:120])
        if isinstance(error, ClosedError) and not worker.is_closing:
            self.world.violate(f"{name}: {error!r}, and it was not closed")
        if isinstance(error, ProducerDisconnectedError) and self.profile.options.get("mode") == "replayable":
            self.world.violate(f"{name}: {error!r}, where processes may overlap")
        is_final = isinstance(error, ProducerDisconnectedError | InvalidClientStateError | ClosedError)
        if is_final or type(error).__name__ == "ProducerStateLostError":
            worker.is_shut_out = True

    async def _loop(self, worker: _Worker, rng: random.Random) -> None:
        """Do what README shows: go on with the orders where the partition stands."""
        for partition_id in self.hub.partition_ids:
            try:
                known = await worker.producer.get_partition_publishing_properties(partition_id)
                assert known.events_published is not None
                self.world.note("goes on", worker.life.name, f"{partition_id} at {known.events_published}")
                for start in range(known.events_published, self.orders, self.chunk):
                    if worker.is_stopping and not self.is_over:
                        return
                    bodies = [
                        f"{partition_id}/{number}" for number in range(start, min(start + self.chunk, self.orders))
                    ]
                    await self._send_order(worker, partition_id, bodies)
                    await asyncio.sleep(0.0 if self.is_over else rng.uniform(0.0, 3.0))
            except EventPumpError as error:
                self._note_error(worker, f"{worker.life.name} orders of {partition_id}", error)
                return

    async def _send_order(self, worker: _Worker, partition_id: str, bodies: Sequence[str]) -> None:
        events = [EventData(body) for body in bodies]
        while True:
            call = self._call(worker, worker.producer.send(events, partition_id=partition_id), f"send of {bodies[0]}")
            await asyncio.wait({call})
            if call.cancelled():
                continue  # the user's time-out: the same list again
            error = call.exception()
            if error is None:
                self.world.note("sent", worker.life.name, bodies[0])
                for body in bodies:
                    self.events[body] = _Event(body, partition_id, acknowledged=True)
                return
            if not isinstance(error, PublishOutcomeUnknownError):
                raise error
            self.world.note("send in doubt", worker.life.name, bodies[0])

    async def _buffer(self, worker: _Worker, rng: random.Random) -> None:
        """Send single events through a buffer, with callbacks that raise."""

        def on_success(events: Sequence[EventData], partition_id: str) -> None:
            for event in events:
                worker.given[id(event)].ended += 1
                worker.given[id(event)].acknowledged = True
            self._misbehave(rng)

        def on_error(events: Sequence[EventData], partition_id: str, error: Exception) -> None:
            self.world.note("buffer failed", worker.life.name, f"{len(events)} to {partition_id}: {error!r}"[:140])
            for event in events:
                worker.given[id(event)].ended += 1
            self._misbehave(rng)

        settings = BufferSettings(
            max_batch_events=rng.randint(1, 10),
            max_wait_time=rng.choice((0.005, 0.5)),
            max_events=rng.choice((10, 100)),
        )
        worker.buffered = HubBufferedProducer(worker.producer, settings, on_success=on_success, on_error=on_error)
        while not worker.is_stopping:
            partition_id = rng.choice(self.hub.partition_ids)
            call = self._call(worker, self._accept(worker, partition_id), "a buffer's send")
            if rng.random() < 0.5:
                await asyncio.wait({call})
            if rng.random() < 0.1:
                self._call(worker, worker.buffered.flush(), "flush")
            await asyncio.sleep(rng.uniform(0.0, 1.0))

    async def _accept(self, worker: _Worker, partition_id: str) -> None:
        assert worker.buffered is not None
        event, given = self._given(worker, partition_id)
        try:
            receipt = await worker.buffered.send(given, partition_id=partition_id)
        except EventPumpError as error:
            self.world.note("not accepted", worker.life.name, repr(error)[:100])
            return
        worker.accepted.append(event)
        try:
            await receipt
        except EventPumpError:
            return
        event.acknowledged = True

    def _misbehave(self, rng: random.Random) -> None:
        chance = rng.random()
        if self.is_over or chance > 0.1:
            return
        self.world.note("callback raises")
        if chance < 0.03:
            raise asyncio.CancelledError("the callback's own")
        if chance < 0.05:
            raise Oddity("the callback's")
        raise RuntimeError("the callback's")

    # -------------------------------------------------------------------------------------------------- actions

    async def kill(self) -> None:
        if self._living:
            worker = self.world.rng.choice(self._living)
            self.world.note("kill", worker.life.name)
            worker.life.kill()
            worker.transport.lose(ConnectionLostError("the process was killed"))

    async def close(self, worker: _Worker | None = None) -> None:
        if worker is None and self._living:
            worker = self.world.rng.choice(self._living)
        if worker is None:
            return
        self.world.note("close", worker.life.name)
        worker.is_stopping = worker.is_closing = True
        self._call(worker, self._close(worker), "close")

    async def _close(self, worker: _Worker) -> None:
        try:
            await (worker.buffered or worker.producer).aclose()
        except EventPumpError as error:
            self.world.note("closed in doubt", worker.life.name, repr(error)[:100])
        self.world.note("closed", worker.life.name)
        worker.has_closed = True

    async def freeze(self) -> None:
        if self._living:
            worker = self.world.rng.choice(self._living)
            self.world.note("freeze", worker.life.name)
            worker.life.freeze()

    async def wake(self) -> None:
        frozen = [worker for worker in self.workers if worker.life.is_frozen and not worker.life.is_dead]
        if frozen:
            worker = self.world.rng.choice(frozen)
            self.world.note("wake", worker.life.name)
            worker.life.wake(self.world.loop)

    async def cancel(self) -> None:
        calls = [call for worker in self._living for call, name in worker.calls.items() if name.startswith("send of")]
        if calls:
            call = self.world.rng.choice(calls)
            self.world.note("cancel", call.get_name())
            call.cancel()

    async def cancel_a_task(self) -> None:
        """Cancel a task that a producer has started, as a program does that cancels whatever runs in its loop."""
        tasks = [
            task
            for worker in self._living
            for task in worker.life.tasks()
            if task.get_name().startswith(("eventpump publisher", "eventpump start", "eventpump mark"))
        ]
        if tasks:
            task = self.world.rng.choice(tasks)
            self.world.note("cancel a task", task.get_name())
            task.cancel()

    async def lose(self) -> None:
        rng = self.world.rng
        fault, connection, after = rng.choice(list(SendFault)), rng.random() < 0.3, rng.randint(0, 3)
        self.world.note("lose", fault.value, "and the connection" if connection else "", after)
        self.hub.lose(fault, connection=connection, after=after)

    async def deliver_late(self) -> None:
        self.world.note("deliver late", self.hub.deliver_late())

    async def end_links(self) -> None:
        if self._living:
            rng = self.world.rng
            worker = rng.choice(self._living)
            condition = rng.choice(["amqp:link:detach-forced", rng.choice(DETACHES)])
            self.world.note("end links", worker.life.name, condition)
            for link in worker.transport.links:
                if isinstance(link, FakeSendLink):
                    link.end(error_for(condition, "by the history"))

    async def refuse(self) -> None:
        rng = self.world.rng
        operation, condition = rng.choice(("send", "transfer", "hub")), rng.choice(REFUSALS)
        self.world.note("refuse", operation, condition)
        self.hub.refuse(error_for(condition, "by the history"), operation=operation, times=float("inf"))

    async def accept(self) -> None:
        self.hub.accept()

    async def hang(self) -> None:
        operation = self.world.rng.choice(("send", "transfer", "credit"))
        if operation not in self.hanging:
            self.world.note("hang", operation)
            self.hanging.add(operation)
            self.hub.hang(operation)

    async def answer(self) -> None:
        for operation in sorted(self.hanging):
            self.world.note("answer", operation)
            self.hub.answer(operation)
        self.hanging.clear()

    async def make_again(self) -> None:
        self.world.note("make again")
        for partition_id in self.hub.partition_ids:
            self.archive += self._stored(partition_id)
        make_again(self.hub)
        for worker in self.workers:
            for link in worker.transport.links:
                if isinstance(link, FakeSendLink):
                    link.end(error_for("amqp:resource-deleted", "the hub was deleted"))

    async def forget(self) -> None:
        accept_unknown_producers = self.world.rng.random() < 0.5
        self.world.note("forget", "unknown producers are", "accepted" if accept_unknown_producers else "refused")
        self.was_forgotten = True
        for partition_id in self.hub.partition_ids:
            self.hub.partition(partition_id).publishing.forget(accept_unknown_producers=accept_unknown_producers)
        for worker in self._living:
            for link in worker.transport.links:
                if isinstance(link, FakeSendLink):
                    link.end(error_for("amqp:link:detach-forced", "the service was moved"))

    async def trouble_states(self) -> None:
        self.trouble = self.world.rng.choice(("fails", "loses", "cancels", "hangs"))
        self.world.note("states", self.trouble)

    async def heal(self) -> None:
        self.trouble = None


async def producer_history(world: World, size: int) -> None:
    """Live one history of producers. Its profile is the part of its kind behind "producer:"."""
    name = world.kind.partition(":")[2]
    world.note("profile", name)
    await ProducerHistory(world, PROFILES[name]).run(size)
