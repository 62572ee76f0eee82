"""Histories of applications whose results go to a real hub: its service forgets publishers, and it comes back smaller.

Beside what must hold of decorated functions: nothing that happens to the hub of the results ends an application without
a state store; each result is stored at most as often as the function was called for its event; and when the faults have
ended, results are stored again, by a new producer where the former can publish nothing more. The functions call back
into their host, and flush the producer.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from eventpump import KeyedProcessor, PartitionContext, ReceivedEvent
from eventpump.app.handlers import Handler, ResultDestination, RoutedFunction, RouteProcessor
from eventpump.app.results import ResultPublisher
from eventpump.errors import ConnectionLostError, EventPumpError, ServiceError
from eventpump.eventhubs.conditions import SERVER_BUSY, error_for
from eventpump.eventhubs.decoding import PAYLOADS
from eventpump.eventhubs.events import EventData
from eventpump.options.base import RetryOptions
from eventpump.options.producer import BufferSettings
from eventpump.producer.buffered import HubBufferedProducer
from eventpump.producer.producer import HubProducer
from eventpump.testing.transport import FakeHub, FakeSendLink, SendFault
from tests.faults.histories.app import PROFILES as APP_PROFILES
from tests.faults.histories.app import AppHistory, AppLedger, UnrulyFunction
from tests.faults.histories.callbacks import Callbacks
from tests.faults.histories.consumer import HistoryHost, Profile, on_file
from tests.faults.histories.keyed import key_of
from tests.faults.histories.ledger import Call
from tests.faults.histories.world import Life, LifeTransport, World, own_paces

_RETRY = RetryOptions(max_retries=2, base_delay=0.2, max_delay=2.0)
_RESULTS = {
    "forget": 1.5,
    "recreate results": 1.0,
    "refuse results": 0.7,
    "accept results": 2.0,
    "cut results": 1.0,
    "lose an answer": 3.0,
    "late results": 1.0,
}

PROFILES: dict[str, Profile] = {
    name: Profile(
        {**APP_PROFILES["plain"].actions, **_RESULTS, "publish": 8.0},
        APP_PROFILES["plain"].works,
        APP_PROFILES["plain"].checkpoints,
        is_asking=True,
        backlog=(0, 60),
    )
    for name in ("publishers", "keyed-publishers")
}


class _ResultsHub(FakeHub):
    """A hub that shows what is stored in it."""

    def __init__(self, on_stored: Callable[[bytes], None], partitions: int, latency: float) -> None:
        self._on_stored = on_stored
        super().__init__("results", partitions, latency=latency)

    def _store(self, partition: Any, raw: bytes) -> int:
        number = super()._store(partition, raw)
        self._on_stored(ReceivedEvent(partition.raw[-1]).body)
        return number


class _PublishersLedger(AppLedger):
    """What functions are judged by whose results are counted."""

    def __init__(self, *args: Any, is_keyed: bool, is_idempotent: bool) -> None:
        super().__init__(*args, is_keyed=is_keyed)
        self._is_idempotent = is_idempotent
        self._calls: Counter[bytes] = Counter()
        self._copies: Counter[bytes] = Counter()

    def begin(self, host: str, partition_id: str, epoch: int, events: tuple[ReceivedEvent, ...]) -> Call:
        """Record a call of the function."""
        self._calls.update(event.body for event in events)
        return super().begin(host, partition_id, epoch, events)

    def stored_in_hub(self, body: bytes) -> None:
        """Record that the hub of the results holds one more."""
        self._copies[body] += 1
        if self._is_idempotent and self._copies[body] > self._calls[body]:
            self._world.violate(
                f"the result {body!r} is stored {self._copies[body]} times, of {self._calls[body]} calls"
            )
        self.result_stored(EventData(body))


class _CallingFunction(UnrulyFunction):
    """A decorated function that calls its host and its producer."""

    history: PublishersHistory

    async def _process(self, context: PartitionContext, events: Any, call: Call) -> None:
        rng, history, life = self._rng, self.history, self._life
        if rng.random() < 0.06:
            host = history.host_of(life)
            await history.callbacks.ask(life, host.host, context, rng, number=events[0].sequence_number)
        elif rng.random() < 0.03:
            producer = history.publishers[life.name]._producer
            assert producer is not None
            flushed = producer.flush()
            await history.callbacks.tracked(
                f"{life.name} flush", life, asyncio.wait_for(flushed, rng.choice((1.0, 9.0)))
            )
        await super()._process(context, events, call)


class PublishersHistory(AppHistory):
    """One history of an application and the hub of its results."""

    ledger: _PublishersLedger

    def __init__(self, world: World, profile: Profile, directory: Path | None, *, is_keyed: bool) -> None:
        super().__init__(world, profile, directory, is_keyed=is_keyed)
        rng = world.stream("results")
        if rng.random() < 0.7:
            # What cannot be published is not passed over. With keys, retries need a limit.
            self.options |= {
                "failure_policy": "retry",
                "handler_retry": RetryOptions(max_retries=100 if is_keyed else None, base_delay=0.2, max_delay=3.0),
            }
        self.is_idempotent = rng.random() < 0.7
        self.ledger = _PublishersLedger(
            world, self.hub, self.start, is_keyed=is_keyed, is_idempotent=self.is_idempotent
        )
        latency = rng.choice((0.0, 0.01, 0.3))
        self.results = _ResultsHub(self.ledger.stored_in_hub, rng.randint(1, 4), latency)
        self.publishers: dict[str, ResultPublisher] = {}
        self.callbacks = Callbacks(world)
        self._transports: dict[str, list[LifeTransport]] = {}
        self._settings: dict[str, Any] = {
            "max_batch_events": rng.choice((1, 5, 100)),
            "max_wait_time": rng.choice((0.0, 0.005, 0.5)),
            "max_events": rng.choice((10, 1000)),
        }
        self._spreads = rng.random() < 0.5
        world.note("results", "idempotent" if self.is_idempotent else "", self._settings)

    def host_of(self, life: Life) -> HistoryHost:
        """Return the host of a process."""
        return next(each for each in self.hosts if each.life is life)

    def processor(self, life: Life) -> Any:
        function = _CallingFunction(self.world, life, self.ledger, self.manners)
        function.history = self
        publisher = self.publishers[life.name] = ResultPublisher(
            self.results.name,
            partial(self._make, life),  # type: ignore[arg-type]  # what the client is over its transport
            keeps_state=False,
            on_opened=lambda producer: self.world.note("opened", life.name),
            on_final=lambda error: self.world.violate(f"{life.name}: the application ends: {error!r}"),
        )
        key = self._key if self._spreads else (lambda value: None)
        route = RoutedFunction(
            Handler(function.handle, PAYLOADS), [ResultDestination("results", partition_key=key, producer=publisher)]
        )
        if self.is_keyed:
            return KeyedProcessor(route.handle_keyed, key=key_of, concurrency=self._parking.choice((1, 3, 10)))
        return partial(RouteProcessor, route)

    @staticmethod
    def _key(value: bytes) -> str:
        return value.decode()

    def _make(self, life: Life, on_error: Any) -> HubBufferedProducer:
        transport = LifeTransport(self.results, life)
        transports = self._transports.setdefault(life.name, [])
        transports.append(transport)
        rng = self.world.stream(f"producer {len(transports)} of {life.name}")
        producer = HubProducer(transport, self.results.name, idempotent=self.is_idempotent, retry=_RETRY, rng=rng)
        return HubBufferedProducer(producer, BufferSettings(**self._settings), on_error=on_error)

    async def work_of(self, host: HistoryHost) -> None:
        """Run an application: its producer is open before its host, and closed after it."""
        publisher = self.publishers[host.life.name]
        while True:
            try:
                await publisher.open()
                break
            except ServiceError as error:
                self.world.note("not open", host.life.name, repr(error)[:120])
                await asyncio.sleep(1.0)
        try:
            await super().work_of(host)
        finally:
            with contextlib.suppress(EventPumpError):
                await publisher.aclose()

    # ------------------------------------------------------------------------------------------------ what happens

    async def crash(self) -> None:
        await super().crash()
        for host in self.hosts:
            if host.life.is_dead:
                for transport in self._transports.pop(host.life.name, ()):
                    transport.lose(ConnectionLostError("the process was killed"))

    def _links(self) -> list[FakeSendLink]:
        every = [link for each in self._transports.values() for transport in each for link in transport.links]
        return [link for link in every if isinstance(link, FakeSendLink)]

    async def forget(self) -> None:
        self.world.note("forget")
        for partition_id in self.results.partition_ids:
            self.results.partition(partition_id).publishing.forget(accept_unknown_producers=False)
        for link in self._links():
            link.end(error_for("amqp:link:detach-forced", "the service was moved"))

    async def recreate_results(self) -> None:
        count = self.world.rng.randint(1, 4)
        self.world.note("recreate results", f"with {count} partitions")
        self.results.recreate(count)
        for link in self._links():
            link.end(error_for("amqp:not-found", "the hub was deleted"))

    async def refuse_results(self) -> None:
        error = self.world.rng.choice(
            (error_for(SERVER_BUSY, "by the history"), error_for("amqp:not-found", "by the history"))
        )
        self.world.note("refuse results", type(error).__name__)
        self.results.refuse(error)

    async def accept_results(self) -> None:
        self.world.note("accept results")
        self.results.accept()

    async def cut_results(self) -> None:
        self.world.note("cut results")
        self.results.lose_connections()

    async def lose_an_answer(self) -> None:
        rng = self.world.rng
        fault, connection, after = rng.choice(list(SendFault)), rng.random() < 0.3, rng.choice((0, 0, 1, 3))
        self.world.note("lose an answer", fault.name, connection, after)
        self.results.lose(fault, connection=connection, after=after)

    async def late_results(self) -> None:
        self.world.note("late results", self.results.deliver_late())

    async def _end_faults(self) -> None:
        await self.accept_results()
        await self.late_results()
        if self.world.rng.random() < 0.5:
            await self.act(self.world.rng.choice(("forget", "recreate results")))
        await super()._end_faults()

    async def _end(self) -> None:
        await super()._end()
        if waiting := self.callbacks.waiting:
            self.world.violate(f"{waiting[0]} neither returned nor raised")


async def publishers_history(world: World, size: int) -> None:
    """Live one history of decorated functions with publishers; its profile is the part of its kind behind "app:"."""
    name = world.kind.partition(":")[2]
    with on_file(world, is_wanted=False) as directory, own_paces():
        await PublishersHistory(world, PROFILES[name], directory, is_keyed=name == "keyed-publishers").run(size)
